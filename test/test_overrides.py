"""Every fast rule against plain autograd, and every reduction against its formula.

What fast rules hand over is a :class:`PerSample` in some form; each of its reductions
must be what follows from the individual products, by whichever formula and in however
many chunks.
"""

from functools import lru_cache, partial
from itertools import product as pairs
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
)

import pytest
import torch
from cases import F64, LAYER_CASES, Case, Tensors
from oracle import assert_agrees
from torch import Tensor, nn, testing
from torch.nn import Module

from backpack.core.derivatives import convnd
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.generic import output_batch_axis, tensor_outputs
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.fast import matmul, tuning
from backpack.core.layout import FIRST
from backpack.core.operations import find_operation
from backpack.core.per_sample.base import Dense, PerSample, Summed
from backpack.core.per_sample.maps import dots_between, merged, projected
from backpack.core.per_sample.order import Order, permuted
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.rows import Rows
from backpack.core.per_sample.scaled import Scaled
from backpack.core.per_sample.sums import add_rows
from backpack.core.table import find_row
from backpack.extensions.secondorder.hbp.factors import output_factor

CHUNKS = [1, 40, 2**20]
N = 3


def limit_chunks(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut products into chunks, or single ones, so that cases need not be large.

    Args:
        elements: Elements of a chunk, and of a product that is formed by itself.
        monkeypatch: Restores the sizes.
    """
    monkeypatch.setattr(tuning, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(tuning, "LARGE_PRODUCT", elements)


def by_autograd(
    name: str,
    layer: Module,
    args: Sequence[Any],
    mats: Sequence[Tensor],
    kwargs: Optional[Dict[str, Any]] = None,
) -> Tensor:
    """Multiply columns with a parameter's Jacobian, one sample and column at a time.

    Args:
        name: Name of the parameter.
        layer: The layer.
        args: What goes into it.
        mats: Columns ``[V, N, *]`` at each output.
        kwargs: Its keyword arguments. Default: ``None``.

    Returns:
        Products ``[V, N, *p]``.
    """
    with torch.enable_grad():
        outputs = tensor_outputs(layer(*args, **(kwargs or {})))
    param = layer.get_parameter(name)
    axes = [output_batch_axis(layer, i) for i in range(len(outputs))]

    @torch.enable_grad()
    def product(v: int, n: int) -> Tensor:
        total = sum(
            (y.select(axis, n) * mat[v].select(axis, n)).sum()
            for y, mat, axis in zip(outputs, mats, axes)
        )
        options = {"retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(total, param, **options)[0].to_dense()

    samples = range(mats[0].shape[1 + axes[0]])
    rows = [torch.stack([product(v, n) for n in samples]) for v in range(len(mats[0]))]
    return torch.stack(rows)


class LayerCall(NamedTuple):
    """A layer with a fast rule, what went into it and what came out."""

    layer: Module
    args: Tensors
    kwargs: Dict[str, Any]
    outputs: List[Tensor]

    def cotangents(self, num_columns: int) -> List[Tensor]:
        """Draw columns at the outputs.

        Args:
            num_columns: V.

        Returns:
            Columns ``[V, N, *]``.
        """
        torch.manual_seed(num_columns)
        return [torch.randn(num_columns, *x.shape, dtype=x.dtype) for x in self.outputs]

    def fast(self, name: str, mats: List[Tensor]) -> PerSample:
        """Apply the fast rule.

        Args:
            name: Name of the parameter.
            mats: Columns at the outputs.

        Returns:
            The products.
        """
        rule = find_row(self.layer)
        arguments = [*self.args, *self.kwargs.values()]
        assert rule.covers(self.layer, name) and rule.accepts(self.layer, arguments)
        mats = mats if rule.several_outputs else mats[0]
        return rule.derivatives.product(name, self.layer, arguments, mats)

    def generic(self, name: str, mats: List[Tensor]) -> Tensor:
        """Differentiate the layer, one sample after the other.

        Args:
            name: Name of the parameter.
            mats: Columns at the outputs.

        Returns:
            Products ``[V, N, *p]``.
        """
        return by_autograd(name, self.layer, self.args, mats, self.kwargs)


def fast_calls(case: Case) -> Iterator[Tuple[str, LayerCall]]:
    """Find the parameters with a fast rule in a case's first layer.

    Args:
        case: The case.

    Yields:
        Names of parameters, and the call of the layer they belong to.
    """
    model, _, X, _ = case.build()
    calls: List[LayerCall] = []

    def remember(layer: Module, args: Tensors, kwargs: Dict, output: Any) -> None:
        calls.append(LayerCall(layer, args, kwargs, tensor_outputs(output)))

    for module in model.layer.modules():
        module.register_forward_hook(remember, with_kwargs=True)
    with torch.no_grad():
        model(*X)
    for call in calls:
        for name, _ in call.layer.named_parameters(recurse=False):
            row = find_row(call.layer)
            if row is not None and row.covers(call.layer, name):
                yield name, call


@lru_cache(maxsize=None)
def rows(kind: Type[PerSample] = PerSample) -> List[Any]:
    """List the fast rules to test.

    Args:
        kind: In which form they hand over their products. Default: any.

    Returns:
        Parameters for pytest: the case and a parameter's position in it.
    """
    return [
        pytest.param(case, i, id=f"{case.id}-{name}{i}")
        for case in LAYER_CASES
        for i, (name, call) in enumerate(fast_calls(case))
        if isinstance(call.fast(name, call.cotangents(1)), kind)
    ]


def weights(n: int) -> Tensor:
    """Return a weight for each sample, always the same; one of them is zero."""
    return torch.arange(n, dtype=F64).sub(1).sin()


def projections(shape: torch.Size, dtype: torch.dtype) -> List[Tensor]:
    """Make matrices for both sides of a parameter, one side for a vector."""
    axes = (shape[0], shape[1:].numel()) if len(shape) > 1 else (shape.numel(),)
    return [
        torch.arange(k * axis, dtype=F64).sin().reshape(k, axis).to(dtype)
        for k, axis in zip((2, 4), axes)
    ]


def project(p: PerSample) -> Tensor:
    """Project products from both sides."""
    return projected(p.plain, projections(p.shape, p.dtype)).individual()


def projection(m: Tensor) -> Tensor:
    """Compute what :func:`project` has to return."""
    left, *right = projections(m.shape[2:], m.dtype)
    rows = m.reshape(*m.shape[:2], left.shape[1], -1)
    rows = torch.einsum("kp,vnpd->vnkd", left, rows)
    return rows @ right[0].T if right else rows.squeeze(-1)


QUERIES = [-1, 0, -1]
REDUCTIONS: Dict[str, Tuple[Callable, Callable]] = {
    "individual": (lambda p: p.individual(), lambda m: m),
    "summed": (lambda p: p.summed(), lambda m: m.sum(1)),
    "sq_norms": (lambda p: p.sq_norms(), lambda m: (m**2).flatten(2).sum((0, 2))),
    "squares": (lambda p: p.squares(), lambda m: (m**2).sum((0, 1))),
    "squares-batch": (lambda p: p.squares(sum_batch=False), lambda m: (m**2).sum(0)),
    "dots": (
        lambda p: p.dots(),
        lambda m: torch.einsum("vnp,vmp->nm", m.flatten(2), m.flatten(2)),
    ),
    "weighted_sum": (
        lambda p: p.weighted_sum(weights(p.batch_size)),
        lambda m: torch.einsum("vn...,n->v...", m, weights(m.shape[1]).to(m)),
    ),
    "formed": (lambda p: p.formed().individual(), lambda m: m),
    "formed-for-dots": (
        lambda p: p.formed(for_dots=True).sq_norms(),
        lambda m: (m**2).flatten(2).sum((0, 2)),
    ),
    "variance": (lambda p: p.variance(), lambda m: m[0].var(0, unbiased=False)),
    "projected": (project, projection),
    "dots-others": (
        lambda p: dots_between(p.plain, p.plain.select(QUERIES)),
        lambda m: m[0].unsqueeze(-1).flatten(1) @ m[0, QUERIES].reshape(3, -1).T,
    ),
    "dots-tensors": (
        lambda p: dots_between(p.plain, Dense(p.individual()[:, QUERIES], p.shape)),
        lambda m: m[0].unsqueeze(-1).flatten(1) @ m[0, QUERIES].reshape(3, -1).T,
    ),
}
ONE_COLUMN = ("variance", "projected", "dots-others", "dots-tensors")


def check_reductions(
    make: Callable[[], PerSample], individual: Tensor, what: str, rtol: float = 1e-8
) -> None:
    """Compare all reductions with what they are in terms of the individual products.

    So is the sum over samples, which each of them may compute on its way.

    Args:
        make: Makes the products, anew for each reduction.
        individual: The individual products ``[V, N, *p]``.
        what: What is compared.
        rtol: Relative tolerance.
    """
    for name, (reduction, formula) in REDUCTIONS.items():
        if name in ONE_COLUMN and len(individual) > 1:
            continue
        products = make()
        products.keeps_total = len(individual) == 1
        actual = reduction(products).detach()
        if products.keeps_total:
            total = products.total().detach()
            assert_agrees(total, individual[0].sum(0), f"{name}: total of {what}", rtol)
            memory = [x.untyped_storage().data_ptr() for x in (actual, total)]
            assert memory[0] != memory[1], f"{name}: total of {what}"
        assert_agrees(actual, formula(individual), f"{name} of {what}", rtol)


@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("case, index", rows())
def test_rule(
    case: Case, index: int, num_columns: int, monkeypatch: pytest.MonkeyPatch
):
    """All reductions agree with the generic rule, with and without gradients."""
    name, call = list(fast_calls(case))[index]
    mats = call.cotangents(num_columns)
    expected = call.generic(name, mats)
    for chunk_elements, grad_enabled in pairs(CHUNKS, [False, True]):
        limit_chunks(chunk_elements, monkeypatch)
        with torch.set_grad_enabled(grad_enabled):
            what = f"{case.id}, chunks of {chunk_elements}"
            check_reductions(lambda: call.fast(name, mats), expected, what)


@pytest.mark.parametrize("case, index", rows(Outer))
def test_unfolded(case: Case, index: int, monkeypatch: pytest.MonkeyPatch):
    """Products of unfolded inputs, as for large layers, agree with the generic rule."""
    limit_chunks(1, monkeypatch)
    monkeypatch.setattr(tuning, "FEW_POSITIONS", float("inf"))
    monkeypatch.setattr(convnd, "has_fast_matmul", lambda x: True)
    name, call = list(fast_calls(case))[index]
    mats = call.cotangents(1)
    with torch.no_grad():
        products = lambda: call.fast(name, mats)  # noqa: E731
        check_reductions(products, call.generic(name, mats), case.id)


LARGE = {
    "few positions": (nn.Conv2d(80, 96, 3, padding=1), (80, 9, 9)),
    "two groups": (nn.Conv2d(160, 192, 3, groups=2), (160, 9, 9)),
    "many positions": (nn.Conv2d(80, 96, 3), (80, 16, 16)),
    "1d": (nn.Conv1d(256, 96, 5, padding=2), (256, 20)),
    "pointwise": (nn.Conv2d(256, 320, 1), (256, 5, 5)),
    "transposed": (nn.ConvTranspose2d(80, 96, 3), (80, 7, 7)),
    "linear": (nn.Linear(320, 256), (12, 320)),
}

# Users view these as matrices.
CONTIGUOUS = ("individual", "squares", "variance")


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("is_unfolded", [False, True])
@pytest.mark.parametrize("has_fast_blas", [False, True])
@pytest.mark.parametrize("most", [1, 2**18, 2**30])
@pytest.mark.parametrize("key", LARGE)
def test_large_layer(
    key: str,
    most: int,
    has_fast_blas: bool,
    is_unfolded: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """Layers that are large enough to form some products at a time."""
    monkeypatch.setattr(matmul, "has_fast_blas", lambda: has_fast_blas)
    monkeypatch.setattr(matmul, "_has_wide_avx512", lambda: True)
    monkeypatch.setattr(tuning, "MIN_PER_PRODUCT", 2**20)
    monkeypatch.setattr(tuning, "STEP_ELEMENTS", most)
    monkeypatch.setattr(tuning, "UNFOLDED_ELEMENTS", most)
    layer, shape = LARGE[key]
    layer.to("cpu")
    torch.manual_seed(0)
    x = torch.randn(N, *shape)
    call = LayerCall(layer, (x,), {}, [layer(x).detach()])
    mats = call.cotangents(1)

    def products() -> Outer:
        product = call.fast("weight", mats)
        if is_unfolded:  # by another reduction
            assert len(product.a) == N
        return product

    with torch.no_grad():
        assert products()._is_large
        expected = call.generic("weight", mats)
        check_reductions(products, expected, key, rtol=1e-4)
        assert all(getattr(products(), x)().is_contiguous() for x in CONTIGUOUS)


@pytest.mark.parametrize("is_permuted", list(pairs([False, True], repeat=2)))
def test_add_rows(is_permuted: Tuple[bool, bool]):
    """Rows are added up in the order of their axes, however they lie in memory."""
    first, second = [
        torch.rand(4, 540, 520).mT if permuted else torch.rand(4, 520, 540)
        for permuted in is_permuted
    ]
    with torch.no_grad():
        total = add_rows(add_rows(None, first), second)
    testing.assert_close(total, first.sum(0) + second.sum(0))


def test_total_owns_its_memory():
    """The sum of a single gradient is not that gradient."""
    gradients = Dense(torch.rand(1, 1, 4), torch.Size([4]))
    gradients.keeps_total = True
    individual = gradients.individual()
    assert gradients.total().data_ptr() != individual.data_ptr()


@pytest.mark.parametrize("reduce", [PerSample.individual, PerSample.squares])
@pytest.mark.parametrize("size", [3, tuning.SLICE_ELEMENTS])
@pytest.mark.parametrize("batch_size", [1, 7, 2 * tuning.SUMMED_ROWS + 1])
def test_total(batch_size: int, size: int, reduce: Callable[[PerSample], Tensor]):
    """The gradients that a reduction forms are added up, many as well as large ones."""
    products = torch.rand(1, batch_size, size, dtype=F64)
    gradients = Dense(products, torch.Size([size]))
    gradients.keeps_total = True
    with torch.no_grad():
        reduce(gradients)
        assert gradients._total is not None
        assert_agrees(gradients.total(), products[0].sum(0))


@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("case, index", rows()[::3])
def test_select(case: Case, index: int, num_columns: int):
    """Selected samples, in any order and more than once, keep their products."""
    name, call = list(fast_calls(case))[index]
    mats = call.cotangents(num_columns)
    product = call.fast(name, mats)
    batch_size = product.batch_size
    picked = [batch_size - 1, 0] + [0] * (batch_size > 1)
    expected = call.generic(name, mats)[:, picked]
    with torch.no_grad():
        check_reductions(
            lambda: call.fast(name, mats).select(picked), expected, case.id
        )
        twice = call.fast(name, mats).select(picked).select([1])
        assert_agrees(twice.individual(), expected[:, [1]], case.id)


@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("case, index", rows()[1::3])
def test_merge(
    case: Case, index: int, num_columns: int, monkeypatch: pytest.MonkeyPatch
):
    """The products of two calls of a layer add up before they are reduced."""
    name, call = list(fast_calls(case))[index]
    again = call._replace(
        args=tuple(x.flip(0) if isinstance(x, Tensor) else x for x in call.args)
    )
    mats = call.cotangents(num_columns)
    others = [2 * mat.flip(-1) for mat in mats]
    expected = call.generic(name, mats) + again.generic(name, others)
    with torch.no_grad():
        for chunk_elements in CHUNKS[:2]:
            limit_chunks(chunk_elements, monkeypatch)
            check_reductions(
                lambda: merged([call.fast(name, mats), again.fast(name, others)]),
                expected,
                f"{case.id}, chunks of {chunk_elements}",
            )
        three = [call.fast(name, mats), again.fast(name, others), call.fast(name, mats)]
        total = expected + call.generic(name, mats)
        assert_agrees(merged(three).individual(), total, case.id)
        picked = merged([call.fast(name, mats), again.fast(name, others)])
        assert_agrees(picked.select([0]).individual(), expected[:, [0]], case.id)


@pytest.mark.parametrize("strips", [False, True], ids=["whole", "strips"])
@pytest.mark.parametrize("case, index", rows(Outer))
def test_input_gram(
    case: Case, index: int, strips: bool, monkeypatch: pytest.MonkeyPatch
):
    """Features are multiplied with each other, however they are laid out and cut."""
    name, call = list(fast_calls(case))[index]
    mats = call.cotangents(1)
    if strips:
        for size in ("MIN_ROWS", "MIN_SUMMANDS", "LANES"):
            monkeypatch.setattr(tuning, size, 1)
    a = call.fast(name, mats).a
    expected = 0.5 * torch.einsum("ngti,ngtj->gij", a, a)
    for unfolded_elements, grad_enabled in pairs(CHUNKS, [False, True]):
        monkeypatch.setattr(tuning, "UNFOLDED_ELEMENTS", unfolded_elements)
        with torch.set_grad_enabled(grad_enabled):
            actual = call.fast(name, mats).input_gram(0.5).detach()
        assert_agrees(actual, expected, f"{case.id}, chunks of {unfolded_elements}")


# Sizes on both sides of each crossover between formulas


class Sizes(NamedTuple):
    """A row: sizes of an outer product, and which formulas they call for."""

    groups: int
    positions: int
    d: int
    p: int
    gram_norms: bool
    gram_dots: bool


SIZES = [
    Sizes(groups=1, positions=1, d=5, p=4, gram_norms=False, gram_dots=True),
    Sizes(groups=1, positions=2, d=7, p=8, gram_norms=True, gram_dots=True),
    Sizes(groups=2, positions=3, d=12, p=12, gram_norms=True, gram_dots=True),
    Sizes(groups=1, positions=9, d=2, p=3, gram_norms=False, gram_dots=False),
    Sizes(groups=3, positions=12, d=2, p=1, gram_norms=False, gram_dots=False),
    Sizes(groups=2, positions=1, d=1, p=1, gram_norms=False, gram_dots=False),
]


def make_outer(
    sizes: Sizes, num_columns: int, dtype: torch.dtype = F64
) -> Tuple[Tensor, Tensor, torch.Size]:
    """Draw the factors of an outer product.

    Args:
        sizes: The sizes.
        num_columns: V.
        dtype: Type. Default: float64.

    Returns:
        Inputs, cotangents, and the shape of the parameter.
    """
    torch.manual_seed(1)
    groups, positions, d, p = sizes[:4]
    a = torch.randn(N, groups, positions, d, dtype=dtype)
    b = torch.randn(num_columns, N, groups, positions, p, dtype=dtype)
    return a, b, torch.Size([groups * p, d])


@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("chunk_elements", CHUNKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outer(
    sizes: Sizes, chunk_elements: int, num_columns: int, monkeypatch: pytest.MonkeyPatch
):
    """Outer products are reduced right on both sides of each crossover."""
    limit_chunks(chunk_elements, monkeypatch)
    a, b, shape = make_outer(sizes, num_columns)
    expected = torch.einsum("vngtp,ngtd->vngpd", b, a).reshape(num_columns, N, *shape)

    formed: List[str] = []
    with monkeypatch.context() as patch:
        form = PerSample.dots
        patch.setattr(PerSample, "dots", lambda p: formed.append("dots") or form(p))
        norms = PerSample.sq_norms
        patch.setattr(
            PerSample, "sq_norms", lambda p: formed.append("sq_norms") or norms(p)
        )
        for grad_enabled in (False, True):
            with torch.set_grad_enabled(grad_enabled):
                check_reductions(lambda: Outer(lambda: a, b, shape), expected, "Outer")
    assert ("dots" in formed) != sizes.gram_dots
    plain_norms = sizes.positions > 1 and not sizes.gram_norms
    assert ("sq_norms" in formed) == plain_norms


class Weighted(Module):
    """Sums the rows of a table that has as many as there are samples."""

    def __init__(self) -> None:
        """Make the weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, dtype=F64))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Scale samples ``[N, 4]`` by the weight, and by the sum of a table's rows."""
        return x * self.weight * table.sum(0)


