"""
Train with KFAC and EKFAC: fewer steps than SGD and Adam
========================================================

Gradient descent struggles with networks whose curvature differs a lot between
directions, such as deep ones with sigmoids. KFAC (Martens and Grosse, 2015) multiplies
the gradient of each layer with the inverse of a Kronecker product, which approximates
the layer's curvature; EKFAC (George et al., 2018) corrects the eigenvalues of that
product. Both come with the backward pass of the gradient. Here they meet SGD and Adam:
in steps, and in time.
"""

from functools import partial
from time import process_time
from typing import Callable, Dict, List, Optional, Tuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Module, Parameter, Sequential, Sigmoid
from torch.nn.functional import avg_pool2d
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import EKFAC, KFAC
from backpack.utils import kroneckers
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist

# %%
# KFAC
# ----
# A preconditioner says what the next backward pass shall compute, and then replaces the
# gradients. The step itself is up to any optimizer.
#
# Factors are averaged over steps, because those of one batch are noisy, and inverted
# every few steps only, because they change slowly. Damping is divided among the two
# factors of a weight by the size of their eigenvalues.

DAMPING, DECAY, EVERY = 1e-2, 0.9, 5


class WithKFAC:
    """Multiplies gradients with inverse Kronecker factors."""

    def __init__(self, params: List[Parameter]):
        """Store the parameters."""
        self.params, self.steps = params, 0
        self.factors: Dict[Tensor, List[Tensor]] = {}
        self.solve: Dict[Tensor, Callable[[Tensor], Tensor]] = {}

    def extensions(self) -> List:
        """List what the next backward pass shall compute."""
        return [KFAC()]

    def average(self) -> None:
        """Update the factors."""
        for p in self.params:
            averages = self.factors.setdefault(p, [f.clone() for f in p.kfac])
            for average, factor in zip(averages, p.kfac):
                average.lerp_(factor, 1 - DECAY)

    def update(self) -> None:
        """Update the inverses."""
        self.average()
        if self.steps % EVERY == 0:
            for p, factors in self.factors.items():
                inverses = kroneckers.damped_inv_kfacs(factors, DAMPING)
                self.solve[p] = kroneckers.kfac_mat_prod(inverses)

    @torch.no_grad()
    def precondition(self) -> None:
        """Replace the gradients."""
        self.update()
        for p, solve in self.solve.items():
            p.grad.copy_(solve(p.grad.flatten()).reshape(p.shape))
        self.steps += 1


# %%
# EKFAC
# -----
# The eigenvectors of KFAC's averages are a basis in which the curvature is nearly
# diagonal. ``EKFAC(basis=...)`` computes that diagonal, which is averaged in turn.
# Damping is exact: it is added to each eigenvalue of the product.


class WithEKFAC(WithKFAC):
    """Divides by corrected eigenvalues, in the eigenvectors of Kronecker factors."""

    def extensions(self) -> List:
        """List what the next backward pass shall compute."""
        if self.steps == 0:
            return [KFAC()]
        kfac = [KFAC()] if self.steps % EVERY == 0 else []
        return [EKFAC(basis=self.basis), *kfac]

    def update(self) -> None:
        """Update the eigenvectors, and the eigenvalues in them."""
        if self.steps > 0:
            for p in self.params:
                self.basis[p][-1].lerp_(p.ekfac[-1], 1 - DECAY)
        if self.steps % EVERY == 0:
            self.average()
            factors = self.factors.items()
            self.basis = {p: kroneckers.eigen_kfacs(f) for p, f in factors}
        for p, ekfac in self.basis.items():
            self.solve[p] = kroneckers.ekfac_mat_prod(ekfac, -1, damping=DAMPING)


# %%
# Learning curves
# ---------------
# A network with two hidden layers of sigmoids, on MNIST images of 14 x 14 pixels. Each
# method gets the best of three learning rates.

images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
images, lossfunc = avg_pool2d(images, 2).flatten(1), extend(CrossEntropyLoss())


def make_model() -> Module:
    """Make the same extended network each time."""
    torch.manual_seed(0)
    layers = [Linear(196, 40), Sigmoid(), Linear(40, 20), Sigmoid(), Linear(20, 10)]
    return extend(Sequential(*layers))


def train(lr: float, method: Optional[type], optimizer: Callable) -> Tuple:
    """Return the loss before each of 100 steps, and the seconds until then."""
    model, losses, times = make_model(), [], [0.0]
    params = list(model.parameters())
    how, optimizer = method and method(params), optimizer(params, lr=lr)
    for _ in range(100):
        batch = torch.randint(1000, (200,))
        with torch.no_grad():
            losses.append(CrossEntropyLoss()(model(images), labels).item())
        start = process_time()
        optimizer.zero_grad()
        with backpack(*(how.extensions() if how else [])):
            lossfunc(model(images[batch]), labels[batch]).backward()
        if how:
            how.precondition()
        optimizer.step()
        times.append(times[-1] + process_time() - start)
    return losses, times[:-1]


sgd = partial(torch.optim.SGD, momentum=0.9)
METHODS = {
    "SGD": ((0.3, 1.0, 3.0), None, sgd),
    "Adam": ((0.01, 0.03, 0.1), None, torch.optim.Adam),
    "KFAC": ((0.03, 0.1, 0.3), WithKFAC, sgd),
    "EKFAC": ((0.01, 0.03, 0.1), WithEKFAC, sgd),
}
fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
needed, goal = {}, 0.0
for name, (rates, *how) in METHODS.items():
    runs = {lr: train(lr, *how) for lr in rates}
    lr = min(runs, key=lambda lr: runs[lr][0][-1])
    losses, times = runs[lr]
    axes[0].semilogy(losses, label=f"{name}, learning rate {lr}")
    axes[1].semilogy(times, losses)
    goal = goal if needed else losses[-1]  # where SGD ends
    needed[name] = next(step for step, loss in enumerate(losses) if loss <= goal)
    print(f"{name}: loss {losses[-1]:.3f} after 100 steps, {times[-1]:.1f} s", end="; ")
    print(f"{goal:.3f} after {needed[name]} steps, {times[needed[name]]:.1f} s")
axes[0].set(xlabel="step", ylabel="loss on all images")
axes[1].set(xlabel="seconds of processor time")
axes[0].legend()
plt.show()
assert needed["KFAC"] < 0.6 * needed["SGD"]
assert max(needed["KFAC"], needed["EKFAC"]) < min(needed["SGD"], needed["Adam"])

# %%
# In steps, curvature wins by far. In time, it depends on what a step costs: matrices
# are inverted, and on a network as small as this one, a plain step is little more than
# the overhead of Python.
#
# Check
# -----
# With all columns instead of drawn ones, all eigenvalues add up to the trace of the
# Gauss-Newton matrix, which plain automatic differentiation knows as well: slowly, so
# that the network is a smaller one here.

model = extend(Sequential(Linear(49, 20), Sigmoid(), Linear(20, 10))).double()
X, y, loss = images[:5, ::4].double(), labels[:5], CrossEntropyLoss()
with backpack(EKFAC(fisher_type="exact")):
    lossfunc(model(X), y).backward()
diagonal = autograd_diag_ggn_exact(X, y, model, loss)
traces = torch.stack([p.ekfac[-1].sum() for p in model.parameters()])
assert_close(traces.sum(), diagonal.sum(), rtol=1e-8, atol=1e-12)
