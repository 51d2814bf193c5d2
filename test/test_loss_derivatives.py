"""Loss derivatives against autograd's dense Hessian, and sampled ones exactly.

Sampled columns are checked without statistics where targets are finite: the average
over *all* targets, weighted with their probabilities, must be the Hessian.
"""

import copy
from itertools import product
from math import sqrt
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import pytest
import torch
from cases import drawing
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.distributions import Distribution, Poisson
from torch.nn import Module

from backpack.core.derivatives import generic_loss
from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.generic_loss import GenericLossDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.nll_base import NLLLossDerivatives

CE, BCE, MSE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss
F64 = torch.float64


class SoftmaxLoss(Module):
    """A user's convex loss: log Σ exp(w ∘ f) − yᵀ f, with a buffer and a child."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]))
        self.summed = nn.Flatten(start_dim=0)

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        terms = (self.scale * prediction).logsumexp(1) - (target * prediction).sum(1)
        return self.summed(terms).sum()


class NegatedMSE(Module):
    """A concave loss."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return -((prediction - target) ** 2).sum()


class CoupledLoss(Module):
    """A loss of the batch mean, which couples all samples."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return ((prediction.mean(0) - target) ** 2).sum()


class OnceDifferentiableLoss(Module):
    """A loss whose gradient cannot be differentiated."""

    class _Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x**2).sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return self._Square.apply(prediction)


class Case(NamedTuple):
    """A row: how to make the loss, the shape of the prediction, other inputs."""

    name: str
    derivatives: type
    loss: Callable[..., Module]
    shape: Tuple[int, ...]
    others: Callable[[], Any]  # one further input, or a tuple of them


def classes(*shape: int, num: int = 3, ignored: Optional[int] = None) -> Tensor:
    """Draw class indices; every third is ignored if there is such an index."""
    target = torch.randint(num, shape)
    if ignored is not None:
        target.view(-1)[::3] = ignored
    return target


WEIGHT = torch.tensor([0.2, 1.3, 0.7], dtype=F64)
CE_CASES = [
    ("plain", {}, (4, 3), lambda: classes(4)),
    ("one-class", {}, (4, 1), lambda: classes(4, num=1)),
    ("unbatched", {}, (3,), lambda: torch.tensor(1)),
    ("unbatched-weight", {"weight": WEIGHT}, (3,), lambda: torch.tensor(1)),
    ("unbatched-soft", {}, (3,), lambda: torch.rand(3, dtype=F64)),
    ("2d", {}, (3, 3, 2), lambda: classes(3, 2)),
    (
        "3d-ignore-weight-smooth",
        {"weight": WEIGHT, "label_smoothing": 0.2, "ignore_index": -100},
        (3, 3, 2, 1),
        lambda: classes(3, 2, 1, ignored=-100),
    ),
    ("ignore", {"ignore_index": 1}, (4, 3), lambda: classes(4, ignored=1)),
    (
        "ignore-smooth",
        {"label_smoothing": 0.3},
        (4, 3),
        lambda: classes(4, ignored=-100),
    ),
    ("weight", {"weight": WEIGHT}, (4, 3), lambda: classes(4)),
    ("smooth", {"label_smoothing": 0.1}, (4, 3), lambda: classes(4)),
    (
        "weight-smooth",
        {"weight": WEIGHT, "label_smoothing": 0.1},
        (4, 3),
        lambda: classes(4),
    ),
    ("soft", {}, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    (
        "soft-weight-smooth",
        {"weight": WEIGHT, "label_smoothing": 0.1},
        (3, 3, 2),
        lambda: torch.rand(3, 3, 2, dtype=F64),
    ),
    ("one-number", {}, (1, 3), lambda: classes(1)),
    ("one-number-weight", {"weight": WEIGHT}, (1, 3, 1), lambda: classes(1, 1)),
]
BCE_CASES = [
    ("1d", {}, (4,), lambda: classes(4, num=2).to(F64)),
    ("2d-soft", {}, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    (
        "3d-weight",
        {"weight": WEIGHT},
        (3, 1, 3),
        lambda: torch.rand(3, 1, 3, dtype=F64),
    ),
    ("pos-weight", {"pos_weight": WEIGHT}, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    (
        "weight-pos-weight",
        {"weight": torch.rand(4, 1, dtype=F64), "pos_weight": WEIGHT},
        (4, 3),
        lambda: torch.rand(4, 3, dtype=F64),
    ),
    ("one-number", {}, (1,), lambda: torch.rand(1, dtype=F64)),
]
MSE_CASES = [
    ("1d", {}, (4,), lambda: torch.rand(4, dtype=F64)),
    ("2d", {}, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    ("4d", {}, (2, 2, 1, 3), lambda: torch.rand(2, 2, 1, 3, dtype=F64)),
    ("one-number", {}, (1, 1), lambda: torch.rand(1, 1, dtype=F64)),
]
GENERIC_CASES = [
    ("NLLLoss", nn.NLLLoss, (4, 3), lambda: classes(4)),
    ("L1Loss", nn.L1Loss, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    ("SmoothL1Loss", nn.SmoothL1Loss, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    ("HuberLoss", nn.HuberLoss, (5,), lambda: torch.rand(5, dtype=F64)),
    ("one-number", nn.HuberLoss, (1, 1), lambda: torch.rand(1, 1, dtype=F64)),
    ("PoissonNLLLoss", nn.PoissonNLLLoss, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    (
        "GaussianNLLLoss",
        nn.GaussianNLLLoss,
        (4, 2, 2),
        lambda: (torch.rand(4, 2, 2, dtype=F64), torch.rand(4, 2, 2, dtype=F64) + 0.1),
    ),
    ("KLDivLoss", nn.KLDivLoss, (4, 3), lambda: torch.rand(4, 3, dtype=F64)),
    ("CrossEntropyLoss", CE, (4, 3), lambda: classes(4, ignored=-100)),
    (
        "SoftMarginLoss",
        nn.SoftMarginLoss,
        (4, 3),
        lambda: 2.0 * classes(4, 3, num=2) - 1,
    ),
]

# Without a reduction, the output of these is a single number, too
NO_REDUCTION = {"one-number": ["none"], "one-number-weight": ["none"]}
NLL_CASES = [
    Case(
        f"{loss.__name__}-{name}-{reduction}",
        derivatives,
        lambda loss=loss, options=options, reduction=reduction: loss(
            **options, reduction=reduction
        ),
        shape,
        others,
    )
    for loss, derivatives, rows in (
        (CE, CrossEntropyLossDerivatives, CE_CASES),
        (BCE, BCELossWithLogitsDerivatives, BCE_CASES),
        (MSE, MSELossDerivatives, MSE_CASES),
    )
    for name, options, shape, others in rows
    for reduction in ("mean", "sum", *NO_REDUCTION.get(name, ()))
]
ALL_CASES = NLL_CASES + [
    Case(f"generic-{name}-{reduction}", GenericLossDerivatives, make, shape, others)
    for name, loss, shape, others in GENERIC_CASES
    # with "mean", KLDivLoss warns that it means something else
    for reduction in (
        "batchmean" if name == "KLDivLoss" else "mean",
        *("sum", *NO_REDUCTION.get(name, ())),
    )
    for make in [lambda loss=loss, reduction=reduction: loss(reduction=reduction)]
]
ALL_CASES.append(
    Case(
        "generic-SoftmaxLoss",
        GenericLossDerivatives,
        SoftmaxLoss,
        (4, 3),
        lambda: torch.rand(4, 3, dtype=F64),
    )
)
FINITE_CASES = [c for c in NLL_CASES if c.derivatives is not MSELossDerivatives]
BATCHED_CASES = [case for case in ALL_CASES if "unbatched" not in case.name]


def by_name(cases: List[Case]) -> Callable:
    """Parametrize a test over cases, with readable ids."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def call(loss: Module, *inputs: Any) -> Module:
    """Call the loss; leave inputs and output on it, as an extended module does."""
    for position, tensor in enumerate(inputs):
        setattr(loss, f"input{position}", tensor)
    loss.output = loss(*inputs)
    return loss


