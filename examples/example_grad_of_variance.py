"""Differentiate what BackPACK computes: the gradient of the gradient's variance.

A quantity is a function of the network's parameters, and sometimes you want to change
the parameters so that it becomes smaller or larger. You learn how: build the graph of
the backward pass (``create_graph=True``), and the fields of the parameters become part
of it. From there, it is ordinary automatic differentiation.

The quantity of this example is the noise of stochastic gradients: the variance of the
individual gradients, summed over all entries. We compute its gradient, check it, and
follow it downhill, together with the loss. The network learns as usual, while its
samples keep pulling in more similar directions.

We call ``torch.autograd.grad`` rather than ``backward``, which would store a gradient
that is itself part of a graph in ``.grad``, and warn that such graphs are not freed.
"""

from typing import List, Tuple

import torch
from torch import Tensor
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, Module, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import Variance
from backpack.utils.examples import load_one_batch_mnist


def make_problem(batch_size: int) -> Tuple[Module, Module, Tensor, Tensor]:
    """Make the same network and data each time.

    Args:
        batch_size: Number N of images.

    Returns:
        Extended network, extended loss, images ``[N, 1, 28, 28]`` and labels ``[N]``.
    """
    torch.manual_seed(0)
    model = Sequential(
        *(Conv2d(1, 4, 6, stride=4), Tanh(), Flatten(), Linear(144, 10)),
    ).double()
    X, y = load_one_batch_mnist(batch_size)
    return extend(model), extend(CrossEntropyLoss()), X.double(), y


def noise(model: Module, lossfunc: Module, X: Tensor, y: Tensor) -> Tuple:
    """Compute the variance of individual gradients so that it can be differentiated.

    Args:
        model: The extended network.
        lossfunc: The extended loss.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.

    Returns:
        Loss, its gradient, and the sum of all variances times N squared: without the
        factor 1/N that the mean loss puts into each summand of the gradient.
    """
    loss, params = lossfunc(model(X), y), list(model.parameters())
    with backpack(Variance()):
        gradient = torch.autograd.grad(loss, params, create_graph=True)
    return loss, gradient, len(X) ** 2 * sum(p.variance.sum() for p in params)


def autograd_noise(model: Module, X: Tensor, y: Tensor) -> Tensor:
    """Compute the same with plain automatic differentiation, sample by sample.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.

    Returns:
        The sum of all variances.
    """
    params, rows = list(model.parameters()), []
    for x, label in zip(X.split(1), y.split(1)):
        loss = CrossEntropyLoss()(model(x), label)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).var(0, unbiased=False).sum()


def train(weight: float, num_steps: int = 60, lr: float = 0.1) -> List[float]:
    """Minimize the loss plus a multiple of the noise.

    Args:
        weight: The multiple.
        num_steps: Number of steps. Default: 60.
        lr: Learning rate. Default: 0.1.

    Returns:
        Loss and noise before the last step.
    """
    model, lossfunc, X, y = make_problem(batch_size=100)
    params = list(model.parameters())
    for _ in range(num_steps):
        loss, gradient, variance = noise(model, lossfunc, X, y)
        of_noise = torch.autograd.grad(variance, params)
        with torch.no_grad():
            for p, g, h in zip(params, gradient, of_noise):
                p.sub_(lr * (g + weight * h))
    values = [loss.item(), variance.item()]
    print(f"weight of the noise {weight}: loss {values[0]:.3f}, noise {values[1]:.3f}")
    return values


def main() -> None:
    """Differentiate the variance, check the result, and use it."""
    model, lossfunc, X, y = make_problem(batch_size=8)
    params = list(model.parameters())
    _, _, variance = noise(model, lossfunc, X, y)
    expected = autograd_noise(model, X, y)
    assert_close(variance, expected, rtol=1e-8, atol=1e-12)
    for (name, _), g, g_expected in zip(
        model.named_parameters(),
        torch.autograd.grad(variance, params),
        torch.autograd.grad(expected, params),
    ):
        assert_close(g, g_expected, rtol=1e-8, atol=1e-12)
        print(f"Gradient of the noise in {name}: {list(g.shape)}, norm {g.norm():.3f}")
    print("It agrees with plain automatic differentiation.")

    without, with_penalty = train(0.0), train(0.02)
    assert with_penalty[1] < without[1]


if __name__ == "__main__":
    main()
