"""Cotangents of some samples alone: which entries of the graph do they reach?

Rows of a buffer into which no sample was written, and learned tokens beside a single
sample's, depend on no sample. Whose they are, the backward pass tells.
"""

from __future__ import annotations

from math import prod
from typing import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from backpack.core.layout import (
    Layout,
    bits,
    halves,
    has_bit,
    has_gaps,
    numbers_of_rows,
    sample_numbers,
    simplify,
)
from backpack.engine.backward.inspection import Inspection
from backpack.engine.nodes.graph import Origin
from backpack.engine.nodes.vjp import pull
from backpack.utils.hooks import without_hooks
from backpack.utils.state import State, out_of_sight

_SEVERAL = -2  # in place of a sample's number


def starts(inspection: Inspection) -> list[Origin]:
    """List where samples are separate: at losses' predictions, or at outputs.

    Args:
        inspection: The graph.

    Returns:
        These places.
    """
    losses = inspection.losses
    edges = [(loss, loss.input_edges[0]) for loss in losses if loss.input_edges]
    found = [Origin(loss, edge, loss.placement) for loss, edge in edges if edge]
    return found if losses else inspection.outputs()


def columns(origin: Origin) -> Iterator[tuple[int, int, Tensor]]:
    """Make cotangents for samples whose number has a bit, and for the others.

    Args:
        origin: Where samples are separate.

    Yields:
        The bit, its value and the cotangent.
    """
    (_, edge, placement, shape), n = origin, origin.call.n
    if n < 2 or not isinstance(placement, (Layout, Tensor)):
        return
    metadata = edge.node._input_metadata[edge.output_nr]
    device, shape = metadata.device, shape or torch.Size(metadata.shape)
    generator = torch.Generator(device).manual_seed(0)
    random = torch.rand(shape, generator=generator, device=device) + 0.5
    numbers = numbers_of_rows(placement, shape, n, device)
    for bit, wanted in halves(n):
        some = random.where(has_bit(numbers, bit, wanted), 0.0)
        yield bit, wanted, some.to(metadata.dtype).reshape(metadata.shape)


@out_of_sight
def find_owners(inspection: Inspection, current: State) -> None:
    """Let entries of uses that no sample has entered be of whom their gradient is.

    What comes from none stays nobody's, and all of it where some comes from several.

    Args:
        inspection: The graph.
        current: What is active.
    """
    unknown = [
        (use, index, GradientEdge(node, number))
        for use, nodes in inspection.uses.items()
        for index, (node, number) in nodes.items()
        if use.n > 1 and has_gaps(use.placements[index])
    ]
    if not unknown:
        return
    owners = (*inspection.calls, *inspection.uses)
    quiet = without_hooks(x for owner in owners for x in owner.tensors())
    with current.pull(True), quiet:
        found = _owners_at([edge for *_, edge in unknown], inspection)
        for (use, index, _), of_batch in zip(unknown, found):
            if use.n in of_batch:
                shape, own = use.output_shapes[index], of_batch[use.n]
                known = use.placements[index]
                numbers = sample_numbers(known, shape, use.n, own.device)
                numbers = numbers.where(numbers >= 0, own.reshape(shape))
                is_mixed = bool((numbers == _SEVERAL).any())
                where = None if is_mixed else simplify(numbers, use.n, fills=True)
                if where is not None:  # else, entries of nobody's have no gradient
                    use.placements[index] = where


def _owners_at(
    edges: Sequence[GradientEdge], inspection: Inspection
) -> list[dict[int, Tensor]]:
    """Number the samples whose gradient arrives at places in the graph.

    Args:
        edges: The places.
        inspection: The graph.

    Returns:
        For each of them, by size of the batch: numbers, -1 for no sample.
    """
    seen: list[dict[tuple, Tensor]] = [{} for _ in edges]
    for origin in starts(inspection):
        node, number = origin.edge.node, origin.edge.output_nr
        if prod(node._input_metadata[number].shape) == 1:
            continue  # a total, although it may be of a single sample
        n = origin.call.n
        for bit, value, column in columns(origin):
            for known, g in zip(seen, pull([origin.edge], edges, [column])):
                if g is not None:
                    hit = g.nan_to_num() != 0
                    known[n, bit, value] = hit | known.get((n, bit, value), hit)
    return [{n: _decoded(known, n) for n in {n for n, _, _ in known}} for known in seen]


def _decoded(known: dict[tuple, Tensor], n: int) -> Tensor:
    """Put numbers together whose bits are known."""
    own, several = torch.zeros(()), torch.zeros(())
    for bit in bits(n):
        ones, zeros = known[n, bit, 1], known[n, bit, 0]
        own, several = own + (ones.long() << bit), several + (ones & zeros)
    own = torch.where(ones | zeros, own, -1)  # with any bit, it is one or the other
    return torch.where(several > 0, _SEVERAL, own).long()
