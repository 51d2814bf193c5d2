"""All quantities, one after the other: how to ask for them and where to find them.

The recipe is always the same. Extend the model and the loss once, run the backward pass
inside ``with backpack(...)``, and read the result off each parameter. Which attribute
holds it, and which shape it has, is what you learn here, on a small convolutional
network that looks at MNIST images:

- first order: individual gradients and what can be said about them,
- second order: diagonals, factors and Kronecker factors of the generalized Gauss-Newton
  matrix (GGN), diagonals of the Hessian,
- products with curvature matrices, which are functions rather than tensors.

All quantities describe the same batch, so they have to fit together. The second half of
this script checks how: some against plain automatic differentiation, and the others
against each other.
"""

from typing import Dict

import torch
from torch import Tensor
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Parameter,
    Sequential,
    Sigmoid,
)
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist
from backpack.utils.kroneckers import kfacs_to_mat

BATCH_SIZE = 8

# The attribute of a parameter under which each quantity is saved
QUANTITIES = {
    # first order
    "grad_batch": BatchGrad(),
    "batch_l2": BatchL2Grad(),
    "sum_grad_squared": SumGradSquared(),
    "variance": Variance(),
    # second order: GGN, exact or with Monte-Carlo samples (MC)
    "diag_ggn_exact": DiagGGNExact(),
    "diag_ggn_mc": DiagGGNMC(mc_samples=2),
    "diag_ggn_exact_batch": BatchDiagGGNExact(),
    "diag_ggn_mc_batch": BatchDiagGGNMC(mc_samples=2),
    "sqrt_ggn_exact": SqrtGGNExact(),
    "sqrt_ggn_mc": SqrtGGNMC(mc_samples=2),
    "kfac": KFAC(mc_samples=2),
    "kflr": KFLR(),
    "kfra": KFRA(),
    # second order: Hessian
    "diag_h": DiagHessian(),
    "diag_h_batch": BatchDiagHessian(),
    # products with a parameter's block of a curvature matrix
    "hmp": HMP(),
    "ggnmp": GGNMP(),
    "pchmp": PCHMP(),
}


def make_model() -> Sequential:
    """Make the network.

    Returns:
        A network for images ``[N, 1, 28, 28]`` with ten outputs, in double precision.
    """
    return Sequential(
        *(Conv2d(1, 3, 5, stride=2), MaxPool2d(4), Sigmoid()),
        *(Flatten(), Linear(27, 10)),
    ).double()


def describe(value: object) -> str:
    """Say in a few words what a field holds.

    Args:
        value: A tensor, a list of them, or a function.

    Returns:
        The shape, or the shapes.
    """
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, list):
        return "Kronecker factors " + ", ".join(describe(factor) for factor in value)
    return "a function of [K, *p]"


def individual_gradients(model: Sequential, X: Tensor, y: Tensor) -> Dict[str, Tensor]:
    """Compute individual gradients without BackPACK, one backward pass per sample.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.

    Returns:
        For each parameter the summands of the mean loss's gradient, ``[N, *p]``.
    """
    params = dict(model.named_parameters())
    rows = []
    for x, label in zip(X.split(1), y.split(1)):
        loss = CrossEntropyLoss()(model(x), label) / len(X)
        rows.append(torch.autograd.grad(loss, list(params.values())))
    return {name: torch.stack(g) for name, g in zip(params, zip(*rows))}


