"""Second moment of individual gradients."""

from __future__ import annotations

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.shards import Piece


class SumGradSquared(GradientReduction):
    """Sum of the squared individual gradients, the second moment without centring.

    Saved in ``sum_grad_squared``, of shape ``[*p]``: Σₙ gₙ² with the summands gₙ of the
    gradient (see :class:`~backpack.extensions.BatchGrad`).
    """

    def __init__(self) -> None:
        """Set the field."""
        super().__init__("sum_grad_squared")

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.squares()

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        return piece.sum(value, piece.weight**2)
