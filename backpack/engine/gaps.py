"""Where samples are in a tensor that came from where no operation was watched.

Between modules that are extended one by one, and behind functions of one's own, there
are only nodes of the autograd graph. They are asked: a tensor's derivative with respect
to earlier tensors, whose samples are known, says which entry depends on which sample.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations
from math import nan
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks

from backpack.core.layout import (
    FIRST,
    Layout,
    Mixed,
    Placement,
    agree,
    conflict,
    halves,
    has_bit,
    marked,
    reshaped,
    sample_numbers,
    simplify,
    spans,
)
from backpack.engine.functions import BY_STRIDES
from backpack.engine.graph import (
    HOOKED,
    VIEWS,
    entries_of,
    is_leaf,
    is_own,
    is_pointwise,
    keeps_places,
    name_of,
    note_indices,
    saved_by,
    shape_at,
    walk,
)
from backpack.engine.placements import MARK, mark_of
from backpack.engine.repeated import compute_only
from backpack.engine.saved import OnesForSaved
from backpack.engine.uses import Constant, Together, Use, edge_of, is_noted
from backpack.engine.vjp import is_function, pull, structure_only
from backpack.utils.hooks import without_hooks
from backpack.utils.parallel import SINKS, communicates
from backpack.utils.state import out_of_sight, state
from backpack.utils.types import kind

CONSTANT = "backpack.constant"  # where a node keeps that it stands for a parameter
KNOWN = "backpack.known"  # where a node keeps what was found of its outputs
ASKED = "backpack.asked"  # behind which of its outputs functions were looked for
_PASSING = SINKS | {Together.__name__}  # nodes that hand on what comes, one by one


class Known(NamedTuple):
    """Where the samples of a tensor are.

    Attributes:
        placement: The placement.
        n: Number N of samples.
    """

    placement: Placement
    n: int


class Source(NamedTuple):
    """A place in the graph whose samples are known.

    Attributes:
        edge: The place.
        known: Where its samples are.
    """

    edge: GradientEdge
    known: Known

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor there."""
        return shape_at(self.edge)


NOT_FINITE = "its derivatives are not finite"
NESTED = Mixed("what has made a nested tensor (pad it instead)", False)


def _known_at(edge: GradientEdge) -> Known | None:
    """Look up what is known of a place in the graph; ``None`` if it is nothing."""
    node, output_nr, *_ = edge
    if node._input_metadata[output_nr].is_cpp_nested_tensor:
        return Known(NESTED, 1)
    shape, places = shape_at(edge), [(node, output_nr)]
    if type(node).__name__ in VIEWS:  # a layer's output may be a view of its result
        places.extend(node.next_functions[:1])
    for place, wanted in places:
        for number, index, owner in () if place is None else entries_of(place):
            placements, own = owner.placements, owner.output_shapes
            if number != wanted or placements is None:
                continue
            if own[index] == shape:
                return Known(placements[index], owner.n)
            if place is node and own[index].numel() == shape.numel():
                placement = reshaped(placements[index], own[index], shape, owner.n)
                return Known(placement, owner.n)
    return node.metadata.get(KNOWN, {}).get(output_nr)


@out_of_sight
def explain(x: Tensor) -> Known | None:
    """Find where the samples of a tensor are.

    Args:
        x: Tensor.

    Returns:
        Where they are, ``None`` if it depends on parameters alone, or is no part of a
        graph and nothing is known of it.
    """
    mark = mark_of(x)
    if mark and (x.grad_fn is None or mark[1] is not None and not mark[0].is_over):
        known = None if mark[1] is None else Known(mark[1], mark[0].n)
    elif x.grad_fn is None:
        return None
    else:
        edge = edge_of(x)
        known = _known_at(edge)
        if known and not is_function(x.grad_fn):
            return known  # with nothing between: the most frequent case
        with without_hooks([x]):
            known = explain_place(edge)
        mark = None
    if known is not None and (mark is None or is_function(x.grad_fn)):
        note_functions(x, known)
    return known


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


def note_at(edge: GradientEdge, known: Known) -> bool:
    """Record that what sits at a place in the graph is the result of a use.

    Args:
        edge: The place.
        known: Where its samples are.

    Returns:
        Whether it is, for its node takes a parameter.
    """
    use = _use_of(edge.node, known.n)
    if use is not None:
        use.attach_at(edge, shape_at(edge), known.placement)
    return use is not None


def _use_of(node: Node, n: int) -> Use | None:
    """Describe a node as a use, once for all its results; `None` if it is none."""
    for entry in entries_of(node):
        if entry.owner.is_use and entry.owner.is_function:
            return entry.owner
    parents = [GradientEdge(*e) for e in node.next_functions if e[0] is not None]
    constants = [Constant.at(parent) for parent in parents if _is_constant(parent)]
    if not constants:
        return None
    name = type(node).__name__.replace("Backward", "")
    name = name if is_function(node) else name_of(node).strip("`")
    use = Use(name, constants, n, [], None, None)
    use.is_function, use.since = True, node._sequence_nr()
    use.until = use.since + 1
    return use


