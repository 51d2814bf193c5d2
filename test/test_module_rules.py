"""Quantities by module rules, against dense Hessians and slow recursions in float64.

Each row of ``CASES`` is a model of which every layer has a rule, or the generic one.
The oracles know nothing of module rules: the Hessian is differentiated twice by
autograd, and recursions use dense Jacobians of one sample at a time.
"""

import pickle
import random
import warnings
from contextlib import nullcontext
from copy import deepcopy
from functools import lru_cache, partial
from operator import getitem
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy
import oracle
import per_sample
import pytest
import torch
import torch.nn.functional as F
from cases import F64, N, Problem, Temperature, classes, drawing, like, randn, randomize
from oracle import assert_agrees, batch_ggn, parameters, sample
from per_sample import Lambda
from support import WITHOUT_RULE
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.functional import hessian
from torch.nn import Module, Sequential
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import spectral_norm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend
from backpack.core.table import LAYERS
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions import (
    GGNMP,
    HBP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    Variance,
)
from backpack.extensions.secondorder.diag_hessian.signed_columns import SignedColumns
from backpack.extensions.secondorder.sqrt_ggn.activations import (
    SqrtGGNReLU,
    SqrtGGNSigmoid,
    SqrtGGNTanh,
)
from backpack.utils.hooks import EXTENDED


class Case(NamedTuple):
    """A row: a model, its input, a loss, and what is not defined for it."""

    id: str
    model: Callable[[], Module]
    X: Callable[[], Tuple[Tensor, ...]]
    without: Tuple[str, ...] = ()
    loss: Callable[[], Module] = nn.CrossEntropyLoss
    y: Callable[[Tensor], Tuple[Tensor, ...]] = classes

    def build(self) -> Problem:
        """Build the case; the same numbers every time."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            X = self.X()
            model = randomize(self.model().to(F64))
            with torch.no_grad():
                prediction = model(*X)
            return Problem(model, self.loss().to(F64), X, self.y(prediction))


class Square(Module):
    """A module without a rule, and without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Square each element of ``[N, *]``, and mix neighbors."""
        return x * x.roll(1, dims=-1)


class Gate(Module):
    """A module with two inputs that interact."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Multiply ``[N, *]`` with the sine of ``[N, *]``."""
        return x * y.sin()


class Power(Module):
    """A module that is not linear in its parameter."""

    def __init__(self, features: int):
        """Create the exponents."""
        super().__init__()
        self.exponent = nn.Parameter(torch.rand(features))

    def forward(self, x: Tensor) -> Tensor:
        """Raise the exponential of ``[N, features]`` to a power."""
        return (self.exponent * x).exp()


class Derivative(Module):
    """A module that differentiates what it computes, as physics does."""

    def __init__(self, alone: bool = False):
        """Create the parameters.

        Args:
            alone: Whether the derivative is all that it returns. Default: ``False``.
        """
        super().__init__()
        self.alone = alone
        self.first = nn.Parameter(torch.rand(4, 3))
        self.last = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply a network's output with its derivative by ``[N, 3]``."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = (x @ self.first.T).tanh() @ self.last
            (derivative,) = grad(u.sum(), x, create_graph=True)
        return derivative if self.alone else u.unsqueeze(1) * derivative


class InnerStep(Module):
    """A module that takes a step on its weight before it uses it."""

    def __init__(self):
        """Create the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3]`` to ``[N, 4]``."""
        error = (x @ self.weight.T).tanh().square().mean()
        (step,) = grad(error, self.weight, create_graph=True)
        return x @ (self.weight - 0.5 * step).T


def layer(
    id: str, make: Callable[[], Module], *shape: int, without: Tuple[str, ...] = ()
) -> Case:
    """Make a row for a layer between a layer with parameters and a smooth head."""

    def model() -> Module:
        x = torch.rand(2, *shape, dtype=F64)
        first = _first(shape)
        module = make().to(F64).eval()
        features = module(first(x))[0].numel()
        head = [nn.Flatten(), nn.Sigmoid(), nn.Linear(features, 3)]
        return Sequential(first, module, *head)

    return Case(id, model, randn(N, *shape), without)


def _first(shape: Tuple[int, ...]) -> Module:
    if len(shape) == 1:
        return nn.Linear(shape[0], shape[0]).to(F64)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 2]
    return conv(shape[0], shape[0], 1).to(F64)


SHARED = ("kfra",)  # positions share a weight: refused without a choice, or branches
NON_LINEAR = ("pchmp",)  # not linear in a parameter

ACTIVATIONS = [
    layer(cls.__name__, cls, 3)
    for cls in (
        nn.ReLU,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.Sigmoid,
        nn.LogSigmoid,
        nn.Tanh,
        nn.CELU,
        nn.GELU,
        nn.Hardswish,
        nn.Mish,
        nn.SiLU,
        nn.Softplus,
        nn.Softsign,
        nn.Tanhshrink,
        nn.Hardshrink,
        nn.Hardsigmoid,
        nn.Hardtanh,
        nn.ReLU6,
        nn.Softshrink,
        nn.PReLU,
    )
    if cls is not nn.PReLU
] + [
    layer("Threshold", lambda: nn.Threshold(0.1, 0.5), 3),
    layer("PReLU", nn.PReLU, 3, without=NON_LINEAR),
    layer("GLU", lambda: nn.GLU(1), 4),
    layer("Softmax", lambda: nn.Softmax(1), 3),
    layer("LogSoftmax", lambda: nn.LogSoftmax(1), 3),
]

POOLING = [
    layer(
        f"{kind}{d}d", lambda cls=getattr(nn, f"{kind}{d}d"), a=a: cls(a), 2, *[3] * d
    )
    for kind, a in [
        ("AvgPool", 2),
        ("MaxPool", 2),
        ("AdaptiveAvgPool", 2),
        ("AdaptiveMaxPool", 2),
    ]
    for d in (1, 2, 3)
]

SHAPES = [
    layer("Identity", nn.Identity, 3),
    layer("ScaleModule", lambda: ScaleModule(-0.7), 3),
    layer("Dropout-eval", nn.Dropout, 3),
    layer("AlphaDropout-eval", nn.AlphaDropout, 3),
    layer("Unflatten", lambda: nn.Unflatten(1, (2, 2)), 4),
    layer("Pad", lambda: Pad((1, 2)), 2, 2),
    layer("ZeroPad2d", lambda: nn.ZeroPad2d(1), 1, 2, 2),
    layer("ConstantPad1d", lambda: nn.ConstantPad1d(1, 2.0), 2, 2),
    layer("CircularPad1d", lambda: nn.CircularPad1d(1), 2, 3),
    layer("ReflectionPad2d", lambda: nn.ReflectionPad2d(1), 1, 3, 2),
    layer("ReplicationPad1d", lambda: nn.ReplicationPad1d(2), 2, 2),
    layer("Slicing", lambda: Slicing((slice(None), slice(1), 0)), 2, 3),
    layer("Slicing-nothing", lambda: Slicing(slice(None)), 3),
    layer("Permute", lambda: Permute(0, 2, 1), 2, 3),
    layer("Upsample", lambda: nn.Upsample(scale_factor=2), 2, 2),
    layer("PixelShuffle", lambda: nn.PixelShuffle(2), 4, 1, 2),
    layer("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), 1, 2, 2),
    layer("ChannelShuffle", lambda: nn.ChannelShuffle(2), 4, 1, 2),
]

WITH_PARAMETERS = [
    *[
        layer(f"Conv{d}d", lambda c=getattr(nn, f"Conv{d}d"): c(2, 2, 2), 2, *[3] * d)
        for d in (1, 2, 3)
    ],
    *[
        layer(
            f"ConvTranspose{d}d",
            lambda c=getattr(nn, f"ConvTranspose{d}d"): c(2, 1, 2, stride=2),
            2,
            *[2] * d,
        )
        for d in (1, 2, 3)
    ],
    layer(
        "ConvTranspose1d-padded-by-its-stride",
        lambda: nn.ConvTranspose1d(2, 1, 3, dilation=2, output_padding=1),
        2,
        2,
    ),
    layer(
        "Conv2d-groups", lambda: nn.Conv2d(2, 4, 2, groups=2), 2, 2, 3, without=SHARED
    ),
    layer("Linear-sequence", lambda: nn.Linear(2, 3), 2, 2, without=SHARED),
    *[
        layer(f"BatchNorm{d}d", lambda c=getattr(nn, f"BatchNorm{d}d"): c(2), *shape)
        for d, shape in [(1, (2, 3)), (2, (2, 2, 1)), (3, (2, 1, 2, 1))]
    ],
    *[
        layer(
            f"InstanceNorm{d}d",
            lambda c=getattr(nn, f"InstanceNorm{d}d"): c(2, affine=True),
            2,
            *(3, 2, 1)[:d],
        )
        for d in (1, 2, 3)
    ],
    layer("LayerNorm", lambda: nn.LayerNorm(3), 3),
    layer("RMSNorm", lambda: nn.RMSNorm(3), 3),
    layer("GroupNorm", lambda: nn.GroupNorm(2, 4), 4, 2),
    layer("Power", lambda: Power(3), 3, without=NON_LINEAR),
    layer("Temperature", Temperature, 3, without=NON_LINEAR),
    layer("Square", Square, 3),
    *[
        layer(
            cls.__name__,
            lambda cls=cls: Sequential(cls(2, 2, batch_first=True), ReduceTuple()),
            2,
            2,
            without=NON_LINEAR + SHARED,
        )
        for cls in (nn.RNN, nn.LSTM, nn.GRU)
    ],
    *[
        Case(
            f"Derivative-{alone}",
            lambda alone=alone: Sequential(Derivative(alone), nn.Linear(3, 3)),
            lambda: (torch.rand(N, 3, dtype=F64),),
            without=NON_LINEAR,
        )
        for alone in (False, True)
    ],
    Case(
        "Embedding",
        lambda: Sequential(nn.Embedding(4, 3), nn.Tanh(), nn.Linear(3, 3)),
        lambda: (torch.tensor([0, 2, 2]),),
    ),
    Case(
        "Embedding-padded",
        lambda: Sequential(
            nn.Embedding(4, 3, padding_idx=2), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3)
        ),
        lambda: (torch.tensor([[0, 2], [2, 1], [2, 2]]),),
        SHARED,
    ),
    Case(
        "weight_norm",
        lambda: Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            nn.Tanh(),
            nn.Linear(3, 3),
        ),
        randn(N, 3),
        NON_LINEAR,
    ),
]


def _residual() -> Module:
    inner = Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    block = Parallel(nn.Identity(), inner, Sequential(nn.Linear(3, 3), Square()))
    return Sequential(nn.Linear(3, 3), nn.Sigmoid(), block, nn.LayerNorm(3))


def _nested() -> Module:
    inner = Parallel(Sequential(nn.Linear(3, 3), nn.Sigmoid()), nn.Tanh())
    outer = Parallel(nn.Identity(), Sequential(nn.Tanh(), inner, nn.Linear(3, 3)))
    return Sequential(nn.Linear(2, 3), outer, nn.SiLU(), nn.Linear(3, 3))


def _gated() -> Module:
    gate = Parallel(
        nn.Linear(3, 3), Sequential(nn.Linear(3, 3), nn.Tanh()), merge_module=Gate()
    )
    return Sequential(nn.Linear(3, 3), gate, nn.Linear(3, 3))


class Adapters(Module):
    """Two scales, which are zero: the output does not tell them apart."""

    def __init__(self):
        """Create the scales."""
        super().__init__()
        self.u, self.v = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(
        self, x: Tensor, a: float = 1.0, b: float = 1.0, *, c: float = 1.0
    ) -> Tensor:
        """Scale ``[N, 3]`` in three ways."""
        return c * x + a * torch.tanh(x * self.u) + b * torch.sin(x * self.v)


class ByName(Module):
    """Calls a module with arguments that have names."""

    def __init__(self, module: Module, **options: Any):
        """Keep the module and the arguments."""
        super().__init__()
        self.module, self.options = module, options

    def forward(self, x: Tensor) -> Tensor:
        """Call the module."""
        return self.module(x, **self.options)


NAMED = {"second": {"b": 3.0}, "both": {"c": 2.0, "b": 0.5}, "last": {"c": 2.0}}
NETWORKS = [
    *[
        Case(
            f"by-name-{name}",
            lambda options=options: Sequential(
                nn.Linear(3, 3), ByName(Adapters(), **options), nn.Linear(3, 3)
            ),
            randn(N, 3),
            NON_LINEAR,
        )
        for name, options in NAMED.items()
    ],
    Case(
        "passed-on",  # a view of what a linear layer has computed
        lambda: Sequential(
            *(nn.Linear(3, 2), nn.Identity(), nn.Dropout(0.0), nn.Tanh()),
            *(nn.Identity(), nn.Flatten(), nn.Linear(4, 3), nn.Identity()),
        ),
        randn(N, 2, 3),
        SHARED,
    ),
    Case("residual", _residual, randn(N, 3), SHARED),
    Case("nested", _nested, randn(N, 2), SHARED),
    Case("gated", _gated, randn(N, 3), SHARED),
    Case(
        "deep",  # more columns than features: they are combined
        lambda: Sequential(
            *[m for _ in range(4) for m in (nn.Linear(3, 3), nn.Sigmoid(), nn.Tanh())]
        ),
        randn(N, 3),
    ),
    Case(
        "narrow",
        lambda: Sequential(
            nn.Linear(3, 2),
            nn.Sigmoid(),
            nn.Linear(2, 6),
            nn.Tanh(),
            nn.Linear(6, 6),
            nn.Sigmoid(),
            nn.Linear(6, 3),
        ),
        randn(N, 3),
    ),
    Case(
        "mse",
        lambda: Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        randn(N, 3),
        loss=nn.MSELoss,
        y=like,
    ),
    *[
        Case(
            f"numbers-{last.__name__}",
            lambda last=last: Sequential(
                *(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1), nn.Flatten(0), last())
            ),
            randn(N, 3),
            without,
            loss,
            like,
        )
        for last, loss, without in (
            (nn.Sigmoid, nn.MSELoss, ()),
            (nn.ReLU, nn.SmoothL1Loss, ()),
            (nn.Softplus, nn.BCEWithLogitsLoss, ()),
            (Temperature, nn.MSELoss, NON_LINEAR),
        )
    ],
    Case(
        "bce",
        lambda: Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        randn(N, 3),
        loss=lambda: nn.BCEWithLogitsLoss(reduction="sum"),
        y=lambda p: (torch.rand_like(p).round(),),
    ),
    Case(
        "huber",
        lambda: Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        randn(N, 3),
        loss=nn.SmoothL1Loss,
        y=like,
    ),
]

