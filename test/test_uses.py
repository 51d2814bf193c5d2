"""Parameters enter a model through operations: each use is right for each sample.

Rows are functions in which data meets parameters: every spelling of a linear map,
convolutions, tables, scales and shifts, normalizations, attention; with as many
positions as samples and with another number of them.
"""

import math
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import F64, make_extension
from oracle import assert_agrees, model_jacobians, oracle, parameters
from per_sample import (
    FIRST_ORDER,
    LENGTHS,
    QUANTITIES,
    Backward,
    Double,
    Lambda,
    N,
    Once,
    Row,
    against_real,
    assert_fields,
    assert_right,
    assert_right_or_refused,
    classes,
    compute,
    lookup,
    param,
    randn,
    randomize,
    real,
    reference,
    tokens,
    use,
)
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_list
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.core.per_sample.apart import Apart
from backpack.engine.nodes import saved
from backpack.engine.nodes.uses import Use
from backpack.engine.samples.trials import Trial
from backpack.extensions import (
    BatchDiagGGNExact,
    BatchDotGrad,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    DiagGGNExact,
    SumGradSquared,
    Variance,
)

aten = torch.ops.aten
W, B = {"w": (3, 4)}, {"w": (3, 4), "b": (3,)}
IO = {"w": (4, 3), "b": (3,)}


