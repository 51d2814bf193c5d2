"""Derivatives of the hyperbolic tangent."""

from typing import List, Tuple

from torch import Tensor
from torch.nn import Tanh

from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.utils.subsampling import subsample


class TanhDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.Tanh`."""

    def df(
        self,
        module: Tanh,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute the first derivative, 1 - z².

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        z = subsample(module.output, subsampling=subsampling)
        return 1 - z**2

    def d2f(self, module: Tanh, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]) -> Tensor:
        """Compute the second derivative, -2 z (1 - z²).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.

        Returns:
            Second derivative of shape ``[N, *in]``.
        """
        z = module.output
        return -2 * z * (1 - z**2)
