"""Tensors count as they were used, and results are on those that were given.

Parameters of a functional call, parameters that are swapped or modified before the
backward pass, cached parametrizations, statistics that move.
"""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Callable, Dict, Iterable, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import F64, Tensors
from oracle import assert_agrees
from per_sample import (
    Lambda,
    N,
    Row,
    against_classes,
    assert_fields,
    assert_right,
    param,
    randn,
    real,
    reference,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Module
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    vector_to_parameters,
)

from backpack import backpack, extend
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import (
    GGNMP,
    HMP,
    KFRA,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
)
from backpack.extensions.backprop_extension import BackpropExtension

D = 4


def chain() -> Module:
    """Make a chain of layers, one with a bare parameter, one functional."""
    return nn.Sequential(
        nn.Linear(D, D),
        Lambda(lambda m, x: (x * m.p).tanh(), p=param(D)),
        nn.Linear(D, D),
        Lambda(lambda m, x: F.linear(x.sin(), m.w, m.b), w=param(D, D), b=param(D)),
        nn.Linear(D, 2),
    )


def recurrent(make: Callable[..., Module]) -> Module:
    """Make a recurrent layer of two layers, with a layer before and one after."""
    return nn.Sequential(
        nn.Linear(D, D),
        Lambda(
            lambda m, x: m.r(x.view(len(x), 2, 2).sin())[0].flatten(1),
            r=make(2, 2, num_layers=2, batch_first=True, bidirectional=True),
        ),
        nn.Linear(2 * D, 2),
    )


def given(row: Row) -> Tuple[Module, Module, Tensors, Dict[str, Tensor]]:
    """Build an extended model, and other parameters for it."""
    model, loss, X = row.build()
    others = {
        name: (p.detach() * 0.5 + 0.1).requires_grad_()
        for name, p in model.named_parameters()
    }
    return extend(model), extend(loss), X, others


def with_parameters(row: Row, others: Dict[str, Tensor]) -> Row:
    """Make the row's model have other parameters, for the reference."""

    def predict(m: Module, X: Tensors) -> Tensor:
        with torch.no_grad():
            for name, p in m.named_parameters():
                if not torch.equal(
                    p, others[name]
                ):  # once: autograd keeps an eye on it
                    p.copy_(others[name])
        return row.predict(m, X)

    return row._replace(predict=predict)


def assert_on(given: Dict[str, Tensor], row: Row) -> None:
    """Assert that tensors carry the fields that a row's parameters should have."""
    samples = reference(with_parameters(row, given))
    for name, tensor in given.items():
        assert_agrees(tensor.grad_batch, samples.gradients[name], name)
        assert_agrees(tensor.diag_ggn_exact, samples.diagonals[name].sum(0), name)
        assert_agrees(tensor.grad, samples.gradients[name].sum(0), name)


TIED_CHAIN = {
    "chain": chain,
    "expressions": lambda: Lambda(
        lambda m, x: (m.f(x * m.p[:D]) @ m.q.tanh()).sin() + m.q[1],
        p=param(2 * D),
        q=param(N, D),
        f=nn.Linear(D, N),
    ),
    **{
        name: partial(recurrent, make)
        for name, make in {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}.items()
    },
    "functional": lambda: Lambda(
        lambda m, x: F.linear((x @ m.w).tanh() + m.f(x), m.w),
        w=param(D, D),
        f=nn.Linear(D, D),
    ),
    "table": lambda: Lambda(
        lambda m, x: m.e((x[:, 0] > 0).long()) * m.p + m.f(x),
        e=nn.Embedding(2, D),
        p=param(D),
        f=nn.Linear(D, D),
    ),
}


@pytest.mark.parametrize("name", TIED_CHAIN)
def test_functional_call(name: str) -> None:
    """Results are on the tensors that were given, nothing is on the model's own."""
    row = Row(TIED_CHAIN[name], randn(D))
    model, loss, X, others = given(row)
    f = functional_call(model, others, X)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss(f, real(f)).backward()
    assert_on(others, row)
    for p in model.parameters():
        assert p.grad is None and not hasattr(p, "grad_batch")


