"""Functions that a compiler leaves whole.

What a compiler makes of products that are formed piece by piece, and in place, is
slower. Where a step is recorded, such a function becomes a single operation. That calls
it as if nothing was recorded, so that it may write, and look at numbers.
"""

from __future__ import annotations

from functools import wraps
from itertools import count
from typing import Any, Callable, Sequence, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library, register_fake
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.utils.state import is_traced, state
from backpack.utils.types import tensors_in

F = TypeVar("F", bound=Callable)

_NUMBERS = count()


class WholeCall:
    """A call of a function, with other tensors each time.

    The step that was recorded keeps it alive, so that it keeps no tensors itself.
    """

    def __init__(self, function: Callable, args: Sequence[Any]):
        """Call the function for the first time.

        Args:
            function: The function. It may modify none of its arguments.
            args: Its arguments: tensors on the CPU, and what stays the same. Results
                are tensors, or ``None``.
        """
        leaves, self._spec = tree_flatten(list(args))
        self._args = [Tensor if isinstance(x, Tensor) else x for x in leaves]
        self._function, self.number = function, next(_NUMBERS)
        with _disable_current_modes(), torch.no_grad():
            numbers, self._results = tree_flatten(function(*args))
        self._kinds = [
            None if x is None else (x.shape, x.stride(), x.dtype) for x in numbers
        ]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function.

        Args:
            tensors: Its tensors.

        Returns:
            Its tensors' results, laid out as those of the first call, and in memory of
            their own.
        """
        given = iter(tensors)
        leaves = [next(given) if x is Tensor else x for x in self._args]
        with torch.no_grad():
            result = self._function(*tree_unflatten(leaves, self._spec))
        numbers, _ = tree_flatten(result)
        taken, results = {_memory(x) for x in tensors}, []
        for x, kind in zip(numbers, self._kinds):
            if kind:
                if _memory(x) in taken or (x.stride(), x.dtype) != kind[1:]:
                    x = torch.empty_strided(*kind[:2], dtype=kind[2]).copy_(x)
                taken.add(_memory(x))
                results.append(x)
        return results

    def empty(self) -> list[Tensor]:
        """Make tensors like the results."""
        kinds = (kind for kind in self._kinds if kind)
        return [torch.empty_strided(*kind[:2], dtype=kind[2]) for kind in kinds]

    def arranged(self, results: list[Tensor]) -> Any:
        """Arrange results as the function does.

        Args:
            results: Its tensors' results.

        Returns:
            What it returns.
        """
        rest = iter(results)
        return tree_unflatten([x and next(rest) for x in self._kinds], self._results)

    def __repr__(self) -> str:
        """Tell it apart from calls in other processes, with which it may share code."""
        name = getattr(self._function, "__qualname__", str(self._function))
        return f"{name} -> {self._kinds}"


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.numel() else id(x)


_CALLS: WeakValueDictionary[int, WholeCall] = WeakValueDictionary()
_LIBRARY = Library("backpack", "FRAGMENT")
# another one for each time that this file is imported in a process
_NAME = next(
    name
    for name in map("whole{}".format, count())
    if not hasattr(torch.ops.backpack, name)
)
_LIBRARY.define(
    f"{_NAME}(Tensor[] tensors, int number, str name) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl(_NAME, lambda tensors, number, name: _CALLS[number].run(tensors), "CPU")
register_fake(
    f"backpack::{_NAME}", lambda tensors, number, name: _CALLS[number].empty()
)


def is_recorded() -> bool:
    """Tell whether functions become single operations of a step that is recorded.

    Returns:
        Whether it is, and not inside of a function that is left whole; ``False``, too,
        where a graph is built, or autocast chooses types.
    """
    if not is_traced() or state().calls is None:
        return False
    return not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled())


def call_whole(function: Callable, *args: Any) -> Any:
    """Call a function as a single operation of the step that is recorded.

    Args:
        function: A function that returns new tensors, and modifies none.
        args: Its arguments, with at least one tensor.

    Returns:
        What it returns.
    """
    tensors = tensors_in(args)
    if any(x.device.type != "cpu" for x in tensors):
        return function(*args)
    call = WholeCall(function, args)
    state().calls.append(call)
    _CALLS[call.number] = call
    operation = getattr(torch.ops.backpack, _NAME).default
    return call.arranged(operation(tensors, call.number, repr(call)))


def whole(function: F) -> F:
    """Let a function become a single operation where a step is recorded.

    Args:
        function: A function that returns new tensors, and modifies none.

    Returns:
        The function.
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        return call_whole(function, *args) if is_recorded() else function(*args)

    return run  # type: ignore[return-value]


class KeepWhole(TorchDispatchMode):
    """While active, lets functions and operations stay whole.

    Attributes:
        OPERATIONS: Operations of PyTorch of which a compiler makes slower ones.
        calls: What was called, which must live as long as the step that is recorded.
    """

    OPERATIONS = (
        torch.ops.aten.max_pool2d_with_indices.default,
        torch.ops.aten.max_pool2d_with_indices_backward.default,
        torch.ops.aten.constant_pad_nd.default,
    )

    def __init__(self) -> None:
        """Begin without calls."""
        super().__init__()
        self.calls: list[WholeCall] = []

    def __enter__(self) -> KeepWhole:  # noqa: D105
        state().calls = self.calls
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:  # noqa: D105
        state().calls = None
        super().__exit__(*exc_info)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: D105
        if func in self.OPERATIONS and not kwargs:
            return call_whole(func, *args)
        return func(*args, **(kwargs or {}))
