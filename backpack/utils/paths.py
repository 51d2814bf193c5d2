"""Import paths of BackPACK 1.7 without a file: what is there is defined elsewhere."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any, Mapping, Sequence


def keep_paths(package: str, paths: Mapping[str, Sequence[Any]]) -> None:
    """Let classes be imported from modules of a package that have no file.

    Args:
        package: Name of the package.
        paths: The classes, by the names of the modules.
    """
    for path, classes in paths.items():
        module = module_from_spec(ModuleSpec(f"{package}.{path}", None))
        vars(module).update({cls.__name__: cls for cls in classes})
        sys.modules[module.__name__] = module
        setattr(sys.modules[package], path, module)


def without_arguments(base: Any, name: str, path: str, *args: Any) -> Any:
    """Make the class of a layer's rule, which takes no arguments.

    Args:
        base: Class of the rules of several layers.
        name: Name of the new class.
        path: Name of the module that it is imported from.
        args: What the constructor of the base takes.

    Returns:
        The class.
    """

    def __init__(self: Any) -> None:
        base.__init__(self, *args)

    doc = f"The ``{base.__name__}`` of a single layer."
    body = {"__init__": __init__, "__doc__": doc, "__module__": path}
    return type(name, (base,), body)
