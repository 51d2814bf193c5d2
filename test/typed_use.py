"""What the documentation shows, as type checkers see it: ``make mypy pyright``.

Nothing here is executed. Fields like ``grad_batch`` are attributes that no class
declares: they are read with ``getattr``.
"""

from typing import Any, Dict, List, Tuple

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
    extensions,
    memory_cleanup,
    summary,
)
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.per_sample.base import PerSample
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.slicing import Slicing
from backpack.distributed import reduce
from backpack.extensions import (
    EKFAC,
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
    BatchFactors,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    BatchProjectGrad,
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
    GradientReduction,
)
from backpack.extensions.firstorder.batch_factors import FactoredGradients
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.secondorder.hbp import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.extensions.secondorder.sqrt_ggn.activations import SqrtGGNReLU
from backpack.extensions.secondorder.sqrt_ggn.losses import SqrtGGNCrossEntropyLoss
from backpack.hessianfree.ggnvp import (
    ggn_vector_product,
    ggn_vector_product_from_plist,
)
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import transposed_jacobian_vector_product
from backpack.hessianfree.rop import jacobian_vector_product
from backpack.utils import kroneckers
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.examples import (
    autograd_diag_ggn_exact,
    get_mnist_dataloader,
    load_one_batch_mnist,
)
from backpack.utils.kroneckers import (
    ekfac_mat_prod,
    inv_kfac_mat_prod,
    inv_kfacs,
    kfacs_to_mat,
)


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
        *(ClippedGrad(1.0), ClippedGrad(1.0, scale="sample", replace_grad=True)),
        *(BatchJacobian([0]), BatchFactors(), BatchFactors(subsampling=[0])),
        *(BatchProjectGrad(2), BatchDotGrad(other={torch.ones(3): torch.ones(2, 3)})),
        *(EKFAC(), EKFAC(2, fisher_type="exact", basis={}, generator=generator)),
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
    EKFAC(fisher_type="ecxat")  # type: ignore[arg-type]
    ClippedGrad(1.0, scale="samples")  # type: ignore[arg-type]
    WeightedGrad(torch.ones(3), of="dot")  # type: ignore[arg-type]
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
    compile_step(lambda X, y: loss_function(model(X), y), backend="aot_eager")
    with disable():
        assert_type(disable.should_store_io(), bool)
    for _, param in model.named_parameters():
        gradients: Tensor = getattr(param, "grad_batch")  # noqa: B009
        gradients.flatten(start_dim=1)
    reduce(model.parameters(), exts)
    assert_type(package.__version__, str)
    print(summary(model), summary(model).rows, context, extensions.__all__)


def between_batches(factors: Dict[Tensor, FactoredGradients]) -> None:
    """What one pass has saved goes into another one."""
    model, loss_function = extended()
    for X, y in get_mnist_dataloader(batch_size=64, shuffle=True):
        clipping = ClippedGrad(max_norm=1.0)
        with backpack(clipping, EKFAC(basis={})):
            loss_function(model(X), y).backward()
        print(clipping.norms, clipping.weights)
        first = next(model.parameters())
        assert_type(BatchProjectGrad(2).matrices(first), List[Tensor])
        ekfac: List[Tensor] = getattr(model[0].weight, "ekfac")  # noqa: B009
        factors = {p: g.precondition(ekfac, damping=0.1) for p, g in factors.items()}
        with backpack(BatchDotGrad(other=factors)):
            loss_function(model(X), y).backward()
        by_parameter = {p: torch.ones(2, *p.shape) for p in model.parameters()}
        BatchDotGrad(other=by_parameter)
        basis = {p: ekfac for p in model.parameters()}
        EKFAC(basis=basis)
        matrices = {p: (p.T, p) for p in model.parameters()}
        BatchProjectGrad(matrices)
        solve = ekfac_mat_prod(ekfac, power=-1, damping=0.1)
        assert_type(solve(torch.ones(3)), Tensor)
        inverses = kroneckers.damped_inv_kfacs(ekfac[:-1], 0.1)
        assert_type(kroneckers.kfac_mat_prod(inverses)(torch.ones(3)), Tensor)
        assert_type(kroneckers.eigen_kfacs(inverses), List[Tensor])
        assert_type(kroneckers.ekfac_mat_prod(ekfac, -1)(torch.ones(3)), Tensor)
        inv_kfac_mat_prod(inverses, shift=0.1)(torch.ones(3))


