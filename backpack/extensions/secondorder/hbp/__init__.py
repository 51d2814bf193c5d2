"""Kronecker factors of the GGN's blocks: KFAC, KFLR and KFRA."""

from __future__ import annotations

from functools import partial
from numbers import Real
from typing import Any, Callable

from torch import Tensor

from backpack.core.derivatives.loss_base import BaseLossDerivatives
from backpack.core.per_sample.base import PerSample
from backpack.engine.backward.turn import current_turn
from backpack.extensions.curvature import Curvature
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.secondorder.hbp import factors
from backpack.extensions.secondorder.hbp.hbp_options import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from backpack.extensions.secondorder.hbp.losses import HBPLoss
from backpack.extensions.secondorder.module_rules import WalkingExtension
from backpack.extensions.shards import Piece, shard_of
from backpack.utils.errors import check_choice
from backpack.utils.hooks import message
from backpack.utils.types import FisherType, Grads, Layer, Randomness, WeightSharing

__all__ = [
    "BackpropStrategy",
    "ExpectationApproximation",
    "HBP",
    "KFAC",
    "KFLR",
    "KFRA",
    "KroneckerFactors",
    "LossHessianStrategy",
]

BRANCHES = (
    "{ext}: an output is used several times, and a curvature matrix that is averaged "
    "over the batch does not tell how the branches interact. Use KFLR or KFAC."
)

OTHER_INPUTS = (
    "{ext}: {what} is used by several calls, of which two losses see different ones. "
    "Their Kronecker products do not add up to one. Compute the factors of each loss "
    "in a backward pass of its own."
)

AVERAGES = (
    "{ext}: it multiplies averages over the batch, and those of several processes do "
    "not combine. Use KFLR or KFAC."
)


