"""Operations inside of transforms of ``torch.func``: what they do to tensors behind.

``vmap`` and ``grad`` wrap tensors, one time for each of their levels. The graph, which
samples and parameters are in, is that of the tensors behind. An operation on wrapped
tensors is one on these, with the axes that levels of ``vmap`` have taken away.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Container, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import pyfunctorch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._functorch.vmap import vmap_increment_nesting
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional
from torch.utils import _pytree as pytree

from backpack.engine.nodes.functions import POINTWISE, Kind, Request, kind_of
from backpack.utils.types import behind

# How a tensor is wrapped, innermost first: the levels, and which axis each of them took
# away from what it wraps; ``None`` for one that differentiates
Layers = tuple[tuple[int, "int | None"], ...]

# Operations that do the same with more axes in front of their first operand: how many
# it may have inside, and how many the others
_CONVOLUTIONS = {getattr(torch, f"conv{n}d"): ({n + 1}, {1, n + 2}) for n in (1, 2, 3)}
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_OF_ROWS: dict[Callable, tuple[Container[int], Container[int]]] = {
    **dict.fromkeys((functional.linear, *_PRODUCTS), (range(1, 99), {1, 2})),
    functional.layer_norm: (range(1, 99), range(99)),
    functional.embedding: (range(99), {2}),
    **_CONVOLUTIONS,
}
_TIMES_VECTOR = (*_PRODUCTS, torch.mv, Tensor.mv)


class Vmapped(NamedTuple):
    """An operation on the tensors behind, to be run again outside of transforms.

    Attributes:
        func: The operation inside.
        layers: How each of its arguments is wrapped, as leaves of a tree.
        sizes: Levels of ``vmap``, with their sizes and what they say of randomness.
    """

    func: Callable
    layers: tuple[Layers, ...]
    sizes: tuple[tuple[int, int, str], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation.

        Args:
            *args: Positional arguments, not wrapped.
            **kwargs: Keyword arguments.

        Returns:
            What comes out, not wrapped either.
        """
        flat, spec = pytree.tree_flatten((args, kwargs))
        with ExitStack() as stack:
            now = {
                level: stack.enter_context(vmap_increment_nesting(*options))
                for level, *options in self.sizes
            }
            for i, layers in enumerate(self.layers):
                own = [(now[level], axis) for level, axis in _taken(layers)]
                flat[i] = _wrap(flat[i], own)
            args, kwargs = pytree.tree_unflatten(flat, spec)
            return pytree.tree_map_only(Tensor, behind, self.func(*args, **kwargs))


def watch_inside(watch: Callable[[Request], Any], request: Request) -> Any:
    """Watch an operation that a transform runs.

    Args:
        watch: Watches what it is on tensors behind.
        request: The operation.

    Returns:
        What it returns.
    """
    func, kind, args, kwargs, _ = request
    flat, spec = pytree.tree_flatten((args, kwargs))
    layers = list(map(_layers_of, flat))
    if None in layers or kind.name == "_unpack_dual":  # a level's own
        return func(*args, **kwargs)
    inner = list(map(behind, flat))
    inside, skip = func, 0
    if _is_index(args):  # as in masks that functions of places make
        inside, kind, skip = torch.ops.aten.index, kind_of(Tensor.__getitem__), 1
    elif kind.name == "_make_dual":  # of a tangent, the tensors behind know nothing
        inside, kind = _first, kind_of(Tensor.view_as)
    given, named = pytree.tree_unflatten(inner, spec)
    wrapped: dict[int, tuple[Tensor, Tensor]] = {}  # results, and what is behind them

    def keep(x: Tensor) -> Tensor:
        out = behind(x)
        wrapped[id(out)] = x, out
        return out

    # this does not outlast what is asked of the graph meanwhile
    allowed = functorch.get_inplace_requires_grad_allowed()

    def run(*args: Any, **kwargs: Any) -> Any:
        given = list(flat)
        functorch.set_inplace_requires_grad_allowed(allowed)
        with pyfunctorch.temporarily_restore_interpreter_stack(stack):
            for place, x in zip(places, pytree.tree_leaves((args, kwargs))):
                if place is None:
                    continue
                i = skip + place
                if x is not inner[i]:
                    given[i] = _instead(x, flat[i])
            own_args, own_kwargs = pytree.tree_unflatten(given, spec)
            return pytree.tree_map_only(Tensor, keep, func(*own_args, **own_kwargs))

    same = Request(inside, kind, given[skip:], named, run)
    same, places = _behind(same, flat[skip:], layers[skip:])
    with _outside() as stack:
        out = watch(same)
    functorch.set_inplace_requires_grad_allowed(allowed)
    return pytree.tree_map_only(Tensor, lambda x: wrapped[id(x)][0], out)


