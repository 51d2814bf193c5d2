"""What extending does to a module, and what it sees in a backward pass."""

import gc
import re
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import make_extension
from per_sample import Lambda, OwnOutput
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import Module
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from backpack import backpack, disable, extend, extensions, memory_cleanup
from backpack.context import CTX
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import BatchGrad, DiagGGNExact, SqrtGGNExact, Variance

# all but HBP, which has no default
NAMES = [name for name in extensions.__all__ if name != "HBP"]
ALL = [pytest.param(partial(make_extension, name), id=name) for name in NAMES]
# those whose values are there when all parameters have had their turn
LATE = ("ClippedGrad", "WeightedGrad")
IN_TURN = [param for param in ALL if param.id not in LATE]
N = 3


class Block(Module):
    """A container with a forward pass of its own."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, skip: bool = True) -> Tensor:
        """Apply the layers, around a skip connection.

        Args:
            x: Input.
            skip: Whether there is one.

        Returns:
            Output of the same shape.
        """
        out = self.b(self.a(x).relu()) * self.scale
        return out + x if skip else out


def small() -> Tuple[Module, Module, Tensor, Tensor]:
    """Make an extended model and loss, and data.

    Returns:
        Model, loss, input, target.
    """
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    loss = nn.CrossEntropyLoss()
    return extend(model), extend(loss), torch.rand(N, 4), torch.tensor([0, 1, 1])


def hooks(module: Module) -> List[int]:
    """Count the hooks on a module and all modules inside.

    Args:
        module: The module.

    Returns:
        Numbers of hooks.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [len(getattr(child, kind)) for child in module.modules() for kind in kinds]


def stored(module: Module) -> List[str]:
    """List what a forward pass has stored on a module and all modules inside.

    Args:
        module: The module.

    Returns:
        Names of attributes.
    """
    return [
        f"{name}.{attribute}"
        for name, child in module.named_modules()
        for attribute in vars(child)
        if attribute == "output" or attribute.startswith("input")
    ]


# Extending


def test_extend_returns_the_module():
    """The same object comes back, with a flag on everything inside."""
    model = nn.Sequential(Block(), nn.Sequential(nn.ReLU()))
    assert extend(model) is model
    assert all(child._backpack_extend is True for child in model.modules())


def test_extend_twice_adds_nothing():
    """Neither hooks nor handles."""
    model = extend(nn.Sequential(Block(), nn.Linear(4, 2)))
    before, handles = hooks(model), len(CTX.hook_handles)
    assert any(before)
    extend(nn.Sequential(model))  # which is gone with its own
    extend(model)
    extend(model[0])
    assert hooks(model) == before
    assert len(CTX.hook_handles) == handles


def test_extend_what_was_added():
    """A second call extends what has come in since the first."""
    model, loss, x, y = small()
    model.append(nn.Linear(2, 2))
    extend(model)
    with backpack(BatchGrad()):
        loss(model(x), y).backward()
    assert all(param.grad_batch.shape[0] == N for param in model.parameters())


