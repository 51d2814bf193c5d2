"""Quantities that need all parameters, and passes that accumulate no gradients.

Weighted sums of individual gradients are compared with the oracle on all layers and
models elsewhere. Here are their options, what becomes of ``.grad``, what is refused.
"""

import gc
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
from cases import F64, LAYER_CASES, Case, Problem, classes, inverse, loss_case
from oracle import (
    assert_agrees,
    by_dots,
    by_norms,
    clip,
    individual_gradients,
    oracle,
    parameters,
)
from processes import alone
from test_structures import STRUCTURES
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.core.per_sample.base import PerSample
from backpack.extensions import (
    BatchDiagGGNMC,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    ClippedGrad,
    DiagGGNExact,
    DiagGGNMC,
    WeightedGrad,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder import weighted_grad
from backpack.extensions.module_extension import ModuleExtension

MLP = loss_case("mlp", nn.CrossEntropyLoss, classes)
SUM = loss_case("sum", partial(nn.CrossEntropyLoss, reduction="sum"), classes)


def extended(case: Case) -> Problem:
    """Build a case, and extend model and loss."""
    model, loss, X, y = case.build()
    return Problem(extend(model), extend(loss), X, y)


# Options

ONES = torch.tensor([0.5, -2.0, 1.0], dtype=F64)


class Options(NamedTuple):
    """Options of an extension, and the weights that they stand for."""

    extension: Callable[[], WeightedGrad]
    weights: Callable[[Tensor], Tensor]
    scale: str = "summand"
    per: str = "all"
    of: str = "norms"


OPTIONS = {
    "given": Options(lambda: WeightedGrad(ONES), lambda g: ONES),
    "given-sample": Options(
        lambda: WeightedGrad(ONES, scale="sample"), lambda g: ONES, "sample"
    ),
    "norms-parameter": Options(
        lambda: WeightedGrad(inverse, per="parameter"), by_norms, per="parameter"
    ),
    "norms-sample": Options(
        lambda: WeightedGrad(inverse, scale="sample"), by_norms, "sample"
    ),
    "dots": Options(
        lambda: WeightedGrad(lambda dots: dots.sum(1), of="dots"), by_dots, of="dots"
    ),
    "dots-parameter-sample": Options(
        lambda: WeightedGrad(lambda d: d.sum(1), "dots", "parameter", "sample"),
        by_dots,
        "sample",
        "parameter",
        "dots",
    ),
    "clipped": Options(lambda: ClippedGrad(0.175), partial(clip, max_norm=0.175)),
    "clipped-infinite": Options(
        partial(ClippedGrad, float("inf")), partial(clip, max_norm=float("inf"))
    ),
    "clipped-parameter-sample": Options(
        lambda: ClippedGrad(0.3, "parameter", "sample"),
        partial(clip, max_norm=0.3),
        "sample",
        "parameter",
    ),
}


@pytest.mark.parametrize("case", [MLP, SUM], ids=lambda case: case.id)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, case: Case):
    """Weighted sums, weights, and what these depend on are what the options say."""
    row, (model, loss, X, y) = OPTIONS[name], extended(case)
    ext = row.extension()
    with backpack(ext):
        loss(model(*X), *y).backward()
    factor = len(X[0]) if row.scale == "sample" and loss.reduction == "mean" else 1
    gradients = individual_gradients(*case.build())
    rows = {n: factor * g.flatten(1) for n, g in gradients.items()}
    together = torch.cat(list(rows.values()), 1)
    for param, p in parameters(model).items():
        g = rows[param] if row.per == "parameter" else together
        weights, pick = row.weights(g), lambda x, p=p: (
            x[p] if isinstance(x, dict) else x
        )
        value = torch.tensordot(weights, rows[param], 1).reshape(p.shape)
        assert_agrees(getattr(p, ext.savefield), value, param)
        assert_agrees(pick(ext.weights), weights)
        if name.startswith("given"):
            assert ext.norms is None and ext.dots is None
        elif row.of == "dots":
            assert_agrees(pick(ext.dots), g @ g.T)
        else:
            assert_agrees(pick(ext.norms), g.norm(dim=1))
    if name == "clipped":  # some are, and some are not
        some = 0 < (ext.weights == 1).sum() < len(ext.weights)
        assert some or case is SUM or not ext.weights.is_cpu  # with other numbers


