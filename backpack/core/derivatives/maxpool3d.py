"""Derivatives of maximum pooling over three axes."""

from backpack.core.derivatives.maxpoolnd import MaxPoolNDDerivatives


class MaxPool3DDerivatives(MaxPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.MaxPool3d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=3)
