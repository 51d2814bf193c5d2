"""Pages of the documentation fit into their windows, from phones to screens.

For the pages that ``make build-docs`` has written, in a browser: ``make check-pages``.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List

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


# Asks the built search, and notes the first pages that it shows.
SEARCH = """<!doctype html><body><pre id="result"></pre><script>
const queries = %s, found = {};
queries.forEach(words => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.dataset.words = words;
  frame.src = "%s/search.html?q=" + encodeURIComponent(words);
});
setTimeout(() => {
  document.querySelectorAll("iframe").forEach(frame => {
    const page = frame.contentDocument;
    const links = [...page.querySelectorAll("#search-results ul.search > li > a")];
    found[frame.dataset.words] = links.slice(0, 3).map(a => a.getAttribute("href"));
  });
  document.getElementById("result").textContent = JSON.stringify(found);
}, 60000);
</script>"""


def run(page: str, folder: Path) -> Any:
    """Open a page in the browser, and read what its script has found.

    Args:
        page: The page; it writes JSON into an element with the id ``result``.
        folder: A folder for what the browser loads.

    Returns:
        What was found.
    """
    harness = folder / "harness.html"
    harness.write_text(page)
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder}", harness.as_uri()]
    output = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r'<pre id="result">(\{.*?\})</pre>', output.stdout)
    assert found, output.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def excess(pages: List[str], window: int, folder: Path) -> Dict[str, int]:
    """Measure by how much pages are wider than a window, with everything unfolded.

    Args:
        pages: Paths of the pages.
        window: Width of the window.
        folder: A folder for what the browser loads.

    Returns:
        Number of pixels by page.
    """
    root = HTML.as_uri()
    return run(HARNESS % (window, json.dumps(pages), root, root), folder)


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
        ("time", "howto/speed"),
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


# What users type, and the page that has to be among the first three
QUERIES = {
    "clipping": "howto/clipping",
    "DP-SGD": "howto/clipping",
    "differential privacy": "howto/clipping",
    "Laplace": "howto/laplace",
    "uncertainty": "howto/laplace",
    "KFAC": "howto/kfac_step",
    "natural gradient": "howto/kfac_step",
    "influence functions": "howto/influence",
    "per-sample gradients": "quantities/BatchGrad",
    "NTK": "quantities/BatchJacobian",
    "memory": "howto/memory",
    "out of memory": "howto/memory",
    "accumulate over batches": "howto/data_set",
    "Monte Carlo": "howto/exact_or_sampled",
    "batch norm": "howto/batch_norm",
    "freeze layers": "howto/freezing",
    "mixed precision": "howto/mixed_precision",
    "autocast": "howto/mixed_precision",
    "multiple GPUs": "howto/several_gpus",
    "distributed": "howto/several_gpus",
    "DDP": "howto/several_gpus",
    "torch.compile": "howto/compile",
    "compile": "howto/compile",
    "faster": "howto/speed",
    "missing field": "howto/debugging",
    "HuggingFace": "howto/stock_models",
    "Hugging Face": "howto/stock_models",
    "LoRA": "howto/stock_models",
    "fine-tuning": "howto/stock_models",
    "transformers": "howto/stock_models",
}


@pytest.mark.slow
@pytest.mark.skipif(not INDEX.is_file(), reason="make build-docs writes the pages")
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_search_shows_tasks_first(tmp_path: Path):
    """The built search leads from words that users type to the page of the task."""
    found = run(SEARCH % (json.dumps(list(QUERIES)), HTML.as_uri()), tmp_path)
    missed = {
        words: found[words]
        for words, page in QUERIES.items()
        if not any(link.startswith(f"{page}.html") for link in found[words])
    }
    assert missed == {}


@pytest.mark.skipif(not INDEX.is_file(), reason="make build-docs writes the pages")
def test_arguments_are_shown():
    """Pages show a constructor's arguments, with defaults and what they mean."""
    page = (HTML / "quantities" / "EKFAC.html").read_text()
    text = re.sub(r"<[^>]+>", "", page)
    assert "dense_limit=16384" in text and "kwargs" not in text
    assert "Number of Monte-Carlo samples." in text


@pytest.mark.skipif(not INDEX.is_file(), reason="make build-docs writes the pages")
@pytest.mark.parametrize("page", ["users", "authors"])
def test_attributes_are_shown_once(page: str):
    """What is an argument of a class is not shown a second time as its attribute."""
    text = (HTML / "api" / f"{page}.html").read_text()
    classes = re.split(r'<dl class="py (?:class|function|method|property)">', text)
    for shown in classes[1:]:
        names = re.findall(r"<li><p><strong>(\w+)</strong>", shown)
        assert len(names) == len(set(names)), names
    assert len(classes) > 20


@pytest.mark.skipif(not INDEX.is_file(), reason="make build-docs writes the pages")
def test_pictures_are_described():
    """The text in place of a picture says what it shows, not the name of its file."""
    texts = {
        page.name: re.findall(r'<img [^>]*srcset[^>]* alt="([^"]*)"', page.read_text())
        for page in (HTML / "gallery").glob("example_*.html")
    }
    assert len(texts) > 20 and all(texts.values())
    assert not [x for found in texts.values() for x in found if x.startswith("example")]
