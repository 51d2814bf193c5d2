"""What a context says when it is left: which parameters got no result, and why."""

from __future__ import annotations

import weakref
from typing import Dict, Iterable, List, Set
from warnings import warn

from torch.nn import Module, Parameter

from backpack.capture import is_hooked
from backpack.extensions.backprop_extension import BackpropExtension

# Modules on which `extend` was called
EXTENDED = weakref.WeakSet()

NOT_REACHED = "the backward pass did not reach it"
NOT_RECORDED = (
    "its module's call was not recorded: it was extended after the forward pass, or the "
    "forward pass ran inside `disable()`"
)
NO_HOOKS = "the hooks were removed from its module; extend it again"
INTRODUCTION = (
    "No result was computed for the following trainable parameters of extended modules:"
)
NOTHING_EXTENDED = (
    "The backward pass met no extended module, so nothing was computed. Call "
    "`extend(model)` before the forward pass, and run it outside of `disable()`."
)


class Report:
    """What happened inside a context.

    Attributes:
        saved: Identities of the parameters that got a result.
        reached: Identities of the leaf tensors that a backward pass reached.
        met_call: Whether an extended module had its turn.
    """

    def __init__(self):
        """Start with nothing."""
        self.saved: Set[int] = set()
        self.reached: Set[int] = set()
        self.met_call = False

    def warn(self) -> None:
        """Warn about parameters without a result, once."""
        if not self.reached:
            return
        if not self.met_call:
            warn(NOTHING_EXTENDED, stacklevel=3)
            return
        missing: Dict[str, List[str]] = {}
        for root in list(EXTENDED):
            named = list(root.named_parameters())
            if not any(id(param) in self.saved for _, param in named):
                continue
            for name, param in named:
                if param.requires_grad and id(param) not in self.saved:
                    reason = self._reason(root, name, param)
                    missing.setdefault(reason, []).append(name)
        if missing:
            lines = [f"- {', '.join(v)}: {reason}" for reason, v in missing.items()]
            warn("\n".join([INTRODUCTION, *lines]), stacklevel=3)

    def _reason(self, root: Module, name: str, param: Parameter) -> str:
        if id(param) not in self.reached:
            return NOT_REACHED
        module = root.get_submodule(name.rpartition(".")[0])
        return NOT_RECORDED if is_hooked(module) else NO_HOOKS


def forget_frozen(extensions: Iterable[BackpropExtension]) -> None:
    """Delete the values of parameters that were frozen since they were computed.

    Args:
        extensions: Extensions whose fields are concerned.
    """
    fields = [ext.savefield for ext in extensions]
    for root in list(EXTENDED):
        for param in root.parameters():
            if not param.requires_grad:
                for field in fields:
                    vars(param).pop(field, None)
