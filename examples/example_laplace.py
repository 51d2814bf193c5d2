"""
Laplace approximation: a network that knows what it doesn't know
================================================================

A trained network is sure of itself everywhere, also far away from any data. The Laplace
approximation (MacKay, 1992) makes a distribution of its weights: a Gaussian around what
was trained, whose precision is the curvature of the loss, and with it a distribution of
predictions. The curvature of the last layer is cheap; that of all layers knows more.
Here are both, for petals of irises.
"""

from typing import List, Tuple

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_iris
from torch import Tensor, einsum
from torch.nn import CrossEntropyLoss, Linear, Parameter, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, SqrtGGNExact
from backpack.utils.examples import autograd_diag_ggn_exact

torch.manual_seed(0)
X, y = (torch.from_numpy(a) for a in load_iris(return_X_y=True))
X = (X[:, 2:] - X[:, 2:].mean(0)) / X[:, 2:].std(0)  # length and width of petals
lossfunc = extend(CrossEntropyLoss(reduction="sum"))
model = extend(Sequential(Linear(2, 16), Tanh(), Linear(16, 3)).double())
PRIOR = 0.3  # precision of the weights before any data

optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200)


def closure() -> Tensor:
    """Evaluate the loss and the prior, with gradients."""
    optimizer.zero_grad()
    squares = sum(p.square().sum() for p in model.parameters())
    loss = lossfunc(model(X), y) + PRIOR / 2 * squares
    loss.backward()
    return loss


optimizer.step(closure)
accuracy = (model(X).argmax(1) == y).double().mean()
print(f"Trained: {100 * accuracy:.0f} % of 150 irises are classified correctly.")
assert accuracy > 0.9

# %%
# Curvature
# ---------
# The loss is a sum over samples; so is the generalized Gauss-Newton matrix (GGN). With
# its root V, a block for any set of parameters is V times its own transpose.


def covariance(params: List[Parameter]) -> Tensor:
    """Return the posterior's covariance ``[D, D]`` of some parameters."""
    with backpack(SqrtGGNExact()):
        lossfunc(model(X), y).backward()
    V = torch.cat([p.sqrt_ggn_exact.flatten(2).flatten(0, 1) for p in params], dim=1)
    return torch.linalg.inv(V.T @ V + PRIOR * torch.eye(V.shape[1]))


# %%
# Predictions
# -----------
# Logits are linear in small changes of the weights, so that they are Gaussian, too,
# with the Jacobian from weights to logits. Each of its rows is the individual gradient
# of an output. Probabilities are means over random logits.


def predict(
    X: Tensor, params: List[Parameter], draws: int = 200
) -> Tuple[Tensor, Tensor]:
    """Return probabilities ``[N, 3]`` and the logits' variances ``[N, 3]``."""
    posterior, output, rows = covariance(params), model(X), []
    for c in range(3):
        with backpack(BatchGrad(), retain_graph=True):
            output[:, c].sum().backward(retain_graph=True)
        rows.append(torch.cat([p.grad_batch.flatten(1) for p in params], dim=1))
    J = torch.stack(rows, dim=1)
    of_logits = einsum("ncp,pq,ndq->ncd", J, posterior, J)
    root = torch.linalg.cholesky(of_logits + 1e-8 * torch.eye(3))
    logits = output + einsum(
        "ncd,snd->snc", root, torch.randn(draws, len(X), 3).double()
    )
    return logits.softmax(2).mean(0).detach(), of_logits.diagonal(dim1=1, dim2=2)


torch.set_default_dtype(torch.float64)
everything = list(model.parameters())
line = torch.linspace(-5, 5, 50)
grid = torch.cartesian_prod(line, line)
probabilities = {
    "trained network": model(grid).softmax(1).detach(),
    "Laplace, last layer": predict(grid, everything[2:])[0],
    "Laplace, all layers": predict(grid, everything)[0],
}
torch.set_default_dtype(torch.float32)

fig, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained")
for ax, (title, p) in zip(axes, probabilities.items()):
    confidence = p.amax(1).reshape(50, 50).T
    filled = ax.contourf(line, line, confidence, levels=torch.linspace(0.33, 1, 12))
    ax.scatter(*X.T, c=y, cmap="Reds", edgecolors="k", s=14)
    ax.set(title=title, xlabel="length of petals")
axes[0].set_ylabel("width of petals")
fig.colorbar(filled, ax=axes, label="confidence", format="%.2f")
plt.show()

# %%
# Uncertainty grows away from the data.

far = torch.cdist(grid, X).amin(1) > 3
near = torch.cdist(grid, X).amin(1) < 0.3
for title, p in probabilities.items():
    confidence = p.amax(1)
    print(f"{title}: confidence {confidence[near].mean():.2f} near", end=" ")
    print(f"the data, {confidence[far].mean():.2f} far from it")
trained, last, full = (p.amax(1)[far].mean() for p in probabilities.values())
assert trained > last > full
assert predict(grid[far], everything)[1].mean() > predict(X, everything)[1].mean()

# %%
# Check
# -----
# The diagonal of the GGN, by plain automatic differentiation.

precision = torch.linalg.inv(covariance(everything))
diagonal = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(reduction="sum"))
assert_close(precision.diag() - PRIOR, diagonal, rtol=1e-5, atol=1e-7)
