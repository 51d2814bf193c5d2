"""A use: an operation in which data meets something that parameters alone determine.

It knows its constants by where their stand-ins sit in the graph, and its outputs by
where their samples are. From cotangents at the outputs follow products with the
constants' Jacobians: by a rule of :mod:`backpack.core.operations`, or by the generic
one, a vector-Jacobian product for each sample. No operation is ever run again.
"""

from __future__ import annotations

import weakref
from copy import copy
from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backpack.core.kinds import Broadcast
from backpack.core.layout import (
    Layout,
    Mixed,
    Placement,
    has_gaps,
    once,
    one_sample_each,
    some_samples,
)
from backpack.core.operations import Operation
from backpack.core.per_sample.apart import Apart
from backpack.core.per_sample.base import Dense, PerSample
from backpack.core.per_sample.maps import OfSome
from backpack.core.per_sample.sums import chunks
from backpack.engine.nodes import vjp
from backpack.engine.nodes.constants import Constant
from backpack.engine.nodes.functions import ATTENTION
from backpack.engine.nodes.met import refuse
from backpack.engine.nodes.saved import Saved, fetch
from backpack.utils.compiling import uncompiled
from backpack.utils.hooks import name_module, no_op, without_hooks
from backpack.utils.state import may_look, state
from backpack.utils.types import dense

ENTRIES = "backpack.entries"  # where a node of the graph keeps what ends in it
LISTENS = "backpack.listens"  # where it keeps the hook by which that has a turn
MASKED_ELEMENTS = 2**24  # of cotangents that the generic rule masks at once

NOBODYS = (
    "`{name}`, in rows that no sample has entered, like padding, of which it is not "
    "seen that a single one takes them (put them in after the last layer)"
)
MODIFIED = (
    "{operation}: an input of this operation was modified in place after the forward "
    "pass, so quantities of its parameters can't be computed. Replace the in-place "
    "operation (`x = x + y` instead of `x += y`), or pass a copy."
)


class Entry(NamedTuple):
    """Which of a node's outputs is which output of a call or a use."""

    output_nr: int
    index: int  # type: ignore[assignment]
    owner: Any  # a Call or a Use

    def in_shape(self, gradient: Tensor | None) -> Tensor | None:
        """Bring a gradient into the shape of the output.

        Args:
            gradient: Gradient at the node's output.

        Returns:
            Gradient at the output, which may be a view of the node's.
        """
        shape = self.owner.output_shapes[self.index]
        if gradient is None or gradient.shape == shape and not gradient.is_sparse:
            return gradient
        return dense(gradient).reshape(shape)


def is_whole(view: Tensor, operands: Sequence[Tensor]) -> bool:
    """Tell whether a view is all that an operation has computed, in another shape.

    Args:
        view: The view, which the operation has returned.
        operands: What it was computed from.

    Returns:
        Whether its base is the result, and no operand.
    """
    base = view._base
    return (
        base.grad_fn is not None
        and base.numel() == view.numel()
        and base.is_contiguous()
        and view.is_contiguous()
        and all(x.data_ptr() != base.data_ptr() for x in operands)
    )


