"""Models, losses and data that quantities are tested on: a row per case.

A row holds thunks, so that nothing is built before it is needed, and a case builds the
same numbers every time. The tensors are small and in float64.
"""

import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from oracle import ByShape, projections
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.utils import parametrizations

from backpack import extensions
from backpack.extensions.backprop_extension import BackpropExtension

Tensors = Tuple[Tensor, ...]

F64 = torch.float64
N = 3
FIRST_ORDER = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "BatchDotGrad"]
FIRST_ORDER += ["WeightedGrad"]


def inverse(norms: Tensor) -> Tensor:
    """Return weights that make all gradients nearly unit: ``oracle.by_norms``."""
    return 1 / (0.1 + norms)


# Arguments of extensions, where there is no default
ARGUMENTS: Dict[str, Dict[str, Any]] = {
    "BatchProjectGrad": {"projection": ByShape(projections)},
    "ClippedGrad": {"max_norm": 0.3},
    "WeightedGrad": {"weights": inverse},
}


def make_extension(name: str) -> BackpropExtension:
    """Create an extension.

    Args:
        name: Name of its class.

    Returns:
        The extension.
    """
    return getattr(extensions, name)(**ARGUMENTS.get(name, {}))


class Problem(NamedTuple):
    """A case's model, loss and data."""

    model: Module
    loss: Module
    X: Tensors
    y: Tensors


class Case(NamedTuple):
    """A row.

    Attributes:
        id: Name of the case.
        model: Builds the model.
        X: Builds the model's inputs.
        loss: Builds the loss module.
        y: Builds the loss's inputs after the prediction, given the prediction.
        ambiguous: Whether Kronecker factors are refused unless ``weight_sharing`` is
            chosen, because positions share a weight or there are groups.
    """

    id: str
    model: Callable[[], Module]
    X: Callable[[], Tensors]
    loss: Callable[[], Module]
    y: Callable[[Tensor], Tensors]
    ambiguous: bool = False

    def build(self) -> Problem:
        """Build the case; the same numbers every time.

        Returns:
            Model, loss and data.
        """
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated ways to normalize a weight
            torch.manual_seed(0)
            X = self.X()
            model = randomize(self.model().to(F64))
            with torch.no_grad():
                prediction = model(*X)
            loss = self.loss().to(F64)
            return Problem(model, loss, X, self.y(prediction))


def randomize(model: Module) -> Module:
    """Move parameters and running statistics away from zero and one.

    Args:
        model: The model.

    Returns:
        The same model.
    """
    with torch.no_grad():
        for param in model.parameters():
            param += 0.2 * torch.randn_like(param)
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    return model


def randn(*shape: int) -> Callable[[], Tensors]:
    """Make a thunk for a single normal input.

    Args:
        shape: Its shape.

    Returns:
        The thunk.
    """
    return lambda: (torch.randn(shape, dtype=F64),)


def drawing(seed: int) -> torch.Generator:
    """Make a generator of random numbers, on the device where tensors are created.

    Args:
        seed: What it begins with.

    Returns:
        The generator.
    """
    device = torch.empty(()).device  # torch 2.5 does not tell after it was set to none
    return torch.Generator(device).manual_seed(seed)


def tensors(*values: Any) -> Callable[[], Tensors]:
    """Make a thunk for inputs that are given.

    Args:
        values: The inputs, as nested lists.

    Returns:
        The thunk.
    """
    return lambda: tuple(torch.tensor(value) for value in values)


def classes(prediction: Tensor) -> Tensors:
    """Draw a class for each term.

    Args:
        prediction: Prediction ``[N, C, *]``.

    Returns:
        Classes ``[N, *]``.
    """
    shape = (prediction.shape[0], *prediction.shape[2:])
    return (torch.randint(prediction.shape[1], shape),)


def like(prediction: Tensor) -> Tensors:
    """Draw a real number for each entry of the prediction.

    Args:
        prediction: Prediction ``[N, *]``.

    Returns:
        Numbers ``[N, *]``.
    """
    return (torch.randn_like(prediction),)


