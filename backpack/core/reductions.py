"""Per-sample products of one parameter, and what can be reduced from them.

Every layer describes the products ``S[v, n]ᵀ J[n]`` (cotangent columns times the
Jacobian of sample ``n`` with respect to one parameter, ``[V, N, *p]``) in the cheapest
form it has. The forms are

- :class:`Dense`: the products themselves (biases, normalisation layers, generic rule),
- :class:`Outer`: a sum of outer products over shared positions (linear, convolution),
- :class:`Rows`: rows that are added at given indices (embeddings).

Every reduction (norms, squares, dots, ...) is a method, written once per form, and uses
the cheapest known formula for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf, nan
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from einops import einsum, rearrange
from torch import Tensor

from backpack.utils.matmul import bmm, has_fast_blas, is_fast, is_fast_product, matmul
from backpack.utils.memory import huge_empty
from backpack.utils.types import accumulator_dtype, full_precision
from backpack.utils.unsqueeze import flatten, flatten_any_order

if TYPE_CHECKING:
    from backpack.core.derivatives.convnd import Unfolding

# Temporary buffers are cut into chunks of at most this many elements. They are then
# small enough to be recycled by the allocator and to stay in the processor's caches.
CHUNK_ELEMENTS = 2**19

# The same for inputs whose features are multiplied with each other, where each chunk
# adds to a large result.
UNFOLDED_ELEMENTS = 2**22

# On a CPU, norms and the dot products of few rows are added up number by number, and
# lose digits: half a permille for ten million numbers in single precision. Pieces of
# this length lose none.
PIECE_ELEMENTS = 2**14

# oneDNN adds up the dot products of few rows in blocks of its own. They are as good as
# pieces up to this length.
BLOCKED_ELEMENTS = 3 * 2**17

# From this size on, squares are added up slice by slice, in one pass over memory.
SLICE_ELEMENTS = 2**14

# Products of a single column with this many elements are formed some samples at a time.
# The memory for them and the unfolded inputs, up to so many elements, is recycled.
LARGE_PRODUCT = 2**16
STEP_ELEMENTS = 2**21

# As many rows are added up number by number.
SUMMED_ROWS = 64


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
    size = max(1, (most or CHUNK_ELEMENTS) // max(1, elements_per_item))
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
    least = -(-size // PIECE_ELEMENTS)
    for number in range(least, 2 * least):
        if size % number == 0:
            return rows.unflatten(-1, (number, -1)), None
    whole = size - size % PIECE_ELEMENTS
    pieces = rows[..., :whole].unflatten(-1, (-1, PIECE_ELEMENTS))
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
    if x.shape[start:].numel() > PIECE_ELEMENTS:
        pieces, rest = cut(flatten_any_order(x, start))
        total = sum_of_squares(pieces, start + 1).sum(start)
        return total if rest is None else total + sum_of_squares(rest, start)
    return torch.linalg.vector_norm(x, dim=axes, dtype=dtype).square_()


def sum_of_dots(columns: Tensor) -> Tensor:
    """Compute pairwise dot products, summed over columns.

    Args:
        columns: Tensor of shape ``[V, N, D]``.

    Returns:
        Dot products of shape ``[N, N]``.
    """
    exact = accumulator_dtype(columns.dtype) == columns.dtype
    columns = full_precision(columns)
    if columns.shape[2] <= PIECE_ELEMENTS or columns.is_cuda or not exact:
        return einsum(columns, columns, "v n d, v m d -> n m")
    if columns.shape[2] <= BLOCKED_ELEMENTS and is_fast(columns[0], columns[0].mT):
        return sum(matmul(rows, rows.mT) for rows in columns)
    pieces, rest = cut(columns)
    dots = sum(bmm(rows, rows.mT).sum(0) for rows in pieces.transpose(1, 2))
    return dots if rest is None else dots + sum_of_dots(rest)


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
        The new total, of shape ``[*]``: no part of the rows' memory.
    """
    several = len(rows) > 1
    if several and _is_slice_by_slice(rows):
        total = torch.zeros_like(rows[0]) if total is None else total
        if total.stride() == rows.stride()[1:]:  # products with a vector beat sums
            flat = flatten_any_order(total, 0)
            for some in flatten_any_order(rows, 1).split(SUMMED_ROWS):
                flat.addmv_(some.mT, some.new_ones(len(some)))
            return total
    part = sum_axis(rows, 0)
    if total is not None:
        return total.add_(part)
    return part if several else part.clone()


class Moments(NamedTuple):
    """What determines the variance of rows.

    Attributes:
        count: Number of rows.
        mean: Their mean, of shape ``[*]``.
        deviations: Sum of their squared deviations from the mean, of shape ``[*]``.
    """

    count: int
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
    large = rows.numel() >= SLICE_ELEMENTS * max(1, len(rows))
    return large and not torch.is_grad_enabled()


# A difference may be so many times smaller than what is subtracted: a digit is lost.
CANCELLATION = 10.0


