"""Derivatives of batch normalization in evaluation mode."""

from typing import Tuple, Union

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.functional import batch_norm

from backpack.core.derivatives.normalization import ScaleShiftDerivatives
from backpack.utils.errors import batch_norm_raise_error_if_train

BatchNormNd = Union[BatchNorm1d, BatchNorm2d, BatchNorm3d]


class BatchNormNdDerivatives(ScaleShiftDerivatives):
    """Derivatives of :class:`torch.nn.BatchNorm1d`, ``2d`` and ``3d``.

    In training mode samples are coupled by the batch's statistics, and there is no
    Jacobian per sample.
    """

    def hessian_is_zero(self, module: BatchNormNd) -> bool:
        """Tell whether the output is linear in the input: in evaluation mode.

        Args:
            module: The layer.

        Returns:
            ``True``.

        Raises:
            NotImplementedError: In training mode.
        """  # noqa: DAR402
        batch_norm_raise_error_if_train(module)
        return True

    def hessian_is_diagonal(self, module: BatchNormNd) -> bool:
        """Tell whether the output's second derivative is diagonal: it is zero.

        Args:
            module: The layer.

        Returns:
            ``True``.

        Raises:
            NotImplementedError: In training mode.
        """  # noqa: DAR402
        batch_norm_raise_error_if_train(module)
        return True

    def normalize(self, module: BatchNormNd, x: Tensor) -> Tensor:
        """Normalize as the layer does.

        Args:
            module: The layer.
            x: Its input, of shape ``[N, C, *]``.

        Returns:
            Normalized input of shape ``[N, C, *]``.
        """
        from_batch = module.training or module.running_mean is None
        statistics = (None, None)
        if not from_batch:
            statistics = (module.running_mean, module.running_var)
        return batch_norm(x, *statistics, training=from_batch, eps=module.eps)

    def _jac_mat_prod(
        self, module: BatchNormNd, g_inp: Tuple, g_out: Tuple, mat: Tensor
    ) -> Tensor:
        batch_norm_raise_error_if_train(module)
        scale = self._inverse_deviation(module, module.input0)
        if module.weight is not None:
            scale = scale * self._per_channel(module.weight, module.input0)
        return mat * scale

    def _jac_t_mat_prod(
        self,
        module: BatchNormNd,
        g_inp: Tuple,
        g_out: Tuple,
        mat: Tensor,
        subsampling: Tuple[int, ...] = None,
    ) -> Tensor:
        return self._jac_mat_prod(module, g_inp, g_out, mat)  # it is diagonal

    def _inverse_deviation(self, module: BatchNormNd, x: Tensor) -> Tensor:
        return self._per_channel(torch.rsqrt(module.running_var + module.eps), x)

    @staticmethod
    def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
        """View ``[C]`` such that it broadcasts to ``[N, C, *]``."""
        return vector.reshape(-1, *[1] * (x.dim() - 2))