@pytest.mark.parametrize("name", TIED_CHAIN)
def test_functional_call_with_computed_parameters(name: str) -> None:
    """Parameters that were computed from others, as by a step of first-order MAML."""
    row = Row(TIED_CHAIN[name], randn(D))
    model, loss, X, others = given(row)
    f = functional_call(model, others, X)
    steps = torch.autograd.grad(loss(f.cos(), real(f)), list(others.values()))
    after = {n: 0.5 * p - 0.1 * s for (n, p), s in zip(others.items(), steps)}
    f = functional_call(model, after, X)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss(f, real(f)).backward()
    samples = reference(with_parameters(row, {n: t.detach() for n, t in after.items()}))
    for n, p in others.items():
        assert_agrees(p.grad_batch, 0.5 * samples.gradients[n], n)
        assert_agrees(p.diag_ggn_exact, 0.25 * samples.diagonals[n].sum(0), n)
        assert_agrees(p.grad, 0.5 * samples.gradients[n].sum(0), n)


def test_maml() -> None:
    """A step that is differentiated through: right, or refused by name."""
    row = Row(chain, randn(D))
    model, loss, X, _ = given(row)
    params = dict(model.named_parameters())
    f = model(*X)
    inner = torch.autograd.grad(
        loss(f.cos(), real(f)), list(params.values()), create_graph=True
    )
    after = {n: p - 0.1 * s for (n, p), s in zip(params.items(), inner)}
    f = functional_call(model, after, (X[0].sin(),))
    value = loss(f, real(f))
    expected = []
    for n in range(N):  # the step is that of the whole batch
        part = F.mse_loss(f[n], real(f)[n]) / N
        expected.append(
            torch.autograd.grad(part, list(params.values()), retain_graph=True)
        )
    try:
        with backpack(BatchGrad()):
            value.backward()
    except RuntimeError as error:
        assert any(name in str(error) for name in params), error
        return
    for i, p in enumerate(params.values()):
        assert_agrees(p.grad_batch, torch.stack([row[i] for row in expected]))


@pytest.mark.parametrize("name", TIED_CHAIN)
def test_parameters_that_are_swapped(name: str) -> None:
    """A parameter that is replaced before the backward pass keeps its results."""
    row = Row(TIED_CHAIN[name], randn(D))
    model, loss, X, _ = given(row)
    value, used = row.run(model, loss, X), dict(model.named_parameters())
    for key in used:
        prefix, _, own = key.rpartition(".")
        module = model.get_submodule(prefix)
        setattr(module, own, nn.Parameter(torch.zeros_like(used[key])))
    with backpack(BatchGrad(), DiagGGNExact()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value.backward()
    samples = reference(row)
    for key, p in used.items():
        assert_agrees(p.grad_batch, samples.gradients[key], key)
        assert_agrees(p.diag_ggn_exact, samples.diagonals[key].sum(0), key)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", TIED_CHAIN)
def test_parameters_that_are_frozen(name: str, check: bool) -> None:
    """A parameter that is frozen before the backward pass does not disturb it."""
    row = Row(TIED_CHAIN[name], randn(D))
    model, loss, X, _ = given(row)
    samples = reference(row)
    for frozen in dict(model.named_parameters()):
        value = row.run(model.requires_grad_(), loss, X)
        model.get_parameter(frozen).requires_grad_(False)
        model.zero_grad()
        with backpack(BatchGrad(), DiagGGNExact(), check=check):
            value.backward()
        for key, p in model.named_parameters():
            if key == frozen:
                assert p.grad is None
                continue
            assert_agrees(p.grad_batch, samples.gradients[key], key)
            assert_agrees(p.diag_ggn_exact, samples.diagonals[key].sum(0), key)
            assert_agrees(p.grad, samples.gradients[key].sum(0), key)


def swap(model: Module, others: Dict[str, Tensor]) -> None:
    """Put other parameters into a model."""
    for key, p in others.items():
        prefix, _, own = key.rpartition(".")
        setattr(model.get_submodule(prefix), own, nn.Parameter(p.detach()))


BY_MODULES: Dict[str, Callable[[], Module]] = {
    "dense": lambda: nn.Sequential(
        nn.Linear(D, 5), nn.Sigmoid(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)
    ),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 2, 2, padding=1),
        nn.PReLU(2),
        nn.Conv2d(2, 2, 2),
        nn.Flatten(),
        nn.Linear(8, 2),
    ),
}


