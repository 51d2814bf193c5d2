"""What tensors of a forward pass know of their samples.

Those that operations return have marks; inputs are known by their identity.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

from torch import Tensor

from backpack.core.layout import Mixed, Placement, once
from backpack.engine.samples.views import View, in_base
from backpack.utils.types import are_redefined, version_of

FORGET: list[Any] = []  # makes a key that nothing is remembered by: it has no hash
MARK = "_backpack_samples"  # attribute of a tensor that depends on the model's inputs
LASTING = "_backpack_lasting"  # attribute of sample numbers that are remembered


class Mark(tuple):
    """What a tensor knows of its samples.

    A forward pass, a placement, a version, and whether all samples might share it: it
    is computed from inputs after the first, which are as long as that.

    Tensors that users save must not contain it, nor need this package to be loaded:
    what is saved in its place is empty, and no mark.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return something empty that PyTorch loads without asking."""
        return OrderedDict, ()

    def __deepcopy__(self, memo: dict) -> Mark:
        """A copy of a tensor has its samples where the tensor has them."""
        return self


class Pass:
    """Stands for a forward pass, in the marks of its tensors.

    Attributes:
        n: Number N of samples.
        inputs: By identity, inputs, where their samples are, and whether there is one
            before. They have no marks: in another call, or thread, they may be
            something else.
        is_over: Whether nothing is watched any more: what has a mark may be modified.
    """

    __slots__ = ("n", "inputs", "is_over")

    def __init__(self, n: int):
        """Store the number of samples.

        Args:
            n: Number N of samples.
        """
        self.n = n
        self.inputs: dict[int, tuple[weakref.ref[Tensor], Placement, bool]] = {}
        self.is_over = False

    def enter(self, x: Tensor, placement: Placement, late: bool) -> None:
        """Note an input.

        Args:
            x: The input.
            placement: Where its samples are.
            late: Whether there is one before.
        """
        self.inputs.setdefault(id(x), (weakref.ref(x), placement, late))
        base = x._base  # of which a class of one's own may return views
        is_whole = base is not None and base.numel() == x.numel()
        if is_whole and are_redefined([x]) and not isinstance(placement, Mixed):
            placement = in_base(View.of(x), placement, base, None, self.n)
            self.inputs.setdefault(id(base), (weakref.ref(base), placement, late))


def mark_of(x: Tensor) -> Mark | None:
    """Return a tensor's mark, if it still holds.

    It does not after the tensor was modified in place where nobody has noticed: by way
    of its base, or of another view of that, or where nothing was watched.

    Args:
        x: Tensor.

    Returns:
        The mark.
    """
    mark = getattr(x, MARK, None)
    if mark and mark[2] != version_of(x):
        if x._base is not None or x.grad_fn is not None:  # which tell it anew
            return None
    return mark


def placement_of(x: Tensor, key: Pass) -> Placement:
    """Return where a tensor's samples are, as this forward pass has found out.

    Args:
        x: Tensor.
        key: Stands for the forward pass.

    Returns:
        The placement.
    """
    mark = mark_of(x)
    if mark and mark[0] is key:
        return mark[1]
    ref, placement, _ = key.inputs.get(id(x), (None, None, False))
    return placement if ref is not None and ref() is x else None


def in_key(placement: Placement) -> Any:
    """Return what stands for a placement in a key.

    Args:
        placement: The placement.

    Returns:
        Itself. For sample numbers, what they are if it is a single one; else an object
        that is theirs alone, if they are remembered. Others will not come again.
    """
    if type(placement) is not Tensor:
        return placement
    if placement.numel() == 1:  # all of it is one sample's
        return once(placement, LASTING, lambda: (placement.dim(), int(placement)))
    return placement.__dict__.get(LASTING, FORGET)


def may_be_shared(x: Tensor, key: Pass) -> bool:
    """Tell whether all samples might share what is as long as there are samples.

    Args:
        x: Tensor that holds samples, as it seems.
        key: Stands for the forward pass.

    Returns:
        Whether the first input does not enter it.
    """
    mark = getattr(x, MARK, None)
    known = mark if mark and mark[0] is key else key.inputs.get(id(x))
    return known is not None and known[-1]


def place(x: Tensor, placement: Placement, key: Pass, shared: bool = False) -> None:
    """Remember where a tensor's samples are.

    Args:
        x: Tensor.
        placement: The placement.
        key: Stands for the forward pass.
        shared: Whether all samples might share it. Default: ``False``.
    """
    setattr(x, MARK, Mark((key, placement, version_of(x), shared)))
