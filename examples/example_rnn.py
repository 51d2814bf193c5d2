"""
Recurrent networks: which rows of an image matter
=================================================

A recurrent layer sees a sequence. Here it is the 28 rows of an MNIST image, from top to
bottom, and the output after the last row is classified. The batch axis comes first
(``batch_first=True``), as everywhere in BackPACK. All parameters of a recurrent layer
get individual gradients, and quantities of the Gauss-Newton family.
"""

import matplotlib.pyplot as plt
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
        """Map sequences ``[N, T, 28]`` to outputs ``[N, 10]``."""
        output, _ = self.recurrent(rows)
        return self.head(output[:, -1])


# %%
# As it is, in a Sequential, or converted
# ---------------------------------------
# The network may be written in the usual way. Where modules are wanted only, as for
# quantities of the Hessian, a recurrent layer returns a tuple, of which ``ReduceTuple``
# takes one element and ``Slicing`` the last time step. ``use_converter=True`` does the
# same to a network, and splits an LSTM with several layers into single ones.

torch.manual_seed(0)
images, y = load_one_batch_mnist(batch_size=64)
X = images.squeeze(1).double()  # [N, 28, 28]: the rows are the time steps
pick = [ReduceTuple(0), Slicing((slice(None), -1))]
networks = {
    "LSTM with two layers": extend(Classifier().double()),
    "RNN in a Sequential": extend(
        Sequential(RNN(28, 6, batch_first=True), *pick, Linear(6, 10)).double()
    ),
    "LSTM, converted": extend(Classifier().double(), use_converter=True),
}
lossfunc = extend(CrossEntropyLoss())
for title, model in networks.items():
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(X), y).backward()
    print(title)
    for name, p in model.named_parameters():
        print(f"  {name:<30} {str(list(p.grad_batch.shape)):<14}", end="")
        print(f"trace of the GGN {p.diag_ggn_exact.sum():.4f}")

# %%
# Columns of pixels
# -----------------
# The first layer's weight has an entry for each column of pixels and each of the four
# gates of an LSTM. How far does the gradient of an image reach into them? The norms for
# each sample and column, next to the images that have the largest ones.

model = networks["LSTM with two layers"]
weight = model.recurrent.weight_ih_l0
by_column = weight.grad_batch.norm(dim=1)  # [N, 28]
strongest = by_column.norm(dim=1).argsort(descending=True)[:5]
fig, axes = plt.subplots(2, 5, figsize=(8, 3.4), sharex=True, layout="constrained")
for (top, bottom), n in zip(axes.T, strongest.tolist()):
    top.imshow(X[n].numpy(), cmap="gray")
    top.set_axis_off()
    bottom.bar(range(28), by_column[n].tolist(), width=1.0)
    bottom.set_ylim(0, by_column.max().item())
    bottom.label_outer()
axes[1, 0].set_ylabel("norm of the gradient")
plt.show()

# %%
# Check
# -----
# One sample at a time, with plain automatic differentiation, on all three networks.

for model in networks.values():
    params = list(model.parameters())
    for n in range(3):
        loss = CrossEntropyLoss()(model(X[[n]]), y[[n]]) / len(X)
        for p, expected in zip(params, torch.autograd.grad(loss, params)):
            assert_close(p.grad_batch[n], expected, rtol=1e-8, atol=1e-12)
    diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in params])
    idx = list(range(0, len(diagonal), 97))
    expected = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(), idx=idx)
    assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
