"""The square root of the GGN on the module that pads."""

from backpack.custom_module.pad import Pad
from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNPad = on_layer(Pad, __name__)
