"""Derivatives of embeddings."""

from math import prod
from typing import Any, Optional, Sequence, Tuple

from torch import Tensor

from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.per_sample.base import PerSample
from backpack.core.per_sample.rows import Rows
from backpack.utils.types import Grads, Layer


class EmbeddingDerivatives(BaseParameterDerivatives):
    """Derivatives of :class:`torch.nn.Embedding`: rows by index, never one-hot."""

    affine_in_params = True

    def hessian_is_zero(self, module: Layer) -> bool:  # noqa: D102
        return True

    def supports(self, module: Layer, inputs: Tuple[Any, ...]) -> bool:
        """Tell whether gradients are those of the samples alone.

        Args:
            module: The layer.
            inputs: Its input, of shape ``[N, *]``.

        Returns:
            Whether PyTorch does not divide them by what it counts in the batch.
        """
        return not module.scale_grad_by_freq

    def _weight_jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        # what else the layer does to its weight is not done to directions
        ids, valid = self._looked_up(module, module.input0)
        found = mat[:, ids]
        if valid is None:
            return found
        return found.masked_fill(~valid.reshape(*ids.shape, *[1] * (mat.dim() - 2)), 0)

    @staticmethod
    def _looked_up(module: Layer, ids: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """Tell which rows are looked up, and which lookups count: ``None`` for all."""
        ids = ids.long().remainder(max(1, len(module.weight)))
        return ids, None if module.padding_idx is None else ids != module.padding_idx

    def product(
        self, name: str, module: Layer, inputs: Sequence[Tensor], cotangents: Tensor
    ) -> PerSample:
        """Describe the products of cotangents and the weight's Jacobian.

        Args:
            name: ``"weight"``.
            module: The layer.
            inputs: Indices of shape ``[N, *]``. Negative ones, of an index, count from
                the end.
            cotangents: Columns at its output, of shape ``[V, N, *, D]``. There may be
                several axes in place of the last, as the weight has.

        Returns:
            The products. Rows of ``padding_idx`` get none.
        """
        (v, n), (_, *row) = cotangents.shape[:2], module.weight.shape
        positions = inputs[0].shape[1:].numel()
        ids, valid = self._looked_up(module, inputs[0].reshape(n, positions))
        b = cotangents.reshape(v, n, positions, prod(row))
        valid = None if valid is None else valid.to(b.dtype)
        return Rows(ids, b, module.weight.shape, valid)
