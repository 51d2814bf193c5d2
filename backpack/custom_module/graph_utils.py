"""The converter: a model in, the same model out with a module for every operation.

1. Trace the model (``tracer.py``). Submodules that cannot be traced stay whole.
2. Replace in-place operations by those that return a new tensor.
3. Put in the known modules (``rules.py``), and single-layer recurrent ones.
4. Turn the rest into :class:`FunctionModule`: sizes, parameters, and what is made of
   them become part of the operation that uses them, so that a module's input is a
   tensor that depends on the model's input.
"""

import operator
from collections import OrderedDict
from copy import deepcopy
from inspect import signature
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import (
    GRU,
    LSTM,
    RNN,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    Flatten,
    Identity,
    Module,
    MultiheadAttention,
    Sequential,
    Unflatten,
)

from backpack.custom_module.branching import SumModule
from backpack.custom_module.function import Call, FunctionModule, Placeholder
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.rules import RULES, Target
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.tracer import (
    RANDOM_FACTORIES,
    BackpackTracer,
    TrainingFlag,
    Untraceable,
    get_free_name,
    graph_of_layer,
    is_user_module,
    keep,
    require_default,
    trace,
)

__all__ = ["BackpackTracer", "convert_module_to_backpack"]

OPERATION = ("call_function", "call_method")

# Tensor attributes and methods whose value is no tensor
SIZE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "layout", "is_cuda")
SIZE_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "stride")
SIZE_MODULES = ("_operator", "builtins", "math")
# Functions that check something and return nothing
CHECKS = (keep, require_default, torch._assert)

# What may return a view of its first argument
VIEW_NAMES = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel"),
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "T", "mT", "H"),
    *("squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "narrow"),
    *("select", "chunk", "split", "tensor_split", "unbind", "unfold", "diagonal"),
    *("getitem", "detach", "data", "contiguous", "to", "type_as", "float", "double"),
    *("half", "rearrange", "real", "imag"),
}
VIEW_MODULES = (Identity, Flatten, Unflatten, Dropout, Dropout1d, Dropout2d, Dropout3d)
TUPLE_MODULES = (RNN, LSTM, GRU, MultiheadAttention)
# Packages whose layers keep the size of axis 0
ROWWISE_MODULES = tuple(
    f"torch.nn.modules.{name}"
    for name in "activation batchnorm conv dropout normalization pooling".split()
)

ALIASED = (
    "Cannot convert: {node} changes a tensor in place that is also used later as "
    + "{alias}, a view of it or what it is a view of. Use an operation that is not in "
    + "place."
)


