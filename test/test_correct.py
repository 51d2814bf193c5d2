"""Right, or refused: what gave a wrong number, none, or an unclear crash elsewhere.

Each row is a model, a loss, and data on which first-order quantities and the GGN family
must agree with plain autograd, or the error or warning that has to come instead.
"""

import io
import pickle
import re
import threading
import warnings
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import F64, Problem, Tensors, drawing, randomize
from per_sample import param as bare
from test_architectures import (
    QUANTITIES,
    Reference,
    assert_right,
    compute,
    field_of,
    make,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import Module, Parameter
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import backpack.extensions as extensions
from backpack import backpack, disable, extend
from backpack.context import CTX
from backpack.custom_module.permute import Permute
from backpack.extensions import (
    HMP,
    KFAC,
    KFLR,
    KFRA,
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
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.sqrt_ggn.activations import SqrtGGNTanh

N = 4
DENSE = [name for name in QUANTITIES if "KF" not in name]
FACTORS = ["KFAC-expand", "KFLR-expand", "EKFAC-expand"]


class Lambda(Module):
    """A model whose forward pass is a function of its parts."""

    def __init__(self, forward: Callable, **parts: Any):
        """Register the parts: modules, parameters, and whatever else."""
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Call the function."""
        return self.function(self, *args, **kwargs)


class Row(NamedTuple):
    """A model, a loss, and data; quantities have to be right.

    Attributes:
        model: Makes the model.
        X: Makes the model's inputs.
        loss: Makes the loss.
        y: Makes the loss's other inputs from the prediction.
        quantities: Which quantities are compared.
        train: Whether the model is in training mode.
    """

    model: Callable[[], Module]
    X: Callable[[], Tensors]
    loss: Callable[[], Module] = nn.CrossEntropyLoss
    y: Callable[[Tensor], Tensors] = lambda f: (torch.arange(len(f)) % f.shape[1],)
    quantities: List[str] = DENSE
    train: bool = False

    def build(self) -> Problem:
        """Make model, loss and data; the same numbers every time."""
        torch.manual_seed(0)
        X, model = self.X(), randomize(self.model().to(F64)).train(self.train)
        loss = self.loss().to(F64)
        return Problem(model, loss, X, self.y(model(*X).detach()))


def randn(*shape: int) -> Callable[[], Tensors]:
    """Make a thunk for a normal input of N samples."""
    return lambda: (torch.randn(N, *shape, dtype=F64),)


def like(f: Tensor) -> Tensors:
    """Draw a target in the shape of the prediction."""
    return (torch.randn_like(f),)


def mse() -> Module:
    """Make the squared error."""
    return nn.MSELoss()


def check(
    problem: Problem,
    quantities: List[str] = DENSE,
    same: Optional[Problem] = None,
) -> None:
    """Compute quantities, and assert that they are right for every parameter.

    Args:
        problem: The problem, which will be extended.
        quantities: Which quantities. Default: the dense ones.
        same: The same problem, for the reference. Default: that one.
    """
    ref = Reference(*(same or problem))
    results = compute(*problem, quantities)
    for quantity, (values, drawn) in results.items():
        assert_right(values, QUANTITIES[quantity].expected(ref, drawn), quantity)


def fields(model: Module, field: str) -> Dict[str, Any]:
    """Collect a field of all parameters that require a gradient."""
    return {n: getattr(p, field) for n, p in oracle.parameters(model).items()}


def assert_fields(
    model: Module, quantity: str, ref: Reference, drawn: Optional[Tensor] = None
) -> None:
    """Assert that what a model's parameters carry is right."""
    field = QUANTITIES[quantity].extension().savefield
    expected = QUANTITIES[quantity].expected(ref, drawn)
    assert_right(fields(model, field), expected, quantity)


def mlp(*between: Module) -> nn.Sequential:
    """Make a small model with modules between two linear layers."""
    return nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 3))


def small() -> Problem:
    """Make a small problem without any quirk."""
    return Row(lambda: mlp(nn.Tanh()), randn(4)).build()


# Rows that are computed


def conv(cls: type, *args: Any, size: int = 4, **options: Any) -> Tuple[Callable, ...]:
    """Make model and inputs: a convolution with 2 input channels, and a mean."""
    dim = int(cls.__name__[-2])

    def model() -> Module:
        return nn.Sequential(cls(2, *args, **options), nn.Tanh(), nn.Flatten(2), Mean())

    return model, randn(2, *[size] * dim)


class Mean(Module):
    """Mean over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean(-1)


PADDED = {
    f"{cls.__name__}-{mode}": Row(
        *conv(cls, 3, 3, padding=1, padding_mode=mode, size=3),
        quantities=DENSE + FACTORS,
    )
    for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for mode in ("circular", "reflect", "replicate")
} | {
    f"{cls.__name__}-{padding}": Row(
        *conv(cls, 3, 2, padding=padding, size=3), quantities=DENSE + FACTORS
    )
    for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for padding in ("same", "valid")
}

GROUPED = {
    f"{cls.__name__}-groups": Row(
        *conv(cls, 4, 2, groups=2, size=3), quantities=DENSE + FACTORS
    )
    for cls in (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
} | {  # norms have a formula of their own for one position, and for few
    f"Conv1d-groups-{size - 2}-positions": Row(
        *conv(nn.Conv1d, 20, 3, groups=2, size=size)
    )
    for size in (3, 4)
}


def tied() -> Module:
    """Make a model in which two modules share weight and bias."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    return model


def called_twice() -> Module:
    """Make a model that calls one module twice, and an in-place activation too."""
    return Lambda(
        lambda m, x: m.head(m.act(m.lin(m.act(m.lin(x))))),
        lin=nn.Linear(4, 4),
        act=nn.ReLU(inplace=True),
        head=nn.Linear(4, 3),
    )


def convolution_called_twice() -> Module:
    """Make a model that calls one convolution twice, on different sizes."""
    return Lambda(
        lambda m, x: m.head(m.conv(F.relu(m.conv(x), inplace=True)).flatten(2).mean(2)),
        conv=nn.Conv2d(2, 2, 2),
        head=nn.Linear(2, 3),
    )


SHARED = {
    "tied-linear": Row(tied, randn(4), quantities=DENSE + FACTORS),
    "called-twice": Row(called_twice, randn(4), quantities=DENSE + FACTORS),
    "convolution-called-twice": Row(
        convolution_called_twice, randn(2, 4, 4), quantities=DENSE + FACTORS
    ),
}


def ignored(value: int) -> Callable[[Tensor], Tensors]:
    """Make a function that returns classes, of which one is to be ignored."""

    def target(f: Tensor) -> Tensors:
        y = torch.arange(len(f)) % f.shape[1]
        y[1] = value
        return (y,)

    return target


def soft(factor: float) -> Callable[[Tensor], Tensors]:
    """Make a function that returns class probabilities whose sum is a factor."""
    return lambda f: (factor * torch.randn_like(f).softmax(1),)


def probabilities(f: Tensor) -> Tensors:
    """Draw numbers between 0 and 1 in the shape of the prediction."""
    return (torch.rand_like(f),)


def counts(f: Tensor) -> Tensors:
    """Draw whole numbers in the shape of the prediction."""
    return (torch.randint(4, f.shape).to(F64),)


class Cauchy(Module):
    """A user's own loss: convex where the residual is small."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average the loss over samples."""
        return torch.log(torch.cosh(f - y)).sum() / len(f)


def loss_row(loss: Callable[[], Module], y: Callable[[Tensor], Tensors]) -> Row:
    """Make a row that tests a loss."""
    return Row(lambda: mlp(nn.Tanh()), randn(4), loss, y)


def classes(f: Tensor) -> Tensors:
    """Return class indices."""
    return (torch.arange(len(f)) % f.shape[1],)


def cross_entropy(**options: Any) -> Callable[[], Module]:
    """Make a function that makes a cross-entropy loss."""
    return lambda: nn.CrossEntropyLoss(**options)


W3 = torch.tensor([0.2, 1.0, 3.0], dtype=F64)
LOSSES = {
    "cross-entropy-default-ignore-index": loss_row(cross_entropy(), ignored(-100)),
    "cross-entropy-ignore-index": loss_row(cross_entropy(ignore_index=2), ignored(2)),
    "cross-entropy-weight": loss_row(cross_entropy(weight=W3), classes),
    "cross-entropy-weight-ignored": loss_row(cross_entropy(weight=W3), ignored(-100)),
    "cross-entropy-smooth": loss_row(cross_entropy(label_smoothing=0.2), classes),
    "cross-entropy-smooth-weight": loss_row(
        cross_entropy(label_smoothing=0.2, weight=W3, reduction="sum"), classes
    ),
    "cross-entropy-soft": loss_row(cross_entropy(), soft(1.0)),
    "cross-entropy-soft-other-sum": loss_row(cross_entropy(), soft(0.7)),
    "cross-entropy-soft-weight": loss_row(cross_entropy(weight=W3), soft(0.7)),
    "bce-matrix": loss_row(nn.BCEWithLogitsLoss, probabilities),
    "bce-pos-weight": loss_row(
        lambda: nn.BCEWithLogitsLoss(pos_weight=W3), probabilities
    ),
    "bce-weight": loss_row(
        lambda: nn.BCEWithLogitsLoss(weight=W3, reduction="sum"), probabilities
    ),
    "smooth-l1": loss_row(lambda: nn.SmoothL1Loss(beta=2.0), like),
    "huber": loss_row(lambda: nn.HuberLoss(delta=1.5), like),
    "poisson-nll": loss_row(nn.PoissonNLLLoss, counts),
    "gaussian-nll": loss_row(
        nn.GaussianNLLLoss, lambda f: (torch.randn_like(f), 0.5 + torch.rand_like(f))
    ),
    "own-loss": loss_row(Cauchy, like),
    "mse-any-shape": Row(
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)),
        randn(2, 3),
        nn.MSELoss,
        like,
        DENSE + FACTORS,
    ),
    "nll": Row(lambda: mlp(nn.Tanh()), randn(4), nn.NLLLoss),
    "kl-div": loss_row(
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda f: (torch.randn_like(f).softmax(1),),
    ),
    "nll-log-softmax": Row(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), randn(4), nn.NLLLoss
    ),
}

POOLING = {
    "avg-pool-divisor": Row(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2),
            nn.AvgPool2d(2, 2, divisor_override=3),
            nn.Flatten(),
            nn.Linear(3, 3),
        ),
        randn(2, 4, 4),
    ),
    "avg-pool-ceil": Row(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2),
            nn.AvgPool2d(2, 2, ceil_mode=True, padding=1, count_include_pad=False),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        randn(2, 4, 4),
    ),
    "adaptive-max-pool": Row(
        lambda: nn.Sequential(
            nn.Conv2d(2, 1, 2), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)
        ),
        randn(2, 4, 4),
    ),
    "upsample": Row(
        lambda: nn.Sequential(
            nn.Conv1d(2, 1, 2),
            nn.Upsample(scale_factor=2, mode="linear"),
            nn.Flatten(),
            nn.Linear(6, 3),
        ),
        randn(2, 4),
    ),
    "pixel-shuffle": Row(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        randn(2, 3, 3),
    ),
    "channel-shuffle": Row(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.ChannelShuffle(2), nn.Flatten(), nn.Linear(4, 3)
        ),
        randn(2, 2, 2),
    ),
    "unflatten": Row(
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 2), nn.Flatten()
        ),
        randn(4),
    ),
    "conv-transpose-output-padding": Row(
        *conv(nn.ConvTranspose2d, 3, 2, stride=2, output_padding=1, size=2)
    ),
    "conv-transpose-output-size": Row(
        lambda: Lambda(
            lambda m, x: m.up(x, output_size=[7]).mean(2),
            up=nn.ConvTranspose1d(2, 3, 2, stride=2),
        ),
        randn(2, 3),
    ),
}

ACTIVATIONS = {
    f"activation-{type(act).__name__}": Row(lambda act=act: mlp(act), randn(4))
    for act in (
        nn.GELU(),
        nn.SiLU(),
        nn.Mish(),
        nn.Softplus(),
        nn.Softmax(dim=1),
        nn.LogSoftmax(dim=1),
        nn.PReLU(),
        nn.PReLU(4),
        nn.ReLU6(),
        nn.Hardswish(),
        nn.Hardtanh(),
        nn.CELU(),
        nn.Dropout(),
        nn.ReLU(inplace=True),
        nn.ELU(inplace=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Hardtanh(inplace=True),
        nn.SiLU(inplace=True),
    )
} | {
    "activation-GLU": Row(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 3)), randn(4)
    ),
}

NORMS = {
    f"norm-{i}": Row(
        lambda norm=norm: nn.Sequential(
            nn.Conv1d(2, 4, 1),
            nn.Tanh(),
            deepcopy(norm),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        randn(2, 3),
    )
    for i, norm in enumerate(
        [
            nn.LayerNorm(3),
            nn.LayerNorm([4, 3], elementwise_affine=False),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm1d(4, affine=True),
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            nn.RMSNorm(3),
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4, affine=False),
        ]
    )
}


class Recurrent(Module):
    """Recurrent layer, whose outputs and final states all enter the prediction."""

    def __init__(self, cls: type, **options: Any):
        """Create the layer."""
        super().__init__()
        self.rnn = cls(3, 2, **options)

    def forward(self, x: Tensor, state: Optional[Tensor] = None) -> Tensor:
        """Map ``[N, T, 3]``, and an initial state ``[N, L, 2]``, to ``[N, C]``."""
        if not self.rnn.batch_first:
            x = x.transpose(0, 1)
        initial = None if state is None else state.transpose(0, 1).contiguous()
        if isinstance(self.rnn, nn.LSTM) and initial is not None:
            initial = (initial, initial.cos())
        out, final = self.rnn(x, initial)
        if not self.rnn.batch_first:
            out = out.transpose(0, 1)
        final = final if isinstance(final, tuple) else (final,)
        states = [s.transpose(0, 1).flatten(1) for s in final]
        return torch.cat([out[:, -1], out.mean(1), *states], 1)


RECURRENT = {
    f"{cls.__name__}-{'-'.join(map(str, options)) or 'plain'}-{initial}": Row(
        lambda cls=cls, options=options: Recurrent(cls, **options),
        lambda initial=initial, options=options: (
            torch.randn(N, 3, 3, dtype=F64),
            *[
                torch.randn(
                    N,
                    options.get("num_layers", 1) * (1 + ("bidirectional" in options)),
                    2,
                    dtype=F64,
                )
            ][:initial],
        ),
        quantities=["BatchGrad", "Variance", "BatchDotGrad", "DiagGGNExact"],
    )
    for cls in (nn.RNN, nn.LSTM, nn.GRU)
    for options in (
        {"batch_first": True},
        {},
        {"num_layers": 2, "batch_first": True},
        {"bidirectional": True},
    )
    for initial in (0, 1)
}


class Residual(Module):
    """Residuals, concatenation, slices, functional operations, keyword arguments."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        """Combine two inputs."""
        h = F.relu(self.fc1(input=x), inplace=True)
        h = h + self.fc2(h * torch.sigmoid(shift))
        return self.out(torch.cat([h, x.square(), h[:, 1:3]], dim=1))


class Scale(Module):
    """A module with a bare parameter."""

    def __init__(self, size: int):
        """Create the parameter."""
        super().__init__()
        self.scale = Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return self.scale * x


class MyLinear(nn.Linear):
    """A subclass that computes the same."""


class OtherLinear(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the weight to the squared input, too."""
        return super().forward(x) + F.linear(x**2, self.weight)


