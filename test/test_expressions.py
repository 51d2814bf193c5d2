"""What is computed from parameters alone meets the data: as an expression, or by name.

Positions, tokens that are put in front, normalized and adapted weights, codes of
hypernetworks; one parameter under several names, in several layers, several times in
one operation. A use counts once, wherever its parameters are kept.
"""

import itertools
import warnings
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import F64
from oracle import assert_agrees
from per_sample import (
    LENGTHS,
    Backward,
    Lambda,
    N,
    Row,
    assert_refused,
    assert_right,
    compute,
    param,
    part,
    randn,
    tokens,
    use,
)
from test_uses import Elements, attend
from torch import Tensor, fx, nn
from torch.nn import Module
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.core.per_sample.outer import Outer
from backpack.engine.backward import expressions
from backpack.extensions import BatchGrad, DiagGGNMC, SumGradSquared


def positions(
    function: Callable[[Module, int], Tensor], **parts: Any
) -> Dict[str, Any]:
    """Describe a model that adds what depends on positions only to its tokens."""
    return {"function": function, "parts": parts}


def arange(t: int) -> Tensor:
    """Return positions as numbers."""
    return torch.arange(t, dtype=F64)


E = {"p": (N, 3)}
POSITIONS = {
    "table": positions(lambda m, t: m.p[:t], **E),
    "table-unsqueezed": positions(lambda m, t: m.p[None, :t], **E),
    "table-with-an-axis": positions(lambda m, t: m.p[:, :t], p=(1, N, 3)),
    "embedding": positions(
        lambda m, t: m.e(torch.arange(t)), e=lambda: nn.Embedding(N, 3)
    ),
    "tanh": positions(lambda m, t: m.p[:t].tanh(), **E),
    "embedding-tanh": positions(
        lambda m, t: m.e(torch.arange(t)).tanh(), e=lambda: nn.Embedding(N, 3)
    ),
    "embedding-linear": positions(
        lambda m, t: m.f(m.e(torch.arange(t))),
        e=lambda: nn.Embedding(N, 2),
        f=lambda: nn.Linear(2, 3),
    ),
    "network-of-coordinates": positions(
        lambda m, t: m.f(arange(t)[:, None]),
        f=lambda: nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3)),
    ),
    "layer-norm": positions(lambda m, t: m.f(m.p[:t]), f=lambda: nn.LayerNorm(3), **E),
    "gru": positions(lambda m, t: m.f(m.p[:t])[0], f=lambda: nn.GRU(3, 3), **E),
    "convolution": positions(
        lambda m, t: m.f(m.p[None, :t].mT).mT,
        f=lambda: nn.Conv1d(3, 3, 3, padding=1),
        **E,
    ),
    "attention": positions(
        lambda m, t: m.f(*[m.p[:t]] * 3)[0],
        f=lambda: nn.MultiheadAttention(3, 1),
        **E,
    ),
    "repeat": positions(lambda m, t: m.p[:t].repeat(N, 1, 1)[: m.size], **E),
    "expand": positions(lambda m, t: m.p[:t].expand(m.size, -1, -1), **E),
    "stack": positions(lambda m, t: torch.stack([m.p[:t]] * m.size), **E),
    "stack-of-vectors": positions(
        lambda m, t: torch.stack([m.p[i] * i for i in range(t)]), **E
    ),
    "cat": positions(lambda m, t: torch.cat([m.p[None, :t]] * m.size), **E),
    "matmul-with-ones": positions(
        lambda m, t: (m.p.new_ones(m.size, 1) @ m.p[:t].reshape(1, -1)).view(-1, t, 3),
        **E,
    ),
    "repeat-interleave": positions(
        lambda m, t: m.p[:t]
        .repeat_interleave(m.size, 0)
        .view(t, -1, 3)
        .transpose(0, 1),
        **E,
    ),
    "matmul": positions(lambda m, t: m.p[:t] @ m.q, **E, q=(3, 3)),
    "einsum": positions(
        lambda m, t: torch.einsum("tr,rd->td", m.p[:t], m.q), p=(N, 2), q=(2, 3)
    ),
    "axes": positions(  # as for images, a table for each axis
        lambda m, t: (m.p[:2, None] + m.q[None, :2]).flatten(0, 1)[:t], **E, q=(N, 3)
    ),
    "frequencies": positions(lambda m, t: torch.sin(arange(t)[:, None] * m.w), w=(3,)),
    "cumulative": positions(lambda m, t: m.p[:t].cumsum(0), **E),
    "flip-and-roll": positions(lambda m, t: m.p[:t].flip(0).roll(1, 0), **E),
    "interpolated": positions(
        lambda m, t: F.interpolate(m.p.T[None], size=t, mode="linear")[0].T, **E
    ),
    "gathered": positions(
        lambda m, t: m.p.gather(0, torch.arange(t)[:, None].expand(-1, 3)), **E
    ),
    "fourier": positions(
        lambda m, t: torch.fft.rfft(m.p[:t]).real @ m.q, **E, q=(2, 3)
    ),
    "complex-parts": positions(  # of results whose rows have an odd length
        lambda m, t: torch.cat(
            [
                torch.view_as_real(torch.fft.fft(m.p[0, :2])).reshape(-1),
                m.p[:t].reshape(-1)[4:],
            ]
        ).view(t, 3),
        **E,
    ),
    "detached-part": positions(lambda m, t: m.p[:t] + m.p[:t].detach(), **E),
    "where": positions(
        lambda m, t: torch.where(m.p[:t] > 0, m.p[:t], 0.1 * m.p[:t]), **E
    ),
    "in-place": positions(lambda m, t: m.p[:t].clone().mul_(2).tanh_(), **E),
    "buffer-filled": positions(
        lambda m, t: torch.zeros(t, 3, dtype=F64).index_add(
            0, torch.arange(t), m.p[:t]
        ),
        **E,
    ),
    "scalar-for-each-position": positions(lambda m, t: m.w[:t, None], w=(N,)),
}
# How what depends on positions meets the data x [N, T, 3]
MEETING = {
    "add": lambda m, x, p: x + p,
    "add-in-place": lambda m, x, p: x.clone().add_(p),
    "add-as-type": lambda m, x, p: x + p.to(x).type_as(x[:, 0]),
    "mul": lambda m, x, p: p * x,
    "cat": lambda m, x, p: torch.cat([x, p.expand_as(x)], -1),
    "argument": lambda m, x, p: m.block(x, shift=p),
    "scores": lambda m, x, p: (x @ p.mT).softmax(-1) @ x,
}


def shifted() -> Module:
    """Make a module that gets the data and a shift."""
    return Lambda(lambda m, x, shift: m.fc(x + shift), fc=nn.Linear(3, 3))


