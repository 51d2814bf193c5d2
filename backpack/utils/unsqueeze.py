"""Axes that may be missing: that of columns, and those of what is a number."""

from functools import wraps
from typing import Callable

from torch import Tensor, eye


def kfacmp_unsqueeze_if_missing_dim(
    mat_dim: int,
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Let a product with a Kronecker matrix accept a single vector.

    Args:
        mat_dim: Number of axes of the decorated function's argument, including the
            trailing column axis V.

    Returns:
        Decorator for a function that maps ``[*, V]`` to ``[*, V]``. The decorated
        function adds a missing column axis and removes it again.
    """

    def decorator(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @wraps(product)
        def wrapped(mat: Tensor) -> Tensor:
            if mat.ndim == mat_dim - 1:
                return product(mat.unsqueeze(-1)).squeeze(-1)
            return product(mat)

        return wrapped

    return decorator


def flatten(x: Tensor, start: int) -> Tensor:
    """Make the last axes one axis, of size 1 if there are none.

    Args:
        x: Tensor of shape ``[*, *D]``. What a sample, or a parameter, is may be a
            number, without axes.
        start: Number of axes that are kept.

    Returns:
        Tensor of shape ``[*, D]``.
    """
    return x.unsqueeze(-1).flatten(start)


def unit_columns(x: Tensor, start: int) -> Tensor:
    """Create a column for each feature, which is one there and zero elsewhere.

    Args:
        x: Tensor ``[*, *in]``.
        start: First axis of the features.

    Returns:
        Columns ``[in, *, *in]``, the same for all entries of the axes before.
    """
    shape = x.shape[start:]
    basis = eye(shape.numel(), dtype=x.dtype, device=x.device)
    ones = [1] * (x.dim() - len(shape))
    return basis.reshape(len(basis), *ones, *shape).expand(-1, *x.shape)


def flatten_any_order(x: Tensor, start: int) -> Tensor:
    """Make the last axes one axis, in the order in which they lie in memory.

    Args:
        x: Tensor of shape ``[*, *D]``.
        start: Number of axes that are kept.

    Returns:
        Tensor of shape ``[*, D]``, a view if memory has no gaps.
    """
    if not x.is_contiguous():
        axes = sorted(range(start, x.dim()), key=x.stride, reverse=True)
        x = x.permute(*range(start), *axes)
    return x.flatten(start)
