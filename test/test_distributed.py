"""Quantities of a batch that several processes share are those of one process.

The processes compute a row, its test compares. Each process reports its results, and
the errors that it got.
"""

import re
import warnings
from functools import lru_cache, partial
from typing import Any, Callable, Dict, List, NamedTuple, Tuple, Type

import pytest
import torch
from cases import inverse
from oracle import ByShape, assert_agrees, others, projections
from processes import in_processes, needs_gloo
from torch import Tensor, distributed, nn
from torch.nn import Module

from backpack import backpack, extend
from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.distributed import reduce
from backpack.extensions import (
    EKFAC,
    GGNMP,
    HBP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchDotGrad,
    BatchFactors,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    BatchProjectGrad,
    ClippedGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
    WeightedGrad,
)
from backpack.extensions.backprop_extension import BackpropExtension

pytestmark = [pytest.mark.usefixtures("cpu"), needs_gloo]

F64 = torch.float64
Row = Tuple[str, str, str]
N = 6
# Numbers of samples of each process
SPLITS = {
    "2-even": (3, 3),
    "2-uneven": (1, 5),
    "3-even": (2, 2, 2),
    "3-uneven": (3, 1, 2),
    "2-empty": (0, 6),
}


class Routed(Module):
    """A layer that gets some positions of each sample, of one more than of another."""

    def __init__(self):
        """Make the layer."""
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Sum what the layer makes of the positions that are above a sample's mean."""
        rows = torch.where(x[..., 0] > x[..., 0].mean(1, keepdim=True))
        out = x.new_zeros(*x.shape[:2], 3)
        return out.index_put(rows, self.layer(x[rows])).sum(1)


class Stacked(Module):
    """Weights in one parameter, of which the first gets some positions only."""

    def __init__(self):
        """Draw the weights."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Add what two of the weights make of positions."""
        rows = torch.where(x[..., 0] > x[..., 0].mean(1, keepdim=True))
        out = (x @ self.weight[2].T).tanh()
        return out.index_put(rows, x[rows] @ self.weight[0].T).sum(1)


