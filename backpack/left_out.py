"""Parameters that autograd leaves out, because their gradient costs less here.

First-order extensions form the individual gradients of layers whose weight many
positions share. To add these up on the way costs less than what autograd does for the
same result: multiply all inputs with all cotangents once more. And where it has to be
done, we may have a faster matrix product than autograd. The backward pass is therefore
run without these parameters, and their gradient is handed to autograd afterwards. It
arrives in ``.grad`` as ever, but for rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Conv1d, Conv2d, Conv3d, Linear, Parameter

from backpack.core.fast.matmul import is_fast_product
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.layers import GENERIC, find_row_or_generic
from backpack.utils.types import accumulator_dtype

if TYPE_CHECKING:
    from backpack.context import State
    from backpack.graph import Inspection


@torch.no_grad()  # as in the backward pass
def find_left_out(current: State, inspection: Inspection) -> Dict[Parameter, bool]:
    """Find the parameters whose gradient costs less here than in autograd.

    Their call's node must be run without them, for the sake of its input. That input
    leads to other leaf tensors: the calls are not circular, and the first one's input
    leads to a leaf that is not left out. A layer whose input has no gradient keeps its
    bias instead.

    Args:
        current: What is active.
        inspection: What the graph looks like.

    Returns:
        The parameters, and whether individual gradients are added up on the way.
    """
    found: Dict[Parameter, bool] = {}
    reductions = [x for x in current.active_exts if isinstance(x, GradientReduction)]
    if current.check or not inspection.allows_inputs:
        return found
    for call in inspection.calls:
        if call.released or call.is_composite or not call.parameters:
            continue
        module = call.module
        if not isinstance(module, (Linear, Conv1d, Conv2d, Conv3d)):
            continue
        outputs, (channels, features, *_) = call.outputs[0], module.weight.shape
        rows = outputs.numel() // max(1, channels)
        adds_up = any(
            ext.adds_up(module, rows // max(1, outputs.shape[0])) for ext in reductions
        )
        has_fast_product = isinstance(module, Linear) and is_fast_product(
            (channels, rows, features), outputs
        )
        if not (adds_up or has_fast_product):
            continue
        if find_row_or_generic(call) is GENERIC:
            continue
        params = [p for p in call.parameters.values() if p.requires_grad]
        if call.input_edges[0] is None:  # its node is run for the sake of its bias
            params = [p for p in params if p is not module.bias and len(params) > 1]
        if all(
            len(inspection.reached.get(param, ())) == 1
            and param not in inspection.outside
            and _is_plain(param)
            for param in params
        ):
            found.update(dict.fromkeys(params, adds_up))
    return found


def _is_plain(param: Parameter) -> bool:
    """Tell whether it makes no difference when and how a gradient arrives.

    Hooks may count gradients, or update the parameter. Low precision would be lost in a
    sum of gradients that are rounded.
    """
    hooked = param._backward_hooks or param._post_accumulate_grad_hooks
    return not hooked and accumulator_dtype(param.dtype) == param.dtype


class _Gradients(Function):
    """A node of the graph that gives its gradients away: nobody else may own them.

    Otherwise, what accumulates gradients would copy each one.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: Dict[Parameter, Tensor], *params: Parameter
    ) -> Tensor:
        """Return a number that is computed from the parameters, as it were."""
        ctx.gradients = gradients
        return params[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tuple[Optional[Tensor], ...]:
        """Return the gradients, and forget them."""
        gradients = tuple(ctx.gradients.values())
        ctx.gradients.clear()
        return None, *gradients


def hand_over(gradients: Dict[Parameter, Tensor]) -> None:
    """Hand the gradients that autograd leaves out to it, now that they are known.

    Args:
        gradients: The gradients, which are forgotten.
    """
    if gradients:
        with torch.enable_grad():
            handed_over = _Gradients.apply(gradients, *gradients)
        torch.autograd.backward(handed_over)
