"""Where each sample is: which entries of a tensor belong to which sample.

A batch of N samples need not lie on axis 0. It may be time-first, flattened with other
axes, cut into windows, or routed row by row. A *placement* says where it is:

- :class:`Layout`: entry ``i`` of an axis belongs to sample ``(i // inner) % N``. That
  covers ``[N, *]``, ``[T, N, *]``, flattened ``[N * T]`` and ``[T * N]``, and
  concatenated batches;
- a tensor of sample numbers that broadcasts to the tensor, -1 where there is none;
- :class:`Mixed`: samples have met, and what the operation was;
- ``None``: no entry depends on a sample.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import (
    Any,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    NamedTuple,
    Sequence,
    Union,
)

import torch
from torch import Tensor

from backpack.utils.state import out_of_sight


class Layout(NamedTuple):
    """Samples along one axis.

    Attributes:
        axis: The axis.
        inner: Number of neighbours that belong to the same sample.
    """

    axis: int
    inner: int = 1


class Mixed(NamedTuple):
    """Samples have met.

    Attributes:
        operation: What brought them together, for messages.
        is_known: Whether they have; else, nothing could be found out.
        module: Weak reference to the innermost module in which it was, if there is one.
        is_of_inputs: Whether it is not known which inputs are samples.
        is_data: Whether that in which they have met has no gradient.
    """

    operation: str
    is_known: bool = True
    module: Callable[[], Any] | None = None
    is_of_inputs: bool = False
    is_data: bool = False


Placement = Union[Layout, Tensor, Mixed, None]
# Tells where the samples of a tensor are, which have not met
Where = Callable[[Tensor], Union[Layout, Tensor, None]]
FIRST = Layout(0, 1)


def sample_numbers(
    placement: Layout | Tensor, shape: Sequence[int], n: int, device: torch.device
) -> Tensor:
    """Write down the sample of each entry.

    Args:
        placement: Where samples are.
        shape: Shape of the tensor.
        n: Number N of samples.
        device: Device of the result.

    Returns:
        Sample numbers, expanded to the shape; -1 where there is none.
    """
    return _numbers(placement, shape, n, device).expand(tuple(shape))


def _numbers(
    placement: Layout | Tensor, shape: Sequence[int], n: int, device: torch.device
) -> Tensor:
    """Write down the sample of each entry, once for those that share it."""
    if isinstance(placement, Tensor):
        return placement.to(device)
    if not shape:
        return torch.zeros((), dtype=torch.long, device=device)
    axis, inner = placement
    numbers = torch.arange(shape[axis], device=device) // inner % max(n, 1)
    view = [1] * len(shape)
    view[axis] = -1
    return numbers.view(view)


def compact(numbers: Tensor, first: int = 0) -> Tensor:
    """Write down sample numbers once for entries that share them.

    Args:
        numbers: Sample numbers, expanded to a shape.
        first: The first axis along which it may be done. Default: all.

    Returns:
        The same, of length 1 along the axes to which they were expanded.
    """
    for axis, step in enumerate(numbers.stride()):
        if not step and numbers.size(axis) > 1 and axis >= first:
            numbers = numbers.narrow(axis, 0, 1)
    return numbers


def nobodys(shape: Sequence[int], device: torch.device) -> Tensor:
    """Write down that no entry belongs to a sample.

    Args:
        shape: Shape of the tensor.
        device: Device of the result.

    Returns:
        Sample numbers, expanded to the shape.
    """
    return torch.full((), -1, device=device).expand(tuple(shape))


def unentered(x: Tensor, n: int) -> Tensor:
    """Say that no sample has entered a tensor, and no parameter alone either.

    Args:
        x: The tensor.
        n: Number N of samples.

    Returns:
        Sample numbers that broadcast to it, -1 unless there is a single sample.
    """
    number = -1 if n > 1 else 0
    return torch.full([1] * x.dim(), number, device=x.device)  # also of sparse ones


@out_of_sight
def spans(placement: Placement, shape: Sequence[int], axis: int) -> bool:
    """Tell whether entries along an axis belong to different samples.

    Args:
        placement: Where samples are, of which there are several.
        shape: Shape of the tensor.
        axis: The axis, counted from the end.

    Returns:
        Whether some of them do.
    """
    if isinstance(placement, Layout):
        return placement.axis == len(shape) + axis
    if not isinstance(placement, Tensor):
        return False
    highest = placement.amax(axis, keepdim=True)
    return bool(((placement >= 0) & (placement != highest)).any())


def reshaped(
    placement: Placement, before: torch.Size, shape: torch.Size, n: int
) -> Placement:
    """Tell where samples are in another view of the same entries.

    Args:
        placement: Where they are.
        before: Shape of the tensor.
        shape: Shape of the view.
        n: Number N of samples.

    Returns:
        Where they are in the view.
    """
    if placement is None or isinstance(placement, Mixed):
        return placement
    numbers = sample_numbers(placement, before, n, torch.device("cpu"))
    return simplify(numbers.reshape(shape), n, fills=True)


def agree(a: Placement, b: Placement) -> bool:
    """Tell whether samples are in the same places.

    Args:
        a: Where they are in a tensor.
        b: Where they are in another one.

    Returns:
        Whether that is the same.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b.to(a.device))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def numbers_of_rows(
    placement: Layout | Tensor, shape: torch.Size, n: int, device: torch.device
) -> Tensor:
    """Number the entries of a prediction: row n is sample n's, if it may be.

    Args:
        placement: Where samples are known to be.
        shape: Shape of the prediction.
        n: Number N of samples.
        device: Where the numbers shall be.

    Returns:
        Which sample each entry belongs to, -1 for none.
    """
    numbers = sample_numbers(placement, shape, n, device)
    may_have_gaps = isinstance(placement, Tensor) and shape[:1] == (n,)
    if may_have_gaps and bool((numbers < 0).any()):
        rows = sample_numbers(FIRST, shape, n, device)
        return numbers if conflict(numbers, rows) else rows
    return numbers


