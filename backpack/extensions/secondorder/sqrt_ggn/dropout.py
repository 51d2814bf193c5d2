"""The square root of the GGN on dropout."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNDropout = on_layer(nn.Dropout, __name__)