def test_extend_leaves_the_model_alone():
    """Neither outputs, nor parameters, nor the state dictionary change."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(inplace=True), nn.Flatten())
    x = torch.rand(N, 2, 3)
    out, keys = model(x), list(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    extend(model)
    assert torch.equal(model(x), out)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names


def test_extend_again():
    """What libraries do: hooks removed, tensors dropped, and once more."""
    model, loss, x, y = small()
    before = hooks(model)
    model(x)
    for with_flags in (True, False):  # some set them back, too
        for module in (*model.modules(), *loss.modules()):
            module._backpack_extend = with_flags
        CTX.remove_hooks()
        memory_cleanup(model)
        assert CTX.hook_handles == []
        assert not any(hooks(model)) and not stored(model)
        model(x)
        assert not stored(model)
        extend(model)
        extend(loss)
        assert hooks(model) == before
        with backpack(BatchGrad(), DiagGGNExact()):
            loss(model(x), y).backward()
        for param in model.parameters():
            assert torch.allclose(param.grad_batch.sum(0), param.grad)
            param.grad = None
            del param.grad_batch, param.diag_ggn_exact


def test_extend_debug(capsys: pytest.CaptureFixture):
    """A line for each module that is extended."""
    extend(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), debug=True)
    lines = capsys.readouterr().out.splitlines()
    assert any("Linear" in line for line in lines)
    assert any("ReLU" in line for line in lines)
    extend(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    assert capsys.readouterr().out == ""


# Forward passes


def test_stored_tensors():
    """Each operation stores its inputs and its output."""
    model, loss, x, y = small()
    f = model(x)
    value = loss(f, y)
    assert torch.equal(model[0].input0, x)
    assert torch.equal(model[2].output, f)
    assert torch.equal(model[1].output, model[2].input0)
    assert torch.equal(loss.input0, f) and torch.equal(loss.input1, y)
    assert torch.equal(loss.output, value)
    assert not hasattr(model[0], "input1")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_failed_forward_pass_stores_nothing(error: type):
    """What modules inside have stored goes when the outermost call fails."""
    model = extend(Block())

    def fail(*_: Any) -> None:
        assert stored(model)
        raise error

    model.b.register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(torch.rand(N, 4))
    gc.collect()  # the traceback holds what the call was given
    assert not stored(model)


def test_stored_output_of_several():
    """The first of several outputs is stored."""
    lstm = extend(nn.LSTM(2, 3, batch_first=True))
    out, _ = lstm(torch.rand(N, 4, 2))
    assert torch.equal(lstm.output, out)


def test_stored_keyword_arguments():
    """Arguments by name are stored in the order of the signature."""
    bilinear = extend(nn.Bilinear(2, 3, 4))
    a, b = torch.rand(N, 2), torch.rand(N, 3)
    bilinear(input2=b, input1=a)
    assert torch.equal(bilinear.input0, a) and torch.equal(bilinear.input1, b)
    bilinear(a, input2=b)
    assert torch.equal(bilinear.input0, a) and torch.equal(bilinear.input1, b)


def test_containers_store_nothing():
    """Containers without a forward pass of their own are no operations."""
    parallel = Parallel(nn.Linear(4, 3), nn.Linear(4, 3), merge_module=SumModule())
    model = extend(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), parallel))
    model(torch.rand(N, 4))
    assert {name.rpartition(".")[0] for name in stored(model)} == {
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, SumModule))
    }
    recurrent = extend(nn.Sequential(nn.GRU(2, 3, batch_first=True), ReduceTuple()))
    recurrent(torch.rand(N, 4, 2))
    assert "0.output" in stored(recurrent)
    assert not any(name.startswith("1.") for name in stored(recurrent))
    traced = extend(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU())))
    traced(torch.rand(N, 4))
    assert not any(name.startswith(".") for name in stored(traced))
    assert "0.input0" in stored(traced)


def test_container_with_a_forward_pass():
    """A module with modules inside is an operation if it has a forward pass."""
    block = extend(Block())
    x = torch.rand(N, 4)
    out = block(x, skip=False)
    assert torch.equal(block.input0, x) and torch.equal(block.output, out)


@pytest.mark.parametrize("context", [disable, torch.no_grad, torch.inference_mode])
def test_nothing_stored(context: Callable):
    """Without gradients and inside ``disable``, nothing is stored."""
    model, loss, x, y = small()
    with context():
        loss(model(x), y)
    assert not stored(model) and not stored(loss)


def test_nothing_stored_by_a_checkpoint():
    """What a backward pass computes again for a checkpoint is no forward pass."""
    model, loss, x, y = small()
    value = loss(checkpoint(model, x, use_reentrant=False), y)
    with backpack(BatchGrad()):
        value.backward()
    assert not stored(model) and not stored(loss)


def test_the_last_call_is_stored():
    """A second forward pass replaces what the first has stored."""
    model, _, x, _ = small()
    model(x)
    model(2 * x)
    assert torch.equal(model[0].input0, 2 * x)


class Heads(nn.Module):
    """A model with a head that leads to nothing, by itself or in a derivative."""

    def __init__(self, way: str):
        """Make the layers."""
        super().__init__()
        self.way, self.body = way, nn.Linear(4, 4)
        self.head, self.aux = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        """Compute a head, and drop, detach, return or differentiate it."""
        hidden = self.body(x).tanh()
        aux = self.aux(hidden)
        if self.way == "derivative":
            (slope,) = torch.autograd.grad(aux.sum(), hidden, create_graph=True)
            return self.head(slope * hidden)
        if self.way == "returned":
            return self.head(hidden), aux
        return self.head(hidden) + (aux.detach().sum() if self.way == "detached" else 0)


@pytest.mark.parametrize("context", [nullcontext, lambda: backpack(BatchGrad())])
@pytest.mark.parametrize("way", ["dropped", "detached", "returned", "derivative"])
@pytest.mark.filterwarnings("ignore:No result was computed")
def test_heads_without_a_gradient_keep_nothing(way: str, context: Callable):
    """What a module has stored that the loss does not depend on goes with the graph."""
    model, loss = extend(Heads(way)), extend(nn.MSELoss())
    out = model(torch.rand(N, 4))
    out = out[0] if way == "returned" else out
    with context():
        loss(out, torch.zeros(N, 1)).backward()
    assert not stored(model) and not stored(loss)


class WithOutput(nn.Linear):
    """A layer whose class uses the name for something else."""

    def output(self) -> str:
        """Return what it is."""
        return "mine"


def test_own_attributes_win():
    """Attributes, buffers, modules and methods of these names stay what they are."""
    model, other = nn.Linear(4, 3), WithOutput(3, 2)
    model.output = "mine"
    model.register_buffer("input0", torch.zeros(1))
    other.input0 = inside = nn.Identity()
    value = extend(nn.Sequential(model, other))(torch.rand(N, 4)).sum()
    for finish in (lambda: None, value.backward):
        finish()
        assert model.output == "mine"
        assert torch.equal(model.input0, torch.zeros(1))
        assert other.output() == "mine" and other.input0 is inside


@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagHessian", "HMP", None])
@pytest.mark.parametrize("when", ["before", "after"])
def test_attributes_of_hooks_remain(when: str, quantity: Any):
    """What a user's hook keeps by these names is there after a backward pass, too."""
    model, loss = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), extend(nn.MSELoss())
    if when == "after":
        extend(model)
    model[0].register_forward_hook(
        lambda m, x, out: setattr(m, "output", out.detach().mean(0))
    )
    model[0].input0 = 2.0
    value = loss(extend(model)(torch.rand(N, 4)), torch.zeros(N, 3))
    expected = model[0].output
    with backpack(*[make_extension(quantity)] if quantity else []):
        value.backward()
    assert model[0].output is expected and model[0].input0 == 2.0


