"""Questions to the autograd graph: which calls are in it, and what else is."""

from __future__ import annotations

from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from backpack.utils.hooks import EXTENDED

if TYPE_CHECKING:
    from backpack.capture import Call

CALLS = "backpack.calls"  # where a node of the graph keeps its calls
Use = Tuple[Node, int]  # a node of the graph, and which of its in- or outputs

# Nodes through which a sum of terms can be followed
_ADDITIVE = ("AddBackward0", "SubBackward0", "NegBackward0", "SumBackward0")
_SCALING = ("MulBackward0", "DivBackward0")
# Nodes that broadcast an operand from the right, and so add axes before its axis 0
_BROADCASTING = (*_ADDITIVE[:2], *_SCALING, "ExpandBackward0")
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


class Entry(NamedTuple):
    """Which of a node's outputs is which of a call's outputs."""

    output_nr: int
    index: int
    call: Call

    def in_shape(self, gradient: Optional[Tensor]) -> Optional[Tensor]:
        """Bring a gradient into the shape of the call's output.

        Args:
            gradient: Gradient at the node's output.

        Returns:
            Gradient at the call's output, which may be a view of the node's.
        """
        shape = self.call.output_shapes[self.index]
        if gradient is None or gradient.shape == shape:
            return gradient
        return gradient.reshape(shape)


class Target(NamedTuple):
    """An output of a call, and the node of the graph that produced it."""

    entry: Entry
    node: Node


def calls_at(node: Node) -> List[Entry]:
    """Return the calls whose outputs a node produced.

    Args:
        node: Node of the autograd graph.

    Returns:
        The calls, in the order in which they returned.
    """
    return node.metadata.get(CALLS, [])


def producing_calls(edge: GradientEdge) -> List[Entry]:
    """Find the calls that returned a tensor.

    Args:
        edge: Where the tensor sits in the graph.

    Returns:
        The calls, in the order in which they returned.
    """
    entries = [e for e in calls_at(edge.node) if e.output_nr == edge.output_nr]
    parents = edge.node.next_functions
    if not entries and type(edge.node).__name__ in VIEWS and parents[0][0] is not None:
        shape = torch.Size(edge.node._input_metadata[0].shape)
        entries = [
            e
            for e in calls_at(parents[0][0])
            if e.output_nr == parents[0][1] and e.call.output_shapes[e.index] == shape
        ]
    return entries


def walk(starts: Iterable[Node]) -> Iterator[Node]:
    """Walk through the graph, towards its leaves.

    Args:
        starts: Where to begin.

    Yields:
        All nodes that can be reached, each once.
    """
    queue = list(dict.fromkeys(starts))
    seen = set(queue)
    while queue:
        node = queue.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)


def targets_below(nodes: Iterable[Node]) -> List[Target]:
    """Find the calls that something was computed from.

    Args:
        nodes: Where it sits in the graph.

    Returns:
        The calls' outputs.
    """
    return [Target(entry, node) for node in walk(nodes) for entry in calls_at(node)]


