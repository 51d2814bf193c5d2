"""Where samples are in what is called, and calls of layers of the table.

Each of these is a use as a whole. Their rules say what the samples of a result are, and
where its parameters enter: what happens inside is not watched.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence

from backpack.core.derivatives.generic import input_batch_axis, output_batch_axis
from backpack.core.derivatives.recurrent import rows_of
from backpack.core.layout import FIRST, Layout, Mixed, Placement, simplify, spans
from backpack.core.operations import LayerLike, Operation, statistics
from backpack.core.recurrences import EACH, Recurrence, along, samples_of_sequences
from backpack.core.table import Row, find_loss, find_row
from backpack.custom_module.branching import SumModule
from backpack.custom_module.scale_module import ScaleModule
from backpack.engine.forward.tracking import Tracker
from backpack.engine.nodes.constants import Constant
from backpack.engine.nodes.record import Call, clear_copy
from backpack.engine.nodes.uses import Use
from backpack.engine.samples.gaps import (
    INPUT,
    NESTED,
    differ,
    explain,
    is_constant,
    note_constants,
)
from backpack.engine.samples.marks import Pass, place
from backpack.engine.samples.probes import Known
from backpack.utils.hooks import EXTENDED, modules_in, parameters_of
from backpack.utils.module_classification import is_loss
from backpack.utils.types import are_redefined, is_redefining, tensors_in


def is_on_parameters(args: Sequence[Any]) -> bool:
    """Tell whether a module is called with parameters of extended modules alone.

    As what keeps a parameter positive is, of whom the model's call is not seen. What it
    returns is noted as a constant, so that the next layer is not called with samples.

    Args:
        args: Positional arguments.

    Returns:
        Whether it is, so that none of them holds samples.
    """
    given = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    if not given or len(given) < len(args):
        return False
    leaves = [x for x in given if not is_constant(x)]
    if not all([isinstance(x, Parameter) for x in leaves]):
        return False
    roots = list(EXTENDED) if leaves else []
    own = {id(p) for root in roots for p in parameters_of(modules_in(root))}
    return all([id(x) in own for x in leaves])


class Covered(NamedTuple):
    """What is known of a call of a layer of the table.

    Attributes:
        row: The layer's row of the table.
        known: Where the samples of the input are.
        sequences: Which sample each sequence is of that goes into a recurrent layer.
    """

    row: Row
    known: Known
    sequences: Tensor | slice = EACH


def row_of_call(
    module: Module, args: tuple, kwargs: dict[str, Any], tracker: Tracker | None
) -> Covered | None:
    """Look up the rule for a call that is a use as a whole, or needs no watching.

    Samples must be where the layer takes them to be. Everything else is watched.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        tracker: What watches the operations around, ``None`` if nothing does.

    Returns:
        What is known; ``None`` if what happens inside has to be watched.
    """
    if tracker is None and is_loss(module):
        row = find_row(module, losses=True)
        return row and Covered(row, Known(None, 0))  # see `note_prediction`
    row = find_row(module)
    if row is None or kwargs or not args:
        return None
    is_packed = row.several_outputs and isinstance(args[0], PackedSequence)
    x = args[0].data if is_packed else args[0]
    if not isinstance(x, Tensor):
        return None
    if x.is_nested or is_redefining() or are_redefined(args):
        return None
    if row.params == ():
        if tracker is not None or not _keeps_samples(module, x):
            return None
    elif not row.accepts(module, args) or not _is_plain(module, row):
        return None
    known = _known_of(x, tracker) or _given_to(module, args[0])
    if isinstance(module, nn.RNNBase):
        sequences = _sequences(module, args, tracker, known)
        return None if sequences is None else Covered(row, known, sequences)
    if tracker is not None:
        # with autocast, autograd keeps a copy of the input: it may be overwritten
        if len(args) != 1 or torch._C._is_any_autocast_enabled():
            return None
    placement = known.placement
    if type(placement) is not Layout or placement.axis >= _row_axes(module, x):
        return None
    return Covered(row, known)


BESIDE = Mixed("inputs besides the first that no extended module computes", False)
ONE_SAMPLE = (
    "a forward pass whose first input has length 1, and whose result has length {0}, "
    "like another input (give what all samples share last, or without axes; if there "
    "is one sample, give other inputs a first axis of length 1, too)"
)
SHARED_FIRST = (
    "a forward pass whose result has length {0}, like an input after the first, and "
    "what the first input holds along another axis (give the input that holds samples "
    "first, or return them along axis 0)"
)
BY_KEYWORD = Mixed(
    "a call by keywords, of which the first is not the first argument of `forward`, "
    "and of another length (give the input that holds samples first in both, or by "
    "position)",
    False,
)
LIST_OF_SAMPLES = (
    "a forward pass on a list of {0} tensors, whose result has length {0} (if each of "
    "them is a sample, give a tensor that has samples on axis 0, padded if need be)"
)


class Samples(NamedTuple):
    """Where samples are in what a model is called with.

    Attributes:
        n: Number N of samples.
        inputs: Tensors that hold samples, and where.
        longer: Lengths of a result that say that samples are not on axis 0 of the
            first input, and what there is instead.
        beside: The same of a result that has the first input's along another axis.
    """

    n: int
    inputs: list[tuple[Tensor, Placement]]
    longer: dict[int, str]
    beside: dict[int, str]


def find_samples(module: Module, args: tuple, kwargs: dict[str, Any]) -> Samples | None:
    """Look for the samples in what a model is called with.

    What extended modules have computed before says where they are. Else they are on
    axis 0 of the first input, and of others that are as long.

    Args:
        module: The model.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Number and places of the samples, ``None`` if there is no tensor.
    """
    values = (*args, *kwargs.values())
    packed = [x for x in values if isinstance(x, PackedSequence)]
    for sequence in packed:
        where, n = _packed(sequence)
        place(sequence.data, where, Pass(n))
    about = {id(x) for sequence in packed for x in sequence[1:]}  # hold no samples
    tensors = [x for x in tensors_in((args, kwargs), depth=2) if id(x) not in about]
    nested = [x for x in tensors if x.is_nested]
    tensors = [x for x in tensors if x.dim() and not x.is_nested]
    data = [x for x in tensors if not isinstance(x, Parameter)] or tensors
    found = [explain(x, enters=True) for x in data]
    known = [None if k is INPUT else k for k in found]
    sizes = [k.n for k in known if k is not None and not isinstance(k.placement, Mixed)]
    sizes = sizes or [k.n for k in known if k is not None]
    raw = [x for x in data if x.grad_fn is None]
    raw = [*raw, *(x for x, k in zip(data, found) if k is INPUT)] or nested
    computed = [] if sizes or raw else data  # by what is not extended
    if not (sizes or raw or computed):
        return None
    axes = axes_of_samples(module, args, kwargs)
    first = (raw or computed or [None])[0]
    n = sizes[0] if sizes else first.size(axes.get(id(first), 0))
    inputs: list[tuple[Tensor, Placement]] = [(x, NESTED) for x in nested]
    given = {id(x) for x in raw}
    for x, k in zip(data, known):
        axis = axes.get(id(x), 0)
        if k is not None and k.n == n:
            inputs.append((x, k.placement))
        elif id(x) in given and x.size(axis) == n or computed and x is first:
            inputs.append((x, Layout(axis, 1)))
        elif computed:
            inputs.append((x, BESIDE))
        elif id(x) in given:  # for all samples, as the same tensor by itself would be
            note_constants(x)
    beside: dict[int, str] = {}
    if raw and not (sizes or axes or nested):
        if first is not _first_argument(module, args, kwargs, raw):
            inputs = [(x, BY_KEYWORD) for x in raw]
        lengths = {len(x) for x in raw} - {1, n, *first.shape}
        beside = dict.fromkeys(lengths, SHARED_FIRST)
    longer = _lengths_of_lists(values, n)
    if n == 1 and id(first) not in axes:  # or it is a number that all samples share
        new = [x for x, k in zip(data, known) if k is None and id(x) not in axes]
        longer = {**{len(x): ONE_SAMPLE for x in new if len(x) > 1}, **longer}
    return Samples(n, inputs, longer, beside)


def _lengths_of_lists(values: Sequence[Any], n: int) -> dict[int, str]:
    """Find lists in which each tensor might be a sample, by their lengths."""
    found: dict[int, str] = {}
    for x in values:
        if isinstance(x, PackedSequence) or not isinstance(x, (list, tuple)):
            continue
        own = {len(y) for y in x if isinstance(y, Tensor) and y.dim()}
        if len(x) not in (1, n) and (len(own) > 1 or own == {1}):
            found[len(x)] = LIST_OF_SAMPLES
    return found


@lru_cache(maxsize=256)
def _names(forward: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def _first_argument(
    module: Module, args: tuple, kwargs: dict[str, Any], raw: list[Tensor]
) -> Tensor:
    """Return the input that comes first in a forward pass's arguments.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        raw: The inputs, in the order of the call.

    Returns:
        The input; the first of the call, if that is as long.
    """
    first, *others = raw
    if args or len(kwargs) < 2 or all(len(x) == len(first) for x in others):
        return first
    names = [name for name in _names(type(module).forward) if name in kwargs]
    given = {id(x) for x in raw}
    ordered = tensors_in([kwargs[name] for name in names], depth=2)
    found = next((x for x in ordered if id(x) in given), first)
    return first if len(found) == len(first) else found


def _packed(x: PackedSequence) -> Known:
    """Tell where samples are in a packed sequence, if each sequence is one."""
    _, numbers = rows_of(x)
    numbers = numbers.view(-1, *[1] * (x.data.dim() - 1))
    return Known(numbers, int(x.batch_sizes[0]))


_SEQUENCES = {
    nn.RNNBase: ("input", "hx"),
    nn.MultiheadAttention: ("query", "key", "value"),
    nn.Transformer: ("src", "tgt"),
    nn.TransformerEncoder: ("src",),
    nn.TransformerEncoderLayer: ("src",),
    nn.TransformerDecoder: ("tgt", "memory"),
    nn.TransformerDecoderLayer: ("tgt", "memory"),
}


def axes_of_samples(
    module: Module, args: tuple, kwargs: dict[str, Any]
) -> dict[int, int]:
    """Tell along which axis a layer for sequences takes samples, if not the first.

    Args:
        module: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The axis by the ``id`` of the tensor that has samples there.
    """
    names = [n for kind, n in _SEQUENCES.items() if isinstance(module, kind)]
    if not names or not type(module).forward.__module__.startswith("torch.nn."):
        return {}
    given = {**dict(zip(names[0], args)), **kwargs}
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    layers = [m for m in module.modules() if isinstance(m, kinds)]
    moved = [
        given.get(name)
        for i, name in enumerate(names[0])
        if all([input_batch_axis(layer, i) for layer in layers])
    ]
    tensors = tensors_in(moved, depth=2)
    return {id(x): 1 for x in tensors if x.dim() == 3 and not x.is_nested}


def _sequences(
    module: Module, args: tuple, tracker: Tracker | None, of_input: Known
) -> Tensor | slice | None:
    """Tell which sample each sequence is of that goes into a recurrent layer.

    Args:
        module: The layer.
        args: Positional arguments: sequences, and maybe initial states.
        tracker: What watches the operations around, ``None`` if nothing does.
        of_input: Where the samples of the sequences are.

    Returns:
        Numbers of the samples, ``EACH`` for one after the other. ``None`` if the rule
        is not for them: a sequence is not of one sample, samples do not have as many,
        or a state is another one's, or a constant.
    """
    n = of_input.n
    if not n:
        return None
    samples = samples_of_sequences(args[0], int(not module.batch_first), *of_input)
    states = tensors_in(args[1:])
    learned = [h for h in states if h.requires_grad]
    for h in states if samples is not None and tracker is not None else ():
        tracker.beside.pop(len(h), None)  # a length of layers, next to that of samples
    if samples is None or not learned:
        return samples
    for h in learned:
        known = _known_of(h, tracker)
        own = None if known is None else along(h, 1, *known)
        if own is None or not torch.equal(own, torch.arange(n).to(own)[samples]):
            return None
    return samples


def is_redefined(call: Call) -> bool:
    """Tell whether a layer may have computed something else than its class says.

    Args:
        call: Record of its call.

    Returns:
        Whether a mode or a tensor's class can have changed it.
    """
    return is_redefining() or are_redefined((*call.inputs, *call.parameters.values()))


def _is_plain(module: Module, row: Row) -> bool:
    """Tell whether all parameters are the layer's own, and none is computed."""
    own = module._parameters
    names = vars(module)["_flat_weights_names"] if row.params is None else row.params
    if own.keys() != set(names) or set(module._modules.values()) - {None}:
        return False
    given = [p for p in own.values() if p is not None]
    computed = any([p.grad_fn is not None or p.is_complex() for p in given])
    return not (computed or are_redefined(given))


