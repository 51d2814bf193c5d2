"""How products are made, so that reductions of them can be single operations."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from backpack.core.fast import tuning
from backpack.core.fast.whole import call_whole, is_recorded
from backpack.core.per_sample.sums import chunks


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

    def merged(self, n: int, size: int, unfolded: int) -> Recipe:
        """Add up the products of each sample's rows.

        Args:
            n: Number of samples, whose rows are now one sample each.
            size: Number of elements of a product.
            unfolded: Number of elements of a row's unfolded input. If it is larger, the
                products of each row are formed, where that is possible.

        Returns:
            The recipe of the sums.
        """
        x = self.inputs.unflatten(0, (n, -1))
        cotangents = self.cotangents.unflatten(1, (n, -1))
        forms = self.form is not None and size <= unfolded
        form = partial(_form_rows, self.form, size) if forms else None
        return Recipe(x, cotangents, partial(_make_rows, self.make), form)

    def products(self) -> Tensor:
        """Form the products of all samples.

        Returns:
            Products of shape ``[V, N, *p]``.
        """
        return self.form(self.inputs, self.cotangents, False)


def _make_rows(make: Callable, x: Tensor, cotangents: Tensor) -> Any:
    return make(x.flatten(0, 1), cotangents.flatten(1, 2)).merged(len(x))


def _form_rows(
    form: Callable, size: int, x: Tensor, cotangents: Tensor, sum_batch: bool
) -> Tensor:
    n, rows, *_ = x.shape
    if sum_batch:
        return form(x.flatten(0, 1), cotangents.flatten(1, 2), True)
    found = []
    for some in chunks(n, rows * size, tuning.STEP_ELEMENTS):
        products = form(x[some].flatten(0, 1), cotangents[:, some].flatten(1, 2), False)
        found.append(products.unflatten(1, (-1, rows)).sum(2))
    return torch.cat(found, 1)


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