class Experts(Module):
    """Parts of which each sample enters one; what no sample enters is not called."""

    def __init__(self, third: Module):
        """Make them.

        Args:
            third: What makes ``[*, 3]`` of ``[*, 4]``, besides two layers.
        """
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3), third])
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Send each sample to the expert that its first number tells."""
        experts, out = x.flatten(1)[:, 0], x.new_zeros(*x.shape[:-1], 3)
        for k, expert in enumerate(self.experts):
            rows = (experts == k).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        out = self.head(out.tanh())
        return out if out.dim() == 2 else out.sum(1)


class Table(nn.Embedding):
    """A table in which the first of some numbers is looked up."""

    def forward(self, x: Tensor) -> Tensor:
        """Look it up."""
        return super().forward(x[..., 0].long())


def to_experts(*axes: int) -> Tensor:
    """Make inputs of which one process of three has all for an expert."""
    x = torch.randn(N, *axes, 4, dtype=F64)
    first = torch.tensor([0.0, 0, 0, 1, 2, 2], dtype=F64)
    x[..., 0] = first.reshape(N, *[1] * len(axes))
    return x


class Problem(NamedTuple):
    """A row: a model, its inputs, a loss and targets; quantities that are refused."""

    model: Callable[[], Module]
    x: Callable[[], Tensor]
    loss: Callable[..., Module]
    y: Callable[[], Tensor]
    sequence: bool = False
    refused: Tuple[str, ...] = ()


class Transposed(Module):
    """A layer with its weight in the order of inputs and outputs."""

    def __init__(self, inputs: int, outputs: int):
        """Draw the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the weight."""
        return torch.tanh(x @ self.weight)


def mlp(outputs: int, *before: Module) -> Module:
    """Build a network with a normalization, for inputs of 4 features."""
    hidden = nn.Linear(4, 3), nn.LayerNorm(3), nn.Sigmoid()
    return nn.Sequential(*before, *hidden, nn.Linear(3, outputs))


# Quantities that go from module to module
WALKING = (
    *("DiagHessian", "BatchDiagHessian", "HMP", "GGNMP", "PCHMP"),
    *(f"HBP{how}-{x}" for how in ("", "-sampled") for x in ("expand", "reduce")),
)
PROBLEMS = {
    # the mean divides by the weights of the targets
    "weighted": Problem(
        lambda: mlp(3),
        lambda: torch.randn(N, 4, dtype=F64) + 3,
        lambda **options: nn.CrossEntropyLoss(
            weight=torch.tensor([0.2, 1.0, 3.0], dtype=F64), **options
        ),
        lambda: torch.tensor([0, 2, 1, 1, 0, 2]),
        # they count samples unequally
        refused=("WeightedGrad", "ClippedGrad", "ClippedGrad-all"),
    ),
    "embedding": Problem(
        lambda: mlp(2, nn.Embedding(5, 4)),
        lambda: torch.tensor([0, 3, 3, 1, 0, 4]),
        nn.BCEWithLogitsLoss,
        lambda: torch.rand(N, 2, dtype=F64).round(),
        refused=("EKFAC-basis",),  # whose shapes are those of other layers
    ),
    "conv": Problem(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)),
        ),
        lambda: torch.randn(N, 2, 4, 4, dtype=F64),
        nn.MSELoss,
        lambda: torch.rand(N, 2, dtype=F64),
    ),
    "sequence": Problem(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Sigmoid(), nn.Flatten(), nn.Linear(10, 3)
        ),
        lambda: torch.randn(N, 2, 4, dtype=F64),
        nn.CrossEntropyLoss,
        lambda: torch.tensor([0, 2, 1, 1, 0, 2]),
        sequence=True,
    ),
    "nll": Problem(
        lambda: nn.Sequential(mlp(3), nn.LogSoftmax(1)),
        lambda: torch.randn(N, 4, dtype=F64),
        lambda **options: nn.NLLLoss(
            weight=torch.tensor([0.2, 1.0, 3.0], dtype=F64), **options
        ),
        lambda: torch.tensor([0, 2, 1, -100, 0, 2]),
        # they count samples unequally; the loss has no curvature, of which to sample
        refused=("WeightedGrad", "ClippedGrad", "ClippedGrad-all"),
    ),
    # of which the processes see different lengths
    "routed": Problem(
        Routed,
        lambda: torch.randn(N, 5, 4, dtype=F64) ** 3,
        nn.CrossEntropyLoss,
        lambda: torch.tensor([0, 2, 1, 1, 0, 2]),
        sequence=True,
        refused=WALKING,
    ),
    # the factor of the input comes first, and is as large as that of the output
    "transposed": Problem(
        lambda: nn.Sequential(Transposed(4, 4), nn.Linear(4, 3)),
        lambda: torch.randn(N, 4, dtype=F64),
        nn.CrossEntropyLoss,
        lambda: torch.tensor([0, 2, 1, 1, 0, 2]),
        refused=("PCHMP",),  # the module is not linear in its parameter
    ),
    # whose weights see different numbers of positions
    "stacked": Problem(
        Stacked,
        lambda: torch.randn(N, 5, 4, dtype=F64) ** 3,
        nn.CrossEntropyLoss,
        lambda: torch.tensor([0, 2, 1, 1, 0, 2]),
        sequence=True,
        refused=(*WALKING, "EKFAC-basis", "BatchProjectGrad-drawn"),
    ),
    "experts": Problem(
        lambda: Experts(Transposed(4, 3)),
        to_experts,
        nn.CrossEntropyLoss,
        lambda: torch.tensor([0, 2, 1, 1, 0, 2]),
        # which are drawn in the order in which a process reaches parameters
        refused=(*WALKING, "HBP-None", "HBP-sampled-None", "BatchProjectGrad-drawn"),
    ),
    "experts on sequences": Problem(
        lambda: Experts(Table(4, 3)),
        lambda: to_experts(2),
        nn.CrossEntropyLoss,
        lambda: torch.tensor([0, 2, 1, 1, 0, 2]),
        sequence=True,
        refused=(*WALKING, "BatchProjectGrad-drawn", "EKFAC-basis"),
    ),
}
FACTORS = {
    "KFAC": lambda **options: KFAC(2, **options),
    "KFLR": KFLR,
    "empirical": lambda **options: KFAC(fisher_type="empirical", **options),
    "HBP": partial(HBP, "ggn", "exact", "sqrt", "E[J^T E(H) J]"),
    "HBP-sampled": partial(HBP, "ggn", "sampling", "sqrt", "E[J^T E(H) J]"),
}
# Kronecker factors, by how positions that share a weight are treated
KRONECKER: Dict[str, Callable[[], BackpropExtension]] = {
    f"{name}-{sharing}": lambda make=make, sharing=sharing: make(weight_sharing=sharing)
    for name, make in FACTORS.items()
    for sharing in (None, "expand", "reduce")
}
OTHERS: Dict[str, Callable[[], BackpropExtension]] = {
    ext.__name__: ext
    for ext in (
        *(BatchGrad, BatchL2Grad, BatchDotGrad, SumGradSquared, Variance),
        *(DiagGGNExact, DiagGGNMC, BatchDiagGGNExact, BatchDiagGGNMC, DiagHessian),
        *(BatchDiagHessian, SqrtGGNExact, SqrtGGNMC, HMP, GGNMP, PCHMP),
    )
}
OTHERS["WeightedGrad"] = lambda: WeightedGrad(inverse, scale="sample")
OTHERS["ClippedGrad"] = lambda: ClippedGrad(0.5, "parameter", "sample")
OTHERS["ClippedGrad-all"] = lambda: ClippedGrad(0.5, scale="sample")
OTHERS["BatchJacobian"] = BatchJacobian


def basis(shape: torch.Size) -> List[Tensor]:
    """Make eigenvectors for a parameter that is no embedding."""
    sizes = [shape[0], shape[1:].numel()][: len(shape)]
    rows = [torch.arange(n * n, dtype=F64).sin().reshape(n, n) for n in sizes]
    return [torch.linalg.eigh(row + row.T).eigenvectors for row in rows]


# What depends on the parameter
BY_SHAPE: Dict[str, Callable[[], BackpropExtension]] = {
    "BatchDotGrad-other": lambda: BatchDotGrad(other=ByShape(others)),
    "BatchProjectGrad": lambda: BatchProjectGrad(ByShape(projections)),
    "BatchProjectGrad-drawn": lambda: BatchProjectGrad(
        2, generator=torch.Generator().manual_seed(3)
    ),
    "EKFAC-basis": lambda: EKFAC(2, basis=ByShape(basis)),
}
QUANTITIES = {**OTHERS, **BY_SHAPE, **KRONECKER}
# Where the samples are in what belongs to single samples
SAMPLES = {
    **dict.fromkeys(["BatchGrad", "BatchL2Grad", "BatchDiagGGNExact"], 0),
    **dict.fromkeys(["BatchDiagGGNMC", "BatchDiagHessian"], 0),
    **dict.fromkeys(["BatchDotGrad-other", "BatchProjectGrad"], 0),
    **dict.fromkeys(["SqrtGGNExact", "SqrtGGNMC", "BatchJacobian"], 1),
}
WEIGHTS = torch.arange(N, dtype=F64).cos()
# What a user says of single samples: those of a process, and which are considered
SELECTED: Dict[str, Callable[[slice, List[int]], BackpropExtension]] = {
    "BatchGrad": lambda samples, some: BatchGrad(some),
    "BatchDotGrad": lambda samples, some: BatchDotGrad(subsampling=some),
    "BatchProjectGrad": lambda samples, some: BatchProjectGrad(
        ByShape(projections), subsampling=some
    ),
    "SqrtGGNExact": lambda samples, some: SqrtGGNExact(some),
    "BatchJacobian": lambda samples, some: BatchJacobian(some),
    "ClippedGrad": lambda samples, some: ClippedGrad(
        0.5, scale="sample", subsampling=some
    ),
    "WeightedGrad-given": lambda samples, some: WeightedGrad(WEIGHTS[samples]),
    "WeightedGrad-some": lambda samples, some: WeightedGrad(
        WEIGHTS[samples][some], subsampling=some
    ),
}


def give_draws(patch: pytest.MonkeyPatch) -> None:
    """Make what is sampled for a sample a function of its prediction.

    Args:
        patch: What makes the change.
    """

    def classes(self: Any, f: Tensor, mc_samples: int, *rest: Any) -> Tensor:
        return f.argsort(1).movedim(1, 0)[:mc_samples]

    def gradients(self: Any, f: Tensor, mc_samples: int, *rest: Any) -> Tensor:
        return torch.stack([f.detach() + 1 - i for i in range(mc_samples)])

    def bits(self: Any, f: Tensor, mc_samples: int, *rest: Any) -> Tensor:
        return torch.stack([(f > 0.1 * i).to(f.dtype) for i in range(mc_samples)])

    patch.setattr(CrossEntropyLossDerivatives, "_sample_targets", classes)
    patch.setattr(BCELossWithLogitsDerivatives, "_sample_targets", bits)
    patch.setattr(MSELossDerivatives, "_compute_sampled_grads_manual", gradients)


def run(
    problem: Problem, reduction: str, samples: slice, *extensions: BackpropExtension
) -> Module:
    """Run a backward pass on some of the samples.

    Args:
        problem: The row.
        reduction: Reduction of the loss.
        samples: Which samples.
        extensions: What is computed.

    Returns:
        The model, with fields.
    """
    torch.manual_seed(0)
    model = extend(problem.model().to(F64))
    x, y = problem.x()[samples], problem.y()[samples]
    loss = extend(problem.loss(reduction=reduction))
    with warnings.catch_warnings(), backpack(*extensions):
        warnings.filterwarnings("ignore", "No result was computed")  # of experts
        loss(model(x), y).backward()
    return model


def fields(model: Module, ext: BackpropExtension) -> List[Any]:
    """Collect an extension's values; functions by what they do with two columns."""
    values = []
    for param in model.parameters():
        value = getattr(param, ext.savefield)
        if callable(value):
            torch.manual_seed(1)
            value = value(torch.randn(2, *param.shape, dtype=F64))
        values.append(value)
    return values