@pytest.mark.parametrize("name", ["output", "input0"])
def test_own_attributes_in_rules(name: str):
    """A module that is repeated sees its own attribute, not what is stored."""
    found = []
    for own in (name, "scale"):
        torch.manual_seed(0)
        model, loss = (
            extend(nn.Sequential(OwnOutput(own, 3.0), nn.Tanh())),
            nn.MSELoss(),
        )
        with backpack(extensions.DiagHessian(), extensions.HMP()):
            extend(loss)(model(torch.rand(N, 3)), torch.zeros(N, 3)).backward()
        weight = model[0].weight
        found.append((weight.diag_h, weight.hmp(torch.ones_like(weight))))
    for x, y in zip(*found):
        assert torch.equal(x, y)


class Answering(nn.Linear):
    """A layer that has an answer to any name."""

    def __getattr__(self, name: str) -> Any:
        """Look up what there is, else return a default."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name in ("weight", "bias"):
                raise
            return None


def test_any_name_is_answered():
    """What is stored is not asked for by names until one is missing."""
    model = extend(nn.Sequential(Answering(4, 3), nn.Tanh(), Answering(3, 3)))
    with backpack(extensions.DiagHessian(), extensions.KFRA(), extensions.HMP()):
        extend(nn.MSELoss())(model(torch.rand(N, 4)), torch.zeros(N, 3)).backward()
    assert model[0].weight.diag_h.shape == model[0].weight.shape


def test_memory_cleanup():
    """All that was stored is deleted, on modules inside, too."""
    model = extend(nn.Sequential(Block(), nn.Linear(4, 2)))
    model(torch.rand(N, 4))
    assert stored(model)
    memory_cleanup(model)
    assert not stored(model)
    memory_cleanup(model)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("first_frozen", [True, False])
def test_dropped_after_a_backward_pass(inside: bool, first_frozen: bool):
    """Inputs and outputs are dropped, also outside of a context."""
    model, loss, x, y = small()
    model[0].requires_grad_(not first_frozen)
    value = loss(model(x), y)
    assert stored(model) and stored(loss)
    if inside:
        with backpack(BatchGrad()):
            value.backward()
    else:
        value.backward()
    assert not stored(model) and not stored(loss)


def test_kept_with_retain_graph():
    """``retain_graph=True`` keeps them, until a pass without it."""
    model, loss, x, y = small()
    value = loss(model(x), y)
    with backpack(BatchGrad(), retain_graph=True):
        value.backward(retain_graph=True)
        assert torch.equal(model[0].input0, x)
    assert torch.equal(model[0].input0, x)
    with backpack(BatchGrad()):
        value.backward()
    assert not stored(model) and not stored(loss)


FIRST_PASSES = {
    "gradient": lambda value, params: torch.autograd.grad(
        value, params, retain_graph=True
    ),
    "some gradients": lambda value, params: torch.autograd.grad(
        value, params[:1], retain_graph=True
    ),
    "backward": lambda value, params: value.backward(retain_graph=True),
    "nested": lambda value, params: keep(FIRST_PASSES["backward"], value, params),
}


def keep(run: Callable, value: Tensor, params: List[Tensor]) -> None:
    """Run a backward pass in a context without extensions."""
    with backpack(retain_graph=True):
        run(value, params)


def values_of(model: Module, ext: Any) -> List[Any]:
    """Collect a quantity's values as lists of tensors."""
    fields = []
    for param in model.parameters():
        field = getattr(param, ext.savefield)
        field = field(torch.ones(1, *param.shape)) if callable(field) else field
        field = getattr(field, "individual", lambda f=field: f)()
        fields.append(field if isinstance(field, list) else [field])
    return fields


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("first", FIRST_PASSES)
@pytest.mark.parametrize("quantity", ALL)
def test_kept_without_extensions(quantity: Callable, first: str, times: int):
    """``retain_graph=True`` keeps them without extensions, too."""
    ext, fields = quantity(), []
    for passes in (0, times):
        torch.manual_seed(1)
        model, loss, x, y = small()
        value = loss(model(x), y)
        for _ in range(passes):
            keep(FIRST_PASSES[first], value, list(model.parameters()))
            assert torch.equal(model[0].input0, x) and stored(loss)
        torch.manual_seed(2)
        with backpack(ext):
            value.backward()
        fields += values_of(model, ext)
    half = len(fields) // 2
    for without, after in zip(fields[:half], fields[half:]):
        torch.testing.assert_close(after, without, rtol=0, atol=0)


