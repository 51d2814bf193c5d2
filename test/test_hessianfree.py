"""Tests of ``backpack.hessianfree`` against dense Jacobians and Hessians."""

from typing import Callable, Dict, List, Tuple

import pytest
import torch
from per_sample import Once
from torch import (
    Tensor,
    cat,
    float64,
    full_like,
    no_grad,
    rand,
    randint,
    testing,
    zeros_like,
)
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import (
    BatchNorm1d,
    BCEWithLogitsLoss,
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    HuberLoss,
    Linear,
    Module,
    MSELoss,
    Parameter,
    ReLU,
    Sequential,
    Sigmoid,
    Tanh,
)

from backpack.hessianfree.ggnvp import (
    ggn_vector_product,
    ggn_vector_product_from_plist,
)
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op, transposed_jacobian_vector_product
from backpack.hessianfree.rop import R_op, jacobian_vector_product
from backpack.utils.convert_parameters import vector_to_parameter_list

N, C = 3, 4


class Unused(Module):
    """A model with a parameter that enters nothing, and a frozen one."""

    def __init__(self) -> None:
        """Set up the parameters."""
        super().__init__()
        self.first = Linear(5, 3)
        self.unused = Parameter(rand(2, 3))
        self.frozen = Linear(3, C)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output from some of the parameters.

        Args:
            x: Input ``[N, 5]``.

        Returns:
            Output ``[N, C]``.
        """
        return self.frozen(self.first(x).sigmoid())


class Tied(Module):
    """A model with a weight that is used twice, and a frozen bias before others."""

    def __init__(self) -> None:
        """Set up the parameters."""
        super().__init__()
        self.first, self.second = Linear(5, 5), Linear(5, 5)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.last = Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output.

        Args:
            x: Input ``[N, 5]``.

        Returns:
            Output ``[N, C]``.
        """
        return self.last(self.second(self.first(x).sigmoid()).tanh())


class LogCumSumExp(Module):
    """An operation whose gradient PyTorch cannot differentiate where it is zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output.

        Args:
            x: Input ``[N, D]``.

        Returns:
            Output ``[N, D]``.
        """
        return x.logcumsumexp(1)


class NewtonLoss(Module):
    """A loss function of one's own whose Hessian is not positive semi-definite."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            output: Output ``[N, C]``.
            target: Target of the same shape.

        Returns:
            The loss.
        """
        return (output * target).sin().sum() + output.prod(1).sum()


def make_labels() -> Tensor:
    """Draw class labels.

    Returns:
        Labels ``[N]``.
    """
    return randint(C, (N,))


def make_targets() -> Tensor:
    """Draw real targets.

    Returns:
        Targets ``[N, C]``.
    """
    return rand(N, C, dtype=float64)


# model, input shape, loss function, targets
CASES: Dict[str, Tuple[Callable, Tuple[int, ...], Callable, Callable]] = {
    "sigmoid-mse": (
        lambda: Sequential(Linear(5, 3), Sigmoid(), Linear(3, C)),
        (N, 5),
        MSELoss,
        make_targets,
    ),
    "tanh-ce": (
        lambda: Sequential(Linear(5, 3), Tanh(), Linear(3, C, bias=False)),
        (N, 5),
        CrossEntropyLoss,
        make_labels,
    ),
    "linear-ce": (lambda: Linear(5, C), (N, 5), CrossEntropyLoss, make_labels),
    "relu-bce": (
        lambda: Sequential(Linear(5, 3), ReLU(inplace=True), Linear(3, C)),
        (N, 5),
        BCEWithLogitsLoss,
        make_targets,
    ),
    "conv-ce": (
        lambda: Sequential(Conv2d(1, 2, 2, stride=2), Tanh(), Flatten(), Linear(8, C)),
        (N, 1, 4, 4),
        CrossEntropyLoss,
        make_labels,
    ),
    "batch-norm-huber": (
        lambda: Sequential(Linear(5, 3), BatchNorm1d(3), Sigmoid(), Linear(3, C)),
        (N, 5),
        HuberLoss,
        make_targets,
    ),
    "sigmoid-own-loss": (
        lambda: Sequential(Linear(5, 3), Sigmoid(), Linear(3, C)),
        (N, 5),
        NewtonLoss,
        make_targets,
    ),
    "logcumsumexp-mse": (
        lambda: Sequential(Linear(5, 3), LogCumSumExp(), Linear(3, C)),
        (N, 5),
        MSELoss,
        make_targets,
    ),
    "tied-ce": (Tied, (N, 5), CrossEntropyLoss, make_labels),
    "unused-own-loss": (Unused, (N, 5), NewtonLoss, make_targets),
}


