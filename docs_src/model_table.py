"""Writes the tables of stock models from what `make test-models` found."""

import json
from pathlib import Path
from typing import Any, Dict, List

from support_table import folded, list_table

RESULTS = Path(__file__).parent / "models.json"
MOST_ROWS = 40  # of a table that is unfolded
COLUMNS = {
    "first order": "first order",
    "DiagGGNExact": "``DiagGGNExact``",
    "Kronecker": "``KFLR``, ``KFAC``",
}
# what the tests look at besides, and say only if something is amiss
OTHERS = ["side effects"]
ORDER = ["right", "refused", "fails", "wrong"]


def entry(result: Dict[str, str], notes: List[str]) -> str:
    """Write a cell, with the number of a note that gives the reason.

    Args:
        result: State and reason.
        notes: Notes that were made before; a new one is added.

    Returns:
        Its text.
    """
    state, reason = result["state"], result.get("reason", "")
    if not reason:
        return state
    if reason not in notes:
        notes.append(reason)
    return f"{state} [{notes.index(reason) + 1}]"


def cells(row: Dict[str, Any], notes: List[str]) -> List[str]:
    """Write the cells of a model.

    Args:
        row: Name, setting and results of a row.
        notes: Notes that were made before; new ones are added.

    Returns:
        Texts of the cells.
    """
    parts = row["parts"]
    texts = [entry(parts[part], notes) if part in parts else "" for part in COLUMNS]
    for part in OTHERS:
        if parts.get(part, {"state": "right"})["state"] not in ("right", "refused"):
            texts[0] += f"; {part}: {entry(parts[part], notes)}"
    return [row["name"], row["setting"], *texts]


def tables() -> str:
    """Write how many models there are, a table for each kind, and the notes.

    Returns:
        reStructuredText.
    """
    results = json.loads(RESULTS.read_text())
    rows = results["rows"].values()
    states = [
        part["state"]
        for row in rows
        for name, part in row["parts"].items()
        if name in COLUMNS
    ]
    counts = [f"{states.count(state)} {state}" for state in ORDER if state in states]
    names = {row["name"] for row in rows}
    versions = [f"{name} {number}" for name, number in results["versions"].items()]
    lines = [
        f"{len(names)} architectures in {len(rows)} settings: {', '.join(counts)}. "
        f"With {', '.join(versions)}.",
        "",
    ]
    notes: List[str] = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        body = [cells(row, notes) for row in rows if row["kind"] == kind]
        header = ["model", "setting", *COLUMNS.values()]
        for start in range(0, len(body), MOST_ROWS):
            part = body[start : start + MOST_ROWS]
            title = f"{kind} ({start + 1} to {start + len(part)} of {len(body)})"
            title = title if len(body) > MOST_ROWS else f"{kind} ({len(body)})"
            # a column without entries is left out
            shown = [column for column in zip(header, *part) if any(column[1:])]
            first, *others = (list(row) for row in zip(*shown))
            lines += folded(title, list_table(first, others))
    if notes:
        body = [f"{i}. ``{literal(note)}``" for i, note in enumerate(notes, start=1)]
        lines += folded(f"Notes ({len(notes)})", body)
    return "\n".join(lines + [""])


def literal(text: str) -> str:
    """Prepare a message to be shown as it is; a sentence that was cut is left out."""
    text = text.replace("`", "'").strip()
    return f"{text.rpartition('. ')[0]}. …" if text.endswith("…") else text
