"""Forward hooks of extended modules: they record calls, and start to watch operations.

The outermost extended module that is no layer of the table starts a
:class:`~backpack.engine.forward.tracking.Tracker`. Layers of the table that are called
outside of any other module are uses as a whole, and nothing is watched.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._C import _get_tracing_state
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import GradientEdge
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn import Module, Parameter
from torch.nn.modules.module import _global_forward_hooks

from backpack.converter.function import FunctionModule
from backpack.core.derivatives.generic import tensor_outputs
from backpack.core.table import find_loss_module, find_row
from backpack.engine.forward import layer_calls
from backpack.engine.forward.frames import (
    THREAD,
    Frame,
    Guard,
    caller_of_hook,
    clear_inside,
    forget_interrupted,
    pop_frame,
)
from backpack.engine.forward.repetitions import hold_call, is_repeated, may_change
from backpack.engine.forward.tracking import Tracker
from backpack.engine.nodes.constants import are_apart, edge_of, edges_of
from backpack.engine.nodes.graph import VIEW, is_leaf, note_tangent, on_one_node
from backpack.engine.nodes.record import Call, CallRef
from backpack.engine.nodes.uses import Entry, entries_at, is_whole, listen
from backpack.engine.samples.gaps import note_constants
from backpack.engine.samples.marks import mark_of, may_be_shared, place, placement_of
from backpack.utils.compiling import (
    answered,
    is_compiled,
    is_indivisible,
    skipped,
    untraced,
)
from backpack.utils.disable import PLAIN, disable
from backpack.utils.hooks import (
    EXTENDED,
    HANDLES,
    RULED,
    Modules,
    are_known,
    note_extended,
)
from backpack.utils.module_classification import is_no_op
from backpack.utils.older_torch import note_copies
from backpack.utils.state import share, state
from backpack.utils.types import tensors_in

_MOVED = object()  # in place of an output: a hook that was not registered here


def steps_aside() -> bool:
    """Tell whether there is nothing to capture.

    Returns:
        Whether gradients or storing are switched off, a function transform or a tracer
        of this thread runs the forward pass, or a backward pass repeats it.
    """
    return (
        not is_grad_enabled()
        or is_compiling()
        and torch._C._len_torch_dispatch_stack() > 0
        or not disable.should_store_io()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or is_repeated()
    )


@answered
def _is_opaque() -> bool:
    """Tell whether what is compiled runs as a whole, and nothing inside is recorded."""
    return is_indivisible(THREAD.tracker is not None)


@skipped
def enter_call(
    module: Module, args: tuple, kwargs: dict[str, Any] | None = None
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook: prepare to record the call.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments. Default: ``None`` for a hook that was moved to the
            module from another, as quantization does, which does nothing.

    Returns:
        The arguments, guarded against interruptions, for an outermost call.
    """
    if kwargs is None:
        return None
    if is_dynamo_compiling():
        traced = not is_grad_enabled() or _is_opaque()
        return None if traced else untraced(enter_call, module, args, kwargs)
    if steps_aside():
        if not disable.should_store_io():
            PLAIN.add(module)
        return None
    PLAIN.discard(module)
    caller = caller_of_hook()
    forget_interrupted(caller.f_back)  # one in the same frame has been, too
    frames, tracker = THREAD.frames, THREAD.tracker
    if not frames:
        THREAD.returned.clear()
        extend_new(module)
        share((*args, *kwargs.values()))
        state()  # of this thread, which a backward pass would make for each node
    frame = Frame(module, id(caller))
    frames.append(frame)
    guard = Guard(frame, kwargs) if len(frames) == 1 else None
    with torch._C.DisableTorchFunction():
        if tracker is not None:
            tracker.owner = frame.call
            if not tracker.suspended and module._parameters and _is_alone(module):
                frame.row = layer_calls.row_of_call(module, args, kwargs, tracker)
                if frame.row is not None:
                    tracker.suspend()
        elif layer_calls.is_on_parameters(args):
            frame.is_constant = True
        else:
            if not _comes_late(module):
                frame.row = layer_calls.row_of_call(module, args, kwargs, None)
            if frame.row is None:
                _start(frame, args, kwargs)
    return None if guard is None else (args, guard)


