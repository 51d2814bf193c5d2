"""Views: where samples are in other parts, or shapes, of the same memory.

What is written to a view is in its base, and in all other views of that. Real numbers
are what memory is looked at as: a view of complex numbers may be real, or have a real
base.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backpack.core.layout import (
    Layout,
    Mixed,
    Placement,
    conflict,
    sample_numbers,
    simplify,
)
from backpack.utils.state import out_of_sight

_LOST = Mixed("writing to a view", False)

REPEATING = ("ExpandBackward0", "RepeatBackward0")


class View(NamedTuple):
    """Which part of its base a view is.

    Attributes:
        shape: Its shape.
        is_complex: Whether its numbers are; if so, what follows has one axis more.
        sizes: Shape of its real numbers.
        stride: Their strides.
        offset: Where the first one is in memory.
        bytes: What each of them takes.
    """

    shape: torch.Size
    is_complex: bool
    sizes: torch.Size
    stride: tuple[int, ...]
    offset: int
    bytes: int

    @classmethod
    def of(cls, x: Tensor) -> View:
        """Read it off a tensor.

        Args:
            x: The tensor.

        Returns:
            What memory it shows.
        """
        real = _as_real(x)
        place = real.shape, real.stride(), real.storage_offset(), real.element_size()
        return cls(x.shape, x.is_complex(), *place)

    def numbers(self, placement: Placement, n: int, device: torch.device) -> Tensor:
        """Write down the samples of its real numbers.

        Args:
            placement: Where samples are.
            n: Number N of samples.
            device: Device of the result.

        Returns:
            Sample numbers, of shape ``sizes``; -1 where there is none.
        """
        if placement is None or isinstance(placement, Mixed):
            return torch.full(self.sizes, -1, device=device)
        own = sample_numbers(placement, self.shape, n, device)
        return own.unsqueeze(-1).expand(self.sizes) if self.is_complex else own

    def placement(self, numbers: Tensor, n: int, fills: bool = False) -> Placement:
        """Tell where samples are from those of its real numbers.

        Args:
            numbers: Sample numbers, of shape ``sizes``.
            n: Number N of samples.
            fills: Whether what is unknown is of the samples beside it. Default:
                ``False``.

        Returns:
            The placement.
        """
        if self.is_complex:
            real, imag = numbers.unbind(-1)
            if conflict(real, imag):
                return Mixed("a view as complex numbers")
            numbers = real.where(real >= 0, imag)
        return simplify(numbers, n, fills=fills)


@out_of_sight
def in_view(x: Tensor, base: Tensor, placement: Placement, n: int) -> Placement:
    """Tell where samples are in a view of a tensor.

    Args:
        x: The view.
        base: The tensor.
        placement: Where samples are there.
        n: Number N of samples.

    Returns:
        The placement.
    """
    if isinstance(placement, Tensor) and placement.numel() and placement.max() < 0:
        return placement.new_full([1] * x.dim(), -1)  # no row has entered yet
    memory, view = _in_memory(base, placement, n), View.of(x)
    part = None if memory is None else _part(memory, view, base)
    if part is None:
        return Mixed("a view of a tensor with gaps", False)
    return view.placement(part, n)


@out_of_sight
def in_base(
    view: View, placement: Placement, base: Tensor, known: Placement, n: int
) -> Placement:
    """Tell where samples are in a tensor, from those in a view of it.

    Args:
        view: The view, which was written to.
        placement: Where samples are there.
        base: The tensor.
        known: Where they were in it before.
        n: Number N of samples.

    Returns:
        The placement.
    """
    memory = None if isinstance(placement, Mixed) else _in_memory(base, known, n)
    part = None if memory is None else _part(memory, view, base)
    if memory is None or part is None:
        return _LOST
    new = view.numbers(placement, n, base.device)
    part.copy_(new.where(new >= 0, part))
    fills = isinstance(placement, Layout) and not isinstance(known, Tensor)
    return View.of(base).placement(memory, n, fills)


def in_storage(x: Tensor, numbers: Tensor, view: Tensor, n: int) -> Placement:
    """Tell where samples are in another view of a tensor's memory, gaps or not.

    Args:
        x: The tensor.
        numbers: Sample numbers of its entries.
        view: The view, of the same type.
        n: Number N of samples.

    Returns:
        The placement.
    """
    size = x.untyped_storage().nbytes() // x.element_size()
    memory = torch.full((size,), -1, device=x.device)
    part = memory.as_strided(x.shape, x.stride(), x.storage_offset())
    part.copy_(numbers)
    shown = memory.as_strided(view.shape, view.stride(), view.storage_offset())
    return simplify(shown, n, fills=True)


def _as_real(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.conj() if x.is_conj() else x
    return torch.view_as_real(x) if x.is_complex() else x


def _in_memory(base: Tensor, placement: Placement, n: int) -> Tensor | None:
    """Write sample numbers to where a tensor has its entries, if without gaps."""
    if base.is_meta:  # which has no memory
        return None
    real = _as_real(base)
    numbers = torch.empty_like(real, dtype=torch.long)
    numbers.copy_(View.of(base).numbers(placement, n, base.device))
    return numbers if numbers.stride() == real.stride() else None


def _part(memory: Tensor, view: View, base: Tensor) -> Tensor | None:
    """Look at a part of what :func:`_in_memory` has returned."""
    whole = View.of(base)
    if view.bytes != whole.bytes:
        return None
    return memory.as_strided(view.sizes, view.stride, view.offset - whole.offset)


def made_base(x: Tensor, since: int) -> bool:
    """Tell whether a result is a view of what its own operation has computed.

    Args:
        x: The result.
        since: Number of nodes that the graph had before the operation.

    Returns:
        Whether it is.
    """
    node = None if x._base is None else x._base.grad_fn
    return node is not None and since <= node._sequence_nr() and node is not x.grad_fn
