"""Kronecker factors belong to uses: a linear map has them, whatever it is written as.

With one sample and one position, factors are exact; otherwise they are those of the
layer that does the same. What has none gets its dense block, unless it is too large.
"""

import re
import warnings
from copy import deepcopy
from functools import partial
from math import nan
from typing import Any, Callable, Dict, List, Optional, Sequence

import pytest
import torch
import torch.nn.functional as F
from cases import F64
from oracle import assert_agrees, batch_ggn, parameters
from per_sample import (
    REFUSALS,
    Lambda,
    N,
    assert_right,
    compute,
    lookup,
    part,
    real,
    reference,
    use,
)
from test_expressions import EXPRESSIONS, TIED, in_turn
from test_uses import LINEAR
from torch import Tensor, nn
from torch.nn import Module

from backpack import backpack, extend
from backpack.core.per_sample.pieces import Pieces
from backpack.extensions import EKFAC, KFAC, KFLR
from backpack.utils.kroneckers import kfacs_to_mat

FACTORS = {
    **{
        name: LINEAR[name]
        for name in (
            "linear",
            "linear-keywords",
            "matmul-transposed",
            "matmul",
            "mm",
            "mm-method",
            "mm-from-the-left",
            "addmm",
            "addmm-transposed",
            "einsum",
            "einsum-last",
            "tensordot",
            "tensordot-axes",
            "inner",
            "inner-from-the-left",
            "operator-linear",
            "operator-packet",
            "operator-mm",
            "operator-addmm",
        )
    },
    "lora": EXPRESSIONS["lora"],
    "never-called": TIED["never-called"],
    "one-token": lookup(lambda m, i: (m.w[i] @ m.v).sin(), w=(5, 3), v=(3, 4)),
}


@pytest.mark.parametrize("row", FACTORS)
def test_factors(row: str) -> None:
    """The Kronecker product of a linear use's factors is the GGN's block."""
    one = FACTORS[row]._replace(X=lambda: tuple(x[:1] for x in FACTORS[row].X()))
    blocks = reference(one).blocks
    model = compute(one, ["KFLR"])
    params = parameters(model)
    for name in params.keys() & {"w", "v", "b", "f.weight", "f.down.weight"}:
        factors = params[name].kflr
        rows = sum(f.shape[0] for f in factors)
        assert len(factors) == min(2, params[name].dim()), f"{name}: a dense block"
        factors = [f.diag() if f.dim() == 1 else f for f in factors]
        assert rows < params[name].numel() or params[name].dim() == 1
        assert_agrees(kfacs_to_mat(factors), blocks[name].sum(0), name)


@pytest.mark.parametrize("row", FACTORS)
def test_eigenvalues(row: str) -> None:
    """Corrected eigenvalues are the diagonal of the GGN's block in their basis."""
    block = {name: b.sum(0) for name, b in reference(FACTORS[row]).blocks.items()}
    model, loss, X = FACTORS[row].build()
    value = FACTORS[row].run(extend(model), extend(loss), X)
    with backpack(EKFAC(fisher_type="exact")):
        value.backward()
    for name, param in parameters(model).items():
        *bases, values = param.ekfac
        bases = [basis.diag() if basis.dim() == 1 else basis for basis in bases]
        basis = kfacs_to_mat(bases)
        diagonal = (basis.T @ block[name] @ basis).diagonal()
        assert_agrees(values.flatten(), diagonal, name)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_eigenvalues_of_no_outputs() -> None:
    """A layer without outputs has none, and the factor of its input."""
    model, loss = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2)), nn.MSELoss()
    prediction = extend(model)(torch.randn(4, 3))
    value = extend(loss)(prediction, torch.zeros(4, 2))
    with backpack(EKFAC(), KFAC()):
        value.backward()
    for param, shapes in zip(
        model.parameters(),
        [[(0, 0), (3, 3), (0, 3)], [(0, 0), (0,)], [(2, 2), (0, 0), (2, 0)]],
    ):
        assert [tuple(part.shape) for part in param.ekfac] == shapes
        assert [part.shape for part in param.kfac] == [
            basis.shape for basis in param.ekfac[:-1]
        ]


