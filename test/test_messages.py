"""What errors and warnings say: which module, what was wrong, and the way out.

Each row is a mistake or a limit that a user can meet, with patterns for the three parts
of the message. Where something needs no module, its function, class or extension has to
be named instead.
"""

import _thread
import ast
import re
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import pytest
import torch
import torch.nn.functional as F
from per_sample import OwnOutput
from torch import Tensor, nn
from torch.nn import Module, Parameter, Sequential
from torch.nn.utils.rnn import pack_sequence

import backpack as package
from backpack import backpack, convert_module_to_backpack, disable, extend
from backpack.context import CTX
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.custom_module.branching import Parallel
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions import (
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    BatchProjectGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.hbp import HBP
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils import errors
from backpack.utils.state import state

N = 4
Y = torch.tensor([0, 1, 2, 0])


class Row(NamedTuple):
    """A mistake, and what is said about it.

    Attributes:
        action: Makes the mistake.
        kind: Class of the error or warning.
        where: Pattern for the module, extension or function.
        what: Pattern for the option or input, and what is wrong with it.
        way_out: Pattern for what to do.
    """

    action: Callable[[], Any]
    kind: type
    where: str
    what: str
    way_out: str


def run(
    model: Module,
    *exts: BackpropExtension,
    loss: Module = None,
    x: Any = None,
    y: Any = Y,
    value: Callable[[Tensor, Module], Tensor] = lambda value, model: value,
    **options: Any,
) -> None:
    """Extend model and loss, and run a backward pass with extensions.

    Args:
        model: The model.
        exts: The extensions.
        loss: The loss. Default: cross-entropy.
        x: The model's input. Default: random numbers ``[N, 3]``.
        y: The target.
        value: What is differentiated, from the loss's value and the model.
        options: Options of the context.
    """
    model, loss = extend(model), extend(loss or nn.CrossEntropyLoss())
    out = model(torch.randn(N, 3) if x is None else x)
    out = loss(out, y) if out.dim() else out
    with backpack(*exts, **options):
        value(out, model).backward()


class OfSlopes(nn.Module):
    """A loss that differentiates the prediction by the model's inputs."""

    def __init__(self, x: Tensor) -> None:
        """Store the inputs."""
        super().__init__()
        self.x = x

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Penalize the derivative."""
        (slope,) = torch.autograd.grad(f.sum(), self.x, create_graph=True)
        return F.cross_entropy(f, y) + slope.square().sum()


def of_slopes() -> None:
    """Run a second-order extension with such a loss."""
    x = torch.randn(N, 3, requires_grad=True)
    run(mlp(), DiagGGNExact(), loss=OfSlopes(x), x=x)


class Slotted:
    """An object without a dictionary, which nobody can look into."""

    __slots__ = ("out",)

    def __init__(self, out: Tensor) -> None:
        """Store a tensor."""
        self.out = out

    def dim(self) -> int:
        """Pretend to be a number."""
        return 0


def nested(layout: torch.layout, *parts: Tensor) -> Tensor:
    """Make a nested tensor of parts, or of two of different lengths."""
    parts = parts or (torch.rand(2, 3), torch.rand(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, on what is a prototype
        return torch.nested.nested_tensor(list(parts), layout=layout)


def on_nested(layout: torch.layout, ext: BackpropExtension) -> None:
    """Run a pass of a model whose input is a nested tensor."""
    pad, x = torch.nested.to_padded_tensor, nested(layout)
    run(Layers(lambda model, x: pad(model.a(x), 0.0).sum(1)), ext, x=x, y=Y[:2])


def nested_queries() -> None:
    """Attend by nested queries that are made of a parameter."""

    def forward(m: Module, x: Tensor) -> Tensor:
        def heads(rows: List[Tensor]) -> Tensor:
            nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            return nested.unflatten(-1, (1, 3)).transpose(1, 2)

        rows = heads([m.b(row).expand(4, 3) for row in x])
        queries = heads([m.a.weight] * len(x))
        attended = F.scaled_dot_product_attention(queries, rows, rows)
        return torch.stack(attended.transpose(1, 2).flatten(-2).unbind()).sum(1)

    run(Layers(forward), BatchGrad())


def nested_inside(layout: torch.layout) -> None:
    """Run a pass of a model that makes a nested tensor, and computes a number."""
    pad = torch.nested.to_padded_tensor
    model = extend(
        Layers(lambda m, x: pad(m.a(nested(layout, *x)), 0.0).square().sum())
    )
    value = model(torch.rand(2, 4, 3))
    with backpack(BatchGrad()):
        value.backward()


def with_nested_parameter(layout: torch.layout, ext: BackpropExtension) -> None:
    """Run a pass of a model that pads a parameter."""
    pad = torch.nested.to_padded_tensor
    model = Layers(lambda model, x: model.a(x) * pad(model.p * 2, 0.0).sum(1))
    model.p = Parameter(nested(layout))
    run(model, ext, x=torch.rand(2, 3), y=Y[:2])


def unseen_nested(x: Tensor) -> Tensor:
    """Make a nested tensor where no operation is seen."""
    with torch._C.DisableTorchFunction():
        return torch.nested.as_nested_tensor(list(x.unbind()))


AVERAGED = "E[J^T E(H) J]"  # an option of HBP


def mlp(*between: Module) -> Module:
    """Make a model with modules between two linear layers."""
    return Sequential(nn.Linear(3, 3), *between, nn.Linear(3, 3))


class Generated(Module):
    """Multiplies with what a layer makes of a parameter."""

    def __init__(self):
        """Create both."""
        super().__init__()
        self.z, self.layer = Parameter(torch.randn(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with ``[N, 3]``."""
        return x * self.layer(self.z)


def without_gradient(ext: Any, where: str) -> None:
    """Take a parameter for what a function does not differentiate."""

    def forward(m: Module, x: Tensor) -> Tensor:
        t = m.get_parameter(where).expand(len(x))
        losses = F.cosine_embedding_loss(m.a(x), x, t, reduction="none")
        return m.b(x) + losses[:, None]

    model = Layers(forward)
    model.inner = nn.Module()
    owner, _, name = where.rpartition(".")
    model.get_submodule(owner).register_parameter(name, nn.Parameter(torch.ones(())))
    run(model, ext)


def called_with_something_else() -> None:
    """Walk from module to module where these have got computed parameters."""
    model, loss = extend(mlp()), extend(nn.CrossEntropyLoss())
    given = {name: param * 1.5 for name, param in model.named_parameters()}
    value = loss(torch.func.functional_call(model, given, torch.rand(N, 3)), Y)
    with backpack(DiagHessian()):
        value.backward()


def not_twice() -> None:
    """Multiply with the Hessian of a layer that can't be differentiated twice."""
    model = Sequential(nn.EmbeddingBag(4, 3), nn.Tanh())
    run(model, HMP(), x=torch.tensor([[0, 1], [2, 2], [3, 1], [0, 0]]))
    model[0].weight.hmp(torch.rand(4, 3))


class Segments(Module):
    """Products of features next to each other, which have one derivative."""

    def __init__(self):
        """Create the layer, and the lengths of segments."""
        super().__init__()
        self.layer = nn.Linear(3, 6)
        self.register_buffer("lengths", torch.tensor([[2, 2, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3]`` to logits."""
        lengths = self.lengths.expand(x.shape[0], 3)
        return torch.segment_reduce(self.layer(x), "prod", lengths=lengths, axis=1)


def not_twice_inside() -> None:
    """Compute the Hessian's diagonal behind such an operation."""
    model = Segments()
    with backpack(DiagHessian()):
        loss, model = extend(nn.CrossEntropyLoss()), extend(model, use_converter=True)
        loss(model(torch.rand(4, 3)), torch.tensor([0, 1, 2, 0])).backward()


def product_with(vector: Any) -> None:
    """Multiply a vector of another type, or what is none."""
    model = mlp()
    run(model, HMP())
    model[0].weight.hmp(vector)


def product_after_step() -> None:
    """Multiply with the Hessian after the parameters were changed."""
    model = mlp()
    run(model, HMP())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model[0].weight.hmp(torch.rand(3, 3))


class Layers(Module):
    """Three layers, and a function of them."""

    def __init__(self, function: Callable[..., Tensor]):
        """Create the layers."""
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tanh = nn.Tanh()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the function."""
        return self.function(self, *inputs)


class OfOne(Layers):
    """The same of one input, which the converter can open."""

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.function(self, x)


def through_complex(m: Layers, x: Tensor) -> Tensor:
    """Compute with complex numbers between two layers."""
    return m.b(torch.fft.fft(m.a(x)).real)


def inputs_through_complex(m: Layers, x: Tensor) -> Tensor:
    """Compute with complex numbers in front of all layers, of a parameter."""
    return m.a((torch.fft.fft(x) * m.b.bias).abs())


class NoisyScale(Module):
    """Draws random numbers, and has a parameter."""

    def __init__(self):
        """Create the parameter."""
        super().__init__()
        self.scale = Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[N, 3]`` with something else in each call."""
        self.calls += 1
        return self.calls * self.scale * x


class CoupledLoss(Module):
    """A loss of the batch's mean."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute a loss of ``[N, 3]``."""
        return f.mean(0).pow(2).sum()


class ComplexLoss(Module):
    """A loss of complex numbers."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the mean of squared absolute values."""
        return f.abs().square().mean()


class ConcaveLoss(Module):
    """A loss whose Hessian is negative."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute a loss of ``[N, 3]``."""
        return -f.pow(2).sum()


class LossOfParts(Module):
    """A loss that takes its prediction in a tuple, or in a dictionary."""

    def forward(self, parts: Any, y: Tensor) -> Tensor:
        """Compute a loss of a part ``[N, 3]``."""
        return F.cross_entropy(parts[0], y)


def lose_parts(kind: Callable, ext: BackpropExtension) -> None:
    """Run a backward pass of a loss that takes its prediction in something else."""
    model, loss = extend(mlp()), extend(LossOfParts())
    value = loss(kind(model(torch.randn(N, 3))), Y)
    with backpack(ext):
        value.backward()


class NoRule(FirstOrderBackpropExtension):
    """A user's extension that knows no layer by default."""

    def __init__(self, mode: str, rules: Optional[Dict] = None):
        """Choose what happens on a layer."""
        super().__init__("no_rule", rules or {}, fail_mode=mode)


class Misspelled(FirstOrderModuleExtension):
    """A user's rule with a mistake."""

    def __init__(self):
        """List the parameters."""
        super().__init__(params=["wight", "bias"])

    def bias(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Return the gradients ``[N, 3]``."""
        return g_out[0]

    wight = bias


class Records(Module):
    """Sets an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        """Remember ``[N, *]``."""
        self.last = x.sin()
        return self.last


class Aside(nn.Linear):
    """Keeps a number that was computed before its output."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, *]``."""
        y = x @ self.weight.T
        self.aside = y.sum()
        return y + self.bias


class ByMode(Module):
    """Does one thing in training, another one in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, *]``."""
        return x.sin() if self.training else x.cos()


def released(keeps: bool = True) -> None:
    """Run a second backward pass without retaining what it needs."""
    model, loss = extend(mlp()), extend(nn.CrossEntropyLoss())
    value = loss(model(torch.randn(N, 3)), Y)
    if not keeps:
        del loss
    with backpack(BatchGrad()):
        value.backward()
        value.backward()


def released_operation() -> None:
    """The same from what was computed on the way to an output that is gone."""
    model = extend(Aside(3, 2))
    model(torch.randn(N, 3))
    with backpack(BatchGrad()):
        model.aside.backward()
        model.aside.backward()


def modified(ext: BackpropExtension, make: Callable[[], Module]) -> None:
    """Modify a layer's input between forward and backward pass."""
    model, x = extend(make()), torch.randn(N, 3)
    with torch.autocast(x.device.type, torch.bfloat16):  # autograd keeps a copy
        out = model(x)
    value = extend(nn.CrossEntropyLoss())(out.float(), Y)
    x.add_(1.0)
    with backpack(ext):
        value.backward()


def overwriting(model: Module, x: Tensor) -> Tensor:
    """Modify the input of a layer after its call."""
    h = model.a(x)
    out = model.b(model.tanh(h))
    h.mul_(2.0)
    return out


def packed() -> None:
    """Walk back through a recurrent layer with samples of different lengths."""
    with torch.device("cpu"):  # where PyTorch wants the lengths
        layer = extend(nn.LSTM(3, 3, batch_first=True))
        inputs = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
        value = extend(nn.MSELoss())(layer(inputs)[0].data, torch.ones(3, 3))
    with backpack(DiagHessian()):
        value.backward()


def not_extended_batch_norm(ext: BackpropExtension) -> None:
    """Put a batch normalization between layers that are extended one by one."""
    model = mlp(nn.BatchNorm1d(3))
    for layer in (model[0], model[2]):
        extend(layer)
    value = extend(nn.CrossEntropyLoss())(model(torch.randn(N, 3)), Y)
    with backpack(ext):
        value.backward()


def without_loss(ext: BackpropExtension) -> None:
    """Run a second-order extension with a functional loss."""
    model = extend(mlp())
    value = F.cross_entropy(model(torch.randn(N, 3)), Y)
    with backpack(ext):
        value.backward()


def two_batches() -> Module:
    """Make a model that adds what a layer has computed for another batch."""
    other = extend(nn.Linear(3, 3))(torch.ones(2, 3))
    return Layers(lambda m, x: m.b(m.a(x) + other.repeat(2, 1)))


@torch.library.custom_op("backpack_test::count", mutates_args=())
def counted(x: Tensor) -> Tensor:
    """Give samples another order in each call."""
    CALLS.append(len(CALLS))
    return x.roll(CALLS[-1], 0)


CALLS: List[int] = []
counted.register_autograd(lambda ctx, g: g.roll(-CALLS[-1], 0))


def between_children(forward: Callable[..., Tensor]) -> None:
    """Extend only parts of what computes the prediction."""
    torch.manual_seed(0)
    a, b, plain = extend(nn.Linear(3, 3)), extend(nn.Linear(3, 3)), nn.Linear(3, 3)
    sum_of_both = extend(Layers(lambda m, x, y: m.a(x) + m.b(y)))
    loss = extend(nn.CrossEntropyLoss())
    value = loss(forward(torch.randn(N, 3), a, b, plain, sum_of_both), Y)
    with backpack(BatchGrad()):
        value.backward()


def dropped_hooks() -> None:
    """Remove the hooks."""
    model, loss = extend(mlp()), extend(nn.CrossEntropyLoss())
    CTX.remove_hooks()
    value = loss(model(torch.randn(N, 3)), Y)
    with backpack(BatchGrad()):
        value.backward()


def after_a_step() -> None:
    """Differentiate a loss through a step that was taken before."""
    model, loss = extend(Layers(lambda m, x: m.b(m.a(x).tanh()))), nn.CrossEntropyLoss()
    x, params = torch.randn(N, 3), dict(model.named_parameters())
    values = params.values()
    steps = torch.autograd.grad(loss(model(x), Y), values, create_graph=True)
    moved = {name: p - g for (name, p), g in zip(params.items(), steps)}
    value = loss(torch.func.functional_call(model, moved, (x,)), Y)
    with backpack(BatchGrad()):
        value.backward()


def without_hooks() -> None:
    """Take the hooks off a layer."""
    model, loss = extend(mlp()), extend(nn.CrossEntropyLoss())
    model[1]._forward_hooks.clear()
    model[1]._forward_pre_hooks.clear()
    value = loss(model(torch.randn(N, 3)), Y)
    with backpack(DiagHessian()):
        value.backward()


def extended_late() -> None:
    """Extend after the forward pass."""
    model = mlp()
    value = model(torch.randn(N, 3)).sum()
    extend(model)
    with backpack(BatchGrad()):
        value.backward()


def nothing_extended(*parts: Module) -> None:
    """Extend nothing, or parts without parameters only."""
    model = Sequential(mlp(), *map(extend, parts))
    loss = extend(nn.CrossEntropyLoss()) if parts else nn.CrossEntropyLoss()
    value = loss(model(torch.randn(N, 3)), Y)
    del loss  # the graph owns it until the backward pass
    with backpack(BatchGrad()):
        value.backward()


def in_disable(model: Module, x: Tensor) -> Tensor:
    """Call a model where nothing is stored."""
    with disable():
        return model(x)


def not_recorded(call: Callable[[Module, Tensor], Tensor], layer: Module) -> None:
    """Extend a model's parts, one of which does not have its calls recorded."""
    model = Sequential(extend(nn.Linear(3, 3)), extend(layer))
    with backpack(BatchGrad()):
        call(model[1], model[0](torch.randn(N, 3))).sum().backward()


def part_used_outside() -> None:
    """Use the parameter of a layer that is extended, but in no extended model."""
    model = Sequential(extend(nn.Linear(3, 3)), extend(nn.Linear(3, 1)))
    value = model(torch.randn(N, 3)).sum() * model[1].weight.sum()
    with backpack(BatchGrad()):
        value.backward()


def used_before_its_parts() -> None:
    """Use a parameter on inputs, in a method of the model that calls its parts."""
    model = extend(Layers(lambda m, x: m.a(x)))
    hidden = torch.randn(N, 3) * model.a.bias
    with backpack(BatchGrad()):
        model.b(model.a(hidden)).sum().backward()


class Bypassing(Layers):
    """A model whose call runs no hooks, as those of some packages do."""

    __call__ = Layers.forward


def parameter_kept_positive(inner: Callable[[Module, Tensor], Tensor]) -> None:
    """Call layers with parameters, in a model whose own call is not seen."""

    def forward(m: Module, x: Tensor) -> Tensor:
        return m.tanh(inner(m, m.c)) * m.tanh(m.d) * x.sum() - m.a.bias

    model = Bypassing(forward)
    model.c, model.d = (nn.Parameter(torch.randn(s)) for s in [(1, 3), (1,)])
    extend(model)
    with backpack(BatchGrad()):
        model(torch.randn(N, 3)).square().sum().backward()


def subsampled_vector() -> None:
    """Select samples of a prediction that has no batch axis."""
    loss = extend(nn.CrossEntropyLoss())
    loss(torch.randn(3, requires_grad=True), torch.tensor(1))
    CrossEntropyLossDerivatives().sqrt_hessian(loss, (), (), subsampling=[0])


def integer_input() -> None:
    """Ask for the derivative with respect to indices."""
    layer = extend(nn.Embedding(3, 2))
    out = layer(torch.tensor([0, 1]))
    EmbeddingDerivatives().jac_t_mat_prod(layer, (), (), out[None])


def wrong_shape() -> None:
    """Multiply with a matrix that does not fit."""
    layer = extend(nn.Linear(3, 2))
    layer(torch.randn(N, 3))
    LinearDerivatives().jac_t_mat_prod(layer, (), (), torch.randn(5, N, 3))


def unequal_sums() -> None:
    """Use a parameter in a term that no module computes, and check."""
    run(
        mlp(),
        BatchGrad(),
        check=True,
        value=lambda value, m: value + m[0].weight.pow(2).sum(),
    )


def hook_on_a_weight() -> None:
    """Change a gradient of the whole batch, and check."""
    model = mlp()
    model[0].weight.register_hook(lambda g: 3 * g)
    run(model, BatchGrad(), check=True)


SCRIPTS: Dict[str, Callable[[Module], Module]] = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, torch.randn(N, 3)),
}
# Ways around the record of a call: how to call the layer, and the layer
NOT_RECORDED = {
    "function": (lambda m, x: F.linear(x, m.weight, m.bias), nn.Linear(3, 3)),
    "disabled": (in_disable, nn.Linear(3, 3)),
    "vmap": (lambda m, x: torch.func.vmap(m)(x), nn.Linear(3, 3)),
}
SEQUENCE = Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, 3))
NORM = "BatchNorm1d"

OPTIONS: Dict[str, Row] = {
    **{
        f"mc-samples-{value}": Row(
            lambda value=value: KFAC(mc_samples=value),
            ValueError,
            "KFAC",
            f"mc_samples must be a positive integer, got {value}",
            "mc_samples=1",
        )
        for value in (0, -1, 1.5, True, None, torch.tensor(-2))
    },
    **{
        f"generator-{ext.__name__}": Row(
            lambda ext=ext: ext(generator=0),
            ValueError,
            ext.__name__,
            "generator must be a torch.Generator or None, got 0",
            "manual_seed",
        )
        for ext in (DiagGGNMC, BatchProjectGrad)
    },
    **{
        f"subsampling-{value}": Row(
            lambda value=value: BatchGrad(subsampling=value),
            ValueError,
            "BatchGrad",
            f"subsampling must be None, or select.*Got {re.escape(repr(value))}",
            r"subsampling=\[0, 2\]",
        )
        for value in (
            *(0, "01", b"01", [0.5], [True, 0], torch.tensor(1), [[0, 1]]),
            *(torch.ones(2), torch.ones(2, 2, dtype=torch.bool)),
            slice(None, None, -1),
        )
    },
    "subsampling-outside-BatchGrad": Row(
        lambda: run(mlp(), BatchGrad(subsampling=[0, N])),
        IndexError,
        "BatchGrad",
        rf"subsampling=\[0, {N}\] selects sample {N}, but the batch has {N} samples",
        f"from -{N} to {N - 1}",
    ),
    "subsampling-outside-SqrtGGNExact": Row(
        lambda: run(mlp(), SqrtGGNExact(subsampling=[-N - 1])),
        IndexError,
        "SqrtGGNExact",
        f"selects sample {-N - 1}, but the batch has {N} samples",
        f"from -{N} to {N - 1}",
    ),
    **{
        f"subsampling-mask-{len(mask)}": Row(
            lambda mask=mask: run(mlp(), BatchGrad(subsampling=mask)),
            IndexError,
            "BatchGrad",
            f"a mask of length {len(mask)}, but the batch has {N} samples",
            "one entry for each",
        )
        for mask in ([True] * (N - 1), [True] + [False] * N)
    },
    "class": Row(
        lambda: backpack(BatchGrad),
        ValueError,
        r"backpack\(\.\.\.\)",
        "instances of extensions.*BatchGrad",
        r"Did you mean BatchGrad\(\)\?",
    ),
    "number": Row(
        lambda: backpack(3),
        ValueError,
        r"backpack\(\.\.\.\)",
        "instances of extensions.*got 3",
        r"backpack\(BatchGrad\(\)\)",
    ),
    "list": Row(
        lambda: backpack([BatchGrad(), BatchL2Grad()]),
        ValueError,
        r"backpack\(\.\.\.\)",
        "instances of extensions.*got \\[",
        r"Put a star.*backpack\(\*extensions\)",
    ),
    "extension-hook": Row(
        lambda: backpack(BatchGrad(), extension_hook=3),
        ValueError,
        r"backpack\(extension_hook=\.\.\.\)",
        "expects a function.*got 3",
        "for example extension_hook=print",
    ),
    **{
        f"context-{option}-{value}": Row(
            lambda option=option, value=value: backpack(**{option: value}),
            ValueError,
            r"backpack\(\.\.\.\)",
            f"{option} must be one of",
            f"got {value!r}",
        )
        for option, value in (("check", "no"), ("gradient", None))
    },
    "extend-class": Row(
        lambda: extend(nn.Linear),
        TypeError,
        r"extend\(\.\.\.\)",
        r"expects an instance of torch\.nn\.Module.*Linear",
        r"Did you mean extend\(Linear\(\.\.\.\)\)\?",
    ),
    "extend-function": Row(
        lambda: extend(F.cross_entropy, use_converter=True),
        TypeError,
        r"extend\(\.\.\.\)",
        r"expects an instance of torch\.nn\.Module.*cross_entropy",
        r"use a module, like CrossEntropyLoss\(\)",
    ),
    "extend-two": Row(
        lambda: extend(mlp(), nn.CrossEntropyLoss()),
        TypeError,
        r"extend\(\.\.\.\)",
        "takes one module",
        "Call it for each of them",
    ),
    **{
        f"dense-limit-{limit}": Row(
            lambda limit=limit: KFAC(dense_limit=limit),
            ValueError,
            "KFAC: dense_limit",
            "must be a number of rows",
            f"got {limit!r}",
        )
        for limit in ("1e5", float("nan"), -1)
    },
    **{
        f"extend-{name}": Row(
            lambda function=function: extend(mlp(function(nn.PReLU()))),
            NotImplementedError,
            "'1' of Sequential",
            "torch.jit.*no Python hooks",
            "Extend the module it was made from",
        )
        for name, function in SCRIPTS.items()
    },
    "fail-mode": Row(
        lambda: BackpropExtension("field", {}, fail_mode="WARN"),
        AssertionError,
        "BackpropExtension",
        "fail_mode.*got 'WARN'",
        "one of.*'WARNING'",
    ),
    "registered-twice": Row(
        lambda: BatchGrad().set_module_extension(nn.Linear, ModuleExtension([])),
        ValueError,
        "BatchGrad",
        "already.*for Linear",
        "overwrite=True",
    ),
    "no-method": Row(
        lambda: ModuleExtension(params=["weight"]),
        NotImplementedError,
        "ModuleExtension",
        "no method 'weight'",
        r"Define `def weight\(self, ext, module, g_inp, g_out, bpQuantities\)`",
    ),
    "weight-sharing": Row(
        lambda: KFLR(weight_sharing="both"),
        ValueError,
        "KFLR",
        "weight_sharing.*got 'both'",
        "one of.*'expand', 'reduce'",
    ),
    "fisher-type": Row(
        lambda: DiagGGNMC(fisher_type="exact"),
        ValueError,
        "DiagGGNMC",
        "fisher_type.*got 'exact'",
        "one of.*'mc', 'empirical'",
    ),
    "modify": Row(
        lambda: PCHMP(modify="square"),
        ValueError,
        "PCHMP",
        "modify.*got 'square'",
        "one of.*'clip', 'abs'",
    ),
    "strategy": Row(
        lambda: HBP("ggn", "all", "sqrt", "no"),
        AssertionError,
        "LossHessianStrategy",
        "'all'",
        "Choose one of.*'exact'",
    ),
    "permute-axis-0": Row(
        lambda: Permute(1, 0),
        ValueError,
        "Permute",
        r"got \(1, 0\).*axis 0",
        "permute the others",
    ),
    "permute-no-order": Row(
        lambda: Permute(0, 3), ValueError, "Permute", r"got \(0, 3\)", "each axis once"
    ),
    "permute-no-pair": Row(
        lambda: Permute(0, 1, 2, init_transpose=True),
        ValueError,
        r"Permute\(init_transpose=True\)",
        r"two axes, got \(0, 1, 2\)",
        r"Permute\(1, 2, init_transpose=True\)",
    ),
    "scale": Row(
        lambda: ScaleModule("2"),
        ValueError,
        "ScaleModule",
        "float.*got '2' of type str",
        r"float\(weight\)",
    ),
}

SAMPLES: Dict[str, Row] = {
    **{
        f"batch-norm-{ext.__name__}": Row(
            lambda ext=ext: run(mlp(nn.BatchNorm1d(3)), ext()),
            kind,
            rf"{ext.__name__}: {NORM}",
            "training mode.*statistics",
            r"\.eval\(\).*GroupNorm",
        )
        for ext, kind in (
            (BatchGrad, UserWarning),
            (BatchL2Grad, NotImplementedError),
            (DiagGGNExact, NotImplementedError),
            (DiagHessian, NotImplementedError),
        )
    },
    **{
        f"nested-{layout}-{ext.__name__}": Row(
            lambda ext=ext, layout=layout: on_nested(layout, ext()),
            NotImplementedError,
            rf"{ext.__name__}: .*Linear\(.*\('a' of Layers\)",
            "samples are after what has made a nested tensor",
            "pad it instead",
        )
        for layout in (torch.strided, torch.jagged)
        for ext in (BatchGrad, DiagGGNExact, KFAC)
    },
    **{
        f"nested-inside-{layout}": Row(
            lambda layout=layout: nested_inside(layout),
            NotImplementedError,
            "BatchGrad: it is not known where the samples are",
            "after what has made a nested tensor",
            "pad it instead",
        )
        for layout in (torch.strided, torch.jagged)
    },
    **{
        f"nested-parameter-{layout}": Row(
            lambda layout=layout: with_nested_parameter(layout, BatchGrad()),
            NotImplementedError,
            "BatchGrad is not defined for parameters",
            "nested tensors, which have no shape: 'p' of Layers",
            "Use dense parameters: a padded one, or one for each component",
        )
        for layout in (torch.strided, torch.jagged)
    },
    "nested-queries": Row(
        nested_queries,
        NotImplementedError,
        "BatchGrad: it is not known where the samples are",
        "after what has made a nested tensor",
        "pad it instead",
    ),
    "nested-unseen": Row(
        lambda: run(
            Layers(
                lambda model, x: torch.nested.to_padded_tensor(
                    unseen_nested(model.a(x)) * 2.0, 0.0
                )
            ),
            BatchGrad(),
        ),
        NotImplementedError,
        r"BatchGrad: .* of Layers",
        "samples are after what has made a nested tensor",
        "pad it instead",
    ),
    **{
        f"along-samples-{type(layer).__name__}-{ext.__name__}": Row(
            lambda ext=ext, layer=layer: run(
                Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 3)), ext()
            ),
            NotImplementedError,
            rf"{ext.__name__}: .*{re.escape(str(layer))} \('1' of Sequential\)",
            rf"samples have met in `{operation}` on \[4, 4\]",
            "each sample be computed by itself, along other axes",
        )
        for layer, operation in (
            (nn.Softmax(dim=0), "softmax"),
            (nn.LogSoftmax(dim=-2), "log_softmax"),
            (nn.LayerNorm([4, 4]), "layer_norm"),
            (nn.RMSNorm([4, 4], elementwise_affine=False), "rms_norm"),
        )
        for ext in (BatchGrad, BatchL2Grad, DiagGGNExact, KFLR, DiagHessian)
    },
    "rearranged": Row(
        lambda: run(
            Sequential(nn.Linear(3, 6), nn.Flatten(0), nn.Unflatten(0, (8, 3))),
            DiagHessian(),
            y=torch.arange(8) % 3,
        ),
        NotImplementedError,
        r"DiagHessian: Unflatten\(",
        "input with 24 entries on axis 0 to an output with 8",
        "Rearrange other axes",
    ),
    **{
        f"mixed-{name}": Row(
            lambda mix=mix: run(Layers(lambda m, x, mix=mix: m.b(mix(x))), BatchGrad()),
            NotImplementedError,
            "BatchGrad: samples have met",
            r"in `add` on \[4, 3\] and \[4, 3\]",
            r"\), or mix them before the model is called: .* are the samples then\.$",
        )
        for name, mix in (
            ("data", lambda x: 0.3 * x + 0.7 * x.flip(0)),
            ("data-detached", lambda x: (0.3 * x + 0.7 * x.flip(0)).detach()),
            ("data-by-a-permutation", lambda x: x + x[torch.tensor([2, 0, 3, 1])]),
        )
    },
    "parameter-for-a-prediction": Row(
        lambda: run(Layers(lambda m, x: m.b.weight), BatchGrad(), y=Y[:3]),
        NotImplementedError,
        r"'b\.weight' of Layers",
        "Parameters are used where extensions can't see it",
        "what no input enters belongs to no sample",
    ),
    "jacobian-of-a-loss": Row(
        lambda: run(Layers(lambda m, x: m.b(x).square().mean()), BatchJacobian()),
        NotImplementedError,
        "BatchJacobian: .* what Layers .*is computed from",
        "samples have met in `mean`",
        "each sample be computed by itself, along other axes",
    ),
    "jacobian-of-other-numbers-of-rows": Row(
        lambda: run(
            Layers(lambda m, x: m.b(x)[torch.tensor([2, 0, 3, 1, 1])]),
            BatchJacobian(),
            y=torch.tensor([0, 1, 2, 0, 1]),
        ),
        NotImplementedError,
        "BatchJacobian: .* output of Layers",
        "different numbers of features",
        "Return a tensor in which each sample has as many entries",
    ),
    "loss-that-differentiates-its-prediction": Row(
        of_slopes,
        NotImplementedError,
        "OfSlopes",
        "by something that led to it",
        "return it as a part of the prediction",
    ),
    "jacobian-of-an-object": Row(
        lambda: run(
            Layers(lambda m, x: Slotted(m.b(x).tanh())),
            BatchJacobian(),
            value=lambda value, model: value.out.sum(),
        ),
        NotImplementedError,
        "BatchJacobian .*output of an extended model",
        "Found: none",
        "let it return tensors .*in tuples, lists and dictionaries",
    ),
    "jacobian-of-complex-numbers": Row(
        lambda: run(
            Layers(lambda m, x: torch.complex(m.b(x), x).sum(1)),
            BatchJacobian(),
            loss=ComplexLoss(),
        ),
        NotImplementedError,
        "BatchJacobian .*output of an extended model",
        "Found: none",
        "return tensors of real numbers .*view_as_real",
    ),
    "loss-of-complex-numbers": Row(
        lambda: run(
            Layers(lambda m, x: torch.complex(m.b(x), x)), KFLR(), loss=ComplexLoss()
        ),
        NotImplementedError,
        r"ComplexLoss\(\)",
        "the prediction consists of complex numbers",
        "Let the model return `torch.view_as_real",
    ),
    "calls-of-other-batches": Row(
        lambda: run(
            mlp(),
            BatchGrad(),
            value=lambda value, model: value + model(torch.ones(2, 3)).sum(),
        ),
        NotImplementedError,
        r"'1\.weight' of Sequential",
        r"different numbers of samples \(\[2, 4\]\)",
        "each call have all samples, or give each one parameters of its own",
    ),
    "batch-norm-not-extended": Row(
        lambda: not_extended_batch_norm(DiagGGNExact()),
        NotImplementedError,
        NORM,
        "training mode, which is not extended",
        r"\.eval\(\)",
    ),
    **{
        f"two-batches-{ext.__name__}": Row(
            lambda ext=ext: run(two_batches(), ext()),
            NotImplementedError,
            rf"{ext.__name__}: .* of Layers",
            "not known where the samples are after another batch",
            "Replace this operation",
        )
        for ext in (BatchGrad, DiagGGNExact)
    },
    "operator-with-a-counter": Row(
        lambda: run(Layers(lambda m, x: m.b(counted(m.a(x)))), BatchGrad()),
        NotImplementedError,
        "BatchGrad: .* of Layers",
        r"not known where the samples are after `backpack_test::count` \(called again",
        "Replace this operation",
    ),
    **{
        f"between-children-{name}": Row(
            lambda forward=forward: between_children(forward),
            NotImplementedError,
            "BatchGrad: ",
            what,
            "extend the model as a whole if only parts of it are|computed by itself",
        )
        for name, forward, what in (
            (
                "softmax",
                lambda x, a, b, *_: b(a(x).tanh().softmax(0).sin()),
                "samples have met in `softmax`, so",
            ),
            (
                "gate-of-zero",
                lambda x, a, b, *_: b((a(x) + 0 * a(x).roll(1, 0)).reshape(2, -1, 3))[
                    0
                ].repeat(2, 1),
                "samples have met in `add`, so",
            ),
            (
                "in-place",
                lambda x, a, b, plain, both: (lambda y: y.sub_(y.mean(0)))(both(x, x)),
                "samples have met in `mean`, so",
            ),
            (
                "two-batches",
                lambda x, a, b, *_: b(a(x).sin() + a(x[:2]).repeat(2, 1)),
                "not known where.* after `add` of batches of 2 and 4 samples",
            ),
            (
                "shared-positions",  # of which there seems to be one sample
                lambda x, a, b, *_: b(a(x[:1]).tanh() + x),
                "not known where.* after `add` of batches of 1 and 4 samples",
            ),
            (
                "shared-positions-expanded",
                lambda x, a, b, *_: b(a(x[:1]).expand(4, -1) * x),
                "not known where.* after `(expand|mul)` of batches of 1 and 4 samples",
            ),
            (
                "several-inputs",
                lambda x, a, b, plain, both: both(plain(x), plain(x).sin()),
                "not known where.* after inputs besides the first that no extended",
            ),
        )
    },
    "check": Row(
        unequal_sums,
        RuntimeError,
        "'0.weight' of Sequential",
        "check=True.*do not add up.*a term of the loss belongs to no sample",
        "in a backward pass of its own, outside of the context",
    ),
    "check-of-a-hook": Row(
        hook_on_a_weight,
        RuntimeError,
        "'0.weight' of Sequential",
        "check=True.*do not add up.*which has hooks",
        "Remove them, or change gradients at outputs of modules",
    ),
    "separate-term": Row(
        lambda: run(
            Sequential(extend(mlp()), nn.Tanh()),
            BatchGrad(),
            value=lambda v, m: v + m[0][0].weight.pow(2).sum() + m[0][1].weight.sum(),
        ),
        UserWarning,
        ": '0.0.weight' of Sequential, '0.1.weight' of Sequential",
        "terms of the loss that belong to no sample",
        "Add what they contribute by hand",
    ),
    "used-outside": Row(
        after_a_step,
        NotImplementedError,
        "'a.weight' of Layers",
        "used where extensions can't see it: .*, 'b.bias' of Layers. ",
        "contains a derivative of the network: .* inside of `backpack.disable",
    ),
    "used-before-its-parts": Row(
        used_before_its_parts,
        NotImplementedError,
        "'a.bias' of Layers",
        r"used where extensions can't see it: .* \(by `mul`\)",
        "Use them on inputs while an extended module is being called .*`forward`",
    ),
    **{
        f"parameter-{name}": Row(
            lambda inner=inner: parameter_kept_positive(inner),
            NotImplementedError,
            "'c' of Bypassing",
            r"used where extensions can't see it: .*, 'd' of Bypassing",
            "while an extended module is being called",
        )
        for name, inner in [
            ("kept-positive", lambda m, p: p),
            ("through-a-layer", lambda m, p: m.b(p)),
        ]
    },
    "met-in-a-function": Row(
        lambda: run(
            Layers(lambda m, x: F.batch_norm(m.a(x), None, None, training=True)),
            BatchGrad(),
        ),
        NotImplementedError,
        "BatchGrad: samples have met in `batch_norm` .* of Layers",
        "quantities of individual samples are not defined",
        r"normalize by running averages \(`\.eval\(\)`",
    ),
    "no-input-enters": Row(
        lambda: run(Layers(lambda m, x: m.a.bias.expand(len(x), 3)), BatchGrad()),
        NotImplementedError,
        "'a.bias' of Layers",
        "used where extensions can't see it",
        r"let the inputs enter the prediction, if only by `\+ 0 \* input`",
    ),
    "used-outside-of-a-part": Row(
        part_used_outside,
        NotImplementedError,
        r"'weight' of Linear\(in_features=3, out_features=1, bias=True\)",
        "samples have met in `sum`",
        "compute this part of the loss in a backward pass outside of the context",
    ),
    "sequence-first": Row(
        lambda: run(
            Sequential(nn.RNN(3, 3), ReduceTuple(), Permute(0, 2, 1)),
            KFRA(),
            x=torch.randn(2, N, 3),
            y=torch.zeros(2, N, dtype=torch.long),
        ),
        NotImplementedError,
        r"KFRA: RNN\(3, 3\)",
        "samples on axis 1 of its input",
        "Use batch_first=True",
    ),
    "packed": Row(
        packed,
        NotImplementedError,
        r"DiagHessian: LSTM\(3, 3, batch_first=True\)",
        "PackedSequence",
        "Pass a padded tensor.*HMP",
    ),
    "pad-axis-0": Row(
        lambda: run(
            Sequential(nn.Linear(3, 3), Pad((0, 0, 1, 0))),
            DiagHessian(),
            x=torch.ones(3, 3),
        ),
        ValueError,
        r"Pad\(",
        "axis 0.*got pad=",
        "at most 2 sizes",
    ),
    "slice-axis-0": Row(
        lambda: run(
            Sequential(nn.Linear(3, 3), Slicing((slice(1, None),))),
            DiagHessian(),
            y=Y[1:],
        ),
        ValueError,
        "Slicing",
        "axis 0.*got slice",
        r"full slice \(slice\(None\)\)",
    ),
}

