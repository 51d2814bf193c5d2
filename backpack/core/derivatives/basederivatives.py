"""Interface of all derivatives, and rules from automatic differentiation as defaults.

A module computes z = f(x, θ) for a mini-batch. Shapes:

- x is ``module.input0``, ``[N, *in]``; z is ``module.output``, ``[N, *out]``.
- A matrix that is multiplied has ``V`` columns on axis 0: ``[V, N, *out]`` is pulled
  back to ``[V, N, *in]``, for instance. All public methods check shapes and accept a
  single vector, ``[N, *out]``, in which case the result has no axis ``V``, either.

Public methods check and select samples; ``_private`` methods of the same name hold the
maths. A class that defines none of them gets the generic ones below. These are right
for every module that is differentiable in its first input; other inputs are constants.
"""

from abc import ABC, abstractmethod
from functools import partial
from math import nan
from typing import Any, Callable, List, Tuple

from torch import Tensor, enable_grad, no_grad, ones_like, stack, zeros_like
from torch.autograd import grad
from torch.func import functional_call, vjp
from torch.nn import Module, Parameter

from backpack.core.derivatives import shape_check
from backpack.core.derivatives.generic import (
    generic_product,
    generic_products,
    is_repetition,
)
from backpack.core.reductions import Dense, PerSample
from backpack.hessianfree.rop import R_op
from backpack.utils.subsampling import num_selected, subsample
from backpack.utils.types import as_type
from backpack.utils.unsqueeze import flatten

NO_SCALAR_LOSS = (
    "{derivatives} needs a loss whose output is a scalar, but {module} has an output "
    "of shape {shape}. Use reduction='mean' or reduction='sum'."
)
NO_FLOAT_INPUT = (
    "{module} has an input of type {dtype} and no derivative with respect to it. Only "
    "products with its parameters' Jacobians (param_mjp) exist."
)
NO_DIAGONAL_HESSIAN = (
    "{derivatives}: the Hessian of {module} is not diagonal, so that its diagonal does "
    "not describe it. Use residual_mat_prod to multiply with it."
)
NOT_REPEATED = (
    "{module} is differentiated by repeating its forward pass, but the repetition gave "
    "another output: it draws random numbers, keeps a state, depends on the number of "
    "samples, takes keyword arguments out of order, or something was modified after "
    "the call (its parameters, or its output by a layer with inplace=True). Write it "
    "without these, or register a module extension for it."
)
OVERWRITTEN = "_backpack_overwritten"
"""Marks copies of modules whose output was modified in place after the call."""
OUTPUT_TYPE = "_backpack_output_type"
"""Attribute of copies of modules: their output's type before it was converted."""


def stored_inputs(module: Module) -> Tuple[Any, ...]:
    """Collect the inputs of a module's last forward pass.

    Args:
        module: Module with attributes ``input0``, ``input1``, ...

    Returns:
        The inputs.
    """
    inputs = []
    while hasattr(module, f"input{len(inputs)}"):
        inputs.append(getattr(module, f"input{len(inputs)}"))
    return tuple(inputs)


def shallow_copy(module: Module, **attributes: Any) -> Module:
    """Copy a module without copying anything it holds.

    Args:
        module: The module.
        attributes: What the copy holds instead, by name.

    Returns:
        Module of the same class that shares all other attributes.
    """
    copy = object.__new__(type(module))
    copy.__dict__.update({**module.__dict__, **attributes})
    return copy


def scratch_copy(module: Module, **attributes: Any) -> Module:
    """Copy a module such that evaluating the copy leaves the module alone.

    Args:
        module: The module.
        attributes: What the copy holds instead, by name.

    Returns:
        Module that shares parameters, but neither buffers (running statistics) nor what
        a hook stores on it or its children.
    """
    buffers, children = module._buffers.items(), module._modules.items()
    return shallow_copy(
        module,
        _buffers={name: b if b is None else b.clone() for name, b in buffers},
        _modules={name: m if m is None else scratch_copy(m) for name, m in children},
        **attributes,
    )