PICKED = {  # rows of a table that all samples share
    "embedding": lambda m: F.embedding(torch.arange(1, 4), m.w),
    "embedding-int": lambda m: F.embedding(torch.arange(1, 4, dtype=torch.int), m.w),
    "embedding-padded": lambda m: F.embedding(torch.arange(1, 4), m.w, padding_idx=2),
    "embedding-by-frequency": lambda m: F.embedding(
        torch.tensor([1, 2, 2]), m.w, scale_grad_by_freq=True
    ),
    "embedding-in-front": lambda m: F.embedding(torch.arange(1, 4)[None], m.w),
    "repeated": lambda m: F.embedding(torch.tensor([1, 2, 1]), m.w),
    "index": lambda m: m.w[torch.tensor([3, 0, 2])],
    "index-columns": lambda m: m.w[:3, torch.tensor([3, 0, 2, 1])],
    "index-mask": lambda m: m.w[torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.bool)],
    "index_select": lambda m: m.w.index_select(0, torch.tensor([1, 2, 5])),
    "slice": lambda m: m.w[:3],
    "slice-from-the-end": lambda m: m.w[-3:].unsqueeze(0),
    "slice-steps": lambda m: m.w[::2],
    "slice-columns": lambda m: m.w[:3, :1],
}
NO_TABLE = {"embedding-by-frequency", "index-columns", "slice-columns"}


@pytest.mark.parametrize("name", PICKED)
def test_table_of_positions(name: str) -> None:
    """It has the factors of an embedding, and gradients like any expression."""
    row = use(lambda m, x: (x + PICKED[name](m)).sin().mT, 3, 4, w=(6, 4))
    assert_right(row)
    model, loss, X = row.build()
    value = row.run(extend(model), extend(loss), X)
    with backpack(KFLR(weight_sharing="expand")):
        value.backward()
    if name in NO_TABLE:
        assert [len(factor) for factor in model.w.kflr] == [model.w.numel()]
        return
    picked = torch.autograd.grad(PICKED[name](model).sum(), model.w)[0]
    frequency, cotangents = model.w.kflr
    assert_agrees(frequency, picked[:, 0] / 3, "how often a row is picked")
    if name != "repeated":  # positions that share a row meet in its block
        blocks = reference(row).blocks["w"].sum(0).view(6, 4, 6, 4)
        blocks = blocks.diagonal(dim1=0, dim2=2).sum(-1)
        assert_agrees(cotangents, blocks, "cotangents of all positions")


def of_two_losses(heads: Callable, x: Tensor, sharing: str, **parts: Any) -> Any:
    """Compute KFLR of the sum of two losses, and the GGN's blocks of each sample.

    Args:
        heads: Function of the model and the input: two predictions ``[N, 2]``.
        x: The input.
        sharing: How positions that share a weight are treated.
        parts: What the model consists of.

    Returns:
        The model with its factors, and the blocks.
    """
    torch.manual_seed(0)
    made = {name: part(spec) for name, spec in parts.items()}
    model = Lambda(heads, **made).to(F64)
    x, y = x.to(F64), torch.tensor([0, 1, 1, 0])
    losses = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
    joint = Lambda(lambda m, x: torch.cat(heads(m, x), 1), **deepcopy(made)).to(F64)
    both = Lambda(lambda m, f: losses[0](f[:, :2], y) + losses[1](f[:, 2:], y))
    blocks = batch_ggn(joint, both, (x,), ())
    first, second = map(extend, deepcopy(losses))
    a, b = extend(model)(x)
    with backpack(KFLR(weight_sharing=sharing)):
        (first(a, y) + second(b, y)).backward()
    return model, blocks


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", sorted(PICKED.keys() - NO_TABLE - {"repeated"}))
def test_table_of_positions_and_two_losses(name: str, sharing: str) -> None:
    """Losses that see the same rows, one of them at a single position, add up."""

    def heads(m: Module, x: Tensor) -> Any:
        h = (x + PICKED[name](m)).sin()
        return h.flatten(1) @ m.u, h[:, 0] @ m.v

    shapes = {"w": (6, 4), "u": (12, 2), "v": (4, 2)}
    model, ggn = of_two_losses(heads, torch.randn(N, 3, 4), sharing, **shapes)
    picked = torch.autograd.grad(PICKED[name](model).sum(), model.w)[0][:, 0]
    blocks, share = ggn["w"].sum(0).view(6, 4, 6, 4), picked / 3
    pattern = "tptq->pq" if sharing == "expand" else "tpsq->pq"
    expected = [share if sharing == "expand" else share**2]
    assert_agrees(model.w.kflr, [*expected, torch.einsum(pattern, blocks)], name)


