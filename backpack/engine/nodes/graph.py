"""Questions to the autograd graph: which calls and uses end in a node, or below it."""

from __future__ import annotations

from functools import lru_cache
from typing import (
    Any,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    NamedTuple,
    Sequence,
)

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.engine.nodes.functions import BY_VALUE, POINTWISE
from backpack.engine.nodes.uses import ENTRIES, Entry
from backpack.engine.nodes.vjp import OF_OPERATION, is_function
from backpack.utils.hooks import EXTENDED, represent
from backpack.utils.parallel import SINKS, parts
from backpack.utils.state import state
from backpack.utils.types import is_inexact, tensors_in

HOOKED = "BackwardHookFunctionBackward"  # where a module's hooks see the gradient
_LOOKING_ON = SINKS | {HOOKED}  # nodes that pass on what they get
TOGETHER = "_TogetherBackward"  # where the gradients at several outputs arrive at once
VIEW = "backpack.view"  # where a node keeps the call of whose output it is a view
TANGENT = "backpack.tangent"  # where a tangent comes out of an operation
GIVEN = "backpack.given"  # where a leaf's node says which modules were called with it
MEETING = "backpack.meeting"  # where a node of the graph keeps that samples have met

# Nodes that move entries to, or from, where integers say
_BY_INDEX = BY_VALUE | {"index", "take", "index_put_impl"}
# Nodes that map entries of the same place, by other names than those of operations
_POINTWISE = POINTWISE | {
    "to_copy",
    "native_dropout",
    "log_sigmoid",
    "alias",
    "prelu_kernel",
    "rrelu_with_noise",
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
}
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
# Nodes that return all entries in the same order, where they return as many
SAME_ORDER = frozenset(
    "AliasBackward0 SqueezeBackward0 SqueezeBackward1 SqueezeBackward2 "
    "SqueezeBackward3 SqueezeBackward4 SqueezeBackward5 UnsqueezeBackward0 "
    "ViewAsBackward0 CloneBackward0".split()
).union(VIEWS)


class Target(NamedTuple):
    """An output of a call or a use, and the node of the graph that produced it."""

    entry: Entry
    node: Node


class Origin(NamedTuple):
    """Where columns start: at a loss's prediction, or at a model's output.

    Attributes:
        call: The call of the loss or the model.
        edge: Where prediction or output sit in the graph.
        placement: Where the samples are in there.
        shape: Shape of the output, of which the node's may be another view.
    """

    call: Any
    edge: GradientEdge
    placement: Any
    shape: torch.Size | None = None


def note_tangent(x: Tensor) -> None:
    """Remember where a tensor's tangent comes from: parameters enter there unseen.

    Args:
        x: Output of an operation, maybe with a tangent.
    """
    if forward_ad._current_level < 0:
        return
    with torch._C.DisableTorchFunction():
        tangent = forward_ad.unpack_dual(x).tangent
    if tangent is not None and tangent.grad_fn is not None:
        tangent.grad_fn.metadata[TANGENT] = True


def entries_of(node: Node) -> list[Entry]:
    """Return what ends in a node.

    Args:
        node: Node of the autograd graph.

    Returns:
        The calls and uses, in the order in which they returned.
    """
    return node.metadata.get(ENTRIES, [])


def calls_at(node: Node) -> list[Entry]:
    """Return the calls whose outputs a node produced.

    Args:
        node: Node of the autograd graph.

    Returns:
        The calls, in the order in which they returned.
    """
    return [entry for entry in entries_of(node) if not entry.owner.is_use]


def has_use(node: Node) -> bool:
    """Tell whether a use ends in a node.

    Args:
        node: Node of the autograd graph.

    Returns:
        Whether one does.
    """
    return any(entry.owner.is_use for entry in entries_of(node))


def skip_passing(edge: GradientEdge) -> GradientEdge:
    """Go by nodes that only pass on what they get.

    Args:
        edge: Where a tensor sits in the graph.

    Returns:
        Where it comes from.
    """
    node, number = edge.node, edge.output_nr
    while _only_passes_on(node) and node.next_functions[number][0]:
        node, number = node.next_functions[number]
    return GradientEdge(node, number)


