"""Operations that parameters enter: from arguments and cotangents to products.

A rule describes what an operation does with its constants, in the terms of the layer
that does the same: a call of ``torch.nn.functional.linear`` is a linear layer, whoever
calls it, with samples wherever they are. A rule that does not cover the arguments
returns ``None``; autograd then does it, see :mod:`backpack.engine.nodes.uses`.
"""

from __future__ import annotations

from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from backpack.core.derivatives import normalization, recurrent
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.kinds import (
    Bags,
    Broadcast,
    Contraction,
    Grouped,
    Key,
    LayerLike,
    Operation,
)
from backpack.core.on_each import OnEach
from backpack.core.recurrences import called


class Called(NamedTuple):
    """A call of an operation.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        keys: Which of them are constants that need a gradient: positions and keywords.
    """

    args: Sequence[Any]
    kwargs: dict[str, Any]
    keys: Sequence[Any]

    def bind(self, names: str) -> dict[str, Any]:
        """Name the arguments, positional ones first.

        Args:
            names: Names of the parameters in the operation's signature, in its order.

        Returns:
            The arguments by name.
        """
        return {**dict(zip(names.split(), self.args)), **self.kwargs}

    def operand(self) -> int | None:
        """Tell which one of two operands, and no options, is the constant.

        Returns:
            Its position, ``None`` for calls of another form.
        """
        is_plain = not self.kwargs and len(self.args) == 2 and len(self.keys) == 1
        return self.keys[0] if is_plain else None


Rule = Callable[[Called], Optional[Operation]]


def _like(
    derivatives: BaseParameterDerivatives,
    call: Called,
    bound: dict[str, Any],
    features: int | None = None,
    **options: Any,
) -> LayerLike:
    """Describe an operation by the layer that does the same.

    Args:
        derivatives: The layer's derivatives.
        call: The call.
        bound: Its arguments, by name.
        features: Number of the input's axes that are no rows, see :class:`LayerLike`.
        options: The layer's options.

    Returns:
        The operation.
    """
    layer = SimpleNamespace(weight=bound.get("weight"), bias=bound.get("bias"))
    vars(layer).update(options)
    keys: dict[Key, str] = {}
    for position, (name, value) in enumerate(bound.items()):
        needs_gradient = isinstance(value, Tensor) and value.requires_grad
        if name in ("weight", "bias") and needs_gradient:
            keys[position if position < len(call.args) else name] = name
    return LayerLike(derivatives, layer, keys, bound["input"], features)


def _linear(call: Called) -> Operation | None:
    bound = call.bind("input weight bias")
    if bound["weight"].dim() != 2:
        return None
    return _like(LinearDerivatives(), call, bound, 1)


