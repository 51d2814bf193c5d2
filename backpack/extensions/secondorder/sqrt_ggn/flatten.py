"""The square root of the GGN on modules that flatten."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNFlatten = on_layer(nn.Flatten, __name__)
