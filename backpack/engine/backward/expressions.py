"""Expressions of parameters: what products become behind what was done to a parameter.

Views, permutations, repetitions, rows that are picked, and what maps each entry keep
the form of products. For all else, a vector-Jacobian product leads to the parameters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any, Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack.core.kinds import Broadcast
from backpack.core.per_sample.apart import Apart
from backpack.core.per_sample.base import Dense, PerSample, Summed
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.pieces import Pieces, Place
from backpack.core.per_sample.rows import Rows
from backpack.core.per_sample.scaled import Scaled
from backpack.engine.nodes import graph
from backpack.engine.nodes.saved import HIDDEN, SAVED, fetch
from backpack.engine.nodes.user_hooks import SEEN
from backpack.engine.nodes.vjp import batched_vjp, is_users
from backpack.engine.samples import views
from backpack.engine.samples.gaps import is_data
from backpack.engine.samples.probes import leads_to, signed
from backpack.engine.samples.repeated import compute_only
from backpack.utils.hooks import without_hooks
from backpack.utils.state import may_look, state
from backpack.utils.types import kind

# Products that keep their form behind views of a parameter
_FORMS = (Dense, Apart, Outer, Pieces, Rows, Scaled, Summed)
# How many numbers tell whether a function acts on each entry, in how many columns
_SIZES, _COLUMNS = 2**8, 32
# What takes a piece of a tensor
_TAKING = ("Select", "Slice", "Split", "SplitWithSizes", "Unbind")
_PERMUTES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")


def unseen(nodes: Sequence[Node]) -> AbstractContextManager[None]:
    """Keep hooks of parameters, and of what is computed from them, from running.

    They are for the gradient of the batch.

    Args:
        nodes: Nodes through which something is pulled back.

    Returns:
        Context in which they do not, nor does ``retain_grad`` collect anything.
    """
    leaves = [node.variable for node in nodes if graph.is_leaf(node)]
    seen = [x() for node in nodes for x in node.metadata.get(SEEN, ())]
    return without_hooks([*leaves, *[x for x in seen if x is not None]])


def nodes_behind(source: GradientEdge) -> list[Node]:
    """Find the nodes that a constant of a use is computed by.

    A node may take more than this result of it depends on: the gradient of a
    convolution with respect to its inputs does not depend on these, but the node has
    that with respect to weights, too. Nor does an overwritten row depend on others.

    Args:
        source: Where it sits in the graph.

    Returns:
        The nodes to which its gradient goes.
    """
    nodes = list(graph.walk([source.node]))
    if not any(map(_is_of_samples, nodes)):
        return nodes
    near = graph.walk([source.node], _is_of_samples)
    taken = [x for y in near if not _is_of_samples(y) for x in graph.parents(y)]
    ends = [place for place in taken if _is_of_samples(place.node)]
    led = {place[:2] for place in leads_to(source, ends)}
    seen = {source[:2], *(place[:2] for place in ends)} - led
    queue = [source]
    for edge in queue:  # which grows meanwhile
        places = graph.parents(edge.node)
        if graph.is_own(edge.node) and graph.shape_at(edge).numel():
            places = leads_to(edge, places)
        queue += [place for place in places if place[:2] not in seen]
        seen.update(place[:2] for place in places)
    return list(dict.fromkeys(edge.node for edge in queue))


def _is_of_samples(node: Node) -> bool:
    """Tell whether a node stands for data, or for what a use has computed."""
    return graph.has_use(node) or is_data(node)


def behind_views(
    edge: GradientEdge, shape: torch.Size, product: PerSample, params: Sequence[Tensor]
) -> tuple[Tensor | None, GradientEdge | None, PerSample]:
    """Go through views of a parameter, and what is done to each entry of it.

    Both keep the products' form. What a piece was taken of is the end, for now: others
    may have been taken of it.

    Args:
        edge: Where an expression sits in the graph.
        shape: Its shape.
        product: Products with its Jacobian.
        params: The parameters behind it.

    Returns:
        The parameter, if it is all that is left; the place of the expression, if not;
        and products with its Jacobian.
    """
    ends = {param.grad_fn: param for param in params if param.grad_fn is not None}
    while type(product) in _FORMS and edge.node not in ends:
        node = edge.node
        if graph.is_leaf(node):
            return node.variable, None, product
        name, parents = type(node).__name__, node.next_functions
        parent, before = None, shape
        if len(parents) == 1 and parents[0][0] is not None:
            parent = GradientEdge(*parents[0])
            before = _kind_at(parents[0])[0]
        if parent and name in graph.SAME_ORDER and before.numel() == shape.numel():
            if (viewed := product.reshaped(before)) is None:
                break
            product = viewed
        elif type(product) is Rows:
            break
        elif derivative := _entry_by_entry(edge, ends):
            parent, slope = derivative
            if isinstance(product, Dense):
                product = product.scaled(slope)
            else:
                product = Scaled(product, slope)
        elif parent and (found := _undone(node, shape, product, before)):
            product = found
        elif parent and (found := _piece(edge, product, before)):
            edge, product = parent, found
            break
        else:
            break
        edge, shape = parent, before
    if graph.is_leaf(edge.node):
        return edge.node.variable, None, product
    if edge.node in ends:
        return ends[edge.node], None, product
    return None, edge, product


def _undone(
    node: Node, shape: torch.Size, product: Any, before: torch.Size
) -> PerSample | None:
    """Describe products with what was repeated or permuted, or a table.

    Args:
        node: What may have done it.
        shape: Shape of the result.
        product: Products with its Jacobian.
        before: Shape of what it was.

    Returns:
        Products with the Jacobian of that; ``None`` if nothing of it was done.
    """
    if isinstance(product, Dense):
        found = _unrepeated(node, product, before)
        return found or _rows_of_table(node, product, before)
    if type(node).__name__ in _PERMUTES and product.shape == shape:
        order = _order_of(node, len(shape))
        with suppress(ValueError):
            return product.permuted([order.index(d) for d in range(len(order))])
    return None


def taken_from(edge: GradientEdge) -> GradientEdge:
    """Go from pieces to what they were taken of.

    Args:
        edge: Where a piece sits in the graph, or anything else.

    Returns:
        Where that does, of which they are pieces along the first axis.
    """
    while _takes(edge.node):
        edge = GradientEdge(*edge.node.next_functions[0])
    return edge


def _takes(node: Any) -> bool:
    name = type(node).__name__.removesuffix("Backward0")
    return name in _TAKING and not node._saved_dim


def _piece(edge: GradientEdge, product: PerSample, shape: torch.Size) -> Pieces | None:
    """Describe products with a piece along the first axis, of stacked weights.

    Args:
        edge: Where it sits in the graph.
        product: Products with its Jacobian.
        shape: Shape of what it is a piece of.

    Returns:
        Products with the Jacobian of the whole, ``None`` if that was something else.
    """
    node, number, *_ = edge
    name, size = type(node).__name__.removesuffix("Backward0"), shape[:1].numel()
    if not _takes(node):
        return None
    if name == "Slice":
        start, _, step = _slice(node).indices(size)
        if step != 1:
            return None
    elif name == "Select":
        start = signed(node._saved_index) % size
    elif name == "Unbind":
        start = number
    else:
        start = sum(x.shape[0] for x in node._input_metadata[:number])
    alone = name in ("Select", "Unbind")
    stop = start + (1 if alone else product.shape[0])
    return Pieces(shape, {Place(start, stop, alone): [product]})


def _entry_by_entry(
    edge: GradientEdge, ends: Collection[Node]
) -> tuple[GradientEdge, Tensor] | None:
    """Differentiate what is done to each entry of a single tensor.

    Args:
        edge: Where the result sits in the graph.
        ends: Nodes not to go through.

    Returns:
        Where the tensor does, and the derivative of each entry; ``None`` if the result
        is no such thing.
    """
    start = edge.node, edge.output_nr
    what, places, begins = _kind_at(start), [start], []
    for place in places:  # which become more meanwhile
        node = place[0]
        parents = [x for x in node.next_functions if x[0] is not None]
        if (
            node in ends
            or not (graph.is_pointwise(node) or is_users(node))
            or {*map(_kind_at, parents)} != {what}
        ):
            begins.append(place)
        else:
            places += [x for x in dict.fromkeys(parents) if x not in places]
    if len(begins) > 1 or start in begins or what[1].is_complex:
        return None
    nodes = [node for node, _ in places]
    for node in nodes:
        fetch(node.metadata.get(SAVED, ()))
    begin = GradientEdge(*begins[0])
    ones = torch.ones(1, 1, *what[0], **kind(start[0]._input_metadata[start[1]]))
    own = [node for node in nodes if is_users(node)]
    if own and not may_look(ones, waits=True):
        return None
    with compute_only(own), unseen(nodes):
        (slope,) = batched_vjp([edge], [begin], [ones])
        if slope is None or own and not _is_diagonal(edge, begin, slope):
            return None
    return begin, slope[0, 0]


def _is_diagonal(edge: GradientEdge, begin: GradientEdge, slope: Tensor) -> bool:
    """Tell whether what a user has written multiplies each entry by its slope."""
    columns = _others(slope)
    with suppress(Exception):  # a user's, who does not expect such numbers
        (found,) = batched_vjp([edge], [begin], [columns])
        precision = 20 * torch.finfo(slope.dtype).eps
        return found is not None and torch.allclose(
            found, slope * columns, rtol=precision, atol=0
        )
    return False


def _others(x: Tensor) -> Tensor:
    """Make numbers of all signs and sizes, with which no matrix seems diagonal.

    A function may leave out what is small, or change all where much of it is large.

    Args:
        x: A column, ``[1, 1, *]``.

    Returns:
        Columns ``[V, 1, *]``, of which the second half are smaller as a whole.
    """
    count = min(_COLUMNS, 1 + _SIZES // max(1, x.numel()))
    least, range_, less = (-8, 13, 5) if x.dtype == torch.float16 else (-40, 60, 30)
    places = torch.arange(count * x.numel(), dtype=torch.float32, device=x.device)
    mixed = places.add_(1).mul_(12.9898).sin_().mul_(437.585453).frac_()
    sizes = mixed.abs().mul_(range_).add_(least).exp2_()
    made = sizes.mul_(mixed.sign_()).view(count, *x.shape[1:])
    return torch.cat([made, made * 2.0**-less]).to(x.dtype)


def _kind_at(place: tuple[Node, int]) -> tuple[torch.Size, torch.dtype]:
    """Tell shape and type of the tensor at a place in the graph."""
    node, number = place
    if graph.is_leaf(node):
        return node.variable.shape, node.variable.dtype
    dtype = node._input_metadata[number].dtype
    return graph.shape_at(GradientEdge(node, number)), dtype


def _unrepeated(node: Node, product: Dense, shape: torch.Size) -> PerSample | None:
    """Describe products with what was repeated along axes of length one.

    Args:
        node: What may have repeated it.
        product: Products with the Jacobian of the result.
        shape: Shape of what it was.

    Returns:
        Products with its Jacobian, ``None`` if nothing was repeated like that.
    """
    if type(node).__name__ not in views.REPEATING:
        return None
    full = (*[1] * (len(product.shape) - len(shape)), *shape)
    if any(size not in (1, whole) for size, whole in zip(full, product.shape)):
        return None  # also repeated side by side
    if isinstance(product, Apart):
        own, where, n = product.own, product.where, product.batch_size
        return Broadcast(None, None).product(None, shape, own, where, n)
    pairs = enumerate(zip(full, product.shape), start=2)
    sums = [axis for axis, (size, whole) in pairs if size != whole]
    products = product.products.sum(sums, keepdim=True) if sums else product.products
    return Dense(products.reshape(*products.shape[:2], *shape), shape)


def _rows_of_table(node: Node, product: Dense, shape: torch.Size) -> Rows | None:
    """Describe products with rows of a table, like positions or stacked weights.

    Args:
        node: What may have picked rows, the same ones for all samples.
        product: Products with the Jacobian of what was picked.
        shape: Shape of the table.

    Returns:
        Products with the table's Jacobian, ``None`` if that was something else.
    """
    pick = _PICKS.get(type(node).__name__)
    if (
        pick is None
        or not shape.numel()
        or product.shape[1 - len(shape) :] != shape[1:]
    ):
        return None
    saved = node.metadata.get(SAVED, ())
    if HIDDEN in saved:
        return None
    fetch(saved)
    with state().pull():  # the pass needs what was asked for as well
        picked = pick(node)
    if picked is None or isinstance(picked, slice) and len(shape) > 2:
        return None  # a piece of stacked weights
    if isinstance(picked, Tensor) and picked.dtype == torch.bool and picked.dim() > 1:
        return None  # of entries
    ids = torch.arange(shape[0], device=product.device)[picked].flatten()
    size = shape[1:].numel()
    if ids.numel() * size != product.shape.numel() or not ids.numel():
        return None
    found = product.rows(ids)
    if found is None:
        return None
    ids, b, valid = found
    padding = getattr(node, "_saved_padding_idx", None)
    if padding is not None:
        counts = (ids != signed(padding)).to(b.dtype)
        valid = counts if valid is None else valid * counts
    return Rows(ids, b, shape, valid)


def _slice(node: Node) -> slice | None:
    ends = node._saved_start, node._saved_end, node._saved_step
    known = [end if end is None else signed(end) for end in ends]
    return None if node._saved_dim else slice(*known)


def _repeated(node: Node) -> Tensor | None:
    times, *others = node._saved_repeats
    size, *rest = node._saved_self_sym_sizes
    if len(others) != len(rest) or any(number != 1 for number in others):
        return None
    return torch.arange(size).repeat(times)


def _index(node: Node) -> Tensor | None:
    index, *others = node._saved_indices
    return None if others else index


def _ids(node: Node) -> Tensor | None:
    return None if node._saved_scale_grad_by_freq else node._saved_indices


_PICKS: dict[str, Callable[[Node], Any]] = {
    "EmbeddingBackward0": _ids,
    "IndexBackward0": _index,
    "IndexSelectBackward0": lambda n: None if n._saved_dim else n._saved_index,
    "RepeatBackward0": _repeated,
    "SliceBackward0": _slice,
}


def _order_of(node: Node, dim: int) -> list[int]:
    """Tell which axes come first, second and so on behind a node that permutes them."""
    order = list(range(dim))
    if hasattr(node, "_saved_dims"):
        return [signed(d) % dim for d in node._saved_dims]
    swapped = [getattr(node, f"_saved_dim{i}", i) for i in (0, 1)]
    i, j = (signed(d) % dim for d in swapped)
    order[i], order[j] = order[j], order[i]
    return order
