"""Every quantity on every case, against the oracle.

All quantities of a case are computed in one backward pass, which also shows that they
do not get in each other's way; on a few cases each one runs alone and in pairs, too.
"""

from functools import lru_cache, partial
from itertools import combinations
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
    Type,
)

import oracle as oracles
import pytest
import torch
from cases import (
    CASES,
    EMBEDDING,
    FIRST_ORDER,
    LAYER_CASES,
    RECURRENT,
    Case,
    Problem,
    classes,
    inverse,
    layer_case,
    loss_case,
    randn,
)
from oracle import (
    ByShape,
    assert_agrees,
    by_dots,
    clip,
    loss_hessians,
    oracle,
    others,
    parameters,
    projections,
)
from torch import Tensor, nn
from torch.nn import Module

from backpack import backpack, extend
from backpack.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDotGrad,
    BatchFactors,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    BatchProjectGrad,
    ClippedGrad,
    DiagGGNExact,
    DiagGGNMC,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
    WeightedGrad,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.columns import Source
from backpack.extensions.secondorder.hbp import KroneckerFactors

M = 2  # Monte-Carlo samples
SOME = [1, 0]  # subsampling; the smallest batch has one sample and skips it

Fields = Dict[str, Any]


class Quantity(NamedTuple):
    """A row: an extension and what the oracle calls its quantity.

    Attributes:
        extension: The class.
        reference: Name of the oracle's function.
        args: Arguments of the extension.
        options: Arguments of the oracle's function.
        columns: ``"exact"`` or ``"sampling"`` if the oracle is to use the columns that
            were pulled back, ``None`` if it knows better.
    """

    extension: Type[BackpropExtension]
    reference: str
    args: Dict[str, Any] = {}  # noqa: B006
    options: Dict[str, Any] = {}  # noqa: B006
    columns: Optional[str] = None


SHARING = {
    "expand": {"weight_sharing": "expand"},
    "reduce": {"weight_sharing": "reduce"},
}
SAMPLING = {"mc_samples": M}
SUBSAMPLING = {"subsampling": SOME}
PROJECTIONS = {"projection": ByShape(projections)}

MAX_NORM = 0.3


QUANTITIES = {
    "BatchGrad": Quantity(BatchGrad, "batch_grad"),
    "BatchGrad-some": Quantity(BatchGrad, "batch_grad", SUBSAMPLING, SUBSAMPLING),
    "BatchL2Grad": Quantity(BatchL2Grad, "batch_l2"),
    "SumGradSquared": Quantity(SumGradSquared, "sum_grad_squared"),
    "Variance": Quantity(Variance, "variance"),
    "BatchDotGrad": Quantity(BatchDotGrad, "batch_dot"),
    "BatchDotGrad-some": Quantity(BatchDotGrad, "batch_dot", SUBSAMPLING, SUBSAMPLING),
    "BatchDotGrad-other": Quantity(
        BatchDotGrad, "batch_dot_other", {"other": ByShape(others)}
    ),
    "BatchFactors-all": Quantity(BatchFactors, "batch_grad"),
    "BatchFactors-some": Quantity(BatchFactors, "batch_grad", SUBSAMPLING, SUBSAMPLING),
    "BatchProjectGrad-all": Quantity(BatchProjectGrad, "batch_project", PROJECTIONS),
    "BatchProjectGrad-some": Quantity(
        BatchProjectGrad,
        "batch_project",
        {**PROJECTIONS, **SUBSAMPLING},
        SUBSAMPLING,
    ),
    "WeightedGrad": Quantity(WeightedGrad, "weighted_sum", {"weights": inverse}),
    "WeightedGrad-dots": Quantity(
        WeightedGrad,
        "weighted_sum",
        {"weights": lambda dots: dots.sum(1), "of": "dots", **SUBSAMPLING},
        {"weights": by_dots, **SUBSAMPLING},
    ),
    "ClippedGrad": Quantity(
        ClippedGrad,
        "weighted_sum",
        {"max_norm": MAX_NORM, "scale": "sample"},
        {"weights": partial(clip, max_norm=MAX_NORM), "scale": "sample"},
    ),
    "DiagGGNExact": Quantity(DiagGGNExact, "diag_ggn"),
    "DiagGGNMC": Quantity(DiagGGNMC, "diag_ggn", SAMPLING, columns="sampling"),
    "BatchDiagGGNExact": Quantity(BatchDiagGGNExact, "diag_ggn_batch"),
    "BatchDiagGGNMC": Quantity(
        BatchDiagGGNMC, "diag_ggn_batch", SAMPLING, columns="sampling"
    ),
    "SqrtGGNExact": Quantity(SqrtGGNExact, "sqrt_ggn", columns="exact"),
    "SqrtGGNExact-some": Quantity(
        SqrtGGNExact, "sqrt_ggn", SUBSAMPLING, SUBSAMPLING, "exact"
    ),
    "SqrtGGNMC": Quantity(SqrtGGNMC, "sqrt_ggn", SAMPLING, columns="sampling"),
    "SqrtGGNMC-some": Quantity(
        SqrtGGNMC, "sqrt_ggn", {**SAMPLING, **SUBSAMPLING}, SUBSAMPLING, "sampling"
    ),
    "BatchJacobian": Quantity(BatchJacobian, "batch_jacobian"),
    "BatchJacobian-some": Quantity(
        BatchJacobian, "batch_jacobian", SUBSAMPLING, SUBSAMPLING
    ),
    "KFLR": Quantity(KFLR, "kronecker_factors"),
    "KFAC": Quantity(KFAC, "kronecker_factors", SAMPLING, columns="sampling"),
    **{
        f"KFLR-{name}": Quantity(KFLR, "kronecker_factors", args, args)
        for name, args in SHARING.items()
    },
    **{
        f"KFAC-{name}": Quantity(
            KFAC, "kronecker_factors", {**SAMPLING, **args}, args, "sampling"
        )
        for name, args in SHARING.items()
    },
    "EKFAC-expand": Quantity(
        EKFAC, "ekfac", {"fisher_type": "exact"}, SHARING["expand"], "exact"
    ),
    "EKFAC-reduce": Quantity(
        EKFAC, "ekfac", {**SAMPLING, **SHARING["reduce"]}, SHARING["reduce"], "sampling"
    ),
}


