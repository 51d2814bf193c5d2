"""The scripts in ``examples/`` run; those that were there in 1.7, with its calls alone.

Each script checks its own results with plain autograd, so that running it is a test. It
is a page of the gallery: it must print what it is about, and draw something. Those of
1.7 use nothing but what ``public_interface.txt`` promises.
The code in the developer manual runs, too, and what it quotes is in the library.
"""

import ast
import os
import re
import runpy
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple

import pytest
from test_public_paths import PATHS, PROMISES, parse

from backpack.utils import examples

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
MANUAL = ROOT / "README-dev.md"

# The scripts, and something that each of them prints
SCRIPTS: Dict[str, str] = {
    "all_in_one": "BatchDiagHessian   .diag_h_batch          [8, 3, 1, 5, 5]",
    "batched_jacobians": "with respect to 0.weight: [100, 10, 4, 1, 5, 5]",
    "cg_newton": "GGNMP  loss: ",
    "custom_module": "3.weight  grad_batch and diag_ggn_exact: [64, 12], [12]",
    "diag_ggn_optimizer": "DiagGGNMC         loss",
    "distributed": "All processes have the parameters of a training by one process",
    "extension_hook": "The hook was called for: loss, 6, 5, 4, 3, 2, 1, 0",
    "first_order_resnet": "blocks.0.conv1.weight    [8, 8, 4, 3, 3]",
    "grad_of_variance": "weight of the noise 0.02: loss",
    "resnet_all_in_one": "by hand: Conv2d Sigmoid Identity Conv2d Sigmoid",
    "retain_graph": "A further pass fails",
    "rnn": "LSTM, converted",
    "save_memory_convolutions": "Largest tensor while computing sqrt_ggn_exact",
    "subsampling": "% off",
    "trace_estimation": "1000 vectors",
}
# Those of tasks, which use what 1.7 does not have
SCRIPTS_OF_TASKS: Dict[str, str] = {
    "compiled_step": "The compiled step computes what the plain one does.",
    "differential_privacy": "Clipping agrees with a loop",
    "ggn_spectrum": "They are eigenvectors.",
    "influence": "Products between batches agree with autograd.",
    "kfac_training": "KFAC: loss 0.0",
    "laplace": "Laplace, all layers: confidence",
    "noise_scale": "Noise scale",
    "pruning": "50 %: loss",
    "transformer": "KFAC",
}
ALL_SCRIPTS = {**SCRIPTS, **SCRIPTS_OF_TASKS}
# They take long: the gallery's build runs them, and the long flag
LEFT_TO_THE_GALLERY = {"kfac_training", "transformer", "influence", "distributed"}
if "BACKPACK_TEST_LONG" in os.environ:
    LEFT_TO_THE_GALLERY = set()


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def path(name: str) -> Path:
    """Locate a script.

    Args:
        name: Its name in the table.

    Returns:
        The file.
    """
    return FOLDER / f"example_{name}.py"


def test_table_is_complete():
    """Every script in the folder has a row, and the other way around."""
    assert {path(name) for name in ALL_SCRIPTS} == set(FOLDER.glob("example_*.py"))


@pytest.mark.slow
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "name", [x for x in ALL_SCRIPTS if x not in LEFT_TO_THE_GALLERY]
)
def test_runs(name: str, capsys, monkeypatch):
    """A script runs to its end, warns of nothing, and says what it is about."""
    monkeypatch.delenv(examples.MNIST_FOLDER_VARIABLE, raising=False)
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: None)
    runpy.run_path(str(path(name)), run_name="__main__")
    printed = capsys.readouterr()
    assert ALL_SCRIPTS[name] in printed.out
    assert not printed.err
    assert pyplot.get_fignums(), "a page of the gallery has a picture"
    pyplot.close("all")


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_is_a_page(name: str):
    """A script has a title, cells with text, and no more than 120 lines of code."""
    text = path(name).read_text()
    title, line = ast.get_docstring(ast.parse(text)).splitlines()[:2]
    assert set(line) == {"="} and len(line) == len(title)
    assert text.count("\n# %%\n") >= 2
    code = [x for x in text.split('"""', 2)[2].splitlines() if x and x[0] != "#"]
    assert len(code) <= 120
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, DOCUMENTED)]
    assert all(ast.get_docstring(node) for node in nodes)


