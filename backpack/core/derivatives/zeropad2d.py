"""Derivatives of padding with a constant."""

from torch import Tensor
from torch.nn.functional import pad

from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.utils.types import Layer


class ZeroPad2dDerivatives(LinearMapDerivatives):
    """Derivatives of ``torch.nn.ZeroPad1d`` to ``3d``, ``ConstantPad1d`` to ``3d``."""

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:
        """Pad with zeros instead of the constant, see the overridden method.

        Args:
            module: Module with stored input and output.
            x: Tensor of shape ``[M, *in]``.

        Returns:
            Padded tensor of shape ``[M, *out]``.
        """
        return pad(x, module.padding)
