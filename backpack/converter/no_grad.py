"""Parts of a forward that run with gradients switched off, like ``torch.no_grad()``.

Gradients are on in the converted model. What such a part passes on is detached instead.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from backpack.converter.editing import recompile
from backpack.converter.reading import called, find_kinds
from backpack.converter.tracer import NO_GRAD

PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.Size, type(None))


def detach(value: Any) -> Any:
    """Detach a tensor, or those in a tuple, list or dictionary.

    Args:
        value: What an operation returned.

    Returns:
        The same without a graph.

    Raises:
        NotImplementedError: If there may be tensors that are out of sight.
    """

    def detach_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise NotImplementedError(
                "Cannot tell which tensors to detach in what a converted model has "
                f"computed with gradients switched off: {type(leaf).__name__}. Use a "
                "tensor, or a tuple, list or dictionary of tensors."
            )
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return tree_map(detach_leaf, value)


def transform_no_grad_to_detach(graph_module: GraphModule, debug: bool) -> None:
    """Detach what was computed with gradients switched off.

    Args:
        graph_module: The graph module, without operations in place.
        debug: Print what is done.
    """
    kinds = find_kinds(graph_module)
    graph = graph_module.graph

    def has_no_graph(node: Node) -> bool:
        return NO_GRAD in node.meta or kinds[node] == "size"

    for node in list(graph.nodes):
        if node.op == "get_attr":  # whoever looks at a parameter, it is the same
            node.meta.pop(NO_GRAD, None)
        if NO_GRAD not in node.meta or kinds[node] == "size":
            continue
        layer = called(node)
        has_parameters = layer is not None and any(True for _ in layer.parameters())
        if not has_parameters and all(map(has_no_graph, node.all_input_nodes)):
            continue
        if debug:
            print(f"  {node.format_node()}: detached")
        with graph.inserting_after(node):
            detached = graph.call_function(detach, (node,))
        detached.meta, kinds[detached] = node.meta, kinds[node]
        others = set(node.users) - {detached}
        node.replace_all_uses_with(detached, delete_user_cb=others.__contains__)
    recompile(graph_module)
