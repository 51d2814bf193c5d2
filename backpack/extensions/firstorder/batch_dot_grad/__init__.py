"""Dot products of individual gradients: with each other, or with another batch's."""

from __future__ import annotations

from typing import Any, Mapping

from torch import Tensor

from backpack.core.per_sample.base import Dense, PerSample
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.firstorder.batch_factors import FactoredGradients
from backpack.extensions.shards import Piece
from backpack.utils.errors import check_mapping
from backpack.utils.hooks import message
from backpack.utils.subsampling import Selection
from backpack.utils.types import accumulator_dtype, as_type

NO_GRADIENTS = (
    "BatchDotGrad: other has no gradients [Q, *p] for a parameter of shape {shape}, "
    "but {got}. Pass what BatchFactors has saved on each trainable parameter, or "
    "tensors."
)


class BatchDotGrad(GradientReduction):
    """Pairwise dot products of the individual gradients, for each parameter.

    Saved in ``batch_dot``, of shape ``[N, N]``: gᵢᵀ gⱼ with the summands gₙ of the
    gradient (see :class:`~backpack.extensions.BatchGrad`). With the gradients of Q
    samples of another batch, given as ``other``, it is of shape ``[N, Q]``.
    """

    def __init__(
        self,
        subsampling: Selection = None,
        other: Mapping[Any, Tensor | FactoredGradients] | None = None,
    ):
        """Choose the samples.

        Args:
            subsampling: Samples whose dot products are computed, by index; the scale
                stays that of the full batch. Default: ``None`` for all.
            other: For each parameter, individual gradients of another batch: what
                :class:`~backpack.extensions.BatchFactors` has saved, preconditioned or
                not, or a tensor ``[Q, *p]``. Default: ``None`` for the same batch.
        """
        saved = "what BatchFactors has saved"
        check_mapping("BatchDotGrad", "other", other, saved, "grad_factors")
        super().__init__("batch_dot", subsampling=subsampling)
        self._other = other

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.dots()

    def reduce_for(self, param: Tensor, gradients: PerSample) -> Tensor:  # noqa: D102
        if self._other is None:
            return super().reduce_for(param, gradients)
        others: Any = self._other.get(param)
        got = type(others).__name__
        if isinstance(others, Tensor) and others.dim():
            others = FactoredGradients(Dense(others.detach()[None], others.shape[1:]))
        if isinstance(others, FactoredGradients):
            got = f"{others.dtype} of shape {list(others.shape)}"
            if others.shape[1:] == param.shape and others.dtype.is_floating_point:
                dtype = accumulator_dtype(gradients.dtype)
                return others.to(gradients.device, dtype).dots(self.select(gradients))
        raise ValueError(message(NO_GRADIENTS, shape=param.shape, got=got))

    def parts(self, gradients: PerSample) -> Any:  # noqa: D102
        return self.select(gradients) if self._other is None else None

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        if self._other is not None:
            return piece.local(value, piece.weight)
        forms: list[Any] = []  # others may have other factors, as of longer sequences

        def note(x: Tensor, dim: int) -> Tensor:
            forms.append((dim, *x.shape[:dim], *x.shape[dim + 1 :]))
            return x

        own = piece.required_parts(self).gathered(note)
        form = f"{type(own).__name__} {forms}"
        # zeros have no factors
        if piece.holders or not piece.agrees(form, value.device):
            own = Dense(own.individual(), own.shape)
        factors = own.gathered(piece.gather)
        weight = piece.gather(value.new_full((len(value),), piece.weight))
        return as_type(factors.dots() * weight.outer(weight), value.dtype)
