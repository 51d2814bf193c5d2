"""Matrix products by the faster one of PyTorch's two libraries for processors.

PyTorch multiplies matrices in single precision with its BLAS. Intel's, with which it is
distributed, is the faster one on processors of Intel, the more so for small matrices,
but leaves AVX-512 unused on those of other makers. oneDNN, with which PyTorch
convolves, uses it, and is twice as fast where that has registers of its own.
"""

import platform
import re
from functools import lru_cache
from itertools import islice
from math import prod
from pathlib import Path
from typing import Callable, Optional, Sequence

import torch
from torch import Tensor

from backpack.core.fast import tuning
from backpack.core.fast.memory import huge_empty, may_write
from backpack.core.fast.whole import whole

_WIDE_FAMILY = 26  # of AMD's processors


@lru_cache(maxsize=None)
def _onednn() -> Optional[Callable[..., Tensor]]:
    """Look up the operator that multiplies with oneDNN: ``x @ weight.T``.

    Returns:
        The operator; ``None`` where PyTorch has none.
    """
    available = torch.backends.mkldnn.is_available()
    if not available or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if operator is None else operator.default


@lru_cache(maxsize=None)
def _processor() -> str:
    """Describe the processor.

    Returns:
        Its maker and family, in the system's words.
    """
    description = Path("/proc/cpuinfo")
    try:
        with description.open() as lines:  # it has hundreds of them for each core
            return "".join(islice(lines, 8))
    except OSError:  # another system than Linux
        return platform.processor()


@lru_cache(maxsize=None)
def has_fast_blas() -> bool:
    """Tell whether the BLAS uses all that the processor has: both are Intel's.

    Returns:
        Whether they are.
    """
    return torch.backends.mkl.is_available() and "GenuineIntel" in _processor()


@lru_cache(maxsize=None)
def _has_wide_avx512() -> bool:
    """Tell whether the processor has what the BLAS leaves unused.

    AMD's have 512 bits from family 26 on (Zen 5). In family 25, which takes them for
    two times 256, a product of 2**28 multiplications takes 5.7 ms with oneDNN and 6.0
    with the BLAS, one of 2**18 23 and 9 us. Without AVX-512, oneDNN needs 4.6 ms for 64
    products of 2**20 multiplications for which the BLAS needs 2.0.

    Returns:
        Whether it has.
    """
    family = re.search(r"family\s*:?\s*(\d+)", _processor(), re.IGNORECASE)
    wide = family is not None and int(family[1]) >= _WIDE_FAMILY
    return wide and torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_fast_matmul(x: Tensor) -> bool:
    """Tell whether matrices of a tensor's type are multiplied as fast as convolved.

    Args:
        x: The tensor.

    Returns:
        Whether they are, as long as no graph has to be built.
    """
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and may_write()
        and torch._C._get_mkldnn_enabled()
        and _onednn() is not None
    )


def is_fast_product(sizes: Sequence[int], like: Tensor, times: int) -> bool:
    """Tell whether oneDNN multiplies two matrices, which need not exist yet.

    Args:
        sizes: Sizes ``A``, ``R``, ``B`` of the product of ``[A, R]`` and ``[R, B]``.
        like: A tensor of the matrices' type.
        times: Number of products of these sizes in a row.

    Returns:
        Whether it can, the product is large enough, and the BLAS is slower.
    """
    if has_fast_blas() or not _has_wide_avx512():
        return False
    least = max(tuning.MIN_MULTIPLICATIONS // max(1, times), tuning.MIN_PER_PRODUCT)
    is_large = prod(sizes) > least and min(sizes) >= tuning.MIN_SIZE
    return is_large and has_fast_matmul(like)


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


def matmul(
    a: Tensor, b: Tensor, times: int = 1, out: Optional[Tensor] = None
) -> Tensor:
    """Multiply two matrices.

    Args:
        a: Matrix of shape ``[A, R]``.
        b: Matrix of shape ``[R, B]``, of the same type.
        times: Number of products of these sizes in a row. Default: 1.
        out: Where to write the product, if no graph has to be built. Default: new
            memory.

    Returns:
        Product of shape ``[A, B]``.
    """
    if not is_fast(a, b, times):
        return torch.mm(a, b, out=out)
    product = _multiply(a, b)
    return product if out is None else out.copy_(product)


def bmm(a: Tensor, b: Tensor, times: int = 1, out: Optional[Tensor] = None) -> Tensor:
    """Multiply batches of matrices, into memory that is cheap to touch.

    Args:
        a: Matrices of shape ``[G, A, R]``.
        b: Matrices of shape ``[G, R, B]``, of the same type.
        times: Number of batches of these sizes in a row. Default: 1.
        out: Where to write the products, if no graph has to be built. Default: new
            memory.

    Returns:
        Products of shape ``[G, A, B]``.
    """
    number, *sizes = *a.shape, b.shape[2]
    if number == 1:  # up to a third faster than a batch of one matrix
        target = None if out is None else out[0]
        return matmul(a[0], b[0], times, target).unsqueeze(0)
    if not may_write():
        return torch.bmm(a, b)
    if out is None:
        out = huge_empty((*a.shape[:2], b.shape[2]), a.dtype, a.device)
    if not is_fast_product(sizes, a, times * number):
        return torch.bmm(a, b, out=out)
    for target, left, right in zip(out, a, b):
        target.copy_(_multiply(left, right))
    return out


@whole
def gram(rows: Tensor) -> Tensor:
    """Multiply all rows with each other.

    The result is symmetric: strips of columns need only be formed from the diagonal on.

    Args:
        rows: Rows of shape ``[G, D, R]``.

    Returns:
        Products of shape ``[G, D, D]``.
    """
    size, summands = rows.shape[1:]
    small = size < tuning.MIN_ROWS or summands < tuning.MIN_SUMMANDS
    if small or not may_write():
        return bmm(rows, rows.mT)
    out = rows.new_empty(len(rows), size, size)
    step = -(-size // (tuning.STRIPS * tuning.LANES)) * tuning.LANES
    for start in range(0, size, step):
        end = min(start + step, size)
        strip = bmm(rows[:, start:], rows[:, start:end].mT)
        out[:, start:, start:end] = strip
        out[:, start:end, end:] = strip[:, end - start :].mT
    return out
