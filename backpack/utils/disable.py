"""The switch that keeps forward passes from storing anything."""

import threading
from contextlib import AbstractContextManager
from typing import Any

from backpack.utils.hooks import Modules

PLAIN = Modules()  # extended modules that were called inside


class _Switch(threading.local):
    depth = 0


_SWITCH = _Switch()


class _StoreIO:
    """Lets the class answer ``disable.store_io``."""

    def __get__(self, instance: object, owner: type) -> bool:
        return _SWITCH.depth == 0


class disable(AbstractContextManager):  # noqa: N801
    """Context in which forward passes store nothing.

    Use it for a forward pass of an extended model of which only the plain gradient is
    wanted. A derivative that a model's forward pass takes inside is one of PyTorch's,
    with no quantities. Contexts nest, and each thread has its own.

    Example:
        >>> from torch import ones
        >>> from torch.nn import Linear
        >>> from backpack import disable, extend
        >>> layer = extend(Linear(2, 1))
        >>> with disable():
        ...     _ = layer(ones(3, 2))
        >>> hasattr(layer, "input0")
        False
    """

    store_io = _StoreIO()

    def __enter__(self) -> None:
        """Switch storing off."""
        _SWITCH.depth += 1

    def __exit__(self, *exc_info: Any) -> None:
        """Switch storing back to what it was."""
        _SWITCH.depth -= 1

    @staticmethod
    def should_store_io() -> bool:
        """Tell whether forward passes store inputs and outputs.

        Returns:
            ``False`` inside at least one ``disable`` context of this thread.
        """
        return _SWITCH.depth == 0
