"""The promise: import paths, names and signatures of BackPACK 1.7 exist.

``public_interface.txt`` holds them: a module per line, functions, classes and constants
indented below it, members below their class. A signature may have further parameters,
if these are optional and come last.
"""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import pytest
import torch
from cases import F64
from oracle import assert_agrees
from torch import Tensor, nn
from torch.nn import Module, functional

from backpack import extend
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.nll_base import NLLLossDerivatives
from backpack.core.derivatives.sigmoid import SigmoidDerivatives
from backpack.extensions import HBP, PCHMP, backprop_extension
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.pchmp import PCHMPBase
from backpack.extensions.secondorder.hbp import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule

INTERFACE = Path(__file__).with_name("public_interface.txt")

# Programs import these, too
PATHS = {
    "backpack": [
        *("backpack", "disable", "extend", "memory_cleanup", "extensions"),
        *("BackpropExtension", "convert_module_to_backpack"),
    ],
    "backpack.core.layers": ["Flatten"],
    "backpack.extensions": [
        *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"),
        *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC"),
        *("SqrtGGNExact", "SqrtGGNMC", "KFAC", "KFLR", "KFRA", "HBP"),
        *("DiagHessian", "BatchDiagHessian", "HMP", "GGNMP", "PCHMP"),
    ],
    "backpack.extensions.firstorder": [
        *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"),
    ],
    "backpack.extensions.secondorder": [
        *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC"),
        *("SqrtGGNExact", "SqrtGGNMC", "KFAC", "KFLR", "KFRA", "HBP"),
        *("DiagHessian", "BatchDiagHessian"),
    ],
    "backpack.extensions.secondorder.hbp": [
        *("LossHessianStrategy", "BackpropStrategy", "ExpectationApproximation"),
        "HBP",
    ],
    "backpack.extensions.curvmatprod": ["HMP", "GGNMP", "PCHMP"],
    "backpack.extensions.curvmatprod.hmp": ["HMPBase"],
    "backpack.extensions.curvmatprod.ggnmp": ["GGNMPBase"],
    "backpack.extensions.curvmatprod.pchmp": ["PCHMPBase"],
}


class Promise(NamedTuple):
    """A line: something in a module, with its signature or value."""

    module: str
    path: Tuple[str, ...]
    signature: Optional[str] = None
    value: Optional[str] = None
    is_static: bool = False

    def __str__(self) -> str:
        """Name the line."""
        return ".".join((self.module, *self.path))


def read() -> Iterator[Promise]:
    """Read the interface."""
    module, owner = "", ""
    for line in INTERFACE.read_text().splitlines():
        text = line.strip()
        if not line.startswith(" "):
            module = text
            yield Promise(module, ())
            continue
        if text.startswith("class "):
            owner = text[len("class ") :]
            yield Promise(module, (owner,))
            continue
        is_member = text.startswith(".")
        name = text.lstrip(".")
        name = name[len("def ") :] if name.startswith("def ") else name
        is_static = name.endswith(" [static]")
        name = name[: -len(" [static]")] if is_static else name
        if " = " in name.split("(")[0]:
            name, value = name.split(" = ", 1)
            signature = None
        else:
            name, signature = name.split("(", 1)
            signature, value = signature[: signature.rindex(")")], None
        path = (owner, name) if is_member else (name,)
        yield Promise(module, path, signature, value, is_static)


PROMISES = list(read())


def find(promise: Promise) -> Any:
    """Import what a line is about."""
    found = import_module(promise.module)
    for name in promise.path:
        found = getattr(found, name)
    return found


def parse(signature: str) -> List[Tuple[str, Optional[str]]]:
    """Split a signature into names and defaults."""
    function = ast.parse(f"def f({signature}): pass").body[0]
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: List[Any] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    parsed = list(zip(positional, defaults))
    if arguments.vararg is not None:
        parsed.append((arguments.vararg, None))
    parsed += list(zip(arguments.kwonlyargs, arguments.kw_defaults))
    if arguments.kwarg is not None:
        parsed.append((arguments.kwarg, None))
    return [(arg.arg, default and ast.unparse(default)) for arg, default in parsed]


@pytest.mark.parametrize("promise", PROMISES, ids=str)
def test_interface(promise: Promise):
    """Each name exists, with its value or signature."""
    found = find(promise)
    if promise.value is not None:
        value = ast.literal_eval(promise.value)
        # the context's state changes
        assert (
            type(found) is type(value) if promise.path[0] == "CTX" else found == value
        )
    if promise.signature is None:
        return
    expected = [(n, d) for n, d in parse(promise.signature) if n not in ("self", "cls")]
    actual = [
        (p.name, None if p.default is p.empty else repr(p.default))
        for p in inspect.signature(found).parameters.values()
        if p.name not in ("self", "cls")
    ]
    by_name: Dict[str, Optional[str]] = dict(actual)
    assert [name for name, _ in actual[: len(expected)]] == [n for n, _ in expected]
    for name, default in expected:
        assert by_name[name] == default, name
    variadic = ("args", "kwargs")
    further = [n for n, d in actual[len(expected) :] if d is None and n not in variadic]
    assert not further, "further parameters must be optional"


@pytest.mark.parametrize("module", PATHS)
def test_paths(module: str):
    """What programs import is there."""
    for name in PATHS[module]:
        assert hasattr(import_module(module), name), name


