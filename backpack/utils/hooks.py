"""Which modules were extended, what things are called, and users' hooks."""

import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from torch import Size, Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle


class Modules:
    """Modules by their identity, which it does not keep alive; for several threads.

    One that was added as a part of another is there as long as that is alive.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._refs: Dict[int, Tuple[weakref.ref[Module], weakref.ref[Module]]] = {}

    def add(self, module: Module, whole: Optional[Module] = None) -> None:
        """Add a module.

        Args:
            module: The module.
            whole: What it is a part of. Default: nothing.
        """
        key, refs = id(module), self._refs
        own = weakref.ref(module, lambda _: refs.pop(key, None))
        refs[key] = own, own if whole is None else weakref.ref(whole)

    def discard(self, module: Module) -> None:
        """Take a module out, if it is there.

        Args:
            module: The module.
        """
        self._refs.pop(id(module), None)

    def __contains__(self, module: Module) -> bool:
        """Tell whether a module is there.

        Args:
            module: The module.

        Returns:
            Whether it is.
        """
        refs = self._refs.get(id(module))
        return refs is not None and refs[1]() is not None

    def __bool__(self) -> bool:
        """Tell whether there are any.

        Returns:
            Whether one was added that is alive.
        """
        return bool(self._refs)

    def __iter__(self) -> Iterator[Module]:
        """List the modules that were there when it was asked for.

        Yields:
            Those that are alive.
        """
        for own, _ in list(self._refs.values()):  # some may go meanwhile
            module = own()
            if module is not None:
                yield module


# Of the hooks that `extend` has registered
HANDLES: List[RemovableHandle] = []
# Modules on which `extend` was called
EXTENDED = Modules()
# ... and those inside of them
_INSIDE = Modules()
# Classes of modules for which an extension has a rule
RULED: weakref.WeakSet[type] = weakref.WeakSet()


# Where a converted model says which classes of modules it has opened
OPENED = "_opened_by_converter"
_BUILT_IN = ("torch.", "backpack.")


def has_own_rule(module: Module) -> bool:
    """Tell whether an extension has a rule for a class of a user's.

    Args:
        module: An instance.

    Returns:
        Whether it has one for its class or a base, other than those of PyTorch.
    """
    known = RULED.intersection(type(module).__mro__)
    return any(not f"{cls.__module__}.".startswith(_BUILT_IN) for cls in known)


def path_of(cls: type) -> str:
    """Name a class such that this can be saved with a model.

    Args:
        cls: The class.

    Returns:
        Its module and name.
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def note_extended(module: Module) -> None:
    """Let a module be extended, with all that is in it.

    Args:
        module: The module.
    """
    EXTENDED.add(module)
    for child in module.modules():
        _INSIDE.add(child, module)


def are_known(module: Module) -> bool:
    """Tell whether a module and all that is in it belong to an extended one.

    Args:
        module: The module.

    Returns:
        Whether nothing was put into it since, and it is no copy.
    """
    return all([child in _INSIDE for child in modules_in(module)])


def represent(module: Module) -> str:
    """Say what a module is, in one line.

    Args:
        module: The module.

    Returns:
        Its representation, or its class if there are modules inside.
    """
    has_children = next(module.children(), None) is not None
    return type(module).__name__ if has_children else str(module)


def represent_call(name: str, args: Iterable[Any], kwargs: Dict[str, Any]) -> str:
    """Write down a call as it could be typed in.

    Args:
        name: What is called.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The call.
    """
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{name}({', '.join(given)})"


def names_of(extensions: Iterable[Any]) -> str:
    """Name extensions, for a message.

    Args:
        extensions: The extensions.

    Returns:
        Their names.
    """
    return ", ".join(type(ext).__name__ for ext in extensions)


def name_module(module: Module) -> str:
    """Name a module, for a message: what it is, and where in its model.

    Args:
        module: The module.

    Returns:
        What it is; and its qualified name in the largest extended model that contains
        it, if it is not that model itself.
    """
    text = represent(module)
    for root in sorted(EXTENDED, key=lambda m: -sum(1 for _ in m.modules())):
        for name, child in root.named_modules():
            if child._forward_hooks is module._forward_hooks:  # or a copy of ours
                return f"{text} ('{name}' of {type(root).__name__})" if name else text
    return text


def message(text: str, **values: Any) -> str:
    """Complete a message.

    Args:
        text: The message, with names in braces.
        values: What these stand for. A module is described with its name in a model,
            ``ext`` and ``derivatives`` with their class, and a shape as a list.

    Returns:
        The message.
    """
    return text.format(**{name: _shown(name, x) for name, x in values.items()})


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, Module):
        return name_module(value)
    if name in ("ext", "derivatives") and not isinstance(value, str):
        return type(value).__name__
    return list(value) if isinstance(value, Size) else value


def no_op(*args: Any, **kwargs: Any) -> None:
    """Accept anything and do nothing; the default extension hook.

    Args:
        args: Ignored.
        kwargs: Ignored.
    """


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep tensors' hooks, and what ``retain_grad`` collects, from seeing gradients.

    Args:
        tensors: The tensors, which may occur several times.

    Yields:
        Nothing.
    """
    known = [x for x in tensors if x._backward_hooks or x.retains_grad]
    # autograd's nodes refer to these very dictionaries
    dictionaries = (x._backward_hooks for x in known)
    hooks: List[Any] = [(current, dict(current)) for current in dictionaries if current]
    retained = [(x, x.grad) for x in known if x.retains_grad]
    try:
        for current, _ in hooks:
            current.clear()
        for x, _ in retained:
            x.grad = None
        yield
    finally:
        for current, before in hooks:
            current.update(before)
        for x, grad in retained:
            x.grad = grad


def modules_in(root: Module) -> list[Module]:
    """List a module and all modules inside; much faster than ``modules``.

    Args:
        root: The module.

    Returns:
        The modules, each once.
    """
    modules, seen = [root], {root}
    for module in modules:  # which grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules


def parameters_of(modules: Iterable[Module]) -> list[Parameter]:
    """List the own parameters of modules; those that they share several times.

    Args:
        modules: The modules.

    Returns:
        The parameters.
    """
    return [x for m in modules for x in m._parameters.values() if x is not None]
