"""Watches a forward pass, operation by operation: samples, and uses of parameters.

Tensors that depend on the model's inputs carry a mark that says where their samples
are. An operation in which such a tensor meets one that needs a gradient and depends on
parameters alone is a *use*: the operation gets a stand-in, an alias of its own, for
each such constant, and where its output sits in the graph is remembered.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Sequence

import torch
from torch import Tensor, is_grad_enabled
from torch._C import DispatchKey
from torch._C import _dispatch_tls_is_dispatch_key_excluded as _is_excluded
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from backpack.core.layout import Layout, Mixed, Placement, has_gaps, unentered
from backpack.core.operations import OPERATIONS, find_operation
from backpack.engine.forward.cells import note_maps
from backpack.engine.forward.low_mode import LowMode
from backpack.engine.forward.transforms import watch_inside
from backpack.engine.nodes import saved as saved_tensors
from backpack.engine.nodes.constants import (
    Constant,
    distinct,
    edge_of,
    has_views,
    in_written,
    note_leaves,
    note_parts,
    stand_in,
)
from backpack.engine.nodes.functions import (
    ATTENTION,
    COMBINING,
    IN_BRACKETS,
    KINDS,
    LIKE_ANOTHER,
    Kind,
    Request,
    is_of_inputs,
    kind_of,
)
from backpack.engine.nodes.graph import MEETING, note_tangent, on_one_node
from backpack.engine.nodes.user_hooks import guard, note_seen
from backpack.engine.nodes.uses import Use
from backpack.engine.nodes.vjp import is_function
from backpack.engine.samples.gaps import (
    KNOWN,
    NESTED,
    explain,
    note_constants,
    note_functions,
)
from backpack.engine.samples.marks import (
    FORGET,
    MARK,
    Mark,
    Pass,
    in_key,
    mark_of,
    may_be_shared,
)
from backpack.engine.samples.other_numbers import states_for
from backpack.engine.samples.placements import Finder
from backpack.engine.samples.probes import Known
from backpack.engine.samples.summands import Summands
from backpack.engine.samples.trials import Operands, Performed
from backpack.engine.samples.views import View, in_base, in_view, made_base
from backpack.utils.compiling import is_indivisible, skipped, untraced
from backpack.utils.disable import disable
from backpack.utils.hooks import modules_in, parameters_of
from backpack.utils.state import in_function, state
from backpack.utils.types import decides, handed_on, node_of, tensors_in, version_of

_SHAPELESS = {UninitializedParameter, UninitializedBuffer}  # of lazy layers

# other modes, such as a context's, would see each look at a tensor
_UNSEEN = torch._C.DisableTorchFunction
VIEWS_OF = "_backpack_uses"  # attribute of a tensor of which uses returned a view


class Tracker(LowMode):
    """Follows the samples of one call of a model, and collects uses.

    Attributes:
        n: Number N of samples.
        key: Stands for the call, in tensors' marks.
        owner: Record of the innermost extended module that is being called.
        root: Weak reference to the outermost one.
        note_loss: Called with losses that are functions, their arguments and results.
        longer: Lengths of a result that say that samples are not on axis 0 of the
            first input, and what there is instead.
        beside: The same of a result that has the first input's along another axis.
    """

    def __init__(
        self,
        n: int,
        inputs: Sequence[tuple[Tensor, Placement]],
        keeps_met: bool = False,
    ):
        """Mark the inputs.

        Args:
            n: Number N of samples.
            inputs: Tensors that hold samples, and where.
            keeps_met: Whether that in which samples have met matters although it has
                no gradient. Default: ``False``.
        """
        super().__init__()
        self.n, self.key = n, Pass(n)
        self.owner: Any = None
        self._finder = Finder(self.key, keeps_met)
        self._summands = Summands(self._finder)
        self.root: Callable[[], Any] | None = None
        self.note_loss: Callable = lambda *_: None
        self.longer: dict[int, str] = {}
        self.beside: dict[int, str] = {}
        self._given: set[int] | None = None  # computed tensors that are parameters
        self._marks: dict[int, Mark] = {}
        for i, (x, placement) in enumerate(inputs):
            self.key.enter(x, placement, i > 0)
            if isinstance(x, Parameter):  # of which the graph knows nothing else
                self.place(x, placement)

    # ----------------------------------------------------------------- every operation

    @skipped
    def __torch_function__(
        self,
        func: Callable,
        types: tuple,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and watch it if it concerns samples."""
        if is_dynamo_compiling():
            if is_indivisible(True):
                return func(*args, **(kwargs or {}))
            run = Tracker.__torch_function__
            return untraced(run, self, func, types, args, kwargs)
        kind = KINDS.get(func) or kind_of(func)
        kwargs = kwargs or {}
        if type(func) is OpOverload and _is_excluded(DispatchKey.AutogradFunctionality):
            return func(*args, **kwargs)  # who records, like `linearize`, is below
        if kind.is_quiet or self.suspended:
            if kind.name in ("register_hook", "retain_grad") and args[0].grad_fn:
                note_seen(args[0])
            if kind.name == "register_hook" and len(args) == 2:
                args = args[0], guard(*args, self.find_placement(args[0]) is None)
            elif kind.reads and in_function():
                with _UNSEEN():
                    if self.find_placement(args[0]) is not None:
                        self._finder.note_unsure(reads=True)
            elif kind.name in ("backward", "grad") and self.context is not None:
                own = not disable.should_store_io() or is_of_inputs(
                    kind.name, args, kwargs
                )
                with state().pull(quiet=False) if own else self.context:
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        if types and any(map(decides, types)):
            with self:  # to watch what they make of it
                return handed_on(func, types, args, kwargs)
        request = Request(func, kind, args, kwargs, func)
        if peek_interpreter_stack() is not None:
            inside = request.opened()
            if inside is not None:
                with self:
                    return inside(*args, **kwargs)
            return watch_inside(self._watch, request)
        return self._watch(request)

    def _watch(self, request: Request) -> Any:
        """Run an operation, and remember what matters of it."""
        func, _, args, kwargs, run = request
        data: list[Tensor] = []
        constants: list[Tensor] = []
        key = [func, self.n, is_grad_enabled() or -in_function()]
        with _UNSEEN():
            self._look(args, key, data, constants)
            if kwargs:
                key += kwargs
                self._look(kwargs.values(), key, data, constants)
        if not data:
            if not constants:
                return run(*args, **kwargs)
            out, saved = saved_tensors.run(run, args, kwargs)
            if not all(isinstance(x, Parameter) or node_of(x) for x in constants):
                note_constants(out)  # or another leaf would seem to be an input
            if saved:
                saved_tensors.note(tensors_in(out), saved)
            return out
        inside = request.opened(True) if constants and run is func else None
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        if len(self.key.inputs) > 1:
            key += [may_be_shared(x, self.key) for x in data]
        return self._run(request, data, constants, tuple(key))

    def _look(
        self, items: Any, key: list[Any], data: list[Tensor], constants: list[Tensor]
    ) -> None:
        """Sort operands into those with samples, and those that need a gradient.

        What the result's placement depends on is added to a key.
        """
        for x in items:
            kind = type(x)
            if kind is Tensor or kind is Parameter or isinstance(x, Tensor):
                mark = mark_of(x)
                if mark and mark[0] is self.key and not is_function(node_of(x)):
                    placement = mark[1]
                else:
                    placement = self.find_placement(x)
                needs_gradient = x.requires_grad
                if placement is not None:
                    data.append(x)
                elif needs_gradient:
                    constants.append(x)
                shape = x.shape if has_views(x) and kind not in _SHAPELESS else FORGET
                key.append((shape, in_key(placement), needs_gradient, x.dtype))
            elif kind is slice:
                ends = (x.start, x.stop, x.step)
                key += (kind, *(FORGET if isinstance(e, Tensor) else e for e in ends))
            elif isinstance(x, (tuple, list)):
                key += (kind, len(x))
                self._look(x, key, data, constants)
            else:  # a generator would live on
                key += (kind, FORGET if kind is torch.Generator else x)

    def _is_known(self, x: Tensor, placement: Placement) -> bool:
        """Tell whether what was seen inside of a function holds for its result."""
        begun = x.grad_fn._sequence_nr()  # which numbers a function gets as it begins
        unsure = begun < self._finder.unsure_until
        if isinstance(placement, Mixed) and MEETING not in x.grad_fn.metadata:
            unsure = begun < self._finder.read_until or not self._summands.has_parts(x)
        if unsure:
            vars(x).pop(MARK, None)  # inside, nothing had a gradient
            return False
        known = Known(placement, self.n)
        x.grad_fn.metadata.setdefault(KNOWN, {})[x.output_nr] = known
        note_leaves(x.grad_fn, self._finder.of)
        note_functions(x, known)
        return True

    def find_placement(self, x: Tensor) -> Placement:
        """Tell where the samples are in a tensor, which may be another one's alias.

        Args:
            x: The tensor.

        Returns:
            The placement.
        """
        placement = self._finder.of(x)
        known = placement is not None
        if known and is_function(node_of(x)):
            known = self._is_known(x, placement)
        return placement if known else self._unmarked(x)

    def _unmarked(self, x: Tensor) -> Placement:
        """Tell where the samples are in a tensor that nothing is known of yet."""
        if x.is_nested and x.layout is torch.strided:  # it has no shape
            self.place(x, NESTED)
            return NESTED
        placement = None if x._base is None else self._of_view(x, x._base)
        if placement is None and node_of(x) is not None:
            placement = self._explained(x)
        return placement

    def _of_view(self, x: Tensor, base: Tensor) -> Placement:
        """Tell where the samples are that were written to the base of a view."""
        placement = self.find_placement(base)
        if placement is not None:
            if not isinstance(placement, Mixed):
                with _UNSEEN(), torch.no_grad():
                    placement = in_view(x, base, placement, self.n)
            self.place(x, placement, may_be_shared(base, self.key))
        return placement

    def _explained(self, x: Tensor) -> Placement:
        """Ask the graph where samples are; nowhere, if it leads to parameters alone.

        Functions of one's own, compiled and scripted pieces are not seen.
        """
        if self._is_given(x):
            note_constants(x, in_place=True)
        with _UNSEEN():
            known = explain(x)
        placement: Placement = known and known.placement
        if known is not None and known.n != self.n:
            placement = Mixed("another batch", False)
        self.place(x, placement)
        return placement

    def _is_given(self, x: Tensor) -> bool:
        """Tell whether a tensor is in a parameter's place, by a functional call."""
        if self._given is None:
            root = None if self.root is None else self.root()
            params = parameters_of([] if root is None else modules_in(root))
            self._given = {id(p) for p in params if p.grad_fn}
            for p in params:  # a leaf of another class might be an input
                if p.grad_fn is None and not isinstance(p, Parameter):
                    self.place(p, None)
        return id(x) in self._given

    def _run(
        self, request: Request, data: list[Tensor], constants: list[Tensor], key: tuple
    ) -> Any:
        """Run an operation that samples enter: a use, if constants do as well."""
        kind, certain = request.kind, self._finder.certain(data)
        mixed = 0 < len(certain) < len(data)
        pairs: list[Constant] = []
        since = 0
        saved: Sequence[Any] = ()
        if kind.name in LIKE_ANOTHER and any([x is request.args[0] for x in data]):
            constants = []
        if constants and is_grad_enabled():
            if not self._summands.is_rest(kind.name, data, constants):
                since = torch._C._autograd._get_sequence_nr()
                request, constants, pairs = self._with_stand_ins(request, constants)
        func, _, args, kwargs, run = request
        given = Operands(args, data, certain)
        if kind.writes:
            given = self._before_writing(kind, given)
        states = states_for((args, kwargs)) if kind.is_foreign else None
        if not pairs:
            out = run(*args, **kwargs)
            if type(out) is Tensor and not kind.writes and not mixed:
                with _UNSEEN():
                    layout = self._finder.recall_layout(key, out)
                    if layout is not None:  # the most frequent case
                        self.place(out, layout, not certain)
                        return out
        else:
            out, saved = saved_tensors.run(run, args, kwargs, constants)
        result = args[0] if out is None and kind.name == "__setitem__" else out
        outs = [result] if isinstance(result, Tensor) else tensors_in(result)
        if not outs:
            return out
        done = Performed(func, kind.name, given.args, kwargs, outs, given.data, states)
        with _UNSEEN():
            placements, shared = self._find(done, given, key)
        if pairs and result is not outs[0]:
            if run is not func:
                return out  # what is around it can't be made anew
            constant = [id(x) for x, p in zip(outs, placements) if p is None]
            result = out = on_one_node(result, constant)
            outs = tensors_in(result)
        with _UNSEEN():
            self._place_results(outs, placements, shared, done.data)
            first = outs[0]
            if kind.writes and first._base is not None:
                outs = self._write_to_base(first, given.of_base)
            if pairs:
                self._record(request, pairs, outs, first, since, saved)
            elif kind.is_loss and out.grad_fn is not None and not out.dim():
                self.note_loss(func, args, kwargs, out)
            if type(placements[0]) is Mixed and not kind.writes:
                self._summands.note(done, key)
        return out

    def _with_stand_ins(
        self, request: Request, constants: list[Tensor]
    ) -> tuple[Request, list[Tensor], list[Constant]]:
        """Give an operation that is a use an alias of each constant."""
        func, kind, args, kwargs, run = request
        has_rule = func in OPERATIONS and not kwargs and len(args) < 3
        spread = kind.name in COMBINING and not has_rule or kind.name in IN_BRACKETS
        spread = (spread or kind.name == ATTENTION) and run is func
        # who keeps what operations save, like a checkpoint, gets what it would
        spread = spread and not saved_tensors.are_kept()
        if func in OPERATIONS:
            args, kwargs, constants = distinct(args, kwargs, constants)
        with _UNSEEN():
            own = self._overwritten(kind, args, constants)
        args, kwargs, pairs = stand_in(kind.name, args, kwargs, constants, spread, own)
        return Request(func, kind, args, kwargs, run), constants, pairs

    def _before_writing(self, kind: Kind, given: Operands) -> Operands:
        """Keep what an operation in place will change: its first operand's shape."""
        written = given.args[0] if given.args else None
        if not isinstance(written, Tensor):
            return given
        shown = written.detach().clone() if kind.is_foreign else written.detach()
        shown.requires_grad_(written.requires_grad)
        late = may_be_shared(written, self.key)
        self.place(shown, self._finder.of(written), late)
        deciding = self._finder.deciding(kind.name, given.data)
        of_base = None
        if written._base is not None:
            with _UNSEEN():
                of_base = self.find_placement(written._base)
            self._leave_views(written._base)
        data, certain, deciding = (
            [shown if x is written else x for x in some]
            for some in (given.data, given.certain, deciding)
        )
        return Operands((shown, *given.args[1:]), data, certain, deciding, of_base)

    def _find(
        self, done: Performed, given: Operands, key: tuple
    ) -> tuple[list[Placement], list[bool]]:
        """Find where samples are in results, and whether all might share these."""
        data, outs = given.data, done.outs
        placements = self._finder.recall(key, outs)
        if outs[0].is_nested:
            placements = [NESTED] * len(outs)
        elif placements is None:
            for x in data:  # an option may have let the operation write to it
                if hasattr(x, MARK):
                    self.place(x, *getattr(x, MARK)[1::2])
            deciding = given.deciding or self._finder.deciding(done.name, data)
            decides = set(map(id, deciding))
            beside = [x for x in data if id(x) not in decides]
            placements = self._finder.find(done._replace(data=deciding), key, beside)
        shared = [not given.certain] * len(outs)
        if 0 < len(given.certain) < len(data):
            certain = self._finder.deciding(done.name, given.certain)
            shared = self._finder.find_shared(done._replace(data=certain), key)
        if any(p is None for p in placements):
            pairs = zip(outs, placements)
            placements = [self._of_result(x, p, data) for x, p in pairs]
        return placements, shared

    def _of_result(self, x: Tensor, placement: Placement, data: list) -> Placement:
        """Tell a constant from what only looks like one."""
        if placement is None:
            if forward_ad._current_level >= 0:  # it is a tangent
                return Mixed("forward-mode differentiation", False)
            places = [self._finder.of(y) for y in data if y.requires_grad]
            if any(map(has_gaps, places)) and node_of(x) is not None:
                # entries that no sample has entered are no constant of their own
                return unentered(x, self.n)
        return placement

    def _place_results(
        self,
        outs: list[Tensor],
        placements: list[Placement],
        shared: list[bool],
        data: list[Tensor],
    ) -> None:
        """Mark what an operation returned."""
        for x, placement, late in zip(outs, placements, shared):
            if type(placement) is Mixed:
                earlier = any(self._finder.of(y) is placement for y in data)
                owner = None if earlier and placement.is_known else self.owner
                if owner is not None and placement.module is None:
                    placement = placement._replace(module=owner.module_ref)
                if (node := node_of(x)) is not None:
                    node.metadata.setdefault(MEETING, placement)
            self.place(x, placement, late)

    def place(self, x: Tensor, placement: Placement, shared: bool = False) -> None:
        """Mark a tensor; many have the same placement.

        Args:
            x: Tensor.
            placement: Where its samples are.
            shared: Whether all samples might share it. Default: ``False``.
        """
        version = version_of(x)
        mark = None if version or shared else self._marks.get(id(placement))
        if mark is None or mark[2] != version:
            mark = Mark((self.key, placement, version, shared))
            if version == 0 and not shared:  # it keeps the placement, and its identity
                self._marks[id(placement)] = mark
        setattr(x, MARK, mark)
        note_tangent(x)

    def note_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Mark outputs in which samples can't be told apart.

        They have met before; or there seems to be one, but a result has more rows.

        Args:
            outputs: What the model returned.
        """
        met, outs = self._finder.dropped, [x for x in outputs if node_of(x) is not None]
        for x in outs:
            if is_function(x.grad_fn) or mark_of(x) is None:  # nothing was seen
                self.find_placement(x)
        placed = [x for x in outs if self._finder.of(x) is not None]
        known = (Known(self._finder.of(x), self.n) for x in placed)
        if met is None or self._finder.certain(placed) or any(k.has_all for k in known):
            found = [(len(x), self._finder.of(x)) for x in outs if x.dim()]
            moved = {m for m, p in found if isinstance(p, Layout) and p.axis}
            says = [self.longer[m].format(m) for m, _ in found if m in self.longer]
            says += [self.beside[m].format(m) for m in moved if m in self.beside]
            if not says:
                return
            met = Mixed(min(says), False, None, True)
        else:
            met = met._replace(is_data=True, is_of_inputs=bool(placed))
        for x in outs:
            self.place(x, met)
            x.grad_fn.metadata[MEETING] = met

    def _leave_views(self, base: Tensor) -> None:
        """Attach uses to what they have computed, which only views are left of.

        An operation in place takes the views' nodes out of the graph.
        """
        for use, node, view in vars(base).pop(VIEWS_OF, ()):
            with _UNSEEN(), torch.no_grad():
                placement = in_base(view, use.placements[0], base, None, self.n)
            use.move(node, base, placement)

    def _write_to_base(self, view: Tensor, known: Placement) -> list[Tensor]:
        """Pass on where samples are from a view that was written to, to its base."""
        placement, base = self._finder.of(view), view._base
        if isinstance(known, Mixed) or not isinstance(placement, (Layout, Tensor)):
            known = placement if isinstance(placement, Mixed) else known
            if known is not None:
                self.place(base, known)
            return [base]
        with torch.no_grad():
            placement = in_base(View.of(view), placement, base, known, self.n)
        self.place(base, placement, may_be_shared(view, self.key))
        return [base]

    # ----------------------------------------------------------------------------- uses

    def _overwritten(
        self, kind: Kind, args: tuple, constants: list[Tensor]
    ) -> list[Constant] | None:
        """Let what an operation writes to be its own stand-in, at a node of its own.

        Else, what is written might have been computed from it, and would count twice.
        """
        if not (kind.writes and args and any([x is args[0] for x in constants])):
            return None
        x = args[0]
        whole = x if x._base is None else x._base
        if self._finder.of(whole) is not None:
            return []  # the constant has entered with an earlier use
        x.mul_(1)
        return [Constant(whole, edge_of(whole), 0)]

    def _record(
        self,
        request: Request,
        pairs: list[Constant],
        outs: list[Tensor],
        first: Tensor,
        since: int,
        saved: Sequence[Any],
    ) -> None:
        """Remember a use, at the node of the graph that produced its result."""
        func, kind, args, kwargs, _ = request
        if outs[0] is not first:  # but the base of what was written to
            of_view = self._finder.of(first) if kind.name in COMBINING else None
            if has_gaps(of_view):  # with rows of nobody's, nobody can tell
                of_view = None
            for pair in pairs:
                pair.within = partial(in_written, of_view)
        placements = list(map(self._finder.of, outs))
        # where samples gave no more than a shape, what came out is a constant
        pairs_of = zip(outs, placements)
        both = [(x, p) for x, p in pairs_of if x.requires_grad and p is not None]
        if not both or outs[0].is_nested:  # which is refused where samples matter
            saved_tensors.note(outs, saved)
            return
        pairs = note_maps(request, pairs, both, self.owner, self.n, since, saved)
        if not pairs:
            return
        operation = None
        written_to_base = kind.writes and outs[0] is not args[0]
        if len(both) == len(outs) and not written_to_base:
            keys = [pair.key for pair in pairs]
            operation = self._summands.operation(kind.name, args, kwargs, keys)
            operation = operation or find_operation(func, args, kwargs, keys)
            note_parts(kind.name, args, kwargs, pairs, outs[0])
        if operation is not None and outs[0].is_complex():
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            real = not all(given[key].is_complex() for key in operation.keys)
            operation = None if real or not operation.takes_complex else operation
        if self.n > 1 and operation is not None and operation.data is not None:
            operation = operation if operation.is_possible(self._finder.of) else None
        placements = [p for _, p in both]
        use = Use(kind.name, pairs, self.n, placements, self.owner, operation, since)
        use.saved = saved
        use.attach([x for x, _ in both])
        if len(both) == 1 and made_base(both[0][0], since):
            x = both[0][0]
            vars(x._base).setdefault(VIEWS_OF, []).append((use, x.grad_fn, View.of(x)))
