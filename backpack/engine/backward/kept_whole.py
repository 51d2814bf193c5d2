"""Modules that quantities that walk take as a whole, with the modules inside.

Those for which a user has a rule are, and those that the converter has kept, if the
modules inside do not describe the graph.
"""

from __future__ import annotations

from typing import Any, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.fx import GraphModule

from backpack.converter.reading import consists_of_modules
from backpack.core.table import works_in_place
from backpack.engine.nodes.graph import is_leaf, producing_calls, targets_below, walk
from backpack.engine.nodes.record import Call
from backpack.utils.types import tensors_in


def nodes_inside(inspection: Any, call: Call) -> set[Node]:
    """Find what a call has computed its outputs with.

    Args:
        inspection: The inspection of the graph.
        call: The call.

    Returns:
        Nodes on the ways from its outputs to its inputs.
    """
    before = [e.node for e in call.input_edges if e is not None]
    before += [e.node for es in call.edges_before.values() for e in es]
    return set(walk(inspection.nodes_of(call), without=before))


def take_whole(inspection: Any, extensions: Sequence[Any]) -> None:
    """Let calls be taken as a whole that have a rule, or that hide operations.

    Args:
        inspection: The inspection of the graph.
        extensions: Extensions that walk from module to module.
    """
    calls = [x for x in inspection.calls if x.is_transparent and not x.is_loss]
    graphs = {x.module for x in calls if isinstance(x.module, GraphModule)}
    has_more = len(calls) > len(graphs)  # else, nothing was kept as it is
    converted = [x for x in graphs if has_more and consists_of_modules(x)]
    kept = {
        graph.get_submodule(str(node.target))
        for graph in converted
        for node in graph.graph.nodes
        if node.op == "call_module"
    }
    for call in calls:
        if call.is_part:
            continue
        has_rule = any(ext.is_customized(call.module) for ext in extensions)
        if has_rule or call.module in kept and not call.is_apart:
            _take_whole(inspection, call, has_rule)


def _hide_parameters(nodes: set[Node]) -> bool:
    """Tell whether nodes between modules take parameters, or lead to some."""
    if any(is_leaf(node) for node in nodes):
        return True
    operations = []
    for node in nodes:
        calls = [entry.owner for entry in producing_calls(GradientEdge(node, 0))]
        if all(call.edges_before for call in calls):  # which returned what they got
            operations.append(node)
    owners = [entry.owner for entry, _ in targets_below(operations)]
    parameters = [
        x for call in owners if not call.is_use for x in call.parameters.values()
    ]
    return any(x.requires_grad for x in parameters)


def _take_whole(inspection: Any, call: Call, has_rule: bool) -> None:
    """Let a call be responsible for all inside, if modules do not do it, or a rule."""
    nodes = nodes_inside(inspection, call)
    paths = {module: path for path, module in call.module.named_modules()}
    inside = [
        other
        for other, node in inspection.calls.items()
        if other is not call and other.module in paths and node in nodes
    ]
    working = [other for other in inside if not other.is_transparent]
    for other in working:
        if not other.edges_before or works_in_place(other.module):
            nodes -= nodes_inside(inspection, other)
    hides = has_rule or any(map(_is_no_link, working)) or _hide_parameters(nodes)
    if not hides or any(other.is_loss for other in inside):
        return
    places = dict(zip(call.parameters, call.places))
    for other in inside:
        other.is_part = True
        for (name, param), place in zip(other.parameters.items(), other.places):
            name = f"{paths[other.module]}.{name}".lstrip(".")  # it may call itself
            call.parameters = {**call.parameters, name: param}
            places[name] = place
    call.places, call.is_transparent = list(places.values()), False


def _is_no_link(call: Call) -> bool:
    """Tell whether a call takes tensors in a container, or returns several."""
    nested = [x for x in call.arguments if not isinstance(x, Tensor)]
    return call.is_apart or any(x.requires_grad for x in tensors_in(nested))
