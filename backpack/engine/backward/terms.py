"""How a loss is made of terms, by the graph: what is added up, and of which parts."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node

from backpack.core.layout import Mixed
from backpack.engine.nodes.graph import (
    HOOKED,
    MEETING,
    TOGETHER,
    entries_of,
    is_leaf,
    is_scalar,
    parents,
    shape_at,
    walk,
)
from backpack.engine.nodes.vjp import is_function, operation_of
from backpack.engine.samples.gaps import explain_place

# Nodes through which a sum of terms can be followed
_ADDITIVE = tuple(f"{name}Backward0" for name in "Add Sub Neg Sum Stack Cat".split())
_SCALING = ("MulBackward0", "DivBackward0", "DotBackward0")
_OF_ONE_NUMBER = (
    "ViewBackward0 ReshapeAliasBackward0 UnsqueezeBackward0 SqueezeBackward0 "
    "SqueezeBackward1 SelectBackward0 CloneBackward0 AliasBackward0 ExpandBackward0 "
    "ToCopyBackward0"
).split()
# Operations that add up what samples contribute to a loss
_SUMS = frozenset(
    "sum mean nansum cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss "
    "kl_div binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss "
    "gaussian_nll_loss soft_margin_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss hinge_embedding_loss cosine_embedding_loss "
    "margin_ranking_loss triplet_margin_loss ctc_loss nll_loss_nd cross_entropy_loss "
    "dot vdot inner".split()
)

# Those of them in which operands are compared, or the entries of an axis
_COMPARING = frozenset(
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
    "cosine_embedding_loss margin_ranking_loss triplet_margin_loss ctc_loss "
    "dot vdot inner".split()
)


def adds_up(node: Node, met: Mixed) -> bool:
    """Tell whether samples have met in nothing but a sum of what they contribute.

    Args:
        node: The node.
        met: Where they have met.

    Returns:
        Whether that is so.
    """
    name = operation_name(met)
    adds = name in _SUMS or name.strip("_ir") in ("add", "sub") and is_scalar(node)
    return adds and not met.is_data


def tail_terms(roots: Sequence[GradientEdge]) -> list[Node]:
    """Find the terms of what is differentiated that no module has computed.

    Args:
        roots: Where the backward pass begins.

    Returns:
        Their nodes. At each, terms are summed that belong to samples, or samples meet.
    """
    terms, _ = additive_terms(roots, through_losses=True)
    met = [(term, term.metadata.get(MEETING)) for term in terms]
    return [
        term
        for term, known in met
        if not entries_of(term)
        or is_function(term)
        and not _is_loss(term)
        or known
        and operation_name(known) in _COMPARING
    ]


def _is_loss(node: Node) -> bool:
    """Tell whether an extended loss has computed what a node has."""
    return any(entry.owner.is_loss for entry in entries_of(node))


def operation_name(met: Mixed) -> str:
    """Read the name of an operation off its description.

    Args:
        met: Where samples have met.

    Returns:
        The name.
    """
    return met.operation.split("`")[1] if "`" in met.operation else met.operation


def additive_terms(
    roots: Sequence[GradientEdge], through_losses: bool = False, of_numbers: bool = True
) -> tuple[list[Node], list[Node]]:
    """Split what is differentiated into the terms of a sum.

    Args:
        roots: Where the backward pass begins.
        through_losses: Whether to look into extended losses. Default: ``False``.
        of_numbers: Whether to go through any function of numbers there, and sums of
            what samples may contribute each. Default: ``True``.

    Returns:
        Nodes of the terms, and those that add them up.
    """
    terms: list[Node] = []
    passed: list[Node] = []
    queue, seen = [(edge.node, edge.output_nr) for edge in roots], set()
    while queue:
        node, number = place = queue.pop()
        name = type(node).__name__
        joins = name in (TOGETHER, HOOKED)
        if (place if joins else node) in seen:
            continue
        seen.add(place if joins else node)
        edges: Any = (
            node.next_functions[number : number + 1] if joins else node.next_functions
        )
        edges = [edge for edge in edges if edge[0] is not None]
        behind = [parent for parent, _ in edges]
        single = name in _SCALING and len(behind) == 1
        is_loss = not through_losses and _is_loss(node)
        if len(behind) == 1 and name in _OF_ONE_NUMBER:
            single = torch.Size(node._input_metadata[0].shape).numel() == 1
        if through_losses and of_numbers and behind:
            many = [x for x in (node, *behind) if not is_scalar(x)]
            single = single or all(map(_is_of_numbers, many))
        if through_losses and behind and not single:
            is_mean = name == "MeanBackward0" and MEETING in behind[0].metadata
            single = is_mean or any(
                e.owner.is_use and e.owner.adds_up for e in entries_of(node)
            )
        adds = of_numbers or MEETING in node.metadata
        adds = adds or any(map(is_scalar, (node, *behind)))
        if (name in _ADDITIVE and adds or single or joins) and not is_loss:
            passed.append(node)
            queue.extend(edges)
        else:
            terms.append(node)
    return terms, passed


def _is_of_numbers(node: Node) -> bool:
    """Tell whether a node computes from numbers of the batch, like stacked losses."""
    queue, seen = [node], set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_scalar(node):
            known = explain_place(GradientEdge(node, 0))
            met = known is None or isinstance(known.placement, Mixed)
            if met or _is_of_a_group_of_one(node):
                continue
            return False  # one sample's
        behind = [edge.node for edge in parents(node)]
        if not behind or entries_of(node):
            return False
        queue.extend(behind)
    return True


def _is_of_a_group_of_one(node: Node) -> bool:
    """Tell whether a number is a sum over a group, of which there is one sample."""
    operands = [x for x in parents(node) if not is_leaf(x.node)]
    return adds_entries(node) and any(1 in shape_at(edge) for edge in operands)


def is_term(node: Node, roots: Sequence[GradientEdge]) -> bool:
    """Tell whether the gradient at a node is that where the backward pass begins.

    Args:
        node: The node.
        roots: Where the backward pass begins.

    Returns:
        Whether all begins at a sum of what it has computed, once, and of what does not
        depend on that.
    """
    found, others, queue, sums = 0, [], [edge.node for edge in roots], set()
    while queue:
        term = queue.pop()
        if term is node:
            found += 1
        elif type(term).__name__ == "AddBackward0" and term._saved_alpha == 1:
            if term in sums:  # and again, perhaps, for each time it was doubled
                return False
            sums.add(term)
            queue.extend(parent for parent, _ in term.next_functions if parent)
        else:
            others.append(term)
    return found == 1 and not (others and node in walk(others))


def is_sum(node: Node) -> bool:
    """Tell whether a node adds up what entries contribute, or adds nothing up.

    Args:
        node: Node at which the terms of a loss end.

    Returns:
        Whether it is so.
    """
    return adds_entries(node) or operation_of(node) in (
        *("Dot", "View", "Squeeze", "Select", "Clone", "Alias", "_Together", "ToCopy"),
    )


def adds_entries(node: Node) -> bool:
    """Tell whether a node adds up what entries contribute.

    Args:
        node: Node at which the terms of a loss end.

    Returns:
        Whether it is so.
    """
    return operation_of(node) in (
        *("Sum", "Mean", "NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "Nansum"),
        *("HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "KlDiv"),
        *("SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss", "CtcLoss"),
    )
