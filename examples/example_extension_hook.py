"""
Keep a summary, and free the memory
===================================

Individual gradients of all parameters together take as much memory as the batch has
copies of the network. Often that much is not needed: all you want is a number for each
sample. An *extension hook* is a function that BackPACK calls for each module as soon as
the extensions have run on it, from the loss back to the first layer. It may read the
results, and delete them, before the next layer's are computed.
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
    ReLU,
    Sequential,
)
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad
from backpack.utils.examples import load_one_batch_mnist

# %%
# A hook with a memory
# --------------------
# This one computes the cosine between each sample's gradient and the mean gradient:
# which images agree with the step that the batch takes, and which work against it.


class CosineHook:
    """Adds up inner products with the mean gradient, layer by layer."""

    def __init__(self, model: Module):
        """Start with zeros."""
        self._names = {module: name for name, module in model.named_modules()}
        self._params = list(model.parameters())
        self._dots = self._squares = self._mean_square = 0.0
        self.visited: List[str] = []
        self.most_numbers = 0

    def __call__(self, module: Module) -> None:
        """Read the individual gradients of one module, and delete them."""
        self.visited.append(self._names.get(module, "loss"))
        saved = [p.grad_batch for p in self._params if hasattr(p, "grad_batch")]
        self.most_numbers = max(self.most_numbers, sum(g.numel() for g in saved))
        for p in module.parameters(recurse=False):
            # summands of the gradient: their sum is the mean loss's gradient
            gradients = p.grad_batch.flatten(start_dim=1)
            mean = gradients.sum(0)
            self._dots = self._dots + einsum("np,p->n", gradients, mean)
            self._squares = self._squares + gradients.square().sum(1)
            self._mean_square = self._mean_square + mean.square().sum()
            del p.grad_batch

    def cosines(self) -> Tensor:
        """Return cosines ``[N]``, after the backward pass."""
        return self._dots / (self._squares * self._mean_square).sqrt()


# %%
# Use it
# ------
# Never do the individual gradients of two layers exist at the same time.

torch.manual_seed(0)
layers = [Conv2d(1, 8, 5, stride=2), ReLU(), MaxPool2d(2), Conv2d(8, 16, 3), ReLU()]
model = extend(Sequential(*layers, Flatten(), Linear(256, 10)).double())
lossfunc = extend(CrossEntropyLoss())
X, y = load_one_batch_mnist(batch_size=256)
X = X.double()

hook = CosineHook(model)
with backpack(BatchGrad(), extension_hook=hook):
    lossfunc(model(X), y).backward()
print(f"The hook was called for: {', '.join(hook.visited)}")
total = len(X) * sum(p.numel() for p in model.parameters())
print(f"At most {hook.most_numbers} numbers were kept at a time, instead of {total}.")

# %%
# Images at both ends
# -------------------
# The first step of an untrained network goes where most images pull. Those of the lower
# row pull back.

cosines = hook.cosines()
ranks = cosines.argsort(descending=True)
fig = plt.figure(figsize=(9, 3.2), layout="constrained")
left, right = fig.subfigures(1, 2, width_ratios=[1, 1.4])
ax = left.subplots()
ax.hist(cosines.tolist(), 30)
ax.axvline(0, color="k", linestyle="--")
ax.set(xlabel="cosine with the mean gradient", ylabel="images")
shown = torch.cat([ranks[:8], ranks[-8:]])
for ax, n in zip(right.subplots(2, 8).flat, shown.tolist()):
    ax.imshow(X[n, 0].numpy(), cmap="gray")
    ax.set_title(f"{cosines[n]:.2f}", fontsize=9)
    ax.axis("off")
plt.show()
print(f"{int((cosines < 0).sum())} of {len(X)} images work against the mean gradient.")

# %%
# Check
# -----
# The same with plain automatic differentiation, sample by sample.

params, rows = list(model.parameters()), []
assert not any(hasattr(p, "grad_batch") for p in params)
of_layers = [sum(p.numel() for p in layer.parameters(recurse=False)) for layer in model]
assert hook.most_numbers == len(X) * max(of_layers) < total
for x, label in zip(X.split(1), y.split(1)):
    grads = torch.autograd.grad(CrossEntropyLoss()(model(x), label), params)
    rows.append(torch.cat([g.flatten() for g in grads]))
gradients = torch.stack(rows)
expected = torch.cosine_similarity(gradients, gradients.mean(0, keepdim=True))
assert_close(cosines, expected, rtol=1e-8, atol=1e-12)
