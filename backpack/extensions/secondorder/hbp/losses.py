"""Hessian backpropagation starts at the loss."""

from functools import partial
from typing import Any, Callable

from einops import einsum
from torch import Tensor

from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.engine.turn import loss_scale
from backpack.extensions.curvature import Curvature
from backpack.extensions.secondorder.hbp import hbp_options
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from backpack.utils.types import Grads, Layer
from backpack.utils.unsqueeze import flatten


def flatten_square(matrix: Tensor) -> Tensor:
    """Arrange a matrix with several axes for each of both sides in two axes.

    Args:
        matrix: Matrix of shape ``[*in, *in]``.

    Returns:
        The matrix, of shape ``[in, in]``.
    """
    size = matrix.shape[: matrix.dim() // 2].numel()
    return matrix.reshape(size, size)


class HBPLoss(HBPBaseModule):
    """Compute the loss Hessian, or columns of its factor."""

    def backpropagate(
        self, ext: Any, module: Layer, g_inp: Grads, g_out: Grads, backproped: Any
    ) -> Tensor:
        """Compute what is pulled back.

        Args:
            ext: The extension that is running.
            module: The loss module, with its inputs and output.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradient at the output.
            backproped: Nothing.

        Returns:
            Columns ``[V, N, *in]``, or a matrix ``[in, in]``.
        """
        scale = loss_scale(module, g_out[0]).detach()
        result = self.make_loss_hessian_func(ext)(module, g_inp, g_out)
        if ext.get_loss_hessian_strategy() == hbp_options.LossHessianStrategy.SUM:
            if Curvature.REQUIRE_PSD_LOSS_HESSIAN[ext.get_curv_type()]:
                self.derivatives.check_psd(module)  # a sum of them does not tell
            return flatten_square(result) * scale**2
        result = result * scale
        if hbp_options.BackpropStrategy.is_batch_average(ext.get_backprop_strategy()):
            flat = flatten(result, 2)
            return einsum(flat, flat, "v n i, v n j -> i j")
        return result

    def make_loss_hessian_func(self, ext: Any) -> Callable[..., Tensor]:
        """Choose how the loss Hessian is represented.

        Args:
            ext: The extension that is running.

        Returns:
            Function of module and gradients at inputs and output.
        """
        strategy = ext.get_loss_hessian_strategy()
        if strategy == hbp_options.LossHessianStrategy.SUM:
            return self.derivatives.sum_hessian
        if strategy == hbp_options.LossHessianStrategy.EXACT:
            return self.derivatives.sqrt_hessian
        samples = ext.get_num_mc_samples()
        return partial(self.derivatives.sqrt_hessian_sampled, mc_samples=samples)


class HBPMSELoss(HBPLoss):
    """Hessian backpropagation from :class:`torch.nn.MSELoss`."""

    def __init__(self) -> None:
        """Set the derivatives."""
        super().__init__(MSELossDerivatives())


class HBPCrossEntropyLoss(HBPLoss):
    """Hessian backpropagation from :class:`torch.nn.CrossEntropyLoss`."""

    def __init__(self) -> None:
        """Set the derivatives."""
        super().__init__(CrossEntropyLossDerivatives())


class HBPBCEWithLogitsLoss(HBPLoss):
    """Hessian backpropagation from :class:`torch.nn.BCEWithLogitsLoss`."""

    def __init__(self) -> None:
        """Set the derivatives."""
        super().__init__(BCELossWithLogitsDerivatives())
