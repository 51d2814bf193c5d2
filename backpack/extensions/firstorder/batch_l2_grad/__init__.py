"""Squared norms of individual gradients."""

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.shards import Piece


class BatchL2Grad(GradientReduction):
    """Squared L2 norms of the individual gradients, for each parameter.

    Saved in ``batch_l2``, of shape ``[N]``: ‖gₙ‖² with the summands gₙ of the gradient
    (see :class:`~backpack.extensions.BatchGrad`). Individual gradients are not formed
    where their norm can be computed faster from the layer's inputs and cotangents.
    """

    def __init__(self) -> None:
        """Set the field."""
        super().__init__("batch_l2")

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.sq_norms()

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        return piece.local(value, piece.weight**2)
