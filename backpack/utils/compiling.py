"""What ``torch.compile`` must not trace, and what it must not run."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

import torch
from torch.nn import Module

COMPILED_AUTOGRAD = (
    "{exts}: compiled autograd traces this backward pass, and extensions look at it "
    "while it runs. Run it with `torch._dynamo.config.compiled_autograd = False`."
)


def untraced(function: Callable, *args: Any) -> Any:
    """Call a function outside of what is being compiled: the graph is split there.

    Args:
        function: The function.
        args: Its arguments.

    Returns:
        What it returns.
    """
    if function not in _EAGER:  # not before: this imports the compiler
        _EAGER[function] = torch.compiler.disable(function)
    return _EAGER[function](*args)


_EAGER: Dict[Callable, Callable] = {}
untraced._torchdynamo_disable = True  # type: ignore[attr-defined]
untraced._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "extended modules look at every operation and run as they are; compile without "
    "fullgraph=True, export with strict=False"
)


def is_compiled(module: Module) -> bool:
    """Tell whether a module is what ``torch.compile`` has made of another.

    Args:
        module: The module.

    Returns:
        Whether it is. It goes by the name of the class, which takes seconds to import.
    """
    return type(module).__name__ == "OptimizedModule"


def is_compiled_autograd() -> bool:
    """Tell whether backward passes are compiled.

    Returns:
        Whether they are.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "compiled_autograd_enabled", False)