def with_positions(kind: str, how: str, t: int) -> Row:
    """Make a row that combines tokens with what depends on positions."""
    function, parts = POSITIONS[kind].values()

    def forward(m: Module, i: Tensor) -> Tensor:
        m.size = len(i)
        return m.head(MEETING[how](m, m.token(i), function(m, i.shape[1])).tanh())

    return Row(
        lambda: Lambda(
            forward,
            token=nn.Embedding(5, 3),
            head=nn.Linear(6 if how == "cat" else 3, 2),
            **({"block": shifted()} if how == "argument" else {}),
            **{name: part(spec) for name, spec in parts.items()},
        ),
        tokens(t),
    )


# Every expression is added, with N positions and with another number of them, and
# every way to meet is tried on a few; the others are left out, as they repeat both
POSITION_ROWS = {
    f"positions-{kind}-{how}-{t}": with_positions(kind, how, t)
    for kind in POSITIONS
    for how in MEETING
    for t in LENGTHS
    if how == "add" or (kind in ("embedding-linear", "expand") and t == N)
}

TOKENS_IN_FRONT = {
    f"{name}-{t}": use(function, t, 4, **parts)
    for t in LENGTHS
    for name, (function, parts) in {
        "class-token-expand": (
            lambda m, x: torch.cat([m.c.expand(len(x), -1, -1), x], 1),
            {"c": (1, 1, 4)},
        ),
        "class-token-repeat": (
            lambda m, x: torch.cat([m.c.repeat(len(x), 1, 1), x], dim=1)
            @ x.mT[..., :1],
            {"c": (1, 4)},
        ),
        "class-token-and-positions": (
            lambda m, x: torch.cat([m.c.expand(len(x), -1, -1), x], 1)
            + m.p[: x.shape[1] + 1],
            {"c": (1, 1, 4), "p": (N + 1, 4)},
        ),
        "class-token-padded": (
            lambda m, x: F.pad(x, (0, 0, 1, 0)) + F.pad(m.c, (0, 0, 0, x.shape[1])),
            {"c": (1, 4)},
        ),
        "prompt": (
            lambda m, x: m.f(
                torch.cat([m.p.unsqueeze(0).expand(len(x), -1, -1), x], 1)
            ),
            {
                "p": (N, 4),
                "f": lambda: nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True),
            },
        ),
        "mask-token": (
            lambda m, x: torch.where((x[..., :1] > 0), x, m.c),
            {"c": (4,)},
        ),
    }.items()
}


def orthogonal(module: Module) -> Module:
    """Parametrize a weight by an orthogonal matrix."""
    return parametrizations.orthogonal(module, orthogonal_map="cayley")


class Low(Module):
    """Parametrization by a sum with a product of low rank."""

    def __init__(self, out: int, inp: int):
        """Create the factors."""
        super().__init__()
        self.a, self.b = param(2, inp), param(out, 2)

    def forward(self, weight: Tensor) -> Tensor:
        """Add the product."""
        return weight + 0.5 * self.b @ self.a


def adapted(layer: Module) -> Module:
    """Adapt a layer's weight by a parametrization."""
    parametrize.register_parametrization(layer, "weight", Low(*layer.weight.shape))
    return layer


class LoRA(Module):
    """A frozen layer, and an adapter of low rank beside it."""

    def __init__(self):
        """Create layer and factors."""
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        return self.base(x) + 2 * self.up(self.down(x))


class DoRA(Module):
    """An adapter of a weight's direction, with a magnitude for each output."""

    def __init__(self):
        """Create weight, factors and magnitude."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.a, self.b, self.magnitude = param(2, 4), param(4, 2), param(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the adapted weight."""
        weight = self.weight + self.b @ self.a
        weight = self.magnitude * weight / weight.norm(dim=1, keepdim=True).detach()
        return F.linear(x, weight)


class Standardized(nn.Conv1d):
    """A convolution whose weight is standardized, as in weight-standardized ResNets."""

    def forward(self, x: Tensor) -> Tensor:
        """Standardize the weight and convolve."""
        w = self.weight
        w = (w - w.mean((1, 2), keepdim=True)) / (w.std((1, 2), keepdim=True) + 1e-5)
        return F.conv1d(x, w, self.bias)


class StandardizedByBatchNorm(nn.Conv1d):
    """The same, by a function that normalizes batches; as timm does."""

    def forward(self, x: Tensor) -> Tensor:
        """Standardize the weight and convolve."""
        w = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True
        )
        return F.conv1d(x, w.reshape_as(self.weight), self.bias)


def old_weight_norm(layer: Module) -> Module:
    """Normalize a weight, in the deprecated way that a hook recomputes it."""
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


