"""Where samples meet, what separates them is refused, and the operation is named.

In the model, between model and loss, in a loss that the model computes itself; layers
that get a sequence in place of a batch, and layers that contradict each other.
"""

from contextlib import suppress
from functools import partial
from math import sin
from typing import Any, Callable, Dict, Optional, Tuple, Type

import pytest
import torch
import torch.nn.functional as F
from cases import F64
from oracle import assert_agrees
from per_sample import (
    FIRST_ORDER,
    LENGTHS,
    REFUSALS,
    Backward,
    Lambda,
    N,
    Row,
    assert_equal,
    assert_refused,
    assert_right,
    assert_right_or_refused,
    classes,
    compute,
    param,
    randn,
)
from test_samples import PRODUCTS, D, First, permutation
from torch import Tensor, nn
from torch.nn import Module

from backpack import backpack, extend
from backpack.extensions import BatchGrad


class Norm(Module):
    """A normalization by statistics of the batch, written by hand."""

    def __init__(self, size: int):
        """Create scale and shift."""
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), param(size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return (x - x.mean(0)) * x.var(0).rsqrt() * self.scale + self.shift


def without_grad(x: Tensor) -> Tensor:
    """Compute the mean of the batch, outside of autograd."""
    with torch.no_grad():
        return x.mean(0)


class Centered(torch.autograd.Function):
    """Subtract the mean, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Subtract it."""
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Differentiate that."""
        return g - g.mean(0)


class ReadAsNumbers(torch.autograd.Function):
    """The sine, by numbers of Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute it."""
        ctx.save_for_backward(x)
        rows = [[sin(number) for number in row] for row in x.tolist()]
        return torch.tensor(rows).to(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Differentiate it."""
        (x,) = ctx.saved_tensors
        return g * x.cos()


RULES: Dict[str, Callable[[Tensor], Tensor]] = {  # by which samples meet
    "centered": lambda g: g - g.mean(0),
    "normalized": lambda g: g / g.norm(),
    "rolled": lambda g: g.roll(1, 0),
    "permuted": lambda g: g[permutation(g)],
    "accumulated": lambda g: g.cumsum(0),
    "picked-by-all": lambda g: g * (g.abs() >= g.abs().median(0).values),
    "in-place": lambda g: g.clone().sub_(g.mean(0)),
    "one-for-all": lambda g: g[:1].expand_as(g),
    "behind-a-function": lambda g: Centered.apply(g),
}


class ComparedByNumber(torch.autograd.Function):
    """Subtract an entry of the first sample, as a number of Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Subtract it."""
        return x - x.flatten()[0].item()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Differentiate that."""
        first = torch.arange(g.numel()).reshape(g.shape) == 0
        return g - g.sum() * first


def set_by_masks(x: Tensor) -> Tensor:
    """Let all samples' masks write to what the first one shows to all."""
    shown = x[:1].expand_as(x).clone()
    shown[x.detach() > 0] = 0.0
    return shown


COUPLINGS: Dict[str, Tuple[Callable, str]] = {  # of x [N, D], and what is named
    **{
        f"backward-{name}": (
            lambda m, x, rule=rule: Backward.apply(rule, m.p, x).sin(),
            "the backward pass of `Backward`",
        )
        for name, rule in RULES.items()
    },
    **{  # where what another function makes of numbers is not seen
        f"backward-{name}-{where}-numbers": (
            lambda m, x, rule=RULES[name], first=first: (
                ReadAsNumbers.apply(Backward.apply(rule, m.p, x))
                if first
                else Backward.apply(rule, m.p, ReadAsNumbers.apply(x))
            ),
            "the backward pass of `Backward`",
        )
        for name in ("normalized", "rolled", "permuted")
        for where, first in {"before": True, "behind": False}.items()
    },
    "permutation": (lambda m, x: x + x[permutation(x)], r"add|getitem|index"),
    "roll": (lambda m, x: x + x.roll(1, 0), r"add|roll"),
    "mean-with-and-without-gradient": (
        lambda m, x: x - without_grad(x) - x.mean(0),
        r"mean",
    ),
    "state": (lambda m, x: m.r(x[None], x.flip(0)[None])[0][0], r"gru|flip"),
    "flip": (lambda m, x: x * x.flip(0), r"mul|flip"),
    "one-beside-data-of-all": (lambda m, x: x[:1] + x.detach(), r"add"),
    "one-behind-masks-of-all": (
        lambda m, x: x[:1].expand_as(x).masked_fill(x.detach() > 0, 0.0),
        r"masked_fill",
    ),
    "one-where-others-say": (
        lambda m, x: torch.where(x.detach() > 0, x[:1], 0),
        "where",
    ),
    "one-times-integers-of-all": (
        lambda m, x: x[:1] * (5 * x.detach()).long(),
        r"mul",
    ),
    "one-where-others-pick": (
        lambda m, x: x[:1].expand_as(x).gather(1, x.detach().argsort(1)),
        r"gather",
    ),
    "one-written-to-by-masks-of-all": (
        lambda m, x: x[:1].expand_as(x).clone().masked_scatter(x > 0, x.detach()),
        r"masked_scatter",
    ),
    "one-set-by-masks-of-all": (lambda m, x: set_by_masks(x), r"setitem"),
    "one-in-front-of-data-of-all": (
        lambda m, x: torch.cat([x[:1, :2].expand(N, 2), x.detach()[:, 2:]], 1),
        r"cat|linear",
    ),
    "permutation-beside-data": (
        lambda m, x: x[permutation(x)] * x.detach(),
        r"mul",
    ),
    "mixup": (
        lambda m, x: torch.lerp(x, x[permutation(x)], 0.3),
        r"lerp|getitem|index",
    ),
    "mean": (lambda m, x: x - x.mean(0), r"mean"),
    "function": (lambda m, x: Centered.apply(x), r"met in `Centered`"),
    "function-in-another-class": (  # which no mode sees
        lambda m, x: Centered.apply(x).as_subclass(Tensor),
        r"met in `Centered`",
    ),
    "function-of-a-number": (lambda m, x: ComparedByNumber.apply(x), r"compared"),
    "mean-of-everything": (lambda m, x: x - x.mean(), r"mean"),
    "sum": (lambda m, x: x / (3 + x.sum(0)), r"sum"),
    "standard-deviation": (lambda m, x: x / x.std(0), r"std"),
    "variance": (lambda m, x: x * x.var(0), r"var"),
    "norm-of-the-batch": (lambda m, x: x / x.norm(), r"norm"),
    "largest": (lambda m, x: x - x.max(0).values, r"max"),
    "largest-of-all": (lambda m, x: x / x.abs().amax(), r"max"),
    "median": (lambda m, x: x - x.median(0).values, r"median"),
    "softmax": (lambda m, x: x.softmax(0), r"softmax"),
    "log-softmax": (lambda m, x: F.log_softmax(x, dim=0), r"softmax"),
    "logsumexp": (lambda m, x: x - x.logsumexp(0), r"logsumexp"),
    "cumulative-sum": (lambda m, x: x.cumsum(0), r"cumsum"),
    "cumulative-product": (lambda m, x: (2 + x).cumprod(0), r"cumprod"),
    "sort": (lambda m, x: x.sort(0).values, r"sort"),
    "top": (lambda m, x: x - x.topk(2, 0).values[1], r"topk"),
    "difference": (lambda m, x: torch.diff(x, dim=0, prepend=x[:1]), r"diff|sub"),
    "running": (lambda m, x: running(x), r"add|mul|stack"),
    "similarity": (lambda m, x: x @ x.T, r"matmul|mm"),
    "similarity-of-two": (lambda m, x: m.f(x) @ m.f(x.cos()).T, r"matmul|mm"),
    "similarity-einsum": (lambda m, x: torch.einsum("nd,md->nm", x, m.f(x)), r"einsum"),
    "gram": (lambda m, x: x @ (x.T @ x), r"matmul|mm"),
    "attention-over-samples": (
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
        r"scaled_dot_product_attention",
    ),
    "attention-past-a-mask": (  # that lets a position see the one before
        lambda m, x: attend(x, torch.ones(len(x), len(x)).tril().triu(-1).bool()),
        r"scaled_dot_product_attention",
    ),
    "attention-with-a-distance": (  # whose weights are no zeros, but small
        lambda m, x: attend(x, -60.0 * (1 - torch.eye(len(x), dtype=F64))),
        r"scaled_dot_product_attention",
    ),
    "attention-to-one-of-many": (  # which half precision does not show
        lambda m, x: attend(
            x.bfloat16().repeat_interleave(300, 0), others_row(len(x), 300)
        )[::300].to(x),
        r"scaled_dot_product_attention",
    ),
    "product-with-small-numbers": (
        lambda m, x: (torch.eye(len(x), dtype=F64) + 1e-30) @ x,
        r"matmul",
    ),
    **{
        f"product-with-no-number-{name}": (
            lambda m, x, layout=layout: layout(
                torch.eye(len(x), dtype=F64).masked_fill(
                    torch.eye(len(x)).roll(1, 0) > 0, float("nan")
                )
            )
            @ x,
            r"matmul",
        )
        for name, layout in {"dense": Tensor.clone, "sparse": Tensor.to_sparse}.items()
    },
    "product-with-a-triangle": (
        lambda m, x: torch.ones(len(x), len(x), dtype=F64).tril() @ x,
        r"matmul",
    ),
    **{
        f"product-{name}": (
            lambda m, x, product=product: product(
                torch.eye(len(x), dtype=F64) + 1e-30, x
            ),
            r"add\w*m|linalg|bilinear|conv1d",
        )
        for name, product in PRODUCTS.items()
    },
    "attention-layer-over-samples": (
        lambda m, x: m.a(x[:, None], x[:, None], x[:, None])[0][:, 0],
        r"MultiheadAttention|multi_head_attention|matmul|bmm|softmax|attention|axis",
    ),
    "recurrent-over-samples": (lambda m, x: m.r(x[:, None])[0][:, 0], r"GRU|gru|axis"),
    "convolution-over-samples": (
        lambda m, x: F.conv1d(
            x.T[None], m.p.expand(D, 1, D)[..., :1].repeat(1, 1, 3), padding=1, groups=D
        )[0].T,
        r"conv1d",
    ),
    "distances": (lambda m, x: torch.cdist(x, x.cos()), r"cdist"),
    "pairs": (lambda m, x: (x[:, None] - x[None]).pow(2).sum(-1), r"sub"),
    "neighbour": (lambda m, x: torch.cat([x[:1], x[1:] - x[:-1]]), r"sub"),
    "graph": (
        lambda m, x: torch.eye(len(x), dtype=F64).roll(1, 0) @ x + x,
        r"matmul|mm|add",
    ),
    "graph-mixes": (
        lambda m, x: torch.ones(len(x), len(x), dtype=F64) @ x,
        r"matmul|mm",
    ),
    "scatter-mean": (
        lambda m, x: x.new_zeros(2, D).index_add(0, torch.arange(len(x)) % 2, x)[
            torch.arange(len(x)) % 2
        ],
        r"index_add|getitem",
    ),
    "batch-norm": (lambda m, x: m.n(x), r"batch.?norm"),
    "batch-norm-function": (
        lambda m, x: F.batch_norm(x, None, None, training=True),
        r"batch_norm|BatchNorm",
    ),
    "batch-norm-of-an-exported-program": (
        lambda m, x: torch.ops.aten._native_batch_norm_legit.no_stats(
            x, None, None, True, 0.1, 1e-5
        )[0],
        r"batch_norm|BatchNorm",
    ),
    "batch-norm-of-pairs": (
        lambda m, x: torch.cat([m.n(pair) for pair in x.split(2)]),
        r"batch.?norm",
    ),
    "batch-norm-of-pairs-function": (
        lambda m, x: torch.cat(
            [F.batch_norm(pair, None, None, training=True) for pair in x.split(2)]
        ),
        r"batch_norm|BatchNorm",
    ),
    "batch-norm-with-channels-of-pairs": (
        lambda m, x: F.batch_norm(x.reshape(2, -1), None, None, training=True).view_as(
            x
        ),
        r"batch_norm|BatchNorm",
    ),
    "batch-norm-by-hand": (lambda m, x: m.h(x), r"mean|var"),
    "layer-norm-over-samples": (lambda m, x: F.layer_norm(x, x.shape), r"layer_norm"),
    "normalize-over-samples": (lambda m, x: F.normalize(x, dim=0), r"norm"),
    "memory-that-mixes": (lambda m, x: (x @ m.m.tanh().T).softmax(0) @ m.m, r"softmax"),
    "sinkhorn": (lambda m, x: sinkhorn(x), r"sum|div|logsumexp|softmax"),
    "squeeze-over-samples": (
        lambda m, x: x * torch.sigmoid(m.f(x.mean(0, keepdim=True))),
        r"mean",
    ),
    "whitening": (
        lambda m, x: x @ torch.linalg.inv(x.T @ x + torch.eye(D, dtype=F64)),
        r"matmul|mm|inv",
    ),
    "svd": (lambda m, x: torch.linalg.svdvals(x).sum() * x, r"svd|linalg"),
    "addbmm": (
        lambda m, x: torch.addbmm(x, x[:, :, None], x[:, None]),
        r"addbmm",
    ),
    "flattened-the-wrong-way": (lambda m, x: x.T.reshape(len(x), D) + x, r"add"),
    "in-place": (lambda m, x: x.clone().add_(x[permutation(x)]), r"add_|getitem|index"),
    "setitem": (lambda m, x: shifted_in_place(x), r"setitem|mul|add"),
    "loss-weights": (lambda m, x: x * x.sum(1).softmax(0)[:, None], r"softmax"),
    "gate-of-the-batch": (lambda m, x: x * x.mean().sigmoid(), r"mean"),
    # operations that leave out what is no number, or compare it with none
    "sum-of-numbers": (lambda m, x: x / (3 + x.nansum(0)), r"nansum|div|add"),
    "mean-of-numbers": (lambda m, x: x - x.nanmean(0), r"nanmean|sub"),
    "median-of-numbers": (lambda m, x: x - x.nanmedian(0).values, r"nanmedian|sub"),
    "quantile-of-numbers": (lambda m, x: x - x.nanquantile(0.3, 0), r"quantile|sub"),
    "larger-number": (lambda m, x: x + torch.fmax(x, x.roll(1, 0)), r"fmax|add"),
    "smaller-number": (lambda m, x: x + torch.fmin(x, x.flip(0)), r"fmin|add"),
    "larger-number-of-every-other": (  # of those with one bit in common
        lambda m, x: x + torch.fmax(x, x.roll(2, 0)),
        r"fmax|add",
    ),
    "rank": (lambda m, x: x - x.kthvalue(2, 0).values, r"kthvalue|sub"),
    "renormalized": (lambda m, x: x.renorm(2, 1, 0.1), r"renorm"),
    "base-of-a-view": (
        lambda m, x: (lambda h, part: (h.copy_(x.roll(1, 0)), x + part)[1])(
            *(lambda h: (h, h[:, :1]))(x.clone())
        ),
        r"add",
    ),
    "another-view": (
        lambda m, x: (lambda h, part: (h[:, 1:].copy_(x.roll(1, 0)[:, 1:]), x * part))(
            *(lambda h: (h, h[:, 1:2]))(x.clone())
        )[1],
        r"mul",
    ),
    "in-place-unseen": (
        lambda m, x: (lambda h: (torch.vmap(Tensor.copy_)(h, x.roll(1, 0)), x + h)[1])(
            x.clone()
        ),
        r"add",
    ),
    "real-part": (lambda m, x: with_real_part(x.sin(), x.roll(1, 0)), r"copy_slices"),
    "as-strided": (  # which rows these are, only strides tell
        lambda m, x: x.contiguous().as_strided((N, N), (N, 1))
        + x.T.contiguous().T.as_strided((N, N), (N, 1)),
        r"as_strided|add",
    ),
    "as-strided-copy": (
        lambda m, x: torch.as_strided_copy(x.contiguous(), (N, N), (N, 1))
        + torch.as_strided_copy(x.T.contiguous().T, (N, N), (N, 1)),
        r"as_strided_copy|add",
    ),
}


def attend(x: Tensor, mask: Tensor) -> Tensor:
    """Let samples ``[N, D]`` attend to each other."""
    return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)[0]


