"""A backward pass inside a context: calls have their turn, columns are pulled back."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple
from warnings import warn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from backpack.capture import Call, Entry, calls_at
from backpack.context import State, state
from backpack.core.reductions import PerSample, merge_all
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.layers import find_loss
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.turn import Cotangents, Turn, products
from backpack.utils.hooks import no_op

# Columns that are pulled back at a time. Memory does not grow with the number of
# columns beyond it.
MAX_COLUMNS = 10

RELEASED = (
    "The inputs and outputs of {module} were dropped after an earlier backward pass. "
    "Use `with backpack(..., retain_graph=True)` for all but the last backward pass "
    "through the same graph (also where the earlier one ran outside of any context)."
)
MODIFIED_LOSS = (
    "The loss was modified after {module}: the gradient at its output is {factor}, not "
    "1. Second-order quantities contain this factor."
)


class BackwardPass:
    """What a backward pass has to remember from turn to turn.

    Attributes:
        shared_products: Sum of the individual gradients of the calls that had their
            turn, for parameters that other calls may contribute to.
        saved: Which extension has saved a value on which parameter, by identity.
        loss_factors: Gradients at the outputs of the losses that were met.
        walked: Extensions that have passed quantities from module to module.
    """

    def __init__(self, current: State):
        """Begin.

        Args:
            current: What is active.
        """
        self.state = current
        self.shared_products: Dict[Parameter, PerSample] = {}
        self.saved: Set[Tuple[int, int]] = set()
        self.loss_factors: List[float] = []
        self.walked: Set[BackpropExtension] = set()
        self._statistics: Dict[Tuple[ColumnExtension, Call, str], Tensor] = {}
        self._values: Dict[Tuple[ColumnExtension, Parameter], Any] = {}
        self._stored: Set[Tuple[ColumnExtension, Call, str]] = set()
        self._covered: Set[Tuple[ColumnExtension, Parameter]] = set()

    def finish(self) -> None:
        """End: forget what is left."""
        for ext in self.walked:
            ext.saved_quantities.clear()

    def take_turn(
        self, call: Call, g_out: Sequence[Optional[Tensor]], entries: List[Entry]
    ) -> None:
        """Run the extensions on a call.

        Args:
            call: The call.
            g_out: Gradients at its outputs.
            entries: Calls at the same node of the graph.

        Raises:
            RuntimeError: If inputs and output were dropped before.
        """
        current = self.state
        if call.released:
            raise RuntimeError(RELEASED.format(module=call.module))
        call.store(raw=True)
        module = call.module
        try:
            with Turn(call, self, g_out, entries) as turn:
                if call.is_loss:
                    self._meet_loss(turn)
                g_inp = tuple(None for _ in call.arguments)
                for ext in current.active_exts:
                    if current.debug:
                        print(f"[DEBUG] Running extension {ext} on {module}")
                    ext(module, g_inp, turn.g_out)
                if current.debug:
                    print(f"[DEBUG] Running extension hook on {module}")
                current.extension_hook(module)
        finally:
            call.columns = {}
            if keeps_io(current):
                call.store(raw=False)
            else:
                call.release()

    def parameters(self, call: Call) -> List[Tuple[str, Parameter]]:
        """List the parameters a call is responsible for, as far as they take part.

        Args:
            call: The call.

        Returns:
            Names in the module and parameters.
        """
        return [
            (name, param)
            for name, param in call.parameters.items()
            if param.requires_grad and (not call.is_composite or takes_part(param))
        ]

    # The GGN family

    def _meet_loss(self, turn: Turn) -> None:
        """Pull columns back from a loss to everything it was computed from."""
        second_order = [
            ext
            for ext in self.state.active_exts
            if ext.expects_backpropagation_quantities()
        ]
        if not second_order:
            return
        call, (g_out, *_) = turn.call, turn.g_out
        if call.outputs[0].numel() != 1 or getattr(call.module, "reduction", "") == (
            "none"
        ):
            raise ValueError(
                f"{type(second_order[0]).__name__} starts at a loss with a scalar "
                f"output, and {call.module} has an output of shape "
                f"{list(call.outputs[0].shape)}. Use reduction='mean' or 'sum'."
            )
        factor = float(g_out)
        self.loss_factors.append(factor)
        if factor != 1.0:
            text = MODIFIED_LOSS.format(module=call.module, factor=factor)
            warn(text, stacklevel=2)

        by_source: Dict[Source, List[ColumnExtension]] = {}
        share_all_columns = any(
            isinstance(ext, ColumnExtension) and ext.source == Source("exact")
            for ext in second_order
        )
        for ext in second_order:
            if isinstance(ext, ColumnExtension) and not ext.walks_modules:
                source = ext.source
                if share_all_columns and source.compact:
                    source = replace(source, compact=False)
                by_source.setdefault(source, []).append(ext)
        for source, extensions in by_source.items():
            self._pull_back(call, source, extensions, turn.loss_scale())

    def _pull_back(
        self, loss: Call, source: Source, extensions: List[ColumnExtension], scale: Tensor
    ) -> None:
        """Pull the columns of one source back, and store or reduce them.

        A layer's result is formed when its turn comes, from stored columns. They are
        reduced at once, chunk by chunk, where there are too many of them to be stored,
        and where a parameter takes part in several calls, whose products must be added
        up before they are squared.

        Args:
            loss: Call of the loss.
            source: Where the columns come from.
            extensions: Extensions that use them.
            scale: Factor for the columns.
        """
        edge = loss.input_edges[0]
        if edge is None:
            return
        targets = [t for t in reachable(edge) if will_run(t.node)]
        owners: Dict[Parameter, List[Tuple[Call, str]]] = {}
        for call in {target.entry.call: None for target in targets}:
            for name, param in self.parameters(call):
                owners.setdefault(param, []).append((call, name))
        needed = {call for members in owners.values() for call, _ in members}
        targets = [target for target in targets if target.entry.call in needed]
        if not targets:
            return

        module = loss.module
        columns = source.columns(find_loss(module).derivatives, module) * scale
        many = len(columns) > MAX_COLUMNS
        chunks = columns.split(MAX_COLUMNS)
        at_once: Dict[Parameter, Dict[ColumnExtension, Any]] = {}
        keep: Set[Call] = set()
        for param, members in owners.items():
            (call, name), single = members[0], len(members) == 1
            for ext in extensions:
                self._covered.add((ext, param))
                chunked = many and ext.additive and not ext.is_customized(call.module)
                if chunked or not single:
                    at_once.setdefault(param, {})[ext] = None
                else:
                    self._stored.add((ext, call, name))
                    keep.add(call)

        for chunk in chunks:
            pulled = self._pull_chunk(edge, targets, chunk)
            for call in keep:
                append_columns(call, {ext.source for ext in extensions}, pulled[call])
            for param, statistics in at_once.items():
                members = owners[param]
                product = merge_all([products(c, n, pulled[c]) for c, n in members])
                for ext, so_far in statistics.items():
                    ext.check(*members[0], product)
                    part = ext.statistic(product)
                    total = part if so_far is None else ext.combine(so_far, part)
                    statistics[ext] = total
                if len(members) > 1 and chunk is chunks[-1]:
                    for ext, total in statistics.items():
                        self._add_value(ext, param, ext.finish(product, total))
        for param, statistics in at_once.items():
            if len(owners[param]) == 1:
                (member,) = owners[param]
                for ext, total in statistics.items():
                    self._add_statistic(ext, *member, total)

    def _pull_chunk(
        self, edge: GradientEdge, targets: List[Target], columns: Tensor
    ) -> Dict[Call, Cotangents]:
        """Let autograd pull columns back to the outputs of calls.

        Column by column: on a CPU that is faster than a batched backward pass.

        Args:
            edge: Where the loss input sits in the graph.
            targets: Calls and where their outputs sit in the graph.
            columns: Columns ``[V, N, *]`` at the loss input.

        Returns:
            Columns ``[V, *out]`` at each output of the calls.
        """
        edges = [GradientEdge(t.node, t.entry.output_nr) for t in targets]
        self.state.pulling = True
        try:
            pulled = [
                torch.autograd.grad(
                    edge,
                    edges,
                    column,
                    retain_graph=True,
                    create_graph=torch.is_grad_enabled(),
                    allow_unused=True,
                )
                for column in columns
            ]
        finally:
            self.state.pulling = False
        result: Dict[Call, Cotangents] = {}
        for target, column_list in zip(targets, zip(*pulled)):
            _, index, call = target.entry
            outputs = result.setdefault(call, [None] * call.num_outputs)
            known = next((x for x in column_list if x is not None), None)
            if known is not None:
                zero = torch.zeros_like(known)
                outputs[index] = torch.stack(
                    [zero if x is None else x for x in column_list]
                )
        return result

    def _add_value(self, ext: ColumnExtension, param: Parameter, value: Any) -> None:
        if (ext, param) in self._values:
            value = ext.add(self._values[ext, param], value)
        self._values[ext, param] = value

    def _add_statistic(
        self, ext: ColumnExtension, call: Call, name: str, statistic: Tensor
    ) -> None:
        key = (ext, call, name)
        if key in self._statistics:
            statistic = ext.combine(self._statistics[key], statistic)
        self._statistics[key] = statistic

    def columns_value(self, ext: ColumnExtension, turn: Turn, name: str) -> Any:
        """Compute an extension's value for a parameter from what was pulled back.

        Args:
            ext: The extension.
            turn: The turn of a call that is responsible for the parameter.
            name: Name of the parameter in the module.

        Returns:
            The value, ``None`` if another call has contributed everything.
        """
        call, param = turn.call, turn.call.parameters[name]
        if (ext, param) not in self._covered:
            turn.incoming(ext)  # explains what is missing
        statistic = self._statistics.pop((ext, call, name), None)
        if statistic is not None:
            self._add_value(ext, param, ext.finish(turn.own_gradients(name), statistic))
        if (ext, call, name) in self._stored:
            product = turn.column_products(ext.source, name)
            ext.check(call, name, product)
            self._add_value(ext, param, ext.reduce(product))
        if call.shares(param):
            return self._values.get((ext, param))
        return self._values.pop((ext, param), None)


class Target(NamedTuple):
    """An output of a call, and the node of the graph that produced it."""

    entry: Entry
    node: Node


def reachable(edge: GradientEdge) -> List[Target]:
    """Find the calls that a tensor was computed from.

    Args:
        edge: Where the tensor sits in the graph.

    Returns:
        The calls' outputs.
    """
    targets, seen, queue = [], {edge.node}, [edge.node]
    while queue:
        node = queue.pop()
        targets.extend(Target(entry, node) for entry in calls_at(node))
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return targets


def append_columns(call: Call, sources: Set[Source], columns: Cotangents) -> None:
    """Store columns at a call's outputs, behind those that are there already.

    Args:
        call: The call.
        sources: Where the columns come from.
        columns: Columns ``[V, *]`` at each output.
    """
    for source in sources:
        stored = call.columns.get(source, [None] * call.num_outputs)
        both = zip(stored, columns)
        call.columns[source] = [
            a if b is None else b if a is None else torch.cat([a, b]) for a, b in both
        ]


def will_run(node: Node) -> bool:
    """Tell whether the backward pass that is running includes a node.

    Args:
        node: Node of the graph.

    Returns:
        Whether it does. A leaf whose gradient ``torch.autograd.grad`` returns does.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


