"""Pages of the documentation fit into their windows, from phones to screens.

For the pages that ``make build-docs`` has written, in a browser: ``make check-pages``.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Dict, List

import pytest

HTML = Path(__file__).parents[1] / "docs_src" / "_build" / "html"
INDEX = HTML / "searchindex.js"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync
--allow-file-access-from-files --virtual-time-budget=600000 --dump-dom""".split()

# Opens each page in a frame of some width, and notes by how much its content is wider.
HARNESS = """<!doctype html><body><iframe id="frame" style="width:%dpx;height:800px;
border:0"></iframe><pre id="result"></pre><script>
const pages = %s, excess = {}, frame = document.getElementById("frame");
let index = 0;
frame.onload = () => setTimeout(() => {
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach(details => details.open = true);
  const root = page.documentElement;
  excess[pages[index]] = root.scrollWidth - root.clientWidth;
  index += 1;
  if (index < pages.length) frame.src = "%s/" + pages[index];
  else document.getElementById("result").textContent = JSON.stringify(excess);
}, 20);
frame.src = "%s/" + pages[0];
</script>"""


def excess(pages: List[str], window: int, folder: Path) -> Dict[str, int]:
    """Measure by how much pages are wider than a window, with everything unfolded.

    Args:
        pages: Paths of the pages.
        window: Width of the window.
        folder: A folder for what the browser loads.

    Returns:
        Number of pixels by page.
    """
    harness = folder / "harness.html"
    root = HTML.as_uri()
    harness.write_text(HARNESS % (window, json.dumps(pages), root, root))
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder}", harness.as_uri()]
    output = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r'<pre id="result">(\{.*?\})</pre>', output.stdout)
    assert found, output.stderr[-2000:]
    return json.loads(found[1])


@pytest.mark.slow
@pytest.mark.skipif(not INDEX.is_file(), reason="make build-docs writes the pages")
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("window", [390, 1400])
def test_no_page_is_wider_than_its_window(window: int, tmp_path: Path):
    """No page scrolls sideways; the page of another width would be seen."""
    pages = [str(p.relative_to(HTML)) for p in sorted(HTML.rglob("*.html"))]
    pages = [p for p in pages if not p.startswith(("_static", "_modules"))]
    wide = tmp_path / "wide.html"
    wide.write_text("<div style='width: 2000px'>wide</div>")
    found = excess([*pages, f"{'../' * 40}{wide}"], window, tmp_path)
    assert found.popitem()[1] > 500
    assert len(found) > 60
    assert {page: pixels for page, pixels in found.items() if pixels > 0} == {}


@pytest.mark.skipif(not INDEX.is_file(), reason="make build-docs writes the pages")
@pytest.mark.parametrize(
    "words, page",
    [
        ("clip", "howto/clipping"),
        ("laplac", "howto/laplace"),
        ("memori", "howto/memory"),
        ("kfac", "howto/kfac_step"),
        ("influenc", "howto/influence"),
        ("timm", "howto/stock_models"),
        ("batch normal", "howto/batch_norm"),
        ("mix precis", "howto/mixed_precision"),
        ("gpus", "howto/several_gpus"),
        ("hug face", "howto/stock_models"),
        ("torchvis", "howto/stock_models"),
        ("dp sgd", "howto/clipping"),
        ("compil", "howto/compile"),
        ("data", "howto/data_set"),
        ("exact sampl", "howto/exact_or_sampled"),
        ("freez", "howto/freezing"),
        ("debug miss field", "howto/debugging"),
        ("privaci", "gallery/example_differential_privacy"),
        ("prune", "gallery/example_pruning"),
        ("spectrum", "gallery/example_ggn_spectrum"),
        ("transform", "gallery/example_transformer"),
    ],
)
def test_search_finds_tasks(words: str, page: str):
    """The title of the right page has what one would search for."""
    text = INDEX.read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    for word in words.split():
        found = index["titleterms"][word]
        names = [
            index["docnames"][n]
            for n in (found if isinstance(found, list) else [found])
        ]
        assert page in names, (word, names)


@pytest.mark.skipif(not INDEX.is_file(), reason="make build-docs writes the pages")
def test_arguments_are_shown():
    """Pages show a constructor's arguments, with defaults and what they mean."""
    page = (HTML / "quantities" / "EKFAC.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    assert "dense_limit=16384" in text and "kwargs" not in text
    assert "Number of Monte-Carlo samples." in text
