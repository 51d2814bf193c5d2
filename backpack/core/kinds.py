"""Kinds of operations that parameters enter: a layer, a contraction, a broadcast.

Each tells for its constants how cotangents become products, with samples wherever they
are. Which operation is of which kind: :mod:`backpack.core.operations`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, Sequence, Union

import torch
from einops import einsum
from torch import Tensor

from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.layout import (
    FIRST,
    Arrangement,
    Layout,
    Placement,
    Where,
    nobodys,
    once,
    sample_numbers,
)
from backpack.core.per_sample.apart import Apart
from backpack.core.per_sample.base import Dense, PerSample, Summed
from backpack.core.per_sample.order import simplest
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.rows import Bagged, Rows, left_out
from backpack.utils.types import as_type, dense, is_inexact, version_of

Key = Union[int, str]  # where an argument stands: its position, or its keyword


class Operation(ABC):
    """An operation with constants, and how to form products with their Jacobians.

    Attributes:
        data: The operand that holds samples.
        keys: Which arguments the rule covers.
        takes_all: Whether it takes the cotangents of several outputs, in a list.
        adds_up: Whether its result, in which samples have met, is a sum of theirs.
        takes_complex: Whether data and constants may be complex numbers.
    """

    takes_all = adds_up = takes_complex = False

    def __init__(self, data: Tensor | None, keys: Sequence[Key]):
        """Store the operand.

        Args:
            data: The operand that holds samples, ``None`` if products don't need it.
            keys: Which arguments the rule covers.
        """
        self.data, self.keys = data, tuple(keys)
        self._version = None if data is None else version_of(data)

    @property
    def is_modified(self) -> bool:
        """Whether the operand was modified in place since."""
        return self.data is not None and version_of(self.data) != self._version

    def reads_data(self, key: Key) -> bool:
        """Tell whether products with a constant's Jacobian are made of the operand.

        Args:
            key: Which argument the constant is.

        Returns:
            Whether they are.
        """
        return self.data is not None

    @abstractmethod
    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Layout, n: int
    ) -> PerSample | None:
        """Describe the products of cotangents and a constant's Jacobian.

        Args:
            key: Which argument.
            shape: Its shape.
            cotangents: Columns ``[V, *out]`` at the output.
            out: Where the output's samples are.
            n: Number N of samples.

        Returns:
            The products, ``None`` if the rule does not cover it.
        """

    def positions(self, key: Key, n: int) -> int:
        """Count the positions of a sample that share a constant, for outer products.

        Args:
            key: Which argument the constant is.
            n: Number N of samples.

        Returns:
            Their number; 0 if products with its Jacobian have another form.
        """
        return 0

    def is_possible(self, of: Where) -> bool:
        """Tell whether the rule is for operands with samples where they are.

        A batch of one is anywhere.

        Args:
            of: Tells where an operand's samples are.

        Returns:
            Whether it is.
        """
        return True


class LayerLike(Operation):
    """What a layer does: its derivatives tell the products.

    Attributes:
        derivatives: The layer's derivatives.
        layer: Its options.
        names: The parameters' names in the layer, by argument.
        features: Number of the input's axes that are no rows; ``None`` if all but the
            first are none.
    """

    def __init__(
        self,
        derivatives: BaseParameterDerivatives,
        layer: Any,
        names: dict[Key, str],
        data: Tensor,
        features: int | None,
    ):
        """Store the layer that does the same.

        Args:
            derivatives: The layer's derivatives.
            layer: Its options.
            names: The parameters' names in the layer, by argument.
            data: The input.
            features: Number of the input's axes that are no rows; ``None`` if all but
                the first are none.
        """
        super().__init__(data, list(names))
        self.derivatives, self.layer, self.names = derivatives, layer, names
        self._takes_rows = features is not None
        self._lead = 1 if features is None else data.dim() - features

    def is_possible(self, of: Where) -> bool:  # noqa: D102
        placement = of(self.data)
        if isinstance(placement, Layout):
            return placement.axis < self._lead
        if not isinstance(placement, Tensor):
            return False
        return self._lead > 0 or placement.numel() == 1  # a single sample's vector

    def reads_data(self, key: Key) -> bool:  # noqa: D102
        return self.names[key] != "bias"

    def positions(self, key: Key, n: int) -> int:  # noqa: D102
        x = self.data
        if self.names[key] != "weight" or not n:
            return 0
        if isinstance(self.derivatives, LinearDerivatives):
            return x.shape[:-1].numel() // n
        plain = type(self.derivatives) is ConvNDDerivatives
        return x.shape[2:].numel() * len(x) // n if plain else 0

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        x, name, lead = self.data, self.names[key], self._lead
        derivatives, layer = self.derivatives, self.layer
        dtype = getattr(layer, name).dtype
        x, b = as_type(dense(x), dtype), as_type(cotangents, dtype)
        if n == 1 and not lead:
            x, b, lead, out = x.unsqueeze(0), b.unsqueeze(1), 1, FIRST
        elif n == 1:
            out = Layout(0, x.shape[0])
        if lead > 0 and type(out) is Layout and out == FIRST and x.shape[0] == n:
            return derivatives.product(name, layer, [x], b)
        try:
            arrangement = Arrangement(out, x.shape[:lead], n)  # type: ignore[arg-type]
        except ValueError:
            return None
        sizes = x.shape[:lead]
        x, b = arrangement.rows(x), arrangement.rows(b, 1)
        if self._takes_rows:
            product = derivatives.product(name, layer, [x], b)
            if isinstance(product, Rows):  # nobody has looked up what fills it up
                valid = product.valid * arrangement.rows(b.new_ones(()).expand(sizes))
                product = Rows(product.ids, product.b, product.shape, valid)
            return product
        x, b = x.flatten(0, 1), b.flatten(1, 2)
        return derivatives.product(name, layer, [x], b).merged(n)


class Contraction(Operation):
    """A product of rows with a matrix, or one for each group of their entries.

    ``out[r, g, o] = Σᵢ x[r, g, i] W[g, o, i]``, with axes in any order.

    Attributes:
        key: Which argument the matrix is.
        outputs: Axes of the output that come from the matrix alone.
        rows: Axes of the output that come from the other operand alone.
    """

    takes_complex = True

    def __init__(
        self,
        key: Key,
        data: Tensor,
        inputs: Sequence[int],
        sources: Sequence[int | None],
        weight_axes: Sequence[int],
        groups: Sequence[int] = (),
    ):
        """Store which axes are contracted.

        Args:
            key: Which argument the matrix is.
            data: The other operand.
            inputs: Its axes that are contracted.
            sources: For each axis of the output, from which of the other operand's it
                comes; ``None`` from the matrix alone.
            weight_axes: Where the matrix has its axes of groups, then those of outputs,
                then those of inputs.
            groups: Axes of the output that come from both. Default: none.
        """
        super().__init__(data, [key])
        self.key, self._weight_axes = key, list(weight_axes)
        self._inputs, self._sources, self._groups = inputs, sources, groups
        self.outputs = [i for i, source in enumerate(sources) if source is None]
        taken = {*self.outputs, *groups}
        self.rows = [i for i in range(len(sources)) if i not in taken]
        self._kept: tuple[Tensor, Any] | None = None  # cotangents, and as rows

    def is_possible(self, of: Where) -> bool:  # noqa: D102
        placement = of(self.data)
        if isinstance(placement, Layout):
            kept = (*self.rows, *self._groups)
            return placement.axis in [self._sources[i] for i in kept]
        return isinstance(placement, Tensor)

    def rows_of(self, numbers: Tensor) -> Tensor | None:
        """Tell where the rows of the data are in the output.

        Args:
            numbers: What is known of the data's entries, expanded where it is the same.

        Returns:
            The same of the output's, which broadcasts to its shape; ``None`` if it is
            not the same for all entries of a row.
        """
        numbers = _in_order(numbers, [x for x in self._sources if x is not None])
        for _ in self._inputs:
            if numbers.stride(-1) and numbers.shape[-1] > 1 or not numbers.shape[-1]:
                return None
            numbers = numbers.select(-1, 0)
        for axis in self.outputs:
            numbers = numbers.unsqueeze(axis)
        return numbers

    def positions(self, key: Key, n: int) -> int:  # noqa: D102
        if key != self.key or self._groups or not n:
            return 0
        size = prod(self.data.shape[axis] for axis in self._inputs)
        return self.data.numel() // max(1, size * n)

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        if n > 1 and isinstance(out, Layout) and out.axis in self._groups:
            if key != self.key:
                return Broadcast(key, None).product(key, shape, cotangents, out, n)
            if cotangents.numel() and self.data.numel():
                return self._of_matrices(shape, cotangents, out, n)
        kept, self._kept = self._kept, None
        if kept is None or kept[0] is not cotangents:
            kept = cotangents, self._arrange(cotangents, out, n)
            if len(self.keys) > 1:  # the next one has the same
                self._kept = kept
        if kept[1] is None:
            return None
        arrangement, b = kept[1]
        if key != self.key:
            if prod(shape) != b.shape[3:].numel():
                return None
            if len(shape) != 1:
                return Dense(b.sum(2).reshape(*b.shape[:2], *shape), shape)
            return Summed(b.flatten(3), shape)
        x = self._inputs_like(b)
        a = arrangement.rows(x if self.rows else x.unsqueeze(0))
        features = prod(self.data.shape[axis] for axis in self._inputs)
        a = a.reshape(*a.shape[:2], b.shape[3], features).transpose(1, 2)
        b = b.transpose(2, 3)
        axes = self._weight_axes
        sizes = tuple([shape[axis] for axis in axes])
        order = simplest(sizes, tuple(map(axes.index, range(len(axes)))))
        outer = Outer(lambda: a, b, shape, order)
        # reductions of factors are those of real numbers
        return Dense(outer.individual(), shape) if b.is_complex() else outer

    def _inputs_like(self, b: Tensor) -> Tensor:
        """Order the other operand's axes: ``[*rows, *groups, *inputs]``."""
        sources = [self._sources[i] for i in (*self.rows, *self._groups)]
        x = dense(self.data)
        x = as_type(x, b.dtype) if is_inexact(x) else x.to(b.dtype)
        return _in_order(x.conj(), sources)

    def _of_matrices(
        self, shape: torch.Size, cotangents: Tensor, out: Layout, n: int
    ) -> Apart:
        """Describe products with matrices, each of which is one sample's."""
        axes, count = self._weight_axes, len(self._groups)
        sizes = [shape[axis] for axis in axes]
        groups, features = prod(sizes[:count]), prod(sizes[count:][: len(self.outputs)])
        rows = prod(cotangents.shape[1 + axis] for axis in self.rows)
        front = [0, *[axis + 1 for axis in (*self.rows, *self._groups)]]
        b = _in_order(cotangents, front).reshape(-1, rows, groups, features)
        x = self._inputs_like(b).reshape(rows, groups, -1)
        own = einsum(b, x, "v r g o, r g i -> v g o i").reshape(len(b), *sizes)
        own = own.permute(0, *[1 + axes.index(i) for i in range(len(axes))])
        where = Layout(axes[self._groups.index(out.axis)], out.inner)
        return Apart(own, where, n)

    def _arrange(
        self, cotangents: Tensor, out: Placement, n: int
    ) -> tuple[Arrangement, Tensor] | None:
        """Arrange cotangents as rows of samples, ``[V, N, R, groups, features]``."""
        rows, groups = self.rows, self._groups
        if n == 1 and rows:  # a single sample is along any of them
            out = Layout(rows[0], cotangents.shape[1 + rows[0]])
        if out is None or not rows and n != 1:  # there is not one row
            return None
        sizes = [cotangents.shape[1 + axis] for axis in rows] or [1]
        if not rows:
            out = FIRST
        elif not cotangents.shape[1:].numel():  # no sample was sent here
            out = nobodys(sizes, cotangents.device)
        elif isinstance(out, Layout):
            if out.axis not in rows:
                return None
            out = Layout(rows.index(out.axis), out.inner)
        elif isinstance(out, Tensor):
            out = _of_rows(out, rows)
        try:
            arrangement = Arrangement(out, sizes, n)  # type: ignore[arg-type]
        except ValueError:  # groups are of several samples
            return None
        b = _in_order(cotangents, [0, *[axis + 1 for axis in (*rows, *groups)]])
        b = arrangement.rows(b if rows else b.unsqueeze(1), 1)
        number = prod(cotangents.shape[1 + axis] for axis in groups)
        features = prod(cotangents.shape[1 + axis] for axis in self.outputs)
        return arrangement, b.reshape(*b.shape[:3], number, features)


