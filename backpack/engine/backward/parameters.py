"""From uses to parameters: whose products are complete, and what they are.

A parameter may be used several times, and by way of expressions: a normalized weight,
some rows of a table, a concatenation of biases. Parameters that expressions connect, or
that enter one and the same use and no other, are a *group*: its products are complete
when all of its uses have had their gradients, and one joint vector-Jacobian product
leads from expressions to parameters.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Collection, Iterator, Optional, Sequence, Union

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Module

from backpack.core.per_sample.base import Dense, PerSample
from backpack.core.per_sample.maps import OfSome, alike, merged
from backpack.core.per_sample.pieces import Pieces
from backpack.engine.backward.expressions import (
    behind_views,
    nodes_behind,
    taken_from,
    unseen,
)
from backpack.engine.nodes import graph
from backpack.engine.nodes.saved import SAVED, fetch
from backpack.engine.nodes.uses import Use
from backpack.engine.nodes.vjp import NO_SUM, batched_vjp, check_linear, may_be_any
from backpack.engine.samples.repeated import compute_only
from backpack.utils.hooks import name_module, represent
from backpack.utils.types import as_type, full_precision

Part = Union[PerSample, OfSome]
Products = Sequence[Optional[Part]]
Member = tuple[Use, int]  # a use, and which of its constants
Collected = list[tuple[list[Member], dict[Tensor, list[Part]]]]

OTHER_SIZES = (
    "Parameters are shared by calls with different numbers of samples ({sizes}), so "
    "that individual gradients are not defined for {names}. Let each call have all "
    "samples, or give each one parameters of its own."
)


class Group:
    """Parameters whose products become complete together.

    Attributes:
        params: The parameters.
        members: Their uses, and which of the constants.
        uses: The uses, each once; known with all members.
        is_simple: Whether each parameter is used once, in the same use, as it is.
        pending: Number of uses that have not had their gradient yet.
        collected: Products of uses whose part of the graph will have been freed when
            the last use has its gradient, and which uses these are.
    """

    def __init__(self) -> None:
        """Start without any."""
        self.params: list[Tensor] = []
        self.members: list[Member] = []
        self.uses: list[Use] = []
        self.pending, self.is_simple = 0, False
        self.collected: Collected = []
        self._waiting: dict[Any, list[Member]] | None = None
        self._missing: dict[Any, int] = {}

    @property
    def modules(self) -> list[Any]:
        """Modules in which the parameters were used, as far as they exist."""
        owners = [use.owner for use in self.uses]
        return [owner.module for owner in owners if owner is not None]

    def describe(self, param: Tensor) -> str:
        """Name a parameter and where it is used, for a message.

        Args:
            param: The parameter.

        Returns:
            The modules in which it is used, and its qualified name.
        """
        return f"{self.where(represent)} (parameter {graph.describe([param])})"

    def where(self, name: Callable[[Module], str] = name_module) -> str:
        """Name the modules in which the parameters are used, for a message.

        Args:
            name: How to name a module. Default: what it is, and where in the model.

        Returns:
            Their names; the operation if there is none.
        """
        places = sorted({name(module) for module in self.modules})
        return " and ".join(places) or self.uses[0].name

    def collect(self, use: Use, of: Callable[[Use], Products]) -> None:
        """Form products that need the graph, while it is there.

        That of an expression is there until the last of its uses has had its gradient.

        Args:
            use: A use that has just had its gradient.
            of: Returns its products, for each of its constants.
        """
        of(use)
        if self._waiting is None:
            self._waiting = {}
            for member in self.members:
                self._waiting.setdefault(_origin(member), []).append(member)
            self._missing = {x: len(every) for x, every in self._waiting.items()}
        for source in [_origin((u, i)) for u, i in self.members if u is use]:
            self._missing[source] -= 1
            if source is not None and not self._missing[source]:
                members = self._waiting[source]
                self._require_one_size({u for u, _ in members})
                self.collected.append((members, self._sum(members, of)))

    def products(
        self, of: Callable[[Use], Products], collected: Optional[Collected] = None
    ) -> dict[Tensor, PerSample]:
        """Collect the products of all parameters.

        Args:
            of: Returns the products of a use, for each of its constants.
            collected: Products that are known. Default: ``None``.

        Returns:
            Products for each parameter that is not known to have none.
        """
        self._require_one_size(self.uses)
        known = {member for members, _ in collected or () for member in members}
        found = self._sum([x for x in self.members if x not in known], of)
        for _, products in collected or ():
            for param, parts in products.items():
                for part in parts:
                    _add(found, param, part)
        return {param: merged(parts) for param, parts in found.items()}

    def _require_one_size(self, uses: Collection[Use]) -> None:
        """Refuse uses with different numbers of samples."""
        sizes = {use.n for use in uses}
        if len(sizes) > 1:
            names = graph.describe(self.params)
            text = OTHER_SIZES.format(sizes=sorted(sizes), names=names)
            raise NotImplementedError(text)

    def _sum(
        self, members: list[Member], of: Callable[[Use], Products]
    ) -> dict[Tensor, list[Part]]:
        """Collect the products of some uses, whose sum is each parameter's."""
        found: dict[Tensor, list[Part]] = {}
        computed: dict[tuple[GradientEdge, torch.Size], list[Part]] = {}
        expressions: dict[GradientEdge, list[Part]] = {}
        for use, index in members:
            part, constant = of(use)[index], use.constants[index]
            if part is None:
                continue
            if constant.leaf is not None:
                _add(found, constant.leaf, part)
            else:
                _add(computed, (constant.source, constant.shape), part)
        while computed:
            wholes: dict[tuple[GradientEdge, torch.Size], list[Part]] = {}
            for (source, shape), parts in computed.items():
                product: Any
                # joined, before anything is formed
                for product in parts if len(parts) == 1 else alike(parts):
                    leaf, edge, product = self._behind(source, shape, product)
                    if leaf is not None:
                        _add(found, leaf, product)
                    elif isinstance(product, Pieces) and edge != source:
                        _add(wholes, (edge, product.shape), product)
                    else:
                        _add(expressions, edge, product)
            computed = wholes
        if expressions:
            self._pull_back(expressions, found)
        return found

    def _behind(
        self, source: GradientEdge, shape: torch.Size, product: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """Go behind views, see :func:`.behind_views`, with products of any samples."""
        if not isinstance(product, OfSome):
            return behind_views(source, shape, product, self.params)
        leaf, edge, inner = behind_views(source, shape, product.product, self.params)
        if isinstance(inner, Pieces):
            return leaf, edge, inner.among(product.samples, product.batch_size)
        return leaf, edge, product._replace(product=inner)

    def _pull_back(
        self,
        expressions: dict[GradientEdge, list[Part]],
        found: dict[Tensor, list[Part]],
    ) -> None:
        """Take products from expressions on to the parameters behind them."""
        outputs, columns = list(expressions), []
        for parts in expressions.values():
            columns.append(merged(parts).individual())
        nodes = list(graph.walk(edge.node for edge in outputs))
        for node in nodes:
            fetch(node.metadata.get(SAVED, ()))
        # the graph's own: a parameter that is frozen by now does not tell its place
        leaves = {node.variable: node for node in nodes if graph.is_leaf(node)}
        params = [p for p in self.params if p in leaves or p.grad_fn is not None]
        inputs = [GradientEdge(leaves.get(p, p.grad_fn), p.output_nr) for p in params]
        own = list(filter(may_be_any, nodes))
        with compute_only(own), unseen(nodes):
            pulled = batched_vjp(outputs, inputs, columns)
            if own:
                what = NO_SUM.format(names=graph.describe(self.params))
                again = partial(batched_vjp, outputs, inputs)
                check_linear(columns, pulled, again, graph.names_at(own), what, own)
        for param, products in zip(params, pulled):
            if products is not None:
                _add(found, param, Dense(products, param.shape))


class ParameterTurn:
    """Parameters of which everything is known: what extensions compute from.

    Attributes:
        group: The parameters and their uses.
        backward_pass: The backward pass that is running.
    """

    def __init__(self, group: Group, backward_pass: Any):
        """Begin the turn.

        Args:
            group: The parameters and their uses.
            backward_pass: The backward pass that is running.
        """
        self.group, self.backward_pass = group, backward_pass
        backward_pass.report.used.update(map(id, group.params))
        self._gradients: dict[Tensor, PerSample] | None = None

    def gradients(self) -> dict[Tensor, PerSample]:
        """Describe the individual gradients of the parameters.

        Returns:
            For each parameter that a gradient has reached, the products with V = 1.
        """
        if self._gradients is None:
            running = self.backward_pass
            self._gradients = self.group.products(
                running.own_products, self.group.collected
            )
            for param in running.left_out(self._gradients):
                self._gradients[param].plain.keeps_total = True
        return self._gradients

    def size_of_terms(self) -> tuple[float, float]:
        """Estimate the size of the terms that gradients are sums of.

        Returns:
            Sum of the absolute values of all cotangents and their factors; precision of
            the coarsest.
        """
        gradients = self.backward_pass.gradients
        sizes = [_size_of_terms(use, gradients[use]) for use in self.group.uses]
        return sum(size for size, _ in sizes), max(eps for _, eps in sizes)

    def columns(self, ext: Any) -> Iterator[tuple[Tensor, Any]]:
        """Compute an extension's values from what losses have pulled back.

        Args:
            ext: The extension.

        Yields:
            Parameters, and their values; none if columns go from module to module.
        """
        if not ext.walks_modules:
            yield from self.backward_pass.pull_back.values(ext, self)

    def save(self, ext: Any, param: Tensor, value: Any) -> None:
        """Save a value on a parameter.

        Args:
            ext: The extension whose field it is.
            param: The parameter.
            value: The value.
        """
        self.backward_pass.save(ext, param, value)


@torch.no_grad()  # they may be part of a graph, which a number is not
def _size_of_terms(
    use: Use, cotangents: Sequence[Tensor | None]
) -> tuple[float, float]:
    """Estimate the size of the terms that a use's gradients are sums of, and eps."""
    given = [g for g in cotangents if g is not None]
    size = sum(float(full_precision(g).abs().sum()) for g in given)
    eps = max((torch.finfo(g.dtype).eps for g in given), default=0.0)
    data = None if use.operation is None else use.operation.data
    if data is None or not data.is_floating_point() or not data.numel():
        return size, eps
    return size * max(1.0, float(data.abs().max())), eps


def _source(member: Member) -> GradientEdge | None:
    """Return where an expression sits in the graph; ``None`` for a parameter."""
    use, index = member
    return use.constants[index].source


def _origin(member: Member) -> GradientEdge | None:
    """Return where that sits in the graph which an expression is a piece of."""
    source = _source(member)
    return None if source is None else taken_from(source)


def _add(found: dict[Any, list[Part]], key: Any, product: PerSample) -> None:
    """Note what a use contributes; what is formed already is added up at once."""
    parts: list[Any] = found.setdefault(key, [])
    if parts and type(parts[-1]) is type(product) is Dense:
        total = product.added_to(parts.pop().products)
        product = Dense(total, product.shape)
    parts.append(product)


def find_groups(uses: Sequence[Use], without: Collection[int] = ()) -> list[Group]:
    """Sort the constants of uses into groups.

    What enters a single use as it is, like a layer's weight and bias, is one group.

    Args:
        uses: The uses of a backward pass.
        without: Identities of parameters that have uses outside of it. Default: none.

    Returns:
        The groups.
    """
    leaves_of: dict[Any, list[Tensor]] = {}
    by_param: dict[int, Group] = {}
    for use in uses:
        for index, constant in enumerate(use.constants):
            if constant.leaf is not None:
                params = [constant.leaf]
            else:
                place = constant.source[:2]
                if place not in leaves_of:
                    behind = nodes_behind(constant.source)
                    leaves_of[place] = graph.leaves_among(behind)
                params = leaves_of[place]
            # those that were frozen after the forward pass get nothing from autograd
            wanted = [p for p in params if p.requires_grad and id(p) not in without]
            group = _joined(wanted, by_param)
            if group is not None:
                group.members.append((use, index))
    groups: dict[Any, Group] = {}
    for group in dict.fromkeys(by_param.values()):
        (use, index), *others = group.members
        group.uses = list(dict.fromkeys([use, *[more for more, _ in others]]))
        group.pending = len(group.uses)
        group.is_simple = not others and use.constants[index].leaf is not None
        first = groups.setdefault(use if group.is_simple else group, group)
        if first is not group:
            first.params += group.params
            first.members += group.members
    return list(groups.values())


def _joined(params: Sequence[Tensor], by_param: dict[int, Group]) -> Group | None:
    """Return the group of some parameters, joined if there were several."""
    group: Group | None = None
    for p in params:
        other = by_param.get(id(p))
        if group is None:
            group = other or Group()
        if other is None:
            by_param[id(p)] = group
            group.params.append(p)
        elif other is not group:
            group.members += other.members
            group.params += other.params
            by_param.update((id(x), group) for x in other.params)
    return group


def in_type_of(value: Any, param: Tensor) -> Any:
    """Give a value the type of its parameter.

    Args:
        value: Tensor, or list of tensors.
        param: The parameter.

    Returns:
        The same in the parameter's type.
    """
    if isinstance(value, list):
        return [as_type(x, param.dtype) for x in value]
    return as_type(value, param.dtype)
