"""Models of every structure, passes of every kind: all agree with plain autograd.

A model is any graph that autograd can differentiate. The rows of ``STRUCTURES`` go
through one backward pass each; what a pass, a loss or a copy can be besides has a test
of its own.
"""

import copy
import io
import pickle
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Callable, Dict, List, Optional, Tuple

import pytest
import torch
from cases import (
    F64,
    FIRST_ORDER,
    Case,
    Problem,
    Tensors,
    Through,
    classes,
    like,
    loss_case,
    make_extension,
    randn,
    tensors,
)
from oracle import assert_agrees, jacobian, oracle, parameters
from per_sample import Lambda
from per_sample import param as bare
from torch import Tensor, nn
from torch.func import functional_call
from torch.func import grad as func_grad
from torch.func import vmap
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from backpack import backpack, disable, extend, extensions
from backpack.engine.backward import coverage
from backpack.extensions import BatchGrad, BatchJacobian
from backpack.utils.hooks import EXTENDED

N = 3

# What is computed, what the oracle calls it, and how it is brought into the same form:
# the columns of the GGN's square root are unique up to a rotation only
QUANTITIES: Dict[str, str] = {
    "BatchGrad": "batch_grad",
    "BatchL2Grad": "batch_l2",
    "SumGradSquared": "sum_grad_squared",
    "Variance": "variance",
    "BatchDotGrad": "batch_dot",
    "WeightedGrad": "weighted_sum",
    "DiagGGNExact": "diag_ggn",
    "BatchDiagGGNExact": "diag_ggn_batch",
    "SqrtGGNExact": "batch_ggn",
    "BatchJacobian": "batch_jacobian",
}


def square(columns: Tensor) -> Tensor:
    """Multiply the GGN's square root with itself.

    Args:
        columns: Columns ``[V, N, *p]``.

    Returns:
        Each sample's GGN ``[N, P, P]``.
    """
    flat = columns.flatten(2) if columns.dim() > 2 else columns.unsqueeze(-1)
    return torch.einsum("vnp,vnq->npq", flat, flat)


def make(names: List[str]) -> List[extensions.BatchGrad]:
    """Create extensions.

    Args:
        names: Their names.

    Returns:
        The extensions.
    """
    return [make_extension(name) for name in names]


def fields(model: Module, names: List[str]) -> Dict[str, Dict[str, Tensor]]:
    """Read what a backward pass has saved.

    Args:
        model: The model.
        names: Names of extensions.

    Returns:
        Values by extension and parameter, only those that exist.
    """
    return {
        ext: {
            name: getattr(param, savefield)
            for name, param in model.named_parameters()
            if hasattr(param, savefield)
        }
        for ext, savefield in zip(names, [e.savefield for e in make(names)])
    }


def check(
    model: Module,
    reference: Problem,
    names: Optional[List[str]] = None,
    only: Optional[List[str]] = None,
) -> None:
    """Compare what a backward pass has saved with the oracle.

    Args:
        model: The model.
        reference: The same model, loss and data, not extended.
        names: Names of extensions. Default: all.
        only: Names of the parameters that have values. Default: all.
    """
    names = list(QUANTITIES) if names is None else names
    actual = fields(model, names)
    for name, param in reference.model.named_parameters() if only is not None else ():
        param.requires_grad_(name in only)
    for name in names:
        expected = oracle(QUANTITIES[name], *reference)
        assert set(actual[name]) == set(expected), name
        for param, value in expected.items():
            computed = actual[name][param]
            if name == "SqrtGGNExact":
                computed = square(computed)
            assert_agrees(computed, value, f"{name} of {param}")


# Models


class TwoCalls(Module):
    """A residual block that is used twice, and a layer after a functional ReLU."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3))
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block twice, with skip connections.

        Args:
            x: Input.

        Returns:
            Prediction.
        """
        x = self.first(x)
        x = x + self.block(x)
        x = x + 0.5 * self.block(x.sin())
        return self.last(nn.functional.softplus(x))


class SharedWeights(Module):
    """Two linear layers with the same weight, one of them with a bias of its own."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers one after the other.

        Args:
            x: Input.

        Returns:
            Prediction.
        """
        return self.last(self.b(self.a(x).tanh()))


class TiedEmbedding(Module):
    """A tiny language model, whose head uses the embedding's weight."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the next token.

        Args:
            ids: Tokens ``[N, T]``.

        Returns:
            Logits ``[N, C, T]``.
        """
        x = self.norm(self.embedding(ids)).sin()
        return self.head(x).transpose(1, 2)


class TiedOrientation(Module):
    """An autoencoder whose decoder uses the encoder's weight, transposed."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.down = nn.Conv1d(2, 3, 2)
        self.up = nn.ConvTranspose1d(3, 2, 2)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        """Encode and decode.

        Args:
            x: Input ``[N, 2, T]``.

        Returns:
            Output of the same shape.
        """
        return self.up(self.down(x).tanh())


class SeveralInputs(Module):
    """Two inputs, keyword arguments, and operations that are no modules."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3, bias=False)
        self.mix = nn.Bilinear(3, 3, 4)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Mix the inputs.

        Args:
            x: Input ``[N, 4]``.
            z: Input ``[N, 2]``.

        Returns:
            Prediction.
        """
        x, z = self.left(input=x), self.right(input=z.exp())
        x = self.mix(input2=z, input1=x).reshape(-1, 2, 2)
        weights, _ = self.attention(query=x, value=x.cos(), key=x.sin())
        return self.last(input=torch.cat([weights[:, 0], weights[:, 1] * x[:, 0]], 1))


class OddNames(Module):
    """Attributes and parameters with the names that forward passes store under."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.output = nn.Linear(4, 3)
        self.input0 = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers.

        Args:
            x: Input.

        Returns:
            Prediction.
        """
        return self.last((self.output(x) * self.input0).tanh())


class Lazy(torch.autograd.Function):
    """The identity, which has no gradient rather than one of zeros."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Copy the input."""
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Optional[Tensor]:
        """Pass the gradient on if there is one."""
        return g.clone() if g.any() else None


