"""Writes what came out of the table to ``docs_src/models.json``, for the documentation.

A run of some rows replaces what is known of these; rows that are gone are dropped. The
file is written every minute, so that a run that is stopped has not been for nothing.
"""

import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any, Dict, Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

RESULTS = Path(__file__).parents[2] / "docs_src" / "models.json"
REPORTS: Dict[str, Dict[str, Any]] = {}
WRITTEN = [time.monotonic()]  # when the file was, the last time
STATES = ["right", "refused", "wrong", "fails"]  # the last one that occurs counts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Iterator[None]:
    """Attach to the report of a test what it was about, and what came out."""
    report = yield
    about = getattr(item, "stock_model", None)
    if about is not None and report.when == "call":
        state, reason = "right", ""
        if "refusal" in about:
            state, reason = "refused", about["refusal"]
        if call.excinfo is not None:
            wrong = call.excinfo.errisinstance(AssertionError)
            state, reason = "wrong" if wrong else "fails", call.excinfo.exconly()
        report.stock_model = {**about, "state": state, "reason": reason}
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what came out, over sizes."""
    about = getattr(report, "stock_model", None)
    if about is None:
        return
    parts = REPORTS.setdefault(about["row"], {"seconds": 0.0, "parts": {}})
    parts["seconds"] += report.duration
    known = parts["parts"].get(about["part"], {"state": STATES[0]})
    if STATES.index(about["state"]) >= STATES.index(known["state"]):
        first_line = about["reason"].strip().partition("\n")[0]
        reason = shorten(first_line, 300, placeholder=" …")
        known = {"state": about["state"], "reason": reason}
    parts["parts"][about["part"]] = known
    if time.monotonic() > WRITTEN[-1] + 60 and "PYTEST_XDIST_WORKER" not in os.environ:
        write()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, once for all workers."""
    if REPORTS and "PYTEST_XDIST_WORKER" not in os.environ:
        write()


def write() -> None:
    """Write what has come out so far, next to what was known before."""
    from variants import ROWS

    stored = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    rows = {}
    for row in ROWS:
        new = REPORTS.get(row.id, {"parts": {}})
        old = stored.get(row.id, {"seconds": 0, "parts": {}})
        rows[row.id] = {
            "kind": row.kind,
            "name": row.name,
            "setting": row.setting,
            "seconds": round(new.get("seconds", old["seconds"])),
            "parts": {**old["parts"], **new["parts"]},
        }
    packages = ["torch", "transformers", "timm", "torchvision", "peft"]
    results = {
        "versions": {name: version(name).partition("+")[0] for name in packages},
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    WRITTEN.append(time.monotonic())
