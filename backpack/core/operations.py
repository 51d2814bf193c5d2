"""Operations that parameters enter: from arguments and cotangents to products.

A rule describes what an operation does with its constants, in the terms of the layer
that does the same: a call of ``torch.nn.functional.linear`` is a linear layer, whoever
calls it, with samples wherever they are. A rule that does not cover the arguments
returns ``None``; autograd then does it, see :mod:`backpack.engine.uses`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
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
from backpack.core.layout import Arrangement, Layout, Placement, once
from backpack.core.per_sample.base import Dense, PerSample, Summed
from backpack.core.per_sample.order import simplest
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.rows import Rows
from backpack.utils.types import as_type

Key = Union[int, str]  # where an argument stands: its position, or its keyword


class Operation(ABC):
    """An operation with constants, and how to form products with their Jacobians.

    Attributes:
        data: The operand that holds samples.
        keys: Which arguments the rule covers.
        takes_all: Whether it takes the cotangents of several outputs, in a list.
    """

    takes_all = False

    def __init__(self, data: Optional[Tensor], keys: Sequence[Key]):
        """Store the operand.

        Args:
            data: The operand that holds samples, ``None`` if products don't need it.
            keys: Which arguments the rule covers.
        """
        self.data, self.keys = data, tuple(keys)
        self._version = None if data is None else data._version

    @property
    def is_modified(self) -> bool:
        """Whether the operand was modified in place since."""
        return self.data is not None and self.data._version != self._version

    def reads_data(self, key: Key) -> bool:
        """Tell whether products with a constant's Jacobian are made of the operand.

        Args:
            key: Which argument the constant is.

        Returns:
            Whether they are.
        """
        return self.data is not None

    @abstractmethod
    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Layout, n: int
    ) -> Optional[PerSample]:
        """Describe the products of cotangents and a constant's Jacobian.

        Args:
            key: Which argument.
            shape: Its shape.
            cotangents: Columns ``[V, *out]`` at the output.
            out: Where the output's samples are.
            n: Number N of samples.

        Returns:
            The products, ``None`` if the rule does not cover it.
        """

    def positions(self, key: Key, n: int) -> int:
        """Count the positions of a sample that share a constant, for outer products.

        Args:
            key: Which argument the constant is.
            n: Number N of samples.

        Returns:
            Their number; 0 if products with its Jacobian have another form.
        """
        return 0

    def is_possible(self, placement: Placement) -> bool:
        """Tell whether the rule is for operands with samples at a place.

        A batch of one is anywhere.

        Args:
            placement: Where the operand's samples are.

        Returns:
            Whether it is.
        """
        return True


class LayerLike(Operation):
    """What a layer does: its derivatives tell the products.

    Attributes:
        derivatives: The layer's derivatives.
        layer: Its options.
        names: The parameters' names in the layer, by argument.
        features: Number of axes that are no rows, of input and output; ``None`` if all
            but the first are none.
    """

    def __init__(
        self,
        derivatives: BaseParameterDerivatives,
        layer: Any,
        names: Dict[Key, str],
        data: Tensor,
        features: Optional[Tuple[int, int]] = None,
    ):
        """Store the layer that does the same.

        Args:
            derivatives: The layer's derivatives.
            layer: Its options.
            names: The parameters' names in the layer, by argument.
            data: The input.
            features: Number of axes that are no rows, of input and output. Default:
                ``None`` if all but the first are none.
        """
        super().__init__(data, list(names))
        self.derivatives, self.layer, self.names = derivatives, layer, names
        self._features = features

    def is_possible(self, placement: Placement) -> bool:  # noqa: D102
        axes = 1
        if self._features is not None:
            axes = self.data.dim() - self._features[0]
        if isinstance(placement, Layout):
            return placement.axis < axes
        return isinstance(placement, Tensor) and axes > 0

    def reads_data(self, key: Key) -> bool:  # noqa: D102
        return self.names[key] != "bias"

    def positions(self, key: Key, n: int) -> int:  # noqa: D102
        x = self.data
        if self.names[key] != "weight" or not n:
            return 0
        if isinstance(self.derivatives, LinearDerivatives):
            return x.shape[:-1].numel() // n
        plain = type(self.derivatives) is ConvNDDerivatives
        return x.shape[2:].numel() * len(x) // n if plain else 0

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> Optional[PerSample]:  # noqa: D102
        x, name, lead = self.data, self.names[key], 1
        if self._features is not None:
            lead = x.dim() - self._features[0]
        if n == 1 and lead > 0:
            out = Layout(0, x.shape[0])
        try:
            arrangement = Arrangement(out, x.shape[:lead], n)  # type: ignore[arg-type]
        except ValueError:
            return None
        dtype = getattr(self.layer, name).dtype
        x, b = as_type(x, dtype), as_type(cotangents, dtype)
        derivatives, layer = self.derivatives, self.layer
        if arrangement.is_trivial:
            return derivatives.product(name, layer, [x], b)
        x, b = arrangement.rows(x), arrangement.rows(b, 1)
        if self._features is not None:
            return derivatives.product(name, layer, [x], b)
        x, b = x.flatten(0, 1), b.flatten(1, 2)
        return merge_rows(derivatives.product(name, layer, [x], b), n)


def merge_rows(product: PerSample, n: int) -> PerSample:
    """Add up the products of each sample's rows.

    Args:
        product: Products of N·R rows, sample by sample.
        n: Number N of samples.

    Returns:
        Products of N samples.
    """
    if isinstance(product, Outer):
        a = product.a.unflatten(0, (n, -1)).transpose(1, 2).flatten(2, 3)
        b = product.b.unflatten(1, (n, -1)).transpose(2, 3).flatten(3, 4)
        return product.like(lambda: a, b)
    if isinstance(product, Summed):
        b = product.b.unflatten(1, (n, -1)).flatten(2, 3)
        return Summed(b, product.shape, product.groups, product.sums_positions)
    if isinstance(product, Rows):
        ids = product.ids.unflatten(0, (n, -1)).flatten(1)
        valid = product.valid.unflatten(0, (n, -1)).flatten(1)
        b = product.b.unflatten(1, (n, -1)).flatten(2, 3)
        return Rows(ids, b, product.shape, valid)
    products = product.individual().unflatten(1, (n, -1)).sum(2)
    return Dense(products, product.shape)


class Contraction(Operation):
    """A product of rows with a matrix: ``out[r, o] = Σᵢ x[r, i] W[i, o]``.

    Attributes:
        key: Which argument the matrix is.
        outputs: Axes of the output that come from the matrix.
    """

    def __init__(
        self,
        key: Key,
        data: Tensor,
        inputs: Sequence[int],
        outputs: Sequence[int],
        weight_axes: Sequence[int],
        scale: float = 1.0,
    ):
        """Store which axes are contracted.

        Args:
            key: Which argument the matrix is.
            data: The other operand.
            inputs: Its axes that are contracted; the others are rows, in the order of
                the output's.
            outputs: Axes of the output that come from the matrix.
            weight_axes: Where the matrix has its output axes, then its input axes.
            scale: Number that the product is multiplied by. Default: 1.
        """
        super().__init__(data, [key])
        self.key, self._inputs, self.outputs = key, inputs, outputs
        self._weight_axes, self._scale = list(weight_axes), scale

    def is_possible(self, placement: Placement) -> bool:  # noqa: D102
        if isinstance(placement, Layout):
            return placement.axis not in self._inputs
        return isinstance(placement, Tensor)

    def reads_data(self, key: Key) -> bool:  # noqa: D102
        return key == self.key

    def positions(self, key: Key, n: int) -> int:  # noqa: D102
        if key != self.key or not n:
            return 0
        size = prod(self.data.shape[axis] for axis in self._inputs)
        return self.data.numel() // max(1, size * n)

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> Optional[PerSample]:  # noqa: D102
        outputs, inputs = self.outputs, self._inputs
        if n == 1:
            out = _anywhere(cotangents.shape[1:], outputs)
        b = cotangents.movedim([o + 1 for o in outputs], [*range(-len(outputs), 0)])
        rows = b.shape[1 : b.dim() - len(outputs)]
        if isinstance(out, Layout):
            if out.axis in outputs:
                return None
            out = Layout(out.axis - sum(o < out.axis for o in outputs), out.inner)
        elif isinstance(out, Tensor):
            last = [*range(-len(outputs), 0)]
            moved, key_of = out, ("moved", *outputs)
            out = once(moved, key_of, lambda: moved.movedim([*outputs], last))
        try:
            arrangement = Arrangement(out, rows, n)  # type: ignore[arg-type]
        except ValueError:
            return None
        b = arrangement.rows(b, 1).flatten(3)
        if key != self.key:
            if prod(shape) != b.shape[-1]:
                return None
            if len(shape) > 1:
                return Dense(b.sum(2).unflatten(-1, shape), shape)
            return Summed(b, shape)
        x = self.data.movedim([*inputs], [*range(-len(inputs), 0)])
        a = arrangement.rows(as_type(x, b.dtype)).flatten(2)
        if self._scale != 1.0:
            b = b * self._scale
        axes = self._weight_axes
        sizes = [shape[axis] for axis in axes]
        order = simplest(sizes, [axes.index(i) for i in range(len(axes))])
        return Outer(lambda: a.unsqueeze(1), b.unsqueeze(2), shape, order)


class Broadcast(Operation):
    """``x + c`` or ``x * c`` for a constant that is broadcast along the samples."""

    def __init__(self, key: Key, data: Optional[Tensor], scale: float = 1.0):
        """Store the other operand.

        Args:
            key: Which argument the constant is.
            data: What it is multiplied with, ``None`` if it is added.
            scale: Number that it is multiplied with. Default: 1.
        """
        super().__init__(data, [key])
        self._scale = scale

    def product(
        self, key: Key, shape: torch.Size, cotangents: Tensor, out: Placement, n: int
    ) -> Optional[PerSample]:  # noqa: D102
        if n == 1:
            extra = cotangents.dim() - 1 - len(shape)
            taken = [i + extra for i, size in enumerate(shape) if size != 1]
            out = _anywhere(cotangents.shape[1:], taken)
        if not isinstance(out, Layout):
            return None
        missing = cotangents.dim() - 1 - len(shape)
        full = [1] * missing + list(shape)
        if missing < 0 or full[out.axis] != 1:
            return None
        if self.data is not None:
            cotangents = cotangents * self.data
        if self._scale != 1.0:
            cotangents = cotangents * self._scale
        axis, inner = out
        sizes = cotangents.shape[1:]
        b = cotangents.movedim(axis + 1, 1)
        del full[axis]
        rest = [size for i, size in enumerate(sizes) if i != axis]
        if sizes[axis] != n * inner or inner > 1:
            b = b.unflatten(1, (-1, n, inner)).sum((1, 3))
        sums = [i + 2 for i, size in enumerate(full) if size == 1 and rest[i] != 1]
        positions = [i for i in sums if i < 2 + len(rest) - len(shape)]
        if (
            self.data is None  # as in a layer's bias
            and len(shape) == 1
            and positions == sums
            and sums
            and len(rest) == len(sums) + 1
        ):
            return Summed(b.reshape(len(b), n, -1, shape[0]), shape)
        b = b.sum(sums) if sums else b
        return Dense(b.reshape(len(b), n, *shape), shape)


def _anywhere(shape: Sequence[int], taken: Sequence[int]) -> Optional[Layout]:
    """Say where a single sample is: along any axis that is not taken."""
    free = [axis for axis in range(len(shape)) if axis not in taken]
    return Layout(free[0], shape[free[0]]) if free else None


def _bound(names: str, args: Sequence[Any], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Bind arguments to names, in the order of a signature."""
    return {**dict(zip(names.split(), args)), **kwargs}