# Their options, or an input with few axes, may make them act along axis 0
_MOVES = (
    *(nn.Softmax, nn.LogSoftmax, nn.GLU, nn.Flatten, nn.Unflatten, nn.PixelShuffle),
    *(nn.PixelUnshuffle, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
)


def _keeps_samples(module: Module, x: Tensor) -> bool:
    """Tell whether a layer without parameters leaves samples on axis 0 as they are."""
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0
    if isinstance(module, nn.Identity):
        return True
    return type(module).__module__.startswith("torch.nn") and not isinstance(
        module, _MOVES
    )


def _known_of(x: Tensor, tracker: Tracker | None) -> Known | None:
    if tracker is None:
        known = explain(x, enters=True)
        return None if known is INPUT else known
    return Known(tracker.find_placement(x), tracker.n)


def _given_to(module: Module, x: Tensor | PackedSequence) -> Known:
    """Tell where a layer takes the samples of its input to be."""
    if isinstance(x, PackedSequence):
        return _packed(x)
    axis = input_batch_axis(module, 0)
    return Known(Layout(axis, 1), x.shape[axis] if x.dim() > axis else 1)


def note_use(
    call: Call, found: Covered, args: tuple, outputs: list[Tensor], since: int
) -> list[Placement]:
    """Record a call of a layer of the table as a use; say where samples are then.

    Args:
        call: The call.
        found: What is known of it.
        args: Positional arguments.
        outputs: What the layer returned.
        since: Number of nodes that the graph had before.

    Returns:
        Where the samples are in each output.
    """
    module, (row, known, sequences) = call.module, found
    call.n = known.n
    placements: list[Placement] = [known.placement] * len(outputs)
    if isinstance(module, nn.RNNBase):
        is_packed = isinstance(args[0], PackedSequence)
        for i, x in enumerate(outputs[is_packed:], start=is_packed):
            placements[i] = Layout(output_batch_axis(module, i), 1)
            if isinstance(sequences, Tensor):
                view = [1] * x.dim()
                view[output_batch_axis(module, i)] = -1
                placements[i] = simplify(sequences.view(view).expand(x.shape), known.n)
    if row.params == ():
        return placements
    constants = [
        Constant(p, None, name)
        for name, p in module._parameters.items()
        if p is not None and p.requires_grad
    ]
    if constants and all([x.requires_grad for x in outputs]):
        operation = _operation(found, module, args, [c.key for c in constants])
        name = type(module).__name__
        use = Use(name, constants, known.n, placements, call, operation, since)
        use.attach(outputs)
    return placements


def computes_loss(
    module: Module, call: Call, outputs: list[Tensor], outermost: bool
) -> bool:
    """Tell whether a call maps a prediction, which has a graph, to a number.

    Args:
        module: What was called.
        call: Record of the call.
        outputs: What it returned.
        outermost: Whether no other extended module has called it.

    Returns:
        Whether it is a loss.
    """
    if is_loss(module):
        return True
    if not outputs or outputs[0].numel() != 1 or outputs[0].dim() > 1:
        return False
    if isinstance(module, (ScaleModule, SumModule)):
        return False  # a multiple of a loss, or a sum
    edge = next(iter(call.input_edges), None)
    if next(module.parameters(), None) is None:
        return outputs[0].dim() == 0 or edge is not None
    return outermost and edge is not None and edge.node.next_functions != ()


def note_prediction(call: Call) -> None:
    """Remember where the samples are in a loss's prediction, or that they meet.

    Args:
        call: Record of the loss's call.
    """
    x, *others = call.arguments or [None]
    if not isinstance(x, Tensor):
        return
    computed = [y for y in others if isinstance(y, Tensor) and y.grad_fn is not None]
    found = [explain(y, enters=True) for y in computed]
    behind = [k for k in found if k is not None and k is not INPUT]
    known = explain(x)
    if known is None and behind and not x.requires_grad:
        known = behind[0]  # what was given as the prediction is the target
    if known is None:
        known = Known(FIRST, len(x) if x.dim() else 1)
    call.placement, call.n = known
    behind.append(known)
    axis = find_loss(call.module).derivatives.compared_axis(x)
    meet = axis is not None and known.n > 1 and spans(known.placement, x.shape, axis)
    if not isinstance(known.placement, Mixed) and (meet or differ(behind)):
        call.placement = Mixed(f"`{type(call.module).__name__}` on {list(x.shape)}")


def _operation(
    found: Covered, module: Module, args: tuple, names: list[str]
) -> Operation | None:
    # its options may be changed, its parameters replaced, before they are read
    row, layer = found.row, clear_copy(module)
    keys = {name: name for name in names}
    if row.several_outputs:
        return Recurrence(row.derivatives, layer, args, keys, found.sequences)
    if isinstance(module, _NormBase):
        vars(layer).update(_buffers=statistics(module._buffers))
    return LayerLike(row.derivatives, layer, keys, args[0], _features(module))


def _features(module: Module) -> int | None:
    if isinstance(module, nn.Linear):
        return 1
    if isinstance(module, nn.Embedding):
        return 0
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape)
    return None


def _row_axes(module: Module, x: Tensor) -> int:
    """Count the leading axes of a layer's input that are rows."""
    features = _features(module)
    return 1 if features is None else x.dim() - features
