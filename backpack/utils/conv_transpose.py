"""Transposed convolutions as matrix products: the counterpart of ``conv.py``.

The unfolded input ``[N, C_in * K, T]`` holds, for each of T output positions, the input
entries that reach it through each of the K kernel elements, and zeros where the kernel
falls between entries or outside. Features are ordered channel first, then kernel
position.
"""

from typing import Any, Callable, Optional, Sequence, Tuple, Type

from torch import Tensor, nn
from torch.nn import Module, functional
from torch.nn.functional import pad

from backpack.utils import conv
from backpack.utils.conv import ConvTransposeNd, for_axes, windows

extract_bias_diagonal = conv.extract_bias_diagonal


def get_conv_transpose_module(N: int) -> Type[Module]:
    """Return the class of a transposed convolution layer.

    Args:
        N: Number of spatial axes, 1, 2 or 3.

    Returns:
        ``ConvTranspose1d``, ``ConvTranspose2d`` or ``ConvTranspose3d``.

    Raises:
        ValueError: If ``N`` is none of these.
    """
    return for_axes(nn, "ConvTranspose", N)


def get_conv_transpose_function(N: int) -> Callable:
    """Return the function that convolves transposedly.

    Args:
        N: Number of spatial axes, 1, 2 or 3.

    Returns:
        ``conv_transpose1d``, ``conv_transpose2d`` or ``conv_transpose3d`` of
        ``torch.nn.functional``.

    Raises:
        ValueError: If ``N`` is none of these.
    """
    return for_axes(functional, "conv_transpose", N)


def unfold_by_conv_transpose(
    input: Tensor, module: ConvTransposeNd, output_size: Optional[Sequence[int]] = None
) -> Tensor:
    """Return the unfolded input of a transposed convolution.

    Multiplied from the left with the transposed weight, flattened to
    ``[C_out, C_in * K]``, it gives the output (without groups, without bias).

    A transposed convolution spreads the input entries by the stride, pads, and
    convolves with the flipped kernel at stride 1, so the same windows serve.

    Args:
        input: Input ``[N, C_in, *]``.
        module: Transposed convolution that prescribes kernel size, stride, padding,
            output padding and dilation.
        output_size: Spatial size of the output if it was requested from ``forward``;
            by default it follows from ``module.output_padding``.

    Returns:
        Unfolded input ``[N, C_in * K, T]`` of all channels, also for groups.

    Raises:
        ValueError: If the input has no batch axis.
    """
    conv.check_batched(input, module)
    kernel_size, dims = module.kernel_size, len(module.kernel_size)
    sizes = input.shape[2:]
    options: Any = (module.stride, module.padding, kernel_size, module.dilation)
    if output_size is None:
        smallest = conv.smallest_sizes(sizes, *options)
        output_size = [low + x for low, x in zip(smallest, module.output_padding)]
    amounts = [
        (d * (k - 1) - p, out + p - size * s)
        for size, out, s, p, k, d in zip(sizes, output_size, *options)
    ]
    spread = _spread(input, module.stride)
    spread = pad(spread, [amount for pair in reversed(amounts) for amount in pair])
    view = windows(spread, kernel_size, (1,) * dims, module.dilation)
    return conv.flatten_windows(view.flip(tuple(range(2, 2 + dims))), kernel_size)


def _spread(input: Tensor, stride: Tuple[int, ...]) -> Tensor:
    """Insert ``stride - 1`` zeros after each entry along the spatial axes.

    Args:
        input: Input ``[N, C, *]``.
        stride: Distance of the entries in the result, for each spatial axis.

    Returns:
        Tensor ``[N, C, *]`` whose spatial axes are ``stride`` times as long.
    """
    for axis, s in enumerate(stride, start=2):
        input = pad(input.movedim(axis, -1).unsqueeze(-1), (0, s - 1))
        input = input.flatten(start_dim=-2).movedim(-1, axis)
    return input


def get_weight_gradient_factors(
    input: Tensor, grad_out: Tensor, module: ConvTransposeNd
) -> Tuple[Tensor, Tensor]:
    """Return the matrices whose product is the weight gradient.

    Args:
        input: Input ``[N, C_in, *]``.
        grad_out: Gradient at the output ``[N, C_out, *]``.
        module: Transposed convolution.

    Returns:
        Unfolded input ``[N, C_in * K, T]`` and gradient at the output
        ``[N, C_out, T]``. For each sample, and each group of channels, the second
        times the transposed first is the gradient of ``weight.transpose(0, 1)``.

    Raises:
        ValueError: If the input has no batch axis.
    """
    unfolded = unfold_by_conv_transpose(input, module, output_size=grad_out.shape[2:])
    return unfolded, grad_out.flatten(start_dim=2)


def extract_weight_diagonal(
    module: ConvTransposeNd, unfolded_input: Tensor, S: Tensor, sum_batch: bool = True
) -> Tensor:
    """Return the diagonal of Σ_v Jᵀ s_v s_vᵀ J for a transposed convolution's weight.

    J is the output's Jacobian with respect to the weight.

    Args:
        module: Transposed convolution.
        unfolded_input: Unfolded input ``[N, C_in * K, T]``.
        S: Columns at the layer output ``[V, N, C_out, *]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Diagonal in the weight's shape ``[C_in, C_out / G, *K]``, with a leading axis N
        without the sum over samples.
    """
    squares = conv.sum_squared_weight_gradients(module, unfolded_input, S, sum_batch)
    in_per_group = module.in_channels // module.groups
    squares = squares.unflatten(-1, (in_per_group, -1)).transpose(-3, -2)
    return squares.reshape(*squares.shape[:-4], *module.weight.shape)