def others_row(n: int, times: int) -> Tensor:
    """Let rows see those of their own sample, and one row that of another."""
    own = torch.arange(n).repeat_interleave(times)
    mask = own == own[:, None]
    mask[times, 0] = True
    return mask


def running(x: Tensor) -> Tensor:
    """Average over samples, one after the other."""
    rows = [x[0]]
    for row in x[1:]:
        rows.append(0.9 * rows[-1] + 0.1 * row)
    return torch.stack(rows)


def sinkhorn(x: Tensor) -> Tensor:
    """Balance assignments over the batch, as SwAV does."""
    q = x.exp()
    for _ in range(2):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


def shifted_in_place(x: Tensor) -> Tensor:
    """Multiply each sample by the one before, in place."""
    x = x.clone()
    x[1:] = x[1:].clone() * x[:-1].clone()
    return x


def with_real_part(x: Tensor, y: Tensor) -> Tensor:
    """Replace the real part of complex numbers, which no mode sees."""
    z = torch.complex(x, x)
    z.real = y
    return z.abs()


def coupled(name: str) -> Row:
    """Make a row in which samples meet between two layers."""
    function, says = COUPLINGS[name]
    parts = {
        "a": lambda: nn.MultiheadAttention(D, 2),
        "r": lambda: nn.GRU(D, D),
        "n": lambda: nn.BatchNorm1d(D),
        "h": lambda: Norm(D),
        "m": lambda: param(N, D),
    }
    own = {  # what the function uses
        "attention-layer-over-samples": "a",
        "recurrent-over-samples": "r",
        "state": "r",
        "batch-norm": "n",
        "batch-norm-of-pairs": "n",
        "batch-norm-by-hand": "h",
        "memory-that-mixes": "m",
    }.get(name)
    return Row(
        lambda: Lambda(
            lambda m, x: m.last(function(m, m.f(x).tanh())) * m.p,
            f=nn.Linear(D, D),
            last=nn.Linear(N if name in SQUARE else D, D),
            p=param(D),
            **({own: parts[own]()} if own else {}),
        ),
        randn(D),
        train=True,
        says=says,
    )


