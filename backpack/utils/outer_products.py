"""Squares of weight gradients that are sums of outer products.

The weight gradient of Linear, Conv1-3d and ConvTranspose1-3d is, per sample n and
column v, Σ_t s_t a_tᵀ: features a of the (unfolded) input and the vector s at the layer
output, summed over the positions t that share the weight.
"""

from torch import Tensor, cat, einsum, matmul, promote_types

MAX_BUFFER_ELEMENTS = 2**22
"""Number of elements of individual products that are formed at a time."""


def sum_squared_outer_products(x: Tensor, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Square the outer products, summed over positions, and sum over columns.

    Args:
        x: Input features ``[N, G, I, T]``, with G groups and T positions.
        S: Columns at the output ``[V, N, G, O, T]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Σ_v (Σ_t s_t a_tᵀ)², ``[N, G, O, I]``, or its sum over samples ``[G, O, I]``.
    """
    dtype = promote_types(x.dtype, S.dtype)
    x, S = x.to(dtype), S.to(dtype)

    if x.shape[-1] == 1:
        equation = f"ngo,ngi->{'' if sum_batch else 'n'}goi"
        return einsum(equation, S.squeeze(-1).square().sum(0), x.squeeze(-1).square())

    V, N, G, O, T = S.shape  # noqa: E741
    I = x.shape[2]  # noqa: E741
    S = S.permute(1, 2, 0, 3, 4).reshape(N, G, V * O, T)
    chunk = max(1, MAX_BUFFER_ELEMENTS // max(1, G * V * O * I))
    parts = []
    for x_n, S_n in zip(x.split(chunk), S.split(chunk)):
        squares = matmul(S_n, x_n.transpose(2, 3)).square()
        axes = (0, 2) if sum_batch else 2
        parts.append(squares.reshape(-1, G, V, O, I).sum(axes))
    return sum(parts) if sum_batch else cat(parts)


def sum_squares(grad: Tensor, sum_batch: bool = True) -> Tensor:
    """Square individual gradients and sum over columns.

    Args:
        grad: Individual gradients ``[V, N, *]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Sum of the squares ``[*]``, or ``[N, *]`` without the sum over samples.
    """
    return grad.square().sum((0, 1) if sum_batch else 0)
