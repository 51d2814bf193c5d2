"""Columns that are pulled back: where they start, at a loss or at a model's output.

How they are stored where they end; and gradients of losses alone, where that is not
what the backward pass computes.
"""

from __future__ import annotations

from math import prod
from typing import Any, Iterator, Optional

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack.core.fast.memory import huge_empty, may_write
from backpack.core.fast.whole import whole
from backpack.core.layout import FIRST, Layout, numbers_of_rows, once, ranks
from backpack.core.table import find_loss
from backpack.engine.backward.coverage import leads_past_losses
from backpack.engine.backward.inspection import Inspection
from backpack.engine.backward.turn import Turn, loss_scale
from backpack.engine.nodes.graph import (
    Origin,
    entries_of,
    is_leaf,
    targets_below,
    will_run,
)
from backpack.engine.nodes.record import Call
from backpack.engine.nodes.vjp import pull
from backpack.utils.hooks import message, without_hooks
from backpack.utils.parallel import gathered
from backpack.utils.state import state
from backpack.utils.types import Grads, kind, tensors_in

NO_TENSOR = (
    "{ext} differentiates a loss with respect to its first argument, and that of "
    "{module} is no tensor but a {kind}. Let it take a tensor, as of outputs that are "
    "concatenated, or add up the losses of one output each."
)
OTHER_FEATURES = (
    "{ext}: samples have different numbers of features in the output of {module}, or "
    "some of its entries belong to none. Return a tensor in which each sample has as "
    "many entries."
)


Cotangents = list[Optional[Tensor]]


def check_first_argument(loss: Call, ext: Any) -> None:
    """Refuse a loss whose prediction is another argument than the first, or several.

    Args:
        loss: The loss's call, whose first argument is not part of a graph.
        ext: The extension that is running.

    Raises:
        NotImplementedError: If another argument is, or if it contains what is.
    """
    first = next(iter(loss.arguments), None)
    has_graph = any(x.requires_grad for x in tensors_in(first))
    if has_graph and not isinstance(first, Tensor):
        text = {"ext": type(ext).__name__, "kind": type(first).__name__}
        raise NotImplementedError(message(NO_TENSOR, module=loss.module, **text))
    others = [i for i, e in enumerate(loss.input_edges) if e is not None]
    if others:
        raise NotImplementedError(
            f"{type(ext).__name__}: the first argument of {loss.module}, which is the "
            f"prediction, has no graph, but argument {others[0]} has. Pass the "
            "prediction first, and the target after it."
        )


def find_gateway(inspection: Inspection, edge: GradientEdge) -> Node | None:
    """Find the node that hands the gradient of a loss on to the model.

    Args:
        inspection: What the graph looks like.
        edge: Where the loss's input sits in it.

    Returns:
        The node; ``None`` if there are several such, other ways to a leaf, or losses
        elsewhere.
    """
    nodes = list(dict.fromkeys(root.node for root in inspection.roots))
    last: list[Node] = []
    for node in nodes:  # which grow meanwhile
        for parent, number in node.next_functions:
            if parent is edge.node and number == edge.output_nr:
                last.append(node)
            elif parent is edge.node or is_leaf(parent):
                return None
            elif parent is not None and parent not in nodes:
                nodes.append(parent)
    inside = set(inspection.losses.values()) <= set(nodes)
    return last[0] if len(last) == 1 and inside else None


def columns_of_loss(source: Any, turn: Turn, size: int) -> Iterator[Tensor]:
    """Compute columns at a loss input, such that samples have a row each.

    Where a sample has several rows, like the tokens of a sentence, an exact factor has
    columns for each of them; the Hessian is block-diagonal. A sampled factor draws a
    target for each row, which is uncorrelated with the others'. They have the scale
    that the loss has.

    Args:
        source: Where the columns come from.
        turn: The loss's turn.
        size: Number of columns at a time.

    Yields:
        Columns ``[V, *in]`` with V at most ``size``.
    """
    loss, derivatives = turn.call, find_loss(turn.module).derivatives
    scale = loss_scale(turn.module, turn.g_out[0])
    chunks = (x * scale for x in source.chunks(derivatives, turn.module, size))
    placement, x = loss.placement, loss.inputs[0]
    alone = derivatives.compared_axis(x) == -x.dim()  # one term, without batch axis
    rows = len(x) if x.dim() else 1
    plain = placement is None or alone or placement == FIRST and rows == loss.n
    if plain or not source.is_exact or rows < 2:
        yield from chunks
        return
    along_rows = isinstance(placement, Layout) and placement.axis == 0
    if isinstance(placement, torch.Tensor):
        along_rows = placement.numel() == placement.shape[0]
    if not along_rows:
        number, most = torch.arange(rows, device=x.device), rows
    elif isinstance(placement, Layout):
        number, most = ranks(placement, rows, loss.n, x.device), rows // loss.n
    else:
        number, most = once(
            placement, "ranks", lambda: _ranks(placement, rows, loss.n, x.device)
        )
    number = number.view(-1, *[1] * (x.dim() - 1))
    for chunk in chunks:
        for rank in range(most):
            yield chunk * (number == rank)