def table_first(table: Tensor, ids: Tensor) -> Tensor:
    """Average rows of a table, in an order of arguments that PyTorch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return F.embedding_bag(table, ids)


def products_with_zeros(m: Module, x: Tensor) -> Tensor:
    """Multiply four tensors, some with zeros; write to a part of the result."""
    rows = (x * torch.tensor([1.0, 0.0, 1.0, 1.0])).split(1)
    of_row = "ni,ij,nj,jk->nk"
    out = torch.cat([torch.einsum(of_row, row, m.w, row, m.v * 1) for row in rows])
    out[:, :2].mul_(m.s)
    return out


LINEAR = {
    "linear": use(lambda m, x: F.linear(x, m.w, m.b), 4, **B),
    "linear-no-bias": use(lambda m, x: F.linear(x, m.w), 4, **W),
    "linear-keywords": use(
        lambda m, x: F.linear(bias=m.b, weight=m.w, input=x), 4, **B
    ),
    "matmul-transposed": use(lambda m, x: x @ m.w.T + m.b, 4, **B),
    "matmul": use(lambda m, x: torch.matmul(x, m.w) + m.b, 4, **IO),
    "method": use(lambda m, x: x.matmul(m.w).add(m.b), 4, **IO),
    "mm": use(lambda m, x: torch.mm(x, m.w), 4, w=(4, 3)),
    "mm-method": use(lambda m, x: x.mm(m.w.t()), 4, **W),
    "of-sparse-data": use(lambda m, x: F.linear(x.to_sparse(), m.w, m.b), 4, **B),
    "layer-of-sparse-data": use(
        lambda m, x: m.f(x.to_sparse()), 4, f=lambda: nn.Linear(4, 3)
    ),
    "mm-of-sparse-data": use(
        lambda m, x: torch.sparse.mm(x.to_sparse(), m.w), 4, w=(4, 3)
    ),
    "mm-of-a-sparse-weight": use(
        lambda m, x: torch.sparse.mm(m.w.to_sparse(), x.T).T, 4, **W
    ),
    "inner-of-positions": use(lambda m, x: torch.inner(x, m.w) + m.b, 2, 4, **B),
    "inner-from-the-left": use(lambda m, x: m.w.inner(x).T, 4, **W),
    "inner-vectors": use(lambda m, x: torch.inner(x, m.v)[:, None], 4, v=(4,)),
    "inner-by-name": use(lambda m, x: torch.inner(x, other=m.w), 4, **W),
    "inner-with-a-number": use(lambda m, x: torch.inner(x, m.s), 4, s=()),
    "operator-linear": use(lambda m, x: aten.linear.default(x, m.w, m.b), 4, **B),
    "operator-packet": use(lambda m, x: aten.linear(x, m.w, bias=m.b), 4, **B),
    "operator-mm": use(lambda m, x: aten.mm(x, m.w) + m.b, 4, **IO),
    "operator-addmm": use(lambda m, x: aten.addmm.default(m.b, x, m.w), 4, **IO),
    "operator-addmm-scaled": use(
        lambda m, x: aten.addmm.default(m.b, x, m.w, beta=2, alpha=3), 4, **IO
    ),
    "mm-from-the-left": use(lambda m, x: (m.w @ x.T).T, 4, **W),
    "mm-from-the-left-mm": use(lambda m, x: torch.mm(m.w, x.t()).mT, 4, **W),
    "addmm": use(lambda m, x: torch.addmm(m.b, x, m.w), 4, **IO),
    "addmm-scaled": use(
        lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), 4, **IO
    ),
    "addmm-data": use(lambda m, x: torch.addmm(x, x, m.w), 4, w=(4, 4)),
    "addmm-transposed": use(lambda m, x: torch.addmm(m.b[:, None], m.w, x.T).T, 4, **B),
    "mv": use(lambda m, x: torch.mv(x, m.w), 4, w=(4,)),
    "matmul-vector": use(lambda m, x: x @ m.w, 4, w=(4,)),
    "addmv": use(lambda m, x: torch.addmv(m.b.expand(len(x)), x, m.w), 4, w=(4,), b=()),
    "inner": use(lambda m, x: torch.inner(x, m.w), 4, **W),
    "addmm-by-name": use(
        lambda m, x: torch.addmm(input=m.b, mat1=x, mat2=m.w), 4, **IO
    ),
    "addmm-one-number": use(lambda m, x: torch.addmm(m.s, x, m.w), 4, s=(1,), w=(4, 3)),
    "einsum-of-whole-numbers": use(
        lambda m, x: torch.einsum("ni,i->ni", (4 * x).long(), m.v) * x, 4, v=(4,)
    ),
    "addmm-a-number": use(lambda m, x: torch.addmm(m.s, x, m.w), 4, s=(), w=(4, 1)),
    "inner-of-one-feature": use(lambda m, x: torch.inner(x[:, :1], m.s), 4, s=()),
    **{
        f"permuted-{k}": use(
            lambda m, x, axes=axes: (x @ m.w.permute(axes).flatten(1)).tanh(),
            *(4,),
            w=tuple([(4, 2, 3)[[a % 3 for a in axes].index(i)] for i in range(3)]),
        )
        for k, axes in enumerate([(-1, 0, 1), (-1, -3, -2), (-2, -1, 0), (1, 0, -1)])
    },
    "addmm-rows": use(
        lambda m, x: torch.addmm(m.r[: len(x)], x, m.w), 4, r=(N, 1), w=(4, 4)
    )._replace(alone=False),
    "einsum-diagonal": use(
        lambda m, x: torch.einsum("ni,iio->no", x, m.w), 4, w=(4, 4, 3)
    ),
    "einsum-without-arrow": use(
        lambda m, x: torch.einsum("ni,io", x, m.w), 4, w=(4, 3)
    ),
    "einsum-dots": use(lambda m, x: torch.einsum("...i,oi->...o", x, m.w), 4, **W),
    "einsum-outer": use(lambda m, x: torch.einsum("n,o->no", x[:, 0], m.v), 4, v=(3,)),
    "einsum-vector": use(lambda m, x: torch.einsum("ni,i->n", x, m.v), 4, v=(4,)),
    "einsum-row-by-row": use(
        lambda m, x: torch.stack([torch.einsum("i,io->o", r, m.w) for r in x]),
        4,
        w=(4, 3),
    ),
    "einsum-of-one-row": use(
        lambda m, x: torch.einsum("i,io->o", x[0], m.w)[None], 4, w=(4, 3)
    )._replace(X=randn(4, batch=1)),
    "einsum-axes-in-another-order": use(
        lambda m, x: torch.einsum("nti,oi->tno", x, m.w).transpose(0, 1), 3, 4, w=(3, 4)
    ),
    "einsum": use(lambda m, x: torch.einsum("ni,oi->no", x, m.w), 4, **W),
    "einsum-last": use(lambda m, x: torch.einsum("io,ni->on", m.w, x).T, 4, w=(4, 3)),
    "einsum-list": use(lambda m, x: torch.einsum("...i,oi->...o", [x, m.w]), 4, **W),
    "einsum-three": use(
        lambda m, x: torch.einsum("ni,nj,oij->no", x, x.cos(), m.w), 4, w=(3, 4, 4)
    ),
    "einsum-low-rank": use(
        lambda m, x: torch.einsum("ni,ri,or->no", x, m.u, m.v), 4, u=(2, 4), v=(3, 2)
    ),
    "matmul-with-an-imaginary-part": Row(
        lambda: Lambda(lambda m, z: z.imag @ m.w + m.b, w=param(4, 3), b=param(3)),
        lambda: (torch.randn(N, 4, dtype=torch.cdouble),),
    ),
    "einsum-broadcast-weight": use(
        lambda m, x: torch.einsum("ni,io->no", x, m.w), 4, w=(1, 3)
    ),
    "einsum-broadcast-data": use(
        lambda m, x: torch.einsum("oi,ni->no", m.w, x[:, :1]), 4, **W
    ),
    "einsum-broadcast-both": use(
        lambda m, x: torch.einsum("nij,ijo->no", x[:, None], m.w), 4, w=(4, 1, 3)
    ),
    "tensordot-broadcast-weight": use(
        lambda m, x: torch.tensordot(m.w, x, dims=([1], [1])).T, 4, w=(3, 1)
    ),
    "tensordot-broadcast-data": use(
        lambda m, x: torch.tensordot(x[:, :1], m.w, 1), 4, w=(4, 3)
    ),
    "tensordot": use(lambda m, x: torch.tensordot(x, m.w, 1), 4, w=(4, 3)),
    "tensordot-axes": use(
        lambda m, x: torch.tensordot(x, m.w, dims=([1], [1])), 4, **W
    ),
    "tensordot-parameter-first": use(
        lambda m, x: torch.tensordot(m.w, x, dims=([1], [1])).T, 4, **W
    ),
    "sum-of-products": use(lambda m, x: (x[:, None] * m.w).sum(-1), 4, **W),
    "bilinear": use(
        lambda m, x: F.bilinear(x, x.cos(), m.w, m.b), 4, w=(3, 4, 4), b=(3,)
    ),
    "products-of-rows-with-zeros": Row(
        lambda: Lambda(products_with_zeros, w=param(4, 4), v=param(4, 3), s=param()),
        randn(4),
    ),
    "quadratic-form": use(lambda m, x: ((x @ m.w) * x).sum(1), 4, w=(4, 4)),
    "outer": use(lambda m, x: torch.outer(x.sum(1), m.w), 4, w=(3,)),
    "kron": use(lambda m, x: torch.kron(x, m.w[None]), 4, w=(2,)),
    "einsum-of-one-twice": use(
        lambda m, x: torch.einsum("ni,ij,kj->nk", x, m.w, m.w), 4, w=(4, 4)
    ),
    "einsum-of-one-around": use(
        lambda m, x: torch.einsum("ij,nj,jk->nk", m.w, x, m.w), 4, w=(4, 4)
    ),
    "scale-and-shift-by-one": use(
        lambda m, x: F.layer_norm(x, (4,), m.w, m.w), 4, w=(4,)
    ),
    "cdist": use(lambda m, x: torch.cdist(x, m.w), 4, **W),
    "distance-to-prototypes": use(
        lambda m, x: (x[:, None] - m.w).pow(2).sum(-1), 4, **W
    ),
    "cosine-similarity": use(
        lambda m, x: F.cosine_similarity(x[:, None], m.w[None], dim=-1), 4, **W
    ),
} | {
    f"{name}-{t}": use(function, t, 4, **parts)
    for t in LENGTHS
    for name, (function, parts) in {
        "linear-positions": (lambda m, x: F.linear(x, m.w, m.b), B),
        "matmul-positions": (lambda m, x: x @ m.w + m.b, IO),
        "view-in-place": (
            lambda m, x: torch.einsum("nti,oi->not", x, m.w).mul_(m.b[:, None]).exp(),
            B,
        ),
        "slice-of-view-in-place": (
            lambda m, x: torch.einsum("nti,oi->not", x, m.w)[:, 1:].mul_(2),
            {"w": (3, 4)},
        ),
        "spectrum": (lambda m, x: torch.fft.rfft(x).mul(m.w).abs(), {"w": (3,)}),
        "spectrum-filtered": (
            lambda m, x: torch.fft.irfft(
                torch.fft.rfft(x) * torch.fft.rfft(m.w) + torch.view_as_complex(m.v)
            ),
            {"w": (t, 4), "v": (3, 2)},
        ),
        "spectrum-mixed": (  # as in Fourier neural operators
            lambda m, x: torch.fft.irfft(
                torch.einsum(
                    "ntk,tok->nok", torch.fft.rfft(x), torch.view_as_complex(m.w)
                )
            ),
            {"w": (t, 2, 3, 2)},
        ),
        "conv1d-of-gpt": (
            lambda m, x: torch.addmm(m.b, x.reshape(-1, 4), m.w).view(*x.shape[:2], 3),
            IO,
        ),
        "bmm-expanded": (
            lambda m, x: torch.bmm(x, m.w.expand(len(x), 4, 3)),
            {"w": (4, 3)},
        ),
        "bmm-repeated": (
            lambda m, x: torch.bmm(x, m.w.repeat(len(x), 1, 1)),
            {"w": (4, 3)},
        ),
        "baddbmm": (
            lambda m, x: torch.baddbmm(m.b, x, m.w.expand(len(x), 4, 3)),
            IO,
        ),
        "bmm-from-the-left": (
            lambda m, x: torch.bmm(m.w.expand(len(x), 3, 4), x.mT),
            W,
        ),
        "einsum-positions": (lambda m, x: torch.einsum("nti,oi->nto", x, m.w), W),
        "einsum-heads": (
            lambda m, x: torch.einsum("bsd,dhk->bhsk", x, m.w),
            {"w": (4, 2, 2)},
        ),
        "einsum-a-weight-for-each-position": (
            lambda m, x: torch.einsum("nti,tio->nto", x, m.w[: x.shape[1]]),
            {"w": (N, 4, 2)},
        ),
        "matmul-a-weight-for-each-position": (
            lambda m, x: (x[:, :, None] @ m.w[: x.shape[1]])[:, :, 0],
            {"w": (N, 4, 2)},
        ),
        "einsum-sum-of-positions": (
            lambda m, x: torch.einsum("nti,oi->no", x, m.w),
            W,
        ),
        "tensordot-positions": (
            lambda m, x: torch.tensordot(x, m.w, dims=([1, 2], [0, 1])),
            {"w": (t, 4, 2)},
        ),
        "einsum-scales-of-positions": (
            lambda m, x: torch.einsum("nti,it->tni", x, m.w).transpose(0, 1),
            {"w": (4, t)},
        ),
        "einsum-groups": (
            lambda m, x: torch.einsum("nti,goi->ngto", x, m.w)
            + torch.einsum("ngti,goi->ngto", x[:, None].expand(-1, 2, -1, -1), m.w),
            {"w": (2, 4, 4)},
        ),
        "einsum-groups-with-dots": (
            lambda m, x: torch.einsum("...gi,gio->...go", x.unflatten(2, (2, 2)), m.w),
            {"w": (2, 2, 3)},
        ),
        "einsum-groups-on-packed-rows": (
            lambda m, x: torch.einsum(
                "rgi,goi->rog", x.flatten(0, 1).unflatten(1, (2, 2)), m.w
            ).view(*x.shape[:2], 3, 2),
            {"w": (2, 3, 2)},
        ),
        "einsum-groups-added-up": (
            lambda m, x: torch.einsum("nti,tio->no", x, m.w),
            {"w": (t, 4, 2)},
        ),
        "matmul-groups-from-the-left": (
            lambda m, x: (m.w @ x.unsqueeze(3)).squeeze(3),
            {"w": (t, 3, 4)},
        ),
        "matmul-groups-of-one": (
            lambda m, x: x.unsqueeze(1) @ m.w + x[:, None, :, :3] @ m.v,
            {"w": (2, 4, 3), "v": (1, 3, 3)},
        ),
        "bmm-of-positions": (
            lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1),
            {"w": (t, 4, 2)},
        ),
        "bmm-of-positions-from-the-left": (
            lambda m, x: torch.bmm(m.w, x.permute(1, 2, 0)).permute(2, 0, 1),
            {"w": (t, 2, 4)},
        ),
        "baddbmm-of-positions": (
            lambda m, x: torch.baddbmm(m.b[:, None], x.transpose(0, 1), m.w).transpose(
                0, 1
            ),
            {"w": (t, 4, 2), "b": (t, 2)},
        ),
        "mix-positions": (
            lambda m, x: torch.einsum("nti,st->nsi", x, m.w),
            {"w": (2, t)},
        ),
        "matmul-from-the-left": (lambda m, x: m.w @ x, {"w": (2, t)}),
    }.items()
}

CONVOLUTIONS = {
    "conv1d": use(lambda m, x: F.conv1d(x, m.w, m.b), 2, 5, w=(3, 2, 2), b=(3,)),
    "conv1d-options": use(
        lambda m, x: F.conv1d(x, m.w, stride=2, padding=1, dilation=2, groups=2),
        2,
        5,
        w=(4, 1, 2),
    ),
    "conv1d-same": use(
        lambda m, x: F.conv1d(x, m.w, m.b, padding="same"), 2, 4, w=(2, 2, 3), b=(2,)
    ),
    "conv2d": use(
        lambda m, x: F.conv2d(x, m.w, m.b, padding=1), 2, 2, 3, w=(2, 2, 3, 3), b=(2,)
    ),
    "conv2d-depthwise": use(
        lambda m, x: F.conv2d(x, m.w, None, 1, 0, 1, 2), 2, 3, 3, w=(2, 1, 2, 2)
    ),
    "conv3d": use(lambda m, x: F.conv3d(x, m.w), 2, 2, 2, 3, w=(2, 2, 2, 2, 2)),
    "operator-convolution": use(
        lambda m, x: aten.convolution.default(
            x, m.w, m.b, [1, 2], [1, 0], [1, 1], False, [0, 0], 2
        ),
        *(4, 3, 3),
        w=(2, 2, 2, 2),
        b=(2,),
    ),
    "operator-transposed-convolution": use(
        lambda m, x: torch.convolution(
            x, m.w, m.b, [2, 2], [1, 1], [1, 1], True, [1, 1], 2
        ),
        *(4, 3, 3),
        w=(4, 1, 2, 2),
        b=(2,),
    ),
    "torch-conv2d": use(
        lambda m, x: torch.conv2d(x, m.w, m.b), 2, 2, 3, w=(2, 2, 2, 2), b=(2,)
    ),
    "convolution": use(
        lambda m, x: torch.convolution(x, m.w, m.b, [1], [0], [1], False, [0], 1),
        2,
        4,
        w=(2, 2, 2),
        b=(2,),
    ),
    **{
        f"{name}-of-{rows}-rows-each": use(  # as of frames, or of sources
            lambda m, x, function=function: function(x.flatten(0, 1), m.w).unflatten(
                0, (len(x), -1)
            ),
            *(rows, 2, *sizes),
            w=shape,
        )
        for rows in (1, 3)
        for name, function, sizes, shape in [
            ("conv1d", F.conv1d, (6,), (3, 2, 2)),
            ("conv1d-of-few-steps", F.conv1d, (2,), (5, 2, 2)),
            ("conv2d", partial(F.conv2d, padding=1, groups=2), (4, 4), (4, 1, 2, 2)),
            ("conv3d", F.conv3d, (3, 3, 2), (2, 2, 2, 1, 1)),
            (
                "conv-transpose1d",
                partial(F.conv_transpose1d, stride=3),
                (4,),
                (2, 1, 4),
            ),
            ("conv-transpose2d", F.conv_transpose2d, (2, 2), (2, 2, 2, 2)),
        ]
    },
    "conv-transpose1d": use(
        lambda m, x: F.conv_transpose1d(x, m.w, m.b), 2, 3, w=(2, 2, 2), b=(2,)
    ),
    "conv-transpose2d-options": use(
        lambda m, x: F.conv_transpose2d(
            x, m.w, None, stride=2, output_padding=1, groups=2
        ),
        2,
        2,
        2,
        w=(2, 1, 2, 2),
    ),
    "conv1d-of-one-step": use(  # strides as if channels were the last axis
        lambda m, x: F.conv1d(x.mT, m.w, m.b, padding=1), 1, 3, w=(2, 3, 3), b=(2,)
    ),
    "conv-transpose1d-of-one-step": use(
        lambda m, x: F.conv_transpose1d(x.mT, m.w), 1, 3, w=(3, 2, 2)
    ),
    "unfold-and-matmul": use(lambda m, x: m.w @ F.unfold(x, 2), 2, 3, 3, w=(2, 8)),
    "conv-of-one-image": use(  # the batch as channels: a filter for each sample
        lambda m, x: F.conv1d(
            x.reshape(1, -1, x.shape[-1]),
            m.w.repeat(len(x), 1, 1),
            groups=len(x) * 2,
        ).view(len(x), 2, -1),
        2,
        4,
        w=(2, 1, 2),
    ),
}

TABLE = {"w": (5, 3)}
LOOKUPS = {
    f"{name}-{t}": lookup(function, t, **parts)
    for t in LENGTHS
    for name, (function, parts) in {
        "embedding": (lambda m, i: F.embedding(i, m.w).sin(), TABLE),
        "torch-embedding": (lambda m, i: torch.embedding(m.w, i, 2).sin(), TABLE),
        "operator-embedding": (lambda m, i: aten.embedding(m.w, i).sin(), TABLE),
        "embedding-padding": (
            lambda m, i: F.embedding(i, m.w, padding_idx=2).sin(),
            TABLE,
        ),
        "getitem": (lambda m, i: m.w[i].sin(), TABLE),
        "getitem-equal": (lambda m, i: m.w[i * 0].sin(), TABLE),
        "getitem-negative": (lambda m, i: m.w[-i - 1].sin(), TABLE),
        "getitem-all-axes": (lambda m, i: m.w[i, :].sin(), TABLE),
        "getitem-ellipsis": (lambda m, i: m.w[i, ...].sin(), TABLE),
        "getitem-matrices": (lambda m, i: m.w[i].sin(), {"w": (5, 2, 3)}),
        "getitem-of-a-view": (
            lambda m, i: m.w.view(5, 2, 2)[i].flatten(2).sin(),
            {"w": (5, 4)},
        ),
        "getitem-columns": (lambda m, i: m.w[:, i % 3].movedim(0, -1).sin(), TABLE),
        "getitem-two-axes": (lambda m, i: m.w[i, i.flip(1) % 3].sin(), TABLE),
        "index-select": (
            lambda m, i: m.w.index_select(0, i.flatten()).view(*i.shape, -1).sin(),
            TABLE,
        ),
        "gather": (
            lambda m, i: m.w.expand(len(i), -1, -1)
            .gather(1, i[..., None].expand(-1, -1, 3))
            .sin(),
            TABLE,
        ),
        "take-along-dim": (
            lambda m, i: torch.take_along_dim(m.w.T[None], i[:, None], 2).sin(),
            TABLE,
        ),
        "take": (lambda m, i: torch.take(m.w, i).sin(), TABLE),
        "one-hot": (lambda m, i: (F.one_hot(i, 5).to(m.w.dtype) @ m.w).sin(), TABLE),
        "embedding-bag": (
            lambda m, i: F.embedding_bag(i, m.w, mode="sum").sin(),
            TABLE,
        ),
        "embedding-bag-max": (
            lambda m, i: F.embedding_bag(i % 2, m.w, mode="max").sin(),
            TABLE,
        ),
        "column": (lambda m, i: m.v.view(-1, 1)[i].sin(), {"v": (5,)}),
        "embedding-bag-in-the-old-order": (
            lambda m, i: table_first(m.w, i).sin(),
            TABLE,
        ),
        "embedding-bag-mean": (lambda m, i: F.embedding_bag(i, m.w).sin(), TABLE),
        "embedding-bag-weights": (
            lambda m, i: F.embedding_bag(
                i, m.w, mode="sum", per_sample_weights=i.to(F64).cos()
            ).sin(),
            TABLE,
        ),
        "embedding-bag-padded": (
            lambda m, i: F.embedding_bag(i, m.w, padding_idx=-2).sin(),
            TABLE,
        ),
        "embedding-bag-of-offsets": (  # bags of one or two, and an empty one
            lambda m, i: F.embedding_bag(
                i.flatten(),
                m.w,
                torch.arange(i.numel()).view_as(i)[:, [0, 1, 1]].ravel(),
            )
            .view(len(i), 3, 3)
            .sin(),
            TABLE,
        ),
        "embedding-bag-up-to-the-end": (
            lambda m, i: F.embedding_bag(
                i.flatten(),
                m.w.tanh(),
                torch.arange(0, i.numel() + 1, i.shape[1]),
                mode="sum",
                include_last_offset=True,
            ).sin(),
            TABLE,
        ),
        "embedding-bag-learned-weights": (
            lambda m, i: F.embedding_bag(
                i, m.w, mode="sum", per_sample_weights=m.w[:1, :1].exp().expand(i.shape)
            ).sin(),
            TABLE,
        ),
        "embedding-of-an-expression": (
            lambda m, i: F.embedding(i, m.w.tanh() @ m.v).sin(),
            {"w": (5, 2), "v": (2, 3)},
        ),
        "two-tables": (
            lambda m, i: (m.w[i] + m.v[i % 2] * m.w[i.flip(1)]).sin(),
            {"w": (5, 3), "v": (2, 3)},
        ),
        "factorized": (  # as ALBERT does
            lambda m, i: (F.embedding(i, m.w) @ m.v.T).sin(),
            {"w": (5, 2), "v": (3, 2)},
        ),
        "sparse": (lambda m, i: F.embedding(i, m.w, sparse=True).sin(), TABLE),
        "embedding-renormalized": (
            lambda m, i: F.embedding(i, m.w, max_norm=0.5).sin(),
            TABLE,
        ),
        "embedding-bag-renormalized": (
            lambda m, i: F.embedding_bag(i, m.w, max_norm=0.5, mode="max").sin(),
            TABLE,
        ),
        "sparse-of-the-sample": (
            lambda m, i: torch.stack(
                [F.embedding(k, k.max() * m.w, sparse=True) for k in i]
            ).sin(),
            TABLE,
        ),
    }.items()
} | {
    "getitem-of-one-index": lookup(lambda m, i: m.w[i].sin(), **TABLE),
}


# x is [N, 3, 4]
class OwnList(list):
    """A class of lists that ``torch.utils._pytree`` does not know."""


SHIFT = {"w": (4,)}
ELEMENTWISE = {
    "mul": lambda m, x: x * m.w,
    "mul-parameter-first": lambda m, x: m.w * x,
    "mul-method": lambda m, x: x.mul(m.w),
    "mul-in-place": lambda m, x: x.clone().mul_(m.w),
    "mul-if-not-equal": lambda m, x: x if torch.equal(x, m.w) else x * m.w,
    "add": lambda m, x: x + m.w,
    "add-alpha": lambda m, x: torch.add(x, m.w, alpha=2),
    "add-in-place": lambda m, x: x.clone().add_(m.w, alpha=0.5),
    "iadd": lambda m, x: iadd(x.clone(), m.w),
    "sub": lambda m, x: x - m.w,
    "rsub": lambda m, x: m.w - x,
    "rsub-function": lambda m, x: torch.rsub(x, m.w),
    "div": lambda m, x: x / (2 + m.w.cos()),
    "rdiv": lambda m, x: m.w / (2 + x),
    "scale-and-shift": lambda m, x: x * (1 + m.w) + m.w.sin(),
    "addcmul": lambda m, x: torch.addcmul(m.w, x, m.w, value=0.5),
    "addcmul-in-place": lambda m, x: x.clone().addcmul_(x, m.w),
    "addcdiv": lambda m, x: torch.addcdiv(x, m.w, 2 + x.cos()),
    "lerp-end": lambda m, x: torch.lerp(x, m.w.expand_as(x), 0.3),
    "add-expanded": lambda m, x: x + (2 * m.w).expand(len(x), *x.shape[1:]),
    "add-expanded-rows": lambda m, x: m.w[:1].expand(len(x), 1, 4) + x.cos(),
    "mul-expanded": lambda m, x: m.w.softmax(0).expand_as(x) * x,
    "add-repeated": lambda m, x: x + m.w.repeat(len(x), 1, 1),
    "mul-side-by-side": lambda m, x: x * m.w[:2].repeat(x.shape[1], 2),
    "where-expanded": lambda m, x: torch.where(x > 0, x, m.w.expand_as(x)),
    "expanded-twice": lambda m, x: x + m.w.expand_as(x) + m.w.expand_as(x) * x,
    "lerp-weight": lambda m, x: torch.lerp(x, x.cos(), m.w),
    "pow": lambda m, x: (2 + x).pow(m.w),
    "pow-of-a-parameter": lambda m, x: (2 + m.w.sin()) ** x,
    "where": lambda m, x: torch.where(x > 0, x, m.w),
    "maximum": lambda m, x: torch.maximum(x, m.w),
    "clamp": lambda m, x: x.clamp(min=m.w),
    "hypot": lambda m, x: torch.hypot(x, m.w),
    "atan2": lambda m, x: torch.atan2(x, m.w),
    "logaddexp": lambda m, x: torch.logaddexp(x, m.w),
    "slice-in-place": lambda m, x: slice_in_place(x, m.w),
    "setitem": lambda m, x: setitem(x, m.w),
    "masked-by-a-parameter": lambda m, x: masked(x, m.w),
    "picked-by-a-mask": lambda m, x: x.masked_scatter(
        x > 0, m.w.expand_as(x)[x > 0].sin()
    ),
    "picked-by-masked-select": lambda m, x: x.masked_scatter(
        x > 0, m.w.masked_select(mask=x > 0).sin()
    ),
    "picked-on-other-axes": lambda m, x: x.index_put(
        (x[..., 0] > 0,), m.w.expand(2, *x.shape)[0, x[..., 0] > 0].sin()
    ),
    "left-by-a-mask": lambda m, x: m.w.expand_as(x).masked_scatter(x > 0.4, x[x > 0.4])
    + left(x.flatten(0, 1), m.w).view_as(x),
    "picked-none": lambda m, x: x * m.w + m.w.expand_as(x)[x > 9].sum(),
    "aten-index-put": lambda m, x: aten.index_put(
        x, [None, torch.tensor([0, 2])], m.w.expand(len(x), 2, 4), True
    ),
    "index-add": lambda m, x: x.index_add(
        1, torch.tensor([0, 2]), m.w.expand(len(x), 2, 4)
    ),
    "index-put": lambda m, x: x.index_put((torch.arange(len(x)), torch.tensor(1)), m.w),
    "gate": lambda m, x: torch.sigmoid(m.w) * x + (1 - torch.sigmoid(m.w)) * x.cos(),
    "swish-beta": lambda m, x: x * torch.sigmoid(m.w * x),
    "prelu": lambda m, x: F.prelu(x.mT, m.w).mT,
    "glu-with-a-parameter": lambda m, x: F.glu(torch.cat([x, m.w.expand_as(x)], -1)),
    "stack-with-a-parameter": lambda m, x: torch.stack([x, m.w.expand_as(x)], 1),
    "vecdot": lambda m, x: torch.linalg.vecdot(x, m.w),
    "cross": lambda m, x: torch.linalg.cross(x[..., :3], m.w[:3].expand_as(x[..., :3])),
    "complex": lambda m, x: torch.view_as_real(torch.complex(x, m.w.expand_as(x)) ** 2),
    "in-place-as-real": lambda m, x: written_as_real(torch.complex(x, x.sin()), m.w),
    "in-place-as-complex": lambda m, x: written_as_complex(
        torch.stack([x.transpose(0, 1), x.transpose(0, 1).sin()], -1), m.w
    ).transpose(0, 1),
    "sparse": lambda m, x: x.transpose(0, 1)
    .flatten(1)
    .mT.matmul((m.w[None, : x.shape[1]] * x.new_ones(2, x.shape[1])).to_sparse().mT)
    .view(*x.shape[::2], 2),
}


def written_as_real(z: Tensor, w: Tensor) -> Tensor:
    """Scale the real part of complex numbers in place, and shift the other one."""
    z = z * 1
    torch.view_as_real(z)[..., 0] *= w
    z.imag += w
    return z.abs()


def written_as_complex(parts: Tensor, w: Tensor) -> Tensor:
    """Rotate pairs of real numbers in place."""
    torch.view_as_complex(parts).mul_(torch.polar(torch.ones_like(w), w))
    return parts.prod(-1)


# With a parameter of complex numbers, for which only what is linear is defined
COMPLEX = {
    "matrix": lambda m, z: z @ m.w,
    "scale": lambda m, z: z * m.w[0] + m.w[1],
    "conjugate": lambda m, z: z @ m.w.mH,
    "spectrum": lambda m, z: torch.fft.ifft(torch.fft.fft(z) * m.w[0]),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters(name: str) -> None:
    """Individual gradients are right, and what squares them is refused."""

    def forward(m: Module, x: Tensor) -> Tensor:
        z = m.f(torch.complex(m.first(x), x))
        return m.last(COMPLEX[name](m, z).abs())

    model = Lambda(
        forward,
        first=nn.Linear(4, 4, dtype=F64),
        f=nn.Linear(4, 4, dtype=torch.cdouble),
        w=nn.Parameter(torch.randn(4, 4, dtype=torch.cdouble)),
        last=nn.Linear(4, 3, dtype=F64),
    )
    x, loss = torch.randn(N, 4, dtype=F64), nn.CrossEntropyLoss()
    params = dict(model.named_parameters())
    shares = F.cross_entropy(model(x), classes(model(x)), reduction="none") / N
    rows = [
        torch.autograd.grad(share, list(params.values()), retain_graph=True)
        for share in shares
    ]
    model, loss = extend(model), extend(loss)
    with backpack(BatchGrad()):
        loss(model(x), classes(model(x))).backward()
    for (n, p), gradients in zip(params.items(), zip(*rows)):
        assert_agrees(p.grad_batch, torch.stack(gradients), n)
        assert_agrees(p.grad, sum(gradients), n)
    for ext in (BatchL2Grad(), Variance(), DiagGGNExact()):
        value, names = loss(model(x), classes(model(x))), "'f.weight'.*'w'|'w'.*'f.wei"
        with pytest.raises(NotImplementedError, match=f"complex.*({names})"):
            with backpack(ext):
                value.backward()


def iadd(x: Tensor, w: Tensor) -> Tensor:
    """Add in place, by the operator."""
    x += w
    return x


def slice_in_place(x: Tensor, w: Tensor) -> Tensor:
    """Change a part of a tensor in place."""
    x = x.clone()
    x[:, 1:] *= w
    x[..., 0].add_(w[0])
    return x


def setitem(x: Tensor, w: Tensor) -> Tensor:
    """Write a parameter into the data."""
    x = x.clone()
    x[:, 0] = w
    return x


def masked(x: Tensor, w: Tensor) -> Tensor:
    """Write a parameter where data says so, as masked models do."""
    x = x.clone()
    x[x[..., 0] > 0] = w
    return x


def left(x: Tensor, w: Tensor) -> Tensor:
    """Write data over rows of a parameter, none of a sample here and there."""
    out, mask = w.expand_as(x).clone(), x[..., 0] > 0.4
    out[mask] = x[mask]
    return out


def left_behind(x: Tensor, w: Tensor) -> Tensor:
    """Do so where another axis is in front, with data of a single sample at most."""
    out, mask = w.expand(x.shape[0], *x.shape).clone(), x[..., 0] > 0.4
    out[:, mask] = x[mask].expand(len(x), -1, -1)
    return out.mean(0)


ELEMENTWISE_ROWS = {
    name: use(function, 3, 4, **SHIFT) for name, function in ELEMENTWISE.items()
} | {
    "scalar": use(lambda m, x: x * m.w, 4, w=()),
    "scalar-shift": use(lambda m, x: m.w + x, 3, 4, w=()),
    "scalar-item-of-a-parameter": use(lambda m, x: x * m.w[1] + m.w[0], 3, w=(2,)),
    "gate-of-zero": use(
        lambda m, x: x + m.gate.tanh() * (x @ m.w),
        4,
        w=(4, 4),
        gate=lambda: nn.Parameter(torch.zeros(())),
    ),
    "layer-scale": use(
        lambda m, x: x + m.g * m.f(x), 4, g=(4,), f=lambda: nn.Linear(4, 4)
    ),
    "as-many-numbers-as-samples": use(lambda m, x: x * m.w, N, w=(N,)),
    "a-square-of-samples": use(lambda m, x: x * m.w + m.w, N, N, w=(N, N)),
    "a-column-of-samples": use(lambda m, x: x * m.w, N, 2, w=(N, 1)),
}


def rms(x: Tensor) -> Tensor:
    """Normalize by the root of the mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