def set_up(case: Case) -> Tuple[Any, Module]:
    """Instantiate derivatives and a called loss in float64."""
    torch.manual_seed(0)
    others = case.others()
    others = others if isinstance(others, tuple) else (others,)
    prediction = 2 * torch.randn(case.shape, dtype=F64)
    if "KLDiv" in case.name:
        prediction = prediction.log_softmax(1)
    return case.derivatives(), call(case.loss().double(), prediction, *others)


def inputs_of(loss: Module) -> List[Any]:
    """Return all inputs of the call."""
    return [vars(loss)[f"input{i}"] for i in range(3) if f"input{i}" in vars(loss)]


def num_samples(loss: Module) -> int:
    """Return the size of the batch axis, one for a CrossEntropyLoss without it."""
    unbatched = isinstance(loss, CE) and loss.input0.dim() == 1
    return 1 if unbatched else len(loss.input0)


def dense_hessian(loss: Module) -> Tensor:
    """Compute the Hessian of the loss by autograd, shape ``[N, D, N, D]``."""
    prediction, *others = inputs_of(loss)
    dense = hessian(lambda f: loss(f, *others), prediction.detach())
    n = num_samples(loss)
    return dense.reshape(n, -1, n, prediction.numel() // n)


def hessian_blocks(loss: Module) -> Tensor:
    """Return each sample's block ``[N, D, D]``; the others must be zero."""
    dense = dense_hessian(loss)
    n = len(dense)
    blocks = dense[torch.arange(n), :, torch.arange(n)]
    rebuilt = torch.zeros_like(dense)
    rebuilt[torch.arange(n), :, torch.arange(n)] = blocks
    assert torch.equal(rebuilt, dense)
    return blocks


def reference_product(loss: Module, mat: Tensor) -> Tensor:
    """Multiply columns ``[V, N, *]`` with the dense Hessian."""
    rows = mat.reshape(len(mat), num_samples(loss), -1)
    return torch.einsum("nimj,vmj->vni", dense_hessian(loss), rows).reshape(mat.shape)


def outer(columns: Tensor, n: int, weights: Optional[Tensor] = None) -> Tensor:
    """Sum the outer products of columns ``[V, N, *]`` per sample, ``[N, D, D]``."""
    rows = columns.reshape(len(columns), n, -1)
    weights = torch.ones(rows.shape[:2], dtype=F64) if weights is None else weights
    return torch.einsum("vn,vni,vnj->nij", weights, rows, rows)


def assert_equal(actual: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    """Compare relative to the largest entry."""
    atol = rtol * max(expected.abs().max().item(), 1e-12)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def factor(derivatives: Any, method: str) -> Callable:
    """Look up how to compute a factor; all take the same arguments."""
    found = getattr(derivatives, method)
    if method == "sqrt_hessian_compact":
        return lambda loss, g_inp, g_out: found(loss)
    return found


@by_name(ALL_CASES)
@pytest.mark.parametrize("method", ["sqrt_hessian", "sqrt_hessian_compact"])
def test_factor(case: Case, method: str):
    """The outer products of the factor's columns are the Hessian."""
    derivatives, loss = set_up(case)
    columns = factor(derivatives, method)(loss, (), ())
    assert columns.shape[1:] == loss.input0.shape and columns.dtype == F64
    blocks = hessian_blocks(loss)
    assert_equal(outer(columns, num_samples(loss)), blocks)

    features = blocks.shape[1]
    if method == "sqrt_hessian":
        assert len(columns) == features
    elif not columns.is_cpu:
        return  # nobody has looked which of them are zero
    elif isinstance(loss, (CE, SoftmaxLoss)):
        num_classes = loss.input0.shape[min(1, loss.input0.dim() - 1)]
        assert len(columns) == max(num_classes - 1, 1) * features // num_classes
    elif isinstance(loss, (nn.NLLLoss, nn.L1Loss, nn.KLDivLoss)):
        assert len(columns) == 1 and not columns.any()


@by_name(ALL_CASES)
def test_hessian_mat_prod(case: Case):
    """Products with the Hessian, for several vectors and for one."""
    derivatives, loss = set_up(case)
    hessian_mat_prod = derivatives.make_hessian_mat_prod(loss, (), ())
    mat = torch.randn(5, *loss.input0.shape, dtype=F64)
    expected = reference_product(loss, mat)
    assert_equal(hessian_mat_prod(mat), expected)
    assert_equal(hessian_mat_prod(mat[0]), expected[0])


@by_name(ALL_CASES)
def test_sum_hessian(case: Case):
    """The sum of all samples' blocks; cross-entropy keeps the axes apart."""
    derivatives, loss = set_up(case)
    expected = hessian_blocks(loss).sum(0)
    if isinstance(loss, nn.CrossEntropyLoss) and loss.input0.dim() > 2:
        expected = expected.reshape(2 * loss.input0.shape[1:])
    assert_equal(derivatives.sum_hessian(loss, (), ()), expected)


def test_mean_normalization():
    """What a mean divides by is known without an instance, as in BackPACK 1.7."""
    x = torch.ones(3, 4, 2)
    assert CrossEntropyLossDerivatives._get_mean_normalization(x) == 6
    assert MSELossDerivatives._get_mean_normalization(x) == 24


def all_targets(loss: Module) -> Tuple[Tensor, Tensor]:
    """Enumerate the joint targets of a sample's terms, with their probabilities.

    Returns:
        Targets ``[E, *target]``, the same for each sample; probabilities ``[E, N]``.
    """
    f = loss.input0
    if isinstance(loss, CE):
        p = f.movedim(min(1, f.dim() - 1), -1).softmax(-1)
    else:
        p = torch.stack([(-f).sigmoid(), f.sigmoid()], -1)
    shape, n = p.shape[:-1], num_samples(loss)
    p = p.reshape(n, -1, p.shape[-1])
    targets, probabilities = [], []
    for joint in product(range(p.shape[2]), repeat=p.shape[1]):
        targets.append(torch.tensor(joint).expand(n, -1).reshape(shape))
        probabilities.append(p[:, range(p.shape[1]), joint].prod(1))
    return torch.stack(targets), torch.stack(probabilities)


@by_name(FINITE_CASES)
@pytest.mark.parametrize("use_autograd", [True, False])
def test_sampled_expectation(case: Case, use_autograd: bool, monkeypatch):
    """Averaged over all targets, the sampled columns give the Hessian."""
    derivatives, loss = set_up(case)
    derivatives.use_autograd = use_autograd
    targets, probabilities = all_targets(loss)
    if isinstance(loss, BCE):
        targets = targets.to(F64)
    monkeypatch.setattr(derivatives, "_sample_targets", lambda *_: targets)
    m = len(targets)
    columns = sqrt(m) * derivatives.sqrt_hessian_sampled(loss, (), (), mc_samples=m)
    assert_equal(outer(columns, num_samples(loss), probabilities), hessian_blocks(loss))


@by_name([c for c in NLL_CASES if "mean" in c.name and "one-class" not in c.name])
def test_scaled_gradient(case: Case):
    """The empirical Fisher's column is √c times the gradient before averaging."""
    derivatives, loss = set_up(case)
    summed = copy.deepcopy(loss)
    summed.reduction = "sum"
    prediction, *others = inputs_of(loss)
    x = prediction.detach().requires_grad_()
    (mean_gradient,) = torch.autograd.grad(loss.forward(x, *others), x)
    (sum_gradient,) = torch.autograd.grad(summed.forward(x, *others), x)
    c = (mean_gradient * sum_gradient).sum() / sum_gradient.square().sum()
    columns = derivatives.scaled_gradient(loss)
    assert_equal(columns, c.sqrt() * sum_gradient.unsqueeze(0))


PLAIN_CASES = [
    case
    for case in NLL_CASES
    if all(word not in case.name for word in ("weight", "smooth", "ignore", "soft"))
]


@by_name(PLAIN_CASES)
@pytest.mark.parametrize("use_autograd", [True, False])
def test_sampled_given_targets(case: Case, use_autograd: bool):
    """Given the drawn targets, the columns are gradients of the plain loss."""
    derivatives, loss = set_up(case)
    derivatives.use_autograd = use_autograd
    one_class = "one-class" in case.name
    seeded = drawing(1)
    columns = derivatives.sqrt_hessian_sampled(
        loss, (), (), mc_samples=4, generator=seeded
    )
    targets = derivatives._sample_targets(loss.input0, 4, seeded.manual_seed(1))
    assert (targets != targets[0]).any() or targets[0].numel() == 1 or one_class

    prediction = loss.input0.clone().requires_grad_()
    summed = type(loss)(reduction="sum")
    c = 1 / targets[0].numel() if loss.reduction == "mean" else 1
    expected = torch.stack(
        [torch.autograd.grad(summed(prediction, t), prediction)[0] for t in targets]
    )
    assert_equal(columns, sqrt(c / 4) * expected)


@by_name(NLL_CASES)
def test_sampled_global_seed(case: Case):
    """Autograd and closed form agree for a seed of the global generator."""
    derivatives, loss = set_up(case)
    columns = []
    for use_autograd in (True, False):
        derivatives.use_autograd = use_autograd
        torch.manual_seed(3)
        columns.append(derivatives.sqrt_hessian_sampled(loss, (), (), mc_samples=5))
    assert columns[0].shape == (5, *loss.input0.shape)
    assert_equal(*columns)


def test_sampled_mse_statistics():
    """Sampled columns of the MSE have the Hessian as second moment.

    With g ~ N(0, 2c) per entry, the M-sample average of gᵢ gⱼ has a standard deviation
    of at most √2 · 2c / √M. Six of them are exceeded in one of 10⁹ draws.
    """
    derivatives, loss = set_up(
        next(case for case in NLL_CASES if case.name == "MSELoss-2d-mean")
    )
    num, c = 20_000, 1 / loss.input0.numel()
    columns = derivatives.sqrt_hessian_sampled(loss, (), (), mc_samples=num)
    error = outer(columns, num_samples(loss)) - hessian_blocks(loss)
    assert error.abs().max() < 6 * sqrt(2) * 2 * c / sqrt(num)
    assert columns.mean(0).abs().max() < 6 * sqrt(2 * c) / num


@by_name([case for case in ALL_CASES if case.derivatives is GenericLossDerivatives])
def test_sampled_generic(case: Case):
    """Other losses combine the exact columns with random signs."""
    derivatives, loss = set_up(case)
    seeded = drawing(1)
    sampled = derivatives.sqrt_hessian_sampled(
        loss, (), (), mc_samples=6, generator=seeded
    )
    columns = derivatives.sqrt_hessian(loss, (), ())
    seeded.manual_seed(1)
    signs = torch.randint(
        2, (6, *columns.shape[:2]), generator=seeded, dtype=columns.dtype
    )
    signs = 2 * signs - 1
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    expected = sum(
        signs[:, v].reshape(6, -1, *[1] * (columns.dim() - 2)) * columns[v]
        for v in range(len(columns))
    )
    assert_equal(sampled, expected / sqrt(6))


def fix_randomness(derivatives: Any, monkeypatch) -> None:
    """Make all draws a constant that does not depend on the batch size."""
    if isinstance(derivatives, GenericLossDerivatives):
        ones = lambda high, shape, **_: torch.ones(shape, dtype=F64)  # noqa: E731
        monkeypatch.setattr(generic_loss.torch, "randint", ones)
    else:
        is_ce = isinstance(derivatives, CrossEntropyLossDerivatives)
        derivatives.use_autograd = True
        monkeypatch.setattr(
            derivatives,
            "_sample_targets",
            lambda f, mc_samples, generator: (
                torch.zeros_like(f[:, 0], dtype=torch.int64)[None]
                if is_ce
                else torch.zeros_like(f)[None]
            ),
        )


@by_name(BATCHED_CASES)
@pytest.mark.parametrize("method", ["sqrt_hessian", "sqrt_hessian_sampled"])
def test_subsampling(case: Case, method: str, monkeypatch):
    """Selected samples keep the scale of the full batch."""
    derivatives, loss = set_up(case)
    fix_randomness(derivatives, monkeypatch)
    rows = [len(loss.input0) - 1, 0]
    full = factor(derivatives, method)(loss, (), ())
    selected = factor(derivatives, method)(loss, (), (), subsampling=rows)
    assert selected.shape[1:] == (2, *loss.input0.shape[1:])
    # other losses may need fewer columns for fewer samples
    assert_equal(
        outer(selected, len(rows)), outer(full, len(loss.input0))[rows], rtol=1e-10
    )


@by_name([case for case in ALL_CASES if "generic-CrossEntropyLoss" not in case.name])
@pytest.mark.parametrize("method", ["sqrt_hessian", "sqrt_hessian_compact"])
def test_factor_is_differentiable(case: Case, method: str):
    """With a graph, traces of the Hessian blocks have the right derivatives."""
    derivatives, loss = set_up(case)
    _, *others = inputs_of(loss)
    f = loss.input0.requires_grad_()
    n = num_samples(loss)
    weights = torch.rand(n, dtype=F64)

    def derivative(traces: Tensor) -> Tensor:
        if not traces.requires_grad:
            return torch.zeros_like(f)
        return torch.autograd.grad(weights @ traces, f, materialize_grads=True)[0]

    dense = hessian(lambda f: loss(f, *others), f, create_graph=True)
    traces = dense.reshape(f.numel(), -1).diagonal().reshape(n, -1).sum(1)
    columns = factor(derivatives, method)(loss, (), ())
    actual = (columns.reshape(len(columns), n, -1) ** 2).sum((0, 2))
    assert_equal(derivative(actual), derivative(traces), rtol=1e-8)


@by_name([case for case in ALL_CASES if "sum" in case.name])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_dtype(case: Case, dtype: torch.dtype):
    """Results have the prediction's type, and its precision."""
    derivatives, loss = set_up(case)
    inputs = [i.to(dtype) if i.is_floating_point() else i for i in inputs_of(loss)]
    low = [i.to(F64) if i.is_floating_point() else i for i in inputs]
    reference = call(case.loss().to(dtype).double(), *low)
    blocks = hessian_blocks(reference)

    loss = case.loss().to(dtype)
    for position, tensor in enumerate(inputs):
        setattr(loss, f"input{position}", tensor)
    loss.output = reference.output.to(dtype)
    mat = torch.randn(2, *loss.input0.shape).to(dtype)
    expected = reference_product(reference, mat.to(F64))
    product = derivatives.make_hessian_mat_prod(loss, (), ())(mat)
    sampled = derivatives.sqrt_hessian_sampled(loss, (), (), mc_samples=2)
    assert product.dtype == sampled.dtype == dtype
    assert sampled.isfinite().all()
    rtol = 20 * torch.finfo(dtype).eps
    assert_equal(product.to(F64), expected, rtol=rtol)
    for method in ("sqrt_hessian", "sqrt_hessian_compact"):
        columns = factor(derivatives, method)(loss, (), ())
        assert columns.dtype == dtype
        assert_equal(outer(columns.to(F64), num_samples(loss)), blocks, rtol=rtol)


@pytest.mark.parametrize(
    "logits",
    [
        [20.0, 0.0, 3.0],
        [0.0, 20.0, 20.5],
        [-40.0, 0.0, -30.0],
        [80.0, 0.0, -80.0],
        [0.0, 1000.0, -1000.0],
        [0.0, -float("inf"), 1.0],
        [-float("inf"), 0.5, -float("inf")],
    ],
    ids=str,
)
def test_saturated_cross_entropy(logits: List[float]):
    """In float32, no diagonal entry p (1 - p) of the compact factor loses digits."""
    loss = call(CE(), torch.tensor([logits]), torch.tensor([0]))
    f = torch.tensor(logits, dtype=F64)
    # 1 - p_v as a sum, which does not cancel
    p = f.softmax(0)
    others = torch.stack([p[torch.arange(3) != v].sum() for v in range(3)])
    derivatives = CrossEntropyLossDerivatives()
    compact = derivatives.sqrt_hessian_compact(loss)
    # squares of float32 columns underflow only here, in the comparison
    diagonal = (compact.double() ** 2).sum((0, 1))
    torch.testing.assert_close(diagonal, p * others, rtol=1e-4, atol=1e-37)
    full = derivatives.sqrt_hessian(loss, (), ())
    torch.testing.assert_close(
        outer(full.double(), 1), outer(compact.double(), 1), rtol=1e-4, atol=1e-6
    )


class PoissonLoss(Module):
    """A loss from outside: counts with rates exp(f)."""

    def __init__(self, reduction: str):
        super().__init__()
        self.reduction = reduction

    def forward(self, f: Tensor, target: Tensor) -> Tensor:
        summed = (f.exp() - target * f).sum()
        return summed / f.numel() if self.reduction == "mean" else summed


class PoissonDerivatives(NLLLossDerivatives):
    """The least that a subclass from outside has to say."""

    def _verify_support(self, module: Module) -> None:
        assert isinstance(module, PoissonLoss)

    def _make_distribution(self, subsampled_input: Tensor) -> Distribution:
        return Poisson(subsampled_input.exp())

    def _get_mean_normalization(self, input: Tensor) -> int:
        return input.numel()

    def hessian_is_psd(self) -> bool:
        return True


class ManualPoissonDerivatives(PoissonDerivatives):
    """One that has a closed form, too."""

    def _compute_sampled_grads_manual(
        self, subsampled_input: Tensor, mc_samples: int
    ) -> Tensor:
        rates = subsampled_input.exp()
        return rates - Poisson(rates).sample((mc_samples,))


@pytest.mark.parametrize(
    "derivatives_cls", [PoissonDerivatives, ManualPoissonDerivatives]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_outside_subclass(derivatives_cls: type, reduction: str):
    """A likelihood from outside has sampled quantities."""
    f = torch.rand(4, 3, dtype=F64)
    loss = call(PoissonLoss(reduction), f, torch.ones(4, 3, dtype=F64))
    c = 1 / f.numel() if reduction == "mean" else 1
    derivatives = derivatives_cls()
    derivatives.use_autograd = derivatives_cls is PoissonDerivatives

    torch.manual_seed(1)
    columns = derivatives.sqrt_hessian_sampled(loss, (), (), 3, subsampling=[2, 1])
    torch.manual_seed(1)
    targets = Poisson(f[[2, 1]].exp()).sample((3,))
    assert_equal(columns, sqrt(c / 3) * (f[[2, 1]].exp() - targets))

    with pytest.raises(NotImplementedError, match="sampled quantities only"):
        derivatives.sqrt_hessian(loss, (), ())
    with pytest.raises(NotImplementedError, match="sampled quantities only"):
        derivatives.make_hessian_mat_prod(loss, (), ())
    with pytest.raises(NotImplementedError, match="accept no generator"):
        PoissonDerivatives().sqrt_hessian_sampled(loss, (), (), generator=drawing(0))


ERRORS = {
    "no-scalar": (
        CrossEntropyLossDerivatives(),
        CE(reduction="none"),
        lambda: classes(4),
        ValueError,
        "scalar",
    ),
    "negative-soft-target": (
        CrossEntropyLossDerivatives(),
        CE(),
        lambda: -torch.rand(4, 3, dtype=F64),
        ValueError,
        "not positive semi-definite",
    ),
    "negative-weight": (
        BCELossWithLogitsDerivatives(),
        BCE(weight=-torch.ones(3, dtype=F64)),
        lambda: torch.rand(4, 3, dtype=F64),
        ValueError,
        "not positive semi-definite",
    ),
    "concave": (
        GenericLossDerivatives(),
        NegatedMSE(),
        lambda: torch.rand(4, 3, dtype=F64),
        ValueError,
        "NegatedMSE.*not positive semi-definite",
    ),
    "coupled": (
        GenericLossDerivatives(),
        CoupledLoss(),
        lambda: torch.rand(3, dtype=F64),
        NotImplementedError,
        "CoupledLoss.*couples samples",
    ),
    "once-differentiable": (
        GenericLossDerivatives(),
        OnceDifferentiableLoss(),
        lambda: torch.rand(3, dtype=F64),
        NotImplementedError,
        "OnceDifferentiableLoss.*twice",
    ),
    "target-requires-grad": (
        MSELossDerivatives(),
        MSE(),
        lambda: torch.rand(4, 3, dtype=F64, requires_grad=True),
        NotImplementedError,
        "MSELoss: input 1 requires grad",
    ),
    "generic-target-requires-grad": (
        GenericLossDerivatives(),
        nn.HuberLoss(),
        lambda: torch.rand(4, 3, dtype=F64, requires_grad=True),
        NotImplementedError,
        "HuberLoss: input 1 requires grad",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(
    "method", ["sqrt_hessian", "sqrt_hessian_compact", "sqrt_hessian_sampled"]
)
@pytest.mark.usefixtures("cpu")
def test_errors(name: str, method: str):
    """What has no answer is refused with a word about the loss."""
    derivatives, loss, others, error, match = ERRORS[name]
    loss = call(loss, torch.randn(4, 3, dtype=F64), others())
    with pytest.raises(error, match=match):
        factor(derivatives, method)(loss, (), ())


def test_no_square_root_but_products():
    """Where the Hessian is negative semi-definite, it can still be multiplied with."""
    target = -torch.rand(4, 3, dtype=F64)
    loss = call(CE(), torch.randn(4, 3, dtype=F64), target)
    derivatives = CrossEntropyLossDerivatives()
    assert_equal(derivatives.sum_hessian(loss, (), ()), hessian_blocks(loss).sum(0))


def test_unbatched_cannot_be_subsampled():
    """There is no batch axis to select from."""
    loss = call(CE(), torch.rand(3), torch.tensor(1))
    with pytest.raises(ValueError, match="no batch axis"):
        CrossEntropyLossDerivatives().sqrt_hessian(loss, (), (), subsampling=[0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_mse_broadcast_target(reduction: str):
    """A target that broadcasts repeats elements of the prediction."""
    f, target = torch.rand(4, 1, dtype=F64), torch.rand(4, 3, dtype=F64)
    with pytest.warns(UserWarning, match="target size"):
        loss = call(MSE(reduction=reduction), f, target)
        blocks = hessian_blocks(loss)
    columns = MSELossDerivatives().sqrt_hessian(loss, (), ())
    assert_equal(outer(columns, 4), blocks)


def test_psd_predicate():
    """The three known losses are convex; others are checked at the prediction."""
    known = (
        CrossEntropyLossDerivatives,
        BCELossWithLogitsDerivatives,
        MSELossDerivatives,
    )
    assert all(derivatives().hessian_is_psd() for derivatives in known)
    assert not GenericLossDerivatives().hessian_is_psd()


def test_generic_leaves_no_trace():
    """The global generator, the module's state, and its children's hooks stay."""
    loss = SoftmaxLoss()
    call(loss, torch.rand(4, 3), torch.rand(4, 3))
    calls = []
    loss.summed.register_forward_hook(lambda *_: calls.append(1))
    before = dict(vars(loss)), torch.get_rng_state()
    GenericLossDerivatives().sqrt_hessian(loss, (), ())
    assert vars(loss) == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert loss.scale.dtype == torch.float32 and not calls


@by_name(ALL_CASES)
@pytest.mark.parametrize(
    "method", ["sqrt_hessian", "sqrt_hessian_compact", "sqrt_hessian_sampled"]
)
def test_without_graph(case: Case, method: str, monkeypatch):
    """Inside a backward pass, gradients are disabled and the result is detached."""
    derivatives, loss = set_up(case)
    if "unbatched" not in case.name:
        fix_randomness(derivatives, monkeypatch)
    torch.manual_seed(0)
    expected = factor(derivatives, method)(loss, (), ())
    loss.input0.requires_grad_()
    torch.manual_seed(0)
    with torch.no_grad():
        actual = factor(derivatives, method)(loss, (), ())
    assert not actual.requires_grad
    assert_equal(actual, expected)