# What becomes of .grad

CALLED = [case for case in STRUCTURES if case.id not in ("functional", "transposed")]
ROWS = [MLP, SUM, *LAYER_CASES, *CALLED]


ASKED: Dict[str, Tuple[Callable[[], BackpropExtension], ...]] = {
    "several": (BatchGrad, BatchL2Grad, partial(WeightedGrad, inverse), DiagGGNExact),
    "one column": (DiagGGNMC, BatchDiagGGNMC),
}


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.id)
@pytest.mark.parametrize("asked", ASKED)
def test_without_gradient(asked: str, case: Case):
    """Without gradients, quantities are the same, and ``.grad`` is what it was."""
    make = ASKED[asked]
    values: List[List[Tensor]] = []
    for gradient in (True, False):
        model, loss, X, y = extended(case)
        torch.manual_seed(0)
        params = list(parameters(model).values())
        if not gradient:
            params[0].grad = old = torch.ones_like(params[0])
        exts = [some() for some in make]
        with backpack(*exts, gradient=gradient):
            loss(model(*X), *y).backward()
        values.append([getattr(p, e.savefield) for p in params for e in exts])
    assert params[0].grad is old and bool((old == 1).all())
    assert all(p.grad is None for p in params[1:])
    for with_gradient, without in zip(*values):
        assert_agrees(without, with_gradient, case.id)


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.id)
def test_replaced(case: Case):
    """The result is added to ``.grad``, in place of gradient and field."""
    model, loss, X, y = extended(case)
    ext, beside = WeightedGrad(inverse, replace_grad=True), WeightedGrad(inverse)
    params = parameters(model)
    for p in list(params.values())[::2]:
        p.grad = torch.ones_like(p)
    before = {n: 0.0 if p.grad is None else p.grad.clone() for n, p in params.items()}
    with backpack(beside, ext):
        loss(model(*X), *y).backward()
    for name, value in oracle("weighted_sum", *case.build()).items():
        assert_agrees(params[name].grad.to_dense(), value + before[name], name)
        assert_agrees(vars(params[name]).pop(beside.savefield), value, name)
    with backpack(ext):
        loss(model(*X), *y).backward()
    assert not any(hasattr(p, ext.savefield) for p in params.values())


class Counts(TorchDispatchMode):
    """Counts the products and convolutions that run."""

    def __init__(self):
        """Start with none."""
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and count it."""
        name = str(func)
        self.products += name in ("aten.mm.default", "aten.addmm.default")
        if "convolution_backward" in name:
            self.products += sum(args[-1][:2])
        return func(*args, **(kwargs or {}))


# the second layer's input, and both layers' weights
SETTINGS: Dict[str, Tuple[Callable[[], Tuple], Dict[str, Any], int]] = {
    "with": (lambda: (), {}, 3),
    "without": (lambda: (BatchL2Grad(),), {"gradient": False}, 1),
    "no extensions": (lambda: (), {"gradient": False}, 1),
    # the pass that runs anyway has one
    "one column": (lambda: (BatchDiagGGNMC(),), {"gradient": False}, 1),
    "two columns": (lambda: (BatchDiagGGNMC(mc_samples=2),), {"gradient": False}, 3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_of_weights_are_not_formed(name: str):
    """Autograd multiplies with weights, but forms none of their gradients."""
    make, options, expected = SETTINGS[name]
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(F64))
    value = extend(nn.MSELoss())(
        model(torch.rand(2, 3, dtype=F64)), torch.zeros(2, 2, dtype=F64)
    )
    with backpack(*make(), **options), Counts() as counts:
        value.backward()
    assert counts.products == expected


class Inner(nn.Module):
    """Two layers, and somebody who looks at what is between them."""

    def __init__(self, look: Callable[[Tensor], Any]):
        """Make the layers."""
        super().__init__()
        self.first, self.second, self.look = nn.Linear(3, 3), nn.Linear(3, 2), look

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        inside = self.first(x).tanh()
        self.look(inside)
        return self.second(inside)


def nowhere(x: Tensor) -> None:
    """Don't look."""


class Looks(NamedTuple):
    """Where a user looks at gradients, and how losses are made."""

    inside: bool = False
    output: bool = False
    loss: Callable[[Callable, Tensor, Tensor], Tensor] = lambda f, x, y: f(x, y)


