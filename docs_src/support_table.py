"""Writes the tables of layers and losses × quantities, from the package's own."""

import re
from typing import Dict, Iterable, List

from support import (
    MEANING,
    OTHER,
    OTHER_PLAIN,
    QUANTITIES,
    Cell,
    Matrix,
    Rule,
    of_layers,
    of_losses,
)

from backpack.core.table import LAYERS

SYMBOLS: Dict[Rule, str] = {
    Rule.FAST: "●",
    Rule.MODULE: "◆",
    Rule.GENERIC: "○",
    Rule.AUTOGRAD: "–",
    Rule.REFUSED: "✗",
}
# by the file of PyTorch that a layer is defined in
FAMILIES: Dict[str, str] = {
    "linear": "Linear layers",
    "conv": "Convolutions",
    "sparse": "Embeddings",
    "rnn": "Recurrent layers",
    "batchnorm": "Normalization",
    "instancenorm": "Normalization",
    "normalization": "Normalization",
    "activation": "Activations",
    "pooling": "Pooling",
    "padding": "Padding",
    "dropout": "Dropout",
    "flatten": "Changes of shape",
    "channelshuffle": "Changes of shape",
    "pixelshuffle": "Changes of shape",
    "upsampling": "Changes of shape",
    "custom": "Modules of BackPACK",
    "other": "Everything else",
}


def list_table(
    header: List[str], rows: Iterable[List[str]], style: str = "support"
) -> List[str]:
    """Write a table.

    Args:
        header: Titles of the columns.
        rows: The cells of each row.
        style: How it is shown, see ``_static/backpack.css``. Default: ``"support"``.

    Returns:
        Lines of reStructuredText.
    """
    lines = [".. list-table::", "   :header-rows: 1", f"   :class: {style}", ""]
    for row in [header, *rows]:
        lines += [
            f"   {'*' if first else ' '} - {cell}"
            for first, cell in zip([True] + [False] * len(row), row)
        ]
    return lines + [""]


def groups(matrix: Matrix) -> List[List[str]]:
    """Collect neighboring quantities that have the same cell in each row.

    Args:
        matrix: Cells by the names of layer and quantity.

    Returns:
        Names of quantities, a list for each group.
    """
    found: List[List[str]] = []
    for name in (quantity.__name__ for quantity in QUANTITIES):
        if found and all(row[name] == row[found[-1][-1]] for row in matrix.values()):
            found[-1].append(name)
        else:
            found.append([name])
    return found


def write(
    matrix: Matrix, columns: List[List[str]], title: str, notes: List[str]
) -> List[str]:
    """Write a matrix, with a column for each group of quantities.

    Args:
        matrix: Cells by the names of layer and quantity.
        columns: Names of quantities, a list for each column.
        title: Title of the first column.
        notes: Notes that were made before; new ones are added.

    Returns:
        Lines of reStructuredText.
    """

    def entry(cell: Cell) -> str:
        if not cell.note:
            return SYMBOLS[cell.rule]
        if cell.note not in notes:
            notes.append(cell.note)
        return f"{SYMBOLS[cell.rule]} [{notes.index(cell.note) + 1}]"

    rows = [
        [name if " " in name else f"``{name}``"]
        + [entry(row[names[0]]) for names in columns]
        for name, row in matrix.items()
    ]
    return list_table([title, *map(heading, columns)], rows)


def heading(names: List[str]) -> str:
    """Name a column; a long list is named by its ends.

    Args:
        names: Names of the quantities that share it.

    Returns:
        Its title.
    """
    shown = names if len(names) <= 2 else [names[0], "…", names[-1]]
    return " ".join(name if name == "…" else f"``{name}``" for name in shown)


def folded(title: str, lines: List[str]) -> List[str]:
    """Fold a table, so that only its title is seen.

    Args:
        title: The title.
        lines: Lines of reStructuredText.

    Returns:
        Lines of reStructuredText.
    """
    return [f".. dropdown:: {title}", "", *(f"   {x}".rstrip() for x in lines), ""]


def families() -> Dict[str, List[str]]:
    """Sort layers by the part of PyTorch's documentation that they are in.

    Returns:
        Names of layers by the title of their family.
    """
    found: Dict[str, List[str]] = {title: [] for title in FAMILIES.values()}
    for layer in LAYERS:
        package, part = layer.__module__.split(".")[0], layer.__module__.split(".")[-1]
        family = FAMILIES["custom" if package == "backpack" else part]
        found[family].append(layer.__name__)
    found[FAMILIES["other"]] = [OTHER, OTHER_PLAIN]
    return found


def table() -> str:
    """Write a table for each family, what the cells mean, and the notes.

    Returns:
        reStructuredText.
    """
    notes: List[str] = []
    lines: List[str] = []
    for rule, meaning in MEANING.items():
        lines += [f"{SYMBOLS[rule]} **{rule.value}**", f"   {meaning}", ""]
    layers, losses = of_layers(), of_losses()
    columns = groups(layers)
    lines += [
        f"{heading(names)} stands for {', '.join(f'``{n}``' for n in names)}.\n"
        for names in columns
        if len(names) > 2
    ]
    for title, names in families().items():
        part = {name: layers[name] for name in names}
        body = write(part, columns, "layer", notes)
        lines += folded(f"{title} ({len(names)})", body)
    body = write(losses, groups(losses), "loss", notes)
    lines += folded(f"Losses ({len(losses)})", body)
    lines += ["Notes:", ""]
    names = "|".join(quantity.__name__ for quantity in QUANTITIES)
    code = re.compile(rf"\b(?:weight_sharing=\.\.\.|EmbeddingBag|{names})(?!\w)")
    shown = (code.sub(r"``\g<0>``", note) for note in notes)
    lines += [f"{number}. {note}" for number, note in enumerate(shown, start=1)]
    return "\n".join(lines + [""])
