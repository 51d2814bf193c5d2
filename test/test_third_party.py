"""Extensions as an outside library writes them, from promised building blocks only."""

import pickle
import warnings
from copy import deepcopy
from functools import partial
from math import prod
from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import pytest
import torch
from cases import F64
from oracle import assert_agrees, oracle
from torch import Tensor, nn
from torch.nn import Module, Parameter, Sequential

from backpack import (
    backpack,
    convert_module_to_backpack,
    extend,
    hook_run_extensions,
    hook_store_io,
)
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.conv1d import Conv1DDerivatives
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.linearization import PerInput
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions import (
    EKFAC,
    HMP,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDotGrad,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    ClippedGrad,
    DiagGGNExact,
    DiagHessian,
    SqrtGGNExact,
    Variance,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.curvmatprod.ggnmp.batchnorm1d import GGNMPBatchNorm1d
from backpack.extensions.curvmatprod.hmp import HMPBase
from backpack.extensions.curvmatprod.hmp.batchnorm1d import HMPBatchNorm1d
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.extensions.firstorder.batch_grad.batch_grad_base import BatchGradBase
from backpack.extensions.firstorder.batch_l2_grad.batch_l2_base import BatchL2Base
from backpack.extensions.firstorder.gradient.base import GradBaseModule
from backpack.extensions.firstorder.sum_grad_squared.sgs_base import SGSBase
from backpack.extensions.firstorder.variance.variance_base import VarianceBaseModule
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.diag_ggn.diag_ggn_base import DiagGGNBaseModule
from backpack.extensions.secondorder.diag_hessian.diag_h_base import DiagHBaseModule
from backpack.extensions.secondorder.hbp import (
    HBP,
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from backpack.extensions.secondorder.hbp.losses import HBPLoss, HBPMSELoss
from backpack.extensions.secondorder.sqrt_ggn import (
    activations,
    batchnorm_nd,
    convnd,
    convtransposend,
    custom_module,
    dropout,
    embedding,
    flatten,
    linear,
    losses,
    pad,
    padding,
    pooling,
    slicing,
)
from backpack.utils.subsampling import subsample

N = 4


class Stretch(Module):
    """A user's own layer: a weight for each feature."""

    def __init__(self, features: int):
        """Create the weight."""
        super().__init__()
        self.weight = Parameter(torch.rand(features))

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``[N, features]``, and bend it a little."""
        return self.weight * x + 0.1 * x**2


class Borrower(Module):
    """Multiplies with the weight of a layer in ``layers``, which has it registered."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``[N, features]``."""
        return x * self.layers[0].weight


class StretchBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of the layer."""

    def __init__(self):
        """Name the parameter."""
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Multiply gradients with inputs."""
        assert bpQuantities is None
        return g_out[0] * module.input0


def problem(*modules: Module, features: int = 3) -> Tuple[Module, Module, Any, Any]:
    """Build a classifier, its loss, and data."""
    torch.manual_seed(0)
    model = Sequential(*modules).to(F64)
    X = torch.randn(N, features, dtype=F64)
    return model, nn.CrossEntropyLoss(), (X,), (torch.randint(3, (N,)),)


def run(case: Tuple, *extensions: Any, factor: float = 1.0) -> Module:
    """Run a backward pass, and return the extended model."""
    model, loss, X, y = extend(case[0]), extend(case[1]), case[2], case[3]
    with backpack(*extensions):
        value = loss(model(*X), *y)
        (value if factor == 1 else factor * value).backward()
    return model


# First order


def test_batch_grad_on_an_own_layer():
    """``set_module_extension`` adds a layer to an existing quantity."""
    case = problem(nn.Linear(3, 3), Stretch(3), nn.Linear(3, 3))
    expected = oracle("batch_grad", *case)
    ext = BatchGrad()
    ext.set_module_extension(Stretch, StretchBatchGrad())
    model = run(case, ext)
    for name, param in model.named_parameters():
        assert_agrees(param.grad_batch, expected[name], name)
    with pytest.raises(ValueError, match="overwrite"):
        ext.set_module_extension(Stretch, StretchBatchGrad())


@pytest.mark.parametrize("module", [nn.LayerNorm(2), nn.GELU(), nn.GRU(2, 2)], ids=str)
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian, HMP])
def test_layers_unknown_to_1_7_are_no_duplicates(extension: type, module: Module):
    """A program may have brought its own rule for a layer that has one by now."""
    ext, rule = extension(), ModuleExtension()
    ext.set_module_extension(type(module), rule)
    assert ext.get_module_extension(module) is rule
    with pytest.raises(ValueError, match="overwrite"):
        ext.set_module_extension(type(module), rule)
    with pytest.raises(ValueError, match="overwrite"):
        ext.set_module_extension(nn.Linear, rule)


class Norms(FirstOrderBackpropExtension):
    """A complete first-order extension: largest entries of individual gradients."""

    def __init__(self, fail_mode: str = "WARNING"):
        """Register what it supports."""
        rules = {nn.Linear: LargestOfLinear(), Stretch: LargestOfStretch()}
        super().__init__("largest", rules, fail_mode=fail_mode)


