"""How the axes of a parameter lie in the matrices that outer products form."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple, Sequence

from torch import Tensor


class Order(NamedTuple):
    """From matrices ``[*, G, p, d]`` to a parameter with its axes in another order.

    Attributes:
        sizes: The axes that ``[G, p, d]`` is divided into.
        axes: In which order the parameter has them.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    def __call__(self, mat: Tensor, shape: Sequence[int]) -> Tensor:
        """Bring matrices into the parameter's shape.

        Args:
            mat: Matrices ``[*, G, p, d]``.
            shape: The parameter's shape.

        Returns:
            The same numbers, ``[*, *shape]``.
        """
        lead = mat.shape[:-3]
        mat = mat.reshape(*lead, *self.sizes)
        mat = mat.permute(*range(len(lead)), *[len(lead) + axis for axis in self.axes])
        return mat.reshape(*lead, *shape)

    def describe(self, shape: Sequence[int]) -> str:
        """Say how to bring a parameter's axes into the order of the matrices.

        Args:
            shape: The parameter's shape.

        Returns:
            Methods of tensors, with their arguments.
        """
        runs: list[list[int]] = []  # the parameter's axes that each of ours consists of
        i = 0
        for axis in self.axes:
            runs.append([])
            while prod(shape[j] for j in runs[-1]) < self.sizes[axis]:
                runs[-1].append(i)
                i += 1
            if prod(shape[j] for j in runs[-1]) != self.sizes[axis]:
                # like a view of a vector, or a convolution with groups
                sizes = [self.sizes[j] for j in self.axes]
                places = map(self.axes.index, range(len(sizes)))
                listed = [", ".join(map(str, x)) for x in (sizes, places)]
                return "reshape({}).permute({})".format(*listed)
        runs[-1].extend(range(i, len(shape)))
        axes = [j for place in range(len(runs)) for j in runs[self.axes.index(place)]]
        swapped = [1, 0, *range(2, len(shape))]
        if [j for j in axes if shape[j] > 1] == [j for j in swapped if shape[j] > 1]:
            return "transpose(0, 1)"
        return f"permute({', '.join(map(str, axes))})"


@lru_cache(maxsize=1024)
def simplest(sizes: tuple[int, ...], axes: tuple[int, ...]) -> Order | None:
    """Describe an order in its simplest form; equal orders have the same.

    Args:
        sizes: The axes that a matrix is divided into.
        axes: In which order the parameter has them.

    Returns:
        The order, ``None`` if the parameter is the matrix in another shape.
    """
    kept = [axis for axis in axes if sizes[axis] != 1]
    rank = {axis: number for number, axis in enumerate(sorted(kept))}
    runs: list[list[int]] = []  # axes that stay side by side are one
    for axis in kept:
        if runs and rank[axis] == rank[runs[-1][-1]] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    if len(runs) < 2:
        return None
    places = sorted(runs)
    merged = tuple(prod(sizes[axis] for axis in run) for run in places)
    return Order(merged, tuple(map(places.index, runs)))


def permuted(
    order: Order | None, shape: Sequence[int], axes: Sequence[int]
) -> Order | None:
    """Describe the order of a parameter whose axes are put in another order.

    Args:
        order: The order of the parameter.
        shape: Its shape.
        axes: Which of its axes come first, second and so on.

    Returns:
        The order.

    Raises:
        ValueError: If one of its axes ends within an axis of the matrices.
    """  # noqa: DAR401
    sizes, ours = map(list, order or Order((prod(shape),), (0,)))
    runs: list[slice] = []  # where in `ours` each of its axes is
    place = 0
    for size in shape:
        start, begun = place, 1
        while begun < size and size % begun == 0:
            axis, part = ours[place], size // begun
            if part < sizes[axis] and sizes[axis] % part == 0:  # divide it
                sizes[axis : axis + 1] = [part, sizes[axis] // part]
                ours = [a + 1 if a > axis else a for a in ours]
                ours.insert(place + 1, axis + 1)
            begun *= sizes[axis]
            place += 1
        if begun != size:
            raise ValueError("an axis of the parameter ends within an axis")
        runs.append(slice(start, place))
    return simplest(tuple(sizes), tuple(a for axis in axes for a in ours[runs[axis]]))
