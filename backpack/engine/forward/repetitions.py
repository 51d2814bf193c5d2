"""Calls that a backward pass repeats, as for a checkpoint: they leave no trace.

Statistics and counters move once in a forward pass, and once more where a part of it is
repeated for the gradient. For products of ours it is repeated on copies.
"""

from __future__ import annotations

from typing import Any, Container

from torch import Tensor
from torch._C import _current_graph_task_id
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from backpack.core.derivatives.stored import copies_of_state
from backpack.utils.compiling import skipped
from backpack.utils.state import state

_OWN = ("torch.nn.modules.", "torch.ao.nn.", "backpack.")


def is_repeated() -> bool:
    """Tell whether a backward pass runs this, which is not a hook with its context.

    Returns:
        Whether it does.
    """
    task = _current_graph_task_id()
    return task != -1 and task != state().inside


def may_change(module: Module, hooks: Container[Any]) -> bool:
    """Tell whether a module may change what it has when it is called.

    Args:
        module: The module.
        hooks: Hooks of ours.

    Returns:
        Whether it is no layer of PyTorch without buffers and hooks of users.
    """
    both = module._forward_pre_hooks, module._forward_hooks
    others = any(hook not in hooks for own in both for hook in own.values())
    is_own = type(module).__module__.startswith(_OWN)
    return others or bool(module._buffers) or not is_own


@skipped
def hold_call(module: Module, args: Any) -> None:
    """Forward pre-hook, before all others: put copies in place for a repetition.

    What comes out of a hook that runs after the module is held back as well: until the
    module is repeated again, or all products have been computed.

    Args:
        module: The module.
        args: What it is called with.
    """
    if is_dynamo_compiling() or not is_repeated() or not state().pulling:
        return
    held = state().held
    for one in [x for x in held if x.module is module]:
        held.remove(one)
        one.release()
    if not any(module in one.parts for one in held):
        held.append(Held(module))


class Held:
    """Buffers, numbers and containers of a module, while others are in their place.

    Attributes:
        module: The module.
        parts: It, and all modules inside.
    """

    def __init__(self, module: Module):
        """Put copies there.

        Args:
            module: The module.
        """
        self.module, self.parts = module, set(module.modules())
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        copies: dict[Tensor | None, Tensor | None] = {None: None}
        for part in self.parts:
            own = vars(part)
            before = {n: x for n, x in own.items() if type(x) in (int, float)}
            # who shards parameters has states of its own, which have to go on
            is_own = type(part).__module__.startswith("torch.")
            new = {} if is_own else copies_of_state(part)
            new["_buffers"] = {
                name: copies.setdefault(x, None if x is None else x.clone())
                for name, x in own["_buffers"].items()
            }
            self._before.append((own, {**before, **{name: own[name] for name in new}}))
            own.update(new)

    def release(self) -> None:
        """Put everything back."""
        for own, before in self._before:
            own.update(before)