def _ranks(placement: Tensor, *sizes: Any) -> tuple[Tensor, int]:
    """Number the rows of each sample, and count those of the largest.

    Those of nobody's have numbers of their own: they may reach what a sample's reach.
    """
    number, own = ranks(placement, *sizes), placement.flatten() >= 0
    most = int(number.where(own, -1).max()) + 1
    number = number.where(own, number + most)
    return number, int(number.max()) + 1


def identity_columns(origin: Origin, name: str, size: int) -> Iterator[Tensor]:
    """Make a column for each feature of an output: the same one of all samples.

    Args:
        origin: The output.
        name: Name of the extension, for messages.
        size: Number of columns at a time.

    Yields:
        Columns ``[V, *out]`` with V at most ``size``, in the order in which a
        sample's features are in the output.

    Raises:
        NotImplementedError: If samples have different numbers of features.
    """
    (call, edge, placement, shape), n = origin, origin.call.n
    metadata = edge.node._input_metadata[edge.output_nr]
    device = metadata.device
    numbers = numbers_of_rows(placement, shape, n, device).flatten()
    number, rest = divmod(prod(shape), n) if n else (prod(filter(None, shape)), 0)
    if isinstance(placement, Tensor):

        def count() -> list[int]:
            return torch.bincount(numbers + 1, minlength=n + 1).tolist()

        none, *counts = once(placement, ("features", tuple(shape)), count)
        rest = none or len({*counts}) > 1
    if rest:
        raise NotImplementedError(message(OTHER_FEATURES, ext=name, module=call.module))
    features = torch.argsort(numbers, stable=True).view(n, number).T
    for some in features.split(size):
        columns = torch.zeros(len(some), len(numbers), **kind(metadata))
        yield columns.scatter_(1, some, 1.0).view(len(some), *metadata.shape)


class GradientsOfLosses:
    """Gradients of the extended losses alone, where other terms have gradients, too.

    Residuals are made of them, or they would belong to no loss's curvature.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._are_mixed: bool | None = None
        self._found: dict[tuple[Call, int], Tensor] = {}

    def meet(self, turn: Turn, inspection: Inspection) -> None:
        """Differentiate a loss with respect to the outputs of calls, if necessary.

        Args:
            turn: The loss's turn.
            inspection: What the graph looks like.
        """
        if self._are_mixed is None:
            self._are_mixed = leads_past_losses(inspection)
        if not self._are_mixed:
            return
        loss, node = turn.call, torch._C._current_autograd_node()
        number = next(e.output_nr for e in entries_of(node) if e.owner is loss)
        calls = [t for t in targets_below([node]) if not t.entry.owner.is_use]
        below = [t for t in calls if t.entry.owner is not loss and will_run(t.node)]
        edges = [GradientEdge(t.node, t.entry.output_nr) for t in below]
        tensors = [x for t in below for x in t.entry.owner.tensors()]
        with gathered(tensors), without_hooks(tensors), state().pull():
            column = turn.g_out[0].reshape(node._input_metadata[number].shape)
            pulled = pull(GradientEdge(node, number), edges, column) if edges else ()
        for (entry, _), part in zip(below, pulled):
            if part is not None:
                key, part = (entry.owner, entry.index), entry.in_shape(part)
                before = self._found.get(key)
                self._found[key] = part if before is None else before + part

    def at(self, call: Call, ext: Any, g_out: Grads) -> Grads:
        """Choose the gradients that an extension finds at a call's outputs.

        Args:
            call: The call.
            ext: The extension.
            g_out: Gradients of all that is differentiated.

        Returns:
            Those of extended losses alone, for an extension that makes residuals.
        """
        if call.is_loss or not (self._are_mixed and ext.walks_modules):
            return g_out
        return tuple(self._found.get((call, i)) for i in range(len(g_out)))


class Stack:
    """Columns at one output, as they come.

    Each is copied while it is in the processor's caches, and its memory is free for the
    next one. Those that autograd found no path for are zero.
    """

    def __init__(self, size: int):
        """Start with none.

        Args:
            size: How many will come.
        """
        self._size = size
        self._parts: list[Tensor | None] = []
        self._out: Tensor | None = None

    def put(self, column: Tensor | None) -> None:
        """Put the next column.

        Args:
            column: The column ``[*]``; ``None`` where there is no path.
        """
        if column is not None and self._size > 1 and may_write():
            if self._out is None:
                shape = (self._size, *column.shape)
                self._out = huge_empty(shape, column.dtype, column.device)
            column = self._out[len(self._parts)].copy_(column)
        self._parts.append(column)

    def columns(self) -> Tensor | None:
        """Return all columns.

        Returns:
            Columns ``[V, *]``, ``None`` if there is no path at all.
        """
        known = next((x for x in self._parts if x is not None), None)
        if known is None:
            return None
        if self._size == 1:
            return known.unsqueeze(0)
        if self._out is None:
            zero = torch.zeros_like(known)
            return _stacked([zero if x is None else x for x in self._parts])
        for row, part in zip(self._out, self._parts):
            if part is None:
                row.zero_()
        return self._out


@whole
def _stacked(parts: list[Tensor]) -> Tensor:
    """Put columns behind each other, in memory that is cheap to touch."""
    if not may_write():
        return torch.stack(parts)
    first = parts[0]
    out = huge_empty((len(parts), *first.shape), first.dtype, first.device)
    for row, part in zip(out, parts):
        row.copy_(part)
    return out
