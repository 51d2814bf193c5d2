"""Derivatives of convolutions with one to three spatial axes."""

from contextlib import AbstractContextManager
from math import prod
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from einops import rearrange
from torch import Tensor

from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.derivatives.stored import shallow_copy
from backpack.core.fast import tuning
from backpack.core.fast.matmul import has_fast_matmul
from backpack.core.per_sample.base import PerSample, Summed
from backpack.core.per_sample.order import Order
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.recipe import Recipe
from backpack.core.per_sample.unfolding import Unfolding
from backpack.utils.conv import pad_input, unfold_by_conv
from backpack.utils.types import Grads, Layer


class weight_jac_t_save_memory(AbstractContextManager):  # noqa: N801
    """Kept for programs that choose between two ways to compute weight products.

    There is nothing left to choose: no product repeats the input.
    """

    def __init__(self, save_memory: bool = True):
        """Accept the choice.

        Args:
            save_memory: Has no effect. Default: ``True``.
        """
        self.save_memory = save_memory

    def __exit__(self, *exc_info: Any) -> None:
        """Leave the context; exceptions pass through."""


# Options of a convolution, as ``torch.convolution`` takes them: stride, zeros on both
# sides, dilation, whether it is transposed, and rows at one side of the output then
Geometry = Tuple[Any, ...]


def weight_gradients(
    x: Tensor, cotangents: Tensor, sum_batch: bool, module: Layer, geometry: Geometry
) -> Tensor:
    """Compute weight gradients of each sample with one library call.

    Nothing needs to be unfolded.

    Args:
        x: Padded inputs of shape ``[n, C_in, *]``.
        cotangents: A single column ``[1, n, C_out, *]``.
        sum_batch: Whether they are summed over samples.
        module: The layer, with a weight of shape ``[*p]``.
        geometry: Geometry of the convolution.

    Returns:
        Gradients of shape ``[1, n, *p]``, without n if they are summed.
    """
    n, shape, groups = cotangents.shape[1], module.weight.shape, module.groups
    samples = () if sum_batch else (n,)
    if n == 0:
        return x.new_zeros(1, *samples, *shape)
    b = cotangents[0]
    if not sum_batch:  # samples become groups of one large convolution
        x, b = x.reshape(1, -1, *x.shape[2:]), cotangents.flatten(1, 2)
        groups *= n
    # axes of length 1 may have strides of another memory format, which PyTorch then
    # takes for the result's, too, and refuses to write to
    x, b = [t.flatten().view(t.shape) if t.is_contiguous() else t for t in (x, b)]
    # not read; if it had gaps, it would be copied
    weight = x.new_empty(prod(samples) * shape[0], *shape[1:])
    args = b, x, weight, None, *geometry, groups, (False, True, False)
    gradients = torch.ops.aten.convolution_backward(*args)[1]
    return gradients.unflatten(0, (1, *samples, -1))


def pads_symmetric_zeros(module: Layer) -> bool:
    """Tell whether the library's convolution pads by itself as the layer does.

    Args:
        module: The layer.

    Returns:
        Whether as many zeros are added on both sides of each axis.
    """
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def without_bias(module: Layer) -> Layer:
    """Copy a layer without its bias.

    Args:
        module: The layer.

    Returns:
        Shallow copy that shares the weight.
    """
    return shallow_copy(module, _parameters={**module._parameters, "bias": None})