@pytest.mark.parametrize("num_columns", [1, 3])
def test_generic_rule_does_not_guess(num_columns: int):
    """An argument with N rows need not hold samples."""
    layer, x, table = Weighted(), *torch.rand(2, N, 4, dtype=F64)
    mat = torch.rand(num_columns, N, 4, dtype=F64)
    vars(layer).update(input0=x, input1=table, output=layer(x, table).detach())
    derivatives = BaseParameterDerivatives()
    product = derivatives.stored_product("weight", layer, (), (), mat)
    expected = [
        [
            torch.autograd.grad(layer(x, table)[n] @ v[n], layer.weight)[0]
            for n in range(N)
        ]
        for v in mat
    ]
    expected = torch.stack([torch.stack(rows) for rows in expected])
    assert_agrees(product.individual(), expected, "individual gradients")


def test_generic_rule_with_sparse_gradients():
    """Products are dense, whatever the layer's own gradients are."""
    layer = nn.EmbeddingBag(5, 3, mode="sum", sparse=True).to(F64)
    ids, mat = torch.tensor([[0, 1], [1, 1], [4, 2]]), torch.rand(2, N, 3, dtype=F64)
    vars(layer).update(input0=ids, output=layer(ids).detach())
    derivatives = BaseParameterDerivatives()
    product = derivatives.stored_product("weight", layer, (), (), mat)
    expected = by_autograd("weight", layer, [ids], [mat])
    assert_agrees(product.individual(), expected, "individual gradients")


