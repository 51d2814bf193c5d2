"""What the graph of a backward pass looks like, and the terms of what it begins at."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import Any, Collection, Iterable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from backpack.core.layout import Layout, Mixed
from backpack.core.table import GENERIC_LOSS, find_loss
from backpack.engine.backward.kept_whole import nodes_inside, take_whole
from backpack.engine.backward.terms import additive_terms, adds_up
from backpack.engine.nodes.graph import (
    GIVEN,
    MEETING,
    TANGENT,
    VIEW,
    Origin,
    Together,
    calls_at,
    entries_of,
    is_leaf,
    leaves_behind,
    targets_below,
    walk,
)
from backpack.engine.nodes.user_hooks import (
    SEEN,
    Guarded,
    guard,
    guard_node,
    is_second_order,
)
from backpack.engine.nodes.uses import ENTRIES, Use, is_noted
from backpack.engine.nodes.vjp import is_users
from backpack.engine.samples.gaps import explain_place
from backpack.engine.samples.probes import takes_any
from backpack.utils.hooks import name_module, names_of
from backpack.utils.module_classification import is_loss

APART = (
    "{exts}: what is to be done on {module} needs the gradients at all tensors that it "
    "returns. They arrive together if the extension, or its rule for the module, was "
    "there before the forward pass. Create it first, or let the module return a single "
    "tensor."
)


def _numbered(
    nodes: Iterable[Node], uses: Collection[Use]
) -> Iterator[tuple[Use, Node]]:
    """Pair uses with nodes that were made meanwhile, or by another thread then."""
    ordered = list(dict.fromkeys(nodes)) if uses else []
    ordered.sort(key=lambda node: node._sequence_nr())
    numbers = [node._sequence_nr() for node in ordered]
    for use in uses if ordered else ():
        first, end = (bisect_left(numbers, x) for x in (use.since, use.until))
        for node in ordered[first:end]:
            yield use, node


def _before(use: Use) -> list[Node]:
    """List where the nodes of a use end: at its stand-ins, or a layer's inputs."""
    stand_ins = [c.stand_in.node for c in use.constants if c.stand_in]
    if stand_ins or use.owner is None:
        return stand_ins
    return [edge.node for edge in use.owner.input_edges if edge is not None]


