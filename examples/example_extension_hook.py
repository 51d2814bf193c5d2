"""Do something after each layer: keep a summary, and free the memory.

Individual gradients of all parameters together take as much memory as the batch has
copies of the network. Often that much is not needed: all you want is a number for each
sample. An extension hook is a function that BackPACK calls for each module as soon as
the extensions have run on it, from the loss back to the first layer. It may read the
results, and delete them, before the next layer's are computed.

You learn how to use such a hook to compute the cosine between each sample's gradient
and the mean gradient: which images agree with the step that the batch takes, and which
work against it. Never do the individual gradients of two layers exist at the same time.
"""

from typing import List

import torch
from torch import Tensor, einsum
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
)
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad
from backpack.utils.examples import load_one_batch_mnist


class CosineHook:
    """Adds up inner products with the mean gradient, layer by layer.

    Attributes:
        visited: Names of the modules that the hook was called for, in order.
        most_numbers: Largest number of entries that individual gradients had at a time.
    """

    def __init__(self, model: Module, batch_size: int):
        """Start with zeros.

        Args:
            model: The network.
            batch_size: Number N of samples.
        """
        self._names = {module: name for name, module in model.named_modules()}
        self._params = list(model.parameters())
        self._dots = torch.zeros(batch_size, dtype=self._params[0].dtype)
        self._squares = torch.zeros_like(self._dots)
        self._mean_square = torch.zeros(())
        self.visited: List[str] = []
        self.most_numbers = 0

    def __call__(self, module: Module) -> None:
        """Read the individual gradients of one module, and delete them.

        Args:
            module: The module on which the extensions have just run.
        """
        self.visited.append(self._names.get(module, "loss"))
        saved = [p.grad_batch for p in self._params if hasattr(p, "grad_batch")]
        self.most_numbers = max(self.most_numbers, sum(g.numel() for g in saved))

        for p in module.parameters(recurse=False):
            # summands of the gradient: their sum is the mean loss's gradient
            gradients = p.grad_batch.flatten(start_dim=1)
            mean = gradients.sum(0)
            self._dots += einsum("np,p->n", gradients, mean)
            self._squares += gradients.square().sum(1)
            self._mean_square = self._mean_square + mean.square().sum()
            del p.grad_batch

    def cosines(self) -> Tensor:
        """Return the result, after the backward pass.

        Returns:
            Cosines ``[N]``.
        """
        return self._dots / (self._squares * self._mean_square).sqrt()


def autograd_cosines(model: Module, X: Tensor, y: Tensor) -> Tensor:
    """Compute the same with plain automatic differentiation, sample by sample.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.

    Returns:
        Cosines ``[N]``.
    """
    params, rows = list(model.parameters()), []
    for x, label in zip(X.split(1), y.split(1)):
        grads = torch.autograd.grad(CrossEntropyLoss()(model(x), label), params)
        rows.append(torch.cat([g.flatten() for g in grads]))
    gradients = torch.stack(rows)
    return torch.cosine_similarity(gradients, gradients.mean(0, keepdim=True))


def main() -> None:
    """Compute the cosines with a hook, and without BackPACK."""
    torch.manual_seed(0)
    model = Sequential(
        *(Conv2d(1, 8, 5, stride=2), ReLU(), MaxPool2d(2)),
        *(Conv2d(8, 16, 3), ReLU(), Flatten(), Linear(256, 10)),
    ).double()
    model, lossfunc = extend(model), extend(CrossEntropyLoss())
    X, y = load_one_batch_mnist(batch_size=64)
    X = X.double()

    hook = CosineHook(model, batch_size=len(X))
    with backpack(BatchGrad(), extension_hook=hook):
        lossfunc(model(X), y).backward()
    print(f"The hook was called for: {', '.join(hook.visited)}")
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())

    total = len(X) * sum(p.numel() for p in model.parameters())
    largest = max(
        len(X) * sum(p.numel() for p in module.parameters(recurse=False))
        for module in model
    )
    assert hook.most_numbers == largest < total
    print(f"At most {largest} numbers were kept at a time, instead of {total}.")

    cosines = hook.cosines()
    assert_close(cosines, autograd_cosines(model, X, y), rtol=1e-8, atol=1e-12)
    print("The cosines agree with plain automatic differentiation.")
    against = int((cosines < 0).sum())
    most, least = cosines.argmax(), cosines.argmin()
    print(
        f"{against} of {len(X)} images work against the mean gradient. Most typical is "
        f"a {y[most]} ({cosines[most]:.2f}), least a {y[least]} ({cosines[least]:.2f})."
    )


if __name__ == "__main__":
    main()