def _keys(
    names: str, args: Sequence[Any], wanted: Sequence[str], bound: Dict[str, Any]
) -> Dict[Key, str]:
    """Tell where arguments stand that need a gradient, by position or keyword."""
    order = names.split()
    keys: Dict[Key, str] = {}
    for name in wanted:
        value = bound.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            position = order.index(name)
            keys[position if position < len(args) else name] = name
    return keys


def _linear(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input weight bias"
    bound = _bound(names, args, kwargs)
    layer = SimpleNamespace(weight=bound["weight"], bias=bound.get("bias"))
    keys = _keys(names, args, ("weight", "bias"), bound)
    if layer.weight.dim() != 2:
        return None
    return LayerLike(LinearDerivatives(), layer, keys, bound["input"], (1, 1))


def _tuple(value: Any, size: int) -> Tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * size
    return tuple(value) * (size if len(value) == 1 else 1)


def _conv(axes: int) -> Callable:
    names = "input weight bias stride padding dilation groups"

    def rule(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
        bound = _bound(names, args, kwargs)
        x, weight = bound["input"], bound["weight"]
        if x.dim() != axes + 2:
            return None
        padding = bound.get("padding", 0)
        groups = bound.get("groups", 1)
        layer = SimpleNamespace(
            weight=weight,
            bias=bound.get("bias"),
            stride=_tuple(bound.get("stride", 1), axes),
            padding=padding if isinstance(padding, str) else _tuple(padding, axes),
            dilation=_tuple(bound.get("dilation", 1), axes),
            groups=groups,
            kernel_size=tuple(weight.shape[2:]),
            padding_mode="zeros",
            in_channels=weight.shape[1] * groups,
            out_channels=weight.shape[0],
            transposed=False,
            output_padding=(0,) * axes,
        )
        layer._reversed_padding_repeated_twice = _reversed_padding(layer)
        keys = _keys(names, args, ("weight", "bias"), bound)
        return LayerLike(ConvNDDerivatives(axes), layer, keys, x)

    return rule


def _reversed_padding(layer: Any) -> List[int]:
    """Return the padding of both ends, the last axis first, as `pad` wants it."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    both: List[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[i] * (layer.kernel_size[i] - 1)
            both += [total // 2, total - total // 2]
        else:
            both += [layer.padding[i]] * 2
    return both


def _conv_transpose(axes: int) -> Callable:
    names = "input weight bias stride padding output_padding groups dilation"

    def rule(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
        bound = _bound(names, args, kwargs)
        x, weight = bound["input"], bound["weight"]
        if x.dim() != axes + 2:
            return None
        groups = bound.get("groups", 1)
        layer = SimpleNamespace(
            weight=weight,
            bias=bound.get("bias"),
            stride=_tuple(bound.get("stride", 1), axes),
            padding=_tuple(bound.get("padding", 0), axes),
            output_padding=_tuple(bound.get("output_padding", 0), axes),
            dilation=_tuple(bound.get("dilation", 1), axes),
            groups=groups,
            kernel_size=tuple(weight.shape[2:]),
            padding_mode="zeros",
            in_channels=weight.shape[0],
            out_channels=weight.shape[1] * groups,
            transposed=True,
        )
        keys = _keys(names, args, ("weight", "bias"), bound)
        return LayerLike(ConvTransposeNDDerivatives(axes), layer, keys, x)

    return rule


def _embedding(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        names = "weight input padding_idx scale_grad_by_freq sparse"  # torch.embedding
    bound = _bound(names, args, kwargs)
    weight, padding = bound["weight"], bound.get("padding_idx")
    if bound.get("scale_grad_by_freq"):
        return None  # it counts occurrences in the batch
    if padding is not None and padding < 0:
        padding = None if names.startswith("weight") else padding + len(weight)
    layer = SimpleNamespace(
        weight=weight, padding_idx=padding, num_embeddings=len(weight)
    )
    layer.scale_grad_by_freq = False
    keys = _keys(names, args, ("weight",), bound)
    return LayerLike(EmbeddingDerivatives(), layer, keys, bound["input"], (0, 1))


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
        layer = SimpleNamespace(normalized_shape=shape, eps=eps)
        layer.weight, layer.bias = bound.get("weight"), bound.get("bias")
        keys = _keys(names, args, ("weight", "bias"), bound)
        features = len(shape), len(shape)
        return LayerLike(derivatives, layer, keys, bound["input"], features)

    return rule


def _group_norm(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input num_groups weight bias eps"
    bound = _bound(names, args, kwargs)
    layer = SimpleNamespace(num_groups=bound["num_groups"], eps=bound.get("eps", 1e-5))
    layer.weight, layer.bias = bound.get("weight"), bound.get("bias")
    keys = _keys(names, args, ("weight", "bias"), bound)
    return LayerLike(GroupNormDerivatives(), layer, keys, bound["input"])


def _statistics(bound: Dict[str, Any]) -> Dict[str, Optional[Tensor]]:
    """Copy running statistics, which may move before the backward pass."""
    found = {name: bound.get(name) for name in ("running_mean", "running_var")}
    return {name: x if x is None else x.clone() for name, x in found.items()}


def _instance_norm(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    bound = _bound(names, args, kwargs)
    own = bound.get("use_input_stats", True)
    layer = SimpleNamespace(training=own, eps=bound.get("eps", 1e-5))
    vars(layer).update(_statistics({} if own else bound))
    layer.weight, layer.bias = bound.get("weight"), bound.get("bias")
    keys = _keys(names, args, ("weight", "bias"), bound)
    return LayerLike(InstanceNormNdDerivatives(), layer, keys, bound["input"])


def _batch_norm(args: Sequence[Any], kwargs: Dict[str, Any]) -> Optional[Operation]:
    names = "input running_mean running_var weight bias training momentum eps"
    bound = _bound(names, args, kwargs)
    if bound.get("training") or bound.get("running_mean") is None:
        return None
    layer = SimpleNamespace(training=False, eps=bound.get("eps", 1e-5))
    vars(layer).update(_statistics(bound))
    layer.weight, layer.bias = bound.get("weight"), bound.get("bias")
    keys = _keys(names, args, ("weight", "bias"), bound)
    return LayerLike(BatchNormNdDerivatives(), layer, keys, bound["input"])


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
    torch.conv_transpose1d: Rule(_conv_transpose(1)),
    torch.conv_transpose2d: Rule(_conv_transpose(2)),
    torch.conv_transpose3d: Rule(_conv_transpose(3)),
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
