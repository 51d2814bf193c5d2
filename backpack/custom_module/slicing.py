"""Module for slicing, the counterpart of ``tensor[...]``."""

from typing import Tuple, Union

from torch import Tensor
from torch.nn import Module


class Slicing(Module):
    """Index a tensor with slices and integers."""

    def __init__(self, slice_info: Tuple[Union[slice, int], ...]):
        """Store the index.

        Args:
            slice_info: One slice or integer per leading axis; the remaining axes are
                kept whole. The index ``x[:, 3, 1:]`` is
                ``(slice(None), 3, slice(1, None))``.
        """
        super().__init__()
        self.slice_info = slice_info

    def forward(self, input: Tensor) -> Tensor:
        """Index the input.

        Args:
            input: Tensor of shape ``[N, *]``.

        Returns:
            The indexed part of the input.
        """
        return input[self.slice_info]

    def extra_repr(self) -> str:
        """Describe the options for the module's ``repr``.

        Returns:
            The index.
        """
        return f"slice_info={self.slice_info}"
