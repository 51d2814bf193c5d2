"""Where samples are in the results of frequent operations, told by rules.

Running an operation again with other numbers tells that of any (``trials.py``), and is
remembered. But where numbers decide where samples are, by way of masks, routers or
lengths, each pass is another one: rules for what is done there.
"""

from __future__ import annotations

from typing import Any, Callable, Container, List, Optional, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from backpack.core.layout import (
    Layout,
    Mixed,
    Placement,
    Where,
    combined,
    compact,
    conflict,
    nobodys,
    only_known,
    pointwise,
    simplify,
    spans,
)
from backpack.core.recurrences import of_packed
from backpack.engine.nodes import functions
from backpack.engine.samples import picked
from backpack.engine.samples.products import contracted, may_leave_rows, multiplied
from backpack.engine.samples.trials import DENSE_ELEMENTS, Performed, Trial
from backpack.engine.samples.views import in_storage
from backpack.utils.types import is_inexact, tensors_in

Found = Optional[List[Placement]]


def quick_rule(done: Performed, of: Where) -> list[Placement] | None:
    """Tell where samples are in results, from no more than shapes and placements.

    Args:
        done: The operation.
        of: Tells where the samples of a tensor are.

    Returns:
        A placement for each result; ``None`` if there is no rule.
    """
    if done.name in functions.POINTWISE and len(done.outs) == 1:
        placement = pointwise(done.data, done.outs[0], of)
        return None if placement is None else [placement]
    acts_along = done.name in functions.ALONG or done.name in functions.BATCHED
    if len(done.data) == 1 and acts_along:
        return _along(done, of)
    if done.name in functions.OF_MATRICES:
        return _of_matrices(done, of)
    if functions.is_fill(done.name) and done.args and isinstance(done.args[0], Tensor):
        tensors = tensors_in(done[2:4])
        if len(tensors) == 1 and tensors[0].numel():  # no more than its shape matters
            return [None] * len(done.outs)
    return None


def _of_matrices(done: Performed, of: Where) -> list[Placement] | None:
    """Leave samples where they are, if that is in front of the matrices."""
    placements, dims = [of(x) for x in done.data], {x.dim() for x in done.data}
    first, shape = placements[0], done.data[0].shape
    if not isinstance(first, Layout) or len(dims) > 1 or first.axis > len(shape) - 3:
        return None
    lead = shape[: first.axis + 1]
    if any(p != first for p in placements[1:]):
        return None
    outs = [x for x in done.outs if x.numel()]  # like residuals that there are not
    if any(x.shape[: len(lead)] != lead for x in (*outs, *done.data)):
        return None
    return [
        first if x.numel() else simplify(x.new_empty(x.shape).long(), 1)
        for x in done.outs
    ]


def _along(done: Performed, of: Where) -> list[Placement] | None:
    """Leave samples where they are, if none of the axes acted on separates them."""
    (x,), axes = done.data, _axes(done)
    placement = of(x)
    if isinstance(placement, Layout):
        apart = placement.axis in axes
    else:
        shape = placement.shape if isinstance(placement, Tensor) else ()
        apart = len(shape) != x.dim() or any(shape[d] != 1 for d in axes)
    if apart or not axes:
        return None
    others = [d for d in range(x.dim()) if d not in axes]
    rest = [x.shape[d] for d in others]
    found: list[Placement] = []
    for out in done.outs:
        if out.dim() == x.dim() and [out.shape[d] for d in others] == rest:
            found.append(placement)
        elif list(out.shape) != rest:
            return None
        elif isinstance(placement, Layout):
            found.append(Layout(others.index(placement.axis), placement.inner))
        else:
            found.append(placement.squeeze(tuple(axes)))
    return found


def _reduces(done: Performed) -> bool:
    """Tell whether all results have fewer entries than the operand with samples."""
    return all(out.numel() < done.data[0].numel() for out in done.outs)


def _axes(done: Performed) -> set[int]:
    """Tell along which axes an operation acts; none if that is not known."""
    (x,), args = done.data, done.args
    if not args or args[0] is not x or x.layout is not torch.strided or not x.dim():
        return set()
    if done.name in functions.BATCHED:
        trains = args[5] if len(args) > 5 else done.kwargs.get("training")
        if done.name == "batch_norm" and trains:
            return set()
        fits = functions.BATCHED[done.name] in (0, x.dim())
        return set(range(1, x.dim())) if fits else set()
    number, name = functions.ALONG[done.name]
    axes = args[number] if len(args) > number else done.kwargs.get(name)
    last = x.dim() - 1
    if name == "weight":
        return {last}
    if name == "normalized_shape":
        return set(range(last + 1 - len(axes), last + 1)) if axes else set()
    axes = [axes] if type(axes) is int else axes
    if not isinstance(axes, (tuple, list)) or not all(type(d) is int for d in axes):
        return set()
    return {d % x.dim() for d in axes}


