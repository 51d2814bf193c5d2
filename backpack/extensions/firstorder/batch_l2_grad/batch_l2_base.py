"""Squared norms of individual gradients on a layer with derivatives of its own."""

from typing import List, Optional

from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.extensions.firstorder.base import ReducedLayer
from backpack.extensions.firstorder.batch_l2_grad import BatchL2Grad


class BatchL2Base(ReducedLayer):
    """Compute squared norms of individual gradients with a layer's derivatives."""

    reduce = staticmethod(BatchL2Grad.reduce)

    def __init__(
        self, params: List[str], derivatives: Optional[BaseParameterDerivatives] = None
    ):
        """Create a method for each parameter.

        Args:
            params: Names of the parameters.
            derivatives: The layer's derivatives. Default: ``None``, if a subclass
                defines all methods.
        """
        super().__init__(derivatives, params)