def defined(name: str, problem: Problem) -> bool:
    """Tell whether a quantity is defined for a problem, without a choice."""
    ambiguous = problem.sequence and name in KRONECKER and name.endswith("None")
    return not ambiguous and name not in problem.refused


def batches(counts: Tuple[int, ...]) -> List[slice]:
    """Divide the samples among processes."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts)]


def in_fields(
    quantities: Dict[str, Callable[..., BackpropExtension]],
    problem: Problem,
    *args: Any,
) -> Dict[str, BackpropExtension]:
    """Make the extensions that are defined for a problem, each with its own field."""
    exts = {k: make(*args) for k, make in quantities.items() if defined(k, problem)}
    for name, ext in exts.items():
        ext.savefield = name
    return exts


def compute(
    row: Row, samples: slice, exts: Dict[str, BackpropExtension], **options: Any
) -> Dict[str, List[Any]]:
    """Compute quantities of a row.

    Args:
        row: Names of problem, reduction and split.
        samples: This process' samples.
        exts: What computes them, by their names.
        options: How to reduce them. Without any, they are not.

    Returns:
        Values by the name of the quantity.
    """
    with pytest.MonkeyPatch.context() as patch:
        give_draws(patch)
        model = run(PROBLEMS[row[0]], row[1], samples, *exts.values())
    if options:
        reduce(model.parameters(), exts.values(), **options)
    return {name: fields(model, ext) for name, ext in exts.items()}


def compute_part(rank: int, row: Row) -> List[Dict[str, List[Any]]]:
    """Compute a row in one of several processes: all samples, own ones, some."""
    problem, samples = PROBLEMS[row[0]], batches(SPLITS[row[2]])[rank]
    own = in_fields({name: QUANTITIES[name] for name in SAMPLES}, problem)
    first = [0][: samples.stop - samples.start]
    some = in_fields(SELECTED, problem, samples, first)
    return [
        compute(row, samples, in_fields(QUANTITIES, problem), gather=True),
        compute(row, samples, own, gather=False),
        compute(row, samples, some, gather=True),
    ]


class Refused(NamedTuple):
    """What is refused: what to call in a process, an error, and what it says."""

    run: Callable[[int, slice], None]
    error: Type[Exception]
    says: str


def refuse(
    *extensions: BackpropExtension, again: bool = False, **options: Any
) -> Callable[[int, slice], None]:
    """Make a pass whose quantities can't be reduced."""

    def call(rank: int, samples: slice) -> None:
        model = run(PROBLEMS["weighted"], "mean", samples, *extensions)
        for _ in range(1 + again):
            reduce(model.parameters(), extensions, **options)

    return call