def test_lines_are_read():
    """The file is read as it is meant: a sample of each kind of line."""
    assert Promise("backpack.extensions.curvature", ()) in PROMISES
    modes = [p for p in PROMISES if p.path == ("FAIL_ERROR",)]
    assert [p.value for p in modes] == ["'ERROR'"]
    assert backprop_extension.FAIL_ERROR == "ERROR"
    (init,) = [p for p in PROMISES if p.path == ("BackpropExtension", "__init__")]
    assert parse(init.signature)[-1] == ("subsampling", "None")


# What is there for programs alone: no quantity calls it


def called(module: Module, *shape: int) -> Module:
    """Call a module, which stores what derivatives need."""
    torch.manual_seed(0)
    extend(module.to(F64))(torch.randn(3, *shape, dtype=F64, requires_grad=True))
    return module


def drawn(module: Module) -> Tensor:
    """Draw something of the shape of a module's output."""
    torch.manual_seed(1)
    return torch.randn_like(module.output)


def residual(modify: str, change: Callable[[Tensor], Tensor]) -> Tuple[Tensor, Tensor]:
    """Multiply with a sigmoid's residual, made positive semi-definite."""
    module = called(nn.Sigmoid(), 4)
    g, z = drawn(module), module.output
    mat = torch.randn(2, *z.shape, dtype=F64)
    args = PCHMP(), module, (None,), (g,), mat, modify
    found = PCHMPBase(SigmoidDerivatives()).modified_residual_mat_prod(*args)
    return found, change(z * (1 - z) * (1 - 2 * z) * g) * mat


def unfolded() -> Tuple[Tensor, Tensor]:
    """Unfold the input of a convolution."""
    module = called(nn.Conv2d(2, 3, 2, padding=1), 2, 3, 3)
    expected = functional.unfold(module.input0, 2, padding=1)
    return Conv2DDerivatives().get_unfolded_input(module), expected


def columns_pulled_back() -> Tuple[Tensor, Tensor]:
    """Pull columns back as an extension of Kronecker factors does."""
    module = called(nn.Linear(4, 2), 4)
    columns = torch.stack([drawn(module), 2 * drawn(module)])
    args = HBP, module, (None,), (None,), columns
    found = HBPBaseModule(LinearDerivatives()).backpropagate_sqrt(*args)
    return found, columns @ module.weight.detach()


SOME = torch.tensor([-1.0, 0.0, 2.0])
BY_HAND: Dict[str, Callable[[], Tuple[Tensor, Tensor]]] = {
    "no-residual": lambda: (Curvature.modify_residual(SOME, "ggn"), 0 * SOME),
    "clip": lambda: (PCHMPBase.zero_negative_elements(SOME), SOME.clamp(min=0)),
    "abs": lambda: (PCHMPBase.to_abs(SOME), SOME.abs()),
    "residual-clip": lambda: residual("clip", lambda x: x.clamp(min=0)),
    "residual-abs": lambda: residual("abs", torch.abs),
    "unfolded-input": unfolded,
    "columns": columns_pulled_back,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str):
    """It computes what its name says."""
    actual, expected = BY_HAND[name]()
    assert_agrees(actual.detach(), expected.detach(), name)


def test_modification_mode():
    """An extension tells what becomes of negative curvature."""
    assert [PCHMP(modify=x).get_modification_mode() for x in ("clip", "abs")] == [
        *("clip", "abs")
    ]


def columns_of_a_sum() -> None:
    """Ask for columns of a sum of loss Hessians."""
    average = ExpectationApproximation.BOTEV_MARTENS
    HBP("ggn", LossHessianStrategy.SUM, BackpropStrategy.SQRT, average)


class Unfinished(NLLLossDerivatives):
    """A loss's derivatives of which methods are missing."""

    def hessian_is_psd(self) -> bool:
        """Tell so."""
        return True

    def _verify_support(self, module: Module) -> None:
        """Support everything."""


def sampled(use_autograd: bool, reduction: str = "sum") -> None:
    """Draw from a distribution that is not defined."""
    loss = extend(nn.MSELoss(reduction=reduction))
    loss(torch.randn(3, 2, requires_grad=True), torch.randn(3, 2))
    Unfinished(use_autograd).sqrt_hessian_sampled(loss, (), ())


REFUSED: Dict[str, Tuple[Callable[[], Any], type, str]] = {
    "not-psd": (
        lambda: Curvature.check_loss_hessian(False, "ggn"),
        ValueError,
        "'ggn' needs a loss whose Hessian is positive semi-definite.*'hessian'",
    ),
    "columns-of-a-sum": (columns_of_a_sum, ValueError, "HBP: a sum of loss Hessians"),
    "no-distribution": (
        lambda: sampled(True),
        NotImplementedError,
        "Unfinished has to define _make_distribution",
    ),
    "no-divisor": (
        lambda: sampled(True, "mean"),
        NotImplementedError,
        "Unfinished has to define _get_mean_normalization",
    ),
    "no-closed-form": (
        lambda: sampled(False),
        NotImplementedError,
        "Unfinished has no closed form.*_compute_sampled_grads_manual",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_hand(name: str):
    """What is missing, or contradicts itself, is said."""
    action, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        action()
