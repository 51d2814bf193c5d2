"""Derivatives of the logistic sigmoid."""

from typing import List, Tuple

from torch import Tensor
from torch.nn import Sigmoid

from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.utils.subsampling import subsample


class SigmoidDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.Sigmoid`."""

    def df(
        self,
        module: Sigmoid,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute the first derivative, σ (1 - σ).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        sigma = subsample(module.output, subsampling=subsampling)
        return sigma * (1 - sigma)

    def d2f(
        self, module: Sigmoid, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]
    ) -> Tensor:
        """Compute the second derivative, σ (1 - σ) (1 - 2 σ).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.

        Returns:
            Second derivative of shape ``[N, *in]``.
        """
        sigma = module.output
        return sigma * (1 - sigma) * (1 - 2 * sigma)
