"""Every public name is documented, and the documentation quotes what is there."""

import ast
import inspect
import json
import re
import runpy
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, Dict, Iterator, List, Set, Tuple

import pytest
import support
from cases import make_extension

import backpack
from backpack import extensions

ROOT, TESTS = Path(__file__).parents[1], Path(__file__).parent
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
    """Find public names without docstring, and what pages would not show of one."""
    for name, member in public_members(owner, module):
        doc = member.__doc__ or ("" if not inherited(owner, name) else None)
        if doc == "":
            yield f"{path}.{name}"
        if inspect.isclass(member):
            yield from undocumented(member, f"{path}.{name}", module)
        elif doc is not None:
            # what is in front of a colon would be shown as the type
            returned = re.search(r"^ +(?:Returns|Yields):\n +(.*)$", doc, re.MULTILINE)
            if returned and re.search(r":(\s|$)", returned[1]):
                yield f"{path}.{name}: {returned[1]}"
            for argument in list(inspect.signature(member).parameters):
                known = re.search(rf"^\s+{argument}: ", doc, re.MULTILINE)
                if argument not in ("self", "cls") and not known:
                    yield f"{path}.{name}({argument})"


def test_every_public_name_is_documented():
    """Modules, classes, functions and their arguments have a docstring."""
    modules = {name: import_module(name) for name in MODULES}
    assert not [name for name, x in modules.items() if not (x.__doc__ or "").strip()]
    assert not [y for name, x in modules.items() for y in undocumented(x, name, name)]


def test_constants_are_described_in_words():
    """What is in front of a colon would be shown as the type of a constant."""
    for name in MODULES:
        body = ast.parse(Path(import_module(name).__file__).read_text()).body
        for constant, doc in zip(body, body[1:]):
            described = isinstance(doc, ast.Expr) and isinstance(
                doc.value, ast.Constant
            )
            if isinstance(constant, (ast.Assign, ast.AnnAssign)) and described:
                assert ": " not in doc.value.value, f"{name}, line {doc.lineno}"


def pages() -> List[Path]:
    """List the pages of the documentation, and the first one to read."""
    folders = (DOCS, DOCS / "howto", DOCS / "api")
    return [*(p for f in folders for p in sorted(f.glob("*.rst"))), ROOT / "README.md"]


@pytest.fixture
def quantity_pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import what writes a page for each quantity."""
    monkeypatch.syspath_prepend(str(DOCS))
    return import_module("quantity_pages")


def test_quantities_are_described(quantity_pages: Any):
    """README, overview and a page show every quantity, its field and its API."""
    by_name = {name: q for q in quantity_pages.QUANTITIES for name in q.names}
    assert set(by_name) == {quantity.__name__ for quantity in support.QUANTITIES}
    for quantity in support.QUANTITIES:
        name, field = quantity.__name__, make_extension(quantity.__name__).savefield
        page = quantity_pages.page(by_name[name])
        assert f"``{name}``: saved in ``{field}``" in page
        assert f".. autoclass:: backpack.extensions.{name}\n" in page
        readme = (ROOT / "README.md").read_text()
        assert f"`{name}" in readme and f"`{field}`" in readme, name
        table = quantity_pages.table("")
        assert re.search(rf":doc:`[^<]*\b{name}\b", table) and f"``{field}``" in table


def test_costs_are_those_that_were_recorded(quantity_pages: Any):
    """Pages show the benchmark's numbers, for each quantity that has some."""
    recorded = quantity_pages.recorded()
    text = quantity_pages.BENCHMARK.read_text()
    assert len(recorded) == len(quantity_pages.NETWORKS)
    for quantity in quantity_pages.QUANTITIES:
        shown = "\n".join(quantity_pages.cost_table(quantity.names))
        for name in quantity.names:
            for values in recorded.values():
                if name in values:
                    assert f"``{name}``" in shown
                    time, memory = values[name][:2]
                    assert f"     - {time}\n     - {memory}" in shown
                    assert f"| `{name}` | {time} | {memory} |" in text


def test_times_of_compiled_steps_are_those_that_were_recorded(quantity_pages: Any):
    """The page on compiled steps quotes what the benchmark says of them."""
    _, rest = quantity_pages.BENCHMARK.read_text().split("**Steps that are compiled.")
    page = (DOCS / "howto" / "compile.rst").read_text()
    quoted = re.search(r"take (.*) and (.*) of .* MLP, (.*) and (.*) on 3C3D", page)
    table = rest.split("\n- **")[0]
    rows = re.findall(r"\| `(.*?)` \| ([\d.]+).*? \| ([\d.]+)", table)
    times = {name: both for name, *both in rows}
    names = "BatchGrad", "KFAC"
    recorded = [times[name][network] for network in (0, 1) for name in names]
    assert list(quoted.groups()) == recorded


