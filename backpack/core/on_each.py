"""Any operation that treats each sample alone, done once more on each by itself.

Whoever has no rule of another kind pulls back each sample's cotangent through the
operation on all samples, which costs the square of their number.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from backpack.core.kinds import Key, Operation
from backpack.core.layout import Layout, Placement, Where
from backpack.core.per_sample.base import Dense, PerSample
from backpack.utils.errors import without_performance_warnings
from backpack.utils.types import versions_of


class OnEach(Operation):
    """An operation of PyTorch that is done once more, on each sample by itself."""

    def __init__(
        self, func: Callable, args: Sequence[Any], kwargs: dict, keys: Sequence[Key]
    ):
        """Store the call.

        Args:
            func: The operation, which draws no numbers and writes to nothing.
            args: Positional arguments.
            kwargs: Keyword arguments.
            keys: Which of them are constants that need a gradient.
        """
        self._func, self._count = func, len(args)
        self._given: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
        self._tensors = {k: x for k, x in self._given.items() if isinstance(x, Tensor)}
        others = [k for k in self._tensors if k not in keys]
        super().__init__(self._tensors[others[0]], keys)
        self._versions = versions_of(self._tensors.values())
        self._places: dict[Key, Layout] = {}
        self._products: dict[Key, Tensor] = {}  # of constants that nobody has asked for

    @property
    def is_modified(self) -> bool:
        """Whether an operand was modified in place since."""
        return versions_of(self._tensors.values()) != self._versions

    def is_possible(self, of: Where) -> bool:  # noqa: D102
        for key in self._tensors.keys() - set(self.keys):
            placement = of(self._tensors[key])
            if type(placement) is Layout:
                self._places[key] = placement
            elif placement is not None:
                return False
        return bool(self._places)

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        if type(out) is not Layout or not self._places:
            return None
        if key == self.keys[0]:  # the others are asked for next
            self._products = {}
            with suppress(Exception):  # of autograd's: constants may have a batch, too
                self._products = self._pulled(cotangents, out, n)
        found = self._products.pop(key, None)
        return None if found is None else Dense(found, shape)

    def _pulled(self, cotangents: Tensor, out: Layout, n: int) -> dict[Key, Tensor]:
        """Pull back each sample's cotangents, ``[V, N, *p]`` for each constant.

        Each sample has constants of its own, as far as autograd is concerned.
        """
        again = torch.is_grad_enabled()  # products will be differentiated

        def free(x: Tensor) -> Tensor:
            return x if again else x.detach()

        own = [
            _parts(free(self._given[k]), where, n) for k, where in self._places.items()
        ]
        spread = [free(self._given[key]) for key in self.keys]
        spread = [x.expand(n, *x.shape) for x in spread]
        spread = spread if again else [x.requires_grad_() for x in spread]

        def run(own: list[Tensor], constants: list[Tensor]) -> Tensor:
            given = {**self._given, **dict(zip(self._places, own))}
            given.update(zip(self.keys, constants))
            named = {k: x for k, x in given.items() if isinstance(k, str)}
            return self._func(*[given[i] for i in range(self._count)], **named)

        with torch.enable_grad(), without_performance_warnings():
            y = vmap(run)(own, spread)
        g = _parts(cotangents, Layout(out.axis + 1, out.inner), n).movedim(0, 1)
        one = len(g) == 1
        found = torch.autograd.grad(
            y, spread, g[0] if one else g, create_graph=again, is_grads_batched=not one
        )
        return {key: x[None] if one else x for key, x in zip(self.keys, found)}


def _parts(x: Tensor, where: Layout, n: int) -> Tensor:
    """Separate the entries of N samples, along a new axis in front."""
    axis, inner = where
    parts = x.unflatten(axis, (-1, n, inner)).movedim(axis + 1, 0)
    return parts.flatten(axis + 1, axis + 2)
