"""A step that is traced or compiled leaves what a plain one does.

The table of all networks and quantities runs the recorded graph as it is. Compilers
take long: one network is compiled in the usual run, with two quantities; with
``BACKPACK_TEST_LONG=1`` each of them, with all.
"""

import gc
import os
import random
import warnings
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import F64, inverse, randomize
from oracle import assert_agrees
from per_sample import Backward
from torch import Tensor, nn, vmap
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backpack import backpack, compile_step, extend, extensions
from backpack.compiled import CompiledStep
from backpack.core.fast import tuning, whole
from backpack.extensions.backprop_extension import BackpropExtension

LONG = int(os.environ.get("BACKPACK_TEST_LONG", "0"))
OBJECTS = ("HMP", "GGNMP", "PCHMP", "BatchFactors")
SHARING = {"weight_sharing": "expand"}
OPTIONS: Dict[str, Dict[str, Any]] = {
    "KFAC": SHARING,
    "KFLR": SHARING,
    "ClippedGrad": {"max_norm": 0.1},
    "WeightedGrad": {"weights": inverse},
    "BatchProjectGrad": {"projection": 2},
}
FIRST = [
    *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "BatchDotGrad"),
    *("ClippedGrad", "WeightedGrad"),
]
EXACT = ["DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "BatchJacobian"]
SAMPLED = [
    *("DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC", "EKFAC", "BatchProjectGrad"),
]
WALKING = ["KFRA", "DiagHessian", "BatchDiagHessian"]
QUANTITIES = [*FIRST, *EXACT, *SAMPLED, *WALKING]


class Block(Module):
    """Attention and two dense layers, each normalised before and added."""

    def __init__(self, features: int = 4):
        """Make the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attention_in = nn.Linear(features, 3 * features)
        self.attention_out = nn.Linear(features, features)
        self.dense = nn.Sequential(
            nn.Linear(features, 6), nn.GELU(), nn.Linear(6, features)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Update features ``[N, T, D]``."""
        q, k, v = self.attention_in(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.attention_out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.dense(self.norm2(x))


class Transformer(Module):
    """A table of tokens and one of their kinds, a block, and a head on the mean."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.tokens, self.block = nn.Embedding(5, 4, padding_idx=0), Block()
        self.kinds = nn.Parameter(torch.randn(2, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits ``[N, C]``."""
        x = self.tokens(tokens) + self.kinds[tokens % 2 - 1]
        return self.head(self.block(x).mean(1))


class Pair(Module):
    """Two layers side by side, whose product goes through a function of one's own."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.both = Both([nn.Linear(6, 4), nn.Linear(6, 4)])

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits ``[N, C]``."""
        x, y = self.both(x)
        return Backward.apply(torch.clone, y.detach(), x * y)


class Both(nn.ModuleList):
    """Modules that get the same input."""

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Call them."""
        return tuple(module(x) for module in self)


def mlp() -> Module:
    """Make dense layers, with an activation that has a curvature."""
    return nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 4))


def convolutions() -> Module:
    """Make a convolutional network that draws, and has running statistics."""
    norm = nn.BatchNorm2d(3).eval()
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 4)),
    )


class Network(NamedTuple):
    """A network, its data, and which quantities it has."""

    make: Callable[[], Module]
    data: Callable[[], Tensor]
    walks: bool = True


NETWORKS = {
    "mlp": Network(mlp, lambda: torch.randn(3, 6, dtype=F64)),
    "conv": Network(convolutions, lambda: torch.randn(3, 2, 4, 4, dtype=F64)),
    "transformer": Network(Transformer, lambda: torch.randint(5, (3, 4)), False),
}
CASES = [
    pytest.param(network, name, id=f"{network}-{name}")
    for network, row in NETWORKS.items()
    for name in QUANTITIES
    if row.walks or name not in WALKING
]
# Networks with quantities that are recorded together; one by one takes long
GROUPS = [
    pytest.param(network, names, id=f"{network}-{names[0]}")
    for network, row in NETWORKS.items()
    for names in (
        [[x] for x in QUANTITIES] if LONG else [FIRST, EXACT, SAMPLED, WALKING]
    )
    if row.walks or names[0] not in WALKING
]


class Step:
    """A model, and a loss of it."""

    def __init__(self, network: str = "mlp", loss: Optional[Module] = None):
        """Build both."""
        row = NETWORKS[network]
        self.model = extend(randomize(row.make().to(F64)))
        self.loss = extend((loss or nn.CrossEntropyLoss()).to(F64))
        self.data = row.data(), torch.randint(4, (3,))

    def closure(self, X: Tensor, y: Tensor) -> Tensor:
        """Compute the loss."""
        return self.loss(self.model(X), y)

    def plain(self, *exts: BackpropExtension) -> Tensor:
        """Run it as it is."""
        loss = self.closure(*self.data)
        with backpack(*exts):
            loss.backward()
        return loss.detach()

    def traced(self, *exts: BackpropExtension) -> CompiledStep:
        """Make a step that runs what was recorded, and compiles nothing."""
        context = partial(backpack, *exts)
        return CompiledStep(self.closure, context, exts, lambda graph, _: graph, False)

    def taken(self, *exts: BackpropExtension) -> Dict[str, Any]:
        """Collect gradients and quantities, and remove them."""
        found = {}
        for name, param in self.model.named_parameters():
            for field in ("grad", *(ext.savefield for ext in exts)):
                found[f"{name}.{field}"] = getattr(param, field)
                delattr(param, field) if field != "grad" else None
            param.grad = None
        for ext in exts:
            if hasattr(ext, "norms"):
                found[f"norms for {ext.savefield}"] = ext.norms
        return found


def make(name: str) -> BackpropExtension:
    """Make an extension with its options."""
    return getattr(extensions, name)(**OPTIONS.get(name, {}))


def compare(step: Step, compiled: CompiledStep, exts: List[BackpropExtension]) -> None:
    """Compare both ways to take a step, twice, with other parameters the second."""
    for seed in range(2):
        torch.manual_seed(seed)
        loss = compiled(*step.data)
        found = step.taken(*exts)
        torch.manual_seed(seed)
        assert_agrees(loss, step.plain(*exts), "loss")
        for name, expected in step.taken(*exts).items():
            assert_agrees(found[name], expected, f"{name}, step {seed}")
        with torch.no_grad():
            for param in step.model.parameters():
                param *= 1.1


LOOKS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.equal,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
    torch.ops.aten.bincount,
}


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result, or its shape, the program has to wait for.

    It counts as one that traces, under which numbers are looked at as little as on an
    accelerator.
    """

    _mode_key = torch._C._TorchDispatchModeKey.PROXY

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: D105
        indices = args[1] if func.overloadpacket is torch.ops.aten.index else ()
        masks = any(x is not None and x.dtype == torch.bool for x in indices)
        assert func.overloadpacket not in LOOKS and not masks, f"{func} waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("network, name", CASES)
def test_nothing_waits(network: str, name: str):
    """From the second pass on, nothing has to be waited for, and all is the same."""
    step, ext = Step(network), make(name)
    step.plain(ext)
    step.taken(ext)
    torch.manual_seed(1)
    with NoWaiting():
        step.plain(ext)
    found = step.taken(ext)
    torch.manual_seed(1)
    step.plain(ext)
    for what, expected in step.taken(ext).items():
        assert_agrees(found[what], expected, what)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("names", [FIRST, EXACT], ids=["first", "exact"])
@pytest.mark.parametrize("network", ["mlp", "transformer"])
def test_recorded_on_a_gpu(network: str, names: List[str]):
    """A CUDA graph of a plain step can be replayed with other data."""
    with torch.device("cuda"):
        step, exts = Step(network), [make(name) for name in names]
        others = NETWORKS[network].data(), torch.randint(4, (3,))
    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step.plain(*exts)
            step.taken(*exts)
    torch.cuda.current_stream().wait_stream(beside)
    with torch.cuda.graph(graph):
        step.plain(*exts)
    found = step.taken(*exts)
    for x, other in zip(step.data, others):
        x.copy_(other)
    graph.replay()
    step.plain(*exts)
    for what, expected in step.taken(*exts).items():
        assert_agrees(found[what], expected, what)


@pytest.mark.parametrize("network, names", GROUPS)
def test_traced(network: str, names: List[str]):
    """A recorded step leaves what a plain one does, with other parameters, too."""
    step, exts = Step(network), [make(name) for name in names]
    compare(step, step.traced(*exts), exts)


class Routed(Module):
    """A model of positions that are brought into another order, and back."""

    def __init__(self, order: Callable[[Module, Tensor, Tensor], Tensor]):
        """Choose what orders positions of all samples."""
        super().__init__()
        self.order, self.first, self.last = order, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("fixed", torch.arange(12))

    def forward(self, X: Tensor, order: Tensor) -> Tensor:
        """Map positions ``[N, T, D]`` to logits."""
        rows = self.first(X).flatten(0, 1)
        order = self.order(self, rows, order)
        if order.dim() == 2:  # a mask
            attend = nn.functional.scaled_dot_product_attention
            rows = attend(*3 * [rows[None]], attn_mask=order)[0]
        else:
            rows = torch.zeros_like(rows).index_copy(0, order, rows[order].tanh())
        return self.last(rows.view_as(X)).mean(1)


def same(numbers: Tensor) -> Tensor:
    """Compare all pairs."""
    return numbers == numbers[:, None]


# Orders of positions, now as they are, and whether the next step may have another one
ORDERS: Dict[str, Tuple[Callable[[Module, Tensor, Tensor], Tensor], bool]] = {
    "an argument": (lambda m, rows, order: order, True),
    "computed from one": (lambda m, rows, order: 11 - order.flip(0), True),
    "of the data": (lambda m, rows, order: m.fixed + (0 * rows[:, 0]).long(), True),
    "of parameters": (
        lambda m, rows, order: m.fixed + (0 * m.last.bias[0]).long(),
        True,
    ),
    "drawn": (lambda m, rows, order: m.fixed + torch.randint(1, (12,)), True),
    "a mask": (lambda m, rows, order: same(order // 4), True),
    "a buffer": (lambda m, rows, order: m.fixed, False),
    "of shapes": (lambda m, rows, order: torch.arange(len(rows)), False),
    "a mask of shapes": (
        lambda m, rows, order: same(torch.arange(3).repeat_interleave(4)),
        False,
    ),
}


@pytest.mark.parametrize(
    "name, whole",
    [(x, whole) for x in ORDERS for whole in (True, False) if whole or "mask" not in x],
)
def test_where_samples_are(name: str, whole: bool):
    """A step is not recorded if the next one might have samples in other places."""
    order, changes = ORDERS[name]
    step = Step("mlp")
    step.model = randomize(Routed(order).to(F64))
    for module in [step.model] if whole else step.model.children():
        extend(module)
    step.data = (
        torch.randn(3, 4, 4, dtype=F64),
        torch.randint(4, (3,)),
        torch.arange(12),
    )
    step.closure = lambda X, y, order: step.loss(step.model(X, order), y)
    exts = [make("BatchGrad"), make("DiagGGNExact")]
    if not changes:
        compare(step, step.traced(*exts), exts)
        return
    with pytest.raises(NotImplementedError, match="where samples are after"):
        step.traced(*exts)(*step.data)


def scale_row(module: Module, x: Tensor) -> Tensor:
    """Write to a part of the samples."""
    rows = x * 1.0
    rows[1:2].mul_(module.scale)
    return rows


def test_writing_to_some_samples():
    """Which samples a view holds is looked at out of sight of what records."""
    step, exts = Step(), [make("BatchGrad"), make("DiagGGNExact")]
    own = extend(Own(scale_row))
    own.scale = nn.Parameter(torch.rand(4, dtype=F64))
    step.model.append(own)
    compare(step, step.traced(*exts), exts)


class Mixed(Module):
    """A model that takes features of other samples where an argument says."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, X: Tensor, own: Tensor) -> Tensor:
        """Map features ``[N, D]`` to logits."""
        rows = self.first(X).tanh()
        return self.last(torch.where(own[:, None], rows, rows.flip(0)))


@pytest.mark.parametrize("own", [[1, 0, 1], [1, 1, 1]])
def test_samples_chosen_by_a_mask(own: List[int]):
    """A step is not recorded with a mask that may be another one the next time."""
    step, exts = Step("mlp"), [make("BatchGrad")]
    step.model = extend(randomize(Mixed().to(F64)))
    step.closure = lambda X, y, own: step.loss(step.model(X, own), y)
    data = torch.randn(3, 4, dtype=F64), torch.randint(4, (3,))
    with pytest.raises(NotImplementedError, match="where samples are after"):
        step.traced(*exts)(*data, torch.tensor(own, dtype=torch.bool))


class Picked(Module):
    """A model that reads numbers of each sample where an argument says."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, X: Tensor, places: Tensor) -> Tensor:
        """Map positions ``[N, T, D]`` to logits."""
        rows = self.first(X).as_strided(X.shape, X.stride())
        rows = torch.linalg.cholesky(rows @ rows.mT + torch.eye(4)) @ rows
        rows = rows + rows.nansum(1, keepdim=True)
        one = rows[torch.arange(len(X)), places]
        other = rows.take_along_dim(places[:, None, None], 1)[:, 0]
        return self.last(one * other + rows[:, places].mean(1))


def test_places_within_samples():
    """Numbers that are others the next time may pick what is a sample's own."""
    step, exts = Step("mlp"), [make("BatchGrad"), make("DiagGGNExact")]
    step.model = extend(randomize(Picked().to(F64)))
    step.closure = lambda X, y, places: step.loss(step.model(X, places), y)
    run = step.traced(*exts)
    for places in ([0, 1, 2], [3, 3, 0]):
        data = torch.randn(3, 4, 4, dtype=F64), torch.randint(4, (3,))
        step.data = *data, torch.tensor(places)
        compare(step, run, exts)


class Weighted(Module):
    """A model that computes its loss, with a factor of its own."""

    def __init__(self):
        """Make the model and the factor."""
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 4), nn.Parameter(torch.ones(()))

    def forward(self, X: Tensor, y: Tensor) -> Tensor:
        """Compute the loss."""
        return self.factor.exp() * nn.functional.cross_entropy(self.layer(X), y)


def test_learned_factor():
    """What samples contribute to a mean is computed anew, and nothing waits for it."""
    step, exts = Step(), [make("BatchGrad"), make("BatchL2Grad")]
    step.model = step.closure = extend(randomize(Weighted().to(F64)))
    compare(step, step.traced(*exts), exts)
    with NoWaiting():
        step.plain(*exts)


class Sloped(Module):
    """A model that computes its loss of a derivative by the input."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.layer, self.last = nn.Linear(6, 4), nn.Linear(4, 1, bias=False)

    def forward(self, X: Tensor, y: Tensor) -> Tensor:
        """Compute the loss."""

        def value(x: Tensor) -> Tensor:
            return self.last(self.layer(x).tanh()).squeeze(-1)

        return nn.functional.cross_entropy(vmap(grad(value))(X)[:, :4], y)


def test_transforms():
    """Transforms inside of a model become part of the graph."""
    step, exts = Step(), [make("BatchGrad"), make("BatchL2Grad")]
    step.model = step.closure = extend(randomize(Sloped().to(F64)))
    compare(step, step.traced(*exts), exts)


class Entered(Module):
    """Computes the loss of rows that no sample has entered, beside others'."""

    def __init__(self, rows: Callable[[Module, Tensor], Tensor]) -> None:
        """Make the layers."""
        super().__init__()
        self.rows, self.token = rows, nn.Parameter(torch.zeros(1, 3))
        self.layer, self.last = nn.Linear(6, 3), nn.Linear(3, 4)

    def forward(self, X: Tensor, y: Tensor) -> Tensor:
        """Compute the loss."""
        return nn.functional.cross_entropy(self.rows(self, X), y)


ENTERED: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "padding": lambda m, x: m.last(
        nn.functional.pad(m.layer(x[:1]), (0, 0, 0, len(x) - 1)) + 0 * m.token
    ),
    "buffer": lambda m, x: m.last(
        m.token.repeat(len(x), 1).index_copy(0, torch.tensor([1]), m.layer(x[1:2]))
    ),
    "token": lambda m, x: torch.stack(
        [m.last(torch.cat([m.token, m.layer(z)[None]]).tanh()).prod(0) for z in x]
    ),
}


@pytest.mark.parametrize("name", ENTERED)
def test_rows_that_no_sample_has_entered(name: str):
    """Whose they are is asked while the step is recorded, and is no part of it."""
    step, exts = Step(), [make("BatchGrad"), make("BatchL2Grad")]
    step.model = step.closure = extend(randomize(Entered(ENTERED[name]).to(F64)))
    compare(step, step.traced(*exts), exts)


# Sampled ones alone: the compiler changes the order of draws. Eigenvectors of singular
# factors are whatever rounding makes of them: those of `EKFAC` are compared above.
COMPILED = [["BatchGrad", "DiagGGNExact"]]
if LONG:
    drawn = [name for name in SAMPLED if name != "EKFAC"]
    COMPILED = [[*FIRST, *EXACT, *WALKING], *([name] for name in drawn)]


@pytest.mark.slow
@pytest.mark.parametrize("names", COMPILED, ids=lambda names: names[0])
@pytest.mark.parametrize("network", NETWORKS if LONG else ["mlp"])
def test_compiled(network: str, names: List[str]):
    """So does a compiled one, if it asks PyTorch for random numbers."""
    step = Step(network)
    step.model.eval()
    walks = NETWORKS[network].walks
    exts = [make(name) for name in names if walks or name not in WALKING]
    own = torch._inductor.config.patch(fallback_random=True)
    with own, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        compare(step, compile_step(step.closure, *exts), exts)


@pytest.mark.parametrize("network, names", [("mlp", FIRST), ("conv", FIRST + SAMPLED)])
def test_large_results(network: str, names: List[str], monkeypatch: pytest.MonkeyPatch):
    """They are formed as in a plain pass, in other memory in each step."""
    monkeypatch.setattr(tuning, "HUGE_BYTES", 64)
    monkeypatch.setattr(tuning, "LARGE_PRODUCT", 1)
    step, exts = Step(network), [make(name) for name in names]
    run, weight = step.traced(*exts), step.model[0].weight
    compare(step, run, exts)
    run(*step.data)
    before, value = weight.grad_batch, weight.grad_batch.clone()
    run(2 * step.data[0], step.data[1])
    assert torch.equal(before, value) and not torch.equal(before, weight.grad_batch)


class Arguments(TorchDispatchMode):
    """Collects the arguments of an operation."""

    def __init__(self, operation: Callable):
        """Choose the operation."""
        super().__init__()
        self.operation, self.found = operation, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it."""
        if func is self.operation:
            self.found.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("network", ["mlp", "conv"])
def test_operations_left_whole(network: str):
    """The compiler is told right what they return, and they modify nothing."""
    step, exts = Step(network), [make(name) for name in FIRST + SAMPLED]
    run = step.traced(*exts)
    run(*step.data)
    operation = getattr(torch.ops.backpack, whole._NAME).default
    with Arguments(operation) as arguments:
        run(*step.data)
    assert len(arguments.found) > len(exts)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for args in {kind: (*rest, kind) for *rest, kind in arguments.found}.values():
        torch.library.opcheck(operation, args, test_utils=checks)


@pytest.mark.parametrize("network", ["mlp", "conv"])
def test_nothing_is_kept(network: str):
    """The step lives on without the tensors of the batch that it was recorded with."""
    step, exts = Step(network), [make(name) for name in FIRST + SAMPLED]
    X = step.data[0][:1].repeat_interleave(13, 0)
    y = torch.zeros(13, dtype=torch.long)
    gc.collect()
    before = [x for x in gc.get_objects() if type(x) is Tensor]
    run = step.traced(*exts)
    run(X, y)
    step.taken(*exts)
    for ext in exts:
        if hasattr(ext, "norms"):
            ext.norms = ext.weights = None
    gc.collect()
    ids = set(map(id, before))
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and id(x) not in ids]
    batch = [x for x in tensors if x.shape[:1] == (13,)]
    assert not batch, [x.shape for x in batch]


ARGUMENTS: Dict[str, Callable[[Tensor], Tuple[Callable, List[List[Tensor]]]]] = {
    "the same twice": lambda x: (lambda a, b: a + 2 * b, [[x, x], [x, 3 * x]]),
    "one that is captured": lambda x: (lambda a: a + 2 * x, [[x], [3 * x]]),
    "modified": lambda x: (lambda a: a.mul_(2), [[x], [x]]),
    "expanded": lambda x: (lambda a: a, [[x[:1].expand(3, -1)], [x]]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str):
    """Each call computes from its own arguments, whatever they were the first time."""
    step, ext = Step(), make("BatchGrad")
    (X, y), closure = step.data, step.closure
    results = []
    for take in ("traced", "plain"):
        change, calls = ARGUMENTS[case](X.clone())
        step.closure = lambda *x, f=change: closure(f(*x[:-1]), x[-1])
        run = step.traced(ext)
        for args in calls:
            step.data = *args, y
            run(*step.data) if take == "traced" else step.plain(ext)
            results.append([*args, *step.taken(ext).values()])
    for found, expected in zip(results[: len(calls)], results[len(calls) :]):
        assert_agrees(found, expected, case)


def named_for_profilers(step: Step, X: Tensor, y: Tensor) -> Tensor:
    """Give a part of the step a name, as ``zero_grad`` of optimizers does."""
    with torch.profiler.record_function("loss"):
        return type(step).closure(step, X, y)


def of_classes(step: Step, X: Tensor, y: Tensor) -> Tensor:
    """Compute a loss of one's own, whose classes are compared as numbers."""
    classes = F.one_hot(step.model(X).argmax(-1), 4) + F.one_hot(y, num_classes=4)
    return (step.model(X) - classes).square().sum()


@pytest.mark.parametrize("closure", [named_for_profilers, of_classes])
def test_what_is_no_operation_or_looks_first(cpu: None, closure: Callable):
    """Names for profilers are left out; classes become numbers without a look."""
    step, exts = Step(), [make("BatchGrad")]
    step.closure = partial(closure, step)
    run = compile_step(step.closure, *exts, backend="eager")
    compare(step, run, exts)
    step.data = step.data[0].flip(0), (step.data[1] + 1) % 4
    compare(step, run, exts)


@pytest.mark.parametrize("name", ["BatchGrad", "DiagGGNExact", "KFLR"])
def test_several_outputs(name: str):
    """Modules with several outputs, and functions of one's own, are recorded, too."""
    step, exts = Step(), [make(name)]
    step.model = extend(randomize(Pair().to(F64)))
    compare(step, step.traced(*exts), exts)


class Rounded(nn.Linear):
    """A layer whose weight goes through functions of one's own, and is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits ``[N, C]``."""
        weight = Backward.apply(torch.clone, self.weight.detach(), self.weight)
        weight = torch.fake_quantize_per_tensor_affine(weight, 0.1, 0, -8, 7)
        turned = Backward.apply(lambda g: g.flip(0), self.weight.detach(), self.weight)
        return nn.functional.linear(x, weight + turned, self.bias)


@pytest.mark.parametrize("name", ["BatchGrad", "BatchL2Grad", "DiagGGNExact"])
def test_rounded_weights(name: str):
    """What is asked of functions of parameters is no part of a step."""
    step, exts = Step(), [make(name)]
    step.model = extend(randomize(nn.Sequential(Rounded(6, 4)).to(F64)))
    compare(step, step.traced(*exts), exts)


def test_argument_with_gradient():
    """An argument that requires a gradient gets one."""
    step, ext = Step(), make("BatchGrad")
    run = step.traced(ext)
    for _ in range(2):
        X = torch.randn(3, 6, dtype=F64, requires_grad=True)
        step.data = X, step.data[1]
        run(*step.data)
        found, X.grad = X.grad, None
        step.plain(ext)
        assert_agrees(found, X.grad)


def test_random_numbers():
    """Each step draws anew, and what is drawn before or after is not touched."""
    step, ext = Step("conv"), make("DiagGGNMC")
    run = step.traced(ext)
    torch.manual_seed(0)
    losses = [run(*step.data) for _ in range(3)]
    assert len({loss.item() for loss in losses}) == 3
    after = torch.rand(())
    torch.manual_seed(0)
    assert [step.plain(ext).item() for _ in range(3)] == [x.item() for x in losses]
    assert torch.rand(()) == after


def test_running_statistics():
    """They move once for each step, and gradients add up."""
    norm = nn.BatchNorm1d(5, dtype=F64)
    step = Step()
    step.model.insert(1, extend(norm))
    run = step.traced()
    before = norm.running_mean.clone()
    for number in (1, 2, 3):
        run(*step.data)
        assert norm.num_batches_tracked == number
        assert not torch.equal(norm.running_mean, before)
        before = norm.running_mean.clone()
    gradient = norm.weight.grad / 3
    norm.weight.grad = None
    step.plain()
    assert_agrees(gradient, norm.weight.grad)


class Averaged(nn.Module):
    """Averages a layer's parameters into those of another one, as teachers do."""

    def __init__(self, how: str):
        """Make both layers."""
        super().__init__()
        self.layer, self.teacher = (nn.Linear(5, 5, dtype=F64) for _ in range(2))
        self.how = how
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Write to the teacher, and subtract its result."""
        with torch.no_grad():
            for p, q in zip(self.layer.parameters(), self.teacher.parameters()):
                if self.how == "lerp":
                    q.lerp_(p, 0.1)
                elif self.how == "data":
                    q.data.mul_(0.9).add_(p.data, alpha=0.1)
                else:
                    torch._foreach_mul_([q[:2], q[2:]], 0.9)
            self.layer.bias.clamp_(max=0.1)
            gap = self.teacher(x)
        return self.layer(x) - gap


@pytest.mark.parametrize("how", ["lerp", "data", "foreach"])
def test_parameters_that_are_written_to(how: str):
    """They are written to once for each step, as those of the plain one."""
    step = Step()
    own = Averaged(how)
    step.model.insert(1, extend(own))
    start, losses = deepcopy(own.state_dict()), {}
    run = step.traced()
    for name, take in (("traced", run), ("plain", lambda *data: step.plain())):
        own.load_state_dict(start)
        losses[name] = [take(*step.data).item() for _ in range(3)]
        losses[name].append(own.teacher.weight.sum().item())
    assert losses["traced"] == pytest.approx(losses["plain"], rel=1e-12)


def other_batch(step: Step) -> None:
    """Take fewer samples."""
    step.data = tuple(x[:2] for x in step.data)


def freeze(step: Step) -> None:
    """Freeze a parameter."""
    step.model[0].weight.requires_grad_(False)


def replace(step: Step) -> None:
    """Put another parameter in the place of one."""
    weight = torch.ones(5, 6, dtype=F64)
    step.model[0].weight = nn.Parameter(weight)


def drop_more(step: Step) -> None:
    """Change an option of a layer."""
    (layer,) = (m for m in step.model if isinstance(m, nn.Dropout))
    layer.p = 0.9


CHANGES: Dict[str, Tuple[str, Callable[[Step], Any]]] = {
    "batch size": ("mlp", other_batch),
    "frozen": ("mlp", freeze),
    "replaced": ("mlp", replace),
    "evaluation mode": ("conv", lambda step: step.model.eval()),
    "memory format": (
        "conv",
        lambda step: step.model.to(memory_format=torch.channels_last),
    ),
    "module": ("mlp", lambda step: step.model.__setitem__(1, extend(nn.Tanh()))),
    "numbers": ("mlp", lambda step: step.model[0].weight.data.mul_(2)),
    "option": ("conv", drop_more),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes(change: str):
    """A step is recorded anew for what operations depend on, and only then."""
    network, apply = CHANGES[change]
    step, exts = Step(network), [make("BatchL2Grad")]
    run = step.traced(*exts)
    run(*step.data)
    step.taken(*exts)
    apply(step)
    trainable = [p for p in step.model.parameters() if p.requires_grad]
    results = []
    for take in (lambda: run(*step.data), lambda: step.plain(*exts)):
        torch.manual_seed(0)
        take()
        results.append([(p.grad, p.batch_l2) for p in trainable])
        for p in trainable:
            p.grad = None
            del p.batch_l2
    for found, expected in zip(*results):
        assert_agrees(found, expected, change)


class Masked(nn.Module):
    """Multiplies with an attribute."""

    mask = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.mask.to(x)


def test_attribute_that_is_replaced():
    """A step is recorded anew for another tensor that is an attribute."""
    step, own = Step(), extend(Masked())
    step.model.append(own)
    run = step.traced()
    for mask in (torch.ones(4), torch.arange(4.0), torch.zeros(4)):
        own.mask = mask
        assert_agrees(run(*step.data), step.plain())


@pytest.mark.parametrize("attribute", ["state", "count"])
def test_attributes_that_a_forward_pass_sets(attribute: str):
    """They are set when the step is recorded, and never again, which is told."""

    class Own(nn.Module):
        """Counts its calls, keeps a result, and fills a cache in the first one."""

        state = cache = None
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            """Add up."""
            self.cache = x.new_ones(()) if self.cache is None else self.cache
            if attribute == "count":
                self.count += 1
            else:
                self.state = x.detach().sum()
            return x * self.cache

    step = Step()
    step.model.insert(1, extend(Own()))
    run = step.traced()
    with pytest.warns(UserWarning, match=f"Own.* sets '{attribute}'.*buffer"):
        run(*step.data)
    assert step.taken() is not None
    run(*step.data)


def test_autocast():
    """A step is recorded anew for each type that autocast runs operations in."""
    step, ext = Step(), make("BatchGrad")
    step.model.float()
    step.data = step.data[0].float(), step.data[1]
    run, found = step.traced(ext), {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            for _ in range(2):
                run(*step.data)
                found[dtype] = step.taken(ext)
                step.plain(ext)
                for name, expected in step.taken(ext).items():
                    assert torch.equal(found[dtype][name], expected), name
                for param in step.model.parameters():
                    param.data *= 1.5
                torch.clear_autocast_cache()  # as at the end of each context
    weights = [results["0.weight.grad"] for results in found.values()]
    assert not any(torch.equal(weights[i], weights[i - 1]) for i in range(3))


def looks(X: Tensor) -> Tensor:
    """Depend on a number."""
    return X * X.sum().item()


class Replaces(Module):
    """Puts another tensor into its buffer."""

    def __init__(self):
        """Make the buffer."""
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        """Subtract nothing."""
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x


def without_mean(step: Step) -> None:
    """Return several losses."""
    step.loss.reduction = "none"


class Refused(NamedTuple):
    """What is asked for, and what is said."""

    message: str
    error: type = NotImplementedError
    name: str = "BatchGrad"
    prepare: Callable[[Step], Any] = lambda step: None
    wrap: Callable[[Tensor], Any] = lambda x: x


REFUSED = {
    **{name: Refused(f"{name} saves objects in", name=name) for name in OBJECTS},
    "value": Refused("operations cannot be recorded.*item", wrap=looks),
    "number": Refused("argument 0 is of type int", TypeError, wrap=lambda x: 3),
    "loss": Refused("returned shape \\[3\\]", TypeError, prepare=without_mean),
    "graph": Refused(
        "part of a graph", ValueError, wrap=lambda x: x.clone().requires_grad_() * 2
    ),
    "hook": Refused(
        "'0.weight' of Sequential.*has a hook",
        prepare=lambda step: step.model[0].weight.register_hook(lambda g: g),
    ),
    "buffer": Refused(
        "'mean'", prepare=lambda step: step.model.insert(0, extend(Replaces()))
    ),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_refused(row: Refused):
    """What no graph can do is refused, and everything is as it was before."""
    step = Step()
    row.prepare(step)
    X, y = step.data
    closure = step.closure
    if row.wrap is looks:
        step.closure = lambda X, y: closure(looks(X), y)
    else:
        X = row.wrap(X)
    before = torch.random.get_rng_state()
    with pytest.raises(row.error, match=f"(?s){row.message}"):
        step.traced(make(row.name))(X, y)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in step.model.parameters())


def test_what_the_compiler_refuses(cpu: None):
    """What is recorded, but not compiled, is refused in our words."""
    step = Step("transformer")
    step.model.tokens.sparse = True
    run = compile_step(step.closure, make("BatchGrad"), backend="eager")
    with pytest.raises(NotImplementedError, match="`torch.compile` refuses it"):
        run(*step.data)


class Own(Module):
    """Multiplies with what a function computes, of the module and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]):
        """Store the function, and what it may read.

        Args:
            function: The function.
        """
        super().__init__()
        self.function = function
        self.register_buffer("count", torch.ones(3, dtype=torch.long))
        self.options, self.scales, self.pair = {"a": [1.0, 2.0]}, [1.0, 2.0], (1.0, 2)
        self.space, self.array = SimpleNamespace(a=1.0), np.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.function(self, x)


