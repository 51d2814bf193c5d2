"""Derivatives of functions that act on each element on its own."""

from torch import Tensor, ones_like, zeros_like

from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.derivatives.stored import evaluate, subsampled
from backpack.hessianfree.lop import pull_columns
from backpack.utils.subsampling import Subsampling
from backpack.utils.types import Grads, Layer
from backpack.utils.unsqueeze import flatten


class ElementwiseDerivatives(BaseDerivatives):
    """Derivatives of an elementwise function, z_k = f(x_k).

    Sub-classes can define the first and second derivative, :meth:`df` and :meth:`d2f`;
    their defaults come from automatic differentiation of the module's forward pass.
    """

    def df(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        """Compute the first derivative at each element.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            f'(x) of shape ``[N, *in]``.
        """
        xs, y = evaluate(subsampled(module, subsampling))
        return pull_columns(y, xs, [ones_like(y)])[0].squeeze(0)

    def d2f(self, module: Layer, g_inp: Grads, g_out: Grads) -> Tensor:
        """Compute the second derivative at each element.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.

        Returns:
            f''(x) of shape ``[N, *in]``.
        """
        if self.hessian_is_zero(module):
            return zeros_like(module.input0)
        delta, ones = ones_like(module.output), ones_like(module.input0)
        return self._differentiate_twice(module, (delta,), ones.unsqueeze(0)).squeeze(0)

    def hessian_is_diagonal(self, module: Layer) -> bool:  # noqa: D102
        return True

    def hessian_diagonal(self, module: Layer, g_inp: Grads, g_out: Grads) -> Tensor:
        """Compute the diagonal of the residual.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs, δ.

        Returns:
            f''(x) δ of shape ``[N, *in]``.
        """
        return self.d2f(module, g_inp, g_out) * g_out[0]

    def _jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        return self.df(module, g_inp, g_out) * mat

    _jac_t_mat_prod = _jac_mat_prod

    def _ea_jac_t_mat_jac_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        df = flatten(self.df(module, g_inp, g_out), 1)
        return (df.T @ (df / df.shape[0])).mul_(mat)  # few passes over matrices


class PiecewiseLinearDerivatives(ElementwiseDerivatives):
    """Derivatives of an elementwise function that is linear in pieces."""

    def hessian_is_zero(self, module: Layer) -> bool:  # noqa: D102
        return True
