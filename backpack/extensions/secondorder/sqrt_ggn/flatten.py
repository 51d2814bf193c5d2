"""The square root of the GGN on modules that flatten."""

from backpack.core.derivatives.flatten import FlattenDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNFlatten(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Flatten`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(FlattenDerivatives())
