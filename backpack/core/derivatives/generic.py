"""The generic rule: any parameter of any module, by its own forward pass.

Vector-Jacobian products of the module's forward pass, in which a sample's cotangents
are zero at all others. They are slow and always right, so they serve the layers nobody
wrote a rule for, and the fast rules are tested against them.
"""

from typing import Any, Dict, List, Optional, Sequence, Union
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor
from torch.autograd import grad
from torch.func import functional_call
from torch.nn import GRU, LSTM, RNN, MultiheadAttention
from torch.utils._pytree import tree_leaves

from backpack.core.derivatives import stored
from backpack.core.per_sample.base import Dense
from backpack.utils.disable import disable
from backpack.utils.types import Layer

Cotangents = Union[Tensor, Sequence[Optional[Tensor]]]

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
        The tensors, nested ones included.
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    leaves = tree_leaves(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def generic_product(
    name: str,
    module: Layer,
    inputs: Sequence[Any],
    cotangents: Cotangents,
    kwargs: Optional[Dict[str, Any]] = None,
    outputs: Optional[Sequence[Tensor]] = None,
) -> Dense:
    """Compute products of cotangents and a parameter's Jacobian for any module.

    Args:
        name: The parameter's (dotted) name in the module, see
            :func:`~backpack.core.derivatives.stored.argument_position`.
        module: The module.
        inputs: Positional arguments of its call.
        cotangents: Columns ``[V, N, *]`` at its output; a sequence (in which ``None``
            stands for zero) if it has several.
        kwargs: Keyword arguments of its call. Default: ``None``.
        outputs: The call's outputs, to check that repeating the call gives the same.
            Default: ``None``.

    Returns:
        The products, ``[V, N, *p]``.

    Raises:
        RuntimeError: If the forward pass cannot be repeated.
    """
    mats = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
    some = [i for i, mat in enumerate(mats) if mat is not None]
    mats, axes = [mats[i] for i in some], [output_batch_axis(module, i) for i in some]
    args, position = list(inputs), stored.argument_position(module, name)
    param = stored.find_parameter(module, name) if position is None else args[position]
    value, _ = stored.as_leaf(param)
    if position is not None:
        args[position] = value
    own = {name: value} if position is None else {}
    with torch.enable_grad(), disable():
        copy = stored.scratch_copy(module)
        output = functional_call(copy, own, tuple(args), kwargs or {})
    again = [tensor_outputs(output)[i] for i in some]
    for i, x in zip(some, again):
        if outputs is not None and not stored.repeats(module, x, outputs[i]):
            raise RuntimeError(
                f"{type(module).__name__}: repeating the forward pass gave another "
                "output, so quantities of its own parameters can't be computed. The "
                "module draws random numbers or keeps a state. Call eval(), or put the "
                f"parameter ({name}) and the random part into modules of their own."
            )
    rows = []
    with catch_warnings():
        # operations that vmap has no rule for are slow, which this rule is anyway
        filterwarnings("ignore", "There is a performance drop")
        for n in range(mats[0].shape[1 + axes[0]]):
            masked = [only_sample(mat, axis + 1, n) for mat, axis in zip(mats, axes)]
            rows.append(_pull_columns(again, value, masked))
    return Dense(torch.stack(rows, 1), param.shape)


def _pull_columns(outputs: List[Tensor], param: Tensor, mats: List[Tensor]) -> Tensor:
    """Multiply columns ``[V, N, *]`` with the transposed Jacobian, to ``[V, *p]``."""
    create_graph = torch.is_grad_enabled()
    options = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    pairs = [pair for pair in zip(outputs, mats) if pair[0].requires_grad]
    rows: Any = None
    if pairs:
        ys, ws = zip(*pairs)
        try:
            (rows,) = grad(ys, param, ws, is_grads_batched=True, **options)
        except RuntimeError:  # not every operation can be vmapped
            each = [grad(ys, param, column, **options)[0] for column in zip(*ws)]
            if each[0] is not None:
                rows = torch.stack([x.to_dense() if x.is_sparse else x for x in each])
    return param.new_zeros(len(mats[0]), *param.shape) if rows is None else rows


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