class Use:
    """An operation with constants.

    Attributes:
        name: Name of the operation.
        constants: Its constants.
        n: Number N of samples.
        placements: Where the samples are in each output.
        operation: A rule for it, ``None`` for the generic one.
        adds_up: Whether its output is a sum of what samples contribute, by the rule.
        since: Number of nodes that the graph had before.
        until: Number of nodes that the graph had afterwards.
        output_shapes: Shapes of the outputs.
        released: Whether operands have been dropped.
        saved: What the operation keeps for its derivative, where hooks get that.
        is_function: Whether it is a function of one's own, found in the graph: its
            constants are what its node takes.
        is_passed: Whether the nodes inside are uses, in place of it.
        some: Numbers of its samples, if it is the part of those that are there.
    """

    is_use, is_loss = True, False
    is_function = is_passed = released = False
    saved: Sequence[Saved] = ()
    some: Tensor | None = None
    _outputs: Sequence[Any] = ()

    def __init__(
        self,
        name: str,
        constants: list[Constant],
        n: int,
        placements: list[Placement],
        owner: Any,
        operation: Operation | None,
        since: int = 0,
    ):
        """Store what it is.

        Args:
            name: Name of the operation.
            constants: Its constants.
            n: Number N of samples.
            placements: Where the samples are in each output.
            owner: Record of the innermost module in which it happened.
            operation: A rule for it, ``None`` for the generic one.
            since: Number of nodes that the graph had before. Default: 0.
        """
        self.name, self.constants, self.n = name, constants, n
        self.placements, self.operation = placements, operation
        self.adds_up = operation is not None and operation.adds_up
        # not owned: it owns operands of later uses, which own what this is attached to
        self._owner: Callable[[], Any] = no_op
        if owner is not None:
            self._owner = weakref.ref(owner)
            owner.uses = (*owner.uses, self)
        self.since, self.until = since, torch._C._autograd._get_sequence_nr()
        self.output_shapes: list[torch.Size] = []

    @property
    def owner(self) -> Any:
        """Record of the innermost module in which it happened, if that still exists."""
        return self._owner()

    @property
    def num_outputs(self) -> int:
        """Number of outputs that require a gradient."""
        return len(self.output_shapes)

    def describe(self) -> str:
        """Name the operation, for a message.

        Returns:
            The module in which it was, and its name.
        """
        owner = self.owner
        if owner is None:
            return f"`{self.name}`"
        return f"`{self.name}` of {name_module(owner.module)}"

    def attach(self, outputs: Sequence[Tensor]) -> None:
        """Attach it to the nodes that produced its outputs.

        Args:
            outputs: The outputs that require a gradient.
        """
        self.output_shapes = [x.shape for x in outputs]
        self._outputs = [weakref.ref(x) for x in outputs]
        data = None if self.operation is None else self.operation.data
        for index, x in enumerate(outputs):
            node, number, base = x.grad_fn, x.output_nr, x._base
            if base is not None and data is not None and is_whole(x, [data]):
                # a later operation in place would take the view's node out of the graph
                node, number = base.grad_fn, base.output_nr
            entries_at(node).append(Entry(number, index, self))

    def attach_at(
        self, edge: GradientEdge, shape: torch.Size, where: Placement
    ) -> None:
        """Attach it to a place in the graph, whose tensor is not at hand.

        Args:
            edge: One of its outputs.
            shape: Shape of that.
            where: Where its samples are.
        """
        index = len(self.output_shapes)
        self.output_shapes.append(shape)
        self.placements.append(where)
        entries_at(edge.node).append(Entry(edge.output_nr, index, self))

    def move(self, node: Node, base: Tensor, placement: Placement) -> None:
        """Attach it to what its only output is a view of, whose node will be lost.

        Args:
            node: Node of the output.
            base: What it has computed.
            placement: Where the samples are there.
        """
        entries = node.metadata.get(ENTRIES, [])
        mine = [entry for entry in entries if entry.owner is self]
        if mine:
            entries.remove(*mine)
            self.operation, self.placements, self.adds_up = None, [placement], False
            self.attach([base])

    def tensors(self) -> list[Tensor]:
        """List its outputs, as far as they exist.

        Returns:
            The outputs.
        """
        found = [x for x in (ref() for ref in self._outputs) if x is not None]
        for x in found:
            x._fix_weakref()
        return found

    def release(self, keeps: bool = False) -> None:
        """Drop the operands.

        Args:
            keeps: Whether another pass needs them. Default: ``False``.
        """
        if not keeps:
            self.operation, self.released, self.saved = None, True, ()

    release_all = release

    def check(
        self,
        cotangents: Sequence[Tensor | None],
        what: Callable[[], str],
        names: Callable[[], str],
    ) -> None:
        """Refuse a use after samples have met, or with a gradient of nobody's entries.

        Args:
            cotangents: Gradient at each output, ``None`` for zero.
            what: Names who asks.
            names: Names the parameters.

        Raises:
            NotImplementedError: If samples are not separate at an output, or there are
                cotangents at entries whose sample is not known.
        """
        for placement, x in zip(self.placements, cotangents):
            if isinstance(placement, Mixed):
                refuse(what(), placement, names())
            if x is None or not isinstance(placement, Tensor):
                continue
            if not may_look(x, waits=True):
                continue
            gaps = once(placement, "gaps", partial(has_gaps, placement))
            if gaps and ((x != 0) & (placement < 0)).any():
                refuse(what(), Mixed(NOBODYS.format(name=self.name), False), names())

    def _part(self) -> tuple[Use, Tensor] | None:
        """Describe the same use as one of the samples that are there.

        A loop over samples costs in proportion to their number then.

        Returns:
            The use, and the numbers of the samples; ``None`` if all are there.
        """
        pairs = zip(self.placements, self.output_shapes)
        found = [some_samples(p, self.n, len(shape)) for p, shape in pairs]
        samples = found[0][0]
        if any(x is None or not torch.equal(x, samples) for x, _ in found):
            return None
        part = copy(self)
        if len(samples):
            part.n, part.some = len(samples), samples
            part.placements = [placement for _, placement in found]
        return part, samples

    def products(
        self, cotangents: Sequence[Tensor | None], nodes: dict[int, Node]
    ) -> Sequence[PerSample | OfSome | None]:
        """Describe products of cotangents and the constants' Jacobians.

        Args:
            cotangents: Columns ``[V, *out]`` at each output, ``None`` for zero.
            nodes: The node of each output, and which of its outputs it is.

        Returns:
            Products for each constant, ``None`` for zero.

        Raises:
            RuntimeError: If they need an input that was modified in place since.
        """
        if all(x is None for x in cotangents):
            return [None] * len(self.constants)
        some = self._part()
        if some is None:
            return self._products(cotangents, nodes)
        part, samples = some
        found = part._products(cotangents, nodes)
        if not len(samples):
            found = [x and x.select(slice(0, 0)) for x in found]
        return [x and OfSome(x, samples, self.n) for x in found]

    def _products(
        self, cotangents: Sequence[Tensor | None], nodes: dict[int, Node]
    ) -> list[PerSample | None]:
        operation = self.operation
        if operation is not None and (len(cotangents) == 1 or operation.takes_all):
            mats = list(cotangents) if operation.takes_all else cotangents[0]
            shared: dict[Any, tuple[Tensor, Tensor]] = {}
            found = []
            for constant in self.constants:
                if operation.is_modified and operation.reads_data(constant.key):
                    if all(c.stand_in is not None for c in self.constants):
                        break  # autograd has kept what it needs, or says so
                    raise RuntimeError(MODIFIED.format(operation=self.describe()))
                product = operation.product(
                    constant.key, constant.shape, mats, self.placements[0], self.n
                )
                if product is None:
                    break
                product.shared = shared
                found.append(product)
            else:
                return found
        return self._at_once(cotangents, nodes) or self._generic(cotangents, nodes)

    def _at_once(
        self, cotangents: Sequence[Tensor | None], nodes: dict[int, Any]
    ) -> list[PerSample | None] | None:
        """Pull back all cotangents at once, where each entry meets one of a constant.

        Or each matrix of a batch one of a constant's batch: learned queries that are
        repeated for each sample attend to its keys alone.

        Returns:
            Products for each constant, ``None`` if that is not known.
        """
        edges = [constant.spread for constant in self.constants]
        by_entries, out, n = None not in edges, self.placements[0], self.n
        if len(cotangents) != 1 or self.operation is not None:
            return None
        if not by_entries:
            if not self._meets_matrices():
                return None
            edges = [constant.stand_in for constant in self.constants]
        fetch(self.saved)
        edge, columns = GradientEdge(*nodes[0]), cotangents[0].unsqueeze(1)
        with without_hooks(self.tensors()):
            pulled = vjp.batched_vjp([edge], edges, [columns])
        found: list[PerSample | None] = []
        for constant, x in zip(self.constants, pulled):
            product: PerSample | None = None
            if x is not None and not by_entries:
                product = Apart(x.squeeze(1), out, n)
            elif x is not None:
                x, where = x.squeeze(1), out
                if constant.within is not None:
                    where = constant.within(out, n, self.some)
                elif x.shape[1:] != self.output_shapes[0]:  # a part was written to
                    return None
                product = Broadcast(None, None).product(
                    None, constant.shape, x, where, n
                )
                if product is None:
                    return None
            found.append(product)
        return found

    def _meets_matrices(self) -> bool:
        """Tell whether each matrix of a batch meets its counterpart in constants."""
        where, shape = self.placements[0], self.output_shapes[0]
        if self.name != ATTENTION or not isinstance(where, Layout):
            return False
        own, axis = [constant.shape for constant in self.constants], where.axis
        same = all(len(x) == len(shape) and x[axis] == shape[axis] for x in own)
        return same and axis < len(shape) - 2

    def _generic(
        self, cotangents: Sequence[Tensor | None], nodes: dict[int, Any]
    ) -> list[PerSample | None]:
        """Pull back the cotangents of each sample alone, with autograd."""
        used = [i for i, x in enumerate(cotangents) if x is not None]
        edges = [GradientEdge(*nodes[i]) for i in used]
        stand_ins = [constant.stand_in for constant in self.constants]
        size = sum(cotangents[i].numel() for i in used)
        # a function's constants have no stand-in of their own
        alone = edges[0].node if self.is_function else None

        def pull_back(columns: Sequence[Tensor]) -> list[Tensor | None]:
            with without_hooks(self.tensors()), vjp.only_through(alone):
                return vjp.batched_vjp(edges, stand_ins, columns)

        fetch(self.saved)
        parts: list[list[Tensor | None]] = []
        steps = list(chunks(self.n, size, MASKED_ELEMENTS))
        for samples in steps:
            of = partial(one_sample_each, n=self.n, samples=samples)
            masked = [of(self.placements[i], cotangents[i]) for i in used]
            if self.operation is not None and len(edges) == 1:
                # the node's result may have another shape, see `attach`
                node, number, *_ = edges[0]
                mats, shape = masked[0], node._input_metadata[number].shape
                masked = [mats.reshape(*mats.shape[:2], *shape)]
            parts.append(vjp.pulled_apart(pull_back, masked))
        each = vjp.joined(parts, 1, [n.stop - n.start for n in steps])
        own = [edge.node for edge in edges if vjp.may_be_any(edge.node)]
        if own:  # each sample's own may be changed before all add up
            whole = [y.unsqueeze(1) for y in cotangents if y is not None]
            what = vjp.NO_SUM.format(names=f"what {self.describe()} takes")
            vjp.check_linear(whole, each, pull_back, f"`{self.name}`", what, own, 1.0)
        pairs = zip(self.constants, each)
        return [None if x is None else Dense(x, c.shape) for c, x in pairs]