def _is_constant(edge: GradientEdge) -> bool:
    """Tell whether what sits at a place in the graph depends on parameters alone."""
    if is_leaf(edge.node):
        return _leaf(edge.node) is None
    return explain_place(edge) is None


def explain_parents(node: Node) -> list[Known]:
    """Find where the samples are of what a node was computed from.

    Args:
        node: Node of the graph.

    Returns:
        What is known of each of its operands.
    """
    places = [e for e in node.next_functions if e[0] is not None and not is_leaf(e[0])]
    found = [explain_place(GradientEdge(*place)) for place in places]
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


def placement_at(node: Node) -> Placement:
    """Find where the samples are in the first result of a node.

    Args:
        node: Node of the graph.

    Returns:
        The placement.
    """
    known = explain_place(GradientEdge(node, 0))
    return None if known is None else known.placement


def explain_place(edge: GradientEdge) -> Known | None:
    """Find where the samples are at a place in the graph.

    Args:
        edge: The place.

    Returns:
        Where they are, ``None`` if nothing there depends on samples.
    """
    known = _known_at(edge)
    if known is not None:
        return known
    if type(edge.node).__name__ == HOOKED:  # which are not to be run for this
        node, number = edge.node.next_functions[edge.output_nr]
        return None if node is None else explain_place(GradientEdge(node, number))
    sources, nodes = sources_of([edge])
    found = _found_from(sources, nodes, edge)
    if found is not None and isinstance(found.placement, Mixed) and len(nodes) > 1:
        # one operation after the other: which was it, and does it need to be passed?
        parents = {place for node in nodes for place in node.next_functions}
        for node, number in sorted(
            (place for place in parents if place[0] in nodes),
            key=lambda place: place[0]._sequence_nr(),
        ):
            explain_place(GradientEdge(node, number))
        found = _found_from(*sources_of([edge]), edge)
    if found is not None:
        edge.node.metadata.setdefault(KNOWN, {})[edge.output_nr] = found
    return found


def _found_from(
    sources: Sequence[Source], nodes: Sequence[Node], edge: GradientEdge
) -> Known | None:
    """Find where the samples are that have come from other tensors."""
    if not sources:
        return None
    first = sources[0]
    mixed = [s.known for s in sources if isinstance(s.known.placement, Mixed)]
    if mixed:
        return mixed[0]
    sizes = {source.known.n for source in sources}
    if len(sizes) > 1:
        numbers = " and ".join(map(str, sorted(sizes)))
        name = f"{name_of(edge.node)} of batches of {numbers} samples"
        return Known(Mixed(name, False), first.known.n)
    for node in nodes:
        if communicates(getattr(node, "_forward_cls", None)):
            return Known(Mixed(name_of(node)), first.known.n)
    if len(sources) == 1 and all(
        is_pointwise(x) and torch.Size(x._input_metadata[0].shape) == first.shape
        for x in nodes
    ):
        return first.known
    key = _structure(sources, nodes, edge)
    if key is None or key not in _REMEMBERED:
        # a checkpoint would count ours; what keeps its own result would keep itself
        with saved_tensors_hooks(Tensor.detach, lambda x: x):
            placement = _probe(edge, sources, nodes)
        failed = isinstance(placement, Mixed) and not placement.is_known
        note_indices(nodes)
        if key is None or failed:  # for once: what it needs may have been freed
            return Known(placement, first.known.n)
        if len(_REMEMBERED) > 1000:
            _REMEMBERED.clear()
        _REMEMBERED[key] = placement
    return Known(_REMEMBERED[key], first.known.n)


_REMEMBERED: dict[tuple, Placement] = {}
# Further operations whose results' entries go where shapes and plain arguments say,
# although they keep tensors: numbers, and no indices
_OF_NUMBERS = frozenset(
    "softmax log_softmax safe_softmax mm bmm addmm baddbmm native_layer_norm "
    "linalg_vector_norm var logsumexp scaled_dot_product_flash_attention_for_cpu "
    "scaled_dot_product_flash_attention scaled_dot_product_efficient_attention "
    "scaled_dot_product_cudnn_attention".split()
)


