"""What a backward pass leaves in ``.grad``: the same with extensions as without.

Rows of ``PASSES`` are backward passes: what they start from, which hooks there are,
what is frozen, and whether gradients are there already.
"""

import warnings
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import pytest
import torch
from cases import F64, FIRST_ORDER, make_extension
from oracle import assert_agrees
from processes import alone
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn import Module
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from backpack import backpack as compute
from backpack import extend, extensions
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)

N = 3


def linear(bias: bool) -> Module:
    """A single layer.

    Args:
        bias: Whether it has a bias.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    return nn.Linear(VECTORS[1], 2, bias).to(F64)


def conv_net() -> Module:
    """Two convolutions with 25 and 16 positions, and two linear layers.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 3, 2),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32, 4),
    ]
    return nn.Sequential(*layers).to(F64)


def sequence_net() -> Module:
    """Linear layers on 17 positions.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)]
    return nn.Sequential(*layers).to(F64)


class Tied(nn.Module):
    """A table of rows that is the last layer's weight, too; on 17 positions."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        torch.manual_seed(0)
        self.first, self.table = nn.Linear(2, 3), nn.Embedding(2, 3)
        self.last = nn.Linear(3, 2)
        self.last.weight = self.table.weight
        self.to(F64)

    def forward(self, x: Tensor) -> Tensor:
        """Use the table twice.

        Args:
            x: Inputs ``[N, T, 2]``.

        Returns:
            Outputs ``[N, T, 2]``.
        """
        rows = self.table((x[..., 0] > 0).long())
        return self.last((self.first(x) + rows).tanh())


def wide_net(channels: int = 40) -> Module:
    """Convolutions with more features than it takes for Gram matrices to pay.

    Args:
        channels: Number of channels. Default: ``40``.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, channels, 2), nn.Conv2d(channels, channels, 2)]
    return nn.Sequential(*layers).to(F64)


def large_net() -> Module:
    """Linear layers, two of which are large enough for a faster matrix product.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    layers = [
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, 256, bias=False),
        nn.Linear(256, 4),
    ]
    return nn.Sequential(*layers)


IMAGES, SEQUENCES, VECTORS = (N, 2, 6, 6), (N, 17, 2), (200, 256)


def run(model: Module, loss: Module, x: Tensor) -> None:
    """Run the usual backward pass.

    Args:
        model: The model.
        loss: The loss module.
        x: The model's input.
    """
    y = model(x)
    loss(y, torch.ones_like(y)).backward()


class Pass(NamedTuple):
    """A backward pass.

    Args:
        extensions: Makes the extensions.
        model: Makes the model.
        prepare: What is done to the model before.
        run: Runs the forward and the backward pass; may return what else to compare.
        shape: Shape of the input.
        options: Keyword arguments of the context.
    """

    extensions: Callable[[], List] = lambda: [extensions.BatchGrad()]
    model: Callable[[], Module] = conv_net
    prepare: Callable[[Module], None] = lambda model: None
    run: Callable[[Module, Module, Tensor], Optional[Tensor]] = run
    shape: Tuple[int, ...] = IMAGES
    options: Dict[str, bool] = {}


def twice(model: Module, loss: Module, x: Tensor) -> None:
    """Run two backward passes, through the same graph."""
    value = model(x).square().sum()
    value.backward(retain_graph=True)
    value.backward()


def from_two_losses(model: Module, loss: Module, x: Tensor) -> None:
    """Run a backward pass from two losses, with weights."""
    y = model(x)
    weights = [torch.tensor(2.0, dtype=F64), torch.tensor(-1.0, dtype=F64)]
    torch.autograd.backward([y.square().sum(), y.sin().sum()], weights)


def of_a_vector(model: Module, loss: Module, x: Tensor) -> None:
    """Run a backward pass from a vector."""
    y = model(x)
    y.backward(torch.ones_like(y))


def for_some(model: Module, loss: Module, x: Tensor) -> None:
    """Run a backward pass with respect to some parameters."""
    value = model(x).square().sum()
    value.backward(inputs=[model[0].weight, model[2].weight])


def in_another_type(model: Module, loss: Module, x: Tensor) -> None:
    """Run a backward pass after the model was given another type."""
    value = model(x).square().sum()
    model.float()
    value.backward()


def for_the_input(model: Module, loss: Module, x: Tensor) -> Tensor:
    """Run a backward pass that reaches the input, too."""
    x.requires_grad_()
    model(x).square().sum().backward()
    return x.grad


def for_a_hidden_tensor(model: Module, loss: Module, x: Tensor) -> Tensor:
    """Run a backward pass that retains a hidden gradient."""
    hidden = model[:3](x)
    hidden.retain_grad()
    model[3:](hidden).square().sum().backward()
    return hidden.grad


def of_second_order(model: Module, loss: Module, x: Tensor) -> Tensor:
    """Differentiate a gradient once more, outside of any context."""
    model(x).square().sum().backward(create_graph=True)
    total = sum(param.grad.sum() for param in model.parameters())
    model.zero_grad()
    with compute():
        return torch.autograd.grad(total, model[2].weight)[0]


