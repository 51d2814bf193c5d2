"""Derivatives of average pooling over one axis."""

from backpack.core.derivatives.avgpoolnd import AvgPoolNDDerivatives


class AvgPool1DDerivatives(AvgPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.AvgPool1d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=1)
