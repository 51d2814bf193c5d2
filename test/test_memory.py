"""What is kept, and for how long: nothing beyond the fields, and no longer than needed.

Tensors and records of calls are counted by asking the garbage collector for all objects
of their type. Where cycles must not exist, it is switched off.
"""

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
import torch
from cases import FIRST_ORDER, make_extension
from oracle import assert_agrees
from per_sample import Lambda
from torch import Tensor, nn
from torch.nn import Module
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.engine.nodes.record import Call
from backpack.extensions import EKFAC, BatchGrad, SqrtGGNExact

N = 3


def conv_net() -> Tuple[Module, Tensor]:
    """Make a model with layers of many kinds.

    Returns:
        Model and input.
    """
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2),
        nn.ReLU(inplace=True),
        nn.GroupNorm(1, 3),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(9, 3),
    )
    return model, torch.rand(N, 2, 4)


class Residual(Module):
    """A container with its own forward pass and a bare parameter."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer twice, with a skip connection.

        Args:
            x: Input.

        Returns:
            Output of the same shape.
        """
        return x + self.scale * self.inner(self.inner(x).sin())


class Tied(Module):
    """Two layers that share a weight."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up and predict.

        Args:
            ids: Tokens ``[N]``.

        Returns:
            Prediction.
        """
        return self.head(self.embedding(ids).sin())


class Positions(Module):
    """Layers that never see the data: what they compute meets it later."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.table, self.mixer = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Add a row that is computed from parameters alone.

        Args:
            x: Input ``[N, 4]``.

        Returns:
            Prediction.
        """
        return self.last(x + self.mixer(self.table(torch.tensor(2))))


class Recurrent(Module):
    """A layer with several outputs, of different nodes of the graph."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.lstm, self.last = nn.LSTM(2, 3, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use the sequence and the final state.

        Args:
            x: Input ``[N, T, 2]``.

        Returns:
            Prediction.
        """
        sequence, (_, cell) = self.lstm(x)
        return self.last(torch.cat([sequence[:, -1], cell[0]], dim=1))


class Several(Module):
    """A module whose outputs belong to different nodes, one of which is not used."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.cell, self.last = nn.LSTMCell(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use the output of the cell, but not its state.

        Args:
            x: Input ``[N, 4]``.

        Returns:
            Prediction.
        """
        return self.last(self.cell(x)[0])