def _start(frame: Frame, args: tuple, kwargs: dict[str, Any]) -> None:
    """Begin to watch operations, if there are samples."""
    found = layer_calls.find_samples(frame.module, args, kwargs)
    if found is not None:
        frame.tracker = THREAD.tracker = Tracker(found.n, found.inputs)
        frame.tracker.owner, frame.tracker.root = frame.call, frame.call.module_ref
        frame.tracker.note_loss = _note_function
        frame.tracker.longer, frame.tracker.beside = found.longer, found.beside
        frame.tracker.__enter__()


@skipped
def leave_call(
    module: Module, args: tuple, kwargs: dict[str, Any], output: Any = _MOVED
) -> Any | None:
    """Forward hook: record the call.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: What the module returned, ``None`` if it raised an exception. Default:
            none, for a hook that was moved, see :func:`enter_call`.

    Returns:
        A replacement for outputs that are leaves of the graph, else ``None``.
    """
    if output is _MOVED:
        return None
    if is_dynamo_compiling():
        traced = not is_grad_enabled() or _is_opaque()
        return None if traced else untraced(leave_call, module, args, kwargs, output)
    frame = pop_frame(module, caller_of_hook()) if THREAD.frames else None
    if type(kwargs) is Guard:
        kwargs = dict(kwargs)  # the record would keep what keeps the record
    if output is None or frame is None or not is_grad_enabled():
        if output is None and not THREAD.frames:
            clear_inside()
        return None
    # a function mode, like that of our context, would see each look at a tensor
    with torch._C.DisableTorchFunction():
        return _record(module, args, kwargs, output, frame)


# ------------------------------------------------------------------------------ records


def _record(
    module: Module, args: tuple, kwargs: dict[str, Any], output: Any, frame: Frame
) -> Any | None:
    """Make the record of a call; see :func:`leave_call`."""
    tracker = frame.tracker or THREAD.tracker
    replaced = None
    if frame.tracker is not None and isinstance(output, Parameter):
        # a leaf outlives the graph; its alias is part of the graph and owns the call
        if any([output is p for p in module.parameters() if p.requires_grad]):
            output = replaced = output.view_as(output)
    outputs = tensor_outputs(output)
    if frame.is_constant:
        note_constants(outputs)
    if any([x.is_nested and x.layout is torch.strided for x in outputs]):
        return None  # they have no shape
    constant = _constant_among(outputs, frame, tracker)
    edges = edges_of(outputs, constant)
    is_apart = len(outputs) > 1 and are_apart(edges)
    if is_apart and (find_row(module) or not RULED.isdisjoint(type(module).__mro__)):
        # a rule needs the gradients at all of them; others see no copies
        output = replaced = _on_one_node(output, constant)
        outputs, is_apart = tensor_outputs(output), False
        edges = edges_of(outputs, constant)
    call = frame.call
    call.finish(module, args, kwargs, outputs, edges, _parameters(module, args, frame))
    call.is_apart = is_apart
    if _comes_late(module) or frame.row is None and layer_calls.is_redefined(call):
        call.is_altered = True
    if not is_no_op(module):
        call.store(raw=False)
    outermost = tracker is None or frame.tracker is tracker
    if layer_calls.computes_loss(module, call, outputs, outermost):
        call.is_loss, call.loss_module = True, module
    _note_inside(call, module, frame)
    if call.is_loss:
        layer_calls.note_prediction(call)
    elif frame.row is not None:
        _note_layer(call, frame, outputs, tracker, (args, kwargs))
    if frame.tracker is not None and not call.is_loss:
        frame.tracker.note_outputs(outputs)
        call.n = frame.tracker.n
        call.placements = [placement_of(x, frame.tracker.key) for x in outputs]
    _attach(call, outputs, edges)
    return replaced


def _constant_among(
    outputs: list[Tensor], frame: Frame, tracker: Tracker | None
) -> set[int]:
    """Find outputs without samples, by identity: another way leads to them."""
    # what comes out of a layer that is looked at as a whole has no mark yet
    if len(outputs) < 2 or frame.row is not None or tracker is None:
        return set()
    constant = {id(x) for x in outputs if placement_of(x, tracker.key) is None}
    if len(constant) == len(outputs) and frame.tracker is not None:
        return set()  # no other way leads to the model
    return constant


