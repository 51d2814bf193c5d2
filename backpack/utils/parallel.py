"""What processes that share a model do to it: replicas, shards, nodes in the graph."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Callable, Container, Iterable, Iterator

import torch
from torch import Tensor

# Nodes that act when a backward pass comes by, and pass on what they get: modules,
# names of functions there
_SINKS = {
    # with static_graph=True, one at the model's output waits for the pass
    "torch.nn.parallel.distributed": "_DDPSink",
    # those at the inputs of what is sharded give its parameters away
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        "RegisterPostBackwardFunction"
    ),
}
SINKS = frozenset(f"{name}Backward" for name in _SINKS.values())
# What hooks at the outputs of what is sharded do. That the pass will end: they must not
# see in another one inside of it. Outside, there are parameters to gather for no pass.
_AT_OUTPUTS = {
    "torch.distributed.fsdp._fully_shard._fsdp_state": (
        *("FSDPState", "_register_root_post_backward_final_callback"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        *("FSDPParamGroup", "pre_backward"),
    ),
}

# The same of FullyShardedDataParallel, whose hooks hold the function itself
_AT_FLAT_OUTPUTS = "torch.distributed.fsdp._runtime_utils", "_pre_backward_hook"

FLAT = (
    "{exts}: a part of the model is inside of FullyShardedDataParallel, which puts all "
    "parameters into one that no operation uses. Use its option use_orig_params=True, "
    "`torch.distributed.fsdp.fully_shard`, or DistributedDataParallel."
)
AGAIN = (
    "{exts}: what FullyShardedDataParallel(use_orig_params=True) contains is called "
    "several times before the backward pass, each time with tensors of its own in the "
    "parameters' place, and computes something from these alone, or uses parameters "
    "where extensions can't see it. Use `torch.distributed.fsdp.fully_shard`, or "
    "DistributedDataParallel."
)
SHARDED = (
    "{exts}: parameters are DTensors while the model runs, as in tensor parallelism, "
    "and no process knows the whole of a sample. Use "
    "`torch.distributed.fsdp.fully_shard`, which gathers parameters before they are "
    "used, or DistributedDataParallel."
)
STATIC = (
    "{option}: DistributedDataParallel(static_graph=True) learns in the first backward "
    "pass which gradients there are, and would wait for none ever after. Run that pass "
    "without, or leave out static_graph=True."
)
GATHERED = (
    "{option}: `fully_shard` and FullyShardedDataParallel gather gradients from all "
    "processes before the backward pass is over, and weighted ones are known after it. "
    "Use DistributedDataParallel, or read the field and do without the option."
)


def is_parallel() -> bool:
    """Tell whether there are other processes.

    Returns:
        Whether a process group is initialized.
    """
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def is_shared() -> bool:
    """Tell whether several processes may share the work.

    Returns:
        Whether a process group was initialized that has more than one of them.
    """
    return is_parallel() and torch.distributed.get_world_size() > 1


def is_sharded(x: Tensor) -> bool:
    """Tell whether this process has a part of a tensor only.

    Args:
        x: The tensor.

    Returns:
        Whether it is a ``DTensor``, a class that takes long to import.
    """
    return type(x).__name__ == "DTensor"


def refuse_parts(extensions: str, params: Iterable[Tensor]) -> None:
    """Refuse parameters of which a process has a part only.

    Args:
        extensions: Who asks.
        params: The parameters, as the graph knows them.

    Raises:
        NotImplementedError: If there is one, or one of which there are several copies.
    """
    seen: set[Any] = set()
    for param in params:
        flat = _flat(param)
        if flat is not None:
            place = id(flat), param.storage_offset()
            if flat is param or place in seen:
                text = AGAIN if flat._tensors else FLAT
                raise NotImplementedError(text.format(exts=extensions))
            seen.add(place)
        if is_sharded(param):
            raise NotImplementedError(SHARDED.format(exts=extensions))


def refuse_late(option: str, nodes: Iterable[Any]) -> None:
    """Refuse to leave out gradients where other processes would learn it for good.

    Args:
        option: What leaves them out or replaces them, and whose option it is.
        nodes: Nodes of the backward pass.

    Raises:
        NotImplementedError: If that is the first pass of replicas with a static graph.
    """
    for node in nodes if is_parallel() else ():
        if type(node).__name__ == "_DDPSinkBackward":
            replicas = node.ddp_weakref()
            if replicas is not None and replicas.static_graph:
                raise NotImplementedError(STATIC.format(option=option))


def refuse_gathered(option: str, calls: Iterable[Any]) -> None:
    """Refuse to replace gradients of which each process keeps a part.

    Args:
        option: What replaces them, and whose option it is.
        calls: Records of the modules' calls.

    Raises:
        NotImplementedError: If parameters are spread over processes.
    """
    if any(True for _ in _shards(calls)):
        raise NotImplementedError(GATHERED.format(option=option))


@contextmanager
def without_sinks() -> Iterator[None]:
    """Keep what acts for other processes from taking columns for a backward pass.

    Yields:
        Nothing.
    """
    before: list[tuple[Any, str, Any]] = []
    states: list[Any] = []
    inside = torch._C._current_graph_task_id() != -1
    if is_parallel():
        for module, name in _SINKS.items():
            sink = getattr(sys.modules.get(module), name, None)
            if sink is not None:
                before.append((sink, "backward", staticmethod(sink.backward)))
                sink.backward = staticmethod(_pass_on)
        for module, (owner, name) in _AT_OUTPUTS.items():
            cls = getattr(sys.modules.get(module), owner, None)
            if cls is not None and not (inside and name == "pre_backward"):
                before.append((cls, name, getattr(cls, name)))
                setattr(cls, name, lambda self, *args: states.append(self))
        module, name = _AT_FLAT_OUTPUTS
        hook = getattr(sys.modules.get(module), name, None)
        if hook is not None:
            code, defaults = hook.__code__, hook.__kwdefaults__
            original = FunctionType(code, hook.__globals__)
            original.__kwdefaults__ = defaults
            before += [(hook, "__code__", code), (hook, "__kwdefaults__", defaults)]
            hook.__code__ = _unless_root.__code__
            hook.__kwdefaults__ = {"original": original if inside else _same}
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        for x in () if inside else states:
            x._training_state = type(x._training_state).IDLE


def _unless_root(
    state: Any, module: Any, handle: Any, gradient: Any, *_: Any, original: Callable
) -> Any:
    """Leave out what says that the pass will end; parts may gather parameters."""
    return gradient if state._is_root else original(state, module, handle, gradient)


def _same(state: Any, module: Any, handle: Any, gradient: Any, *_: Any) -> Any:
    return gradient


def _pass_on(ctx: Any, *gradients: Any) -> Any:
    return (None, *gradients)


def communicates(function: Any) -> bool:
    """Tell whether processes exchange tensors in a function, which none repeats alone.

    Args:
        function: Function, operation, or class of an operation with its own backward.

    Returns:
        Whether it is one of PyTorch's that does.
    """
    names = ("__module__", "__name__")
    where = ".".join(str(getattr(function, name, "")) for name in names)
    return where.startswith("torch.distributed.") or "c10d" in where


def gathers(hook: Any) -> bool:
    """Tell whether a tensor's hook gathers parameters, and leaves gradients alone.

    Args:
        hook: The hook.

    Returns:
        Whether it is one of what is sharded.
    """
    name = getattr(getattr(hook, "func", hook), "__qualname__", "")
    return name in ("FSDPState._pre_backward", "_pre_backward_hook")


@contextmanager
def gathered(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gather parameters that are spread over processes, until autograd is there.

    A checkpoint inside may run its part of the model again: that is no forward pass,
    after which parameters were given away.

    Args:
        tensors: What columns are pulled back through, in the order of other processes.
            Its hooks know who gathers parameters, and do not run themselves.

    Yields:
        Nothing.
    """
    owners: dict[int, tuple[Any, Any, str]] = {}
    for x in tensors if is_parallel() else ():
        hooks: dict[int, Any] = x._backward_hooks or {}
        for hook in filter(gathers, hooks.values()):
            if not isinstance(hook, partial):
                owner = hook.__self__
                owners.setdefault(id(owner), (owner, _gather, "PRE_BACKWARD"))
            else:
                state, _, owner = hook.args
                make = partial(_gather_flat, state)
                owners.setdefault(id(owner), (owner, make, "BACKWARD_PRE"))
    before = []
    try:
        for owner, gather, name in owners.values():
            if owner is not None:  # a module without parameters of its own
                before.append((owner, owner._training_state))
                owner._training_state = type(owner._training_state)[name]
                gather(owner)
        yield
    finally:
        for owner, training_state in before:
            owner._training_state = training_state