SQUARE = (
    "similarity",
    "similarity-of-two",
    "similarity-einsum",
    "distances",
    "pairs",
)
BATCH_NORMS = (  # as in 1.7, a warning is enough
    *("batch-norm", "batch-norm-function", "batch-norm-of-an-exported-program"),
    *("batch-norm-of-pairs", "batch-norm-of-pairs-function"),
    "batch-norm-with-channels-of-pairs",
)
QUANTITIES = ["BatchGrad", "BatchL2Grad", "DiagGGNExact"]


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", COUPLINGS)
def test_samples_that_meet(name: str, quantity: str) -> None:
    """What separates samples is refused, and the operation is named."""
    kinds = (*REFUSALS, UserWarning) if name in BATCH_NORMS else REFUSALS
    assert_refused(coupled(name), quantity, kinds=kinds)


def contrastive(f: Tensor, loss: Module) -> Tensor:
    """Compare each sample with all others, as CLIP does."""
    a, b = f.chunk(2, 1)
    return loss(a @ b.T, torch.arange(len(f)))


def symmetric_contrastive(f: Tensor, loss: Module) -> Tensor:
    """Do so in both directions."""
    a, b = F.normalize(f, dim=1).chunk(2, 1)
    logits, y = a @ b.mT * 5, torch.arange(len(f))
    return (loss(logits, y) + loss(logits.mT, y)) / 2


def of_two_views(f: Tensor, loss: Module) -> Tensor:
    """Compare all samples with all, of two views in one batch."""
    z = torch.cat([f, f.cos()])
    scores = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return loss(scores, torch.arange(len(z)).roll(len(f)))


def margins(f: Tensor, loss: Module) -> Tensor:
    """Compare the differences of neighbours, as ranking losses do."""
    return loss(f[1:] - f[:-1], torch.ones_like(f[1:]))


def covariance(f: Tensor, loss: Module) -> Tensor:
    """Compare the covariance of features with the identity, as Barlow Twins does."""
    z = (f - f.mean(0)) / f.std(0)
    return loss(z.T @ z / len(f), torch.eye(f.shape[1], dtype=f.dtype))


def centered(f: Tensor, loss: Module) -> Tensor:
    """Compare predictions with their mean taken away."""
    return loss(f - f.mean(0), torch.zeros_like(f))


def soft_maximum(f: Tensor, loss: Module) -> Tensor:
    """Give the samples weights that depend on all losses."""
    return torch.stack([loss(row, torch.zeros_like(row)) for row in f]).logsumexp(0)


def pointing(f: Tensor) -> Tensor:
    """Give a target that is a sample to each feature."""
    return torch.arange(f.shape[1]) % len(f)


COUPLING_LOSSES = {
    # samples lie along the axis that a loss compares the entries of
    "samples-as-classes": (
        lambda f, loss: loss(f.T, pointing(f)),
        nn.CrossEntropyLoss,
        r"CrossEntropyLoss",
    ),
    "samples-as-classes-of-one-term": (
        lambda f, loss: loss(f[:, 0], torch.tensor(1)),
        nn.CrossEntropyLoss,
        r"CrossEntropyLoss",
    ),
    "samples-as-classes-of-positions": (
        lambda f, loss: loss(f[None], pointing(f)[None]),
        nn.CrossEntropyLoss,
        r"CrossEntropyLoss",
    ),
    "shuffled-samples-as-classes": (
        lambda f, loss: loss(f[permutation(f)].T, pointing(f)),
        nn.CrossEntropyLoss,
        r"CrossEntropyLoss",
    ),
    "samples-as-scores": (
        lambda f, loss: loss(f.T, pointing(f)),
        nn.MultiMarginLoss,
        r"multi_?margin_?loss",
    ),
    "samples-as-targets": (
        lambda f, loss: loss(f[:2, :2], f[:2, :2].sigmoid().T),
        nn.MultiLabelSoftMarginLoss,
        r"MultiLabelSoftMarginLoss|multilabel_soft_margin_loss|mul|mean",
    ),
    "samples-as-labels": (
        lambda f, loss: loss(f[:, 0], (1 - torch.arange(len(f))).clamp(min=-1)),
        nn.MultiLabelMarginLoss,
        r"multilabel_?margin_?loss",
    ),
    "samples-as-steps": (
        lambda f, loss: loss(
            f.log_softmax(1), *map(torch.tensor, ([[1, 2]], [len(f)], [2]))
        ),
        nn.CTCLoss,
        r"ctc_?loss",
    ),
    "samples-as-features": (
        lambda f, loss: loss(f.T, f.T.cos(), torch.ones(f.shape[1])),
        nn.CosineEmbeddingLoss,
        r"CosineEmbeddingLoss|cosine_embedding_loss|mean|sum",
    ),
    "samples-as-coordinates": (
        lambda f, loss: loss(f.T, f.T.cos(), f.T.sin()),
        nn.TripletMarginLoss,
        r"TripletMarginLoss|triplet_margin_loss|norm",
    ),
    "soft-maximum": (soft_maximum, nn.MSELoss, r"logsumexp"),
    "contrastive": (contrastive, nn.CrossEntropyLoss, r"matmul|mm"),
    "symmetric": (symmetric_contrastive, nn.CrossEntropyLoss, r"matmul|mm"),
    "two-views": (of_two_views, nn.CrossEntropyLoss, r"matmul|mm"),
    "margins": (margins, nn.MSELoss, r"sub"),
    "covariance": (covariance, nn.MSELoss, r"mean|std|matmul|mm"),
    "centered": (centered, nn.MSELoss, r"mean"),
}


# Functions of the batch's losses: each counts as often as the function says
OF_LOSSES: Dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda losses: losses.max(),
    "logarithms": lambda losses: losses.log().sum(),
    "length": lambda losses: losses.norm(),
    "product": lambda losses: losses.prod(),
    "weighted-by-themselves": lambda losses: losses.softmax(0) @ losses,
}


