"""What must not depend on accidents: when, in which thread, where in the memory.

Classes that are changed after their first use, other threads that train meanwhile,
interruptions at an unlucky moment, and what dies and is followed by something else in
the same place.
"""

import gc
import sys
import warnings
import weakref
from functools import partial
from threading import Thread
from types import CodeType
from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest
import torch
from cases import F64
from oracle import assert_agrees
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from backpack import backpack, compile_step, extend
from backpack.engine.forward.frames import THREAD, forget_interrupted
from backpack.engine.samples.trials import _WithoutCudnn
from backpack.extensions import KFRA, BatchGrad, DiagGGNExact, DiagHessian
from backpack.utils.state import _KEY, State, state

N = 5
PLAIN: Any = {"backend": lambda graph, _: graph.forward}  # no compiler

# A layer or loss, and another forward pass of a class that is derived from it
CHANGED: Dict[str, Tuple[type, Callable[[type], nn.Module], Callable]] = {
    "linear": (
        nn.Linear,
        lambda cls: cls(3, 2),
        lambda m, x: F.linear(x, m.weight.sin(), m.bias),
    ),
    "scaled": (nn.LayerNorm, lambda cls: cls(3), lambda m, x: x * m.weight + m.bias),
    "loss": (nn.MSELoss, lambda cls: cls(), lambda m, x, y: ((x - y) ** 4).mean()),
}


@pytest.mark.parametrize("name", CHANGED)
def test_class_that_is_changed_later(name: str) -> None:
    """As by reloading a module in a notebook: what counts is what was computed."""
    base, make, forward = CHANGED[name]
    found = []
    for used_before in (False, True):
        torch.manual_seed(0)
        cls = type("Derived", (base,), {})
        own, x = extend(make(cls).to(F64)), torch.randn(N, 3, dtype=F64)
        is_loss = name == "loss"
        model = extend(nn.Linear(3, 2).to(F64)) if is_loss else own
        loss = own if is_loss else extend(nn.MSELoss())
        for changes in (False, True) if used_before else (True,):
            if changes:
                cls.forward = forward  # type: ignore[attr-defined]
            with backpack(BatchGrad(), DiagGGNExact()):
                out = model(x)
                loss(out, torch.zeros_like(out)).backward()
        found.append([(p.grad_batch, p.diag_ggn_exact) for p in model.parameters()])
    for fresh, later in zip(*found):
        for first, second in zip(fresh, later):
            assert_agrees(second, first)


class Sized(nn.Module):
    """A layer that multiplies by how long one of its attributes is."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.layer, self.tau = nn.Linear(3, 2), torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        return self.layer(x) * self.tau.numel()


def test_compiled_step_with_an_attribute_in_the_place_of_another() -> None:
    """A tensor that is gone is not taken for one that has its identity."""
    model, loss = extend(Sized()), extend(nn.MSELoss())
    x = torch.randn(N, 3)
    step = compile_step(
        lambda x: loss(model(x), torch.zeros(N, 2)), BatchGrad(), **PLAIN
    )
    for length in range(1, 7):
        del model.tau
        model.tau = torch.ones(length)
        assert_agrees(
            step(x).detach(), F.mse_loss(model(x), torch.zeros(N, 2)).detach()
        )


def in_another_thread(run: Callable[[], Any]) -> Callable[[], None]:
    """Make a function that runs something in a thread, and raises what it raises."""

    def wrapped() -> None:
        errors: List[Exception] = []

        def target() -> None:
            try:
                run()
            except Exception as error:
                errors.append(error)

        thread = Thread(target=target)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return wrapped


def test_what_a_thread_leaves() -> None:
    """PyTorch keeps nothing of ours for a thread: freeing it may abort the process."""
    model, x = extend(nn.Linear(3, 2)), torch.randn(N, 3)
    kept = []

    def run() -> None:
        model(x).sum().backward()
        with backpack(BatchGrad()):
            model(x).sum().backward()
        kept.append(torch._C._is_key_in_tls(_KEY))

    in_another_thread(run)()
    assert kept == [State.has_threads]


def test_statistics_of_another_thread() -> None:
    """What another thread trains while a step is recorded is none of its business."""
    model, loss, norm = extend(nn.Linear(3, 2)), extend(nn.MSELoss()), nn.BatchNorm1d(3)
    calls = []

    def train() -> None:
        norm(torch.randn(N, 3))
        calls.append(1)

    def closure(x: Tensor) -> Tensor:
        in_another_thread(train)()
        return loss(model(x), torch.zeros(N, 2))

    compile_step(closure, BatchGrad(), **PLAIN)(torch.randn(N, 3))
    assert calls and norm.num_batches_tracked == len(calls)


def test_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a model is being compiled, PyTorch says of all threads at once."""
    monkeypatch.setattr("torch.compiler._is_compiling_flag", True)
    model, loss = extend(nn.Linear(3, 2).to(F64)), extend(nn.MSELoss())
    with backpack(BatchGrad()):
        x, y = torch.rand(N, 3, dtype=F64), torch.rand(N, 2, dtype=F64)
        loss(model(x), y).backward()
    assert_agrees(model.weight.grad_batch.sum(0), model.weight.grad)


