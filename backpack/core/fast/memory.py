"""Memory for large results."""

import ctypes
import sys
from functools import lru_cache
from typing import Callable, Optional, Sequence

import torch
from torch import Tensor

from backpack.core.fast import tuning
from backpack.utils.state import is_traced

_PAGE = 4096
_MADV_HUGEPAGE = 14


@lru_cache(maxsize=None)
def _madvise() -> Optional[Callable]:
    """Look up the C library's ``madvise``.

    Returns:
        The function, or ``None`` on other systems than Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


def may_write() -> bool:
    """Tell whether a result may be written into memory piece by piece.

    Returns:
        Whether neither a graph is built nor operations are recorded.
    """
    return not (torch.is_grad_enabled() or is_traced())


def huge_empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate an uninitialized tensor that is cheap to fill for the first time.

    On Linux CPUs, writing a large fresh tensor is bound by page faults. The system is
    asked for huge pages, which is a hint: where it is not heeded nothing changes.

    Args:
        shape: Shape of the tensor.
        dtype: Type of the tensor.
        device: Device of the tensor.

    Returns:
        Uninitialized tensor.
    """
    out = torch.empty(*shape, dtype=dtype, device=device)
    num_bytes = out.numel() * out.element_size()
    if num_bytes >= tuning.HUGE_BYTES and out.device.type == "cpu" and _madvise():
        start = -(-out.data_ptr() // _PAGE) * _PAGE
        length = out.data_ptr() + num_bytes - start
        _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return out
