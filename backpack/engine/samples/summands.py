"""What samples contribute to numbers in which they have met.

A parameter that is multiplied with a mean, as in `exp(-s) * loss + s`, has a gradient
that is a sum over samples as well. What it adds up is made of the mean's own summands,
which are formed when a parameter asks for them.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor, is_tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.core.kinds import AddedUp
from backpack.core.layout import Arrangement, Mixed, Placement, one_sample_each
from backpack.core.per_sample.sums import chunks
from backpack.engine.nodes.functions import find_terms, kind_of
from backpack.engine.nodes.uses import MASKED_ELEMENTS
from backpack.engine.samples.placements import Finder
from backpack.engine.samples.trials import Performed
from backpack.utils.types import tensors_in, versions_of

_PRODUCTS = frozenset("mul multiply __mul__ __rmul__".split())
_QUOTIENTS = frozenset("div divide true_divide __truediv__".split())
_SUMS = frozenset("add sub __add__ __radd__ __sub__ __rsub__".split())
# These are linear in all tensors together
_LINEAR = _SUMS | frozenset(
    "neg __neg__ sum mean __getitem__ stack cat concat concatenate hstack vstack "
    "squeeze unsqueeze view reshape flatten ravel expand contiguous detach clone to "
    "float double".split()
)
# Those with which the terms of a loss are added up
_ADDS = _SUMS | frozenset("rsub add_ sub_ __iadd__ __isub__".split())
# Products of two vectors, if these have no other axis
_DOTS = frozenset("dot inner matmul __matmul__".split())


class Summands:
    """Knows of which numbers samples' summands can be formed."""

    def __init__(self, finder: Finder):
        """Start without any.

        Args:
            finder: Finds where samples are.
        """
        self._n, self._finder = finder.n, finder
        # what has made them, by their identities, which it keeps; and whether something
        # was added that belongs to no sample
        self._known: dict[int, tuple[Performed, list[int], tuple, bool]] = {}

    def is_known(self, x: Tensor) -> bool:
        """Tell whether a tensor's summands can be formed: nothing was modified since.

        Args:
            x: The tensor.

        Returns:
            Whether it is so.
        """
        return self.is_sum(x) and not self._known[id(x)][-1]

    def is_sum(self, x: Tensor) -> bool:
        """Tell the same, whether or not something was added that belongs to no sample.

        Args:
            x: The tensor.

        Returns:
            Whether it is so.
        """
        done, versions, *_ = self._known.get(id(x), (None, []))
        return done is not None and versions == _versions(done)

    def is_rest(
        self, name: str, data: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> bool:
        """Tell whether a number that no data enters is added to one of all samples.

        It belongs to no sample, like a regularizer outside of the model.

        Args:
            name: Name of an operation.
            data: Its operands that hold samples.
            constants: Those that depend on parameters alone.

        Returns:
            Whether it is so.
        """
        if name not in _ADDS or all(map(self.is_sum, data)):
            return name in _ADDS
        met = all(isinstance(self._finder.of(x), Mixed) for x in data)
        return met and all(x.numel() == 1 for x in (*data, *constants))

    def has_parts(self, x: Tensor) -> bool:
        """Tell whether a tensor is a sum of parts that samples have, by forming these.

        Args:
            x: The tensor.

        Returns:
            Whether it is known to be.
        """
        with torch.no_grad():
            return self._of(x) is not None

    def note(self, done: Performed, key: tuple) -> None:
        """Remember an operation after which samples have met.

        Args:
            done: The operation.
            key: What it depends on where its samples are.
        """
        met = self._finder.of(done.outs[0])
        if not isinstance(met, Mixed) or not met.is_known or met.is_of_inputs:
            return
        # what is returned as it was, as by `x.to(...)`, is known
        if any(x is done.outs[0] for x in done.data):
            return
        fits = done.name in ("sum", "mean") or kind_of(done.func).has_terms
        rest = False
        if all(map(self.is_sum, done.data)):
            fits = _is_linear(done)
            rest = _has_constants(done) or not all(map(self.is_known, done.data))
        if fits and len(done.outs) == 1:
            self._known[id(done.outs[0])] = done, _versions(done), key, rest

    def operation(
        self, name: str, args: tuple, kwargs: dict, keys: Sequence[Any]
    ) -> Any:
        """Describe a product, or quotient, of what has summands and a constant.

        Args:
            name: Name of the operation.
            args: Positional arguments.
            kwargs: Keyword arguments.
            keys: Which of them are constants.

        Returns:
            The operation, ``None`` if it is something else.
        """
        if not self._known:
            return None
        divides = name in _QUOTIENTS and keys == [1]
        if kwargs or len(args) != 2 or not (divides or name in _PRODUCTS | _DOTS):
            return None
        if name in _DOTS and any(x.dim() != 1 for x in args):
            return None
        (key,) = keys  # the other operand has the samples
        x, c = args[1 - key], args[key].detach()
        with torch.no_grad():
            found = self._of(x) if is_tensor(x) else None
        if found is None:
            return None
        found = found.reshape(self._n, *[1] * (c.dim() - x.dim()), *x.shape)
        return AddedUp(key, -found / c**2 if divides else found)

    def _of(self, x: Tensor) -> Tensor | None:
        """Form summands ``[N, *]`` of a tensor, ``None`` if that is not possible."""
        if not self.is_known(x):
            return None
        done, _, key, _ = self._known[id(x)]
        if kind_of(done.func).has_terms:
            return self._of_loss(done, (*key, Summands))
        parts = {id(y): self._of(y) for y in done.data}
        if all(part is not None for part in parts.values()):
            return _mapped(done, parts)
        y, *others = done.data
        return None if others else self._of_sum(y, self._finder.of(y), done, y.numel())

    def _of_loss(self, done: Performed, key: tuple) -> Tensor | None:
        found = find_terms(done.func, done.args, done.kwargs)
        if found is None:
            return None
        func, kwargs, divisor = found
        each = func(**kwargs).requires_grad_()  # else it would be a constant
        where = Performed(func, done.name, (), kwargs, [each], done.data)
        known = self._finder.recall(key, [each]) or self._finder.find(where, key)
        count = each.numel() if divisor is None else divisor
        return self._of_sum(each, known[0], done, count)

    def _of_sum(
        self, x: Tensor, placement: Placement, done: Performed, count: Any
    ) -> Tensor | None:
        """Split a sum, or that of some axes, into what samples have; and divide it."""
        if placement is None or isinstance(placement, Mixed):
            return None
        if isinstance(placement, Tensor) and bool(((placement < 0) & (x != 0)).any()):
            return None  # something belongs to nobody
        if not done.outs[0].dim():
            rows = Arrangement(placement, x.shape, self._n).rows(x).sum(1)
            return rows if done.name == "sum" else rows / count
        steps = chunks(self._n, x.numel(), MASKED_ELEMENTS)
        each = (one_sample_each(placement, x[None], self._n, s)[0] for s in steps)
        return torch.cat([_mapped(done, {id(done.data[0]): part}) for part in each])


def _versions(done: Performed) -> list[int]:
    """List the versions of all that an operation has read and returned."""
    return versions_of(tensors_in((done.args, done.kwargs, done.outs)))


def _is_linear(done: Performed) -> bool:
    """Tell whether an operation is linear in what has summands, up to constants."""
    _, name, args, kwargs, _, data, _ = done
    divides = name in _QUOTIENTS and args and args[0] is data[0]
    if divides or name in _PRODUCTS | _DOTS:
        return len(data) == 1 and not kwargs
    return name in _LINEAR and not (name in _SUMS and kwargs)


def _has_constants(done: Performed) -> bool:
    """Tell whether an operation adds something that has no summands."""
    _, name, args, kwargs, _, data, _ = done
    if name not in _LINEAR:
        return False
    if name in _SUMS and [x for x in args if not is_tensor(x) and x]:
        return True  # Python's `sum` begins with a zero
    return len(data) != len(tensors_in((args, kwargs)))


def _mapped(done: Performed, parts: dict[int, Any]) -> Tensor:
    """Let an operation act on each sample's part of its operands."""
    leaves, spec = tree_flatten((done.args, done.kwargs))

    def run(each: dict[int, Tensor]) -> Tensor:
        args, kwargs = tree_unflatten([each.get(id(x), x) for x in leaves], spec)
        return done.func(*args, **kwargs)

    return vmap(run)(parts)