def convert_module_to_backpack(module: Module, debug: bool) -> GraphModule:
    """Convert a model such that a module stands for every operation on tensors.

    Layers and parameters are shared with the model, which is not changed. Parameters
    keep their names, except those of stacked RNNs and LSTMs that are split: layer
    ``k`` of ``lstm`` becomes the single-layer ``lstm.lstm_k`` with the parameters
    ``weight_ih_l0, ...``. A model that is one PyTorch layer becomes
    the submodule ``0``, which prefixes the names with ``0.``. Parameters may
    change their order.

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

    def undo_inplace(graph_module: GraphModule) -> None:
        _transform_inplace_to_normal(graph_module, debug)

    if debug:
        print(f"Converting {type(module).__name__}")
    if is_user_module(module):
        graph_module = trace(module, check=undo_inplace)
    else:
        graph_module = graph_of_layer(module)
        undo_inplace(graph_module)
    _erase_unused(graph_module)
    for transform in (
        _transform_functions_to_modules,
        _transform_get_item_to_module,
        _transform_permute_to_module,
        _transform_transpose_to_module,
        _transform_add_to_sum_module,
        _transform_mul_to_scale_module,
        _transform_flatten_to_module,
        _transform_lstm_rnn,
        _transform_rest_to_function_modules,
        _transform_remove_duplicates,
    ):
        graph_module = transform(graph_module, debug)
    _check_backpack_compatible(graph_module, debug)
    return graph_module


def _as_graph(module: Module) -> GraphModule:
    return module if isinstance(module, GraphModule) else trace(module)


def _recompile(graph_module: GraphModule) -> GraphModule:
    graph_module.graph.lint()
    graph_module.recompile()
    graph_module.delete_all_unused_submodules()
    return graph_module


def _get_free_name(module: Module, initial_name: str) -> str:
    """Find an unused attribute name by appending a number.

    Args:
        module: Where to look.
        initial_name: What the name starts with.

    Returns:
        The name.
    """
    return get_free_name(module, initial_name)


def _change_node_to_module(
    node: Node, name: str, base_module: Module, new_module: Module, args: tuple
) -> None:
    """Let a node call a new module instead of what it does.

    Args:
        node: The node.
        name: What the module's name starts with.
        base_module: Graph module that gets the new module.
        new_module: The new module.
        args: The module's inputs.
    """
    name = _get_free_name(base_module, name)
    new_module.train(base_module.training)
    base_module.add_module(name, new_module)
    node.op = "call_module"
    node.target = name
    node.args = args
    node.kwargs = {}


# Reading the graph


def _name(target: Target) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "call")


def _operation(node: Node) -> str:
    """Name of a function or method; of an attribute if that is what it reads."""
    return node.args[1] if node.target is getattr else _name(node.target)


def _called(node: Node) -> Optional[Module]:
    """Module that a node calls, if any."""
    if node.op != "call_module":
        return None
    return node.graph.owning_module.get_submodule(node.target)


def _is_index(node: Node) -> bool:
    """Whether the node takes one element: from a tuple, or a row of a tensor."""
    return (
        node.target is operator.getitem
        and isinstance(node.args[1], int)
        and not isinstance(node.args[1], bool)
    )


def _kinds(graph_module: GraphModule) -> Dict[Node, str]:
    """Tell sizes, what does not depend on the input's values, and the rest apart.

    Args:
        graph_module: The graph module.

    Returns:
        For each node ``'size'`` (no tensor), ``'constant'`` (made of parameters,
        buffers and sizes), or ``'tensor'``.
    """
    kinds: Dict[Node, str] = {}
    for node in graph_module.graph.nodes:
        sources = {kinds[source] for source in node.all_input_nodes}
        kinds[node] = "tensor"
        if node.op == "get_attr":
            kinds[node] = "constant"
        elif node.op == "placeholder" and node.args:  # its default is a number
            kinds[node] = "size"
        elif node.op not in OPERATION:
            continue
        elif (
            node.target in CHECKS
            or (node.target is getattr and node.args[1] in SIZE_ATTRIBUTES)
            or (node.op == "call_method" and node.target in SIZE_METHODS)
        ):
            kinds[node] = "size"
        elif sources <= {"size", "constant"}:
            of_sizes = (
                sources == {"size"}
                and getattr(node.target, "__module__", None) in SIZE_MODULES
            )
            kinds[node] = "size" if of_sizes else "constant"
    return kinds


def _is_batch_size(node: Any, of: Node) -> bool:
    """Whether a node is the size of axis 0 of a tensor.

    Args:
        node: The node in question.
        of: The tensor.

    Returns:
        Whether that can be seen from the graph.
    """
    if not isinstance(node, Node) or node.op not in OPERATION:
        return False
    source = node.args[0]
    if node.target is operator.getitem and node.args[1] == 0:
        whole = ("size",), (getattr, "shape")
        if (source.target, *source.args[1:]) not in whole:
            return False
        source = source.args[0]
    elif (node.target, *node.args[1:]) != ("size", 0):
        return False
    while of is not source:
        module = _called(of)
        if not (
            isinstance(module, (SumModule, ScaleModule))
            or type(module).__module__ in ROWWISE_MODULES
        ):
            return False
        of = of.all_input_nodes[0]
    return True


# In-place operations


def _transform_inplace_to_normal(
    module: Module, debug: bool, initialize_recursion: bool = True
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
                child.inplace = False
        return

    kinds = _kinds(module)
    order = {node: idx for idx, node in enumerate(module.graph.nodes)}
    origin: Dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        views = node.op in OPERATION and _operation(node) in VIEW_NAMES
        of_tuple = source and isinstance(_called(source), TUPLE_MODULES)
        views = views or isinstance(_called(node), VIEW_MODULES)
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
            path = origin[source].target.rpartition(".")[0]
            raise Untraceable(path, f"it changes its {origin[source].target} in place")
        undo(node)
        later = {other for other in order if order[other] > order[node]}
        source.replace_all_uses_with(node, delete_user_cb=later.__contains__)
        for alias, root in origin.items():
            is_alias = root is origin[node] and alias not in (node, source)
            if is_alias and not later.isdisjoint(alias.users):
                raise NotImplementedError(
                    ALIASED.format(node=node.format_node(), alias=alias)
                )
    _recompile(module)


def _find_inplace(node: Node) -> Optional[Callable[[Node], None]]:
    """Find out whether a node works in place, and how to avoid that.

    Args:
        node: The node.

    Returns:
        Function that makes the node return a new tensor, ``None`` if it does already.
    """
    if node.op == "call_module":
        return _copy_module if getattr(_called(node), "inplace", False) else None
    if node.op not in OPERATION:
        return None
    name = _name(node.target)
    if node.target is operator.setitem:
        return _clone_first
    if getattr(node.target, "__module__", None) == "_operator":
        return _rename if _out_of_place(node) else None
    if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
        return _rename if _out_of_place(node) else _clone_first
    if _inplace_argument(node):
        return _clear_inplace_argument
    return None


def _out_of_place(node: Node) -> Optional[Target]:
    """Counterpart of an in-place function, method or operator that is not in place."""
    name = _name(node.target)
    if node.op == "call_method":
        return name[:-1] if hasattr(Tensor, name[:-1]) else None
    if getattr(node.target, "__module__", None) == "_operator":
        # iadd, imul, ...; there is no "nvert" for invert to be the in-place form of
        inplace = name.startswith("i")
        return getattr(operator, f"__{name[1:]}__", None) if inplace else None
    for namespace in (torch.nn.functional, torch):
        if hasattr(namespace, name[:-1]):
            return getattr(namespace, name[:-1])
    return None


def _rename(node: Node) -> None:
    node.target = _out_of_place(node)


def _inplace_argument(node: Node) -> Union[int, str, None]:
    """Position or name of an argument ``inplace`` that is set."""
    if node.kwargs.get("inplace", False):
        return "inplace"
    try:
        names = list(signature(node.target).parameters)
    except (TypeError, ValueError):  # a method, or a function written in C
        return None
    if "inplace" in names and len(node.args) > names.index("inplace"):
        position = names.index("inplace")
        return position if node.args[position] else None
    return None


def _clear_inplace_argument(node: Node) -> None:
    position = _inplace_argument(node)
    if isinstance(position, int):
        node.update_arg(position, False)
    else:
        node.update_kwarg("inplace", False)


def _copy_module(node: Node) -> None:
    module = deepcopy(_called(node))
    module.inplace = False
    mode, root = module.training, node.graph.owning_module
    name, inputs = type(module).__name__.lower(), tuple(node.all_input_nodes)
    _change_node_to_module(node, name, root, module, inputs)
    module.train(mode)


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


def _clone_first(node: Node) -> None:
    if node.target is operator.setitem:
        node.target = setitem
        return
    with node.graph.inserting_before(node):
        clone = node.graph.call_method("clone", (node.args[0],))
    node.update_arg(0, clone)


# Known modules


def _apply_rules(module: Module, debug: bool, kind: str) -> GraphModule:
    """Replace functions and methods by the modules that stand for them.

    Args:
        module: The model.
        debug: Print what is done.
        kind: Which rules to apply.

    Returns:
        Graph module.
    """
    graph_module = _as_graph(module)
    kinds = _kinds(graph_module)
    for node in graph_module.graph.nodes:
        if node.op not in OPERATION or kinds[node] != "tensor":
            continue
        rule = RULES[kind].get(node.target)
        match = rule and _match(rule, node, kinds)
        if match:
            new_module, args = match
            _install(graph_module, node, new_module, args, debug)
    return _recompile(graph_module)


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
    tensors = [
        bound.arguments[name]
        for name in ("input", "other")
        if isinstance(bound.arguments.get(name), Node)
    ]
    if len(tensors) < len(_leaves((node.args, node.kwargs), Node)):
        return None
    if any(kinds[tensor] != "tensor" for tensor in tensors):
        return None
    new_module = rule(*bound.args, **bound.kwargs)
    return None if new_module is None else (new_module, tuple(tensors))


def _leaves(arguments: Any, kind: type) -> list:
    """All values of a type in nested arguments, also repeated ones."""
    found = []
    map_aggregate(arguments, lambda a: found.append(a) if isinstance(a, kind) else None)
    return found


def _install(
    graph_module: GraphModule,
    node: Node,
    new_module: Module,
    args: tuple,
    debug: bool,
    parts: Sequence[Node] = (),
) -> None:
    """Let a node call a new module, and tell so.

    Args:
        graph_module: The graph module.
        node: The node.
        new_module: The new module. It gets the mode of the module whose training flag
            is an argument of the node.
        args: The module's inputs.
        debug: Print what is done.
        parts: Nodes that become part of the new module. Default: None.
    """
    if debug:
        print(f"  {node.format_node()}: {new_module}")
    name = _operation(node).lower().strip("_")
    name = name if name.isidentifier() else "function"
    arguments = [(part.args, part.kwargs) for part in (node, *parts)]
    _change_node_to_module(node, name, graph_module, new_module, args)
    for flag in _leaves(arguments, TrainingFlag)[:1]:
        new_module.train(flag == 1)


def _transform_functions_to_modules(module: Module, debug: bool) -> GraphModule:
    """Replace activation functions, pooling, dropout and the like by modules.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    return _apply_rules(module, debug, "function")


