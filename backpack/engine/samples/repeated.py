"""Runs the `backward` of a function of one's own more often than autograd does.

It may do more than compute: draw random numbers, or add to a tensor that somebody keeps
(gradients accumulated in a fused way, statistics). Done once more, that would change
what the training step does.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.engine.nodes.graph import name_of
from backpack.engine.nodes.vjp import is_users
from backpack.engine.samples.other_numbers import states_for
from backpack.utils.state import is_traced
from backpack.utils.writes import Writes, tensors_behind

WRITES = (
    "The backward of {function} writes to a tensor that was there before "
    "({operation}), like a gradient that it adds to, statistics, or what it has saved. "
    "It is needed more than once, for samples or columns by themselves, and each time "
    "would do that again. Let it return new tensors, and do this in a hook of the "
    "parameter or of the function's output (`register_hook`), which runs once."
)
DRAWS = (
    "The backward of {function} draws random numbers. It is needed more than once, for "
    "samples or columns by themselves, which would have other numbers than the "
    "gradient. Draw them in its forward pass, and keep them (`ctx.save_for_backward`)."
)

ONCE = (
    "The backward of {function} has run, and can't run again ({error}). It is needed "
    "more than once, for samples or columns by themselves. Let it keep what it has "
    "kept: no attribute is to be deleted, and a graph of its own to be differentiated "
    "with `retain_graph=True`."
)
_FREED = "backward through the graph a second time"
RAN = "backpack.ran"  # where the node of a function keeps that its `backward` has


@contextmanager
def naming_once(node: Node) -> Iterator[None]:
    """Say which function's `backward` does not run more than once.

    Args:
        node: The function's node.

    Yields:
        Nothing.

    Raises:
        NotImplementedError: If it lacks something that was there the first time.
    """
    try:
        yield
    except (AttributeError, LookupError, RuntimeError) as error:
        gone = not isinstance(error, RuntimeError) or _FREED in str(error)
        if RAN not in node.metadata or not gone:
            raise
        said = f"{type(error).__name__}: {error}".split(" (")[0]
        text = ONCE.format(function=name_of(node), error=said)
        raise NotImplementedError(text) from error
    node.metadata[RAN] = True


@contextmanager
def once_more(
    node: Node, gradients: Sequence[Any], may_draw: bool = False
) -> Iterator[list[Any]]:
    """Let a function's `backward` do nothing but compute.

    Args:
        node: The function's node.
        gradients: The gradients that it is given.
        may_draw: Whether random numbers do not matter. Default: ``False``.

    Yields:
        Copies of these, which it may write to.

    Raises:
        NotImplementedError: If it writes to what it has not made, or draws numbers.
    """
    given = [x.clone() if isinstance(x, Tensor) else x for x in gradients]
    if is_traced() or _is_captured(given):  # it has run before, where it was seen
        yield given
        return
    function, states = name_of(node), states_for(given)
    writes, drawn = _Refused(function, given), []
    try:
        with writes:
            yield given
    finally:
        if writes.drew:
            drawn = [g for g, x in states.items() if not torch.equal(g.get_state(), x)]
        for generator in drawn:
            generator.set_state(states[generator])
    if drawn and not may_draw:
        raise NotImplementedError(DRAWS.format(function=function))


@contextmanager
def compute_only(nodes: Iterable[Node], may_draw: bool = False) -> Iterator[None]:
    """Let functions of users do nothing but compute.

    Args:
        nodes: Nodes of the graph.
        may_draw: Whether random numbers do not matter. Default: ``False``.

    Yields:
        Nothing.
    """
    functions = [x for x in nodes if is_users(x) and "apply" not in vars(x)]
    for node in functions:
        replace(node, partial(_apply, node, may_draw))
    try:
        yield
    finally:
        for node in functions:
            put_back(node)


def replace(node: Any, run: Callable) -> None:
    """Let autograd call something else than a function's `backward`.

    Args:
        node: The function's node.
        run: Takes the gradients.
    """
    node.apply = run  # which autograd looks for in the object first
    node.apply_boxed = lambda gradients: run(*gradients)  # with `boxed_grads_call`


def put_back(node: Any) -> None:
    """Let autograd call the `backward` again.

    Args:
        node: The function's node.
    """
    for name in ("apply", "apply_boxed"):
        vars(node).pop(name, None)


def _apply(node: Any, may_draw: bool, *gradients: Any) -> Any:
    with naming_once(node), once_more(node, gradients, may_draw) as given:
        return type(node).apply(node, *given)


class _Refused(Writes):
    """Refuses operations that write to memory that was there before.

    Attributes:
        drew: Whether operations may have drawn random numbers, as other threads may at
            any time.
    """

    drew = False

    def __init__(self, function: str, given: Any):
        """Begin with nothing of its own but what was given."""
        super().__init__(given)
        self._function = function

    def see(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:  # noqa: D102
        foreign = getattr(func, "namespace", None) not in ("aten", "prims", "prim")
        seeded = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.drew = self.drew or seeded or foreign

    def overwrite(self, x: Tensor, operation: str) -> None:  # noqa: D102
        text = {"function": self._function, "operation": f"`{operation}`"}
        raise NotImplementedError(WRITES.format(**text))


def _is_captured(values: Any) -> bool:
    """Tell whether a CUDA graph is recorded, in which generators have no state."""
    given = any(x.is_cuda for x in tensors_behind(values))
    return given and torch.cuda.is_current_stream_capturing()
