"""Recurrent layers' per-sample products, against autograd one sample at a time.

A row is a :class:`Case`. The rows cover all kinds of layers, numbers of layers and
directions, and outputs with cotangents; and of the other options, all pairs.
"""

import gc
import weakref
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type

import pytest
import torch
from oracle import assert_agrees
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

from backpack import backpack, extend
from backpack.core.derivatives import recurrent
from backpack.core.derivatives.generic import (
    input_batch_axis,
    output_batch_axis,
    tensor_outputs,
)
from backpack.core.derivatives.gru import GRUDerivatives
from backpack.core.derivatives.lstm import LSTMDerivatives
from backpack.core.derivatives.recurrent import RecurrentDerivatives
from backpack.core.derivatives.rnn import RNNDerivatives
from backpack.core.per_sample.base import Dense, PerSample
from backpack.core.per_sample.outer import Outer
from backpack.extensions import BatchGrad

F64 = torch.float64
N, T, D_IN, HIDDEN, PROJECTED = 3, 4, 2, 3, 2


class Kind(NamedTuple):
    """A kind of layer, its derivatives, and how many states it has."""

    make: Callable[..., nn.Module]
    derivatives: Type[RecurrentDerivatives]
    states: int = 1


KINDS = {
    "RNN-tanh": Kind(nn.RNN, RNNDerivatives),
    "RNN-relu": Kind(
        lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k), RNNDerivatives
    ),
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


# In these four, each two of (batch_first, given, bias) take all pairs of values
FLAGS = [flags for flags in product([True, False], repeat=3) if sum(flags) % 2 == 0]
CASES = [
    Case(kind, *shape, outputs, *FLAGS[(i + j + k) % 4], columns=columns)
    for kind, row in KINDS.items()
    for i, shape in enumerate(product([1, 2], [False, True]))
    for j, outputs in enumerate(OUTPUTS[row.states])
    for k, columns in enumerate([1, 3])
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
        (
            torch.randn(case.columns, *like.shape, dtype=F64)
            if which in case.outputs
            else None
        )
        for which, like in zip("ohc", [output, *states])
    ]
    return Problem(module, row.derivatives(), inputs, mats)


def autograd_products(problem: Problem) -> Dict[str, Tensor]:
    """Per-sample products ``[V, N, *p]``, one sample and column after the other."""
    module, _, inputs, mats = problem
    params = dict(module.named_parameters())
    create_graph = any(x.requires_grad for x in tensors_of(problem))
    reached = [i for i, mat in enumerate(mats) if mat is not None]
    rows = []
    for n in range(N):
        x = inputs[0].narrow(input_batch_axis(module, 0), n, 1)
        pick = partial(torch.narrow, dim=1, start=n, length=1)
        picked = tree_map_only(Tensor, pick, inputs[1:])
        states = tree_map_only(Tensor, Tensor.contiguous, picked)  # for cuDNN
        outputs = tensor_outputs(module(x, *states))
        for v in range(mats[reached[0]].shape[0]):
            rows.append(
                grad(
                    [outputs[i] for i in reached],
                    list(params.values()),
                    [
                        mats[i][v].narrow(output_batch_axis(module, i), n, 1)
                        for i in reached
                    ],
                    retain_graph=True,
                    create_graph=create_graph,
                    materialize_grads=True,
                )
            )
    stacked = [torch.stack(column) for column in zip(*rows)]
    return {
        name: x.unflatten(0, (N, -1)).transpose(0, 1)
        for name, x in zip(params, stacked)
    }


def tensors_of(problem: Problem) -> List[Tensor]:
    """Everything but the parameters that products depend on."""
    return tree_leaves((problem.inputs, [m for m in problem.mats if m is not None]))


