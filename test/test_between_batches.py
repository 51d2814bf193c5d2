"""Gradients of one batch against those of another, preconditioned and projected.

What a pass has saved serves another one: factored gradients, eigenvectors, projections.
The reference are dense gradients and dense curvature of the same parameter.
"""

import copy
import pickle
import re
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from cases import CONV, CONV_TRANSPOSE, EMBEDDING, F64, LINEAR, Case, drawing, randomize
from oracle import assert_agrees, parameters
from torch import Tensor, nn
from torch.nn import Module

from backpack import backpack, extend
from backpack.extensions import (
    EKFAC,
    KFLR,
    BatchDotGrad,
    BatchFactors,
    BatchGrad,
    BatchProjectGrad,
)
from backpack.utils.kroneckers import eigen_kfacs, kfacs_to_mat, pi_shifts

DAMPING = 0.1


def dense(factors: List[Tensor]) -> Tensor:
    """Form the block that factors, stacked for groups, stand for."""
    factors = [factor.diag() if factor.dim() == 1 else factor for factor in factors]
    if factors[0].dim() == 2:
        return kfacs_to_mat(factors)
    return torch.block_diag(*map(kfacs_to_mat, zip(*factors)))


def eye(factor: Tensor) -> Tensor:
    """Return the identity, in the form in which a factor is saved."""
    if factor.dim() == 1:
        return torch.ones_like(factor)
    return torch.eye(factor.shape[-1], dtype=factor.dtype).expand_as(factor)


def shifted(factors: List[Tensor]) -> Tensor:
    """Form the block of factors that are damped one by one."""
    shifts = pi_shifts(factors, DAMPING)
    return dense([f + shift * eye(f) for f, shift in zip(factors, shifts)])


def damped(ekfac: List[Tensor]) -> Tensor:
    """Form the block of eigenvectors and eigenvalues, damped."""
    basis = dense(ekfac[:-1])
    return basis @ (ekfac[-1].flatten() + DAMPING).diag() @ basis.T


# How gradients are preconditioned, and the block whose inverse they are multiplied with
CURVATURES: Dict[str, Tuple[Callable, Callable]] = {
    "none": (lambda p: None, lambda p: torch.eye(p.numel(), dtype=p.dtype)),
    "KFLR": (lambda p: p.kflr, lambda p: shifted(p.kflr)),
    "KFLR-exact": (
        lambda p: eigen_kfacs(p.kflr),
        lambda p: damped(eigen_kfacs(p.kflr)),
    ),
    "EKFAC": (lambda p: p.ekfac, lambda p: damped(p.ekfac)),
}


def places(p: Tensor, layer: Module) -> Tensor:
    """Return the places of a parameter's elements in the order of its factors."""
    numbers = torch.arange(p.numel()).reshape(p.shape)
    if not getattr(layer, "transposed", False) or p.dim() == 1:
        return numbers.flatten()
    return numbers.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten()


