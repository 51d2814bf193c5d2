"""Write an optimizer that uses curvature: scale the gradient by the GGN's diagonal.

Gradient descent takes the same learning rate for all parameters, though the loss bends
strongly in some directions and hardly in others. The diagonal of the generalized
Gauss-Newton matrix (GGN) tells the two apart, entry by entry. With learning rate and
damping, the update is

    p  <-  p - lr * grad / (diag_ggn + damping)

You learn how little that takes: an optimizer finds the diagonal where it finds the
gradient, on the parameter. The exact diagonal needs as many columns as there are
classes, pulled back through the network; ``DiagGGNMC`` draws a few random ones instead,
which is cheaper, and takes a smaller learning rate, because it is noisy.
"""

from typing import Iterable, List, Tuple

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
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Optimizer
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import DiagGGNExact, DiagGGNMC
from backpack.utils.examples import (
    autograd_diag_ggn_exact,
    get_mnist_dataloader,
    load_one_batch_mnist,
)


class DiagGGNOptimizer(Optimizer):
    """Gradient descent, where each entry has a step size of its own."""

    def __init__(
        self,
        params: Iterable[Parameter],
        field: str,
        lr: float = 0.03,
        damping: float = 0.1,
    ):
        """Set the options.

        Args:
            params: The parameters.
            field: Where the diagonal is found: ``"diag_ggn_exact"``, ``"diag_ggn_mc"``.
            lr: Learning rate.
            damping: What is added to the diagonal.
        """
        super().__init__(params, {"lr": lr, "damping": damping, "field": field})

    @torch.no_grad()
    def step(self) -> None:
        """Make a step, after a backward pass that has set gradient and diagonal."""
        for group in self.param_groups:
            for p in group["params"]:
                curvature = getattr(p, group["field"]) + group["damping"]
                p.addcdiv_(p.grad, curvature, value=-group["lr"])


def make_model() -> Sequential:
    """Make the network, with the same parameters each time.

    Returns:
        A network for images ``[N, 1, 28, 28]`` with ten outputs, extended.
    """
    torch.manual_seed(0)
    model = Sequential(
        *(Conv2d(1, 6, 5, stride=2), ReLU(), MaxPool2d(2)),
        *(Flatten(), Linear(216, 20), ReLU(), Linear(20, 10)),
    )
    return extend(model)


def evaluate(model: Sequential, X: Tensor, y: Tensor) -> Tuple[float, float]:
    """Evaluate the network.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.

    Returns:
        Loss, and the share of images that are classified correctly.
    """
    with torch.no_grad():
        output = model(X)
        correct = (output.argmax(dim=1) == y).double().mean()
        return CrossEntropyLoss()(output, y).item(), correct.item()


def train(name: str, extensions: List, lr: float, epochs: int = 2) -> float:
    """Train the network on the packaged images, and print how it goes.

    Args:
        name: What is printed.
        extensions: What the optimizer needs; none for gradient descent.
        lr: Learning rate.
        epochs: Number of passes over the images. Default: 2.

    Returns:
        The loss at the end.
    """
    model, lossfunc = make_model(), extend(CrossEntropyLoss())
    optimizer: Optimizer = SGD(model.parameters(), lr=lr)
    if extensions:
        field = extensions[0].savefield
        optimizer = DiagGGNOptimizer(model.parameters(), field, lr=lr)

    all_images = load_one_batch_mnist(batch_size=1000, shuffle=False)
    for _ in range(epochs):
        for X, y in get_mnist_dataloader(batch_size=64):
            optimizer.zero_grad()
            with backpack(*extensions):
                lossfunc(model(X), y).backward()
            optimizer.step()
    loss, correct = evaluate(model, *all_images)
    print(f"{name:<17} loss {loss:.3f}, {100 * correct:.1f} % correct")
    return loss


def check_diagonal() -> None:
    """Check some entries of the diagonal against plain automatic differentiation."""
    X, y = load_one_batch_mnist(batch_size=10)
    X, model = X.double(), make_model().double()
    with backpack(DiagGGNExact()):
        extend(CrossEntropyLoss())(model(X), y).backward()
    diagonal = parameters_to_vector([p.diag_ggn_exact for p in model.parameters()])
    idx = list(range(0, len(diagonal), 101))
    expected = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(), idx=idx)
    assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)


def main() -> None:
    """Train with plain gradients, and with gradients scaled by two diagonals."""
    check_diagonal()
    sgd = train("gradient descent", [], lr=0.1)
    exact = train("DiagGGNExact", [DiagGGNExact()], lr=0.03)
    sampled = train("DiagGGNMC", [DiagGGNMC(mc_samples=5)], lr=0.02)
    assert max(exact, sampled) < sgd


if __name__ == "__main__":
    main()