class HBP(WalkingExtension):
    """Hessian backpropagation: Kronecker factors from what is pulled back.

    Depending on how a parameter enters its layer, with B from what is pulled back to
    the layer's output, and A from its inputs a:

    - weight of a linear layer or a convolution: ``[B, A]``, A = (1/N) Σ a aᵀ
      (those of a transposed convolution stand for ``weight.transpose(0, 1)``, and a
      warning says so),
    - their bias, or a vector that is added along the last axis: ``[B]``,
    - weight of an embedding: ``[A, B]``, where A is diagonal and stored as a vector:
      how often each index occurs per sample,
    - any other parameter (normalization layers, parameters of other modules):
      ``[B]``, its dense block ``[P, P]`` over all of its P elements.

    Where T positions share a weight, ``weight_sharing`` says what becomes of them:

    - ``"expand"``: they are treated like samples: B sums over them, A averages.
    - ``"reduce"``: B is that of the sum over positions, and a is averaged before any
      product.
    - ``None``: B is that of the sum over the positions of a convolution, and A sums
      over them: BackPACK's convention. Everything else is refused.

    Of samples with different numbers of positions, those that others have count as
    zeros.

    With groups, the factors are stacked along a leading axis, ``[G, p, p]`` and
    ``[G, d, d]``; so are those of several weights that are stacked in one parameter, of
    which operations take entries along the first axis, or equal parts.

    Attributes:
        curv_type: Name of the curvature matrix.
        loss_hessian_strategy: How the loss Hessian is represented.
        backprop_strategy: What is pulled back.
        ea_strategy: Which expectations are taken to factorize.
        weight_sharing: How weight sharing is treated.
    """

    rule = HBPBaseModule

    def __init__(
        self,
        curv_type: str,
        loss_hessian_strategy: str,
        backprop_strategy: str,
        ea_strategy: str,
        savefield: str = "hbp",
        weight_sharing: WeightSharing = None,
    ):
        """Choose what is pulled back.

        Args:
            curv_type: Name of the curvature matrix, see
                :class:`~backpack.extensions.curvature.Curvature`.
            loss_hessian_strategy: ``"exact"``, ``"sampling"`` or ``"sum"``.
            backprop_strategy: ``"average"`` for an average over the batch, ``"sqrt"``
                for columns.
            ea_strategy: Which expectations are taken to factorize, one of
                ``hbp_options.ExpectationApproximation.CHOICES``.
            savefield: Attribute of a parameter under which its value is saved.
                Default: ``"hbp"``.
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.

        Raises:
            ValueError: If the options do not exist or contradict each other.
        """
        LossHessianStrategy.check_exists(loss_hessian_strategy)
        name, is_sqrt = type(self).__name__, BackpropStrategy.is_sqrt(backprop_strategy)
        ExpectationApproximation.check_exists(ea_strategy)
        if is_sqrt and loss_hessian_strategy == LossHessianStrategy.SUM:
            raise ValueError(
                f"{name}: a sum of loss Hessians has no columns to pull back. Use "
                "loss_hessian_strategy='exact' or 'sampling'."
            )
        self._set_weight_sharing(weight_sharing)
        super().__init__(savefield)
        self.curv_type = curv_type
        self.loss_hessian_strategy = loss_hessian_strategy
        self.backprop_strategy = backprop_strategy
        self.ea_strategy = ea_strategy

    def _set_weight_sharing(self, weight_sharing: WeightSharing) -> None:
        name, choices = type(self).__name__, factors.WEIGHT_SHARING
        check_choice(name, "weight_sharing", weight_sharing, choices)
        self.weight_sharing = weight_sharing

    def get_curv_type(self) -> str:
        """Return which curvature matrix is approximated.

        Returns:
            Its name.
        """
        return self.curv_type

    def get_loss_hessian_strategy(self) -> str:
        """Return how the loss Hessian is represented.

        Returns:
            ``"exact"``, ``"sampling"`` or ``"sum"``.
        """
        return self.loss_hessian_strategy

    def get_backprop_strategy(self) -> str:
        """Return what is pulled back.

        Returns:
            ``"average"`` or ``"sqrt"``.
        """
        return self.backprop_strategy

    def get_ea_strategy(self) -> str:
        """Return which expectations are taken to factorize.

        Returns:
            One of the options in :class:`.hbp_options.ExpectationApproximation`.
        """
        return self.ea_strategy

    def get_num_mc_samples(self) -> int:
        """Return the number of Monte-Carlo samples, where targets are drawn.

        Returns:
            The number.
        """
        return 1

    def start(
        self, derivatives: BaseLossDerivatives, module: Layer, g_out: Grads
    ) -> Tensor:
        """Compute what is pulled back from the loss.

        Args:
            derivatives: The loss's derivatives.
            module: The loss module, with its inputs and output.
            g_out: Gradient at its output.

        Returns:
            Columns ``[V, N, *in]``, or a matrix ``[in, in]``.
        """
        return HBPLoss(derivatives).backpropagate(self, module, (), g_out, None)

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Add what two consumers of an output pull back to it.

        Args:
            existing: What is there already.
            other: What comes in addition.

        Returns:
            Their sum.

        Raises:
            NotImplementedError: If averages over the batch are pulled back, and this
                is another branch of the network, not another loss.
        """
        averages = BackpropStrategy.is_batch_average(self.backprop_strategy)
        # a loss comes before all that it is computed from: what is there is of others
        if averages and not current_turn().call.is_loss:
            raise NotImplementedError(message(BRANCHES, ext=self))
        return existing + other

    def over_shards(self, value: list[Tensor], piece: Piece) -> list[Tensor]:
        """Make factors for the whole batch: each is a sum, or a mean, over samples.

        Args:
            value: Factors for this process' samples.
            piece: This process' share of the batch.

        Returns:
            Factors for the whole batch.

        Raises:
            NotImplementedError: If averages over the batch are multiplied.
        """
        averages = ExpectationApproximation.should_average_param_jac(self.ea_strategy)
        if averages or BackpropStrategy.is_batch_average(self.backprop_strategy):
            raise NotImplementedError(message(AVERAGES, ext=self))
        transposed, positions = piece.parts or (False, [1])
        position, value = factors.input_position(value, transposed), [*value]
        if position is not None and self.weight_sharing is not None:
            # means over the positions of the longest sample, which another may have
            power, own = 2 if self.weight_sharing == "reduce" else 1, value[position]
            parts = [n / piece.largest(n, own.device) for n in positions]
            scales = own.new_tensor(parts).pow(power)
            value[position] = own * scales.view(-1, *[1] * (own.dim() - 1))
        return [
            piece.sum(factor, piece.share if i == position else piece.weight)
            for i, factor in enumerate(value)
        ]


DENSE_LIMIT = 2**14  # a GiB in single precision


class KroneckerFactors(ColumnExtension, HBP):
    """Kronecker factors from columns; base class of KFAC and KFLR.

    B = Σ S Sᵀ over columns S and samples, see :class:`HBP`.
    """

    curv_type = Curvature.GGN
    backprop_strategy = BackpropStrategy.SQRT
    ea_strategy = ExpectationApproximation.BOTEV_MARTENS

    def __init__(
        self,
        savefield: str,
        source: Source,
        weight_sharing: WeightSharing = None,
        dense_limit: int = DENSE_LIMIT,
    ):
        """Choose how weight sharing is treated.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
            source: Where the columns come from.
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.
            dense_limit: Number of rows that a factor may have. Default: ``16384``.

        Raises:
            ValueError: If an option is not one of those.
        """
        self._set_weight_sharing(weight_sharing)
        if not (isinstance(dense_limit, Real) and dense_limit >= 1):  # NaN is not
            raise ValueError(
                f"{type(self).__name__}: dense_limit must be a number of rows, got "
                f"{dense_limit!r}."
            )
        self.dense_limit = dense_limit
        super().__init__(savefield, source)

    def check(self, where: Any, param: Tensor, product: PerSample) -> None:
        """Refuse parameters whose factors are ambiguous, or too large.

        Args:
            where: A call, or a group of parameters, for messages.
            param: The parameter.
            product: Products of columns and its Jacobian.
        """
        what = partial(where.describe, param)
        factors.refuse_large(self, what, product)
        factors.refuse_ambiguous(self, what, product, param)
        shard = shard_of(self)
        if shard is not None:
            positions = [x.positions for x in product.stack or [product]]
            shard.parts[param] = product.is_transposed, positions

    def statistic(self, product: PerSample) -> Any:  # noqa: D102
        return factors.output_factor(product, self.weight_sharing)

    def finish(self, product: PerSample, statistic: Any) -> list[Tensor]:  # noqa: D102
        return factors.with_input_factor(product, statistic, self.weight_sharing)

    def join(
        self,
        existing: list[Tensor],
        other: list[Tensor],
        product: PerSample,
        what: Callable[[], str],
        alike: bool,
    ) -> list[Tensor]:
        """Add factors of two losses, which have that of the input in common.

        Args:
            existing: One loss's factors.
            other: The other's.
            product: Products of any of the other's columns and a Jacobian.
            what: Names the parameter, and where it is used.
            alike: Whether both see the same uses, and so the same inputs.

        Returns:
            Factors of the sum.

        Raises:
            NotImplementedError: If there is none: each has a factor of its own inputs.
        """
        if not alike and max(len(existing), len(other)) > 1:
            raise NotImplementedError(message(OTHER_INPUTS, ext=self, what=what()))
        position = factors.input_position(existing, product.is_transposed)
        pairs = enumerate(zip(existing, other))
        return [x if i == position else x + y for i, (x, y) in pairs]


class KFAC(KroneckerFactors):
    """Kronecker factors of the GGN, with a Monte-Carlo estimate of the loss Hessian.

    Saved in ``kfac``, a list (see :class:`HBP`). B carries the scale of the loss;
    targets are drawn from the model's own distribution (Martens & Grosse, 2015,
    "Optimizing neural networks with Kronecker-factored approximate curvature").
    """

    def __init__(
        self,
        mc_samples: int = 1,
        weight_sharing: WeightSharing = None,
        generator: Randomness = None,
        fisher_type: FisherType = "mc",
        dense_limit: int = DENSE_LIMIT,
    ):
        """Choose the number of samples and how weight sharing is treated.

        Args:
            mc_samples: Number of Monte-Carlo samples. Default: ``1``.
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.
            generator: Random number generator. Default: PyTorch's global one.
            fisher_type: ``"mc"`` for targets drawn from the model's own distribution,
                ``"empirical"`` for those of the batch: B is then that of the empirical
                Fisher c Σₙ ∇ℓₙ ∇ℓₙᵀ. Default: ``"mc"``.
            dense_limit: Number of rows that a factor may have; parameters with larger
                ones are refused before anything is allocated. Default: ``16384``.

        Raises:
            ValueError: If an option is not one of those.
        """
        source = Source.fisher(self, fisher_type, mc_samples, generator)
        super().__init__("kfac", source, weight_sharing, dense_limit)


class KFLR(KroneckerFactors):
    """Kronecker factors of the GGN, with the exact loss Hessian.

    Saved in ``kflr``, a list (see :class:`HBP`; Botev et al., 2017, "Practical
    Gauss-Newton optimisation for deep learning").
    """

    def __init__(
        self, weight_sharing: WeightSharing = None, dense_limit: int = DENSE_LIMIT
    ):
        """Choose how weight sharing is treated.

        Args:
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.
            dense_limit: Number of rows that a factor may have; parameters with larger
                ones are refused before anything is allocated. Default: ``16384``.

        Raises:
            ValueError: If an option is not one of those.
        """
        source = Source(LossHessianStrategy.EXACT, compact=True)
        super().__init__("kflr", source, weight_sharing, dense_limit)


class KFRA(HBP):
    """Kronecker factors of the GGN, with the batch-averaged recursion.

    Saved in ``kfra``, a list (see :class:`HBP`). B starts as the sum of the loss
    Hessians, and each module maps it to (1/N) Σₙ Jₙᵀ B Jₙ (Botev et al., 2017,
    "Practical Gauss-Newton optimisation for deep learning"). There are no branches: an
    output that is used several times is refused.
    """

    def __init__(self, weight_sharing: WeightSharing = None):
        """Choose how weight sharing is treated.

        Args:
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.

        Raises:
            ValueError: If an option is not one of those.
        """
        super().__init__(
            Curvature.GGN,
            LossHessianStrategy.SUM,
            BackpropStrategy.BATCH_AVERAGE,
            ExpectationApproximation.BOTEV_MARTENS,
            "kfra",
            weight_sharing,
        )
