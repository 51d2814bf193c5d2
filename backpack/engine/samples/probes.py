"""Asks derivatives which entries of a tensor depend on which samples.

Where no operation was watched, there is only the graph between the tensor and others
whose samples are known. Marks go through it in both directions: NaN in place of the
samples' numbers, at the sources of a second derivative, or at the tensor.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from functools import partial
from itertools import combinations
from math import nan
from typing import (
    Any,
    Callable,
    Collection,
    Iterable,
    Iterator,
    NamedTuple,
    Sequence,
)

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack.core.layout import (
    Layout,
    Mixed,
    Placement,
    conflict,
    halves,
    has_bit,
    has_gaps,
    sample_numbers,
    simplify,
    spans,
)
from backpack.engine.nodes.constants import edge_of
from backpack.engine.nodes.graph import (
    is_leaf,
    is_own,
    is_pointwise,
    keeps_places,
    name_of,
    parents,
    shape_at,
    walk,
)
from backpack.engine.nodes.saved import InsteadOfSaved, are_kept
from backpack.engine.nodes.vjp import is_function, pull
from backpack.engine.samples.repeated import compute_only
from backpack.utils.state import state
from backpack.utils.types import dense, kind

# Nodes between a factor and the mask that makes its zeros, and how many are asked
_STEPS_TO_A_MASK, _MOST_STEPS = (2, 8, 32), 100
_SLICES = "`copy_slices`"
NOT_FINITE = "its derivatives are not finite"


class Known(NamedTuple):
    """Where the samples of a tensor are.

    Attributes:
        placement: The placement.
        n: Number N of samples.
    """

    placement: Placement
    n: int

    @property
    def has_all(self) -> bool:
        """Whether each sample may have entries."""
        if not isinstance(self.placement, Tensor):
            return self.placement is not None
        return len(self.placement[self.placement >= 0].unique()) == self.n


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

    def numbers(self, device: torch.device) -> Tensor:
        """Write down the samples of the entries there.

        Args:
            device: Device of the result.

        Returns:
            Sample numbers, of the tensor's shape; -1 where there is none.
        """
        placement, n = self.known
        return sample_numbers(placement, self.shape, n, device)


def probe(
    edge: GradientEdge, sources: Sequence[Source], nodes: Sequence[Node]
) -> Placement:
    """Ask which entries depend on which samples, by derivatives in both directions.

    Where these are not finite, operations of PyTorch are asked with ones for numbers.

    Args:
        edge: Where the entries sit in the graph.
        sources: What they were computed from.
        nodes: What is between.

    Returns:
        Where samples are in them.
    """
    with state().pull(), structure_only(nodes), compute_only(nodes, True):
        try:
            found = _ask(edge, sources, nodes)
            slices = [x for x in nodes if name_of(x) == _SLICES and len(parents(x)) < 2]
            if slices and isinstance(found, Tensor) and has_gaps(found):
                return _filled(found, slices, edge, sources, nodes)
            return found
        except FloatingPointError as error:
            found = None
            if all(map(is_own, nodes)):  # else, nobody knows what the numbers are for
                with suppress(Exception), InsteadOfSaved():
                    found = _ask(edge, sources, nodes)
            met = Mixed(f"{name_of(edge.node)} ({error})", False)
            return met if found is None else found


def _filled(
    found: Tensor,
    slices: Iterable[Node],
    edge: GradientEdge,
    sources: Sequence[Source],
    nodes: Sequence[Node],
) -> Placement:
    """Fill gaps where an operation in place, on a view, may have made zeros.

    Which one it was, the graph does not say. As if it mapped entries of the same place,
    what it was given goes on, chosen or not; this counts where it leaves no gaps.
    """
    handles = [node.register_hook(_hand_over) for node in slices]
    try:
        other = _ask(edge, sources, nodes)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(other, Layout):
        return found
    numbers = sample_numbers(other, shape_at(edge), sources[0].known.n, found.device)
    return found if conflict(found, numbers) else other


@contextmanager
def structure_only(
    nodes: Iterable[Node], keeps: Callable[[Node], bool] = is_pointwise
) -> Iterator[None]:
    """Let operations that choose entries hand on whatever arrives, chosen or not.

    With NaN for a cotangent, it does not matter then where derivatives are zero.

    Args:
        nodes: Nodes of the graph.
        keeps: Tells whether an operation maps entries of the same place.
            Default: what is known to.

    Yields:
        Nothing.
    """
    handles: list[Any] = []
    for node in nodes:
        if keeps(node):
            handles.append(node.register_hook(_hand_on))
        elif maxima := _OF_MAXIMA.match(type(node).__name__):
            plane = tuple(range(-int(maxima[1]), 0))
            handles.append(node.register_hook(partial(_hand_on_planes, plane)))
        elif type(node).__name__ == "LogcumsumexpBackward0":
            handles.append(node.register_hook(partial(_hand_back, node)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Derivatives of layers that take maxima of windows, and in how many dimensions
_OF_MAXIMA = re.compile(r"(?:Adaptive|Fractional)?MaxPool(\d)D\w*BackwardBackward")


def _hand_on(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
    """Replace gradients at a pointwise operation's operands by those at its result."""
    g, given = outputs[0], [x for x in inputs if x is not None]
    if g is None or any(x.is_complex() for x in (g, *given)):
        return None
    return tuple(x if x is None else g.sum_to_size(x.shape).to(x) for x in inputs)