class Problem:
    """A case, built, with its dense Jacobian and Hessians as functions of a vector."""

    def __init__(self, name: str) -> None:
        """Build a case.

        Args:
            name: Key in the table of cases.
        """
        torch.manual_seed(0)
        make_model, shape, make_loss, make_target = CASES[name]
        self.model = make_model().to(float64)
        self.loss_function = make_loss()
        self.X = rand(*shape, dtype=float64)
        self.y = make_target()
        self.params = list(self.model.parameters())
        self.output = self.model(self.X)
        self.loss = self.loss_function(self.output, self.y)

    def vector(self) -> List[Tensor]:
        """Draw a vector in the parameters' space.

        Returns:
            One entry in the shape of each parameter.
        """
        return [rand(p.shape, dtype=float64) for p in self.params]

    def flat_output(self, theta: Tensor) -> Tensor:
        """Compute the output as function of one vector; frozen parameters stay fixed.

        Args:
            theta: All parameters ``[D]``.

        Returns:
            Output, flattened.
        """
        parts = vector_to_parameter_list(theta, self.params)
        named = {
            name: part if p.requires_grad else p
            for (name, p), part in zip(self.model.named_parameters(), parts)
        }
        return functional_call(self.model, named, (self.X,)).flatten()

    def flat_loss(self, output: Tensor) -> Tensor:
        """Compute the loss as function of the flattened output.

        Args:
            output: Output, flattened.

        Returns:
            The loss.
        """
        return self.loss_function(output.view_as(self.output), self.y)

    @property
    def theta(self) -> Tensor:
        """All parameters as one vector ``[D]``."""
        return flatten(self.params).detach()

    def jacobian(self) -> Tensor:
        """Compute the dense Jacobian.

        Returns:
            Jacobian of the flattened output, ``[N * C, D]``.
        """
        return jacobian(self.flat_output, self.theta)

    def hessian(self) -> Tensor:
        """Compute the dense Hessian.

        Returns:
            Hessian of the loss ``[D, D]``.
        """
        return hessian(lambda t: self.flat_loss(self.flat_output(t)), self.theta)

    def ggn(self) -> Tensor:
        """Compute the dense GGN.

        Returns:
            GGN of the loss ``[D, D]``.
        """
        J = self.jacobian()
        H = hessian(self.flat_loss, self.output.detach().flatten())
        return J.T @ H @ J


@pytest.fixture(params=CASES.keys())
def problem(request) -> Problem:
    """Build each case.

    Args:
        request: Holds the name of the case.

    Returns:
        The case.
    """
    return Problem(request.param)


def flatten(tensors: Tuple[Tensor, ...]) -> Tensor:
    """Concatenate tensors.

    Args:
        tensors: Tensors of any shapes.

    Returns:
        One vector.
    """
    return cat([t.flatten() for t in tensors])


def check(result: Tuple[Tensor, ...], like: List[Tensor], truth: Tensor) -> None:
    """Check a product's form, and compare it with a dense one.

    Args:
        result: Product, one entry for each tensor.
        like: Tensors that prescribe the shapes.
        truth: Expected product, flattened.
    """
    assert isinstance(result, tuple)
    assert [r.shape for r in result] == [t.shape for t in like]
    assert not any(r.requires_grad for r in result)
    testing.assert_close(flatten(result), truth, rtol=1e-9, atol=1e-11)