class Grouped(Contraction):
    """A product of rows with a matrix for each group of them, like experts' weights.

    ``out[r, o] = Σᵢ x[r, i] W[g(r), i, o]``, where groups are rows one after the other.
    """

    takes_complex = False

    def __init__(self, key: Key, data: Tensor, ends: Tensor):
        """Store where groups end.

        Args:
            key: Which argument the matrices are, ``[G, i, o]``.
            data: The other operand, ``[R, i]``.
            ends: Where each group ends, ``[G]``; further rows are zero in the result.
        """
        super().__init__(key, data, [1], [0, None], [0, 2, 1])
        self._ends = ends

    def positions(self, key: Key, n: int) -> int:  # noqa: D102
        return 0  # samples differ in how many rows go to a group

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        (rows, _), groups = cotangents.shape[1:], len(self._ends)
        out = Layout(0, rows) if n == 1 else out
        is_empty = not (cotangents.numel() and self.data.numel())
        if is_empty or not isinstance(out, (Layout, Tensor)):
            return None
        numbers = sample_numbers(out, cotangents.shape[1:], n, cotangents.device)
        places = torch.arange(rows, device=numbers.device)
        group = torch.bucketize(places, self._ends.to(places.dtype), right=True)
        owner = numbers[:, 0]
        number = torch.where(
            (owner < 0) | (group >= groups), -1, owner * groups + group
        )
        # a group of a sample's rows is what a sample is elsewhere
        arrangement = Arrangement(number, (rows,), n * groups)
        a = arrangement.rows(as_type(self.data, cotangents.dtype))
        b = arrangement.rows(cotangents, 1)
        a, b = a.unflatten(0, (n, groups)), b.unflatten(1, (n, groups))
        order = simplest((groups, shape[2], shape[1]), (0, 2, 1))
        return Outer(lambda: a, b, shape, order)


