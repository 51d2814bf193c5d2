"""
Compile a step: one graph for gradient and quantities
=====================================================

A small network takes less time to compute than Python takes to start its operations.
``compile_step`` records a step once, forward pass, backward pass and quantities, and
hands all of it to ``torch.compile`` as one graph. Here it trains a network and watches
the norms of individual gradients, next to the same training step by step.
"""

from time import process_time
from typing import Callable, List, Tuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, compile_step, extend
from backpack.extensions import BatchL2Grad, Variance
from backpack.utils.examples import load_one_batch_mnist

images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False, flat=True)
images, lossfunc = images.double(), extend(CrossEntropyLoss())


def make_model() -> Sequential:
    """Make the same extended network each time."""
    torch.manual_seed(0)
    layers = [Linear(784, 16), Tanh(), Linear(16, 16), Tanh(), Linear(16, 10)]
    return extend(Sequential(*layers).double())


# %%
# The step
# --------
#
# The closure takes tensors, and returns the loss. What else it does is decided when it
# is recorded: the network, the loss and the quantities. Batches and parameters may
# change. The backend here runs the recorded operations as they are. The default one
# makes code of them, which is faster and takes a C++ compiler.


def compiled(model: Sequential) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a step that is recorded and compiled when it is called first."""
    quantities = BatchL2Grad(), Variance()
    return compile_step(
        lambda X, y: lossfunc(model(X), y), *quantities, backend="aot_eager"
    )


def plain(model: Sequential) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the same step, by Python."""

    def step(X: Tensor, y: Tensor) -> Tensor:
        """Compute the loss, its gradient, and the quantities."""
        with backpack(BatchL2Grad(), Variance()):
            loss = lossfunc(model(X), y)
            loss.backward()
        return loss.detach()

    return step


# %%
# Train
# -----
#
# The step leaves gradients and quantities on the parameters, as always. So the rest of
# a training does not change.


def train(make_step: Callable) -> Tuple[List[Tensor], List[float]]:
    """Return norms of individual gradients, and milliseconds, of each step."""
    model, norms, times = make_model(), [], []
    step = make_step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in torch.randint(1000, (150, 32)):
        optimizer.zero_grad()
        start = process_time()
        step(images[batch], labels[batch])
        times.append(1e3 * (process_time() - start))
        optimizer.step()
        norms.append(32 * sum(p.batch_l2 for p in model.parameters()).sqrt())
    return norms, times


runs = {"plain": train(plain), "compiled": train(compiled)}

# %%
# The first call takes as long as the recording does. Each other one goes without what
# Python does in a plain step: on small networks, that is much of it.

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, (_, times) in runs.items():
    left.semilogy(times, label=name)
    first, later = times[0] / 1e3, sorted(times[1:])[len(times) // 2]
    print(f"{name}: first step {first:.2f} s, each other one {later:.2f} ms")
left.set(xlabel="step", ylabel="milliseconds of processor time")
left.legend()
shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.double)
low, median, high = torch.stack(runs["compiled"][0]).quantile(shares, dim=1).tolist()
right.fill_between(range(150), low, high, alpha=0.3, label="80 % of the batch")
right.plot(median, label="median")
right.set(xlabel="step", ylabel="norm of a sample's gradient")
right.legend()
plt.show()

# %%
# Check
# -----
#
# Both trainings are the same one.

for norms, expected in zip(runs["compiled"][0], runs["plain"][0]):
    assert_close(norms, expected, rtol=1e-6, atol=1e-8)
assert median[-1] < 0.5 * median[0], "most images are learned"
print("The compiled step computes what the plain one does.")