def is_defined(case: Case, name: str) -> bool:
    """Tell whether the oracle defines a quantity for a case.

    Args:
        case: The case.
        name: Name of the quantity.

    Returns:
        Whether it does. Kronecker factors need a choice where sharing is ambiguous;
        those of recurrent layers are tested elsewhere, and A of an embedding is not
        diagonal if positions are averaged.
    """
    if name == "ClippedGrad":  # the scale of samples' losses must be known
        return hasattr(case.loss(), "reduction")
    if QUANTITIES[name].reference not in ("kronecker_factors", "ekfac"):
        return True
    if case in RECURRENT or (case in EMBEDDING and case.ambiguous and "reduce" in name):
        return False
    return "weight_sharing" in QUANTITIES[name].options or not case.ambiguous


def make(name: str, batch_size: int) -> BackpropExtension:
    """Create a quantity's extension, with a field of its own.

    Args:
        name: Name of the quantity.
        batch_size: N.

    Returns:
        The extension.
    """
    args = limit(QUANTITIES[name].args, batch_size)
    extension = QUANTITIES[name].extension(**args)
    extension.savefield = name
    return extension


def limit(args: Dict[str, Any], batch_size: int) -> Dict[str, Any]:
    """Drop samples that do not exist from the subsampling.

    Args:
        args: Arguments.
        batch_size: N.

    Returns:
        Arguments.
    """
    if "subsampling" not in args:
        return args
    picked = [n for n in args["subsampling"] if n < batch_size]
    return {**args, "subsampling": picked}