@pytest.mark.filterwarnings("ignore:.*stand for `weight.transpose:UserWarning")
@pytest.mark.parametrize(
    "case", [*LINEAR, *CONV, *CONV_TRANSPOSE, *EMBEDDING], ids=lambda case: case.id
)
def test_dots(case: Case) -> None:
    """Dot products with gradients that were saved are those of dense gradients."""
    model, loss, X, y = case.build()
    model, loss = extend(model), extend(loss)
    picked = [-1, 0, -1]
    saves = BatchFactors(subsampling=picked), BatchGrad()
    curvature = KFLR("expand"), EKFAC(fisher_type="exact")
    with backpack(*saves, *curvature):
        loss(model(*X), *y).backward()
    params = parameters(model)
    layers = {n: model.get_submodule(n.rpartition(".")[0]) for n in params}
    for key, (curvature, block) in CURVATURES.items():
        others = {p: p.grad_factors for p in params.values()}
        if key != "none":
            others = {
                p: g.precondition(curvature(p), DAMPING) for p, g in others.items()
            }
        with backpack(BatchDotGrad(other=others)):
            loss(model(*X), *y).backward()
        for name, p in params.items():
            order = places(p, layers[name])
            rows = p.grad_batch.reshape(len(p.grad_batch), -1)[:, order]
            right = torch.linalg.solve(block(p), rows[picked].T).T
            assert_agrees(p.batch_dot, rows @ right.T, f"{key}: {name}")
            formed = others[p].individual()
            assert formed.shape == others[p].shape == (3, *p.shape)
            assert len(others[p]) == 3
            assert_agrees(formed.reshape(3, -1)[:, order], right, f"{key}: {name}")
            some = pickle.loads(pickle.dumps(others[p])).select([2]).individual()
            assert_agrees(some, formed[[2]], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key", CURVATURES)
def test_types(key: str, dtype: torch.dtype) -> None:
    """Gradients, curvature and the other batch may be of any type."""
    model, loss, x, y = problem((2,))
    with backpack(BatchFactors(), BatchGrad(), KFLR("expand"), EKFAC()):
        loss(model(x), y).backward()
    params = dict(model.named_parameters())
    others = {n: p.grad_factors for n, p in params.items()}
    dense_others = {n: p.grad_batch.to(dtype) for n, p in params.items()}
    if key != "none":
        for n, p in params.items():
            small = [factor.to(dtype) for factor in CURVATURES[key][0](p)]
            others[n] = others[n].precondition(small, DAMPING)
    for kind in (F64, dtype):
        model.to(kind)
        for given in (others, dense_others):
            other = {params[n]: g for n, g in given.items()}
            with backpack(BatchDotGrad(other=other), BatchGrad()):
                loss(model(x.to(kind)), y).backward()
            for n, p in params.items():
                assert p.batch_dot.dtype == kind
                g = given[n]
                right = (g if given is dense_others else g.individual()).double()
                rows = p.grad_batch.double().flatten(1) @ right.flatten(1).T
                bound = float(rows.abs().max() + right.norm() * p.grad_batch.norm())
                near = bound * (1e-9 if kind == F64 else 8 * torch.finfo(kind).eps)
                assert (p.batch_dot.double() - rows).abs().max() <= near


def test_moved() -> None:
    """Factors are converted, indices of embeddings are not."""
    layer, loss = extend(nn.Embedding(5, 2).to(F64)), extend(nn.MSELoss())
    index = torch.tensor([[0, 1], [4, 4]])
    with backpack(BatchFactors(), KFLR("expand")):
        loss(layer(index), torch.ones(2, 2, 2, dtype=F64)).backward()
    saved = layer.weight.grad_factors
    for gradients in (saved, saved.precondition(eigen_kfacs(layer.weight.kflr), 0.1)):
        moved = gradients.to(torch.float32)
        assert moved.dtype == torch.float32 and moved.to("meta").dtype == moved.dtype
        assert gradients.dtype == F64
        error = moved.individual() - gradients.individual()
        assert 0 < error.abs().max() < 1e-6


def problem(
    positions: Tuple[int, ...] = (), classes: int = 3
) -> Tuple[Module, Module, Tensor, Tensor]:
    """Make a small network and data, with positions that share weights or not."""
    torch.manual_seed(0)
    head = nn.Flatten() if positions else nn.Identity()
    size = 3 * torch.Size(positions).numel()
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), head, nn.Linear(size, classes))
    x = torch.randn(4, *positions, 4, dtype=F64)
    return (
        extend(randomize(model.to(F64))),
        extend(nn.CrossEntropyLoss()),
        x,
        torch.arange(4) % classes,
    )


@pytest.mark.parametrize("classes", [3, 12])
def test_basis_of_another_pass(classes: int) -> None:
    """Eigenvalues of parts of the data, in one basis, add up to those of all."""
    model, loss, x, y = problem((2,), classes)
    with backpack(EKFAC(fisher_type="exact")):
        loss(model(x), y).backward()
    params = list(model.parameters())
    whole = [p.ekfac for p in params]
    basis = {p: p.ekfac[:-1] for p in params}
    totals: List[Any] = [0.0] * len(params)
    for some in (slice(0, 1), slice(1, 4)):
        with backpack(EKFAC(fisher_type="exact", basis=basis)):
            (loss(model(x[some]), y[some])).backward()
        share = len(y[some]) / len(y)
        totals = [total + share * p.ekfac[-1] for total, p in zip(totals, params)]
    for p, expected, total in zip(params, whole, totals):
        assert_agrees(p.ekfac[:-1], expected[:-1])
        assert_agrees(total, expected[-1])
    # with eigenvalues, and two losses that share it
    two = [extend(nn.CrossEntropyLoss(reduction="sum")) for _ in range(2)]
    with backpack(EKFAC(fisher_type="exact", basis={p: p.ekfac for p in params})):
        f = model(x)
        (two[0](f, y) + two[1](f, y)).backward()
    for p, expected in zip(params, whole):
        assert_agrees(p.ekfac[-1], 2 * 4 * expected[-1])