def functional(count: bool, *extensions: BackpropExtension) -> Callable:
    """Make a pass from a loss that is not extended."""

    def call(rank: int, samples: slice) -> List[Any]:
        problem, (ext, *_) = PROBLEMS["weighted"], extensions
        torch.manual_seed(0)
        model = extend(problem.model().to(F64))
        x, y = problem.x()[samples], problem.y()[samples]
        with backpack(*extensions):
            nn.functional.cross_entropy(model(x), y).backward()
        options = {"count": len(x)} if count else {}
        if distributed.get_world_size() > 1:
            reduce(model.parameters(), extensions, **options)
        return fields(model, ext)

    return call


def another_term(rank: int, samples: slice) -> None:
    """Add a sum, of which no module says so, to a loss that is a mean."""
    problem, ext = PROBLEMS["weighted"], BatchGrad()
    model, loss = extend(problem.model().to(F64)), extend(nn.CrossEntropyLoss())
    f = model(problem.x()[samples])
    with backpack(ext):
        (loss(f, problem.y()[samples]) + (f**2).sum()).backward()
    reduce(model.parameters(), [ext])


def one_parameter_less(rank: int, samples: slice) -> None:
    """Freeze a parameter in the first process only."""
    problem, ext = PROBLEMS["weighted"], BatchGrad()
    model, loss = extend(problem.model().to(F64)), extend(nn.CrossEntropyLoss())
    model[0].weight.requires_grad_(rank > 0)
    with backpack(ext):
        loss(model(problem.x()[samples]), problem.y()[samples]).backward()
    reduce(model.parameters(), [ext])


