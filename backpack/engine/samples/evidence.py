"""What is seen of a result when an operation is run on numbers that were drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack.core.layout import (
    Layout,
    Placement,
    conflict,
    sample_numbers,
    simplify,
)


class Evidence:
    """What draws have shown of a result.

    Attributes:
        times: How often two of them differed, for each entry.
        ones: Bits of the numbers of samples that an entry follows.
        zeros: Bits that these do not have.
        has_met: Whether samples have.
    """

    def __init__(self, out: Tensor, n: int, least: int):
        """Begin.

        Args:
            out: The result.
            n: Number N of samples.
            least: How often draws have to differ.
        """
        self._shape, self._n, self._least = out.shape, n, least
        self.times, self.ones, self.zeros = (nowhere(out).long() for _ in range(3))
        self.has_met = False

    def note(self, bit: int, ones: Tensor, zeros: Tensor) -> None:
        """Note what a mixture of two draws shows.

        Args:
            bit: A bit of samples' numbers.
            ones: Which entries follow samples that have it.
            zeros: Which follow those that have it not.
        """
        self.ones |= ones.long() << bit
        self.zeros |= zeros.long() << bit
        self.has_met = self.has_met or bool((self.ones & self.zeros).any())

    def is_enough(self, waits: bool) -> bool:
        """Tell whether enough entries have changed, often enough.

        Args:
            waits: Whether the others may still change.

        Returns:
            Whether no more draws are needed.
        """
        certain = self.times >= self._least
        if bool((certain | (self.times < 1 - int(waits))).all()):
            return True
        if int(certain.sum()) < certain.numel() / 2:
            return False
        return type(simplify(self.ones.where(certain, -1), self._n, True)) is Layout

    def placement(self, single: bool) -> Placement:
        """Tell where samples are, and note whether they have met.

        Args:
            single: Whether there is one sample.

        Returns:
            The placement.
        """
        n, own, certain = self._n, self.ones, self.times >= self._least
        placement: Placement = simplify(own.where(certain, -1), n, True)
        if placement is not None and not bool(certain.all()):
            numbers = sample_numbers(placement, self._shape, n, own.device)
            few = not single and len(own[certain].unique()) == 1
            self.has_met |= few or conflict(numbers, own.where(self.times > 0, -1))
        self.has_met |= bool((own[certain] >= n).any())
        return placement


def nowhere(x: Tensor) -> Tensor:
    """Make a mask of no entries.

    Args:
        x: A tensor.

    Returns:
        The mask.
    """
    return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
