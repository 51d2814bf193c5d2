"""The square root of the GGN on linear layers."""

from backpack.core.derivatives.linear import LinearDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNLinear(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Linear`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(LinearDerivatives(), params=["weight", "bias"])