def with_a_graph(rank: int, samples: slice) -> None:
    """Reduce what can be differentiated."""
    problem, ext = PROBLEMS["weighted"], Variance()
    model, loss = extend(problem.model().to(F64)), extend(nn.CrossEntropyLoss())
    value = loss(model(problem.x()[samples]), problem.y()[samples])
    with backpack(ext):
        torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    reduce(model.parameters(), [ext])


def two_losses(rank: int, samples: slice) -> None:
    """Reduce what comes from a mean and from a sum."""
    problem, ext = PROBLEMS["weighted"], DiagGGNExact()
    model, x, y = extend(problem.model().to(F64)), problem.x(), problem.y()
    mean, total = (extend(nn.CrossEntropyLoss(reduction=r)) for r in ("mean", "sum"))
    f = model(x[samples])
    with backpack(ext):
        (mean(f, y[samples]) + total(f, y[samples])).backward()
    reduce(model.parameters(), [ext])


def of_lengths(ext: BackpropExtension, model: Module, x: Tensor) -> None:
    """Compute a quantity of sequences."""
    with backpack(ext):
        f = model(x)
        extend(nn.MSELoss(reduction="sum"))(f, torch.zeros_like(f)).backward()


def lengths(rank: int, samples: slice) -> None:
    """Gather square roots, of which longer sequences have more columns."""
    ext, model = SqrtGGNExact(), extend(nn.Linear(3, 2).to(F64))
    of_lengths(ext, model, torch.randn(2, 2 + rank, 3, dtype=F64))
    reduce(model.parameters(), [ext], gather=True)


def dots_of_lengths(rank: int, world: int) -> Tuple[List[Any], List[Any]]:
    """Put dot products together where processes see sequences of other lengths.

    One has factors then, another products, and a third one no samples.
    """
    torch.manual_seed(0)
    ext, model = BatchDotGrad(), extend(nn.Linear(6, 5).to(F64))
    batch = [torch.randn(2, 2, 6), torch.randn(3, 9, 6), torch.randn(0, 4, 6)][:world]
    of_lengths(ext, model, batch[rank].to(F64))
    reduce(model.parameters(), [ext])
    values = fields(model, ext)
    single = [model(row.to(F64)).square().sum() for x in batch for row in x]
    params = list(model.parameters())
    rows = [torch.autograd.grad(value, params) for value in single]
    flat = [torch.stack(of_param).flatten(1) for of_param in zip(*rows)]
    return values, [x @ x.T for x in flat]


class Own(BackpropExtension):
    """An extension that does not say how it is reduced."""

    def __init__(self):
        """Compute nothing."""
        super().__init__("own", {}, fail_mode="SILENT")


def own(rank: int, samples: slice) -> None:
    """Reduce values of an extension that does not say how."""
    ext, model = Own(), nn.Linear(1, 1)
    model.weight.own = torch.ones(1)
    ext.over_shards(model.weight.own, None)


def nothing_clipped(rank: int, samples: slice) -> None:
    """Reduce weights of summands of a mean where the first process has no samples."""
    alone = slice(0, N) if rank == 1 else slice(0, 0)
    refuse(ClippedGrad(1.0))(rank, alone)