def two_losses(f: Tensor, number: Optional[int] = None) -> Tensor:
    """Stack two losses of the batch, or a sample's share in them."""
    target = torch.arange(3.0 * N, dtype=F64).sin().view(N, 3)
    if number is None:
        return torch.stack([F.mse_loss(f, target), F.huber_loss(f.exp(), target)])
    target = target[number : number + 1]
    return torch.stack([F.mse_loss(f, target), F.huber_loss(f.exp(), target)]) / N


# How the loss of a group is written, given each sample's output and a mask
OF_A_GROUP: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda f, own: f[own].square().sum(1)[None].mean(),
    "of-rows": lambda f, own: F.mse_loss(f[own], f[own].detach() - 1),
    "of-labels": lambda f, own: F.cross_entropy(f[own], torch.arange(N)[own] % 3),
    "picked": lambda f, own: f.exp().sum(1)[own.nonzero()[:, 0]].mean(),
    "masked": lambda f, own: f.exp().sum(1).masked_select(own).sum(),
}
OF_GROUPS: Dict[str, Callable[[Tensor], Tensor]] = {
    **{name: OF_LOSSES[name] for name in ("largest", "length", "product")},
    "spread": lambda losses: losses.var(),
    "gap": lambda losses: (losses[0] - losses[1]).square(),
    "soft-maximum": lambda losses: losses.logsumexp(0),
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("part", OF_A_GROUP)
@pytest.mark.parametrize("name", OF_GROUPS)
def test_functions_of_groups(name: str, part: str, first: int, inside: bool) -> None:
    """So may losses of groups, also of a group of which there is a single sample."""
    model, x = nn.Linear(D, 3, dtype=F64), torch.randn(N, D, dtype=F64)
    groups = [torch.arange(N) < first, torch.arange(N) >= first]

    def objective(f: Tensor) -> Tensor:
        return OF_GROUPS[name](
            torch.stack([OF_A_GROUP[part](f, own) for own in groups])
        )

    out = model(x).detach().requires_grad_()
    (at_output,) = torch.autograd.grad(objective(out), out)
    expected = at_output[:, :, None] * x[:, None]
    whole = Lambda(lambda m, x: objective(m.f(x)), f=model)
    extended = extend(whole if inside else model)
    with backpack(BatchGrad()):
        (extended(x) if inside else objective(extended(x))).backward()
    assert_agrees(model.weight.grad_batch, expected, name)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", OF_LOSSES)
def test_functions_of_losses(name: str, inside: bool) -> None:
    """Losses of the whole batch that are stacked may enter any function."""
    model, x = nn.Linear(D, 3, dtype=F64), torch.randn(N, D, dtype=F64)
    losses = two_losses(model(x)).detach().requires_grad_()
    (factors,) = torch.autograd.grad(OF_LOSSES[name](losses), losses)
    shares = [factors @ two_losses(model(x[n : n + 1]), n) for n in range(N)]
    expected = [torch.autograd.grad(share, model.weight)[0] for share in shares]
    whole = Lambda(lambda m, x: OF_LOSSES[name](two_losses(m.f(x))), f=model)
    extended = extend(whole if inside else model)
    with backpack(BatchGrad()):
        out = extended(x)
        (out if inside else OF_LOSSES[name](two_losses(out))).backward()
    assert_agrees(model.weight.grad_batch, torch.stack(expected), name)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", COUPLING_LOSSES)
def test_losses_in_which_samples_meet(name: str, quantity: str) -> None:
    """Samples that meet between the model and the loss are refused, too."""
    objective, loss, says = COUPLING_LOSSES[name]
    row = Row(lambda: nn.Linear(D, D), randn(D), loss, objective, says=says)
    assert_refused(row, quantity)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", COUPLING_LOSSES)
def test_losses_in_which_samples_meet_inside_the_model(
    name: str, quantity: str
) -> None:
    """The same where the model computes its loss itself."""
    objective, loss, says = COUPLING_LOSSES[name]
    row = Row(
        lambda: Lambda(
            lambda m, x: objective(m.f(x), m.loss), f=nn.Linear(D, D), loss=loss()
        ),
        randn(D),
        value=lambda model, loss, X: model(*X),
        says=says,
    )
    assert_refused(row, quantity)


WITH_PARAMETERS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda f, w: torch.dot(f.flatten(), w.flatten()),
    "sum": lambda f, w: f.sum() + w.sum(),
}


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_parameters_where_samples_are_added_up(name: str, quantity: str) -> None:
    """What parameters enter after all samples is no sum over samples."""
    met = f"samples have met in `{name}` .* for 'w' of Lambda"
    row = Row(
        lambda: Lambda(
            lambda m, x: WITH_PARAMETERS[name](m.f(x), m.w),
            f=nn.Linear(D, D),
            w=param(N, D),
        ),
        randn(D),
        value=lambda model, loss, X: model(*X),
        says="'w' of Lambda.*belongs to no sample" if name == "sum" else met,
    )
    assert_refused(row, quantity)


ONES = torch.ones(2, 2, dtype=F64)
BY_HAND: Dict[str, Tuple[Callable[[Tensor], Tensor], str]] = {
    "hinges": (lambda f: (f[:, None] - f + 100).relu().mean(), r"sub|relu"),
    "neighbours": (lambda f: F.mse_loss(f[1:], f[:-1]), r"mse_?loss"),
    "neighbours-each": (
        lambda f: F.smooth_l1_loss(f[1:] + 100, f[:-1], reduction="none").sum(),
        r"smooth_l1_loss",
    ),
    "neighbours-on-lines": (
        lambda f: F.huber_loss(f[1:] + 100, f[:-1]),
        r"huber_?loss",
    ),
    "neighbours-product": (lambda f: (f[1:] * f[:-1]).flatten().sum(), r"mul"),
    "distances": (lambda f: torch.cdist(f[:2], f[2:], p=1.0).sum(), r"cdist"),
    "all-distances": (lambda f: F.pdist(f).sum(), r"pdist"),
    "all-distances-of-many": (lambda f: F.pdist(f.repeat(12, 1)).sum(), r"pdist"),
    "products-of-those-before": (lambda f: f.cumprod(0).sum(), r"cumprod"),
    # functions that would add up what samples contribute, if that were all
    "similar-neighbours": (
        lambda f: F.cosine_embedding_loss(f[1:], f[:-1], torch.ones(len(f) - 1)),
        r"cosine_embedding_loss|div|mul|mean|sub",
    ),
    "ranked-neighbours": (
        lambda f: F.margin_ranking_loss(f[1:, 0], f[:-1, 0], f.new_ones(len(f) - 1)),
        r"margin_ranking_loss|sub|mean",
    ),
    "another-sample-is-negative": (
        lambda f: F.triplet_margin_loss(f, f.cos(), f.roll(1, 0), reduction="sum"),
        r"triplet_margin_loss|sub|norm|mean",
    ),
    "dot-product": (lambda f: f.flatten().dot(f.flip(0).flatten()), r"dot"),
    "dot-product-of-vectors": (lambda f: torch.vdot(f[:, 0], f[:, 0].flip(0)), r"dot"),
    "samples-as-classes": (
        lambda f: F.cross_entropy(f.T, pointing(f)),
        r"cross_?entropy|log_softmax",
    ),
    "samples-as-scores": (
        lambda f: F.multi_margin_loss(f.T, pointing(f), p=2),
        r"multi_margin_loss",
    ),
    "samples-as-targets": (
        lambda f: F.multilabel_soft_margin_loss(f[:2, :2], f[:2, :2].sigmoid().T),
        r"multilabel_soft_margin_loss|mul|mean",
    ),
    "samples-as-weights": (
        lambda f: F.multilabel_soft_margin_loss(f[:2, :2], ONES, f[:2, :2].exp().T),
        r"multilabel_soft_margin_loss|mul|mean",
    ),
    "samples-as-labels": (
        lambda f: F.multilabel_margin_loss(
            f[:, 0], (1 - torch.arange(len(f))).clamp(min=-1)
        ),
        r"multilabel_margin_loss",
    ),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("quantity", ["BatchGrad", "BatchL2Grad"])
@pytest.mark.parametrize("name", BY_HAND)
def test_losses_by_hand(name: str, quantity: str, inside: bool) -> None:
    """Functions that no module computes, or the model; some consist of lines."""
    function, says = BY_HAND[name]
    if inside:
        row = Row(
            lambda: Lambda(lambda m, x: function(m.f(x)), f=nn.Linear(D, D)),
            randn(D),
            value=lambda model, loss, X: model(*X),
            says=says,
        )
    else:
        row = Row(
            lambda: nn.Linear(D, D),
            randn(D),
            nn.Identity,
            lambda f, _: function(f),
            says=says,
        )
    assert_refused(row, quantity)


# What is chosen is a constant: as it is, each sample has a share of its own
CHOICES: Dict[str, Callable[[Tensor], Tensor]] = {
    "larger": lambda f: torch.maximum(f[1:], f[:-1]).sum(),
    "smaller-of-pairs": lambda f: torch.fmin(f[::2], f[1::2]).square().sum(),
    "largest": lambda f: f.amax(0).sum(),
    "largest-of-stacked": lambda f: torch.stack([f[1:], f[:-1]]).amax(0).exp().sum(),
    "where-larger": lambda f: torch.where(f[1:] > f[:-1], f[1:], f[:-1]).square().sum(),
    "masked-by-neighbours": lambda f: (f[1:] * (f[:-1] > 0)).square().sum(),
    "filled-by-neighbours": lambda f: f[1:].masked_fill(f[:-1] > 0, 0.5).exp().sum(),
    "above-the-mean": lambda f: f[f > f.mean(0).detach()].square().sum(),
    "signs-of-differences": lambda f: ((f - f.roll(1, 0)).sign() * f).sum(),
    "differences-where-larger": lambda f: (
        (f[1:] - f[:-1]).square() * (f[1:] > f[:-1])
    ).sum(),
    "sorted": lambda f: f.sort(0).values[:2].square().sum(),
    "largest-ones": lambda f: f.flatten().topk(3).values.exp().sum(),
    "largest-so-far": lambda f: f.cummax(0).values.square().sum(),
    "row-of-the-largest": lambda f: f[f[:, 0].argmax()].square().sum(),
    "median": lambda f: f.median(0).values.square().sum(),
    "hinges-of-pairs": lambda f: (100 + f[1:] - f[:-1]).relu().sum(),
}


class Chosen(Module):
    """A loss module of a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        """Store the function."""
        super().__init__()
        self.function = function

    def forward(self, f: Tensor) -> Tensor:
        """Call it."""
        return self.function(f)


@pytest.mark.parametrize("by_hand", [True, False], ids=["by-hand", "module"])
@pytest.mark.parametrize("name", CHOICES)
def test_losses_that_choose(name: str, by_hand: bool) -> None:
    """Each sample's share in what was chosen is right, or samples have met."""
    function = CHOICES[name]
    row = Row(
        lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)),
        randn(D),
        partial(Chosen, function),
        (lambda f, _: function(f)) if by_hand else (lambda f, loss: loss(f)),
        quantities=["BatchGrad", "Variance"] + ["DiagGGNExact"] * (not by_hand),
        says="met in",
    )
    if "differences-where" in name or "hinges" in name:  # not separate as it is
        assert_refused(row, "BatchGrad")
    else:
        assert_right_or_refused(row)


