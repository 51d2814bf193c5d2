"""The square root of the GGN on pooling layers."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNAvgPool1d = on_layer(nn.AvgPool1d, __name__)
SqrtGGNAvgPool2d = on_layer(nn.AvgPool2d, __name__)
SqrtGGNAvgPool3d = on_layer(nn.AvgPool3d, __name__)
SqrtGGNMaxPool1d = on_layer(nn.MaxPool1d, __name__)
SqrtGGNMaxPool2d = on_layer(nn.MaxPool2d, __name__)
SqrtGGNMaxPool3d = on_layer(nn.MaxPool3d, __name__)
