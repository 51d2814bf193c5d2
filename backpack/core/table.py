"""THE table: which layer has which derivatives, and for which parameters.

A layer that is not in the table gets the generic rule from autograd. A row is all a new
layer needs besides its derivatives.
"""

from __future__ import annotations

from functools import lru_cache
from inspect import signature
from types import FunctionType
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from torch import Tensor, nn
from torch.nn import Module, functional
from torch.nn.utils.rnn import PackedSequence

from backpack.core.derivatives import activations, linear_map, normalization, recurrent
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.dropout import DropoutDerivatives
from backpack.core.derivatives.elementwise import (
    ElementwiseDerivatives,
    PiecewiseLinearDerivatives,
)
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.generic_loss import GenericLossDerivatives
from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.maxpoolnd import (
    AdaptiveMaxPoolNDDerivatives,
    MaxPoolNDDerivatives,
)
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.derivatives.prelu import PReLUDerivatives
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.utils.parallel import is_in_place

WEIGHT = ("weight",)
WEIGHT_BIAS = ("weight", "bias")


class Row(NamedTuple):
    """What is known of a layer.

    Attributes:
        derivatives: Its derivatives.
        params: Names of the parameters they cover; ``None`` for all of the layer's own.
        min_dim: Number of axes that its input needs to have, batch axis included.
        several_outputs: Whether the derivatives take cotangents of several outputs.
    """

    derivatives: Any
    params: tuple[str, ...] | None = ()
    min_dim: int = 1
    several_outputs: bool = False

    def accepts(self, module: Module, arguments: Sequence[Any]) -> bool:
        """Tell whether the derivatives cover the parameters in a call.

        Args:
            module: The layer.
            arguments: What went into it.

        Returns:
            Whether they do.
        """
        x = arguments[0]
        covered = self.derivatives.supports(module, tuple(arguments))
        if self.several_outputs and isinstance(x, PackedSequence):
            return covered
        return covered and isinstance(x, Tensor) and x.dim() >= self.min_dim

    def covers(self, module: Module, name: str) -> bool:
        """Tell whether the derivatives cover a parameter.

        Args:
            module: The layer.
            name: Name of the parameter.

        Returns:
            Whether they do. Those of a parametrization are not the layer's own.
        """
        own = name in module._parameters or is_in_place(vars(module).get(name))
        return own and (self.params is None or name in self.params)


def _layers(names: str) -> list[type[Module]]:
    """Find layers of PyTorch.

    Args:
        names: Their names. One with ``Nd`` is for one, two and three axes.

    Returns:
        Their classes.
    """
    found = [name.replace("Nd", f"{n}d") for name in names.split() for n in (1, 2, 3)]
    return [getattr(nn, name) for name in dict.fromkeys(found)]


def _rows(names: str, *row: Any) -> dict[type[Module], Row]:
    """Make one row for several layers, see :class:`Row`."""
    return dict.fromkeys(_layers(names), Row(*row))


def _by_axes(
    names: str, derivatives: Callable, params: tuple[str, ...] = (), others: int = 0
) -> dict[type[Module], Row]:
    """Make a row for each number of axes, which the derivatives know.

    Args:
        names: Name of the layers.
        derivatives: Makes their derivatives for a number of axes.
        params: See :class:`Row`. Default: none.
        others: Number of axes that the input needs besides. Default: 0.

    Returns:
        The rows.
    """
    axes = enumerate(_layers(names), start=1)
    return {cls: Row(derivatives(n), params, n + others) for n, cls in axes}