def check_close(result: Tensor, expected: Tensor, label: str) -> None:
    """Compare at 1e-8, relative to the largest entry."""
    assert result.shape == expected.shape, label
    atol = 1e-8 * expected.abs().max().item()
    torch.testing.assert_close(
        result, expected, rtol=0.0, atol=atol, msg=lambda m: f"{label}: {m}"
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reductions(case: Case):
    """All that can be reduced from the products agrees with autograd."""
    problem = build(case)
    for name, expected in autograd_products(problem).items():
        with torch.no_grad():
            result = problem.product(name)
        assert isinstance(result, Outer if "weight" in name else Dense)
        for label, reduced, by_autograd in [
            ("individual", result.individual(), expected),
            ("summed", result.summed(), expected.sum(1)),
            ("sq_norms", result.sq_norms(), expected.flatten(2).pow(2).sum((0, 2))),
            ("squares", result.squares(), expected.pow(2).sum((0, 1))),
            ("squares of samples", result.squares(False), expected.pow(2).sum(0)),
        ]:
            check_close(reduced, by_autograd, f"{name}, {label}")


@pytest.mark.parametrize("case", FULL, ids=str)
def test_differentiable(case: Case):
    """Products can be differentiated with respect to all they depend on."""
    problem = build(case)
    leaves = [*problem.module.parameters(), *tensors_of(problem)]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = autograd_products(problem)
    weights = {name: torch.randn_like(p) for name, p in expected.items()}

    def gradients(products: Dict[str, Tensor]) -> Tuple[Tensor, ...]:
        total = sum((weights[name] * p.pow(2)).sum() for name, p in products.items())
        return grad(total, leaves)

    fast = {name: problem.product(name).individual() for name in problem.names}
    by_autograd = gradients(expected)
    assert any(x.abs().max() > 0 for x in by_autograd)
    for leaf, result, reference in zip(leaves, gradients(fast), by_autograd):
        check_close(result, reference, f"derivative w.r.t. {list(leaf.shape)}")


@pytest.mark.parametrize("kind", KINDS)
def test_one_recursion(kind: str, monkeypatch):
    """All parameters share one recursion, and nothing outlives the cotangent."""
    outputs = OUTPUTS[KINDS[kind].states][-1]
    problem = build(Case(kind, outputs=outputs, given=True))
    gc.collect()
    kept = len(recurrent._PRODUCTS)
    calls = []
    compute = RecurrentDerivatives.products

    def counted(*args):
        calls.append(None)
        return compute(*args)

    monkeypatch.setattr(RecurrentDerivatives, "products", counted)
    with torch.no_grad():
        for name in problem.names:
            problem.product(name)
        assert len(calls) == 1
        for count, change in enumerate(STALE, start=2):
            changed = change(problem)
            changed.product(name)
            assert len(calls) == count
    assert len(recurrent._PRODUCTS) == kept + 1
    del problem, changed
    gc.collect()
    assert len(recurrent._PRODUCTS) == kept


def _scale_parameter(problem: Problem) -> Problem:
    with torch.no_grad():
        next(problem.module.parameters()).mul_(2.0)
    return problem


def _scale_cotangent(problem: Problem) -> Problem:
    problem.mats[0].mul_(2.0)
    return problem


# Changes after which products must be computed anew
STALE = [
    _scale_parameter,
    _scale_cotangent,
    lambda p: p._replace(
        mats=[m if i == 0 else m.clone() for i, m in enumerate(p.mats)]
    ),
    lambda p: p._replace(mats=[m if i == 0 else None for i, m in enumerate(p.mats)]),
    lambda p: p._replace(inputs=(p.inputs[0].clone(), *p.inputs[1:])),
    lambda p: p._replace(inputs=p.inputs[:1]),
    lambda p: p._replace(module=deepcopy(p.module)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_own_graphs(kind: str):
    """With gradients enabled, each product has its own graph, and nothing is kept."""
    problem = build(Case(kind))
    problem.mats[0].requires_grad_()
    for name in problem.names:
        problem.product(name).individual().sum().backward()
    assert problem.mats[0] not in recurrent._PRODUCTS
    alive = weakref.ref(problem.mats[0])
    del problem
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", KINDS)
def test_first_output_only(kind: str):
    """A tensor stands for the first output, and ``None`` for states not given."""
    problem = build(Case(kind))
    short = problem._replace(mats=problem.mats[0], inputs=(problem.inputs[0], None))
    for name in problem.names:
        expected = problem.product(name).individual()
        check_close(short.product(name).individual(), expected, name)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision(kind: str):
    """Inputs and cotangents of lower precision are brought to the parameters'."""
    problem = build(Case(kind, given=True))
    half = tree_map_only(Tensor, Tensor.bfloat16, (problem.inputs, problem.mats))
    inputs, mats = tree_map_only(Tensor, Tensor.double, half)
    rounded = problem._replace(inputs=inputs, mats=mats)
    mixed = problem._replace(inputs=half[0], mats=half[1])
    for name in problem.names:
        expected = rounded.product(name).individual()
        check_close(mixed.product(name).individual(), expected, name)


def store(problem: Problem) -> nn.Module:
    """Do what the forward pass of an extended module does, with gradients needed."""
    module = problem.module
    for i, given in enumerate(problem.inputs):
        setattr(module, f"input{i}", given)
    module.output = module(*problem.inputs)[0].detach()
    return module


JACOBIANS = [
    Case(kind, 1, True, "o", batch_first, given)
    for kind in KINDS
    for batch_first in (True, False)
    for given in (True, False)
]


@pytest.mark.parametrize("case", JACOBIANS, ids=str)
def test_jacobians(case: Case):
    """Products with the first output's Jacobians agree with autograd's."""
    problem = build(case)
    module, derivatives = store(problem), problem.derivatives
    x, *others = problem.inputs
    (mat,) = [m for m in problem.mats if m is not None]
    jacobian = torch.autograd.functional.jacobian(lambda x: module(x, *others)[0], x)
    flat = jacobian.reshape(mat[0].numel(), x.numel())

    vectors = torch.randn(2, *x.shape, dtype=F64)
    result = derivatives.jac_mat_prod(module, (), (), vectors)
    check_close(result.flatten(1), vectors.flatten(1) @ flat.T, "jac_mat_prod")
    result = derivatives.jac_t_mat_prod(module, (), (), mat)
    check_close(result.flatten(1), mat.flatten(1) @ flat, "jac_t_mat_prod")
    result = derivatives.jac_t_mat_prod(module, (), (), mat[0])
    check_close(result.flatten(), mat[0].flatten() @ flat, "jac_t_mat_prod of a vector")

    for name, expected in autograd_products(problem).items():
        param = module.get_parameter(name)
        result = derivatives.param_mjp(name, module, (), (), mat)
        check_close(result, expected.sum(1), name)
        vector = torch.randn_like(param)
        result = derivatives.param_jac_mat_prod(name, module, (), (), vector)
        dots = (result * mat).flatten(1).sum(1)
        check_close(dots, (expected.sum(1) * vector).flatten(1).sum(1), name)
    assert not derivatives.hessian_is_zero(module)


@pytest.mark.parametrize("case", JACOBIANS, ids=str)
def test_subsampling(case: Case):
    """Samples are selected from inputs, states and output, or the call is refused."""
    problem = build(case)
    module, derivatives = store(problem), problem.derivatives
    (mat,) = [m for m in problem.mats if m is not None]
    samples = [2, 0]
    picked = mat.index_select(1 + output_batch_axis(module, 0), torch.tensor(samples))

    def pull_back() -> Tensor:
        return derivatives.jac_t_mat_prod(module, (), (), picked, subsampling=samples)

    def mjp(name: str, sum_batch: bool) -> Tensor:
        return derivatives.param_mjp(
            name, module, (), (), picked, sum_batch=sum_batch, subsampling=samples
        )

    if not case.batch_first:
        with pytest.raises(NotImplementedError, match="batch_first=True"):
            pull_back()
        with pytest.raises(NotImplementedError, match="batch_first=True"):
            mjp("weight_hh_l0", True)
        return

    expected = derivatives.jac_t_mat_prod(module, (), (), mat)[:, samples]
    check_close(pull_back(), expected, "jac_t_mat_prod")
    for name, expected in autograd_products(problem).items():
        expected = expected[:, samples]
        check_close(mjp(name, False), expected, name)
        check_close(mjp(name, True), expected.sum(1), name)
    assert module.input0 is problem.inputs[0]


@pytest.mark.usefixtures("cpu")  # where PyTorch wants the lengths
@pytest.mark.parametrize("lengths", [(4, 3, 1), (2, 4, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("case", FULL, ids=str)
def test_packed(case: Case, lengths: Tuple[int, ...]):
    """Samples of different lengths are each what they are alone, to the end."""
    module, derivatives, (x, states), _ = build(case)
    batch = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    outputs = tensor_outputs(module(batch, states))
    mats = [torch.randn(case.columns, *y.shape, dtype=F64) for y in outputs]
    packed, *finals = mats
    columns = [batch._replace(data=column) for column in packed]
    padded = torch.stack([pad_packed_sequence(c, True)[0] for c in columns])
    described = {
        name: derivatives.product(name, module, (batch, states), mats)
        for name, _ in module.named_parameters()
    }
    products = {name: p.individual() for name, p in described.items()}
    for name, p in described.items():  # Kronecker factors are made of these
        if isinstance(p, Outer):
            steps = p.a[:, 0].any(-1).sum(-1).tolist()
            within = [step <= length for step, length in zip(steps, lengths)]
            assert all(within), f"inputs of {name} after the end"
    pick = partial(torch.narrow, dim=1, length=1)
    for n, length in enumerate(lengths):
        own = tree_map_only(Tensor, lambda s, n=n: pick(s, start=n), states)
        alone = tensor_outputs(module(x[n : n + 1, :length], own))
        for v in range(case.columns):
            given = [
                padded[v, n : n + 1, :length],
                *[pick(m[v], start=n) for m in finals],
            ]
            expected = grad(alone, list(module.parameters()), given, retain_graph=True)
            for (name, result), by_autograd in zip(products.items(), expected):
                check_close(result[v, n], by_autograd, name)


REFUSED = {
    "dropout": ({"dropout": 0.5}, lambda: torch.ones(3, 4, 2), "dropout=0.5.*eval"),
    "no batch": ({}, lambda: torch.ones(4, 2), "2 axes"),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "LSTM-proj"])
def test_refused(kind: str, reason: str):
    """Calls without a right answer are refused, with the module and a way out."""
    options, make_input, message = REFUSED[reason]
    row = KINDS[kind]
    module = row.make(2, 3, num_layers=2, batch_first=True, **options)
    inputs = (make_input(),)
    mat = torch.ones(1, 3, 4, 3)
    with pytest.raises(NotImplementedError, match=f"(?s){kind[:3]}.*{message}"):
        row.derivatives().product("weight_ih_l0", module, inputs, mat)


@pytest.mark.parametrize(
    "train, dropout, layers, expected",
    [
        (True, 0.5, 2, False),
        (False, 0.5, 2, True),
        (True, 0.0, 2, True),
    ],
)
def test_supports(train: bool, dropout: float, layers: int, expected: bool):
    """Only dropout that is drawn stands in the way."""
    module = nn.LSTM(2, 3, layers, dropout=dropout).train(train)
    assert LSTMDerivatives().supports(module, (torch.ones(4, 3, 2),)) is expected


class Chunks(nn.Module):
    """A model of a part of a sequence that is given a state, and returns the next."""

    def __init__(self, kind: str, layers: int):
        """Create the layers."""
        super().__init__()
        self.layer = getattr(nn, kind)(D_IN, HIDDEN, layers, batch_first=True)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, state: Any = None) -> Tuple[Tensor, Any]:
        """Map ``[N, T, D_IN]``, and states of each layer."""
        x, state = self.layer(x, state)
        return self.head(x), state


@pytest.mark.parametrize("layers", [1, N, 5])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_states_that_are_handed_on(kind: str, layers: int) -> None:
    """A state of as many rows as there are layers is known for one by the layer."""
    torch.manual_seed(0)
    model, x = Chunks(kind, layers).to(F64), torch.randn(N, T, D_IN, dtype=F64)
    _, state = model(x)
    state = tree_map_only(Tensor, Tensor.detach, state)
    params, rows = list(model.parameters()), []
    for n in range(N):
        own = tree_map_only(Tensor, lambda s, n=n: s[:, n : n + 1].contiguous(), state)
        rows.append(grad(model(x[n : n + 1], own)[0].square().sum(), params))
    extend(model)
    with backpack(BatchGrad()):
        model(x, state)[0].square().sum().backward()
    for param, expected in zip(params, zip(*rows)):
        assert_agrees(param.grad_batch, torch.stack(expected))
