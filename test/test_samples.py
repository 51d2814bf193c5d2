"""Samples are followed through every operation: kept apart, they are right, or refused.

Rows move samples about between two uses of parameters: views, windows, flattening,
routing, sorting, time-first layers; with as many positions as samples and with another
number of them."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import product
from math import inf, prod
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import F64, Tensors
from oracle import assert_agrees, individual_gradients, jacobian
from per_sample import (
    FIRST_ORDER,
    LENGTHS,
    Lambda,
    N,
    Row,
    assert_fields,
    assert_refused,
    assert_right,
    assert_right_or_refused,
    compute,
    param,
    randn,
    real,
    reference,
    tokens,
)
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet, Gamma
from torch.func import functional_call
from torch.nn import Module
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.engine.nodes.uses import Use
from backpack.engine.samples.trials import Trial
from backpack.extensions import (
    EKFAC,
    BatchDiagGGNExact,
    BatchGrad,
    BatchJacobian,
    DiagGGNExact,
    SqrtGGNMC,
)
from backpack.utils.types import tensors_in

D = 4
COLUMNS = [DiagGGNExact, BatchDiagGGNExact, EKFAC, SqrtGGNMC]


def moving(function: Callable, *shape: int, **parts: Callable[[], Module]) -> Row:
    """Make a row that moves samples about between two layers.

    Args:
        function: Function of the model and of data ``[N, *shape]``; the model has a
            linear layer ``f`` for the last axis, a normalization ``g`` with parameters,
            and a parameter ``p`` of that size.
        shape: Shape of a sample.
        parts: Makers of further layers.

    Returns:
        The row.
    """
    return Row(
        lambda: Lambda(
            lambda m, x: function(m, m.first(x).tanh()).sin(),
            first=nn.Linear(shape[-1], shape[-1]),
            **{
                "f": nn.Linear(D, D),
                "g": nn.LayerNorm(D),
                "p": param(D),
                **{name: make() for name, make in parts.items()},
            },
        ),
        randn(*shape),
    )


def plain(m: Module, x: Tensor) -> Tensor:
    """Use all parameters that a model has by default, on the last axis."""
    return m.g(m.f(x).tanh()) + m.p * x


def sparse(x: Tensor) -> Tensor:
    """Make a sparse matrix that mixes the positions of ``[N, T, D]``."""
    return torch.eye(x.shape[1]).roll(1, 0).to(x).to_sparse()


def along_time(matrix: Tensor, x: Tensor) -> Tensor:
    """Multiply each sample's positions by a matrix."""
    rows = torch.sparse.mm(matrix, x.transpose(0, 1).flatten(1))
    return rows.unflatten(1, (len(x), D)).transpose(0, 1)


def there_and_back(there: Callable, back: Callable) -> Callable:
    """Make a function that uses parameters on samples that were moved."""
    return lambda m, x: back(plain(m, there(x)), x)


def windows(x: Tensor) -> Tensor:
    """Split ``[N, T, D]`` into windows ``[N * W, t, D]`` of two positions."""
    x = F.pad(x, (0, 0, 0, x.shape[1] % 2))
    return x.view(len(x), -1, 2, x.shape[-1]).flatten(0, 1)


def swapped(x: Tensor) -> Tensor:
    """Swap the first and the last row, by way of views."""
    x = x * 1
    first, last = x[0], x[-1]
    kept = first.clone()
    first.copy_(last)
    last.copy_(kept)
    return x


class Both(NamedTuple):
    """Two tensors."""

    first: Tensor
    second: Tensor


def by_experts(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Add what a function makes of some rows, then of others: of none to begin with."""
    out = torch.zeros_like(x)
    for chosen in (x[:, 0] > 9, x[:, 0] > 0.1, x[:, 0] <= 0.1):
        rows = chosen.nonzero()[:, 0]
        out = out.index_add(0, rows, f(x[rows]))
    return out


def by_python(x: Tensor) -> Tensor:
    """Copy a tensor by way of lists."""
    return torch.tensor(x.tolist(), dtype=x.dtype, device=x.device)


class UnseenSine(torch.autograd.Function):
    """A function of which nothing is seen, and whose derivative has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute a sine."""
        ctx.save_for_backward(x)
        return by_python(x).sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Multiply with the cosine."""
        (x,) = ctx.saved_tensors
        return gradient.detach() * by_python(x).cos()


# A matrix multiplied with rows, which only some of its entries let through
PRODUCTS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of A [M, M], x [M, D]
    "addmm": lambda A, x: torch.addmm(x.new_zeros(()), A, x),
    "addbmm": lambda A, x: torch.addbmm(x.new_zeros(()), A[None], x[None]),
    "baddbmm": lambda A, x: torch.baddbmm(x.new_zeros(()), A[None], x[None])[0],
    "addmv": lambda A, x: torch.stack(
        [torch.addmv(z.new_zeros(()), A, z) for z in x.unbind(1)], 1
    ),
    "sparse": lambda A, x: torch.sparse.addmm(torch.zeros_like(x), A.to_sparse(), x),
    "of-three": lambda A, x: torch.linalg.multi_dot([A, x, torch.eye(D, dtype=F64)]),
    "linalg": torch.linalg.matmul,
    "vecdot": lambda A, x: torch.linalg.vecdot(A[:, None], x.T),
    "bilinear": lambda A, x: F.bilinear(
        *(torch.ones(D, 1, dtype=F64), x.T.contiguous(), A[:, None])
    ).T,
    "convolution": lambda A, x: F.conv1d(x[None], A[..., None])[0],
}


def broadcast_numbers(m: Module, x: Tensor) -> Tensor:
    """Broadcast whole numbers with what has a gradient, and count where they are."""
    ids, rows = torch.broadcast_tensors((x[..., :1] > 0).long(), plain(m, x))
    return rows + m.p[ids[..., 0].reshape(-1).view_as(x[..., 0])][..., None]