class LazyBranch(Module):
    """A branch to which some columns have no path."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers.

        Args:
            x: Input.

        Returns:
            Prediction.
        """
        return torch.cat([self.right(x), Lazy.apply(self.left(x))], 1)


class Cut(torch.autograd.Function):
    """The identity, which has no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Copy the input."""
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> None:
        """Pass nothing on."""


class CutBranch(LazyBranch):
    """A branch to which nothing has a path."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers.

        Args:
            x: Input.

        Returns:
            Prediction.
        """
        return torch.cat([self.right(x), Cut.apply(self.left(x))], -1)


class UnusedParts(Module):
    """A layer that is never called, and one whose output plays no part."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)
        self.dead = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Apply one of the layers.

        Args:
            x: Input.

        Returns:
            Prediction.
        """
        self.dead(x)
        return self.used(x)


class TwoOutputs(Module):
    """A layer of which two outputs play a part, at different times."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.first, self.last = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Use the sequence and the final state.

        Args:
            x: Input ``[N, T, 2]``.

        Returns:
            Prediction.
        """
        sequence, (_, cell) = self.lstm(x)
        return self.first(sequence[:, 1]) * self.last(cell[0].tanh())


def in_place() -> Module:
    """Make a model that modifies its activations in place.

    Returns:
        The model.
    """
    return nn.Sequential(
        nn.Conv1d(2, 3, 2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(9, 3),
        Through(nn.Identity(), lambda _, x: x.mul_(2.0).add_(1.0)),
        nn.ELU(inplace=True),
        nn.Linear(3, 3),
        Through(nn.Identity(), lambda _, x: x.clone().clamp_(-1.0, 1.0)),
    )


def frozen() -> Module:
    """Make a model with parameters that require no gradient.

    Returns:
        The model.
    """
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def frozen_trunk() -> Module:
    """Make a model of which only the last layer is trained.

    Returns:
        The model.
    """
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    return model


def structure(
    id: str,
    model: Callable[[], Module],
    X: Callable[[], Tensors],
    y: Callable = classes,
) -> Case:
    """Make a row.

    Args:
        id: Its name.
        model: Builds the model.
        X: Builds its inputs.
        y: Builds the loss's inputs after the prediction. Default: classes.

    Returns:
        The row.
    """
    loss = nn.MSELoss if y is like else nn.CrossEntropyLoss
    return Case(id, model, X, loss, y)


STRUCTURES = [
    structure("two_calls", TwoCalls, randn(N, 4)),
    structure("shared_weights", SharedWeights, randn(N, 3)),
    structure(
        "tied_embedding", TiedEmbedding, tensors([[0, 2, 2], [1, 1, 4], [3, 0, 2]])
    ),
    structure("tied_orientation", TiedOrientation, randn(N, 2, 3), like),
    structure(
        "several_inputs", SeveralInputs, lambda: randn(N, 4)() + randn(N, 2)(), like
    ),
    structure("odd_names", OddNames, randn(N, 4)),
    structure("two_outputs", TwoOutputs, randn(N, 3, 2)),
    structure("lazy_branch", LazyBranch, randn(N, 4), like),
    structure("cut_branch", CutBranch, randn(N, 4), like),
    structure("in_place", in_place, randn(N, 2, 4), like),
    structure("frozen", frozen, randn(N, 4)),
    structure("frozen_trunk", frozen_trunk, randn(N, 4)),
    structure(
        "functional",
        lambda: nn.ModuleDict(
            {
                "a": nn.Conv2d(1, 2, 2),
                "b": nn.Linear(3, 2),
                "c": nn.ModuleList([nn.Linear(8, 3), nn.Linear(3, 2)]),
            }
        ),
        randn(N, 1, 3, 4),
    ),
    structure(
        "transposed",
        lambda: nn.ModuleList([nn.Linear(4, 3), nn.Linear(2, 2)]),
        randn(N, 2, 4),
    ),
]


def forward(id: str, model: Module, *X: Tensor) -> Tensor:
    """Run the forward pass; containers without one get theirs here.

    Args:
        id: Name of the row.
        model: The model.
        X: Its inputs.

    Returns:
        Prediction.
    """
    (x,) = X if len(X) == 1 else (None,)
    if id == "functional":
        x = nn.functional.avg_pool2d(model["a"](x).relu(), (1, 2), 1)
        x = nn.functional.pad(x, (0, 1))
        x = model["b"](x).flatten(1).softmax(1)
        return model["c"][1](model["c"][0](x)[:, [2, 0, 1]])
    if id == "transposed":
        return model[1](model[0](x).transpose(1, 2)).sum(1)
    return model(*X)


class Run(Module):
    """A model with the forward pass of its row."""

    def __init__(self, id: str, model: Module):
        """Store model and name.

        Args:
            id: Name of the row.
            model: The model.
        """
        super().__init__()
        self.id, self.model = id, model

    def forward(self, *X: Tensor) -> Tensor:
        """Run the forward pass.

        Args:
            X: Inputs.

        Returns:
            Prediction.
        """
        return forward(self.id, self.model, *X)


def build(case: Case) -> Problem:
    """Build a row; the same numbers every time.

    Args:
        case: The row.

    Returns:
        Model, loss and data.
    """
    return case._replace(model=lambda: Run(case.id, case.model())).build()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("case", STRUCTURES, ids=lambda case: case.id)
@pytest.mark.parametrize("extended", ["all", "children", "graph"])
def test_structure(case: Case, extended: str):
    """All quantities, whether or not the outermost is extended, and a graph built."""
    model, loss, X, y = build(case)
    extend(loss)
    for module in model.model.children() if extended == "children" else [model]:
        extend(module)
    reached = None
    if case.id == "odd_names" and extended == "children":
        reached = [n for n in parameters(model) if not n.endswith("input0")]
    # the output of a child is another than that of the model
    names = [n for n in QUANTITIES if extended != "children" or n != "BatchJacobian"]
    with backpack(*make(names)):
        loss(model(*X), *y).backward(create_graph=extended == "graph")
    check(model, build(case), names, only=reached)
    model.zero_grad()  # whose graph owns the model's parameters


def test_unused_parts():
    """Parameters that play no part get no value, and a warning says so."""
    case = structure("unused", UnusedParts, randn(N, 4))
    model, loss, X, y = build(case)
    model, loss = extend(model), extend(loss)
    with pytest.warns(UserWarning, match="unused.weight"):
        with backpack(*make(list(QUANTITIES))):
            loss(model(*X), *y).backward()
    check(model, build(case), only=["model.used.weight", "model.used.bias"])


MLP = loss_case("mlp", nn.CrossEntropyLoss, classes)
ONE_LAYER = ["2.weight", "2.bias"]


def test_only_last_layer_extended():
    """Layers that are not extended do not matter."""
    model, loss, X, y = MLP.build()
    extend(model[2])
    extend(loss)
    with backpack(*make(list(QUANTITIES))):
        loss(model(*X), *y).backward()
    check(model, MLP.build(), only=ONE_LAYER)


@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.HuberLoss])
def test_prediction_without_axes(loss: Callable[[], Module]):
    """The prediction for a batch of one may be a number."""
    torch.manual_seed(0)
    x, y = torch.rand(1, 5, dtype=F64), torch.rand(1, 1, dtype=F64)
    problem = Problem(nn.Linear(5, 1, dtype=F64), loss(), (x,), (y,))
    model, lossfunc = extend(copy.deepcopy(problem.model)), extend(loss())
    names = [name for name in QUANTITIES if name != "BatchJacobian"]
    with backpack(*make(names)):
        lossfunc(model(x).squeeze(), y.squeeze()).backward()
    check(model, problem, names)