@pytest.mark.parametrize("quantity", ALL)
def test_sparse_data(quantity: Callable):
    """Each quantity of sparse data is that of the same data with strides."""
    fields = []
    for bring in (Tensor.to_sparse, Tensor.to_dense):
        torch.manual_seed(1)
        model, loss, x, y = small()
        value = loss(model(bring(x.where(x > 0, 0.0))), y)
        ext = quantity()
        torch.manual_seed(2)
        with backpack(ext):
            value.backward()
        fields.append(values_of(model, ext))
    torch.testing.assert_close(*fields)


# Passes before the one that counts; the last one does not keep the graph
BEFORE: Dict[str, Callable[[Module, Tensor, Tensor], Any]] = {
    "all": lambda m, out, value: value.backward(retain_graph=True),
    "by position": lambda m, out, value: torch.autograd.backward(value, None, True),
    "output": lambda m, out, value: grad(value, out, retain_graph=True),
    "weight": lambda m, out, value: grad(value, m[2].weight, retain_graph=True),
    "twice": lambda m, out, value: [
        grad(value, x, retain_graph=True) for x in (out, m[0].weight)
    ],
    "not entered": lambda m, out, value: grad(value, out),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", BEFORE)
def test_second_pass(name: str, inside: bool):
    """Another pass may use what the first one has left of the graph."""
    model, loss, x, y = small()
    params = list(model.parameters())
    with backpack(BatchGrad()):
        loss(model(x), y).backward()
    expected = [p.grad_batch for p in params]
    out = model(x)
    value = loss(out, y)
    if not inside:
        found = BEFORE[name](model, out, value)
    with backpack(BatchGrad()):
        if inside:
            found = BEFORE[name](model, out, value)
        if name == "not entered":
            out.backward(*found)
        else:
            value.backward()
    for p, right in zip(params, expected):
        assert torch.allclose(p.grad_batch, right)
    assert not stored(model)


@pytest.mark.parametrize("inside", [True, False])
def test_third_pass(inside: bool):
    """A pass after one that did not keep the graph says what to do."""
    model, loss, x, y = small()
    value = loss(model(x), y)
    with backpack(BatchGrad()) if inside else nullcontext():
        value.backward(retain_graph=True)
        value.backward()
    with pytest.raises(RuntimeError, match=r"`backward\(retain_graph=True\)`"):
        with backpack(BatchGrad()):
            value.backward()


# Backward passes


class Visits:
    """An extension hook that writes down where it was, and what it saw."""

    def __init__(self):
        """Start with nothing."""
        self.modules: List[Module] = []
        self.fields: List[Dict[str, List[str]]] = []
        self.watched: List[Module] = []

    def __call__(self, module: Module) -> None:
        """Write down a visit.

        Args:
            module: Where.
        """
        self.modules.append(module)
        seen = {
            name: sorted(set(vars(param)))
            for watched in self.watched
            for name, param in watched.named_parameters()
        }
        self.fields.append(seen)


def test_order_of_modules():
    """The loss comes first, then the layers in reverse order."""
    model, loss, x, y = small()
    visits = Visits()
    with backpack(BatchGrad(), extension_hook=visits):
        loss(model(x), y).backward()
    assert visits.modules == [loss, model[2], model[1], model[0]]


def test_order_of_containers():
    """A container with its own forward pass comes before what is inside."""
    block, loss = extend(Block()), extend(nn.MSELoss())
    model = extend(nn.Sequential(nn.Linear(4, 4), block))
    visits = Visits()
    visits.watched = [block]
    with backpack(BatchGrad(), extension_hook=visits):
        loss(model(torch.rand(N, 4)), torch.rand(N, 4)).backward()
    assert visits.modules == [loss, block, block.b, block.a, model[0]]
    seen = visits.fields[1]
    assert seen["scale"] == ["grad_batch"]
    assert not any(fields for name, fields in seen.items() if name != "scale")


@pytest.mark.parametrize("quantity", IN_TURN)
@pytest.mark.parametrize("num_classes", [2, 12])
def test_results_are_formed_in_turn(quantity: Callable, num_classes: int):
    """A layer has its field when its hook runs, and not before."""
    model = extend(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, num_classes)))
    loss, ext = extend(nn.CrossEntropyLoss()), quantity()
    visits = Visits()
    visits.watched = [model]
    with backpack(ext, extension_hook=visits):
        loss(model(torch.rand(N, 4)), torch.tensor([0, 1, 1])).backward()
    assert visits.modules == [loss, model[2], model[1], model[0]]
    last, first = ["2.weight", "2.bias"], ["0.weight", "0.bias"]
    for seen, names in zip(visits.fields, [[], last, last, last + first]):
        for name, fields in seen.items():
            assert fields == ([ext.savefield] if name in names else [])


