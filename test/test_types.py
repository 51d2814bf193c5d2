"""``typed_use.py`` has every call that the documentation shows.

Type checkers accept them: ``make mypy pyright``.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from textwrap import dedent
from typing import Dict, Iterator, Set, Tuple

import pytest
from torch import Tensor
from torch.nn import Module

import backpack

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("typed_use.py")


def snippets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuple[str, str]]:
    """Collect the code of all pages.

    Args:
        monkeypatch: To import what writes pages.

    Yields:
        Names of pages, and their code.
    """
    docs = ROOT / "docs_src"
    directive = re.compile(
        r"^( *)\.\. (?:testcode::|code-block:: python)\n((?:\1 +.*\n|\s*\n)+)", re.M
    )
    for page in [*docs.glob("*.rst"), *docs.glob("howto/*.rst")]:
        code = [dedent(block) for _, block in directive.findall(page.read_text())]
        yield page.name, "\n".join(code)
    for page in (ROOT / "README.md", ROOT / "README-dev.md"):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
        yield page.name, "\n".join(b for b in blocks if b[0] != "#")
    for script in (ROOT / "examples").glob("*.py"):
        yield script.name, script.read_text()
    monkeypatch.syspath_prepend(str(docs))
    pages = import_module("quantity_pages")
    for quantity in pages.QUANTITIES:
        yield quantity.title, pages.code(quantity)


def methods() -> Set[str]:
    """List the names of methods that only the package's classes have."""
    modules = [
        import_module(info.name)
        for info in walk_packages(backpack.__path__, "backpack.")
    ]
    names = {
        name
        for module in modules
        for _, item in inspect.getmembers(module, inspect.isclass)
        if item.__module__ == module.__name__
        for name, _ in inspect.getmembers(item, inspect.isfunction)
        if not name.startswith("_")
    }
    return names.difference(*map(dir, (Tensor, Module, dict, list, str)))


METHODS = methods()


def calls(code: str) -> Dict[str, Set[str]]:
    """List what some code imports from the package, and calls; also methods.

    Args:
        code: The code.

    Returns:
        Names of keyword arguments by full name, or by a method's name with a dot.
    """
    nodes = list(ast.walk(ast.parse(code)))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == "backpack"
        for alias in node.names
    }
    others = {"self"} | {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found: Dict[str, Set[str]] = {name: set() for name in imported.values()}
    for node in nodes:
        if isinstance(node, ast.Call):
            name, _, rest = ast.unparse(node.func).partition(".")
            method, full = rest.rpartition(".")[2], ""
            if name in imported:
                full = imported[name] + ("." + rest if rest else "")
            elif method in METHODS and name not in others:
                full = f".{method}"
            if full:
                arguments = {str(k.arg) for k in node.keywords if k.arg}
                found.setdefault(full, set()).update(arguments)
    return found


def test_every_call_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pages import and call is in ``typed_use.py``, with the same arguments."""
    checked, pages = calls(FILE.read_text()), dict(snippets(monkeypatch))
    assert "backpack.extensions.ClippedGrad" in calls(pages["clipping.rst"])
    unchecked = {
        (page, name, *sorted(arguments - checked.get(name, set())))
        for page, code in pages.items()
        for name, arguments in calls(code).items()
        if not arguments <= checked.get(name, set()) or name not in checked
    }
    assert sorted(unchecked) == []


def test_calls_are_seen() -> None:
    """Calls are found with their arguments, also under another name."""
    code = "from backpack import extend as e, utils\ne(m)\ne(m, debug=x)\nutils.f(a=1)"
    found = {"backpack.extend": {"debug"}, "backpack.utils": set()}
    assert calls(code) == {**found, "backpack.utils.f": {"a"}}
    assert calls("from torch import nn\nnn.Linear(2, 3, bias=False)") == {}
    code = "p.grad_factors.precondition(kfac, damping=1)\nself.reduce(g).flatten(1)"
    assert calls(code) == {".precondition": {"damping"}}