class WeightDrop(Module):
    """A recurrent layer with a weight that is computed for each call, as AWD-LSTM."""

    def __init__(self, make: Callable[..., Module]):
        """Take a parameter away from the layer."""
        super().__init__()
        self.layer = make(4, 3, batch_first=True)
        self.raw = nn.Parameter(self.layer.weight_hh_l0.detach())
        del self.layer.weight_hh_l0
        self.layer.weight_hh_l0 = self.raw.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Give the layer a part of the weight, and call it."""
        dropped = torch.arange(3) == 1
        self.layer.weight_hh_l0 = self.raw.masked_fill(dropped, 0.0)
        names = self.layer._flat_weights_names
        self.layer._flat_weights = [getattr(self.layer, name) for name in names]
        return self.layer(x)[0]


def prepared(m: Module, x: Tensor) -> Tensor:
    """Compute a weight in one module's method, use it in another's call."""
    m.weights.append(m.w.tanh())
    return m.f(x, m.weights.pop())


def copies_of(w: Tensor, x: Tensor) -> Tensor:
    """Copy a parameter for each sample."""
    return w.repeat(len(x), 1)


def added_to_what_it_was(m: Module, x: Tensor) -> Tensor:
    """Add to copies of a parameter what was computed from them."""
    h = copies_of(m.w, x)
    h += (h + x) * 2
    return h.addcmul_(x, h * 3)


def written_from_itself(m: Module, x: Tensor) -> Tensor:
    """Write into a column what was computed from it."""
    h = copies_of(m.w, x)
    h[:, 1] = h[:, 1] + x[:, 0]
    h[:, 2] = (h + x).sum(1)
    return h * m.w


def written_in_parts(m: Module, x: Tensor) -> Tensor:
    """Write into views of copies, one after the other."""
    h = copies_of(m.w, x)
    later = h[:, 2:]
    h[:, 1] += x[:, 0]
    h[:, 0].copy_(x[:, 3])
    later *= x[:, :2]
    h.view(-1)[::4].mul_(x[:, 2])
    return h


def written_to_a_batch_of(m: Module, x: Tensor) -> Tensor:
    """Let data enter a tensor that holds a parameter, after and before it."""
    h = torch.zeros_like(x)
    h += m.w
    h[:, 0] += x[:, 0]
    h[:, 1] -= h[:, 0]
    h[:, 2] = m.w[0]
    return h


def sparse_weight(values: Tensor) -> Tensor:
    """Make a sparse matrix ``[3, 4]``, as adapters have that train a few entries."""
    places = torch.tensor([[0, 1, 2], [1, 0, 2]])
    return torch.sparse_coo_tensor(places, values, (3, 4), check_invariants=True)


EXPRESSIONS = {
    **{
        function.__name__.replace("_", "-"): use(function, 4, w=(4,))
        for function in (
            *(added_to_what_it_was, written_from_itself, written_in_parts),
            written_to_a_batch_of,
        )
    },
    "weight-norm": use(
        lambda m, x: m.f(x), 4, f=lambda: parametrizations.weight_norm(nn.Linear(4, 3))
    ),
    "weight-norm-of-a-convolution": use(
        lambda m, x: m.f(x),
        2,
        4,
        f=lambda: parametrizations.weight_norm(nn.Conv1d(2, 2, 2)),
    ),
    "weight-norm-deprecated": use(
        lambda m, x: m.f(x), 4, f=lambda: old_weight_norm(nn.Linear(4, 3))
    ),
    **{
        f"weight-drop-{name}": Row(partial(WeightDrop, make), randn(N, 4))
        for name, make in {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}.items()
    },
    "spectral-norm": use(
        lambda m, x: m.f(x),
        4,
        f=lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    ),
    "spectral-norm-deprecated": use(
        lambda m, x: m.f(x), 4, f=lambda: nn.utils.spectral_norm(nn.Linear(4, 3))
    ),
    "orthogonal": use(lambda m, x: m.f(x), 4, f=lambda: orthogonal(nn.Linear(4, 4))),
    "weight-norm-by-hand": use(
        lambda m, x: F.linear(x, m.g * m.w / m.w.norm(dim=1, keepdim=True)),
        4,
        w=(3, 4),
        g=(3, 1),
    ),
    "parametrized-low-rank": use(
        lambda m, x: m.f(x), 4, f=lambda: adapted(nn.Linear(4, 3))
    ),
    "two-parametrizations": use(
        lambda m, x: m.f(x), 4, f=lambda: adapted(adapted(nn.Linear(4, 3)))
    ),
    "adapted-table": Row(
        lambda: Lambda(lambda m, i: m.e(i).sin(), e=adapted(nn.Embedding(5, 3))),
        tokens(N),
    ),
    "lora": use(lambda m, x: m.f(x), 4, f=LoRA),
    "lora-merged": use(
        lambda m, x: F.linear(x, m.w.detach() + m.b @ m.a),
        4,
        w=lambda: nn.Buffer(torch.randn(4, 4)),
        a=(2, 4),
        b=(4, 2),
    ),
    "dora": use(lambda m, x: m.f(x), 4, f=DoRA),
    "standardized-convolution": use(
        lambda m, x: m.f(x), 2, 4, f=lambda: Standardized(2, 3, 2)
    ),
    "standardized-by-batch-norm": use(
        lambda m, x: m.f(x), 2, 4, f=lambda: StandardizedByBatchNorm(2, 3, 2)
    ),
    "mixture-of-weights": use(
        lambda m, x: F.linear(x, torch.tensordot(m.a.softmax(0), m.bank, 1)),
        4,
        a=(3,),
        bank=(3, 3, 4),
    ),
    "kronecker-weight": use(
        lambda m, x: F.linear(x, torch.kron(m.a, m.b)), 4, a=(2, 2), b=(2, 2)
    ),
    "masked-weight": use(
        lambda m, x: F.linear(x, m.w * (m.w.abs() > 0.5)), 4, w=(3, 4)
    ),
    # as many entries as the matrix has columns
    "entries-by-a-mask": use(lambda m, x: x * m.w[torch.eye(4) > 0], 4, w=(4, 4)),
    "entries-of-a-view-by-a-mask": use(
        lambda m, x: x * m.w.view(3, 3)[torch.ones(3, 3).triu(1) > 0], 3, w=(9,)
    ),
    "constant-mask": use(  # as in masked autoregressive models
        lambda m, x: m.o(F.linear(x, torch.ones(3, 4).triu() * m.w).tanh()),
        *(2, 4),
        w=(3, 4),
        o=lambda: nn.Linear(3, 2),
    ),
    "constant-mask-in-each-step": use(
        lambda m, x: (y := F.linear(x, torch.eye(4).roll(1, 0) * m.w)).tanh()
        + F.linear(y, torch.eye(4).roll(1, 0) * m.w)
        + F.linear(x, m.w),
        4,
        w=(4, 4),
    ),
    "pruned": use(
        lambda m, x: m.f(x),
        4,
        f=lambda: prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5),
    ),
    "positive": use(
        lambda m, x: F.linear(F.linear(x, m.w.abs()).tanh(), F.softplus(m.u) * 2.0),
        *(2, 4),
        w=(3, 4),
        u=(2, 3),
    ),
    "positive-and-transposed": use(
        lambda m, x: x @ m.w.exp().T + x @ (m.w.T * 2).tanh(), 4, w=(3, 4)
    ),
    "positive-convolution": use(
        lambda m, x: F.conv1d(x, m.w.square(), m.b.exp()), 2, 4, w=(3, 2, 2), b=(3,)
    ),
    "clamped-and-viewed": use(
        lambda m, x: F.linear(x, m.w.clamp(-0.5, 0.5).view(3, 4)), 4, w=(12,)
    ),
    "gated-by-itself": use(  # several ways to the same entry
        lambda m, x: F.linear(x, m.w * m.w.sigmoid()), 2, 4, w=(3, 4)
    ),
    "positive-in-pieces": use(
        lambda m, x: F.linear(x, torch.where(m.w > 0, m.w + 1, m.w.exp())),
        4,
        w=(3, 4),
    ),
    "entries-and-their-transpose": use(  # two places that are none of the leaf's
        lambda m, x: F.linear(x, m.w.exp() * 2 + m.w.T.tanh()), 4, w=(4, 4)
    ),
    "once-for-several-uses": use(
        lambda m, x: (w := m.w.exp() * m.w) is None
        or F.linear(x, w) + F.linear(x.cos(), w) + x @ m.w,
        4,
        w=(4, 4),
    ),
    "scale-of-a-weight": use(  # and what is learned, for all entries
        lambda m, x: F.linear(x, m.w.tanh() * m.s.exp()), 4, w=(3, 4), s=(1,)
    ),
    "straight-through": use(  # as quantization does
        lambda m, x: F.linear(x, m.w + (m.w.round() - m.w).detach()), 4, w=(3, 4)
    ),
    "rounded": use(
        lambda m, x: F.linear(
            x, torch.fake_quantize_per_tensor_affine(m.w, 0.5, 0, -2, 1)
        ),
        4,
        w=(3, 4),
    ),
    "rounded-by-channel": use(
        lambda m, x: F.linear(
            x,
            torch.fake_quantize_per_channel_affine(
                m.w, torch.ones(3), torch.zeros(3).int(), 0, -1, 1
            ),
        ),
        4,
        w=(3, 4),
    ),
    "ternary-scale": use(
        lambda m, x: F.linear(x, m.w.sign().detach() * m.w.abs().mean()), 4, w=(3, 4)
    ),
    "stacked-weights": use(
        lambda m, x: F.linear(x, torch.cat([m.a, m.b])), 4, a=(2, 4), b=(1, 4)
    ),
    "sliced-without-ends": use(  # as PyTorch's own functions do
        lambda m, x: F.linear(x, torch.ops.aten.slice(m.w, 0, None, None, 2)),
        4,
        w=(6, 4),
    ),
    "sliced-without-an-end": use(
        lambda m, x: F.linear(x, torch.ops.aten.slice(m.w, 0, 3)), 4, w=(6, 4)
    ),
    "split-weight": use(
        lambda m, x: F.linear(F.linear(x, m.w[:4]), m.w[4:]), 4, w=(6, 4)
    ),
    "shifted-weight": use(
        lambda m, x: F.linear(x, m.w.roll(1, 0).flip(1).T.contiguous().T), 4, w=(3, 4)
    ),
    "sparse-weight": use(
        lambda m, x: torch.sparse.mm(sparse_weight(m.w), x.T).T, 4, w=(3,)
    ),
    "sparse-weight-of-vectors": use(
        lambda m, x: torch.stack([sparse_weight(m.w) @ row for row in x]), 4, w=(3,)
    ),
    "sparse-weight-with-a-shift": use(
        lambda m, x: torch.sparse.addmm(m.b, sparse_weight(m.w.tanh()), x.T).T,
        4,
        w=(3,),
        b=(3, 1),
    ),
    "hypernetwork-of-a-code": use(
        lambda m, x: F.linear(x, m.hyper(m.code).view(3, 4)),
        4,
        hyper=lambda: nn.Linear(2, 12),
        code=(2,),
    ),
    "hypernetwork-of-a-table": use(  # codes of N layers, by a batch of its own
        lambda m, x: F.linear(x, m.hyper(m.codes).sum(0).view(4, 4)),
        4,
        hyper=lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 16)),
        codes=(N, 2),
    ),
    "checkpointed-expression": use(
        lambda m, x: F.linear(
            x, checkpoint(lambda w: w.tanh() @ w.T, m.w, use_reentrant=False)
        ),
        4,
        w=(4, 2),
    ),
    "checkpointed-table": use(  # whose rows autograd has to ask for as well
        lambda m, x: checkpoint(
            lambda x: x * m.e(torch.arange(3)) + m.w[torch.tensor([1, 1, 4])],
            x,
            use_reentrant=False,
        ),
        3,
        4,
        e=lambda: nn.Embedding(5, 4),
        w=(5, 4),
    ),
    "computed-before-the-call": use(
        prepared,
        4,
        w=(3, 4),
        weights=list,
        f=lambda: Lambda(lambda m, x, w: F.linear(x, w)),
    ),
    "matrix-exponential": use(
        lambda m, x: x @ torch.linalg.matrix_exp(m.w - m.w.T), 4, w=(4, 4)
    ),
    "state-space": use(
        lambda m, x: torch.einsum(
            "nt,tk->nk", x, torch.stack([m.a.tanh() ** i for i in range(4)]) * m.c
        ),
        4,
        a=(3,),
        c=(3,),
    ),
    "frozen-part-of-a-weight": use(
        lambda m, x: F.linear(x, torch.cat([m.w[:2].detach(), m.w[2:]])), 4, w=(3, 4)
    ),
    "hook-of-the-weight": use(lambda m, x: F.linear(x, hooked(m.w * 2)), 4, w=(3, 4)),
}


def hooked(x: Tensor) -> Tensor:
    """Register a hook that looks at a gradient."""
    x.register_hook(lambda g: None)
    return x


def after_a_step(w: Tensor, x: Tensor) -> Tensor:
    """Return a weight for each sample, after a step that is differentiated through."""
    own = w.expand(len(x), *w.shape)
    value = (x[:, None] @ own).tanh().pow(2).sum()
    return own - torch.autograd.grad(value, own, create_graph=True)[0]


# Parameters that data make: the data's own, and no constants
HYPERNETWORKS = {
    "step-for-each-sample": use(  # as in MAML
        lambda m, x: (x.cos()[:, None] @ after_a_step(m.w, x))[:, 0], 4, w=(4, 3)
    ),
    "weight-for-each-sample": use(
        lambda m, x: torch.bmm(x[:, None], m.hyper(x.cos()).view(-1, 4, 3)),
        4,
        hyper=lambda: nn.Linear(4, 12),
    ),
    "film": use(
        lambda m, x: (lambda s, b: s * x + b)(*m.hyper(x.cos()).chunk(2, -1)),
        4,
        hyper=lambda: nn.Linear(4, 8),
    ),
    "dynamic-convolution": use(
        lambda m, x: F.conv1d(
            x.reshape(1, -1, 4),
            m.hyper(x.mean(1)).view(-1, 1, 2),
            groups=2 * len(x),
        ).view(len(x), 2, 3),
        2,
        4,
        hyper=lambda: nn.Linear(4, 4),
    ),
    "conditional-bank": use(  # as in CondConv
        lambda m, x: torch.einsum("nk,koi,ni->no", m.f(x).softmax(1), m.bank, x),
        4,
        f=lambda: nn.Linear(4, 2),
        bank=(2, 3, 4),
    ),
    "fast-weights": use(
        lambda m, x: x[:, None] @ (m.w + x[:, :, None] * x[:, None].cos()),
        4,
        w=(4, 4),
    ),
}


class Head(Module):
    """A head as BERT has it: its bias is the decoder's, under another name."""

    def __init__(self):
        """Create layers and alias."""
        super().__init__()
        self.dense, self.decoder = nn.Linear(4, 4), nn.Linear(4, 3)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return self.decoder(self.dense(x).tanh())


