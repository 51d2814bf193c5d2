"""Look at some samples of the batch only.

Quantities per sample, such as individual gradients or the columns of the generalized
Gauss-Newton matrix (GGN), take memory in proportion to the number of samples. Often a
part of the batch is good enough. With ``subsampling=[0, 3, 7]``, the gradient is still
that of the whole batch, while the quantity is computed for these samples only.

You learn which scale the result has: the samples are selected, nothing else changes.
With a mean loss, each sample's share keeps its factor 1/N. An estimate of something
that is summed over the batch therefore has to be multiplied by N / (number of selected
samples).

As an example, we approximate the leading eigenvalues of the GGN on 64 images by means
of 16 of them. The matrix itself is far too large to be formed, but it has the same
nonzero eigenvalues as the matrix of inner products of its columns, which is small.
"""

import random
from typing import List, Optional

import torch
from torch import Tensor, einsum
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, Module, ReLU, Sequential
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, SqrtGGNExact
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.utils.examples import load_one_batch_mnist


def inner_products(model: Module, num_samples: int, batch_size: int) -> Tensor:
    """Multiply the GGN's columns with each other.

    Args:
        model: The network, with ``sqrt_ggn_exact`` ``[C, n, *p]`` in its parameters.
        num_samples: Number n of samples that were selected.
        batch_size: Number N of samples in the batch.

    Returns:
        Inner products ``[C * n, C * n]`` for the estimate from n samples.
    """
    columns = [p.sqrt_ggn_exact.flatten(start_dim=2) for p in model.parameters()]
    gram = sum(einsum("cnp,dmp->cndm", S, S) for S in columns)
    size = gram.shape[0] * gram.shape[1]
    return gram.reshape(size, size) * batch_size / num_samples


def leading_eigenvalues(
    model: Module, lossfunc: Module, X: Tensor, y: Tensor, samples: Optional[List[int]]
) -> Tensor:
    """Compute the largest eigenvalues of the GGN, or of its estimate from some samples.

    Args:
        model: The extended network.
        lossfunc: The extended loss.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.
        samples: Which samples to use; all if ``None``.

    Returns:
        The ten largest eigenvalues, the largest one first.
    """
    with backpack(SqrtGGNExact(subsampling=samples)):
        lossfunc(model(X), y).backward()
    num_samples = len(X) if samples is None else len(samples)
    gram = inner_products(model, num_samples, len(X))
    return torch.linalg.eigvalsh(gram).flip(0)[:10]


def largest_by_power_iteration(model: Module, X: Tensor, y: Tensor) -> Tensor:
    """Compute the largest eigenvalue of the GGN with plain automatic differentiation.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.

    Returns:
        The eigenvalue.
    """
    output = model(X)
    loss = CrossEntropyLoss()(output, y)
    v = [torch.rand_like(p) for p in model.parameters()]
    for _ in range(300):
        norm = torch.stack([x.norm() for x in v]).norm()
        v = ggn_vector_product(loss, output, model, [x / norm for x in v])
    return torch.stack([x.norm() for x in v]).norm()


def main() -> None:
    """Select samples, check what comes out, and use it."""
    random.seed(0)
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=64)
    X = X.double()
    model = Sequential(
        *(Conv2d(1, 4, 6, stride=4), ReLU(), Flatten(), Linear(144, 10)),
    ).double()
    model, lossfunc = extend(model), extend(CrossEntropyLoss())

    # Individual gradients: the selected rows, in the given order, at the same scale
    with backpack(BatchGrad()):
        lossfunc(model(X), y).backward()
    everything = [(p.grad_batch, p.grad.clone()) for p in model.parameters()]
    model.zero_grad()
    some = [11, 3, 42]
    with backpack(BatchGrad(subsampling=some)):
        lossfunc(model(X), y).backward()
    params = list(model.parameters())
    for p, (grad_batch, grad) in zip(params, everything):
        assert_close(p.grad_batch, grad_batch[some], rtol=1e-8, atol=1e-12)
        assert_close(p.grad, grad, rtol=1e-8, atol=1e-12)
    for row, n in enumerate(some):
        loss = CrossEntropyLoss()(model(X[[n]]), y[[n]]) / len(X)
        for p, expected in zip(params, torch.autograd.grad(loss, params)):
            assert_close(p.grad_batch[row], expected, rtol=1e-8, atol=1e-12)
    shape = list(model[0].weight.grad_batch.shape)
    print(f"Individual gradients of samples {some}: {shape}, as from autograd")

    # The GGN's leading eigenvalues from all samples, and from some
    exact = leading_eigenvalues(model, lossfunc, X, y, samples=None)
    largest = largest_by_power_iteration(model, X, y)
    assert_close(exact[0], largest, rtol=1e-6, atol=0.0)
    rows = {"all 64 samples": exact}
    for num_samples in (32, 16, 8):
        samples = random.sample(range(len(X)), num_samples)
        estimate = leading_eigenvalues(model, lossfunc, X, y, samples)
        rows[f"{num_samples} of them"] = estimate
        assert abs(estimate[0] / exact[0] - 1) < 0.5
    print("Leading eigenvalues of the generalized Gauss-Newton matrix:")
    for name, values in rows.items():
        print(f"  {name:<15} " + " ".join(f"{value:5.2f}" for value in values))


if __name__ == "__main__":
    main()
