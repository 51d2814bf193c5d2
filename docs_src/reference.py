"""Writes the reference of all modules that the page on the API does not show."""

import re
from itertools import groupby
from pathlib import Path
from pkgutil import walk_packages
from typing import List

import backpack
from backpack import extensions

API = Path(__file__).with_name("api.rst")


def modules() -> str:
    """List every public module of the package, by the package it is in.

    Returns:
        reStructuredText.
    """
    shown = set(re.findall(r"automodule:: (\S+)", API.read_text()))
    quantities = ", ".join(extensions.__all__)  # these are shown, too
    names = [info.name for info in walk_packages(backpack.__path__, "backpack.")]
    rest = [name for name in sorted(names) if name not in shown]
    lines: List[str] = []
    for package, members in groupby(rest, lambda name: ".".join(name.split(".")[:3])):
        lines += [package, "~" * len(package), ""]
        for name in members:
            lines += [
                f".. automodule:: {name}",
                f"   :exclude-members: {quantities}",
                "",
            ]
    return "\n".join(lines)