@pytest.mark.parametrize("num_columns", [1, 3])
def test_merged_positions(num_columns: int):
    """A layer's calls may see different numbers of positions."""
    layer = nn.Linear(4, 3).to(F64)
    derivatives = LinearDerivatives()
    for name in ("weight", "bias"):
        parts, total = [], 0.0
        for positions in ((), (2,), (3, 2)):
            x = torch.randn(N, *positions, 4, dtype=F64)
            mat = torch.randn(num_columns, N, *positions, 3, dtype=F64)
            parts.append(derivatives.product(name, layer, [x], mat))
            total = total + by_autograd(name, layer, [x], [mat])
        check_reductions(lambda: merged(parts), total, name)  # noqa: B023


def test_merged_kinds():
    """An embedding that is tied to a linear layer: two forms of the same products."""
    embedding, head = nn.Embedding(5, 3).to(F64), nn.Linear(3, 5, bias=False).to(F64)
    ids = torch.tensor([[0, 1], [1, 1], [4, 2]])
    x = torch.randn(N, 2, 3, dtype=F64)
    mats = torch.randn(2, N, 2, 3, dtype=F64), torch.randn(2, N, 2, 5, dtype=F64)
    expected = by_autograd("weight", embedding, [ids], mats[:1]) + by_autograd(
        "weight", head, [x], mats[1:]
    )

    def parts() -> List[PerSample]:
        rows = EmbeddingDerivatives().product("weight", embedding, [ids], mats[0])
        outer = LinearDerivatives().product("weight", head, [x], mats[1])
        assert isinstance(rows, Rows) and isinstance(outer, Outer)
        return [rows, outer, Dense(torch.zeros_like(expected), head.weight.shape)]

    check_reductions(lambda: merged(parts()), expected, "embedding first")
    check_reductions(lambda: merged(parts()[::-1]), expected, "embedding last")