CASES = [*ACTIVATIONS, *POOLING, *SHAPES, *WITH_PARAMETERS, *NETWORKS]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])


def run(problem: Problem, *extensions: Any, factor: float = 1.0) -> Tensor:
    """Run a backward pass on an extended problem, and return the loss.

    Nothing may depend on where tensors are created by default.
    """
    model, loss = extend(problem.model), extend(problem.loss)
    with torch.device("meta"):
        value = loss(model(*problem.X), *problem.y)
        value = value if factor == 1 else factor * value
        with backpack(*extensions):
            value.backward()
    return value


@lru_cache(maxsize=None)
def solved(case: Case) -> Problem:
    """Compute all quantities that are defined for a case in one backward pass."""
    problem = case.build()
    extensions = {
        "diag_h": DiagHessian(),
        "diag_h_batch": BatchDiagHessian(),
        "hmp": HMP(),
        "ggnmp": GGNMP(),
        "pchmp": PCHMP(modify="clip"),
        "pchmp_abs": PCHMP("pchmp_abs", modify="abs"),
        "kfra": KFRA(),
    }
    for name in case.without:
        for field in [field for field in extensions if field.startswith(name)]:
            del extensions[field]
    run(problem, *extensions.values())
    # each pass looks at all models that are alive
    for module in (problem.model, problem.loss):
        EXTENDED.discard(module)
    return problem


class HardSigmoid(Module):
    """What ``Hardsigmoid`` computes, which autograd differentiates only once."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, *]`` to values between zero and one."""
        zero = torch.zeros((), dtype=x.dtype, requires_grad=True)
        (slope,) = grad(F.hardsigmoid(zero), zero)  # PyTorch's 1/6 has single precision
        value = F.relu6(x + 3) * slope
        return value + (F.hardsigmoid(x) - value).detach()


def twice_differentiable(model: Module) -> Module:
    """Copy a model, and replace what autograd can't differentiate twice."""
    if not any(isinstance(m, nn.Hardsigmoid) for m in model.modules()):
        return model
    return Sequential(
        *[HardSigmoid() if isinstance(m, nn.Hardsigmoid) else m for m in model]
    )


def scale_of(dense: Tensor) -> float:
    """Return the size of the largest entry, above rounding errors of zero.

    It is added to what is compared, as small entries are differences of large ones.
    """
    return max(float(dense.abs().max()), 1e-6)


class ByFormula(TorchFunctionMode):
    """Normalizes weights by hand: PyTorch has a wrong second derivative of that."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        if func is torch._weight_norm:
            v, g, dim = args
            assert dim == 0
            return (v.T * (g.flatten() / v.square().sum(1).sqrt())).T
        return func(*args, **(kwargs or {}))


def hessians(problem: Problem) -> Dict[str, Tensor]:
    """Differentiate the loss twice, ``[N, P, P]`` for each sample and parameter."""
    _, loss, X, y = problem
    model = twice_differentiable(problem.model)
    params = parameters(model)
    blocks: Dict[str, List[Tensor]] = {name: [] for name in params}
    options = {"create_graph": True, "materialize_grads": True}
    with ByFormula():
        constants = [model(*sample(X, n)).detach() for n in range(len(X[0]))]
        for n in range(len(constants)):
            predictions = list(constants)
            predictions[n] = model(*sample(X, n))
            value = loss(torch.cat(predictions), *y)
            gradients = grad(value, [*params.values()], **options)
            for (name, param), gradient in zip(params.items(), gradients):
                blocks[name].append(rows(gradient, param))
    return {name: torch.stack(parts) for name, parts in blocks.items()}


@lru_cache(maxsize=None)
def hessians_of(case: Case) -> Dict[str, Tensor]:
    """Differentiate the loss of a case twice, whose model is not extended."""
    return hessians(case.build())


def rows(gradient: Tensor, param: Tensor) -> Tensor:
    """Differentiate a tensor, element by element."""
    if not gradient.requires_grad:
        return param.new_zeros(gradient.numel(), param.numel())
    return oracle.jacobian(gradient, [param])[0].reshape(gradient.numel(), -1)


def assert_products(problem: Problem, field: str, dense: Dict[str, Tensor]) -> None:
    """Compare functions with dense matrices, for several vectors and for one."""
    for name, param in parameters(problem.model).items():
        function = getattr(param, field)
        vectors = torch.randn(2, *param.shape, dtype=F64)
        expected = (vectors.reshape(2, -1) @ dense[name]).reshape(vectors.shape)
        products = function(vectors)
        assert not products.requires_grad
        scale = scale_of(dense[name])
        assert_agrees(products + scale, expected + scale, f"{field} {name}")
        single = function(vectors[0])
        assert_agrees(single + scale, expected[0] + scale, f"{field} {name}, single")
        assert_agrees(function(vectors[:0]), vectors[:0], f"{field} {name}, none")


@pytest.fixture(autouse=True)
def precise(request: pytest.FixtureRequest) -> None:
    """Skip what PyTorch computes to some 1e-8 elsewhere, in double precision, too."""
    if "[weight_norm" in request.node.name:
        request.getfixturevalue("cpu")


@EVERY_CASE
def test_diag_hessian(case: Case):
    """The diagonals, in total and for each sample, are those of dense Hessians."""
    problem = solved(case)
    for name, dense in hessians_of(case).items():
        param = problem.model.get_parameter(name)
        batch = dense.diagonal(dim1=1, dim2=2).reshape(len(dense), *param.shape)
        scale = scale_of(dense)
        assert_agrees(param.diag_h_batch + scale, batch + scale, f"batch {name}")
        assert_agrees(param.diag_h + scale, batch.sum(0) + scale, f"total {name}")
        assert not param.diag_h.requires_grad


@EVERY_CASE
def test_hmp(case: Case):
    """The products are those with the dense Hessian's blocks."""
    problem = solved(case)
    dense = {name: blocks.sum(0) for name, blocks in hessians_of(case).items()}
    assert_products(problem, "hmp", dense)


def test_products_of_a_renormalized_table():
    """Directions are looked up, but neither renormalized nor written to."""
    model = Sequential(nn.Embedding(4, 2, max_norm=0.5), nn.Flatten(), nn.Linear(6, 3))
    ids, y = torch.tensor([[0, 1, 2], [3, 0, 1]]), torch.tensor([0, 1])
    run(Problem(model.to(F64), nn.CrossEntropyLoss(), (ids,), (y,)), HMP(), GGNMP())
    table = model[0].weight
    for product in (table.hmp, table.ggnmp):
        direction = torch.full((1, 4, 2), 9.0, dtype=F64)
        assert_agrees(product(direction), 9 * product(torch.ones_like(direction)))
        assert (direction == 9).all()


class Shifted(Module):
    """A normalization with a bias alone."""

    def __init__(self, function: Callable[..., Tensor]):
        """Store the function of data and bias."""
        super().__init__()
        self.function, self.bias = function, nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each sample."""
        return self.function(x, self.bias)


BY_DIFFERENCES: Dict[str, Callable[[], Module]] = {
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "layer-norm": lambda: Shifted(lambda x, b: F.layer_norm(x, [3], bias=b, eps=0.1)),
    "layer-norm-by-position": lambda: Shifted(
        lambda x, b: torch.layer_norm(x, [3], None, b, 0.1)
    ),
    "native-layer-norm": lambda: Shifted(
        lambda x, b: torch.native_layer_norm(x, [3], None, b, 0.1)[0]
    ),
    "batch-norm": lambda: Shifted(
        lambda x, b: F.batch_norm(x, torch.zeros_like(b), torch.ones_like(b), None, b)
    ),
    "instance-norm": lambda: Shifted(
        lambda x, b: F.instance_norm(torch.stack([x, x.sin()], 2), bias=b, eps=0.1)[
            ..., 0
        ]
    ),
}


@pytest.mark.parametrize("name", BY_DIFFERENCES)
def test_by_differences(name: str):
    """The Hessian is that of finite differences, which autograd's is not."""
    model = Sequential(BY_DIFFERENCES[name](), nn.Tanh(), nn.Linear(3, 3)).to(F64)
    X, y = torch.randn(N, 3, dtype=F64), torch.randint(3, (N,))
    loss, v = nn.CrossEntropyLoss(), list(model[0].parameters())[-1]
    D = v.numel()
    columns, eye = [], 1e-5 * torch.eye(D, dtype=F64).view(D, *v.shape)
    start = v.detach().clone()
    for step in eye:
        gradients = []
        for value in (start + step, start - step):
            v.data.copy_(value)
            gradients.append(grad(loss(model(X), y), v)[0].flatten())
        columns.append((gradients[0] - gradients[1]) / 2e-5)
    v.data.copy_(start)
    model, loss = extend(model), extend(loss)
    with backpack(HMP(), DiagHessian()):
        loss(model(X), y).backward()
    dense, products = torch.stack(columns), v.hmp(eye * 1e5).view(D, D)
    torch.testing.assert_close(products, dense, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(v.diag_h.flatten(), dense.diag(), atol=1e-7, rtol=1e-6)


class Reaching(Module):
    """Takes its weight by other ways than its name."""

    def __init__(self, way: Callable[[Module], Callable[[], Tensor]]):
        """Store the weight, and a way to it."""
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3, dtype=F64))
        self.way = way(self)

    def own(self) -> Tensor:
        """Return the weight."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute what is not linear in the weight."""
        return F.linear(x, self.weight * self.way()).exp()


class Copied(torch.autograd.Function):
    """A function that no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Pass on."""
        return g


def patched(of: Callable[[Callable], Callable]) -> Module:
    """Give a layer a forward pass of its own."""
    layer = nn.Linear(3, 3).to(F64)
    layer.forward = of(layer.forward)  # type: ignore[method-assign]
    return layer


def asked(weight: Tensor) -> Tensor:
    """Return a parameter, and nothing else."""
    assert isinstance(weight, nn.Parameter)
    return weight


REACHED: Dict[str, Callable[[], Module]] = {
    "bound-method": lambda: Reaching(lambda m: m.own),
    "closure": lambda: Reaching(lambda m: lambda: m.weight),
    "kept": lambda: Reaching(lambda m: partial(getitem, [m.weight], 0)),
    "function": lambda: Reaching(lambda m: lambda: Copied.apply(m.weight)),
    "asked-for-its-class": lambda: Lambda(
        lambda m, x: F.linear(x, asked(m.weight)).exp(), weight=per_sample.param(3, 3)
    ),
    "patched": lambda: patched(lambda forward: lambda x: forward(x).exp()),
    "wrapped": lambda: patched(lambda forward: lambda x: forward(x)),
}


@pytest.mark.parametrize("name", REACHED)
def test_parameter_that_is_reached_in_another_way(name: str):
    """A repetition that takes the module's own parameter is differentiated by that."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 3), nn.Tanh(), REACHED[name](), nn.Linear(3, 3)
    model, loss = Sequential(*layers).to(F64), nn.CrossEntropyLoss()
    X, y = torch.randn(N, 3, dtype=F64), torch.randint(3, (N,))
    p = model[2].weight
    (slope,) = grad(loss(model(X), y), p, create_graph=True)
    dense, ggn = rows(slope, p), torch.zeros(9, 9, dtype=F64)
    for n in range(N):
        f = model(X[n : n + 1])
        jacobian, q = rows(f, p), f.detach().softmax(1)[0]
        ggn += jacobian.T @ (q.diag() - q.outer(q)) @ jacobian / N
    model, loss = extend(model), extend(loss)
    with backpack(HMP(), DiagHessian(), GGNMP()):
        loss(model(X), y).backward()
    eye = torch.eye(9, dtype=F64).view(9, 3, 3)
    assert_agrees(p.hmp(eye).view(9, 9), dense, "hmp")
    assert_agrees(p.diag_h.flatten(), dense.diagonal(), "diag_h")
    assert_agrees(p.ggnmp(eye).view(9, 9), ggn, "ggnmp")


def test_parameter_that_is_reached_in_another_way_and_has_hooks():
    """What the hooks would see is not theirs."""
    model = Sequential(Reaching(lambda m: m.own), nn.Linear(3, 3).to(F64))
    model, loss = extend(model), extend(nn.MSELoss())
    seen: List[Tensor] = []
    model[0].weight.register_hook(seen.append)
    X = torch.randn(N, 3, dtype=F64)
    with pytest.raises(RuntimeError, match="by way of a bound method"):
        with backpack(DiagHessian()):
            loss(model(X), X).backward()
    assert len(seen) <= 1


@EVERY_CASE
def test_ggnmp(case: Case):
    """The products are those with the dense GGN's blocks."""
    problem = solved(case)
    blocks = batch_ggn(*case.build())
    dense = {name: parts.sum(0) for name, parts in blocks.items()}
    assert_products(problem, "ggnmp", dense)


HOOKED = pytest.mark.parametrize("where", ["0", "1", "2", "", "loss"])
HOOKS = pytest.mark.parametrize(
    "kind", ["full_backward_hook", "full_backward_pre_hook"]
)


def hooked(where: str, kind: str, hook: Callable) -> Problem:
    """Make a problem with a hook of a module, of the model, or of the loss."""
    torch.manual_seed(0)
    model = Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)
    X, y = torch.randn(N, 3, dtype=F64, requires_grad=True), torch.arange(N) % 2
    problem = Problem(model, nn.CrossEntropyLoss(), (X,), (y,))
    module = problem.loss if where == "loss" else model.get_submodule(where)
    getattr(module, f"register_{kind}")(hook)
    return problem


@HOOKS
@HOOKED
def test_backward_hooks_that_look(where: str, kind: str):
    """Quantities go past the nodes where hooks of modules see the gradient."""
    seen: List[Any] = []
    problem = hooked(where, kind, lambda *gradients: seen.append(gradients))
    run(problem, DiagHessian(), KFRA(), GGNMP(), HMP())
    assert seen
    same = hooked(where, kind, lambda *_: None)
    dense = {name: blocks.sum(0) for name, blocks in hessians(same).items()}
    assert_products(problem, "hmp", dense)
    for name, param in parameters(problem.model).items():
        assert_agrees(param.diag_h.flatten(), dense[name].diagonal(), name)


