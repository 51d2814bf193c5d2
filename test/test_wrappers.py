"""A model or a pass inside of what others wrap around it: right, or refused by name.

Compilers, threads, tasks of asyncio, copies; replicas and shards of several processes,
which compute all rows of theirs, while the tests compare.
"""

import asyncio
import gc
import os
import pickle
import re
import sys
import threading
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import lru_cache, partial
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
    Type,
    Union,
)

import oracle
import pytest
import torch
import torch.nn.functional as F
from per_sample import Double, Lambda
from per_sample import Row as Problem
from per_sample import against_classes, assert_fields, classes, randn, reference
from processes import in_processes, needs_gloo
from test_distributed import KRONECKER, OTHERS
from torch import Tensor, distributed, nn
from torch.nn import Module
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from backpack import backpack, disable, extend
from backpack.distributed import reduce
from backpack.engine.nodes.uses import Use
from backpack.extensions import (
    HBP,
    KFAC,
    KFLR,
    KFRA,
    BatchGrad,
    BatchL2Grad,
    ClippedGrad,
    DiagGGNExact,
    DiagHessian,
    Variance,
    WeightedGrad,
)
from backpack.utils.state import state

F64 = torch.float64
D = 4
# What the compiler warns of, be it in Python 3.13.0
COMPILER = "The .grad attribute|Graph break|Guards may run slower|flex_attention called"
STEPS = 1000 if os.environ.get("BACKPACK_TEST_LONG") else 20


def mlp() -> Module:
    """Make a small model, which two processes can share layer by layer."""
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3))


PROBLEM = Problem(mlp, randn(D), nn.CrossEntropyLoss, against_classes)
QUANTITIES = {
    "BatchGrad": BatchGrad,
    "Variance": Variance,
    "DiagGGNExact": DiagGGNExact,
}


class Pass(NamedTuple):
    """An extended model and loss, and what they are applied to."""

    model: Module
    loss: Module
    x: Tensor
    y: Tensor

    def value(self, model: Any = None, loss: Any = None) -> Tensor:
        """Compute the loss, with the model or the loss in another guise."""
        loss = self.loss if loss is None else loss
        model = self.model if model is None else model
        return loss(model(self.x), self.y)

    def run(self, model: Any = None, loss: Any = None, around: Any = None) -> None:
        """Compute all quantities."""
        with around or nullcontext(), quantities():
            self.value(model, loss).backward()


def quantities() -> backpack:
    """Make a context for all quantities."""
    return backpack(*(make() for make in QUANTITIES.values()))


def build(
    wrap: Callable[[Module], Module] = extend, problem: Problem = PROBLEM
) -> Pass:
    """Make a pass."""
    model, loss, (x,) = problem.build()
    return Pass(wrap(model), extend(loss), x, classes(torch.empty(len(x), 3)))


compiled = partial(torch.compile, backend="aot_eager")


def first_layer_compiled(model: Module, **options: Any) -> Module:
    """Compile the first layer only."""
    model[0] = compiled(model[0], **options)
    return extend(model)


