"""Products that add rows at given indices: embeddings."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from einops import einsum
from torch import Tensor

from backpack.core.fast.memory import may_write
from backpack.core.per_sample.base import Gather, PerSample, Place
from backpack.core.per_sample.sums import chunks, scaled
from backpack.utils.types import full_precision


def left_out(b: Tensor, valid: Tensor) -> Tensor:
    """Take cotangents out of what is not added, as of padding, whatever they are.

    Args:
        b: Cotangents of shape ``[V, *, D]``.
        valid: Where something is added, of shape ``[*]``: elsewhere, it is zero.

    Returns:
        The same with zeros there.
    """
    return b.masked_fill((valid == 0).unsqueeze(-1), 0)


class Rows(PerSample):
    """Products that add rows at given indices: ``p[id[n, t]] += b[v, n, t]``.

    What is picked may have several axes, which are one here, of size D.

    Attributes:
        ids: Indices of shape ``[N, T]``.
        b: Cotangents of shape ``[V, N, T, D]``.
        table: The parameter's shape as a matrix, ``[vocabulary, D]``.
    """

    def __init__(
        self, ids: Tensor, b: Tensor, shape: torch.Size, valid: Tensor | None = None
    ):
        """Store indices and rows.

        Args:
            ids: Indices of shape ``[N, T]``.
            b: Cotangents of shape ``[V, N, T, D]``.
            shape: The parameter's shape ``[vocabulary, *]``.
            valid: Where something is added, of shape ``[N, T]``. Default: everywhere.
        """
        self.ids, self.shape = ids, shape
        self.table = torch.Size([shape[0], b.shape[-1]])
        self.valid = torch.ones_like(ids, dtype=b.dtype) if valid is None else valid
        self.b = b if valid is None else left_out(b, valid)
        self.num_columns, self.batch_size, self.positions = b.shape[:3]

    def joins(self, other: PerSample) -> bool:  # noqa: D102
        return type(other) is type(self)

    def joined(self, others: Sequence[PerSample]) -> Rows:  # noqa: D102
        every: list[Any] = [self, *others]
        ids = torch.cat([x.ids for x in every], dim=1)
        valid = torch.cat([x.valid for x in every], dim=1)
        return type(self)(
            ids, torch.cat([x.b for x in every], dim=2), self.shape, valid
        )

    def placed(self, others: Sequence[PerSample], place: Place) -> Rows:  # noqa: D102
        every: list[Any] = [self, *others]
        ids = place([x.ids for x in every], 0, 1)
        valid, b = place([x.valid for x in every], 0, 1), [x.b for x in every]
        return type(self)(ids, place(b, 1, 2), self.shape, valid)

    def select(self, samples: Sequence[int] | slice) -> Rows:  # noqa: D102
        ids, valid = self.ids[samples], self.valid[samples]
        return type(self)(ids, self.b[:, samples], self.shape, valid)

    def gathered(self, gather: Gather) -> PerSample:  # noqa: D102
        ids, valid = gather(self.ids, 0), gather(self.valid, 0)
        return type(self)(ids, gather(self.b, 1), self.shape, valid)

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
        _, ids, sums, _ = ones._segments()
        means = sums[0, :, 0] / self.ids.shape[1]
        return counts.index_add(0, ids, means.pow(2))

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        is_all = len(range(self.batch_size)[samples]) == self.batch_size
        part = self if is_all else self.select(samples)
        shape = part.num_columns, part.batch_size, *self.shape
        return part.added_to(self.b.new_zeros(shape))

    def reshaped(self, shape: torch.Size) -> Rows | None:
        """Describe the same products for the parameter in another shape.

        Args:
            shape: The other shape.

        Returns:
            The products, ``None`` if there are other rows in it.
        """
        if not shape or shape[0] != self.shape[0]:
            return None
        return Rows(self.ids, self.b, shape, self.valid)

    def added_to(self, products: Tensor) -> Tensor:  # noqa: D102
        if products.dtype != self.dtype:
            return super().added_to(products)
        offsets = self.shape[0] * torch.arange(len(self.ids), device=self.ids.device)
        rows = (self.ids + offsets.unsqueeze(1)).flatten()
        size = len(products), len(self.ids) * self.shape[0], self.table[1]
        flat = products.reshape(size)
        b = self.b.flatten(1, 2)
        add = flat.index_add_ if may_write() else flat.index_add
        return add(1, rows, b).view(products.shape)

    def summed(self) -> Tensor:  # noqa: D102
        out = self.b.new_zeros(self.num_columns, *self.table)
        out = out.index_add(1, self.ids.flatten(), self.b.flatten(1, 2))
        return out.view(self.num_columns, *self.shape)

    def weighted_sum(self, weights: Tensor) -> Tensor:  # noqa: D102
        return Rows(self.ids, scaled(self.b, weights, 1), self.shape).summed()

    def sq_norms(self) -> Tensor:  # noqa: D102
        samples, _, sums, _ = self._segments()
        norms = sums.pow(2).sum((0, 2))
        return norms.new_zeros(self.batch_size).index_add(0, samples, norms)

    def partial_squares(self, sum_batch: bool) -> Tensor:  # noqa: D102
        if not sum_batch:
            return super().partial_squares(sum_batch)
        _, ids, sums, _ = self._segments()
        squares = sums.pow(2).sum(0)
        squares = squares.new_zeros(self.table).index_add(0, ids, squares)
        return squares.view(self.shape)

    def variance(self) -> Tensor:  # noqa: D102
        # Only the pairs (sample, index) that occur deviate from "zero minus mean".
        _, ids, sums, occurs = self._segments()
        occurs = occurs.to(sums.dtype)
        mean = sums.new_zeros(self.table).index_add(0, ids, sums[0]) / self.batch_size
        deviation = (sums[0] - mean[ids]).pow(2) * occurs.unsqueeze(1)
        total = torch.zeros_like(mean).index_add(0, ids, deviation)
        occurrences = occurs.new_zeros(self.shape[0]).index_add(0, ids, occurs)
        absent = (self.batch_size - occurrences).unsqueeze(1)
        return ((total + absent * mean.pow(2)) / self.batch_size).view(self.shape)

    def dots(self) -> Tensor:  # noqa: D102
        return self.dots_with(self)

    def dots_with(self, other: Rows) -> Tensor:
        """Dot products with other samples' products.

        Args:
            other: Products of Q other samples.

        Returns:
            Dot products of shape ``[N, Q]``, summed over columns.
        """
        samples, ids, sums, _ = own = self._segments()
        batch, columns, others, _ = own if other is self else other._segments()
        dots = sums.new_zeros(self.batch_size, other.batch_size)
        for rows in chunks(ids.numel(), columns.numel()):
            differ = ids[rows].unsqueeze(1) != columns
            pairs = einsum(sums[:, rows], others, "v r k, v s k -> r s")
            pairs = pairs.masked_fill(differ, 0)
            by_sample = pairs.new_zeros(len(pairs), other.batch_size)
            by_sample = by_sample.index_add(1, batch, pairs)
            dots = dots.index_add(0, samples[rows], by_sample)
        return dots

    def _segments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add up the rows of each pair (sample, index) that occurs.

        There are as many places as rows, R = N T: how many pairs occur is a number that
        only the device knows. The last ones are empty, with sums of zero. A small table
        has a place for each pair, R = N vocabulary, if these are no more.

        Returns:
            The pairs' samples ``[R]``, indices ``[R]`` and row sums ``[V, R, D]``; and
            whether a pair is there ``[R]``.
        """
        vocabulary, device = self.shape[0], self.ids.device
        offsets = vocabulary * torch.arange(self.batch_size, device=device)
        keys = (self.ids + offsets.unsqueeze(1)).flatten()
        if vocabulary <= self.positions:
            places = keys
            pairs = torch.arange(self.batch_size * vocabulary, device=device)
        else:
            ordered, order = keys.sort(stable=True)
            begins = torch.ones_like(keys, dtype=torch.bool)
            begins[1:] = ordered[1:] != ordered[:-1]
            position = begins.cumsum(0) - 1
            places = torch.zeros_like(keys).scatter(0, order, position)
            pairs = torch.zeros_like(keys).scatter(0, position, ordered)
        b = full_precision(self.b.flatten(1, 2))
        sums = b.new_zeros(len(b), len(pairs), b.shape[2]).index_add(1, places, b)
        occurs = torch.zeros_like(pairs, dtype=torch.bool).scatter(0, places, True)
        return pairs // vocabulary, pairs % vocabulary, sums, occurs


class Bagged(Rows):
    """Rows of bags: what is added up for a sample is one thing to Kronecker factors."""

    sums_positions = True