@pytest.mark.parametrize("loss", [nn.MSELoss, nn.SmoothL1Loss])
def test_losses_of_neighbours(loss: Callable[[], Module]) -> None:
    """A loss that compares samples with each other, and not with targets."""
    row = Row(
        lambda: nn.Linear(D, D),
        randn(D),
        loss,
        lambda f, compare: compare(f[1:], f[:-1]),
        says=loss.__name__,
    )
    assert_refused(row, "BatchGrad")


def without_batch(layer: Callable[[], Module], *shape: int, width: int = D) -> Row:
    """Make a row in which a layer gets a sample that has no batch axis."""
    return Row(
        lambda: nn.Sequential(First(layer()), nn.Tanh(), nn.Linear(width, 2)),
        randn(*shape, batch=N),
        says=r"samples have met in `\w*(rnn|lstm|gru|attention|bmm|conv|linear)",
    )


def after_a_layer(layer: Callable[[], Module]) -> Callable[[], Module]:
    """Make a layer whose sequence depends on parameters."""
    return lambda: First(nn.Sequential(nn.Linear(D, D), First(layer())))


def of_an_image(layer: Callable[[], Module], *shape: int, width: int) -> Row:
    """Make a row in which a layer that is not watched takes samples for an image."""
    return Row(
        lambda: nn.Sequential(nn.Linear(D, D), layer(), nn.Linear(width, 2)),
        randn(*shape),
        says=r"after `linear`|met in `linear",
    )


# [T, D] is a sequence, [C, H, W] an image, and no batch of samples
UNBATCHED = {
    "moved-by-padding": of_an_image(lambda: nn.ZeroPad2d((0, 0, 1, -1)), D, width=D),
    "padded": of_an_image(lambda: nn.ConstantPad3d(1, 1.0), 2, D, width=D + 2),
    "channels-to-pixels": of_an_image(lambda: nn.PixelShuffle(2), 2, D, width=2 * D),
    "rnn": without_batch(after_a_layer(lambda: nn.RNN(D, D)), D),
    "lstm": without_batch(after_a_layer(lambda: nn.LSTM(D, D)), D),
    "lstm-first": without_batch(lambda: nn.LSTM(D, D, batch_first=True), D),
    "gru": without_batch(after_a_layer(lambda: nn.GRU(D, D, batch_first=True)), D),
    "gru-of-two-layers": without_batch(
        after_a_layer(lambda: nn.GRU(D, 2, 2, bidirectional=True)), D
    ),
    "gru-with-a-state": without_batch(
        lambda: Lambda(
            lambda m, x: m.f(x, m.h.tanh())[0],
            f=nn.GRU(D, D, batch_first=True),
            h=param(1, D),
        ),
        D,
    ),
    "gru-cell": without_batch(lambda: nn.GRUCell(N, D)),
    "attention": without_batch(after_a_layer(lambda: nn.MultiheadAttention(D, 2)), D),
    "attention-batch-first": without_batch(
        after_a_layer(lambda: nn.MultiheadAttention(D, 2, batch_first=True)), D
    ),
    "encoder-layer": without_batch(
        lambda: nn.TransformerEncoderLayer(D, 2, D, 0.0, batch_first=True), D
    ),
    "decoder-layer": without_batch(
        lambda: Lambda(
            lambda m, x: m.f(x, x.cos()), f=nn.TransformerDecoderLayer(D, 2, D, 0.0)
        ),
        D,
    ),
    "convolution": without_batch(lambda: nn.Conv1d(N, N, 3, padding=1), D),
    "convolution-of-an-image": without_batch(lambda: nn.Conv2d(N, 3, 2), 3, 3, width=2),
    "transposed-convolution": without_batch(lambda: nn.ConvTranspose1d(N, 3, 1), D),
    "vector": without_batch(lambda: nn.Linear(N, D)),
    "bilinear": without_batch(
        lambda: Lambda(lambda m, x: m.f(x, x.sin()), f=nn.Bilinear(N, N, D))
    ),
}


# Inputs that have met before there is any parameter
RAW: Dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(0),
    "fft_fft": lambda x: torch.fft.fft(x, dim=0).real,
    "cumsum": lambda x: torch.complex(x, x).cumsum(0).real,
    "sort": lambda x: F.one_hot((9 * x.abs()).long().sort(0)[0] % 3, 3).sum(-1),
}


@pytest.mark.parametrize("name", RAW)
def test_raw_inputs_that_meet(name: str) -> None:
    """The operation is named in which inputs meet, not the parameter's."""
    row = Row(
        lambda: Lambda(lambda m, x: RAW[name](x) * m.p, p=param(D)),
        randn(D),
        value=lambda m, loss, X: m(*X).square().sum(),
    )
    assert_refused(row, "BatchGrad", f"met in `{name}`")


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("row", UNBATCHED)
def test_no_batch_axis(row: str, quantity: str) -> None:
    """A sample without a batch axis is refused."""
    assert_refused(UNBATCHED[row], quantity)


