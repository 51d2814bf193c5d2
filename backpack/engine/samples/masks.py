"""What leaves out entries of other operands, so that samples do not meet there."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from backpack.core.layout import Mixed, Placement, compact
from backpack.engine.nodes.functions import ATTENTION, PRODUCTS
from backpack.engine.samples.probes import left_out
from backpack.utils.types import is_inexact


class Masks:
    """The masks of an operation, and its factors of which entries are zero.

    Attributes:
        is_product: Whether zeros of a factor leave out what they are multiplied with.
        were_read: Whether a rule has looked at the zeros.
    """

    def __init__(
        self, name: str, flat: Sequence[Any], numbers: Sequence[Tensor | None], n: int
    ):
        """Store the operation's operands.

        Args:
            name: Its name.
            flat: Its arguments, as leaves of a tree.
            numbers: Sample numbers of the entries of each argument.
            n: Number N of samples.
        """
        self.is_product, self.were_read = name in PRODUCTS, False
        self._is_attention = name == ATTENTION
        self._flat, self._numbers, self._n = flat, numbers, n
        self._learned: dict[int, Tensor] = {}  # factors, and what they do not leave out

    def candidates(self) -> list[Tensor]:
        """List masks, and factors that may have zeros.

        What is learned, and zero by chance, does not: its gradient is not.

        Returns:
            These operands.
        """
        if self._is_attention:
            return [x for x in self._flat if isinstance(x, Tensor)][3:]
        if not self.is_product:
            return []
        pairs = [(x, i) for x, i in zip(self._flat, self._numbers) if is_inexact(x)]
        several = sum(i is not None for _, i in pairs) > 1
        return [
            x
            for x, i in pairs
            if i is None or several and x.layout is torch.strided
            if not x.requires_grad or id(x) in self._learned
        ]

    def found(self) -> list[Tensor]:
        """List masks, and factors with zeros; a sparse one has them in any case.

        Returns:
            These operands.
        """
        strided = torch.strided
        return [
            x
            for x in self.candidates()
            if self._is_attention or x.layout is not strided or bool((x == 0).any())
        ]

    def learned(self) -> Iterator[Tensor]:
        """Look for learned factors with zeros that no learning changes.

        Yields:
            One after the other, those with the most zeros first.
        """
        factors = [x for x in self._flat if self.is_product and is_inexact(x)]
        factors = [x for x in factors if x.requires_grad and x.layout is torch.strided]
        factors = [x for x in factors if self._meets_samples(x)]
        zeros = {id(x): int((x == 0).sum()) for x in factors}
        for x in sorted(factors, key=lambda x: -zeros[id(x)]):
            there = ~left_out(x) if zeros[id(x)] else None
            if there is not None and not bool(there.all()):
                self._learned[id(x)] = there
                yield x

    def _meets_samples(self, x: Tensor) -> bool:
        pairs = zip(self._flat, self._numbers)
        return any(i is not None and y is not x for y, i in pairs)

    def entries_of(self, x: Tensor) -> Tensor:
        """Tell which entries of a factor do not leave out what they multiply.

        Args:
            x: The factor.

        Returns:
            Whether they do not.
        """
        known = self._learned.get(id(x))
        return x.detach().bool() if known is None else known  # also NaN

    def may_differ(self, found: Sequence[Placement]) -> bool:
        """Tell whether other zeros, or another mask, may lead to something else.

        Args:
            found: Where samples are in the results.

        Returns:
            Whether they may.
        """
        mixed = any(isinstance(placement, Mixed) for placement in found)
        if self.were_read or mixed and self.is_product:
            return True
        return bool(self.candidates()) and (mixed or self.is_of_few)

    @cached_property
    def is_of_few(self) -> bool:
        """Whether some samples are not there, so that it may not show if they meet."""
        there = torch.zeros(self._n + 1, dtype=torch.bool)
        for i in self._numbers:
            if i is not None:
                there[compact(i).flatten().cpu() + 1] = True  # -1 comes first
        return not bool(there[1:].all())