SECOND_ORDER: Dict[str, Row] = {
    **{
        f"no-loss-{ext.__name__}": Row(
            lambda ext=ext: without_loss(ext()),
            AssertionError,
            rf"{ext.__name__} \(field '{ext().savefield}'\).*Linear.*'1' of Sequential",
            "no extended loss",
            r"returns a single number .* `lossfunc = extend\(lossfunc\)`",
        )
        for ext in (DiagGGNExact, KFAC, KFRA, DiagHessian, HMP)
    },
    "no-reduction": Row(
        lambda: run(
            mlp(),
            KFLR(),
            loss=nn.CrossEntropyLoss(reduction="none"),
            value=lambda value, model: value.sum(),
        ),
        ValueError,
        r"KFLR.*CrossEntropyLoss\(\)",
        r"scalar output.*shape \[4\]",
        "reduction='mean' or reduction='sum'",
    ),
    "scaled": Row(
        lambda: run(mlp(), DiagGGNExact(), value=lambda value, model: 0.5 * value),
        UserWarning,
        r"CrossEntropyLoss\(\)",
        r"modified.*0\.5, not 1",
        "from the loss module's output itself",
    ),
    "negative": Row(
        lambda: run(mlp(), DiagGGNExact(), value=lambda value, model: -value),
        ValueError,
        r"CrossEntropyLoss\(\)",
        r"multiplied by -1\.0.*not positive semi-definite",
        "positive factor.*DiagHessian",
    ),
    "coupled-loss": Row(
        lambda: run(mlp(), KFLR(), loss=CoupledLoss()),
        NotImplementedError,
        r"KFLR: .* of CoupledLoss\(\)",
        r"samples have met in `mean` on \[4, 3\]",
        "Let each sample be computed by itself",
    ),
    "concave-loss": Row(
        lambda: run(mlp(), KFLR(), loss=ConcaveLoss()),
        ValueError,
        "ConcaveLoss",
        "not positive semi-definite.*eigenvalues between",
        "Use a loss that is convex",
    ),
    **{
        f"loss-of-a-{name}-{ext.__name__}": Row(
            partial(lose_parts, kind, ext()),
            NotImplementedError,
            r"LossOfParts\(\)",
            f"its first argument.*is no tensor but a {name}",
            "Let it take a tensor",
        )
        for name, kind in {"tuple": lambda x: (x,), "dict": lambda x: {0: x}}.items()
        for ext in (KFLR, DiagHessian)
    },
    "trainable-target": Row(
        lambda: run(
            mlp(),
            KFLR(),
            loss=nn.MSELoss(),
            y=torch.randn(N, 3, requires_grad=True),
        ),
        NotImplementedError,
        "MSELoss",
        "input 1 requires grad",
        "detach the others",
    ),
    "no-samples-to-select": Row(
        subsampled_vector,
        ValueError,
        "CrossEntropyLoss",
        r"shape \[C\].*subsampling=\[0\]",
        r"Use shape \[1, C\]",
    ),
    **{
        f"ambiguous-{ext.__name__}": Row(
            lambda ext=ext: run(deepcopy(SEQUENCE), ext(), x=torch.randn(N, 2, 3)),
            NotImplementedError,
            rf"{ext.__name__}.*Linear.*weight'",
            "2 positions share the weight",
            rf"{ext.__name__}\(weight_sharing='expand'\)",
        )
        for ext in (KFAC, KFLR, KFRA)
    },
}


