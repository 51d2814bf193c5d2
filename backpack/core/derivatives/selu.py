"""Derivatives of the scaled exponential linear unit."""

from typing import List, Tuple

from torch import Tensor, exp, ones_like, zeros_like
from torch.nn import SELU

from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.utils.subsampling import subsample


class SELUDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.SELU`."""

    alpha = 1.6732632423543772
    scale = 1.0507009873554805

    def df(
        self,
        module: SELU,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute the first derivative, the scale where x > 0, else scale · α exp(x).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        x = subsample(module.input0, subsampling=subsampling)
        return self.scale * ones_like(x).where(x > 0, self.alpha * exp(x))

    def d2f(self, module: SELU, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]) -> Tensor:
        """Compute the second derivative, 0 where x >= 0, else scale · α exp(x).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.

        Returns:
            Second derivative of shape ``[N, *in]``.
        """
        x = module.input0
        return self.scale * zeros_like(x).where(x >= 0, self.alpha * exp(x))
