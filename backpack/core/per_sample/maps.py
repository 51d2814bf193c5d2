"""Sums of products; products with matrices from both sides; dots of two batches."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from backpack.core.fast import tuning
from backpack.core.layout import Arrangement
from backpack.core.per_sample import sums
from backpack.core.per_sample.base import Dense, PerSample
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.rows import Rows
from backpack.utils.kroneckers import rotate
from backpack.utils.types import full_precision
from backpack.utils.unsqueeze import flatten

Matrices = Sequence[Optional[Tensor]]

OTHER_SIZES = (
    "A parameter is shared by calls with different sizes along axis 0 ({sizes}), so "
    "that individual gradients are not defined. Axis 0 must be the batch in every "
    "call: keep the samples there, or give each call a parameter of its own."
)


class OfSome(NamedTuple):
    """Products of some of the samples, as of a loop over them; others have none.

    Attributes:
        product: Products ``[V, M, *p]``.
        samples: Which samples they are of, ``[M]``.
        batch_size: Number N of all samples.
    """

    product: PerSample
    samples: Tensor
    batch_size: int

    def joins(self, other: PerSample | OfSome) -> bool:
        """Tell whether other products of some samples have factors of the same kind.

        Args:
            other: Products of another call.

        Returns:
            Whether they have.
        """
        if not isinstance(other, OfSome):
            return False
        own, others = self.product, other.product
        return own.joins(others) or type(own) is type(others) is Dense

    def joined(self, others: Sequence[OfSome]) -> PerSample:
        """Add the products of other calls, as products of all samples.

        Args:
            others: Products that join these, of any number of calls.

        Returns:
            The sum of all.
        """
        every, known = (self, *others), {}

        def place(tensors: list[Tensor], axis: int, positions: int) -> Tensor:
            counts = tuple([x.shape[positions] for x in tensors])
            if counts not in known:
                pairs = zip(every, counts)
                numbers = torch.cat([x.samples.repeat_interleave(t) for x, t in pairs])
                known[counts] = Arrangement(numbers, numbers.shape, self.batch_size)
            rows = [x.movedim(positions, axis + 1) for x in tensors]
            flat = torch.cat([x.flatten(axis, axis + 1) for x in rows], axis)
            return known[counts].rows(flat, axis).movedim(axis + 1, positions)

        return self.product.placed([x.product for x in others], place)


def alike(products: Sequence[PerSample | OfSome]) -> list[PerSample]:
    """Join what can stand beside each other.

    Args:
        products: Products of each call.

    Returns:
        Products of each kind, with the same sum.
    """
    some = [x for x in products if isinstance(x, OfSome)]
    every = [x for x in products if not isinstance(x, OfSome)]
    there = [x for x in some if len(x.samples)]
    return _by_kind([*every, *_by_kind(there if every or there else some[:1])])


def _by_kind(products: Sequence[Any]) -> list[PerSample]:
    kinds, rest = [], list(products)
    while rest:
        first, *others = rest
        joining: list[Any] = []
        rest = []
        for other in others:
            same = first.batch_size == other.batch_size and first.joins(other)
            (joining if same else rest).append(other)
        alone = not joining and isinstance(first, PerSample)
        kinds.append(first if alone else first.joined(joining))
    return kinds


def merged(products: Sequence[PerSample | OfSome]) -> PerSample:
    """Add up what several calls contribute to the same parameter.

    Args:
        products: Products of each call, same V and N.

    Returns:
        Their sum.

    Raises:
        ValueError: If the calls saw different numbers of samples.
    """  # noqa: DAR401
    kinds = alike(products)
    return kinds[0] if len(kinds) == 1 else Sum(kinds)


class Sum(Dense):
    """Products of several kinds, which are added up when they are first asked for."""

    def __init__(self, parts: Sequence[PerSample]):
        """Store what is added up.

        Args:
            parts: Products of the same parameter, columns and samples.

        Raises:
            ValueError: If the calls saw different numbers of samples.
        """
        # rows are added to what is there
        self._parts = sorted(parts, key=lambda part: isinstance(part, Rows))
        first = self._parts[0]
        self.shape, self.b, self.num_columns = first.shape, first.b, first.num_columns
        sizes = [part.batch_size for part in parts]
        self.batch_size = sizes[0]
        if len(set(sizes)) > 1:
            raise ValueError(OTHER_SIZES.format(sizes=" and ".join(map(str, sizes))))

    @cached_property
    def products(self) -> Tensor:  # type: ignore[override]
        """The products themselves; formed when first asked for."""
        first, *others = self._parts
        total = first.individual()
        for other in others:
            total = other.added_to(total)
        return total

    @property
    def plain(self) -> PerSample:  # noqa: D102
        self._parts = alike([part.plain for part in self._parts])
        return self if len(self._parts) > 1 else self._parts[0]

    @property
    def version(self) -> int:  # noqa: D102
        return sum(part.version for part in self._parts)


def in_order(product: PerSample) -> PerSample:
    """Describe products as the matrices that Kronecker factors belong to.

    Args:
        product: Products for a parameter.

    Returns:
        Products ``[V, N, G, p, d]`` where the parameter has its axes in another order;
        else the same as before.
    """
    if not isinstance(product, Outer) or not product.is_reordered:
        return product
    shape = torch.Size([product.groups, product.b.shape[-1], product.inputs_size])
    return Outer(lambda: product.a, product.b, shape)


def factor_shapes(product: PerSample) -> list[list[int]]:
    """Tell which shapes the Kronecker factors of a parameter have.

    Args:
        product: Products of any columns and the parameter's Jacobian.

    Returns:
        Shapes in the order of the factors.
    """
    if product.stack:
        of_one, number = factor_shapes(product.stack[0]), len(product.stack)
        return [[number, *shape] if number > 1 else shape for shape in of_one]
    if type(product) is Rows:
        rows, size = product.table
        return [[rows], [size, size]]
    groups = product.groups
    sizes = [product.shape.numel() // groups]
    if isinstance(product, Outer):
        sizes = [product.b.shape[-1], product.inputs_size]
        sizes = sizes[::-1] if product.is_transposed else sizes
    return [[groups, n, n] if groups > 1 else [n, n] for n in sizes]


def mapped(product: PerSample, matrices: Matrices) -> PerSample:
    """Multiply each product with a matrix for each of its Kronecker factors.

    The product L S Rᵀ of an outer product S = Σ b ⊗ a has the factors L b and R a.

    Args:
        product: Products for a parameter.
        matrices: Square matrices of the factors' shapes ``[p, p]``, in their order,
            with groups ``[G, p, p]``; a vector is a diagonal matrix, ``None`` the
            identity.

    Returns:
        Products for the same parameter.
    """
    if isinstance(product, Outer):
        on_b, on_a = matrices[::-1] if product.is_transposed else matrices
        return product.like(*_factors(product, on_b, on_a))
    if type(product) is Rows:
        on_rows, on_b = matrices
        b = _times(product.b, on_b)
        if on_rows is not None:
            b = b * on_rows[product.ids].unsqueeze(-1)
        return Rows(product.ids, b, product.shape, product.valid)
    products = _rotated(product.individual(), matrices)
    return Dense(products.reshape(*products.shape[:2], *product.shape), product.shape)


def projected(product: PerSample, matrices: Sequence[Tensor]) -> PerSample:
    """Multiply each product, as a matrix ``[P, D]``, with matrices from both sides.

    Rows of the matrix are the first axis of the parameter, columns all others. A
    parameter with a single axis, or none, is a vector.

    Args:
        product: Products of a single column for a parameter, see ``plain``.
        matrices: Matrices ``[K, P]`` and ``[L, D]``; for a vector one.

    Returns:
        Products of shape ``[1, N, K, L]``; for a vector ``[1, N, K]``.
    """
    shape = torch.Size([len(matrix) for matrix in matrices])
    if isinstance(product, Outer) and product.groups == 1 and len(matrices) == 2:
        fits = product.b.shape[-1] == matrices[0].shape[-1]
        if fits and product.order is None:
            return Outer(*_factors(product, *matrices), shape)
    if type(product) is Rows and len(matrices) == 2:
        on_ids, on_b = matrices
        b = full_precision(on_ids).mT[product.ids] * product.valid.unsqueeze(-1)
        a = _times(product.b, on_b)
        return Outer(lambda: a[0].unsqueeze(1), b[None, :, None], shape)
    blocks = [_rotated(block, matrices) for block in product.pieces()]
    return Dense(torch.cat(blocks, 1), shape)


def _factors(
    product: Outer, on_b: Tensor | None, on_a: Tensor | None
) -> tuple[Callable[[], Tensor], Tensor]:
    """Multiply the factors of outer products; inputs when they are asked for."""

    def inputs() -> Tensor:
        if on_a is None:
            return product.a if on_b is None else full_precision(product.a)
        size = product.groups * product.positions * product.inputs_size
        some = sums.chunks(product.batch_size, size, tuning.UNFOLDED_ELEMENTS)
        return torch.cat([_times(product.inputs(n), on_a) for n in some])

    same = on_a is None and on_b is None
    return inputs, _times(product.b if same else full_precision(product.b), on_b)


def _times(rows: Tensor, matrix: Tensor | None) -> Tensor:
    """Multiply rows with a matrix, ``None`` for the identity."""
    if matrix is None:
        return rows
    rows = full_precision(rows)
    return rows @ matrix.to(rows.dtype).mT


def _rotated(products: Tensor, matrices: Matrices) -> Tensor:
    """Multiply products ``[V, N, *]`` that are at hand."""
    groups = next((m.shape[:-2] for m in matrices if m is not None), ())
    sizes = [-1 if m is None else m.shape[-1] for m in matrices]
    rows = full_precision(products).reshape(products.shape[:2].numel(), *groups, *sizes)
    return rotate(matrices, rows).unflatten(0, products.shape[:2])


def squares_after(product: PerSample, matrices: Sequence[Tensor]) -> Tensor:
    """Square the products after they are multiplied with matrices, and sum.

    With T positions, a factor is multiplied before the products are formed where this
    takes fewer multiplications than to do so afterwards.

    Args:
        product: Products ``[V, N, *p]``.
        matrices: See :func:`mapped`.

    Returns:
        Sum over columns and samples, in the shape of the matrices' rows, ``[p]``
        or ``[p, d]``; with groups ``[G, p]``, ``[G, p, d]``.
    """
    product = in_order(product)
    lead = matrices[-1].shape[:-2]
    if product.stack and lead:
        pairs = zip(product.stack, zip(*matrices))
        return torch.stack([squares_after(x, own) for x, own in pairs])
    shape = (*lead, *(matrix.shape[-1] for matrix in matrices))
    if not isinstance(product, Outer) or product.positions == 1:
        return mapped(product, matrices).squares().reshape(shape)
    d, p = product.inputs_size, product.b.shape[-1]
    first = [product.positions <= d, product.positions <= product.num_columns * p]
    first = first[::-1] if product.is_transposed else first
    before = [matrix if now else None for matrix, now in zip(matrices, first)]
    after = [None if now else matrix for matrix, now in zip(matrices, first)]
    part, total = mapped(product, before) if any(first) else product, None
    if all(first):
        return part.squares().reshape(shape)
    for block in part.pieces():
        block = _rotated(block.reshape(*block.shape[:2], *shape), after)
        total = sums.add_squares(total, block.flatten(0, 1))
    return total


def dots_between(product: PerSample, other: PerSample) -> Tensor:
    """Compute dot products of the products of two batches.

    Args:
        product: Products ``[1, N, *p]``.
        other: Products ``[1, Q, *p]`` for the same parameter.

    Returns:
        Dot products of shape ``[N, Q]``.
    """
    if type(product) is Rows and isinstance(other, Rows):
        return product.dots_with(other)
    if isinstance(product, Outer):
        if isinstance(other, Outer) and product.is_cheaper_as_factors(other):
            return product.dots_with(other)
        if product.positions == product.groups == 1 and product.order is None:
            mats = full_precision(other.individual()[0])
            a, b = full_precision(product.a[:, 0, 0]), full_precision(product.b)
            p, d = b.shape[-1], a.shape[-1]
            rows = (a @ mats.reshape(-1, d).mT).unflatten(1, (len(mats), p))
            return (rows @ b[0, :, 0, 0].unsqueeze(-1)).squeeze(-1)
    rows = flatten(other.individual(), 2)
    return torch.cat(
        [sums.sum_of_dots(flatten(block, 2), rows) for block in product.pieces()]
    )
