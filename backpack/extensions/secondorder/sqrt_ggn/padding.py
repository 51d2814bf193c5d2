"""The square root of the GGN on padding layers."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNZeroPad2d = on_layer(nn.ZeroPad2d, __name__)
