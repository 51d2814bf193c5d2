"""Columns of the loss Hessian's factor, pulled back through the model's own graph."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import chain
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Module
from torch.nn.modules.module import _global_forward_hooks

from backpack.core.layout import Mixed
from backpack.core.per_sample.base import PerSample
from backpack.engine.backward.columns import (
    Cotangents,
    GradientsOfLosses,
    Stack,
    check_first_argument,
    columns_of_loss,
    find_gateway,
    identity_columns,
)
from backpack.engine.backward.parameters import Group
from backpack.engine.backward.turn import EXTEND_LOSS, Turn, refuse_several_calls
from backpack.engine.nodes.graph import (
    Origin,
    Target,
    describe,
    names_at,
    targets_below,
    will_run,
)
from backpack.engine.nodes.met import refuse
from backpack.engine.nodes.uses import Use
from backpack.engine.nodes.vjp import check_linear, is_users, joined, may_be_any, pull
from backpack.utils.hooks import EXTENDED, message, name_module, without_hooks
from backpack.utils.parallel import gathered, is_parallel

NO_DERIVATIVE = "it is no derivative, which second-order quantities need"
NOT_ONE_OUTPUT = (
    "{ext} starts at the output of an extended model, and expects one in a "
    "backward pass. Found: {found}. Extend the model as a whole, let it return tensors "
    "of real numbers (`torch.view_as_real`), by themselves or in tuples, lists and "
    "dictionaries, differentiate a function of one of them, `output.sum().backward()`, "
    "and do so by PyTorch's functions."
)
HOOKED_OUTPUT = (
    "{ext}: {module} has a forward hook, which may change the output that the Jacobian "
    "is about, after it was seen. Remove the hook, or let a module of the model do "
    "what it does."
)
NOT_BEHIND = (
    "{ext}: the output of the extended model does not depend on {names}, which the "
    "backward pass uses elsewhere. Extend the model as a whole."
)

# Columns that are pulled back at a time. Memory does not grow with the number of
# columns beyond it.
MAX_COLUMNS = 10

Key = tuple[Any, Tensor]  # an extension and a parameter


class Ways(NamedTuple):
    """What columns reach that start at a loss or an output.

    Attributes:
        edge: Where they start.
        targets: Uses and calls that wait for them, and where their outputs sit.
        groups: Parameters.
        customized: Calls of modules for which a user has a rule.
        tensors: What users hold on the way, whose hooks are for gradients.
        own: Nodes whose backward somebody has written, and may not be linear.
    """

    edge: GradientEdge
    targets: list[Target]
    groups: list[Group]
    customized: set[Any]
    tensors: list[Tensor]
    own: list[Node]


class PullColumns:
    """What the losses of a backward pass have pulled back to uses.

    A parameter's result is formed when its turn comes, from stored columns. They are
    reduced at once, chunk by chunk, where there are too many of them to be stored, and
    where a parameter has several uses, whose products must be added up before they are
    squared.
    """

    def __init__(self, backward_pass: Any):
        """Start with nothing.

        Args:
            backward_pass: The backward pass that is running.
        """
        self._running = backward_pass
        # sums over columns, to be finished when the parameter's turn comes
        self._statistics: dict[Key, Any] = {}
        # values of parameters with several uses, and at which of them columns arrived
        self._values: dict[Key, Any] = {}
        self._arrived: dict[Key, Any] = {}
        # columns at uses that each extension waits for; none if they are carried there
        self._stored: dict[Use, dict[Any, list[Cotangents]]] = {}
        self._covered: set[tuple[Any, Group]] = set()
        # number of columns that went from module to module, of all losses so far
        self._walking: dict[Any, int] = {}
        self.of_losses = GradientsOfLosses()
        # what exchanges the gradient at the loss for a column
        self._exchanging: Any = None

    def meet(self, turn: Turn, extensions: list[Any]) -> None:
        """Pull the columns of a loss back for all extensions that use them.

        Args:
            turn: The loss's turn.
            extensions: Second-order extensions.
        """
        columns = [x for x in extensions if x.pulls_columns and not x.walks_modules]
        by_source: dict[Any, list[Any]] = {}
        share_all = any(not x.source.compact and x.source.is_exact for x in columns)
        for ext in columns:
            source = ext.source
            if share_all and source.compact:
                source = source.complete
            by_source.setdefault(source, []).append(ext)
        loss, edge = turn.call, next(iter(turn.call.input_edges), None)
        if edge is None:
            check_first_argument(loss, extensions[0])
            return
        if any(ext.walks_modules for ext in extensions):
            self.of_losses.meet(turn, self._running.inspection)
        for source, some in by_source.items():
            make: Callable[[int], Any] = partial(columns_of_loss, source, turn)
            if not source.is_exact:  # not to be drawn twice
                make = cache(partial(_listed, make))
            alone = len(by_source) == 1
            self._start(Origin(loss, edge, loss.placement), make, some, alone)

    def meet_output(self, extensions: list[Any]) -> None:
        """Pull the identity back from the model's output, for its Jacobian.

        Args:
            extensions: Extensions whose columns start there.

        Raises:
            NotImplementedError: If there is not exactly one output, or hooks change it.
        """
        name = type(extensions[0]).__name__
        origins = self._running.inspection.outputs(outermost=True)
        if len(origins) != 1:
            names = [name_module(origin.call.module) for origin in origins]
            found = ", ".join(names) or "none"
            raise NotImplementedError(NOT_ONE_OUTPUT.format(ext=name, found=found))
        hooked = _changed_by_hooks(origins[0].call.module)
        if hooked is not None:
            raise NotImplementedError(message(HOOKED_OUTPUT, ext=name, module=hooked))
        make = partial(identity_columns, origins[0], name)
        self._start(origins[0], make, extensions)

    def _start(
        self,
        origin: Origin,
        columns: Callable[[int], Iterable[Tensor]],
        extensions: list[Any],
        alone: bool = False,
    ) -> None:
        """Pull columns back from a loss or an output, and store or reduce them."""
        ways = self._ways(origin, extensions)
        if not ways.targets:
            return
        if isinstance(origin.placement, Mixed):
            what = f"what {name_module(origin.call.module)} is computed from"
            refuse(type(extensions[0]).__name__, origin.placement, what)
        size = _number_at_a_time(extensions, ways.targets, ways.groups)
        chunks = iter(columns(size))
        first, second = next(chunks), next(chunks, None)
        many = second is not None or len(first) == MAX_COLUMNS
        if second is not None:
            chunks = chain([second], chunks)
        elif alone and len(first) == 1 and self._carry(ways, first[0], extensions):
            return
        at_once, keep = self._plan(ways.groups, extensions, many)
        pull_chunk = partial(self._pull_chunk, ways)
        totals: dict[Key, Any] = {}
        last: dict[Key, tuple[Group, PerSample]] = {}
        done = 0
        for chunk in chain([first], chunks):
            last.clear()  # which keeps columns
            pulled = pull_chunk(chunk)
            for use in filter(self._running.groups_of.get, pulled):
                self._running.check_use(use, pulled[use], extensions)
            if ways.own and not done:
                _require_linear(ways, chunk, pulled, pull_chunk)
            done += len(chunk)
            if many and self._running.state.debug:
                name = name_module(origin.call.module)
                print(f"[DEBUG] {name}: pulled back {done} columns")
            self._store(pulled, keep, ways.customized, extensions)
            self._reduce(pulled, at_once, totals, last)
        if any(ext.for_parameter(param).looks_again for ext, param in totals):
            self._look_again(at_once, totals, map(pull_chunk, columns(size)))
        for ext in extensions:
            if not ext.additive:  # columns of all parameters belong together
                params = {id(p) for group in ways.groups for p in group.params}
                self._running.kept.setdefault(ext, []).append((params, done))
        for key, total in totals.items():
            if key in last:
                self._finish(key, total, *last[key], ways)
            else:
                _add(self._statistics, key, total, key[0].combine)

    def _ways(self, origin: Origin, extensions: list[Any]) -> Ways:
        """Find what columns reach that start at a loss or an output."""
        reached = targets_below([origin.edge.node])
        running = [t for t in reached if will_run(t.node)]
        owners = list(dict.fromkeys(t.entry.owner for t in running))
        groups_of = self._running.groups_of
        groups = list(dict.fromkeys(g for x in owners for g in groups_of.get(x, ())))
        calls = [x for x in owners if not (x.is_use or x.is_loss)]
        customized = {
            x for x in calls if any(ext.is_customized(x.module) for ext in extensions)
        }
        wanted = {x for x in owners if groups_of.get(x)} | customized
        targets = [t for t in running if t.entry.owner in wanted]
        passed = [origin.call, *dict.fromkeys(t.entry.owner for t in reached)]
        tensors = [x for owner in passed for x in owner.tensors()]
        own = list(filter(may_be_any, self._running.inspection.nodes))
        return Ways(origin.edge, targets, groups, customized, tensors, own)

    def _store(
        self,
        pulled: dict[Any, Cotangents],
        keep: dict[Group, list[Any]],
        customized: Iterable[Any],
        extensions: list[Any],
    ) -> None:
        """Store columns for parameters' turns, and for rules of users."""
        for group, some in keep.items():
            stored = self._stored.setdefault(group.uses[0], {})
            for ext in some:
                stored.setdefault(ext, []).append(pulled[group.uses[0]])
        for call in customized:
            call.columns = call.columns or {}
            for source in {ext.source for ext in extensions}:
                call.columns.setdefault(source, []).append(pulled[call])

    def _reduce(
        self,
        pulled: dict[Any, Cotangents],
        at_once: dict[Group, list[Any]],
        totals: dict[Key, Any],
        last: dict[Key, tuple[Group, PerSample]],
    ) -> None:
        """Add a chunk's part to sums over columns; keep products that finish needs."""
        for ext, group, param, product in self._products(at_once, pulled):
            ext.check(group, param, product)
            by = ext.for_parameter(param)
            _add(totals, (ext, param), by.statistic(product), ext.combine)
            if not (group.is_simple or by.looks_again):
                last[ext, param] = group, product
            product = None

    def _finish(
        self, key: Key, total: Any, group: Group, product: PerSample, ways: Ways
    ) -> None:
        """Form a parameter's value at once, or add it to what other losses have."""
        ends = [(t.entry.owner, t.entry.index) for t in ways.targets]
        arrived = {end for end in ends if end[0] in group.uses}
        value, (ext, param) = key[0].finish(product, total), key
        if key in self._values:
            alike = self._arrived[key] == arrived
            what = partial(group.describe, param)
            value = ext.join(self._values[key], value, product, what, alike)
        self._values[key], self._arrived[key] = value, arrived

    def _plan(
        self, groups: Iterable[Group], extensions: list[Any], many: bool
    ) -> tuple[dict[Group, list[Any]], dict[Group, list[Any]]]:
        """Choose whose columns are reduced at once, and whose are stored.

        Args:
            groups: The parameters that the columns reach.
            extensions: All extensions that use them.
            many: Whether there are too many columns to be stored.

        Returns:
            Extensions of which columns are reduced, and of which they are stored.
        """
        at_once: dict[Group, list[Any]] = {}
        keep: dict[Group, list[Any]] = {}
        for group in groups:
            if any(use.released for use in group.uses):
                continue
            modules = group.modules
            for ext in extensions:
                self._covered.add((ext, group))
                custom = [m for m in modules if ext.is_customized(m)]
                if custom:
                    if len(custom) < len(modules):
                        refuse_several_calls(ext, custom[0])
                elif many and ext.additive or not group.is_simple:
                    at_once.setdefault(group, []).append(ext)
                else:
                    keep.setdefault(group, []).append(ext)
        return at_once, keep

    def _look_again(
        self,
        at_once: dict[Group, list[Any]],
        totals: dict[Key, Any],
        chunks: Iterable[dict[Any, Cotangents]],
    ) -> None:
        """Reduce columns a second time, for what needs the first sums to be complete.

        Args:
            at_once: Extensions, by the parameters whose columns they reduce.
            totals: Sums over all columns; those that are used up are removed.
            chunks: The same columns, where they end.
        """
        again: dict[Key, Any] = {}
        seconds: dict[Key, Any] = {}
        for pulled in chunks:
            for ext, _, param, product in self._products(at_once, pulled):
                key, by = (ext, param), ext.for_parameter(param)
                if by.looks_again and key not in again:
                    again[key] = by.again(product, totals.pop(key))
                if key in again:
                    part = again[key].statistic(product)
                    _add(seconds, key, part, ext.combine)
                product = None
        for key, value in seconds.items():
            _add(self._values, key, value, key[0].add)

    def _carry(self, ways: Ways, column: Tensor, exts: list[Any]) -> bool:
        """Let the running backward pass carry a single column in place of the gradient.

        Nobody needs the gradient then, and nothing has to be pulled back twice.

        Args:
            ways: What the column reaches.
            column: The column ``[N, *]`` at the loss input.
            exts: All extensions that use it.

        Returns:
            Whether it does.
        """
        if ways.customized or any(map(is_users, ways.own)):
            return False  # what was compiled may run once only, see `DONATED`
        running, current, groups = self._running, self._running.state, ways.groups
        inspection, active = running.inspection, current.active_exts
        # torch.autograd.grad returns them, a graph is for derivatives of theirs
        needed = current.gradient or running.accumulated.inputs is None
        if needed or torch.is_grad_enabled() or is_parallel():
            return False
        if any(x not in exts for x in active):
            return False
        if not all([g.is_simple and not g.uses[0].released for g in groups]):
            return False
        modules = [call.module for call in inspection.calls]
        if any(ext.is_customized(module) for ext in active for module in modules):
            return False
        node, edge = None, ways.edge
        if not inspection.is_seen:
            node = find_gateway(inspection, edge)
        if node is None:
            return False

        def exchange(gradients: tuple, _: Any) -> tuple:
            place, edges = (edge.node, edge.output_nr), node.next_functions
            return tuple(
                column if to == place else g for g, to in zip(gradients, edges)
            )

        self._exchanging = node.register_hook(exchange)
        for group in groups:
            for ext in exts:
                self._covered.add((ext, group))
                self._stored.setdefault(group.uses[0], {})[ext] = []
        return True

    def _products(
        self, at_once: dict[Group, list[Any]], pulled: dict[Any, Cotangents]
    ) -> Iterator[tuple[Any, Group, Tensor, PerSample]]:
        """Form the products of a chunk of columns, for each extension and parameter.

        Columns are dropped when nobody needs them any more.
        """
        left = Counter(use for group in at_once for use in group.uses)
        formed: dict[Use, Any] = {}

        def of(use: Use) -> Any:
            if use not in formed:
                some = pulled.get(use, [None] * use.num_outputs)
                formed[use] = use.products(some, self._running.inspection.uses[use])
            return formed[use]

        for group, extensions in at_once.items():
            for param, product in group.products(of).items():
                for ext in extensions:
                    yield ext, group, param, product
                del product
            left.subtract(group.uses)
            for use in group.uses:
                if not left[use]:
                    for held in (formed, pulled):
                        held.pop(use, None)

    def _pull_chunk(self, ways: Ways, columns: Tensor) -> dict[Any, Cotangents]:
        """Let autograd pull columns back to the outputs of uses and calls.

        Column by column: on a CPU that is faster than a batched backward pass.

        Args:
            ways: What they reach.
            columns: Columns ``[V, N, *]`` at the loss input.

        Returns:
            Columns ``[V, *out]`` at each output of the uses and calls.
        """
        targets, tensors = ways.targets, ways.tensors
        edges = [GradientEdge(t.node, t.entry.output_nr) for t in targets]
        stacks = [Stack(len(columns)) for _ in targets]
        create_graph = torch.is_grad_enabled()
        with gathered(tensors), without_hooks(tensors), self._running.state.pull():
            for column in columns.unbind():
                pulled = pull(ways.edge, edges, column, create_graph=create_graph)
                for stack, target, part in zip(stacks, targets, pulled):
                    stack.put(target.entry.in_shape(part))
        result: dict[Any, Cotangents] = {}
        for stack, target in zip(stacks, targets):
            owner = target.entry.owner
            outputs = result.setdefault(owner, [None] * owner.num_outputs)
            outputs[target.entry.index] = stack.columns()
        for owner, outputs in result.items():
            if not any(x is not None for x in outputs):  # it leads to unused outputs
                shape = (len(columns), *owner.output_shapes[0])
                outputs[0] = columns.new_zeros(shape)
        return result

    def values(self, ext: Any, turn: Any) -> Iterator[tuple[Tensor, Any]]:
        """Compute an extension's values for parameters whose turn it is.

        Args:
            ext: The extension.
            turn: The parameters' turn.

        Yields:
            Parameters, and their values.

        Raises:
            NotImplementedError: If parameters are not behind the model's output.
            AssertionError: If no extended loss was met before them.
        """
        group = turn.group
        if (ext, group) not in self._covered:
            if not self._running.in_losses.isdisjoint(group.modules):
                if not ext.expects_backpropagation_quantities():
                    self._running.exempt(ext, group.params)  # a Jacobian is the model's
                return  # no column starts above it
            if not ext.expects_backpropagation_quantities():
                text = message(NOT_BEHIND, ext=ext, names=describe(group.params))
                raise NotImplementedError(text)
            who = {"ext": ext, "field": ext.savefield, "module": group.where()}
            raise AssertionError(message(EXTEND_LOSS, **who))
        stored: dict[Tensor, PerSample] = {}
        columns = self._stored.get(group.uses[0], {}) if group.is_simple else {}
        if ext in columns:
            stored = self._stored_products(group, columns[ext])
        for param in group.params:
            key, by = (ext, param), ext.for_parameter(param)
            value, product = self._values.pop(key, None), stored.get(param)
            statistic = self._statistics.pop(key, None)
            if product is not None:
                ext.check(group, param, product)
                # one loss's columns may have been reduced at once, the other's stored
                if statistic is not None:
                    statistic = ext.combine(statistic, by.statistic(product))
                    value = ext.finish(product, statistic)
                else:
                    reduced = by.reduce(product)
                    value = reduced if value is None else ext.add(value, reduced)
            elif value is None and statistic is not None:
                value = ext.finish(turn.gradients()[param], statistic)
            if value is not None:
                yield param, self._beside(ext, param, value)

    def _beside(self, ext: Any, param: Tensor, value: Tensor) -> Tensor:
        """Put zeros where losses met so far have columns, and a parameter none."""
        losses = self._running.kept.get(ext, ())
        if all(id(param) in params for params, _ in losses):
            return value  # or they are added up
        own = iter(value.split([v for params, v in losses if id(param) in params]))
        zeros = [value.new_zeros(v, *value.shape[1:]) for _, v in losses]
        pairs = zip(losses, zeros)
        return torch.cat([next(own) if id(param) in ps else x for (ps, _), x in pairs])

    def _stored_products(
        self, group: Group, stored: list[Cotangents]
    ) -> dict[Tensor, PerSample]:
        """Describe products with stored columns; formed once for all extensions."""
        if self._exchanging is not None:  # they were carried there
            return group.products(self._running.own_products)
        key, all_columns = tuple(map(id, stored)), partial(joined, stored)
        return group.products(lambda u: self._running.products(u, key, all_columns))

    def forget(self, use: Use) -> None:
        """Forget columns that no parameter waits for any more.

        Args:
            use: A use, all of whose parameters have had their turn.
        """
        self._stored.pop(use, None)

    def forget_all(self) -> None:
        """Forget everything, the backward pass included."""
        self._running = None
        if self._exchanging is not None:
            self._exchanging.remove()
        self.of_losses = GradientsOfLosses()
        for store in (self._stored, self._values, self._arrived, self._statistics):
            store.clear()

    def behind(self, ext: Any, columns: Tensor) -> Tensor:
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


