"""Go through the same graph twice, with other quantities the second time.

Usually a graph is used once: PyTorch frees it during the backward pass, and BackPACK
drops what it has kept of each layer, its inputs and its output. There are occasions to
use it again, for instance to decide after a look at the gradients whether second-order
quantities are worth the effort. You learn

- that it takes two switches, one for each: ``backward(retain_graph=True)`` and
  ``backpack(..., retain_graph=True)``,
- where inputs and outputs are kept (``module.input0``, ``module.output``),
- how to get rid of them: the last backward pass does it, and if there is none,
  ``memory_cleanup``.
"""

import torch
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, Module, ReLU, Sequential
from torch.testing import assert_close

from backpack import backpack, extend, memory_cleanup
from backpack.extensions import BatchGrad, DiagGGNExact, Variance
from backpack.utils.examples import load_one_batch_mnist


def count_kept(model: Module) -> int:
    """Count the numbers that modules keep: inputs and outputs.

    Args:
        model: The network.

    Returns:
        How many.
    """
    kept = [
        getattr(module, name)
        for module in model.modules()
        for name in ("input0", "output")
        if hasattr(module, name)
    ]
    return sum(tensor.numel() for tensor in kept)


def main() -> None:
    """Compute quantities in three passes through one graph."""
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=16)
    X = X.double()
    model = Sequential(
        *(Conv2d(1, 4, 5, stride=3), ReLU(), Flatten(), Linear(256, 10)),
    ).double()
    model, lossfunc = extend(model), extend(CrossEntropyLoss())

    # what is to come out: each quantity in a forward and a backward pass of its own
    expected = {}
    for extension in (BatchGrad(), Variance(), DiagGGNExact()):
        with backpack(extension):
            lossfunc(model(X), y).backward()
        field = extension.savefield
        expected[field] = [getattr(p, field) for p in model.parameters()]
    print(f"Numbers kept after such a pass: {count_kept(model)}")

    loss = lossfunc(model(X), y)
    print(f"Numbers kept after the forward pass: {count_kept(model)}")

    with backpack(BatchGrad(), Variance(), retain_graph=True):
        loss.backward(retain_graph=True)
    kept = count_kept(model)
    assert kept > 0
    print(f"Numbers kept after a backward pass with retain_graph=True: {kept}")

    squared_mean = sum(p.grad_batch.mean(0).square().sum() for p in model.parameters())
    variance = sum(p.variance.sum() for p in model.parameters())
    print(f"Noise of the gradients: {(variance / squared_mean).sqrt():.2f}")

    with backpack(DiagGGNExact()):
        loss.backward()
    assert count_kept(model) == 0
    print(f"Numbers kept after the last backward pass: {count_kept(model)}")

    for field, values in expected.items():
        for p, value in zip(model.parameters(), values):
            assert_close(getattr(p, field), value, rtol=1e-8, atol=1e-12)
    print("The quantities are the same as from separate graphs.")

    # Forgot something? The graph is gone, and you are told so.
    try:
        with backpack(BatchGrad()):
            loss.backward()
    except RuntimeError as error:
        print(f"A further pass fails: {str(error).split('. ')[0]}.")
    else:
        raise AssertionError("the graph should have been freed")

    # A forward pass without a backward pass leaves tensors behind, too.
    lossfunc(model(X), y)
    assert count_kept(model) > 0
    memory_cleanup(model)
    assert count_kept(model) == 0


if __name__ == "__main__":
    main()
