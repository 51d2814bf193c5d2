"""Individual gradients of a residual network, written as any PyTorch module.

First-order quantities need nothing but the gradient at each layer's output, which
autograd delivers anyway. Therefore they do not care how the layers are put together:
the network may have branches, skip connections, functional calls. All you do is
``extend`` it.

You learn what makes a network suitable all the same: its parameters are in PyTorch's
layers, and each sample is treated on its own. Batch normalization in training mode
mixes the samples, so that individual gradients do not exist. The network below comes
with batch normalization in evaluation mode: fixed statistics, as in fine-tuning.

(Second-order quantities of residual networks are another story: see
``example_resnet_all_in_one.py``.)
"""

import torch
from torch import Tensor
from torch.nn import (
    AdaptiveAvgPool2d,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Linear,
    Module,
    Sequential,
)
from torch.nn.functional import relu
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from backpack.utils.examples import load_one_batch_mnist


class Block(Module):
    """A residual block: the input takes two ways, which are added up."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        """Create the layers.

        Args:
            in_channels: Number of channels that come in.
            out_channels: Number of channels that go out.
            stride: By how much height and width shrink.
        """
        super().__init__()
        self.conv1 = Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = BatchNorm2d(out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = BatchNorm2d(out_channels)
        self.shortcut = Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate the block.

        Args:
            x: Images ``[N, in_channels, H, W]``.

        Returns:
            Images ``[N, out_channels, H / stride, W / stride]``.
        """
        residual = relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return relu(residual + self.shortcut(x))


class ResNet(Module):
    """A small residual network for images of one channel."""

    def __init__(self, num_classes: int = 10):
        """Create the blocks.

        Args:
            num_classes: Number C of outputs. Default: 10.
        """
        super().__init__()
        self.stem = Conv2d(1, 4, 3, stride=2)
        self.blocks = Sequential(Block(4, 8, 2), Block(8, 8, 1), Block(8, 16, 2))
        self.pool = AdaptiveAvgPool2d(1)
        self.head = Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate the network.

        Args:
            x: Images ``[N, 1, H, W]``.

        Returns:
            Outputs ``[N, C]``.
        """
        x = self.blocks(relu(self.stem(x)))
        return self.head(self.pool(x).flatten(start_dim=1))


def main() -> None:
    """Compute first-order quantities of the residual network and check them."""
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=8)
    X = X.double()

    model = ResNet().double()
    model(X)  # in training mode: this sets the statistics of the normalization
    model = extend(model.eval())
    lossfunc = extend(CrossEntropyLoss())
    with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance()):
        lossfunc(model(X), y).backward()

    params = dict(model.named_parameters())
    rows = []
    for x, label in zip(X.split(1), y.split(1)):
        loss = CrossEntropyLoss()(model(x), label) / len(X)
        rows.append(torch.autograd.grad(loss, list(params.values())))
    for (name, p), column in zip(params.items(), zip(*rows)):
        gradients = torch.stack(column)
        for actual, expected in [
            (p.grad_batch, gradients),
            (p.batch_l2, gradients.flatten(1).square().sum(1)),
            (p.sum_grad_squared, gradients.square().sum(0)),
            (p.variance, gradients.var(0, unbiased=False)),
        ]:
            assert_close(actual, expected, rtol=1e-8, atol=1e-12)
        # How much the samples agree: 1 if all gradients are the same, else smaller
        agreement = p.grad.square().sum() / (len(X) * p.batch_l2.sum())
        print(f"{name:<24} {str(list(p.grad_batch.shape)):<18} {agreement:.2f}")
    print("All agree with plain automatic differentiation, one sample at a time.")


if __name__ == "__main__":
    main()
