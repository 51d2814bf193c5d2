"""Products with the Jacobians of a module's parameters, see ``input_base.py``."""

from abc import ABC
from functools import partial
from typing import Any, Callable, Sequence, Tuple

from torch import Tensor, no_grad, stack, zeros_like

from backpack.core.derivatives import shape_check, stored
from backpack.core.derivatives.generic import generic_product
from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.per_sample.base import Dense, PerSample
from backpack.hessianfree.rop import R_op
from backpack.utils.subsampling import Subsampling
from backpack.utils.types import Grads, Layer, as_type


def _for_parameter(name: str, method: str) -> Callable[..., Tensor]:
    """Make the product for one parameter from that for any, which may be overridden."""

    def product(self, *args: Any, **kwargs: Any) -> Tensor:
        return getattr(self, method)(name, *args, **kwargs)

    return product


class BaseParameterDerivatives(BaseDerivatives, ABC):
    """Products with a module's Jacobians with respect to its parameters.

    A layer family says how a parameter's vector-Jacobian products look
    (:meth:`product`), and whether it is affine in its parameters.

    Attributes:
        affine_in_params: Whether the output is affine in each parameter while the
            others are fixed, and in all of them together (weight times something plus
            bias). Forward products are then the module itself, with the vector in
            place of the parameter and zeros in place of the others. Default: ``False``.
    """

    affine_in_params = False

    def supports(self, module: Layer, inputs: Tuple[Any, ...]) -> bool:
        """Tell whether :meth:`product` covers a call.

        Args:
            module: The module.
            inputs: Inputs of the call.

        Returns:
            Whether it does, by default ``True``; the generic rule must do otherwise.
        """
        return True

    @shape_check.param_mjp_accept_vectors
    def param_mjp(
        self,
        param_str: str,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: Subsampling = None,
    ) -> Tensor:
        """Multiply with the transposed Jacobian of the output w.r.t. a parameter.

        Args:
            param_str: Name of the parameter.
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, N, *out]``, or vector ``[N, *out]``; with
                ``subsampling``, N is the number of selected samples.
            sum_batch: Whether to sum over samples. Default: ``True``.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            Products of shape ``[V, *p]``, or ``[V, N, *p]`` without summation over
            samples; without the axis ``V`` for a vector.
        """
        shape_check._check_like(mat, module, "output", subsampling=subsampling)
        if subsampling is not None and not mat.shape[1]:  # not all modules run on none
            shape = stored.find_parameter(module, param_str).shape
            return mat.new_zeros(len(mat), *(() if sum_batch else (0,)), *shape)
        generic = partial(self._param_mjp, param_str)
        multiply = getattr(self, f"_{param_str}_jac_t_mat_prod", generic)
        options: Any = {"sum_batch": sum_batch, "subsampling": subsampling}
        result = multiply(module, g_inp, g_out, mat, **options)
        shape_check.check_same_V_dim(result, mat)
        shape_check.check_like_with_sum_batch(result, module, param_str, sum_batch)
        return result

    def _param_mjp(
        self,
        param_str: str,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: Subsampling = None,
    ) -> Tensor:
        product = self._selected_product(param_str, module, mat, subsampling)
        return product.summed() if sum_batch else product.individual()

    def _selected_product(
        self, name: str, module: Layer, mat: Tensor, subsampling: Subsampling
    ) -> PerSample:
        module = self._restrict(module, subsampling)
        return self.product(name, module, stored.stored_inputs(module), mat)

    # a class for a layer of its own may override these, and the same for other names
    _weight_jac_t_mat_prod = _for_parameter("weight", "_param_mjp")
    _bias_jac_t_mat_prod = _for_parameter("bias", "_param_mjp")

    def stored_product(
        self, name: str, module: Layer, g_inp: Grads, g_out: Grads, cotangents: Tensor
    ) -> PerSample:
        """Describe the products of :meth:`param_mjp` for the stored inputs.

        Args:
            name: Name of the parameter.
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            cotangents: Columns at the output, ``[V, N, *out]``.

        Returns:
            The products, in the layer's form unless a class has its own way to
            multiply.
        """
        cotangents = as_type(cotangents, module.output.dtype)
        method = f"_{name}_jac_t_mat_prod"
        pair = type(self), BaseParameterDerivatives
        own, inherited = (getattr(cls, method, None) for cls in pair)
        if own is inherited:
            inputs = stored.stored_inputs(module)
            return self.product(name, module, inputs, cotangents)
        multiply = getattr(self, method)
        products = multiply(module, g_inp, g_out, cotangents, sum_batch=False)
        return Dense(products, products.shape[2:])

    def product(
        self, name: str, module: Layer, inputs: Sequence[Any], cotangents: Tensor
    ) -> PerSample:
        """Describe the per-sample vector-Jacobian products of a parameter.

        Args:
            name: Name of the parameter.
            module: Module. Nothing stored on it may be used, as it may have been called
                more than once, unless the class is for modules with stored output.
            inputs: Inputs of the call.
            cotangents: Columns at the call's output, ``[V, N, *out]``.

        Returns:
            The products in the cheapest form that the layer has, by default those of
            the module's own forward pass, differentiated sample by sample.
        """
        return generic_product(name, module, inputs, cotangents)

    def weight_jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        """Multiply with the Jacobian of the output with respect to the weight.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, *weight]``, or vector ``[*weight]``.

        Returns:
            Products of shape ``[V, N, *out]``, or ``[N, *out]``.
        """
        return self.param_jac_mat_prod("weight", module, g_inp, g_out, mat)

    def bias_jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        """Multiply with the Jacobian of the output with respect to the bias.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, *bias]``, or vector ``[*bias]``.

        Returns:
            Products of shape ``[V, N, *out]``, or ``[N, *out]``.
        """
        return self.param_jac_mat_prod("bias", module, g_inp, g_out, mat)

    def param_jac_mat_prod(
        self, param_str: str, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        """Multiply with the Jacobian of the output with respect to a parameter.

        Args:
            param_str: Name of the parameter.
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, *p]``, or vector ``[*p]``.

        Returns:
            Products of shape ``[V, N, *out]``, or ``[N, *out]``.
        """
        generic = partial(self._param_jac_mat_prod, param_str)
        multiply = getattr(self, f"_{param_str}_jac_mat_prod", generic)

        @shape_check.product(param_str, "output")
        def checked(self, *args: Any) -> Tensor:
            return multiply(*args)

        return checked(self, module, g_inp, g_out, mat)

    def _param_jac_mat_prod(
        self, param_str: str, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if not self.affine_in_params:
            param, y = stored.evaluate_parameter(module, param_str)
            return stack([R_op(y, param, v)[0] for v in mat])
        inputs, scratch = stored.stored_inputs(module), stored.scratch_copy(module)
        zeros = {name: zeros_like(p) for name, p in module.named_parameters()}
        repeat = partial(stored.repeat, module, inputs, scratch, is_checked=False)
        with no_grad():
            return stack([repeat({**zeros, param_str: v}) for v in mat])

    _weight_jac_mat_prod = _for_parameter("weight", "_param_jac_mat_prod")
    _bias_jac_mat_prod = _for_parameter("bias", "_param_jac_mat_prod")
