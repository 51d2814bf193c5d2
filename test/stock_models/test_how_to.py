"""What the documentation says about stock models runs as it is printed."""

import re
from pathlib import Path

import pytest

for name in ("torchvision", "timm", "transformers", "peft"):
    pytest.importorskip(name, reason="`make test-models` installs stock models")

PAGE = Path(__file__).parents[2] / "docs_src" / "howto" / "stock_models.rst"


@pytest.mark.filterwarnings("ignore:.*:FutureWarning:transformers")
def test_code_on_the_page_runs():
    """The page's code runs from top to bottom; it makes assertions."""
    blocks = re.findall(
        r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)", PAGE.read_text()
    )
    code = re.sub(r"^   ", "", "".join(blocks), flags=re.MULTILINE)
    assert len(blocks) == code.count("assert ") == 5
    exec(compile(code, str(PAGE), "exec"), {})