def in_thread(function: Callable[[], Any]) -> None:
    """Run a function in another thread; its error is ours."""
    errors: List[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:  # noqa: B036
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def whole_step(p: Pass) -> None:
    """Compile forward pass, context and backward pass together."""
    compiled(p.run)()


def closure(p: Pass) -> None:
    """Let an optimizer call what computes the loss."""
    optimizer = torch.optim.SGD(p.model.parameters(), lr=0.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        with quantities():
            value = p.value()
            value.backward()
        return value

    optimizer.step(step)


def forward_elsewhere(p: Pass) -> None:
    """Run the forward pass in another thread."""
    values: List[Tensor] = []
    in_thread(lambda: values.append(p.value()))
    with quantities():
        values[0].backward()


def without_gradients(p: Pass) -> None:
    """Run the backward pass where no gradients are recorded."""
    value = p.value()
    with torch.no_grad(), quantities():
        value.backward()


def awaits_before(p: Pass) -> None:
    """Let other tasks run between forward and backward pass, and in the context."""

    async def task(other: Pass) -> None:
        value = other.value()
        await asyncio.sleep(0)
        with quantities():
            value.backward()
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(task(other) for other in (build(), p, build())))

    asyncio.run(main())


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors without numbers, where nobody says otherwise."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class Marked(Tensor):
    """Tensors of a class of their own."""


def with_averages(p: Pass) -> None:
    """Copy and average parameters between forward and backward pass; use the copy."""
    value = p.value()
    averages = torch.optim.swa_utils.AveragedModel(p.model)
    with quantities():
        value.backward()
    averages.update_parameters(p.model)
    assert not any(hasattr(x, "grad_batch") for x in averages.parameters())
    p.run(averages)
    assert_fields(averages.module, list(QUANTITIES), reference(PROBLEM))


def evaluated_in_between(p: Pass) -> None:
    """Evaluate the model after the forward pass, and inside of the context."""
    value = p.value()
    with torch.inference_mode():
        p.value(p.model.eval())
    with quantities():
        with torch.no_grad():
            p.value(p.model.train())
        value.backward()


def transformed_in_between(p: Pass) -> None:
    """Compute the same by function transforms, inside of the context."""
    params = {name: x.detach() for name, x in p.model.named_parameters()}

    def value(params: Dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(p.model, params, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(out, y.unsqueeze(0))

    with quantities():
        loss = p.value()
        gradients = torch.func.vmap(torch.func.grad(value), (None, 0, 0))
        expected = gradients(params, p.x, p.y)
        loss.backward()
    for name, x in p.model.named_parameters():
        oracle.assert_agrees(x.grad_batch * len(p.x), expected[name])


def lightning(p: Pass) -> None:
    """Let a trainer call what computes the loss, through another module."""

    class Task(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = p.model, p.loss

        def forward(self, batch: Tuple[Tensor, Tensor]) -> Tensor:
            return self.loss(self.model(batch[0]), batch[1])

    task = nn.Sequential(Task())
    closure(p._replace(model=task, x=(p.x, p.y), loss=lambda loss, _: loss))


def accelerate(p: Pass) -> None:
    """Replace the method ``forward`` of the model."""
    forward = p.model.forward
    p.model.forward = lambda *args: torch.utils._pytree.tree_map(
        Tensor.double, forward(*args)
    )
    p.run()
    del p.model.forward


def multi_gradient_hook(p: Pass) -> None:
    """Let a hook wait for the gradients of all parameters."""
    seen: List[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        list(p.model.parameters()), seen.append
    )
    p.run()
    handle.remove()
    assert len(seen) == 1
    for x, gradient in zip(p.model.parameters(), seen[0]):
        oracle.assert_agrees(gradient, x.grad)


def parameters_swapped(p: Pass) -> None:
    """Let modules exchange their parameters when they are converted and loaded."""
    state, future = deepcopy(p.model.state_dict()), torch.__future__
    future.set_swap_module_params_on_conversion(True)
    try:
        p.model.float().double().load_state_dict(state)
    finally:
        future.set_swap_module_params_on_conversion(False)
    p.run()


def with_dtype(dtype: torch.dtype, p: Pass) -> None:
    """Change the type that new tensors have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        p.run()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Allow deterministic algorithms only."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def anomalies() -> Iterator[None]:
    """Look for anomalies."""
    with pytest.warns(UserWarning, match="Anomaly"):
        mode = torch.autograd.detect_anomaly()
    with mode:
        yield


@contextmanager
def counted() -> Iterator[None]:
    """Count operations."""
    with FlopCounterMode(display=False) as counter:
        yield
    assert counter.get_total_flops()


def other_layer(p: Pass) -> None:
    """Replace a layer, and extend the model once more."""
    layer = nn.Linear(4, 3, dtype=F64)
    layer.load_state_dict(p.model[2].state_dict())
    p.model[2] = layer
    extend(p.model)
    p.run()


def other_parametrization(p: Pass) -> None:
    """Register a parametrization, run a pass, and remove it."""
    parametrize = nn.utils.parametrize
    parametrize.register_parametrization(p.model[0], "weight", nn.Identity())
    p.run()
    original = p.model[0].parametrizations.weight.original
    oracle.assert_agrees(original.grad_batch.sum(0), original.grad)
    p.model.zero_grad()
    parametrize.remove_parametrizations(p.model[0], "weight")
    p.run()


def exported(model: Module) -> Module:
    """Export a model as a program, in which functions take the parameters."""
    return extend(torch.export.export(model, (randn(D)()[0],)).module())


def exported_in_between(p: Pass) -> None:
    """Export a model that is extended; its program computes the same."""
    program = torch.export.export(p.model, (p.x,), strict=False).module()
    assert torch.equal(program(p.x), p.model(p.x))
    p.run()


def compiled_for_any_size(p: Pass) -> None:
    """Compile a model once, for any number of samples."""
    model = compiled(p.model, dynamic=True)
    p._replace(x=p.x[1:], y=p.y[1:]).run(model)
    p.model.zero_grad()
    p.run(model)


def input_shared(p: Pass) -> None:
    """Let another thread give the same input to another model, meanwhile."""
    other = build(problem=TIED).model

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = p.model

        def forward(self, x: Tensor) -> Tensor:
            in_thread(lambda: other(x))
            return self.model(x * 1.0)

    p.run(extend(Model()))


class Attends(Module):
    """A model behind an operation that compiles itself whenever it is called."""

    def __init__(self, model: Module) -> None:
        """Store the model."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Add attention among features, and subtract it in another spelling."""
        each = x[:, None, :, None]
        attended = flex_attention(each, each, each)
        other = nn.functional.scaled_dot_product_attention(each, each, each)
        return self.model(x + (attended - other)[:, 0, :, 0])


class Branches(Module):
    """A model that is called in a branch, behind a loop."""

    def __init__(self, model: Module) -> None:
        """Store the model."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Change the sign twice, and call the model, or another function of it."""
        loop = torch._higher_order_ops.while_loop
        number, one = torch.tensor(0), torch.tensor(1)
        _, x = loop(lambda i, x: i < 2, lambda i, x: (i + one, -x), (number, x))
        cases = self.model, lambda x: self.model(x).cos()
        return torch.cond(x.square().sum() > 0, *cases, (x,))


# Right, pass after pass: how to make the model, how to run a pass
RIGHT: Dict[str, Tuple[Callable[[], Pass], Callable[[Pass], None]]] = {
    "compiled-then-extended": (lambda: build(lambda m: extend(compiled(m))), Pass.run),
    "extended-then-compiled": (build, lambda p: p.run(compiled(p.model))),
    "compiled-in-place": (lambda: build(compiled_in_place), Pass.run),
    "compiled-layer": (lambda: build(first_layer_compiled), Pass.run),
    "compiled-loss": (build, lambda p: p.run(loss=compiled(p.loss))),
    "compiled-step": (build, whole_step),
    "closure": (build, closure),
    "forward-in-a-thread": (build, forward_elsewhere),
    "pass-in-a-thread": (build, lambda p: in_thread(p.run)),
    "input-shared-by-threads": (build, input_shared),
    "no-grad-around-backward": (build, without_gradients),
    "awaits-before-the-context": (build, awaits_before),
    "default-device": (build, lambda p: p.run(around=on_meta())),
    "subclass": (build, lambda p: p._replace(x=p.x.as_subclass(Marked)).run()),
    "data-parallel": (build, lambda p: p.run(nn.DataParallel(p.model))),
    "averages": (build, with_averages),
    "evaluated-in-between": (build, evaluated_in_between),
    "transformed-in-between": (build, transformed_in_between),
    "lightning": (build, lightning),
    "accelerate": (build, accelerate),
    "multi-gradient-hook": (build, multi_gradient_hook),
    "parameters-swapped": (build, parameters_swapped),
    "default-dtype-half": (build, partial(with_dtype, torch.bfloat16)),
    "default-dtype-double": (build, partial(with_dtype, F64)),
    "deterministic": (build, lambda p: p.run(around=deterministic())),
    "anomalies": (build, lambda p: p.run(around=anomalies())),
    "operations-counted": (build, lambda p: p.run(around=counted())),
    "saved-on-cpu": (
        build,
        lambda p: p.run(around=torch.autograd.graph.save_on_cpu()),
    ),
    "saved-tensors-mutable": (
        build,
        lambda p: p.run(around=torch.autograd.graph.allow_mutation_on_saved_tensors()),
    ),
    "one-thread": (
        build,
        lambda p: p.run(around=torch.autograd.set_multithreading_enabled(False)),
    ),
    "another-layer": (build, other_layer),
    "parametrization": (build, other_parametrization),
    "exported": (lambda: build(exported), Pass.run),
    "exported-in-between": (build, exported_in_between),
    "compiled-whole-layer": (
        lambda: build(partial(first_layer_compiled, fullgraph=True)),
        lambda p: p.run(extend(Around(p.model))),
    ),
    "attention-that-is-compiled": (
        build,
        lambda p: p.run(extend(Attends(p.model))),
    ),
    "branches": (build, lambda p: p.run(extend(Branches(p.model)))),
    "branches-compiled": (build, lambda p: p.run(compiled(extend(Branches(p.model))))),
    "compiled-for-any-size": (build, compiled_for_any_size),
    "exchanged-by-fx": (
        lambda: build(lambda m: extend(torch.fx.symbolic_trace(extend(m)))),
        Pass.run,
    ),
}


def compiled_in_place(model: Module) -> Module:
    """Compile what a module does when it is called."""
    model.compile(backend="aot_eager")
    return extend(model)


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forget what was compiled, before and afterwards."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings(f"ignore:{COMPILER}")
@pytest.mark.usefixtures("cpu", "compiler")
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    """Quantities are those of the plain pass."""
    make, run = RIGHT[name]
    p = make()
    for _ in range(2):
        run(p)
        plain = getattr(p.model, "_orig_mod", p.model)
        for parameter in plain.parameters():
            oracle.assert_agrees(parameter.grad_batch.sum(0), parameter.grad)
            parameter.grad = None
        if type(getattr(plain, "0")).__name__ == "OptimizedModule":
            plain = nn.Sequential(plain[0]._orig_mod, *plain[1:])
        assert_fields(plain, list(QUANTITIES), reference(PROBLEM))
        for parameter in plain.parameters():
            for make_extension in QUANTITIES.values():
                delattr(parameter, make_extension().savefield)


class Sees(nn.Module):
    """Pull several columns at once through a layer that is unrolled or done again."""

    def __init__(self, kind: str) -> None:
        """Create the layer."""
        super().__init__()
        self.kind = kind
        self.layer: Module = nn.Linear(D, D, bias=False)
        if kind == "Bilinear":
            self.layer = nn.Bilinear(D, D, 3)
        if kind in ("RNN", "LSTM", "GRU"):
            self.layer = getattr(nn, kind)(D, 3, batch_first=True)
        self.first = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to ``[N, D]``."""
        x = self.first(x)
        if self.kind == "Bilinear":
            return self.layer(x, x.tanh())
        if self.kind == "einsum":
            return torch.einsum("ni,ij,nj->ni", x, self.layer.weight, x.tanh())[:, :3]
        return self.layer(x.unsqueeze(1))[0][:, -1]


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU", "Bilinear", "einsum"])
def test_anomalies_in_columns(kind: str) -> None:
    """Who looks for anomalies finds none in several columns at once."""
    problem = PROBLEM._replace(model=partial(Sees, kind))
    p = build(problem=problem)
    with warnings.catch_warnings(record=True) as said:  # C++ swallows what they raise
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            p.run()
    assert not [x.message for x in said]
    assert_fields(p.model, list(QUANTITIES), reference(problem))


@pytest.mark.filterwarnings(f"ignore:{COMPILER}")
@pytest.mark.usefixtures("cpu", "compiler")
def test_compiled_one_by_one() -> None:
    """Layers of a model that is extended are compiled, but not the model."""
    p = build()
    for layer in p.model:
        layer.compile(backend="aot_eager")
    for _ in range(2):
        p.run(extend(Around(p.model)))
        assert_fields(p.model, list(QUANTITIES), reference(PROBLEM))


@pytest.mark.filterwarnings("ignore")  # older compilers tell what they leave out
@pytest.mark.usefixtures("cpu", "compiler")
def test_compiled_with_an_optimizer() -> None:
    """A whole step is compiled, context and all, together with the optimizer's."""
    p = build()
    optimizer = torch.optim.SGD(p.model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        p.run()
        optimizer.step()

    step = compiled(step)
    for _ in range(3):
        step()
        assert_fields(p.model, list(QUANTITIES), reference(PROBLEM))


def interleaved(p: Pass) -> None:
    """Let two tasks enter their contexts before either runs its backward pass."""

    async def task(other: Pass) -> None:
        with quantities():
            value = other.value()
            await asyncio.sleep(0)
            value.backward()

    async def main() -> None:
        await asyncio.gather(task(p), task(build()))

    asyncio.run(main())


def handed_to_a_thread(p: Pass) -> None:
    """Run the backward pass in a thread that inherits the task's variables."""

    async def main() -> None:
        with quantities():
            await asyncio.to_thread(p.value().backward)

    asyncio.run(main())


def compiled_backward(p: Pass) -> None:
    """Compile the backward pass."""
    module = torch._dynamo.compiled_autograd
    enabled = getattr(module, "_enable", None) or module.enable  # before torch 2.6
    with quantities(), enabled(torch.compile(backend="eager")):
        p.value().backward()


def keeps_some() -> Tuple[ContextManager, ContextManager]:
    """Make contexts in which a checkpoint keeps results of some operations."""
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def repeated_once(p: Pass, **options: Any) -> None:
    """Put a model into a checkpoint that a single backward pass can repeat."""
    model = Around(partial(checkpoint, p.model, use_reentrant=False, **options))
    with backpack(BatchGrad()):
        p.value(extend(model)).backward()
    for parameter in p.model.parameters():
        oracle.assert_agrees(parameter.grad_batch.sum(0), parameter.grad)
    p.run(model)


def selective(p: Pass, check: bool) -> None:
    """Repeat a checkpoint more often than it can be."""
    options = {"use_reentrant": False, "context_fn": keeps_some}

    def forward(m: Module, x: Tensor) -> Tensor:
        of = m.f if check else lambda x: Double.apply(m.f(x), m.w)
        return checkpoint(of, x, **options)

    model = extend(Lambda(forward, f=p.model, w=nn.Parameter(torch.rand(3).to(F64))))
    with backpack(BatchGrad(), check=check):
        p.value(model).backward()


def watched(p: Pass) -> None:
    """Let inputs of a checkpoint that one pass can repeat need gradients, too."""

    def forward(m: Module, x: Tensor) -> Tensor:
        options = {"use_reentrant": False, "debug": True}
        return checkpoint(lambda x: m.f(x) * m.w, x.requires_grad_(), **options)

    model = extend(Lambda(forward, f=p.model, w=nn.Parameter(torch.rand(3).to(F64))))
    with backpack(BatchGrad()):
        p.value(model).backward()


class Failed(RuntimeError):
    """An error of the model's own."""


def fails_repeated(p: Pass, error: BaseException) -> None:
    """Put a model into a checkpoint, and let it fail when it is repeated."""
    calls: List[Module] = []

    def hook(module: Module, inputs: Tuple[Tensor, ...]) -> None:
        calls.append(module)
        if len(calls) > 1:
            raise error

    p.model[0].register_forward_pre_hook(hook)
    repeated = partial(checkpoint, p.model, use_reentrant=False)
    p.run(extend(Around(repeated)))


def overwritten(p: Pass) -> None:
    """Pull columns through what is compiled to run once, as PyTorch 2.6 and later do.

    Whether it is depends on which frames the compiler has seen in former passes.
    """
    with quantities(), state().pull():
        raise RuntimeError("This was compiled with non-empty donated buffers.")


REFUSED: Dict[str, Tuple[Callable[[Pass], None], Type[Exception], str]] = {
    "checkpoint-that-is-watched": (
        partial(repeated_once, debug=True),
        NotImplementedError,
        "DiagGGNExact.*repeated.*without.*`debug`",
    ),
    "checkpoint-of-gradients-that-is-watched": (
        watched,
        NotImplementedError,
        "BatchGrad.*repeated for what has no rule.*without.*`debug`",
    ),
    "selective-checkpoint": (
        partial(repeated_once, context_fn=keeps_some),
        NotImplementedError,
        "DiagGGNExact.*repeated.*selective.*without `context_fn`",
    ),
    **{
        f"selective-checkpoint-{name}": (
            partial(selective, check=check),
            NotImplementedError,
            "BatchGrad.*repeated for what has no rule.*without `context_fn`",
        )
        for name, check in (("checked", True), ("function", False))
    },
    **{
        f"checkpoint-fails-by-{type(error).__name__}": (
            partial(fails_repeated, error=error),
            type(error),
            "^stop$",
        )
        for error in (
            KeyboardInterrupt("stop"),
            SystemExit("stop"),
            torch.OutOfMemoryError("stop"),
            RuntimeError("stop"),
            Failed("stop"),
        )
    },
    "interleaved-tasks": (interleaved, RuntimeError, "asyncio.*without `await`"),
    "handed-to-a-thread": (handed_to_a_thread, RuntimeError, "another thread"),
    "compiled-autograd": (
        compiled_backward,
        NotImplementedError,
        "BatchGrad.*compiled autograd.*compiled_autograd = False",
    ),
    "whole-graph": (
        lambda p: p.run(compiled(p.model, fullgraph=True)),
        Exception,
        "untraced",
    ),
    "exported-strictly": (
        lambda p: torch.export.export(p.model, (p.x,), strict=True),
        Exception,
        "untraced",
    ),
    "compiled-function-for-a-loss": (
        lambda p: p.run(loss=compiled(nn.functional.cross_entropy)),
        NotImplementedError,
        "not known where.*`CompiledFunction`.*by the loss itself",
    ),
    "compiled-to-run-once": (
        overwritten,
        NotImplementedError,
        "DiagGGNExact.*runs once only.*donated_buffer = False",
    ),
}


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy"),
    reason="the compiler has to be told frame by frame",
)
@pytest.mark.filterwarnings(f"ignore:{COMPILER}")
@pytest.mark.usefixtures("cpu", "compiler")
@pytest.mark.parametrize("run", [lambda p: p.run(compiled(p.model)), whole_step])
def test_hooks_are_not_compiled(run: Callable[[Pass], None]) -> None:
    """Frames of hooks don't count for the compiler, which gives up after some."""
    run(build())
    seen = [code() for code in torch._dynamo.convert_frame.input_codes.seen]
    names = {code.co_filename for code in seen if code is not None}
    assert names and not any("/backpack/engine/" in name for name in names)


@pytest.mark.filterwarnings(f"ignore:{COMPILER}")
@pytest.mark.usefixtures("cpu", "compiler")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """An error says what is not possible, and the next pass is right."""
    import torch._dynamo.compiled_autograd  # noqa: F401

    function, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        function(build())
    assert not torch._C._len_torch_function_stack()
    p = build()
    p.run()
    assert_fields(p.model, list(QUANTITIES), reference(PROBLEM))


class Both(torch.autograd.Function):
    """Sine and cosine, which are each other's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Keep the results."""
        results = x.sin(), x.cos()
        ctx.save_for_backward(*results)
        return results

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        """Differentiate both."""
        sin, cos = ctx.saved_tensors
        return g * cos - h * sin


@pytest.mark.parametrize("used", [0, 1])
def test_function_in_a_selective_checkpoint(used: int) -> None:
    """Nothing is asked of the graph that a checkpoint makes for once."""
    layer, x = nn.Linear(D, D).to(F64), torch.randn(3, D, dtype=F64)
    values = [Both.apply(layer(row))[used].square().sum() for row in x]
    rows = [torch.autograd.grad(value, layer.weight)[0] for value in values]
    options = {"use_reentrant": False, "context_fn": keeps_some}

    def forward(m: Module, x: Tensor) -> Tensor:
        part = checkpoint(lambda z: Both.apply(m.f(z)), x, **options)
        return part[used].square()

    with backpack(BatchGrad()):
        extend(Lambda(forward, f=layer))(x).sum().backward()
    oracle.assert_agrees(layer.weight.grad_batch, torch.stack(rows))


def test_backward_in_another_thread() -> None:
    """A warning says that the context saw no backward pass."""
    p = build()
    with pytest.warns(UserWarning, match="in another thread"):
        with quantities():
            in_thread(lambda: p.value().backward())


def test_tasks_that_leave_in_any_order() -> None:
    """Contexts that overlap without a pass leave nothing active."""

    async def task(delay: int) -> None:
        with quantities():
            for _ in range(delay):
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(task(1), task(3), task(2))

    asyncio.run(main())
    nothing_is_active()


def nothing_is_active() -> None:
    """Run a pass outside of contexts, and one inside."""
    p = build()
    p.value().backward()
    assert not any(hasattr(x, "grad_batch") for x in p.model.parameters())
    p.model.zero_grad()
    p.run()


def test_generators_that_leave_in_any_order() -> None:
    """Contexts that overlap in one task don't need to be left in order."""

    def passes(number: int) -> Iterator[None]:
        p = build()
        with quantities():
            for _ in range(number):
                p.value().backward()
                yield

    for _ in zip(passes(2), passes(4), passes(3)):
        pass
    nothing_is_active()


@pytest.fixture
def many_turns() -> Iterator[None]:
    """Let threads take turns wherever they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_turns")
@pytest.mark.parametrize("own", [False, True], ids=["one-model", "own-models"])
def test_threads_share_a_loss(own: bool) -> None:
    """Each thread's pass has its own inputs; only fields of one model need a lock."""
    problems = [build() for _ in range(3)] if own else [build()] * 3
    lock = nullcontext() if own else threading.Lock()
    loss = problems[0].loss
    expected = [
        reference(PROBLEM._replace(X=lambda n=n: (PROBLEM.X()[0] + n,)))
        for n in range(3)
    ]
    found: Dict[int, Any] = {}

    def work(n: int) -> None:
        p = problems[n]._replace(x=problems[n].x + n, loss=loss)
        try:
            for _ in range(10):
                value = p.value()
                with lock:
                    with quantities():
                        value.backward()
                    assert_fields(p.model, list(QUANTITIES), expected[n])
        except BaseException:  # noqa: B036
            found[n] = traceback.format_exc()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found, "".join(found.values())
    assert not hasattr(loss, "input0")


EXTENSIONS: Dict[str, Callable[[], Any]] = {
    **OTHERS,
    **KRONECKER,
    "KFRA": KFRA,
    "HBP": lambda: HBP("ggn", "exact", "average", "E(J^T) E(H) E(J)"),
}
COPIES = {"deepcopy": deepcopy, "pickle": lambda ext: pickle.loads(pickle.dumps(ext))}


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_copies_of_extensions(name: str, copy: str, used: bool) -> None:
    """A copy computes what the original does."""
    original, results = EXTENSIONS[name](), []

    def run(ext: Any) -> List[Tensor]:
        p = build()
        with backpack(ext):
            p.value().backward()
        values = [getattr(x, ext.savefield) for x in p.model.parameters()]
        columns = [torch.ones(2, *x.shape, dtype=F64) for x in p.model.parameters()]
        values = [v(c) if callable(v) else v for v, c in zip(values, columns)]
        return [t for v in values for t in (v if isinstance(v, list) else [v])]

    if used:
        run(original)
    for ext in (COPIES[copy](original), original):
        torch.manual_seed(0)
        results.append(run(ext))
    assert results[0] and len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", EXTENSIONS)
def test_saved_models(name: str) -> None:
    """A model is saved with its quantities, but for products with matrices."""
    ext, p = EXTENSIONS[name](), build()
    with backpack(ext):
        p.value().backward()
    saved = pickle.loads(pickle.dumps(p.model))
    for original, x in zip(p.model.parameters(), saved.parameters()):
        value, expected = (getattr(y, ext.savefield) for y in (x, original))
        if callable(value):
            assert expected(original).shape == x.shape
            with pytest.raises(RuntimeError, match="left out.*Run the backward pass"):
                value(x)
        else:
            oracle.assert_agrees(value, expected)


# -------------------------------------------------------------------- several processes

WORLD = 2
DDP = nn.parallel.DistributedDataParallel


def sharded(model: Module, each: bool = False, **options: Any) -> Module:
    """Shard a model's parameters: of each layer by itself, or of all."""
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    for layer in model.children() if each else ():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def flat(model: Module, use_orig_params: bool = True, **options: Any) -> Module:
    """Put all parameters into one, which is sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    options.update(device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    return FullyShardedDataParallel(model, **options)


def replicated(model: Module) -> Module:
    """Put all parameters into one, of which each process has the whole."""
    from torch.distributed.fsdp import ShardingStrategy

    return flat(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def has_parameters(module: Module, recurse: bool, **_: Any) -> bool:
    """Tell which parts of a model are sharded by themselves, and look into all."""
    return recurse or isinstance(module, (nn.Linear, Block))


class Function(Module):
    """A function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        """Store the function."""
        super().__init__()
        self.forward = function


class Twice(Module):
    """A model that is called twice."""

    def __init__(self, model: Module) -> None:
        """Store the model."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Add up what it says of two inputs."""
        return self.model(x) + self.model(x.cos())


def flat_inside(model: Module) -> Module:
    """Put the parameters of what a model calls into one."""
    model.model = flat(model.model)
    return model


class Around(Module):
    """A model around another, of whose output it keeps a rearrangement only."""

    def __init__(self, model: Module) -> None:
        """Store the model."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Reverse what the model says, and reverse it again."""
        return self.model(x).flip(1).reshape(len(x), 3).flip(1)


def tensor_parallel(model: Module) -> Module:
    """Divide the layers themselves."""
    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    mesh = distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    return parallel.parallelize_module(model, mesh, plan)


class Block(Module):
    """Layers around which data goes, with a parameter of its own."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first, self.second = nn.Linear(D, 4), nn.Linear(4, D)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers compute."""
        return x + self.scale * self.second(torch.tanh(self.first(x)))


class Apart(Module):
    """Blocks between which functions are called."""

    def __init__(self) -> None:
        """Make the blocks."""
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Rearrange what blocks compute, before the next one gets it."""
        for block in (self.first, self.second):
            x = block(x).reshape(len(x), 2, -1).transpose(1, 2).flatten(1)
        return self.third(x)


class Tied(Module):
    """Parameters that are used twice, by way of expressions; others are frozen."""

    def __init__(self) -> None:
        """Make the parameters."""
        super().__init__()
        self.first, self.second = nn.Linear(D, 4), nn.Linear(D, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        """Use a weight, its columns, and the same transposed."""
        x = self.second(torch.tanh(self.first(x))) * self.scale.exp()
        x = torch.nn.functional.linear(x, self.first.weight.t(), self.scale)
        return self.frozen(x) + x[:, :2] @ self.first.weight[:3, :2].tanh().T


def frozen_between() -> Module:
    """Make layers between which data goes through others that are frozen."""
    frozen = nn.Sequential(nn.Linear(4, D), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(nn.Linear(D, 4), *frozen, nn.Linear(D, 3))


def checkpointed(model: Module) -> Module:
    """Extend a model, and let its blocks run once more in the backward pass."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    checkpoint_wrapper.apply_activation_checkpointing(
        extend(model), check_fn=lambda module: isinstance(module, Block)
    )
    return model


def extended_parts(model: Module) -> Module:
    """Extend what a model consists of, and not the model."""
    for part in model.children():
        extend(part)
    return model


class Shared(NamedTuple):
    """A row: how to wrap a model, which is extended before, or whose parts are."""

    wrap: Callable[[Module], Module]
    extended: Callable[[Module], Module] = extend
    problem: Problem = PROBLEM

    def make(self, rank: int) -> Pass:
        """Make a process' part of a pass; its model is not wrapped yet."""
        return own_part(build(self.extended, self.problem), rank)


def later(model: Module) -> Module:
    """Leave a model as it is."""
    return model


BLOCKS = PROBLEM._replace(
    model=lambda: nn.Sequential(Block(), Block(), nn.Linear(D, 3))
)
TIED = PROBLEM._replace(model=Tied)
TWICE = PROBLEM._replace(model=lambda: Twice(mlp()))
APART_BLOCKS = PROBLEM._replace(model=Apart)
FROZEN = PROBLEM._replace(model=frozen_between)
by_layer = partial(sharded, each=True)
flat_by_layer = partial(flat, auto_wrap_policy=has_parameters)
kept = partial(by_layer, reshard_after_forward=False)
SHARED: Dict[str, Shared] = {
    "DDP": Shared(DDP),
    "DDP-static": Shared(partial(DDP, static_graph=True)),
    "DDP-unused": Shared(partial(DDP, find_unused_parameters=True)),
    "DDP-views": Shared(partial(DDP, gradient_as_bucket_view=True)),
    "DDP-static-views": Shared(
        partial(DDP, static_graph=True, gradient_as_bucket_view=True)
    ),
    "FSDP2": Shared(sharded),
    "FSDP2-each": Shared(by_layer),
    "FSDP2-each-kept": Shared(kept),
    "FSDP1": Shared(flat),
    "FSDP1-each": Shared(flat_by_layer),
    "FSDP1-extended-later": Shared(lambda m: extend(flat_by_layer(m)), later),
    "FSDP1-blocks": Shared(flat_by_layer, problem=BLOCKS),
    "FSDP1-replicated": Shared(replicated),
    "FSDP1-inside": Shared(lambda m: Around(flat(m))),
    "FSDP1-each-inside": Shared(lambda m: Around(flat_by_layer(m))),
    "FSDP1-apart": Shared(flat_by_layer, problem=APART_BLOCKS),
    "FSDP1-apart-parts": Shared(flat_by_layer, extended_parts, APART_BLOCKS),
    "FSDP1-tied": Shared(flat, problem=TIED),
    "FSDP1-twice": Shared(flat_by_layer, problem=TWICE),
    "FSDP1-twice-inside": Shared(flat_inside, problem=TWICE),
    "FSDP2-twice": Shared(by_layer, problem=TWICE),
    "FSDP2-tied": Shared(sharded, problem=TIED),
    "DDP-tied": Shared(DDP, problem=TIED),
    "DDP-extended-later": Shared(lambda m: extend(DDP(m)), later),
    "FSDP2-extended-later": Shared(lambda m: extend(by_layer(m)), later),
    "DDP-blocks": Shared(DDP, problem=BLOCKS),
    "FSDP2-blocks": Shared(by_layer, problem=BLOCKS),
    "FSDP2-blocks-kept": Shared(kept, problem=BLOCKS),
    "FSDP2-apart": Shared(by_layer, problem=APART_BLOCKS),
    "FSDP2-apart-parts": Shared(by_layer, extended_parts, APART_BLOCKS),
    "DDP-apart-parts": Shared(DDP, extended_parts, APART_BLOCKS),
    "FSDP1-frozen": Shared(flat_by_layer, problem=FROZEN),
    "FSDP2-frozen": Shared(by_layer, problem=FROZEN),
    "DDP-checkpoints": Shared(DDP, checkpointed, BLOCKS),
    "FSDP1-checkpoints": Shared(flat_by_layer, checkpointed, BLOCKS),
    "FSDP2-checkpoints": Shared(by_layer, checkpointed, BLOCKS),
}
# Refused: how to wrap it, and what the error says
APART: Dict[str, Tuple[Callable[[Module], Module], str]] = {
    "FSDP1": (
        partial(flat, use_orig_params=False),
        "BatchGrad.*FullyShardedDataParallel.*use_orig_params=True.*fully_shard",
    ),
    "FSDP1-transposed-twice": (
        lambda m: Twice(
            flat(extend(nn.Sequential(*m, nn.Linear(3, D), Tied()).double()))
        ),
        "BatchGrad.*FullyShardedDataParallel.*several times.*fully_shard",
    ),
    "tensor-parallel": (tensor_parallel, "BatchGrad.*DTensors.*fully_shard"),
}


def own_part(p: Pass, rank: int) -> Pass:
    """Take a process' samples: one in the first, all others in the second."""
    samples = slice(0, 1) if rank == 0 else slice(1, None)
    return p._replace(x=p.x[samples], y=p.y[samples])


def whole(x: Any) -> Tensor:
    """Collect a tensor that processes share."""
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().clone()


def whole_gradients(model: Module) -> ContextManager:
    """Collect the gradients of parameters that were put into one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    return nullcontext()


def share(rank: int, name: str) -> List[Dict[str, List[Tensor]]]:
    """Run passes of a model that processes share, and collect fields and gradients."""
    p, results = SHARED[name].make(rank), []
    model = SHARED[name].wrap(p.model)
    syncs = [nullcontext, nullcontext]
    if name in ("DDP", "DDP-views"):
        syncs.append(model.no_sync)
    for sync in syncs:
        model.zero_grad()
        p.run(model, around=sync())
        frozen = [x for x in model.parameters() if not x.requires_grad]
        assert not any(hasattr(x, "grad_batch") for x in frozen)
        params = [x for x in model.parameters() if x.requires_grad]
        fields = {ext: make().savefield for ext, make in QUANTITIES.items()}
        fields["gradient"] = "grad"
        with whole_gradients(model):
            results.append(
                {k: [whole(getattr(x, f)) for x in params] for k, f in fields.items()}
            )
    return results


def share_reduced(rank: int, name: str) -> List[Tensor]:
    """Run a pass of a model that processes share, and reduce fields."""
    p, exts = SHARED[name].make(rank), [Variance(), KFLR()]
    model = SHARED[name].wrap(p.model)
    with backpack(*exts):
        p.value(model).backward()
    params = list(model.parameters())
    reduce(params, exts)
    return [x.clone() for param in params for x in (param.variance, *param.kflr)]


WALKING = {"kfra": KFRA, "diag_h": DiagHessian}


def walk(rank: int, name: str) -> List[List[Tensor]]:
    """Compute what goes from module to module, and the same without other processes."""
    row, results = SHARED[name], []
    for wrap in (row.wrap, later):
        p = row.make(rank)
        model = wrap(p.model)
        with backpack(*(make() for make in WALKING.values())):
            p.value(model).backward()
        with whole_gradients(model):
            values = [getattr(x, f) for f in WALKING for x in model.parameters()]
            flat = [x for v in values for x in (v if isinstance(v, list) else [v])]
            results.append(list(map(whole, flat)))
    return results


# What keeps autograd from accumulating gradients: extensions, and whether there are any
LEFT_OUT: Dict[str, Tuple[Callable[[], List[Any]], bool]] = {
    "plain": (lambda: [], True),
    "gradient=False": (lambda: [BatchGrad()], False),
    "replace_grad": (
        lambda: [BatchGrad(), WeightedGrad(torch.sigmoid, replace_grad=True)],
        True,
    ),
}


class Passes(NamedTuple):
    """A row: how a model is shared, passes one after another, what the last one says.

    The last pass is right, if nothing is to be said.
    """

    wrapped: str
    passes: Tuple[str, ...]
    says: str = ""


PASSES = [
    Passes(name, (option, option, "plain"))
    for name in (
        *("DDP", "DDP-unused", "DDP-views", "FSDP2", "FSDP2-each-kept"),
        *("FSDP1", "FSDP1-each"),
    )
    for option in ("gradient=False", "replace_grad")
    if not (name.startswith("FSDP") and option == "replace_grad")
]
PASSES += [
    Passes("DDP-static", ("plain", option, option, "plain"))
    for option in ("gradient=False", "replace_grad")
]
FIRST = "DistributedDataParallel.static_graph=True.*first"
PASSES += [
    Passes("DDP-static", ("gradient=False",), f"backpack.gradient=False.*{FIRST}"),
    Passes("DDP-static", ("replace_grad",), f"WeightedGrad.replace_grad=True.*{FIRST}"),
    Passes("FSDP2-each", ("replace_grad",), "WeightedGrad.replace_grad=True.*shard"),
    Passes("FSDP2", ("plain", "replace_grad"), "WeightedGrad.*fully_shard.*gather"),
    Passes("FSDP1-each", ("replace_grad",), "WeightedGrad.replace_grad=True.*gather"),
]


def pass_by_pass(rank: int, row: Passes) -> List[Union[str, List[Optional[Tensor]]]]:
    """Run the passes of a row, and collect gradients, or what is said."""
    p, results = SHARED[row.wrapped].make(rank), []
    model = SHARED[row.wrapped].wrap(p.model)
    for name in row.passes:
        model.zero_grad()
        make, gradient = LEFT_OUT[name]
        try:
            with backpack(*make(), gradient=gradient):
                p.value(model).backward()
        except NotImplementedError as error:
            return [*results, str(error)]
        with whole_gradients(model):
            grads = [x.grad for x in model.parameters()]
            results.append([None if x is None else whole(x) for x in grads])
    return results


def refuse_part(rank: int, name: str) -> str:
    """Run a pass of what no process has as a whole; what the error says."""
    p = build()
    model = APART[name][0](p.model)
    with disable():
        expected = p.value(model).detach()
    assert torch.equal(p.value(model).detach(), expected)  # merely extended
    with pytest.raises(NotImplementedError) as error:
        p.run(model)
    return str(error.value)


def train(rank: int, extended: bool, static: bool) -> Tuple[List[Tensor], List[int]]:
    """Train with replicas; count tensors on the way."""
    p, counts = own_part(build(extend if extended else lambda m: m), rank), []
    model = DDP(p.model, static_graph=static)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exts = [BatchL2Grad(), KFAC()] if extended else []
    for step in range(STEPS):
        optimizer.zero_grad()
        with backpack(*exts):
            p.value(model).backward()
        optimizer.step()
        if step in (STEPS // 2, STEPS - 1):
            gc.collect()
            counts.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))
    return [x.detach().clone() for x in p.model.parameters()], counts


def gathered_by_function(x: Tensor) -> Tensor:
    """Collect tensors of all processes with a function that has a derivative."""
    from torch.distributed.nn import functional

    # the default is the group that was there when this was imported
    return torch.stack(functional.all_gather(x, distributed.group.WORLD))


def gathered_by_operation(x: Tensor) -> Tensor:
    """Collect tensors of all processes with an operation that compilers know."""
    from torch.distributed import _functional_collectives as functional

    found = functional.all_gather_tensor_autograd(x, 0, distributed.group.WORLD)
    return found.unflatten(0, (WORLD, -1))


EXCHANGES = {"function": gathered_by_function, "operation": gathered_by_operation}


def exchange(rank: int, name: str) -> Tuple[List[Tensor], str]:
    """Exchange tensors inside of a model that the first process has extended."""
    p, said = build(later), ""

    def forward(x: Tensor) -> Tensor:
        return EXCHANGES[name](x * p.model[0].weight[0]).mean(0)

    model = nn.Sequential(Function(forward), p.model)
    model = model if rank else extend(model)
    p.value(model).backward()
    value = p.value(model)
    if not rank:
        with pytest.raises(NotImplementedError) as error, quantities():
            value.backward()
        said = str(error.value)
    return [x.grad for x in p.model.parameters()], said


class Part(NamedTuple):
    """What a process computes from its samples alone, by plain autograd."""

    gradients: List[Tensor]
    diagonals: List[Tensor]

    @property
    def sums(self) -> List[Tensor]:
        """Compute the gradient."""
        return [g.sum(0) for g in self.gradients]

    @property
    def weighted(self) -> List[Tensor]:
        """Compute the sum of gradients, weighted by a function of their norms."""
        weights = sum(g.flatten(1).square().sum(1) for g in self.gradients).sqrt()
        return [torch.tensordot(weights.sigmoid(), g, 1) for g in self.gradients]


@lru_cache(maxsize=None)
def alone(rank: int, name: str) -> Part:
    """Compute what a process has to have of its own."""
    p = SHARED[name]._replace(extended=later).make(rank)
    args = p.model, p.loss, (p.x,), (p.y,)
    gradients = oracle.individual_gradients(*args)
    return Part(list(gradients.values()), list(oracle.diag_ggn(*args).values()))


def average(by_process: List[List[Tensor]]) -> List[Tensor]:
    """Average over processes."""
    return [sum(values) / WORLD for values in zip(*by_process)]


@needs_gloo
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", SHARED)
def test_shared_model(name: str) -> None:
    """Fields are those of a process' own samples, gradients are averages."""
    parts = [alone(rank, name) for rank in range(WORLD)]
    averages = average([part.sums for part in parts])
    for rank, results in enumerate(in_processes(WORLD, share, name)):
        gradients = parts[rank].gradients
        for number, fields in enumerate(results):
            synced = number < 2
            expected = {
                "gradient": averages if synced else parts[rank].sums,
                "BatchGrad": gradients,
                "Variance": [g.var(0, correction=0) for g in gradients],
                "DiagGGNExact": parts[rank].diagonals,
            }
            for key, values in expected.items():
                oracle.assert_agrees(fields[key], values, f"{key}, process {rank}")


@needs_gloo
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", ["DDP", "DDP-static", "FSDP1-each", "FSDP2-each"])
def test_shared_model_walks(name: str) -> None:
    """What goes from module to module is what a process computes by itself."""
    for found, expected in in_processes(WORLD, walk, name):
        oracle.assert_agrees(found, expected)


@needs_gloo
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", ["DDP-static", "FSDP2-each", "FSDP1-each"])
def test_shared_model_is_reduced(name: str) -> None:
    """What fields need besides their values is found where the fields are."""
    p = build()
    with backpack(Variance(), KFLR()):
        p.value().backward()
    params = p.model.parameters()
    expected = [x for param in params for x in (param.variance, *param.kflr)]
    for found in in_processes(WORLD, share_reduced, name):
        oracle.assert_agrees(found, expected)


@needs_gloo
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("row", PASSES, ids=lambda r: "-".join((r.wrapped, *r.passes)))
def test_gradients_left_out(row: Passes) -> None:
    """Gradients are left out in all processes, or replaced and averaged, or refused."""
    parts = [alone(rank, row.wrapped) for rank in range(WORLD)]
    expected = {
        "plain": average([part.sums for part in parts]),
        "replace_grad": average([part.weighted for part in parts]),
        "gradient=False": [None] * len(parts[0].gradients),
    }
    for results in in_processes(WORLD, pass_by_pass, row):
        if row.says:
            assert re.search(row.says, results.pop())
        else:
            assert len(results) == len(row.passes)
        for name, found in zip(row.passes, results):
            for value, truth in zip(found, expected[name]):
                if truth is None:
                    assert value is None
                else:
                    oracle.assert_agrees(value, truth, name)


@needs_gloo
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", APART)
def test_refused_parts(name: str) -> None:
    """What no process has as a whole is refused by name, in each of them."""
    for says in in_processes(WORLD, refuse_part, name):
        assert re.search(APART[name][1], says)


@needs_gloo
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchange(name: str) -> None:
    """What processes exchange is sent once, so that none waits for another."""
    (first, said), (second, _) = in_processes(WORLD, exchange, name)
    oracle.assert_agrees(first, second)
    assert re.search(
        "(?i)samples have met in .*_?gather|wrap.*processes exchange", said
    )


@needs_gloo
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
def test_training(static: bool) -> None:
    """Replicas train as without extensions, step for step; memory does not grow."""
    plain, _ = in_processes(WORLD, train, False, False)[0]
    for weights, counts in in_processes(WORLD, train, True, static):
        assert all(map(torch.equal, weights, plain))
        assert counts[1] == counts[0]


class Halved(TorchFunctionMode):
    """A mode in which layers use half of their weights."""

    seen: int = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Change an operation, or run it as it is."""
        self.seen += 1
        if func in (F.linear, F.conv1d):
            args = (args[0], args[1] * 0.5, *args[2:])
        return func(*args, **(kwargs or {}))


class Shrunk(Tensor):
    """Inputs that layers shrink."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Shrink what a layer takes."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in (F.linear, F.conv1d):
                args = (args[0] * 0.5, *args[1:])
            return func(*args, **(kwargs or {}))


class Squashed(nn.Parameter):
    """Parameters that layers use the hyperbolic tangent of, scaled by an attribute."""

    scale = 1.0

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Squash a layer's weight."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in (F.linear, F.conv1d, F.embedding):
                args = list(args)
                args[1] = args[1].tanh() * args[1].scale
            return func(*args, **(kwargs or {}))


class Scaled(NamedTuple):
    """Numbers and their scale: an operand that is no tensor."""

    value: Tensor
    scale: float

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Multiply."""
        args = (x.value * x.scale if isinstance(x, Scaled) else x for x in args)
        return func(*args, **(kwargs or {}))


def squash(model: Module) -> Module:
    """Give layers such weights."""
    for layer in model.modules():
        if "weight" in layer._parameters:
            layer.weight = Squashed(layer.weight.detach())
            layer.weight.scale = 0.7
    return model


@contextmanager
def replaced(owner: Any, name: str, make: Callable) -> Iterator[None]:
    """Replace a function for a while."""
    old = getattr(owner, name)
    setattr(owner, name, make(old))
    try:
        yield
    finally:
        setattr(owner, name, old)


class InMode(Module):
    """A model that computes in a mode of its own."""

    def __init__(self, model: Module):
        """Keep the model."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Call the model."""
        with Halved():
            return self.model(x)


REDEFINED: Dict[str, Tuple[Callable, Callable, Callable]] = {  # around, input, model
    "mode": (Halved, lambda x: x, lambda m: m),
    "mode-inside": (nullcontext, lambda x: x, InMode),
    "inputs": (nullcontext, lambda x: x.as_subclass(Shrunk), lambda m: m),
    "parameters": (nullcontext, lambda x: x, squash),
    "forward": (
        lambda: replaced(nn.Linear, "forward", lambda f: lambda s, x: f(s, x * 2)),
        lambda x: x,
        lambda m: m,
    ),
    "conv-forward": (
        lambda: replaced(
            nn.Conv1d, "_conv_forward", lambda f: lambda s, x, *w: -f(s, x, *w)
        ),
        lambda x: x,
        lambda m: m,
    ),
    "function": (
        lambda: replaced(F, "linear", lambda f: lambda x, w, b=None: f(x, w.tanh(), b)),
        lambda x: x,
        lambda m: m,
    ),
    "weights-no-tensors": (
        lambda: replaced(
            F, "linear", lambda f: lambda x, w, b: f(x, Scaled(w.tanh(), 0.7), bias=b)
        ),
        lambda x: x,
        lambda m: m,
    ),
    "filters-no-tensors": (
        lambda: replaced(
            nn.Conv1d,
            "_conv_forward",
            lambda f: lambda s, x, w, b: f(s, x, Scaled(w, 2.0), b),
        ),
        lambda x: x,
        lambda m: m,
    ),
    "data-no-tensors": (
        lambda: replaced(
            nn.Tanh, "forward", lambda f: lambda s, x: Scaled(f(s, x), 0.7)
        ),
        lambda x: x,
        lambda m: m,
    ),
}
LAYERS: Dict[str, Tuple[Callable[[], Module], Tensor]] = {
    "linear": (lambda: nn.Linear(3, 4), torch.randn(4, 3, dtype=F64)),
    "conv": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 2), nn.Flatten()),
        torch.randn(4, 2, 3, dtype=F64),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(5, 2), nn.Flatten()),
        torch.randint(5, (4, 2)),
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", REDEFINED)
def test_redefined_operations(name: str, layer: str) -> None:
    """Whoever changes what a layer computes gets numbers for what it computes then."""
    around, change, make = REDEFINED[name]
    first, X = LAYERS[layer]
    model = make(nn.Sequential(first(), nn.Tanh(), nn.Linear(4, 2)).to(F64))
    each, X, y = X.split(1), change(X.clone()), torch.randint(2, (4,))
    loss = nn.CrossEntropyLoss()
    with around() as mode:
        expected = loss(model(X), y)
        expected.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        rows = [
            torch.autograd.grad(loss(model(change(x)), y[n : n + 1]) / 4, params)
            for n, x in enumerate(each)
            for params in [[*model.parameters()]]
        ]
        output = model(X).detach()
        jacobians = [
            torch.stack([torch.autograd.grad(f, p, retain_graph=True)[0] for f in fs])
            for p in model.parameters()
            for fs in [model(X).flatten()]
        ]
        assert isinstance(extend(model), Module) and isinstance(extend(loss), Module)
        for ext in ([BatchGrad(), DiagGGNExact()], [Variance()]):
            model.zero_grad()
            with backpack(*ext):
                value = loss(model(X), y)
                seen = getattr(mode, "seen", None)
                value.backward()
            for p, gradient in zip(model.parameters(), gradients):
                oracle.assert_agrees(p.grad, gradient, "gradient")
        assert seen is None or torch.overrides._get_current_function_mode() is mode
    oracle.assert_agrees(value, expected, "loss")
    probabilities = output.softmax(1)
    for p, row, jacobian in zip(model.parameters(), zip(*rows), jacobians):
        oracle.assert_agrees(p.grad_batch, torch.stack(row), "grad_batch")
        J = jacobian.unflatten(0, (4, 2))
        P = probabilities
        H = (torch.diag_embed(P) - P[:, :, None] * P[:, None]) / 4
        ggn = torch.einsum("nc...,ncd,nd...->...", J, H, J)
        oracle.assert_agrees(p.diag_ggn_exact, ggn, "diag_ggn_exact")


class Noted(Tensor):
    """Tensors that take notes along, as those of images do."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do what is usual, and take the notes along."""
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, cls):
            notes = [x.notes for x in args if hasattr(x, "notes")]
            out.notes = notes[0] if notes else None
        return out


