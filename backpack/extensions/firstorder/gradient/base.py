"""The gradient on a layer with derivatives of its own."""

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import ReducedLayer


class GradBaseModule(ReducedLayer):
    """Compute the gradient with a layer's derivatives."""

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:
        """Sum individual gradients.

        Args:
            gradients: The gradients, ``[1, N, *p]`` in some form.

        Returns:
            The gradient ``[*p]``.
        """
        return gradients.summed()[0]