def test_empirical() -> None:
    """Of the empirical Fisher, eigenvalues are those of individual gradients."""
    model, loss, x, y = problem((2,))
    with backpack(EKFAC(fisher_type="empirical"), BatchGrad()):
        loss(model(x), y).backward()
    for p in model.parameters():
        basis = dense(p.ekfac[:-1])
        rotated = p.grad_batch.flatten(1) @ basis
        assert_agrees(p.ekfac[-1].flatten(), len(x) * rotated.pow(2).sum(0))


def test_random_projections() -> None:
    """Two batches share the projections that were drawn; a generator repeats them."""
    model, loss, x, y = problem()
    generator = drawing(1)
    project = BatchProjectGrad(5, generator=generator)
    again = BatchProjectGrad(5, generator=drawing(1))
    for batch in (x, x.flip(1)):
        with backpack(project, BatchGrad()):
            loss(model(batch), y).backward()
        for p in model.parameters():
            left, *right = project.matrices(p)
            g = p.grad_batch
            expected = left @ g.mT if not right else left @ g @ right[0].T
            expected = expected.T if not right else expected
            assert_agrees(p.grad_projected, expected)
            assert left.shape[0] == 5
    with backpack(again):
        loss(model(x), y).backward()
    for p in model.parameters():
        assert_agrees(again.matrices(p), project.matrices(p))
    entries = torch.cat(
        [m.flatten() for p in model.parameters() for m in again.matrices(p)]
    )
    assert abs(float(entries.var()) * 5 - 1) < 0.5


