"""Selection of samples from a mini-batch."""

from typing import List

from torch import Tensor


def subsample(tensor: Tensor, dim: int = 0, subsampling: List[int] = None) -> Tensor:
    """Select entries of a tensor along one axis.

    Args:
        tensor: Tensor of any shape.
        dim: Axis to select from, usually the batch axis. Negative values count from
            the end.
        subsampling: Indices to keep, in this order. ``None`` keeps all.

    Returns:
        The selected entries, with ``len(subsampling)`` entries along ``dim``; the
        same object as ``tensor`` if ``subsampling`` is ``None``.
    """
    if subsampling is None:
        return tensor
    return tensor[(slice(None),) * (dim % tensor.ndim) + (subsampling,)]
