"""The square root of the GGN on activations."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNELU = on_layer(nn.ELU, __name__)
SqrtGGNLeakyReLU = on_layer(nn.LeakyReLU, __name__)
SqrtGGNLogSigmoid = on_layer(nn.LogSigmoid, __name__)
SqrtGGNReLU = on_layer(nn.ReLU, __name__)
SqrtGGNSELU = on_layer(nn.SELU, __name__)
SqrtGGNSigmoid = on_layer(nn.Sigmoid, __name__)
SqrtGGNTanh = on_layer(nn.Tanh, __name__)
