"""Train with differential privacy: clip each sample's gradient, then add noise.

A network trained in the usual way may remember single images. DP-SGD (Abadi et al.,
2016, "Deep learning with differential privacy") prevents that by two changes to the
gradient: each sample's gradient is scaled down until its norm is at most C, so that no
image can have more influence than that; and normal noise with a standard deviation
proportional to C hides what influence is left.

The first change needs individual gradients and their norms over *all* parameters. You
learn how to get both from one backward pass: ``BatchGrad`` gives the gradients, and
``BatchL2Grad`` the squared norms, parameter by parameter, for hardly any extra cost.

One detail to watch: with ``CrossEntropyLoss()``, the loss is a mean, and what BackPACK
calls individual gradients are the summands of its gradient, each with a factor 1/N. To
clip the samples' own gradients, use ``reduction="sum"``.

How much privacy is spent after so and so many steps is another question, which takes an
accountant from a privacy library; here we only look at the gradients.
"""

from typing import Iterable

import torch
from torch import Tensor
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Parameter,
    ReLU,
    Sequential,
)
from torch.optim import Optimizer
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad
from backpack.utils.examples import get_mnist_dataloader, load_one_batch_mnist


class DPSGD(Optimizer):
    """Stochastic gradient descent with clipped and noisy gradients."""

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 0.1,
        max_norm: float = 1.0,
        noise: float = 1.0,
    ):
        """Set the options.

        Args:
            params: The parameters.
            lr: Learning rate.
            max_norm: C, the norm that no sample's gradient exceeds.
            noise: Standard deviation of the noise in the sum, relative to C.
        """
        super().__init__(params, {"lr": lr, "max_norm": max_norm, "noise": noise})

    def scales(self) -> Tensor:
        """Compute what each sample's gradient is multiplied by.

        Returns:
            Factors ``[N]`` of at most one.
        """
        (group,) = self.param_groups
        norms = sum(p.batch_l2 for p in group["params"]).sqrt()
        return (group["max_norm"] / norms).clamp(max=1.0)

    def clipped(self, p: Parameter) -> Tensor:
        """Add up the clipped gradients of all samples.

        Args:
            p: A parameter.

        Returns:
            The sum, of the parameter's shape.
        """
        return torch.einsum("n,n...->...", self.scales(), p.grad_batch)

    @torch.no_grad()
    def step(self) -> None:
        """Make a step, after a backward pass with both extensions."""
        (group,) = self.param_groups
        for p in group["params"]:
            noise = torch.randn_like(p) * group["noise"] * group["max_norm"]
            batch_size = len(p.grad_batch)
            p.add_(self.clipped(p) + noise, alpha=-group["lr"] / batch_size)


def make_model() -> Sequential:
    """Make the network.

    Returns:
        A network for images ``[N, 1, 28, 28]`` with ten outputs, extended.
    """
    model = Sequential(
        *(Conv2d(1, 8, 5, stride=2), ReLU(), MaxPool2d(2)),
        *(Flatten(), Linear(288, 10)),
    )
    return extend(model)


def check_clipping() -> None:
    """Compare with clipping by hand, one sample at a time."""
    X, y = load_one_batch_mnist(batch_size=8)
    X, model = X.double(), make_model().double()
    lossfunc = extend(CrossEntropyLoss(reduction="sum"))
    params = list(model.parameters())
    optimizer = DPSGD(params, max_norm=2.0)
    with backpack(BatchGrad(), BatchL2Grad()):
        lossfunc(model(X), y).backward()

    expected = [torch.zeros_like(p) for p in params]
    num_clipped = 0
    for x, label in zip(X.split(1), y.split(1)):
        grads = torch.autograd.grad(CrossEntropyLoss()(model(x), label), params)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        num_clipped += int(norm > 2)
        for total, g in zip(expected, grads):
            total.add_(g * min(1.0, 2 / norm.item()))
    assert num_clipped > 0
    for p, total in zip(params, expected):
        assert_close(optimizer.clipped(p), total, rtol=1e-8, atol=1e-12)
    print(f"Clipping agrees with a loop over samples ({num_clipped} of 8 are clipped).")


def train(noise: float, epochs: int = 3) -> float:
    """Train the network on the packaged images.

    Args:
        noise: Standard deviation of the noise in the sum, relative to C.
        epochs: Number of passes over the images. Default: 3.

    Returns:
        Share of the images that are classified correctly at the end.
    """
    torch.manual_seed(0)
    model = make_model()
    lossfunc = extend(CrossEntropyLoss(reduction="sum"))
    optimizer = DPSGD(model.parameters(), lr=0.5, noise=noise)
    clipped = []
    for _ in range(epochs):
        for X, y in get_mnist_dataloader(batch_size=100):
            with backpack(BatchGrad(), BatchL2Grad()):
                lossfunc(model(X), y).backward()
            clipped.append((optimizer.scales() < 1).double().mean().item())
            optimizer.step()

    X, y = load_one_batch_mnist(batch_size=1000, shuffle=False)
    correct = (model(X).argmax(dim=1) == y).double().mean().item()
    share = sum(clipped) / len(clipped)
    print(
        f"noise {noise:>4}: {100 * correct:.1f} % of the images are classified "
        f"correctly; {100 * share:.0f} % of the gradients were clipped"
    )
    return correct


def main() -> None:
    """Check the clipping, then train with three levels of noise."""
    torch.manual_seed(0)
    check_clipping()
    correct = [train(noise) for noise in (0.0, 1.0, 10.0)]
    assert correct[0] > 0.7
    assert correct[1] > correct[2], "more noise, less accuracy"


if __name__ == "__main__":
    main()
