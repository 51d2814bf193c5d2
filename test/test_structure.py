"""How the package is built: files that are short enough to read, imports one way.

Imports for types and those inside of functions count like all others.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Dict, Iterator, Set

import pytest

import backpack

PACKAGE = Path(backpack.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
}


def _file(module: str) -> str:
    return module if module in FILES else f"{module}.__init__"


def _imported(name: str) -> Iterator[str]:
    """Yield the files that a file names in its imports."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (_file(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                part = _file(f"{node.module}.{alias.name}")
                yield part if part in FILES else _file(f"{node.module}")


IMPORTS: Dict[str, Set[str]] = {
    name: set(_imported(name)) & set(FILES) for name in FILES
}
# Each room takes from those before it only
ROOMS = (
    *("utils", "core", "engine.nodes", "engine.samples", "engine.forward"),
    *("engine.backward", "extensions"),
)
MAX_LINES = 600


def test_no_circle():
    """No file imports itself through others."""
    TopologicalSorter(IMPORTS).prepare()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_take_from_those_before(room: str):
    """The maths does not know the engine, nor the engine the quantities."""
    later = tuple(f"backpack.{name}." for name in ROOMS[ROOMS.index(room) + 1 :])
    inside = [name for name in FILES if name.startswith(f"backpack.{room}.")]
    found = [(x, y) for x in inside for y in IMPORTS[x] if y.startswith(later or "?")]
    assert inside and not found


def test_files_are_short():
    """A file is read in one sitting."""
    lines = {name: len(file.read_text().splitlines()) for name, file in FILES.items()}
    assert lines and not {x: n for x, n in lines.items() if n > MAX_LINES}
