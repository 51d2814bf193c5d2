"""Operations that no known module stands for."""

from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import Module

from backpack.converter import reading
from backpack.converter.editing import as_graph, erase_unused, install, recompile
from backpack.converter.function import Call, FunctionModule, Placeholder
from backpack.converter.tracer import TrainingFlag
from backpack.custom_module.reduce_tuple import ReduceTuple

# What is known to give the same when it is done once more...
KNOWN_PACKAGES = (*reading.SIZE_MODULES, "torch", "einops", "backpack")
# ... unless its name contains one of these, or PyTorch has marked it as random
RANDOM_PARTS = ("dropout", "gumbel", "fractional", "multi_head")


def transform_rest_to_function_modules(module: Module, debug: bool) -> GraphModule:
    """Turn all remaining operations on tensors into :class:`FunctionModule`.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = as_graph(module)
    graph = graph_module.graph
    erase_unused(graph_module)
    kinds = reading.find_kinds(graph_module)
    folded = {node: _folds(node, kinds) for node in graph.nodes}
    # Collect before changing any node: expressions reach back through folded ones
    found: List[Tuple[Node, Module, Tuple[Node, ...], Sequence[Node]]] = []
    for node in graph.nodes:
        if node.op not in reading.OPERATION or kinds[node] == "size":
            continue
        if folded[node] and all(user.op in reading.OPERATION for user in node.users):
            continue
        if reading.is_index(node) and _is_tuple(node.args[0], folded):
            found.append((node, ReduceTuple(node.args[1]), node.args[:1], ()))
            continue
        parts = _parts(node, folded)
        sources = dict.fromkeys(s for part in parts for s in part.all_input_nodes)
        inputs = [source for source in sources if not folded[source]]
        inputs.sort(key=lambda source: kinds[source] == "constant")
        positions = {source: idx for idx, source in enumerate(inputs)}
        num_data = sum(kinds[source] != "constant" for source in inputs)
        new_module = FunctionModule(_expression(node, positions, {}), num_data)
        found.append((node, new_module, tuple(inputs), parts))
    for replacement in found:
        install(graph_module, *replacement[:3], debug, replacement[3])
    erase_unused(graph_module)
    return recompile(graph_module)


def _folds(node: Node, kinds: Dict[Node, str]) -> bool:
    """Whether a node becomes part of the operations that use it.

    Args:
        node: The node.
        kinds: Kind of each node.

    Returns:
        ``True`` for sizes, for what is made of parameters, for parts of a tensor, and
        for what only serves to take elements from, or its shape.
    """
    if node.op not in reading.OPERATION:
        return False
    if kinds[node] == "size":
        return True
    if kinds[node] == "constant":
        # The output of a module of its own would have no samples. What is detached is
        # one, such that its parameters take no part in the operations that use it.
        detaches = reading.operation(node) in ("detach", "data")
        return not detaches and _is_repeatable(node)
    if reading.is_sequence(node):
        return True
    is_view = reading.operation(node) in reading.VIEW_NAMES
    if is_view and not any(node in reading.sources_of(user) for user in node.users):
        return True
    cheap = len(node.users) == 1 or is_view
    return cheap and all(reading.is_index(user) for user in node.users)


def _is_repeatable(node: Node) -> bool:
    """Whether an operation may be done once for each of its users."""
    name = reading.target_name(node.target).rstrip("_")
    aten = getattr(torch.ops.aten, name, None)
    overloads = [getattr(aten, o) for o in aten.overloads()] if aten else []
    random = any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)
    if random or any(part in name for part in RANDOM_PARTS):
        return False
    owner = getattr(node.target, "__self__", None)  # a function's, which is applied
    of = owner if isinstance(owner, type) else node.target
    module = getattr(of, "__module__", None) or "torch"
    return len(node.users) == 1 or module.split(".")[0] in KNOWN_PACKAGES


def _is_tuple(node: Node, folded: Dict[Node, bool]) -> bool:
    """Whether a function seems to return a tuple: only elements of it are used."""
    stays = node.op in reading.OPERATION and not folded[node]
    return stays and all(map(reading.is_index, node.users))


def _parts(node: Node, folded: Dict[Node, bool]) -> List[Node]:
    """Nodes of the expression that ends in a node.

    Args:
        node: The node.
        folded: Whether a node becomes part of the expression.

    Returns:
        The node itself, and those that are folded.
    """
    parts = [node]
    for part in parts:
        sources = part.all_input_nodes
        parts += [s for s in sources if folded[s] and s not in parts]
    return parts


def _expression(
    node: Node, positions: Dict[Node, int], known: Dict[Node, Call]
) -> Call:
    """Expression that ends in a node.

    Args:
        node: The node.
        positions: Position of each input.
        known: Expressions of other nodes, which this one may contain. It is added.

    Returns:
        The expression.
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            if leaf in positions:
                return Placeholder(positions[leaf])
            return known.get(leaf) or _expression(leaf, positions, known)
        return Placeholder("training") if isinstance(leaf, TrainingFlag) else leaf

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), convert)
    known[node] = Call(node.target, args, kwargs)
    return known[node]
