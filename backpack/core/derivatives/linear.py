"""Derivatives of the linear layer, on inputs with any number of axes."""

from math import prod
from typing import Sequence

from torch import Size, Tensor, no_grad

from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.fast.matmul import matmul
from backpack.core.per_sample.base import PerSample, Summed
from backpack.core.per_sample.outer import Outer
from backpack.utils.types import Grads, Layer


class LinearDerivatives(LinearMapDerivatives, BaseParameterDerivatives):
    """Derivatives of :class:`torch.nn.Linear`.

    Axes between the first (samples) and the last one (features) are positions that
    share the weight.
    """

    affine_in_params = True

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        return x @ module.weight.mT

    def product(
        self, name: str, module: Layer, inputs: Sequence[Tensor], cotangents: Tensor
    ) -> PerSample:
        """Describe the products of cotangents and a parameter's Jacobian.

        Args:
            name: ``"weight"`` or ``"bias"``.
            module: The layer.
            inputs: Its input, of shape ``[N, *, in_features]``.
            cotangents: Columns at its output, of shape ``[V, N, *, out_features]``.

        Returns:
            The products.
        """
        v, n, *axes, features = cotangents.shape
        positions, shape = prod(axes), getattr(module, name).shape
        if name == "bias":
            return Summed(cotangents.reshape(v, n, positions, features), shape)
        x, b = inputs[0], cotangents.reshape(v, n, 1, positions, features)
        return Outer(lambda: x.reshape(n, 1, positions, shape[1]), b, shape)

    @no_grad()
    def _param_jac_mat_prod(
        self, param_str: str, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        axes = [1] * (module.output.dim() - 1)
        if param_str == "bias":
            return mat.reshape(len(mat), *axes, -1).expand(-1, *module.output.shape)
        x = module.input0
        products = matmul(x.flatten(end_dim=-2), mat.flatten(end_dim=1).mT)
        return products.reshape(*x.shape[:-1], *mat.shape[:2]).movedim(-2, 0)

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        return mat @ module.weight

    def _ea_jac_t_mat_jac_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if module.input0.dim() > 2:  # at each position
            return super()._ea_jac_t_mat_jac_prod(module, g_inp, g_out, mat)
        return matmul(module.weight.mT, matmul(mat, module.weight))

    @staticmethod
    def _get_additional_dims(module: Layer) -> Size:
        """Return the sizes of the axes between samples and features.

        Args:
            module: The layer.

        Returns:
            Sizes, empty for an input of shape ``[N, in_features]``.
        """
        return module.input0.shape[1:-1]
