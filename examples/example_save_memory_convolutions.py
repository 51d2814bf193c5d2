"""
How much memory convolutions need
=================================

Textbooks turn a convolution into a matrix product: "unfolding" copies, for each
position of the kernel, the part of the image underneath it. Second-order quantities
multiply what is pulled back, V columns for each sample, with that unfolded image, and a
straightforward implementation copies it once more for each column. Programs for
BackPACK 1.7 may switch that off with ``weight_jac_t_save_memory``. The switch still
exists, so that they run; but it has nothing left to do: no product copies the unfolded
input for each column. You learn how to see that, by a look at every tensor that PyTorch
makes during the backward pass.
"""

from typing import Dict, Tuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, ReLU, Sequential
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.extensions import BatchDiagGGNExact, DiagGGNExact, SqrtGGNExact
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist


class LargestTensor(TorchDispatchMode):
    """Watches all operations inside a context, for the largest tensor they make."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and look at what comes out."""
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                # an expanded tensor has more entries than it occupies
                size = x.untyped_storage().nbytes() // x.element_size()
                self.numel = max(self.numel, min(size, x.numel()))
        return result


# %%
# Measure
# -------

torch.manual_seed(0)
images, labels = load_one_batch_mnist(batch_size=32)
images, lossfunc = images.double(), extend(CrossEntropyLoss())
layers = [Conv2d(1, 4, 5, stride=2), ReLU(), Conv2d(4, 6, 5, stride=2), ReLU()]
model = extend(Sequential(*layers, Flatten(), Linear(96, 10)).double())
EXTENSIONS = (DiagGGNExact, BatchDiagGGNExact, SqrtGGNExact)


def compute(num_samples: int, save_memory: bool = True) -> Tuple[Dict, Dict]:
    """Return all parameters' values, and the size of the largest tensor, by field."""
    values, sizes = {}, {}
    for extension in (cls() for cls in EXTENSIONS):
        loss = lossfunc(model(images[:num_samples]), labels[:num_samples])
        with backpack(extension), weight_jac_t_save_memory(save_memory=save_memory):
            with LargestTensor() as largest:
                loss.backward()
        field = extension.savefield
        values[field] = [getattr(p, field) for p in model.parameters()]
        sizes[field] = largest.numel
    return values, sizes


batch_sizes, columns, kernel, positions = [4, 8, 16, 32], 10, 1 * 5 * 5, 12 * 12
sizes = [compute(n)[1] for n in batch_sizes]
copied = [columns * n * kernel * positions for n in batch_sizes]

fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
ax.plot(batch_sizes, copied, "k--", label="unfolded input, for each column")
ax.plot(batch_sizes, [c / columns for c in copied], "k:", label="unfolded input")
for field, marker, size in zip(sizes[0], "osv", (11, 7, 7)):  # two lines agree
    values_of_field = [s[field] for s in sizes]
    ax.plot(batch_sizes, values_of_field, f"{marker}-", ms=size, label=field)
ax.set(xlabel="samples", ylabel="numbers in the largest tensor")
ax.set(xscale="log", yscale="log")
ax.set_xticks(batch_sizes, batch_sizes)
ax.minorticks_off()
ax.legend(fontsize=8)
plt.show()
for field, size in sizes[-1].items():
    print(f"Largest tensor while computing {field}: {size} of {copied[-1]}")
assert all(max(s.values()) < c / 2 for s, c in zip(sizes, copied))

# %%
# Check
# -----
# The switch changes nothing, and values agree with plain automatic differentiation.

values, others = compute(4)[0], compute(4, save_memory=False)[0]
for field, tensors in values.items():
    for value, other in zip(tensors, others[field]):
        assert_close(value, other, rtol=1e-8, atol=1e-12)
diagonal = torch.cat([d.flatten() for d in values["diag_ggn_exact"]])
idx = list(range(0, 4 * 25 + 4 + 6 * 100, 31))  # the two convolutions
expected = autograd_diag_ggn_exact(
    images[:4], labels[:4], model, CrossEntropyLoss(), idx
)
assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
