"""Eigenvalue-corrected Kronecker factors: EKFAC."""

from __future__ import annotations

from copy import copy
from functools import wraps
from typing import Any, Callable, Literal, Mapping, Sequence

import torch
from torch import Tensor
from torch.linalg import LinAlgError

from backpack.core.fast.matmul import gram
from backpack.core.per_sample.base import PerSample
from backpack.core.per_sample.maps import factor_shapes, squares_after
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.sums import features_first
from backpack.extensions.secondorder.columns import EXACT_TOO, Source
from backpack.extensions.secondorder.hbp import DENSE_LIMIT, KroneckerFactors, factors
from backpack.extensions.shards import Piece
from backpack.utils.errors import check_mapping
from backpack.utils.hooks import message
from backpack.utils.kroneckers import eigen_kfacs, transposed
from backpack.utils.types import Randomness, WeightSharing, full_precision

# by parameter; a mapping from a type does not take one from a subclass
Basis = Mapping[Any, Sequence[Tensor]]

OTHER_BASIS = (
    "EKFAC: basis must have eigenvectors of shapes {expected} for a parameter of shape "
    "{shape}, got {got}. Pass what EKFAC has saved on each trainable parameter, "
    "{{p: p.ekfac for p in model.parameters()}}, with the same weight_sharing."
)
NO_BASIS = (
    "EKFAC: processes have eigenvectors of their own, and eigenvalues in different "
    "bases do not combine. Pass the same eigenvectors to each of them, by "
    "EKFAC(basis=...)."
)
OTHER_BASES = (
    "EKFAC: two losses contribute to a parameter, each with eigenvectors of its own, "
    "and eigenvalues in different bases do not combine. Give the eigenvectors of a "
    "pass with one of them, by EKFAC(basis=...), or give each loss a backward pass of "
    "its own."
)


def _naming(method: Callable) -> Callable:
    """Let an error say of which parameter there are no eigenvectors."""

    @wraps(method)
    def named(self: EKFAC, product: PerSample, *args: Any) -> Any:
        try:
            return method(self, product, *args)
        except LinAlgError as error:
            text = f"EKFAC, of a parameter of shape {list(product.shape)}: {error}"
            raise LinAlgError(text) from error

    return named


