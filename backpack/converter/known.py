"""Operations that a known module stands for, see ``rules.py``."""

from functools import partial
from inspect import signature
from typing import Callable, Dict, Optional, Tuple

import torch
from torch.fx import GraphModule, Node
from torch.nn import LSTM, Flatten, Module

from backpack.converter import reading
from backpack.converter.editing import as_graph, install, recompile
from backpack.converter.rules import RULES
from backpack.converter.tracer import is_user_module
from backpack.custom_module.reduce_tuple import ReduceTuple

RESHAPES = ("view", "reshape", torch.reshape)


def _apply_rules(kind: str, module: Module, debug: bool) -> GraphModule:
    """Replace functions and methods by the modules that stand for them.

    Args:
        kind: Which rules to apply.
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = as_graph(module)
    kinds = reading.find_kinds(graph_module)
    for node in graph_module.graph.nodes:
        if node.op not in reading.OPERATION or kinds[node] != "tensor":
            continue
        rule = RULES[kind].get(node.target)
        match = rule and _match(rule, node, kinds)
        if match:
            new_module, args = match
            install(graph_module, node, new_module, args, debug)
    return recompile(graph_module)


transform_functions_to_modules = partial(_apply_rules, "function")
transform_permute_to_module = partial(_apply_rules, "permute")
transform_transpose_to_module = partial(_apply_rules, "transpose")
transform_add_to_sum_module = partial(_apply_rules, "add")
transform_mul_to_scale_module = partial(_apply_rules, "mul")


def _match(
    rule: Callable, node: Node, kinds: Dict[Node, str]
) -> Optional[Tuple[Module, Tuple[Node, ...]]]:
    """Try a rule on a node.

    Args:
        rule: The rule.
        node: The node.
        kinds: Kind of each node.

    Returns:
        The module and its inputs. ``None`` if the rule does not apply.
    """
    try:
        bound = signature(rule).bind(*node.args, **node.kwargs)
    except TypeError:  # another overload of the function
        return None
    operands = map(bound.arguments.get, ("input", "other"))
    tensors = [operand for operand in operands if isinstance(operand, Node)]
    if len(tensors) < len(reading.leaves((node.args, node.kwargs), Node)):
        return None
    if any(kinds[tensor] != "tensor" for tensor in tensors):
        return None
    new_module = rule(*bound.args, **bound.kwargs)
    return None if new_module is None else (new_module, tuple(tensors))


def transform_flatten_to_module(module: Module, debug: bool) -> GraphModule:
    """Replace flattening by ``Flatten``, also ``x.view(x.shape[0], -1)``.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = _apply_rules("flatten", module, debug)
    for node in graph_module.graph.nodes:
        if node.op not in reading.OPERATION or node.target not in RESHAPES:
            continue
        input, *shape = node.args or (None,)
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        if list(shape[1:]) == [-1] and reading.is_batch_size(shape[0], input):
            install(graph_module, node, Flatten(), (input,), debug)
    return recompile(graph_module)


def transform_get_item_to_module(module: Module, debug: bool) -> GraphModule:
    """Replace indexing by ``Slicing``, and by ``ReduceTuple`` after recurrent layers.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = _apply_rules("getitem", module, debug)
    for node in graph_module.graph.nodes:
        if reading.is_index(node) and _returns_tuple(node.args[0]):
            new_module = ReduceTuple(node.args[1])
            install(graph_module, node, new_module, node.args[:1], debug)
    return recompile(graph_module)


def _returns_tuple(node: Node) -> bool:
    """Whether a node calls a module whose output is a tuple, or takes one from it."""
    module = reading.called(node)
    if isinstance(module, ReduceTuple) and module.index == 1:
        return isinstance(reading.called(node.args[0]), LSTM)
    if isinstance(module, reading.TUPLE_MODULES):
        return True
    return module is not None and is_user_module(module)
