"""Stacked recurrent layers, split into single ones."""

from collections import OrderedDict
from typing import Any, Dict, List, Optional, Tuple, Union

from torch.fx import GraphModule, Node
from torch.nn import LSTM, RNN, Dropout, Module, Sequential

from backpack.converter.editing import as_graph, recompile
from backpack.converter.reading import OPERATION, called, is_index
from backpack.custom_module.reduce_tuple import ReduceTuple


def rnn_hyperparams(module: Union[RNN, LSTM]) -> Tuple[int, int, float, bool]:
    """Read the options of a recurrent layer.

    Args:
        module: The layer.

    Returns:
        Input size, hidden size, dropout probability, and whether the batch is first.
    """
    sizes = module.input_size, module.hidden_size
    return *sizes, float(module.dropout), module.batch_first


def make_rnn_backpack(module: Union[RNN, LSTM]) -> Module:
    """Split a stacked recurrent layer into single ones with the same parameters.

    Args:
        module: The layer, with an initial state of zeros and one direction.

    Returns:
        The layers ``lstm_0, lstm_1, ...``, by the same name for RNNs, with
        ``ReduceTuple`` and dropout between them. Like the given one, the last layer
        returns a tuple.
    """
    input_size, hidden_size, dropout, batch_first = rnn_hyperparams(module)
    options = {"bias": module.bias, "batch_first": batch_first, "device": "meta"}
    if isinstance(module, RNN):
        options["nonlinearity"] = module.nonlinearity
    layers: OrderedDict[str, Module] = OrderedDict()
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
    module = called(node)
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
    module = called(node)
    if isinstance(module, ReduceTuple):
        return module.index
    index: Any = node.args[1] if node.op in OPERATION and is_index(node) else None
    return index


def transform_lstm_rnn(module: Module, debug: bool) -> GraphModule:
    """Split stacked RNNs and LSTMs into single layers.

    Those that are bidirectional, start from a given state, or whose last state is used
    stay as they are.

    Args:
        module: The model.
        debug: Print what is done.

    Returns:
        Graph module.
    """
    graph_module = as_graph(module)
    graph = graph_module.graph
    calls: Dict[str, List[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(node.target, []).append(node)
    for target, nodes in calls.items():
        if not all(_can_split(node) for node in nodes):
            continue
        layers = make_rnn_backpack(called(nodes[0]))
        parent, _, name = target.rpartition(".")
        setattr(graph_module.get_submodule(parent), name, layers)
        if debug:
            print(f"  {target}: {layers}")
        for node in nodes:
            value: Any = node.args[0]
            with graph.inserting_before(node):
                for name, _ in layers.named_children():
                    value = graph.call_module(f"{target}.{name}", (value,))
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return recompile(graph_module)
