"""The calls of extended modules that run in a thread, one inside of another.

A call may end without a hook of ours: by Ctrl-C, or where nothing is to be recorded.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch.nn import Module

from backpack.engine.forward.layer_calls import Covered
from backpack.engine.forward.tracking import Tracker
from backpack.engine.nodes.record import Call, CallRef, clear_stored
from backpack.utils.compiling import skipped, untraced
from backpack.utils.hooks import Modules


class Frame:
    """A call of a module that has not returned yet.

    Attributes:
        module: The module.
        call: The record of the call, which is filled when it returns.
        running: Which frame of Python's has called it.
        start: How many calls inside of the outermost one had returned before.
        since: How many nodes the graph had.
        tracker: What watches its operations, if that was started here.
        row: The module's row in the table, if the call is a use as a whole.
        is_constant: Whether no sample can enter it.
    """

    __slots__ = "module call running start since tracker row is_constant".split()

    def __init__(self, module: Module, running: int):
        """Begin a call.

        Args:
            module: The module.
            running: Identity of Python's frame that has called it.
        """
        self.module, self.running = module, running
        self.call = Call(module)
        self.start = len(THREAD.returned)
        self.since = torch._C._autograd._get_sequence_nr()
        self.tracker: Tracker | None = None
        self.row: Covered | None = None
        self.is_constant = False


class _Thread(threading.local):
    """What runs in a thread.

    Attributes:
        frames: Calls that have not returned, the outermost one first.
        returned: Those inside of it that have: modules, and records of their calls.
        tracker: What watches operations.
        graphless: Modules whose results had no graph, for the next call that has one.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.returned: list[tuple[Module | None, CallRef]] = []
        self.tracker: Tracker | None = None
        self.graphless = Modules()


THREAD = _Thread()


def forget_interrupted(python_frame: Any = None) -> None:
    """Forget calls that were interrupted: no hook runs after Ctrl-C.

    Args:
        python_frame: From where to look for calls that led here. Default: the caller.
    """
    frames = THREAD.frames
    while frames and not _is_running(frames[-1], python_frame or sys._getframe(1)):
        leave_last()


def caller_of_hook() -> Any:
    """Find what has called an extended module, as a hook of ours asks.

    Returns:
        Python's frame, which lives as long as the call.
    """
    python_frame = sys._getframe(1)
    while python_frame.f_globals.get("__name__") in _BETWEEN:
        python_frame = python_frame.f_back
    return python_frame


# Modules that call our hooks for others, with frames that are gone then
_BETWEEN = {f"{__package__}.hooks", untraced.__module__, "torch._dynamo.eval_frame"}


def _is_running(frame: Frame, python_frame: Any) -> bool:
    """Tell whether a call is among those that led here."""
    while python_frame is not None and id(python_frame) != frame.running:
        python_frame = python_frame.f_back
    return python_frame is not None


class Guard(dict):
    """Keyword arguments of an outermost call; when they go, the call is over.

    No hook runs after Ctrl-C, but what was local to the call is freed.
    """

    _frame: Frame | None = None  # the first line can be interrupted as well

    def __init__(self, frame: Frame, kwargs: dict[str, Any]):
        """Guard a call.

        Args:
            frame: The call.
            kwargs: Its keyword arguments.
        """
        super().__init__(kwargs)
        self._frame = frame

    @skipped
    def __del__(self) -> None:
        """End the call, unless a hook has."""
        if self._frame in THREAD.frames:
            while self._frame in THREAD.frames:
                leave_last()
            clear_inside()


def pop_frame(module: Module, caller: Any) -> Frame | None:
    """End a module's call, unless it was stepped aside from, inside of one that runs.

    As is the repetition for a checkpoint, or a call without gradients.

    Args:
        module: The module.
        caller: Python's frame that has called it.

    Returns:
        The call, ``None`` if there was none.
    """
    frames = THREAD.frames
    for position in reversed(range(len(frames))):
        frame = frames[position]
        if frame.module is module:
            if frame.running != id(caller) and _is_running(frame, caller):
                return None
            while len(frames) > position + 1:
                leave_last()
            return leave_last()
    return None


def leave_last() -> Frame:
    """Go on as before the innermost call, which is forgotten when all that is done.

    Returns:
        The call.
    """
    frame, tracker = THREAD.frames[-1], THREAD.tracker
    if frame.tracker is not None:
        THREAD.tracker, frame.tracker.key.is_over = None, True
        frame.tracker.leave()
    elif tracker is not None:
        tracker.owner = THREAD.frames[-2].call
        if frame.row is not None:
            tracker.resume()
    return THREAD.frames.pop()


def clear_inside() -> None:
    """Clear modules inside of an outermost call that has failed."""
    for module, _ in THREAD.returned:
        if module is not None:
            clear_stored(module)
    THREAD.returned.clear()
