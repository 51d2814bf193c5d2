"""The square root of the GGN on modules that scale or sum."""

from backpack.custom_module.branching import SumModule
from backpack.custom_module.scale_module import ScaleModule
from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNScaleModule = on_layer(ScaleModule, __name__)
SqrtGGNSumModule = on_layer(SumModule, __name__)