class Bags(Operation):
    """Sums or means of a table's rows, as of ``embedding_bag``."""

    def __init__(
        self,
        key: Key,
        ids: Tensor,
        offsets: Tensor | None,
        is_mean: bool,
        factors: Tensor | None,
        padding: int | None,
    ):
        """Store what goes into which bag.

        Args:
            key: Which argument the table is.
            ids: Indices of rows, ``[B, T]``; ``[R]`` of bags that lie side by side.
            offsets: Where these begin, ``None`` for the first form.
            is_mean: Whether rows are averaged, and not summed.
            factors: What rows are multiplied with, like `ids`. ``None`` for one.
            padding: Index that is left out. ``None`` for none.
        """
        super().__init__(ids, [key])
        self._offsets, self._is_mean = offsets, is_mean
        self._factors, self._padding = factors, padding

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        (bags, _), ids = cotangents.shape[1:], self.data.flatten()
        out = Layout(0, bags) if n == 1 else out
        if isinstance(out, Layout):
            apart = out.axis == 0
        else:
            apart = isinstance(out, Tensor) and out.shape[1:].numel() == 1
        if not (apart and cotangents.numel()):
            return None
        places = torch.arange(len(ids), device=ids.device)
        if self._offsets is None:
            bag = places // max(1, self.data.shape[1])
        else:
            starts = self._offsets[:bags].to(places.dtype)
            bag = torch.bucketize(places, starts, right=True) - 1
        valid = torch.ones_like(ids) if self._padding is None else ids != self._padding
        factors = valid.to(cotangents.dtype)
        if self._is_mean:
            counts = factors.new_zeros(bags).index_add(0, bag, factors)
            factors = factors / counts[bag].clamp(min=1)
        if self._factors is not None:
            factors = factors * self._factors.flatten()
        numbers = sample_numbers(
            out, cotangents.shape[1:], n, ids.device  # type: ignore[arg-type]
        )[:, 0]
        arrangement = Arrangement(numbers[bag], ids.shape, n)
        b = left_out(cotangents.index_select(1, bag), valid) * factors.unsqueeze(1)
        filled = arrangement.rows(b.new_ones(ids.shape))
        ids, b = arrangement.rows(ids).long(), arrangement.rows(b, 1)
        return Bagged(ids, b, shape, filled)


