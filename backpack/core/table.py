"""THE table: which layer has which derivatives, and for which parameters.

A layer that is not in the table gets the generic rule from autograd. A row is all a new
layer needs besides its derivatives.
"""

from __future__ import annotations

from functools import lru_cache
from typing import (
    Any,
    Dict,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
)

from torch import Tensor, nn
from torch.nn import Module

from backpack.core.derivatives.adaptive_avg_pool_nd import (
    AdaptiveAvgPool1dDerivatives,
    AdaptiveAvgPool2dDerivatives,
    AdaptiveAvgPool3dDerivatives,
)
from backpack.core.derivatives.avgpool1d import AvgPool1DDerivatives
from backpack.core.derivatives.avgpool2d import AvgPool2DDerivatives
from backpack.core.derivatives.avgpool3d import AvgPool3DDerivatives
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.conv1d import Conv1DDerivatives
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.conv3d import Conv3DDerivatives
from backpack.core.derivatives.conv_transpose1d import ConvTranspose1DDerivatives
from backpack.core.derivatives.conv_transpose2d import ConvTranspose2DDerivatives
from backpack.core.derivatives.conv_transpose3d import ConvTranspose3DDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.dropout import DropoutDerivatives
from backpack.core.derivatives.elementwise import (
    ElementwiseDerivatives,
    PiecewiseLinearDerivatives,
)
from backpack.core.derivatives.elu import ELUDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.flatten import FlattenDerivatives
from backpack.core.derivatives.generic_loss import GenericLossDerivatives
from backpack.core.derivatives.gru import GRUDerivatives
from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.derivatives.leakyrelu import LeakyReLUDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.core.derivatives.logsigmoid import LogSigmoidDerivatives
from backpack.core.derivatives.lstm import LSTMDerivatives
from backpack.core.derivatives.maxpool1d import MaxPool1DDerivatives
from backpack.core.derivatives.maxpool2d import MaxPool2DDerivatives
from backpack.core.derivatives.maxpool3d import MaxPool3DDerivatives
from backpack.core.derivatives.maxpoolnd import AdaptiveMaxPoolNDDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.normalization import (
    GroupNormDerivatives,
    InstanceNormNdDerivatives,
    LayerNormDerivatives,
    RMSNormDerivatives,
)
from backpack.core.derivatives.pad import PadDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.derivatives.permute import PermuteDerivatives
from backpack.core.derivatives.prelu import PReLUDerivatives
from backpack.core.derivatives.relu import ReLUDerivatives
from backpack.core.derivatives.rnn import RNNDerivatives
from backpack.core.derivatives.scale_module import ScaleModuleDerivatives
from backpack.core.derivatives.selu import SELUDerivatives
from backpack.core.derivatives.sigmoid import SigmoidDerivatives
from backpack.core.derivatives.slicing import SlicingDerivatives
from backpack.core.derivatives.sum_module import SumModuleDerivatives
from backpack.core.derivatives.tanh import TanhDerivatives
from backpack.core.derivatives.zeropad2d import ZeroPad2dDerivatives
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

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

    derivatives: BaseDerivatives
    params: Optional[Tuple[str, ...]] = ()
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
        if not self.derivatives.supports(module, tuple(arguments)):
            return False
        x = arguments[0] if arguments else None
        return isinstance(x, Tensor) and x.dim() >= self.min_dim

    def covers(self, module: Module, name: str) -> bool:
        """Tell whether the derivatives cover a parameter.

        Args:
            module: The layer.
            name: Name of the parameter.

        Returns:
            Whether they do. Those of a parametrization are not the layer's own.
        """
        return name in module._parameters and (
            self.params is None or name in self.params
        )


_BATCH_NORM = Row(BatchNormNdDerivatives(), WEIGHT_BIAS, 2)
_INSTANCE_NORM = Row(InstanceNormNdDerivatives(), WEIGHT_BIAS, 3)
_ELEMENTWISE = Row(ElementwiseDerivatives())
_PIECEWISE_LINEAR = Row(PiecewiseLinearDerivatives())
_LINEAR_MAP = Row(LinearMapDerivatives())
_RESHAPE = Row(FlattenDerivatives())
_ZERO_PAD = Row(ZeroPad2dDerivatives())
_DROPOUT = Row(DropoutDerivatives())
_FROM_AUTOGRAD = Row(BaseDerivatives())

