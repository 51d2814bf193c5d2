"""Products with Jacobians and residuals of all layers, against dense ones by autograd.

A row of ``CASES`` is a module, the class of its derivatives and an input. For each, the
dense Jacobians and Hessians are computed entry by entry with plain autograd in double
precision. To test another layer, add a row.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import Tensor, manual_seed, nn, rand, randint, randn, zeros_like
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import Module

from backpack import extend
from backpack.core.derivatives import dropout, parameter_base, shape_check
from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseParameterDerivatives,
)
from backpack.core.derivatives.elementwise import (
    ElementwiseDerivatives,
    PiecewiseLinearDerivatives,
)
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.stored import stored_inputs
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

F64 = torch.float64


class Case(NamedTuple):
    """A module, its derivatives and its input.

    Attributes:
        id: Name of the test.
        derivatives: Class, as ``"file.Class"`` or ``"file.Class(N)"`` in
            ``backpack.core.derivatives``.
        module: Function that creates the module.
        shape: Shape of the input. The entries are drawn from a normal distribution.
        train: Whether the module is in training mode.
        inputs: Function that creates all inputs, in place of ``shape``.
    """

    id: str
    derivatives: str
    module: Callable[[], Module]
    shape: Tuple[int, ...] = ()
    train: bool = False
    inputs: Optional[Callable[[], Tuple[Tensor, ...]]] = None


def wide(*shape: int) -> Tuple[Tensor]:
    """Inputs that reach all pieces of an activation function."""
    return (4 * randn(shape, dtype=F64),)


def with_zeros(*shape: int) -> Tuple[Tensor]:
    """Inputs of which about half are exactly zero."""
    return (randn(shape, dtype=F64) * (rand(shape) > 0.5),)


def shifted(*shape: int) -> Tuple[Tensor]:
    """Inputs with a mean and scale of their own."""
    return (3 + 2 * randn(shape, dtype=F64),)


class ConcatenateFirst(Module):
    """A user's module: two inputs, a tuple of outputs, coupled features."""

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
        return torch.cat([x.cumprod(1), x * y], dim=1), y