def calls(m: Module, x: Tensor) -> Any:
    """Call a layer twice; both losses see both calls."""
    h = m.f(x[:, 0]) + m.f(x[:, 1]).sin()
    return h, h.tanh()


def one_call(m: Module, x: Tensor) -> Any:
    """Do the same in one call."""
    first, second = m.f(x).unbind(1)
    h = first + second.sin()
    return h, h.tanh()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_calls_and_two_losses(sharing: str) -> None:
    """Two losses that see the same calls have the factors of one call."""
    x, layers = torch.randn(N, 2, 4), {"f": lambda: nn.Linear(4, 2)}
    results = []
    for heads in (calls, one_call):
        model, _ = of_two_losses(heads, x, sharing, **layers)
        results.append([p.kflr for p in model.parameters()])
    for actual, expected, what in zip(*results, ("weight", "bias")):
        assert_agrees(actual, expected, what)


ONE_FACTOR = {  # parameters with a dense block: predictions of different calls
    "bias": (lambda m, x: (m.w + x[:, 0], (x[:, 1] + m.w).sin() + m.w), (2,)),
    "scale": (lambda m, x: (m.w * x[:, 0], (x[:, 1] * m.w).sin() @ m.w.diag()), (2,)),
}


@pytest.mark.parametrize("name", ONE_FACTOR)
def test_dense_blocks_and_two_losses(name: str) -> None:
    """A single factor is a sum over losses, whichever calls they see."""
    heads, shape = ONE_FACTOR[name]
    model, ggn = of_two_losses(heads, torch.randn(N, 2, 2), "reduce", w=shape)
    assert_agrees(model.w.kflr, [ggn["w"].sum(0)], name)


