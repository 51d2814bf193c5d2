"""Derivatives of transposed convolutions with one to three spatial axes."""

from math import prod
from typing import Optional, Sequence

from torch import Tensor

from backpack.core.derivatives import convnd
from backpack.core.per_sample.order import Order, simplest
from backpack.utils.conv import smallest_sizes
from backpack.utils.conv_transpose import (
    get_conv_transpose_function,
    unfold_by_conv_transpose,
)
from backpack.utils.types import Layer


class ConvTransposeNDDerivatives(convnd.ConvNDDerivatives):
    """Derivatives of :class:`torch.nn.ConvTranspose1d`, ``2d`` and ``3d``.

    The output's size comes from the call, so that ``forward(x, output_size=...)`` is
    covered as well as ``output_padding``.
    """

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:
        """Apply the transposed convolution without its bias.

        Args:
            module: The layer, with its output, whose size it keeps.
            x: Tensor of shape ``[M, C_in, *]``.

        Returns:
            Tensor of shape ``[M, C_out, *]``.
        """
        # the layer's own `forward(x, output_size=...)` does not take all sizes
        stride, padding, dilation, _, rest = self._geometry(module, x, module.output)
        convolve = get_conv_transpose_function(len(rest))
        options = stride, padding, rest, module.groups, dilation
        return convolve(x, module.weight, None, *options)

    def _geometry(self, module: Layer, x: Tensor, output: Tensor) -> convnd.Geometry:
        options = module.stride, module.padding, module.kernel_size, module.dilation
        smallest = smallest_sizes(x.shape[2:], *options)
        rest = [size - low for size, low in zip(output.shape[2:], smallest)]
        return module.stride, module.padding, module.dilation, True, rest

    def _unfold(
        self, module: Layer, x: Tensor, out_size: Optional[Sequence[int]]
    ) -> Tensor:
        return unfold_by_conv_transpose(x, module, out_size)

    def _order(self, module: Layer) -> Optional[Order]:
        channels, features, *kernel = module.weight.shape
        groups = module.groups
        sizes = (groups, features, channels // groups, prod(kernel))
        return simplest(sizes, (0, 2, 1, 3))

    def _unfolding(self, module: Layer, x: Tensor) -> None:
        """Return nothing: there is no other way to unfold."""

    def _prefers_convolution(
        self, module: Layer, x: Tensor, cotangents: Tensor
    ) -> bool:
        return True
