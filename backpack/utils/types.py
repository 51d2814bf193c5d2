"""Types of numbers, and conversions that cost next to nothing where there are none."""

import pickle
import random
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Generator, Tensor
from torch._C import _functorch as functorch
from torch.autograd.graph import Node
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

# A module whose class its rule knows, with `input0`, …, `output` of its call
Layer = Any
# Gradients at the inputs of a module, or at its outputs
Grads = Tuple[Tensor, ...]

# Multiplies with a matrix
MatProd = Callable[[Tensor], Tensor]

# Options of extensions
FailMode = Literal["ERROR", "WARNING", "SILENT"]
FisherType = Literal["mc", "empirical"]
Over = Literal["all", "parameter"]
Scale = Literal["summand", "sample"]
WeightSharing = Optional[Literal["expand", "reduce"]]
# Where random numbers come from. ``None``: from PyTorch's global generator
Randomness = Optional[Generator]

HALF = (torch.float16, torch.bfloat16)


def undisturbed() -> AbstractContextManager[Any]:
    """Let operations get the types of their operands, and nobody look for NaN.

    Returns:
        Context for what is no part of the user's program.
    """
    plain = torch._C._DisableAutocast()
    infers = torch.is_inference_mode_enabled()
    return _all(plain) if infers or torch.is_anomaly_enabled() else plain


@contextmanager
def _all(plain: AbstractContextManager[Any]) -> Iterator[None]:
    # which changes what is asked of the graph, and makes tensors that nobody may read
    graph = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(graph):
        with plain, unwatched():
            yield


def unwatched() -> AbstractContextManager[Any]:
    """Let nobody look for NaN, which is not possible in several columns at once.

    Returns:
        The context; a switch that is off is left alone, as it is one of all threads.
    """
    on = torch.is_anomaly_enabled()
    return torch.autograd.set_detect_anomaly(False) if on else nullcontext()


