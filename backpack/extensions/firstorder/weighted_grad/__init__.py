"""Weighted sums of individual gradients: weights that depend on all parameters."""

from __future__ import annotations

from math import isclose
from typing import Any, Literal, NamedTuple, Union

import torch
from torch import Tensor

from backpack.core.per_sample.base import PerSample
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.shards import Piece, shard_of
from backpack.utils.errors import check_choice
from backpack.utils.hooks import message
from backpack.utils.state import may_look
from backpack.utils.subsampling import Selection
from backpack.utils.types import MatProd, Over, Scale
from backpack.utils.unsqueeze import flatten

Weights = Union[Tensor, MatProd]

CHOICES = {
    "of": ("norms", "dots"),
    "per": ("all", "parameter"),
    "scale": ("summand", "sample"),
    "replace_grad": (False, True),
}
OTHER_SAMPLES = (
    "{ext}: parameters have seen different numbers of samples ({sizes}), so that there "
    "are no norms over all of them. Use per='parameter', or a backward pass for each "
    "model."
)
UNKNOWN_SCALE = (
    "{ext}(scale='sample'): the extended losses of this backward pass have the "
    "reductions {found}, so that it is not known whether they average over samples. "
    "Extend the loss, `lossfunc = extend(lossfunc)`, or use scale='summand'."
)
MODIFIED = (
    "{ext}: a tensor that gradients of parameters are made of was modified in place "
    "before the backward pass was over. Don't modify inputs or gradients of layers in "
    "hooks; return new tensors."
)
OTHER_WEIGHTS = (
    "{ext}: expected a dense tensor with a real weight for each of {n} samples, got "
    "{found}."
)
NOT_SHARED = (
    "{ext}: weights that depend on {what} differ among processes, which know no more "
    "than their own samples. Use {instead}."
)


class _Kept(NamedTuple):
    """What is kept of a parameter until all of them have had their turn."""

    gradients: PerSample
    version: int
    statistic: Tensor
    factor: float