@pytest.mark.parametrize("make", [DiagHessian, BatchDiagHessian, KFRA, HMP, GGNMP])
@pytest.mark.parametrize("when", ["functional", "before", "after"])
@pytest.mark.parametrize("name", BY_MODULES)
def test_module_rules(name: str, when: str, make: type) -> None:
    """Rules that go from module to module read the parameters that were used."""
    row = Row(BY_MODULES[name], randn(D), nn.CrossEntropyLoss, against_classes)
    results = []
    for how in ("own", when):
        model, loss, X, others = given(row)
        present = {key: p.detach().clone() for key, p in model.named_parameters()}
        if how == "functional":
            value, used = (
                row.run(partial(functional_call, model, others), loss, X),
                others,
            )
        else:
            swap(model, others)
            value, used = row.run(model, loss, X), dict(model.named_parameters())
        if how == "before":
            swap(model, present)
        extension = make()
        with backpack(extension), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the present ones have no result
            value.backward()
        if how == "after":
            swap(model, present)
        fields = [getattr(p, extension.savefield) for p in used.values()]
        if make in (HMP, GGNMP):
            pairs = zip(fields, used.values())
            fields = [
                multiply(torch.ones(1, *p.shape, dtype=F64)) for multiply, p in pairs
            ]
        results.append(fields)
    for actual, expected, key in zip(*reversed(results), used):
        assert_agrees(actual, expected, key)


MODIFIED: Dict[str, Tuple[Callable, Callable]] = {  # what autograd needs no more
    "first-weight": (chain, lambda m: m[0].weight),
    "bias": (chain, lambda m: m[3].b),
    "last-bias": (chain, lambda m: m[4].bias),
    "table": (TIED_CHAIN["table"], lambda m: m.e.weight),
    "first-product": (
        lambda: Lambda(lambda m, x: m.f((x @ m.w).sin()), w=param(D, D), f=chain()[0]),
        lambda m: m.w,
    ),
    "shift": (
        lambda: Lambda(lambda m, x: m.f(x + m.b), b=param(D), f=nn.Linear(D, 2)),
        lambda m: m.b,
    ),
    "first-slopes": (
        lambda: nn.Sequential(nn.Linear(D, 3), Lambda(shifted, b=param(3), c=param(1))),
        lambda m: m[1].c,
    ),
}


@pytest.mark.parametrize("which", ["weight_ih_l0", "bias_hh_l1"])
def test_recurrent_layer_that_is_modified(which: str) -> None:
    """What its rule reads, and autograd does not, must be as it was."""
    layer = extend(nn.GRU(D, 2, num_layers=2))
    out, _ = layer(torch.randn(3, N, D))
    with torch.no_grad():
        getattr(layer, which).add_(1.0)
    with pytest.raises(RuntimeError, match="modified"), backpack(BatchGrad()):
        out.sum().backward()


ASSIGNED: Dict[str, Callable[[], Module]] = {  # where autograd keeps the numbers
    "dense": BY_MODULES["dense"],
    **{
        cls.__name__: lambda cls=cls: nn.Sequential(
            nn.Unflatten(1, (2, 2)),
            nn.Linear(2, 3),
            cls(3, 2, num_layers=2, batch_first=True),
            ReduceTuple(),
            nn.Flatten(),
            nn.Linear(4, 2),
        )
        for cls in (nn.RNN, nn.LSTM, nn.GRU)
    },
}


