"""A backward pass inside a context: uses and calls have their turn.

When the gradient at a use's output is known, it is kept until all uses of a parameter
have theirs. Then the extensions compute their values from the parameter's products.
Calls of modules have turns, too: there, users' own rules run, quantities go from module
to module, and the extension hook is called.
"""

from __future__ import annotations

import sys
from functools import cached_property, partial
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Module, Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from backpack.converter.function import FunctionModule
from backpack.core.layout import Layout
from backpack.engine.backward import coverage
from backpack.engine.backward.check import Check, check_isolation
from backpack.engine.backward.inspection import Inspection
from backpack.engine.backward.own_functions import OwnFunctions
from backpack.engine.backward.own_gradients import choose, hand_over
from backpack.engine.backward.parameters import (
    Group,
    ParameterTurn,
    Products,
    find_groups,
    in_type_of,
)
from backpack.engine.backward.pull_columns import PullColumns
from backpack.engine.backward.reached import find_owners
from backpack.engine.backward.report import Report
from backpack.engine.backward.turn import InputGradients, Turn, refuse_opened
from backpack.engine.backward.visits import Visits
from backpack.engine.nodes.graph import describe, targets_below, will_run
from backpack.engine.nodes.record import RELEASED, Call, clear_others, lock_of
from backpack.engine.nodes.saved import explain_failure, explained
from backpack.engine.nodes.uses import Entry, Use, listen
from backpack.utils import parallel
from backpack.utils.errors import warn_user
from backpack.utils.hooks import name_module, names_of, no_op
from backpack.utils.state import UNANNOUNCED, State, keeps_graph
from backpack.utils.types import kind, undisturbed

_ENGINE = torch.autograd.Variable._execution_engine


