"""What processes that share a model do to it: replicas, shards, nodes in the graph."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, List, Tuple

import torch
from torch import Tensor
from torch.nn import Module

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

FLAT = (
    "{exts}: a part of the model is inside of FullyShardedDataParallel, which puts all "
    "parameters into one that no operation uses. Use "
    "`torch.distributed.fsdp.fully_shard`, or DistributedDataParallel."
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
    "{option}: `fully_shard` gathers gradients from all processes before the backward "
    "pass is over, and weighted ones are known after it. Use DistributedDataParallel, "
    "or read the field and do without the option."
)


def is_parallel() -> bool:
    """Tell whether there are other processes.

    Returns:
        Whether a process group is initialized.
    """
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


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
        NotImplementedError: If there is one.
    """
    for param in params if is_parallel() else ():
        if getattr(param, "_is_flat_param", False):
            raise NotImplementedError(FLAT.format(exts=extensions))
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
        NotImplementedError: If ``fully_shard`` has spread parameters.
    """
    if is_parallel() and any(True for _ in _shards(calls)):
        raise NotImplementedError(GATHERED.format(option=option))


@contextmanager
def without_sinks() -> Iterator[None]:
    """Keep what acts for other processes from taking columns for a backward pass.

    Yields:
        Nothing.
    """
    before: List[Tuple[Any, str, Any]] = []
    states: List[Any] = []
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
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        for x in () if inside else states:
            x._training_state = type(x._training_state).IDLE


def _pass_on(ctx: Any, *gradients: Any) -> Any:
    return (None, *gradients)


def gather(modules: Iterable[Module]) -> None:
    """Gather the parameters that ``fully_shard`` has spread, until autograd is there.

    Args:
        modules: Modules that columns are pulled back through.
    """
    for module in modules if is_parallel() else ():
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.unshard()  # type: ignore[operator]


def _shards(calls: Iterable[Any]) -> Iterator[Tuple[Tensor, Tensor]]:
    """List gathered parameters, and the shards that have replaced them."""
    for call in calls:
        for name, param in call.parameters.items():
            path, _, key = name.rpartition(".")
            shard = call.module.get_submodule(path)._parameters.get(key)
            if shard is not None and shard is not param and is_sharded(shard):
                yield param, shard


def move_to_shards(
    calls: Iterable[Any], extensions: Iterable[Any]
) -> Iterator[Tuple[Any, Tensor]]:
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
                setattr(shard, ext.savefield, vars(param).pop(ext.savefield))
                yield ext, shard