class ExpScale(Module):
    """A user's module that is not affine in its parameter, and has a child."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(2, 3))
        self.child = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x @ self.weight.exp().T) ** 2


def _activation(name: str, derivatives: str = "", **options: Any) -> Case:
    derivatives = derivatives or f"{name.lower()}.{name}Derivatives"
    label = "-".join([name] + [f"{k}={v}" for k, v in options.items()])
    module = getattr(nn, name)
    return Case(
        label, derivatives, lambda: module(**options), inputs=lambda: wide(3, 4)
    )


SMOOTH = "elementwise.ElementwiseDerivatives"
PIECES = "elementwise.PiecewiseLinearDerivatives"
LINEAR_MAP = "linear_map.LinearMapDerivatives"
RESHAPE = "flatten.FlattenDerivatives"
GENERIC = "input_base.BaseDerivatives"
CONSTANT_PAD = "zeropad2d.ZeroPad2dDerivatives"
DROPOUT = "dropout.DropoutDerivatives"

ACTIVATIONS = [
    _activation("ReLU"),
    _activation("LeakyReLU"),
    _activation("LeakyReLU", negative_slope=-0.3),
    _activation("ELU"),
    _activation("ELU", alpha=0.7),
    _activation("SELU"),
    _activation("Sigmoid"),
    _activation("LogSigmoid"),
    _activation("Tanh"),
    _activation("GELU", SMOOTH),
    _activation("GELU", SMOOTH, approximate="tanh"),
    _activation("SiLU", SMOOTH),
    _activation("Mish", SMOOTH),
    _activation("Softplus", SMOOTH, beta=2),
    _activation("CELU", SMOOTH, alpha=0.7),
    _activation("Softsign", SMOOTH),
    _activation("Tanhshrink", SMOOTH),
    _activation("Hardswish", SMOOTH),
    _activation("ReLU6", PIECES),
    _activation("Hardtanh", PIECES, min_val=-2.0, max_val=1.0),
    _activation("Softshrink", PIECES),
    _activation("Hardshrink", PIECES),
    _activation("Threshold", PIECES, threshold=0.5, value=3.0),
    _activation("Identity", PIECES),
] + [
    Case(
        f"{name}-zeros",
        f"{name.lower()}.{name}Derivatives",
        getattr(nn, name),
        inputs=lambda: with_zeros(3, 2, 4),
    )
    for name in ("ReLU", "LeakyReLU", "ELU", "SELU")
]

DROPOUTS = [
    Case(
        f"{name}-{'train' if train else 'eval'}",
        DROPOUT,
        lambda cls=getattr(nn, name): cls(0.4),
        train=train,
        inputs=lambda shape=shape: with_zeros(*shape),
    )
    for name, shape in {
        "Dropout": (4, 5),
        "Dropout1d": (3, 4, 2),
        "Dropout2d": (3, 3, 2, 2),
        "Dropout3d": (3, 3, 1, 2, 2),
        "AlphaDropout": (4, 5),
        "FeatureAlphaDropout": (3, 4, 2),
    }.items()
    for train in (True, False)
] + [
    Case("Dropout-none", DROPOUT, lambda: nn.Dropout(0.0), (3, 4), train=True),
    Case("Dropout-all", DROPOUT, lambda: nn.Dropout(1.0), (3, 4), train=True),
]

POOL_SHAPES = {1: (3, 2, 7), 2: (2, 2, 5, 6), 3: (2, 1, 4, 4, 5)}


def _pool(kind: str, n: int, **options: Any) -> Case:
    derivatives = f"{kind.lower()}{n}d.{kind}{n}DDerivatives"
    label = "-".join([f"{kind}{n}d"] + [f"{k}={v}" for k, v in options.items()])
    module = getattr(nn, f"{kind}{n}d")
    return Case(label, derivatives, lambda: module(**options), POOL_SHAPES[n])


POOLING = [
    _pool(kind, n, **options)
    for kind, rows in {
        "MaxPool": [
            {"kernel_size": 2},
            {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
            {"kernel_size": 2, "stride": 1, "dilation": 2},
            {"kernel_size": 3, "stride": 1, "padding": 1},
        ],
        "AvgPool": [
            {"kernel_size": 2},
            {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
            {"kernel_size": 3, "padding": 1, "count_include_pad": False},
        ],
    }.items()
    for options in rows
    for n in (1, 2, 3)
] + [
    _pool(
        "AvgPool", 2, kernel_size=(3, 2), stride=2, ceil_mode=True, divisor_override=5
    ),
    _pool("AvgPool", 3, kernel_size=2, padding=1, divisor_override=3),
    _pool("MaxPool", 2, kernel_size=(3, 2), stride=(1, 2), padding=(1, 0)),
]
POOLING += [
    Case(
        f"AdaptiveAvgPool{n}d-{size}",
        f"adaptive_avg_pool_nd.AdaptiveAvgPool{n}dDerivatives",
        lambda n=n, size=size: getattr(nn, f"AdaptiveAvgPool{n}d")(size),
        shape,
    )
    for n, size, shape in [
        (1, 3, (2, 2, 6)),
        (1, 3, (2, 2, 7)),
        (2, (3, 2), (2, 2, 6, 4)),
        (2, (None, 1), (2, 2, 2, 4)),
        (2, (3, 2), (2, 1, 5, 5)),
        (3, (1, 2, 2), (2, 1, 3, 2, 4)),
        (3, 2, (2, 1, 3, 3, 4)),
    ]
]
POOLING += [
    Case(
        f"AdaptiveMaxPool{n}d-{size}",
        f"maxpoolnd.AdaptiveMaxPoolNDDerivatives({n})",
        lambda n=n, size=size: getattr(nn, f"AdaptiveMaxPool{n}d")(size),
        POOL_SHAPES[n],
    )
    for n, size in [(1, 3), (2, (3, None)), (3, 2)]
]

PADS_AND_SHAPES = [
    Case("Flatten", RESHAPE, nn.Flatten, (3, 2, 3)),
    Case("Flatten-partial", RESHAPE, lambda: nn.Flatten(1, 2), (2, 2, 3, 2)),
    Case("Unflatten", RESHAPE, lambda: nn.Unflatten(1, (2, 3)), (3, 6)),
    Case("Identity", RESHAPE, nn.Identity, (3, 2, 2)),
    Case("Pad", "pad.PadDerivatives", lambda: Pad((1, 2), value=3.0), (3, 2, 2)),
    Case("Pad-crop", "pad.PadDerivatives", lambda: Pad((-1, 0, 2, -1)), (2, 3, 3)),
    Case(
        "Pad-reflect", "pad.PadDerivatives", lambda: Pad((2, 1), "reflect"), (2, 2, 4)
    ),
    Case("ZeroPad1d", CONSTANT_PAD, lambda: nn.ZeroPad1d((1, 2)), (3, 2, 3)),
    Case("ZeroPad2d", CONSTANT_PAD, lambda: nn.ZeroPad2d((1, 0, 2, 1)), (2, 2, 2, 3)),
    Case("ZeroPad3d", CONSTANT_PAD, lambda: nn.ZeroPad3d(1), (2, 1, 2, 1, 2)),
    Case("ConstantPad2d", CONSTANT_PAD, lambda: nn.ConstantPad2d(1, 5.0), (2, 2, 2, 2)),
    Case("ReflectionPad1d", LINEAR_MAP, lambda: nn.ReflectionPad1d(2), (2, 2, 4)),
    Case("ReplicationPad2d", LINEAR_MAP, lambda: nn.ReplicationPad2d(1), (2, 1, 3, 2)),
    Case("CircularPad1d", LINEAR_MAP, lambda: nn.CircularPad1d(1), (2, 2, 3)),
    Case(
        "Slicing",
        "slicing.SlicingDerivatives",
        lambda: Slicing((slice(None), 1, slice(0, 4, 2))),
        (2, 3, 5),
    ),
    Case(
        "Slicing-ellipsis",
        "slicing.SlicingDerivatives",
        lambda: Slicing((..., 0)),
        (2, 3, 2),
    ),
    Case("Permute", "permute.PermuteDerivatives", lambda: Permute(0, 2, 1), (3, 2, 4)),
    Case(
        "Permute-transpose",
        "permute.PermuteDerivatives",
        lambda: Permute(1, 3, init_transpose=True),
        (2, 2, 3, 2),
    ),
    Case(
        "ScaleModule",
        "scale_module.ScaleModuleDerivatives",
        lambda: ScaleModule(-0.3),
        (3, 4),
    ),
    Case(
        "SumModule",
        "sum_module.SumModuleDerivatives",
        SumModule,
        inputs=lambda: wide(3, 4) + wide(3, 4),
    ),
    Case("Upsample", LINEAR_MAP, lambda: nn.Upsample(scale_factor=2), (2, 1, 2, 3)),
    Case(
        "Upsample-bilinear",
        LINEAR_MAP,
        lambda: nn.Upsample(size=(3, 5), mode="bilinear"),
        (2, 1, 2, 3),
    ),
    Case("PixelShuffle", LINEAR_MAP, lambda: nn.PixelShuffle(2), (2, 4, 2, 1)),
    Case("PixelUnshuffle", LINEAR_MAP, lambda: nn.PixelUnshuffle(2), (2, 1, 4, 2)),
    Case("ChannelShuffle", LINEAR_MAP, lambda: nn.ChannelShuffle(2), (2, 4, 2, 1)),
]

COUPLED = [
    Case("Softmax", GENERIC, lambda: nn.Softmax(1), (3, 4)),
    Case("LogSoftmax", GENERIC, lambda: nn.LogSoftmax(-1), (2, 3, 4)),
    Case("GLU", GENERIC, lambda: nn.GLU(1), (3, 6)),
    Case("several-inputs", GENERIC, ConcatenateFirst, inputs=lambda: wide(3, 2) * 2),
    Case("in-place", GENERIC, lambda: nn.ReLU(inplace=True), (3, 4)),
    Case("no-rule", GENERIC, lambda: nn.Conv1d(2, 3, 2), (2, 2, 4)),
]


def _conv(n: int, transposed: bool, shape: Tuple[int, ...], **options: Any) -> Case:
    kind = "ConvTranspose" if transposed else "Conv"
    file = "conv_transpose" if transposed else "conv"
    label = "-".join([f"{kind}{n}d"] + [f"{k}={v}" for k, v in options.items()])
    channels = {"in_channels": shape[1], "out_channels": 2, "kernel_size": 2}
    return Case(
        label,
        f"{file}{n}d.{kind}{n}DDerivatives",
        lambda: getattr(nn, f"{kind}{n}d")(**{**channels, **options}),
        shape,
    )


CONV_SHAPES = {1: (2, 2, 6), 2: (2, 2, 4, 3), 3: (2, 2, 2, 3, 2)}
CONVOLUTIONS = [
    _conv(n, transposed, CONV_SHAPES[n], **options)
    for n in (1, 2, 3)
    for transposed, options in [
        (False, {}),
        (False, {"groups": 2, "bias": False}),
        (False, {"stride": 2, "padding": 1, "dilation": 2}),
        (True, {}),
        (True, {"groups": 2, "out_channels": 4}),
        (True, {"stride": 3, "padding": 1, "dilation": 2, "output_padding": 1}),
    ]
] + [
    _conv(1, False, (2, 2, 6), padding="same", dilation=2),
    _conv(1, False, (2, 2, 5), padding=1, padding_mode="circular"),
    _conv(1, False, (2, 4, 4), groups=2, out_channels=6, kernel_size=1),
    _conv(2, False, (2, 2, 3, 3), padding=(1, 0), padding_mode="reflect", stride=2),
    _conv(2, False, (2, 2, 3, 3), padding="valid", kernel_size=(1, 2)),
    _conv(2, False, (2, 1, 3, 3), padding=1, padding_mode="replicate", groups=1),
    _conv(2, False, (2, 1, 3, 3), padding="same", padding_mode="circular"),
    _conv(2, True, (2, 1, 2, 3), kernel_size=(2, 1), stride=(1, 2), bias=False),
]


def _with_statistics(module: Module) -> Module:
    """Give a normalization layer parameters and statistics that are not trivial."""
    for tensor in list(module.parameters()) + list(module.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(0.5 + rand(tensor.shape))
    return module


def _norm(
    label: str,
    derivatives: str,
    module: Callable[[], Module],
    shape: Tuple[int, ...],
    train: bool = False,
) -> Case:
    return Case(
        label,
        derivatives,
        lambda: _with_statistics(module()),
        inputs=lambda: shifted(*shape),
        train=train,
    )


BATCH_NORM = "batchnorm_nd.BatchNormNdDerivatives"
INSTANCE_NORM = "normalization.InstanceNormNdDerivatives"
LAYER_NORM = "normalization.LayerNormDerivatives"
NORMS = [
    _norm("BatchNorm1d", BATCH_NORM, lambda: nn.BatchNorm1d(3), (4, 3)),
    _norm("BatchNorm1d-sequence", BATCH_NORM, lambda: nn.BatchNorm1d(3), (2, 3, 4)),
    _norm("BatchNorm2d", BATCH_NORM, lambda: nn.BatchNorm2d(2), (2, 2, 3, 2)),
    _norm("BatchNorm3d", BATCH_NORM, lambda: nn.BatchNorm3d(2), (2, 2, 1, 3, 2)),
    _norm(
        "BatchNorm2d-no-affine",
        BATCH_NORM,
        lambda: nn.BatchNorm2d(2, affine=False),
        (2, 2, 3, 2),
    ),
    _norm("LayerNorm", LAYER_NORM, lambda: nn.LayerNorm(4), (3, 4)),
    _norm("LayerNorm-axes", LAYER_NORM, lambda: nn.LayerNorm((3, 2)), (2, 2, 3, 2)),
    _norm(
        "RMSNorm", "normalization.RMSNormDerivatives", lambda: nn.RMSNorm(4), (2, 2, 4)
    ),
    _norm(
        "GroupNorm",
        "normalization.GroupNormDerivatives",
        lambda: nn.GroupNorm(2, 4),
        (2, 4, 3),
    ),
    _norm(
        "InstanceNorm1d",
        INSTANCE_NORM,
        lambda: nn.InstanceNorm1d(2, affine=True),
        (2, 2, 4),
    ),
    _norm(
        "InstanceNorm2d-statistics",
        INSTANCE_NORM,
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        (2, 2, 2, 3),
    ),
    _norm(
        "InstanceNorm3d",
        INSTANCE_NORM,
        lambda: nn.InstanceNorm3d(2, affine=True),
        (2, 2, 2, 1, 2),
    ),
]

LINEAR = "linear.LinearDerivatives"
PRELU = "prelu.PReLUDerivatives"
EMBEDDING = "embedding.EmbeddingDerivatives"
GENERIC_PARAMETER = "parameter_base.BaseParameterDerivatives"
OTHERS = [
    Case("Linear", LINEAR, lambda: nn.Linear(4, 3), (3, 4)),
    Case("Linear-sequence", LINEAR, lambda: nn.Linear(3, 2), (2, 4, 3)),
    Case(
        "Linear-image-no-bias",
        LINEAR,
        lambda: nn.Linear(3, 2, bias=False),
        (2, 2, 2, 3),
    ),
    Case(
        "Embedding",
        EMBEDDING,
        lambda: nn.Embedding(5, 3),
        inputs=lambda: (randint(5, (3, 4)),),
    ),
    Case(
        "Embedding-one-position",
        EMBEDDING,
        lambda: nn.Embedding(4, 2),
        inputs=lambda: (randint(4, (5,)),),
    ),
    Case(
        "Bilinear",
        GENERIC_PARAMETER,
        lambda: nn.Bilinear(2, 3, 2),
        inputs=lambda: wide(3, 2) + wide(3, 3),
    ),
    Case("own-module", GENERIC_PARAMETER, ExpScale, (3, 3)),
    Case("PReLU", PRELU, lambda: nn.PReLU(3), inputs=lambda: wide(2, 3, 2)),
    Case("PReLU-one-slope", PRELU, lambda: nn.PReLU(), (3, 4)),
]

WITHOUT_PARAMETERS = ACTIVATIONS + DROPOUTS + POOLING + PADS_AND_SHAPES + COUPLED
WITH_PARAMETERS = CONVOLUTIONS + NORMS + OTHERS
CASES = WITHOUT_PARAMETERS + WITH_PARAMETERS

# Samples are coupled by the batch's statistics, in which parameters take no part
BATCH_STATISTICS = [
    _norm("BatchNorm1d-train", BATCH_NORM, lambda: nn.BatchNorm1d(3), (4, 3), True),
    _norm(
        "BatchNorm2d-train", BATCH_NORM, lambda: nn.BatchNorm2d(2), (2, 2, 3, 2), True
    ),
    _norm(
        "BatchNorm1d-no-statistics",
        BATCH_NORM,
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        (4, 3),
    ),
]
GENERIC_CLASSES = (BaseDerivatives, BaseParameterDerivatives)
"""They know nothing, so that their predicates say less than is true."""

CAUTIOUS = ["InstanceNorm2d-statistics"]
"""Here the class' predicates say less than is true, which costs time only."""


