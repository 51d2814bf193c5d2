"""Module for permuting axes, the counterpart of ``tensor.permute``."""

from typing import Any

from torch import Tensor
from torch.nn import Module


class Permute(Module):
    """Permute the axes of a tensor, all but the batch axis.

    ``dims`` holds the whole permutation. If two axes are swapped, it is known when the
    number of axes is, and set by the forward pass.
    """

    def __init__(self, *dims: Any, init_transpose: bool = False):
        """Store the permutation.

        Args:
            dims: Order of all axes, like in ``tensor.permute``: integers, or one
                sequence of integers.
            init_transpose: Whether ``dims`` are two axes to be swapped, like in
                ``tensor.transpose``. Default: ``False``.

        Raises:
            ValueError: If ``dims`` is no permutation or no pair of axes, or if axis 0,
                the batch axis, moves.
        """
        super().__init__()
        if len(dims) == 1 and not isinstance(dims[0], int):
            dims = tuple(dims[0])
        self.swap = dims if init_transpose else None
        if init_transpose:
            if len(dims) != 2:
                raise ValueError(
                    f"Permute(init_transpose=True) expects two axes, got {dims}. Pass "
                    + "them like in Permute(1, 2, init_transpose=True)."
                )
            self.dims = None
            moves_batch_axis = 0 in dims and dims[0] != dims[1]
        else:
            self.dims = tuple(d + len(dims) if d < 0 else d for d in dims)
            if sorted(self.dims) != list(range(len(dims))):
                raise ValueError(
                    f"Permute expects an order of all axes, got {dims}. Name each axis "
                    + "once, like in Permute(0, 2, 1)."
                )
            moves_batch_axis = self.dims[:1] != (0,)
        if moves_batch_axis:
            self._raise_batch_axis_moves(dims)

    @staticmethod
    def _raise_batch_axis_moves(dims: Any) -> None:
        raise ValueError(
            f"Permute got {dims}, which moves axis 0. Axis 0 is the batch axis: leave "
            + "it in place, and permute the others."
        )

    def forward(self, input: Tensor) -> Tensor:
        """Permute the axes of the input.

        Args:
            input: Tensor of shape ``[N, *]``.

        Returns:
            Tensor of shape ``[N, *permuted]``.
        """
        if self.swap is not None:
            order = list(range(input.dim()))
            i, j = self.swap
            order[i], order[j] = order[j], order[i]
            if order[0] != 0:
                self._raise_batch_axis_moves(self.swap)
            self.dims = tuple(order)
        return input.permute(self.dims or ())

    def extra_repr(self) -> str:
        """Describe the options for the module's ``repr``.

        Returns:
            The permutation, or the axes that are swapped.
        """
        return f"dims={self.dims}" if self.swap is None else f"swap={self.swap}"
