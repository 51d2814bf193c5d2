"""Rows of models whose samples are followed: right for each sample, or refused.

A row is a model, its inputs, and a function of prediction and loss that is
differentiated. Axis 0 of the inputs holds the samples; what the model and the function
do with them is up to the row. The reference is plain autograd in double precision: each
sample goes through the model alone, or, where random numbers or statistics are shared,
the whole batch does so once. Gradient and Hessian of the function of the prediction,
and the dense Jacobian of each sample's part of it, give every quantity.
"""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import (
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
)

import torch
from cases import F64, Tensors, make_extension, randomize
from oracle import (
    assert_agrees,
    by_norms,
    hessian,
    jacobian,
    parameters,
    project,
    sample,
)
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import Module

from backpack import backpack, extend

N = 4
LENGTHS = (3, N)  # of sequences: as many positions as samples, or not
REFUSALS = (NotImplementedError, ValueError, RuntimeError)


class Lambda(Module):
    """A model whose forward pass is a function of itself and the inputs."""

    def __init__(self, function: Callable, **parts: Any):
        """Register the parts: modules, parameters, and whatever else."""
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(self, *args, **kwargs)


class OwnOutput(nn.Linear):
    """A layer that scales its output by an attribute of any name."""

    def __init__(self, name: str, value: Any):
        """Set the attribute: a number, a buffer's tensor or a parameter."""
        super().__init__(3, 3)
        self.name = name
        setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the output."""
        return super().forward(x) * getattr(self, self.name)


class Backward(torch.autograd.Function):
    """The identity, with any rule for gradients.

    What it takes comes last: behind what is no tensor, and one without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, rule: Callable, no: Tensor, x: Tensor) -> Tensor:
        """Copy."""
        ctx.rule = rule
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Apply the rule."""
        return None, None, ctx.rule(g)


class Once(torch.autograd.Function):
    """A square that can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Differentiate."""
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Double(torch.autograd.Function):
    """A product with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Differentiate the product."""
        x, w = ctx.saved_tensors
        gw = g * x
        return g * w, gw.sum_to_size(w.shape)


def param(*shape: int) -> nn.Parameter:
    """Make a parameter of normal numbers."""
    return nn.Parameter(torch.randn(shape))


def randn(*shape: int, batch: int = N) -> Callable[[], Tensors]:
    """Make a thunk for a normal input with a batch axis in front."""
    return lambda: (torch.randn(batch, *shape, dtype=F64),)


def tokens(*shape: int, batch: int = N, size: int = 5) -> Callable[[], Tensors]:
    """Make a thunk for token indices with a batch axis in front."""
    return lambda: (torch.randint(size, (batch, *shape)),)


def real(f: Tensor) -> Tensor:
    """Return numbers between -1 and 1 in the shape of a prediction, always the same."""
    return torch.arange(f.numel(), dtype=F64).sin().reshape(f.shape).to(f.dtype)


def classes(f: Tensor, axis: int = 1) -> Tensor:
    """Return classes for a prediction ``[N, C, *]``, always the same."""
    shape = [size for i, size in enumerate(f.shape) if i != axis % f.dim()]
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 5 % f.shape[axis]).reshape(shape)


def against_real(f: Tensor, loss: Module) -> Tensor:
    """Compare a prediction of any shape with real numbers."""
    return loss(f, real(f))


def against_classes(f: Tensor, loss: Module) -> Tensor:
    """Compare a prediction ``[N, C, *]`` with classes."""
    return loss(f, classes(f))


def predict(model: Module, X: Tensors) -> Tensor:
    """Call a model."""
    return model(*X)


class Row(NamedTuple):
    """A model, data, and what is differentiated.

    Attributes:
        model: Makes the model.
        X: Makes the model's inputs, samples on axis 0.
        loss: Makes the loss; a list of modules for several losses.
        objective: Function of the prediction and the loss, that is differentiated.
        quantities: Which quantities are compared. Default: all in ``QUANTITIES``.
        train: Whether the model is in training mode.
        alone: Whether samples go through the model one by one for the reference.
        predict: Function of model and inputs that gives the prediction.
        value: Function of model, loss and inputs that gives what is differentiated.
            Default: the objective of the prediction.
        around: Makes a context in which forward and backward pass run.
        says: Pattern for what a refusal says, where it is admitted or demanded.
    """

    model: Callable[[], Module]
    X: Callable[[], Tensors]
    loss: Callable[[], Module] = nn.MSELoss
    objective: Callable[[Tensor, Module], Tensor] = against_real
    quantities: Optional[Sequence[str]] = None
    train: bool = False
    alone: bool = True
    predict: Callable[[Module, Tensors], Tensor] = predict
    value: Optional[Callable[[Module, Module, Tensors], Tensor]] = None
    around: Callable[[], AbstractContextManager] = nullcontext
    says: Optional[str] = None

    def build(self) -> Tuple[Module, Module, Tensors]:
        """Make model, loss and inputs; the same numbers every time."""
        torch.manual_seed(0)
        X, model = self.X(), self.model().to(F64)
        loss = self.loss().to(F64)
        return randomize(model).train(self.train), loss, X

    def run(self, model: Module, loss: Module, X: Tensors) -> Tensor:
        """Compute what is differentiated; the same random numbers every time."""
        torch.manual_seed(1)
        if self.value is not None:
            return self.value(model, loss, X)
        return self.objective(self.predict(model, X), loss)


def part(spec: Any) -> Any:
    """Make a part of a model: a parameter of a shape, or what a function makes."""
    return param(*spec) if isinstance(spec, tuple) else spec()


def use(function: Callable, *shape: int, **parts: Any) -> Row:
    """Make a row in which a function gets the output of a layer.

    Args:
        function: Function of the model and of data ``[N, *shape]``.
        shape: Shape of a sample.
        parts: Shapes of parameters, or functions that make parts.

    Returns:
        The row.
    """
    width = shape[-1]
    return Row(
        lambda: Lambda(
            lambda m, x: function(m, m.first(x).tanh()).sin(),
            first=nn.Linear(width, width),
            **{name: part(spec) for name, spec in parts.items()},
        ),
        randn(*shape),
    )


def lookup(function: Callable, *shape: int, **parts: Any) -> Row:
    """Make a row in which a function of the model gets tokens ``[N, *shape]``."""
    return Row(
        lambda: Lambda(function, **{name: part(spec) for name, spec in parts.items()}),
        tokens(*shape),
    )


class Samples(NamedTuple):
    """Each sample's share in gradient and GGN, by parameter.

    Attributes:
        gradients: Individual gradients ``[N, *p]``.
        diagonals: Diagonals of the samples' GGN ``[N, *p]``.
        blocks: The samples' GGN ``[N, P, P]``.
    """

    gradients: Dict[str, Tensor]
    diagonals: Dict[str, Tensor]
    blocks: Dict[str, Tensor]


def reference(row: Row) -> Samples:
    """Compute each sample's share with plain autograd.

    Args:
        row: The row.

    Returns:
        Individual gradients and GGN diagonals.
    """
    model, loss, X = row.build()
    params = parameters(model)
    with row.around():
        torch.manual_seed(1)
        if row.alone:
            parts = [row.predict(model, sample(X, n)) for n in range(len(X[0]))]
        else:
            prediction = row.predict(model, X)
            parts = list(prediction.split(len(prediction) // len(X[0])))
        f = torch.cat([part.detach() for part in parts]).requires_grad_()
        (gradient,) = grad(row.objective(f, loss), f)
        second = hessian(lambda f: row.objective(f, loss), f)
        # in this order, so that graphs behind parts may share nodes
        jacobians = [jacobian(part, list(params.values())) for part in parts]
    places = torch.arange(f.numel()).split([part.numel() for part in parts])
    for n, mine in enumerate(places):
        for m, others in enumerate(places):
            assert n == m or not second[mine][:, others].any(), "terms of two samples"
    gradients, blocks = {}, {}
    for i, name in enumerate(params):
        flat = [jac[i].to_dense().reshape(len(jac[i]), -1) for jac in jacobians]
        gradients[name] = torch.stack(
            [gradient.flatten()[mine] @ jac for mine, jac in zip(places, flat)]
        ).reshape(-1, *params[name].shape)
        blocks[name] = torch.stack(
            [jac.T @ second[mine][:, mine] @ jac for mine, jac in zip(places, flat)]
        )
    diagonals = {
        name: blocks[name].diagonal(dim1=1, dim2=2).reshape_as(gradients[name])
        for name in params
    }
    return Samples(gradients, diagonals, blocks)


def rows_of(g: Tensor) -> Tensor:
    """Flatten individual gradients to ``[N, P]``."""
    return g.reshape(len(g), -1)


class OfAll(NamedTuple):
    """A sum of gradients with weights that depend on those of all parameters.

    Attributes:
        weights: Maps gradients of all parameters ``[N, P]`` to weights ``[N]``.
    """

    weights: Callable[[Tensor], Tensor]


# Field, quantity of a sample's shares [N, *p], and whether of the gradient
QUANTITIES: Dict[str, Tuple[str, Any, bool]] = {
    "BatchGrad": ("grad_batch", lambda g: g, True),
    "BatchL2Grad": ("batch_l2", lambda g: rows_of(g).pow(2).sum(1), True),
    "SumGradSquared": ("sum_grad_squared", lambda g: g.pow(2).sum(0), True),
    "Variance": ("variance", lambda g: (g - g.mean(0)).pow(2).mean(0), True),
    "BatchDotGrad": ("batch_dot", lambda g: rows_of(g) @ rows_of(g).T, True),
    "BatchFactors": ("grad_factors", lambda g: g, True),
    "BatchProjectGrad": ("grad_projected", project, True),
    "WeightedGrad": ("grad_weighted", OfAll(by_norms), True),
    "DiagGGNExact": ("diag_ggn_exact", lambda d: d.sum(0), False),
    "BatchDiagGGNExact": ("diag_ggn_exact_batch", lambda d: d, False),
}
# Linear in the gradients
LINEAR = ("BatchGrad", "BatchFactors", "BatchProjectGrad", "WeightedGrad")
FIRST_ORDER = [name for name, (_, _, first) in QUANTITIES.items() if first]


def size(tensors: Dict[str, Tensor]) -> float:
    """Return the largest entry of some tensors."""
    return max(
        [float(t.abs().max()) for t in tensors.values() if t.numel()], default=0.0
    )


def assert_equal(
    actual: Dict[str, Tensor], expected: Dict[str, Tensor], what: str, power: int = 1
) -> None:
    """Assert that the values of all parameters agree.

    Rounding of the largest entry of all is in each of them.

    Args:
        actual: Values by parameter.
        expected: What is right.
        what: What is compared.
        power: What gradients are raised to. Default: 1.
    """
    assert actual.keys() == expected.keys(), f"{what}: {list(actual)}"
    rounding = 1e-13 * size(expected) ** (1 / power)
    for name, right in expected.items():
        value = actual[name]
        if value.shape == right.shape:
            allowed = rounding
            if power == 2:  # of (g + r)^2 - g^2
                allowed = rounding * (2 * right.abs().sqrt() + rounding)
            value = value.where((value - right).abs() > allowed, right)
        assert_agrees(value, right, f"{what} of {name}")


def assert_fields(
    model: Module, quantities: Sequence[str], samples: Samples, rtol: float = 0.0
) -> None:
    """Assert that what the parameters carry is right.

    Args:
        model: The model, after a backward pass.
        quantities: Names of quantities.
        samples: Each sample's share.
        rtol: Tolerance relative to the largest entry, where digits are lost; else these
            are compared. Default: ``0.0``.
    """
    params = parameters(model)
    for quantity in quantities:
        field, function, first = QUANTITIES[quantity]
        shares = samples.gradients if first else samples.diagonals
        if isinstance(function, OfAll):
            weights = function.weights(torch.cat([*map(rows_of, shares.values())], 1))
            expected = {n: torch.tensordot(weights, g, 1) for n, g in shares.items()}
        else:
            expected = {name: function(share) for name, share in shares.items()}
        assert all(torch.isfinite(value).all() for value in expected.values())
        missing = [name for name, p in params.items() if not hasattr(p, field)]
        assert not missing, f"no {field}: {missing}"
        actual = {name: getattr(p, field) for name, p in params.items()}
        if quantity == "BatchFactors":
            actual = {name: value.individual() for name, value in actual.items()}
        if rtol:
            scale = rtol * size(expected)
            for name, right in expected.items():
                wrong = (actual[name].to(F64) - right).abs().max()
                assert wrong <= scale, f"{quantity} of {name}: off by {wrong}"
        else:
            assert_equal(actual, expected, quantity, 1 if quantity in LINEAR else 2)


def compute(row: Row, quantities: Sequence[str], **options: Any) -> Module:
    """Compute quantities with the library.

    Args:
        row: The row.
        quantities: Names of quantities.
        options: Options of the context.

    Returns:
        The model, whose parameters carry the fields.
    """
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    exts = [make_extension(name) for name in quantities]
    with row.around():
        value = row.run(model, loss, X)
        with backpack(*exts, **options):
            value.backward()
    return model


def assert_right(row: Row, **options: Any) -> None:
    """Assert that all quantities of all parameters are right, and so is the gradient.

    Args:
        row: The row.
        options: Options of the context.
    """
    quantities = list(QUANTITIES) if row.quantities is None else row.quantities
    samples = reference(row)
    model = compute(row, quantities, **options)
    gradients = {n: p.grad.to_dense() for n, p in parameters(model).items()}
    expected = {name: g.sum(0) for name, g in samples.gradients.items()}
    assert_equal(gradients, expected, "gradient")
    assert_fields(model, quantities, samples)


def assert_refused(
    row: Row,
    quantity: str,
    says: Optional[str] = None,
    kinds: Tuple[Type[Exception], ...] = REFUSALS,
) -> None:
    """Assert that a quantity is refused, by an error that says what it must.

    Args:
        row: The row.
        quantity: Name of the quantity.
        says: Pattern for the message. Default: the row's.
        kinds: Classes of errors that are admitted. Default: those of refusals.
    """
    try:
        model = compute(row, [quantity])
    except kinds as error:
        assert says_it(says or row.says, error), f"without reason: {error!r}"
        return
    field = QUANTITIES[quantity][0]
    results = [name for name, p in parameters(model).items() if hasattr(p, field)]
    raise AssertionError(f"not refused: {quantity} of {results}")


def says_it(says: Optional[str], error: Exception) -> bool:
    """Tell whether a message says what it must."""
    return re.search(says or "", str(error), re.IGNORECASE | re.DOTALL) is not None


def assert_right_or_refused(row: Row) -> None:
    """Assert that all quantities are right, or are refused for the true reason.

    Args:
        row: The row.
    """
    for quantities in (FIRST_ORDER, ["DiagGGNExact", "BatchDiagGGNExact"]):
        if row.quantities is not None:
            quantities = [name for name in quantities if name in row.quantities]
        if not quantities:
            continue
        samples = reference(row)
        try:
            model = compute(row, quantities)
        except REFUSALS as error:
            assert says_it(row.says, error), f"without reason: {error!r}"
            continue
        assert_fields(model, quantities, samples)


def named(*tables: Dict[str, Row]) -> List[str]:
    """List the names of rows, each of which must be there once."""
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "a name occurs twice"
    return names