@HOOKS
@HOOKED
def test_backward_hooks_that_change(where: str, kind: str):
    """What a hook makes of the gradient is no part of a Hessian."""

    def double(module: Module, *gradients: Any) -> Tuple:
        return tuple(None if g is None else 2 * g for g in gradients[0])

    problem = hooked(where, kind, double)
    with pytest.raises(NotImplementedError, match="a hook changes the gradient"):
        run(problem, DiagHessian())


@pytest.mark.parametrize("field", ["hmp", "ggnmp"])
def test_products_in_inference_mode(field: str):
    """Products are formed where nothing is recorded, too, of vectors from there."""
    problem = solved(CASES[0])
    for name, param in parameters(problem.model).items():
        vectors = torch.randn(2, *param.shape, dtype=F64)
        expected = getattr(param, field)(vectors)
        with torch.inference_mode():
            products = getattr(param, field)(vectors)
            again = getattr(param, field)(vectors.clone())
        assert_agrees(products, expected, name)
        assert_agrees(again.clone(), expected, name)


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Differentiate all outputs with respect to all inputs, ``[out, in]``."""
    x = x.detach().requires_grad_()
    return rows(function(x), x)


def chain_hessian(
    modules: List[Module], loss: Callable[[Tensor], Tensor], x: Tensor, modify: Callable
) -> Tensor:
    """Compute a sample's curvature at a module's input by the dense recursion."""
    if not modules:
        return oracle.hessian(loss, x)
    module, *after = modules
    z = module(x).detach()

    def rest(z: Tensor) -> Tensor:
        for later in after:
            z = later(z)
        return loss(z)

    leaf = z.clone().requires_grad_()
    (delta,) = grad(rest(leaf), leaf)
    above = chain_hessian(after, loss, z, modify)
    J = jacobian(module, x)

    def gradient(x: Tensor) -> Tensor:
        (result,) = grad(module(x), x, delta, create_graph=True)
        return result

    residual = jacobian(gradient, x)
    eigenvalues, Q = torch.linalg.eigh((residual + residual.T) / 2)
    return J.T @ above @ J + Q @ torch.diag(modify(eigenvalues)) @ Q.T


PCH_CASES = [
    case
    for case in CASES
    if "pchmp" not in case.without
    and case.id
    in ("Sigmoid", "GELU", "Softmax", "LayerNorm", "narrow", "mse", "Conv1d")
]


@pytest.mark.parametrize("case", PCH_CASES, ids=[case.id for case in PCH_CASES])
@pytest.mark.parametrize("field", ["pchmp", "pchmp_abs"])
def test_pchmp(case: Case, field: str):
    """The products are those of a dense recursion with modified residuals."""
    problem = solved(case)
    model, loss, X, y = case.build()
    modify = torch.abs if field == "pchmp_abs" else lambda e: e.clamp(min=0)
    modules = [m for m in model if not isinstance(m, ReduceTuple)]
    predictions = model(*X).detach()
    dense: Dict[str, Any] = {name: 0.0 for name in parameters(model)}
    for n in range(len(predictions)):

        def loss_n(prediction: Tensor, n: int = n) -> Tensor:
            parts = list(predictions.split(1))
            parts[n] = prediction
            return loss(torch.cat(parts), *y)

        x = X[0][n : n + 1]
        for k, module in enumerate(modules):
            for name, param in module.named_parameters():

                def forward(p: Tensor, m: Module = module, i: str = name, x: Any = x):
                    return torch.func.functional_call(m, {i: p}, (x,))

                z = module(x).detach()
                above = chain_hessian(modules[k + 1 :], loss_n, z, modify)
                J = jacobian(forward, param)
                dense[f"{k}.{name}"] = dense[f"{k}.{name}"] + J.T @ above @ J
            x = module(x).detach()
    assert_products(problem, field, dense)


def kfra_factors(problem: Problem) -> Dict[str, Tensor]:
    """Compute B of each parameter by the slow recursion, layer by layer."""
    model, loss, X, y = problem
    inputs, modules = [X[0]], _flat(model)
    for module in modules:
        inputs.append(_first_output(module(inputs[-1])).detach())
    prediction = inputs[-1]
    full = oracle.hessian(lambda p: loss(p, *y), prediction)
    size = len(prediction)
    full = full.reshape(size, prediction[0].numel(), size, -1)
    B = sum(full[n, :, n, :] for n in range(size))
    result = {}
    names = {param: name for name, param in model.named_parameters()}
    for module, x in reversed(list(zip(modules, inputs))):
        for p_name, param in module.named_parameters():
            result[names[param]] = _output_factor(module, p_name, param, x, B)
        if x.is_floating_point():
            total = 0.0
            for n in range(size):
                x_n = x[n : n + 1]
                J = jacobian(lambda x, m=module: _first_output(m(x)), x_n)
                total = total + J.T @ B @ J
            B = total / size
    return result


def _flat(model: Module) -> List[Module]:
    nested = [_flat(m) if isinstance(m, Sequential) else [m] for m in model]
    return [m for part in nested for m in part if not isinstance(m, ReduceTuple)]


def _first_output(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _output_factor(
    module: Module, name: str, param: Tensor, x: Tensor, B: Tensor
) -> Tensor:
    convs = (nn.modules.conv._ConvNd,)
    if isinstance(module, convs):
        channels = module.out_channels
        blocks = B.reshape(channels, B.shape[0] // channels, channels, -1)
        return blocks.sum((1, 3))
    if isinstance(module, (nn.Linear, nn.Embedding)) and name in ("weight", "bias"):
        return B
    total = 0.0
    for n in range(len(x)):

        def forward(p: Tensor, x: Tensor = x[n : n + 1]) -> Tensor:
            return _first_output(torch.func.functional_call(module, {name: p}, (x,)))

        J = jacobian(forward, param)
        total = total + J.T @ B @ J
    return total / len(x)


KFRA_CASES = [case for case in CASES if "kfra" not in case.without]


@pytest.mark.parametrize("case", KFRA_CASES, ids=[case.id for case in KFRA_CASES])
def test_kfra(case: Case):
    """B is that of the slow recursion, and A that of KFLR."""
    problem = solved(case)
    expected = kfra_factors(problem)
    twin = case.build()
    run(twin, KFLR())
    for name, param in problem.model.named_parameters():
        kfra, kflr = list(param.kfra), twin.model.get_parameter(name).kflr
        position = 1 if isinstance(_owner(problem.model, name), nn.Embedding) else 0
        B = kfra.pop(position)
        scale = scale_of(B)
        assert_agrees(B + scale, expected[name] + scale, f"B {name}")
        assert_agrees(kfra, kflr[:position] + kflr[position + 1 :], f"A {name}")


def _owner(model: Module, name: str) -> Module:
    return model.get_submodule(name.rpartition(".")[0])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", ["Conv2d-groups", "Linear-sequence", "Conv1d"])
def test_kfra_with_a_choice(case: str, sharing: str):
    """For one sample, KFRA is KFLR for every choice."""
    (row,) = [c for c in CASES if c.id == case]
    problem = row.build()
    problem = problem._replace(X=(problem.X[0][:1],), y=(problem.y[0][:1],))
    run(problem, KFRA(weight_sharing=sharing), KFLR(weight_sharing=sharing))
    for name, param in problem.model.named_parameters():
        if name != "0.weight" or sharing == "reduce":
            assert_agrees(param.kfra, param.kflr, name)


RECURRENT = ("RNN", "LSTM", "GRU")
ONE_SAMPLE = [
    c
    for c in CASES
    if c.id in ("Sigmoid", "Conv2d", "LayerNorm", "narrow", "Embedding", *RECURRENT)
]


@pytest.mark.parametrize("case", ONE_SAMPLE, ids=[case.id for case in ONE_SAMPLE])
def test_kfra_is_kflr_for_one_sample(case: Case):
    """Without an average, the recursions are the same."""
    problem = case.build()
    problem = problem._replace(X=(problem.X[0][:1],), y=(problem.y[0][:1],))
    sharing = "expand" if case.id in RECURRENT else None
    run(problem, KFRA(sharing), KFLR(sharing))
    for name, param in problem.model.named_parameters():
        assert_agrees(param.kfra, param.kflr, name)


def test_kflr_is_exact_for_deep_linear_networks():
    """For one sample, the Kronecker product is the GGN's block."""
    model = Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).to(F64)
    X, y = torch.randn(1, 3, dtype=F64), torch.randn(1, 3, dtype=F64)
    problem = Problem(model, nn.MSELoss(), (X,), (y,))
    run(problem, KFLR(), KFRA(), GGNMP())
    for name, param in model.named_parameters():
        basis = torch.eye(param.numel(), dtype=F64).reshape(-1, *param.shape)
        block = param.ggnmp(basis).flatten(1)
        for factors in (param.kflr, param.kfra):
            product = factors[0]
            for other in factors[1:]:
                product = torch.kron(product, other)
            assert_agrees(product, block, name)


def test_kfac_becomes_exact_for_deep_linear_networks():
    """For one sample, the Kronecker product approaches the GGN's block.

    With M draws, entries of B deviate by some multiple of 1/√M of its scale.
    """
    model = Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).to(F64)
    X, y = torch.randn(1, 3, dtype=F64), torch.randint(3, (1,))
    draws = 4000
    run(Problem(model, nn.CrossEntropyLoss(), (X,), (y,)), KFAC(draws), GGNMP())
    for param in model.parameters():
        basis = torch.eye(param.numel(), dtype=F64).reshape(-1, *param.shape)
        block = param.ggnmp(basis).flatten(1)
        product = param.kfac[0]
        for other in param.kfac[1:]:
            product = torch.kron(product, other)
        deviation = (product - block).abs().max() / block.abs().max()
        assert 0 < deviation < 6 * draws**-0.5


def test_hbp_options():
    """HBP with KFLR's and KFRA's options gives their factors, and tells the options."""
    problem = next(case for case in CASES if case.id == "narrow").build()
    average = HBP("ggn", "sum", "average", "E[J^T E(H) J]", "average")
    exact = HBP("ggn", "exact", "average", "E[J^T E(H) J]", "exact")
    root = HBP("ggn", "exact", "sqrt", "E[J^T E(H) J]", "root")
    run(problem, average, exact, root, KFRA(), KFLR())
    for name, param in problem.model.named_parameters():
        assert_agrees(param.average, param.kfra, name)
        assert_agrees(param.exact, param.kfra, name)
        assert_agrees(param.root, param.kflr, name)
    for ext in (KFAC(), KFLR(), KFRA(), root):
        assert isinstance(ext, HBP)
        assert ext.get_curv_type() == "ggn"
        assert ext.get_ea_strategy() == "E[J^T E(H) J]"
    assert KFAC(mc_samples=3).get_num_mc_samples() == 3
    assert KFAC().get_loss_hessian_strategy() == "sampling"
    for ext in (KFAC(), KFLR(), KFRA()):  # attributes of BackPACK 1.7
        assert ext.loss_hessian_strategy == ext.get_loss_hessian_strategy()
        assert (ext.curv_type, ext.ea_strategy) == ("ggn", ext.get_ea_strategy())
        assert ext.backprop_strategy == ext.get_backprop_strategy()
    for ext in (DiagGGNMC, BatchDiagGGNMC, SqrtGGNMC):
        assert ext().loss_hessian_strategy == "sampling"
    assert DiagGGNExact().loss_hessian_strategy == "exact"
    assert KFLR().get_backprop_strategy() == "sqrt"
    assert KFRA().get_backprop_strategy() == "average"


class Coupled(Module):
    """A loss, from a function of prediction and target, that couples samples or not."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compute the loss."""
        return self.function(prediction, target)


def contrast(x: Tensor, y: Tensor) -> Tensor:
    """Compare each sample with each other one."""
    return F.cross_entropy(x @ x.T, torch.arange(len(x), device=x.device))


def neighbours(x: Tensor, y: Tensor) -> Tensor:
    """Compare each sample with the next one."""
    return ((x - x.roll(1, 0)) ** 2).sum() + (x**4).sum()


def normal() -> Tensor:
    """Draw a target of shape ``[4, 3]``."""
    return torch.randn(4, 3, dtype=F64)


COUPLED = "couples samples|samples have met"
# A loss, its target, and what the error says
WITHOUT_GGN = {
    "of the mean": (
        Coupled(lambda x, y: ((x.mean(0) - y) ** 2).sum()),
        normal,
        COUPLED,
    ),
    "contrastive": (Coupled(contrast), normal, COUPLED),
    "neighbours": (Coupled(neighbours), normal, COUPLED),
    "centred": (Coupled(lambda x, y: (x - x.mean(0)).exp().sum()), normal, COUPLED),
    "root": (Coupled(lambda x, y: F.mse_loss(x, y).sqrt()), normal, COUPLED),
    "concave": (Coupled(lambda x, y: -((x - y) ** 2).sum()), normal, "semi-definite"),
    "concave for one": (
        Coupled(lambda x, y: ((x**2).sum(1) * x.new_tensor([9, 9, 9, -1])).sum()),
        *(normal, "semi-definite"),
    ),
    "saddle": (
        Coupled(lambda x, y: (x[:, 0] * x[:, 1] + x[:, 2] ** 2).sum()),
        *(normal, "semi-definite"),
    ),
    "robust": (Coupled(lambda x, y: (1 + (x - y) ** 2).log().mean()), normal, "semi-"),
    "negative class weight": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, -1.0, 1.0], dtype=F64)),
        *(lambda: torch.tensor([0, 1, 2, 0]), "semi-definite"),
    ),
    "negative targets": (
        nn.CrossEntropyLoss(),
        *(lambda: -torch.rand(4, 3, dtype=F64), "semi-definite"),
    ),
    "negative weight": (
        nn.BCEWithLogitsLoss(weight=torch.tensor([1.0, -1.0, 1.0], dtype=F64)),
        *(lambda: torch.rand(4, 3, dtype=F64), "semi-definite"),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_GGN)
