"""Individual gradients."""

from __future__ import annotations

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.shards import Piece
from backpack.utils.subsampling import Selection


class BatchGrad(GradientReduction):
    """Individual gradients of the samples in a batch.

    Saved in ``grad_batch``, of shape ``[N, *p]``: the summands gₙ = c ∇ℓₙ of the
    gradient, where c is the factor of the loss's reduction (1/N for ``"mean"``).
    They add up to the gradient of the backward pass.
    """

    refuses_coupled_samples = False
    takes_complex = True

    def __init__(self, subsampling: Selection = None):
        """Choose the samples.

        Args:
            subsampling: Samples whose gradients are computed, by index; the scale stays
                that of the full batch. Default: ``None`` for all.
        """
        super().__init__("grad_batch", subsampling=subsampling)

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.individual()[0]

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        return piece.local(value, piece.weight)
