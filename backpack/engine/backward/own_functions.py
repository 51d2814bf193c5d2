"""Watches what functions of one's own do when they are differentiated.

Their forward pass may tell samples apart where their `backward` does not; and it may
run a backward pass of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import compress
from typing import Any, Iterator, Sequence

from torch import Tensor, is_grad_enabled
from torch._C import _current_graph_task_id
from torch.autograd.graph import Node

from backpack.core.layout import Mixed, conflict, sample_numbers
from backpack.engine.forward.tracking import Tracker
from backpack.engine.nodes.constants import edge_of
from backpack.engine.nodes.graph import describe, is_leaf, name_of, parents
from backpack.engine.nodes.met import refuse
from backpack.engine.nodes.vjp import is_function, is_users
from backpack.engine.samples.gaps import KNOWN, explain_place
from backpack.engine.samples.marks import MARK, placement_of
from backpack.engine.samples.probes import Known, Source
from backpack.engine.samples.repeated import (
    RAN,
    naming_once,
    once_more,
    put_back,
    replace,
)
from backpack.utils.hooks import EXTENDED, names_of
from backpack.utils.parallel import is_parallel
from backpack.utils.state import is_batched, out_of_sight, state

INNER_PASS = (
    "{ext}: `{function}` runs a backward pass of its own inside of this one, where "
    "nobody sees what {names} contributes. Let its `backward` return the gradients of "
    "what it was given, or repeat that part of the model by `checkpoint(..., "
    "use_reentrant=False)`."
)


class OwnFunctions:
    """Watches functions of one's own in a backward pass.

    Refused are backward passes inside of this one that reach parameters. It has an end,
    so that what accumulates gradients meanwhile, in another pass, belongs to it. Where
    samples have to be separate, the operations of a `backward` are followed, too.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        extensions: Sequence[Any],
        separating: Sequence[Any],
    ):
        """Watch functions and parameters; does nothing where there is no function.

        Args:
            nodes: Nodes of the graph.
            extensions: Extensions that are active.
            separating: Those of them that separate samples.
        """
        self._who, self._separating = extensions, separating
        self._running, self._state = ("", -1), state()
        self._functions = [x for x in nodes if extensions and is_function(x)]
        self._operands: dict[Node, list[Source]] = {}
        self._followed: set[Node] = set()
        for node in self._functions:
            if separating and KNOWN in node.metadata and is_users(node):
                self._operands[node] = list(_operands_of(node))
        for node in self._functions:
            replace(node, partial(self._apply, node))
        roots = list(EXTENDED) if self._functions else []
        self._handles, self._nodes = [], []  # which a parameter does not keep
        for param in {p for root in roots for p in root.parameters()}:
            if param.requires_grad:
                node = edge_of(param).node
                self._nodes.append(node)
                self._handles.append(node.register_prehook(partial(self._see, param)))

    def _apply(self, node: Any, *gradients: Any) -> Any:
        """Run the `backward` of a function."""
        repeats = state().pulling and is_users(node)
        if repeats and not any(isinstance(x, Tensor) for x in gradients):
            return (None,) * len(node.needs_input_grad)  # a way that is not asked for
        outer = self._running
        self._running = name_of(node).strip("`"), _current_graph_task_id()
        known = repeats and node in self._followed  # for each sample, it is the same
        once = once_more(node, gradients) if repeats else nullcontext(gradients)
        try:
            with naming_once(node), once as g:
                if node in self._operands and not (known or is_grad_enabled()):
                    return self._follow(node, g)
                return type(node).apply(node, *g)
        finally:
            self._running = outer

    def _follow(self, node: Any, gradients: Sequence[Any]) -> Any:
        """Run it, and refuse one in which samples meet."""
        known = node.metadata[KNOWN]
        given = [(x, known[i].placement) for i, x in enumerate(gradients) if i in known]
        given = [pair for pair in given if isinstance(pair[0], Tensor)]
        if not given or any(p is None or isinstance(p, Mixed) for _, p in given):
            return type(node).apply(node, *gradients)
        tracker = _Follower(next(iter(known.values())).n, given, keeps_met=True)
        with tracker:
            results = type(node).apply(node, *gradients)
        if not any(is_batched(x) for x, _ in given):
            self._followed.add(node)
        found = results if isinstance(results, tuple) else (results,)
        pairs = zip(compress(found, node.needs_input_grad), self._operands[node])
        if any(_have_met(tracker, x, operand) for x, operand in pairs):
            met = Mixed(f"the backward pass of {name_of(node)}")
            refuse(names_of(self._separating), met, "any parameter")
        for x in found:
            if isinstance(x, Tensor):  # gradients that users read know nothing of it
                vars(x).pop(MARK, None)
        return results

    def _see(self, param: Tensor, *_: Any) -> None:
        function, task = self._running
        inside = task != _current_graph_task_id() and state() is self._state
        if function and inside:  # and not in another thread
            text = {"ext": names_of(self._who), "function": function}
            raise NotImplementedError(
                INNER_PASS.format(names=describe([param]), **text)
            )

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        for node in self._functions:
            put_back(node)
            node.metadata.pop(RAN, None)
        self._functions.clear()
        self._followed.clear()


class _Follower(Tracker):
    """Follows gradients; what was saved is given, whichever graph it is a part of."""

    def _explained(self, x: Tensor) -> None:
        self.place(x, None)


def _operands_of(node: Node) -> Iterator[Source]:
    """List where the operands of a function sit that need a gradient."""
    for edge in parents(node):
        # a graph with parameters that were given away is not to be run
        unknown = is_leaf(edge.node) or is_parallel()
        known = None if unknown else explain_place(edge)
        yield Source(edge, known or Known(None, 0))


@out_of_sight
def _have_met(tracker: Tracker, x: Any, operand: Source) -> bool:
    """Tell whether a gradient has samples where the operand has others."""
    own, (placement, n) = placement_of(x, tracker.key), operand.known
    if own is None or placement is None or n != tracker.n or x.shape != operand.shape:
        return False
    if isinstance(own, Mixed) or isinstance(placement, Mixed):
        return isinstance(own, Mixed)
    numbers = [sample_numbers(p, x.shape, n, x.device) for p in (own, placement)]
    return conflict(*numbers)
