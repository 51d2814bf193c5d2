"""The square root of the GGN on a module with known derivatives."""

from typing import Any

from torch import Tensor, nn

from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat, for_layer, rule_of
from backpack.extensions.module_extension import ParameterRule
from backpack.utils.errors import batch_norm_raise_error_if_train
from backpack.utils.paths import keep_paths
from backpack.utils.types import Grads, Layer


class SqrtGGNBaseModule(MatToJacMat, ParameterRule):
    """Pull columns back, and multiply them with the parameters' Jacobians.

    A building block for extensions that are assembled by hand.
    """

    def parameter(
        self, name: str, ext: Any, module: Layer, g_out: Grads, backproped: Tensor
    ) -> Tensor:
        """Multiply columns with a parameter's transposed Jacobian.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Columns ``[V, N, *out]``.

        Returns:
            Products of shape ``[V, N, *p]``.
        """
        args, subsampling = (module, (), g_out, backproped), ext.get_subsampling()
        return self.derivatives.param_mjp(name, *args, False, subsampling)


def on_layer(layer: type, path: str) -> Any:
    """Make the class of a layer's rule, which takes no arguments.

    Args:
        layer: The layer, which is in the table.
        path: Name of the module that holds the class.

    Returns:
        The class, with the derivatives and the parameters in the table.
    """
    return for_layer(SqrtGGNBaseModule, layer, f"SqrtGGN{layer.__name__}", path)


class SqrtGGNBatchNormNd(SqrtGGNBaseModule):
    """Square root of the GGN on batch normalization, in evaluation mode."""

    def __init__(self) -> None:
        """Use the derivatives and the parameters in the table."""
        super().__init__(*rule_of(nn.BatchNorm1d))

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


_PATHS = {
    "convnd": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "convtransposend": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "custom_module": (ScaleModule, SumModule),
    "dropout": (nn.Dropout,),
    "embedding": (nn.Embedding,),
    "flatten": (nn.Flatten,),
    "linear": (nn.Linear,),
    "pad": (Pad,),
    "padding": (nn.ZeroPad2d,),
    "pooling": (
        *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    ),
    "slicing": (Slicing,),
}
_PACKAGE = __name__.rpartition(".")[0]
_RULES = {
    path: [on_layer(layer, f"{_PACKAGE}.{path}") for layer in layers]
    for path, layers in _PATHS.items()
}
keep_paths(_PACKAGE, {"batchnorm_nd": [SqrtGGNBatchNormNd], **_RULES})