def empty_tokens(rank: int, world: int) -> Tuple[List[Any], List[Any]]:
    """Gather square roots of a flattened loss where the first process has none."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).to(F64)
    x = torch.randn(N, 2, 4, dtype=F64)
    y = torch.arange(2 * N).remainder(3)
    values = []
    for samples in (slice(0, N), slice(0, N if rank == 1 else 0)):
        ext = SqrtGGNExact()
        model, loss = extend(nn.Sequential(layer, nn.Flatten(0, 1))), extend(
            nn.CrossEntropyLoss()
        )
        with backpack(ext):
            loss(model(x[samples]), y[: 2 * samples.stop]).backward()
        if values:
            reduce(model.parameters(), [ext], gather=True)
        values.append(fields(model, ext))
    return values[1], values[0]


def given_twice(rank: int, world: int) -> Tuple[List[Any], List[Any]]:
    """Reduce where a parameter and an extension are passed twice."""
    problem, samples = PROBLEMS["weighted"], batches(SPLITS[f"{world}-uneven"])[rank]
    ext = DiagGGNExact()
    expected = fields(run(problem, "sum", slice(0, N), ext), ext)
    model = run(problem, "sum", samples, ext)
    reduce([*model.parameters(), *model.parameters()], [ext, ext])
    return fields(model, ext), expected


def has_half_losses() -> bool:
    """Tell whether this PyTorch computes losses in half precision."""
    try:
        x = torch.ones(1, dtype=torch.bfloat16, device="cpu")
        return nn.MSELoss()(x, x) == 0
    except RuntimeError:
        return False


def half_without_samples(rank: int, world: int) -> Tuple[List[Any], List[Any]]:
    """Reduce in half precision where the last process has no samples."""
    ext, counts = DiagGGNExact(), (2, 2, 0) if world == 3 else (4, 0)
    model, loss = extend(nn.Linear(4, 4).bfloat16()), extend(nn.MSELoss())
    for p in model.parameters():
        nn.init.ones_(p)
    x = torch.ones(counts[rank], 4, dtype=torch.bfloat16)
    with backpack(ext):
        loss(model(x), torch.zeros_like(model(x))).backward()
    reduce(model.parameters(), [ext])
    expected = [torch.full_like(p, 0.5) for p in model.parameters()]
    return fields(model, ext), expected


class Switched(nn.Module):
    """Two layers, of which the second one may be left out."""

    def __init__(self):
        """Create them."""
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(3, 3).to(F64) for _ in range(2))
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        x = self.first(x)
        return self.second(x) if self.both else x


def pass_through(model: Switched, samples: slice, ext: BackpropExtension) -> None:
    """Run a backward pass with a sum, on some of the samples."""
    x = torch.arange(3.0 * N, dtype=F64).reshape(N, 3).sin()[samples]
    with warnings.catch_warnings(), backpack(ext):
        warnings.simplefilter("ignore")  # a layer is not reached
        loss = extend(nn.MSELoss(reduction="sum"))
        loss(model(x), torch.zeros_like(x)).backward()


def left_out_later(rank: int, world: int) -> Tuple[List[Any], List[Any]]:
    """Reduce twice; in the second pass, a layer is not reached."""
    samples, ext = batches(SPLITS[f"{world}-uneven"])[rank], SumGradSquared()
    found: List[List[Any]] = []
    for some, own in ((slice(0, N), SumGradSquared()), (samples, ext)):
        model = extend(Switched())
        for model.both in (True, False):
            pass_through(model, some, own)
            if own is ext:
                reduce(model.parameters(), [own])
        found.append(fields(model, own))
    return found[1], found[0]


def left_out_by_one(rank: int, world: int) -> Tuple[List[Any], List[Any]]:
    """Reduce where one process leaves a layer out, which has values of another pass."""
    parts, found, expected = batches(SPLITS[f"{world}-uneven"]), [], []
    end = parts[0].stop
    for make in (SumGradSquared, *(OTHERS[name] for name in WALKING if name in OTHERS)):
        ext, before, after = make(), make(), make()
        model, without, both = (extend(Switched()) for _ in range(3))
        for model.both in (True, rank > 0):
            pass_through(model, parts[rank], ext)
        reduce(model.parameters(), [ext], gather=True)
        found += fields(model, ext)
        without.both = False
        pass_through(without, slice(0, end), before)
        pass_through(both, slice(end, N), after)
        first, second = fields(without.first, before), fields(both, after)
        is_batch = make is BatchDiagHessian
        zeros = [
            x[:0].new_zeros(end, *x.shape[1:]) if is_batch else 0 * x for x in second
        ]
        for x, y in zip((*first, *zeros[len(first) :]), second):
            expected.append(torch.cat([x, y]) if is_batch else x + y)
    return found, expected


def left_out_by_all(rank: int, world: int) -> Tuple[List[Any], List[Any]]:
    """Reduce where no process reaches a layer, which has values of another pass."""
    samples, ext = batches(SPLITS[f"{world}-uneven"])[rank], SumGradSquared()
    model = extend(Switched())
    pass_through(model, samples, ext)
    expected = [x.clone() for x in fields(model.second, ext)]
    model.both = False
    pass_through(model, samples, ext)
    reduce(model.parameters(), [ext])
    return fields(model.second, ext), expected


def factors_of_one(rank: int, samples: slice) -> None:
    """Reduce what is no tensor, of a layer that one process leaves out."""
    ext, model = BatchFactors(), extend(Switched())
    model.both = rank > 0
    pass_through(model, samples, ext)
    reduce(model.second.parameters(), [ext])


def drawn_in_another_order(rank: int, samples: slice) -> None:
    """Reduce projections where the first process draws none for a layer."""
    ext = BatchProjectGrad(2, generator=torch.Generator().manual_seed(3))
    model = extend(Switched())
    model.both = rank > 0
    pass_through(model, samples, ext)
    reduce(model.parameters(), [ext])


def without_a_value(rank: int, samples: slice) -> None:
    """Reduce where the first process has dropped a value."""
    ext, model = SumGradSquared(), extend(Switched())
    pass_through(model, samples, ext)
    if rank == 0:
        del model.second.bias.sum_grad_squared
    reduce(model.parameters(), [ext])


def one_parameter_more(rank: int, samples: slice) -> None:
    """Reduce another number of parameters in the first process."""
    ext, model = SumGradSquared(), extend(Switched())
    pass_through(model, samples, ext)
    reduce(list(model.parameters())[rank > 0 :], [ext])


TOGETHER = {
    "left out later": left_out_later,
    "left out by one": left_out_by_one,
    "left out by all": left_out_by_all,
    "empty tokens": empty_tokens,
    "dot products of lengths": dots_of_lengths,
    "given twice": given_twice,
    **({"half": half_without_samples} if has_half_losses() else {}),
}

CHEN = "E(J^T) E(H) E(J)"
REFUSED = {
    "KFRA": Refused(refuse(KFRA()), NotImplementedError, "KFRA.*Use KFLR"),
    "averaged inputs": Refused(
        refuse(HBP("ggn", "exact", "sqrt", CHEN)), NotImplementedError, "HBP.*Use KFLR"
    ),
    "EKFAC": Refused(refuse(EKFAC()), NotImplementedError, "EKFAC.*basis="),
    "factors": Refused(
        refuse(BatchFactors()), NotImplementedError, "BatchFactors: .*BatchGrad"
    ),
    "projections": Refused(
        refuse(BatchProjectGrad(2)), ValueError, "BatchProjectGrad.*generator"
    ),
    "twice": Refused(refuse(BatchGrad(), again=True), ValueError, "BatchGrad.*once"),
    "no pass": Refused(
        lambda rank, samples: reduce([], [KFAC()]), ValueError, "KFAC.*backward pass"
    ),
    "no count": Refused(
        functional(False, BatchGrad()), ValueError, "`reduction`, .*count=.*for a sum"
    ),
    "another term": Refused(another_term, ValueError, "loss divides by"),
    "parameters": Refused(
        one_parameter_less,
        ValueError,
        "with a value. '0.weight' got one in process 1, none in process 0, .* frozen",
    ),
    "no value": Refused(
        without_a_value, ValueError, "'second.bias' .* none in process 0, .* reached it"
    ),
    "number": Refused(one_parameter_more, ValueError, "numbers of parameters"),
    "factors of one": Refused(
        factors_of_one, NotImplementedError, "'second.weight'.* for FactoredGradients"
    ),
    "other draws": Refused(
        drawn_in_another_order, ValueError, "BatchProjectGrad.*reached first"
    ),
    "graph": Refused(with_a_graph, ValueError, "Variance.*create_graph"),
    "extensions": Refused(
        lambda rank, samples: refuse(*[BatchGrad(), Variance()][: rank + 1])(
            0, samples
        ),
        ValueError,
        "numbers of extensions",
    ),
    "two losses": Refused(two_losses, NotImplementedError, "several losses"),
    "lengths": Refused(lengths, ValueError, "shapes.*axis [01]"),
    "unequal samples": Refused(
        refuse(WeightedGrad(inverse, scale="sample")), NotImplementedError, "unequally"
    ),
    "summands": Refused(
        refuse(ClippedGrad(1.0)), NotImplementedError, "ClippedGrad.*scale='sample'"
    ),
    "summands of one process": Refused(
        nothing_clipped, NotImplementedError, "ClippedGrad.*scale='sample'"
    ),
    "in the gradient": Refused(
        refuse(ClippedGrad(1.0, scale="sample", replace_grad=True)),
        ValueError,
        "ClippedGrad puts its results into `.grad`.*replace_grad=False",
    ),
    "dots": Refused(
        refuse(WeightedGrad(lambda dots: dots.sum(1), of="dots")),
        NotImplementedError,
        "WeightedGrad.*dot products.*Use norms",
    ),
    "own": Refused(own, NotImplementedError, "Own.*over_shards"),
}


def refuse_part(rank: int, world: int, name: str) -> Tuple[Type[Exception], str]:
    """Try in one of several processes what is refused."""
    samples = batches(SPLITS[f"{world}-uneven"])[rank]
    with pytest.raises(REFUSED[name].error) as error:
        REFUSED[name].run(rank, samples)
    return error.type, str(error.value)


def count_part(rank: int, world: int) -> List[Any]:
    """Compute the variance in one of several processes, with a function for a loss."""
    samples = batches(SPLITS[f"{world}-uneven"])[rank]
    return functional(True, Variance())(rank, samples)


class Weighted(Module):
    """A loss of one's own, a mean of which another loss knows what it divides by."""

    def __init__(self, reduction: str = "mean"):
        """Make the other one."""
        super().__init__()
        self.reduction = reduction
        self.loss = PROBLEMS["weighted"].loss(reduction=reduction)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Call it."""
        return self.loss(x, y)


def weighted_part(rank: int, world: int) -> List[Any]:
    """Compute the variance in one of several processes, with a loss of one's own."""
    problem, ext = PROBLEMS["weighted"]._replace(loss=Weighted), Variance()
    model = run(problem, "mean", batches(SPLITS[f"{world}-uneven"])[rank], ext)
    reduce(model.parameters(), [ext])
    return fields(model, ext)


