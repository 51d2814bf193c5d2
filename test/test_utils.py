"""Tests of ``backpack.utils``: layers as matrix products, and small helpers."""

from math import nan
from pathlib import Path
from typing import Callable, Dict, List, Tuple

import pytest
import torch
from torch import Tensor, float64, rand, stack, testing, zeros
from torch.autograd import grad
from torch.nn import (
    BatchNorm2d,
    BCEWithLogitsLoss,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    CrossEntropyLoss,
    L1Loss,
    Linear,
    Module,
    MSELoss,
    NLLLoss,
    ReLU,
    Sequential,
    Softmax,
    Unfold,
)

from backpack.core.fast import matmul as matmul_module
from backpack.core.fast.matmul import (
    _has_wide_avx512,
    _onednn,
    _processor,
    bmm,
    has_fast_blas,
    has_fast_matmul,
    matmul,
)
from backpack.custom_module.branching import Parallel, SumModule, _Branch
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.utils import conv, conv_transpose, linear
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.errors import acts_along_samples, batch_norm_raise_error_if_train
from backpack.utils.hooks import no_op
from backpack.utils.module_classification import is_loss, is_nll, is_no_op
from backpack.utils.subsampling import subsample
from backpack.utils.unsqueeze import kfacmp_unsqueeze_if_missing_dim

N, V = 3, 2

# PyTorch says so when it convolves with an even kernel
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")

# layer class, its arguments, input shape without the batch axis
Case = Tuple[Callable[..., Module], Dict, Tuple[int, ...]]

CONV: Dict[str, Case] = {
    "1d": (Conv1d, dict(kernel_size=3), (4, 7)),
    "1d-all": (
        Conv1d,
        dict(kernel_size=2, stride=3, padding=4, dilation=2, groups=2),
        (4, 9),
    ),
    "1d-circular": (
        Conv1d,
        dict(kernel_size=3, padding=2, padding_mode="circular"),
        (4, 6),
    ),
    "1d-one-position": (Conv1d, dict(kernel_size=5, groups=2), (4, 5)),
    "2d": (Conv2d, dict(kernel_size=(2, 3)), (4, 5, 6)),
    "2d-1x1": (Conv2d, dict(kernel_size=1), (4, 3, 2)),
    "2d-all": (
        Conv2d,
        dict(
            kernel_size=(3, 2), stride=(2, 1), padding=(1, 3), dilation=(1, 2), groups=2
        ),
        (4, 6, 5),
    ),
    "2d-same": (Conv2d, dict(kernel_size=(2, 4), padding="same"), (4, 5, 6)),
    "2d-same-reflect": (
        Conv2d,
        dict(
            kernel_size=(4, 3), padding="same", padding_mode="reflect", dilation=(1, 2)
        ),
        (4, 6, 5),
    ),
    "2d-valid": (Conv2d, dict(kernel_size=2, padding="valid", stride=2), (4, 4, 5)),
    "2d-depthwise": (Conv2d, dict(kernel_size=3, padding=1, groups=4), (4, 4, 5)),
    "3d": (Conv3d, dict(kernel_size=2), (4, 3, 4, 3)),
    "3d-all": (
        Conv3d,
        dict(
            kernel_size=(2, 1, 3),
            stride=(1, 2, 2),
            padding=(1, 0, 2),
            dilation=(2, 1, 1),
            padding_mode="replicate",
            groups=2,
        ),
        (4, 3, 4, 5),
    ),
}
CONV_TRANSPOSE: Dict[str, Case] = {
    "1d": (ConvTranspose1d, dict(kernel_size=3), (4, 5)),
    "1d-large-padding": (ConvTranspose1d, dict(kernel_size=2, padding=3), (4, 9)),
    "1d-all": (
        ConvTranspose1d,
        dict(
            kernel_size=3, stride=3, padding=2, output_padding=2, dilation=2, groups=2
        ),
        (4, 5),
    ),
    "2d": (ConvTranspose2d, dict(kernel_size=(2, 3)), (4, 3, 4)),
    "2d-all": (
        ConvTranspose2d,
        dict(
            kernel_size=(3, 2),
            stride=(2, 3),
            padding=(1, 2),
            output_padding=(1, 0),
            dilation=(1, 2),
            groups=2,
        ),
        (4, 3, 4),
    ),
    "3d": (ConvTranspose3d, dict(kernel_size=2), (4, 2, 3, 2)),
    "3d-all": (
        ConvTranspose3d,
        dict(
            kernel_size=(2, 1, 3),
            stride=(1, 2, 2),
            padding=(1, 0, 2),
            output_padding=(0, 1, 1),
            groups=2,
        ),
        (4, 3, 2, 4),
    ),
}
LINEAR: Dict[str, Case] = {
    "2": (Linear, {}, (4,)),
    "3": (Linear, {}, (5, 4)),
    "4": (Linear, {}, (2, 3, 4)),
}
CONV_CASES = [
    pytest.param(case, utils, id=f"{name}-{id}")
    for name, utils, cases in (
        ("conv", conv, CONV),
        ("conv_transpose", conv_transpose, CONV_TRANSPOSE),
    )
    for id, case in cases.items()
]
LINEAR_CASES = [pytest.param(case, id=f"linear-{id}") for id, case in LINEAR.items()]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(case: Case) -> Tuple[Module, Tensor, Tensor]:
    """Build the layer of a case.

    Args:
        case: Layer class, its arguments, and the input shape without batch axis.

    Returns:
        Layer with 4 inputs and 8 outputs, its input, its output.
    """
    layer, kwargs, shape = case
    module = layer(4, 8, **kwargs).to(float64)
    input = rand(N, *shape, dtype=float64)
    return module, input, module(input)


