"""Constants: what operations take that is no data, and what stands in for it.

An operation gets an alias of each parameter, or expression of parameters, so that its
own share of the gradient arrives at a place of its own in the graph.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from backpack.engine.functions import COMBINING
from backpack.engine.views import unrepeated
from backpack.utils.parallel import is_in_place
from backpack.utils.types import are_redefined, common_shape


class Constant:
    """What an operation takes that is no data: a parameter, or computed from some.

    Attributes:
        leaf: The parameter, ``None`` for an expression.
        source: Where an expression sits in the graph, ``None`` for a parameter.
        stand_in: Where the operation's alias of it sits in the graph; ``None`` if the
            operation's own parameter is used.
        key: Which argument it is: a position, a keyword, ``None`` inside of a list.
        shape: Its shape.
        spread: Where the alias sits in the shape of the result, of an operation that
            maps entries of the same place; else ``None``.
    """

    __slots__ = ("leaf", "source", "stand_in", "key", "shape", "spread")

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
        constant.stand_in, constant.key, constant.spread = edge, None, None
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
        self.stand_in, self.key, self.shape = stand_in, key, x.shape
        self.spread: GradientEdge | None = None

    def comes_from(self, node: Node) -> None:
        """Let it be what an operation has taken that only repeats it.

        Args:
            node: The operation's node.
        """
        (parent, number), *_ = node.next_functions
        self.leaf = getattr(parent, "variable", None)
        self.source = None if self.leaf is not None else GradientEdge(parent, number)

    @property
    def node(self) -> Node:
        """Node of the graph at which its share of the gradient arrives."""
        if self.stand_in is not None:
            return self.stand_in.node
        return get_gradient_edge(self.leaf).node


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
        return x[...] if has_views(x) else x.clone()
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
    keys = {id(x): key for key, x in reversed(given)}
    flat = sum([id(x) in wanted for _, x in given]) == len(constants)
    if len(wanted) < len(constants):  # no rule is for one that enters twice
        keys = {i: key for i, key in keys.items() if _once(i, constants)}
    if written is not None:
        wanted.pop(id(args[0]))
    own = dict(wanted)
    if name in COMBINING:
        own = {number: unrepeated(x) for number, x in wanted.items()}
    aliases = {number: alias_of(x) for number, x in own.items()}
    shape = common_shape((args, kwargs)) if spread else None
    pairs = [*(written or ())]
    for number, x in wanted.items():
        alias, part = aliases[number], own[number]
        constant = Constant(part, edge_of(alias), keys.get(number))
        if part is not x:
            constant.comes_from(x.grad_fn)
            alias = alias.expand(x.shape)
        # a number takes no part in type promotion, a subclass may be lost
        if shape is not None and x.dim() and type(x) in (Tensor, Parameter):
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


def _once(number: int, constants: Sequence[Tensor]) -> bool:
    return [id(x) for x in constants].count(number) == 1
