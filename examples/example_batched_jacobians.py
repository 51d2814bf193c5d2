"""
Jacobians, and which images a network finds similar
===================================================

Individual gradients need not come from a loss. What BackPACK sees is the tensor that
you call ``backward`` on: if that is one output of the network, summed over the batch,
then its "individual gradients" are a row of each sample's Jacobian. Ten outputs take
ten backward passes, whatever the batch size. (``BatchJacobian``, which BackPACK 1.7
does not have, takes a single one.)
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, einsum
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend, memory_cleanup
from backpack.extensions import BatchGrad
from backpack.utils.examples import load_one_batch_mnist

# %%
# Rows of the Jacobian
# --------------------
# The same graph is used ten times. PyTorch needs ``backward(retain_graph=True)`` for
# that. BackPACK 1.7 needs ``backpack(..., retain_graph=True)`` as well, with which
# layers keep their inputs and outputs until ``memory_cleanup`` drops them.


def jacobians(model: Module, X: Tensor) -> dict[str, Tensor]:
    """Compute Jacobians ``[N, C, *p]`` of each parameter."""
    output, rows = model(X), []
    for c in range(output.shape[1]):
        with backpack(BatchGrad(), retain_graph=True):
            output[:, c].sum().backward(retain_graph=True)
        rows.append({name: p.grad_batch for name, p in model.named_parameters()})
    memory_cleanup(model)
    return {name: torch.stack([row[name] for row in rows], dim=1) for name in rows[0]}


torch.manual_seed(0)
model = Sequential(
    *(Conv2d(1, 4, 5, stride=2), Tanh(), MaxPool2d(3)),
    *(Flatten(), Linear(64, 20), Tanh(), Linear(20, 10)),
).double()
model = extend(model)
X, y = load_one_batch_mnist(batch_size=100)
order = y.argsort()
X, y = X[order].double(), y[order]

J = jacobians(model, X)
for name, rows in J.items():
    print(f"Jacobian of 10 outputs with respect to {name}: {list(rows.shape)}")

# %%
# The tangent kernel
# ------------------
# Products of Jacobians, summed over all parameters and outputs, are the network's
# tangent kernel (Jacot et al., 2018). An entry says how strongly a step for one image
# changes the prediction for another one. Images are ordered by digit, and the network
# is untrained: the squares along the diagonal are what its architecture alone makes of
# the digits.

kernel = sum(einsum("ncp,mcp->nm", j, j) for j in (j.flatten(2) for j in J.values()))
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
# Check
# -----
# Plain automatic differentiation, sample by sample and output by output.

params = list(model.parameters())
for n in range(3):
    for c, output in enumerate(model(X[[n]]).squeeze(0)):
        row = torch.autograd.grad(output, params, retain_graph=True)
        for j, expected in zip(J.values(), row):
            assert_close(j[n, c], expected, rtol=1e-8, atol=1e-12)
assert torch.linalg.eigvalsh(kernel).min() > -1e-8 * kernel.trace()
assert not hasattr(model[0], "input0"), "the layers' inputs have been dropped"