@pytest.mark.parametrize(
    "ext",
    [
        *(KFLR, KFRA, GGNMP),
        lambda: HBP("ggn", "sum", "average", "E[J^T E(H) J]", "average"),
        lambda: HBP("pch-clip", "sum", "average", "E[J^T E(H) J]", "average"),
    ],
    ids=["KFLR", "KFRA", "GGNMP", "HBP", "HBP-PCH"],
)
@pytest.mark.usefixtures("cpu")
def test_losses_without_ggn(ext: Callable, name: str):
    """Averages over the batch refuse the losses that columns refuse."""
    loss, target, message = WITHOUT_GGN[name]
    torch.manual_seed(0)
    model = Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)).to(F64)
    X, y = torch.randn(4, 3, dtype=F64), target()
    if ext is GGNMP and message is COUPLED:
        message = "semi-definite"  # of all samples together
        if name != "contrastive":
            problem = Problem(model, deepcopy(loss), (X,), (y,))
            run(problem, GGNMP())
            for param in model.parameters():
                J, H = whole_ggn(problem, param)
                basis = torch.eye(param.numel(), dtype=F64).view(-1, *param.shape)
                products = param.ggnmp(basis)
                dense = J.T @ H @ J
                scale = scale_of(dense)
                assert_agrees(products.flatten(1) + scale, dense + scale)
            return
    with pytest.raises((ValueError, NotImplementedError), match=message):
        run(Problem(model, deepcopy(loss), (X,), (y,)), ext())


@pytest.mark.parametrize("seed", range(8))
def test_one_sample_is_not_coupled(seed: int):
    """A Hessian of one sample that is zero but for noise couples nothing."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 1).to(F64)
    risk = Coupled(lambda x, y: x.logcumsumexp(0).sum() - x.sum())
    X = torch.rand(1, 3, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zeros, where they are exact
        run(Problem(model, risk, (X,), (X,)), KFLR())
    assert abs(model.weight.kflr[0].item()) < 1e-14


def test_hbp_with_residuals_and_averaged_inputs():
    """The recursion of Chen et al.: residuals enter, inputs are averaged first."""
    model = Sequential(nn.Linear(3, 2), nn.Sigmoid(), nn.Linear(2, 2)).to(F64)
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(2, (4,))
    ext = HBP("pch-abs", "sum", "average", "E(J^T) E(H) E(J)", "hbp")
    run(Problem(model, nn.CrossEntropyLoss(), (X,), (y,)), ext, KFRA())
    mean = X.mean(0)
    assert_agrees(model[0].weight.hbp[1], torch.outer(mean, mean), "A")
    z = model[0](X).detach().requires_grad_()
    s = z.sigmoid()
    loss = F.cross_entropy(model[2](s), y)
    (delta,) = grad(loss, s)
    d2f = (s * (1 - s) * (1 - 2 * s)).detach()
    residual = (delta * d2f).sum(0).abs().diag()
    assert_agrees(model[0].bias.hbp[0], model[0].bias.kfra[0] + residual, "B")


# Losses of C outputs, and their targets
HBP_LOSSES = {
    "classification": (nn.CrossEntropyLoss, 3, lambda f: torch.randint(3, (len(f),))),
    "two classes": (nn.BCEWithLogitsLoss, 1, lambda f: torch.rand_like(f).round()),
    "regression": (nn.MSELoss, 2, torch.rand_like),
    "one number": (nn.MSELoss, 1, torch.rand_like),
}
EXPECTATIONS = {"products": "E[J^T E(H) J]", "factors": "E(J^T) E(H) E(J)"}
RESIDUALS = {
    "ggn": torch.zeros_like,
    "hessian": torch.clone,
    "pch-clip": torch.relu,
    "pch-abs": torch.abs,
}


def hbp_problem(name: str, reduction: str) -> Problem:
    """Build a network with one hidden layer for a row of ``HBP_LOSSES``.

    Args:
        name: Name of the row.
        reduction: Reduction of the loss.

    Returns:
        The problem.
    """
    loss, outputs, target = HBP_LOSSES[name]
    model = Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, outputs)).to(F64)
    X = torch.randn(N, 3, dtype=F64)
    return Problem(model, loss(reduction=reduction), (X,), (target(model(X).detach()),))


def input_factor(a: Tensor, expectation: str) -> Tensor:
    """Form a weight's factor of the inputs.

    Args:
        a: Inputs ``[N, d]``.
        expectation: Key of ``EXPECTATIONS``: that of products, or of each factor.

    Returns:
        Factor ``[d, d]``.
    """
    mean = a.mean(0)
    return a.T @ a / len(a) if expectation == "products" else mean.outer(mean)


@pytest.mark.parametrize("expectation", EXPECTATIONS)
@pytest.mark.parametrize("strategy", ["exact", "sum", "sampling"])
@pytest.mark.parametrize("curvature", RESIDUALS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", HBP_LOSSES)
def test_hbp_of_an_average(name, reduction, curvature, strategy, expectation):
    """The recursion of a matrix: residuals enter, or not, inputs are averaged, or not.

    Sampled columns are those that KFAC draws.
    """
    problem = hbp_problem(name, reduction)
    model, loss, (X,), (y,) = problem
    torch.manual_seed(1)
    run(problem, HBP(curvature, strategy, "average", EXPECTATIONS[expectation]))
    torch.manual_seed(1)
    run(problem, KFAC())

    s = model[0](X).sigmoid().detach().requires_grad_()
    f = model[2](s)
    (delta,) = grad(loss(f, y), s)
    B = hessian(lambda output: loss(output, y), f.detach())
    B = B.diagonal(dim1=0, dim2=2).sum(-1)
    if strategy == "sampling":
        (B,) = model[2].bias.kfac
    assert_agrees(model[2].bias.hbp, [B], "last bias")
    A = input_factor(s.detach(), expectation)
    assert_agrees(model[2].weight.hbp, [B, A], "last weight")

    s = s.detach()
    df, d2f = s * (1 - s), s * (1 - s) * (1 - 2 * s)
    W = model[2].weight.detach()
    B = (W.T @ B @ W) * (df.T @ df) / N
    B = B + RESIDUALS[curvature]((delta * d2f).sum(0)).diag()
    assert_agrees(model[0].bias.hbp, [B], "bias")
    assert_agrees(model[0].weight.hbp, [B, input_factor(X, expectation)], "weight")


@pytest.mark.parametrize("expectation", EXPECTATIONS)
@pytest.mark.parametrize("strategy, like", [("exact", KFLR), ("sampling", KFAC)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", HBP_LOSSES)
def test_hbp_of_columns(name, reduction, strategy, like, expectation):
    """Columns give the factors of KFLR and KFAC, inputs are averaged, or not."""
    problem, ext = hbp_problem(name, reduction), like()
    model, _, (X,), _ = problem
    torch.manual_seed(1)
    run(problem, HBP("ggn", strategy, "sqrt", EXPECTATIONS[expectation]))
    torch.manual_seed(1)
    run(problem, ext)
    hidden = model[0](X).sigmoid().detach()
    for layer, a in ((model[0], X), (model[2], hidden)):
        (B,) = getattr(layer.bias, ext.savefield)
        assert_agrees(layer.bias.hbp, [B], "bias")
        assert_agrees(layer.weight.hbp, [B, input_factor(a, expectation)], "weight")


@pytest.mark.parametrize("factor", [0.5, -2.0])
@pytest.mark.usefixtures("cpu")
def test_scaled_loss(factor: float):
    """Results carry the factor of a loss that was scaled, also a negative one."""
    names = ("diag_h", "diag_h_batch")
    plain, scaled = (CASES[4].build() for _ in range(2))
    run(plain, DiagHessian(), BatchDiagHessian(), HMP())
    with pytest.warns(UserWarning, match="modified"):
        run(scaled, DiagHessian(), BatchDiagHessian(), HMP(), factor=factor)
    for a, b in zip(plain.model.parameters(), scaled.model.parameters()):
        v = torch.randn_like(a)
        for name in names:
            assert_agrees(getattr(b, name), factor * getattr(a, name), name)
        assert_agrees(b.hmp(v), factor * a.hmp(v), "hmp")


@pytest.mark.parametrize("ext", [KFRA, GGNMP, PCHMP])
@pytest.mark.usefixtures("cpu")
def test_scaled_loss_of_the_ggn_family(ext: Callable):
    """Factors carry over where the GGN exists, and are refused where it does not."""
    plain, scaled, negative = (CASES[4].build() for _ in range(3))
    run(plain, ext())
    with pytest.warns(UserWarning, match="modified"):
        run(scaled, ext(), factor=3.0)
    for a, b in zip(plain.model.parameters(), scaled.model.parameters()):
        if ext is KFRA:
            assert_agrees(b.kfra[0], 3 * a.kfra[0], "kfra")
        else:
            v, field = torch.randn_like(a), ext().savefield
            expected = 3 * getattr(a, field)(v)
            assert_agrees(getattr(b, field)(v), expected, field)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="semi-definite"):
        run(negative, ext(), factor=-1.0)


def test_two_losses():
    """Losses on the same output, and on different ones, add up."""
    torch.manual_seed(1)
    shared = extend(Sequential(nn.Linear(3, 3), nn.Sigmoid()).to(F64))
    head = extend(nn.Linear(3, 2).to(F64))
    first, second = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    X, y, z = torch.randn(4, 3, dtype=F64), torch.randint(2, (4,)), torch.rand(4, 3)
    z = z.to(F64)

    def value() -> Tensor:
        features = shared(X)
        return first(head(features), y) + second(features, z)

    with backpack(DiagHessian(), HMP()):
        value().backward()
    for param in (*shared.parameters(), *head.parameters()):
        (gradient,) = grad(value(), param, create_graph=True)
        dense = rows(gradient, param)
        assert_agrees(param.diag_h, dense.diagonal().reshape(param.shape), "diag")
        v = torch.randn_like(param)
        assert_agrees(param.hmp(v).flatten(), dense @ v.flatten(), "hmp")


SEVERAL_OUTPUTS: Dict[str, Callable[[Module, Tensor], Any]] = {
    "apart": lambda m, x: (m.c(m.a(x)), m.tanh(m.b(x))),
    "branches": lambda m, x: {"a": m.a(y := m.tanh(m.c(x))), "b": m.b(y)},
    "one of another": lambda m, x: [y := m.tanh(m.a(x)), m.c(m.b(y))],
    "the same": lambda m, x: (y := m.tanh(m.a(m.b(m.c(x)))), y),
}


@pytest.mark.parametrize("name", SEVERAL_OUTPUTS)
def test_several_outputs(name: str):
    """What an extended model returns besides is no operation in between."""
    torch.manual_seed(0)
    model = extend(Functional(SEVERAL_OUTPUTS[name]).to(F64))
    first, second = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    X, y, z = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,)), torch.rand(4, 3)
    z = z.to(F64)

    def value() -> Tensor:
        a, b = tree_leaves(model(X))
        return first(a, y) + second(b, z)

    with backpack(DiagHessian(), HMP()):
        value().backward()
    for param in model.parameters():
        (gradient,) = grad(value(), param, create_graph=True)
        dense = rows(gradient, param)
        assert_agrees(param.diag_h, dense.diagonal().reshape(param.shape), "diag")
        v = torch.randn_like(param)
        assert_agrees(param.hmp(v).flatten(), dense @ v.flatten(), "hmp")


def test_operation_before_one_of_several_outputs():
    """The layer that is named is the one before the operation."""
    model = extend(Functional(lambda m, x: (m.b(m.c(x)), F.relu(m.a(x)))).to(F64))
    X, y = torch.randn(4, 3, dtype=F64), torch.rand(4, 3, dtype=F64)
    a, b = model(X)
    loss = extend(nn.MSELoss())
    with pytest.raises(NotImplementedError, match="'a' of Functional"):
        with backpack(DiagHessian()):
            (loss(a, y) + loss(b, y)).backward()


# What else is made of the model, beside the loss
BESIDES: Dict[str, Tuple[Callable[..., Tensor], str]] = {
    "term": (lambda f, z, v: v + F.mse_loss(f, f.detach() + 1), "no extended loss"),
    "inner-term": (lambda f, z, v: v + z.square().mean(), "no extended loss"),
    "both": (lambda f, z, v: f.exp().mean() + 3 * v - z.sum(), "no extended loss"),
    "product": (lambda f, z, v: v * f.square().mean(), "modified"),
    "power": (lambda f, z, v: v.square() - z.sum(), "modified"),
}


@pytest.mark.parametrize("name", BESIDES)
@pytest.mark.parametrize(
    "ext", [DiagHessian, BatchDiagHessian, HMP, GGNMP, PCHMP, KFRA, DiagGGNExact]
)
@pytest.mark.filterwarnings("ignore:Terms of the loss:UserWarning")
@pytest.mark.filterwarnings("ignore:The loss was modified:UserWarning")
@pytest.mark.usefixtures("cpu")
def test_terms_without_an_extended_loss(ext: Callable, name: str):
    """They are warned of, and all that is computed is the loss's own curvature."""
    torch.manual_seed(2)
    inner = extend(Sequential(nn.Linear(3, 3), nn.Tanh()).to(F64))
    head = extend(Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)).to(F64))
    loss, (besides, said) = extend(nn.CrossEntropyLoss()), BESIDES[name]
    X, y, found = torch.randn(4, 3, dtype=F64), torch.randint(2, (4,)), []
    params = [*inner.parameters(), *head.parameters()]
    for alone in (True, False):
        z = inner(X)
        f = head(z)
        value = loss(f, y)
        total = besides(f, z, value)
        (factor,) = grad(total, value, retain_graph=True)
        total = factor * value if alone else total
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with backpack(ext()):
                total.backward()
        assert alone or any(said in str(w.message) for w in caught)
        values = [getattr(p, ext().savefield) for p in params]
        if callable(values[0]):
            values = [v(torch.ones_like(p)) for v, p in zip(values, params)]
        found.append(values)
    assert_agrees(*found)


@pytest.mark.parametrize("id", ["Sigmoid", "BatchNorm1d"])
def test_functions_outlive_the_graph(id: str):
    """Functions hold what they need: later forward passes do not change them."""
    (problem,) = (case.build() for case in CASES if case.id == id)
    run(problem, HMP())
    model = problem.model
    vectors = [torch.randn_like(p) for p in model.parameters()]
    before = [p.hmp(v) for p, v in zip(model.parameters(), vectors)]
    assert hasattr(model[0], "input0") and hasattr(model[0], "output")
    model.train()(torch.randn_like(problem.X[0]))
    for param, v, expected in zip(model.parameters(), vectors, before):
        assert_agrees(param.hmp(v), expected)
    with pytest.raises(ValueError, match="Expected"):
        model[0].weight.hmp(torch.zeros(2, 7, dtype=F64))


