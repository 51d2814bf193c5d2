"""Parameters that autograd leaves out, because the sum of their gradients is at hand.

First-order extensions form the individual gradients of layers whose weight many
positions share. To add these up on the way costs less than what autograd does for the
same result: multiply all inputs with all cotangents once more. The backward pass is
therefore run without these parameters, and their gradient is handed to autograd
afterwards. It arrives in ``.grad`` as ever, but for rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Set

import torch
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Conv3d, Linear, Parameter

from backpack.core.reductions import accumulator_dtype
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.layers import find_row

if TYPE_CHECKING:
    from backpack.context import State
    from backpack.graph import Inspection


def find_left_out(current: State, inspection: Inspection) -> Set[Parameter]:
    """Find the parameters whose gradient will be at hand as a sum.

    Their call's node must be run without them, for the sake of its input. That input
    leads to other leaf tensors: the calls are not circular, and the first one's input
    leads to a leaf that is not left out. A layer whose input has no gradient keeps its
    bias instead.

    Args:
        current: What is active.
        inspection: What the graph looks like.

    Returns:
        The parameters.
    """
    found: Set[Parameter] = set()
    reductions = [x for x in current.active_exts if isinstance(x, GradientReduction)]
    if current.check or not reductions:
        return found
    for call in inspection.calls:
        if call.released or call.is_composite or not call.parameters:
            continue
        module = call.module
        if not isinstance(module, (Linear, Conv1d, Conv2d, Conv3d)):
            continue
        outputs, channels = call.outputs[0], module.weight.shape[0]
        positions = outputs.numel() // max(1, len(outputs) * channels)
        if not any(ext.adds_up(module, positions) for ext in reductions):
            continue
        if find_row(module) is None:
            continue
        params = [p for p in call.parameters.values() if p.requires_grad]
        if call.input_edges[0] is None:  # its node is run for the sake of its bias
            params = [p for p in params if p is not module.bias and len(params) > 1]
        if all(
            len(inspection.reached.get(param, ())) == 1 and _is_plain(param)
            for param in params
        ):
            found.update(params)
    return found


def _is_plain(param: Parameter) -> bool:
    """Tell whether it makes no difference when and how a gradient arrives.

    Hooks may count gradients, or update the parameter. Low precision would be lost in a
    sum of gradients that are rounded.
    """
    hooked = param._backward_hooks or param._post_accumulate_grad_hooks
    return not hooked and accumulator_dtype(param.dtype) == param.dtype


def hand_over(gradients: Dict[Parameter, Tensor]) -> None:
    """Hand the gradients that autograd leaves out to it, now that they are known.

    Args:
        gradients: The gradients, which are forgotten.
    """
    if gradients:
        torch.autograd.backward(list(gradients), list(gradients.values()))
        gradients.clear()
