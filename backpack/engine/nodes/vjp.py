"""Vector-Jacobian products of a part of the graph, for several vectors at once."""

from contextlib import contextmanager
from functools import partial
from operator import mul
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack.engine.nodes.saved import InsteadOfSaved
from backpack.utils.errors import without_performance_warnings
from backpack.utils.state import may_look, state
from backpack.utils.types import dense

NOT_LINEAR = (
    "The backward of {function} does not return multiples for multiples of a gradient, "
    "or sums for sums (it clips them, takes their sign or keeps the largest), so that "
    "{what}. Do this to the gradient of the batch, after the backward pass."
)
NO_SUM = "gradients of individual samples do not add up to that of {names}"
_TRUSTED = ("torch.", "backpack.")
OF_OPERATION = "GeneratedBackwardFor"  # what PyTorch makes of a user's `custom_op`
# Keeps the graph; `None` where there is no path
pull = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)


@contextmanager
def only_through(node: Optional[Node]) -> Iterator[None]:
    """Let gradients reach what a node takes, and go no further from there.

    Args:
        node: The node, ``None`` to let them go anywhere.

    Yields:
        Nothing.
    """
    hooks = [
        parent.register_prehook(partial(_drop, number))
        for parent, number in (() if node is None else node.next_functions)
        if parent is not None and parent.next_functions
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drop(number: int, gradients: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Let a gradient go no further."""
    return tuple(None if i == number else g for i, g in enumerate(gradients))


def batched_vjp(
    outputs: Sequence[GradientEdge],
    inputs: Sequence[GradientEdge],
    cotangents: Sequence[Tensor],
) -> List[Optional[Tensor]]:
    """Multiply cotangents with a transposed Jacobian, all at once where it is possible.

    Args:
        outputs: Where the outputs sit in the graph.
        inputs: Where the inputs do.
        cotangents: Columns ``[V, n, *out]`` at each output.

    Returns:
        Columns ``[V, n, *in]`` at each input, ``None`` where there is no path.
    """
    sizes = cotangents[0].shape[:2]
    flat = [x.flatten(0, 1) for x in cotangents]
    number = len(flat[0])
    if not number:  # of no samples: PyTorch pulls back one column at least
        flat = [x.new_zeros(1, *x.shape[1:]) for x in flat]
    pull_back = partial(pull, outputs, inputs, create_graph=torch.is_grad_enabled())
    with state().pull():
        if len(flat[0]) == 1:
            rows = pull_back([_by_itself(x[0]) for x in flat])
            found = [None if x is None else dense(x)[None][:number] for x in rows]
        else:
            try:
                found = list(pull_back(flat, is_grads_batched=True))
            except RuntimeError:  # not every operation can be vmapped
                found = _vmapped(pull_back, flat)
    return [None if x is None else dense(x).unflatten(0, tuple(sizes)) for x in found]


def pulled_apart(
    pull_back: Callable[[Sequence[Tensor]], List[Optional[Tensor]]],
    cotangents: Sequence[Tensor],
) -> List[Optional[Tensor]]:
    """Multiply cotangents of single samples, whose zeros leave out the other samples.

    Zero times what is not finite is NaN. A sample's own are no such products, and not
    the same if other finite numbers are in place of these.

    Args:
        pull_back: Multiplies with a transposed Jacobian.
        cotangents: Columns ``[V, n, *out]`` at each output.

    Returns:
        What it returns, in which what is not finite in a sample is in no other.
    """
    found = pull_back(cotangents)
    seen = [x for x in found if x is not None and may_look(x, waits=True)]
    if all(bool(x.sum().isfinite()) for x in seen):
        return found
    others = []
    for value in (0.0, 1.0):
        with InsteadOfSaved(partial(_finite, value=value)):
            others.append(pull_back(cotangents))
    triples = zip(found, *others)
    return [x if x is None else y.where(y == z, x) for x, y, z in triples]


def _finite(x: Tensor, value: float) -> Tensor:
    """Write a number where there is none."""
    return x.where(x.isfinite(), value) if x.layout is torch.strided else x


def is_function(node: Optional[Node]) -> bool:
    """Tell whether a node is that of a function of one's own.

    Args:
        node: The node, if there is one.

    Returns:
        Whether it is.
    """
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_users(node: Node) -> bool:
    """Tell whether a node is that of a function of a user, whose backward may be any.

    Args:
        node: The node.

    Returns:
        Whether it is.
    """
    if not is_function(node):
        return False
    own = getattr(node, "_forward_cls", type(node))
    named = own.__name__.startswith(OF_OPERATION)
    return named or not own.__module__.startswith(_TRUSTED)


def operation_of(node: Node) -> str:
    """Tell which operation of PyTorch, or of ours, a node is of.

    Args:
        node: The node.

    Returns:
        What its class is called, less ``"Backward0"``; empty for a function of a user,
        which may be called like one of these.
    """
    return "" if is_users(node) else type(node).__name__.split("Backward")[0]


def is_compiled(node: Node) -> bool:
    """Tell whether a node is that of a piece that was compiled, functions and all.

    Args:
        node: The node.

    Returns:
        Whether it is.
    """
    return is_function(node) and type(node).__name__ == "CompiledFunctionBackward"


def may_be_any(node: Node) -> bool:
    """Tell whether what a user has written may be the backward of a node.

    Args:
        node: The node.

    Returns:
        Whether it may, or may be a part of it.
    """
    return is_users(node) or is_compiled(node)


def check_linear(
    columns: Sequence[Tensor],
    products: Sequence[Optional[Tensor]],
    pull_back: Callable[[List[Tensor]], Sequence[Optional[Tensor]]],
    function: str,
    what: str,
    nodes: Sequence[Node],
    scale: float = -(2.0**10),  # which changes no digit
) -> None:
    """Refuse a function of a user whose backward is not linear.

    Args:
        columns: What was pulled back through it, ``[V, n, *]``.
        products: What came out, ``[V, N, *]``.
        pull_back: Pulls a column back, ``[1, 1, *]``.
        function: Name of the function.
        what: What is not defined.
        nodes: Where it sits in the graph.
        scale: What columns are multiplied by. Default: a large negative number, with
            which what is clipped, or changed by its sign, is another one.

    Raises:
        NotImplementedError: If a combination of columns has another product than that
            of their products.
    """
    known = [x for x in (*columns, *products) if x is not None and x.numel()]
    if not all([may_look(x, waits=True) for x in known]):
        return
    totals = pull_back([_combine(x, scale) for x in columns])
    # what was compiled may compute in half precision
    allowed = 5e-2 if any(map(is_compiled, nodes)) else 1e-3
    # a derivative that is zero is the rounding errors of terms that cancel
    largest = max([float(x.abs().sum((0, 1)).max()) for x in known], default=0.0)
    for x, y in zip(products, totals):
        if x is None or y is None or not x.numel():
            continue
        size, error = _combine(x.abs(), abs(scale)), (_combine(x, scale) - y).abs()
        rounding = 1e3 * torch.finfo(x.dtype).eps * abs(scale) * len(x) * largest
        small = error <= 1e-2 * size + allowed * size.max() + rounding
        if not small.all() and (size + error).isfinite().all():
            raise NotImplementedError(NOT_LINEAR.format(function=function, what=what))


def _combine(x: Tensor, scale: float) -> Tensor:
    """Add up columns, each times another number, ``[1, 1, *]``."""
    factors = [scale * (v + 1) for v in range(len(x))]
    return sum(map(mul, factors, x.sum(1, keepdim=True)))[None]


def joined(
    parts: Sequence[Sequence[Optional[Tensor]]],
    axis: int = 0,
    sizes: Optional[Sequence[int]] = None,
) -> List[Optional[Tensor]]:
    """Put what was computed part by part together; where there is no path, it is zero.

    Args:
        parts: Tensors at the same places; ``None`` where there is no path.
        axis: Axis along which they are parts. Default: 0, of columns.
        sizes: Sizes of this axis. Default: those of the tensors.

    Returns:
        A tensor at each place, ``None`` if there is no path for any part.
    """
    if sizes is None:
        sizes = [next(x.shape[axis] for x in part if x is not None) for part in parts]
    found: List[Optional[Tensor]] = []
    for pieces in zip(*parts):
        known = next((x for x in pieces if x is not None), None)
        if known is not None and len(pieces) > 1:
            shapes = [(*known.shape[:axis], n, *known.shape[axis + 1 :]) for n in sizes]
            pairs = zip(pieces, shapes)
            filled = [known.new_zeros(shape) if x is None else x for x, shape in pairs]
            known = torch.cat(filled, axis)
        found.append(known)
    return found


def _by_itself(row: Tensor) -> Tensor:
    """Copy a row that is no view of complex numbers: it begins in the midst of one."""
    return row.clone() if row.storage_offset() % 2 else row


def _vmapped(pull_back: Callable, columns: Sequence[Tensor]) -> List[Optional[Tensor]]:
    """Pull columns back by `vmap`, which has rules that gradients in a batch lack."""
    reached: List[bool] = []

    def pull_one(*gradients: Tensor) -> List[Tensor]:
        found = pull_back(gradients)
        reached[:] = [x is not None for x in found]
        return [dense(x) for x in found if x is not None]

    try:
        with without_performance_warnings():
            rows = iter(torch.vmap(pull_one)(*columns))
    except (RuntimeError, ValueError):
        return _one_by_one(pull_back, columns)
    return [next(rows) if is_there else None for is_there in reached]


def _one_by_one(
    pull_back: Callable, columns: Sequence[Tensor]
) -> List[Optional[Tensor]]:
    rows = [pull_back(list(map(_by_itself, some))) for some in zip(*columns)]
    found: List[Optional[Tensor]] = []
    for parts in zip(*rows):
        known = next((x for x in parts if x is not None), None)
        if known is None:
            found.append(None)
            continue
        zero = torch.zeros_like(dense(known))
        found.append(torch.stack([zero if x is None else dense(x) for x in parts]))
    return found