def individual_gradients(parameter: Tensor, output: Tensor, S: Tensor) -> Tensor:
    """Pull columns back to a parameter, one sample and one column at a time.

    Args:
        parameter: Parameter ``[*p]``.
        output: Layer output ``[N, *]``.
        S: Columns ``[V, N, *]``.

    Returns:
        Individual gradients ``[V, N, *p]``.
    """
    rows = [
        [
            grad(out, parameter, s, retain_graph=True)[0]
            for out, s in zip(output, column)
        ]
        for column in S
    ]
    return stack([stack(row) for row in rows])


def weight_matrix(module: Module) -> Tensor:
    """Return a (transposed) convolution's weight as a matrix for each group.

    Args:
        module: Layer with G groups.

    Returns:
        Matrices ``[G, C_out / G, C_in / G * K]``.
    """
    groups = module.weight.unflatten(0, (module.groups, -1))
    if "Transpose" in type(module).__name__:
        groups = groups.transpose(1, 2)
    return groups.flatten(start_dim=2)


@pytest.mark.parametrize("case, utils", CONV_CASES)
def test_unfolded_input_gives_output(case: Case, utils) -> None:
    """The weight matrix times the unfolded input is the layer's output."""
    module, input, output = build(case)
    if utils is conv:
        unfolded = conv.unfold_by_conv(input, module)
        assert torch.equal(unfolded, conv.unfold_input(module, input))
    else:
        unfolded = conv_transpose.unfold_by_conv_transpose(input, module)

    product = weight_matrix(module) @ unfolded.unflatten(1, (module.groups, -1))
    result = product.flatten(1, 2) + module.bias.unsqueeze(-1)
    testing.assert_close(result, output.flatten(start_dim=2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case, utils", CONV_CASES)
def test_weight_gradient_factors(case: Case, utils) -> None:
    """The product of the factors is the weight's individual gradient."""
    module, input, output = build(case)
    S = rand(1, *output.shape, dtype=float64)
    x, s = utils.get_weight_gradient_factors(input, S[0], module)
    groups = (module.groups, -1)
    result = s.unflatten(1, groups) @ x.unflatten(1, groups).transpose(-2, -1)

    (truth,) = individual_gradients(module.weight, output, S)
    truth = truth.unflatten(1, groups)
    if utils is conv_transpose:
        truth = truth.transpose(2, 3)
    testing.assert_close(result, truth.flatten(start_dim=3), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sum_batch", [True, False], ids=["sum", "batch"])
@pytest.mark.parametrize(
    "case, utils",
    CONV_CASES + [pytest.param(*c.values, linear, id=c.id) for c in LINEAR_CASES],
)
def test_extract_diagonals(case: Case, utils, sum_batch: bool) -> None:
    """Diagonals are sums of squared individual gradients."""
    module, input, output = build(case)
    S = rand(V, *output.shape, dtype=float64)
    if utils is linear:
        module.input0 = input
        weight = linear.extract_weight_diagonal(module, S, sum_batch=sum_batch)
    else:
        x, _ = utils.get_weight_gradient_factors(input, S[0], module)
        weight = utils.extract_weight_diagonal(module, x, S, sum_batch=sum_batch)
    bias = utils.extract_bias_diagonal(module, S, sum_batch=sum_batch)

    for result, parameter in (weight, module.weight), (bias, module.bias):
        gradients = individual_gradients(parameter, output, S)
        truth = (gradients**2).sum((0, 1) if sum_batch else 0)
        testing.assert_close(result, truth, rtol=1e-10, atol=1e-12)


def test_extract_diagonal_mixed_precision() -> None:
    """Columns may have another type than the input, as under autocast."""
    module = Linear(4, 6)
    module.input0 = rand(N, 5, 4)
    S = rand(V, N, 5, 6)
    truth = linear.extract_weight_diagonal(module, S.bfloat16().float())
    result = linear.extract_weight_diagonal(module, S.bfloat16())
    testing.assert_close(result, truth)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_unfold_transposed_output_size(extra: int) -> None:
    """An output size requested from ``forward`` is respected."""
    module = ConvTranspose1d(4, 6, 2, stride=3, dtype=float64)
    input = rand(N, 4, 5, dtype=float64)
    output = module(input, output_size=(14 + extra,))
    S = rand(1, *output.shape, dtype=float64)
    x, s = conv_transpose.get_weight_gradient_factors(input, S[0], module)
    (truth,) = individual_gradients(module.weight, output, S)
    result = (s @ x.transpose(1, 2)).unflatten(-1, (4, -1)).transpose(1, 2)
    testing.assert_close(result, truth, rtol=1e-10, atol=1e-12)


def test_unfold_orders_features_as_torch() -> None:
    """Features are ordered channel first, then kernel position."""
    options = dict(kernel_size=(2, 3), stride=(2, 1), padding=(1, 2), dilation=(2, 1))
    input = rand(N, 4, 5, 6)
    result = conv.unfold_by_conv(input, Conv2d(4, 6, **options))
    assert torch.equal(result, Unfold(**options)(input))


@pytest.mark.parametrize(
    "case, unfold",
    [
        (CONV["1d-circular"], conv.unfold_by_conv),
        (CONV_TRANSPOSE["1d-all"], conv_transpose.unfold_by_conv_transpose),
    ],
    ids=["conv", "conv_transpose"],
)
def test_unfold_is_differentiable(case: Case, unfold: Callable) -> None:
    """Gradients flow through the unfolded input."""
    module, input, _ = build(case)
    input.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unfold(x, module), [input])


def test_unfold_refuses_missing_batch_axis() -> None:
    """An input without batch axis is refused."""
    with pytest.raises(ValueError, match="batch axis"):
        conv.unfold_by_conv(rand(4, 5, 6), Conv2d(4, 6, 2))
    with pytest.raises(ValueError, match="batch axis"):
        conv_transpose.unfold_by_conv_transpose(rand(4, 5), ConvTranspose1d(4, 6, 2))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_functions_and_modules_by_dimension(dims: int) -> None:
    """The tables hold PyTorch's functions and modules."""
    nn, functional = torch.nn, torch.nn.functional
    assert conv.get_conv_module(dims) is getattr(nn, f"Conv{dims}d")
    assert conv.get_conv_function(dims) is getattr(functional, f"conv{dims}d")
    module = conv_transpose.get_conv_transpose_module(dims)
    assert module is getattr(nn, f"ConvTranspose{dims}d")
    function = conv_transpose.get_conv_transpose_function(dims)
    assert function is getattr(functional, f"conv_transpose{dims}d")


def test_dimension_without_convolution() -> None:
    """There is no convolution of four spatial axes."""
    with pytest.raises(ValueError, match="got 4"):
        conv.get_conv_module(4)


@pytest.mark.parametrize("size", range(7, 13))
@pytest.mark.parametrize("options", [(2, 1, 3, 2), (3, 0, 2, 1), (1, 2, 3, 1)])
def test_grad_input_padding(size: int, options: Tuple[int, ...]) -> None:
    """A transposed convolution with this output padding maps back to the input size."""
    stride, padding, kernel_size, dilation = ((value,) for value in options)
    weight = rand(1, 1, *kernel_size)
    input = rand(1, 1, size)
    shared = dict(stride=stride, padding=padding, dilation=dilation)
    output = torch.nn.functional.conv1d(input, weight, **shared)
    for input_size in input.shape, (size,):
        extra = conv._grad_input_padding(
            output, input_size, stride, padding, kernel_size, dilation
        )
        back = torch.nn.functional.conv_transpose1d(
            output, weight, output_padding=extra, **shared
        )
        assert back.shape == input.shape


@pytest.mark.parametrize("input_size", [(6,), (9,), (1, 1, 1, 7)])
def test_grad_input_padding_refuses(input_size: Tuple[int, ...]) -> None:
    """Input sizes that do not give this output size are refused."""
    with pytest.raises(ValueError, match="Expected an "):
        conv._grad_input_padding(zeros(1, 1, 3), input_size, (2,), (0,), (3,))


NO_OP_MODULES = [
    Sequential(Linear(2, 2)),
    _Branch(Linear(2, 2), ReLU()),
    Parallel(Linear(2, 2), ReLU()),
    ReduceTuple(),
    torch.fx.symbolic_trace(Sequential(Linear(2, 2))),
]
NLL_LOSSES = [MSELoss(), CrossEntropyLoss(), BCEWithLogitsLoss()]
OTHER_LOSSES = [L1Loss(), NLLLoss()]
OPERATIONS = [Linear(2, 2), ReLU(), SumModule()]


def _row(module: Module, loss: bool, nll: bool, none: bool):
    return pytest.param(module, loss, nll, none, id=type(module).__name__)


@pytest.mark.parametrize(
    "module, loss, nll, none",
    [_row(module, False, False, True) for module in NO_OP_MODULES]
    + [_row(module, True, True, False) for module in NLL_LOSSES]
    + [_row(module, True, False, False) for module in OTHER_LOSSES]
    + [_row(module, False, False, False) for module in OPERATIONS],
)
def test_module_classification(
    module: Module, loss: bool, nll: bool, none: bool
) -> None:
    """Modules are recognized as losses, likelihoods, and containers."""
    assert (is_loss(module), is_nll(module), is_no_op(module)) == (loss, nll, none)


@pytest.mark.parametrize("indices", [[0], [2, 0], [1, 1], [-1], []], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_subsample(dim: int, indices: List[int]) -> None:
    """Entries are selected along the axis, in the given order."""
    tensor = rand(3, 4, 5)
    result = subsample(tensor, dim=dim, subsampling=indices)
    entries = [tensor.movedim(dim, 0)[i] for i in indices]
    assert result.shape[dim] == len(indices)
    for entry, truth in zip(result.movedim(dim, 0), entries):
        assert torch.equal(entry, truth)


def test_subsample_nothing() -> None:
    """Without indices, the same object comes back."""
    tensor = rand(3)
    assert subsample(tensor) is tensor


def test_vector_to_parameter_list() -> None:
    """The entries are views that follow each other in the vector."""
    parameters = [rand(2, 3), rand(4), rand(()), rand(1, 2, 2)]
    vec = rand(15)
    # an iterator can be read only once
    result = vector_to_parameter_list(vec, iter(parameters))
    assert [r.shape for r in result] == [p.shape for p in parameters]
    assert torch.equal(torch.cat([r.flatten() for r in result]), vec)
    vec.zero_()
    assert not any(r.any() for r in result)


@pytest.mark.parametrize(
    "vec, error",
    [([1.0, 2.0], TypeError), (zeros(3), ValueError), (zeros(2, 1), ValueError)],
)
def test_vector_to_parameter_list_refuses(vec, error: type) -> None:
    """What is no vector of the right length is refused."""
    with pytest.raises(error, match="Expected"):
        vector_to_parameter_list(vec, [zeros(2)])


def test_batch_norm_check() -> None:
    """A batch normalization in training mode is refused, or warned about."""
    module = BatchNorm2d(3)
    with pytest.raises(NotImplementedError, match="^BatchNorm2d.*training mode"):
        batch_norm_raise_error_if_train(module)
    with pytest.warns(UserWarning, match="BatchNorm2d.*training mode"):
        batch_norm_raise_error_if_train(module, raise_error=False)
    batch_norm_raise_error_if_train(module.eval())


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_softmax_along_an_axis_of_its_choice(axes: int):
    """Without an axis, PyTorch takes one that depends on how many there are."""
    x = torch.rand([3] * axes)
    with pytest.warns(UserWarning, match="Implicit dimension"):
        expected = torch.allclose(Softmax()(x).sum(0), torch.ones([3] * (axes - 1)))
    assert acts_along_samples(Softmax(), x) == expected


def test_no_op() -> None:
    """The default hook takes anything and returns nothing."""
    assert no_op(1, key=2) is None


def test_unsqueeze_missing_column_axis() -> None:
    """A single vector is a matrix of one column to the function."""
    seen = []

    @kfacmp_unsqueeze_if_missing_dim(mat_dim=2)
    def double(mat: Tensor) -> Tensor:
        seen.append(tuple(mat.shape))
        return 2 * mat

    mat, vec = rand(3, 4), rand(3)
    assert torch.equal(double(mat), 2 * mat)
    assert torch.equal(double(vec), 2 * vec)
    assert seen == [(3, 4), (3, 1)]


# Matrix products: a single one and a batch; below and above the size from which on
# another library multiplies, which is lowered; empty ones, and vectors
PRODUCTS = [(1, 3, 4, 5), (1, 256, 300, 129), (3, 2, 1, 4), (9, 130, 65, 128)]
PRODUCTS += [(0, 2, 3, 4), (1, 0, 200, 300), (2, 200, 0, 300), (1, 200, 300, 0)]
PRODUCTS += [(1, 4000, 300, 1), (2, 1, 300, 4000)]

# How the rows of factors lie in memory
LAYOUTS: Dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda mats: mats,
    "columns": lambda mats: mats.mT.contiguous().mT,
    "rows-apart": lambda mats: torch.cat([mats, mats], 2)[..., : mats.shape[2]],
    "columns-apart": lambda mats: torch.cat([mats, mats], 1)
    .mT.contiguous()
    .mT[:, : mats.shape[1]],
}


@pytest.mark.parametrize(  # where a graph is built, there is one library only
    "with_grad, has_fast_blas", [(False, False), (False, True), (True, False)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", PRODUCTS)
def test_matrix_products(
    sizes: Tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    with_grad: bool,
    has_fast_blas: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """Whichever library multiplies, and however factors lie in memory."""
    monkeypatch.setattr(matmul_module, "has_fast_blas", lambda: has_fast_blas)
    monkeypatch.setattr(matmul_module, "_has_wide_avx512", lambda: True)
    for name in ("MIN_MULTIPLICATIONS", "MIN_PER_PRODUCT"):
        monkeypatch.setattr(matmul_module.tuning, name, 2**20)
    g, a, r, b = sizes
    left, right = rand(g, a, r).to(dtype), rand(g, r, b).to(dtype)
    left, right = LAYOUTS[layout](left), LAYOUTS[layout](right)
    expected = torch.bmm(left.to(float64), right.to(float64)).to(dtype)
    with torch.set_grad_enabled(with_grad):
        products = bmm(left, right)
        testing.assert_close(products, expected)
        for i in range(g):
            testing.assert_close(matmul(left[i], right[i]), expected[i])
        if not with_grad:
            out = torch.full_like(expected, nan)
            assert bmm(left, right, out=out).data_ptr() == out.data_ptr()
            testing.assert_close(out, expected)


AMD = "processor : 0\nvendor_id : AuthenticAMD\ncpu family : {}\n"
# /proc/cpuinfo, platform.processor(), MKL, AVX-512; fast BLAS, what it leaves unused
PROCESSORS = {
    "Intel": (
        "vendor_id : GenuineIntel\ncpu family : 6\n",
        "",
        True,
        True,
        True,
        False,
    ),
    "AMD": (AMD.format(25), "", True, True, False, False),
    "AMD, wide registers": (AMD.format(26), "", True, True, False, True),
    "AMD, switched off": (AMD.format(26), "", True, False, False, False),
    "Intel, other BLAS": ("vendor_id : GenuineIntel\n", "", False, True, False, False),
    "ARM": ("CPU implementer : 0x41\n", "", False, False, False, False),
    "Intel, not Linux": (
        None,
        "Intel64 Family 6, GenuineIntel",
        True,
        True,
        True,
        False,
    ),
    "AMD, not Linux": (None, "AMD64 Family 26, AuthenticAMD", True, True, False, True),
}


@pytest.mark.parametrize("key", PROCESSORS)
def test_processors(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Intel's BLAS is as fast as can be on processors of Intel, and on older ones."""
    description, name, has_mkl, has_avx512, fast, leaves = PROCESSORS[key]
    path = tmp_path / "cpuinfo"
    if description is not None:
        path.write_text(description)
    processor = _processor.__wrapped__
    monkeypatch.setattr(matmul_module, "Path", lambda _: path)
    monkeypatch.setattr(matmul_module, "_processor", processor)
    monkeypatch.setattr(matmul_module.platform, "processor", lambda: name)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    capability = "AVX512" if has_avx512 else "AVX2"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert has_fast_blas.__wrapped__() is fast
    assert _has_wide_avx512.__wrapped__() is leaves


@pytest.mark.usefixtures("cpu")
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.skipif(_onednn() is None, reason="this PyTorch has one library only")
def test_fast_matrix_products():
    """The other library is asked only where it can be, and where a user allows it."""
    x = rand(2, 2)
    with torch.no_grad():
        assert has_fast_matmul(x)
        assert not has_fast_matmul(x.double())
        with torch.backends.mkldnn.flags(enabled=False):
            assert not has_fast_matmul(x)
    assert not has_fast_matmul(x)


@pytest.mark.skipif(_onednn() is None, reason="this PyTorch has one library only")
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fast_matrix_products_are_fast(layout: str, monkeypatch: pytest.MonkeyPatch):
    """The other library falls back to a loop for a second factor with gaps."""
    g, a, r, b = 9, 130, 65, 128
    left, right = rand(g, a, r), LAYOUTS[layout](rand(g, r, b))
    operator, dense = _onednn(), []

    def multiply(x: Tensor, weight: Tensor, *rest) -> Tensor:
        dense.append(weight.is_contiguous() or weight.T.is_contiguous())
        return operator(x, weight, *rest)

    monkeypatch.setattr(matmul_module, "_onednn", lambda: multiply)
    monkeypatch.setattr(matmul_module, "has_fast_blas", lambda: False)
    monkeypatch.setattr(matmul_module, "_has_wide_avx512", lambda: True)
    monkeypatch.setattr(matmul_module.tuning, "MIN_PER_PRODUCT", 2**20)
    with torch.no_grad():
        bmm(left, right)
    assert len(dense) == g and all(dense)