def subsampled(module: Module, subsampling: List[int] = None) -> Module:
    """Restrict a module's stored inputs and output to some samples.

    Args:
        module: Module with stored inputs and output. It is not changed.
        subsampling: Selected samples. ``None`` selects all.

    Returns:
        The same module for ``None``. Else a shallow copy, which shares everything with
        the module except for its inputs and output.
    """
    if subsampling is None:
        return module
    names = [f"input{idx}" for idx in range(len(stored_inputs(module)))] + ["output"]
    stored = {name: getattr(module, name) for name in names}
    selected = {
        name: subsample(value, subsampling=subsampling)
        for name, value in stored.items()
        if isinstance(value, Tensor)
        and not isinstance(value, Parameter)  # an operation's argument: no samples
        and value.dim() > 0
    }
    return shallow_copy(module, **selected)


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of a module's output.

    Args:
        output: Tensor or (nested) tuple.

    Returns:
        The tensor itself or the first one of the tuple.
    """
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output


def recorded_output(module: Module) -> Tensor:
    """Return a module's output in the type, and so the precision, that it had.

    Args:
        module: Module with stored output.

    Returns:
        The output ``[N, *out]``.
    """
    output = module.output
    return output.to(vars(module).get(OUTPUT_TYPE, output.dtype))


def checked(module: Module, output: Any) -> Tensor:
    """Check that repeating a module's forward pass gave its stored output.

    Args:
        module: Module with stored output.
        output: What the repetition returned.

    Returns:
        The first tensor of the repetition's output.

    Raises:
        RuntimeError: If it is not the stored one.
    """
    output = first_tensor(output)
    expected = recorded_output(module)
    if OVERWRITTEN not in vars(module) and not is_repetition(output.detach(), expected):
        raise RuntimeError(NOT_REPEATED.format(module=module))
    return output


def evaluate(module: Module) -> Tuple[Tensor, Tensor]:
    """Compute a module's output anew at its stored inputs, with a graph of its own.

    Args:
        module: Module with stored inputs.

    Returns:
        Input ``[N, *in]`` and output ``[N, *out]``, connected by a graph.

    Raises:
        ValueError: If the input is not of floating point type.
    """
    x, *others = stored_inputs(module)
    if not x.is_floating_point():
        raise ValueError(NO_FLOAT_INPUT.format(module=module, dtype=x.dtype))
    x = x.detach().requires_grad_()
    with enable_grad():
        # a module may work in-place, which is forbidden on leaves
        return x, checked(module, scratch_copy(module).forward(x.clone(), *others))


def pull_back(y: Tensor, x: Tensor, mat: Tensor) -> Tensor:
    """Multiply columns with a transposed Jacobian.

    Args:
        y: Tensor ``[*y]``, computed from ``x``.
        x: Tensor ``[*x]``.
        mat: Columns of shape ``[V, *y]``.

    Returns:
        Products (∂y/∂x)ᵀ v of shape ``[V, *x]``; zeros if y does not depend on x.
    """
    if not y.requires_grad:
        return x.new_zeros(mat.shape[:1] + x.shape)
    return stack(
        [
            grad(y, x, v, retain_graph=True, allow_unused=True, materialize_grads=True)[
                0
            ]
            for v in mat.to(y.dtype)
        ]
    )


class BaseDerivatives(ABC):  # noqa: B024
    """Products with a module's Jacobian and residual with respect to its input.

    The generic rules need no further definition, only the predicates
    :meth:`hessian_is_zero` and :meth:`hessian_is_diagonal` should say what is known.
    """

    @shape_check.jac_mat_prod_accept_vectors
    @shape_check.jac_mat_prod_check_shapes
    def jac_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        """Multiply with the Jacobian of the output with respect to the input.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, N, *in]``, or vector ``[N, *in]``.

        Returns:
            Products (∂z/∂x) v of shape ``[V, N, *out]``, or ``[N, *out]``.
        """
        return self._jac_mat_prod(module, g_inp, g_out, mat)

    def _jac_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        x, y = evaluate(module)
        return stack([R_op(y, x, v)[0] for v in mat.to(x.dtype)])

    @shape_check.jac_t_mat_prod_accept_vectors
    @shape_check.jac_t_mat_prod_check_shapes
    def jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mat: Tensor,
        subsampling: List[int] = None,
    ) -> Tensor:
        """Multiply with the transposed Jacobian of the output w.r.t. the input.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, N, *out]``, or vector ``[N, *out]``; with
                ``subsampling``, N is the number of selected samples.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            Products (∂z/∂x)ᵀ v of shape ``[V, N, *in]``, or ``[N, *in]``.
        """
        module = self._restrict(module, subsampling)
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)

    def _jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mat: Tensor,
        subsampling: List[int] = None,
    ) -> Tensor:
        """Multiply with the transposed Jacobian, see :meth:`jac_t_mat_prod`.

        Args:
            module: Module whose stored tensors hold the selected samples only.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, N, *out]``.
            subsampling: Always ``None``: samples were selected by the caller.

        Returns:
            Products of shape ``[V, N, *in]``.
        """
        x, y = evaluate(module)
        return pull_back(y, x, mat)

    def _restrict(self, module: Module, subsampling: List[int] = None) -> Module:
        """Select samples before the maths.

        Args:
            module: Module with stored input and output.
            subsampling: Selected samples. ``None`` selects all.

        Returns:
            Module with the selected samples, see :func:`subsampled`.

        Raises:
            ValueError: If axis 0 of input and output are not both the samples.
        """
        sizes = module.input0.shape[:1], module.output.shape[:1]
        if subsampling is not None and sizes[0] != sizes[1]:
            raise ValueError(
                f"{module} maps an input with {list(sizes[0])} samples (axis 0) to an "
                f"output with {list(sizes[1])}, so that samples cannot be told apart. "
                "Axis 0 must hold the samples before and after the module."
            )
        return subsampled(module, subsampling)

    def ea_jac_t_mat_jac_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        """Multiply with the Jacobian from both sides and average over samples.

        The step of the KFRA recursion (Botev et al., "Practical Gauss-Newton
        Optimisation for Deep Learning", 2017).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix G of shape ``[out, out]``, where ``out`` is the number of output
                features of a sample.

        Returns:
            (1/N) Σₙ Jₙᵀ G Jₙ of shape ``[in, in]``.

        Raises:
            RuntimeError: If the matrix has another shape.
        """
        out = module.output.shape[1:].numel()
        if mat.shape != (out, out):
            raise RuntimeError(
                f"Expected a matrix of shape [{out}, {out}] for the output features of "
                f"{module}, but got {list(mat.shape)}."
            )
        if len(module.output) == 0:  # the mean of nothing
            size = module.input0.shape[1:].numel()
            return mat.new_full((size, size), nan)
        return self._ea_jac_t_mat_jac_prod(module, g_inp, g_out, mat)

    def _ea_jac_t_mat_jac_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        # one sample after the other, as a single one needs memory [out, in] already
        samples = 1 if self.jacobian_is_shared(module) else module.output.shape[0]
        products = (
            self._sandwich(self._restrict(module, [n]), g_inp, g_out, mat)
            for n in range(samples)
        )
        return sum(products) / samples

    def _sandwich(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        """Multiply with one sample's Jacobian from both sides.

        Args:
            module: Module whose stored tensors hold a single sample.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix G of shape ``[out, out]``.

        Returns:
            Jᵀ G J of shape ``[in, in]``.
        """
        for _ in range(2):  # G ↦ (G J)ᵀ, twice
            rows = mat.reshape(-1, *module.output.shape)
            mat = flatten(self._jac_t_mat_prod(module, g_inp, g_out, rows), 1).T
        return mat

    def jacobian_is_shared(self, module: Module) -> bool:
        """Tell whether every sample has the same Jacobian with respect to the input.

        Args:
            module: Module with stored input and output.

        Returns:
            ``True`` for modules that are affine in their input and treat all samples
            alike. Default: ``False``.
        """
        return False

    def hessian_is_zero(self, module: Module) -> bool:
        """Tell whether all second derivatives w.r.t. the input vanish (∂²z/∂x² = 0).

        Args:
            module: Module with stored input and output.

        Returns:
            Whether the output is (piecewise) linear in the input. Default: ``False``.
        """
        return False

    def hessian_is_diagonal(self, module: Module) -> bool:
        """Tell whether Σ_k δ_k ∂²z_k/∂x² is diagonal for every δ.

        Args:
            module: Module with stored input and output.

        Returns:
            Whether it is known to be diagonal. Default: whether it is zero.
        """
        return self.hessian_is_zero(module)

    def hessian_is_psd(self) -> bool:
        """Tell whether the Hessian of the output is positive semi-definite.

        Returns:
            Whether it is known to be so, for every input. Default: ``False``.
        """
        return False

    def hessian_diagonal(
        self, module: Module, g_in: Tuple[Tensor], g_out: Tuple[Tensor]
    ) -> Tensor:
        """Compute the diagonal of the residual Σ_k δ_k ∂²z_k/∂x², if it is diagonal.

        Args:
            module: Module with stored input and output.
            g_in: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs, δ.

        Returns:
            Diagonal of shape ``[N, *in]``.

        Raises:
            NotImplementedError: If the residual is not diagonal.
        """
        if not self.hessian_is_diagonal(module):
            raise NotImplementedError(
                NO_DIAGONAL_HESSIAN.format(
                    derivatives=type(self).__name__, module=module
                )
            )
        ones = ones_like(module.input0).unsqueeze(0)
        return self._differentiate_twice(module, g_out, ones).squeeze(0)

    @shape_check.residual_mat_prod_accept_vectors
    @shape_check.residual_mat_prod_check_shapes
    def residual_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        """Multiply with the residual Σ_k δ_k ∂²z_k/∂x².

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs, δ.
            mat: Matrix of shape ``[V, N, *in]``, or vector ``[N, *in]``.

        Returns:
            Products of the same shape as ``mat``.
        """
        return self._residual_mat_prod(module, g_inp, g_out, mat)

    def _residual_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        if self.hessian_is_zero(module):
            return zeros_like(mat)
        if self.hessian_is_diagonal(module):
            return self.hessian_diagonal(module, g_inp, g_out) * mat
        return self._differentiate_twice(module, g_out, mat)

    @staticmethod
    def _differentiate_twice(
        module: Module, g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        """Multiply with the Hessian of x ↦ ⟨δ, f(x)⟩.

        Args:
            module: Module with stored input and output.
            g_out: Gradients of the loss with respect to the module's outputs, δ.
            mat: Matrix of shape ``[V, N, *in]``.

        Returns:
            Products of the same shape.
        """
        x, y = evaluate(module)
        delta = g_out[0].detach().to(y.dtype)
        (gradient,) = grad(y, x, delta, create_graph=True)
        return pull_back(gradient, x, mat)

    @classmethod
    def reshape_like_input(
        cls, mat: Tensor, module: Module, subsampling: List[int] = None
    ) -> Tensor:
        """Reshape a matrix like the input, with an additional leading axis.

        Args:
            mat: Matrix of any shape with V · N · in elements.
            module: Module with stored input.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            Matrix of shape ``[V, N, *in]``.
        """
        return cls._reshape_like(mat, module.input0.shape, subsampling)

    @classmethod
    def reshape_like_output(cls, mat: Tensor, module: Module) -> Tensor:
        """Reshape a matrix like the output, with an additional leading axis.

        Args:
            mat: Matrix of any shape with V · N · out elements.
            module: Module with stored output.

        Returns:
            Matrix of shape ``[V, N, *out]``.
        """
        return cls._reshape_like(mat, module.output.shape)

    @staticmethod
    def _reshape_like(
        mat: Tensor, shape: Tuple[int, ...], subsampling: List[int] = None
    ) -> Tensor:
        columns = -1 if mat.numel() else len(mat)
        return mat.reshape(columns, num_selected(shape[0], subsampling), *shape[1:])


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

    def supports(self, module: Module, inputs: Tuple[Any, ...]) -> bool:
        """Tell whether :meth:`product` covers a call.

        Args:
            module: The module.
            inputs: Inputs of the call.

        Returns:
            Whether it does; the generic rule must do otherwise. Default: ``True``.
        """
        return True

    @shape_check.param_mjp_accept_vectors
    def param_mjp(
        self,
        param_str: str,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: List[int] = None,
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
        generic = partial(self._param_mjp, param_str)
        multiply = getattr(self, f"_{param_str}_jac_t_mat_prod", generic)
        result = multiply(
            module, g_inp, g_out, mat, sum_batch=sum_batch, subsampling=subsampling
        )
        shape_check.check_same_V_dim(result, mat)
        shape_check.check_like_with_sum_batch(result, module, param_str, sum_batch)
        return result

    def _param_mjp(
        self,
        param_str: str,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mat: Tensor,
        sum_batch: bool = True,
        subsampling: List[int] = None,
    ) -> Tensor:
        restricted = self._restrict(module, subsampling)
        product = self._stored_product(param_str, restricted, mat)
        return product.summed() if sum_batch else product.individual()

    # a class for a layer of its own may override these, and the same for other names
    _weight_jac_t_mat_prod = _for_parameter("weight", "_param_mjp")
    _bias_jac_t_mat_prod = _for_parameter("bias", "_param_mjp")

    def stored_product(
        self,
        name: str,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        cotangents: Tensor,
    ) -> PerSample:
        """Describe the products of :meth:`param_mjp` for the stored inputs.

        Args:
            name: Name of the parameter.
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            cotangents: Columns at the output, ``[V, N, *out]``.

        Returns:
            The products: in the layer's form, unless a class has its own way to
            multiply.
        """
        cotangents = as_type(cotangents, module.output.dtype)
        method = f"_{name}_jac_t_mat_prod"
        pair = type(self), BaseParameterDerivatives
        own, inherited = (getattr(cls, method, None) for cls in pair)
        if own is inherited:
            return self._stored_product(name, module, cotangents)
        multiply = getattr(self, method)
        products = multiply(module, g_inp, g_out, cotangents, sum_batch=False)
        return Dense(products, products.shape[2:])

    def _stored_product(
        self, name: str, module: Module, cotangents: Tensor
    ) -> PerSample:
        inputs = stored_inputs(module)
        if type(self).product is not BaseParameterDerivatives.product:
            return self.product(name, module, inputs, cotangents)
        outputs, copy = [recorded_output(module)], scratch_copy(module)
        return generic_products([name], copy, inputs, cotangents, outputs=outputs)[name]

    def product(
        self, name: str, module: Module, inputs: Tuple[Any, ...], cotangents: Tensor
    ) -> PerSample:
        """Describe the per-sample vector-Jacobian products of a parameter.

        Args:
            name: Name of the parameter.
            module: Module. Nothing stored on it may be used, as it may have been called
                more than once.
            inputs: Inputs of the call.
            cotangents: Columns at the call's output, ``[V, N, *out]``.

        Returns:
            The products in the cheapest form that the layer has. Default: generic rule
            that differentiates the module's own forward pass, sample by sample.
        """
        return generic_product(name, module, inputs, cotangents)

    def weight_jac_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
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
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
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
        self,
        param_str: str,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mat: Tensor,
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
        is_vec = shape_check._same_dim_as(mat, module, param_str)
        mat = shape_check._add_V_dim(mat) if is_vec else mat
        shape_check._check_like(mat, module, param_str)
        generic = partial(self._param_jac_mat_prod, param_str)
        multiply = getattr(self, f"_{param_str}_jac_mat_prod", generic)
        result = multiply(module, g_inp, g_out, mat)
        shape_check.check_same_V_dim(result, mat)
        shape_check._check_like(result, module, "output")
        return shape_check._remove_V_dim(result) if is_vec else result

    def _param_jac_mat_prod(
        self,
        param_str: str,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mat: Tensor,
    ) -> Tensor:
        inputs, scratch = stored_inputs(module), scratch_copy(module)

        def forward(param: Tensor, others: dict) -> Tensor:
            params = {**others, param_str: param}
            return first_tensor(functional_call(scratch, params, inputs))

        if self.affine_in_params:
            params = module.named_parameters()
            zeros = {name: zeros_like(p) for name, p in params if name != param_str}
            with no_grad():
                return stack([forward(v, zeros) for v in mat])
        # w ↦ Jᵀ w is linear, so pulling v back through it gives J v, see R_op
        output, pull = vjp(lambda param: forward(param, {}), getattr(module, param_str))
        checked(module, output)
        _, push = vjp(lambda w: pull(w)[0], zeros_like(output))
        return stack([push(v)[0] for v in mat])

    _weight_jac_mat_prod = _for_parameter("weight", "_param_jac_mat_prod")
    _bias_jac_mat_prod = _for_parameter("bias", "_param_jac_mat_prod")


class BaseLossDerivatives(BaseDerivatives, ABC):
    """Second derivatives of a loss 𝓛 = c Σₙ ℓ(xₙ, yₙ) with respect to its input x.

    Every method needs a loss module whose output is a scalar. The factor c, one over
    what the loss divides by, is always that of the full mini-batch.
    """

    def sqrt_hessian(
        self,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute a factor S of the loss Hessian: Σ_v S_vn S_vnᵀ = ∂²𝓛/∂xₙ².

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            Factor of shape ``[V, N, *in]``.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        result = self._sqrt_hessian(module, g_inp, g_out, subsampling=subsampling)
        shape_check._check_like(result, module, "input0", subsampling=subsampling)
        return result

    @abstractmethod
    def _sqrt_hessian(
        self,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute a factor of the loss Hessian, see :meth:`sqrt_hessian`."""

    def sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mc_samples: int = 1,
        subsampling: List[int] = None,
    ) -> Tensor:
        """Draw a factor S of the loss Hessian: E[Σ_v S_vn S_vnᵀ] = ∂²𝓛/∂xₙ².

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.
            mc_samples: Number of Monte-Carlo samples, M. Default: ``1``.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            Factor of shape ``[M, N, *in]``.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        result = self._sqrt_hessian_sampled(
            module, g_inp, g_out, mc_samples=mc_samples, subsampling=subsampling
        )
        shape_check._check_like(result, module, "input0", subsampling=subsampling)
        return result

    @abstractmethod
    def _sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mc_samples: int = 1,
        subsampling: List[int] = None,
    ) -> Tensor:
        """Draw a factor of the loss Hessian, see :meth:`sqrt_hessian_sampled`."""

    @shape_check.make_hessian_mat_prod_accept_vectors
    @shape_check.make_hessian_mat_prod_check_shapes
    def make_hessian_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Make a function that multiplies with the loss Hessian ∂²𝓛/∂x².

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.

        Returns:
            Function that maps ``[V, N, *in]`` to the same shape; it accepts a vector
            ``[N, *in]``, too.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        return self._make_hessian_mat_prod(module, g_inp, g_out)

    @abstractmethod
    def _make_hessian_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Make a product with the Hessian, see :meth:`make_hessian_mat_prod`."""

    def sum_hessian(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]
    ) -> Tensor:
        """Sum the loss Hessians of all samples.

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.

        Returns:
            Σₙ ∂²𝓛/∂xₙ² of shape ``[C, C]``.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        return self._sum_hessian(module, g_inp, g_out)

    @abstractmethod
    def _sum_hessian(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]
    ) -> Tensor:
        """Sum the loss Hessians of all samples, see :meth:`sum_hessian`."""

    def _check_scalar(self, module: Module) -> None:
        """Refuse losses whose output is no scalar, which any single number is.

        Args:
            module: Loss module with stored output.

        Raises:
            ValueError: If the loss is no scalar.
        """
        if module.output.numel() != 1:
            raise ValueError(
                NO_SCALAR_LOSS.format(
                    derivatives=type(self).__name__,
                    module=module,
                    shape=list(module.output.shape),
                )
            )