OTHER_CALLS = {  # predictions of different calls, and what their weight is
    "layer": (
        lambda m, x: (m.f(x[:, 0]), m.f(x[:, 0]) + m.f(x[:, 1])),
        lambda: nn.Linear(2, 2),
        r"Linear\(.*'f.weight' of Lambda",
    ),
    "tied": (
        lambda m, x: (
            F.linear(x[:, 0], m.f.weight),
            m.f((x[:, 1, 0] > 0).long()) + F.linear(x[:, 0], m.f.weight),
        ),
        lambda: nn.Embedding(2, 2),
        r"Embedding\(.*'f.weight' of Lambda",
    ),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_two_losses_of_different_calls(name: str, sharing: str) -> None:
    """Factors of different inputs do not add up, and whose they are is said."""
    heads, layer, who = OTHER_CALLS[name]
    says = rf"KFLR: {who}.*used by several calls, of which two losses see different"
    with pytest.raises(NotImplementedError, match=says):
        of_two_losses(heads, torch.randn(N, 2, 2), sharing, f=layer)


ORDERS = {
    "permute(0, 2, 1)": (partial(torch.einsum, "ni,eio->neo"), (2, 4, 3)),
    "permute(1, 2, 0)": (partial(torch.einsum, "ni,ieo->neo"), (4, 2, 3)),
    "permute(0, 2, 3, 1)": (partial(torch.einsum, "ni,eipo->nepo"), (2, 4, 2, 3)),
    "permute(2, 0, 1)": (
        lambda x, w: F.linear(x, w.permute(2, 0, 1).flatten(0, 1)),
        (2, 4, 3),
    ),
    "reshape(4, 3).permute(1, 0)": (lambda x, w: x @ w.view(4, 3), (12,)),
    "reshape(2, 2, 2).permute(0, 2, 1)": (
        lambda x, w: F.conv_transpose1d(x.unsqueeze(2), w, groups=2).flatten(1),
        (4, 2, 1),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_axes(order: str) -> None:
    """Factors stand for a weight with its axes in an order, which a warning names."""
    function, shape = ORDERS[order]
    row = use(lambda m, x: function(x, m.w), 4, w=shape)
    one = row._replace(X=lambda: tuple(x[:1] for x in row.X()))
    model, loss, X = one.build()
    value = one.run(extend(model), extend(loss), X)
    with pytest.warns(UserWarning, match=re.escape(f"`weight.{order}`")):
        with backpack(KFLR(weight_sharing="expand")):
            value.backward()
    numbers = torch.arange(model.w.numel()).view(shape)
    places = eval(f"numbers.{order}", {"numbers": numbers}).flatten()
    block = reference(one).blocks["w"].sum(0)[places][:, places]
    groups = zip(*(f if f.dim() == 3 else f.unsqueeze(0) for f in model.w.kflr))
    found = torch.block_diag(*map(kfacs_to_mat, groups))
    assert_agrees(found, block * (found != 0), order)


def gpt_layer(m: Module, x: Tensor) -> Tensor:
    """Apply a layer as GPT-2 has it."""
    return torch.addmm(m.b, x.reshape(-1, 4), m.w.T).view(*x.shape[:2], 3)


TWINS = {  # functions of weight and bias, and the layer that does the same
    "linear": (lambda m, x: F.linear(x, m.w, m.b), lambda: nn.Linear(4, 3), (3, 4)),
    "matmul": (lambda m, x: x @ m.w.T + m.b, lambda: nn.Linear(4, 3), (3, 4)),
    "gpt": (gpt_layer, lambda: nn.Linear(4, 3), (3, 4)),
    "einsum": (
        lambda m, x: torch.einsum("nti,oi->nto", x, m.w) + m.b,
        lambda: nn.Linear(4, 3),
        (3, 4),
    ),
    "convolution": (
        lambda m, x: F.conv1d(x, m.w, m.b, padding=1),
        lambda: nn.Conv1d(5, 2, 3, padding=1),
        (5, 4),
    ),
    "operator": (
        lambda m, x: torch.ops.aten.convolution.default(
            x, m.w, m.b, [1], [1], [1], False, [0], 1
        ),
        lambda: nn.Conv1d(5, 2, 3, padding=1),
        (5, 4),
    ),
    "operator-of-a-transposed-convolution": (
        lambda m, x: torch.ops.aten.convolution.default(
            x, m.w, m.b, [1], [0], [1], True, [0], 1
        ),
        lambda: nn.ConvTranspose1d(5, 2, 3),
        (5, 4),
    ),
    "transposed-convolution": (
        lambda m, x: F.conv_transpose1d(x, m.w, m.b),
        lambda: nn.ConvTranspose1d(5, 2, 3),
        (5, 4),
    ),
    "groups": (
        lambda m, x: F.conv1d(x, m.w, m.b, groups=2),
        lambda: nn.Conv1d(4, 2, 3, groups=2),
        (4, 4),
    ),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("factors", [KFAC, KFLR])
@pytest.mark.parametrize("name", TWINS)
def test_factors_like_those_of_a_layer(name: str, factors: type, sharing: str) -> None:
    """A function's factors are those of the layer that does the same."""
    function, make, shape = TWINS[name]
    torch.manual_seed(0)
    layer = make().to(F64)
    twin = Lambda(
        lambda m, x: function(m, x),
        w=nn.Parameter(layer.weight.detach().clone()),
        b=nn.Parameter(layer.bias.detach().clone()),
    )
    results = []
    for module in (layer, twin):
        torch.manual_seed(1)
        model, loss = extend(nn.Sequential(module)), extend(nn.MSELoss())
        f = model(torch.randn(N, *shape, dtype=F64))
        extension = factors(weight_sharing=sharing)
        with backpack(extension):
            loss(f, real(f)).backward()
        results.append([getattr(p, extension.savefield) for p in model.parameters()])
    for actual, expected, what in zip(*reversed(results), ("weight", "bias")):
        assert_agrees(actual, expected, what)


def to_experts(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Send each position to one of three experts, and none to the one between."""
    out = torch.zeros_like(x)
    for k, rows in ((0, x[..., 0] > 0), (2, x[..., 0] <= 0)):
        out = out.index_put((rows,), F.linear(x[rows], weights[k]))
    return out.tanh()


STACKS = {  # how weights are applied, and of which whole they are taken, and how
    "linear": (in_turn, (3, 4, 4), Tensor.unbind),
    "matmul": (partial(in_turn, apply=torch.matmul), (3, 4, 4), list),
    "convolution": (
        partial(in_turn, apply=partial(F.conv1d, padding=1)),
        *((3, 4, 4, 3), lambda w: [w[0], w[1], w[2]]),
    ),
    "packed": (in_turn, (12, 4), lambda w: w.chunk(3)),
    "experts": (to_experts, (3, 4, 4), Tensor.unbind),
}
OF_STACKS: Dict[str, Callable] = {
    "KFAC": lambda sharing: KFAC(fisher_type="empirical", weight_sharing=sharing),
    "KFLR": lambda sharing: KFLR(weight_sharing=sharing),
    "EKFAC": lambda sharing: EKFAC(fisher_type="exact", weight_sharing=sharing),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("quantity", OF_STACKS)
@pytest.mark.parametrize("name", STACKS)
def test_stacks(
    name: str, quantity: str, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are stacked have the factors of separate ones, as groups have."""
    monkeypatch.setattr(Pieces, "individual", None)  # as large as the stack
    function, shape, take = STACKS[name]
    torch.manual_seed(0)
    stack, x = torch.randn(shape, dtype=F64), torch.randn(N, 4, 4, dtype=F64)
    apart = nn.ParameterList(w.clone() for w in take(stack))
    apart[1].requires_grad_(name != "experts")
    results = []
    for ws in (nn.ParameterList([stack]), apart):

        def forward(m: Module, x: Tensor) -> Tensor:
            return function(x, take(*m.ws) if len(m.ws) == 1 else m.ws)

        model = Lambda(forward, ws=ws)
        model, loss = extend(nn.Sequential(model, nn.Flatten())), extend(nn.MSELoss())
        extension, f = OF_STACKS[quantity](sharing), model(x)
        with backpack(extension):
            loss(f, real(f)).backward()
        results.append([getattr(p, extension.savefield, None) for p in ws])
    (values,), expected = results
    for k, own in enumerate(expected):
        found = as_matrix([x[k] for x in values])
        wanted = torch.zeros_like(found) if own is None else as_matrix(own)
        assert_agrees(found, wanted, f"weight {k}")


@pytest.mark.parametrize("what", ["empty", "not-a-number"])
@pytest.mark.parametrize("fisher_type", ["exact", "mc", "empirical"])
def test_no_eigenvectors(fisher_type: Any, what: str) -> None:
    """The error says of which parameter there are none."""
    model = extend(
        nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3))
    )
    loss = extend(nn.CrossEntropyLoss())
    x = torch.full((0 if what == "empty" else 2, 4), nan)
    value = loss(model(x), torch.zeros(len(x), dtype=torch.long))
    says = r"EKFAC, of a parameter of shape \[3, 5\]: .*has no eigenvectors"
    with (
        pytest.raises(RuntimeError, match=says),
        backpack(EKFAC(fisher_type=fisher_type)),
    ):
        value.backward()


@pytest.mark.parametrize("quantity", [KFLR, KFAC, EKFAC])
def test_nothing_of_a_table(quantity: Callable) -> None:
    """A prefix without rows adds nothing, and changes no other factor."""
    found = []
    for rows in (0, None):
        torch.manual_seed(0)

        def forward(m: Module, x: Tensor, rows: Any = rows) -> Tensor:
            front = [] if rows is None else [m.p[:rows].expand(len(x), 0, 4)]
            return m.l(torch.cat([*front, x], 1)).flatten(1)

        model = Lambda(forward, l=nn.Linear(4, 3))
        model.p = nn.Parameter(torch.ones(5, 4))
        model, loss = extend(model.to(F64)), extend(nn.MSELoss())
        f = model(torch.randn(N, 2, 4, dtype=F64))
        torch.manual_seed(0)
        with (
            warnings.catch_warnings(),
            backpack(ext := quantity(weight_sharing="expand")),
        ):
            warnings.filterwarnings("ignore", "No result was computed")
            loss(f, real(f)).backward()
        found.append(getattr(model.l.weight, ext.savefield))
        if rows is not None:
            assert not any(bool(x.any()) for x in getattr(model.p, ext.savefield)[-1:])
    for x, y in zip(*found):
        for a, b in zip(x, y) if isinstance(x, (list, tuple)) else [(x, y)]:
            assert_agrees(a, b)


def as_matrix(values: Sequence[Tensor]) -> Tensor:
    """Multiply out Kronecker factors, or eigenvectors and eigenvalues."""
    if len(values) == 2:
        return kfacs_to_mat(values)
    basis = kfacs_to_mat(values[:-1])
    return basis @ values[-1].flatten().diag() @ basis.T


def test_factors_of_an_exported_model() -> None:
    """A model of PyTorch's operators has the factors of the one it was made from."""
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    model, x = nn.Sequential(*layers).to(F64), torch.randn(N, 3, 4, dtype=F64)
    exported, results = torch.export.export(model, (x,)).module(), []
    for some in (exported, model):
        f, extension = extend(some)(x), KFLR(weight_sharing="expand")
        loss = extend(nn.MSELoss())
        with backpack(extension):
            loss(f, real(f)).backward()
        params = dict(some.named_parameters())
        results.append({name: p.kflr for name, p in params.items()})
    actual, expected = results
    assert actual.keys() == expected.keys()
    for name, factors in expected.items():
        assert_agrees(actual[name], factors, name)


def picks(m: Module, x: Tensor) -> Tensor:
    """Send some positions to a layer, as an expert gets them."""
    return x.new_zeros(*x.shape[:2], 2).index_put((m.sent,), m.f(x[m.sent]))


def masks(m: Module, x: Tensor) -> Tensor:
    """Do the same with zeros in place of the others."""
    sent = m.sent.to(x.dtype).unsqueeze(-1)
    return m.f(x * sent) * sent


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_some_positions(sharing: str) -> None:
    """Positions that only other samples have count as zeros."""
    sent = torch.arange(3) < torch.tensor([3, 1, 0, 2]).unsqueeze(1)
    results = []
    for function in (picks, masks):
        torch.manual_seed(0)
        model = extend(Lambda(function, f=nn.Linear(4, 2), sent=sent).to(F64))
        f, loss = model(torch.randn(N, 3, 4, dtype=F64)), extend(nn.MSELoss())
        with backpack(KFLR(weight_sharing=sharing)):
            loss(f, real(f)).backward()
        results.append([p.kflr for p in model.parameters()])
    for actual, expected, what in zip(*results, ("weight", "bias")):
        assert_agrees(actual, expected, what)


@pytest.mark.parametrize("t", [1, 3, N])
def test_factors_of_attention(t: int) -> None:
    """Attention's packed projection has factors, and no dense block."""
    model, loss = nn.MultiheadAttention(4, 2, batch_first=True), extend(nn.MSELoss())
    x = torch.randn(N, t, 4, dtype=F64)
    out, _ = extend(model.to(F64))(x, x, x)
    with backpack(KFLR(weight_sharing="expand")):
        loss(out, real(out)).backward()
    for p in (model.in_proj_weight, model.out_proj.weight):
        sizes = [f.shape for f in p.kflr]
        assert len(sizes) > 1 and max(map(max, sizes)) <= 12, sizes


@pytest.mark.parametrize("batch", [1, 2])
def test_pairs_of_a_time_first_layer(batch: int) -> None:
    """As if it were called with the samples in front, also if there is a single one."""
    factors = []
    for batch_first in (True, False):
        torch.manual_seed(0)
        layer = nn.GRU(3, 2, batch_first=batch_first)

        def forward(m: Module, x: Tensor, front: bool = batch_first) -> Tensor:
            return m.r(x)[0] if front else m.r(x.transpose(0, 1))[0].transpose(0, 1)

        model, loss = extend(Lambda(forward, r=layer).to(F64)), extend(nn.MSELoss())
        out = model(torch.ones(batch, 4, 3, dtype=F64))
        with backpack(KFLR(weight_sharing="expand")):
            loss(out, real(out)).backward()
        factors.append([p.kflr for p in model.parameters()])
    for pair, expected in zip(*factors):
        assert_agrees(pair, expected)


LARGE = {
    "shift": (lambda m, x: (x + m.w).sum(1, keepdim=True), 2**19),
    "scale": (lambda m, x: (x * m.w).sum(1, keepdim=True), 2**19),
    "expression": (
        lambda m, x: F.linear(x[:, :1024], m.w.view(512, 1024).tanh()).pow(3),
        2**19,
    ),
}


@pytest.mark.parametrize("factors", [KFAC, KFLR])
@pytest.mark.parametrize("name", LARGE)
def test_large_dense_block(name: str, factors: type) -> None:
    """A dense block that is too large is refused, with its size and what to do."""
    function, length = LARGE[name]
    model = extend(Lambda(function, w=nn.Parameter(torch.zeros(length))))
    loss = extend(nn.MSELoss())
    f = model(torch.zeros(2, length))
    with pytest.raises(REFUSALS) as caught, backpack(factors()):
        loss(f, torch.zeros_like(f)).backward()
    message = str(caught.value)
    assert re.search(r"\d+(\.\d+)? ?[GT]i?B", message), message
    assert re.search(r"\bw\b", message) and re.search("DiagGGN", message), message


PARTS = {  # numbers of samples
    "one-by-one": [1] * 5,
    "two-by-two": [2, 2, 1],
    "most": [4, 1],
    "none": [3, 0, 2],
    "none-of-one": [1, 0],
}
CALLED_FOR_PARTS = {
    "layer": (lambda: nn.Linear(4, 3), (4,)),
    "shift-of-rows": (
        lambda: Lambda(lambda m, z: z + m.b, b=nn.Parameter(torch.ones(4))),
        (2, 4),
    ),
}


def factors_of_parts(parts: Callable, layer: Module, x: Tensor, ext: Any) -> List:
    """Call a layer for parts of a batch, one after the other; read its factors."""
    model = extend(Lambda(lambda m, x: parts(m.f, x).sin().flatten(1), f=layer))
    loss = extend(nn.CrossEntropyLoss())
    with backpack(ext):
        loss(model(x), torch.arange(len(x)) % 3).backward()
    return [x for p in layer.parameters() for x in getattr(p, ext.savefield)]


def test_uneven_lookups() -> None:
    """Where samples look up different numbers of rows, nothing is added to fill up."""
    ids, owner = torch.tensor([1, 2, 3, 1]), torch.tensor([0, 0, 0, 1])

    layer = nn.Embedding(5, 4).to(F64)
    x = torch.randn(2, 4, dtype=F64)

    def of_data(m: Module, x: Tensor) -> Tensor:
        own = ids + x[owner, 0].long() * 0  # the samples' own
        return torch.zeros_like(x).index_add(0, owner, m.f(own))

    model, loss = extend(Lambda(of_data, f=layer)), extend(nn.CrossEntropyLoss())
    with backpack(KFLR(weight_sharing="expand")):
        loss(model(x), torch.tensor([0, 1])).backward()
    counts = layer.weight.kflr[0] / layer.weight.kflr[0][2]
    assert_agrees(counts, torch.tensor([0, 2, 1, 1, 0], dtype=F64))


@pytest.mark.parametrize("name", [*PARTS, "rows"])
@pytest.mark.parametrize("sharing", [None, "expand", "reduce"])
@pytest.mark.parametrize("ext", [KFLR, EKFAC])
@pytest.mark.parametrize("what", CALLED_FOR_PARTS)
def test_parts_of_the_batch(
    what: str, ext: type, sharing: Optional[str], name: str
) -> None:
    """What is called for parts of a batch has the factors of a call for all of it."""
    if sharing is None and what != "layer":
        pytest.skip("Positions need a choice.")
    make, shape = CALLED_FOR_PARTS[what]
    n = sum(PARTS.get(name, [5]))
    layer, x = make().to(F64), torch.randn(n, *shape, dtype=F64)
    options = {"fisher_type": "exact"} if ext is EKFAC else {}

    def each(f: Callable, x: Tensor) -> Tensor:
        if name == "rows":  # without an axis of samples
            return torch.stack([f(z) for z in x])
        return torch.cat([f(z) for z in x.split(PARTS[name])])

    both = [
        factors_of_parts(
            parts, deepcopy(layer), x, ext(weight_sharing=sharing, **options)
        )
        for parts in (lambda f, x: f(x), each)
    ]
    for expected, actual in zip(*both):
        assert_agrees(actual.abs(), expected.abs())  # eigenvectors have any sign


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("outputs", [3, 12])
def test_eigenvectors_are_multiplied_out(outputs: int, positions: int) -> None:
    """PyTorch takes both bases as they are, whichever algorithm has found them."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(4, outputs), nn.Flatten()))
    loss, x = extend(nn.CrossEntropyLoss()), torch.randn(2, positions, 4)
    with backpack(EKFAC(fisher_type="exact", weight_sharing="expand")):
        loss(model(x), torch.tensor([0, 1])).backward()
    Q = torch.kron(*model[0].weight.ekfac[:2])
    assert_agrees(Q.T @ Q, torch.eye(4 * outputs), rtol=1e-4)
