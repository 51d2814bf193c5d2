"""
Train with KFAC: fewer steps than SGD
=====================================

Gradient descent struggles with networks whose curvature differs a lot between
directions, such as deep ones with sigmoids. KFAC (Martens and Grosse, 2015) multiplies
the gradient of each layer with the inverse of two small matrices, which approximate the
layer's curvature. ``KFAC`` computes them in the backward pass of the gradient; what is
left is an optimizer of thirty lines.
"""

from typing import Dict, List

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Module, Parameter, Sequential, Sigmoid
from torch.nn.functional import avg_pool2d
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import KFAC, KFLR
from backpack.utils.examples import load_one_batch_mnist
from backpack.utils.kroneckers import inv_kfac_mat_prod

# %%
# The optimizer
# -------------
# Factors are averaged over steps, because those of one batch are noisy, and inverted
# every few steps only, because they change slowly. Damping is added to both factors of
# a weight, such that larger eigenvalues get more of it: in the ratio of their mean
# eigenvalues, whose product is the damping of the block.


class KFACOptimizer:
    """Gradient descent, preconditioned with Kronecker factors."""

    def __init__(self, params: List[Parameter], lr: float, damping: float):
        """Set the options."""
        self.params, self.lr, self.damping, self.steps = params, lr, damping, 0
        self.factors: Dict[Parameter, List[Tensor]] = {}
        self.solve: Dict[Parameter, object] = {}

    def shifts(self, factors: List[Tensor]) -> List[float]:
        """Split the damping among the factors."""
        if len(factors) == 1:
            return [self.damping]
        B, A = (factor.diag().mean() for factor in factors)
        return [
            (self.damping * B / A).sqrt().item(),
            (self.damping * A / B).sqrt().item(),
        ]

    @torch.no_grad()
    def step(self, decay: float = 0.9, update_every: int = 3) -> None:
        """Make a step, after a backward pass with KFAC."""
        for p in self.params:
            averages = self.factors.setdefault(p, [f.clone() for f in p.kfac])
            for average, factor in zip(averages, p.kfac):
                average.lerp_(factor, 1 - decay)
            if self.steps % update_every == 0:
                self.solve[p] = inv_kfac_mat_prod(averages, self.shifts(averages))
            p.sub_(self.lr * self.solve[p](p.grad.flatten()).reshape(p.shape))
        self.steps += 1


# %%
# Learning curves
# ---------------
# A network with two hidden layers of sigmoids, on MNIST images of 14 x 14 pixels. SGD
# gets the best of a few learning rates, with momentum.

images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
images, lossfunc = avg_pool2d(images, 2).flatten(1), extend(CrossEntropyLoss())


def make_model() -> Module:
    """Make the same extended network each time."""
    torch.manual_seed(0)
    layers = [Linear(196, 40), Sigmoid(), Linear(40, 20), Sigmoid(), Linear(20, 10)]
    return extend(Sequential(*layers))


def train(make_optimizer, extensions: List, num_steps: int = 100) -> List[float]:
    """Return the loss on all images before each step."""
    model, losses = make_model(), []
    optimizer = make_optimizer(list(model.parameters()))
    for _ in range(num_steps):
        batch = torch.randint(1000, (200,))
        with torch.no_grad():
            losses.append(CrossEntropyLoss()(model(images), labels).item())
        model.zero_grad()
        with backpack(*extensions):
            lossfunc(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return losses


curves = {
    f"SGD, learning rate {lr}": train(
        lambda params, lr=lr: torch.optim.SGD(params, lr=lr, momentum=0.9), []
    )
    for lr in (0.1, 0.3, 1.0)
}
kfac = train(lambda params: KFACOptimizer(params, lr=0.3, damping=1e-2), [KFAC()])
best = min((c for c in curves.values()), key=lambda curve: min(curve))

fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for name, curve in curves.items():
    ax.semilogy(curve, color="C0", alpha=1.0 if curve is best else 0.3, label=name)
ax.semilogy(kfac, color="C1", label="KFAC")
ax.set(xlabel="step", ylabel="loss on all images")
ax.legend()
ax.grid(alpha=0.3)
plt.show()

needed = next(step for step, loss in enumerate(kfac) if loss <= min(best))
print(f"SGD: {min(best):.3f} after {len(best)} steps. KFAC needs {needed} for that.")
assert needed < 0.6 * len(best)

# %%
# Check
# -----
# With all columns instead of drawn ones, a factor is what autograd says: that of the
# last bias is the Hessian of the loss with respect to the output, summed over samples.

model = make_model().double()
X, y = images[:5].double(), labels[:5]
with backpack(KFLR()):
    lossfunc(model(X), y).backward()
output = model(X).detach()
hessian = torch.autograd.functional.hessian(lambda f: lossfunc(f, y), output)
assert_close(model[4].bias.kflr[0], hessian.sum((0, 2)), rtol=1e-8, atol=1e-12)
assert_close(model[0].weight.kflr[1], X.T @ X / 5, rtol=1e-8, atol=1e-12)
