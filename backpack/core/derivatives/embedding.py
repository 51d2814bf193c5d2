"""Derivatives of embeddings."""

from math import prod
from typing import Any, Sequence, Tuple

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
        ids = module.input0.long().remainder(max(1, len(module.weight)))
        found = mat[:, ids]
        if module.padding_idx is None:
            return found
        is_padding = (ids == module.padding_idx).reshape(
            *ids.shape, *[1] * (mat.dim() - 2)
        )
        return found.masked_fill(is_padding, 0.0)

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
        (v, n), (rows, *row) = cotangents.shape[:2], module.weight.shape
        positions = inputs[0].shape[1:].numel()
        ids = inputs[0].reshape(n, positions).long().remainder(max(1, rows))
        b = cotangents.reshape(v, n, positions, prod(row))
        valid = None
        if module.padding_idx is not None:
            valid = (ids != module.padding_idx).to(b.dtype)
        return Rows(ids, b, module.weight.shape, valid)
