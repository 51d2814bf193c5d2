"""The square root of the GGN on the module that slices."""

from backpack.core.derivatives.slicing import SlicingDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNSlicing(SqrtGGNBaseModule):
    """Square root of the GGN on ``Slicing``."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(SlicingDerivatives())