def test_merged_orientations():
    """Outer products of different layout are added as what they stand for.

    The weight of a convolution and that of a transposed one may be shared; both are
    outer products of the same sizes, but not in the same order.
    """
    conv = nn.Conv1d(2, 2, 2, bias=False).to(F64)
    transposed = nn.ConvTranspose1d(2, 2, 2, bias=False).to(F64)
    transposed.weight = conv.weight
    x = torch.randn(N, 2, 3, dtype=F64)
    mats = torch.randn(2, N, 2, 2, dtype=F64), torch.randn(2, N, 2, 4, dtype=F64)
    layers = (conv, transposed)
    expected = sum(
        by_autograd("weight", layer, [x], [mat]) for layer, mat in zip(layers, mats)
    )

    def parts() -> List[PerSample]:
        return [
            find_row(layer).derivatives.product("weight", layer, [x], mat)
            for layer, mat in zip(layers, mats)
        ]

    check_reductions(lambda: merged(parts()), expected, "conv first")
    check_reductions(lambda: merged(parts()[::-1]), expected, "conv last")


@pytest.mark.parametrize("others", [0, 1])
def test_merged_transposed(others: int):
    """Outer products of a matrix and its transpose are joined, those of one column."""
    weight = nn.Linear(4, 3, bias=False).to(F64).weight
    x, y = torch.randn(N, 2, 4, dtype=F64), torch.randn(N, 5, 3, dtype=F64)
    b, c = torch.randn(1, N, 2, 3, dtype=F64), torch.randn(1, N, 5, 4, dtype=F64)
    more = torch.randn(1, N, 3, 4, dtype=F64)
    expected = torch.einsum("vnto,nti->vnoi", b, x) + others * more
    expected = expected + torch.einsum("vnti,nto->vnoi", c, y)

    def total() -> PerSample:
        forward = find_operation(nn.functional.linear, (x, weight), {}, [1])
        backward = find_operation(torch.matmul, (y, weight), {}, [1])
        parts = [
            forward.product(1, weight.shape, b, FIRST, N),
            backward.product(1, weight.shape, c, FIRST, N),
        ]
        return merged(parts + others * [Dense(more, weight.shape)])

    check_reductions(total, expected, "as they are")
    check_reductions(lambda: total().plain, expected, "in the parameter's order")
    assert isinstance(total().plain, Dense if others else Outer)


