"""
Differential privacy: clip each sample's gradient, then add noise
=================================================================

A network trained in the usual way may remember single images. DP-SGD (Abadi et al.,
2016, "Deep learning with differential privacy") prevents that by two changes to the
gradient: each sample's gradient is scaled down until its norm is at most C, so that no
image can have more influence than that; and normal noise with a standard deviation
proportional to C hides what influence is left.
"""

from typing import List

import matplotlib.pyplot as plt
import torch
from torch import Tensor, einsum
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    Parameter,
    ReLU,
    Sequential,
)
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad
from backpack.utils.examples import get_mnist_dataloader, load_one_batch_mnist

# %%
# A private step
# --------------
# Clipping needs individual gradients and their norms over *all* parameters. One
# backward pass gives both: ``BatchGrad`` the gradients, ``BatchL2Grad`` the squared
# norms for each parameter. With ``reduction="sum"`` they are the samples' own
# gradients; with a mean, each would have a factor 1/N.

lossfunc = extend(CrossEntropyLoss(reduction="sum"))


def norms(params: List[Parameter]) -> Tensor:
    """Return the norm of each sample's gradient, over all parameters: ``[N]``."""
    return sum(p.batch_l2 for p in params).sqrt()


def clipped(params: List[Parameter], max_norm: float) -> List[Tensor]:
    """Scale each sample's gradient down to a norm of at most ``max_norm``."""
    scales = (max_norm / norms(params)).clamp(max=1.0)
    return [einsum("n,n...->n...", scales, p.grad_batch) for p in params]


@torch.no_grad()
def private_step(
    params: List[Parameter], lr: float, max_norm: float, noise: float
) -> None:
    """Step along the mean of the clipped gradients, with noise in their sum."""
    for p, gradients in zip(params, clipped(params, max_norm)):
        total = gradients.sum(0) + noise * max_norm * torch.randn_like(p)
        p.sub_(lr * total / len(gradients))


# %%
# The price of privacy
# --------------------
# The more noise there is, the less the network learns. How much privacy is spent after
# so many steps is another question, which takes an accountant from a privacy library.


def make_model() -> Module:
    """Make the same extended network each time."""
    torch.manual_seed(0)
    layers = [Conv2d(1, 8, 5, stride=2), ReLU(), MaxPool2d(2), Flatten()]
    return extend(Sequential(*layers, Linear(288, 10)))


images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
accuracies, all_norms = {}, []
for noise in (0.0, 1.0, 10.0):
    model, accuracies[noise] = make_model(), []
    params = list(model.parameters())
    for _epoch in range(3):
        for X, y in get_mnist_dataloader(batch_size=100):
            with backpack(BatchGrad(), BatchL2Grad()):
                lossfunc(model(X), y).backward()
            if noise == 1.0:
                all_norms.append(norms(params))
            private_step(params, lr=0.5, max_norm=1.0, noise=noise)
            with torch.no_grad():
                correct = (model(images).argmax(dim=1) == labels).double().mean()
            accuracies[noise].append(correct.item())

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for noise, values in accuracies.items():
    left.plot(values, label=f"noise {noise:g}")
    print(f"noise {noise:>4}: {100 * values[-1]:.1f} % of the images are correct")
left.set(xlabel="step", ylabel="share of correct images", ylim=(0, 1))
left.legend()
right.hist(all_norms[0].tolist(), 20, alpha=0.6, label="first step")
right.hist(all_norms[-1].tolist(), 20, alpha=0.6, label="last step")
right.axvline(1.0, color="k", linestyle="--", label="clipped to this norm")
right.set(xlabel="norm of a sample's gradient", ylabel="samples (noise 1)")
right.legend()
plt.show()
assert accuracies[0.0][-1] > 0.7
assert accuracies[1.0][-1] > accuracies[10.0][-1], "more noise, less accuracy"

# %%
# Check
# -----
# Clipped gradients have the norms they should, and they are those of a loop over
# samples.

X, y, model = images[:8].double(), labels[:8], make_model().double()
params = list(model.parameters())
with backpack(BatchGrad(), BatchL2Grad()):
    lossfunc(model(X), y).backward()
before, result = norms(params), clipped(params, max_norm=2.0)
after = torch.cat([g.flatten(1) for g in result], dim=1).norm(dim=1)
assert before.max() > 2
assert_close(after, before.clamp(max=2.0), rtol=1e-8, atol=1e-12)
for n in range(len(X)):
    loss = CrossEntropyLoss()(model(X[[n]]), y[[n]])
    grads = torch.autograd.grad(loss, params)
    norm = torch.cat([g.flatten() for g in grads]).norm()
    for actual, g in zip(result, grads):
        assert_close(actual[n], g * min(1.0, 2 / norm.item()), rtol=1e-8, atol=1e-12)
print("Clipping agrees with a loop over samples.")
