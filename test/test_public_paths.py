"""The promise: import paths, names and signatures of BackPACK 1.7 exist.

``public_interface.txt`` holds them: a module per line, functions, classes and constants
indented below it, members below their class. A signature may have further parameters,
if these are optional and come last.
"""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import pytest

from backpack.extensions import backprop_extension

INTERFACE = Path(__file__).with_name("public_interface.txt")

# Programs import these, too
PATHS = {
    "backpack": [
        *("backpack", "disable", "extend", "memory_cleanup", "extensions"),
        *("BackpropExtension", "convert_module_to_backpack"),
    ],
    "backpack.core.layers": ["Flatten"],
    "backpack.extensions": [
        *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"),
        *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC"),
        *("SqrtGGNExact", "SqrtGGNMC", "KFAC", "KFLR", "KFRA", "HBP"),
        *("DiagHessian", "BatchDiagHessian", "HMP", "GGNMP", "PCHMP"),
    ],
    "backpack.extensions.firstorder": [
        *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"),
    ],
    "backpack.extensions.secondorder": [
        *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC"),
        *("SqrtGGNExact", "SqrtGGNMC", "KFAC", "KFLR", "KFRA", "HBP"),
        *("DiagHessian", "BatchDiagHessian"),
    ],
    "backpack.extensions.secondorder.hbp": [
        *("LossHessianStrategy", "BackpropStrategy", "ExpectationApproximation"),
        "HBP",
    ],
    "backpack.extensions.curvmatprod": ["HMP", "GGNMP", "PCHMP"],
    "backpack.extensions.curvmatprod.hmp": ["HMPBase"],
    "backpack.extensions.curvmatprod.ggnmp": ["GGNMPBase"],
    "backpack.extensions.curvmatprod.pchmp": ["PCHMPBase"],
}


class Promise(NamedTuple):
    """A line: something in a module, with its signature or value."""

    module: str
    path: Tuple[str, ...]
    signature: Optional[str] = None
    value: Optional[str] = None
    is_static: bool = False

    def __str__(self) -> str:
        """Name the line."""
        return ".".join((self.module, *self.path))


def read() -> Iterator[Promise]:
    """Read the interface."""
    module, owner = "", ""
    for line in INTERFACE.read_text().splitlines():
        text = line.strip()
        if not line.startswith(" "):
            module = text
            yield Promise(module, ())
            continue
        if text.startswith("class "):
            owner = text[len("class ") :]
            yield Promise(module, (owner,))
            continue
        is_member = text.startswith(".")
        name = text.lstrip(".")
        name = name[len("def ") :] if name.startswith("def ") else name
        is_static = name.endswith(" [static]")
        name = name[: -len(" [static]")] if is_static else name
        if " = " in name.split("(")[0]:
            name, value = name.split(" = ", 1)
            signature = None
        else:
            name, signature = name.split("(", 1)
            signature, value = signature[: signature.rindex(")")], None
        path = (owner, name) if is_member else (name,)
        yield Promise(module, path, signature, value, is_static)


PROMISES = list(read())


def find(promise: Promise) -> Any:
    """Import what a line is about."""
    found = import_module(promise.module)
    for name in promise.path:
        found = getattr(found, name)
    return found


def parse(signature: str) -> List[Tuple[str, Optional[str]]]:
    """Split a signature into names and defaults."""
    function = ast.parse(f"def f({signature}): pass").body[0]
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: List[Any] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    parsed = list(zip(positional, defaults))
    if arguments.vararg is not None:
        parsed.append((arguments.vararg, None))
    parsed += list(zip(arguments.kwonlyargs, arguments.kw_defaults))
    if arguments.kwarg is not None:
        parsed.append((arguments.kwarg, None))
    return [(arg.arg, default and ast.unparse(default)) for arg, default in parsed]


@pytest.mark.parametrize("promise", PROMISES, ids=str)
def test_interface(promise: Promise):
    """Each name exists, with its value or signature."""
    found = find(promise)
    if promise.value is not None:
        value = ast.literal_eval(promise.value)
        # the context's state changes
        assert (
            type(found) is type(value) if promise.path[0] == "CTX" else found == value
        )
    if promise.signature is None:
        return
    expected = [(n, d) for n, d in parse(promise.signature) if n not in ("self", "cls")]
    actual = [
        (p.name, None if p.default is p.empty else repr(p.default))
        for p in inspect.signature(found).parameters.values()
        if p.name not in ("self", "cls")
    ]
    by_name: Dict[str, Optional[str]] = dict(actual)
    assert [name for name, _ in actual[: len(expected)]] == [n for n, _ in expected]
    for name, default in expected:
        assert by_name[name] == default, name
    variadic = ("args", "kwargs")
    further = [n for n, d in actual[len(expected) :] if d is None and n not in variadic]
    assert not further, "further parameters must be optional"


@pytest.mark.parametrize("module", PATHS)
def test_paths(module: str):
    """What programs import is there."""
    for name in PATHS[module]:
        assert hasattr(import_module(module), name), name


def test_lines_are_read():
    """The file is read as it is meant: a sample of each kind of line."""
    assert Promise("backpack.extensions.curvature", ()) in PROMISES
    modes = [p for p in PROMISES if p.path == ("FAIL_ERROR",)]
    assert [p.value for p in modes] == ["'ERROR'"]
    assert backprop_extension.FAIL_ERROR == "ERROR"
    (init,) = [p for p in PROMISES if p.path == ("BackpropExtension", "__init__")]
    assert parse(init.signature)[-1] == ("subsampling", "None")