@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize(
    "name", ["linear", "positions", "transposed", "dense", "twice"]
)
def test_scaled(name: str, num_columns: int):
    """Products behind an operation entry by entry are those before, times its slope."""
    x = torch.randn(N, *([2] if name == "positions" else []), 4, dtype=F64)
    mat = torch.randn(num_columns, *x.shape[:-1], 3, dtype=F64)
    inner: Any = LinearDerivatives().product(
        "weight", nn.Linear(4, 3).to(F64), [x], mat
    )
    if name == "transposed":
        inner = inner.permuted([1, 0])
    slope = torch.randn(inner.shape, dtype=F64) * (torch.rand(inner.shape) > 0.3)
    expected = inner.individual() * slope
    if name == "dense":
        inner = Dense(inner.individual(), inner.shape)
    if name == "twice":
        inner, expected = Scaled(inner, slope.exp()), expected * slope.exp()
    axes, sizes = [1, 0], torch.Size([2, 6])
    for make, wanted in (
        (lambda: Scaled(inner, slope), expected),
        (
            lambda: merged([Scaled(inner, slope), Scaled(inner, slope.clone())]),
            2 * expected,
        ),
        (
            lambda: merged([Scaled(inner, slope), Scaled(inner, slope + 1)]),
            expected + Scaled(inner, slope + 1).individual(),
        ),
        (lambda: Scaled(inner, slope).reshaped(sizes), expected.reshape(-1, N, *sizes)),
    ):
        check_reductions(make, wanted, name)
        check_reductions(lambda: make().plain, wanted, name)  # noqa: B023
    if name != "dense":
        permuted = Scaled(inner, slope).permuted(axes)
        check_reductions(lambda: permuted, expected.transpose(2, 3), name)


