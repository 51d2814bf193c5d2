"""Recurrent networks: read an image row by row.

A recurrent layer sees a sequence. Here it is the 28 rows of an MNIST image, from top to
bottom, and the output after the last row is classified. You learn

- that the batch axis must come first (``batch_first=True``), as everywhere in BackPACK,
- how to put a recurrent layer into a ``Sequential``: it returns a tuple, of which
  ``ReduceTuple`` takes one element, and ``Slicing`` takes the last time step,
- that ``extend(model, use_converter=True)`` does the same to a network that is written
  in the usual way, and splits a recurrent layer with several layers into single ones.

Individual gradients are computed for all parameters of the recurrent layer, and so is
the diagonal of the generalized Gauss-Newton matrix (GGN).
"""

from copy import deepcopy
from typing import Tuple

import torch
from torch import Tensor
from torch.nn import LSTM, RNN, CrossEntropyLoss, Linear, Module, Sequential
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.slicing import Slicing
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist


class Classifier(Module):
    """A recurrent classifier as one writes it in PyTorch."""

    def __init__(self):
        """Create an LSTM of two layers, and a linear one."""
        super().__init__()
        self.recurrent = LSTM(28, 6, num_layers=2, batch_first=True)
        self.head = Linear(6, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Classify.

        Args:
            rows: Sequences ``[N, T, 28]``.

        Returns:
            Outputs ``[N, 10]``.
        """
        output, _ = self.recurrent(rows)
        return self.head(output[:, -1])


def make_sequential(recurrent: Module) -> Sequential:
    """Put a recurrent layer and a classifier into a sequence of modules.

    Args:
        recurrent: A recurrent layer with 6 hidden features.

    Returns:
        A network for sequences ``[N, T, 28]`` with ten outputs.
    """
    last_step = (slice(None), -1)
    return Sequential(recurrent, ReduceTuple(0), Slicing(last_step), Linear(6, 10))


def check(
    name: str, model: Module, reference: Module, data: Tuple[Tensor, Tensor]
) -> None:
    """Compute both quantities, and compare with plain automatic differentiation.

    Args:
        name: What is printed.
        model: The extended network.
        reference: The same network, not extended.
        data: Sequences ``[N, T, 28]`` and labels ``[N]``.
    """
    X, y = data
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(CrossEntropyLoss())(model(X), y).backward()
    print(name)
    for param_name, p in model.named_parameters():
        norms = p.grad_batch.flatten(start_dim=1).norm(dim=1)
        print(
            f"  {param_name:<30} grad_batch {str(list(p.grad_batch.shape)):<11} "
            f"norms {norms.min():.4f} to {norms.max():.4f}, "
            f"trace of the GGN {p.diag_ggn_exact.sum():.4f}"
        )

    params, own = list(reference.parameters()), list(model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(own, params))
    for n, (x, label) in enumerate(zip(X.split(1), y.split(1))):
        loss = CrossEntropyLoss()(reference(x), label) / len(X)
        grads = torch.autograd.grad(loss, params)
        for p, grad in zip(own, grads):
            assert_close(p.grad_batch[n], grad, rtol=1e-8, atol=1e-12)
    diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in own])
    idx = list(range(0, len(diagonal), 29))
    expected = autograd_diag_ggn_exact(X, y, reference, CrossEntropyLoss(), idx=idx)
    assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)


def main() -> None:
    """Look at three recurrent networks."""
    torch.manual_seed(0)
    images, y = load_one_batch_mnist(batch_size=4)
    data = (images.squeeze(1).double(), y)  # [N, 28, 28]: the rows are the time steps
    networks = [
        ("RNN", make_sequential(RNN(28, 6, batch_first=True)), False),
        ("LSTM", make_sequential(LSTM(28, 6, batch_first=True)), False),
        ("LSTM with two layers, converted", Classifier(), True),
    ]
    for name, network, use_converter in networks:
        reference = network.double()
        model = extend(deepcopy(reference), use_converter=use_converter)
        check(name, model, reference, data)
    print("All agree with plain automatic differentiation, one sample at a time.")


if __name__ == "__main__":
    main()