def _tuple(value: Any, size: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * size
    return tuple(value) * (size if len(value) == 1 else 1)


def _conv(axes: int, transposed: bool = False) -> Callable:
    names = "input weight bias stride padding dilation groups"
    derivatives = ConvNDDerivatives(axes)
    if transposed:
        names = "input weight bias stride padding output_padding groups dilation"
        derivatives = ConvTransposeNDDerivatives(axes)

    def rule(call: Called) -> Operation | None:
        bound = call.bind(names)
        padding = bound.get("padding", 0)
        if bound["input"].dim() != axes + 2:
            return None
        return _like(
            derivatives,
            call,
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


def _convolution(call: Called) -> Operation | None:
    *operands, stride, padding, dilation, transposed, extra, groups = call.args
    options = [stride, padding, dilation, groups]
    if transposed:
        options = [stride, padding, extra, groups, dilation]
    name = "conv_transpose" if transposed else "conv"
    rule = OPERATIONS[getattr(torch, f"{name}{operands[1].dim() - 2}d")]
    return rule(Called([*operands, *options], call.kwargs, call.keys))


def _embedding(call: Called) -> Operation | None:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    first = call.args[0] if call.args else None
    if isinstance(first, Tensor) and first.is_floating_point():
        names = "weight input padding_idx scale_grad_by_freq sparse"  # torch.embedding
    bound = call.bind(names)
    rows, padding = len(bound["weight"]), bound.get("padding_idx")
    if bound.get("scale_grad_by_freq"):
        return None  # it counts occurrences in the batch
    if padding is not None and padding < 0:
        padding = None if names.startswith("weight") else padding + rows
    options = {"padding_idx": padding, "scale_grad_by_freq": False}
    return _like(EmbeddingDerivatives(), call, bound, 0, **options)


def _bags(call: Called) -> Operation | None:
    names = "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse "
    bound = call.bind(names + "per_sample_weights include_last_offset padding_idx")
    if not bound["weight"].is_floating_point():  # in an order that was given up
        bound["input"], bound["weight"] = bound["weight"], bound["input"]
    mode, padding = bound.get("mode", "mean"), bound.get("padding_idx")
    if mode == "max" or bound.get("scale_grad_by_freq") or len(call.keys) > 1:
        return None
    if padding is not None and padding < 0:
        padding += len(bound["weight"])
    factors = bound.get("per_sample_weights")
    options = bound.get("offsets"), mode == "mean", factors, padding
    return Bags(call.keys[0], bound["input"], *options)


def _rows(call: Called) -> Operation | None:
    weight, ids = call.args
    whole = slice(None)
    if isinstance(ids, tuple) and ids:
        if all(x is ... or type(x) is slice and x == whole for x in ids[1:]):
            ids = ids[0]  # of all other axes
    return _picked_rows(weight, ids, call)


def _index_select(call: Called) -> Operation | None:
    bound = call.bind("input dim index")
    first = bound["dim"] in (0, -bound["input"].dim())
    return _picked_rows(bound["input"], bound["index"], call) if first else None


def _picked_rows(weight: Tensor, ids: Any, call: Called) -> Operation | None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.long or weight.dim() < 2:
        return None
    bound = {"weight": weight, "input": ids}
    options = {"padding_idx": None, "scale_grad_by_freq": False}
    return _like(EmbeddingDerivatives(), call, bound, 0, **options)


def _layer_norm(derivatives: BaseParameterDerivatives, names: str) -> Callable:
    def rule(call: Called) -> Operation | None:
        bound = call.bind(names)
        shape = tuple(bound["normalized_shape"])
        eps = bound.get("eps", 1e-5 if "bias" in names else None)
        options = {"normalized_shape": shape, "eps": eps}
        return _like(derivatives, call, bound, len(shape), **options)

    return rule


def _group_norm(call: Called) -> Operation | None:
    bound = call.bind("input num_groups weight bias eps cudnn_enabled")
    options = {"num_groups": bound["num_groups"], "eps": bound.get("eps", 1e-5)}
    return _like(normalization.GroupNormDerivatives(), call, bound, **options)


_FIRST = "input running_mean running_var weight bias "  # as in `functional`
_LAST = "input weight bias running_mean running_var "  # as in `torch`


def statistics(bound: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Copy running statistics, which may move before the backward pass.

    Args:
        bound: Where they are, by name.

    Returns:
        Mean and variance ``[C]``, ``None`` where there is none.
    """
    found = {name: bound.get(name) for name in ("running_mean", "running_var")}
    return {name: x if x is None else x.clone() for name, x in found.items()}


def _instance_norm(names: str) -> Rule:
    def rule(call: Called) -> Operation | None:
        bound = call.bind(names + "use_input_stats momentum eps cudnn_enabled")
        own = bound.get("use_input_stats", True)
        options = {"training": own, "eps": bound.get("eps", 1e-5)}
        options.update(statistics({} if own else bound))
        return _like(normalization.InstanceNormNdDerivatives(), call, bound, **options)

    return rule


def _batch_norm(names: str) -> Rule:
    def rule(call: Called) -> Operation | None:
        bound = call.bind(names + "training momentum eps cudnn_enabled")
        if bound.get("training") or bound.get("running_mean") is None:
            return None
        options = {"training": False, "eps": bound.get("eps", 1e-5)}
        options.update(statistics(bound))
        return _like(BatchNormNdDerivatives(), call, bound, **options)

    return rule


def _contraction(
    key: int,
    position: int,
    operands: Sequence[Tensor],
    terms: Sequence[Sequence[Any]],
    out: Sequence[Any],
) -> Contraction | None:
    """Describe a contraction of rows and a constant, which names axes as ``einsum``.

    None that both have may be broadcast, nor one that is summed over.
    """
    data, constant = operands[1 - position], operands[position]
    of_data, of_constant = terms[1 - position], terms[position]
    sizes = dict(zip(of_data, data.shape))
    own = dict(zip(of_constant, constant.shape))
    inputs = [x for x in of_data if x not in out]
    groups = [x for x in out if x in own and x in sizes]
    outputs = [x for x in out if x not in sizes]
    shared = [*groups, *[x for x in inputs if x in own]]
    alone = [x for x in own if x not in out and x not in sizes]
    if any(sizes[x] != own[x] for x in shared):
        return None
    if any({**own, **sizes}[x] != 1 for x in (*alone, *inputs) if x not in shared):
        return None
    names = *groups, *outputs, *shared[len(groups) :], *alone
    return Contraction(
        key,
        data,
        [of_data.index(x) for x in inputs],
        [of_data.index(x) if x in sizes else None for x in out],
        [of_constant.index(x) for x in names],
        [out.index(x) for x in groups],
    )


def _product(factors: Sequence[Tensor], position: int, key: int) -> Contraction | None:
    """Describe a product of matrices or vectors, one of which is the constant."""
    count = max(2, *[x.dim() for x in factors]) - 2
    terms: list[list[Any]] = []
    for x, ends in zip(factors, ("rk", "kc")):
        # an axis of one entry is another's that it is repeated for
        lead = [j - len(x.shape) + 2 + count for j in range(x.dim() - 2)]
        names = [j if size > 1 else (ends, j) for j, size in zip(lead, x.shape)]
        terms.append([*names, *(ends if x.dim() > 1 else "k")])
    out: list[Any] = []
    for j in range(count):
        both = [x for term in terms for x in term if x in (j, ("rk", j), ("kc", j))]
        out.append(j if j in both else both[0])
    out += [x for x, factor in zip("rc", factors) if factor.dim() > 1]
    return _contraction(key, position, factors, terms, out)


def _matmul(call: Called) -> Operation | None:
    key = call.operand()
    return None if key is None else _product(call.args, key, key)


def _addmm(call: Called) -> Operation | None:
    keys = [key for key in call.keys if key] or [2]
    if call.kwargs or len(call.args) != 3 or len(keys) != 1:
        return None
    shift, *factors = call.args
    found: Any = _product(factors, keys[0] - 1, keys[0])  # there is one, of matrices
    row = max(found.rows) - found.data.dim()
    if 0 in call.keys and (1, 1, 1, *shift.shape)[row] != 1:
        return None  # rows of the result get different shifts
    found.keys = tuple(call.keys)
    return found


def _inner(call: Called) -> Operation | None:
    key, both = call.operand(), call.args
    sizes = [x.dim() - 1 for x in both]
    first, second = range(sizes[0]), range(sizes[0], sum(sizes))
    if key is None or -1 in sizes:  # a number scales
        return None
    terms = (*first, "k"), (*second, "k")
    return _contraction(key, key, both, terms, [*first, *second])


def _tensordot(call: Called) -> Operation | None:
    bound = call.bind("a b dims")
    both, dims = (bound["a"], bound["b"]), bound.get("dims", 2)
    if isinstance(dims, int):
        dims = range(-dims, 0), range(dims)
    sizes = [x.dim() for x in both]
    first, second = [*range(sizes[0])], [*range(sizes[0], sum(sizes))]
    for left, right in zip(*dims):
        second[right] = first[left]
    out = [x for x in (*first, *second) if (x in first) != (x in second)]
    return _contraction(call.keys[0], call.keys[0], both, (first, second), out)


def _einsum(call: Called) -> Operation | None:
    args, keys = call.args, call.keys
    if not call.kwargs and len(args) > 3 and 0 not in keys:
        return _each(torch.einsum)(call)
    if call.kwargs or len(args) != 3 or len(keys) != 1 or keys[0] == 0:
        return None
    equation, *operands = args
    if "->" not in equation:
        return None
    *given, out = equation.replace(" ", "").replace("->", ",").split(",")
    counts = [x.dim() - len(term) + 3 for x, term in zip(operands, given)]
    terms = [_axes_of(term, count) for term, count in zip(given, counts)]
    dotted = [count for term, count in zip(given, counts) if "..." in term]
    named = _axes_of(out, max(dotted, default=0))
    if any(len({*term}) < len(term) for term in (*terms, named)):
        return None
    position = keys[0] - 1  # the first argument is the equation
    return _contraction(keys[0], position, operands, terms, named)


def _axes_of(term: str, count: int) -> list[Any]:
    """Name axes as a term of ``einsum`` does, where dots stand for so many."""
    before, dots, after = term.partition("...")
    return [*before, *(range(-count, 0) if dots else ()), *after]


def _grouped(call: Called) -> Operation | None:
    bound = call.bind("rows matrices offs bias out_dtype")
    rows, matrices, ends = bound["rows"], bound["matrices"], bound["offs"]
    plain = bound.get("bias") is None and (rows.dim(), matrices.dim()) == (2, 3)
    return Grouped(call.keys[0], rows, ends) if plain and 1 in call.keys else None


def _add(*signs: float) -> Rule:
    def rule(call: Called) -> Operation | None:
        key = call.operand()
        return None if key is None else Broadcast(key, None, signs[key])

    return rule


def _mul(call: Called) -> Operation | None:
    key = call.operand()
    other = None if key is None else call.args[1 - key]
    return Broadcast(key, other) if isinstance(other, Tensor) else None


def _each(func: Callable) -> Rule:
    def rule(call: Called) -> Operation | None:
        autocast = torch._C._is_any_autocast_enabled()  # which is over by then
        return None if autocast else OnEach(func, *call)

    return rule


def _recurrent(
    derivatives: recurrent.RecurrentDerivatives, nonlinearity: str | None = None
) -> Rule:
    def rule(call: Called) -> Operation | None:
        return called(derivatives, nonlinearity, call.args, call.keys)

    return rule


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | float = 0) -> Tensor:
    """Do the same by an operation that `vmap` knows."""
    bias = 0 if bias is None else bias
    return torch.einsum("...i,oij,...j->...o", x, weight, y) + bias


def _cdist(x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Do the same on as many axes in both, which is all that `vmap` knows."""
    lead = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    x1, x2 = (x.expand(*lead, *x.shape[-2:]) for x in (x1, x2))
    return torch.cdist(x1, x2, *args, **kwargs)


# Operations that treat each sample alone, whatever else they do
_ON_EACH = (
    *(functional.pairwise_distance, functional.cosine_similarity),
    *(torch.kron, Tensor.kron, torch.prelu, Tensor.prelu),
    *(functional.grid_sample, torch.grid_sampler, torch.grid_sampler_2d),
    *(torch.grid_sampler_3d, torch.linalg.cross, torch.cross, Tensor.cross),
    torch._fake_quantize_learnable_per_tensor_affine,
    torch._fake_quantize_learnable_per_channel_affine,
)
# A rule, and the operations that it describes
_RULES: dict[Rule, Sequence[Callable]] = {
    _linear: (functional.linear,),
    _addmm: (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm),
    _matmul: (
        *(torch.mm, Tensor.mm, torch.matmul, Tensor.matmul, Tensor.__matmul__),
        *(torch.bmm, Tensor.bmm, torch.mv, Tensor.mv),
    ),
    _einsum: (torch.einsum,),
    _tensordot: (torch.tensordot,),
    _inner: (torch.inner, Tensor.inner),
    _grouped: [  # from PyTorch 2.8, and from 2.10 on
        getattr(module, name)
        for module, name in ((torch, "_grouped_mm"), (functional, "grouped_mm"))
        if hasattr(module, name)
    ],
    **{_conv(n): (getattr(torch, f"conv{n}d"),) for n in (1, 2, 3)},
    **{_conv(n, True): (getattr(torch, f"conv_transpose{n}d"),) for n in (1, 2, 3)},
    _convolution: (torch.convolution,),
    _embedding: (functional.embedding, torch.embedding),
    _bags: (functional.embedding_bag,),
    _rows: (Tensor.__getitem__,),
    _index_select: (torch.index_select, Tensor.index_select),
    _layer_norm(
        normalization.LayerNormDerivatives(),
        "input normalized_shape weight bias eps cudnn_enable",
    ): (functional.layer_norm, torch.layer_norm),
    _layer_norm(
        normalization.RMSNormDerivatives(), "input normalized_shape weight eps"
    ): (functional.rms_norm, torch.rms_norm),
    _group_norm: (functional.group_norm, torch.group_norm),
    _instance_norm(_FIRST): (functional.instance_norm,),
    _instance_norm(_LAST): (torch.instance_norm,),
    _batch_norm(_FIRST): (functional.batch_norm,),
    _batch_norm(_LAST): (torch.batch_norm,),
    _add(1.0, 1.0): (
        *(torch.add, Tensor.add, Tensor.add_),
        *(Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),
    ),
    _add(1.0, -1.0): (
        *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__),
    ),
    _add(-1.0, 1.0): (Tensor.__rsub__,),
    _mul: (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
    _recurrent(recurrent.LSTMDerivatives()): (torch.lstm,),
    _recurrent(recurrent.GRUDerivatives()): (torch.gru,),
    _recurrent(recurrent.RNNDerivatives(), "tanh"): (torch.rnn_tanh,),
    _recurrent(recurrent.RNNDerivatives(), "relu"): (torch.rnn_relu,),
    **{_each(func): (func,) for func in _ON_EACH},
    _each(_bilinear): (functional.bilinear,),
    _each(_cdist): (torch.cdist,),
}
OPERATIONS: dict[Any, Rule] = {
    func: rule for rule, functions in _RULES.items() for func in functions
}
for _func, _rule in list(OPERATIONS.items()):
    if isinstance(_func, BuiltinFunctionType):  # operators have the same arguments
        _operator = getattr(torch.ops.aten, _func.__name__)
        _overloads = [getattr(_operator, name) for name in _operator.overloads()]
        OPERATIONS.update(dict.fromkeys([_operator, *_overloads], _rule))


def find_operation(
    func: Callable, args: Sequence[Any], kwargs: dict[str, Any], keys: Sequence[Any]
) -> Operation | None:
    """Describe an operation, if there is a rule for it.

    Args:
        func: The operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        keys: Which arguments are constants that need a gradient: positions, keywords,
            those of a list with the place there; ``None`` for one deeper inside.

    Returns:
        The operation, ``None`` if there is no rule that covers all constants.
    """
    rule = OPERATIONS.get(func)
    if rule is None or None in keys:
        return None
    try:
        found = rule(Called(args, kwargs, keys))
    except (AttributeError, IndexError, KeyError, TypeError):
        return None  # a spelling that the rule does not know
    if found is None or set(found.keys) != set(keys):
        return None
    return found
