"""
Newton steps without a matrix: conjugate gradients
==================================================

A Newton step solves a linear system with a curvature matrix. That matrix is too large
to write down, but products with it are all that the method of conjugate gradients (CG)
needs. After the backward pass, ``p.ggnmp`` and ``p.hmp`` are functions that multiply
vectors with the parameter's block of the generalized Gauss-Newton matrix (GGN) and of
the Hessian. Here they become an optimizer.
"""

from typing import Callable, List

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Module, Sequential, Sigmoid
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import GGNMP, HMP
from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils.examples import load_one_batch_mnist

# %%
# Conjugate gradients
# -------------------
# The GGN has no negative eigenvalues, so that a little damping makes the system
# definite. The Hessian may have some: CG stops when it meets one.


def solve(product: Callable[[Tensor], Tensor], b: Tensor, max_iter: int = 20) -> Tensor:
    """Solve ``A x = b`` up to a tenth of the norm, with A known by its products."""
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    squared = residual.square().sum()
    for _ in range(max_iter):
        image = product(direction)
        curvature = (direction * image).sum()
        if curvature <= 0:
            break
        x = x + squared / curvature * direction
        residual = residual - squared / curvature * image
        previous, squared = squared, residual.square().sum()
        if squared.sqrt() <= 0.1 * b.norm():
            break
        direction = residual + squared / previous * direction
    return x if x.any() else b


def newton_step(model: Module, field: str, damping: float, lr: float) -> None:
    """Solve ``(B + damping) step = -gradient`` for the block B of each parameter."""
    steps = []  # taken at the end: each product depends on all parameters
    for p in model.parameters():
        multiply = getattr(p, field)

        def product(v: Tensor, multiply=multiply) -> Tensor:
            """Multiply; the function takes several vectors at once, here one."""
            return multiply(v.unsqueeze(0)).squeeze(0) + damping * v

        steps.append(solve(product, -p.grad))
    with torch.no_grad():
        for p, step in zip(model.parameters(), steps):
            p.add_(step, alpha=lr)


# %%
# Train with three methods
# ------------------------
# With the same damping for both, the GGN is the better guide: where the Hessian has
# negative eigenvalues, conjugate gradients have to give up early.


def make_model() -> Module:
    """Make the same extended network each time."""
    torch.manual_seed(0)
    return extend(Sequential(Linear(784, 20), Sigmoid(), Linear(20, 10)).double())


torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=128, flat=True)
X, lossfunc = X.double(), extend(CrossEntropyLoss())


def train(method: str, num_steps: int = 15) -> List[float]:
    """Train, and return the loss before each step and at the end."""
    model, losses = make_model(), []
    extensions = {"SGD": [], "GGNMP": [GGNMP()], "HMP": [HMP()]}[method]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = lossfunc(model(X), y)
        with backpack(*extensions):
            loss.backward()
        losses.append(loss.item())
        if extensions:
            newton_step(model, extensions[0].savefield, damping=0.1, lr=0.5)
        else:
            optimizer.step()
    return [*losses, lossfunc(model(X), y).item()]


losses = {method: train(method) for method in ("SGD", "GGNMP", "HMP")}
fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for method, values in losses.items():
    ax.semilogy(values, "o-", label=method)
ax.set(xlabel="step", ylabel="training loss")
ax.legend()
ax.grid(alpha=0.3)
plt.show()

for method, values in losses.items():
    print(f"{method:<6} loss: {', '.join(f'{value:.3f}' for value in values[::5])}")
assert losses["GGNMP"][-1] < 0.5 * losses["HMP"][-1] < 0.5 * losses["SGD"][-1]

# %%
# Check
# -----
# The products agree with plain automatic differentiation.

model = make_model()
with backpack(GGNMP(), HMP()):
    lossfunc(model(X), y).backward()
for p in model.parameters():
    output, v = model(X), torch.rand_like(p)
    loss = lossfunc(output, y)
    (ggn_v,) = ggn_vector_product_from_plist(loss, output, [p], [v])
    (hessian_v,) = hessian_vector_product(loss, [p], [v])
    assert_close(p.ggnmp(v.unsqueeze(0))[0], ggn_v, rtol=1e-8, atol=1e-12)
    assert_close(p.hmp(v.unsqueeze(0))[0], hessian_v, rtol=1e-8, atol=1e-12)
