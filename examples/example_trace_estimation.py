"""
The trace of the Hessian, from random vectors
=============================================

The trace of a matrix that is too large to write down can be estimated by products with
random vectors (Hutchinson, 1989): if the entries of v are +1 or -1 with equal
probability, the mean of ``v @ H @ v`` is the trace of H. For the Hessian of a network,
``HMP`` supplies the products. After the backward pass, each parameter has a function
``p.hmp`` that multiplies many vectors ``[K, *p]`` at once with its block of the
Hessian.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, einsum
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Parameter,
    Sequential,
    Tanh,
)
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import HMP, DiagHessian
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=16)
X, lossfunc = X.double(), extend(CrossEntropyLoss())
layers = [Conv2d(1, 3, 5, stride=2), MaxPool2d(4), Tanh(), Flatten(), Linear(27, 10)]
model = extend(Sequential(*layers).double())
params = list(model.parameters())

with backpack(DiagHessian(), HMP()):
    lossfunc(model(X), y).backward()

# %%
# Estimate
# --------
# The traces of the blocks add up to the trace of the whole. To have something to
# compare with, ``DiagHessian`` gives the diagonal, and so the exact trace.


def summands(p: Parameter, num_vectors: int) -> Tensor:
    """Multiply K random vectors with a block of the Hessian, from both sides."""
    v = 2 * torch.randint(2, (num_vectors, *p.shape)).to(p.dtype) - 1
    return einsum("kp,kp->k", v.flatten(1), p.hmp(v).flatten(1))


trace = sum(p.diag_h.sum() for p in params).item()
print(f"Trace of the Hessian: {trace:.4f}")
values = sum(summands(p, 1000) for p in params)
counts = torch.arange(1, 1001)
means = values.cumsum(0) / counts
errors = values.std() / counts.sqrt()

# %%
# How well it works
# -----------------
# The error shrinks like one over the square root of the number of vectors.

fig, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
ax.fill_between(
    counts,
    trace - 2 * errors,
    trace + 2 * errors,
    alpha=0.2,
    label="two standard errors",
)
ax.plot(counts, means, label="mean of the first K vectors")
ax.axhline(trace, color="k", linestyle="--", linewidth=1, label="trace")
ax.set(xlabel="K", ylabel="estimate", xscale="log", ylim=(0, 2 * trace))
ax.legend()
plt.show()

for count in (10, 100, 1000):
    mean, error = means[count - 1], errors[count - 1]
    print(f"{count:>4} vectors: {mean:.4f}, standard error {error:.4f}")
    assert abs(mean - trace) < 5 * error
assert error < 0.03 * trace, "a thousand vectors give a good estimate"

# %%
# Check
# -----
# The trace of the convolution's blocks, by differentiating each entry of the gradient.
# All unit vectors instead of random ones are exact, if there are few of them.

loss = CrossEntropyLoss()(model(X), y)
for p in model[0].parameters():
    (gradient,) = torch.autograd.grad(loss, p, create_graph=True)
    diagonal = [
        torch.autograd.grad(g, p, retain_graph=True)[0].flatten()[i]
        for i, g in enumerate(gradient.flatten())
    ]
    assert_close(p.diag_h.sum(), sum(diagonal), rtol=1e-8, atol=1e-12)
bias = model[4].bias
units = torch.eye(len(bias), dtype=bias.dtype)
assert_close(bias.hmp(units).trace(), bias.diag_h.sum(), rtol=1e-8, atol=1e-12)