@out_of_sight
def has_gaps(placement: Placement) -> bool:
    """Tell whether there are entries of nobody's.

    Args:
        placement: Where samples are.

    Returns:
        Whether some entries, or all, are no sample's.
    """
    numbers = placement if isinstance(placement, Tensor) else None
    return placement is None if numbers is None else bool((numbers < 0).any())


def conflict(some: Tensor, others: Tensor) -> bool:
    """Tell whether an entry belongs to a sample here, and to another one there.

    Args:
        some: Sample numbers, -1 where there is none.
        others: Further ones, of a shape that broadcasts with it.

    Returns:
        Whether there is one.
    """
    return bool(((some >= 0) & (others >= 0) & (some != others)).any())


def simplify(
    numbers: Tensor, n: int, is_partial: bool = False, fills: bool = False
) -> Layout | Tensor | None:
    """Find the simplest placement that agrees with sample numbers where they are known.

    What is unknown stays so, if it is a whole slice, as of rows that no sample has
    entered: what comes later may tell.

    Args:
        numbers: Sample numbers, -1 where nothing is known.
        n: Number N of samples.
        is_partial: Whether not all samples have been seen yet, so that a layout that
            agrees with those that have is taken. Default: ``False``.
        fills: Whether what is unknown is of the samples beside it. Default: ``False``.

    Returns:
        The placement, ``None`` if nothing is known.
    """
    if not numbers.numel():  # of some samples, or of none: nobody can tell
        lead = numbers.shape.index(0) + 1
        return numbers.new_empty(*numbers.shape[:lead], *[1] * (numbers.dim() - lead))
    for axis in reversed(range(numbers.dim())):  # one number for a row
        first = numbers.narrow(axis, 0, 1)
        if not numbers.stride(axis) or bool((numbers == first).all()):
            numbers = first
    known = numbers >= 0
    if not bool(known.any()):
        return None
    if not (fills or is_partial or n == 1 or bool(known.all())):
        return numbers.clone()
    least, most = numbers.where(known, n).min(), numbers.max()
    layouts, single = list(_regular(numbers, n)), bool(least == most)
    if layouts and n == 1:
        return layouts[0]
    if len(layouts) == 1 and not (is_partial and single):
        own = _along(numbers, layouts[0].axis)
        if is_partial or not bool((own < 0).any()):
            return layouts[0]
        numbers = numbers if single else own  # what one sample says may be by chance
    return most.expand([1] * numbers.dim()).clone() if n == 1 else numbers.clone()


