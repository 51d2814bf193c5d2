"""Where samples are in what numbers pick: rows of tables, places to write to.

Running an operation with other numbers tells that, too. But where few entries of many
are picked, few differ, so that many runs are needed: rules for the frequent ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from backpack.core.layout import (
    Layout,
    Mixed,
    Placement,
    Where,
    combined,
    conflict,
    nobodys,
    pointwise,
    sample_numbers,
    simplify,
    unentered,
)
from backpack.engine.nodes.functions import in_brackets, named
from backpack.engine.samples.trials import Performed, Trial
from backpack.utils.types import is_inexact

INDEXES = (torch.long, torch.int)  # types of numbers that pick rows
_SCATTER = ("input", "dim", "index", "src")


def looked_up(table: Any, ids: Any, out: Tensor, of: Where, n: int) -> Placement:
    """Tell where samples are in what is picked from a table that has none.

    Args:
        table: The table.
        ids: What picks, as between brackets; samples are in some of it.
        out: What was picked.
        of: Tells where the samples of a tensor are.
        n: Number N of samples.

    Returns:
        Where they are in what was picked; ``None`` if there is no rule.
    """
    parts = ids if isinstance(ids, tuple) else (ids,)
    if not isinstance(table, Tensor) or of(table) is not None:
        return None
    if not any(isinstance(x, Tensor) for x in parts):
        return None
    parts = _without_ellipsis(parts, table.dim())
    tensors = [x for x in parts if isinstance(x, Tensor)]
    first = [isinstance(x, Tensor) for x in parts].index(True)
    others = parts[:first] + parts[first + len(tensors) :]  # or some between them
    if not all(x is None or type(x) in (slice, int) for x in others):
        return None
    if not all(x.dtype in INDEXES for x in tensors):
        return None
    lead = sum(type(x) is not int for x in parts[:first])
    data = [x for x in tensors if of(x) is not None]
    rows = torch.broadcast_tensors(*tensors)[0]
    placement = _together(data, rows, of, n)
    if isinstance(placement, Layout):
        return Layout(placement.axis + lead, placement.inner)
    if isinstance(placement, Tensor):
        behind = out.dim() - lead - rows.dim()
        return placement[(..., *[None] * behind)]
    return placement


def _together(data: list[Tensor], out: Tensor, of: Where, n: int) -> Placement:
    placement = pointwise(data, out, of)
    return combined(data, out, of, n) if placement is None else placement


def taken(done: Performed, of: Where, n: int) -> Placement:
    """Tell where samples are in what a function takes from a table.

    Args:
        done: The function's call. Where its table decides as well, there is no rule.
        of: Tells where the samples of a tensor are.
        n: Number N of samples.

    Returns:
        Where they are in the result; ``None`` if there is no rule.
    """
    _, name, args, kwargs, (out, *_), *_ = done
    if name == "take_along_dim":
        x, index, dim = named(("input", "indices", "dim"), args, kwargs)
    else:
        x, dim, index = named(("input", "dim", "index"), args, kwargs)
    if not (isinstance(index, Tensor) and isinstance(dim, int) and x.dim()):
        return None
    if any(x is y for y in done.data):
        return None
    if name == "index_select":
        before = [slice(None)] * (dim % x.dim())
        return looked_up(x, (*before, index), out, of, n)
    return _together([index], out, of, n)


def scattered(done: Performed, trial: Trial, n: int) -> Placement:
    """Tell where samples are in what was written to places that numbers pick.

    Other numbers of the sample would have picked other places of the same line, so that
    it belongs to the sample as a whole.

    Args:
        done: The operation.
        trial: The same, with the sample numbers of its operands.
        n: Number N of samples.

    Returns:
        Where they are in the result; ``None`` if there is no rule.
    """
    numbers = trial.numbers_of
    x, dim, index, value = named(_SCATTER, done.args, done.kwargs)
    value = done.kwargs.get("value", value)
    own = numbers(index)
    if own is None or not own.numel() or not x.dim() or not isinstance(dim, int):
        return None
    if trial.masks.is_of_few:  # other places may be other samples'
        return written(done, trial, n, by_numbers=True)
    line = own.amax(dim, keepdim=True)
    if bool((own != line).any()):
        return None
    lines = line.new_full(x.shape, -1).narrow(dim, 0, 1).clone()
    lines[tuple(map(slice, line.shape))] = line
    new = numbers(value)
    if new is not None and conflict(new[tuple(map(slice, index.shape))], line):
        return None
    return _with_own(lines, x, trial, n)


def put(done: Performed, trial: Trial, n: int) -> Placement:
    """Tell the same of what was written by way of brackets.

    Args:
        done: The operation.
        trial: The same, with the sample numbers of its operands.
        n: Number N of samples.

    Returns:
        Where they are in the result; ``None`` if there is no rule.
    """
    numbers = trial.numbers_of
    x, ids, value = named(("input", "indices", "values"), done.args, done.kwargs)
    parts = _without_ellipsis(in_brackets(done.name, ids), x.dim())
    consuming = [y for y in parts if y is not None]
    if all(numbers(y) is None for y in parts) or len(consuming) > x.dim():
        return None
    if trial.masks.is_of_few:
        return written(done, trial, n, by_numbers=True)
    # along axes where samples pick, all places are one
    shape = [
        size if numbers(y) is None else 1
        for size, y in zip(x.shape, (*consuming, *[None] * x.dim()))
    ]
    lines = torch.full(shape, -1, device=x.device)
    first = [y if numbers(y) is None else torch.zeros_like(y) for y in parts]
    same = {id(z): numbers(y) for y, z in zip(parts, first)}
    ids = tuple(first)
    if any(isinstance(y, Tensor) and y.dtype not in INDEXES for y in first):
        return None
    found = looked_up(lines, ids, lines[ids], lambda z: same.get(id(z)), n)
    if not isinstance(found, (Layout, Tensor)):
        return None
    wanted = sample_numbers(found, lines[ids].shape, n, x.device)
    lines[ids] = wanted
    if bool((lines[ids] != wanted).any()):
        return None  # two of them have picked from the same line
    new = numbers(value)
    if new is not None and conflict(new, wanted):
        return None
    return _with_own(lines, x, trial, n)


def written(
    done: Performed, trial: Trial, n: int, by_numbers: bool = False
) -> Placement:
    """Tell the same of what was written to places that constants say.

    Args:
        done: The operation.
        trial: The same, with the sample numbers of its operands.
        n: Number N of samples.
        by_numbers: Whether samples' numbers may say it, too; they may where the result
            has a gradient. Default: ``False``.

    Returns:
        Where they are in the result; ``None`` if there is no rule, or samples meet.
    """
    (_, name, args, kwargs, *_), numbers = done, trial.numbers_of
    adds = "add" in name or "reduce" in name or kwargs.get("reduce")
    if name.startswith("masked"):
        x, ids, value = named(("input", "mask", "source"), args, kwargs)
    elif name.startswith("index_put") or name == "__setitem__":
        names = "input", "indices", "values", "accumulate"
        x, ids, value, accumulates = named(names, args, kwargs)
        adds = adds or accumulates
    else:
        last = "source" if name.startswith("index") else "src"
        x, dim, ids, value = named(("input", "dim", "index", last), args, kwargs)
        value = kwargs.get("value", value)
    # what a gradient takes from there, it takes from whatever was written, and what is
    # added up shows what was added
    by_numbers = by_numbers or done.outs[0].requires_grad
    by_numbers = by_numbers or adds and numbers(value) is not None and is_inexact(value)
    if not by_numbers and any(numbers(y) is not None for y in tree_leaves(ids)):
        return None
    if not x.dim() or numbers(x) is not None and not kwargs.get("include_self", True):
        return None
    if x.shape != done.outs[0].shape:
        return None  # a mask has broadcast it
    own, new = numbers(x), numbers(value)
    own = nobodys(x.shape, x.device) if own is None else own
    if new is None:
        new = nobodys(getattr(value, "shape", ()), x.device)
    if name.startswith("masked"):
        ids = ids.broadcast_to(x.shape).nonzero(as_tuple=True)
        new = new.flatten()[: len(ids[0])]
    elif name.startswith("index_put") or name == "__setitem__":
        ids = in_brackets(name, ids)
    else:
        own, new, ids = _by_lines(name, dim % x.dim(), own, new, ids)
        ids = tuple(y.to(x.device) for y in ids)
    found = own.clone(memory_format=torch.contiguous_format)
    if adds:
        new = new.where(new >= 0, own[ids])
        some = new >= 0
        if not bool(some.all()):  # a constant adds to a sample
            places = torch.arange(own.numel(), device=x.device).view(own.shape)[ids]
            found.view(-1)[places[some]] = new[some]
            new = new.where(some, found[ids])
    found[ids] = new
    # another one was written to the same place, or met what was there
    if bool((found[ids] != new).any()) or adds and conflict(found, own):
        return None
    if by_numbers and not bool((found >= 0).any()):
        return unentered(done.outs[0], n)
    return simplify(found, n)


def _by_lines(
    name: str, dim: int, own: Tensor, new: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, tuple]:
    """Write down where numbers of places along an axis say that something is written.

    Args:
        name: The operation's name: that of a scattering, or of one by indices.
        dim: The axis.
        own: Sample numbers of what is written to.
        new: Sample numbers of what is written.
        ids: The places.

    Returns:
        The sample numbers, once where all is the same along an axis, and the places as
        between brackets.
    """
    if name.startswith("index"):  # whole slices
        lines, shape = [1] * own.dim(), list(own.shape)
        lines[dim], shape[dim] = -1, ids.numel()
        ids = ids.reshape(lines).expand(shape)
    new = new[tuple(map(slice, ids.shape))] if new.dim() else new
    parts = [own, new.expand(ids.shape), ids]
    for axis in range(ids.dim()):
        alike = {(y.size(axis), y.stride(axis)) for y in parts}
        if axis != dim and alike == {(own.size(axis), 0)}:
            first = (*[slice(None)] * axis, slice(1))
            parts = [y[first] for y in parts]
    own, new, ids = parts
    places = list(torch.meshgrid(*map(torch.arange, ids.shape), indexing="ij"))
    places[dim] = ids
    return own, new, tuple(places)


def _without_ellipsis(parts: tuple, dim: int) -> tuple:
    """Write down all axes that an ellipsis between brackets stands for."""
    places = [i for i, x in enumerate(parts) if x is ...]
    if not places:
        return parts
    (place,) = places
    consumed = sum(x is not None for x in parts) - 1
    axes = [slice(None)] * (dim - consumed)
    return (*parts[:place], *axes, *parts[place + 1 :])


def _with_own(lines: Tensor, x: Tensor, trial: Trial, n: int) -> Placement:
    """Add to what was written what was there before, unless samples meet."""
    own = trial.numbers_of(x)
    if own is not None:
        if conflict(lines, own):
            return None
        lines = lines.where(lines >= 0, own)
    return simplify(lines.expand(x.shape), n)


def bags(
    of: Where,
    n: int,
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    offsets: Any = None,
    *more: Any,
    **named: Any,
) -> Placement:
    """Tell which sample has which bag.

    Args:
        of: Tells where the samples of a tensor are.
        n: Number N of samples.
        out: Result of ``embedding_bag``.
        input: Rows that were picked.
        weight: The table; it may come first.
        offsets: Where bags begin. Default: ``None``.
        more: Further arguments.
        named: Further arguments.

    Returns:
        Where samples are in the result; ``None`` if the table has some.
    """
    if input.is_floating_point():  # as functions of torch have it
        input, weight = weight, input
    if of(weight) is not None:
        return None
    device = out.device
    numbers = torch.full((len(out),), -1, device=device)
    entries = torch.arange(input.numel(), device=device)
    if offsets is None:
        bags = entries // max(input.shape[1], 1)
    else:  # bags lie in memory one by one
        bags = torch.searchsorted(offsets[: len(out)], entries, right=True) - 1
        if of(offsets) is not None:
            found = sample_numbers(of(offsets), offsets.shape, n, device)
            numbers = found[: len(out)].clone()
    for x in (input, *more, *named.values()):  # and weights of the entries
        if isinstance(x, Tensor) and of(x) is not None:
            own = sample_numbers(of(x), x.shape, n, device).flatten()
            numbers[bags] = own.where(numbers[bags] < 0, numbers[bags])
            if bool(((own >= 0) & (numbers[bags] != own)).any()):
                return Mixed("`embedding_bag`")
    return simplify(numbers[:, None].expand(out.shape), n)
