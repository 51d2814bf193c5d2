"""What one of several processes remembers of its backward pass, to combine the results.

Each process computes quantities of its own samples, its shard of the batch;
:func:`backpack.distributed.reduce` makes quantities of the whole batch of them.
"""

from __future__ import annotations

from math import nan
from typing import Any, MutableMapping, NamedTuple
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from backpack.core.per_sample.base import Dense, PerSample
from backpack.core.table import find_loss
from backpack.engine.backward.turn import Turn
from backpack.utils.state import state
from backpack.utils.types import as_type, full_precision

_MOST_AXES = 64  # of a tensor, in PyTorch


class Shard:
    """What a backward pass has seen of the batch.

    A copy of an extension, or a stored one, has none.

    Attributes:
        backward_pass: Weak reference to the backward pass it is about.
        samples: Number of samples; ``None`` if it is not known.
        divisors: What each loss divides the sum of its terms by: ``None`` if it does
            not, ``nan`` if that is not known.
        parts: What is needed besides a parameter's field, by parameter.
        saved: The parameters whose values are of this pass: others may have those of
            an earlier one.
        reached: Identities of the leaf tensors that the pass reaches.
    """

    def __init__(self, backward_pass: Any):
        """Start with nothing.

        Args:
            backward_pass: The backward pass that is running.
        """
        self.backward_pass = ref(backward_pass)
        self.samples: int | None = None
        self.divisors: list[float | Tensor | None] = [nan] * len(backward_pass.terms)
        self.parts: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()
        self.saved: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self.reached = set(map(id, backward_pass.inspection.reached))
        for group in backward_pass.groups:
            self.reached.update(map(id, group.params))

    def meet(self, turn: Turn) -> None:
        """Note what a loss tells.

        Args:
            turn: The loss's turn.
        """
        self.divisors.append(_divisor(turn.module))
        self.samples = self.samples or turn.call.n

    def move(self, param: Tensor, other: Tensor) -> None:
        """Note that a parameter's value was moved.

        Args:
            param: The parameter that had it.
            other: The one that has it now.
        """
        for of_param in (self.parts, self.saved):
            if param in of_param:
                of_param[other] = of_param.pop(param)

    def __reduce__(self) -> tuple:
        """Leave nothing in a copy: what is remembered is about this process."""
        return type(None), ()


class Piece(NamedTuple):
    """One process' share of a batch, with what is needed to put shares together.

    Attributes:
        weight: What turns this process' summands of the loss into those of the whole
            batch: n_r / n for a mean over n_r of n samples, one for a sum.
        share: Fraction n_r / n of the samples.
        parts: What the extension has kept besides the field, for this parameter.
        gathers: Whether values of single samples are collected from all processes.
        group: The processes.
        holders: The processes whose backward pass has reached the parameter; empty for
            all. The value of another one consists of zeros.
        rows: Number of samples that are zeros in this process; ``None`` if it is one
            of these.
    """

    weight: float
    share: float
    parts: Any
    gathers: bool
    group: Any
    holders: tuple[int, ...] = ()
    rows: int | None = None

    def required_parts(self, ext: Any) -> Any:
        """Return what the extension has kept besides the field.

        Args:
            ext: The extension.

        Returns:
            What it has kept.

        Raises:
            NotImplementedError: If it has not, because a user's rule made the value.
        """
        if self.parts is None:
            raise NotImplementedError(
                f"{type(ext).__name__}: the value of a rule of your own does not tell "
                "what is needed to combine it with those of other processes. Override "
                "`over_shards`."
            )
        return self.parts

    def sum(self, value: Tensor, factor: float) -> Tensor:
        """Sum a tensor over processes.

        Args:
            value: Tensor of the same shape ``[*]`` in every process.
            factor: What this process' tensor is multiplied by before.

        Returns:
            Sum of shape ``[*]``, in every process.
        """
        # of one type in all processes, whatever their factors are
        total = _scaled(full_precision(value), factor).contiguous()
        total = total.clone() if total is value else total
        distributed.all_reduce(total, group=self.group)
        return as_type(total, value.dtype)

    def of_one(self, value: Tensor) -> Tensor:
        """Give all processes the tensor of one that the backward pass has reached.

        Args:
            value: Tensor of the same shape ``[*]`` in every process.

        Returns:
            That of the first of them.
        """
        first, *_ = self.holders or (0,)
        is_first = distributed.get_rank(self.group) == first
        return self.sum(value, float(is_first))

    def largest(self, number: int, device: torch.device) -> int:
        """Find the largest number of any process.

        Args:
            number: This process' number.
            device: Where processes exchange tensors.

        Returns:
            The largest, at least one.
        """
        numbers = torch.tensor(max(1, number), device=device)
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=self.group)
        return int(numbers)

    def agrees(self, description: str, device: torch.device) -> bool:
        """Tell whether all processes describe what they have in the same way.

        Args:
            description: This process' description.
            device: Where processes exchange tensors.

        Returns:
            Whether they do.
        """
        number = crc32(description.encode())
        extremes = torch.tensor([number, -number], device=device)
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=self.group)
        return not bool(extremes.sum())

    def local(self, value: Tensor, factor: float, dim: int = 0) -> Tensor:
        """Rescale what belongs to single samples, and gather it if that is asked for.

        Args:
            value: Tensor ``[*, N, *]``.
            factor: What it is multiplied by.
            dim: Axis of the samples. Default: 0.

        Returns:
            The same for this process' samples, or for all processes' in their order.
        """
        scaled = as_type(_scaled(self._of_own(value, dim), factor), value.dtype)
        return self.gather(scaled, dim) if self.gathers else scaled

    def gather(self, value: Tensor, dim: int = 0) -> Tensor:
        """Concatenate tensors of all processes.

        Args:
            value: Tensor ``[*, n, *]``, where n may differ among processes.
            dim: Axis to concatenate along. Default: 0.

        Returns:
            Tensor of the processes' entries, in their order.

        Raises:
            ValueError: If the shapes differ in other axes.
        """
        value = self._of_own(value, dim)
        shapes = self._shapes(value)
        sizes = [shape[dim] if dim < len(shape) else 0 for shape in shapes]
        rest = [shape[:dim] + shape[dim + 1 :] for shape in shapes]
        # what a process without samples has may be of another shape, besides
        others = {x for x, size in zip(rest, sizes) if size} or set(rest)
        if len(others) > 1:
            raise ValueError(
                f"Processes have values of shapes {shapes}, that cannot be put together"
                f" along axis {dim}. Use inputs that differ in the batch axis only."
            )
        # collectives want the same size everywhere
        rows = value.movedim(dim, 0)
        padded = rows.new_zeros(max(sizes), *others.pop())
        if len(rows):
            padded[: len(rows)] = rows
        pieces = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(pieces, padded, group=self.group)
        pieces = [piece[:size] for piece, size in zip(pieces, sizes)]
        return torch.cat(pieces).movedim(0, dim)

    def _of_own(self, value: Tensor, dim: int) -> Tensor:
        """Let zeros in place of another process' samples stand for the own ones."""
        if self.rows is None:
            return value
        return value.new_zeros(*value.shape[:dim], self.rows, *value.shape[dim + 1 :])

    def _shapes(self, value: Tensor) -> list[tuple[int, ...]]:
        """Tell the shapes of all processes' tensors."""
        own = torch.zeros(1 + _MOST_AXES, dtype=torch.int64)
        own[: 1 + value.dim()] = torch.tensor([value.dim(), *value.shape])
        own = own.to(value.device)
        world = distributed.get_world_size(self.group)
        found = [torch.empty_like(own) for _ in range(world)]
        distributed.all_gather(found, own, group=self.group)
        return [tuple(x[1 : 1 + x[0]]) for x in torch.stack(found).tolist()]


