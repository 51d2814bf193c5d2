"""Writes the table of layers with formulas, from the package's own table."""

from typing import Iterable, List

from backpack.extensions.layers import LAYERS, LOSSES


def list_table(header: List[str], rows: Iterable[List[str]]) -> List[str]:
    """Write a table.

    Args:
        header: Titles of the columns.
        rows: The cells of each row.

    Returns:
        Lines of reStructuredText.
    """
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [header, *rows]:
        lines += [
            f"   {'*' if first else ' '} - {cell}"
            for first, cell in zip([True] + [False] * len(row), row)
        ]
    return lines + [""]


def table() -> str:
    """Write the tables of layers and losses.

    Returns:
        reStructuredText.
    """
    layers = [
        [f"``{layer.__name__}``", ", ".join(f"``{name}``" for name in row.params)]
        for layer, row in LAYERS.items()
    ]
    losses = ", ".join(f"``{loss.__name__}``" for loss in LOSSES)
    lines = list_table(["layer", "parameters"], layers)
    lines += [
        f"Losses with formulas: {losses}. The Hessian of any other loss module with a "
        "scalar output comes from automatic differentiation.",
        "",
    ]
    return "\n".join(lines)