def run(case: Case, *names: str) -> Tuple[Fields, Dict[str, Tensor]]:
    """Compute quantities of a case in one backward pass.

    Args:
        case: The case.
        names: Names of the quantities.

    Returns:
        Values by quantity and parameter, and the columns that were pulled back. All
        that are drawn are the same.
    """
    model, loss, X, y = case.build()
    columns: Dict[str, Tensor] = {}
    original = Source.chunks

    def remember(source: Source, *args: Any) -> Iterator[Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            # the same for all, so that combining columns is seen to change nothing
            chunks = list(original(source, *args))
        exact = "compact" if source.compact else "exact"
        key = exact if source.strategy == "exact" else source.strategy
        columns[key] = torch.cat(chunks).detach()
        yield from chunks

    model, loss = extend(model), extend(loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "chunks", remember)
        with backpack(*[make(name, len(X[0])) for name in names]):
            loss(model(*X), *y).backward()
    fields = {
        name: {
            p: getattr(param, name)
            for p, param in parameters(model).items()
            if hasattr(param, name)
        }
        for name in names
    }
    return fields, columns


@lru_cache(maxsize=2)
def run_all(case: Case) -> Tuple[Fields, Dict[str, Tensor]]:
    """Compute all quantities of a case in one backward pass, and remember them.

    Args:
        case: The case.

    Returns:
        See :func:`run`.
    """
    return run(case, *[name for name in QUANTITIES if is_defined(case, name)])


@pytest.fixture(scope="module", autouse=True)
def remembering() -> Iterator[None]:
    """Let the oracle remember what it makes several quantities of a case from."""
    parts = "individual_gradients", "model_jacobians", "loss_hessians", "layer_factors"
    with pytest.MonkeyPatch.context() as patch:
        for part in parts:
            patch.setattr(oracles, part, lru_cache(32)(getattr(oracles, part)))
        yield


@lru_cache(maxsize=2)
def build(case: Case) -> Problem:
    """Build a case for the oracle, which knows it again.

    Args:
        case: The case.

    Returns:
        Model, loss and data.
    """
    return case.build()


def check(
    case: Case, name: str, actual: Dict[str, Any], columns: Dict[str, Tensor]
) -> None:
    """Compare a quantity's values with the oracle's.

    Args:
        case: The case.
        name: Name of the quantity.
        actual: Values by parameter.
        columns: Columns that were pulled back.
    """
    quantity, problem = QUANTITIES[name], build(case)
    options = limit(quantity.options, len(problem.X[0]))
    if quantity.columns is not None:
        exact = columns.get(quantity.columns, columns.get("compact"))
        options = {**options, "columns": exact}
    if quantity.reference == "ekfac":
        options["bases"] = {param: value[:-1] for param, value in actual.items()}
    if quantity.extension is BatchFactors:
        actual = {param: value.individual() for param, value in actual.items()}
    expected = oracle(quantity.reference, *problem, **options)
    assert set(actual) == set(expected)
    for param, value in expected.items():
        assert_agrees(actual[param], value, f"{name} of {param} in {case.id}")


def rows(*cases: Case) -> List:
    """Make the product of cases and quantities, as far as it is defined.

    Args:
        cases: The cases.

    Returns:
        Parameters for pytest.
    """
    return [
        pytest.param(case, name, id=f"{case.id}-{name}")
        for case in cases
        for name in QUANTITIES
        if is_defined(case, name)
    ]


@pytest.mark.parametrize("case, name", rows(*CASES))
def test_quantity(case: Case, name: str):
    """Every quantity is what the oracle says, while all are active."""
    fields, columns = run_all(case)
    check(case, name, fields[name], columns)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_exact_columns(case: Case):
    """The exact columns factor the dense loss Hessian, one per feature."""
    _, columns = run_all(case)
    problem = build(case)
    dense = loss_hessians(*problem)
    assert len(columns["exact"]) == dense.shape[-1]
    assert_agrees(loss_hessians(*problem, columns["exact"]), dense, case.id)


SMALL = [
    loss_case("mlp", nn.CrossEntropyLoss, classes),
    loss_case("mlp-13classes", nn.CrossEntropyLoss, classes, (13,)),
    layer_case("conv", lambda: nn.Conv2d(2, 2, 2), randn(3, 2, 3, 3)),
]


@pytest.mark.parametrize("case, name", rows(*SMALL))
def test_alone(case: Case, name: str):
    """Every quantity is what the oracle says if it runs alone."""
    fields, columns = run(case, name)
    check(case, name, fields[name], columns)


PAIRS = [
    pair
    for pair in combinations(QUANTITIES, 2)
    if not any("-" in name for name in pair)
]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs(pair: Tuple[str, str]):
    """Two quantities, in either order, do not change each other."""
    case = SMALL[1]
    alone = {name: run(case, name)[0][name] for name in pair}
    for names in (pair, pair[::-1]):
        fields, _ = run(case, *names)
        for name in names:
            for param, value in alone[name].items():
                assert_agrees(fields[name][param], value, f"{name} of {param}, {names}")


AMBIGUOUS = [case for case in LAYER_CASES if case.ambiguous]


@pytest.mark.parametrize("extension", [KFLR, KFAC], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("case", AMBIGUOUS, ids=lambda case: case.id)
def test_ambiguous(case: Case, extension: Type[KroneckerFactors]):
    """Kronecker factors are refused where there is a choice and it was not made."""
    model, loss, X, y = case.build()
    value = extend(loss)(extend(model)(*X), *y)
    with pytest.raises(NotImplementedError) as error, backpack(extension()):
        value.backward()
    for word in ("weight_sharing='expand'", "'reduce'", extension.__name__):
        assert word in str(error.value)


def test_unknown_weight_sharing():
    """A choice that does not exist is refused."""
    with pytest.raises(ValueError, match="'both'"):
        KFLR(weight_sharing="both")


MEANS: Dict[str, Tuple[Callable[..., BackpropExtension], str]] = {
    "DiagGGNMC": (DiagGGNMC, "diag_ggn"),
    "BatchDiagGGNMC": (BatchDiagGGNMC, "diag_ggn_batch"),
    "KFAC": (KFAC, "kronecker_factors"),
}


@pytest.mark.parametrize(
    "name, loss",
    [
        *((name, nn.CrossEntropyLoss) for name in MEANS),
        ("DiagGGNMC", nn.MSELoss),
        ("DiagGGNMC", nn.BCEWithLogitsLoss),
    ],
)
def test_monte_carlo_mean(name: str, loss: Type[Module]):
    """Monte-Carlo quantities are right in the mean.

    The draws' own spread gives the standard error of their mean. All entries lie within
    six of them: for 64 runs that average 50 draws each, hence are close to normal, one
    entry falls outside by chance with a probability of about 1e-7 (t distribution with
    63 degrees of freedom), and there are fewer than 200 entries. The seed is fixed.
    """

    def target(prediction: Tensor) -> Tuple[Tensor]:
        if loss is nn.CrossEntropyLoss:
            return classes(prediction)
        return (torch.rand_like(prediction),)

    case = loss_case("small", loss, target, (2,))
    make_extension, reference = MEANS[name]
    expected = oracle(reference, *case.build())
    model, lossfunc, X, y = case.build()
    model, lossfunc = extend(model), extend(lossfunc)
    runs: Dict[str, List] = {param: [] for param in expected}
    extension = make_extension(mc_samples=50)
    for _ in range(64):
        with backpack(extension):
            lossfunc(model(*X), *y).backward()
        for param, values in runs.items():
            value = getattr(model.get_parameter(param), extension.savefield)
            values.append(value[0] if name == "KFAC" else value)
    for param, values in runs.items():
        drawn = torch.stack(values)
        exact = expected[param][0] if name == "KFAC" else expected[param]
        standard_error = drawn.std(0) / len(values) ** 0.5
        assert ((drawn.mean(0) - exact).abs() <= 6 * standard_error + 1e-14).all()
        # the bound has to mean something
        assert standard_error.max() < 0.1 * exact.abs().max()


def test_variance_does_not_cancel():
    """Data at 1000 ± 0.01 gives the variance to (almost) all of its digits."""
    torch.manual_seed(0)
    X = 1000 + 0.01 * torch.randn(20, 4, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    for dtype, rtol in [(torch.float64, 1e-8), (torch.float32, 1e-2)]:
        x = X.to(dtype)
        layer = extend(nn.Linear(4, 1).to(dtype))
        layer.load_state_dict(model.state_dict())
        lossfunc = extend(nn.MSELoss(reduction="sum"))
        # the target is such that the cotangent is 2 for every sample
        with torch.no_grad():
            y = layer(x) - 1
        with backpack(Variance()):
            lossfunc(layer(x), y).backward()
        exact = (2 * x.double()).var(0, unbiased=False).unsqueeze(0)
        assert_agrees(layer.weight.variance.double(), exact, str(dtype), rtol)


@pytest.mark.parametrize("names", [("BatchGrad",), ("SqrtGGNExact", "KFLR")])
def test_one_instance_serves_many_passes(names: Tuple[str, ...]):
    """An instance does not remember earlier passes, and overwrites its fields."""
    case = SMALL[0]
    model, loss, X, y = case.build()
    model, loss = extend(model), extend(loss)
    extensions = [make(name, len(X[0])) for name in names]
    seen = []
    for _ in range(3):
        with backpack(*extensions):
            loss(model(*X), *y).backward()
        seen.append({n: getattr(model[0].weight, n) for n in names})
    for later in seen[1:]:
        for name in names:
            assert later[name] is not seen[0][name]
            assert_agrees(later[name], seen[0][name], name)


SINGLE = [*FIRST_ORDER, "DiagGGNExact", "BatchDiagGGNExact", "KFLR"]


def test_single_precision():
    """Layers large enough for what is faster in single precision only."""

    def fields(dtype: torch.dtype) -> Fields:
        torch.manual_seed(0)
        convolutions = [nn.Conv2d(2, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128), nn.Tanh()]
        model = nn.Sequential(*convolutions, *head, nn.Linear(128, 5))
        X, y = torch.rand(64, 2, 8, 8), torch.randint(5, (64,))
        model, loss = extend(model.to(dtype)), extend(nn.CrossEntropyLoss())
        value = loss(model(X.to(dtype)), y)
        with backpack(*(make(name, 64) for name in SINGLE)):
            value.backward()
        return {
            (name, param): getattr(p, make(name, 64).savefield)
            for name in SINGLE
            for param, p in model.named_parameters()
        }

    expected = fields(torch.float64)
    for key, value in fields(torch.float32).items():
        several = isinstance(value, list)
        pairs = zip(value, expected[key]) if several else [(value, expected[key])]
        for actual, reference in pairs:
            assert_agrees(actual, reference.float(), str(key), rtol=1e-3)
