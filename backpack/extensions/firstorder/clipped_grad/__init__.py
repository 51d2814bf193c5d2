"""Sums of individual gradients that are clipped: no sample has more than its share."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from backpack.extensions.firstorder.weighted_grad import WeightedGrad
from backpack.utils.subsampling import Selection
from backpack.utils.types import Over, Scale


class ClippedGrad(WeightedGrad):
    """Sum of the individual gradients, clipped to a norm.

    Saved in ``grad_clipped``, of shape ``[*p]``: c Σₙ wₙ gₙ with weights
    wₙ = min(1, C / ‖c gₙ‖), such that no sample contributes more than the norm C
    (Abadi et al., 2016, "Deep learning with differential privacy"). gₙ are the summands
    of the gradient, and c is the scale. For both, for the attributes ``norms`` and
    ``weights``, and for when values are there, see
    :class:`~backpack.extensions.WeightedGrad`.
    """

    field = "grad_clipped"

    def __init__(
        self,
        max_norm: float,
        per: Over = "all",
        scale: Scale = "summand",
        replace_grad: bool = False,
        subsampling: Selection = None,
    ):
        """Choose the norm.

        Args:
            max_norm: The norm C. ``float("inf")`` clips nothing.
            per: Whether norms are over ``"all"`` parameters, or each ``"parameter"`` is
                clipped by itself. Default: ``"all"``.
            scale: What is clipped and summed. ``"summand"``: the summands gₙ of the
                gradient. ``"sample"``: the gradients of the samples' own losses, N gₙ
                for a loss that is a mean; divide the result by N for a mean of clipped
                gradients. Default: ``"summand"``.
            replace_grad: Whether the result is accumulated in ``.grad``, in place of
                the gradient and of the field. Default: ``False``.
            subsampling: Samples to sum over, by index. Default: ``None`` for all.

        Raises:
            ValueError: If the norm is not positive.
        """
        self.max_norm: float = max_norm
        number = isinstance(max_norm, Real) and max_norm is not True
        if not number or not max_norm > 0:
            raise ValueError(
                f"{type(self).__name__}: max_norm must be a positive number, got "
                f"{max_norm!r}."
            )
        super().__init__(self._clip, "norms", per, scale, replace_grad, subsampling)

    def _clip(self, norms: Tensor) -> Tensor:
        limits = torch.finfo(norms.dtype)  # C may be infinite, or zero in this type
        norm = min(max(self.max_norm, limits.tiny), limits.max)
        return torch.where(norms <= norm, 1.0, norm / norms.clamp(min=norm))
