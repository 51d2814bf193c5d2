"""Derivatives of the transposed convolution with 2 spatial axes."""

from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives


class ConvTranspose2DDerivatives(ConvTransposeNDDerivatives):
    """Derivatives of :class:`torch.nn.ConvTranspose2d`."""

    def __init__(self) -> None:
        """Set the number of spatial axes."""
        super().__init__(2)
