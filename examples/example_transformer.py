"""
A small transformer: gradients of sequences, and KFAC with shared weights
=========================================================================

A language model reads text character by character. Sequences have different lengths, so
that they are padded, and the loss is a mean over all characters that are no padding.
Who has the largest gradient then? And which Kronecker factors does a layer have, whose
weight all positions share? The text is Python's own documentation, which travels with
it.
"""

from pydoc_data.topics import topics
from typing import List

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.nn import (
    GELU,
    CrossEntropyLoss,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    Sequential,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import KFAC, BatchL2Grad
from backpack.utils.kroneckers import inv_kfac_mat_prod

T, E, PADDING = 32, 32, -100
text = " ".join(" ".join(topics[name].split()) for name in sorted(topics)[:20])
codes = torch.tensor([min(ord(character), 127) for character in text])


class Model(Module):
    """One block of attention and one of features, between embedding and prediction."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.tokens, self.positions = Embedding(128, E), Embedding(T, E)
        self.norm1, self.norm2, self.norm3 = LayerNorm(E), LayerNorm(E), LayerNorm(E)
        self.qkv, self.out = Linear(E, 3 * E), Linear(E, E)
        self.features = Sequential(Linear(E, 2 * E), GELU(), Linear(2 * E, E))
        self.head = Linear(E, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Map characters ``[N, T]`` to logits of the next ones, ``[N, T, 128]``."""
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        heads = (
            self.qkv(self.norm1(h)).unflatten(2, (3, 2, E // 2)).permute(2, 0, 3, 1, 4)
        )
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(self.norm3(h + self.features(self.norm2(h))))


def sequences(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Cut characters ``[N, T]`` out of the text, and those that follow each of them."""
    starts = torch.randint(len(codes) - T - 1, (len(lengths), 1))
    windows = codes[starts + torch.arange(T + 1)]
    padding = torch.arange(T) >= lengths.unsqueeze(1)
    return windows[:, :-1], windows[:, 1:].masked_fill(padding, PADDING)


# %%
# Train with KFAC
# ---------------
# ``weight_sharing="expand"`` treats positions like samples (Eschenhagen et al., 2023).
# Here, linear layers get a preconditioned step, and all other parameters that of SGD.

lossfunc = extend(CrossEntropyLoss(ignore_index=PADDING))


def train(lr: float, kfac: bool, num_steps: int = 60) -> tuple[Module, List[float]]:
    """Return the network, and the loss before each step."""
    torch.manual_seed(0)
    model, losses = extend(Model()), []
    linear = [m for m in model.modules() if isinstance(m, Linear)]
    params = [p for layer in linear for p in layer.parameters()] if kfac else []
    extensions = [KFAC(weight_sharing="expand")] if kfac else []
    averages = {}
    for _ in range(num_steps):
        X, y = sequences(torch.full((32,), T))
        model.zero_grad()
        loss = lossfunc(model(X).flatten(0, 1), y.flatten())
        with backpack(*extensions):
            loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in params:
                old = averages.setdefault(p, [f.clone() for f in p.kfac])
                for average, factor in zip(old, p.kfac):
                    average.lerp_(factor, 0.1)
                solve = inv_kfac_mat_prod(old, shift=0.03)
                p.grad = solve(p.grad.flatten()).reshape(p.shape) * 0.03
            for p in model.parameters():
                p.sub_(lr * p.grad)
    return model, losses


curves = {f"SGD, {lr}": train(lr, kfac=False)[1] for lr in (0.3, 1.0)}
model, curves["KFAC, 1.0"] = train(1.0, kfac=True)

# %%
# Norms and lengths
# -----------------
# Each sequence's share of the gradient is a sum over its characters. If these pulled in
# the same direction, its norm would grow like the length; if they were independent,
# like the root of it.

lengths = torch.randint(1, T + 1, (200,))
X, y = sequences(lengths)
with backpack(BatchL2Grad()):
    lossfunc(model(X).flatten(0, 1), y.flatten()).backward()
norms = sum(p.batch_l2 for p in model.parameters()).sqrt()
slope = (
    torch.linalg.lstsq(
        torch.stack([lengths.log(), torch.ones(200)], dim=1), norms.log().unsqueeze(1)
    )
    .solution[0]
    .item()
)

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, losses in curves.items():
    left.plot(losses, label=name)
left.set(xlabel="step", ylabel="loss per character")
left.legend()
right.loglog(lengths, norms, ".", alpha=0.6)
right.set(xlabel="characters in the sequence", ylabel="norm of its gradient")
right.set_title(f"grows like length to the power {slope:.2f}", fontsize=10)
plt.show()

final = {name: sum(losses[-10:]) / 10 for name, losses in curves.items()}
print({name: round(loss, 2) for name, loss in final.items()})
assert final.pop("KFAC, 1.0") < min(final.values())
assert 0.3 < slope < 1

# %%
# Check
# -----
# The norms, by plain automatic differentiation of one sequence at a time.

params = list(model.parameters())
for n in range(5):
    loss = lossfunc(model(X[[n]])[0], y[n]) * lengths[n] / lengths.sum()
    gradient = torch.autograd.grad(loss, params)
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    assert_close(norms[n], norm, rtol=1e-3, atol=1e-6)