class OneByOne(Module):
    """Computes what belongs to one sample after the other."""

    def __init__(self):
        """Create the parameter."""
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the positions of each sample, and add them up.

        Args:
            x: Input ``[N, T, 2]``.

        Returns:
            Prediction.
        """
        return torch.stack([rows @ self.weight.T for rows in x]).sum(1)


SINGLE_OUTPUT: Dict[str, Callable[[], Tuple[Module, Tensor]]] = {
    "conv_net": conv_net,
    "residual": lambda: (nn.Sequential(Residual(), nn.Linear(4, 3)), torch.rand(N, 4)),
    "tied": lambda: (Tied(), torch.tensor([0, 2, 2])),
    "frozen": lambda: (
        nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 3)),
        torch.rand(N, 4),
    ),
    "in_place": lambda: (
        nn.Sequential(nn.Linear(4, 3), nn.ELU(inplace=True), nn.Identity()),
        torch.rand(N, 4),
    ),
    "positions": lambda: (Positions(), torch.rand(N, 4)),
    "one by one": lambda: (OneByOne(), torch.rand(N, 4, 2)),
    "own_leaf": lambda: (
        nn.Sequential(Residual(), nn.Linear(4, 3)),
        torch.rand(N, 4).requires_grad_(),
    ),
}
MODELS = {
    **SINGLE_OUTPUT,
    "recurrent": lambda: (Recurrent(), torch.rand(N, 4, 2)),
    "several outputs": lambda: (Several(), torch.rand(N, 4)),
}
EXACT = ["DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact"]


def make() -> List:
    """Create extensions.

    Returns:
        One of each kind of quantity.
    """
    return [make_extension(name) for name in FIRST_ORDER + EXACT]


def build(name: str) -> Tuple[Module, Module, Tensor, Tensor]:
    """Build a model.

    Args:
        name: Its name.

    Returns:
        Extended model, extended loss, input, target.
    """
    model, x = MODELS[name]()
    return extend(model), extend(nn.CrossEntropyLoss()), x, torch.tensor([0, 1, 1])


def alive(cls: type) -> List:
    """List objects, without collecting any first.

    Args:
        cls: Their type.

    Returns:
        Those that the garbage collector knows.
    """
    return [x for x in gc.get_objects() if issubclass(type(x), cls)]


def assert_does_not_add_up(step: Callable[[], None], times: int) -> None:
    """Assert that several steps keep what two keep.

    Args:
        step: What is repeated.
        times: How often.
    """

    def count() -> Tuple[int, int]:
        gc.collect()
        return len(alive(Tensor)), len(alive(Call))

    for _ in range(2):
        step()
    before = count()
    for _ in range(times):
        step()
    assert count() == before


@pytest.fixture(autouse=True, scope="module")
def warm_up() -> None:
    """Let PyTorch import what it imports lazily; its import system keeps frames."""
    for name in MODELS:
        model, loss, x, y = build(name)
        with backpack(*make()):
            loss(model(x), y).backward()


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch the garbage collector off, after all garbage was collected.

    Yields:
        Nothing.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Graphs


@pytest.mark.parametrize("name", SINGLE_OUTPUT)
@pytest.mark.parametrize("run", ["no pass", "plain pass", "pass", "passes"])
def test_graph_dies_with_the_loss(name: str, run: str):
    """Without its loss, a graph and all calls die at once: nothing forms a cycle."""
    model, loss, x, y = build(name)
    with no_collection():
        before = set(map(id, alive(Call)))
        value = loss(model(x), y)
        calls = [weakref.ref(c) for c in alive(Call) if id(c) not in before]
        assert len(calls) >= 2
        if run == "plain pass":
            value.backward()
        elif run == "pass":
            with backpack(*make()):
                value.backward()
        elif run == "passes":
            for _ in range(2):
                with backpack(*make(), retain_graph=True):
                    value.backward(retain_graph=True)
        del value
        assert not any(call() for call in calls)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("run", ["plain pass", "pass"])
def test_graph_dies_where_another_thread_was(run: str):
    """The same if autograd runs the pass in a thread of its own."""
    test_graph_dies_with_the_loss("conv_net", run)


@pytest.mark.parametrize("run", ["no pass", "plain pass", "pass"])
def test_graph_of_several_outputs_is_collected(run: str):
    """A call whose outputs belong to several nodes is collected at the latest."""
    model, loss, x, y = build("recurrent")
    gc.collect()
    before = set(map(id, alive(Call)))
    value = loss(model(x), y)
    calls = [weakref.ref(c) for c in alive(Call) if id(c) not in before]
    if run == "plain pass":
        value.backward()
    elif run == "pass":
        with backpack(*make()):
            value.backward()
    del value
    gc.collect()
    assert not any(call() for call in calls)


@pytest.mark.parametrize("name", MODELS)
def test_forward_passes_do_not_add_up(name: str):
    """A hundred forward passes keep what one keeps."""
    model, loss, x, y = build(name)

    def count() -> Tuple[int, int]:
        gc.collect()
        return len(alive(Tensor)), len(alive(Call))

    for _ in range(3):
        loss(model(x), y)
    before = count()
    for _ in range(100):
        loss(model(x), y)
    assert count() == before


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inside", [True, False])
def test_training_does_not_add_up(name: str, inside: bool):
    """Ten training steps keep what one keeps."""
    model, loss, x, y = build(name)
    exts = make() if inside else []

    def step() -> None:
        with backpack(*exts):
            loss(model(x), y).backward()

    assert_does_not_add_up(step, 10)


@pytest.mark.parametrize("name", MODELS)
def test_only_fields_are_left(name: str):
    """After a backward pass, the fields are all that there is besides the gradient."""
    model, loss, x, y = build(name)
    gc.collect()
    before, calls = set(map(id, alive(Tensor))), len(alive(Call))
    exts = make()
    with backpack(*exts):
        loss(model(x), y).backward()
    gc.collect()
    fields = [getattr(p, e.savefield, None) for e in exts for p in model.parameters()]
    # some are views of all of a tensor
    fields += [field._base for field in fields if field is not None]
    fields += [x for e in exts for x in vars(e).values()]  # what one may read there
    gradients = {id(p.grad) for p in (*model.parameters(), x)}
    left = set(map(id, alive(Tensor))) - before - set(map(id, fields)) - gradients
    assert not left
    assert len(alive(Call)) == calls


@dataclass
class Results:
    """What a model returns, in an object that nobody knows."""

    loss: Tensor
    logits: Tensor


@dataclass
class Slots(Results):
    """The same, without a dictionary."""

    __slots__ = ("loss", "logits")


class Named(OrderedDict):
    """A dictionary of a class of its own."""


OBJECTS: Dict[str, Tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Results, lambda out: out.loss),
    "slots": (Slots, lambda out: out.loss),
    "in-a-list": (
        lambda *results: [{"of": Results(*results)}],
        lambda o: o[0]["of"].loss,
    ),
    "dictionary": (lambda a, b: Named(loss=a, logits=b), lambda out: out["loss"]),
    "distribution": (
        lambda _, f: torch.distributions.Normal(f, f.exp()),
        lambda out: -out.log_prob(torch.ones(())).mean(),
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_nothing_is_left_where_objects_are_returned(name: str):
    """A model that returns an object keeps neither inputs nor outputs."""
    wrap, loss_of = OBJECTS[name]

    def forward(m: Module, x: Tensor) -> Any:
        f = m.f(x)
        return wrap(f.square().mean(), f)

    model, x = extend(Lambda(forward, f=nn.Linear(4, 3))), torch.rand(N, 4)
    plain, ref, out = set(vars(model)), weakref.ref(x), model(x)
    with backpack(BatchGrad()):
        loss_of(out).backward()
    assert_agrees(model.f.weight.grad_batch.sum(0), model.f.weight.grad)
    del x, out
    gc.collect()
    assert set(vars(model)) == plain and ref() is None


@pytest.mark.parametrize("name", MODELS)
def test_fields_own_their_memory(name: str):
    """A field is no view of something larger that it would keep alive."""
    model, loss, x, y = build(name)
    exts = make()
    with backpack(*exts):
        loss(model(x), y).backward()
    for ext in exts:
        for param_name, param in model.named_parameters():
            field = getattr(param, ext.savefield, None)
            if field is not None:
                size = field.untyped_storage().nbytes()
                assert size <= field.nbytes, (ext.savefield, param_name)


def test_abandoned_model():
    """An extended model dies like any other, at once, also after a pass."""
    with no_collection():
        model, loss, x, y = build("conv_net")
        with backpack(*make()):
            loss(model(x), y).backward()
        model(x)
        references = [weakref.ref(module) for module in model.modules()]
        del model
        # hooks' handles know modules weakly
        assert not any(reference() for reference in references)


LOSSES_BY_HAND: Dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda f: (f.logsumexp(1) - f[:, 0]).mean(),
    "cumulative": lambda f: f.sort(1)[0].logcumsumexp(1).sum(),
    "exponential": lambda f: (f.topk(2, 1)[0].exp().sum(1) * f.tanh()[:, 0]).sum(),
}


@pytest.mark.parametrize("name", LOSSES_BY_HAND)
def test_losses_by_hand_do_not_add_up(name: str):
    """What asks for the samples behind a loss keeps nothing of its graph."""
    model, _, x, _ = build("residual")

    def step() -> None:
        with backpack(make_extension("BatchGrad")):
            LOSSES_BY_HAND[name](model(x)).backward()

    assert_does_not_add_up(step, 5)


def test_checkpoints_do_not_add_up():
    """Neither does what a checkpoint computes a second time."""
    model, loss, x, y = build("conv_net")

    def step() -> None:
        hidden = checkpoint(model[:3], x, use_reentrant=False)
        with backpack(*make()):
            loss(model[3:](hidden), y).backward()

    assert_does_not_add_up(step, 5)


def test_interrupted_pass():
    """A backward pass that fails keeps nothing that its graph does not."""
    model, loss, x, y = build("conv_net")

    def fail(module: Module) -> None:
        if isinstance(module, nn.GroupNorm):
            raise ZeroDivisionError

    with no_collection():
        before = set(map(id, alive(Call)))
        value = loss(model(x), y)
        calls = [weakref.ref(c) for c in alive(Call) if id(c) not in before]
        with pytest.raises(ZeroDivisionError):
            with backpack(*make(), extension_hook=fail):
                value.backward()
        del value
        gc.collect()  # the exception's traceback may be part of a cycle
        assert not any(call() for call in calls)


def test_extension_keeps_nothing():
    """An extension that outlives its passes does not own their tensors."""
    model, loss, x, y = build("conv_net")
    ext = SqrtGGNExact()
    with backpack(ext):
        loss(model(x), y).backward()
    fields = [weakref.ref(param.sqrt_ggn_exact) for param in model.parameters()]
    for param in model.parameters():
        del param.sqrt_ggn_exact
    assert not any(field() for field in fields)


# Peak memory

MEASURE = """
import ctypes, gc, sys, torch
from torch import nn
from backpack import backpack, extend, extensions