@lru_cache(maxsize=None)
def in_one_process(*row: str) -> Dict[str, List[Any]]:
    """Compute all quantities of a problem from the whole batch."""
    exts = in_fields(QUANTITIES, PROBLEMS[row[0]])
    return compute((*row, ""), slice(0, N), exts)


ROWS = [  # what a split or a sum means depends on the problem where weights differ
    (problem, reduction, split)
    for split in SPLITS
    for problem in PROBLEMS
    for reduction in ("mean", "sum")
    if (split, reduction) == ("3-uneven", "mean") or problem in ("weighted", "experts")
]


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_reduce(row: Row):
    """Every process has what one process computes; its own samples, or all of them."""
    expected, counts = in_one_process(*row[:2]), SPLITS[row[2]]
    parts = batches(counts)
    firsts = [part.start for part in parts if part.start < part.stop]
    exts = in_fields(SELECTED, PROBLEMS[row[0]], slice(0, N), firsts)
    chosen = compute(row, slice(0, N), exts)
    for rank, results in enumerate(in_processes(len(counts), compute_part, row)):
        own = {
            name: [x[(*(slice(None),) * axis, parts[rank])] for x in expected[name]]
            for name, axis in SAMPLES.items()
            if name in expected
        }
        for values, truths in zip(results, (expected, own, chosen)):
            assert values.keys() == truths.keys()
            for name, truth in truths.items():
                what = f"{name}, process {rank}"
                assert_agrees(values[name], truth, what, rtol=1e-10)


