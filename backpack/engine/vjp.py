"""Vector-Jacobian products of a part of the graph, for several vectors at once."""

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack.utils.state import may_look, state
from backpack.utils.types import dense

NOT_LINEAR = (
    "The backward of {function} does not return multiples for multiples of a gradient, "
    "or sums for sums (it clips them, takes their sign or keeps the largest), so that "
    "{what}. Do this to the gradient of the batch, after the backward pass."
)
NO_SUM = "gradients of individual samples do not add up to that of {names}"
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
    pull_back = partial(pull, outputs, inputs, create_graph=torch.is_grad_enabled())
    with state().pull():
        if len(flat[0]) == 1:
            rows = pull_back([x[0] for x in flat])
            found = [None if x is None else dense(x).unsqueeze(0) for x in rows]
        else:
            try:
                found = list(pull_back(flat, is_grads_batched=True))
            except RuntimeError:  # not every operation can be vmapped
                found = _one_by_one(pull_back, flat)
    return [None if x is None else dense(x).unflatten(0, tuple(sizes)) for x in found]


def is_users(node: Node) -> bool:
    """Tell whether a node is that of a function of a user, whose backward may be any.

    Args:
        node: The node.

    Returns:
        Whether it is.
    """
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return own and not node._forward_cls.__module__.startswith("torch.")


def check_sums(
    products: Sequence[Optional[Tensor]],
    totals: Sequence[Optional[Tensor]],
    function: str,
    what: str,
) -> None:
    """Refuse a function of a user whose backward is not linear.

    Args:
        products: Products ``[V, N, *]`` of columns.
        totals: Those of the sum of all columns, ``[1, 1, *]``.
        function: Name of the function.
        what: What is not defined.

    Raises:
        NotImplementedError: If products do not sum to that of the sum.
    """
    for x, y in zip(products, totals):
        if x is None or y is None or not (x.numel() and may_look(x, waits=True)):
            continue
        size, error = x.abs().sum((0, 1)), (x.sum((0, 1)) - y[0, 0]).abs()
        small = error <= 1e-2 * size + 1e-3 * size.max()
        if not small.all() and size.isfinite().all():
            text = NOT_LINEAR.format(function=function, what=what)
            raise NotImplementedError(text)


def _one_by_one(
    pull_back: Callable, columns: Sequence[Tensor]
) -> List[Optional[Tensor]]:
    rows = [pull_back(some) for some in zip(*columns)]
    found: List[Optional[Tensor]] = []
    for parts in zip(*rows):
        known = next((x for x in parts if x is not None), None)
        if known is None:
            found.append(None)
            continue
        zero = torch.zeros_like(dense(known))
        found.append(torch.stack([zero if x is None else dense(x) for x in parts]))
    return found
