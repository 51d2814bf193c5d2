"""Derivatives of maximum pooling over one axis."""

from backpack.core.derivatives.maxpoolnd import MaxPoolNDDerivatives


class MaxPool1DDerivatives(MaxPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.MaxPool1d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=1)
