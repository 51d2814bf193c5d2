"""The square root of the GGN on embeddings."""

from torch import nn

from backpack.extensions.secondorder.sqrt_ggn.base import on_layer

SqrtGGNEmbedding = on_layer(nn.Embedding, __name__)
