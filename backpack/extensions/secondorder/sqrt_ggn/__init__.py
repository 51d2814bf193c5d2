"""The square root of the generalized Gauss-Newton matrix."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.secondorder.hbp.hbp_options import LossHessianStrategy
from backpack.extensions.secondorder.sqrt_ggn import base  # noqa: F401 (paths of rules)
from backpack.extensions.shards import Piece
from backpack.utils.hooks import no_op
from backpack.utils.subsampling import Selection
from backpack.utils.types import FisherType, Randomness


class SqrtGGN(ColumnExtension):
    """Base class for the columns of the GGN's square root."""

    additive = False
    takes_complex = True

    def __init__(
        self,
        loss_hessian_strategy: str,
        savefield: str,
        subsampling: Selection,
        source: Source | None = None,
    ):
        """Choose how the loss Hessian is factored.

        Args:
            loss_hessian_strategy: ``"exact"`` or ``"sampling"``.
            savefield: Attribute of a parameter under which its value is saved.
            subsampling: Samples to consider, by index. ``None`` for all.
            source: Where the columns come from. Default: as the strategy says, with one
                Monte-Carlo sample.
        """
        LossHessianStrategy.check_exists(loss_hessian_strategy)
        source = source or Source(loss_hessian_strategy)
        super().__init__(savefield, source, subsampling=subsampling)

    def statistic(self, product: PerSample) -> Tensor:  # noqa: D102
        return self.select(product).individual()

    def combine(self, existing: Tensor, other: Tensor) -> Tensor:  # noqa: D102
        return torch.cat([existing, other])

    add = combine

    def compute(self, turn: Any) -> None:  # noqa: D102
        for param, value in turn.columns(self):
            turn.save(self, param, value)
            saved = getattr(param, self.savefield)
            turn.backward_pass.kept[self, param] = ref(saved)  # a hook may drop it

    def conclude(self, backward_pass: Any) -> dict[Tensor, Any]:
        """Put zeros behind where losses that were met later have columns.

        Args:
            backward_pass: The backward pass.

        Returns:
            Values of parameters that such a loss does not reach.
        """
        kept, found = backward_pass.kept, {}
        total = sum([number for _, number in kept[self]])
        for param in {p for group in backward_pass.groups for p in group.params}:
            saved = kept.get((self, param), no_op)()
            value = getattr(param, self.savefield, None)
            # what a hook has put there is not ours
            if saved is not None and saved is value and len(value) < total:
                zeros = value.new_zeros(total - len(value), *value.shape[1:])
                found[param] = torch.cat([value, zeros])
        return found

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        return piece.local(value, piece.weight**0.5, dim=1)


class SqrtGGNExact(SqrtGGN):
    """Square root of the GGN, with the exact loss Hessian.

    Saved in ``sqrt_ggn_exact``, of shape ``[C, N, *p]``: columns V with G = V Vᵀ, where
    C is the number of features of the loss input. Their pairwise dot products form the
    GGN's Gram matrix (Dangel, Tatzel, Hennig, 2022, "ViViT"). Several losses have their
    columns one after the other, zero at parameters that a loss does not reach.
    """

    def __init__(self, subsampling: Selection = None):
        """Choose the samples.

        Args:
            subsampling: Samples to consider, by index; the scale stays that of the full
                batch. Default: ``None`` for all.
        """
        super().__init__(LossHessianStrategy.EXACT, "sqrt_ggn_exact", subsampling)


class SqrtGGNMC(SqrtGGN):
    """Square root of the GGN, with a Monte-Carlo estimate of the loss Hessian.

    Saved in ``sqrt_ggn_mc``, of shape ``[M, N, *p]`` for M samples.
    """

    def __init__(
        self,
        mc_samples: int = 1,
        subsampling: Selection = None,
        generator: Randomness = None,
        fisher_type: FisherType = "mc",
    ):
        """Choose the number of Monte-Carlo samples, and the samples of the batch.

        Args:
            mc_samples: Number of Monte-Carlo samples. Default: ``1``.
            subsampling: Samples to consider, by index; the scale stays that of the full
                batch. Default: ``None`` for all.
            generator: Random number generator. Default: PyTorch's global one.
            fisher_type: ``"mc"`` for targets drawn from the model's own distribution,
                ``"empirical"`` for those of the batch. Default: ``"mc"``.

        Raises:
            ValueError: If an option is not one of those.
        """
        source = Source.fisher(self, fisher_type, mc_samples, generator)
        strategy = LossHessianStrategy.SAMPLING
        super().__init__(strategy, "sqrt_ggn_mc", subsampling, source)
