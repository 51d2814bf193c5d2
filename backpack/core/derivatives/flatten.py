"""Derivatives of modules that keep all elements in place, or only reshape them."""

from torch import Tensor

from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.utils.types import Grads, Layer


class FlattenDerivatives(LinearMapDerivatives):
    """Derivatives of :class:`torch.nn.Flatten`, ``Unflatten`` and ``Identity``.

    The Jacobian of each sample, as a matrix, is the identity.
    """

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        return self.reshape_like_input(mat, module)
