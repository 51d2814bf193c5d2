"""Module for picking one element of a tuple, like the output of a recurrent layer."""

from typing import Union

from torch import Tensor
from torch.nn import Module


class ReduceTuple(Module):
    """Pick one element of a tuple."""

    def __init__(self, index: int = 0):
        """Store which element to pick.

        Args:
            index: Position in the tuple. Default: ``0``.
        """
        super().__init__()
        self.index = index

    def forward(self, input: tuple) -> Union[tuple, Tensor]:
        """Pick the element.

        Args:
            input: The tuple.

        Returns:
            Its element at ``index``.
        """
        return input[self.index]

    def extra_repr(self) -> str:
        """Describe the options for the module's ``repr``.

        Returns:
            The index.
        """
        return f"index={self.index}"