def with_penalty(model: Module, loss: Module, x: Tensor) -> None:
    """Use a weight in a term of its own, too."""
    (model(x).square().sum() + model[2].weight.square().sum()).backward()


def with_gradient_penalty(model: Module, loss: Module, x: Tensor) -> None:
    """Differentiate a derivative of the model, which uses its weights once more."""
    y = model(x.requires_grad_())
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().sum() + gradient.square().sum()).backward()


def with_checkpoint(model: Module, loss: Module, x: Tensor) -> None:
    """Repeat a forward pass in the backward pass."""
    hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=False)
    model[2:](hidden).square().sum().backward()


def under_autocast(model: Module, loss: Module, x: Tensor) -> None:
    """Compute in low precision, with parameters in single precision."""
    with torch.autocast(x.device.type, torch.bfloat16):
        value = model(x).float().square().sum()
    value.backward()


def with_a_frozen_weight(model: Module, loss: Module, x: Tensor) -> None:
    """Freeze a weight when the graph is there already."""
    value = model(x).square().sum()
    model[0].weight.requires_grad_(False)
    value.backward()


def again(model: Module, loss: Module, x: Tensor) -> None:
    """Call a layer twice."""
    model[5](model[:5](x) + model[:5](x)).square().sum().backward()


def accumulates(model: Module, loss: Module, x: Tensor) -> None:
    """Add the gradients to others, which somebody else holds, too."""
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, float(number))
    run(model, loss, x)
    run(model, loss, 2 * x)


def doubles(model: Module) -> None:
    """Register a hook that doubles a gradient."""
    model[2].weight.register_hook(lambda gradient: 2 * gradient)


def moves(model: Module) -> None:
    """Register a hook that updates a weight as soon as its gradient is there."""

    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.grad.mul_(0.5)

    model[2].weight.register_post_accumulate_grad_hook(step)


def watches(model: Module) -> None:
    """Register a hook where gradients are accumulated, which cannot be seen."""
    node = get_gradient_edge(model[2].weight).node
    model.node = node  # else it would not live as long
    node.register_prehook(lambda gradients: (3 * gradients[0],))


def freezes(*names: str) -> Callable[[Module], None]:
    """Make a function that freezes parameters.

    Args:
        names: Names of the parameters.

    Returns:
        The function.
    """

    def freeze(model: Module) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(False)

    return freeze


class Custom(FirstOrderModuleExtension):
    """What a user computes on a layer."""

    def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
        """Return something."""
        return g_out[0].sum()

    bias = weight


def custom() -> List:
    """Make an extension with a rule of a user.

    Returns:
        The extension.
    """
    ext = extensions.BatchGrad()
    rule = Custom(params=["weight", "bias"])
    ext.set_module_extension(nn.Conv2d, rule, overwrite=True)
    return [ext]


def summing() -> List:
    """Make a user's extension, which does not tell samples apart.

    Returns:
        The extension.
    """
    rules = {nn.Linear: Custom(params=["weight", "bias"])}
    return [FirstOrderBackpropExtension("summed", rules)]


PASSES = {
    **{name: Pass(lambda name=name: [make_extension(name)]) for name in FIRST_ORDER},
    "Gram matrices": Pass(lambda: [extensions.BatchL2Grad()], model=wide_net),
    "sums, not Gram matrices": Pass(
        lambda: [extensions.BatchL2Grad()],
        model=lambda: wide_net(80),
        shape=(N, 2, 9, 9),
    ),
    "all": Pass(lambda: [make_extension(name) for name in FIRST_ORDER]),
    "with columns": Pass(lambda: [extensions.KFAC(), extensions.BatchGrad()]),
    "columns only": Pass(lambda: [extensions.DiagGGNExact()]),
    "subsampling": Pass(lambda: [extensions.BatchGrad(subsampling=[0, 2])]),
    "a user's rule": Pass(custom),
    "sequence": Pass(model=sequence_net, shape=SEQUENCES),
    **{
        f"tied, {name}": Pass(
            lambda name=name: [make_extension(name)], model=Tied, shape=SEQUENCES
        )
        for name in FIRST_ORDER
    },
    "large": Pass(model=large_net, shape=VECTORS),
    "large, subsampling": Pass(
        lambda: [extensions.BatchGrad(subsampling=[0, 2])],
        model=large_net,
        shape=VECTORS,
    ),
    "large, columns only": Pass(
        lambda: [extensions.DiagGGNMC()], model=large_net, shape=VECTORS
    ),
    "one sample": Pass(shape=(1, *IMAGES[1:])),
    "frozen weight": Pass(prepare=freezes("2.weight")),
    "frozen bias": Pass(prepare=freezes("2.bias")),
    "frozen beginning": Pass(prepare=freezes("0.weight", "0.bias")),
    "frozen first weight": Pass(prepare=freezes("0.weight")),
    "frozen first bias": Pass(prepare=freezes("0.bias")),
    "hook": Pass(prepare=doubles),
    "hook after accumulation": Pass(prepare=moves),
    "hook on a node": Pass(prepare=watches),
    "weight norm": Pass(prepare=lambda model: weight_norm(model[2])),
    "single precision": Pass(model=lambda: conv_net().float()),
    "half precision": Pass(model=lambda: conv_net().bfloat16()),
    "autocast": Pass(model=lambda: conv_net().float(), run=under_autocast),
    "check": Pass(options={"check": True}),
    "twice": Pass(run=twice, options={"retain_graph": True}),
    "accumulated": Pass(run=accumulates),
    **{
        f"another type, bias={bias}": Pass(
            lambda: [extensions.Variance()],
            model=lambda bias=bias: linear(bias),
            run=in_another_type,
            shape=(N, VECTORS[1]),
        )
        for bias in (True, False)
    },
    "two losses": Pass(run=from_two_losses),
    "vector": Pass(run=of_a_vector),
    "inputs": Pass(run=for_some),
    "leaf input": Pass(run=for_the_input),
    "hidden gradient": Pass(run=for_a_hidden_tensor),
    "second order": Pass(run=of_second_order),
    "penalty": Pass(run=with_penalty),
    "gradient penalty": Pass(
        summing,
        large_net,
        run=with_gradient_penalty,
        shape=VECTORS,
        options={"retain_graph": True},
    ),
    "checkpoint": Pass(run=with_checkpoint),
    "frozen later": Pass(run=with_a_frozen_weight),
    "called twice": Pass(run=again),
}