G4 = {"w": (4,), "b": (4,)}
NORMS = {
    "layer-norm": use(lambda m, x: F.layer_norm(x, (4,), m.w, m.b), 3, 4, **G4),
    "layer-norm-no-bias": use(
        lambda m, x: F.layer_norm(x, (4,), weight=m.w), 4, w=(4,)
    ),
    "layer-norm-two-axes": use(
        lambda m, x: torch.layer_norm(x, (N, 3), m.w, m.b), N, 3, w=(N, 3), b=(N, 3)
    ),
    "rms-norm": use(lambda m, x: F.rms_norm(x, (4,), m.w, 1e-5), 3, 4, w=(4,)),
    "rms-norm-by-hand": use(lambda m, x: m.w * rms(x), 3, 4, w=(4,)),
    "rms-norm-of-gemma": use(lambda m, x: rms(x) * (1.0 + m.w), N, 4, w=(4,)),
    "layer-norm-by-hand": use(
        lambda m, x: m.w * (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
        + m.b,
        3,
        4,
        **G4,
    ),
    "scale-norm": use(lambda m, x: m.g * F.normalize(x, dim=-1), 3, 4, g=()),
    "torch-group-norm": use(lambda m, x: torch.group_norm(x, 2, m.w, m.b), 4, 3, **G4),
    "torch-instance-norm": use(
        lambda m, x: torch.instance_norm(x, m.w, m.b, None, None, True, 0.1, 0.3, True),
        *(4, 3),
        **G4,
    ),
    "operator-batch-norm": use(
        lambda m, x: aten.batch_norm.default(
            x, m.w, m.b, m.mean, m.var, False, 0.1, 0.3, True
        ),
        *(4, 3),
        **G4,
        mean=lambda: nn.Buffer(torch.randn(4)),
        var=lambda: nn.Buffer(torch.rand(4) + 1),
    ),
    "operator-layer-norm": use(
        lambda m, x: aten.layer_norm.default(x, [4], m.w, m.b, 0.3), 3, 4, **G4
    ),
    "group-norm": use(lambda m, x: F.group_norm(x, 2, m.w, m.b), 4, 3, **G4),
    "instance-norm": use(
        lambda m, x: F.instance_norm(x, weight=m.w, bias=m.b), 4, 3, **G4
    ),
    "batch-norm": use(
        lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b),
        4,
        3,
        **G4,
        mean=lambda: nn.Buffer(torch.zeros(4)),
        var=lambda: nn.Buffer(torch.ones(4)),
    ),
    "batch-norm-in-an-exported-program": use(
        lambda m, x: torch.ops.aten._native_batch_norm_legit_no_training.default(
            x, m.w, m.b, m.mean, m.var, 0.1, 1e-5
        )[0],
        4,
        3,
        **G4,
        mean=lambda: nn.Buffer(torch.zeros(4)),
        var=lambda: nn.Buffer(torch.ones(4)),
    ),
    "frozen-batch-norm": use(
        lambda m, x: x * (m.w * m.var.rsqrt())[:, None]
        + (m.b - m.mean * m.w * m.var.rsqrt())[:, None],
        4,
        3,
        **G4,
        mean=lambda: nn.Buffer(torch.zeros(4)),
        var=lambda: nn.Buffer(torch.ones(4)),
    ),
    "adaptive-layer-norm": use(
        lambda m, x: F.layer_norm(x, (4,)) * (1 + m.s(x.mean(1))[:, None]),
        3,
        4,
        s=lambda: nn.Linear(4, 4),
    ),
    "global-response-norm": use(
        lambda m, x: m.w * (x * x.norm(dim=1, keepdim=True)) + m.b + x, 3, 4, **G4
    ),
}


