"""Products that are sums of outer products: linear layers and convolutions."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, Callable, Iterator, Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor

from backpack.core.fast import tuning
from backpack.core.fast.matmul import bmm, gram, has_fast_blas, is_fast_product, matmul
from backpack.core.fast.memory import huge_empty, may_write
from backpack.core.per_sample import sums
from backpack.core.per_sample.base import Dense, Gather, PerSample, Place
from backpack.core.per_sample.order import Order, permuted
from backpack.core.per_sample.recipe import Recipe, whole_reduction
from backpack.core.per_sample.unfolding import Unfolding
from backpack.utils.state import may_look
from backpack.utils.types import full_precision
from backpack.utils.unsqueeze import flatten

# A difference may be so many times smaller than what is subtracted: a digit is lost.
CANCELLATION = 10.0


def _with_factors(
    shape: torch.Size, order: Order | None, convention: bool, a: Tensor, b: Tensor
) -> Outer:
    return Outer(lambda: a, b, shape, order, sums_positions=convention)


class Outer(PerSample):
    """Products that are sums of outer products over shared positions.

    The product of column v and sample n is, per group g,
    ``Σ_t b[v, n, g, t] ⊗ a[n, g, t]`` with ``a`` the layer's (unfolded) input and ``b``
    the cotangents at its output. With T positions, the formulas' costs in multiply-adds
    decide between forming the products and working on the factors.

    Attributes:
        a: Inputs of shape ``[N, G, T, d]``; formed when first asked for.
        b: Cotangents of shape ``[V, N, G, T, p]``.
        order: How the parameter's axes lie in ``[G, p, d]``; ``None`` if it is that in
            another shape.
        sums_positions: Whether Kronecker factors sum cotangents over positions unless
            the user chooses otherwise: the convention for convolutions.
    """

    def __init__(
        self,
        a: Callable[[], Tensor],
        b: Tensor,
        shape: torch.Size,
        order: Order | None = None,
        recipe: Recipe | None = None,
        unfolding: Unfolding | None = None,
        sums_positions: bool = False,
    ):
        """Store the factors.

        Args:
            a: Function that returns the inputs ``[N, G, T, d]``.
            b: Cotangents of shape ``[V, N, G, T, p]``.
            shape: The parameter's shape ``[*p]``.
            order: How the parameter's axes lie in ``[G, p, d]``. Default: ``None``.
            recipe: What all this was made of, maybe with a faster way than unfolding to
                form products. Default: ``None``, for ``a`` and ``b``.
            unfolding: Faster ways than ``a`` to unfold the inputs of some samples.
                Default: ``None``.
            sums_positions: Convention for Kronecker factors. Default: ``False``.
        """
        self.sums_positions = sums_positions
        self._recipe = recipe
        self._make_a = a
        self._a: Tensor | None = None
        self.b = b
        self.shape = shape
        self.order = order
        self._unfolding = unfolding
        self._plain: Outer | None = None
        self.num_columns, self.batch_size, self.groups, self.positions, p = b.shape
        # known without unfolding the inputs
        self._sizes = (shape.numel() // max(1, self.groups * p), p)

    @property
    def a(self) -> Tensor:
        """Inputs of shape ``[N, G, T, d]``."""
        if self._a is None:
            self._a = self._make_a()
        return self._a

    def __getstate__(self) -> dict[str, Any]:
        """Return the factors, without the functions that form them."""
        forgotten = dict.fromkeys(("_make_a", "_recipe", "_unfolding", "_plain"))
        return {**vars(self), "_a": self.a, **forgotten, "shared": None}

    @property
    def inputs_size(self) -> int:
        """Number d of features of the inputs."""
        size, outputs = self._sizes
        return size if outputs else self.a.shape[-1]  # of which the shape says nothing

    def recipe(self) -> Recipe:
        """Tell how to make the same products again, with other tensors.

        Returns:
            The recipe.
        """
        if self._recipe is not None and self._a is None:
            return self._recipe
        kind = self.shape, self.order, self.sums_positions
        return Recipe(self.a, self.b, partial(_with_factors, *kind))

    def _unfolder(self) -> Unfolding | None:
        """Return faster ways to unfold, unless the inputs are unfolded already."""
        return self._unfolding if self._a is None else None

    def joins(self, other: PerSample) -> bool:  # noqa: D102
        return (
            isinstance(other, Outer)
            and self.b.shape[2::2] == other.b.shape[2::2]
            and self._sizes == other._sizes
            and (self.order, self.shape) == (other.order, other.shape)
        )

    def joined(self, others: Sequence[PerSample]) -> Outer:  # noqa: D102
        every: list[Any] = [self, *others]
        a = torch.cat([x.a for x in every], dim=2)
        return self._like_all(every, a, torch.cat([x.b for x in every], dim=3))

    def _like_all(self, every: Sequence[Outer], a: Tensor, b: Tensor) -> Outer:
        result = self.like(lambda: a, b)
        result.sums_positions = all(x.sums_positions for x in every)
        return result

    def placed(self, others: Sequence[PerSample], place: Place) -> Outer:  # noqa: D102
        every: list[Any] = [self, *others]
        a, b = place([x.a for x in every], 0, 2), place([x.b for x in every], 1, 3)
        return self._like_all(every, a, b)

    def merged(self, n: int) -> Outer:  # noqa: D102
        unfolded = self.groups * self.positions * self.inputs_size
        recipe = self.recipe().merged(n, self.shape.numel(), unfolded)

        def a() -> Tensor:
            return self.a.unflatten(0, (n, -1)).transpose(1, 2).flatten(2, 3)

        b = self.b.unflatten(1, (n, -1)).transpose(2, 3).flatten(3, 4)
        return self.like(a, b, recipe)

    def like(
        self,
        a: Callable[[], Tensor] | None = None,
        b: Tensor | None = None,
        recipe: Recipe | None = None,
    ) -> Outer:
        """Describe other products of the same kind.

        Args:
            a: Function that returns the inputs. Default: ``None`` for the same.
            b: Cotangents. Default: ``None`` for the same.
            recipe: What they are made of. Default: ``None``, for both.

        Returns:
            Products for the same parameter.
        """
        a = (lambda: self.a) if a is None else a
        b = self.b if b is None else b
        convention = self.sums_positions
        return Outer(a, b, self.shape, self.order, recipe, sums_positions=convention)

    def permuted(self, axes: Sequence[int]) -> Outer:
        """Describe products with the Jacobian of what has its axes in another order.

        Args:
            axes: Which axes of the parameter come first, second and so on.

        Returns:
            Products ``[V, N, *p]`` with p permuted.

        Raises:
            ValueError: If that can't be described.
        """  # noqa: DAR401
        result = self.like()
        result.order = permuted(self.order, self.shape, axes)
        result.shape = torch.Size([self.shape[axis] for axis in axes])
        return result

    def reshaped(self, shape: torch.Size) -> Outer:
        """Describe products with the Jacobian of another view of the same numbers.

        Args:
            shape: Other shape of as many numbers.

        Returns:
            Products ``[V, N, *shape]``.
        """
        result = self.like()
        result.shape = shape
        return result

    def fold(self, mat: Tensor) -> Tensor:
        """Bring matrices into the parameter's shape.

        Args:
            mat: Matrices ``[*, G, p, d]``.

        Returns:
            The same numbers, ``[*, *p]``.
        """
        if self.order is None:
            return mat.reshape(*mat.shape[:-3], *self.shape)
        return self.order(mat, self.shape)

    def select(self, samples: Sequence[int] | slice) -> Outer:  # noqa: D102
        picked: Any = samples
        if not isinstance(samples, slice):  # once, on the device
            picked = torch.as_tensor(samples, dtype=torch.long, device=self.b.device)
        recipe = self._recipe and self._recipe.select(picked)
        return self.like(lambda: self.a[picked], self.b[:, picked], recipe)

    def gathered(self, gather: Gather) -> PerSample:  # noqa: D102
        d, p = self._sizes
        many = self.positions * (d + p) >= d * p
        if many and not self.is_reordered:  # the products are fewer numbers
            return super().gathered(gather)
        a, b = gather(self.a, 0), gather(self.b, 1)
        return self.like(lambda: a, b)

    @property
    def is_transposed(self) -> bool:  # noqa: D102
        d, p = self._sizes
        if self.groups > 1 or tuple(self.shape) != (d, p):
            return False
        return 1 in {d, p} != {1} or self.order == Order((p, d), (1, 0))

    @property
    def plain(self) -> PerSample:  # noqa: D102
        if not self.is_transposed or self.num_columns != 1:
            return self
        if self._plain is None:
            a = self.b[0]  # without a cycle, which would live on
            self._plain = Outer(lambda: a, self.a.unsqueeze(0), self.shape)
        return self._plain

    @property
    def is_reordered(self) -> bool:
        """Whether the factors stand for a parameter with its axes in another order."""
        return self.order is not None and not self.is_transposed

    @property
    def _is_large(self) -> bool:
        """Whether products are formed some samples at a time, in recycled memory."""
        return (
            self.num_columns == 1 < self.positions
            and self.shape.numel() >= tuning.LARGE_PRODUCT
            and self.batch_size > 0
            and may_write()
            # a GPU multiplies all matrices at once
            and (self._form is not None or self.device.type == "cpu")
        )

    @property
    def _is_direct(self) -> bool:
        """Whether products are formed without unfolding the inputs."""
        return self._form is not None and self._a is None

    @property
    def _form(self) -> Callable | None:
        """Function that forms products without unfolding, see :class:`Recipe`."""
        return self._recipe and self._recipe.form

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
            return sums.chunks(self.batch_size, 1, most=1)
        unfolded = self.groups * self.positions * self._sizes[0]
        if keeps:
            return sums.chunks(self.batch_size, unfolded, tuning.UNFOLDED_ELEMENTS)
        size = self.shape.numel() + (0 if self._is_direct else unfolded)
        return sums.chunks(self.batch_size, size, tuning.STEP_ELEMENTS)

    def _unfold_and_fold(
        self, any_order: bool
    ) -> tuple[Callable[[slice], Tensor], Callable[[Tensor], Tensor]]:
        """Choose how to unfold inputs, and to fold the products with them.

        Args:
            any_order: Whether products may lie in memory in any order.

        Returns:
            Function that unfolds some samples, ``[n, G, T, d]``, and function that maps
            ``[*, G, p, d]`` to ``[*, *p]``.
        """
        unfolding = self._unfolder()
        if unfolding is not None and any_order and self._one_by_one:
            return unfolding.rows, unfolding.fold_rows
        return self.inputs, self.fold

    def inputs(self, samples: slice) -> Tensor:
        """Unfold the inputs of some samples.

        Args:
            samples: Which ones (n of them).

        Returns:
            Inputs of shape ``[n, G, T, d]``.
        """
        unfolding = self._unfolder()
        return self.a[samples] if unfolding is None else unfolding.matrices(samples).mT

    def _products(self, any_order: bool, out: Tensor | None = None) -> Iterator[Tensor]:
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
            if out is not None and self.order is None:
                target = out[0, samples].view(-1, *self._sizes[::-1])
            products = bmm(b.flatten(0, 1), a.flatten(0, 1), len(steps), target)
            products = fold(products.unflatten(0, (1, -1, self.groups)))
            if out is not None and target is None:
                products = out[:, samples].copy_(products)
            yield products

    @whole_reduction
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
            out = self._recipe.products()
        else:
            shape = 1, self.batch_size, *self.shape
            out = huge_empty(shape, self.dtype, self.device)
            for _ in self._products(any_order, out):
                pass
        if self.keeps_total and self._total is None:
            total = sums.add_rows(None, out[0])
            if self.order is None:
                _, fold = self._unfold_and_fold(any_order)
                total = fold(total.view(self.groups, *self._sizes[::-1]))
            self._total = total
        return out

    def block(self, samples: slice) -> Tensor:  # noqa: D102
        if self._is_direct:
            return self._recipe.select(samples).products()
        return self.fold(self._outer(samples))

    @whole_reduction
    def summed(self) -> Tensor:  # noqa: D102
        if self._is_direct:
            return self._form(self._recipe.inputs, self._recipe.cotangents, True)
        return self._sum_of(self.b, self.a)

    def _sum_of(self, b: Tensor, a: Tensor) -> Tensor:
        """Sum outer products of factors of this kind: ``[V, *p]``."""
        if self.num_columns == self.groups == 1:  # which takes fewer steps
            total = matmul(b.flatten(0, 3).T, a.flatten(0, 2))
            return self.fold(total.view(1, 1, *total.shape))
        b = rearrange(b, "v n g t p -> g (v p) (n t)")
        a = rearrange(a, "n g t d -> g (n t) d")
        products = bmm(b, a).unflatten(1, (self.num_columns, -1))
        return self.fold(products.transpose(0, 1))

    @whole_reduction
    def weighted_sum(self, weights: Tensor) -> Tensor:  # noqa: D102
        if self._is_direct:
            x, cotangents, *_ = self._recipe
            x, b = full_precision(x), sums.scaled(cotangents, weights, 1)
            return self._form(x, b, True)
        b, a = sums.scaled(self.b, weights, 1), full_precision(self.a)
        return self._sum_of(b, a)

    def formed(self, for_dots: bool = False) -> PerSample:  # noqa: D102
        few = self.is_cheaper_as_factors(self) if for_dots else not self._norms_form
        return self if few else Dense(self.individual(), self.shape)

    @cached_property
    def _powers(self) -> Tensor | None:
        """Powers of two that inputs are divided by, see :func:`~sums.powers_of_two`."""
        return sums.powers_of_two(full_precision(self.a))

    def _moderate_a(self) -> Tensor:
        powers = self._powers
        return sums.scaled(self.a, None if powers is None else 1 / powers)

    def _moderate_b(self) -> Tensor:
        return sums.scaled(self.b, self._powers, 1)

    @property
    def _norms_form(self) -> bool:
        """Whether norms form the products: otherwise, they take Gram matrices.

        Those of rows and of columns cost less than the products, unless so many
        positions are shared, or the products are added up anyway.
        """
        d, p = self._sizes
        relative = self.positions * (d + p) / max(1, d * p)
        unfolds = self._unfolding is not None
        least = tuning.GRAM_MULTIPLICATIONS[unfolds, has_fast_blas()]
        adds_up = self.keeps_total and self._total is None
        many = adds_up and self.positions * relative >= least
        return self.positions > 1 and (many or relative >= 1)

    @whole_reduction
    def sq_norms(self) -> Tensor:  # noqa: D102
        if self.positions == 1:
            a, b = sums.sum_of_squares(self.a, 2), sums.sum_of_squares(self.b, 3)
            if not sums.is_exact(a, b):
                a = sums.sum_of_squares(self._moderate_a(), 2)
                b = sums.sum_of_squares(self._moderate_b(), 3)
            return sums.sum_axis(sums.sum_axis(b, 0) * a, 1)
        if self._norms_form:
            return super().sq_norms()
        grams = sums.chunks(self.batch_size, self.groups * self.positions**2)
        return torch.cat([self._gram_norms(samples) for samples in grams])

    @whole_reduction
    def partial_squares(self, sum_batch: bool) -> Tensor:  # noqa: D102
        if self.positions != 1:
            return super().partial_squares(sum_batch)
        return sums.sum_axis(self._moderate_b().squeeze(3).pow(2), 0)

    @whole_reduction
    def finish_squares(
        self, statistic: Tensor, sum_batch: bool
    ) -> Tensor:  # noqa: D102
        if self.positions != 1:
            return statistic
        a = self._moderate_a().squeeze(2).pow(2)
        if sum_batch:
            return self.fold(sums.sum_outer_products(statistic, a))
        return self.fold(sums.outer_products(statistic.unsqueeze(0), a).squeeze(0))

    @whole_reduction
    def variance(self) -> Tensor:  # noqa: D102
        if self.positions != 1 or self.batch_size == 0:
            return super().variance()
        if not may_look(self.b):
            return super().variance()
        # Two matrix products are all it takes, unless moment and squared mean cancel
        a, b = self._moderate_a().squeeze(2), self._moderate_b()[0].squeeze(2)
        total = sums.sum_outer_products(b, a)
        moment = sums.sum_outer_products(b.pow(2) / self.batch_size, a.pow(2))
        variance = torch.addcmul(moment, total, total, value=-1 / self.batch_size**2)
        excess = torch.sub(moment, variance, alpha=CANCELLATION)
        if self.keeps_total:
            self._total = self.fold(total)
        if excess.numel() and excess.amax() > 0:
            return super().variance()
        return self.fold(variance)

    @whole_reduction
    def dots(self) -> Tensor:  # noqa: D102
        if not self.is_cheaper_as_factors(self):
            if self._is_large:
                return sums.sum_of_dots(flatten(self._collect(any_order=True), 2))
            return super().dots()
        return self.dots_with(self)

    def dots_with(self, other: Outer) -> Tensor:
        """Dot products with other samples' products, from the factors of both.

        Args:
            other: Products of Q other samples.

        Returns:
            Dot products of shape ``[N, Q]``, summed over columns.
        """
        if self.groups * self.positions * other.positions == 1:  # which is a view
            gram_a = self._moderate_a()[:, 0, 0] @ other._moderate_a()[:, 0, 0].mT
            b = self._moderate_b()[:, :, 0, 0] @ other._moderate_b()[:, :, 0, 0].mT
            return sums.sum_axis(b, 0) * gram_a
        pattern = "n g t k, m g s k -> g n t m s"
        gram_a = einsum(self._moderate_a(), other._moderate_a(), pattern)
        columns = zip(self._moderate_b(), other._moderate_b())
        return sum((einsum(*b, pattern) * gram_a).sum((0, 2, 4)) for b in columns)

    def is_cheaper_as_factors(self, other: Outer) -> bool:
        """Tell whether dot products take fewer multiplications by factors.

        Args:
            other: Products for the same parameter.

        Returns:
            Whether they do, and the factors are alike.
        """
        n, t, q, s = self.batch_size, self.positions, other.batch_size, other.positions
        d, p = self._sizes
        formed = n * t + n * q + (0 if other is self else q * s)
        return self.joins(other) and n * t * q * s * (d + p) < formed * d * p

    @whole_reduction
    def input_gram(self, scale: float) -> Tensor:
        """Sum the outer products of the inputs with themselves.

        Args:
            scale: Number to multiply the sum with.

        Returns:
            Σ a aᵀ over samples and positions, of shape ``[G, d, d]``.
        """
        unfolding = self._unfolder()
        if unfolding is None:
            rows = sums.features_first(full_precision(self.a), 1)
            if 0 < rows.shape[2] < rows.shape[1]:  # they are fewer numbers
                return gram(rows * scale**0.5)
            return gram(rows).mul_(scale)
        size = self.groups * self.positions * self._sizes[0]
        total: Any = 0.0
        for samples in sums.chunks(self.batch_size, size, tuning.UNFOLDED_ELEMENTS):
            total = total + gram(full_precision(unfolding.features(samples)))
        return total.mul_(scale)

    def _outer(self, samples: slice) -> Tensor:
        """Form ``[V, n, G, p, d]``, with the columns as rows of one product."""
        a, b = self.a[samples], self.b[:, samples]
        if self.positions == 1:
            return sums.outer_products(b.squeeze(3), a.squeeze(2))
        v, n, g, t, p = b.shape
        rows = b.permute(1, 2, 0, 4, 3).reshape(n * g, v * p, t)
        products = bmm(rows, a.flatten(0, 1)).reshape(n, g, v, p, a.shape[-1])
        return products.permute(2, 0, 1, 3, 4)

    def _elements_per_sample(self) -> int:
        rows = self.num_columns * self.groups * self.positions * self.b.shape[-1]
        return super()._elements_per_sample() + rows

    def _gram_norms(self, samples: slice) -> Tensor:
        unfolding = self._unfolder()
        a = unfolding.rows(samples) if unfolding else self.a[samples]
        powers = sums.powers_of_two(full_precision(a))
        a = sums.scaled(a, None if powers is None else 1 / powers).flatten(0, 1)
        gram_a = bmm(a, a.mT)
        total: Any = 0.0
        for b in sums.scaled(self.b[:, samples], powers, 1).flatten(1, 2).unbind():
            dots = (gram_a * bmm(b, b.mT)).unflatten(0, (-1, self.groups))
            total = total + dots.sum((1, 2, 3))
        return total
