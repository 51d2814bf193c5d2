"""Models that nobody has thought of: every quantity agrees with plain autograd.

Architectures are drawn from a grammar of steps: layers, shared layers, branches,
in-place and functional operations; with a loss, a reduction, a batch size, and a seed.
All quantities are computed in one backward pass. A test run draws a few hundred models,
always the same. With ``BACKPACK_TEST_LONG=1`` (``make test-long``) it draws thousands
of new ones, with ``BACKPACK_TEST_LONG=<count>`` as many, and prints its seed; set
``BACKPACK_TEST_SEED=<seed>`` to repeat a run. What failed once is tried first.
"""

import os
import random
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import Problem, randomize
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import seed as with_seed
from hypothesis import settings
from hypothesis import strategies as st
from test_architectures import BY_THEMSELVES, PASSES, QUANTITIES, Reference, compute
from torch import Tensor, nn
from torch.nn import Module, ModuleList, Parameter
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import is_parametrized

LONG = int(os.environ.get("BACKPACK_TEST_LONG", "0"))
COUNT = {0: 60, 1: 4000}.get(LONG, LONG)
SEED = int(os.environ.get("BACKPACK_TEST_SEED", random.randrange(2**32)))

DENSE = [name for name in QUANTITIES if "KF" not in name]
EXPAND = ["KFAC-expand", "KFLR-expand", "EKFAC-expand"]
REDUCE = ["KFAC-reduce", "KFLR-reduce", "EKFAC-reduce"]

# Quantities that are linear in the cotangents; all others are quadratic.
LINEAR = (
    *("BatchGrad", "BatchFactors", "BatchProjectGrad"),
    *("BatchJacobian", "SqrtGGNMC", "WeightedGrad", "WeightedGrad-dots"),
    *("ClippedGrad", "ClippedGrad-replaces", "BatchDotGrad-other"),
)


class Step(Module):
    """A step of a random model: layers, and a function of them."""

    def __init__(self, function: Callable[..., Tensor], *layers: Any):
        """Store function, layers, and parameters."""
        super().__init__()
        self.function = function
        self.layers = ModuleList([x for x in layers if isinstance(x, Module)])
        for i, x in enumerate(layers):
            if isinstance(x, Parameter):
                self.register_parameter(f"bare{i}", x)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to input, layers, and bare parameters."""
        return self.function(x, *self.layers, *self._parameters.values())


# Each step is a function of the input's shape (without the batch axis) that returns
# the step, or None if it does not apply.

Shape = Tuple[int, ...]


def linear(shape: Shape, bias: bool = True, size: int = 3) -> Step:
    """Apply a linear layer to the last axis."""
    return Step(lambda x, f: f(x), nn.Linear(shape[-1], size, bias=bias))


def linear_twice(shape: Shape) -> Step:
    """Call the same layer twice."""
    d = shape[-1]
    return Step(lambda x, f: f(torch.tanh(f(x))), nn.Linear(d, d))


def linear_tied(shape: Shape) -> Step:
    """Share a weight, but not the bias."""
    d = shape[-1]
    first, second = nn.Linear(d, d), nn.Linear(d, d)
    second.weight = first.weight
    return Step(lambda x, f, g: g(torch.sin(f(x))), first, second)


def residual(shape: Shape) -> Step:
    """Add what comes out to what went in."""
    d = shape[-1]
    return Step(lambda x, f: x + f(F.silu(x)), nn.Linear(d, d))


def residual_in_place(shape: Shape) -> Step:
    """Add what went in, in place."""
    d = shape[-1]

    def function(x: Tensor, f: Module) -> Tensor:
        out = f(x)
        out += x
        return out.mul_(0.7)

    return Step(function, nn.Linear(d, d))


def branches(shape: Shape) -> Step:
    """Concatenate two branches."""
    return Step(
        lambda x, f: torch.cat([f(input=x), torch.tanh(x)[..., :2]], dim=-1),
        nn.Linear(shape[-1], 2),
    )


def gate(shape: Shape) -> Step:
    """Multiply two branches."""
    d = shape[-1]
    layers = nn.Linear(d, d), nn.Linear(d, d, bias=False)
    return Step(lambda x, f, g: f(x) * torch.sigmoid(g(x)), *layers)


def bare(shape: Shape) -> Step:
    """Multiply with a parameter and add another."""
    d = shape[-1]
    parameters = Parameter(torch.ones(d)), Parameter(torch.zeros(d))
    return Step(lambda x, scale, shift: scale * x + shift, *parameters)


def normed(shape: Shape) -> Step:
    """Normalize a linear layer's weight."""
    return Step(lambda x, f: f(x), weight_norm(nn.Linear(shape[-1], 3)))