class BackwardPass:
    """What a backward pass has to remember from turn to turn.

    Attributes:
        state: What is active.
        modes: Modes in which it was called, like a default device.
        losses: Those that were met, whose columns were pulled back.
        walked: Extensions that have passed quantities from module to module.
        saved_alone: Which extension has saved a value on which parameter that cannot be
            combined with that of another call.
        pull_back: What losses have pulled back.
        inspection: What the graph looks like, if there is anything to be done in it.
        report: Where is noted what has happened.
        groups: The groups of parameters.
        groups_of: Those that a use contributes to.
        is_shared: Whether several processes share the batch.
        terms: Terms of the loss of which its extended modules say nothing, if needed.
        accumulates, accumulated: Whether autograd accumulates gradients, and which.
        gradients: What has arrived at uses: columns with V = 1 at each output.
        kept: What extensions keep until all parameters have had their turn.
        reductions: How the extended losses reduce, as their modules say.
        in_losses: These modules, and all inside of them.
    """

    def __init__(
        self,
        current: State,
        roots: Sequence[GradientEdge] = (),
        inputs: Any = None,
        accumulates: bool = True,
        creates_graph: bool = False,
        begins_with_one: bool = False,
        keeps_graph: bool = False,
    ):
        """Begin.

        Args:
            current: What is active.
            roots: Where the backward pass begins in the graph, if it is known.
            inputs: With respect to what it differentiates. Default: ``None``, for all
                leaf tensors.
            accumulates: Whether it accumulates gradients, in what it differentiates
                with respect to. Default: ``True``.
            creates_graph: Whether what it computes can be differentiated. Default:
                ``False``.
            begins_with_one: Whether the gradient at its beginning is known to be one.
                Default: ``False``.
            keeps_graph: Whether another pass may follow. Default: ``False``.

        Raises:
            RuntimeError: If a parameter is used where extensions can't see it.
        """  # noqa: DAR401
        self.state, self.accumulates = current, accumulates
        self.modes = _get_current_function_mode_stack()
        self._separating = [x for x in current.active_exts if x.separates_samples]
        self._keeps_io = current.keeps_io or creates_graph  # which is differentiated
        self._keeps_graph = self._keeps_io or keeps_graph
        self._creates_graph = creates_graph
        # whether a call's turn is seen, even if extensions have nothing to do
        self._shows_calls = (
            current.debug or self._keeps_io or current.extension_hook is not no_op
        )
        self._check = Check(self) if current.check else None
        self.losses: list[Call] = []
        self._visits = Visits(current)
        self._begins_with_one = begins_with_one and bool(roots)
        self.walked: set[Any] = set()
        self.saved_alone: set[tuple[Any, Parameter]] = set()
        exts = current.active_exts
        self._plain = [x for x in exts if not x.expects_backpropagation_quantities()]
        self._needs_gradients = current.check or bool(self._plain)
        self._is_first_order = len(self._plain) == len(exts)
        self.is_shared = parallel.is_shared()
        self.terms: list[str] = []
        self._is_filtered = inputs is None
        self._at_output = [x for x in self._plain if x.pulls_columns]
        self.gradients: dict[Use, list[Tensor | None]] = {}
        self._formed: dict[Use, dict[Any, Products]] = {}
        self._begun: set[Call] = set()  # calls whose uses may not have had their turn
        self.pull_back = PullColumns(self)
        self.report: Report = current.report or Report()
        if current.report is not None:
            self.report.begin(exts)
        self.kept: dict[Any, Any] = {}
        self.reductions: list[str | None] = []
        self.in_losses: set[Module] = set()
        self._idle: dict[Call, Node] = {}
        self._apart: set[Call] = set()  # whose turn was at one of their outputs
        self.outside: dict[int, Tensor] = {}  # parameters that uses elsewhere take
        with explained(current.active_exts):
            self._prepare(roots, inputs)

    def _prepare(self, roots: Sequence[GradientEdge], inputs: Any) -> None:
        """Look at the graph, refuse what nothing sees, and let nodes be met."""
        current, exts = self.state, self.state.active_exts
        looks = bool(exts) or not current.gradient
        self._look_at(roots if looks else ())
        refuse_opened(self.inspection.calls, exts)
        if self._separating and not any(ext.walks_modules for ext in exts):
            if coverage.note_inside(self.inspection):
                self._look_at(roots)
            params = [p for group in self.groups for p in group.params]
            if coverage.note_unseen(self.inspection, params):
                self._look_at(roots)
        self._inspect(inputs)
        for call in self.inspection.losses:
            self.reductions.append(call.reduction)
            loss = call.loss_module
            self.in_losses.update([] if loss is None else loss.modules())
        self.report.in_losses.update(map(id, self.in_losses))
        if self._separating:
            find_owners(self.inspection, current)
        self.inspection.guard_hooks(exts)
        if current.check and self._separating:
            check_isolation(self.inspection, current)
        args = self.accumulates, self._is_filtered, self._creates_graph
        self.accumulated = choose(current, self.groups, self.inspection, *args)
        self._listen()
        self._functions = OwnFunctions(self.inspection.nodes, exts, self._separating)
        if not looks and current.extension_hook is not no_op:
            for target in targets_below(edge.node for edge in roots):
                listen(target.node)

    def _listen(self) -> None:
        """Let uses and calls have their turns, but for calls with nothing to do."""
        for nodes in self.inspection.uses.values():
            for node, _ in nodes.values():
                listen(node)
        for call, node in self.inspection.calls.items():
            call.check_live()
            if self._has_nothing_to_do(call):
                self._idle[call] = node
            else:
                listen(node)
        if self._is_filtered:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget calls with nothing to do, unless their tensors' hooks matter."""
        if not any(ext.pulls_columns for ext in self.state.active_exts):
            self._pass_by(self._idle)

    def _pass_by(self, calls: Iterable[Call]) -> None:
        self.report.met.update([id(call.module) for call in calls])
        for call in calls:
            call.release(self._keeps_graph)

    def _look_at(self, roots: Sequence[GradientEdge]) -> None:
        """Inspect the graph."""
        self.inspection = Inspection(roots, self.state.active_exts)
        parallel.unify(self.inspection.uses, self.inspection.calls)
        self._find_groups(list(self.inspection.uses))

    def _find_groups(self, uses: Sequence[Use]) -> None:
        """Find out which parameters wait for which uses."""
        self.groups: list[Group] = find_groups(uses, self.outside)
        self.groups_of: dict[Use, list[Group]] = {use: [] for use in uses}
        for group in self.groups:
            for use in group.uses:
                self.groups_of[use].append(group)

    @cached_property
    def group_of(self) -> dict[Tensor, Group]:
        """The group of each parameter, which few ask for."""
        return {param: group for group in self.groups for param in group.params}

    def _inspect(self, inputs: Any) -> None:
        """Refuse what nothing sees, or warn about it."""
        inspection = self.inspection
        params = [p for group in self.groups for p in group.params]
        exts = self.state.active_exts
        if parallel.is_parallel():
            parallel.refuse_parts(names_of(exts), [*inspection.reached, *params])
        curved = not self._is_first_order
        if curved or self.is_shared:
            self.terms = coverage.terms_without_loss(inspection)
        if curved and self.terms:
            warn_user(coverage.MISSING_TERM.format(nodes=", ".join(self.terms)))
        counting = [x for x in exts if x.separates_samples or x.needs_all_uses]
        if counting:
            uses = list(self.groups_of)
            separate = coverage.check_uses(inspection, uses, params, counting)
            for ext in counting:  # what has no other use was named
                self.exempt(ext, separate)
            if self._check is not None:
                self._check.separate = separate
        # what is refused is said by the error: its user may go on
        of_all = inputs is None
        reached = [*inspection.reached, *params] if of_all else tree_leaves(inputs)
        self.report.reached.update(map(id, reached))

    def __enter__(self) -> BackwardPass:
        """Make this the thread's backward pass."""
        self._outer = self.state.backward_pass, self.state.caller
        self.state.backward_pass, self.state.caller = self, sys._getframe(1)
        return self

    def __exit__(self, exc_type: type | None, error: Any, *_: Any) -> None:
        """End; check the results, if this was asked for."""
        failed = True
        try:
            if exc_type is None:
                self.conclude()
                failed = False
        finally:
            for call in self.inspection.calls if failed else ():
                call.release_all(keeps=True)
            self.finish()
            self.state.backward_pass, self.state.caller = self._outer
            self.report.failed |= failed
        explain_failure(error, self.state.active_exts)
        if exc_type is None and self._check is not None:
            self._check.compare()

    def conclude(self) -> None:
        """Save the values that need all parameters; none if one of them fails."""
        self._visits.run(self, self._let_go, waits=False)
        self._visits.end(self)
        exts = self.state.active_exts
        with torch.set_grad_enabled(self._creates_graph), undisturbed():
            values = [ext.conclude(self) if ext in self.kept else {} for ext in exts]
        for ext, found in zip(exts, values):
            if found and ext.replaces_gradient:
                # what is handed over has no other owner
                grads = {p: in_type_of(found.pop(p), p) for p in list(found)}
                self.exempt(ext, grads)
                hand_over(grads, type(ext).__name__, self.inspection.calls)
            for param, value in found.items():
                self.save(ext, param, value)

    def save(self, ext: Any, param: Tensor, value: Any) -> None:
        """Save a value on a parameter.

        Args:
            ext: The extension whose field it is.
            param: The parameter.
            value: The value.
        """
        if id(param) in self.outside:
            return
        setattr(param, ext.savefield, in_type_of(value, param))
        if ext.shard is not None:
            ext.shard.saved[param] = True
        self.exempt(ext, [param])

    def finish(self) -> None:
        """Forget what is left."""
        for ext, key in self.walked:  # another pass may have the same extension
            ext.saved_quantities.retrieve_quantity(key, delete_old=True)
        if self._check is not None:
            self._check.remove()
        self._functions.remove()
        exts = self.state.active_exts
        for ext, shard in parallel.move_to_shards(self.inspection.calls, exts):
            self.report.reached.add(id(shard))
            self.exempt(ext, [shard])
        if self._is_filtered:
            self._pass_by([call for call in self._idle if not call.released])
        if not self._keeps_io:
            clear_others(self.inspection.calls)
        vars(self).pop("group_of", None)
        self._visits = Visits(self.state)
        of_uses = self.gradients, self._formed, self.groups_of
        for kept in (self._idle, self.kept, self.groups, *of_uses):
            kept.clear()
        self.inspection = Inspection(())
        self.pull_back.forget_all()  # they refer to each other

    # ---------------------------------------------------------------------------- turns

    def take_turn(
        self, owner: Any, g_out: tuple[Tensor | None, ...], entries: list[Entry]
    ) -> None:
        """Let a use or a call have its turn.

        Args:
            owner: The use or the call.
            g_out: Gradients at its outputs.
            entries: What ends in the same node of the graph.
        """
        if self._visits.ended:  # autograd has gone on since
            self._visits.run(self, self._let_go)
        if not self._is_filtered:
            self._filter()
        with undisturbed():
            if self._at_output:
                starting, self._at_output = self._at_output, []
                self.pull_back.meet_output(starting)
            if owner.is_use:
                self._take_use(owner, g_out)
            else:
                self._take_call(owner, g_out, entries)

    def _filter(self) -> None:
        """Leave out uses that the pass that is running does not include."""
        self._is_filtered = True
        runs = {
            use: any(will_run(node) for node, _ in nodes.values())
            for use, nodes in self.inspection.uses.items()
        }
        outside = find_groups([use for use in runs if not runs[use]])
        # those used in the pass, too, have no value, rather than a part of it
        self.outside = {id(p): p for group in outside for p in group.params}
        self._find_groups([use for use in runs if runs[use]])
        for call, node in list(self._idle.items()):
            if not will_run(node):
                del self._idle[call]
        self._forget_idle()

    def _take_use(self, use: Use, g_out: tuple[Tensor | None, ...]) -> None:
        is_unannounced = self.state.unannounced is self and self.inspection.roots
        if is_unannounced and use not in self.inspection.uses:
            raise RuntimeError(UNANNOUNCED)
        groups = self.groups_of.get(use, [])
        if use.released and groups:
            raise RuntimeError(RELEASED.format(module=use.describe()))
        self.gradients[use] = [None if g is None else g.unsqueeze(0) for g in g_out]
        separate = all([type(place) is Layout for place in use.placements])
        separate = separate or use.adds_up and self._is_first_order
        if groups and self._separating and not separate:
            self.check_use(use, self.gradients[use], self._separating)
        for group in list(groups):
            group.pending -= 1
            if not group.pending:
                self._complete(group)
            elif self._needs_gradients:
                group.collect(use, self.own_products)

    def check_use(
        self, use: Use, cotangents: Sequence[Tensor | None], exts: Sequence[Any]
    ) -> None:
        """Refuse a use where samples are not known to be separate.

        Args:
            use: The use.
            cotangents: Columns, or the gradient, at its outputs.
            exts: Extensions that tell samples apart.
        """
        if any([g is not None for g in cotangents]):
            groups = self.groups_of.get(use, ())
            params = [param for group in groups for param in group.params]
            who = partial(names_of, exts)
            use.check(cotangents, who, partial(describe, params))

    def _complete(self, group: Group) -> None:
        """Compute the values of parameters whose uses all have had their gradient."""
        turn = ParameterTurn(group, self)
        if self._check is not None:
            self._check.add(turn)
        modules = group.modules
        for ext in self.state.active_exts:
            if not any([ext.is_customized(module) for module in modules]):
                ext.compute(turn)
        given = [g for use in group.uses for g in self.gradients[use] if g is not None]
        for param in self.left_out(group.params) if given else ():
            product = turn.gradients().get(param)
            if product is not None:  # to the node that accumulates it
                total = (product.plain.total(),)
                _ENGINE.run_backward((param,), total, False, False, (), True, True)
        for use in group.uses:
            groups = self.groups_of[use]
            groups.remove(group)
            if not groups:
                self.gradients.pop(use, None)
                self._formed.pop(use, None)
                self.pull_back.forget(use)
                if not self._keeps_graph:
                    use.release()
                self._end(use.owner)

    def exempt(self, ext: Any, params: Iterable[Tensor]) -> None:
        """Note that parameters need no report: they have a value, or shall have none.

        Args:
            ext: The extension.
            params: The parameters.
        """
        self.report.saved.update([(id(ext), id(param)) for param in params])

    def left_out(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Find parameters that autograd leaves out, whose gradient is formed here.

        Args:
            params: Parameters.

        Returns:
            Those of them.
        """
        own = self.accumulated.own
        return [param for param in params if id(param) in own]

    def own_products(self, use: Use) -> Products:
        """Describe what a use contributes to the individual gradients.

        Args:
            use: The use, which has had its gradient.

        Returns:
            Products with V = 1 for each of its constants.
        """
        return self.products(use, "own", lambda: self.cotangents(use))

    def products(
        self, use: Use, key: Any, columns: Callable[[], list[Tensor | None]]
    ) -> Products:
        """Describe products with the constants' Jacobians, once for all extensions.

        Args:
            use: The use.
            key: Tells the columns apart from others.
            columns: Returns columns ``[V, *]`` at each output.

        Returns:
            Products for each of its constants.
        """
        formed = self._formed.setdefault(use, {})
        if key not in formed:
            formed[key] = use.products(columns(), self.inspection.uses[use])
        return formed[key]

    def cotangents(self, use: Use) -> list[Tensor | None]:
        """Return what has arrived at a use: zero if a function has given nothing.

        Args:
            use: The use, which has had its gradient.

        Returns:
            Columns with V = 1 at each output.
        """
        found = list(self.gradients[use])
        if all([g is None for g in found]):
            for i, (node, number) in self.inspection.uses[use].items():
                like = kind(node._input_metadata[number])
                found[i] = torch.zeros(1, *use.output_shapes[i], **like)
        return found

    def _take_call(
        self, call: Call, g_out: tuple[Tensor | None, ...], entries: list[Entry]
    ) -> None:
        """Run the extensions on a call.

        Args:
            call: The call.
            g_out: Gradients at its outputs.
            entries: What ends in the same node of the graph.

        Raises:
            RuntimeError: If inputs and output were dropped before.
        """  # noqa: DAR401
        if call in self._idle or call in self._apart:
            return
        call.check_live()
        if call.is_apart:
            self._apart.add(call)
            self.inspection.check_outputs(call, self.state.active_exts)
        if self._has_nothing_to_do(call):
            self._pass_by([call])
            return
        current, module = self.state, call.module
        self.report.met.add(id(module))
        with lock_of(module), Turn(call, self, g_out, entries) as turn:
            call.store(raw=True)
            begins = not call.is_loss or self._meet_loss(turn)
            node = self.inspection.calls.get(call)  # none if there are no extensions
            g_inp = InputGradients(call, node, entries, g_out)
            for ext in current.active_exts if begins else self._plain:
                if current.debug:
                    print(f"[DEBUG] Running extension {ext} on {name_module(module)}")
                turn.g_out = self.pull_back.of_losses.at(call, ext, g_out)
                ext(module, g_inp, turn.g_out)
        self._visits.taken.add(call)
        self._begun.add(call)
        self._end(call)

    def _end(self, call: Call | None) -> None:
        """End a call's turn when its parameters have values, but no gradients yet."""
        if call not in self._begun or any(map(self.groups_of.get, call.uses)):
            return
        self._begun.remove(call)
        if self._shows_calls:
            self._visits.ended.append(call)
        else:
            self._let_go(call)

    def _let_go(self, call: Call) -> None:
        if self._keeps_io:
            call.columns = {}
            call.store(raw=False)
        else:
            call.release(self._keeps_graph)

    def _has_nothing_to_do(self, call: Call) -> bool:
        """Tell whether a call's turn would change nothing: a quick answer."""
        exts = self.state.active_exts
        return not (self._shows_calls or any([ext.runs_on(call) for ext in exts]))

    def _meet_loss(self, turn: Turn) -> bool:
        """Pull columns back from a loss; tell whether it is none that a model uses."""
        exts = self.state.active_exts
        second_order = [x for x in exts if x.expects_backpropagation_quantities()]
        if not second_order:
            return True
        module, output, (g_out, *_) = turn.module, turn.call.outputs[0], turn.g_out
        if output.numel() != 1:
            raise ValueError(
                f"{type(second_order[0]).__name__} starts at a loss with a scalar "
                f"output, and {name_module(module)} has an output of shape "
                f"{list(output.shape)}. Use reduction='mean' or reduction='sum'."
            )
        if self.inspection.is_inside(turn.call, self.losses):
            return not turn.call.is_function
        self.losses.append(turn.call)
        if not (turn.call.is_function or isinstance(module, FunctionModule)):
            begins = self._begins_with_one
            coverage.warn_of_factor(self.inspection, turn.call, g_out, begins)
        self.pull_back.meet(turn, second_order)
        return True


def begin_unannounced(current: State) -> None:
    """Begin a backward pass that did not go through PyTorch's Python interface.

    Args:
        current: What is active.
    """
    graph, root = torch.is_grad_enabled(), torch._C._current_autograd_node()
    running = current.unannounced = current.backward_pass = BackwardPass(
        current, [GradientEdge(root, 0)], (), False, graph, False, keeps_graph()
    )

    def end() -> None:
        try:
            running.conclude()
        finally:
            current.forget_unannounced()

    _ENGINE.queue_callback(end)


State.begin = staticmethod(begin_unannounced)
