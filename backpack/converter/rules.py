"""The table of functions and methods that a known module stands for.

A rule is a function with the signature of what it replaces. It gets an operation's
arguments and returns the module, or ``None`` if there is none for these arguments. Its
parameters ``input`` and ``other`` are tensors, the module's inputs; all else must be
constant. To support a further function, write its rule and add a row.
"""

import operator
from inspect import signature
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import nn
from torch.fx import Node
from torch.nn import Module
from torch.nn import functional as F

from backpack.converter.reading import Target, is_sequence
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
    both = both and not is_sequence(input)
    return SumModule() if both and alpha == 1 else None


def _mul(input, other):
    # Multiplication commutes: 2.0 * x has the number first
    number = other if isinstance(input, Node) else input
    return _scale(float(number), operator.mul, number) if is_number(number) else None


def _div(input, other, *, rounding_mode=None):
    if is_number(other) and other != 0 and rounding_mode is None:
        return _scale(1.0 / other, operator.truediv, other)
    return None


def _neg(input):
    return _scale(-1.0, operator.mul, -1)


def _scale(weight: float, *written_as: Any) -> ScaleModule:
    return ScaleModule(weight, written_as=written_as)


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
    keeps_samples = isinstance(index, tuple) and index[:1] == (slice(None),)
    slicing = keeps_samples and all(type(i) in (int, slice) for i in index)
    return Slicing(tuple(index)) if slicing else None


def _pad(input, pad, mode="constant", value=None):
    return Pad(pad, mode=mode, value=0.0 if value is None else value)


def _dropout(module: Callable) -> Rule:
    def rule(input, p=0.5, training=True, inplace=False):
        # With a constant flag, it would not depend on the module's mode
        return module(p=p) if isinstance(training, TrainingFlag) else None

    return rule


def _torch_dropout(input, p, train):
    return nn.Dropout(p=p) if isinstance(train, TrainingFlag) else None


def _same_options(module: Callable) -> Rule:
    """Make the rule of a function whose options are those of a module, in order.

    Args:
        module: The module class.

    Returns:
        The rule.
    """

    def rule(input, *args, **kwargs):
        known = signature(module).parameters
        others = {name for name, value in kwargs.items() if value and name not in known}
        if others - {"_stacklevel"} or len(args) > len(known):
            return None
        options = {name: value for name, value in kwargs.items() if name in known}
        new_module = module(*args, **options)
        if getattr(new_module, "return_indices", False):
            return None
        if hasattr(new_module, "inplace"):
            new_module.inplace = False
        return new_module

    return rule


# Modules whose function has their name in lower case
_NAMED_ALIKE = (
    "ReLU6 ELU SiLU Mish GELU LogSigmoid Softplus Softsign Tanhshrink Softshrink "
    "Hardsigmoid Hardswish Hardtanh GLU"
)
# Module -> functions and methods with the same options
_SAME_OPTIONS: Dict[Callable, Tuple[Target, ...]] = {
    **{getattr(nn, name): (getattr(F, name.lower()),) for name in _NAMED_ALIKE.split()},
    nn.ReLU: (F.relu, torch.relu, "relu"),
    nn.Sigmoid: (torch.sigmoid, F.sigmoid, "sigmoid"),
    nn.Tanh: (torch.tanh, F.tanh, "tanh"),
    nn.LeakyReLU: (F.leaky_relu,),
    nn.CELU: (F.celu, torch.celu),
    nn.SELU: (F.selu, torch.selu),
    nn.Hardshrink: (F.hardshrink, torch.hardshrink),
    nn.Softmax: (F.softmax, torch.softmax, "softmax"),
    nn.LogSoftmax: (F.log_softmax, torch.log_softmax, "log_softmax"),
    nn.Upsample: (F.interpolate,),
    nn.PixelShuffle: (F.pixel_shuffle,),
    nn.PixelUnshuffle: (F.pixel_unshuffle,),
    **{
        # whose last two options are in another order: if only `ceil_mode` is given, it
        # is taken for `return_indices`, for which there is no rule
        getattr(nn, f"MaxPool{dim}d"): tuple(
            getattr(namespace, f"max_pool{dim}d") for namespace in (F, torch)
        )
        for dim in (1, 2, 3)
    },
    **{
        getattr(nn, f"{module}{dim}d"): (getattr(F, f"{function}{dim}d"),)
        for dim in (1, 2, 3)
        for module, function in (
            ("AvgPool", "avg_pool"),
            ("AdaptiveAvgPool", "adaptive_avg_pool"),
            ("AdaptiveMaxPool", "adaptive_max_pool"),
        )
    },
}
_OTHER: Dict[Target, Rule] = {
    F.dropout: _dropout(nn.Dropout),
    F.dropout1d: _dropout(nn.Dropout1d),
    F.dropout2d: _dropout(nn.Dropout2d),
    F.dropout3d: _dropout(nn.Dropout3d),
    F.alpha_dropout: _dropout(nn.AlphaDropout),
    torch.dropout: _torch_dropout,
    F.pad: _pad,
}


def _rows(rule: Rule, *targets: Target) -> Dict[Target, Rule]:
    return dict.fromkeys(targets, rule)


# Kind of operation -> function or method name -> rule
RULES: Dict[str, Dict[Target, Rule]] = {
    "function": {
        **{
            target: _same_options(module)
            for module, targets in _SAME_OPTIONS.items()
            for target in targets
        },
        **_OTHER,
    },
    "flatten": _rows(_flatten, torch.flatten, "flatten"),
    "getitem": _rows(_getitem, operator.getitem),
    "permute": _rows(_permute, torch.permute, "permute"),
    "transpose": _rows(
        _transpose,
        *(torch.transpose, torch.swapaxes, torch.swapdims),
        *("transpose", "swapaxes", "swapdims"),
    ),
    "add": _rows(_add, operator.add, torch.add, "add"),
    "mul": {
        **_rows(_mul, operator.mul, torch.mul, torch.multiply, "mul", "multiply"),
        **_rows(_div, operator.truediv, torch.div, torch.divide, torch.true_divide),
        **_rows(_div, "div", "divide", "true_divide"),
        **_rows(_neg, operator.neg, torch.neg, torch.negative, "neg", "negative"),
    },
}