def as_type(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating-point tensors; leave everything else as it is.

    Args:
        value: Anything.
        dtype: Type that a floating-point tensor gets.

    Returns:
        The value.
    """
    differs = isinstance(value, Tensor) and value.dtype != dtype
    return value.to(dtype) if differs and value.is_floating_point() else value


@lru_cache(maxsize=256)
def _has_own_meaning(cls: Any) -> bool:
    own = getattr(cls, "__torch_function__", None)
    own = getattr(own, "__func__", own)
    usual = getattr(Tensor.__torch_function__, "__func__", None)
    ours = usual, torch._C._disabled_torch_function_impl, None
    return own not in ours and cls.__module__.split(".")[0] not in _NO_MEANING


@lru_cache(maxsize=256)
def _is_foreign(cls: Any) -> bool:
    return cls.__module__.split(".")[0] not in _NO_CHANGE


# Tensors that say more than numbers, and modes that change no operation on data
_NO_MEANING = ("torch", "torchvision")
_NO_CHANGE = ("torch", "backpack")


def is_redefining() -> bool:
    """Tell whether a mode is active that may change what operations do."""
    for i in range(torch._C._len_torch_function_stack()):
        mode: Any = type(torch._C._get_function_stack_at(i))
        if _is_foreign(mode):
            return True
    return False


def are_redefined(values: Iterable[Any]) -> bool:
    """Tell whether operations on some tensors may do something else than usual.

    Args:
        values: Operands.

    Returns:
        Whether one is of a class with a ``__torch_function__`` of its own.
    """
    for x in values:
        cls: Any = type(x)
        if cls is not Tensor and cls is not Parameter and _has_own_meaning(cls):
            return True
    return False


def decides(cls: type) -> bool:
    """Tell whether an operand's class says what an operation does.

    Args:
        cls: The class.

    Returns:
        Whether it has a ``__torch_function__`` of its own, which has not been asked.
    """
    if not issubclass(cls, Tensor):
        return True
    return torch._C._is_torch_function_enabled() and _has_own_meaning(cls)


def handed_on(func: Callable, types: tuple, args: tuple, kwargs: Dict[str, Any]) -> Any:
    """Let operands' classes decide on an operation, as PyTorch does after all modes.

    Args:
        func: The operation.
        types: The classes.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        What the first of them returns that knows the operation.

    Raises:
        TypeError: If none of them does.
    """
    for cls in types:
        out = cls.__torch_function__(func, types, args, kwargs)
        if out is not NotImplemented:
            return out
    names = ", ".join(cls.__name__ for cls in types)
    raise TypeError(f"no implementation of {func} for {names}")


def dense(x: Tensor) -> Tensor:
    """Give a tensor strides, which rules and trials need, also if it is sparse.

    Args:
        x: Tensor of any layout, also nested.

    Returns:
        The same numbers; a nested tensor as it is.
    """
    return x if x.layout is torch.strided or x.is_nested else x.to_dense()


def is_same(x: Tensor, plain: Tensor) -> bool:
    """Tell whether two results agree, up to another order of summation.

    Args:
        x: Result.
        plain: Another one, whose size says what rounding is.

    Returns:
        Whether they do.
    """
    x, plain = x.detach(), plain.detach()
    if x.shape != plain.shape or not (plain.numel() and is_inexact(plain)):
        return torch.equal(x, plain)
    eps = min(8 * torch.finfo(plain.dtype).eps, 0.1)  # of numbers of 8 bits, too
    wide = torch.complex64 if plain.is_complex() else torch.float32
    x, plain = x.to(wide), plain.to(wide)
    scale = plain.abs().nan_to_num(0.0, 0.0).max().item()
    return torch.allclose(x, plain, 0.0, max(eps, 1e-6) * scale, equal_nan=True)


def kind(x: Tensor) -> Dict[str, Any]:
    """Describe a tensor's numbers, for functions that create tensors like it.

    Args:
        x: Tensor.

    Returns:
        The keyword arguments ``dtype`` and ``device``.
    """
    return {"dtype": x.dtype, "device": x.device}


def generator_of(device: torch.device) -> Generator:
    """Return what operations on a device draw from.

    Args:
        device: The device.

    Returns:
        Its generator of random numbers.
    """
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    known = getattr(getattr(torch, device.type, None), "default_generators", ())
    return known[device.index or 0] if known else torch.default_generator


def drawn_like(tensors: Sequence[Tensor]) -> List[Tensor]:
    """Draw numbers for tensors, always the same and nobody's, none of which is small.

    Those of two tensors differ: a difference of equal ones would be zero.

    Args:
        tensors: The tensors.

    Returns:
        Numbers of their shapes and types.
    """
    draws = [Generator(x.device).manual_seed(i) for i, x in enumerate(tensors)]
    pairs = zip(tensors, draws)
    return [torch.rand(x.shape, generator=draw, **kind(x)) + 0.5 for x, draw in pairs]


@contextmanager
def drawn_elsewhere() -> Iterator[List[str]]:
    """Notice random numbers of Python and NumPy; put their generators back.

    Yields:
        A list, which says in the end whose were drawn.
    """
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    sources: Dict[str, Any] = {"`random`": (random.getstate, random.setstate)}
    if numpy is not None:
        sources["`numpy.random`"] = (numpy.get_state, numpy.set_state)
    before = {who: get() for who, (get, _) in sources.items()}
    drawn: List[str] = []
    try:
        yield drawn
    finally:
        for who, (get, put) in sources.items():
            if pickle.dumps(get()) != pickle.dumps(before[who]):
                drawn.append(who)
                put(before[who])


def version_of(x: Tensor) -> int:
    """Count how often a tensor was modified in place.

    Args:
        x: Tensor.

    Returns:
        The number; zero for one made in inference mode, for which nobody counts.
    """
    return 0 if x.is_inference() else x._version


def node_of(x: Tensor) -> Optional[Node]:
    """Return the node of the autograd graph that a tensor comes from.

    Args:
        x: Tensor.

    Returns:
        Its ``grad_fn``; ``None`` without one, and for a view that was made without
        gradients before its base was written to, of which PyTorch refuses to tell it.
    """
    try:
        return x.grad_fn
    except RuntimeError:
        return None


def versions_of(values: Iterable[Any]) -> List[int]:
    """Count how often each tensor among some values was modified in place.

    Args:
        values: The values.

    Returns:
        The numbers of times, for those that are tensors.
    """
    return [version_of(x) for x in values if isinstance(x, Tensor)]


def place_of(x: Tensor) -> int:
    """Tell where a tensor's numbers are: elsewhere after ``x.data = other``.

    Args:
        x: Tensor.

    Returns:
        The address, or one of what keeps them; zero for a tensor that has none.
    """
    try:
        if type(x) in (Tensor, Parameter):
            return x.data_ptr()
        # a subclass's own method is not asked, and one without numbers may warn
        with torch._C.DisableTorchFunctionSubclass():
            return x.untyped_storage()._cdata + x.storage_offset()
    except RuntimeError:  # sparse tensors, wrappers
        return 0


def behind(x: Any) -> Any:
    """Look behind what transforms of ``torch.func`` have put around a tensor.

    Args:
        x: The tensor, or anything else.

    Returns:
        What is wrapped at last.
    """
    while isinstance(x, Tensor) and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def common_shape(tree: Any) -> Optional[torch.Size]:
    """Tell to which shape tensors are broadcast.

    Args:
        tree: What they are in.

    Returns:
        The shape, ``None`` if there is none.
    """
    try:
        return torch.broadcast_shapes(*[x.shape for x in tensors_in(tree)])
    except RuntimeError:
        return None


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums are accumulated: float32 or better.

    Args:
        dtype: Type of the summands.

    Returns:
        float32 for the half-precision types, else ``dtype``.
    """
    return torch.float32 if dtype in HALF else dtype


def full_precision(x: Tensor) -> Tensor:
    """Convert a tensor to the type in which sums of its numbers are accumulated.

    Args:
        x: Tensor.

    Returns:
        The tensor itself, or a float32 version of it if its type is a 16-bit one.
    """
    return x.float() if x.dtype in HALF else x


_NO_DATA = (Module, type, FunctionType, ModuleType)  # objects that hold no inputs


def tensors_in(values: Any, depth: int = 0) -> List[Tensor]:
    """List the tensors in nested lists, tuples and dictionaries.

    Args:
        values: Anything.
        depth: How deep to look into objects, which have tensors as attributes or are
            containers of a class of their own. Default: 0, for not at all.

    Returns:
        The tensors.
    """
    found: List[Tensor] = []
    for x in tree_leaves(values):
        if isinstance(x, Tensor):
            found.append(x)
        elif depth and not isinstance(x, _NO_DATA):
            found += tensors_in(_contents(x), depth - 1)
    return found


def _contents(x: Any) -> List[Any]:
    """List what an object has as attributes, and what it contains."""
    names = [field.name for field in fields(x)] if is_dataclass(x) else []
    attributes = getattr(x, "__dict__", None) or {n: getattr(x, n) for n in names}
    if isinstance(x, Mapping):
        return [*attributes.values(), *x.values()]
    return [*attributes.values(), *(x if isinstance(x, (list, tuple)) else ())]


def is_inexact(x: Any) -> bool:
    """Tell whether something is a tensor of real or complex numbers.

    Args:
        x: Anything.

    Returns:
        Whether it is.
    """
    return isinstance(x, Tensor) and (x.dtype.is_floating_point or x.is_complex())