class Exponential(Module):
    """A module with a parameter that maps a number to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the parameter, which samples share."""
        return (x * self.weight).exp()


@pytest.mark.parametrize("target", [0.0, 9.0])
def test_part_that_maps_a_number_to_a_number(target: float):
    """What maps a batch of one to a number is no loss if another one takes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 1, dtype=F64), nn.Flatten(0), Exponential())
    x, y = torch.rand(1, 5, dtype=F64), torch.full((1,), target, dtype=F64)
    problem = Problem(model, nn.HuberLoss(delta=20.0), (x,), (y,))
    model, lossfunc = copy.deepcopy(model), extend(nn.HuberLoss(delta=20.0))
    names = [name for name in QUANTITIES if name != "BatchJacobian"]
    for part in model:
        extend(part)
    with backpack(*make(names)):
        lossfunc(model(x), y).backward()
    check(model, problem, names)


@pytest.mark.parametrize("enters", [[0, 2], [1]], ids=str)
def test_output_that_some_samples_do_not_enter(enters: List[int]):
    """Rows of a prediction are the samples', also of those that have entered none."""

    def forward(m: Module, x: Tensor) -> Tensor:
        own = (x[:, 0] > 0).nonzero()[:, 0]
        rows = m.start.expand(len(x), -1)
        return m.last(rows.index_put((own,), m.first(x[own]).tanh()).sin())

    torch.manual_seed(0)
    parts = {"first": nn.Linear(4, 5), "last": nn.Linear(5, 2), "start": bare(5)}
    x = -torch.rand(N, 4, dtype=F64) - 0.1
    x[enters] *= -1
    model, y = Lambda(forward, **parts).to(F64), torch.rand(N, 2, dtype=F64)
    problem = Problem(model, nn.MSELoss(), (x,), (y,))
    model, lossfunc = extend(copy.deepcopy(model)), extend(nn.MSELoss())
    with backpack(*make(list(QUANTITIES))):
        lossfunc(model(x), y).backward()
    check(model, problem)


@pytest.mark.parametrize("positions, check", [(1, False), (20, False), (1, True)])
def test_branch_without_a_gradient(positions: int, check: bool):
    """Where a function gives no gradient, quantities are zero; there is no gradient."""
    model, loss = extend(CutBranch()), extend(nn.MSELoss())
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), check=check):
        out = model(torch.rand(2, positions, 4))
        loss(out, torch.rand(2, positions, 3)).backward()
    weight = model.left.weight
    assert_agrees(weight.grad_batch, torch.zeros(2, 2, 4))
    assert_agrees(weight.diag_ggn_exact, torch.zeros(2, 4))
    assert weight.grad is None


def test_input_requires_grad():
    """The gradient at the input is what it is without an extension, too."""
    model, loss, (x,), y = MLP.build()
    x.requires_grad_()
    model, loss = extend(model), extend(loss)
    with backpack(*make(list(QUANTITIES))):
        loss(model(x), *y).backward()
    check(model, MLP.build())
    plain_model, plain_loss, (plain_x,), _ = MLP.build()
    plain_x.requires_grad_()
    plain_loss(plain_model(plain_x), *y).backward()
    assert_agrees(x.grad, plain_x.grad, "gradient at the input")


# Backward passes


# PyTorch's warning that parameters and their gradients may form cycles
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("inputs", ["all", "last layer", "weight"])
def test_backward_with_inputs(inputs: str):
    """Only what takes part in the backward pass gets values, and they are right."""
    model, loss, X, y = MLP.build()
    model, loss = extend(model), extend(loss)
    names = {"all": None, "last layer": ONE_LAYER, "weight": ["2.weight"]}[inputs]
    targets = [model.get_parameter(n) for n in names or parameters(model)]
    value = loss(model(*X), *y)
    report = pytest.warns(UserWarning, match="the backward pass did not reach it")
    # norms over all parameters are others than those over some
    quantities = [q for q in QUANTITIES if names is None or q != "WeightedGrad"]
    with nullcontext() if names is None else report:
        with backpack(*make(quantities)):
            value.backward(inputs=targets, retain_graph=True, create_graph=True)
    values = fields(model, quantities)
    for name in names or parameters(model):
        assert all(name in values[quantity] for quantity in quantities)
    reference = MLP.build()
    for quantity in quantities:
        expected = oracle(QUANTITIES[quantity], *reference)
        for name, computed in values[quantity].items():
            computed = computed.detach()
            if quantity == "SqrtGGNExact":
                computed = square(computed)
            assert_agrees(computed, expected[name], f"{quantity} of {name}")
    for target in targets:  # breaks cycles of parameters and their gradients
        target.grad = None