def test_dropout_in_training():
    """The mask that was drawn is used, also where the input is zero."""
    model = Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 6),
        nn.Sigmoid(),
        nn.AlphaDropout(0.5),
        nn.Linear(6, 3),
    ).to(F64)
    problem = Problem(
        model,
        nn.CrossEntropyLoss(),
        (torch.randn(5, 4, dtype=F64),),
        (torch.randint(3, (5,)),),
    )
    torch.manual_seed(3)
    run(problem, DiagHessian(), HMP(), KFRA())
    fields = {p: (p.diag_h, p.hmp) for p in model.parameters()}
    for param, (diagonal, hmp) in fields.items():
        torch.manual_seed(3)
        value = problem.loss(model(*problem.X), *problem.y)
        (gradient,) = grad(value, param, create_graph=True)
        dense = rows(gradient, param)
        assert_agrees(diagonal, dense.diagonal().reshape(param.shape), "diag")
        v = torch.randn_like(param)
        assert_agrees(hmp(v).flatten(), dense @ v.flatten(), "hmp")
    assert "_backpack_mask" not in vars(model[2])


ALL = [DiagHessian, BatchDiagHessian, HMP, GGNMP, PCHMP, KFRA]
EACH = pytest.mark.parametrize("ext", ALL, ids=[ext.__name__ for ext in ALL])


@EACH
@pytest.mark.parametrize("cls", [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh])
def test_in_place(ext: Callable, cls: Callable):
    """Modules that overwrite their input, if their derivatives can live with it."""

    def build(inplace: bool) -> Problem:
        torch.manual_seed(0)
        middle = [cls(inplace=inplace), nn.Linear(5, 5), cls(inplace=inplace)]
        model = Sequential(nn.Linear(4, 5), *middle, nn.Sigmoid(), nn.Linear(5, 3))
        X = 3 * torch.randn(4, 4, dtype=F64)
        y = torch.randint(3, (4,))
        return Problem(model.to(F64), nn.CrossEntropyLoss(), (X,), (y,))

    plain, overwriting = build(False), build(True)
    run(plain, ext())
    run(overwriting, ext())
    compare(plain.model, overwriting.model, ext().savefield)


def _shape_of(product: Any) -> Tuple[int, ...]:
    function = product._function.__wrapped__
    cells = (cell.cell_contents for cell in function.__closure__)
    (linear,) = [c for c in cells if hasattr(c, "parameter")]
    return tuple(linear.parameter.shape)


class Functional(Module):
    """Operations that no module stands for."""

    def __init__(self, function: Callable[[Module, Tensor], Tensor]):
        """Create layers, and keep what to do with them."""
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.tanh, self.add = nn.Tanh(), SumModule()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.function(self, x)


class Doubles(Module):
    """Modifies its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Double ``[N, *]``."""
        return x.mul_(2)


class Noise(Module):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[N, *]`` with noise."""
        return x * torch.rand_like(x)


class Stack(Module):
    """Takes a list of tensors."""

    def forward(self, xs: List[Tensor]) -> Tensor:
        """Sum the tensors ``[N, *]``."""
        return sum(xs)


class Borrows(Module):
    """Uses the weight of another layer, which it does not register."""

    def __init__(self, layer: Module):
        """Keep the layer."""
        super().__init__()
        self.layers = [layer]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3]`` to ``[N, 3]``."""
        return F.linear(x, self.layers[0].weight)


NO_CHAIN = "use_converter=True"
REFUSED = {
    "operation": (lambda m, x: m.b(F.relu(m.a(x))), NO_CHAIN),
    "operation at the end": (lambda m, x: F.relu(m.a(x)), NO_CHAIN),
    "residual": (lambda m, x: m.b(m.a(x) + m.tanh(m.a(x))), NO_CHAIN),
    "hidden branch": (lambda m, x: m.add(m.b(y := m.a(x)), F.relu(y)), NO_CHAIN),
    "in place": (lambda m, x: m.b(m.a(x).relu_()), NO_CHAIN),
    "identity of an operation": (
        lambda m, x: m.b(_kept(m, nn.Identity())(F.relu(m.a(x)))),
        NO_CHAIN,
    ),
    "module in place": (lambda m, x: m.b(_kept(m, Doubles())(m.a(x))), NO_CHAIN),
    "activation in place": (
        lambda m, x: m.b(_kept(m, nn.ELU(inplace=True))(m.a(x))),
        "inplace=False",
    ),
    "random": (lambda m, x: m.b(_kept(m, Noise())(m.a(x))), "random"),
    "list": (lambda m, x: m.c(_kept(m, Stack())([m.a(x), m.b(x)])), NO_CHAIN),
    "called twice": (lambda m, x: m.a(m.tanh(m.a(x))), "several calls"),
    "borrowed": (lambda m, x: _kept(m, Borrows(m.a))(m.tanh(m.a(x))), "elsewhere"),
}


def _kept(model: Module, module: Module) -> Module:
    """Extend a module, and keep it until the backward pass has run."""
    model.__dict__["kept"] = extend(module)
    return module


@EACH
@pytest.mark.parametrize("name", REFUSED)
def test_refused(ext: Callable, name: str):
    """What modules do not describe is refused, with a way out."""
    function, message = REFUSED[name]
    model = Functional(function).to(F64)
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    problem = Problem(model, nn.CrossEntropyLoss(), (X,), (y,))
    with pytest.raises((NotImplementedError, RuntimeError), match=message):
        run(problem, ext())


class LossInside(Module):
    """A model that computes what is differentiated, or a number on the way."""

    def __init__(self, last: Callable[[Tensor, Tensor], Tensor], loss: bool = True):
        """Make the layers.

        Args:
            last: What is made of the number, and of the prediction.
            loss: Whether the number is a loss. Default: ``True``; else, a mean.
        """
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.last, self.is_loss = last, loss

    def predict(self, x: Tensor) -> Tensor:
        """Predict ``[N, 3]``."""
        z = self.second(self.first(x).tanh())
        return z if self.is_loss else self.last(z.mean(), z)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the loss."""
        z = self.predict(x)
        number = F.cross_entropy(z, y)
        return self.last(number, z) if self.is_loss else number


NUMBERS: Dict[str, LossInside] = {
    "loss": LossInside(lambda f, z: f),
    "multiple": LossInside(lambda f, z: 2 * f),
    "quotient": LossInside(lambda f, z: f / 4),
    "negated twice": LossInside(lambda f, z: -(-f)),
    "sum of parts": LossInside(lambda f, z: 0.25 * f + 0.5 * f),
    "sum of losses": LossInside(lambda f, z: f + F.mse_loss(z, torch.ones_like(z))),
    "negated mean": LossInside(lambda m, z: z * -m, loss=False),
    "multiple of a mean": LossInside(lambda m, z: z * (2 * m), loss=False),
    "sum of means": LossInside(lambda m, z: z * (m.exp() + m), loss=False),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_a_converted_model(name: str):
    """A loss may have operations behind it, and a number without axes be scaled."""
    model = randomize(deepcopy(NUMBERS[name]).to(F64))
    x, y = torch.rand(N, 3, dtype=F64), torch.randint(3, (N,))
    start = model.first.bias.detach().clone()

    def call(value: Tensor, *args: Tensor) -> Tensor:
        own = {"first.bias": value}
        return torch.func.functional_call(model, own, args)

    def predict(value: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(
            model, {"first.bias": value}
        ):
            return model.predict(x)

    def end(z: Tensor) -> Tensor:
        number = F.cross_entropy(z, y)
        return model.last(number, z) if model.is_loss else number

    dense = {"hmp": hessian(lambda value: call(value, x, y), start)}
    jacobian = torch.autograd.functional.jacobian(predict, start).flatten(0, 1)
    z = model.predict(x).detach()
    curvature = hessian(end, z).reshape(len(jacobian), len(jacobian))
    dense["ggnmp"] = jacobian.T @ curvature @ jacobian
    converted = extend(deepcopy(model), use_converter=True)
    with backpack(HMP(), GGNMP()):
        converted(x, y).backward()
    bias = converted.get_parameter("first.bias")
    for field, matrix in dense.items():
        assert_agrees(getattr(bias, field)(torch.eye(4, dtype=F64)), matrix, field)
    if model.is_loss:
        with backpack(DiagHessian(), DiagGGNExact()):
            converted(x, y).backward()
        assert_agrees(bias.diag_h, dense["hmp"].diagonal(), "diagonal")
        assert_agrees(bias.diag_ggn_exact, dense["ggnmp"].diagonal(), "diagonal")


class LayerAndScale(Module):
    """Multiplies with a parameter in front of a layer, or behind it."""

    def __init__(self, in_front: bool = False):
        """Create both."""
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.in_front = in_front

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3]`` to ``[N, 3]``."""
        return (
            self.layer(x * self.scale) if self.in_front else self.layer(x) * self.scale
        )