def _blocks(dense: Tensor, batch_size: int) -> Tensor:
    """Extract samples from ``[N, a, N, b]``, and check that they do not interact.

    Returns:
        Blocks of shape ``[N, a, b]``.
    """
    blocks = dense.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    others = dense.clone()
    others.diagonal(dim1=0, dim2=2).zero_()
    assert not others.any(), "This test is for modules that treat each sample alone."
    return blocks


class Problem:
    """A case's module after a forward pass, with dense derivatives from autograd."""

    def __init__(self, case: Case):
        manual_seed(0)
        self.case = case
        self.module = case.module().to(F64).train(case.train)
        inputs = case.inputs() if case.inputs else (randn(case.shape, dtype=F64),)
        self.differentiable = inputs[0].is_floating_point()
        if self.differentiable:
            inputs = (inputs[0].requires_grad_(),) + inputs[1:]
        for idx, x in enumerate(inputs):
            setattr(self.module, f"input{idx}", x)
        self.x = inputs[0]
        self.module.output = self.forward(self.x)
        self.z = self.module.output
        self.batch_size = len(self.z)
        self.g_out = (randn(self.z.shape, dtype=F64),)
        self.g_inp = (None,)

        path = f"backpack.core.derivatives.{case.derivatives}"
        file, cls = path.rsplit(".", 1)
        cls, *dims = cls.rstrip(")").split("(")
        self.derivatives = getattr(import_module(file), cls)(*map(int, dims))

    def forward(self, x: Tensor, **params: Tensor) -> Tensor:
        """Evaluate the module; randomness is the same in each evaluation."""
        manual_seed(1)
        x = x.clone()  # modules may work in-place
        others = stored_inputs(self.module)[1:]
        output = functional_call(self.module, params, (x, *others))
        return output[0] if isinstance(output, tuple) else output

    @property
    def args(self) -> Tuple:
        """Leading arguments of all derivatives' methods."""
        return self.module, self.g_inp, self.g_out

    @lru_cache(maxsize=None)  # noqa: B019
    def jacobian(self) -> Tensor:
        """Jacobian of each sample w.r.t. the input, ``[N, out, in]``."""
        n = self.batch_size
        dense = jacobian(self.forward, self.x.detach())
        return _blocks(dense.reshape(n, self.z[0].numel(), n, -1), n)

    @lru_cache(maxsize=None)  # noqa: B019
    def hessian(self) -> Tensor:
        """Residual Σ_k δ_k ∂²z_k/∂x² of each sample, ``[N, in, in]``."""
        n = self.batch_size
        dense = hessian(
            lambda x: (self.forward(x) * self.g_out[0]).sum(), self.x.detach()
        )
        return _blocks(dense.reshape(n, self.x[0].numel(), n, -1), n)

    @lru_cache(maxsize=None)  # noqa: B019
    def param_jacobian(self, name: str) -> Tensor:
        """Jacobian of each sample w.r.t. a parameter, ``[N, *out, *p]``."""
        return jacobian(
            lambda param: self.forward(self.x, **{name: param}),
            getattr(self.module, name).detach(),
        )