DIFFERENTIABLE = [name for name in QUANTITIES if name != "SqrtGGNExact"]
SMOOTH = [
    MLP,
    loss_case("mse", nn.MSELoss, like),
    structure("two_calls", TwoCalls, randn(N, 4)),
    structure("tied_embedding", TiedEmbedding, tensors([[0, 2], [1, 1], [3, 0]])),
    structure(
        "conv",
        lambda: nn.Sequential(
            nn.Conv1d(2, 2, 2), nn.Tanh(), nn.ConvTranspose1d(2, 1, 2), nn.Flatten()
        ),
        randn(N, 2, 3),
        like,
    ),
    structure("lstm", TwoOutputs, randn(N, 2, 2)),
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("quantity", DIFFERENTIABLE)
@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.id)
def test_second_derivative(case: Case, quantity: str):
    """With ``create_graph=True``, quantities can be differentiated."""
    model, loss, X, y = case.build()
    model, loss = extend(model), extend(loss)
    params = list(model.parameters())
    with backpack(*make([quantity])):
        loss(model(*X), *y).backward(create_graph=True, inputs=params)
    actual = fields(model, [quantity])[quantity]

    plain = case.build()
    expected = oracle(QUANTITIES[quantity], *plain, create_graph=True)
    torch.manual_seed(0)
    weights = {name: torch.randn_like(value) for name, value in expected.items()}

    def differentiate(values: Dict[str, Tensor], wrt: List[Tensor]) -> Tuple:
        total = sum((values[name] * w).sum() for name, w in weights.items())
        return torch.autograd.grad(total, wrt, materialize_grads=True)

    derivatives = differentiate(actual, params)
    references = differentiate(expected, list(plain.model.parameters()))
    for name, derivative, reference in zip(weights, derivatives, references):
        assert_agrees(derivative, reference, f"derivative of {quantity} by {name}")
    assert any(derivative.any() for derivative in derivatives)
    for param in params:
        param.grad = None


def test_detached_without_create_graph():
    """Otherwise they are detached."""
    model, loss, X, y = MLP.build()
    model, loss = extend(model), extend(loss)
    with backpack(*make(list(QUANTITIES))):
        loss(model(*X), *y).backward()
    for values in fields(model, list(QUANTITIES)).values():
        assert not any(value.requires_grad for value in values.values())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_two_forward_passes(order: Tuple[int, int]):
    """Inputs belong to the call, whichever backward pass comes first."""
    model, loss, (x,), (y,) = MLP.build()
    model, loss = extend(model), extend(loss)
    batches = [((x,), (y,)), ((x.flip(1)[:2],), (y.flip(0)[:2],))]
    values = [loss(model(*X), *targets) for X, targets in batches]
    for which in order:
        with backpack(*make(list(QUANTITIES))):
            values[which].backward()
        reference = MLP.build()
        check(model, Problem(reference.model, reference.loss, *batches[which]))


def test_several_passes_in_a_context():
    """Every backward pass overwrites, nothing accumulates."""
    model, loss, (x,), (y,) = MLP.build()
    model, loss = extend(model), extend(loss)
    with backpack(*make(list(QUANTITIES))):
        for shift in (0.0, 1.0, 2.0):
            loss(model(x + shift), y).backward()
            reference = MLP.build()
            check(model, reference._replace(X=(x + shift,)))


def test_retain_graph():
    """A graph that is retained can be gone through again."""
    model, loss, X, y = MLP.build()
    model, loss = extend(model), extend(loss)
    value = loss(model(*X), *y)
    with backpack(*make(list(QUANTITIES)), retain_graph=True):
        value.backward(retain_graph=True)
    check(model, MLP.build())
    for param in model.parameters():
        for ext in make(list(QUANTITIES)):
            delattr(param, ext.savefield)
    with backpack(*make(list(QUANTITIES))):
        value.backward()
    check(model, MLP.build())


def test_autograd_grad():
    """``torch.autograd.grad`` runs extensions like ``backward`` does."""
    model, loss, X, y = MLP.build()
    model, loss = extend(model), extend(loss)
    value = loss(model(*X), *y)
    with backpack(*make(list(QUANTITIES))):
        gradients = torch.autograd.grad(value, list(model.parameters()))
    check(model, MLP.build())
    for param, gradient in zip(model.parameters(), gradients):
        assert param.grad is None
        assert_agrees(param.grad_batch.sum(0), gradient, "gradient")


ENDS = {  # a model's last operation
    "layer": lambda m, x: m.layer(x),
    "shift": lambda m, x: m.layer(x) + m.w,
    "scale": lambda m, x: m.layer(x) * m.w,
    "product": lambda m, x: x @ m.layer.weight.T,
}
BEGIN = {  # a backward pass at the model's output
    "backward": lambda out, ones, params: out.backward(ones),
    "backward-inputs": lambda out, ones, params: out.backward(ones, inputs=params),
    "grad": lambda out, ones, params: torch.autograd.grad(out, params, ones),
}


@pytest.mark.parametrize("begin", BEGIN)
@pytest.mark.parametrize("end", ENDS)
def test_begins_at_a_use(end: str, begin: str):
    """The first operation that a backward pass goes through is a use like others."""
    model = Lambda(ENDS[end], layer=nn.Linear(4, 3), w=bare(3)).to(F64)
    X = torch.randn(4, 4, dtype=F64)
    rows = [jacobian(model(x[None]), list(model.parameters())) for x in X]
    out = extend(model)(X)
    used = {p: i for i, p in enumerate(model.parameters()) if rows[0][i].any()}
    for p in {*model.parameters()} - {*used}:
        p.requires_grad_(False)  # or its missing result would be warned of
    with backpack(BatchGrad(), BatchJacobian()):
        BEGIN[begin](out, torch.ones_like(out), [*used])
    for p, i in used.items():
        right = torch.stack([row[i] for row in rows], 1).reshape(3, 4, *p.shape)
        assert_agrees(p.jacobian, right, "jacobian")
        assert_agrees(p.grad_batch, right.sum(0), "grad_batch")