class EncoderDecoder(Module):
    """A table that encoder, decoder, head and a module that is never called share."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.shared = nn.Embedding(5, 3)
        self.encoder = nn.ModuleDict({"embed": self.shared, "fc": nn.Linear(3, 3)})
        self.decoder = nn.ModuleDict({"embed": nn.Embedding(5, 3)})
        self.decoder.embed.weight = self.shared.weight
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, i: Tensor) -> Tensor:
        """Encode and decode."""
        context = self.encoder.fc(self.encoder.embed(i)).tanh().mean(1, keepdim=True)
        return self.head(self.decoder.embed(i.flip(1)).sin() * context)


class WithParameter(nn.Sequential):
    """A sequence of layers with a parameter of its own."""

    def __init__(self):
        """Create layers and parameter."""
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self.temperature = param()

    def forward(self, x: Tensor) -> Tensor:
        """Scale what comes out."""
        return super().forward(x) * self.temperature.exp()


class Traceable(Module):
    """A module with a bare parameter, that can be traced."""

    def __init__(self):
        """Create layer and parameter."""
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), param(3)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return torch.tanh(self.fc(x) * self.scale + self.scale)


def same(*layers: Module) -> List[Module]:
    """Let layers share the first one's weight."""
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return list(layers)


def aliased_layer() -> Module:
    """Make a model that holds one layer under two names."""
    layer = nn.Linear(4, 4)
    return Lambda(lambda m, x: m.b(m.a(x).tanh()), a=layer, b=layer)