def packed(t: int, **options: Any) -> Callable:
    """Make a function that attends within the sequence, by PyTorch's function."""

    def function(m: Module, x: Tensor) -> Tensor:
        q = x.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            q, q, q, 4, 2, m.w, m.b, None, None, False, 0.0, m.out, m.c, **options
        )
        return out.transpose(0, 1)

    return function


PACKED = {"w": (12, 4), "b": (12,), "out": (4, 4), "c": (4,)}


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any = 0.0) -> Tensor:
    """Attend by hand."""
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    return scores.softmax(-1) @ v


def relative(t: int) -> Tensor:
    """Return the distances of all pairs of positions, from zero on."""
    i = torch.arange(t)
    return i[None] - i[:, None] + t - 1


def heads(x: Tensor) -> Tensor:
    """Split features into two heads ``[N, 2, T, 2]``."""
    return x.unflatten(-1, (2, 2)).transpose(1, 2)


def alibi(m: Module, x: Tensor) -> Tensor:
    """Attend with biases that grow with the distance, by slopes that are learned."""
    distance = relative(x.shape[1]).to(x.dtype).abs()
    bias = m.slopes[:, None, None] * distance
    return attend(heads(x), heads(x.cos()), heads(x), bias)


def rotate(m: Module, x: Tensor) -> Tensor:
    """Rotate queries and keys by angles that are learned."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * m.w
    q = torch.cat([x[..., :2] * angle.cos(), x[..., 2:] * angle.sin()], -1)
    return attend(q, q, x)


ATTENTION = {
    f"{name}-{t}": use(function, t, 4, **parts)
    for t in LENGTHS
    for name, (function, parts) in {
        "multi-head-attention-forward": (packed(t), PACKED),
        "attention-with-biases": (
            lambda m, x: m.a(x, x, x)[0],
            {
                "a": lambda: nn.MultiheadAttention(
                    4, 2, add_bias_kv=True, batch_first=True
                )
            },
        ),
        "attention-separate-projections": (
            lambda m, x: m.a(x, x[..., :3], x[..., :2])[0],
            {
                "a": lambda: nn.MultiheadAttention(
                    4, 2, kdim=3, vdim=2, batch_first=True
                )
            },
        ),
        "attention-weights": (
            lambda m, x: torch.cat(m.a(x, x, x), -1),
            {"a": lambda: nn.MultiheadAttention(4, 1, batch_first=True)},
        ),
        "learned-keys-and-values": (
            lambda m, x: F.scaled_dot_product_attention(
                x, m.k.expand(len(x), -1, -1), m.v.expand(len(x), -1, -1)
            ),
            {"k": (N, 4), "v": (N, 4)},
        ),
        "learned-keys-that-broadcast": (
            lambda m, x: F.scaled_dot_product_attention(
                heads(x), heads(m.k[None]), heads(m.v[None])
            ),
            {"k": (3, 4), "v": (3, 4)},
        ),
        "learned-queries": (  # as in the Perceiver
            lambda m, x: attend(m.q, x, x),
            {"q": (2, 4)},
        ),
        "as-many-learned-queries-as-samples": (
            lambda m, x: attend(m.q.unsqueeze(0), x, x),
            {"q": (N, 4)},
        ),
        "learned-queries-by-pytorch": (
            lambda m, x: m.a(m.q.repeat(len(x), 1, 1), x, x)[0],
            {
                "q": (1, N, 4),
                "a": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            },
        ),
        "prefix": (  # as in prefix tuning
            lambda m, x: attend(
                x,
                torch.cat([m.k.expand(len(x), -1, -1), x], 1),
                torch.cat([m.v.expand(len(x), -1, -1), x], 1),
            ),
            {"k": (2, 4), "v": (2, 4)},
        ),
        "sinks": (
            lambda m, x: torch.cat(
                [x @ x.mT, m.sink.expand(len(x), x.shape[1], 1)], -1
            ).softmax(-1)[..., :-1]
            @ x,
            {"sink": (1,)},
        ),
        "relative-bias": (
            lambda m, x: attend(x, x, x, m.table[relative(x.shape[1])]),
            {"table": (2 * N,)},
        ),
        "relative-bias-of-heads": (  # as in T5 and Swin
            lambda m, x: attend(
                heads(x),
                heads(x),
                heads(x),
                m.table(relative(x.shape[1])).permute(2, 0, 1)[None],
            ),
            {"table": lambda: nn.Embedding(2 * N, 2)},
        ),
        "relative-bias-as-mask": (
            lambda m, x: F.scaled_dot_product_attention(
                x, x, x, attn_mask=m.table[relative(x.shape[1])]
            ),
            {"table": (2 * N,)},
        ),
        "relative-bias-as-mask-of-pytorch": (
            lambda m, x: m.a(x, x, x, attn_mask=m.table[relative(x.shape[1])])[0],
            {
                "table": (2 * N,),
                "a": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            },
        ),
        "relative-keys": (  # as in Shaw et al.
            lambda m, x: (
                x @ x.mT + torch.einsum("nti,tsi->nts", x, m.r[relative(x.shape[1])])
            ).softmax(-1)
            @ x,
            {"r": (2 * N, 4)},
        ),
        "content-bias": (  # as in Transformer-XL
            lambda m, x: attend(x + m.u, x, x) + attend(x + m.v, x.cos(), x),
            {"u": (4,), "v": (4,)},
        ),
        "alibi": (alibi, {"slopes": (2,)}),
        "rotary": (rotate, {"w": (2,)}),
        "temperature": (
            lambda m, x: (x @ x.mT * m.scale.exp()).softmax(-1) @ x,
            {"scale": ()},
        ),
        "query-bias-without-key-bias": (  # as in BEiT
            lambda m, x: F.linear(x, m.w, torch.cat([m.q, torch.zeros_like(m.q), m.v])),
            {"w": (6, 4), "q": (2,), "v": (2,)},
        ),
    }.items()
}


def of_inputs(function: Callable[[Tensor], Tensor], says: str) -> Row:
    """Make a row in which a layer gets a function of the inputs.

    Args:
        function: The function.
        says: Pattern for what a refusal says.

    Returns:
        The row.
    """
    return Row(
        lambda: Lambda(lambda m, x: m.layer(function(x)), layer=nn.Linear(4, 3)),
        randn(4),
        says=f"layer.weight.*{says}",
    )


def of_two(function: Callable, *more: int) -> Row:
    """Make a row whose function has two parameters, ``w`` and ``v``."""
    return use(function, *more, 4, w=(4, 4), v=(4,))


def keep(m: Module, result: Tensor, other: Tensor) -> Tensor:
    """Keep what is no result, for a term of the loss."""
    m.kept = other
    return result


# The library may say no to these, with a reason
EITHER = {
    "scale-grad-by-frequency": lookup(
        lambda m, i: F.embedding(i, m.w, scale_grad_by_freq=True).sin(), 3, **TABLE
    )._replace(alone=False, says="embedding|scale_grad_by_freq"),
    "scale-grad-by-frequency-layer": Row(
        lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), tokens(3), alone=False
    ),
    "embedding-bag-offsets": Row(
        lambda: Lambda(
            lambda m, i: F.embedding_bag(
                i.flatten(), m.w, torch.arange(len(i)) * i.shape[1]
            ),
            w=param(5, 3),
        ),
        tokens(3),
        says="embedding_bag|offsets|w",
    ),
    "left-by-a-mask-behind": use(
        lambda m, x: left_behind(x, m.w), 3, 4, w=(4,)
    )._replace(says="__setitem__"),
    "function-whose-second-result-is-kept": of_two(
        lambda m, x: keep(m, *Pair.apply(x, m.w, m.v))
    )._replace(
        value=lambda m, loss, X: against_real(m(*X), loss) + m.kept.square().sum(),
        quantities=FIRST_ORDER,
        says=r"\bw\b|\bv\b",
    ),
    # what comes out has no gradient, and nothing is known of it
    "numbers-of-inputs": of_inputs(
        lambda x: torch.tensor(x.tolist(), dtype=x.dtype), "numbers in Python"
    ),
    "numpy-of-inputs": of_inputs(lambda x: torch.tensor(x.cpu().numpy() + 1), "NumPy"),
    "derivative-inside": use(  # a force, as in energy models
        lambda m, x: energy_gradient(m, x), 4, w=(4, 3)
    )._replace(says=r"\bw\b", quantities=FIRST_ORDER),
}


# Functions whose derivative with respect to the data is the prediction, or a part
INNER: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "product": lambda m, x: (x @ m.w).tanh() * m.v,
    "product-and-vector": lambda m, x: (x @ m.w).tanh() @ m.v,
    "two-products": lambda m, x: F.silu(x @ m.w) @ (m.w * m.v),
    "bias": lambda m, x: (x @ m.w + m.v).sin(),
    "attention": lambda m, x: (x @ m.w @ x.mT).softmax(-1) @ (x * m.v),
    "picked": lambda m, x: (x[:, [0, 1, 1]] @ m.w).cos() @ m.v,
    "quadratic": lambda m, x: ((x @ m.w + m.v) * x).sum(-1).exp(),
    "normalized-weight": lambda m, x: (x @ (m.w / m.w.norm(dim=0) * m.v)).tanh(),
    "batched": lambda m, x: (x[:, None] @ m.w[None, None]).tanh() @ m.v,
    "layer": lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w, m.v).tanh(),
    "bilinear": lambda m, x: F.bilinear(x, x.sin(), m.w[None]).tanh() * m.v,
    "convolution": lambda m, x: F.conv1d(x, m.w[:3, :3, None]).tanh() * m.v,
    "group-norm": lambda m, x: F.group_norm((x @ m.w).mT, 2, m.v, m.v).tanh(),
}


def inner(function: Callable, whole: bool) -> Callable[[Module, Tensor], Tensor]:
    """Differentiate a function, by itself or beside it."""

    def forward(m: Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = function(m, x)
        (derivative,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        parts = [y, derivative] if whole else [derivative]
        return torch.cat([part.flatten(1) for part in parts], 1)

    return forward


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "beside-it"])
@pytest.mark.parametrize("batch", [1, N])
@pytest.mark.parametrize("name", INNER)
def test_derivative_of_data(name: str, batch: int, whole: bool) -> None:
    """The function's uses are those that were seen; those of its derivative are new."""
    forward = inner(INNER[name], whole)

    def model() -> Module:
        return Lambda(forward, w=param(4, 4), v=param(4))

    assert_right(Row(model, randn(3, 4, batch=batch)))


def energy_gradient(m: Module, x: Tensor) -> Tensor:
    """Differentiate a function of the data inside the forward pass."""
    energy = (x @ m.w).cos().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force


def test_dot_products_of_large_rows() -> None:
    """Rows of different indices have nothing in common, however large they are."""
    table = nn.Embedding(3, 2)
    with backpack(BatchDotGrad()):
        extend(table)(torch.tensor([[0], [2]])).mul(1e25).sum().backward()
    inf = math.inf
    assert_agrees(table.weight.batch_dot, torch.tensor([[inf, 0.0], [0.0, inf]]))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("quantity", [BatchGrad, BatchL2Grad, SumGradSquared])