class Broadcast(Operation):
    """``x + c`` or ``x * c`` for a constant that is broadcast along the samples."""

    takes_complex = True

    def __init__(self, key: Key, data: Tensor | None, scale: float = 1.0):
        """Store the other operand.

        Args:
            key: Which argument the constant is.
            data: What it is multiplied with, ``None`` if it is added.
            scale: Number that it is multiplied with. Default: 1.
        """
        super().__init__(data, [key])
        self._scale = scale

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        if n and not cotangents.numel():  # no sample was sent here
            return Dense(cotangents.new_zeros(len(cotangents), n, *shape), shape)
        missing = cotangents.dim() - 1 - len(shape)
        full = [1] * missing + list(shape)
        if missing < 0:
            return None
        if n == 1:  # whatever axis it was on, all others are positions
            cotangents, full, out = cotangents.unsqueeze(1), [1, *full], FIRST
        if self.data is not None:
            cotangents = cotangents * self.data.conj()
        if self._scale != 1.0:
            cotangents = cotangents * self._scale
        if isinstance(out, Tensor):
            rows = [axis for axis, size in enumerate(out.shape) if size != 1]
            if any(full[axis] != 1 for axis in rows):
                each = all(full[axis] != 1 for axis in rows)
                return _own_entries(cotangents, full, missing, out, n) if each else None
            where = _of_rows(out, rows)
            sizes = [cotangents.shape[1 + axis] for axis in rows]
            b = _in_order(cotangents, [0, *[axis + 1 for axis in rows]])
            cotangents, out = Arrangement(where, sizes, n).rows(b, 1), FIRST
            full = [1, 1, *[s for axis, s in enumerate(full) if axis not in rows]]
        if not isinstance(out, Layout):
            return None
        if full[out.axis] != 1:
            return _own_entries(cotangents, full, missing, out, n)
        b = cotangents.movedim(out.axis + 1, 1)
        del full[out.axis]
        rest = b.shape[2:]
        if b.shape[1] != n:
            b = b.unflatten(1, (-1, n, out.inner)).sum((1, 3))
        sums = [i + 2 for i, size in enumerate(full) if size == 1 and rest[i] != 1]
        positions = [i for i in sums if i < 2 + len(rest) - len(shape)]
        # as in a layer's bias
        if self.data is None and len(shape) == 1 and sums and positions == sums:
            return Summed(b.flatten(2, -2), shape)
        b = b.sum(sums) if sums else b
        return Dense(b.reshape(len(b), n, *shape), shape)


