"""The square root of the GGN on a module with known derivatives."""

from typing import Any, Type

from torch import Tensor
from torch.nn import Module

from backpack.core.table import LAYERS, Row
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
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


class SqrtGGNOnLayer(SqrtGGNBaseModule):
    """The rule of a layer of the table.

    Attributes:
        row: The layer's row.
    """

    row: Row

    def __init__(self) -> None:
        """Set the derivatives and the parameters."""
        super().__init__(self.row.derivatives, list(self.row.params or ()))


def on_layer(layer: Type[Module], path: str) -> Type[SqrtGGNOnLayer]:
    """Make the class of a layer's rule, which takes no arguments.

    Args:
        layer: The layer, which is in the table.
        path: Name of the module that holds the class.

    Returns:
        The class, with the derivatives and the parameters in the table.
    """
    doc = f"Square root of the GGN on ``{layer.__name__}``."
    body = {"row": LAYERS[layer], "__doc__": doc, "__module__": path}
    return type(f"SqrtGGN{layer.__name__}", (SqrtGGNOnLayer,), body)
