"""Derivatives of the transposed convolution with 1 spatial axis."""

from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives


class ConvTranspose1DDerivatives(ConvTransposeNDDerivatives):
    """Derivatives of :class:`torch.nn.ConvTranspose1d`."""

    def __init__(self) -> None:
        """Set the number of spatial axes."""
        super().__init__(1)