def alike(
    make: Callable, first: str, *others: str, call: Optional[Callable] = None
) -> Module:
    """Make a model with a layer that has one parameter in several places."""
    layer = make()
    for name in others:
        setattr(layer, name, getattr(layer, first))
    return Lambda(
        call or (lambda m, x: first_of(m.layer(x)) * m.p), layer=layer, p=param(4)
    )


def first_of(out: Any) -> Tensor:
    """Return what a layer puts out, without states."""
    return out[0] if isinstance(out, tuple) else out


ALIKE = ("weight_ih_l0", "weight_hh_l0")


def scaled(products: Sequence[str], m: Module, x: Tensor) -> Tensor:
    """Scale by products of parameters, one after the other."""
    for names in products:
        x = x.sin() * torch.stack([getattr(m, name) for name in names]).prod(0)
    return x


def transposed() -> Module:
    """Make an autoencoder whose decoder has the transposed weight."""
    return Lambda(lambda m, x: F.linear(m.f(x).tanh(), m.f.weight.T), f=nn.Linear(4, 3))


TIED = {
    "head-of-bert": Row(Head, randn(4)),
    **{f"encoder-decoder-{t}": Row(EncoderDecoder, tokens(t)) for t in LENGTHS},
    "weight-in-three-layers": Row(
        lambda: nn.Sequential(*same(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))),
        randn(3, 4),
    ),
    "layer-and-convolution": Row(
        lambda: Lambda(
            lambda m, x: F.conv1d(m.f(x).mT, m.f.weight[:, :, None]).sin(),
            f=nn.Linear(4, 4),
        ),
        randn(N, 4),
    ),
    "layer-under-two-names": Row(aliased_layer, randn(4)),
    "view-of-a-parameter": use(
        lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w.view(4, 3)), 4, w=(3, 4)
    ),
    "transposed-decoder": Row(transposed, randn(4)),
    "table-and-head": Row(
        lambda: Lambda(
            lambda m, i: (m.e(i).tanh() @ m.e.weight.T), e=nn.Embedding(5, 3)
        ),
        tokens(N),
    ),
    "scaled-table-and-head": Row(
        lambda: Lambda(
            lambda m, i: F.linear(m.e(i).tanh(), m.e.weight * 0.5, m.b),
            e=nn.Embedding(5, 3),
            b=param(5),
        ),
        tokens(3),
    ),
    "never-called": Row(
        lambda: Lambda(
            lambda m, x: F.linear(x, m.f.weight, m.f.bias).sin(), f=nn.Linear(4, 3)
        ),
        randn(4),
    ),
    "einsum-in-two-orders": use(
        lambda m, x: torch.einsum("ni,ijk->njk", x, m.w).tanh()
        * torch.einsum("ni,jik->njk", x, m.w),
        3,
        w=(3, 3, 3),
    ),
    "matmul-from-both-sides": use(lambda m, x: (x @ m.w).tanh() @ m.w.T, 4, w=(4, 4)),
    "twice-in-one-expression": use(
        lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w), 4, w=(4, 4)
    ),
    "twice-in-one-operation": use(lambda m, x: torch.addcmul(m.w, x, m.w), 4, w=(4,)),
    "between-two-of-itself": use(lambda m, x: torch.lerp(m.w, x, m.w), 4, w=(4,)),
    "scale-and-shift-of-a-norm": use(
        lambda m, x: F.layer_norm(x, (4,), m.w, m.w), 4, w=(4,)
    ),
    "scale-and-shift-of-groups": use(
        lambda m, x: F.group_norm(x, 2, weight=m.w, bias=m.w), 4, N, w=(4,)
    ),
    "scale-and-shift-of-statistics": use(
        lambda m, x: F.batch_norm(x, x.new_ones(4), x.new_ones(4) * 2, m.w, m.w),
        4,
        w=(4,),
    ),
    **{
        f"{name}-with-one-parameter": Row(partial(alike, make, *names), randn(3, 4))
        for name, make, names in [
            ("norm", lambda: nn.LayerNorm(4), ("weight", "bias")),
            ("rnn", lambda: nn.RNN(4, 4, batch_first=True), ALIKE),
            ("gru", lambda: nn.GRU(4, 4, batch_first=True), ALIKE),
            ("lstm", lambda: nn.LSTM(4, 4, batch_first=True), ALIKE),
        ]
    },
    "attention-with-one-projection": Row(
        lambda: alike(
            lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True),
            "k_proj_weight",
            "v_proj_weight",
            call=lambda m, x: m.layer(x, x[..., :3], x[..., 1:])[0] * m.p,
        ),
        randn(N, 4),
    ),
    "convolution-and-its-bias-in-one": use(
        lambda m, x: F.conv1d(x, m.w, m.w[:, 0, 0]), 4, N, w=(3, 4, 2)
    ),
    "weight-and-bias-in-one": use(
        lambda m, x: F.linear(x, m.w, m.w[:, 0]), 4, w=(3, 4)
    ),
    "all-projections-in-one": Row(
        lambda: Lambda(
            lambda m, x: attend(m.f(x), m.f(x.cos()), m.f(x.sin())), f=nn.Linear(4, 4)
        ),
        randn(N, 4),
    ),
    "packed-projection-of-one-matrix": use(
        lambda m, x: F.linear(x, torch.cat([m.w, m.w, m.w.T])), 4, w=(4, 4)
    ),
    "bilinear-of-one-module": Row(
        lambda: Lambda(
            lambda m, x: m.f(m.g(x), m.g(x.cos())),
            f=nn.Bilinear(3, 3, 2),
            g=nn.Linear(4, 3),
        ),
        randn(4),
    ),
    "sequential-with-a-parameter": Row(WithParameter, randn(4)),
    "graph-module-with-a-parameter": Row(
        lambda: fx.symbolic_trace(Traceable()), randn(4)
    ),
    "parameter-list": use(
        lambda m, x: sum(x * p + p.sin() for p in m.ps),
        4,
        ps=lambda: nn.ParameterList([param(4), param(4), param(1)]),
    ),
    "parameter-dict": use(
        lambda m, x: x * m.ps["a"] + m.ps["b"],
        4,
        ps=lambda: nn.ParameterDict({"a": param(4), "b": param(4)}),
    ),
    "two-heads-of-one-body": Row(
        lambda: Lambda(
            lambda m, x: torch.cat([F.linear(m.f(x), m.f.weight), m.f(x)], 1),
            f=nn.Linear(4, 4),
        ),
        randn(4),
    ),
    "unrolled": use(lambda m, x: unrolled(m, x), 4, w=(4, 4), b=(4,)),
    **{
        "groups-joined-by-"
        + "-".join(order): use(
            partial(scaled, order), 4, a=(4,), b=(4,), c=(4,), d=(4,)
        )
        for order in itertools.permutations(["ab", "cd", "abcd"])
    },
}


