"""The square root of the GGN on the module that pads."""

from backpack.core.derivatives.pad import PadDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNPad(SqrtGGNBaseModule):
    """Square root of the GGN on ``Pad``."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(PadDerivatives())
