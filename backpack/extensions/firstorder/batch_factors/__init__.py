"""Individual gradients, saved as factors for dot products with other batches."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any, Sequence

import torch
from torch import Tensor

from backpack.core.fast import tuning
from backpack.core.per_sample.base import Dense, PerSample
from backpack.core.per_sample.maps import dots_between, factor_shapes, in_order, mapped
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.sums import chunks
from backpack.extensions.firstorder.base import GradientReduction
from backpack.utils.hooks import message
from backpack.utils.kroneckers import (
    damped_inv_kfacs,
    ekfac_mat_prod,
    rotate,
    transposed,
)
from backpack.utils.subsampling import Selection, as_subsampling, check_subsampling
from backpack.utils.types import as_type, full_precision

ONCE = (
    "These gradients have been divided by eigenvalues already. Choose one curvature, "
    "and call `precondition` on the gradients as they were saved."
)
OTHER_CURVATURE = (
    "The curvature has factors of shapes {got}, which do not fit the gradients of a "
    "parameter of shape {shape}. Pass what KFAC, KFLR or EKFAC has saved on the same "
    "parameter."
)


IN_PROCESS = (
    "BatchFactors: factors stay with the process that has the samples, in the scale of "
    "its own loss, and `reduce` does not change them. Leave the extension out there; "
    "`BatchGrad` gets the scale of the whole batch, and can be gathered."
)


class FactoredGradients:
    """Individual gradients of one parameter, kept as factors where these are smaller.

    What :class:`BatchFactors` saves. It owns its memory, and no graph leads to it.
    """

    def __init__(
        self,
        product: PerSample,
        ekfac: Sequence[Tensor] | None = None,
        damping: float = 0.0,
    ):
        """Store the gradients.

        Args:
            product: The gradients, ``[1, Q, *p]`` in some form.
            ekfac: Eigenvectors and eigenvalues of what they are divided by. Default:
                ``None`` for nothing.
            damping: What is added to the eigenvalues. Default: ``0.0``.
        """
        self._product, self._ekfac, self._damping = product, ekfac, damping

    @property
    def shape(self) -> torch.Size:
        """Shape of the gradients, ``[Q, *p]``."""
        return torch.Size([len(self), *self._product.shape])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the gradients."""
        return self._product.dtype

    def __len__(self) -> int:
        """Return the number Q of samples."""
        return self._product.batch_size

    def tensors(self) -> list[Tensor]:
        """List what is kept in memory.

        Returns:
            The factors, or the gradients where these are smaller; and what they are
            divided by.
        """
        kept: list[Tensor] = []

        def note(x: Tensor, axis: int = 0) -> Tensor:
            kept.append(x)
            return x

        self._product.gathered(note)
        return [*kept, *(self._ekfac or ())]

    def select(self, subsampling: Selection) -> FactoredGradients:
        """Restrict to some samples.

        Args:
            subsampling: Indices, or a slice.

        Returns:
            The gradients of these samples.
        """
        name = type(self).__name__
        picked = as_subsampling(name, subsampling)
        check_subsampling(name, picked, len(self))
        product = self._product if picked is None else self._product.select(picked)
        return FactoredGradients(product, self._ekfac, self._damping)

    def individual(self) -> Tensor:
        """Form the gradients.

        Returns:
            Gradients of shape ``[Q, *p]``.
        """
        if self._ekfac is None:
            return self._product.individual()[0]
        rows = rotate(self._ekfac[:-1], self._divided()).flatten(1)
        rows = as_type(rows, self._product.dtype)
        if isinstance(self._product, Outer) and self._product.is_reordered:
            sizes = self._product.groups, self._product.b.shape[-1], -1
            return self._product.fold(rows.reshape(len(rows), *sizes))
        return rows.reshape(self.shape)

    def to(self, *args: Any, **kwargs: Any) -> FactoredGradients:
        """Move or convert the gradients, and what they are divided by.

        Args:
            args: Device, type, or both, as for :meth:`torch.Tensor.to`.
            kwargs: The same, by name.

        Returns:
            The gradients there.
        """

        def convert(x: Tensor, axis: int = 0) -> Tensor:
            moved = x.to(*args, **kwargs)
            return moved if x.is_floating_point() else x.to(moved.device)  # indices

        ekfac = None if self._ekfac is None else [convert(x) for x in self._ekfac]
        return FactoredGradients(self._product.gathered(convert), ekfac, self._damping)

    def precondition(
        self, curvature: Sequence[Tensor], damping: float
    ) -> FactoredGradients:
        """Multiply the gradients with the inverse of a damped curvature matrix.

        Kronecker factors are damped one by one (see
        :func:`backpack.utils.kroneckers.pi_shifts`), so that gradients stay factored.
        With EKFAC, each eigenvalue is damped, exactly; the gradients are divided by
        them some samples at a time, when they are needed. For exact damping of KFAC's
        factors pass :func:`backpack.utils.kroneckers.eigen_kfacs` of them.

        Args:
            curvature: What KFAC, KFLR or EKFAC has saved on the parameter: factors, or
                eigenvectors and eigenvalues.
            damping: λ.

        Returns:
            Preconditioned gradients.

        Raises:
            ValueError: If the curvature does not fit, is singular, or if the gradients
                have been divided by eigenvalues before.
        """
        if self._ekfac is not None:
            raise ValueError(ONCE)
        curvature = [full_precision(matrix) for matrix in curvature]
        is_eigen = len(curvature) == 3 or (
            len(curvature) == 2 and curvature[1].dim() == curvature[0].dim() - 1
        )
        factors = curvature[:-1] if is_eigen else curvature
        got = [list(factor.shape) for factor in factors]
        if not self._fits(got):
            text = {"got": got, "shape": self._product.shape}
            raise ValueError(message(OTHER_CURVATURE, **text))
        if is_eigen:
            ekfac_mat_prod(curvature, -1.0, damping)  # to refuse what is singular
            return FactoredGradients(self._product, curvature, damping)
        inverses = damped_inv_kfacs(factors, damping)
        return FactoredGradients(mapped(self._product, inverses))

    def _fits(self, shapes: list[list[int]]) -> bool:
        """Tell whether factors of some shapes are those of this parameter."""
        product = self._product
        if not isinstance(product, Dense):
            return shapes == factor_shapes(product)
        # which axes are rows is not known of gradients that are at hand
        size = product.shape.numel()
        rows = [torch.Size(shape[:-1] or shape).numel() for shape in shapes]
        if len(rows) != 2:
            return rows == [size]
        groups = shapes[0][0] if len(shapes[0]) == 3 else 1
        leading = {groups, *accumulate(product.shape, mul)}
        return rows[0] in leading and rows[0] * rows[1] == size * groups

    def dots(self, gradients: PerSample) -> Tensor:
        """Compute dot products with the individual gradients of another batch.

        Args:
            gradients: Gradients ``[1, N, *p]`` in some form.

        Returns:
            Dot products of shape ``[N, Q]``.
        """
        if self._ekfac is None:
            return dots_between(gradients, self._product)
        *bases, values = self._ekfac
        rotated = mapped(in_order(gradients), transposed(bases))
        parts, shape = [], rotated.shape
        for some in chunks(len(self), values.numel(), tuning.UNFOLDED_ELEMENTS):
            tensors = self.select(some)._divided().reshape(1, -1, *shape)
            parts.append(dots_between(rotated, Dense(tensors, shape)))
        return torch.cat(parts, 1)

    def _divided(self) -> Tensor:
        """Divide the gradients, in the basis of eigenvectors, by eigenvalues."""
        *bases, values = self._ekfac  # type: ignore[misc]
        rotated = mapped(in_order(self._product), transposed(bases)).individual()[0]
        values = values.to(rotated.dtype) + self._damping
        return rotated.reshape(-1, *values.shape) / values


class BatchFactors(GradientReduction):
    """Individual gradients, saved as factors where these are smaller.

    Saved in ``grad_factors``, an object (:class:`FactoredGradients`) that stands for
    the individual gradients ``[N, *p]`` (see :class:`~backpack.extensions.BatchGrad`):
    a linear layer's gradient for a sample with T positions is kept as T vectors of
    inputs and of cotangents. It can be preconditioned, and passed to
    ``BatchDotGrad(other=...)`` in another backward pass. It can't be differentiated.
    """

    adds_up_from = None

    def __init__(self, subsampling: Selection = None):
        """Choose the samples.

        Args:
            subsampling: Samples whose gradients are saved, by index; the scale stays
                that of the full batch. Default: ``None`` for all.
        """
        super().__init__("grad_factors", subsampling=subsampling)

    @staticmethod
    def reduce(gradients: PerSample) -> Any:  # noqa: D102
        return FactoredGradients(gradients.gathered(lambda x, _: x.detach().clone()))

    def over_shards(self, value: Any, piece: Any) -> Any:  # noqa: D102
        raise NotImplementedError(IN_PROCESS)
