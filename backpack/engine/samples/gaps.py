"""Where samples are in a tensor that came from where no operation was watched.

Between modules that are extended one by one, and behind functions of one's own, there
are only nodes of the autograd graph. They are asked: a tensor's derivative with respect
to earlier tensors, whose samples are known, says which entry depends on which sample.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.nn import Parameter

from backpack.core.layout import FIRST, Layout, Mixed, Placement, agree, reshaped
from backpack.core.operations import Operation, find_operation
from backpack.engine.nodes import graph
from backpack.engine.nodes.constants import CONSTANT, Constant, edge_of
from backpack.engine.nodes.functions import BY_STRIDES
from backpack.engine.nodes.uses import Use, is_noted
from backpack.engine.nodes.vjp import is_function
from backpack.engine.samples.marks import MARK, in_key, mark_of
from backpack.engine.samples.probes import Known, Source, probe, takes_any
from backpack.utils.hooks import without_hooks
from backpack.utils.parallel import SINKS, communicates
from backpack.utils.state import out_of_sight
from backpack.utils.types import node_of, tensors_in

IN_PLACE = "in place of a parameter"  # and this, if all the same some may be
KNOWN = "backpack.known"  # where a node keeps what was found of its outputs
ASKED = "backpack.asked"  # behind which of its outputs functions were looked for
# Nodes whose mean and deviation, about which autograd tells nothing, are `[N, G]`
_OF_GROUPS = {"NativeGroupNormBackward0"}
_PASSING = SINKS | {graph.TOGETHER}  # nodes that hand on what comes, one by one
NESTED = Mixed("what has made a nested tensor (pad it instead)", False)
INPUT = Known(None, 0)  # where its samples are, who calls the model says


def _known_at(edge: GradientEdge, x: Tensor | None = None) -> Known | None:
    """Look up what is known of a place in the graph; ``None`` if it is nothing."""
    node, output_nr, *_ = edge
    if x is not None and not x.is_nested:
        shape = x.shape  # of the tensor there: nodes take long to say it
    elif node._input_metadata[output_nr].is_cpp_nested_tensor:
        return Known(NESTED, 1)
    else:
        shape = graph.shape_at(edge)
    if output_nr and type(node).__name__ in _OF_GROUPS:
        known = explain_place(GradientEdge(node, 0))
        first = (
            known and isinstance(known.placement, Layout) and not known.placement.axis
        )
        return known if first else None
    places = [(node, output_nr)]
    # a layer's output may be a view of its result
    if type(node).__name__ in graph.VIEWS:
        places.extend(node.next_functions[:1])
    for place, wanted in places:
        for number, index, owner in () if place is None else graph.entries_of(place):
            placements, own = owner.placements, owner.output_shapes
            if placements is None:
                continue
            if number != wanted:
                continue
            if own[index] == shape:
                return Known(placements[index], owner.n)
            if place is node and own[index].numel() == shape.numel():
                placement = reshaped(placements[index], own[index], shape, owner.n)
                return Known(placement, owner.n)
    return node.metadata.get(KNOWN, {}).get(output_nr)


@out_of_sight
def explain(x: Tensor, enters: bool = False) -> Known | None:
    """Find where the samples of a tensor are.

    Args:
        x: Tensor.
        enters: Whether a model is called with it. Default: ``False``.

    Returns:
        Where they are, ``None`` if it depends on parameters alone, or is no part of a
        graph and nothing is known of it. If a model is called with it, ``INPUT`` for
        what was made of inputs.
    """
    mark, node = mark_of(x), node_of(x)
    if mark and (node is None or mark[1] is not None and not mark[0].is_over):
        known = None if mark[1] is None else Known(mark[1], mark[0].n)
    elif node is None:
        return None
    else:
        edge = edge_of(x)
        known = _known_at(edge, x)
        if known and not is_function(node):
            return known  # with nothing between: the most frequent case
        if enters and _is_made_of_inputs(edge):
            return INPUT
        with without_hooks([x]):
            if enters:
                _lose_behind_rows(edge)
            known = explain_place(edge)
        if known is None:  # the next one in a chain needs not look again
            note_constants(x)
        mark = None
    if known is not None and (mark is None or is_function(node)):
        note_functions(x, known)
    return known


def _is_made_of_inputs(edge: GradientEdge) -> bool:
    """Tell whether a tensor was made in front of a model, of what is no parameter.

    That this requires a gradient says nothing of its samples, nor of the tensor's: it
    may be a perturbation that all samples share, or a table. No extended module was
    called with anything behind the tensor.
    """
    sources, nodes = sources_of([edge])
    leaves = graph.leaf_nodes(nodes)
    given = any(not isinstance(leaf.variable, Parameter) for leaf in leaves)
    return given and all(source.edge.node in leaves for source in sources)


def note_constants(made: Any, in_place: bool = False) -> None:
    """Remember that samples are in nothing that tensors were made of.

    Args:
        made: The tensors.
        in_place: Whether they are no more than taken for such, as they stand in
            parameters' places. Default: ``False``.
    """
    for x in tensors_in(made):
        if (node := node_of(x)) is not None:
            node.metadata.setdefault(CONSTANT, IN_PLACE if in_place else True)


def is_constant(x: Tensor) -> bool:
    """Tell whether :func:`note_constants` has noted a tensor for certain.

    Args:
        x: The tensor.

    Returns:
        Whether it has.
    """
    node = node_of(x)
    return node is not None and node.metadata.get(CONSTANT) is True


def note_functions(x: Tensor, known: Known) -> None:
    """Record functions of one's own as uses of the parameters that they take.

    Args:
        x: What they have computed, where nothing was watched.
        known: Where its samples are.
    """
    last = edge_of(x)
    asked = last.node.metadata.setdefault(ASKED, set())
    if last.output_nr in asked:  # an operand is looked at by each operation
        return
    asked.add(last.output_nr)
    _, nodes = sources_of([last])
    places = [last, *(GradientEdge(*e) for node in nodes for e in node.next_functions)]
    for place in places:
        node, number, *_ = place
        while type(node).__name__ in _PASSING and not is_noted(node, number):
            node, number = node.next_functions[number]
        if not is_function(node) or is_noted(node, number):
            continue
        edge = GradientEdge(node, number)
        own = known if place is last else explain_place(edge)
        if own is not None:
            note_at(edge, own)


def note_at(edge: GradientEdge, known: Known, by_rule: bool = False) -> bool:
    """Record that what sits at a place in the graph is the result of a use.

    Args:
        edge: The place.
        known: Where its samples are.
        by_rule: Whether it is one only if there is a rule for its operation.
            Default: ``False``.

    Returns:
        Whether it is, for its node takes a parameter.
    """
    use = _use_of(edge.node, known)
    if use is None or by_rule and use.operation is None:
        return False
    places = {constant.place for constant in use.constants}
    if isinstance(known.placement, Mixed) and not takes_any(edge, places):
        return False
    use.attach_at(edge, graph.shape_at(edge), known.placement)
    return True


def _use_of(node: Node, known: Known) -> Use | None:
    """Describe a node as a use, once for all its results; `None` if it is none."""
    for entry in graph.entries_of(node):
        if entry.owner.is_use and entry.owner.is_function:
            return entry.owner
    parents = [(i, GradientEdge(*x)) for i, x in enumerate(node.next_functions)]
    keys = [i for i, x in parents if x.node is not None and _is_constant(x)]
    if not keys:
        return None
    constants = [Constant.at(parents[key][1]) for key in keys]
    name = type(node).__name__.replace("Backward", "")
    name = name if is_function(node) else graph.name_of(node).strip("`")
    operation = _operation_at(node, keys[0], known.placement)
    if operation is not None:
        constants[0].key = keys[0]
    use = Use(name, constants, known.n, [], None, operation)
    use.is_function, use.since = True, node._sequence_nr()
    use.until = use.since + 1
    return use


# Operations whose nodes keep their operands, of which derivatives are made
_KEEP: dict[str, tuple[Callable, Sequence[str]]] = {
    "MmBackward0": (torch.mm, ("self", "mat2")),
    "MulBackward0": (torch.mul, ("self", "other")),
}


def _operation_at(node: Node, key: int, placement: Placement) -> Operation | None:
    """Describe a node's operation, if there is a rule for it and its data are at hand.

    Nothing is asked of hooks: a checkpoint would run its part of the model again.
    """
    func, names = _KEEP.get(type(node).__name__, (None, ()))
    if func is None or node._input_metadata[0].dtype.is_complex:
        return None
    name, parent = names[1 - key], GradientEdge(*node.next_functions[key])
    # older versions of torch don't tell
    if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", node) is not None:
        return None
    args = [getattr(node, f"_saved_{name}")] * 2
    args[key] = torch.empty(graph.shape_at(parent), device="meta")
    operation = find_operation(func, args, {}, [key])
    if operation is None or not isinstance(placement, Layout):
        return None
    return None if placement.axis in getattr(operation, "outputs", ()) else operation


def makes_rows(edge: GradientEdge, known: Known) -> bool:
    """Record a use whose result is constant, and of which each row meets one sample.

    Data without a gradient may have been multiplied there: where a derivative begins.

    Args:
        edge: Where the result sits in the graph.
        known: Which sample each of its entries meets, in all that is made of it.

    Returns:
        Whether it is one.
    """
    constant = len(graph.parents(edge.node)) == 1 and explain_place(edge) is None
    return constant and note_at(edge, known, by_rule=True)


def _is_constant(edge: GradientEdge) -> bool:
    """Tell whether what sits at a place in the graph depends on parameters alone."""
    if graph.is_leaf(edge.node):
        return _leaf(edge.node) is None
    return explain_place(edge) is None


def explain_parents(node: Node) -> list[Known]:
    """Find where the samples are of what a node was computed from.

    Args:
        node: Node of the graph.

    Returns:
        What is known of each of its operands.
    """
    places = [x for x in graph.parents(node) if not graph.is_leaf(x.node)]
    found = list(map(explain_place, places))
    return [known for known in found if known is not None]


def differ(operands: Sequence[Known]) -> bool:
    """Tell whether the same place belongs to different samples.

    Args:
        operands: What is known of the operands of an operation.

    Returns:
        Whether it does, in any two of them.
    """
    first, *others = operands or [None]
    return not all(agree(first.placement, x.placement) for x in others)


def explain_place(edge: GradientEdge) -> Known | None:
    """Find where the samples are at a place in the graph.

    Args:
        edge: The place.

    Returns:
        Where they are, ``None`` if nothing there depends on samples.
    """
    known = _known_at(edge) or _asked(edge)
    # what has no derivative with respect to samples depends on parameters alone
    return None if known is None or known.placement is None else known


def _asked(edge: GradientEdge) -> Known | None:
    """Ask derivatives where the samples are at a place in the graph."""
    if type(edge.node).__name__ == graph.HOOKED:  # which are not to be run for this
        node, number = edge.node.next_functions[edge.output_nr]
        return None if node is None else explain_place(GradientEdge(node, number))
    sources, nodes = sources_of([edge])
    if sources and len(nodes) > _FAR:  # the next ones behind need not go as far
        for place in _between(nodes):
            known = _found_from(*sources_of([place]), place)
            if known is not None and isinstance(known.placement, (Layout, Tensor)):
                _keep(place, known)
        sources, nodes = sources_of([edge])
    found = _found_from(sources, nodes, edge)
    if found is not None and isinstance(found.placement, Mixed) and len(nodes) > 1:
        # one operation after the other: which was it, and does it need to be passed?
        for place in _between(nodes):
            explain_place(place)
        found = _found_from(*sources_of([edge]), edge)
    if found is not None:
        _keep(edge, found)
    return found


def _between(nodes: Sequence[Node]) -> list[GradientEdge]:
    """List results that nodes take of each other, the first ones first."""
    places = {place for node in nodes for place in node.next_functions}
    known = set(nodes)
    inside = [GradientEdge(*place) for place in places if place[0] in known]
    return sorted(inside, key=lambda place: place.node._sequence_nr())


def _keep(edge: GradientEdge, known: Known) -> None:
    """Remember at a node what is known of what it has computed."""
    edge.node.metadata.setdefault(KNOWN, {})[edge.output_nr] = known


def _found_from(
    sources: Sequence[Source], nodes: Sequence[Node], edge: GradientEdge
) -> Known | None:
    """Find where the samples are that have come from other tensors."""
    if not sources:
        return None
    # of a leaf nothing is said beside tensors that are known: all samples may share it
    sources = [s for s in sources if not _is_unmarked(s.edge.node)] or sources
    first = sources[0]
    mixed = [s.known for s in sources if isinstance(s.known.placement, Mixed)]
    if mixed:
        return mixed[0]
    sizes = {source.known.n for source in sources}
    if sizes == {1}:
        sizes.update(_lengths(sources, nodes))
    if len(sizes) > 1:
        numbers = " and ".join(map(str, sorted(sizes)))
        name = f"{graph.name_of(edge.node)} of batches of {numbers} samples"
        return Known(Mixed(name, False), first.known.n)
    for node in nodes:
        own = getattr(node, "_forward_cls", None)
        once = getattr(own, "clear_saved_tensors_on_access", False)  # for autograd
        if once or communicates(own):
            return Known(Mixed(graph.name_of(node), not once), first.known.n)
    if len(sources) == 1 and all(
        graph.is_pointwise(x) and torch.Size(x._input_metadata[0].shape) == first.shape
        for x in nodes
    ):
        return first.known
    one = _only_sample(sources)
    key = _structure(sources, nodes, edge, one is not None)
    if key is None or key not in _REMEMBERED:
        # a checkpoint would count ours; what keeps its own result would keep itself
        with saved_tensors_hooks(Tensor.detach, lambda x: x):
            placement = probe(edge, sources, nodes)
        failed = isinstance(placement, Mixed) and not placement.is_known
        graph.note_indices(nodes)
        if key is None or failed:  # for once: what it needs may have been freed
            return Known(placement, first.known.n)
        if len(_REMEMBERED) > 1000:
            _REMEMBERED.clear()
        _REMEMBERED[key] = placement
    placement = _REMEMBERED[key]
    if one is not None and isinstance(placement, Tensor):
        placement = placement.where(placement < 0, one)
    return Known(placement, first.known.n)


def _only_sample(sources: Sequence[Source]) -> int | None:
    """Return the number of the only sample that tensors hold, as in a loop."""
    placements = [source.known.placement for source in sources]
    if not all(isinstance(p, Tensor) and p.numel() == 1 for p in placements):
        return None
    first, *others = {in_key(placement)[1] for placement in placements}
    return None if others or first < 0 else first


def _lengths(sources: Sequence[Source], nodes: Sequence[Node]) -> Iterator[int]:
    """List what lengths one sample is given by what it meets, of which nobody knows."""
    own = {s.shape for s in sources if s.shape and s.known.placement == FIRST}
    places = {*nodes, *(source.edge.node for source in sources)}
    for node in nodes:
        name = graph.name_of(node)
        maps, operands = graph.is_pointwise(node), [x for x, _ in node.next_functions]
        repeats = maps or name == "`expand`" or name == "`cat`" and None in operands
        if not (repeats or name in _OF_ROWS):
            continue
        shape = graph.shape_at(GradientEdge(node, 0))
        parents = [GradientEdge(*x) for x in node.next_functions if x[0] in places]
        before = set(map(graph.shape_at, parents))
        for y in own & before if repeats else ():
            if len(y) == len(shape) and shape[0] > y[0]:
                yield shape[0]
        # rows of data that a sample is added to, or that are multiplied with it
        rows = maps and None in operands and all(len(y) < len(shape) for y in before)
        rows = rows or name in _OF_ROWS and operands[_OF_ROWS[name]] is None
        if rows and shape[0] > 1 and not all(map(_is_constant, parents)):
            yield shape[0]


def _lose_behind_rows(edge: GradientEdge) -> None:
    """Note that samples are lost where other data have put rows in front of theirs.

    Of two answers nobody knows which: these may be the samples of the model that is
    called with them, and those positions; or they are several values of each sample.
    """
    for node in sources_of([edge])[1]:
        if not graph.is_pointwise(node):
            continue
        shape, places = graph.shape_at(GradientEdge(node, 0)), graph.parents(node)
        if all(graph.shape_at(place) == shape for place in places):
            continue
        unknown = len(places) < len(node.next_functions)  # data, or a number
        n, first, sizes = 1, len(shape), [0] * len(shape)
        for place in places:
            behind = sources_of([place])[0]
            if behind and all([_is_unmarked(source.edge.node) for source in behind]):
                unknown = True
                continue
            own = explain_place(place)
            if own is not None and isinstance(own.placement, Layout):
                before = graph.shape_at(place)
                pad = len(shape) - len(before)
                n, first = own.n, min(first, pad + own.placement.axis)
                sizes = list(map(max, sizes, (1,) * pad + before))
        rows = [m for m, own in zip(shape[:first], sizes) if own == 1 < m]
        if unknown and rows and n > 1:
            name, number = graph.name_of(node), math.prod(rows)
            lost = Mixed(f"{name} that puts {number} rows in front of samples", False)
            _keep(edge, Known(lost, n))
            return


# So many nodes are looked at again for what is computed of the result
_FAR = 16
# Products of matrices, and which of the operands has the rows
_OF_ROWS = {"`mm`": 0, "`addmm`": 1}
_REMEMBERED: dict[tuple, Placement] = {}
# Further operations whose results' entries go where shapes and plain arguments say,
# although they keep tensors: numbers, and no indices
_OF_NUMBERS = frozenset(
    "softmax log_softmax safe_softmax mm bmm addmm baddbmm mv dot native_layer_norm "
    "native_group_norm convolution linalg_vector_norm norm var std prod logsumexp "
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy mse_loss_backward "
    "smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward "
    "binary_cross_entropy_with_logits softmax_backward_data log_softmax_backward_data "
    "native_layer_norm_backward convolution_backward "
    "scaled_dot_product_flash_attention_for_cpu scaled_dot_product_flash_attention "
    "scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention".split()
)


def _structure(
    sources: Sequence[Source], nodes: Sequence[Node], edge: GradientEdge, of_one: bool
) -> tuple | None:
    """Describe a part of the graph, if its shapes and arguments say all.

    Args:
        sources: What is behind it.
        nodes: What is between.
        edge: The part's result.
        of_one: Whether all that is behind belongs to the same sample, whichever it is.

    Returns:
        What says all; ``None`` if numbers matter.
    """
    known: dict[Any, Any] = {node: i for i, node in enumerate(nodes)}
    for i, source in enumerate(sources):
        if isinstance(source.known.placement, Tensor) and not of_one:
            return None
        what = None if of_one else source.known
        known[source.edge[:2]] = (i, what, source.shape)
    parts: list[Any] = [edge.output_nr, graph.shape_at(edge)]
    for node in nodes:
        name, node_type = graph.name_of(node).strip("`_"), type(node)
        arguments, tensors = graph.saved_by(node_type)
        if graph.is_pointwise(node):
            arguments = ()
        elif name not in _OF_NUMBERS and (
            tensors
            or name in BY_STRIDES
            or not graph.is_own(node)
            or any(parent is None for parent, _ in node.next_functions)
        ):
            return None
        for place in node.next_functions:
            if type(place[0]).__name__ in _PASSING:
                return None
            parts += known.get(place, known.get(place[0])), place[1]
        parts += [torch.Size(x.shape) for x in node._input_metadata]
        parts += [node_type, *(str(getattr(node, name)) for name in arguments)]
    return tuple(parts)


def sources_of(
    edges: Sequence[GradientEdge], past_meetings: bool = False
) -> tuple[list[Source], list[Node]]:
    """Find tensors that something was computed from, whose samples are known.

    Args:
        edges: Where it sits in the graph.
        past_meetings: Whether to pass by those in which samples have met.
            Default: ``False``.

    Returns:
        The tensors, and the nodes behind which they are.
    """
    sources: list[Source] = []
    nodes: dict[Node, None] = {}
    queue, seen = [(edge.node, edge.output_nr) for edge in edges], set()
    while queue:
        node, number = place = queue.pop()
        if place in seen:
            continue
        seen.add(place)
        if CONSTANT in node.metadata and not graph.is_leaf(node):
            continue
        edge = GradientEdge(node, number)
        found = _known_at(edge)
        met = found is not None and isinstance(found.placement, Mixed)
        if found is not None and not (met and past_meetings):
            sources.append(Source(edge, found))
            continue
        if graph.is_leaf(node):
            source = _leaf(node)
            if source is not None:
                sources.append(source)
            continue
        if type(node).__name__ in _PASSING:
            queue.append(node.next_functions[number])
        elif node not in nodes:
            nodes[node] = None
            queue.extend((p, nr) for p, nr in node.next_functions if p is not None)
    return [s for s in sources if s.known.placement is not None], list(nodes)


def _is_unmarked(node: Node) -> bool:
    """Tell whether a node stands for a leaf that no model was given."""
    if not graph.is_leaf(node) or graph.GIVEN in node.metadata:
        return False
    return not getattr(node.variable, MARK, None)


def is_data(node: Node) -> bool:
    """Tell whether a node stands for a leaf that is data.

    Args:
        node: Node of the graph.

    Returns:
        Whether it does.
    """
    return graph.is_leaf(node) and _leaf(node) is not None


def _leaf(node: Node) -> Source | None:
    """Tell whether a leaf of the graph is data: an input that requires a gradient."""
    x = node.variable
    mark = getattr(x, MARK, None)
    if mark:
        known = Known(mark[1], mark[0].n)
    elif isinstance(x, Parameter) or not x.dim() or CONSTANT in node.metadata:
        return None  # or a number, like a temperature
    elif x.is_nested:
        known = Known(NESTED, x.size(0))
    else:
        known = Known(FIRST, len(x))
    return Source(GradientEdge(node, 0), known)
