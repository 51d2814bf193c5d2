"""What is refused or warned about says the true reason, by the qualified name.

And where there is no reason, nothing is said: ``check=True`` raises no false alarm.
"""

import pickle
import re
import warnings
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Callable, Dict, List, Tuple, Type

import pytest
import torch
import torch.nn.functional as F
from cases import F64, drawing, make_extension
from oracle import assert_agrees, parameters
from per_sample import (
    FIRST_ORDER,
    QUANTITIES,
    REFUSALS,
    Backward,
    Lambda,
    N,
    Once,
    Row,
    assert_fields,
    assert_right,
    classes,
    compute,
    param,
    randn,
    real,
    reference,
    tokens,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Module

from backpack import backpack, disable, extend, extensions, summary
from backpack.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SumGradSquared,
    Variance,
)

D = 4


def messages(action: Callable[[], Any]) -> List[str]:
    """Run something, and collect what its error and its warnings say."""
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except (*REFUSALS, AssertionError) as error:
            said.append(str(error))
    return said + [str(warning.message) for warning in caught]


def assert_says(action: Callable[[], Any], *patterns: str) -> None:
    """Assert that an action's error or one of its warnings matches all patterns."""
    said = messages(action)
    assert any(
        all(re.search(f"(?is){pattern}", message) for pattern in patterns)
        for message in said
    ), (said or "nothing was said")


def run(row: Row, *exts: Any, **options: Any) -> Module:
    """Run a row's forward and backward pass with extensions."""
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    value = row.run(model, loss, X)
    with backpack(*exts, **options):
        value.backward()
    return model


def mlp() -> Module:
    """Make a small model."""
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))


MLP = Row(mlp, randn(D))


# Losses without a curvature, or without derivatives


class Absolute(Module):
    """The absolute error, written by hand."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average it."""
        return (f - y).abs().mean()


LINEAR_LOSSES = {
    "L1Loss": (nn.L1Loss, real),
    "L1Loss-sum": (lambda: nn.L1Loss(reduction="sum"), real),
    "MultiMarginLoss": (nn.MultiMarginLoss, classes),
    "MultiLabelMarginLoss": (
        nn.MultiLabelMarginLoss,
        lambda f: torch.tensor([[0, -1, -1]] * len(f)),
    ),
    "NLLLoss": (nn.NLLLoss, classes),
    "KLDivLoss": (
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda f: f.detach().softmax(1),
    ),
    "HingeEmbeddingLoss": (
        nn.HingeEmbeddingLoss,
        lambda f: real(f).sign(),
    ),
    "Absolute": (Absolute, real),
}


@pytest.mark.parametrize("ext", [DiagGGNExact, KFLR, DiagGGNMC, KFAC])
@pytest.mark.parametrize("name", LINEAR_LOSSES)
@pytest.mark.usefixtures("cpu")
def test_no_curvature(name: str, ext: type) -> None:
    """A loss that is linear in pieces has no curvature, and a warning says so."""
    make, target = LINEAR_LOSSES[name]
    row = MLP._replace(loss=make, objective=lambda f, loss: loss(f, target(f)))
    models = []
    assert_says(lambda: models.append(run(row, ext())), name.split("-")[0], r"zero")
    for p in models[0].parameters():
        value = getattr(p, ext().savefield)
        values = value if isinstance(value, list) else [value]
        assert not values[0].any(), "the factor of the loss"


@pytest.mark.parametrize("ext", [DiagHessian, HMP])
def test_curvature_of_the_network(ext: type) -> None:
    """That a loss has none does not matter, if that of the network enters."""
    row = MLP._replace(loss=nn.NLLLoss, objective=lambda f, ls: ls(f, classes(f)))
    row = row._replace(model=lambda: nn.Sequential(*mlp(), nn.LogSoftmax(1)))
    assert messages(lambda: run(row, ext())) == []


@pytest.mark.parametrize("name", LINEAR_LOSSES)
def test_no_curvature_in_first_order(name: str) -> None:
    """First order does not care, and is silent."""
    make, target = LINEAR_LOSSES[name]
    row = MLP._replace(loss=make, objective=lambda f, loss: loss(f, target(f)))
    assert messages(lambda: run(row, BatchGrad(), Variance())) == []


def test_curvature_that_is_zero_for_a_batch() -> None:
    """A loss that is curved elsewhere only is not said to be flat everywhere."""
    row = MLP._replace(
        loss=lambda: nn.HuberLoss(delta=100.0), quantities=["DiagGGNExact"]
    )
    assert_right(row)


class OnceLoss(Module):
    """A loss that can be differentiated once."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average."""
        return Once.apply(f - y).mean()


def added_up(f: Tensor) -> Tensor:
    """Write to constants ``[N, 3]`` in place."""
    out, other = CONSTANT.new_zeros(f.shape), torch.zeros(f.shape)
    out += f.float()
    other[1:] = out[1:]
    other[0].add_(f[0].float())
    return torch.stack([other, torch.zeros_like(other)]).sum(0)


CONSTANT = torch.eye(3)  # of single precision, and no module's
CASTS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product-with-a-constant": lambda f, y: F.cross_entropy(f.float() @ CONSTANT, y),
    "product-of-a-constant": lambda f, y: F.cross_entropy(
        (CONSTANT @ f.float().T).T, y
    ),
    "added-to-a-constant": lambda f, y: F.cross_entropy(added_up(f), y),
    "map-by-a-constant": lambda f, y: F.cross_entropy(
        F.linear(f.float(), CONSTANT).add_(CONSTANT[0, 1]), y
    ),
    "float": lambda f, y: F.cross_entropy(f.float(), y),
    "half-and-back": lambda f, y: F.cross_entropy(f.bfloat16().float(), y),
    "to": lambda f, y: F.cross_entropy(f.to(torch.float32), y),
    "type-of-a-constant": lambda f, y: F.cross_entropy(f.type_as(torch.ones(1)), y),
    "type-of-an-option": lambda f, y: F.nll_loss(
        f.log_softmax(1, dtype=torch.float32), y
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("ext", [DiagGGNExact, KFLR, DiagGGNMC])
@pytest.mark.parametrize("name", CASTS)
def test_losses_that_cast_their_prediction(
    name: str, ext: type, dtype: torch.dtype
) -> None:
    """Rounding in a coarser type is no coupling of samples."""

    class Casting(Module):
        """A loss in a coarser type."""

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            """Cast and compare."""
            return CASTS[name](f, y)

    torch.manual_seed(0)
    model, x = extend(mlp().to(dtype)), torch.randn(N, D, dtype=dtype)
    y, found = classes(model(x)), []
    for loss in (Casting(), nn.CrossEntropyLoss()):
        torch.manual_seed(0)
        loss = extend(loss)
        with backpack(quantity := ext()):
            loss(model(x), y).backward()
        values = [getattr(p, quantity.savefield) for p in model.parameters()]
        found.append(values)
    if ext is not DiagGGNMC:  # which draws classes, or signs
        for values in zip(*found):
            torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)