@pytest.mark.parametrize("quantity", IN_TURN)
def test_hook_may_delete(quantity: Callable):
    """The hook sees fields and input, and may compress and delete the field."""
    model, loss, x, y = small()
    ext, compressed = quantity(), {}

    def compress(module: Module) -> None:
        assert torch.equal(module.input0, inputs[module])
        assert isinstance(module.output, Tensor)
        for name, param in module.named_parameters(recurse=False):
            compressed[module, name] = getattr(param, ext.savefield)
            delattr(param, ext.savefield)

    f = model(x)
    inputs = {module: module.input0 for module in model}
    value = loss(f, y)
    inputs[loss] = loss.input0
    with backpack(ext, extension_hook=compress):
        value.backward()
    assert set(compressed) == {
        (model[i], n) for i in (0, 2) for n in ("weight", "bias")
    }
    assert not any(hasattr(param, ext.savefield) for param in model.parameters())


class OwnProduct(torch.autograd.Function):
    """A linear map with a backward of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply.

        Args:
            ctx: For the backward pass.
            x: Input.
            weight: Weight.

        Returns:
            Output.
        """
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tuple[Tensor, Tensor]:
        """Pull back a gradient.

        Args:
            ctx: From the forward pass.
            grad_output: The gradient.

        Returns:
            Gradients of input and weight.
        """
        x, weight = ctx.saved_tensors
        return grad_output @ weight, grad_output.T @ x


