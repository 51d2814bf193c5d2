"""
Teach BackPACK a layer of your own
==================================

The network below has a layer that PyTorch does not know: ``Stretch`` multiplies each
feature with a learned factor. Quantities of first order and of the Gauss-Newton family
work on it at once, by automatic differentiation. A *module extension* replaces that by
a formula of yours: a class with a method for each parameter, whose result is saved on
it.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Module, Parameter, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist


class Stretch(Module):
    """Multiply each feature with a learned factor."""

    def __init__(self, num_features: int):
        """Start with random factors around one."""
        super().__init__()
        self.weight = Parameter(1 + 0.1 * torch.randn(num_features))

    def forward(self, input: Tensor) -> Tensor:
        """Map features ``[N, F]`` to features ``[N, F]``."""
        return self.weight * input


# %%
# First order: individual gradients
# ---------------------------------
# What the methods get to see: ``ext`` is the extension that is running, ``module`` the
# layer, with what went in (``module.input0``) and what came out (``module.output``);
# ``g_out[0]`` is the gradient at its output. For one sample, output i is weight i times
# input i. By the chain rule, the gradient is the gradient at the output, times the
# input.


class StretchBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of Stretch."""

    def __init__(self):
        """Name the parameters that have a method."""
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):
        """Return what is saved in ``weight.grad_batch``, ``[N, F]``."""
        return g_out[0] * module.input0


# %%
# Second order: the diagonal of the GGN
# -------------------------------------
# The extensions of the generalized Gauss-Newton matrix (GGN) propagate columns: a
# matrix S for each sample, such that S times its own transpose is the GGN with respect
# to the layer's output. They arrive in ``bpQuantities`` as ``[V, N, F]``, and
# ``backpropagate`` passes them on to the layers before.


class StretchDiagGGN(ModuleExtension):
    """GGN diagonal of Stretch."""

    def __init__(self):
        """Name the parameters that have a method."""
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):
        """Return the squares of the columns at the weight, summed: ``[F]``."""
        return (bpQuantities * module.input0).square().sum(dim=(0, 1))

    def backpropagate(self, extension, module, g_inp, g_out, bpQuantities):
        """Return columns at the input: the weight is the Jacobian's diagonal."""
        return bpQuantities * module.weight


# %%
# Register, and run
# -----------------

torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=64, flat=True)
X = X.double()
layers = [Stretch(784), Linear(784, 12), Tanh(), Stretch(12), Linear(12, 10)]
model, lossfunc = extend(Sequential(*layers).double()), extend(CrossEntropyLoss())

batch_grad, diag_ggn = BatchGrad(), DiagGGNExact()
batch_grad.set_module_extension(Stretch, StretchBatchGrad())
diag_ggn.set_module_extension(Stretch, StretchDiagGGN())
with backpack(batch_grad, diag_ggn):
    lossfunc(model(X), y).backward()
for name, param in model.named_parameters():
    fields = f"{list(param.grad_batch.shape)}, {list(param.diag_ggn_exact.shape)}"
    print(f"{name:<9} grad_batch and diag_ggn_exact: {fields}")

# %%
# The first layer has a factor for each pixel, so that its quantities are images: which
# pixels one digit wants to be stronger (red) or weaker (blue), and which pixels matter.

weight = model[0].weight
panels = [X[0], weight.grad_batch[0], X[1], weight.grad_batch[1]]
panels = [*panels, X.mean(0), weight.diag_ggn_exact.sqrt()]
titles = ["a digit", "its gradient"] * 2 + ["mean digit", "root of the GGN diagonal"]
fig, axes = plt.subplots(1, 6, figsize=(11, 2.2), layout="constrained")
for ax, values, title in zip(axes, panels, titles):
    signed = {"cmap": "RdBu", "vmin": -abs(values).max(), "vmax": abs(values).max()}
    style = signed if title == "its gradient" else {"cmap": "gray"}
    ax.imshow(values.detach().reshape(28, 28).numpy(), **style)
    ax.set_title(title, fontsize=9)
    ax.axis("off")
plt.show()

# %%
# Check
# -----
# Both agree with plain automatic differentiation: some individual gradients, and some
# entries of the diagonal, from both stretches and the linear layer between them, which
# needs what was propagated through the second.

params = list(model.parameters())
for n in range(4):
    loss = CrossEntropyLoss()(model(X[[n]]), y[[n]]) / len(X)
    for param, expected in zip(params, torch.autograd.grad(loss, params)):
        assert_close(param.grad_batch[n], expected, rtol=1e-8, atol=1e-12)
diagonal = torch.cat([param.diag_ggn_exact.flatten() for param in params])
idx = list(range(300, len(diagonal), 297))
expected = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(), idx=idx)
assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
