"""The square root of the GGN on convolutions."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNConv1d = on_layer(nn.Conv1d, __name__)
SqrtGGNConv2d = on_layer(nn.Conv2d, __name__)
SqrtGGNConv3d = on_layer(nn.Conv3d, __name__)
