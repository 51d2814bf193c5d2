"""Convolutions as matrix products: unfolded inputs, and what is built from them.

The unfolded input ``[N, C_in * K, T]`` holds, for each of T output positions, the input
patch that the kernel with K elements covers. Features are ordered channel first, then
kernel position, as in ``torch.nn.Unfold``.
"""

from typing import Any, Callable, List, Optional, Tuple, Type, Union

from torch import Tensor, nn
from torch.nn import Module, functional

from backpack.utils.hooks import name_module
from backpack.utils.linear import sum_squared_outer_products, sum_squares

ConvNd = Union[nn.Conv1d, nn.Conv2d, nn.Conv3d]
ConvTransposeNd = Union[nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
AnyConv = Union[ConvNd, ConvTransposeNd]
Sizes = Tuple[int, ...]  # one for each spatial axis


def for_axes(namespace: Any, name: str, N: int) -> Any:
    """Look up what PyTorch has for a number of spatial axes.

    Args:
        namespace: Where it is.
        name: Its name without the number of axes, for instance ``"Conv"``.
        N: Number of spatial axes.

    Returns:
        The class or function.

    Raises:
        ValueError: If there is none.
    """
    if N not in (1, 2, 3):
        raise ValueError(f"Expected [1, 2, 3] spatial axes, got {N}.")
    return getattr(namespace, f"{name}{N}d")


def get_conv_module(N: int) -> Type[Module]:
    """Return the class of a convolution layer.

    Args:
        N: Number of spatial axes, 1, 2 or 3.

    Returns:
        ``Conv1d``, ``Conv2d`` or ``Conv3d``.

    Raises:
        ValueError: If ``N`` is none of these.
    """
    return for_axes(nn, "Conv", N)


def get_conv_function(N: int) -> Callable:
    """Return the function that convolves.

    Args:
        N: Number of spatial axes, 1, 2 or 3.

    Returns:
        ``conv1d``, ``conv2d`` or ``conv3d`` of ``torch.nn.functional``.

    Raises:
        ValueError: If ``N`` is none of these.
    """
    return for_axes(functional, "conv", N)


def check_batched(input: Tensor, module: AnyConv) -> None:
    """Check that a (transposed) convolution's input has a batch axis.

    Args:
        input: Input of the layer.
        module: Layer.

    Raises:
        ValueError: If it does not.
    """
    expected = 2 + len(module.kernel_size)
    if input.ndim != expected:
        raise ValueError(
            f"{name_module(module)}: expected an input [N, C_in, *] with {expected} "
            f"axes, got shape {list(input.shape)}. An input without batch axis needs "
            "`unsqueeze(0)`."
        )


def windows(
    input: Tensor, kernel_size: Sizes, stride: Sizes, dilation: Sizes
) -> Tensor:
    """View the input through a sliding window.

    Args:
        input: Padded input ``[N, C, *]``.
        kernel_size: Extent ``[*K]`` of the window.
        stride: Distance between two window positions.
        dilation: Distance between two entries of a window.

    Returns:
        View ``[N, C, *K, *T]``, with output positions ``[*T]``.
    """
    dims = len(kernel_size)
    for axis, (k, s, d) in enumerate(zip(kernel_size, stride, dilation), start=2):
        input = input.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    positions, kernel = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    return input.permute(0, 1, *kernel, *positions)


def flatten_windows(view: Tensor, kernel_size: Sizes) -> Tensor:
    """Merge the axes of windows into features and positions.

    Args:
        view: Windows ``[N, C, *K, *T]``.
        kernel_size: Extent ``[*K]`` of the window.

    Returns:
        Matrices ``[N, C * K, T]``.
    """
    dims = len(kernel_size)
    return view.flatten(2 + dims).flatten(1, 1 + dims)


def pad_input(input: Tensor, module: ConvNd) -> Tensor:
    """Pad the input of a convolution as the module would.

    Args:
        input: Input ``[N, C_in, *]``.
        module: Convolution with any padding and padding mode.

    Returns:
        Padded input ``[N, C_in, *]``, whose convolution needs no padding.
    """
    if module.padding == "valid":
        return input
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
        sides = [(size // 2, size - size // 2) for size in total]
    else:
        sides = [(int(size), int(size)) for size in module.padding]
    amounts = [size for pair in reversed(sides) for size in pair]
    if not any(amounts):
        return input
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(input, amounts, mode=mode)


def input_windows(input: Tensor, module: ConvNd, channels_last: bool = False) -> Tensor:
    """View the padded input of a convolution through its kernel's window.

    Args:
        input: Input ``[N, C_in, *]``.
        module: Convolution.
        channels_last: Whether channels shall lie side by side in memory. Default:
            ``False``.

    Returns:
        View ``[N, C_in, *K, *T]``.

    Raises:
        ValueError: If the input has no batch axis.
    """
    check_batched(input, module)
    padded = pad_input(input, module)
    if channels_last:
        padded = padded.movedim(1, -1).contiguous().movedim(-1, 1)
    return windows(padded, module.kernel_size, module.stride, module.dilation)


def unfold_by_conv(input: Tensor, module: ConvNd) -> Tensor:
    """Return the unfolded input of a convolution.

    Multiplied from the left with the weight, flattened to ``[C_out, C_in * K]``, it
    gives the output of the convolution (without groups, without bias).

    Args:
        input: Input ``[N, C_in, *]``.
        module: Convolution that prescribes kernel size, stride, padding, padding mode
            and dilation.

    Returns:
        Unfolded input ``[N, C_in * K, T]`` of all channels, also for groups.

    Raises:
        ValueError: If the input has no batch axis.
    """
    return flatten_windows(input_windows(input, module), module.kernel_size)


def unfold_input(module: ConvNd, input: Tensor) -> Tensor:
    """Return the unfolded input of a convolution, see :func:`unfold_by_conv`.

    Args:
        module: Convolution.
        input: Input ``[N, C_in, *]``.

    Returns:
        Unfolded input ``[N, C_in * K, T]``.

    Raises:
        ValueError: If the input has no batch axis.
    """
    return unfold_by_conv(input, module)


def get_weight_gradient_factors(
    input: Tensor, grad_out: Tensor, module: ConvNd
) -> Tuple[Tensor, Tensor]:
    """Return the matrices whose product is the weight gradient.

    Args:
        input: Input ``[N, C_in, *]``.
        grad_out: Gradient at the output ``[N, C_out, *]``.
        module: Convolution.

    Returns:
        Unfolded input ``[N, C_in * K, T]`` and gradient at the output
        ``[N, C_out, T]``. For each sample, and each group of channels, the second
        times the transposed first is the weight gradient.

    Raises:
        ValueError: If the input has no batch axis.
    """
    return unfold_by_conv(input, module), grad_out.flatten(start_dim=2)


def sum_squared_weight_gradients(
    module: AnyConv, unfolded_input: Tensor, S: Tensor, sum_batch: bool
) -> Tensor:
    """Square the weight gradients of a (transposed) convolution and sum over columns.

    Args:
        module: Layer.
        unfolded_input: Unfolded input ``[N, C_in * K, T]``.
        S: Columns at the layer output ``[V, N, C_out, *]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Squares ``[N, G, C_out / G, C_in / G * K]``, or ``[G, C_out / G, C_in / G * K]``
        with the sum over samples, with G groups.
    """
    groups = (module.groups, -1)
    x = unfolded_input.unflatten(1, groups)
    s = S.flatten(start_dim=3).unflatten(2, groups)
    return sum_squared_outer_products(x, s, sum_batch)


def extract_weight_diagonal(
    module: ConvNd, unfolded_input: Tensor, S: Tensor, sum_batch: bool = True
) -> Tensor:
    """Return the diagonal of Σ_v Jᵀ s_v s_vᵀ J for a convolution's weight.

    J is the output's Jacobian with respect to the weight.

    Args:
        module: Convolution.
        unfolded_input: Unfolded input ``[N, C_in * K, T]``.
        S: Columns at the layer output ``[V, N, C_out, *]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Diagonal in the weight's shape ``[C_out, C_in / G, *K]``, with a leading axis N
        without the sum over samples.
    """
    squares = sum_squared_weight_gradients(module, unfolded_input, S, sum_batch)
    return squares.reshape(*squares.shape[:-3], *module.weight.shape)


def extract_bias_diagonal(module: AnyConv, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Return the diagonal of Σ_v Jᵀ s_v s_vᵀ J for a (transposed) convolution's bias.

    J is the output's Jacobian with respect to the bias.

    Args:
        module: Convolution or transposed convolution.
        S: Columns at the layer output ``[V, N, C_out, *]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Diagonal in the bias' shape ``[C_out]``, with a leading axis N without the sum
        over samples.
    """
    return sum_squares(S.flatten(start_dim=3).sum(3), sum_batch)


def smallest_sizes(sizes: Sizes, *options: Sizes) -> List[int]:
    """Compute the smallest input sizes that a convolution maps to an output.

    Args:
        sizes: Sizes of the output, one for each spatial axis.
        options: Strides, paddings, kernel sizes and dilations, in this order.

    Returns:
        Sizes of the input.
    """
    axes = zip(sizes, *options)
    return [(size - 1) * s - 2 * p + d * (k - 1) + 1 for size, s, p, k, d in axes]


def _grad_input_padding(
    grad_output: Tensor,
    input_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    kernel_size: Sizes,
    dilation: Optional[Sizes] = None,
) -> Sizes:
    """Return the output padding with which a transposed convolution undoes the shape.

    Several input sizes give the same output size of a strided convolution.

    Args:
        grad_output: Tensor of the convolution's output shape ``[N, C_out, *]``.
        input_size: Size of the convolution's input, with or without the two leading
            axes.
        stride: Stride of the convolution.
        padding: Padding of the convolution.
        kernel_size: Kernel size of the convolution.
        dilation: Dilation of the convolution, 1 by default.

    Returns:
        Output padding, one entry for each spatial axis.

    Raises:
        ValueError: If no such input size gives this output size.
    """
    dims = len(kernel_size)
    if len(input_size) not in (dims, dims + 2) or grad_output.ndim != dims + 2:
        raise ValueError(
            f"Expected an output of {dims + 2} axes and an input size of {dims} or "
            f"{dims + 2} entries for a kernel of {dims} axes, got output shape "
            f"{list(grad_output.shape)} and input size {list(input_size)}."
        )
    options = stride, padding, kernel_size, dilation or (1,) * dims
    smallest = smallest_sizes(grad_output.shape[2:], *options)
    spatial = input_size[-dims:]
    output_padding = tuple(size - low for size, low in zip(spatial, smallest))
    if any(not 0 <= extra < s for extra, s in zip(output_padding, stride)):
        raise ValueError(
            f"Expected an input size between {smallest} and "
            f"{[low + s - 1 for low, s in zip(smallest, stride)]} for output shape "
            f"{list(grad_output.shape)}, got {list(spatial)}."
        )
    return output_padding
