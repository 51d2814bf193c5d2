"""Derivatives of modules that keep all elements in place, or only reshape them."""

from typing import Tuple

from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.linear_map import LinearMapDerivatives


class FlattenDerivatives(LinearMapDerivatives):
    """Derivatives of :class:`torch.nn.Flatten`, ``Unflatten`` and ``Identity``.

    The Jacobian of each sample, as a matrix, is the identity.
    """

    def _jac_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        return self.reshape_like_output(mat, module)

    def _jac_t_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        return self.reshape_like_input(mat, module)