class Symmetric(Module):
    """Parametrization of a symmetric matrix."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the symmetric matrix with the same upper triangle."""
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric() -> Module:
    """Make a model with a parametrized weight."""
    model = mlp(nn.Tanh())
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


def attention() -> Module:
    """Make a model with PyTorch's attention, sequence first."""
    return Lambda(
        lambda m, x: m.head(m.att(*[x.transpose(0, 1)] * 3)[0].mean(0)),
        att=nn.MultiheadAttention(4, 2),
        head=nn.Linear(4, 3),
    )


def encoder() -> Module:
    """Make a model with PyTorch's encoder layer."""
    return Lambda(
        lambda m, x: m.layer(x).mean(1),
        layer=nn.TransformerEncoderLayer(4, 2, 5, batch_first=True),
    )


def checkpointed() -> Module:
    """Make a model that recomputes its first half in the backward pass."""
    return Lambda(
        lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)),
        body=nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        head=nn.Linear(4, 3),
    )


def clashing() -> Module:
    """Make a model with attributes of the names under which tensors are stored."""
    return Lambda(
        lambda m, x: m.output(torch.tanh(m.input0(x)) * m.input1),
        input0=nn.Linear(4, 4),
        input1=Parameter(torch.ones(4)),
        output=nn.Linear(4, 3),
    )


def tokens(*shape: int) -> Callable[[], Tensors]:
    """Make a thunk for token indices of N samples."""
    return lambda: (torch.randint(5, (N, *shape)),)


def positions(called: Callable[[Module, Tensor], Tensor]) -> Callable[[], Module]:
    """Make a function that makes a model with an embedding of all positions.

    Its axis 0 holds positions. If there are as many as samples, sizes don't tell.
    """
    return lambda: Lambda(
        lambda m, x: m.head((m.token(x) + called(m, x)).tanh().sum(1)),
        token=nn.Embedding(5, 3),
        position=nn.Embedding(6, 3),
        head=nn.Linear(3, 3),
    )


POSITIONS = {
    "range": lambda m, x: m.position(torch.arange(x.shape[1])),
    "range-unsqueezed": lambda m, x: m.position(torch.arange(x.shape[1]))[None],
    "range-1": lambda m, x: m.position(torch.arange(x.shape[1])[None]),
    "range-expanded": lambda m, x: m.position(torch.arange(x.shape[1]).expand_as(x)),
}


class Heads(Module):
    """A module with a bare parameter and several outputs."""

    def __init__(self, outputs: Callable[[Module, Tensor], Tuple[Tensor, ...]]):
        """Choose the outputs."""
        super().__init__()
        self.scale, self.fc = Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Return them."""
        return self.outputs(self, self.fc(torch.tanh(x * self.scale)))


HEADS = {  # the outputs, and which of them are used
    "of-each-other": (lambda m, f: (m.fc(f).sin(), f), [[0], [1], [0, 1]]),
    "the-other-way-round": (lambda m, f: (f, m.fc(f).sin()), [[0], [1], [0, 1]]),
    "twice-the-same": (lambda m, f: (f, f), [[0], [1], [0, 1]]),
    "a-chain": (
        lambda m, f: (f, m.fc(f).sin(), (m.scale * m.fc(f)).cos()),
        [[1], [2], [0, 2], [0, 1, 2]],
    ),
}


def outputs(kind: str, used: List[int]) -> Callable[[], Module]:
    """Make a function that makes a model with a module of several outputs."""
    return lambda: Lambda(
        lambda m, x: m.head(sum(torch.sin(m.heads(x)[i]) for i in used)),
        heads=Heads(HEADS[kind][0]),
        head=nn.Linear(4, 3),
    )


def cells(m: Module, x: Tensor) -> Tensor:
    """Run two steps of a recurrent cell."""
    return m.head(m.cell(x[:, 1], m.cell(x[:, 0]))[0])


class Doubled(nn.Conv1d):
    """A convolution with twice the weight, by a method inside."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return super()._conv_forward(x, 2 * weight, bias)


class Tripled(nn.CrossEntropyLoss):
    """Three times the cross-entropy."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute it."""
        return 3 * super().forward(x, y)


def patched() -> Module:
    """Make a layer whose method inside is changed on the instance."""
    layer = nn.Conv1d(2, 3, 2)
    inside = layer._conv_forward
    layer._conv_forward = lambda x, weight, bias: inside(x, 2 * weight, bias)
    return layer


class Prepared(Module):
    """A module that computes its weight before it is called."""

    def __init__(self):
        """Create the parameter."""
        super().__init__()
        self.weight = Parameter(torch.ones(4))

    def prepare(self) -> None:
        """Compute the weight."""
        self.scale = torch.tanh(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * self.scale


def prepare(m: Module, x: Tensor) -> Tensor:
    """Have the weight computed in time."""
    m.inner.prepare()
    return m.head(m.inner(x))


class Packing(nn.Linear):
    """A layer that returns something else than tensors."""

    def __init__(self, pack: Callable[[Tensor], Any]):
        """Choose what it returns."""
        super().__init__(4, 3)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        """Map ``[N, 4]``."""
        return self.pack(super().forward(x))


class Wrapped(Module):
    """A model in which a layer returns something else than tensors."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]):
        """Create the layers."""
        super().__init__()
        self.layer, self.unpack, self.head = Packing(pack), unpack, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 4]``."""
        return self.head(self.unpack(self.layer(x)).tanh())


WRAPPERS = {
    "object": (lambda x: SimpleNamespace(value=x), lambda out: out.value),
    "generator": (lambda x: (y for y in [x]), next),
    "complex": (lambda x: torch.complex(x, x), lambda out: out.real),
}


class Routed(Module):
    """A mixture of experts, each of which gets the samples that are routed to it."""

    def __init__(self, before: Module, threshold: float):
        """Create a layer before the experts, and the experts."""
        super().__init__()
        self.before, self.threshold = before, threshold
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        """Send each sample to one expert."""
        x = self.before(x)
        out = x.new_zeros(len(x), 3)
        route = (x[:, 0] > self.threshold).long()
        for i, expert in enumerate(self.experts):
            mine = route == i
            out[mine] = expert(x[mine])
        return out


MODELS = {
    **{
        f"outputs-{kind}-{used}": Row(outputs(kind, used), randn(4))
        for kind, (_, uses) in HEADS.items()
        for used in uses
    },
    **{  # to both experts, or to one of them
        f"routed-{type(before()).__name__}-{threshold}": Row(
            lambda before=before, threshold=threshold: Routed(before(), threshold),
            randn(4),
        )
        for before in (nn.Identity, lambda: nn.Linear(4, 4))
        for threshold in (0.0, -99.0, 99.0)
    },
    "lstm-cell": Row(
        lambda: Lambda(cells, cell=nn.LSTMCell(4, 4), head=nn.Linear(4, 3)), randn(2, 4)
    ),
    "weight-computed-before": Row(
        lambda: Lambda(prepare, inner=Prepared(), head=nn.Linear(4, 3)), randn(4)
    ),
    **{
        f"output-{kind}": Row(lambda wrap=wrap: Wrapped(*wrap), randn(4))
        for kind, wrap in WRAPPERS.items()
    },
    "subclass-with-another-method": Row(
        lambda: nn.Sequential(Doubled(2, 3, 2), nn.Flatten(), nn.Linear(9, 3)),
        randn(2, 4),
        Tripled,
    ),
    "instance-with-another-method": Row(
        lambda: nn.Sequential(patched(), nn.Flatten(), nn.Linear(9, 3)), randn(2, 4)
    ),
    "children-called-with-functions-between": Row(
        lambda: Lambda(
            lambda m, x: m.fc2(m.fc1(x).transpose(1, 2))[:, :, 0],
            fc1=nn.Linear(4, 2),
            fc2=nn.Linear(3, 2),
        ),
        randn(3, 4),
        mse,
        like,
        DENSE + FACTORS,
    ),
    "residual": Row(
        Residual,
        lambda: (torch.randn(N, 4, dtype=F64), torch.randn(N, 4, dtype=F64)),
        quantities=DENSE + FACTORS,
    ),
    "bare-parameter": Row(lambda: mlp(Scale(4)), randn(4), quantities=DENSE + FACTORS),
    "subclass": Row(
        lambda: nn.Sequential(MyLinear(4, 4), nn.Tanh(), OtherLinear(4, 3)), randn(4)
    ),
    "weight-norm": Row(
        lambda: nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)), randn(4)
    ),
    "parametrized": Row(symmetric, randn(4)),
    "attention": Row(attention, randn(2, 4)),
    "transformer-encoder-layer": Row(encoder, randn(2, 4)),
    "bilinear": Row(
        lambda: nn.Bilinear(2, 3, 3),
        lambda: (torch.randn(N, 2, dtype=F64), torch.randn(N, 3, dtype=F64)),
    ),
    "embedding-bag": Row(
        lambda: nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 3)), tokens(3)
    ),
    "embedding-padding": Row(
        lambda: nn.Sequential(
            nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(6, 3)
        ),
        lambda: (torch.tensor([[0, 1, 2], [3, 0, 0], [4, 4, 1], [2, 0, 2]]),),
    ),
    "checkpointed": Row(checkpointed, randn(4), quantities=DENSE + FACTORS, train=True),
    "clashing-attributes": Row(clashing, randn(4)),
    "in-place-on-a-view": Row(  # as linear layers return on sequences
        lambda: Lambda(
            lambda m, x: m.fc2(F.relu_(m.fc1(x).add_(x)).mean(1)),
            fc1=nn.Linear(4, 4),
            fc2=nn.Linear(4, 3),
        ),
        randn(2, 4),
        quantities=DENSE + FACTORS,
    ),
    **{
        f"positions-{name}-{length}": Row(positions(called), tokens(length))
        for name, called in POSITIONS.items()
        for length in (3, N)
    },
    "in-place-after-a-bare-parameter": Row(
        lambda: nn.Sequential(Scale(4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
        randn(4),
        quantities=DENSE + FACTORS,
    ),
    "in-place-sum": Row(
        lambda: Lambda(
            lambda m, x: m.fc2(F.relu_(m.fc1(x).add_(1.0).mul_(m.scale))),
            fc1=nn.Linear(4, 4),
            scale=Parameter(torch.ones(4)),
            fc2=nn.Linear(4, 3),
        ),
        randn(4),
    ),
    "batch-of-one": Row(
        lambda: mlp(nn.Tanh()), lambda: (torch.randn(1, 4, dtype=F64),)
    ),
    "parameter-of-a-module-that-is-not-called": Row(
        lambda: Lambda(
            lambda m, x: F.linear(m.fc1(x).tanh(), m.fc2.weight, m.fc2.bias),
            fc1=nn.Linear(4, 4),
            fc2=nn.Linear(4, 3),
        ),
        randn(4),
    ),
}

ROWS = {
    **PADDED,
    **GROUPED,
    **SHARED,
    **LOSSES,
    **POOLING,
    **ACTIVATIONS,
    **NORMS,
    **RECURRENT,
    **MODELS,
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("row", ROWS)
def test_computed(row: str) -> None:
    """Every quantity of every parameter agrees with plain autograd."""
    check(ROWS[row].build(), ROWS[row].quantities, ROWS[row].build())


@pytest.mark.parametrize("sharing", [None, "expand", "reduce"])
@pytest.mark.parametrize("factors", [KFAC, KFLR])
def test_weight_sharing(factors: type, sharing: Optional[str]) -> None:
    """Kronecker factors of convolutions and biases follow the option."""
    problem = Row(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)
        ),
        randn(2, 4, 4),
    ).build()
    ref = Reference(*problem)
    ext = factors(weight_sharing=sharing)
    model, loss = extend(problem.model), extend(problem.loss)
    loss_value = loss(model(*problem.X), *problem.y)
    torch.manual_seed(1)
    with backpack(ext):
        loss_value.backward()
    columns = ref.columns()
    if factors is KFAC:  # two classes: p (1 - p) is all there is to draw
        model, loss = deepcopy(problem.model), deepcopy(problem.loss)
        value = loss(model(*problem.X), *problem.y)
        torch.manual_seed(1)
        with backpack(SqrtGGNMC()):
            value.backward()
        # the last bias's Jacobian is the identity
        columns = model[-1].bias.sqrt_ggn_mc
    actual = fields(problem.model, ext.savefield)
    for name, expected in ref.factors(columns, sharing).items():
        oracle.assert_agrees(actual[name], expected, name)


# Where a row does not say it all: losses, passes, and what is extended


def test_calls_keep_their_inputs() -> None:
    """Two forward passes, then a backward pass through the first."""
    model, loss, (x,), y = small()
    ref = Reference(deepcopy(model), deepcopy(loss), (x,), y)
    later = Reference(deepcopy(model), deepcopy(loss), (x + 1.0,), y)
    model, loss = extend(model), extend(loss)
    first = loss(model(x), *y)
    second = loss(model(x + 1.0), *y)
    with backpack(BatchGrad(), DiagGGNExact(), SqrtGGNExact()):
        first.backward()
    for quantity in ("BatchGrad", "DiagGGNExact", "SqrtGGNExact"):
        assert_fields(model, quantity, ref)
    with backpack(BatchGrad()):
        second.backward()
    assert_fields(model, "BatchGrad", later)


def test_several_backward_passes_in_a_context() -> None:
    """Each pass overwrites the fields, and nothing of the one before enters."""
    model, loss, (x,), y = small()
    shifts = range(4)
    refs = [Reference(deepcopy(model), deepcopy(loss), (x + s,), y) for s in shifts]
    quantities = "BatchGrad", "SumGradSquared", "DiagGGNExact"
    expected = [{q: QUANTITIES[q].expected(r, None) for q in quantities} for r in refs]
    model, loss = extend(model), extend(loss)
    exts = BatchGrad(), SumGradSquared(), DiagGGNExact(), KFLR()
    with backpack(*exts):
        for shift in shifts:
            loss(model(x + shift), *y).backward()
            for quantity, values in expected[shift].items():
                field = QUANTITIES[quantity].extension().savefield
                assert_right(fields(model, field), values, quantity)
    for ext in exts:
        assert not ext.saved_quantities._saved_quantities


class Weighted(Module):
    """What is differentiated where several losses are combined: the reference."""

    def __init__(self, parts: List[Tuple[float, Module, slice]]):
        """Store factor, loss, and slice of the prediction of each term."""
        super().__init__()
        self.parts = parts

    def forward(self, f: Tensor, *ys: Tensor) -> Tensor:
        """Add the terms."""
        terms = zip(self.parts, ys)
        return sum(c * loss(f[:, part], y) for (c, loss, part), y in terms)


EVERYTHING, FIRST, SECOND = slice(None), slice(0, 3), slice(3, 5)
MANY, FEW = slice(0, 12), slice(12, 14)  # more columns than are stored, and fewer
COMBINATIONS = {
    "scaled": [(0.3, nn.CrossEntropyLoss(), EVERYTHING)],
    "added": [
        (1.0, nn.CrossEntropyLoss(), EVERYTHING),
        (1.0, nn.MSELoss(reduction="sum"), EVERYTHING),
    ],
    "added-and-scaled": [
        (0.5, nn.CrossEntropyLoss(), EVERYTHING),
        (2.0, nn.MSELoss(), EVERYTHING),
    ],
    "two-heads": [(1.0, nn.CrossEntropyLoss(), FIRST), (1.0, nn.MSELoss(), SECOND)],
    "two-heads-scaled": [
        (2.0, nn.CrossEntropyLoss(), FIRST),
        (0.1, nn.MSELoss(), SECOND),
    ],
    "many-few": [(1.0, nn.CrossEntropyLoss(), MANY), (1.0, nn.MSELoss(), FEW)],
    "few-many": [(1.0, nn.MSELoss(), FEW), (1.0, nn.CrossEntropyLoss(), MANY)],
}