MOVES: Dict[str, Callable] = {  # of x [N, T, D]
    "broadcast-numbers": broadcast_numbers,
    "expanded-as-another": lambda m, x: plain(m, x)
    + m.p[(x[..., :1] > 0).long().expand_as(x)],
    "transpose": there_and_back(
        lambda x: x.transpose(0, 1), lambda z, x: z.mT.mT.transpose(0, 1)
    ),
    "permute": there_and_back(
        lambda x: x.permute(1, 0, 2), lambda z, x: z.permute(1, 0, 2)
    ),
    "flatten-as-type": there_and_back(
        lambda x: x.flatten(0, 1).type_as(x), lambda z, x: z.view_as(x).to(x.flatten())
    ),
    "flatten-as-a-constant": there_and_back(
        lambda x: x.view_as(torch.empty(x.shape[0] * x.shape[1], x.shape[2])),
        lambda z, x: z.view_as(x),
    ),
    "movedim": there_and_back(lambda x: x.movedim(0, 1), lambda z, x: z.movedim(1, 0)),
    "swapaxes-contiguous": there_and_back(
        lambda x: x.swapaxes(0, 1).contiguous(), lambda z, x: z.swapaxes(0, 1)
    ),
    "einsum-transposes": there_and_back(
        lambda x: torch.einsum("ntd->tnd", x), lambda z, x: torch.einsum("tnd->ntd", z)
    ),
    "write-to-a-part-of-the-transposed": lambda m, x: (
        lambda z: (z[:1].mul_(2.0), plain(m, z).transpose(0, 1))[1]
    )(plain(m, x).transpose(0, 1).sin()),
    "part-of-the-transposed-that-is-written": lambda m, x: (
        lambda z: (lambda whole, part: (whole.copy_(z), plain(m, part))[1])(
            *(lambda whole: (whole, whole[1:]))(torch.zeros_like(z))
        ).transpose(0, 1)
    )(plain(m, x).transpose(0, 1).sin()),
    "part-of-the-rolled-that-is-put-back": lambda m, x: (
        lambda h, part: (h.copy_(x), plain(m, part + x))[1]
    )(*(lambda h: (h, h[:, :1]))(x.roll(1, 0))),
    "named-tuple": lambda m, x: torch.cat(Both(plain(m, x), m.p.expand_as(x)), -1)
    + torch.cat(Both(x, x.sin()), -1),
    "swapped-by-views": lambda m, x: plain(m, swapped(x.transpose(0, 1))).transpose(
        0, 1
    ),
    "swapped-and-back": lambda m, x: swapped(plain(m, swapped(x))) + x,
    "written-by-an-option": lambda m, x: (
        lambda h: (F.elu(h[:, 1:], inplace=True), plain(m, h))[1]
    )(x * 1),
    "no-row-for-the-first-expert": lambda m, x: by_experts(
        partial(plain, m), x.flatten(0, 1)
    ).view_as(x),
    "flatten": there_and_back(lambda x: x.flatten(0, 1), lambda z, x: z.view_as(x)),
    "reshape": there_and_back(
        lambda x: x.reshape(-1, D), lambda z, x: z.reshape(len(x), -1, D)
    ),
    "flatten-time-first": there_and_back(
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda z, x: z.unflatten(0, (x.shape[1], len(x))).transpose(0, 1),
    ),
    "flatten-and-stay": lambda m, x: plain(m, x.flatten(0, 1)).view(len(x), -1),
    "windows": lambda m, x: plain(m, windows(x)).view(len(x), -1),
    "attention-in-windows": lambda m, x: (
        lambda z: (z @ plain(m, z).mT).softmax(-1) @ z
    )(windows(x)).view(len(x), -1),
    "shifted-windows": lambda m, x: plain(m, windows(x.roll(-1, 1))).view(len(x), -1),
    "unfold": lambda m, x: plain(m, x.unfold(1, 2, 1).mT),
    "chunk-features": lambda m, x: plain(m, torch.cat(x.chunk(2, -1)[::-1], -1)),
    "chunk-samples": lambda m, x: torch.cat([plain(m, z) for z in x.chunk(2)]),
    "split-samples": lambda m, x: torch.cat([plain(m, z) for z in x.split(1)]),
    "unbind-time": lambda m, x: torch.stack([plain(m, z) for z in x.unbind(1)], 1),
    "unbind-samples": lambda m, x: torch.stack([plain(m, z) for z in x]),
    "samples-by-index": lambda m, x: torch.stack(
        [plain(m, x[n]) for n in range(len(x))]
    ),
    "steps-by-index": lambda m, x: sum(plain(m, x[:, t]) for t in range(x.shape[1])),
    "stack-in-front": lambda m, x: plain(m, torch.stack([x, x.cos()])).prod(0),
    "stack-behind": lambda m, x: plain(m, torch.stack([x, x.cos()], 1)).flatten(1),
    "cat-of-two-batches": lambda m, x: torch.cat(  # as SimCLR has it
        plain(m, torch.cat([x, x.cos()])).chunk(2), -1
    ),
    "cat-of-one-half": lambda m, x: plain(m, torch.cat([x, x[: len(x) // 2]]))[
        : len(x)
    ],
    "repeat": lambda m, x: plain(m, x.repeat(2, 1, 1)).unflatten(0, (2, -1)).sum(0),
    "repeat-interleave": lambda m, x: plain(m, x.repeat_interleave(2, 0))
    .unflatten(0, (-1, 2))
    .prod(1),
    "expand-beams": lambda m, x: plain(
        m, x[:, None].expand(-1, 3, -1, -1).reshape(-1, *x.shape[1:])
    ).view(len(x), -1),
    "tile": lambda m, x: plain(m, x.tile(2, 1, 1))[: len(x)],
    "reverse-and-back": there_and_back(lambda x: x.flip(0), lambda z, x: z.flip(0)),
    "roll-and-back": there_and_back(lambda x: x.roll(1, 0), lambda z, x: z.roll(-1, 0)),
    "permutation-and-back": lambda m, x: plain(m, x[permutation(x)])[
        permutation(x).argsort()
    ],
    "index-select-and-back": lambda m, x: plain(
        m, x.index_select(0, permutation(x))
    ).index_select(0, permutation(x).argsort()),
    "sorted-by-length": lambda m, x: sorted_by(m, x, x[:, 0, 0]),
    "sorted-by-index": lambda m, x: (
        lambda order: torch.zeros_like(x).index_copy(0, order, plain(m, x[order]))
    )(x[:, 0, 0].argsort()),
    "flip-time": lambda m, x: plain(m, x.flip(1)),
    "roll-time": lambda m, x: plain(m, x.roll(1, 1)),
    "cumulative-time": lambda m, x: plain(m, x).cumsum(1),
    "softmax-over-time": lambda m, x: plain(m, x.softmax(1)),
    "sort-over-time": lambda m, x: plain(m, x.sort(1).values),
    "top-over-time": lambda m, x: plain(m, x.topk(2, 1).values),
    "max-over-time": lambda m, x: plain(m, x.max(1).values),
    "gather-time": lambda m, x: plain(m, x.gather(1, x.argsort(1))),
    "take-along-time": lambda m, x: plain(
        m, x.take_along_dim(x.argsort(1, descending=True), 1)
    ),
    "last-of-each": lambda m, x: plain(m, x[torch.arange(len(x)), x[..., 0].argmax(1)]),
    "shift-and-pad": lambda m, x: plain(m, F.pad(x, (0, 0, 1, 0))[:, :-1]),
    "triangular": lambda m, x: plain(m, torch.tril(x @ x.mT) @ x),
    "matmul-of-two": lambda m, x: plain(m, x) @ plain(m, x.cos()).mT,
    "sparse-constant": lambda m, x: plain(m, along_time(sparse(x), x)),
    "bmm-of-two": lambda m, x: torch.bmm(plain(m, x), x.mT),
    "einsum-of-two": lambda m, x: torch.einsum("nsd,ntd->nst", plain(m, x), x),
    "outer-of-two": lambda m, x: plain(m, x)[:, :, None] * x[:, None],
    "attention": lambda m, x: F.scaled_dot_product_attention(plain(m, x), x, x),
    "causal-attention": lambda m, x: F.scaled_dot_product_attention(
        plain(m, x), x, x, is_causal=True
    ),
    "packed-by-a-mask": lambda m, x: plain(m, packed(x, others(x).logical_not())),
    "packed-by-an-infinite-mask": lambda m, x: packed(
        plain(m, x), x.new_zeros(()).masked_fill(others(x), -inf)
    ),
    "packed-by-the-least-number": lambda m, x: packed(
        plain(m, x), x.new_zeros(()).masked_fill(others(x), torch.finfo(F64).min)
    ),
    "block-diagonal-graph": lambda m, x: plain(
        m,
        torch.block_diag(*[torch.ones(2 * [x.shape[1]], dtype=F64).tril()] * len(x))
        @ x.flatten(0, 1),
    ).view_as(x),
    **{
        f"graph-{name}": lambda m, x, product=product: plain(
            m,
            product(
                torch.block_diag(*[torch.ones(2 * [x.shape[1]], dtype=F64)] * len(x)),
                x.flatten(0, 1),
            ).view_as(x),
        )
        for name, product in PRODUCTS.items()
    },
    "matrix-of-a-permutation": lambda m, x: torch.einsum(
        "mn,ntd->mtd",
        torch.eye(len(x), dtype=F64)[permutation(x).argsort()],
        plain(
            m, (torch.eye(len(x), dtype=F64)[permutation(x)] @ x.flatten(1)).view_as(x)
        ),
    ),
    "in-place-on-a-slice": lambda m, x: in_place(x, plain(m, x)),
    "written-to-a-buffer": lambda m, x: buffered(x, plain(m, x)),
    "written-step-by-step": lambda m, x: step_by_step(x, plain(m, x)),
    "as-strided": lambda m, x: plain(
        m, x.contiguous().as_strided((len(x), 2, D), (x.shape[1] * D, D, 1))
    ),
    "diagonal": lambda m, x: plain(
        m, (x @ x.mT).diagonal(dim1=1, dim2=2)[..., None] * x
    ),
    "where": lambda m, x: torch.where(x > 0, plain(m, x), x),
    "where-by-sample": lambda m, x: torch.where(x[:, :1, :1] > 0, plain(m, x), x.cos()),
    "masked-fill": lambda m, x: plain(m, x).masked_fill(x < 0, 0.0),
    "checkpointed": lambda m, x: checkpoint(
        lambda z: plain(m, z.flatten(0, 1)).view_as(z), x, use_reentrant=False
    ),
    "random-mixture-of-time": lambda m, x: plain(
        m, x[:, torch.arange(x.shape[1]).flip(0)]
    ),
    "broadcast-pairs": lambda m, x: (plain(m, x)[:, None] - x[:, :, None])
    .pow(2)
    .sum(-1),
    "cdist": lambda m, x: torch.cdist(plain(m, x), x.cos()),
    "fft": lambda m, x: torch.fft.rfft(plain(m, x), dim=1).abs(),
    "convolution-over-time": lambda m, x: F.conv1d(
        x.mT, m.p.expand(D, 1, D)[..., :2], groups=D
    ).mT
    + plain(m, x)[:, 1:],
    "interpolate": lambda m, x: F.interpolate(plain(m, x).mT, scale_factor=2.0).mT,
    "pool-over-time": lambda m, x: F.avg_pool1d(plain(m, x).mT, 2).mT,
    "dropped-batch-axis": lambda m, x: torch.stack(
        [plain(m, z.squeeze(0)) for z in x.split(1)]
    ),
    "tolist": lambda m, x: torch.stack(
        [plain(m, z) * (1 + round(abs(z[0, 0].item()))) for z in x]
    ),
    "token-for-each-sample": lambda m, x: torch.stack(
        [plain(m, torch.cat([m.p[None], z])) for z in x]
    ),
    "constant-beside-each-sample": lambda m, x: torch.stack(
        [torch.hstack([z, m.p.expand_as(z)]) + m.g(m.f(z[:1])).sum() for z in x]
    ),
    "as-many-rows-as-samples": lambda m, x: torch.stack(
        [plain(m, torch.cat([z[:1], m.f.weight[: N - 1]])) for z in x]
    ),
    "block-of-each-sample": lambda m, x: torch.stack(
        [torch.block_diag(z, m.f.weight[: N - 1]) for z in plain(m, x)[:, 0]]
    ),
    "sums-of-numbers": lambda m, x: plain(m, x.nansum(1)) * x.nanmean(1),
    "larger-numbers": lambda m, x: torch.fmax(plain(m, x), x),
    "replaced-numbers": lambda m, x: plain(m, x.nan_to_num()).nan_to_num(),
    "sampled-from-a-parameter": lambda m, x: F.grid_sample(
        m.f.weight[None, None].expand(len(x), 1, -1, -1),
        plain(m, x)[:, :, None, :2],
        padding_mode="border",
        align_corners=False,
    ),
    "eigenvalues-of-each-sample": lambda m, x: torch.linalg.eigvalsh(
        plain(m, x).mT @ plain(m, x) + torch.arange(D).diag()
    ),
    "factor-of-each-sample": lambda m, x: torch.linalg.cholesky(
        plain(m, x).mT @ plain(m, x) + torch.eye(D)
    ),
    "singular-values-of-each-sample": lambda m, x: torch.linalg.svdvals(
        plain(m, x) @ m.f.weight
    )[:, :2],
    "outside-of-the-domain": lambda m, x: torch.where(
        plain(m, x) > 0, plain(m, x).log2(), x * m.p
    ),
    "rows-of-a-constant-by-a-mask": lambda m, x: plain(m, x)[:, None]
    .masked_scatter(x[:, None] > 0, m.p.expand_as(x[:, None])[x[:, None] > 0])
    .squeeze(1),
    "broadcast-tensors": lambda m, x: torch.mul(
        *torch.broadcast_tensors(plain(m, x), m.p)
    ),
    "grids-of-each-sample": lambda m, x: torch.stack(
        [torch.mul(*torch.meshgrid(z, m.p, indexing="ij")) for z in plain(m, x)[:, 0]]
    ),
    "unseen-function": lambda m, x: plain(m, UnseenSine.apply(x)),
    "losses-with-the-prediction-second": lambda m, x: torch.stack(
        [F.mse_loss(torch.ones(z.shape, dtype=F64), z.sin()) for z in plain(m, x)]
    ),
    "written-by-a-mask-that-broadcasts": lambda m, x: torch.stack(
        [
            m.p.masked_scatter(torch.ones(2, D, dtype=torch.bool), z[:2])
            for z in plain(m, x)
        ]
    ),
    "one-number-for-each-sample": lambda m, x: plain(m, x)
    + torch.stack([m.p.sum().index_select(0, z[:1, 0].long() * 0) for z in x])[
        :, None, None
    ],
    "parts-without-samples": lambda m, x: torch.cat(
        [plain(m, z) * m.p for z in x.tensor_split(3)]
    ),
    "operator-that-draws": lambda m, x: put_back(m, shuffled(x)),
    "operator-with-a-switch": lambda m, x: put_back(m, switched(x))
    * put_back(m, switched(x * 1)),
    "operator-with-a-name": lambda m, x: put_back(m, reversed_by_name(x)),
}


ORDERS: Dict[str, Any] = {"drawn": None, "of-the-call": None, "calls": 0}


def operator(name: str, order: Callable[[int], Tensor]) -> Callable:
    """Register an operator that gives samples an order that is no argument."""

    @torch.library.custom_op(f"backpack_test::{name}", mutates_args=())
    def move(x: Tensor) -> Tensor:
        ORDERS["drawn"] = order(len(x))
        return x[ORDERS["drawn"]]

    def save(ctx: Any, inputs: Tuple[Tensor], output: Tensor) -> None:
        ctx.back = ORDERS["of-the-call"] = ORDERS["drawn"].argsort()

    move.register_autograd(lambda ctx, g: g[ctx.back], setup_context=save)
    return move


shuffled = operator("shuffle", torch.randperm)
reversed_by_name = operator("mul", lambda n: torch.arange(n).flip(0))
switched = operator("switch", lambda n: torch.arange(n).roll(ORDERS["calls"]))


def put_back(m: Module, x: Tensor) -> Tensor:
    """Use parameters on samples in another order, and change that for next time."""
    ORDERS["calls"] += 1
    return plain(m, x)[ORDERS["of-the-call"]]


def permutation(x: Tensor) -> Tensor:
    """Return an order of the samples, that is no cycle of two."""
    order = [2, 0, 3, 1] if len(x) == 4 else list(range(len(x)))
    return torch.tensor(order)


def others(x: Tensor) -> Tensor:
    """Tell which positions ``[N * T]`` of ``[N, T, D]`` are not of the same sample."""
    own = torch.arange(len(x)).repeat_interleave(x.shape[1])
    return own != own[:, None]


def packed(x: Tensor, mask: Tensor) -> Tensor:
    """Let all positions ``[N, T, D]`` attend to each other that a mask lets."""
    rows = x.flatten(0, 1)[None, None]
    return F.scaled_dot_product_attention(rows, rows.sin(), rows, mask).view_as(x)


def sorted_by(m: Module, x: Tensor, keys: Tensor) -> Tensor:
    """Use parameters on samples in the order of keys, and put them back."""
    _, order = keys.sort(descending=True)
    _, back = order.sort()
    return plain(m, x[order])[back]


def in_place(x: Tensor, z: Tensor) -> Tensor:
    """Change the first half of the features in place."""
    x = x.clone()
    x[..., : D // 2] += z[..., D // 2 :]
    x[:, 0].mul_(z[:, -1])
    return x


def buffered(x: Tensor, z: Tensor) -> Tensor:
    """Write into a buffer with time in front, as caches are."""
    out = x.new_zeros(x.shape[1] + 1, len(x), D)
    out[1:] = z.transpose(0, 1)
    out[0] = x[:, 0]
    return out.transpose(0, 1)


def step_by_step(x: Tensor, z: Tensor) -> Tensor:
    """Write into a buffer, each step and each sample by itself."""
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        out[:, t] = z[:, t] * x[:, t - 1]
    for n in range(len(x)):
        out[n] = out[n].clone() * z[n]
    return out


MOVE_ROWS = {
    f"{name}-{t}": moving(function, t, D)
    for name, function in MOVES.items()
    for t in LENGTHS
}


def experts() -> Module:
    """Make two experts."""
    return nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])


def by_mask(m: Module, x: Tensor) -> Tensor:
    """Send each token to one of two experts, by a mask."""
    scores, out = m.router(x), torch.zeros_like(x)
    route = (scores[..., 0] > 0).long()
    for i, expert in enumerate(m.experts):
        out[route == i] = expert(x[route == i])
    return plain(m, out * scores.amax(-1, keepdim=True))


def by_index(m: Module, x: Tensor) -> Tensor:
    """Send each token to its best experts, as Mixtral does."""
    flat = x.reshape(-1, D)
    weights, chosen = m.router(flat).softmax(-1).topk(1, -1)
    out = torch.zeros_like(flat)
    for i, expert in enumerate(m.experts):
        rows, rank = torch.where(chosen == i)
        mine = expert(flat[rows]) * weights[rows, rank, None]
        out.index_add_(0, rows, mine)
    return plain(m, out.view_as(x))


def by_sorting(m: Module, x: Tensor) -> Tensor:
    """Sort tokens by expert, run each expert on its part, and sort back."""
    flat = x.reshape(-1, D)
    scores = m.router(flat)
    order = scores.argmax(-1).argsort(stable=True)
    counts = scores.argmax(-1).bincount(minlength=2).tolist()
    parts = [e(z) for e, z in zip(m.experts, flat[order].split(counts))]
    out = torch.cat(parts)[order.argsort()] * scores.max(-1, keepdim=True).values
    return plain(m, out.view_as(x))


def by_one_hot(m: Module, x: Tensor) -> Tensor:
    """Weigh all experts by gates, as a dense mixture."""
    gates = m.router(x).softmax(-1)
    return plain(m, sum(gates[..., i, None] * e(x) for i, e in enumerate(m.experts)))


def by_sample(m: Module, x: Tensor) -> Tensor:
    """Send whole samples to experts; as many experts get some as there are."""
    out = x.new_zeros(x.shape)
    route = torch.arange(len(x)) % 2 if len(x) > 1 else torch.zeros(1)
    for i, expert in enumerate(m.experts):
        rows = (route == i).nonzero().squeeze(1)
        out = out.index_copy(0, rows, expert(x[rows]))
    return plain(m, out)


def by_stacked_weights(m: Module, x: Tensor) -> Tensor:
    """Pick each token's weight from those of all experts."""
    weights = torch.stack([e.weight for e in m.experts])
    biases = torch.stack([e.bias for e in m.experts])
    route = (x[..., 0] > 0).long()
    out = torch.einsum("ntoi,nti->nto", weights[route], x) + biases[route]
    return plain(m, out + m.router(x).sum(-1, keepdim=True))


def ragged(m: Module, x: Tensor) -> Tensor:
    """Use parameters on the tokens that a mask leaves, a number that differs."""
    mask, out = x[..., 0] > -0.3, torch.zeros_like(x)
    out[mask] = plain(m, x[mask])
    return out


def by_parts(m: Module, x: Tensor) -> Tensor:
    """Add up what each expert gives, of whom the first gets no token."""
    route = 1 + (x[..., 0] > 0).flatten().long()
    tokens, out = x.flatten(0, -2), 0
    for number, expert in enumerate([m.f, *m.experts]):
        rows = (route == number).nonzero()[:, 0]
        out = out + torch.zeros_like(tokens).index_add(0, rows, expert(tokens[rows]))
    return plain(m, x + out.view_as(x)) + m.router(x).sum(-1, keepdim=True)


ROUTING = (
    {
        f"{name}-{t}": moving(
            function, t, D, experts=experts, router=lambda: nn.Linear(D, 2)
        )._replace(alone=name != "by-sample")
        for name, function in {
            "by-mask": by_mask,
            "by-index": by_index,
            "by-sorting": by_sorting,
            "by-one-hot": by_one_hot,
            "by-sample": lambda m, x: by_sample(m, x)
            + m.router(x).sum(-1, keepdim=True),
            "by-stacked-weights": by_stacked_weights,
            "by-parts": by_parts,
        }.items()
        for t in LENGTHS
    }
    | {f"ragged-{t}": moving(ragged, t, D) for t in LENGTHS}
    | {
        f"masked-scatter-{t}": moving(
            lambda m, x: x.masked_scatter(x > 0, plain(m, x)[x > 0]), t, D
        )
        for t in LENGTHS
    }
)


def image(function: Callable, size: int, **parts: Callable[[], Module]) -> Row:
    """Make a row that moves pixels ``[N, D, size, size]`` about."""
    return moving(
        lambda m, x: function(m, x.movedim(-1, 1)), size, size, D, **parts
    )._replace(quantities=["BatchGrad", "BatchL2Grad", "DiagGGNExact"])


def channels_last(m: Module, x: Tensor) -> Tensor:
    """Use parameters on the features of all pixels, and pool."""
    return plain(m, x.movedim(1, -1)).mean((1, 2))


def swin(x: Tensor, w: int) -> Tensor:
    """Split images ``[N, H, W, D]`` into windows ``[N * K, w * w, D]``."""
    n, h, _, d = x.shape
    x = x.view(n, h // w, w, h // w, w, d)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, d)


def unswin(z: Tensor, x: Tensor, w: int) -> Tensor:
    """Put windows together again."""
    n, h, _, d = x.shape
    z = z.view(n, h // w, h // w, w, w, d)
    return z.permute(0, 1, 3, 2, 4, 5).reshape(n, h, h, d)


def windowed(m: Module, x: Tensor) -> Tensor:
    """Attend within windows, that are shifted and shifted back."""
    x = x.movedim(1, -1)
    z = swin(x.roll((-1, -1), (1, 2)), 2)
    z = (plain(m, z) @ z.mT + m.bias).softmax(-1) @ z
    z = unswin(z, x, 2).roll((1, 1), (1, 2))
    return plain(m, z).mean((1, 2))


IMAGES = {
    f"{name}-{size}": image(function, size, **parts)
    for size in (2, N)
    for name, (function, parts) in {
        "channels-last": (channels_last, {}),
        "pixel-shuffle": (
            lambda m, x: F.pixel_shuffle(m.c(x), 2)[..., 0]
            + channels_last(m, x)[:, :1, None],
            {"c": lambda: nn.Conv2d(D, 4, 1)},
        ),
        "pixel-unshuffle": (
            lambda m, x: m.c(F.pixel_unshuffle(x, 2)).flatten(1)
            + channels_last(m, x)[:, :1],
            {"c": lambda: nn.Conv2d(4 * D, 2, 1)},
        ),
        "unfold": (
            lambda m, x: m.c(F.unfold(x, 2)).mean(-1) + channels_last(m, x)[:, :2],
            {"c": lambda: nn.Conv1d(4 * D, 2, 1)},
        ),
        "fold": (
            lambda m, x: F.fold(
                F.unfold(x, 2, stride=2) * m.p.repeat(4)[:, None],
                x.shape[2:],
                2,
                stride=2,
            ).mean((2, 3))
            + channels_last(m, x),
            {},
        ),
        "patches": (
            lambda m, x: plain(
                m,
                x.unfold(2, 2, 2)
                .unfold(3, 2, 2)
                .flatten(4)
                .movedim(1, 3)
                .flatten(1, 2)
                .mean(-1),
            ).mean(1),
            {},
        ),
        "windowed": (windowed, {"bias": lambda: param(4, 4)}),
        "roll": (lambda m, x: channels_last(m, x.roll((1, 1), (2, 3))), {}),
        "rot90": (
            lambda m, x: plain(m, x.rot90(1, (2, 3)).movedim(1, -1))[:, 0, 0],
            {},
        ),
        "grid-sample": (
            lambda m, x: channels_last(
                m,
                F.grid_sample(x, x.movedim(1, -1)[..., :2].tanh(), align_corners=False),
            ),
            {},
        ),
        "channel-shuffle": (lambda m, x: channels_last(m, F.channel_shuffle(x, 2)), {}),
        "video": (  # frames as samples of a 2d layer, as in TimeSformer
            lambda m, x: m.c(x.movedim(2, 1).reshape(-1, D, 1, x.shape[3])).view(
                len(x), -1
            )
            + channels_last(m, x)[:, :1],
            {"c": lambda: nn.Conv2d(D, 1, 1)},
        ),
    }.items()
}


class First(Module):
    """A layer's first output."""

    def __init__(self, layer: Module):
        """Store the layer."""
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Call it; attention on itself."""
        attends = isinstance(self.layer, nn.MultiheadAttention)
        out = self.layer(x, x, x) if attends else self.layer(x)
        return out[0] if isinstance(out, tuple) else out


def first(layer: Module, x: Tensor) -> Tensor:
    """Call a layer that wants time first, and put samples in front again."""
    return layer(x.transpose(0, 1))[0].transpose(0, 1)


def run_packed(m: Module, x: Tensor, order: bool) -> Tensor:
    """Run a recurrent layer on sequences of different lengths."""
    n, t, _ = x.shape
    # by the data, so that each sample has its length in every batch
    lengths = [1 + int(abs(z[0, 0].item()) * 10) % t for z in x]
    if order:
        steps = sorted(range(n), key=lambda i: -lengths[i])
        sequence = pack_sequence([x[i][: lengths[i]] for i in steps])
    else:
        sequence = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
    out, _ = m.r(sequence)
    padded, _ = pad_packed_sequence(out, batch_first=True, total_length=t)
    if order:
        padded = padded[torch.tensor(steps).argsort()]
    return plain(m, padded)


def rnn(cls: type, **options: bool) -> Callable[[], Module]:
    """Make a function that makes a recurrent layer."""
    return lambda: cls(D, D, **options)


TIME_FIRST = {
    f"{name}-{t}": moving(function, t, D, **parts)
    for t in LENGTHS
    for name, (function, parts) in {
        "rnn": (lambda m, x: plain(m, first(m.r, x)), {"r": rnn(nn.RNN)}),
        "gru": (lambda m, x: plain(m, first(m.r, plain(m, x))), {"r": rnn(nn.GRU)}),
        "lstm-last": (
            lambda m, x: plain(m, m.r(x.transpose(0, 1))[0][-1]),
            {"r": rnn(nn.LSTM)},
        ),
        "lstm-state": (
            lambda m, x: plain(m, m.r(x.transpose(0, 1))[1][1][0]),
            {"r": rnn(nn.LSTM)},
        ),
        "beside-batch-first": (
            lambda m, x: plain(m, m.b(first(m.r, x))[0]),
            {"r": rnn(nn.GRU), "b": rnn(nn.GRU, batch_first=True)},
        ),
        "everything-time-first": (
            lambda m, x: plain(m, m.r(plain(m, x.transpose(0, 1)))[0]).transpose(0, 1),
            {"r": rnn(nn.GRU)},
        ),
        "two-batches": (
            lambda m, x: plain(m, first(m.r, torch.cat([x, x.cos()]))[len(x) :]),
            {"r": rnn(nn.GRU)},
        ),
        "sorted": (
            lambda m, x: plain(m, first(m.r, x[order(x)]))[order(x).argsort()],
            {"r": rnn(nn.LSTM)},
        ),
        "state-of-samples": (
            lambda m, x: m.r(x.transpose(0, 1), plain(m, x[:, 0])[None])[0][-1],
            {"r": rnn(nn.GRU)},
        ),
        "state-of-parameters": (
            lambda m, x: plain(m, m.r(x, m.p.expand(1, len(x), D).contiguous())[0]),
            {"r": rnn(nn.RNN, batch_first=True)},
        ),
        "cells": (
            lambda m, x: cells(m, x.transpose(0, 1)),
            {"c": lambda: nn.GRUCell(D, D)},
        ),
        "cells-on-a-prefix": (
            lambda m, x: cells_on_a_prefix(m, x),
            {"c": lambda: nn.LSTMCell(D, D)},
        ),
        "attention": (
            lambda m, x: plain(m, m.a(*[x.transpose(0, 1)] * 3)[0]).transpose(0, 1),
            {"a": lambda: nn.MultiheadAttention(D, 2)},
        ),
        "attention-of-two": (
            lambda m, x: m.a(
                plain(m, x[:, :1]).transpose(0, 1), *[x.transpose(0, 1)] * 2
            )[0][0],
            {"a": lambda: nn.MultiheadAttention(D, 2)},
        ),
        "encoder-layer": (
            lambda m, x: plain(m, m.e(x.transpose(0, 1)).transpose(0, 1)),
            {"e": lambda: nn.TransformerEncoderLayer(D, 2, 4, 0.0)},
        ),
        "linear-on-steps": (
            lambda m, x: torch.stack([plain(m, z) for z in x.transpose(0, 1)]).prod(0),
            {},
        ),
        "positions-time-first": (
            lambda m, x: plain(
                m, x.transpose(0, 1) + m.e.weight[: x.shape[1], None]
            ).transpose(0, 1),
            {"e": lambda: nn.Embedding(N, D)},
        ),
        "convolution-beside": (
            lambda m, x: plain(m, m.c(first(m.r, x).mT).mT),
            {"r": rnn(nn.RNN), "c": lambda: nn.Conv1d(D, D, 3, padding=1)},
        ),
        "packed": (
            lambda m, x: run_packed(m, x, False),
            {"r": rnn(nn.GRU, batch_first=True)},
        ),
        "packed-by-hand": (
            lambda m, x: run_packed(m, x, True),
            {"r": rnn(nn.LSTM, batch_first=True)},
        ),
        "padded-by-hand": (
            lambda m, x: plain(m, pad_sequence([z * 2 for z in x], batch_first=True)),
            {},
        ),
    }.items()
}


def order(x: Tensor) -> Tensor:
    """Return an order of the samples that depends on what they hold."""
    return x.detach().flatten(1).sum(1).argsort()


def cells(m: Module, x: Tensor) -> Tensor:
    """Run a cell over time, which is in front."""
    h = x[0]
    for step in x[1:]:
        h = m.c(step, h)
    return plain(m, h)


def cells_on_a_prefix(m: Module, x: Tensor) -> Tensor:
    """Run a cell over sequences of different lengths, the longest first."""
    lengths = 2 + x.detach().flatten(1).sum(1).gt(0).long()
    order = lengths.argsort(descending=True)
    x, h = x[order], x[order, 0]
    c = h
    for time in range(1, x.shape[1]):
        count = int((lengths > time).sum())
        own = m.c(x[:count, time], (h[:count], c[:count]))
        h, c = (torch.cat([new, old[count:]]) for new, old in zip(own, (h, c)))
    return plain(m, h)[order.argsort()]


# Statistics over the batch that carry no gradient: the share of a sample is what the
# gradient of its own prediction is
WITHOUT_GRADIENT = {
    "detached-mean": lambda m, x: plain(m, x - x.mean(0).detach()),
    "detached-norm": lambda m, x: plain(m, x / x.norm().detach()),
    "detached-max": lambda m, x: plain(m, softmax_from(x, x.max().detach())),
    "norm-without-grad": lambda m, x: plain(m, x * without_grad(x)),
    "largest-as-number": lambda m, x: plain(m, x / x.abs().max().item()),
    "argmax-over-samples": lambda m, x: plain(m, x * (x.argmax(0) + 1)),
    "histogram": lambda m, x: plain(m, x * (x > 0).to(x.dtype).mean()),
    "quantized-by-the-batch": lambda m, x: plain(
        m, x + (x.round() * x.detach().std() - x).detach()
    ),
}


def softmax_from(x: Tensor, largest: Tensor) -> Tensor:
    """Compute a softmax as one writes it by hand."""
    odds = (x - largest).exp()
    return odds / odds.sum(-1, keepdim=True)


def without_grad(x: Tensor) -> Tensor:
    """Compute the deviation of the batch, outside of autograd."""
    with torch.no_grad():
        return x.std()


def of_numbers(f: Callable[[Tensor], Tensor]) -> Callable:
    """Give layers what is made of samples without a gradient."""
    return lambda m, x: plain(m, f(x.detach())) + x.sum(-1, keepdim=True)


# Numbers are drawn for the batch; how many for a sample depends on its own
DRAWN = {
    "gamma": lambda m, x: plain(m, Gamma(x.exp(), m.p.exp()).rsample()),
    "dirichlet": lambda m, x: plain(m, Dirichlet(x.exp()).rsample()),
    "beta": lambda m, x: plain(m, Beta(m.f(x).exp(), m.p.exp()).rsample()),
    "poisson": lambda m, x: plain(m, torch.poisson(m.f(x).exp())),
    "bernoulli": lambda m, x: plain(m, torch.bernoulli(m.f(x).sigmoid())),
    **{
        f"{name}-of-numbers": of_numbers(function)
        for name, function in {
            "dirichlet": lambda x: Dirichlet(x.exp()).sample(),
            "poisson": lambda x: torch.poisson(x.exp()),
            "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
            "bernoulli-in-place": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
            "binomial": lambda x: torch.binomial(torch.full_like(x, 5), x.sigmoid()),
            "normal": lambda x: torch.normal(x, x.exp()),
        }.items()
    },
}


CONSTANT_ROWS = {
    f"{name}-{t}": moving(function, t, D)._replace(alone=False)
    for name, function in {**WITHOUT_GRADIENT, **DRAWN}.items()
    for t in LENGTHS
}


def observed(x: Tensor) -> Tensor:
    """Quantize what is in the range that has been seen, of the batch, too."""
    on, zero, one = torch.ones(1, dtype=torch.long), torch.zeros(1), torch.ones(1)
    state = on, on, -one, one, one, zero.int()
    return torch.fused_moving_avg_obs_fake_quant(x.float(), *state, 0.1, 0, 255, 0)


def bags(offsets: List[int], inside: bool = False, **options: Any) -> Row:
    """Make a row with a table of which each sample has a bag of rows.

    Args:
        offsets: Where each bag begins, among all their entries.
        inside: Whether offsets are made by the model, and entries weighted by data.
        options: Options of the table.

    Returns:
        The row, whose entries are N by 2 if offsets are made inside.
    """

    def forward(m: Module, x: Tensor, ids: Tensor, *given: Tensor) -> Tensor:
        weights = None
        if inside:
            given, ids = (torch.tensor(offsets),), ids.flatten()
            weights = m.f(x).flatten()
        rows = m.t(ids, *given, per_sample_weights=weights)
        return m.g(rows * x + m.f(x).prod(1, keepdim=True))

    def draw() -> Tuple[Tensor, ...]:
        x, given = torch.randn(N, D, dtype=F64), torch.tensor(offsets)
        if inside:
            return x, torch.randint(5, (N, 2))
        return x, torch.randint(5, (max(offsets) + 1,)), given

    return Row(
        lambda: Lambda(
            forward,
            t=nn.EmbeddingBag(5, D, **options),
            f=nn.Linear(D, 2),
            g=nn.Linear(D, 3),
        ),
        draw,
        alone=False,
    )


BAGS = {
    "mean": bags([0, 3, 4, 8]),
    "empty": bags([0, 3, 3, 8], mode="sum"),
    "one-each": bags([0, 1, 2, 3]),
    "last": bags([0, 3, 4, 8, 9], mode="max", include_last_offset=True),
    "weighted": bags([0, 2, 4, 6], inside=True, mode="sum"),
}

INPUTS = {
    f"parameter-{t}": Row(
        lambda: Lambda(
            lambda m, x: m.f(UnseenSine.apply(x).transpose(0, 1)).transpose(0, 1),
            f=nn.Linear(D, 2),
        ),
        randn(t, D),
        predict=lambda m, X: m(nn.Parameter(X[0])),
    )
    for t in LENGTHS
}
INPUTS["packed-in-any-order"] = Row(
    lambda: Lambda(lambda m, packed: m.r(packed)[1][0], r=nn.GRU(D, 3)),
    lambda: (torch.randn(N, 4, D, dtype=F64), torch.tensor([2, 4, 1, 3])),
    predict=lambda m, X: m(
        pack_padded_sequence(*X, batch_first=True, enforce_sorted=False)
    ),
)

# Where the largest number is, depends on samples, though it be the first by chance
NEAREST = {
    "argmax": lambda s: s.argmax(-1),
    "argmin": lambda s: s.argmin(-1),
    "max": lambda s: s.max(-1)[1],
    "sort": lambda s: s.sort(-1)[1][..., 0],
    "boundaries": lambda s: torch.bucketize(s.sum(-1), s.new_tensor([-99, -98])),
    "drawn": lambda s: torch.multinomial(
        F.one_hot(s.argmax(-1), 3).to(s).flatten(0, 1), 1
    ).view(s.shape[:-1]),
    "byte": lambda s: (0 * s.sum(-1)).byte().long(),
    "aten-byte": lambda s: torch.ops.aten._to_copy(
        0 * s.sum(-1), dtype=torch.uint8
    ).long(),
    "step": lambda s: torch.heaviside(s.sum(-1).exp(), s.new_zeros(())).long(),
}


def nearest(code: Callable, size: int) -> Row:
    """Make a row that picks from a table by similarities, of that size."""

    def forward(m: Module, x: Tensor) -> Tensor:
        similar = x @ torch.full((D, 3), size).to(x)
        return m.f(m.e(code(similar))).prod(1)

    return Row(
        lambda: Lambda(forward, e=nn.Embedding(3, D), f=nn.Linear(D, 2)), randn(2, D)
    )


NEAREST_ROWS = {
    f"{name}-{size}": nearest(code, size)
    for name, code in NEAREST.items()
    for size in (0, 1)
}

BATCH_NORMS: Dict[str, Callable] = {  # in training mode, of each sample by itself
    "function": lambda m, x: torch.stack(
        [F.batch_norm(z, None, None, m.p, m.p.sin(), True) for z in plain(m, x)]
    ),
    "without-parameters": lambda m, x: plain(
        m, torch.stack([F.batch_norm(z, None, None, training=True) for z in x])
    ),
    "module": lambda m, x: torch.stack([m.n(z) for z in plain(m, x)]),
    "module-of-positions": lambda m, x: torch.stack([m.n(z.T[None])[0].T for z in x])
    + plain(m, x),
    "module-of-copies": lambda m, x: torch.stack(
        [m.n(torch.stack([z.T, z.T.sin()])).sum(0).T for z in plain(m, x)]
    ),
    "samples-as-channels": lambda m, x: F.batch_norm(
        plain(m, x).movedim(0, 1).flatten(1),
        *(None, None, m.p.repeat(len(x)), m.p.repeat(len(x)), True),
    )
    .unflatten(1, (len(x), D))
    .movedim(1, 0),
    "samples-as-channels-of-one": lambda m, x: F.batch_norm(
        plain(m, x).mT.reshape(1, -1, x.shape[1]),
        *(None, None, m.p.repeat(len(x)), m.p.repeat(len(x)), True),
    )
    .view(len(x), D, -1)
    .mT,
}
TABLES = {
    "batch-norm": {
        name: moving(
            *(function, 3, D),
            **({"n": lambda: nn.BatchNorm1d(D)} if "module" in name else {}),
        )._replace(train=True)
        for name, function in BATCH_NORMS.items()
    },
    "input": INPUTS,
    "nearest": NEAREST_ROWS,
    "bags": BAGS,
    "move": MOVE_ROWS,
    "routing": ROUTING,
    "image": IMAGES,
    "time-first": TIME_FIRST,
    "constant": CONSTANT_ROWS,
}


@pytest.mark.parametrize(
    "table, row", [(table, row) for table, rows in TABLES.items() for row in rows]
)
def test_right(table: str, row: str) -> None:
    """Samples that are kept apart are right, wherever they are."""
    assert_right(TABLES[table][row])


def test_places_that_are_numbers() -> None:
    """An operation that reads memory where numbers say never gets one that is none."""
    seen = []

    @torch.library.custom_op("backpack_test::deform_conv2d", mutates_args=())
    def read(x: Tensor, places: Tensor) -> Tensor:
        seen.append(bool(places.isfinite().all()))
        return x.gather(1, places.nan_to_num().abs().long() % x.shape[1])

    def save(ctx: Any, inputs: Tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def back(ctx: Any, g: Tensor) -> Tuple[Tensor, None]:
        x, places = ctx.saved_tensors
        index = places.abs().long() % x.shape[1]
        return torch.zeros_like(x).scatter_add(1, index, g), None

    read.register_autograd(back, setup_context=save)
    row = moving(lambda m, x: plain(m, read(m.f(x), m.g(x) * 3)), 2, D)
    assert_right(row)
    assert len(seen) > 1 and all(seen)


def test_places_that_are_integers() -> None:
    """An operation that writes to memory where integers say gets the model's only."""
    seen = []

    name = "_convert_indices_from_coo_to_csr"

    @torch.library.custom_op(f"backpack_test::{name}", mutates_args=())
    def count(rows: Tensor, size: int) -> Tensor:
        seen.append(rows.tolist())
        return torch._convert_indices_from_coo_to_csr(rows.clamp(0, size - 1), size)

    class Typed(nn.Module):
        """A layer for each type, of rows that are sorted by it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(D, 2) for _ in range(2))

        def forward(self, x: Tensor, types: Tensor) -> Tensor:
            ends = count(types, 2).tolist()
            pairs = zip(self.layers, ends, ends[1:])
            return torch.cat([layer(x[i:j]) for layer, i, j in pairs])

    X = torch.randn(5, D, dtype=F64), torch.tensor([0, 0, 0, 1, 1])
    model, y = Typed().to(F64), (torch.randn(5, 2, dtype=F64),)
    expected = individual_gradients(model, nn.MSELoss(), X, y)
    seen.clear()
    with backpack(BatchGrad()):
        nn.MSELoss()(extend(model)(*X), *y).backward()
    assert seen == [X[1].tolist()]
    for key, value in expected.items():
        assert_agrees(model.get_parameter(key).grad_batch, value, key)


def near_a_step(x: Tensor) -> Tensor:
    """Let the first sample be where a small change matters, and no other one."""
    x = x.round()
    return torch.cat([0 * x[:1] - 1e-4, x[1:] + 0.5])


@torch.library.custom_op("backpack_test::steps", mutates_args=())
def steps(x: Tensor) -> Tensor:
    """Round numbers, which have to be some."""
    if x.isnan().any():
        raise ValueError("no numbers")
    return x.floor()


@torch.library.custom_op("backpack_test::draws", mutates_args=())
def draws(x: Tensor) -> Tensor:
    """Draw once or twice for each entry."""
    if x.isnan().any():
        raise ValueError("no numbers")
    times = (1 + x.floor().long() % 2).flatten().tolist()
    return torch.stack([torch.rand(n, dtype=x.dtype)[-1] for n in times]).view_as(x)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("operation", [steps, draws])
def test_small_changes_that_matter_for_one_sample(operation: Callable) -> None:
    """Samples are not told apart by them, nor by numbers that others' move along."""
    row = moving(of_numbers(lambda x: operation(near_a_step(x))), D)
    assert_right(row._replace(alone=False))


CONV = getattr(torch.backends.cudnn, "conv", None)


@pytest.mark.skipif(CONV is None, reason="before torch 2.9, there are no such options")
def test_recurrent_layer_while_precisions_differ() -> None:
    """What switches cuDNN off does not ask for one precision of all its operations."""

    def function(m: Module, x: Tensor) -> Tensor:
        weights = list(m.r.parameters())
        state, options = x.new_zeros(1, len(x), D), (True, 1, 0.0, False, False, True)
        return plain(m, torch.gru(x, state, weights, *options)[0])

    size, before = 7, CONV.fp32_precision  # no other row has: findings are remembered
    CONV.fp32_precision = "ieee"
    try:
        assert_right(moving(function, size, D, r=rnn(nn.GRU)))
    finally:
        CONV.fp32_precision = before


def roots(x: Tensor) -> Tensor:
    """Compute absolute values of roots of polynomials with coefficients ``[N, D]``."""
    companion = torch.eye(x.shape[1]).to(x).roll(1, 1).repeat(len(x), 1, 1)
    companion[:, 0] = x
    return torch.linalg.eigvals(companion).abs()


@pytest.mark.parametrize("size", [3, 4, 6, 8])
def test_matrices_of_which_entries_are_numbers(size: int) -> None:
    """LAPACK faults, at times, if some entries of a matrix are NaN; it gets none."""
    model = Lambda(
        lambda m, x: m.g(roots(m.f(x))), f=nn.Linear(size, size), g=nn.Linear(size, 2)
    )
    loss, x = extend(nn.CrossEntropyLoss(reduction="sum")), torch.randn(4, size)
    y = torch.randint(2, (4,))
    with backpack(BatchGrad()):
        loss(extend(model)(x), y).backward()
    values = [loss(model(x[i : i + 1]), y[i : i + 1]) for i in range(4)]
    (expected,) = jacobian(torch.stack(values), [model.f.weight])
    assert_agrees(model.f.weight.grad_batch, expected, "f.weight", rtol=1e-3)


@pytest.mark.parametrize("t", LENGTHS)
def test_quantized_while_observed(t: int) -> None:
    """A range that the batch decides, without a gradient, is a constant."""
    row = moving(lambda m, x: plain(m, observed(x).double()), t, D)
    model, loss, X = row._replace(alone=False).build()
    with backpack(BatchGrad(), DiagGGNExact()):
        row.objective(extend(model)(*X), extend(loss)).backward()
    expected = reference(row._replace(alone=False))
    assert_fields(model, ["BatchGrad", "DiagGGNExact"], expected, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MOVES)
def test_small_batches(name: str, batch: int) -> None:
    """One sample, and as few as there are positions or axes."""
    row = moving(MOVES[name], 2, D)
    assert_right(
        row._replace(
            X=randn(2, D, batch=batch),
            quantities=["BatchGrad", "BatchL2Grad", "DiagGGNExact"],
        )
    )


def test_one_sample_whose_derivative_is_zero() -> None:
    """What is computed from a single sample is its own, whatever its numbers are."""
    row = moving(
        lambda m, x: torch.vmap(lambda z: z.relu() + 1)(-plain(m, x).exp()) * m.p, 2, D
    )
    assert_right(row._replace(X=randn(2, D, batch=1)))


# What else a model returns, where samples may have met
BESIDE: Dict[str, Callable[[Tensor], Any]] = {
    "similarities": lambda h: (h, h @ h.T),
    "similarities-first": lambda h: {"scores": h @ h.T, "h": h},
    "mean": lambda h: [h.mean(0), {"h": h}],
    "loss": lambda h: (F.mse_loss(h, h.detach().roll(1, 0)), h),
    "means": lambda h: (h, h.mean() + h.detach().mean()),
    "itself": lambda h: (h, h.sin(), h),
}


PICKED = {
    "gather": lambda k: torch.tensor([0, 0, 1, 0]).expand(len(k), 4).gather(1, k),
    "take": lambda k: torch.tensor([0, 0, 0, 0, 1])[k],
    "index-select": lambda k: torch.tensor([2, 2]).index_select(0, k.view(-1) % 2),
}


@pytest.mark.parametrize("name", PICKED)
def test_integers_picked_by_data(name: str) -> None:
    """Where they are picked from holds the same number several times."""
    row = Row(
        lambda: Lambda(
            lambda m, k: m.e(PICKED[name](k).view(k.shape)), e=nn.Embedding(3, D)
        ),
        lambda: (torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]])[:N],),
    )
    assert_right(row)


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_differentiated(name: str) -> None:
    """Samples may meet in what a model returns beside its prediction."""
    row = Row(
        lambda: Lambda(lambda m, x: BESIDE[name](m.f(x).tanh()), f=nn.Linear(D, 2)),
        randn(D),
        predict=lambda m, X: next(
            x for x in tree_leaves(m(*X)) if x.shape == (len(X[0]), 2)
        ),
    )
    assert_right(row)


def into_gaps(m: Module, x: Tensor) -> Tensor:
    """Write to parts of a tensor that does not fill its memory."""
    z = torch.empty_strided((len(x), D), (2 * D, 1), dtype=x.dtype)
    values = plain(m, x)
    z[:, :2].copy_(values[:, :2])
    z[:, 2:].copy_(values[:, 2:])
    return z


def one_row_first(m: Module, x: Tensor) -> Tensor:
    """Let data meet a row of a constant, and then the others."""
    z = m.p.tanh().expand(len(x), D).clone()
    z[:1].add_(x[:1])
    z[1:].mul_(x[1:])
    return plain(m, z)


def packed_attention(x: Tensor) -> Tensor:
    """Let positions ``[N, T, D]`` attend to those of their sample, in one sequence."""
    mask = x.new_zeros(()).masked_fill(others(x), -inf)
    rows = x.flatten(0, 1)
    return ((rows @ rows.mT + mask).softmax(-1) @ rows).view_as(x)


ROWS_OF_ONE_SAMPLE: Dict[str, Callable[[Tensor], Tensor]] = {  # beside nobody's
    "copied": lambda x: x.new_zeros(x.shape).index_copy(0, torch.tensor([0]), x[:1]),
    "padded": lambda x: F.pad(x[:1], [0] * (2 * x.dim() - 1) + [len(x) - 1]),
    "concatenated": lambda x: torch.cat([x[:1], torch.zeros_like(x[1:])]),
}

# The library may say no to these, with a reason
EITHER = {
    **{
        f"one-sample-{name}-{end}": moving(
            lambda m, x, f=function, last=last: last(m.g(m.f(f(x))) @ m.p.diag(), x),
            *shape,
            D,
        )._replace(alone=False, says=r"a sample enter each row.* 0 \* input")
        for name, function in ROWS_OF_ONE_SAMPLE.items()
        for end, shape, last in (
            ("alone", [3], lambda h, x: h),
            ("beside-all", [], torch.add),
        )
    },
    "into-gaps": moving(into_gaps, D)._replace(says="writing to a view"),
    "one-row-first": moving(one_row_first, D)._replace(alone=False, says="add_"),
    "centered-data": Row(
        lambda: nn.Linear(D, 3),
        randn(D),
        alone=False,
        predict=lambda m, X: m(X[0] - X[0].mean(0)),
    ),
    "data-centered-by-the-model": Row(
        lambda: Lambda(lambda m, x: m.f(x - x.mean(0)), f=nn.Linear(D, 3)),
        randn(D),
        alone=False,
        says=r"mean|sub",
    ),
    "rows-picked-by-data": moving(
        lambda m, x: plain(m, x.flatten(0, 1)[x.flatten(0, 1)[:, 0].argsort()])[
            x.flatten(0, 1)[:, 0].argsort().argsort()
        ].view_as(x),
        3,
        D,
    )._replace(says=r"getitem|index|sort|view|layer_norm|linear"),
    "block-diagonal-mask": moving(  # a batch that is packed into rows
        lambda m, x: plain(m, packed_attention(x)),
        3,
        D,
    )._replace(says=r"matmul.*rows that a mask alone keeps apart"),
    "max-of-the-batch": moving(  # to keep a softmax in range
        lambda m, x: plain(m, softmax_from(x, x.max())), D
    )._replace(says=r"max.*detach what only keeps numbers in range"),
    "scatter-to-zeros": moving(
        lambda m, x: plain(m, x.new_zeros(x.shape).scatter_add(1, x.argsort(1), x)),
        3,
        D,
    )._replace(says=r"scatter"),
    "masked-select": moving(
        lambda m, x: plain(m, x.masked_select(x[..., :1] > -9).view_as(x)), 3, D
    )._replace(says=r"masked_select|view"),
    "bags-of-as-many-entries": bags([0, 2, 2, 3])._replace(says="embedding_bag"),
    "bags-of-two-samples": bags([0, 3, 4, 6], inside=True, mode="sum")._replace(
        says="embedding_bag"
    ),
    "one-sample-written-time-first": moving(
        lambda m, x: (
            torch.zeros_like(x.mT.mT.transpose(0, 1))
            .index_copy(1, torch.tensor([0]), plain(m, x[:1]).transpose(0, 1))
            .add(1)
            .mul(m.p)
            .transpose(0, 1)
        ),
        3,
        D,
    )._replace(alone=False, says=r"linear|mul|sin"),
    "one-sample-alive-behind-vmap": moving(
        lambda m, x: m.p
        * torch.vmap(lambda z: z.relu() + 1)(
            plain(m, x).square().neg().index_fill(0, torch.tensor([0]), 0)
            + F.pad(x[:1], (0, 0, 0, 0, 0, len(x) - 1)).square()
        )
        .transpose(0, 1)
        .clone()
        .transpose(0, 1),
        3,
        D,
    )._replace(alone=False, says=r"relu|mul"),
    "numpy-order": moving(
        lambda m, x: plain(m, x[torch.from_numpy(permutation(x).cpu().numpy())])[
            permutation(x).argsort()
        ],
        3,
        D,
    )._replace(says=r"getitem|index"),
}


@pytest.mark.parametrize("row", EITHER)
def test_right_or_refused(row: str) -> None:
    """It is right for each sample, or refused by the operation's name."""
    assert_right_or_refused(EITHER[row])


# What comes before the samples
BEFORE: Dict[str, Callable[[], Tensor]] = {
    "number": lambda: torch.tensor(0.7, dtype=F64),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:(?s).*nested tensors")
@pytest.mark.parametrize("name", BEFORE)
def test_input_before_the_samples(name: str) -> None:
    """A first input that has no axis, or no shape, holds no samples."""

    def forward(m: Module, first: Tensor, x: Tensor) -> Tensor:
        if first.is_nested:
            first = torch.nested.to_padded_tensor(first, 0.0).mean()
        return m.f(x * first) * m.w

    row = Row(lambda: Lambda(forward, f=nn.Linear(D, D), w=param(D)), randn(D))
    assert_right(row._replace(predict=lambda m, X: m(BEFORE[name](), *X)))


def styled(first: bool, style: Tensor) -> Row:
    """Make a row in which all samples share a style, which comes first or last."""

    def forward(m: Module, *X: Tensor) -> Tensor:
        x, s = X[::-1] if first else X
        return m.f(x * s) * m.w

    return Row(
        lambda: Lambda(forward, f=nn.Linear(D, D), w=param(D)),
        randn(D),
        predict=lambda m, X: m(*((style, *X) if first else (*X, style))),
        says="first input has length 1, and whose result has length 4",
    )


def placed(t: int, *batch: int) -> Row:
    """Make a row of one sample, as many rows as positions, and these as an input."""

    def forward(m: Module, x: Tensor, positions: Tensor) -> Tensor:
        return m.g((m.f(x) + m.p(positions)).tanh()).flatten(0, 1)

    return Row(
        lambda: Lambda(
            forward, f=nn.Linear(D, D), p=nn.Embedding(t, D), g=nn.Linear(D, 2)
        ),
        randn(t, D, batch=1),
        predict=lambda m, X: m(*X, torch.arange(t).reshape(*batch, t)),
        says="if there is one sample, give other inputs a first axis of length 1",
    )


# A first input of length 1 may be the only sample, or what all samples share
OF_LENGTH_ONE: Dict[str, Tuple[Row, bool]] = {
    "style-first": (styled(True, torch.full((1, D), 0.7, dtype=F64)), False),
    "style-last": (styled(False, torch.full((1, D), 0.7, dtype=F64)), True),
    "number-first": (styled(True, torch.tensor(0.7, dtype=F64)), True),
    "positions": (placed(3), False),
    "positions-of-one-sample": (placed(3, 1), True),
}


@pytest.mark.parametrize("name", OF_LENGTH_ONE)
def test_first_input_of_length_one(name: str) -> None:
    """It is right, or the way out is said."""
    row, is_right = OF_LENGTH_ONE[name]
    if is_right:
        assert_right(row._replace(says=None))
    else:
        assert_refused(row, "BatchGrad")


FOR_ALL: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "data": lambda m, x: m.f((x + m.e(torch.arange(3)[None])).tanh()),
    "computed": lambda m, x: m.f(torch.mul(m.e(torch.arange(3)[None]), x @ m.w)),
    "last": lambda m, x: m.e(torch.arange(3)[None]) * x.sin(),
    "expanded": lambda m, x: m.f(x + m.e(torch.arange(3)[None]).expand_as(x)),
    "without-an-axis": lambda m, x: m.f((x * m.e(torch.arange(3)[None])[0]).tanh()),
    "weights": lambda m, x: m.f(x[:, 0] @ m.e(torch.arange(3)[None])[0, 0].diag()),
    "weights-and-bias": lambda m, x: m.f(
        F.linear(x[:, 0], m.e(torch.arange(3)[None])[0, 0].diag(), m.e.weight[0])
    ),
}


@pytest.mark.parametrize("batch", [1, N])
@pytest.mark.parametrize("name", FOR_ALL)
def test_layer_called_for_all_samples(name: str, batch: int) -> None:
    """Layers alone are extended, and the first gets no samples, but positions."""
    model = Lambda(
        FOR_ALL[name], e=nn.Embedding(3, D), f=nn.Linear(D, 2), w=param(D, D)
    ).to(F64)
    for layer in (model.e, model.f):
        extend(layer)
    value = model(torch.randn(batch, 3, D, dtype=F64)).square().sum()
    says = f"not known where.*of batches of 1 and {N} samples.*model as a whole"
    refused = pytest.raises(NotImplementedError, match=says)
    with nullcontext() if batch == 1 else refused, backpack(BatchGrad()):
        value.backward()


# Messages along the edges of graphs that are merged to one, [R, D] from [E, D]
MERGED: Dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index-add": lambda h, sent, to: torch.zeros_like(h).index_add(0, to, sent),
    "index-add-in-place": lambda h, sent, to: h.sin().index_add_(0, to, sent),
    "scatter-add": lambda h, sent, to: torch.zeros_like(h).scatter_add(
        0, to[:, None].expand_as(sent), sent
    ),
    "scatter-reduce": lambda h, sent, to: torch.zeros_like(h).scatter_reduce(
        0, to[:, None].expand_as(sent), sent, "amax", include_self=False
    ),
    "transposed": lambda h, sent, to: torch.zeros_like(h.mT)
    .scatter_add(1, to.expand(sent.shape[1], -1), sent.mT)
    .mT,
    "longer-buffer": lambda h, sent, to: h.new_zeros(len(h), D + 1).scatter_add(
        0, to[:, None].expand_as(sent), sent
    )[:, :D],
}


