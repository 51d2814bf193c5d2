"""Gradients that are sums of individual gradients arrive as autograd's would.

Rows of ``PASSES`` are backward passes; each names the parameters that autograd has been
asked to leave out, and every leaf's ``.grad`` must be that of a plain pass.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import pytest
import torch
from cases import F64, FIRST_ORDER
from oracle import assert_agrees
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn import Module
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import backpack.backward
from backpack import backpack as compute
from backpack import extend, extensions
from backpack.core.fast import matmul, tuning
from backpack.core.fast.matmul import has_fast_matmul
from backpack.core.per_sample import outer
from backpack.core.per_sample.base import Dense, PerSample
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.left_out import hand_over

N = 3


def conv_net() -> Module:
    """Two convolutions with 25 and 16 positions, and two linear layers.

    Returns:
        The model; '2.*' is the only layer with a fast sum whose input has a gradient;
        the first one's has none, and '5.*' has a single position.
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
FIRST = {"0.weight"}  # its node is run for the sake of the bias
CONV = {*FIRST, "2.weight", "2.bias"}
EVERY = {*CONV, "5.weight", "5.bias"}
with torch.no_grad():
    LARGE = {*FIRST, "2.weight"} if has_fast_matmul(torch.ones(1)) else set()


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
        left_out: Names of the parameters that autograd leaves out.
        extensions: Makes the extensions.
        model: Makes the model.
        prepare: What is done to the model before.
        run: Runs the forward and the backward pass; may return what else to compare.
        shape: Shape of the input.
        options: Keyword arguments of the context.
    """

    left_out: Set[str]
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
    """Repeat a forward pass in the backward pass, as PyTorch used to do."""
    hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
    model[2:](hidden).square().sum().backward()


def with_a_frozen_weight(model: Module, loss: Module, x: Tensor) -> None:
    """Freeze a weight when the graph is there already."""
    value = model(x).square().sum()
    model[0].weight.requires_grad_(False)
    value.backward()


def again(model: Module, loss: Module, x: Tensor) -> None:
    """Call a layer twice."""
    model[5](model[:5](x) + model[:5](x)).square().sum().backward()


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
    **{
        name: Pass(CONV, lambda name=name: [getattr(extensions, name)()])
        for name in FIRST_ORDER
    },
    "Variance": Pass(EVERY, lambda: [extensions.Variance()]),
    "Gram matrices": Pass(FIRST, lambda: [extensions.BatchL2Grad()], model=wide_net),
    "sums, not Gram matrices": Pass(
        {*FIRST, "1.weight", "1.bias"},
        lambda: [extensions.BatchL2Grad()],
        model=lambda: wide_net(80),
        shape=(N, 2, 9, 9),
    ),
    "all": Pass(EVERY, lambda: [getattr(extensions, name)() for name in FIRST_ORDER]),
    "with columns": Pass(CONV, lambda: [extensions.KFAC(), extensions.BatchGrad()]),
    "columns only": Pass(set(), lambda: [extensions.DiagGGNExact()]),
    "subsampling": Pass(set(), lambda: [extensions.BatchGrad(subsampling=[0, 2])]),
    "a user's rule": Pass(set(), custom),
    "sequence": Pass({*FIRST, "2.weight"}, model=sequence_net, shape=SEQUENCES),
    "large": Pass(LARGE, model=large_net, shape=VECTORS),
    "large, subsampling": Pass(
        LARGE,
        lambda: [extensions.BatchGrad(subsampling=[0, 2])],
        model=large_net,
        shape=VECTORS,
    ),
    "large, columns only": Pass(
        LARGE, lambda: [extensions.DiagGGNMC()], model=large_net, shape=VECTORS
    ),
    "one sample": Pass(CONV, shape=(1, *IMAGES[1:])),
    "frozen weight": Pass({*FIRST, "2.bias"}, prepare=freezes("2.weight")),
    "frozen bias": Pass({*FIRST, "2.weight"}, prepare=freezes("2.bias")),
    "frozen beginning": Pass({"2.weight"}, prepare=freezes("0.weight", "0.bias")),
    "frozen first weight": Pass(CONV - FIRST, prepare=freezes("0.weight")),
    "frozen first bias": Pass(CONV - FIRST, prepare=freezes("0.bias")),
    "hook": Pass(FIRST, prepare=doubles),
    "hook after accumulation": Pass(FIRST, prepare=moves),
    "hook on a node": Pass(CONV, prepare=watches),
    "weight norm": Pass(FIRST, prepare=lambda model: weight_norm(model[2])),
    "single precision": Pass(CONV, model=lambda: conv_net().float()),
    "half precision": Pass(set(), model=lambda: conv_net().bfloat16()),
    "check": Pass(set(), options={"check": True}),
    "twice": Pass(CONV, run=twice, options={"retain_graph": True}),
    "two losses": Pass(CONV, run=from_two_losses),
    "vector": Pass(CONV, run=of_a_vector),
    "inputs": Pass(set(), run=for_some),
    "leaf input": Pass({"0.weight", "0.bias", *CONV}, run=for_the_input),
    "hidden gradient": Pass(CONV, run=for_a_hidden_tensor),
    "second order": Pass(set(), run=of_second_order),
    "penalty": Pass(FIRST, run=with_penalty),
    "gradient penalty": Pass(
        set(),
        summing,
        large_net,
        run=with_gradient_penalty,
        shape=VECTORS,
        options={"retain_graph": True},
    ),
    "checkpoint": Pass(set(), run=with_checkpoint),
    "frozen later": Pass(CONV - FIRST, run=with_a_frozen_weight),
    "called twice": Pass(set(), run=again),
}


@pytest.fixture
def found(monkeypatch) -> List[Set[Tensor]]:
    """Collect what backward passes leave out, where the BLAS is slow."""
    sets: List[Set[Tensor]] = []
    find = backpack.backward.find_left_out

    def record(*args):
        sets.append(find(*args))
        return sets[-1]

    monkeypatch.setattr(backpack.backward, "find_left_out", record)
    for user in (matmul, outer):
        monkeypatch.setattr(user, "has_fast_blas", lambda: False)
    return sets


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
def test_gradient(name: str, found: List[Set[Tensor]]):
    """The gradient is that of a plain pass; what autograd left out is as foreseen."""
    row = PASSES[name]
    (model, result), (plain, expected) = backward(row, True), backward(row, False)
    names = {id(param): name for name, param in model.named_parameters()}
    left_out = [{names[id(param)] for param in params} for params in found]
    assert all(params == row.left_out for params in left_out)
    assert left_out or not row.left_out
    if expected is not None:
        assert_agrees(result, expected, "result")
    for (name, param), reference in zip(model.named_parameters(), plain.parameters()):
        if reference.grad is None:
            assert param.grad is None, name
            continue
        eps = torch.finfo(param.dtype).eps
        assert_agrees(param.grad, reference.grad, name, rtol=100 * eps)


def test_handed_over():
    """Gradients become ``.grad`` as they are, but in the parameter's memory layout."""
    param, permuted = nn.Parameter(torch.rand(2, 3)), nn.Parameter(torch.rand(3, 4))
    gradients = {param: torch.rand(2, 3), permuted: torch.rand(4, 3).T}
    expected = [x.clone() for x in gradients.values()]
    address = gradients[param].data_ptr()
    with torch.no_grad():
        hand_over(gradients)
    assert not gradients and param.grad.data_ptr() == address
    assert permuted.grad.is_contiguous()
    for parameter, value in zip((param, permuted), expected):
        assert torch.equal(parameter.grad, value)


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


def test_gradient_in_extension_hook():
    """Where autograd leaves a parameter out, its gradient is there for the hook."""
    model, seen = extend(conv_net()), []

    def hook(module: Module) -> None:
        if module is model[2]:
            seen.extend(param.grad.clone() for param in module.parameters())

    x = torch.rand(IMAGES, dtype=F64)
    with compute(extensions.BatchGrad(), extension_hook=hook):
        model(x).square().sum().backward()
    assert_agrees(seen, [param.grad for param in model[2].parameters()])


@pytest.mark.usefixtures("cpu")
def test_distributed_data_parallel():
    """``DistributedDataParallel`` sees every gradient, and may change it."""
    x = torch.rand(IMAGES, dtype=F64)
    plain, model = conv_net(), extend(conv_net())
    plain(x).square().sum().backward()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
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
    finally:
        torch.distributed.destroy_process_group()
    for param, reference in zip(model.parameters(), plain.parameters()):
        assert_agrees(param.grad, 3 * reference.grad)
