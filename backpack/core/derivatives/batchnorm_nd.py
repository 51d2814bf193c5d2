"""Derivatives of batch normalization."""

import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from backpack.core.derivatives.normalization import ScaleShiftDerivatives
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
        return module.training or module.running_mean is None

    def normalize(self, module: Layer, x: Tensor) -> Tensor:
        """Normalize as the layer does.

        Args:
            module: The layer.
            x: Its input, of shape ``[N, C, *]``.

        Returns:
            Normalized input of shape ``[N, C, *]``.
        """
        from_batch = self._uses_batch(module)
        statistics = (None, None)
        if not from_batch:
            statistics = (module.running_mean, module.running_var)
        return batch_norm(x, *statistics, training=from_batch, eps=module.eps)

    def _jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if self._uses_batch(module):
            return super()._jac_mat_prod(module, g_inp, g_out, mat)
        scale = self._inverse_deviation(module, module.input0)
        if module.weight is not None:
            scale = scale * self._per_channel(module.weight, module.input0)
        return mat * scale

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

    def _inverse_deviation(self, module: Layer, x: Tensor) -> Tensor:
        return self._per_channel(torch.rsqrt(module.running_var + module.eps), x)

    @staticmethod
    def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
        """View ``[C]`` such that it broadcasts to ``[N, C, *]``."""
        return vector.reshape(-1, *[1] * (x.dim() - 2))