LOOKS = {
    "inside": Looks(inside=True),
    "output": Looks(output=True),
    "halved": Looks(loss=lambda f, x, y: f(x, y) / 2),
    "twice": Looks(loss=lambda f, x, y: f(x, y) + f(2 * x, y)),
    "regularized": Looks(loss=lambda f, x, y: f(x, y) + x.square().sum()),
}


@pytest.mark.filterwarnings("ignore")  # of what is no part of second order
@pytest.mark.parametrize("how", ["register_hook", "retain_grad"])
@pytest.mark.parametrize("where", LOOKS)
def test_who_looks_sees_gradients(where: str, how: str):
    """They are those of the loss, also where nobody else wants gradients."""
    row, values, found = LOOKS[where], [], []
    for context in (None, {}, {"gradient": False}):
        log: List[Tensor] = []

        def look(x: Tensor, seen: List[Tensor] = log) -> None:
            if how == "register_hook":
                x.register_hook(lambda g: seen.append(g.clone()))
            else:
                x.retain_grad()
                seen.append(x)

        torch.manual_seed(0)
        model = extend(Inner(look if row.inside else nowhere).to(F64))
        loss, x = extend(nn.MSELoss()), torch.rand(4, 3, dtype=F64)
        output = model(x)
        if row.output:
            look(output)
        value = row.loss(loss, output, torch.zeros(4, 2, dtype=F64))
        ext = DiagGGNMC()
        with nullcontext() if context is None else backpack(ext, **context):
            value.backward()
        found.append([x.grad if how == "retain_grad" else x for x in log])
        if context is not None:
            values.append([getattr(p, ext.savefield) for p in model.parameters()])
    plain, *others = found
    for some in others:
        assert len(some) == len(plain) == (row.inside or row.output)
        for gradient, expected in zip(some, plain):
            assert_agrees(gradient, expected)
    for one, other in zip(*values):
        assert_agrees(one, other)


def test_other_leaves():
    """Inputs have gradients if those of weights are replaced, and none without."""
    for replace, options in ((True, {}), (False, {"gradient": False})):
        model, loss, (x,), y = extended(MLP)
        x.requires_grad_()
        with backpack(WeightedGrad(inverse, replace_grad=replace), **options):
            loss(model(x), *y).backward()
        plain, plain_loss, _, _ = MLP.build()
        (expected,) = torch.autograd.grad(plain_loss(plain(x), *y), x)
        if replace:
            assert_agrees(x.grad, expected)
        else:
            assert x.grad is None


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("per", ["all", "parameter"])
@pytest.mark.parametrize("dtype, size", [(F64, 1e200), (torch.float32, 1e25)])
def test_norms_whose_squares_are_out_of_range(
    dtype: torch.dtype, size: float, per: str
):
    """They are right, and what is clipped has the norm that it may have."""
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(dtype))
    ext, x = ClippedGrad(2.0, per), torch.rand(4, 3, dtype=dtype)
    x[1] *= size
    with backpack(ext, BatchGrad()):
        model(x)[1:2].sum().backward()
    params = list(model.parameters())
    rows = [p.grad_batch[1].flatten() for p in params]
    for param, row in zip(params, rows):
        counted = torch.cat(rows) if per == "all" else row
        largest = counted.abs().max()
        norm = (counted / largest).norm() * largest
        own = per == "parameter"
        found, weights = (x[param] if own else x for x in (ext.norms, ext.weights))
        assert_agrees(found[1], norm, rtol=1e-5)
        expected = row * (2.0 / norm).clamp(max=1.0)
        assert_agrees(param.grad_clipped.flatten(), expected, rtol=1e-5)
        assert_agrees(weights[[0, 2, 3]], torch.ones(3, dtype=dtype))


def test_hooks_run_with_the_result():
    """Hooks of parameters see what is accumulated, once, and may change it."""
    model, loss, X, y = extended(MLP)
    seen: List[Tensor] = []
    param = model[0].weight
    param.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with backpack(ClippedGrad(0.1, replace_grad=True)):
        loss(model(*X), *y).backward()
    weights = partial(clip, max_norm=0.1)
    expected = oracle("weighted_sum", *MLP.build(), weights=weights)["0.weight"]
    assert len(seen) == 2
    for value, factor in zip(seen, (1, 2)):
        assert_agrees(value, factor * expected)
    with backpack(BatchGrad(), gradient=False):
        loss(model(*X), *y).backward()
    assert len(seen) == 2


