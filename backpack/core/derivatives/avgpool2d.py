"""Derivatives of average pooling over two axes."""

from backpack.core.derivatives.avgpoolnd import AvgPoolNDDerivatives


class AvgPool2DDerivatives(AvgPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.AvgPool2d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=2)
