"""Where samples are in a tensor that came from where no operation was watched.

Between modules that are extended one by one, and behind functions of one's own, there
are only nodes of the autograd graph. They are asked: a tensor's derivative with respect
to earlier tensors, whose samples are known, says which entry depends on which sample.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks

from backpack.core.layout import (
    FIRST,
    Layout,
    Mixed,
    Placement,
    has_bit,
    sample_numbers,
    simplify,
)
from backpack.engine.graph import HOOKED, VIEWS, entries_of, is_leaf
from backpack.engine.placements import MARK
from backpack.engine.uses import Constant, Use, edge_of, is_noted
from backpack.utils.hooks import without_hooks
from backpack.utils.parallel import SINKS
from backpack.utils.state import state
from backpack.utils.types import kind

CONSTANT = "backpack.constant"  # where a node keeps that it stands for a parameter
ASKED = "backpack.asked"  # behind which of its outputs functions were looked for

# Nodes that map entries one by one
_POINTWISE = frozenset(
    f"{name}Backward0"
    for name in "Relu Gelu Silu Tanh Sigmoid Exp Log Neg Softplus Elu LeakyRelu Clone "
    "Hardswish Hardsigmoid Hardtanh Mish Sqrt Rsqrt Abs Pow Mul Div Add Sub Log1P "
    "Expm1 Sin Cos Threshold Dropout NativeDropout ToCopy LogSigmoid Celu Clamp".split()
)


# Keeps the graph; `None` where there is no path
_pull = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)


class Known(NamedTuple):
    """Where the samples of a tensor are.

    Attributes:
        placement: The placement.
        n: Number N of samples.
    """

    placement: Placement
    n: int


class _Source(NamedTuple):
    edge: GradientEdge
    shape: torch.Size
    known: Known


NESTED = Mixed("what has made a nested tensor (pad it instead)", False)


def at_node(node: Node, output_nr: int) -> Optional[Tuple[torch.Size, Known]]:
    """Look up what is known of an output of a node.

    Args:
        node: The node.
        output_nr: Which of its outputs.

    Returns:
        Its shape, and where its samples are; ``None`` if nothing is known.
    """
    metadata = node._input_metadata[output_nr]
    if metadata.is_cpp_nested_tensor:  # it has no shape
        return torch.Size(), Known(NESTED, 1)
    shape = torch.Size(metadata.shape)
    places = [(node, output_nr)]
    if type(node).__name__ in VIEWS:  # a layer's output may be a view of its result
        places.extend(node.next_functions[:1])
    for place, wanted in places:
        for number, index, owner in () if place is None else entries_of(place):
            placements, own = owner.placements, owner.output_shapes
            if number != wanted or placements is None:
                continue
            if own[index] == shape:
                return shape, Known(placements[index], owner.n)
            if place is node and own[index].numel() == shape.numel():
                placement = _reshaped(placements[index], own[index], shape, owner.n)
                return shape, Known(placement, owner.n)
    return None


def _reshaped(
    placement: Placement, before: torch.Size, shape: torch.Size, n: int
) -> Placement:
    """Tell where samples are in another view of the same entries."""
    if placement is None or isinstance(placement, Mixed):
        return placement
    key = "reshaped", placement, before, shape, n
    if isinstance(placement, Tensor) or key not in _REMEMBERED:
        numbers = sample_numbers(placement, before, n, torch.device("cpu"))
        found = simplify(numbers.reshape(shape), n)
        if isinstance(placement, Tensor):
            return found
        _REMEMBERED[key] = found
    return _REMEMBERED[key]


def explain(x: Tensor) -> Optional[Known]:
    """Find where the samples of a tensor are.

    Args:
        x: Tensor.

    Returns:
        Where they are, ``None`` if it depends on parameters alone, or is no part of a
        graph and nothing is known of it.
    """
    mark = getattr(x, MARK, None)
    if mark and (x.grad_fn is None or mark[1] is not None):
        known = None if mark[1] is None else Known(mark[1], mark[0].n)
    elif x.grad_fn is None:
        return None
    else:
        found = at_node(x.grad_fn, x.output_nr)
        if found and found[0] == x.shape and not is_function(x.grad_fn):
            return found[1]  # with nothing between: the most frequent case
        with without_hooks([x]):
            known = explain_edge(edge_of(x), x.shape)
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
    _, nodes = _sources([last])
    places = [last, *(GradientEdge(*e) for node in nodes for e in node.next_functions)]
    for edge in places:
        node, number, *_ = edge
        if not is_function(node) or type(node).__name__ in SINKS:  # a wrapper's
            continue
        if is_noted(node, number):
            continue
        own = known if edge is last else _explain_place(edge)
        use = None if own is None else _use_of(node, own.n)
        if use is not None:
            use.attach_at(edge, _shape_at(edge), own.placement)


def _use_of(node: Node, n: int) -> Optional[Use]:
    """Describe a function as a use, once for all its results; `None` if it is none."""
    for entry in entries_of(node):
        if entry.owner.is_use and entry.owner.is_function:
            return entry.owner
    parents = [GradientEdge(*e) for e in node.next_functions if e[0] is not None]
    constants = [Constant.at(parent) for parent in parents if _is_constant(parent)]
    if not constants:
        return None
    name = type(node).__name__.replace("Backward", "")
    use = Use(name, constants, n, [], None, None)
    use.is_function = True
    return use


def _is_constant(edge: GradientEdge) -> bool:
    """Tell whether what sits at a place in the graph depends on parameters alone."""
    if is_leaf(edge.node):
        return _leaf(edge.node) is None
    return _explain_place(edge) is None


def explain_parents(node: Node) -> List[Known]:
    """Find where the samples are of what a node was computed from.

    Args:
        node: Node of the graph.

    Returns:
        What is known of each of its operands.
    """
    found = []
    for parent, number in node.next_functions:
        if parent is not None and not is_leaf(parent):
            found.append(_explain_place(GradientEdge(parent, number)))
    return [known for known in found if known is not None]


def is_function(node: Optional[Node]) -> bool:
    """Tell whether a node is that of a function of one's own.

    Args:
        node: The node, if there is one.

    Returns:
        Whether it is.
    """
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def differ(operands: Sequence[Known]) -> bool:
    """Tell whether the same place belongs to different samples.

    Args:
        operands: What is known of the operands of an operation.

    Returns:
        Whether it does, in any two of them.
    """
    first, *others = operands or [None]
    return not all(_agree(first.placement, x.placement) for x in others)


def _agree(a: Placement, b: Placement) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b.to(a.device))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b


def is_coupled(node: Node) -> bool:
    """Tell whether samples have met in the first result of a node.

    Args:
        node: Node of the graph.

    Returns:
        Whether it is known that they have.
    """
    known = _explain_place(GradientEdge(node, 0))
    met = None if known is None else known.placement
    return isinstance(met, Mixed) and met.is_known


def _shape_at(edge: GradientEdge) -> torch.Size:
    """Return the shape at a place in the graph; a nested tensor has none."""
    metadata = edge.node._input_metadata[edge.output_nr]
    return torch.Size(() if metadata.is_cpp_nested_tensor else metadata.shape)


def _explain_place(edge: GradientEdge) -> Optional[Known]:
    """Find where the samples are at a place, in the shape that the graph knows."""
    return explain_edge(edge, _shape_at(edge))


def explain_edge(edge: GradientEdge, shape: torch.Size) -> Optional[Known]:
    """Find where the samples are at a place in the graph.

    Args:
        edge: The place.
        shape: Shape of the tensor there.

    Returns:
        Where they are, ``None`` if nothing there depends on samples.
    """
    known = at_node(edge.node, edge.output_nr)
    if known is not None and known[0] == shape:
        return known[1]
    if type(edge.node).__name__ == HOOKED:  # which are not to be run for this
        node, number = edge.node.next_functions[edge.output_nr]
        return None if node is None else explain_edge(GradientEdge(node, number), shape)
    sources, nodes = _sources([edge])
    if not sources:
        return None
    first = sources[0]
    if len({source.known.n for source in sources}) > 1:
        return Known(Mixed(_names(nodes), False), first.known.n)
    mixed = [s.known for s in sources if isinstance(s.known.placement, Mixed)]
    if mixed:
        return mixed[0]
    same = len(sources) == 1 and first.shape == shape
    if same and _is_pointwise(nodes, shape):
        return first.known
    key = _structure(nodes, sources, shape)
    if key is None or key not in _REMEMBERED:
        with saved_tensors_hooks(_same, _same):  # a checkpoint would count ours
            placement = _probe(edge, shape, sources, nodes)
        if key is None or not isinstance(placement, Layout):  # others go by numbers
            return Known(placement, first.known.n)
        if len(_REMEMBERED) > 1000:
            _REMEMBERED.clear()
        _REMEMBERED[key] = placement
    return Known(_REMEMBERED[key], first.known.n)


# Nodes whose result's placement is determined by shapes and plain arguments, if it is a
# layout: derivatives that are zero for some numbers may hide others
_STRUCTURAL = frozenset(
    f"{name}Backward0"
    for name in "View UnsafeView ReshapeAlias Transpose T Permute Slice Select Squeeze "
    "Unsqueeze Expand LogSoftmax Softmax Clone Alias ToCopy Mul Div Add Sub Neg "
    "Sigmoid Tanh Relu Exp Log Pow Sum Mean".split()
) | {"SqueezeBackward1"}
_REMEMBERED: Dict[Tuple, Placement] = {}
# Linear in each operand
_LINEAR = frozenset(
    "Sum Mean Nansum Add Sub Rsub Neg Mul Div Lerp Dot Mv Mm Bmm Addmm Trace Cumsum "
    "Stack Cat Split SplitWithSizes Unbind Select Slice Index IndexSelect Gather "
    "Scatter MaskedSelect MaskedFill ScatterAdd IndexAdd IndexPut AsStrided Diagonal "
    "DiagEmbed Copy CopySlices View UnsafeView ReshapeAlias Squeeze Unsqueeze Expand "
    "Transpose T Permute Flip Repeat ConstantPadNd Clone Alias ToCopy _Together".split()
)
_MOST_ENTRIES = 1024  # of a result that is asked for entry by entry


def _structure(
    nodes: Sequence[Node], sources: Sequence[_Source], shape: torch.Size
) -> Optional[Tuple]:
    """Describe a part of the graph, if its shapes and arguments say all."""
    if len(sources) != 1 or any(type(x).__name__ not in _STRUCTURAL for x in nodes):
        return None
    (source,) = sources
    if isinstance(source.known.placement, Tensor):
        return None
    parts = []
    for node in nodes:
        if sum(parent is not None for parent, _ in node.next_functions) != 1:
            return None
        saved = [
            (name, str(getattr(node, name)))
            for name in ("_saved_dim", "_saved_dim0", "_saved_dim1", "_saved_dims")
            + ("_saved_start", "_saved_end", "_saved_step", "_saved_index")
            if hasattr(node, name)
        ]
        size = tuple(node._input_metadata[0].shape)
        parts.append((type(node).__name__, size, tuple(saved)))
    return (*parts, source.known, tuple(source.shape), tuple(shape))


def _sources(
    edges: Sequence[GradientEdge], past_meetings: bool = False
) -> Tuple[List[_Source], List[Node]]:
    """Find tensors that something was computed from, whose samples are known.

    Those in which samples have met are passed by, if that is asked for.
    """
    sources: List[_Source] = []
    nodes: List[Node] = []
    queue, seen = [(edge.node, edge.output_nr) for edge in edges], set()
    while queue:
        node, number = place = queue.pop()
        if place in seen:
            continue
        seen.add(place)
        if CONSTANT in node.metadata:
            continue
        found = at_node(node, number)
        met = found is not None and isinstance(found[1].placement, Mixed)
        if found is not None and not (met and past_meetings):
            sources.append(_Source(GradientEdge(node, number), *found))
            continue
        if is_leaf(node):
            source = _leaf(node)
            if source is not None:
                sources.append(source)
            continue
        if type(node).__name__ in SINKS:
            queue.append(node.next_functions[number])
        elif node not in nodes:
            nodes.append(node)
            queue.extend((p, nr) for p, nr in node.next_functions if p is not None)
    return [s for s in sources if s.known.placement is not None], nodes


def _leaf(node: Node) -> Optional[_Source]:
    """Tell whether a leaf of the graph is data: an input that requires a gradient."""
    x = node.variable
    mark = getattr(x, MARK, None)
    if mark:
        known = Known(mark[1], mark[0].n)
    elif isinstance(x, torch.nn.Parameter) or not x.dim():
        return None
    else:
        known = Known(FIRST, len(x))
    return _Source(GradientEdge(node, 0), x.shape, known)


def _is_pointwise(nodes: Sequence[Node], shape: torch.Size) -> bool:
    return all(
        type(node).__name__ in _POINTWISE
        and tuple(node._input_metadata[0].shape) == tuple(shape)
        for node in nodes
    )


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(dict.fromkeys(map(name_of, nodes)))


def name_of(node: Node) -> str:
    """Name the operation of a node, for a message.

    Args:
        node: The node.

    Returns:
        Its name as in PyTorch's functions.
    """
    name = type(node).__name__.split("Backward")[0]
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return f"`{words.lstrip('_')}`"


def _same(x: Tensor) -> Tensor:
    return x


def _probe(
    edge: GradientEdge,
    shape: torch.Size,
    sources: Sequence[_Source],
    nodes: Sequence[Node],
) -> Placement:
    """Ask which entries move with which samples, by derivatives in both directions."""
    n, metadata = sources[0].known.n, edge.node._input_metadata[edge.output_nr]
    current = state()
    try:
        with current.pull(), torch.enable_grad():
            cotangent = torch.zeros(shape, **kind(metadata)).requires_grad_()
            edges = [source.edge for source in sources]
            pulled = _pull([edge], edges, [cotangent], create_graph=True)
        pairs = [
            (g, source)
            for g, source in zip(pulled, sources)
            if g is not None and g.requires_grad
        ]
        found: Placement = None
        if pairs:
            with current.pull():
                found = _numbers(cotangent, pairs, shape, n, _names(nodes))
        used = any(g is not None for g in pulled)
        if found is None and used and any(map(is_function, nodes)):
            raise RuntimeError("a function whose backward has no derivative")
        return found
    except Exception as error:  # of any type, where a function has its own backward
        if shape.numel() <= _MOST_ENTRIES:
            with suppress(Exception), current.pull():
                return _one_by_one(edge, shape, sources, _names(nodes))
        first = str(error).split("\n")[0]
        return Mixed(f"{_names(nodes)} ({first})", False)


def is_separable(roots: Sequence[GradientEdge]) -> bool:
    """Tell whether a value is a sum of functions of one sample each.

    That is, whether it has no second derivative with respect to two samples, and only
    linear operations where samples meet.

    Args:
        roots: Where the value sits in the graph.

    Returns:
        Whether it is known to be, as a function of what the last uses have computed.
    """
    sources, nodes = _sources(roots, past_meetings=True)
    used = any(entry.owner.is_use for node in nodes for entry in entries_of(node))
    if used or len({source.known.n for source in sources}) != 1:
        return False
    with suppress(Exception), state().pull(), torch.enable_grad():
        return all(map(_may_take, nodes)) and _has_no_mixed_derivatives(roots, sources)
    return False


def _may_take(node: Node) -> bool:
    """Tell whether an operation is linear, or gets the same samples everywhere.

    Else, samples that meet in a function made of lines would have no second derivative
    for some numbers. Functions of one's own need not have a true one.
    """
    if type(node).__name__.split("Backward")[0] in _LINEAR:
        return True
    if is_function(node):
        return False
    operands = explain_parents(node)
    met = any(isinstance(x.placement, Mixed) for x in operands)
    return not (met or differ(operands))


def _has_no_mixed_derivatives(
    roots: Sequence[GradientEdge], sources: Sequence[_Source]
) -> bool:
    edges, n = [source.edge for source in sources], sources[0].known.n
    metadata = [edge.node._input_metadata[edge.output_nr] for edge in roots]
    ones = [torch.ones(m.shape, **kind(m)) for m in metadata]
    pulled = _pull(roots, edges, ones, create_graph=True)
    numbers = [
        sample_numbers(s.known.placement, s.shape, n, ones[0].device) for s in sources
    ]
    both = [
        (g, i) for g, i in zip(pulled, numbers) if g is not None and g.requires_grad
    ]
    gradients = [g for g, _ in both]
    for bit in range((n - 1).bit_length() if both else 0):
        vectors = zip(_random(gradients), both)
        masked = [v * has_bit(i, bit) for v, (_, i) in vectors]
        for h, i in zip(_pull(gradients, edges, masked), numbers):
            if h is not None and bool(h[has_bit(i, bit, 0)].any()):
                return False
    return True


def _random(like: Sequence[Tensor]) -> List[Tensor]:
    """Draw numbers for tensors, always the same, none of which is small.

    Those of two tensors differ: a difference of equal ones would be zero.
    """
    draws = [torch.Generator(g.device).manual_seed(i) for i, g in enumerate(like)]
    pairs = zip(like, draws)
    return [torch.rand(g.shape, generator=draw, **kind(g)) + 0.5 for g, draw in pairs]


def _one_by_one(
    edge: GradientEdge, shape: torch.Size, sources: Sequence[_Source], names: str
) -> Placement:
    """Ask which samples each entry depends on, where there is no second derivative."""
    n, metadata = sources[0].known.n, edge.node._input_metadata[edge.output_nr]
    found: List[int] = []
    edges = [source.edge for source in sources]
    for row in torch.eye(shape.numel(), **kind(metadata)):
        pulled = _pull([edge], edges, [row.reshape(shape)])
        samples = set()
        for g, source in zip(pulled, sources):
            if g is not None:
                own = sample_numbers(source.known.placement, g.shape, n, g.device)
                samples |= set(own[g != 0].tolist()) - {-1}
        if len(samples) > 1:
            return Mixed(names)
        found += samples or {-1}
    numbers = torch.tensor(found, device=metadata.device).reshape(shape)
    return _of_derivatives(numbers, n, names)


def _numbers(
    cotangent: Tensor,
    pairs: Sequence[Tuple[Tensor, _Source]],
    shape: torch.Size,
    n: int,
    names: str,
) -> Placement:
    got = torch.zeros(shape, dtype=torch.long, device=cotangent.device)
    unseen = torch.zeros(shape, dtype=torch.bool, device=cotangent.device)
    gradients = [g for g, _ in pairs]
    vectors = _random(gradients)
    numbers = [
        sample_numbers(source.known.placement, g.shape, n, g.device)
        for g, source in pairs
    ]
    for bit in range(max(1, (n - 1).bit_length())):
        moved: List[Tensor] = []
        for wanted in (1, 0):
            masked = [
                v.where(has_bit(i, bit, wanted), v.new_zeros(()))
                for v, i in zip(vectors, numbers)
            ]
            (column,) = _pull(gradients, cotangent, masked)
            moved.append(torch.zeros_like(unseen) if column is None else column != 0)
        ones, zeros = moved
        if bool((ones & zeros).any()):
            return Mixed(names)
        got += ones.long() << bit
        unseen |= ~(ones | zeros)
    return _of_derivatives(got.masked_fill(unseen, -1), n, names)


def _of_derivatives(numbers: Tensor, n: int, names: str) -> Placement:
    """Find a placement, where -1 may be a sample's whose derivative is zero."""
    if n == 1:
        numbers = torch.zeros_like(numbers)
    lost = bool((numbers < 0).any()) and len(numbers.unique()) == 2
    return Mixed(names, False) if lost else simplify(numbers, n)
