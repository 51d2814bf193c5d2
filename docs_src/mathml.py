"""Formulas as MathML, which browsers show without scripts and without a network."""

import re
from typing import Any, Dict

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def translate(formula: str, as_block: bool = False) -> str:
    """Translate a formula, in which bars of norms do not grow, as brackets do not.

    Args:
        formula: The formula in LaTeX.
        as_block: Whether it is on lines of its own. Default: ``False``.

    Returns:
        The formula in MathML.
    """
    text = tex2mathml(formula, as_block=as_block)
    return re.sub("<mo([^>]*)>‖", r'<mo\1 stretchy="false">‖', text)


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line of text.

    Args:
        translator: What writes the page.
        node: The formula.

    Raises:
        SkipNode: Always: there is nothing inside to be visited.
    """
    translator.body.append(translate(node.astext()))
    raise nodes.SkipNode


def display(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on lines of its own.

    Args:
        translator: What writes the page.
        node: The formula.

    Raises:
        SkipNode: Always: there is nothing inside to be visited.
    """
    formula = translate(node.astext(), as_block=True)
    translator.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> Dict[str, Any]:
    """Register what writes formulas.

    Args:
        app: The builder of the documentation.

    Returns:
        What it is safe for.
    """
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
