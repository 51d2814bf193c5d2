"""
Curvature of a residual network
===============================

The Gauss-Newton family (``DiagGGN*``, ``SqrtGGN*``, ``KFAC``, ``KFLR``) works on a
network as you write it, skip connections included. Quantities of the *Hessian* need the
second derivatives of every operation, also of the sum at the end of a skip connection:
they go from module to module, and each operation has to be one. Two ways to get there:

- ``extend(model, use_converter=True)``: the converter traces the network and returns
  one that computes the same, with the same parameters, but consists of modules only.
- ``backpack.custom_module``: a residual block is ``Parallel``, whose branches get the
  same input and whose outputs are added up, where one branch is ``Identity``.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Identity,
    Linear,
    Module,
    Sequential,
    Sigmoid,
)
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.custom_module.branching import Parallel
from backpack.extensions import KFAC, DiagGGNExact, DiagHessian
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist


class ResNet(Module):
    """A residual network as one writes it, with functions in between."""

    def __init__(self, channels: int = 4):
        """Create the layers."""
        super().__init__()
        self.stem = Conv2d(1, channels, 4, stride=4)
        self.conv1 = Conv2d(channels, channels, 3, padding=1)
        self.conv2 = Conv2d(channels, channels, 3, padding=1)
        self.shortcut = Conv2d(channels, channels, 1, stride=2)
        self.conv3 = Conv2d(channels, channels, 3, stride=2, padding=1)
        self.head = Linear(16 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 1, 28, 28]`` to outputs ``[N, 10]``."""
        x = torch.sigmoid(self.stem(x))
        x = torch.sigmoid(x + self.conv2(torch.sigmoid(self.conv1(x))))
        x = self.shortcut(x) + self.conv3(x)
        return self.head(torch.sigmoid(x).flatten(1))


# %%
# Gauss-Newton: as it is
# ----------------------

torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=16)
X, net, lossfunc = X.double(), ResNet().double(), extend(CrossEntropyLoss())

with backpack(DiagGGNExact(), KFAC()):
    lossfunc(extend(net)(X), y).backward()
print([list(factor.shape) for factor in net.conv1.weight.kfac])

# %%
# Hessian: converted, or built from modules
# -----------------------------------------
# Both share the layers, and so the parameters, of the network above.

residual = Sequential(net.conv1, Sigmoid(), net.conv2)
by_hand = Sequential(
    *(net.stem, Sigmoid(), Parallel(Identity(), residual), Sigmoid()),
    *(Parallel(net.shortcut, net.conv3), Sigmoid(), Flatten(), net.head),
)
models = {"converted": extend(net, use_converter=True), "by hand": extend(by_hand)}
diagonals = {}
for way, model in models.items():
    with backpack(DiagHessian()):
        lossfunc(model(X), y).backward()
    diagonals[way] = torch.cat([p.diag_h.flatten() for p in net.parameters()])
    modules = [type(m).__name__ for m in model.modules() if not list(m.children())]
    print(f"{way}: {' '.join(modules)}")

# %%
# Where the loss bends down
# -------------------------
# The GGN's diagonal has no negative entries, the Hessian's has: what the network's own
# curvature adds. In the last layer, which is linear, they are the same.

ggn = torch.cat([p.diag_ggn_exact.flatten() for p in net.parameters()])
hessian, last = diagonals["converted"], len(ggn) - 650
fig, ax = plt.subplots(figsize=(5, 4.5), layout="constrained")
ax.scatter(ggn[:last], hessian[:last], s=6, label="convolutions")
ax.scatter(ggn[last:], hessian[last:], s=6, label="last layer")
limits = [hessian.min().item(), ggn.max().item()]
ax.plot(limits, limits, "k--", linewidth=0.8)
ax.set(xlabel="diagonal of the GGN", ylabel="diagonal of the Hessian")
ax.set_xscale("symlog", linthresh=1e-4)
ax.set_yscale("symlog", linthresh=1e-4)
ax.legend()
plt.show()
assert ggn.min() >= 0 > hessian.min()
assert_close(ggn[last:], hessian[last:], rtol=1e-8, atol=1e-12)

# %%
# Check
# -----
# Both ways agree with each other, and diagonals with plain automatic differentiation.

assert_close(diagonals["converted"], diagonals["by hand"], rtol=1e-8, atol=1e-12)
idx = list(range(0, len(ggn), 31))
expected = autograd_diag_ggn_exact(X, y, net, CrossEntropyLoss(), idx=idx)
assert_close(ggn[idx], expected, rtol=1e-8, atol=1e-12)
bias = net.conv1.bias
loss = CrossEntropyLoss()(net(X), y)
(gradient,) = torch.autograd.grad(loss, bias, create_graph=True)
for i, g in enumerate(gradient):
    (row,) = torch.autograd.grad(g, bias, retain_graph=True)
    assert_close(bias.diag_h[i], row[i], rtol=1e-8, atol=1e-12)