class KeepsComputed(torch.autograd.Function):
    """A function that computes its derivative beforehand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Square."""
        ctx.save_for_backward(2 * x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Multiply with what seems to be a constant."""
        return gradient * ctx.saved_tensors[0]


class KeepingLoss(Module):
    """A loss whose second derivative autograd takes for zero."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average."""
        return KeepsComputed.apply(f - y).mean()


class Root(Module):
    """A loss whose Hessian is not finite where it is zero."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average."""
        return (f - y).abs().pow(1.5).sum()


def ctc(f: Tensor, loss: Module) -> Tensor:
    """Compare ``[N, 3]``, as three steps of two symbols, with one symbol each."""
    steps = torch.stack([f, -f], -1).log_softmax(-1).transpose(0, 1)
    ones = torch.ones(len(f), 1, dtype=torch.long)
    return loss(steps, ones, torch.full((len(f),), 3), torch.ones(len(f), dtype=int))


NOT_TWICE = {
    "CTCLoss": (nn.CTCLoss, ctc),
    "OnceLoss": (OnceLoss, lambda f, loss: loss(f, real(f))),
    "KeepingLoss": (KeepingLoss, lambda f, loss: loss(f, real(f))),
}


@pytest.mark.parametrize("ext", [DiagGGNExact, KFLR, DiagGGNMC])
@pytest.mark.parametrize("name", NOT_TWICE)
def test_losses_that_are_differentiable_once(name: str, ext: type) -> None:
    """The loss is named, and that it cannot be differentiated twice."""
    loss, objective = NOT_TWICE[name]
    row = MLP._replace(loss=loss, objective=objective)
    with pytest.raises(REFUSALS) as caught:
        run(row, ext())
    assert re.search(rf"(?is){name}.*(twice|second|differentia)", str(caught.value))


@pytest.mark.parametrize(
    "objective",
    [
        *NOT_TWICE.values(),
        (nn.Identity, lambda f, _: ctc(f, F.ctc_loss)),
        (nn.Identity, lambda f, _: ctc(f, partial(F.ctc_loss, reduction="sum"))),
        (nn.Identity, lambda f, _: Once.apply(f - real(f)).mean()),
    ],
    ids=[*NOT_TWICE, "ctc_loss", "ctc_loss-sum", "function"],
)
def test_losses_that_are_differentiable_once_in_first_order(
    objective: Tuple[Callable, Callable],
) -> None:
    """First order needs one derivative only."""
    row = MLP._replace(loss=objective[0], objective=objective[1])
    model = run(row, BatchGrad())
    plain, loss, X = row.build()
    for n in range(N):
        f = plain(*X)[n : n + 1]
        others = plain(*X).detach()
        value = row.objective(torch.cat([others[:n], f, others[n + 1 :]]), loss)
        gradients = torch.autograd.grad(value, list(plain.parameters()))
        for p, gradient in zip(model.parameters(), gradients):
            assert_agrees(p.grad_batch[n], gradient)


@pytest.mark.parametrize("ext", [DiagGGNExact, KFLR])
@pytest.mark.usefixtures("cpu")
def test_hessian_that_is_not_a_number(ext: type) -> None:
    """A loss whose Hessian is not finite is named."""
    row = MLP._replace(loss=Root, objective=lambda f, loss: loss(f, f.detach()))
    assert_says(lambda: run(row, ext()), r"Root", r"nan|not finite|infinite|inf\b")


class Negative(Module):
    """A loss that is not convex."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average."""
        return -(f - y).pow(2).mean()


class Saddle(Module):
    """A loss that is convex in some directions only."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average."""
        return (f[:, 0].pow(2) - f[:, 1].pow(2)).sum() + F.mse_loss(f, y)


class Pairs(Module):
    """A loss that couples samples."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare all with all."""
        return (f[:, None] - f[None]).pow(2).mean() + F.mse_loss(f, y)


class Centered(Module):
    """A loss that couples samples by their mean."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare with the mean."""
        return F.mse_loss(f - f.mean(0), y)


class PairsInOne(torch.autograd.Function):
    """Compare all with all, where no operation is seen."""

    @staticmethod
    def forward(ctx: Any, f: Tensor) -> Tensor:
        """Average the squares of all differences."""
        ctx.save_for_backward(f)
        return (f[:, None] - f[None]).pow(2).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Differentiate, in a way that can be differentiated."""
        (f,) = ctx.saved_tensors
        return g * (f - f.mean(0)) * 4 / f.numel()


class Hidden(Module):
    """A loss that couples samples in a function of its own."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare all with all."""
        return PairsInOne.apply(f)


@pytest.mark.parametrize("ext", [KFRA, KFLR, DiagGGNExact])
@pytest.mark.parametrize("loss", [Negative, Saddle, Pairs, Centered, Hidden])
@pytest.mark.usefixtures("cpu")
def test_losses_without_a_factor(loss: type, ext: type) -> None:
    """A loss that couples samples, or isn't convex, is refused for all curvatures."""
    row = MLP._replace(loss=loss)
    with pytest.raises(REFUSALS) as caught:
        run(row, ext())
    says = "convex|definite" if loss in (Negative, Saddle) else "sample|couple"
    assert re.search(rf"(?is){loss.__name__}.*({says})", str(caught.value))


# One extension twice


TWICE = [
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    SumGradSquared,
    Variance,
    extensions.BatchDotGrad,
    DiagGGNExact,
    extensions.BatchDiagGGNExact,
    extensions.SqrtGGNExact,
    KFLR,
    KFRA,
    extensions.DiagHessian,
]


@pytest.mark.parametrize("same", [True, False], ids=["same-object", "two-objects"])
@pytest.mark.parametrize("ext", TWICE)
def test_one_extension_twice(ext: type, same: bool) -> None:
    """The result is that of once; two objects may be refused."""
    field = ext().savefield
    once = run(MLP, ext())
    first = ext()
    try:
        twice = run(MLP, first, first if same else ext())
    except REFUSALS as error:
        assert not same and ext.__name__ in str(error)
        return
    for a, b in zip(twice.parameters(), once.parameters()):
        assert_agrees(getattr(a, field), getattr(b, field), ext.__name__)


def test_one_that_replaces_gradients_twice() -> None:
    """The same object runs once, too, where there may be only one."""
    ext = extensions.ClippedGrad(1e-2, replace_grad=True)
    once, twice = run(MLP, ext), run(MLP, ext, ext)
    for a, b in zip(twice.parameters(), once.parameters()):
        assert_agrees(a.grad, b.grad)


# The backward pass was somewhere else


@pytest.mark.parametrize("exts", [(BatchGrad,), (DiagGGNExact, BatchGrad)])
def test_backward_pass_before_the_context(exts: Tuple[type, ...]) -> None:
    """A context in which nothing runs, after a backward pass outside of it."""

    def action() -> None:
        model, loss, X = MLP.build()
        MLP.run(extend(model), extend(loss), X).backward()
        with backpack(*[ext() for ext in exts]):
            pass
        with backpack(*[ext() for ext in exts]):  # has been said
            pass

    assert len(messages(action)) == 1
    assert_says(action, r"backward", r"(inside|within|context|with )")


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_but_a_derivative(backward: bool) -> None:
    """A pass for inputs that has a graph is part of a loss, which does not come."""

    def action(later: bool = False) -> None:
        model, loss, X = MLP.build()
        x = X[0].requires_grad_()
        model, loss = extend(model), extend(loss)
        with backpack(BatchGrad()):
            value = MLP.run(model, loss, X)
            if backward:
                with warnings.catch_warnings():  # PyTorch's own, of cycles
                    warnings.simplefilter("ignore")
                    value.backward(inputs=[x], create_graph=True)
                gradient = x.grad
            else:
                (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            if later:
                (value + gradient.pow(2).sum()).backward()

    assert len(messages(action)) == 1 and messages(lambda: action(True)) == []
    assert_says(action, "create_graph=True", "inputs", "nothing was computed")


def test_context_without_a_pass() -> None:
    """There is nothing to say if no backward pass was run at all, or one inside."""

    def nothing() -> None:
        model, loss, X = MLP.build()
        MLP.run(extend(model), extend(loss), X)
        with backpack(BatchGrad()):
            pass

    def both() -> None:
        model, loss, X = MLP.build()
        model, loss = extend(model), extend(loss)
        MLP.run(model, loss, X).backward()
        with backpack(BatchGrad()):
            MLP.run(model, loss, X).backward()

    assert messages(nothing) == [] and messages(both) == []


# Names


class Block(Module):
    """A block among others that look the same."""

    def __init__(self, inner: Callable[[Module, Tensor], Tensor]):
        """Create the layers."""
        super().__init__()
        self.fc, self.norm, self.inner = nn.Linear(D, D), nn.BatchNorm1d(D), inner
        self.scale = param(D)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        return x + self.inner(self, self.fc(x).tanh() * self.scale)


def blocks(odd: Callable[[Module, Tensor], Tensor]) -> Callable[[], Module]:
    """Make a model of equal blocks, the third of which does something odd."""

    def model() -> Module:
        inner = [lambda m, x: m.norm.eval()(x)] * 4
        inner[2] = odd
        return Lambda(
            lambda m, x: m.head(m.encoder(x)),
            encoder=nn.Sequential(*[Block(i) for i in inner]),
            head=nn.Linear(D, 3),
        )

    return model


THIRD = r"encoder\.2(\.|\b)"
ODD = {
    "batch-norm": (lambda m, x: m.norm.train()(x), r"batch.?norm"),
    "mean": (lambda m, x: x - x.mean(0), r"mean"),
    "cumulative-sum": (lambda m, x: x.cumsum(0), r"cumsum"),
    "permutation": (
        lambda m, x: x + x[torch.arange(len(x)).roll(1)],
        r"add|index|item",
    ),
    "similarity": (lambda m, x: (x @ x.T).softmax(1) @ x, r"matmul|mm"),
}


@pytest.mark.filterwarnings("ignore:(?s).*No result was computed")
@pytest.mark.parametrize("ext", [BatchGrad, BatchL2Grad, DiagGGNExact, KFLR])
@pytest.mark.parametrize("name", ODD)
def test_where_samples_meet(name: str, ext: type) -> None:
    """Of equal blocks, the message says which; and what happens there."""
    function, says = ODD[name]
    row = Row(blocks(function), randn(D), train=True)
    assert_says(lambda: run(row, ext()), says, THIRD)
    if name != "batch-norm":  # may be warned about
        with pytest.raises(REFUSALS):
            run(row, ext())


@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_samples_that_met_before_a_loss(ext: type) -> None:
    """A loss whose operations are watched is not where samples have met before it."""
    row = Row(
        lambda: nn.Linear(D, D),
        randn(D),
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda f, loss: loss(f.log_softmax(0), real(f).softmax(1)),
    )
    assert_says(lambda: run(row, ext()), r"samples have met in `log_softmax`, so")


@pytest.mark.parametrize("factors", [KFAC, KFLR])
def test_which_layer_is_ambiguous(factors: type) -> None:
    """Of equal layers, the message says for which one factors are ambiguous."""
    row = Row(
        lambda: Lambda(
            lambda m, x: m.layers[2](
                m.layers[1](m.layers[0](x)).unflatten(1, (2, 2)).repeat(1, 1, 2)
            ),
            layers=nn.ModuleList([nn.Linear(D, D) for _ in range(3)]),
        ),
        randn(D),
    )
    with pytest.raises(REFUSALS) as caught:
        run(row, factors())
    assert "layers.2" in str(caught.value) and "weight_sharing" in str(caught.value)
    assert "layers.1" not in str(caught.value)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_step_inside_of_disable(activation: Type[Module]) -> None:
    """The message says how to differentiate through a gradient step, which is right."""
    torch.manual_seed(0)
    model = extend(
        nn.Sequential(nn.Linear(D, 5), activation(), nn.Linear(5, 3)).double()
    )
    loss, (x, other) = extend(nn.CrossEntropyLoss()), torch.randn(2, N, D, dtype=F64)
    y, params = classes(x), dict(model.named_parameters())

    def step() -> Dict[str, Tensor]:
        value = F.cross_entropy(model(other), y)
        gradients = torch.autograd.grad(value, params.values(), create_graph=True)
        return {name: p - g for (name, p), g in zip(params.items(), gradients)}

    def run(around: Any) -> None:
        with backpack(BatchGrad()):
            with around():
                stepped = step()
            loss(torch.func.functional_call(model, stepped, x), y).backward()

    assert_says(lambda: run(nullcontext), r"a step .* inside of `backpack.disable\(\)`")
    run(disable)
    with disable():
        out = torch.func.functional_call(model, step(), x)
        values = F.cross_entropy(out, y, reduction="none") / N
        for p in params.values():
            each = [torch.autograd.grad(v, p, retain_graph=True)[0] for v in values]
            assert_agrees(p.grad_batch, torch.stack(each))


@pytest.mark.parametrize("by", ["grad", "backward"])
def test_derivative_of_a_forward_pass(by: str) -> None:
    """What the message says of derivatives by parameters in a model is right."""
    x = torch.randn(N, D, dtype=F64)

    def forward(m: Module, x: Tensor) -> Tensor:
        h = m.b(torch.tanh(m.a(x)))
        with m.around():
            value, weight = m.b(torch.tanh(m.a(x))).square().mean(), m.b.weight
            if by == "backward":
                value.backward(inputs=[weight])
                scale, weight.grad = weight.grad.norm(), None
            else:
                scale = torch.autograd.grad(value, weight)[0].norm()
        return h * scale

    def run(around: Any, of_forward: bool = True) -> List[Tensor]:
        torch.manual_seed(0)
        model = Lambda(forward, a=nn.Linear(D, 5), b=nn.Linear(5, 3)).double()
        model.around, loss = around, extend(nn.CrossEntropyLoss())
        with backpack(DiagGGNExact()) if of_forward else nullcontext():
            value = loss(extend(model)(x), classes(x))
        with backpack(DiagGGNExact()):
            value.backward()
        return [p.diag_ggn_exact for p in model.parameters()]

    reason = "no extended loss was met.*take it inside of `with backpack.disable"
    assert_says(lambda: run(nullcontext), reason)
    for found, expected in zip(run(disable), run(nullcontext, of_forward=False)):
        assert_agrees(found, expected)


@pytest.mark.parametrize("name", ["DiagGGNExact", "KFLR"])
def test_derivative_of_data_in_a_loss(name: str) -> None:
    """A loss that differentiates a prediction by data has a reason of its own."""

    class Smooth(Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

        def forward(self, prediction: Tensor, y: Tensor, x: Tensor) -> Tensor:
            by = torch.autograd.grad(prediction.sum(), x, create_graph=True)[0]
            return self.loss(prediction, y) + by.pow(2).mean()

    model, loss = extend(nn.Linear(D, 3).double()), extend(Smooth())
    x = torch.randn(N, D, dtype=F64, requires_grad=True)

    def run() -> None:
        with backpack(getattr(extensions, name)()):
            loss(model(x), classes(x), x).backward()

    assert_says(run, "Smooth: input 2 requires grad")


@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_which_parameter_is_not_reached(ext: type) -> None:
    """Of equal blocks, the warning says which one plays no part."""
    row = Row(
        lambda: Lambda(
            lambda m, x: m.encoder[1](m.encoder[0](x)),
            encoder=nn.Sequential(*[nn.Linear(D, D) for _ in range(3)]),
        ),
        randn(D),
    )
    assert_says(lambda: run(row, ext()), r"encoder\.2\.weight", r"encoder\.2\.bias")


CURVATURES: List[type] = [DiagGGNExact, KFLR, GGNMP, HMP, DiagHessian, KFRA]


@pytest.mark.parametrize("inner", [True, False], ids=["layer", "parameter"])
@pytest.mark.parametrize("ext", [*CURVATURES, BatchGrad, BatchJacobian])
def test_parameters_of_a_loss(ext: type, inner: bool) -> None:
    """They have no quantity of second order, and a warning says that this is why."""
    if inner:
        loss = Lambda(lambda m, f, y: F.mse_loss(m.scale(f), y), scale=nn.Linear(3, 3))
    else:
        loss = Lambda(lambda m, f, y: F.mse_loss(m.scale * f, y), scale=param(3))
    row = MLP._replace(loss=lambda: loss, objective=lambda f, ls: ls(f, real(f)))
    models: List[Module] = []
    said = messages(lambda: models.append(run(row, ext())))
    assert all(hasattr(p, ext().savefield) for p in models[0].parameters())
    if ext not in CURVATURES:
        assert said == []
    else:
        names = "- scale.weight, scale.bias" if inner else "- scale"
        assert len(said) == 1 and f"{names}: its module is a loss, or part" in said[0]


# The true reason


@pytest.mark.parametrize(
    "what", ["cache", "generator", "autocast", "no-grad", "dropout"]
)
@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_true_reason(what: str, ext: type) -> None:
    """A model is refused for what couples its samples, not for what looks unusual."""

    def forward(m: Module, x: Tensor) -> Tensor:
        h = m.f(x) * m.scale
        if what == "cache":
            m.cache.append(h)
            h = sum(m.cache)
        elif what == "generator":
            h = h * torch.rand(h.shape, generator=m.generator, dtype=h.dtype)
        elif what == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                h = m.f(h).to(x.dtype)
        elif what == "no-grad":
            with torch.no_grad():
                m.cache.append(m.f(x))
        else:
            h = F.dropout(h)
        return m.g(h - h.mean(0))

    row = Row(
        lambda: Lambda(
            forward,
            f=nn.Linear(D, D),
            g=nn.Linear(D, 3),
            scale=param(D),
            cache=[],
            generator=drawing(0),
        ),
        randn(D),
    )
    with pytest.raises(REFUSALS) as caught:
        run(row, ext())
    assert "mean" in str(caught.value)
    assert not re.search("(?i)repeat|random|cache|eval()", str(caught.value))


# Other ways to differentiate inside of a context


def batched(value: Tensor, params: List[Tensor]) -> List[Tensor]:
    """Differentiate with several cotangents at once."""
    ones = torch.ones(2, dtype=value.dtype)
    return [
        g[0]
        for g in torch.autograd.grad(
            value, params, grad_outputs=ones, is_grads_batched=True
        )
    ]


def vectorized(value: Tensor, params: List[Tensor]) -> List[Tensor]:
    """The same by a function for Jacobians."""
    basis = torch.eye(1, dtype=value.dtype)

    def pull(v: Tensor) -> Tuple[Tensor, ...]:
        return torch.autograd.grad(value, params, v.squeeze(), retain_graph=True)

    return [g[0] for g in torch.vmap(pull)(basis)]


@pytest.mark.parametrize("differentiate", [batched, vectorized])
@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_batched_cotangents(ext: type, differentiate: Callable) -> None:
    """Several cotangents at once: gradients are right, or it is refused by name."""
    samples = reference(MLP)
    model, loss, X = MLP.build()
    model, loss = extend(model), extend(loss)
    params = list(model.parameters())
    value = MLP.run(model, loss, X)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with backpack(ext()):
                gradients = differentiate(value, params)
    except REFUSALS as error:
        assert re.search("(?i)is_grads_batched|vmap|batched|vectori", str(error)), error
        return
    for g, expected in zip(gradients, samples.gradients.values()):
        assert_agrees(g, expected.sum(0))
    if all(hasattr(p, ext().savefield) for p in params):
        assert_fields(model, [ext.__name__], samples)


def test_jacobian_inside() -> None:
    """A Jacobian of the model inside of a context is that of the plain model."""
    model, _, X = MLP.build()
    jacobian = torch.autograd.functional.jacobian
    expected = jacobian(model, X[0])
    for vectorize in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with backpack(BatchGrad(), retain_graph=True):
                    actual = jacobian(extend(model), X[0], vectorize=vectorize)
            except REFUSALS as error:
                assert re.search(
                    "(?i)is_grads_batched|vmap|batched|vectori", str(error)
                )
                continue
        assert_agrees(actual, expected)


def in_dual_level(model: Module, x: Tensor) -> Tensor:
    """Multiply the Jacobian and ones, with tensors that carry tangents."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(model(dual)).tangent


def hessian_product(model: Module, x: Tensor) -> Tensor:
    """Multiply a Hessian and ones, forward over reverse."""
    params = dict(model.named_parameters())
    ones = {name: torch.ones_like(p) for name, p in params.items()}

    def value(values: Dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, x).sin().sum()

    _, tangents = torch.func.jvp(torch.func.grad(value), (params,), (ones,))
    return torch.cat([tangents[name].flatten() for name in params])


FORWARD_MODES: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "dual-level": in_dual_level,
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda m, x: torch.func.jacfwd(m)(x),
    "jacfwd-of-jacrev": lambda m, x: torch.func.hessian(lambda x: m(x).sum())(x),
    "hessian-product": hessian_product,
}
OPERATIONS = Row(
    lambda: Lambda(
        lambda m, x: F.linear(m.f(x).tanh(), m.w) * m.s.exp(),
        f=nn.Linear(D, D),
        w=param(3, D),
        s=param(3),
    ),
    randn(D),
)


RECURRENT = Row(
    lambda: Lambda(
        lambda m, x: m.f(x.unflatten(1, (1, D)))[1][0][0],
        f=nn.LSTM(D, 3, 1, True, True),
    ),
    randn(D),
)


@pytest.mark.filterwarnings("ignore:(?s).*torch.jit")
@pytest.mark.parametrize(
    "row", [MLP, OPERATIONS, RECURRENT], ids=["layers", "operations", "recurrent"]
)
@pytest.mark.parametrize("name", FORWARD_MODES)
def test_forward_mode(name: str, row: Row) -> None:
    """Derivatives in forward mode pass through an extended model, and leave nothing."""
    model, loss, X = row.build()
    differentiate, samples = FORWARD_MODES[name], reference(row)
    expected = differentiate(model, *X)
    model, loss = extend(model), extend(loss)
    with backpack(BatchGrad(), DiagGGNExact()):
        actual = differentiate(model, *X)
        row.run(model, loss, X).backward()
    assert_agrees(actual.detach(), expected.detach())
    assert_fields(model, ["BatchGrad", "DiagGGNExact"], samples)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by PyTorch
@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("row", [MLP, OPERATIONS], ids=["layers", "operations"])
def test_backward_pass_with_tangents(row: Row, ext: type) -> None:
    """Where gradients have tangents, it is refused; right when these are gone."""
    model, loss, X = row._replace(loss=OwnSquare).build()
    samples = reference(row._replace(loss=OwnSquare))
    model, loss = extend(model), extend(loss)
    with backpack(ext(), retain_graph=True):
        with forward_ad.dual_level():
            f = model(forward_ad.make_dual(X[0], torch.ones_like(X[0])))
            value = loss(f, real(f))
            with pytest.raises(NotImplementedError, match="dual_level"):
                value.backward(retain_graph=True)
        value.backward()
    assert_fields(model, [ext.__name__], samples)


@pytest.mark.filterwarnings("ignore:(?s).*torch.jit")
@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("extended", ["inside", "around"])
@pytest.mark.parametrize("row", [MLP, OPERATIONS], ids=["layers", "operations"])
def test_loss_of_tangents(row: Row, extended: str, ext: type) -> None:
    """What a tangent leads to is refused: parameters enter it unseen."""
    model, loss, X = row.build()
    loss = extend(loss)
    if extended == "around":
        around = extend(Lambda(lambda m, x: m.f(x) + in_dual_level(m.f, x), f=model))
        f = around(*X)
    else:
        f = in_dual_level(extend(model), *X)
    value = loss(f, real(f))
    # and no warning follows where the user goes on
    with backpack(ext()), pytest.raises(NotImplementedError, match="enter tangents"):
        value.backward()


class OwnSquare(Module):
    """The squared error, of which PyTorch knows a derivative in each mode."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare."""
        return (f - y).square().sum()


def test_hessian_vector_product_inside() -> None:
    """A product with the Hessian, by two backward passes inside of the context."""
    results = []
    for extended in (False, True):
        model, loss, X = MLP.build()
        if extended:
            model, loss = extend(model), extend(loss)
        params = list(model.parameters())
        value = MLP.run(model, loss, X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with backpack(*[BatchGrad()] if extended else []):
                grads = torch.autograd.grad(value, params, create_graph=True)
            products = torch.autograd.grad(sum(g.sin().sum() for g in grads), params)
        results.append(products)
    for actual, expected in zip(*reversed(results)):
        assert_agrees(actual, expected)


# check=True


def key_bias(t: int) -> Row:
    """Make a row with attention, whose key bias has no influence."""
    return Row(
        lambda: Lambda(
            lambda m, x: m.a(x, x, x)[0],
            a=nn.MultiheadAttention(D, 2, batch_first=True),
        ),
        randn(t, D),
    )


def shift_before_softmax(m: Module, x: Tensor) -> Tensor:
    """Add a number to all scores before the softmax."""
    return (m.f(x) + m.shift).softmax(1)


class Sum(Module):
    """Two terms whose gradients cancel exactly."""

    def __init__(self):
        """Create the weight."""
        super().__init__()
        self.weight, self.f = param(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Add and subtract."""
        return self.f(x) + ((x * self.weight).sum(1) - x @ self.weight)[:, None]


CHECKED: Dict[str, Row] = {
    "key-bias": key_bias(3),
    "key-bias-time-is-batch": key_bias(N),
    "shift-before-softmax": Row(
        lambda: Lambda(shift_before_softmax, f=nn.Linear(D, 3), shift=param(1)),
        randn(D),
    ),
    "bias-before-a-norm": Row(
        lambda: nn.Sequential(
            nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(8, 2)
        ),
        randn(2, 4),
    ),
    "scale-before-a-norm": Row(
        lambda: Lambda(
            lambda m, x: F.normalize(x * m.scale.exp(), dim=1) * m.w,
            scale=param(),
            w=param(D),
        ),
        randn(D),
    ),
    "terms-that-cancel": Row(Sum, randn(D)),
    "zero-targets": MLP._replace(objective=lambda f, loss: loss(f, f.detach())),
    "dead-units": Row(
        lambda: Lambda(
            lambda m, x: m.g((m.f(x) - 100).relu()),
            f=nn.Linear(D, D),
            g=nn.Linear(D, 2),
        ),
        randn(D),
    ),
    "sparse-table": Row(
        lambda: nn.Sequential(nn.Embedding(5, D, sparse=True), nn.Linear(D, 3)),
        tokens(3),
    ),
    "sparse-bag": Row(
        lambda: nn.Sequential(
            nn.EmbeddingBag(5, D, mode="sum", sparse=True), nn.Linear(D, 3)
        ),
        tokens(3),
    ),
    "padding": Row(
        lambda: nn.Sequential(nn.Embedding(5, D, padding_idx=1), nn.Linear(D, 3)),
        tokens(N),
    ),
    "tied": Row(
        lambda: Lambda(lambda m, i: m.e(i).tanh() @ m.e.weight.T, e=nn.Embedding(5, D)),
        tokens(3),
    ),
    "flattened": MLP._replace(
        X=randn(3, D),
        objective=lambda f, loss: loss(f.flatten(0, 1), real(f.flatten(0, 1))),
    ),
    "far-from-zero": MLP._replace(
        X=lambda: (1e4 + torch.randn(N, D, dtype=F64),),
        objective=lambda f, loss: loss(f, real(f) * 1e-6),
    ),
    "large-and-small-layers": Row(
        lambda: Lambda(
            lambda m, x: m.g(m.f(x) * 1e-8).tanh() * 1e8,
            f=nn.Linear(D, D),
            g=nn.Linear(D, 3),
        ),
        randn(D),
    ),
}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("ext", [BatchGrad, BatchL2Grad, DiagGGNExact])
@pytest.mark.parametrize("name", CHECKED)
def test_no_false_alarm(name: str, ext: type, dtype: torch.dtype) -> None:
    """``check=True`` is silent about what is right, also where gradients are zero.

    With bfloat16, this is the type that autocast runs operations in.
    """
    row, casts = CHECKED[name], dtype == torch.bfloat16
    dtype = torch.float32 if casts else dtype
    model, loss, X = row.build()
    model, loss = extend(model.to(dtype)), extend(loss)
    X = tuple(x.to(dtype) if x.is_floating_point() else x for x in X)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        value = row.run(model, loss, X)
    with backpack(ext(), check=True):
        value.backward()
    for p in model.parameters():
        assert hasattr(p, ext().savefield)


# A loss by hand of what a layer has computed, with the steps first: its node has rows
CHECKED_BY_HAND = Row(
    lambda: nn.ModuleList([nn.Linear(D, D), nn.Linear(D, 2)]),
    randn(D),
    nn.Identity,
    lambda f, loss: f.square().sum(-1).logsumexp(1).sum(),
    FIRST_ORDER,
    predict=lambda model, X: model[1](model[0](X[0]).expand(5, -1, -1).sin()).transpose(
        0, 1
    ),
)


@pytest.mark.parametrize("name", [*CHECKED, "loss-by-hand-steps-first"])
def test_checked_is_right(name: str) -> None:
    """And what it checks is right."""
    quantities = [q for q in FIRST_ORDER if q != "Variance"]
    if name in ("terms-that-cancel", "zero-targets", "scale-before-a-norm"):
        quantities = ["BatchGrad"]  # squares of rounding errors
    row = CHECKED.get(name, CHECKED_BY_HAND)
    assert_right(row._replace(quantities=quantities), check=True)


class MixesBehindTheBack(torch.autograd.Function):
    """A mean over samples, by a library that no tracking sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Average neighbours."""
        array = x.detach().numpy()
        return torch.from_numpy(0.5 * array + 0.5 * array[::-1].copy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Do the same to gradients."""
        return 0.5 * g + 0.5 * g.flip(0)


UNSEEN = {
    "backward": lambda m, x: m.g(
        Backward.apply(lambda g: g + 0.5 * (g.roll(1, 0) - g), real(x), m.f(x))
    ),
    "another-library": lambda m, x: m.g(MixesBehindTheBack.apply(m.f(x))),
    "hook": lambda m, x: m.g(with_hook(m.f(x))),
}


def with_hook(x: Tensor) -> Tensor:
    """Register a hook that mixes the samples' gradients."""
    x.register_hook(lambda g: 0.5 * g + 0.5 * g.flip(0))
    return x


@pytest.mark.parametrize("loss", ["module", "function"])
@pytest.mark.parametrize("ext", [BatchGrad, BatchL2Grad, SumGradSquared, DiagGGNExact])
@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.usefixtures("cpu")
def test_coupling_that_is_not_seen(name: str, ext: type, loss: str) -> None:
    """Samples that meet where nothing sees it are found by the isolation probe."""
    if name == "hook" and ext is DiagGGNExact:
        pytest.skip("columns do not run the hooks of tensors")
    if loss == "function" and ext is DiagGGNExact:
        pytest.skip("has to be a module")
    row = Row(
        lambda: Lambda(UNSEEN[name], f=nn.Linear(D, D), g=nn.Linear(D, 3)), randn(D)
    )
    if loss == "function":
        row = row._replace(value=lambda m, _, X: F.mse_loss(f := m(*X), real(f)))
    with pytest.raises(REFUSALS) as caught:
        run(row, ext(), check=True)
    assert re.search(r"(?i)sample", str(caught.value)), caught.value


def test_check_of_what_is_returned_beside_a_prediction() -> None:
    """It starts where samples are separate, and not at a mean beside."""
    model = Lambda(
        lambda m, x: (m.f(x), m.s * m.f(x).square().mean()),
        f=nn.Linear(D, 3, dtype=F64),
        s=param(),
    )
    model = extend(model)
    with backpack(BatchGrad(), check=True):
        prediction, mean = model(*randn(D)())
        (prediction.sin().sum() + mean).backward()
    for p in model.parameters():
        assert_agrees(p.grad_batch.sum(0), p.grad)


def test_check_finds_what_is_missing() -> None:
    """Gradients from a term that is no sample's are found, and the parameter named."""
    row = MLP._replace(
        value=lambda m, loss, X: loss(f := m(*X), real(f)) + m[0].weight.pow(2).sum()
    )
    with pytest.raises(REFUSALS, match=r"0\.weight"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(row, BatchGrad(), check=True)


# Squares of what is out of range


EXTREME = {
    "large-inputs": (1e200, 1e-200),
    "large-gradients": (1e-200, 1e200),
    "small-inputs": (1e-170, 1e60),
    "different-samples": (
        torch.tensor([1e200, 1.0, 1e-200, 1e100], dtype=F64),
        torch.tensor([1e-200, 1.0, 1e200, 1e-100], dtype=F64),
    ),
}
LAYERS: Dict[str, Tuple[Callable[[], Module], Tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2, bias=False), (3,)),
    "positions": (lambda: nn.Linear(3, 2, bias=False), (5, 3)),
    "many-positions": (lambda: nn.Linear(3, 2, bias=False), (40, 3)),
    "conv": (lambda: nn.Conv1d(3, 2, 2, bias=False), (3, 4)),
    "matmul": (lambda: Lambda(lambda m, x: x @ m.w, w=param(3, 2)), (3,)),
}


SQUARES = ["BatchL2Grad", "SumGradSquared", "Variance", "BatchDotGrad"]


@pytest.mark.parametrize("quantity", SQUARES)
@pytest.mark.parametrize("scales", EXTREME)
@pytest.mark.parametrize("layer", LAYERS)
def test_squares_out_of_range(layer: str, scales: str, quantity: str) -> None:
    """Squares are right where the factors' own squares over- or underflow."""
    make, shape = LAYERS[layer]
    inputs, outputs = (torch.as_tensor(s, dtype=F64).expand(N) for s in EXTREME[scales])
    model, X = extend(make().to(F64)), torch.randn(N, *shape, dtype=F64)
    (weight,) = model.parameters()
    f = model(X * inputs.view(-1, *[1] * len(shape)))
    value = f.mul(real(f)).mul(outputs.view(-1, *[1] * (f.dim() - 1))).sum()
    with backpack(BatchGrad(), make_extension(quantity)):
        value.backward()
    field, function, _ = QUANTITIES[quantity]
    gradients = weight.grad_batch
    scale = gradients.abs().max()
    expected = function(gradients / scale) * scale * scale
    assert expected.isfinite().all() and expected.any()
    assert_agrees(getattr(weight, field), expected, quantity)


# Regions of the forward pass in which something else holds, and the converter


class Regions(Module):
    """A model with a part that is not to be trained, or runs in another type."""

    def __init__(self, region: str):
        """Create the layers."""
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        if self.region == "no-grad":
            with torch.no_grad():
                frozen = self.b(x).sigmoid()
        elif self.region == "set-grad-enabled":
            torch.set_grad_enabled(False)
            frozen = self.b(x).sigmoid()
            torch.set_grad_enabled(True)
        elif self.region == "detach":
            frozen = self.b(x).sigmoid().detach()
        else:
            frozen = x
        return self.c(self.a(x).sigmoid() * frozen + self.b(x))


@pytest.mark.parametrize("region", ["no-grad", "set-grad-enabled", "detach", "none"])
def test_converter_keeps_regions(region: str) -> None:
    """A converted model trains what the model trains, or it is not converted."""
    row = Row(lambda: Regions(region), randn(D))
    samples = reference(row._replace(alone=False))
    model, loss, X = row.build()
    try:
        converted = extend(model, use_converter=True)
    except REFUSALS as error:
        says = r"(?i)grad|autocast|detach|control|region"
        assert re.search(says, str(error)), error
        return
    value = row.run(converted, extend(loss), X)
    with backpack(BatchGrad(), DiagGGNExact()):
        value.backward()
    assert_fields(model, ["BatchGrad", "DiagGGNExact"], samples)


BROADCASTS = ["sum", "product", "column-first", "difference"]


@pytest.mark.parametrize("name", BROADCASTS)
def test_converter_broadcasts(name: str) -> None:
    """Sums and products of ``[N, 1]`` and ``[N, C]`` are right in module rules."""
    row = Row(lambda: Broadcast(name), randn(D))
    samples = reference(row)
    model, loss, X = row.build()
    converted = extend(model, use_converter=True)
    value = row.run(converted, extend(loss), X)
    with backpack(extensions.GGNMP(), DiagGGNExact()):
        value.backward()
    assert_fields(model, ["DiagGGNExact"], samples)
    for key, p in parameters(model).items():
        unit = torch.eye(p.numel(), dtype=F64).reshape(-1, *p.shape)
        block = p.ggnmp(unit).reshape(p.numel(), -1)
        assert_agrees(block, samples.blocks[key].sum(0), key, rtol=1e-7)


class Broadcast(Module):
    """A model that combines a matrix and a column."""

    def __init__(self, name: str):
        """Create the layers."""
        super().__init__()
        self.a, self.column, self.name = nn.Linear(D, 3), nn.Linear(D, 1), name

    def forward(self, x: Tensor) -> Tensor:
        """Combine."""
        if self.name == "sum":
            return self.a(x) + self.column(x)
        if self.name == "product":
            return self.a(x) * self.column(x)
        if self.name == "column-first":
            return self.column(x) + self.a(x)
        return self.a(x) - self.column(x)


def test_fields_of_all_quantities() -> None:
    """A small model is right to begin with."""
    assert_fields(compute(MLP, list(QUANTITIES)), list(QUANTITIES), reference(MLP))


# What is shown of an extension or a context is what could be typed in
SHOWN = [
    "BatchGrad()",
    "BatchGrad([0, 2])",
    "BatchGrad(subsampling=slice(0, 2, None))",
    "BatchDiagHessian()",
    "KFAC(mc_samples=2, weight_sharing='reduce')",
    "SqrtGGNMC(2, [0])",
    "PCHMP(modify='abs')",
    "backpack(BatchGrad(), KFLR())",
    "backpack(DiagGGNExact(), retain_graph=True)",
    "backpack(check=True)",
]


@pytest.mark.parametrize("text", SHOWN)
def test_shown_as_typed_in(text: str) -> None:
    """The ``repr`` is the call, also of copies; that of a context says if it is on."""
    names = {**vars(extensions), "backpack": backpack}
    made = eval(text, names)
    if isinstance(made, backpack):
        with made:
            assert repr(made) == f"{text}  # active"
    else:
        assert repr(deepcopy(made)) == repr(pickle.loads(pickle.dumps(made))) == text
    assert repr(made) == text


def test_summary() -> None:
    """Each field of each parameter has a row: shapes and bytes, also in HTML."""
    model = extend(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1, bias=False)))
    loss = extend(nn.MSELoss())
    factors = extensions.BatchFactors()
    with backpack(extensions.BatchGrad(), KFLR(), extensions.HMP(), factors):
        loss(model(torch.randn(5, 4)), torch.zeros(5, 1)).backward()
    table = summary(model)
    expected = {
        ("0.weight", "grad_batch", "[5, 3, 4]", 5 * 12 * 4),
        ("0.weight", "kflr", "[3, 3], [4, 4]", (9 + 16) * 4),
        ("0.weight", "hmp", "function", 0),
        ("0.weight", "grad_factors", "[5, 1, 1, 4], [1, 5, 1, 1, 3]", 140),
        ("0.bias", "grad_batch", "[5, 3]", 5 * 3 * 4),
        ("0.bias", "kflr", "[3, 3]", 9 * 4),
        ("0.bias", "hmp", "function", 0),
        ("0.bias", "grad_factors", "[1, 5, 3]", 15 * 4),
        ("1.weight", "grad_batch", "[5, 1, 3]", 5 * 3 * 4),
        ("1.weight", "kflr", "[1, 1], [3, 3]", (1 + 9) * 4),
        ("1.weight", "hmp", "function", 0),
        ("1.weight", "grad_factors", "[1, 5, 1, 3]", 15 * 4),
    }
    assert set(table.rows) == expected and len(table.rows) == len(expected)
    assert len({len(line) for line in str(table).split("\n")}) == 1
    assert table._repr_html_().count("<tr>") == 1 + len(expected)
    for cell in expected.pop():
        assert str(cell) in str(table) and f"<td>{cell}</td>" in table._repr_html_()


def test_debug_names_modules(capsys: pytest.CaptureFixture) -> None:
    """What is printed says which of several equal layers it is about."""
    model = extend(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), debug=True)
    assert "Extending 1: Linear(" in capsys.readouterr().out
    with backpack(extensions.BatchGrad(), debug=True):
        model(torch.ones(3, 2)).sum().backward()
    out = capsys.readouterr().out
    for name in "01":
        pattern = rf"BatchGrad\(\) on Linear\(.*\) \('{name}' of Sequential\)"
        assert re.search(pattern, out), out