def _only_passes_on(node: Node) -> bool:
    """Tell whether a node does; that of several outputs does for a container."""
    name = type(node).__name__
    return name in _LOOKING_ON or name == TOGETHER and not _working_calls(node)


def producing_calls(edge: GradientEdge) -> list[Entry]:
    """Find the calls that returned a tensor, other than containers.

    Args:
        edge: Where the tensor sits in the graph.

    Returns:
        The calls, in the order in which they returned.
    """
    edge = skip_passing(edge)
    node, number = edge.node, edge.output_nr
    entries = [e for e in _working_calls(node) if e.output_nr == number]
    return entries or behind_view(node)


def behind_view(node: Node) -> list[Entry]:
    """Find the layer's call that returned a view of what it has computed.

    Args:
        node: Node of the graph that made the view.

    Returns:
        The call; nothing if that is not what the node made.
    """
    call = node.metadata.get(VIEW)
    entries: list[Entry] = []
    while call and not entries and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
        if node is None:
            break
        entries = [e for e in _working_calls(node) if e.owner is call]
    return entries


def _working_calls(node: Node) -> list[Entry]:
    """List the calls whose outputs a node produced, other than containers' calls."""
    return [e for e in calls_at(node) if not e.owner.is_transparent]


def walk(
    starts: Iterable[Node],
    stop: Callable[[Node], Any] | None = None,
    since: int = -1,
    without: Collection[Node] = (),
) -> Iterator[Node]:
    """Walk through the graph, towards its leaves.

    Args:
        starts: Where to begin.
        stop: Don't go on from nodes of which this is true. Default: none.
        since: Don't go on to nodes that were there before the graph had so many.
            Default: -1, to go on to all.
        without: Nodes not to go through. Default: none.

    Yields:
        All nodes that can be reached, each once.
    """
    queue = [node for node in dict.fromkeys(starts) if node not in without]
    seen = {*queue, *without}
    while queue:
        node = queue.pop()
        yield node
        if stop is not None and stop(node):
            continue
        for parent, _ in node.next_functions:
            if parent is None or parent in seen:
                continue
            if parent._sequence_nr() >= since:  # a leaf's is the largest
                seen.add(parent)
                queue.append(parent)


def targets_below(nodes: Iterable[Node]) -> list[Target]:
    """Find the calls and uses that something was computed from.

    Args:
        nodes: Where it sits in the graph.

    Returns:
        Their outputs.
    """
    return [Target(entry, node) for node in walk(nodes) for entry in entries_of(node)]


def will_run(node: Node) -> bool:
    """Tell whether the backward pass that is running includes a node.

    Args:
        node: Node of the graph.

    Returns:
        Whether it does. A leaf whose gradient ``torch.autograd.grad`` returns does; an
        inner node, for what is below.
    """
    if node is torch._C._current_autograd_node():  # the root is not among those it asks
        return True
    try:
        nodes, current = [node], state()
        running = current.backward_pass
        announced = running not in (None, current.unannounced)
        if announced and not running.accumulates:
            nodes = [parent for parent, _ in node.next_functions if parent] or nodes
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return True


def parents(node: Node) -> list[GradientEdge]:
    """List the places in the graph that a node takes tensors from.

    Args:
        node: The node.

    Returns:
        The places, but for those of constants.
    """
    return [GradientEdge(*place) for place in node.next_functions if place[0]]


def reached_first(node: Node, places: Collection[GradientEdge]) -> set[GradientEdge]:
    """Find which places of the graph a node leads to, and not only through others.

    Args:
        node: The node.
        places: The places.

    Returns:
        Those of them that it leads to. Nothing behind a place is looked at.
    """
    found: set[GradientEdge] = set()
    queue, seen = [node], {node}
    while queue and len(found) < len(places):
        for parent in parents(queue.pop()):
            if parent in places:
                found.add(parent)
            elif parent.node not in seen:
                seen.add(parent.node)
                queue.append(parent.node)
    return found


