"""What a backward pass looks for before it begins: is everything seen that matters?

Each way from the loss to a parameter must lead through a use, and samples must not have
met before it. Outside of extended modules nothing is watched, and what the derivative
of a network takes is no operand of anything: there, a node of the graph at which data
meets parameters is a use. Terms of the loss may belong to no sample, or have no known
curvature.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from backpack.core.layout import Layout, Mixed, reshaped, sample_numbers, spans
from backpack.engine.backward.expressions import nodes_behind
from backpack.engine.backward.inspection import Inspection
from backpack.engine.backward.terms import adds_up, is_sum, is_term, tail_terms
from backpack.engine.nodes import graph
from backpack.engine.nodes.constants import CONSTANT, edge_of
from backpack.engine.nodes.met import refuse
from backpack.engine.nodes.uses import Use, is_noted
from backpack.engine.nodes.vjp import is_function, operation_of
from backpack.engine.samples.gaps import (
    IN_PLACE,
    differ,
    explain_parents,
    explain_place,
    makes_rows,
    note_at,
)
from backpack.engine.samples.probes import Known, signed
from backpack.engine.samples.separable import is_separable
from backpack.utils.disable import PLAIN
from backpack.utils.errors import batch_norm_raise_error_if_train, warn_user
from backpack.utils.hooks import EXTENDED, message, modules_in, names_of, parameters_of
from backpack.utils.state import may_look, out_of_sight

NOT_EXTENDED_BATCH_NORM = (
    "A {module} in training mode, which is not extended, or is a function, couples the "
    "samples of the batch, so that quantities of individual samples are not defined. "
    "Call `.eval()` on it (`training=False` of `batch_norm`), or replace it with a "
    "layer that treats samples separately."
)
SEPARATE_USE = (
    "Parameters are also used in terms of the loss that belong to no sample, like a "
    "regularizer or predictions that no input enters: {names}. Their individual "
    "gradients do not sum to the gradient, and quantities do not contain those terms. "
    "Add what they contribute by hand, or differentiate them in a backward pass of "
    "their own, outside of the context."
)
OUTSIDE_USE = (
    "Parameters are used where extensions can't see it: {names}. Their quantities "
    "would be wrong. {way}"
)
NOT_WATCHED = (
    "Use a parameter only on what operations of PyTorch make of the inputs while an "
    "extended module is being called: NumPy, numbers in Python and `torch.jit` hide "
    "that (do it before, and hand over what comes out), and so do transforms of "
    "`torch.func` around the call (let `forward` call them), and those that "
    "differentiate a recurrent layer (use `torch.autograd.grad`), or by inputs that "
    "need no gradient (`input.requires_grad_()` lets them, `create_graph=True` keeps "
    "the way). Extend the model again if a layer has lost its hooks. And let the "
    "inputs enter the prediction, if only by `+ 0 * input`: what no input enters "
    "belongs to no sample (add a regularizer to the loss, not in `forward`)."
)
WALKS = " Extensions that go from module to module need them in extended modules."
DERIVATIVE = (
    "Use them on inputs while an extended module is being called (let its `forward` "
    "call what does). If that is a derivative of the network, differentiate it outside "
    "of the context: autograd does not say on which inputs it depends, as where maxima "
    "or `where` choose the piece of a function."
)
STEP = (
    "What is made of them contains a derivative of the network: take a step that the "
    "loss is differentiated through, as in meta-learning, inside of "
    "`backpack.disable()`."
)
TANGENT = (
    "They enter tangents of forward mode: compute these before, and hand over what "
    "comes out, or differentiate by `torch.autograd.grad`."
)
MISSING_TERM = (
    "Terms of the loss come from no extended loss module ({nodes}), so that their "
    "curvature is missing in second-order quantities. Compute them with loss modules, "
    "and extend these: `lossfunc = extend(lossfunc)`."
)
MODIFIED_LOSS = (
    "The loss was modified after {module}: the gradient at its output is {factor}, not "
    "1. Second-order quantities contain this factor, and nothing else of what was done "
    "to the loss. If they should not, run the backward pass from the loss module's "
    "output itself."
)
MAYBE_MODIFIED = (
    "The backward pass does not begin at the output of {module}. Second-order "
    "quantities contain the gradient there, which would have to be waited for to be "
    "named, and nothing else of what was done to the loss. If it is not 1 and should "
    "be, run the backward pass from the loss module's output itself."
)
REENTRANT = (
    "A part of the model runs inside `checkpoint(..., use_reentrant=True)`, which "
    "hides what it computes. Use `checkpoint(..., use_reentrant=False)`."
)

COMPLEX = (
    "{ext} is not defined for parameters that are complex numbers: {names}. Make them "
    "real parameters of shape [*, 2], and use `torch.view_as_complex(parameter)`: real "
    "and imaginary parts have quantities of their own then."
)
NESTED_PARAMETERS = (
    "{ext} is not defined for parameters that are nested tensors, which have no shape: "
    "{names}. Use dense parameters: a padded one, or one for each component."
)


def check_uses(
    inspection: Inspection,
    uses: Sequence[Use],
    params: Sequence[Tensor],
    extensions: Sequence[Any],
) -> list[Tensor]:
    """Refuse a graph in which parameters are not seen, or samples not separate.

    Args:
        inspection: What the graph looks like.
        uses: The uses in it.
        params: Their parameters.
        extensions: Extensions for which all uses of a parameter have to be seen.

    Returns:
        Parameters that are also used in terms of the loss that belong to no sample.

    Raises:
        NotImplementedError: If quantities would be wrong.
    """
    separating = [ext for ext in extensions if ext.separates_samples]
    if separating:
        _check_kinds(inspection, params, separating)
    known = set(map(id, params))
    separate, outside = inspection.uses_outside(known)
    behind = [p for node in inspection.tangents for p in graph.leaves_behind(node)]
    steps, others = _behind_uses(uses)
    entangled = {
        DERIVATIVE: outside,
        STEP: steps,
        TANGENT: [param for param in dict.fromkeys(behind) if id(param) in known],
    }
    if separating and params and not (others or any(entangled.values())):
        _require_apart(inspection, separating)
    unseen = never_seen(inspection, known)
    if all(ext.walks_modules for ext in extensions):
        unseen = [param for param in unseen if param in inspection.outside]
    alone = _regularized(inspection, unseen)
    unseen = [param for param in unseen if param not in alone]
    entangled[NOT_WATCHED] = [*unseen, *others]
    way = next((way for way, found in entangled.items() if found), None)
    if way is not None:
        for met in () if params else inspection.coupled():  # before any parameter
            refuse(names_of(extensions), met, "any parameter")
        says = _outside(inspection, entangled[way], way, extensions)
        raise NotImplementedError(says)
    separate += alone
    if separate:
        warn_user(SEPARATE_USE.format(names=graph.describe(separate)))
    return separate


def _check_kinds(
    inspection: Inspection, params: Sequence[Tensor], extensions: Sequence[Any]
) -> None:
    """Refuse parameters, and parts of a model, that have no individual quantities."""
    leaves = (*inspection.reached, *params)
    nested = [x for x in leaves if x.is_nested and isinstance(x, Parameter)]
    if nested:
        text = {"ext": names_of(extensions), "names": graph.describe(nested)}
        raise NotImplementedError(NESTED_PARAMETERS.format(**text))
    numbers = [param for param in params if param.dtype.is_complex]
    real = [ext for ext in extensions if not ext.takes_complex]
    if numbers and real:
        text = {"ext": names_of(real), "names": graph.describe(numbers)}
        raise NotImplementedError(COMPLEX.format(**text))
    if not inspection.allows_inputs:
        raise NotImplementedError(f"{names_of(extensions)}: {REENTRANT}")
    module = inspection.coupling()
    if module is not None:
        message = NOT_EXTENDED_BATCH_NORM.format(module=module)
        if any(ext.refuses_coupled_samples for ext in extensions):
            raise NotImplementedError(message)
        warn_user(message)


def _require_apart(inspection: Inspection, extensions: Sequence[Any]) -> None:
    """Refuse a graph in which samples have met."""
    refused = [*inspection.coupled(), *_met_in_tails(inspection)]
    refused.sort(key=lambda met: not met.is_of_inputs)
    if refused and not refused[0].is_of_inputs and is_separable(inspection.roots):
        refused = []
    before = [call.placement for call in inspection.losses]
    for met in (*refused, *[met for met in before if isinstance(met, Mixed)]):
        refuse(names_of(extensions), met, "any parameter")


def check_batch_norm(turn: Any, raise_error: bool = True) -> None:
    """Refuse, or warn about, a batch normalization that couples samples.

    Args:
        turn: Its call's turn.
        raise_error: Whether to raise an error. A warning is issued otherwise.
    """
    if turn.call not in turn.backward_pass.inspection.separating:
        batch_norm_raise_error_if_train(turn.module, raise_error)


def _outside(
    inspection: Inspection, params: list[Tensor], way: str, extensions: Sequence[Any]
) -> str:
    """Say which parameters are used where nobody sees it, by what, and the way out."""
    nodes = [x for p in params for x in inspection.outside.get(p, ())]
    by = list(dict.fromkeys(map(graph.name_of, nodes)))[:3]
    if way is NOT_WATCHED and any("backward" in name for name in by):
        way = DERIVATIVE
    if way is DERIVATIVE and "`cpp_function`" in by:  # pieces that `torch.jit` has made
        way = NOT_WATCHED
    if any(ext.walks_modules for ext in extensions):
        way += WALKS
    names = graph.describe(params) + (f" (by {', '.join(by)})" if by else "")
    return OUTSIDE_USE.format(names=names, way=way)


def _behind_uses(uses: Sequence[Use]) -> tuple[list[Tensor], list[Tensor]]:
    """Find parameters of expressions behind which there are uses.

    Args:
        uses: The uses of a backward pass.

    Returns:
        Those of tensors in parameters' places, which contain a derivative of the
        network; and those of others, whose derivatives by samples are zero.
    """
    constants = [constant for use in uses for constant in use.constants]
    sources = {c.source[:2]: c.source for c in constants if c.source}
    steps: dict[int, Tensor] = {}
    others: dict[int, Tensor] = {}
    for source in sources.values():
        behind = nodes_behind(source)
        if any(map(graph.has_use, behind)):
            leaves = graph.leaves_among(behind)
            leaves = [x for x in leaves if isinstance(x, Parameter)] or leaves
            in_place = any(x.metadata.get(CONSTANT) == IN_PLACE for x in behind)
            (steps if in_place else others).update({id(x): x for x in leaves})
    return list(steps.values()), list(others.values())


def _regularized(
    inspection: Inspection, params: Sequence[Tensor]
) -> dict[Tensor, None]:
    """Find parameters that are only used after the model, where no data enter.

    What is hidden from us inside of a model has a node before the model's outputs.
    """
    calls = inspection.calls.items()
    outputs = [x for call, x in calls if call.is_outermost and not call.is_loss]
    numbers = [x._sequence_nr() for x in outputs if not graph.is_leaf(x)]
    last = max(numbers, default=None)
    found: dict[Tensor, None] = {}
    for param in params if last is not None else ():
        nodes = inspection.outside.get(param, [])
        after = bool(nodes) and all(last < node._sequence_nr() for node in nodes)
        if after and inspection.data_nodes.isdisjoint(nodes):
            found[param] = None
    return found


def never_seen(inspection: Inspection, known: set[int]) -> list[Tensor]:
    """Find parameters of models that were watched, none of whose uses were.

    The data they were used on may have come from where nothing was seen. What ran
    inside of ``disable`` is no such use.

    Args:
        inspection: What the graph looks like.
        known: Identities of parameters that have uses.

    Returns:
        The parameters.
    """
    reached = {id(p): p for p in inspection.reached if id(p) not in known}
    if not reached:
        return []
    calls = [c for c in inspection.calls if not (c.released or c.is_loss)]
    called = {id(module) for c in calls for module in c.module.modules()}
    # the graph of a derivative may have no more of a call than what it was called with
    for given in (x for x in inspection.reached if not isinstance(x, Parameter)):
        modules = edge_of(given).node.metadata.get(graph.GIVEN, {})
        called.update(id(ref()) for ref in modules.values())
    found: dict[int, Tensor] = {}
    for root in list(EXTENDED):
        modules = modules_in(root)
        params = parameters_of([x for x in modules if x not in PLAIN])
        # of a derivative, the graph has uses, and no call of the model
        watched = not known.isdisjoint(map(id, params))
        if watched or not called.isdisjoint(map(id, modules)):
            found.update({id(p): reached[id(p)] for p in params if id(p) in reached})
    # and what was given in parameters' places, or is none
    taken = [p for p in reached.values() if CONSTANT in edge_of(p).node.metadata]
    return list({**found, **{id(p): p for p in taken}}.values())


Places = dict[Node, dict[int, list[Node]]]


@out_of_sight
def note_inside(inspection: Inspection) -> bool:
    """Take apart layers of several steps that a derivative of the network goes through.

    It takes what they have computed inside, as of a recurrent layer, at each step.

    Args:
        inspection: What the graph looks like.

    Returns:
        Whether there are any, for which the graph has to be inspected again.
    """
    entered = {(use, node) for use, _, node in inspection.entered()}
    for use, node in entered:
        inside = inspection.inside(use)
        places = [x for x in graph.parents(node) if x.node in inside]
        # else, what takes a constant as well is a use itself
        use.is_passed |= all(explain_place(place) is not None for place in places)
    return any(use.is_passed for use, _ in entered)


@out_of_sight
def note_unseen(inspection: Inspection, params: list[Tensor]) -> bool:
    """Record nodes as uses that take parameters where nothing has seen it.

    Args:
        inspection: What the graph looks like.
        params: Parameters that have uses.

    Returns:
        Whether there are any, for which the graph has to be inspected again.
    """
    wanted = set(map(id, params))
    wanted.update(map(id, never_seen(inspection, wanted)))
    outside = [nodes for p, nodes in inspection.outside.items() if id(p) in wanted]
    if not outside:
        return False
    seen = dict.fromkeys(sum(outside, []))
    queue = [node for node in seen if node in inspection.data_nodes]
    places: Places = {}  # who takes which outputs
    for child in inspection.nodes:
        for parent, number in inspection.ways(child, child.next_functions):
            if not graph.is_leaf(parent):
                places.setdefault(parent, {}).setdefault(number, []).append(child)
    for edge in inspection.roots:
        places.setdefault(edge.node, {}).setdefault(edge.output_nr, [])
    found = False
    for node in queue:  # which grows meanwhile
        for number, children in places.get(node, {}).items():
            edge = GradientEdge(node, number)
            known = explain_place(edge)
            if known is None:  # it depends on parameters alone
                of_data = filter(inspection.data_nodes.__contains__, children)
                further = [x for x in of_data if x not in seen]
                seen.update(dict.fromkeys(further))
                queue += further
            elif not is_noted(node, number):
                shape = graph.shape_at(edge)
                for source in graph.parents(node):
                    same = graph.shape_at(source) == shape
                    if same and _is_matched(source, known, places):
                        found |= makes_rows(*_made_of(source, known, places))
                found |= note_at(edge, known)
    return found


def _is_matched(edge: GradientEdge, known: Known, places: Places) -> bool:
    """Tell whether all that is made of a constant matches entries of its with samples.

    Args:
        edge: Where the constant sits in the graph.
        known: Where the samples are that its entries meet.
        places: What is made of each output of each node.

    Returns:
        Whether they are there in all results, each entry by entry, and in what is made
        of other views of it.
    """
    children = places.get(edge.node, {}).get(edge.output_nr, ())
    for node in children:
        own = GradientEdge(node, 0)
        found = explain_place(own)
        if found is None:
            below = _seen_through(node, own, edge, known)
            if below is None or not _is_matched(own, below, places):
                return False
        elif not graph.is_pointwise(node) or not _is_spread(known, edge, found, own):
            return False
    return bool(children)


def _is_spread(known: Known, at: GradientEdge, found: Known, to: GradientEdge) -> bool:
    """Tell whether an operand's samples are the result's, if broadcast to that."""
    before, shape = graph.shape_at(at), graph.shape_at(to)
    if before == shape or found.n != known.n:
        return found.n == known.n and not differ([found, known])
    if isinstance(found.placement, Mixed):
        return False
    device = torch.device("cpu")
    own = sample_numbers(known.placement, before, known.n, device)
    return torch.equal(
        own.expand(shape), sample_numbers(found.placement, shape, found.n, device)
    )


def _seen_through(
    node: Node, to: GradientEdge, at: GradientEdge, known: Known
) -> Known | None:
    """Follow rows of a constant through a node that takes nothing else.

    Args:
        node: The node.
        to: Its result, or its operand.
        at: The other one of these.
        known: Which sample each entry meets, there.

    Returns:
        The same of the result, or of the operand; ``None`` if entries are others.
    """
    before, shape = graph.shape_at(at), graph.shape_at(to)
    alone = len(graph.parents(node)) == 1
    if alone and graph.is_pointwise(node) and before == shape:
        return known
    if type(node).__name__ == "SliceBackward0":
        sliced = signed(node._saved_dim) % len(shape)
        kept = isinstance(known.placement, Layout) and known.placement.axis != sliced
        return known if kept else None
    if type(node).__name__ not in graph.SAME_ORDER or before.numel() != shape.numel():
        return None
    return Known(reshaped(known.placement, before, shape, known.n), known.n)


def _made_of(
    edge: GradientEdge, known: Known, places: Places
) -> tuple[GradientEdge, Known]:
    """Go to what a constant is a view of, if all that is made of that is matched.

    Args:
        edge: Where the constant sits in the graph.
        known: Which sample each of its entries meets.
        places: What is made of each output of each node.

    Returns:
        The place, and the same of its entries.
    """
    parents = graph.parents(edge.node)
    if len(parents) == 1:
        above = _seen_through(edge.node, parents[0], edge, known)
        if above is not None and _is_matched(parents[0], above, places):
            return _made_of(parents[0], above, places)
    return edge, known


def terms_without_loss(inspection: Inspection) -> list[str]:
    """Find terms next to those of extended losses, of which these say nothing.

    Args:
        inspection: What the graph looks like.

    Returns:
        Names of the nodes; none if there is no loss.
    """
    terms = inspection.terms
    losses = [t for t in terms if any(e.owner.is_loss for e in graph.entries_of(t))]
    return [
        type(term).__name__
        for term in (terms if losses else ())
        if term not in losses and any(map(graph.has_use, graph.walk([term])))
    ]


def warn_of_factor(
    inspection: Inspection, loss: Any, factor: Tensor, begins_with_one: bool
) -> None:
    """Warn of a modified loss, where it is known, or likely.

    Args:
        inspection: What the graph looks like.
        loss: Call of the loss.
        factor: Gradient at its output.
        begins_with_one: Whether it is one where the backward pass begins.
    """
    if may_look(factor):
        if factor != 1.0:
            given = {"module": loss.module, "factor": float(factor)}
            warn_user(message(MODIFIED_LOSS, **given))
        return
    begins = begins_with_one and not any(x._backward_hooks for x in loss.tensors())
    if not (begins and is_term(inspection.calls[loss], inspection.roots)):
        warn_user(message(MAYBE_MODIFIED, module=loss.module))


def leads_past_losses(inspection: Inspection) -> bool:
    """Tell whether gradients at uses are not those of extended losses alone.

    Args:
        inspection: What the graph looks like.

    Returns:
        Whether a way leads to one that does not go through such a loss.
    """
    losses = set(inspection.losses.values())
    nodes = graph.walk([edge.node for edge in inspection.roots], without=losses)
    return any(map(graph.has_use, nodes))


def _met_in_tails(inspection: Inspection) -> list[Mixed]:
    """Find where samples have met in the terms of a loss that no module computes."""
    placements: list[Any] = []
    for node in tail_terms(inspection.roots):
        behind = explain_parents(node)
        placements += [known.placement for known in behind]
        if not any(known.n > 1 for known in behind):
            continue
        known = None if is_sum(node) else explain_place(GradientEdge(node, 0))
        picks = known is not None and not isinstance(known.placement, Mixed)
        if picks or not (is_sum(node) or graph.is_scalar(node)):
            placements.append(None if known is None else known.placement)
        elif _brings_together(node, behind):
            # nobody knows the parts of a function of one's own, but those seen inside
            own = is_function(node)
            if not (own and known is not None and adds_up(node, known.placement)):
                placements.append(Mixed(graph.name_of(node), not own))
    return [p for p in placements if isinstance(p, Mixed)]


def _brings_together(node: Node, behind: Sequence[Known]) -> bool:
    """Tell whether samples meet in the operation with which a term of a loss ends."""
    if not is_sum(node):
        return True
    name = operation_of(node)
    if name not in ("MultiMarginLoss", "MultilabelMarginLoss", "CtcLoss"):
        return differ(behind)
    parent, number = node.next_functions[0]
    shape = parent._input_metadata[number].shape
    compared = [-1, -len(shape)] if name == "CtcLoss" else [-1]  # classes, and time
    return any(spans(behind[0].placement, shape, axis) for axis in compared)