class WeightedGrad(GradientReduction):
    """Weighted sum of the individual gradients.

    Saved in ``grad_weighted``, of shape ``[*p]``: c Σₙ wₙ gₙ with the summands gₙ of
    the gradient (see :class:`~backpack.extensions.BatchGrad`), which carry a factor 1/N
    if the loss is a mean. c is one, and N for ``scale="sample"`` and a mean, so that
    c gₙ is the gradient of the sample's own loss. (A mean may count samples by vₙ:
    class weights, or how many targets are not ignored. It is N vₙ / Σ v times that
    then, which depends on the other samples. With a sum, it does not.)

    Weights are given, or a function of the norms ‖c gₙ‖ or of the dot products
    c² gᵢᵀ gⱼ over all parameters. One backward pass is enough: layers' inputs and
    cotangents are kept until all norms are known, individual gradients only where they
    are smaller (Lee, Kifer, 2021, "Scaling up differentially private deep
    learning with fast per-example gradient clipping"; Bu et al., 2023, "Differentially
    private optimization on large model at small cost").

    Values are there when the backward pass is over; an extension hook does not see
    them. All parameters are those of extended modules that the backward pass goes by:
    with ``backward(inputs=...)``, also those on its way to the inputs.

    Attributes:
        norms: After a backward pass, the norms ``[N]``, or a dictionary of them by
            parameter; ``None`` if weights do not depend on them.
        dots: The dot products ``[N, N]``, likewise.
        weights: The weights ``[N]``, or a dictionary of them by parameter.
    """

    takes_rules = False
    field = "grad_weighted"

    def __init__(
        self,
        weights: Weights,
        of: Literal["norms", "dots"] = "norms",
        per: Over = "all",
        scale: Scale = "summand",
        replace_grad: bool = False,
        subsampling: Selection = None,
    ):
        """Choose the weights.

        Args:
            weights: Tensor ``[N]``, or function that maps what ``of`` says to one.
                After a backward pass, the attribute holds the tensor, or a dictionary
                of them by parameter.
            of: What the function gets: ``"norms"`` for a tensor ``[N]``, ``"dots"`` for
                the matrix ``[N, N]`` of dot products. Default: ``"norms"``.
            per: Whether norms and dot products are over ``"all"`` parameters, or of
                each ``"parameter"`` by itself, which then has weights of its own.
                Default: ``"all"``.
            scale: ``"summand"``: the loss's scale, c = 1. ``"sample"``: that of the
                samples' own losses, c = N if the loss, which must be extended, is a
                mean. Default: ``"summand"``.
            replace_grad: Whether the result is accumulated in ``.grad``, in place of
                the gradient, which is then not computed, and of the field. Hooks for
                gradients run with it, after the backward pass. Default: ``False``.
            subsampling: Samples to sum over, by index; N is then their number, but for
                the scale. Default: ``None`` for all.

        Raises:
            ValueError: If an option is not one of those.
        """
        super().__init__(self.field, subsampling=subsampling)
        name = type(self).__name__
        for option, value in zip(CHOICES, (of, per, scale, replace_grad)):
            check_choice(name, option, value, CHOICES[option])
        if not (callable(weights) or isinstance(weights, Tensor)):
            raise ValueError(
                f"{name}: weights must be a tensor, or a function of {of}, got "
                f"{weights!r}."
            )
        self._given, self._of, self._per, self._scale = weights, of, per, scale
        self.replaces_gradient = replace_grad
        self.norms: Any = None
        self.dots: Any = None
        self.weights: Any = None

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:
        """Compute what weights depend on, unless that is dot products.

        Args:
            gradients: Individual gradients ``[1, N, *p]``.

        Returns:
            Their squared norms ``[N]``.
        """
        return gradients.sq_norms()

    def compute(self, turn: Any) -> None:
        """Compute what weights depend on, and keep what their sum will be made of.

        Args:
            turn: The parameters' turn.
        """
        running, shard = turn.backward_pass, shard_of(self)
        if self not in running.kept:
            # what is shown is that of the last pass; others may run in other threads
            shown: Any = ({}, {}) if self._per == "parameter" else (None, None)
            running.kept[self, WeightedGrad] = shown
            self.norms = self.dots = None
            self._show(*shown)
        kept = running.kept.setdefault(self, {})
        for param, product in turn.gradients().items():
            if shard is not None:
                shard.samples = product.batch_size
                shard.parts[param] = self._scale
            gradients, factor = self.select(product.plain), 1.0
            if self._scale == "sample":
                factor = self._factor(running.reductions, product.batch_size)
            if isinstance(self._given, Tensor):
                weights = self.weights = self._checked(self._given, gradients)
                kept[param] = _sum(gradients, weights, factor)
                continue
            by_dots = self._of == "dots"
            gradients = gradients.formed(by_dots)
            statistic = gradients.dots() if by_dots else self.reduce(gradients)
            if factor != 1.0:
                statistic = statistic * factor**2
            kept[param] = _Kept(gradients, gradients.version, statistic, factor)
            if self._per == "parameter":
                values = self._decide(statistic, [kept[param]])
                for values_of, value in zip(running.kept[self, WeightedGrad], values):
                    values_of[param] = value
                kept[param] = _sum(gradients, values[1], factor)

    def conclude(self, backward_pass: Any) -> dict[Tensor, Tensor]:
        """Decide on the weights, and sum individual gradients.

        Args:
            backward_pass: The backward pass.

        Returns:
            The weighted sums.

        Raises:
            NotImplementedError: If parameters have seen different samples.
            RuntimeError: If what was kept was modified since.
        """
        kept = backward_pass.kept[self]
        waiting = {p: x for p, x in kept.items() if isinstance(x, _Kept)}
        if not waiting:
            return kept
        first, *others = waiting.values()
        sizes = {entry.gradients.batch_size for entry in waiting.values()}
        if len(sizes) > 1:
            text = message(OTHER_SAMPLES, ext=self, sizes=sorted(sizes))
            raise NotImplementedError(text)
        if any(x.gradients.version != x.version for x in waiting.values()):
            raise RuntimeError(message(MODIFIED, ext=self))
        device = first.statistic.device
        total = sum([entry.statistic.to(device) for entry in others], first.statistic)
        found, weights = self._decide(total, [first, *others])
        self._show(found, weights)
        return {
            param: _sum(gradients, weights, factor)
            for param, (gradients, _, _, factor) in waiting.items()
        }

    def _show(self, found: Any, weights: Any) -> None:
        """Store what weights depend on, and these, as attributes."""
        setattr(self, self._of, found)
        self.weights = weights

    def _factor(self, reductions: list[str | None], n: int) -> float:
        """Tell what makes summands of the loss of the samples' own losses."""
        averages = {reduction in ("mean", "batchmean") for reduction in reductions}
        known = all(r in ("mean", "batchmean", "sum") for r in reductions)
        if not known or len(averages) != 1:
            raise ValueError(message(UNKNOWN_SCALE, ext=self, found=reductions))
        return float(n) if averages == {True} else 1.0

    def _decide(self, statistic: Tensor, entries: list[_Kept]) -> tuple[Tensor, Tensor]:
        """Turn squared norms, or dot products, into weights.

        Args:
            statistic: Squared norms ``[N]``, or dot products ``[N, N]``.
            entries: The parameters' individual gradients.

        Returns:
            What the function of the user gets, and the weights.
        """
        found = statistic
        if self._of == "norms":
            found = statistic.sqrt()
            if found.requires_grad:  # its derivative at zero shall be zero
                positive = statistic != 0
                found = statistic.where(positive, 1.0).sqrt().where(positive, 0.0)
            if may_look(found) and not found.isfinite().all():
                found = _out_of_range(found, entries)
        given: Any = self._given  # a function, or weights
        return found, self._checked(given(found), entries[0].gradients)

    def _checked(self, weights: Any, gradients: PerSample) -> Tensor:
        n = gradients.batch_size
        found = weights
        if isinstance(weights, Tensor):
            real = weights.layout == torch.strided and not weights.is_complex()
            if real and weights.shape == (n,):
                return weights
            found = f"{weights.dtype}, {weights.layout}, {list(weights.shape)}"
        elif isinstance(weights, (dict, list, tuple)):  # of tensors, perhaps
            found = f"a {type(weights).__name__} of {len(weights)}"
        raise ValueError(message(OTHER_WEIGHTS, ext=self, n=n, found=found))

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:
        """Sum over processes: what a sample contributes depends on itself alone.

        Args:
            value: Weighted sum over this process' samples.
            piece: This process' share of the batch, with sums over processes.

        Returns:
            Weighted sum over all samples.

        Raises:
            NotImplementedError: If weights depend on other samples, or on the scale of
                this process' loss.
        """  # noqa: DAR401
        sample = piece.required_parts(self) == "sample"
        # in all processes, of which one may have a weight of one, and others nothing
        is_mean = bool(piece.sum(value.new_tensor(piece.weight), 1.0) < 1.5)
        if not isinstance(self._given, Tensor):
            if self._of == "dots":
                self._refuse_shared("dot products", "norms")
            if not sample and is_mean:
                self._refuse_shared("norms of the summands of a mean", "scale='sample'")
        if not sample or not is_mean:
            return piece.sum(value, piece.weight)
        unequal = value.new_tensor(float(not isclose(piece.weight, piece.share)))
        if piece.sum(unequal, 1.0) > 0:  # in any process
            what = "means that count samples unequally"
            self._refuse_shared(what, "scale='summand' and a sum")
        return piece.sum(value, 1.0)

    def _refuse_shared(self, what: str, instead: str) -> None:
        text = message(NOT_SHARED, ext=self, what=what, instead=instead)
        raise NotImplementedError(text)


def _out_of_range(norms: Tensor, entries: list[_Kept]) -> Tensor:
    """Compute norms ``[N]`` whose squares are too large, without squares."""
    (some,) = norms.isfinite().logical_not().nonzero(as_tuple=True)
    rows = []
    for gradients, _, _, factor in entries:
        products = gradients.select(some.tolist()).individual()[0]
        rows.append(flatten(products * factor, 1).to(norms))
    both = torch.cat(rows, 1)
    largest = both.abs().amax(1)
    found = torch.linalg.vector_norm(both / largest[:, None], dim=1) * largest
    return norms.index_copy(0, some, found.where(largest.isfinite(), largest))


def _sum(gradients: PerSample, weights: Tensor, factor: float) -> Tensor:
    """Sum individual gradients ``[1, N, *p]``, with weights and a factor."""
    weights = weights.to(gradients.device)
    weights = weights if factor == 1.0 else weights * factor
    return gradients.weighted_sum(weights).squeeze(0)