def test_gradient_is_the_usual_one():
    """The backward pass computes the usual gradient, if only it is asked for columns.

    It does not change by a bit. First-order extensions add up individual gradients.
    """
    model, loss, X, y = MLP.build()
    loss(model(*X), *y).backward()
    plain = [param.grad for param in model.parameters()]
    model, loss, X, y = MLP.build()
    model, loss = extend(model), extend(loss)
    with backpack(*make(list(QUANTITIES)[len(FIRST_ORDER) :])):
        loss(model(*X), *y).backward()
    for param, gradient in zip(model.parameters(), plain):
        assert torch.equal(param.grad, gradient)


# Losses


class Combined(Module):
    """The sum of two losses of (parts of) the same prediction."""

    def __init__(self, first: Module, second: Module, split: bool, factor: float = 1.0):
        """Store the losses.

        Args:
            first: A loss.
            second: Another one.
            split: Whether they see one half of the prediction each.
            factor: Factor of the second loss.
        """
        super().__init__()
        self.first, self.second = first, second
        self.split, self.factor = split, factor

    def forward(self, prediction: Tensor, y1: Tensor, y2: Tensor) -> Tensor:
        """Add up the losses.

        Args:
            prediction: Prediction.
            y1: Target of the first loss.
            y2: Target of the second one.

        Returns:
            Sum of the losses.
        """
        parts = prediction.chunk(2, 1) if self.split else (prediction, prediction)
        return self.first(parts[0], y1) + self.factor * self.second(parts[1], y2)


class TwoHeads(Module):
    """A trunk with two heads, whose predictions are put side by side."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def heads(self, x: Tensor) -> Tensors:
        """Compute both heads.

        Args:
            x: Input.

        Returns:
            Two predictions.
        """
        x = self.trunk(x)
        return self.a(x), self.b(x)

    def forward(self, x: Tensor) -> Tensor:
        """Put the heads side by side.

        Args:
            x: Input.

        Returns:
            Prediction.
        """
        return torch.cat(self.heads(x), dim=1)


LOSSES = {
    "same": lambda: (nn.MSELoss(), nn.MSELoss()),
    "kinds": lambda: (nn.BCEWithLogitsLoss(), nn.MSELoss()),
    "reductions": lambda: (nn.MSELoss(reduction="sum"), nn.BCEWithLogitsLoss()),
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("losses", LOSSES)
def test_two_losses(losses: str, heads: int):
    """Each loss's columns carry their own factor."""
    case = structure("two_heads", TwoHeads, randn(N, 4), like)
    model, _, (x,), _ = case.build()
    size = 2 if heads == 2 else 4
    targets = torch.rand(2, N, size, dtype=F64).unbind()
    combined = Combined(*LOSSES[losses](), split=heads == 2)
    reference = Problem(case.build().model, combined, (x,), targets)

    first, second = (extend(loss) for loss in LOSSES[losses]())
    extend(model)
    predictions = model.heads(x) if heads == 2 else (model(x),) * 2
    value = first(predictions[0], targets[0]) + second(predictions[1], targets[1])
    names = [
        n for n in QUANTITIES if heads == 1 or n != "BatchJacobian"
    ]  # of one output
    with backpack(*make(names)):
        value.backward()
    check(model, reference, names)


@pytest.mark.parametrize("factor", [0.5, 3.0])
@pytest.mark.usefixtures("cpu")
def test_scaled_loss(factor: float):
    """A factor is carried along; second order says so."""
    reference = MLP.build()
    y = reference.y

    class Scaled(Module):
        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            return factor * reference.loss(prediction, target)

    model, loss, X, _ = MLP.build()
    model, loss = extend(model), extend(loss)
    with backpack(*make(FIRST_ORDER)):
        (factor * loss(model(*X), *y)).backward()
    check(model, reference._replace(loss=Scaled()), FIRST_ORDER)
    with pytest.warns(UserWarning, match=f"modified.*{factor}"):
        with backpack(*make(list(QUANTITIES))):
            (factor * loss(model(*X), *y)).backward()
    check(model, reference._replace(loss=Scaled()))


SUMS = (
    {  # of two losses: what is differentiated, how, of how many the factor is unknown
        "one": (lambda a, b: a, {}, 0),
        "sum": (lambda a, b: a + b, {}, 0),
        "sum-of-sums": (lambda a, b: (a + 1.0) + (b + b.detach()), {}, 0),
        "scaled": (lambda a, b: a + 0.5 * b, {}, 1),
        "difference-of-scale": (lambda a, b: torch.add(a, b, alpha=2.0), {}, 2),
        "twice": (lambda a, b: a + a, {}, 1),
        "again-within": (lambda a, b: a + 0.5 * a, {}, 1),
        "again-in-sums": (lambda a, b: (lambda c: c + c)(a + b), {}, 2),
        "times-a-number": (
            lambda a, b: a,
            {"grad_outputs": torch.tensor(2.0, dtype=F64)},
            1,
        ),
    }
)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("row", SUMS)
def test_factors_that_are_not_looked_at(row: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU, no warning follows where the graph says that a loss's factor is one."""
    combine, options, unknown = SUMS[row]
    monkeypatch.setattr(coverage, "may_look", lambda x: False)
    model, loss, X, y = MLP.build()
    model, losses = extend(model), [extend(copy.deepcopy(loss)) for _ in range(2)]
    prediction = model(*X)
    value = combine(*(loss(prediction, *y) for loss in losses))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with backpack(extensions.DiagGGNExact()):
            torch.autograd.grad(value, list(model.parameters()), **options)
    said = [str(x.message) for x in caught]
    assert len(said) == unknown and all("does not begin" in text for text in said)


@pytest.mark.filterwarnings("ignore:.*was modified")
def test_weighted_sum_of_losses():
    """Factors differ between losses, and one of them is one."""
    case = structure("two_heads", TwoHeads, randn(N, 4), like)
    model, _, (x,), _ = case.build()
    targets = torch.rand(2, N, 4, dtype=F64).unbind()
    combined = Combined(nn.MSELoss(), nn.BCEWithLogitsLoss(), False, 0.3)
    first, second = extend(nn.MSELoss()), extend(nn.BCEWithLogitsLoss())
    prediction = extend(model)(x)
    with backpack(*make(list(QUANTITIES))):
        value = first(prediction, targets[0]) + 0.3 * second(prediction, targets[1])
        value.backward()
    check(model, Problem(case.build().model, combined, (x,), targets))


@pytest.mark.usefixtures("cpu")
def test_negative_factor():
    """The GGN of a loss with a negative factor does not exist."""
    model, loss, X, y = MLP.build()
    model, loss = extend(model), extend(loss)
    with (
        pytest.warns(UserWarning, match="modified"),
        pytest.raises(ValueError, match="positive semi-definite"),
    ):
        with backpack(extensions.DiagGGNExact()):
            (-loss(model(*X), *y)).backward()
    with backpack(*make(FIRST_ORDER)):
        (-loss(model(*X), *y)).backward()


# Copies


def through_torch(model: Module) -> Module:
    """Save and load a model.

    Args:
        model: The model.

    Returns:
        What comes back.
    """
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch,
}


