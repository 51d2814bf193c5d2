"""The square root of the GGN on convolutions."""

from backpack.core.derivatives.conv1d import Conv1DDerivatives
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.conv3d import Conv3DDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNConv1d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Conv1d`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(Conv1DDerivatives(), params=["weight", "bias"])


class SqrtGGNConv2d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Conv2d`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(Conv2DDerivatives(), params=["weight", "bias"])


class SqrtGGNConv3d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Conv3d`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(Conv3DDerivatives(), params=["weight", "bias"])
