"""Models of random operations: right for each sample, or refused; never changed.

A model is a sequence of steps on ``[N, T, D]``. A step moves samples about, uses
parameters in some way, and moves samples back. Parameters come from a small pool, so
that they are shared, aliased, and used as expressions. Half of the time N equals T, and
now and then both equal D. If samples meet in one step, all must be refused; if they
don't, all must be right, and refusals of what is common are mistakes.

A test run draws a few, always the same. With ``BACKPACK_TEST_LONG=1`` it draws ten
thousand new ones, with ``BACKPACK_TEST_LONG=<count>`` as many, and prints its seed; set
``BACKPACK_TEST_SEED=<seed>`` to repeat a run.
"""

import os
import random
from collections import Counter
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import F64
from hypothesis import HealthCheck, Phase, currently_in_test_context, given, reject
from hypothesis import seed as with_seed
from hypothesis import settings
from hypothesis import strategies as st
from per_sample import (
    Row,
    assert_equal,
    assert_fields,
    compute,
    param,
    real,
    reference,
)
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

LONG = int(os.environ.get("BACKPACK_TEST_LONG", "0"))
COUNT = {0: 50, 1: 10000}.get(LONG, LONG)
SEED = int(os.environ.get("BACKPACK_TEST_SEED", random.randrange(2**32)))

D = 3
POOL = 3  # parameters of a kind
QUANTITIES = ["BatchGrad", "BatchL2Grad", "DiagGGNExact"]

Leaf = Callable[[Module, Tensor, int], Tensor]


# What a step may use, made when it does; from others, where it is theirs as well
PARTS: Dict[str, Callable[[Module], Any]] = {
    "w": lambda m: nn.ParameterList([param(D, D) for _ in range(POOL)]),
    "v": lambda m: nn.ParameterList([param(D) for _ in range(POOL)]),
    "table": lambda m: nn.ParameterList([param(8, D) for _ in range(POOL)]),
    "f": lambda m: nn.ModuleList([nn.Linear(D, D) for _ in range(POOL)]),
    "norm": lambda m: nn.ModuleList([nn.LayerNorm(D), nn.RMSNorm(D, 1e-5)]),
    "conv": lambda m: nn.Conv1d(D, D, 3, padding=1),
    "gru": lambda m: nn.GRU(D, D),
    "attention": lambda m: nn.MultiheadAttention(D, 1),
    "embedding": lambda m: nn.Embedding(8, D),
    "normed": lambda m: parametrizations.weight_norm(nn.Linear(D, D)),
    "alias": lambda m: m.w[0],
    "tied": lambda m: tied(nn.Linear(D, D), m.w[1]),
}


def tied(layer: Module, weight: Tensor) -> Module:
    """Let a layer share a weight."""
    layer.weight = weight
    return layer


class Model(Module):
    """A pool of parameters and layers, and steps that use them."""

    def __init__(self, steps: List[Callable[[Module, Tensor], Tensor]]):
        """Create what all steps share.

        Args:
            steps: Functions of model and data.
        """
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("var", torch.full((D,), 2.0))
        self.steps = steps

    def __getattr__(self, name: str) -> Any:
        """Make what a step uses first, in double precision."""
        if name not in PARTS or name in self._parameters or name in self._modules:
            return super().__getattr__(name)
        part = PARTS[name](self)
        if isinstance(part, Module):
            self._modules[name] = part.to(F64)
        else:
            self._parameters[name] = part
        return part

    def forward(self, x: Tensor) -> Tensor:
        """Apply all steps."""
        x = self.first(x).tanh()
        for step in self.steps:
            x = step(self, x)
        self.count += 1
        # of numbers around one: where a softmax saturates, autograd computes the
        # curvature as a difference of numbers around one, and loses its digits
        return self.last(x.sin())


# Uses of parameters on the last axis, whatever is in front; i chooses from the pool

