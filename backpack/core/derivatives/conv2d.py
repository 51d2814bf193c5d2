"""Derivatives of the convolution with 2 spatial axes."""

from backpack.core.derivatives.convnd import ConvNDDerivatives


class Conv2DDerivatives(ConvNDDerivatives):
    """Derivatives of :class:`torch.nn.Conv2d`."""

    def __init__(self) -> None:
        """Set the number of spatial axes."""
        super().__init__(2)
