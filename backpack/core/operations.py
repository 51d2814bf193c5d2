"""Operations that parameters enter: from arguments and cotangents to products.

A rule describes what an operation does with its constants, in the terms of the layer
that does the same: a call of ``torch.nn.functional.linear`` is a linear layer, whoever
calls it, with samples wherever they are. A rule that does not cover the arguments
returns ``None``; autograd then does it, see :mod:`backpack.engine.uses`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Dict,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch.nn import functional

from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.normalization import (
    GroupNormDerivatives,
    InstanceNormNdDerivatives,
    LayerNormDerivatives,
    RMSNormDerivatives,
)
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.kinds import Broadcast, Contraction, Key, LayerLike, Operation


def _bound(names: str, args: Sequence[Any], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Bind arguments to names, in the order of a signature."""
    return {**dict(zip(names.split(), args)), **kwargs}


def _keys(names: str, args: Sequence[Any], bound: Dict[str, Any]) -> Dict[Key, str]:
    """Tell where parameters stand that need a gradient, by position or keyword."""
    order = names.split()
    keys: Dict[Key, str] = {}
    for name in ("weight", "bias"):
        value = bound.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            position = order.index(name)
            keys[position if position < len(args) else name] = name
    return keys


def _like(
    derivatives: BaseParameterDerivatives,
    names: str,
    args: Sequence[Any],
    bound: Dict[str, Any],
    features: Optional[Tuple[int, int]] = None,
    **options: Any,
) -> LayerLike:
    """Describe an operation by the layer that does the same.

    Args:
        derivatives: The layer's derivatives.
        names: Names of the operation's arguments, in order.
        args: Positional arguments.
        bound: All arguments, by name.
        features: Number of axes that are no rows, see :class:`LayerLike`.
        options: The layer's options.

    Returns:
        The operation.
    """
    layer = SimpleNamespace(weight=bound.get("weight"), bias=bound.get("bias"))
    vars(layer).update(options)
    keys = _keys(names, args, bound)
    return LayerLike(derivatives, layer, keys, bound["input"], features)