def test_merged_groups():
    """Convolutions that share a weight but group their channels otherwise."""
    narrow = nn.Conv1d(2, 4, 2, groups=1, bias=False).to(F64)
    wide = nn.Conv1d(4, 4, 2, groups=2, bias=False).to(F64)
    wide.weight = narrow.weight
    mats = torch.randn(1, N, 4, 2, dtype=F64), torch.randn(1, N, 4, 3, dtype=F64)
    inputs = torch.randn(N, 2, 3, dtype=F64), torch.randn(N, 4, 4, dtype=F64)
    layers = (narrow, wide)
    expected = sum(
        by_autograd("weight", layer, [x], [mat])
        for layer, x, mat in zip(layers, inputs, mats)
    )

    def parts() -> List[PerSample]:
        return [
            find_row(layer).derivatives.product("weight", layer, [x], mat)
            for layer, x, mat in zip(layers, inputs, mats)
        ]

    check_reductions(lambda: merged(parts()), expected, "groups")


def forms(batch_size: int) -> List[PerSample]:
    """Make an example of each form.

    Args:
        batch_size: N.

    Returns:
        The examples, for a parameter of shape ``[2, 2]`` (the bias: ``[2]``).
    """
    shape = torch.Size([2, 2])
    a, b = torch.randn(batch_size, 1, 3, 2), torch.randn(1, batch_size, 1, 3, 2)
    ids = torch.zeros(batch_size, 3, dtype=torch.long)
    return [
        Dense(torch.randn(1, batch_size, 2, 2), shape),
        Summed(b[:, :, 0], torch.Size([2])),
        Outer(lambda: a, b, shape),
        Rows(ids, b[:, :, 0], shape),
    ]


