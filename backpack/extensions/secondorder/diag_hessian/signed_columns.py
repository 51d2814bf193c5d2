"""Symmetric matrices, one for each sample, as sums of signed outer products."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Iterator, NamedTuple, Sequence

import torch
from einops import einsum
from torch import Tensor

from backpack.utils.kroneckers import diagonalize
from backpack.utils.state import may_look
from backpack.utils.types import full_precision
from backpack.utils.unsqueeze import flatten


def factor(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Factor symmetric matrices M = Σ_v s_v c_v c_vᵀ, by their eigenvalues.

    Args:
        matrices: Matrices of shape ``[N, H, H]``.

    Returns:
        Columns ``[H, N, H]`` and signs ``[H, N]``.
    """
    dtype = matrices.dtype
    eigenvalues, eigenvectors = diagonalize(full_precision(matrices))
    columns = eigenvectors * eigenvalues.abs().sqrt().unsqueeze(1)
    return columns.movedim(2, 0).to(dtype), eigenvalues.sign().T.to(dtype)


class Segment(NamedTuple):
    """Some of the columns, next to each other.

    Attributes:
        key: Identifies where they come from: columns that went separate ways have the
            same key, and are added where the ways meet again.
        size: How many there are.
        share: Which part of the ways lead here. Columns must not be combined with
            others before all ways have met.
    """

    key: object
    size: int
    share: Fraction


class SignedColumns:
    """Columns c and signs s, such that Σ_v s_vn c_vn c_vnᵀ is sample n's matrix.

    A negative part would need a second set of columns otherwise.

    Attributes:
        columns: Columns of shape ``[V, N, *]``.
        sign: Signs of shape ``[V, N]``.
        segments: What the columns consist of.
    """

    def __init__(self, columns: Tensor, sign: Tensor, segments: list[Segment]):
        """Store columns.

        Args:
            columns: Columns of shape ``[V, N, *]``.
            sign: Signs of shape ``[V, N]``.
            segments: What they consist of, in order.
        """
        self.columns, self.sign, self.segments = columns, sign, segments

    @classmethod
    def create(
        cls, columns: Tensor, sign: Tensor, ways: int = 1, key: object = None
    ) -> SignedColumns:
        """Create columns where they come into being.

        Args:
            columns: Columns of shape ``[V, N, *]``.
            sign: Signs of shape ``[V, N]``.
            ways: Number of separate ways they go. Default: 1.
            key: Identifies them. Default: a new key.

        Returns:
            The columns.
        """
        key = object() if key is None else key
        return cls(columns, sign, [Segment(key, len(columns), Fraction(1, ways))])

    @classmethod
    def wrap(cls, value: Any) -> SignedColumns:
        """Make signed columns of what a module extension returned.

        Args:
            value: Signed columns, or a dictionary like them: matrices ``[V, N, *]``
                under ``"matrices"``, their signs (1 or -1) under ``"signs"``.

        Returns:
            The columns.
        """
        if isinstance(value, SignedColumns):
            return value
        matrices = value["matrices"]
        pairs = zip(value["signs"], matrices)
        signs = [m.new_full(m.shape[:2], float(sign)) for sign, m in pairs]
        return cls.create(torch.cat(list(matrices)), torch.cat(signs))

    def __getitem__(self, key: str) -> list[Any]:
        """Return the columns, sorted by their signs, or these signs.

        Args:
            key: ``"matrices"`` for columns ``[V, N, *]``, ``"signs"`` for 1 or -1.

        Returns:
            A list, with one entry for each sign.

        Raises:
            KeyError: If the key is none of these.
        """
        if key not in self.keys():
            raise KeyError(f"SignedColumns have {list(self.keys())}, got {key!r}.")
        by_sign = list(self.by_sign())
        if key == "signs":
            return [float(sign) for sign, _ in by_sign]
        return [columns for _, columns in by_sign]

    @staticmethod
    def keys() -> tuple[str, str]:
        """Return what can be asked for by name.

        Returns:
            The names.
        """
        return ("matrices", "signs")

    def replace(self, columns: Tensor, ways: int = 1) -> SignedColumns:
        """Pull the columns back.

        Args:
            columns: Columns of shape ``[V, N, *]``.
            ways: Number of separate ways they go. Default: 1.

        Returns:
            The columns, with the same signs.
        """
        segments = [s._replace(share=s.share / ways) for s in self.segments]
        return SignedColumns(columns, self.sign, segments)

    def merge(self, other: SignedColumns) -> SignedColumns:
        """Add columns that come from the same place, and append all others.

        Args:
            other: Other columns.

        Returns:
            All columns.
        """
        parts = {part.segments[0].key: part for part in self._split()}
        for part in other._split():
            (segment,) = part.segments
            known = parts.get(segment.key)
            if known is not None:
                share = known.segments[0].share + segment.share
                segment = segment._replace(share=share)
                columns = known.columns + part.columns
                part = SignedColumns(columns, part.sign, [segment])
            parts[segment.key] = part
        return join(list(parts.values()))

    def compress(self) -> SignedColumns:
        """Use fewer columns where there are many more than a sample has features.

        Columns are combined by eigenvalues, which is worth its price from twice the
        number of features on.

        Returns:
            Columns of the same matrices.
        """
        features = self.columns.shape[2:].numel()
        whole = [part for part in self._split() if part.segments[0].share == 1]
        if sum(len(part.columns) for part in whole) <= 2 * features:
            return self
        rest = [part for part in self._split() if part.segments[0].share < 1]
        both = join(whole)
        flat = flatten(both.columns, 2)
        signed = flat * both.sign.unsqueeze(2).to(flat.dtype)
        columns, sign = factor(einsum(signed, flat, "v n i, v n j -> n i j"))
        columns = columns.reshape(len(columns), *self.columns.shape[1:])
        return join([SignedColumns.create(columns, sign), *rest])

    def by_sign(self) -> Iterator[tuple[int, Tensor]]:
        """Split the columns by their signs.

        Where numbers must not be looked at, both signs are taken for present.

        Yields:
            1 and columns ``[V, N, *]`` that are zero where the sign is not 1, then -1
            and those of the opposite sign, as far as there are any.
        """
        for sign in (1, -1):
            matches = self.sign == sign
            mask = matches.reshape(*matches.shape, *[1] * (self.columns.dim() - 2))
            if not may_look(matches):
                yield sign, self.columns.where(mask, 0)
                continue
            if matches.all() and matches.numel():
                yield sign, self.columns
                return
            some = matches.any(1)
            if some.any():
                yield sign, self.columns[some].where(mask[some], 0)

    def _split(self) -> list[SignedColumns]:
        sizes = [segment.size for segment in self.segments]
        parts = zip(self.columns.split(sizes), self.sign.split(sizes), self.segments)
        return [SignedColumns(columns, sign, [s]) for columns, sign, s in parts]


def join(parts: Sequence[SignedColumns]) -> SignedColumns:
    """Put columns that come from different places side by side.

    Args:
        parts: The columns.

    Returns:
        All columns.
    """
    columns = torch.cat([part.columns for part in parts])
    sign = torch.cat([part.sign for part in parts])
    return SignedColumns(columns, sign, [s for part in parts for s in part.segments])
