"""Products of one parameter for each sample: what every form can do, and dense ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from math import nan
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from backpack.core.fast.memory import huge_empty, may_write
from backpack.core.per_sample import sums
from backpack.utils.types import accumulator_dtype, full_precision, version_of
from backpack.utils.unsqueeze import flatten

# Concatenates tensors of several processes along an axis
Gather = Callable[[Tensor, int], Tensor]
# Arranges the rows of some samples, along an axis and one of positions, as those of all
Place = Callable[[list[Tensor], int, int], Tensor]


class PerSample(ABC):
    """The products ``S[v, n]ᵀ J[n]`` for one parameter, in some form.

    Attributes:
        shape: The parameter's shape ``[*p]``.
        b: Cotangents, of which the products are made; the products, if at hand.
        num_columns: V, the number of columns.
        batch_size: N, the number of samples.
        shared: What was computed for a call's other parameters, to be used again.
        groups: G, the number of groups that channels are divided into.
        positions: T, the number of positions that share the parameter.
        sums_positions: Whether their cotangents are summed in any case.
        keeps_total: Whether :meth:`total` will be asked for, so that products that are
            formed shall be added up while they are at hand.
        stack: Products for each of the matrices that the parameter is a stack of;
            ``None`` if it is none.
    """

    shape: torch.Size
    b: Tensor
    num_columns: int
    batch_size: int
    groups = positions = 1
    sums_positions = False
    shared: dict[Any, tuple[Tensor, Tensor]] | None = None
    keeps_total = False
    stack: list[PerSample] | None = None
    _total: Tensor | None = None

    @abstractmethod
    def block(self, samples: slice) -> Tensor:
        """Form the products of some samples.

        Args:
            samples: Which ones (n of them).

        Returns:
            Products of shape ``[V, n, *p]``.
        """

    @abstractmethod
    def select(self, samples: Sequence[int] | slice) -> PerSample:
        """Restrict to some samples.

        Args:
            samples: Indices along the batch axis, or a slice.

        Returns:
            The same form for these samples.
        """

    @property
    def plain(self) -> PerSample:
        """The same products, with factors in the order of the parameter's axes."""
        return self

    @property
    def is_transposed(self) -> bool:
        """Whether the products are those of a transposed matrix ``[d, p]``."""
        return False

    def gathered(self, gather: Gather) -> PerSample:
        """Put the samples of several processes together.

        Args:
            gather: Concatenates tensors of all processes along an axis.

        Returns:
            Products for all samples.
        """
        return Dense(gather(self.individual(), 1), self.shape)

    def joins(self, other: PerSample) -> bool:
        """Tell whether the factors of other products can stand beside these.

        Args:
            other: Products of another call, of the same samples.

        Returns:
            Whether they can, so that nothing has to be formed to add both.
        """
        return False

    def joined(self, others: Sequence[PerSample]) -> PerSample:
        """Add the products of other calls, whose factors are put beside these.

        Args:
            others: Products that join these, of any number of calls.

        Returns:
            The sum of all.

        Raises:
            NotImplementedError: If nothing joins them, see :meth:`joins`.
        """
        raise NotImplementedError(f"Nothing joins {type(self).__name__} products.")

    def placed(self, others: Sequence[PerSample], place: Place) -> PerSample:
        """Describe the sum of products of some samples as products of all samples.

        Args:
            others: Products that join these, but for the samples they are of.
            place: Arranges the rows of some samples as those of all.

        Returns:
            The sum, in which those of other samples are zero.
        """
        every = [x.individual().unsqueeze(2) for x in (self, *others)]
        return Dense(place(every, 1, 2).sum(2), self.shape)

    def merged(self, n: int) -> PerSample:
        """Add up the products of each sample's rows.

        Args:
            n: Number of samples, whose R rows, one after the other, are now one each.

        Returns:
            Products of n samples.
        """
        products = self.individual().unflatten(1, (n, -1)).sum(2)
        return Dense(products, self.shape)

    def added_to(self, products: Tensor) -> Tensor:
        """Add these products to others.

        Args:
            products: Products of shape ``[V, N, *p]``, which may be overwritten.

        Returns:
            The sum of both.
        """
        return products + self.individual()

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
        return self.block(slice(0, self.batch_size)).sum(1)

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum the products over samples, each multiplied with a weight.

        Args:
            weights: Weights of shape ``[N]``.

        Returns:
            Sums of shape ``[V, *p]``, in the type in which they are accumulated.
        """

    def formed(self, for_dots: bool = False) -> PerSample:
        """Form the products, if a reduction would do so and another one will follow.

        Args:
            for_dots: Whether that is :meth:`dots`. Default: ``False``, for norms.

        Returns:
            The products at hand; the same as before where factors are cheaper.
        """
        return self

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
        for samples in sums.chunks(self.batch_size, self._elements_per_sample()):
            yield self.block(samples)

    def pieces(self) -> Iterator[Tensor]:
        """Form the products of all samples, some at a time.

        Yields:
            Products of shape ``[V, n, *p]``.
        """
        yield from self._adding_up(self._blocks())

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
                total = sums.add_rows(total, block[0])
        if total is not None:
            self._total = total

    def sq_norms(self) -> Tensor:
        """Squared norms of each sample's products, summed over columns.

        Returns:
            Squared norms of shape ``[N]``.
        """
        return torch.cat(
            [sums.sum_axis(sums.sum_of_squares(block, 2), 0) for block in self.pieces()]
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
        total: Tensor | None = None
        for block in self.pieces():
            total = sums.add_squares(total, block.flatten(0, 1))
        return total.contiguous()

    def _squares_per_sample(self) -> Tensor:
        if not (may_write() and self.num_columns):
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
        moments: sums.Moments | None = None
        for block in self._blocks():
            moments = sums.add_moments(moments, full_precision(block[0]))
        if self.keeps_total:
            self._total = moments.mean * self.batch_size
        return moments.deviations.contiguous() / self.batch_size

    def dots(self) -> Tensor:
        """Pairwise dot products of the samples' products, summed over columns.

        Returns:
            Dot products of shape ``[N, N]``.
        """
        return sums.sum_of_dots(flatten(self.individual(), 2))

    def share(
        self, what: Any, x: Tensor, compute: Callable[[], Tensor], copies: bool = True
    ) -> Tensor:
        """Compute from a tensor what may be known from a call's other parameters.

        Args:
            what: What is computed.
            x: The tensor. It is kept, so that its memory can't become another's.
            compute: Computes it.
            copies: Whether each parameter gets a copy. Default: ``True``.

        Returns:
            The result.
        """
        shared = {} if self.shared is None else self.shared
        steps = [step for step, size in zip(x.stride(), x.shape) if size > 1]
        key = (what, x.data_ptr(), x.dtype, x.is_conj(), x.shape, *steps)
        if key in shared:
            return shared[key][1].clone() if copies else shared[key][1]
        shared[key] = x, compute()
        return shared[key][1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the products."""
        return self.b.dtype

    @property
    def version(self) -> int:
        """What grows when cotangents are modified in place."""
        return version_of(self.b)

    @property
    def device(self) -> torch.device:
        """Device of the products."""
        return self.b.device

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
        self.products = self.b = products
        self.shape = shape
        self.num_columns, self.batch_size = products.shape[:2]

    def reshaped(self, shape: torch.Size) -> Dense:
        """Describe products with the Jacobian of another view of the same numbers.

        Args:
            shape: Other shape of as many numbers.

        Returns:
            Products ``[V, N, *shape]``.
        """
        return Dense(self.products.reshape(*self.products.shape[:2], *shape), shape)

    def scaled(self, factors: Tensor) -> Dense:
        """Describe products with the Jacobian of entries that are multiplied.

        Args:
            factors: Factor of each entry, ``[*p]``.

        Returns:
            The products.
        """
        return Dense(self.products * factors, self.shape)

    def rows(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Sort the rows of a matrix, or of several, by samples.

        Args:
            numbers: What is known of each row, ``[rows]``.

        Returns:
            The numbers ``[N, R]``; rows ``[V, N, R, width]``; and one where there is
            one, ``[N, R]``, else zero (``None``: everywhere). ``None`` if a row is of
            several samples.
        """
        rows = self.products.flatten(2).unflatten(2, (len(numbers), -1))
        return numbers.expand(self.batch_size, -1), rows, None

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        return self.products[:, samples]

    def individual(self) -> Tensor:  # noqa: D102
        # who asked for them may overwrite them, but autograd goes on with cotangents,
        # and another call may add its products to these
        return self.products.clone()

    def added_to(self, products: Tensor) -> Tensor:  # noqa: D102
        return products + self.products

    def sq_norms(self) -> Tensor:  # noqa: D102
        return sums.sum_axis(sums.sum_of_squares(self.products, 2), 0)

    def gathered(self, gather: Gather) -> Dense:  # noqa: D102
        return Dense(gather(self.products, 1), self.shape)

    def select(self, samples: Sequence[int] | slice) -> Dense:  # noqa: D102
        return Dense(self.products[:, samples], self.shape)

    def weighted_sum(self, weights: Tensor) -> Tensor:  # noqa: D102
        rows = full_precision(self.products).transpose(0, 1).flatten(1)
        return (weights.to(rows.dtype) @ rows).reshape(self.num_columns, *self.shape)


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

    @cached_property
    def products(self) -> Tensor:  # type: ignore[override]
        """The products themselves; formed when first asked for."""
        return sums.sum_axis(self.b, 2)

    def joins(self, other: PerSample) -> bool:  # noqa: D102
        return isinstance(other, Summed)

    def joined(self, others: Sequence[PerSample]) -> Summed:  # noqa: D102
        b = torch.cat([self.b, *[other.b for other in others]], dim=2)
        return Summed(b, self.shape, self.groups, self.sums_positions)

    def placed(self, others: Sequence[PerSample], place: Place) -> Summed:  # noqa: D102
        b = place([x.b for x in (self, *others)], 1, 2)
        return Summed(b, self.shape, self.groups, self.sums_positions)

    def merged(self, n: int) -> Summed:  # noqa: D102
        b = self.b.unflatten(1, (n, -1)).flatten(2, 3)
        return Summed(b, self.shape, self.groups, self.sums_positions)

    def select(self, samples: Sequence[int] | slice) -> Summed:  # noqa: D102
        b = self.b[:, samples]
        return Summed(b, self.shape, self.groups, self.sums_positions)
