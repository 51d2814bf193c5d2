"""Products behind an operation entry by entry, as of masked or positive weights."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from backpack.core.fast.memory import may_write
from backpack.core.per_sample.base import PerSample
from backpack.core.per_sample.outer import Outer
from backpack.utils.state import may_look
from backpack.utils.types import full_precision


class Scaled(PerSample):
    """Products with an expression's Jacobian, times that of the expression: a diagonal.

    For Kronecker factors, they are nothing but vectors.

    Attributes:
        slope: Derivative of each entry of the expression by that of the parameter, of
            its shape ``[*p]``.
    """

    def __init__(self, inner: PerSample, slope: Tensor):
        """Store both.

        Args:
            inner: Products with the Jacobian of the expression, of shape ``[*p]``.
            slope: Derivative of each entry, of the same shape.
        """
        self.shape, self.b = inner.shape, inner.b
        self.num_columns, self.batch_size = inner.num_columns, inner.batch_size
        self._inner, self.slope = inner.plain, slope
        if isinstance(inner, Scaled):
            self._inner, self.slope = inner._inner, inner.slope * slope

    def permuted(self, axes: Sequence[int]) -> Scaled:
        """Describe products with the Jacobian of what has its axes in another order.

        Args:
            axes: Which axes of the parameter come first, second and so on.

        Returns:
            Products ``[V, N, *p]`` with p permuted.
        """
        inner: Any = self._inner
        return Scaled(inner.permuted(axes), self.slope.permute(*axes))

    def reshaped(self, shape: torch.Size) -> Scaled:
        """Describe products with the Jacobian of another view of the same numbers.

        Args:
            shape: Other shape of as many numbers.

        Returns:
            Products ``[V, N, *shape]``.
        """
        inner: Any = self._inner
        return Scaled(inner.reshaped(shape), self.slope.reshape(shape))

    def joins(self, other: PerSample) -> bool:  # noqa: D102
        if not isinstance(other, Scaled) or not self._inner.joins(other._inner):
            return False
        ours, theirs = self.slope, other.slope  # another call computes them anew
        return may_look(ours) and torch.equal(ours, theirs)

    def joined(self, others: Sequence[Any]) -> Scaled:  # noqa: D102
        return Scaled(self._inner.joined([x._inner for x in others]), self.slope)

    def _times(self, products: Tensor) -> Tensor:
        """Multiply products that nobody else has."""
        if may_write() and products.dtype == self.slope.dtype:
            return products.mul_(self.slope)
        return products * self.slope

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        return self._times(self._inner.select(samples).individual())

    def individual(self) -> Tensor:  # noqa: D102
        [products] = self._adding_up([self._times(self._inner.individual())])
        return products

    def select(self, samples: Sequence[int] | slice) -> Scaled:  # noqa: D102
        return Scaled(self._inner.select(samples), self.slope)

    def summed(self) -> Tensor:  # noqa: D102
        return self._inner.summed() * self.slope

    def weighted_sum(self, weights: Tensor) -> Tensor:  # noqa: D102
        return self._inner.weighted_sum(weights) * self.slope

    def sq_norms(self) -> Tensor:  # noqa: D102
        x = self._inner
        if not isinstance(x, Outer) or x.positions * x.groups > 1 or x.order:
            return super().sq_norms()
        a, b = (y.flatten(-3).square() for y in (x._moderate_a(), x._moderate_b()))
        slopes = full_precision(self.slope).square().reshape(b.shape[-1], a.shape[-1])
        return ((b.sum(0) @ slopes.to(b.dtype)) * a).sum(1)

    def partial_squares(self, sum_batch: bool) -> Tensor:  # noqa: D102
        return self._inner.partial_squares(sum_batch)

    def finish_squares(
        self, statistic: Tensor, sum_batch: bool
    ) -> Tensor:  # noqa: D102
        squares = self._inner.finish_squares(statistic, sum_batch)
        return squares * full_precision(self.slope).square()

    def variance(self) -> Tensor:  # noqa: D102
        return self._inner.variance() * full_precision(self.slope).square()