WALKS: Dict[str, Row] = {
    **{
        f"own-{name}-{ext.__name__}": Row(
            lambda ext=ext, name=name: run(
                Sequential(OwnOutput(name, nn.Parameter(torch.ones(3))), nn.Tanh()),
                ext(),
            ),
            NotImplementedError,
            rf"{ext.__name__} \(field '{ext().savefield}'\).*OwnOutput.*of Sequential",
            "has a parameter, buffer, module or member of its class by the name",
            "Give it another name",
        )
        for ext in (DiagHessian, HMP)
        for name in ("output", "input0")
    },
    "modified-in-a-walk": Row(
        lambda: run(Layers(overwriting), DiagHessian()),
        RuntimeError,
        r"Tanh\(\) \('tanh' of Layers\)",
        "an input of this .* was modified in place",
        "`x = x \\+ y` instead of `x \\+= y`",
    ),
    "second-output": Row(
        lambda: run(
            Sequential(
                nn.Linear(3, 4),
                Layers(lambda m, x: (x.sin(), x.cos())),
                ReduceTuple(index=1),
                nn.Linear(4, 3),
            ),
            DiagHessian(),
        ),
        NotImplementedError,
        r"DiagHessian .* \('1' of Sequential\)",
        "the first output of a module only, but output 1",
        "Use the first one only",
    ),
    **{
        f"operation-{ext.__name__}": Row(
            lambda ext=ext: run(Layers(lambda m, x: m.b(m.a(x).relu())), ext()),
            NotImplementedError,
            rf"{ext.__name__} \(field '{ext().savefield}'\).*Linear",
            "not an extended module",
            r"extend\(model, use_converter=True\)",
        )
        for ext in (KFRA, DiagHessian, HMP, PCHMP)
    },
    **{
        f"complex-{ext.__name__}-{how}": Row(
            lambda ext=ext, how=how: run(
                extend(OfOne(through_complex), use_converter=how == "converted"), ext()
            ),
            NotImplementedError,
            rf"{ext.__name__} \(field '{ext().savefield}'\).*from Linear.*'a' of ",
            "by way of complex ones",
            "Let one module of your own.*leave `use_converter` out",
        )
        for ext in (KFRA, DiagHessian, HMP, PCHMP)
        for how in ("converted", "as-it-is")
    },
    **{
        f"complex-inputs-{ext.__name__}": Row(
            lambda ext=ext: run(
                extend(OfOne(inputs_through_complex), use_converter=True), ext()
            ),
            UserWarning,
            rf"- b.bias: .* {ext.__name__}",
            "it is used with complex numbers",
            "Let one module of your own.*leave `use_converter` out",
        )
        for ext in (KFRA, DiagHessian, HMP)
    },
    "called-twice": Row(
        lambda: run(Layers(lambda m, x: m.a(m.tanh(m.a(x)))), DiagHessian()),
        NotImplementedError,
        r"DiagHessian.*Linear.*\('a' of Layers\)",
        "several calls",
        "Give each call a module of its own",
    ),
    "in-place": Row(
        lambda: run(mlp(nn.ELU(inplace=True)), DiagHessian()),
        NotImplementedError,
        r"DiagHessian: ELU\(",
        "overwritten its input",
        "inplace=False",
    ),
    "not-repeatable": Row(
        lambda: run(mlp(NoisyScale()), DiagHessian()),
        RuntimeError,
        "DiagHessian: NoisyScale",
        "gave another output",
        "register a module extension",
    ),
    "product-after-step": Row(
        product_after_step,
        RuntimeError,
        "HMP.*'weight'",
        r"modified in place",
        "compute all products, then change parameters",
    ),
    "hbp-residual": Row(
        lambda: run(mlp(nn.Sigmoid()), HBP("hessian", "exact", "sqrt", AVERAGED)),
        NotImplementedError,
        r"HBP.*Sigmoid\(\)",
        "curv_type='hessian' needs the second derivatives",
        "backprop_strategy='average'",
    ),
    "hbp-residual-of-a-norm": Row(
        lambda: run(mlp(nn.LayerNorm(3)), HBP("pch-abs", "exact", "average", AVERAGED)),
        NotImplementedError,
        r"HBP.*LayerNorm\(",
        "curv_type='pch-abs' needs the second derivatives.*of activations alone",
        "curv_type='ggn', or HMP",
    ),
    "not-twice": Row(
        not_twice,
        NotImplementedError,
        r"EmbeddingBag\(4, 3.*weight",
        "second derivative that PyTorch does not have",
        "Embedding and a sum for EmbeddingBag",
    ),
    "not-twice-inside": Row(
        not_twice_inside,
        NotImplementedError,
        r"FunctionModule\(segment_reduce.*'segment_reduce0' of Segments",
        "second derivative that PyTorch does not have",
        "Use a layer that has one",
    ),
    "product-of-a-list": Row(
        lambda: product_with([[1.0] * 3] * 3),
        TypeError,
        r"a tensor for the parameter 'weight' of Linear\(",
        "got list",
        "Convert it with `torch.as_tensor`",
    ),
    "product-type": Row(
        lambda: product_with(torch.rand(3, 3).double()),
        ValueError,
        r"Expected torch.float32 for the parameter 'weight' of Linear\(",
        "got torch.float64",
        r"Convert it with `.to\(\)`",
    ),
    "branches": Row(
        lambda: run(
            Sequential(nn.Linear(3, 3), Parallel(nn.Identity(), nn.Tanh())), KFRA()
        ),
        NotImplementedError,
        "KFRA",
        "used several times",
        "Use KFLR or KFAC",
    ),
    "no-rule": Row(
        lambda: run(mlp(), NoRule("ERROR")),
        NotImplementedError,
        r"NoRule \(field 'no_rule'\).*Linear\(in_features=3",
        "no module extension for Linear",
        r"set_module_extension\(Linear, \.\.\.\)",
    ),
    "no-rule-warning": Row(
        lambda: run(mlp(), NoRule("WARNING")),
        UserWarning,
        r"NoRule \(field 'no_rule'\).*Linear\(in_features=3",
        "no module extension for Linear",
        r"set_module_extension\(Linear, \.\.\.\)",
    ),
}