def _transform_flatten_to_module(module: Module, debug: bool) -> GraphModule:
    """Replace flattening by ``Flatten``, also ``x.view(x.shape[0], -1)``.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = _apply_rules(module, debug, "flatten")
    for node in graph_module.graph.nodes:
        if node.op not in OPERATION or node.target not in (
            "view",
            "reshape",
            torch.reshape,
        ):
            continue
        input, *shape = node.args or (None,)
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        if len(shape) == 2 and shape[1] == -1 and _is_batch_size(shape[0], input):
            _install(graph_module, node, Flatten(), (input,), debug)
    return _recompile(graph_module)


def _transform_get_item_to_module(module: Module, debug: bool) -> GraphModule:
    """Replace indexing by ``Slicing``, and by ``ReduceTuple`` after recurrent layers.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = _apply_rules(module, debug, "getitem")
    for node in graph_module.graph.nodes:
        if _is_index(node) and _returns_tuple(node.args[0]):
            new_module = ReduceTuple(node.args[1])
            _install(graph_module, node, new_module, node.args[:1], debug)
    return _recompile(graph_module)


def _returns_tuple(node: Node) -> bool:
    """Whether a node calls a module whose output is a tuple, or takes one from it."""
    module = _called(node)
    if isinstance(module, ReduceTuple) and module.index == 1:
        return isinstance(_called(node.args[0]), LSTM)
    if isinstance(module, TUPLE_MODULES):
        return True
    return module is not None and is_user_module(module)