class LargestOfLinear(FirstOrderModuleExtension):
    """The largest entries, on linear layers."""

    def __init__(self):
        """Name the parameters."""
        super().__init__(params=["bias", "weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Use that the largest product is the product of the largest ones."""
        return module.input0.abs().amax(1) * g_out[0].abs().amax(1)

    def bias(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Take the largest gradient."""
        return g_out[0].abs().amax(1)


class LargestOfStretch(FirstOrderModuleExtension):
    """The largest entries, on the own layer."""

    def __init__(self):
        """Name the parameter."""
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Multiply."""
        return (g_out[0] * module.input0).abs().amax(1)


def test_first_order_extension():
    """A complete extension, alone and next to a built-in one."""
    case = problem(nn.Linear(3, 3), nn.ReLU(), Stretch(3), nn.Linear(3, 3))
    expected = oracle("batch_grad", *case)
    model = run(case, Norms(), BatchGrad())
    for name, param in model.named_parameters():
        largest = expected[name].flatten(1).abs().amax(1)
        assert_agrees(param.largest, largest, name)
        assert_agrees(param.grad_batch, expected[name], name)


def test_fail_modes():
    """Layers that an extension does not know: with a warning, an error, or silently."""
    case = problem(nn.LayerNorm(3), nn.Linear(3, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(case, Norms())
    messages = [str(w.message) for w in caught]
    assert any("no module extension for LayerNorm" in message for message in messages)
    with pytest.raises(NotImplementedError, match="'largest'.*LayerNorm"):
        run(case, Norms(fail_mode="ERROR"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(case, Norms(fail_mode="SILENT"))
    messages = [str(w.message) for w in caught]
    assert not any("no module extension" in message for message in messages)


def variance_by_parts(derivatives: Any, params: List[str]) -> VarianceBaseModule:
    """Assemble the variance."""
    grad, squares = GradBaseModule(derivatives, params), SGSBase(derivatives, params)
    return VarianceBaseModule(params, grad, squares)


FIRST_ORDER: Dict[str, Callable] = {
    "batch_grad": BatchGradBase,
    "batch_l2": lambda derivatives, params: BatchL2Base(params, derivatives),
    "sum_grad_squared": SGSBase,
    "variance": variance_by_parts,
}


@pytest.mark.parametrize("quantity", FIRST_ORDER)
def test_first_order_building_blocks(quantity: str):
    """The base classes compute their quantity with any derivatives."""
    make = FIRST_ORDER[quantity]

    class Assembled(FirstOrderBackpropExtension):
        def __init__(self):
            rules = {
                nn.Linear: make(LinearDerivatives(), ["weight", "bias"]),
                Stretch: make(BaseParameterDerivatives(), ["weight"]),
            }
            super().__init__("assembled", rules)

    case = problem(nn.Linear(3, 3), Stretch(3), nn.Linear(3, 3))
    expected = oracle(quantity, *case)
    for name, param in run(case, Assembled()).named_parameters():
        assert_agrees(param.assembled, expected[name], name)


def by_call(module: Module, x: Tensor, g: Tensor, ext: Any) -> None:
    """Call the extension on an extended module."""
    extend(module)(x)
    ext(module, (None,), (g,))
    assert hasattr(module, "input0")


def by_functions(module: Module, x: Tensor, g: Tensor, ext: Any) -> None:
    """Do by hand what hooks do."""
    output, seen = module(x), []
    output = output if isinstance(output, tuple) else (output,)
    assert hook_store_io(module, (x,), output) is None
    assert module.input0.equal(x) and module.output.equal(output[0])
    with backpack(ext, extension_hook=seen.append):
        hook_run_extensions(module, (None,), (g,))
    assert seen == [module] and not hasattr(module, "input0")


def by_hooks(module: Module, x: Tensor, g: Tensor, ext: Any) -> None:
    """Register the functions as hooks, in place of extending the module."""
    module.register_forward_hook(hook_store_io)
    module.register_full_backward_hook(hook_run_extensions)
    output = module(x.requires_grad_() if x.is_floating_point() else x)
    with backpack(ext):
        (output[0] if isinstance(output, tuple) else output).backward(g)


BY_HAND: Dict[str, Callable] = {
    "BatchGrad": BatchGrad,
    "BatchGrad-some": partial(BatchGrad, subsampling=[2, 0]),
    "BatchL2Grad": BatchL2Grad,
    "Variance": Variance,
    "BatchDotGrad": BatchDotGrad,
    "own": Norms,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("way", [by_call, by_functions, by_hooks])
@pytest.mark.parametrize("ext", BY_HAND)
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 2),
        nn.Conv2d(3, 2, 1),
        nn.Embedding(4, 2),
        nn.LayerNorm(3),
        nn.BatchNorm1d(3).eval(),
        nn.LSTM(3, 2, batch_first=True),
        Stretch(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_first_order_by_hand(layer: Module, ext: str, way: Callable):
    """Extensions run outside of a backward pass, too, or on what is not extended."""
    if ext == "own" and not isinstance(layer, (nn.Linear, Stretch)):
        return
    shape = {nn.Conv2d: (3, 2, 2), nn.LSTM: (5, 3)}.get(type(layer), (3,))
    x = torch.randn(N, *shape, dtype=F64)
    if isinstance(layer, nn.Embedding):
        x = torch.randint(4, (N, 5))
    layer, expected = deepcopy(layer).to(F64), extend(deepcopy(layer).to(F64))
    output = expected(x)
    output = output[0] if isinstance(output, tuple) else output
    g = torch.randn_like(output)
    with backpack(BY_HAND[ext]()):
        output.backward(g)
    way(layer, x, g, BY_HAND[ext]())
    field = BY_HAND[ext]().savefield
    for param, other in zip(layer.parameters(), expected.parameters()):
        assert_agrees(getattr(param, field), getattr(other, field))


@pytest.mark.parametrize("ext", [ClippedGrad(1.0), DiagGGNExact(), DiagHessian()])
def test_what_needs_more_than_a_module_is_not_run_by_hand(ext: Any):
    """Nor what has not been called; the error says what to do."""
    layer = nn.Linear(3, 2)
    g = layer(torch.ones(N, 3))
    for unknown in (layer, nn.ReLU()):
        with pytest.raises(RuntimeError, match="hook_store_io"):
            BatchGrad()(unknown, (None,), (g,))
    extend(layer)(torch.ones(N, 3))
    with pytest.raises(RuntimeError, match="hook_store_io"):
        BatchGrad()(layer, (None,), (g[:1],))
    with pytest.raises(RuntimeError, match="Run a backward pass"):
        ext(layer, (None,), (g,))


# Second order, with ``backpropagate``


class StretchDiagGGN(ModuleExtension):
    """The GGN's diagonal on the own layer."""

    def __init__(self, sum_batch: bool):
        """Name the parameter."""
        super().__init__(params=["weight"])
        self.axes = (0, 1) if sum_batch else 0

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Square the products of columns ``[V, N, *out]`` and inputs."""
        return (bpQuantities * module.input0).square().sum(self.axes)

    def backpropagate(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Multiply with the layer's Jacobian, which is diagonal."""
        return bpQuantities * (module.weight + 0.2 * module.input0)


class Around(Module):
    """A module that does nothing but call another one."""

    def __init__(self, size: int):
        """Create the layer."""
        super().__init__()
        self.layer = Stretch(size)

    @property
    def weight(self) -> Parameter:
        """The layer's parameter."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        return self.layer(x)


@pytest.mark.parametrize("own", [Stretch, Around])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize(
    "ext, reference, sum_batch",
    [(DiagGGNExact, "diag_ggn", True), (BatchDiagGGNExact, "diag_ggn_batch", False)],
)
@pytest.mark.usefixtures("cpu")
def test_diag_ggn_on_an_own_layer(
    ext: Callable, reference: str, sum_batch: bool, factor: float, own: Callable
):
    """A module extension with ``backpropagate`` takes part in the GGN family."""
    case = problem(
        nn.Linear(3, 3),
        own(3),
        nn.Sigmoid(),
        Parallel(own(3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())),
        nn.Linear(3, 3),
    )
    expected = oracle(reference, *case)
    extension = ext()
    extension.set_module_extension(own, StretchDiagGGN(sum_batch))
    if factor == 1.0:
        model = run(case, extension)
    else:
        with pytest.warns(UserWarning, match="modified"):
            model = run(case, extension, factor=factor)
    for name, param in model.named_parameters():
        value = getattr(param, extension.savefield)
        assert_agrees(value, factor * expected[name], name)


def test_diag_ggn_without_backpropagate():
    """Without ``backpropagate``, autograd pulls the columns back."""

    class Only(StretchDiagGGN):
        backpropagate = ModuleExtension.backpropagate

    case = problem(nn.Linear(3, 3), Stretch(3), nn.Linear(3, 3))
    expected = oracle("diag_ggn", *case)
    extension = DiagGGNExact()
    extension.set_module_extension(Stretch, Only(sum_batch=True))
    for name, param in run(case, extension).named_parameters():
        assert_agrees(param.diag_ggn_exact, expected[name], name)


class Columns(ModuleExtension):
    """Remember what is handed over, and the products with the own layer's Jacobian."""

    def __init__(self):
        """Name the parameter."""
        self.seen: List[torch.Size] = []
        super().__init__(params=["weight"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Multiply columns ``[V, n, *out]`` and inputs of the samples ``[n, *in]``."""
        self.seen.append(bpQuantities.shape)
        inputs = subsample(module.input0, subsampling=ext.get_subsampling())
        return bpQuantities * inputs


class WalkingColumns(Columns):
    """The same, from module to module."""

    def backpropagate(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Multiply with the layer's Jacobian, which is diagonal."""
        inputs = subsample(module.input0, subsampling=ext.get_subsampling())
        return bpQuantities * (module.weight + 0.2 * inputs)


@pytest.mark.parametrize("rule", [Columns, WalkingColumns])
@pytest.mark.parametrize("options", [{}, {"subsampling": [2, 0]}], ids=["all", "some"])
@pytest.mark.parametrize(
    "ext",
    [
        *(SqrtGGNExact, DiagGGNExact, BatchDiagGGNExact, KFLR),
        partial(EKFAC, fisher_type="exact"),
    ],
)
def test_columns_that_a_rule_gets(ext: Callable, options: Dict, rule: Callable):
    """All columns of the factor, of the samples that are considered."""
    if options and ext is not SqrtGGNExact:
        return
    case = problem(nn.Linear(3, 3), nn.Tanh(), Stretch(3), nn.Linear(3, 3))
    theirs, ours, rule = ext(**options), SqrtGGNExact(**options), rule()
    theirs.savefield = "theirs"
    theirs.set_module_extension(Stretch, rule)
    model = run(case, theirs, ours)
    assert rule.seen == [(3, 2 if options else len(case[2][0]), 3)]
    assert_agrees(model[2].weight.theirs, model[2].weight.sqrt_ggn_exact)
    if ext is SqrtGGNExact:
        for param in model.parameters():
            assert_agrees(param.theirs, param.sqrt_ggn_exact)


@pytest.mark.parametrize("ext", [SqrtGGNExact, DiagGGNExact, BatchDiagGGNExact])
def test_two_losses_with_a_rule(ext: Callable):
    """Columns that go from module to module are those of one loss, or of the other."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 3, dtype=F64), torch.zeros(N, 3, dtype=F64)
    trunk = Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(F64)
    head = nn.Linear(3, 3, dtype=F64)
    expected, walking = ext(), ext()
    walking.savefield = "walking"
    walking.set_module_extension(nn.Tanh, activations.SqrtGGNTanh(), overwrite=True)
    z = extend(trunk)(x)
    value = extend(nn.MSELoss())(z, y) + extend(nn.MSELoss())(extend(head)(z), y)
    with backpack(expected, walking):
        value.backward()
    for param in trunk.parameters():
        assert_agrees(param.walking, getattr(param, expected.savefield))
    assert walking.walks_modules


def test_a_rule_for_a_parameter_of_several_calls():
    """A rule works on one call; a parameter of two calls is refused."""
    layer, tied, borrower = Stretch(3), nn.PReLU(3), Borrower()
    tied.weight, borrower.layers = layer.weight, [layer]
    for modules in ((layer, layer), (layer, tied), (tied, layer), (borrower, layer)):
        case = problem(nn.Linear(3, 3), modules[0], nn.Tanh(), modules[1])
        for extension, rule in (
            (DiagGGNExact(), Columns()),
            (BatchGrad(), StretchBatchGrad()),
        ):
            extension.set_module_extension(Stretch, rule)
            with pytest.raises(NotImplementedError, match="takes part in several"):
                run(case, extension)


class StretchHMP(HMPBase):
    """Hessian products on the own layer, from the promised base class."""

    def __init__(self):
        """Use the generic derivatives."""
        super().__init__(BaseParameterDerivatives(), params=["weight"])


def test_hmp_with_registered_rules():
    """Module extensions of products are registered like any other."""
    case = problem(nn.Linear(3, 3), Stretch(3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    case[0].eval()
    plain, custom = HMP("plain"), HMP("custom")
    custom.set_module_extension(Stretch, StretchHMP())
    custom.set_module_extension(nn.BatchNorm1d, HMPBatchNorm1d(), overwrite=True)
    for name, param in run(case, plain, custom).named_parameters():
        v = torch.randn(2, *param.shape, dtype=F64)
        assert_agrees(param.custom(v), param.plain(v), name)
    assert callable(GGNMPBatchNorm1d().weight)


def test_plain_functions_as_products():
    """A rule of one's own may return a plain function, as long as nothing branches."""

    class ByHand(HMPBase):
        def __init__(self):
            super().__init__(BaseParameterDerivatives(), params=["weight"])

        def backpropagate(self, ext, module, g_inp, g_out, backproped):
            jacobian = (module.weight + 0.2 * module.input0).detach()
            residual = 0.2 * g_out[0].detach()
            return lambda mat: jacobian * backproped(jacobian * mat) + residual * mat

    case = problem(nn.Linear(3, 3), Stretch(3), nn.Linear(3, 3))
    plain, custom = HMP("plain"), HMP("custom")
    custom.set_module_extension(Stretch, ByHand())
    for name, param in run(case, plain, custom).named_parameters():
        v = torch.randn(2, *param.shape, dtype=F64)
        assert_agrees(param.custom(v), param.plain(v), name)
    case = problem(nn.Linear(3, 3), Parallel(Stretch(3), nn.Tanh()))
    with pytest.raises(NotImplementedError, match="plain function"):
        run(case, custom)


# Second order, assembled


class Gram(SecondOrderBackpropExtension):
    """An outside library's second-order extension: the GGN's square root."""

    def __init__(
        self,
        strategy: str = LossHessianStrategy.EXACT,
        mc_samples: int = 1,
        subsampling: Optional[List[int]] = None,
    ):
        """Register rules for many layers."""
        self.strategy, self.mc_samples = strategy, mc_samples
        rules: Dict[Type[Module], ModuleExtension] = {
            nn.MSELoss: losses.SqrtGGNMSELoss(),
            nn.CrossEntropyLoss: losses.SqrtGGNCrossEntropyLoss(),
            nn.BCEWithLogitsLoss: losses.SqrtGGNBCEWithLogithsLoss(),
            nn.Linear: LinearRule(),
            nn.Conv1d: convnd.SqrtGGNConv1d(),
            nn.Conv2d: ConvRule(),
            nn.Conv3d: convnd.SqrtGGNConv3d(),
            nn.ConvTranspose1d: convtransposend.SqrtGGNConvTranspose1d(),
            nn.ConvTranspose2d: convtransposend.SqrtGGNConvTranspose2d(),
            nn.ConvTranspose3d: convtransposend.SqrtGGNConvTranspose3d(),
            nn.BatchNorm2d: batchnorm_nd.SqrtGGNBatchNormNd(),
            nn.Embedding: embedding.SqrtGGNEmbedding(),
            nn.Flatten: flatten.SqrtGGNFlatten(),
            nn.Dropout: dropout.SqrtGGNDropout(),
            nn.ZeroPad2d: padding.SqrtGGNZeroPad2d(),
            Pad: pad.SqrtGGNPad(),
            Slicing: slicing.SqrtGGNSlicing(),
            ScaleModule: custom_module.SqrtGGNScaleModule(),
            SumModule: custom_module.SqrtGGNSumModule(),
        }
        for name in (
            "ReLU",
            "Sigmoid",
            "Tanh",
            "LeakyReLU",
            "LogSigmoid",
            "ELU",
            "SELU",
        ):
            rules[getattr(nn, name)] = getattr(activations, f"SqrtGGN{name}")()
        for name in ("MaxPool", "AvgPool"):
            for d in (1, 2, 3):
                rule = getattr(pooling, f"SqrtGGN{name}{d}d")()
                rules[getattr(nn, f"{name}{d}d")] = rule
        super().__init__("gram", rules, subsampling=subsampling)

    def get_loss_hessian_strategy(self) -> str:
        """Answer the losses."""
        return self.strategy

    def get_num_mc_samples(self) -> int:
        """Answer the losses."""
        return self.mc_samples

    def accumulate_backpropagated_quantities(
        self, existing: Tensor, other: Tensor
    ) -> Tensor:
        """Add columns of branches."""
        return existing + other


class LinearRule(MatToJacMat):
    """A rule that is written out, on top of :class:`MatToJacMat`."""

    def __init__(self):
        """Name the parameters."""
        super().__init__(LinearDerivatives(), params=["weight", "bias"])

    def weight(self, ext, module, g_inp, g_out, backproped):
        """Ask the derivatives."""
        return self.products("weight", ext, module, g_inp, g_out, backproped)

    def bias(self, ext, module, g_inp, g_out, backproped):
        """Ask the derivatives."""
        return self.products("bias", ext, module, g_inp, g_out, backproped)

    def products(self, name, ext, module, g_inp, g_out, backproped):
        """Multiply columns with the parameter's Jacobian."""
        return self.derivatives.param_mjp(
            name,
            module,
            g_inp,
            g_out,
            backproped,
            sum_batch=False,
            subsampling=ext.get_subsampling(),
        )


class ConvRule(LinearRule):
    """The same for another layer."""

    def __init__(self):
        """Use other derivatives."""
        MatToJacMat.__init__(self, Conv2DDerivatives(), params=["weight", "bias"])


class Container(Module):
    """A container with a forward pass of its own, that only calls modules."""

    def __init__(self, *modules: Module):
        """Store the modules."""
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """Call one module after the other."""
        for module in self.inner:
            x = module(x)
        return x


def images(*modules: Module, X: Optional[Tensor] = None) -> Tuple:
    """Build a classifier on images."""
    torch.manual_seed(0)
    model = Sequential(*modules, nn.Flatten()).to(F64).eval()
    X = torch.randn(N, 2, 4, 4, dtype=F64) if X is None else X
    features = model(X)[0].numel()
    model = Sequential(*model, nn.Linear(features, 3).to(F64))
    return model, nn.CrossEntropyLoss(), (X,), (torch.randint(3, (N,)),)


def volume(d: int) -> Tensor:
    """Draw an input with d spatial axes."""
    return torch.randn(N, 2, *[3] * d, dtype=F64)


ASSEMBLED: Dict[str, Callable[[], Tuple]] = {
    "mlp": lambda: problem(
        nn.Linear(3, 3),
        nn.Sigmoid(),
        nn.Linear(3, 3),
        nn.LogSigmoid(),
        nn.ELU(),
        nn.SELU(),
        ScaleModule(0.3),
        nn.Linear(3, 3),
    ),
    "residual": lambda: problem(
        nn.Linear(3, 3),
        Parallel(Sequential(nn.Linear(3, 3), nn.Tanh()), ScaleModule(2.0)),
        nn.LeakyReLU(),
        nn.Linear(3, 3),
    ),
    "container": lambda: problem(
        Container(nn.Linear(3, 3), Container(nn.ReLU(), nn.Linear(3, 3)))
    ),
    "cnn": lambda: images(
        nn.Conv2d(2, 2, 2),
        nn.ReLU(),
        nn.ZeroPad2d(1),
        nn.BatchNorm2d(2),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.ConvTranspose2d(2, 2, 2),
        nn.AvgPool2d(2),
        Pad((0, 1)),
        Slicing((slice(None), slice(0, 1))),
    ),
    "1d": lambda: images(
        nn.Conv1d(2, 2, 2),
        nn.ConvTranspose1d(2, 2, 2),
        nn.MaxPool1d(2, 1),
        nn.AvgPool1d(2),
        X=volume(1),
    ),
    "3d": lambda: images(
        nn.Conv3d(2, 1, 2),
        nn.ConvTranspose3d(1, 1, 2),
        nn.MaxPool3d(2, 1),
        nn.AvgPool3d(2),
        X=volume(3),
    ),
    "embedding": lambda: images(
        nn.Embedding(4, 2), nn.Tanh(), X=torch.randint(4, (N, 2))
    ),
}


@pytest.mark.parametrize("name", ASSEMBLED)
@pytest.mark.parametrize("subsampling", [None, [2, 0]], ids=["all", "some"])
def test_assembled_extension(name: str, subsampling: Optional[List[int]]):
    """The assembled extension computes what the built-in one does."""
    case = ASSEMBLED[name]()
    theirs, ours = Gram(subsampling=subsampling), SqrtGGNExact(subsampling=subsampling)
    for param in run(case, theirs, ours).parameters():
        assert_agrees(param.gram, param.sqrt_ggn_exact)
    assert not theirs.saved_quantities._saved_quantities


def test_rule_for_linear_layers():
    """The rule that is written out and the one that exists are the same."""
    theirs = Gram()
    theirs.set_module_extension(nn.Linear, linear.SqrtGGNLinear(), overwrite=True)
    for param in run(ASSEMBLED["mlp"](), theirs, SqrtGGNExact()).parameters():
        assert_agrees(param.gram, param.sqrt_ggn_exact)


def test_assembled_extension_with_sampling():
    """The losses ask the extension for strategy and samples."""
    case = ASSEMBLED["mlp"]()
    model = run(case, Gram(LossHessianStrategy.SAMPLING, mc_samples=5))
    assert model[0].weight.gram.shape == (5, N, 3, 3)


def test_assembled_extension_refuses_what_it_does_not_know():
    """The layer and the field are named."""
    case = problem(nn.Linear(3, 3), nn.Softmax(1), nn.Linear(3, 3))
    with pytest.raises(NotImplementedError, match="Softmax") as error:
        run(case, Gram())
    assert "gram" in str(error.value)


class BranchesNotCombined(Gram):
    """Does not say how branches are combined."""

    accumulate_backpropagated_quantities = (
        SecondOrderBackpropExtension.accumulate_backpropagated_quantities
    )


def test_branches_need_a_rule():
    """Without a rule how to combine branches, they are refused."""
    with pytest.raises(NotImplementedError, match="accumulate"):
        run(ASSEMBLED["residual"](), BranchesNotCombined())


def test_dropout_in_training():
    """The building block for dropout uses the mask that was drawn."""
    case = problem(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    for param in run(case, Gram(), SqrtGGNExact()).parameters():
        assert_agrees(param.gram, param.sqrt_ggn_exact)


class Diagonal(Gram):
    """The GGN's diagonal, assembled."""

    def __init__(self):
        """Replace some rules."""
        super().__init__()
        rule = DiagGGNBaseModule(
            LinearDerivatives(), ["weight", "bias"], sum_batch=True
        )
        self.set_module_extension(nn.Linear, rule, overwrite=True)


def test_diagonal_building_block():
    """``DiagGGNBaseModule`` squares what ``SqrtGGNBaseModule`` multiplies."""
    for param in run(ASSEMBLED["mlp"](), Diagonal(), DiagGGNExact()).parameters():
        assert_agrees(param.gram, param.diag_ggn_exact)


class Handed(ModuleExtension):
    """Saves what arrives, and hands it on, or something else."""

    def __init__(self, passes: Callable = lambda quantity: quantity):
        """Store what is handed on; name the parameters."""
        self.passes = passes
        super().__init__(params=["weight", "bias"])

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Return what has arrived."""
        ext.seen.append(bpQuantities)
        return bpQuantities

    bias = weight

    def backpropagate(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Return what is handed on."""
        return self.passes(bpQuantities)


class AnyQuantity:
    """A quantity of any type, which starts at the loss."""

    def __init__(self, start: Any, merge: Callable, **passes: Callable):
        """Store how quantities are merged, and what else than themselves is passed."""
        self.merge, self.seen = merge, []
        kinds = nn.CrossEntropyLoss, nn.Linear, nn.Tanh, SumModule
        rules = {kind: Handed(passes.get(kind.__name__, lambda q: q)) for kind in kinds}
        rules[nn.CrossEntropyLoss] = Handed(lambda _: start)
        super().__init__("arrived", rules)

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Merge."""
        return self.merge(existing, other)

    def expects_backpropagation_quantities(self) -> bool:
        """Tell that there is something to wait for."""
        return True


class Walk(AnyQuantity, SecondOrderBackpropExtension):
    """An extension of second order."""


class WalkOfAnyOrder(AnyQuantity, BackpropExtension):
    """An extension from the base class of all of them."""


class WalkOfFirstOrder(AnyQuantity, FirstOrderBackpropExtension):
    """An extension of first order that waits for a quantity all the same."""


def twice(inputs: int) -> Module:
    """Sum what two linear layers return; or data, and what one of them returns."""

    class Twice(Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.sum, self.last = SumModule(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            second = x if inputs == 1 else self.second(x)
            return self.last(self.sum(second, self.first(x)))

    return Twice()


_START = torch.ones(2, dtype=F64)
_ANY_TYPE: Dict[str, Any] = {
    "list": [_START, 2 * _START],
    "list-of-one": [_START],
    "list-of-none": [None],
    "empty-list": [],
    "tuple": (_START, 2 * _START),
    "nested": [[_START, None], (2 * _START,)],
    "dictionary": {"matrices": [_START], "signs": [1]},
    "tensor": _START,
    "function": torch.sin,
}


@pytest.mark.parametrize("inputs", [0, 1, 2])
@pytest.mark.parametrize("name", _ANY_TYPE)
def test_quantities_of_any_type(name: str, inputs: int):
    """What a rule returns goes to each of the module's inputs, as it is."""
    start = _ANY_TYPE[name]
    first = twice(inputs) if inputs else nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    case = problem(nn.Linear(3, 3), first, nn.Linear(3, 3))
    if inputs == 1:
        case = problem(first, nn.Linear(3, 3))
        case[0][0].second.requires_grad_(False)
    ext = Walk(start, lambda existing, other: existing)
    run(case, ext)
    assert len(ext.seen) == {0: 6, 1: 6, 2: 10}[inputs]
    assert all(one is start for one in ext.seen)


@pytest.mark.parametrize("base", [Walk, WalkOfAnyOrder, WalkOfFirstOrder])
def test_whoever_expects_a_quantity_gets_it(base: Callable):
    """It walks from module to module, whichever base class an extension has."""
    parts = nn.Linear(3, 3), Parallel(nn.Tanh(), nn.Linear(3, 3)), nn.Linear(3, 3)
    case = problem(Container(*parts))
    ext = base(torch.ones(1, dtype=F64), torch.add)
    model = run(case, ext, BatchGrad(), DiagGGNExact())
    paths = [int(p.arrived) for p in model.parameters()]
    assert paths == [2, 2, 1, 1, 1, 1] and hasattr(parts[0].weight, "diag_ggn_exact")
    assert not ext.saved_quantities._saved_quantities


_NO_RULE, _NOTHING = "it has no module extension", "its module extension returned none"


@pytest.mark.parametrize("base", [Walk, WalkOfAnyOrder])
@pytest.mark.parametrize(
    "model, fail_mode, passes, names",
    [
        (nn.ReLU(), "SILENT", {}, ["0", "ReLU", _NO_RULE]),
        (nn.ReLU(), "WARNING", {}, ["0", "ReLU", _NO_RULE]),
        (nn.ReLU(inplace=True), "SILENT", {}, ["0", "ReLU", _NO_RULE]),
        (Sequential(nn.ReLU(), nn.ELU()), "SILENT", {}, ["0", "ReLU", _NO_RULE]),
        (Sequential(nn.Tanh(), nn.ELU()), "SILENT", {}, ["1.0", "ELU", _NO_RULE]),
        (nn.Tanh(), "ERROR", {"Tanh": lambda q: None}, ["0", "Tanh", _NOTHING]),
        (
            twice(2),
            "ERROR",
            {"SumModule": lambda q: [q, None]},
            ["1.first", "SumModule", _NOTHING],
        ),
    ],
    ids=["silent", "warning", "in-place", "two", "above", "none", "one-of-two"],
)
def test_nothing_was_passed_on(
    model: Module, fail_mode: str, passes: Dict, names: List[str], base: Callable
):
    """The module that waits for a quantity is named, and the one that has none."""
    name, consumer, reason = names
    case = problem(nn.Linear(3, 3), model)
    ext = base(_START, torch.add, **passes)
    ext._fail_mode = fail_mode
    with pytest.raises(NotImplementedError) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(case, ext)
    assert isinstance(error.value, AssertionError)  # as in 1.7
    waiting, _, passing = str(error.value).partition(", because ")
    assert f"('{name}' of Sequential)" in waiting and passing.startswith(consumer)
    assert reason in passing and f"set_module_extension({consumer}, " in passing
    assert not ext.saved_quantities._saved_quantities


class ListOfColumns(Gram):
    """The factor and its double, side by side."""

    def __init__(self):
        """Replace the rules of the loss and of linear layers."""
        super().__init__()

        class Start(losses.SqrtGGNCrossEntropyLoss):
            def backpropagate(self, *args: Any) -> List[Tensor]:
                columns = super().backpropagate(*args)
                return [columns, 2 * columns]

        class Products(LinearRule):
            def products(self, *args: Any) -> Tensor:
                *args, backproped = args
                return torch.cat(
                    [super(Products, self).products(*args, x) for x in backproped]
                )

        self.set_module_extension(nn.CrossEntropyLoss, Start(), overwrite=True)
        self.set_module_extension(nn.Linear, Products(), overwrite=True)

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Add one by one."""
        return [a + b for a, b in zip(existing, other)]


@pytest.mark.parametrize("name", ["mlp", "residual", "container"])
def test_lists_of_columns(name: str):
    """Rules of the building blocks multiply each entry of a list."""
    for param in run(ASSEMBLED[name](), ListOfColumns(), SqrtGGNExact()).parameters():
        columns = param.sqrt_ggn_exact
        assert_agrees(param.gram, torch.cat([columns, 2 * columns]))


@pytest.mark.parametrize(
    "start, passes",
    [
        (_START, lambda q: [2 * q, 3 * q]),
        (_START, lambda q: (2 * q, 3 * q)),
        (_START, lambda q: PerInput([2 * q, 3 * q])),
        ([_START, 1], lambda q: PerInput([[2 * q[0]], [3 * q[0]]])),
    ],
    ids=["list", "tuple", "per-input", "per-input-of-lists"],
)
def test_another_quantity_for_each_input(start: Any, passes: Callable):
    """A rule for a module with several inputs may tell them apart."""
    case = problem(twice(2), nn.Linear(3, 3))
    model = run(case, Walk(start, None, SumModule=passes))[0]
    for layer, factor in ((model.second, 2), (model.first, 3)):
        arrived = layer.weight.arrived
        assert_agrees(arrived[0] if type(start) is list else arrived, factor * _START)


class Recursion(SecondOrderBackpropExtension):
    """Kronecker factors by the base classes of Hessian backpropagation."""

    weight_sharing = None

    def __init__(self, loss_hessian_strategy: str, backprop_strategy: str):
        """Register rules."""
        self.strategies = loss_hessian_strategy, backprop_strategy
        rules = {
            nn.MSELoss: HBPMSELoss(),
            nn.Linear: HBPBaseModule(LinearDerivatives(), ["weight", "bias"]),
            nn.Sigmoid: HBPBaseModule(_SigmoidByHand()),
        }
        super().__init__("factors", rules)

    def get_loss_hessian_strategy(self) -> str:
        """Answer the loss."""
        return self.strategies[0]

    def get_backprop_strategy(self) -> str:
        """Answer the rules."""
        return self.strategies[1]

    def get_curv_type(self) -> str:
        """Answer the rules."""
        return "ggn"

    def get_ea_strategy(self) -> str:
        """Answer the rules."""
        return ExpectationApproximation.BOTEV_MARTENS


class _SigmoidByHand(ElementwiseDerivatives):
    """First and second derivative, with the signatures outside classes use."""

    def df(self, module, g_inp, g_out, subsampling=None):
        """Differentiate once."""
        return module.output * (1 - module.output)

    def d2f(self, module, g_inp, g_out):
        """Differentiate twice."""
        return self.df(module, g_inp, g_out) * (1 - 2 * module.output)


@pytest.mark.parametrize(
    "field, strategies",
    [
        ("kfra", (LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE)),
        ("kflr", (LossHessianStrategy.EXACT, BackpropStrategy.SQRT)),
    ],
)
def test_hbp_building_blocks(field: str, strategies: Tuple[str, str]):
    """The base classes give the factors of the built-in extensions."""
    torch.manual_seed(0)
    model = Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)).to(F64)
    X, y = torch.randn(N, 3, dtype=F64), torch.randn(N, 2, dtype=F64)
    ours = {"kfra": KFRA, "kflr": KFLR}[field]()
    theirs = Recursion(*strategies)
    for param in run((model, nn.MSELoss(), (X,), (y,)), ours, theirs).parameters():
        assert_agrees(param.factors, getattr(param, field))
    assert issubclass(HBPMSELoss, HBPLoss)


@pytest.mark.parametrize("curv_type", ["hessian", "pch-clip", "pch-abs"])
def test_columns_without_residuals(curv_type: str):
    """Where no layer has second derivatives, all curvatures agree."""
    case = problem(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    ext = HBP(curv_type, "exact", "sqrt", "E[J^T E(H) J]", "factors")
    for param in run(case, ext, KFLR()).parameters():
        assert_agrees(param.factors, param.kflr)


OWN_PRODUCTS = {
    "Linear": (nn.Linear(3, 4), LinearDerivatives, (3,)),
    "Conv1d": (nn.Conv1d(2, 3, 2), Conv1DDerivatives, (2, 3)),
    "BatchNorm1d": (nn.BatchNorm1d(3).eval(), BatchNormNdDerivatives, (3,)),
}


@pytest.mark.parametrize("name", OWN_PRODUCTS)
def test_own_products_of_parameters(name: str):
    """A class for a built-in layer may have its own products, by the hooks of 1.7."""
    layer, built_in, shape = OWN_PRODUCTS[name]

    class Doubled(built_in):
        def _weight_jac_t_mat_prod(
            self, module, g_inp, g_out, mat, sum_batch=True, subsampling=None
        ):
            options = {"sum_batch": sum_batch, "subsampling": subsampling}
            args = module, g_inp, g_out, mat
            return 2 * super()._weight_jac_t_mat_prod(*args, **options)

        def _bias_jac_t_mat_prod(self, *args, **options):
            return 2 * super()._bias_jac_t_mat_prod(*args, **options)

        def _weight_jac_mat_prod(self, module, g_inp, g_out, mat):
            return 2 * super()._weight_jac_mat_prod(module, g_inp, g_out, mat)

        def _bias_jac_mat_prod(self, *args):
            return 2 * super()._bias_jac_mat_prod(*args)

    plain, doubled = built_in(), Doubled()
    layer = extend(layer.to(F64))
    out = layer(torch.randn(N, *shape, dtype=F64))
    call = layer, (None,), (out,)
    for key, param in layer.named_parameters():
        mat = torch.randn(2, *out[:2].shape, dtype=F64)
        for sum_batch in (True, False):
            options = {"sum_batch": sum_batch, "subsampling": [1, 0]}
            products = [
                d.param_mjp(key, *call, mat, **options) for d in (plain, doubled)
            ]
            assert_agrees(products[1], 2 * products[0])
        columns = torch.randn(2, *param.shape, dtype=F64)
        for method in ("param_jac_mat_prod", f"{key}_jac_mat_prod"):
            named = (key,) if "param" in method else ()
            products = [
                getattr(d, method)(*named, *call, columns) for d in (plain, doubled)
            ]
            assert_agrees(products[1], 2 * products[0])

    model = Sequential(layer, nn.Flatten(), nn.Linear(out[0].numel(), 3)).to(F64)
    case = model, nn.CrossEntropyLoss(), (layer.input0,), (torch.randint(3, (N,)),)
    rules = {
        BatchGrad: lambda d, names: BatchGradBase(d, names),
        DiagGGNExact: lambda d, names: DiagGGNBaseModule(d, names),
        DiagHessian: lambda d, names: DiagHBaseModule(d, names),
        KFLR: lambda d, names: HBPBaseModule(d, names),
        KFRA: lambda d, names: HBPBaseModule(d, names),
    }
    for quantity, rule in rules.items():
        values = []
        for derivatives in (plain, doubled):
            ext = quantity()
            own = rule(derivatives, ["weight", "bias"])
            ext.set_module_extension(type(layer), own, overwrite=True)
            run(case, ext)
            value = getattr(layer.bias, ext.savefield)
            values.append(value[0] if isinstance(value, list) else value)
        factor = 2 if quantity is BatchGrad else 4
        assert_agrees(values[1], factor * values[0], quantity.__name__)


def test_buffers_are_left_alone():
    """A forward pass that derivatives repeat does not change the module's state."""

    class Tracking(Stretch):
        def __init__(self, features: int):
            super().__init__(features)
            self.register_buffer("mean", torch.zeros(features))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
            return super().forward(x)

    case = problem(nn.Linear(3, 3), Tracking(3))
    model, loss = extend(case[0]), extend(case[1])
    value, before = loss(model(*case[2]), *case[3]), model[1].mean.clone()
    ext = BatchGrad()
    ext.set_module_extension(
        Tracking, BatchGradBase(BaseParameterDerivatives(), ["weight"])
    )
    with backpack(ext, DiagHessian()):
        value.backward()
    assert_agrees(model[1].weight.grad_batch.sum(0), model[1].weight.grad)
    assert_agrees(model[1].mean, before)


def test_additional_axes_of_a_linear_layer():
    """They can be asked for without an instance, and counted."""
    layer = extend(nn.Linear(2, 3))
    for shape, axes in (((4, 2), ()), ((4, 5, 6, 2), (5, 6))):
        layer(torch.rand(shape))
        assert LinearDerivatives._get_additional_dims(layer) == torch.Size(axes)
        assert LinearDerivatives()._get_additional_dims(layer).numel() == prod(axes)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("ext", [SqrtGGNExact, DiagHessian, HMP, KFRA, KFLR])
def test_nothing_is_passed_on_to_data(ext: Callable, differentiable: bool):
    """``backpropagate`` is called if an input is part of the graph, as in 1.7."""
    seen = []

    class Rule(ModuleExtension):
        def backpropagate(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
            seen.append(module)
            rule = MatToJacMat(LinearDerivatives())
            if ext.savefield == "sqrt_ggn_exact":
                return rule.backpropagate(ext, module, g_inp, g_out, bpQuantities)
            return bpQuantities

    case = problem(nn.Linear(3, 3), nn.Linear(3, 3))
    case[2][0].requires_grad_(differentiable)
    extension = ext()
    extension.set_module_extension(nn.Linear, Rule(), overwrite=True)
    with pytest.warns(UserWarning, match="No result"):
        run(case, extension)
    assert seen == list(case[0])[::-1][: 1 + differentiable]


def test_rule_that_passes_nothing_on():
    """Without ``backpropagate``, layers before get nothing: a warning and an error."""
    case, extension = problem(nn.Linear(3, 3), nn.Linear(3, 3)), DiagHessian()
    extension.set_module_extension(nn.Linear, ModuleExtension(), overwrite=True)
    with pytest.warns(UserWarning, match="does not override `backpropagate`"):
        with pytest.raises(AssertionError, match="passes none on"):
            run(case, extension)


def test_subclass_that_is_called():
    """A subclass that overrides ``__call__`` is called for each module, as in 1.7."""
    seen = []

    class Watching(BatchGrad):
        def __call__(self, module, g_inp, g_out):
            seen.append(module)
            super().__call__(module, g_inp, g_out)

    case = problem(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model = run(case, Watching())
    assert seen == [case[1], *list(model)[::-1]]
    for name, value in oracle("batch_grad", *case).items():
        assert_agrees(model.get_parameter(name).grad_batch, value, name)


def test_diag_hessian_rules_with_dictionaries():
    """A rule may read, and return, matrices and signs by name, as in 1.7."""

    class LinearDiagonal(ModuleExtension):
        def __init__(self):
            super().__init__(params=["bias"])

        def bias(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
            pairs = zip(bpQuantities["signs"], bpQuantities["matrices"])
            return sum(sign * m.square().sum((0, 1)) for sign, m in pairs)

        def backpropagate(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
            matrices = [m @ module.weight for m in bpQuantities["matrices"]]
            return {"matrices": matrices, "signs": bpQuantities["signs"]}

    case = problem(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3), nn.Tanh())
    plain, custom = DiagHessian(), DiagHessian()
    custom.savefield = "custom"
    custom.set_module_extension(nn.Linear, LinearDiagonal(), overwrite=True)
    for layer in (case[0][0], case[0][2]):
        layer.weight.requires_grad_(False)
    model = run(case, plain, custom)
    for layer in (model[0], model[2]):
        assert_agrees(layer.bias.custom, layer.bias.diag_h)


def test_elementwise_derivatives_of_an_outside_layer():
    """A library's activation with own derivatives joins the Hessian's diagonal."""

    class OwnSigmoid(Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sigmoid()

    case = problem(nn.Linear(3, 3), OwnSigmoid(), nn.Linear(3, 3))
    generic, custom = DiagHessian(), DiagHessian()
    custom.savefield = "custom"
    custom.set_module_extension(OwnSigmoid, DiagHBaseModule(_SigmoidByHand()))
    for param in run(case, generic, custom).parameters():
        assert_agrees(param.custom, param.diag_h)


def test_squared_norms_by_subclass():
    """A subclass that defines its methods needs no derivatives."""

    class StretchNorms(BatchL2Base):
        def __init__(self):
            super().__init__(["weight"])

        def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
            return (g_out[0] * module.input0).square().sum(1)

    case = problem(nn.Linear(3, 3), Stretch(3), nn.Linear(3, 3))
    expected = oracle("batch_l2", *case)
    ext = BatchL2Grad()
    ext.set_module_extension(Stretch, StretchNorms())
    for name, param in run(case, ext).named_parameters():
        assert_agrees(param.batch_l2, expected[name], name)


class OneOfAnother(Module):
    """A layer that returns what it computes, and what that is computed from."""

    def __init__(self) -> None:
        """Create the parameter."""
        super().__init__()
        self.w = Parameter(torch.rand(3, 3, dtype=F64))

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Compute both."""
        h = x @ self.w
        return h.exp(), h


class AtOutputs(FirstOrderModuleExtension):
    """The gradients at all outputs."""

    def w(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bp: Any) -> Any:
        """Return them."""
        return g_out


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", [(0,), (1,), (0, 1)])
def test_rule_for_several_outputs(number: Tuple[int, ...], before: bool):
    """A rule sees the gradients at all outputs, or says why it does not."""

    def extension(cls: type) -> FirstOrderBackpropExtension:
        rules = {cls: AtOutputs(["w"])}
        return FirstOrderBackpropExtension("at", rules, fail_mode="SILENT")

    class Own(OneOfAnother):
        """A class for which there is no rule yet."""

    if before:
        extension(Own)
    model, x = extend(Own()), torch.rand(4, 3, dtype=F64)
    outputs = model(x)
    value = sum((i + 2) * outputs[i].sum() for i in number)
    expected = [i in number and torch.full((4, 3), i + 2.0, dtype=F64) for i in (0, 1)]
    refused = pytest.raises(NotImplementedError, match="there before the forward pass")
    if not before and len(number) > 1:
        with refused, backpack(extension(Own)):
            value.backward()
        return
    with backpack(extension(Own)):
        value.backward()
    for got, wanted in zip(model.w.at, expected):
        assert got is None if wanted is False else torch.equal(got, wanted)


@pytest.mark.parametrize("number", [(0,), (1,), (0, 1)])
def test_jacobian_of_one_of_several_outputs(number: Tuple[int, ...]):
    """It is that of the one that is used outside, or there are too many."""
    model, x = extend(OneOfAnother()), torch.rand(4, 3, dtype=F64)
    outputs = model(x)
    value = sum(outputs[i].square().sum() for i in number)
    if len(number) > 1:
        with pytest.raises(NotImplementedError, match="expects one"):
            with backpack(BatchJacobian()):
                value.backward()
        return
    with backpack(BatchJacobian()):
        value.backward()
    last = torch.func.jacrev(lambda w: torch.func.functional_call(model, {"w": w}, x))
    jacobian = last(model.w.detach())[number[0]]
    assert_agrees(model.w.jacobian, jacobian.transpose(0, 1))


class Sevens(FirstOrderModuleExtension):
    """What nothing but this rule saves."""

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bp: Any) -> Any:
        """Return a tensor that is no quantity."""
        return torch.full((N, *module.weight.shape), 7.0, dtype=F64)


class SevenColumns(ModuleExtension):
    """The same, of an extension that walks from module to module."""

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bp: Any) -> Any:
        """Return a tensor that is no quantity."""
        return torch.full_like(module.weight, 7.0)


class Opened(Stretch):
    """An own layer that another one inherits from."""


class StretchedLayer(Stretch):
    """An own layer that has one inside."""

    def __init__(self, features: int) -> None:
        """Create the layer."""
        super().__init__(features)
        self.layer = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Stretch ``[N, features]`` before it is mapped."""
        return self.layer(super().forward(x))


class OpenedLinear(nn.Linear):
    """A layer of PyTorch that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the weight, and bend the result."""
        return torch.tanh(x @ self.weight.T)


def _residual(part: Module) -> Module:
    """Build a model that must be converted, with a module that has a rule."""
    return Sequential(Parallel(nn.Linear(3, 3), part), nn.Tanh(), nn.Linear(3, 3))


EXTENSION_AND_RULE = {
    "first order": (BatchGrad, Sevens),
    "columns": (DiagGGNExact, SevenColumns),
    "walking": (DiagHessian, SevenColumns),
}
PARTS = {  # the module; the class that the rule is for
    "class": (lambda: Stretch(3), Stretch),
    "base": (lambda: Opened(3), Stretch),
    "inside": (lambda: Sequential(Sequential(nn.Tanh(), Stretch(3))), Stretch),
}


def _converted_pass(model: Module, extension: Any) -> List[Any]:
    """Run an extension on a converted model; return the values at `weight`."""
    loss, x = extend(nn.CrossEntropyLoss()), torch.rand(N, 3, dtype=F64)
    with backpack(extension):
        loss(model(x), torch.randint(3, (N,))).backward()
    field = extension.savefield
    with_rule = [m for m in model.modules() if isinstance(m, (Stretch, OpenedLinear))]
    return [getattr(m.weight, field) for m in with_rule]


@pytest.mark.parametrize("kind", EXTENSION_AND_RULE)
@pytest.mark.parametrize("part", [*PARTS, "model"])
def test_rule_in_a_converted_model(kind: str, part: str):
    """A module with a rule stays whole, so that the rule is used."""
    make, rule = EXTENSION_AND_RULE[kind]
    own, cls = PARTS.get(part, PARTS["class"])
    extension, torch_module = make(), own()
    extension.set_module_extension(cls, rule(params=["weight"]))
    model = torch_module if part == "model" else _residual(torch_module)
    converted = extend(model.to(F64), use_converter=True)
    (value,) = _converted_pass(converted, extension)
    assert (value == 7).all()


class Unruled(Module):
    """A layer for whose class there is no rule."""

    def __init__(self) -> None:
        """Create the weight."""
        super().__init__()
        self.weight = Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``[N, 3]``."""
        return self.weight * x


def test_rule_around_a_layer():
    """What a module with a rule hides inside is the business of that rule."""
    extension = DiagHessian()
    extension.set_module_extension(Stretch, SevenColumns(params=["weight"]))
    model = _residual(StretchedLayer(3)).to(F64)
    converted = extend(model, use_converter=True)
    text = "layer.weight, .*layer.bias: DiagHessian has a rule .*around .*SevenColumns"
    with pytest.warns(UserWarning, match=text):
        (value,) = _converted_pass(converted, extension)
    assert (value == 7).all()


LATE = {  # the module; the class that the rule is for; what was opened; what is done
    "late": (None, None, "Late", lambda model: model),
    "copy": (None, None, "Late", deepcopy),
    "saved": (None, None, "Late", lambda m: pickle.loads(pickle.dumps(m))),
    "twice": (None, None, "Late", partial(convert_module_to_backpack, debug=False)),
    "base of PyTorch": (
        OpenedLinear(3, 3, False),
        nn.Linear,
        "OpenedLinear",
        lambda m: m,
    ),
    "container": (Sequential(Unruled()), Sequential, "Sequential", lambda m: m),
}


@pytest.mark.parametrize("kind", EXTENSION_AND_RULE)
@pytest.mark.parametrize("name", LATE)
def test_rule_for_an_opened_module(name: str, kind: str):
    """A rule that comes too late, or is for a class that is opened, is no secret."""
    make, rule = EXTENSION_AND_RULE[kind]
    part, cls, opened, done = LATE[name]
    if cls is None:
        cls = type("Late", (Unruled,), {})
        part = cls()
    model = _residual(deepcopy(part)).to(F64)
    converted = extend(done(convert_module_to_backpack(model, debug=False)))
    extension = make()
    assert not _converted_pass(converted, extension)  # before there is a rule
    extension.set_module_extension(cls, rule(params=["weight"]), overwrite=True)
    text = f"rule for {cls.__name__}, .*class {opened}:.* for {opened} itself before"
    with pytest.raises(NotImplementedError, match=text):
        _converted_pass(converted, extension)