def backward(row: Pass, with_extensions: bool) -> Tuple[Module, Optional[Tensor]]:
    """Run a row's backward pass.

    Args:
        row: The row.
        with_extensions: Whether extensions are active.

    Returns:
        The model, and what else to compare.
    """
    model, loss = row.model(), nn.MSELoss()
    row.prepare(model)
    torch.manual_seed(1)
    x = torch.randn(row.shape, dtype=next(model.parameters()).dtype)
    if not with_extensions:
        return model, row.run(model, loss, x)
    model, loss = extend(model), extend(loss)
    with compute(*row.extensions(), **row.options):
        return model, row.run(model, loss, x)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.filterwarnings("ignore:Parameters are also used in terms:UserWarning")
@pytest.mark.parametrize("name", PASSES)
def test_gradient(name: str):
    """The gradient is that of a plain pass."""
    row = PASSES[name]
    (model, result), (plain, expected) = backward(row, True), backward(row, False)
    if expected is not None:
        assert_agrees(result, expected, "result")
    for (name, param), reference in zip(model.named_parameters(), plain.parameters()):
        if reference.grad is None:
            assert param.grad is None, name
            continue
        eps = torch.finfo(param.dtype).eps
        assert_agrees(param.grad, reference.grad, name, rtol=100 * eps)


@pytest.mark.usefixtures("cpu")
def test_distributed_data_parallel():
    """``DistributedDataParallel`` sees every gradient, and may change it."""
    x = torch.rand(IMAGES, dtype=F64)
    plain, model = conv_net(), extend(conv_net())
    plain(x).square().sum().backward()
    with alone():
        parallel = nn.parallel.DistributedDataParallel(model)

        def triple(_, bucket: torch.distributed.GradBucket) -> Future[Tensor]:
            future: Future[Tensor] = Future()
            future.set_result(3 * bucket.buffer())
            return future

        parallel.register_comm_hook(None, triple)
        for _ in range(2):
            model.zero_grad()
            with compute(extensions.Variance()):
                parallel(x).square().sum().backward()
    for param, reference in zip(model.parameters(), plain.parameters()):
        assert_agrees(param.grad, 3 * reference.grad)


@pytest.mark.parametrize("inputs", ["data", "with a gradient"])
@pytest.mark.parametrize("net", [wide_net, sequence_net])
def test_gradients_at_inputs(net: Callable, inputs: str):
    """A user's rule gets what a full backward hook gets."""

    class Looks(FirstOrderModuleExtension):
        def weight(self, ext, module, g_inp, g_out, bpQuantities):  # noqa: N803
            (seen[module],) = g_inp
            assert len(g_inp) == 1 and g_inp[0] is seen[module]
            return g_out[0].sum()

    seen: Dict[Module, Optional[Tensor]] = {}
    expected: Dict[Module, Optional[Tensor]] = {}
    model = extend(net())
    kinds = (nn.Linear, nn.Conv2d, nn.Conv1d)
    ext = FirstOrderBackpropExtension("seen", {k: Looks(["weight"]) for k in kinds})
    shape = SEQUENCES if net is sequence_net else (N, 2, 9, 9)
    X = torch.rand(shape, dtype=F64, requires_grad=inputs != "data")
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_full_backward_hook(
                lambda m, g_inp, g_out: expected.update({m: g_inp[0]})
            )
    value = model(X).square().sum()
    with warnings.catch_warnings():  # of PyTorch, if no input needs a gradient
        warnings.simplefilter("ignore")
        with compute(ext):
            value.backward()
    assert seen.keys() == expected.keys() and len(seen) > 1
    for module, gradient in seen.items():
        if gradient is None:
            assert expected[module] is None and inputs == "data"
        else:
            assert_agrees(gradient, expected[module], str(module))
