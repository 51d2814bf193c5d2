"""Types of numbers, and conversions that cost next to nothing where there are none."""

from typing import Any, Callable, Dict, Literal, Optional, Tuple

import torch
from torch import Generator, Tensor

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

# A context in which operations get the types of their operands
without_autocast = torch._C._DisableAutocast


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


def dense(x: Tensor) -> Tensor:
    """Give a tensor strides, which rules and trials need, also if it is sparse.

    Args:
        x: Tensor of any layout, also nested.

    Returns:
        The same numbers; a nested tensor as it is.
    """
    return x if x.layout is torch.strided or x.is_nested else x.to_dense()


def kind(x: Tensor) -> Dict[str, Any]:
    """Describe a tensor's numbers, for functions that create tensors like it.

    Args:
        x: Tensor.

    Returns:
        The keyword arguments ``dtype`` and ``device``.
    """
    return {"dtype": x.dtype, "device": x.device}


def version_of(x: Tensor) -> int:
    """Count how often a tensor was modified in place.

    Args:
        x: Tensor.

    Returns:
        The number; zero for one made in inference mode, for which nobody counts.
    """
    return 0 if x.is_inference() else x._version


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