def check_parameter(name: str, p: Parameter, gradients: Tensor) -> None:
    """Check that the quantities of one parameter fit together.

    Args:
        name: Name of the parameter, for messages.
        p: The parameter, with all fields.
        gradients: Individual gradients ``[N, *p]`` by plain automatic differentiation.
    """
    pairs = {
        # first order: everything follows from the individual gradients
        "grad_batch": (p.grad_batch, gradients),
        "the gradient is their sum": (p.grad_batch.sum(0), p.grad),
        "batch_l2": (p.batch_l2, gradients.flatten(1).square().sum(1)),
        "sum_grad_squared": (p.sum_grad_squared, gradients.square().sum(0)),
        "variance": (p.variance, gradients.var(0, unbiased=False)),
        # the columns S of the GGN's factor tell its diagonal
        "sqrt_ggn_exact": (p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact),
        "diag_ggn_exact_batch": (p.diag_ggn_exact_batch.sum(0), p.diag_ggn_exact),
        "diag_h_batch": (p.diag_h_batch.sum(0), p.diag_h),
    }
    # products with all unit vectors give the whole matrix, and so its diagonal
    units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
    for diagonal, product in [("diag_ggn_exact", p.ggnmp), ("diag_h", p.hmp)]:
        matrix = product(units).reshape(p.numel(), p.numel())
        pairs[f"{diagonal} by products"] = (
            matrix.diag().reshape(p.shape),
            getattr(p, diagonal),
        )
    for what, (actual, expected) in pairs.items():
        agree = torch.allclose(actual, expected, rtol=1e-8, atol=1e-12)
        assert agree, f"{what} of {name}"
    # the positive-curvature Hessian has no negative eigenvalues
    matrix = p.pchmp(units).reshape(p.numel(), p.numel())
    assert torch.linalg.eigvalsh(matrix).min() > -1e-10
    # Kronecker factors approximate the parameter's block of the GGN
    for factors in (p.kfac, p.kflr, p.kfra):
        assert kfacs_to_mat(factors).shape == (p.numel(), p.numel())


def check_model(model: Sequential, X: Tensor, y: Tensor) -> None:
    """Check second-order quantities against plain automatic differentiation.

    Args:
        model: The network; its parameters have all fields.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.
    """
    lossfunc = CrossEntropyLoss()
    # a linear layer's bias is as simple as it gets: its Kronecker factor is exact
    bias = model[4].bias
    block = bias.ggnmp(torch.eye(len(bias), dtype=bias.dtype))
    assert_close(kfacs_to_mat(bias.kflr), block, rtol=1e-8, atol=1e-12)

    diagonal = parameters_to_vector([p.diag_ggn_exact for p in model.parameters()])
    idx = list(range(0, len(diagonal), 7))  # autograd is slow: not all entries
    expected = autograd_diag_ggn_exact(X, y, model, lossfunc, idx=idx)
    assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)

    for p in model.parameters():
        output = model(X)
        loss = lossfunc(output, y)
        v = torch.rand_like(p)
        expected_h = hessian_vector_product(loss, [p], [v])[0]
        expected_g = ggn_vector_product_from_plist(loss, output, [p], [v])[0]
        v = v.unsqueeze(0)  # the functions multiply K vectors at once
        assert_close(p.hmp(v)[0], expected_h, rtol=1e-8, atol=1e-12)
        assert_close(p.ggnmp(v)[0], expected_g, rtol=1e-8, atol=1e-12)


def main() -> None:
    """Compute every quantity in a pass of its own, then check how they fit together."""
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=BATCH_SIZE)
    X = X.double()

    model = extend(make_model())
    lossfunc = extend(CrossEntropyLoss())

    print(f"Fields of the convolution's weight {list(model[0].weight.shape)}")
    for field, extension in QUANTITIES.items():
        model.zero_grad()
        with backpack(extension):
            lossfunc(model(X), y).backward()
        value = getattr(model[0].weight, field)
        print(f"  {type(extension).__name__:<18} .{field:<21} {describe(value)}")

    gradients = individual_gradients(model, X, y)
    for name, param in model.named_parameters():
        check_parameter(name, param, gradients[name])
    check_model(model, X, y)
    print("They agree with each other, and with plain automatic differentiation.")

    # Several quantities share one backward pass. Give them together:
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(X), y).backward()
    print("Norm of the gradient and trace of the GGN, from one pass:")
    for name, p in model.named_parameters():
        curvature, gradient = p.diag_ggn_exact.sum(), p.grad_batch.sum(0)
        print(f"  {name:<8} gradient {gradient.norm():.4f}, curvature {curvature:.4f}")


if __name__ == "__main__":
    main()