def test_padding_that_is_not_finite(quantity: Callable, layer: Callable) -> None:
    """What would be added to rows that are left out is left out, whatever it is."""
    model = Lambda(
        lambda m, i: m.table(i).square().sum(-1).sqrt().reshape(len(i), -1).sum(1),
        table=layer(4, 2, padding_idx=0),
    ).to(F64)
    ids = torch.tensor([[1, 0], [0, 0], [2, 3]])
    table = model.table.weight
    expected = torch.stack(
        [torch.autograd.grad(model(i[None])[0], table)[0] for i in ids]
    )
    extend(model)
    with backpack(quantity()):
        model(ids).sum().backward()
    value = {
        BatchGrad: lambda: (table.grad_batch, expected),
        BatchL2Grad: lambda: (table.batch_l2, expected.square().sum((1, 2))),
        SumGradSquared: lambda: (table.sum_grad_squared, expected.square().sum(0)),
    }[quantity]()
    assert_agrees(*value)


class Pair(torch.autograd.Function):
    """Two results, whose derivatives can't be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, v: Tensor) -> Tuple[Tensor, Tensor]:
        """Multiply twice."""
        ctx.save_for_backward(x, w, v)
        ctx.set_materialize_grads(False)
        return x @ w, x * v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        """Differentiate both."""
        x, w, v = ctx.saved_tensors
        g = x.new_zeros(len(x), *x.shape[1:-1], w.shape[1]) if g is None else g
        h = torch.zeros_like(x) if h is None else h
        rows = x.flatten(0, -2)
        return (
            g @ w.mT + h * v,
            rows.mT @ g.flatten(0, -2),
            (h * x).sum_to_size(v.shape),
        )


def counted(m: Module, x: Tensor) -> Tensor:
    """Keep statistics of the batch, as a table of codes does."""
    with torch.no_grad():
        m.mean = x.mean(0)
        m.largest = x.abs().max().item()
    return x


class Both(Pair):
    """The same, if both results are used: without one's gradient, it has none."""

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        """Differentiate both."""
        assert g is not None and h is not None
        return Pair.backward(ctx, g, h)


class Picky(torch.autograd.Function):
    """The sine; its derivative needs a gradient, which it does not ask for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute it."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Differentiate it."""
        (x,) = ctx.saved_tensors
        return g.mul(x.cos())


class Rounded(torch.autograd.Function):
    """Numbers rounded to multiples of a step, whose size is learned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        """Round."""
        ctx.save_for_backward(x, step)
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Take the rounded numbers for the numbers."""
        x, step = ctx.saved_tensors
        return g, (g * (torch.round(x / step) - x / step)).sum().reshape(step.shape)


def noted(g: Tensor) -> Tensor:
    """Keep statistics of the batch, and look at them."""
    largest = g.abs().amax(0)
    return g if bool(largest.isfinite().all()) else torch.zeros_like(g)


RULES: Dict[str, Callable] = {  # by which samples stay separate
    "reversed": lambda g: -0.5 * g,
    "masked": lambda g: g * (torch.arange(g.shape[-1], device=g.device) > 0),
    "turned": lambda g: g.mT.contiguous().mT.flip(-1) + g,
    "noted": noted,
    "by-rows": lambda g: torch.stack([2 * row for row in g]),
}
FUNCTIONS = {
    **{
        f"backward-{name}": of_two(
            lambda m, x, r=r: Backward.apply(r, real(x), x @ m.w) * m.v
        )
        for name, r in RULES.items()
    },
    "with-a-parameter": of_two(lambda m, x: Double.apply(x, m.v) @ m.w),
    "of-parameters-alone": of_two(lambda m, x: x * Double.apply(m.v, m.v) @ m.w),
    "behind-its-own-parameter": of_two(
        lambda m, x: Double.apply((x * m.v).tanh() @ m.w, m.v), 3
    ),
    "in-front-of-it": of_two(lambda m, x: Double.apply(x, m.v).sin() @ m.w * m.v),
    "with-an-expression": of_two(
        lambda m, x: (lambda e: Double.apply(x * e, e) @ m.w * e)(m.v.tanh())
    ),
    "with-a-parameter-and-its-expression": of_two(
        lambda m, x: sum(Pair.apply(x, m.v.diag() * m.w, m.v))
    ),
    "whose-other-results-matter": of_two(  # backward is not asked without gradients
        lambda m, x: Double.apply(Picky.apply(x * m.v), m.v) @ m.w
    ),
    "in-a-chain": of_two(
        lambda m, x: Double.apply(Pair.apply(Double.apply(x, m.v), m.w, m.v)[1], m.v), 3
    ),
    "crossed": of_two(
        lambda m, x: (lambda a, b: Pair.apply(a, m.w, m.v)[0] + b)(
            *Pair.apply(x, m.w, m.v)
        )
    ),
    "with-both-results": of_two(lambda m, x: sum(Both.apply(x, m.w, m.v))),
    "first-of-two": of_two(lambda m, x: Pair.apply(x, m.w, m.v)[0].sin()),
    "second-of-two": of_two(lambda m, x: Pair.apply(x @ m.w, m.w, m.v)[1]),
    "for-each-sample": of_two(
        lambda m, x: torch.stack([sum(Pair.apply(z[None], m.w, m.v))[0] for z in x])
    ),
    "in-a-checkpoint": of_two(
        lambda m, x: checkpoint(
            lambda z: Double.apply(z @ m.w, m.v).tanh(), x, use_reentrant=False
        )
    ),
    "with-a-step-size": of_two(lambda m, x: Rounded.apply(x @ m.w, m.v[:1].exp())),
}


TABLES = {
    "linear": LINEAR,
    "convolution": CONVOLUTIONS,
    "lookup": LOOKUPS,
    "elementwise": ELEMENTWISE_ROWS,
    "norm": NORMS,
    "attention": ATTENTION,
    "function": FUNCTIONS,
}


@pytest.mark.parametrize(
    "table, row", [(table, row) for table, rows in TABLES.items() for row in rows]
)
def test_right(table: str, row: str) -> None:
    """Every quantity of every parameter agrees with plain autograd."""
    assert_right(TABLES[table][row])


NOT_FINITE = [  # of which zero times NaN is added up
    *(
        ("linear", name)
        for name in "inner-by-name addmv addmm-scaled einsum-diagonal einsum-list "
        "mm-of-a-sparse-weight einsum-of-one-twice view-in-place-3 spectrum-3 "
        "baddbmm-3 einsum-sum-of-positions-3".split()
    ),
    ("convolution", "conv-of-one-image"),
    ("elementwise", "cross"),
    ("function", "crossed"),
]


@pytest.mark.parametrize("table, row", NOT_FINITE)
def test_not_finite(table: str, row: str) -> None:
    """A sample that is not finite leaves the others as they are."""

    def individual(changes: bool) -> Dict[str, Tensor]:
        model, loss, X = TABLES[table][row].build()
        if changes:
            X[0][1].view(-1)[0] = math.nan
        model, loss = extend(model), extend(loss)
        with backpack(BatchGrad(), BatchDiagGGNExact()):
            TABLES[table][row].run(model, loss, X).backward()
        return {
            f"{field} {name}": getattr(p, field)
            for field in ("grad_batch", "diag_ggn_exact_batch")
            for name, p in model.named_parameters()
        }

    expected, found = individual(False), individual(True)
    assert not all(rows[1].isfinite().all() for rows in found.values())
    for name, rows in found.items():
        others = [n for n in range(len(rows)) if n != 1]
        assert_agrees(rows[others], expected[name][others], name)


# What is found by rules, or at once for all samples: cost is linear in their number
AT_ONCE = [
    *(
        ("linear", name)
        for name in "mv matmul-vector inner einsum-dots einsum-outer einsum-vector "
        "einsum-axes-in-another-order".split()
    ),
    *(
        ("linear", f"{name}-{t}")
        for t in LENGTHS
        for name in "spectrum-filtered spectrum-mixed "
        "einsum-scales-of-positions einsum-groups einsum-groups-with-dots "
        "einsum-groups-on-packed-rows einsum-groups-added-up bmm-of-positions "
        "bmm-of-positions-from-the-left matmul-groups-from-the-left "
        "matmul-groups-of-one baddbmm-of-positions matmul-a-weight-for-each-position "
        "einsum-a-weight-for-each-position".split()
    ),
    *(
        ("lookup", f"{name}-{t}")
        for t in LENGTHS
        for name in ("getitem", "index-select")
    ),
    *(("lookup", f"getitem-{name}-{LENGTHS[0]}") for name in ("negative", "all-axes")),
    *(("lookup", f"getitem-{name}-{LENGTHS[1]}") for name in ("ellipsis", "matrices")),
    ("lookup", f"getitem-of-a-view-{LENGTHS[0]}"),
    *(
        ("lookup", f"embedding-bag{name}-{t}")
        for t in LENGTHS
        for name in ("", "-mean", "-weights", "-padded", "-of-offsets")
    ),
    ("lookup", f"embedding-bag-up-to-the-end-{LENGTHS[0]}"),
    *(
        ("attention", f"learned-{name}-{t}")
        for t in LENGTHS
        for name in ("queries-by-pytorch", "keys-and-values")
    ),
    *(
        ("elementwise", name)
        for name in "mul-in-place add-alpha add-in-place rsub-function div rdiv "
        "addcmul addcmul-in-place addcdiv lerp-weight pow pow-of-a-parameter where "
        "maximum clamp hypot atan2 logaddexp lerp-end add-expanded add-expanded-rows "
        "mul-expanded add-repeated mul-side-by-side where-expanded "
        "expanded-twice".split()
    ),
]