def _hand_over(inputs: tuple, outputs: tuple) -> tuple:
    """Let all that was there before a part of it was written to have a gradient."""
    x, *others = inputs
    return x if x is None else x + outputs[0], *others


def _hand_on_planes(axes: tuple[int, ...], inputs: tuple, outputs: tuple) -> Any:
    """Let all that maxima were chosen from have a gradient: any may be the largest."""
    (g, *_), (at_maxima, at_planes) = outputs, inputs
    if g is None or at_planes is None:
        return None
    return at_maxima, g.sum(axes, keepdim=True).expand_as(at_planes)


def _hand_back(node: Any, inputs: tuple, outputs: tuple) -> Any:
    """Hand gradients on as a cumulated sum would, and not by their logarithms."""
    (g,), dim = outputs, node._saved_dim
    if g is None or not g.dim():
        return None
    dim = signed(dim) % g.dim()
    return (g.flip(dim).cumsum(dim).flip(dim),)


def signed(number: int) -> int:
    """Read a number of the graph, which shows negative ones without their sign.

    Args:
        number: What a node says.

    Returns:
        The number.
    """
    return number - 2**64 if number >= 2**63 else number


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


def zeros_at(edge: GradientEdge) -> Tensor:
    """Make zeros like the tensor at a place in the graph.

    Args:
        edge: The place.

    Returns:
        The zeros.
    """
    metadata = edge.node._input_metadata[edge.output_nr]
    return torch.zeros(shape_at(edge), **kind(metadata))


def leads_to(edge: GradientEdge, places: list[GradientEdge]) -> list[GradientEdge]:
    """Ask with respect to which of several tensors a result has a derivative.

    Args:
        edge: Where the result sits in the graph.
        places: Where the tensors do.

    Returns:
        Those of them; all, if that can't be asked any more.
    """
    if not places:
        return places
    marked = zeros_at(edge).fill_(nan)
    try:
        with state().pull(), structure_only([edge.node]):
            found = pull([edge], places, [marked])
    except RuntimeError:  # what it needs was freed
        return places
    pairs = zip(places, found)
    return [x for x, g in pairs if g is not None and (g.isnan().any() or not g.numel())]


def takes_any(edge: GradientEdge, places: Collection[tuple]) -> bool:
    """Tell whether a result depends on some of what its node takes, directly.

    The derivative of a layer has several results, of which those for its parameters
    are made of data alone, though the node takes these parameters.

    Args:
        edge: Where the result sits in the graph.
        places: Places of operands.

    Returns:
        Whether it may.
    """
    node, number, *_ = edge
    if not (is_own(node) and set(places).issubset(node.next_functions)):
        return True
    marked: list[Tensor | None] = [None] * len(node._input_metadata)
    try:
        marked[number] = zeros_at(edge).fill_(nan)
        with state().pull(), torch.no_grad():
            found = node(*marked)  # by itself: operands may be behind others, too
        found = found if isinstance(found, tuple) else (found,)
        taken = [g for place, g in zip(node.next_functions, found) if place in places]
        return any(g is not None and bool(dense(g).isnan().any()) for g in taken)
    except (RuntimeError, IndexError):  # what it needs was freed, or has no shape
        return True