@pytest.mark.parametrize("when", ["before", "forward", "backward"])
@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str, when: str):
    """A copy works like the original, which goes on working."""
    model, loss, X, y = MLP.build()
    model[1] = nn.ReLU(inplace=True)  # also in the reference
    reference = MLP.build()
    reference.model[1] = nn.ReLU(inplace=True)
    model, loss = extend(model), extend(loss)
    value = loss(model(*X), *y) if when != "before" else None
    if when == "backward":
        with backpack(*make(list(QUANTITIES))):
            value.backward()
        value = None
    new_model, new_loss = COPIES[how](model), COPIES[how](loss)

    for model_, loss_ in ((new_model, new_loss), (model, loss)):
        if model_ is new_model or value is None:
            value_ = loss_(model_(*X), *y)
        else:
            value_ = value
        with backpack(*make(list(QUANTITIES))):
            value_.backward()
        check(model_, reference)


class Energy(nn.Module):
    """The gradient of a network by its input, whose last bias is not used."""

    def __init__(self) -> None:
        """Make the network."""
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        """Differentiate."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.f(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_extended(how: str, part: bool):
    """What is found through extended models is found in a copy, too, or of a part."""
    energy = extend(nn.Sequential(Energy()))
    model = COPIES[how](energy[0] if part else energy)
    loss, x = extend(nn.MSELoss()), torch.randn(3, 4).double()
    with pytest.warns(UserWarning, match="2.bias"):
        with backpack(*make(["BatchGrad"])):
            loss(model(x), x).backward()
    found = {name: hasattr(p, "grad_batch") for name, p in model.named_parameters()}
    assert [name for name in found if not found[name]] == [[*found][-1]]
    frozen = [*model.parameters()][-2:]
    for p in frozen:
        p.requires_grad_(False)
    with backpack(*make(["BatchGrad"])):
        loss(model(x), x).backward()
    assert not any(hasattr(p, "grad_batch") for p in frozen)


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_containers(how: str):
    """A copy of layers is watched as a whole, also where another one is put in."""
    layers = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)
    model = COPIES[how](extend(nn.Sequential(*layers)))
    model[0] = nn.Linear(4, 4)
    x, loss = torch.randn(3, 4, requires_grad=True), extend(nn.MSELoss())
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with backpack(*make(["BatchGrad"])):
        loss(slope, torch.zeros(3, 4)).backward()
    for p in (model[0].weight, model[2].weight):
        assert_agrees(p.grad_batch.sum(0), p.grad, rtol=1e-4)


# What containers do with x [N, D] around their layers f
AROUND: Dict[str, Callable] = {
    "flipped": lambda f, x: f(x.flip(0)).flip(0),
    "sorted": lambda f, x: f(x[x[:, 0].argsort()])[x[:, 0].argsort().argsort()],
    "twice": lambda f, x: f(torch.cat([x, 2 * x]))[: x.shape[0]],
    "with-an-axis": lambda f, x: f(x.unsqueeze(0)).squeeze(0),
    "in-parts": lambda f, x: torch.cat([f(x[:2]), f(x[2:4]), f(x[4:])]),
    "beside": lambda f, x: f(x) + x[:, :3],
    "as-it-is": lambda f, x: f(x),
}


@pytest.mark.parametrize("on", ["class", "instance", "afterwards", "copied-graph"])
@pytest.mark.parametrize("name", [*AROUND, "mixed"])
def test_containers_with_a_forward_pass_of_their_own(name: str, on: str):
    """They are models, whatever they are derived from."""
    around = AROUND.get(name, lambda f, x: f(x - x.roll(1, 0)))
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)

    class Own(nn.Sequential):
        """Layers, and something around."""

        def forward(self, x: Tensor) -> Tensor:
            """Do something around."""
            return around(super().forward, x)

    model = (Own if on in ("class", "copied-graph") else nn.Sequential)(*layers)
    model = extend(model) if on == "afterwards" else model
    if on in ("instance", "afterwards"):
        model.forward = partial(around, model.forward)
    if on == "copied-graph":  # for which PyTorch forgets hooks
        graph = extend(torch.fx.symbolic_trace(model))
        model = copy.deepcopy(copy.deepcopy(graph))
    elif on != "afterwards":
        extend(model)
    model, loss, x = model.double(), extend(nn.MSELoss()), torch.randn(6, 4).double()
    y, refuses = torch.randn(6, 3).double(), name == "mixed"
    with pytest.raises(NotImplementedError, match="met") if refuses else nullcontext():
        with backpack(*make(["BatchGrad"])):
            loss(model(x), y).backward()
    rows = (model(x) - y).square().sum(1) / y.numel()
    for p in () if refuses else model.parameters():
        each = [torch.autograd.grad(row, p, retain_graph=True)[0] for row in rows]
        assert_agrees(p.grad_batch, torch.stack(each))


# What becomes of a model of three layers after it was extended
CHANGES: Dict[str, Callable[[nn.Sequential], None]] = {
    "replaced": lambda m: m.__setitem__(2, nn.Linear(5, 3)),
    "put-in": lambda m: m.insert(1, nn.Linear(5, 5)),
    "several": lambda m: m.__setitem__(
        2, nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    ),
    "inside": lambda m: m[0].append(nn.Linear(5, 5)),
    "a-copy": lambda m: m.__setitem__(2, copy.deepcopy(m[2])),
    "in-a-copy": lambda m: m.__setitem__(0, copy.deepcopy(m[0]).append(nn.ReLU())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_layers_put_in_afterwards(name: str):
    """They are extended when the model is called: their quantities are a layer's."""
    layers = nn.Sequential(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)
    models = [extend(nn.Sequential(*layers))]
    CHANGES[name](models[0])
    models.append(extend(copy.deepcopy(models[0])))
    x, loss = torch.randn(3, 4), extend(nn.MSELoss())
    names = ["BatchGrad", "KFLR", "DiagHessian", "BatchDiagHessian"]
    for model in models:
        with backpack(*make(names)):
            loss(model(x), torch.ones(3, 3)).backward()
    for p, q in zip(*(model.parameters() for model in models)):
        assert torch.equal(p.grad_batch, q.grad_batch)
        assert torch.equal(p.diag_h_batch, q.diag_h_batch)
        assert [x.shape for x in p.kflr] == [x.shape for x in q.kflr]
        assert all(map(torch.equal, p.kflr, q.kflr)) and len(p.kflr) == p.dim()