def test_hessian_vector_product(problem: Problem) -> None:
    """Products with the Hessian are right, also if the gradient is given."""
    v = problem.vector()
    truth = problem.hessian() @ flatten(v)
    active = [p for p in problem.params if p.requires_grad]
    gradient = dict(
        zip(
            active,
            torch.autograd.grad(
                problem.loss, active, create_graph=True, materialize_grads=True
            ),
        )
    )
    gradient = [gradient.get(p, zeros_like(p)) for p in problem.params]
    detached = [g.detach() for g in gradient]
    for grad_params in None, gradient, detached:
        result = hessian_vector_product(
            problem.loss, problem.params, v, grad_params=grad_params
        )
        check(result, problem.params, truth)
    if any(g.requires_grad for g in gradient):  # which is all that is needed
        check(
            hessian_vector_product(None, problem.params, v, grad_params=gradient),
            problem.params,
            truth,
        )


def test_ggn_vector_product(problem: Problem) -> None:
    """Products with the GGN are right: for a model's trainable parameters, for some."""
    v = problem.vector()
    ggn = problem.ggn()
    active = [p for p in problem.params if p.requires_grad]
    v_active = [x for x, p in zip(v, problem.params) if p.requires_grad]
    keep = flatten([full_like(p, p.requires_grad) for p in problem.params]).bool()
    result = ggn_vector_product(problem.loss, problem.output, problem.model, v_active)
    check(result, active, ggn[keep][:, keep] @ flatten(v_active))

    dim = problem.params[0].numel()
    result = ggn_vector_product_from_plist(
        problem.loss, problem.output, iter(problem.params[:1]), iter(v[:1])
    )
    check(result, problem.params[:1], ggn[:dim, :dim] @ v[0].flatten())


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["tanh-ce", "conv-ce", "tied-ce"])
def test_products_of_low_precision(name: str, dtype: torch.dtype, inside: bool) -> None:
    """Products after a forward pass under autocast are those of full precision."""
    problem = Problem(name)
    model, X, v = problem.model.float(), problem.X.float(), problem.vector()
    active = [p for p in model.parameters() if p.requires_grad]
    v = [x.float() for x, p in zip(v, problem.params) if p.requires_grad]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            output = model(X)
            loss = problem.loss_function(output.float(), problem.y)
        with torch.autocast("cpu", dtype, enabled=enabled and inside):
            hessian_vector = hessian_vector_product(loss, active, v)
            ggn_vector = ggn_vector_product(loss, output, model, v)
        results.append((*hessian_vector, *ggn_vector))
    for expected, result in zip(*results):
        assert result.dtype == expected.dtype
        assert (result - expected).norm() < 0.05 * expected.norm() + 1e-3


@pytest.mark.parametrize("R", [R_op, jacobian_vector_product])
def test_jacobian_vector_product(problem: Problem, R: Callable) -> None:
    """Products with the Jacobian are right."""
    v = problem.vector()
    result = R(problem.output, problem.params, v)
    check(result, [problem.output], problem.jacobian() @ flatten(v))


@pytest.mark.parametrize("L", [L_op, transposed_jacobian_vector_product])
def test_transposed_jacobian_vector_product(problem: Problem, L: Callable) -> None:
    """Products with the transposed Jacobian are right."""
    w = rand(problem.output.shape, dtype=float64)
    result = L(problem.output, problem.params, w)
    check(result, problem.params, problem.jacobian().T @ w.flatten())


def test_several_outputs() -> None:
    """Outputs may be several tensors; those that are constant count as such."""
    x, z = (rand(3, dtype=float64, requires_grad=True) for _ in range(2))
    ys = [x.sin(), rand(2, dtype=float64), (x * z).sum(), z + 1, x]
    xs = [x, z]
    vx, vz = (rand(3, dtype=float64) for _ in range(2))
    truth = [vx * x.cos(), zeros_like(ys[1]), (vx * z + vz * x).sum(), vz, vx]
    for vs in [vx, vz], (vx, vz):
        result = R_op(ys, xs, vs)
        check(result, ys, flatten(truth).detach())

    ws = [rand(y.shape, dtype=float64) for y in ys]
    truth = [ws[0] * x.cos() + ws[2] * z + ws[4], ws[2] * x + ws[3]]
    check(L_op(ys, xs, ws), xs, flatten(truth).detach())


def test_linear_function_has_no_hessian() -> None:
    """The Hessian of a linear function is zero, the GGN of a linear loss, too."""
    p = rand(3, dtype=float64, requires_grad=True)
    f = (2 * p).sum()
    zero = zeros_like(p, requires_grad=False)
    check(hessian_vector_product(f, p, [zero + 1]), [p], zero)
    output = p**2
    loss = output.sum()
    check(ggn_vector_product_from_plist(loss, output, [p], [zero + 1]), [p], zero)


