"""The context: what is active where, errors, nesting, threads, and switching off."""

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, Type

import pytest
import torch
from cases import drawing, make_extension
from torch import Tensor, nn
from torch.nn import Module

from backpack import backpack, disable, extend, extensions
from backpack.context import CTX, state
from backpack.core.per_sample.base import PerSample
from backpack.extensions import (
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    SqrtGGNExact,
    Variance,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.hooks import no_op

SECOND_ORDER = [
    getattr(extensions, name)
    for name in extensions.__all__
    if name != "HBP"  # has no default
    if make_extension(name).expects_backpropagation_quantities()
]
N = 3


class Net(nn.Module):
    """An extended model with its loss and a batch."""

    def __init__(self):
        """Create them."""
        super().__init__()
        self.model = extend(nn.Linear(4, 2))
        self.loss = extend(nn.CrossEntropyLoss())
        self.x, self.y = torch.rand(N, 4), torch.tensor([0, 1, 1])

    def forward(self) -> Tensor:
        """Compute the loss.

        Returns:
            The loss.
        """
        return self.loss(self.model(self.x), self.y)

    def has(self, field: str) -> bool:
        """Tell whether all parameters have a field, or none.

        Args:
            field: Its name.

        Returns:
            Whether all have it.
        """
        (answer,) = {hasattr(param, field) for param in self.model.parameters()}
        return answer


def inactive() -> bool:
    """Tell whether nothing is active.

    Returns:
        Whether it is so.
    """
    return (
        CTX.get_active_exts() == ()
        and CTX.get_debug() is False
        and CTX.get_extension_hook() is no_op
        and CTX.get_retain_graph() is False
    )


def test_attributes():
    """The context has its arguments as attributes, and gives nothing to ``as``."""
    ext, other = BatchGrad(), Variance()
    context = backpack(ext, other, extension_hook=print, debug=True, retain_graph=True)
    assert context.exts == (ext, other)
    assert context.extension_hook is print
    assert context.debug is True and context.retain_graph is True
    with context as entered:
        assert entered is None
    plain = backpack()
    assert (plain.exts, plain.debug, plain.retain_graph) == ((), False, False)
    assert plain.extension_hook is no_op


@pytest.mark.parametrize("wrong", [BatchGrad, 3, "BatchGrad", None], ids=repr)
def test_wrong_arguments(wrong: Any):
    """What is no instance of an extension is refused at construction."""
    with pytest.raises(ValueError, match="instances of extensions"):
        backpack(wrong)
    with pytest.raises(ValueError):
        backpack(BatchGrad(), wrong)


def test_ctx_inside_and_outside():
    """CTX answers what is active."""
    ext = BatchGrad()
    assert inactive()
    with backpack(ext, extension_hook=print, debug=True, retain_graph=True):
        assert CTX.get_active_exts() == (ext,)
        assert CTX.get_extension_hook() is print
        assert CTX.get_debug() is True and CTX.get_retain_graph() is True
        assert CTX.is_extension_active(BatchGrad)
        assert CTX.is_extension_active(Variance, BatchGrad)
        assert CTX.is_extension_active(BackpropExtension)
        assert not CTX.is_extension_active(Variance)
    assert inactive()
    assert not CTX.is_extension_active(BatchGrad)


def test_ctx_set():
    """CTX can be set by hand, and a context puts it back."""
    ext = BatchGrad()
    try:
        CTX.set_active_exts([ext])
        CTX.set_debug(True)
        CTX.set_extension_hook(print)
        CTX.set_retain_graph(True)
        with backpack():
            assert inactive()
        assert CTX.get_active_exts() == (ext,) and CTX.active_exts == (ext,)
        assert CTX.get_debug() is True
        assert CTX.get_extension_hook() is print
        assert CTX.get_retain_graph() is True
    finally:
        CTX.set_active_exts(())
        CTX.set_debug(False)
        CTX.set_extension_hook(no_op)
        CTX.set_retain_graph(False)


@pytest.mark.parametrize("make", [BatchGrad, DiagGGNExact, DiagHessian])
def test_ctx_active_by_hand(make: Callable[[], BackpropExtension]):
    """Extensions set by hand run without a context, also after a pass that fails."""
    net, ext, found = Net(), make(), []
    if make is not DiagHessian:  # which has no rule for two calls
        layer = nn.Linear(4, 4)
        net.model = extend(nn.Sequential(layer, nn.Sigmoid(), layer, net.model))

    def fails(_: Module) -> None:
        raise ValueError

    for step in ("fails", "by-hand", "fails", "in-a-context"):
        loss, by_hand = net(), step != "in-a-context"
        CTX.set_active_exts((ext,) if by_hand else ())
        CTX.set_extension_hook(fails if step == "fails" else no_op)
        try:
            with pytest.raises(ValueError) if step == "fails" else nullcontext():
                with nullcontext() if by_hand else backpack(ext):
                    loss.backward()
        finally:
            CTX.set_active_exts(())
            CTX.set_extension_hook(no_op)
        fields = [vars(x).pop(ext.savefield, None) for x in net.model.parameters()]
        if step != "fails":
            found.append(fields)
    assert all(map(torch.allclose, *found))


@pytest.mark.parametrize("by_hand", [False, True], ids=["context", "by-hand"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["grad", "backward"])
def test_hook_without_extensions(by_hand: bool, accumulates: bool):
    """A hook runs on each module, whatever the backward pass is asked for."""
    net, seen = Net(), []
    loss = net()
    CTX.set_extension_hook(seen.append if by_hand else no_op)
    try:
        with nullcontext() if by_hand else backpack(extension_hook=seen.append):
            if accumulates:
                loss.backward()
            else:
                torch.autograd.grad(loss, list(net.model.parameters()))
    finally:
        CTX.set_extension_hook(no_op)
    assert seen == [net.loss, net.model] and state().backward_pass is None


def test_ctx_active_by_hand_with_several_losses():
    """What begins at several places can't be seen as a whole: refused."""
    net = Net()
    CTX.set_active_exts((BatchGrad(),))
    try:
        with pytest.raises(RuntimeError, match="several losses.*with backpack"):
            torch.autograd.backward([net(), net()])
    finally:
        CTX.set_active_exts(())
    assert state().backward_pass is None


def test_hook_handles():
    """``extend`` leaves its handles with CTX, and further ones can be added."""
    CTX.remove_hooks()
    assert CTX.hook_handles == []
    layer = extend(nn.Linear(2, 2))
    assert len(CTX.hook_handles) > 0
    calls: List[Module] = []
    handle = layer.register_forward_hook(lambda module, *_: calls.append(module))
    CTX.add_hook_handle(handle)
    assert CTX.hook_handles[-1] is handle
    layer(torch.rand(1, 2))
    CTX.remove_hooks()
    layer(torch.rand(1, 2))
    assert calls == [layer]
    assert not layer._forward_hooks


def test_only_the_backward_pass_has_to_lie_inside():
    """A forward pass before the context is as good as one inside."""
    net = Net()
    value = net()
    with backpack(BatchGrad()):
        value.backward()
    assert net.has("grad_batch")


STARTS = {
    "method": lambda value, params: value.backward(),
    "function": lambda value, params: torch.autograd.backward(value),
    "weights": lambda value, params: torch.autograd.backward([value], [value * 2]),
    "keyword": lambda value, params: torch.autograd.backward(tensors=[value]),
    "gradients": lambda value, params: torch.autograd.grad(value, params),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_every_pass_is_announced(start: Callable[[Tensor, List[Tensor]], Any]):
    """However a backward pass begins, it is noticed that samples have met."""
    net = Net()
    value = net.loss(net.model(net.x).softmax(0), net.y)
    with pytest.raises(NotImplementedError, match="samples have met in `softmax`"):
        with backpack(BatchGrad()):
            start(value, list(net.model.parameters()))
    assert inactive()


class Searching(nn.Module):
    """A model that runs a backward pass in its forward pass."""

    def __init__(self, start: Callable[[Tensor, List[Tensor]], Any]):
        """Create a layer.

        Args:
            start: How the backward pass begins.
        """
        super().__init__()
        self.layer, self.start = nn.Linear(4, 2).double(), start

    def forward(self, x: Tensor) -> Tensor:
        """Differentiate the sum of squares, which is not what is returned.

        Args:
            x: Batch of shape ``[N, 4]``.

        Returns:
            The layer's output.
        """
        value = (self.layer(x) * 1.0).square().sum()
        self.start(value, list(self.layer.parameters()))
        return self.layer(x)


@pytest.mark.parametrize("name", STARTS)
def test_a_pass_inside_of_a_forward_pass_is_announced(name: str):
    """What watches the forward pass lets the context see it."""
    model, X = extend(Searching(STARTS[name])), torch.rand(N, 4).double()
    with backpack(BatchGrad()):
        model(X)
    weight, out = model.layer.weight, [model.layer(x).square().sum() for x in X]
    expected = torch.stack([torch.autograd.grad(x, weight)[0] for x in out])
    factor = 2 * sum(out) if name == "weights" else 1.0
    assert torch.allclose(weight.grad_batch, factor * expected, rtol=1e-8)


class Guided(Module):
    """The derivative of an energy with respect to the input is given, like data."""

    def __init__(self, start: Callable[[Tensor, Tensor], Tensor]):
        """Create layers.

        Args:
            start: Computes the derivative of the first with respect to the second.
        """
        super().__init__()
        self.layer, self.start = nn.Linear(4, 2).double(), start

    def forward(self, x: Tensor) -> Tensor:
        """Compute an output from the input and the derivative.

        Args:
            x: Batch of shape ``[N, 4]``.

        Returns:
            Batch of shape ``[N, 2]``.
        """
        z = x.clone().requires_grad_()
        return self.layer(x + self.start(self.layer(z).square().sum(), z).detach())


@pytest.mark.parametrize(
    "start",
    [
        lambda value, z: torch.autograd.grad(value, z)[0],
        lambda value, z: torch.autograd.grad(outputs=value, inputs=[z])[0],
        lambda value, z: value.backward(inputs=z) or z.grad,
        lambda value, z: torch.autograd.backward(value, inputs=[z]) or z.grad,
    ],
    ids=["grad", "grad-by-keyword", "method", "backward"],
)
def test_derivative_by_inputs_inside_of_a_forward_pass(start: Callable):
    """It is no backward pass of the context, whose extensions start at a loss."""
    model, loss = extend(Guided(start)), extend(nn.MSELoss())
    X, y = torch.rand(N, 4).double(), torch.rand(N, 2).double()
    with backpack(BatchGrad(), BatchDiagGGNExact()):
        loss(model(X), y).backward()
    weight, found = model.layer.weight, model.layer.weight.diag_ggn_exact_batch
    rows = [torch.autograd.grad(loss(model(x), t) / N, weight)[0] for x, t in zip(X, y)]
    assert torch.allclose(weight.grad_batch, torch.stack(rows), rtol=1e-8)
    z = X.clone().requires_grad_()
    z = X + torch.autograd.grad(model.layer(z).square().sum(), z)[0]
    expected = z.square()[:, None].expand(N, 2, 4) * 2 / (2 * N)
    assert torch.allclose(found, expected, rtol=1e-8)


def test_derivatives_of_something_else():
    """A context takes part in no derivative of what no extended module computes."""
    net, A, w = Net(), torch.rand(3, 3), torch.rand(3, requires_grad=True)
    with backpack(BatchGrad()):
        net().backward()
        found = torch.autograd.functional.hessian(lambda v: (A @ v).pow(2).sum(), w)
        (g,) = torch.autograd.grad((A @ w).pow(4).sum(), w, create_graph=True)
        torch.autograd.grad(g.pow(2).sum(), w)
    assert net.has("grad_batch") and torch.allclose(found, 2 * A.T @ A)


def test_nothing_happens_outside():
    """Outside of a context, a backward pass is a plain one."""
    net = Net()
    with backpack(BatchGrad()):
        value = net()
    value.backward()
    assert not net.has("grad_batch")


def test_nesting():
    """The inner context replaces the active extensions, leaving it restores them."""
    outer, inner = BatchGrad(), Variance()
    net = Net()
    with backpack(outer, debug=False, retain_graph=True):
        with backpack(inner):
            assert CTX.get_active_exts() == (inner,)
            assert CTX.get_retain_graph() is False
            net().backward()
            with backpack():
                assert inactive()
            assert CTX.get_active_exts() == (inner,)
        assert net.has("variance") and not net.has("grad_batch")
        assert CTX.get_active_exts() == (outer,)
        assert CTX.get_retain_graph() is True
        net().backward()
        assert net.has("grad_batch")
    assert inactive()


def once(function: Callable[[], None]) -> Callable[..., None]:
    """Make a hook that calls a function when it runs for the first time."""
    calls: List[None] = []

    def run(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 1:
            with torch.enable_grad():
                function()

    return run


HOOKS: Dict[str, Callable[["Net", Callable], Any]] = {
    "tensor": lambda net, hook: net.x.requires_grad_().register_hook(hook),
    "parameter": lambda net, hook: net.model.weight.register_hook(hook),
    "module": lambda net, hook: (
        net.x.requires_grad_(),
        net.model.register_full_backward_hook(hook),
    ),
    "accumulated": lambda net, hook: (
        net.model.weight.register_post_accumulate_grad_hook(hook)
    ),
}


WHERE = [(name, outside) for name in HOOKS for outside in (True, False)]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name, outside", [*WHERE, ("extension", False)])
def test_a_pass_in_a_hook_of_another(name: str, outside: bool, same: bool):
    """A context in a hook is about the passes inside; the other pass goes on."""
    net = Net()
    inner = net if same else Net()

    def run() -> None:
        with backpack(BatchGrad()):
            inner().backward()

    hook = once(run)
    if name != "extension":
        HOOKS[name](net, hook)
    extension_hook = hook if name == "extension" else None
    if outside:
        net().backward()
    else:
        with backpack(Variance(), extension_hook=extension_hook):
            net().backward()
    assert net.has("variance") is not outside and inactive()
    assert inner.has("grad_batch")
    (gradient,) = torch.autograd.grad(inner(), inner.model.weight)
    assert torch.allclose(inner.model.weight.grad_batch.sum(0), gradient)


@pytest.mark.parametrize("name", HOOKS)
def test_a_forward_pass_in_a_hook_before_its_context(name: str):
    """What a hook computes in front of its context is not recorded, which is said."""
    net, other = Net(), Net()

    def run() -> None:
        value = other()
        with pytest.warns(UserWarning, match="in a hook of another backward pass"):
            with backpack(BatchGrad()):
                value.backward()

    HOOKS[name](net, once(run))
    net().backward()
    assert not other.has("grad_batch")


def test_one_context_object_nests_in_itself():
    """A context object can be entered again, also while it is active."""
    context = backpack(BatchGrad())
    net = Net()
    with context:
        with context:
            net().backward()
        assert len(CTX.get_active_exts()) == 1
    assert inactive() and net.has("grad_batch")


def test_exception_inside():
    """An exception passes through, and what was active is restored."""
    ext = BatchGrad()
    with backpack(ext):
        with pytest.raises(KeyError, match="mine"):
            with backpack(Variance(), debug=True):
                raise KeyError("mine")
        assert CTX.get_active_exts() == (ext,)
        assert CTX.get_debug() is False
    assert inactive()


class Failing(BatchGrad):
    """An extension that fails."""

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:
        """Fail.

        Args:
            gradients: Not used.

        Raises:
            ZeroDivisionError: Always.
        """
        raise ZeroDivisionError("in an extension")


def fail(module: Module) -> None:
    """Extension hook that fails.

    Args:
        module: Not used.

    Raises:
        ZeroDivisionError: Always.
    """
    raise ZeroDivisionError("in the hook")


@pytest.mark.parametrize(
    "context",
    [
        lambda: backpack(Failing()),
        lambda: backpack(DiagGGNExact(), Failing(), SqrtGGNExact()),
        lambda: backpack(BatchGrad(), DiagGGNExact(), extension_hook=fail),
    ],
    ids=["first order", "second order", "hook"],
)
def test_exception_in_a_backward_pass(context: Callable[[], backpack]):
    """An extension that fails spoils its own backward pass only."""
    net = Net()
    with pytest.raises(ZeroDivisionError):
        with context():
            net().backward()
    assert inactive()
    with backpack(BatchGrad(), DiagGGNExact()):
        net().backward()
    assert net.has("grad_batch") and net.has("diag_ggn_exact")
    # an exception that is caught inside the context
    with backpack(DiagGGNExact(), BatchGrad()):
        CTX.set_extension_hook(fail)
        with pytest.raises(ZeroDivisionError):
            net().backward()
        CTX.set_extension_hook(no_op)
        net().backward()
    net.model.zero_grad()
    with backpack(BatchGrad()):
        net().backward()
    for param in net.model.parameters():
        assert torch.allclose(param.grad_batch.sum(0), param.grad)


# Errors


@pytest.mark.parametrize("quantity", SECOND_ORDER, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("loss", ["functional", "not extended"])
def test_loss_is_not_extended(quantity: Type[BackpropExtension], loss: str):
    """Second order without an extended loss says what to do."""
    model = extend(nn.Linear(4, 2))
    f, y = model(torch.rand(N, 4)), torch.tensor([0, 1, 1])
    if loss == "functional":
        value = nn.functional.cross_entropy(f, y)
    else:
        value = nn.CrossEntropyLoss()(f, y)
    with pytest.raises(AssertionError, match="extend.*loss") as error:
        with backpack(quantity()):
            value.backward()
    assert quantity.__name__ in str(error.value)
    assert inactive()


@pytest.mark.parametrize("quantity", SECOND_ORDER, ids=lambda cls: cls.__name__)
def test_loss_is_no_scalar(quantity: Type[BackpropExtension]):
    """Second order wants a scalar loss, that is differentiated directly."""
    net = Net()
    net.loss = extend(nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match="scalar"):
        with backpack(quantity()):
            net().sum().backward()


def test_first_order_needs_no_loss():
    """First-order quantities are there without a loss module."""
    model, x = extend(nn.Linear(4, 2)), torch.rand(N, 4)
    with backpack(BatchGrad(), BatchL2Grad()):
        model(x).exp().sum().backward()
    assert torch.allclose(model.weight.grad_batch.sum(0), model.weight.grad)
    norms = model.weight.grad_batch.pow(2).sum((1, 2))
    assert torch.allclose(model.weight.batch_l2, norms)


@pytest.mark.parametrize("mode", ["WARN", "error", None, 1], ids=repr)
def test_fail_modes(mode: Any):
    """A fail mode that does not exist is refused; the three are compared by value."""
    with pytest.raises(AssertionError):
        BackpropExtension("field", {}, fail_mode=mode)
    for known in ("ERROR", "WARNING", "SILENT"):
        copied = "".join(list(known))
        assert BackpropExtension("field", {}, fail_mode=copied)._fail_mode == known


# Switching off


def test_disable():
    """Inside, a forward pass stores nothing; contexts nest."""
    assert disable.should_store_io()
    with disable():
        assert not disable.should_store_io()
        with disable():
            assert not disable.should_store_io()
        assert not disable.should_store_io()
    assert disable.should_store_io()
    with pytest.raises(KeyError):
        with disable():
            raise KeyError
    assert disable.should_store_io()


def test_disable_gives_the_plain_gradient():
    """A forward pass inside ``disable`` can be differentiated as usual."""
    net = Net()
    with disable():
        value = net()
    with pytest.warns(UserWarning, match="disable"):
        with backpack(BatchGrad()):
            value.backward()
    assert net.model.weight.grad is not None and not net.has("grad_batch")
    net.model.zero_grad()
    with backpack(BatchGrad()):
        net().backward()
    assert net.has("grad_batch")


def test_second_order_after_disable():
    """Without a record of the loss there is nothing to start from."""
    net = Net()
    with disable():
        hidden = net.model(net.x)
    value = net.loss(hidden, net.y)
    with pytest.warns(UserWarning, match="disable"):
        with backpack(DiagGGNExact()):
            value.backward()
    assert not net.has("diag_ggn_exact")


# Threads


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in another thread.

    Args:
        function: The function.

    Returns:
        What it returns.
    """
    results: List[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    (result,) = results
    return result


def test_threads_do_not_see_each_other():
    """What is active in one thread is not in another."""
    with backpack(BatchGrad()), disable():
        assert in_thread(inactive)
        assert in_thread(disable.should_store_io)
        assert not inactive()


def test_state_lives_as_long_as_its_thread():
    """A thread's state is one object, which nothing but the thread keeps alive."""

    def work() -> weakref.ref:
        first = weakref.ref(state())
        gc.collect()
        assert first() is state()
        return first

    reference = in_thread(work)
    # a thread has not ended yet when it has been joined
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reference() is None


def test_backward_pass_in_a_thread():
    """A whole pass works in a thread, while the main thread computes something else."""
    net = Net()

    def work() -> bool:
        other = Net()
        with backpack(BatchGrad(), SqrtGGNExact()):
            other().backward()
        return other.has("grad_batch") and other.has("sqrt_ggn_exact")

    with backpack(Variance()):
        value = net()
        assert in_thread(work)
        value.backward()
    assert net.has("variance") and not net.has("grad_batch")


def test_left_in_another_thread():
    """A context stays where it was entered, also if another thread enters it, too."""

    def leave() -> None:
        with pytest.raises(RuntimeError, match="entered in another thread"):
            context.__exit__(None, None, None)

    def work() -> None:
        other = Net()
        with context:
            other().backward()

    context, net = backpack(BatchGrad()), Net()
    with context:
        in_thread(leave)
        in_thread(work)
        net().backward()
    assert net.has("grad_batch") and inactive()


def test_many_threads():
    """Threads with a model each, all at the same time."""
    start = threading.Barrier(4)
    failures: List[str] = []

    def work(number: int) -> None:
        generator = drawing(number)
        layer, loss = extend(nn.Linear(4, 2)), extend(nn.MSELoss())
        start.wait()
        for _ in range(10):
            x = torch.rand(N, 4, generator=generator)
            with backpack(BatchGrad(), DiagGGNExact()):
                loss(layer(x), torch.zeros(N, 2)).backward()
            summed = layer.weight.grad_batch.sum(0)
            diagonal = (x**2).sum(0) * 2 / (2 * N)
            right = torch.allclose(summed, layer.weight.grad)
            if not right or not torch.allclose(
                layer.weight.diag_ggn_exact[0], diagonal
            ):
                failures.append(f"thread {number}")
            layer.zero_grad()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_forward_and_backward_in_different_threads():
    """The thread of the backward pass decides what is computed."""
    net = Net()
    value = in_thread(net)
    with backpack(BatchGrad(), DiagGGNExact()):
        value.backward()
    assert net.has("grad_batch") and net.has("diag_ggn_exact")