MASK = torch.tensor([True, False, False, True], device="cpu").numpy()
SUBSAMPLINGS = {
    "none": [],
    "tuple": (2, 0),
    "range": range(1, 3),
    "tensor": torch.tensor([3, 1]),
    "slice": slice(0, 2),
    "slice-step": slice(None, None, 2),
    "from-the-end": [-1, 0],
    "twice": [1, 1],
    "numpy": torch.tensor([3, 1], device="cpu").numpy(),
    "numpy-integers": list(torch.tensor([3, 1], device="cpu").numpy()),
    "mask": torch.tensor([True, False, False, True]),
    "mask-list": [True, False, False, True],
    "mask-none": [False] * 4,
    "mask-numpy": MASK,
    "mask-numpy-list": list(MASK),
}


@pytest.mark.parametrize(
    "three", [torch.tensor(3), torch.tensor([3], device="cpu").numpy()[0]]
)
def test_integers(three: Any) -> None:
    """What counts may be a tensor, or an integer of NumPy."""
    counts = KFAC(mc_samples=three).source.mc_samples, BatchProjectGrad(three)
    net, loss = extend(nn.Linear(4, 2)), extend(nn.MSELoss())
    with backpack(counts[1]):
        loss(net(torch.randn(N, 4)), torch.randn(N, 2)).backward()
    assert counts[0] == 3 and type(counts[0]) is int
    assert net.weight.grad_projected.shape == (N, 3, 3)


@pytest.mark.parametrize("name", SUBSAMPLINGS)
@pytest.mark.parametrize("model", ["linear", "convolution", "embedding"])
def test_subsampling(model: str, name: str) -> None:
    """Any way to name samples selects them."""
    torch.manual_seed(0)
    picked = SUBSAMPLINGS[name]
    index = picked if isinstance(picked, slice) else torch.as_tensor(picked)
    if name == "none":
        index = picked
    net = {
        "linear": lambda: mlp(nn.Tanh()),
        "convolution": lambda: nn.Sequential(
            nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)
        ),
        "embedding": lambda: nn.Sequential(
            nn.Embedding(4, 2), nn.Flatten(), nn.Linear(6, 3)
        ),
    }[model]()
    x = {
        "linear": torch.randn(N, 4, dtype=F64),
        "convolution": torch.randn(N, 2, 3, dtype=F64),
        "embedding": torch.randint(4, (N, 3)),
    }[model]
    net, loss = extend(net.to(F64)), extend(nn.CrossEntropyLoss())
    walking = SqrtGGNExact(picked)
    walking.savefield = "walking"
    walking.set_module_extension(nn.Tanh, SqrtGGNTanh(), overwrite=True)
    y = torch.randint(3, (N,))
    with backpack(BatchGrad(), BatchDotGrad(), SqrtGGNExact()):
        loss(net(x), y).backward()
    full = [
        {f: getattr(p, f) for f in ("grad_batch", "batch_dot", "sqrt_ggn_exact")}
        for p in net.parameters()
    ]
    some = BatchGrad(picked), BatchDotGrad(picked), SqrtGGNExact(picked), walking
    with backpack(*some):
        loss(net(x), y).backward()
    for param, every in zip(net.parameters(), full):
        dots = every["batch_dot"][index][:, index]
        oracle.assert_agrees(param.grad_batch, every["grad_batch"][index])
        oracle.assert_agrees(param.batch_dot, dots)
        for field in ("sqrt_ggn_exact", "walking"):
            columns = every["sqrt_ggn_exact"][:, index]
            oracle.assert_agrees(getattr(param, field), columns)


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.usefixtures("cpu")
def test_combined_losses(name: str) -> None:
    """Each loss's columns carry their own factor; a warning tells of factors."""
    parts = COMBINATIONS[name]
    torch.manual_seed(0)
    x = torch.randn(N, 4, dtype=F64)
    many = "many" in name

    def forward(m: Module, x: Tensor) -> Tensor:
        z = m.body(x)
        return torch.cat([m.head1(z), m.head2(z if many else m.body(x))], 1)

    model = Lambda(
        forward,
        body=nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        head1=nn.Linear(4, MANY.stop if many else FIRST.stop),
        head2=nn.Linear(4, 2),
    ).to(F64)
    f = model(x).detach()
    ys = tuple(
        (
            classes(f[:, part])[0]
            if isinstance(loss, nn.CrossEntropyLoss)
            else torch.randn_like(f[:, part])
        )
        for _, loss, part in parts
    )
    ref = Reference(deepcopy(model), Weighted(parts), (x,), ys)
    model = extend(model)
    out = model(x)
    losses = [extend(deepcopy(loss)) for _, loss, _ in parts]
    terms = zip(parts, losses, ys)
    value = sum(
        (c * ls(out[:, part], y) if c != 1.0 else ls(out[:, part], y))
        for (c, _, part), ls, y in terms
    )
    exts = BatchGrad(), DiagGGNExact(), SqrtGGNExact(), BatchDiagGGNExact()
    exts += (KFLR(),) if many else ()
    with warnings.catch_warnings(record=True) as caught, backpack(*exts):
        warnings.simplefilter("always")
        value.backward()
    scaled = [str(w.message) for w in caught if "modified" in str(w.message)]
    assert len(scaled) == sum(c != 1.0 for c, *_ in parts)
    for quantity in ("BatchGrad", "DiagGGNExact", "SqrtGGNExact", "BatchDiagGGNExact"):
        assert_fields(model, quantity, ref)
    for key, param in model.named_parameters():
        if many and key.endswith("bias"):  # a single factor, so nothing is approximated
            oracle.assert_agrees(param.kflr[0].diagonal(), param.diag_ggn_exact)


def test_losses_on_two_outputs() -> None:
    """One loss sees what a layer returns first, the other one what comes second."""
    torch.manual_seed(0)
    x, ys = torch.randn(N, 2, 3, dtype=F64), tuple(torch.randn(2, N, 3, dtype=F64))
    model = Lambda(
        lambda m, x: torch.cat([(z := m.rnn(x))[0][:, -1], z[1][1][0]], 1),
        rnn=nn.LSTM(3, 3, batch_first=True, dtype=F64),
    )
    parts = [(1.0, nn.MSELoss(), slice(i, i + 3)) for i in (0, 3)]
    ref = Reference(deepcopy(model), Weighted(parts), (x,), ys)
    output, (_, cell) = extend(model).rnn(x)
    losses = [extend(nn.MSELoss()) for _ in parts]
    value = losses[0](output[:, -1], ys[0]) + losses[1](cell[0], ys[1])
    with backpack(DiagGGNExact(), SqrtGGNExact()):
        value.backward()
    assert_fields(model, "DiagGGNExact", ref)
    assert_fields(model, "SqrtGGNExact", ref)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sizes", [(3, 3), (2, 12)])
def test_columns_of_losses_on_two_heads(sizes: Tuple[int, int], late: bool) -> None:
    """Columns of all parameters belong together; those of the other head are zero."""
    torch.manual_seed(0)
    parts = [nn.Linear(3, 4), *(nn.Linear(4, size) for size in sizes)]
    model, x = nn.ModuleList(parts).to(F64), torch.randn(N, 3, dtype=F64)
    params = list(model.parameters())
    expected: Any = 0
    for head in model[1:]:
        y = head(model[0](x).tanh()).flatten()
        options = {"retain_graph": True, "materialize_grads": True}
        rows = [torch.autograd.grad(z, params, **options) for z in y]
        flat = [torch.cat([g.flatten() for g in row]) for row in rows]
        J = torch.stack(flat)
        expected = expected + J.T @ J * 2 / len(J)
    model, losses = extend(model), [extend(nn.MSELoss()) for _ in sizes]
    z = model[0](x).tanh()
    if late:  # a head has its turn before the loss of the other one is met
        values = [
            loss(y := f(z), torch.zeros_like(y)) for f, loss in zip(model[1:], losses)
        ]
    else:
        outputs = [f(z) for f in model[1:]]
        values = [loss(y, torch.zeros_like(y)) for y, loss in zip(outputs, losses)]
    with backpack(SqrtGGNExact()):
        sum(values).backward()
    V = torch.cat([p.sqrt_ggn_exact.flatten(2).flatten(0, 1) for p in params], 1)
    oracle.assert_agrees(V.T @ V, expected)


@pytest.mark.parametrize("keeps", [False, True])
def test_columns_that_a_hook_reduces(keeps: bool) -> None:
    """What a hook has put in a field, or deleted there, stays so."""
    torch.manual_seed(0)
    model, losses = extend(mlp(nn.Tanh())), [extend(nn.MSELoss()) for _ in range(2)]

    def hook(module: Module) -> None:
        for param in module.parameters(recurse=False):
            if keeps:
                param.sqrt_ggn_exact = param.sqrt_ggn_exact.flatten(2).sum((0, 2))
            else:
                del param.sqrt_ggn_exact

    y = model(torch.rand(N, 4))
    value = sum(loss(x, torch.zeros_like(x)) for loss, x in zip(losses, (y, y.exp())))
    with backpack(SqrtGGNExact(), extension_hook=hook):
        value.backward()
    for param in model.parameters():
        if keeps:
            assert param.sqrt_ggn_exact.shape == (N,)
        else:
            assert not hasattr(param, "sqrt_ggn_exact")


@pytest.mark.parametrize("order", [1, -1])
def test_losses_that_see_a_layer_differently(order: int) -> None:
    """One loss sees both calls that share a weight, the other one the first only."""
    torch.manual_seed(0)
    x, ys = torch.randn(N, 3, dtype=F64), tuple(torch.randn(2, N, 3, dtype=F64))
    layers = [nn.Linear(3, 3, dtype=F64) for _ in range(2)]
    layers[1].weight = layers[0].weight
    model = Lambda(
        lambda m, x: torch.cat([m.two(z := m.one(x).tanh()), z], 1),
        **dict(zip(("one", "two"), layers)),
    )
    parts = [(1.0, nn.MSELoss(), slice(i, i + 3)) for i in (0, 3)]
    ref = Reference(deepcopy(model), Weighted(parts), (x,), ys)
    model = extend(model)
    z = model.one(x).tanh()
    losses = [extend(nn.MSELoss()) for _ in parts]
    terms = list(zip(losses, (model.two(z), z), ys))[::order]
    value = sum(loss(f, y) for loss, f, y in terms)
    with backpack(DiagGGNExact(), SqrtGGNExact(), BatchDiagGGNExact()):
        value.backward()
    for quantity in ("DiagGGNExact", "BatchDiagGGNExact"):
        assert_fields(model, quantity, ref)
    for param in model.parameters():
        squares = param.sqrt_ggn_exact.square().sum((0, 1))
        oracle.assert_agrees(squares, param.diag_ggn_exact)


def marked(length: int) -> Tensor:
    """Make sequences; a positive entry is in the n-th position of sample n only."""
    signs = 2 * torch.eye(N, length, dtype=F64) - 1
    return torch.rand(N, length, 4, dtype=F64).add(0.1) * signs.unsqueeze(-1)


class Projected(Module):
    """An einsum, whose result is a view of a matrix that has all rows in one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last axis with a matrix, and put time first."""
        return torch.einsum("tni,ij->tnj", x.transpose(0, 1), self.weight)


class Scaled(Module):
    """No layer of the table: it has to be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.rand(4) + 1)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Scale, and add whatever else is given."""
        return x * self.scale + sum(others)


def zero_linear() -> Module:
    """Make a linear layer whose weights are zero, as some begin."""
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.weight)
    return layer


# Functions of children, of which those that are called `plain` are not extended. The
# prediction has samples on axis 0; between, they may be on axis 1.
CHILDREN: Dict[str, Tuple[Callable, Dict[str, Callable]]] = {
    "transposed": (lambda m, x: m.b(m.a(x).transpose(1, 2).flatten(1)[:, :4]), {}),
    "all-masked": (lambda m, x: m.b((m.a(x) * 0.0).mT.flatten(1)[:, :4]), {}),
    "one-sample-is-not-masked": (
        lambda m, x: m.b((m.a(x) * (x[:, :1] > 0)).transpose(0, 1)).transpose(0, 1),
        {},
    ),
    "one-position-is-not-masked": (
        lambda m, x: m.b((m.a(x) * (x > 0)).flip(0).transpose(0, 1).flip(1)).transpose(
            0, 1
        ),
        {},
    ),
    "relu-of-none": (
        lambda m, x: m.b(F.relu(m.a(x).abs() * x.sign()).transpose(0, 1))[0],
        {},
    ),
    "weights-of-zero": (
        lambda m, x: m.b(m.plain(m.a(x)).transpose(0, 1)).transpose(0, 1),
        {"plain": zero_linear},
    ),
    "attention-that-is-differentiable-once": (
        lambda m, x: m.b(
            F.scaled_dot_product_attention(*[m.a(x).repeat(1, 1, 30)[:, None]] * 3)
            .unflatten(-1, (30, 4))[:, 0]
            .transpose(0, 1)
        ).transpose(0, 1),
        {},
    ),
    "time-first-layer": (
        lambda m, x: m.b(m.c(m.a(x).transpose(0, 1))).transpose(0, 1),
        {"c": nn.PReLU},
    ),
    "time-first-module": (
        lambda m, x: m.b(m.c(m.a(x).transpose(0, 1), m.a(x)[:, 0])).transpose(0, 1),
        {"c": Scaled},
    ),
    "in-place-behind-a-module": (
        lambda m, x: m.b(m.c(m.a(x)).transpose_(0, 1)).transpose(0, 1),
        {"c": Scaled},
    ),
    "in-place-behind-a-view-of-rows": (
        lambda m, x: m.b(m.a(m.c(x).mul_(2).sin())).transpose(0, 1),
        {"c": Projected},
    ),
    "time-first-activation": (
        lambda m, x: m.b(m.c(m.a(x).transpose(0, 1))).transpose(0, 1),
        {"c": nn.Tanh},
    ),
    "module-behind-what-is-not-extended": (
        lambda m, x: m.b(m.a(m.c(m.plain(x))).transpose(0, 1)).transpose(0, 1),
        {"plain": lambda: nn.Linear(4, 4), "c": Scaled},
    ),
}


@pytest.mark.parametrize("anomaly", [False, True])
@pytest.mark.parametrize("batch, length", [(N, 3), (N, N), (1, 3)])
@pytest.mark.parametrize("name", CHILDREN)
def test_only_children_extended(
    name: str, batch: int, length: int, anomaly: bool
) -> None:
    """Nobody but children is extended, and functions run between them."""
    forward, parts = CHILDREN[name]
    torch.manual_seed(0)
    x = marked(length)[:batch]
    made = {key: make() for key, make in parts.items()}
    model = Lambda(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2), **made).to(F64)
    loss, y = mse(), like(model(x))
    others = [p for n, p in model.named_parameters() if n.startswith("plain")]
    for param in others:
        param.requires_grad_(False)
    ref = Reference(deepcopy(model), deepcopy(loss), (x,), y)
    for param in others:
        param.requires_grad_()
    for key, module in [*model.named_children(), ("loss", loss)]:
        if key != "plain":
            extend(module)
    quantities = "BatchGrad", "DiagGGNExact", "SqrtGGNExact"
    with torch.autograd.set_detect_anomaly(anomaly):
        for _ in range(2):  # what is found is remembered
            model.zero_grad()
            with backpack(*(QUANTITIES[name].extension() for name in quantities)):
                loss(model(x), *y).backward()
    for param in others:
        param.requires_grad_(False)
    for quantity in quantities:
        assert_fields(model, quantity, ref)


