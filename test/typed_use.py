"""What the documentation shows, as a type checker sees it; run by ``test_types.py``.

Nothing here is executed. Fields like ``grad_batch`` are attributes that no class
declares: they are read with ``getattr``.
"""

from typing import Any, List, Tuple

import torch
from torch import Generator, Tensor, nn
from torch.fx import GraphModule
from typing_extensions import assert_type

import backpack as package
from backpack import (
    backpack,
    compile_step,
    convert_module_to_backpack,
    disable,
    extend,
    memory_cleanup,
    summary,
)
from backpack.distributed import reduce
from backpack.extensions import (
    GGNMP,
    HBP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    ClippedGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
    WeightedGrad,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.curvature import Curvature
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.extensions.secondorder.hbp import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import transposed_jacobian_vector_product
from backpack.hessianfree.rop import jacobian_vector_product
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.examples import load_one_batch_mnist
from backpack.utils.kroneckers import inv_kfacs, kfacs_to_mat


def extended() -> Tuple[nn.Sequential, nn.CrossEntropyLoss]:
    """``extend`` returns the type that it was given."""
    layer = extend(nn.Linear(784, 10))
    assert_type(layer, nn.Linear)
    assert_type(layer.weight, Tensor)
    model = extend(nn.Sequential(layer, nn.ReLU()), debug=False, use_converter=False)
    assert_type(model, nn.Sequential)
    first: nn.Module = model[0]
    assert_type(first(torch.rand(5, 784)), Any)
    converted = extend(model, use_converter=True)
    assert_type(converted, GraphModule)
    assert_type(extend(model, False, True), GraphModule)
    assert_type(convert_module_to_backpack(model, debug=False), GraphModule)
    loss_function = extend(nn.CrossEntropyLoss())
    assert_type(loss_function, nn.CrossEntropyLoss)
    return model, loss_function


def quantities() -> List[BackpropExtension]:
    """Every quantity, with every option."""
    generator = Generator()
    return [
        *(BatchGrad(), BatchGrad(None), BatchGrad([0, 2]), BatchGrad(slice(0, 2))),
        *(BatchGrad(subsampling=(0, 2)), BatchGrad(range(2))),
        BatchGrad(subsampling=torch.tensor([0, 2])),
        *(BatchDotGrad(subsampling=[0]), BatchL2Grad(), SumGradSquared(), Variance()),
        *(ClippedGrad(1.0), BatchJacobian([0])),
        WeightedGrad(lambda norms: norms.reciprocal(), replace_grad=True),
        *(DiagGGNExact(), BatchDiagGGNExact(), DiagHessian(), BatchDiagHessian()),
        DiagGGNMC(mc_samples=2, generator=generator, fisher_type="empirical"),
        BatchDiagGGNMC(generator=None, fisher_type="mc"),
        *(SqrtGGNExact(subsampling=[0]), SqrtGGNExact((0, 1))),
        SqrtGGNMC(2, [0], generator, "mc"),
        *(KFAC(), KFAC(mc_samples=1), KFAC(weight_sharing="expand")),
        *(KFLR(weight_sharing="reduce"), KFRA()),
        *(HMP(), GGNMP(), PCHMP(), PCHMP(modify="abs"), PCHMP(savefield="p")),
    ]


def mistakes() -> None:
    """The checker finds these, or else says that the comment is not needed."""
    BatchGrad(subsampling="02")  # type: ignore[arg-type]
    BatchGrad(subsampling=2)  # type: ignore[arg-type]
    KFAC(weight_sharing="both")  # type: ignore[arg-type]
    DiagGGNMC(fisher_type="exact")  # type: ignore[arg-type]
    PCHMP(modify="square")  # type: ignore[arg-type]
    extend(nn.ReLU)  # type: ignore[call-overload]
    backpack(BatchGrad)  # type: ignore[arg-type]


def passes(exts: List[BackpropExtension]) -> None:
    """Run passes, and read what they have saved."""
    model, loss_function = extended()
    X, y = load_one_batch_mnist(batch_size=64, flat=True)
    assert_type(X, Tensor)

    def hook(module: nn.Module) -> None:
        memory_cleanup(module)

    context = backpack(*exts, extension_hook=hook, debug=False, retain_graph=True)
    with context:
        loss_function(model(X), y).backward()
    with backpack(BatchGrad(), Variance(), check=True):
        loss_function(model(X), y).backward()
    with backpack(BatchJacobian(), gradient=False):
        model(X).sum().backward()
    step = compile_step(lambda X, y: loss_function(model(X), y), BatchL2Grad())
    step(X, y)
    with disable():
        assert_type(disable.should_store_io(), bool)
    for _, param in model.named_parameters():
        gradients: Tensor = getattr(param, "grad_batch")  # noqa: B009
        gradients.flatten(start_dim=1)
    reduce(model.parameters(), exts)
    assert_type(package.__version__, str)
    print(summary(model), summary(model).rows, context)


def products() -> None:
    """Tools around the passes."""
    model, loss_function = extended()
    X, y = load_one_batch_mnist()
    output = model(X)
    loss = loss_function(output, y)
    params = list(model.parameters())
    v = vector_to_parameter_list(torch.ones(3), params)
    hessian_vector_product(loss, params, v)
    ggn_vector_product(loss, output, model, v)
    jacobian_vector_product(output, params, v)
    transposed_jacobian_vector_product(output, params, output)
    assert_type(kfacs_to_mat(inv_kfacs([torch.eye(2)], shift=0.1)), Tensor)


class Scale(nn.Module):
    """A layer of one's own."""

    def __init__(self) -> None:
        """Make the parameter."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * self.weight


class ScaleBatchGrad(FirstOrderModuleExtension):
    """What is computed on it."""

    def __init__(self) -> None:
        """Name the parameter."""
        super().__init__(params=["weight"])

    def weight(
        self,
        ext: BackpropExtension,
        module: Scale,
        g_inp: Tuple[Tensor, ...],
        g_out: Tuple[Tensor, ...],
        bpQuantities: Any,  # noqa: N803
    ) -> Tensor:
        """Compute individual gradients."""
        return g_out[0]


class Own(FirstOrderBackpropExtension):
    """A quantity of one's own."""

    def __init__(self) -> None:
        """List layers."""
        rules = {Scale: ScaleBatchGrad()}
        super().__init__("own", rules, fail_mode="ERROR")


def extending() -> None:
    """Teach a quantity a layer."""
    batch_grad = BatchGrad()
    batch_grad.set_module_extension(Scale, ScaleBatchGrad(), overwrite=True)
    HBP(
        Curvature.GGN,
        LossHessianStrategy.EXACT,
        BackpropStrategy.SQRT,
        ExpectationApproximation.BOTEV_MARTENS,
    )
