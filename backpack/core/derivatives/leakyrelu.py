"""Derivatives of the leaky rectified linear unit."""

from typing import List, Tuple

from torch import Tensor, ones_like
from torch.nn import LeakyReLU

from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.utils.subsampling import subsample


class LeakyReLUDerivatives(PiecewiseLinearDerivatives):
    """Derivatives of :class:`torch.nn.LeakyReLU`."""

    def df(
        self,
        module: LeakyReLU,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute the first derivative, 1 where x > 0, else the slope.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        x = subsample(module.input0, subsampling=subsampling)
        return ones_like(x).where(x > 0, module.negative_slope)
