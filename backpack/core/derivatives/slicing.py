"""Derivatives of the module that selects elements by slices and indices."""

from torch import Tensor

from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.utils.hooks import name_module
from backpack.utils.types import Layer


class SlicingDerivatives(LinearMapDerivatives):
    """Derivatives of ``Slicing``, as long as it keeps all samples."""

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        self.no_slice_batch_axis(module)
        return module.forward(x)

    @staticmethod
    def no_slice_batch_axis(module: Layer) -> None:
        """Refuse to select samples.

        Args:
            module: Module with stored input.

        Raises:
            ValueError: If the module selects from axis 0.
        """
        first = module.slice_info[0]
        if not (first == slice(None) or first is Ellipsis):
            raise ValueError(
                f"{name_module(module)} selects from axis 0, which holds the samples. "
                f"Expected a full slice (slice(None)) for this axis, got {first}."
            )