@pytest.mark.usefixtures("cpu")
def test_distributed_data_parallel():
    """It sees what is accumulated; passes without gradients are for ``no_sync``."""
    model, loss, (x,), y = extended(MLP)
    with alone():
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            model.zero_grad()
            with backpack(WeightedGrad(inverse, replace_grad=True)):
                loss(parallel(x), *y).backward()
        gradients = {n: p.grad.clone() for n, p in parameters(model).items()}
        with parallel.no_sync(), backpack(BatchGrad(), gradient=False):
            loss(parallel(x), *y).backward()
        loss(parallel(x), *y).backward()
    for name, value in oracle("weighted_sum", *MLP.build()).items():
        assert_agrees(gradients[name], value)
        total = model.get_parameter(name).grad_batch.sum(0)
        assert_agrees(model.get_parameter(name).grad, value + total)


# Faults


def fails(*_: Any) -> None:
    """Raise an exception."""
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["weights", "hook"])
@pytest.mark.parametrize("replace", [True, False])
def test_faults(where: str, replace: bool):
    """After an exception nothing is kept, nothing is saved, and the next pass works."""
    before = {id(x) for x in gc.get_objects() if issubclass(type(x), PerSample)}
    model, loss, X, y = extended(MLP)
    ext = WeightedGrad(fails if where == "weights" else inverse, replace_grad=replace)
    hook = fails if where == "hook" else None
    other = BatchL2Grad()
    with pytest.raises(ZeroDivisionError), backpack(ext, other, extension_hook=hook):
        loss(model(*X), *y).backward()
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), PerSample)]
    assert not [x for x in found if id(x) not in before]
    for p in model.parameters():
        assert not hasattr(p, ext.savefield) and (p.grad is None or not replace)
    assert ext.norms is None and ext.weights is None
    with backpack(WeightedGrad(inverse)):
        loss(model(*X), *y).backward()
    for name, value in oracle("weighted_sum", *MLP.build()).items():
        assert_agrees(model.get_parameter(name).grad_weighted, value)


