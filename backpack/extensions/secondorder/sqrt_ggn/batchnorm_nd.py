"""The square root of the GGN on batch normalization."""

from typing import Any

from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from backpack.utils.errors import batch_norm_raise_error_if_train
from backpack.utils.types import Grads, Layer


class SqrtGGNBatchNormNd(SqrtGGNBaseModule):
    """Square root of the GGN on batch normalization, in evaluation mode."""

    def __init__(self) -> None:
        """Set the derivatives and the parameters."""
        super().__init__(BatchNormNdDerivatives(), params=["weight", "bias"])

    def check_hyperparameters_module_extension(
        self, ext: Any, module: Layer, g_inp: Grads, g_out: Grads
    ) -> None:
        """Refuse training mode.

        Args:
            ext: The extension that is running.
            module: The layer.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
        """
        batch_norm_raise_error_if_train(module)
