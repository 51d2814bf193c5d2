"""What products were made of, and reductions that become single operations."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any, Callable, NamedTuple, Optional, Tuple, Union

from torch import Tensor

from backpack.core.fast.whole import call_whole, is_recorded


class Operands(NamedTuple):
    """What products were made of.

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
    form: Optional[Callable[[Tensor, Tensor, bool], Tensor]] = None

    def select(self, samples: Union[slice, Tensor]) -> Operands:
        """Restrict to some samples.

        Args:
            samples: Which ones.

        Returns:
            The same for these samples.
        """
        x, cotangents = self.inputs[samples], self.cotangents[:, samples]
        return Operands(x, cotangents, self.make, self.form)

    def products(self) -> Tensor:
        """Form the products of all samples.

        Returns:
            Products of shape ``[V, N, *p]``.
        """
        return self.form(self.inputs, self.cotangents, False)


def whole_reduction(reduction: Callable) -> Callable:
    """Let a reduction be a single operation where a step is recorded.

    Args:
        reduction: Method of products that tell what they are made of, with
            ``made_of()``.

    Returns:
        The method.
    """

    @wraps(reduction)
    def run(self: Any, *args: Any, **options: Any) -> Tensor:
        if not is_recorded():
            return reduction(self, *args, **options)
        source = self.made_of()
        adds_up = self.keeps_total and self._total is None
        reduce = partial(_reduce, partial(reduction, **options), source.make, adds_up)
        result, total = call_whole(reduce, source.inputs, source.cotangents, *args)
        self._total = self._total if total is None else total
        return result

    return run


def _reduce(
    reduction: Callable,
    make: Callable[[Tensor, Tensor], Any],
    adds_up: bool,
    inputs: Tensor,
    cotangents: Tensor,
    *args: Any,
) -> Tuple[Tensor, Optional[Tensor]]:
    product = make(inputs, cotangents)
    product.keeps_total = adds_up
    return reduction(product, *args), product._total