LAYERS: Dict[Type[Module], Row] = {
    # with parameters
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
    nn.PReLU: Row(PReLUDerivatives(), WEIGHT, 1),
    nn.RNN: Row(RNNDerivatives(), None, 3, several_outputs=True),
    nn.LSTM: Row(LSTMDerivatives(), None, 3, several_outputs=True),
    nn.GRU: Row(GRUDerivatives(), None, 3, several_outputs=True),
    # activations
    nn.ReLU: Row(ReLUDerivatives()),
    nn.LeakyReLU: Row(LeakyReLUDerivatives()),
    nn.ELU: Row(ELUDerivatives()),
    nn.SELU: Row(SELUDerivatives()),
    nn.Sigmoid: Row(SigmoidDerivatives()),
    nn.LogSigmoid: Row(LogSigmoidDerivatives()),
    nn.Tanh: Row(TanhDerivatives()),
    nn.CELU: _ELEMENTWISE,
    nn.GELU: _ELEMENTWISE,
    nn.Hardswish: _ELEMENTWISE,
    nn.Mish: _ELEMENTWISE,
    nn.SiLU: _ELEMENTWISE,
    nn.Softplus: _ELEMENTWISE,
    nn.Softsign: _ELEMENTWISE,
    nn.Tanhshrink: _ELEMENTWISE,
    nn.Hardshrink: _PIECEWISE_LINEAR,
    nn.Hardsigmoid: _PIECEWISE_LINEAR,
    nn.Hardtanh: _PIECEWISE_LINEAR,
    nn.ReLU6: _PIECEWISE_LINEAR,
    nn.Softshrink: _PIECEWISE_LINEAR,
    nn.Threshold: _PIECEWISE_LINEAR,
    nn.GLU: _FROM_AUTOGRAD,
    nn.LogSoftmax: _FROM_AUTOGRAD,
    nn.Softmax: _FROM_AUTOGRAD,
    # pooling
    nn.AvgPool1d: Row(AvgPool1DDerivatives()),
    nn.AvgPool2d: Row(AvgPool2DDerivatives()),
    nn.AvgPool3d: Row(AvgPool3DDerivatives()),
    nn.MaxPool1d: Row(MaxPool1DDerivatives()),
    nn.MaxPool2d: Row(MaxPool2DDerivatives()),
    nn.MaxPool3d: Row(MaxPool3DDerivatives()),
    nn.AdaptiveAvgPool1d: Row(AdaptiveAvgPool1dDerivatives()),
    nn.AdaptiveAvgPool2d: Row(AdaptiveAvgPool2dDerivatives()),
    nn.AdaptiveAvgPool3d: Row(AdaptiveAvgPool3dDerivatives()),
    nn.AdaptiveMaxPool1d: Row(AdaptiveMaxPoolNDDerivatives(1)),
    nn.AdaptiveMaxPool2d: Row(AdaptiveMaxPoolNDDerivatives(2)),
    nn.AdaptiveMaxPool3d: Row(AdaptiveMaxPoolNDDerivatives(3)),
    # dropout
    nn.Dropout: _DROPOUT,
    nn.Dropout1d: _DROPOUT,
    nn.Dropout2d: _DROPOUT,
    nn.Dropout3d: _DROPOUT,
    nn.AlphaDropout: _DROPOUT,
    nn.FeatureAlphaDropout: _DROPOUT,
    # shapes, padding, sums
    nn.Flatten: _RESHAPE,
    nn.Identity: _RESHAPE,
    nn.Unflatten: _RESHAPE,
    nn.ConstantPad1d: _ZERO_PAD,
    nn.ConstantPad2d: _ZERO_PAD,
    nn.ConstantPad3d: _ZERO_PAD,
    nn.ZeroPad1d: _ZERO_PAD,
    nn.ZeroPad2d: _ZERO_PAD,
    nn.ZeroPad3d: _ZERO_PAD,
    nn.CircularPad1d: _LINEAR_MAP,
    nn.CircularPad2d: _LINEAR_MAP,
    nn.CircularPad3d: _LINEAR_MAP,
    nn.ReflectionPad1d: _LINEAR_MAP,
    nn.ReflectionPad2d: _LINEAR_MAP,
    nn.ReflectionPad3d: _LINEAR_MAP,
    nn.ReplicationPad1d: _LINEAR_MAP,
    nn.ReplicationPad2d: _LINEAR_MAP,
    nn.ReplicationPad3d: _LINEAR_MAP,
    nn.ChannelShuffle: _LINEAR_MAP,
    nn.PixelShuffle: _LINEAR_MAP,
    nn.PixelUnshuffle: _LINEAR_MAP,
    nn.Upsample: _LINEAR_MAP,
    Pad: Row(PadDerivatives()),
    Permute: Row(PermuteDerivatives()),
    ScaleModule: Row(ScaleModuleDerivatives()),
    Slicing: Row(SlicingDerivatives()),
    SumModule: Row(SumModuleDerivatives()),
}

