"""
Pruning by curvature
====================

Which weights of a trained network can go? Small ones, one may think. But a small weight
may matter a lot, where the loss is curved. To second order, setting a weight w to zero
raises the loss by w² G / 2, with its entry G on the diagonal of the curvature matrix
(LeCun et al., 1990, "Optimal brain damage"). ``DiagGGNExact`` has it for all weights,
from one pass.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import DiagGGNExact
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist

torch.manual_seed(0)
images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False, flat=True)
images = images * 0.3081 + 0.1307  # from 0 for black to 1 for white
model = extend(Sequential(Linear(784, 30), Tanh(), Linear(30, 10)))
lossfunc, params = extend(CrossEntropyLoss()), list(model.parameters())
optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)
for _ in range(60):
    batch = torch.randint(1000, (100,))
    optimizer.zero_grad()
    lossfunc(model(images[batch]), labels[batch]).backward()
    optimizer.step()

# %%
# Saliencies
# ----------

with backpack(DiagGGNExact()):
    lossfunc(model(images), labels).backward()
weights = parameters_to_vector(params).detach().clone()
curvature = parameters_to_vector([p.diag_ggn_exact for p in params])
scores = {
    "by curvature: w² G / 2": weights.square() * curvature / 2,
    "by magnitude: |w|": weights.abs(),
    "at random": torch.rand_like(weights),
}

# %%
# Prune
# -----
# No training in between, and no training afterwards: how far does it get? Half of the
# weights go for nearly nothing, and curvature knows best which ones. Beyond that,
# weights that go together add up to more than the sum of what each of them costs, which
# a diagonal can't know, and magnitude is the better guide. (Pruning in steps, with
# training and a new diagonal after each of them, is the way to go further.)

shares = [0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97]
losses = {name: [] for name in scores}
for name, score in scores.items():
    order = score.argsort()
    for share in shares:
        pruned = weights.clone()
        pruned[order[: int(share * len(order))]] = 0.0
        vector_to_parameters(pruned, params)
        with torch.no_grad():
            losses[name].append(CrossEntropyLoss()(model(images), labels).item())
vector_to_parameters(weights, params)

# %%
# Pixels at the border are always black: G is zero there, and a weight of any size can
# go.

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, values in losses.items():
    left.plot([100 * share for share in shares], values, "o-", label=name)
left.set(xlabel="% of the weights pruned", ylabel="loss", ylim=(0, 3))
left.legend()
left.grid(alpha=0.3)
by_pixel = scores["by curvature: w² G / 2"][: 30 * 784].reshape(30, 28, 28).sum(0)
right.imshow(by_pixel.log10().clamp(min=-8).numpy(), cmap="magma")
right.set_title("log10 of the saliency of each pixel's weights", fontsize=10)
right.axis("off")
plt.show()

by_curvature, by_magnitude, at_random = losses.values()
for share, *values in zip(shares, *losses.values()):
    print(f"{100 * share:>3.0f} %: loss", ", ".join(f"{value:.3f}" for value in values))
for index in (1, 2, 3):
    assert by_curvature[index] < by_magnitude[index] < at_random[index]
assert by_curvature[3] < 1.05 * by_curvature[0], "half of them go for nearly nothing"

# %%
# Check
# -----
# Some entries of the diagonal, by plain automatic differentiation.

X, y, model = images[:10].double(), labels[:10], model.double()
with backpack(DiagGGNExact()):
    lossfunc(model(X), y).backward()
diagonal = parameters_to_vector([p.diag_ggn_exact for p in model.parameters()])
idx = list(range(300, len(diagonal), 1001))
expected = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(), idx=idx)
assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
