"""Derivatives of modules that keep all elements in place, or only reshape them."""

from typing import List, Tuple

from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.input_base import BaseDerivatives


class FlattenDerivatives(BaseDerivatives):
    """Derivatives of :class:`torch.nn.Flatten`, ``Unflatten`` and ``Identity``.

    The Jacobian of each sample, as a matrix, is the identity.
    """

    def hessian_is_zero(self, module: Module) -> bool:  # noqa: D102
        return True

    def jacobian_is_shared(self, module: Module) -> bool:  # noqa: D102
        return True

    def _jac_mat_prod(
        self, module: Module, g_inp: Tuple[Tensor], g_out: Tuple[Tensor], mat: Tensor
    ) -> Tensor:
        return self.reshape_like_output(mat, module)

    def _jac_t_mat_prod(
        self,
        module: Module,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        mat: Tensor,
        subsampling: List[int] = None,
    ) -> Tensor:
        return self.reshape_like_input(mat, module)
