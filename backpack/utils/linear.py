"""Diagonals of a fully-connected layer's curvature, and of layers that are like one.

The weight gradient of Linear, Conv1-3d and ConvTranspose1-3d is, per sample n and
column v, Σ_t s_t a_tᵀ: features a of the (unfolded) input and the vector s at the layer
output, summed over the positions t that share the weight.
"""

from typing import Any

from torch import Tensor, matmul, promote_types

from backpack.utils.types import Layer


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


def extract_weight_diagonal(module: Layer, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Return the diagonal of Σ_v Jᵀ s_v s_vᵀ J for the weight.

    J is the output's Jacobian with respect to the weight. The input is read from
    ``module.input0``, ``[N, *, in_features]``.

    Args:
        module: Layer after a forward pass.
        S: Columns at the layer output ``[V, N, *, out_features]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Diagonal in the weight's shape ``[out_features, in_features]``, with a leading
        axis N without the sum over samples.
    """
    # flatten additional axes into positions, and add the axis of groups
    x = module.input0.unsqueeze(1).flatten(1, -2).transpose(1, 2).unsqueeze(1)
    s = S.unsqueeze(2).flatten(2, -2).transpose(2, 3).unsqueeze(2)
    return sum_squared_outer_products(x, s, sum_batch).squeeze(-3)


def extract_bias_diagonal(module: Layer, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Return the diagonal of Σ_v Jᵀ s_v s_vᵀ J for the bias.

    J is the output's Jacobian with respect to the bias.

    Args:
        module: Layer.
        S: Columns at the layer output ``[V, N, *, out_features]``.
        sum_batch: Whether to sum over samples.

    Returns:
        Diagonal in the bias' shape ``[out_features]``, with a leading axis N without
        the sum over samples.
    """
    return sum_squares(S.unsqueeze(2).flatten(2, -2).sum(2), sum_batch)
