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
from torch import Tensor
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
)
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import ClippedGrad
from backpack.utils.examples import load_one_batch_mnist

try:  # counts how much privacy is spent
    from opacus.accountants import RDPAccountant
except ImportError:
    RDPAccountant = None

# %%
# A private step
# --------------
# Clipping needs the norms over *all* parameters before the first gradient can be
# summed. ``ClippedGrad`` does both in one backward pass, and forms no individual
# gradient of a layer where its factors are smaller. With ``replace_grad=True`` the sum
# of clipped gradients is what ``.grad`` gets, so that any optimizer can take over.
#
# The loss is a sum: its summands are the samples' own losses. With a mean,
# ``scale="sample"`` says that these are meant.

images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
lossfunc = extend(CrossEntropyLoss(reduction="sum"))
MAX_NORM, RATE = 1.0, 0.1  # of a gradient; chance of an image to be in a batch
clipping = ClippedGrad(MAX_NORM, replace_grad=True)


def private_gradient(model: Module, X: Tensor, y: Tensor, noise: float) -> None:
    """Set ``.grad`` to the mean of the clipped gradients, with noise."""
    model.zero_grad()
    with backpack(clipping):
        lossfunc(model(X), y).backward()
    for p in model.parameters():
        p.grad += noise * MAX_NORM * torch.randn_like(p)
        p.grad /= RATE * len(images)


# %%
# The price of privacy
# --------------------
# The more noise there is, the less the network learns. How much privacy is spent, an
# accountant counts: here that of Opacus, if it is installed. It takes for granted that
# each image is in a batch by chance, independently of all others.


def make_model() -> Module:
    """Make the same extended network each time."""
    torch.manual_seed(0)
    layers = [Conv2d(1, 8, 5, stride=2), ReLU(), MaxPool2d(2), Flatten()]
    return extend(Sequential(*layers, Linear(288, 10)))


def train(noise: float, steps: int = 30) -> List[float]:
    """Train privately, and return the share of correct images after each step."""
    model, correct = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        batch = torch.rand(len(images)) < RATE
        private_gradient(model, images[batch], labels[batch], noise)
        optimizer.step()
        norms.append(clipping.norms)
        with torch.no_grad():
            correct.append((model(images).argmax(1) == labels).double().mean().item())
    return correct


def spent(noise: float, steps: int = 30) -> str:
    """Return the privacy that a training has spent, in words."""
    if not noise or RDPAccountant is None:
        return "not private" if not noise else "Opacus would count what is spent"
    accountant = RDPAccountant()
    for _ in range(steps):
        accountant.step(noise_multiplier=noise, sample_rate=RATE)
    return f"privacy ε = {accountant.get_epsilon(delta=1e-4):.2g}, δ = 0.0001"


fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
accuracies = {}
for noise in (0.0, 10.0, 1.0):
    norms: List[Tensor] = []
    accuracies[noise] = train(noise)
    left.plot(accuracies[noise], label=f"noise {noise:g}: {spent(noise)}")
    share = 100 * accuracies[noise][-1]
    print(f"noise {noise:>4}: {share:.1f} % of the images are correct; {spent(noise)}")
left.set(xlabel="step", ylabel="share of correct images", ylim=(0, 1.1))
left.legend(fontsize=8)
right.hist(norms[0].tolist(), 20, alpha=0.6, label="first step")
right.hist(norms[-1].tolist(), 20, alpha=0.6, label="last step")
right.axvline(MAX_NORM, color="k", linestyle="--", label="clipped to this norm")
right.set(xlabel="norm of a sample's gradient", ylabel="samples (noise 1)")
right.legend()
plt.show()
assert accuracies[0.0][-1] > 0.7
assert accuracies[1.0][-1] > accuracies[10.0][-1], "more noise, less accuracy"

# %%
# Check
# -----
# Clipped gradients have the norms they should, and their sum is that of a loop over
# samples.

X, y, model = images[:8].double(), labels[:8], make_model().double()
private_gradient(model, X, y, noise=0.0)
assert clipping.norms.max() > MAX_NORM
clipped = clipping.weights * clipping.norms
assert_close(clipped, clipping.norms.clamp(max=MAX_NORM), rtol=1e-8, atol=1e-12)
params = list(model.parameters())
expected = [torch.zeros_like(p) for p in params]
for n in range(len(X)):
    loss = CrossEntropyLoss()(model(X[[n]]), y[[n]])
    grads = torch.autograd.grad(loss, params)
    norm = torch.cat([g.flatten() for g in grads]).norm()
    assert_close(norm, clipping.norms[n], rtol=1e-8, atol=1e-12)
    for total, g in zip(expected, grads):
        total += g * min(1.0, MAX_NORM / norm.item()) / (RATE * len(images))
assert_close([p.grad for p in params], expected, rtol=1e-8, atol=1e-12)
print("Clipping agrees with a loop over samples.")