def differentiated(ext: BackpropExtension) -> None:
    """Put a quantity into a loss, which has no graph."""
    model, loss = extend(Sequential(nn.Linear(3, 3), nn.Tanh())), extend(nn.MSELoss())
    value = loss(model(torch.randn(4, 3)), torch.zeros(4, 3))
    with backpack(ext):
        value.backward(inputs=list(model.parameters()), create_graph=True)
    weight = model[0].weight
    found = getattr(weight, ext.savefield)
    found = found(torch.ones_like(weight)) if callable(found) else found
    torch.autograd.grad(sum(x.sum() for x in found), weight)


PASSES: Dict[str, Row] = {
    **{
        f"without-a-graph-{ext.__name__}": Row(
            lambda ext=ext: differentiated(ext()),
            NotImplementedError,
            rf"{ext.__name__} \(field '.*'\).*Linear.*'0' of Sequential",
            "can't be differentiated",
            r"Use one of these, or `detach\(\)` the field",
        )
        for ext in (DiagHessian, KFRA, HMP)
    },
    "released": Row(
        released,
        RuntimeError,
        r"CrossEntropyLoss\(\)",
        "dropped after an earlier backward pass",
        r"`backward\(retain_graph=True\)`",
    ),
    "released-with-its-module": Row(
        lambda: released(keeps=False),
        RuntimeError,
        "inputs and outputs of a module",
        "dropped after an earlier backward pass",
        r"`backward\(retain_graph=True\)`",
    ),
    "released-operation": Row(
        released_operation,
        RuntimeError,
        r"`(__)?matmul(__)?`",
        "dropped after an earlier backward pass",
        r"`backward\(retain_graph=True\)`",
    ),
    **{
        f"transposed-{ext.__name__}": Row(
            lambda ext=ext: run(
                Sequential(
                    nn.Unflatten(1, (3, 1)), nn.ConvTranspose1d(3, 3, 1), nn.Flatten()
                ),
                ext(),
            ),
            UserWarning,
            rf"{ext.__name__} .*ConvTranspose1d\(",
            r"stand for `weight.transpose\(0, 1\)`",
            "Transpose it",
        )
        for ext in (KFAC, KFLR, KFRA)
    },
    **{
        f"modified-{ext.__name__}-{name}": Row(
            lambda ext=ext, make=make: modified(ext(), make),
            RuntimeError,
            operation,
            "an input of this .* was modified in place",
            "`x = x \\+ y` instead of `x \\+= y`",
        )
        for ext in (BatchGrad, DiagGGNExact)
        for name, make, operation in (
            ("layer", lambda: nn.Linear(3, 3), "Linear"),
            ("normalization", lambda: nn.LayerNorm(3), "LayerNorm"),
        )
    },
    "not-reached": Row(
        lambda: run(Layers(lambda m, x: m.a(x)), BatchGrad()),
        UserWarning,
        r"b\.weight, b\.bias",
        "did not reach it.*another branch this time",
        r"compute the loss from it, or freeze it",
    ),
    "extended-late": Row(
        extended_late,
        UserWarning,
        r"0\.weight, 0\.bias, 1\.weight, 1\.bias",
        "no call of its module was recorded.*extended after the forward pass",
        "Call `extend` first",
    ),
    **{
        f"not-recorded-{name}": Row(
            lambda call=call, layer=layer: not_recorded(call, deepcopy(layer)),
            UserWarning,
            "weight, bias",
            "no call of its module was recorded",
            "Call `extend` first, then the module itself",
        )
        for name, (call, layer) in NOT_RECORDED.items()
    },
    "input-of-a-layer": Row(
        lambda: run(extend(Generated(), use_converter=True), HMP()),
        UserWarning,
        "- z: it is the input of a layer",
        "HMP has values for parameters of layers and operands of functions",
        "`linear.z, layer.weight, layer.bias.`, or use an extension of the GGN family",
    ),
    "hooks-removed": Row(
        dropped_hooks,
        UserWarning,
        r"0\.weight, 0\.bias, 1\.weight, 1\.bias",
        "not in an extended model, or the hooks were removed",
        "; extend it",
    ),
    "layer-without-hooks": Row(
        without_hooks,
        NotImplementedError,
        "'1.weight' of Sequential, '1.bias' of Sequential",
        "used where extensions can't see it.* \\(by `.*addmm`\\)",
        "Extend the model again if a layer has lost its hooks",
    ),
    "not-in-rule": Row(
        lambda: run(mlp(), NoRule("SILENT", {nn.Linear: Misspelled()})),
        UserWarning,
        r"\n- 0\.weight, 1\.weight: NoRule",
        "a rule for its module, Misspelled, which saves nothing for it",
        "add its name to the rule's `params`, or correct the spelling",
    ),
    "rule-for-what-is-parametrized": Row(
        lambda: run(
            Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
            NoRule("SILENT", {nn.Linear: Misspelled()}),
        ),
        UserWarning,
        r"\n- 0\.parametrizations\.weight\.original0, .*original1: NoRule has a rule",
        "which is about the parametrized tensor, and not about what that is made of",
        "leave this class of modules without a rule",
    ),
    **{
        f"no-gradient-{ext.__name__}-{where}": Row(
            lambda ext=ext, where=where: without_gradient(ext(), where),
            UserWarning,
            rf"\n- {re.escape(where)}: ",
            ": the backward pass did not reach it",
            "compute the loss from it, or freeze it",
        )
        for ext in (BatchGrad, DiagGGNExact)
        for where in ("t", "inner.t")
    },
    "called-with-something-else": Row(
        called_with_something_else,
        UserWarning,
        r"\n- 0\.weight, 0\.bias, 1\.weight, 1\.bias: its module was called with",
        "`torch.func.functional_call`, and DiagHessian saves values on what was given",
        r"Call the module itself, or give `tensor\.detach\(\)",
    ),
    "nothing-extended": Row(
        nothing_extended,
        UserWarning,
        "no extended module",
        "nothing was computed",
        r"extend\(model\)` before the forward pass",
    ),
    "only-loss-extended": Row(
        lambda: nothing_extended(nn.Tanh()),
        UserWarning,
        "no extended module with parameters",
        "nothing was computed",
        r"extend\(model\)` before the forward pass, besides extending the loss",
    ),
}