def test_derivative_after_a_pass_that_stored_nothing():
    """A module that was called inside of `disable()` is one of the model's again."""
    model, loss, x = extend(Energy()), extend(nn.MSELoss()), torch.randn(3, 4).double()
    with disable():
        model(x)
    with pytest.warns(UserWarning, match="2.bias"):
        with backpack(*make(["BatchGrad"])):
            loss(model(x), x).backward()
    assert hasattr(model.f[2].weight, "grad_batch")


def test_part_of_a_model_that_is_gone():
    """A part that was called as one of a model is extended when that is gone, too."""
    model, loss, x = (
        extend(nn.Sequential(Energy())),
        extend(nn.MSELoss()),
        torch.ones(3, 4),
    )
    part = model[0]
    part(x.double())
    del model
    with pytest.warns(UserWarning, match="2.bias"):
        with backpack(*make(["BatchGrad"])):
            loss(part(x.double()), x.double()).backward()
    assert hasattr(part.f[2].weight, "grad_batch")


@dataclass(unsafe_hash=True)
class ByValue(nn.Module):
    """A model that equals others of the same size."""

    size: int = 4

    def __post_init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.used, self.unused = (nn.Linear(self.size, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Use one of them."""
        return self.used(x)


def test_models_that_are_equal():
    """Extended models are told apart by what they are, not by what they say."""
    models, loss = [extend(ByValue()) for _ in range(2)], extend(nn.MSELoss())
    for model in models:
        x = torch.randn(3, 4)
        with pytest.warns(UserWarning, match="unused.bias"):
            with backpack(*make(["BatchGrad"])):
                loss(model(x), x).backward()


def test_extended_while_models_are_listed():
    """Another thread may extend a model, or call a copy for the first time."""
    kept = [extend(nn.Linear(1, 1)) for _ in range(3)]
    listed = 0
    for _ in EXTENDED:
        listed += 1
        kept.append(extend(nn.Linear(1, 1)))
    assert listed == len(kept) - 3 > 2 and all(module in EXTENDED for module in kept)


# What runs a forward pass in another way


def checkpointed(use_reentrant: bool) -> Tuple[Module, Tensor]:
    """Run segments whose forward pass runs a second time."""
    model, loss, (x,), y = MLP.build()
    model, loss = extend(model), extend(loss)
    x.requires_grad_()
    hidden = checkpoint(model[:2], x, use_reentrant=use_reentrant)
    return model, loss(checkpoint(model[2], hidden, use_reentrant=use_reentrant), *y)


def test_checkpoint():
    """Checkpointed segments, whose forward pass runs a second time."""
    model, value = checkpointed(use_reentrant=False)
    with backpack(*make(list(QUANTITIES))):
        value.backward()
    check(model, MLP.build())


@pytest.mark.parametrize("name", [*FIRST_ORDER, "DiagGGNExact"])
def test_reentrant_checkpoint(name: str):
    """Segments that are hidden from the graph are refused, with the way out."""
    model, value = checkpointed(use_reentrant=True)
    with pytest.raises(NotImplementedError, match="use_reentrant=False"):
        with backpack(*make([name])):
            value.backward()
    assert not any(fields(model, [name])[name])


def test_checkpoint_shares_a_parameter():
    """A call that is repeated in the backward pass, and one that is not."""
    torch.manual_seed(0)
    x, y = torch.rand(N, 3, dtype=F64).requires_grad_(), torch.rand(N, 3, dtype=F64)
    layer, loss = nn.Linear(3, 3).double(), nn.MSELoss()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    expected = oracle("batch_grad", model, loss, (x,), (y,))
    layer, loss = extend(layer), extend(loss)

    again = partial(checkpoint, layer, use_reentrant=False)
    for function in (
        lambda: again(layer(x).tanh()),
        lambda: layer(again(x).tanh()),
        lambda: again(again(x).tanh()),
    ):
        with backpack(extensions.BatchGrad()):
            loss(function(), y).backward()
        assert_agrees(layer.weight.grad_batch, expected["0.weight"], "weight")
        del layer.weight.grad_batch


@pytest.mark.parametrize("names", [[], FIRST_ORDER], ids=["none", "first-order"])
def test_checkpoint_between_layers(names: List[str]):
    """A checkpoint counts what is saved in operations that nobody has watched."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.Softmax(1), nn.Linear(4, 3), nn.Softmax(1)
    x, y = torch.rand(N, 5, dtype=F64), torch.rand(N, 3, dtype=F64)
    problem = Problem(nn.Sequential(*layers).double(), nn.MSELoss(), (x,), (y,))
    first, act, second, _ = model = copy.deepcopy(problem.model)
    loss = nn.MSELoss()
    for module in (first, second, loss):
        extend(module)

    def inside(x: Tensor) -> Tensor:
        return loss(act(second(act(first(x)))), y)

    with backpack(*make(names)):
        checkpoint(inside, x, use_reentrant=False).backward()
    expected = torch.autograd.grad(loss(problem.model(x), y), problem.model[0].weight)
    assert_agrees([first.weight.grad], expected, "gradient")
    check(model, problem, names)


def test_function_transforms():
    """Under ``torch.func``, an extended model is a plain one."""
    model, loss, (x,), (y,) = MLP.build()
    plain = dict(MLP.build().model.named_parameters())
    model, loss = extend(model), extend(loss)
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss_of_one(params: Dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(model, params, (x.unsqueeze(0),))
        return loss(out, y.unsqueeze(0)) / N

    rows = vmap(func_grad(loss_of_one), in_dims=(None, 0, 0))(params, x, y)
    expected = oracle("batch_grad", *MLP.build())
    for name in plain:
        assert_agrees(rows[name], expected[name], name)
    for module in model.modules():
        assert not hasattr(module, "input0")
    assert not any(fields(model, list(QUANTITIES))["BatchGrad"])
    # and it is an extended one again afterwards
    with backpack(*make(list(QUANTITIES))):
        loss(model(x), y).backward()
    check(model, MLP.build())


def test_disabled_part():
    """What runs inside ``disable`` is plain, its surroundings are not."""
    model, loss, X, y = MLP.build()
    model, loss = extend(model), extend(loss)
    with disable():
        hidden = model[:2](*X)
    with pytest.warns(UserWarning, match="0.weight"):
        with backpack(*make(FIRST_ORDER)):
            loss(model[2](hidden), *y).backward()
    check(model, MLP.build(), FIRST_ORDER, only=ONE_LAYER)


def test_odd_names_keep_their_own():
    """An attribute that a model has is not replaced by what a forward pass stores."""
    model = extend(OddNames())
    output, input0 = model.output, model.input0
    x = torch.rand(N, 4)
    model(x)
    assert model.output is output and model.input0 is input0
    assert torch.equal(model.last.input0, (output(x) * input0).tanh())
    assert torch.equal(output.input0, x)


# Types and values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype):
    """Fields have the parameter's type, and its precision.

    The reference uses the same (rounded) numbers in float64. A forward and a backward
    pass through three layers round about a dozen times; squares and sums over them
    about twice as often.
    """
    model, loss, X, y = MLP.build()
    model, X = extend(model.to(dtype)), tuple(x.to(dtype) for x in X)
    loss = extend(loss.to(dtype))
    with backpack(*make(list(QUANTITIES))):
        loss(model(*X), *y).backward()
    reference = copy.deepcopy(model).to(F64)
    doubles = tuple(x.to(F64) for x in X)
    for name, values in fields(model, list(QUANTITIES)).items():
        expected = oracle(
            QUANTITIES[name], reference, nn.CrossEntropyLoss(), doubles, y
        )
        for param, value in values.items():
            if name != "BatchL2Grad":  # a sum over all entries: at least float32
                assert value.dtype == dtype, name
            if name == "SqrtGGNExact":
                value = square(value.double())
            error = (value.double() - expected[param]).abs().max()
            bound = 24 * torch.finfo(dtype).eps * expected[param].abs().max()
            assert error <= bound, (name, param)


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
def test_non_finite(number: float):
    """A sample that is not finite does not touch the others."""
    model, loss, (x,), y = MLP.build()
    finite = [0, 2]
    expected = oracle("batch_grad", *MLP.build())
    x = x.index_fill(0, torch.tensor([1]), number)
    model, loss = extend(model), extend(loss)
    with backpack(*make(list(QUANTITIES))):
        loss(model(x), *y).backward()
    for name, param in model.named_parameters():
        rows = param.grad_batch
        assert_agrees(rows[finite], expected[name][finite], name)
        assert not rows[1].isfinite().all()
        assert param.batch_l2.isfinite().tolist() == [True, False, True]
        dots = param.batch_dot.isfinite()
        assert dots[finite][:, finite].all() and not dots[1].any()
        assert param.diag_ggn_exact_batch[finite].isfinite().all()
        assert param.sqrt_ggn_exact[:, finite].isfinite().all()


def overwritten(change: str, overwrites: bool = True) -> Dict[str, Tensor]:
    """Compute individual gradients after an input was overwritten.

    Args:
        change: What is unusual about the layer that the input goes into.
        overwrites: Whether it is overwritten. Default: ``True``.

    Returns:
        Individual gradients.
    """
    torch.manual_seed(0)
    layer = nn.LayerNorm(4) if change == "layer norm" else nn.Linear(4, 4)
    if change == "bias only":
        layer.weight.requires_grad_(False)  # autograd does not save the input, then
    if change == "inside of a model, autocast":
        layer = Through(layer, Module.__call__)
    model, loss = extend(layer), extend(nn.MSELoss())
    x, y = torch.rand(N, 4), torch.rand(N, 4)
    # autograd saves what the input is converted to
    with torch.autocast(x.device.type, torch.bfloat16, enabled="autocast" in change):
        value = loss(model(x).float(), y)
    if overwrites:
        with torch.no_grad():
            x.add_(1.0)
    with backpack(*make(FIRST_ORDER)):
        value.backward()
    return {name: param.grad_batch for name, param in parameters(model).items()}


@pytest.mark.parametrize("change", ["layer norm", "autocast"])
def test_overwritten_input(change: str):
    """An input that was overwritten since the call never gives wrong numbers."""
    assert overwritten(change, overwrites=False)
    with pytest.raises(RuntimeError, match="modified"):
        overwritten(change)


@pytest.mark.parametrize(
    "change, rtol", [("bias only", 0.0), ("inside of a model, autocast", 0.02)]
)
def test_input_may_be_overwritten(change: str, rtol: float):
    """An input may be overwritten that is not needed, or that autograd has a copy of.

    The copy has eight binary digits.
    """
    values = overwritten(change)
    for name, expected in overwritten(change, overwrites=False).items():
        assert_agrees(values[name], expected, name, rtol)


def test_batch_sizes():
    """The batch size may change from pass to pass."""
    model, loss, shapes = extend(nn.Linear(4, 3)), extend(nn.MSELoss()), []
    for size in (3, 1, 5):
        with backpack(*make(list(QUANTITIES))):
            loss(model(torch.rand(size, 4)), torch.rand(size, 3)).backward()
        shapes.append(list(model.weight.grad_batch.shape))
    assert shapes == [[3, 3, 4], [1, 3, 4], [5, 3, 4]]
