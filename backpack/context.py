"""The state of a ``with backpack(...)`` context, and CTX, through which it is asked.

Each thread has its own state. Autograd runs backward hooks of accelerators in threads
of its own; what is stashed in PyTorch's thread-local state follows it there, other than
Python's own thread-locals.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, Callable, Iterable, List, Optional, Tuple, Type

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.hooks import no_op

if TYPE_CHECKING:
    from backpack.backward import BackwardPass
    from backpack.report import Report

_KEY = "backpack.context.state"


class State:
    """What is active in a thread.

    Attributes:
        active_exts: Extensions to run in a backward pass.
        debug: Whether to print what is run.
        extension_hook: Function to run on each module after the extensions.
        retain_graph: Whether to keep inputs and outputs for another backward pass.
        check: Whether to compare individual gradients with the gradient.
        report: What has happened inside the context.
        backward_pass: The backward pass that is running.
        pulling: Whether columns are being pulled back, so that hooks must not run.
    """

    def __init__(self):
        """Start with nothing active."""
        self.active_exts: Tuple[BackpropExtension, ...] = ()
        self.debug = False
        self.extension_hook: Callable[[Module], None] = no_op
        self.retain_graph = False
        self.check = False
        self.report: Optional[Report] = None
        self.backward_pass: Optional[BackwardPass] = None
        self.pulling = False


def state() -> State:
    """Return this thread's state, which autograd's threads share with their caller.

    Returns:
        The state.
    """
    if not torch._C._is_key_in_tls(_KEY):
        _stash(State())
    return torch._C._get_obj_in_tls(_KEY)


def _stash(new: State) -> None:
    """Put a state into PyTorch's thread-local state, which then owns it.

    Args:
        new: The state.
    """
    references = sys.getrefcount(new)
    torch._C._stash_obj_in_tls(_KEY, new)
    if sys.getrefcount(new) == references:
        # before torch 2.12, PyTorch gives up a reference that it has never taken
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(new))


class _FromState:
    """Lets the class answer ``CTX.<name>`` with the state of the thread."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(state(), self.name)


class CTX:
    """Which extensions are active, and the switches of the context."""

    active_exts = _FromState()
    debug = _FromState()
    extension_hook = _FromState()
    retain_graph = _FromState()
    hook_handles: List[RemovableHandle] = []

    @staticmethod
    def set_active_exts(active_exts: Iterable[BackpropExtension]) -> None:
        """Set the extensions to run in a backward pass.

        Args:
            active_exts: The extensions, in the order in which they shall run.
        """
        state().active_exts = tuple(active_exts)

    @staticmethod
    def get_active_exts() -> Tuple[BackpropExtension, ...]:
        """Return the extensions to run in a backward pass.

        Returns:
            The extensions.
        """
        return state().active_exts

    @staticmethod
    def set_debug(debug: bool) -> None:
        """Set whether a line is printed for each extension and module.

        Args:
            debug: Whether to print.
        """
        state().debug = debug

    @staticmethod
    def get_debug() -> bool:
        """Return whether a line is printed for each extension and module.

        Returns:
            Whether to print.
        """
        return state().debug

    @staticmethod
    def set_extension_hook(extension_hook: Callable[[Module], None]) -> None:
        """Set the function that is run on each module after the extensions.

        Args:
            extension_hook: The function.
        """
        state().extension_hook = extension_hook

    @staticmethod
    def get_extension_hook() -> Callable[[Module], None]:
        """Return the function that is run on each module after the extensions.

        Returns:
            The function.
        """
        return state().extension_hook

    @staticmethod
    def set_retain_graph(retain_graph: bool) -> None:
        """Set whether inputs and outputs are kept for another backward pass.

        Args:
            retain_graph: Whether to keep them.
        """
        state().retain_graph = retain_graph

    @staticmethod
    def get_retain_graph() -> bool:
        """Return whether inputs and outputs are kept for another backward pass.

        Returns:
            Whether to keep them.
        """
        return state().retain_graph

    @staticmethod
    def is_extension_active(*extension_classes: Type[BackpropExtension]) -> bool:
        """Tell whether an extension of one of the given classes is active.

        Args:
            extension_classes: The classes.

        Returns:
            Whether at least one active extension is an instance of one of them.
        """
        return any(isinstance(ext, extension_classes) for ext in state().active_exts)

    @staticmethod
    def add_hook_handle(hook_handle: RemovableHandle) -> None:
        """Remember the handle of a hook that ``extend`` registered.

        Args:
            hook_handle: The handle.
        """
        CTX.hook_handles.append(hook_handle)

    @staticmethod
    def remove_hooks() -> None:
        """Remove all hooks that ``extend`` registered, from all modules."""
        for handle in CTX.hook_handles:
            handle.remove()
        CTX.hook_handles = []
