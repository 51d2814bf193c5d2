"""Variance of individual gradients on a layer, from two other building blocks."""

from functools import partial
from typing import Any, List

from torch import Tensor
from torch.nn import Module

from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.firstorder.gradient.base import GradBaseModule
from backpack.extensions.firstorder.sum_grad_squared.sgs_base import SGSBase
from backpack.utils.types import Grads


class VarianceBaseModule(FirstOrderModuleExtension):
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
        for name in params:
            if not hasattr(self, name):
                setattr(self, name, partial(self._variance, name))
        super().__init__(params=params)

    def _variance(
        self,
        name: str,
        ext: BackpropExtension,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        bpQuantities: Any,  # noqa: N803
    ) -> Tensor:
        args, samples = (ext, module, g_inp, g_out, bpQuantities), len(g_out[0])
        mean = getattr(self._grad, name)(*args) / samples
        return getattr(self._sgs, name)(*args) / samples - mean**2