class Through(Module):
    """Calls a module in a given way."""

    def __init__(self, module: Module, function: Callable[..., Tensor]):
        """Store module and way.

        Args:
            module: The module.
            function: Gets the module and the inputs, returns the output.
        """
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *X: Tensor) -> Tensor:
        """Call the module.

        Args:
            X: Inputs.

        Returns:
            The output.
        """
        return self.function(self.module, *X)


class Head(Module):
    """Puts a small classifier behind a layer, whatever the layer returns."""

    def __init__(self, layer: Module, X: Tensors, num_classes: int = 3):
        """Build the classifier.

        Args:
            layer: The layer.
            X: Inputs, to see how many features it returns.
            num_classes: Number of classes. Default: 3.
        """
        super().__init__()
        self.layer = layer.to(F64)
        self.tanh = nn.Tanh()
        self.flatten = nn.Flatten()
        with torch.no_grad():
            features = self.layer(*X)[0].numel()
        self.linear = nn.Linear(features, num_classes)

    def forward(self, *X: Tensor) -> Tensor:
        """Classify.

        Args:
            X: Inputs.

        Returns:
            Prediction ``[N, C]``.
        """
        return self.linear(self.flatten(self.tanh(self.layer(*X))))


class Temperature(Module):
    """Divides by a parameter without axes, and shifts by another."""

    def __init__(self):
        """Create both."""
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return (x / self.temperature).exp() + self.shift


class ScaleAndShift(Module):
    """A module with bare parameters."""

    def __init__(self, features: int):
        """Create the parameters.

        Args:
            features: Number of features.
        """
        super().__init__()
        self.scale = Parameter(torch.ones(features))
        self.shift = Parameter(torch.zeros(1, features))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift.

        Args:
            x: Input.

        Returns:
            Output of the same shape.
        """
        return self.scale.exp() * x + self.shift


class ClassToken(Module):
    """A module with a bare parameter and a module inside."""

    def __init__(self, features: int):
        """Create parameter and module.

        Args:
            features: Number of features.
        """
        super().__init__()
        self.token = Parameter(torch.zeros(1, 1, features))
        self.inner = nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Put the token in front, and apply the module inside.

        Args:
            x: Input ``[N, T, features]``.

        Returns:
            Output ``[N, T + 1, 2]``.
        """
        token = self.token.expand(len(x), -1, -1)
        return self.inner(torch.cat([token, x], dim=1).sin())


class PlainSubclass(nn.Linear):
    """A linear layer by another name."""


