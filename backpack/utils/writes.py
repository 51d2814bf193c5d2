"""Sees which operations write to memory that was there before they began."""

from __future__ import annotations

from typing import Any, Iterator

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backpack.utils.types import behind, tensors_in


def writes_by_name(name: str) -> bool:
    """Tell whether an operation writes to its first operand, as its name says.

    Args:
        name: Name of the operation.

    Returns:
        Whether it works in place; ``requires_grad_`` changes no number.
    """
    if name.startswith("__"):
        adds = name.startswith("__i") and name not in ("__invert__", "__index__")
        return adds or name == "__setitem__"
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


class Writes(TorchDispatchMode):
    """Hands over what is overwritten, unless it was made while this is active.

    Subclasses say what to do by :meth:`see` and :meth:`overwrite`.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Any = ()):
        """Begin with nothing of its own but what was given.

        Args:
            given: What may be overwritten.
        """
        super().__init__()
        self._own = {None, *map(memory_of, tensors_behind(given))}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        schema: Any = getattr(func, "_schema", None)  # which not every one has
        self.see(func, args, kwargs)
        for x in _written(schema, args, kwargs) if schema is not None else ():
            if memory_of(x) not in self._own:
                self.overwrite(x, schema.name)
        found = func(*args, **kwargs)
        is_new = schema is not None and schema.name == "aten::lift_fresh"  # of numbers
        known = () if is_new else map(memory_of, tensors_behind((args, kwargs)))
        self._own.update(set(map(memory_of, tensors_behind(found))).difference(known))
        return found

    def see(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Look at an operation before it runs; by default, do nothing.

        Args:
            func: The operation.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """

    def overwrite(self, x: Tensor, operation: str) -> None:
        """See a tensor that an operation will write to, and did not make.

        Args:
            x: The tensor.
            operation: Name of the operation.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what to do.")


def _written(schema: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """List tensors that an operation writes to."""
    for i, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from tensors_behind(given)


def tensors_behind(values: Any) -> Iterator[Tensor]:
    """List tensors, without what `vmap` puts around them.

    Args:
        values: Anything.

    Returns:
        The tensors.
    """
    return map(behind, tensors_in(values))


def memory_of(x: Tensor) -> int | None:
    """Return the number of a tensor's memory.

    Args:
        x: The tensor.

    Returns:
        The number, ``None`` if it has none of its own.
    """
    try:
        return x.untyped_storage()._cdata
    except RuntimeError:
        return None