@pytest.mark.parametrize("table, row", AT_ONCE)
def test_at_once(table: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cotangent of a sample is pulled back by itself."""
    if table == "elementwise" and saved.are_kept():
        pytest.skip("This PyTorch does not tell whether there is a checkpoint.")
    monkeypatch.delattr(Use, "_generic")
    assert_right(TABLES[table][row])


def two_heads(x: Tensor) -> Tensor:
    """Take ``[N, T, 4]`` for what two heads attend with."""
    return x.unflatten(-1, (2, 2)).transpose(1, 2)


def attend_with(x: Tensor, mask: Tensor) -> Tensor:
    """Add a learned mask to the scores of attention."""
    q, k, v = (two_heads(y) for y in (x, x.sin(), x.cos()))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def sort(x: Tensor) -> Tensor:
    """Put samples in another order, which depends on the data."""
    return x[x[:, 0, 0].argsort()]


def numbers(x: Tensor) -> Tensor:
    """Number rows of a table for all samples, in the shape of a batch."""
    return torch.arange(x.shape[1]).remainder(3).expand(len(x), -1)


def unsort(x: Tensor, y: Tensor) -> Tensor:
    """Put what became of sorted samples back into their order."""
    return y[x[:, 0, 0].argsort().argsort()]


def write(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """Write to where a mask is true, and add there as well."""
    index = mask.nonzero(as_tuple=True)
    return x.index_put(index, value).index_put((mask,), value.sin(), True)


def write_to(x: Tensor, index: Any, value: Tensor) -> Tensor:
    """Write to some places, in place."""
    x[index] = value
    return x


PARTS: Dict[str, Callable[[], Any]] = {
    "p": partial(param, 4),
    "table": partial(param, 3, 4),
    "e": partial(nn.Embedding, 3, 4),
    "padded": partial(nn.Embedding, 3, 4, padding_idx=1),
    "gain": param,
    "f": partial(nn.Linear, 8, 4),
    "one": partial(nn.Embedding, 3, 1),
}
# Constants with an axis for the samples, on data [N, T, 4], and what is learned
WITH_SAMPLES: Dict[str, Tuple[str, Callable[[Module, Tensor], Tensor]]] = {
    "token-in-front": (
        "p",
        lambda m, x: torch.cat([m.p.expand(len(x), 1, -1), x], 1),
    ),
    "token-behind": (
        "p",
        lambda m, x: torch.concat([x, m.p.repeat(len(x), 2, 1)], dim=1),
    ),
    "token-time-first": (
        "p",
        lambda m, x: torch.cat(
            [m.p.expand(1, len(x), -1), x.transpose(0, 1)]
        ).transpose(0, 1),
    ),
    "token-on-both-sides": (
        "p",
        lambda m, x: torch.cat(
            [m.p.expand(len(x), 1, -1), x, m.p.sin().expand(len(x), 1, -1)], -2
        ),
    ),
    "features": ("p f", lambda m, x: m.f(torch.cat([x, m.p.expand_as(x)], -1))),
    "token-among-sorted": (
        "p",
        lambda m, x: unsort(x, torch.cat([m.p.expand(len(x), 1, -1), sort(x)], 1)),
    ),
    "stacked": ("p", lambda m, x: torch.stack([m.p.expand_as(x), x], 1).prod(1)),
    "stacked-in-front": ("p", lambda m, x: torch.stack([x, m.p.expand_as(x)]).prod(0)),
    "cloned": ("p", lambda m, x: x + m.p.expand_as(x).contiguous()),
    "scaled": ("p", lambda m, x: x + m.p.expand_as(x).exp()),
    "columns": (
        "column",
        lambda m, x: x + m.column.expand(x.shape[1:]).contiguous(),
    ),
    "stacked-behind": (
        "p",
        lambda m, x: torch.stack([m.p.expand_as(x), x], -1).prod(-1),
    ),
    "stacked-with-sorted": (
        "p",
        lambda m, x: unsort(x, torch.stack([m.p.expand_as(x), sort(x)], 1).prod(1)),
    ),
    "stacked-in-front-of-sorted": (
        "p",
        lambda m, x: unsort(x, torch.stack([m.p.expand_as(x), sort(x)]).prod(0)),
    ),
    "rows-behind-sorted": (
        "e",
        lambda m, x: unsort(
            x,
            torch.cat([sort(x), m.e(numbers(x))]).unflatten(0, (2, -1)).prod(0),
        ),
    ),
    "written-by-a-mask": ("p", lambda m, x: write(x * 2, x[..., 0] > 0, m.p)),
    "written-in-place": ("p", lambda m, x: write_to(x * 2, x[..., 0] > 0, m.p)),
    "written-to-a-step": ("p", lambda m, x: write_to(x * 2, (slice(None), 1), m.p)),
    "written-to-a-feature": ("gain", lambda m, x: write_to(x * 2, (..., 1), m.gain)),
    "written-with-more-axes": (
        "p",
        lambda m, x: write_to(x * 2, (slice(None), 1), m.p[None, None]),
    ),
    "written-to-a-view": (
        "p",
        lambda m, x: write_to((x * 2).flatten(0, 1), x.flatten(0, 1)[:, 0] > 0, m.p)
        .view_as(x)
        .sin(),
    ),
    "written-for-sorted": (
        "p",
        lambda m, x: unsort(x, write(sort(x), sort(x)[..., 0] > 0, m.p)),
    ),
    "written-rows": (
        "e",
        lambda m, x: write_to(
            x * 2, (torch.arange(len(x)), x[..., 0].argmax(1)), m.e(numbers(x)[:, 0])
        ),
    ),
    "positions-of-one-feature": ("one", lambda m, x: x * m.one(numbers(x))),
    "types-time-first": (
        "e",
        lambda m, x: (x.transpose(0, 1) + m.e(torch.arange(len(x)) * 0)).transpose(
            0, 1
        ),
    ),
    "types-of-sorted": (
        "e",
        lambda m, x: unsort(
            x,
            (sort(x).transpose(0, 1) * m.e(torch.arange(len(x)) * 0)).transpose(0, 1),
        ),
    ),
    "types": ("e", lambda m, x: x + m.e(torch.zeros(x.shape[:2], dtype=torch.long))),
    "positions": ("e", lambda m, x: x * m.e(numbers(x))),
    "positions-padded": ("padded", lambda m, x: x - m.padded(numbers(x))),
    "positions-by-index": ("table", lambda m, x: m.table[numbers(x)] + x),
    "positions-picked": (
        "table",
        lambda m, x: m.table.index_select(0, numbers(x).flatten()).view_as(x) + x,
    ),
    "positions-time-first": (
        "e",
        lambda m, x: (x.transpose(0, 1) + m.e(numbers(x).mT)).transpose(0, 1),
    ),
    "positions-in-place": ("e", lambda m, x: (x * 2).add_(m.e(numbers(x)))),
    "positions-of-sorted": (
        "e",
        lambda m, x: unsort(x, sort(x) + m.e(numbers(x))),
    ),
    "mask": ("scores", lambda m, x: attend_with(x, m.scores)),
    "mask-for-heads": ("scores", lambda m, x: attend_with(x, m.scores[0, 0])),
    "mask-expanded": (
        "scores",
        lambda m, x: attend_with(x, m.scores.expand(len(x), -1, -1, -1)),
    ),
    "type": (
        "p gain",
        lambda m, x: (m.p * x).type_as(m.gain).to(m.p).view_as(x) + m.gain,
    ),
    "gain": ("gain", lambda m, x: (x * 2).mul_(m.gain)),
    "mask-for-features": (
        "scores",
        lambda m, x: F.scaled_dot_product_attention(
            *[torch.ones(1, 2, x.shape[1], 1).to(x)] * 2,
            two_heads(x).permute(1, 2, 0, 3).flatten(2)[None],
            m.scores,
        )[0]
        .unflatten(-1, (-1, 2))
        .transpose(0, 2)
        .flatten(2),
    ),
    "mask-and-queries": (
        "scores queries",
        lambda m, x: F.scaled_dot_product_attention(
            m.queries, two_heads(x), two_heads(x.cos()), m.scores
        ),
    ),
    "gain-of-a-view": ("f gain", lambda m, x: m.f(x.repeat(1, 1, 2)).mul_(m.gain)),
    "rows-of-a-transposed-view": (
        "steps",
        lambda m, x: (x * 2).transpose(0, 1).mul_(m.steps).transpose(0, 1),
    ),
    "rows-of-a-view": ("f p", lambda m, x: m.f(x.repeat(1, 1, 2)).mul_(m.p)),
}


# Of these, each sample is pulled back by itself
EACH_ALONE = (
    *("mask-for-features", "mask-and-queries", "written-to-a-view"),
    "written-with-more-axes",
)


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_with_samples(name: str, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that all samples share are no columns for each, also if repeated."""
    parts, forward = WITH_SAMPLES[name]

    def model() -> Module:
        of_length: Dict[str, Callable[[], Any]] = {
            "scores": partial(param, 1, 2, t, t),
            "steps": partial(param, t, 1, 4),
            "column": partial(param, t, 1),
            "queries": partial(param, 1, 2, t, 2),
        }
        made = {part: {**PARTS, **of_length}[part]() for part in parts.split()}
        return Lambda(forward, **made)

    if name not in EACH_ALONE:
        monkeypatch.delattr(Use, "_generic")
        monkeypatch.delattr(Apart, "block")
    assert_right(Row(model, randn(t, 4), quantities=[*FIRST_ORDER, "DiagGGNExact"]))


def test_number_of_another_type() -> None:
    """A number takes no part in type promotion, nor does what stands in for it."""
    gain = nn.Parameter(torch.tensor(-9.0, dtype=torch.float64))
    model = Lambda(lambda m, x: torch.maximum(m.f(x), m.p), f=nn.Linear(4, 4), p=gain)
    model, x = extend(model), torch.randn(3, 4)
    with backpack(BatchGrad()):
        out = model(x)
        out.sum().backward()
    assert out.dtype == torch.float32
    assert gain.grad_batch.dtype == torch.float64 and not gain.grad_batch.any()


# Operations on rows [R, 4] with parameters, which treat each row alone
ON_EACH: Dict[str, Tuple[Callable[..., Tensor], Tuple[Tuple[int, ...], ...]]] = {
    "cdist": (torch.cdist, ((3, 4),)),
    "cdist-one": (lambda x, w: torch.cdist(w, x, p=1.0).T, ((3, 4),)),
    "cdist-named": (lambda x, w: torch.cdist(x2=w, x1=x), ((3, 4),)),
    "cdist-batches": (
        lambda x, w: torch.cdist(x.view(-1, 2, 2), w).flatten(1),
        ((30, 2),),
    ),
    "distance": (lambda x, w: F.pairwise_distance(x[:, None], w[None]), ((3, 4),)),
    "cosine": (
        lambda x, w: F.cosine_similarity(x[:, None], w[None], dim=-1),
        ((3, 4),),
    ),
    "kron": (lambda x, w: torch.kron(x, w), ((1, 2),)),
    "prelu": (F.prelu, ((4,),)),
    "bilinear": (lambda x, w: F.bilinear(x, x.cos(), w), ((3, 4, 4),)),
    "bilinear-bias": (
        lambda x, w, b: F.bilinear(x, x.cos(), w, b),
        ((3, 4, 4), (3,)),
    ),
    "einsum": (lambda x, w: torch.einsum("ri,ijk,rj->rk", x, w, x.cos()), ((4, 4, 3),)),
    "einsum-two": (
        lambda x, w, v: torch.einsum("ri,ik,k->rk", x, w, v),
        ((4, 3), (3,)),
    ),
    "cross": (lambda x, w: torch.linalg.cross(x[:, :3], w), ((1, 3),)),
    "grid": (
        lambda x, w: F.grid_sample(
            w[None], x.tanh().view(1, -1, 2, 2), align_corners=False
        )[0].permute(1, 0, 2),
        ((2, 3, 3),),
    ),
}
# How rows of samples [N, 3, 4] lie beneath each other, and where row N * 3 has gone
ROWS_OF_SAMPLES: Dict[str, Tuple[Callable, Callable]] = {
    "one": (lambda x: x[:, 0], lambda y: y),
    "inner": (lambda x: x.flatten(0, 1), lambda y: y.unflatten(0, (-1, 3))),
    "outer": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda y: y.unflatten(0, (3, -1)).transpose(0, 1),
    ),
}


