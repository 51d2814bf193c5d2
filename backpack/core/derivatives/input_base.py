"""Products with a module's input Jacobian, with automatic differentiation as default.

A module computes z = f(x, θ) for a mini-batch. Shapes:

- x is ``module.input0``, ``[N, *in]``; z is ``module.output``, ``[N, *out]``.
- A matrix that is multiplied has ``V`` columns on axis 0: ``[V, N, *out]`` is pulled
  back to ``[V, N, *in]``, for instance. All public methods check shapes and accept a
  single vector, ``[N, *out]``, in which case the result has no axis ``V``, either.

Public methods check and select samples; ``_private`` methods of the same name hold the
maths. A class that defines none of them gets the generic ones below. These are right
for every module that is differentiable in its first input; other inputs are constants.
"""

from abc import ABC
from contextlib import contextmanager
from math import nan
from typing import Any, Iterator, Tuple

from torch import Tensor, cuda, ones_like, stack, zeros_like
from torch.autograd import grad
from torch.nn import Module

from backpack.core.derivatives import shape_check
from backpack.core.derivatives.stored import NOT_REPEATED, evaluate, subsampled
from backpack.hessianfree.lop import check_twice, pull_columns
from backpack.hessianfree.rop import R_op
from backpack.utils.hooks import message, name_module
from backpack.utils.subsampling import Subsampling, num_selected
from backpack.utils.types import Grads, Layer
from backpack.utils.unsqueeze import flatten

NO_DIAGONAL_HESSIAN = (
    "{derivatives}: the Hessian of {module} is not diagonal, so that its diagonal does "
    "not describe it. Use residual_mat_prod to multiply with it."
)


@contextmanager
def _alone(module: Module) -> Iterator[None]:
    """Explain what a module raises on a single sample, and has not on all of them."""
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        known = name_module(module) in str(error)
        if known or isinstance(error, cuda.OutOfMemoryError):
            raise
        raise RuntimeError(message(NOT_REPEATED, module=module)) from error


class BaseDerivatives(ABC):  # noqa: B024
    """Products with a module's Jacobian and residual with respect to its input.

    The generic rules need no further definition, only the predicates
    :meth:`hessian_is_zero` and :meth:`hessian_is_diagonal` should say what is known.
    """

    @shape_check.product("input0", "output")
    def jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
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
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        xs, y = evaluate(module)
        return stack([R_op(y, xs, v)[0] for v in mat.to(xs[0].dtype)])

    @shape_check.product("output", "input0")
    def jac_t_mat_prod(
        self,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        subsampling: Subsampling = None,
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
        if subsampling is not None and not mat.shape[1]:  # not all modules run on none
            return mat.new_zeros(len(mat), *module.input0.shape)
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        """Multiply with the transposed Jacobian, see :meth:`jac_t_mat_prod`.

        Args:
            module: Module whose stored tensors hold the selected samples only.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            mat: Matrix of shape ``[V, N, *out]``.

        Returns:
            Products of shape ``[V, N, *in]``.
        """
        xs, y = evaluate(module)
        return pull_columns(y, xs, mat)[0]

    def _restrict(self, module: Layer, subsampling: Subsampling = None) -> Layer:
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
                f"{name_module(module)} maps an input with {list(sizes[0])} samples "
                f"(axis 0) to an output with {list(sizes[1])}, so that samples cannot "
                "be told apart. Axis 0 must hold the samples before and after it."
            )
        return subsampled(module, subsampling)

    def ea_jac_t_mat_jac_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
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
                f"{name_module(module)}, but got {list(mat.shape)}."
            )
        n, size = len(module.output), module.input0.shape[1:].numel()
        if n * out == 0:  # the mean of nothing, or of outputs without features
            return mat.new_full((size, size), 0.0 if n else nan)
        return self._ea_jac_t_mat_jac_prod(module, g_inp, g_out, mat)

    def _ea_jac_t_mat_jac_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        # one sample after the other, as a single one needs memory [out, in] already
        samples = 1 if self.jacobian_is_shared(module) else len(module.output)
        total: Any = 0.0
        for n in range(samples):
            one, product = self._restrict(module, [n]), mat
            for _ in range(2):  # G ↦ (G J)ᵀ, twice
                rows = product.reshape(-1, *one.output.shape)
                with _alone(module):
                    pulled = self._jac_t_mat_prod(one, g_inp, g_out, rows)
                product = flatten(pulled, 1).T
            total = total + product
        return total / samples

    def jacobian_is_shared(self, module: Layer) -> bool:
        """Tell whether every sample has the same Jacobian with respect to the input.

        Args:
            module: Module with stored input and output.

        Returns:
            ``True`` for modules that are affine in their input and treat all samples
            alike. Default: ``False``.
        """
        return False

    def hessian_is_zero(self, module: Layer) -> bool:
        """Tell whether all second derivatives w.r.t. the input vanish (∂²z/∂x² = 0).

        Args:
            module: Module with stored input and output.

        Returns:
            Whether the output is (piecewise) linear in the input, by default ``False``.
        """
        return False

    def hessian_is_diagonal(self, module: Layer) -> bool:
        """Tell whether Σ_k δ_k ∂²z_k/∂x² is diagonal for every δ.

        Args:
            module: Module with stored input and output.

        Returns:
            Whether it is known to be diagonal, by default whether it is zero.
        """
        return self.hessian_is_zero(module)

    def hessian_is_psd(self) -> bool:
        """Tell whether the Hessian of the output is positive semi-definite.

        Returns:
            Whether it is known to be so, for every input, by default ``False``.
        """
        return False

    def hessian_diagonal(self, module: Layer, g_in: Grads, g_out: Grads) -> Tensor:
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
            text = message(NO_DIAGONAL_HESSIAN, derivatives=self, module=module)
            raise NotImplementedError(text)
        ones = ones_like(module.input0).unsqueeze(0)
        return self._differentiate_twice(module, g_out, ones).squeeze(0)

    @shape_check.product("input0", "input0")
    def residual_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
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
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if self.hessian_is_zero(module):
            return zeros_like(mat)
        if self.hessian_is_diagonal(module):
            return self.hessian_diagonal(module, g_inp, g_out) * mat
        return self._differentiate_twice(module, g_out, mat)

    @staticmethod
    def _differentiate_twice(module: Layer, g_out: Grads, mat: Tensor) -> Tensor:
        """Multiply with the Hessian of x ↦ ⟨δ, f(x)⟩.

        Args:
            module: Module with stored input and output.
            g_out: Gradients of the loss with respect to the module's outputs, δ.
            mat: Matrix of shape ``[V, N, *in]``.

        Returns:
            Products of the same shape.
        """
        xs, y = evaluate(module)
        delta = g_out[0].detach().to(y.dtype)
        check_twice([y], xs)
        (gradient,) = grad(y, xs, delta, create_graph=True)
        return pull_columns(gradient, xs, mat)[0]

    @classmethod
    def reshape_like_input(
        cls, mat: Tensor, module: Layer, subsampling: Subsampling = None
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
    def reshape_like_output(cls, mat: Tensor, module: Layer) -> Tensor:
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
        mat: Tensor, shape: Tuple[int, ...], subsampling: Subsampling = None
    ) -> Tensor:
        columns = -1 if mat.numel() else len(mat)
        return mat.reshape(columns, num_selected(shape[0], subsampling), *shape[1:])