def normalization(layer: Module) -> Step:
    """Normalize what an activation returns.

    Right behind a linear operation, a normalization would take away the influence of
    its parameters, and their gradients would consist of rounding errors.
    """
    return Step(lambda x, f: f(torch.tanh(x)), layer)


def layer_norm(shape: Shape) -> Step:
    """Normalize the last axis, if there is something to normalize."""
    return normalization(nn.LayerNorm(shape[-1])) if shape[-1] > 2 else None


def rms_norm(shape: Shape) -> Step:
    """Normalize the last axis, if there is something to normalize."""
    return normalization(nn.RMSNorm(shape[-1], eps=1e-5)) if shape[-1] > 2 else None


def prelu(shape: Shape) -> Step:
    """Apply an activation with a parameter."""
    return Step(lambda x, f: f(x), nn.PReLU())


def bilinear(shape: Shape) -> Step:
    """Combine the input with itself."""
    return Step(lambda x, f: f(x, x.cos()), nn.Bilinear(shape[-1], shape[-1], 2))


def activation(make: Callable[[], Callable]) -> Callable[[Shape], Step]:
    """Make a step out of an activation, which gets a tensor of its own."""

    def step(shape: Shape) -> Step:
        function = make()
        layers = [function] if isinstance(function, Module) else []
        return Step(lambda x, *f: (f[0] if f else function)(x * 1.0), *layers)

    return step


def batch_norm_1d(shape: Shape) -> Step:
    """Normalize vectors with running statistics."""
    return Step(lambda x, f: f(x), nn.BatchNorm1d(shape[-1]))


