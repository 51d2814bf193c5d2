"""
Go through the same graph twice
===============================

Usually a graph is used once: PyTorch frees it during the backward pass, and BackPACK
drops what it has kept of each layer, its inputs and its output. There are occasions to
use it again, for instance to decide after a look at the gradients whether second-order
quantities are worth the effort. It takes two switches, ``backward(retain_graph=True)``
and ``backpack(..., retain_graph=True)``.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, ReLU, Sequential
from torch.testing import assert_close

from backpack import backpack, extend, memory_cleanup
from backpack.extensions import BatchGrad, DiagGGNExact, Variance
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=16)
X = X.double()
layers = [Conv2d(1, 4, 5, stride=3), ReLU(), Flatten(), Linear(256, 10)]
model, lossfunc = extend(Sequential(*layers).double()), extend(CrossEntropyLoss())
params = list(model.parameters())


def count_kept() -> int:
    """Count the numbers that modules keep: ``module.input0``, ``module.output``."""
    kept = [
        getattr(module, name)
        for module in model.modules()
        for name in ("input0", "output")
        if hasattr(module, name)
    ]
    return sum(tensor.numel() for tensor in kept)


# %%
# Look first, then decide
# -----------------------
# The first pass computes the noise of the gradients: their standard deviation, relative
# to the mean. If there is a lot, the second pass computes curvature, from the same
# graph. It is the last one, and drops what was kept.

counts = {"before": count_kept()}
loss = lossfunc(model(X), y)
counts["forward pass"] = count_kept()

with backpack(BatchGrad(), Variance(), retain_graph=True):
    loss.backward(retain_graph=True)
counts["backward pass,\nretain_graph=True"] = count_kept()

squared_mean = sum(p.grad_batch.mean(0).square().sum() for p in params)
noise = (sum(p.variance.sum() for p in params) / squared_mean).sqrt()
print(f"Noise of the gradients: {noise:.2f}")
if noise > 0.5:
    with backpack(DiagGGNExact()):
        loss.backward()
counts["last\nbackward pass"] = count_kept()

# %%
# A forward pass without a backward pass leaves tensors behind, too. ``memory_cleanup``
# drops them.

lossfunc(model(X), y)
counts["another\nforward pass"] = count_kept()
memory_cleanup(model)
counts["memory_cleanup"] = count_kept()

fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.step(range(len(counts)), list(counts.values()), where="mid")
ax.set_xticks(range(len(counts)), counts, fontsize=8)
ax.set_ylabel("numbers that modules keep")
ax.grid(alpha=0.3)
plt.show()
assert [bool(count) for count in counts.values()] == [False, True, True] + [
    *(False, True, False)
]

# %%
# Forgot something? The graph is gone, and you are told so.

try:
    with backpack(BatchGrad()):
        loss.backward()
except RuntimeError as error:
    print(f"A further pass fails: {str(error).split('. ')[0]}.")
else:
    raise AssertionError("the graph should have been freed")

# %%
# Check
# -----
# The quantities are the same as from graphs of their own.

fields = {"grad_batch": BatchGrad, "variance": Variance, "diag_ggn_exact": DiagGGNExact}
found = {field: [getattr(p, field) for p in params] for field in fields}
for field, extension in fields.items():
    with backpack(extension()):
        lossfunc(model(X), y).backward()
    for p, value in zip(params, found[field]):
        assert_close(getattr(p, field), value, rtol=1e-8, atol=1e-12)
