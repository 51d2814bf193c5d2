"""
Which training images influence a prediction?
=============================================

Why does a network think that this is a three? Because of images that it was trained on.
Leaving out a training image m moves the trained parameters by, to first order, H⁻¹ gₘ
with the curvature H of what is minimized, and the loss of a test image n by gₙᵀ H⁻¹ gₘ
(Koh and Liang, 2017, "Understanding black-box predictions via influence functions").
EKFAC stands in for H, as it does for large language models (Grosse et al., 2023), and
dot products between two batches take a pass over each, without forming a gradient.
"""

from typing import Dict, List, Optional

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh
from torch.nn.functional import avg_pool2d
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import EKFAC, BatchDotGrad, BatchFactors
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
digits, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
images = avg_pool2d(digits, 2).flatten(1).double()  # 14 x 14 pixels
train, y_train = images[:200], labels[:200]
test, y_test = images[500:600], labels[500:600]
model = extend(Sequential(Linear(196, 12), Tanh(), Linear(12, 10)).double())
lossfunc = extend(CrossEntropyLoss(reduction="sum"))
params, DECAY = list(model.parameters()), 1.0


def fit(keep: Tensor, start: Optional[List[Tensor]] = None, steps: int = 400) -> Tensor:
    """Minimize the losses of some images, plus weight decay; return the test losses."""
    for p, value in zip(params, start or []):
        p.data.copy_(value)
    options = {"tolerance_change": 1e-12, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(params, max_iter=steps, history_size=30, **options)

    def closure() -> Tensor:
        """Evaluate what is minimized, with gradients."""
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in params)
        loss = lossfunc(model(train[keep]), y_train[keep]) + DECAY / 2 * squares
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return CrossEntropyLoss(reduction="none")(model(test), y_test)


everything = torch.arange(len(train))
losses = fit(everything)
trained = [p.detach().clone() for p in params]
predictions = model(test).argmax(1)
accuracy = (predictions == y_test).double().mean()
print(f"Correct: {100 * accuracy:.0f} % of {len(test)} test images")

# %%
# Two batches, and the curvature between them
# -------------------------------------------
# ``BatchFactors`` keeps the test images' gradients as what they are made of: inputs and
# output gradients of each layer. They are multiplied with the inverse of the curvature
# once, and then meet the training images' gradients.

with backpack(BatchFactors(), gradient=False):
    lossfunc(model(test), y_test).backward()
with backpack(EKFAC(fisher_type="exact"), gradient=False):
    lossfunc(model(train), y_train).backward()


def products(other: Dict) -> Tensor:
    """Return products of training images' gradients with others: ``[200, 100]``."""
    with backpack(BatchDotGrad(other=other), gradient=False):
        lossfunc(model(train), y_train).backward()
    return sum(p.batch_dot for p in params)


dots = products({p: p.grad_factors for p in params})
influence = products({p: p.grad_factors.precondition(p.ekfac, DECAY) for p in params})

# %%
# Who helps, and who hurts
# ------------------------
# Test images with the largest loss. Green: without these training images, their loss
# would rise most. Red: it would fall most.

fig, axes = plt.subplots(4, 7, figsize=(8, 5), layout="constrained")
for row, n in zip(axes, losses.argsort(descending=True).tolist()):
    order = influence[:, n].argsort(descending=True).tolist()
    row[0].imshow(digits[500 + n, 0].numpy(), cmap="gray")
    row[0].set_title(f"{y_test[n]}, seen as {predictions[n]}", fontsize=8)
    for ax, m, color in zip(row[1:], order[:3] + order[-3:], "gggrrr"):
        ax.imshow(digits[m, 0].numpy(), cmap="gray")
        ax.set_title(f"{y_train[m]}: {influence[m, n]:+.2f}", color=color, fontsize=8)
for ax in axes.flat:
    ax.axis("off")
plt.show()
same = (y_train[influence.argmax(0)] == y_test).double().mean()
print(f"The most helpful one is the same digit for {100 * same:.0f} % of them.")
assert same > 0.9

# %%
# Is it true?
# -----------
# Leave out each of the most influential images, train again, and look at all test
# losses. Plain dot products, which take the curvature to be the same in all directions,
# know less.

changes = []
chosen = influence.abs().sum(1).argsort(descending=True)[:10]
for m in chosen:
    changes.append(fit(everything[everything != m], trained, steps=100) - losses)
changes = torch.stack(changes)

fig, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
correlations = []
for ax, values, title in zip(axes, (dots, influence), ("dot products", "with EKFAC")):
    both = torch.stack([values[chosen].flatten(), changes.flatten()])
    correlations.append(torch.corrcoef(both)[0, 1].item())
    ax.plot(*both, ".", alpha=0.4)
    ax.set(title=f"{title}: correlation {correlations[-1]:.2f}", xlabel="predicted")
axes[0].set_ylabel("change of a test loss")
plt.show()
print("Correlations: {:.2f} of dot products, {:.2f} with EKFAC".format(*correlations))
assert correlations[1] > max(0.5, correlations[0])

# %%
# Check
# -----
# The products are those of autograd's gradients.

for p, value in zip(params, trained):
    p.data.copy_(value)
for m, n in [(0, 0), (5, 7)]:
    of_train = torch.autograd.grad(lossfunc(model(train[[m]]), y_train[[m]]), params)
    of_test = torch.autograd.grad(lossfunc(model(test[[n]]), y_test[[n]]), params)
    expected = sum((a * b).sum() for a, b in zip(of_train, of_test))
    assert_close(dots[m, n], expected, rtol=1e-8, atol=1e-12)
print("Products between batches agree with autograd.")
