"""Runs an operation again, to see to which entries of its results samples go.

Its operands are copied, and some samples replaced by NaN, which most operations return
wherever it went. For those that leave it out or fail, there are other numbers. Each
sample is told from the others by the bits of its number.

Integers are no NaN, and may be the same for other samples. They are followed by numbers
that are drawn for all samples, again and again.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from math import inf, nan
from threading import Lock
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from backpack.core.layout import (
    Mixed,
    Placement,
    bits,
    has_bit,
    sample_numbers,
    simplify,
    unentered,
)
from backpack.engine.nodes.functions import (
    ASSERTING,
    ATTENTION,
    FAULTING,
    MOVING,
    REARRANGING,
    RECURRENT,
    SELECTING,
    is_fill,
)
from backpack.engine.samples.evidence import Evidence, nowhere
from backpack.engine.samples.masks import Masks
from backpack.engine.samples.other_numbers import (
    EXTREMES,
    INFINITE,
    all_different,
    between,
    copied,
    disturbed,
    finite,
    generators_for,
    on_cpu,
    redrawn,
)
from backpack.utils.types import dense, is_inexact, is_same, tensors_in

# What replaces samples
NOT_A_NUMBER = (nan,)  # most operations return it wherever it went
# For those that fail, like decompositions; probabilities remain such
OTHER_NUMBERS = (lambda x: x * (0.995 - 1e-2 * torch.rand_like(x)) + 2e-3,)
# For those that add up many, of which few may be other samples'; zeros stay zeros
UNLIKE = (lambda x: (x != 0) * (x + 1 + torch.rand_like(x)),)

# How often numbers are drawn; entries that were the same until then are constants
DRAWS, CONSTANT_AFTER = 128, 16

# Up to so many elements, sparse tensors are made dense, to put marks there.
DENSE_ELEMENTS = 2**26

DRAWS_BY_NUMBERS = "how many random numbers it draws depends on its operands"
NOT_REPEATED = (
    "called again on the same operands, it returned something else: it depends on more "
    "than these, like a counter"
)


class Operands(NamedTuple):
    """What goes into an operation, as it is before that writes to it.

    Attributes:
        args: Positional arguments.
        data: Operands that hold samples.
        certain: Those that do for certain: what the first input enters.
        deciding: Those that say where samples are, if that is known.
        of_base: Where they are in the base of a view that is written to.
    """

    args: tuple
    data: list[Tensor]
    certain: list[Tensor]
    deciding: list[Tensor] | None = None
    of_base: Placement = None


class Performed(NamedTuple):
    """An operation that was performed: what went in, and what came out.

    Attributes:
        func: The operation.
        name: Its name.
        args: Positional arguments, as they were before the call or are after it.
        kwargs: Keyword arguments.
        outs: Tensors that it returned.
        data: Operands that depend on samples and decide where those of the results are.
        states: What generators of random numbers were in before the call; ``None`` for
            an operation of PyTorch, which depends on its arguments alone.
    """

    func: Callable
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: Sequence[Tensor]
    data: list[Tensor]
    states: dict[torch.Generator, Tensor] | None = None

    def replaced(self, x: Tensor, new: Tensor) -> Performed:
        """Put another operand in the place of one.

        Args:
            x: The operand.
            new: The other one.

        Returns:
            The operation with the other one.
        """
        args, kwargs = tree_map(lambda y: new if y is x else y, self[2:4])
        data = [new if y is x else y for y in self.data]
        return self._replace(args=args, kwargs=kwargs, data=data)


class Trial:
    """An operation that is run again, on copies of its operands.

    Attributes:
        flat: Its arguments, as leaves of a tree.
        numbers: Sample numbers of the entries of each argument; ``None`` for those that
            do not depend on samples.
        masks: Those among its operands, and factors with zeros.
    """

    def __init__(self, done: Performed, of: Callable[[Tensor], Placement], n: int):
        """Store the operation.

        Args:
            done: The operation.
            of: Tells where the samples of an operand are.
            n: Number N of samples.
        """
        self._func, self._name, self._outs, self._n = done.func, done.name, done.outs, n
        self.flat, self._spec = tree_flatten((tuple(done.args), done.kwargs))
        deciding = {id(x) for x in done.data}
        self.numbers: list[Tensor | None] = [
            sample_numbers(of(x), x.shape, n, x.device) if id(x) in deciding else None
            for x in self.flat
        ]
        self._states = done.states or {}
        self._generators = generators_for(self.flat)
        self.masks = Masks(done.name, tuple(self.flat), self.numbers, n)
        self._drawn: set[bytes] = set()  # in what states generators have been left

    def describe(self) -> str:
        """Describe the operation for a message.

        Returns:
            Name and shapes.
        """
        pairs = zip(self.flat, self.numbers)
        shapes = [list(x.shape) for x, i in pairs if i is not None]
        return f"`{self._name}` on {' and '.join(map(str, shapes))}"

    def numbers_of(self, x: Any) -> Tensor | None:
        """Return the sample numbers of an argument's entries.

        Args:
            x: The argument.

        Returns:
            The numbers, ``None`` if it does not decide where samples are.
        """
        pairs = zip(self.flat, self.numbers)
        return next((i for y, i in pairs if y is x and i is not None), None)

    def call(self, flat: list[Any]) -> Any:
        """Run the operation.

        Args:
            flat: Arguments, as leaves of the tree.

        Returns:
            What it returns.
        """
        args, kwargs = tree_unflatten(flat, self._spec)
        with _WithoutCudnn() if self._name in RECURRENT else nullcontext():
            return self._func(*args, **kwargs)

    def find(self) -> tuple[list[Placement], bool]:
        """Find out where samples are in the results.

        Returns:
            A placement for each result; and whether they are the same for other numbers
            in the operands.
        """
        pairs = zip(self.flat, self.numbers)
        kinds = [is_inexact(x) for x, i in pairs if i is not None]
        outs, lasts = self._outs, True
        found: list[Placement] = [None] * len(outs)
        asked, steps = [not is_inexact(x) for x in outs], [False] * len(outs)
        if True in kinds and False in asked:
            found, lasts, steps = self._find_by_marks()
            asked = list(map(any, zip(asked, steps)))
        if False in kinds and all(p is None for p in found):
            asked = [True] * len(outs)
        if True in asked:
            drawn, complete = self._draw_all(True not in kinds)
            for j, q in enumerate(drawn):
                # an algorithm may take no other numbers than those
                lost = steps[j] and isinstance(q, Mixed) and not q.is_known
                found[j] = q if asked[j] and not lost else found[j]
            lasts = lasts and complete
        return found, lasts

    def _find_by_marks(self) -> tuple[list[Placement], bool, list[bool]]:
        """Find where samples are by NaN, or what an operation takes in its place.

        Returns:
            A placement for each result; whether they are the same for other numbers;
            and which results are whole numbers that marks may change by chance only.
        """
        outs, steps = self._outs, [False] * len(self._outs)
        lasts = self._name.rpartition("::")[2] not in FAULTING
        try:
            found, hides = self._probe(NOT_A_NUMBER if lasts else OTHER_NUMBERS)
        except Exception:  # an algorithm that needs numbers
            found, hides, lasts = self._probe(OTHER_NUMBERS)[0], False, False
            steps = [bool(_is_whole(x).all()) for x in map(dense, outs)]
        mixed = lasts and any(isinstance(p, Mixed) for p in found)
        wide = mixed or lasts and self.masks.is_of_few
        list(self.masks.learned() if wide else ())
        if wide and self.masks.found():  # by zeros, times which NaN is NaN
            self.flat = self._with_ordinary_numbers()
            found, hides, lasts = self._probe(UNLIKE)[0], False, False
            pairs = zip(found, outs)
            found = [unentered(x, self._n) if p is None else p for p, x in pairs]
        elif mixed and any(bool((x != x).any()) for x in self._run()):
            # outside of its domain: NaN shows nothing there
            with self._drawing():
                self.flat = list(map(between, self.flat))
            found, hides = self._probe(NOT_A_NUMBER)
        silent = not hides and self._may_be_left_out(found)
        # where there is a gradient, it was asked with other numbers as well
        asks = silent and not any(x.requires_grad for x in outs)
        if (hides or asks) and not self._is_random():
            others = self._probe(EXTREMES)[0]
            if hides or any(p is not None for p in others):
                found, lasts = others, False
        # the next ones may be those that matter, like -1 and 1 as targets
        return found, lasts and (asks or not silent), steps

    def find_if_repeated(self) -> list[Placement]:
        """Find out the same for an operation that may depend on more than operands.

        Returns:
            A placement for each result, unknown where operands do not give it again.
        """
        same = self._repeats()
        lost = Mixed(f"`{self._name}` ({NOT_REPEATED})", False)
        if True not in same:  # it would only count on
            return [lost] * len(same)
        found, again = self.find()[0], self._repeats()
        return [p if x and y else lost for p, x, y in zip(found, same, again)]

    def _repeats(self) -> list[bool]:
        """Tell which results the operation returns again."""
        with self._drawing():
            result = self.call(list(map(copied, self.flat)))
        again = map(_dense, tensors_in(result))
        return list(map(is_same, again, map(_dense, self._outs)))

    def _draw_all(self, integers: bool) -> tuple[list[Placement], bool]:
        """Find where samples are by two draws of all numbers, and mixtures of these.

        In a mixture, samples whose number has a bit are as in the one draw, the others
        as in the other one. A sample's own is what the draw that has its number makes
        of it; all else is evidence that samples have met.

        Returns:
            A placement for each result; and whether it is the same for other numbers.
        """
        n, outs, what = self._n, self._outs, self.describe()
        entering = torch.cat([i.flatten().cpu() for i in self.numbers if i is not None])
        entering = entering[entering >= 0].unique()
        single = len(entering) < 2
        # whether two numbers agree may seem to be up to one of them, half of the time
        least = [1 if single else 3 + 12 // n + 16 // (1 + x.numel()) for x in outs]
        seen = [Evidence(x, n, times) for x, times in zip(outs, least)]
        reason: Exception | None = None
        complete = False
        for number in range(DRAWS):
            try:
                if not self._draw_twice(number, integers, seen):
                    why = "its shape depends on samples"
                    if single:
                        raise ValueError(why)
                    return [Mixed(f"{what} ({why})", False)] * len(outs), False
            except Exception as error:  # not what the operation takes
                reason = error
            waits = number < CONSTANT_AFTER
            complete = all([x.has_met or x.is_enough(waits) for x in seen])
            if complete:
                break
        found: list[Placement] = []
        for x, out in zip(seen, outs):
            placement = x.placement(single)
            if x.has_met:
                placement = Mixed(what)
            elif reason and placement is None and len(entering) == 1:
                # as a size that is read from a sample: all that comes out is of it
                placement = entering.to(out.device).expand([1] * out.dim()).clone()
            elif reason and placement is None:
                placement = Mixed(f"{what} ({str(reason)[:100]})", False)
            found.append(placement)
        return found, complete

    def _draw_twice(
        self, number: int, integers: bool, seen: Sequence[Evidence]
    ) -> bool:
        """Draw numbers twice, and note what mixtures show.

        Returns:
            Whether the results had the shapes that they have.
        """
        one, zero = (self._draw(2 * number + k, integers) for k in (0, 1))
        p, q = (self._perform(list(map(copied, x))) for x in (one, zero))
        if [x.shape for x in (*p, *q)] != [x.shape for x in (*self._outs, *self._outs)]:
            return False
        differ = list(map(_differs, p, q))
        for bit in bits(self._n) if any([bool(x.any()) for x in differ]) else ():
            mixture = self._perform(self._mixture(bit, one, zero))
            for j, x in enumerate(mixture):
                seen[j].note(bit, _differs(x, q[j]), _differs(x, p[j]))
        for evidence, where in zip(seen, differ):
            evidence.times += where
        return True

    def _may_be_left_out(self, found: list[Placement]) -> bool:
        """Tell whether no NaN has shown, although results may hold samples."""
        if any(p is not None for p in found) or is_fill(self._name):
            return False
        return not (self._name in MOVING or self._name in REARRANGING)

    def _with_ordinary_numbers(self) -> list[Any]:
        """Keep of masks and factors without a gradient what they leave out, no more.

        What is small, falls off with a distance, or is lost in half precision, would
        seem to be left out, too.
        """
        new: list[Any] = []
        factors = self.masks.candidates()
        with self._drawing():
            for x, i in zip(self.flat, self.numbers):
                if is_inexact(x) and (i is None or x.layout is torch.strided):
                    is_mask = any(x is factor for factor in factors)
                    dtype = torch.promote_types(x.dtype, torch.float64)
                    if is_mask and self.masks.is_product:
                        new.append(self.masks.entries_of(x).to(dtype))
                        continue
                    x = x.detach().to(dtype)
                    if is_mask and i is None:
                        least = torch.finfo(self._outs[0].dtype).min / 2
                        x = torch.zeros_like(x).masked_fill(x < least, -inf)
                    else:
                        x = torch.rand_like(x)
                new.append(x)
        return new

    def _run(
        self,
        select: Callable[[Tensor], Tensor] | None = None,
        mark: Any = nan,
        seed: int = 0,
    ) -> list[Tensor]:
        """Run the operation with marks at some of the samples."""
        new: list[Any] = []
        with self._drawing():
            for x, i in zip(self.flat, self.numbers):
                if self._name in ASSERTING:
                    x, i = on_cpu(x), on_cpu(i)
                # a copy: nothing of the model's, like statistics, may change
                x = copied(x if i is None else _dense(x))
                if isinstance(x, Tensor):
                    if i is not None or self._name != ATTENTION:  # which has masks
                        x = finite(x)
                    if i is not None and select is not None and is_inexact(x):
                        x = disturbed(x, select(i), mark)
                new.append(x)
        return self._perform(new, seed)

    def _draw(self, number: int, integers: bool) -> list[Any]:
        """Copy the operands, with other numbers for all samples.

        On the CPU, if they may be no indices: a GPU would not get over it.
        """
        new: list[Any] = []
        aside = integers or self._name in ASSERTING
        with self._drawing():
            for place, (x, i) in enumerate(zip(self.flat, self.numbers)):
                x = copied(on_cpu(x) if aside else x if i is None else _dense(x))
                picks = self._name in SELECTING and not place
                self._seed(place if i is None else (number + 1) * 1000 + place)
                if i is not None:
                    others = redrawn(finite(x), number // 2 % 4, self._pool(x))
                    x.copy_(torch.where(i.to(x.device) >= 0, others, x))
                elif isinstance(x, Tensor) and integers:
                    if picks or is_inexact(x):
                        x = all_different(x)  # which entries are picked, shows
                new.append(x)
        return new

    def _pool(self, x: Tensor) -> Tensor:
        """Return numbers that it may matter for an operand to be."""
        same = (y for y in self.flat if isinstance(y, Tensor) and y.numel())
        same = (y for y in same if is_inexact(y) == is_inexact(x))
        return torch.cat([_dense(y.detach()).flatten().to(x) for y in same])

    def _mixture(self, bit: int, one: list[Any], zero: list[Any]) -> list[Any]:
        """Copy some samples from one list of operands, and the others from another."""
        new = list(map(copied, zero))
        for place, i in enumerate(self.numbers):
            if i is not None:
                x = new[place]
                where = has_bit(i.to(x.device), bit)
                x.copy_(torch.where(where, one[place], x))
        return new

    def _perform(self, new: list[Any], seed: int = 0) -> list[Tensor]:
        """Run the operation on copies of operands, which it may change."""
        with self._drawing():
            self._seed(seed)
            result = self.call(new)
            states = (generator.get_state() for generator in self._generators)
            self._drawn.add(b"".join(x.numpy().tobytes() for x in states))
        result = new[0] if result is None else result
        pairs = zip(tensors_in(result), self._outs)
        return [_dense(x).to(out.device) for x, out in pairs]

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw the same numbers each time, and none of the program's."""
        states = [generator.get_state() for generator in self._generators]
        self._seed(0)
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states):
                generator.set_state(state)

    def _seed(self, seed: int) -> None:
        """Draw the same numbers again, from no other device's generator."""
        for generator in self._generators:
            generator.manual_seed(seed)
            if not seed and generator in self._states:
                generator.set_state(self._states[generator])

    def _is_random(self) -> bool:
        """Tell whether results differ by more than what marks change: by what is drawn.

        How much is drawn may depend on the numbers, as for ``rrelu``.
        """
        pairs = zip(self._run(seed=0), self._run(seed=1))
        return any(bool(_differs(x, y).any()) for x, y in pairs)

    def _probe(self, marks: Sequence[Any]) -> tuple[list[Placement], bool]:
        """Run the operation on samples whose number has a bit, and on the others.

        Returns:
            A placement for each result, but integers; and whether NaN has not shown all
            that depends on samples.
        """
        n, outs = self._n, self._outs
        by_nan = marks == NOT_A_NUMBER
        asks = by_nan and self._name not in MOVING
        asks = asks and any(x.requires_grad for x in outs)
        self._drawn.clear()
        plain = self._run() if asks or not by_nan else None

        def changed(select: Callable, some: Sequence[Any]) -> list[Tensor]:
            """Tell which entries of each result a mark changes."""
            found = list(map(nowhere, outs))
            for mark in some:
                for j, x in enumerate(self._run(select, mark)):
                    shown = by_nan and mark is nan
                    if is_inexact(x):
                        found[j] |= x.isnan() if shown else _differs(x, plain[j])
            return found

        got = [nowhere(out).long() for out in outs]
        unseen, shown = list(map(nowhere, outs)), list(map(nowhere, outs))
        mixed, hides = [False] * len(outs), False
        for bit in bits(n):
            halves = [partial(has_bit, bit=bit, value=value) for value in (1, 0)]
            ones, zeros = (changed(half, marks) for half in halves)
            for j, (p, q) in enumerate(zip(ones, zeros)):
                mixed[j] = mixed[j] or bool((p & q).any())
                got[j] += p.long() << bit
                unseen[j] |= ~(p | q)
            for half, seen in zip(halves, (ones, zeros)) if asks and not bit else ():
                for j, x in enumerate(changed(half, INFINITE)):
                    hides = hides or bool((x & ~seen[j]).any())
                    shown[j] |= x | seen[j]
        hides = hides or any(bool((x & y).any()) for x, y in zip(shown, unseen))
        found: list[Placement] = []
        for j in range(len(outs)):
            if not by_nan and len(self._drawn) > 1:  # a sample moves others' numbers
                lost = f"{self.describe()} ({DRAWS_BY_NUMBERS})"
                found.append(Mixed(lost, False))
            elif mixed[j] or bool((got[j] >= n)[~unseen[j]].any()):
                found.append(Mixed(self.describe()))
            else:
                numbers = got[j].masked_fill(unseen[j], -1)
                found.append(simplify(numbers, n))
        return found, hides


class _WithoutCudnn:
    """Switches cuDNN off for all threads; the last one that leaves restores it."""

    _lock, _inside, _before = Lock(), 0, False

    def __enter__(self) -> None:
        own = type(self)
        with own._lock:  # `cudnn.flags` asks for precisions, too, which may raise
            if not own._inside:
                own._before = torch._C._get_cudnn_enabled()
                torch._C._set_cudnn_enabled(False)
            own._inside += 1

    def __exit__(self, *_: Any) -> None:
        own = type(self)
        with own._lock:
            own._inside -= 1
            if not own._inside:
                torch._C._set_cudnn_enabled(own._before)


def _is_whole(x: Tensor) -> Tensor:
    return x == x.round() if x.is_floating_point() else nowhere(x)


def _dense(x: Tensor) -> Tensor:
    return dense(x) if x.numel() <= DENSE_ELEMENTS else x


def _differs(x: Tensor, plain: Tensor) -> Tensor:
    """Tell which entries differ; two that are no numbers do not."""
    differ = x != plain
    return differ & ~((x != x) & (plain != plain)) if is_inexact(x) else differ