def test_code_on_pages_of_quantities_runs(quantity_pages: Any):
    """The example on each page of a quantity runs, and makes assertions."""
    for quantity in quantity_pages.QUANTITIES:
        code = quantity_pages.code(quantity)
        assert "assert " in code
        exec(compile(code, quantity.title, "exec"), {})


def test_names_to_import_from_the_package_are_described():
    """The page on the API shows what ``backpack`` exports."""
    text = (DOCS / "api" / "users.rst").read_text()
    for name in set(backpack.__all__) - {"BackpropExtension", "extensions"}:
        assert re.search(rf"auto\w+:: backpack\.{name}$", text, re.MULTILINE), name


def test_code_in_the_readme_runs():
    """The examples in the README run, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    shapes = {
        "model.weight.grad_batch": (32, 10, 784),
        "model.weight.norms": (32,),
        "model[1].weight.grad_batch": (32, 1),
    }
    assert len(blocks) == len(shapes)
    namespace: Dict[str, Any] = {}
    for block, (result, shape) in zip(blocks, shapes.items()):
        exec(block, namespace)
        assert eval(result, namespace).shape == shape


def text_of(node: ast.AST) -> str:
    """Read a text of the package's code, with ``{}`` for what is filled in later."""
    if isinstance(node, ast.BinOp):  # a sum of texts
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    value = getattr(node, "value", None)
    return value if isinstance(value, str) else "{}"


def texts() -> Dict[str, str]:
    """Collect the texts in the package's code: messages come from them.

    Returns:
        The texts, by the line that they start on.
    """
    found: Dict[str, str] = {}
    for path in sorted((ROOT / "backpack").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        parts = {id(x.value) for x in nodes if isinstance(x, ast.Expr)}  # docstrings
        for node in nodes:  # from the outside to the inside
            if isinstance(node, (ast.JoinedStr, ast.BinOp)):
                parts.update(map(id, ast.iter_child_nodes(node)))
            text = isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Constant))
            if text and id(node) not in parts:
                where = f"{path.relative_to(ROOT / 'backpack')}:{node.lineno}"
                found.setdefault(f"{where}:{node.col_offset}", text_of(node))
    return found


def quoted() -> List[str]:
    """List the parts of messages by which the page on troubleshooting goes."""
    page = (DOCS / "troubleshooting.rst").read_text()
    titles = re.findall(r"^(``.*``)\n   \S", page, re.MULTILINE)
    parts = [part for title in titles for part in re.findall(r"``(.*?)``", title)]
    return parts + re.findall(r"^   \*([^*]+)\*:", page, re.MULTILINE)


def test_messages_are_quoted_as_they_are():
    """Each message on the page on troubleshooting is one of the package's."""
    known = "\n".join(texts().values())
    from_python = "AttributeError: 'Parameter' object has no attribute 'grad_batch'"
    missing = [part for part in quoted() if part not in known and part != from_python]
    assert len(quoted()) > 100 and missing == []


# Called with tensors or options: what is wrong is in the call
BY_THEMSELVES = ("core/", "custom_module/", "hessianfree/", "utils/examples.py")


def test_messages_are_found_by_their_text():
    """The page has each message with a way out, but for those about an argument."""
    argument = r"\bgot (shape )?\{|must be|must have|[Ee]xpects?\b"
    missing = {
        where: text
        for where, text in texts().items()
        if re.search(r"[\w`)'}]\.\s[A-Z]", text)  # what is wrong; what to do
        and not (where.startswith(BY_THEMSELVES) or re.search(argument, text))
        and not any(part in text for part in quoted())
    }
    assert missing == {}


def test_support_table_is_shown(monkeypatch: pytest.MonkeyPatch):
    """The table has a row for each layer and loss, a column for each quantity."""
    monkeypatch.syspath_prepend(str(DOCS))
    module = import_module("support_table")
    text = module.table()
    for name, row in {**support.of_layers(), **support.of_losses()}.items():
        title = name if " " in name else f"``{name}``"
        assert f"      * - {title}\n" in text
        assert all(cell.note in text.replace("``", "") for cell in row.values())
        assert all(module.SYMBOLS[cell.rule] in text for cell in row.values())
    for quantity in set(extensions.__all__) - {"HBP"}:
        assert f"``{quantity}``" in text


