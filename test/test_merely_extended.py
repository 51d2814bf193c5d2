"""A model that is extended, and nothing else, works as before.

Without a context, forward and backward pass are those of the plain model, for any kind
of tensor; it can be traced, scripted, transformed and copied.
"""

from copy import deepcopy
from io import BytesIO
from typing import Any, Callable, Dict, Tuple

import pytest
import torch
from per_sample import F64, Lambda, N, param
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao import quantization
from torch.func import functional_call
from torch.nn import Module
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

from backpack import backpack, disable, extend
from backpack.engine.nodes import saved as of_saved
from backpack.engine.nodes.record import Call
from backpack.extensions import BatchGrad

D = 4


def mlp() -> Module:
    """Make a small model."""
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))


class Own(Module):
    """A model whose parameters meet data in operations."""

    def __init__(self) -> None:
        """Create the parameters."""
        super().__init__()
        self.fc, self.w, self.scale = nn.Linear(D, D), param(D, 2), param(2)

    def forward(self, x: Tensor) -> Tensor:
        """Predict."""
        return torch.softmax(torch.matmul(self.fc(x), self.w) * self.scale, -1)


class OfOwnClass(Tensor):
    """A tensor of another class."""


def in_place(m: Module, x: Tensor) -> Tensor:
    """Write to views."""
    h = m.f(x)
    h[:, 1:] *= m.p
    y = x.clone()
    y[:, 1:] = h[:, :-1] + x[:, :-1]
    return y


def written_as_real(m: Module, x: Tensor) -> Tensor:
    """Write to the parts of complex numbers, which are views."""
    z = torch.complex(m.f(x), x)
    z.real.mul_(m.p)
    z.imag = m.p.expand_as(x)
    return z.abs()


def nested_inside(m: Module, x: Tensor) -> Tensor:
    """Compute with parts of different sizes at once."""
    parts = torch.nested.as_nested_tensor([x[:1], x[1:]])
    return torch.nested.to_padded_tensor(m.f(parts) * 2.0, 0.5) * m.p


def packed(m: Module, x: Tensor) -> Tensor:
    """Call a recurrent layer with sequences of different lengths."""
    lengths = torch.tensor([3, 1, 2, 3], device="cpu")
    out, _ = m.r(pack_padded_sequence(x, lengths, True, enforce_sorted=False))
    return out.data * m.p


def sparse_layer() -> Module:
    """Make a model that multiplies sparse data by a weight."""
    return Lambda(lambda m, x: torch.sparse.mm(x, m.w) + m.b, w=param(D, 2), b=param(2))


def meta(make: Callable[[], Module]) -> Callable[[], Module]:
    """Make a model without numbers."""
    return lambda: make().to("meta")


