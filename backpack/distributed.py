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

from backpack.engine.nodes.graph import qualified
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.shards import Piece, nothing, outline, unknown_in
from backpack.utils.subsampling import num_selected

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
IN_GRADIENT = (
    "puts its results into `.grad` (replace_grad=True), and `reduce` is about fields. "
    "Use replace_grad=False, or add up `.grad` of all processes as without extensions."
)
OTHERS = (
    "reduce(...): {ext}: processes have different parameters with a value. {names} got "
    "one in process {has}, none in process {lacks}, which {reason}. Run the same model "
    "and loss everywhere. A part of the model that the backward pass of a process does "
    "not reach may differ: its samples count as zeros."
)
FROZEN = "has frozen it"
PASSED_BY = "has reached it all the same: look for a warning there"
UNKNOWN = (
    "reduce(...): {ext}: {names} was not reached in every process, and what counts as "
    "zeros is known for tensors, lists of them, and functions, not for {kind}. Call "
    "this part of the model everywhere, if only with no rows."
)
VALUE, NOT_REACHED = "value", "not reached"


class _Report(NamedTuple):
    """What a process tells the others about one extension.

    Attributes:
        name: The extension's class.
        samples: Number of samples.
        divisors: What each loss divides by; ``None`` for a sum.
        states: Of each parameter, that it has a value of this pass, or was not reached;
            else what speaks against zeros in its place.
        error: What speaks against a reduction.
    """

    name: str
    samples: int
    divisors: tuple[float | None, ...]
    states: tuple[str, ...]
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

    Refused are ``KFRA``, whose recursion multiplies averages over the batch, ``EKFAC``
    with eigenvectors of each process' own, ``BatchFactors``, and sums with weights that
    are a function of norms, of a loss that is a mean. Sampled quantities draw in each
    process; seed the processes differently, so that their draws are independent.

    Where the backward pass of some processes did not reach a parameter, as that of an
    expert without tokens, their samples count as zeros, as in a single process.
    Parameters that it reached nowhere are left alone: they have no field, or the one of
    an earlier pass.

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
        shard: Any = ext.shard  # each process has one, or there was an error
        holders = _holders(of_extension, parameters)
        outlines = _outlines(ext, parameters, holders, group)
        for param, having in zip(parameters, holders):
            if not having:
                continue
            value = getattr(param, ext.savefield, None)
            part = shard.parts.get(param)
            piece = Piece(weights[rank], shares[rank], part, gather, group)
            if param in outlines:
                piece = piece._replace(holders=having)
            if rank not in having:
                # what the pass has seen: a user may count tokens
                n: Any = count if shard.samples is None else shard.samples
                rows = num_selected(n, ext.get_subsampling())
                value, part = nothing(outlines[param], rows, param.device)
                piece = piece._replace(parts=part, rows=rows)
            with torch.no_grad():
                setattr(param, ext.savefield, ext.over_shards(value, piece))
        ext.shard = None


def _state(ext: BackpropExtension, param: Tensor) -> str:
    """Tell whether a parameter has a value of this pass; if it has none, why.

    A pass that does not reach a parameter leaves it what an earlier one has computed.
    """
    if ext.shard is not None and param in ext.shard.saved:
        if getattr(param, ext.savefield, None) is not None:
            return VALUE
    if not param.requires_grad:
        return FROZEN
    is_reached = ext.shard is not None and id(param) in ext.shard.reached
    return PASSED_BY if is_reached else NOT_REACHED


def _report(
    ext: BackpropExtension, parameters: list[Tensor], count: int | None
) -> _Report:
    """Collect what the other processes have to know; errors are raised by all."""
    shard = ext.shard
    states = tuple(_state(ext, param) for param in parameters)
    if shard is None:
        return _Report(type(ext).__name__, 0, (), states, NOT_SEEN)
    if ext.replaces_gradient:
        return _Report(type(ext).__name__, 0, (), states, IN_GRADIENT)
    samples = shard.samples if count is None else count
    divisors = [None if d is None else float(d) for d in shard.divisors]
    if count is not None:
        divisors = [count if d is not None and isnan(d) else d for d in divisors]
        divisors = divisors or [count]
    error = ""
    if samples is None or not divisors or any(d and isnan(d) for d in divisors):
        error = NO_COUNT
    own = [param for param, state in zip(parameters, states) if state == VALUE]
    fields = [getattr(param, ext.savefield) for param in own]
    tensors = [t for f in fields for t in (f if isinstance(f, list) else [f])]
    if any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        error = DIFFERENTIABLE
    return _Report(type(ext).__name__, samples or 0, tuple(divisors), states, error)


def _holders(
    reports: tuple[_Report, ...], parameters: list[Tensor]
) -> list[tuple[int, ...]]:
    """Tell which processes have a value of each parameter; the others count as zeros.

    Args:
        reports: What each process tells about one extension.
        parameters: The parameters.

    Returns:
        Numbers of the processes, by parameter.

    Raises:
        ValueError: If another process has none although it has reached a parameter.
    """
    by_param = list(zip(*(report.states for report in reports)))
    holders = [tuple(r for r, s in enumerate(of) if s == VALUE) for of in by_param]
    differing: dict[tuple[int, int, str], list[Tensor]] = {}
    for param, having, of_param in zip(parameters, holders, by_param):
        for rank, state in enumerate(of_param):
            if having and state not in (VALUE, NOT_REACHED):
                found = differing.setdefault((having[0], rank, state), [])
                found.append(param)
    for (has, lacks, reason), params in differing.items():
        text = {"names": _names(params), "has": has, "lacks": lacks, "reason": reason}
        raise ValueError(OTHERS.format(ext=reports[0].name, **text))
    return holders


def _outlines(
    ext: BackpropExtension,
    parameters: list[Tensor],
    holders: list[tuple[int, ...]],
    group: ProcessGroup | None,
) -> dict[Tensor, Any]:
    """Describe the values that some processes lack, see :func:`outline`.

    Args:
        ext: The extension.
        parameters: The parameters.
        holders: The processes that have a value, by parameter.
        group: The processes.

    Returns:
        Value, and what is known besides, by parameter that some processes lack.

    Raises:
        NotImplementedError: If it is not known what stands for nothing.
    """
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    partial = [i for i, having in enumerate(holders) if 0 < len(having) < world]
    if not partial:
        return {}
    own, parts = {}, {} if ext.shard is None else ext.shard.parts
    for i in [i for i in partial if holders[i][0] == rank]:
        param = parameters[i]
        own[i] = outline([getattr(param, ext.savefield), parts.get(param)])
    told: list[Any] = [None] * world
    distributed.all_gather_object(told, own, group=group)
    found = {i: x for of_process in told for i, x in of_process.items()}
    for i in partial:
        kind = unknown_in(found[i])
        if kind is not None:
            names, who = _names([parameters[i]]), type(ext).__name__
            raise NotImplementedError(UNKNOWN.format(ext=who, names=names, kind=kind))
    return {parameters[i]: found[i] for i in partial}


def _names(params: list[Tensor]) -> str:
    """Name parameters, without their models."""
    found = {place: name for place, (name, _) in qualified(params).items()}
    shown = [repr(found.get(id(p), f"one of shape {list(p.shape)}")) for p in params]
    return ", ".join(shown)


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
        "numbers of parameters": [len(report.states) for report in reports],
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