def test_only_last_layer_extended() -> None:
    """The last layer is extended, and all layers before require gradients."""
    model, loss, X, y = small()
    ref = Reference(deepcopy(model), deepcopy(loss), X, y)
    extend(model[2])
    extend(loss)
    value = loss(model(*X), *y)
    with backpack(BatchGrad(), DiagGGNExact()):
        value.backward()
    for quantity, field in (("BatchGrad", "grad_batch"), ("DiagGGNExact", None)):
        field = field or "diag_ggn_exact"
        expected = QUANTITIES[quantity].expected(ref, None)
        oracle.assert_agrees(getattr(model[2].weight, field), expected["2.weight"])
        assert not hasattr(model[0].weight, field)


@pytest.mark.parametrize("inputs", ["0.weight", "2.bias"])
def test_backward_inputs(inputs: str) -> None:
    """``backward(inputs=[...])``, and inputs of the model that require a gradient."""
    model, loss, (x,), y = small()
    ref = Reference(deepcopy(model), deepcopy(loss), (x,), y)
    model, loss = extend(model), extend(loss)
    value = loss(model(x.requires_grad_()), *y)
    param = model.get_parameter(inputs)
    with warnings.catch_warnings(), backpack(BatchGrad(), DiagGGNExact()):
        warnings.simplefilter("ignore")  # about parameters that are not reached
        value.backward(inputs=[param])
    for field, quantity in ("grad_batch", "BatchGrad"), (
        "diag_ggn_exact",
        "DiagGGNExact",
    ):
        expected = QUANTITIES[quantity].expected(ref, None)[inputs]
        oracle.assert_agrees(getattr(param, field), expected)


@pytest.mark.parametrize(
    "name", ["BatchGrad", "Variance", "DiagGGNExact", "KFLR", "DiagHessian", "HMP"]
)
def test_backward_inputs_of_uses(name: str) -> None:
    """A parameter that is used outside of the pass, too, has no part of its value."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = extend(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first))
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    ext, value = getattr(extensions, name)(), extend(nn.MSELoss())(model(x), y)
    with pytest.warns(UserWarning, match="0.weight, 0.bias: .* did not reach it"):
        with backpack(ext):
            value.backward(inputs=[second.weight])
    assert [hasattr(p, ext.savefield) for p in model.parameters()] == [0, 0, 1, 1]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["DiagHessian", "HMP", "GGNMP", "PCHMP"])
def test_call_with_what_is_computed_from_parameters(name: str, first: bool) -> None:
    """What needs a single call is refused where another has expressions in places."""
    model, loss = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    x, y = torch.rand(4, 3), torch.rand(4, 2)
    scaled = {name: 2 * p for name, p in model.named_parameters()}
    calls = [lambda: model(x), lambda: torch.func.functional_call(model, scaled, x)]
    values = [loss(call(), y) for call in (reversed(calls) if first else calls)]
    with pytest.raises(NotImplementedError, match="single call.*several calls"):
        with backpack(getattr(extensions, name)()):
            sum(values).backward()


CHANGED_INPUT: Dict[str, Tuple[Callable[[], Module], Tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 2), (3, 4)),
    "Conv1d": (lambda: nn.Conv1d(2, 2, 2), (3, 2, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 2, 2), (3, 2, 2, 2)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4).eval(), (3, 4)),
    "PReLU": (nn.PReLU, (3, 4)),
    "parametrized": (lambda: doubled(nn.Linear(4, 2)), (3, 4)),
}


def doubled(layer: Module) -> Module:
    """Let a layer's weight be twice a parameter."""
    double = Lambda(lambda m, weight: 2 * weight)
    parametrize.register_parametrization(layer, "weight", double)
    return layer


@pytest.mark.parametrize("name", CHANGED_INPUT)
def test_hook_that_changes_the_input(name: str) -> None:
    """A layer sees what a hook has made of the input, and it is made only once."""
    torch.manual_seed(0)
    make, shape = CHANGED_INPUT[name]
    layer, x = make().double(), torch.randn(shape, dtype=F64)
    layer.register_forward_pre_hook(lambda module, inputs: (1.5 * inputs[0],))
    last = nn.Linear(layer(x).flatten(1).shape[1], 2).double()
    model = extend(nn.Sequential(layer, nn.Flatten(), nn.Sigmoid(), last))
    loss, y = extend(nn.MSELoss()), torch.randn(3, 2, dtype=F64)
    *_, weight = layer.parameters() if name == "parametrized" else [layer.weight]
    layer.train(name != "BatchNorm1d")

    def value(*instead: Tensor) -> Tensor:
        key = next(k for k, p in model.named_parameters() if p is weight)
        with disable():
            return loss(torch.func.functional_call(model, {key: instead[0]}, x), y)

    size = weight.numel()
    hessian = torch.autograd.functional.hessian(value, weight.detach())
    with backpack(extensions.HMP(), extensions.DiagHessian(), DiagGGNExact()):
        loss(model(x), y).backward()
    columns = torch.eye(size, dtype=F64).reshape(size, *weight.shape)
    oracle.assert_agrees(weight.hmp(columns), hessian.reshape(columns.shape))
    diagonal = hessian.reshape(size, size).diagonal().reshape(weight.shape)
    oracle.assert_agrees(weight.diag_h, diagonal)


class Tanh(nn.Tanh):
    """A parametrization that is set to something else than it is."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return no inverse."""
        return 2 * weight


@pytest.mark.parametrize("name", ["DiagHessian", "BatchDiagHessian", "KFRA"])
def test_parametrized_since_the_call(name: str) -> None:
    """What has become an expression meanwhile is refused, and nobody writes to it."""
    model, loss, (x,), y = small()
    model, loss = extend(model), extend(loss)
    value = loss(model(x), *y)
    parametrize.register_parametrization(model[0], "weight", Tanh())
    before = {key: x.clone() for key, x in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="modified after the call"):
        with backpack(getattr(extensions, name)()):
            value.backward()
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_hessian_of_data() -> None:
    """Products with a Hessian with respect to data leave no parts of values, either."""
    model, loss, (x,), y = small()
    model, loss = extend(model), extend(loss)

    def product() -> Tensor:
        return torch.autograd.functional.hvp(lambda x: loss(model(x), *y), x, x)[1]

    with pytest.warns(UserWarning, match="so nothing was computed"):
        with backpack(BatchGrad(), DiagGGNExact()):
            found = product()
    oracle.assert_agrees(found, product())
    fields = ("grad_batch", "diag_ggn_exact")
    assert not any(hasattr(p, field) for p in model.parameters() for field in fields)


def test_input_requires_grad() -> None:
    """The model's input requires a gradient, and gets the same as without us."""
    model, loss, (x,), y = small()
    ref = Reference(deepcopy(model), deepcopy(loss), (x,), y)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    deepcopy(loss)(deepcopy(model)(x1), *y).backward()
    value = extend(loss)(extend(model)(x2), *y)
    with backpack(BatchGrad(), DiagGGNExact()):
        value.backward()
    oracle.assert_agrees(x2.grad, x1.grad)
    assert_fields(model, "BatchGrad", ref)
    assert_fields(model, "DiagGGNExact", ref)


def test_retain_graph() -> None:
    """Two backward passes through one graph."""
    model, loss, X, y = small()
    ref = Reference(deepcopy(model), deepcopy(loss), X, y)
    value = extend(loss)(extend(model)(*X), *y)
    with backpack(BatchGrad(), retain_graph=True):
        value.backward(retain_graph=True)
    assert_fields(model, "BatchGrad", ref)
    with backpack(DiagGGNExact(), BatchL2Grad()):
        value.backward()
    assert_fields(model, "BatchL2Grad", ref)
    assert_fields(model, "DiagGGNExact", ref)


DIFFERENTIABLE = [
    "BatchGrad",
    "BatchL2Grad",
    "SumGradSquared",
    "Variance",
    "BatchDotGrad",
    "DiagGGNExact",
    "BatchDiagGGNExact",
]


def plain_quantity(quantity: str, model: Module, x: Tensor, y: Tensor) -> Dict:
    """Compute a quantity of a squared-error model, differentiably."""
    params = dict(model.named_parameters())

    def prediction(values: Dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, values, (sample.unsqueeze(0),)).squeeze(0)

    def loss(values: Dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return (prediction(values, sample) - target).pow(2).sum() / y.numel()

    if "GGN" in quantity:
        jac = vmap(torch.func.jacrev(prediction), (None, 0))(params, x)
        squares = {n: 2 / y.numel() * j.pow(2).sum(1) for n, j in jac.items()}
        batch = quantity.startswith("Batch")
        return {n: s if batch else s.sum(0) for n, s in squares.items()}
    gradients = vmap(grad(loss), (None, 0, 0))(params, x, y)
    function = {
        "BatchGrad": lambda g: g,
        "BatchL2Grad": lambda g: g.flatten(1).pow(2).sum(1),
        "SumGradSquared": lambda g: g.pow(2).sum(0),
        "Variance": lambda g: g.var(0, correction=0),
        "BatchDotGrad": lambda g: g.flatten(1) @ g.flatten(1).T,
    }[quantity]
    return {n: function(g) for n, g in gradients.items()}


@pytest.mark.parametrize("quantity", DIFFERENTIABLE)
def test_create_graph(quantity: str) -> None:
    """With ``create_graph=True``, a quantity can be differentiated."""
    model, loss, (x,), (y,) = Row(
        lambda: mlp(nn.Tanh()), randn(4), nn.MSELoss, like
    ).build()
    plain = deepcopy(model)
    expected = plain_quantity(quantity, plain, x, y)
    total = sum(v.sin().sum() for v in expected.values())
    expected_grads = torch.autograd.grad(
        total, list(plain.parameters()), materialize_grads=True
    )
    ext = QUANTITIES[quantity].extension()
    model, loss = extend(model), extend(loss)
    value = loss(model(x), y)
    params = list(model.parameters())
    with backpack(ext):
        torch.autograd.grad(value, params, create_graph=True)
    actual = fields(model, ext.savefield)
    for name, v in actual.items():
        oracle.assert_agrees(v, expected[name], name)
    total = sum(v.sin().sum() for v in actual.values())
    grads = torch.autograd.grad(total, params, materialize_grads=True)
    for a, e in zip(grads, expected_grads):
        oracle.assert_agrees(a, e, quantity)


COPIES = {
    "deepcopy": deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": lambda m: saved_and_loaded(m),
}


def saved_and_loaded(model: Module) -> Module:
    """Save a model, and load it again."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("copy", COPIES)
def test_copies(copy: str, forward: bool) -> None:
    """An extended model can be copied, and the copy works like the original."""
    model, loss, X, y = small()
    ref = Reference(deepcopy(model), deepcopy(loss), X, y)
    model, loss = extend(model), extend(loss)
    if forward:
        loss(model(*X), *y)
    model, loss = COPIES[copy](model), COPIES[copy](loss)
    value = loss(model(*X), *y)
    with backpack(BatchGrad(), DiagGGNExact()):
        value.backward()
    assert_fields(model, "BatchGrad", ref)
    assert_fields(model, "DiagGGNExact", ref)


@pytest.mark.parametrize("inside", [False, True])
def test_function_transforms(inside: bool) -> None:
    """Function transforms over an extended model, also inside the context."""
    model, loss, (x,), (y,) = small()
    expected = oracle.batch_grad(deepcopy(model), deepcopy(loss), (x,), (y,))
    model, loss = extend(model), extend(loss)

    def sample_loss(params: Dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(model, params, (x.unsqueeze(0),))
        return loss(out, y.unsqueeze(0)) / N

    params = {n: p.detach() for n, p in model.named_parameters()}
    exts = [BatchGrad(), DiagGGNExact()] if inside else []
    with warnings.catch_warnings(), backpack(*exts):
        warnings.simplefilter("ignore")
        actual = vmap(grad(sample_loss), (None, 0, 0))(params, x, y)
    for name, value in actual.items():
        oracle.assert_agrees(value, expected[name], name)
    assert not any("input0" in vars(m) for m in model.modules())


def test_variance_does_not_cancel() -> None:
    """Data at 1000 ± 0.01."""
    check(
        Row(
            lambda: nn.Linear(3, 2),
            lambda: (1000 + 0.01 * torch.randn(N, 3, dtype=F64),),
            nn.MSELoss,
            lambda f: (f + 1000 + 0.01 * torch.randn_like(f),),
        ).build(),
        ["Variance"],
    )


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "after", "first", "for all"])
def test_hook_changes_the_output(when: str, layer: int) -> None:
    """A user's forward hook replaces a layer's output, whenever it was registered."""
    problem = Row(lambda: mlp(nn.Tanh()), randn(4)).build()
    changed = problem.model[layer]

    def double(module: Module, inputs: Tensors, output: Tensor) -> Optional[Tensor]:
        return 2 * output if module is changed else None

    if when in ("after", "first"):
        extend(problem.model)
    if when == "for all":
        handle = nn.modules.module.register_module_forward_hook(double)
    else:
        handle = changed.register_forward_hook(double, prepend=when == "first")
    is_last = layer == 2 or when == "for all"
    for _ in range(2):
        check(problem, [q for q in DENSE if not is_last or q != "BatchJacobian"])
    if is_last:
        with pytest.raises(NotImplementedError, match="has a forward hook"):
            compute(*problem, ["BatchJacobian"])
    handle.remove()


class Remembers(Module):
    """A module that counts its calls, in a buffer, and keeps what it has computed."""

    def __init__(self):
        """Create a parameter and the buffers."""
        super().__init__()
        self.scale = Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        """Scale, and remember."""
        self.times += 1
        self.calls = self.calls + 1
        x = x * self.scale
        self.last = x.detach()
        self.mean.mul_(0.5).add_(0.5 * self.last.mean(0))
        return x


class Picky(Module):
    """A module that may refuse a batch of another size, with an error of its own."""

    def __init__(self):
        """Create a parameter."""
        super().__init__()
        self.scale, self.size = Parameter(torch.ones(4)), None

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        if self.size is not None and len(x) != self.size:
            raise LookupError("another batch")
        return x * self.scale


UNUSUAL = {
    "picky": (Row(lambda: mlp(Picky()), randn(4)), 1, {"size": N}),
    "sparse": (
        Row(
            lambda: nn.Sequential(nn.EmbeddingBag(5, 3, mode="sum"), nn.Linear(3, 3)),
            tokens(3),
        ),
        0,
        {"sparse": True},
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_repetition(name: str) -> None:
    """Modules that refuse single samples, or have sparse gradients."""
    row, layer, attributes = UNUSUAL[name]
    problem = row.build()
    ref = Reference(*deepcopy(problem))
    vars(problem.model[layer]).update(attributes)  # nothing that the oracle can do
    for quantity, (values, drawn) in compute(*problem, DENSE).items():
        assert_right(values, QUANTITIES[quantity].expected(ref, drawn), quantity)


def test_repetition_leaves_no_trace() -> None:
    """A forward pass that has to be repeated changes no buffer and no attribute."""
    model, loss, X, y = Row(lambda: mlp(Remembers()), randn(4)).build()
    twin, module = deepcopy(model)[1], extend(model)[1]
    value = extend(loss)(model(*X), *y)
    twin(model[0](*X))
    last = module.last
    with backpack(*[make(name) for name in DENSE]):
        value.backward()
    assert module.times == twin.times and module.last is last
    for name, expected in twin.named_buffers():
        oracle.assert_agrees(getattr(module, name), expected, name)


def test_dropout_in_training_mode() -> None:
    """The mask that was drawn is used, although the layer before outputs zeros."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 4, dtype=F64), torch.tensor([0, 1, 2, 0])
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
    ).to(F64)

    class Masked(nn.Sequential):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self[3](self[1](self[0](x)) * mask)

    torch.manual_seed(1)
    mask = F.dropout(torch.ones(N, 6, dtype=F64), 0.5)
    ref = Reference(Masked(*deepcopy(model)), nn.CrossEntropyLoss(), (x, mask), (y,))
    model, loss = extend(model).train(), extend(nn.CrossEntropyLoss())
    torch.manual_seed(1)
    value = loss(model(x), y)
    with backpack(BatchGrad(), DiagGGNExact(), SqrtGGNExact()):
        value.backward()
    for quantity in ("BatchGrad", "DiagGGNExact", "SqrtGGNExact"):
        assert_fields(model, quantity, ref)


