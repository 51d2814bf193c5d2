"""Derivatives of average pooling over three axes."""

from backpack.core.derivatives.avgpoolnd import AvgPoolNDDerivatives


class AvgPool3DDerivatives(AvgPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.AvgPool3d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=3)
