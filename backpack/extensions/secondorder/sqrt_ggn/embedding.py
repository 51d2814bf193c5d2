"""The square root of the GGN on embeddings."""

from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNEmbedding(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Embedding`."""

    def __init__(self):
        """Set the derivatives and the parameters."""
        super().__init__(EmbeddingDerivatives(), params=["weight"])
