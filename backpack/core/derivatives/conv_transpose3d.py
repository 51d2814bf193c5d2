"""Derivatives of the transposed convolution with 3 spatial axes."""

from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives


class ConvTranspose3DDerivatives(ConvTransposeNDDerivatives):
    """Derivatives of :class:`torch.nn.ConvTranspose3d`."""

    def __init__(self) -> None:
        """Set the number of spatial axes."""
        super().__init__(3)