@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("name", ASSIGNED)
def test_other_numbers_by_data(name: str, walks: bool) -> None:
    """Numbers assigned by `.data` have no version: as they were used, or refused."""
    row = Row(ASSIGNED[name], randn(D), nn.CrossEntropyLoss, against_classes)
    exts = [DiagHessian] if walks else [BatchGrad, DiagGGNExact]
    results = []
    for assigns in (False, True):
        model, loss, X, _ = given(row)
        value, params = row.run(model, loss, X), list(model.parameters())
        if assigns:
            vector = parameters_to_vector(params).detach()
            vector_to_parameters(2 * vector, params)
        refuses = walks and assigns
        refused = pytest.raises(RuntimeError, match="DiagHessian.*got other numbers")
        with refused if refuses else nullcontext():
            with backpack(*[ext() for ext in exts]):
                value.backward()
        results.append([(p.grad_batch, p.diag_ggn_exact) for p in params if not walks])
    for actual, expected in zip(*results):
        for a, b in zip(actual, expected):
            assert_agrees(a, b, name)


@pytest.mark.parametrize("make", [DiagHessian, KFRA, BatchGrad, DiagGGNExact])
def test_statistics_that_are_replaced(make: type) -> None:
    """Running statistics that a module gets after its call are not those it used."""
    row = Row(
        lambda: nn.Sequential(
            nn.Linear(D, 3), nn.BatchNorm1d(3).eval(), nn.Tanh(), nn.Linear(3, 2)
        ),
        randn(D),
        nn.CrossEntropyLoss,
        against_classes,
    )
    results = []
    for replaces in (False, True):
        model, loss, X, _ = given(row)
        value, norm = row.run(model, loss, X), model[1]
        if replaces:
            norm.running_mean = norm.running_mean + 1
            norm.running_var = norm.running_var * 3
        extension = make()
        with backpack(extension):
            value.backward()
        results.append([getattr(p, extension.savefield) for p in model.parameters()])
    for actual, expected in zip(*reversed(results)):
        assert_agrees(actual, expected, make.__name__)


def shifted(m: Module, x: Tensor) -> Tensor:
    """Add two parameters of different shapes."""
    return x.sin() + m.b + m.c


@pytest.mark.parametrize("which", MODIFIED)
def test_parameters_that_are_modified(which: str) -> None:
    """A parameter that changes before the backward pass counts as it was used."""
    make, changed = MODIFIED[which]
    row = Row(make, randn(D))
    model, loss, X, _ = given(row)
    value = row.run(model, loss, X)
    with torch.no_grad():
        changed(model).add_(1.0)
    with backpack(BatchGrad(), BatchL2Grad(), DiagGGNExact()):
        value.backward()
    assert_fields(model, ["BatchGrad", "BatchL2Grad", "DiagGGNExact"], reference(row))


CACHED = {
    "weight-norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(D, D)), nn.Tanh(), nn.Linear(D, 2)
    ),
    "called-twice": lambda: Lambda(
        lambda m, x: m.f(m.f(x).tanh()), f=parametrizations.weight_norm(nn.Linear(D, D))
    ),
    "two-models-of-one-parametrization": lambda: Lambda(
        lambda m, x: m.f(x) * F.linear(x, m.f.weight),
        f=parametrizations.spectral_norm(nn.Linear(D, D)),
    ),
    "table": lambda: Lambda(
        lambda m, x: m.e((x[:, 0] > 0).long()) + x,
        e=parametrizations.weight_norm(nn.Embedding(2, D)),
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_cached_parametrizations(name: str) -> None:
    """A weight that is computed once for several calls."""
    assert_right(Row(CACHED[name], randn(D), around=parametrize.cached))


def test_cached_parametrizations_of_several_passes() -> None:
    """The same for several forward passes before the backward pass."""

    def twice(m: Module, X: Tensors) -> Tensor:
        return torch.cat([m(*X), m(X[0].cos())], 1)

    assert_right(
        Row(CACHED["weight-norm"], randn(D), around=parametrize.cached, predict=twice)
    )


NORMALIZATIONS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(D),
    "not-affine": lambda: nn.BatchNorm1d(D, affine=False),
    "by-hand": lambda: Lambda(
        lambda m, x: moving(m, x),
        mean=nn.Buffer(torch.zeros(D)),
        scale=param(D),
    ),
}