@pytest.mark.parametrize(
    "layer", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]
)
def test_channels_in_the_place_of_samples(layer: Callable[..., Module]) -> None:
    """Channels that nothing mixes are taken for samples, each with its own weight."""
    model = extend(layer(N, affine=True, dtype=F64))
    X = torch.randn(N, *[4] * (model._get_no_batch_dim() - 1), dtype=F64)
    with backpack(BatchGrad()):
        (model(X) * torch.randn_like(X)).sum().backward()
    for p in model.parameters():
        assert_agrees(p.grad_batch, p.grad.diag(), "grad_batch")


def turned(m: Module, X: Tuple[Tensor, ...]) -> Tensor:
    """Call a model that wants time first; what it returns has samples first again."""
    return m(*[x.transpose(0, 1) for x in X]).transpose(0, 1)


# The model's input has samples on axis 1; only the layers know
TIME_FIRST_INPUTS = {
    f"{name}-{t}": Row(
        model, randn(t, D), predict=turned, says=r"GRU|gru|attention|axis|batch|meet"
    )
    for t in LENGTHS
    for name, model in {
        "gru": lambda: nn.Sequential(
            nn.Linear(D, D), First(nn.GRU(D, D)), nn.Linear(D, 2)
        ),
        "attention": lambda: nn.Sequential(
            nn.Linear(D, D), First(nn.MultiheadAttention(D, 2)), nn.Linear(D, 2)
        ),
        "encoder": lambda: nn.Sequential(
            nn.TransformerEncoderLayer(D, 2, D, 0.0), nn.Linear(D, 2)
        ),
        "gru-behind-a-table": lambda: nn.Sequential(
            nn.LayerNorm(D), First(nn.LSTM(D, D))
        ),
    }.items()
}


@pytest.mark.parametrize("row", TIME_FIRST_INPUTS)
def test_time_first_inputs(row: str) -> None:
    """Layers that work along axis 0 are refused, or right for samples on axis 1."""
    assert_right_or_refused(TIME_FIRST_INPUTS[row])


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_layers_that_contradict_each_other(quantity: str) -> None:
    """One layer works along axis 0, the other one along axis 1: samples meet."""
    layers = First(nn.GRU(D, D)), First(nn.GRU(D, D, batch_first=True))
    row = Row(lambda: nn.Sequential(*layers), randn(N, D), says=r"GRU|gru|axis|batch")
    assert_refused(row, quantity)


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("meet", [lambda x: x.flip(0), lambda x: x - x.mean(0)])
def test_input_that_meets_itself_between_layers(meet: Callable, deep: bool) -> None:
    """A model's input that needs a gradient has samples where others go past it."""
    first, last = (extend(nn.Linear(D, D)) for _ in range(2))
    x = torch.randn(N, D, requires_grad=True)
    hidden = first(first(x).tanh()) if deep else first(x)
    loss = last(hidden + meet(x)).square().sum()
    with pytest.raises(NotImplementedError, match="samples have met"):
        with backpack(BatchGrad()):
            loss.backward()


# Of x [N, D] and parameters [K, D], in rows that are no sample's
ROWS_OF_NOBODY: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "behind": lambda x, p: torch.cat([x, p]),
    "in-front": lambda x, p: torch.cat([p, x]).sin(),
    "entries": lambda x, p: torch.hstack([x[:, 0], p[:, 0]]),
    "in-blocks": lambda x, p: torch.cat([x[:2], p, x[2:]]).reshape(-1, 2, D),
    "written": lambda x, p: x.new_zeros(len(x) + len(p), D)
    .index_copy(0, torch.arange(len(x)), x)
    .index_copy(0, torch.arange(len(p)) + len(x), p),
    "written-to": lambda x, p: torch.cat([p, p, p, p])
    .index_add(0, torch.arange(len(x)), x)
    .cos(),
    "written-in-place": lambda x, p: torch.cat([p] * 4).index_put_(
        (torch.arange(len(x)),), x
    ),
    "scattered": lambda x, p: torch.cat([p] * 4).scatter_add(
        1, (x > 0).long(), x.tanh()
    ),
}


@pytest.mark.parametrize("count", [2, N, 2 * N])
@pytest.mark.parametrize("name", ROWS_OF_NOBODY)
def test_rows_of_nobody(name: str, count: int) -> None:
    """Rows that parameters alone enter are no sample's, however many they are."""

    def model() -> Module:
        return Lambda(
            lambda m, x: ROWS_OF_NOBODY[name](m.f(x), m.p).square(),
            f=nn.Linear(D, D),
            p=param(count, D),
        )

    def everything(f: Tensor, loss: Module) -> Tensor:
        return f.sum()

    row = Row(model, randn(D), says="where|no input", objective=everything)
    assert_refused(row, "BatchGrad")


# Of h [N, D], whose rows parameters were written to, and which are no sample's
MEET_IN_PARTS: Dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda h: h * h[:, 1].sum(),
    "columns": lambda h: h.cos() + h[:, :2].mean(),
    "centered": lambda h: torch.stack([h[:, 0], h[:, 1] - h[:, 1].mean()], 1),
    "counted": lambda h: h + h[:, 1].cumsum(0)[:, None],
    "neighbours": lambda h: torch.hstack([h, h[:, 1:2].roll(1, 0) * h[:, 1:2]]),
}


@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExact"])
@pytest.mark.parametrize("name", MEET_IN_PARTS)
def test_rows_of_nobody_that_meet_in_parts(name: str, quantity: str) -> None:
    """Rows of several samples are no single one's, where some entries are one's."""

    def forward(m: Module, x: Tensor) -> Tensor:
        h = x + 0
        h[:] = m.p
        return MEET_IN_PARTS[name](h)

    row = Row(lambda: Lambda(forward, p=param(D)), randn(D), says="__setitem__")
    assert_refused(row, quantity)


ROWS_OF_CONSTANTS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: ROWS_OF_NOBODY[name] for name in ("behind", "in-front")},
    "padded": lambda x, c: F.pad(x, (0, 0, 0, len(c))),
    "written": lambda x, c: torch.cat([c, torch.ones_like(x)]).index_copy(
        0, torch.arange(len(x)), x
    ),
}


@pytest.mark.parametrize("count", [2, N, 2 * N])
@pytest.mark.parametrize("name", ROWS_OF_CONSTANTS)
def test_rows_of_constants(name: str, count: int) -> None:
    """Rows of constants are no sample's, however many they are."""
    constant = torch.ones(count, D, dtype=F64)
    row = Row(
        lambda: Lambda(
            lambda m, x: m.f(ROWS_OF_CONSTANTS[name](x, constant)), f=nn.Linear(D, D)
        ),
        randn(D),
        says="where",
        objective=lambda f, loss: f.square().sum(),
    )
    assert_refused(row, "BatchGrad")


@pytest.mark.parametrize("count", [2, N, 2 * N])
def test_rows_of_nobody_behind_the_model(count: int) -> None:
    """Nor are they where a model returns them, and the loss puts them behind others."""

    def model() -> Module:
        return Lambda(
            lambda m, x: (m.f(x), m.p.sin()), f=nn.Linear(D, D), p=param(count, D)
        )

    def value(model: Module, loss: Module, X: Tuple[Tensor, ...]) -> Tensor:
        return torch.cat(model(*X)).square().sum()

    row = Row(model, randn(D), says="where|no sample", value=value)
    assert_refused(row, "BatchGrad", kinds=(*REFUSALS, UserWarning))


@pytest.mark.parametrize("count", [1, 2])
def test_predictions_of_nobody(count: int) -> None:
    """A model that returns what no input enters is refused, in one tensor or more."""
    row = Row(
        lambda: Lambda(lambda m, x: tuple(m.p.sin().split(3 - count)), p=param(2, D)),
        randn(D),
        says="no input enters",
        value=lambda model, loss, X: torch.cat(model(*X)).square().sum(),
    )
    assert_refused(row, "BatchGrad")
    assert_refused(row, "DiagGGNExact")


# Of tokens [N, T, D] and positions [T, D], by layers that are extended one by one
BESIDE: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "behind": lambda x, p: torch.cat([x, p.expand_as(x)], 1),
    "in-front": lambda x, p: torch.cat([p.tanh().expand_as(x), x.tanh()], 1),
    "stacked": lambda x, p: torch.stack([x, p.expand_as(x)], 1).flatten(1, 2),
    "as-features": lambda x, p: torch.cat([x, p.expand_as(x)], 2).unflatten(2, (2, D)),
    "written": lambda x, p: x.new_zeros(len(x), 9, D)
    .index_copy(1, torch.arange(N), x)
    .index_copy(1, torch.arange(N) + N, p.expand_as(x)),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("same_axis", [True, False])
