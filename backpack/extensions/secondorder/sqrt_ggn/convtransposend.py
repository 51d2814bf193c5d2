"""The square root of the GGN on transposed convolutions."""

from backpack.core.derivatives.conv_transpose1d import ConvTranspose1DDerivatives
from backpack.core.derivatives.conv_transpose2d import ConvTranspose2DDerivatives
from backpack.core.derivatives.conv_transpose3d import ConvTranspose3DDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNConvTranspose1d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.ConvTranspose1d`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(ConvTranspose1DDerivatives(), params=["weight", "bias"])


class SqrtGGNConvTranspose2d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.ConvTranspose2d`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(ConvTranspose2DDerivatives(), params=["weight", "bias"])


class SqrtGGNConvTranspose3d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.ConvTranspose3d`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(ConvTranspose3DDerivatives(), params=["weight", "bias"])