def recurrent(cls: type, **options: Any) -> Callable[[Shape], Step]:
    """Make a step out of a recurrent layer: all outputs and the final state."""

    def step(shape: Shape) -> Step:
        def function(x: Tensor, f: Module) -> Tensor:
            out, final = f(x)
            final = final[0] if isinstance(final, tuple) else final
            return out + final[-1].unsqueeze(1).repeat(1, 1, out.shape[2] // 2)

        return Step(function, cls(shape[-1], 2, batch_first=True, **options))

    return step


def attention(shape: Shape) -> Step:
    """Attend within the sequence, by PyTorch's module."""
    d = shape[-1]
    layer = nn.MultiheadAttention(d, 1, batch_first=True)
    return Step(lambda x, f: f(x, x, x)[0], layer)


def handwritten_attention(shape: Shape) -> Step:
    """Attend within the sequence, by hand."""
    d = shape[-1]

    def function(x: Tensor, qkv: Module, out: Module) -> Tensor:
        q, k, v = qkv(x).chunk(3, dim=-1)
        return out(torch.softmax(q @ k.mT / d**0.5, dim=-1) @ v)

    return Step(function, nn.Linear(d, 3 * d), nn.Linear(d, d))


def mix(shape: Shape) -> Step:
    """Apply a linear layer to the positions."""
    t = shape[0]
    return Step(lambda x, f: x + f(x.transpose(1, 2)).transpose(1, 2), nn.Linear(t, t))


def conv_1d(shape: Shape) -> Step:
    """Convolve along the positions."""
    layer = nn.Conv1d(shape[-1], 2, 3, padding=1, padding_mode="circular")
    return Step(lambda x, f: f(x.mT).mT, layer) if shape[0] > 1 else None


def convolution(cls: type, *args: Any, **options: Any) -> Callable[[Shape], Step]:
    """Make a step out of a (transposed) convolution of images."""

    def step(shape: Shape) -> Step:
        groups = options.get("groups", 1)
        channels = 2 * groups
        if shape[0] % groups or min(shape[1:]) < 3 or max(shape[1:]) > 8:
            return None
        return Step(lambda x, f: f(x), cls(shape[0], channels, *args, **options))

    return step


def convolution_twice(shape: Shape) -> Step:
    """Call the same convolution twice, with an activation in place between."""
    layer = nn.Conv2d(shape[0], shape[0], 3, padding=1)
    return Step(lambda x, f: f(F.elu(f(x), inplace=True)), layer)


def residual_block(shape: Shape) -> Step:
    """Add a convolution to its input in place, activate in place."""

    def function(x: Tensor, f: Module, act: Module) -> Tensor:
        out = f(act(x.clone()))
        out += x
        return act(out)

    layer = nn.Conv2d(shape[0], shape[0], 3, padding=1, bias=False)
    return Step(function, layer, nn.ReLU(inplace=True))


def dense_block(shape: Shape) -> Step:
    """Concatenate features."""
    layer = nn.Conv2d(shape[0], 1, 1)
    return Step(lambda x, f: torch.cat([x, f(x)], 1), layer) if shape[0] < 5 else None


def channel_norm(make: Callable[[int], Module]) -> Callable[[Shape], Step]:
    """Make a step out of a normalization of images."""

    def step(shape: Shape) -> Step:
        return normalization(make(shape[0])) if min(shape[1:]) > 1 else None

    return step


def pool(make: Callable[[], Module]) -> Callable[[Shape], Step]:
    """Make a step out of a pooling."""
    return lambda shape: Step(lambda x, f: f(x), make()) if min(shape[1:]) > 3 else None


ACTIVATIONS = {
    "tanh": activation(lambda: torch.tanh),
    "relu-in-place": activation(lambda: nn.ReLU(inplace=True)),
    "functional-leaky-in-place": activation(lambda: lambda x: F.leaky_relu_(x, 0.2)),
    "gelu": activation(nn.GELU),
    "softplus": activation(lambda: nn.Softplus()),
    "in-place-arithmetic": activation(lambda: lambda x: x.add_(0.5).sigmoid_()),
    "dropout": activation(nn.Dropout),
}
LAST_AXIS = {
    "linear": linear,
    "linear-no-bias": lambda shape: linear(shape, bias=False),
    "linear-twice": linear_twice,
    "linear-tied": linear_tied,
    "residual": residual,
    "residual-in-place": residual_in_place,
    "branches": branches,
    "gate": gate,
    "bare": bare,
    "weight-norm": normed,
    "layer-norm": layer_norm,
    "rms-norm": rms_norm,
    "prelu": prelu,
    **ACTIVATIONS,
}
STEPS: Dict[str, Dict[str, Callable[[Shape], Step]]] = {
    "vector": {**LAST_AXIS, "bilinear": bilinear, "batch-norm": batch_norm_1d},
    "sequence": {
        **LAST_AXIS,
        "rnn": recurrent(nn.RNN),
        "lstm": recurrent(nn.LSTM),
        "gru-bidirectional": recurrent(nn.GRU, bidirectional=True),
        "attention": attention,
        "handwritten-attention": handwritten_attention,
        "mix": mix,
        "conv": conv_1d,
    },
    "image": {
        "conv": convolution(nn.Conv2d, 3, padding=1),
        "conv-stride": convolution(nn.Conv2d, 2, stride=2, bias=False),
        "conv-groups": convolution(nn.Conv2d, 3, padding="same", groups=2),
        "conv-reflect": convolution(
            nn.Conv2d, 3, padding=1, dilation=1, padding_mode="reflect"
        ),
        "conv-transpose": convolution(
            nn.ConvTranspose2d, 2, stride=2, output_padding=1
        ),
        "conv-transpose-groups": convolution(nn.ConvTranspose2d, 2, groups=2),
        "conv-twice": convolution_twice,
        "residual": residual_block,
        "dense": dense_block,
        "batch-norm": channel_norm(nn.BatchNorm2d),
        "group-norm": channel_norm(lambda c: nn.GroupNorm(1, c)),
        "instance-norm": channel_norm(lambda c: nn.InstanceNorm2d(c, affine=True)),
        "max-pool": pool(lambda: nn.MaxPool2d(2)),
        "avg-pool": pool(lambda: nn.AvgPool2d(2, ceil_mode=True)),
        "upsample": lambda s: (
            Step(lambda x: F.interpolate(x, scale_factor=2)) if s[1] < 4 else None
        ),
        **ACTIVATIONS,
    },
}
STEPS["tokens"] = STEPS["sequence"]
INPUTS: Dict[str, Shape] = {
    "vector": (3,),
    "sequence": (3, 2),
    "image": (2, 4, 4),
    "tokens": (3,),
}
VOCABULARY = 4


def weighted_cross_entropy(**options: Any) -> Module:
    """Make a cross-entropy loss with class weights."""
    return nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0]).double(), **options)


