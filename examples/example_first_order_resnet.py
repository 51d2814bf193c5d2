"""
Individual gradients of any network: a residual one
===================================================

You need not write your network in a special way. It may have branches, skip connections
and functional calls: quantities of first order and of the Gauss-Newton family look at
the operations that use parameters, and autograd does the rest. All you do is ``extend``
it.

What individual gradients tell: how much the samples of a batch agree, layer by layer.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import (
    AdaptiveAvgPool2d,
    Conv2d,
    CrossEntropyLoss,
    GroupNorm,
    Linear,
    Module,
    Sequential,
)
from torch.nn.functional import relu
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from backpack.utils.examples import load_one_batch_mnist

# %%
# A residual network
# ------------------
# There is only one condition: each sample is treated on its own. Batch normalization in
# training mode mixes them, so that individual gradients don't exist; in evaluation
# mode, or with another normalization, as here, they do.


class Block(Module):
    """A residual block: the input takes two ways, which are added up."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        """Create the layers."""
        super().__init__()
        self.conv1 = Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = GroupNorm(2, out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = GroupNorm(2, out_channels)
        self.shortcut = Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, in, H, W]`` to ``[N, out, H / stride, W / stride]``."""
        residual = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(residual)) + self.shortcut(x))


class ResNet(Module):
    """A small residual network for images of one channel."""

    def __init__(self):
        """Create the blocks."""
        super().__init__()
        self.stem = Conv2d(1, 4, 3, stride=2)
        self.blocks = Sequential(Block(4, 8, 2), Block(8, 8, 1), Block(8, 16, 2))
        self.pool = AdaptiveAvgPool2d(1)
        self.head = Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 1, H, W]`` to outputs ``[N, 10]``."""
        x = self.blocks(relu(self.stem(x)))
        return self.head(self.pool(x).flatten(start_dim=1))


# %%
# How much samples agree
# ----------------------
# If all individual gradients were the same, the squared norm of their sum would be N
# times the sum of their squared norms. What is there of that, at the start and after
# some steps? The fewer samples agree, the more a mean over them is luck.

torch.manual_seed(0)
images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
model, lossfunc = extend(ResNet()), extend(CrossEntropyLoss())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
agreement = {}
for step in range(61):
    batch = torch.randint(1000, (64,))
    optimizer.zero_grad()
    with backpack(BatchL2Grad()):
        lossfunc(model(images[batch]), labels[batch]).backward()
    if step in (0, 10, 60):
        agreement[step] = [
            (p.grad.square().sum() / (64 * p.batch_l2.sum())).item()
            for p in model.parameters()
        ]
    optimizer.step()

names = [name for name, _ in model.named_parameters()]
fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
for step, values in agreement.items():
    ax.plot(names, values, "o-", label=f"step {step}")
ax.set_ylabel("agreement of 64 samples")
ax.tick_params("x", rotation=90, labelsize=8)
ax.legend()
ax.grid(alpha=0.3)
plt.show()
assert sum(agreement[60]) < 0.5 * sum(agreement[0])

# %%
# Check
# -----
# All quantities of first order, by plain automatic differentiation of one sample a
# time.

X, y, model = images[:8].double(), labels[:8], model.double()
with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance()):
    lossfunc(model(X), y).backward()
params, rows = list(model.parameters()), []
for x, label in zip(X.split(1), y.split(1)):
    loss = CrossEntropyLoss()(model(x), label) / len(X)
    rows.append(torch.autograd.grad(loss, params))
for (name, p), column in zip(model.named_parameters(), zip(*rows)):
    gradients = torch.stack(column)
    for actual, expected in [
        (p.grad_batch, gradients),
        (p.batch_l2, gradients.flatten(1).square().sum(1)),
        (p.sum_grad_squared, gradients.square().sum(0)),
        (p.variance, gradients.var(0, unbiased=False)),
    ]:
        assert_close(actual, expected, rtol=1e-8, atol=1e-12)
    print(f"{name:<24} {list(p.grad_batch.shape)}")