_Tangents = dict[tuple[Node, int, int], Tensor]


def left_out(x: Tensor) -> Tensor:
    """Tell which zeros are no results of learning, like those that a mask has made.

    Numbers that change go from what the tensor was computed of to its entries, in
    forward mode: a zero stays if none arrives. They begin further and further behind.

    Args:
        x: The tensor, with a gradient.

    Returns:
        Whether nothing that is learned has a derivative in an entry that is zero. If it
        can't be asked without side effects, nobody knows of one.
    """
    zeros, generator = x == 0, torch.Generator()
    found, known = torch.zeros_like(zeros), _Tangents()
    # to unpack what was saved may compute it once more
    for depth in () if are_kept() else _STEPS_TO_A_MASK:
        if len(known) > _MOST_STEPS or not bool((zeros & ~found).any()):
            break
        with state().pull(), torch.enable_grad():
            tangent = _tangent(edge_of(x), depth, generator, known)
        found |= zeros & (tangent == 0)
    return found


def _tangent(
    edge: GradientEdge, depth: int, generator: torch.Generator, known: _Tangents
) -> Tensor:
    """Let a place in the graph change with all that is so many nodes behind it."""
    place = edge.node, edge.output_nr, depth
    if place not in known:
        zeros, places = zeros_at(edge), parents(edge.node)
        known[place] = torch.rand(zeros.shape, generator=generator).to(zeros)
        passes = is_own(edge.node) or name_of(edge.node) == _SLICES
        if depth and passes and not is_leaf(edge.node):
            behind = [_tangent(p, depth - 1, generator, known) for p in places]
            with suppress(RuntimeError):  # it has no derivative
                known[place] = _pushed(edge, places, behind)
    return known[place]


def _pushed(
    edge: GradientEdge, places: Sequence[GradientEdge], tangents: Sequence[Tensor]
) -> Tensor:
    """Multiply with a node's Jacobian, which is what its backward is linear in."""
    cotangent = zeros_at(edge).requires_grad_()
    pulled = pull([edge], places, [cotangent], create_graph=True)
    pairs = [(g, t) for g, t in zip(pulled, tangents) if g is not None]
    pairs = [(g, t) for g, t in pairs if g.requires_grad]
    (found,) = pull([g for g, _ in pairs], cotangent, [t for _, t in pairs])
    return zeros_at(edge) if found is None else found


def _regular(
    edge: GradientEdge, sources: Sequence[Source], _: Sequence[Node]
) -> Placement:
    """Find the only layout that gradients agree with: entries lead to their sample."""
    n, zeros = sources[0].known.n, zeros_at(edge)
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
        vector = _marked(zeros_at(edge), own, bit, value)
        for g, source in zip(pull([edge], edges, [vector]), sources):
            if g is not None:
                i = source.numbers(g.device)
                if bool(g.isnan()[has_bit(i, bit, 1 - value)].any()):
                    return False
                seen = seen or bool(g.isnan().any())
    return seen


def _marked(x: Tensor, numbers: Tensor, bit: int, value: int) -> Tensor:
    """Write NaN to samples whose number has a bit, to both parts of complex numbers."""
    mark: Any = complex(nan, nan) if x.is_complex() else nan
    return x.masked_fill_(has_bit(numbers, bit, value), mark)


def _moved(
    edge: GradientEdge, sources: Sequence[Source], nodes: Sequence[Node]
) -> Placement:
    """Mark samples at the sources, and see which entries that changes."""
    n, cotangent = sources[0].known.n, zeros_at(edge).requires_grad_()
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
    with structure_only(inner, keeps_places):
        found = _entries(cotangent, pairs, n)
    for g, source in pairs:
        own = source.numbers(g.device)
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
    numbers = [source.numbers(g.device) for g, source in pairs]
    for bit, value in halves(n) if pairs else ():
        vectors = [
            _marked(torch.zeros_like(g), i, bit, value)
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
