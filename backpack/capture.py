"""One record per module call: what went in, and where its output sits in the graph.

A forward hook on each extended module makes a :class:`Call` and attaches it to the
node of the autograd graph that produced the output. The graph owns the call: it lives
exactly as long, and a backward pass through the graph finds it. Therefore a call must
never own the node it is attached to, nor anything further along in the graph.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Module, Parameter
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from backpack.backward import visit
from backpack.context import state
from backpack.converter.function import FunctionModule
from backpack.core.derivatives.generic import (
    RandomState,
    output_batch_axis,
    tensor_outputs,
)
from backpack.graph import CALLS, Consumers, Entry, calls_at, is_leaf
from backpack.utils.disable import disable
from backpack.utils.module_classification import is_loss, is_no_op

RELEASED = (
    "The inputs and outputs of {module} were dropped after an earlier backward pass. "
    "Use `with backpack(..., retain_graph=True)` for all but the last backward pass "
    "through the same graph (also where the earlier one ran outside of any context)."
)
_STORED = "_backpack_stored"  # names of the tensors stored on a module


class Call:
    """A module's call.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        arguments: All arguments, in the order of ``forward``'s signature.
        input_edges: Where each argument sits in the graph.
        passes_on: Whether each argument and an output sit at the same place.
        edges_before: What an operation in place, which made an argument the output,
            was computed from; empty if another call returned the argument as it is.
            Without any entry if no argument is an output.
        outputs: Floating-point tensors of the output, detached.
        output_versions: What grows with each modification of them in place.
        training: Whether the module was in training mode.
        output_shapes: Their shapes, which are remembered.
        parameters: Parameters that this call is responsible for, by (dotted) name: the
            module's own, and those of modules inside that were not called themselves;
            for an operation that the converter made a module, its arguments.
        random_state: State of the random number generators before the call, if the
            generic rule may need it.
        default_device: Where it created tensors by default, ``None`` for the CPU.
        is_loss: Whether the call computes a loss.
        loss_module: The module if it is a loss, which may be owned by nobody else. All
            other modules are referenced weakly: they may store what owns this call.
        released: Whether inputs and outputs have been dropped.
        columns: Columns ``[V, N, *]`` at each output, by their source.
        is_outermost: Whether no other extended module was calling this one.
        is_composite: Whether the module has modules inside.
        is_transparent: Whether modules inside were called.
        model: Stands for the outermost call around this one, if one was recorded.
        since: Number of nodes that the thread's graphs had when the call began, if the
            generic rule may have to repeat it.
        is_altered: Whether a hook may have changed the output before it was recorded.
        graphless: Modules called before, whose outputs are not part of a graph.
    """

    is_loss = is_outermost = is_composite = is_transparent = released = False
    is_altered = False
    model: Optional[object] = None
    since = 0
    loss_module: Optional[Module] = None
    random_state: Optional[RandomState] = None
    default_device: Optional[torch.device] = None
    graphless: Iterable[Module] = ()
    edges_before: Sequence[List[GradientEdge]] = ()

    def __init__(
        self,
        module: Module,
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
        outputs: List[Tensor],
        output_edges: List[Optional[GradientEdge]],
        parameters: Dict[str, Parameter],
    ):
        """Record a call.

        Args:
            module: The module.
            args: Positional arguments.
            kwargs: Keyword arguments.
            outputs: Floating-point tensors of the output.
            output_edges: Where they sit in the graph, which is not kept.
            parameters: Parameters the call is responsible for.
        """
        self._module = weakref.ref(module)
        self.training = module.training
        self.parameters = parameters
        self.arguments = _bind(module, args, kwargs)
        edges = self.input_edges = list(map(_edge, self.arguments))
        self.passes_on = [edge is not None and edge in output_edges for edge in edges]
        if True in self.passes_on:
            # Its own output, which this call must not own: the module returned an
            # input as it is, or modified it in place.
            pairs = list(zip(edges, self.passes_on))
            self.edges_before = [_edges_before(e) if same else [] for e, same in pairs]
            self.input_edges = [None if same else edge for edge, same in pairs]
            args, kwargs = _detach(args), _detach(kwargs)
            self.arguments = _bind(module, args, kwargs)
        self.args, self.kwargs = args, kwargs
        self.versions = list(map(_version, self.arguments))
        self.outputs = list(map(Tensor.detach, outputs))
        self.output_versions = list(map(_version, self.outputs))
        self._returned = list(map(weakref.ref, outputs))  # they own this call
        self.output_shapes = [out.shape for out in outputs]
        self.columns: Dict[Any, List[Optional[Tensor]]] = {}

    @property
    def is_constant(self) -> bool:
        """Whether the inputs depend on parameters only."""
        pairs = zip(self.input_edges, self.passes_on)
        edges = [edge for edge, same in pairs if not same]
        return all(map(_is_constant, chain(edges, *self.edges_before)))

    @property
    def input_requires_grad(self) -> bool:
        """Whether an argument is part of the graph."""
        edges = zip(self.input_edges, self.passes_on)
        return any(edge is not None or same for edge, same in edges)

    @property
    def inputs(self) -> List[Tensor]:
        """Tensors among the arguments."""
        return [x for x in self.arguments if isinstance(x, Tensor)]

    def tensors(self) -> List[Tensor]:
        """List the tensors that a user may hold of this call, as far as they exist.

        Returns:
            Inputs and outputs, which are part of the graph.
        """
        returned = [ref() for ref in self._returned]
        for x in returned:
            if x is not None:
                x._fix_weakref()
        return [x for x in (*self.arguments, *returned) if isinstance(x, Tensor)]

    @property
    def num_outputs(self) -> int:
        """Number of floating-point tensors in the output."""
        return len(self.output_shapes)

    @property
    def batch_size(self) -> int:
        """Size of the axis of the (first) output that holds the samples."""
        shape, axis = self.output_shapes[0], output_batch_axis(self.module, 0)
        return shape[axis] if len(shape) > axis else 1

    def check_live(self) -> None:
        """Check that inputs and outputs have not been dropped.

        Raises:
            RuntimeError: If they were.
        """
        if self.released:
            raise RuntimeError(RELEASED.format(module=self.module))

    @property
    def module(self) -> Module:
        """The module that was called."""
        module = self._module()
        if module is None:
            raise RuntimeError(
                "An extended module was deleted between its forward and the backward "
                "pass. Keep the model until the backward pass has run."
            )
        return module

    def input_nodes(self) -> List[Node]:
        """List the nodes of the graph that produced the arguments.

        Returns:
            The nodes.
        """
        nested = [x for x in self.arguments if not isinstance(x, Tensor)]
        tensors = tree_leaves(nested) if nested else ()
        edges = [*self.input_edges, *map(_edge, tensors)]
        return [edge.node for edge in edges if edge is not None]

    def unchanged_outputs(self) -> List[Optional[Tensor]]:
        """List the outputs, ``None`` for those that were modified in place since.

        Returns:
            The outputs.
        """
        pairs = zip(self.outputs, self.output_versions)
        return [x if x._version == version else None for x, version in pairs]

    def check_unchanged(self) -> None:
        """Check that no input was modified since the call.

        Raises:
            RuntimeError: If an input was modified in place.
        """
        if list(map(_version, self.arguments)) != self.versions:
            raise RuntimeError(
                f"{type(self.module).__name__}: an input of this layer was modified in "
                "place after the forward pass, so quantities of its parameters can't "
                "be computed. Replace the in-place operation (`x = x + y` instead of "
                "`x += y`), or pass a copy to the layer."
            )

    def store(self, raw: bool) -> None:
        """Store inputs and output as attributes ``input0``, ... , ``output``.

        Args:
            raw: Whether the inputs keep their connection to the graph.
        """
        module = self.module
        clear_stored(module)
        attributes, stored = module.__dict__, []
        inputs = self.arguments if raw else map(_detach, self.arguments)
        values = (self.outputs[0] if self.outputs else None, *inputs)
        for name, value in zip(_names(type(module), len(values)), values):
            if not _is_taken(attributes, name):
                attributes[name] = value
                stored.append(name)
        attributes[_STORED] = stored

    def release(self) -> None:
        """Drop inputs and outputs, here and on the modules."""
        module = self._module()
        if module is not None:
            clear_stored(module)
        for graphless in self.graphless:
            clear_stored(graphless)
        self.args, self.kwargs, self.arguments = (), {}, []
        self.input_edges, self.versions = [], []
        self.outputs, self.graphless, self.random_state = [], (), None
        self.columns = {}
        self.loss_module = None
        self.released = True


def _edge(x: Any) -> Optional[GradientEdge]:
    """Return where a tensor sits in the graph, ``None`` if it does not."""
    if not (isinstance(x, Tensor) and x.requires_grad):
        return None
    node = x.grad_fn
    return get_gradient_edge(x) if node is None else GradientEdge(node, x.output_nr)


def _is_constant(edge: Optional[GradientEdge]) -> bool:
    """Tell whether an input depends on no other input of the network."""
    if edge is None:
        return True
    if is_leaf(edge.node):
        return isinstance(edge.node.variable, Parameter)
    entries = calls_at(edge.node)  # all but the first one returned it as it was
    return bool(entries) and entries[0].call.is_constant


def _edges_before(edge: GradientEdge) -> List[GradientEdge]:
    """List what a node was computed from, unless calls are attached to it already."""
    if calls_at(edge.node):
        return []
    parents = edge.node.next_functions
    return [GradientEdge(node, nr) for node, nr in parents if node is not None]


def _version(x: Any) -> Optional[int]:
    """Return what grows with each modification in place."""
    return x._version if isinstance(x, Tensor) else None


def _detach(value: Any) -> Any:
    """Detach the tensors in a value; quick where it is no container."""
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and all(isinstance(x, Tensor) for x in value):
        return tuple(map(Tensor.detach, value))
    return tree_map_only(Tensor, Tensor.detach, value)


def _bind(module: Module, args: Tuple, kwargs: Dict[str, Any]) -> List[Any]:
    """Bring arguments into the order of the forward function's signature."""
    if not kwargs:
        return list(args)
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return [*args, *kwargs.values()]
    values = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values.extend(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values.extend(value.values())
        else:
            values.append(value)
    return values


@lru_cache(maxsize=256)
def _names(cls: type, number: int) -> Tuple[Optional[str], ...]:
    """Return the attributes for an output and inputs; ``None`` if the class has it."""
    names = ("output", *(f"input{i}" for i in range(number - 1)))
    return tuple(None if hasattr(cls, name) else name for name in names)


def _is_taken(own: Dict[str, Any], name: Optional[str]) -> bool:
    """Tell whether a module, whose ``__dict__`` this is, has an attribute."""
    return (
        name is None
        or name in own
        or name in own["_parameters"]
        or name in own["_buffers"]
        or name in own["_modules"]
    )


def clear_stored(module: Module) -> None:
    """Delete the tensors that a forward pass stored on a module.

    Args:
        module: The module.
    """
    for name in module.__dict__.pop(_STORED, ()):
        module.__dict__.pop(name, None)


class _Frame:
    """A call of a module with modules inside that has not returned yet."""

    def __init__(self, module: Module):
        self.module = module
        self.called: Set[Module] = set()
        self.calls: List[weakref.ref] = []
        self.random_state: Optional[RandomState] = None
        self.key = object()
        self.since = torch._C._autograd._get_sequence_nr()


class _Thread(threading.local):
    def __init__(self):
        self.frames: List[_Frame] = []
        self.graphless: Optional[weakref.WeakSet[Module]] = None


_THREAD = _Thread()


def steps_aside() -> bool:
    """Tell whether there is nothing to capture.

    Returns:
        Whether gradients or storing are switched off, or a function transform runs the
        forward pass.
    """
    return (
        not torch.is_grad_enabled()
        or not disable.should_store_io()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def enter_call(module: Module, args: Tuple, kwargs: Dict[str, Any]) -> None:
    """Forward pre-hook of modules that the generic rule may have to repeat.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    if torch.compiler.is_compiling() or steps_aside():
        return
    frame = _Frame(module)
    if module.training:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors:
            frame.random_state = RandomState(tensors[0].device)
    _THREAD.frames.append(frame)


def leave_call(
    module: Module, args: Tuple, kwargs: Dict[str, Any], output: Any
) -> Optional[Any]:
    """Forward hook: record the call.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: What the module returned, ``None`` if it raised an exception.

    Returns:
        A replacement for outputs that are leaves of the graph, else ``None``.
    """
    if torch.compiler.is_compiling():
        return None
    frame = _pop_frame(module) if _THREAD.frames else None
    if output is None or steps_aside():
        return None
    device = _default_device()
    # a function mode, like that of our context, would see each look at a tensor
    with torch._C.DisableTorchFunction():
        return _record(module, args, kwargs, output, frame, device)


def _default_device() -> Optional[torch.device]:
    """Return where tensors are created by default, ``None`` for the CPU."""
    if torch._C._len_torch_function_stack() == 0:  # a device would be a function mode
        return None
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def _record(
    module: Module,
    args: Tuple,
    kwargs: Dict[str, Any],
    output: Any,
    frame: Optional[_Frame],
    default_device: Optional[torch.device],
) -> Optional[Any]:
    """Make the record of a call; see :func:`leave_call`."""
    replaced = None
    if isinstance(output, Tensor):
        is_leaf_itself = output.is_leaf and isinstance(output, Parameter)
    else:
        is_leaf_itself = any(_is_own_leaf(module, x) for x in tree_leaves(output))
    if is_leaf_itself:
        # a leaf outlives the graph; its alias is part of the graph and owns the call
        output = replaced = tree_map(
            lambda x: x.view_as(x) if _is_own_leaf(module, x) else x, output
        )
    outputs = tensor_outputs(output)
    edges = list(map(_edge, outputs))
    if len(outputs) > 1 and _differ(edges):
        output = replaced = _on_one_node(output)
        outputs = tensor_outputs(output)
        edges = list(map(_edge, outputs))
    parameters = _responsible(module, frame)
    if frame is not None:
        parameters.update(_adopted(module, args, kwargs, frame, outputs))
    if isinstance(module, FunctionModule):
        arguments = enumerate(args)
        named = {f"input{i}": x for i, x in arguments if isinstance(x, Parameter)}
        parameters.update(named)
    call = Call(module, args, kwargs, outputs, edges, parameters)
    call.default_device, call.is_altered = default_device, _comes_late(module)
    call.store(raw=False)
    if _computes_loss(module, outputs):
        call.is_loss, call.loss_module = True, module
    if frame is not None:
        call.random_state, call.since = frame.random_state, frame.since
        call.is_composite = any(True for _ in module.children())
        call.is_transparent = bool(frame.called)
        if call.is_transparent and call.is_loss:
            for ref in frame.calls:  # the outermost loss module is the loss
                if ref() is not None:
                    ref().is_loss = False
    outer_frames = _THREAD.frames
    call.is_outermost = not outer_frames
    outermost = next(iter(outer_frames), frame)
    call.model = None if outermost is None else outermost.key
    for outer in outer_frames:
        # with all modules inside: this call is responsible for them
        outer.called.update((module,) if frame is None else module.modules())
        outer.calls.append(weakref.ref(call))
    _attach(call, outputs, edges)
    return replaced


def is_hooked(module: Module) -> bool:
    """Tell whether a module's calls are recorded.

    Args:
        module: The module.

    Returns:
        Whether ``extend`` has registered its hook, and it was not removed.
    """
    return leave_call in module._forward_hooks.values()


class _Together(Function):
    """A node of the graph for several tensors, where their gradients arrive at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tuple[Tensor, ...]:
        """Copy the tensors: on views, autograd allows no operation in place."""
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.clone, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[Tensor]) -> Tuple:
        """Hand the gradients on."""
        return gradients


def _differ(edges: List[Optional[GradientEdge]]) -> bool:
    """Tell whether outputs sit at different nodes of the graph, or twice at a place."""
    places = [(edge.node, edge.output_nr) for edge in edges if edge is not None]
    nodes = {node for node, _ in places}
    return len(nodes) > 1 or len(set(places)) < len(places)


def _on_one_node(output: Any) -> Any:
    """Give several outputs a node of their own.

    There, the gradients at all of them arrive at once; and if one was computed from
    another, what comes through the one is not part of the gradient at the other.

    Args:
        output: What the module returned.

    Returns:
        The same, with copies of its tensors that require a gradient.
    """
    leaves, spec = tree_flatten(output)
    places = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad
    ]
    for i, copy in zip(places, _Together.apply(*(leaves[i] for i in places))):
        leaves[i] = copy
    return tree_unflatten(leaves, spec)


