"""Derivatives of the exponential linear unit."""

from typing import List, Tuple

from torch import Tensor, exp, ones_like, zeros_like
from torch.nn import ELU

from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.utils.subsampling import subsample


class ELUDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.ELU`."""

    def df(
        self,
        module: ELU,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute the first derivative, 1 where x > 0, else α exp(x).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        x = subsample(module.input0, subsampling=subsampling)
        return ones_like(x).where(x > 0, module.alpha * exp(x))

    def d2f(self, module: ELU, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]) -> Tensor:
        """Compute the second derivative, 0 where x >= 0, else α exp(x).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.

        Returns:
            Second derivative of shape ``[N, *in]``.
        """
        x = module.input0
        return zeros_like(x).where(x >= 0, module.alpha * exp(x))
