"""Sums over rows and columns: squares, dots, moments; buffers cut into chunks."""

from math import frexp, inf
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import torch
from einops import einsum
from torch import Tensor

from backpack.core.fast import tuning
from backpack.core.fast.matmul import bmm, is_fast, matmul
from backpack.core.fast.memory import huge_empty, may_write
from backpack.core.fast.whole import whole
from backpack.utils.state import may_look
from backpack.utils.types import accumulator_dtype, full_precision
from backpack.utils.unsqueeze import flatten_any_order

# Inputs up to this power of two, and down to its inverse, can be squared as they are;
# if their norm tells that, up to twice this power.
MODERATE = 8


def reciprocal(number: float) -> float:
    """Divide one by a number, as tensors do it: a batch may be empty.

    Args:
        number: Number, not negative.

    Returns:
        One over it, infinity for zero.
    """
    return 1.0 / number if number else inf


def chunks(
    total: int, elements_per_item: int, most: Optional[int] = None
) -> Iterator[slice]:
    """Cut ``range(total)`` so that a chunk's buffer keeps to a size.

    Args:
        total: Number of items.
        elements_per_item: Size of the temporary buffer an item needs.
        most: Size of the buffer in elements. Default: ``CHUNK_ELEMENTS``.

    Yields:
        Slices that cover ``range(total)``; a single empty one if ``total`` is 0.
    """
    size = max(1, (most or tuning.CHUNK_ELEMENTS) // max(1, elements_per_item))
    for start in range(0, max(total, 1), size):
        yield slice(start, min(start + size, total))


def sum_axis(x: Tensor, axis: int) -> Tensor:
    """Sum over an axis; over one of size 1, that costs as much as a large sum.

    Args:
        x: Tensor.
        axis: Axis to sum over.

    Returns:
        Tensor without the axis.
    """
    return x.squeeze(axis) if x.shape[axis] == 1 else x.sum(axis)


def cut(rows: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
    """Cut rows into pieces of at most ``PIECE_ELEMENTS``.

    Args:
        rows: Tensor of shape ``[*, D]``.

    Returns:
        Pieces of shape ``[*, K, P]``, and what is left over, ``[*, R]``, if D is not
        divisible by some K that is not much larger than necessary.
    """
    size = rows.shape[-1]
    least = -(-size // tuning.PIECE_ELEMENTS)
    for number in range(least, 2 * least):
        if size % number == 0:
            return rows.unflatten(-1, (number, -1)), None
    whole = size - size % tuning.PIECE_ELEMENTS
    pieces = rows[..., :whole].unflatten(-1, (-1, tuning.PIECE_ELEMENTS))
    return pieces, rows[..., whole:]


def sum_of_squares(x: Tensor, start: int) -> Tensor:
    """Sum squares over the last axes.

    Args:
        x: Tensor of shape ``[*, *D]``.
        start: Number of axes that are kept.

    Returns:
        Sums of shape ``[*]``, in the type in which they are accumulated.
    """
    dtype, axes = accumulator_dtype(x.dtype), tuple(range(start, x.dim()))
    if not axes:  # it would be summed over all
        return full_precision(x).square()
    if torch.is_grad_enabled():  # the norm is not differentiable at zero
        return full_precision(x).pow(2).sum(axes)
    if x.shape[start:].numel() > tuning.PIECE_ELEMENTS:
        pieces, rest = cut(flatten_any_order(x, start))
        total = sum_of_squares(pieces, start + 1).sum(start)
        return total if rest is None else total + sum_of_squares(rest, start)
    return torch.linalg.vector_norm(x, dim=axes, dtype=dtype).square_()


def features_first(x: Tensor, groups: int) -> Tensor:
    """Arrange features as rows; the order of what they are multiplied over is any.

    Args:
        x: Tensor of shape ``[*, G, T, d]``.
        groups: The axis of G.

    Returns:
        Tensor of shape ``[G, d, K]``, a view where rows lie in memory one by one.
    """
    return flatten_any_order(x.movedim((groups, -1), (0, 1)), 2)


def sum_of_dots(columns: Tensor, others: Optional[Tensor] = None) -> Tensor:
    """Compute pairwise dot products, summed over columns.

    Args:
        columns: Tensor of shape ``[V, N, D]``.
        others: Tensor of shape ``[V, Q, D]``. Default: ``None`` for the same.

    Returns:
        Dot products of shape ``[N, Q]``.
    """
    exact = accumulator_dtype(columns.dtype) == columns.dtype
    columns = full_precision(columns)
    others = columns if others is None else full_precision(others)
    if columns.shape[2] <= tuning.PIECE_ELEMENTS or columns.is_cuda or not exact:
        if len(columns) == 1:  # which takes fewer steps
            return columns[0] @ others[0].mT
        return einsum(columns, others, "v n d, v m d -> n m")
    if columns.shape[2] <= tuning.BLOCKED_ELEMENTS and is_fast(
        columns[0], others[0].mT
    ):
        products = (matmul(rows, more.mT) for rows, more in zip(columns, others))
        return sum(products)  # type: ignore[return-value]
    (pieces, rest), (more, more_rest) = cut(columns), cut(others)
    both = zip(pieces.transpose(1, 2), more.transpose(1, 2))
    dots: Any = sum(bmm(rows, row.mT).sum(0) for rows, row in both)
    return dots if rest is None else dots + sum_of_dots(rest, more_rest)


def add_squares(total: Optional[Tensor], rows: Tensor) -> Tensor:
    """Add the squares of the rows to a total.

    Args:
        total: What the squares are added to, of shape ``[*]``; ``None`` for zero.
        rows: Rows of shape ``[R, *]``.

    Returns:
        The new total, of shape ``[*]``, in the type in which it is accumulated.
    """
    rows = full_precision(rows)
    if _is_slice_by_slice(rows):
        if total is None:
            total = torch.zeros_like(rows[0])
        for row in rows:
            total.addcmul_(row, row)
        return total
    part = rows.pow(2).sum(0)
    return part if total is None else total + part


def add_rows(total: Optional[Tensor], rows: Tensor) -> Tensor:
    """Add rows to a total.

    Args:
        total: What the rows are added to, of shape ``[*]``, and overwritten; ``None``
            for zero.
        rows: Rows of shape ``[R, *]``.

    Returns:
        The new total, of shape ``[*]``, no part of the rows' memory.
    """
    several = len(rows) > 1
    large = rows.numel() >= tuning.SUMMED_ELEMENTS
    if several and large and _is_slice_by_slice(rows):
        total = torch.zeros_like(rows[0]) if total is None else total
        if total.stride() == rows.stride()[1:]:  # products with a vector beat sums
            flat = flatten_any_order(total, 0)
            for some in flatten_any_order(rows, 1).split(tuning.SUMMED_ROWS):
                flat.addmv_(some.mT, some.new_ones(len(some)))
            return total
    part = sum_axis(rows, 0)
    if total is not None:
        return total.add_(part)
    return part if several else part.clone()


def scaled(x: Tensor, powers: Optional[Tensor], axis: int = 0) -> Tensor:
    """Multiply the samples of a tensor with numbers, in full precision.

    Args:
        x: Tensor with samples on an axis.
        powers: Numbers of shape ``[N]``, ``None`` for one.
        axis: The axis. Default: 0.

    Returns:
        The product.
    """
    x = full_precision(x)
    if powers is None:
        return x
    return x * powers.to(x.dtype).view(-1, *[1] * (x.dim() - 1 - axis))


def powers_of_two(a: Tensor) -> Optional[Tensor]:
    """Find what brings each sample's inputs to the size of one.

    The squares of inputs and cotangents may be out of the range of numbers where those
    of their products are not. Inputs are divided by these powers, and cotangents
    multiplied with them, which is exact.

    Args:
        a: Inputs of shape ``[N, *]``.

    Returns:
        Powers of two of shape ``[N]``, ``None`` if inputs are known to be of moderate
        size.
    """
    if not a.numel():
        return None
    rows, looks = a.detach().flatten(1), may_look(a)
    if looks:  # a quick answer
        smallest, largest = torch.linalg.vector_norm(rows, dim=1).aminmax()
        if 2.0**-MODERATE <= smallest.item() and largest.item() <= 4.0**MODERATE:
            return None
    size = torch.maximum(rows.amax(1), -rows.amin(1))
    exponents = torch.frexp(size).exponent
    if looks and bool((exponents.abs() <= MODERATE).all()):
        return None
    most = frexp(torch.finfo(a.dtype).max)[1] - MODERATE
    return torch.ldexp(torch.ones_like(size), exponents.clamp(-most, most))


def is_exact(*squares: Tensor) -> bool:
    """Tell whether sums of squares can have lost nothing to the range of numbers.

    Args:
        squares: Sums of squares ``[*]``, at least one tensor.

    Returns:
        Whether it is known that none is too small or too large.
    """
    if not may_look(squares[0]):
        return False
    for x in squares:
        if not x.numel():
            return False
        most = torch.finfo(x.dtype).max ** 0.5
        smallest, largest = x.aminmax()
        if not (1 / most <= smallest.item() and largest.item() <= most):
            return False
    return True


class Moments(NamedTuple):
    """What determines the variance of rows.

    Attributes:
        count: Number of rows.
        mean: Their mean, of shape ``[*]``.
        deviations: Sum of their squared deviations from the mean, of shape ``[*]``.
    """

    count: int  # type: ignore[assignment]
    mean: Tensor
    deviations: Tensor


def add_moments(moments: Optional[Moments], rows: Tensor) -> Moments:
    """Update moments, subtracting a mean before anything is squared.

    Args:
        moments: Moments of other rows, which may be overwritten; ``None`` for none.
        rows: Rows of shape ``[R, *]``.

    Returns:
        Moments of all rows.
    """
    number = len(rows)
    if _is_slice_by_slice(rows):
        if moments is None:
            zeros = torch.zeros_like(rows[0])
            moments = Moments(0, zeros, zeros.clone())
        before, mean, deviations = moments
        for count, row in enumerate(rows, start=before + 1):  # Welford (1962)
            delta = row - mean
            mean.add_(delta, alpha=1 / count)
            deviations.addcmul_(delta, delta, value=(count - 1) / count)
        return Moments(before + number, mean, deviations)
    mean = rows.mean(0)
    deviation = rows - mean
    rest = deviation.mean(0)  # what rounding has left of the mean
    mean = mean + rest
    deviations = add_squares(None, deviation) - number * rest.pow(2)
    if moments is None:
        return Moments(number, mean, deviations)
    # combine both (Chan, Golub, LeVeque, 1979)
    count = moments.count + number
    delta = mean - moments.mean
    weight = moments.count * number / count
    deviations = moments.deviations + deviations + weight * delta.pow(2)
    return Moments(count, moments.mean + delta * (number / count), deviations)


def _is_slice_by_slice(rows: Tensor) -> bool:
    """Tell whether it is faster to go through rows one by one, in place."""
    large = rows.numel() >= tuning.SLICE_ELEMENTS * max(1, len(rows))
    return large and may_write()


def sum_outer_products(b: Tensor, a: Tensor) -> Tensor:
    """Sum outer products over samples.

    Args:
        b: Left factors of shape ``[N, G, p]``.
        a: Right factors of shape ``[N, G, d]``.

    Returns:
        Sums of shape ``[G, p, d]``.
    """
    if b.shape[1] == 1:  # which takes fewer steps
        return matmul(b.squeeze(1).T, a.squeeze(1)).unsqueeze(0)
    return bmm(b.permute(1, 2, 0), a.transpose(0, 1))


@whole
def outer_products(b: Tensor, a: Tensor) -> Tensor:
    """Form outer products, in memory that is cheap to touch for the first time.

    Args:
        b: Left factors of shape ``[V, N, G, p]``.
        a: Right factors of shape ``[N, G, d]``.

    Returns:
        Outer products of shape ``[V, N, G, p, d]``.
    """
    if not may_write():
        return b.unsqueeze(-1) * a.unsqueeze(-2)
    out = huge_empty((*b.shape, a.shape[-1]), b.dtype, b.device)
    return torch.mul(b.unsqueeze(-1), a.unsqueeze(-2), out=out)