@pytest.mark.parametrize("frozen", ["0.weight", "2.bias"])
def test_freezing_clears_the_field(frozen: str) -> None:
    """A parameter that is frozen later does not keep a stale field."""
    model, loss, X, y = small()
    model, loss = extend(model), extend(loss)
    for step in range(2):
        value = loss(model(*X), *y)
        with backpack(BatchGrad(), DiagGGNExact(), KFLR()):
            value.backward()
        param = model.get_parameter(frozen)
        for field in ("grad_batch", "diag_ggn_exact", "kflr"):
            assert hasattr(param, field) == (step == 0)
        param.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_model(dtype: torch.dtype) -> None:
    """Fields have the parameter's type, and the right values for that type."""
    problem = small()
    ref = Reference(*problem)
    model, loss = extend(deepcopy(problem.model).to(dtype)), extend(problem.loss)
    value = loss(model(*[x.to(dtype) for x in problem.X]), *problem.y)
    names = [n for n in DENSE if "MC" not in n and n != "BatchFactors"]
    with backpack(*[make(name) for name in names], KFLR()):
        value.backward()
    rtol = 20 * torch.finfo(dtype).eps
    for name in names:
        field = field_of(make(name))
        expected = QUANTITIES[name].expected(ref, None)
        for n, v in fields(model, field).items():
            assert v.dtype == dtype
            v, _ = QUANTITIES[name].convert(v.to(F64), expected[n])
            scale = float(expected[n].abs().max())
            assert torch.allclose(v, expected[n], rtol=rtol, atol=rtol * scale), name


def test_autocast() -> None:
    """Under autocast, fields have the parameter's type."""
    problem = small()
    ref = Reference(*problem)
    model, loss = extend(deepcopy(problem.model).float()), extend(problem.loss)
    names = [n for n in DENSE if "MC" not in n and n != "BatchFactors"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(model(problem.X[0].float()), *problem.y)
    with backpack(*[make(name) for name in names]):
        value.backward()
    for name in names:
        field = field_of(make(name))
        expected = QUANTITIES[name].expected(ref, None)
        for n, v in fields(model, field).items():
            assert v.dtype == torch.float32
            scale = float(expected[n].abs().max())
            v, _ = QUANTITIES[name].convert(v.to(F64), expected[n])
            assert torch.allclose(v, expected[n], rtol=0.1, atol=0.1 * scale), name


def test_default_device() -> None:
    """Tensors are created where the data is, whatever the default device is."""
    devices = []

    def forward(m: Lambda, x: Tensor) -> Tensor:
        devices.append(torch.empty(0).device.type)
        return m.head(torch.tanh(m.scale * x))

    def model() -> Module:
        return Lambda(forward, scale=Parameter(torch.ones(4)), head=nn.Linear(4, 3))

    problem = Row(model, randn(4)).build()
    ref = Reference(*problem)
    del devices[:]
    with torch.device("meta"):
        results = compute(*problem, DENSE + FACTORS)
    assert devices == ["meta"]  # once, for all quantities
    for name, (values, drawn) in results.items():
        assert_right(values, QUANTITIES[name].expected(ref, drawn), name)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_sample_without_numbers(number: float) -> None:
    """A sample that is not finite disturbs no other, nor is it taken for coupling."""
    model = Lambda(lambda m, x: x @ m.w, w=Parameter(torch.randn(13, 3))).to(F64)
    X, y = torch.randn(N, 13, dtype=F64), torch.randn(N, 3, dtype=F64)
    others = [0, 2, 3]
    expected = 2 / y.numel() * torch.einsum("ni,no->nio", X, X @ model.w - y)
    X[1, 2] = number
    use(BatchGrad(), BatchL2Grad())(model, nn.MSELoss(), (X,), (y,))
    assert_right(
        {"w": model.w.grad_batch[others]}, {"w": expected[others]}, "BatchGrad"
    )
    norms = expected.square().sum((1, 2))[others]
    assert_right({"w": model.w.batch_l2[others]}, {"w": norms}, "BatchL2Grad")


def test_sums_of_half_precision_numbers() -> None:
    """Sums over many samples accumulate in float32 or better."""
    size, dtype = 3000, torch.bfloat16
    model = extend(nn.Linear(2, 1, bias=False).to(dtype))
    nn.init.constant_(model.weight, 0.5)
    loss = extend(nn.MSELoss(reduction="sum"))
    x = torch.ones(size, 2, dtype=dtype)
    f = model(x)
    value = loss(f, f.detach() - 0.5)  # every individual gradient is one
    with backpack(SumGradSquared(), DiagGGNExact(), BatchL2Grad()):
        value.backward()
    expected = torch.tensor(float(size)).to(dtype)
    assert (model.weight.sum_grad_squared == expected).all()
    root = torch.tensor(2.0).sqrt().to(dtype).float()  # columns have the model's type
    assert (model.weight.diag_ggn_exact == (size * root**2).to(dtype)).all()
    assert (model.weight.batch_l2 == 2).all()


def test_slices_of_half_precision_numbers() -> None:
    """Large gradients, which are added up one after the other, too."""
    size, dtype = 300, torch.bfloat16  # the next number after 256 is 258
    model = extend(nn.Linear(128, 128, bias=False).to(dtype))
    loss = extend(nn.MSELoss(reduction="sum"))
    nn.init.zeros_(model.weight)
    f = model(torch.full((size, 2, 128), 0.5, dtype=dtype))
    value = loss(f, f.detach() - 0.5)  # every individual gradient is one
    with backpack(SumGradSquared()):
        value.backward()
    assert (model.weight.sum_grad_squared == size).all()


# Monte-Carlo


MONTE_CARLO = [DiagGGNMC, BatchDiagGGNMC, SqrtGGNMC, KFAC]


def run(model: Module, loss: Module, X: Tensors, y: Tensors, *exts: Any) -> Any:
    """Compute the last extension's field of the first weight."""
    value = loss(model(*X), *y)
    with backpack(*exts):
        value.backward()
    result = getattr(next(model.parameters()), exts[-1].savefield)
    return result if isinstance(result, list) else [result]


@pytest.mark.parametrize("cls", MONTE_CARLO)
def test_seed_reproduces(cls: type) -> None:
    """The same seed gives the same result, another seed another one."""
    model, loss, X, y = small()
    model, loss = extend(model), extend(loss)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(model, loss, X, y, cls(mc_samples=3)))
    oracle.assert_agrees(results[0], results[1])
    assert any((a != b).any() for a, b in zip(results[0], results[2]))


@pytest.mark.parametrize("cls", MONTE_CARLO)
def test_generator(cls: type) -> None:
    """A generator can be passed, and the global one is left alone."""
    model, loss, X, y = small()
    model, loss = extend(model), extend(loss)
    results, state = [], torch.get_rng_state()
    for seed in (1, 1, 2):
        generator = drawing(seed)
        results.append(run(model, loss, X, y, cls(mc_samples=3, generator=generator)))
    assert torch.equal(state, torch.get_rng_state())
    oracle.assert_agrees(results[0], results[1])
    assert any((a != b).any() for a, b in zip(results[0], results[2]))


def test_generator_moves_on() -> None:
    """One generator gives other samples in each backward pass."""
    model, loss, X, y = small()
    model, loss = extend(model), extend(loss)
    ext = KFAC(mc_samples=3, generator=drawing(0))
    first, second = (run(model, loss, X, y, ext) for _ in range(2))
    assert any((a != b).any() for a, b in zip(first, second))


@pytest.mark.parametrize("others", [(), (SqrtGGNExact,), (DiagGGNExact,)])
def test_monte_carlo_next_to_exact(others: Tuple[type, ...]) -> None:
    """Extensions that draw are not fed exact columns by those that do not."""
    model, loss, X, y = small()
    model, loss = extend(model), extend(loss)
    torch.manual_seed(3)
    alone = run(model, loss, X, y, DiagGGNMC(mc_samples=2))
    torch.manual_seed(3)
    together = run(model, loss, X, y, *[o() for o in others], DiagGGNMC(mc_samples=2))
    oracle.assert_agrees(together, alone)


# Refused, or said


def use(
    *exts: Any, **options: Any
) -> Callable[[Module, Module, Tensors, Tensors], None]:
    """Make a function that runs extensions on an extended model and loss."""

    def function(model: Module, loss: Module, X: Tensors, y: Tensors) -> None:
        model, loss = extend(model), extend(loss)
        value = loss(model(*X), *y)
        with backpack(*exts, **options):
            value.backward()

    return function


def batch_norm(**options: Any) -> Row:
    """Make a row with a batch normalization in training mode."""
    frozen = options.pop("frozen", False)

    def model() -> Module:
        norm = nn.BatchNorm1d(4, **options)
        return nn.Sequential(
            nn.Linear(4, 4), norm.requires_grad_(not frozen), nn.Linear(4, 3)
        )

    return Row(model, randn(4), train=True)


COUPLED = {
    "trainable": batch_norm(),
    "frozen": batch_norm(frozen=True),
    "not-affine": batch_norm(affine=False),
    "without-statistics": batch_norm(affine=False, track_running_stats=False),
}


def said(function: Callable[[], Any]) -> List[str]:
    """Run a function, and collect what its error and its warnings say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        messages = []
        try:
            function()
        except (RuntimeError, ValueError, AssertionError) as error:
            messages = [str(error)]
    return messages + [str(w.message) for w in caught]


@pytest.mark.parametrize("ext", [BatchGrad, Variance, DiagGGNExact, KFLR])
@pytest.mark.parametrize("row", COUPLED)
def test_coupled_samples(row: str, ext: type) -> None:
    """A batch normalization in training mode is refused or warned about."""
    messages = said(lambda: use(ext())(*COUPLED[row].build()))
    assert any("BatchNorm1d" in m and "training mode" in m for m in messages), messages


@pytest.mark.parametrize("ext", [BatchGrad, Variance, BatchL2Grad, DiagGGNExact])
def test_coupled_samples_without_statistics(ext: type) -> None:
    """Without running statistics, samples meet in either mode; ``eval`` is no way."""
    row = batch_norm(track_running_stats=False)._replace(train=False)
    pattern = "(?s)BatchNorm1d.*keeps no running statistics.*track_running_stats=True"
    refused = pytest.raises(NotImplementedError, match=pattern)
    with pytest.warns(UserWarning, match=pattern) if ext is BatchGrad else refused:
        use(ext())(*row.build())


def test_coupled_samples_checked() -> None:
    """With ``check``, it is the batch normalization that is named, too."""
    says = "(?s)BatchNorm1d.*is in training mode.*statistics of the whole mini-batch"
    model, loss, X, y = COUPLED["trainable"].build()
    value = extend(loss)(extend(model)(*X), *y)
    with pytest.raises(NotImplementedError, match=says):
        with backpack(BatchGrad(), check=True):
            value.backward()


@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_coupled_samples_not_extended(ext: type) -> None:
    """A batch normalization that couples samples is not extended, its model is."""
    model, loss, X, y = COUPLED["frozen"].build()
    norm, model[1] = model[1], nn.Identity()
    model, loss = extend(model), extend(loss)
    model[1] = norm

    def action() -> None:
        value = loss(model(*X), *y)
        with backpack(ext()):
            value.backward()

    messages = said(action)
    pattern = r"(?is)batch.?norm.*training mode"
    assert any(re.search(pattern, m) for m in messages), messages


@pytest.mark.parametrize(
    "exts, refused",
    [((BatchGrad,), False), ((Variance,), True), ((BatchGrad, Variance), True)],
    ids=["BatchGrad", "Variance", "both"],
)
def test_coupled_data(exts: tuple, refused: bool) -> None:
    """What is not extended couples samples before any parameter of interest."""
    norm, model = nn.BatchNorm1d(3), extend(nn.Linear(3, 2))

    def action() -> None:
        out = model(norm(torch.rand(4, 3)))
        with backpack(*[ext() for ext in exts]):
            out.sum().backward()

    assert any("BatchNorm1d in training mode" in m for m in said(action))
    assert refused != hasattr(model.weight, "grad_batch")


@pytest.mark.parametrize("pairs", [False, True])
def test_normalized_data(pairs: bool) -> None:
    """What is not extended normalizes rows of one sample, or of two."""
    net, last = extend(nn.Linear(3, 3)), extend(nn.Linear(3, 2))
    x, norm = torch.rand(4, 2, 3), nn.BatchNorm1d(3)

    def action() -> None:
        out = [norm(z.flatten(0, 1)) for z in net(x).split(1 + pairs)]
        out = torch.stack(out).view(4, 2, 3)
        with backpack(BatchL2Grad()):
            last(out).sum().backward()

    assert pairs == any("BatchNorm1d in training mode" in m for m in said(action))
    assert pairs != hasattr(net.weight, "batch_l2")


@pytest.mark.parametrize("function", [nn.MSELoss(), F.mse_loss])
def test_coupled_output(function: Callable) -> None:
    """A batch normalization without parameters, behind all that have some."""
    norm = nn.BatchNorm1d(3, affine=False)
    model = extend(Lambda(lambda m, x: m.norm(m.f(x)), f=nn.Linear(3, 3), norm=norm))
    if isinstance(function, nn.Module):
        function = extend(function)
    answers = {BatchGrad: UserWarning, BatchL2Grad: NotImplementedError}
    for ext, error in answers.items():
        value = function(model(torch.rand(4, 3)), torch.rand(4, 3))
        with pytest.raises(error, match="BatchNorm1d.*is in training mode"):
            with backpack(ext()):
                value.backward()


@pytest.mark.parametrize("quantity", ["BatchGrad", "SumGradSquared"])
def test_coupled_in_any_model(quantity: str) -> None:
    """Whoever calls the layers, a model's forward pass or none, is told the same."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    chain = nn.Sequential(*layers)
    models = {
        "chain": chain,
        "inside": nn.Sequential(deepcopy(chain)),
        "wrapped": Lambda(lambda m, x: m.f(x), f=deepcopy(chain)),
        "by-hand": Lambda(
            lambda m, x: m.c(m.b(m.a(x))), **dict(zip("abc", deepcopy(layers)))
        ),
    }
    x, found = torch.rand(4, 3), {}
    for name, model in models.items():
        extend(model)
        ext = getattr(extensions, quantity)()
        messages = said(lambda model=model, ext=ext: passed(model, ext, x))
        told = [m for m in messages if "BatchNorm1d" in m and "training mode" in m]
        values = [getattr(p, ext.savefield, None) for p in model.parameters()]
        found[name] = len(told), values
    number, expected = found["chain"]
    for name, (told, values) in found.items():
        assert told == number > 0, name
        for value, reference in zip(values, expected):  # none in front of a refusal
            assert (value is None) == (reference is None), name
            assert value is None or torch.allclose(value, reference), name