def memory(key):
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(key)]
    return int(line.split()[1]) / 1024

torch.set_num_threads(1)
quantity, classes = sys.argv[1], int(sys.argv[2])
features, batch = 200, 128
model = extend(nn.Sequential(
    nn.Linear(features, features), nn.Tanh(), nn.Linear(features, features), nn.Tanh(),
    nn.Linear(features, classes),
))
loss = extend(nn.CrossEntropyLoss())
x, y = torch.rand(batch, features), torch.randint(classes, (batch,))
exts = [getattr(extensions, quantity)()]

def run():
    with backpack(*exts):
        loss(model(x), y).backward()

run()  # loads what is loaded lazily
for param in model.parameters():
    del param.grad
    for ext in exts:
        delattr(param, ext.savefield)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
before = memory("VmRSS")
run()
print(memory("VmHWM") - before)
"""


def peak(quantity: str, classes: int) -> float:
    """Measure how much a backward pass adds to a process's peak memory.

    Args:
        quantity: Name of an extension.
        classes: Number of classes.

    Returns:
        Peak memory in MiB.
    """
    arguments = [sys.executable, "-c", textwrap.dedent(MEASURE), quantity, str(classes)]
    # large tensors go back to the system when they are freed, and are not in the way
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(
        arguments, capture_output=True, text=True, check=True, env=env
    )
    return float(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's counters")
def test_memory_does_not_grow_with_classes():
    """The peak with 300 classes is less than twice that with 10, without the head.

    The head comes with its weight, gradient and result, and with the buffers in which
    ten columns are computed at a time. All columns together would be 300 times
    ``[128, 300]`` numbers at the prediction, 44 MiB, and 300 times ``[128, 200]`` at
    each hidden layer, 29 MiB; the peak with 10 is about 7 MiB.
    """
    few, many = peak("DiagGGNExact", 10), peak("DiagGGNExact", 300)
    weight, columns = (4 * size / 2**20 for size in (200 * 300, 10 * 128 * 300))
    assert many - 5 * weight - 7 * columns < 2 * few


def allocated(run: Callable[[], None]) -> int:
    """Find the peak of the bytes that tensors occupy, as PyTorch's profiler sees them.

    Args:
        run: What to do, once before, too.

    Returns:
        Bytes, beyond those that were there.
    """
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    steps = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    sums = accumulate(size for _, size in sorted(steps, key=lambda step: step[0]))
    return max(sums)


WIDE: Dict[str, Tuple[Callable[[], Module], Tuple[int, ...]]] = {
    "samples": (lambda: nn.Linear(8, 8), (64, 8)),
    "positions": (lambda: nn.Conv1d(8, 8, 3, padding=1), (16, 8, 64)),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.usefixtures("cpu")
def test_columns_that_are_needed_twice(name: str) -> None:
    """Exact eigenvalues take one column at a time, where those are the larger part.

    A sampled Fisher has a single column. Of nine, at six layers, two may be there.
    """
    make, shape = WIDE[name]
    layers = [make() for _ in range(6)]
    head = [nn.AdaptiveAvgPool1d(1), nn.Flatten()] if len(shape) > 2 else []
    model = extend(nn.Sequential(*layers, *head, nn.Linear(8, 10)))
    loss, x = extend(nn.CrossEntropyLoss()), torch.rand(shape)
    y = torch.arange(len(x)) % 10

    def run(fisher_type: str) -> None:
        with backpack(EKFAC(fisher_type=fisher_type), gradient=False):
            loss(model(x), y).backward()

    peaks = {kind: allocated(partial(run, kind)) for kind in ("mc", "exact")}
    column = len(layers) * x.numel() * x.itemsize
    assert peaks["exact"] - peaks["mc"] < 2 * column, peaks