ROWS: Dict[str, Leaf] = {
    "layer": lambda m, x, i: m.f[i](x).tanh(),
    "linear": lambda m, x, i: F.linear(x, m.w[i], m.v[i]).tanh(),
    "matmul": lambda m, x, i: (x @ m.w[i] + m.v[i]).tanh(),
    "mm": lambda m, x, i: torch.mm(x.reshape(-1, D), m.w[i]).view_as(x).sin(),
    "addmm": lambda m, x, i: torch.addmm(m.v[i], x.reshape(-1, D), m.w[i])
    .view(x.shape)
    .tanh(),
    "einsum": lambda m, x, i: torch.einsum("...i,oi->...o", x, m.w[i]).sin(),
    "tensordot": lambda m, x, i: torch.tensordot(x, m.w[i], 1).sin(),
    "low-rank": lambda m, x, i: x + (x @ m.w[i][:, :2]) @ m.w[i].T[:2].tanh(),
    "layer's-weight": lambda m, x, i: F.linear(x, m.f[i].weight).tanh(),
    "transposed": lambda m, x, i: F.linear(x, m.f[i].weight.T, m.v[i]).tanh(),
    "alias": lambda m, x, i: (x @ m.alias).tanh(),
    "tied": lambda m, x, i: m.tied(x).tanh(),
    "scale": lambda m, x, i: x * m.v[i],
    "shift": lambda m, x, i: x + m.v[i],
    "scale-and-shift": lambda m, x, i: torch.addcmul(m.v[i], x, m.v[i - 1]),
    "in-place": lambda m, x, i: x.clone().mul_(m.v[i]).add_(m.v[i - 1]).tanh_(),
    "gate": lambda m, x, i: x * torch.sigmoid(m.f[i](x)),
    "norm": lambda m, x, i: m.norm[i % 2](x),
    "layer-norm": lambda m, x, i: F.layer_norm(x, (D,), m.v[i], m.v[i - 1], 1e-2),
    "rms-norm": lambda m, x, i: m.v[i] * x * (x.pow(2).mean(-1, True) + 0.1).rsqrt(),
    "weight-norm": lambda m, x, i: m.normed(x).tanh(),
    "weight-norm-by-hand": lambda m, x, i: F.linear(
        x, m.v[i][:, None] * m.w[i] / m.w[i].norm(dim=1, keepdim=True)
    ),
    "product-of-weights": lambda m, x, i: (x @ (m.w[i] @ m.w[i - 1].T).tanh()).sin(),
    "adapter": lambda m, x, i: F.linear(
        x, m.f[i].weight + m.w[i][:, :1] @ m.w[i - 1][:1]
    ).tanh(),
    "stacked": lambda m, x, i: F.linear(x, torch.cat([m.w[i][:2], m.v[i][None]])),
    "mixture": lambda m, x, i: x
    @ torch.tensordot(m.v[i].softmax(0), torch.stack(list(m.w)), 1),
    "straight-through": lambda m, x, i: F.linear(
        x, m.w[i] + (m.w[i].round() - m.w[i]).detach()
    ),
    "checkpointed-expression": lambda m, x, i: x
    @ checkpoint(lambda w: w.tanh() @ w.T, m.w[i], use_reentrant=False),
    "lookup": lambda m, x, i: x + m.table[i][bucket(x)],
    "embedding": lambda m, x, i: x * m.embedding(bucket(x)),
    "index-select": lambda m, x, i: x
    + m.table[i].index_select(0, bucket(x).flatten()).view(x.shape),
    "where": lambda m, x, i: torch.where(x > 0, x, m.v[i]),
    "mask-token": lambda m, x, i: torch.where(x[..., :1] > 0, x, m.v[i]),
    "prototypes": lambda m, x, i: (x[..., None, :] - m.w[i]).pow(2).sum(-1).cos(),
    "keys-and-values": lambda m, x, i: (x @ m.table[i].T).softmax(-1) @ m.table[i - 1],
    "bilinear": lambda m, x, i: (m.f[i](x) * (x @ m.w[i])).sin(),
    "film": lambda m, x, i: x * (1 + m.f[i](x.cos())) + x.sin() @ m.w[i - 1],
    "pairs": lambda m, x, i: torch.cat([x[..., :1] * m.v[i][:1], x[..., 1:]], -1),
    "twice": lambda m, x, i: m.f[i](m.f[i](x).tanh()),
    "frozen-part": lambda m, x, i: x @ torch.cat([m.w[i][:1].detach(), m.w[i][1:]]),
    "linear-keywords": lambda m, x, i: F.linear(input=x, bias=m.v[i], weight=m.w[i]),
    "linear-of-a-vector": lambda m, x, i: x * F.linear(x, m.v[i])[..., None],
    "matmul-of-a-vector": lambda m, x, i: x * (x @ m.v[i])[..., None],
    "from-the-left": lambda m, x, i: (m.w[i] @ x[..., None])[..., 0].sin(),
    "addmm-scaled": lambda m, x, i: torch.addmm(
        m.v[i], x.reshape(-1, D), m.w[i], beta=0.5, alpha=2.0
    ).view(x.shape),
    "baddbmm": lambda m, x, i: torch.baddbmm(
        m.v[i], x.reshape(1, -1, D), m.w[i][None]
    ).view(x.shape),
    "inner": lambda m, x, i: torch.inner(x, m.w[i]).sin(),
    "einsum-of-three": lambda m, x, i: torch.einsum(
        "...i,io,...o->...o", x, m.w[i], x.cos()
    ),
    "einsum-diagonal": lambda m, x, i: torch.einsum("...i,ii->...i", x, m.w[i]),
    "tensordot-axes": lambda m, x, i: torch.tensordot(x, m.w[i], dims=([-1], [1])),
    "bilinear-function": lambda m, x, i: F.bilinear(
        x, x.cos(), torch.stack(list(m.w)), m.v[i]
    ).sin(),
    "distances": lambda m, x, i: torch.cdist(x.reshape(1, -1, D), m.w[i][None])
    .view(x.shape)
    .sin(),
    "cosines": lambda m, x, i: F.cosine_similarity(x[..., None, :], m.w[i], dim=-1) + x,
    "normalized": lambda m, x, i: F.linear(x, F.normalize(m.w[i], dim=1)),
    "instance-scale": lambda m, x, i: F.prelu(x.reshape(-1, D), m.v[i]).view_as(x),
    "group-norm": lambda m, x, i: F.group_norm(
        x.reshape(-1, D), 1, m.v[i], m.v[i - 1], 1e-2
    ).view_as(x),
    "batch-norm-evaluated": lambda m, x, i: F.batch_norm(
        x.reshape(-1, D), m.mean, m.var, m.v[i], m.v[i - 1]
    ).view_as(x),
    "lerp": lambda m, x, i: torch.lerp(x, x.cos(), m.v[i].sigmoid()),
    "power": lambda m, x, i: (x.square() + 0.5).pow(m.v[i]).sin(),
    "clamp": lambda m, x, i: x.clamp(max=m.v[i]) + x,
    "largest": lambda m, x, i: torch.fmax(x, m.v[i]) + x,
    "numbers-only": lambda m, x, i: x + torch.nansum(x * m.v[i], -1, keepdim=True),
    "soft-choice": lambda m, x, i: torch.where(x > 0, x, 0.0) @ m.w[i] + x.nan_to_num(),
    "broadcast": lambda m, x, i: torch.mul(*torch.broadcast_tensors(x, m.v[i])),
    "written-in": lambda m, x, i: overwrite(x, m.v[i]),
    "filled": lambda m, x, i: x.masked_fill(x > 0.5, m.v[i][0]) + x,
    "column": lambda m, x, i: x + m.table[i].T[:, bucket(x)].movedim(0, -1),
    "entries": lambda m, x, i: x
    * m.w[i][bucket(x) % D, bucket(x.cos()) % D][..., None],
    "picked-by-a-mask": lambda m, x, i: x.masked_scatter(
        x > 0, m.v[i].expand_as(x)[x > 0].sin()
    ),
    "gathered": lambda m, x, i: x
    + m.table[i].gather(0, bucket(x).reshape(-1, 1).expand(-1, D)).view_as(x),
    "one-hot": lambda m, x, i: x + F.one_hot(bucket(x), 8).to(x.dtype) @ m.table[i],
    "bag": lambda m, x, i: x
    + F.embedding_bag(bucket(x).reshape(-1, 1), m.table[i], mode="sum").view_as(x),
    "padded-lookup": lambda m, x, i: x
    + F.embedding(bucket(x), m.table[i], padding_idx=-3),
    "decomposed": lambda m, x, i: x
    + (
        torch.linalg.cholesky(
            x[..., None] * x[..., None, :] + torch.eye(D, dtype=x.dtype)
        )
        @ m.v[i]
    ),
    "solved": lambda m, x, i: torch.linalg.solve(
        m.w[i] @ m.w[i].T + torch.eye(D, dtype=x.dtype), x[..., None]
    )[..., 0],
    "sorted-features": lambda m, x, i: x.sort(-1).values * m.v[i],
    "scattered-features": lambda m, x, i: (x @ m.w[i]).scatter(-1, x.argsort(-1), x)
    * m.v[i],
    "fourier": lambda m, x, i: torch.fft.rfft(x, dim=-1).abs() @ m.w[i][:2] + x,
    "cumulated-features": lambda m, x, i: (x * m.v[i]).cumsum(-1).sin(),
    "rounded": lambda m, x, i: (x.round() - x).detach() * m.v[i] + x,
    "einsum-of-one-row": lambda m, x, i: x
    * torch.einsum("...i,io->...o", x, m.w[i][:1]).sin(),
    "einsum-of-one-entry": lambda m, x, i: torch.einsum(
        "nio,on->in", x.reshape(1, -1, D), m.v[i][:, None]
    ).view(*x.shape[:-1], 1)
    * x,
    "tensordot-of-one-column": lambda m, x, i: torch.tensordot(
        x, m.w[i][:, :1], dims=([-1], [1])
    ).sin(),
    "tensordot-of-all-axes": lambda m, x, i: x
    * torch.tensordot(x[..., None] * x.cos()[..., None, :], m.w[i], 2)[..., None],
    "tensordot-of-no-axis": lambda m, x, i: torch.tensordot(x, m.v[i], 0).sin().sum(-2),
    "tensordot-of-no-axis-from-the-left": lambda m, x, i: torch.tensordot(m.v[i], x, 0)
    .sin()
    .sum(0),
    "rotation": lambda m, x, i: rotated(x, m.v[i]),
    "sparse": lambda m, x, i: torch.sparse.mm(
        (m.w[i] * m.w[i].detach().gt(0)).to_sparse(), x.reshape(-1, D).mT
    ).mT.view_as(x)
    + x,
    "named-tuple": lambda m, x, i: torch.stack(Both(x, m.v[i].expand_as(x))).prod(0),
    "by-view": lambda m, x, i: by_view(x, m.v[i]),
    "tied-view": lambda m, x, i: F.linear(x, m.w[i].view(-1).view(D, D).T).sin()
    + F.linear(x, m.w[i]),
}