def will_run(node: Node) -> bool:
    """Tell whether the backward pass that is running includes a node.

    Args:
        node: Node of the graph.

    Returns:
        Whether it does. A leaf whose gradient ``torch.autograd.grad`` returns does.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


def takes_part(param: Parameter) -> bool:
    """Tell whether the backward pass that is running reaches a parameter.

    Args:
        param: The parameter.

    Returns:
        Whether it does.
    """
    return will_run(get_gradient_edge(param).node)


def is_leaf(node: Optional[Node]) -> bool:
    """Tell whether a node accumulates the gradient of a leaf tensor.

    Args:
        node: Node of the graph, ``None`` for nothing.

    Returns:
        Whether it does.
    """
    return type(node).__name__ == "AccumulateGrad"


class Inspection:
    """What the graph of a backward pass looks like.

    Attributes:
        calls: The calls in it, and the nodes that produced their outputs.
        reached: The leaf tensors it reaches, and the nodes that use them: one twice if
            it uses a tensor for two of its inputs.
    """

    def __init__(self, roots: Sequence[Node]):
        """Inspect a graph.

        Args:
            roots: Where the backward pass begins.
        """
        self._roots = roots
        self.calls: Dict[Call, List[Node]] = {}
        self._consumers: Dict[Node, List[Node]] = {node: [] for node in roots}
        self._nodes, leaves = list(self._consumers), []
        for node in self._nodes:  # which grows meanwhile
            parents = node.next_functions
            if not parents:
                leaves.append(node)
                continue
            for entry in calls_at(node):
                self.calls.setdefault(entry.call, []).append(node)
            for parent, _ in parents:
                if parent in self._consumers:
                    self._consumers[parent].append(node)
                elif parent is not None:
                    self._consumers[parent] = [node]
                    self._nodes.append(parent)
        self._names = {type(node).__name__ for node in self._nodes}
        self.reached: Dict[Tensor, List[Node]] = {
            node.variable: self._consumers[node] for node in leaves if is_leaf(node)
        }

    @cached_property
    def outside(self) -> Dict[Parameter, List[Node]]:
        """Nodes that use a parameter, but not for an output of its modules' calls."""
        doubtful: Dict[Parameter, List[Call]] = {}
        for call, nodes in self.calls.items():
            for param in call.parameters.values():
                users = self.reached.get(param, [])
                # a quick answer, for most
                if users != nodes and not all(x in nodes for x in users):
                    doubtful[param] = []
        for call in self.calls if doubtful else ():
            for param in call.parameters.values():
                if param in doubtful:
                    doubtful[param].append(call)
        outside = {}
        for param, calls in doubtful.items():
            outputs = {node for call in calls for node in self.calls[call]}
            users = self.reached[param]
            inputs = {node for call in calls for node in call.input_nodes()}
            since = min(call.since for call in calls)
            nodes = [x for x in users if self._leads_past(x, outputs, inputs, since)]
            if nodes:
                outside[param] = nodes
        return outside

    def _leads_past(
        self, node: Node, outputs: Set[Node], inputs: Set[Node], since: int
    ) -> bool:
        """Tell whether anything else is computed from a node than calls' outputs.

        Args:
            node: Where to begin; from there towards the roots.
            outputs: Where the calls' outputs sit in the graph.
            inputs: Where their inputs do: who comes across one was outside.
            since: Number of nodes when the first call began: older ones are outside.

        Returns:
            Whether there is a way to a root, or to an input, past the outputs.
        """
        seen, queue = {node}, [node]
        while queue:
            node = queue.pop()
            if node in outputs:
                continue
            if node in inputs or node in self._roots or node._sequence_nr() < since:
                return True
            consumers = [x for x in self._consumers[node] if x not in seen]
            seen.update(consumers)
            queue.extend(consumers)
        return False

    def uses_outside(self) -> Tuple[List[Parameter], List[Parameter]]:
        """Sort the parameters that are used outside of their modules' calls.

        Returns:
            Those used in terms of their own, like a regularizer, and those used for
            anything else.
        """
        if not self.outside:
            return [], []
        data_terms = [
            term
            for term in additive_terms(self._roots)
            if any(calls_at(node) for node in walk([term]))
        ]
        data_nodes = set(walk(data_terms))
        separate, entangled = [], []
        for param, nodes in self.outside.items():
            mixed = not data_nodes.isdisjoint(nodes)
            (entangled if mixed else separate).append(param)
        return separate, entangled

    def describe(self, params: Sequence[Parameter]) -> str:
        """Name parameters and their modules, for a message.

        Args:
            params: The parameters.

        Returns:
            Their names, as the largest extended model knows them.
        """
        names = {}
        for call in self.calls:
            for name, param in call.parameters.items():
                names.setdefault(param, f"'{name}' of {call.module}")
        for root in sorted(EXTENDED, key=lambda module: len(list(module.modules()))):
            for name, param in root.named_parameters():
                if "." in name:  # else the module itself, by its repr, says more
                    names[param] = f"'{name}' of {type(root).__name__}"
        return ", ".join(names[param] for param in params)

    @property
    def allows_inputs(self) -> bool:
        """Whether ``backward(inputs=...)`` is possible; not with some checkpoints."""
        return "CheckpointFunctionBackward" not in self._names

    def coupling(self) -> Optional[str]:
        """Find a batch normalization that is not extended and couples samples.

        Those that are extended are asked when their turn comes.

        Returns:
            What it is called, ``None`` if there is none.
        """
        names = {name for name in self._names if "BatchNorm" in name}
        for node in self._nodes if names else ():
            if type(node).__name__ not in names:
                continue
            shape = node._input_metadata[0].shape
            known = any(isinstance(e.call.module, _BatchNorm) for e in calls_at(node))
            # InstanceNorm normalizes a batch of one
            if node._saved_training and shape[0] > 1 and not known:
                return f"BatchNorm{max(1, len(shape) - 2)}d"
        return None


def additive_terms(roots: Sequence[Node]) -> List[Node]:
    """Split what is differentiated into the terms of a sum.

    Args:
        roots: Where the backward pass begins.

    Returns:
        Nodes of the terms.
    """
    terms, queue, seen = [], list(roots), set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        name = type(node).__name__
        single = name in _SCALING and len(parents) == 1
        if (name in _ADDITIVE or single) and not calls_at(node):
            queue.extend(parents)
        else:
            terms.append(node)
    return terms


class Consumers:
    """What is computed from what, in a part of the graph."""

    def __init__(self, outputs: Iterable[Node]):
        """Collect the consumers of all nodes that something was computed from.

        Args:
            outputs: Where it sits in the graph.
        """
        self._consumers: Dict[Use, List[Node]] = {}
        self._edges: Dict[Call, Use] = {}
        for node in walk(outputs):
            for entry in calls_at(node):
                self._edges[entry.call] = (node, entry.output_nr)
            for parent in node.next_functions:
                self._consumers.setdefault(parent, []).append(node)

    def broadcast(self, call: Call) -> bool:
        """Tell whether a call's output is broadcast, so that axis 0 holds no samples.

        Args:
            call: The call, with a single output.

        Returns:
            Whether an operation adds axes in front of its first axis.
        """
        if call not in self._edges:
            return False
        return self._adds_axis_0(self._edges[call], call.outputs[0].shape)

    def _adds_axis_0(self, edge: Use, shape: torch.Size) -> bool:
        for node in self._consumers.get(edge, []):
            name, result = type(node).__name__, node._input_metadata[0].shape
            if (
                (name in _BROADCASTING and len(result) > len(shape))
                or (name == "UnsqueezeBackward0" and node._saved_dim == 0)
                or (name in VIEWS and len(result) > len(shape) and result[0] == 1)
                or (result == shape and self._adds_axis_0((node, 0), shape))
            ):
                return True
        return False


def root_nodes(tensors: object) -> List[Node]:
    """Find where a backward pass begins.

    Args:
        tensors: Tensor, gradient edge, or a sequence of them.

    Returns:
        Their nodes.
    """
    if isinstance(tensors, (Tensor, GradientEdge)):
        tensors = [tensors]
    edges = [
        get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else x
        for x in tensors
    ]
    return [edge.node for edge in edges if isinstance(edge, GradientEdge)]