MERELY: Dict[str, Tuple[Callable[[], Module], Callable[[], Tensor]]] = {
    "dense": (mlp, lambda: torch.randn(N, D)),
    "sparse-input": (sparse_layer, lambda: torch.eye(N, D).to_sparse()),
    "sparse-input-of-a-layer": (mlp, lambda: torch.eye(N, D).to_sparse()),
    "sparse-csr-input": (sparse_layer, lambda: torch.eye(N, D).to_sparse_csr()),
    "sparse-weight": (
        lambda: Lambda(
            lambda m, x: torch.sparse.mm((m.w * 2).to_sparse(), x.T).T, w=param(2, D)
        ),
        lambda: torch.randn(N, D),
    ),
    "sparse-csr-weight": (
        lambda: Lambda(
            lambda m, x: torch.sparse.mm((m.w * 2).to_sparse_csr(), x.T).T,
            w=param(2, D),
        ),
        lambda: torch.randn(N, D),
    ),
    "written-as-real-numbers": (
        lambda: Lambda(written_as_real, f=nn.Linear(D, D), p=param(D)),
        lambda: torch.randn(N, D),
    ),
    "made-in-inference-mode": (
        lambda: Lambda(
            lambda m, x: m.f((x + m.shift).tanh()), shift=param(D), f=nn.Linear(D, 3)
        ),
        torch.inference_mode()(lambda: torch.randn(N, D)),
    ),
    "part-of-what-was-made-in-inference-mode": (
        lambda: Lambda(
            lambda m, x: (lambda z: z.view(N, -1) + m.f((z + m.shift).tanh()))(
                x[:, 1:]
            ),
            shift=param(D - 1),
            f=nn.Linear(D - 1, D - 1),
        ),
        torch.inference_mode()(lambda: torch.randn(N, D)),
    ),
    "nested": (
        lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2)),
        lambda: torch.nested.nested_tensor([torch.ones(2, D), torch.ones(3, D)]),
    ),
    "nested-then-padded": (
        lambda: Lambda(
            lambda m, x: torch.nested.to_padded_tensor(m.f(x), 0.0) * m.p,
            f=nn.Linear(D, 2),
            p=param(2),
        ),
        lambda: torch.nested.nested_tensor([torch.ones(2, D), torch.ones(3, D)]),
    ),
    "nested-jagged": (
        mlp,
        lambda: torch.nested.nested_tensor(
            [torch.ones(2, D), torch.ones(3, D)], layout=torch.jagged
        ),
    ),
    "nested-jagged-in-operations": (
        lambda: Lambda(lambda m, x: (x.tanh() @ m.w) * m.b, w=param(D, 2), b=param(2)),
        lambda: torch.nested.nested_tensor(
            [torch.ones(2, D), torch.ones(3, D)], layout=torch.jagged
        ),
    ),
    "meta": (meta(mlp), lambda: torch.randn(N, D, device="meta")),
    "meta-in-operations": (meta(Own), lambda: torch.randn(N, D, device="meta")),
    "meta-in-place": (
        meta(lambda: Lambda(in_place, f=nn.Linear(D, D), p=param(D - 1))),
        lambda: torch.randn(N, D, device="meta"),
    ),
    "nested-inside": (
        lambda: Lambda(nested_inside, f=nn.Linear(D, 2), p=param(2)),
        lambda: torch.randn(N, D),
    ),
    "subclass-in-operations": (
        Own,
        lambda: torch.randn(N, D).as_subclass(OfOwnClass),
    ),
    "packed": (
        lambda: Lambda(packed, r=nn.GRU(D, 2, batch_first=True), p=param(2)),
        lambda: torch.randn(N, 3, D),
    ),
    "lazy-layers-in-operations": (
        lambda: Lambda(
            lambda m, x: m.g(m.n(m.f(x * m.p).tanh())),
            **{"f": nn.LazyLinear(3), "n": nn.LazyBatchNorm1d(), "p": param(D)},
            g=nn.LazyLinear(2),
        ),
        lambda: torch.randn(N, D),
    ),
    "no-samples-in-operations": (Own, lambda: torch.randn(0, D)),
    "one-axis-in-operations": (Own, lambda: torch.randn(D)),
    "no-samples": (mlp, lambda: torch.randn(0, D)),
    "one-axis": (mlp, lambda: torch.randn(D)),
    "complex": (
        lambda: nn.Linear(D, 2, dtype=torch.complex64),
        lambda: torch.randn(N, D, dtype=torch.complex64),
    ),
    "recurrent-without-batch": (
        lambda: Lambda(lambda m, x: m.r(x)[0], r=nn.GRU(D, 2)),
        lambda: torch.randn(3, D),
    ),
    "batch-statistics": (
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)),
        lambda: torch.randn(N, D),
    ),
}


def total(out: Tensor, loss: Module) -> Tensor:
    """Add up the losses of all that a model returns."""
    out = out.values() if out.is_nested and out.layout == torch.jagged else out
    parts = out.unbind() if out.is_nested else (out,)
    parts = [x.abs() if x.is_complex() else x for x in parts]
    return sum(loss(x, torch.ones_like(x)) for x in parts)


