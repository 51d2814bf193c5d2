"""THE table: which layer has which derivatives, and for which parameters.

A layer that is not in the table gets the generic rule from autograd. A row is all a new
layer needs besides its derivatives.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from torch import Tensor, nn
from torch.nn import Module

from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseParameterDerivatives,
)
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.conv1d import Conv1DDerivatives
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.conv3d import Conv3DDerivatives
from backpack.core.derivatives.conv_transpose1d import ConvTranspose1DDerivatives
from backpack.core.derivatives.conv_transpose2d import ConvTranspose2DDerivatives
from backpack.core.derivatives.conv_transpose3d import ConvTranspose3DDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.generic_loss import GenericLossDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.normalization import (
    GroupNormDerivatives,
    InstanceNormNdDerivatives,
    LayerNormDerivatives,
    RMSNormDerivatives,
)

WEIGHT = ("weight",)
WEIGHT_BIAS = ("weight", "bias")


class Row(NamedTuple):
    """What is known of a layer.

    Attributes:
        derivatives: Its derivatives.
        params: Names of the parameters they cover.
        min_dim: Number of axes that its input needs to have, batch axis included.
        several_outputs: Whether the derivatives take cotangents of several outputs.
    """

    derivatives: BaseDerivatives
    params: Tuple[str, ...] = ()
    min_dim: int = 1
    several_outputs: bool = False

    def accepts(self, module: Module, arguments: Sequence[Any]) -> bool:
        """Tell whether the derivatives cover a call.

        Args:
            module: The layer.
            arguments: What went into it.

        Returns:
            Whether they do.
        """
        x = arguments[0] if arguments else None
        return isinstance(x, Tensor) and x.dim() >= self.min_dim


_BATCH_NORM = Row(BatchNormNdDerivatives(), WEIGHT_BIAS, 2)
_INSTANCE_NORM = Row(InstanceNormNdDerivatives(), WEIGHT_BIAS, 3)

LAYERS: Dict[Type[Module], Row] = {
    nn.Linear: Row(LinearDerivatives(), WEIGHT_BIAS, 2),
    nn.Conv1d: Row(Conv1DDerivatives(), WEIGHT_BIAS, 3),
    nn.Conv2d: Row(Conv2DDerivatives(), WEIGHT_BIAS, 4),
    nn.Conv3d: Row(Conv3DDerivatives(), WEIGHT_BIAS, 5),
    nn.ConvTranspose1d: Row(ConvTranspose1DDerivatives(), WEIGHT_BIAS, 3),
    nn.ConvTranspose2d: Row(ConvTranspose2DDerivatives(), WEIGHT_BIAS, 4),
    nn.ConvTranspose3d: Row(ConvTranspose3DDerivatives(), WEIGHT_BIAS, 5),
    nn.BatchNorm1d: _BATCH_NORM,
    nn.BatchNorm2d: _BATCH_NORM,
    nn.BatchNorm3d: _BATCH_NORM,
    nn.InstanceNorm1d: _INSTANCE_NORM,
    nn.InstanceNorm2d: _INSTANCE_NORM,
    nn.InstanceNorm3d: _INSTANCE_NORM,
    nn.LayerNorm: Row(LayerNormDerivatives(), WEIGHT_BIAS, 2),
    nn.RMSNorm: Row(RMSNormDerivatives(), WEIGHT, 2),
    nn.GroupNorm: Row(GroupNormDerivatives(), WEIGHT_BIAS, 2),
    nn.Embedding: Row(EmbeddingDerivatives(), WEIGHT, 1),
}

LOSSES: Dict[Type[Module], Row] = {
    nn.CrossEntropyLoss: Row(CrossEntropyLossDerivatives()),
    nn.MSELoss: Row(MSELossDerivatives()),
    nn.BCEWithLogitsLoss: Row(BCELossWithLogitsDerivatives()),
}

GENERIC = Row(BaseParameterDerivatives())
GENERIC_LOSS = Row(GenericLossDerivatives())


def lookup(table: Mapping[Type[Module], Any], cls: Type[Module]) -> Optional[Any]:
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


def find_row(module: Module) -> Optional[Row]:
    """Look up a layer, unless its class or the instance changes what it computes.

    Args:
        module: The layer.

    Returns:
        Its row, or ``None`` where only the generic rule is right.
    """
    for cls in type(module).__mro__:
        row = LAYERS.get(cls)
        if row is not None:
            own = type(module).forward is cls.forward and "forward" not in vars(module)
            return row if own else None
    return None


def find_rule(module: Module, name: str) -> Optional[Row]:
    """Look up the fast rule for a parameter.

    Args:
        module: The layer.
        name: Name of the parameter in the layer.

    Returns:
        The layer's row, or ``None`` if the generic rule must do: the layer or the
        parameter (a parametrization's, say) is not in the table.
    """
    row = find_row(module)
    covered = row is not None and name in row.params and name in module._parameters
    return row if covered else None


def find_loss(module: Module) -> Row:
    """Look up a loss.

    Args:
        module: The loss module.

    Returns:
        Its row, or the one for losses in general.
    """
    return lookup(LOSSES, type(module)) or GENERIC_LOSS