class ConvNDDerivatives(LinearMapDerivatives, BaseParameterDerivatives):
    """Derivatives of :class:`torch.nn.Conv1d`, ``Conv2d`` and ``Conv3d``.

    With every option: groups, dilation, string padding, all padding modes.
    """

    affine_in_params = True

    def __init__(self, N: int):
        """Store the number of spatial axes.

        Args:
            N: Number of spatial axes, 1 to 3.
        """
        self.conv_dims = N

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:
        """Apply the convolution without its bias.

        Args:
            module: The layer, with its output.
            x: Tensor of shape ``[M, C_in, *]``.

        Returns:
            Tensor of shape ``[M, C_out, *]``.
        """
        return without_bias(module).forward(x)

    def _param_jac_mat_prod(
        self, param_str: str, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if param_str != "bias":
            return super()._param_jac_mat_prod(param_str, module, g_inp, g_out, mat)
        mat = mat.reshape(len(mat), 1, -1, *[1] * self.conv_dims)
        return mat.expand(-1, *module.output.shape)

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        if not pads_symmetric_zeros(module):
            return super()._jac_t_mat_prod(module, g_inp, g_out, mat)
        columns = mat.flatten(0, 1)
        shape = (len(columns), *module.input0.shape[1:])
        x = columns.new_empty(shape)  # not read, either
        geometry = self._geometry(module, module.input0, module.output)
        args = columns, x, module.weight, None, *geometry, module.groups
        products, *_ = torch.ops.aten.convolution_backward(*args, (True, False, False))
        return products.unflatten(0, mat.shape[:2])

    def _geometry(self, module: Layer, x: Tensor, output: Tensor) -> Geometry:
        """Describe a call of a layer on padded input, unless padding is the library's.

        Args:
            module: The layer.
            x: Its input, ``[N, C_in, *]``.
            output: Its output, ``[N, C_out, *]``, or something as large.

        Returns:
            The geometry.
        """
        none = [0] * self.conv_dims
        padding = module.padding if pads_symmetric_zeros(module) else none
        return module.stride, padding, module.dilation, False, none

    def get_unfolded_input(self, module: Layer) -> Tensor:
        """Unfold the input of the layer.

        Args:
            module: The layer, with its ``input0``.

        Returns:
            Unfolded input of shape ``[N, C_in * K, T]``.
        """
        return self._unfold(module, module.input0, None)

    def product(
        self, name: str, module: Layer, inputs: Sequence[Tensor], cotangents: Tensor
    ) -> PerSample:
        """Describe the products of cotangents and a parameter's Jacobian.

        Args:
            name: ``"weight"`` or ``"bias"``.
            module: The layer.
            inputs: Its input, of shape ``[N, C_in, *]``.
            cotangents: Columns at its output, of shape ``[V, N, C_out, *]``.

        Returns:
            The products.
        """
        x, g = inputs[0], module.groups
        v, n, channels, *out_size = cotangents.shape
        if name == "bias":
            b = cotangents.flatten(start_dim=3).mT
            return Summed(b, module.bias.shape, g, sums_positions=True)

        def unfolded() -> Tensor:
            unfolded = self._unfold(module, x, out_size)
            return rearrange(unfolded, "n (g d) t -> n g t d", g=g)

        def make(x: Tensor, cotangents: Tensor) -> PerSample:
            return self.product(name, module, (x,), cotangents)

        return Outer(
            unfolded,
            cotangents.reshape(v, n, g, channels // g, prod(out_size)).mT,
            module.weight.shape,
            self._order(module),
            Recipe(x, cotangents, make, self._direct(module, x, cotangents)),
            self._unfolding(module, x),
            sums_positions=True,
        )

    def _unfolding(self, module: Layer, x: Tensor) -> Optional[Unfolding]:
        """Return faster ways to unfold some samples of the input."""
        return Unfolding(module, x)

    def _unfold(
        self, module: Layer, x: Tensor, out_size: Optional[Sequence[int]]
    ) -> Tensor:
        return unfold_by_conv(x, module)

    def _order(self, module: Layer) -> Optional[Order]:
        return None

    def _direct(
        self, module: Layer, x: Tensor, cotangents: Tensor
    ) -> Optional[Callable]:
        """Return how to form products without unfolding, if that is faster.

        It is for a single column, unless unfolding is only a change of view.
        """
        if len(cotangents) != 1 or not self._prefers_convolution(module, x, cotangents):
            return None
        geometry = self._geometry(module, x, cotangents[0])
        pads = pads_symmetric_zeros(module)

        def form(x: Tensor, cotangents: Tensor, sum_batch: bool) -> Tensor:
            x = x if pads else pad_input(x, module)
            return weight_gradients(x, cotangents, sum_batch, module, geometry)

        return form

    def _prefers_convolution(
        self, module: Layer, x: Tensor, cotangents: Tensor
    ) -> bool:
        """Tell whether a convolution forms products of one column faster."""
        weight = module.weight
        if weight.shape[2:].numel() == 1 and set(module.stride) == {1}:
            return False
        positions = cotangents.shape[3:].numel()
        large = weight.numel() >= tuning.LARGE_PRODUCT * module.groups
        few = positions * module.groups <= tuning.FEW_POSITIONS * len(weight)
        return not (large and few and has_fast_matmul(x))
