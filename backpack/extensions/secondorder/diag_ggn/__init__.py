"""The diagonal of the generalized Gauss-Newton matrix, in total or for each sample."""

from __future__ import annotations

from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.secondorder.hbp.hbp_options import LossHessianStrategy
from backpack.extensions.shards import Piece
from backpack.utils.errors import check_choice
from backpack.utils.types import FisherType, Randomness


class _Diagonal(ColumnExtension):
    """Squares of the pulled-back columns, summed over columns."""

    VALID_LOSS_HESSIAN_STRATEGIES = [
        LossHessianStrategy.EXACT,
        LossHessianStrategy.SAMPLING,
    ]
    SUM_BATCH = True

    def __init__(
        self, loss_hessian_strategy: str, savefield: str, source: Source | None = None
    ):
        """Choose how the loss Hessian is factored.

        Args:
            loss_hessian_strategy: ``"exact"`` or ``"sampling"``.
            savefield: Attribute of a parameter under which its value is saved.
            source: Where the columns come from. Default: as the strategy says, with one
                Monte-Carlo sample.

        Raises:
            ValueError: If the strategy does not exist.
        """
        name, choices = type(self).__name__, self.VALID_LOSS_HESSIAN_STRATEGIES
        check_choice(name, "loss_hessian_strategy", loss_hessian_strategy, choices)
        if source is None:
            exact = loss_hessian_strategy == LossHessianStrategy.EXACT
            source = Source(loss_hessian_strategy, compact=exact)
        super().__init__(savefield, source)

    def statistic(self, product: PerSample) -> Tensor:  # noqa: D102
        return product.partial_squares(self.SUM_BATCH)

    def finish(self, product: PerSample, statistic: Tensor) -> Tensor:  # noqa: D102
        return product.finish_squares(statistic, self.SUM_BATCH)

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        combine = piece.sum if self.SUM_BATCH else piece.local
        return combine(value, piece.weight)


class DiagGGN(_Diagonal):
    """Base class for the diagonal of the GGN."""


class BatchDiagGGN(_Diagonal):
    """Base class for the diagonal of the GGN of each sample."""

    SUM_BATCH = False


class DiagGGNExact(DiagGGN):
    """Diagonal of the generalized Gauss-Newton matrix, with the exact loss Hessian.

    Saved in ``diag_ggn_exact``, of shape ``[*p]``: the diagonal of Σₙ Jₙᵀ Hₙ Jₙ, where
    the loss Hessian Hₙ includes the factor of the reduction (Schraudolph, 2002, "Fast
    curvature matrix-vector products for second-order gradient descent").
    """

    def __init__(self) -> None:
        """Set strategy and field."""
        super().__init__(LossHessianStrategy.EXACT, "diag_ggn_exact")


class _Sampled(_Diagonal):
    """The diagonal with a Monte-Carlo estimate of the loss Hessian."""

    _savefield: str

    def __init__(
        self,
        mc_samples: int = 1,
        generator: Randomness = None,
        fisher_type: FisherType = "mc",
    ):
        """Choose the number of Monte-Carlo samples and what draws them.

        Args:
            mc_samples: Number of Monte-Carlo samples. Default: ``1``.
            generator: Random number generator. Default: PyTorch's global one.
            fisher_type: ``"mc"`` for targets drawn from the model's own distribution,
                ``"empirical"`` for those of the batch: the empirical Fisher's diagonal.
                Default: ``"mc"``.

        Raises:
            ValueError: If an option is not one of those.
        """
        source = Source.fisher(self, fisher_type, mc_samples, generator)
        super().__init__(LossHessianStrategy.SAMPLING, self._savefield, source)


class DiagGGNMC(_Sampled, DiagGGN):
    """Diagonal of the GGN, with a Monte-Carlo estimate of the loss Hessian.

    Saved in ``diag_ggn_mc``, of shape ``[*p]``. Targets are drawn from the model's own
    distribution; the result is right in the mean over many draws.
    """

    _savefield = "diag_ggn_mc"


class BatchDiagGGNExact(BatchDiagGGN):
    """Diagonal of each sample's GGN, with the exact loss Hessian.

    Saved in ``diag_ggn_exact_batch``, of shape ``[N, *p]``: the summands of
    :class:`DiagGGNExact`.
    """

    def __init__(self) -> None:
        """Set strategy and field."""
        super().__init__(LossHessianStrategy.EXACT, "diag_ggn_exact_batch")


class BatchDiagGGNMC(_Sampled, BatchDiagGGN):
    """Diagonal of each sample's GGN, with a Monte-Carlo estimate of the loss Hessian.

    Saved in ``diag_ggn_mc_batch``, of shape ``[N, *p]``: the summands of
    :class:`DiagGGNMC`.
    """

    _savefield = "diag_ggn_mc_batch"
