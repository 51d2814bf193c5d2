"""Recurrent layers' per-sample products, against autograd one sample at a time.

A row is a :class:`Case`. The rows cover all kinds of layers, numbers of layers and
directions, and outputs with cotangents; and of the other options, all pairs.
"""

import gc
import weakref
from itertools import product
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call
from torch.nn.utils.rnn import pack_sequence

from backpack.core.derivatives import recurrent
from backpack.core.derivatives.generic import (
    generic_product,
    input_batch_axis,
    output_batch_axis,
    tensor_outputs,
)
from backpack.core.derivatives.gru import GRUDerivatives
from backpack.core.derivatives.lstm import LSTMDerivatives
from backpack.core.derivatives.recurrent import RecurrentDerivatives
from backpack.core.derivatives.rnn import RNNDerivatives
from backpack.core.reductions import Dense, Outer, PerSample

F64 = torch.float64
N, T, D_IN, HIDDEN, PROJECTED = 3, 4, 2, 3, 2


class Kind(NamedTuple):
    """A kind of layer, its derivatives, and how many states it has."""

    make: Callable[..., nn.Module]
    derivatives: Type[RecurrentDerivatives]
    states: int = 1


KINDS = {
    "RNN-tanh": Kind(nn.RNN, RNNDerivatives),
    "RNN-relu": Kind(lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k), RNNDerivatives),
    "LSTM": Kind(nn.LSTM, LSTMDerivatives, 2),
    "LSTM-proj": Kind(
        lambda *a, **k: nn.LSTM(*a, proj_size=PROJECTED, **k), LSTMDerivatives, 2
    ),
    "GRU": Kind(nn.GRU, GRUDerivatives),
}
# Which outputs have cotangents
OUTPUTS = {1: ["o", "h", "oh"], 2: ["o", "h", "c", "ohc"]}


class Case(NamedTuple):
    """A call of a recurrent layer."""

    kind: str
    layers: int = 1
    bidirectional: bool = False
    outputs: str = "o"
    batch_first: bool = True
    given: bool = False
    bias: bool = True
    columns: int = 3

    def __str__(self) -> str:
        flags = [f for f in self._fields if getattr(self, f) is True]
        return "-".join(
            [self.kind, f"L{self.layers}", self.outputs, f"V{self.columns}", *flags]
        )


CASES = [
    Case(kind, layers, bidirectional, outputs, *flags, columns=1 if flags[0] else 3)
    for kind, layers, bidirectional in product(KINDS, [1, 2], [False, True])
    for outputs in OUTPUTS[KINDS[kind].states]
    for flags in product([True, False], repeat=3)
    if sum(flags) % 2 == 0
]
# One case of each kind with everything in it, for checks of another sort
FULL = [
    Case(kind, 2, True, OUTPUTS[row.states][-1], given=True)
    for kind, row in KINDS.items()
]


class Problem(NamedTuple):
    """A module, the arguments of its call, and cotangents at its outputs."""

    module: nn.Module
    derivatives: RecurrentDerivatives
    inputs: Tuple[Any, ...]
    mats: List[Optional[Tensor]]

    @property
    def names(self) -> List[str]:
        return [name for name, _ in self.module.named_parameters()]

    def product(self, name: str) -> PerSample:
        return self.derivatives.product(name, self.module, self.inputs, self.mats)


def build(case: Case) -> Problem:
    """Create the problem of a case."""
    torch.manual_seed(0)
    row = KINDS[case.kind]
    module = row.make(
        D_IN,
        HIDDEN,
        num_layers=case.layers,
        bidirectional=case.bidirectional,
        batch_first=case.batch_first,
        bias=case.bias,
    ).to(F64)
    x = torch.randn((N, T, D_IN) if case.batch_first else (T, N, D_IN), dtype=F64)
    with torch.no_grad():
        output, states = module(x)
    states = states if isinstance(states, tuple) else (states,)
    inputs = (x,)
    if case.given:
        given = tuple(torch.randn_like(state) for state in states)
        inputs = (x, given if len(given) > 1 else given[0])
    mats = [
        torch.randn(case.columns, *like.shape, dtype=F64) if which in case.outputs else None
        for which, like in zip("ohc", [output, *states])
    ]
    return Problem(module, row.derivatives(), inputs, mats)


def pick(tensor: Tensor, n: int, axis: int) -> Tensor:
    """Select a sample and keep the axis."""
    return tensor.narrow(axis, n, 1)


def autograd_products(problem: Problem) -> Dict[str, Tensor]:
    """Per-sample products ``[V, N, *p]``, one sample and column after the other."""
    module, _, inputs, mats = problem
    params = dict(module.named_parameters())
    create_graph = any(p.requires_grad for p in tensors_of(problem))
    reached = [i for i, mat in enumerate(mats) if mat is not None]
    rows = []
    for n in range(N):
        args = [pick(inputs[0], n, input_batch_axis(module, 0))]
        if len(inputs) > 1:
            states = inputs[1]
            single = isinstance(states, Tensor)
            states = [pick(s, n, 1) for s in ([states] if single else states)]
            args.append(states[0] if single else tuple(states))
        outputs = tensor_outputs(module(*args))
        for v in range(mats[reached[0]].shape[0]):
            rows.append(
                grad(
                    [outputs[i] for i in reached],
                    list(params.values()),
                    [pick(mats[i][v], n, output_batch_axis(module, i)) for i in reached],
                    retain_graph=True,
                    create_graph=create_graph,
                    materialize_grads=True,
                )
            )
    stacked = [torch.stack(column) for column in zip(*rows)]
    return {
        name: x.unflatten(0, (N, -1)).transpose(0, 1) for name, x in zip(params, stacked)
    }


def tensors_of(problem: Problem) -> List[Tensor]:
    """Everything but the parameters that products depend on."""
    x, *states = problem.inputs
    states = [s for pair in states for s in (pair if isinstance(pair, tuple) else [pair])]
    return [x, *states, *(mat for mat in problem.mats if mat is not None)]


def check_close(result: Tensor, expected: Tensor, label: str) -> None:
    """Compare at 1e-8, relative to the largest entry."""
    assert result.shape == expected.shape, label
    atol = 1e-8 * expected.abs().max().item()
    torch.testing.assert_close(result, expected, rtol=0.0, atol=atol, msg=lambda m: f"{label}: {m}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reductions(case: Case):
    """All that can be reduced from the products agrees with autograd."""
    problem = build(case)
    for name, expected in autograd_products(problem).items():
        with torch.no_grad():
            result = problem.product(name)
        assert isinstance(result, Outer if "weight" in name else Dense)
        norms = expected.flatten(2).pow(2).sum((0, 2))
        for label, reduced, by_autograd in [
            ("individual", result.individual(), expected),
            ("summed", result.summed(), expected.sum(1)),
            ("sq_norms", result.sq_norms(), norms),
            ("squares", result.squares(), expected.pow(2).sum((0, 1))),
            ("squares of samples", result.squares(False), expected.pow(2).sum(0)),
        ]:
            check_close(reduced, by_autograd, f"{name}, {label}")
    assert {n for n, e in autograd_products(problem).items() if e.abs().max() == 0} == (
        unreached(case)
    )
