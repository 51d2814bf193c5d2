"""Pairwise dot products of individual gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.shards import Piece
from backpack.utils.subsampling import Selection
from backpack.utils.types import as_type


class BatchDotGrad(GradientReduction):
    """Pairwise dot products of the individual gradients, for each parameter.

    Saved in ``batch_dot``, of shape ``[N, N]``: gᵢᵀ gⱼ with the summands gₙ of the
    gradient (see :class:`~backpack.extensions.BatchGrad`).
    """

    def __init__(self, subsampling: Selection = None):
        """Choose the samples.

        Args:
            subsampling: Samples whose dot products are computed, by index; the scale
                stays that of the full batch. Default: ``None`` for all.
        """
        super().__init__("batch_dot", subsampling=subsampling)

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.dots()

    def parts(self, gradients: PerSample) -> PerSample:  # noqa: D102
        return self.select(gradients)

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        factors = piece.required_parts(self).gathered(piece.gather)
        weight = piece.gather(torch.full_like(value[:, 0], piece.weight))
        return as_type(factors.dots() * weight.outer(weight), value.dtype)