@pytest.mark.parametrize("world", [2, 3])
def test_count(world: int):
    """A mean loss that is not extended is told from its number of samples."""
    ext = Variance()
    problem = PROBLEMS["weighted"]._replace(loss=nn.CrossEntropyLoss)
    expected = fields(run(problem, "mean", slice(0, N), ext), ext)
    for values in in_processes(world, count_part, world):
        assert_agrees(values, expected, rtol=1e-10)


def test_loss_of_ones_own():
    """A loss of one's own divides by what the losses that it calls divide by."""
    ext = Variance()
    expected = fields(run(PROBLEMS["weighted"], "mean", slice(0, N), ext), ext)
    for values in in_processes(2, weighted_part, 2):
        assert_agrees(values, expected, rtol=1e-10)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", TOGETHER)
def test_together(name: str, world: int):
    """Processes have together what one computes."""
    for values, expected in in_processes(world, TOGETHER[name], world):
        assert_agrees(values, expected, rtol=1e-10)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, world: int):
    """What can't be reduced is an error in every process, none of which waits."""
    for error, text in in_processes(world, refuse_part, world, name):
        assert error is REFUSED[name].error
        assert re.search(REFUSED[name].says, text)


def test_nothing_is_remembered_alone():
    """Where no other process shares the work, extensions remember nothing."""
    ext = BatchDotGrad()
    run(PROBLEMS["weighted"], "mean", slice(0, N), ext)
    assert ext.shard is None