def in_turn(x: Tensor, weights: Sequence[Tensor], apply: Callable = F.linear) -> Tensor:
    """Apply weights one after another."""
    for w in weights:
        x = apply(x, w).tanh()
    return x


def routed(m: Module, x: Tensor) -> Tensor:
    """Send each position to one of the experts in a stack."""
    which, out = (x[..., 0] > 0).long() + 2 * (x[..., 1] > 0.3).long(), x.cos()
    for k in which.unique().tolist():
        rows = which == k
        out = out.index_put((rows,), F.linear(x[rows].sin(), m.w[k], m.b[k]))
    return out


def to_slots(slots: Callable[[Module, Tensor], Tensor], m: Module, x: Tensor) -> Tensor:
    """Send no position to an expert that has a table of its slots."""
    rows = (x[:, 0, 0] < -2).nonzero()[:, 0]
    shifted = x[rows, 1] + slots(m, torch.arange(len(rows)))
    return x[:, 0].index_put((rows,), shifted) * m.w[0]


STACK, LONG = {"w": (3, 4, 4)}, {"w": (12, 4)}
PIECES = {
    "selected": use(lambda m, x: in_turn(x, [m.w[0], m.w[2]]), 4, **STACK),
    "selected-from-the-end": use(
        lambda m, x: in_turn(x, [m.w[-1], m.w[-2].T]), 4, **STACK
    ),
    "selected-twice": use(lambda m, x: in_turn(x, [m.w[1], m.w[1]]), 4, **STACK),
    "unbound": use(lambda m, x: in_turn(x, m.w.unbind(0)), 4, **STACK),
    "iterated": use(lambda m, x: in_turn(x, list(m.w)[1:]), N, 4, **STACK),
    "chunked": use(
        lambda m, x: attend(*[F.linear(x, w) for w in m.w.chunk(3)]), 3, 4, **LONG
    ),
    "split": use(
        lambda m, x: F.linear(F.linear(x, m.w.split([4, 8])[0]), m.w.split([4, 8])[1]),
        *(N, 4),
        **LONG,
    ),
    "sliced": use(lambda m, x: in_turn(x, [m.w[:4], m.w[6:10]]), 4, **LONG),
    "sliced-from-the-end": use(
        lambda m, x: in_turn(x, [m.w[-4:], m.w[-8:-4]]), 4, **LONG
    ),
    "narrowed": use(lambda m, x: in_turn(x, [m.w.narrow(0, 3, 4)]), 4, **LONG),
    "overlapping": use(
        lambda m, x: in_turn(x, [m.w[:4], m.w[3:7], m.w[2:6]]), 4, **LONG
    ),
    "entry-and-slice": use(
        lambda m, x: in_turn(x, [m.w[1], m.w[1:2][0], m.w[:2].flatten(0, 1)[2:6]]),
        *(4,),
        **STACK,
    ),
    "piece-and-whole": use(
        lambda m, x: in_turn(x, [m.w[:4]]) + F.linear(x, m.w)[..., 4:8], 4, **LONG
    ),
    "numbers": use(lambda m, x: (x * m.w[0]).sin() * m.w[2] + m.w[0], N, 4, w=(3,)),
    "vectors": use(lambda m, x: (x * m.w[0]).sin() + m.w[1], 3, 4, w=(2, 4)),
    "kernels": use(
        lambda m, x: F.conv1d(F.conv1d(x, m.w[0]).sin(), m.w[1]), 2, 4, w=(2, 2, 2, 2)
    ),
    "of-a-view": use(
        lambda m, x: in_turn(x, [m.w.view(3, 4, 4)[1], m.w.T.reshape(3, 4, 4)[2]]),
        *(4,),
        **LONG,
    ),
    "of-the-same-rows": use(lambda m, x: in_turn(x, m.w.view(3, 4, 4)), 4, **LONG),
    "of-a-view-with-fewer-rows": use(
        lambda m, x: in_turn(x, m.w.view(4, 4, 4).unbind()), 4, w=(2, 2, 4, 4)
    ),
    "of-numbers-in-rows": use(
        lambda m, x: x * m.w.view(3)[0] + m.w.view(3)[2], N, 4, w=(3, 1)
    ),
    "of-a-table": use(
        lambda m, x: in_turn(x, m.w[torch.tensor([2, 0])].unbind()), 4, **STACK
    ),
    "of-a-masked-stack": use(
        lambda m, x: in_turn(x, [w.T for w in m.w * torch.eye(4)]), 4, **STACK
    ),
    "of-a-masked-bias": use(
        lambda m, x: (x + (0.5 * m.w)[1]).sin() * (0.5 * m.w)[:2].sum(0), N, 4, w=(3, 4)
    ),
    "of-an-expression": use(
        lambda m, x: in_turn(x, (m.w * m.w.sigmoid()).unbind()), 4, **STACK
    ),
    "of-a-piece": use(
        lambda m, x: in_turn(x, [m.w[1][0], m.w[1, 1]]) * m.w[0, 1, 2],
        4,
        w=(2, 2, 4, 4),
    ),
    "along-another-axis": use(
        lambda m, x: in_turn(x, [m.w[:, 1], m.w.select(-1, 0)]), 4, w=(4, 4, 4)
    ),
    "every-other": use(lambda m, x: in_turn(x, [m.w[::2][:4]]), 4, **LONG),
    "experts": use(routed, N, 4, w=(4, 4, 4), b=(4, 4)),
    **{
        f"slots-of-an-expert-{name}": use(partial(to_slots, slots), N, 4, w=(5, 4))
        for name, slots in {
            "sliced": lambda m, t: m.w[: len(t)],
            "indexed": lambda m, t: m.w[t],
            "looked-up": lambda m, t: F.embedding(t, m.w.flip(0)),
        }.items()
    },
    "samples-by-themselves": use(
        lambda m, x: torch.stack(
            [F.linear(row, m.w[int(row[0, 0] > 0)]).sin() for row in x]
        ),
        *(2, 4),
        **STACK,
    ),
}