def _transform_permute_to_module(module: Module, debug: bool) -> GraphModule:
    """Replace permutations that leave axis 0 in place by ``Permute``.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    return _apply_rules(module, debug, "permute")


def _transform_transpose_to_module(module: Module, debug: bool) -> GraphModule:
    """Replace transpositions of other axes than axis 0 by ``Permute``.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    return _apply_rules(module, debug, "transpose")


def _transform_add_to_sum_module(module: Module, debug: bool) -> GraphModule:
    """Replace additions of two tensors by ``SumModule``.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    return _apply_rules(module, debug, "add")


def _transform_mul_to_scale_module(module: Module, debug: bool) -> GraphModule:
    """Replace multiplication with, and division by, a number by ``ScaleModule``.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    return _apply_rules(module, debug, "mul")


# Recurrent layers


def _rnn_hyperparams(module: Union[RNN, LSTM]) -> Tuple[int, int, float, bool]:
    """Read the options of a recurrent layer.

    Args:
        module: The layer.

    Returns:
        Input size, hidden size, dropout probability, and whether the batch is first.
    """
    return (
        module.input_size,
        module.hidden_size,
        float(module.dropout),
        module.batch_first,
    )


def _make_rnn_backpack(module: Union[RNN, LSTM]) -> Module:
    """Split a stacked recurrent layer into single ones with the same parameters.

    Args:
        module: The layer, with an initial state of zeros and one direction.

    Returns:
        The layers ``lstm_0, lstm_1, ...``, by the same name for RNNs, with
        ``ReduceTuple`` and dropout between them. Like the given one, the last layer
        returns a tuple.
    """
    input_size, hidden_size, dropout, batch_first = _rnn_hyperparams(module)
    options = {"bias": module.bias, "batch_first": batch_first, "device": "meta"}
    if isinstance(module, RNN):
        options["nonlinearity"] = module.nonlinearity
    layers = OrderedDict()
    for idx in range(module.num_layers):
        if idx > 0:
            layers[f"reduce_tuple_{idx}"] = ReduceTuple(0)
            if dropout > 0.0:
                layers[f"dropout_{idx}"] = Dropout(dropout)
        kind = RNN if isinstance(module, RNN) else LSTM
        layer = kind(hidden_size if idx else input_size, hidden_size, **options)
        for name, _ in list(layer.named_parameters()):
            setattr(layer, name, getattr(module, name.replace("_l0", f"_l{idx}")))
        layer.flatten_parameters()
        layers[f"lstm_{idx}"] = layer
    return Sequential(layers).train(module.training)