def _regular(numbers: Tensor, n: int) -> Iterator[Layout]:
    """Find layouts that agree with sample numbers where they are known."""
    for axis, size in enumerate(numbers.shape):
        if size % n:
            continue
        own = _along(numbers, axis)
        if own is None:
            continue
        own, place = own.flatten(), torch.arange(size, device=numbers.device)
        for inner in range(size // n, 0, -1):
            if (size // n) % inner == 0:
                same = place // inner % n == own
                if bool((same | (own < 0)).all()):
                    yield Layout(axis, inner)


def _along(numbers: Tensor, axis: int) -> Tensor | None:
    """Return the sample of each slice along an axis; ``None`` if one has several."""
    if numbers.numel() == numbers.size(axis):
        return numbers
    own = only_known(numbers, [d for d in range(numbers.dim()) if d != axis])
    return own if own.numel() == numbers.size(axis) else None


@out_of_sight
def only_known(numbers: Tensor, axes: Iterable[int]) -> Tensor:
    """Let what belongs to nobody be of the only sample beside it along some axes.

    Args:
        numbers: Sample numbers, -1 where there is none.
        axes: The axes.

    Returns:
        The samples, of length 1 along these axes; if some have several, as they were.
    """
    axes = list(axes)
    highest = numbers.amax(axes, keepdim=True)
    lowest = numbers.where(numbers >= 0, highest).amin(axes, keepdim=True)
    return highest if torch.equal(highest, lowest) else numbers


def once(placement: Tensor, what: Hashable, compute: Callable[[], Any]) -> Any:
    """Look at sample numbers once: the next pass has the same ones.

    Args:
        placement: Sample numbers.
        what: What is computed from them.
        compute: Computes it.

    Returns:
        The result.
    """
    known = placement.__dict__.setdefault("_backpack_known", {})
    if what not in known:
        found = compute()
        if isinstance(found, Tensor) and found._base is not None:
            found = found.clone()  # a view would keep what keeps it
        known[what] = found
    return known[what]


@out_of_sight
def some_samples(
    placement: Placement, n: int, dim: int
) -> tuple[Tensor, Placement] | tuple[None, None]:
    """Number the samples anew that are in a placement, if these are not all.

    Args:
        placement: Where samples are.
        n: Number N of samples.
        dim: Number of the tensor's axes.

    Returns:
        The numbers of those that are there ``[M]``, none of what is empty, and where
        sample m of them is; nothing if all are, or some entries are nobody's.
    """

    def find(placement: Tensor) -> tuple[Tensor, Placement] | tuple[None, None]:
        samples = placement.unique()
        if not len(samples):
            return samples, placement
        if len(samples) == n or int(samples[0]) < 0:
            return None, None
        if len(samples) == 1 and dim:
            return samples, FIRST
        numbers = torch.searchsorted(samples, placement.contiguous())
        whole = numbers.view([1] * (dim - numbers.dim()) + [*numbers.shape])
        return samples, simplify(whole, len(samples))

    if not isinstance(placement, Tensor) or n < 2 and placement.numel():
        return None, None
    return once(placement, ("some", n, dim), lambda: find(placement))


def pointwise(data: list[Tensor], out: Tensor, of: Where) -> Placement:
    """Combine layouts that agree, up to broadcasting.

    Args:
        data: Tensors that hold samples.
        out: A result that has all of their axes.
        of: Tells where the samples of a tensor are.

    Returns:
        Where they are in the result; ``None`` if that does not tell.
    """
    if len(data) == 1 and data[0].shape == out.shape:
        own = of(data[0])
        if isinstance(own, Tensor) and own.dim() == out.dim():
            return own
    common: Placement = None
    for x in data:
        layout = of(x)
        if type(layout) is not Layout or not x.dim():
            return None
        axis = layout.axis + out.dim() - x.dim()
        if axis < 0 or x.shape[layout.axis] != out.shape[axis]:
            return None
        moved = layout if axis == layout.axis else Layout(axis, layout.inner)
        if common is None:
            common = moved
        elif common != moved:
            return None
    return common


def combined(data: list[Tensor], out: Tensor, of: Where, n: int) -> Placement:
    """Combine any placements, entry by entry.

    Args:
        data: Tensors that hold samples.
        out: A result that they broadcast to.
        of: Tells where the samples of a tensor are.
        n: Number N of samples.

    Returns:
        Where they are in the result; ``None`` if they do not agree.
    """
    numbers = nobodys((), out.device)
    for x in data:
        own = _numbers(of(x), x.shape, n, out.device)
        if conflict(own, numbers):
            return None
        numbers = own.where(own >= 0, numbers)
    return simplify(numbers.broadcast_to(out.shape), n)


def has_bit(numbers: Tensor, bit: int, value: int = 1) -> Tensor:
    """Tell which entries belong to samples whose number has a bit.

    By their bits, samples are told apart in few steps.

    Args:
        numbers: Sample numbers, -1 where there is none.
        bit: Which bit.
        value: What it shall be. Default: 1.

    Returns:
        Whether it is so, for each entry.
    """
    own = compact(numbers)
    return ((own >= 0) & (own >> bit & 1 == value)).expand(numbers.shape)


def bits(n: int) -> range:
    """List the bits of sample numbers, at least one.

    Args:
        n: Number N of samples.

    Returns:
        The bits.
    """
    return range(max(1, (n - 1).bit_length()))


def halves(n: int) -> Iterator[tuple[int, int]]:
    """List the bits of sample numbers, and their values.

    Args:
        n: Number N of samples.

    Returns:
        Pairs of a bit and a value, 1 before 0.
    """
    return product(bits(n), (1, 0))


class Arrangement:
    """Brings tensors into the form ``[N, R, *]``: the rows of each sample.

    Rows are all places along the leading axes. Samples with fewer rows than others are
    filled up with zeros.
    """

    def __init__(self, placement: Layout | Tensor, rows: Sequence[int], n: int):
        """Find out which rows belong to which sample.

        Args:
            placement: Where samples are, along the leading axes.
            rows: Sizes of the leading axes.
            n: Number N of samples.

        Raises:
            ValueError: If the entries of a row belong to several samples.
        """  # noqa: DAR401
        self._n, self._rows, lead = n, tuple(rows), len(rows)
        self._placement = placement
        if isinstance(placement, Layout):
            within = placement.axis >= lead
        else:
            within = placement.dim() < lead or placement.shape[lead:].numel() != 1
        if within:
            raise ValueError("samples lie within rows")
        if isinstance(placement, Tensor):
            what = "rows", n, self._rows
            self._sorted = once(placement, what, lambda: self._sort(placement))

    @out_of_sight
    def _sort(self, placement: Tensor) -> tuple[Tensor, Tensor | None]:
        """Find the rows of each sample, and which places they fill ``[N, R]``."""
        numbers = placement.reshape(placement.shape[: len(self._rows)])
        numbers = numbers.expand(self._rows).flatten()
        order = torch.argsort(numbers, stable=True)
        order = order[int((numbers < 0).sum()) :]
        if not len(order):
            return order, None
        counts = torch.bincount(numbers[order], minlength=self._n)
        starts = counts.cumsum(0) - counts
        place = torch.arange(int(counts.max()), device=numbers.device)
        index = (starts.unsqueeze(1) + place).clamp(max=len(order) - 1)
        return order[index.flatten()], place < counts.unsqueeze(1)

    def rows(self, x: Tensor, lead: int = 0) -> Tensor:
        """Arrange the rows of a tensor.

        Args:
            x: Tensor of shape ``[*lead, *rows, *]``.
            lead: Number of axes in front. Default: 0.

        Returns:
            Tensor of shape ``[*lead, N, R, *]``.
        """
        features = tuple(x.shape[lead + len(self._rows) :])
        front = tuple(x.shape[:lead])
        if 0 in self._rows:
            return x.new_zeros(*front, self._n, 1, *features)
        if isinstance(self._placement, Tensor):
            index, filled = self._sorted
            if filled is None:
                return x.new_zeros(*front, self._n, 1, *features)
            size = prod(self._rows)  # which -1 is not for without features
            x = x.reshape(*front, size, *features).index_select(lead, index)
            x = x.unflatten(lead, filled.shape)
            mask = filled.view(*filled.shape, *[1] * len(features))
            return x.where(mask, x.new_zeros(()))  # others' infinity is none here
        axis, inner = self._placement
        if axis > 0:
            x = x.movedim(lead + axis, lead)
        if self._rows[axis] != self._n * inner:
            x = x.unflatten(lead, (-1, self._n, inner)).movedim(lead + 1, lead)
        return x.reshape(*front, self._n, prod(self._rows) // self._n, *features)


def one_sample_each(
    placement: Layout | Tensor, cotangent: Tensor, n: int, samples: slice
) -> Tensor:
    """Mask cotangents such that each is that of a single sample.

    Args:
        placement: Where samples are.
        cotangent: Columns ``[V, *out]``.
        n: Number N of samples.
        samples: Which samples (m of them).

    Returns:
        Masked columns ``[V, m, *out]``.
    """
    shape = cotangent.shape[1:]
    numbers = compact(sample_numbers(placement, shape, n, cotangent.device))
    wanted = torch.arange(samples.start, samples.stop, device=cotangent.device)
    mask = numbers == wanted.view(-1, *[1] * len(shape))
    # not a product: infinity times zero would be no number
    return cotangent.unsqueeze(1).where(mask, cotangent.new_zeros(()))


def ranks(
    placement: Layout | Tensor, size: int, n: int, device: torch.device
) -> Tensor:
    """Number the rows of each sample, along a single axis of rows.

    Args:
        placement: Where samples are, along axis 0.
        size: Number of rows.
        n: Number N of samples.
        device: Device of the result.

    Returns:
        For each row, its number among the sample's rows.
    """
    if isinstance(placement, Tensor):
        placement = placement.reshape(len(placement))
    numbers = sample_numbers(placement, (size,), n, device)
    order = torch.argsort(numbers, stable=True)
    counts = torch.bincount((numbers + 1)[order], minlength=n + 1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(size, device=device) - starts[(numbers + 1)[order]]
    rank = torch.empty_like(place)
    rank[order] = place
    return rank