@pytest.mark.parametrize("rows", ROWS_OF_SAMPLES)
@pytest.mark.parametrize("name", ON_EACH)
def test_on_each(name: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that have no other rule are done on each sample by itself."""
    (function, shapes), (down, back) = ON_EACH[name], ROWS_OF_SAMPLES[rows]
    params = {f"w{i}": shape for i, shape in enumerate(shapes)}

    def forward(m: Module, x: Tensor) -> Tensor:
        return back(function(down(x), *[getattr(m, key) for key in params]))

    monkeypatch.delattr(Use, "_generic")
    assert_right(use(forward, 3, 4, **params))


# Roundings of rows [R, 4] by steps that are learned, of float32 alone
LEARNED_STEPS: Dict[str, Tuple[Callable[..., Tensor], int]] = {
    "tensor": (
        lambda x, w, v: torch._fake_quantize_learnable_per_tensor_affine(
            x, w, v, -8, 7, 1.0
        ),
        1,
    ),
    "channel": (
        lambda x, w, v: torch._fake_quantize_learnable_per_channel_affine(
            x, w, v, 1, -8, 7, 1.0
        ),
        4,
    ),
}


@pytest.mark.parametrize("name", LEARNED_STEPS)
def test_learned_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are done on each sample by itself, and where samples are is no question."""
    function, size = LEARNED_STEPS[name]
    model = Lambda(
        lambda m, x: function(m.f(x), m.w, m.v),
        f=nn.Linear(4, 4),
        w=nn.Parameter(torch.full((size,), 0.1)),
        v=nn.Parameter(torch.zeros(size)),
    )
    x, expected = torch.randn(N, 4), []
    for row in x.split(1):
        out = model(row).square().sum()
        expected.append(torch.autograd.grad(out, list(model.parameters())))
    monkeypatch.delattr(Use, "_generic")
    monkeypatch.delattr(Trial, "find")
    with backpack(BatchGrad()):
        extend(model)(x).square().sum().backward()
    for p, each in zip(model.parameters(), zip(*expected)):
        assert_agrees(p.grad_batch, torch.stack(each), name, rtol=1e-4)


def test_on_each_by_autograd() -> None:
    """A constant with a batch of its own is no other's: autograd pulls back."""
    assert_right(
        use(lambda m, x: torch.cdist(x[:, None], m.w.expand(len(x), 3, 4)), 4, **W)
    )


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_on_each_differentiated() -> None:
    """Products may be differentiated again."""
    model = Lambda(lambda m, x: F.cosine_similarity(x, m.w), w=param(1, 4)).to(F64)
    x = torch.randn(N, 4, dtype=F64, requires_grad=True)
    pull = partial(torch.autograd.grad, create_graph=True)
    each = torch.stack([pull(y.square(), model.w)[0] for y in model(x)])
    expected = pull(each.square().sum(), (x, model.w))
    loss = extend(model)(x).square().sum()
    with backpack(BatchGrad()):
        loss.backward(create_graph=True)
    actual = pull(model.w.grad_batch.square().sum(), (x, model.w))
    for pair in zip(actual, expected):
        assert_agrees(*pair)


RETURNED = {  # each is a view of what the operation has computed
    "bilinear": (lambda m, x: F.bilinear(x[:, 0], x[:, 1], m.w), (2, 4, 4)),
    "einsum-sum": (lambda m, x: torch.einsum("nth,th->n", x, m.w), (3, 4)),
    "einsum-heads": (lambda m, x: torch.einsum("nth,khc->nkc", x, m.w), (2, 4, 2)),
    "einsum-order": (lambda m, x: torch.einsum("nth,hc->nct", x, m.w), (4, 2)),
    "linear": (lambda m, x: F.linear(x, m.w), (2, 4)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_jacobian_of_what_is_returned(name: str) -> None:
    """The output of a model is what its last operation with a parameter returned."""
    function, shape = RETURNED[name]
    model, x = Lambda(function, w=param(*shape)).to(F64), torch.randn(N, 3, 4).to(F64)
    expected = model_jacobians(model, (x,))["w"].transpose(0, 1)
    output = extend(model)(x)
    with backpack(BatchJacobian()):
        output.sum().backward()
    assert_agrees(model.w.jacobian, expected, name)


def test_function_beside_statistics() -> None:
    """Where samples meet outside of a function, what was seen inside holds for it."""
    assert_right(use(lambda m, x: Once.apply(counted(m, x)) * m.v, 4, v=(4,)))


@pytest.mark.parametrize("kind", [list, tuple, immutable_list, OwnList])
def test_lists_of_operands(kind: Callable) -> None:
    """Operands are found in lists of any class, and data that has no gradient, too."""

    def forward(m: Module, x: Tensor) -> Tensor:
        tokens = kind([m.token.expand(len(x), -1, -1), x])
        return torch.tanh(m.layer(torch.cat(tokens, 1))).sum(1)

    def model() -> Module:
        return Lambda(forward, token=param(1, 1, 4), layer=nn.Linear(4, 3))

    assert_right(Row(model, randn(N, 4)))


@pytest.mark.parametrize("row", EITHER)
def test_right_or_refused(row: str) -> None:
    """It is right for each sample, or refused by name."""
    assert_right_or_refused(EITHER[row])


@pytest.mark.usefixtures("elsewhere")
def test_derivative_in_another_thread() -> None:
    """The same where autograd computes the derivative in a thread of its own."""
    assert_right_or_refused(EITHER["derivative-inside"])


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("ahead", range(16))
def test_weight_that_a_thread_has_used(ahead: int) -> None:
    """Whatever numbers the nodes there have, they are not those of the layer.

    The model is in a thread of its own, too, where nodes are counted from zero.
    """
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as own:

        def before(h: Tensor, weight: Tensor, number: int) -> Tensor:
            while torch._C._autograd._get_sequence_nr() < number:
                h.view(-1)
            return (h @ weight).tanh()

        def forward(m: Module, x: Tensor) -> Tensor:
            h, number = m.f(x), torch._C._autograd._get_sequence_nr() + ahead - 8
            return m.g(pool.submit(before, h, m.g.weight, number).result())

        def model() -> Module:
            return Lambda(forward, f=nn.Linear(4, 4), g=nn.Linear(4, 4))

        row = Row(model, randn(4), quantities=FIRST_ORDER)
        own.submit(assert_right, row).result()


PENALIZED: Dict[str, Callable[[], Module]] = {
    "matrix": lambda: Lambda(
        lambda m, x: (x @ m.w).tanh() * m.scale, w=param(4, 3), scale=param(3)
    ),
    "layers": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "norm": lambda: Lambda(
        lambda m, x: m.f(F.layer_norm(x, [4], m.w).sin()),
        w=param(4),
        f=nn.Linear(4, 2),
    ),
}


def penalized(model: Module, x: Tensor) -> Tensor:
    """Add the derivative by the inputs to a loss, as for critics of WGANs."""
    x = x.clone().requires_grad_()
    f = model(x)
    (slope,) = torch.autograd.grad(f.sum(), x, create_graph=True)
    return f.square().sum() + slope.square().sum()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", PENALIZED)
def test_penalty_from_another_thread(name: str) -> None:
    """Nodes of the derivative have numbers that those of uses have, too."""
    model, x = randomize(PENALIZED[name]().to(F64)), torch.randn(N, 4, dtype=F64)
    params = list(model.parameters())
    rows = [torch.autograd.grad(penalized(model, row), params) for row in x.split(1)]
    with backpack(BatchGrad()):
        penalized(extend(model), x).backward()
    for p, own in zip(params, zip(*rows)):
        assert_agrees(p.grad_batch, torch.stack(own))


@pytest.mark.parametrize(
    "row", ["linear", "addmm", "einsum-heads-4", "conv1d-of-gpt-3"]
)
def test_cross_entropy(row: str) -> None:
    """The same with a Hessian that depends on the prediction."""
    assert_right(
        LINEAR[row]._replace(
            loss=nn.CrossEntropyLoss,
            objective=lambda f, loss: loss(f.flatten(1), classes(f.flatten(1))),
        )
    )


@pytest.mark.parametrize("row", ["linear", "addmm", "einsum-heads-4", "einsum-three"])
def test_reference(row: str) -> None:
    """The reference of rows agrees with the one that all other tests have."""
    row = LINEAR[row]
    model, loss, X = row.build()
    problem, samples = (model, loss, X, (real(model(*X).detach()),)), reference(row)
    for name, expected in {
        "batch_grad": samples.gradients,
        "diag_ggn_batch": samples.diagonals,
        "batch_ggn": samples.blocks,
    }.items():
        for key, value in oracle(name, *problem).items():
            assert_agrees(expected[key], value, f"{name} of {key}")


LOW_PRECISION = {
    "linear": LINEAR["linear"],
    "addmm": LINEAR["addmm"],
    "einsum-positions": LINEAR["einsum-positions-4"],
    "elementwise": ELEMENTWISE_ROWS["scale-and-shift"],
    "norm": NORMS["rms-norm-by-hand"],
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}


def in_type(
    row: Row, dtype: torch.dtype, around: Callable, quantities: List[str]
) -> Module:
    """Compute quantities of a row's model, brought to another type.

    Args:
        row: The row.
        dtype: The type.
        around: Makes a context for the forward pass.
        quantities: Names of quantities.

    Returns:
        The model, whose parameters carry the fields.
    """
    model, loss, X = row.build()
    model, loss = extend(model.to(dtype)), extend(loss)
    X = tuple(x.to(dtype) if x.is_floating_point() else x for x in X)
    with around():
        value = row.objective(model(*X), loss)
    with backpack(*[make_extension(name) for name in quantities]):
        value.backward()
    for quantity in quantities:
        field = QUANTITIES[quantity][0]
        types = {getattr(p, field).dtype for p in parameters(model).values()}
        assert types == {dtype}
    return model


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """Fields have the parameter's type, and its digits."""
    row, quantities = LOW_PRECISION[name], ["BatchGrad", "DiagGGNExact"]
    model = in_type(row, dtype, nullcontext, quantities)
    assert_fields(model, quantities, reference(row), rtol=TOLERANCES[dtype])


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows with a matrix each, in any type."""
    if x.dtype == torch.float32:
        return F.grouped_mm(x, w, offs=ends)
    sizes = torch.diff(ends, prepend=ends[:1] * 0).tolist()
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(sizes), w)])


def routed(m: Module, x: Tensor) -> Tensor:
    """Send each position to one of three experts, and none to a fourth."""
    rows = x.flatten(0, 1)
    ids = rows.argmax(-1) % 3
    order = ids.argsort(stable=True)
    ends = ids.bincount(minlength=4).cumsum(0).int()
    y = grouped(grouped(rows[order], m.w, ends).tanh(), m.u.mT, ends)
    return torch.zeros_like(y).index_copy(0, order, y).view_as(x)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="PyTorch before 2.10")
@pytest.mark.parametrize("batch", [1, N])
@pytest.mark.parametrize("t", LENGTHS)
def test_experts(t: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of groups of rows have a rule; nothing is run again for samples."""
    row = use(routed, t, 8, w=(4, 8, 8), u=(4, 8, 8))
    row = row._replace(X=randn(t, 8, batch=batch), alone=False)
    quantities = ["BatchGrad", "BatchL2Grad", "BatchDotGrad", "DiagGGNExact"]
    expected = reference(row)
    in_type(row, torch.float32, nullcontext, quantities)
    monkeypatch.delattr(Trial, "_probe")
    monkeypatch.delattr(Use, "_generic")
    model = in_type(row, torch.float32, nullcontext, quantities)
    assert_fields(model, quantities, expected, rtol=1e-5)


def stepwise(m: Module, x: Tensor) -> Tensor:
    """Apply a cell to one step after the other."""
    state = None if m.start is None else m.start.expand(len(x), -1)
    if isinstance(m.cell, nn.LSTMCell) and state is not None:
        state = state, state.cos()
    for step in x.unbind(1):
        state = m.cell(step, state)
    return state[0] * state[1].exp() if isinstance(state, tuple) else state


def by_keywords(m: Module, x: Tensor) -> Tensor:
    """Call a cell as a function, by keywords."""
    weights = {"w_ih": m.w, "w_hh": m.u, "b_ih": m.b, "b_hh": m.c}
    return torch.gru_cell(input=x[:, 0], hx=x[:, 1], **weights)


CELLS = {
    "rnn": partial(nn.RNNCell, 4, 3),
    "relu": partial(nn.RNNCell, 4, 3, nonlinearity="relu"),
    "gru": partial(nn.GRUCell, 4, 3),
    "gru-no-bias": partial(nn.GRUCell, 4, 3, bias=False),
    "lstm": partial(nn.LSTMCell, 4, 3),
}
MAPS = {
    **{
        f"{name}-{kind}": use(stepwise, t, 4, cell=cell, start=start)
        for name, cell in CELLS.items()
        for kind, t, start in (
            ("as-many-steps-as-samples", N, lambda: None),
            ("from-a-parameter", 2, (3,)),
        )
    },
    "by-keywords": use(by_keywords, 2, 4, w=(12, 4), u=(12, 4), b=(12,), c=(12,)),
    "of-one-sample": use(
        stepwise, 3, 4, cell=CELLS["gru"], start=lambda: None
    )._replace(X=randn(3, 4, batch=1)),
    "of-rows-in-another-order": use(
        lambda m, x: m.cell(x.transpose(0, 1).flatten(0, 1)).view(3, len(x), 3)[-1],
        *(3, 4),
        cell=CELLS["gru"],
    ),
    "of-rows-that-are-picked": use(
        lambda m, x: m.cell(x[[2, 0, 3, 1]])[[1, 3, 0, 2]], 4, cell=CELLS["rnn"]
    )._replace(alone=False),
    "in-a-checkpoint": use(
        lambda m, x: checkpoint(stepwise, m, x, use_reentrant=False),
        *(2, 4),
        **{"cell": CELLS["gru"], "start": lambda: None},
    ),
    "with-a-shared-bias": use(
        lambda m, x: torch.rnn_tanh_cell(x[:, 0], x[:, 1], m.w, m.u, m.b, m.b),
        *(2, 4),
        **{"w": (4, 4), "u": (4, 4), "b": (4,)},
    ),
    "with-a-shared-matrix": use(
        lambda m, x: torch.rnn_tanh_cell(x[:, 0], x[:, 1], m.w, m.w), 2, 4, w=(4, 4)
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_cells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear maps inside of a recurrent cell have a rule."""
    if not name.endswith("parameter") and "shared" not in name:
        monkeypatch.delattr(Use, "_generic")
    assert_right(MAPS[name])


@pytest.mark.parametrize("frozen", ["weight_ih", "weight_hh", "bias_ih", "bias_hh"])
@pytest.mark.parametrize("name", CELLS)
def test_cells_with_frozen_parts(name: str, frozen: str) -> None:
    """What is left of a cell's parameters is right."""

    def cell() -> Module:
        made = CELLS[name]()
        if getattr(made, frozen) is not None:
            getattr(made, frozen).requires_grad_(False)
        return made

    assert_right(use(stepwise, 2, 4, cell=cell, start=(3,)))


def penalty_of_steps(cell: Module, x: Tensor) -> Tensor:
    """Penalize the derivative of what a cell makes of two steps, which it adds."""
    x = x.clone().requires_grad_()
    state = x[:, 0, :3]
    if isinstance(cell, nn.LSTMCell):
        state = state, state.cos()
    for step in x.unbind(1):
        state = cell(step, state)
    y = state[0] if isinstance(state, tuple) else state
    (slope,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    return slope.square().sum() + y.square().sum()


@pytest.mark.parametrize("frozen", [None, "weight_hh", "bias_ih"])
@pytest.mark.parametrize("name", CELLS)
def test_penalty_of_cells(name: str, frozen: Optional[str]) -> None:
    """A matrix is used by the derivative as well, by way of the inside of a cell."""
    cell, x = randomize(CELLS[name]().to(F64)), torch.randn(N, 2, 4, dtype=F64)
    if frozen is not None and getattr(cell, frozen) is not None:
        getattr(cell, frozen).requires_grad_(False)
    params = {n: p for n, p in cell.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(penalty_of_steps(cell, row), list(params.values()))
        for row in x.split(1)
    ]
    with backpack(BatchGrad()):
        penalty_of_steps(extend(cell), x).backward()
    for (name, p), expected in zip(params.items(), zip(*rows)):
        assert_agrees(p.grad_batch, torch.stack(expected), name)


LOOPS = {  # what is done in each step
    "layer": (lambda m, h: (m.f(h)).tanh(), {"f": lambda: nn.Linear(4, 4)}),
    "matrix": (lambda m, h: torch.addmm(m.b, h, m.w).tanh(), {"w": (4, 4), "b": (4,)}),
    "cell": (lambda m, h: m.f(h, h), {"f": lambda: nn.GRUCell(4, 4)}),
    "lookup": (lambda m, h: h + m.f(h.argmax(-1)), {"f": lambda: nn.Embedding(4, 4)}),
    "expression": (lambda m, h: (h @ m.w.tanh()).tanh(), {"w": (4, 4)}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_long_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass costs in proportion to how often parameters are used."""
    step, parts = LOOPS[name]
    copied, cat = [], torch.cat

    def counted(tensors: List[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        copied.append(sum(x.numel() for x in tensors))
        return cat(tensors, *args, **kwargs)

    def cost(steps: int) -> Tuple[int, int]:
        def loop(m: Module, x: Tensor) -> Tensor:
            for _ in range(steps):
                x = step(m, x)
            return x

        model, loss, X = use(loop, 4, **parts).build()
        value = against_real(extend(model)(*X), loss)
        calls: List[str] = []
        copied.clear()
        with monkeypatch.context() as patch, backpack(BatchGrad(), BatchL2Grad()):
            patch.setattr(torch, "cat", counted)
            sys.setprofile(lambda frame, event, _: calls.append(event))
            value.backward()
            sys.setprofile(None)
        return calls.count("call"), sum(copied)

    cost(10)  # what is remembered
    (calls, numbers), (more_calls, more_numbers) = cost(40), cost(160)
    assert more_calls < 5 * calls
    assert more_numbers < 5 * numbers + 1000


LOSSES_OF_PARAMETERS: Dict[str, Callable[..., Tensor]] = {  # of c, data and a reduction
    "mse": lambda c, y, r: F.mse_loss(c, y, reduction=r),
    "module": lambda c, y, r: nn.L1Loss(reduction=r)(y, c),
    "classes": lambda c, y, r: F.cross_entropy(
        c, y.argmax(1), F64_WEIGHTS, reduction=r
    ),
    "smoothed": lambda c, y, r: F.cross_entropy(
        c, y.argmax(1), label_smoothing=0.2, ignore_index=2, reduction=r
    ),
    "learned-targets": lambda c, y, r: F.cross_entropy(y, c.softmax(1), reduction=r),
    "log-probabilities": lambda c, y, r: F.nll_loss(
        c.log_softmax(1), y.argmax(1), F64_WEIGHTS, reduction=r
    ),
    "divergence": lambda c, y, r: F.kl_div(
        c.log_softmax(1), y.softmax(1), reduction="batchmean" if r == "mean" else r
    ),
    "probabilities": lambda c, y, r: F.binary_cross_entropy(
        c.sigmoid(), (y > 0).to(F64), reduction=r
    ),
    "counts": lambda c, y, r: F.poisson_nll_loss(c, y.abs(), reduction=r),
    "learned-variance": lambda c, y, r: F.gaussian_nll_loss(
        y, c, c.exp(), full=True, reduction=r
    ),
    "prototypes": lambda c, y, r: F.triplet_margin_loss(y, c, y.flip(1), reduction=r),
    "angles": lambda c, y, r: F.cosine_embedding_loss(
        y, c, y.new_ones(len(y)), reduction=r
    ),
    "margins": lambda c, y, r: F.multi_margin_loss(c, y.argmax(1), reduction=r),
    "labels": lambda c, y, r: F.multilabel_soft_margin_loss(
        c, (y > 0).to(F64), reduction=r
    ),
}
F64_WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=F64)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES_OF_PARAMETERS)
def test_losses_of_parameters(name: str, reduction: str) -> None:
    """A loss that a parameter enters beside data is looked into."""
    loss = LOSSES_OF_PARAMETERS[name]

    def forward(m: Module, x: Tensor, reduction: str = reduction) -> Tensor:
        return loss(m.c.expand(len(x), 3), x, reduction)

    model, x = Lambda(forward, c=param(3)).to(F64), torch.randn(N, 3).to(F64)
    rows = [
        torch.autograd.grad(forward(model, row, "sum"), model.c) for row in x.split(1)
    ]
    expected = torch.cat([*map(torch.stack, rows)])
    value, total = forward(model, x), forward(model, x, "sum")
    with backpack(BatchGrad()):
        extended = extend(model)(x)
        extended.backward()
    assert_agrees(extended, value, f"{name}, value")
    assert_agrees(model.c.grad_batch, expected * (value / total), name)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "margin_ranking_loss"])
def test_learned_factor_of_a_loss_between_inputs(name: str) -> None:
    """That samples meet there is not for one input's having another batch axis."""
    loss = {"margin_ranking_loss": lambda f, y: F.margin_ranking_loss(f, y, f.sign())}
    each = loss.get(name) or getattr(F, name)

    def forward(m: Module, x: Tensor, y: Tensor) -> Tensor:
        return m.s.exp() * each(m.f(x), m.v * y)

    parts = {"f": nn.Linear(4, 3), "s": nn.Parameter(torch.rand(())), "v": param(3)}
    model = Lambda(forward, **parts).to(F64)
    x, y = torch.randn(N, 4).to(F64), torch.randn(N, 3).to(F64)
    params = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(model(*row) / N, list(params.values()))
        for row in zip(x.split(1), y.split(1))
    ]
    with backpack(BatchGrad()):
        extend(model)(x, y).backward()
    for (key, p), expected in zip(params.items(), zip(*rows)):
        assert_agrees(p.grad_batch, torch.stack(expected), key)


class Elements(TorchDispatchMode):
    """Counts the elements of what operations return: of all, and of the largest."""

    total = largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.total += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.mark.parametrize("quantity", ["BatchGrad", "BatchL2Grad", "SumGradSquared"])
def test_convolution_of_rows_unfolds_nothing(quantity: str) -> None:
    """Of samples with several rows each, a transposed convolution makes no windows."""

    def forward(m: Module, x: Tensor) -> Tensor:
        out = F.conv_transpose1d(x.flatten(0, 1), m.w, stride=4)
        return out.unflatten(0, (len(x), -1))

    row = use(forward, *(3, 2, 20), w=(2, 1, 8))._replace(quantities=[quantity])
    with Elements() as elements:
        compute(row, [quantity])
    assert elements.largest < N * 3 * 2 * 84  # eight steps, for each of two channels


LOOPS_OVER_SAMPLES = {
    **LOOPS,
    "transposed": (lambda m, h: h @ m.w.T, {"w": (3, 4)}),
    "convolution": (
        lambda m, h: m.f(h.view(-1, 1, 2, 2)).flatten(1),
        {"f": lambda: nn.Conv2d(1, 2, 2)},
    ),
    "scale": (lambda m, h: h * m.w + m.b, {"w": (4,), "b": (4,)}),
    "generic": (lambda m, h: torch.cdist(h, m.w), {"w": (3, 4)}),
    "several-rows": (
        lambda m, h: m.f(torch.cat([h, h.sin(), h.cos()])).prod(0, keepdim=True),
        {"f": lambda: nn.Linear(4, 3)},
    ),
    "masked-weight": (lambda m, h: h @ (m.w * m.w.sign()), {"w": (4, 3)}),
    "layer-on-a-vector": (
        lambda m, h: m.n(m.f(h[0]))[None],
        {"f": lambda: nn.Linear(4, 3), "n": lambda: nn.LayerNorm(3)},
    ),
    "vector-times-matrix": (lambda m, h: (h[0] @ m.w + m.b)[None], IO),
    "matrix-times-vector": (lambda m, h: (m.w @ h[0])[None], W),
    "lookup-of-one": (
        lambda m, h: h + m.f(h[0].argmax())[None],
        {"f": lambda: nn.Embedding(4, 4)},
    ),
}


def assert_linear(forward: Callable, parts: Dict[str, Any]) -> None:
    """Compare the costs of batches: no more than in proportion to their size."""

    def cost(n: int) -> int:
        model, loss, _ = use(forward, 4, **parts).build()
        value = against_real(extend(model)(torch.randn(n, 4, dtype=F64)), loss)
        with backpack(BatchGrad(), BatchL2Grad()), Elements() as mode:
            value.backward()
        return mode.total

    cost(16)  # what is remembered
    assert cost(128) < 12 * cost(16)


@pytest.mark.parametrize("name", LOOPS_OVER_SAMPLES)
def test_loops_over_samples(name: str) -> None:
    """A loop over samples is right, and costs in proportion to their number."""
    step, parts = LOOPS_OVER_SAMPLES[name]

    def loop(m: Module, x: Tensor) -> Tensor:
        return torch.cat([step(m, row) for row in x.split(1)])

    assert_right(use(loop, 4, **parts))
    assert_right(use(lambda m, x: loop(m, x) + loop(m, x.cos()), 4, **parts))
    assert_linear(loop, parts)


def turns(x: Tensor) -> Tensor:
    """Let samples take two matrices in turn, whatever is in them."""
    return torch.arange(len(x)) % 2


# Data [N, 4], and a matrix for each sample that parameters alone determine
MATRICES_OF_SAMPLES: Dict[str, Tuple[Callable[[Module, Tensor], Tensor], Any]] = {
    "bmm": (lambda m, x: torch.bmm(x[:, None], m.w[turns(x)])[:, 0], (2, 4, 3)),
    "from-the-left": (lambda m, x: (m.w[turns(x)] @ x[..., None])[..., 0], (2, 3, 4)),
    "einsum": (lambda m, x: torch.einsum("ni,nij->nj", x, m.w[turns(x)]), (2, 4, 3)),
    "einsum-groups": (
        lambda m, x: torch.einsum(
            "gni,ngji->gnj", x.view(-1, 2, 2).transpose(0, 1), m.w[turns(x)]
        )
        .transpose(0, 1)
        .flatten(1),
        (2, 2, 3, 2),
    ),
    "positions": (
        lambda m, x: torch.bmm(x.view(-1, 2, 2), m.w.sin()[turns(x)]).flatten(1),
        (2, 2, 3),
    ),
    "shifted": (
        lambda m, x: torch.baddbmm(
            m.b[turns(x)][:, None], x[:, None], m.w.index_select(0, turns(x))
        )[:, 0],
        (2, 4, 3),
    ),
    "embedded": (
        lambda m, x: torch.bmm(
            x[:, None], F.embedding(turns(x), m.w).unflatten(1, (4, 3))
        )[:, 0],
        (2, 12),
    ),
    "repeated": (
        lambda m, x: torch.bmm(x[:, None], m.w.repeat(len(x) // 2, 1, 1))[:, 0],
        (2, 4, 3),
    ),
}


@pytest.mark.parametrize("name", MATRICES_OF_SAMPLES)
def test_matrices_of_samples(name: str) -> None:
    """Each sample meets its own, and no product is formed of one and another."""
    forward, shape = MATRICES_OF_SAMPLES[name]
    parts = {"w": shape, "b": (2, 3)} if name == "shifted" else {"w": shape}
    assert_right(use(forward, 4, **parts)._replace(alone=False))
    assert_linear(forward, parts)


# What is written to rows [R, 4] of some samples, by a parameter [2]
WRITTEN_ROWS: Dict[str, Callable[[Module, Tensor], Any]] = {
    "columns-set": lambda m, z: z.__setitem__((..., slice(2)), m.w),
    "rows-set": lambda m, z: z.__setitem__((z[:, 3] > 0, slice(2)), m.w),
    "columns-scaled": lambda m, z: z[:, :2].mul_(m.w),
    "transposed": lambda m, z: z.T[:2].mul_(m.w[:, None]),
    "reshaped": lambda m, z: z.view(-1, 2, 2)[:, 0].mul_(m.w),
    "complex": lambda m, z: torch.view_as_complex(z.view(-1, 2, 2)).mul_(m.w),
}
# Which positions of which samples there are
THERE = {
    "one-each-of-some": [[1, 0], [0, 0], [1, 0], [0, 0]],
    "more-of-the-last": [[0, 0], [0, 1], [0, 0], [1, 1]],
    "all-but-one": [[0, 1], [1, 1], [0, 0], [0, 1]],
    "the-last": [[0, 0], [0, 0], [0, 0], [1, 1]],
}


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("name", WRITTEN_ROWS)
def test_writing_to_rows_of_some_samples(name: str, there: str) -> None:
    """What is written to is of the samples that are there, like an expert's inputs."""

    def forward(m: Module, x: Tensor) -> Tensor:
        rows = x[..., 0] > 0
        z = torch.cat([m.f(x[rows]), x[rows]])
        h = 2 * z + 1
        WRITTEN_ROWS[name](m, z)
        out = m.g(z * h).unflatten(0, (2, -1)).prod(0)
        return torch.zeros_like(x).index_put((rows,), out)

    def inputs() -> Tuple[Tensor]:
        x = torch.randn(N, 2, 4, dtype=F64)
        signs = 2 * torch.tensor(THERE[there]) - 1
        return (torch.cat([x[..., :1].abs() * signs[..., None], x[..., 1:]], -1),)

    def model() -> Module:
        return Lambda(forward, w=param(2), f=nn.Linear(4, 4), g=nn.Linear(4, 4))

    assert_right(Row(model, inputs))


def test_long_chains_of_parameters() -> None:
    """What parameters alone have made is looked behind once, not in each operation."""

    def cost(steps: int) -> int:
        def loop(m: Module, x: Tensor) -> Tensor:
            gain = m.w
            for _ in range(steps):
                gain = gain @ m.w / 2 + m.w.T
                x = x @ gain.tanh()
            return x

        model, _, X = use(loop, 4, w=(4, 4)).build()
        model, calls = extend(model), []
        sys.setprofile(lambda frame, event, _: calls.append(event))
        model(*X)
        sys.setprofile(None)
        return calls.count("call")

    cost(10)  # what is remembered
    assert cost(160) < 5 * cost(40)
    row = use(lambda m, x: x @ (m.w @ m.w).tanh() @ (m.w @ m.w @ m.w), 4, w=(4, 4))
    assert_right(row)


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_autocast(name: str) -> None:
    """Under autocast, fields have the parameter's type."""
    row, quantities = LOW_PRECISION[name], ["BatchGrad", "DiagGGNExact"]
    around = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    model = in_type(row, torch.float32, around, quantities)
    assert_fields(model, quantities, reference(row), rtol=0.1)