class Inspection:
    """What the graph of a backward pass looks like.

    Attributes:
        roots: Where the backward pass begins.
        calls: Calls in it, and the node that produced their outputs.
        uses: Uses in it, and the node and its output number for each output.
        reached: The leaf tensors it reaches, and the nodes that use them past any use.
        meetings: Nodes at which samples have met.
        tangents: Nodes that computed tangents, in forward mode.
        separating: Calls of batch normalizations that :meth:`coupling` has found to
            normalize each sample by itself.
        nodes: All nodes, but those inside of uses.
    """

    def __init__(self, roots: Sequence[GradientEdge], extensions: Sequence[Any] = ()):
        """Inspect a graph.

        Args:
            roots: Where the backward pass begins.
            extensions: Extensions that are active. Quantities that go from module to
                module go also to those that are called on parameters alone.
                Default: none.
        """
        self.roots = roots
        self.calls: dict[Any, Node] = {}
        self._apart: dict[Any, list[Node]] = {}
        self.uses: dict[Use, dict[int, tuple[Node, int]]] = {}
        self.reached: dict[Tensor, list[Node]] = {}
        self.meetings: dict[Node, Mixed] = {}
        self.tangents: list[Node] = []
        self.separating: set[Any] = set()
        walking = [ext for ext in extensions if ext.walks_modules]
        self._only_walks = 0 < len(walking) == len(extensions)
        self._stand_ins: dict[Node, Use] = {}
        self._direct: dict[int, list[Use]] = {}  # uses without stand-in, by parameter
        self._insides: dict[Use, tuple[int, set[Node]]] = {}
        self._functions: dict[Node, set[Any]] = {}  # and the places of their constants
        self._passes = False  # whether nodes inside are uses, in place of one
        self._shared: list[Node] = []  # reached several times
        self._first: dict[Node, Node | None] = {}  # whence each was reached first
        self.nodes: list[Node] = []
        seen: set[Any] = set()
        queue: list[tuple[Node | None, Sequence[Any]]] = [(None, roots)]
        for node, parents in queue:  # which grows meanwhile
            for parent, number in self.ways(node, parents):
                behind = parent.next_functions
                if not behind and is_leaf(parent):
                    if parent.variable.requires_grad:  # or it was frozen since
                        users = self.reached.setdefault(parent.variable, [])
                        users += [node] if node else []
                    continue
                if parent in seen:
                    self._shared.append(parent)
                else:
                    seen.add(parent)
                    self._first[parent] = node
                    self.nodes.append(parent)
                    if parent.metadata:
                        self._note(parent, parent.metadata)
                    if type(parent) is not Together:
                        queue.append((parent, behind))
                if type(parent) is Together and (parent, number) not in seen:
                    seen.add((parent, number))  # not what else was returned
                    queue.append((parent, behind[number : number + 1]))
        if walking:
            self._note_calls_on_constants()
            take_whole(self, walking)
        self._find_losses()

    @property
    def losses(self) -> dict[Any, Node]:
        """Calls of losses, and the nodes that produced their outputs."""
        return {call: node for call, node in self.calls.items() if call.is_loss}

    def ways(
        self, node: Node | None, parents: Sequence[Any]
    ) -> Iterator[tuple[Node, int]]:
        """Go from a node to those behind it, but not by what a use is a use of.

        Args:
            node: The node, ``None`` for where the backward pass begins.
            parents: Its ``next_functions``, or the roots.

        Yields:
            Nodes, and the number of their output.
        """
        for parent, number, *_ in parents:
            if parent is None:
                continue
            use = self._stand_ins.get(parent)
            if use is not None and self._is_inside(node, use):
                continue  # the way of a use
            if self._functions and (parent, number) in self._functions.get(node, ()):
                continue  # that of a function's constant
            yield parent, number

    def _is_inside(self, node: Node | None, use: Use) -> bool:
        """Tell whether a node that takes one of a use's constants is part of it."""
        outputs, below = [x for x, _ in self.uses[use].values()], node
        before = _before(use)
        while below is not None and below not in outputs:
            if below in before:
                return False
            below = self._first.get(below)
        return below is not None or node in self.inside(use)

    def inside(self, use: Use) -> set[Node]:
        """Find the nodes of a use: those on the ways from what it returned.

        Others may have such numbers, too: each thread counts its own.

        Args:
            use: The use.

        Returns:
            The nodes.
        """
        outputs = self.uses[use]
        found = self._insides.get(use)
        if found is None or found[0] < len(outputs):
            starts = [node for node, _ in outputs.values()]
            nodes = set(walk(starts, since=use.since, without=_before(use)))
            self._insides[use] = found = len(outputs), nodes
        return found[1]

    def _find_losses(self) -> None:
        """Go without losses that others' predictions are made of: parts of a model."""
        losses = list(self.losses)
        numbers = [c for c in losses if not (c.is_function or is_loss(c.loss_module))]
        for loss in losses if numbers and len(losses) > 1 else ():
            behind = set(walk(e.node for e in loss.input_edges[:1] if e is not None))
            for call in numbers:
                call.is_loss &= self.calls[call] not in behind

    def _note(self, node: Node, metadata: dict[str, Any]) -> None:
        for number, index, owner in metadata.get(ENTRIES, ()):
            if owner.is_use and owner.is_passed:
                self._passes = True
                continue
            if not owner.is_use:
                self.calls.setdefault(owner, node)
                if owner.is_apart:
                    self._apart.setdefault(owner, []).append(node)
                continue
            if owner not in self.uses:
                self.uses[owner] = {}
                for constant in owner.constants:
                    if owner.is_function:
                        taken = self._functions.setdefault(node, set())
                        taken.add(constant.place)
                    elif constant.stand_in is not None:
                        self._stand_ins[constant.stand_in.node] = owner
                    else:
                        self._direct.setdefault(id(constant.leaf), []).append(owner)
            self.uses[owner][index] = (node, number)
        if MEETING in metadata:
            self.meetings[node] = metadata[MEETING]
        if TANGENT in metadata:
            self.tangents.append(node)

    def _note_calls_on_constants(self) -> None:
        """Note calls that constants of uses come from: of modules on parameters."""
        constants = [constant for use in self.uses for constant in use.constants]
        sources = [c.source.node for c in constants if c.source is not None]
        for entry, node in targets_below(sources):
            if not entry.owner.is_use:
                self.calls.setdefault(entry.owner, node)

    @cached_property
    def names(self) -> set[str]:
        """Names of the nodes."""
        return {type(node).__name__ for node in self.nodes}

    def nodes_of(self, call: Any) -> list[Node]:
        """List the nodes of those of a call's outputs that are used outside of it.

        Args:
            call: The call.

        Returns:
            The nodes; a single one where all outputs are on one.
        """
        nodes = self._apart.get(call, [self.calls[call]])
        if len(nodes) < 2:
            return nodes
        roots, found = [edge.node for edge in self.roots], []
        for node in nodes:  # one may be computed from another, and nothing else be
            if node in walk(roots, without=[x for x in nodes if x is not node]):
                found.append(node)
        return found

    def check_outputs(self, call: Any, extensions: Sequence[Any]) -> None:
        """Refuse rules for a call where gradients do not arrive at once.

        Args:
            call: The call.
            extensions: The active extensions.

        Raises:
            NotImplementedError: If there are such rules.
        """
        exts = [
            ext
            for ext in extensions
            if ext.is_customized(call.module)
            or ext.walks_modules
            and not (call.is_transparent or call.is_part)
        ]
        if exts and len(self.nodes_of(call)) > 1:
            text = {"exts": names_of(exts), "module": name_module(call.module)}
            raise NotImplementedError(APART.format(**text))

    def outputs(self, outermost: bool = False) -> list[Origin]:
        """Find the outputs of extended models that no other module has gone on from.

        Args:
            outermost: Whether those of modules inside of others don't count, where
                nothing is known of these others' outputs. Default: ``False``.

        Returns:
            The outputs.
        """
        found: list[Origin] = []
        below: set[Node] = set()
        of_losses = {ref() for loss in self.losses for ref in loss.inside}
        views = {x.metadata[VIEW]: (x, 0) for x in self.nodes if VIEW in x.metadata}
        for call, node in self.calls.items():
            is_output = call.placements is not None
            is_output &= call.is_outermost or not outermost
            if not is_output or call in of_losses or node in below:
                continue
            nodes = self.nodes_of(call)
            below.update(walk(nodes))
            for own, entry in [(x, e) for x in nodes for e in entries_of(x)]:
                if entry.owner is call:
                    # a use may be behind the view that was returned, see `_attach`
                    edge = GradientEdge(*views.get(call, (own, entry.output_nr)))
                    index = entry.index
                    what = call.placements[index], call.output_shapes[index]
                    found.append(Origin(call, edge, *what))
        return found

    @property
    def turns(self) -> list[GradientEdge]:
        """Where calls and uses have their turn, if autograd leads there."""
        places = list(self.calls.values())
        for outputs in self.uses.values():
            places += [node for node, _ in outputs.values()]
        places = places or [edge.node for edge in self.roots]
        places = [node for node in places if not is_leaf(node)]
        return [GradientEdge(node, 0) for node in dict.fromkeys(places)]

    def guard_hooks(self, extensions: Sequence[Any]) -> None:
        """Guard users' hooks in the graph that quantities are computed from.

        Args:
            extensions: The active extensions.
        """
        for outputs in self.uses.values():
            for node, _ in outputs.values():  # gradients of parameters come out of it
                guard_node(node, node.register_hook, True)
        if not any(map(is_second_order, extensions)):
            return
        tensors: list[Any] = []
        for call in self.calls:
            tensors += call.arguments if call.is_loss else call.tensors()
        for x in tensors:
            hooks = getattr(x, "_backward_hooks", None) or {}  # the tensor's very own
            for key, hook in hooks.items():
                if not isinstance(hook, Guarded):
                    hooks[key] = guard(x, hook, False)
        for node in self.nodes:
            guard_node(node, node.register_prehook)
            guard_node(node, node.register_hook)

    @property
    def is_seen(self) -> bool:
        """Whether a user sees gradients on their way, when hooks are guarded.

        Then nodes have hooks, or tensors do, or such that retain their gradient, as far
        as these are known.
        """
        if any(SEEN in node.metadata for node in self.nodes):
            return True
        tensors = [x for call in self.calls for x in call.tensors()]
        return any(x._backward_hooks or x.retains_grad for x in tensors)

    @cached_property
    def _taken_whole(self) -> dict[Any, set[Node]]:
        """Nodes inside of calls that rules of modules differentiate as a whole."""
        found = {}
        for call in self.calls if self._only_walks else ():
            if not (call.is_loss or call.is_transparent):
                found[call] = nodes_inside(self, call)
        return found

    def _is_taken_whole(self, param: Tensor, node: Node) -> bool:
        """Tell whether the rule for a module sees what takes a parameter of its."""
        return any(
            node in inside and any(param is p for p in call.parameters.values())
            for call, inside in self._taken_whole.items()
        )

    @cached_property
    def outside(self) -> dict[Tensor, list[Node]]:
        """Nodes that use a parameter where nothing has seen it."""
        found: dict[Tensor, list[Node]] = {}
        for param, nodes in self.reached.items():
            pairs = _numbered(nodes, self._direct.get(id(param), ()))
            # what came before is not part of a use, though that goes on from it
            taken = {node for use, node in pairs if self._is_inside(node, use)}
            nodes = [x for x in nodes if x not in taken and self._takes(x, param)]
            if nodes:
                found[param] = nodes
        for node in self.nodes if self._functions else ():
            for parent, number in node.next_functions:
                if parent not in self._functions or is_noted(parent, number):
                    continue
                if takes_any(GradientEdge(parent, number), self._functions[parent]):
                    for param in leaves_behind(parent):  # no turn is at this output
                        found.setdefault(param, []).append(node)
        for _, constant, node in self.entered():
            leaf, source = constant.leaf, constant.source
            for param in [leaf] if source is None else leaves_behind(source.node):
                found.setdefault(param, []).append(node)
        if self._only_walks:
            unseen = {
                param: [x for x in nodes if not self._is_taken_whole(param, x)]
                for param, nodes in found.items()
            }
            found = {param: nodes for param, nodes in unseen.items() if nodes}
        return found

    def _takes(self, node: Node, param: Tensor) -> bool:
        """Tell whether what is used of a node depends on a parameter that it takes."""
        leaves = [x for x in node.next_functions if x[0] and is_leaf(x[0])]
        places = [x for x in leaves if x[0].variable is param]
        used = [x for y in self.nodes for x in y.next_functions if x[0] is node]
        used += [root[:2] for root in self.roots if root.node is node]
        return any(takes_any(GradientEdge(*x), places) for x in dict.fromkeys(used))

    @cached_property
    def data_nodes(self) -> set[Node]:
        """Nodes of the terms that data enter, without those of a regularizer."""
        of_all = additive_terms(self.roots, True, of_numbers=False)[0]
        terms = [
            term
            for term in of_all
            if any(x.owner.is_use or x.owner.is_loss for x, _ in targets_below([term]))
        ]
        # of nothing but a derivative of a model, its input tells, as of one that goes
        # through the inside of a layer
        if self._passes or not terms:
            terms += [x for x in of_all if any(map(_is_given, walk([x])))]
        queue = list(dict.fromkeys(terms))
        seen = set(queue)
        for node in queue:  # which grows meanwhile
            for parent, _ in self.ways(node, node.next_functions):
                if parent not in seen:
                    seen.add(parent)
                    queue.append(parent)
        return seen

    def entered(self) -> Iterator[tuple[Use, Any, Node]]:
        """Find constants that are used by way of the inside of a use, too.

        A derivative of the network, computed with ``create_graph=True``, goes on from
        what operations have saved.

        Yields:
            Uses, constants of theirs, and the nodes that use these.
        """
        entered: dict[Node, list[Use]] = {}
        for use, node in _numbered(self._shared, self.uses):
            outputs = [x for x, _ in self.uses[use].values()]
            if node not in outputs and node in self.inside(use):
                entered.setdefault(node, []).append(use)
        for node in self.nodes if entered else ():
            for parent, _ in node.next_functions:
                for use in entered.get(parent, ()):
                    if node in self.inside(use):
                        continue
                    # of several maps inside of a cell, all constants come first
                    first = min(c.node._sequence_nr() for c in use.constants)
                    behind = set(walk([parent], since=min(first, use.since)))
                    for constant in use.constants:
                        if constant.node in behind:
                            yield use, constant, node

    def uses_outside(self, known: set[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Sort the parameters that are used where nothing has seen it.

        Args:
            known: Identities of the parameters that matter.

        Returns:
            Those used in terms of their own, like a regularizer, and those used for
            anything else.
        """
        separate: list[Tensor] = []
        entangled: list[Tensor] = []
        for param, nodes in self.outside.items():
            if id(param) in known:
                mixed = not self.data_nodes.isdisjoint(nodes)
                (entangled if mixed else separate).append(param)
        return separate, entangled

    def coupled(self) -> list[Mixed]:
        """Find operations in which samples have met, other than sums of a loss's terms.

        Returns:
            What they were.
        """
        if not self.meetings:
            return []
        terms, passed = additive_terms(self.roots, through_losses=True)
        harmless = {*terms, *passed}
        return [
            met
            for node, met in self.meetings.items()
            if not (node in harmless and adds_up(node, met))
        ]

    @property
    def allows_inputs(self) -> bool:
        """Whether ``backward(inputs=...)`` is possible; not with some checkpoints."""
        return "CheckpointFunctionBackward" not in self.names

    def find_moved(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Find leaves that have another node in the graph than they would have now.

        Args:
            leaves: Some of those that the graph reaches.

        Returns:
            Those that were given another type or device in place after they were used.
        """
        now = {get_gradient_edge(leaf).node: leaf for leaf in leaves}
        for node in self.nodes if now else ():
            for behind, _ in node.next_functions:
                now.pop(behind, None)
        return list(now.values())

    @cached_property
    def terms(self) -> dict[Node, None]:
        """Nodes of the terms of what is differentiated."""
        return dict.fromkeys(additive_terms(self.roots)[0])

    def is_inside(self, loss: Any, later: Sequence[Any]) -> bool:
        """Tell whether a loss is a part of what is differentiated, and no term of it.

        Args:
            loss: Call of the loss.
            later: Calls of losses that come later in the forward pass.

        Returns:
            Whether more than a sum was made of it, if the model has called it as a
            function; or whether a loss of PyTorch was computed from it.
        """
        node = self.calls[loss]
        if loss.is_function or node in self.terms:
            return node not in self.terms
        known = [x for x in later if find_loss(x.module) is not GENERIC_LOSS]
        return node in walk([self.calls[x] for x in known])

    def coupling(self) -> Any:
        """Find a batch normalization that is not extended and couples samples.

        Those that are extended are asked when their turn comes.

        Returns:
            What it is called, ``None`` if there is none.
        """
        found = None
        for node in self.nodes if any("BatchNorm" in x for x in self.names) else ():
            name = type(node).__name__
            if "BatchNorm" not in name or is_users(node):
                continue
            shape = node._input_metadata[0].shape
            kept = "train" if "BackwardBackward" in name else "training"
            trains = getattr(node, f"_saved_{kept}", "NoTraining" not in name)
            owners = [entry.owner for entry in calls_at(node)]
            calls = [call for call in owners if isinstance(call.module, _BatchNorm)]
            # InstanceNorm normalizes a batch of one
            if not trains or not calls and (found or shape[0] == 1):
                continue
            if not _shares_channels(node):
                self.separating.update(calls)
            elif not calls:
                found = f"BatchNorm{max(1, len(shape) - 2)}d"
        return found


def _shares_channels(node: Node) -> bool:
    """Tell whether samples share a channel of what a node has normalized.

    Args:
        node: Node of a batch normalization.

    Returns:
        Whether they do, or might, as nobody knows where they are.
    """
    known = None if MEETING in node.metadata else explain_place(GradientEdge(node, 0))
    if known is None or known.n < 2:
        return True
    if isinstance(known.placement, Layout):
        return known.placement.axis != 1
    if not isinstance(known.placement, Tensor):
        return True
    numbers = known.placement.expand(tuple(node._input_metadata[0].shape))
    channels = numbers.movedim(1, 0).flatten(1)
    return not bool((channels == channels[:, :1]).all())


def _is_given(node: Node) -> bool:
    """Tell whether a node stands for data that a module was called with."""
    given = is_leaf(node) and GIVEN in node.metadata
    return given and not isinstance(node.variable, Parameter)
