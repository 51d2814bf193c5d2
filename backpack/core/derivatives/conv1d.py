"""Derivatives of the convolution with 1 spatial axis."""

from backpack.core.derivatives.convnd import ConvNDDerivatives


class Conv1DDerivatives(ConvNDDerivatives):
    """Derivatives of :class:`torch.nn.Conv1d`."""

    def __init__(self) -> None:
        """Set the number of spatial axes."""
        super().__init__(1)
