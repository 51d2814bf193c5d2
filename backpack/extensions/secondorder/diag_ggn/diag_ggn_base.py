"""The GGN's diagonal on a module with known derivatives."""

from typing import Any, List, Optional, Union

from torch import Tensor

from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.module_extension import ParameterRule
from backpack.utils.types import Grads, Layer


class DiagGGNBaseModule(MatToJacMat, ParameterRule):
    """Pull columns back, and square their products with the parameters' Jacobians."""

    def __init__(
        self,
        derivatives: Union[BaseDerivatives, BaseParameterDerivatives],
        params: Optional[List[str]] = None,
        sum_batch: Optional[bool] = None,
    ):
        """Store the derivatives, and create a method for each parameter.

        Args:
            derivatives: The module's derivatives.
            params: Names of the parameters. Default: ``None``, for no parameter.
            sum_batch: Whether to sum over samples. Default: ``None``, as the extension
                that is running does.
        """
        self._sum_batch = sum_batch
        super().__init__(derivatives, params)

    def parameter(
        self, name: str, ext: Any, module: Layer, g_out: Grads, backproped: Tensor
    ) -> Tensor:
        """Compute the diagonal for a parameter.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Columns ``[V, N, *out]``.

        Returns:
            Diagonal of shape ``[*p]``, or ``[N, *p]`` for each sample.
        """
        sum_batch = self._sum_batch
        if sum_batch is None:
            sum_batch = getattr(ext, "SUM_BATCH", True)
        product = self.derivatives.stored_product(name, module, (), g_out, backproped)
        return product.squares(sum_batch)