class Between(Module):
    """Applies a function in front of a layer."""

    def __init__(self, first: Module):
        """Create the layer, and keep what is in front of the function."""
        super().__init__()
        self.a, self.b = first, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3]`` to ``[N, 3]``."""
        return self.b(self.a(x).tanh())


WHERE = {  # the model, and what is said
    "behind a layer": (lambda: Between(nn.Linear(3, 3)), "the output of .*'a' of"),
    "behind a block": (lambda: Between(LayerAndScale()), "the output of LayerAndScale"),
    "model": (LayerAndScale, "and LayerAndScale does more"),
    "in a block": (
        lambda: Sequential(nn.Linear(3, 3), LayerAndScale(), nn.Linear(3, 3)),
        "'1' of .*does more",
    ),
    "in the first block": (
        lambda: Sequential(LayerAndScale(), nn.Tanh()),
        "'0' of .*does more",
    ),
    "at the front": (lambda: Sequential(LayerAndScale(True)), "'0' of .*does more"),
}


@EACH
@pytest.mark.parametrize("name", WHERE)
def test_where_the_operation_is(ext: Callable, name: str):
    """The module is named that contains the operation, or behind which it is."""
    model, text = WHERE[name]
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    problem = Problem(model().to(F64), nn.CrossEntropyLoss(), (X,), (y,))
    with pytest.raises(NotImplementedError, match=text):
        run(problem, ext())


def test_hmp_of_a_step():
    """A module may differentiate what it computes for the whole batch."""
    model = randomize(Sequential(InnerStep(), nn.Linear(4, 3)).to(F64))
    x, y = torch.rand(N, 3, dtype=F64), torch.randint(3, (N,))
    weight = model[0].weight

    def loss(value: Tensor) -> Tensor:
        out = torch.func.functional_call(model, {"0.weight": value}, (x,))
        return F.cross_entropy(out, y)

    dense = hessian(loss, weight.detach().requires_grad_()).reshape(12, 12)
    model, lossfunc = extend(model), extend(nn.CrossEntropyLoss())
    with backpack(HMP()):
        lossfunc(model(x), y).backward()
    products = weight.hmp(torch.eye(12, dtype=F64).reshape(12, 4, 3))
    assert_agrees(products.flatten(1), dense, "products")


USED_ELSEWHERE: Dict[str, Callable] = {
    "factor of the loss": lambda m, f, x, y: f(m(x), y) * m[0].weight.square().sum(),
    "added to the input": lambda m, f, x, y: f(m(x + m[0].bias), y),
    "in an operation": lambda m, f, x, y: f(m(x) + F.linear(x, m[0].weight), y),
    "in a derivative": lambda m, f, x, y: f(_derivative(m, x), y),
}


def _derivative(model: Module, x: Tensor) -> Tensor:
    """Multiply a model's output with the derivative of its sum."""
    x = x.clone().requires_grad_()
    out = model(x)
    return out * grad(out.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("ext", [DiagHessian, KFRA, HMP, GGNMP, PCHMP])
@pytest.mark.parametrize("name", [*USED_ELSEWHERE, "regularizer"])
def test_used_elsewhere(ext: Callable, name: str):
    """What else is done with a parameter is refused; a regularizer is told."""
    model = extend(Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    lossfunc, x = extend(nn.CrossEntropyLoss()), torch.rand(4, 3)
    y = torch.randint(3, (4,))
    if name in USED_ELSEWHERE:
        value = USED_ELSEWHERE[name](model, lossfunc, x, y)
        told = pytest.raises(NotImplementedError, match="can't see it: .*'0\\.")
    else:
        value = lossfunc(model(x), y) + model[0].weight.square().sum()
        told = pytest.warns(UserWarning, match="no sample.*'0.weight'")
    with told, backpack(ext()):
        value.backward()


class Untraceable(Functional):
    """The converter keeps it as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """Call the function, if the input is finite."""
        return super().forward(x) if x.isfinite().all() else x


@EACH
def test_converted_and_refused(ext: Callable):
    """Who has converted the model is not told to do so, but what is left to do."""
    model = Functional(lambda m, x: m.b(m.kept(m.a(x))[1])).to(F64)
    model.kept = Untraceable(lambda m, x: (y := m.c(x), y.exp())).to(F64)
    converted, loss = extend(model, use_converter=True), extend(nn.CrossEntropyLoss())
    value = loss(converted(torch.randn(2, 3, dtype=F64)), torch.tensor([0, 1]))
    with pytest.raises(NotImplementedError, match="The model is converted") as error:
        with backpack(ext()):
            value.backward()
    assert "use_converter" not in str(error.value)


class TokenLoss(nn.Module):
    """A loss of tokens, which arranges predictions."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare all positions with classes."""
        return F.cross_entropy(f.flatten(0, 1), y.flatten())


@EACH
@pytest.mark.parametrize("convert", [False, True])
def test_operation_before_the_loss(convert: bool, ext: Callable):
    """What is done between model and loss has to be in one of them, and can be."""
    X, y = torch.randn(4, 1, 3, dtype=F64), torch.randint(3, (4, 1))
    layers = Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(F64)
    model = extend(layers, use_converter=convert)
    loss = extend(nn.CrossEntropyLoss())
    value = loss(model(X).flatten(0, 1), y.flatten())
    with pytest.raises(NotImplementedError, match="a loss module of your own") as error:
        with backpack(ext()):
            value.backward()
    assert "The model is converted" not in str(error.value)
    with backpack(ext()):
        extend(TokenLoss())(extend(layers)(X), y).backward()
    assert all(hasattr(p, ext().savefield) for p in layers.parameters())


@EACH
def test_converter_is_the_way_out(ext: Callable):
    """The same functional model works after conversion."""
    torch.manual_seed(0)
    model = Functional(lambda m, x: m.b(F.relu(m.a(x)))).to(F64)
    del model.c
    loss = extend(nn.CrossEntropyLoss())
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    converted = extend(model, use_converter=True)
    with backpack(ext()):
        loss(converted(X), y).backward()
    assert all(hasattr(m.weight, ext().savefield) for m in (model.a, model.b))


COUPLING = {
    "training": (nn.BatchNorm1d(4), "training mode"),
    "without statistics": (
        nn.BatchNorm1d(4, track_running_stats=False).eval(),
        "no running statistics",
    ),
    "softmax": (nn.Softmax(dim=0), "axis 0"),
    "softmax from the end": (nn.LogSoftmax(dim=-2), "axis 0"),
    "softmin": (nn.Softmin(dim=0), "axis 0"),
    "layer norm": (
        nn.LayerNorm([4, 4]),
        r"layer_norm.*\(4, 4\).*axis 0|axis 0.*normalized_shape",
    ),
    "rms norm": (
        nn.RMSNorm([4, 4]),
        r"rms_norm.*\(4, 4\).*axis 0|axis 0.*normalized_shape",
    ),
}
PER_SAMPLE = [DiagHessian, BatchDiagHessian, PCHMP, KFRA]


@EACH
@pytest.mark.parametrize("name", COUPLING)
def test_coupled(ext: Callable, name: str):
    """What couples samples is refused, or part of the products with its own matrix."""
    layer, message = COUPLING[name]
    torch.manual_seed(0)
    model = Sequential(nn.Linear(3, 4), deepcopy(layer), nn.Sigmoid(), nn.Linear(4, 3))
    randomize(model.to(F64))
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    problem = Problem(model, nn.CrossEntropyLoss(), (X,), (y,))
    if ext in PER_SAMPLE:
        with pytest.raises(NotImplementedError, match=f"(?s){message}"):
            run(problem, ext())
        return
    expected = {}
    for name, param in parameters(model).items():
        if ext is HMP:
            (gradient,) = grad(problem.loss(model(X), y), param, create_graph=True)
            expected[name] = rows(gradient, param)
        else:
            J, H = whole_ggn(problem, param)
            expected[name] = J.T @ H @ J
    value = extend(problem.loss)(extend(model)(X), y)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with backpack(ext()):
        value.backward()
    assert_products(problem, ext().savefield, expected)
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key


def whole_ggn(problem: Problem, param: Tensor) -> Tuple[Tensor, Tensor]:
    """Differentiate all samples' predictions, ``[N C, P]``, and the loss twice."""
    prediction = problem.model(*problem.X)
    J = rows(prediction, param)
    H = oracle.hessian(lambda f: problem.loss(f, *problem.y), prediction)
    return J, H


@EACH
def test_loss_is_not_extended(ext: Callable):
    """Without an extended loss, there is nothing to begin with."""
    model = extend(Sequential(nn.Linear(3, 3)).to(F64))
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    with pytest.raises(AssertionError, match="extend"), backpack(ext()):
        F.cross_entropy(model(X), y).backward()


class OwnScale(Module):
    """Has a parameter, and no rule."""

    def __init__(self):
        """Create the parameter."""
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the sine of ``[N, 4]`` with the number of samples and a scale."""
        return x.sin() * self.scale * len(x)


class Counter(Module):
    """Keeps a state, and has no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[N, *]`` with the number of calls."""
        self.calls = getattr(self, "calls", 0) + 1
        return x.sin() * self.calls


class WarmUp(Module):
    """Counts calls, behind a gate that is closed."""

    def __init__(self, make: Callable[[], Any]):
        """Create the gate, and the count."""
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4))
        count = make()
        if isinstance(count, Tensor):
            self.register_buffer("count", count)
        else:
            self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """Add to ``[N, 4]`` what grows with the number of calls."""
        self.count = self.count + 1
        return x + self.gate * x.tanh() * self.count


class ShortOfMemory(OwnScale):
    """Has enough memory for a single call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the sine of ``[N, 4]``."""
        self.calls += 1
        if self.calls > 1:
            raise torch.OutOfMemoryError("short")
        return super().forward(x)


class GatedNoise(Module):
    """Adds noise through a gate that is closed, which hides it from the output."""

    def __init__(self, **options: Any):
        """Create the gate, a parameter of one entry; options go to ``randn``."""
        super().__init__()
        self.gate, self.options = nn.Parameter(torch.zeros(())), options

    def forward(self, x: Tensor) -> Tensor:
        """Add noise to ``[N, *]``."""
        noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, **self.options)
        return x.sin() + self.gate * noise


class DrawnScale(OwnScale):
    """Draws its scale, with a deviation that is zero."""

    def __init__(self):
        """Create mean and deviation."""
        super().__init__()
        self.deviation = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the sine of ``[N, 4]``."""
        noise = torch.empty_like(self.scale).normal_()
        return x.sin() * (self.scale + self.deviation**2 * noise)


class Skipped(Module):
    """Is skipped now and then, which a gate of zero hides from the output."""

    def __init__(self, draw: Callable[[], float]):
        """Create the gate."""
        super().__init__()
        self.gate, self.draw, self.rate = nn.Parameter(torch.zeros(1)), draw, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Add something to ``[N, *]``."""
        return x.sin() + self.gate * self.draw() * self.rate * x.cos()


def rate_changed(model: Module) -> None:
    """Change an attribute."""
    model[2].rate = 0.5


def changed(model: Module) -> None:
    """Change a parameter behind autograd's back."""
    model[2].scale.data.mul_(1.5)


def switched(model: Module) -> None:
    """Call the middle layer once more, which changes what it computes."""
    model[2](torch.randn(4, 4, dtype=F64))


UNREPEATABLE = {
    "spectral norm": (lambda: spectral_norm(nn.Linear(4, 4)), None),
    "spectral norm, called again": (lambda: spectral_norm(nn.Linear(4, 4)), switched),
    "frozen spectral norm, called again": (
        lambda: spectral_norm(nn.Linear(4, 4)).requires_grad_(False),
        switched,
    ),
    "parameter changed": (OwnScale, changed),
    "short of memory": (ShortOfMemory, None),
    "random": (nn.RReLU, None),
    "random, times a gate of zero": (GatedNoise, None),
    "random, by its own generator": (lambda: GatedNoise(generator=drawing(0)), None),
    "random, with a deviation of zero": (DrawnScale, None),
    "random, of Python": (lambda: Skipped(random.random), None),
    "random, of NumPy": (lambda: Skipped(numpy.random.rand), None),
    "random, of an object": (lambda: Skipped(random.Random(0).random), None),
    "attribute, behind a gate of zero": (lambda: Skipped(lambda: 1.0), rate_changed),
    "state": (Counter, None),
    "state, behind a gate of zero": (lambda: WarmUp(int), None),
    "buffer, behind a gate of zero": (lambda: WarmUp(lambda: torch.zeros(())), None),
}


class Weighted(Module):
    """A mean of cross entropies with weights, which equal logits hide."""

    reduction, rate = "mean", 1.0

    def __init__(self, draw: Callable[[], float]):
        """Store what draws a weight."""
        super().__init__()
        self.draw = draw

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Draw the weights, and average ``[N]``."""
        weights = torch.tensor([self.draw() for _ in y], dtype=F64)
        each = F.cross_entropy(self.rate * f, y, reduction="none")
        return (each * weights).sum() / weights.sum()


OTHER_LOSSES: Dict[str, Tuple[Callable[[], float], Dict[str, float]]] = {
    "random, of Python": (random.random, {}),
    "random, of NumPy": (numpy.random.rand, {}),
    "random, of an object": (random.Random(0).random, {}),
    "attribute": (lambda: 1.0, {"rate": 0.5}),
}


@pytest.mark.parametrize(
    "ext",
    [DiagHessian, HMP, DiagGGNExact, KFLR, partial(KFAC, fisher_type="empirical")],
)
@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_loss_when_repeated(ext: Callable, name: str):
    """A loss is repeated only if its gradient is that of the call; nothing is drawn."""
    draw, attributes = OTHER_LOSSES[name]
    model, loss = extend(nn.Linear(3, 2).to(F64)), extend(Weighted(draw))
    for p in model.parameters():
        nn.init.zeros_(p)
    value = loss(model(torch.randn(4, 3, dtype=F64)), torch.tensor([0, 1, 0, 1]))
    vars(loss).update(attributes)
    states = random.getstate(), pickle.dumps(numpy.random.get_state())
    with pytest.raises(RuntimeError, match="another output"), backpack(ext()):
        value.backward()
    assert states == (random.getstate(), pickle.dumps(numpy.random.get_state()))


@pytest.mark.parametrize("ext", [DiagHessian, HMP, GGNMP])
def test_repeated_where_no_derivative_can_be_compared(ext: Callable):
    """Such as the first module, if a functional call gives it what was computed."""
    model = randomize(Sequential(OwnScale(), nn.Linear(4, 3)).to(F64))
    x, y = torch.rand(N, 4, dtype=F64), torch.randint(3, (N,))
    model, loss = extend(model), extend(nn.CrossEntropyLoss())
    given = {n: p.detach().requires_grad_() * 1 for n, p in model.named_parameters()}
    with backpack(ext()):
        loss(torch.func.functional_call(model, given, (x,)), y).backward()
    assert all(hasattr(p, ext().savefield) for p in given.values())


@EACH
@pytest.mark.parametrize("name", UNREPEATABLE)
def test_other_output_when_repeated(ext: Callable, name: str):
    """A forward pass is repeated only if this gives the output of the call."""
    make, change = UNREPEATABLE[name]
    torch.manual_seed(0)
    model = Sequential(nn.Linear(3, 4), nn.Tanh(), make(), nn.Linear(4, 3)).to(F64)
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    model, loss = extend(model), extend(nn.CrossEntropyLoss())
    value = loss(model(X), y)
    if change is not None:
        change(model)
    message = "another output" if ext is not PCHMP else "another output|not known to be"
    message = "^short$" if name == "short of memory" else message
    with pytest.raises(RuntimeError, match=message), backpack(ext()):
        value.backward()
        for param in parameters(model).values():
            getattr(param, ext().savefield)(param.detach())


class Loss(Module):
    """A convex loss with options, most of which are passed by name."""

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        divisor: float = 1.0,
        square: float = 0.0,
        weight: Any = None,
        *,
        factor: float = 1.0,
    ) -> Tensor:
        """Compare ``[N, 3]`` with targets of the same shape."""
        terms = (x / divisor - y) ** 2 + square * x**2
        return factor * (terms if weight is None else terms * weight).mean()


class Logging(Loss):
    """Keeps what it computed, in a list and as an attribute."""

    def __init__(self):
        """Begin the list."""
        super().__init__()
        self.log: List[Tensor] = []

    def forward(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        """Compare, and keep the result."""
        self.last = super().forward(x, y, **options)
        self.log.append(self.last.detach())
        return self.last


class Annealed(Loss):
    """Grows with each call."""

    def __init__(self, make: Callable[[], Any]):
        """Begin to count."""
        super().__init__()
        self.count = make()

    def forward(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        """Multiply with the number of calls."""
        self.count += 1
        return self.count * super().forward(x, y, **options)


class OfSome(Loss):
    """Compares entries that it draws."""

    def forward(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        """Compare some."""
        return super().forward(x, y, weight=torch.rand(x.shape).round(), **options)


class Doubling(Module):
    """Creates a tensor, and doubles its input where it is not on any device."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * (2.0 if torch.empty(0).is_meta else 1.0)


class OfDefault(Loss):
    """The same for a loss."""

    def forward(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        """Compare."""
        return Doubling()(super().forward(x, y, **options))


LOSS_CALLS: Dict[str, Tuple[Callable[[], Module], Dict[str, Any]]] = {
    "second": (Loss, {"square": 5.0}),
    "third": (Loss, {"weight": torch.tensor([1.0, 2.0, 3.0], dtype=F64)}),
    "by-name-alone": (Loss, {"factor": 2.0, "square": 0.5}),
    "any": (Logging, {"square": 0.5}),
    "log": (Logging, {}),
}
OF_THE_LOSS = [DiagHessian, BatchDiagHessian, HMP, DiagGGNExact, KFLR, KFRA]


@pytest.mark.filterwarnings("ignore:The loss was modified after")
@pytest.mark.parametrize("changed", [False, True], ids=["", "scaled-in-place"])
@pytest.mark.parametrize("name", LOSS_CALLS)
def test_loss_called_by_name(name: str, changed: bool):
    """A loss is repeated with the arguments that it got, and keeps no trace of it."""
    make, options = LOSS_CALLS[name]
    model, loss = extend(nn.Linear(4, 3).to(F64)), extend(make())
    X, y = torch.randn(N, 4, dtype=F64), torch.randn(N, 3, dtype=F64)
    value = loss(model(X), y, **options)
    if changed:
        value *= 2
    with backpack(*[ext() for ext in OF_THE_LOSS]):
        value.backward()

    def of_bias(bias: Tensor) -> Tensor:
        return make()(F.linear(X, model.weight.detach(), bias), y, **options)

    bias, eye = model.bias, torch.eye(3, dtype=F64)
    dense = hessian(of_bias, bias.detach()) * (2 if changed else 1)
    assert_agrees(bias.diag_h, dense.diagonal(), "diag_h")
    assert_agrees(bias.diag_h_batch.sum(0), dense.diagonal(), "diag_h_batch")
    assert_agrees(bias.diag_ggn_exact, dense.diagonal(), "diag_ggn_exact")
    assert_agrees(bias.hmp(eye), dense, "hmp")
    assert_agrees(bias.kflr[0], dense, "kflr")
    assert_agrees(bias.kfra[0], dense, "kfra")
    assert len(getattr(loss, "log", [1])) == 1


class Beside(Loss):
    """Returns other things beside its value."""

    def __init__(self, place: Callable[[Tensor, Tensor], Any]):
        """Say where they are."""
        super().__init__()
        self.place = place

    def forward(self, x: Tensor, y: Tensor, **options: Any) -> Any:
        """Compare, and count."""
        return self.place(super().forward(x, y, **options), (x > y).sum())


@pytest.mark.parametrize(
    "place",
    [
        lambda value, count: (value, count),
        lambda value, count: (count, None, value),
        lambda value, count: {"count": (count,), "value": [value]},
    ],
    ids=["first", "last", "dictionary"],
)
def test_loss_that_returns_more(place: Callable):
    """The loss is the first tensor of real numbers that its module returns."""
    model, loss = extend(nn.Linear(4, 3).to(F64)), extend(Beside(place))
    found = loss(model(torch.randn(N, 4, dtype=F64)), torch.randn(N, 3, dtype=F64))
    value = next(
        x for x in tree_leaves(found) if isinstance(x, Tensor) and x.is_floating_point()
    )
    with backpack(*[ext() for ext in OF_THE_LOSS]):
        value.backward()
    expected, bias = torch.full((3,), 2 / 3, dtype=F64), model.bias
    assert_agrees(bias.diag_h, expected, "diag_h")
    assert_agrees(bias.diag_ggn_exact, expected, "diag_ggn_exact")
    assert_agrees(bias.hmp(torch.eye(3, dtype=F64)).diagonal(), expected, "hmp")


class CountedByAMethod(Module):
    """A loss that counts by a method that it keeps, as metrics of other packages do."""

    def __init__(self, kind: Callable) -> None:
        """Keep the method."""
        super().__init__()
        self.update = self._update
        if kind is int:
            self.count = 0
        else:
            self.register_buffer("count", kind())

    def _update(self) -> None:
        self.count = self.count + 1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Average, and count."""
        self.update()
        return (x - y).square().mean()


UNREPEATABLE_LOSSES = {
    "count, by a method": lambda: CountedByAMethod(int),
    "count, in a tensor by a method": lambda: CountedByAMethod(lambda: torch.zeros(())),
    "count": lambda: Annealed(int),
    "count, in a tensor": lambda: Annealed(lambda: torch.zeros((), dtype=F64)),
    "random": OfSome,
}


@pytest.mark.parametrize("ext", [*ALL, DiagGGNExact, KFLR])
@pytest.mark.parametrize("name", UNREPEATABLE_LOSSES)
def test_loss_that_is_another_when_repeated(ext: Callable, name: str):
    """A loss that keeps a state, or draws numbers, is refused and left alone."""
    model, loss = extend(nn.Linear(4, 3)), extend(UNREPEATABLE_LOSSES[name]())
    value = loss(model(torch.randn(N, 4)), torch.randn(N, 3))
    before, count = torch.get_rng_state(), deepcopy(getattr(loss, "count", 1))
    with pytest.raises(RuntimeError, match="gave another output"), backpack(ext()):
        value.backward()
        getattr(model.bias, ext().savefield)(torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())
    assert getattr(loss, "count", 1) == count


def test_default_device():
    """What is repeated creates tensors where the forward pass did.

    PyTorch has the default device in a mode, which it leaves during `backward()`.
    """
    model = extend(Sequential(nn.Linear(4, 3), Doubling()).to(F64))
    loss, bias = extend(OfDefault()), model[0].bias
    X, y = torch.randn(N, 4, dtype=F64), torch.randn(N, 3, dtype=F64)
    with torch.device("cpu"), torch.device("meta"):
        value = loss(model(X), y)
        with backpack(*[ext() for ext in OF_THE_LOSS]):
            value.backward()
        (product,) = bias.hmp(X.new_ones(1, 3))
    expected = torch.full((3,), 16 / 3, dtype=F64)
    assert_agrees(bias.diag_h, expected, "diag_h")
    assert_agrees(bias.diag_h_batch.sum(0), expected, "diag_h_batch")
    assert_agrees(bias.diag_ggn_exact, expected, "diag_ggn_exact")
    assert_agrees(product, expected, "hmp")
    assert_agrees(bias.kflr[0].diagonal(), expected, "kflr")
    assert_agrees(bias.kfra[0].diagonal(), expected, "kfra")


@pytest.mark.parametrize("ext", [DiagHessian, HMP, KFRA])
def test_forward_that_depends_on_the_number_of_samples(ext: Callable):
    """Repeated for one sample, it would give another output: it is not, or refused."""
    model = Sequential(nn.Linear(3, 4), OwnScale(), nn.Linear(4, 3)).to(F64)
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    problem = Problem(model, nn.CrossEntropyLoss(), (X,), (y,))
    if ext is KFRA:
        with pytest.raises(RuntimeError, match="another output"):
            run(problem, ext())
        return
    run(problem, ext())
    for param in model.parameters():
        (gradient,) = grad(problem.loss(model(X), y), param, create_graph=True)
        dense, v = rows(gradient, param), torch.randn_like(param)
        if ext is HMP:
            assert_agrees(param.hmp(v).flatten(), dense @ v.flatten())
        else:
            assert_agrees(param.diag_h.flatten(), dense.diagonal())


@EACH
@pytest.mark.parametrize("layer", [nn.GLU, lambda: nn.LayerNorm(4), OwnScale])
def test_overwritten_output(ext: Callable, layer: Callable):
    """An output that was overwritten can't be compared, which rules do without."""
    torch.manual_seed(0)
    model = Sequential(
        nn.Linear(3, 4), layer(), nn.ReLU(inplace=True), nn.LazyLinear(3)
    )
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    model.to(F64)(X)
    plain = deepcopy(model)
    plain[2].inplace = False
    problems = [Problem(m, nn.CrossEntropyLoss(), (X,), (y,)) for m in (plain, model)]
    if layer is OwnScale:
        with pytest.raises(RuntimeError, match="inplace=True"):
            run(problems[1], ext())
        return
    for problem in problems:
        run(problem, ext())
    compare(plain, model, ext().savefield)


def compare(expected: Module, model: Module, field: str) -> None:
    """Compare a field of two models: tensors, functions, or lists of factors."""
    for a, b in zip(expected.parameters(), model.parameters()):
        a, b = getattr(a, field), getattr(b, field)
        if callable(a):
            v = torch.randn(2, *_shape_of(a), dtype=F64)
            a, b = a(v), b(v)
        assert_agrees(b, a)


MODES = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "instance norm": lambda: Sequential(
        nn.Unflatten(1, (2, 2)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
    ),
    "dropout": nn.Dropout,
    "alpha dropout": nn.AlphaDropout,
}
BY_MODE = [*ALL, BatchGrad, Variance, DiagGGNExact, KFLR]


@pytest.mark.parametrize("ext", BY_MODE, ids=[ext.__name__ for ext in BY_MODE])
@pytest.mark.parametrize("train", [True, False], ids=["train-eval", "eval-train"])
@pytest.mark.parametrize("name", MODES)
def test_mode_of_the_call(ext: Callable, train: bool, name: str):
    """What counts is the mode in the forward pass, not that in the backward pass."""

    def outcome(switch: bool) -> Tuple[Module, List[str]]:
        torch.manual_seed(0)
        middle = [nn.Tanh(), MODES[name](), nn.Sigmoid()]
        model = Sequential(nn.Linear(3, 4), *middle, nn.Linear(4, 3)).to(F64)
        X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
        model(X)  # statistics
        model, loss = extend(model.train(train)), extend(nn.CrossEntropyLoss())
        value = loss(model(X), y)
        model.train(train ^ switch)
        modes = [m.training for m in model.modules()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with backpack(ext()):
                    value.backward()
            except NotImplementedError as error:
                return model, [str(error)]
        assert modes == [m.training for m in model.modules()]
        return model, [str(w.message) for w in caught]

    (expected, messages), (model, also) = outcome(False), outcome(True)
    assert messages == also
    coupled = name == "batch norm" and train and ext not in (HMP, GGNMP)
    assert bool(messages) == coupled
    if not coupled or ext is BatchGrad:
        compare(expected, model, ext().savefield)


def test_mode_of_each_call():
    """The same, where products are formed at the loss, not in the call's turn."""
    fields = []
    for switch in (False, True):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3).eval()
        model = Sequential(nn.Linear(3, 3), norm, nn.Tanh(), norm).to(F64)
        model, loss = extend(randomize(model)), extend(nn.CrossEntropyLoss())
        value = loss(model(torch.randn(4, 3, dtype=F64)), torch.tensor([0, 1, 2, 0]))
        norm.train(switch)
        with backpack(DiagGGNExact()):
            value.backward()
        fields.append(norm.weight.diag_ggn_exact)
    assert_agrees(*fields)


class ComputesLoss(Module):
    """A model that computes its loss, by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        """Store what is done to the loss."""
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare with classes."""
        return self.function(F.cross_entropy(self.layer(x), y))


FUNCTIONS_OF_LOSSES: Dict[str, Callable[[Tensor], Tensor]] = {
    "root": torch.sqrt,
    "logarithm": lambda v: v.exp().add(1).log(),
    "product": lambda v: v * v,
}


@pytest.mark.parametrize("inside", [False, True], ids=["behind", "inside"])
@pytest.mark.parametrize("name", FUNCTIONS_OF_LOSSES)
@EACH
def test_function_of_a_loss(ext: Callable, name: str, inside: bool):
    """A loss of which more than a sum is made is no beginning."""
    function, nothing = FUNCTIONS_OF_LOSSES[name], lambda v: v
    model = extend(ComputesLoss(function if inside else nothing))
    value = model(torch.randn(4, 3), torch.tensor([0, 2, 1, 1]))
    with (
        pytest.raises(AssertionError, match="no quantity pulled back"),
        backpack(ext()),
    ):
        (value if inside else function(value)).backward()


class OfClasses(Module):
    """A loss without a rule, with a constant ``[3, 3]``."""

    def __init__(self):
        """Create the constant."""
        super().__init__()
        self.register_buffer("constant", torch.eye(3) + 0.1)

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare predictions ``[N, 3]`` with classes ``[N]``."""
        return F.cross_entropy(F.linear(f, self.constant), y)


MATRIX = torch.eye(4) + 0.1


class Constant(Module):
    """A module without a parameter, which multiplies with a constant."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[N, 4]`` with a matrix."""
        return torch.tanh(x @ MATRIX)


# What is called under autocast, for each quantity
CALLED: Dict[str, Callable[[Callable], Tuple[List[Module], Module]]] = {
    "layers": lambda ext: (
        [
            *(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4).eval(), nn.Tanh(), nn.Flatten()),
            *(nn.Linear(8, 4), nn.Tanh(), nn.LayerNorm(4), nn.Softmax(1), nn.GELU()),
            *(Mixed(), Scaled(), nn.Linear(4, 3)),
        ],
        nn.CrossEntropyLoss(),
    ),
    "constants": lambda ext: (
        [nn.Flatten(), nn.Linear(6, 4), Constant(), nn.Linear(4, 3)],
        OfClasses(),
    ),
}


@pytest.mark.parametrize("inside", [False, True], ids=["backward-after", "inside"])
@pytest.mark.parametrize("name", CALLED)
@EACH
def test_autocast(ext: Callable, name: str, inside: bool):
    """Under autocast, results have the parameters' type, and are as good as it is."""
    torch.manual_seed(0)
    layers, loss = CALLED[name](ext)
    exact = randomize(Sequential(*layers))
    model = deepcopy(exact)
    X, y = torch.randn(5, 2, 3), torch.randint(3, (5,))
    run(Problem(exact, deepcopy(loss), (X,), (y,)), ext())
    extend(model)
    loss = extend(loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(model(X), y)
        with backpack(ext()) if inside else nullcontext():
            value.backward() if inside else None
    if not inside:
        with backpack(ext()):
            value.backward()
    field = ext().savefield
    for expected, param in zip(exact.parameters(), model.parameters()):
        a, b = getattr(expected, field), getattr(param, field)
        if callable(a):
            v = torch.randn_like(param)
            a, b = a(v), b(v)
        for right, result in zip(a, b) if isinstance(a, list) else [(a, b)]:
            assert result.dtype == torch.float32
            assert (right - result).norm() < 0.2 * right.norm() + 1e-6


@pytest.mark.parametrize("ext", [BatchGrad, Variance, DiagGGNExact, KFAC])
@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU, nn.Conv1d])
def test_backward_pass_under_autocast(layer: Callable, ext: Callable):
    """Where only the backward pass runs under autocast, products are not cast."""
    recurrent = layer is not nn.Conv1d
    first = layer(3, 4, batch_first=True) if recurrent else layer(2, 4, 2)
    layers = [first, *([ReduceTuple(0)] if recurrent else []), nn.Flatten()]
    torch.manual_seed(0)
    model = extend(randomize(Sequential(*layers, nn.Linear(8, 3))))
    loss = extend(nn.CrossEntropyLoss())
    X, y = torch.randn(5, 2, 3), torch.randint(3, (5,))
    options = {"weight_sharing": "expand"} if ext is KFAC else {}
    fields = []
    for enabled in (False, True):
        torch.manual_seed(1)
        value = loss(model(X), y)
        with torch.autocast("cpu", torch.bfloat16, enabled), backpack(ext(**options)):
            value.backward()
        fields.append(
            [getattr(p, ext(**options).savefield) for p in model.parameters()]
        )
    for right, result in zip(*map(tree_leaves, fields)):
        assert result.dtype == torch.float32
        assert (right - result).norm() < 0.05 * right.norm()


class Scaled(Module):
    """A module without a rule, whose output is more precise than what is inside."""

    def __init__(self):
        """Create the parameters."""
        super().__init__()
        self.weight, self.scale = (nn.Parameter(torch.rand(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, and scale the result."""
        return x + (x @ self.weight) * self.scale.sum(0)


class Mixed(Module):
    """A module without a rule, whose operations differ in their types."""

    def __init__(self):
        """Create the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[N, 4]`` with the weight, and itself."""
        return (x @ self.weight) * x


def step(problem: Problem) -> None:
    """Change the parameters, as optimizers do."""
    torch.optim.SGD(problem.model.parameters(), lr=0.1).step()


def replace_data(model: Module) -> None:
    """Change the parameters, as one did in former times."""
    for param in model.parameters():
        param.data = param.data + 1


MODIFIED = {
    "step": step,
    "input": lambda problem: problem.X[0].mul_(2),
    "target": lambda problem: problem.y[0].zero_(),
    "last bias": lambda problem: problem.model[-1].bias.detach().zero_(),
    "data": lambda problem: [p.data.mul_(2) for p in problem.model.parameters()],
    "another data": lambda problem: replace_data(problem.model),
    "rows of data": lambda problem: problem.model[-1].weight.data.copy_(
        problem.model[-1].weight.flip(0)
    ),
    "columns of data": lambda problem: problem.model[-1].weight.data.copy_(
        problem.model[-1].weight.flip(1)
    ),
}


@pytest.mark.parametrize("ext", [HMP, GGNMP, PCHMP])
@pytest.mark.parametrize("name", MODIFIED)
def test_products_after_a_modification(ext: Callable, name: str):
    """Products that would be others than those of the backward pass are refused."""
    problem = CASES[4].build()
    run(problem, ext())
    weight = problem.model[0].weight
    product = getattr(weight, ext().savefield)
    product(torch.ones_like(weight))
    MODIFIED[name](problem)
    with pytest.raises(RuntimeError, match="modified in place.*Multiply before"):
        product(torch.ones_like(weight))


UPDATES = {
    "in-place": lambda p, x: p.detach().add_(x),
    "data": lambda p, x: p.data.add_(x),
    "another-data": lambda p, x: setattr(p, "data", p.data + x),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("ext", [HMP, GGNMP, PCHMP])
def test_products_between_updates(ext: Callable, update: str):
    """Parameters may be updated one after the other, from the first layer to the last.

    A block depends on what goes into its layer, and on the layers behind.
    """
    model = Sequential(
        *(nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.BatchNorm2d(2).eval(), nn.Flatten()),
        *(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 3)),
    )
    problem = Problem(
        model.to(F64),
        nn.CrossEntropyLoss(),
        (torch.rand(N, 1, 3, 3, dtype=F64),),
        (torch.arange(N),),
    )
    run(problem, ext())
    products = {p: getattr(p, ext().savefield) for p in model.parameters()}
    expected = {p: product(torch.ones_like(p)) for p, product in products.items()}
    for p, product in products.items():
        assert torch.equal(product(torch.ones_like(p)), expected[p])
        UPDATES[update](p, 1.0)


class Swap(Module):
    """Puts something else on axis 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Split ``[N, 4]`` into ``[2 N, 2]``."""
        return x.reshape(-1, 2)


@EACH
@pytest.mark.parametrize("module", [nn.Flatten(0, 1), Swap()])
def test_samples_that_are_rearranged(ext: Callable, module: Module):
    """Where axis 0 holds something else than before, samples can't be told apart."""
    parts = [nn.Linear(3, 4), nn.Unflatten(1, (2, 2)), module, nn.Sigmoid()]
    parts = parts if isinstance(module, nn.Flatten) else [parts[0], *parts[2:]]
    model = Sequential(*parts, nn.Linear(2, 3)).to(F64)
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (8,))
    problem = Problem(model, nn.CrossEntropyLoss(), (X,), (y,))
    if ext().separates_samples:
        with pytest.raises((NotImplementedError, ValueError), match="axis 0"):
            run(problem, ext())
    else:
        run(problem, ext())


@pytest.mark.parametrize("ext", [KFRA, DiagHessian])
def test_samples_must_come_first(ext: Callable):
    """Layers with the sequence on axis 0 are refused where samples are told apart."""
    rnn = Sequential(nn.RNN(2, 2), ReduceTuple(), Permute(0, 2, 1)).to(F64)
    X, y = torch.randn(3, 3, 2, dtype=F64), torch.randint(2, (3, 3))
    with pytest.raises(NotImplementedError, match="batch_first"):
        run(Problem(rnn, nn.CrossEntropyLoss(), (X,), (y,)), ext())


# Losses on the same prediction, in the order in which they are computed
ON_ONE_PREDICTION: Dict[str, Callable[..., Tensor]] = {
    "two-losses": lambda f, y, z, ce, mse: ce(f, y) + mse(f, z),
    "mixed-targets": lambda f, y, z, ce, mse: 0.3 * ce(f, y) + 0.7 * ce(f, y.flip(0)),
    "three-terms": lambda f, y, z, ce, mse: ce(f, y) + mse(f, z) / 2 + mse(f, -z),
}


@pytest.mark.parametrize("name", ON_ONE_PREDICTION)
@pytest.mark.filterwarnings("ignore:The loss was modified:UserWarning")
def test_kfra_of_losses_on_one_prediction(name: str):
    """Averaged Hessians of losses add up: they are no branches of the network."""
    torch.manual_seed(0)
    model = Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)).to(F64)
    X, y, z = torch.randn(N, 4), torch.arange(N) % 3, torch.randn(N, 3)
    losses = nn.CrossEntropyLoss(), nn.MSELoss()

    def loss(f: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return ON_ONE_PREDICTION[name](f, y, z, *losses)

    problem = Problem(model, loss, (X.to(F64),), (y, z.to(F64)))
    expected = kfra_factors(problem)
    for module in (model, *losses):
        extend(module)
    with backpack(KFRA()):
        loss(model(problem.X[0]), *problem.y).backward()
    for key, param in model.named_parameters():
        assert_agrees(param.kfra[0], expected[key], key)


def test_kfra_refuses_branches():
    """An average over the batch does not tell how branches interact."""
    problem = next(case for case in CASES if case.id == "residual").build()
    with pytest.raises(NotImplementedError, match="KFLR"):
        run(problem, KFRA())


def test_nothing_is_left():
    """No quantity and no graph survives a backward pass, also not after an error."""
    extensions = [ext() for ext in ALL if ext is not KFRA]
    problem = next(case for case in CASES if case.id == "nested").build()
    run(problem, *extensions)
    failing = Functional(REFUSED["operation"][0]).to(F64)
    X, y = torch.randn(4, 3, dtype=F64), torch.randint(3, (4,))
    with pytest.raises(NotImplementedError):
        run(Problem(failing, nn.CrossEntropyLoss(), (X,), (y,)), *extensions)
    assert not any(ext.saved_quantities._saved_quantities for ext in extensions)


def test_signed_columns_as_a_dictionary():
    """Matrices and signs can be asked for by name, and make up the columns again."""
    columns, sign = torch.randn(5, 2, 3, dtype=F64), torch.randn(5, 2).sign().to(F64)
    signed = SignedColumns.create(columns, sign)
    pairs = {key: signed[key] for key in signed.keys()}
    assert pairs["signs"] == [1.0, -1.0]
    assert dict(signed).keys() == {"matrices", "signs"}
    again = SignedColumns.wrap(pairs)
    assert SignedColumns.wrap(again) is again
    assert_agrees(_matrices(again), _matrices(signed))
    with pytest.raises(KeyError, match="matrices.*got 'columns'"):
        signed["columns"]


def test_signed_columns_are_combined():
    """Many columns become as many as there are features, few stay as they are."""
    columns, sign = torch.randn(9, 2, 3, dtype=F64), torch.randn(9, 2).sign().to(F64)
    many = SignedColumns.create(columns, sign)
    few = many.compress()
    assert len(few.columns) == 3
    for matrices in zip(_matrices(few), _matrices(many)):
        assert_agrees(*matrices)
    apart = SignedColumns.create(columns, sign, ways=2)
    assert apart.compress() is apart
    assert len(apart.merge(apart).compress().columns) == 3


def _matrices(columns: SignedColumns) -> Tensor:
    flat = columns.columns.flatten(2)
    return torch.einsum("vn,vni,vnj->nij", columns.sign, flat, flat)


# The GGN family, sent from module to module by a user's module extension

WALKING = {
    "DiagGGNExact": DiagGGNExact,
    "KFLR": lambda: KFLR("expand"),
    "SqrtGGNExact": SqrtGGNExact,
    "SqrtGGNExact-some": lambda: SqrtGGNExact(subsampling=[2, 0]),
    "KFAC": lambda: KFAC(2, "expand"),
}
WALKED = [
    c
    for c in CASES
    if c.id in ("narrow", "Conv2d", "LayerNorm", "residual", "gated", "BatchNorm2d")
]


@pytest.mark.parametrize("case", WALKED, ids=[case.id for case in WALKED])
@pytest.mark.parametrize("name", WALKING)
def test_ggn_family_by_module_rules(case: Case, name: str):
    """A module extension that overrides ``backpropagate`` leads to the same results."""
    plain, walking = WALKING[name](), WALKING[name]()
    for cls, extension in {
        nn.Sigmoid: SqrtGGNSigmoid,
        nn.Tanh: SqrtGGNTanh,
        nn.ReLU: SqrtGGNReLU,
    }.items():
        walking.set_module_extension(cls, extension(), overwrite=True)
    assert walking.walks_modules and not plain.walks_modules
    expected, problem = case.build(), case.build()
    for p, ext in ((expected, plain), (problem, walking)):
        torch.manual_seed(1)
        run(p, ext)
    for name, param in problem.model.named_parameters():
        reference = getattr(expected.model.get_parameter(name), plain.savefield)
        assert_agrees(getattr(param, walking.savefield), reference, name)


class Bare(Module):
    """A model whose own parameters are arguments of operations."""

    def __init__(self):
        """Create the parameters; the batch's size is that of one of their axes."""
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 3, N, dtype=F64))
        self.scale = nn.Parameter(torch.randn(N, dtype=F64))
        self.inner = nn.Linear(4, N, dtype=F64)
        self.head = nn.Linear(N, 3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, 4]`` to logits."""
        x = self.inner(x) + self.position
        return self.head(torch.tanh(x * self.scale).mean(1))


class Products(Module):
    """A model of products whose results are views of views."""

    def __init__(self):
        """Create the parameters."""
        super().__init__()
        self.one = nn.Parameter(torch.randn(4, 5, dtype=F64) / 2)
        self.pairs = nn.Parameter(torch.randn(3, 5, 5, dtype=F64) / 2)
        self.bias = nn.Parameter(torch.randn(3, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, 4]`` to logits."""
        x = torch.einsum("nti,io->no", x, self.one).tanh()
        return torch.einsum("ni,oij,nj->no", x, self.pairs, x) + self.bias


