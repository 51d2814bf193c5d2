"""Columns of the loss Hessian's factor, pulled back through the model's own graph."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Set, Tuple
from warnings import warn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from backpack.context import State
from backpack.core.fast.memory import huge_empty
from backpack.core.per_sample.base import PerSample, merge_all
from backpack.extensions.layers import find_loss
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.turn import Cotangents, Products, Turn, mode_of
from backpack.graph import Target, targets_below, will_run
from backpack.utils.hooks import without_hooks

if TYPE_CHECKING:
    from backpack.capture import Call

# Columns that are pulled back at a time. Memory does not grow with the number of
# columns beyond it.
MAX_COLUMNS = 10

OTHER_SAMPLES = (
    "{ext}: axis 0 of the input of {loss} has size {loss_size}, but size {size} at the "
    "output of {module}, so what the loss takes for samples are none in this layer. "
    "Keep the samples on axis 0: for instance, use CrossEntropyLoss on [N, C, T] "
    "(`logits.transpose(1, 2)`) instead of flattening [N, T, C] to [N * T, C]."
)

BACKWARD_HOOKS = (
    "{ext}: {module} has a backward hook, which runs for each of the columns that are "
    "pulled back from the loss, too, and sees them instead of gradients. Hooks of "
    "tensors don't: use `tensor.register_hook` on the module's input or output, or "
    "remove the hook before the forward pass."
)

Member = Tuple["Call", str]  # a call, and the name of a parameter in its module


class PullBack:
    """What the losses of a backward pass have pulled back to the calls before.

    A layer's result is formed when its turn comes, from stored columns. They are
    reduced at once, chunk by chunk, where there are too many of them to be stored, and
    where a parameter takes part in several calls, whose products must be added up
    before they are squared.
    """

    def __init__(self, current: State):
        """Start with nothing.

        Args:
            current: What is active.
        """
        self._state = current
        # sums over columns, to be finished when the call's turn comes
        self._statistics: Dict[Tuple[ColumnExtension, Call, str], Tensor] = {}
        # values of parameters that take part in several calls
        self._values: Dict[Tuple[ColumnExtension, Parameter], Any] = {}
        # which of the columns that are stored at the call are still to be reduced
        self._stored: Dict[Tuple[ColumnExtension, Call, str], List[int]] = {}
        self._covered: Set[Tuple[ColumnExtension, Parameter]] = set()
        # number of columns that went from module to module, of all losses so far
        self._walking: Dict[ColumnExtension, int] = {}

    def start(
        self,
        turn: Turn,
        source: Source,
        extensions: List[ColumnExtension],
    ) -> None:
        """Pull the columns of one source back from a loss, and store or reduce them.

        Args:
            turn: The loss's turn.
            source: Where the columns come from.
            extensions: Extensions that use them.
        """
        loss, edge = turn.call, turn.call.input_edges[0]
        if edge is None:
            return
        reached = targets_below([edge.node])
        targets = [t for t in reached if will_run(t.node)]
        owners: Dict[Parameter, List[Member]] = {}
        for call in dict.fromkeys(target.entry.call for target in targets):
            for name, param in turn.backward_pass.parameters(call):
                owners.setdefault(param, []).append((call, name))
        needed: Dict[Call, List[str]] = {}
        for call, name in chain.from_iterable(owners.values()):
            needed.setdefault(call, []).append(name)
        targets = [target for target in targets if target.entry.call in needed]
        if not targets:
            return
        _check_samples(loss, needed, extensions[0])

        derivatives = find_loss(loss.module).derivatives
        columns = source.chunks(derivatives, loss.module, MAX_COLUMNS)
        first = next(columns)
        many = len(first) == MAX_COLUMNS
        at_once: Dict[Parameter, Dict[ColumnExtension, Optional[Tensor]]] = {}
        keep: Dict[Call, List[Tuple[ColumnExtension, str]]] = {}
        for param, members in owners.items():
            call, name = members[0]
            for ext in extensions:
                self._covered.add((ext, param))
                custom = [c for c, _ in members if ext.is_customized(c.module)]
                if custom:  # a user's rule reads the columns that are stored
                    if len(custom) < len(members):
                        turn.refuse_several_calls(ext, call.module)
                    for other in custom:
                        keep.setdefault(other, [])
                elif many and ext.additive or len(members) > 1:
                    at_once.setdefault(param, {})[ext] = None
                else:
                    keep.setdefault(call, []).append((ext, name))

        calls = [loss, *(target.entry.call for target in reached)]
        _warn_of_hooks(calls, extensions[0])
        tensors = [x for call in calls for x in call.tensors()]
        scale, sources = turn.loss_scale(), {ext.source for ext in extensions}
        last: Dict[Parameter, PerSample] = {}
        for chunk in chain([first], columns):
            with without_hooks(tensors):
                pulled = self._pull_chunk(edge, targets, chunk * scale)
            for call, waiting in keep.items():
                new = append_columns(call, sources, pulled[call], len(chunk))
                for ext, name in waiting:
                    self._stored.setdefault((ext, call, name), []).extend(new)
            for param, product in _products(pulled, needed, owners, at_once):
                for ext, total in at_once[param].items():
                    ext.check(*owners[param][0], product)
                    part = ext.statistic(product)
                    at_once[param][ext] = (
                        part if total is None else ext.combine(total, part)
                    )
                if len(owners[param]) > 1:
                    last[param] = product
        for param, statistics in at_once.items():
            for ext, total in statistics.items():
                if param in last:
                    value = ext.finish(last[param], total)
                    _add(self._values, (ext, param), value, ext.add)
                else:
                    key = (ext, *owners[param][0])
                    _add(self._statistics, key, total, ext.combine)

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
        stacks = [_Stack(len(columns)) for _ in targets]
        self._state.pulling = True
        try:
            for column in columns.unbind():
                pulled = torch.autograd.grad(
                    edge,
                    edges,
                    column,
                    retain_graph=True,
                    create_graph=torch.is_grad_enabled(),
                    allow_unused=True,
                )
                for stack, target, part in zip(stacks, targets, pulled):
                    stack.put(target.entry.in_shape(part))
        finally:
            self._state.pulling = False
        result: Dict[Call, Cotangents] = {}
        for stack, target in zip(stacks, targets):
            call = target.entry.call
            outputs = result.setdefault(call, [None] * call.num_outputs)
            outputs[target.entry.index] = stack.columns()
        for call, outputs in result.items():
            if not any(x is not None for x in outputs):  # it leads to unused outputs
                shape = (len(columns), *call.output_shapes[0])
                outputs[0] = call.outputs[0].new_zeros(shape)
        return result

    def behind(self, ext: ColumnExtension, columns: Tensor) -> Tensor:
        """Put a loss's columns behind those of the losses before, which are zero here.

        Args:
            ext: An extension whose columns go from module to module.
            columns: Columns ``[V, N, *]`` at the loss input.

        Returns:
            Columns ``[W + V, N, *]``, where W belong to other losses.
        """
        before = self._walking.get(ext, 0)
        self._walking[ext] = before + len(columns)
        if before == 0:
            return columns
        return torch.cat([columns.new_zeros(before, *columns.shape[1:]), columns])

    def value(self, ext: ColumnExtension, turn: Turn, name: str) -> Any:
        """Compute an extension's value for a parameter.

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
        key = (ext, call, name)
        statistic, stored = self._statistics.pop(key, None), self._stored.get(key)
        if stored is not None:
            product = turn.column_products(ext.source, name, tuple(stored))
            ext.check(call, name, product)
            if statistic is None:
                value = ext.reduce(product)
            else:  # one loss's columns were reduced at once, the other's were stored
                statistic = ext.combine(statistic, ext.statistic(product))
                value = ext.finish(product, statistic)
            _add(self._values, (ext, param), value, ext.add)
        elif statistic is not None:
            value = ext.finish(turn.own_gradients(name), statistic)
            _add(self._values, (ext, param), value, ext.add)
        if turn.backward_pass.is_shared(param, call):
            return self._values.get((ext, param))
        return self._values.pop((ext, param), None)


