"""The same quantities from several processes as from one.

With data parallelism, each process has a part of the batch, and computes the quantities
of its own samples. :func:`reduce` makes those of the whole batch of them.
"""

from __future__ import annotations

from math import isclose, isnan
from typing import Any, Iterable, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.shards import Piece

__all__ = ["Piece", "reduce"]

NOT_SEEN = (
    "has seen no backward pass since the last reduction, or the process group was "
    "initialized after it. Call reduce(...) once after each backward pass."
)
NO_COUNT = (
    "does not know what the loss divides by. Extend it; give one of your own an "
    "attribute `reduction`, 'mean' or 'sum'. Or pass count=<number of samples of this "
    "process>, if it is a mean over them: for a sum, that gives wrong values."
)
DIFFERENTIABLE = (
    "has results that can be differentiated (create_graph=True), and sums over "
    "processes cannot. Compute them without a graph, or do not reduce them."
)


REDUCED = "_backpack_reduced"  # attribute of a value that was combined


class _Report(NamedTuple):
    """What a process tells the others about one extension.

    Attributes:
        name: The extension's class.
        samples: Number of samples.
        divisors: What each loss divides by; ``None`` for a sum.
        present: Whether each parameter has a field to combine.
        error: What speaks against a reduction.
    """

    name: str
    samples: int
    divisors: tuple[float | None, ...]
    present: tuple[bool, ...]
    error: str


def reduce(
    parameters: Iterable[Tensor],
    extensions: Iterable[BackpropExtension],
    group: ProcessGroup | None = None,
    count: int | None = None,
    gather: bool = False,
) -> None:
    """Make quantities of the whole batch of those that each process has computed.

    To be called after a backward pass, once and in every process, with the same
    parameters and extensions in the same order. Before it, every process has run a
    backward pass on samples of its own, with a loss that is a mean or a sum over them,
    or any other mean (weighted, over valid targets), which an extended loss tells. The
    fields hold afterwards what a single process computes from all samples:

    - what is a sum or a mean over samples, also the variance, and Kronecker factors
      (each of them with its own scale), is the same in every process,
    - ``batch_dot`` has all pairs of samples, in the order of processes,
    - what belongs to single samples (``grad_batch``, ``batch_l2``, diagonals for each
      sample, square roots of the GGN) stays with the process that has them, and gets
      the scale of the whole batch; ``gather=True`` collects it,
    - functions that multiply with a curvature matrix have to be called in every process
      at the same time, with the same columns.

    ``KFRA`` is refused: its recursion multiplies averages over the batch. Sampled
    quantities draw in each process; seed the processes differently, so that their draws
    are independent. Parameters without a field, or with the one that was combined
    after an earlier pass, are left alone.

    Args:
        parameters: Parameters with the extensions' fields.
        extensions: The extensions that were active in the backward pass.
        group: The processes. Default: ``None`` for all.
        count: Number of this process' samples, if the loss is a mean over them, and
            neither extended nor, one of your own, with an attribute ``reduction``. Not
            for a sum. Default: ``None``, the backward pass tells.
        gather: Whether values of single samples are collected from all processes.
            Default: ``False``.

    Raises:
        NotImplementedError: If an extension cannot be reduced.
        ValueError: If processes disagree, or it is not known what the loss divides by.
    """  # noqa: DAR401
    # what is there twice, as tied parameters of two modules, is reduced once
    parameters = list(dict.fromkeys(parameters))
    extensions = list(dict.fromkeys(extensions))
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    if world == 1:
        return
    own = [_report(ext, parameters, count) for ext in extensions]
    reports: list[Any] = [None] * world
    distributed.all_gather_object(reports, own, group=group)
    if len({len(of_process) for of_process in reports}) > 1:
        raise ValueError("reduce(...): processes pass different numbers of extensions.")
    for ext, of_extension in zip(extensions, zip(*reports)):
        weights, shares = _weights(of_extension)
        parts = ext.shard.parts if ext.shard is not None else {}
        for param, has_field in zip(parameters, of_extension[rank].present):
            if has_field:
                part = parts.get(param)
                piece = Piece(weights[rank], shares[rank], part, gather, group)
                with torch.no_grad():
                    value = ext.over_shards(getattr(param, ext.savefield), piece)
                setattr(param, ext.savefield, value)
                setattr(_first(value), REDUCED, True)
        ext.shard = None


def _first(value: Any) -> Any:
    """Return what stands for a value: of a list, its first part."""
    return value[0] if isinstance(value, list) else value


def _is_new(ext: BackpropExtension, param: Tensor) -> bool:
    """Tell whether a parameter has a value that is of one process alone.

    A pass that does not reach a parameter leaves it what an earlier one has computed.
    """
    value = getattr(param, ext.savefield, None)
    return value is not None and not hasattr(_first(value), REDUCED)


def _report(
    ext: BackpropExtension, parameters: list[Tensor], count: int | None
) -> _Report:
    """Collect what the other processes have to know; errors are raised by all."""
    shard = ext.shard
    present = tuple(_is_new(ext, param) for param in parameters)
    if shard is None:
        return _Report(type(ext).__name__, 0, (), present, NOT_SEEN)
    samples = shard.samples if count is None else count
    divisors = [None if d is None else float(d) for d in shard.divisors]
    if count is not None:
        divisors = [count if d is not None and isnan(d) else d for d in divisors]
        divisors = divisors or [count]
    error = ""
    if samples is None or not divisors or any(d and isnan(d) for d in divisors):
        error = NO_COUNT
    fields = [getattr(p, ext.savefield) for p, has in zip(parameters, present) if has]
    tensors = [t for f in fields for t in (f if isinstance(f, list) else [f])]
    if any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        error = DIFFERENTIABLE
    return _Report(type(ext).__name__, samples or 0, tuple(divisors), present, error)


def _weights(reports: tuple[_Report, ...]) -> tuple[list[float], list[float]]:
    """Compute each process' weight and share of the samples.

    Args:
        reports: What each process tells about one extension.

    Returns:
        Weights and shares, see :class:`Piece`.

    Raises:
        ValueError: If processes disagree, or one cannot reduce.
    """
    names = [report.name for report in reports]
    for rank, report in enumerate(reports):
        if report.error:
            what = f"{report.name} {report.error}"
            raise ValueError(f"reduce(...): {what} (process {rank})")
    disagreements: dict[str, Any] = {
        "extensions": names,
        "parameters with a value": [report.present for report in reports],
        "numbers of losses": [len(report.divisors) for report in reports],
        "reductions of losses": [[d is None for d in r.divisors] for r in reports],
    }
    for what, values in disagreements.items():
        if any(value != values[0] for value in values):
            raise ValueError(
                f"reduce(...): {names[0]}: processes have different {what}: {values}. "
                "Run the same model and loss everywhere, and pass the same arguments."
            )
    samples = [report.samples for report in reports]
    by_loss = [
        [1.0] * len(reports) if divisors[0] is None else _fractions(divisors)
        for divisors in zip(*(report.divisors for report in reports))
    ]
    weights = by_loss[0]
    for others in by_loss[1:]:
        if not all(map(isclose, weights, others)):
            raise NotImplementedError(
                f"reduce(...): {names[0]}: several losses give the processes different"
                f" weights, {weights} and {others}. Use a backward pass for each loss."
            )
    return weights, _fractions(samples)


def _fractions(numbers: Iterable[float]) -> list[float]:
    """Divide numbers by their sum."""
    numbers = list(numbers)
    return [number / sum(numbers) for number in numbers]
