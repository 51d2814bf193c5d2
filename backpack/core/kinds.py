"""Kinds of operations that parameters enter: a layer, a contraction, a broadcast.

Each tells for its constants how cotangents become products, with samples wherever they
are. Which operation is of which kind: :mod:`backpack.core.operations`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, Sequence, Union

import torch
from torch import Tensor

from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.layout import (
    FIRST,
    Arrangement,
    Layout,
    Placement,
    nobodys,
    once,
    sample_numbers,
)
from backpack.core.per_sample.base import Dense, PerSample, Summed
from backpack.core.per_sample.order import simplest
from backpack.core.per_sample.outer import Outer
from backpack.utils.types import as_type, dense, version_of

Key = Union[int, str]  # where an argument stands: its position, or its keyword


class Operation(ABC):
    """An operation with constants, and how to form products with their Jacobians.

    Attributes:
        data: The operand that holds samples.
        keys: Which arguments the rule covers.
        takes_all: Whether it takes the cotangents of several outputs, in a list.
        adds_up: Whether its result, in which samples have met, is a sum of theirs.
    """

    takes_all = adds_up = False

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

    def is_possible(self, placement: Placement) -> bool:
        """Tell whether the rule is for operands with samples at a place.

        A batch of one is anywhere.

        Args:
            placement: Where the operand's samples are.

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

    def is_possible(self, placement: Placement) -> bool:  # noqa: D102
        if isinstance(placement, Layout):
            return placement.axis < self._lead
        return isinstance(placement, Tensor) and self._lead > 0

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
        if n == 1 and lead > 0:
            out = Layout(0, x.shape[0])
        if lead > 0 and type(out) is Layout and out == FIRST and x.shape[0] == n:
            return derivatives.product(name, layer, [x], b)
        try:
            arrangement = Arrangement(out, x.shape[:lead], n)  # type: ignore[arg-type]
        except ValueError:
            return None
        x, b = arrangement.rows(x), arrangement.rows(b, 1)
        if self._takes_rows:
            return derivatives.product(name, layer, [x], b)
        x, b = x.flatten(0, 1), b.flatten(1, 2)
        return merge_rows(derivatives.product(name, layer, [x], b), n)


def merge_rows(product: PerSample, n: int) -> PerSample:
    """Add up the products of each sample's rows.

    Args:
        product: Products of N·R rows, sample by sample.
        n: Number N of samples.

    Returns:
        Products of N samples.
    """
    if isinstance(product, Outer):
        a = product.a.unflatten(0, (n, -1)).transpose(1, 2).flatten(2, 3)
        b = product.b.unflatten(1, (n, -1)).transpose(2, 3).flatten(3, 4)
        return product.like(lambda: a, b)
    if isinstance(product, Summed):
        b = product.b.unflatten(1, (n, -1)).flatten(2, 3)
        return Summed(b, product.shape, product.groups, product.sums_positions)
    products = product.individual().unflatten(1, (n, -1)).sum(2)
    return Dense(products, product.shape)