@pytest.mark.parametrize("name", MERGED)
def test_merged_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried, nor pulled back for single samples, also beside lone nodes."""

    def forward(m: Module, x: Tensor, edges: Tensor) -> Tensor:
        offsets = 3 * torch.arange(len(x))[:, None, None]
        start, to = (edges + offsets).transpose(0, 1).flatten(1)
        h = x.flatten(0, 1)
        for layer in (m.f, m.g):
            h = MERGED[name](h, h[start], to).relu()
            h = MERGED[name](h, layer(h)[start], to).sin()
        return h.view(x.shape).sum(1)

    def data() -> Tensors:
        return torch.randn(N, 3, D, dtype=F64), torch.randint(1, 3, (N, 2, 5))

    def model() -> Module:
        return Lambda(forward, f=nn.Linear(D, D), g=nn.Linear(D, D))

    monkeypatch.delattr(Use, "_generic")
    monkeypatch.delattr(Trial, "_probe")
    assert_right(Row(model, data, quantities=[*FIRST_ORDER, "DiagGGNExact"]))


BEHIND_ROWS: Dict[str, Tuple[Callable[[Module, Tensor, Tensor], Tensor], bool]] = {
    "sum": (lambda m, x, h: m.f(x + h), False),
    "activation": (lambda m, x, h: m.f((x * h.exp()).tanh().flatten(1, -2)), False),
    "by-a-gradient": (lambda m, x, h: m.f(h + x.detach().requires_grad_()), False),
    "with-an-axis": (lambda m, x, h: m.f(torch.addcmul(x, x, h[None])), False),
    "model": (lambda m, x, h: m.g(torch.maximum(x, h)), False),
    "samples-behind-steps": (
        lambda m, x, h: m.f((h[:, None] + x[1, :, None]).transpose(0, 1)),
        True,
    ),
    "as-many-axes": (lambda m, x, h: m.f(x[0] * h), True),
    "repeated": (lambda m, x, h: m.f(2 * h.expand_as(x)), True),
    "rows-of-a-parameter": (lambda m, x, h: m.f(h * m.w), True),
    "no-model": (lambda m, x, h: x.sin() + h, True),
}


@pytest.mark.parametrize("batch", [2, N])
@pytest.mark.parametrize("name", BEHIND_ROWS)
def test_rows_in_front_of_a_parts_samples(name: str, batch: int) -> None:
    """What a part got might be positions, and the rows samples of the next part."""
    compute, is_right = BEHIND_ROWS[name]
    model = Lambda(
        lambda m, x, t: compute(m, x, m.e(t)),
        e=nn.Embedding(9, D),
        f=nn.Linear(D, 2),
        g=nn.Sequential(nn.Tanh(), nn.Linear(D, 2)),
        w=param(3, 1, D),
    ).to(F64)
    for layer in (model.e, model.f, model.g):
        extend(layer)
    x, t = torch.randn(batch, N, D, dtype=F64), torch.arange(N)
    says = f"after `.*` that puts {batch} rows in front of samples"
    refused = pytest.raises(NotImplementedError, match=says)
    with nullcontext() if is_right else refused, backpack(BatchGrad()):
        model(x, t).square().sum().backward()
    for n in range(N if is_right else 0):
        model.zero_grad()
        model(x[:, n : n + 1], t[n : n + 1]).square().sum().backward()
        for p in [p for p in model.parameters() if hasattr(p, "grad_batch")]:
            assert_agrees(p.grad_batch[n], p.grad, "grad_batch")


TRANSFORMER = {"dim_feedforward": 3, "dropout": 0.0}
# Layers that say by `batch_first=False` where samples are, called by themselves
BY_THEMSELVES: Dict[str, Tuple[Callable[[], Module], Callable[..., Tensor]]] = {
    "lstm-by-keyword": (
        lambda: nn.LSTM(D, 2, 2),
        lambda m, x, _: m(input=x)[0],
    ),
    "gru-state": (lambda: nn.GRU(D, D, 2), lambda m, x, h: m(x, hx=h[:2].sin())[0]),
    "gru-state-by-gradients": (
        lambda: nn.GRU(D, D, 2),
        lambda m, x, h: m(x, h[:2].sin().requires_grad_())[1],
    ),
    "self-attention": (
        lambda: nn.MultiheadAttention(D, 2),
        lambda m, x, _: m(x, x, x)[0],
    ),
    "own-attention": (
        lambda: type("Own", (nn.MultiheadAttention,), {"__module__": "own"})(D, 2),
        lambda m, x, _: m(x, x, x)[0],
    ),
    "cross-attention": (
        lambda: nn.MultiheadAttention(D, 2),
        lambda m, x, y: m(x, key=y, value=y.sin())[0],
    ),
    "mask": (
        lambda: nn.MultiheadAttention(D, 2, add_bias_kv=True),
        lambda m, x, y: m(x, y, y, attn_mask=real(x.new_zeros(len(x), len(y))))[0],
    ),
    "encoder-layer": (
        lambda: nn.TransformerEncoderLayer(D, 2, **TRANSFORMER),
        lambda m, x, _: m(x),
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(D, 2, **TRANSFORMER), 1
        ),
        lambda m, x, y: m(tgt=x, memory=y),
    ),
}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("t, s, batch", [(1, 3, N), (3, 2, N), (2, 3, 2), (3, 2, 1)])
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_layer_for_sequences_by_itself(
    name: str, t: int, s: int, batch: int, computed: bool
) -> None:
    """It says where samples are, also for what no extended module has computed."""
    make, call = BY_THEMSELVES[name]
    weight = torch.ones(1, dtype=F64, requires_grad=computed)  # no parameter

    def predict(m: Module, X: Tensors) -> Tensor:
        x, y = [x.transpose(0, 1) for x in X]
        return call(m, x * weight if computed else x, y).transpose(0, 1)

    def data() -> Tensors:
        x, y = torch.randn(batch, t, D, dtype=F64), torch.randn(batch, s, D, dtype=F64)
        return x, y

    quantities = ["BatchGrad", "DiagGGNExact"] if computed else None
    assert_right(Row(make, data, predict=predict, quantities=quantities))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_rows_without_features() -> None:
    """Some samples' rows go through a layer of width zero."""
    model = extend(nn.AdaptiveLogSoftmaxWithLoss(D, 6, [2, 4]).to(F64))
    with backpack(BatchGrad()):
        out = model(torch.randn(N, D, dtype=F64), torch.tensor([0, 3, 5, 1])).output
        out.square().sum().backward()
    for p in model.parameters():
        assert_agrees(p.grad_batch.sum(0), p.grad)