def unrolled(m: Module, x: Tensor) -> Tensor:
    """Iterate a layer until a fixed point is near."""
    z = torch.zeros_like(x)
    for _ in range(4):
        z = torch.tanh(z @ m.w + x + m.b)
    return z


TABLES = {
    "positions": POSITION_ROWS,
    "tokens": TOKENS_IN_FRONT,
    "expression": EXPRESSIONS,
    "hypernetwork": HYPERNETWORKS,
    "tied": TIED,
    "pieces": PIECES,
}


@pytest.mark.parametrize(
    "table, row", [(table, row) for table, rows in TABLES.items() for row in rows]
)
def test_right(table: str, row: str) -> None:
    """Every quantity of every parameter agrees with plain autograd."""
    assert_right(TABLES[table][row])


@pytest.mark.parametrize("quantity", ["BatchL2Grad", "SumGradSquared", "ClippedGrad"])
@pytest.mark.parametrize(
    "row",
    ["selected", "unbound", "chunked", "experts"]
    + ["of-the-same-rows", "of-an-expression", "of-a-masked-stack"],
)
def test_pieces_by_themselves(row: str, quantity: str) -> None:
    """Of stacked weights, no products are formed as large as the stack."""
    with Elements() as elements:
        model = compute(PIECES[row]._replace(quantities=[quantity]), [quantity])
    assert elements.largest < N * model.w.numel()


def test_pieces_of_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done to a stack is differentiated once, for all that is taken of it."""
    differentiate, seen = expressions.batched_vjp, []
    monkeypatch.setattr(
        expressions, "batched_vjp", lambda *a: seen.append(a) or differentiate(*a)
    )
    row = PIECES["of-an-expression"]._replace(quantities=["SumGradSquared"])
    compute(row, ["SumGradSquared"])
    assert len(seen) == 1


FORMED = {
    "mask": (lambda w: torch.eye(4) * w, 0),
    "gated-by-itself": (lambda w: w * w.sigmoid(), 0),
    "quantized": (lambda w: w + (w.clamp(-1, 1).round() - w).detach(), 0),
    "rounded": (lambda w: torch.fake_quantize_per_tensor_affine(w, 0.5, 0, -2, 1), 0),
    "rounded-by-a-function": (lambda w: Backward.apply(torch.clone, w.detach(), w), 0),
    "transposed-by-a-function": (lambda w: Backward.apply(torch.t, w.detach(), w), 1),
    "in-pieces": (lambda w: torch.where(w > 0, w.mul(2).T.T, w.exp()), 1),
    "normalized": (lambda w: w / w.norm(dim=0), 1),
}


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("steps", [1, 3])
def test_formed_once(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses of an expression are joined, before products are formed, if they are."""
    (expression, formed), seen = FORMED[name], []
    blocks = Outer.block
    monkeypatch.setattr(Outer, "block", lambda *a: seen.append(a) or blocks(*a))
    # as on an accelerator: slopes are not compared
    monkeypatch.setattr("backpack.core.per_sample.scaled.may_look", lambda x: False)

    def forward(m: Lambda, x: Tensor) -> Tensor:
        w = expression(m.w)
        for _ in range(steps):
            x = F.linear(x, w).tanh()
        return x

    model = extend(Lambda(forward, w=nn.Parameter(torch.randn(4, 4))))
    with backpack(SumGradSquared()):
        model(torch.randn(N, 4)).sum().backward()
    assert len(seen) == max(formed, steps > 1)


@pytest.mark.parametrize("row", list(EXPRESSIONS)[::6])
def test_detecting_anomalies(row: str) -> None:
    """Who looks for anomalies is told of none."""
    with warnings.catch_warnings(record=True) as said:  # C++ swallows what they raise
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            assert_right(EXPRESSIONS[row])
    assert not [x.message for x in said]


@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExact"])
@pytest.mark.parametrize(
    "rule",
    [
        lambda g: g.clamp(-0.01, 0.01),
        torch.sign,
        lambda g: g / g.norm(),
        torch.relu,  # multiples are, sums are not
        lambda g: g * (g.abs() >= g.abs().mean()),
        lambda g: g * (g.abs() >= 0.05),
        lambda g: g * (g.norm() >= 0.1),
        lambda g: g / g.norm().clamp(min=1.0),
    ],
    ids="clipped sign normalized positive largest not-small not-small-norm "
    "clipped-norm".split(),
)
def test_backward_that_is_not_linear(rule: Callable, quantity: str) -> None:
    """A function of parameters whose gradients do not add up is refused."""
    function = partial(Backward.apply, rule)
    row = use(lambda m, x: F.linear(x, function(m.w.detach(), m.w)), 4, w=(3, 4))
    assert_refused(row, quantity, "backward of `.*` does not return multiples.*'w'")


class OwnLinear(torch.autograd.Function):
    """A layer with one rule for each gradient."""

    @staticmethod
    def forward(ctx: Any, rules: Dict[str, Callable], x: Tensor, w: Tensor) -> Tensor:
        """Multiply ``[N, 4]`` with ``[3, 4]``."""
        ctx.rules = rules
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Any, ...]:
        """Change each gradient by its rule."""
        x, w = ctx.saved_tensors
        rules = {"output": torch.clone, "x": torch.clone, "w": torch.clone, **ctx.rules}
        gradient = rules["output"](gradient)
        return None, rules["x"](gradient @ w), rules["w"](gradient.T @ x)


NOT_LINEAR: Dict[str, Callable] = {
    "clipped": lambda g: g.clamp(-0.01, 0.01),
    "sign": torch.sign,
    "positive": torch.relu,
    "largest": lambda g: g * (g.abs() >= g.abs().mean(-1, keepdim=True)),
}


@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExact"])
@pytest.mark.parametrize("place", ["output", "x", "w"])
@pytest.mark.parametrize("rule", NOT_LINEAR)
def test_layer_whose_backward_is_not_linear(
    rule: str, place: str, quantity: str
) -> None:
    """Refused, but where each sample's own gradient is changed before all add up."""
    rules = {place: NOT_LINEAR[rule]}
    row = use(
        lambda m, x: OwnLinear.apply(rules, m.f(x).tanh(), m.w),
        4,
        w=(3, 4),
        f=partial(nn.Linear, 4, 4),
    )
    if quantity == "BatchGrad" and place != "w":
        for p in compute(row, [quantity]).parameters():
            assert_agrees(p.grad_batch.sum(0), p.grad, "sum of grad_batch")
    else:
        assert_refused(row, quantity, "backward of `.*` does not return multiples")


