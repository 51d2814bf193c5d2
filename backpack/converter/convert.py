"""The converter's steps, one after the other."""

from copy import deepcopy
from functools import partial

from torch.fx import GraphModule
from torch.nn import Module

from backpack.converter import known
from backpack.converter.editing import (
    compiled_once,
    erase_unused,
    get_free_name,
    recompile,
)
from backpack.converter.inplace import transform_inplace_to_normal
from backpack.converter.no_grad import transform_no_grad_to_detach
from backpack.converter.reading import OPERATION, called, find_kinds
from backpack.converter.recurrent import transform_lstm_rnn
from backpack.converter.rest import transform_rest_to_function_modules
from backpack.converter.trace import graph_of_layer, trace
from backpack.converter.tracer import is_opened, is_user_module


def convert_module_to_backpack(module: Module, debug: bool) -> GraphModule:
    """Convert a model such that a module stands for every operation on tensors.

    Layers and parameters are shared with the model, which is not changed. Parameters
    keep their names, except those of stacked RNNs and LSTMs that are split: layer
    ``k`` of ``lstm`` becomes the single-layer ``lstm.lstm_k`` with the parameters
    ``weight_ih_l0, ...``. A model that is one PyTorch layer, or has a rule itself,
    becomes the submodule ``0``, which prefixes the names with ``0.``. Parameters may
    change their order.

    Modules of a user's class for which an extension has a rule are kept whole.

    Optional arguments of the model's forward are fixed to their default, unless it is
    a number. Assertions are dropped.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module with the same outputs.

    Raises:
        NotImplementedError: If the model's own forward depends on data, other than by
            tensor operations, or if an in-place operation cannot be undone.
    """
    undo_inplace = partial(transform_inplace_to_normal, debug=debug)
    if debug:
        print(f"Converting {type(module).__name__}")
    if is_opened(module):
        graph_module = trace(module, check=undo_inplace)
    else:
        graph_module = graph_of_layer(module)
        undo_inplace(graph_module)
    with compiled_once(graph_module):
        transform_no_grad_to_detach(graph_module, debug)
        erase_unused(graph_module)
        for transform in (
            known.transform_functions_to_modules,
            known.transform_get_item_to_module,
            known.transform_permute_to_module,
            known.transform_transpose_to_module,
            known.transform_add_to_sum_module,
            known.transform_mul_to_scale_module,
            known.transform_flatten_to_module,
            transform_lstm_rnn,
            transform_rest_to_function_modules,
            transform_remove_duplicates,
        ):
            transform(graph_module, debug)
    check_backpack_compatible(graph_module, debug)
    return graph_module


def transform_remove_duplicates(module: GraphModule, debug: bool) -> GraphModule:
    """Give each call of a layer without parameters and buffers a layer of its own.

    Args:
        module: Graph module.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    seen = set()
    for node in module.graph.nodes:
        layer = called(node)
        if layer is None or is_user_module(layer):
            continue
        if any(True for _ in (*layer.parameters(), *layer.buffers())):
            continue
        if layer in seen:
            if debug:
                print(f"  {node.format_node()}: a copy")
            name = get_free_name(module, type(layer).__name__.lower())
            layer = deepcopy(layer)
            module.add_module(name, layer)
            node.target = name
        seen.add(layer)
    return recompile(module)


def check_backpack_compatible(module: GraphModule, debug: bool) -> None:
    """Check that only modules operate on tensors, and none of them in place.

    Args:
        module: Graph module.
        debug: Print the result.

    Raises:
        NotImplementedError: If something is left.
    """
    kinds = find_kinds(module)
    for node in module.graph.nodes:
        inplace = getattr(called(node), "inplace", False)
        if inplace or (node.op in OPERATION and kinds[node] != "size"):
            raise NotImplementedError(
                f"The converter left {node.format_node()}. Please report the model."
            )
    if debug:
        print(f"  Converted: {len(module.graph.nodes)} nodes")
