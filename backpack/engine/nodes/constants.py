"""Constants: what operations take that is no data, and what stands in for it.

An operation gets an alias of each parameter, or expression of parameters, so that its
own share of the gradient arrives at a place of its own in the graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Collection, Container, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from backpack.core.layout import Layout, Placement, sample_numbers, simplify
from backpack.engine.nodes.functions import (
    ATTENTION,
    IN_BRACKETS,
    JOINED,
    in_brackets,
    named,
)
from backpack.utils.parallel import is_in_place
from backpack.utils.types import are_redefined, common_shape, is_inexact

CONSTANT = "backpack.constant"  # where a node keeps that no sample is behind it
Within = Callable[[Placement, int, "Tensor | None"], Placement]


class Constant:
    """What an operation takes that is no data: a parameter, or computed from some.

    Attributes:
        leaf: The parameter, ``None`` for an expression.
        source: Where an expression sits in the graph, ``None`` for a parameter.
        stand_in: Where the operation's alias of it sits in the graph; ``None`` if the
            operation's own parameter is used.
        key: Which argument it is: a position, or a keyword, which a list's have in a
            tuple with their place in the list. ``None`` if it is deeper inside.
        shape: Its shape.
        spread: Where the alias sits in a shape of which each entry is of one sample:
            that of the result, where entries of the same place meet. ``None`` if that
            is not known.
        within: Tells where samples are in that shape, given where they are in the
            result, how many there are, and which, if these are not all; ``None`` if it
            is as in the result.
    """

    __slots__ = ("leaf", "source", "stand_in", "key", "shape", "spread", "within")

    @classmethod
    def at(cls, edge: GradientEdge) -> Constant:
        """Describe what a function of one's own takes, which has no stand-in.

        Args:
            edge: Where it sits in the graph.

        Returns:
            The constant, which is its own stand-in.
        """
        node, number, *_ = edge
        constant = cls.__new__(cls)
        constant.leaf = getattr(node, "variable", None)
        constant.source = edge if constant.leaf is None else None
        constant.stand_in, constant.key = edge, None
        constant.spread = constant.within = None
        constant.shape = torch.Size(node._input_metadata[number].shape)
        return constant

    def __init__(self, x: Tensor, stand_in: GradientEdge | None, key: Any):
        """Store what it is.

        Args:
            x: The constant.
            stand_in: Where its alias sits in the graph.
            key: Which argument it is.
        """
        self.leaf = x if x.grad_fn is None or is_in_place(x) else None
        self.source = None if self.leaf is x else edge_of(x)
        if x.grad_fn is None and not isinstance(x, Parameter):  # nor an input
            edge_of(x).node.metadata.setdefault(CONSTANT, True)
        self.stand_in, self.key, self.shape = stand_in, key, x.shape
        self.spread: GradientEdge | None = None
        self.within: Within | None = None

    @property
    def node(self) -> Node:
        """Node of the graph at which its share of the gradient arrives."""
        if self.stand_in is not None:
            return self.stand_in.node
        return get_gradient_edge(self.leaf).node

    @property
    def place(self) -> tuple[Node, int] | None:
        """Its stand-in's node, and which of the outputs; ``None`` without stand-in."""
        edge = self.stand_in
        return None if edge is None else (edge.node, edge.output_nr)


def edge_of(x: Tensor) -> GradientEdge:
    """Return where a tensor sits in the graph, which must be the case.

    Args:
        x: Tensor that requires a gradient.

    Returns:
        Its place.
    """
    node = x.grad_fn
    if node is not None:
        return GradientEdge(node, x.output_nr)
    if has_views(x):
        return get_gradient_edge(x)
    with torch.enable_grad():
        return GradientEdge(alias_of(x).grad_fn.next_functions[0][0], 0)


def edges_of(
    outputs: Iterable[Tensor], constant: Container[int]
) -> list[GradientEdge | None]:
    """Find where several tensors sit in the graph.

    Args:
        outputs: The tensors.
        constant: Identities of those that do not matter.

    Returns:
        Their edges, ``None`` for those, and for what needs no gradient.
    """
    return [
        edge_of(x) if x.requires_grad and id(x) not in constant else None
        for x in outputs
    ]


def note_leaves(node: Node, of: Callable[[Tensor], Placement]) -> None:
    """Remember which leaves that a function has taken stand for no data.

    Args:
        node: The function's node.
        of: Tells where the samples of a tensor are.
    """
    for parent, _ in node.next_functions:
        leaf = getattr(parent, "variable", None)
        if leaf is not None and of(leaf) is None:
            parent.metadata.setdefault(CONSTANT, True)