@contextmanager
def _outside() -> Iterator[list[Any]]:
    """Leave all transforms, some of which allow no hooks on what is saved."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    with pyfunctorch.temporarily_clear_interpreter_stack() as stack:
        torch._C._autograd._saved_tensors_hooks_enable()
        try:
            yield stack
        finally:
            if message is not None:
                torch._C._autograd._saved_tensors_hooks_disable(message)


def _behind(
    request: Request, flat: Sequence[Any], layers: Sequence[Layers]
) -> tuple[Request, Sequence[int | None]]:
    """Find what an operation on wrapped tensors is on those behind.

    Args:
        request: The operation, with arguments behind.
        flat: Its arguments, wrapped, as leaves of a tree.
        layers: How each is wrapped.

    Returns:
        An operation of PyTorch where one does the same, with axes in front of those
        that it has inside; else one to be run inside of ``vmap``. And which of the
        arguments inside each of its own is, as leaves of trees.
    """
    func, kind, args, kwargs, _ = request
    same = request, range(len(flat))
    axes = {i: taken for i, own in enumerate(layers) if (taken := _taken(own))}
    if not axes:
        return same
    equation = None
    if len(set(axes.values())) == 1 and not any(
        axis for pairs in axes.values() for _, axis in pairs
    ):
        dims = {i: x.dim() for i, x in enumerate(flat) if isinstance(x, Tensor)}
        levels = len(next(iter(axes.values())))
        if _has_more_axes(func, kind, dims, list(axes), levels):
            return same
        equation = None if kwargs else _equation(func, flat, dims, list(axes), levels)
    if equation is not None:
        args = equation, *[x for x in args if isinstance(x, Tensor)]
        func, kind = torch.einsum, kind_of(torch.einsum)
        return Request(func, kind, args, {}, request.run), [None, *dims]
    sizes = [
        (x.level(), x.batch_size(), x.randomness())
        for x in pyfunctorch.retrieve_all_functorch_interpreters()
        if isinstance(x, pyfunctorch.VmapInterpreter)
    ]
    kind = kind._replace(name=f"vmap({kind.name})", is_loss=False)
    inside = Vmapped(func, tuple(layers), tuple(sizes))
    return request._replace(func=inside, kind=kind), same[1]


def _has_more_axes(
    func: Callable, kind: Kind, dims: dict[int, int], batched: list[int], levels: int
) -> bool:
    """Tell whether an operation does the same if levels leave their axes in front.

    Args:
        func: The operation.
        kind: What is known of it.
        dims: Numbers of axes that its operands have inside.
        batched: Which operands levels have taken axes away from, all the same.
        levels: Number of these levels.

    Returns:
        Whether it is known to.
    """
    if kind.name in POINTWISE and not kind.is_foreign:
        return all(dims[i] == max(dims.values()) for i in batched)
    (place, first), *others = dims.items()
    if batched != [place] or func in _CONVOLUTIONS and levels > 1:
        return False
    own, other = _OF_ROWS.get(func, ((), ()))
    return first in own and all(n in other for _, n in others)


def _equation(
    func: Callable,
    flat: Sequence[Any],
    dims: dict[int, int],
    batched: list[int],
    levels: int,
) -> str | None:
    """Write a product as one of tensors behind, for ``einsum``; ``None`` for others."""
    letters = "ZYXWVU"[:levels]
    if func is torch.einsum and isinstance(flat[0], str) and len(batched) == 1:
        operands, arrow, out = flat[0].replace(" ", "").partition("->")
        terms = operands.split(",")
        if arrow and "." not in operands and len(terms) == len(dims) == len(flat) - 1:
            terms[batched[0] - 1] = letters + terms[batched[0] - 1]
            return f"{','.join(terms)}->{letters}{out}"
    if func in _TIMES_VECTOR and batched == [1] and dims == {0: 2, 1: 1}:
        return f"oi,{letters}i->{letters[:-1]}o{letters[-1:]}"  # vmap has it like this
    return None


def _is_index(args: tuple) -> bool:
    """Tell whether a function of one's own is PyTorch's, for indices inside of vmap."""
    name = "torch._dynamo._trace_wrapped_higher_order_op", "ModIndex"
    own = args[0] if args and isinstance(args[0], type) else None
    return own is not None and (own.__module__, own.__name__) == name


def _first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.view_as(x)


def _layers_of(x: Any) -> Layers | None:
    """Tell how a tensor is wrapped; ``None`` if by something else."""
    layers: Layers = ()
    while isinstance(x, Tensor) and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_functionaltensor(x):
            return None
        batched = functorch.is_batchedtensor(x)
        axis = functorch.maybe_get_bdim(x) if batched else None
        layers = ((functorch.maybe_get_level(x), axis), *layers)
        x = functorch.get_unwrapped(x)
    return layers


def _taken(layers: Layers) -> tuple[tuple[int, int], ...]:
    """List levels of ``vmap``, and the axes that they have taken away."""
    return tuple((level, axis) for level, axis in layers if axis is not None)


class _Instead(_SingleLevelFunction):
    """A tensor that takes another's place at one level, which differentiates by it."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, x: Callable[[], Tensor]) -> Tensor:
        return x()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent


def _instead(x: Tensor, wrapped: Tensor) -> Tensor:
    """Wrap a stand-in as what it stands for is, which levels may differentiate by."""
    if not functorch.is_functorch_wrapped_tensor(wrapped):
        return x
    level = functorch.maybe_get_level(wrapped)
    x = _instead(x, functorch.get_unwrapped(wrapped))
    if functorch.is_batchedtensor(wrapped):
        return functorch._add_batch_dim(x, functorch.maybe_get_bdim(wrapped), level)
    with enable_single_level_autograd_function():
        return _Instead.apply(wrapped, lambda: functorch._wrap_for_grad(x, level))


def _wrap(x: Any, layers: Layers | Sequence[tuple[int, int]]) -> Any:
    for level, axis in layers:
        if axis is None:
            x = functorch._wrap_for_grad(x, level)
        else:
            x = functorch._add_batch_dim(x, axis, level)
    return x