@lru_cache(maxsize=None)
def make_problem(case: Case) -> Problem:
    """Build the case only once: no test changes it."""
    return Problem(case)


@pytest.fixture
def problem(request) -> Problem:
    """Build the problem of a row."""
    return make_problem(request.param)


def over(cases: List[Case]) -> Callable:
    """Parametrize a test with the problems of some rows."""
    return pytest.mark.parametrize(
        "problem", cases, indirect=True, ids=[case.id for case in cases]
    )


def _takes_floats(case: Case) -> bool:
    return not case.id.startswith("Embedding")


DIFFERENTIABLE = [case for case in CASES if _takes_floats(case)]
COLUMNS = pytest.mark.parametrize("columns", [None, 1, 3], ids="columns={}".format)
SUBSAMPLINGS: List[Any] = [None, [1, 0], [1, 1, 0], [0], [], slice(1, None)]


def columns_like(tensor: Tensor, columns: Optional[int], seed: int = 2) -> Tensor:
    """Draw ``[V, *]``, or ``[*]`` for ``None``."""
    manual_seed(seed)
    leading = [] if columns is None else [columns]
    return randn(*leading, *tensor.shape, dtype=F64)


def select(tensor: Tensor, subsampling: Any) -> Tensor:
    """Select samples from axis 0."""
    return tensor if subsampling is None else tensor[subsampling]


