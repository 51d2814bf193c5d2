"""Products with what has entries of its own for each sample, like tokens, repeated."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from backpack.core.layout import (
    Arrangement,
    Layout,
    one_sample_each,
    reshaped,
    sample_numbers,
)
from backpack.core.per_sample.base import Dense
from backpack.utils.types import full_precision


class Apart(Dense):
    """Products that are zero except for each sample's own entries.

    Attributes:
        own: The entries, ``[V, *p]``.
        where: Which samples they belong to.
    """

    def __init__(self, own: Tensor, where: Layout | Tensor, n: int):
        """Store the entries.

        Args:
            own: The entries, ``[V, *p]``.
            where: Which samples they belong to: a placement in ``[*p]``.
            n: Number N of samples.
        """
        self.own = self.b = own
        self.where, self.shape = where, own.shape[1:]
        self.num_columns, self.batch_size = len(own), n

    @cached_property
    def products(self) -> Tensor:  # type: ignore[override]
        """Products ``[V, N, *p]``, most of them zero."""
        return self.block(slice(0, self.batch_size))

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        picked = range(self.batch_size)[samples]
        part = slice(picked.start, picked.stop)
        return one_sample_each(self.where, self.own, self.batch_size, part)

    def individual(self) -> Tensor:  # noqa: D102
        return self.block(slice(0, self.batch_size))

    def sq_norms(self) -> Tensor:  # noqa: D102
        squares = full_precision(self.own).abs().square().sum(0).flatten()
        numbers = sample_numbers(
            self.where, self.shape, self.batch_size, squares.device
        ).flatten()
        sums = squares.new_zeros(self.batch_size + 1)  # the first one is nobody's
        return sums.index_add(0, numbers + 1, squares)[1:].to(self.dtype)

    def reshaped(self, shape: torch.Size) -> Dense:  # noqa: D102
        if shape == self.shape:
            return self
        where = reshaped(self.where, self.shape, shape, self.batch_size)
        if not isinstance(where, (Layout, Tensor)):
            return super().reshaped(shape)
        own = self.own.reshape(len(self.own), *shape)
        return Apart(own, where, self.batch_size)

    def scaled(self, factors: Tensor) -> Apart:  # noqa: D102
        return Apart(self.own * factors, self.where, self.batch_size)

    def rows(
        self, numbers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:  # noqa: D102
        size = self.shape.numel() // len(numbers)
        viewed = self.reshaped(torch.Size([len(numbers), size]))
        if not isinstance(viewed, Apart):
            return None
        try:
            arrangement = Arrangement(viewed.where, viewed.shape[:1], self.batch_size)
        except ValueError:  # samples lie within rows
            return None
        filled = arrangement.rows(self.own.new_ones(()).expand(len(numbers)))
        ids = arrangement.rows(numbers)
        return ids, arrangement.rows(viewed.own, 1), filled