def test_attached_products_can_be_differentiated() -> None:
    """Without detaching, products are differentiable functions of the inputs."""
    x = rand(3, dtype=float64, requires_grad=True)
    v = rand(3, dtype=float64)

    functions = [
        lambda x: R_op(x**3, x, v, detach=False),
        lambda x: L_op(x**3, x, v, detach=False),
        lambda x: hessian_vector_product((x**4).sum(), [x], [v], detach=False),
    ]
    truths = [6 * x * v, 6 * x * v, 24 * x * v]
    for function, truth in zip(functions, truths):
        (result,) = function(x)
        (derivative,) = torch.autograd.grad(result.sum(), x)
        testing.assert_close(derivative, truth.detach())


@pytest.mark.parametrize("op", [R_op, L_op])
def test_graph_can_be_freed(op: Callable) -> None:
    """The outputs' graph serves again, unless it is not retained."""
    x = rand(3, dtype=float64, requires_grad=True)
    y = x.exp()
    for retain_graph in True, True, False:
        check(op(y, x, x.detach(), retain_graph=retain_graph), [x], (x * y).detach())
    with pytest.raises(RuntimeError, match="second time"):
        op(y, x, x.detach())


def _f(p: List[Parameter]) -> Tensor:
    return (p[0] ** 2).sum() * p[1].sum()


@pytest.mark.parametrize(
    "f, shapes, match",
    [
        (_f, [(2,)], "2 entries"),
        (_f, [(2,), (3,), (1,)], "2 entries"),
        (_f, [(3,), (2,)], "of shapes"),
        (_f, [(2, 1), (3,)], "of shapes"),
        (lambda p: p[0] ** 2, [(2,), (3,)], "scalar"),
        (lambda p: _f(p).detach(), [(2,), (3,)], "no_grad"),
    ],
)
def test_hessian_vector_product_refuses(f: Callable, shapes: List, match: str) -> None:
    """Vectors that do not match, and what is no scalar with a graph, are refused."""
    params = [Parameter(rand(2)), Parameter(rand(3))]
    with pytest.raises(ValueError, match=match):
        hessian_vector_product(f(params), params, [rand(*shape) for shape in shapes])


def test_hessian_vector_product_refuses_gradient() -> None:
    """A gradient that does not match the parameters is refused."""
    p = Parameter(rand(2))
    with pytest.raises(ValueError, match="of shapes"):
        hessian_vector_product((p**2).sum(), [p], [p], grad_params=[rand(3)])
    for gradient in None, [rand(2)]:
        with pytest.raises(ValueError, match="f, got None.*create_graph"):
            hessian_vector_product(None, [p], [p], grad_params=gradient)


def test_ggn_vector_product_refuses() -> None:
    """A loss of another output, and an output without graph, are refused."""
    problem = Problem("sigmoid-mse")
    v = problem.vector()
    other = problem.model(problem.X)
    with pytest.raises(ValueError, match="does not depend"):
        ggn_vector_product(problem.loss, other, problem.model, v)
    with pytest.raises(ValueError, match="entries"):
        ggn_vector_product(problem.loss, problem.output, problem.model, v[1:])
    with no_grad():
        output = problem.model(problem.X)
    with pytest.raises(ValueError, match="no_grad"):
        ggn_vector_product(problem.loss, output, problem.model, v)


@pytest.mark.parametrize("product", [R_op, hessian_vector_product])
def test_function_that_is_differentiated_once(product: Callable) -> None:
    """It is refused where it matters, and only there."""
    a, b = (rand(2, dtype=float64, requires_grad=True) for _ in range(2))
    y, v = (Once.apply(a) * b.square()).sum(), rand(2, dtype=float64)
    with pytest.raises(RuntimeError, match="differentiate twice.*Once"):
        product(y, [a], [v])
    (found,) = product(y, [b], [v])
    factor = 2 * a.detach() ** 2 * v
    is_hessian = product is hessian_vector_product
    testing.assert_close(found, factor if is_hessian else (factor * b.detach()).sum())
