"""Derivatives of average pooling over one to three axes."""

from typing import Any, Tuple

from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.utils.types import Layer


class AvgPoolNDDerivatives(LinearMapDerivatives):
    """Derivatives of :class:`torch.nn.AvgPool1d`, ``AvgPool2d``, ``AvgPool3d``."""

    def __init__(self, N: int):
        """Store the number of pooled axes.

        Args:
            N: Number of pooled axes.
        """
        self.N = N

    def check_parameters(self, module: Layer) -> None:
        """Accept every option.

        Args:
            module: Average pooling module.
        """

    def get_avg_pool_parameters(self, module: Layer) -> Tuple[Any, Any, Any]:
        """Return the geometry of the pooling windows.

        Args:
            module: Average pooling module.

        Returns:
            Stride, kernel size, padding.
        """
        return module.stride, module.kernel_size, module.padding
