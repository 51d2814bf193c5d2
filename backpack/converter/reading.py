"""Questions to a traced graph: what a node does, and what its value depends on."""

import operator
from typing import Any, Callable, Dict, List, Set, Union

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import GRU, LSTM, RNN, Module, MultiheadAttention

from backpack.converter.function import FunctionModule
from backpack.converter.tracer import keep, require_default
from backpack.custom_module.branching import SumModule
from backpack.custom_module.scale_module import ScaleModule

OPERATION = ("call_function", "call_method")
Target = Union[str, Callable]

# Tensor attributes and methods whose value is no tensor
SIZE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "layout", "is_cuda")
SIZE_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "stride")
SIZE_MODULES = ("_operator", "builtins", "math")
# Functions that take other tensors than the first one for their shape or type only
LIKE = frozenset("to type_as expand_as view_as reshape_as".split())
# Functions that check something and return nothing
CHECKS = (keep, require_default, torch._assert)

# What may return a view of its first argument
VIEW_NAMES = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel"),
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "T", "mT", "H"),
    *("squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "narrow"),
    *("select", "chunk", "split", "tensor_split", "unbind", "unfold", "diagonal"),
    *("getitem", "detach", "data", "contiguous", "to", "type_as", "float", "double"),
    *("half", "rearrange", "real", "imag", "broadcast_tensors", "as_strided", "mH"),
    *("hsplit", "vsplit", "dsplit", "split_with_sizes", "moveaxis", "adjoint", "alias"),
    *("view_as_real", "view_as_complex", "atleast_1d", "atleast_2d", "atleast_3d"),
    *("conj", "positive", "bfloat16", "cpu", "cuda", "type"),
    *("dropout", "requires_grad_"),
}
# Operations that return parts of a tensor, one after the other
PARTS = frozenset(
    "chunk split split_with_sizes tensor_split unbind hsplit vsplit dsplit".split()
)
TUPLE_MODULES = (RNN, LSTM, GRU, MultiheadAttention)
# Packages whose layers keep the size of axis 0
ROWWISE_MODULES = tuple(
    f"torch.nn.modules.{name}"
    for name in "activation batchnorm conv dropout normalization pooling".split()
)


def target_name(target: Any) -> str:
    """Look up the name of a function or method.

    Args:
        target: The function, or already a name.

    Returns:
        The name.
    """
    return target if isinstance(target, str) else getattr(target, "__name__", "call")


def operation(node: Node) -> str:
    """Look up what a node calls, by name.

    Args:
        node: The node.

    Returns:
        Name of a function or method; of an attribute, if that is what it reads.
    """
    return target_name(node.args[1] if node.target is getattr else node.target)


def called(node: Any) -> Any:
    """Look up the module that a node calls.

    Args:
        node: The node.

    Returns:
        The module, ``None`` if it calls none.
    """
    if node.op != "call_module":
        return None
    return node.graph.owning_module.get_submodule(str(node.target))


def is_index(node: Node) -> bool:
    """Tell whether a node takes one element, of a tuple or of a tensor's axis 0.

    Args:
        node: The node.

    Returns:
        Whether it does.
    """
    return node.target is operator.getitem and type(node.args[1]) is int


def is_sequence(node: Any) -> bool:
    """Tell whether a node stands for parts of a tensor, or for some of these.

    Args:
        node: The node, or something else.

    Returns:
        Whether it does.
    """
    if not isinstance(node, Node) or node.op not in OPERATION:
        return False
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return is_sequence(node.args[0])
    if node.target in (operator.add, operator.iadd):
        return all(map(is_sequence, node.args))
    return operation(node) in PARTS


def find_kinds(graph_module: Any) -> Dict[Node, str]:
    """Tell sizes, what does not depend on the input's values, and the rest apart.

    Args:
        graph_module: The graph module.

    Returns:
        For each node ``'size'`` (no tensor), ``'constant'`` (made of parameters,
        buffers and sizes), or ``'tensor'``.
    """
    kinds: Dict[Node, str] = {}
    for node in graph_module.graph.nodes:
        sources = {kinds[source] for source in sources_of(node)}
        kinds[node] = "tensor"
        if node.op == "get_attr":
            kinds[node] = "constant"
        elif node.op == "placeholder" and node.args:  # its default is a number
            kinds[node] = "size"
        elif node.op not in OPERATION:
            continue
        elif takes_size(node):
            kinds[node] = "size"
        elif sources <= {"size", "constant"}:
            package = getattr(node.target, "__module__", None)
            of_sizes = sources == {"size"} and package in SIZE_MODULES
            kinds[node] = "size" if of_sizes else "constant"
    return kinds


def takes_size(node: Node) -> bool:
    """Tell whether a node takes nothing from a tensor but its shape or type.

    Args:
        node: The node.

    Returns:
        Whether it does.
    """
    if node.op == "call_method":
        return node.target in SIZE_METHODS
    reads = node.target is getattr and node.args[1] in SIZE_ATTRIBUTES
    return reads or node.target in (len, *CHECKS)


def sources_of(node: Node) -> List[Node]:
    """List the nodes that a node's values come from.

    Args:
        node: The node.

    Returns:
        Its inputs, but for those of which it takes shape or type only.
    """
    if takes_size(node):
        return []
    if node.op in OPERATION and node.args:
        first: Any = node.args[0]
        if operation(node) in LIKE and isinstance(first, Node):
            return [first]
        if is_index(node) and first.op in OPERATION:
            if operation(first) == "broadcast_tensors":
                return [first.args[node.args[1]]]
    return node.all_input_nodes


def consists_of_modules(module: Module) -> bool:
    """Tell whether a module is a graph in which modules do all there is to do.

    Args:
        module: Any module.

    Returns:
        Whether it is, as the converter's results are.
    """
    if not isinstance(module, GraphModule):
        return False
    kinds = find_kinds(module)
    return not any(n.op in OPERATION and kinds[n] != "size" for n in kinds)


def inputs_of_layers(module: Module) -> Set[str]:
    """Find the parameters and buffers that a converted model's layers are called with.

    Args:
        module: Any module.

    Returns:
        Their names, none if it is no graph.
    """
    nodes = module.graph.nodes if isinstance(module, GraphModule) else ()
    return {
        str(source.target)
        for node in nodes
        if not isinstance(called(node), (FunctionModule, type(None)))
        for source in node.all_input_nodes
        if source.op == "get_attr"
    }


def is_batch_size(node: Any, of: Node) -> bool:
    """Whether a node is the size of axis 0 of a tensor.

    Args:
        node: The node in question.
        of: The tensor.

    Returns:
        Whether that can be seen from the graph.
    """
    if not isinstance(node, Node) or node.op not in OPERATION:
        return False
    source: Any = node.args[0]
    if node.target is operator.getitem and node.args[1] == 0:
        whole = ("size",), (getattr, "shape")
        if (source.target, *source.args[1:]) not in whole:
            return False
        source = source.args[0]
    elif (node.target, *node.args[1:]) not in (("size", 0), (len,)):
        return False
    while of is not source:
        module = called(of)
        rowwise = type(module).__module__ in ROWWISE_MODULES
        if not (rowwise or isinstance(module, (SumModule, ScaleModule))):
            return False
        of = of.all_input_nodes[0]
    return True


def leaves(arguments: Any, kind: type) -> list:
    """Collect the values of a type in nested arguments.

    Args:
        arguments: The arguments.
        kind: The type.

    Returns:
        The values, also repeated ones.
    """
    found = []
    map_aggregate(arguments, lambda a: found.append(a) if isinstance(a, kind) else None)
    return found