TOOLS: Dict[str, Row] = {
    "cannot-convert": Row(
        lambda: convert_module_to_backpack(
            Layers(lambda m, x: x if x.sum() > 0 else m.a(x)), False
        ),
        NotImplementedError,
        "Cannot convert Layers",
        "cannot be traced.*control flow",
        "into a submodule",
    ),
    "lost-state": Row(
        lambda: convert_module_to_backpack(Records(), False),
        UserWarning,
        "Records",
        "sets the attributes.*last",
        "Return what they hold",
    ),
    "fixed-mode": Row(
        lambda: convert_module_to_backpack(ByMode(), False),
        UserWarning,
        "ByMode",
        "self.training.*training mode",
        "convert again after changing the mode",
    ),
    "no-scalar": Row(
        lambda: hessian_vector_product(
            (p := Parameter(torch.ones(2))) ** 2, [p], [torch.ones(2)]
        ),
        ValueError,
        "scalar f",
        r"got shape \[2\]",
        r"f\.sum\(\)",
    ),
    "integer-input": Row(
        integer_input,
        ValueError,
        r"Embedding\(3, 2\)",
        "input of type torch.int64",
        "param_mjp",
    ),
    "shape": Row(
        wrong_shape,
        RuntimeError,
        "matrix of shape",
        r"got \[5, 4, 3\]",
        r"Expected.*\[\*, 4, 2\]",
    ),
}