LOSSES: Dict[Type[Module], Row] = {
    nn.CrossEntropyLoss: Row(CrossEntropyLossDerivatives()),
    nn.MSELoss: Row(MSELossDerivatives()),
    nn.BCEWithLogitsLoss: Row(BCELossWithLogitsDerivatives()),
}

_NOT_LINEAR = (
    "The positive-curvature Hessian is defined for layers that are linear in their "
    "parameters."
)
# Cells of the table layers × quantities that stay blank, and why
WITHOUT_RULE: Dict[Tuple[Type[Module], str], str] = {
    (layer, "PCHMP"): _NOT_LINEAR for layer in (nn.PReLU, nn.RNN, nn.LSTM, nn.GRU)
}

# Work in place if told so, and their derivative can be told from the output as well
READ_FROM_OUTPUT = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU)

GENERIC = Row(BaseParameterDerivatives())
GENERIC_LOSS = Row(GenericLossDerivatives())


# Layers that 1.7 has rules for: to replace them takes ``overwrite=True``. For others,
# programs that were written for it bring rules of their own.
REGISTERED: Tuple[Type[Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.Embedding, nn.RNN, nn.LSTM),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.Sigmoid, nn.LogSigmoid, nn.Tanh),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.Dropout, nn.Flatten, nn.Identity, nn.ZeroPad2d),
    *(Pad, Permute, ScaleModule, Slicing, SumModule),
)


def built_in(rule: Any) -> Dict[Type[Module], Any]:
    """Register the same rule for all layers and losses that 1.7 has rules for.

    Args:
        rule: The rule.

    Returns:
        The rule, for each class.
    """
    return {cls: rule for cls in (*REGISTERED, *LOSSES)}


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


# Methods of a layer that say nothing about what it computes
_SETUP = {"extra_repr", "reset_parameters"}


@lru_cache(maxsize=256)
def _methods(cls: type) -> Tuple[str, ...]:
    """List the methods with which a class of layers computes its output.

    Args:
        cls: The class.

    Returns:
        Their names.
    """
    own = (base for base in cls.__mro__ if not issubclass(Module, base))
    names = {
        name for base in own for name, value in vars(base).items() if callable(value)
    }
    return tuple(name for name in names - _SETUP if not name.startswith("__"))


@lru_cache(maxsize=256)
def _find_own(cls: type, losses: bool = False) -> Tuple[Optional[Row], Tuple[str, ...]]:
    """Look up a class, unless it changes what its base computes.

    Args:
        cls: The class.
        losses: Whether to look among losses, or among layers. Default: ``False``.

    Returns:
        Its row, or ``None``, and the methods that an instance must not change, either.
    """
    table: Mapping[type, Row] = LOSSES if losses else LAYERS
    for base in cls.__mro__:
        if base in table:
            names = _methods(base)
            own = all(getattr(cls, name) is getattr(base, name) for name in names)
            return (table[base] if own else None), names
    return None, ()


def find_row(module: Module, losses: bool = False) -> Optional[Row]:
    """Look up a layer, unless its class or the instance changes what it computes.

    Args:
        module: The layer.
        losses: Whether it is a loss. Default: ``False``.

    Returns:
        Its row, or ``None`` where only the generic rule is right.
    """
    row, names = _find_own(type(module), losses)
    return row if vars(module).keys().isdisjoint(names) else None


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
