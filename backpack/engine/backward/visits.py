"""Visits of a user's hook to modules, when their parameters have their values."""

from __future__ import annotations

from typing import Any, Callable, Container, Iterable

from torch import Tensor
from torch.nn import Module, Parameter

from backpack.engine.nodes.record import Call
from backpack.utils.hooks import name_module, no_op
from backpack.utils.state import State


class Visits:
    """Runs the hook of a context.

    A module is visited when its parameters have their values, also where an operation
    elsewhere takes them. One that is never called, like a list of parameters, or a
    layer whose weight another module takes, is visited after the one around it.

    Attributes:
        ended: Calls whose turns are over, but for the visit.
        taken: Calls that have had their turn.
    """

    def __init__(self, current: State):
        """Start with no visits.

        Args:
            current: What is active.
        """
        self._current = current
        self.ended: list[Call] = []
        self.taken: set[Call] = set()
        self._never_called: dict[Module, list[Parameter]] = {}
        self._are_known = False
        # calls that compute a parameter's value, from module to module
        self._takers: dict[Tensor, set[Call]] | None = None

    def run(
        self, running: Any, let_go: Callable[[Call], None], waits: bool = True
    ) -> None:
        """Visit modules whose turns have ended.

        Args:
            running: The backward pass.
            let_go: Drops what a call keeps, after the visit.
            waits: Whether to wait for values that parameters lack. Default: ``True``.
        """
        ended, self.ended = self.ended, []
        for call in ended:
            if waits and self._lacks_values(call, running):
                self.ended.append(call)
                continue
            try:
                self._visit(call.module, running)
            finally:
                let_go(call)

    def _lacks_values(self, call: Call, running: Any) -> bool:
        """Tell whether what takes a call's parameters elsewhere has no values yet."""
        if self._current.extension_hook is no_op:
            return False
        params, group_of = call.parameters.values(), running.group_of
        if any(group_of[p].pending for p in params if p in group_of):
            return True
        if self._takers is None:
            self._takers = {}
            walks = any(ext.walks_modules for ext in self._current.active_exts)
            for other in running.inspection.calls if walks else ():
                for param in other.parameters.values():
                    self._takers.setdefault(param, set()).add(other)
        return any(self._takers.get(p, set()) - self.taken for p in params)

    def _visit(self, module: Module, running: Any) -> None:
        """Visit a module that was called, and those inside that never are."""
        self._run(module)
        if self._current.extension_hook is no_op:
            return
        if not self._are_known:
            calls, groups = running.inspection.calls, running.group_of
            self._never_called = _find_never_called(calls, groups)
            self._are_known = True
        if self._never_called:
            self._visit_others(set(module.modules()), running)

    def end(self, running: Any) -> None:
        """Visit modules whose parameters several modules around them have used.

        Args:
            running: The backward pass.
        """
        self._visit_others(set(self._never_called), running)

    def _visit_others(self, modules: set[Module], running: Any) -> None:
        for module in [x for x in self._never_called if x in modules]:
            own = self._never_called[module]
            if not any([running.group_of[param].pending for param in own]):
                del self._never_called[module]
                self._run(module)

    def _run(self, module: Module) -> None:
        if self._current.debug:
            print(f"[DEBUG] Running extension hook on {name_module(module)}")
        self._current.extension_hook(module)


def _find_never_called(
    calls: Iterable[Call], groups: Container[Tensor]
) -> dict[Module, list[Parameter]]:
    """Find modules without a call, and parameters of theirs that no called one has."""
    called = dict.fromkeys(call.module for call in calls)
    visited = {p for module in called for p in module.parameters(recurse=False)}
    found = {}
    for module in dict.fromkeys(part for root in called for part in root.modules()):
        own = [p for p in module.parameters(recurse=False) if p not in visited]
        own = [param for param in own if param in groups]
        if own and module not in called:
            found[module] = own
    return found
