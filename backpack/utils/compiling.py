"""What ``torch.compile`` must not trace, and what runs once only."""

from __future__ import annotations

import sys
from typing import Any, Callable, TypeVar

import torch
import torch._C._dynamo.eval_frame as _frames
from torch.nn import Module

C = TypeVar("C", bound=Callable)

COMPILED_AUTOGRAD = (
    "{exts}: compiled autograd traces this backward pass, and extensions look at it "
    "while it runs. Run it with `torch._dynamo.config.compiled_autograd = False`."
)

DONATED = (
    "{exts}: a part of the model was compiled so that its backward pass overwrites "
    "what it needs, and runs once only; columns need it once each. Set "
    "`torch._functorch.config.donated_buffer = False` before it runs for the first "
    "time."
)
CLEARED = (
    "{exts}: a function of one's own forgets its saved tensors when it has read them, "
    "and samples and columns need its `backward` once each. Leave "
    "`clear_saved_tensors_on_access = True` out."
)
# What is refused, by a part of PyTorch's message
ONCE = {"non-empty donated": DONATED, "can only be accessed once": CLEARED}


def skipped(function: C) -> C:
    """Keep a function that others call, and all that it calls, from being compiled.

    Older versions of torch compile it, which changes no result.

    Args:
        function: The function.

    Returns:
        The same function.
    """
    if hasattr(_frames, "_FrameExecStrategy"):
        skip = _frames._FrameAction.SKIP
        strategy = _frames._FrameExecStrategy(skip, skip)
        _frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def uncompiled(hook: C) -> C:
    """Keep a hook that autograd calls, and all that it calls, from being compiled.

    Args:
        hook: The hook.

    Returns:
        The hook, with older versions of torch what calls it where nothing is compiled.
    """
    if hasattr(_frames, "_FrameExecStrategy"):
        return skipped(hook)

    def call(*args: Any) -> Any:
        before = _frames.set_eval_frame(None)
        try:
            return hook(*args)
        finally:
            _frames.set_eval_frame(before)

    _frames.skip_code(call.__code__)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


@skipped
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


_EAGER: dict[Callable, Callable] = {}
untraced._torchdynamo_disable = True  # type: ignore[attr-defined]
untraced._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "extended modules look at every operation and run as they are; compile without "
    "fullgraph=True, export with strict=False"
)


def answered(function: C) -> C:
    """Let the compiler ask a function while it traces: its answer is a constant.

    Older versions of torch store that among the globals of what they compile, by the
    name that the function's code has, which must not be in use there.

    Args:
        function: The function.

    Returns:
        The same function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    name = f"_backpack_{function.__name__}"
    function.__code__ = function.__code__.replace(co_name=name)
    return function


@answered
def is_indivisible(watched: bool) -> bool:
    """Tell whether what is compiled can't be split.

    Args:
        watched: Whether that is a part of a model whose operations are watched, and not
            the model.

    Returns:
        Whether it is a branch or the body of a loop, as of ``torch.cond``, or a part
        that is compiled with ``fullgraph=True``.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        name, known = frame.f_globals.get("__name__", ""), frame.f_locals
        if name.startswith("torch._higher_order_ops"):
            return True
        if watched and name == "torch._dynamo.convert_frame" and known.get("one_graph"):
            return True
        # an operation with a branch inside of what is compiled
        if getattr(type(known.get("self")), "_ALLOW_FALLBACK_TO_EAGER", True) is False:
            return True
        frame = frame.f_back
    return False


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