def _products(
    pulled: Dict[Call, Cotangents],
    needed: Dict[Call, List[str]],
    owners: Dict[Parameter, List[Member]],
    at_once: Dict[Parameter, Any],
) -> Iterator[Tuple[Parameter, PerSample]]:
    """Form the products of those parameters that are reduced at once, call by call."""
    parts: Dict[Parameter, List[PerSample]] = {}
    for call, names in needed.items():
        formed = Products(call, pulled[call], names)
        for name in names:
            param = call.parameters[name]
            if param in at_once:
                with mode_of(call):  # it is not its turn
                    parts.setdefault(param, []).append(formed[name])
                if len(parts[param]) == len(owners[param]):
                    yield param, merge_all(parts.pop(param))


def _add(totals: Dict, key: Tuple, part: Any, combine: Any) -> None:
    totals[key] = combine(totals[key], part) if key in totals else part


class _Stack:
    """Columns at one output, as they come.

    Each is copied while it is in the processor's caches, and its memory is free for the
    next one. Those that autograd found no path for are zero.
    """

    def __init__(self, size: int):
        self._size = size
        self._parts: List[Optional[Tensor]] = []
        self._out: Optional[Tensor] = None

    def put(self, column: Optional[Tensor]) -> None:
        """Put the next column."""
        if column is not None and self._size > 1 and not torch.is_grad_enabled():
            if self._out is None:
                shape = (self._size, *column.shape)
                self._out = huge_empty(shape, column.dtype, column.device)
            column = self._out[len(self._parts)].copy_(column)
        self._parts.append(column)

    def columns(self) -> Optional[Tensor]:
        """Return all columns ``[V, *]``, ``None`` if there is no path at all."""
        known = next((x for x in self._parts if x is not None), None)
        if known is None:
            return None
        if self._size == 1:
            return known.unsqueeze(0)
        if self._out is None:
            zero = torch.zeros_like(known)
            return torch.stack([zero if x is None else x for x in self._parts])
        for row, part in zip(self._out, self._parts):
            if part is None:
                row.zero_()
        return self._out


