"""The diagonal of the Hessian, in total or for each sample."""

from __future__ import annotations

from torch import Tensor

from backpack.core.derivatives.generic_loss import GenericLossDerivatives
from backpack.core.derivatives.loss_base import BaseLossDerivatives
from backpack.extensions.secondorder.diag_hessian.diag_h_base import DiagHBaseModule
from backpack.extensions.secondorder.diag_hessian.signed_columns import (
    SignedColumns,
    factor,
)
from backpack.extensions.secondorder.module_rules import WalkingExtension
from backpack.extensions.shards import Piece
from backpack.utils.types import Grads, Layer


class DiagHessian(WalkingExtension):
    """Diagonal of the Hessian.

    Saved in ``diag_h``, of shape ``[*p]``: the diagonal of ∂²𝓛/∂p². Nets without
    curvature of their own, like those with ReLU, cost as much as the GGN; each smooth
    activation adds a column per unit.
    """

    SUM_BATCH = True
    rule = DiagHBaseModule

    def __init__(self) -> None:
        """Set the field."""
        super().__init__("diag_h")

    def start(
        self, derivatives: BaseLossDerivatives, module: Layer, g_out: Grads
    ) -> SignedColumns:
        """Compute signed columns of the loss Hessian.

        Args:
            derivatives: The loss's derivatives.
            module: The loss module, with its inputs and output.
            g_out: Gradient at its output.

        Returns:
            The columns.
        """
        scale = g_out[0].detach()
        if isinstance(derivatives, GenericLossDerivatives):
            columns, sign = factor(derivatives._hessian(module, warns=False))
            shape = len(columns), *module.input0.shape
            columns = columns.reshape(shape).to(module.input0.dtype)
        else:
            columns = derivatives.sqrt_hessian_compact(module)
            sign = columns.new_ones(columns.shape[:2])
        columns = columns.detach() * scale.abs().sqrt()
        return SignedColumns.create(columns, sign * scale.sign())

    def accumulate_backpropagated_quantities(
        self, existing: SignedColumns, other: SignedColumns
    ) -> SignedColumns:
        """Add what two consumers of an output pull back to it.

        Args:
            existing: What is there already.
            other: What comes in addition.

        Returns:
            Columns that both share, added, and those that only one has.
        """
        return SignedColumns.wrap(existing).merge(SignedColumns.wrap(other))

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        combine = piece.sum if self.SUM_BATCH else piece.local
        return combine(value, piece.weight)


class BatchDiagHessian(DiagHessian):
    """Diagonal of each sample's Hessian.

    Saved in ``diag_h_batch``, of shape ``[N, *p]``: the summands of
    :class:`DiagHessian`.
    """

    SUM_BATCH = False

    def __init__(self) -> None:
        """Set the field."""
        WalkingExtension.__init__(self, "diag_h_batch")
