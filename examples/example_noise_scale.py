"""
Which batch size? Ask the noise of the gradients
================================================

A batch gradient is a mean over samples. If it is mostly noise, a larger batch makes
better steps; if there is hardly any, it wastes time. Both balance at the *gradient
noise scale* (McCandlish et al., 2018, "An empirical model of large-batch training"),

.. math:: B = \\frac{\\mathrm{tr}(\\Sigma)}{\\lVert g \\rVert^2} \\,,

with the covariance of individual gradients, and their mean g. ``Variance`` knows its
diagonal, from the backward pass of the gradient.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, ReLU, Sequential
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, Variance
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
layers = [Conv2d(1, 8, 5, stride=3), ReLU(), Flatten(), Linear(512, 10)]
model, lossfunc = extend(Sequential(*layers)), extend(CrossEntropyLoss())
params = list(model.parameters())

# %%
# Measure
# -------
# With a mean loss, individual gradients have a factor 1/N, and their variance its
# square. The squared norm of a batch gradient contains noise itself, which is
# subtracted.


def trace_and_square() -> tuple[Tensor, Tensor]:
    """Return tr(Σ) and the squared norm of the mean, after a pass with Variance."""
    N = 250
    trace = N**2 * sum(p.variance.sum() for p in params) * N / (N - 1)
    return trace, sum(p.grad.square().sum() for p in params) - trace / N


optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
traces, squares, losses = [], [], []
for step in range(60):
    batch = torch.randperm(1000)[:250]
    optimizer.zero_grad()
    loss = lossfunc(model(images[batch]), labels[batch])
    with backpack(Variance()):
        loss.backward()
    trace, square = trace_and_square()
    traces.append(trace.item())
    squares.append(square.item())
    losses.append(loss.item())
    if step == 20:
        predicted = trace.item()
        g_full = torch.autograd.grad(lossfunc(model(images), labels), params)
        errors = {B: [] for B in (5, 10, 20, 50, 100)}
        for B in [B for B in errors for _ in range(40)]:
            few = torch.randint(1000, (B,))
            g = torch.autograd.grad(lossfunc(model(images[few]), labels[few]), params)
            differences = [(a - b).square().sum() for a, b in zip(g, g_full)]
            errors[B].append(sum(differences).item())
    optimizer.step()

# %%
# What it tells
# -------------
# Both parts are averaged over steps before they are divided: the squared norm is close
# to zero at times.
#
# Left: in the beginning samples agree, and small batches do; later on, larger ones pay.
# Right: that the formula holds. The squared error of a gradient from B samples is
# tr(Σ) / B, as one batch of another size has predicted.


def smooth(values: list[float]) -> list[float]:
    """Average each value with up to nine before it."""
    recent = [values[max(0, i - 9) : i + 1] for i in range(len(values))]
    return [sum(few) / len(few) for few in recent]


scales = [trace / square for trace, square in zip(smooth(traces), smooth(squares))]
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.semilogy(scales)
left.set(xlabel="step", ylabel="noise scale: batch size to choose")
left.grid(alpha=0.3)
means = {B: sum(values) / len(values) for B, values in errors.items()}
right.loglog(list(means), list(means.values()), "o", label="measured, step 20")
right.loglog(list(means), [predicted / B for B in means], "k--", label="predicted")
right.set(xlabel="batch size", ylabel="squared error of the gradient")
right.legend()
plt.show()

early, late = scales[4], scales[-1]
print(f"Noise scale {early:.0f} at the start, {late:.0f} after {len(scales)} steps")
assert late > 3 * early and losses[-1] < losses[0] / 2
assert all(0.6 < means[B] / (predicted / B) < 1.6 for B in means)

# %%
# Check
# -----
# The trace is that of the covariance of gradients by autograd, one sample at a time.

X, y, model = images[:8].double(), labels[:8], model.double()
params = list(model.parameters())
with backpack(Variance(), BatchGrad()):
    lossfunc(model(X), y).backward()
rows = []
for n in range(8):
    grads = torch.autograd.grad(lossfunc(model(X[[n]]), y[[n]]), params)
    rows.append(torch.cat([g.flatten() for g in grads]))
expected = torch.stack(rows).var(0, unbiased=False).sum()
assert_close(64 * sum(p.variance.sum() for p in params), expected, rtol=1e-8, atol=0.0)
