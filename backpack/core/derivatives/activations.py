"""Derivatives of activation functions, in closed form where it is worth it."""

from abc import abstractmethod

from torch import Tensor, ones_like, zeros_like

from backpack.core.derivatives.elementwise import (
    ElementwiseDerivatives,
    PiecewiseLinearDerivatives,
)
from backpack.core.derivatives.stored import subsampled
from backpack.utils.subsampling import Subsampling
from backpack.utils.types import Grads, Layer


class ActivationDerivatives(ElementwiseDerivatives):
    """Derivatives of an activation function, from its stored input x and output z."""

    @abstractmethod
    def first_derivative(self, module: Layer) -> Tensor:
        """Compute the first derivative at each element.

        Args:
            module: Module with stored input and output.

        Returns:
            f'(x) of shape ``[N, *in]``.
        """

    def second_derivative(self, module: Layer) -> Tensor:
        """Compute the second derivative at each element.

        Args:
            module: Module with stored input and output.

        Returns:
            f''(x) of shape ``[N, *in]``, by default zero.
        """
        return zeros_like(module.input0)

    def df(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:  # noqa: D102
        return self.first_derivative(subsampled(module, subsampling))

    def d2f(self, module: Layer, g_inp: Grads, g_out: Grads) -> Tensor:  # noqa: D102
        return self.second_derivative(module)


class ReLUDerivatives(ActivationDerivatives, PiecewiseLinearDerivatives):
    """Derivatives of :class:`torch.nn.ReLU`: 1 where x > 0, else 0."""

    def first_derivative(self, module: Layer) -> Tensor:  # noqa: D102
        # right even if the output overwrote the input: both have the same sign;
        # and twice as fast as converting x > 0
        return module.input0.sign().clamp_(min=0)


class LeakyReLUDerivatives(ActivationDerivatives, PiecewiseLinearDerivatives):
    """Derivatives of :class:`torch.nn.LeakyReLU`: 1 where x > 0, else the slope."""

    def first_derivative(self, module: Layer) -> Tensor:  # noqa: D102
        x = module.input0
        return ones_like(x).where(x > 0, module.negative_slope)


class SigmoidDerivatives(ActivationDerivatives):
    """Derivatives of :class:`torch.nn.Sigmoid`: σ (1 - σ), σ (1 - σ) (1 - 2 σ)."""

    def first_derivative(self, module: Layer) -> Tensor:  # noqa: D102
        return module.output * (1 - module.output)

    def second_derivative(self, module: Layer) -> Tensor:  # noqa: D102
        return self.first_derivative(module) * (1 - 2 * module.output)


class TanhDerivatives(ActivationDerivatives):
    """Derivatives of :class:`torch.nn.Tanh`: 1 - z², -2 z (1 - z²)."""

    def first_derivative(self, module: Layer) -> Tensor:  # noqa: D102
        return 1 - module.output**2

    def second_derivative(self, module: Layer) -> Tensor:  # noqa: D102
        return -2 * module.output * self.first_derivative(module)


class LogSigmoidDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.LogSigmoid`, by autograd."""


class ELUDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.ELU`, by autograd."""


class SELUDerivatives(ElementwiseDerivatives):
    """Derivatives of :class:`torch.nn.SELU`, by autograd."""

    alpha = 1.6732632423543772
    scale = 1.0507009873554805
