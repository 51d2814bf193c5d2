"""
Every quantity, one after the other
===================================

The recipe is always the same: extend the model and the loss once, run the backward pass
inside ``with backpack(...)``, and read the result off each parameter. Here you learn
under which name, and in which shape, on a small network that looks at MNIST images.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Sequential,
    Sigmoid,
)
from torch.testing import assert_close

from backpack import backpack, extend, extensions
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist
from backpack.utils.kroneckers import kfacs_to_mat

torch.manual_seed(0)
X, y = load_one_batch_mnist(batch_size=8)
X = X.double()
model = Sequential(
    *(Conv2d(1, 3, 5, stride=2), MaxPool2d(4), Sigmoid()),
    *(Flatten(), Linear(27, 10)),
).double()
model, lossfunc = extend(model), extend(CrossEntropyLoss())

# %%
# Ask for each quantity
# ---------------------
# First order comes first: individual gradients, and what can be said about them. Then
# diagonals and square roots of the generalized Gauss-Newton matrix (GGN), exact or with
# Monte-Carlo samples (``MC``), the Jacobian, Kronecker factors, and diagonals of the
# Hessian. The last three are products with curvature matrices: functions rather than
# tensors. Sums that clip and weight gradients, and gradients as factors, have examples
# of their own.

FIRST_ORDER = "BatchGrad BatchL2Grad SumGradSquared Variance BatchDotGrad"
GGN = "DiagGGNExact DiagGGNMC BatchDiagGGNExact BatchDiagGGNMC SqrtGGNExact SqrtGGNMC"
OTHERS = "BatchJacobian KFAC KFLR KFRA EKFAC DiagHessian BatchDiagHessian"
PRODUCTS = "HMP GGNMP PCHMP"


def describe(value) -> str:
    """Say in a few words what a field holds."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, list):
        return "matrices " + ", ".join(describe(factor) for factor in value)
    return "a function of [K, *p]"


for name in f"{FIRST_ORDER} {GGN} {OTHERS} {PRODUCTS}".split():
    extension = getattr(extensions, name)()
    model.zero_grad()
    with backpack(extension):
        lossfunc(model(X), y).backward()
    value = getattr(model[0].weight, extension.savefield)
    print(f"{name:<18} .{extension.savefield:<21} {describe(value)}")

# %%
# What they look like
# -------------------
# Several quantities share one backward pass. The weights of a linear layer that sees
# pixels can be drawn as an image: these belong to the output for the digit three. Where
# a gradient is red, a step makes the weight larger, where it is blue, smaller.

linear = extend(Sequential(Flatten(), Linear(784, 10)))
images, labels = load_one_batch_mnist(batch_size=100)
together = [extensions.BatchGrad(), extensions.Variance()]
together += [extensions.DiagGGNExact(), extensions.DiagHessian()]
with backpack(*together):
    lossfunc(linear(images), labels).backward()

weight, three = linear[1].weight, int((labels == 3).nonzero()[0])
fields = {
    "a three": images[three, 0],
    "its gradient": weight.grad_batch[three, 3],
    "gradient of the batch": weight.grad[3],
    "variance": weight.variance[3].sqrt(),
    "diagonal of the GGN": weight.diag_ggn_exact[3].sqrt(),
    "diagonal of the Hessian": weight.diag_h[3].sqrt(),
}
fig, axes = plt.subplots(2, 3, figsize=(7, 5), layout="constrained")
for ax, (title, values) in zip(axes.flat, fields.items()):
    signed = {"cmap": "RdBu", "vmin": -abs(values).max(), "vmax": abs(values).max()}
    style = signed if "gradient" in title else {"cmap": "viridis"}
    ax.imshow(values.detach().reshape(28, 28).numpy(), **style)
    ax.set_title(title, fontsize=10)
    ax.axis("off")
plt.show()

# %%
# Check that they fit together
# ----------------------------
# All quantities describe the same batch. First order follows from individual gradients,
# which autograd computes one sample at a time; diagonals follow from products with unit
# vectors, and the GGN's from its factor, too.

params, rows = list(model.parameters()), []
for image, label in zip(X.split(1), y.split(1)):
    loss = CrossEntropyLoss()(model(image), label) / len(X)
    rows.append(torch.autograd.grad(loss, params))

for p, column in zip(params, zip(*rows)):
    g, units = torch.stack(column), torch.eye(p.numel()).to(p).reshape(-1, *p.shape)
    hessian, ggn, positive = (
        product(units).flatten(1) for product in (p.hmp, p.ggnmp, p.pchmp)
    )
    for actual, expected in [
        (p.grad_batch, g),
        (p.batch_l2, g.flatten(1).square().sum(1)),
        (p.sum_grad_squared, g.square().sum(0)),
        (p.variance, g.var(0, unbiased=False)),
        (p.batch_dot, g.flatten(1) @ g.flatten(1).T),
        (p.diag_ggn_exact_batch.sum(0), p.diag_ggn_exact),
        (p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact),
        (p.diag_h_batch.sum(0), p.diag_h),
        (p.diag_h.flatten(), hessian.diag()),
        (p.diag_ggn_exact.flatten(), ggn.diag()),
    ]:
        assert_close(actual, expected, rtol=1e-8, atol=1e-12)
    assert torch.linalg.eigvalsh(positive).min() > -1e-10
    assert kfacs_to_mat(p.kfac).shape == ggn.shape

# for the bias of a linear layer, the Kronecker factor is exact
assert_close(kfacs_to_mat(p.kflr), ggn, rtol=1e-8, atol=1e-12)
diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in params])[::7]
idx = list(range(0, sum(p.numel() for p in params), 7))
expected = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(), idx=idx)
assert_close(diagonal, expected, rtol=1e-8, atol=1e-12)
print("They agree with each other, and with plain automatic differentiation.")
