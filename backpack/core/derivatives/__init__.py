"""The maths of layers and losses: products with their first and second derivatives.

One file holds one *family* of layers. All products act on matrices of shape
``[V, N, *]``: ``V`` columns for each of the ``N`` samples, and then the axes of the
layer's input, output or parameter. :mod:`~backpack.core.derivatives.basederivatives`
has the interface, and rules from automatic differentiation that are right for every
layer; a family's file replaces them by faster ones. Below are the paths by which
BackPACK 1.7 knows single layers.
"""

from typing import Any, Dict, List

from backpack.core.derivatives import activations, linear_map, recurrent
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.maxpoolnd import MaxPoolNDDerivatives
from backpack.utils.paths import keep_paths, without_arguments

_PATHS: Dict[str, List[Any]] = {
    "adaptive_avg_pool_nd": [linear_map.AdaptiveAvgPoolNDDerivatives],
    "elu": [activations.ELUDerivatives],
    "leakyrelu": [activations.LeakyReLUDerivatives],
    "logsigmoid": [activations.LogSigmoidDerivatives],
    "relu": [activations.ReLUDerivatives],
    "selu": [activations.SELUDerivatives],
    "sigmoid": [activations.SigmoidDerivatives],
    "tanh": [activations.TanhDerivatives],
    "gru": [recurrent.GRUDerivatives],
    "lstm": [recurrent.LSTMDerivatives],
    "rnn": [recurrent.RNNDerivatives],
    "avgpoolnd": [linear_map.AvgPoolNDDerivatives],
    "flatten": [linear_map.FlattenDerivatives],
    "pad": [linear_map.PadDerivatives],
    "permute": [linear_map.PermuteDerivatives],
    "scale_module": [linear_map.ScaleModuleDerivatives],
    "slicing": [linear_map.SlicingDerivatives],
    "sum_module": [linear_map.SumModuleDerivatives],
    "zeropad2d": [linear_map.ZeroPad2dDerivatives],
}
# Layers with one to three axes: path, class of their rules, name of the one for each
_SIZES = [
    ("adaptive_avg_pool_nd", linear_map.AdaptiveAvgPoolNDDerivatives, "{}d"),
    ("avgpool{}d", linear_map.AvgPoolNDDerivatives, "{}D"),
    ("conv{}d", ConvNDDerivatives, "{}D"),
    ("conv_transpose{}d", ConvTransposeNDDerivatives, "{}D"),
    ("maxpool{}d", MaxPoolNDDerivatives, "{}D"),
]
for _path, _base, _kind in _SIZES:
    for _n in (1, 2, 3):
        _at, _name = _path.format(_n), _base.__name__.replace("ND", _kind.format(_n))
        _class = without_arguments(_base, _name, f"{__name__}.{_at}", _n)
        _PATHS.setdefault(_at, []).append(_class)
keep_paths(__name__, _PATHS)