def test_layers_with_samples_on_different_axes(name: str, same_axis: bool) -> None:
    """With as many positions as samples, a layer can't tell what its rows are."""
    layers = nn.Embedding(7, D), nn.Embedding(N, D), nn.Linear(D, 2)
    tokens, positions, last = (extend(layer.double()) for layer in layers)
    lossfunc = extend(nn.CrossEntropyLoss())
    x = tokens(torch.arange(N * N).view(N, N) % 7)
    p = positions(torch.arange(N))
    logits = last(BESIDE[name](x, p[:, None] if same_axis else p))[:, 0]
    rows = logits.flatten(0, -2)
    loss = lossfunc(rows, torch.zeros(len(rows), dtype=torch.long))
    if not same_axis:
        with pytest.raises(NotImplementedError, match="on different axes"):
            with backpack(BatchGrad()):
                loss.backward()
        return
    with backpack(BatchGrad()):
        loss.backward(retain_graph=True)
    weights = {"x": tokens.weight, "p": positions.weight, "last": last.weight}
    losses = -logits.log_softmax(-1)[..., 0].view(N, -1).sum(1) / len(rows)
    each = [
        torch.autograd.grad(one, list(weights.values()), retain_graph=True)
        for one in losses
    ]
    assert_equal(
        {name: weight.grad_batch for name, weight in weights.items()},
        dict(zip(weights, map(torch.stack, zip(*each)))),
        "grad_batch",
    )


@pytest.mark.parametrize("first_time", [True, False])
def test_operations_that_depend_on_values(first_time: bool) -> None:
    """What an operation did to samples once is no promise for the next time."""

    def forward(m: Module, x: Tensor) -> Tensor:
        h = m.f(x).tanh()
        mask = torch.ones_like(h, dtype=torch.bool) if m.all else h > 0
        return m.g(torch.where(mask, h, h.transpose(0, 1)))

    def model(everywhere: bool) -> Row:
        return Row(
            lambda: Lambda(
                forward, f=nn.Linear(D, D), g=nn.Linear(D, 2), all=everywhere
            ),
            randn(N, D),
            alone=False,
            says=r"where|linear",
        )

    def run(everywhere: bool) -> None:
        if everywhere:
            assert_right_or_refused(model(True))
        else:
            assert_refused(model(False), "BatchGrad")
            assert_refused(model(False), "DiagGGNExact")

    run(first_time)
    run(not first_time)


# Of x [N, D] and a mask: where this is zero, so is the derivative
UNSEEN: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, mask: (x * mask).sum(),
    "rectifier": lambda x, mask: (x.square() * mask - 1 + mask).relu().mean(),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_unseen_operations_that_depend_on_values(name: str) -> None:
    """Which derivatives were zero once is no promise, either."""

    def forward(m: Module, x: Tensor) -> Tensor:
        h = m.f(x).tanh()
        with torch._C.DisableTorchFunction():
            total = UNSEEN[name](h, m.mask)
        return m.g(total * m.p + torch.ones(N, D))

    def model(mask: Tensor) -> Row:
        parts = {"f": nn.Linear(D, D), "g": nn.Linear(D, 2), "p": param(D)}
        return Row(lambda: Lambda(forward, mask=mask, **parts), randn(D))

    with suppress(*REFUSALS):
        compute(model((torch.arange(N) == 0).to(F64)[:, None]), ["BatchGrad"])
    assert_refused(model(torch.ones(N, 1, dtype=F64)), "BatchGrad", r"sum|mean")


# What is a sample's own number, of an operation that takes its gradient's tensor, too
ONLY_NUMBERS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to": lambda x, h: x.to(h),
    "to-itself": lambda x, h: (x.to(h), x)[1],
    "to-copied": lambda x, h: x.to(h, copy=True),
    "type": lambda x, h: x.float().type_as(h),
    "truth": lambda x, h: (x > 0).to(h),
    "classes": lambda x, h: F.one_hot(h.argmax(1), D).to(h),
    "copied": lambda x, h: h.clone().copy_(x),
    "index-copy": lambda x, h: h.index_copy(1, torch.arange(D), x),
    "scattered": lambda x, h: h.scatter(1, torch.arange(D).expand(x.shape), x),
    "by-a-mask": lambda x, h: h.masked_scatter(torch.ones_like(h).bool(), x),
    "joined": lambda x, h: torch.cat([x, h])[: len(x)],
    "halves": lambda x, h: torch.cat([x[:, :2], h[:, :2]], 1),
    "broadcast": lambda x, h: torch.broadcast_tensors(x, h)[0],
    "slice": lambda x, h: torch.slice_scatter(h, x),
}
TOGETHER: Dict[str, Callable[[Tensor], Tensor]] = {
    "apart": lambda h: h,
    "centred": lambda h: h - h.mean(0),
    "turned": lambda h: h.flip(0),
}


@pytest.mark.parametrize("meet", TOGETHER)
@pytest.mark.parametrize("name", ONLY_NUMBERS)
def test_numbers_beside_a_gradient(name: str, meet: str) -> None:
    """They have samples as well: what is made of them is apart, or meets."""
    beside, together = ONLY_NUMBERS[name], TOGETHER[meet]

    def forward(m: Module, x: Tensor) -> Tensor:
        h = m.f(x)
        return h + together(m.g(beside(x, h)))

    row = Row(lambda: Lambda(forward, f=nn.Linear(D, D), g=nn.Linear(D, D)), randn(D))
    if meet == "apart":
        assert_right(row)
    else:
        assert_refused(row, "BatchGrad", "samples have met in")


