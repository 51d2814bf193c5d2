"""How products are made, so that reductions of them can be single operations."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any, Callable, NamedTuple

from torch import Tensor

from backpack.core.fast.whole import call_whole, is_recorded


class Recipe(NamedTuple):
    """What products are made of, and how.

    Attributes:
        inputs: Inputs of shape ``[N, *]``.
        cotangents: Cotangents of shape ``[V, N, *]``.
        make: Describes the products of both, restricted to n samples; holds no tensor
            on which they depend.
        form: Maps both to their products ``[V, n, *p]``; to their sum ``[V, *p]`` if
            its third argument is true. ``None`` if nothing is faster than unfolding.
    """

    inputs: Tensor
    cotangents: Tensor
    make: Callable[[Tensor, Tensor], Any]
    form: Callable[[Tensor, Tensor, bool], Tensor] | None = None

    def select(self, samples: slice | Tensor) -> Recipe:
        """Restrict to some samples.

        Args:
            samples: Which ones.

        Returns:
            The same for these samples.
        """
        x, cotangents = self.inputs[samples], self.cotangents[:, samples]
        return self._replace(inputs=x, cotangents=cotangents)

    def products(self) -> Tensor:
        """Form the products of all samples.

        Returns:
            Products of shape ``[V, N, *p]``.
        """
        return self.form(self.inputs, self.cotangents, False)


def whole_reduction(reduction: Callable) -> Callable:
    """Let a reduction be a single operation where a step is recorded.

    Args:
        reduction: Method of products that have a ``recipe()``.

    Returns:
        The method.
    """

    @wraps(reduction)
    def run(self: Any, *args: Any, **options: Any) -> Tensor:
        if not is_recorded():
            return reduction(self, *args, **options)
        recipe = self.recipe()
        adds_up = self.keeps_total and self._total is None
        reduce = partial(_reduce, partial(reduction, **options), recipe.make, adds_up)
        result, total = call_whole(reduce, recipe.inputs, recipe.cotangents, *args)
        if total is not None:
            self._total = total
        return result

    return run


def _reduce(
    reduction: Callable,
    make: Callable[[Tensor, Tensor], Any],
    adds_up: bool,
    inputs: Tensor,
    cotangents: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor | None]:
    product = make(inputs, cotangents)
    product.keeps_total = adds_up
    return reduction(product, *args), product._total