LAYERS: dict[type[Module], Row] = {
    # with parameters
    nn.Linear: Row(LinearDerivatives(), WEIGHT_BIAS, 2),
    **_by_axes("ConvNd", ConvNDDerivatives, WEIGHT_BIAS, 2),
    **_by_axes("ConvTransposeNd", ConvTransposeNDDerivatives, WEIGHT_BIAS, 2),
    **_rows("BatchNormNd", BatchNormNdDerivatives(), WEIGHT_BIAS, 2),
    **_by_axes(
        "InstanceNormNd",
        lambda n: normalization.InstanceNormNdDerivatives(),
        WEIGHT_BIAS,
        2,
    ),
    nn.LayerNorm: Row(normalization.LayerNormDerivatives(), WEIGHT_BIAS, 2),
    nn.RMSNorm: Row(normalization.RMSNormDerivatives(), WEIGHT, 2),
    nn.GroupNorm: Row(normalization.GroupNormDerivatives(), WEIGHT_BIAS, 2),
    nn.Embedding: Row(EmbeddingDerivatives(), WEIGHT, 1),
    nn.PReLU: Row(PReLUDerivatives(), WEIGHT, 1),
    nn.RNN: Row(recurrent.RNNDerivatives(), None, several_outputs=True),
    nn.LSTM: Row(recurrent.LSTMDerivatives(), None, several_outputs=True),
    nn.GRU: Row(recurrent.GRUDerivatives(), None, several_outputs=True),
    # activations
    nn.ReLU: Row(activations.ReLUDerivatives()),
    nn.LeakyReLU: Row(activations.LeakyReLUDerivatives()),
    nn.ELU: Row(activations.ELUDerivatives()),
    nn.SELU: Row(activations.SELUDerivatives()),
    nn.Sigmoid: Row(activations.SigmoidDerivatives()),
    nn.LogSigmoid: Row(activations.LogSigmoidDerivatives()),
    nn.Tanh: Row(activations.TanhDerivatives()),
    **_rows(
        "CELU GELU Hardswish Mish SiLU Softplus Softsign Tanhshrink",
        ElementwiseDerivatives(),
    ),
    **_rows(
        "Hardshrink Hardsigmoid Hardtanh ReLU6 Softshrink Threshold",
        PiecewiseLinearDerivatives(),
    ),
    **_rows("GLU LogSoftmax Softmax", BaseDerivatives()),
    # pooling
    **_by_axes("AvgPoolNd", linear_map.AvgPoolNDDerivatives),
    **_by_axes("MaxPoolNd", MaxPoolNDDerivatives),
    **_by_axes("AdaptiveAvgPoolNd", linear_map.AdaptiveAvgPoolNDDerivatives),
    **_by_axes("AdaptiveMaxPoolNd", AdaptiveMaxPoolNDDerivatives),
    # dropout
    **_rows("Dropout DropoutNd AlphaDropout FeatureAlphaDropout", DropoutDerivatives()),
    # shapes, padding, sums
    **_rows("Flatten Identity Unflatten", linear_map.FlattenDerivatives()),
    **_rows("ConstantPadNd ZeroPadNd", linear_map.ZeroPad2dDerivatives()),
    **_rows(
        "CircularPadNd ReflectionPadNd ReplicationPadNd "
        "ChannelShuffle PixelShuffle PixelUnshuffle Upsample",
        linear_map.LinearMapDerivatives(),
    ),
    Pad: Row(linear_map.PadDerivatives()),
    Permute: Row(linear_map.PermuteDerivatives()),
    ScaleModule: Row(linear_map.ScaleModuleDerivatives()),
    Slicing: Row(linear_map.SlicingDerivatives()),
    SumModule: Row(linear_map.SumModuleDerivatives()),
}

LOSSES: dict[type[Module], Row] = {
    nn.CrossEntropyLoss: Row(CrossEntropyLossDerivatives()),
    nn.MSELoss: Row(MSELossDerivatives()),
    nn.BCEWithLogitsLoss: Row(BCELossWithLogitsDerivatives()),
}

# Losses, and the modules that compute the same
LOSS_FUNCTIONS: dict[Callable, type[Module]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.gaussian_nll_loss: nn.GaussianNLLLoss,
}

# Work in place if told so, and their derivative can be told from the output as well
READ_FROM_OUTPUT = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU)

GENERIC = Row(BaseParameterDerivatives())
GENERIC_LOSS = Row(GenericLossDerivatives(lambda *call: factor_of_loss(*call)))


# Layers that 1.7 has rules for: to replace them takes ``overwrite=True``. For others,
# programs that were written for it bring rules of their own.
REGISTERED: tuple[type[Module], ...] = (
    *_layers(
        "Linear ConvNd ConvTransposeNd BatchNormNd Embedding RNN LSTM ReLU LeakyReLU "
        "ELU SELU Sigmoid LogSigmoid Tanh AvgPoolNd MaxPoolNd AdaptiveAvgPoolNd "
        "Dropout Flatten Identity ZeroPad2d"
    ),
    *(Pad, Permute, ScaleModule, Slicing, SumModule),
)


def built_in(rule: Any) -> dict[type[Module], Any]:
    """Register the same rule for all layers and losses that 1.7 has rules for.

    Args:
        rule: The rule.

    Returns:
        The rule, for each class.
    """
    return {cls: rule for cls in (*REGISTERED, *LOSSES)}


def lookup(table: Mapping[type[Module], Any], cls: type[Module]) -> Any | None:
    """Look up a class, then its bases in the order of method resolution.

    Args:
        table: Entries by class.
        cls: The class.

    Returns:
        The entry, or ``None`` if there is none.
    """
    for base in cls.__mro__:
        if base in table:
            return table[base]
    return None


# Methods of a layer that say nothing about what it computes; FSDP2 has its own `_apply`
_SETUP = {"extra_repr", "reset_parameters", "_apply"}