def _gather(state: Any) -> None:
    for module in state._modules:
        module.unshard()


def _gather_flat(state: Any, handle: Any) -> None:
    if not handle.uses_sharded_strategy:
        return
    streams = state._unshard_stream, state._pre_unshard_stream
    sys.modules["torch.distributed.fsdp._runtime_utils"]._unshard(
        state, handle, *streams
    )
    state._device_handle.current_stream().wait_stream(streams[0])


def _flat(x: Tensor) -> Any:
    """Return the flat parameter that a tensor is, or is a view of; ``None`` if not."""
    base = x if x._base is None else x._base
    return base if getattr(base, "_is_flat_param", False) else None


def is_in_place(x: Tensor | None) -> bool:
    """Tell whether FullyShardedDataParallel has put a tensor in a parameter's place.

    Args:
        x: The tensor.

    Returns:
        Whether it is one of the parts of a flat parameter, as far as the modules have
        such parameters for their users, too.
    """
    flat = _flat(x) if is_parallel() and x is not None else None
    return flat is not None and any(x is part for part in flat._tensors or ())


def parts(param: Tensor, nodes: Container[Any]) -> list[Tensor]:
    """List the parts of a flat parameter that stand for parameters.

    Args:
        param: A parameter.
        nodes: Nodes of the graph.

    Returns:
        Parts that sit at these nodes; the parameter itself if it is not flat.
    """
    tensors = getattr(param, "_tensors", None) if is_parallel() else None
    found = [x for x in tensors or () if x is not None and x.grad_fn in nodes]
    return found or [param]