def _linear(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input weight bias"
    bound = _bound(names, args, kwargs)
    if bound["weight"].dim() != 2:
        return None
    return _like(LinearDerivatives(), names, args, bound, (1, 1))


def _tuple(value: Any, size: int) -> Tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * size
    return tuple(value) * (size if len(value) == 1 else 1)


def _conv(axes: int, transposed: bool = False) -> Callable:
    names = "input weight bias stride padding dilation groups"
    derivatives = ConvNDDerivatives(axes)
    if transposed:
        names = "input weight bias stride padding output_padding groups dilation"
        derivatives = ConvTransposeNDDerivatives(axes)

    def rule(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
        bound = _bound(names, args, kwargs)
        padding = bound.get("padding", 0)
        if bound["input"].dim() != axes + 2:
            return None
        return _like(
            derivatives,
            names,
            args,
            bound,
            stride=_tuple(bound.get("stride", 1), axes),
            padding=padding if isinstance(padding, str) else _tuple(padding, axes),
            output_padding=_tuple(bound.get("output_padding", 0), axes),
            dilation=_tuple(bound.get("dilation", 1), axes),
            groups=bound.get("groups", 1),
            kernel_size=tuple(bound["weight"].shape[2:]),
            padding_mode="zeros",
        )

    return rule


def _embedding(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        names = "weight input padding_idx scale_grad_by_freq sparse"  # torch.embedding
    bound = _bound(names, args, kwargs)
    rows, padding = len(bound["weight"]), bound.get("padding_idx")
    if bound.get("scale_grad_by_freq"):
        return None  # it counts occurrences in the batch
    if padding is not None and padding < 0:
        padding = None if names.startswith("weight") else padding + rows
    options = {"padding_idx": padding, "scale_grad_by_freq": False}
    return _like(EmbeddingDerivatives(), names, args, bound, (0, 1), **options)


def _rows(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    weight, ids = args
    if not isinstance(ids, Tensor) or ids.dtype != torch.long or weight.dim() != 2:
        return None
    return None if bool((ids < 0).any()) else _embedding(args, kwargs)


def _layer_norm(derivatives: BaseParameterDerivatives, names: str) -> Callable:
    def rule(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
        bound = _bound(names, args, kwargs)
        shape = tuple(bound["normalized_shape"])
        eps = bound.get("eps", 1e-5 if "bias" in names else None)
        options = {"normalized_shape": shape, "eps": eps}
        return _like(derivatives, names, args, bound, (len(shape),) * 2, **options)

    return rule


def _group_norm(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input num_groups weight bias eps"
    bound = _bound(names, args, kwargs)
    options = {"num_groups": bound["num_groups"], "eps": bound.get("eps", 1e-5)}
    return _like(GroupNormDerivatives(), names, args, bound, **options)


def statistics(bound: Mapping[str, Any]) -> Dict[str, Optional[Tensor]]:
    """Copy running statistics, which may move before the backward pass.

    Args:
        bound: Where they are, by name.

    Returns:
        Mean and variance ``[C]``, ``None`` where there is none.
    """
    found = {name: bound.get(name) for name in ("running_mean", "running_var")}
    return {name: x if x is None else x.clone() for name, x in found.items()}


def _instance_norm(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    bound = _bound(names, args, kwargs)
    own = bound.get("use_input_stats", True)
    options = {"training": own, "eps": bound.get("eps", 1e-5)}
    options.update(statistics({} if own else bound))
    return _like(InstanceNormNdDerivatives(), names, args, bound, **options)


def _batch_norm(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input running_mean running_var weight bias training momentum eps"
    bound = _bound(names, args, kwargs)
    if bound.get("training") or bound.get("running_mean") is None:
        return None
    options = {"training": False, "eps": bound.get("eps", 1e-5), **statistics(bound)}
    return _like(BatchNormNdDerivatives(), names, args, bound, **options)


Keys = Sequence[Key]  # which arguments are constants


def _matmul(
    args: Sequence[Any], kwargs: Dict[str, Any], constants: Keys
) -> Optional[Operation]:
    first, second = args
    if kwargs or len(constants) != 1 or min(first.dim(), second.dim()) < 2:
        return None
    if list(constants) == [1] and second.dim() == 2:
        last = first.dim() - 1
        return Contraction(1, first, [last], [last], [1, 0])
    if list(constants) == [0] and first.dim() == 2:
        axis = second.dim() - 2
        return Contraction(0, second, [axis], [axis], [0, 1])
    return None


def _rmatmul(
    args: Sequence[Any], kwargs: Dict[str, Any], constants: Keys
) -> Optional[Operation]:
    found = _matmul(args[::-1], kwargs, [1 - int(key) for key in constants])
    if isinstance(found, Contraction):
        found.key = 1 - int(found.key)
        found.keys = (found.key,)
    return found


def _addmm(
    args: Sequence[Any], kwargs: Dict[str, Any], constants: Keys
) -> Optional[Operation]:
    if len(args) != 3 or kwargs:
        return None
    factors = [int(key) - 1 for key in constants if key] or [1]
    found = _matmul(args[1:], {}, factors)
    if not isinstance(found, Contraction):
        return None
    (column,) = found.outputs
    if 0 in constants and (1, 1, *args[0].shape)[-2:][1 - column] != 1:
        return None  # rows of the result get different shifts
    found.key, found.keys = int(found.key) + 1, tuple(constants)
    return found


def _tensordot(
    args: Sequence[Any], kwargs: Dict[str, Any], constants: Keys
) -> Optional[Operation]:
    bound = _bound("a b dims", args, kwargs)
    first, second, dims = bound["a"], bound["b"], bound.get("dims", 2)
    if isinstance(dims, int):
        dims = [*range(first.dim() - dims, first.dim())], [*range(dims)]
    left = [axis % first.dim() for axis in dims[0]]
    right = [axis % second.dim() for axis in dims[1]]
    kept = [axis for axis in range(first.dim()) if axis not in left]
    others = [axis for axis in range(second.dim()) if axis not in right]
    if list(constants) == [1]:
        outputs = [*range(len(kept), len(kept) + len(others))]
        return Contraction(1, first, left, outputs, [*others, *right])
    outputs = [*range(len(kept))]
    return Contraction(0, second, right, outputs, [*kept, *left])


def _einsum(
    args: Sequence[Any], kwargs: Dict[str, Any], constants: Keys
) -> Optional[Operation]:
    if kwargs or len(args) != 3 or len(constants) != 1 or constants[0] == 0:
        return None
    equation = args[0].replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    operands, out = equation.split("->")
    terms = operands.split(",")
    if any(len(set(term)) < len(term) for term in (*terms, out)):
        return None
    return _einsum_with(int(constants[0]) - 1, terms, out, args[1:])


def _einsum_with(
    position: int, terms: Sequence[str], out: str, operands: Sequence[Tensor]
) -> Optional[Operation]:
    """Describe an einsum of rows and a constant; no axis of the result has both."""
    constant, rows, data = terms[position], terms[1 - position], operands[1 - position]
    inputs = [x for x in rows if x not in out]
    outputs = [x for x in out if x not in rows]
    kept = [x for x in rows if x in out]
    if set(constant) != {*inputs, *outputs} or not inputs or not outputs:
        return None
    if kept != [x for x in out if x in rows]:
        return None
    # the arguments are the equation and the operands
    axes = [constant.index(x) for x in (*outputs, *inputs)]
    contracted, from_weight = map(rows.index, inputs), map(out.index, outputs)
    return Contraction(position + 1, data, [*contracted], [*from_weight], axes)


def _add(sign: Tuple[float, float]) -> Callable:
    def rule(
        args: Sequence[Any], kwargs: Dict[str, Any], constants: Sequence[Any]
    ) -> Optional[Operation]:
        if kwargs or len(args) != 2 or len(constants) != 1:
            return None
        return Broadcast(constants[0], None, sign[constants[0]])

    return rule


def _mul(
    args: Sequence[Any], kwargs: Dict[str, Any], constants: Sequence[Any]
) -> Optional[Operation]:
    if kwargs or len(args) != 2 or len(constants) != 1:
        return None
    other = args[1 - constants[0]]
    return Broadcast(constants[0], other) if isinstance(other, Tensor) else None


class Rule(NamedTuple):
    """How to describe an operation.

    Attributes:
        describe: From positional and keyword arguments to the operation.
        asks_which: Whether it needs to know which arguments are constants.
    """

    describe: Callable
    asks_which: bool = False


_RMS_NORM = _layer_norm(RMSNormDerivatives(), "input normalized_shape weight eps")
_LAYER_NORM = _layer_norm(
    LayerNormDerivatives(), "input normalized_shape weight bias eps"
)
_PLUS, _MINUS, _FROM = (
    Rule(_add(signs), True) for signs in ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0))
)
_TIMES = Rule(_mul, True)

OPERATIONS: Dict[Callable, Rule] = {
    functional.linear: Rule(_linear),
    torch.addmm: Rule(_addmm, True),
    Tensor.addmm: Rule(_addmm, True),
    torch.mm: Rule(_matmul, True),
    Tensor.mm: Rule(_matmul, True),
    torch.matmul: Rule(_matmul, True),
    Tensor.matmul: Rule(_matmul, True),
    Tensor.__matmul__: Rule(_matmul, True),
    Tensor.__rmatmul__: Rule(_rmatmul, True),
    torch.einsum: Rule(_einsum, True),
    torch.tensordot: Rule(_tensordot, True),
    torch.conv1d: Rule(_conv(1)),
    torch.conv2d: Rule(_conv(2)),
    torch.conv3d: Rule(_conv(3)),
    torch.conv_transpose1d: Rule(_conv(1, True)),
    torch.conv_transpose2d: Rule(_conv(2, True)),
    torch.conv_transpose3d: Rule(_conv(3, True)),
    functional.embedding: Rule(_embedding),
    Tensor.__getitem__: Rule(_rows),
    functional.layer_norm: Rule(_LAYER_NORM),
    functional.rms_norm: Rule(_RMS_NORM),
    torch.rms_norm: Rule(_RMS_NORM),
    functional.group_norm: Rule(_group_norm),
    functional.instance_norm: Rule(_instance_norm),
    functional.batch_norm: Rule(_batch_norm),
    torch.add: _PLUS,
    Tensor.add: _PLUS,
    Tensor.__add__: _PLUS,
    Tensor.__radd__: _PLUS,
    Tensor.__iadd__: _PLUS,
    Tensor.add_: _PLUS,
    Tensor.__isub__: _MINUS,
    Tensor.sub_: _MINUS,
    torch.sub: _MINUS,
    Tensor.sub: _MINUS,
    Tensor.__sub__: _MINUS,
    Tensor.__rsub__: _FROM,
    torch.mul: _TIMES,
    Tensor.mul: _TIMES,
    Tensor.__mul__: _TIMES,
    Tensor.__rmul__: _TIMES,
}


def find_operation(
    func: Callable, args: Sequence[Any], kwargs: Dict[str, Any], keys: Sequence[Any]
) -> Optional[Operation]:
    """Describe an operation, if there is a rule for it.

    Args:
        func: The operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        keys: Which arguments are constants that need a gradient: positions, keywords,
            and ``None`` for one inside of a list.

    Returns:
        The operation, ``None`` if there is no rule that covers all constants.
    """
    rule = OPERATIONS.get(func)
    if rule is None or None in keys:
        return None
    options = (keys,) if rule.asks_which else ()
    try:
        found = rule.describe(args, kwargs, *options)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None  # a spelling that the rule does not know
    if found is None or set(found.keys) != set(keys):
        return None
    return found
