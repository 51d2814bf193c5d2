"""Decorators that let a function of several columns accept a single one."""

from functools import wraps
from typing import Callable

from torch import Tensor


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
