"""
Look at some samples of the batch only
======================================

Quantities per sample, such as individual gradients or the columns of the generalized
Gauss-Newton matrix (GGN), take memory in proportion to the number of samples. Often a
part of the batch is good enough. With ``subsampling=[0, 3, 7]``, the gradient is still
that of the whole batch, while the quantity is computed for these samples only.

As an example, we approximate the leading eigenvalues of the GGN on 64 images by means
of some of them.
"""

from typing import List, Optional

import matplotlib.pyplot as plt
import torch
from torch import Tensor, einsum
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, ReLU, Sequential
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, SqrtGGNExact
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=64)
X, lossfunc = X.double(), extend(CrossEntropyLoss())
layers = [Conv2d(1, 4, 6, stride=4), ReLU(), Flatten(), Linear(144, 10)]
model = extend(Sequential(*layers).double())
params = list(model.parameters())

# %%
# Which scale the result has
# --------------------------
# Samples are selected, nothing else changes: with a mean loss, each sample's share
# keeps its factor 1/N. An estimate of something that is summed over the batch therefore
# has to be multiplied by N / (number of selected samples).
#
# The matrix itself is far too large to be formed, but it has the same nonzero
# eigenvalues as the matrix of inner products of its columns, which is small.


def eigenvalues(samples: Optional[List[int]] = None) -> Tensor:
    """Return the ten largest eigenvalues of the GGN, estimated from some samples."""
    with backpack(SqrtGGNExact(subsampling=samples)):
        lossfunc(model(X), y).backward()
    columns = [p.sqrt_ggn_exact.flatten(start_dim=2) for p in params]
    gram = sum(einsum("cnp,dmp->cndm", S, S) for S in columns)
    size = gram.shape[0] * gram.shape[1]
    gram = gram.reshape(size, size) * len(X) / gram.shape[1]
    return torch.linalg.eigvalsh(gram).flip(0)[:10]


exact = eigenvalues()
estimates = {
    count: [eigenvalues(torch.randperm(64)[:count].tolist()) for _ in range(8)]
    for count in (32, 16, 8)
}

fig, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
for ax, (count, values) in zip(axes, estimates.items()):
    for estimate in values:
        ax.plot(estimate.tolist(), color="C0", alpha=0.4)
    ax.plot(exact.tolist(), "ko-", markersize=4, label="all 64 samples")
    ax.plot([], [], color="C0", label=f"{count} of them, at random")
    ax.set(xlabel="eigenvalue")
    ax.legend()
axes[0].set_ylim(bottom=0)  # of all, once the largest value is known
plt.show()

errors = {
    count: sum(abs(e[0] / exact[0] - 1) for e in values) / len(values)
    for count, values in estimates.items()
}
print({count: f"{100 * error:.0f} % off" for count, error in errors.items()})
assert errors[32] < errors[8] < 0.5

# %%
# Check
# -----
# The selected rows of the individual gradients come in the given order, at the same
# scale, and the gradient is the same.

some = [11, 3, 42]
model.zero_grad()
with backpack(BatchGrad(subsampling=some)):
    lossfunc(model(X), y).backward()
gradient = torch.autograd.grad(CrossEntropyLoss()(model(X), y), params)
for p, g in zip(params, gradient):
    assert_close(p.grad, g, rtol=1e-8, atol=1e-12)
for row, n in enumerate(some):
    loss = CrossEntropyLoss()(model(X[[n]]), y[[n]]) / len(X)
    for p, expected in zip(params, torch.autograd.grad(loss, params)):
        assert_close(p.grad_batch[row], expected, rtol=1e-8, atol=1e-12)

# %%
# The largest eigenvalue, by power iteration with plain automatic differentiation.

output = model(X)
loss = CrossEntropyLoss()(output, y)
v = [torch.rand_like(p) for p in params]
for _ in range(300):
    norm = torch.cat([x.flatten() for x in v]).norm()
    v = ggn_vector_product(loss, output, model, [x / norm for x in v])
largest = torch.cat([x.flatten() for x in v]).norm()
assert_close(exact[0], largest, rtol=1e-6, atol=0.0)
