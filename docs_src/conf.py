"""Settings of Sphinx; ``make build-docs`` builds the documentation."""

import inspect
import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, List, Optional, get_type_hints

from docutils.nodes import container, document, title
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx_gallery.directives import imgsgnode

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "test")]

import model_table  # noqa: E402
import quantity_pages  # noqa: E402
import reference  # noqa: E402
import support_table  # noqa: E402
import torch_inventory  # noqa: E402

from backpack.extensions.backprop_extension import BackpropExtension  # noqa: E402

project = "BackPACK"
author = "The BackPACK authors"
copyright = "2025, The BackPACK authors"
version = release = installed_version("backpack-for-pytorch")

extensions = [
    "mathml",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery/*.ipynb"]

# Each reference leads somewhere, but for types of Python, of no public name, or without
# a page of their own
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"\w+"),
    ("py:class", r"(abc|contextlib|fractions|weakref)\..*"),
    ("py:class", r"(.*\.)?(_\w+|[A-Z])(\..*)?"),
    ("py:class", r"torch\.(distributed|overrides|nn\.utils\.rnn|utils\.hooks)\..*"),
    ("py:class", r"backpack\.(converter\.function\.Call|summary\.Summary)"),
]

# the examples of these pages are run; those in docstrings are excerpts
doctest_test_doctest_blocks = ""

# Docstrings: every argument with its type, a class's own members once
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "member-order": "bysource",
    "ignore-module-all": True,
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autoclass_content = "both"
autosummary_generate = False
python_maximum_signature_line_length = 70

# One signature of what type checkers see several of
analyzer = ModuleAnalyzer.for_module("backpack")
analyzer.analyze()
analyzer.overloads.clear()


def show_arguments(cls: type) -> None:
    """Let a class and its subclasses show the constructor's arguments and their types.

    Args:
        cls: A class with a ``__new__`` that hides them.
    """
    _, *arguments = inspect.signature(cls.__init__).parameters.values()
    types = get_type_hints(cls.__init__)
    cls.__signature__ = inspect.Signature(
        [x.replace(annotation=types.get(x.name, x.annotation)) for x in arguments]
    )
    for subclass in cls.__subclasses__():
        show_arguments(subclass)


show_arguments(BackpropExtension)


def leave_out(
    app: Sphinx, what: str, name: str, item: Any, options: Any, lines: List[str]
) -> None:
    """Leave out what a constructor says of itself: its arguments belong to the class.

    What a constructor from elsewhere says is left out as a whole. Attributes that are
    arguments, too, are listed once, with the arguments.

    Args:
        app: The builder of the documentation.
        what: The kind of item.
        name: Its name.
        item: The item.
        options: How it is shown.
        lines: Its docstring; a constructor's loses its first line.
    """
    own = inspect.getdoc(item.__init__) if what == "class" else None
    if own and lines[:1] == own.splitlines()[:1]:
        is_ours = getattr(item.__init__, "__module__", "").startswith("backpack")
        del lines[: 1 if is_ours else None]
    elif own and "Attributes:" in lines:
        known = re.findall(r"^    (\w+): ", own, re.MULTILINE)
        text, attributes = "\n".join([*lines, ""]).split("\nAttributes:\n")
        entry = rf"    (?:{'|'.join(known)}): .*\n(?:     .*\n)*"
        attributes = re.sub(entry, "", attributes) if known else attributes
        header = ["Attributes:"] if attributes.strip() else []
        lines[:] = [*text.split("\n"), *header, *attributes.split("\n")]
    lines[:] = [line for line in lines if not line.startswith("Create new instance of")]


def skip_known(
    app: Sphinx, what: str, name: str, item: Any, skip: bool, options: Any
) -> Optional[bool]:
    """Leave out what is known: fields of named tuples, and the ``repr`` of modules.

    The docstring of their class describes fields.

    Args:
        app: The builder of the documentation.
        what: The kind of item.
        name: Its name.
        item: The item.
        skip: Whether it would be left out.
        options: How it is shown.

    Returns:
        ``True`` for those, ``None`` for everything else.
    """
    known = name == "extra_repr" or type(item).__name__ == "_tuplegetter"
    return True if known else None


def show_pictures(app: Sphinx, doctree: document) -> None:
    """Put pictures of the gallery into boxes in which they scroll on phones.

    Where axes have no titles, the text in place of a picture is that of the headings.

    Args:
        app: The builder of the documentation.
        doctree: A page.
    """
    for picture in list(doctree.findall(imgsgnode)):
        if picture["alt"].startswith("example "):
            headings = [
                next(doctree.findall(title)),
                next(picture.parent.findall(title)),
            ]
            picture["alt"] = "Plot: " + ". ".join(x.astext() for x in headings)
        box = container(classes=["drawing"])
        picture.replace_self(box)
        box += picture


def setup(app: Sphinx) -> None:
    """Register what changes docstrings before they are parsed, and pages after it.

    Args:
        app: The builder of the documentation.
    """
    app.connect("doctree-read", show_pictures)
    app.connect("autodoc-process-docstring", leave_out, priority=400)
    app.connect("autodoc-skip-member", skip_known)


napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Links into other documentation. What is linked to in PyTorch's is listed in
# torch_inventory.py, so that no network is needed.
inventory = HERE / "_generated" / "torch.inv"
intersphinx_mapping = {"torch": (torch_inventory.URL, str(inventory))}

# The gallery: each script is run, and a failing one fails the build
sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/example_",
    "ignore_pattern": r"^demo\.py",
    "within_subsection_order": "gallery_order.ByTask",
    "doc_module": ("backpack",),
    "backreferences_dir": "_generated/backreferences",
    "prefer_full_module": {r"backpack\.extensions"},
    "reference_url": {"backpack": None},
    "abort_on_example_error": False,
    "only_warn_on_example_error": False,
    "capture_repr": (),
    "remove_config_comments": True,
    "thumbnail_size": (480, 320),
    # each page has its own; their list would load styles from the network
    "write_computation_times": False,
    "plot_gallery": "True",
}

# Layout
html_theme = "furo"
html_title = f"BackPACK {release}"
html_static_path = ["_static"]
html_css_files = ["backpack.css"]
html_favicon = html_logo = "_static/logo.svg"
html_math_renderer = "mathml"
html_search_scorer = str(HERE / "search_scores.js")
html_use_index = html_domain_indices = False  # the search finds names
html_copy_source = html_show_sourcelink = True
html_theme_options = {
    "top_of_page_buttons": ["view"],
    "navigation_with_keys": True,
    "light_css_variables": {
        "color-brand-primary": "#a8450c",
        "color-brand-content": "#a8450c",
    },
    "dark_css_variables": {
        "color-brand-primary": "#ff9d5c",
        "color-brand-content": "#ff9d5c",
    },
}
# whoever hosts the source names its address, and gets links to edit each page
if repository := os.environ.get("DOCS_REPOSITORY"):
    html_theme_options.update(
        source_repository=repository,
        source_branch=os.environ.get("DOCS_BRANCH", "main"),
        source_directory="docs_src/",
        top_of_page_buttons=["view", "edit"],
    )
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# Written from the package itself: the table of layers, a page for each quantity, the
# reference of all modules. From what the tests found: the table of models. From what
# the benchmark recorded: charts
generated = HERE / "_generated"
generated.mkdir(exist_ok=True)
(generated / "support.inc").write_text(support_table.table())
(generated / "models.inc").write_text(model_table.tables())
quantity_pages.charts(generated)
torch_inventory.write(inventory)
reference.write(HERE / "internals")
quantity_pages.write(HERE / "quantities")
