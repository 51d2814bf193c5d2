"""
An optimizer that uses curvature
================================

Gradient descent takes the same learning rate for all parameters, though the loss bends
strongly in some directions and hardly in others. The diagonal of the generalized
Gauss-Newton matrix (GGN) tells the two apart, entry by entry. With learning rate and
damping, the update is

.. math:: p \\leftarrow p - \\eta \\; \\frac{g}{\\mathrm{diag}(G) + \\lambda} \\,.
"""

from typing import Iterable, List

import matplotlib.pyplot as plt
import torch
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Parameter,
    ReLU,
    Sequential,
)
from torch.optim import SGD, Optimizer
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import DiagGGNExact, DiagGGNMC
from backpack.utils.examples import (
    autograd_diag_ggn_exact,
    get_mnist_dataloader,
    load_one_batch_mnist,
)

# %%
# The optimizer
# -------------
# It finds the diagonal where it finds the gradient: on the parameter.


class DiagGGNOptimizer(Optimizer):
    """Gradient descent, where each entry has a step size of its own."""

    def __init__(
        self, params: Iterable[Parameter], field: str, lr: float, damping: float = 0.1
    ):
        """Set the options; ``field`` is where the diagonal is found."""
        super().__init__(params, {"lr": lr, "damping": damping, "field": field})

    @torch.no_grad()
    def step(self) -> None:
        """Make a step, after a backward pass that has set gradient and diagonal."""
        for group in self.param_groups:
            for p in group["params"]:
                curvature = getattr(p, group["field"]) + group["damping"]
                p.addcdiv_(p.grad, curvature, value=-group["lr"])


# %%
# Train with it
# -------------
# The exact diagonal needs as many columns as there are classes, pulled back through the
# network. ``DiagGGNMC`` draws a few random ones instead, which is cheaper, and takes a
# smaller learning rate, because it is noisy.


def make_model() -> Sequential:
    """Make the network, with the same parameters each time."""
    torch.manual_seed(0)
    model = Sequential(
        *(Conv2d(1, 6, 5, stride=2), ReLU(), MaxPool2d(2)),
        *(Flatten(), Linear(216, 20), ReLU(), Linear(20, 10)),
    )
    return extend(model)


images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
lossfunc = extend(CrossEntropyLoss())


def train(extensions: List, lr: float, epochs: int = 3) -> List[float]:
    """Train, and return the loss on all images, before training and every 4 steps."""
    model, losses, steps = make_model(), [], 0
    optimizer: Optimizer = SGD(model.parameters(), lr=lr)
    if extensions:
        field = extensions[0].savefield
        optimizer = DiagGGNOptimizer(model.parameters(), field, lr=lr)
    for _ in range(epochs):
        for X, y in get_mnist_dataloader(batch_size=64):
            if steps % 4 == 0:
                with torch.no_grad():
                    losses.append(CrossEntropyLoss()(model(images), labels).item())
            optimizer.zero_grad()
            with backpack(*extensions):
                lossfunc(model(X), y).backward()
            optimizer.step()
            steps += 1
    return losses


losses = {
    "gradient descent": train([], lr=0.1),
    "DiagGGNExact": train([DiagGGNExact()], lr=0.03),
    "DiagGGNMC": train([DiagGGNMC(mc_samples=5)], lr=0.02),
}
fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for name, values in losses.items():
    ax.plot(range(0, 4 * len(values), 4), values, label=name)
    print(f"{name:<17} loss {values[-1]:.3f}")
ax.set(xlabel="step", ylabel="loss on all images")
ax.legend()
ax.grid(alpha=0.3)
plt.show()
sgd, exact, sampled = (values[-1] for values in losses.values())
assert max(exact, sampled) < sgd

# %%
# Check
# -----
# Some entries of the diagonal agree with plain automatic differentiation.

X, y, model = images[:10].double(), labels[:10], make_model().double()
with backpack(DiagGGNExact()):
    lossfunc(model(X), y).backward()
diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
idx = list(range(0, len(diagonal), 101))
expected = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(), idx=idx)
assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