class Interrupted(torch.autograd.Function):
    """A function with a backward pass in which something else happens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, during: Callable[[], None]) -> Tensor:
        """Double a tensor."""
        ctx.during = during
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Double a gradient."""
        ctx.during()
        return gradient * 2, None


class Doubled(nn.Module):
    """A model with such a function."""

    def __init__(self, during: Callable[[], None]):
        """Make the layers, and store what happens."""
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.during = during

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        return self.last(Interrupted.apply(self.first(x), self.during))


class Twice(nn.Module):
    """A layer without a rule, in which something happens."""

    def __init__(self, during: Callable[[], None]):
        """Store what happens."""
        super().__init__()
        self.during = during

    def forward(self, x: Tensor) -> Tensor:
        """Double a tensor."""
        self.during()
        return x * 2


def train() -> None:
    """Train another model that is extended."""
    other = extend(nn.Linear(3, 2))
    other(torch.randn(N, 3)).sum().backward()
    assert other.weight.grad is not None


@pytest.mark.parametrize(
    "during", [train, partial(torch.rand, 1)], ids=["train", "draw"]
)
@pytest.mark.parametrize("ext", [BatchGrad, DiagGGNExact])
def test_what_another_thread_does_during_a_function(during: Any, ext: type) -> None:
    """Neither its backward pass nor its random numbers are the function's."""
    found = []
    for happens in (in_another_thread(during), int):
        torch.manual_seed(0)
        model = extend(Doubled(happens).to(F64))
        loss, x = extend(nn.MSELoss()), torch.randn(N, 3, dtype=F64)
        with backpack(ext()):
            loss(model(x), torch.zeros(N, 2, dtype=F64)).backward()
        found.append([getattr(p, ext().savefield) for p in model.parameters()])
    for mine, expected in zip(*found):
        assert_agrees(mine, expected)


def test_what_another_thread_draws_during_a_layer() -> None:
    """A layer that is repeated has drawn nothing itself."""
    # not again in each repetition, of which there are some
    times = iter([True, True, True] + [False] * 100)
    draw = in_another_thread(lambda: next(times) and torch.rand(1))
    layers = nn.Linear(3, 4), Twice(draw)
    model, loss = extend(nn.Sequential(*layers)), extend(nn.MSELoss())
    with backpack(DiagHessian()):
        loss(model(torch.randn(N, 3)), torch.zeros(N, 4)).backward()
    assert model[0].weight.diag_h.shape == (4, 3)


def test_switch_of_several_threads() -> None:
    """The last one that leaves restores it, in any order."""
    before, first, second = torch.backends.cudnn.enabled, *[_WithoutCudnn()] * 2
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not torch.backends.cudnn.enabled
    second.__exit__()
    assert torch.backends.cudnn.enabled == before


class Interrupt:
    """Raises ``KeyboardInterrupt`` where a function begins, as Ctrl-C may."""

    def __init__(self, code: CodeType):
        """Store the function's code."""
        self.code = code

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """Trace calls."""
        if frame.f_code is self.code:
            sys.settrace(None)
            raise KeyboardInterrupt


@pytest.fixture(name="interrupt")
def _interrupt() -> Any:
    """Return a function that begins to trace; the former tracer is restored."""
    before = sys.gettrace()
    yield lambda function: sys.settrace(Interrupt(function.__code__))
    sys.settrace(before)


