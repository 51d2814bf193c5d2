"""Hooks of users that see gradients on their way: on tensors, and on modules.

What they make of a gradient is what first-order quantities are about, too. They are no
part of a derivative that columns could be pulled back through, or an expression of
parameters: where that matters, a hook may look, and what changes gradients is refused.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

from torch import Tensor

from backpack.engine.graph import HOOKED, Inspection
from backpack.engine.record import Call
from backpack.utils.hooks import message, warn_user
from backpack.utils.parallel import gathers
from backpack.utils.state import state

CHANGES = (
    "{ext}: a hook of {what} changes the gradient, which is no part of the derivatives "
    "that {ext} is computed from. Let hooks return None, or compute this quantity in a "
    "backward pass through a model without that hook; first-order quantities are those "
    "of the changed gradient."
)
CHANGES_OF_PARAMETERS = (
    "{ext}: a hook of {what}, which is computed from parameters, changes the gradient, "
    "and it is not known what the hook would make of that of a single sample. Let it "
    "return None, or do what it does after the backward pass."
)
BACKWARD_HOOKS = (
    "{ext}: {module} has a backward hook, which runs for each of the columns that are "
    "pulled back from the loss, too, and sees them instead of gradients. Hooks of "
    "tensors don't: use `tensor.register_hook` on the module's input or output, or "
    "remove the hook before the forward pass."
)

SEEN = "backpack.seen"  # where users look at the gradient of what a model computes
_WATCHED = "backpack.watched"  # where such a node says that we look at its hooks


class Guarded:
    """A hook of a tensor that sees nothing but gradients."""

    def __init__(self, hook: Callable, of_parameters: bool = False):
        """Store what it is.

        Args:
            hook: The user's hook.
            of_parameters: Whether the tensor is computed from parameters alone.
        """
        self._hook, self._of_parameters = hook, of_parameters

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Run it on a gradient.

        Args:
            gradient: The gradient.

        Returns:
            What it returns.
        """
        if state().quiet:
            return None
        before = gradient._version
        changed = self._hook(gradient)
        is_same = changed is None or changed is gradient
        if not is_same or gradient._version != before:
            what = f"a tensor of shape {list(gradient.shape)}"
            _refuse_change(what, self._of_parameters)
        return changed


def guard(x: Tensor, hook: Callable, of_parameters: bool) -> Callable:
    """Guard a hook that a model registers while it is watched.

    Args:
        x: The tensor.
        hook: The hook.
        of_parameters: Whether the tensor is computed from parameters alone.

    Returns:
        What to register in its place. That is the hook itself for a leaf, behind which
        there is nothing, and for what gathers sharded parameters.
    """
    free = x.grad_fn is None or gathers(hook)
    return hook if free else Guarded(hook, of_parameters)


def guard_all(inspection: Inspection, extensions: Sequence[Any]) -> None:
    """Guard the hooks of a graph that second-order quantities are computed from.

    Args:
        inspection: The graph.
        extensions: The active extensions.
    """
    if not any(map(_is_second_order, extensions)):
        return
    tensors: list[Any] = []
    for call in inspection.calls:
        tensors += call.arguments if call.is_loss else call.tensors()
    for x in tensors:
        hooks = getattr(x, "_backward_hooks", None) or {}  # the node's very own
        for key, hook in hooks.items():
            if not isinstance(hook, Guarded):
                hooks[key] = guard(x, hook, False)
    for node in inspection.nodes if HOOKED in inspection.names else ():
        if type(node).__name__ == HOOKED and _WATCHED not in node.metadata:
            node.metadata[_WATCHED] = True
            node.register_hook(_compare)


def sees_gradients(inspection: Inspection) -> bool:
    """Tell whether a user sees gradients on their way.

    Args:
        inspection: The graph.

    Returns:
        Whether modules have hooks, or tensors do, or such that retain their gradient,
        as far as these are known.
    """
    if HOOKED in inspection.names:
        return True
    if any(SEEN in node.metadata for node in inspection.nodes):
        return True
    tensors = [x for call in inspection.calls for x in call.tensors()]
    return any(x._backward_hooks or x.retains_grad for x in tensors)


def _compare(after: Sequence[Tensor | None], before: Sequence[Any]) -> None:
    """Look at what a module's hooks made of the gradients at inputs or outputs."""
    for x, y in zip(after, before):
        if y is not None and x is not y:
            _refuse_change(f"a module with a gradient of shape {list(y.shape)}", False)


def _refuse_change(what: str, of_parameters: bool) -> None:
    for ext in state().active_exts:
        if _is_second_order(ext) or of_parameters and ext.separates_samples:
            text = CHANGES_OF_PARAMETERS if of_parameters else CHANGES
            raise NotImplementedError(text.format(ext=type(ext).__name__, what=what))


def _is_second_order(ext: Any) -> bool:
    return ext.pulls_columns or ext.expects_backpropagation_quantities()


def warn_of_hooks(calls: list[Call], ext: Any) -> None:
    """Warn of modules' backward hooks, which are part of the graph.

    Args:
        calls: Calls in the part of the graph that columns go through.
        ext: An extension that uses them.
    """
    for call in calls:
        if call.module._backward_hooks or call.module._backward_pre_hooks:
            warn_user(message(BACKWARD_HOOKS, ext=ext, module=call.module))
            return