class Gate(torch.autograd.Function):
    """A step, with any rule for gradients that gets its input."""

    @staticmethod
    def forward(ctx: Any, rule: Callable, x: Tensor) -> Tensor:
        """Compare with zero, where nothing says where samples are."""
        ctx.rule = rule
        ctx.save_for_backward(x)
        return torch.from_numpy(x.cpu().numpy() >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Apply the rule."""
        return None, ctx.rule(*ctx.saved_tensors, g)


def is_far(x: Tensor) -> Tensor:
    """Tell where nothing gets through, as a rule."""
    return x.abs() > 1


def overwritten(x: Tensor, g: Tensor) -> Tensor:
    """Set gradients to zero, in place."""
    g = g.clone()
    g[is_far(x)] = 0
    return g


def unseen_mean(g: Tensor) -> Tensor:
    """Let samples meet where autograd does not see it."""
    numbers = g.detach().cpu().numpy()
    return torch.from_numpy(numbers - numbers.mean(0)).to(g.device)


WINDOWS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked": lambda x, g: g.masked_fill(is_far(x), 0.0),
    "where": lambda x, g: torch.where(is_far(x), 0.0, g),
    "in-place": lambda x, g: g.clone().masked_fill_(is_far(x), 0.0),
    "overwritten": overwritten,
    "factor": lambda x, g: g * (1 - x.abs()).clamp(min=0),
}
# If no sample is within the window, some of these return no zeros
CLOSED: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean-in-the-window": lambda x, g: (g - g.mean(0)).masked_fill(is_far(x), 0.0),
    "mean-outside": lambda x, g: torch.where(is_far(x), g - g.mean(0), g),
    "mean-outside-detached": lambda x, g: torch.where(
        is_far(x), (g - g.mean(0)).detach(), g
    ),
    "mean-outside-unseen": lambda x, g: torch.where(is_far(x), unseen_mean(g), g),
    "mean-of-numbers-unseen": lambda x, g: (
        unseen_mean(g)
        if g.detach().any() and not g.isnan().any()
        else g.masked_fill(is_far(x), 0.0)
    ),
    "sign-outside": lambda x, g: torch.where(is_far(x), g.sign(), g),
    "rolled": lambda x, g: g.roll(1, 0).masked_fill(is_far(x), 0.0),
    "constant": lambda x, g: torch.zeros_like(g),
}


def gated(rule: Callable, inside: str) -> Row:
    """Make a row with a step of which so many entries are within the window."""

    def make() -> Module:
        model = Lambda(
            lambda m, x: m.g(Gate.apply(rule, m.f(x))),
            **{"f": nn.Linear(D, D), "g": nn.Linear(D, 2)},
        )
        with torch.no_grad():
            model.f.weight.zero_()
            model.f.weight[: 1 if inside == "one-entry" else D, 0] = 1
            model.f.bias.fill_(5.5)
        return model

    def inputs() -> Tuple[Tensor, ...]:
        x = torch.rand(N, D, dtype=F64)
        if inside != "none":
            x[1] = -5
        return (x,)

    return Row(
        make, inputs, says=r"`Gate` \(a function|in `Gate`|backward pass of `Gate`"
    )


@pytest.mark.parametrize("inside", ["none", "one-entry", "one-sample"])
@pytest.mark.parametrize("name", WINDOWS)
def test_functions_whose_derivatives_are_zero(name: str, inside: str) -> None:
    """What is behind them has zeros, if they are the function's own."""
    row = gated(WINDOWS[name], inside)
    assert_right(row._replace(quantities=["BatchGrad", "BatchL2Grad", "DiagGGNExact"]))


@pytest.mark.parametrize("name", CLOSED)
def test_functions_that_seem_to_have_no_derivative(name: str) -> None:
    """What gets through unseen, or from nowhere, may belong to any sample."""
    assert_refused(gated(CLOSED[name], "none"), "BatchGrad")


class Fused(torch.autograd.Function):
    """A loss that computes its gradient in the forward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Callable, records: bool, x: Tensor) -> Tensor:
        """Compute both; the value may be what autograd has recorded."""
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            value = loss(y)
            ctx.save_for_backward(*torch.autograd.grad(value, y))
        return value.detach() if records else loss(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Scale the gradient."""
        return None, None, g * ctx.saved_tensors[0]


class Mean(Fused):
    """The same, called like an operation that adds up."""


FUSED: Dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda f: F.cross_entropy(f, classes(f)),
    "half-of-squares": lambda f: 0.5 * f.square().sum() / 3,
    "norms": lambda f: f.norm(dim=1).mean(),
}
FUSED_TOGETHER: Dict[str, Callable[[Tensor], Tensor]] = {
    "contrastive": lambda f: contrastive(f, F.cross_entropy),
    "classes-of-samples": lambda f: F.cross_entropy(f.T, classes(f.T)),
    "distances": lambda f: torch.pdist(f).square().sum(),
    "square-of-the-mean": lambda f: f.mean(0).square().sum(),
    "norm": lambda f: f.norm(),
    "variance": lambda f: (f - f.mean(0)).square().sum(),
    "neighbours": lambda f: (f * f.flip(0)).sum(),
}


def fused(function: Type[Fused], loss: Callable, records: bool) -> Row:
    """Make a row with a model that returns such a loss."""
    return Row(
        lambda: Lambda(
            lambda m, x: function.apply(loss, records, m.f(x)), f=nn.Linear(D, D)
        ),
        randn(D),
        objective=lambda f, _: loss(f),
        quantities=FIRST_ORDER,
        predict=lambda m, X: m.f(*X),
        value=lambda m, _, X: m(*X),
        says=f"after `{function.__name__}`",
    )


@pytest.mark.parametrize("function", [Fused, Mean])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("name", [*FUSED, *FUSED_TOGETHER])
def test_losses_that_differentiate_themselves(
    name: str, records: bool, function: Type[Fused]
) -> None:
    """They are sums over samples if that was seen inside."""
    if name in FUSED:
        assert_right(fused(function, FUSED[name], records))
    else:
        row = fused(function, FUSED_TOGETHER[name], records)
        assert_refused(row, "BatchGrad")


def pooled(f: Tensor) -> Tensor:
    """Attend to positions, none of which may be left for a sample."""
    f = f.unflatten(1, (2, 2))
    left = f.detach()[..., 1] > 0
    weights = f[..., 0].masked_fill(~left, -torch.inf).softmax(1).nan_to_num(0.0)
    return (weights[..., None] * f).sum(1)


def in_one_row(f: Tensor) -> Tensor:
    """Let samples meet in the third row only, which is left out if it is no number."""
    rows = f + F.pad(f[:1], (0, 0, 2, N - 3))
    return rows.norm(dim=1).nan_to_num(0.0)


class Cosine(torch.autograd.Function):
    """A sine, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute it."""
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Differentiate that."""
        return g * ctx.saved_tensors[0].cos()


# Behind an extended layer
NUMBERS: Dict[str, Callable[[Tensor], Tensor]] = {
    "log-softmax": lambda f: f.log_softmax(1),
    "softmax-of-squares": lambda f: (f * f).softmax(-1),
    "pooling": pooled,
    "norm": lambda f: torch.linalg.vector_norm(f, 3, dim=1),
    "normalized": lambda f: F.layer_norm(f, f.shape[1:]),
    "product": lambda f: f[:, :, None] @ f[:, None],
    "cumulated": lambda f: f.cumprod(1),
    "cumulated-exponentials": lambda f: f - f.logcumsumexp(-1),
    "largest": lambda f: f.amax(1),
    "distances": lambda f: torch.cdist(f[:, None], torch.ones(1, 2, D, dtype=F64)),
    "inverse": lambda f: torch.linalg.inv(f.unflatten(1, (2, 2)) + 3 * torch.eye(2)),
    "attention": lambda f: F.scaled_dot_product_attention(
        *[f.reshape(-1, 2, 1, 2)] * 3
    ),
}
COUPLED_NUMBERS: Dict[str, Tuple[Callable[[Tensor], Tensor], str]] = {
    "softmax": (lambda f: f.softmax(0), "met in `softmax`"),
    "norm": (lambda f: f / f.norm(dim=0), "met in `linalg_vector_norm`"),
    "renormalized": (lambda f: f.renorm(2, 1, 0.1), "met in `renorm`"),
    "cumulated": (lambda f: f.logcumsumexp(0), "met in `logcumsumexp`"),
    "in-one-row": (in_one_row, "met in `add`"),
    "function": (Cosine.apply, r"`Cosine` \(its derivatives are not finite\)"),
}
BAD = {
    "nan": lambda x: x.index_fill(0, torch.tensor(2), torch.nan),
    "infinite": lambda x: x.index_fill(0, torch.tensor(2), torch.inf),
    "zero": lambda x: x.index_fill(0, torch.tensor(2), 0.0),
    "all": lambda x: torch.full_like(x, torch.nan),
}


def gradients_behind(tail: Callable, x: Tensor, separate: bool) -> Tensor:
    """Compute individual gradients, with the library or without."""
    torch.manual_seed(1)
    layer = nn.Linear(D, D, bias=False).to(F64)
    if separate:
        values = [tail(layer(row[None])).square().sum() for row in x]
        return torch.stack([torch.autograd.grad(v, layer.weight)[0] for v in values])
    value = tail(extend(layer)(x)).square().sum()
    with backpack(BatchGrad()):
        value.backward()
    return layer.weight.grad_batch


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_not_finite(
    name: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in their sample, and nothing is concluded from them for others."""
    monkeypatch.setattr("backpack.engine.samples.gaps._REMEMBERED", {})
    torch.manual_seed(0)
    x = torch.randn(N, D, dtype=F64)
    for data in (BAD[bad](x), x):
        expected = gradients_behind(NUMBERS[name], data, separate=True)
        found = gradients_behind(NUMBERS[name], data, separate=False)
        finite = expected.isfinite()
        assert torch.equal(finite, found.isfinite())
        assert_equal({"": found[finite]}, {"": expected[finite]}, "grad_batch")


@pytest.mark.parametrize("bad", ["nan", "all"])
@pytest.mark.parametrize("name", COUPLED_NUMBERS)
def test_numbers_that_are_not_finite_where_samples_meet(
    name: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no number hides nothing."""
    monkeypatch.setattr("backpack.engine.samples.gaps._REMEMBERED", {})
    x = torch.randn(N, D, dtype=F64)
    tail, says = COUPLED_NUMBERS[name]
    with pytest.raises(NotImplementedError, match=says):
        gradients_behind(tail, BAD[bad](x), separate=False)
    if name == "function":
        gradients_behind(tail, x, separate=False)
