"""In-place operations, and the operations that return a new tensor instead."""

import operator
from copy import deepcopy
from functools import partial
from typing import Any, Callable, Dict, Optional

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional

from backpack.converter import reading
from backpack.converter.editing import change_node_to_module, recompile
from backpack.converter.tracer import MADE, NO_GRAD, Untraceable

VIEW_MODULES = (
    *(nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)

WRITTEN = (
    "it writes to a tensor that is made of no input, as by `zeros(3)`; make it of one, "
    "by `x.new_zeros(3)` or `zeros_like(x)`"
)
ALIASED = (
    "Cannot convert: {node} changes a tensor in place that is also used later as "
    + "{alias}, a view of it or what it is a view of. Use an operation that is not in "
    + "place."
)


def setitem(input: Tensor, index: Any, value: Any) -> Tensor:
    """Assign a part of a tensor, like ``input[index] = value``.

    Args:
        input: The tensor, which is not changed.
        index: The index.
        value: What to assign.

    Returns:
        Changed copy of the tensor.
    """
    result = input.clone()
    result[index] = value
    return result


# Functions that stand for assignments, and those that return a new tensor
_OUT_OF_PLACE: Dict[Any, Callable] = {
    getattr(operator, name): getattr(operator, f"__{name[1:]}__")
    for name in dir(operator)
    if name.startswith("i") and hasattr(operator, f"__{name[1:]}__")
}
# of tensors that no input has entered yet
_OUT_OF_PLACE.update({f"__{f.__name__}__": new for f, new in _OUT_OF_PLACE.items()})
_OUT_OF_PLACE.update({operator.setitem: setitem, "__setitem__": setitem})


def transform_inplace_to_normal(
    module: nn.Module, debug: bool, initialize_recursion: bool = True
) -> None:
    """Replace in-place operations by those that return a new tensor.

    In a graph, later uses of the changed tensor become uses of the new one. Modules are
    replaced by copies. Outside of a graph, modules are switched.

    Args:
        module: A graph module, or a module whose ``inplace`` flag is to be cleared.
        debug: Print what is done.
        initialize_recursion: Also go through the submodules. Default: ``True``.

    Raises:
        NotImplementedError: If another view of the changed tensor is used later.
        Untraceable: If a submodule changes its own parameters or buffers.
    """
    if not isinstance(module, GraphModule):
        for child in module.modules() if initialize_recursion else (module,):
            if getattr(child, "inplace", False):
                if debug:
                    print(f"  {child}: not in place")
                child.inplace = False  # type: ignore[assignment]
        return

    kinds = reading.find_kinds(module)
    order = {node: idx for idx, node in enumerate(module.graph.nodes)}
    origin: Dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        of_tuple = source and isinstance(reading.called(source), reading.TUPLE_MODULES)
        views = isinstance(reading.called(node), VIEW_MODULES)
        if node.op in reading.OPERATION:
            views = reading.operation(node) in reading.VIEW_NAMES
        if source and views and not of_tuple:
            origin[node] = origin[source]
        else:
            origin[node] = node
        undo = _find_inplace(node)
        if undo is None:
            continue
        if debug:
            print(f"  {node.format_node()}: not in place")
        source = node.all_input_nodes[0]
        origin[node] = origin[source]
        if kinds[node] == "size":  # a number: no other variable changes
            undo(node)
            continue
        if origin[source].op == "get_attr":
            name = str(origin[source].target)
            inside = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            reason = f"it changes its {name} in place"
            if name.startswith(MADE):  # which all calls would share
                reason = WRITTEN
            raise Untraceable(inside[-1] if inside else "", reason)
        if NO_GRAD in node.meta and NO_GRAD not in origin[source].meta:
            # its value changes, while its gradient stays what it was
            reason = f"{source} is changed in place where gradients are switched off"
            raise Untraceable(node.meta[NO_GRAD], reason)
        undo(node)
        later = {other for other in order if order[other] > order[node]}
        source.replace_all_uses_with(node, delete_user_cb=later.__contains__)
        for alias, root in origin.items():
            is_alias = root is origin[node] and alias not in (node, source)
            if is_alias and not later.isdisjoint(alias.users):
                raise NotImplementedError(
                    ALIASED.format(node=node.format_node(), alias=alias)
                )
    recompile(module)


def _find_inplace(node: Node) -> Optional[Callable[[Node], None]]:
    """Find out whether a node works in place, and how to avoid that.

    Args:
        node: The node.

    Returns:
        Function that makes the node return a new tensor, ``None`` if it does already.
    """
    if node.op == "call_module":
        return _copy_module if getattr(reading.called(node), "inplace", False) else None
    if node.op not in reading.OPERATION:
        return None
    if node.target in _OUT_OF_PLACE:
        return partial(_rename, _OUT_OF_PLACE[node.target])
    name = reading.target_name(node.target)
    is_operator = getattr(node.target, "__module__", None) == "_operator"
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place and not is_operator and name != "requires_grad_":
        if node.op == "call_method":
            other = name[:-1] if hasattr(Tensor, name[:-1]) else None
        else:
            other = getattr(functional, name[:-1], getattr(torch, name[:-1], None))
        return partial(_rename, other) if other else _clone_first
    # PyTorch's functions hand it to the tracer by name, however they are called
    return _clear_inplace_argument if node.kwargs.get("inplace") else None


def _rename(target: reading.Target, node: Node) -> None:
    node.target = target


def _clear_inplace_argument(node: Node) -> None:
    node.update_kwarg("inplace", False)


def _copy_module(node: Node) -> None:
    module = deepcopy(reading.called(node))
    module.inplace = False
    mode, root = module.training, node.graph.owning_module
    name, inputs = type(module).__name__.lower(), tuple(node.all_input_nodes)
    change_node_to_module(node, name, root, module, inputs)
    module.train(mode)


def _clone_first(node: Node) -> None:
    source = node.all_input_nodes[0]  # which may be given by name
    with node.graph.inserting_before(node):
        clone = node.graph.call_method("clone", (source,))
    node.replace_input_with(source, clone)
