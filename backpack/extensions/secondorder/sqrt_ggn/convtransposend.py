"""The square root of the GGN on transposed convolutions."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNConvTranspose1d = on_layer(nn.ConvTranspose1d, __name__)
SqrtGGNConvTranspose2d = on_layer(nn.ConvTranspose2d, __name__)
SqrtGGNConvTranspose3d = on_layer(nn.ConvTranspose3d, __name__)