def _structure(
    sources: Sequence[Source], nodes: Sequence[Node], edge: GradientEdge
) -> tuple | None:
    """Describe a part of the graph, if its shapes and arguments say all."""
    known: dict[Any, Any] = {node: i for i, node in enumerate(nodes)}
    for i, source in enumerate(sources):
        if isinstance(source.known.placement, Tensor):
            return None
        known[source.edge[:2]] = (i, source.known, source.shape)
    parts: list[Any] = [edge.output_nr, shape_at(edge)]
    for node in nodes:
        name, node_type = name_of(node).strip("`_"), type(node)
        arguments, tensors = saved_by(node_type)
        if is_pointwise(node):
            arguments = ()
        elif name not in _OF_NUMBERS and (
            tensors
            or name in BY_STRIDES
            or not is_own(node)
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
    nodes: list[Node] = []
    queue, seen = [(edge.node, edge.output_nr) for edge in edges], set()
    while queue:
        node, number = place = queue.pop()
        if place in seen:
            continue
        seen.add(place)
        if CONSTANT in node.metadata:
            continue
        edge = GradientEdge(node, number)
        found = _known_at(edge)
        met = found is not None and isinstance(found.placement, Mixed)
        if found is not None and not (met and past_meetings):
            sources.append(Source(edge, found))
            continue
        if is_leaf(node):
            source = _leaf(node)
            if source is not None:
                sources.append(source)
            continue
        if type(node).__name__ in _PASSING:
            queue.append(node.next_functions[number])
        elif node not in nodes:
            nodes.append(node)
            queue.extend((p, nr) for p, nr in node.next_functions if p is not None)
    return [s for s in sources if s.known.placement is not None], nodes


def _leaf(node: Node) -> Source | None:
    """Tell whether a leaf of the graph is data: an input that requires a gradient."""
    x = node.variable
    mark = getattr(x, MARK, None)
    if mark:
        known = Known(mark[1], mark[0].n)
    elif isinstance(x, torch.nn.Parameter) or not x.dim():
        return None
    elif x.is_nested:
        known = Known(NESTED, x.size(0))
    else:
        known = Known(FIRST, len(x))
    return Source(GradientEdge(node, 0), known)


def _probe(
    edge: GradientEdge, sources: Sequence[Source], nodes: Sequence[Node]
) -> Placement:
    """Ask which entries depend on which samples, by derivatives in both directions.

    Where these are not finite, operations of PyTorch are asked with ones for numbers.
    """
    pointwise = filter(is_pointwise, nodes)
    with state().pull(), structure_only(pointwise), compute_only(nodes, True):
        try:
            return _ask(edge, sources, nodes)
        except FloatingPointError as error:
            found = None
            if all(map(is_own, nodes)):  # else, nobody knows what the numbers are for
                with suppress(Exception), OnesForSaved():
                    found = _ask(edge, sources, nodes)
            met = Mixed(f"{name_of(edge.node)} ({error})", False)
            return met if found is None else found


def _ask(
    edge: GradientEdge, sources: Sequence[Source], nodes: Sequence[Node]
) -> Placement:
    """Ask second derivatives, or first ones where there are none."""
    reasons: list[str] = []
    for ask in (_moved, _regular):
        try:
            with torch.enable_grad():
                return ask(edge, sources, nodes)
        except FloatingPointError:
            raise
        except Exception as error:  # of any type: a function has its own backward
            reasons.append(str(error).split("\n")[0])
    return Mixed(f"{name_of(edge.node)} ({reasons[0]})", False)


def _zeros_at(edge: GradientEdge) -> Tensor:
    metadata = edge.node._input_metadata[edge.output_nr]
    return torch.zeros(shape_at(edge), **kind(metadata))


def _regular(
    edge: GradientEdge, sources: Sequence[Source], _: Sequence[Node]
) -> Placement:
    """Find the only layout that gradients agree with: entries lead to their sample."""
    n, zeros = sources[0].known.n, _zeros_at(edge)
    found: list[Tensor] = []
    pulled = pull([edge], [source.edge for source in sources], [zeros])
    if any(bool(g.isnan().any()) for g in pulled if g is not None):
        raise FloatingPointError(NOT_FINITE)
    for axis, size in enumerate(zeros.shape):
        for inner in range(1, size // n + 1):
            if size % (n * inner):
                continue
            own = sample_numbers(Layout(axis, inner), zeros.shape, n, zeros.device)
            new = not any(torch.equal(own, other) for other in found)
            if new and _agrees(edge, own, sources):
                found.append(own)
    if len(found) != 1:
        raise LookupError("none, or several")
    return simplify(found[0], n)


def _agrees(edge: GradientEdge, own: Tensor, sources: Sequence[Source]) -> bool:
    """Tell whether entries lead to the samples that they are said to belong to."""
    n, edges, seen = sources[0].known.n, [source.edge for source in sources], False
    for bit, value in halves(n):
        vector = marked(_zeros_at(edge), own, bit, value)
        for g, source in zip(pull([edge], edges, [vector]), sources):
            if g is not None:
                i = sample_numbers(source.known.placement, g.shape, n, g.device)
                if bool(g.isnan()[has_bit(i, bit, 1 - value)].any()):
                    return False
                seen = seen or bool(g.isnan().any())
    return seen


def _moved(
    edge: GradientEdge, sources: Sequence[Source], nodes: Sequence[Node]
) -> Placement:
    """Mark samples at the sources, and see which entries that changes."""
    n, cotangent = sources[0].known.n, _zeros_at(edge).requires_grad_()
    edges = [source.edge for source in sources]
    pulled = pull([edge], edges, [cotangent], create_graph=True)
    pairs = [(g, source) for g, source in zip(pulled, sources) if g is not None]
    lost = any(not g.requires_grad for g, _ in pairs)
    pairs = [(g, source) for g, source in pairs if g.requires_grad]
    numbers = _entries(cotangent, pairs, n)
    if numbers is None:
        return Mixed(name_of(edge.node))
    if (lost or pairs) and any(map(is_function, nodes)):
        if lost:
            raise RuntimeError("a function whose backward has no derivative")
        if bool((numbers < 0).any()) and not isinstance(simplify(numbers, n), Layout):
            numbers = _with_zeros(edge, nodes, cotangent, pairs, numbers)
        if bool((numbers < 0).all()):
            raise RuntimeError("a function whose backward has derivatives of zero only")
    placement = simplify(numbers, n) if pairs else None
    if len(pairs) > 1 and isinstance(placement, Tensor) and numbers.numel():
        alone = [_entries(cotangent, [pair], n) for pair in pairs]
        axes = [
            {axis for axis in range(-x.dim(), 0) if spans(x, x.shape, axis)}
            for x in alone
            if x is not None
        ]
        if any(a and b and a.isdisjoint(b) for a, b in combinations(axes, 2)):
            name = f"{name_of(edge.node)} of layers that have them on different axes"
            return Mixed(name, False)
    return placement


def _with_zeros(
    edge: GradientEdge,
    nodes: Sequence[Node],
    cotangent: Tensor,
    pairs: Sequence[tuple[Tensor, Source]],
    numbers: Tensor,
) -> Tensor:
    """Number entries, too, of which a function makes zeros now, in their own place.

    Nothing else gets through, then: not what autograd does not know of, either.
    """
    edges, n = [source.edge for _, source in pairs], pairs[0][1].known.n
    zeros = torch.zeros_like(cotangent, requires_grad=False)
    for value in (nan, 1 + torch.arange(zeros.numel()).view(zeros.shape).to(zeros)):
        pulled = pull([edge], edges, [zeros.where(numbers >= 0, value)])
        if any(bool(g.any()) for g in pulled if g is not None):
            return numbers
    behind = {*nodes, *(place.node for place in edges)}
    inner = walk([edge_of(g).node for g, _ in pairs], without=behind)
    with structure_only(list(filter(keeps_places, inner))):
        found = _entries(cotangent, pairs, n)
    for g, source in pairs:
        own = sample_numbers(source.known.placement, g.shape, n, g.device)
        if found is None or own.shape != found.shape or conflict(own, found):
            return numbers
    return found


def _entries(
    cotangent: Tensor, pairs: Sequence[tuple[Tensor, Source]], n: int
) -> Tensor | None:
    """Tell which sample each entry depends on.

    Args:
        cotangent: At the entries.
        pairs: What it contributes to the gradient at each source.
        n: Number N of samples.

    Returns:
        Numbers of samples, -1 for none; ``None`` if an entry depends on several.

    Raises:
        FloatingPointError: If that is not known, for derivatives that are no numbers.
    """  # noqa: DAR401
    got = torch.zeros_like(cotangent, dtype=torch.long, requires_grad=False)
    unseen, moved, met = got < 0, {}, got < 0
    numbers = [
        sample_numbers(source.known.placement, g.shape, n, g.device)
        for g, source in pairs
    ]
    for bit, value in halves(n) if pairs else ():
        vectors = [
            marked(torch.zeros_like(g), i, bit, value)
            for (g, _), i in zip(pairs, numbers)
        ]
        (column,) = pull([g for g, _ in pairs], cotangent, vectors)
        moved[value] = unseen & False if column is None else column.isnan()
        if not value:
            met |= moved[0] & moved[1]
            got += moved[1].long() << bit
            unseen |= ~(moved[0] | moved[1])
    if bool(met.any()):
        zeros = [torch.zeros_like(g) for g, _ in pairs]
        (column,) = pull([g for g, _ in pairs], cotangent, zeros)
        if bool((met & ~column.isnan()).any()):
            return None
        raise FloatingPointError(NOT_FINITE)
    return got.masked_fill(unseen, -1)
