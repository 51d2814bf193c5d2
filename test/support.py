"""Which layer works with which quantity, and how: derived from the table of layers.

The documentation shows these cells, and the tests run each of them.
"""

from __future__ import annotations

from enum import Enum
from typing import Dict, NamedTuple, Tuple, Type

from torch import nn
from torch.nn import Module

from backpack import extensions
from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.table import (
    GENERIC,
    LAYERS,
    LOSSES,
    Row,
)
from backpack.custom_module.branching import SumModule
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.extensions.secondorder.columns import ColumnExtension

QUANTITIES: Tuple[Type[BackpropExtension], ...] = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.BatchDotGrad,
    extensions.BatchFactors,
    extensions.BatchProjectGrad,
    extensions.WeightedGrad,
    extensions.ClippedGrad,
    extensions.DiagGGNExact,
    extensions.DiagGGNMC,
    extensions.BatchDiagGGNExact,
    extensions.BatchDiagGGNMC,
    extensions.SqrtGGNExact,
    extensions.SqrtGGNMC,
    extensions.BatchJacobian,
    extensions.KFAC,
    extensions.KFLR,
    extensions.KFRA,
    extensions.EKFAC,
    extensions.DiagHessian,
    extensions.BatchDiagHessian,
    extensions.HMP,
    extensions.GGNMP,
    extensions.PCHMP,
)


class Rule(str, Enum):
    """How a quantity is computed on a layer."""

    FAST = "fast rule"
    MODULE = "module rule"
    GENERIC = "generic rule"
    AUTOGRAD = "autograd"
    REFUSED = "refused"


MEANING: Dict[Rule, str] = {
    Rule.FAST: "A formula for the layer's parameters, or for the loss's Hessian.",
    Rule.MODULE: "The layer's own derivatives take the quantity back from its output "
    "to its inputs, and to its parameters.",
    Rule.GENERIC: "Automatic differentiation of what the module computes: right, but "
    "slower.",
    Rule.AUTOGRAD: "Nothing to compute: there are no parameters, and PyTorch's "
    "backward pass goes through it as always.",
    Rule.REFUSED: "An error says so, for the reason given.",
}


# Rows for all that the table does not list
OTHER = "any other module with parameters"
OTHER_PLAIN = "any other module without"
OTHER_LOSS = "any other loss"


class Cell(NamedTuple):
    """How a quantity is computed on a layer.

    Attributes:
        rule: By which rule.
        note: Under which condition, or why not.
    """

    rule: Rule
    note: str = ""


Matrix = Dict[str, Dict[str, Cell]]


_EVALUATION = (
    "In evaluation mode. In training mode samples are coupled: BatchGrad warns, all "
    "others but HMP and GGNMP raise an error."
)
_CHOICE = "{case}, and weight_sharing=... has to be chosen."
_BRANCHES = (
    "Where its inputs do not stem from the same output: an average over the batch does "
    "not tell how branches interact."
)
_ONE_INPUT = (
    "With a single input that parameters take part in: an average over the batch does "
    "not tell how several interact."
)
_BY_OPERATION = (
    "By a formula in operations that have one, like linear maps and convolutions."
)
_NO_CHILDREN = (
    "Unless it has modules inside, next to parameters of its own: use the converter."
)
_TWICE = "If PyTorch can differentiate it twice, which it can't for EmbeddingBag."
_NOT_KNOWN = (
    "The positive-curvature Hessian is defined for layers that are linear in their "
    "parameters, which is not known of other modules."
)

_NOT_LINEAR = (
    "The positive-curvature Hessian is defined for layers that are linear in their "
    "parameters."
)
# Cells that stay blank, and why
WITHOUT_RULE: Dict[Tuple[Type[Module], str], str] = {
    (layer, "PCHMP"): _NOT_LINEAR for layer in (nn.PReLU, nn.RNN, nn.LSTM, nn.GRU)
}