class EKFAC(KroneckerFactors):
    """Kronecker factors of the GGN with corrected eigenvalues.

    Saved in ``ekfac``, a list ``[Q_B, Q_A, E]``: the eigenvectors of the factors that
    :class:`~backpack.extensions.KFAC` saves, in the same order (one of them for biases
    and for parameters with a dense block; a vector of ones, the diagonal of the
    identity, for the indices of an embedding), and the diagonal of the GGN in their
    basis, E = Σ (Q_Bᵀ G Q_A)² over the gradients G = Σ_t b_t a_tᵀ of each sample and
    column, at the scale of the loss. E has the shape ``[o, i]``, with groups
    ``[G, o, i]``, for one matrix of eigenvectors ``[o]`` (George et al., 2018, "Fast
    approximate natural gradient descent in a Kronecker-factored eigenbasis").
    :mod:`backpack.utils.kroneckers` multiplies with powers of such lists.
    """

    looks_again = True

    def __init__(
        self,
        mc_samples: int = 1,
        fisher_type: Literal["mc", "exact", "empirical"] = "mc",
        weight_sharing: WeightSharing = "expand",
        basis: Basis | None = None,
        generator: Randomness = None,
        dense_limit: int = DENSE_LIMIT,
    ):
        """Choose columns, and the basis.

        Args:
            mc_samples: Number of Monte-Carlo samples. Default: ``1``.
            fisher_type: ``"mc"`` for targets drawn from the model's own distribution,
                ``"exact"`` for the exact loss Hessian, ``"empirical"`` for the targets
                of the batch. Default: ``"mc"``.
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``: how the factors,
                whose eigenvectors are used, are defined where positions share a weight.
                E does not depend on it otherwise. Default: ``"expand"``.
            basis: Eigenvectors for each parameter, as a former pass has saved them,
                with or without eigenvalues: E is then computed in this basis, and that
                of several batches may be added up. Default: ``None`` for those of this
                batch.
            generator: Random number generator. Default: PyTorch's global one.
            dense_limit: Number of rows that a factor may have; parameters with larger
                ones are refused before anything is allocated. Default: ``16384``.

        Raises:
            ValueError: If an option is not one of those.
        """
        check_mapping("EKFAC", "basis", basis, "what EKFAC has saved", "ekfac")
        source = Source.fisher(self, fisher_type, mc_samples, generator, EXACT_TOO)
        super().__init__("ekfac", source, weight_sharing, dense_limit)
        self._basis = basis
        self._fixed: list[Tensor] | None = None

    def for_parameter(self, param: Tensor) -> EKFAC:  # noqa: D102
        if self._basis is None:
            return self
        return self._within(self._basis.get(param, ()))

    def _within(self, bases: Sequence[Tensor]) -> EKFAC:
        """Return the same extension with the eigenvectors of one parameter."""
        bound = copy(self)
        bound._fixed, bound.looks_again = list(bases), False
        return bound

    def statistic(self, product: PerSample) -> Any:  # noqa: D102
        if self._fixed is None:
            return super().statistic(product)
        expected = factor_shapes(product)
        bases = self._fixed[: len(expected)]
        got = [list(x.shape) if isinstance(x, Tensor) else x for x in bases]
        if got != expected:
            text = {"expected": expected, "shape": product.shape, "got": got}
            raise ValueError(message(OTHER_BASIS, **text))
        bases = [full_precision(basis) for basis in bases]
        return [*bases, squares_after(product, transposed(bases))]

    @_naming
    def again(self, product: PerSample, statistic: Any) -> EKFAC:  # noqa: D102
        key = "eigenvectors", self.weight_sharing
        if product.stack:  # which has nothing in common with a bias
            return self._within(self._bases(product, eigenvectors(statistic)))
        b = factors.arrange(product)
        # copied when they are saved: until then, there are columns at all layers
        output = product.share(key, b, lambda: eigenvectors(statistic), copies=False)
        return self._within(self._bases(product, output))

    def compute(self, turn: Any) -> None:  # noqa: D102
        seen: set[int] = set()
        for param, value in turn.columns(self):
            own = [x.clone() if id(x) in seen else x for x in value]
            seen.update(map(id, value))
            turn.save(self, param, own)

    @_naming
    def reduce(self, product: PerSample) -> list[Tensor]:  # noqa: D102
        if self._fixed is not None:
            return self.statistic(product)
        options = self.weight_sharing, eigenvectors_of_gram
        output = factors.output_factor(product, *options)
        return self._within(self._bases(product, output)).statistic(product)

    def _bases(self, product: PerSample, output: Tensor) -> list[Tensor]:
        """Put eigenvectors of the input's factor next to those of the output's."""
        few = 2 * product.batch_size * product.positions
        if (
            isinstance(product, Outer)
            and self.weight_sharing != "reduce"
            and 0 < few <= product.inputs_size
        ):
            rows = features_first(full_precision(product.a), 1)
            bases = [output, eigenvectors_of_gram(rows)]
            bases = [factors.squeeze_group(basis) for basis in bases]
            return bases[::-1] if product.is_transposed else bases
        known = factors.with_input_factor(product, output, self.weight_sharing)
        place = factors.input_position(known, product.is_transposed)
        if place is not None:
            known[place] = eigenvectors(known[place])
        return known

    def finish(self, product: PerSample, statistic: Any) -> list[Tensor]:  # noqa: D102
        return statistic

    def combine(self, existing: Any, other: Any) -> Any:
        """Add statistics of two sets of columns: those in a basis, or its factors.

        Args:
            existing: Statistic of the first columns.
            other: Statistic of the other ones.

        Returns:
            Statistic of all of them.
        """
        if isinstance(existing, Tensor):
            return existing + other
        return [*existing[:-1], existing[-1] + other[-1]]

    def add(self, existing: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        """Add the contributions of two losses to one parameter.

        Args:
            existing: One loss's contribution.
            other: The other's.

        Returns:
            Their sum, if they have the same basis.

        Raises:
            NotImplementedError: If each has a basis of its own.
        """
        if self._basis is None:
            raise NotImplementedError(OTHER_BASES)
        return self.combine(existing, other)

    def over_shards(self, value: list[Tensor], piece: Piece) -> list[Tensor]:
        """Make eigenvalues for the whole batch: sums over samples.

        Args:
            value: Eigenvectors and eigenvalues for this process' samples.
            piece: This process' share of the batch.

        Returns:
            The same for the whole batch.

        Raises:
            NotImplementedError: If each process has a basis of its own.
        """
        if self._basis is None:
            raise NotImplementedError(NO_BASIS)
        vectors = value[:-1]
        if piece.holders:
            vectors = [piece.of_one(x) for x in vectors]
        return [*vectors, piece.sum(value[-1], piece.weight)]


def eigenvectors(factor: Tensor) -> Tensor:
    """Diagonalize a factor.

    Args:
        factor: Factor ``[*, p, p]``, or a vector for a diagonal one.

    Returns:
        Eigenvectors of the same shape.
    """
    found = eigen_kfacs([full_precision(factor)])[0]
    return found.contiguous()  # `torch.kron` takes no other layout


def eigenvectors_of_gram(rows: Tensor) -> Tensor:
    """Diagonalize the product of matrices with their transposes.

    If there are less columns than half the rows, a QR decomposition finds their range:
    of 784 rows and 128 columns in 9 ms, where all eigenvectors take 57.

    Args:
        rows: Matrices of shape ``[G, D, K]``.

    Returns:
        Eigenvectors of shape ``[G, D, D]``.
    """
    size, number = rows.shape[-2:]
    rows = full_precision(rows)
    if not 0 < 2 * number <= size:
        return eigenvectors(gram(rows))
    basis, triangle = torch.linalg.qr(rows, mode="complete")
    triangle = triangle[..., :number, :]
    inside = basis[..., :number] @ eigenvectors(triangle @ triangle.mT)
    return torch.cat([basis[..., number:], inside], -1)