def _on_one_node(output: Any, constant: set[int]) -> Any:
    """Copy outputs to where a single node is behind them, with their marks."""
    marks = [mark_of(x) for x in tensor_outputs(output)]
    output = on_one_node(output, constant)
    for x, mark in zip(tensor_outputs(output), marks):
        if mark:
            place(x, mark[1], mark[0], mark[3])
    return output


def _note_inside(call: Call, module: Module, frame: Frame) -> None:
    """Note what was called inside of a call, or that it is inside of others."""
    if module._modules:
        call.is_composite = any([x is not None for x in module._modules.values()])
    returned = THREAD.returned
    if len(returned) > frame.start:
        call.is_transparent = any([m is not None for m, _ in returned[frame.start :]])
    if call.is_loss:
        for _, ref in returned[frame.start :]:  # the outermost loss module is the loss
            if ref() is not None:
                ref().is_loss = False
    if THREAD.frames:
        returned.append((module, CallRef(call)))
    else:
        call.is_outermost = True
        call.inside = [ref for _, ref in returned]
        returned.clear()


def _note_layer(
    call: Call,
    frame: Frame,
    outputs: list[Tensor],
    tracker: Tracker | None,
    given: tuple[tuple, dict[str, Any]],
) -> None:
    """Note a layer that is a use as a whole, and where samples are in its outputs."""
    note = layer_calls.note_use
    call.placements = note(call, frame.row, given[0], outputs, frame.since)
    if tracker is not None:
        several = len(tracker.key.inputs) > 1
        data = tensors_in(given, depth=2) if several else ()
        shared = bool(data) and all([may_be_shared(x, tracker.key) for x in data])
        for x, placement in zip(outputs, call.placements):
            tracker.place(x, placement, shared)


