"""Writes the tables of layers and losses × quantities, from the package's own."""

from typing import Iterable, List

from support import (
    MEANING,
    QUANTITIES,
    Cell,
    Matrix,
    of_layers,
    of_losses,
)


def list_table(header: List[str], rows: Iterable[List[str]]) -> List[str]:
    """Write a table.

    Args:
        header: Titles of the columns.
        rows: The cells of each row.

    Returns:
        Lines of reStructuredText.
    """
    lines = [".. list-table::", "   :header-rows: 1", "   :class: support", ""]
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


def write(matrix: Matrix, title: str, notes: List[str]) -> List[str]:
    """Write a matrix, with a column for each group of quantities.

    Args:
        matrix: Cells by the names of layer and quantity.
        title: Title of the first column.
        notes: Notes that were made before; new ones are added.

    Returns:
        Lines of reStructuredText.
    """

    def entry(cell: Cell) -> str:
        if not cell.note:
            return cell.rule.value
        if cell.note not in notes:
            notes.append(cell.note)
        return f"{cell.rule.value} [{notes.index(cell.note) + 1}]"

    columns = groups(matrix)
    rows = [
        [name if " " in name else f"``{name}``"]
        + [entry(row[names[0]]) for names in columns]
        for name, row in matrix.items()
    ]
    lines = [[f"| ``{name}``" for name in names] for names in columns]
    header = [title] + ["\n       ".join(names) for names in lines]
    return list_table(header, rows)


def table() -> str:
    """Write both tables, what their cells mean, and the notes.

    Returns:
        reStructuredText.
    """
    notes: List[str] = []
    lines: List[str] = []
    for rule, meaning in MEANING.items():
        lines += [f"**{rule.value}**", f"   {meaning}", ""]
    lines += write(of_layers(), "layer", notes)
    lines += write(of_losses(), "loss", notes)
    lines += ["Notes:", ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join(lines + [""])