def _can_split(node: Node) -> bool:
    """Whether a node calls a stacked recurrent layer of which it uses the output only.

    Args:
        node: The node.

    Returns:
        ``False`` also with two directions, a projection, or an initial state.
    """
    module = _called(node)
    return (
        type(module) in (RNN, LSTM)
        and module.num_layers > 1
        and not module.bidirectional
        and not module.proj_size
        and len(node.args) == 1
        and not node.kwargs
        and all(_picked(user) == 0 for user in node.users)
    )


def _picked(node: Node) -> Optional[int]:
    """Which element of a tuple a node picks, if it does."""
    module = _called(node)
    if isinstance(module, ReduceTuple):
        return module.index
    return node.args[1] if node.op in OPERATION and _is_index(node) else None


def _transform_lstm_rnn(module: Module, debug: bool) -> GraphModule:
    """Split stacked RNNs and LSTMs into single layers.

    Those that are bidirectional, start from a given state, or whose last state is used
    stay as they are.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = _as_graph(module)
    graph = graph_module.graph
    calls: Dict[str, List[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(node.target, []).append(node)
    for target, nodes in calls.items():
        if not all(_can_split(node) for node in nodes):
            continue
        layers = _make_rnn_backpack(_called(nodes[0]))
        parent, _, name = target.rpartition(".")
        setattr(graph_module.get_submodule(parent), name, layers)
        if debug:
            print(f"  {target}: {layers}")
        for node in nodes:
            value = node.args[0]
            with graph.inserting_before(node):
                for name, _ in layers.named_children():
                    value = graph.call_module(f"{target}.{name}", (value,))
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return _recompile(graph_module)


# The rest


def _transform_rest_to_function_modules(module: Module, debug: bool) -> GraphModule:
    """Turn all remaining operations on tensors into :class:`FunctionModule`.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = _as_graph(module)
    graph = graph_module.graph
    _erase_unused(graph_module)
    kinds = _kinds(graph_module)
    folded = {node: _folds(node, kinds) for node in graph.nodes}
    # Collect before changing any node: expressions reach back through folded ones
    found = []
    for node in graph.nodes:
        if node.op not in OPERATION or kinds[node] == "size":
            continue
        if folded[node] and all(user.op in OPERATION for user in node.users):
            continue
        if _is_index(node) and _is_tuple(node.args[0], folded):
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
        _install(graph_module, node, new_module, inputs, debug, parts)
    _erase_unused(graph_module)
    return _recompile(graph_module)


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
        return len(node.users) == 1 and _name(node.target) not in RANDOM_FACTORIES
    cheap = len(node.users) == 1 or _operation(node) in VIEW_NAMES
    return cheap and all(_is_index(user) for user in node.users)


def _is_tuple(node: Node, folded: Dict[Node, bool]) -> bool:
    """Whether a function seems to return a tuple: only elements of it are used."""
    return (
        node.op in OPERATION
        and not folded[node]
        and all(_is_index(user) for user in node.users)
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


def _erase_unused(graph_module: GraphModule) -> None:
    """Erase operations whose result is not used. Modules stay, and so do checks.

    Args:
        graph_module: The graph module.
    """
    graph = graph_module.graph
    for node in reversed(list(graph.nodes)):
        erasable = node.op in (*OPERATION, "get_attr") and node.target not in CHECKS
        if erasable and not node.users:
            graph.erase_node(node)


def _transform_remove_duplicates(module: GraphModule, debug: bool) -> GraphModule:
    """Give each call of a layer without parameters and buffers a layer of its own.

    Args:
        module: Graph module.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    called = set()
    for node in module.graph.nodes:
        layer = _called(node)
        if layer is None or is_user_module(layer):
            continue
        if any(True for _ in (*layer.parameters(), *layer.buffers())):
            continue
        if layer in called:
            if debug:
                print(f"  {node.format_node()}: a copy")
            name = _get_free_name(module, type(layer).__name__.lower())
            layer = deepcopy(layer)
            module.add_module(name, layer)
            node.target = name
        called.add(layer)
    return _recompile(module)


def _check_backpack_compatible(module: Module, debug: bool) -> None:
    """Check that only modules operate on tensors, and none of them in place.

    Args:
        module: Graph module.
        debug: Print the result.

    Raises:
        NotImplementedError: If something is left.
    """
    kinds = _kinds(module)
    for node in module.graph.nodes:
        inplace = getattr(_called(node), "inplace", False)
        if inplace or (node.op in OPERATION and kinds[node] != "size"):
            raise NotImplementedError(
                f"The converter left {node.format_node()}. Please report the model."
            )
    if debug:
        print(f"  Converted: {len(module.graph.nodes)} nodes")
