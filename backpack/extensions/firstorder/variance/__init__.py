"""Variance of individual gradients."""

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction


class Variance(GradientReduction):
    """Variance of the individual gradients.

    Saved in ``variance``, of shape ``[*p]``: the population variance
    (1/N) Σₙ (gₙ − ḡ)² of the summands gₙ of the gradient (see
    :class:`~backpack.extensions.BatchGrad`) with mean ḡ = (1/N) Σₙ gₙ. It is computed
    such that a mean much larger than the deviations does not cost digits.
    """

    adds_up_from = 1

    def __init__(self):
        """Set the field."""
        super().__init__("variance")

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.variance()
