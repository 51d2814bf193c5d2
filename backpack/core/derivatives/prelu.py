"""Derivatives of the leaky rectified linear unit whose slopes are parameters."""

from math import prod
from typing import Sequence

from torch import Tensor

from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.per_sample.base import Dense
from backpack.utils.types import Layer


class PReLUDerivatives(PiecewiseLinearDerivatives, BaseParameterDerivatives):
    """Derivatives of :class:`torch.nn.PReLU`."""

    def product(
        self, name: str, module: Layer, inputs: Sequence[Tensor], cotangents: Tensor
    ) -> Dense:
        """Describe the products of cotangents and the slopes' Jacobian.

        Args:
            name: ``"weight"``.
            module: The layer.
            inputs: Its input, of shape ``[N, C, *]``.
            cotangents: Columns at its output, of shape ``[V, N, C, *]``.

        Returns:
            The products.
        """
        (x,) = inputs
        products = cotangents * x.clamp(max=0)
        # one slope for each channel, or a single one for all
        slopes = module.weight.numel()
        sizes = slopes, prod(products.shape[2:]) // slopes
        products = products.reshape(*products.shape[:2], *sizes).sum(-1)
        return Dense(products, module.weight.shape)
