"""The square root of the GGN on the module that slices."""

from backpack.custom_module.slicing import Slicing
from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNSlicing = on_layer(Slicing, __name__)
