"""Individual gradients on a layer with derivatives of its own."""

from typing import List

from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.extensions.firstorder.base import ReducedLayer
from backpack.extensions.firstorder.batch_grad import BatchGrad


class BatchGradBase(ReducedLayer):
    """Compute individual gradients with a layer's derivatives."""

    quantity = BatchGrad

    def __init__(self, derivatives: BaseParameterDerivatives, params: List[str]):
        """Create a method for each parameter.

        Args:
            derivatives: The layer's derivatives.
            params: Names of the parameters.
        """
        super().__init__(derivatives, params)