class NotedParameter(Noted, nn.Parameter):
    """A parameter that does."""


def note_weights(model: Module) -> Module:
    """Let layers have such weights."""
    for layer in model.modules():
        if "weight" in layer._parameters:
            layer.weight = NotedParameter(layer.weight.detach())
    return model


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("noted", ["inputs", "parameters"])
def test_classes_that_change_nothing(
    noted: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes through them has the rules, and the factors, that it has without."""
    first, X = LAYERS[layer]
    X, y, loss = X.clone(), torch.randint(2, (4,)), extend(nn.CrossEntropyLoss())
    plain = nn.Sequential(first(), nn.Tanh(), nn.Linear(4, 2)).to(F64)
    model = note_weights(deepcopy(plain)) if noted == "parameters" else deepcopy(plain)
    data = X.as_subclass(Noted) if noted == "inputs" else X
    monkeypatch.delattr(Use, "_generic")
    for network, x in ((extend(plain), X), (extend(model), data)):
        value = loss(network(x), y)
        with backpack(BatchGrad(), BatchL2Grad(), KFLR(weight_sharing="expand")):
            value.backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        oracle.assert_agrees(q.grad_batch, p.grad_batch, "grad_batch")
        oracle.assert_agrees(q.batch_l2, p.batch_l2, "batch_l2")
        for factor, expected in zip(q.kflr, p.kflr):
            oracle.assert_agrees(factor, expected, "kflr")


VIEWS: Dict[str, Callable[[Tensor], Tensor]] = {
    "entry": lambda x: x[:, 0],
    "piece": lambda x: x.chunk(2, 1)[1].squeeze(1),
    "swapped": lambda x: x.mT[..., 1],
    "flattened": lambda x: x.flatten(1)[:, 2:6],
    "computed": lambda x: (2 * x).select(1, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_inputs_of_a_class(name: str) -> None:
    """Classes may return views of what an input is an alias of."""
    X = torch.randn(4, 2, 4, dtype=F64)
    size = VIEWS[name](X).shape[1]
    found = []
    for x in (X, X.as_subclass(Noted), X.mT.contiguous().mT.as_subclass(Noted)):
        torch.manual_seed(0)
        model = extend(Lambda(lambda m, x: m.f(VIEWS[name](x)), f=nn.Linear(size, 3)))
        with backpack(BatchGrad()):
            model.to(F64)(x.clone() if x is X else x).square().sum().backward()
        found.append(model.f.weight.grad_batch)
    oracle.assert_agrees(found[1], found[0], "of a class")
    oracle.assert_agrees(found[2], found[0], "in another order in memory")


def hooked(m: Module, x: Tensor) -> Tensor:
    """Look at, and change, the gradient of a tensor of a class."""
    z = m.g(m.f(x).as_subclass(m.cls))
    z.register_hook(lambda g: -2 * g)
    return z.as_subclass(Tensor)


def without_rows(m: Module, x: Tensor) -> Tensor:
    """Send all samples, as tensors of a class, to the second of two experts."""
    x = x.as_subclass(m.cls)
    y, number = torch.zeros_like(x), torch.ones(len(x))
    for k, expert in enumerate((m.f, m.g)):
        rows = (number == k).nonzero()[:, 0]
        y = y.index_add(0, rows, expert(x[rows]))
    return y.as_subclass(Tensor)


@pytest.mark.parametrize("forward", [hooked, without_rows])
def test_inside_of_a_class_that_changes_nothing(forward: Callable) -> None:
    """What a model does with such tensors is seen as on any other."""
    x, fields = torch.randn(3, D, dtype=F64), []
    layers = {"f": nn.Linear(D, D).to(F64), "g": nn.Linear(D, D).to(F64)}
    for cls in (Tensor, Noted):
        model = extend(Lambda(forward, cls=cls, **layers))
        with backpack(BatchGrad()):
            model(x).square().sum().backward()
        fields.append([p.__dict__.pop("grad_batch") for p in model.parameters()])
    for found, expected in zip(*fields):
        oracle.assert_agrees(found, expected, "grad_batch")


class LastState(nn.GRU):
    """A recurrent layer that returns its last state."""

    def forward(self, x: Tensor) -> Tensor:
        """Call it on ``[N, D]``, as on two steps."""
        return super().forward(x.unflatten(1, (2, -1)))[1][0]


@pytest.mark.parametrize("ext", [BatchGrad, BatchL2Grad, DiagGGNExact, ClippedGrad])
@pytest.mark.parametrize("recurrent", [False, True])
def test_backward_in_inference_mode(recurrent: bool, ext: Callable) -> None:
    """Autograd computes gradients there, and so do we quantities, which may be used."""
    first = LastState(D // 2, 4, batch_first=True) if recurrent else nn.Linear(D, 4)
    model = extend(nn.Sequential(first, nn.Tanh(), nn.Linear(4, 3)).to(F64))
    loss, x = extend(nn.CrossEntropyLoss()), torch.randn(3, D, dtype=F64)
    fields = []
    for mode in (nullcontext, torch.inference_mode):
        own = ext(0.1) if ext is ClippedGrad else ext()
        value = loss(model(x), torch.tensor([0, 1, 2]))
        with mode(), backpack(own):
            value.backward()
        fields.append([getattr(p, own.savefield) for p in model.parameters()])
        model.zero_grad()
    for expected, found in zip(*fields):
        assert not found.is_inference()
        oracle.assert_agrees(found, expected)
