"""Derivatives of average pooling to a given output size."""

from typing import List, Tuple

from backpack.core.derivatives.avgpoolnd import AvgPoolNDDerivatives
from backpack.utils.hooks import name_module
from backpack.utils.types import Layer


class AdaptiveAvgPoolNDDerivatives(AvgPoolNDDerivatives):
    """Derivatives of adaptive average pooling, for output sizes of all kinds.

    If the output size divides the input size, all pooling windows are alike.
    """

    def check_parameters(self, module: Layer) -> None:
        """Check that all pooling windows are alike.

        Args:
            module: Module with stored input and output.

        Raises:
            NotImplementedError: If the output size does not divide the input size.
        """
        sizes_in, sizes_out = self._sizes(module)
        if any(i % o for i, o in zip(sizes_in, sizes_out)):
            raise NotImplementedError(
                f"{name_module(module)} is no average pooling with a fixed window. "
                "Expected an input whose size is a multiple of the output size "
                f"{sizes_out}, got {sizes_in}. Choose another output size, or "
                f"torch.nn.AvgPool{self.N}d."
            )

    def get_avg_pool_parameters(
        self, module: Layer
    ) -> Tuple[List[int], List[int], List[int]]:
        """Return the geometry of the average pooling that does the same.

        Args:
            module: Module with stored input and output.

        Returns:
            Stride, kernel size, padding.
        """
        self.check_parameters(module)
        size = [i // o for i, o in zip(*self._sizes(module))]
        return size, list(size), [0] * self.N

    def _sizes(self, module: Layer) -> List[List[int]]:
        return [list(x.shape[-self.N :]) for x in (module.input0, module.output)]


class AdaptiveAvgPool1dDerivatives(AdaptiveAvgPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.AdaptiveAvgPool1d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=1)


class AdaptiveAvgPool2dDerivatives(AdaptiveAvgPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.AdaptiveAvgPool2d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=2)


class AdaptiveAvgPool3dDerivatives(AdaptiveAvgPoolNDDerivatives):
    """Derivatives of :class:`torch.nn.AdaptiveAvgPool3d`."""

    def __init__(self) -> None:
        """Set the number of pooled axes."""
        super().__init__(N=3)
