"""Matrix products by the faster one of PyTorch's two libraries for processors.

PyTorch multiplies matrices in single precision with its BLAS. Intel's, with which it is
distributed, leaves AVX-512 unused on processors of other makers. oneDNN, with which
PyTorch convolves, uses it, and is twice as fast there.
"""

import platform
from functools import lru_cache
from math import prod
from typing import Callable, Optional, Sequence

import torch
from torch import Tensor

from backpack.utils.memory import huge_empty

# oneDNN takes longer to choose the code to run, the more so if it is not in the caches:
# there must be this many multiplications to make up for it, in all and in each product.
MIN_MULTIPLICATIONS = 2**23
MIN_PER_PRODUCT = 2**20
# Nor is it made for products with vectors.
MIN_SIZE = 8


@lru_cache(maxsize=None)
def _onednn() -> Optional[Callable[..., Tensor]]:
    """Look up the operator that multiplies with oneDNN: ``x @ weight.T``.

    Returns:
        The operator; ``None`` where PyTorch has none, or is built for a processor whose
        BLAS leaves nothing unused.
    """
    available = torch.backends.mkldnn.is_available()
    if not available or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if operator is None else operator.default


def has_fast_matmul(x: Tensor) -> bool:
    """Tell whether oneDNN can multiply matrices of a tensor's type.

    Args:
        x: The tensor.

    Returns:
        Whether it can, as long as no graph has to be built.
    """
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and torch._C._get_mkldnn_enabled()
        and _onednn() is not None
    )


def is_fast_product(sizes: Sequence[int], like: Tensor, times: int = 1) -> bool:
    """Tell whether oneDNN multiplies two matrices, which need not exist yet.

    Args:
        sizes: Sizes ``A``, ``R``, ``B`` of the product of ``[A, R]`` and ``[R, B]``.
        like: A tensor of the matrices' type.
        times: Number of products of these sizes in a row. Default: 1.

    Returns:
        Whether it can, and the product is large enough.
    """
    least = max(MIN_MULTIPLICATIONS // max(1, times), MIN_PER_PRODUCT)
    return prod(sizes) > least and min(sizes) >= MIN_SIZE and has_fast_matmul(like)


def is_fast(a: Tensor, b: Tensor, times: int = 1) -> bool:
    """Tell whether :func:`matmul` multiplies two matrices with oneDNN.

    Args:
        a: Matrix of shape ``[A, R]``.
        b: Matrix of shape ``[R, B]``, of the same type.
        times: Number of products of these sizes in a row. Default: 1.

    Returns:
        Whether it does.
    """
    return is_fast_product((*a.shape, b.shape[1]), a, times)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices with oneDNN.

    Args:
        a: Matrix of shape ``[A, R]``.
        b: Matrix of shape ``[R, B]``.

    Returns:
        Product of shape ``[A, B]``.
    """
    weight = b.T
    # with gaps between rows, or columns, it falls back to code 1000 times as slow
    if not (weight.is_contiguous() or b.is_contiguous()):
        weight = weight.contiguous()
    return _onednn()(a, weight, None, "none", [], "")


def matmul(a: Tensor, b: Tensor, times: int = 1) -> Tensor:
    """Multiply two matrices.

    Args:
        a: Matrix of shape ``[A, R]``.
        b: Matrix of shape ``[R, B]``, of the same type.
        times: Number of products of these sizes in a row. Default: 1.

    Returns:
        Product of shape ``[A, B]``.
    """
    return _multiply(a, b) if is_fast(a, b, times) else a @ b


def bmm(a: Tensor, b: Tensor, times: int = 1) -> Tensor:
    """Multiply batches of matrices, into memory that is cheap to touch.

    Args:
        a: Matrices of shape ``[G, A, R]``.
        b: Matrices of shape ``[G, R, B]``, of the same type.
        times: Number of batches of these sizes in a row. Default: 1.

    Returns:
        Products of shape ``[G, A, B]``.
    """
    if len(a) == 1:  # up to a third faster than a batch of one matrix
        return matmul(a[0], b[0], times).unsqueeze(0)
    if torch.is_grad_enabled():
        return torch.bmm(a, b)
    out = huge_empty((*a.shape[:2], b.shape[2]), a.dtype, a.device)
    if not (len(a) and is_fast(a[0], b[0], times * len(a))):
        return torch.bmm(a, b, out=out)
    for target, left, right in zip(out, a, b):
        target.copy_(_multiply(left, right))
    return out
