"""Recurrent layers as operations: their parameters, and initial states.

Each sequence is of one sample, which may have several, in any order.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence

from backpack.core.derivatives.recurrent import STATES, RecurrentDerivatives, rows_of
from backpack.core.derivatives.stored import shallow_copy
from backpack.core.kinds import Key, Operation
from backpack.core.layout import Layout, Placement
from backpack.core.per_sample.apart import Apart
from backpack.core.per_sample.base import PerSample
from backpack.utils.types import place_of, tensors_in, versions_of

EACH = slice(None)  # sequences or samples, one after the other


class Recurrence(Operation):
    """What a recurrent layer does, by its derivatives."""

    takes_all = True

    def __init__(
        self,
        derivatives: RecurrentDerivatives,
        layer: Module,
        arguments: Sequence[Any],
        names: Mapping[Key, str],
        sequences: Tensor | slice | None = None,
    ):
        """Store the call.

        Args:
            derivatives: The layer's derivatives.
            layer: The layer, with its options and parameters.
            arguments: What went in.
            names: Names of the constants, by argument: parameters of the layer, or
                initial states.
            sequences: Which sample each of the sequences is of that went in; ``None``
                if that is to be seen from the output.
        """
        super().__init__(tensors_in(arguments)[0], list(names))
        self._derivatives, self._arguments = derivatives, arguments
        self._layer, self._names, self._sequences = layer, names, sequences
        self._read = tensors_in((arguments, list(layer._parameters.values())))
        self._versions = versions_of(self._read)
        with torch._C.DisableTorchFunction():  # `p.data = other` moves no version
            self._own = {
                name: None if p is None else p.detach()
                for name, p in layer._parameters.items()
            }

    @property
    def is_modified(self) -> bool:
        """Whether the input, a state, or a parameter was modified in place since."""
        return versions_of(self._read) != self._versions

    def product(
        self, key: Key, shape: torch.Size, cotangents: Any, out: Placement, n: int
    ) -> PerSample | None:  # noqa: D102
        sequences, layer = self._sequences, self._layer
        if sequences is None:
            axis = int(not layer.batch_first)
            sequences = samples_of_sequences(self._arguments[0], axis, out, n)
        if sequences is None:
            return None
        pairs = zip(layer._parameters.values(), self._own.values())
        if any(p is not None and place_of(p) != place_of(x) for p, x in pairs):
            layer = shallow_copy(layer, _parameters=self._own)
        name = self._names[key]
        found = self._derivatives.product(name, layer, self._arguments, cotangents)
        if not isinstance(sequences, Tensor):
            return found
        if isinstance(found, Apart):
            return Apart(found.own, sequences.view(1, -1, 1), n)
        order: Any = sequences.argsort(stable=True)
        return found.select(order).merged(n)


def called(
    derivatives: RecurrentDerivatives,
    nonlinearity: str | None,
    args: Sequence[Any],
    keys: Sequence[Any],
) -> Recurrence | None:
    """Describe a call of the function behind a recurrent layer.

    Args:
        derivatives: The layer's derivatives.
        nonlinearity: Which one, if there is a choice.
        args: Its arguments, as :class:`torch.nn.LSTM` gives them, for instance.
        keys: Which of them are constants: position, or position and place in a list.

    Returns:
        The operation, ``None`` for options that the derivatives don't cover.
    """
    is_packed = isinstance(args[3], (list, tuple))
    x, start = args[0], 1 + is_packed
    if is_packed:
        x = PackedSequence(x, args[1])
    given, flat, has_bias, layers, dropout, training, both_ways, *last = args[start:]
    states = [given] if isinstance(given, Tensor) else list(given)
    layer: Any = Module()
    ends = [
        f"_l{i}{end}"
        for i in range(layers)
        for end in ("", "_reverse")[: 1 + both_ways]
    ]
    kinds = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if has_bias else ())]
    kinds += ["weight_hr"] * (len(flat) > len(ends) * len(kinds))
    weights = [kind + end for end in ends for kind in kinds]
    layer._parameters.update(zip(weights, flat))
    vars(layer).update(
        num_layers=layers,
        nonlinearity=nonlinearity,
        dropout=dropout,
        training=training,
        bidirectional=both_ways,
        batch_first=bool(last and last[0]),
        proj_size=layer.weight_hr_l0.shape[0] if "weight_hr" in kinds else 0,
    )
    names: dict[Any, str] = {(start + 1, i): name for i, name in enumerate(weights)}
    if isinstance(given, Tensor):
        names[start] = STATES[0]
    names.update({(start, i): name for i, name in zip(range(len(states)), STATES)})
    if not derivatives.supports(layer, [x]):
        return None
    names = {key: names[key] for key in keys}
    return Recurrence(derivatives, layer, [x, *states], names)


def samples_of_sequences(
    x: Tensor | PackedSequence, axis: int, where: Placement, n: int
) -> Tensor | slice | None:
    """Tell which sample each sequence is of, if all samples have as many.

    Args:
        x: The sequences.
        axis: Along which axis they are, if they are not packed.
        where: Where samples are in them, or in what became of each step.
        n: Number N of samples.

    Returns:
        Numbers of the samples, ``EACH`` for one after the other. ``None`` if a sequence
        is not of one sample, or samples do not have as many.
    """
    if isinstance(x, PackedSequence):
        samples = of_packed(x, where, n)
    else:
        # with one sample, however its layout was noted
        one = n == 1 and type(where) is Layout
        if x.shape[axis] == n and (one or where == Layout(axis, 1)):
            return EACH
        samples = along(x, axis, where, n)
    if samples is None or len(samples) % n:
        return None
    each = torch.arange(len(samples), device=samples.device) // (len(samples) // n)
    if not torch.equal(samples.sort()[0], each):
        return None
    return EACH if len(samples) == n and torch.equal(samples, each) else samples


def of_packed(x: PackedSequence, where: Placement, n: int) -> Tensor | None:
    """Tell which sample each sequence of a packed one is of.

    Args:
        x: The packed sequence.
        where: Where samples are in its data, or in what became of it.
        n: Number N of samples.

    Returns:
        Numbers of the samples; ``None`` if its steps are not of the same one.
    """
    rows, (_, numbers) = along(x.data, 0, where, n), rows_of(x)
    if rows is None:
        return None
    size = int(x.batch_sizes[0])
    samples = rows.new_empty(size).index_copy(0, numbers[:size], rows[:size])
    return samples if torch.equal(rows, samples[numbers]) else None


def along(x: Tensor, axis: int, where: Placement, n: int) -> Tensor | None:
    """Tell the sample of each entry along an axis, if that is all there is to tell.

    Args:
        x: A tensor.
        axis: The axis.
        where: Where samples are in it.
        n: Number N of samples.

    Returns:
        Numbers of the samples, ``None`` if other axes matter.
    """
    if isinstance(where, Layout):
        if n > 1 and where.axis != axis:
            return None
        return torch.arange(x.shape[axis], device=x.device) // where.inner % n
    if not isinstance(where, Tensor) or not where.numel():
        return None
    own = where.to(x.device).movedim(axis, 0).flatten(1)  # often one number a row
    if not torch.equal(own, own[:, :1].expand_as(own)):
        return None
    return own[:, 0].expand(x.shape[axis])