def takes_part(param: Parameter) -> bool:
    """Tell whether the backward pass that is running reaches a parameter.

    Args:
        param: The parameter.

    Returns:
        Whether it does.
    """
    return will_run(get_gradient_edge(param).node)


def keeps_io(current: State) -> bool:
    """Tell whether inputs and outputs are kept after a backward pass.

    Args:
        current: What is active.

    Returns:
        Whether they are.
    """
    return current.retain_graph or any(ext.keeps_io for ext in current.active_exts)


@contextmanager
def backward_pass(current: State) -> Iterator[BackwardPass]:
    """Remember things from turn to turn inside the context, and forget them after.

    Args:
        current: What is active.

    Yields:
        The backward pass.
    """
    outer, current.backward_pass = current.backward_pass, BackwardPass(current)
    try:
        yield current.backward_pass
    finally:
        current.backward_pass.finish()
        current.backward_pass = outer


def visit(
    call: Call, g_out: Sequence[Optional[Tensor]], entries: List[Entry]
) -> None:
    """Let a call have its turn, now that the gradients at its outputs are known.

    Args:
        call: The call.
        g_out: Gradients at its outputs.
        entries: Calls at the same node of the graph.
    """
    current = state()
    if current.pulling:
        return
    if not current.active_exts and current.extension_hook is no_op:
        call.release()
        return
    if current.backward_pass is None:
        _begin_unannounced(current)
    if any(g is not None for g in g_out):
        current.backward_pass.take_turn(call, g_out, entries)


def _begin_unannounced(current: State) -> None:
    """Begin a backward pass that did not go through PyTorch's Python interface."""
    running = current.backward_pass = BackwardPass(current)

    def end() -> None:
        running.finish()
        if current.backward_pass is running:
            current.backward_pass = None

    torch.autograd.Variable._execution_engine.queue_callback(end)
