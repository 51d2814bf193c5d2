"""Hessian backpropagation starts at the loss."""

from functools import partial
from typing import Any, Callable

from einops import einsum
from torch import Tensor, nn

from backpack.engine.backward.turn import loss_scale
from backpack.extensions.curvature import Curvature
from backpack.extensions.mat_to_mat_jac_base import for_layer
from backpack.extensions.secondorder.hbp import hbp_options
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from backpack.utils.types import Grads, Layer
from backpack.utils.unsqueeze import flatten


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
            size = result.shape[: result.dim() // 2].numel()
            return result.reshape(size, size) * scale**2
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


def _on_loss(loss: type) -> Any:
    return for_layer(HBPLoss, loss, f"HBP{loss.__name__}", __name__)


HBPMSELoss = _on_loss(nn.MSELoss)
HBPCrossEntropyLoss = _on_loss(nn.CrossEntropyLoss)
HBPBCEWithLogitsLoss = _on_loss(nn.BCEWithLogitsLoss)
