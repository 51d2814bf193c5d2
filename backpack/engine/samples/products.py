"""Where samples are in products, which bring rows together but for factors of zero."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any, Sequence

import torch
from torch import Tensor

from backpack.core.kinds import Contraction
from backpack.core.layout import Mixed, Placement, compact, simplify, unentered
from backpack.core.operations import find_operation
from backpack.engine.nodes import functions
from backpack.engine.nodes.saved import are_kept
from backpack.engine.samples.trials import Performed, Trial
from backpack.utils.types import is_inexact

NOT_ASKED = (
    " (of what is learned, zeros that a mask has made are not told from others inside "
    "of a checkpoint, or where there are other hooks on what is saved)"
)


def may_leave_rows(trial: Trial) -> bool:
    """Tell whether factors of zero may leave rows to samples that are not there.

    Args:
        trial: The operation, with the sample numbers of its operands.

    Returns:
        Whether they may.
    """
    return trial.masks.is_of_few and bool(trial.masks.found())


def contracted(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Follow rows that are multiplied with a constant matrix.

    Args:
        done: The operation.
        trial: The same, with the sample numbers of its operands.
        n: Number N of samples.

    Returns:
        A placement for the result; ``None`` if this is no rule for it.
    """
    if len(done.data) > 1:
        return None
    (x,), args = done.data, enumerate(done.args)
    keys = [i for i, y in args if is_inexact(y) and y is not x]
    operation = find_operation(done.func, done.args, done.kwargs, keys)
    own = next(i for i in trial.numbers if i is not None)
    if not isinstance(operation, Contraction) or operation.data is not x:
        return None
    if may_leave_rows(trial):
        return None
    rows = operation.rows_of(own)
    if rows is None:
        return None
    return [simplify(rows.expand(done.outs[0].shape), n)]


def multiplied(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Count whose entries are multiplied and added up, but for those times zero.

    Args:
        done: The operation.
        trial: The same, with the sample numbers of its operands.
        n: Number N of samples.

    Returns:
        A placement for the result; ``None`` if this is no rule for it.
    """
    places = [k for k, x in enumerate(trial.flat) if is_inexact(x)]
    factors = [trial.flat[k] for k in places]
    if any(x.layout is not torch.strided for x in factors):
        return None  # sparse ones have their own rules
    if len(places) < 2 or len(places) > 2 and done.name not in functions.CHAINS:
        return None  # a third one is added
    shape = done.outs[0].shape
    if done.name.startswith("conv") or not shape.numel():
        return None
    masks = trial.masks.found()
    own, met = _owners(trial, places, masks, shape)
    lacks = trial.masks.is_of_few  # so that it may not show that they meet
    for _ in trial.masks.learned() if met or lacks else ():
        masks = trial.masks.found()
        own, met = _owners(trial, places, masks, shape)
        if not (met or lacks):
            break
    trial.masks.were_read = bool(masks or lacks)
    if met:
        hidden = are_kept() and any(x.requires_grad and not x.all() for x in factors)
        return [Mixed(trial.describe() + (NOT_ASKED if hidden else ""))]
    nobody = unentered(done.outs[0], n)  # if all factors are zero
    found = simplify(own, n)
    return [nobody if found is None else found]


def _owners(
    trial: Trial, places: Sequence[int], masks: Sequence[Tensor], shape: torch.Size
) -> tuple[Tensor, bool]:
    """Add up the numbers of the samples that entries come from, and their squares.

    Returns:
        The only sample of each entry, -1 where there is none; and whether some have
        several.
    """
    factors = []
    for x, own in ((trial.flat[k], trial.numbers[k]) for k in places):
        weight = torch.ones((), device=x.device, dtype=torch.float64)
        if any(x is mask for mask in masks):
            weight = trial.masks.entries_of(x).to(weight)
        own = torch.full((), -1, device=x.device) if own is None else compact(own)
        small = torch.broadcast_tensors(weight, own, weight.new_ones([1] * x.dim()))
        factors.append([small[:2], [part.expand(x.shape) for part in small[:2]]])
    for chosen in product(*factors):  # the small ones, unless they have to be as long
        with suppress(RuntimeError):
            return _added(trial, places, chosen, shape)
    raise RuntimeError(f"{trial.describe()} can't be repeated.")


def _added(
    trial: Trial,
    places: Sequence[int],
    factors: Sequence[Sequence[Tensor]],
    shape: torch.Size,
) -> tuple[Tensor, bool]:
    sums: list[Any] = [0.0, 0.0, 0.0]
    for place, (weight, own) in zip(places, factors):
        if trial.numbers[place] is None:
            continue
        for power in range(3):
            flat = list(trial.flat)
            for other, (x, _) in zip(places, factors):
                flat[other] = x
            flat[place] = weight * (own**power * (own >= 0))
            sums[power] = sums[power] + trial.call(flat)
    count, first, second = sums
    own = (first / count.clamp(min=1)).round()
    several = (first != own * count) | (second != own.square() * count)
    found = own.where(count > 0, -1).long().expand(shape)
    return found, bool(several.any())
