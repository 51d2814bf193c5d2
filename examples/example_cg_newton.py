"""Newton steps without a matrix: an optimizer with conjugate gradients.

A Newton step solves a linear system with a curvature matrix. That matrix is too large
to write down, but products with it are all that the method of conjugate gradients (CG)
needs, and they are what ``GGNMP`` and ``HMP`` offer: after the backward pass,
``p.ggnmp`` and ``p.hmp`` are functions that multiply vectors with the parameter's block
of the generalized Gauss-Newton matrix (GGN) and of the Hessian.

You learn how to build an optimizer on top of such functions. It solves, for each
parameter p with gradient g,

    (B + damping * identity) step = -g

where B is the block of p. The GGN has no negative eigenvalues, so a little damping
makes the system definite. The Hessian may have some: CG has to stop when it meets
negative curvature, and damping has to keep the steps from becoming too long. It is
chosen so large here that the same value serves both.
"""

from typing import Callable, Iterable, Tuple

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Parameter, Sequential, Sigmoid
from torch.optim import SGD, Optimizer
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import GGNMP, HMP
from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils.examples import load_one_batch_mnist

NUM_STEPS = 15


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], b: Tensor, max_iter: int, tolerance: float
) -> Tuple[Tensor, int]:
    """Solve ``A x = b`` approximately, where A is known by its products.

    Args:
        product: Multiplies a tensor of the shape of b with A.
        b: Right-hand side.
        max_iter: Largest number of products.
        tolerance: When to stop: norm of the residual, relative to that of b.

    Returns:
        The solution and the number of products. If A turns out not to be positive
        definite, what was found before; b itself if nothing was.
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    squared = residual.square().sum()
    for iteration in range(1, max_iter + 1):
        image = product(direction)
        curvature = (direction * image).sum()
        if curvature <= 0:
            return (b if iteration == 1 else x), iteration
        length = squared / curvature
        x = x + length * direction
        residual = residual - length * image
        previous, squared = squared, residual.square().sum()
        if squared.sqrt() <= tolerance * b.norm():
            break
        direction = residual + squared / previous * direction
    return x, iteration


class CGNewton(Optimizer):
    """Newton's method, parameter by parameter."""

    def __init__(
        self,
        params: Iterable[Parameter],
        field: str,
        lr: float = 1.0,
        damping: float = 0.1,
        max_iter: int = 20,
        tolerance: float = 0.1,
    ):
        """Set the options.

        Args:
            params: The parameters.
            field: Where the products are found: ``"ggnmp"`` or ``"hmp"``.
            lr: Learning rate: which part of the step is taken.
            damping: What is added to the diagonal.
            max_iter: Largest number of products per parameter and step.
            tolerance: Tolerance of conjugate gradients.
        """
        self.num_products = 0
        options = {"lr": lr, "damping": damping, "max_iter": max_iter}
        super().__init__(params, {**options, "tolerance": tolerance, "field": field})

    @torch.no_grad()
    def step(self) -> None:
        """Make a step, after a backward pass that has set the products."""
        steps = []  # taken at the end: each product depends on all parameters
        for group in self.param_groups:
            for p in group["params"]:
                multiply = getattr(p, group["field"])

                def product(
                    v: Tensor,
                    multiply: Callable[[Tensor], Tensor] = multiply,
                    damping: float = group["damping"],
                ) -> Tensor:
                    # the function takes several vectors at once: here it gets one
                    return multiply(v.unsqueeze(0)).squeeze(0) + damping * v

                direction, num_products = conjugate_gradients(
                    product, -p.grad, group["max_iter"], group["tolerance"]
                )
                steps.append((p, group["lr"] * direction))
                self.num_products += num_products
        for p, step in steps:
            p.add_(step)


def make_problem() -> Tuple[Sequential, CrossEntropyLoss, Tensor, Tensor]:
    """Make the same network and the same data each time.

    Returns:
        Extended network, extended loss, images ``[N, 784]``, labels ``[N]``.
    """
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=128, flat=True)
    model = Sequential(Linear(784, 20), Sigmoid(), Linear(20, 10)).double()
    return extend(model), extend(CrossEntropyLoss()), X.double(), y


def check_products() -> None:
    """Check the products against plain automatic differentiation."""
    model, lossfunc, X, y = make_problem()
    with backpack(GGNMP(), HMP()):
        lossfunc(model(X), y).backward()
    for p in model.parameters():
        output, v = model(X), torch.rand_like(p)
        loss = lossfunc(output, y)
        (ggn_v,) = ggn_vector_product_from_plist(loss, output, [p], [v])
        (hessian_v,) = hessian_vector_product(loss, [p], [v])
        assert_close(p.ggnmp(v.unsqueeze(0))[0], ggn_v, rtol=1e-8, atol=1e-12)
        assert_close(p.hmp(v.unsqueeze(0))[0], hessian_v, rtol=1e-8, atol=1e-12)


def train(method: str) -> float:
    """Train the network.

    Args:
        method: ``"GGNMP"``, ``"HMP"`` or ``"SGD"``.

    Returns:
        The loss after the last step.
    """
    model, lossfunc, X, y = make_problem()
    if method == "SGD":
        optimizer: Optimizer = SGD(model.parameters(), lr=0.5)
        extensions = []
    else:
        extensions = [{"GGNMP": GGNMP, "HMP": HMP}[method]()]
        # the steps of all parameters are computed one by one, but taken together
        optimizer = CGNewton(model.parameters(), extensions[0].savefield, lr=0.5)

    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = lossfunc(model(X), y)
        with backpack(*extensions):
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses.append(lossfunc(model(X), y).item())

    shown = ", ".join(f"{loss:.3f}" for loss in losses[::5])
    products = getattr(optimizer, "num_products", 0) / NUM_STEPS
    print(f"{method:<6} loss: {shown}   products per step: {products:.0f}")
    return losses[-1]


def main() -> None:
    """Train the same network with three methods."""
    check_products()
    print("The products agree with plain automatic differentiation.")
    print(f"Loss before training and after every fifth of {NUM_STEPS} steps:")
    final = {method: train(method) for method in ("SGD", "GGNMP", "HMP")}
    assert max(final["GGNMP"], final["HMP"]) < 0.5 * final["SGD"]


if __name__ == "__main__":
    main()
