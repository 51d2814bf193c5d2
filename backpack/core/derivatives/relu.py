"""Derivatives of the rectified linear unit."""

from typing import List, Tuple

from torch import Tensor
from torch.nn import ReLU

from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.utils.subsampling import subsample


class ReLUDerivatives(PiecewiseLinearDerivatives):
    """Derivatives of :class:`torch.nn.ReLU`."""

    def df(
        self,
        module: ReLU,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute the first derivative, 1 where x > 0, else 0.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        # right even if the output overwrote the input: both have the same sign
        x = subsample(module.input0, subsampling=subsampling)
        return x.sign().clamp_(min=0)  # twice as fast as converting x > 0