class Outline(NamedTuple):
    """What a process tells of a value to those that have none.

    Attributes:
        kind: ``"tensor"``, ``"samples"`` for products, ``"function"`` for a linear one,
            or the name of a class that is none of these.
        shape: Shape, for products that of the parameter.
        dtype: Type of the numbers.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


def outline(value: Any) -> Any:
    """Describe a value.

    Args:
        value: The value, or what is known besides.

    Returns:
        An :class:`Outline`, lists of them for lists; what is no tensor, as it is.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [outline(x) for x in value]
    if isinstance(value, PerSample):
        return Outline("samples", tuple(value.shape), value.dtype)
    if isinstance(value, Tensor):
        return Outline("tensor", tuple(value.shape), value.dtype)
    return Outline("function" if callable(value) else type(value).__name__)


def nothing(like: Any, rows: int, device: torch.device) -> Any:
    """Make what stands for a value where the backward pass did not reach a parameter.

    Args:
        like: What :func:`outline` says of the value of another process.
        rows: Number of samples.
        device: Where it is.

    Returns:
        Zeros in the same form.
    """
    if not isinstance(like, Outline):
        if isinstance(like, list):
            return [nothing(x, rows, device) for x in like]
        return like
    if like.kind == "function":
        return torch.zeros_like
    if like.kind == "samples":
        zeros = torch.zeros(1, rows, *like.shape, dtype=like.dtype, device=device)
        return Dense(zeros, torch.Size(like.shape))
    return torch.zeros(like.shape, dtype=like.dtype, device=device)


def unknown_in(like: Any) -> str | None:
    """Find a value for which :func:`nothing` has no zeros.

    Args:
        like: What :func:`outline` says.

    Returns:
        The name of its class; ``None`` if there is none.
    """
    if isinstance(like, Outline):
        return None if like.kind in ("tensor", "samples", "function") else like.kind
    found = map(unknown_in, like if isinstance(like, list) else ())
    return next((kind for kind in found if kind is not None), None)


def _scaled(value: Tensor, factor: float) -> Tensor:
    """Multiply a tensor; without weight it is not looked at, as the mean of nothing."""
    if factor == 1.0:
        return value
    return full_precision(value) * factor if factor else torch.zeros_like(value)


def shard_of(extension: Any) -> Shard | None:
    """Return what an extension remembers of the backward pass that is running.

    Args:
        extension: The extension, which keeps it.

    Returns:
        What is remembered, ``None`` where nothing is shared.
    """
    running = state().backward_pass
    if running is None or not running.is_shared:
        return None
    if extension.shard is None or extension.shard.backward_pass() is not running:
        extension.shard = Shard(running)
    return extension.shard


def _divisor(loss: Module) -> float | Tensor | None:
    """Tell what a loss divides by, see :class:`Shard`."""
    reduction = getattr(loss, "reduction", None)
    if reduction is None:
        return nan
    if reduction not in ("mean", "batchmean"):
        return None
    return 1.0 / find_loss(loss).derivatives.factor_of_terms(loss)
