"""The table of functions and methods that a known module stands for.

A rule is a function with the signature of what it replaces. It gets an operation's
arguments and returns the module, or ``None`` if there is none for these arguments. Its
parameters ``input`` and ``other`` are tensors, the module's inputs; all else must be
constant. To support a further function, write its rule and add a row.
"""

import operator
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import nn
from torch.fx import Node
from torch.nn import Module
from torch.nn import functional as F

from backpack.converter.reading import Target
from backpack.converter.tracer import TrainingFlag
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

Rule = Callable[..., Optional[Module]]


def is_number(value: Any) -> bool:
    """Whether a value is a real Python number.

    Args:
        value: The value.

    Returns:
        ``True`` for ``int`` and ``float``, but not for ``bool``.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flatten(input, start_dim=0, end_dim=-1):
    return None if start_dim == 0 else nn.Flatten(start_dim, end_dim)


def _add(input, other, *, alpha=1):
    both = isinstance(input, Node) and isinstance(other, Node)
    return SumModule() if both and alpha == 1 else None


def _mul(input, other):
    # Multiplication commutes: 2.0 * x has the number first
    number = other if isinstance(input, Node) else input
    return ScaleModule(float(number)) if is_number(number) else None


def _div(input, other, *, rounding_mode=None):
    if is_number(other) and other != 0 and rounding_mode is None:
        return ScaleModule(1.0 / other)
    return None


def _neg(input):
    return ScaleModule(-1.0)


def _permute(input, *dims, **dims_keyword):
    dims = dims_keyword.get("dims", dims)
    if len(dims) == 1 and not isinstance(dims[0], int):
        dims = dims[0]
    return Permute(*dims) if dims[0] in (0, -len(dims)) else None


def _transpose(input, dim0, dim1):
    # Whether a negative axis is the batch axis depends on the number of axes
    positive = dim0 > 0 and dim1 > 0
    return Permute(dim0, dim1, init_transpose=True) if positive else None


def _getitem(input, index):
    slicing = (
        isinstance(index, tuple)
        and len(index) > 0
        and index[0] == slice(None)
        and all(isinstance(i, (int, slice)) for i in index)
        and not any(isinstance(i, bool) for i in index)
    )
    return Slicing(tuple(index)) if slicing else None


def _pad(input, pad, mode="constant", value=None):
    return Pad(pad, mode=mode, value=0.0 if value is None else value)


def _softmax(module: Callable) -> Rule:
    def rule(input, dim=None, _stacklevel=3, dtype=None):
        return module(dim=dim) if dim is not None and dtype is None else None

    return rule


def _dropout(module: Callable) -> Rule:
    def rule(input, p=0.5, training=True, inplace=False):
        # With a constant flag, it would not depend on the module's mode
        return module(p=p) if isinstance(training, TrainingFlag) else None

    return rule


def _torch_dropout(input, p, train):
    return nn.Dropout(p=p) if isinstance(train, TrainingFlag) else None


def _max_pool(module: Callable) -> Rule:
    def rule(
        input,
        kernel_size,
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=False,
    ):
        if return_indices:
            return None
        stride = stride if stride not in (None, [], ()) else kernel_size
        return module(kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)

    return rule


def _avg_pool1d(
    input,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
):
    return nn.AvgPool1d(kernel_size, stride, padding, ceil_mode, count_include_pad)


def _avg_pool(module: Callable) -> Rule:
    def rule(
        input,
        kernel_size,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    ):
        return module(
            kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        )

    return rule


def _adaptive_pool(module: Callable) -> Rule:
    def rule(input, output_size, return_indices=False):
        return None if return_indices else module(output_size)

    return rule


def _interpolate(
    input,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
):
    if antialias:
        return None
    return nn.Upsample(size, scale_factor, mode, align_corners, recompute_scale_factor)


def _options(module: Callable, **defaults: Any) -> Rule:
    """Make the rule of a function whose options are those of a module.

    Args:
        module: The module class.
        defaults: The options, in the function's order, with its defaults.

    Returns:
        The rule.
    """

    def rule(input, *args, inplace=False, **kwargs):
        surplus = args[len(defaults) :]  # ``inplace`` may follow the options
        if not all(isinstance(arg, bool) for arg in surplus):
            return None
        return module(**{**defaults, **dict(zip(defaults, args)), **kwargs})

    return rule


def _rows(rule: Rule, *targets: Target) -> Iterator[Tuple[Target, Rule]]:
    return ((target, rule) for target in targets)


_POOLS = {
    target: rule
    for dim in (1, 2, 3)
    for target, rule in (
        (
            getattr(F, f"max_pool{dim}d"),
            _max_pool(getattr(nn, f"MaxPool{dim}d")),
        ),
        (
            getattr(torch, f"max_pool{dim}d"),
            _max_pool(getattr(nn, f"MaxPool{dim}d")),
        ),
        (
            getattr(F, f"avg_pool{dim}d"),
            _avg_pool1d if dim == 1 else _avg_pool(getattr(nn, f"AvgPool{dim}d")),
        ),
        (
            getattr(F, f"adaptive_avg_pool{dim}d"),
            _adaptive_pool(getattr(nn, f"AdaptiveAvgPool{dim}d")),
        ),
        (
            getattr(F, f"adaptive_max_pool{dim}d"),
            _adaptive_pool(getattr(nn, f"AdaptiveMaxPool{dim}d")),
        ),
    )
}

_ELEMENTWISE = {
    **dict(_rows(_options(nn.ReLU), F.relu, torch.relu, "relu")),
    **dict(_rows(_options(nn.ReLU6), F.relu6)),
    **dict(_rows(_options(nn.Sigmoid), torch.sigmoid, F.sigmoid, "sigmoid")),
    **dict(_rows(_options(nn.Tanh), torch.tanh, F.tanh, "tanh")),
    **dict(_rows(_options(nn.LeakyReLU, negative_slope=0.01), F.leaky_relu)),
    **dict(_rows(_options(nn.ELU, alpha=1.0), F.elu)),
    **dict(_rows(_options(nn.CELU, alpha=1.0), F.celu, torch.celu)),
    **dict(_rows(_options(nn.SELU), F.selu, torch.selu)),
    **dict(_rows(_options(nn.SiLU), F.silu)),
    **dict(_rows(_options(nn.Mish), F.mish)),
    **dict(_rows(_options(nn.GELU, approximate="none"), F.gelu)),
    **dict(_rows(_options(nn.LogSigmoid), F.logsigmoid)),
    **dict(_rows(_options(nn.Softplus, beta=1, threshold=20), F.softplus)),
    **dict(_rows(_options(nn.Softsign), F.softsign)),
    **dict(_rows(_options(nn.Tanhshrink), F.tanhshrink)),
    **dict(_rows(_options(nn.Softshrink, lambd=0.5), F.softshrink)),
    **dict(_rows(_options(nn.Hardshrink, lambd=0.5), F.hardshrink, torch.hardshrink)),
    **dict(_rows(_options(nn.Hardsigmoid), F.hardsigmoid)),
    **dict(_rows(_options(nn.Hardswish), F.hardswish)),
    **dict(_rows(_options(nn.Hardtanh, min_val=-1.0, max_val=1.0), F.hardtanh)),
    **dict(_rows(_options(nn.GLU, dim=-1), F.glu)),
}

_OTHER = {
    **dict(_rows(_softmax(nn.Softmax), F.softmax)),
    **dict(_rows(_softmax(nn.LogSoftmax), F.log_softmax)),
    **dict(_rows(_options(nn.Softmax, dim=None), torch.softmax, "softmax")),
    **dict(_rows(_options(nn.LogSoftmax, dim=None), torch.log_softmax, "log_softmax")),
    **dict(_rows(_dropout(nn.Dropout), F.dropout)),
    **dict(_rows(_dropout(nn.Dropout1d), F.dropout1d)),
    **dict(_rows(_dropout(nn.Dropout2d), F.dropout2d)),
    **dict(_rows(_dropout(nn.Dropout3d), F.dropout3d)),
    **dict(_rows(_dropout(nn.AlphaDropout), F.alpha_dropout)),
    **dict(_rows(_torch_dropout, torch.dropout)),
    **dict(_rows(_pad, F.pad)),
    **dict(_rows(_interpolate, F.interpolate)),
    **dict(_rows(_options(nn.PixelShuffle, upscale_factor=None), F.pixel_shuffle)),
    **dict(
        _rows(_options(nn.PixelUnshuffle, downscale_factor=None), F.pixel_unshuffle)
    ),
}

# Kind of operation -> function or method name -> rule
RULES: Dict[str, Dict[Target, Rule]] = {
    "function": {**_ELEMENTWISE, **_POOLS, **_OTHER},
    "flatten": dict(_rows(_flatten, torch.flatten, "flatten")),
    "getitem": dict(_rows(_getitem, operator.getitem)),
    "permute": dict(_rows(_permute, torch.permute, "permute")),
    "transpose": dict(
        _rows(
            _transpose,
            *(torch.transpose, torch.swapaxes, torch.swapdims),
            *("transpose", "swapaxes", "swapdims"),
        )
    ),
    "add": dict(_rows(_add, operator.add, torch.add, "add")),
    "mul": {
        **dict(_rows(_mul, operator.mul, torch.mul, torch.multiply)),
        **dict(_rows(_mul, "mul", "multiply")),
        **dict(_rows(_div, operator.truediv, torch.div, torch.divide)),
        **dict(_rows(_div, "div", "divide", "true_divide", torch.true_divide)),
        **dict(_rows(_neg, operator.neg, torch.neg, torch.negative)),
        **dict(_rows(_neg, "neg", "negative")),
    },
}
