"""Every public name is documented, and the documentation quotes what is there."""

import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, Iterator, List, Set, Tuple

import pytest
import support
import torch
from cases import make_extension

import backpack
from backpack import extensions

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs_src"
MODULES = ["backpack"] + [
    info.name for info in walk_packages(backpack.__path__, "backpack.")
]


def public_members(owner: Any, module: str) -> Iterator[Tuple[str, Any]]:
    """List public classes and functions that are defined in a module or class."""
    for name, member in vars(owner).items():
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        if isinstance(member, property):
            member = member.fget
        documentable = inspect.isclass(member) or inspect.isfunction(member)
        if documentable and member.__module__ == module and not name.startswith("_"):
            yield name, member


def inherited(owner: Any, name: str) -> bool:
    """Tell whether a class overrides a method that a base documents."""
    bases = getattr(owner, "__mro__", ())[1:]
    return any(inspect.getdoc(vars(base).get(name)) for base in bases)


def undocumented(owner: Any, path: str, module: str) -> Iterator[str]:
    """Find public names without docstring, and arguments that it does not explain."""
    for name, member in public_members(owner, module):
        doc = member.__doc__ or ("" if not inherited(owner, name) else None)
        if doc == "":
            yield f"{path}.{name}"
        if inspect.isclass(member):
            yield from undocumented(member, f"{path}.{name}", module)
        elif doc is not None:
            for argument in list(inspect.signature(member).parameters):
                known = re.search(rf"^\s+{argument}: ", doc, re.MULTILINE)
                if argument not in ("self", "cls") and not known:
                    yield f"{path}.{name}({argument})"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name: str):
    """Modules, classes, functions and their arguments have a docstring."""
    module = import_module(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring."
    assert list(undocumented(module, name, name)) == []


def pages() -> List[Path]:
    """List the pages of the documentation, and the first one to read."""
    return [*sorted(DOCS.glob("*.rst")), ROOT / "README.md"]


def test_quantities_are_described():
    """README, quantities and API show every quantity and the name of its field."""
    for quantity in support.QUANTITIES:
        name, field = quantity.__name__, make_extension(quantity.__name__).savefield
        for page in (ROOT / "README.md", DOCS / "quantities.rst"):
            text = page.read_text()
            assert f"`{name}" in text and f"`{field}`" in text, (page.name, name)
        assert f"backpack.extensions.{name}\n" in (DOCS / "api.rst").read_text()


def test_options_are_described():
    """The page on quantities shows each extension with all of its options."""
    text = (DOCS / "quantities.rst").read_text()
    for quantity in support.QUANTITIES:
        options = inspect.signature(quantity).parameters.values()
        shown = [str(o.replace(annotation=o.empty)).replace("'", '"') for o in options]
        assert f"``{quantity.__name__}({', '.join(shown)})``" in text


def test_names_to_import_from_the_package_are_described():
    """The page on the API shows what ``backpack`` exports."""
    text = (DOCS / "api.rst").read_text()
    for name in set(backpack.__all__) - {"BackpropExtension", "extensions"}:
        assert re.search(rf"auto\w+:: backpack\.{name}$", text, re.MULTILINE), name


def test_code_in_the_readme_runs():
    """The examples in the README run, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 3
    namespace = {"MyScaleLayer": type("MyScaleLayer", (torch.nn.Module,), {})}
    exec("\n".join(blocks), namespace)
    assert namespace["model"].weight.norms.shape == (32,)


def messages() -> str:
    """Collect the texts in the package's code: messages come from them."""
    texts: List[str] = []
    for path in (ROOT / "backpack").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_are_quoted_as_they_are():
    """Each message on the page on troubleshooting is one of the package's."""
    text, known = (DOCS / "troubleshooting.rst").read_text(), messages()
    titles = re.findall(r"^(``.*``)\n   \S", text, re.MULTILINE)
    quoted = [part for title in titles for part in re.findall(r"``(.*?)``", title)]
    quoted += re.findall(r"^   \*([^*]+)\*:", text, re.MULTILINE)
    assert len(quoted) > 30
    from_python = "AttributeError: 'Parameter' object has no attribute 'grad_batch'"
    missing = [part for part in quoted if part not in known and part != from_python]
    assert missing == []


def test_support_table_is_shown(monkeypatch: pytest.MonkeyPatch):
    """The documentation's table has a row for each layer and loss, and all notes."""
    monkeypatch.syspath_prepend(str(DOCS))
    text = import_module("support_table").table()
    matrix = {**support.of_layers(), **support.of_losses()}
    for name, row in matrix.items():
        title = name if " " in name else f"``{name}``"
        assert f"   * - {title}\n" in text
        assert all(cell.note in text for cell in row.values())
    for quantity in set(extensions.__all__) - {"HBP"}:
        assert text.count(f"| ``{quantity}``\n") == 2


def test_model_table_is_shown(monkeypatch: pytest.MonkeyPatch):
    """The documentation's table has a row for each model, and all reasons."""
    monkeypatch.syspath_prepend(str(DOCS))
    module = import_module("model_table")
    text = module.tables()
    rows = json.loads(module.RESULTS.read_text())["rows"].values()
    assert text.count("   * - ") == len(rows) + len({row["kind"] for row in rows})
    for row in rows:
        assert f"   * - {row['name']}\n     - {row['setting']}\n" in text
        for part in module.COLUMNS:
            reason = row["parts"].get(part, {}).get("reason", "")
            assert module.literal(reason) in text


def names_in_code(page: Path) -> Set[str]:
    """Collect what the code on a page imports from the package."""
    pattern = r"from (backpack[\w.]*) import ([\w, ]+)"
    return {
        f"{module}.{name.strip()}"
        for module, names in re.findall(pattern, page.read_text())
        for name in names.split(",")
    }


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_imports_on_pages_exist(page: Path):
    """What a page imports can be imported; what it refers to exists."""
    refers = re.findall(r":\w+:`[^`]*<(backpack[\w.]*)>`", page.read_text())
    refers += re.findall(r"auto\w+:: (backpack[\w.]*)", page.read_text())
    for path in [*names_in_code(page), *refers]:
        module, _, name = path.rpartition(".")
        if path not in MODULES:
            assert hasattr(import_module(module), name), path