# Concatenates tensors of several processes along an axis
Gather = Callable[[Tensor, int], Tensor]


class PerSample(ABC):
    """The products ``S[v, n]ᵀ J[n]`` for one parameter, in some form.

    Attributes:
        shape: The parameter's shape ``[*p]``.
        num_columns: V, the number of columns.
        batch_size: N, the number of samples.
        shared: What was computed for a call's other parameters, to be used again.
        keeps_total: Whether :meth:`total` will be asked for, so that products that are
            formed shall be added up while they are at hand.
    """

    shape: torch.Size
    num_columns: int
    batch_size: int
    shared: Optional[Dict[Any, Tuple[Tensor, Tensor]]] = None
    keeps_total = False
    _total: Optional[Tensor] = None

    @abstractmethod
    def block(self, samples: slice) -> Tensor:
        """Form the products of some samples.

        Args:
            samples: Which ones (n of them).

        Returns:
            Products of shape ``[V, n, *p]``.
        """

    @abstractmethod
    def select(self, samples: Sequence[int]) -> PerSample:
        """Restrict to some samples.

        Args:
            samples: Indices along the batch axis, or a slice.

        Returns:
            The same form for these samples.
        """

    def gathered(self, gather: Gather) -> PerSample:
        """Put the samples of several processes together.

        Args:
            gather: Concatenates tensors of all processes along an axis.

        Returns:
            Products for all samples.
        """
        return Dense(gather(self.individual(), 1), self.shape)

    def merge(self, other: PerSample) -> PerSample:
        """Add the products that another call contributes to the same parameter.

        Args:
            other: Products of the other call, same V and N.

        Returns:
            The sum of both.

        Raises:
            ValueError: If the calls saw different numbers of samples.
        """
        if self.batch_size != other.batch_size:
            raise ValueError(
                "A parameter is shared by calls with different sizes along axis 0 "
                f"({self.batch_size} and {other.batch_size}), so that individual "
                "gradients are not defined. Axis 0 must be the batch in every call: "
                "keep the samples there, or give each call a parameter of its own."
            )
        return Dense(self.individual() + other.individual(), self.shape)

    def individual(self) -> Tensor:
        """Form all products.

        Returns:
            Products of shape ``[V, N, *p]``.
        """
        [products] = self._adding_up([self.block(slice(0, self.batch_size))])
        return products

    def summed(self) -> Tensor:
        """Sum the products over samples.

        Returns:
            Sums of shape ``[V, *p]``.
        """
        return self.individual().sum(1)

    def total(self) -> Tensor:
        """Sum the products of a single column over samples, if that is still to do.

        Returns:
            Sum of shape ``[*p]``, which may lie in memory in any order.
        """
        if self._total is None:
            self._total = self.summed()[0]
        return self._total

    def _blocks(self) -> Iterator[Tensor]:
        """Form the products of all samples, chunk by chunk.

        Yields:
            Products of shape ``[V, n, *p]``.
        """
        for samples in self._sample_chunks():
            yield self.block(samples)

    def _adding_up(self, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Add blocks up on their way, if their sum is asked for.

        Args:
            blocks: Products of shape ``[V, n, *p]``.

        Yields:
            The same.
        """
        total, adds_up = None, self.keeps_total and self._total is None
        for block in blocks:
            yield block
            if adds_up:
                total = self._add(total, block)
        if total is not None:
            self._total = total

    def _add(self, total: Optional[Tensor], block: Tensor) -> Tensor:
        """Add a block that has been used to a sum, ``[*p]``; ``None`` for zero."""
        return add_rows(total, block[0])

    def sq_norms(self) -> Tensor:
        """Squared norms of each sample's products, summed over columns.

        Returns:
            Squared norms of shape ``[N]``.
        """
        return torch.cat(
            [
                sum_axis(sum_of_squares(block, 2), 0)
                for block in self._adding_up(self._blocks())
            ]
        )

    def squares(self, sum_batch: bool = True) -> Tensor:
        """Squares of the products, summed over columns.

        Args:
            sum_batch: Whether to sum over samples, too.

        Returns:
            ``[*p]``, or ``[N, *p]`` without summation over samples.
        """
        return self.finish_squares(self.partial_squares(sum_batch), sum_batch)

    def partial_squares(self, sum_batch: bool) -> Tensor:
        """Compute a statistic of the squares that is additive over columns.

        The columns can then be processed in chunks: add up the statistics and call
        :meth:`finish_squares` once.

        Args:
            sum_batch: Whether the squares shall be summed over samples.

        Returns:
            The statistic; unless a form knows better, the squares themselves.
        """
        if not sum_batch:
            return self._squares_per_sample()
        total: Optional[Tensor] = None
        for block in self._adding_up(self._blocks()):
            total = add_squares(total, block.flatten(0, 1))
        return total.contiguous()

    def _squares_per_sample(self) -> Tensor:
        if torch.is_grad_enabled():
            return full_precision(self.individual()).pow(2).sum(0)
        dtype = accumulator_dtype(self.dtype)
        out = huge_empty((self.batch_size, *self.shape), dtype, self.device)
        start = 0
        for block in self._blocks():
            first, *others = full_precision(block)
            end = start + len(first)
            target = torch.mul(first, first, out=out[start:end])
            for column in others:
                target.addcmul_(column, column)
            start = end
        return out

    def finish_squares(self, statistic: Tensor, sum_batch: bool) -> Tensor:
        """Turn the statistic of :meth:`partial_squares` into squares.

        Args:
            statistic: Sum of the columns' statistics.
            sum_batch: As in :meth:`partial_squares`.

        Returns:
            ``[*p]``, or ``[N, *p]`` without summation over samples.
        """
        return statistic

    def variance(self) -> Tensor:
        """Compute the population variance over samples of a single column.

        The mean is subtracted before anything is squared, so that nothing cancels.

        Returns:
            Variance of shape ``[*p]``.
        """
        if self.batch_size == 0:  # the mean of nothing
            dtype = accumulator_dtype(self.dtype)
            return torch.full(self.shape, nan, dtype=dtype, device=self.device)
        moments: Optional[Moments] = None
        for block in self._blocks():
            moments = add_moments(moments, full_precision(block[0]))
        if self.keeps_total:
            self._total = moments.mean * self.batch_size
        return moments.deviations.contiguous() / self.batch_size

    def dots(self) -> Tensor:
        """Pairwise dot products of the samples' products, summed over columns.

        Returns:
            Dot products of shape ``[N, N]``.
        """
        return sum_of_dots(flatten(self.individual(), 2))

    def share(
        self, what: Any, x: Tensor, compute: Callable[[], Tensor], copies: bool = True
    ) -> Tensor:
        """Compute from a tensor what may be known from a call's other parameters.

        Args:
            what: What is computed.
            x: The tensor. It is kept, so that its memory can't become another's.
            compute: Computes it.
            copies: Whether each parameter gets its own copy. Default: ``True``.

        Returns:
            The result.
        """
        shared = {} if self.shared is None else self.shared
        key = (what, x.data_ptr(), x.shape, x.stride())
        if key in shared:
            return shared[key][1].clone() if copies else shared[key][1]
        shared[key] = x, compute()
        return shared[key][1]

    def _squared_column(self, b: Tensor) -> Tensor:
        """Square cotangents: those at a layer's weight are those at its bias.

        Args:
            b: Cotangents of a single column and position, of shape ``[1, N, G, p]``.

        Returns:
            Squares of shape ``[N, G, p]``.
        """

        def compute() -> Tensor:
            return full_precision(b).pow(2).squeeze(0)

        return self.share("squares", b, compute, copies=False)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the products."""
        return self._cotangents.dtype

    @property
    def device(self) -> torch.device:
        """Device of the products."""
        return self._cotangents.device

    @property
    @abstractmethod
    def _cotangents(self) -> Tensor:
        """A tensor with the products' type and device."""

    def _sample_chunks(self) -> Iterator[slice]:
        return chunks(self.batch_size, self._elements_per_sample())

    def _elements_per_sample(self) -> int:
        """Count the elements of the buffers that :meth:`block` needs for a sample."""
        return self.num_columns * self.shape.numel()


class Dense(PerSample):
    """Products that are at hand."""

    def __init__(self, products: Tensor, shape: torch.Size):
        """Store the products.

        Args:
            products: Products of shape ``[V, N, *p]``.
            shape: The parameter's shape ``[*p]``.
        """
        self.products = products
        self.shape = shape
        self.num_columns, self.batch_size = products.shape[:2]

    @property
    def _cotangents(self) -> Tensor:
        return self.products

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        return self.products[:, samples]

    def individual(self) -> Tensor:  # noqa: D102
        # who asked for them may overwrite them, but autograd goes on with cotangents,
        # and another call may add its products to these
        return self.products.clone()

    def sq_norms(self) -> Tensor:  # noqa: D102
        return sum_axis(sum_of_squares(self.products, 2), 0)

    def select(self, samples: Sequence[int]) -> Dense:  # noqa: D102
        return Dense(self.products[:, samples], self.shape)

    def summed(self) -> Tensor:  # noqa: D102
        return self.products.sum(1)


class Summed(Dense):
    """Products that are sums of the cotangents over shared positions: biases.

    Attributes:
        b: Cotangents of shape ``[V, N, T, p]``.
        groups: Number of groups that p consists of.
        sums_positions: See :class:`Outer`.
    """

    def __init__(
        self,
        b: Tensor,
        shape: torch.Size,
        groups: int = 1,
        sums_positions: bool = False,
    ):
        """Store the cotangents.

        Args:
            b: Cotangents of shape ``[V, N, T, p]``.
            shape: The parameter's shape ``[p]``.
            groups: Number of groups that p consists of. Default: 1.
            sums_positions: See :class:`Outer`. Default: ``False``.
        """
        self.b, self.groups, self.sums_positions = b, groups, sums_positions
        self.num_columns, self.batch_size, self.positions = b.shape[:3]
        self.shape = shape
        self._products: Optional[Tensor] = None

    @property
    def products(self) -> Tensor:
        """The products themselves; formed when first asked for."""
        if self._products is None:
            self._products = sum_axis(self.b, 2)
        return self._products

    @property
    def _cotangents(self) -> Tensor:
        return self.b

    def merge(self, other: PerSample) -> PerSample:  # noqa: D102
        alike = isinstance(other, Summed) and self.batch_size == other.batch_size
        if not alike:
            return super().merge(other)
        b = torch.cat([self.b, other.b], dim=2)
        return Summed(b, self.shape, self.groups, self.sums_positions)

    def partial_squares(self, sum_batch: bool) -> Tensor:  # noqa: D102
        if sum_batch and self.num_columns == self.positions == 1:
            return self._squared_column(self.b).sum(0).squeeze(0)
        return super().partial_squares(sum_batch)

    def select(self, samples: Sequence[int]) -> Summed:  # noqa: D102
        b = self.b[:, samples]
        return Summed(b, self.shape, self.groups, self.sums_positions)


# From this number of positions on, forming the individual gradients, to sum them on the
# way, costs less than Gram matrices and the sum by autograd; without and with a BLAS
# that uses all of the processor.
GRAM_POSITIONS = {False: 40, True: 100}


def prefers_gram(positions: int, d: int, p: int, adds_up: bool = False) -> bool:
    """Tell whether norms of outer products are cheaper without forming these.

    Args:
        positions: Number of outer products that are added up.
        d: Number of input features.
        p: Number of output features.
        adds_up: Whether their sum over samples is needed, too. Default: ``False``.

    Returns:
        Whether Gram matrices of both factors take fewer multiplications.
    """
    if adds_up and positions >= GRAM_POSITIONS[has_fast_blas()]:
        return False
    return positions * (d + p) < d * p


class Direct(NamedTuple):
    """How to form products without unfolding the inputs.

    Attributes:
        inputs: Inputs of shape ``[N, *]``.
        cotangents: Cotangents of shape ``[V, N, *]``.
        form: Maps both, restricted to n samples, to their products ``[V, n, *p]``.
    """

    inputs: Tensor
    cotangents: Tensor
    form: Callable[[Tensor, Tensor], Tensor]

    def select(self, samples: Union[slice, Tensor]) -> Direct:
        """Restrict to some samples.

        Args:
            samples: Which ones.

        Returns:
            The same for these samples.
        """
        return Direct(self.inputs[samples], self.cotangents[:, samples], self.form)

    def products(self) -> Tensor:
        """Form the products of all samples.

        Returns:
            Products of shape ``[V, N, *p]``.
        """
        return self.form(self.inputs, self.cotangents)


class Outer(PerSample):
    """Products that are sums of outer products over shared positions.

    The product of column v and sample n is, per group g,
    ``Σ_t b[v, n, g, t] ⊗ a[n, g, t]`` with ``a`` the layer's (unfolded) input and ``b``
    the cotangents at its output. With T positions, the formulas' costs in multiply-adds
    decide between forming the products and working on the factors.

    Attributes:
        a: Inputs of shape ``[N, G, T, d]``; formed when first asked for.
        b: Cotangents of shape ``[V, N, G, T, p]``.
        fold: Maps ``[V, N, G, p, d]`` to ``[V, N, *p]``.
        sums_positions: Whether Kronecker factors sum cotangents over positions unless
            the user chooses otherwise: the convention for convolutions.
    """

    def __init__(
        self,
        a: Callable[[], Tensor],
        b: Tensor,
        shape: torch.Size,
        fold: Optional[Callable[[Tensor], Tensor]] = None,
        direct: Optional[Direct] = None,
        unfolding: Optional[Unfolding] = None,
        sums_positions: bool = False,
    ):
        """Store the factors.

        Args:
            a: Function that returns the inputs ``[N, G, T, d]``.
            b: Cotangents of shape ``[V, N, G, T, p]``.
            shape: The parameter's shape ``[*p]``.
            fold: Maps ``[*, G, p, d]`` to ``[*, *p]``. Default: a plain reshape.
            direct: A faster way than unfolding to form products. Default: ``None``.
            unfolding: Faster ways than ``a`` to unfold the inputs of some samples.
                Default: ``None``.
            sums_positions: Convention for Kronecker factors. Default: ``False``.
        """
        self.sums_positions = sums_positions
        self._make_a = a
        self._a: Optional[Tensor] = None
        self.b = b
        self.shape = shape
        self.fold = fold or (lambda mat: mat.reshape(*mat.shape[:-3], *shape))
        self._reorder = fold
        self._direct = direct
        self._unfolding = unfolding
        self.num_columns, self.batch_size, self.groups, self.positions, p = b.shape
        # known without unfolding the inputs
        self._sizes = (shape.numel() // max(1, self.groups * p), p)

    @property
    def a(self) -> Tensor:
        """Inputs of shape ``[N, G, T, d]``."""
        if self._a is None:
            self._a = self._make_a()
        return self._a

    def _unfolder(self) -> Optional[Unfolding]:
        """Return faster ways to unfold, unless the inputs are unfolded already."""
        return self._unfolding if self._a is None else None

    @property
    def _cotangents(self) -> Tensor:
        return self.b

    def merge(self, other: PerSample) -> PerSample:  # noqa: D102
        alike = (
            isinstance(other, Outer)
            and self.batch_size == other.batch_size
            and self.b.shape[2::2] == other.b.shape[2::2]
            and self._sizes == other._sizes
            and self.fold_key == other.fold_key
        )
        if not alike:
            return super().merge(other)
        a = torch.cat([self.a, other.a], dim=2)
        b = torch.cat([self.b, other.b], dim=3)
        sums = self.sums_positions
        return Outer(lambda: a, b, self.shape, self._reorder, sums_positions=sums)

    @property
    def fold_key(self) -> Tuple:
        """What two layers must share for their positions to be put side by side."""
        return (getattr(self.fold, "__qualname__", None), self.shape)

    def select(self, samples: Sequence[int]) -> Outer:  # noqa: D102
        picked = samples
        if not isinstance(samples, slice):  # once, on the device
            picked = torch.as_tensor(samples, dtype=torch.long, device=self.b.device)
        direct = self._direct and self._direct.select(picked)
        b = self.b[:, picked]
        return Outer(
            lambda: self.a[picked],
            b,
            self.shape,
            self._reorder,
            direct,
            sums_positions=self.sums_positions,
        )

    def gathered(self, gather: Gather) -> PerSample:  # noqa: D102
        d, p = self._sizes
        if self.positions * (d + p) >= d * p:  # the products are fewer numbers
            return super().gathered(gather)
        a, b = gather(self.a, 0), gather(self.b, 1)
        return Outer(lambda: a, b, self.shape, self._reorder)

    @property
    def _is_large(self) -> bool:
        """Whether products are formed some samples at a time, in recycled memory."""
        return (
            self.num_columns == 1 < self.positions
            and self.shape.numel() >= LARGE_PRODUCT
            and self.batch_size > 0
            and not torch.is_grad_enabled()
            # a GPU multiplies all matrices at once
            and (self._direct is not None or self.device.type == "cpu")
        )

    @property
    def _is_direct(self) -> bool:
        """Whether products are formed without unfolding the inputs."""
        return self._direct is not None and self._a is None

    def _blocks(self) -> Iterator[Tensor]:
        if not self._is_large:
            return super()._blocks()
        if self._is_direct:
            return map(self.block, self._steps(keeps=False))
        return self._products(any_order=True)

    @property
    def _one_by_one(self) -> bool:
        """Whether each large product gets memory of its own: oneDNN fills no other."""
        d, p = self._sizes
        sizes = p, self.positions, d
        return not self._is_direct and is_fast_product(sizes, self.b, self.batch_size)

    def _steps(self, keeps: bool) -> Iterator[slice]:
        """Choose for how many samples large products are formed at once.

        Args:
            keeps: Whether memory for the products is at hand.

        Returns:
            The samples.
        """
        if self._one_by_one:  # each is then still in the processor's caches
            return chunks(self.batch_size, 1, most=1)
        unfolded = self.groups * self.positions * self._sizes[0]
        if keeps:
            return chunks(self.batch_size, unfolded, UNFOLDED_ELEMENTS)
        size = self.shape.numel() + (0 if self._is_direct else unfolded)
        return chunks(self.batch_size, size, STEP_ELEMENTS)

    def _unfold_and_fold(
        self, any_order: bool
    ) -> Tuple[Callable[[slice], Tensor], Callable[[Tensor], Tensor]]:
        """Choose how to unfold inputs, and to fold the products with them.

        Args:
            any_order: Whether products may lie in memory in any order.

        Returns:
            Function that unfolds some samples, ``[n, G, T, d]``, and function that maps
            ``[*, G, p, d]`` to ``[*, *p]``.
        """
        unfolding = self._unfolder()
        if unfolding is None:
            return lambda samples: self.a[samples], self.fold
        if any_order and self._one_by_one:
            return unfolding.rows, unfolding.fold_rows
        return lambda samples: unfolding.matrices(samples).mT, self.fold

    def _products(
        self, any_order: bool, out: Optional[Tensor] = None
    ) -> Iterator[Tensor]:
        """Form large products with unfolded inputs, some samples at a time.

        Args:
            any_order: Whether they may lie in memory in any order.
            out: Memory for all products, of shape ``[1, N, *p]``. Default: memory that
                nobody else needs, for each step.

        Yields:
            Products of shape ``[1, n, *p]``.
        """
        unfold, fold = self._unfold_and_fold(any_order)
        steps = list(self._steps(keeps=out is not None))
        for samples in steps:
            a, b = unfold(samples), self.b[0, samples].mT
            target = None
            if out is not None and self._reorder is None:
                target = out[0, samples].view(-1, *self._sizes[::-1])
            products = bmm(b.flatten(0, 1), a.flatten(0, 1), len(steps), target)
            products = fold(products.unflatten(0, (1, -1, self.groups)))
            if out is not None and target is None:
                products = out[:, samples].copy_(products)
            yield products

    def _add(self, total: Optional[Tensor], block: Tensor) -> Tensor:
        if total is None and self._is_large and block.shape[1] == 1:
            return block[0, 0]
        return super()._add(total, block)

    def individual(self) -> Tensor:  # noqa: D102
        if not self._is_large:
            return super().individual()
        return self._collect(any_order=False)

    def _collect(self, any_order: bool) -> Tensor:
        """Form large products, side by side in memory.

        Args:
            any_order: Whether the numbers of a product may change their places.

        Returns:
            Products of shape ``[1, N, *p]``.
        """
        if self._is_direct:
            out = self._direct.products()
        else:
            shape = 1, self.batch_size, *self.shape
            out = huge_empty(shape, self.dtype, self.device)
            for _ in self._products(any_order, out):
                pass
        if self.keeps_total and self._total is None:
            total = add_rows(None, out[0])
            if self._reorder is None:
                _, fold = self._unfold_and_fold(any_order)
                total = fold(total.view(self.groups, *self._sizes[::-1]))
            self._total = total
        return out

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        if self._is_direct:
            return self._direct.select(samples).products()
        return self.fold(self._outer(samples))

    def summed(self) -> Tensor:  # noqa: D102
        b = rearrange(self.b, "v n g t p -> g (v p) (n t)")
        a = rearrange(self.a, "n g t d -> g (n t) d")
        products = bmm(b, a).unflatten(1, (self.num_columns, -1))
        return self.fold(products.transpose(0, 1))

    def sq_norms(self) -> Tensor:  # noqa: D102
        if self.positions == 1:
            b = sum_axis(sum_of_squares(self.b, 3), 0)
            return sum_axis(b * sum_of_squares(self.a, 2), 1)
        adds_up = self.keeps_total and self._total is None
        if not prefers_gram(self.positions, *self._sizes, adds_up):
            return super().sq_norms()
        return torch.cat([self._gram_norms(n) for n in self._gram_chunks()])

    def partial_squares(self, sum_batch: bool) -> Tensor:  # noqa: D102
        if self.positions > 1:
            return super().partial_squares(sum_batch)
        b = self.b.squeeze(3)
        if self.num_columns == 1:
            return self._squared_column(b)
        return full_precision(b).pow(2).sum(0)

    def finish_squares(
        self, statistic: Tensor, sum_batch: bool
    ) -> Tensor:  # noqa: D102
        if self.positions > 1:
            return statistic
        a = full_precision(self.a.squeeze(2)).pow(2)
        if sum_batch:
            return self.fold(sum_outer_products(statistic, a))
        return self.fold(outer_products(statistic.unsqueeze(0), a).squeeze(0))

    def variance(self) -> Tensor:  # noqa: D102
        if self.positions > 1 or self.batch_size == 0:
            return super().variance()
        # Two matrix products are all it takes, unless moment and squared mean cancel
        a, b = full_precision(self.a).squeeze(2), full_precision(self.b[0]).squeeze(2)
        total = sum_outer_products(b, a)
        moment = sum_outer_products(b.pow(2) / self.batch_size, a.pow(2))
        variance = torch.addcmul(moment, total, total, value=-1 / self.batch_size**2)
        excess = torch.sub(moment, variance, alpha=CANCELLATION)
        if self.keeps_total:
            self._total = self.fold(total)
        if excess.numel() and excess.amax() > 0:
            return super().variance()
        return self.fold(variance)

    def dots(self) -> Tensor:  # noqa: D102
        n, t = self.batch_size, self.positions
        d, p = self._sizes
        if n * t**2 * (d + p) >= (t + n) * d * p:
            if self._is_large:
                return sum_of_dots(flatten(self._collect(any_order=True), 2))
            return super().dots()
        pattern = "n g t k, m g s k -> g n t m s"
        a, columns = full_precision(self.a), full_precision(self.b)
        gram_a = einsum(a, a, pattern)
        return sum(
            (einsum(b, b, pattern) * gram_a).sum((0, 2, 4)) for b in columns.unbind()
        )

    def input_gram(self, scale: float) -> Tensor:
        """Sum the outer products of the inputs with themselves.

        Args:
            scale: Number to multiply the sum with.

        Returns:
            Σ a aᵀ over samples and positions, of shape ``[G, d, d]``.
        """
        unfolding = self._unfolder()
        if unfolding is None:
            rows = full_precision(self.a).permute(1, 3, 0, 2).flatten(2)
            if 0 < rows.shape[2] < rows.shape[1]:  # they are fewer numbers
                return gram(rows * scale**0.5)
            return gram(rows).mul_(scale)
        size = self.groups * self.positions * self._sizes[0]
        total = 0.0
        for samples in chunks(self.batch_size, size, UNFOLDED_ELEMENTS):
            total = total + gram(full_precision(unfolding.features(samples)))
        return total.mul_(scale)

    def _outer(self, samples: slice) -> Tensor:
        """Form ``[V, n, G, p, d]``, with the columns as rows of one product."""
        a, b = self.a[samples], self.b[:, samples]
        if self.positions == 1:
            return outer_products(b.squeeze(3), a.squeeze(2))
        rows = rearrange(b, "v n g t p -> (n g) (v p) t")
        columns = rearrange(a, "n g t d -> (n g) t d")
        return rearrange(
            bmm(rows, columns),
            "(n g) (v p) d -> v n g p d",
            g=self.groups,
            v=self.num_columns,
        )

    def _elements_per_sample(self) -> int:
        rows = self.num_columns * self.groups * self.positions * self.b.shape[-1]
        return super()._elements_per_sample() + rows

    def _gram_chunks(self) -> Iterator[slice]:
        return chunks(self.batch_size, self.groups * self.positions**2)

    def _gram_norms(self, samples: slice) -> Tensor:
        unfolding = self._unfolder()
        a = unfolding.rows(samples) if unfolding else self.a[samples]
        a = full_precision(a.flatten(0, 1))
        gram_a = bmm(a, a.mT)
        total = 0.0
        for b in full_precision(self.b[:, samples].flatten(1, 2)).unbind():
            dots = (gram_a * bmm(b, b.mT)).unflatten(0, (-1, self.groups))
            total = total + dots.sum((1, 2, 3))
        return total


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


def outer_products(b: Tensor, a: Tensor) -> Tensor:
    """Form outer products, in memory that is cheap to touch for the first time.

    Args:
        b: Left factors of shape ``[V, N, G, p]``.
        a: Right factors of shape ``[N, G, d]``.

    Returns:
        Outer products of shape ``[V, N, G, p, d]``.
    """
    if torch.is_grad_enabled():
        return b.unsqueeze(-1) * a.unsqueeze(-2)
    out = huge_empty((*b.shape, a.shape[-1]), b.dtype, b.device)
    return torch.mul(b.unsqueeze(-1), a.unsqueeze(-2), out=out)


# A symmetric product is formed in this many strips, if it has this many rows, and this
# many numbers are added up for each element.
STRIPS, MIN_ROWS, MIN_SUMMANDS = 6, 256, 256

# Matrix products are fastest if their sizes are multiples of it.
LANES = 16


def gram(rows: Tensor) -> Tensor:
    """Multiply all rows with each other.

    The result is symmetric: strips of columns need only be formed from the diagonal on.

    Args:
        rows: Rows of shape ``[G, D, R]``.

    Returns:
        Products of shape ``[G, D, D]``.
    """
    size, summands = rows.shape[1:]
    if size < MIN_ROWS or summands < MIN_SUMMANDS or torch.is_grad_enabled():
        return bmm(rows, rows.mT)
    out = rows.new_empty(len(rows), size, size)
    step = -(-size // (STRIPS * LANES)) * LANES
    for start in range(0, size, step):
        end = min(start + step, size)
        strip = bmm(rows[:, start:], rows[:, start:end].mT)
        out[:, start:, start:end] = strip
        out[:, start:end, end:] = strip[:, end - start :].mT
    return out


class Rows(PerSample):
    """Products that add rows at given indices: ``p[id[n, t]] += b[v, n, t]``.

    Attributes:
        ids: Indices of shape ``[N, T]``.
        b: Cotangents of shape ``[V, N, T, D]``.
    """

    def __init__(
        self,
        ids: Tensor,
        b: Tensor,
        shape: torch.Size,
        valid: Optional[Tensor] = None,
    ):
        """Store indices and rows.

        Args:
            ids: Indices of shape ``[N, T]``.
            b: Cotangents of shape ``[V, N, T, D]``.
            shape: The parameter's shape ``[vocabulary, D]``.
            valid: Where something is added, of shape ``[N, T]``. Default: everywhere.
        """
        self.ids, self.shape = ids, shape
        self.valid = torch.ones_like(ids, dtype=b.dtype) if valid is None else valid
        self.b = b if valid is None else b * valid.unsqueeze(-1)
        self.num_columns, self.batch_size, self.positions = b.shape[:3]

    @property
    def _cotangents(self) -> Tensor:
        return self.b

    def merge(self, other: PerSample) -> PerSample:  # noqa: D102
        if not isinstance(other, Rows) or self.batch_size != other.batch_size:
            return super().merge(other)
        ids = torch.cat([self.ids, other.ids], dim=1)
        valid = torch.cat([self.valid, other.valid], dim=1)
        return Rows(ids, torch.cat([self.b, other.b], dim=2), self.shape, valid)

    def select(self, samples: Sequence[int]) -> Rows:  # noqa: D102
        ids, valid = self.ids[samples], self.valid[samples]
        return Rows(ids, self.b[:, samples], self.shape, valid)

    def gathered(self, gather: Gather) -> PerSample:  # noqa: D102
        ids, valid = gather(self.ids, 0), gather(self.valid, 0)
        return Rows(ids, gather(self.b, 1), self.shape, valid)

    def input_diagonal(self, average: bool) -> Tensor:
        """Sum the squares of the inputs, which are one-hot vectors.

        Args:
            average: Whether they are averaged over positions before they are squared.

        Returns:
            Sum over samples and positions, of shape ``[vocabulary]``.
        """
        valid = full_precision(self.valid)
        counts = valid.new_zeros(self.shape[0])
        if not average:
            return counts.index_add(0, self.ids.flatten(), valid.flatten())
        ones = Rows(self.ids, self.valid[None, ..., None], self.shape)
        _, ids, sums = ones._segments()
        means = sums[0, :, 0] / self.ids.shape[1]
        return counts.index_add(0, ids, means.pow(2))

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        ids, b = self.ids[samples], self.b[:, samples]
        (v, n), (vocabulary, _) = b.shape[:2], self.shape
        offsets = vocabulary * torch.arange(n, device=ids.device)
        rows = (ids + offsets.unsqueeze(1)).flatten()
        out = b.new_zeros(v, n * vocabulary, b.shape[-1])
        out = out.index_add(1, rows, b.flatten(1, 2))
        return out.reshape(v, n, *self.shape)

    def summed(self) -> Tensor:  # noqa: D102
        out = self.b.new_zeros(self.num_columns, *self.shape)
        return out.index_add(1, self.ids.flatten(), self.b.flatten(1, 2))

    def sq_norms(self) -> Tensor:  # noqa: D102
        samples, _, sums = self._segments()
        norms = sums.pow(2).sum((0, 2))
        return norms.new_zeros(self.batch_size).index_add(0, samples, norms)

    def partial_squares(self, sum_batch: bool) -> Tensor:  # noqa: D102
        if not sum_batch:
            return super().partial_squares(sum_batch)
        _, ids, sums = self._segments()
        squares = sums.pow(2).sum(0)
        return squares.new_zeros(self.shape).index_add(0, ids, squares)

    def variance(self) -> Tensor:  # noqa: D102
        # Only the pairs (sample, index) that occur deviate from "zero minus mean".
        _, ids, sums = self._segments()
        mean = sums.new_zeros(self.shape).index_add(0, ids, sums[0]) / self.batch_size
        deviation = (sums[0] - mean[ids]).pow(2)
        total = torch.zeros_like(mean).index_add(0, ids, deviation)
        occurrences = torch.bincount(ids, minlength=self.shape[0])
        absent = (self.batch_size - occurrences).to(mean.dtype).unsqueeze(1)
        return (total + absent * mean.pow(2)) / self.batch_size

    def dots(self) -> Tensor:  # noqa: D102
        samples, ids, sums = self._segments()
        dots = sums.new_zeros(self.batch_size, self.batch_size)
        for rows in chunks(ids.numel(), ids.numel()):
            same = (ids[rows].unsqueeze(1) == ids).to(sums.dtype)
            pairs = einsum(sums[:, rows], sums, "v r k, v s k -> r s") * same
            by_sample = pairs.new_zeros(len(pairs), self.batch_size)
            by_sample = by_sample.index_add(1, samples, pairs)
            dots = dots.index_add(0, samples[rows], by_sample)
        return dots

    def _segments(self) -> Tuple[Tensor, Tensor, Tensor]:
        """Add up the rows of each pair (sample, index) that occurs.

        Returns:
            The R pairs' samples ``[R]``, indices ``[R]`` and row sums ``[V, R, D]``.
        """
        vocabulary = self.shape[0]
        offsets = vocabulary * torch.arange(self.batch_size, device=self.ids.device)
        keys = (self.ids + offsets.unsqueeze(1)).flatten()
        pairs, position = torch.unique(keys, return_inverse=True)
        b = full_precision(self.b.flatten(1, 2))
        sums = b.new_zeros(self.num_columns, pairs.numel(), b.shape[-1])
        sums = sums.index_add(1, position, b)
        return pairs // vocabulary, pairs % vocabulary, sums


def merge_all(products: List[PerSample]) -> PerSample:
    """Add the products that several calls contribute to the same parameter.

    Args:
        products: One or more products with the same V and N.

    Returns:
        Their sum.
    """
    total = products[0]
    for product in products[1:]:
        total = total.merge(product)
    return total