def append_columns(
    call: Call, sources: Set[Source], columns: Cotangents, number: int
) -> range:
    """Store columns at a call's outputs, behind those that are there already.

    Args:
        call: The call.
        sources: Where the columns come from.
        columns: Columns ``[V, *]`` at each output; ``None`` where there is no path.
        number: V.

    Returns:
        Their places among all columns.
    """
    before = 0
    for source in sources:
        stored = call.columns.setdefault(source, [None] * call.num_outputs)
        if all(b is None for b in columns):
            number = 0
        before = next((len(a) for a in stored if a is not None), 0)
        both = zip(stored, columns)
        call.columns[source] = [_append(a, before, b, number) for a, b in both]
    return range(before, before + number)


def _append(
    a: Optional[Tensor], before: int, b: Optional[Tensor], number: int
) -> Optional[Tensor]:
    """Put columns behind others; those that are ``None`` are zero."""
    if b is None:
        return None if a is None else torch.cat([a, a.new_zeros(number, *a.shape[1:])])
    if a is None and before > 0:
        a = b.new_zeros(before, *b.shape[1:])
    return b if a is None else torch.cat([a, b])


def _warn_of_hooks(calls: List[Call], ext: Any) -> None:
    """Warn of modules' backward hooks, which are part of the graph.

    Args:
        calls: Calls in the part of the graph that columns go through.
        ext: An extension that uses them.
    """
    for call in calls:
        if call.module._backward_hooks or call.module._backward_pre_hooks:
            text = BACKWARD_HOOKS.format(ext=type(ext).__name__, module=call.module)
            warn(text, stacklevel=2)
            return


def _check_samples(loss: Call, calls: Dict[Call, List[str]], ext: Any) -> None:
    """Check that the loss and all calls agree on what the samples are.

    Args:
        loss: Call of the loss.
        calls: Calls that columns are pulled back to.
        ext: An extension that uses them.

    Raises:
        NotImplementedError: If they do not.
    """
    loss_size = loss.inputs[0].shape[0] if loss.inputs[0].dim() else 1
    for call in calls:
        call.check_live()
        if call.batch_size != loss_size:
            raise NotImplementedError(
                OTHER_SAMPLES.format(
                    ext=type(ext).__name__,
                    loss=loss.module,
                    loss_size=loss_size,
                    size=call.batch_size,
                    module=call.module,
                )
            )