class OwnChain(Module):
    """Parameters that functions of one's own take, one after the other."""

    def __init__(self):
        """Create them."""
        super().__init__()
        self.first = nn.Parameter(torch.rand(4, 3))
        self.second = nn.Parameter(torch.rand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply twice.

        Args:
            x: Input.

        Returns:
            Output.
        """
        return OwnProduct.apply(OwnProduct.apply(x, self.first).tanh(), self.second)


class OwnState(Module):
    """A parameter that a layer inside takes: the state that a cell begins with."""

    def __init__(self):
        """Create state and layers."""
        super().__init__()
        self.state = nn.Parameter(torch.rand(3))
        self.cell, self.last = nn.GRUCell(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Take two steps.

        Args:
            x: Input.

        Returns:
            Output.
        """
        h = self.state.expand(len(x), -1)
        return self.last(self.cell(x, self.cell(x, h)))


class OwnFactors(Module):
    """Parameters of the model that operations take between its layers."""

    def __init__(self):
        """Create parameters and layers."""
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 3))
        self.scale = nn.Parameter(torch.rand(2))
        self.layer, self.inside = nn.Linear(4, 2), Module()
        self.inside.factor = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, scale, map, scale.

        Args:
            x: Input.

        Returns:
            Output.
        """
        x = F.linear(x, self.weight).tanh() * self.inside.factor
        return self.layer(x) * self.scale


CONVERTED = ["BatchGrad", "DiagGGNExact", "DiagHessian", "BatchDiagHessian", "HMP"]
TAKEN_ELSEWHERE = [
    *((kind, False, name) for kind in (OwnChain, OwnState) for name in CONVERTED[:2]),
    *((OwnFactors, True, name) for name in CONVERTED),
]


@pytest.mark.parametrize("kind, converts, name", TAKEN_ELSEWHERE)
def test_hook_waits_for_what_is_taken_elsewhere(kind: type, converts: bool, name: str):
    """The hook finds the field of each parameter at the module that has it."""
    model = extend(kind(), use_converter=converts)
    ext, found = make_extension(name), []

    def take(module: Module) -> None:
        for param in module.parameters(recurse=False):
            if hasattr(param, ext.savefield):
                found.append(param)
                delattr(param, ext.savefield)

    with backpack(ext, extension_hook=take):
        loss = extend(nn.CrossEntropyLoss())
        loss(model(torch.rand(N, 3)), torch.tensor([0, 1, 1])).backward()
    assert set(found) == set(model.parameters())


@pytest.mark.parametrize("quantity", IN_TURN)
def test_hook_sees_gradients(quantity: Callable):
    """Autograd has accumulated a layer's gradient when the hook runs."""
    layers = [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten()]
    model = extend(nn.Sequential(*layers, nn.Linear(2, 3)))
    loss, seen = extend(nn.CrossEntropyLoss()), {}

    def look(module: Module) -> None:
        seen.update({p: p.grad.clone() for p in module.parameters(recurse=False)})

    with backpack(quantity(), extension_hook=look):
        loss(model(torch.rand(N, 2, 3, 3)), torch.tensor([0, 1, 1])).backward()
    assert seen.keys() == set(model.parameters())
    for param, gradient in seen.items():
        assert torch.equal(gradient, param.grad)