class ProductLast(Products):
    """A model that returns a view of what its last operation has computed."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, 4]`` to logits."""
        x = torch.tensordot(x.mean(1), self.one, 1).tanh()
        pairs = self.pairs * self.bias[:, None, None]
        return torch.einsum("ni,oij,nj->no", x, pairs, x)


class Attention(Module):
    """A model that attends, with heads on axis 1."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.inner = nn.Linear(4, 12, dtype=F64)
        self.head = nn.Linear(12, 3, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, 4]`` to logits."""
        x = self.inner(x).unflatten(2, (3, 2, 2)).transpose(1, 3)
        q, k, v = x[:, :, 0], x[:, :, 1], x[:, :, 2]
        x = F.scaled_dot_product_attention(q, k, v)
        return self.head(x.flatten(1))


@pytest.mark.parametrize("cls", [Bare, Products, ProductLast, Attention])
def test_converted_bare_parameters(cls: Callable):
    """Parameters that are arguments of operations get every quantity, too."""
    torch.manual_seed(0)
    model, loss = cls(), nn.CrossEntropyLoss()
    X, y = torch.randn(N, 3, 4, dtype=F64), torch.randint(3, (N,))
    problem = Problem(model, loss, (X,), (y,))
    with sdpa_kernel(SDPBackend.MATH):  # the others have one derivative only
        blocks = {"ggnmp": batch_ggn(*problem), "hmp": hessians(problem)}
    ggn, dense = ({n: b.sum(0) for n, b in blocks[k].items()} for k in blocks)
    converted = extend(model, use_converter=True)
    extensions = (BatchGrad(), DiagGGNExact(), DiagHessian(), HMP(), GGNMP())
    run(Problem(converted, loss, (X,), (y,)), *extensions)
    assert_products(Problem(converted, loss, (X,), (y,)), "ggnmp", ggn)
    assert_products(Problem(converted, loss, (X,), (y,)), "hmp", dense)
    for name, param in converted.named_parameters():
        assert_agrees(param.grad_batch.sum(0), param.grad, name)
        assert_agrees(param.diag_ggn_exact.flatten(), ggn[name].diag(), name)
        assert_agrees(param.diag_h.flatten(), dense[name].diag(), name)


