"""CTX, through which is asked what is active in a ``with backpack(...)`` context."""

from __future__ import annotations

from typing import Any, Callable, Iterable

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.hooks import HANDLES
from backpack.utils.state import State, state

__all__ = ["CTX", "State", "state"]


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
    hook_handles: list[RemovableHandle] = HANDLES

    @staticmethod
    def set_active_exts(active_exts: Iterable[BackpropExtension]) -> None:
        """Set the extensions to run in a backward pass.

        Args:
            active_exts: The extensions, in the order in which they shall run.
        """
        state().active_exts = tuple(active_exts)

    @staticmethod
    def get_active_exts() -> tuple[BackpropExtension, ...]:
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
    def is_extension_active(*extension_classes: type[BackpropExtension]) -> bool:
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
    def forget_dead_handles() -> None:
        """Forget the handles of hooks whose modules are gone: models come and go."""
        handles = CTX.hook_handles
        handles[:] = [h for h in handles if h.hooks_dict_ref() is not None]

    @staticmethod
    def remove_hooks() -> None:
        """Remove all hooks that ``extend`` registered, from all modules."""
        for handle in CTX.hook_handles:
            handle.remove()
        CTX.hook_handles.clear()
