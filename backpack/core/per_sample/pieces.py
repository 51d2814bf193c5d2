"""Products of a parameter of which operations take pieces: stacked weights, experts."""

from __future__ import annotations

from functools import cached_property
from math import nan
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from backpack.core.fast.memory import huge_empty, may_write
from backpack.core.per_sample.base import Dense, PerSample
from backpack.core.per_sample.maps import OfSome, Sum, merged
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.scaled import Scaled


class Place(NamedTuple):
    """Where a piece is along the first axis of a parameter.

    Attributes:
        start: Where it starts.
        stop: Where it ends.
        alone: Whether it is a single entry, without the axis.
    """

    start: int
    stop: int
    alone: bool = False

    def meets(self, other: Place) -> bool:
        """Tell whether pieces overlap, and are not the same.

        Args:
            other: Place of the other one.

        Returns:
            Whether they do.
        """
        return self != other and self.start < other.stop and other.start < self.stop


def _matrix(product: PerSample) -> tuple[int, int, bool] | None:
    """Tell of what size a matrix with Kronecker factors is, and whether transposed."""
    if not isinstance(product, Outer) or product.groups > 1:
        return None
    if product.order and product.is_reordered:
        return None
    return product.b.shape[-1], product.inputs_size, product.is_transposed


class Pieces(Dense):
    """Products of pieces along the first axis of a parameter, which do not overlap.

    What is not there is zero. Nothing is formed of the whole parameter where a
    reduction is one of the pieces.
    """

    def __init__(
        self, shape: torch.Size, pieces: dict[Place, list[PerSample | OfSome]]
    ):
        """Store what the pieces are.

        Args:
            shape: The parameter's shape ``[L, *p]``.
            pieces: By place, products ``[V, N, l, *p]`` whose sum is the piece's, at
                least one; ``[V, N, *p]`` if it is alone.
        """
        self.shape, self._parts = shape, pieces
        first = next(iter(pieces.values()))[0]
        known = first.product if isinstance(first, OfSome) else first
        self.b, self.num_columns = known.b, known.num_columns
        self.batch_size = first.batch_size

    def among(self, samples: Tensor, batch_size: int) -> Pieces:
        """Describe products of all samples, if these are those of some.

        Args:
            samples: Which samples they are of, ``[M]``.
            batch_size: Number N of all samples.

        Returns:
            Products, which are zero for the others.
        """
        return self._mapped(lambda x: OfSome(x, samples, batch_size))  # type: ignore

    @cached_property
    def _pieces(self) -> dict[Place, PerSample]:
        """Products of each piece, in their order."""
        return {place: merged(self._parts[place]) for place in sorted(self._parts)}

    @cached_property
    def stack(self) -> list[PerSample] | None:  # type: ignore[override]
        """Products for each matrix in a stack; zeros for those that nothing has taken.

        These are entries along the first axis, or parts of equal length, all of them.
        """
        first = next(iter(self._pieces))
        size, pieces = first.stop - first.start, list(self._pieces.values())
        if not size:
            return None
        alike = {(x.stop - x.start, x.start % size, x.alone) for x in self._pieces}
        whole = first.alone or len(pieces) * size == self.shape[0]
        kinds = {_matrix(x) for x in pieces}
        if len(alike) > 1 or len(kinds) > 1 or None in kinds or not whole:
            return None
        some: Any = pieces[0]
        nothing = some.like(lambda: torch.zeros_like(some.a), torch.zeros_like(some.b))
        by_start = dict(zip([x.start for x in self._pieces], pieces))
        return [by_start.get(i, nothing) for i in range(0, self.shape[0], size)]

    @property
    def is_transposed(self) -> bool:  # noqa: D102
        return bool(self.stack) and self.stack[0].is_transposed

    @cached_property
    def products(self) -> Tensor:  # type: ignore[override]
        """The products themselves; formed when first asked for."""
        return self.individual()

    def _mapped(self, function: Callable[[PerSample], PerSample]) -> Pieces:
        found = {place: [function(x)] for place, x in self._pieces.items()}
        return Pieces(self.shape, found)  # type: ignore[arg-type]

    def _whole(
        self, of: Callable[[PerSample], Tensor], axis: int, rest: float = 0.0
    ) -> Tensor:
        """Put together what is computed of each piece.

        Args:
            of: Computes it.
            axis: Which axis of the result is the first one of the parameter.
            rest: What there is where no piece is. Default: zero.

        Returns:
            The same of the whole parameter.
        """
        size, end, parts = self.shape[0], 0, []
        out: Tensor | None = None
        for place, piece in self._pieces.items():
            part = of(piece).unsqueeze(axis) if place.alone else of(piece)
            shape = (*part.shape[:axis], size, *part.shape[axis + 1 :])
            nothing = part.new_full((), rest).expand(shape)
            if out is None and may_write():
                out = huge_empty(shape, part.dtype, part.device)
            gap = nothing.narrow(axis, end, place.start - end)
            if out is None:
                parts += [gap, part]
            else:
                out.narrow(axis, end, place.start - end).copy_(gap)
                out.narrow(axis, place.start, part.shape[axis]).copy_(part)
            end = place.stop
        gap = nothing.narrow(axis, end, size - end)
        if out is None:
            return torch.cat([*parts, gap], axis)
        out.narrow(axis, end, size - end).copy_(gap)
        return out

    def reshaped(self, shape: torch.Size) -> Dense:  # noqa: D102
        size, rest = self.shape[0], shape[1:]
        if not shape or not size or shape[0] % size:
            return super().reshaped(shape)
        times = shape[0] // size
        found: dict[Place, Any] = {}
        for place, piece in self._pieces.items():
            alone = place.alone and times == 1
            start, stop = place.start * times, place.stop * times
            lead = () if alone else (stop - start,)
            viewed = piece.reshaped(torch.Size([*lead, *rest]))  # type: ignore
            if viewed is None:
                return super().reshaped(shape)
            found[Place(start, stop, alone)] = [viewed]
        return Pieces(shape, found)

    def scaled(self, factors: Tensor) -> Pieces:  # noqa: D102
        found: dict[Place, Any] = {}
        for place, piece in self._pieces.items():
            own = factors[place.start] if place.alone else factors[slice(*place[:2])]
            if isinstance(piece, Dense):
                found[place] = [piece.scaled(own)]
            else:
                found[place] = [Scaled(piece, own)]
        return Pieces(self.shape, found)

    def joins(self, other: PerSample) -> bool:  # noqa: D102
        return isinstance(other, Pieces) and other.shape == self.shape

    def joined(self, others: Sequence[PerSample]) -> PerSample:  # noqa: D102
        # pieces that overlap others stay by themselves
        groups: list[dict[Place, list[PerSample | OfSome]]] = []
        for product in (self, *others):
            for place, parts in product._parts.items():  # type: ignore
                fits = (x for x in groups if not any(map(place.meets, x)))
                group = next(fits, None)
                if group is None:
                    groups.append(group := {})
                group.setdefault(place, []).extend(parts)
        found = [Pieces(self.shape, group) for group in groups]
        return found[0] if len(found) == 1 else Sum(found)

    def individual(self) -> Tensor:  # noqa: D102
        return self._whole(lambda x: x.individual(), 2)

    def added_to(self, products: Tensor) -> Tensor:  # noqa: D102
        if not may_write():
            return products + self.individual()
        for place, piece in self._pieces.items():
            part = products.narrow(2, place.start, place.stop - place.start)
            part += piece.individual().view_as(part)
        return products

    def summed(self) -> Tensor:  # noqa: D102
        return self._whole(lambda x: x.summed(), 1)

    def weighted_sum(self, weights: Tensor) -> Tensor:  # noqa: D102
        return self._whole(lambda x: x.weighted_sum(weights), 1)

    def sq_norms(self) -> Tensor:  # noqa: D102
        return torch.stack([x.sq_norms() for x in self._pieces.values()]).sum(0)

    def dots(self) -> Tensor:  # noqa: D102
        return torch.stack([x.dots() for x in self._pieces.values()]).sum(0)

    def partial_squares(self, sum_batch: bool) -> Tensor:  # noqa: D102
        return self._whole(lambda x: x.squares(sum_batch), 0 if sum_batch else 1)

    def variance(self) -> Tensor:  # noqa: D102
        rest = 0.0 if self.batch_size else nan  # the mean of nothing
        return self._whole(lambda x: x.variance(), 0, rest)

    def formed(self, for_dots: bool = False) -> PerSample:  # noqa: D102
        return self._mapped(lambda x: x.formed(for_dots))

    def select(self, samples: Sequence[int] | slice) -> Pieces:  # noqa: D102
        return self._mapped(lambda x: x.select(samples))

    @property
    def plain(self) -> PerSample:  # noqa: D102
        self._pieces = {place: x.plain for place, x in self._pieces.items()}
        return self

    @property
    def version(self) -> int:  # noqa: D102
        return sum(x.version for x in self._pieces.values())