@pytest.mark.parametrize("quantity", IN_TURN)
def test_hook_may_overwrite(quantity: Callable):
    """What the hook does to a field changes nothing else: it owns its memory."""
    layers = [nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten()]
    model = extend(nn.Sequential(*layers, nn.Linear(2, 2), nn.Linear(2, 3)))
    loss, ext = extend(nn.CrossEntropyLoss()), quantity()
    x, y = torch.rand(N, 2, 3, 3), torch.tensor([0, 1, 1])

    def run(hook: Callable[[Module], None]) -> Dict[str, Any]:
        torch.manual_seed(0)
        model.zero_grad()
        with backpack(ext, extension_hook=hook):
            loss(model(x), y).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    fields: Dict[Tensor, List[Tensor]] = {}

    def remember(module: Module) -> None:
        for param in module.parameters(recurse=False):
            fields[param] = [x.clone() for x in tensors(param, ext.savefield)]

    def overwrite(module: Module) -> None:
        for param in module.parameters(recurse=False):
            for value, expected in zip(tensors(param, ext.savefield), fields[param]):
                assert torch.allclose(value, expected)
                value.fill_(7.0)

    expected = run(remember)
    for name, gradient in run(overwrite).items():
        assert torch.allclose(gradient, expected[name])


def tensors(param: Tensor, field: str) -> List[Tensor]:
    """List the tensors in a field; none if it is a function."""
    value = getattr(param, field)
    value = value if isinstance(value, list) else [value]
    return [x for x in value if isinstance(x, Tensor)]


def test_hook_runs_once_for_each_call():
    """A module that is called twice is visited twice; at last its field is complete."""
    layer, loss = extend(nn.Linear(3, 3)), extend(nn.MSELoss())
    seen: List[Tensor] = []

    def remember(module: Module) -> None:
        if module is layer:
            seen.append(layer.weight.grad_batch)

    with backpack(BatchGrad(), extension_hook=remember):
        loss(layer(layer(torch.rand(N, 3)).sin()), torch.rand(N, 3)).backward()
    assert len(seen) == 2
    assert torch.allclose(seen[1].sum(0), layer.weight.grad)
    assert layer.weight.grad_batch is seen[1]


def in_list(m: Module, x: Tensor) -> Tensor:
    """Multiply with a list's parameters."""
    for w in m.ws:
        x = (x @ w).tanh()
    return x


def of_two(layer: Module) -> Module:
    """Let one module take a layer's weight, and another one its bias."""
    first = Lambda(lambda m, x: x @ m.b.weight, b=layer)
    return nn.Sequential(first, Lambda(lambda m, x: (x + m.b.bias).tanh(), b=layer))


NEVER_CALLED: Dict[str, Callable[[], Module]] = {
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    "list": lambda: Lambda(
        in_list, ws=nn.ParameterList([nn.Parameter(torch.rand(4, 4)) for _ in "ab"])
    ),
    "weight-alone": lambda: Lambda(
        lambda m, x: F.linear(m.a(x).tanh(), 2 * m.b.weight, m.b.bias),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
    ),
    "of-two": lambda: of_two(nn.Linear(4, 4)),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "used-twice": lambda: Lambda(
        lambda m, x: m.a(m.a(x).tanh()),
        a=Lambda(lambda m, x: x @ m.b.weight, b=nn.Linear(4, 4, bias=False)),
    ),
}


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_hook_visits_what_is_never_called(name: str):
    """Modules whose parameters others use are visited once, when these have values."""
    model, loss = extend(nn.Sequential(NEVER_CALLED[name]())), extend(nn.MSELoss())
    seen: List[Tensor] = []

    def take(module: Module) -> None:
        for param in module.parameters(recurse=False):
            seen.append(param)
            del param.grad_batch

    with backpack(BatchGrad(), extension_hook=take):
        out = model(torch.rand(N, 4).unsqueeze(1))
        loss(out, torch.zeros_like(out)).backward()
    assert len(seen) == len(set(seen))
    assert set(seen) == set(model.parameters())


