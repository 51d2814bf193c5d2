"""The square root of the GGN on a module with known derivatives."""

from typing import Any

from torch import Tensor

from backpack.extensions.mat_to_mat_jac_base import MatToJacMat, for_layer
from backpack.extensions.module_extension import ParameterRule
from backpack.utils.types import Grads, Layer


class SqrtGGNBaseModule(MatToJacMat, ParameterRule):
    """Pull columns back, and multiply them with the parameters' Jacobians.

    A building block for extensions that are assembled by hand.
    """

    def parameter(
        self, name: str, ext: Any, module: Layer, g_out: Grads, backproped: Tensor
    ) -> Tensor:
        """Multiply columns with a parameter's transposed Jacobian.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Columns ``[V, N, *out]``.

        Returns:
            Products of shape ``[V, N, *p]``.
        """
        args, subsampling = (module, (), g_out, backproped), ext.get_subsampling()
        return self.derivatives.param_mjp(name, *args, False, subsampling)


def on_layer(layer: type, path: str) -> Any:
    """Make the class of a layer's rule, which takes no arguments.

    Args:
        layer: The layer, which is in the table.
        path: Name of the module that holds the class.

    Returns:
        The class, with the derivatives and the parameters in the table.
    """
    return for_layer(SqrtGGNBaseModule, layer, f"SqrtGGN{layer.__name__}", path)