MESSAGES = {**OPTIONS, **SAMPLES, **SECOND_ORDER, **WALKS, **PASSES, **TOOLS}


def said(row: Row) -> List[Exception]:
    """Make a row's mistake, and collect the error and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row.action()
        except Exception as error:
            return [error]
    for warning in caught:  # ours points to a line of the program
        if re.search(f"(?s){row.what}", str(warning.message)):
            assert Path(warning.filename).parent == Path(__file__).parent, warning
    return [w.message for w in caught]


@pytest.mark.parametrize("name", MESSAGES)
def test_message(request: pytest.FixtureRequest, name: str) -> None:
    """One message has the promised type, and all three parts."""
    if name in ("scaled", "negative", "concave-loss"):
        request.getfixturevalue("cpu")  # nobody looks at such numbers elsewhere
    row = MESSAGES[name]
    messages = said(row)
    told = [str(m) for m in messages if isinstance(m, row.kind)]
    for pattern in (row.where, row.what, row.way_out):
        told = [m for m in told if re.search(f"(?s){pattern}", m)]
        assert told, f"{pattern!r} is not in {messages}"


def test_warning_in_a_thread_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass may run in another thread: a warning points to who began it."""
    names = {"__name__": "backpack.in_a_thread"}  # nothing of the program's is below
    exec("def call(f, done):\n    f('from afar')\n    done.append(f)", names)

    def hook(module: Module) -> None:
        done, current = [], state()
        monkeypatch.setattr(errors, "state", lambda: current)
        _thread.start_new_thread(names["call"], (errors.warn_user, done))
        while not done:
            sleep(1e-3)

    model, loss = extend(nn.Linear(3, 2)), extend(nn.CrossEntropyLoss())
    value = loss(model(torch.randn(4, 3)), torch.randint(2, (4,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with backpack(BatchGrad(), extension_hook=hook):
            value.backward()
    assert caught and all(str(w.message) == "from afar" for w in caught)
    assert all(Path(w.filename) == Path(__file__) for w in caught)
    assert state().caller is None


def sources() -> List[Path]:
    """List the library's files."""
    return sorted(Path(package.__file__).parent.rglob("*.py"))


def test_no_error_without_text() -> None:
    """Errors have one argument, which is a text: no bare class, no tuple of texts."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                call, line = node.exc, f"{path.name}, line {node.lineno}"
                assert isinstance(call, ast.Call), f"{line}: no text"
                own = getattr(call.func, "id", "") == "Untraceable"  # never leaves
                assert own or len(call.args) == 1, f"{line}: no single text"