def comes_from_complex(node: Node) -> bool:
    """Tell whether complex numbers lie between a tensor and the calls it comes from.

    Args:
        node: Node that produced the tensor.

    Returns:
        Whether they do.
    """
    between = walk([node], stop=_working_calls)
    return any(x.dtype.is_complex for node in between for x in node._input_metadata)


def is_leaf(node: Any) -> bool:
    """Tell whether a node accumulates the gradient of a leaf tensor.

    Args:
        node: Node of the graph, ``None`` for nothing.

    Returns:
        Whether it does.
    """
    return type(node).__name__ == "AccumulateGrad"


def leaf_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Find the nodes of leaf tensors that some nodes take directly.

    Args:
        nodes: Nodes of the graph.

    Returns:
        The leaves' nodes.
    """
    return {p for node in nodes for p, _ in node.next_functions if is_leaf(p)}


def leaves_behind(node: Node) -> list[Tensor]:
    """Find the leaf tensors that an expression is computed from.

    Args:
        node: Where it sits in the graph.

    Returns:
        The tensors.
    """
    return leaves_among(list(walk([node])))


def leaves_among(nodes: Sequence[Node]) -> list[Tensor]:
    """List the leaf tensors that some nodes stand for.

    Args:
        nodes: Nodes of the graph, those of expressions.

    Returns:
        The tensors.
    """
    return [x for leaf in nodes if is_leaf(leaf) for x in parts(leaf.variable, nodes)]


def is_scalar(node: Node) -> bool:
    """Tell whether a node's first output is a single number.

    Args:
        node: The node.

    Returns:
        Whether it is.
    """
    if is_leaf(node):
        return node.variable.numel() == 1
    metadata = node._input_metadata
    if not metadata or metadata[0].is_cpp_nested_tensor:
        return False
    return all([size == 1 for size in metadata[0].shape])  # a ragged one is no number


def shape_at(edge: GradientEdge) -> torch.Size:
    """Return the shape at a place in the graph.

    Args:
        edge: The place.

    Returns:
        Shape of the tensor there; a nested one has none.
    """
    metadata = edge.node._input_metadata[edge.output_nr]
    return torch.Size(() if metadata.is_cpp_nested_tensor else metadata.shape)


def saved_by(node_type: type) -> tuple[Sequence[str], Sequence[str]]:
    """List the plain arguments that nodes keep, and the tensors; of one's own, none.

    Args:
        node_type: Type of the nodes.

    Returns:
        Names of the attributes for plain arguments, and for tensors, or lists of them.
    """
    if issubclass(node_type, BackwardCFunction):  # what it closes over is not kept
        return (), ()
    return _saved_by(node_type)


@lru_cache(maxsize=None)
def _saved_by(node_type: type) -> tuple[Sequence[str], Sequence[str]]:
    names = [name for name in dir(node_type) if name.startswith("_saved_")]
    plain = [name for name in names if not hasattr(node_type, f"_raw{name}")]
    return plain, [name for name in names if name not in plain]


def note_indices(nodes: Iterable[Node]) -> None:
    """Note integers by which nodes have moved entries, if a step is recorded.

    Args:
        nodes: Nodes of the graph.
    """
    deciding = state().deciding
    for node in nodes if deciding is not None else ():
        name = name_of(node).strip("`_")
        if name in _BY_INDEX:
            _, names = saved_by(type(node))
            tensors = tensors_in([getattr(node, x) for x in names])
            deciding += [(name, x) for x in tensors if not is_inexact(x)]


def is_own(node: Node) -> bool:
    """Tell whether a node is that of a single operation of PyTorch.

    Args:
        node: The node.

    Returns:
        Whether it is; else, it wraps another one, or belongs to somebody else.
    """
    return type(node).__name__[-1].isdigit()


def is_pointwise(node: Node) -> bool:
    """Tell whether an operation maps entries of the same place.

    Args:
        node: The operation's node.

    Returns:
        Whether it does.
    """
    name = name_of(node).strip("`_")  # that of such a derivative as well
    return not is_function(node) and name.replace("_backward", "") in _POINTWISE


def keeps_places(node: Node) -> bool:
    """Tell whether an operation does so, or writes constants to some of the places.

    Args:
        node: The operation's node.

    Returns:
        Whether it does.
    """
    puts = name_of(node) == "`index_put`"
    constant = all(value is None for value, _ in node.next_functions[1:])
    return puts and constant or is_pointwise(node)


def name_of(node: Node) -> str:
    """Name the operation of a node, for a message.

    Args:
        node: The node.

    Returns:
        Its name as in PyTorch's functions, or the class of a function of one's own.
    """
    name = type(node).__name__.rsplit("Backward", 1)[0]
    if name.startswith(OF_OPERATION):
        name = name[len(OF_OPERATION) :].rsplit("_", 1)[0]  # less its overload
    elif is_function(node):
        return f"`{name}`"
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return f"`{words.lstrip('_')}`"


def names_at(nodes: Iterable[Node]) -> str:
    """Name the functions whose backward functions nodes are, for a message.

    Args:
        nodes: The nodes.

    Returns:
        Their names, each once.
    """
    return " and ".join(sorted(set(map(name_of, nodes))))


def describe(params: Sequence[Tensor]) -> str:
    """Name parameters, for a message.

    Args:
        params: The parameters.

    Returns:
        Their qualified names, as the largest extended model knows them.
    """
    found = qualified(params)
    names = [f"'{name}' of {represent(root)}" for name, root in found.values()]
    unnamed = [
        f"a tensor of shape {list(p.shape)}" for p in params if id(p) not in found
    ]
    return ", ".join([*names, *unnamed])


def qualified(params: Sequence[Tensor]) -> dict[int, tuple[str, Module]]:
    """Look up the qualified names of parameters.

    Args:
        params: The parameters.

    Returns:
        By identity, the name in the largest extended model that has it, and the model.
    """
    wanted = {id(p) for p in params}
    found: dict[int, tuple[str, Module]] = {}
    for root in sorted(EXTENDED, key=lambda m: sum(1 for _ in m.modules())):
        for name, param in root.named_parameters():
            if id(param) in wanted:
                found[id(param)] = name, root
    return found


def root_edges(tensors: object) -> list[GradientEdge]:
    """Find where a backward pass begins.

    Args:
        tensors: Tensor, gradient edge, or a sequence of them.

    Returns:
        Their places in the graph.
    """
    if isinstance(tensors, (Tensor, GradientEdge)):
        tensors = [tensors]
    edges = [
        get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else x
        for x in tensors
    ]
    return [edge for edge in edges if isinstance(edge, GradientEdge)]


class _Together(Function):
    """A node of the graph for several tensors, where their gradients arrive at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copy the tensors: on views, autograd allows no operation in place."""
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.clone, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Hand the gradients on."""
        return gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple:
        """Hand tangents on."""
        return tuple([x if x is None else x.clone() for x in tangents])


Together = _Together._backward_cls  # the class of such nodes


def on_one_node(output: Any, leave: Container[int]) -> Any:
    """Give several outputs a node of their own.

    There, the gradients at all of them arrive at once; and if one was computed from
    another, what comes through the one is not part of the gradient at the other.

    Args:
        output: What a module or an operation returned.
        leave: Identities of tensors that are left alone.

    Returns:
        The same, with copies of its tensors that require a gradient.
    """
    leaves, spec = tree_flatten(output)
    places = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor)
        and x.is_floating_point()
        and x.requires_grad
        and id(x) not in leave
    ]
    if places:
        for i, copy in zip(places, _Together.apply(*(leaves[i] for i in places))):
            leaves[i] = copy
    return tree_unflatten(leaves, spec)
