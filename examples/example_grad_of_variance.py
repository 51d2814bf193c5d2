"""
Differentiate what BackPACK computes
====================================

A quantity is a function of the network's parameters, and sometimes you want to change
the parameters so that it becomes smaller or larger. Build the graph of the backward
pass (``create_graph=True``), and the fields of the parameters become part of it. From
there, it is ordinary automatic differentiation.

The quantity of this example is the noise of stochastic gradients: the variance of the
individual gradients, summed over all entries. We follow its gradient downhill, together
with the loss. The network learns as usual, while its samples pull in more similar
directions.
"""

from typing import List, Tuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, Module, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import Variance
from backpack.utils.examples import load_one_batch_mnist

# %%
# A quantity in the graph
# -----------------------
# We call ``torch.autograd.grad`` rather than ``backward``, which would store a gradient
# that is itself part of a graph in ``.grad``, and warn that such graphs are not freed.

lossfunc = extend(CrossEntropyLoss())


def noise(model: Module, X: Tensor, y: Tensor) -> Tuple:
    """Return the loss, its gradient, and the noise as a part of the graph."""
    loss, params = lossfunc(model(X), y), list(model.parameters())
    with backpack(Variance()):
        gradient = torch.autograd.grad(loss, params, create_graph=True)
    # times N squared: without the factor 1/N of the mean loss in each summand
    return loss, gradient, len(X) ** 2 * sum(p.variance.sum() for p in params)


# %%
# Minimize the loss plus a multiple of the noise
# ----------------------------------------------


def make_model() -> Module:
    """Make the same extended network each time."""
    torch.manual_seed(0)
    layers = [Conv2d(1, 4, 6, stride=4), Tanh(), Flatten(), Linear(144, 10)]
    return extend(Sequential(*layers).double())


def train(weight: float, num_steps: int = 60, lr: float = 0.1) -> List[List[float]]:
    """Return losses and noises before each step."""
    model, history = make_model(), []
    params = list(model.parameters())
    for _ in range(num_steps):
        loss, gradient, variance = noise(model, X, y)
        of_noise = torch.autograd.grad(variance, params)
        with torch.no_grad():
            for p, g, h in zip(params, gradient, of_noise):
                p.sub_(lr * (g + weight * h))
        history.append([loss.item(), variance.item()])
    return [list(values) for values in zip(*history)]


torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=100)
X = X.double()
results = {weight: train(weight) for weight in (0.0, 0.01, 0.02)}

fig, axes = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
for weight, (losses, noises) in results.items():
    print(
        f"weight of the noise {weight}: loss {losses[-1]:.3f}, noise {noises[-1]:.3f}"
    )
    axes[0].plot(losses, label=f"weight of the noise {weight}")
    axes[1].plot(noises)
axes[0].set(xlabel="step", ylabel="loss")
axes[0].legend()
axes[1].set(xlabel="step", ylabel="noise: variance of the gradients")
plt.show()
assert results[0.02][1][-1] < results[0.01][1][-1] < results[0.0][1][-1]

# %%
# Check
# -----
# The noise and its gradient agree with plain automatic differentiation, where the
# individual gradients are computed sample by sample.

model, X, y = make_model(), X[:8], y[:8]
params, rows = list(model.parameters()), []
_, _, variance = noise(model, X, y)
for x, label in zip(X.split(1), y.split(1)):
    loss = CrossEntropyLoss()(model(x), label)
    grads = torch.autograd.grad(loss, params, create_graph=True)
    rows.append(torch.cat([g.flatten() for g in grads]))
expected = torch.stack(rows).var(0, unbiased=False).sum()
assert_close(variance, expected, rtol=1e-8, atol=1e-12)
for g, g_expected in zip(
    torch.autograd.grad(variance, params), torch.autograd.grad(expected, params)
):
    assert_close(g, g_expected, rtol=1e-8, atol=1e-12)