def are_apart(edges: Iterable[GradientEdge | None]) -> bool:
    """Tell whether outputs sit at different nodes of the graph, or twice at a place.

    Args:
        edges: Where each does, if it does.

    Returns:
        Whether that is so.
    """
    places = [(edge.node, edge.output_nr) for edge in edges if edge is not None]
    nodes = {node for node, _ in places}
    return len(nodes) > 1 or len(set(places)) < len(places)


def has_views(x: Tensor) -> bool:
    """Tell whether a tensor has views, which nested and sparse ones don't have.

    Args:
        x: The tensor.

    Returns:
        Whether it has.
    """
    return x.layout is torch.strided and not x.is_nested


def alias_of(x: Tensor) -> Tensor:
    """Make a tensor of the same numbers, behind a node of its own in the graph.

    Args:
        x: The tensor.

    Returns:
        A view, or a copy where there are none.
    """
    if not are_redefined((x,)):
        if not has_views(x):
            return x.clone()
        # before torch 2.6, DTensors have no other view of the whole
        return x[...] if type(x) in (Tensor, Parameter) else x.view_as(x)
    with torch._C.DisableTorchFunctionSubclass():
        alias = x.view_as(x)
        if type(alias) is not type(x):
            alias = alias.as_subclass(type(x))
            vars(alias).update(vars(x))
    return alias


def stand_in(
    name: str,
    args: tuple,
    kwargs: dict[str, Any],
    constants: Sequence[Tensor],
    spread: bool,
    written: Sequence[Constant] | None,
) -> tuple[tuple, dict[str, Any], list[Constant]]:
    """Give an operation an alias of each constant: its share of the gradient.

    Args:
        name: Name of the operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        constants: Which of them, or in them, are constants.
        spread: Whether aliases may have the shape in which operands meet.
        written: The constant that is written to and stands in for itself, if it has
            not entered before. ``None`` if what is written to is none.

    Returns:
        The arguments, with aliases, and the constants.
    """
    wanted = {id(x): x for x in constants}
    given = (*enumerate(args), *kwargs.items())
    lists = [(key, x) for key, x in given if isinstance(x, (list, tuple))]
    within = [((key, i), y) for key, x in lists for i, y in enumerate(x)]
    keys: dict[int, Any] = {id(x): key for key, x in reversed((*within, *given))}
    flat = sum([id(x) in wanted for _, x in given]) == len(constants)
    if written is not None:
        wanted.pop(id(args[0]))
    aliases = {number: alias_of(x) for number, x in wanted.items()}
    shape, which = _meeting(name, args, kwargs, wanted) if spread else (None, None)
    pairs = [*(written or ())]
    with torch._C.DisableTorchFunction():
        for number, x in wanted.items():
            alias = aliases[number]
            constant = Constant(x, edge_of(alias), keys.get(number))
            alone = which is not None and x is not which
            # a number takes no part in type promotion, a subclass may be lost
            fits = x.dim() or all(y.dtype == x.dtype for _, y in given if is_inexact(y))
            if shape and not alone and fits and type(x) in (Tensor, Parameter):
                alias = alias.expand(shape)
                constant.spread = edge_of(alias)
            aliases[number] = alias
            pairs.append(constant)

    def swap(x: Any) -> Any:
        own = isinstance(x, list)  # of a class that trees don't know
        return [aliases.get(id(y), y) for y in x] if own else aliases.get(id(x), x)

    if flat:
        args = tuple([swap(x) for x in args])
        kwargs = {name: swap(x) for name, x in kwargs.items()} if kwargs else kwargs
    else:
        args, kwargs = tree_map(swap, (args, kwargs))
    return args, kwargs, pairs


def distinct(
    args: tuple, kwargs: dict[str, Any], constants: list[Tensor]
) -> tuple[tuple, dict[str, Any], list[Tensor]]:
    """Let a constant that enters twice be two tensors, each for a rule of its own.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        constants: Which of them, or in them, are constants.

    Returns:
        The arguments and the constants, with an alias for each that comes again.
    """
    ids = [id(x) for x in constants]
    if len({*ids}) == len(ids):
        return args, kwargs, constants
    found: list[Tensor] = []

    def other(x: Any) -> Any:
        if id(x) not in ids:
            return x
        found.append(alias_of(x) if any([x is y for y in found]) else x)
        return found[-1]

    args, kwargs = tree_map(other, (args, kwargs))
    return args, kwargs, found