class Contraction(Operation):
    """A product of rows with a matrix: ``out[r, o] = Σᵢ x[r, i] W[i, o]``.

    Attributes:
        key: Which argument the matrix is.
        outputs: Axes of the output that come from the matrix.
    """

    def __init__(
        self,
        key: Key,
        data: Tensor,
        inputs: Sequence[int],
        outputs: Sequence[int],
        weight_axes: Sequence[int],
    ):
        """Store which axes are contracted.

        Args:
            key: Which argument the matrix is.
            data: The other operand.
            inputs: Its axes that are contracted; the others are rows, in the order of
                the output's.
            outputs: Axes of the output that come from the matrix.
            weight_axes: Where the matrix has its output axes, then its input axes.
        """
        super().__init__(data, [key])
        self.key, self._inputs, self.outputs = key, inputs, outputs
        self._weight_axes = list(weight_axes)
        self._kept: tuple[Tensor, Any] | None = None  # cotangents, and as rows

    def is_possible(self, placement: Placement) -> bool:  # noqa: D102
        if isinstance(placement, Layout):
            return placement.axis not in self._inputs
        return isinstance(placement, Tensor)

    def rows_of(self, numbers: Tensor) -> Tensor | None:
        """Tell where the rows of the data are in the output.

        Args:
            numbers: What is known of the data's entries, expanded where it is the same.

        Returns:
            The same of the output's, which broadcasts to its shape; ``None`` if it is
            not the same for all entries of a row.
        """
        for axis in sorted(self._inputs, reverse=True):
            if numbers.stride(axis) and numbers.shape[axis] > 1:
                return None
            numbers = numbers.select(axis, 0)
        for axis in sorted(self.outputs):
            numbers = numbers.unsqueeze(axis)
        return numbers

    def positions(self, key: Key, n: int) -> int:  # noqa: D102
        if key != self.key or not n:
            return 0
        size = prod(self.data.shape[axis] for axis in self._inputs)
        return self.data.numel() // max(1, size * n)

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        kept, self._kept = self._kept, None
        if kept is None or kept[0] is not cotangents:
            kept = cotangents, self._arrange(cotangents, out, n)
            if len(self.keys) > 1:  # the next one has the same
                self._kept = kept
        if kept[1] is None:
            return None
        arrangement, b = kept[1]
        if key != self.key:
            if prod(shape) != b.shape[-1]:
                return None
            if len(shape) > 1:
                return Dense(b.sum(2).unflatten(-1, shape), shape)
            return Summed(b, shape)
        x = as_type(_at_the_end(dense(self.data), self._inputs), b.dtype)
        a = arrangement.rows(x).flatten(2)
        axes = self._weight_axes
        sizes = tuple([shape[axis] for axis in axes])
        order = simplest(sizes, tuple(map(axes.index, range(len(axes)))))
        return Outer(lambda: a.unsqueeze(1), b.unsqueeze(2), shape, order)

    def _arrange(
        self, cotangents: Tensor, out: Placement, n: int
    ) -> tuple[Arrangement, Tensor] | None:
        """Arrange cotangents as rows of samples, ``[V, N, R, features]``."""
        outputs = self.outputs
        if n == 1:
            out = _anywhere(cotangents.shape[1:], outputs)
        if out is None:  # there is not one row
            return None
        b = _at_the_end(cotangents, [o + 1 for o in outputs])
        rows = b.shape[1 : b.dim() - max(1, len(outputs))]
        if not cotangents.numel():  # no sample was sent here
            out = nobodys(rows, b.device)
        elif isinstance(out, Layout):
            out = Layout(out.axis - sum([o < out.axis for o in outputs]), out.inner)
        elif isinstance(out, Tensor):
            given = out
            out = once(given, ("moved", *outputs), lambda: _at_the_end(given, outputs))
        arrangement = Arrangement(out, rows, n)  # type: ignore[arg-type]
        return arrangement, arrangement.rows(b, 1).flatten(3)


class Grouped(Contraction):
    """A product of rows with a matrix for each group of them, like experts' weights.

    ``out[r, o] = Σᵢ x[r, i] W[g(r), i, o]``, where groups are rows one after the other.
    """

    def __init__(self, key: Key, data: Tensor, ends: Tensor):
        """Store where groups end.

        Args:
            key: Which argument the matrices are, ``[G, i, o]``.
            data: The other operand, ``[R, i]``.
            ends: Where each group ends, ``[G]``; further rows are zero in the result.
        """
        super().__init__(key, data, [1], [1], [0, 2, 1])
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


class Broadcast(Operation):
    """``x + c`` or ``x * c`` for a constant that is broadcast along the samples."""

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
        if n == 1:
            taken = [axis for axis, size in enumerate(full) if size != 1]
            out = _anywhere(cotangents.shape[1:], taken)
        if not isinstance(out, Layout) or missing < 0 or full[out.axis] != 1:
            return None
        if self.data is not None:
            cotangents = cotangents * self.data
        if self._scale != 1.0:
            cotangents = cotangents * self._scale
        b = cotangents.movedim(out.axis + 1, 1)
        del full[out.axis]
        rest = b.shape[2:]
        if b.shape[1] != n:
            b = b.unflatten(1, (-1, n, out.inner)).sum((1, 3))
        sums = [i + 2 for i, size in enumerate(full) if size == 1 and rest[i] != 1]
        positions = [i for i in sums if i < 2 + len(rest) - len(shape)]
        is_vector = len(shape) == 1 and len(rest) == len(sums) + 1
        # as in a layer's bias
        if self.data is None and is_vector and sums and positions == sums:
            return Summed(b.flatten(2, -2), shape)
        b = b.sum(sums) if sums else b
        return Dense(b.reshape(len(b), n, *shape), shape)


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


def _at_the_end(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Move axes to the end, where they often are: each view has its price.

    There is at least one, of one entry.
    """
    if not axes:
        return x.unsqueeze(-1)
    last = [*range(x.dim() - len(axes), x.dim())]
    return x if [*axes] == last else x.movedim([*axes], last)


def _anywhere(shape: Sequence[int], taken: Sequence[int]) -> Layout | None:
    """Say where a single sample is: along any axis that is not taken."""
    free = [axis for axis in range(len(shape)) if axis not in taken]
    return Layout(free[0], shape[free[0]]) if free else None
