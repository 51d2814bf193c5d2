"""Derivatives of activation functions, in closed form where it is worth it."""

from torch import Tensor, ones_like

from backpack.core.derivatives.elementwise import (
    ElementwiseDerivatives,
    PiecewiseLinearDerivatives,
)
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Grads, Layer


class ReLUDerivatives(PiecewiseLinearDerivatives):
    """Derivatives of :class:`torch.nn.ReLU`: 1 where x > 0, else 0."""

    def df(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:  # noqa: D102
        # right even if the output overwrote the input: both have the same sign;
        # and twice as fast as converting x > 0
        return subsample(module.input0, subsampling=subsampling).sign().clamp_(min=0)


class LeakyReLUDerivatives(PiecewiseLinearDerivatives):
    """Derivatives of :class:`torch.nn.LeakyReLU`: 1 where x > 0, else the slope."""

    def df(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:  # noqa: D102
        x = subsample(module.input0, subsampling=subsampling)
        return ones_like(x).where(x > 0, module.negative_slope)


class SigmoidDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.Sigmoid`, by autograd."""


class TanhDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.Tanh`, by autograd."""


class LogSigmoidDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.LogSigmoid`, by autograd."""


class ELUDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.ELU`, by autograd."""


class SELUDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.SELU`, by autograd."""

    alpha = 1.6732632423543772
    scale = 1.0507009873554805