# Tensors that require a gradient and are no parameters: in front of a model, and used
SHARED: Dict[str, Tuple[Tuple[int, ...], Callable[[Tensor, Tensor], Any]]] = {
    "number": ((1,), torch.mul),
    "vector": ((D,), torch.add),
    "first-axis-of-one": ((1, D), torch.add),
    "first-axes-of-one": ((1, 1, D), torch.mul),
    "steps": ((3, D), lambda x, own: x + own.tanh()),
    "steps-as-many-as-samples": (
        (N, D),
        lambda x, own: own.exp() * x.repeat(1, N, 1)[:, :N],
    ),
    "steps-of-one": ((1, 3, D), torch.add),
    "prompt": ((2, D), lambda x, own: torch.cat([own.expand(len(x), 2, D), x], 1)),
    "prompt-as-long-as-the-batch": (
        (N, D),
        lambda x, own: torch.cat([own[None].repeat(len(x), 1, 1), x], 1),
    ),
    "table": ((5, D), lambda x, own: own[x.argmax(-1)]),
    "table-by-embedding": ((D, D), lambda x, own: F.embedding(x.argmax(-1), own)),
    "matrix": ((D, D), torch.matmul),
    "beside-another-input": ((3, D), lambda x, own: (x, x + own)),
    "beside-a-number": ((1,), lambda x, own: (x, x * own)),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_in_front_of_the_model(name: str) -> None:
    """What samples share is no input; it gets no field."""
    shape, use = SHARED[name]
    own = torch.linspace(0.4, 0.9, prod(shape), dtype=F64).view(shape).requires_grad_()

    def forward(m: Module, x: Tensor, *others: Tensor) -> Tensor:
        return sum((plain(m, other) for other in others), plain(m, x))

    def predict(m: Module, X: Tensors) -> Tensor:
        made = use(X[0], own)
        return m(*made) if type(made) is tuple else m(made)

    def model() -> Module:
        return Lambda(forward, f=nn.Linear(D, D), g=nn.LayerNorm(D), p=param(D))

    assert_right(Row(model, randn(3, D), predict=predict))
    assert not hasattr(own, "grad_batch")


BETWEEN: Dict[str, Tuple[Tuple[int, ...], Callable[[Tensor, Tensor], Any]]] = {
    **{k: use for k, use in SHARED.items() if not k.startswith(("table", "beside"))},
    "number-without-axis": ((), torch.mul),
    "attention": ((6, D), lambda x, own: (x @ own.T).softmax(-1) @ own),
    "rows-behind-those-of-samples": (
        (2, 3, D),
        lambda x, own: torch.cat([x, own]).tanh()[: len(x)],
    ),
    "own-of-each-sample": ((N, 3, D), lambda x, own: x * own[: len(x)]),
    "rows-picked": ((7, D), lambda x, own: x + own[torch.arange(len(x))][:, None]),
}


@pytest.mark.parametrize("batch", [1, N])
@pytest.mark.parametrize("name", BETWEEN)
def test_shared_between_layers(name: str, batch: int) -> None:
    """Layers alone are called; what comes between them says nothing of samples."""
    shape, use = BETWEEN[name]
    own = torch.linspace(0.4, 0.9, prod(shape), dtype=F64).view(shape).requires_grad_()

    def predict(m: Module, X: Tensors) -> Tensor:
        return m[1](use(m[0](*X), own))

    def model() -> Module:
        return nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    x = randn(3, D)
    row = Row(model, lambda: (x()[0][:batch],), predict=predict, alone=False)
    assert_right(row)
    assert not hasattr(own, "grad_batch")


def entered(z: Tensor, places: Any, rows: Tensor) -> Tensor:
    """Write rows into a buffer."""
    z[places] = rows
    return z


def places_of(has: Tensor) -> Tensor:
    """Number the rows that are there."""
    return has.nonzero().flatten()


def placed(places: List[int], size: int) -> Tensor:
    """Make a matrix that puts rows into places."""
    return torch.eye(size, dtype=F64)[:, places]


def dispatched(x: Tensor, has: Tensor) -> Tensor:
    """Make a matrix that takes the rows that are there."""
    return F.one_hot(has.nonzero()[:, 0], len(x)).to(x)


def in_front(m: Module, x: Tensor, has: Tensor) -> Tensor:
    """Put those that are there in front of zeros, and back in order."""
    rows = F.pad(m.a(x[has]), (0, 0, 0, int((~has).sum())))
    return rows[(~has).long().argsort(stable=True).argsort()]


def zeros(x: Tensor) -> Tensor:
    """Make a buffer with a row for each sample."""
    return x.new_zeros(len(x), 3)


def constrain(x: Tensor) -> None:
    """Write to views that are made without gradients, and read them."""
    last = x[-1:]
    last.fill_(0.5)
    x.view(-1)[:1].copy_(last.flatten()[:1])
    torch._foreach_mul_([last, *x[:-1].split(1)], 0.5)
    x[0].add_(last.sum().item())


# In front of the operations of a model; f [N, D]
WITHOUT_GRADIENTS: Dict[str, Callable[[Module, Tensor], None]] = {
    "row-of-a-weight": lambda m, f: constrain(m.f.weight),
    "entries-of-a-parameter": lambda m, f: m.w[:1].clamp_(max=0.1),
    "view-read-after-its-base": lambda m, f: m.w[:1].add_(m.w.view(-1).abs_().max()),
    "buffer-of-a-view": lambda m, f: m.state.copy_(m.w[:2].fill_(0.5)),
    "rows-of-samples": lambda m, f: f[:, 0].clamp_(max=0.1),
    "read-as-a-number": lambda m, f: f[:, 1:].mul_(f[:, :1].fill_(0.5)).sum().item(),
    "parts": lambda m, f: [x.mul_(0.5) for x in f.split(1, 1)][0].max(),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_views_written_to_without_gradients(name: str) -> None:
    """PyTorch does not tell what they come from; nobody needs to know."""

    def forward(m: Module, x: Tensor) -> Tensor:
        f = m.f(x)
        with torch.no_grad():
            WITHOUT_GRADIENTS[name](m, f)
        return f * m.w + m.state.sum()

    torch.manual_seed(0)
    state, (x,) = nn.Buffer(torch.zeros(2, dtype=F64)), randn(D)()
    model = Lambda(forward, f=nn.Linear(D, D), w=param(D), state=state).to(F64)
    plain = deepcopy(model)
    losses = plain(x).square().sum(1)
    with backpack(BatchGrad()):
        extend(model)(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p, q)
        assert_agrees(p.grad_batch, jacobian(losses, [q])[0])
    assert torch.equal(model.state, plain.state)


# Rows of a buffer into which not every sample is written: z [N, 3] of x [N, D]
ENTERED: Dict[str, Callable[[Module, Tensor, Tensor], Tensor]] = {
    "mask": lambda m, x, has: entered(zeros(x), has, m.a(x[has])),
    "index": lambda m, x, has: entered(zeros(x), places_of(has), m.a(x[has])),
    "index-add": lambda m, x, has: zeros(x).index_add(0, places_of(has), m.a(x[has])),
    "index-copy": lambda m, x, has: zeros(x).index_copy(0, places_of(has), m.a(x[has])),
    "scatter": lambda m, x, has: zeros(x).scatter(
        0, has.nonzero().expand(-1, 3), m.a(x[has])
    ),
    "in-front": in_front,
    "learned-index": lambda m, x, has: zeros(x).index_put(
        (places_of(has),), m.l.expand(int(has.sum()), -1)
    )
    + m.a(x),
    "learned-index-of-all": lambda m, x, has: m.a(x).index_put(
        (places_of(has),), m.l.expand(int(has.sum()), -1)
    ),
    "learned-index-add": lambda m, x, has: zeros(x).index_add(
        0, places_of(has), m.l.expand(int(has.sum()), -1)
    )
    * m.a(x),
    "learned-scatter": lambda m, x, has: zeros(x).scatter_add(
        0, places_of(has)[:, None].expand(-1, 3), m.l.expand(int(has.sum()), -1)
    )
    + m.a(x),
    "learned-mask": lambda m, x, has: m.a(x).masked_scatter(
        has[:, None].expand(-1, 3), m.l.expand(int(has.sum()), -1)
    ),
    "learned-written": lambda m, x, has: entered(
        m.a(x).clone(), has, m.l.expand(int(has.sum()), -1)
    ),
    "learned": lambda m, x, has: entered(m.l.repeat(len(x), 1), has, m.a(x[has])),
    "one-hot": lambda m, x, has: placed(places_of(has).tolist(), len(x))
    @ m.a(x[places_of(has).tolist()]),
    "one-hot-of-data": lambda m, x, has: torch.eye(len(x)).to(x)[:, has.nonzero()[:, 0]]
    @ m.a(x[has]),
    "one-hot-of-places": lambda m, x, has: dispatched(x, has).mT @ m.a(x[has]),
    "one-hot-turned": lambda m, x, has: (m.a(x[has]).mT @ dispatched(x, has)).mT,
    "one-hot-twice": lambda m, x, has: torch.eye(len(x)).to(x).flip(0)
    @ (dispatched(x, has).mT @ m.a(x[has])).flip(0),
    "one-hot-turned-around": lambda m, x, has: (
        m.a(x[has]).mT @ dispatched(x, has).flip(1)
    ).mT.flip(0),
    "factors-of-zero": lambda m, x, has: (0 * dispatched(x, has)).mT @ m.a(x[has]),
    "dispatched": lambda m, x, has: torch.einsum(
        "kn,ki->ni", dispatched(x, has), m.a(torch.mm(dispatched(x, has), x))
    ),
    "back-and-forth": lambda m, x, has: entered(zeros(x), places_of(has), m.a(x[has]))
    .flip(0)
    .flip(0),
    "layer-of-all-then-of-each": lambda m, x, has: torch.stack(
        [z.exp() * m.l for z in m.k(entered(zeros(x), places_of(has), m.a(x[has])))]
    ),
    "row-by-row": lambda m, x, has: torch.stack(
        [m.a(z) if there else zeros(x)[0] for z, there in zip(x, has)]
    ),
    "whole-numbers": lambda m, x, has: m.e(
        entered(torch.zeros(len(x), dtype=int), has, (x[has, 0] > 0).long())
    )
    + 0 * m.c(x),
    "whole-numbers-by-index": lambda m, x, has: m.e(
        entered(torch.full((len(x),), 2), places_of(has), (x[has, 0] > 0.5).long() + 3)
    )
    + 0 * m.c(x),
}
# Which samples are there
THERE = {
    "one": [0, 1, 0, 0],
    "the-last": [0, 0, 0, 1],
    "two": [1, 0, 0, 1],
    "all-but-one": [1, 1, 0, 1],
    "none": [0, 0, 0, 0],
    "one-of-two": [0, 1],
    "none-of-one": [0],
    "all": [1, 1, 1, 1],
}


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("name", ENTERED)
def test_rows_that_no_sample_has_entered(name: str, there: str) -> None:
    """They are of the sample whose loss they reach."""
    if there.startswith("none") and name in ("learned", "row-by-row"):
        pytest.skip("There is a parameter without a use.")

    def forward(m: Module, x: Tensor, has: Tensor) -> Tensor:
        return m.n(ENTERED[name](m, x, has).sin()) + m.c(x)[:, :2]

    def model() -> Module:
        layers = {"a": nn.Linear(D, 3), "n": nn.Linear(3, 2), "c": nn.Linear(D, 3)}
        own = {"l": param(3)} if name.startswith("learned") else {}
        if name.startswith("layer"):
            own = {"l": param(3), "k": nn.Linear(3, 3)}
        own = {"e": nn.Embedding(6, 3)} if name.startswith("whole") else own
        if name.startswith("whole"):
            del layers["a"]
        return Lambda(forward, **layers, **own)

    has = torch.tensor(THERE[there]) > 0
    assert_right(Row(model, lambda: (randn(D)()[0][: len(has)], has)))


def slots(scores: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Give each token a place in the buffer of its expert: which, mask, and rank."""
    chosen = scores.argmax(1)
    mask = F.one_hot(chosen, scores.shape[1])
    rank = (mask.cumsum(0) * mask).sum(1) - 1
    return chosen, mask.to(scores), F.one_hot(rank, len(scores)).to(scores)


def normalized(p: Tensor) -> Tensor:
    """Weigh the two best experts of each token, whose places are side by side."""
    first, second = slots(p), slots(p - 9 * slots(p)[1])
    gates = [torch.einsum("se,se->s", p, mask) for _, mask, _ in (first, second)]
    parts = [
        torch.einsum("se,sc->sec", (gate / sum(gates))[:, None] * mask, place)
        for gate, (_, mask, place) in zip(gates, (first, second))
    ]
    return torch.cat(parts, 2)


def placed_by(p: Tensor) -> Tensor:
    """Tell which token is in which place."""
    _, mask, place = slots(p)
    return mask[:, :, None] * place[:, None]


# What tokens [S, E] of all samples weigh what is in the places of experts: [S, E, C]
WEIGHED: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "product": lambda m, p: p[:, :, None] * placed_by(p),
    "two": lambda m, p: normalized(p),
    "filled": lambda m, p: p[:, :, None].masked_fill(placed_by(p) == 0, 0.0),
    "chosen": lambda m, p: p[:, :, None].where(
        placed_by(p) > 0, torch.zeros_like(p[0, 0])
    ),
    "rectified": lambda m, p: (p[:, :, None] - 1 + placed_by(p)).relu(),
    "written": lambda m, p: torch.zeros_like(placed_by(p)).index_put(
        placed_by(p).nonzero(as_tuple=True), p.amax(1)
    ),
    "learned": lambda m, p: p[:, :, None] * m.k * placed_by(p),
}
COMBINED: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda weights, h: torch.einsum("sec,ecd->sd", weights, h),
    "matmul": lambda weights, h: weights.flatten(1) @ h.flatten(0, 1),
    "linear": lambda weights, h: F.linear(h.flatten(0, 1).mT, weights.flatten(1)).mT,
    "tensordot": lambda weights, h: torch.tensordot(weights, h, 2),
    "three-factors": lambda weights, h: torch.einsum(
        "sec,ecd,dk->sk", weights, h, torch.eye(h.shape[2]).to(h)
    ),
    "chain": lambda weights, h: torch.linalg.multi_dot(
        [weights.flatten(1), h.flatten(0, 1), torch.eye(h.shape[2]).to(h)]
    ),
    "addmm": lambda weights, h: torch.addmm(
        torch.ones_like(h[0, 0]), weights.flatten(1), h.flatten(0, 1)
    ),
}


def routed(m: Module, x: Tensor, weights: Callable, combine: Callable) -> Tensor:
    """Send tokens of all samples to the places of experts, and back: [N, T, 2]."""
    p = m.g(x.flatten(0, 1)).softmax(1)
    taken = (weights(m, p) != 0).to(x)
    buffer = torch.einsum("sec,sd->ecd", taken, x.flatten(0, 1))
    h = torch.einsum("ecd,edi->eci", buffer, m.w).sin()
    return combine(weights(m, p), h).view(*x.shape[:2], -1)


@pytest.mark.parametrize("combine", COMBINED)
@pytest.mark.parametrize("name", WEIGHED)
def test_routed_by_factors_of_zero(
    name: str, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros that nothing learned has made keep samples apart, also where they meet."""
    forward = partial(routed, weights=WEIGHED[name], combine=COMBINED[combine])
    own = {"k": partial(param, 3, 1)} if name == "learned" else {}

    def model() -> Module:
        parameters = {name: make() for name, make in own.items()}
        return Lambda(forward, g=nn.Linear(D, 3), w=param(3, D, 2), **parameters)

    def find(trial: Trial) -> Any:
        tried.append(trial.masks.is_product)
        return find_by_trying(trial)

    tried, find_by_trying = [], Trial.find
    monkeypatch.setattr(Trial, "find", find)
    assert_right(Row(model, lambda: (randn(2, D)()[0],)))
    # zeros are read, and not tried, but for what has a third operand
    assert any(tried) is (combine == "addmm")


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_zeros_inside_of_a_checkpoint(inside: bool) -> None:
    """Nothing is computed once more for them: a message says that nobody knows."""

    def forward(m: Module, x: Tensor) -> Tensor:
        options = {"weights": WEIGHED["product"], "combine": COMBINED["matmul"]}
        if inside:
            return checkpoint(routed, m, x, use_reentrant=False, **options)
        return routed(m, x, **options)

    row = Row(
        lambda: Lambda(forward, g=nn.Linear(D, 3), w=param(3, D, 2)),
        lambda: (randn(2, D)()[0],),
    )
    if inside:
        assert_refused(row, "BatchGrad", "samples have met in .* checkpoint")
    else:
        assert_right(row)


@pytest.mark.parametrize("combine", COMBINED)
def test_zeros_that_are_learned(combine: str) -> None:
    """They do not: their derivatives bring samples together."""

    def forward(m: Module, x: Tensor) -> Tensor:
        m.z.data = torch.eye(N, dtype=F64)
        weights = m.g(x).sigmoid()[:, :, None] * m.z[:, None]  # [N, 1, N]
        return COMBINED[combine](weights, m.a(x)[None])

    def model() -> Module:
        return Lambda(forward, g=nn.Linear(D, 1), a=nn.Linear(D, 3), z=param(N, N))

    row = Row(model, randn(D), alone=False)
    assert_refused(row, "BatchGrad", "samples have met")


# How tokens [S, D] are sent to places [E, S, D] of experts, and taken from there
SENT: Dict[str, Tuple[Callable, Callable]] = {
    "einsum": (
        lambda h, chosen, rank, weights: torch.einsum(
            "sec,sd->ecd", (weights != 0).to(h), h
        ),
        lambda q, chosen, rank, weights: torch.einsum("sec,ecd->sd", weights, q),
    ),
    "index": (
        lambda h, chosen, rank, weights: h.new_zeros(3, len(h), h.shape[1]).index_put(
            (chosen, rank), h
        ),
        lambda q, chosen, rank, weights: q[chosen, rank] * weights.sum((1, 2))[:, None],
    ),
    "matrix": (
        lambda h, chosen, rank, weights: (
            (weights != 0).to(h).flatten(1).mT @ h
        ).unflatten(0, (3, len(h))),
        lambda q, chosen, rank, weights: weights.flatten(1) @ q.flatten(0, 1),
    ),
}


@pytest.mark.parametrize("lone", [[], [1], [0], [3], [0, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", SENT)
def test_rows_of_nobody_in_places(name: str, learned: bool, lone: List[int]) -> None:
    """What is empty is not of those beside it, nor of those who could have met it."""
    send, take = SENT[name]

    def forward(m: Module, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.block_diag(*edges) @ m.a(x).flatten(0, 1)
        if learned:
            h = (m.k[: len(h), : len(h)] * ones(x)) @ h
        p = m.g(h).softmax(1)
        chosen, mask, place = slots(p)
        weights = p.amax(1)[:, None, None] * mask[:, :, None] * place[:, None]
        args = chosen, place.argmax(1), weights
        y = take(m.e(send(h, *args)).tanh(), *args)
        return m.o(y).view(*x.shape[:2], -1)

    def model() -> Module:
        layers = {"a": nn.Linear(D, D), "g": nn.Linear(D, 3), "e": nn.Linear(D, D)}
        own = {"k": param(3 * N, 3 * N)} if learned else {}
        return Lambda(forward, o=nn.Linear(D, 2), **layers, **own)

    edges = torch.ones(N, 3, 3, dtype=F64)
    edges[lone] = 0.0
    edges[1, 0] = 0.0
    row = Row(
        model,
        lambda: (randn(3, D)()[0], edges),
        quantities=["BatchGrad", "DiagGGNExact"],
        alone=False,
    )
    assert_right(row)


def written_in_slices(blocks: Tensor) -> Tensor:
    """Write blocks [N, T, T] to the diagonal of a matrix."""
    t = blocks.shape[1]
    whole = blocks.new_zeros(len(blocks) * t, len(blocks) * t)
    for n, block in enumerate(blocks):
        whole[n * t : (n + 1) * t, n * t : (n + 1) * t] = block
    return whole


def ones(x: Tensor) -> Tensor:
    """Make a mask by which tokens [N, T, *] meet those of their sample."""
    return torch.block_diag(*x.new_ones(len(x), x.shape[1], x.shape[1]))


# What weighs tokens, of scores [N, T, T]: a matrix that is zero between samples
BLOCKS: Dict[str, Callable[[Tensor], Tensor]] = {
    "slices": written_in_slices,
    "blocks": lambda scores: torch.block_diag(*scores),
    "mask": lambda scores: scores.flatten(0, 1).repeat(1, len(scores)) * ones(scores),
}
# ... and may be zero within one, by chance, or since it has just been made
WITHIN: Dict[str, Callable[[Tensor], Tensor]] = {
    "nowhere": torch.sin,
    "everywhere": lambda scores: scores - scores.detach(),
    "at-places": lambda scores: scores * (scores > 0),
    "straight-through": lambda scores: (
        (scores > 0).to(scores) + scores.sin() - scores.sin().detach()
    ),
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("between", BLOCKS)
def test_zeros_within_samples(within: str, between: str) -> None:
    """They may be learned: it matters which zeros keep samples apart."""

    def forward(m: Module, x: Tensor) -> Tensor:
        weights = BLOCKS[between](WITHIN[within](m.q(x) @ m.k(x).mT))
        return (weights @ m.v(x).flatten(0, 1)).view(*x.shape[:2], -1).sin()

    row = Row(
        lambda: Lambda(forward, **{name: nn.Linear(D, 3) for name in "qkv"}),
        randn(2, D),
        quantities=["BatchGrad", "DiagGGNExact"],
    )
    assert_right(row)


# Entries of tokens [N, T] that are looked up once: [N, D]
LOOKED_UP_ONCE: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "table": lambda m, ids: taken_by(m.e, *ids.unique(return_inverse=True)),
    "layers": lambda m, ids: taken_by(
        lambda u: m.a(m.e(u).tanh()), *torch.unique(ids, return_inverse=True)
    ),
    "counted": lambda m, ids: taken_by(
        m.e, *ids.unique(return_inverse=True, return_counts=True)[:2]
    ),
    "consecutive": lambda m, ids: taken_by(
        m.e, *ids.unique_consecutive(return_inverse=True)
    ),
}


def taken_by(rows: Callable[[Tensor], Tensor], u: Tensor, places: Tensor) -> Tensor:
    """Take what was computed for each token that occurs."""
    return rows(u)[places].sin().prod(1)


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("name", LOOKED_UP_ONCE)
def test_tokens_that_are_looked_up_once(name: str, batch: int) -> None:
    """Where a token's row is taken from is the sample's, whoever has it as well."""
    layers: Dict[str, Callable] = {"e": lambda: nn.Embedding(5, D)}
    if name == "layers":
        layers["a"] = lambda: nn.Linear(D, D)

    def model() -> Module:
        return Lambda(LOOKED_UP_ONCE[name], **{k: f() for k, f in layers.items()})

    assert_right(Row(model, tokens(4, batch=batch)))


def test_rows_of_nobody_that_are_taken_alone() -> None:
    """They are refused where a gradient reaches them."""

    def forward(m: Module, x: Tensor) -> Tensor:
        h, taken = m.a(x).clone(), torch.tensor([True, False, True])
        h[taken] = m.p
        return m.b(m.b(h).tanh()[taken])

    layers = {"a": nn.Linear(D, D), "b": nn.Linear(D, D), "p": param(D)}
    row = Row(
        lambda: Lambda(forward, **layers), randn(D, batch=3), says="no sample has"
    )
    assert_refused(row, "BatchGrad")


def test_total_of_rows_of_nobody() -> None:
    """They are not of the only sample that there is by chance, with experts' places."""

    def forward(m: Module, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), D, dtype=F64)
        rows[2] = m.a(x)[2]
        return m.b(rows).square().sum()

    layers = {"a": nn.Linear(D, D), "b": nn.Linear(D, D)}
    row = Row(
        lambda: Lambda(forward, **layers), randn(D, batch=3), says="no sample has"
    )
    assert_refused(row, "BatchGrad")


@pytest.mark.parametrize("ext", COLUMNS, ids=lambda ext: ext.__name__)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["in-order", "moved"])
def test_columns_that_reach_rows_of_nobody(order: List[int], ext: type) -> None:
    """They count, or are refused, although the gradient is zero there."""

    def forward(m: Module, x: Tensor) -> Tensor:
        h, padded = m.a(x)[order], torch.zeros(3, 2, D, dtype=F64)
        padded[:, 0], padded[1, 1] = h[:, 0], h[1, 1]
        return m.n(padded)

    model = Lambda(forward, a=nn.Linear(D, D), n=nn.LayerNorm(D)).to(F64)
    x, loss = randn(2, D, batch=3)()[0], extend(nn.MSELoss(reduction="sum"))
    bias = extend(model).n.bias
    refused = pytest.raises(NotImplementedError, match="no sample has entered")
    with nullcontext() if order == [0, 1, 2] else refused, backpack(ext()):
        out = model(x)
        loss(out, torch.zeros_like(out)).backward()
    if ext is DiagGGNExact and order == [0, 1, 2]:
        assert_agrees(bias.diag_ggn_exact, torch.full_like(bias, 12.0), "n.bias")


def test_rows_of_nobody_have_columns_of_their_own() -> None:
    """A sample's and one of nobody's may reach the same parameter."""

    def forward(m: Module, x: Tensor) -> Tensor:
        return torch.cat([m.p, m.a(x)[1:]]).cumsum(0).flip(0)

    model = extend(Lambda(forward, a=nn.Linear(D, D), p=param(1, D))).to(F64)
    x, loss = randn(D, batch=2)()[0], extend(nn.MSELoss(reduction="sum"))
    with backpack(DiagGGNExact()):
        loss(model(x), torch.zeros(2, D, dtype=F64)).backward()
    assert_agrees(model.p.diag_ggn_exact, torch.full_like(model.p, 4.0), "p")


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_other_factors_have_entered(count: int) -> None:
    """All are, where a constant has no zeros; in the next pass, it may have some."""

    def forward(m: Module, x: Tensor) -> Tensor:
        rows = m.factor @ m.a(x[:count])
        return rows if bool(m.factor.all()) else rows + m.c(x)

    model = extend(
        Lambda(forward, a=nn.Linear(D, 3), c=nn.Linear(D, 3), factor=param(3, count))
    ).to(F64)
    model.factor.requires_grad_(False)
    x = torch.randn(3, D, dtype=F64)
    for factor in (torch.ones(3, count), torch.eye(3)[:, :count]):
        model.factor.data = factor.to(F64)
        out = model(x)
    with backpack(BatchGrad()):
        out.square().sum().backward()
    (expected,) = jacobian(model(x).square().sum(1), [model.c.weight])
    assert_agrees(model.c.weight.grad_batch, expected, "c.weight")


# What is done to planes ``[1, 2, 5, 5]`` with a height and a width
OF_SIZES: Dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "nearest": lambda x, h, w: F.interpolate(x, size=(h, w)),
    "bilinear": lambda x, h, w: F.interpolate(x, size=(h, w), mode="bilinear"),
    "pool": lambda x, h, w: F.adaptive_avg_pool2d(x, (h, w)),
    "pad": lambda x, h, w: F.pad(x, (0, w, 0, h), value=1.0),
    "slice": lambda x, h, w: x[..., :h, :w],
    "narrow": lambda x, h, w: x.narrow(2, 0, h).narrow(3, 0, w),
    "repeat": lambda x, h, w: x.repeat(1, 1, h, w),
    "expand": lambda x, h, w: x[:, :, :1, :1].expand(1, 2, h, w),
    "arange": lambda x, h, w: x[:, :, torch.arange(h)][..., torch.arange(w)],
}


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("name", OF_SIZES)
def test_sizes_that_are_read_from_samples(name: str, of_data: bool) -> None:
    """What is made of a table, or of a sample, with sizes of a sample is of it."""

    def forward(m: Module, x: Tensor, sizes: Tensor) -> Tensor:
        planes = [m.a(row)[None] if of_data else m.a for row in x]
        made = [OF_SIZES[name](y, *size) for y, size in zip(planes, sizes)]
        rows = [y.sin().sum((0, 2, 3)) * row.mean() for y, row in zip(made, x)]
        return m.b(torch.stack(rows))

    first = nn.Linear(5, 5) if of_data else param(1, 2, 5, 5)
    layers = {"a": first, "b": nn.Linear(2, 3)}
    model = extend(Lambda(forward, **layers)).to(F64)
    x = torch.randn(3, 2, 5, 5, dtype=F64)
    sizes = torch.tensor([[4, 4], [1, 3], [2, 5]])
    with backpack(BatchGrad()):
        model(x, sizes).square().sum().backward()
    losses = model(x, sizes).square().sum(1)
    for p in model.parameters():
        assert_agrees(p.grad_batch, jacobian(losses, [p])[0])


@pytest.mark.parametrize("sizes", [[3, 3, 3], [2, 4, 1]], ids=str)
@pytest.mark.parametrize("kind", ["bool", "infinite", "least"])
def test_masks_of_packed_rows(
    kind: str, sizes: List[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read, and not tried, in each pass: who attends to another is refused."""
    own = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    apart = own == own[:, None]

    def forward(m: Module, x: Tensor) -> Tensor:
        q, k, v = m.a(x[own, x.shape[1] - 1 - torch.arange(len(own)) % 4]).chunk(3, -1)
        mask = m.mask
        if kind != "bool":
            least = -inf if kind == "infinite" else torch.finfo(F64).min
            mask = torch.zeros(mask.shape, dtype=F64).masked_fill(~mask, least)
        rows = F.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0]
        return x.new_zeros(len(x), D).index_add(0, own, m.b(rows).sin())

    layers = {"a": nn.Linear(D, 3 * D), "b": nn.Linear(D, D)}
    model = extend(Lambda(forward, **layers)).to(F64)
    tries = []
    monkeypatch.setattr(Trial, "_run", lambda *args, **kwargs: tries.append(args))
    for mask in (apart, apart.tril(), apart):
        model.mask, x = mask, torch.randn(3, 4, D, dtype=F64)
        with backpack(BatchGrad()):
            model(x).square().sum().backward()
        losses = model(x).square().sum(1)
        for p in model.parameters():
            assert_agrees(p.grad_batch, jacobian(losses, [p])[0])
    assert not tries
    monkeypatch.undo()
    model.mask = apart | apart.roll(1, 1)
    with pytest.raises(NotImplementedError, match="samples have met in .*attention"):
        with backpack(BatchGrad()):
            model(x).square().sum().backward()


@pytest.mark.skipif(
    "enable_gqa" not in (F.scaled_dot_product_attention.__doc__ or ""),
    reason="This PyTorch has as many keys as queries.",
)
@pytest.mark.parametrize("batch", [1, N])
@pytest.mark.parametrize("heads", [1, 2])
def test_masks_of_grouped_heads(heads: int, batch: int) -> None:
    """Sequences of one sample each stay apart, whatever a mask leaves out."""

    def forward(m: Module, x: Tensor) -> Tensor:
        q = m.a(x).view(len(x), 3, 4, 2).transpose(1, 2)
        k = m.b(x).view(len(x), 3, heads, 2).transpose(1, 2)
        mask = torch.ones(3, 3).tril() > 0
        attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
        return attend(q, k, k.sin(), mask).flatten(1)

    layers = {"a": lambda: nn.Linear(D, 8), "b": lambda: nn.Linear(D, 2 * heads)}
    assert_right(
        Row(
            lambda: Lambda(forward, **{key: make() for key, make in layers.items()}),
            randn(3, D, batch=batch),
        )
    )


@torch.library.custom_op("backpack_test::picked", mutates_args=())
def picked(x: Tensor, mask: Tensor) -> Tensor:
    """Take what a mask picks."""
    return x[mask]


picked.register_autograd(
    lambda ctx, g: (g.new_zeros(ctx.shape).masked_scatter(ctx.mask, g), None),
    setup_context=lambda ctx, inputs, output: vars(ctx).update(
        shape=inputs[0].shape, mask=inputs[1][..., None]
    ),
)


def from_image(sample: Callable, z: Tensor, mask: Tensor) -> Tensor:
    """Take what a mask picks out of an image, by coordinates."""
    places = mask.nonzero().flip(1) * torch.tensor([2, 1], dtype=F64) - 1
    return sample(z.permute(2, 0, 1)[None], places[None, None], 1, 0, True)[0, :, 0].T


# What is picked of z [N, T, D] by a mask [N, T]: [K, D]
BY_MASK: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda z, mask: z[mask],
    "aten-index": lambda z, mask: torch.ops.aten.index.Tensor(z, [mask]),
    "masked-select": lambda z, mask: torch.masked_select(z, mask[..., None]).view(3, D),
    "aten-masked-select": lambda z, mask: torch.ops.aten.masked_select(
        z, mask[..., None].expand_as(z)
    ).view(3, D),
    "custom-op": picked,
    "grid": lambda z, mask: from_image(torch.grid_sampler, z, mask),
    "aten-grid": lambda z, mask: from_image(torch.ops.aten.grid_sampler_2d, z, mask),
    "where-in-vmap": lambda z, mask: torch.vmap(
        lambda a: torch.where(mask, a, a.flip(0)), in_dims=2, out_dims=2
    )(z)[[0, 1, 2], [0, 1, 0]],
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", BY_MASK)
def test_masks_of_the_next_pass(name: str, given: bool) -> None:
    """As many rows are picked, and others."""

    def forward(m: Module, x: Tensor, *masks: Tensor) -> Tensor:
        return m.b(BY_MASK[name](m.a(x), *masks or [m.mask]))

    layers = {"a": nn.Linear(D, D), "b": nn.Linear(D, 2)}
    model = extend(Lambda(forward, **layers)).to(F64)
    for places in ([1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 0, 1], [0, 1, 0, 0, 1, 1]):
        x, mask = torch.randn(3, 2, D, dtype=F64), torch.tensor(places).view(3, 2) > 0
        model.mask = mask
        with backpack(BatchGrad()):
            model(x, *[mask] * given).square().sum().backward()
        rows = model(x, *[mask] * given).square().sum(1)
        owners = mask.nonzero()[:, 0]
        if "vmap" in name:
            own = torch.arange(3)
            owners = own.where(mask[own, own % 2], 2 - own)
        losses = torch.stack([rows[owners == n].sum() for n in range(3)])
        for p in model.parameters():
            assert_agrees(p.grad_batch, jacobian(losses, [p])[0], name)


def test_token_beside_each_sample_in_a_loop() -> None:
    """As many rows as there are samples: a learned token, and those of one sample."""

    def forward(m: Module, x: Tensor) -> Tensor:
        each = [m.f(torch.cat([m.token, z]).tanh()).softmax(0) for z in x]
        return torch.stack([z.T @ z for z in each])

    def model() -> Module:
        return Lambda(forward, f=nn.Linear(D, D), token=param(1, D))

    assert_right(Row(model, randn(N - 1, D)))


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_several_results_of_rows_of_nobody(layer: Callable) -> None:
    """A mask that picks nothing in this batch: both results have their gradient."""

    def forward(m: Module, x: Tensor) -> Tensor:
        rows = x.new_full((len(x), 2, D), 0.1)
        some = (x[:, 0] > 1e9).nonzero()[:, 0]
        out, last = m.r(rows.index_put((some, some), m.f(x[some])))
        last = last[1] if isinstance(last, tuple) else last
        return (out.sum(1) + last[-1]) * x

    def model() -> Module:
        return Lambda(forward, r=layer(D, D, batch_first=True), f=nn.Linear(D, D))

    assert_right(Row(model, randn(D)))


@pytest.mark.parametrize("valid", [[[1, 0, 0], [0, 0, 0]], [[0, 0, 0], [1, 0, 1]]])
def test_windows_of_a_single_sample(valid: List[List[int]]) -> None:
    """Where one sample alone is there, rows of a window may be of two samples."""

    def inputs() -> Tensors:
        x = torch.randn(2, 3, D, dtype=F64)
        x[..., 0] = x[..., 0].abs() * (2 * torch.tensor(valid, device=x.device) - 1)
        return (x,)

    def forward(m: Module, x: Tensor) -> Tensor:
        is_valid = x[..., 0] > 0
        places = is_valid.nonzero(as_tuple=True)
        h = torch.zeros_like(x).index_put(places, m.a(x[is_valid]))
        odd = torch.cat([h.flatten(0, 1), h.new_zeros(len(x) * x.shape[1] % 2, D)])
        h = m.b(odd.view(-1, 2, D)).flatten(0, 1)[: len(x) * x.shape[1]]
        return m.c(h.reshape(x.shape)).sum(1)

    def model() -> Module:
        return Lambda(forward, a=nn.Linear(D, D), b=nn.Linear(D, D), c=nn.Linear(D, D))

    assert_right(Row(model, inputs))


# Constants with a row for each sample, in the type of the input
AS_TYPE: Dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: torch.full((len(x), 1), 0.3).to(x),
    "type-as": lambda x: torch.full((len(x), 1), 0.3).type_as(x),
    "copied": lambda x: torch.full((len(x), 1), 0.3, dtype=F64).to(x, copy=True),
    "numbers": lambda x: torch.ones(len(x), 1, dtype=int).to(x[:, 0]),
    "times-positions": lambda x: torch.full((len(x), 1), 0.3) * torch.arange(1).to(x),
    "of-noise-like-the-input": lambda x: 0 * torch.rand_like(x)[:, :1] + BUFFER.to(x),
    "later-changed": lambda x: torch.full((len(x), 1), 0.3).to(x).clamp(0.1, 0.9),
}
BUFFER = torch.ones(1)


@pytest.mark.parametrize("batch", [1, 2, N])
@pytest.mark.parametrize("name", AS_TYPE)
def test_constant_in_the_type_of_an_input(name: str, batch: int) -> None:
    """It does not depend on samples, and a layer has no use until they meet."""

    def forward(m: Module, x: Tensor) -> Tensor:
        return m.g((m.f(x) + m.p(AS_TYPE[name](x))).tanh())

    def model() -> Module:
        layers = {"f": nn.Linear(D, 3), "p": nn.Linear(1, 3), "g": nn.Linear(3, 2)}
        return Lambda(forward, **layers)

    assert_right(Row(model, lambda: (randn(D)()[0][:batch],)))


@pytest.mark.parametrize("loss", [F.hinge_embedding_loss, F.mse_loss])
@pytest.mark.parametrize("first", [0.9, 1.0])
def test_targets_among_the_inputs(first: float, loss: Callable) -> None:
    """A target that is none of those that matter says nothing of the next one."""

    def forward(m: Module, x: Tensor) -> Tensor:
        return torch.stack([loss(m.w[0].tanh(), z) for z in x])[:, None]

    def signs(scale: float) -> Callable[[], Tensors]:
        rows = torch.tensor([[1, -1], [-1, -1], [-1, 1], [1, 1]], dtype=F64)
        return lambda: (scale * rows,)

    def row(scale: float) -> Row:
        return Row(
            lambda: Lambda(forward, w=param(1, 2)),
            signs(scale),
            quantities=["BatchGrad"],
        )

    assert_right_or_refused(row(first))
    assert_right(row(1.0))


@pytest.mark.parametrize("shape", [(), (2,), (1, 2), (N, 1), (N, 2)])
def test_shared_in_a_target(shape: Tuple[int, ...]) -> None:
    """A target is made of a tensor with a gradient, like labels that are learned."""
    own = torch.linspace(0.4, 0.9, prod(shape), dtype=F64).view(shape).requires_grad_()

    def objective(f: Tensor, loss: Module) -> Tensor:
        return loss(f, real(f) * own)

    row = Row(lambda: nn.Linear(D, 2), randn(D), objective=objective)
    assert_right(row._replace(quantities=FIRST_ORDER))


@pytest.mark.parametrize("shape", [(), (3, 1), (3, D)])
def test_shared_scale_of_a_parameter(shape: Tuple[int, ...]) -> None:
    """A tensor with a gradient, held by the model as it is, scales a weight."""
    scale = torch.full(shape, 0.7, dtype=F64, requires_grad=True)

    def forward(m: Module, x: Tensor) -> Tensor:
        scaled = m.w * scale
        return m.f((x @ scaled.T).tanh())

    def model() -> Module:
        return Lambda(forward, w=param(3, D), f=nn.Linear(3, 2))

    assert_right(Row(model, randn(3, D), quantities=["BatchGrad", "DiagGGNExact"]))


@pytest.mark.parametrize("steps", [2, N + 1])
def test_shared_queries(steps: int) -> None:
    """A model gets what all samples share as an input, made of another tensor."""
    own = torch.randn(steps, D, dtype=F64, requires_grad=True)

    def forward(m: Module, x: Tensor, queries: Tensor) -> Tensor:
        return m.a(queries.expand(len(x), -1, -1), x, x)[0]

    def predict(m: Module, X: Tensors) -> Tensor:
        return m(X[0], own * 1)

    def model() -> Module:
        return Lambda(forward, a=nn.MultiheadAttention(D, 2, batch_first=True))

    row = Row(model, randn(3, D), predict=predict)
    assert_right(row._replace(quantities=["BatchGrad", "DiagGGNExact"]))


OF_TWO: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distance": lambda a, b: (a - b).abs(),
    "difference-over-steps": lambda a, b: (a[:, :-1] - b[:, 1:]).square(),
    "difference-of-functions": lambda a, b: a.tanh() - b.tanh(),
    "product": lambda a, b: a * b.exp(),
    "larger": torch.maximum,
    "chosen": lambda a, b: torch.where(a > 0, a, -b),
    "side-by-side": lambda a, b: torch.cat([a, b], 1).flip(1),
    "similarity": lambda a, b: F.cosine_similarity(a, b, -1)[..., None] * a,
    "products": lambda a, b: F.scaled_dot_product_attention(a, b, b),
}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", OF_TWO)
def test_function_of_two_inputs_with_gradients(name: str, t: int) -> None:
    """What nobody has watched, of two tensors that need gradients, keeps samples."""
    row = Row(
        lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)),
        lambda: (torch.randn(N, t, D, dtype=F64), torch.randn(N, t, D, dtype=F64)),
        predict=lambda m, X: m(OF_TWO[name](*[x.clone().requires_grad_() for x in X])),
    )
    assert_right(row)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("t", LENGTHS)
def test_features_of_another_model(t: int, graph: bool) -> None:
    """What one model has computed, time first, keeps its samples in the next one."""
    row = Row(
        lambda: Lambda(
            lambda m, x: None,
            body=Lambda(
                lambda m, x: (x.tanh() * m.s).transpose(0, 1),
                s=param(D) if graph else 2.0,
            ),
            head=Lambda(lambda m, h: (m.f(h) * m.w).sin().mean(0), **head()),
        ),
        randn(t, D),
    )

    assert_right(row._replace(predict=lambda m, X: m.head(m.body(*X))))


def test_jacobian_of_rows_in_another_order() -> None:
    """A sample's outputs may be anywhere among the rows of a model's output."""
    model = Lambda(
        lambda m, x: torch.cat([m.f(x), m.f(x.sin()).flip(0)]), f=nn.Linear(D, 2)
    ).to(F64)
    x = torch.randn(N, D, dtype=F64)
    params = list(model.parameters())
    expected = [jacobian(model(x[n : n + 1]), params) for n in range(N)]
    with backpack(BatchJacobian()):
        extend(model)(x).sum().backward()
    for p, *rows in zip(params, *expected):
        assert_agrees(p.jacobian, torch.stack(rows, 1), "Jacobian")


def head() -> Dict[str, Any]:
    """Make the parts of a model that gets features."""
    return {"f": nn.Linear(D, 3), "w": param(3)}


class Batch:
    """Inputs as attributes of an object."""

    def __init__(self, **inputs: Any):
        """Store the inputs."""
        vars(self).update(inputs)

    def __getitem__(self, name: str) -> Any:
        """Look up an input, as in a dictionary."""
        return vars(self)[str(name)]


def nested(more: List[Tensor], **inputs: Tensor) -> Batch:
    """Make an object that holds another one."""
    return Batch(more=Batch(**{"0": more[0]}), **inputs)


@pytest.mark.parametrize("container", [dict, Batch, nested])
@pytest.mark.parametrize("t", LENGTHS)
def test_several_inputs(t: int, container: Callable) -> None:
    """Inputs of all kinds hold samples, by keyword and inside of containers, too."""

    def forward(m: Module, x: Any, scale: float = 1.0) -> Tensor:
        h = m.e(x["ids"]) + m.f(x["more"][0]) * m.w
        h = h.masked_fill(~x["mask"][..., None], 0.0) * scale
        return m.g(h.tanh()).sum(1)

    row = Row(
        lambda: Lambda(
            forward,
            e=nn.Embedding(5, D),
            f=nn.Linear(2, D),
            g=nn.Linear(D, 3),
            w=param(D),
        ),
        lambda: (
            torch.randint(5, (N, t)),
            torch.randn(N, t, 2, dtype=F64),
            torch.rand(N, t) > 0.3,
        ),
        predict=lambda m, X: m(
            x=container(ids=X[0], more=[X[1]], mask=X[2]), scale=0.5
        ),
    )
    assert_right(row)


@pytest.mark.parametrize(
    "inputs", ["shared-mask", "shared-table", "number", "first-number"]
)
@pytest.mark.parametrize("t", LENGTHS)
def test_inputs_that_samples_share(inputs: str, t: int) -> None:
    """An input that is no batch, although it may be as long as one, is a constant."""
    torch.manual_seed(5)
    shared = {
        "shared-mask": torch.randn(t, t, dtype=F64),
        "shared-table": torch.randn(t, t, dtype=F64).tanh(),
        "number": torch.tensor(0.5, dtype=F64),
        "first-number": torch.tensor([0.5], dtype=F64),
    }[inputs]
    row = Row(
        lambda: Lambda(
            lambda m, x, shared: (plain(m, x) @ x.mT * shared).softmax(-1) @ x,
            f=nn.Linear(D, D),
            g=nn.LayerNorm(D),
            p=param(D),
        ),
        randn(t, D),
        predict=lambda m, X: (
            m(shared=shared, x=X[0]) if inputs == "first-number" else m(*X, shared)
        ),
        says="another input" if inputs == "first-number" else "axis|sample|batch|mul",
    )
    assert_right_or_refused(row)


def written(x: Tensor, positions: Tensor) -> Tensor:
    """Add positions in place, to one half of the features by another view."""
    x = x.clone()
    x[..., :2] += positions[..., :2]
    x[..., 2:].add_(positions[..., 2:])
    return x


def filled(x: Tensor, of_view: bool = False) -> Tensor:
    """Write something to a view, and return its base; or the other way round."""
    y = torch.zeros_like(x)
    view = y[:]
    (y if of_view else view).copy_(x)
    return view if of_view else y


# Parameters, and what they do: the samples have no gradient where they meet what is
# computed from an input that all samples share, numbers [T, D]
MEETS_SHARED: Dict[str, Tuple[str, Callable]] = {
    "sum": ("f", lambda m, x, s: x + m.f(s)),
    "first-operand": ("p", lambda m, x, s: torch.mul(m.p * s, x)),
    "layers-of-the-table": ("fg", lambda m, x, s: x + m.g(m.f(s.tanh()))),
    "lookup": ("e", lambda m, x, s: x + m.e(s.abs().long() % 5).sum(-2)),
    "gathered-rows": ("e", lambda m, x, s: x + m.e.weight[s[:, 0].abs().long() % 5]),
    "einsum": ("p", lambda m, x, s: torch.einsum("ntd,td->ntd", x, m.p * s)),
    "product": ("f", lambda m, x, s: x @ m.f(s).mT @ s),
    "concatenation": (
        "f",
        lambda m, x, s: torch.cat([x, m.f(s).expand(len(x), -1, -1)], 1),
    ),
    "stack": ("f", lambda m, x, s: torch.stack([x, m.f(s).expand_as(x)], 1)),
    "in-place": ("f", lambda m, x, s: written(x, m.f(s))),
    "view": ("f", lambda m, x, s: x * m.f(s.view(1, *s.shape)).view_as(s)),
    "modified": ("f", lambda m, x, s: x * m.f(s.clone().mul_(2).t().t())),
    "picked": ("f", lambda m, x, s: m.f(s)[x[..., 0].abs().long() % len(s)]),
    "broadcast": (
        "f",
        lambda m, x, s: sum(torch.broadcast_tensors(x, m.f(s))),
    ),
    "written-to-a-view": ("f", lambda m, x, s: x + filled(m.f(s))),
    "view-before-writing": ("f", lambda m, x, s: x + filled(m.f(s), of_view=True)),
    "in-place-on-shared": ("f", lambda m, x, s: m.f(s).expand_as(x).clone().add_(x)),
    "module-of-two": ("t", lambda m, x, s: x * m.t(s)[0]),
    "both": ("f", lambda m, x, s: m.f(x) + m.f(s)),
}
# Here nothing has one, or what is shared has none
GIVEN_SHARED: Dict[str, Tuple[str, Callable]] = {
    "no-gradient": ("f", lambda m, x, s: m.f(x * s.sigmoid())),
    "mask-without-gradient": (
        "f",
        lambda m, x, s: m.f((x @ x.mT + s @ s.T).softmax(-1) @ x),
    ),
    "mask": ("f", lambda m, x, s: (m.f(x) @ x.mT + s @ s.T).softmax(-1) @ x),
    "stack-without-gradient": (
        "f",
        lambda m, x, s: m.f(torch.stack([x, s.expand_as(x)], 1)),
    ),
    "positions": ("f", lambda m, x, s: m.f(x) * (s.cumsum(0) + 1)),
}


class Smoothed(Module):
    """Mixes the positions of each sample by a matrix that all share."""

    def __init__(self) -> None:
        """Create the layer."""
        super().__init__()
        self.o = nn.Linear(D, 3)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        """Mix ``[N, T, D]`` by ``[T, T]``, and map the features."""
        return self.o(a @ x)


class SmoothedBy(Smoothed):
    """Takes the matrix first."""

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        """Do the same."""
        return super().forward(x, a)


# How the model is called; and whether nothing else than samples come first
SHARED_OR_NOT: Dict[str, Tuple[type, Callable, Optional[str]]] = {
    "second": (Smoothed, lambda m, x, a: m(x, a), None),
    "by-keywords": (Smoothed, lambda m, x, a: m(x=x, a=a), None),
    "first": (SmoothedBy, lambda m, x, a: m(a, x), "return them along axis 0"),
    "keyword-first": (Smoothed, lambda m, x, a: m(a=a, x=x), "a call by keywords"),
    "keywords-turned": (SmoothedBy, lambda m, x, a: m(x=x, a=a), "a call by keywords"),
}


@pytest.mark.parametrize("name", SHARED_OR_NOT)
def test_what_samples_share_comes_first(name: str) -> None:
    """What is not given in front may be shared; what is, is refused where it shows."""
    kind, call, says = SHARED_OR_NOT[name]
    shared = torch.randn(N + 2, N + 2, dtype=F64)
    row = Row(kind, randn(N + 2, D), predict=lambda m, X: call(m, *X, shared))
    if says is None:
        assert_right(row)
    else:
        assert_refused(row, "BatchGrad", says)


@pytest.mark.parametrize("axis", ["none", "length-1"])
@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", [*MEETS_SHARED, *GIVEN_SHARED])
def test_what_samples_share_after_the_first_input(name: str, t: int, axis: str) -> None:
    """What all samples share is no batch, or refused if it may be one by its length."""
    torch.manual_seed(5)
    shared = torch.randn(t, D, dtype=F64)
    parts, function = {**MEETS_SHARED, **GIVEN_SHARED}[name]

    def forward(m: Module, x: Tensor, shared: Tensor, same: Tensor) -> Tensor:
        return m.o(function(m, same, shared.view(t, D)))

    def model() -> Lambda:
        own = {"f": nn.Linear(D, D), "g": nn.LayerNorm(D), "e": nn.Embedding(5, D)}
        own.update(p=param(D), t=Lambda(lambda m, x: (x * m.p, x + m.p), p=param(D)))
        return Lambda(forward, o=nn.Linear(D, 3), **{name: own[name] for name in parts})

    row = Row(
        model,
        randn(t, D),
        predict=lambda m, X: m(*X, shared if axis == "none" else shared[None], *X),
    )
    if t == N and axis == "none" and name in MEETS_SHARED:
        says = "samples have met in .* if all samples share it, give it an axis"
        assert_refused(row, "BatchGrad", says)
        assert_refused(row, "DiagGGNExact", says)
    else:
        assert_right(row)


@pytest.mark.parametrize("keep", [True, False])
def test_first_input_that_is_only_asked(keep: bool) -> None:
    """The next input holds the samples, if the first one enters nothing."""

    def forward(m: Module, mask: Tensor, x: Tensor) -> Tensor:
        x = x - x.mean(0)  # without a gradient, samples may meet
        return m.f(x) if mask.all() else m.f(x * mask)

    masks = torch.ones(N, D) if keep else torch.eye(N, D)
    row = Row(lambda: Lambda(forward, f=nn.Linear(D, 3)), randn(D), alone=False)
    row = row._replace(predict=lambda m, X: m(masks.to(X[0]), *X))
    model = compute(row, ["BatchGrad"])
    assert_agrees(model.f.weight.grad_batch.sum(0), model.f.weight.grad, "sum")
    assert model.f.weight.grad_batch.flatten(1).any(1).all()


@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExact"])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    "mix",
    [
        lambda x, source, to: torch.zeros_like(x).index_add(0, to, x[source]),
        lambda x, source, to: (x.mT @ torch.ones_like(x)).mT[source % D],
    ],
    ids=["sent", "multiplied"],
)
def test_mixed_by_another_input(mix: Callable, rounds: int, quantity: str) -> None:
    """Rows without a gradient that were mixed are not those of what has mixed them."""

    def forward(m: Module, x: Tensor, edges: Tensor) -> Tensor:
        x = x - x.mean(0)  # without a gradient, samples may meet
        for _ in range(rounds):
            x = mix(x, *edges[:2])
        return m.f(x)

    edges = torch.arange(N).repeat(N, 2)  # from each row to itself, and to the next
    edges[1, :N] = edges[1, :N].roll(1)
    row = Row(
        lambda: Lambda(forward, f=nn.Linear(D, 3)),
        randn(D),
        predict=lambda m, X: m(*X, edges),
    )
    assert_refused(row, quantity, "samples have met in .*, or mix them")


@pytest.mark.parametrize("first", [True, False])
def test_same_shapes_with_and_without_another_input(first: bool) -> None:
    """What was found of an operation does not stand for other inputs' samples."""
    torch.manual_seed(5)
    z = torch.randn(N, N, D, dtype=F64)

    def row(forward: Callable, **options: Any) -> Row:
        return Row(lambda: Lambda(forward, f=nn.Linear(D, D)), randn(N, D), **options)

    own = row(lambda m, x: (x + m.f(x[:, 0])).transpose(0, 1), alone=False)
    shared = row(lambda m, x, s: x + m.f(s), predict=lambda m, X: m(*X, z[0]))
    for _ in range(2):
        if not first:
            assert_right(own)
        assert_refused(shared, "BatchGrad", "if all samples share it")
        first = False


def test_samples_in_two_inputs_that_a_mask_packs() -> None:
    """A second input holds samples, of which a mask takes some."""
    row = Row(
        lambda: Lambda(
            lambda m, x, z: torch.zeros_like(z).masked_scatter(
                z > 0, x[z > 0] * z[z > 0] + m.f(z)[z > 0]
            ),
            f=nn.Linear(D, D),
        ),
        randn(3, D),
        predict=lambda m, X: m(X[0], X[0].flip(1)),
    )
    assert_right(row)


def put(m: Module, x: Tensor, c: Tensor, how: str) -> Tensor:
    """Put rows of a table to the places of each class."""
    out = m.f(x)
    for e in range(3):
        if how == "mask":
            out = out + (c == e)[..., None] * m.w[e]
        elif how == "getitem":
            out[c == e] += m.w[e]
        elif how == "where":
            out = out.index_put(torch.where(c == e), m.w[e], accumulate=True)
        else:
            i, j = (c == e).nonzero().unbind(1)
            out = out.index_put((i, j), m.w[e].expand(len(i), -1), accumulate=True)
    return out


PICKS: Dict[str, Callable] = {
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: (-x).argmin(-1),
    "topk": lambda x: x.topk(1, -1).indices[..., 0],
    "max": lambda x: x.max(-1)[1],
    "sort": lambda x: x.sort(-1, descending=True)[1][..., 0],
    "hit": lambda x: (x >= x.amax(-1, keepdim=True))
    .nonzero()[:, -1]
    .view(x.shape[:-1]),
    "hit-by-where": lambda x: torch.where(x == x.amax(-1, keepdim=True))[2].view(-1, 3),
    "of-two": lambda x: x[..., :2].argmax(-1),
    "of-integers": lambda x: x.mul(10).long().max(-1)[1] % 3,
    "of-highest-integers": lambda x: x.clamp(-1, 1).mul(10).long().amax(-1) % 3,
}


@pytest.mark.parametrize("how", ["mask", "getitem", "where", "nonzero"])
@pytest.mark.parametrize("pick", PICKS)
def test_positions_that_are_the_same_by_chance(pick: str, how: str) -> None:
    """A class that is the first of several belongs to its sample all the same."""
    for first in ([0, 0, 0, 1], [1, 0, 0, 0], [1, 1, 0, 2], None):

        def inputs(first: Any = first) -> List[Tensor]:
            x = torch.randn(N, 3, D, dtype=F64)
            if first is not None:  # all positions of a sample pick the same
                x[torch.arange(N), :, first] += 20
            return [x]

        row = Row(
            lambda: Lambda(
                lambda m, x: m.o(put(m, x, PICKS[pick](x[..., :3]), how)),
                **{"f": nn.Linear(D, D), "o": nn.Linear(D, 3), "w": param(3, D)},
            ),
            inputs,
            quantities=["BatchGrad", "BatchL2Grad"],
        )
        assert_right(row)


# Integers that are made of each sample's own, of which there are three
OWN_INTEGERS: Dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda i: i >> 1,
    "bucketize": lambda i: torch.bucketize(i, torch.tensor([1, 3])),
    "isin": lambda i: torch.isin(i, torch.tensor([1, 2])).long(),
    "xor": lambda i: torch.logical_xor(i > 2, i.flip(1) > 2).long(),
    "first-one": lambda i: (i == 1).int().argmax(1, True),
    "count": lambda i: i.count_nonzero(1)[:, None],
    "highest": lambda i: i.max(1, True)[0],
    "middle": lambda i: i.median(1, True)[0],
    "scatter": lambda i: torch.zeros_like(i).scatter(1, i % i.shape[1], i),
    "ranks": lambda i: i.argsort(1).argsort(1),
    "top": lambda i: i.topk(2, 1)[1],
    "sort": lambda i: i.sort(1)[0],
    "padded": lambda i: F.pad(i, (1, 0)),
    "is-new": lambda i: F.pad(i[:, 1:] != i[:, :-1], (1, 0)).long(),
    "bins": lambda i: torch.stack([torch.bincount(z, minlength=6) for z in i]),
    "of-the-flattened": lambda i: i.T.flatten().sub(2).abs().view(-1, len(i)).T,
}
# ... and integers in which samples meet
OTHERS_INTEGERS: Dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda i: i.sort(0)[0],
    "flat-sort": lambda i: i.flatten().sort()[0].view_as(i),
    "sort-of-scores": lambda i: (i[:, :1] * 0.5).argsort(0),
    "msort": lambda i: i.msort(),
    "top": lambda i: i.topk(len(i), 0)[0],
    "cummax": lambda i: i.cummax(0)[0],
    "median": lambda i: i.median(0)[0].expand(len(i), -1),
    "kth": lambda i: i.kthvalue(1, 0)[0].expand(len(i), -1),
    "any": lambda i: (i > 1).any(0).long().expand(len(i), -1),
    "unique-columns": lambda i: torch.unique(i, dim=1),
    "same-as-the-next": lambda i: F.pad(
        (i.flatten()[1:] == i.flatten()[:-1]).long(), (1, 0)
    ).view_as(i),
    "written-to-one-row": lambda i: torch.zeros_like(i).index_put(
        (torch.arange(len(i)) // 2, i[:, 0] % 3), torch.ones_like(i[0, 0])
    ),
    "scattered-to-one-row": lambda i: torch.zeros_like(i.flatten()).scatter(
        0, i.flatten() % len(i), 1
    )[: len(i), None],
}


def ones_at(i: Tensor) -> Tensor:
    """Write ones to the places ``[N, 3, 12]`` that integers pick."""
    out = torch.zeros(*i.shape, 12, dtype=F64)
    out[torch.arange(len(i))[:, None], torch.arange(3), i] = 1
    return out


# What integers ``[N, 3]`` of a sample pick, and what is made of a part of the batch
OFTEN: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "one-hot": lambda m, i: F.one_hot(i, 12).to(F64) @ m.w,
    "scatter-number": lambda m, i: torch.zeros(*i.shape, 12, dtype=F64).scatter(
        -1, i[..., None], 1.0
    )
    @ m.w,
    "scatter-value": lambda m, i: torch.zeros(*i.shape, 12, dtype=F64).scatter(
        dim=2, index=i[..., None], value=2.0
    )
    @ m.w,
    "scatter-mask": lambda m, i: torch.ones(*i.shape, 12, dtype=torch.bool)
    .scatter_(2, i[..., None], False)
    .to(F64)
    @ m.w,
    "scatter-counts": lambda m, i: torch.zeros(len(i), 12, dtype=F64).scatter_add(
        1, i, torch.ones(i.shape, dtype=F64)
    )
    @ m.w,
    "setitem": lambda m, i: ones_at(i) @ m.w,
    "index-put": lambda m, i: torch.zeros(len(i), 12, dtype=F64).index_put(
        (torch.arange(len(i)), i[:, 1]), torch.ones((), dtype=F64)
    )
    @ m.w,
    "columns-of-a-table": lambda m, i: m.w.T[:, i].movedim(0, -1),
    "last-axis-of-a-table": lambda m, i: m.w.T[None, ..., i].movedim(1, -1)[0],
    "index-select": lambda m, i: m.w.T.index_select(-1, i.flatten())
    .T.unflatten(0, i.shape)
    .sin(),
    "gather": lambda m, i: m.w.expand(len(i), -1, -1).gather(
        1, i[..., None].expand(-1, -1, D)
    ),
    "take-along": lambda m, i: torch.take_along_dim(m.w[None], i[..., None], 1),
    "parts": lambda m, i: torch.cat([m.f(m.w[i][:2]).sin(), m.f(m.w[i][2:]).cos()])
    @ m.f.weight,
    "each": lambda m, i: torch.stack([F.linear(z, m.w).sin() for z in m.w[i]]) @ m.w,
    "counts-of-each": lambda m, i: torch.stack(
        [torch.bincount(z, minlength=12) for z in i]
    ).to(F64)
    @ m.w,
    "repeated": lambda m, i: m.w[i].repeat_interleave(2, 0)[::2],
    "images": lambda m, i: F.grid_sample(
        m.w.T.reshape(1, D, 3, 4), in_one_row(i / 6 - 1), align_corners=False
    )[0, :, 0].T.unflatten(0, i.shape),
}


def in_one_row(z: Tensor) -> Tensor:
    """Make a grid of places for all samples, side by side."""
    return torch.stack([z, z.flip(1).sin()], -1).to(F64).reshape(1, 1, -1, 2)


def test_places_of_the_first_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say whose is what they pick from another input's table, by themselves."""
    row = Row(
        lambda: Lambda(
            lambda m, i, x: m.f(x).gather(1, i) @ m.w,
            **{"f": nn.Linear(D, 4), "w": param(3, 2)},
        ),
        lambda: (torch.randint(4, (N, 3)), torch.randn(N, D, dtype=F64)),
    )
    drawn: List[Trial] = []
    monkeypatch.setattr(Trial, "_draw_all", lambda trial, _: drawn.append(trial))
    assert_right(row)
    assert not drawn


@pytest.mark.parametrize("batch, different", [(1, 2), (3, 3), (4, 12)])
@pytest.mark.parametrize("name", OFTEN)
def test_without_trials(
    name: str, batch: int, different: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What occurs often is right, and no operation is run again in the next pass."""
    row = Row(
        lambda: Lambda(
            lambda m, i: m.f(OFTEN[name](m, i).tanh()),
            **{"w": param(12, D), "f": nn.Linear(D, D)},
        ),
        lambda: [torch.randint(different, (batch, 3))],
        alone=name != "parts",
    )
    assert_right(row)
    model = extend(row.build()[0])
    for again in (False, True):
        with monkeypatch.context() as patch, backpack(BatchGrad()):
            if again:
                patch.delattr(Trial, "find")
            model(torch.randint(12, (batch, 3))).sum().backward()


def recurrent_steps(m: Module, x: Tensor, mask: Tensor) -> Tensor:
    """Apply a recurrent layer to as many steps of each sample as a mask has entries."""
    lengths = mask.sum(1).clamp(min=1)
    y, _ = m.r(pack_padded_sequence(x, lengths.cpu(), True, False))
    return pad_packed_sequence(y, True, total_length=mask.shape[1])[0].sum(1)


def attended(m: Module, x: Tensor, alive: Tensor) -> Tensor:
    """Let the rows of some samples attend to each other."""
    x, some = m.f(x), m.f(x)[alive]
    weights = (m.g(some) @ some.mT).softmax(-1)
    some = F.scaled_dot_product_attention(weights @ some, some, some)
    return x.index_copy(0, alive.nonzero()[:, 0], some).sum(1)


def written_two_ways(m: Module, x: Tensor, mask: Tensor) -> Tensor:
    """Write what one layer makes of some rows, and another of the others."""
    out = torch.zeros_like(x)
    out[mask], out[~mask] = m.f(x[mask]).tanh(), m.f(m.f(x[~mask]))
    return out


# What is made of data ``[N, T, D]`` where a mask ``[N, T]`` says, by which parts
LEFT_BY_MASKS: Dict[str, Tuple[str, Callable[[Module, Tensor, Tensor], Tensor]]] = {
    "layers": (
        "fg",
        lambda m, x, k: x.masked_scatter(
            k[..., None], m.f(m.g(m.f(x[k]).tanh()).relu())
        ).sum(1),
    ),
    "by-hand": (
        "fw",
        lambda m, x, k: torch.zeros_like(x)
        .index_put(
            k.nonzero(as_tuple=True),
            torch.cat(F.normalize(x[k] @ m.w, dim=-1).split(2, -1)[::-1], -1)
            * x[k].pow(2).mean(-1, keepdim=True),
        )
        .sum(1),
    ),
    "added": (
        "fw",
        lambda m, x, k: x.new_zeros(len(x), D).index_add(
            0, k.nonzero()[:, 0], torch.einsum("nd,de->ne", m.f(x)[k].tanh(), m.w)
        ),
    ),
    "two-ways": ("f", lambda m, x, k: written_two_ways(m, x, k).sum(1)),
    "split": (
        "f",
        lambda m, x, k: torch.stack(
            [y.sum(0) for y in m.f(x[k]).tanh().split(k.sum(1).tolist())]
        ),
    ),
    "recurrent": ("fr", recurrent_steps),
    "attention": ("fg", lambda m, x, k: attended(m, x, k[:, 0])),
    "convolution": (
        "fc",
        lambda m, x, k: x.index_copy(
            0, k[:, 0].nonzero()[:, 0], m.c(x[k[:, 0]].mT).tanh().mT
        ).sum(1),
    ),
    "best": (
        "fg",
        lambda m, x, k: m.f(x)
        .scatter_add(
            1,
            m.f(x).argsort(1),
            m.g(x).tanh(),
        )
        .sum(1),
    ),
}


def mask_of(batch: int, t: int) -> Tensor:
    """Draw a mask that leaves each sample an entry, the first one its first."""
    mask = torch.rand(batch, t) < 0.5
    mask[0, 0] = mask[:, 1] = True
    return mask


@pytest.mark.parametrize("batch, t", [(1, 3), (3, 3), (4, 5)])
@pytest.mark.parametrize("name", LEFT_BY_MASKS)
def test_masks_without_trials(
    name: str, batch: int, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What masks leave is followed without running operations again."""
    parts, function = LEFT_BY_MASKS[name]
    makers = {
        "f": lambda: nn.Linear(D, D),
        "g": lambda: nn.LayerNorm(D),
        "w": lambda: param(D, D),
        "r": lambda: nn.LSTM(D, D, batch_first=True),
        "c": lambda: nn.Conv1d(D, D, 1),
    }
    row = Row(
        lambda: Lambda(
            lambda m, x, k: m.f(function(m, m.f(x), k)),
            **{part: makers[part]() for part in parts},
        ),
        lambda: [torch.randn(batch, t, D, dtype=F64), mask_of(batch, t)],
    )
    assert_right(row)
    model = extend(row.build()[0])
    with monkeypatch.context() as patch, backpack(BatchGrad()):
        patch.delattr(Trial, "find")
        model(torch.randn(batch, t, D, dtype=F64), mask_of(batch, t)).sum().backward()


def deduplicated(how: str, ids: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function once to each number."""
    ids = ids[:, 0].contiguous()
    if how == "unique":
        unique, back, counts = ids.unique(return_inverse=True, return_counts=True)
        return (f(unique) / counts[:, None])[back] * counts[back, None]
    if how == "consecutive":
        unique, back = ids.unique_consecutive(return_inverse=True)
        return f(unique)[back]
    values, order = ids.sort()
    is_new = F.pad(values[1:] != values[:-1], (1, 0), value=True)
    back = torch.empty_like(order)
    back[order] = is_new.cumsum(0) - 1
    return f(values[is_new])[back]


def drawn(different: int, shape: Tuple[int, ...], seed: int) -> Tensor:
    """Draw integers, the same on each device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(
        torch.randint(different, shape, generator=generator, device="cpu").tolist()
    )


def integers(make: Callable, n: int, different: int, seed: int) -> Row:
    """Make a row that looks up what a function returns for random integers.

    Args:
        make: Function of integers ``[N, 3]``, and of a function that looks up.
        n: Number N of samples.
        different: How many different integers there may be.
        seed: Seed.

    Returns:
        The row.
    """
    return Row(
        lambda: Lambda(
            lambda m, i: m.f(make(i, m.e).tanh()),
            **{"e": nn.Embedding(12, D), "f": nn.Linear(D, 2)},
        ),
        lambda: [drawn(different, (n, 3), seed)],
        quantities=["BatchGrad"],
        says="`(\\w*sort|topk|cummax|median|kthvalue|any|unique\\w*|__eq__|index_put"
        "|scatter)` on",
    )


BATCHES = [(n, 1 + (n + k) % 4, k) for n in (2, 3, 4) for k in range(4)]


@pytest.mark.parametrize("name", OWN_INTEGERS)
def test_integers_of_a_sample(name: str) -> None:
    """Integers belong to their sample, whatever they are in this batch."""
    for batch in BATCHES:
        assert_right(integers(lambda i, e: e(OWN_INTEGERS[name](i)), *batch))


@pytest.mark.parametrize("name", OTHERS_INTEGERS)
def test_integers_of_several_samples(name: str) -> None:
    """Integers in which samples have met are nobody's, whatever they are."""
    for batch in BATCHES:
        row = integers(lambda i, e: e(OTHERS_INTEGERS[name](i)), *batch)
        assert_refused(row, "BatchGrad")


@pytest.mark.parametrize("how", ["unique", "consecutive", "by-sorting"])
def test_lookups_of_different_integers(how: str) -> None:
    """Lookups for each different integer are right, or refused."""
    for batch in BATCHES:
        assert_right_or_refused(integers(lambda i, e: deduplicated(how, i, e), *batch))


def test_shared_input_of_other_batches() -> None:
    """What is as long as one batch is no batch in the next one for that reason."""
    mask = torch.randn(3, 3, dtype=F64)
    for size in (3, 2, 5, 1):
        row = Row(
            lambda: Lambda(
                lambda m, x, mask: (plain(m, x) @ x.mT + mask).softmax(-1) @ x,
                **{"f": nn.Linear(D, D), "g": nn.LayerNorm(D), "p": param(D)},
            ),
            randn(3, D, batch=size),
            predict=lambda m, X: m(*X, mask),
            says="axis|sample|batch" if size == 3 else None,
        )
        (assert_right_or_refused if row.says else assert_right)(row)


def ragged_parts(x: Tensor, shortest: int) -> List[Tensor]:
    """Return as many positions of each sample as its number says."""
    return [z[: shortest + n % 3] for n, z in enumerate(x)]


# A list has a tensor for each sample, or the samples of one step
LISTS: Dict[str, Tuple[Callable, Callable]] = {
    "single-samples": (
        lambda x: list(x.split(1)),
        lambda m, xs: torch.cat([plain(m, x) for x in xs]),
    ),
    "different-lengths": (
        lambda x: ragged_parts(x, 1),
        lambda m, xs: torch.stack([plain(m, x).sum(0) for x in xs]),
    ),
    "different-lengths-padded": (
        lambda x: tuple(ragged_parts(x, 1)),
        lambda m, xs: plain(m, pad_sequence(list(xs), batch_first=True)),
    ),
    "different-lengths-from-two-on": (
        lambda x: ragged_parts(x, 2),
        lambda m, xs: torch.stack([plain(m, x).tanh().sum(0) for x in xs]),
    ),
    "channels-first": (
        lambda x: list(x.mT),
        lambda m, xs: torch.stack([plain(m, x.mT).sum(0) for x in xs]),
    ),
    "steps": (
        lambda x: list(x.unbind(1)),
        lambda m, xs: sum(plain(m, x) for x in xs),
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_tensors(name: str) -> None:
    """A list of samples is refused, and one of steps is right."""
    parts, forward = LISTS[name]
    row = Row(
        lambda: Lambda(forward, f=nn.Linear(D, D), g=nn.LayerNorm(D), p=param(D)),
        randn(5, D),
        predict=lambda m, X: m(parts(X[0])),
        says=f"list of {N} tensors|each tensor in a list",
    )
    if name == "steps":
        assert_right(row)
    else:
        assert_refused(row, "BatchGrad")


def entries(order: Tensor) -> Tensor:
    """Number the entries of rows ``[N, D]`` in an order."""
    return order[:, None] * D + torch.arange(D)


def permuting(order: Tensor) -> Tensor:
    """Make a sparse matrix that brings rows into an order."""
    places = torch.stack([torch.arange(len(order)), order])
    values = torch.ones(len(order), dtype=F64)
    return torch.sparse_coo_tensor(places, values, check_invariants=True)


def to_rows(order: Tensor) -> Tensor:
    """Make a grid that reads the rows of an image ``[N, D]`` in an order."""
    rows = order.to(F64) * 2 / (len(order) - 1) - 1
    columns = torch.linspace(-1, 1, D, dtype=F64)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)[None]


# Operations that bring rows into an order that is an operand's value, not its shape
ORDERED: Dict[str, Callable] = {
    "take": lambda x, o: x.take(entries(o)),
    "table-of-data": lambda x, o: F.embedding(o, x),
    "bags-of-data": lambda x, o: F.embedding_bag(o[:, None], x, mode="sum"),
    "gather": lambda x, o: x.gather(0, o[:, None].expand_as(x)),
    "index-select": lambda x, o: x.index_select(0, o),
    "index-reduce": lambda x, o: torch.zeros_like(x).index_reduce(
        0, o.argsort(), x, "amax", include_self=False
    ),
    "index-copy": lambda x, o: torch.zeros_like(x).index_copy(0, o.argsort(), x),
    "index-put": lambda x, o: torch.zeros_like(x).index_put((o.argsort(),), x),
    "put": lambda x, o: torch.zeros_like(x).put(entries(o.argsort()), x),
    "put-in-place": lambda x, o: torch.zeros_like(x).put_(entries(o.argsort()), x),
    "scatter": lambda x, o: torch.zeros_like(x).scatter(
        0, o.argsort()[:, None].expand_as(x), x
    ),
    "narrow": lambda x, o: x.repeat(2, 1).narrow(0, o[0], len(x)),
    "narrow-by-a-byte": lambda x, o: x.repeat(2, 1).narrow(0, o[0].byte(), len(x)),
    "sparse-matrix": lambda x, o: permuting(o) @ x,
    "sparse-rows": lambda x, o: torch.mm(permuting(o).to_sparse_csr(), x),
    "sparse-sum": lambda x, o: torch.sparse.addmm(torch.zeros_like(x), permuting(o), x),
    "read-from-an-image": lambda x, o: F.grid_sample(
        x[None, None], to_rows(o), mode="nearest", align_corners=True
    )[0, 0],
}


# The same for tokens
ORDERED_TOKENS: Dict[str, Callable] = {
    "take-tokens": lambda i, o: i.take(o[:, None] * 2 + torch.arange(2)),
    "index-tokens": lambda i, o: torch.ops.aten.index.Tensor(i, [o]),
    "narrow-tokens": lambda i, o: i.repeat(2, 1).narrow(0, o[0], len(i)),
    "matrix-of-integers": lambda i, o: F.one_hot(o) @ i,
    "matrix-of-bytes": lambda i, o: (F.one_hot(o).byte() @ i.byte()).long(),
    "einsum-of-integers": lambda i, o: torch.einsum("st,td->sd", F.one_hot(o), i),
}


def packed_rows(m: Module, x: Tensor, order: Tensor) -> Tensor:
    """Use parameters on packed sequences, whose lengths differ from pass to pass."""
    sequences = torch.stack([x, x.cos(), x.sin()], 1)
    lengths = [3, 2, 2, 1] if order[0] else [3, 3, 1, 1]
    packed = pack_padded_sequence(sequences, lengths, True)
    packed = packed._replace(data=plain(m, packed.data))
    return pad_packed_sequence(packed, batch_first=True)[0].sum(1)


@pytest.mark.filterwarnings("ignore:(?s).*(Sparse CSR|index_reduce|searchsorted)")
@pytest.mark.parametrize("name", [*ORDERED, *ORDERED_TOKENS, "packed"])
def test_other_values_of_the_same_shape(name: str) -> None:
    """Where an operation has moved samples to once is no promise for other values."""

    def forward(m: Module, x: Tensor) -> Tensor:
        order = torch.arange(len(x)).roll(-m.shift)
        if name in ORDERED_TOKENS:
            h = m.table(ORDERED_TOKENS[name](x, order)).sum(1)
            return plain(m, h)[order.argsort()]
        h = m.first(x).tanh()
        if name == "packed":
            return packed_rows(m, h, order)
        return plain(m, ORDERED[name](h, order))[order.argsort()]

    def model(shift: int) -> Module:
        parts = {"f": nn.Linear(D, D), "g": nn.LayerNorm(D), "p": param(D)}
        if name in ORDERED_TOKENS:
            return Lambda(forward, table=nn.Embedding(5, D), shift=shift, **parts)
        return Lambda(forward, first=nn.Linear(D, D), shift=shift, **parts)

    X = tokens(2) if name in ORDERED_TOKENS else randn(D)
    for shift in (0, 1, 3):
        assert_right(Row(lambda shift=shift: model(shift), X, alone=False))


# Of numbers that need no gradient: NaN would leave nothing of it
LEAVING_OUT: Dict[str, Callable[[Tensor], Tensor]] = {
    "replaced": Tensor.nan_to_num,
    "replaced-in-place": lambda x: x.clone().nan_to_num_(),
    "larger": lambda x: torch.fmax(x, x.new_zeros(())),
    "signs": torch.sgn,
    "copied-signs": lambda x: torch.copysign(x.new_ones(()), x),
    "sums": lambda x: x.nansum(1, keepdim=True).expand_as(x),
    "quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -99, 99),
    "filled": lambda x: torch.empty_like(x).copy_(x) + torch.rand_like(x).zero_(),
}


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_inputs_of_which_no_nan_is_left(name: str) -> None:
    """Inputs that are cleaned before a parameter is used are no constants."""

    def forward(m: Module, x: Tensor) -> Tensor:
        return plain(m, LEAVING_OUT[name](x))

    def meeting(m: Module, x: Tensor) -> Tensor:
        return m.f(x) + (LEAVING_OUT[name](x) * m.p).roll(1, 0)

    def model(function: Callable) -> Module:
        return Lambda(function, f=nn.Linear(D, D), g=nn.LayerNorm(D), p=param(D))

    for _ in range(2):  # what is found is remembered
        assert_right(Row(lambda: model(forward), randn(D)))
    assert_refused(Row(lambda: model(meeting), randn(D), says="add"), "BatchGrad")


TOKENS = Row(
    lambda: Lambda(
        lambda m, i: m.f(m.e(i).tanh()).flatten(0, 1),
        e=nn.Embedding(5, D),
        f=nn.Linear(D, 5),
    ),
    tokens(3),
)


@pytest.mark.parametrize("t", LENGTHS)
def test_flattened_model(t: int) -> None:
    """A model that returns rows, of which a sample has several."""
    assert_right(TOKENS._replace(X=tokens(t)))


def test_first_order_only_needs_first_order() -> None:
    """Each quantity alone is as right as all together."""
    row = MOVE_ROWS["flatten-time-first-3"]
    for quantity in FIRST_ORDER:
        assert_right(row._replace(quantities=[quantity]))


def pack(x: Tensor) -> Any:
    """Pack sequences whose lengths depend on their first entry alone."""
    lengths = [1 + int(abs(z[0, 0].item()) * 10) % x.shape[1] for z in x]
    return pack_padded_sequence(x, lengths, True, enforce_sorted=False)


def longest_first(m: Module, x: Tensor) -> Tensor:
    """Sort sequences by hand before they are packed."""
    packed = pack(x)
    order = packed.sorted_indices
    y, states = m.r(packed._replace(sorted_indices=None, unsorted_indices=None))
    padded, _ = pad_packed_sequence(y, True, total_length=x.shape[1])
    return (plain(m, padded.sum(1)[:, :D]) + sum(states).sum(0).cos())[order.argsort()]


def from_states(m: Module, x: Tensor) -> Tensor:
    """Begin with states that are learned, and end with those after the last step."""
    start = plain(m, x[:, 0]).view(len(x), 4, -1).transpose(0, 1)
    y, (h, c) = m.r(pack(plain(m, x)), (start.tanh(), start.sin()))
    return h.sum(0) * c[0] + pad_packed_sequence(y)[0][0, :, : h.shape[-1]]


def packed_twice(m: Module, x: Tensor) -> Tensor:
    """Go through two layers, with parameters on rows in between."""
    y, _ = m.r(pack(x))
    y = y._replace(data=plain(m, y.data[:, :D] * y.data[:, D:]))
    return pad_packed_sequence(m.s(y)[0], True, total_length=x.shape[1])[0].sum(1)


def words(m: Module, x: Tensor) -> Tensor:
    """Pack several sequences of each sample."""
    sequences = torch.stack([x, x.sin()], 1).flatten(0, 1)
    return plain(m, m.r(pack(sequences))[1][0].sum(0)).unflatten(0, (-1, 2)).sum(1)


def of_nodes(m: Module, x: Tensor) -> Tensor:
    """Run a layer on the sequences of several nodes, one after the other."""
    nodes = torch.stack([x, x.sin(), x.cos()], m.axis)
    y, states = m.r(plain(m, nodes).flatten(0, 1))
    z, _ = m.s(y.transpose(0, 1), states)
    return z.sum(0).unflatten(0, nodes.shape[:2]).sum(m.axis)


def from_learned(m: Module, x: Tensor) -> Tensor:
    """Begin with learned states: one of them for all, one in another way."""
    states: Any = m.h.expand(-1, len(x), -1).contiguous()
    if isinstance(m.r, nn.LSTM):
        states = states, m.c.tanh().repeat(1, len(x), 1)
    axis = int(m.packs or m.r.batch_first)
    x = plain(m, x)
    y, last = m.r(pack(x) if m.packs else x.transpose(0, 1 - axis), states)
    y = pad_packed_sequence(y, True)[0] if m.packs else y
    return y.sum(axis)[:, :D] + tensors_in(last)[0].sum(0)


def half_learned(m: Module, x: Tensor) -> Tensor:
    """Begin with a learned state, and one of the sample's; several of each."""
    sequences = torch.stack([x, x.sin()], 1).flatten(0, 1)
    cell = sequences[None, :, 0].expand(4, -1, -1).contiguous()
    hidden = m.h.repeat(1, len(cell[0]), 1)
    return m.r(plain(m, sequences), (hidden, cell))[1][0].sum(0).view(-1, 2, D).sum(1)


def by_function(m: Module, x: Tensor) -> Tensor:
    """Call what is behind the layer, with weights of one's own."""
    weights = [m.u, m.v.tanh(), m.b, m.b * 2]
    options = True, 1, 0.0, True, False, True  # batch_first
    return torch.gru(plain(m, x), m.h.expand(1, len(x), D), weights, *options)[0].sum(1)


def both_of_one(m: Module, x: Tensor) -> Tensor:
    """Begin with one tensor for both states, and norm with one for scale and shift."""
    state = m.h.expand(1, len(x), D).contiguous()
    y = F.layer_norm(m.r(plain(m, x), (state, state))[0], (D,), m.h, m.h)
    return torch.einsum("nti,ij,jk->nk", y, m.v, m.v)


def weight_drop(m: Module, x: Tensor) -> Tensor:
    """Run a layer whose matrix between the steps is computed, in two directions."""
    drop = {"weight_hh_l0": m.r.weight_hh_l0 * m.keep}
    return functional_call(m.r, drop, (plain(m, x),))[0].sum(1)[:, :D]


def lstm(width: int = D, **options: Any) -> Module:
    """Make a layer in two directions."""
    return nn.LSTM(D, width, 2, bidirectional=True, **options)


# Layers, numbers of states, options, and whether sequences are packed
LEARNED: List[Tuple[type, int, Dict[str, Any], bool]] = [
    (nn.GRU, 1, {"batch_first": True}, False),
    (nn.GRU, 2, {"num_layers": 2, "bias": False, "batch_first": True}, True),
    (nn.LSTM, 4, {"num_layers": 2, "bidirectional": True}, True),
    (nn.LSTM, 1, {"hidden_size": 5, "proj_size": D, "batch_first": True}, False),
    (nn.LSTM, 2, {"hidden_size": 5, "proj_size": D, "num_layers": 2}, False),
    (nn.RNN, 1, {"nonlinearity": "relu"}, True),
]
SEQUENCES: Dict[str, Tuple[Callable[[Module, Tensor], Tensor], Dict[str, Callable]]] = {
    "longest-first": (longest_first, {"r": lstm}),
    "from-states": (from_states, {"r": lambda: lstm(1)}),
    "between-layers": (
        packed_twice,
        {"r": lstm, "s": lambda: nn.RNN(D, 2, bias=False)},
    ),
    "with-projections": (
        packed_twice,
        {"r": lambda: lstm(5, proj_size=D), "s": rnn(nn.GRU)},
    ),
    "of-words": (words, {"r": lstm}),
    **{
        f"learned-{i}": (
            from_learned,
            {
                "r": partial(cls, D, **{"hidden_size": D, **options}),
                "h": partial(param, layers, 1, D),
                "packs": partial(bool, packs),
                **(
                    {"c": partial(param, layers, 1, options.get("hidden_size", D))}
                    if cls is nn.LSTM
                    else {}
                ),
            },
        )
        for i, (cls, layers, options, packs) in enumerate(LEARNED)
    },
    "learned-half": (
        half_learned,
        {"r": partial(lstm, batch_first=True), "h": partial(param, 4, 1, D)},
    ),
    "by-function": (
        by_function,
        {
            "u": partial(param, 3 * D, D),
            "v": partial(param, 3 * D, D),
            "b": partial(param, 3 * D),
            "h": partial(param, D),
        },
    ),
    "both-of-one": (
        both_of_one,
        {
            "r": rnn(nn.LSTM, batch_first=True),
            "h": partial(param, D),
            "v": partial(param, D, D),
        },
    ),
    "weight-drop": (
        weight_drop,
        {
            "r": partial(lstm, batch_first=True),
            "keep": lambda: (torch.arange(D) % 2).double(),
        },
    ),
    **{
        f"of-{name}": (
            of_nodes,
            {
                "r": rnn(nn.GRU, batch_first=True),
                "s": rnn(nn.GRU),
                "axis": partial(int, axis),
            },
        )
        for axis, name in enumerate(["nodes", "samples"])
    },
}


@pytest.mark.usefixtures("cpu")  # where PyTorch wants the lengths
@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent layer's rule is for all sequences of which each is of one sample."""
    forward, parts = SEQUENCES[name]
    monkeypatch.delattr(Use, "_generic")

    def model() -> Module:
        made = {part: make() for part, make in parts.items()}
        used = {"f": nn.Linear(D, D), "g": nn.LayerNorm(D), "p": param(D)}
        return Lambda(forward, **used, **made)

    quantities = [*FIRST_ORDER, "DiagGGNExact"]
    assert_right(Row(model, randn(t, D), quantities=quantities))


def test_dropout_between_layers() -> None:
    """What can't be repeated has no rule: here, the second layer gets zeros."""
    made = {"r": lambda: nn.LSTM(D, D, 2, dropout=1.0), "packs": bool}
    states = {"h": partial(param, 2, 1, D), "c": partial(param, 2, 1, D)}

    def model() -> Module:
        used = {name: make() for name, make in {**made, **states}.items()}
        return Lambda(
            from_learned, f=nn.Linear(D, D), g=nn.LayerNorm(D), p=param(D), **used
        )

    assert_right(Row(model, randn(3, D), train=True))


def some_words(m: Module, x: Tensor) -> Tensor:
    """Run a layer on one sequence of some samples, on four of others."""
    many, y = (x[:, 0, 0] > 0).nonzero()[:, 0], plain(m, x[:, 0])
    own = torch.cat([torch.arange(len(x)), many, many])
    y = y.index_add(0, own, m.r(torch.cat([x, x[many].sin(), x[many].cos()]))[1][0])
    return y.index_add(0, many, m.r(x[many])[1][0]) if len(many) else y


def two_signs() -> Tensor:
    """Make samples of which half have more sequences than others."""
    x = torch.randn(N, 3, D, dtype=F64)
    x[:, 0, 0] = x[:, 0, 0].abs() * torch.tensor([1, -1, -1, 1])
    return x


@pytest.mark.parametrize("number", [1, 2, N])
def test_more_sequences_of_some(number: int) -> None:
    """Samples with unlike numbers of sequences are right as well."""

    def model() -> Module:
        used = {"f": nn.Linear(D, D), "g": nn.LayerNorm(D), "p": param(D)}
        return Lambda(some_words, r=nn.GRU(D, D, batch_first=True), **used)

    assert_right(Row(model, lambda: (two_signs()[:number],)))


def shifted(x: Any) -> Any:
    """Give steps after the first to other sequences."""
    first, later = x.data.tensor_split([int(x.batch_sizes[0])])
    return x._replace(data=torch.cat([first, later.flip(0)]))


OF_OTHERS: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "rows": lambda m, x: m.r(shifted(pack(x)))[1][0],
    "steps": lambda m, x: m.r(torch.stack([x[:, 0], x[:, 1].roll(1, 0)], 1))[1][0],
    "states": lambda m, x: m.r(x, m.r(x)[1].flip(1))[1][0],
    "states-of-packed": lambda m, x: m.r(pack(x), m.r(x)[1].flip(1))[1][0],
}


@pytest.mark.usefixtures("cpu")  # where PyTorch wants the lengths
@pytest.mark.parametrize("name", OF_OTHERS)
def test_sequences_of_others(name: str) -> None:
    """Samples meet in sequences that have steps or states of several."""

    def model() -> Module:
        return Lambda(OF_OTHERS[name], r=nn.GRU(D, D, batch_first=True))

    assert_refused(Row(model, randn(3, D), says="gru"), "BatchGrad")


@pytest.mark.parametrize("shape", [(N, 1), (N, D), (1, D), (D,), ()], ids=str)
@pytest.mark.parametrize("combine", [torch.mul, torch.add], ids=["mul", "add"])
def test_broadcast_to_sorted_rows(combine: Callable, shape: Tuple[int, ...]) -> None:
    """What meets rows of samples is shared by them, or one for each."""

    def forward(m: Module, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return combine(x[order], m.p)[order.argsort()].tanh()

    assert_right(Row(lambda: Lambda(forward, p=param(*shape)), randn(D), alone=False))


@pytest.mark.parametrize("lengths", [*product((1, 2, 3), repeat=3)])
def test_packed_between_modules(lengths: Tuple[int, ...]) -> None:
    """Sizes and orders of packed sequences are no samples, however many there are."""

    def compute(first: Module, last: Module, x: Tensor, n: Sequence[int]) -> Tensor:
        packed = pack_padded_sequence(first(x), n, True, enforce_sorted=False)
        return last(packed)[1][0].square().sum()

    modules = nn.Linear(4, 4, dtype=F64), nn.GRU(4, 2, batch_first=True, dtype=F64)
    params = [p for module in modules for p in module.parameters()]
    x = torch.randn(3, 3, 4, dtype=F64)
    alone = [compute(*modules, x[i : i + 1], [n]) for i, n in enumerate(lengths)]
    expected = [torch.autograd.grad(value, params) for value in alone]
    with backpack(BatchGrad()):
        compute(*map(extend, modules), x, lengths).backward()
    for p, gradients in zip(params, zip(*expected)):
        assert_agrees(p.grad_batch, torch.stack(gradients), "grad_batch")