def _note_function(func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    """Record a loss that a model has called as a function."""
    with torch._C.DisableTorchFunction():
        found = find_loss_module(func, args, kwargs)
        if found is None:
            return
        module, operands = found
        call, edges = Call(module), [edge_of(out)]
        call.finish(module, operands, {}, [out], edges, {})
        call.is_loss = call.is_function = True
        call.loss_module = module  # nobody else owns it
        THREAD.returned.append((None, CallRef(call)))
        layer_calls.note_prediction(call)
        _attach(call, [out], edges)


def _comes_late(module: Module) -> bool:
    """Tell whether another hook ran before ours, and may have changed the output.

    Args:
        module: The module.

    Returns:
        Whether a user has put one first, for this or for all modules.
    """
    first = next(iter(module._forward_hooks.values()), leave_call)
    return first is not leave_call or bool(_global_forward_hooks)


def _is_alone(module: Module) -> bool:
    """Tell whether no other hook changes what goes into a call, or comes out of it."""
    last = next(reversed(module._forward_pre_hooks.values()))
    is_last = isinstance(module, nn.RNNBase) or last is enter_call
    return is_last and not _comes_late(module)


def _parameters(module: Module, args: tuple, frame: Frame) -> dict[str, Tensor]:
    """Collect the parameters for which no call further inside is responsible."""
    own: dict[str, Tensor]
    own = {n: p for n, p in module._parameters.items() if p is not None}
    if isinstance(module, FunctionModule):
        arguments = enumerate(args)
        own.update({f"input{i}": x for i, x in arguments if isinstance(x, Parameter)})
    if not module._modules:
        return own
    inside = list(module._modules.values())
    called = {x for x, _ in THREAD.returned[frame.start :] if x is not None}
    for child in inside:  # which grows meanwhile
        if child is not None and child not in called:
            if child._parameters:
                break
            inside.extend(child._modules.values())
    else:
        return own
    # what was called is responsible for all modules inside
    called = {x for outer in called for x in outer.modules()}
    for prefix, child in module.named_modules():
        if child is not module and child not in called:
            for name, param in child._parameters.items():
                if param is not None:
                    own[f"{prefix}.{name}"] = param
    return own


def _attach(
    call: Call, outputs: list[Tensor], edges: list[GradientEdge | None]
) -> None:
    """Attach a call to the nodes that produced its outputs."""
    for x in outputs:
        note_tangent(x)
    base = outputs[0]._base if len(outputs) == 1 else None
    layer = base is not None and bool(call.parameters) and not call.is_composite
    if layer and is_whole(outputs[0], call.inputs):  # as of linear layers on sequences
        # A later in-place operation would take the view's node out of the graph
        if edges[0]:
            edges[0].node.metadata[VIEW] = call
        edges = [edge_of(base)]
    inner = [(i, e) for i, e in enumerate(edges) if e and not is_leaf(e.node)]
    if not inner:
        THREAD.graphless.add(call.module)
        return
    if THREAD.graphless:
        call.graphless, THREAD.graphless = THREAD.graphless, Modules()
    for i, (node, number, *_) in inner:  # one node, see `on_one_node`
        entries_at(node).append(Entry(number, i, call))
        if not THREAD.frames:  # where a backward pass without a context is noticed
            listen(node)


# ------------------------------------------------------------- which modules have hooks


def is_hooked(module: Module) -> bool:
    """Tell whether a module's calls are recorded.

    Args:
        module: The module.

    Returns:
        Whether ``extend`` has registered its hook, and it was not removed.
    """
    keys, hooks = module._forward_hooks_with_kwargs, module._forward_hooks
    return any(hooks.get(key) is leave_call for key in keys)


def scriptable(module: Module) -> Module:
    """Copy a model without our hooks: ``torch.jit.script`` compiles all that it finds.

    It asks modules for what to compile by their method ``__prepare_scriptable__``.

    Args:
        module: The model, with or without extended modules inside.

    Returns:
        A model that shares everything else; the same one if nothing is extended.
    """
    modules = list(module.modules())
    if not any(map(is_hooked, modules)):
        return module
    copies = {m: copy(m) for m in modules}
    for clone in copies.values():
        own, state = _own_hooks(), vars(clone)
        children = state["_modules"].items()
        state["_modules"] = {n: copies.get(c) for n, c in children}
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            kept = {key: f for key, f in state[hooks].items() if f not in own}
            state[hooks] = OrderedDict(kept)
    return copies[module]


def _own_hooks() -> tuple[Any, ...]:
    return enter_call, leave_call, see_changes, hold_call


def register_hooks(module: Module) -> None:
    """Register the hooks on a module, unless it has them or is no operation.

    Args:
        module: The module.
    """
    # a graph calls functions, and modules on parameters alone
    is_watched = bool(module._parameters) or isinstance(module, GraphModule)
    if not is_hooked(module) and (is_watched or not is_no_op(module)):
        before = module.register_forward_pre_hook(enter_call, with_kwargs=True)
        after = module.register_forward_hook(  # before any that changes the output
            leave_call, prepend=True, with_kwargs=True, always_call=True
        )
        HANDLES.extend([before, after])


def register(root: Module, debug: bool = False) -> None:
    """Register the hooks on a module and all inside, where they are not yet.

    Args:
        root: The module.
        debug: Whether to print what is extended. Default: ``False``.
    """
    for name, child in root.named_modules():
        if "parametrizations" in name.split("."):
            continue  # called for a parameter, not for samples
        if is_compiled(child) or isinstance(child, ScriptModule):
            continue  # passes everything on to what was compiled, or runs no hooks
        if debug and not getattr(child, "_backpack_extend", False):
            print(f"[DEBUG] Extending {f'{name}: ' if name else ''}{child}")
        child._backpack_extend = True
        register_hooks(child)
        held = hold_call in child._forward_pre_hooks.values()
        if not held and may_change(child, _own_hooks()):
            HANDLES.append(child.register_forward_pre_hook(hold_call, prepend=True))
        if isinstance(child, GraphModule):
            note_copies(child, register)
    has_hook = is_hooked(root) or see_changes in root._forward_pre_hooks.values()
    if is_no_op(root) and not has_hook:
        HANDLES.append(root.register_forward_pre_hook(see_changes, with_kwargs=True))
    note_extended(root)


@skipped
def see_changes(
    module: Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of containers, which have no other: see what has changed.

    Args:
        module: The container.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        What :func:`enter_call` does for a container that has become a model, with a
        forward pass of its own; else ``None``.
    """
    if is_dynamo_compiling() or steps_aside():
        return None
    extend_new(module)
    if is_no_op(module) or is_hooked(module):
        return None
    register(module)  # which adds a hook that does not run any more
    return enter_call(module, args, kwargs)


def extend_new(module: Module) -> None:
    """Extend what was put into an extended model meanwhile, and a copy of one.

    Args:
        module: The outermost module that is called.
    """
    if are_known(module) or hasattr(module, "_is_replica"):
        return
    for root in (*EXTENDED, module):
        if not are_known(root):
            register(root)
