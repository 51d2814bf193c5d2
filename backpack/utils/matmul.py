"""Matrix products by the faster one of PyTorch's two libraries for processors.

PyTorch multiplies matrices in single precision with its BLAS. Intel's, with which it is
distributed, leaves AVX-512 unused on processors of other makers. oneDNN, with which
PyTorch convolves, uses it, and is twice as fast there.
"""

import platform
from functools import lru_cache
from typing import Callable, Optional

import torch
from torch import Tensor

from backpack.utils.memory import huge_empty

# oneDNN takes longer to choose the code to run, the more so if it is not in the caches:
# there must be this many multiplications to make up for it, in all and in each product.
MIN_MULTIPLICATIONS = 2**23
MIN_PER_PRODUCT = 2**20


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


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices.

    Args:
        a: Matrix of shape ``[A, R]``.
        b: Matrix of shape ``[R, B]``, of the same type.

    Returns:
        Product of shape ``[A, B]``.
    """
    if a.numel() * b.shape[1] > MIN_MULTIPLICATIONS and has_fast_matmul(a):
        return _onednn()(a, b.T, None, "none", [], "")
    return a @ b


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply batches of matrices, into memory that is cheap to touch.

    Args:
        a: Matrices of shape ``[G, A, R]``.
        b: Matrices of shape ``[G, R, B]``, of the same type.

    Returns:
        Products of shape ``[G, A, B]``.
    """
    if len(a) == 1:  # up to a third faster than a batch of one matrix
        return matmul(a[0], b[0]).unsqueeze(0)
    if torch.is_grad_enabled():
        return torch.bmm(a, b)
    out = huge_empty((*a.shape[:2], b.shape[2]), a.dtype, a.device)
    in_all, per_product = a.numel() * b.shape[2], a.shape[1:].numel() * b.shape[2]
    enough = in_all > MIN_MULTIPLICATIONS and per_product > MIN_PER_PRODUCT
    if not (enough and has_fast_matmul(a)):
        return torch.bmm(a, b, out=out)
    for target, left, right in zip(out, a, b):
        target.copy_(_onednn()(left, right.T, None, "none", [], ""))
    return out