_SHARED_WEIGHTS: Dict[Type[Module], str] = {
    nn.Linear: "On more than two axes, positions share the weight",
    nn.Embedding: "With several indices per sample, positions share the weight",
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), "Time steps share the weights"),
    **dict.fromkeys(
        (
            *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
            *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        ),
        "With groups, the weight has several blocks",
    ),
}
# Cells that are not blank, but under a condition
CONDITIONS: Dict[Tuple[Type[Module], str], str] = {
    **{
        (layer, name): _CHOICE.format(case=case)
        for layer, case in _SHARED_WEIGHTS.items()
        for name in ("KFAC", "KFLR", "KFRA")
    },
    **{
        (layer, quantity.__name__): _EVALUATION
        for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        for quantity in QUANTITIES
        if quantity.separates_samples or quantity.refuses_coupled_samples
    },
    (SumModule, "KFRA"): _BRANCHES,
}
_CONDITIONS_OF_OTHERS: Dict[Tuple[str, str], str] = {
    **{
        (OTHER, quantity.__name__): _BY_OPERATION
        for quantity in QUANTITIES
        if issubclass(quantity, (FirstOrderBackpropExtension, ColumnExtension))
    },
    **{
        (OTHER, name): f"{_BY_OPERATION} "
        + _CHOICE.format(case="There, positions may share the weight")
        for name in ("KFAC", "KFLR")
    },
    (OTHER, "KFRA"): f"{_NO_CHILDREN} {_ONE_INPUT}",
    (OTHER, "DiagHessian"): _NO_CHILDREN,
    (OTHER, "BatchDiagHessian"): _NO_CHILDREN,
    (OTHER, "HMP"): f"{_NO_CHILDREN} {_TWICE}",
    (OTHER, "GGNMP"): f"{_NO_CHILDREN} {_TWICE}",
    (OTHER_PLAIN, "KFRA"): _ONE_INPUT,
}


def _rule(row: Row, quantity: Type[BackpropExtension]) -> Rule:
    """Tell which rule computes a quantity on a layer, unless it is refused."""
    knows_nothing = type(row.derivatives) in (BaseDerivatives, BaseParameterDerivatives)
    if not issubclass(quantity, (FirstOrderBackpropExtension, ColumnExtension)):
        return Rule.GENERIC if knows_nothing else Rule.MODULE
    if row.params == ():
        return Rule.AUTOGRAD
    return Rule.GENERIC if knows_nothing else Rule.FAST


def of_layers() -> Matrix:
    """Tell how each quantity is computed on each layer.

    Returns:
        Cells by the names of layer and quantity. Two rows stand for the modules that
        are not in the table.
    """
    matrix: Matrix = {}
    for layer, row in LAYERS.items():
        cells = matrix[layer.__name__] = {}
        for quantity in QUANTITIES:
            key = layer, quantity.__name__
            refused = key in WITHOUT_RULE
            rule = Rule.REFUSED if refused else _rule(row, quantity)
            note = WITHOUT_RULE[key] if refused else CONDITIONS.get(key, "")
            cells[quantity.__name__] = Cell(rule, note)
    for name, row in ((OTHER, GENERIC._replace(params=None)), (OTHER_PLAIN, GENERIC)):
        matrix[name] = {q.__name__: Cell(_rule(row, q)) for q in QUANTITIES}
    for key, note in _CONDITIONS_OF_OTHERS.items():
        matrix[key[0]][key[1]] = Cell(Rule.GENERIC, note)
    matrix[OTHER]["PCHMP"] = Cell(Rule.REFUSED, _NOT_KNOWN)
    return matrix


def of_losses() -> Matrix:
    """Tell how each quantity starts at each loss.

    Returns:
        Cells by the names of loss and quantity. A row stands for the losses that are
        not in the table.
    """
    rules = {loss.__name__: Rule.FAST for loss in LOSSES}
    rules[OTHER_LOSS] = Rule.GENERIC
    return {
        loss: {
            quantity.__name__: Cell(
                Rule.AUTOGRAD
                if issubclass(
                    quantity, (FirstOrderBackpropExtension, extensions.BatchJacobian)
                )
                else rule
            )
            for quantity in QUANTITIES
        }
        for loss, rule in rules.items()
    }