def rule(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Tell where samples are in results, from placements and what numbers say.

    Args:
        done: The operation.
        trial: The same, with the sample numbers of its operands.
        of: Tells where the samples of a tensor are.
        n: Number N of samples.

    Returns:
        A placement for each result; ``None`` if there is no rule.
    """
    told = (find(done, trial, of, n) for find in _RULES)
    return next((placements for placements in told if placements is not None), None)


def _where_picked(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    found = _picked(done, trial, of, n)
    return None if found is None else [found]


def _where_reduced(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Let what is nobody's be added to what is known."""
    if len(done.data) > 1 or done.name not in functions.ALONG or not _reduces(done):
        return None
    along, own = _axes(done), trial.numbers_of(done.data[0])
    if not along or own is None:
        return None
    known = only_known(own, along)
    kept = _along(done, lambda _: known)
    if kept is None:
        return None
    return [simplify(i, n) if isinstance(i, Tensor) else i for i in kept]


def _where_found(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Tell whose each place is at which something is not zero."""
    name, flat, numbers = done.name, trial.flat, trial.numbers
    if not (name in ("nonzero", "argwhere") or name == "where" and len(flat) == 1):
        return None
    hits = None if numbers[0] is None else numbers[0][flat[0] != 0]
    shape = done.outs[0].shape
    if hits is None or len(done.data) > 1 or hits.shape != shape[:1]:
        return None
    hits = hits if len(shape) == 1 else hits[:, None]
    return [simplify(hits, n)] * len(done.outs)


def _where_asked(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Tell where samples meet, though no number shows it."""
    name, data, options = done.name, done.data, done.kwargs
    if name in ("any", "all") and len(data) == 1 and n > 1:
        axes = _axes(done) or range(data[0].dim())
        if any(spans(of(data[0]), data[0].shape, d - data[0].dim()) for d in axes):
            return [Mixed(trial.describe())]
    if name in ("unique", "unique_consecutive"):
        if options.get("return_inverse") and options.get("dim") is None:
            met = Mixed(trial.describe())  # but where each entry has gone is its own
            return [met, of(data[0]), *[met] * (len(done.outs) - 2)]
    return None


def _where_chosen(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Pick samples' numbers in place of what is picked."""
    name, numbers = done.name, trial.numbers
    if name in ("as_strided", "as_strided_copy"):
        view = torch.as_strided(*done.args, **done.kwargs)
        return [in_storage(trial.flat[0], numbers[0], view, n)]
    if name not in functions.PICKING or numbers[0] is None:
        return None
    whole, ids = numbers[0], done.args[1] if len(done.args) > 1 else None
    if name == "__getitem__" and isinstance(ids, Tensor):
        # slices are picked: of each, the number of one entry is enough
        whole = compact(whole, 1 if ids.dtype in picked.INDEXES else ids.dim())
        chosen = trial.call([whole, ids]).expand(done.outs[0].shape)
    else:
        chosen = trial.call([whole.contiguous(), *trial.flat[1:]])
    for own in numbers[1:]:  # of a sample that picks what is another one's
        if own is not None and own.shape == chosen.shape and conflict(own, chosen):
            return [Mixed(trial.describe())]
    return [simplify(chosen, n)]


def _where_combined(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Let entries be where those of operands are."""
    data, outs = done.data, done.outs
    if done.name not in functions.POINTWISE or len(outs) > 1:
        return None
    agreed: Placement = combined(data, outs[0], of, n)
    floats = list(filter(is_inexact, data))
    if agreed is None and combined(floats, outs[0], of, n) is not None:
        agreed = Mixed(trial.describe())  # by a mask's values
    return None if agreed is None else [agreed]


def _where_integers_are(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Let what one sample's integers alone make be that sample's."""
    if any(map(is_inexact, done.data)):
        return None
    marked = [compact(i).flatten() for i in trial.numbers if i is not None]
    alone = len(marked) == sum(
        isinstance(x, Tensor) for x in trial.flat
    )  # no constants
    alone = alone or done.name in functions.PICKING
    if marked and alone and done.states is None:
        owners = torch.cat(marked).unique()
        if len(owners) == 1 and int(owners) >= 0:
            return [simplify(owners[0].expand(x.shape), n) for x in done.outs]
    if done.name.rpartition("::")[2] in functions.UNCHECKED:
        return [Mixed(f"{trial.describe()} (not run again)", False)] * len(done.outs)
    return None


def _where_moved(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    told = (find(done, trial, n) for names, find in _MOVED if done.name in names)
    return next((placements for placements in told if placements is not None), None)


def beside_samples(
    done: Performed, found: list[Placement], of: Where, n: int
) -> list[Placement]:
    """Let constants that are put beside all samples be of those in whose rows they are.

    Not where samples have decided what lies where: a row may be another one's then.

    Args:
        done: The operation.
        found: Where samples are in its results.
        of: Tells where samples are in an operand.
        n: Number N of samples.

    Returns:
        The same, with layouts for results that have constants inside.
    """
    if done.name not in functions.LAYING:
        return found
    pairs = [(x, of(x)) for x in tensors_in(done[2:4])]
    pairs = [(x, p) for x, p in pairs if p is not None]
    whole = done.name in functions.SEQUENCES  # that samples enter as a whole
    if not all(is_inexact(x) and (whole or isinstance(p, Layout)) for x, p in pairs):
        return found
    filled: list[Placement] = []
    for p in found:
        q = simplify(p, n, fills=True) if isinstance(p, Tensor) else p
        filled.append(q if isinstance(q, Layout) else p)
    return filled


def _picked(done: Performed, trial: Trial, of: Where, n: int) -> Placement:
    """Tell where samples are in what their numbers have picked."""
    _, name, args, kwargs, outs, *_ = done
    if name in ("embedding", "__getitem__") and len(args) > 1:
        table, ids = args[:2]
        if isinstance(ids, Tensor) and ids.is_floating_point():
            table, ids = ids, table  # as functions of torch.nn.functional have it
        return picked.looked_up(table, ids, outs[0], of, n)
    if name == "embedding_bag":
        return picked.bags(of, n, outs[0], *args, **kwargs)
    if name in ("index_select", "gather", "take_along_dim"):
        return picked.taken(done, of, n)
    if name == "one_hot" and len(done.data) == 1:
        placement = of(done.data[0])
        return placement[..., None] if isinstance(placement, Tensor) else placement
    if name.startswith("scatter"):
        return picked.scattered(done, trial, n)
    if name in ("__setitem__", "index_put", "index_put_"):
        return picked.put(done, trial, n)
    return None


def _rearranged(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Do with sample numbers what is done with the entries."""
    flat, numbers = trial.flat, list(trial.numbers)
    joins = done.name in functions.JOINING
    if any(isinstance(x, torch.dtype) for x in flat):
        return None  # the same bits, read as other numbers
    if done.name == "repeat_interleave" and not is_inexact(flat[0]):
        return None  # it may tell how often
    if not joins:  # sizes may be numbers of samples
        sizes = [_is_size(x) for x in flat]
        numbers = [None if size else i for size, i in zip(sizes, numbers)]
        if any(sizes) and all(i is None for i in numbers):
            return [None] * len(done.outs)
        if numbers[0] is None or any(i is not None for i in numbers[1:]):
            return None
    new: list[Any] = []
    for x, own in zip(flat, numbers):
        if joins and isinstance(x, Tensor) and own is None:
            own = nobodys(x.shape, x.device)
        new.append(x if own is None else own)
    if done.name in ("view", "view_as"):
        new[0] = new[0].contiguous()
    found = tensors_in(trial.call(new))
    if done.name == "_pack_padded_sequence":
        return [simplify(found[0], n, fills=True), None]
    return [simplify(x, n, fills=True) for x in found]


def _is_size(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.dim() and x.dtype in picked.INDEXES


def _padded(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Do the same with sample numbers, beside which there are constants."""
    own, names = trial.numbers[0], ("input", "pad", "mode")
    _, size, mode = functions.named(names, done.args, done.kwargs)
    if own is None or mode not in (None, "constant"):
        return None
    return [simplify(done.func(own, size, value=-1), n)]


def _unpacked(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Do with the sample numbers of a packed sequence what is done with its entries."""
    data, sizes, batch_first, _, *rest = done.args
    own = trial.numbers[0]
    if own is None or any(i is not None for i in trial.numbers[1:]):
        return None
    padded, _ = done.func(own, sizes, batch_first, -1, *rest)
    return [simplify(padded, n), None]


def _recurrent(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Follow sequences in a packed one, which lie at the same place in each step."""
    sizes, own = done.args[1], trial.numbers[0]
    if own is None or not isinstance(sizes, Tensor) or sizes.dim() != 1:
        return None
    first = of_packed(PackedSequence(done.args[0], sizes), own, n)
    if first is None or bool((first < 0).any()):
        return None
    for state in trial.numbers[1:]:
        if state is not None and conflict(state, first[:, None]):
            return None
    placements = [own[:, :1], *[first[None, :, None]] * (len(done.outs) - 1)]
    return [simplify(p.expand(x.shape), n) for p, x in zip(placements, done.outs)]


def _in_cell(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Follow rows of a recurrent layer's cell, where input and states have the same."""
    rows: Tensor | None = None
    operands = 3 if done.name == "lstm_cell" else 2
    if any(i is not None for i in trial.numbers[operands:]):
        return None  # weights that depend on samples
    for own in trial.numbers[:operands]:
        if own is None:
            continue
        if own.dim() != 2 or bool((own != own[:, :1]).any()):
            return None
        first = own[:, :1]
        if rows is not None and conflict(rows, first):
            return None
        rows = first if rows is None else rows.where(rows >= 0, first)
    if rows is None:
        return None
    return [simplify(rows.expand(x.shape), n) for x in done.outs]


def _made_sparse(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Follow what a sparse tensor is made of to where its numbers say."""
    names = "indices", "values", "size"
    indices, values, size = functions.named(names, done.args, done.kwargs)
    own, of_values = trial.numbers_of(indices), trial.numbers_of(values)
    if not (isinstance(indices, Tensor) and isinstance(values, Tensor)) or size is None:
        return None
    if values.dim() > 1 or done.outs[0].numel() > DENSE_ELEMENTS:
        return None
    numbers = [] if own is None else list(own)
    numbers += [] if of_values is None else [of_values]
    entries = torch.stack(torch.broadcast_tensors(*numbers)).amax(0)
    if any(conflict(entries, other) for other in numbers):
        return None
    found = torch.full(tuple(size), -1, device=indices.device)
    places = tuple(indices)
    found[places] = entries
    if bool((found[places] != entries).any()):
        return None  # of several samples' entries at one place
    return [simplify(found, n)]


def _where_matched(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Follow the matrices of two batches of them, each with its own counterpart."""
    several = len(done.data) > 1 and done.name in functions.MATCHING
    if not several or may_leave_rows(trial):
        return None
    (out, *_), placements = done.outs, [of(x) for x in done.data]
    for x, placement in zip(done.data, placements):
        if isinstance(placement, Layout):
            within = placement.axis >= x.dim() - 2
        else:
            within = placement.dim() != x.dim() or placement.shape[-2:] != (1, 1)
        if within or x.shape[:-2] != out.shape[:-2]:
            return None
    found = combined(done.data, out, of, n)
    return None if found is None else [found] * len(done.outs)


def _where_attended(done: Performed, trial: Trial, of: Where, n: int) -> Found:
    """Follow rows of several samples that a mask lets attend to their own alone."""
    if done.name != functions.ATTENTION:
        return None
    names = "query", "key", "value", "attn_mask"
    *rows, mask = functions.named(names, done.args, done.kwargs)
    found = [trial.numbers_of(x) for x in rows]
    if mask is None or trial.numbers_of(mask) is not None:
        return None
    if any(i is None or bool((i != i[..., :1]).any()) for i in found):
        return None
    q, k, v = (i[..., 0] for i in found if i is not None)
    if q.shape[:-1] != k.shape[:-1] or bool((q == q[..., :1]).all()):
        return None  # each sequence is one sample's
    if mask.dtype != torch.bool:
        mask = mask >= torch.finfo(done.outs[0].dtype).min / 2
    meet = mask & (q.unsqueeze(-1) != k.unsqueeze(-2))
    if k.shape != v.shape or bool((k != v).any()) or bool(meet.any()):
        return None
    return [simplify(q.unsqueeze(-1).expand(done.outs[0].shape), n)]


def _written(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Follow what was written to places that constants say."""
    placement = picked.written(done, trial, n)
    return None if placement is None else [placement]


def _sampled(done: Performed, trial: Trial, n: int) -> list[Placement] | None:
    """Let what a grid takes from constant images be of the grid's samples."""
    found = [(x, i) for x, i in zip(trial.flat, trial.numbers) if i is not None]
    out = done.outs[0]
    if len(found) != 1 or found[0][0] is trial.flat[0] or out.dim() < 4:
        return None
    places = found[0][1]  # [N, *, coordinates]
    own = places[..., 0]
    if own.numel() != out.numel() // max(1, out.shape[1]):
        return None
    if bool((places != own.unsqueeze(-1)).any()):
        return None
    return [simplify(own.unsqueeze(1).expand(out.shape), n)]


# Rules for operations
_MOVED: Sequence[tuple[Container[str], Callable]] = (
    (functions.REARRANGING, _rearranged),
    (("pad",), _padded),
    (("_pad_packed_sequence",), _unpacked),
    (("grid_sample", "grid_sampler"), _sampled),
    (functions.RECURRENT, _recurrent),
    (functions.CELLS, _in_cell),
    (("sparse_coo_tensor",), _made_sparse),
    (functions.WRITING, _written),
    (functions.PRODUCTS | functions.GROUPED, contracted),
    (functions.PRODUCTS, multiplied),
)

# Rules, in the order in which they are asked
_RULES: Sequence[Callable[[Performed, Trial, Where, int], Found]] = (
    *(_where_picked, _where_reduced, _where_found, _where_asked, _where_chosen),
    *(_where_combined, _where_integers_are, _where_attended, _where_matched),
    _where_moved,
)
