"""Finds uses in the graph, of which nothing was seen in the forward pass.

Outside of extended modules nothing is watched, and what the derivative of a network
takes is no operand of anything. There, a node of the graph at which data meets
parameters is a use.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack.engine.coverage import never_seen
from backpack.engine.gaps import explain_place, note_at
from backpack.engine.graph import is_leaf
from backpack.engine.inspection import Inspection
from backpack.engine.uses import is_noted
from backpack.utils.state import out_of_sight


@out_of_sight
def note_unseen(inspection: Inspection, params: list[Tensor]) -> bool:
    """Record nodes as uses that take parameters where nothing has seen it.

    Args:
        inspection: What the graph looks like.
        params: Parameters that have uses.

    Returns:
        Whether there are any, for which the graph has to be inspected again.
    """
    wanted = set(map(id, params))
    wanted.update(map(id, never_seen(inspection, wanted)))
    outside = [nodes for p, nodes in inspection.outside.items() if id(p) in wanted]
    if not outside:
        return False
    seen = dict.fromkeys(sum(outside, []))
    queue = [node for node in seen if node in inspection.data_nodes]
    places: dict[Node, dict[int, None]] = {}  # which outputs somebody takes
    children: dict[Node, list[Node]] = {}
    for child in inspection.nodes:
        for parent, number in child.next_functions:
            if parent is not None and not is_leaf(parent):
                if child in inspection.data_nodes:
                    children.setdefault(parent, []).append(child)
                places.setdefault(parent, {})[number] = None
    for edge in inspection.roots:
        places.setdefault(edge.node, {})[edge.output_nr] = None
    found = False
    for node in queue:  # which grows meanwhile
        for number in places.get(node, ()):
            edge = GradientEdge(node, number)
            known = explain_place(edge)
            if known is None:  # it depends on parameters alone
                further = [x for x in children.get(node, ()) if x not in seen]
                seen.update(dict.fromkeys(further))
                queue += further
            elif known.placement is not None and not is_noted(node, number):
                found |= note_at(edge, known)
    return found