@lru_cache(maxsize=256)
def _methods(cls: type) -> tuple[str, ...]:
    """List the methods with which a class of layers computes its output.

    Args:
        cls: The class.

    Returns:
        Their names.
    """
    own = (base for base in cls.__mro__ if not issubclass(Module, base))
    members = [member for base in own for member in vars(base).items()]
    names = {name for name, value in members if callable(value)}
    return tuple(name for name in names - _SETUP if not name.startswith("__"))


def _find_parts(base: type) -> list[tuple[Any, str, Any]]:
    """List what a class of layers computes its output with: methods and functions.

    Args:
        base: The class.

    Returns:
        For each the owner, the name there, and what it is; ``None`` if that has been
        replaced already.
    """
    parts: list[tuple[Any, str, Any]] = []
    for name in _methods(base):
        method = getattr(base, name)
        parts.append((base, name, method))
        code = getattr(method, "__code__", None)
        used = () if code is None else code.co_names
        if "F" in used:
            found = {name: vars(functional).get(name) for name in used}
            parts += [(functional, n, f) for n, f in found.items() if callable(f)]
    return [
        (owner, name, part if _is_own(part) else None) for owner, name, part in parts
    ]


def _is_own(part: Any) -> bool:
    """Tell whether a method or function is PyTorch's or ours; others are built in."""
    own = part.__module__ if isinstance(part, FunctionType) else "torch"
    return own.split(".")[0] in ("torch", "backpack")


# Whoever replaces one of these, for all layers, changes what they compute
_PARTS = {base: _find_parts(base) for base in (*LAYERS, *LOSSES)}


@lru_cache(maxsize=256)
def _find_base(cls: type, losses: bool) -> tuple[Row | None, Any, Any, Any]:
    """Look up what a class is derived from.

    Args:
        cls: The class.
        losses: Whether to look among losses, or among layers.

    Returns:
        The row, or ``None``; the layer there, the methods that classes derived from it
        and instances must not change, and what must be as it was when this package was
        imported.
    """
    table: Mapping[type, Row] = LOSSES if losses else LAYERS
    for base in cls.__mro__:
        if base in table:
            return table[base], base, _methods(base), _PARTS[base]
    return None, None, (), ()


def find_row(module: Module, losses: bool = False) -> Row | None:
    """Look up a layer, unless its class or the instance changes what it computes.

    Args:
        module: The layer.
        losses: Whether it is a loss. Default: ``False``.

    Returns:
        Its row, or ``None`` where only the generic rule is right.
    """
    cls: Any = type(module)
    row, base, names, parts = _find_base(cls, losses)
    if row is None or not vars(module).keys().isdisjoint(names):
        return None
    for name in names if cls is not base else ():  # a class may be changed at any time
        if getattr(cls, name) is not getattr(base, name):
            return None
    for owner, name, part in parts:
        if getattr(owner, name) is not part:
            return None
    return row


def find_row_or_generic(call: Any) -> Row:
    """Look up the rule for a call.

    Args:
        call: The call.

    Returns:
        The row of its module, or the generic one if that does not cover the call.
    """
    module = call.module
    row = None if call.is_altered else find_row(module)
    if row is None or (row.params != () and not row.accepts(module, call.arguments)):
        return GENERIC
    return row


def works_in_place(module: Module) -> bool:
    """Tell whether a layer overwrites its input, and its derivatives can live with it.

    Args:
        module: The layer.

    Returns:
        Whether it is so.
    """
    in_place = getattr(module, "inplace", False)
    return in_place and type(module) in READ_FROM_OUTPUT


def find_loss(module: Module) -> Row:
    """Look up a loss.

    Args:
        module: The loss module.

    Returns:
        Its row, or the one for losses in general.
    """
    return find_row(module, losses=True) or GENERIC_LOSS


def find_loss_module(
    func: Callable, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Module, tuple[Any, ...]] | None:
    """Describe a loss that was called as a function.

    Args:
        func: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The module that computes the same, and what it is called with; ``None`` if there
        is none.
    """
    cls, names = LOSS_FUNCTIONS[func], signature(func).parameters
    given = signature(func).bind(*args, **kwargs).arguments
    operands = list(names)[: len(signature(cls.forward).parameters) - 1]
    others = [name for name in given if name not in operands]
    options = {n: given[n] for n in others if given[n] is not names[n].default}
    if not options.keys() <= signature(cls).parameters.keys():
        return None
    return cls(**options), tuple(given[name] for name in operands)


def factor_of_loss(
    func: Callable, args: tuple, kwargs: dict[str, Any]
) -> float | Tensor | None:
    """Tell by what a loss that was called as a function divides the sum of its terms.

    Args:
        func: Any function.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        One over that; ``None`` if it is no loss that is known.
    """
    found = find_loss_module(func, args, kwargs) if func in LOSS_FUNCTIONS else None
    if found is None:
        return None
    module, operands = found
    vars(module).update({f"input{i}": x for i, x in enumerate(operands)})
    return find_loss(module).derivatives._reduction_factor(module)
