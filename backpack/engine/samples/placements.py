"""Where an operation moves samples to, found out by running it.

Layout rules for each operation would be a long table, and an error in it a wrong
number. Instead, an operation is run again on copies of its operands in which some
samples are NaN; where NaN comes out, those samples went. That is remembered by
function, shapes, placements and plain arguments. Rules for what is frequent and can't
be remembered (``rules.py``) are tested against it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Sequence

import torch
from torch import Tensor

from backpack.converter.reading import LIKE
from backpack.core.layout import (
    FIRST,
    Layout,
    Mixed,
    Placement,
    agree,
    compact,
    conflict,
    has_gaps,
    sample_numbers,
    simplify,
    unentered,
)
from backpack.engine.nodes import functions
from backpack.engine.nodes.functions import (
    ATTENTION,
    BY_MASKS,
    MASKED,
    POINTWISE,
    PRODUCTS,
    SELECTING,
    is_by_value,
)
from backpack.engine.samples.marks import (
    LASTING,
    Pass,
    may_be_shared,
    place,
    placement_of,
)
from backpack.engine.samples.other_numbers import other_integers
from backpack.engine.samples.picked import INDEXES
from backpack.engine.samples.rules import beside_samples, quick_rule, rule
from backpack.engine.samples.trials import Performed, Trial
from backpack.utils.parallel import communicates
from backpack.utils.state import in_function, out_of_sight, state
from backpack.utils.types import is_inexact, tensors_in

_NOTHING: tuple[list[Placement], list[torch.Size]] = [], []


def _whichever(key: tuple) -> tuple[tuple, int | None]:
    """Let a key say of which sample alone all operands are no more; and say which."""
    samples, parts = set(), []
    for part in key:
        if type(part) is tuple:  # of a tensor, see `Tracker._look`
            shape, placement, *more = part
            if type(placement) is tuple:
                dim, sample = placement
                samples.add(sample)
                part = (shape, dim, *more)
            elif placement is not None:
                return key, None
        parts.append(part)
    alone = len(samples) == 1 and min(samples) >= 0
    return tuple(parts), samples.pop() if alone else None


class Finder:
    """Finds where operations move samples to.

    Attributes:
        n: Number N of samples.
        key: Stands for the forward pass, in tensors' marks.
        dropped: Where samples have met in something without a gradient.
        unsure_until: How many nodes there were when they last did so inside of a
            function of one's own, or numbers were read there. What has been computed
            by one that had begun may have a gradient after all.
        read_until: The same for the latter.
    """

    # placements of the results, and their shapes
    _remembered: dict[tuple, tuple[list[Placement], list[torch.Size]]] = {}
    _MOST = 50_000  # signatures that are remembered

    def __init__(self, key: Pass, keeps_met: bool):
        """Store what it is about.

        Args:
            key: Stands for the forward pass.
            keeps_met: Whether that in which samples have met matters although it has
                no gradient.
        """
        self.n, self.key, self._keeps_met = key.n, key, keeps_met
        self.dropped: Mixed | None = None
        self.unsure_until = self.read_until = -1

    def note_unsure(self, reads: bool = False) -> None:
        """Note that a function of one's own does what can't be followed.

        Args:
            reads: Whether it reads numbers. Default: ``False``.
        """
        self.unsure_until = torch._C._autograd._get_sequence_nr()
        if reads:
            self.read_until = self.unsure_until

    def of(self, x: Tensor) -> Placement:
        """Return where a tensor's samples are.

        Args:
            x: Tensor.

        Returns:
            The placement.
        """
        return placement_of(x, self.key)

    def deciding(self, name: str, data: list[Tensor]) -> list[Tensor]:
        """Choose operands that say where samples are: those with a gradient, if any.

        If these do not hold all samples, numbers beside may be some other one's; if all
        samples might share them, what the first input enters tells whether they do.

        Args:
            name: Name of the operation.
            data: Operands that hold samples.

        Returns:
            Those that decide.
        """
        own = [] if in_function() else [x for x in data if x.requires_grad]
        if any(isinstance(self.of(x), Tensor) for x in own):
            if name in POINTWISE or name in SELECTING:
                return data
            own = [x for x in data if x.is_floating_point() or x.requires_grad]
        if own and not self.certain(own):
            own += self.certain(data)
        return own or data

    def certain(self, data: list[Tensor]) -> list[Tensor]:
        """Choose operands that hold samples for certain.

        Args:
            data: Operands that seem to.

        Returns:
            Those that the first input enters.
        """
        if len(self.key.inputs) < 2:
            return data
        return [x for x in data if not may_be_shared(x, self.key)]

    def find_shared(self, done: Performed, key: tuple) -> list[bool]:
        """Tell which results may be shared although the first input is an operand.

        Args:
            done: The operation, with those operands alone that hold samples for certain
                as such.
            key: By which it may be remembered, where all operands decide.

        Returns:
            Whether nothing of those operands is in a result, for each.
        """
        key = (*key, Finder)
        found = self.recall(key, done.outs)
        return [p is None for p in (found or self.find(done, key))]

    def recall(self, key: tuple, outs: Sequence[Tensor]) -> list[Placement] | None:
        """Remember where an operation has moved samples to.

        Args:
            key: What this depends on.
            outs: Tensors that it returned.

        Returns:
            A placement for each result, ``None`` if it is not known.
        """
        found, shapes = self._known(key)
        same = bool(found) and shapes == [out.shape for out in outs]
        return self._differentiable(found, outs) if same else None

    def recall_layout(self, key: tuple, out: Tensor) -> Layout | None:
        """Remember where an operation has moved samples to: a quick answer.

        Args:
            key: What this depends on.
            out: The only tensor that it returned.

        Returns:
            The layout, ``None`` if :meth:`recall` has to be asked.
        """
        found, shapes = self._known(key)
        same = len(shapes) == 1 and shapes[0] == out.shape
        return found[0] if same and type(found[0]) is Layout else None

    def _known(self, key: tuple) -> tuple[list[Placement], list[torch.Size]]:
        """Look up what is remembered: placements, and the shapes that results had."""
        try:
            if key not in self._remembered:
                self._recall_another(key)
            return self._remembered.get(key, _NOTHING)
        except TypeError:  # an argument has no hash
            return _NOTHING

    def _recall_another(self, key: tuple) -> None:
        """Remember for one sample what was found for another, as in a loop."""
        same, sample = _whichever(key)
        if sample is not None and same in self._remembered:
            found, shapes = self._remembered[same]
            known = [
                p.where(p < 0, sample) if isinstance(p, Tensor) else p for p in found
            ]
            self._store(key, known, shapes)

    @out_of_sight
    def find(
        self, done: Performed, key: tuple, beside: Sequence[Tensor] = ()
    ) -> list[Placement]:
        """Find where an operation has moved samples to.

        Args:
            done: The operation.
            key: By which the result may be remembered.
            beside: Operands that hold samples and do not decide. What no other enters
                is theirs. Default: none.

        Returns:
            A placement for each result.
        """
        _, name, args, kwargs, outs, *_ = done
        if name in LIKE:  # of the other tensor, type or shape alone matters
            every = (*done.data, *beside)
            done = done._replace(data=[x for x in every if x is args[0]])
            if not done.data:  # of what samples share
                return [None] * len(outs)
        quick = quick_rule(done, self.of)
        if quick is not None:
            self._remember(key, quick, outs)
            return quick
        if self.n == 0:
            return [FIRST] * len(outs)
        if communicates(done.func):
            met = [Mixed(f"`{name}`, where processes exchange tensors,")] * len(outs)
            return self._differentiable(met, outs)
        for x in done.data:
            placement = self.of(x)
            if isinstance(placement, Mixed):
                return self._differentiable([placement] * len(outs), outs)
        by_value = is_by_value(name, args, kwargs) or self._depends_on_values(done)
        found, lasts = self._run_with(done, [x for x in beside if is_inexact(x)])
        certain = self.certain(done.data)
        if 0 < len(certain) < len(done.data) and self._differ(done, found, certain):
            if not any(x.requires_grad for x in done.data):  # what is given is given
                return self.find(done._replace(data=certain), key)
            found = [_of_inputs(name, placement) for placement in found]
        if lasts and not by_value and self._lasts(done, found):
            self._remember(key, found, outs)
        elif state().deciding is not None:
            state().deciding += [(name, x) for x in self._by_numbers(done, found)]
        return self._differentiable(found, outs)

    def _run_with(
        self, done: Performed, beside: list[Tensor]
    ) -> tuple[list[Placement], bool]:
        """Run an operation, and once more where operands that do not decide matter."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                found, lasts = self._run(done)
                if beside and any(map(has_gaps, found)):
                    with suppress(Exception):  # else, nothing more is known
                        others, last = self._run(done._replace(data=beside))
                        found = self._filled(found, others, done.outs)
                        lasts = lasts and last
                return found, lasts
            except Exception as error:  # the operation's own call has passed
                reason = str(error).split("\n")[0][:100]
                met = Mixed(f"`{done.name}` ({reason})", False)
                return [met] * len(done.outs), False

    def _filled(
        self, found: list[Placement], others: list[Placement], outs: Sequence[Tensor]
    ) -> list[Placement]:
        """Let entries of nobody's be those of operands that do not decide."""
        filled: list[Placement] = []
        for p, q, x in zip(found, others, outs):
            if has_gaps(p) and isinstance(q, (Layout, Tensor)):
                numbers = sample_numbers(q, x.shape, self.n, x.device)
                if isinstance(p, Tensor):
                    numbers = p.where(p >= 0, numbers)
                whole = bool((numbers >= 0).all())
                p = simplify(numbers, self.n) if whole else numbers
            filled.append(p)
        return filled

    def _by_numbers(self, done: Performed, found: list[Placement]) -> list[Tensor]:
        """List operands whose numbers have decided where samples are."""
        tensors = tensors_in(done[2:4])
        if done.name == ATTENTION or done.name in PRODUCTS:
            given = {id(x) for x in done.data}
            return [x for x in tensors if not (id(x) in given or x.requires_grad)]
        if "grid_sample" in done.name:
            return tensors
        integers = [x for x in tensors if not is_inexact(x)]
        return [x for x in integers if not self._same_for(x, done, found)]

    def _lasts(self, done: Performed, found: list[Placement]) -> bool:
        """Tell whether integers are where they would be for other constant integers."""
        if any(map(is_inexact, done.data)):  # NaN has shown where they may go
            return True
        data = {id(x) for x in done.data}
        others = [x for x in tensors_in(done[2:4]) if id(x) not in data]
        given = [x for x in others if not is_inexact(x)]
        return all(self._same_for(x, done, found, 1) for x in given)

    def _same_for(
        self, x: Tensor, done: Performed, found: list[Placement], beyond: int = 0
    ) -> bool:
        """Tell whether samples would be in the same places for other integers."""
        for new in other_integers(x, beyond):
            place(new, self.of(x), self.key)
            try:
                others, _ = self._run(done.replaced(x, new))
            except Exception:  # of masks, there would be more rows, or fewer
                return False
            if not all(map(agree, others, found)):
                return False
        return True

    def _differ(self, done: Performed, found: list[Any], certain: list[Any]) -> bool:
        """Tell whether the samples of operands do not lie along the same axis."""
        if any(isinstance(placement, Mixed) for placement in found):
            with suppress(Exception), torch._C.DisableTorchFunction(), torch.no_grad():
                found, _ = self._run(done._replace(data=certain))  # meet without others
            return not all(isinstance(placement, Mixed) for placement in found)
        if any(isinstance(self.of(x), Tensor) for x in done.data):
            return False
        return any(isinstance(placement, Tensor) for placement in found)

    def _depends_on_values(self, done: Performed) -> bool:
        """Tell whether another operand's values may say where samples go."""
        if "grid_sample" in done.name:
            return any(self.of(x) != FIRST for x in done.data)
        if done.name == ATTENTION:  # a mask may keep rows of several samples apart
            return any(self._is_within(x) for x in done.data)
        integers = [x for x in tensors_in(done[2:4]) if not is_inexact(x)]
        # of any size; masks may pick entries
        stays = done.name.removeprefix("vmap(").removesuffix(")") in MASKED
        picks = any(x.dtype != torch.bool or not stays for x in integers)
        picks = picks and not done.name.endswith(("loss", "entropy"))  # they add all up
        return picks and any(x.dtype not in INDEXES for x in done.data)

    def _is_within(self, x: Tensor) -> bool:
        """Tell whether samples may lie in the last two axes."""
        placement = self.of(x)
        return not isinstance(placement, Layout) or placement.axis >= x.dim() - 2

    def _differentiable(
        self, found: list[Placement], outs: Sequence[Tensor]
    ) -> list[Placement]:
        """Take what samples have met in for a constant, if it has no gradient."""
        mixed = [type(p) is Mixed and not x.requires_grad for p, x in zip(found, outs)]
        if True not in mixed or self._keeps_met:
            return found
        self.dropped = self.dropped or found[mixed.index(True)]
        if in_function():  # what comes out may have one
            self.note_unsure()
            return found
        return [None if lost else p for p, lost in zip(found, mixed)]

    def _remember(
        self, key: tuple, found: list[Placement], outs: Sequence[Tensor]
    ) -> None:
        """Remember placements, unless they depend on the operands' own numbers."""
        operands = [x for x in key if type(x) is tuple]
        if any(isinstance(placement, Mixed) for _, placement, *_ in operands):
            return
        try:
            self._store(key, found, [out.shape for out in outs])
        except TypeError:  # an argument has no hash
            return
        same, sample = _whichever(key)
        if sample is not None:
            self._remembered[same] = self._remembered[key]

    def _store(
        self, key: tuple, found: list[Placement], shapes: list[torch.Size]
    ) -> None:
        if len(self._remembered) >= self._MOST:
            self._remembered.clear()
        self._remembered[key] = found, shapes
        for placement in found:
            if isinstance(placement, Tensor):  # the next pass will have this very one
                placement.__dict__.setdefault(LASTING, object())

    def _run(self, done: Performed) -> tuple[list[Placement], bool]:
        """Find placements; and tell whether they are the same for other numbers."""
        if done.name in ("__getitem__", "index", "masked_select"):
            done = self._without_masks(done)
        _, name, args, _, outs, _, states = done
        trial = Trial(done, self.of, self.n)
        found, lasts = rule(done, trial, self.of, self.n), True
        if found is None and states is None:
            found, lasts = trial.find()
        elif found is None:
            found, lasts = trial.find_if_repeated(), False
        lasts = lasts and not trial.masks.may_differ(found)
        pairs = [(x, i) for x, i in zip(trial.flat, trial.numbers) if is_inexact(x)]
        entering = (
            x.requires_grad if i is None else (compact(i) >= 0).any() for x, i in pairs
        )
        if not any(map(bool, entering)):
            # nothing went in: what no sample has is nobody's, and no constant
            nobody = [unentered(x, self.n) for x in outs]
            found = [q if p is None else p for p, q in zip(found, nobody)]
        if name in BY_MASKS and len(args) > 1 and not isinstance(found[0], Layout):
            found = [self._left_by_mask(name, found[0], outs[0].shape, args[1])]
        return beside_samples(done, found, self.of, self.n), lasts

    def _left_by_mask(
        self, name: str, placement: Placement, shape: torch.Size, mask: Any
    ) -> Placement:
        """Let what belongs to no sample be of the one whose mask has left it."""
        if isinstance(mask, (tuple, list)) and mask:
            mask = mask[0]
        is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
        own = self.of(mask) if is_mask else None
        if own is None or isinstance(placement, Mixed):
            return placement
        chosen = sample_numbers(own, mask.shape, self.n, mask.device)
        if not name.startswith("masked"):  # along the first axes
            chosen = chosen[(..., *[None] * (len(shape) - mask.dim()))]
        if placement is not None:
            known = sample_numbers(placement, shape, self.n, mask.device)
            if conflict(known, chosen):
                return Mixed(f"`{name}`")
            chosen = known.where(known >= 0, chosen)
        return simplify(chosen.broadcast_to(shape), self.n)

    def _without_masks(self, done: Performed) -> Performed:
        """Let numbers pick what masks do: other masks would pick more, or fewer."""
        names = ("self", "indices") if done.name == "index" else ("input", "mask")
        x, index = functions.named(names, done.args, done.kwargs)
        if self.of(x) is not None:
            return done
        parts: list[Any] = []
        for part in functions.in_brackets(done.name, index):
            own = self.of(part) if isinstance(part, Tensor) else None
            if own is None or part.dtype != torch.bool or not part.dim():
                parts.append(part)
                continue
            numbers = sample_numbers(own, part.shape, self.n, part.device)
            if done.name == "masked_select":
                x, part, numbers = torch.broadcast_tensors(x, part, numbers)
            picked = simplify(numbers[part], self.n)
            for ids in part.nonzero(as_tuple=True):
                place(ids, picked, self.key)
                parts.append(ids)
        data = [y for y in tensors_in(parts) if self.of(y) is not None]
        args = x, tuple(parts) if len(parts) > 1 else parts[0]
        take = Tensor.__getitem__
        return Performed(take, "__getitem__", args, {}, done.outs, data)


def _of_inputs(name: str, placement: Placement) -> Mixed:
    """Say that samples may not have met, if all of them share an input."""
    met = placement if isinstance(placement, Mixed) else Mixed(f"`{name}`")
    return met._replace(is_of_inputs=True)
