"""Derivatives of the convolution with 3 spatial axes."""

from backpack.core.derivatives.convnd import ConvNDDerivatives


class Conv3DDerivatives(ConvNDDerivatives):
    """Derivatives of :class:`torch.nn.Conv3d`."""

    def __init__(self) -> None:
        """Set the number of spatial axes."""
        super().__init__(3)
