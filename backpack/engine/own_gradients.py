"""Parameters whose gradient costs less here than in autograd, which leaves it out.

First-order extensions form the individual gradients of layers whose weight many
positions share. To add these up on the way costs less than what autograd does for the
same result: multiply all inputs with all cotangents once more. The backward pass is
then run without these parameters, and their gradient is handed to autograd in the turn
of their use, when it would have arrived anyway: by a backward pass of its own through
nothing but the node that accumulates it, so that all hooks run.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor
from torch.autograd import Function

from backpack.core.operations import Operation
from backpack.engine.graph import Inspection
from backpack.engine.parameters import Group
from backpack.utils.parallel import is_parallel
from backpack.utils.types import accumulator_dtype


def find_own(
    groups: Sequence[Group], inspection: Inspection, extensions: Sequence[Any]
) -> Set[int]:
    """Find the parameters whose gradient costs less here than in autograd.

    The node of each use must be run without them, for the sake of its operand: that
    leads to other leaves, and the first one's to one that is not left out. A use whose
    operand has no gradient keeps its bias instead.

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
    least, found = min(limits), set()
    for group in groups:
        (use, index), *others = group.members
        operation, (param, *_) = use.operation, group.params
        constant = use.constants[index]
        if others or constant.leaf is not param or not isinstance(operation, Operation):
            continue
        if param in inspection.outside or not param.requires_grad:
            continue  # used by a penalty, too; frozen after the forward pass
        positions = operation.positions(constant.key, use.n)
        if positions < least or not _is_plain(param):
            continue
        data = operation.data
        if not data.requires_grad and not _has_bias(use, index):
            continue
        if not any(
            ext.is_customized(use.owner.module)
            for ext in extensions
            if use.owner is not None
        ):
            found.add(id(param))
    return found


def _has_bias(use: Any, index: int) -> bool:
    """Tell whether autograd runs a use's node for another, small parameter."""
    others = [c for i, c in enumerate(use.constants) if i != index]
    return any(c.leaf is not None and len(c.shape) == 1 for c in others)


def _is_plain(param: Tensor) -> bool:
    """Tell whether a gradient may be formed here.

    It must keep its digits when it is added up, and nothing may change the parameter
    as soon as it has its gradient: the node of its use has not run yet.
    """
    if getattr(param, "_post_accumulate_grad_hooks", None):
        return False
    return accumulator_dtype(param.dtype) == param.dtype and not param.is_sparse


class _Gradients(Function):
    """A node of the graph that gives its gradients away: nobody else may own them.

    Otherwise, what accumulates gradients would copy each one.
    """

    @staticmethod
    def forward(ctx: Any, gradients: List[Tensor], *params: Tensor) -> Tensor:
        """Return a number that is computed from the parameters, as it were."""
        ctx.gradients = gradients
        return params[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tuple[Optional[Tensor], ...]:
        """Return the gradients, and forget them."""
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def hand_over(gradients: Dict[Tensor, Tensor]) -> None:
    """Hand gradients that autograd leaves out to it.

    Args:
        gradients: The gradients.
    """
    with torch.enable_grad():
        handed_over = _Gradients.apply(list(gradients.values()), *gradients)
    torch.autograd.backward(handed_over)
