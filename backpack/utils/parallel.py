"""What processes that share a model do to it: replicas, shards, nodes in the graph."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Tuple

import torch
from torch import Tensor
from torch.nn import Module

# Nodes that act when a backward pass comes by
_SINKS = {
    # with static_graph=True, one at the model's output waits for the pass
    "torch.nn.parallel.distributed": "_DDPSink",
    # those at the inputs of what is sharded give its parameters away
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        "RegisterPostBackwardFunction"
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


@contextmanager
def without_sinks() -> Iterator[None]:
    """Keep nodes of other processes' making from taking columns for a backward pass.

    Yields:
        Nothing.
    """
    modules = [(sys.modules.get(m), name) for m, name in _SINKS.items()]
    found = [getattr(m, name, None) for m, name in modules] if is_parallel() else []
    sinks = {sink: sink.backward for sink in found if sink is not None}
    for sink in sinks:
        sink.backward = staticmethod(_pass_on)
    try:
        yield
    finally:
        for sink, backward in sinks.items():
            sink.backward = staticmethod(backward)


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
    for call in calls:
        for name, param in call.parameters.items():
            path, _, key = name.rpartition(".")
            shard = call.module.get_submodule(path)._parameters.get(key)
            if shard is None or shard is param or not is_sharded(shard):
                continue
            for ext in extensions:
                if hasattr(param, ext.savefield):
                    setattr(shard, ext.savefield, vars(param).pop(ext.savefield))
                    yield ext, shard