def overwrite(x: Tensor, v: Tensor) -> Tensor:
    """Write a parameter over the last feature, and scale the first one in place."""
    x = x.clone()
    x[..., -1] = v[-1]
    x[..., 0] *= v[0]
    return x


class Both(NamedTuple):
    """Two tensors."""

    first: Tensor
    second: Tensor


def rotated(x: Tensor, v: Tensor) -> Tensor:
    """Multiply pairs of features with complex numbers, in place."""
    pairs = torch.cat([x, x.sin()], -1).unflatten(-1, (D, 2))
    torch.view_as_complex(pairs).mul_(torch.polar(v, v.cos()))
    return pairs.sum(-1)


def by_view(x: Tensor, v: Tensor) -> Tensor:
    """Look at a part of a constant, then write to all of it."""
    whole = (x * 0).detach() + v
    part = whole[..., :1]
    shown = x + part
    whole.add_(x)
    return shown + part


def bucket(x: Tensor) -> Tensor:
    """Map data to numbers from 0 to 7, for each place in front of the last axis."""
    return (x.detach().sum(-1) * 7).long() % 8


# Uses of parameters on sequences [n, t, D]

SEQUENCES: Dict[str, Leaf] = {
    "positions": lambda m, x, i: x + m.table[i][: x.shape[1]],
    "positions-expanded": lambda m, x, i: x
    * m.table[i][None, : x.shape[1]].expand_as(x),
    "positions-embedding": lambda m, x, i: x + m.embedding(torch.arange(x.shape[1])),
    "positions-linear": lambda m, x, i: x
    + m.f[i](m.embedding(torch.arange(x.shape[1]))).tanh(),
    "positions-norm": lambda m, x, i: x * m.norm[i % 2](m.table[i][: x.shape[1]]),
    "positions-frequency": lambda m, x, i: x
    + torch.sin(torch.arange(x.shape[1], dtype=x.dtype)[:, None] * m.v[i]),
    "positions-stacked": lambda m, x, i: x
    + torch.stack([m.v[i] * t for t in range(x.shape[1])]),
    "positions-repeated": lambda m, x, i: x
    + m.table[i][: x.shape[1]].repeat(len(x), 1, 1),
    "class-token": lambda m, x, i: torch.cat(
        [m.v[i].expand(len(x), 1, D), x[:, 1:]], 1
    ),
    "token-in-front": lambda m, x, i: (
        torch.cat([m.v[i].expand(len(x), 1, D), x], 1).cumsum(1)[:, 1:]
    ),
    "attention": lambda m, x, i: attend(m.f[i](x), x, x @ m.w[i]),
    "packed-attention": lambda m, x, i: attend(
        *F.linear(x, torch.cat(list(m.w))).chunk(3, -1)
    ),
    "attention-layer": lambda m, x, i: time_first(x, lambda z: m.attention(z, z, z)[0]),
    "relative-bias": lambda m, x, i: attend(
        x, x, x, (m.table[i] @ m.v[i])[distance(x.shape[1])]
    ),
    "learned-queries": lambda m, x, i: attend(m.table[i][: x.shape[1]], x, x),
    "prefix": lambda m, x, i: attend(
        x,
        torch.cat([m.table[i][:2].expand(len(x), 2, D), x], 1),
        torch.cat([m.table[i - 1][:2].expand(len(x), 2, D), x], 1),
    ),
    "gru": lambda m, x, i: time_first(x, lambda z: m.gru(z)[0]),
    "positions-gru": lambda m, x, i: x + m.gru(m.table[i][: x.shape[1], None])[0][:, 0],
    "conv": lambda m, x, i: m.conv(x.mT).mT.tanh(),
    "functional-conv": lambda m, x, i: F.conv1d(
        x.mT, torch.stack([m.w[i], m.w[i - 1], m.w[i]], -1), padding="same"
    ).mT.sin(),
    "depthwise": lambda m, x, i: F.conv1d(
        F.pad(x.mT, (2, 0)), m.w[i][:, None], groups=D
    ).mT,
    "mix-positions": lambda m, x, i: m.table[i][: x.shape[1], :1].tanh()
    * x.mean(1, True)
    + x,
    "scan": lambda m, x, i: scan(x, m.w[i]),
    "pool-and-gate": lambda m, x, i: x * torch.sigmoid(m.f[i](x.mean(1, keepdim=True))),
    "attention-function": lambda m, x, i: time_first(
        x,
        lambda z: F.multi_head_attention_forward(
            *(z, z, z, D, 1, torch.cat(list(m.w)), torch.cat(list(m.v))),
            *(None, None, False, 0.0, m.w[i], m.v[i]),
        )[0],
    ),
    "fused-attention": lambda m, x, i: F.scaled_dot_product_attention(
        x @ m.w[i], x, m.f[i](x), is_causal=True
    ),
    "bias-as-mask": lambda m, x, i: F.scaled_dot_product_attention(
        *(x, x, x @ m.w[i]), attn_mask=m.table[i][distance(x.shape[1]), 0]
    ),
    "cumulated": lambda m, x, i: (x * m.v[i]).cumsum(1).sin(),
    "cumulated-maximum": lambda m, x, i: (x @ m.w[i]).cummax(1).values,
    "top-of-time": lambda m, x, i: x + (x @ m.w[i]).topk(1, 1).values,
    "sorted-time": lambda m, x, i: x.sort(1).values @ m.w[i],
    "gathered-time": lambda m, x, i: x.gather(1, x.argsort(1)) * m.v[i],
    "added-by-index": lambda m, x, i: (x @ m.w[i]).index_add(
        1, torch.arange(x.shape[1]).flip(0), x
    ),
    "scattered-time": lambda m, x, i: (x * m.v[i]).scatter_add(1, x.argsort(1), x),
    "rolled-time": lambda m, x, i: x.roll(1, 1) @ m.w[i] + x.flip(1) * m.v[i],
    "pooled-time": lambda m, x, i: x
    + F.adaptive_max_pool1d((x * m.v[i]).mT, 1).mT
    + F.adaptive_avg_pool1d(x.mT, 1).mT @ m.w[i],
    "overlapping": lambda m, x, i: (
        F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1) * m.v[i][:2]
    ).sum(-1),
    "strided": lambda m, x, i: x
    * m.v[i]
    * x.contiguous().as_strided((len(x), 1, D), (x.shape[1] * D, D, 1)),
    "image-convolution": lambda m, x, i: F.conv2d(
        x[:, None], m.w[i][None, None], m.v[i][:1], padding=1
    )[:, 0],
    "transposed-convolution": lambda m, x, i: F.conv_transpose1d(
        x.mT, m.w[i][:, :, None], m.v[i]
    ).mT.sin(),
    "instance-norm": lambda m, x, i: F.instance_norm(
        x[:, :, None], weight=m.table[i][: x.shape[1], 0]
    )[:, :, 0],
    "layer-norm-of-sequences": lambda m, x, i: F.layer_norm(
        x, x.shape[1:], m.table[i][: x.shape[1]], m.table[i - 1][: x.shape[1]], 1e-2
    ),
    "each-with-a-token": lambda m, x, i: torch.stack(
        [(torch.cat([m.v[i][None], z]) @ m.w[i]).cumsum(0)[1:] for z in x]
    ),
    "each-beside-a-constant": lambda m, x, i: torch.stack(
        [torch.hstack([z, m.v[i].expand_as(z)])[..., 1:-2] + z for z in x]
    ),
    # with a number beside: what a single one is normalized to does not depend on it
    "normalized-over-time": lambda m, x, i: F.normalize(
        F.pad(x * m.v[i], (0, 0, 0, 1), value=1.0), dim=1
    )[:, :-1],
    "deviation": lambda m, x, i: x * m.v[i]
    - (x @ m.w[i]).std(1, correction=0, keepdim=True).nan_to_num(),
    "shared-cell": lambda m, x, i: x
    + torch.gru_cell(
        *(x[:, 0], x[:, -1], torch.cat(list(m.w)), torch.cat([m.w[i]] * 3))
    )[:, None],
}


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any = 0.0) -> Tensor:
    """Attend by hand."""
    return (q @ k.mT + bias).softmax(-1) @ v


