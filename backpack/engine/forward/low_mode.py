"""A mode below what changes operations, which can be suspended."""

from __future__ import annotations

from collections import deque
from itertools import chain, repeat, starmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from backpack.utils.state import state


def _restack(modes: list[Any]) -> None:
    """Replace the stack of modes, in one call that no interruption finds halfway."""
    size = torch._C._len_torch_function_stack()
    pops = starmap(torch._C._pop_torch_function_stack, repeat((), size))
    deque(chain(pops, map(torch._C._push_on_torch_function_stack, modes)), 0)


class LowMode(TorchFunctionMode):
    """Sees operations as others have made them, and stands for a context meanwhile.

    Attributes:
        suspended: Whether a layer is being called that is looked at as a whole.
        context, below: The mode that it replaces, and how many were below that.
    """

    def __init__(self) -> None:
        """Begin outside of the stack of modes."""
        super().__init__()
        self.suspended = self._is_off = False
        self.context: Any = None
        self.below = 0

    def __enter__(self) -> LowMode:
        """Begin to watch, below what changes operations, and instead of a context."""
        contexts, modes = state().contexts, _get_current_function_mode_stack()
        if contexts and contexts[-1] in modes:  # which would see each operation
            self.context, self.below = contexts[-1], modes.index(contexts[-1])
            modes.remove(contexts[-1])
        _restack([self, *modes])
        return self

    def leave(self) -> None:
        """End watching, also where an interruption has left some of that undone."""
        modes = _get_current_function_mode_stack()
        if self in modes:
            modes.remove(self)
        if self.context is not None and self.context not in modes:
            modes.insert(self.below, self.context)
        _restack(modes)

    def suspend(self) -> None:
        """Stop watching: a layer is called that is looked at as a whole."""
        modes = _get_current_function_mode_stack()
        self.suspended, self._is_off = True, bool(modes) and modes[-1] is self
        if self._is_off:  # what is not on the stack costs nothing
            torch._C._pop_torch_function_stack()

    def resume(self) -> None:
        """Go on as before the layer was called."""
        if self._is_off:
            torch._C._push_on_torch_function_stack(self)
        self.suspended = self._is_off = False