# The table

COVERED = {type(m) for case in CASES for m in case.build().model.modules()}


def test_every_layer_of_the_table_is_tested():
    """Each layer of the table is part of a case, or shares its row with one that is."""
    rows_covered = {id(LAYERS[cls]) for cls in COVERED if cls in LAYERS}
    missing = [
        cls.__name__ for cls, row in LAYERS.items() if id(row) not in rows_covered
    ]
    assert not missing


def test_blanks_have_a_reason():
    """What is left blank in the table of quantities is refused, and says why."""
    quantities = {ext.__name__ for ext in ALL}
    for (cls, quantity), reason in WITHOUT_RULE.items():
        assert cls in LAYERS and quantity in quantities and reason
    blanks = {cls for cls, quantity in WITHOUT_RULE if quantity == "PCHMP"}
    refused = {
        type(m)
        for case in CASES
        if "pchmp" in case.without
        for m in case.build().model.modules()
    }
    assert blanks <= refused


@pytest.mark.parametrize("ext", [DiagHessian, GGNMP, HMP])
@pytest.mark.parametrize("of", ["input", "weight"])
def test_function_that_is_differentiated_once(of: str, ext: type) -> None:
    """It has no second derivative, which is not zero."""

    def forward(m: Module, x: Tensor) -> Tensor:
        return per_sample.Once.apply(x) if of == "input" else x * once(m.w)

    once = per_sample.Once.apply
    part = Lambda(forward, **({} if of == "input" else {"w": per_sample.param(3)}))
    model = extend(Sequential(nn.Linear(2, 3), part, nn.Linear(3, 2)).to(F64))
    loss, says = extend(nn.MSELoss()), "second derivative that PyTorch does not have"
    with pytest.raises(NotImplementedError, match=says), backpack(ext()):
        x, y = torch.rand(2, N, 2, dtype=F64)
        loss(model(x), y).backward()
        for param in model.parameters():
            getattr(param, ext().savefield)(torch.ones_like(param))