def moving(m: Module, x: Tensor) -> Tensor:
    """Subtract an average, that moves in training mode; not in place."""
    if m.training:
        m.mean = 0.5 * m.mean + 0.5 * x.detach().mean(0)
    return (x - m.mean) * m.scale


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_statistics_that_move(name: str) -> None:
    """Statistics that move between forward and backward pass count as used."""
    row = Row(
        lambda: nn.Sequential(
            nn.Linear(D, D), NORMALIZATIONS[name](), nn.Tanh(), nn.Linear(D, 2)
        ),
        randn(D),
    )
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    value = row.run(model, loss, X)
    # new tensors, as autograd has an eye on the old ones
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean = module.running_mean.clone()
            module.running_var = module.running_var.clone()
    model.train()
    model(X[0] * 3 + 1)
    model.eval()
    with backpack(BatchGrad(), BatchL2Grad(), DiagGGNExact()):
        value.backward()
    assert_fields(model, ["BatchGrad", "BatchL2Grad", "DiagGGNExact"], reference(row))


FIRST_LAYERS = {
    "layer": lambda: nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, 2)),
    "function": lambda: Lambda(
        lambda m, x: m.f(
            F.batch_norm(
                *(x, m.n.running_mean, m.n.running_var, m.n.weight, m.n.bias),
                training=m.n.training,
            )
        ),
        n=nn.BatchNorm1d(D),
        f=nn.Linear(D, 2),
    ),
}


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_statistics_that_move_in_place(name: str) -> None:
    """The same in place, where autograd does not look at them: in the first layer."""
    row = Row(FIRST_LAYERS[name], randn(D))
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    value = row.run(model, loss, X)
    model.train()
    model(X[0] * 3 + 1)
    model.eval()
    with backpack(BatchGrad(), BatchL2Grad()):
        value.backward()
    assert_fields(model, ["BatchGrad", "BatchL2Grad"], reference(row))


# A layer, the shape of a sample that goes in, and other options for the same parameters
Options = Tuple[Callable[[], Module], Tuple[int, ...], Dict[str, object]]
OPTIONS: Dict[str, Options] = {
    "stride": (lambda: nn.Conv1d(2, 2, 3), (2, 12), {"stride": (2,)}),
    "dilation": (
        lambda: nn.Conv2d(2, 2, 2, padding=1),
        (2, 4, 3),
        {"dilation": (2, 2), "padding": (1, 2)},
    ),
    "padding-mode": (
        lambda: nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect"),
        (2, 12),
        {"padding_mode": "circular"},
    ),
    "transposed": (
        lambda: nn.ConvTranspose1d(2, 2, 2),
        (2, 12),
        {"padding": (1,), "dilation": (2,)},
    ),
    "no-bias": (lambda: nn.Linear(6, 3), (4, 6), {"bias": None}),
    "groups": (lambda: nn.GroupNorm(2, 12), (12, 2), {"num_groups": 3}),
    "eps": (lambda: nn.LayerNorm(6), (4, 6), {"eps": 1.0}),
    "eps-in-batch-norm": (lambda: nn.BatchNorm1d(6), (6, 4), {"eps": 1.0}),
    "index": (
        lambda: Lambda(
            lambda m, x: m.f((x > 0).long()), f=nn.Embedding(2, 3, padding_idx=1)
        ),
        (4, 6),
        {"padding_idx": None},
    ),
    "slope": (lambda: nn.LeakyReLU(0.1), (24,), {"negative_slope": 0.7}),
    "kernel": (lambda: nn.AvgPool1d(2), (2, 12), {"kernel_size": (3,)}),
}


