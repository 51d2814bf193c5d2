"""What is put in the place of operands, where an operation is run again.

Copies, NaN and other numbers for some of the samples, and others for all; what random
numbers are drawn from.
"""

from __future__ import annotations

from math import inf, nan
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from backpack.utils.types import generator_of, is_inexact, tensors_in

# For operations that leave NaN out, like `nansum`, `fmax`
INFINITE = (inf, -inf)
EXTREMES = (nan, *INFINITE)


def copied(x: Any) -> Any:
    """Copy an operand that an operation may change.

    Args:
        x: The operand.

    Returns:
        The copy, in no graph.
    """
    if isinstance(x, torch.Generator):
        copy = torch.Generator(x.device)
        copy.set_state(x.get_state())
        return copy
    return x.detach().clone() if isinstance(x, Tensor) else x


def on_cpu(x: Any) -> Any:
    """Return an operand that an operation on the CPU takes.

    Args:
        x: The operand.

    Returns:
        The same on the CPU.
    """
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, torch.Generator) and x.device.type != "cpu":
        return torch.Generator().manual_seed(0)
    return x.detach().cpu() if isinstance(x, Tensor) else x


def finite(x: Tensor) -> Tensor:
    """Replace infinity and NaN in a copy: these are marks.

    Args:
        x: The copy, which is changed.

    Returns:
        The copy.
    """
    if x.is_floating_point() and x.layout is torch.strided:
        x.nan_to_num_(0.0, 1.0, -1.0)
    return x


def disturbed(x: Tensor, where: Tensor, mark: Any) -> Tensor:
    """Replace entries by a mark.

    Args:
        x: A copy of an operand, which is changed.
        where: Which entries.
        mark: A number, or a function of the operand that makes others.

    Returns:
        The copy.
    """
    new = mark(x) if callable(mark) else mark
    if x.is_complex() and not callable(mark):
        new = complex(mark, mark)  # each part may go its own way
    return x.copy_(torch.where(where, new, x))  # with the strides it had


def between(x: Any) -> Any:
    """Replace numbers by others between zero and one.

    Args:
        x: The operand.

    Returns:
        Others, if it has floating-point numbers.
    """
    return torch.rand_like(x) if is_inexact(x) and x.layout is torch.strided else x


def all_different(x: Tensor) -> Tensor:
    """Make a tensor of the same type and shape with another number at each entry.

    Args:
        x: The tensor.

    Returns:
        The other one; the same one for truth values.
    """
    if is_inexact(x):
        return torch.rand_like(x)
    if x.dtype == torch.bool:
        return x
    return torch.arange(x.numel(), device=x.device).view(x.shape).to(x.dtype)


def redrawn(x: Tensor, how: int, pool: Tensor) -> Tensor:
    """Draw other numbers.

    From those that occur, from two of them, from their range and beyond, or, for
    floating point numbers, from extremes.

    Args:
        x: The operand.
        how: Which of these, 0 to 3.
        pool: Numbers that occur in operands.

    Returns:
        Other numbers, in its shape.
    """
    if not x.numel():
        return x
    values, share = x.flatten(), torch.rand(1, device=x.device)
    if x.dtype == torch.bool:
        return torch.rand(x.shape, device=x.device) < share

    def some(of: Tensor, shape: Sequence[int]) -> Tensor:
        return of[torch.randint(len(of), tuple(shape), device=x.device)]

    if how == 1:
        chosen = torch.rand(x.shape, device=x.device) < share
        return torch.where(chosen, some(values, [1]), some(pool, [1]))
    if how > 1 and not is_inexact(x):
        low, high = int(values.min()), int(values.max())
        if how == 3:
            low, high = min(low, 0), max(2 * high, 4)
        last = min(max(high, low + 1), torch.iinfo(x.dtype).max - 1)
        return torch.randint(min(low, last), last + 1, x.shape, device=x.device).to(x)
    if how == 2 and not x.is_complex():
        least = values.min()
        return least + torch.rand_like(x) * (values.max() - least + 1)
    if how == 3:
        values = torch.cat([some(values, [1]), values.new_tensor(EXTREMES)])
    return some(values, x.shape)


def other_integers(x: Tensor, beyond: int) -> Iterator[Tensor]:
    """Draw integers from the range of those in a tensor, no number of the program's.

    If all are the same, also some next to them.

    Args:
        x: The tensor.
        beyond: How far to go beyond the range.

    Yields:
        Three others of its shape; none if it has no entries.
    """
    generator = torch.Generator()
    for seed in range(3 if x.numel() else 0):
        low, high = int(x.min()) - beyond, int(x.max()) + beyond
        if low == high:  # all are the same: a mask of a batch without padding
            low, high = (low - 1, high) if high > 0 else (low, high + 1)
        draws = generator.manual_seed(seed)
        yield torch.randint(low, high + 1, x.shape, generator=draws).to(x)


def states_for(args: Any) -> dict[torch.Generator, Tensor]:
    """Ask generators of random numbers for what they are in.

    Args:
        args: Arguments of an operation.

    Returns:
        The state of each generator that it may draw from without being given it.
    """
    return {generator: generator.get_state() for generator in generators_for(args)}


def generators_for(args: Any) -> set[torch.Generator]:
    """List generators of random numbers.

    Args:
        args: Arguments of an operation.

    Returns:
        Those it may draw from without being given them.
    """
    devices = {x.device for x in tensors_in(args)}
    return {torch.default_generator, *map(generator_of, devices)}
