"""The gradient on a layer with derivatives of its own."""

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction, ReducedLayer


class _Gradient(GradientReduction):
    """The gradient: individual gradients, summed."""

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:  # noqa: D102
        return gradients.summed()[0]


class GradBaseModule(ReducedLayer):
    """Compute the gradient with a layer's derivatives."""

    quantity = _Gradient