def test_model_table_is_shown(monkeypatch: pytest.MonkeyPatch):
    """The documentation's table has a row for each model, and all reasons."""
    monkeypatch.syspath_prepend(str(DOCS))
    module = import_module("model_table")
    text = module.tables()
    rows = json.loads(module.RESULTS.read_text())["rows"].values()
    assert text.count("   * - ") == len(rows) + text.count(":header-rows:")
    for row in rows:
        setting = f"        - {row['setting']}\n" if row["setting"] else ""
        assert f"   * - {row['name']}\n{setting}" in text
        for part in module.COLUMNS:
            reason = row["parts"].get(part, {}).get("reason", "")
            assert module.literal(reason) in text


@pytest.mark.parametrize("name", ["support_table", "model_table"])
def test_tables_that_are_unfolded_are_short(name: str, monkeypatch: pytest.MonkeyPatch):
    """Large tables are folded, and none has more than 40 rows."""
    monkeypatch.syspath_prepend(str(DOCS))
    module = import_module(name)
    text = getattr(module, {"support_table": "table", "model_table": "tables"}[name])()
    parts = text.split(".. list-table::")
    assert len(parts) > 5
    assert all(part.count("   * - ") <= 41 for part in parts[1:])
    assert text.count("   .. list-table::") == len(parts) - 1, "not all are folded"


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


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_files_on_pages_exist(page: Path):
    """Files that a page names are there."""
    named = re.findall(
        r"`((?:backpack|test|examples|docs_src|benchmarks)/[\w./]+)`", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_tasks_are_listed():
    """Each task has a page that is listed, and ends with a question mark."""
    folder = DOCS / "howto"
    listed = (folder / "index.rst").read_text().split()
    for page in set(folder.glob("*.rst")) - {folder / "index.rst"}:
        title = page.read_text().splitlines()[0]
        assert page.stem in listed and title.startswith("... ") and title.endswith("?")


@pytest.mark.parametrize(
    "name", ["README.md", "README-dev.md", "CONTRIBUTING.md", "benchmarks/README.md"]
)
def test_links_lead_to_files(name: str):
    """Links and pictures that stay in the project are there, anchors too."""
    page = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert links
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" not in link:
            file = page.parent / target if target else page
            assert file.exists(), link
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
            slugs = [
                re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles
            ]
            assert not anchor or anchor in slugs, link


def test_promises_name_tests():
    """Tests that the table of promises names as `file::test[row]` exist."""
    last, named = "", []
    pattern = r"`(\w*)::(\w*)(?:\[[^`]*)?`|`(\w+)`: `\["
    for file, name, alone in re.findall(pattern, (TESTS / "README.md").read_text()):
        last = file or alone or last
        if name and last != "x":
            named.append((TESTS / f"test_{last}.py", f"def test_{name}("))
    texts = {path: path.read_text() for path, _ in named}
    assert len(named) > 200
    assert [name for path, name in named if name not in texts[path]] == []


def test_links_on_an_index_are_absolute(monkeypatch: pytest.MonkeyPatch):
    """A release that knows where its source is leads there from everywhere."""
    pytest.importorskip("setuptools")
    described: Dict[str, str] = {}
    monkeypatch.setattr(
        "setuptools.setup", lambda **settings: described.update(settings)
    )
    monkeypatch.chdir(ROOT)
    for repository in ("", "https://host/project"):
        monkeypatch.setenv("DOCS_REPOSITORY", repository)
        runpy.run_path("setup.py")
        links = re.findall(r"\]\(([^)\s]+)\)", described["long_description"])
        assert (
            f"{repository}/raw/main/docs_src/_static/demo.png" in links
            or not repository
        )
        assert bool(repository) == all("://" in link for link in links)


def test_one_version():
    """What is cited, and described as the newest version, is what is there."""
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {backpack.__version__}\n" in cited
    sections = re.findall(r"^## \[(.*)\]$", (ROOT / "changelog.md").read_text(), re.M)
    assert sections[0] == backpack.__version__


def test_workflows_call_make_targets():
    """Continuous integration and hosting run nothing that is no target here."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "makefile").read_text(), re.M))
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run"]
    files = [file for file in files if file.is_file()]  # the sources have none
    called = set()
    for file in files:
        text = file.read_text()
        matrix = re.findall(r"^ +target: \[(.*)\]$", text, re.M)
        names = [name for row in matrix for name in re.split(r",? ", row)]
        for command in re.findall(r"^ *- run: *(.*)$", text, re.M):
            assert command.startswith("make "), (file, command)
            chosen = command[5:] == "${{ matrix.target }}"
            called.update(names if chosen else command[5:].split())
        called.update(re.findall(r"^make ([a-z -]+)$", text, re.M))
    assert called <= targets and (not files or "test" in called)