def assert_equal(result: Tensor, expected: Tensor, of: Any = "") -> None:
    """Compare shapes, types and values, relative to the largest entry."""
    result, expected = result.detach(), expected.detach()
    assert result.shape == expected.shape, of
    assert result.dtype == expected.dtype, of
    scale = max([1e-8, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(
        result, expected, rtol=0, atol=1e-10 * scale, msg=lambda text: f"{of}: {text}"
    )


def own_and_generic(problem: Problem) -> List[BaseDerivatives]:
    """Return the class under test, and the generic rules where they apply.

    They evaluate the module again, which draws another dropout mask.
    """
    draws = problem.case.derivatives == DROPOUT and problem.module.training
    return [problem.derivatives] if draws else [problem.derivatives, BaseDerivatives()]


@COLUMNS
@over(DIFFERENTIABLE)
def test_jac_mat_prod(problem: Problem, columns: Optional[int]):
    """Multiply with the Jacobian, by the own and the generic rule."""
    mat = columns_like(problem.x, columns)
    flat = mat.reshape(-1, problem.batch_size, problem.x[0].numel())
    expected = torch.einsum("noi,vni->vno", problem.jacobian(), flat)
    expected = expected.reshape(
        *mat.shape[: mat.dim() - problem.x.dim()], *problem.z.shape
    )
    for derivatives in own_and_generic(problem):
        assert_equal(derivatives.jac_mat_prod(*problem.args, mat), expected)


@COLUMNS
@over(DIFFERENTIABLE)
def test_jac_t_mat_prod(problem: Problem, columns: Optional[int]):
    """Multiply with the transposed Jacobian, by the own and the generic rule."""
    for subsampling in SUBSAMPLINGS:
        like = select(problem.z, subsampling)
        mat = columns_like(like, columns)
        flat = mat.reshape(columns or 1, len(like), problem.z[0].numel())
        jac = select(problem.jacobian(), subsampling)
        expected = torch.einsum("noi,vno->vni", jac, flat).reshape(
            *mat.shape[: mat.dim() - like.dim()], len(like), *problem.x.shape[1:]
        )
        for derivatives in own_and_generic(problem):
            result = derivatives.jac_t_mat_prod(*problem.args, mat, subsampling)
            assert_equal(result, expected, subsampling)
            by_name = derivatives.jac_t_mat_prod(
                *problem.args, mat=mat, subsampling=subsampling
            )
            assert_equal(by_name, expected, subsampling)


@over(DIFFERENTIABLE)
def test_ea_jac_t_mat_jac_prod(problem: Problem):
    """Multiply a matrix that is not symmetric from both sides, and average."""
    jac = problem.jacobian()
    mat = randn(jac.shape[1], jac.shape[1], dtype=F64)
    expected = torch.einsum("noi,op,npj->ij", jac, mat, jac) / problem.batch_size
    for derivatives in own_and_generic(problem):
        result = derivatives.ea_jac_t_mat_jac_prod(*problem.args, mat)
        assert_equal(result, expected)


@over(DIFFERENTIABLE)
def test_predicates(problem: Problem):
    """What is said about Jacobian and Hessian is what autograd finds."""
    derivatives, module = problem.derivatives, problem.module
    dense = problem.hessian()
    diagonal = dense.diagonal(dim1=1, dim2=2).diag_embed()
    is_zero, is_diagonal = not dense.any(), torch.equal(dense, diagonal)
    if type(derivatives) in GENERIC_CLASSES or problem.case.id in CAUTIOUS:
        is_zero = is_diagonal = False
    assert derivatives.hessian_is_zero(module) == is_zero
    assert derivatives.hessian_is_diagonal(module) == is_diagonal
    assert not derivatives.hessian_is_psd()
    if derivatives.jacobian_is_shared(module):
        jac = problem.jacobian()
        assert_equal(jac, jac[:1].expand_as(jac))


@over(DIFFERENTIABLE)
def test_hessian_diagonal(problem: Problem):
    """Compute the residual's diagonal, or refuse where this is not the residual."""
    derivatives = problem.derivatives
    if derivatives.hessian_is_diagonal(problem.module):
        expected = problem.hessian().diagonal(dim1=1, dim2=2).reshape(problem.x.shape)
        result = derivatives.hessian_diagonal(*problem.args)
        assert_equal(result, expected)
    else:
        with pytest.raises(NotImplementedError, match="not diagonal"):
            derivatives.hessian_diagonal(*problem.args)


@COLUMNS
@over(DIFFERENTIABLE)
def test_residual_mat_prod(problem: Problem, columns: Optional[int]):
    """Multiply with the residual, by the own and the generic rule."""
    mat = columns_like(problem.x, columns)
    flat = mat.reshape(-1, problem.batch_size, problem.x[0].numel())
    expected = torch.einsum("nij,vnj->vni", problem.hessian(), flat).reshape(mat.shape)
    for derivatives in own_and_generic(problem):
        result = derivatives.residual_mat_prod(*problem.args, mat)
        assert_equal(result, expected)


ELEMENTWISE = [
    case
    for case in WITHOUT_PARAMETERS
    if case.derivatives == DROPOUT or case in ACTIVATIONS
]


@over(ELEMENTWISE)
def test_first_and_second_derivative(problem: Problem):
    """Check ``df`` and ``d2f``, which users call and override."""
    expected = problem.jacobian().diagonal(dim1=1, dim2=2).reshape(problem.x.shape)
    for subsampling in SUBSAMPLINGS:
        df = problem.derivatives.df(*problem.args, subsampling=subsampling)
        assert_equal(df, select(expected, subsampling), subsampling)
    d2f = problem.derivatives.d2f(*problem.args)
    expected = problem.hessian().diagonal(dim1=1, dim2=2).reshape(problem.x.shape)
    assert_equal((d2f * problem.g_out[0]), expected)


def _param_rows() -> Dict[str, Tuple[Case, str]]:
    rows = {}
    for case in WITH_PARAMETERS + BATCH_STATISTICS:
        for name, _ in case.module().named_parameters():
            rows[f"{case.id}-{name}"] = (case, name)
    return rows


PARAM_ROWS = _param_rows()
over_params = pytest.mark.parametrize(
    "problem, name", PARAM_ROWS.values(), indirect=["problem"], ids=PARAM_ROWS
)


# PyTorch falls back to a loop over samples for some modules, and says so
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@COLUMNS
@over_params
def test_param_mjp(problem: Problem, name: str, columns: Optional[int]):
    """Multiply with the transposed Jacobian with respect to a parameter."""
    param = getattr(problem.module, name)
    for subsampling in SUBSAMPLINGS:
        like = select(problem.z, subsampling)
        mat = columns_like(like, columns)
        jac = select(problem.param_jacobian(name), subsampling)
        jac = jac.reshape(len(like), problem.z[0].numel(), param.numel())
        flat = mat.reshape(columns or 1, len(like), problem.z[0].numel())
        individual = torch.einsum("nop,vno->vnp", jac, flat)
        for sum_batch in (True, False):
            expected = individual.sum(1) if sum_batch else individual
            leading = expected.shape[:-1] if columns else expected.shape[1:-1]
            options = {"sum_batch": sum_batch, "subsampling": subsampling}
            result = problem.derivatives.param_mjp(name, *problem.args, mat, **options)
            assert_equal(result, expected.reshape(*leading, *param.shape), options)


@COLUMNS
@over_params
def test_param_jac_mat_prod(problem: Problem, name: str, columns: Optional[int]):
    """Multiply with the Jacobian with respect to a parameter."""
    param = getattr(problem.module, name)
    mat = columns_like(param, columns)
    jac = problem.param_jacobian(name).reshape(problem.z.numel(), param.numel())
    flat = mat.reshape(-1, param.numel())
    leading = mat.shape[: mat.dim() - param.dim()]
    expected = (flat @ jac.T).reshape(*leading, *problem.z.shape)
    derivatives = problem.derivatives
    result = derivatives.param_jac_mat_prod(name, *problem.args, mat)
    assert_equal(result, expected)
    by_name = getattr(derivatives, f"{name}_jac_mat_prod")(*problem.args, mat)
    assert_equal(by_name, expected)


@over([case for case in CASES if not _takes_floats(case)])
def test_integer_input(problem: Problem):
    """There is no Jacobian with respect to integers."""
    with pytest.raises(ValueError, match="no derivative"):
        problem.derivatives.jac_t_mat_prod(*problem.args, zeros_like(problem.z))


def find(label: str) -> Problem:
    """Build a new problem, to be changed by a test."""
    return Problem(next(case for case in CASES if case.id == label))


@over(DIFFERENTIABLE)
def test_stored_tensors_are_left_alone(problem: Problem):
    """No product changes what is stored on the module."""
    before = {
        key: (id(value), value.detach().clone())
        for key, value in vars(problem.module).items()
        if isinstance(value, Tensor)
    }
    problem.derivatives.jac_t_mat_prod(*problem.args, problem.z[:1].detach(), [0])
    problem.derivatives.jac_mat_prod(*problem.args, problem.x.detach())
    problem.derivatives.residual_mat_prod(*problem.args, problem.x.detach())
    after = {k: v for k, v in vars(problem.module).items() if isinstance(v, Tensor)}
    assert before.keys() == after.keys()
    for key, (identity, value) in before.items():
        assert id(after[key]) == identity
        assert torch.equal(after[key], value)


def _buffers(module: Module) -> Dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_running_statistics_and_children_are_left_alone():
    """Rules that evaluate a module again change nothing that its forward pass does."""
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    norm.register_forward_hook(lambda module, inp, out: setattr(module, "seen", out))
    module = nn.Sequential(norm, nn.Tanh()).to(F64)
    x = randn(2, 2, 4, dtype=F64)

    initial = _buffers(norm)
    module.input0, module.output = x, module(x)
    before, seen = _buffers(norm), norm.seen
    assert any((initial[name] != before[name]).any() for name in before)

    args = (module, (None,), (module.output.detach(),))
    derivatives = BaseParameterDerivatives()
    derivatives.jac_mat_prod(*args, x)
    derivatives.jac_t_mat_prod(*args, x)
    derivatives.residual_mat_prod(*args, x)
    norm.input0, norm.output = x, module.output
    derivatives = find("InstanceNorm1d").derivatives
    derivatives.weight_jac_mat_prod(norm, None, None, norm.weight.detach())

    assert norm.seen is seen
    after = _buffers(norm)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_fast_products_are_used(name: str, monkeypatch: pytest.MonkeyPatch):
    """A layer's own products replace autograd, under each of the methods' names."""
    problem = find("Linear")
    mat = torch.ones(2, *getattr(problem.module, name).shape)
    mat = mat.to(problem.module.output.dtype)
    expected = problem.derivatives.param_jac_mat_prod(name, *problem.args, mat)
    monkeypatch.delattr(parameter_base.stored, "repeat")
    for method in (f"{name}_jac_mat_prod", f"_{name}_jac_mat_prod"):
        product = getattr(problem.derivatives, method)(*problem.args, mat)
        assert torch.equal(product, expected)


@pytest.mark.parametrize(
    "method, shape",
    [
        ("jac_mat_prod", (2, 3, 3)),
        ("jac_mat_prod", (3,)),
        ("jac_t_mat_prod", (2, 3, 4)),
        ("jac_t_mat_prod", (2, 2, 3)),
        ("residual_mat_prod", (2, 4, 4)),
        ("ea_jac_t_mat_jac_prod", (4, 4)),
        ("weight_jac_mat_prod", (2, 4, 3)),
        ("bias_jac_mat_prod", (2, 4)),
    ],
)
def test_wrong_shapes_are_refused(method: str, shape: Tuple[int, ...]):
    """A matrix of wrong shape is refused with a message that shows both shapes."""
    problem = find("Linear")  # [3, 4] to [3, 3]
    with pytest.raises(RuntimeError) as error:
        getattr(problem.derivatives, method)(*problem.args, torch.zeros(shape))
    (message,) = error.value.args
    assert "Expected" in message and str(list(shape)) in message


def test_wrong_shapes_of_cotangents_are_refused():
    """With sub-sampling, the number of cotangents is that of the selected samples."""
    problem = find("Linear")
    with pytest.raises(RuntimeError, match=r"Expected .*\[\*, 2, 3\].* \[1, 3, 3\]"):
        problem.derivatives.param_mjp(
            "weight", *problem.args, torch.zeros(1, 3, 3), subsampling=[0, 2]
        )


def test_wrong_results_are_refused():
    """A rule that returns a wrong shape or number of columns is found out."""

    class Wrong(BaseDerivatives):
        def _jac_mat_prod(self, module, g_inp, g_out, mat):
            return mat[:, :, :-1]

        def _residual_mat_prod(self, module, g_inp, g_out, mat):
            return mat[:-1]

    problem = find("Softmax")
    mat = columns_like(problem.x, 2)
    with pytest.raises(RuntimeError, match=r"\[\*, 3, 4\].*\[2, 3, 3\]"):
        Wrong().jac_mat_prod(*problem.args, mat)
    with pytest.raises(RuntimeError, match="same number of columns"):
        Wrong().residual_mat_prod(*problem.args, mat)
    with pytest.raises(RuntimeError, match="single column"):
        shape_check._remove_V_dim(mat)


def test_outside_elementwise_class():
    """A class with nothing but ``df`` and ``d2f`` in the promised signature works."""

    class Cube(Module):
        def forward(self, x):
            return x**3

    class CubeDerivatives(ElementwiseDerivatives):
        def df(self, module, g_inp, g_out, subsampling=None):
            return 3 * module.input0**2

        def d2f(self, module, g_inp, g_out):
            return 6 * module.input0

        def hessian_is_zero(self, module):
            return False

    module, x = Cube(), randn(3, 2, dtype=F64)
    module.input0, module.output = x, module(x)
    mat, args = randn(1, 2, 2, dtype=F64), (module, (None,), (x,))
    derivatives = CubeDerivatives()
    result = derivatives.jac_t_mat_prod(*args, mat, subsampling=[2, 0])
    assert_equal(result, 3 * x[[2, 0]] ** 2 * mat)
    assert_equal(derivatives.hessian_diagonal(*args), 6 * x * x)


def test_hardsigmoid():
    """PyTorch cannot differentiate it twice, but its second derivative is zero."""
    module, (x,) = nn.Hardsigmoid(), wide(3, 4)
    module.input0, module.output = x, module(x)
    expected = jacobian(lambda x: module(x).sum(), x)
    assert expected.any() and not expected.all()
    derivatives, args = PiecewiseLinearDerivatives(), (module, (None,), (x,))
    assert_equal(derivatives.df(*args), expected)
    assert_equal(derivatives.jac_mat_prod(*args, x), expected * x)
    assert_equal(derivatives.d2f(*args), zeros_like(x))
    assert_equal(derivatives.residual_mat_prod(*args, x), zeros_like(x))


def test_dropout_mask_of_zeros():
    """The mask is the drawn one also where the input is zero, or it is refused."""
    problem = find("Dropout-train")
    module, derivatives = problem.module, problem.derivatives
    assert (problem.x == 0).any()
    ones = torch.ones_like(problem.z)
    (drawn,) = torch.autograd.grad(problem.z, problem.x, ones, retain_graph=True)
    assert len(drawn[problem.x == 0].unique()) == 2
    assert_equal(derivatives.df(*problem.args), drawn)

    dropout.store_mask(module)
    problem.z.sum().backward()  # frees the graph
    assert_equal(derivatives.df(*problem.args), drawn)
    vector = columns_like(problem.z[:2], None)
    result = derivatives.jac_t_mat_prod(*problem.args, vector, subsampling=[3, 1])
    assert_equal(result, drawn[[3, 1]] * vector)

    delattr(module, dropout.MASK)
    module.input0 = problem.x.detach()
    with pytest.raises(RuntimeError, match="not known any more"):
        derivatives.df(*problem.args)

    module.eval()
    dropout.store_mask(module)
    assert_equal(derivatives.df(*problem.args), torch.ones_like(drawn))


def test_dropout_mask_from_values():
    """Without a graph, values determine the mask unless an input is zero."""
    module = nn.Dropout(0.5)
    x = 1 + rand(4, 5, dtype=F64)
    manual_seed(0)
    module.input0, module.output = x, module(x)
    expected = 2.0 * (module.output != 0)
    assert_equal(dropout.drawn_mask(module), expected.to(F64))


@pytest.mark.parametrize("cls", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_needs_graph(cls: Callable):
    """Alpha dropout's mask does not follow from the ratio of output and input."""
    module, x = cls(), rand(3, 4)
    module.input0, module.output = x, module(x)
    with pytest.raises(RuntimeError, match="not known any more"):
        dropout.drawn_mask(module)


def test_inplace_dropout_is_refused():
    """In-place dropout has overwritten its input."""
    module, x = nn.Dropout(inplace=True), rand(3, 4)
    module.input0 = x
    module.output = module(x)
    with pytest.raises(RuntimeError, match="overwritten its input"):
        dropout.drawn_mask(module)


REFUSED = {
    "slicing-samples": ("Slicing", lambda: Slicing((slice(0, 1), 0)), ValueError),
    "padding-samples": ("Pad", lambda: Pad((0, 0, 0, 0, 1, 1)), ValueError),
    "flatten-samples": ("Flatten", lambda: nn.Flatten(0), ValueError),
}


@pytest.mark.parametrize(
    "label, module, error", REFUSED.values(), ids=list(REFUSED), indirect=False
)
def test_modules_that_mix_samples_are_refused(
    label: str, module: Callable[[], Module], error: type
):
    """Products that need samples on axis 0 are refused if they are not there."""
    derivatives = find(label).derivatives
    module, x = module(), randn(2, 3, 2)
    module.input0, module.output = x, module(x)
    out = module.output.shape[1:].numel()
    with pytest.raises(error, match="axis 0"):
        derivatives.ea_jac_t_mat_jac_prod(module, None, None, torch.eye(out))


@pytest.mark.parametrize(
    "problem, divides",
    [(case, "-3" in case.id) for case in POOLING if "AdaptiveAvgPool1d" in case.id],
    indirect=["problem"],
)
def test_adaptive_average_pooling_parameters(problem: Problem, divides: bool):
    """Fixed windows are found if they exist, and else refused."""
    derivatives, module = problem.derivatives, problem.module
    if problem.x.shape[-1] % problem.z.shape[-1]:
        with pytest.raises(NotImplementedError, match="multiple of the output size"):
            derivatives.check_parameters(module)
    else:
        assert derivatives.check_parameters(module) is None
        stride, kernel, padding = derivatives.get_avg_pool_parameters(module)
        plain = nn.AvgPool1d(kernel, stride=stride, padding=padding)
        assert_equal(plain(problem.x), problem.z)


def test_average_pooling_parameters():
    """Every option is accepted."""
    problem = find("AvgPool2d-kernel_size=2")
    assert problem.derivatives.check_parameters(problem.module) is None
    assert problem.derivatives.get_avg_pool_parameters(problem.module) == (2, 2, 0)


def test_pooling_idx():
    """Positions of maxima are those that PyTorch reports."""
    problem = find("MaxPool2d-kernel_size=2")
    _, expected = nn.functional.max_pool2d(problem.x, 2, return_indices=True)
    idx = problem.derivatives.get_pooling_idx(problem.module)
    assert torch.equal(idx, expected)
    idx = problem.derivatives.get_pooling_idx(problem.module, subsampling=[1])
    assert torch.equal(idx, expected[[1]])


def test_unpad():
    """Constant padding can be removed, other modes are refused."""
    derivatives = find("Pad").derivatives
    x, pad = randn(2, 3, 4), (1, 2, 0, 3)
    padded = Pad(pad, value=2.0)(x)
    assert torch.equal(derivatives.unpad(padded, pad, "constant", 2.0), x)
    with pytest.raises(NotImplementedError, match="reflect"):
        derivatives.unpad(padded, pad, "reflect", 0.0)


def test_reshape():
    """Matrices are reshaped with the right number of columns and samples."""
    module = nn.Flatten()
    module.input0 = randn(4, 2, 3)
    module.output = module(module.input0)
    mat = randn(5 * 4 * 6)
    assert BaseDerivatives.reshape_like_input(mat, module).shape == (5, 4, 2, 3)
    assert BaseDerivatives.reshape_like_output(mat, module).shape == (5, 4, 6)
    shape = BaseDerivatives.reshape_like_input(mat, module, subsampling=[0, 2]).shape
    assert shape == (10, 2, 2, 3)


def test_additional_dims() -> None:
    """The axes between samples and features, asked of the class as in BackPACK 1.7."""
    layer = extend(nn.Linear(4, 3))
    layer(torch.randn(6, 2, 5, 4))
    dims = LinearDerivatives._get_additional_dims(layer)
    assert isinstance(dims, torch.Size) and dims == (2, 5)
