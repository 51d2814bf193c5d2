"""Estimate the trace of the Hessian with random vectors.

The trace of a matrix that is too large to write down can be estimated by products with
random vectors (Hutchinson, 1989, "A stochastic estimator of the trace of the influence
matrix for Laplacian smoothing splines"): if the entries of v are +1 or -1 with equal
probability, then the mean of ``v @ H @ v`` is the trace of H. For the Hessian of a
network, ``HMP`` supplies the products. After the backward pass, each parameter has a
function ``p.hmp`` that multiplies many vectors ``[K, *p]`` at once with its block of
the Hessian, and the traces of the blocks add up to the trace of the whole.

You learn how to use these functions, and how well the estimate works: its error shrinks
like one over the square root of the number of vectors. To have something to compare
with, the exact trace is computed in two ways: from the Hessian's diagonal
(``DiagHessian``), and for a small layer with plain automatic differentiation, entry by
entry.
"""

import torch
from torch import Tensor, einsum
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Parameter,
    Sequential,
    Tanh,
)
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import HMP, DiagHessian
from backpack.utils.examples import load_one_batch_mnist

NUM_VECTORS = (10, 100, 1000)


def summands(p: Parameter, num_vectors: int) -> Tensor:
    """Multiply random vectors with a block of the Hessian, from both sides.

    Args:
        p: The parameter of this block.
        num_vectors: Number K of vectors.

    Returns:
        Numbers ``[K]`` whose mean is an estimate of the block's trace.
    """
    v = 2 * torch.randint(2, (num_vectors, *p.shape)).to(p.dtype) - 1
    return einsum("kp,kp->k", v.flatten(1), p.hmp(v).flatten(1))


def autograd_trace(loss: Tensor, p: Parameter) -> Tensor:
    """Compute the trace of a block by differentiating each entry of the gradient.

    Args:
        loss: The loss.
        p: The parameter of the block.

    Returns:
        The trace.
    """
    (gradient,) = torch.autograd.grad(loss, p, create_graph=True)
    diagonal = [
        torch.autograd.grad(g, p, retain_graph=True)[0].flatten()[i]
        for i, g in enumerate(gradient.flatten())
    ]
    return torch.stack(diagonal).sum()


def main() -> None:
    """Compute the trace, estimate it with more and more vectors, and compare."""
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=16)
    X = X.double()
    model = Sequential(
        *(Conv2d(1, 3, 5, stride=2), MaxPool2d(4), Tanh()),
        *(Flatten(), Linear(27, 10)),
    ).double()
    model, lossfunc = extend(model), extend(CrossEntropyLoss())

    with backpack(DiagHessian(), HMP()):
        lossfunc(model(X), y).backward()
    params = list(model.parameters())
    trace = sum(p.diag_h.sum() for p in params)

    for p in model[0].parameters():
        expected = autograd_trace(CrossEntropyLoss()(model(X), y), p)
        assert_close(p.diag_h.sum(), expected, rtol=1e-8, atol=1e-12)
    # all unit vectors at once instead of random ones: exact, if there are few of them
    bias = model[4].bias
    units = torch.eye(len(bias), dtype=bias.dtype)
    assert_close(bias.hmp(units).trace(), bias.diag_h.sum(), rtol=1e-8, atol=1e-12)
    print(f"Trace of the Hessian: {trace:.4f} (agrees with automatic differentiation)")

    for num_vectors in NUM_VECTORS:
        values = sum(summands(p, num_vectors) for p in params)
        standard_error = values.std() / num_vectors**0.5
        print(
            f"  {num_vectors:>4} random vectors: {values.mean():8.4f}, "
            f"standard error {standard_error:.4f}"
        )
        assert abs(values.mean() - trace) < 5 * standard_error
    assert standard_error < 0.03 * trace, "a thousand vectors give a good estimate"


if __name__ == "__main__":
    main()