# What 1.7 promises: names by module, and the arguments of functions and classes; and
# what has no counterpart there

NAMES: Dict[str, Set[str]] = {module: set(names) for module, names in PATHS.items()}
NAMES["backpack.distributed"] = {"reduce"}
ARGUMENTS: Dict[str, Set[str]] = {}
for promise in PROMISES:
    NAMES.setdefault(promise.module, set()).update(promise.path[:1])
    if promise.signature is not None and promise.path[-1] in (
        promise.path[0],
        "__init__",
    ):
        arguments = {name for name, _ in parse(promise.signature)} - {"self"}
        ARGUMENTS.setdefault(promise.path[0], set()).update(arguments)


def imports(tree: ast.Module) -> Iterator[Tuple[str, str]]:
    """List what a script imports from the library.

    Args:
        tree: The script.

    Yields:
        Modules and names.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((x.name, "") for x in node.names if "backpack" in x.name)
        elif isinstance(node, ast.ImportFrom) and "backpack" in str(node.module):
            yield from ((node.module, x.name) for x in node.names)


def keywords(tree: ast.Module, names: Set[str]) -> Iterator[Tuple[str, str]]:
    """List the keyword arguments with which a script calls some functions.

    Args:
        tree: The script.
        names: Names of the functions.

    Yields:
        Names of functions and arguments.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in names:
                yield from ((node.func.id, str(k.arg)) for k in node.keywords)


def violations(tree: ast.Module) -> List[Any]:
    """List what a script uses that 1.7 does not have.

    Args:
        tree: The script.

    Returns:
        Modules with names, and functions with arguments.
    """
    used = list(imports(tree))
    unknown = [(m, name) for m, name in used if name not in NAMES.get(m, ())]
    called = keywords(tree, {name for _, name in used})
    return [*unknown, *((f, k) for f, k in called if k not in ARGUMENTS.get(f, ()))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_uses_calls_of_1_7(name: str):
    """A script imports and passes only what BackPACK 1.7 has, or has no way to do."""
    tree = ast.parse(path(name).read_text())
    assert dict(imports(tree)).get("backpack.utils.examples"), "no MNIST images"
    assert violations(tree) == []


@pytest.mark.parametrize(
    "script, expected",
    [
        ("from backpack import backpack, extend\nextend(m, use_converter=True)", []),
        ("from backpack import memory", [("backpack", "memory")]),
        ("import backpack.report", [("backpack.report", "")]),
        (
            "from backpack.extensions import BatchDotGrad",
            [("backpack.extensions", "BatchDotGrad")],
        ),
        (
            "from backpack import backpack\nbackpack(check=True)",
            [("backpack", "check")],
        ),
        (
            "from backpack.extensions import KFAC\nKFAC(mc_samples=1, generator=g)",
            [("KFAC", "generator")],
        ),
    ],
)
def test_violations_are_seen(script: str, expected: List[Tuple[str, str]]):
    """What 1.7 does not have is found."""
    assert violations(ast.parse(script)) == expected


# The developer manual: blocks that begin with a file's name quote it, others run


def blocks() -> List[Tuple[str, str]]:
    """Cut the manual's Python code into blocks.

    Returns:
        For each block the file that it quotes, empty for code to run; and the code.
    """
    found = re.findall(r"```python\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    pairs = [block.split("\n", 1) for block in found]
    return [
        (first[2:], rest) if first.startswith("# ") else ("", f"{first}\n{rest}")
        for first, rest in pairs
    ]


def test_manual_runs():
    """The manual's own code runs from top to bottom; it makes assertions."""
    code = "\n".join(code for file, code in blocks() if not file)
    assert code.count("assert ") == 6
    exec(compile(code, str(MANUAL), "exec"), {"__name__": "manual"})


def test_manual_quotes():
    """What the manual quotes is in the file that it names."""
    quotes = [(file, code) for file, code in blocks() if file]
    assert len(quotes) == 13
    for file, code in quotes:
        assert code in (ROOT / file).read_text(), f"{file} has changed:\n{code}"
