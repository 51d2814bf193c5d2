"""What users write passes strict type checkers; the package itself: ``make mypy``.

``typed_use.py`` has every call that the documentation shows.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
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

# Parts of torch that what users write does not need, and that take most of the time
SKIPPED = (
    "_decomp _dynamo _export _functorch _higher_order_ops _inductor _library _prims"
)
SKIPPED += " _refs _subclasses ao cuda distributed distributions export fx.experimental"
SKIPPED += " mtia nested onnx optim package profiler quantization sparse testing xpu"
SKIPPED += " utils.data utils._sympy"


@pytest.mark.slow
def test_calls_of_the_documentation(tmp_path: Path) -> None:
    """``typed_use.py`` has no error, except where it says that there is one."""
    api = pytest.importorskip("mypy.api")
    skipped = ",".join(f"torch.{name}.*" for name in SKIPPED.split())
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n"
        f"[mypy-{skipped},sympy.*,numpy.*]\nfollow_imports = skip\n"
    )
    options = [f"--config-file={config}", f"--cache-dir={tmp_path / 'cache'}"]
    out, problems, code = api.run([*options, str(FILE)])
    assert code == 0, out + problems


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
def test_calls_of_the_documentation_in_editors(tmp_path: Path) -> None:
    """The same for pyright, which editors use; it finds each mistake as well."""
    settings = {
        "include": [FILE.name],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "extraPaths": [str(ROOT)],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / FILE.name).write_text(FILE.read_text())
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 errors, 0 warnings" in run.stdout


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
