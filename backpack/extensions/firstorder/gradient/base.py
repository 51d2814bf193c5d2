"""The gradient on a layer with derivatives of its own."""

from typing import List

from torch import Tensor

from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
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

    def __init__(self, derivatives: BaseParameterDerivatives, params: List[str]):
        """Create a method for each parameter.

        Args:
            derivatives: The layer's derivatives.
            params: Names of the parameters.
        """
        super().__init__(derivatives, params)
