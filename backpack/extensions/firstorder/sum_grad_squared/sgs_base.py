"""Second moments of individual gradients on a layer with derivatives of its own."""

from typing import List, Optional

from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.extensions.firstorder.base import ReducedLayer
from backpack.extensions.firstorder.sum_grad_squared import SumGradSquared


class SGSBase(ReducedLayer):
    """Compute sums of squared individual gradients with a layer's derivatives."""

    reduce = staticmethod(SumGradSquared.reduce)

    def __init__(
        self, derivatives: BaseParameterDerivatives, params: Optional[List[str]] = None
    ):
        """Create a method for each parameter.

        Args:
            derivatives: The layer's derivatives.
            params: Names of the parameters. Default: ``None``, for no parameter.
        """
        super().__init__(derivatives, params or [])
