"""Derivatives of maximum pooling over two axes."""

from backpack.core.derivatives.maxpoolnd import MaxPoolNDDerivatives


class MaxPool2DDerivatives(MaxPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.MaxPool2d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=2)