@pytest.mark.parametrize("per", ["all", "parameter"])
def test_one_extension_in_two_threads(
    per: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that run at the same time have weights of their own."""
    ext, plain, calls = WeightedGrad(inverse, per=per), weighted_grad._sum, []

    def during_another_pass(*args: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 2:  # one pass of another thread in the midst of this one
            thread = Thread(target=step, args=(ext,), kwargs={"case": SUM})
            thread.start()
            thread.join()
        return plain(*args)

    model, loss, X, y = extended(MLP)
    for field in ("alone", "beside"):
        if field == "beside":
            monkeypatch.setattr(weighted_grad, "_sum", during_another_pass)
        ext.savefield = field
        with backpack(ext):
            loss(model(*X), *y).backward()
    assert len(calls) > len(list(model.parameters()))
    for p in model.parameters():
        assert_agrees(p.beside, p.alone)


# What is refused


def step(*exts: BackpropExtension, case: Case = MLP, **options: Any) -> None:
    """Run a backward pass."""
    model, loss, X, y = extended(case)
    with backpack(*exts, **options):
        loss(model(*X), *y).backward()


def run(
    ext: Optional[BackpropExtension],
    backward: Callable[[Tensor, Module], Any],
    loss: Callable[[Tensor], Tensor] = lambda f: f.square().sum(),
    model: Callable[[], Module] = lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh()),
    **options: Any,
) -> None:
    """Run a backward pass of a kind."""
    net = extend(model())
    value = loss(net(torch.rand(3, 2)))
    with backpack(*filter(None, [ext]), **options):
        backward(value, net)


def backward(value: Tensor, net: Module) -> None:
    """Run the usual backward pass."""
    value.backward()


def in_another_type() -> None:
    """Give an input another type between the passes."""
    net, x = extend(nn.Linear(2, 1)), torch.rand(3, 2, requires_grad=True)
    value = net(x).sum()
    x.data = x.data.to(F64)
    with backpack(REPLACED()):
        value.backward()


def two_sizes() -> None:
    """Let two models have batches of different sizes."""
    one, two = extend(nn.Linear(2, 1)), extend(nn.Linear(2, 1))
    with backpack(ClippedGrad(1.0)):
        (one(torch.rand(3, 2)).sum() + two(torch.rand(2, 2)).sum()).backward()


def modified() -> None:
    """Modify a gradient in place, after it was seen."""
    first, last = extend(nn.Linear(2, 2)), extend(nn.Linear(2, 2))
    hidden = first(torch.rand(3, 2))
    out, kept = last(hidden), []
    out.register_hook(kept.append)
    hidden.register_hook(lambda g: (kept[0].mul_(2), None)[1])
    with backpack(ClippedGrad(1.0)):
        out.square().sum().backward()


def two_outputs() -> None:
    """Use the outputs of two models."""
    one, two, x = extend(nn.Linear(2, 1)), extend(nn.Linear(2, 1)), torch.rand(3, 2)
    with backpack(BatchJacobian()):
        (one(x) * two(x)).sum().backward()


class Reentrant(Module):
    """A model with a checkpoint."""

    def __init__(self):
        """Create a layer."""
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)


class Centered(nn.Linear):
    """A layer whose output depends on all samples."""

    def forward(self, x: Tensor) -> Tensor:
        """Subtract the mean."""
        out = super().forward(x)
        return out - out.mean(0)


REPLACED = partial(ClippedGrad, 1.0, replace_grad=True)
REFUSED: Dict[str, Tuple[Callable[[], Any], type, str]] = {
    "of": (lambda: WeightedGrad(inverse, of="n"), ValueError, "of must be.*'n'"),
    "per": (lambda: ClippedGrad(1.0, per="x"), ValueError, "ClippedGrad: per must be"),
    "scale": (lambda: ClippedGrad(1.0, scale=2), ValueError, "scale must be.*2"),
    "weights": (lambda: WeightedGrad(3), ValueError, "weights must be.*3"),
    "one field": (
        lambda: backpack(ClippedGrad(1.0), BatchGrad(), ClippedGrad(2.0)),
        UserWarning,  # as an error
        r"ClippedGrad\(1.0\), ClippedGrad\(2.0\)\): .*'grad_clipped'.*savefield",
    ),
    "max_norm": (lambda: ClippedGrad(0), ValueError, "max_norm must be.*0"),
    "no norm": (lambda: ClippedGrad(True), ValueError, "max_norm must be.*True"),
    "replace_grad": (
        lambda: ClippedGrad(1.0, replace_grad="yes"),
        ValueError,
        r"ClippedGrad: replace_grad must be one of \(False, True\), got 'yes'",
    ),
    "given weights": (
        lambda: step(WeightedGrad(torch.ones(2))),
        ValueError,
        r"WeightedGrad: expected .* of 3 samples, got .*\[2\]",
    ),
    "complex weights": (
        lambda: step(WeightedGrad(lambda norms: torch.complex(norms, norms))),
        ValueError,
        r"real weight.*complex128",
    ),
    "sparse weights": (
        lambda: step(WeightedGrad(lambda norms: norms.to_sparse())),
        ValueError,
        r"dense tensor.*sparse",
    ),
    "weights of a function": (
        lambda: step(WeightedGrad(lambda norms: norms.sum())),
        ValueError,
        r"of 3 samples, got .*\[\]",
    ),
    "subsampling": (
        lambda: step(ClippedGrad(1.0, subsampling=[7])),
        IndexError,
        "selects sample 7",
    ),
    "sizes": (two_sizes, NotImplementedError, r"numbers of samples \(\[2, 3\]\)"),
    "modified": (modified, RuntimeError, "ClippedGrad: a tensor.*modified in place"),
    "unknown scale": (
        lambda: run(ClippedGrad(1.0, scale="sample"), backward),
        ValueError,
        r"ClippedGrad\(scale='sample'\).*\[\].*Extend the loss",
    ),
    "rule": (
        lambda: ClippedGrad(1.0).set_module_extension(nn.Tanh, ModuleExtension()),
        NotImplementedError,
        "ClippedGrad takes no rules for Tanh",
    ),
    "samples that meet": (
        lambda: run(ClippedGrad(1.0), backward, model=lambda: Centered(2, 2)),
        NotImplementedError,
        "ClippedGrad: samples have met in `mean`",
    ),
    "two that replace": (
        lambda: backpack(REPLACED(), REPLACED()),
        ValueError,
        "ClippedGrad and ClippedGrad: replace_grad=True",
    ),
    "replaces without gradient": (
        lambda: backpack(REPLACED(), gradient=False),
        ValueError,
        "gradient=True",
    ),
    "replaces and checks": (
        lambda: backpack(REPLACED(), check=True),
        ValueError,
        "check=True",
    ),
    "checks without gradient": (
        lambda: backpack(check=True, gradient=False),
        ValueError,
        "check=True, gradient=False",
    ),
    "replaced in a graph": (
        lambda: run(REPLACED(), lambda value, net: value.backward(create_graph=True)),
        NotImplementedError,
        r"ClippedGrad\(replace_grad=True\).*create_graph",
    ),
    "replaced for some": (
        lambda: run(
            REPLACED(), lambda value, net: value.backward(inputs=[net[0].weight])
        ),
        NotImplementedError,
        r"ClippedGrad\(replace_grad=True\).*inputs",
    ),
    "replaced without accumulation": (
        lambda: run(
            REPLACED(), lambda value, net: torch.autograd.grad(value, net[0].weight)
        ),
        NotImplementedError,
        "replace_grad=True.*accumulates no gradients",
    ),
    "without gradient for some": (
        lambda: run(
            BatchGrad(),
            lambda value, net: value.backward(inputs=[net[0].weight]),
            gradient=False,
        ),
        NotImplementedError,
        r"backpack\(gradient=False\).*inputs",
    ),
    "checkpoint": (
        lambda: run(None, backward, model=Reentrant, gradient=False),
        NotImplementedError,
        r"backpack\(gradient=False\).*use_reentrant",
    ),
    "replaced next to another type": (
        in_another_type,
        NotImplementedError,
        r"ClippedGrad\(replace_grad=True\).*gradient of .*\[3, 2\].*another type",
    ),
    "two outputs": (two_outputs, NotImplementedError, "expects one.*Linear.*Linear"),
    "output of samples that meet": (
        lambda: run(BatchJacobian(), backward, model=lambda: Centered(2, 2)),
        NotImplementedError,
        "BatchJacobian: samples have met in `mean`",
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    """What is not possible is an error that says so."""
    do, kind, says = REFUSED[name]
    with pytest.raises(kind, match=f"(?s){says}"):
        do()


def test_penalty_is_not_replaced():
    """A regularizer, which belongs to no sample, is refused; parameters are named."""
    net = extend(nn.Linear(2, 1))
    value = net(torch.rand(3, 2)).sum() + net.weight.square().sum()
    with pytest.warns(UserWarning, match="regularizer"):
        with pytest.raises(NotImplementedError, match="'weight' of Linear.*own"):
            with backpack(REPLACED()):
                value.backward()


def test_extension_hook_comes_before():
    """In modules' turns, values that need all parameters are not there yet."""
    model, loss, X, y = extended(MLP)
    seen: List[bool] = []

    def look(module: Module) -> None:
        seen.extend(hasattr(p, "grad_clipped") for p in module.parameters())

    with backpack(ClippedGrad(1.0), extension_hook=look):
        loss(model(*X), *y).backward()
    assert seen and not any(seen)


def test_autograd_grad_without_gradient():
    """``torch.autograd.grad`` accumulates nothing anyway, and returns what it does."""
    model, loss, X, y = extended(MLP)
    params = list(model.parameters())
    with backpack(BatchGrad(), gradient=False):
        gradients = torch.autograd.grad(loss(model(*X), *y), params)
    for p, gradient in zip(params, gradients):
        assert p.grad is None
        assert_agrees(p.grad_batch.sum(0), gradient)


def test_jacobian_of_axes():
    """Features are in the order in which a sample's features are in the output."""
    torch.manual_seed(0)
    layer, x = nn.Conv1d(2, 3, 2).to(F64), torch.rand(4, 2, 3, dtype=F64)
    extend(layer)
    with backpack(BatchJacobian(subsampling=[2, 0]), gradient=False):
        layer(x).sum().backward()
    for i, n in enumerate((2, 0)):
        for c, entry in enumerate(layer(x[n : n + 1]).flatten()):
            (expected,) = torch.autograd.grad(entry, layer.weight, retain_graph=True)
            assert_agrees(layer.weight.jacobian[c, i], expected)