def class_targets(f: Tensor) -> Tensor:
    """Draw classes; the first one is to be ignored if there are several."""
    y = torch.randint(f.shape[1], (len(f), *f.shape[2:]))
    if y.numel() > 1:
        y.view(-1)[0] = -100
    return y


LOSSES: Dict[str, Tuple[Callable[..., Module], Callable[[Tensor], Tensor]]] = {
    "cross-entropy": (nn.CrossEntropyLoss, class_targets),
    "weighted-cross-entropy": (weighted_cross_entropy, class_targets),
    "smooth-cross-entropy": (
        lambda **o: nn.CrossEntropyLoss(label_smoothing=0.1, **o),
        class_targets,
    ),
    "soft-cross-entropy": (nn.CrossEntropyLoss, lambda f: torch.rand_like(f)),
    "mse": (nn.MSELoss, torch.randn_like),
    "bce": (nn.BCEWithLogitsLoss, torch.rand_like),
    "huber": (lambda **o: nn.HuberLoss(delta=3.0, **o), torch.randn_like),
}


class Spec(NamedTuple):
    """All that has to be known to build a random problem.

    Attributes:
        domain: What the input is.
        steps: Names of steps; those that do not apply to a shape are left out.
        positions: Whether there is a prediction for each position.
        loss: Name of the loss.
        reduction: Its reduction.
        batch_size: Number of samples.
        seed: Seed of data and parameters.
    """

    domain: str
    steps: List[str]
    positions: bool
    loss: str
    reduction: str
    batch_size: int
    seed: int

    def build(self) -> Problem:
        """Build model, loss, and data."""
        torch.manual_seed(self.seed)
        shape = INPUTS[self.domain]
        layers: List[Module] = []
        if self.domain == "tokens":
            x = torch.randint(VOCABULARY, (self.batch_size, *shape))
            layers.append(
                nn.Embedding(VOCABULARY, 3, padding_idx=self.seed % 3 or None)
            )
        else:
            x = torch.randn(self.batch_size, *shape).double()
        for name in self.steps:
            layers.append(STEPS[self.domain][name](self._shape(layers, x)))
            if layers[-1] is None:
                layers.pop()
        layers.extend(self._head(self._shape(layers, x)))
        model = randomize(nn.Sequential(*layers).double()).eval()
        loss, target = LOSSES[self.loss]
        f = model(x).detach()
        return Problem(model, loss(reduction=self.reduction), (x,), (target(f),))

    def _shape(self, layers: List[Module], x: Tensor) -> Shape:
        with torch.no_grad():
            model = nn.Sequential(*layers).double().eval()
            return tuple(model(x).shape[1:])

    def _head(self, shape: Shape) -> List[Module]:
        """Make the last layers: three classes, for each position or in total."""
        if self.positions and self.domain == "image":
            return [nn.Conv2d(shape[0], 3, 1)]
        if self.positions and len(shape) == 2:
            layer = nn.Linear(shape[-1], 3)
            return [Step(lambda x, f: f(x).transpose(1, 2), layer)]
        return [nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 3)]


