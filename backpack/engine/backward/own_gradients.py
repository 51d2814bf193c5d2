"""Which gradients autograd accumulates, and which it leaves out.

It leaves out all of them where nobody wants gradients, or an extension has something
else to accumulate, and some whose gradient costs less here than there. First-order
extensions form the individual gradients of layers whose weight many positions share. To
add these up on the way costs less than what autograd does for the same result: multiply
all inputs with all cotangents once more. Such a gradient is handed to autograd in the
turn of its use, when it would have arrived anyway: by a backward pass of its own
through nothing but the node that accumulates it, so that all hooks run.

The backward pass is run towards the leaves that are not left out, and to the nodes at
which there are turns, where nothing is accumulated.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Iterable, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from backpack.engine.backward.inspection import Inspection
from backpack.engine.backward.parameters import Group
from backpack.engine.nodes.graph import describe, will_run
from backpack.utils.parallel import is_parallel, refuse_gathered, refuse_late
from backpack.utils.state import State
from backpack.utils.types import accumulator_dtype

NOT_ALL = (
    "{who}({option}): this backward pass accumulates no gradients, or those of some "
    "parameters only, or such that can be differentiated, or was not started from "
    "Python. Call `loss.backward()`, without `inputs` and `create_graph`."
)
REENTRANT = (
    "{who}({option}): a part of the model runs inside `checkpoint(..., "
    "use_reentrant=True)`, which needs the gradients of its parameters. Use "
    "`checkpoint(..., use_reentrant=False)`."
)
PENALTY = (
    "{who}({option}): parameters are also used in terms of the loss that belong to no "
    "sample, like a regularizer: {names}. Differentiate these in a backward pass of "
    "their own, outside of the context; gradients add up."
)
MOVED = (
    "{who}({option}): autograd would accumulate no gradient of {names}, which got "
    "another type or device after the forward pass. Move the model before it."
)


class Accumulated(NamedTuple):
    """Which gradients autograd accumulates.

    Attributes:
        own: Identities of parameters whose gradient is formed here, in their turn.
        reached: Identities of all leaves of the graph, if some are left out.
        inputs: What autograd shall differentiate with respect to: leaves, and places at
            which nothing is accumulated; ``None`` for what it would do by itself.
    """

    own: AbstractSet[int] = frozenset()
    reached: set[int] | None = None
    inputs: list[Any] | None = None

    def reaches(self, param: Tensor) -> bool:
        """Tell whether the backward pass that is running reaches a parameter.

        Args:
            param: The parameter.

        Returns:
            Whether it does, or would do if the parameter were not left out.
        """
        if self.reached is None:
            return will_run(get_gradient_edge(param).node)
        return id(param) in self.reached


def choose(
    current: State,
    groups: Sequence[Group],
    inspection: Inspection,
    accumulates: bool,
    of_all: bool,
    creates_graph: bool,
) -> Accumulated:
    """Choose which gradients autograd accumulates.

    Args:
        current: What is active.
        groups: The parameters of the backward pass.
        inspection: What its graph looks like; empty if nothing is to be done in it.
        accumulates: Whether it accumulates gradients.
        of_all: Whether these are those of all leaves.
        creates_graph: Whether what it computes can be differentiated.

    Returns:
        The choice.

    Raises:
        NotImplementedError: If the user's choice is not possible.
    """
    replacing = [ext for ext in current.active_exts if ext.replaces_gradient]
    own, plain = set(), accumulates and of_all and not creates_graph
    chosen = replacing or not current.gradient
    if plain and not (chosen or current.check):
        own = find_own(groups, inspection, current.active_exts)
    if not (own or chosen):
        return Accumulated()
    params = {id(p): p for group in groups for p in group.params}
    if chosen:
        text = {"who": "backpack", "option": "gradient=False"}
        if replacing:
            who = type(replacing[0]).__name__
            text = {"who": who, "option": "replace_grad=True"}
        elif not accumulates:
            return Accumulated()  # torch.autograd.grad
        possible = plain if replacing else of_all
        if not (inspection.roots and possible):
            raise NotImplementedError(NOT_ALL.format(**text))
        if not inspection.allows_inputs:
            raise NotImplementedError(REENTRANT.format(**text))
        refuse_late("{who}({option})".format(**text), inspection.nodes)
        outside = [p for p in inspection.outside if id(p) in params]
        if outside and replacing:
            text["names"] = describe(outside)
            raise NotImplementedError(PENALTY.format(**text))
    leaves = {id(x): x for x in inspection.reached if x.requires_grad}
    leaves.update({i: p for i, p in params.items() if p.requires_grad})
    left_out = own or (params if current.gradient else leaves)
    inputs = [x for number, x in leaves.items() if number not in left_out]
    moved = inspection.find_moved(inputs if chosen else leaves.values())
    if moved and chosen:
        raise NotImplementedError(MOVED.format(**text, names=describe(moved)))
    if moved:
        return Accumulated()
    return Accumulated(own, set(leaves), [*inputs, *inspection.turns])


def find_own(
    groups: Sequence[Group], inspection: Inspection, extensions: Sequence[Any]
) -> set[int]:
    """Find the parameters whose gradient costs less here than in autograd.

    Args:
        groups: The parameters of the backward pass.
        inspection: What its graph looks like.
        extensions: The active extensions.

    Returns:
        Identities of the parameters.
    """
    limits = [ext.adds_up_from for ext in extensions if ext.adds_up_from is not None]
    if not limits or is_parallel() or not inspection.allows_inputs:
        return set()
    found: set[int] = set()
    for group in groups:
        positions = dict.fromkeys(map(id, group.params), 0)
        for use, index in group.members:
            constant, operation = use.constants[index], use.operation
            if constant.leaf is None or operation is None:
                break
            positions[id(constant.leaf)] += operation.positions(constant.key, use.n)
        else:
            many = [p for p in group.params if positions[id(p)] >= min(limits)]
            modules = group.modules if many else []
            if any(ext.is_customized(x) for ext in extensions for x in modules):
                continue
            if many and not _keeps_digits(group, inspection):
                continue
            # penalties may use them, too
            free = [param for param in many if param not in inspection.outside]
            found.update(map(id, filter(_is_plain, free)))
    return found


def _keeps_digits(group: Group, inspection: Inspection) -> bool:
    """Tell whether nothing is computed in low precision, as under autocast."""
    places = [place for use in group.uses for place in inspection.uses[use].values()]
    types = {node._input_metadata[number].dtype for node, number in places}
    return all(accumulator_dtype(dtype) == dtype for dtype in types)


def _is_plain(param: Tensor) -> bool:
    """Tell whether a gradient may be formed here.

    It must keep its digits when it is added up, and nothing may change the parameter
    as soon as it has its gradient: the node of its use has not run yet. Hooks may wait
    for the gradients of several parameters in one and the same pass.
    """
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        return False
    if not param.requires_grad:  # frozen after the forward pass
        return False
    return accumulator_dtype(param.dtype) == param.dtype and not param.is_sparse


class _Gradients(Function):
    """A node of the graph that gives its gradients away: nobody else may own them.

    Otherwise, what accumulates gradients would copy each one.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *params: Tensor) -> Tensor:
        """Return a number that is computed from the parameters, as it were."""
        ctx.gradients = gradients
        return params[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, and forget them."""
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def hand_over(gradients: dict[Tensor, Tensor], who: str, calls: Iterable[Any]) -> None:
    """Hand all gradients, which autograd has left out, to it: in one and the same pass.

    Args:
        gradients: The gradients by parameter; empty afterwards, since what somebody
            else owns is copied.
        who: Which extension replaces gradients.
        calls: Records of the modules' calls in the pass that is over.

    Raises:
        NotImplementedError: If parameters are parts that processes have gathered.
    """  # noqa: DAR401
    refuse_gathered(f"{who}(replace_grad=True)", calls)
    params, values = list(gradients), list(gradients.values())
    gradients.clear()
    with torch.enable_grad():
        handed_over = _Gradients.apply(values, *params)
    torch.autograd.backward(handed_over)