def test_hook_without_extensions():
    """The hook alone runs, too."""
    model, loss, x, y = small()
    visits = Visits()
    with backpack(extension_hook=visits):
        loss(model(x), y).backward()
    assert visits.modules == [loss, model[2], model[1], model[0]]


def test_order_of_extensions(capsys: pytest.CaptureFixture):
    """Extensions run in the given order, then the hook; debug prints all of it."""
    model, loss, x, y = small()
    exts = [Variance(), DiagGGNExact(), BatchGrad()]

    def hook(module: Module) -> None:
        print("hook", type(module).__name__)

    with backpack(*exts, extension_hook=hook, debug=True):
        loss(model(x), y).backward()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * (len(exts) + 2)  # one per extension, one per hook, ours
    for start, module in zip(range(0, 20, 5), [loss, model[2], model[1], model[0]]):
        names = [type(ext).__name__ for ext in exts]
        for line, name in zip(lines[start:], names):
            assert name in line and type(module).__name__ in line
        assert "hook" in lines[start + 3] and type(module).__name__ in lines[start + 3]
        assert lines[start + 4] == f"hook {type(module).__name__}"


def test_debug_shows_progress(capsys: pytest.CaptureFixture):
    """An exact quantity with many columns tells how far it is."""
    model, loss = extend(nn.Linear(3, 25)), extend(nn.MSELoss())
    with backpack(DiagGGNExact(), debug=True):
        loss(model(torch.rand(2, 3)), torch.rand(2, 25)).backward()
    counts = re.findall(r"pulled back (\d+) columns", capsys.readouterr().out)
    assert counts == ["10", "20", "25"]


def test_silent_by_default(capsys: pytest.CaptureFixture):
    """Without debug, nothing is printed."""
    model, loss, x, y = small()
    with backpack(BatchGrad(), DiagGGNExact()):
        loss(model(x), y).backward()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("quantity", ALL)
def test_nothing_left_in_saved_quantities(quantity: Callable):
    """Nothing waits for a turn that does not come."""
    model, loss, x, y = small()
    ext = quantity()
    with backpack(ext):
        loss(model(x), y).backward()
    assert ext.saved_quantities._saved_quantities == {}


def test_extended_after_the_forward_pass():
    """There is nothing to compute from then; a warning says so."""
    model = nn.Linear(4, 2)
    value = extend(nn.CrossEntropyLoss())(
        model(torch.rand(N, 4)), torch.tensor([0, 1, 1])
    )
    extend(model)
    with pytest.warns(UserWarning, match="extend"):
        with backpack(BatchGrad()):
            value.backward()
    assert not hasattr(model.weight, "grad_batch")


def test_fields_are_attributes():
    """Fields stay over ``zero_grad``, can be tagged, deleted and overwritten."""
    model, loss, x, y = small()
    with backpack(BatchGrad(), SqrtGGNExact()):
        loss(model(x), y).backward()
    weight = model[0].weight
    model.zero_grad()
    first = weight.grad_batch
    first.tag = "mine"
    assert weight.grad_batch.tag == "mine" and weight.grad is None
    del weight.sqrt_ggn_exact
    with backpack(BatchGrad()):
        loss(model(2 * x), y).backward()
    assert weight.grad_batch is not first
    assert not hasattr(weight, "sqrt_ggn_exact")
    assert not torch.equal(weight.grad_batch, first)


def test_module_may_disappear():
    """A model that is deleted before the backward pass: a clear error."""
    model, loss, x, y = small()
    value = loss(model(x), y)
    weight = model[0].weight
    del model
    with pytest.raises(RuntimeError, match="Keep the model"):
        with backpack(BatchGrad()):
            value.backward()
    assert not hasattr(weight, "grad_batch")