def unify(uses: Iterable[Any], calls: Iterable[Any]) -> None:
    """Let one tensor stand for a part of a flat parameter, whichever call it is of.

    Args:
        uses: The uses of a backward pass. Each call has tensors of its own.
        calls: Records of the modules' calls.
    """
    known: dict[Any, Tensor] = {}

    def same(x: Tensor) -> Tensor:
        flat = _flat(x)
        if flat is None or flat is x:
            return x
        return known.setdefault((id(flat), x.storage_offset()), x)

    for use in uses if is_parallel() else ():
        for constant in use.constants:
            if constant.leaf is not None:
                constant.leaf = same(constant.leaf)
    for call in calls if is_parallel() else ():
        call.parameters = {name: same(x) for name, x in call.parameters.items()}


def _shards(calls: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """List gathered parameters, and what has replaced them: shards."""
    for call in calls if is_parallel() else ():
        for name, param in call.parameters.items():
            path, _, key = name.rpartition(".")
            shard = call.module.get_submodule(path)._parameters.get(key)
            if shard is not None and shard is not param:
                if is_sharded(shard) or _flat(param) is not None:
                    yield param, shard


def move_to_shards(
    calls: Iterable[Any], extensions: Iterable[Any]
) -> Iterator[tuple[Any, Tensor]]:
    """Move fields from gathered parameters to the shards that replace them.

    Args:
        calls: Records of the modules' calls.
        extensions: The extensions whose fields are moved.

    Yields:
        An extension, and a parameter that has its field now.
    """
    for param, shard in _shards(calls):
        for ext in extensions:
            if hasattr(param, ext.savefield):
                value = vars(param).pop(ext.savefield)
                if shard.requires_grad:  # a part of a flat parameter always does
                    setattr(shard, ext.savefield, value)
                    if ext.shard is not None:
                        ext.shard.move(param, shard)
                    yield ext, shard
