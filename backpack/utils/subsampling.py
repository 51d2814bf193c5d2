"""Selection of samples from a mini-batch."""

from contextlib import suppress
from operator import index
from typing import Any, List, Optional, Protocol, Sequence, Union

from torch import Tensor


class _Array(Protocol):
    """A tensor, or an array of NumPy."""

    def tolist(self) -> Any: ...


# What users pass, and what it is stored as
Selection = Union[Sequence[int], _Array, slice, None]
Subsampling = Optional[Union[List[int], slice]]


class Masked(List[int]):
    """Indices of the samples that a mask selects.

    Attributes:
        size: Length of the mask.
    """

    def __init__(self, mask: Sequence[bool]):
        """Find the samples.

        Args:
            mask: Whether each sample is selected.
        """
        super().__init__(n for n, is_selected in enumerate(mask) if is_selected)
        self.size = len(mask)


def plain(value: Any) -> Any:
    """Make what a tensor or array of NumPy holds a number, or lists of numbers.

    Args:
        value: Anything.

    Returns:
        The numbers; anything else as it is.
    """
    return value.tolist() if hasattr(value, "tolist") else value


def subsample(tensor: Tensor, dim: int = 0, subsampling: Subsampling = None) -> Tensor:
    """Select entries of a tensor along one axis.

    Args:
        tensor: Tensor of any shape.
        dim: Axis to select from, usually the batch axis. Negative values count from
            the end.
        subsampling: Indices to keep, in this order, or a slice. ``None`` keeps all.

    Returns:
        The selected entries, with ``len(subsampling)`` entries along ``dim``; the
        same object as ``tensor`` if ``subsampling`` is ``None``.
    """
    if subsampling is None:
        return tensor
    return tensor[(slice(None),) * (dim % tensor.ndim) + (subsampling,)]


def num_selected(size: int, subsampling: Subsampling) -> int:
    """Count the samples that are selected.

    Args:
        size: Number N of samples in the batch.
        subsampling: Indices or a slice. ``None`` for all.

    Returns:
        The number.
    """
    if subsampling is None:
        return size
    if isinstance(subsampling, slice):
        return len(range(size)[subsampling])
    return len(subsampling)


def as_subsampling(name: str, subsampling: Selection) -> Subsampling:
    """Check the option ``subsampling`` of an extension.

    Args:
        name: Name of the extension.
        subsampling: List, tuple, range, tensor or array of NumPy, of indices or of
            whether each sample is selected; a slice, or ``None``.

    Returns:
        List of indices, a slice, or ``None``.

    Raises:
        ValueError: If it is something else.
    """
    values: Any = plain(subsampling)
    if values is None or isinstance(values, slice) and (values.step or 1) > 0:
        return values
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        values = [plain(n) for n in values]
        are_masks = {isinstance(n, bool) for n in values}
        if are_masks == {True}:
            return Masked(values)
        if are_masks <= {False}:
            with suppress(TypeError):
                return list(map(index, values))
    raise ValueError(
        f"{name}: subsampling must be None, or select samples by a list, tuple, "
        f"range, tensor or array of integers, by a mask of booleans, or by a slice "
        f"that goes forward. Got "
        f"{subsampling!r}. Pass indices, for instance subsampling=[0, 2]."
    )


def check_subsampling(name: str, subsampling: Subsampling, size: int) -> None:
    """Check that the samples that are selected exist.

    Args:
        name: Name of the extension.
        subsampling: List of indices, a slice, or ``None``.
        size: Number N of samples in the batch.

    Raises:
        IndexError: If one does not, or if a mask has another length.
    """
    if subsampling is None or isinstance(subsampling, slice):
        return
    if isinstance(subsampling, Masked) and subsampling.size != size:
        raise IndexError(
            f"{name}: subsampling is a mask of length {subsampling.size}, but the "
            f"batch has {size} samples. Pass one entry for each, or indices."
        )
    outside = [n for n in subsampling if not -size <= n < size]
    if outside:
        raise IndexError(
            f"{name}: subsampling={subsampling} selects sample {outside[0]}, but the "
            f"batch has {size} samples. Use indices from {-size} to {size - 1}."
        )
