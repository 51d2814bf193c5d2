"""Hooks of users that see gradients on their way: on tensors, nodes, and modules.

What they make of a gradient is what first-order quantities are about, too. They are no
part of a derivative that columns could be pulled back through, or an expression of
parameters: where that matters, a hook may look, and what changes gradients is refused.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from backpack.engine.nodes.uses import is_turn
from backpack.utils.hooks import no_op
from backpack.utils.parallel import gathers
from backpack.utils.state import state
from backpack.utils.types import versions_of

CHANGES = (
    "{ext}: a hook changes the gradient (of shape {shapes}), which is no part of the "
    "derivatives that {ext} is computed from. Let hooks return None, or compute this "
    "quantity in a backward pass through a model without that hook; first-order "
    "quantities are those of the changed gradient."
)
CHANGES_OF_PARAMETERS = (
    "{ext}: a hook changes the gradient (of shape {shapes}) on its way to parameters, "
    "and it is not known what the hook would make of that of a single sample. Let it "
    "return None, or do what it does after the backward pass."
)

# Where users look at the gradient of what a model computes: weak references to tensors
SEEN = "backpack.seen"


class Guarded:
    """A hook of a tensor or a node that sees nothing but gradients."""

    def __init__(self, hook: Callable, of_parameters: bool):
        """Store what it is.

        Args:
            hook: The user's hook.
            of_parameters: Whether gradients of parameters come from what it changes,
                and those of single samples do not.
        """
        self._hook, self._of_parameters = hook, of_parameters

    def __call__(self, gradients: Any, *others: Any) -> Any:
        """Run it on gradients.

        Args:
            gradients: The gradient of a tensor, or those at a node.
            others: What else it gets.

        Returns:
            What it returns.
        """
        if state().quiet:
            return None
        before = tree_leaves(gradients)
        versions = versions_of(before)
        changed = self._hook(gradients, *others)
        after = before if changed is None else tree_leaves(changed)
        same = len(after) == len(before) and all(map(_is_same, after, before))
        if not same or versions != versions_of(before):
            _refuse_change(before, self._of_parameters)
        return changed


def note_seen(x: Tensor) -> None:
    """Note that a user looks at a tensor's gradient.

    Args:
        x: The tensor, which an operation has made.
    """
    x.grad_fn.metadata.setdefault(SEEN, []).append(ref(x))


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


def guard_node(node: Node, register: Callable, of_parameters: bool = False) -> None:
    """Guard the hooks of a node, which are where a new one is put.

    Args:
        node: The node.
        register: Its method by which hooks are registered.
        of_parameters: Whether gradients of parameters come out of it.
    """
    handle = register(no_op)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    for key, hook in hooks.items():
        if not (isinstance(hook, Guarded) or is_turn(hook)):
            hooks[key] = Guarded(hook, of_parameters)
            node.metadata.setdefault(SEEN, [])


def _is_same(x: Any, y: Any) -> bool:
    """Tell whether a gradient is another one, or both are zero.

    PyTorch's hooks of modules return ``None`` at outputs that nobody has used.
    """
    return x is y or x is None and not y.any() or y is None and not x.any()


def _refuse_change(gradients: Sequence[Any], of_parameters: bool) -> None:
    shapes = ", ".join(str(list(x.shape)) for x in gradients if x is not None)
    for ext in state().active_exts:
        if is_second_order(ext) or of_parameters and ext.separates_samples:
            text = CHANGES_OF_PARAMETERS if of_parameters else CHANGES
            name = type(ext).__name__
            raise NotImplementedError(text.format(ext=name, shapes=shapes))


def is_second_order(ext: Any) -> bool:
    """Tell whether an extension pulls back more than gradients.

    Args:
        ext: The extension.

    Returns:
        Whether it does.
    """
    return ext.pulls_columns or ext.expects_backpropagation_quantities()