def reseeded(module: Module, x: Tensor) -> Tensor:
    """Draw numbers that are always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand_like(x)


def dropped_again(module: Module, x: Tensor) -> Tensor:
    """Draw numbers that are drawn again in the backward pass."""
    return checkpoint(lambda x: F.dropout(x), x, use_reentrant=False)


def offloaded(module: Module, x: Tensor) -> Tensor:
    """Keep what the backward pass needs as arrays."""
    with saved_tensors_hooks(lambda x: x.detach().numpy(), torch.from_numpy):
        return x.sin()


READING: Dict[str, Callable[[Any, Tensor], Any]] = {
    "numpy": lambda m, x: x.detach().numpy().max(),
    "asarray": lambda m, x: np.asarray(x.detach()).max(),
    "dlpack": lambda m, x: float(np.from_dlpack(x.detach()).max()),
    "list": lambda m, x: max(x[0].tolist()),
    "int of a buffer": lambda m, x: int(m.count[0]),
    "branch by a buffer": lambda m, x: 2.0 if m.count[0] > 0 else 1.0,
    "equal": lambda m, x: float(torch.equal(m.count, m.count.abs())),
    "nonzero": lambda m, x: len(m.count.nonzero()),
    "unique": lambda m, x: len(x.detach().unique()),
    "mask": lambda m, x: m.count[m.count > 0].sum(),
    "where": lambda m, x: len(torch.where(m.count)[0]),
    "repeated": lambda m, x: len(m.count.repeat_interleave(m.count)),
    "random of Python": lambda m, x: random.random(),
    "random of NumPy": lambda m, x: np.random.rand(),
    "seed": reseeded,
    "offload": offloaded,
    "checkpoint": dropped_again,
    "generator": lambda m, x: torch.rand(4, generator=torch.Generator()).to(x),
    "backward": lambda m, x: [m.scale.exp().sum().backward(), 1.0][1],
}


@pytest.mark.parametrize("name", READING)
def test_what_is_not_in_operations_is_refused(cpu: None, name: str):
    """Numbers that leave tensors, or come from elsewhere, would be the first call's."""
    step = Step()
    own = extend(Own(READING[name]))
    own.scale = nn.Parameter(torch.ones(4, dtype=F64))
    step.model.append(own)
    with pytest.raises(NotImplementedError, match="operations cannot be recorded"):
        step.traced()(*step.data)
    assert torch.equal(own.count, torch.ones(3, dtype=torch.long))


