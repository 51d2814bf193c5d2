"""Products with the positive-curvature Hessian, for modules with known derivatives."""

from typing import Any, Literal

from torch import Tensor

from backpack.core.linearization import Linearization, freeze
from backpack.extensions.curvature import ResidualModifications
from backpack.extensions.curvmatprod.base import CurvatureProductRule
from backpack.extensions.curvmatprod.operator import make_residual
from backpack.utils.types import Grads, Layer


class PCHMPBase(CurvatureProductRule):
    """Products with the positive-curvature Hessian on a module."""

    @staticmethod
    def zero_negative_elements(tensor: Tensor) -> Tensor:
        """Clip a tensor at zero.

        Args:
            tensor: Tensor ``[*]``.

        Returns:
            Its positive part ``[*]``.
        """
        return ResidualModifications.remove_negative_values(tensor)

    @staticmethod
    def to_abs(tensor: Tensor) -> Tensor:
        """Take the absolute value of a tensor.

        Args:
            tensor: Tensor ``[*]``.

        Returns:
            Its absolute value ``[*]``.
        """
        return ResidualModifications.to_abs(tensor)

    def modified_residual_mat_prod(
        self,
        ext: Any,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        mat: Tensor,
        modify: Literal["clip", "abs"],
    ) -> Tensor:
        """Multiply with the module's residual, made positive semi-definite.

        Args:
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
            mat: Columns ``[V, N, *in]``.
            modify: ``"clip"`` or ``"abs"``.

        Returns:
            Products of the same shape.
        """
        linear = Linearization(self.derivatives, freeze(module), g_out)
        (product,) = make_residual(linear, ext.CURVATURES[modify])([mat])
        return product
