"""Variance of individual gradients."""

from __future__ import annotations

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.shards import Piece
from backpack.utils.parallel import is_shared
from backpack.utils.types import as_type, full_precision


class Variance(GradientReduction):
    """Variance of the individual gradients.

    Saved in ``variance``, of shape ``[*p]``: the population variance
    (1/N) Σₙ (gₙ − ḡ)² of the summands gₙ of the gradient (see
    :class:`~backpack.extensions.BatchGrad`) with mean ḡ = (1/N) Σₙ gₙ. It is computed
    such that a mean much larger than the deviations does not cost digits.
    """

    adds_up_from = 1

    def __init__(self) -> None:
        """Set the field."""
        super().__init__("variance")

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.variance()

    def reduce_for(self, param: Tensor, gradients: PerSample) -> Tensor:  # noqa: D102
        gradients.keeps_total |= is_shared()
        return self.reduce(gradients)

    def parts(self, gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.total() / gradients.batch_size

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        mean = full_precision(piece.required_parts(self)) * piece.weight
        deviation = mean - piece.sum(mean, piece.share)
        variance = full_precision(value) * piece.weight**2 + deviation**2
        return as_type(piece.sum(variance, piece.share), value.dtype)