CONSTANTS: Dict[str, Callable[[Any, Tensor], Any]] = {
    "list": lambda m, x: sum(torch.linspace(0, 1, 3).tolist()),
    "like": lambda m, x: max(x.new_ones(3).tolist()),
    "checkpoint": lambda m, x: F.dropout(checkpoint(torch.sin, x, use_reentrant=False)),
    "drawn": lambda m, x: F.dropout(F.dropout(x), 0.2),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_never_changes_may_be_read(cpu: None, name: str):
    """Numbers of constants, a checkpoint, and random numbers in order are recorded."""
    step = Step()
    step.model.append(extend(Own(CONSTANTS[name])))
    results = []
    for take in (step.traced(), lambda *data: step.plain()):
        torch.manual_seed(0)
        results.append([take(*step.data), *step.taken().values()])
    assert_agrees(*results)


FACTOR = 1.0


def of_global(module: Module, x: Tensor) -> float:
    """Read a number of the file."""
    return FACTOR


def change_global(own: Any) -> None:
    """Change it."""
    globals()["FACTOR"] += 1


READ: Dict[str, Tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "dictionary": (lambda m, x: m.options["a"][1], lambda m: m.options["a"].reverse()),
    "list": (lambda m, x: m.scales[0], lambda m: m.scales.reverse()),
    "tuple": (lambda m, x: m.pair[1], lambda m: setattr(m, "pair", (1.0, 5))),
    "space": (lambda m, x: m.space.a, lambda m: setattr(m.space, "a", 3.0)),
    "array": (lambda m, x: m.array[0], lambda m: m.array.fill(3.0)),
    "hook": (
        lambda m, x: 1.0,
        lambda m: m.register_forward_hook(lambda m, args, out: 2 * out),
    ),
    "forward": (
        lambda m, x: 1.0,
        lambda m: setattr(m, "forward", lambda x: x.sin()),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_changes_of_what_a_module_reads(name: str):
    """A step is recorded anew for what is in containers, and for hooks."""
    read, change = READ[name]
    step, own = Step(), extend(Own(read))
    step.model.append(own)
    run = step.traced()
    for _ in range(2):
        found = [run(*step.data), *step.taken().values()]
        assert_agrees(found, [step.plain(), *step.taken().values()])
        change(own)


class Trainer:
    """Has what its loss reads."""

    def __init__(self, step: Step):
        """Begin with a factor of one."""
        self.step, self.factor, self.seen = step, 1.0, 0

    def loss(self, X: Tensor, y: Tensor) -> Tensor:
        """Compute a loss."""
        return self.step.loss(self.factor * self.step.model(X), y)


@pytest.mark.parametrize("kind", ["method", "cell", "global", "default", "partial"])
def test_changes_of_what_the_closure_reads(kind: str):
    """A step is recorded anew for numbers that the closure reads, and only then."""
    step, numbers = Step(), {"factor": 1.0}
    trainer, plain, traced = Trainer(step), step.closure, []

    def of_cell(X: Tensor, y: Tensor) -> Tensor:
        return step.loss(numbers["factor"] * step.model(X), y)

    def of_file(X: Tensor, y: Tensor) -> Tensor:
        return step.loss(FACTOR * step.model(X), y)

    def given(X: Tensor, y: Tensor, by: Dict[str, float] = numbers) -> Tensor:
        return step.loss(by["factor"] * step.model(X), y)

    def of_first(by: Dict[str, float], X: Tensor, y: Tensor) -> Tensor:
        return step.loss(by["factor"] * step.model(X), y)

    step.closure = {
        "method": trainer.loss,
        "cell": of_cell,
        "global": of_file,
        "default": given,
        "partial": partial(of_first, numbers),
    }[kind]
    run = CompiledStep(
        step.closure,
        backpack,
        (),
        lambda graph, _: traced.append(graph) or graph,
        False,
    )
    for number in range(3):
        for _ in range(2):
            found = [run(*step.data), *step.taken().values()]
            assert_agrees(found, [step.plain(), *step.taken().values()])
            trainer.seen += 1
        assert len(traced) == number + 1
        trainer.factor += 1
        numbers["factor"] += 1
        change_global(None)
    step.closure = plain


def test_changes_of_options():
    """A step is recorded anew for another option of an extension."""
    step, ext = Step(), extensions.ClippedGrad(1e-2)
    run = step.traced(ext)
    for max_norm in (1e-2, 1e-3):
        ext.max_norm = max_norm
        found = [run(*step.data), *step.taken(ext).values()]
        assert_agrees(found, [step.plain(ext), *step.taken(ext).values()])


def test_changes_without_end():
    """A step that is recorded again and again says what has changed."""
    step, own = Step(), extend(Own(lambda m, x: m.scales[0]))
    step.model.append(own)
    run = step.traced()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(9):
            own.scales.append(number)
            run(*step.data)
    assert ["'scales'" in str(x.message) for x in told] == [True]


def test_parameters_that_the_closure_writes_to():
    """What a closure writes to before a module is called is written once."""
    step = Step()
    weight, plain = step.model[0].weight, step.closure

    def closure(X: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            weight.mul_(0.9)
        return plain(X, y)

    step.closure = closure
    start, found = weight.detach().clone(), []
    for take in (step.traced(), lambda *data: step.plain()):
        with torch.no_grad():
            weight.copy_(start)
        value = take(*step.data)
        found.append([value, weight.detach().clone(), *step.taken().values()])
    assert_agrees(*found)


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Processes exchange gradients while a pass goes on."""
    monkeypatch.setattr("backpack.compiled.is_parallel", lambda: True)
    step = Step()
    with pytest.raises(NotImplementedError, match="one of several processes"):
        step.traced(make("BatchGrad"))(*step.data)


def negative(step: Step, X: Tensor, y: Tensor) -> Tensor:
    """Compute a loss times a negative number."""
    return -step.loss(step.model(X), y)


UNSEEN: Dict[str, Tuple[Callable, Optional[str], str]] = {
    "halved": (lambda s, X, y: s.loss(s.model(X), y) / 2, "does not begin", "same"),
    "negative": (negative, "does not begin", "nan"),
    "huge inputs": (lambda s, X, y: s.loss(s.model(1e200 * X), y), None, "same"),
    "alike": (lambda s, X, y: s.loss(s.model(X[:1] + 1e-9 * X), y), None, "same"),
}


@pytest.mark.parametrize("case", UNSEEN)
@pytest.mark.parametrize("name", ["DiagGGNExact", "BatchL2Grad", "Variance"])
def test_unseen_numbers(request: pytest.FixtureRequest, case: str, name: str):
    """What numbers decide is right without a look at them, or no number at all."""
    closure, warning, result = UNSEEN[case]
    second, ext, step = name == "DiagGGNExact", make(name), Step()

    def run() -> Dict[str, Any]:
        loss = closure(step, *step.data)
        with backpack(ext):
            loss.backward()
        return step.taken(ext)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run() if not (second and result == "nan") else {}
    warns = pytest.warns(UserWarning, match=warning) if warning and second else None
    with NoWaiting(), nullcontext() if warns is None else warns:
        found = run()
    if second and result == "nan":
        request.getfixturevalue("cpu")  # nor is there a look at them elsewhere
        with pytest.raises(ValueError, match="multiplied by"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run()
        for param in dict(step.model.named_parameters()):
            assert found[f"{param}.{ext.savefield}"].isnan().any()
        return
    for what, value in expected.items():
        assert_agrees(found[what], value, what, rtol=1e-6 if case == "alike" else 1e-8)


class OwnCrossEntropy(Module):
    """A loss of one's own, whose Hessian is that of a rule."""

    reduction = "mean"

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average."""
        return F.cross_entropy(f, y)


@pytest.mark.parametrize("plain", [False, True], ids=["", "after-a-plain-pass"])
@pytest.mark.parametrize("name", ["DiagGGNExact", "KFLR", "DiagHessian", "KFAC"])
def test_own_loss(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch):
    """What was found out of a loss, by random numbers, is no part of the step."""
    monkeypatch.setattr("backpack.utils.state._ANSWERS", {})
    ext, step = make(name), Step(loss=OwnCrossEntropy())
    if plain:
        step.plain(ext)
        step.taken(ext)
    compare(step, step.traced(ext), [ext])


class Curved(Module):
    """A layer of one's own, which module rules repeat."""

    def __init__(self):
        """Create the parameter."""
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        """Bend each feature."""
        return (x * self.weight).tanh() + x.sin()


@pytest.mark.parametrize("plain", [False, True], ids=["", "after-a-plain-pass"])
@pytest.mark.parametrize("name", WALKING)
def test_own_layer(name: str, plain: bool, monkeypatch: pytest.MonkeyPatch):
    """Neither is what was found out of a layer."""
    monkeypatch.setattr("backpack.utils.state._ANSWERS", {})
    ext, step = make(name), Step()
    step.model = extend(nn.Sequential(step.model, Curved(), nn.Linear(4, 4)).to(F64))
    if plain:
        step.plain(ext)
        step.taken(ext)
    compare(step, step.traced(ext), [ext])


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", ["EKFAC", "DiagHessian", "KFAC"])
def test_numbers_without_eigenvectors(name: str):
    """What is not finite in a later step makes no number of the results."""
    ext, step = make(name), Step()
    traced = step.traced(ext)
    X, *others = step.data
    traced(X, *others)
    traced(X.index_fill(0, torch.tensor(0), torch.nan), *others)
    values = step.taken(ext).values()
    assert any(x.isnan().any() for x in values)