def _meeting(
    name: str, args: tuple, kwargs: dict[str, Any], wanted: Collection[int]
) -> tuple[torch.Size | None, Tensor | None]:
    """Tell the shape in which each entry of a constant is of one sample.

    Args:
        name: Name of the operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        wanted: The ``id`` of each constant.

    Returns:
        The shape, and of which operand. ``None`` for all.
    """
    if name in IN_BRACKETS:
        x, index, value = (*args[:3], None, None, None)[:3]
        plain = type(x) is Tensor and type(value) in (Tensor, Parameter)
        if not plain or id(value) not in wanted:
            return None, None
        place = x.detach()[in_brackets(name, index)]
        return (place.shape, value) if value.dim() <= place.dim() else (None, None)
    if name != ATTENTION:
        return common_shape((args, kwargs)), None
    given = named(("query", "key", "value", "attn_mask"), args, kwargs)
    query, key, _, mask = given
    if mask is None or query.is_nested:
        return None, None
    shape = torch.Size([*query.shape[:-1], key.shape[-2]])
    own = [1] * (len(shape) - mask.dim()) + [*mask.shape]
    # where there are no queries, PyTorch takes a mask of any shape
    fits = len(own) == len(shape) and all(k in (1, n) for k, n in zip(own, shape))
    return (shape, mask) if fits else (None, None)


def note_parts(
    name: str,
    args: tuple,
    kwargs: dict[str, Any],
    constants: Sequence[Constant],
    out: Tensor,
) -> None:
    """Note where constants are in a result whose shape they do not have.

    Args:
        name: Name of the operation.
        args: Positional arguments, with aliases of the constants.
        kwargs: Keyword arguments.
        constants: The constants.
        out: The result.
    """
    if name in IN_BRACKETS:
        index = in_brackets(name, args[1])
        for constant in constants:
            constant.within = partial(_places, index, out.shape, out.device)
    if name == ATTENTION:
        (query,) = named(("query",), args, kwargs)
        for constant in constants:
            constant.within = partial(_along_queries, query.dim())
    if name not in JOINED:
        return
    tensors, given = named(("tensors", "dim"), args, kwargs)
    is_stack, start = name == "stack", 0
    axis = kwargs.get("axis") or given or 0
    axis %= max(x.dim() for x in tensors) + is_stack
    by_node = {constant.stand_in.node: constant for constant in constants}
    for x in tensors:
        size = 1 if is_stack else x.shape[axis] if x.dim() > axis else 0
        constant = by_node.get(x.grad_fn)
        if constant is not None:
            constant.spread = constant.stand_in
            constant.within = partial(_piece, axis, start, size, is_stack)
        start += size


def _places(
    index: tuple,
    shape: torch.Size,
    device: torch.device,
    where: Placement,
    n: int,
    *_: Any,
) -> Placement:
    """Tell where samples are in what is written to some places."""
    if not isinstance(where, (Layout, Tensor)):
        return None
    return simplify(sample_numbers(where, shape, n, device)[index], n)


def _along_queries(dim: int, where: Placement, *_: Any) -> Placement:
    """Tell where samples are in a mask of attention, from where they are in queries."""
    if isinstance(where, Layout):
        return None if where.axis == dim - 1 else where
    if isinstance(where, Tensor):
        return where if where.shape[-1] == 1 else None
    return None


def in_written(
    placement: Placement, _: Placement, n: int, some: Tensor | None
) -> Placement:
    """Tell where samples are in a view that was written to, whatever its base is.

    Args:
        placement: Where they are, if these are all.
        _: Where they are in the base.
        n: How many there are.
        some: The numbers of those that are there ``[n]``, if these are not all.

    Returns:
        The placement.
    """
    if some is None or not isinstance(placement, Tensor):
        return placement
    return simplify(torch.searchsorted(some, placement.contiguous()), n)


def _piece(
    axis: int, start: int, size: int, is_stack: bool, where: Placement, *_: Any
) -> Placement:
    """Tell where samples are in a piece of what was joined."""
    if isinstance(where, Layout):
        if where.axis == axis:
            return None
        return Layout(where.axis - (is_stack and where.axis > axis), where.inner)
    if not isinstance(where, Tensor):
        return None
    piece = where if where.shape[axis] == 1 else where.narrow(axis, start, size)
    return piece.squeeze(axis) if is_stack else piece