@pytest.mark.parametrize("at", ["enter", "exit"])
@pytest.mark.parametrize("function", [State.enter, forget_interrupted])
def test_context_that_is_interrupted(function: Any, at: str, interrupt: Any) -> None:
    """It is left, whether it was entered as a whole or not."""
    if at == "exit" and function is State.enter:
        pytest.skip("is not called there")
    model, loss = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    modes = len(_get_current_function_mode_stack())
    with pytest.raises(KeyboardInterrupt):
        if at == "enter":
            interrupt(function)
            with backpack(BatchGrad()):
                pass
        else:
            with backpack(BatchGrad()):
                interrupt(function)
    assert not state().active_exts and not state().contexts
    assert len(_get_current_function_mode_stack()) == modes
    loss(model(torch.randn(N, 3)), torch.zeros(N, 2)).backward()
    assert not hasattr(model.weight, "grad_batch")


class Patient(nn.Module):
    """A model that goes on after one of its layers was interrupted."""

    def __init__(self, before: Callable[[Any], None]):
        """Make the layers, and store what begins the interruption."""
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.w, self.before = nn.Parameter(torch.randn(4)), before
        self.running: List[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        """Leave out the second layer, which is interrupted."""
        h = self.a(x)
        try:
            self.before(nn.Linear.forward)
            h = self.b(h)
        except KeyboardInterrupt:
            pass
        h = self.c(h)
        self.running = [frame.module for frame in THREAD.frames]
        return torch.stack([row * self.w for row in h.unbind(0)])


def test_layer_that_is_interrupted(interrupt: Any) -> None:
    """The next call is not taken for it, though it may have its place in memory."""
    torch.manual_seed(0)
    model, loss = extend(Patient(interrupt)).to(F64), extend(nn.MSELoss())
    x = torch.randn(N, 3, dtype=F64)
    with warnings.catch_warnings(), backpack(BatchGrad()):
        warnings.simplefilter("ignore")  # of the layer that is left out
        out = model(x)
        loss(out, torch.zeros_like(out)).backward()
    assert model.running == [model]
    w: Any = model.w
    assert_agrees(w.grad_batch.sum(0), w.grad)


class Branches(nn.Module):
    """A model that may leave out its second layer."""

    def __init__(self, both: bool):
        """Make the layers."""
        super().__init__()
        self.both = both
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        return self.b(self.a(x)) if self.both else self.a(x)


def test_warning_after_models_that_are_gone() -> None:
    """Their parameters are not taken for those that have their places."""
    loss, x = extend(nn.MSELoss()), torch.randn(N, 3)
    with pytest.warns(UserWarning, match="b.weight, b.bias: the backward pass did not"):
        with backpack(BatchGrad()):
            for both in [True] * 20 + [False]:
                model = extend(Branches(both))
                loss(model(x), torch.zeros(N, 3)).backward()
                if both:
                    del model
                    gc.collect()


@pytest.mark.parametrize("make", [DiagHessian, KFRA, DiagGGNExact])
def test_extension_in_a_pass_inside_of_its_own(make: Callable[[], Any]) -> None:
    """What waits for one pass is not forgotten at the end of another."""
    ext, loss, x = make(), extend(nn.MSELoss()), torch.randn(N, 3, dtype=F64)
    other, found = extend(nn.Linear(3, 4).to(F64)), []

    def inside(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not other:
            with torch.enable_grad(), backpack(ext):
                loss(other(x), torch.zeros(N, 4, dtype=F64)).backward()

    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).to(F64))
    for hook in (None, inside):
        with backpack(ext, extension_hook=hook):
            loss(model(x), torch.zeros(N, 4, dtype=F64)).backward()
        found.append([getattr(p, ext.savefield) for p in model.parameters()])
    for expected, mine in zip(*found):
        assert_agrees(mine, expected)


def test_function_of_a_forward_pass_is_not_kept() -> None:
    """A class that is made in each forward pass goes with what it closes over."""
    died: List[Optional[weakref.ref]] = []

    def forward(x: Tensor) -> Tensor:
        big = torch.zeros(1000)
        died.append(weakref.ref(big))

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x + big.sum()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient + big.sum()

        return Own.apply(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(forward(self.layer(x)))

    model, loss = Model(), extend(nn.MSELoss())
    for layer in (model.layer, model.last):
        extend(layer)
    for _ in range(3):
        with backpack(BatchGrad()):
            loss(model(torch.randn(N, 3)), torch.zeros(N, 2)).backward()
    gc.collect()
    assert [ref() for ref in died if ref is not None] == [None] * 3
