"""Writes the reference of all modules that the pages on the API do not show."""

import re
from pathlib import Path
from pkgutil import walk_packages
from typing import Dict, List

from quantity_pages import put

import backpack
from backpack import extensions

PAGES = Path(__file__).with_name("api")


def modules() -> Dict[str, List[str]]:
    """List every public module of the package that no page shows.

    Returns:
        Names of modules by the page they are on: that of their package.
    """
    shown = {
        line.split()[-1]
        for page in PAGES.glob("*.rst")
        for line in page.read_text().splitlines()
        if line.startswith(".. automodule:: ")
    }
    infos = list(walk_packages(backpack.__path__, "backpack."))
    packages = {info.name for info in infos if info.ispkg}
    found: Dict[str, List[str]] = {}
    for name in sorted({info.name for info in infos} - shown):
        one, two = (".".join(name.split(".")[:depth]) for depth in (2, 3))
        found.setdefault(two if two in packages else one, []).append(name)
    return found


def write(folder: Path) -> None:
    """Write a page for each package.

    Args:
        folder: Where the pages go.
    """
    folder.mkdir(exist_ok=True)
    text = "\n".join(page.read_text() for page in PAGES.glob("*.rst"))
    shown = re.findall(r"auto(?:class|function):: ([\w.]+)(?:\(\))?$", text, re.M)
    exported = {f"backpack.{name}" for name in backpack.__all__ if name != "extensions"}
    for package, members in modules().items():
        heading = package.replace(".", ".\u200b")  # where phones may go to a new line
        lines = [heading, "=" * len(heading), ""]
        for name in members:
            if name != package:
                title = name[len(package) + 1 :]
                lines += [title, "-" * len(title), ""]
            lines += [f".. automodule:: {name}"]
            own = [
                path[len(name) + 1 :] for path in shown if path.startswith(f"{name}.")
            ]
            # what has a place of its own
            excluded = ", ".join([*extensions.__all__, *own])
            # a function of the same name as its module is shown to users
            hidden = ["   :no-index:"] if name in exported else []
            lines += [f"   :exclude-members: {excluded}", *hidden, ""]
            if own or hidden:
                lines += ["What users call is :doc:`elsewhere <../api/users>`.", ""]
        if f"automodule:: {package}." in text:
            lines += [f"Other modules of ``{package}`` are for users and authors of "]
            lines += [
                "extensions, and have :doc:`pages of their own <../api/index>`.",
                "",
            ]
        put(folder / f"{package}.rst", "\n".join(lines))
