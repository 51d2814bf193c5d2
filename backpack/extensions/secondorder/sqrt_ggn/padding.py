"""The square root of the GGN on padding layers."""

from backpack.core.derivatives.zeropad2d import ZeroPad2dDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNZeroPad2d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.ZeroPad2d`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(ZeroPad2dDerivatives())
