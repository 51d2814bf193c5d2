"""Jacobians of a network's outputs, for all samples at once.

Individual gradients need not come from a loss. What BackPACK sees is the tensor that
you call ``backward`` on, and if that is one output of the network, summed over the
batch, then its "individual gradients" are that output's derivatives for each sample: a
row of each sample's Jacobian. Ten outputs take ten backward passes, whatever the batch
size.

You also learn how to go through the same graph several times. PyTorch needs
``backward(retain_graph=True)`` for that, and BackPACK ``backpack(...,
retain_graph=True)``, so that it keeps each layer's inputs and outputs as well.

What Jacobians are good for: their products with each other, summed over all parameters,
are the network's tangent kernel. It says how strongly a step for one image changes the
prediction for another one. At the end, we ask which images an untrained network finds
similar by this measure: more often than not, they show the same digit.
"""

from typing import Dict

import torch
from torch import Tensor, einsum
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend, memory_cleanup
from backpack.extensions import BatchGrad
from backpack.utils.examples import load_one_batch_mnist


def jacobians(model: Module, X: Tensor) -> Dict[str, Tensor]:
    """Compute the Jacobian of each sample's outputs with BackPACK.

    Args:
        model: The extended network.
        X: Images ``[N, 1, 28, 28]``.

    Returns:
        Jacobians ``[N, C, *p]`` of each parameter.
    """
    output = model(X)
    rows = []
    for c in range(output.shape[1]):
        with backpack(BatchGrad(), retain_graph=True):
            output[:, c].sum().backward(retain_graph=True)
        rows.append({name: p.grad_batch for name, p in model.named_parameters()})
    memory_cleanup(model)  # otherwise the next forward pass replaces what was kept
    return {name: torch.stack([row[name] for row in rows], dim=1) for name in rows[0]}


def autograd_jacobians(model: Module, X: Tensor) -> Dict[str, Tensor]:
    """Compute the same with plain automatic differentiation, entry by entry.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.

    Returns:
        Jacobians ``[N, C, *p]`` of each parameter.
    """
    params = dict(model.named_parameters())
    samples = []
    for x in X.split(1):
        outputs = model(x).squeeze(0)
        rows = [
            torch.autograd.grad(f, list(params.values()), retain_graph=True)
            for f in outputs
        ]
        samples.append([torch.stack(row) for row in zip(*rows)])
    return {name: torch.stack(column) for name, column in zip(params, zip(*samples))}


def tangent_kernel(rows: Dict[str, Tensor]) -> Tensor:
    """Multiply Jacobians with each other.

    Args:
        rows: Jacobians ``[N, C, *p]`` of each parameter.

    Returns:
        The kernel ``[N, N]``, summed over the outputs.
    """
    flat = [J.flatten(start_dim=2) for J in rows.values()]
    return sum(einsum("ncp,mcp->nm", J, J) for J in flat)


def main() -> None:
    """Compute Jacobians both ways, then look for similar images."""
    torch.manual_seed(0)
    model = Sequential(
        *(Conv2d(1, 4, 5, stride=2), Tanh(), MaxPool2d(3)),
        *(Flatten(), Linear(64, 20), Tanh(), Linear(20, 10)),
    ).double()
    model = extend(model)

    X, _ = load_one_batch_mnist(batch_size=5)
    ours, theirs = jacobians(model, X.double()), autograd_jacobians(model, X.double())
    for name, J in ours.items():
        assert_close(J, theirs[name], rtol=1e-8, atol=1e-12)
        print(f"Jacobian of 10 outputs with respect to {name}: {list(J.shape)}")
    assert not hasattr(model[0], "input0"), "the layers' inputs have been dropped"

    X, y = load_one_batch_mnist(batch_size=100)
    kernel = tangent_kernel(jacobians(model, X.double()))
    assert torch.linalg.eigvalsh(kernel).min() > -1e-8 * kernel.trace()

    length = kernel.diag().sqrt()
    cosine = (kernel / length / length.unsqueeze(1)).fill_diagonal_(0)
    same = (y[cosine.argmax(dim=1)] == y).double().mean()
    chance = (y == y.unsqueeze(1)).double().mean()
    print(
        f"The most similar of {len(X)} images shows the same digit for "
        f"{100 * same:.0f} % of them; a random one does for {100 * chance:.0f} %."
    )
    assert same > 0.5


if __name__ == "__main__":
    main()