def passed(model: Module, ext: Any, x: Tensor) -> None:
    """Run a pass."""
    with backpack(ext):
        model(x).square().mean().backward()


@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_batch_statistics_in_evaluation_mode(ext: type) -> None:
    """Without running statistics, samples are coupled in evaluation mode, too."""
    row = COUPLED["without-statistics"]
    messages = said(lambda: use(ext())(*row._replace(train=False).build()))
    assert any("BatchNorm1d" in m for m in messages), messages


class Penalized(Module):
    """A model with its loss, and a term that does not come from the layers' calls."""

    def __init__(self, term: Callable[[Module, Tensor, Tensor], Tensor]):
        """Create model and loss."""
        super().__init__()
        # whose derivative depends on the input, which autograd does not say
        largest = Lambda(lambda m, x: torch.maximum(x, 0.1 * x))
        self.model = extend(mlp(largest).to(F64))
        self.loss = extend(nn.CrossEntropyLoss())
        self.term = term

    def value(self) -> Tensor:
        """Compute loss and term."""
        x = torch.randn(N, 4, dtype=F64, requires_grad=True)
        out = self.model(x)
        loss = self.loss(out, torch.tensor([0, 1, 2, 0]))
        return loss + self.term(self.model, x, out)


def l2_term(model: Module, x: Tensor, out: Tensor) -> Tensor:
    """Penalize a layer's weight."""
    return 0.1 * model[0].weight.pow(2).sum()


def gradient_term(model: Module, x: Tensor, out: Tensor) -> Tensor:
    """Penalize the derivative of the model with respect to its input."""
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return gradient.pow(2).sum()


def product_term(model: Module, x: Tensor, out: Tensor) -> Tensor:
    """Multiply a Hessian of the model with a vector."""
    gradients = torch.autograd.grad(out.sum(), model.parameters(), create_graph=True)
    return sum(gradient.sum() for gradient in gradients)


SEPARATE = "also used in terms of the loss"
TERMS = {"l2": l2_term, "gradient": gradient_term, "product": product_term}


@pytest.mark.parametrize("first", [True, False])
def test_regularizer_of_all_parameters(first: bool) -> None:
    """Parameters that are in a regularizer alone are named, as the others are."""
    parts = {"a": nn.Linear(4, 3), "b": nn.Linear(3, 3), "unused": nn.Linear(4, 3)}
    model = extend(Lambda(lambda m, x: m.b(m.a(x).tanh()), **parts).to(F64))
    loss, x = extend(nn.CrossEntropyLoss()), torch.randn(N, 4, dtype=F64)
    out, y = model(x), torch.tensor([0, 1, 2, 0])

    def penalty() -> Tensor:
        return sum(p.square().sum() for p in model.parameters())

    value = penalty() + loss(out, y) if first else loss(out, y) + penalty()
    with pytest.warns(UserWarning) as caught, backpack(BatchGrad()):
        value.backward()
    (message,) = [str(w.message) for w in caught]
    assert "belong to no sample" in message and "'unused.weight'" in message
    for name, p in model.named_parameters():
        assert hasattr(p, "grad_batch") == (not name.startswith("unused"))
        if hasattr(p, "grad_batch"):
            oracle.assert_agrees(p.grad_batch.sum(0), p.grad - 2 * p.detach(), name)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "before"])
@pytest.mark.parametrize("ext", [BatchGrad, Variance, KFAC, DiagGGNExact])
@pytest.mark.parametrize("term", TERMS)
def test_outside_use(term: str, ext: type, inside: bool) -> None:
    """Gradients from outside of the layer's call are refused or warned about."""
    if term == "l2" and ext in (KFAC, DiagGGNExact):
        pytest.skip("the GGN of the loss does not contain the term, and is right")
    if inside and ext in (KFAC, DiagGGNExact):
        pytest.skip("the first derivative is not that of a loss")
    problem = Penalized(TERMS[term])

    def run() -> None:
        value = None if inside else problem.value()
        with backpack(ext(), retain_graph=True):
            (problem.value() if inside else value).backward()

    messages = said(run)
    assert any(SEPARATE in m and "' of Sequential" in m for m in messages), messages


def squared(x: Tensor) -> Tensor:
    """Return an error that the whole batch shares."""
    return (x - 1.0).pow(2).mean()


PENALIZED: Dict[str, Tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "sum": (lambda x, term: squared(x) + term, 1.0),
    "sum-after": (lambda x, term: term + squared(x), 1.0),
    "list": (lambda x, term: sum([squared(x), squared(x.sin()), term]), 1.0),
    "difference": (lambda x, term: squared(x) - term, -1.0),
    "from-a-term": (lambda x, term: term.sub(squared(x), alpha=2), 1.0),
    "in-place": (lambda x, term: squared(x).add_(term, alpha=2), 2.0),
    "scaled": (lambda x, term: 3 * (F.mse_loss(x, x * 0) + term) / 2, 1.5),
}


@pytest.mark.parametrize("name", PENALIZED)
def test_term_inside(name: str) -> None:
    """A model that returns a loss may add to it what belongs to no sample."""
    function, factor = PENALIZED[name]
    model = Lambda(
        lambda m, x, scale=1.0: function(m.f(x), scale * m.f.weight.pow(2).sum()),
        f=nn.Linear(4, 3),
    ).to(F64)
    X, weight = torch.randn(N, 4, dtype=F64), model.f.weight
    rows = [torch.autograd.grad(model(x[None], 0.0) / N, weight)[0] for x in X]
    value = extend(model)(X)
    with pytest.warns(UserWarning, match="terms of the loss that belong to no sample"):
        with backpack(BatchGrad(), BatchL2Grad()):
            value.backward()
    oracle.assert_agrees(weight.grad_batch, torch.stack(rows), "grad_batch")
    total = sum(rows) + 2 * factor * weight.detach()
    oracle.assert_agrees(weight.grad, total, "gradient")


# What parameters are made into is used on data, and is penalized as well
SHARED_EXPRESSIONS: Dict[str, Callable[[Module, Tensor, float], Tensor]] = {
    "gate": lambda m, x, scale: gated(m, x, m.p.sigmoid(), scale),
    "normalized": lambda m, x, scale: gated(m, x, m.p / m.p.norm(), scale),
    "made-by-a-layer": lambda m, x, scale: gated(m, x, m.g(m.p[:2]), scale),
    "made-by-layers": lambda m, x, scale: gated(m, x, m.g(m.p[:2]).tanh() * m.p, scale),
    "outside": lambda m, x, scale: m.f(x).mul(m.p.exp()).square().sum(),
}


def gated(m: Module, x: Tensor, gate: Tensor, scale: float) -> Tensor:
    """Penalize what scales features, in a sum over samples."""
    m.gate = gate
    return (m.f(x) * gate).square().sum() + scale * gate.abs().sum()


@pytest.mark.parametrize("late", [False, True], ids=["inside", "later"])
@pytest.mark.parametrize("name", SHARED_EXPRESSIONS)
def test_term_of_a_shared_expression(name: str, late: bool) -> None:
    """Individual gradients are of the data, whatever else an expression is for."""
    function = SHARED_EXPRESSIONS[name]
    model = Lambda(
        function, f=nn.Linear(4, 3), g=nn.Linear(2, 3), p=Parameter(torch.rand(3))
    ).to(F64)
    X = torch.randn(N, 4, dtype=F64)
    params = {n: p for n, p in model.named_parameters()}

    def loss(scale: float) -> Tensor:
        value = model(X, 0.0 if late else scale)
        gate = model.gate if late and name != "outside" else model.p
        return value + scale * gate.abs().sum() if late else value

    def gradients(value: Tensor) -> Dict[str, Tensor]:
        of = torch.autograd.grad(value, [*params.values()], materialize_grads=True)
        return dict(zip(params, of))

    rows = [gradients(model(x[None], 0.0)) for x in X]
    total = gradients(loss(0.5))
    extend(model)
    value = loss(0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with backpack(BatchGrad()):
            value.backward()
    penalized = late or name != "outside"
    assert ("belong to no sample" in str([w.message for w in caught])) == penalized
    for n, param in params.items():
        if param.grad is not None:
            expected = torch.stack([row[n] for row in rows])
            oracle.assert_agrees(param.grad_batch, expected, f"grad_batch of {n}")
            oracle.assert_agrees(param.grad, total[n], f"gradient of {n}")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, term: (squared(x) + term).sqrt(),
        lambda x, term: squared(x).sqrt() * term,
        lambda x, term: (x * (squared(x) + term)).mean(),
    ],
    ids=["root", "factor", "back-to-samples"],
)
def test_no_term_inside(function: Callable) -> None:
    """What is no term of a sum is refused, by name."""
    model = Lambda(
        lambda m, x: function(m.f(x), m.f.weight.pow(2).sum()), f=nn.Linear(4, 3)
    )
    value = extend(model)(torch.randn(N, 4))
    with pytest.raises(NotImplementedError, match="'f.weight' of|have met in .mean"):
        with backpack(BatchGrad()):
            value.backward()


OUTSIDE = {
    "weight": lambda m, x: m.fc2(m.fc1(x).tanh() + F.linear(x, m.fc1.weight)),
    "bias": lambda m, x: m.fc2(m.fc1(x).tanh() * m.fc1.bias),
    "penalty": lambda m, x: m.fc2(m.fc1(x).tanh() * m.fc1.weight.pow(2).sum()),
    "before": lambda m, x: m.fc2(m.fc1(x * m.fc1.bias).tanh()),
}


@pytest.mark.parametrize("quantity", DENSE)
@pytest.mark.parametrize("use_of", OUTSIDE)
def test_parameter_used_outside_of_its_module(use_of: str, quantity: str) -> None:
    """A parameter that a layer's caller uses, too, is right."""
    row = Row(
        lambda: Lambda(OUTSIDE[use_of], fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 3)),
        randn(4),
    )
    problem = row.build()
    ref = Reference(*problem)
    values, drawn = compute(*problem, [quantity])[quantity]
    assert_right(values, QUANTITIES[quantity].expected(ref, drawn), quantity)


class Refusal(NamedTuple):
    """What has to be refused.

    Attributes:
        action: What is refused.
        error: Type of the error.
        says: Pattern for its message: what, where, and the way out.
    """

    action: Callable[[], Any]
    error: type
    says: str


def on_row(row: Row, *exts: Any) -> Callable[[], None]:
    """Make a function that runs extensions on a row."""
    return lambda: use(*exts)(*row.build())


def without_loss(ext: Any) -> Callable[[], None]:
    """Make a function that runs an extension without an extended loss."""

    def action() -> None:
        model, loss, X, y = small()
        value = loss(extend(model)(*X), *y)
        with backpack(ext):
            value.backward()

    return action


def second_backward() -> None:
    """Run a second backward pass without retaining what it needs."""
    model, loss, X, y = small()
    value = extend(loss)(extend(model)(*X), *y)
    with backpack(BatchGrad()):
        value.backward()
        value.backward()


def registered_twice() -> None:
    """Register a second module extension for a class."""
    BatchGrad().set_module_extension(nn.Linear, ModuleExtension([]))


SEQUENCE = Row(
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 3)), randn(2, 4)
)
NOT_A_CHAIN = Row(
    lambda: Lambda(
        lambda m, x: m.fc2(F.relu(m.fc1(x))), fc1=nn.Linear(4, 4), fc2=nn.Linear(4, 3)
    ),
    randn(4),
)
NO_REDUCTION = Row(
    lambda: mlp(nn.Tanh()), randn(4), lambda: nn.CrossEntropyLoss(reduction="none")
)


STEPS_FIRST = Row(
    lambda: Lambda(
        lambda m, x: m.head(m.recurrent(m.token(x))[0][-1]),
        token=nn.Embedding(5, 3),
        recurrent=nn.LSTM(3, 4),
        head=nn.Linear(4, 3),
    ),
    lambda: (torch.randint(5, (N + 2, N)),),
)

REFUSALS = {
    **{
        f"steps-first-{ext.__name__}": Refusal(
            on_row(STEPS_FIRST, ext()),
            NotImplementedError,
            rf"(?s){ext.__name__}: samples have met in `lstm` on \[6, 4, 3\] of "
            r"LSTM\(3, 4\) \('recurrent' of Lambda\).*batch axis is axis 0",
        )
        for ext in (BatchGrad, SumGradSquared, DiagGGNExact)
    },
    "class-instead-of-instance": Refusal(
        lambda: backpack(BatchGrad), ValueError, r"BatchGrad\(\)"
    ),
    "number-instead-of-extension": Refusal(
        lambda: backpack(3), ValueError, r"instance"
    ),
    "registered-twice": Refusal(
        registered_twice, ValueError, r"(?s)BatchGrad.*Linear.*overwrite=True"
    ),
    "permute-axis-0": Refusal(lambda: Permute(1, 0, 2), ValueError, r"axis 0"),
    "unknown-weight-sharing": Refusal(
        lambda: KFLR(weight_sharing="both"), ValueError, r"(?s)KFLR.*expand.*both"
    ),
    "second-backward": Refusal(
        second_backward, RuntimeError, r"(?s)(Linear|CrossEntropyLoss).*retain_graph"
    ),
    **{
        f"{name}-{ext.__name__}": Refusal(
            on_row(row, ext()),
            NotImplementedError,
            rf"(?s){ext.__name__}.*{layer}.*weight_sharing='expand'",
        )
        for name, row, layer in (
            ("sequence", SEQUENCE, "Linear"),
            ("groups", GROUPED["Conv2d-groups"], "Conv2d"),
            ("transposed-groups", GROUPED["ConvTranspose2d-groups"], "ConvTranspose2d"),
            ("embedding", MODELS["embedding-padding"], "Embedding"),
            ("called-twice", SHARED["called-twice"], "Linear"),
        )
        for ext in (KFAC, KFLR)
    },
    **{
        f"no-loss-{ext.__name__}": Refusal(
            without_loss(ext()), AssertionError, rf"(?s){ext.__name__}.*extend\("
        )
        for ext in (DiagGGNExact, DiagGGNMC, SqrtGGNExact, BatchDiagGGNMC, KFAC, KFLR)
    },
    **{
        f"no-reduction-{ext.__name__}": Refusal(
            lambda ext=ext: use_summed(ext()),
            ValueError,
            r"(?s)CrossEntropyLoss.*(mean|sum)",
        )
        for ext in (DiagGGNExact, SqrtGGNMC, KFLR)
    },
    **{
        f"not-a-chain-{name}": Refusal(
            lambda name=name: on_row(NOT_A_CHAIN, getattr(extensions, name)())(),
            NotImplementedError,
            r"(?s)use_converter=True",
        )
        for name in ("KFRA", "DiagHessian", "BatchDiagHessian", "HMP", "GGNMP", "PCHMP")
    },
}


