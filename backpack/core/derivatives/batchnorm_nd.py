"""Derivatives of batch normalization."""

import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from backpack.core.derivatives.normalization import ScaleShiftDerivatives, statistics
from backpack.core.per_sample.base import PerSample
from backpack.utils.errors import batch_norm_raise_error_if_train
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Grads, Layer


class BatchNormNdDerivatives(ScaleShiftDerivatives):
    """Derivatives of :class:`torch.nn.BatchNorm1d`, ``2d`` and ``3d``.

    In training mode samples are coupled by the batch's statistics: the Jacobian is that
    of the whole batch, by autograd, and there is none for some of the samples. With
    respect to the parameters, there is one for each sample in every mode.
    """

    def hessian_is_zero(self, module: Layer) -> bool:
        """Tell whether the output is linear in the input: with fixed statistics.

        Args:
            module: The layer.

        Returns:
            Whether it is.
        """
        return not self._uses_batch(module)

    @staticmethod
    def _uses_batch(module: Layer) -> bool:
        return statistics(module)[-1]

    def normalize(self, module: Layer, x: Tensor) -> Tensor:
        """Normalize as the layer does.

        Args:
            module: The layer.
            x: Its input, of shape ``[N, C, *]``.

        Returns:
            Normalized input of shape ``[N, C, *]``.
        """
        mean, var, from_batch = statistics(module)
        return batch_norm(x, mean, var, training=from_batch, eps=module.eps)

    def _jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if self._uses_batch(module):
            return super()._jac_mat_prod(module, g_inp, g_out, mat)
        scale = torch.rsqrt(module.running_var + module.eps)
        if module.weight is not None:
            scale = scale * module.weight
        return mat * scale.reshape(-1, *[1] * (module.input0.dim() - 2))

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if self._uses_batch(module):
            return super()._jac_t_mat_prod(module, g_inp, g_out, mat)
        return self._jac_mat_prod(module, g_inp, g_out, mat)  # it is diagonal

    def _selected_product(
        self, name: str, module: Layer, mat: Tensor, subsampling: Subsampling
    ) -> PerSample:
        if subsampling is None or not self._uses_batch(module):
            return super()._selected_product(name, module, mat, subsampling)
        if name == "weight":  # the statistics are those of all samples
            normalized = self.normalize(module, module.input0)
            mat = mat * subsample(normalized, subsampling=subsampling)
        return self._over_shared_axes(name, module, mat)

    def _restrict(self, module: Layer, subsampling: Subsampling = None) -> Layer:
        if subsampling is not None:
            batch_norm_raise_error_if_train(module)
        return super()._restrict(module, subsampling)
