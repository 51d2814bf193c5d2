"""Operations that no known module stands for."""

from typing import Any, Dict, Iterator

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import Module

from backpack.converter.editing import as_graph, erase_unused, install, recompile
from backpack.converter.function import Call, FunctionModule, Placeholder
from backpack.converter.reading import (
    OPERATION,
    VIEW_NAMES,
    find_kinds,
    is_index,
    operation,
    target_name,
)
from backpack.converter.trace import RANDOM_FACTORIES
from backpack.converter.tracer import TrainingFlag
from backpack.custom_module.reduce_tuple import ReduceTuple


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
    kinds = find_kinds(graph_module)
    folded = {node: _folds(node, kinds) for node in graph.nodes}
    # Collect before changing any node: expressions reach back through folded ones
    found = []
    for node in graph.nodes:
        if node.op not in OPERATION or kinds[node] == "size":
            continue
        if folded[node] and all(user.op in OPERATION for user in node.users):
            continue
        if is_index(node) and _is_tuple(node.args[0], folded):
            found.append((node, ReduceTuple(node.args[1]), (node.args[0],), ()))
            continue
        parts = list(_parts(node, folded))
        inputs = {s: None for part in parts for s in part.all_input_nodes}
        inputs = [source for source in inputs if not folded[source]]
        inputs.sort(key=lambda source: source.op == "get_attr")
        positions = {source: idx for idx, source in enumerate(inputs)}
        new_module = FunctionModule(_expression(node, positions))
        found.append((node, new_module, tuple(inputs), parts))
    for node, new_module, inputs, parts in found:
        install(graph_module, node, new_module, inputs, debug, parts)
    erase_unused(graph_module)
    return recompile(graph_module)


def _folds(node: Node, kinds: Dict[Node, str]) -> bool:
    """Whether a node becomes part of the operations that use it.

    Args:
        node: The node.
        kinds: Kind of each node.

    Returns:
        ``True`` for sizes, for what is made of parameters and used once, and for what
        only serves to take elements from.
    """
    if node.op not in OPERATION:
        return False
    if kinds[node] == "size":
        return True
    if kinds[node] == "constant":
        # Random numbers are drawn in the order of the model
        return len(node.users) == 1 and target_name(node.target) not in RANDOM_FACTORIES
    cheap = len(node.users) == 1 or operation(node) in VIEW_NAMES
    return cheap and all(is_index(user) for user in node.users)


def _is_tuple(node: Node, folded: Dict[Node, bool]) -> bool:
    """Whether a function seems to return a tuple: only elements of it are used."""
    return (
        node.op in OPERATION
        and not folded[node]
        and all(is_index(user) for user in node.users)
    )


def _parts(node: Node, folded: Dict[Node, bool]) -> Iterator[Node]:
    """Nodes of the expression that ends in a node, in no particular order.

    Args:
        node: The node.
        folded: Whether a node becomes part of the expression.

    Yields:
        The node itself, and those that are folded.
    """
    yield node
    for source in node.all_input_nodes:
        if folded[source]:
            yield from _parts(source, folded)


def _expression(node: Node, positions: Dict[Node, int]) -> Call:
    """Expression that ends in a node.

    Args:
        node: The node.
        positions: Position of each input.

    Returns:
        The expression.
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            if leaf in positions:
                return Placeholder(positions[leaf])
            return _expression(leaf, positions)
        return Placeholder("training") if isinstance(leaf, TrainingFlag) else leaf

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), convert)
    return Call(node.target, args, kwargs)