COPIES: Dict[str, Callable[[Tuple[Module, Any]], Tuple[Module, Any]]] = {
    "pickle": lambda both: pickle.loads(pickle.dumps(both)),
    "copy": lambda both: (both[0], copy.copy(both[1])),
    "deepcopy": lambda both: (both[0], copy.deepcopy(both[1])),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_have_the_same_projections(name: str) -> None:
    """Those that were drawn go with their parameters, also to another process."""
    model, loss, x, y = problem()
    project = BatchProjectGrad(2)
    for _ in range(2):
        with backpack(project):
            loss(model(x), y).backward()
        found = [p.grad_projected.clone() for p in model.parameters()]
        model, project = COPIES[name]((model, project))
        with backpack(project):
            loss(model(x), y).backward()
        for p, expected in zip(model.parameters(), found):
            assert_agrees(p.grad_projected, expected)


class Transposed(Module):
    """A weight with inputs first, as that of ``Conv1D`` in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_projection_of_a_transposed_weight() -> None:
    """Rows of the gradient are the parameter's first axis, whatever the layer is."""
    torch.manual_seed(0)
    model, loss = extend(Transposed()), extend(nn.MSELoss())
    x, y = torch.randn(5, 2, 4).double(), torch.randn(5, 2, 3).double()
    project = BatchProjectGrad(2)
    with backpack(project, BatchGrad()):
        loss(model(x), y).backward()
    left, right = project.matrices(model.weight)
    expected = left @ model.weight.grad_batch @ right.T
    assert_agrees(model.weight.grad_projected, expected)


def with_other(other: Any) -> Callable:
    """Make a pass with the gradients of another batch."""

    def run(model: Module, loss: Module, x: Tensor, y: Tensor) -> None:
        with backpack(BatchDotGrad(other=other)):
            loss(model(x), y).backward()

    return run


def precondition(curvature: Callable, damping: float, times: int = 1) -> Callable:
    """Make a pass that preconditions the first weight's gradients."""

    def run(model: Module, loss: Module, x: Tensor, y: Tensor) -> None:
        with backpack(BatchFactors(), KFLR("expand"), EKFAC()):
            loss(model(x), y).backward()
        gradients = model[0].weight.grad_factors
        for _ in range(times):
            gradients = gradients.precondition(curvature(model), damping)

    return run


def project_by(*args: Any) -> Callable:
    """Make a pass with projections."""

    def run(model: Module, loss: Module, x: Tensor, y: Tensor) -> None:
        with backpack(BatchProjectGrad(*args)):
            loss(model(x), y).backward()

    return run


def many() -> Tuple[Module, Module, Tensor, Tensor]:
    """Make a problem with so many positions that gradients are formed."""
    model, loss, x, y = problem((5,))
    return model, extend(nn.CrossEntropyLoss()), x, y


def two_losses(**options: Any) -> Callable:
    """Let two losses see the same parameters, through many columns."""

    def run(model: Module, loss: Module, x: Tensor, y: Tensor) -> None:
        model, _, x, y = problem(classes=12)
        f = model(x)
        with backpack(EKFAC(**options)):
            (loss(f, y) + extend(nn.CrossEntropyLoss())(f, y)).backward()

    return run


def with_basis(make: Callable) -> Callable:
    """Give eigenvectors that a function makes from a parameter."""

    def run(model: Module, loss: Module, x: Tensor, y: Tensor) -> None:
        with backpack(EKFAC(basis={p: make(p) for p in model.parameters()})):
            loss(model(x), y).backward()

    return run


REFUSED: Dict[str, Tuple[Callable, type, str]] = {
    "other-missing": (with_other({}), ValueError, "no gradients [Q, *p]"),
    "other-shape": (
        lambda model, *rest: with_other(
            {p: torch.zeros(2, 7) for p in model.parameters()}
        )(model, *rest),
        ValueError,
        "shape [2, 7]",
    ),
    "other-complex": (
        lambda model, *rest: with_other(
            {
                p: torch.zeros(2, *p.shape, dtype=torch.cfloat)
                for p in model.parameters()
            }
        )(model, *rest),
        ValueError,
        "torch.complex64 of shape",
    ),
    "other-no-mapping": (with_other(3), ValueError, "must be a mapping"),
    "singular": (
        precondition(lambda m: eigen_kfacs([0 * f for f in m[0].weight.kflr]), 0.0),
        ValueError,
        "Use a larger damping",
    ),
    "curvature-of-another": (
        precondition(lambda m: m[3].weight.ekfac, 0.1),
        ValueError,
        "saved on the same parameter",
    ),
    "curvature-of-the-transpose": (
        precondition(lambda m: m[0].weight.kflr[::-1], 0.1),
        ValueError,
        "factors of shapes [[4, 4], [3, 3]]",
    ),
    "curvature-of-the-transpose-at-hand": (
        lambda *_: precondition(lambda m: m[0].weight.kflr[::-1], 0.1)(*many()),
        ValueError,
        "factors of shapes [[4, 4], [3, 3]]",
    ),
    "curvature-not-finite": (
        precondition(lambda m: [torch.nan * f for f in m[0].weight.kflr], 0.1),
        RuntimeError,
        "NaN or infinite",
    ),
    "damping": (
        precondition(lambda m: m[0].weight.kflr, -0.1),
        ValueError,
        "damping that is not negative",
    ),
    "twice": (
        precondition(lambda m: m[0].weight.ekfac, 0.1, 2),
        ValueError,
        "Choose one curvature",
    ),
    "projection": (project_by(0), ValueError, "got 0"),
    "projection-missing": (project_by({}), ValueError, "no matrices"),
    "projection-shape": (
        lambda model, *rest: project_by(
            {p: torch.zeros(2, 7) for p in model.parameters()}
        )(model, *rest),
        ValueError,
        "[[2, 7]]",
    ),
    "projection-numbers": (
        lambda model, *rest: project_by({p: [1, 2] for p in model.parameters()})(
            model, *rest
        ),
        ValueError,
        "got [1, 2]",
    ),
    "projection-complex": (
        lambda model, *rest: project_by(
            {p: torch.zeros(2, len(p), dtype=torch.cfloat) for p in model.parameters()}
        )(model, *rest),
        ValueError,
        "of real numbers",
    ),
    "fisher-type": (
        lambda *_: EKFAC(fisher_type="other"),
        ValueError,
        "'mc', 'exact', 'empirical'",
    ),
    "two-losses": (
        two_losses(fisher_type="exact"),
        NotImplementedError,
        "EKFAC: two losses contribute",
    ),
    "two-losses-sampled": (
        two_losses(mc_samples=12),
        NotImplementedError,
        "of a pass with one of them, by EKFAC(basis=...), or give each loss a backward",
    ),
    "basis": (with_basis(lambda p: ()), ValueError, "Pass what EKFAC has saved"),
    "basis-numbers": (with_basis(lambda p: [1, 2]), ValueError, "got [1, 2]. Pass"),
    "basis-no-mapping": (
        lambda *_: EKFAC(basis=[3]),
        ValueError,
        "must be a mapping from parameters, got list. Pass for instance what EKFAC",
    ),
}


@pytest.mark.filterwarnings("ignore:Loss was modified")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What does not fit is refused, with what to do about it."""
    run, error, says = REFUSED[name]
    with pytest.raises(error, match=re.escape(says)):
        run(*problem())


def test_samples_met() -> None:
    """Where samples have met, no individual gradient is saved or projected."""
    for extension in (
        BatchFactors(),
        BatchProjectGrad(2),
        EKFAC(),
        BatchDotGrad(other={}),
    ):
        model, loss, x, y = problem()
        f = model(x)
        value = loss(f - f.mean(0), y)
        with pytest.raises(NotImplementedError, match=type(extension).__name__):
            with backpack(extension):
                value.backward()
