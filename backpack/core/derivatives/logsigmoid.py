"""Derivatives of the logistic sigmoid's logarithm."""

from typing import List, Tuple

from torch import Tensor, sigmoid
from torch.nn import LogSigmoid

from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.utils.subsampling import subsample


class LogSigmoidDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.LogSigmoid`."""

    def df(
        self,
        module: LogSigmoid,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        subsampling: List[int] = None,
    ) -> Tensor:
        """Compute the first derivative, σ(-x).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        return sigmoid(-subsample(module.input0, subsampling=subsampling))

    def d2f(
        self, module: LogSigmoid, g_inp: Tuple[Tensor], g_out: Tuple[Tensor]
    ) -> Tensor:
        """Compute the second derivative, -σ(x) σ(-x).

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.

        Returns:
            Second derivative of shape ``[N, *in]``.
        """
        x = module.input0
        return -sigmoid(x) * sigmoid(-x)
