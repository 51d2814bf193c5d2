"""Squares of weight gradients that are sums of outer products.

The weight gradient of Linear, Conv1-3d and ConvTranspose1-3d is, per sample n and
column v, Σ_t s_t a_tᵀ: features a of the (unfolded) input and the vector s at the layer
output, summed over the positions t that share the weight.
"""

from typing import Any

from torch import Tensor, matmul, promote_types


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
    a = x.to(dtype).mT
    squares: Any = sum(matmul(column.to(dtype), a).square() for column in S)
    return squares.sum(0) if sum_batch else squares


def sum_squares(grad: Tensor, sum_batch: bool = True) -> Tensor:
    """Square individual gradients and sum over columns.

    Args:
        grad: Individual gradients ``[V, N, *]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Sum of the squares ``[*]``, or ``[N, *]`` without the sum over samples.
    """
    return grad.square().sum((0, 1) if sum_batch else 0)
