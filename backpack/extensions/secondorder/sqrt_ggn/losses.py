"""The square root of the GGN starts at the loss."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from backpack.engine.backward.turn import loss_scale
from backpack.extensions.mat_to_mat_jac_base import for_layer
from backpack.extensions.secondorder.hbp.hbp_options import LossHessianStrategy
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from backpack.utils.types import Grads, Layer


class SqrtGGNBaseLossModule(SqrtGGNBaseModule):
    """Compute columns of a factor of the loss Hessian."""

    def backpropagate(
        self,
        ext: Any,
        module: Layer,
        grad_inp: Grads,
        grad_out: Grads,
        backproped: None,
    ) -> Tensor:
        """Factor the loss Hessian, as the extension wants it.

        Args:
            ext: The extension that is running. It tells strategy and samples.
            module: The loss module, with its inputs and output.
            grad_inp: Gradients at the inputs, as far as they exist.
            grad_out: Gradient at the output.
            backproped: Nothing.

        Returns:
            Columns ``[V, N, *in]``.
        """
        strategy, subsampling = ext.get_loss_hessian_strategy(), ext.get_subsampling()
        LossHessianStrategy.check_exists(strategy)
        factor: Any = self.derivatives.sqrt_hessian
        if strategy == LossHessianStrategy.SAMPLING:
            samples = ext.get_num_mc_samples()
            factor = partial(self.derivatives.sqrt_hessian_sampled, mc_samples=samples)
        columns = factor(module, grad_inp, grad_out, subsampling=subsampling)
        return columns * loss_scale(module, grad_out[0])


def _on_loss(loss: type, name: str) -> Any:
    return for_layer(SqrtGGNBaseLossModule, loss, name, __name__)


SqrtGGNMSELoss = _on_loss(nn.MSELoss, "SqrtGGNMSELoss")
SqrtGGNCrossEntropyLoss = _on_loss(nn.CrossEntropyLoss, "SqrtGGNCrossEntropyLoss")
SqrtGGNBCEWithLogithsLoss = _on_loss(nn.BCEWithLogitsLoss, "SqrtGGNBCEWithLogithsLoss")