def specs(domain: str) -> st.SearchStrategy:
    """Return a strategy that draws problems with a certain input."""
    return st.builds(
        Spec,
        domain=st.just(domain),
        steps=st.lists(st.sampled_from(sorted(STEPS[domain])), min_size=1, max_size=5),
        positions=st.booleans(),
        loss=st.sampled_from(sorted(LOSSES)),
        reduction=st.sampled_from(["mean", "sum"]),
        batch_size=st.integers(1, 3),
        seed=st.integers(0, 2**16),
    )


def assert_right(name: str, actual: Dict, expected: Dict) -> None:
    """Assert that a quantity is right for every parameter.

    A parameter that plays no part, like the bias in front of a normalization, has
    rounding errors for gradients. They are 12 orders below those of other parameters.

    Args:
        name: Name of the quantity.
        actual: What the library computes, by parameter.
        expected: What is right, by parameter.
    """
    assert actual.keys() == expected.keys()
    convert = QUANTITIES[name].convert
    pairs = {n: convert(value, expected[n]) for n, value in actual.items()}
    noise = 1e-12 if name in LINEAR else 1e-24
    noise *= max(size(right) for _, right in pairs.values())
    for n, (value, right) in pairs.items():
        if max(size(value), size(right)) <= noise:
            if isinstance(right, Tensor):
                continue
            value, right = value[1:], right[1:]  # inputs are what they are
        oracle.assert_agrees(value, right, f"{name} of {n}")


def size(value: Any) -> float:
    """Return the largest entry of a quantity; of its first Kronecker factor."""
    return float((value if isinstance(value, Tensor) else value[0]).abs().max())


def defined_factors(model: Module, has_positions: bool) -> bool:
    """Tell whether the definition of Kronecker factors covers all layers.

    What is added at all positions has the factor of a linear layer's bias, which the
    reference does not know of a bare parameter.
    """
    others = (nn.RNNBase, nn.MultiheadAttention, nn.Embedding)
    return not any(
        isinstance(m, others)
        or is_parametrized(m)
        or (has_positions and isinstance(m, Step) and m._parameters)
        for m in model.modules()
    )


def check(spec: Spec) -> None:
    """Compare all quantities of a random problem."""
    model, loss, X, y = spec.build()
    names = DENSE
    if defined_factors(model, spec.domain != "vector"):
        names = DENSE + EXPAND + REDUCE
        if any(isinstance(m, nn.ConvTranspose2d) for m in model.modules()):
            # its rows are those of a transposed weight
            names = [name for name in names if not name.startswith("EKFAC")]
    ref = Reference(*spec.build())
    if is_saturated(ref):
        return
    for some in PASSES:
        picked, gradient = [q for q in some if q in names], some is not BY_THEMSELVES
        results = compute(*spec.build(), picked, gradient=gradient)
        for name, (actual, drawn) in results.items():
            assert_right(name, actual, QUANTITIES[name].expected(ref, drawn))


def is_saturated(ref: Reference) -> bool:
    """Tell whether the loss Hessian is too small for the reference to know its digits.

    Autograd computes its entries as differences of numbers around one, and so with an
    error of about 1e-16, whatever their size.
    """
    largest = float(oracle.loss_hessians(*ref.problem).abs().max())
    return 0 < largest < 1e-7


FAILED_ONCE = [
    # an in-place operation on an output that is a view
    Spec("sequence", ["residual-in-place"], False, "bce", "mean", 1, 0),
    Spec("tokens", ["residual-in-place"], False, "bce", "mean", 1, 0),
    # the number of targets that are not ignored, in single precision
    Spec("image", ["avg-pool"], True, "cross-entropy", "mean", 1, 0),
]


def options(count: int) -> settings:
    """Return how many problems are drawn, and how."""
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    return settings(
        max_examples=count,
        derandomize=not LONG,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("domain", STEPS)
def test_random_models(domain: str, record_property: Callable) -> None:
    """All quantities of random models agree with plain autograd."""
    count = max(1, COUNT // len(STEPS))

    @options(count)
    @given(spec=specs(domain))
    def run(spec: Spec) -> None:
        check(spec)

    for spec in FAILED_ONCE:
        if spec.domain == domain:
            run = example(spec=spec)(run)
    if LONG:
        record_property(f"random models, {domain}", f"{count} draws, seed {SEED}")
        run = with_seed(SEED)(run)
    run()
