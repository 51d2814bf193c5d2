"""The square root of the GGN on dropout."""

from backpack.core.derivatives.dropout import DropoutDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNDropout(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Dropout`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(DropoutDerivatives())