def _own_entries(
    cotangents: Tensor, full: list[int], missing: int, out: Layout | Tensor, n: int
) -> Apart:
    """Describe the products with a constant that has entries for each sample.

    Args:
        cotangents: Columns ``[V, *out]`` at the result, times its derivative.
        full: Shape of the constant, with axes in front that it does not have.
        missing: Number of these.
        out: Where the samples of the result are, along axes that the constant has.
        n: Number N of samples.

    Returns:
        The products.
    """
    sizes = enumerate(zip(full, cotangents.shape[1:]), start=1)
    sums = [axis for axis, (size, whole) in sizes if size == 1 != whole]
    own = cotangents.sum(sums, keepdim=True) if sums else cotangents
    own = own.reshape(len(own), *full[missing:])
    if isinstance(out, Layout):
        return Apart(own, Layout(out.axis - missing, out.inner), n)
    return Apart(own, out[(0,) * missing], n)


class AddedUp(Broadcast):
    """``x * c`` or ``x @ c`` for sums ``x`` of what samples contribute: `data`."""

    adds_up = True

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        if cotangents.dim() == len(shape):  # of a dot product
            cotangents = cotangents.unsqueeze(-1).expand(-1, *shape)
        each = cotangents.unsqueeze(1).expand(-1, n, *cotangents.shape[1:])
        return super().product(key, shape, each, FIRST, n)


def _of_rows(where: Tensor, rows: Sequence[int]) -> Tensor:
    """Put axes of sample numbers to the front, once for all that ask."""
    return once(where, ("moved", *rows), lambda: _in_order(where, rows))


def _in_order(x: Tensor, first: Sequence[int]) -> Tensor:
    """Put axes to the front, where they often are: each view has its price."""
    front = [*range(len(first))]
    return x if [*first] == front else x.movedim([*first], front)
