"""The generic rule: any parameter of any module, by its own forward pass.

Vector-Jacobian products of the module's forward pass, in which a sample's cotangents
are zero at all others. They are slow and always right, so they serve the layers nobody
wrote a rule for.
"""

from typing import Any, List, Sequence

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import GRU, LSTM, RNN, MultiheadAttention

from backpack.core.derivatives import stored
from backpack.core.per_sample.base import Dense
from backpack.hessianfree.lop import pull_columns
from backpack.utils.errors import without_performance_warnings
from backpack.utils.types import Layer, tensors_in

_SEQUENCE_MODULES = (RNN, LSTM, GRU, MultiheadAttention)


def output_batch_axis(module: Layer, index: int) -> int:
    """Return which axis of a module's output holds the samples.

    Args:
        module: The module.
        index: Which of its output tensors.

    Returns:
        The axis, 1 for outputs of recurrent and attention layers that put the sequence
        first, and for final hidden states, else 0.
    """
    if not isinstance(module, _SEQUENCE_MODULES):
        return 0
    if index == 0:
        return int(not module.batch_first)
    return int(not isinstance(module, MultiheadAttention))


def input_batch_axis(module: Layer, index: int) -> int:
    """Return which axis of a module's input holds the samples.

    Args:
        module: The module.
        index: Which of its inputs.

    Returns:
        The axis, 1 for inputs of recurrent and attention layers that put the sequence
        first, and for initial hidden states, else 0.
    """
    if isinstance(module, MultiheadAttention):
        return int(index < 3 and not module.batch_first)
    if isinstance(module, _SEQUENCE_MODULES):
        return int(index > 0 or not module.batch_first)
    return 0


def tensor_outputs(output: Any) -> List[Tensor]:
    """Collect the floating-point tensors in a module's output, in a fixed order.

    Args:
        output: What the module returned.

    Returns:
        The tensors, nested ones included; those of objects, if there are no others.
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    found = tensors_in(output) or tensors_in(output, depth=2)
    return [x for x in found if x.is_floating_point()]


def generic_product(
    name: str, module: Layer, inputs: Sequence[Any], cotangents: Tensor
) -> Dense:
    """Compute products of cotangents and a parameter's Jacobian for any module.

    Args:
        name: The parameter's name in the module, see
            :func:`~backpack.core.derivatives.stored.find_parameter`.
        module: Module with stored output, to check that repeating the call gives the
            same.
        inputs: Inputs of the call.
        cotangents: Columns ``[V, N, *]`` at its first output.

    Returns:
        The products, ``[V, N, *p]``.
    """
    param, y = stored.evaluate_parameter(module, name, inputs)
    axis = 1 + output_batch_axis(module, 0)
    with without_performance_warnings():  # this rule is slow, anyway
        rows = [
            _pull_columns(y, param, only_sample(cotangents, axis, n))
            for n in range(cotangents.shape[axis])
        ]
    return Dense(torch.stack(rows, 1), param.shape)


def _pull_columns(y: Tensor, param: Tensor, columns: Tensor) -> Tensor:
    """Multiply columns ``[V, N, *]`` with the transposed Jacobian, to ``[V, *p]``."""
    options: Any = {"retain_graph": True, "create_graph": torch.is_grad_enabled()}
    try:
        return grad(y, param, columns, is_grads_batched=True, **options)[0]
    except RuntimeError:  # not every operation can be vmapped, or takes part
        create_graph = options["create_graph"]
        return pull_columns(y, param, columns, create_graph)[0].to_dense()


def only_sample(mat: Tensor, axis: int, n: int) -> Tensor:
    """Set a column to zero except for one sample.

    Args:
        mat: The column, with N samples.
        axis: The axis they are on.
        n: Number of the sample.

    Returns:
        A copy with zeros.
    """
    index = torch.tensor([n], device=mat.device)
    return torch.zeros_like(mat).index_copy(axis, index, mat.index_select(axis, index))