@pytest.mark.parametrize("index", range(4))
def test_merge_needs_the_same_samples(index: int):
    """Calls with different batch sizes have no individual gradients to add."""
    with pytest.raises(ValueError, match="Axis 0 must be the batch in every call"):
        merged([forms(3)[index], forms(2)[index]])


@pytest.mark.parametrize("index", range(4))
def test_no_samples(index: int):
    """The variance of nothing is NaN, the sum that it computes on its way is zero."""
    product = forms(0)[index]
    product.keeps_total = True
    variance, total = product.variance(), product.total()
    assert variance.shape == total.shape == product.shape
    assert variance.isnan().all() and not total.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_types(sizes: Sizes, dtype: torch.dtype):
    """Reductions are as right as their type allows.

    Norms are sums of many terms and come in float32 for the half-precision types.
    Factors are rounded to the type before the reference is computed.
    """
    a, b, shape = make_outer(sizes, 1, dtype)
    a, b = 300 * a, b / 300  # their squares are out of float16's range, or rounded
    exact = torch.einsum("vngtp,ngtd->vngpd", b.double(), a.double())
    exact = exact.reshape(1, N, *shape)
    rtol = 20 * torch.finfo(dtype).eps
    for name, (reduction, formula) in REDUCTIONS.items():
        actual = reduction(Outer(lambda: a, b, shape))
        expected = formula(exact)
        assert actual.dtype in (dtype, torch.float32)
        error = (actual.double() - expected).abs().max()
        assert error <= rtol * expected.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [0, 1, 3], ids=["Dense", "Summed", "Rows"])
def test_types_of_other_forms(index: int, dtype: torch.dtype):
    """The same for the other forms, with numbers whose squares are out of range."""
    torch.manual_seed(0)
    make = {
        0: lambda x: Dense(x[:, :, 0], torch.Size([2])),
        1: lambda x: Summed(x, torch.Size([2])),
        3: lambda x: Rows(torch.tensor([[0, 1, 1]] * N), x, torch.Size([2, 2])),
    }[index]
    x = (300 * torch.randn(1, N, 3, 2)).to(dtype)
    exact = make(x.double()).individual()
    for name, (reduction, formula) in REDUCTIONS.items():
        expected = formula(exact)
        if dtype == torch.float16 and name in ("individual", "summed"):
            continue
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                actual = reduction(make(x))
            error = (actual.double() - expected).abs().max()
            assert error <= 20 * torch.finfo(dtype).eps * expected.abs().max(), name