def use_summed(ext: Any) -> None:
    """Run an extension on a loss that is reduced after its module."""
    model, loss, X, y = NO_REDUCTION.build()
    value = extend(loss)(extend(model)(*X), *y).sum()
    with backpack(ext):
        value.backward()


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused(refusal: str) -> None:
    """The error has the promised type, and names module, option, and way out."""
    action, error, says = REFUSALS[refusal]
    with pytest.raises(error, match=says), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        action()


def test_refusal_leaves_nothing_behind() -> None:
    """After an error inside a backward pass, the next one is right."""
    problem = SEQUENCE.build()
    ref = Reference(*deepcopy(problem))
    with pytest.raises(NotImplementedError):
        use(KFLR())(*problem)
    use(BatchGrad(), DiagGGNExact())(*problem)
    assert_fields(problem.model, "BatchGrad", ref)
    assert_fields(problem.model, "DiagGGNExact", ref)


# The guard


@pytest.mark.parametrize("row", ["called-twice", "tied-linear"])
def test_guard_is_silent_where_all_is_right(row: str) -> None:
    """``check=True`` does not complain about right individual gradients."""
    use(BatchGrad(), SumGradSquared(), check=True)(*SHARED[row].build())


@pytest.mark.parametrize("exts", [(BatchGrad,), (BatchL2Grad, DiagGGNExact)])
def test_guard_names_parameters(exts: Tuple[type, ...]) -> None:
    """``check=True`` names those whose individual gradients miss something."""
    problem = Penalized(l2_term)
    value = problem.value()
    with pytest.raises((RuntimeError, AssertionError, ValueError)) as caught:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with backpack(*[e() for e in exts], check=True):
                value.backward()
    assert "0.weight" in str(caught.value) or "Linear" in str(caught.value)
    assert "2.bias" not in str(caught.value)


def test_guard_compares_with_this_backward_pass() -> None:
    """``check=True`` is not disturbed by gradients that were there before."""
    model, loss, X, y = small()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    use(BatchGrad(), check=True)(model, loss, X, y)


# The report


def reported(function: Callable[[], Any]) -> str:
    """Run a function, and return the only warning that it must issue."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    (warning,) = caught
    assert issubclass(warning.category, UserWarning)
    return str(warning.message)


def two_branches() -> Problem:
    """Make a model with a branch that does not enter the loss."""
    return Row(
        lambda: Lambda(
            lambda m, x: (m.used(x), m.unused(x))[0],
            used=nn.Linear(4, 3),
            unused=nn.Linear(4, 3),
        ),
        randn(4),
    ).build()


@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_report_not_reached(ext: type) -> None:
    """Parameters that the backward pass did not reach are listed once."""
    message = reported(lambda: use(ext())(*two_branches()))
    assert "unused.weight" in message and "unused.bias" in message
    assert "used.weight" not in message.replace("unused.weight", "")
    assert "reach" in message


@pytest.mark.parametrize("ext", [BatchGrad])
def test_report_extended_after_the_forward_pass(ext: type) -> None:
    """A model that is extended too late gets no fields, and a word about it."""

    def action() -> None:
        model, loss, X, y = small()
        value = loss(model(*X), *y)
        extend(model)
        extend(loss)
        with backpack(ext()):
            value.backward()

    message = reported(action)
    assert "0.weight" in message and "extend" in message and "forward" in message


def test_report_hooks_removed() -> None:
    """A model whose hooks were removed gets no fields, and a word about it."""

    def action() -> None:
        model, loss, X, y = small()
        model, loss = extend(model), extend(loss)
        CTX.remove_hooks()
        value = loss(model(*X), *y)
        with backpack(BatchGrad()):
            value.backward()

    message = reported(action)
    assert "0.weight" in message and "hooks" in message


class Nothing(FirstOrderBackpropExtension):
    """An extension that knows no layer."""

    def __init__(self, mode: str = "SILENT"):
        """Register nothing, and keep silent about unknown layers."""
        super().__init__("nothing", {}, fail_mode=mode)


def test_report_no_rule() -> None:
    """Without a rule for a layer, ``fail_mode`` says whether there is a word."""
    use(Nothing())(*small())  # warnings are errors
    messages = said(lambda: use(Nothing("WARNING"))(*small()))
    assert len(messages) == 2, messages  # for two layers
    assert all("Linear" in m and "Nothing" in m for m in messages), messages


def test_report_is_silent() -> None:
    """There is nothing to report where all parameters have fields, or no pass ran."""
    model, loss, X, y = small()
    model[0].weight.requires_grad_(False)
    with backpack(BatchGrad()):
        pass
    use(BatchGrad(), DiagGGNExact())(model, loss, X, y)
    with disable():
        extend(model)(*X)
    with backpack(BatchGrad()):  # not meant for parameters
        loss(model.requires_grad_(False)(X[0].requires_grad_()), *y).backward()


@pytest.mark.parametrize("name", ["BatchGrad", "Variance", "DiagGGNExact"])
@pytest.mark.parametrize("scaled", [False, True])
def test_frozen_after_the_forward_pass(name: str, scaled: bool) -> None:
    """What is frozen between the passes gets nothing, as from autograd."""
    model, loss, X, y = small()
    if scaled:  # the weight enters by way of an expression
        weight_norm(model[0])
    plain = deepcopy(model)
    next(plain.parameters()).requires_grad_(False)
    ref = Reference(plain, deepcopy(loss), X, y)
    value = extend(loss)(extend(model)(*X), *y)
    frozen = next(model.parameters()).requires_grad_(False)
    with backpack(QUANTITIES[name].extension()):
        value.backward()  # warnings are errors
    assert frozen.grad is None
    assert not hasattr(frozen, QUANTITIES[name].extension().savefield)
    assert_fields(model, name, ref)


# Faults


class OwnError(Exception):
    """An error in a user's function."""


def fail(*args: Any) -> None:
    """Raise an error."""
    raise OwnError


class FailingExtension(ModuleExtension):
    """An extension that raises an error on linear layers."""

    def __init__(self):
        """Register one method."""
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Raise an error."""
        fail()


def failing_hook(model: Module, loss: Module, X: Tensors, y: Tensors) -> None:
    """Run a hook that fails on the second module."""
    seen = []
    value = loss(model(*X), *y)
    with backpack(
        BatchGrad(),
        DiagGGNExact(),
        extension_hook=lambda m: seen.append(m) if len(seen) < 1 else fail(),
    ):
        value.backward()


def failing_forward(model: Module, loss: Module, X: Tensors, y: Tensors) -> None:
    """Run a forward pass that fails in the middle."""
    handle = model[1].register_forward_hook(fail)
    try:
        with backpack(BatchGrad()):
            model(*X)
    finally:
        handle.remove()


def failing_extension(model: Module, loss: Module, X: Tensors, y: Tensors) -> None:
    """Run an extension of a user that fails."""
    ext = Nothing()
    ext.set_module_extension(nn.Linear, FailingExtension())
    value = loss(model(*X), *y)
    with backpack(BatchGrad(), DiagGGNExact(), ext):
        value.backward()


def failing_tensor_hook(model: Module, loss: Module, X: Tensors, y: Tensors) -> None:
    """Run a hook on a tensor that fails in the backward pass."""
    out = model[0](*X)
    out.register_hook(fail)
    value = loss(model[2](model[1](out)), *y)
    with backpack(BatchGrad(), DiagGGNExact(), SqrtGGNExact()):
        value.backward()


FAULTS = [failing_hook, failing_forward, failing_extension, failing_tensor_hook]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: Callable) -> None:
    """An exception leaves no state behind: the next pass is right."""
    model, loss, X, y = small()
    ref = Reference(deepcopy(model), deepcopy(loss), X, y)
    model, loss = extend(model), extend(loss)
    with pytest.raises(OwnError):
        fault(model, loss, X, y)
    assert not CTX.get_active_exts()
    exts = BatchGrad(), SumGradSquared(), DiagGGNExact(), SqrtGGNExact()
    value = loss(model(*X), *y)
    with backpack(*exts):
        value.backward()
    for quantity in ("BatchGrad", "SumGradSquared", "DiagGGNExact", "SqrtGGNExact"):
        assert_fields(model, quantity, ref)
    for ext in exts:
        assert not ext.saved_quantities._saved_quantities


def test_threads() -> None:
    """Threads that train two models at once do not mix."""
    errors: List[BaseException] = []
    barrier = threading.Barrier(2, timeout=60)

    def train(seed: int, *exts: type) -> None:
        try:
            torch.manual_seed(seed)
            model, loss, X, y = Row(lambda: mlp(nn.Tanh()), randn(4)).build()
            X = tuple(x + seed for x in X)
            ref = Reference(deepcopy(model), deepcopy(loss), X, y)
            model, loss = extend(model), extend(loss)
            expected = {
                q: QUANTITIES[q].expected(ref, None) for q in [e.__name__ for e in exts]
            }
            for _ in range(10):
                barrier.wait()
                with backpack(*[ext() for ext in exts]):
                    assert len(CTX.get_active_exts()) == len(exts)
                    loss(model(*X), *y).backward()
                for q, values in expected.items():
                    field = QUANTITIES[q].extension().savefield
                    assert_right(fields(model, field), values, q)
        except BaseException as error:  # noqa: B036
            errors.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=train, args=(0, BatchGrad, DiagGGNExact)),
        threading.Thread(target=train, args=(5, Variance, BatchDotGrad, SqrtGGNExact)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(value: float) -> None:
    """NaN and inf pass through to the fields of the samples they belong to."""
    model, loss, (x,), y = Row(lambda: nn.Linear(4, 3), randn(4)).build()
    x[1, 2] = value
    use(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), DiagGGNExact())(
        model, loss, (x,), y
    )
    finite = model.weight.grad_batch.flatten(1).isfinite().all(1).tolist()
    assert finite == [True, False, True, True]
    assert model.weight.batch_l2.isfinite().tolist() == finite
    assert not model.weight.sum_grad_squared.isfinite().all()
    assert not model.weight.variance.isfinite().all()
    assert not model.weight.diag_ggn_exact.isfinite().all()


@pytest.mark.parametrize("ext", [DiagGGNExact, KFLR, SqrtGGNExact, DiagHessian])
def test_hooks_of_tensors(ext: Callable) -> None:
    """Hooks and ``retain_grad`` see gradients, but no columns and no masks."""
    model, loss, (x,), y = Row(lambda: mlp(nn.Dropout(), nn.Tanh()), randn(4)).build()
    model, loss = extend(model.train()), extend(loss)

    def gradients(second_order: bool) -> Tuple[List, List]:
        torch.manual_seed(0)
        seen, tensors, z = [], [], x
        for i, module in enumerate((*model, lambda z: 2 * z)):
            if ext is not DiagHessian or i < len(model):  # which wants modules
                z = module(z)
                tensors.append(z)
                z.retain_grad()
                z.register_hook(lambda g, i=i: seen.append((i, g.clone())))
        value = loss(z, *y)
        with backpack(*[ext()] if second_order else []):
            value.backward()
            assert all(len(t._backward_hooks) == 1 for t in tensors)
        return seen, [t.grad for t in tensors]

    (expected, wanted), (seen, retained) = gradients(False), gradients(True)
    assert [i for i, _ in seen] == [i for i, _ in expected]
    oracle.assert_agrees([g for _, g in seen], [g for _, g in expected])
    oracle.assert_agrees(retained, wanted)


class Two(Module):
    """A layer with two outputs."""

    def __init__(self) -> None:
        """Make a linear layer."""
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Return two functions of the same."""
        return self.layer(x).tanh(), self.layer(x).sin()


SEVERAL_OUTPUTS: Dict[str, Callable[[], Module]] = {
    "two": Two,
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 4, batch_first=True),
}


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("part", SEVERAL_OUTPUTS)
def test_hooks_that_look_where_outputs_are_not_used(part: str, kind: str) -> None:
    """PyTorch returns nothing for these, where zeros have come: no change."""
    row = Row(
        lambda: Lambda(
            lambda m, x: m.g(m.part(m.f(x))[0][:, -1]),
            f=nn.Linear(4, 4),
            part=SEVERAL_OUTPUTS[part](),
            g=nn.Linear(4, 3),
        ),
        randn(3, 4),
    )
    problem, seen = row.build(), []
    register = getattr(problem.model.part, f"register_{kind}")
    register(lambda module, *gradients: seen.append(gradients))
    check(problem, ["BatchGrad", "DiagGGNExact", "SqrtGGNExact"], row.build())
    assert seen and any(g is None for g in seen[0][-1])


@pytest.mark.parametrize("hooked", [False, True])
def test_terms_of_a_loss_with_a_hook(hooked: bool) -> None:
    """What comes from no extended loss is named, also where a hook looks at that."""
    model, loss, X, y = small()
    if hooked:
        loss.register_full_backward_hook(lambda *_: None)
    f = extend(model)(*X)
    value = extend(loss)(f, *y) + f.square().mean()
    with pytest.warns(UserWarning, match="come from no extended loss module"):
        with backpack(DiagGGNExact()):
            value.backward()


def hooked_tensor(place: str) -> Callable[[Callable], Lambda]:
    """Make a model with a hook on a tensor of its forward pass."""

    def forward(m: Lambda, x: Tensor) -> Tensor:
        at = SimpleNamespace(inner=m.f(x))
        if place == "a-layers-output-that-is-gone":
            at.inner.register_hook(m.hook)
        at.outer = at.inner.tanh()
        if place == "a-functions-result":
            at.outer.register_hook(m.hook)
        at.inner = at.outer.sin().roll(1, 1)
        if place == "what-becomes-a-view":
            at.inner.register_hook(m.hook)
        at.outer = at.inner.unflatten(1, (2, 2)).transpose(1, 2).flatten(1)
        weight = F.softplus(m.scale)
        if place == "a-computed-parameter":
            weight.register_hook(m.hook)
        return m.h(m.g(at.outer).sigmoid() * weight)

    return lambda hook: Lambda(
        forward,
        hook=hook,
        scale=Parameter(torch.rand(4)),
        **{name: nn.Linear(4, 4) for name in "fgh"},
    )


def hooked_module(name: str, pre: bool = False) -> Callable[[Callable], Lambda]:
    """Make a model with a backward hook on one of its modules."""

    def on_module(module: Module, gradients: Any, *_: Any) -> Any:
        changed = [None if g is None else module.hook(g) for g in gradients]
        return None if all(g is None for g in changed) else tuple(changed)

    def make(hook: Callable) -> Lambda:
        model = Lambda(
            lambda m, x: m.g(m.part(m.f(x).mT.tanh()).flatten(1)) * m.scale,
            f=nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 2)),
            part=nn.Sequential(nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 2))),
            g=nn.Linear(4, 3),
            scale=Parameter(torch.rand(3)),
        )
        module = model.get_submodule(name)
        module.hook = hook
        if pre:
            module.register_full_backward_pre_hook(on_module)
        else:
            module.register_full_backward_hook(on_module)
        return model

    return make