def _changed_by_hooks(module: Module) -> Module | None:
    """Find hooks of users on a module, or around it, that run after ours."""
    around = [m for root in EXTENDED for m in root.modules() if module in m.modules()]
    for m in around:
        hooks = (*m._forward_hooks.values(), *_global_forward_hooks.values())
        if any(not getattr(h, "__module__", "").startswith("backpack.") for h in hooks):
            return m
    return None


def _listed(draw: Callable[[int], Iterable[Tensor]], size: int) -> list[Tensor]:
    return list(draw(size))


def _require_linear(
    ways: Ways, chunk: Tensor, pulled: dict[Any, Cotangents], pull_chunk: Callable
) -> None:
    """Refuse columns where somebody's own backward is not linear."""

    def pull_again(columns: list[Tensor]) -> Cotangents:
        return _with_axis(pull_chunk(columns[0][0]))

    given, who = [chunk[:, None]], names_at(ways.own)
    check_linear(given, _with_axis(pulled), pull_again, who, NO_DERIVATIVE, ways.own)


def _with_axis(pulled: dict[Any, Cotangents]) -> Cotangents:
    """List columns at all outputs, with an axis for samples, which they have in one."""
    outputs = [x for some in pulled.values() for x in some]
    return [None if x is None else x[:, None] for x in outputs]


def _number_at_a_time(
    extensions: Sequence[Any], targets: Sequence[Target], groups: Iterable[Group]
) -> int:
    """Choose how many columns are held, at all outputs that they are pulled back to.

    Where they can be had again for each quantity, they take no more memory than
    Kronecker factors do.
    """
    if not all(ext.looks_again for ext in extensions):
        return MAX_COLUMNS
    shapes = [t.entry.owner.output_shapes[t.entry.index] for t in targets]
    matrices = [p.shape for group in groups for p in group.params if p.dim() > 1]
    factors = sum([s[0] ** 2 + s[1:].numel() ** 2 for s in matrices])
    return min(MAX_COLUMNS, max(1, factors // max(1, sum(s.numel() for s in shapes))))


def _add(totals: dict, key: tuple, part: Any, combine: Any) -> None:
    totals[key] = combine(totals[key], part) if key in totals else part