OF_OPERATIONS: Dict[str, Tuple[Callable, str]] = {
    "linear": (lambda g: 2 * g, ""),
    "clipped": (NOT_LINEAR["clipped"], "of `.*product` does not return multiples"),
    "centered": (lambda g: g - g.mean(0), "met in the backward pass of `.*product`"),
    "by-its-norm": (lambda g: g / g.norm(), "met in the backward pass of `.*product`"),
    "noisy": (lambda g: g + torch.randn_like(g), "of `.*product` draws random numbers"),
}


@torch.library.custom_op("backpack_expressions::product", mutates_args=())
def product(x: Tensor, w: Tensor, rule: str) -> Tensor:
    """Multiply ``[N, 4]`` with ``[3, 4]``."""
    return x @ w.T


def _keep(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.rule = OF_OPERATIONS[inputs[2]][0]


def _differentiate(ctx: Any, g: Tensor) -> Tuple[Any, ...]:
    x, w = ctx.saved_tensors
    return ctx.rule(g) @ w, ctx.rule(g).T @ x, None


product.register_autograd(_differentiate, setup_context=_keep)


@pytest.mark.parametrize("quantity", ["BatchGrad", "BatchL2Grad", "DiagGGNExact"])
@pytest.mark.parametrize("rule", OF_OPERATIONS)
def test_derivative_of_own_operation(rule: str, quantity: str) -> None:
    """What is registered as an operation's derivative need be none, either."""
    row = use(
        lambda m, x: product(m.f(x).tanh(), m.w, rule),
        4,
        w=(3, 4),
        f=partial(nn.Linear, 4, 4),
    )
    _, says = OF_OPERATIONS[rule]
    if not says:
        assert_right(row._replace(quantities=[quantity]))
    elif rule == "clipped" and quantity != "DiagGGNExact":
        quantity = "BatchGrad"  # of what was clipped
        for p in compute(row, [quantity]).parameters():
            assert_agrees(p.grad_batch.sum(0), p.grad, "sum of grad_batch")
    else:
        assert_refused(row, quantity, says)


class Changes(torch.autograd.Function):
    """Products of numbers, with one number for what their gradients are clipped at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, most: float) -> Tensor:
        """Multiply ``[N, 3]`` with ``[3]``, or the like."""
        ctx.save_for_backward(x, w)
        ctx.most = most
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tuple[Any, ...]:
        """Clip the gradient."""
        x, w = ctx.saved_tensors
        g = g.clamp(-ctx.most, ctx.most)
        return (g * w).sum_to_size(x.shape), (g * x).sum_to_size(w.shape), None


@pytest.mark.filterwarnings("ignore:.*(torch.jit|should not be inst|The .grad attr)")
@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExact"])
@pytest.mark.parametrize("on", ["data", "parameters"])
@pytest.mark.parametrize("most", [1e6, 0.01])
def test_functions_in_what_is_compiled(most: float, on: str, quantity: str) -> None:
    """They are no nodes of the graph, but may be no derivatives either."""

    def forward(m: Module, x: Tensor) -> Tensor:
        if on == "data":
            return m.g(product(m.f(x), m.w, most) + m.v)
        return m.g(m.f(x) * product(m.w, m.v, most))

    once = partial(torch.compile, backend="aot_eager", fullgraph=True)
    product = once(lambda *args: Changes.apply(*args))
    parts = {"f": partial(nn.Linear, 4, 3), "g": partial(nn.Linear, 3, 2)}
    row = use(forward, 4, w=(3,), v=(3,), **parts)
    torch.compiler.reset()
    if most > 1:
        assert_right(row._replace(quantities=[quantity]))
    elif (on, quantity) == ("data", "BatchGrad"):  # of what was clipped
        for p in compute(row, [quantity]).parameters():
            assert_agrees(p.grad_batch.sum(0), p.grad, "sum of grad_batch")
    else:
        assert_refused(row, quantity, "backward of `.*` does not return multiples")


def test_column_that_is_carried() -> None:
    """A single column is looked at as well, which the backward pass might carry."""
    model = Lambda(lambda m, x: m.f(OwnLinear.apply({}, x, m.w)), w=param(3, 4))
    model.f = Lambda(lambda m, x: OwnLinear.apply({"x": torch.relu}, x, m.w))
    model.f.w = param(2, 3)
    model, loss = extend(model.to(F64)), extend(nn.MSELoss())
    value = loss(model(torch.randn(N, 4, dtype=F64)), torch.randn(N, 2, dtype=F64))
    with backpack(DiagGGNMC(), gradient=False):
        with pytest.raises(NotImplementedError, match="does not return multiples"):
            value.backward()


def test_backward_that_only_vmap_has_rules_for() -> None:
    """It runs for all samples at once, as that of `einsum` in a function of one's own.

    What PyTorch pulls back gradients in a batch with has no rule for it.
    """
    runs: List[int] = []

    def rule(g: Tensor) -> Tensor:
        runs[-1] += 1
        torch.histc(g)  # which `vmap` has no rule for, and warns
        return torch.einsum("nm->nm", g)

    forward = partial(OwnLinear.apply, {"output": rule})
    for n in (2, 5):
        runs.append(0)
        model = Lambda(lambda m, x: forward(x, m.w), w=param(3, 4))
        x = torch.randn(n, 4, dtype=F64)
        model, loss = extend(model.to(F64)), extend(nn.MSELoss(reduction="sum"))
        with backpack(BatchGrad()):
            loss(model(x), torch.zeros(n, 3, dtype=F64)).backward()
        expected = torch.einsum("nm,ni->nmi", 2 * x @ model.w.T, x)
        assert_agrees(model.w.grad_batch, expected, "grad_batch")
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "rule",
    [
        lambda g: 3 * g,
        lambda g: g * torch.arange(-2.0, 2.0, dtype=F64),  # entries that it leaves out
        lambda g: g - g.mean(),
        lambda g: g + 1e-3 * g.mean(0),  # next to a diagonal
        lambda g: g.flip(0),
        lambda g: g.T,
        torch.zeros_like,
    ],
    ids="scaled entries centered nearly flipped transposed none".split(),
)
@pytest.mark.parametrize("before", [torch.clone, torch.tanh, torch.t])
def test_backward_that_is_linear(rule: Callable, before: Callable) -> None:
    """A function of parameters may have any backward, entry by entry or not."""

    def function(m: Any, x: Tensor) -> Tensor:
        weight = before(m.w)
        return F.linear(x, Backward.apply(rule, weight.detach(), weight).exp())

    assert_right(use(function, 4, w=(4, 4)))


def test_backward_whose_result_cancels() -> None:
    """Rounding errors of a derivative that is zero are not combined like columns."""

    def function(m: Any, x: Tensor) -> Tensor:
        weight = OwnLinear.apply({}, m.f(x), m.w).exp()
        return m.g(x) * weight / weight.sum(-1, keepdim=True)

    layer = partial(nn.Linear, 4, 4)
    assert_right(use(function, 4, w=(1, 4), f=layer, g=layer))
