"""Is a value a sum of functions of one sample each?

A loss may bring samples together by operations that only add up: then each sample still
has a part of its own.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Sequence

import torch
from torch.autograd.graph import GradientEdge, Node

from backpack.core.layout import Mixed, has_bit
from backpack.engine.nodes.graph import has_use
from backpack.engine.nodes.uses import constants_at
from backpack.engine.nodes.vjp import is_function, operation_of, pull
from backpack.engine.samples.gaps import differ, explain_parents, sources_of
from backpack.engine.samples.probes import Source, takes_any, zeros_at
from backpack.utils.state import state
from backpack.utils.types import drawn_like

# Linear in each operand
_LINEAR = frozenset(
    "Sum Mean Nansum Add Sub Rsub Neg Mul Div Lerp Dot Mv Mm Bmm Addmm Trace Cumsum "
    "Stack Cat Split SplitWithSizes Unbind Select Slice Index IndexSelect Gather "
    "Scatter MaskedSelect MaskedFill ScatterAdd IndexAdd IndexPut AsStrided Diagonal "
    "DiagEmbed Copy CopySlices View UnsafeView ReshapeAlias Squeeze Unsqueeze Expand "
    "Transpose T Permute Flip Repeat ConstantPadNd Clone Alias ToCopy _Together".split()
)


def is_separable(roots: Sequence[GradientEdge]) -> bool:
    """Tell whether a value is a sum of functions of one sample each.

    That is, whether it has no second derivative with respect to two samples, and only
    linear operations where samples meet.

    Args:
        roots: Where the value sits in the graph.

    Returns:
        Whether it is known to be, as a function of what the last uses have computed.
    """
    sources, nodes = sources_of(roots, past_meetings=True)
    if len({source.known.n for source in sources}) != 1:
        return False
    known = {source.edge[:2] for source in sources}
    places = [
        *roots,
        *(GradientEdge(*x) for node in nodes for x in node.next_functions),
    ]
    beside = [x for x in places if x.node in nodes and x[:2] not in known]
    if any(has_use(x.node) and takes_any(x, constants_at(x.node)) for x in beside):
        return False
    with suppress(Exception), state().pull(), torch.enable_grad():
        return all(map(_may_take, nodes)) and _has_no_mixed_derivatives(roots, sources)
    return False


def _may_take(node: Node) -> bool:
    """Tell whether an operation is linear, or gets the same samples everywhere.

    Else, samples that meet in a function made of lines would have no second derivative
    for some numbers. Functions of one's own need not have a true one.
    """
    if operation_of(node) in _LINEAR:
        return True
    if is_function(node):
        return False
    operands = explain_parents(node)
    met = any(isinstance(x.placement, Mixed) for x in operands)
    return not (met or differ(operands))


def _has_no_mixed_derivatives(
    roots: Sequence[GradientEdge], sources: Sequence[Source]
) -> bool:
    edges, n = [source.edge for source in sources], sources[0].known.n
    ones = [torch.ones_like(zeros_at(edge)) for edge in roots]
    pulled = pull(roots, edges, ones, create_graph=True)
    numbers = [source.numbers(ones[0].device) for source in sources]
    both = [
        (g, i) for g, i in zip(pulled, numbers) if g is not None and g.requires_grad
    ]
    gradients = [g for g, _ in both]
    for bit in range((n - 1).bit_length() if both else 0):
        vectors = zip(drawn_like(gradients), both)
        masked = [v * has_bit(i, bit) for v, (_, i) in vectors]
        for h, i in zip(pull(gradients, edges, masked), numbers):
            if h is not None and bool(h[has_bit(i, bit, 0)].any()):
                return False
    return True
