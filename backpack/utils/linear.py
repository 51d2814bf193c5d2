"""Diagonals of a fully-connected layer's curvature."""

from torch import Tensor

from backpack.utils.outer_products import sum_squared_outer_products, sum_squares
from backpack.utils.types import Layer


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