def products() -> None:
    """Tools around the passes."""
    model, loss_function = extended()
    X, y = load_one_batch_mnist(batch_size=64, shuffle=False)
    output = model(X)
    loss = loss_function(output, y)
    params = list(model.parameters())
    v = vector_to_parameter_list(torch.ones(3), params)
    hessian_vector_product(loss, params, v)
    ggn_vector_product(loss, output, model, v)
    ggn_vector_product_from_plist(loss, output, params, v)
    assert_type(autograd_diag_ggn_exact(X, y, model, loss_function, idx=[0, 2]), Tensor)
    with weight_jac_t_save_memory(save_memory=True):
        pass
    Parallel(nn.Linear(2, 2), nn.Linear(2, 2), merge_module=SumModule())
    nn.Sequential(nn.LSTM(3, 2), ReduceTuple(index=0), Slicing((slice(None), 0)))
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


class ScaleDiagGGN(ModuleExtension):
    """What is computed on it in second order."""

    def __init__(self) -> None:
        """Name the parameter."""
        super().__init__(params=["weight"])

    def weight(
        self,
        ext: BackpropExtension,
        module: Scale,
        g_inp: Tuple[Tensor, ...],
        g_out: Tuple[Tensor, ...],
        bpQuantities: Tensor,  # noqa: N803
    ) -> Tensor:
        """Compute the diagonal."""
        return bpQuantities.square().sum((0, 1))

    def backpropagate(
        self,
        extension: BackpropExtension,
        module: Scale,
        g_inp: Tuple[Tensor, ...],
        g_out: Tuple[Tensor, ...],
        bpQuantities: Tensor,  # noqa: N803
    ) -> Tensor:
        """Go on to the input."""
        return bpQuantities * module.weight


class TraceOfLinear(MatToJacMat):
    """What is computed on a layer whose derivatives are known."""

    def __init__(self) -> None:
        """Name them."""
        super().__init__(LinearDerivatives(), params=["weight", "bias"])


class TraceByRules(SecondOrderBackpropExtension):
    """A quantity of one's own, from module to module."""

    def __init__(self) -> None:
        """List layers."""
        rules = {
            nn.CrossEntropyLoss: SqrtGGNCrossEntropyLoss(),
            nn.ReLU: SqrtGGNReLU(),
            nn.Linear: TraceOfLinear(),
        }
        super().__init__("trace_by_rules", rules)

    def get_loss_hessian_strategy(self) -> str:
        """Say which columns to start with."""
        return "exact"


class Trace(ColumnExtension):
    """A reduction of columns."""

    def __init__(self) -> None:
        """Choose field and columns."""
        super().__init__("trace", Source("exact"))

    def statistic(self, product: PerSample) -> Tensor:
        """Reduce them."""
        return product.sq_norms()


class Largest(GradientReduction):
    """A quantity with a second phase, and what it may ask for."""

    def __init__(self) -> None:
        """Choose the field."""
        super().__init__("largest")

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:
        """Reduce gradients."""
        assert_type(gradients.individual(), Tensor)
        assert_type(gradients.squares(sum_batch=True), Tensor)
        weighted = gradients.weighted_sum(torch.ones(gradients.batch_size))
        print(
            weighted,
            gradients.summed(),
            gradients.variance(),
            gradients.dots(),
            *gradients.pieces(),
        )
        return gradients.select([0, 2]).plain.formed().sq_norms()

    def compute(self, turn: Any) -> None:
        """Keep what will be needed."""
        turn.backward_pass.kept[self] = turn.gradients()

    def conclude(self, backward_pass: Any) -> Dict[Tensor, Any]:
        """Return the values."""
        return {}


def extending() -> None:
    """Teach a quantity a layer."""
    batch_grad = BatchGrad()
    batch_grad.set_module_extension(Scale, ScaleBatchGrad(), overwrite=True)
    DiagGGNExact().set_module_extension(Scale, ScaleDiagGGN())
    HBP(
        Curvature.GGN,
        LossHessianStrategy.EXACT,
        BackpropStrategy.SQRT,
        ExpectationApproximation.BOTEV_MARTENS,
    )
