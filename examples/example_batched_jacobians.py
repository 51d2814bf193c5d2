"""
Jacobians, and which images a network finds similar
===================================================

How does each output of the network change with each weight, for each image?
``BatchJacobian`` pulls back a column for each output, in one backward pass and without
a loss. Or row by row: what BackPACK sees is the tensor that you call ``backward`` on.
If that is one output, summed over the batch, then its "individual gradients" are a row
of each sample's Jacobian.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, einsum
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend, memory_cleanup
from backpack.extensions import BatchGrad, BatchJacobian
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
model = Sequential(
    *(Conv2d(1, 4, 5, stride=2), Tanh(), MaxPool2d(3)),
    *(Flatten(), Linear(64, 20), Tanh(), Linear(20, 10)),
).double()
model = extend(model)
X, y = load_one_batch_mnist(batch_size=100)
order = y.argsort()
X, y = X[order].double(), y[order]

with backpack(BatchJacobian(), gradient=False):
    model(X).sum().backward()
J = {name: p.jacobian for name, p in model.named_parameters()}
for name, columns in J.items():
    print(f"Jacobian of 10 outputs with respect to {name}: {list(columns.shape)}")

# %%
# The tangent kernel
# ------------------
# Products of Jacobians, summed over all parameters and outputs, are the network's
# tangent kernel (Jacot et al., 2018). An entry says how strongly a step for one image
# changes the prediction for another one. Images are ordered by digit, and the network
# is untrained: the squares along the diagonal are what its architecture alone makes of
# the digits.

kernel = sum(einsum("cnp,cmp->nm", j, j) for j in (j.flatten(2) for j in J.values()))
length = kernel.diag().sqrt()
cosine = kernel / length / length.unsqueeze(1)
neighbors = cosine.clone().fill_diagonal_(0).argmax(dim=1)

fig, (left, right) = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
left.imshow(cosine.numpy(), cmap="magma")
ticks = [(y == digit).nonzero().double().mean().item() for digit in range(10)]
left.set_xticks(ticks, range(10))
left.set_yticks(ticks, range(10))
left.set_title("similarity of 100 images by their Jacobians", fontsize=10)
pairs = [torch.cat([X[n, 0], X[neighbors[n], 0]], dim=1) for n in range(0, 100, 20)]
right.imshow(torch.cat(pairs).numpy(), cmap="gray")
right.set_title("images, and those most similar", fontsize=10)
right.axis("off")
plt.show()

same = (y[neighbors] == y).double().mean()
chance = (y == y.unsqueeze(1)).double().mean()
print(f"The most similar image shows the same digit for {100 * same:.0f} %;")
print(f"a random one does for {100 * chance:.0f} %.")
assert same > 0.5 > 2 * chance

# %%
# Row by row
# ----------
# With individual gradients, ten outputs take ten backward passes, through the same
# graph. PyTorch needs ``backward(retain_graph=True)`` for that, and BackPACK
# ``backpack(..., retain_graph=True)``, so that it keeps each layer's inputs and outputs
# as well. ``memory_cleanup`` drops them at the end.


def jacobians(model: Module, X: Tensor) -> dict[str, Tensor]:
    """Compute Jacobians ``[C, N, *p]`` of each parameter."""
    output, rows = model(X), []
    for c in range(output.shape[1]):
        with backpack(BatchGrad(), retain_graph=True):
            output[:, c].sum().backward(retain_graph=True)
        rows.append({name: p.grad_batch for name, p in model.named_parameters()})
    memory_cleanup(model)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


for name, rows in jacobians(model, X).items():
    assert_close(rows, J[name], rtol=1e-8, atol=1e-12)
assert not hasattr(model[0], "input0"), "the layers' inputs have been dropped"

# %%
# Check
# -----
# Plain automatic differentiation, sample by sample and output by output.

params = list(model.parameters())
for n in range(3):
    for c, output in enumerate(model(X[[n]]).squeeze(0)):
        row = torch.autograd.grad(output, params, retain_graph=True)
        for j, expected in zip(J.values(), row):
            assert_close(j[c, n], expected, rtol=1e-8, atol=1e-12)
assert torch.linalg.eigvalsh(kernel).min() > -1e-8 * kernel.trace()
