"""The square root of the GGN on modules that scale or sum."""

from backpack.core.derivatives.scale_module import ScaleModuleDerivatives
from backpack.core.derivatives.sum_module import SumModuleDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNScaleModule(SqrtGGNBaseModule):
    """Square root of the GGN on ``ScaleModule``."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(ScaleModuleDerivatives())


class SqrtGGNSumModule(SqrtGGNBaseModule):
    """Square root of the GGN on ``SumModule``."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(SumModuleDerivatives())
