"""
The spectrum of the curvature
=============================

The generalized Gauss-Newton matrix (GGN) of a network with ten thousand weights has a
hundred million entries. Its rank is small, though: at most N times C, samples times
outputs. ``SqrtGGNExact`` is a root V, with GGN = V Vᵀ. The small matrix Vᵀ V has the
same nonzero eigenvalues, and its eigenvectors, times V, are those of the GGN (Dangel et
al., 2022, "ViViT"). What you see here is well known of trained networks: a few
directions carry most of the curvature, as many as there are classes, and much of the
gradient is in them.
"""

from typing import Tuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import SqrtGGNExact
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
layers = [Conv2d(1, 6, 5, stride=2), Tanh(), Flatten(), Linear(864, 10)]
model, lossfunc = extend(Sequential(*layers)), extend(CrossEntropyLoss())
params = list(model.parameters())
X, y = images[:60], labels[:60]

# %%
# Eigenvalues and eigenvectors
# ----------------------------


def spectrum() -> Tuple[Tensor, Tensor]:
    """Return eigenvalues ``[K]``, largest first, and eigenvectors ``[D, K]``."""
    model.zero_grad()
    with backpack(SqrtGGNExact()):
        lossfunc(model(X), y).backward()
    V = torch.cat([p.sqrt_ggn_exact.flatten(2).flatten(0, 1) for p in params], dim=1).T
    values, small = torch.linalg.eigh(V.T @ V)
    values, small = values.flip(0)[:100], small.flip(1)[:, :100]
    return values, V @ small / values.clamp(min=1e-12).sqrt()


def overlap(vectors: Tensor) -> float:
    """Return the share of the gradient that lies in the first ten eigenvectors."""
    gradient = torch.cat([p.grad.flatten() for p in params])
    return ((vectors[:, :10].T @ gradient).norm() / gradient.norm()).square().item()


optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
spectra, overlaps = {}, []
for step in range(61):
    if step % 10 == 0:
        values, vectors = spectrum()
        spectra[step] = values
        overlaps.append(overlap(vectors))
    batch = torch.randint(1000, (100,))
    optimizer.zero_grad()
    lossfunc(model(images[batch]), labels[batch]).backward()
    optimizer.step()

# %%
# Few directions carry most
# -------------------------

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for step in (0, 20, 60):
    left.semilogy(
        range(1, 101), spectra[step].clamp(min=1e-6), ".", label=f"step {step}"
    )
left.axvline(10, color="k", linestyle=":", label="number of classes")
left.set(xlabel="number of the eigenvalue", ylabel="eigenvalue of the GGN")
left.legend()
right.plot(list(spectra), overlaps, "o-")
right.axhline(10 / sum(p.numel() for p in params), color="k", linestyle=":")
right.text(25, 0.03, "of a random vector", fontsize=9)
right.set(xlabel="step", ylim=(0, 1))
right.set_ylabel("share of the gradient in ten eigenvectors")
plt.show()

print(
    f"{sum(p.numel() for p in params)} weights; {100 * min(overlaps):.0f} % of the",
    end=" ",
)
print("gradient, or more, lie in ten eigenvectors.")
assert min(overlaps) > 0.15 > 100 * 10 / len(vectors)

# %%
# Check
# -----
# Products of eigenvectors with the GGN, by plain automatic differentiation.

model, X = model.double(), X.double()
params = list(model.parameters())
values, vectors = spectrum()
for k in (0, 5, 40):
    output = model(X)
    loss, parts = lossfunc(output, y), []
    split = vectors[:, k].split([p.numel() for p in params])
    v = [part.reshape(p.shape) for part, p in zip(split, params)]
    product = ggn_vector_product(loss, output, model, v)
    for actual, expected in zip(product, v):
        assert_close(actual, values[k] * expected, rtol=1e-6, atol=1e-10)
print("They are eigenvectors.")
