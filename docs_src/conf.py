"""Settings of Sphinx; ``make build-docs`` builds the documentation."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "test")]

import model_table  # noqa: E402
import reference  # noqa: E402
import support_table  # noqa: E402

project = "BackPACK"
author = "The BackPACK authors"
copyright = "2025, The BackPACK authors"
version = release = installed_version("backpack-for-pytorch")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_generated"]
# two classes are called Call, and type hints name no module
suppress_warnings = ["ref.python"]

# the examples of these pages are run; those in docstrings are excerpts
doctest_test_doctest_blocks = ""

autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "member-order": "bysource",
    "ignore-module-all": True,
}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "alabaster"
html_theme_options = {
    "description": "More than a gradient from one backward pass",
    "fixed_sidebar": True,
    "page_width": "1080px",
    "sidebar_width": "230px",
}

# written from the package itself: the table of layers, and the pages of all modules;
# from what the tests found: the table of models
generated = HERE / "_generated"
generated.mkdir(exist_ok=True)
(generated / "support.rst").write_text(support_table.table())
(generated / "models.rst").write_text(model_table.tables())
(generated / "modules.rst").write_text(reference.modules())