def _comes_late(module: Module) -> bool:
    """Tell whether another hook ran before ours, and may have changed the output.

    Args:
        module: The module.

    Returns:
        Whether a user has put one first, for this or for all modules.
    """
    first = next(iter(module._forward_hooks.values()), leave_call)
    return first is not leave_call or bool(_global_forward_hooks)


def _pop_frame(module: Module) -> Optional[_Frame]:
    frames = _THREAD.frames
    for position in reversed(range(len(frames))):
        if frames[position].module is module:
            frame = frames[position]
            del frames[position:]
            return frame
    return None


def _is_own_leaf(module: Module, x: Any) -> bool:
    if not (isinstance(x, Parameter) and x.is_leaf and x.requires_grad):
        return False
    return any(x is param for param in module.parameters())


def _responsible(module: Module, frame: Optional[_Frame]) -> Dict[str, Parameter]:
    """Collect the parameters for which no call further inside is responsible."""
    own = {n: p for n, p in module._parameters.items() if p is not None}
    if frame is None:
        return own
    for prefix, child in module.named_modules():
        if child is not module and child not in frame.called and not is_no_op(child):
            for name, param in child._parameters.items():
                if param is not None:
                    own[f"{prefix}.{name}"] = param
    return own


def _adopted(
    module: Module,
    args: Tuple,
    kwargs: Dict[str, Any],
    frame: _Frame,
    outputs: List[Tensor],
) -> Dict[str, Parameter]:
    """Take over the parameters of calls inside whose axis 0 does not hold samples.

    What is computed from no input of the network, like an embedding of all positions,
    is broadcast over the samples later on. The gradient at its output is a sum over
    samples; only a call around it can tell them apart.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    sizes = {x.shape[0] for x in tensors if x.dim() > 0}
    own = {x.data_ptr() for x in tensors}
    adopted: Dict[str, Parameter] = {}
    consumers: Optional[Consumers] = None
    prefixes: Dict[Module, str] = {}
    for call in filter(None, (ref() for ref in frame.calls)):
        if not call.parameters or not call.is_constant or len(call.outputs) != 1:
            continue
        if any(x.data_ptr() in own for x in call.inputs):
            continue
        shape = call.outputs[0].shape
        if len(shape) > 0 and shape[0] in sizes:
            # it may be the same size by coincidence
            if consumers is None:
                consumers = Consumers([x.grad_fn for x in outputs if x.grad_fn])
            if not consumers.broadcast(call):
                continue
        if not prefixes:
            prefixes = {child: name for name, child in module.named_modules()}
        prefix = prefixes[call.module]
        for name, param in call.parameters.items():
            adopted[f"{prefix}.{name}"] = param
        call.parameters = {}
    return adopted


def _computes_loss(module: Module, outputs: List[Tensor]) -> bool:
    if is_loss(module):
        return True
    scalar = len(outputs) == 1 and outputs[0].dim() == 0
    return scalar and next(module.parameters(), None) is None


def _attach(
    call: Call, outputs: List[Tensor], edges: List[Optional[GradientEdge]]
) -> None:
    """Attach a call to the nodes that produced its outputs."""
    base = outputs[0]._base if len(outputs) == 1 else None
    if base is not None and _is_own_result(call, base, outputs[0]):
        # A later in-place operation would take the view's node out of the graph
        edges = [_edge(base)]
    inner = [(i, e) for i, e in enumerate(edges) if e and not is_leaf(e.node)]
    if not inner:
        if _THREAD.graphless is None:
            _THREAD.graphless = weakref.WeakSet()
        _THREAD.graphless.add(call.module)
        return
    if _THREAD.graphless is not None:
        call.graphless, _THREAD.graphless = _THREAD.graphless, None
    for i, (node, number, *_) in inner:  # one node, see `_on_one_node`
        _hooked_calls(node).append(Entry(number, i, call))


def _is_own_result(call: Call, base: Tensor, output: Tensor) -> bool:
    """Tell whether a layer's output is a view of its result, in another shape.

    As linear layers do on sequences. Its gradient is then that of the result, reshaped.
    """
    return (
        bool(call.parameters)
        and not call.is_composite
        and base.grad_fn is not None
        and base.numel() == output.numel()
        and base.is_contiguous()
        and output.is_contiguous()
        and all(x.data_ptr() != base.data_ptr() for x in call.inputs)
    )


def _hooked_calls(node: Node) -> List[Entry]:
    """Return the list of a node's calls, which its hook works on."""
    metadata = node.metadata
    entries = metadata.get(CALLS)
    if entries is None:
        metadata[CALLS] = entries = []
        node.register_prehook(partial(_run_calls, entries))
    return entries


def _run_calls(entries: List[Entry], gradients: Tuple[Optional[Tensor], ...]) -> None:
    """Run the turn of the calls that end in a node, the last one to return first."""
    current = state()
    if current.pulling:
        return
    if len(entries) == 1 and entries[0].call.num_outputs == 1:
        number, _, call = entry = entries[0]
        visit(current, call, (entry.in_shape(gradients[number]),), entries)
        return
    by_call: Dict[Call, Dict[int, Optional[Tensor]]] = {}
    for entry in reversed(entries):
        gradient = entry.in_shape(gradients[entry.output_nr])
        by_call.setdefault(entry.call, {})[entry.index] = gradient
    for call, known in by_call.items():
        visit(current, call, tuple(map(known.get, range(call.num_outputs))), entries)