@pytest.mark.filterwarnings("ignore:(?s).*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize("of_input", [False, True], ids=["", "input-gradient"])
@pytest.mark.parametrize("name", MERELY)
def test_without_a_context(name: str, of_input: bool) -> None:
    """Forward and backward pass are those of a model that isn't extended."""
    make, data = MERELY[name]
    results = []
    for extended in (False, True):
        torch.manual_seed(0)
        model, x = make(), data()
        x = x.clone().requires_grad_() if of_input else x
        loss = nn.MSELoss(reduction="sum")
        if extended:
            model, loss = extend(model), extend(loss)
        value = total(model(x), loss)
        value.backward()
        results.append([value.detach(), *[p.grad for p in model.parameters()]])
        if of_input:
            grad = x.grad if x.grad.is_nested else x.grad.to_dense()
            results[-1].append(total(grad, nn.MSELoss(reduction="sum")))
    for actual, expected in zip(*reversed(results)):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert expected.is_meta or torch.equal(actual, expected)


COMPILERS: Dict[str, Callable[[Module, Tensor], Callable]] = {
    "trace": lambda model, x: torch.jit.trace(model, x),
    "script": lambda model, x: torch.jit.script(model),
    "functional": lambda model, x: lambda x: functional_call(
        model, dict(model.named_parameters()), (x,)
    ),
    "vmap": lambda model, x: torch.vmap(model),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "copy": lambda model, x: deepcopy(model),
    "no-store": lambda model, x: disabled(model),
    "quantized": lambda model, x: quantized(model),
}


def quantized(model: Module) -> Module:
    """Copy a model with layers that train for integers, to which hooks are moved."""
    model.qconfig = quantization.get_default_qat_qconfig()
    return quantization.prepare_qat(model)


def disabled(model: Module) -> Callable:
    """Make a function that calls a model where nothing is stored."""

    def call(x: Tensor) -> Tensor:
        with disable():
            return model(x)

    return call


@pytest.mark.filterwarnings("ignore:(?s).*(torch.jit|deprecated)")
@pytest.mark.parametrize("make", [mlp, Own])
@pytest.mark.parametrize("name", COMPILERS)
def test_compiled_after_it_was_extended(name: str, make: Callable) -> None:
    """A model that is extended can be traced, scripted, transformed and copied."""
    torch.manual_seed(0)
    plain, x, results = make().float(), torch.randn(N, D), []
    for model in (extend(deepcopy(plain)), plain):
        function = COMPILERS[name](model, x)
        out = function(x)
        function(x).sum().backward()
        holder = function if isinstance(function, Module) else model
        results.append([out, *[p.grad for p in holder.parameters()]])
    for actual, expected in zip(*results):
        assert torch.equal(actual, expected)
    with backpack(BatchGrad()):  # it is extended still
        model = extend(deepcopy(plain))
        COMPILERS[name](model, x)
        model(x).sum().backward()
    assert all(hasattr(p, "grad_batch") for p in model.parameters())


def saved(x: Any) -> Any:
    """Save something, and load it as PyTorch does by default: nothing but tensors."""
    buffer = BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("copy", [saved, deepcopy])
def test_tensors_that_were_seen_can_be_copied(copy: Callable) -> None:
    """Inputs, states and outputs can be saved, and used again."""
    model = extend(
        Lambda(
            lambda m, x: m.f(x) * m.w + keep(m, x),
            f=nn.Linear(D, D),
            w=param(D),
            state=nn.Buffer(torch.zeros(N, D)),
        )
    )
    x = torch.randn(N, D)
    out = model(x)
    assert torch.equal(copy(out.detach()), out.detach())
    assert copy is deepcopy or torch.equal(copy(out), out)  # which is no leaf
    model.load_state_dict(copy(model.state_dict()))
    again = copy(x)
    assert torch.equal(again, x) and torch.equal(model.state, x)
    with backpack(BatchGrad()):
        model(again).square().sum().backward()
    for p in model.parameters():
        assert torch.allclose(p.grad_batch.sum(0), p.grad)


def keep(m: Module, x: Tensor) -> Tensor:
    """Remember the last input in a buffer."""
    before, m.state = m.state, 1.0 * x
    return before


def linearized(m: Module, x: Tensor) -> Tensor:
    """Record the tangents of a part of the model while it runs."""
    out, tangent = torch.func.linearize(m.f, x)
    return out + tangent(torch.ones_like(x))


def twice(m: Module, x: Tensor) -> Tensor:
    """Differentiate through the derivative of a part that is in evaluation mode."""
    z = m.f(x)
    part = nn.functional.batch_norm(z, torch.zeros(D), torch.ones(D)).sin().sum()
    (d,) = torch.autograd.grad(part, z, create_graph=True)
    return z + d


@pytest.mark.parametrize("make", [mlp, Own])
def test_operations_are_not_counted(make: Callable) -> None:
    """What looks where samples are is hidden from modes that count or record."""
    counts, x = [], torch.randn(N, D)
    for model in (make(), extend(make())):
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def linearized_by_sample(m: Module, x: Tensor) -> Tensor:
    """Record the tangents of operations on each sample's own."""
    each = torch.func.vmap(lambda z: m.f.weight @ z)
    return torch.func.linearize(each, x)[1](x)


@pytest.mark.filterwarnings("ignore:(?s).*")  # PyTorch's own, of what is old
@pytest.mark.parametrize("forward", [linearized, linearized_by_sample])
def test_recorded_while_it_runs(forward: Callable) -> None:
    """A part of the model may be recorded by PyTorch."""
    x, model = torch.randn(N, D), Lambda(forward, f=nn.Linear(D, D))
    expected = model(x)
    assert torch.equal(extend(model)(x), expected)


def test_derivative_of_a_normalization() -> None:
    """One with fixed statistics lets samples alone, as does its derivative."""
    model, x = extend(Lambda(twice, f=nn.Linear(D, D))), torch.randn(N, D)
    rows = [torch.autograd.grad(model(y).sum(), model.f.weight)[0] for y in x.split(1)]
    value = model(x).sum()
    with backpack(BatchGrad()):
        value.backward()
    assert torch.allclose(model.f.weight.grad_batch, torch.stack(rows), atol=1e-6)


def test_complex_outputs() -> None:
    """Nobody warns of a second model where the first has a result."""
    other = extend(nn.Linear(2, 2))
    model = extend(
        Lambda(lambda m, x: m.f(x + 0j), f=nn.Linear(D, D, dtype=torch.cfloat))
    )
    with backpack(BatchGrad()):
        model(torch.randn(N, D)).abs().sum().backward()
    assert model.f.weight.grad_batch.shape == (N, D, D) and other is not None


def both(m: Module, x: Tensor) -> Tuple[Tensor, Tensor]:
    """Return a prediction, and what it is computed from."""
    h = m.f(x)
    return m.g(h.tanh()), h


def with_parameter(m: Module, x: Tensor) -> Dict[str, Any]:
    """Return a parameter and an input as well."""
    return {"x": x, "w": m.g.weight, "out": m.g(m.f(x)), "more": [m.f.bias]}


def inner_views(m: Module, x: Tensor) -> Tensor:
    """Write to a view that a module has returned."""
    h, view = m.inner(x)
    view[:, 0].zero_()
    return m.g(h)


def of_outputs(m: Module, x: Tensor) -> Any:
    """Differentiate one output by another one."""
    out, h = m(x)
    return torch.autograd.grad(out.sum(), h, retain_graph=True)


def kept_gradient(m: Module, x: Tensor) -> Any:
    """See the gradient at an output, of which another one is made."""
    out, h = m(x)
    h.retain_grad()
    (out.pow(2).mean() + 0.1 * h.pow(2).mean()).backward()
    return [h.grad]


def hooked(m: Module, x: Tensor) -> Any:
    """Change the gradient at an output, of which another one is made."""
    out, h = m(x)
    h.register_hook(lambda g: 2 * g)
    (out.pow(2).mean() + h.mean()).backward()
    return [p.grad for p in m.parameters()]


def twice_the_same(m: Module, x: Tensor) -> Any:
    """Return the same tensor twice, beside another one."""
    a, b, c = m(x)
    a.flag = True
    assert a is b and b.flag and c is not a
    return [a, c]


def own_list(m: Module, x: Tensor) -> Any:
    """Add to a list that the module has returned, and keeps."""
    out, cache = m(x)
    cache.append(out)
    assert m.cache is cache and len(m.cache) == 2
    return cache


def is_parameter(m: Module, x: Tensor) -> Any:
    """Differentiate by a parameter that the model has returned."""
    found = m(x)
    assert found["w"] is m.g.weight and found["more"][0] is m.f.bias
    assert found["x"] is x
    return torch.autograd.grad(found["out"].sum(), [found["w"], *found["more"]])


def cached(m: Module, x: Tensor) -> Tuple[Tensor, Any]:
    """Keep what is returned."""
    h = m.f(x)
    m.cache = [h]
    return m.g(h), m.cache


PARTS = {"f": lambda: nn.Linear(D, D), "g": lambda: nn.Linear(D, D)}
# Models that return several tensors, and what a program does with them
SEVERAL: Dict[str, Tuple[Callable, Callable]] = {
    "one-by-another": (both, of_outputs),
    "gradient-at-one": (both, kept_gradient),
    "hook-at-one": (both, hooked),
    "the-same-twice": (lambda m, x: (h := m.f(x), h, m.g(h)), twice_the_same),
    "list-of-its-own": (cached, own_list),
    "parameters": (with_parameter, is_parameter),
    "views": (inner_views, lambda m, x: [m(x)]),
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_outputs(name: str, within: bool) -> None:
    """What a module returns is what it has computed, and no copy."""
    forward, program = SEVERAL[name]

    def run(prepare: Callable) -> Any:
        torch.manual_seed(0)
        inner = Lambda(lambda m, x: (h := m.f(x), h.view(len(x), 2, 2)), f=PARTS["f"]())
        model = Lambda(forward, inner=inner, **{k: v() for k, v in PARTS.items()})
        x = torch.randn(N, D, requires_grad=True)
        if not within:
            return program(prepare(model), x)
        outer = prepare(Lambda(lambda m, x: program(m.model, x), model=model))
        return outer(x)

    torch.testing.assert_close(run(extend), run(lambda model: model))


class Marked(Tensor):
    """A class of tensors whose results are of that class."""


@pytest.mark.parametrize("function", [torch.mul, torch.div, torch.maximum])
def test_class_of_results(function: Callable) -> None:
    """An operation gets constants of the class that they have."""
    model = Lambda(lambda m, x: function(x, m.w.as_subclass(Marked)), w=param(4))
    assert type(extend(model)(torch.ones(3, 4, dtype=F64))) is Marked


@pytest.mark.skipif(
    of_saved._innermost_hooks is None,
    reason="This version does not say whose they are.",
)
def test_hooks_on_what_is_saved() -> None:
    """Who compresses activations and spares parameters has the same gradients."""

    def forward(m: Module, x: Tensor) -> Tensor:
        return (torch.tanh(x @ m.w) * m.s) @ m.v

    def pack(x: Tensor) -> Tensor:
        spares = isinstance(x, nn.Parameter) or not x.is_floating_point()
        return x if spares else x.bfloat16()

    def unpack(x: Tensor) -> Tensor:
        return x.to(F64) if x.dtype == torch.bfloat16 else x

    torch.manual_seed(0)
    model = Lambda(forward, w=param(4, 3), s=param(3), v=param(3, 2)).to(F64)
    x, params, found = torch.randn(N, 4).to(F64), list(model.parameters()), []
    for other in (deepcopy(model), extend(model)):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            value = other(x).square().sum()
        found.append(torch.autograd.grad(value, list(other.parameters())))
    assert all(map(torch.equal, *found))
    assert not any(p.grad_fn for p in params)


def test_shapes_that_do_not_fit() -> None:
    """An operation says itself what it can't do."""
    model, x = Lambda(lambda m, x: x / m.w, w=param(4)), torch.ones(3, 5, dtype=F64)
    says = []
    for m in (model, extend(model)):
        with pytest.raises(RuntimeError) as caught:
            m(x)
        says.append(str(caught.value))
    assert says[0] == says[1]


def test_tensors_without_numbers() -> None:
    """Shapes can be asked for, and nothing is said of it."""
    with FakeTensorMode():
        model = extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
        assert model(torch.empty(5, 4)).shape == (5, 2)


def test_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each output lets go of is let go of once."""
    release, released, counts = Call.release, [], []

    def counting(call: Call, *args: Any) -> None:
        released.append(call)
        release(call, *args)

    monkeypatch.setattr(Call, "release", counting)
    for heads in (16, 32):
        model = Lambda(
            lambda m, x: [h(m.b(x)) for h in m.h],
            b=nn.Linear(3, 4),
            h=nn.ModuleList(nn.Linear(4, 2) for _ in range(heads)),
        )
        loss = extend(nn.MSELoss())
        outputs = extend(model)(torch.rand(N, 3))
        sum(loss(f, torch.zeros(N, 2)) for f in outputs).backward()
        counts.append(len(released))
        released.clear()
    assert counts[1] < 2.2 * counts[0]