def implicit(hook: Callable) -> Lambda:
    """Make a fixed point, differentiated by a hook that solves for the gradient."""

    def forward(m: Lambda, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(60):
                z = (0.3 * m.f(z) + x).tanh()
        z = (0.3 * m.f(z) + x).tanh()
        start = z.detach().requires_grad_()
        again = (0.3 * m.f(start) + x).tanh()

        def solve(g: Tensor) -> Tensor:
            solution = g
            for _ in range(60):
                pulled = torch.autograd.grad(again, start, solution, retain_graph=True)
                solution = g + pulled[0]
            return solution

        z.register_hook(lambda g: None if hook(g) is None else solve(g))
        return m.g(z)

    return Lambda(forward, f=nn.Linear(4, 4), g=nn.Linear(4, 3))


def on_output(model: Module, x: Tensor, hook: Callable) -> Tensor:
    """Call a model, and put a hook on its output."""
    (f := model(x)).register_hook(hook)
    return f


def at_node(model: Module, x: Tensor, hook: Callable, layer: int, pre: bool) -> Tensor:
    """Call a chain, and put a hook on the node of the graph of a layer's output."""

    def on_node(gradients: Tuple, *_: Any) -> Optional[Tuple]:
        changed = [None if g is None else hook(g) for g in gradients]
        return None if all(g is None for g in changed) else tuple(changed)

    f = model(x)
    last = f.grad_fn
    inner = last.next_functions[1][0]  # behind the bias comes the input
    node = (inner.next_functions[0][0], inner, last)[layer]
    (node.register_prehook if pre else node.register_hook)(on_node)
    return f


def between(model: Module, x: Tensor, hook: Callable) -> Tensor:
    """Call children, with a function between them whose result has a hook."""
    (h := model[0](x).tanh()).register_hook(hook)
    return model[2](h)


def before_loss(model: Module, x: Tensor, hook: Callable) -> Tensor:
    """Call a model, and a function on its output whose result has a hook."""
    (f := model(x).sinh()).register_hook(hook)
    return f


def chain(_: Callable) -> Module:
    """Make a model whose hooks are registered by who calls it."""
    return mlp(nn.Tanh())


def call(model: Module, x: Tensor, hook: Callable) -> Tensor:
    """Call a model that has its hooks."""
    return model(x)


# Where a hook is: the model, how it is called, and whether it is on data
USERS_HOOKS: Dict[str, Tuple[Callable, Callable, bool]] = {
    **{
        place: (hooked_tensor(place), call, place != "a-computed-parameter")
        for place in (
            *("a-layers-output-that-is-gone", "a-functions-result"),
            *("what-becomes-a-view", "a-computed-parameter"),
        )
    },
    **{
        f"module-{name or 'model'}{'-before' * pre}": (
            hooked_module(name, pre),
            call,
            True,
        )
        for name in ("f", "part", "part.0", "part.1.0", "g", "")
        for pre in (False, True)
        if (name not in ("f", "")) or pre  # what goes in there has no gradient
    },
    "fixed-point": (implicit, call, True),
    "output": (chain, on_output, True),
    "before-the-loss": (chain, before_loss, True),
    "between-children": (chain, between, True),
    **{  # behind a node whose layer has parameters are gradients of these
        f"node-{layer}-{'before' if pre else 'behind'}": (
            chain,
            partial(at_node, layer=layer, pre=pre),
            pre or layer == 1,
        )
        for layer in range(3)
        for pre in (True, False)
    },
}
CHANGES: Dict[str, Callable[[Tensor], Optional[Tensor]]] = {
    "looks": lambda g: None,
    "clamps": lambda g: g.clamp(-0.05, 0.05),
    "clamps-in-place": lambda g: g.clamp_(-0.05, 0.05),
    "reverses": lambda g: -g,
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact, BatchJacobian])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", USERS_HOOKS)
def test_hooks_that_change_gradients(place: str, change: str, ext: Callable) -> None:
    """First-order quantities are those of changed gradients; others are refused."""
    make, run_model, on_data = USERS_HOOKS[place]
    if change == "clamps-in-place" and ("module" in place or place == "fixed-point"):
        pytest.skip("PyTorch allows it for tensors only")
    if ext is BatchJacobian and place in ("between-children", "before-the-loss"):
        pytest.skip("is about a model as a whole, and ends there")
    torch.manual_seed(0)
    seen, loss = [], nn.MSELoss(reduction="sum")

    def hook(g: Tensor) -> Optional[Tensor]:
        seen.append(g)
        return CHANGES[change](g)

    x, y = torch.randn(N, 4, dtype=F64), torch.randn(N, 1, dtype=F64)
    model = randomize(make(hook).to(F64))
    params, gradients = list(model.parameters()), []
    for n in range(N):
        f = run_model(model, x[n : n + 1], hook)
        value = loss(f, y[n : n + 1].expand_as(f))
        gradients.append(torch.autograd.grad(value, params))

    for module in model if place == "between-children" else [model]:
        extend(module)
    loss, extension = extend(loss), ext()
    with backpack(extension):
        f = run_model(model, x, hook)
        value = f.square().sum() if ext is BatchJacobian else loss(f, y.expand_as(f))
        if change != "looks" and (ext is not BatchGrad or not on_data):
            with pytest.raises(NotImplementedError, match="changes the gradient"):
                value.backward()
            return
        value.backward()
    if "module" not in place and "behind" not in place:
        assert len(seen) == len(gradients) + 1
    fields = [getattr(p, extension.savefield) for p in params]
    if ext is BatchGrad:
        for field, samples in zip(fields, zip(*gradients)):
            oracle.assert_agrees(field, torch.stack(samples))


@pytest.mark.parametrize("hook", [lambda g: 0 * g, lambda g: g - g.mean()])
@pytest.mark.parametrize(
    "expression", [lambda p: p, F.softplus, lambda p: p.softmax(0)]
)
def test_hooks_of_parameters(expression: Callable, hook: Callable) -> None:
    """What changes a parameter's gradient, in the end, has no part in quantities."""

    def forward(m: Lambda, x: Tensor) -> Tensor:
        return m.f(x * expression(m.scale))

    model = Lambda(forward, f=nn.Linear(4, 3), scale=Parameter(torch.rand(4))).to(F64)
    x, seen = torch.randn(N, 4, dtype=F64), []
    values = [model(sample).square().sum() for sample in x]
    gradients = [torch.autograd.grad(value, model.scale)[0] for value in values]
    model.scale.register_hook(lambda g: seen.append(g) or hook(g))
    loss = extend(nn.MSELoss(reduction="sum"))
    with backpack(BatchGrad(), DiagGGNExact()):
        f = extend(model)(x)
        loss(f, torch.zeros_like(f)).backward()
    oracle.assert_agrees(model.scale.grad_batch, torch.stack(gradients))
    oracle.assert_agrees(seen, [sum(gradients)])
    oracle.assert_agrees(model.scale.grad, hook(sum(gradients)))
    assert model.scale.diag_ggn_exact.all()


@pytest.mark.parametrize("expression", [torch.exp, lambda p: p.softmax(0)])
@pytest.mark.parametrize("exts", [(BatchGrad,), (BatchGrad, DiagGGNExact)])
def test_retained_gradients_of_expressions(expression: Callable, exts: Tuple) -> None:
    """What is computed from parameters retains its gradient, and nothing of ours."""
    kept: List[Tensor] = []

    def forward(m: Lambda, x: Tensor) -> Tensor:
        kept[:] = (2 * m.scale, expression(m.scale) * 3)
        for tensor in kept:
            tensor.retain_grad()
        return m.f(x * kept[0] * kept[1])

    model = Lambda(forward, f=nn.Linear(4, 3), scale=Parameter(torch.rand(4))).to(F64)
    model, loss = extend(model), extend(nn.MSELoss(reduction="sum"))
    x = torch.randn(N, 4, dtype=F64)
    retained = []
    for some in ((), exts):
        with backpack(*[ext() for ext in some]):
            f = model(x)
            loss(f, torch.zeros_like(f)).backward()
        retained.append([tensor.grad for tensor in kept])
    oracle.assert_agrees(*reversed(retained))


@pytest.mark.usefixtures("cpu")
def test_hook_of_the_loss() -> None:
    """What changes the gradient at a loss is a factor of it, and said."""
    model, loss, X, y = small()
    model, loss = extend(model), extend(loss)
    with backpack(DiagGGNExact()):
        loss(model(*X), *y).backward()
    once = {p: p.diag_ggn_exact for p in model.parameters()}
    with backpack(DiagGGNExact()):
        (value := loss(model(*X), *y)).register_hook(lambda g: 2 * g)
        with pytest.warns(UserWarning, match=r"gradient at its output is 2\.0"):
            value.backward()
    for p, right in once.items():
        oracle.assert_agrees(p.diag_ggn_exact, 2 * right)


def test_retained_gradients_accumulate() -> None:
    """What was collected in earlier passes stays."""
    model, loss, (x,), y = small()
    hidden = model[0](x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model[2](model[1](hidden)), *y), hidden)
    model, loss = extend(model), extend(loss)
    hidden = model[0](x)
    hidden.retain_grad()
    value = loss(model[2](model[1](hidden)), *y)
    for times in (1, 2):
        with backpack(DiagGGNExact(), retain_graph=True):
            value.backward(retain_graph=True)
        oracle.assert_agrees(hidden.grad, times * gradient)


NO_POSITIONS: Dict[str, Tuple[Callable[[], Module], Callable[[], Tensor]]] = {
    "linear": (lambda: mlp(nn.Tanh()), lambda: torch.randn(2, 0, 4)),
    "normalization": (lambda: mlp(nn.LayerNorm(4)), lambda: torch.randn(2, 0, 4)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 3)),
        lambda: torch.zeros(2, 0, dtype=torch.long),
    ),
    "operation": (
        lambda: Lambda(lambda m, x: x * m.v @ m.w, v=bare(4), w=bare(4, 3)),
        lambda: torch.randn(2, 0, 4),
    ),
}


@pytest.mark.parametrize("name", NO_POSITIONS)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss, nn.HuberLoss])
def test_no_positions(name: str, loss: Callable) -> None:
    """Samples without a position have gradients, squares and curvatures of zero."""
    make, data = NO_POSITIONS[name]
    model, lossfunc = extend(make()), extend(loss(reduction="sum"))
    entropy = loss is nn.CrossEntropyLoss
    y = torch.zeros(2, 0, dtype=torch.long) if entropy else torch.zeros(2, 0, 3)
    exts = [BatchGrad(), BatchL2Grad(), SumGradSquared(), BatchDotGrad(), Variance()]
    exts += [DiagGGNExact(), BatchDiagGGNExact(), DiagGGNMC(), BatchJacobian()]
    exts += [SqrtGGNExact(), ClippedGrad(1.0), BatchProjectGrad(2)]
    if not entropy and name != "operation":
        exts += [DiagHessian(), BatchDiagHessian(), HMP()]
    if not entropy and name in ("linear", "normalization"):
        exts.append(KFRA("expand"))
    with backpack(*exts):
        output = model(data())
        lossfunc(output.transpose(1, 2) if entropy else output, y).backward()
    for param in model.parameters():
        for ext in exts:
            field = getattr(param, ext.savefield)
            field = field(torch.ones(1, *param.shape)) if callable(field) else field
            assert all(
                not x.any()
                for x in ([field] if isinstance(field, Tensor) else field[:1])
            )


def test_no_outputs() -> None:
    """Curvatures of a prediction without numbers have the parameters' shapes."""
    model = extend(Lambda(lambda m, x: x @ m.w @ m.v, w=bare(4, 3), v=bare(3, 0)))
    loss, x = extend(nn.MSELoss(reduction="sum")), torch.randn(2, 5, 4)
    with backpack(DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact()):
        loss(model(x), torch.zeros(2, 5, 0)).backward()
    for param in model.parameters():
        assert param.diag_ggn_exact.shape == param.shape
        assert param.diag_ggn_exact_batch.shape == (2, *param.shape)
        assert param.sqrt_ggn_exact.shape == (0, 2, *param.shape)


@pytest.mark.parametrize(
    "name",
    ["linear", "convolution", "embedding", "normalization", "slopes", "operations"]
    + ["generic"],
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.HuberLoss]
)
def test_empty_batch(name: str, loss: Callable, reduction: str) -> None:
    """A batch without samples gives empty fields, sums of zero, and means of NaN."""
    model, x = {
        "linear": (mlp(nn.Tanh()), torch.randn(0, 4)),
        "convolution": (
            nn.Sequential(
                *(nn.Conv1d(2, 2, 1), nn.Tanh(), nn.Conv1d(2, 3, 2), nn.Flatten()),
                nn.Linear(6, 3),
            ),
            torch.randn(0, 2, 3),
        ),
        "embedding": (
            nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(6, 3)),
            torch.zeros(0, 3, dtype=torch.long),
        ),
        "normalization": (mlp(nn.LayerNorm(4)), torch.randn(0, 4)),
        "slopes": (mlp(nn.PReLU(4)), torch.randn(0, 4)),
        "operations": (
            Lambda(lambda m, x: (x @ m.w + m.b).tanh().sum(1), w=bare(4, 3), b=bare(3)),
            torch.randn(0, 2, 4),
        ),
        "generic": (
            Lambda(lambda m, x: torch.einsum("nth,khc->nc", x, m.w), w=bare(2, 4, 3)),
            torch.randn(0, 2, 4),
        ),
    }[name]
    is_entropy = loss is nn.CrossEntropyLoss
    y = torch.zeros(0, dtype=torch.long) if is_entropy else torch.zeros(0, 3)
    model, loss = extend(model), extend(loss(reduction=reduction))
    exts = (BatchGrad(), BatchL2Grad(), SumGradSquared(), BatchDotGrad(), Variance())
    ggn = DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact(), DiagGGNMC()
    factors = [ext(weight_sharing="expand") for ext in (KFAC, KFLR, KFRA)]
    has_rules = name not in ("embedding", "operations", "generic")
    rules = (DiagHessian(), HMP()) if has_rules else ()
    sums = ClippedGrad(1.0), WeightedGrad(lambda dots: dots.sum(1), of="dots")
    exts = (*exts, *sums, BatchJacobian(), BatchFactors(), BatchProjectGrad(2))
    with backpack(*exts, *ggn, *factors[: 3 if rules else 2], *rules):
        loss(model(x), y).backward()
    for param in model.parameters():
        assert param.grad_batch.shape == (0, *param.shape)
        assert param.batch_l2.shape == (0,)
        assert param.batch_dot.shape == (0, 0)
        assert param.sum_grad_squared.shape == param.shape
        assert not param.sum_grad_squared.any()
        assert param.diag_ggn_exact.shape == param.shape
        assert not param.diag_ggn_exact.any()
        for field in (param.grad_clipped, param.grad_weighted):
            assert field.shape == param.shape and not field.any()
        assert param.jacobian.shape == (3, 0, *param.shape)
        assert param.grad_factors.individual().shape == (0, *param.shape)
        assert param.grad_projected.shape == (0, 2, 2)[: min(param.dim(), 2) + 1]
        assert param.diag_ggn_exact_batch.shape == (0, *param.shape)
        assert param.sqrt_ggn_exact.shape == (3, 0, *param.shape)
        assert not param.grad.any() and not param.diag_ggn_mc.any()
        assert param.variance.shape == param.shape and param.variance.isnan().all()
        for kfac, kflr in zip(param.kfac, param.kflr):
            assert kfac.shape == kflr.shape and kfac.isnan().any() == kflr.isnan().any()
        if name in ("linear", "convolution"):
            assert [x.shape for x in param.kfra] == [x.shape for x in param.kfac]
            assert not param.kfac[0].any() and not param.diag_h.any()
            assert all(x.isnan().all() for x in param.kfac[1:] + param.kfra[1:])
            assert not param.hmp(torch.ones(2, *param.shape)).any()