def distance(t: int) -> Tensor:
    """Return the distances of all pairs of positions, from 0 to 7."""
    i = torch.arange(t)
    return (i[None] - i[:, None]) % 8


def time_first(x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """Call a layer that wants time in front."""
    return layer(x.transpose(0, 1)).transpose(0, 1)


def scan(x: Tensor, w: Tensor) -> Tensor:
    """Run a recurrence, written by hand."""
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(h @ w + x[:, t])
        out.append(h)
    return torch.stack(out, 1)


# Moves: functions of x [N, T, D] and of what is done in between, to [N, T, D]

Inner = Callable[[Tensor], Tensor]
Move = Callable[[Tensor, Inner], Tensor]


def order_of(x: Tensor) -> Tensor:
    """Return an order of the samples that depends on the data."""
    return x.detach().flatten(1).sum(1).argsort()


def routed(x: Tensor, f: Inner, mask: Tensor) -> Tensor:
    """Apply a function to some rows."""
    out = x.clone()
    out[mask] = f(x[mask])
    return out


def by_expert(x: Tensor, f: Inner) -> Tensor:
    """Send rows to one of two functions by index, and add what comes back."""
    flat = x.flatten(0, 1)
    route, out = bucket(flat) % 2, torch.zeros_like(flat)
    for e in range(2):
        rows = torch.where(route == e)[0]
        out = out.index_add(0, rows, f(flat[rows]) * (e + 1))
    return out.view_as(x)


def sorted_rows(x: Tensor, f: Inner) -> Tensor:
    """Sort rows by what they hold, and put them back."""
    flat = x.flatten(0, 1)
    order = flat.detach()[:, 0].argsort()
    return f(flat[order])[order.argsort()].view_as(x)


def written(x: Tensor, f: Inner) -> Tensor:
    """Write what comes out into a buffer, time in front."""
    out = x.new_zeros(x.shape[1], len(x), D)
    out[:] = f(x).transpose(0, 1)
    return out.transpose(0, 1)


def overwritten(z: Tensor, x: Tensor, f: Inner) -> Tensor:
    """Look at a view of data after others have been written to its base."""
    base = z.clone()
    part = base[:, :1]
    base.copy_(x)
    return f(part + x)


def windows(x: Tensor, f: Inner) -> Tensor:
    """Split into windows of two positions."""
    n, t, _ = x.shape
    z = F.pad(x, (0, 0, 0, t % 2)).view(n, -1, 2, D).flatten(0, 1)
    return f(z).reshape(n, -1, D)[:, :t]


BATCH_MOVES: Dict[str, Move] = {  # to [n, t, D], samples in front
    "stay": lambda x, f: f(x),
    "residual": lambda x, f: x + f(x),
    "order-and-back": lambda x, f: f(x[order_of(x)])[order_of(x).argsort()],
    "flip-and-back": lambda x, f: f(x.flip(0)).flip(0),
    "roll-and-back": lambda x, f: f(x.roll(1, 0)).roll(-1, 0),
    "roll-time": lambda x, f: f(x.roll(1, 1)),
    "two-batches": lambda x, f: (lambda z: z[0] * z[1])(
        f(torch.cat([x, x.cos()])).chunk(2)
    ),
    "repeat": lambda x, f: f(x.repeat(2, 1, 1))[len(x) :],
    "repeat-interleave": lambda x, f: f(x.repeat_interleave(2, 0))
    .unflatten(0, (-1, 2))
    .mean(1),
    "halves": lambda x, f: torch.cat([f(z) for z in x.split(max(1, len(x) // 2))]),
    "windows": windows,
    "checkpoint": lambda x, f: checkpoint(f, x, use_reentrant=False),
    "written": written,
    "tiled": lambda x, f: f(x.tile(2, 1, 1)).view(2, *x.shape).amax(0),
    "expanded": lambda x, f: f(x[:, None].expand(-1, 2, -1, -1).flatten(0, 1))
    .unflatten(0, (-1, 2))
    .sum(1),
    "uneven-parts": lambda x, f: torch.cat([f(z) for z in x.tensor_split(3)]),
    "index-select": lambda x, f: torch.zeros_like(x).index_copy(
        0, order_of(x), f(x.index_select(0, order_of(x)))
    ),
    "flip-time": lambda x, f: f(x.flip(1)).flip(1),
    "later-steps": lambda x, f: torch.cat([x[:, :1], f(x)[:, 1:]], 1),
    "in-place": lambda x, f: f(x.clone()).clone().mul_(0.5).add_(x),
    "overwritten": lambda x, f: overwritten(x.roll(1, 0), x, f),
    "first-expert-empty": lambda x, f: routed(x, f, x[..., 0] > 99)
    + routed(torch.zeros_like(x), f, x[:, 0, 0] > -99),
    "last-axis": lambda x, f: f(x.permute(2, 1, 0).contiguous().permute(2, 1, 0)),
}
ROW_MOVES: Dict[str, Move] = {  # to any shape [*, D]
    "transpose": lambda x, f: f(x.transpose(0, 1)).transpose(0, 1),
    "permute-contiguous": lambda x, f: f(x.permute(1, 0, 2).contiguous()).permute(
        1, 0, 2
    ),
    "flatten": lambda x, f: f(x.flatten(0, 1)).view_as(x),
    "flatten-time-first": lambda x, f: f(x.transpose(0, 1).flatten(0, 1))
    .unflatten(0, (x.shape[1], -1))
    .transpose(0, 1),
    "stack-in-front": lambda x, f: f(torch.stack([x, x.sin()])).prod(0),
    "stack-behind": lambda x, f: f(torch.stack([x, x.sin()], 2)).mean(2),
    "each-sample": lambda x, f: torch.stack([f(z) for z in x]),
    "each-step": lambda x, f: torch.stack([f(z) for z in x.unbind(1)], 1),
    "masked": lambda x, f: routed(x, f, x[..., 0] > 0),
    "experts": by_expert,
    "sorted": sorted_rows,
    "images": lambda x, f: f(x[:, None].expand(-1, 2, -1, -1)).mean(1),
    "each-token": lambda x, f: torch.stack([f(z) for z in x.flatten(0, 1)]).view_as(x),
    "windows-of-two": lambda x, f: f(F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1).mT).sum(2),
    "top": lambda x, f: x + f(x.topk(1, 1).values),
    "picked": lambda x, f: x + f(x[torch.arange(len(x)), x[..., 0].argmax(1)])[:, None],
    "pairs": lambda x, f: f(x[:, None] - 0.5 * x[:, :, None]).sum(2),
    "time-in-front-and-flat": lambda x, f: f(torch.cat(list(x.unbind(1))))
    .view(-1, len(x), D)
    .transpose(0, 1),
    "positions-by-number": lambda x, f: torch.zeros_like(x).index_put(
        (x[..., 0] > 0).nonzero(as_tuple=True), f(x[x[..., 0] > 0]), accumulate=True
    )
    + x,
    "selected": lambda x, f: x.masked_scatter(
        (x[..., :1] > 0).expand_as(x), f(x[x[..., 0] > 0])
    ),
    "leading-axes": lambda x, f: f(x[None, :, None])[0, :, 0],
}


def uses(move: str, leaf: str, i: int) -> Callable[[Module, Tensor], Tensor]:
    """Make a step that uses parameters between a move and the way back."""
    moves = {**BATCH_MOVES, **ROW_MOVES}
    leaves = {**ROWS, **SEQUENCES}

    def step(m: Module, x: Tensor) -> Tensor:
        return moves[move](x, lambda z: leaves[leaf](m, z, i))

    return step


COUPLINGS: Dict[str, Callable[[Tensor], Tensor]] = {  # of at least two samples
    "rolled": lambda x: x + x.roll(1, 0),
    "flipped": lambda x: x * x.flip(0).sin() + x.flip(0),
    "permuted": lambda x: x + x[torch.arange(len(x)).roll(1)],
    "mean": lambda x: x - 0.5 * x.mean(0),
    "sum": lambda x: x / (9 + x.sum()),
    "softmax": lambda x: x.softmax(0) + x,
    "cumulative": lambda x: x.cumsum(0),
    "maximum": lambda x: x - x.amax(0),
    "norm": lambda x: x / x.norm(),
    "similarity": lambda x: torch.einsum("nti,mti,msj->nsj", x, x, x),
    "attention-over-samples": lambda x: attend(
        x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1)
    ).transpose(0, 1),
    "in-place": lambda x: x.clone().add_(x.roll(1, 0)),
    "running": lambda x: torch.stack([x[max(0, n - 1)] + x[n] for n in range(len(x))]),
    "wrong-view": lambda x: x.flatten(0, 1).roll(1, 0).view_as(x) + x,
    "batch-statistics": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "numbers-only": lambda x: x - 0.5 * x.nanmean(0),
    "largest-of-two": lambda x: x + torch.fmax(x, x.roll(1, 0)),
    "rank": lambda x: x - x.kthvalue(1 + len(x) // 2, 0).values,
    "sorted": lambda x: x.sort(0).values,
    "renormalized": lambda x: x.renorm(2, 2, 0.1),
    "other-strides": lambda x: x
    + x.contiguous().as_strided((1, *x.shape[1:]), (1, D, 1), D * x.shape[1]),
    "interpolated": lambda x: F.interpolate(x.permute(2, 1, 0), size=len(x) + 1)
    .add(1)
    .cumsum(2)
    .permute(2, 1, 0)[1:],
    "one-for-all": lambda x: x * x[:1],
    "shifted-in-place": lambda x: torch.cat([x[-1:], x[:-1]]).mul_(x),
    "repeated-otherwise": lambda x: (x.repeat(2, 1, 1) + x.repeat_interleave(2, 0))[
        len(x) // 2 : len(x) // 2 + len(x)
    ],
    "padded-around": lambda x: x
    + F.pad(x.permute(2, 1, 0), (1, 1), mode="circular").permute(2, 1, 0)[2:],
    "spectrum": lambda x: x * torch.linalg.svdvals(x.flatten(1)).sum(),
    "differences": lambda x: torch.diff(x, dim=0, prepend=x[-1:]),
    "written-to-its-base": lambda x: overwritten(x, x.roll(1, 0), torch.sin) + x,
    "unseen": lambda x: (
        lambda z: (torch.vmap(Tensor.copy_)(z, x.roll(1, 0)), x * z)[1]
    )(x.clone()),
    "added-by-index": lambda x: x.index_add(0, torch.arange(len(x)).roll(1), x),
    "pooled": lambda x: x + F.max_pool1d(x.permute(2, 1, 0), 2, 1).amax(2).mT,
}

OBJECTIVES: Dict[str, Tuple[Callable[[], Module], Callable]] = {
    "mse": (nn.MSELoss, lambda f, loss: loss(f, real(f))),
    "mse-pooled": (nn.MSELoss, lambda f, loss: loss(f.mean(1), real(f.mean(1)))),
    "mse-flat": (
        lambda: nn.MSELoss(reduction="sum"),
        lambda f, loss: loss(f.flatten(0, 1), real(f).flatten(0, 1)),
    ),
    "tokens": (
        nn.CrossEntropyLoss,
        lambda f, loss: loss(f.flatten(0, 1), labels(f).flatten()),
    ),
    "tokens-time-first": (
        nn.CrossEntropyLoss,
        lambda f, loss: loss(f.transpose(0, 1).flatten(0, 1), labels(f).T.flatten()),
    ),
    "tokens-transposed": (
        nn.CrossEntropyLoss,
        lambda f, loss: loss(f.mT, labels(f)),
    ),
    "tokens-masked": (
        nn.CrossEntropyLoss,
        lambda f, loss: loss(f[labels(f) < 2], labels(f)[labels(f) < 2]),
    ),
    "last-token": (
        nn.CrossEntropyLoss,
        lambda f, loss: loss(f[:, -1], labels(f)[:, -1]),
    ),
}


def labels(f: Tensor) -> Tensor:
    """Return a class for each token, zero for the first one."""
    return (torch.arange(f[..., 0].numel()) * 5 % 7 % D).view(f.shape[:-1])


class Step(NamedTuple):
    """A step: how samples move, how parameters are used, and which ones."""

    move: str
    leaf: str
    index: int


class Spec(NamedTuple):
    """All that has to be known to build a random problem.

    Attributes:
        steps: The steps.
        coupling: Where samples meet, before that step, and how; ``None`` if nowhere.
        objective: What is differentiated.
        batch: Number of samples.
        length: Number of positions.
    """

    steps: List[Step]
    coupling: Any
    objective: str
    batch: int
    length: int

    def row(self) -> Row:
        """Make the row."""
        steps = [uses(*step) for step in self.steps]
        if self.coupling is not None:
            place, how = self.coupling
            steps.insert(place % (len(steps) + 1), lambda m, x: COUPLINGS[how](x))
        loss, objective = OBJECTIVES[self.objective]
        return Row(
            lambda: self._model(steps),
            lambda: (torch.randn(self.batch, self.length, D, dtype=F64),),
            loss,
            objective,
            quantities=QUANTITIES,
            alone=False,
        )

    def _model(self, steps: List) -> Module:
        """Make the model, whose unused parameters need no gradient."""
        model = Model(steps).to(F64)
        with torch.random.fork_rng():
            x = torch.randn(self.batch, self.length, D, dtype=F64)
            model(x).sum().backward()
        model.count.zero_()
        for p in model.parameters():
            p.requires_grad_(p.grad is not None)
            p.grad = None
        return model


STEPS = st.one_of(
    st.builds(
        Step,
        move=st.sampled_from(sorted({**BATCH_MOVES, **ROW_MOVES})),
        leaf=st.sampled_from(sorted(ROWS)),
        index=st.integers(0, POOL - 1),
    ),
    st.builds(
        Step,
        move=st.sampled_from(sorted(BATCH_MOVES)),
        leaf=st.sampled_from(sorted(SEQUENCES)),
        index=st.integers(0, POOL - 1),
    ),
)


@st.composite
def specs(draw: Callable, coupled: bool) -> Spec:
    """Draw a problem; N equals T half of the time."""
    batch = draw(st.integers(2 if coupled else 1, 4))
    equal = draw(st.booleans())
    coupling = None
    if coupled:
        coupling = draw(
            st.tuples(st.integers(0, 3), st.sampled_from(sorted(COUPLINGS)))
        )
    return Spec(
        draw(st.lists(STEPS, min_size=1, max_size=4)),
        coupling,
        draw(st.sampled_from(sorted(OBJECTIVES))),
        batch,
        batch if equal else draw(st.integers(1, 4)),
    )


def plain_pass(row: Row) -> Dict[str, Any]:
    """Run the plain model, and collect what there is afterwards."""
    model, loss, X = row.build()
    row.run(model, loss, X).backward()
    return what_is_left(model)


def what_is_left(model: Module) -> Dict[str, Any]:
    """Collect gradients, buffers and the random state."""
    return {
        "gradients": {
            n: p.grad for n, p in model.named_parameters() if p.requires_grad
        },
        "buffers": dict(model.named_buffers()),
        "state": torch.get_rng_state(),
    }


def assert_unchanged(model: Module, plain: Dict[str, Any]) -> None:
    """Assert that a pass has left what the plain model's pass leaves."""
    left = what_is_left(model)
    assert torch.equal(left["state"], plain["state"]), "random numbers were drawn"
    assert left["buffers"].keys() == plain["buffers"].keys()
    for name, buffer in plain["buffers"].items():
        assert torch.equal(left["buffers"][name], buffer), name
    assert_equal(left["gradients"], plain["gradients"], "gradient")


def influences(row: Row) -> Tensor:
    """Tell which samples' inputs change which samples' entries that the loss reads.

    Returns:
        For each sample and each sample's input, of shape ``[N, N]``. Where all that
        depends on data was masked, there is nothing to refuse, nor to compute.
    """
    model, loss, (x,) = row.build()
    prediction = model(x).detach().requires_grad_()
    (read,) = torch.autograd.grad(row.objective(prediction, loss), prediction)
    jacobian = torch.autograd.functional.jacobian(model, x)
    jacobian = jacobian.reshape(len(x), -1, len(x), x[0].numel()) != 0
    return (jacobian.any(3) & (read != 0).reshape(len(x), -1, 1)).any(1)


def check(spec: Spec, seen: Counter) -> None:
    """Assert that a problem is right, or refused; and counted among what was seen."""
    row = spec.row()
    try:
        plain = plain_pass(row)
    except (RuntimeError, ValueError, IndexError, AssertionError, UserWarning):
        if not currently_in_test_context():
            raise
        reject()  # PyTorch itself fails: there is nothing to compare with
    try:
        model = compute(row, QUANTITIES)
    except (NotImplementedError, UserWarning) as error:
        if not influences(row).any():  # and no parameter is reached, perhaps
            reject()
        if isinstance(error, UserWarning):
            if all(x is not None for x in plain["gradients"].values()):
                raise
            reject()  # what was put in front of the positions was dropped
        seen["refused"] += 1
        seen[f"refused: {str(error)[:200]}"] += 1
        return
    assert_unchanged(model, plain)
    met = influences(row).fill_diagonal_(False) if spec.coupling else torch.zeros(1)
    assert not met.any(), "samples meet, and nobody said so"
    seen["right"] += 1
    assert_fields(model, QUANTITIES, reference(row))


def draws(count: int) -> settings:
    """Return how many problems are drawn, and how."""
    return settings(
        max_examples=count,
        derandomize=not LONG,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def run(coupled: bool, count: int, record_property: Callable) -> Counter:
    """Check many problems.

    Args:
        coupled: Whether samples meet in all of them.
        count: How many.
        record_property: Prints what was drawn.

    Returns:
        How many were right and refused, and why.
    """
    seen: Counter = Counter()

    @draws(count)
    @given(spec=specs(coupled))
    def problems(spec: Spec) -> None:
        check(spec, seen)

    if LONG:
        what = "coupled" if coupled else "decoupled"
        record_property(f"random operations, {what}", f"{count} draws, seed {SEED}")
        problems = with_seed(SEED)(problems)
    problems()
    return seen


@pytest.mark.slow
def test_samples_kept_apart(record_property: Callable) -> None:
    """Models whose samples are kept apart are right; next to none is refused."""
    seen = run(False, COUNT, record_property)
    assert seen["refused"] <= 0.01 * COUNT, seen.most_common(10)


@pytest.mark.slow
def test_samples_that_meet(record_property: Callable) -> None:
    """Models are refused whose samples meet somewhere where the loss looks."""
    seen = run(True, max(1, COUNT // 2), record_property)
    assert seen["refused"] > 9 * seen["right"], seen


# Rows that a long run has found
FOUND = {
    "numbers-that-agree": Spec(
        [Step("order-and-back", "lookup", 0)], None, "last-token", 3, 1
    ),
    "constant-in-front": Spec(
        [Step("flip-and-back", "prefix", 0)], None, "last-token", 2, 1
    ),
    "constant-beside-a-sample": Spec(
        [Step("stay", "each-beside-a-constant", 0)], None, "mse", 2, 2
    ),
    "nothing-behind-the-first": Spec(
        [Step("later-steps", "class-token", 0)], None, "last-token", 1, 1
    ),
    "nothing-routed": Spec([Step("masked", "adapter", 0)], None, "last-token", 2, 2),
    "nothing-behind-a-constant": Spec(
        [Step("first-expert-empty", "tensordot-of-no-axis-from-the-left", 0)],
        *(None, "last-token", 2, 1),
    ),
    "nothing-of-one-sample": Spec([Step("experts", "linear", 0)], None, "mse", 1, 1),
    "no-expression-of-one-sample": Spec(
        [Step("experts", "adapter", 0)], None, "mse", 1, 1
    ),
    "recurrent-constant-beside-one-sample": Spec(
        [Step("stay", "positions-gru", 0)], None, "mse", 1, 3
    ),
    "vectors-of-one-sample": Spec(
        [Step("each-token", "layer", 0)], None, "last-token", 1, 2
    ),
    "one-row-of-one-sample": Spec(
        [Step("each-token", "tensordot", 0)], None, "last-token", 1, 1
    ),
    "one-position-of-a-convolution": Spec(
        [Step("stay", "conv", 0)], None, "last-token", 2, 1
    ),
    "rows-picked-inside-a-checkpoint": Spec(
        [Step("checkpoint", "positions-embedding", 0)], None, "last-token", 1, 1
    ),
    "mask-of-no-queries": Spec(
        [Step("first-expert-empty", "bias-as-mask", 0)], None, "last-token", 1, 1
    ),
    "no-shift-of-one-sample": Spec(
        [Step("uneven-parts", "shift", 0)], None, "mse", 1, 1
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong(name: str) -> None:
    """What nothing is known of is no sample's own, and no constant is left out."""
    assert_right_alone(FOUND[name])


@pytest.mark.parametrize("move", sorted({**BATCH_MOVES, **ROW_MOVES}))
def test_common_moves_are_not_refused(move: str) -> None:
    """No move is refused by itself, with as many positions as samples or not."""
    for leaf, length in [("linear", 3), ("scale-and-shift", 3), ("layer", 4)]:
        assert_right_alone(Spec([Step(move, leaf, 0)], None, "mse", 4, length))


@pytest.mark.parametrize("leaf", sorted({**ROWS, **SEQUENCES}))
def test_common_uses_are_not_refused(leaf: str) -> None:
    """No use is refused by itself, with as many positions as samples or not."""
    for length in (3, 4):
        assert_right_alone(Spec([Step("stay", leaf, 1)], None, "tokens", 4, length))


def assert_right_alone(spec: Spec) -> None:
    """Assert that a problem is right, and not refused."""
    seen: Counter = Counter()
    check(spec, seen)
    assert seen["right"], seen