class ScaledLinear(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer with a weight of unit norm.

        Args:
            x: Input ``[N, *, in_features]``.

        Returns:
            Output ``[N, *, out_features]``.
        """
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


class LogCosh(Module):
    """A user's own convex loss of independent features."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            prediction: Prediction.
            target: Target of the same shape.

        Returns:
            Scalar.
        """
        return (prediction - target).cosh().log().mean()


class SoftMaximum(Module):
    """A user's own convex loss that couples features."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            prediction: Prediction ``[N, C]``.
            target: Target ``[N, C]``.

        Returns:
            Scalar.
        """
        return ((prediction - target) ** 2).logsumexp(1).sum()


class OwnSlope(Module):
    """A user's own convex loss, the slope of a function that it differentiates."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            prediction: Prediction.
            target: Target of the same shape.

        Returns:
            Scalar.
        """
        x = prediction.clone()
        (slope,) = torch.autograd.grad((x**2).sum(), x, create_graph=True)
        return (slope - target).square().mean()


def layer_case(
    id: str, layer: Callable[[], Module], X: Callable, ambiguous: bool = False
) -> Case:
    """Make a row for a layer, with a classifier behind it.

    Args:
        id: Name of the case.
        layer: Builds the layer.
        X: Builds its inputs.
        ambiguous: See :class:`Case`.

    Returns:
        The row.
    """

    def model() -> Module:
        return Head(layer(), X())

    return Case(id, model, X, nn.CrossEntropyLoss, classes, ambiguous)


def loss_case(
    id: str,
    loss: Callable[[], Module],
    y: Callable[[Tensor], Tensors],
    out: Tuple[int, ...] = (3,),
    last: Optional[Callable[[], Module]] = None,
    batch_size: int = N,
) -> Case:
    """Make a row for a loss, behind a small network.

    Args:
        id: Name of the case.
        loss: Builds the loss module.
        y: Builds its inputs after the prediction.
        out: Shape of the prediction without batch axis.
        last: Builds a module to put between network and loss. Default: none.
        batch_size: N.

    Returns:
        The row.
    """

    def model() -> Module:
        modules: List[Module] = [nn.Linear(4, 3), nn.Sigmoid()]
        modules.append(nn.Linear(3, torch.Size(out).numel()))
        if len(out) != 1:
            modules.append(Through(nn.Identity(), lambda _, x: x.reshape(-1, *out)))
        if last is not None:
            modules.append(last())
        return nn.Sequential(*modules)

    return Case(id, model, randn(batch_size, 4), loss, y)


def both(name: str, loss: Callable[..., Module], *args: Any, **options: Any) -> List:
    """Make rows for a loss with both reductions.

    Args:
        name: Name of the case.
        loss: The loss's class.
        args: Further arguments of :func:`loss_case`.
        options: The same, by name; ``loss_options`` go to the loss.

    Returns:
        Two rows.
    """
    loss_options = options.pop("loss_options", dict)
    return [
        loss_case(
            f"{name}-{reduction}",
            lambda r=reduction: loss(reduction=r, **loss_options()),
            *args,
            **options,
        )
        for reduction in options.pop("reductions", ("mean", "sum"))
    ]


def weighted(*values: float) -> Callable[[], dict]:
    """Make a thunk for the options of a loss with weights.

    Args:
        values: The weights.

    Returns:
        The thunk.
    """
    return lambda: {"weight": torch.tensor(values)}


LINEAR = [
    layer_case("linear", lambda: nn.Linear(4, 3), randn(N, 4)),
    layer_case("linear-no_bias", lambda: nn.Linear(4, 3, bias=False), randn(N, 4)),
    layer_case("linear-3axes", lambda: nn.Linear(4, 2), randn(N, 3, 4), True),
    layer_case("linear-4axes", lambda: nn.Linear(2, 3), randn(N, 2, 2, 2), True),
    layer_case("linear-1sample", lambda: nn.Linear(4, 3), randn(1, 4)),
    layer_case("linear-subclass", lambda: PlainSubclass(4, 3), randn(N, 4)),
    layer_case("linear-own_forward", lambda: ScaledLinear(4, 3), randn(N, 4)),
]

CONV = [
    layer_case("conv1d", lambda: nn.Conv1d(2, 3, 2), randn(N, 2, 5)),
    layer_case("conv2d", lambda: nn.Conv2d(2, 3, 2), randn(N, 2, 3, 4)),
    layer_case("conv3d", lambda: nn.Conv3d(2, 2, 2), randn(N, 2, 3, 2, 3)),
    layer_case(
        "conv2d-no_bias", lambda: nn.Conv2d(2, 2, 2, bias=False), randn(N, 2, 3, 3)
    ),
    layer_case("conv2d-1x1", lambda: nn.Conv2d(3, 2, 1), randn(N, 3, 2, 2)),
    layer_case(
        "conv2d-1x1-stride", lambda: nn.Conv2d(3, 2, 1, stride=2), randn(N, 3, 3, 3)
    ),
    layer_case("conv2d-1position", lambda: nn.Conv2d(2, 3, 2), randn(N, 2, 2, 2)),
    layer_case("conv1d-stride", lambda: nn.Conv1d(2, 2, 3, stride=2), randn(N, 2, 8)),
    layer_case(
        "conv2d-options",
        lambda: nn.Conv2d(2, 2, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(2, 1)),
        randn(N, 2, 5, 4),
    ),
    layer_case(
        "conv3d-options",
        lambda: nn.Conv3d(1, 2, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 1)),
        randn(N, 1, 2, 3, 2),
    ),
    layer_case(
        "conv1d-groups",
        lambda: nn.Conv1d(4, 6, 2, groups=2, dilation=2),
        randn(N, 4, 5),
        True,
    ),
    layer_case(
        "conv2d-groups",
        lambda: nn.Conv2d(4, 2, 2, groups=2, stride=2, padding=1),
        randn(N, 4, 3, 3),
        True,
    ),
    layer_case(
        "conv3d-groups",
        lambda: nn.Conv3d(2, 4, 2, groups=2),
        randn(N, 2, 2, 2, 3),
        True,
    ),
    layer_case(
        "conv1d-depthwise", lambda: nn.Conv1d(3, 3, 2, groups=3), randn(N, 3, 4), True
    ),
    layer_case(
        "conv2d-depthwise",
        lambda: nn.Conv2d(2, 4, 2, groups=2, padding_mode="circular", padding=1),
        randn(N, 2, 2, 2),
        True,
    ),
    layer_case(
        "conv1d-same", lambda: nn.Conv1d(2, 2, 4, padding="same"), randn(N, 2, 5)
    ),
    layer_case(
        "conv2d-same",
        lambda: nn.Conv2d(2, 2, (2, 3), padding="same", dilation=(1, 2)),
        randn(N, 2, 3, 3),
    ),
    layer_case(
        "conv2d-valid", lambda: nn.Conv2d(2, 2, 2, padding="valid"), randn(N, 2, 3, 3)
    ),
    layer_case(
        "conv2d-same-reflect",
        lambda: nn.Conv2d(2, 2, (2, 3), padding="same", padding_mode="reflect"),
        randn(N, 2, 3, 3),
    ),
    *[
        layer_case(
            f"conv{d}d-{mode}",
            lambda d=d, mode=mode: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1](
                2, 2, 2, padding=1, stride=2, padding_mode=mode
            ),
            randn(N, 2, *[3] * d),
        )
        for d in (1, 2, 3)
        for mode in ("circular", "reflect", "replicate")
        if not (d == 3 and mode == "replicate")
    ],
    layer_case(
        "conv3d-replicate",
        lambda: nn.Conv3d(1, 2, 2, padding=(1, 0, 1), padding_mode="replicate"),
        randn(N, 1, 2, 2, 2),
    ),
]

CONV_TRANSPOSE = [
    layer_case("conv_transpose1d", lambda: nn.ConvTranspose1d(2, 3, 2), randn(N, 2, 3)),
    layer_case(
        "conv_transpose2d", lambda: nn.ConvTranspose2d(2, 3, 2), randn(N, 2, 2, 2)
    ),
    layer_case(
        "conv_transpose3d", lambda: nn.ConvTranspose3d(2, 1, 2), randn(N, 2, 2, 1, 2)
    ),
    layer_case(
        "conv_transpose1d-options",
        lambda: nn.ConvTranspose1d(
            2, 2, 3, stride=2, padding=1, output_padding=1, dilation=2
        ),
        randn(N, 2, 3),
    ),
    layer_case(
        "conv_transpose2d-options",
        lambda: nn.ConvTranspose2d(
            2, 2, (2, 1), stride=(1, 3), padding=(1, 0), output_padding=(0, 2)
        ),
        randn(N, 2, 3, 2),
    ),
    layer_case(
        "conv_transpose1d-groups",
        lambda: nn.ConvTranspose1d(4, 6, 2, groups=2, stride=2),
        randn(N, 4, 2),
        True,
    ),
    layer_case(
        "conv_transpose2d-groups",
        lambda: nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2, bias=False),
        randn(N, 4, 2, 2),
        True,
    ),
    layer_case(
        "conv_transpose3d-groups",
        lambda: nn.ConvTranspose3d(2, 2, (1, 2, 1), groups=2),
        randn(N, 2, 2, 2, 1),
        True,
    ),
    layer_case(
        "conv_transpose1d-output_size",
        lambda: Through(
            nn.ConvTranspose1d(2, 2, 2, stride=3),
            lambda layer, x: layer(x, output_size=[7]),
        ),
        randn(N, 2, 2),
    ),
    layer_case(
        "conv_transpose2d-output_size",
        lambda: Through(
            nn.ConvTranspose2d(2, 2, 2, stride=2, padding=1),
            lambda layer, x: layer(x, [2, 3]),
        ),
        randn(N, 2, 2, 2),
    ),
]


def _instance_norm(d: int, **options: Any) -> Callable[[], Module]:
    cls = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[d - 1]
    return lambda: cls(2, affine=True, **options)


def _batch_norm(d: int, **options: Any) -> Callable[[], Module]:
    cls = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[d - 1]
    return lambda: cls(2, **options).eval()


NORMALIZATION = [
    layer_case("batch_norm1d", _batch_norm(1), randn(N, 2)),
    layer_case("batch_norm1d-3axes", _batch_norm(1), randn(N, 2, 3)),
    layer_case("batch_norm2d", _batch_norm(2), randn(N, 2, 2, 3)),
    layer_case("batch_norm3d", _batch_norm(3), randn(N, 2, 2, 1, 2)),
    layer_case("batch_norm1d-plain", _batch_norm(1, affine=False), randn(N, 2)),
    layer_case("batch_norm2d-plain", _batch_norm(2, affine=False), randn(N, 2, 2, 2)),
    layer_case("layer_norm", lambda: nn.LayerNorm(4), randn(N, 4)),
    layer_case("layer_norm-3axes", lambda: nn.LayerNorm(4), randn(N, 2, 4)),
    layer_case("layer_norm-2shape", lambda: nn.LayerNorm((3, 2)), randn(N, 2, 3, 2)),
    layer_case("layer_norm-no_bias", lambda: nn.LayerNorm(4, bias=False), randn(N, 4)),
    layer_case(
        "layer_norm-plain",
        lambda: nn.LayerNorm(4, elementwise_affine=False),
        randn(N, 4),
    ),
    layer_case("rms_norm", lambda: nn.RMSNorm(4), randn(N, 4)),
    layer_case("rms_norm-2shape", lambda: nn.RMSNorm((3, 2), 0.1), randn(N, 2, 3, 2)),
    layer_case("group_norm", lambda: nn.GroupNorm(2, 4), randn(N, 4, 2, 2)),
    layer_case("group_norm-2axes", lambda: nn.GroupNorm(2, 4), randn(N, 4)),
    *[
        layer_case(f"instance_norm{d}d", _instance_norm(d), randn(N, 2, *[2] * d))
        for d in (1, 2, 3)
    ],
    *[
        layer_case(
            f"instance_norm{d}d-running_stats",
            lambda d=d: _instance_norm(d, track_running_stats=True)().eval(),
            randn(N, 2, *[2] * d),
        )
        for d in (1, 2)
    ],
]

EMBEDDING = [
    layer_case("embedding", lambda: nn.Embedding(4, 3), tensors([2, 0, 2])),
    layer_case(
        "embedding-positions",
        lambda: nn.Embedding(5, 2),
        tensors([[0, 3, 3], [3, 1, 0], [4, 4, 4]]),
        True,
    ),
    layer_case(
        "embedding-padding_idx",
        lambda: nn.Embedding(5, 2, padding_idx=1),
        tensors([[0, 1, 3], [3, 1, 1], [4, 2, 4]]),
        True,
    ),
    layer_case(
        "embedding-padding_idx-1position",
        lambda: nn.Embedding(4, 2, padding_idx=1),
        tensors([0, 1, 3]),
    ),
    layer_case(
        "embedding-4axes",
        lambda: nn.Embedding(3, 2),
        tensors([[[0, 1], [1, 1]], [[2, 2], [0, 2]]]),
        True,
    ),
    *[
        layer_case(
            f"embedding_bag-{mode}",
            lambda mode=mode: nn.EmbeddingBag(5, 2, mode=mode),
            tensors([[0, 3, 3], [3, 1, 0], [4, 4, 4]]),
        )
        for mode in ("mean", "sum")
    ],
]


def _recurrent(cls: Callable[..., Module], *args: Any, **options: Any) -> Callable:
    return lambda: Through(
        cls(*args, batch_first=True, **options), lambda layer, x: layer(x)[0]
    )


RECURRENT = [
    layer_case("rnn", _recurrent(nn.RNN, 2, 3), randn(N, 3, 2), True),
    layer_case("lstm", _recurrent(nn.LSTM, 2, 2), randn(N, 3, 2), True),
    layer_case("gru", _recurrent(nn.GRU, 2, 2), randn(N, 3, 2), True),
    layer_case(
        "lstm-2layers-bidirectional",
        _recurrent(nn.LSTM, 2, 2, num_layers=2, bidirectional=True),
        randn(N, 2, 2),
        True,
    ),
    layer_case(
        "gru-time_first",
        lambda: Through(
            nn.GRU(2, 2),
            lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1),
        ),
        randn(N, 3, 2),
        True,
    ),
    layer_case(
        "lstm-final_states",
        lambda: Through(
            nn.LSTM(2, 2, batch_first=True),
            lambda layer, x: torch.cat(layer(x)[1], dim=-1)[0],
        ),
        randn(N, 3, 2),
        True,
    ),
]

OTHER_LAYERS = [
    layer_case(
        "bilinear", lambda: nn.Bilinear(2, 3, 2), lambda: randn(N, 2)() + randn(N, 3)()
    ),
    layer_case("prelu", lambda: nn.PReLU(), randn(N, 4)),
    layer_case("prelu-channels", lambda: nn.PReLU(3), randn(N, 3, 2)),
    layer_case(
        "multihead_attention",
        lambda: Through(
            nn.MultiheadAttention(4, 2, batch_first=True),
            lambda layer, x: layer(x, x, x)[0],
        ),
        randn(N, 2, 4),
        True,
    ),
    layer_case(
        "multihead_attention-cross",
        lambda: Through(
            nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True),
            lambda layer, *qkv: layer(
                *[x.transpose(0, 1) for x in qkv], need_weights=False
            )[0].transpose(0, 1),
        ),
        lambda: randn(N, 2, 4)() + randn(N, 3, 3)() + randn(N, 3, 2)(),
        True,
    ),
    layer_case(
        "transformer_encoder_layer",
        lambda: nn.TransformerEncoderLayer(4, 2, 3, batch_first=True).eval(),
        randn(N, 2, 4),
        True,
    ),
    layer_case("bare_parameter", lambda: ScaleAndShift(4), randn(N, 4)),
    layer_case("bare_parameter-scalars", Temperature, randn(N, 4)),
    layer_case(
        "bare_parameter-module_inside", lambda: ClassToken(2), randn(N, 2, 2), True
    ),
    layer_case(
        "weight_norm",
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        randn(N, 4),
    ),
    layer_case(
        "weight_norm-conv",
        lambda: parametrizations.weight_norm(nn.Conv1d(2, 2, 2)),
        randn(N, 2, 3),
    ),
    layer_case(
        "weight_norm-old", lambda: nn.utils.weight_norm(nn.Linear(4, 3)), randn(N, 4)
    ),
    layer_case(
        "spectral_norm",
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(),
        randn(N, 4),
    ),
    layer_case(
        "orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 3)), randn(N, 4)
    ),
]


def _probabilities(prediction: Tensor) -> Tensors:
    return (torch.randn_like(prediction).softmax(1),)


def _any_weights(prediction: Tensor) -> Tensors:
    return (torch.rand_like(prediction),)


def _some_ignored(prediction: Tensor) -> Tensors:
    (target,) = classes(prediction)
    target[0] = -100
    return (target,)


def _all_ignored(prediction: Tensor) -> Tensors:
    return (torch.full_like(classes(prediction)[0], -100),)


def _other_ignored(prediction: Tensor) -> Tensors:
    return (torch.arange(len(prediction)) % prediction.shape[1],)


def _binary(prediction: Tensor) -> Tensors:
    return (torch.rand_like(prediction).round(),)


CROSS_ENTROPY = [
    *both("cross_entropy", nn.CrossEntropyLoss, classes, batch_size=4),
    *both(
        "cross_entropy-weight",
        nn.CrossEntropyLoss,
        classes,
        loss_options=weighted(0.5, 2.0, 1.5),
    ),
    *both("cross_entropy-ignored", nn.CrossEntropyLoss, _some_ignored),
    *both("cross_entropy-all_ignored", nn.CrossEntropyLoss, _all_ignored),
    *both(
        "cross_entropy-ignore_index",
        nn.CrossEntropyLoss,
        _other_ignored,
        loss_options=lambda: {"ignore_index": 1},
    ),
    *both(
        "cross_entropy-smoothing",
        nn.CrossEntropyLoss,
        classes,
        loss_options=lambda: {"label_smoothing": 0.2},
    ),
    *both(
        "cross_entropy-all_options",
        nn.CrossEntropyLoss,
        _some_ignored,
        loss_options=lambda: {**weighted(0.5, 2.0, 1.5)(), "label_smoothing": 0.2},
    ),
    *both("cross_entropy-soft", nn.CrossEntropyLoss, _probabilities),
    *both(
        "cross_entropy-soft-all_options",
        nn.CrossEntropyLoss,
        _any_weights,
        loss_options=lambda: {**weighted(0.5, 2.0, 1.5)(), "label_smoothing": 0.2},
    ),
    *both("cross_entropy-3axes", nn.CrossEntropyLoss, classes, (3, 2)),
    *both("cross_entropy-4axes", nn.CrossEntropyLoss, _some_ignored, (2, 2, 2)),
    *both("cross_entropy-3axes-soft", nn.CrossEntropyLoss, _probabilities, (2, 3)),
    *both("cross_entropy-12classes", nn.CrossEntropyLoss, classes, (12,)),
]

MSE = [
    *both("mse", nn.MSELoss, like),
    *both("mse-1axis", nn.MSELoss, like, ()),
    *both("mse-3axes", nn.MSELoss, like, (2, 2)),
    *both("mse-4axes", nn.MSELoss, like, (2, 1, 2)),
]

BCE = [
    *both("bce-1axis", nn.BCEWithLogitsLoss, _binary, ()),
    *both("bce", nn.BCEWithLogitsLoss, _binary),
    *both("bce-1feature", nn.BCEWithLogitsLoss, _binary, (1,)),
    *both("bce-soft", nn.BCEWithLogitsLoss, _any_weights),
    *both(
        "bce-weight",
        nn.BCEWithLogitsLoss,
        _binary,
        loss_options=weighted(0.5, 2.0, 1.5),
    ),
    *both(
        "bce-pos_weight",
        nn.BCEWithLogitsLoss,
        _any_weights,
        loss_options=lambda: {"pos_weight": torch.tensor([0.5, 2.0, 3.0])},
    ),
    *both(
        "bce-all_options",
        nn.BCEWithLogitsLoss,
        _any_weights,
        (2, 3),
        loss_options=lambda: {
            "weight": torch.rand(N, 2, 1),
            "pos_weight": torch.tensor([0.5, 2.0, 3.0]),
        },
    ),
]


def _with_variance(prediction: Tensor) -> Tensors:
    return torch.randn_like(prediction), torch.rand_like(prediction) + 0.5


def _counts(prediction: Tensor) -> Tensors:
    return (torch.rand_like(prediction).mul(4).round(),)


OTHER_LOSSES = [
    *both("nll", nn.NLLLoss, classes, last=lambda: nn.LogSoftmax(1)),
    *both("smooth_l1", nn.SmoothL1Loss, like),
    *both("huber", nn.HuberLoss, like, loss_options=lambda: {"delta": 0.7}),
    *both("poisson", nn.PoissonNLLLoss, _counts),
    *both("gaussian", nn.GaussianNLLLoss, _with_variance),
    *both(
        "kl_div",
        nn.KLDivLoss,
        _probabilities,
        last=lambda: nn.LogSoftmax(1),
        reductions=("batchmean", "sum"),
    ),
    loss_case("log_cosh", LogCosh, like),
    loss_case("soft_maximum", SoftMaximum, like),
    loss_case("own_slope", OwnSlope, like),
]

LAYER_CASES = [
    *LINEAR,
    *CONV,
    *CONV_TRANSPOSE,
    *NORMALIZATION,
    *EMBEDDING,
    *RECURRENT,
    *OTHER_LAYERS,
]
LOSS_CASES = [*CROSS_ENTROPY, *MSE, *BCE, *OTHER_LOSSES]
CASES = [*LAYER_CASES, *LOSS_CASES]