def entries_at(node: Node) -> list[Entry]:
    """Return the list of what ends in a node.

    Args:
        node: Node of the graph.

    Returns:
        The list.
    """
    return node.metadata.setdefault(ENTRIES, [])


def constants_at(node: Node) -> set[Any]:
    """Return the places of what the uses at a node take that is no data.

    Args:
        node: Node of the graph.

    Returns:
        Where their constants sit in the graph; ``None`` if one has no place of its own.
    """
    owners = {e.owner for e in node.metadata.get(ENTRIES, ()) if e.owner.is_use}
    return {constant.place for use in owners for constant in use.constants}


def is_noted(node: Node, number: int) -> bool:
    """Tell whether an output of a node is known to be that of a use.

    Args:
        node: Node of the graph.
        number: Which of its outputs.

    Returns:
        Whether it is.
    """
    entries = node.metadata.get(ENTRIES, ())
    return any(e.owner.is_use and e.output_nr == number for e in entries)


def listen(node: Node) -> None:
    """Let what ends in a node have its turn when the gradients there are known.

    Args:
        node: Node of the graph, which has such entries.
    """
    metadata = node.metadata
    if LISTENS in metadata:
        metadata[LISTENS].remove()  # to come after hooks that users have put since
    metadata[LISTENS] = node.register_prehook(partial(_run, metadata[ENTRIES]))


def is_turn(hook: Any) -> bool:
    """Tell whether a hook of a node is what lets others have their turn.

    Args:
        hook: The hook.

    Returns:
        Whether it is.
    """
    return getattr(hook, "func", None) is _run


@uncompiled
def _run(entries: list[Entry], gradients: tuple[Tensor | None, ...]) -> None:
    """Run the turn of what ends in a node: uses, then calls, the last one first."""
    current = state()
    if current.pulling:
        return
    if len(entries) == 1 and entries[0].owner.num_outputs == 1:
        (entry,) = entries
        gradient = entry.in_shape(gradients[entry.output_nr])
        current.visit(entry.owner, (gradient,), entries)
        return
    known: dict[Any, dict[int, Tensor | None]] = {}
    for entry in sorted(reversed(entries), key=lambda e: not e.owner.is_use):
        gradient = entry.in_shape(gradients[entry.output_nr])
        known.setdefault(entry.owner, {})[entry.index] = gradient
    for owner, parts in known.items():
        current.visit(owner, tuple(map(parts.get, range(owner.num_outputs))), entries)