@pytest.mark.parametrize("unfolded", [False, True])
def test_gram_of_large_inputs(unfolded: bool):
    """The mean of products fits into float16, their sum does not."""
    x = torch.full((8, 1, 1, 1), 200.0, dtype=torch.float16)
    mat = torch.zeros(1, 8, 1, 1, dtype=torch.float16)
    product = find_row(nn.Conv1d(1, 1, 1)).derivatives.product(
        "weight", nn.Conv1d(1, 1, 1), [x[..., 0]], mat
    )
    if unfolded:
        product.a
    assert product.input_gram(1 / 8).item() == 200.0**2


def test_sums_accumulate_in_float32():
    """Four thousand equal terms do not get stuck at 256, where bfloat16 would."""
    one = torch.ones(1, 1, 1, 4096, dtype=torch.bfloat16)
    column = torch.ones(1, 1, 1, 1, 1, dtype=torch.bfloat16)
    product = Outer(lambda: one, column, torch.Size([1, 4096]))
    assert product.sq_norms().item() == 4096
    dense = Dense(torch.ones(1, 4096, 1, dtype=torch.bfloat16), torch.Size([1]))
    assert dense.squares().item() == 4096


def test_sharing():
    """What parameters share is not mistaken for another's, nor handed out twice.

    Columns that do not lie in memory row by row are copied, and the next copy may take
    the place of the first one.
    """

    def make(num_columns: int) -> Dense:
        permuted = torch.randn(40, num_columns, N, 30, dtype=F64).permute(1, 2, 3, 0)
        return Dense(permuted, torch.Size([30, 40]))

    reduction = partial(output_factor, weight_sharing=None)
    for _ in range(10):
        one, other = make(2), make(2)
        alone = reduction(other)
        one.shared = other.shared = {}
        reduction(one)
        assert_agrees(reduction(other), alone, "other")

    weight = bias = Dense(make(1).products.contiguous(), torch.Size([30, 40]))
    weight.shared = {}
    first, second = reduction(weight), reduction(bias)
    assert_agrees(first, second, "bias")
    assert first.data_ptr() != second.data_ptr()

    x = torch.randn(3, dtype=torch.complex128)
    for y in (x, x.conj()):  # in the same memory
        assert_agrees(weight.share("sum", y, y.sum), y.sum(), "conjugate")


@pytest.mark.parametrize("size", [tuning.BLOCKED_ELEMENTS, 2**22 + 3])
@pytest.mark.parametrize("batch_size", [1, 2, 8, 20])
def test_sums_of_many_terms(batch_size: int, size: int):
    """Norms and dot products of large layers are right to all digits of their type."""
    dense = Dense(torch.rand(1, batch_size, size), torch.Size([size]))
    flat = dense.individual()[0].double()
    for name, expected in (("dots", flat @ flat.T), ("sq_norms", (flat**2).sum(1))):
        with torch.no_grad():
            actual = getattr(dense, name)().double()
        assert ((actual / expected - 1).abs() < 2e-6).all(), name


@pytest.mark.parametrize("form", range(4))
def test_differentiable(form: int):
    """Reductions can be differentiated: by finite differences, and twice."""
    torch.manual_seed(0)
    b = torch.randn(1, N, 1, 2, 2, dtype=F64, requires_grad=True)
    a = torch.randn(N, 1, 2, 3, dtype=F64, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 1], [2, 0]])
    make: Callable[[Tensor, Tensor], PerSample] = [
        lambda a, b: Outer(lambda: a, b, torch.Size([2, 3])),
        lambda a, b: Outer(lambda: a[:, :, :1], b[:, :, :, :1], torch.Size([2, 3])),
        lambda a, b: Summed(b[:, :, 0] * a[:, 0, :, :1], torch.Size([2])),
        lambda a, b: Rows(ids, b[:, :, 0] * a[:, 0, :, :1], torch.Size([3, 2])),
    ][form]
    for reduction, _ in REDUCTIONS.values():
        value = lambda a, b: reduction(make(a, b))  # noqa: B023, E731
        assert torch.autograd.gradcheck(value, (a, b))
        assert torch.autograd.gradgradcheck(value, (a, b))


class MovedOtherwise(nn.LSTM):
    """A layer that changes how it is moved, as in FSDP2's classes."""

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        return super()._apply(*args, **kwargs)


def test_what_moves_a_layer_is_no_other_rule():
    """A class that does not change what a layer computes has its rule."""
    assert find_row(MovedOtherwise(2, 3)) is find_row(nn.LSTM(2, 3)) is not None


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_transpose_that_is_no_order(axes: Tuple[int, int]):
    """A row that ends within one of the axes can't be described, which is noticed."""
    with pytest.raises(ValueError, match="ends within an axis"):
        permuted(Order((4, 9), axes), (6, 6), (1, 0))