def put(layer: Module, options: Dict[str, object]) -> None:
    """Change a layer's options."""
    for name, value in options.items():
        setattr(getattr(layer, "f", layer), name, value)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_each_call(name: str) -> None:
    """A layer is called twice, each time with other options."""
    make, shape, options = OPTIONS[name]

    def forward(m: Module, x: Tensor) -> Tensor:
        layer, outputs = getattr(m.layer, "f", m.layer), []
        present = {key: getattr(layer, key) for key in options}
        for some in (present, options, present):
            put(m.layer, some)
            outputs.append(m.layer(m.first(x).unflatten(1, shape)).flatten(1).sin())
        return m.last(torch.cat([*outputs, m.first(x)], 1).cumsum(1)[:, -2:])

    first, last = partial(nn.Linear, D, 24), partial(nn.Linear, 2, 2)
    parts = {"first": first, "layer": make, "last": last}
    row = Row(lambda: Lambda(forward, **{k: f() for k, f in parts.items()}), randn(D))
    assert_right(row)


def results(
    parameters: Iterable[Tuple[str, Tensor]], extension: BackpropExtension
) -> Dict[str, Tensor]:
    """Collect what an extension has saved; products with ones."""
    found = {}
    for key, p in parameters:
        value = getattr(p, extension.savefield)
        ones = torch.ones(1, *p.shape, dtype=p.dtype)
        found[key] = value(ones) if callable(value) else value
    return found


ANY_RULES = [BatchGrad, DiagGGNExact, DiagHessian, HMP, GGNMP]


@pytest.mark.parametrize("make", ANY_RULES)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "index"])
def test_options_that_change(name: str, make: type) -> None:
    """A layer's options are others when the backward pass begins."""
    layer, shape, options = OPTIONS[name]
    found = []
    for changes in ({}, options):
        torch.manual_seed(0)
        parts = nn.Linear(D, 24), nn.Unflatten(1, shape), layer(), nn.Flatten()
        model = extend(nn.Sequential(*parts, nn.Sigmoid()).to(F64).eval())
        output = model(randn(D)()[0])
        value = extend(nn.MSELoss())(output, torch.zeros_like(output))
        given = list(dict(model.named_parameters()).items())
        put(model[2], changes)
        extension = make()
        with backpack(extension):
            value.backward()
        found.append(results(given, extension))
    for key, expected in found[0].items():
        assert_agrees(found[1][key], expected, key)


LOSSES: Dict[str, Tuple[Callable[[], Module], Dict[str, object]]] = {
    "reduction": (nn.MSELoss, {"reduction": "sum"}),
    "reduction-of-classes": (nn.CrossEntropyLoss, {"reduction": "sum"}),
    "ignored": (nn.CrossEntropyLoss, {"ignore_index": 0}),
    "smoothing": (nn.CrossEntropyLoss, {"label_smoothing": 0.4}),
    "weight": (nn.CrossEntropyLoss, {"weight": torch.tensor([1.0, 2.0], dtype=F64)}),
    "positive": (
        nn.BCEWithLogitsLoss,
        {"pos_weight": torch.tensor([1.0, 2.0], dtype=F64)},
    ),
    "delta": (nn.HuberLoss, {"delta": 0.3}),
}


@pytest.mark.parametrize("make", ANY_RULES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_change(name: str, make: type) -> None:
    """A loss is called twice, and its options are others each time."""
    kind, options = LOSSES[name]
    found = []
    for several in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 2)).to(F64)
        model, first = extend(model), extend(kind())
        other, x = first if several else extend(kind()), randn(D)()[0]
        y = torch.arange(len(x)) % 2
        if kind is not nn.CrossEntropyLoss:
            y = torch.stack([y, 1 - y], 1).to(F64)
        output = model(x)
        value = first(output, y)
        put(other, options)
        value = value + other(output, y)
        extension = make()
        with backpack(extension):
            value.backward()
        found.append(results(model.named_parameters(), extension))
    for key, expected in found[0].items():
        assert_agrees(found[1][key], expected, key)
