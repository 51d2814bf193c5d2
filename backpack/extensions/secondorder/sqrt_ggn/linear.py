"""The square root of the GGN on linear layers."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNLinear = on_layer(nn.Linear, __name__)
