"""What a compiled step is right for: arguments, modules, and what the closure reads."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.derivatives.stored import STORED

_PLAIN = (int, float, bool, str, complex, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_OF_MODULES = frozenset(vars(Module()))  # attributes that each one has
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
_MOST_BYTES = 2**16  # of an array whose numbers are compared


class Same:
    """Something that is compared by its identity, and kept, so that it has it alone."""

    __slots__ = ("_what",)

    def __init__(self, what: Any):
        """Keep it.

        Args:
            what: What is compared.
        """
        self._what = what

    def __eq__(self, other: object) -> bool:
        """Compare with another one."""
        return isinstance(other, Same) and self._what is other._what

    def __hash__(self) -> int:
        """Return what equal ones have in common."""
        return id(self._what)


def described(x: Any, depth: int = 4) -> Any:
    """Describe an object of Python, as far as operations may depend on it.

    Args:
        x: The object.
        depth: How deep to look into containers. Default: 4.

    Returns:
        What equals another description if numbers, words and all else are the same.
    """
    if type(x) in _PLAIN:
        return x
    if depth and isinstance(x, dict):
        pairs = x.items()
        return type(x), *((described(k, 1), described(v, depth - 1)) for k, v in pairs)
    if depth and isinstance(x, SimpleNamespace):
        return described(vars(x), depth)
    if depth and isinstance(x, _CONTAINERS):
        return type(x), *(described(value, depth - 1) for value in x)
    if type(x).__module__ == "numpy" and hasattr(x, "tobytes"):
        return Same(x), x.tobytes() if x.nbytes <= _MOST_BYTES else None
    return Same(x)


def of_arguments(tensors: tuple[Tensor, ...]) -> tuple:
    """Describe arguments, and PyTorch's switches, as far as operations depend on it.

    Args:
        tensors: The arguments.

    Returns:
        The description.
    """
    devices = sorted({"cpu", "cuda", *(x.device.type for x in tensors)})
    switches = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        *(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            for device in devices
            if torch.amp.is_autocast_available(device)
        ),
    )
    return switches + tuple(
        (*_form(x), x.requires_grad, isinstance(x, Parameter) and Same(x))
        for x in tensors
    )


def _form(x: Tensor) -> tuple:
    """Describe a tensor but for its numbers."""
    strides = x.stride() if x.layout is torch.strided else x.layout
    return x.shape, strides, x.dtype, x.device


def of_modules(modules: Iterable[Module]) -> tuple:
    """Describe modules, as far as operations depend on it.

    Args:
        modules: The modules.

    Returns:
        The description.
    """
    return tuple(
        (
            *attributes(module).items(),
            *map(Same, module._modules.values()),
            *(Same(hook) for name in _HOOKS for hook in vars(module)[name].values()),
            *(
                (name, Same(x), x.requires_grad, *_form(x))
                for name, x in _tensors(module)
            ),
        )
        for module in modules
    )


def attributes(module: Module) -> dict[str, Any]:
    """Describe a module's own attributes: its mode, options, users' tensors.

    Args:
        module: The module.

    Returns:
        The descriptions, by name.
    """
    own = {name: described(x) for name, x in _own(module)}
    return {"training": module.training, **own}


def _own(module: Module) -> Iterator[tuple[str, Any]]:
    """List attributes, without what is stored for extensions."""
    stored = getattr(vars(module).get(STORED), "values", {})
    for name, x in vars(module).items():
        if not (name in _OF_MODULES or name in stored or name == STORED):
            yield name, x


def _tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """List parameters, buffers, and users' tensors that are attributes."""
    for known in (_own(module), module._parameters.items(), module._buffers.items()):
        yield from ((name, x) for name, x in known if isinstance(x, Tensor))


def of_options(ext: Any) -> tuple:
    """Describe an extension's options that are numbers or words.

    Args:
        ext: The extension.

    Returns:
        The options that it has, by name.
    """
    options = vars(ext).items()
    return tuple((k, x) for k, x in options if type(x) in _PLAIN and x is not None)


def of_function(function: Callable) -> tuple:
    """Describe what a function reads that is none of its arguments.

    Args:
        function: The function, or a method, or one with some arguments given.

    Returns:
        Descriptions, by name where there is one.
    """
    if isinstance(function, partial):
        given = described((function.args, function.keywords))
        return given, *of_function(function.func)
    own = getattr(function, "__self__", None)
    names: tuple[str, ...] = ()
    found: list[tuple[str, Any]] = []
    if isinstance(function, MethodType):
        function = function.__func__
    if isinstance(function, FunctionType):
        code, known = function.__code__, function.__globals__
        names = code.co_names
        found += [(name, known[name]) for name in names if name in known]
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            with suppress(ValueError):  # it has no value yet
                found.append((name, cell.cell_contents))
        found.append(("defaults", function.__defaults__ or ()))
        found.append(("defaults", function.__kwdefaults__ or {}))
    holders = [own, *(x for _, x in found)]
    # of objects, what the function's code may read
    for holder in holders:
        if not isinstance(holder, (Module, type)) and hasattr(holder, "__dict__"):
            attrs = vars(holder)
            found += [(name, attrs[name]) for name in names if name in attrs]
    return tuple((name, described(x)) for name, x in found)
