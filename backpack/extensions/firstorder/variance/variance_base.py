"""Variance of individual gradients on a layer, from two other building blocks."""

from typing import Any, List

from torch import Tensor
from torch.nn import Module

from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.firstorder.gradient.base import GradBaseModule
from backpack.extensions.firstorder.sum_grad_squared.sgs_base import SGSBase
from backpack.extensions.module_extension import ParameterRule
from backpack.utils.types import Grads


class VarianceBaseModule(FirstOrderModuleExtension, ParameterRule):
    """Subtract the squared mean from the second moment.

    If the mean is much larger than the deviation, digits cancel. The library's own
    :class:`~backpack.extensions.Variance` does not work this way.
    """

    def __init__(
        self, params: List[str], grad_extension: GradBaseModule, sgs_extension: SGSBase
    ):
        """Create a method for each parameter.

        Args:
            params: Names of the parameters.
            grad_extension: Computes the gradient.
            sgs_extension: Computes the sum of squared individual gradients.
        """
        self._grad, self._sgs = grad_extension, sgs_extension
        super().__init__(params=params)

    def parameter(
        self, name: str, ext: Any, module: Module, g_out: Grads, backproped: None
    ) -> Tensor:
        """Combine what the two others compute.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Nothing.

        Returns:
            The variance ``[*p]``.
        """
        args, samples = (ext, module, (), g_out, backproped), len(g_out[0])
        mean = getattr(self._grad, name)(*args) / samples
        return getattr(self._sgs, name)(*args) / samples - mean**2
