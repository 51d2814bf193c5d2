"""What holds for every test: one thread, and random numbers that repeat."""

import gc
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Iterator, List

import pytest
import torch
from torch._C import _ImperativeEngine as ImperativeEngine
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import Variable
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from backpack.utils.state import _stash, state

torch.set_num_threads(1)
# Seeding devices that are not there formats the whole stack, for a later message: up to
# 5 ms inside of pytest, each time.
for device in (torch.cuda, getattr(torch, "xpu", None), getattr(torch, "mtia", None)):
    if device is not None and not device.is_available():
        device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture
def cpu(request: pytest.FixtureRequest) -> None:
    """Skip a test of what is there for the CPU only, if a device was asked for."""
    if request.config.getoption("--device"):
        pytest.skip("there for the CPU only")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> None:
    """Print what tests have recorded, like the seed of what they drew."""
    for reports in list(terminalreporter.stats.values()):
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, value in report.user_properties:
                    terminalreporter.write_line(f"{name}: {value}")


# With --light, one row in so many of each test's table is run, the first one included
LIGHT = 12


# Rows that PyTorch itself could not run at first: since which version it can, and why
TRACING = "2.9", "tracing takes no proxies inside of a tuple"
HALF = "2.6", "there is no MSE of bfloat16 on the CPU"
SHARDS = "2.6", "fully_shard works on a GPU only"
WARNS = "2.6", "the compiler warns of what it leaves out, which is an error here"
JAGGED = "2.9", "jagged tensors lack gradients and operations"
QUERIES = "2.13", "the mask of an attention without queries has to fit"
LOCKED = "2.13", "a pass in such a hook waits for the gradient that it is about"
SINCE = {
    "test_parts_of_a_tensor": TRACING,
    "test_a_pass_in_a_hook_of_another[accumulated-False-True]": LOCKED,
    "test_a_pass_in_a_hook_of_another[accumulated-True-True]": LOCKED,
    "test_what_was_wrong[mask-of-no-queries]": QUERIES,
    "test_same_model[inplace-keywords-eval]": TRACING,
    "test_same_model[inplace-keywords-train]": TRACING,
    "test_only_modules[inplace-keywords]": TRACING,
    "test_spellings[Flatten-7]": TRACING,
    "test_spellings[FunctionModule-28]": TRACING,
    "test_gradient[half precision]": HALF,
    "test_right[compiled-step]": WARNS,
    "test_gradients_left_out[FSDP2-each-kept-gradient=False-gradient=False-plain]": (
        SHARDS
    ),
    "test_gradients_left_out[FSDP2-each-replace_grad]": SHARDS,
    "test_gradients_left_out[FSDP2-gradient=False-gradient=False-plain]": SHARDS,
    "test_gradients_left_out[FSDP2-plain-replace_grad]": SHARDS,
    "test_shared_model[FSDP2]": SHARDS,
    "test_shared_model[FSDP2-apart-parts]": SHARDS,
    "test_shared_model[FSDP2-apart]": SHARDS,
    "test_shared_model[FSDP2-blocks-kept]": SHARDS,
    "test_shared_model[FSDP2-blocks]": SHARDS,
    "test_shared_model[FSDP2-each]": SHARDS,
    "test_shared_model[FSDP2-each-kept]": SHARDS,
    "test_shared_model[FSDP2-extended-later]": SHARDS,
    "test_shared_model[FSDP2-twice]": SHARDS,
    "test_shared_model_is_reduced[FSDP2-each]": SHARDS,
    "test_shared_model_walks[FSDP2-each]": SHARDS,
    **{
        f"test_without_a_context[nested-jagged-{row}{gradient}]": JAGGED
        for row in ("", "in-operations-")
        for gradient in ("", "input-gradient")
    },
    **{
        f"test_message[nested-torch.jagged-{name}]": JAGGED
        for name in ("BatchGrad", "DiagGGNExact", "KFAC")
    },
    "test_message[nested-parameter-torch.jagged]": JAGGED,
    "test_message[nested-inside-torch.jagged]": JAGGED,
    "test_slices_of_half_precision_numbers": HALF,
    "test_sums_of_half_precision_numbers": HALF,
}


LOADED = [0]  # number of modules that the garbage collector passes by


def pytest_runtest_setup() -> None:
    """Keep tests, and what is imported, out of the way of the garbage collector.

    It looks at all objects each time, and tests of memory call it often.
    """
    if len(sys.modules) > LOADED[0] + 50:  # as when the compiler is needed first
        LOADED[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the quick loop, and for an accelerator."""
    parser.addoption(
        "--light",
        action="store_true",
        help=f"run every test, but only one in {LIGHT} of its rows, and no slow one",
    )
    parser.addoption("--device", help="where tensors are created, like cuda")
    parser.addoption(
        "--threaded",
        type=int,
        help="run backward passes in a thread that has made so many nodes, as on a GPU",
    )


# On an accelerator, a factor of one is not told from others, and PyTorch warns
ON_DEVICES = (
    "Sparse invariant checks are implicitly",
    "The backward pass does not begin at",
    "RNN module weights are not part of",
    "Attempting to run cuBLAS",
)
# What fails on a GPU without this library, too: such rows are skipped there
REFUSED = (
    "cudnn RNN backward can only be",
    "'_cudnn_rnn_backward' is not implemented",
    "NativeBatchNormBackward0 returned an invalid gradient",
    '_cuda" not implemented for',
    "linalg.inv: (Batch element",
    "tensor does not have a device",  # of a derivative of `instance_norm`
    "argument should be a 1D CPU int64 tensor",  # of `pack_sequence`
)


class Engine:
    """Runs backward passes in another thread, whose nodes are counted by themselves."""

    def __init__(self, ahead: int):
        """Start the thread, which has made some nodes."""
        self.pool = ThreadPoolExecutor(1)
        self.own = ImperativeEngine()
        self.number = self.pool.submit(threading.get_ident).result()
        x = torch.ones(1, requires_grad=True, device="cpu")
        self.pool.submit(lambda: [x.view(1) for _ in range(ahead)]).result()

    def __getattr__(self, name: str) -> Any:
        """Look up what else there is."""
        return getattr(self.own, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, with the state of the thread that asks for it."""
        if threading.get_ident() == self.number or peek_interpreter_stack():
            return self.own.run_backward(*args, **kwargs)
        modes, own = _get_current_function_mode_stack(), state()
        watching = _get_current_dispatch_mode_stack()
        enabled = torch.is_grad_enabled()

        def run() -> Any:
            if state() is not own:
                _stash(own)
            with ExitStack() as stack:
                for mode in modes:
                    torch._C._push_on_torch_function_stack(mode)
                    stack.callback(torch._C._pop_torch_function_stack)
                for mode in watching:
                    torch._C._push_on_torch_dispatch_stack(mode)
                    stack.callback(torch._C._pop_torch_dispatch_stack, None)
                stack.enter_context(torch.set_grad_enabled(enabled))
                return self.own.run_backward(*args, **kwargs)

        return self.pool.submit(run).result()


@pytest.fixture(params=[0, 10_000])
def elsewhere(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Run backward passes in another thread, which is behind or ahead with nodes."""
    engine = Engine(request.param)
    monkeypatch.setattr(Variable, "_execution_engine", engine)
    yield
    engine.pool.shutdown()


def pytest_configure(config: pytest.Config) -> None:
    """Create tensors, and run backward passes, where it was asked for."""
    if config.getoption("--threaded") is not None:
        Variable._execution_engine = Engine(config.getoption("--threaded"))
    if config.getoption("--device"):
        torch.set_default_device(config.getoption("--device"))
        torch.backends.cudnn.allow_tf32 = False
        for text in ON_DEVICES:
            config.addinivalue_line("filterwarnings", f"ignore:{text}:UserWarning")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what PyTorch cannot do."""
    try:
        return (yield)
    except Exception as error:
        if item.config.getoption("--device") and any(x in str(error) for x in REFUSED):
            pytest.skip(str(error).split("\n")[0])
        raise


def pytest_collection_modifyitems(
    config: pytest.Config, items: List[pytest.Item]
) -> None:
    """Skip what this PyTorch lacks; thin out the tables for the quick loop."""
    for item in items:
        version, why = SINCE.get(item.name, ("0", ""))
        if torch.__version__ < version:
            reason = f"before torch {version}, {why}"
            item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("--light"):
        return
    seen: Counter = Counter()
    kept, dropped = [], []
    for item in items:
        key = (item.fspath, getattr(item, "originalname", item.name))
        light = seen[key] % LIGHT == 0 and item.get_closest_marker("slow") is None
        (kept if light else dropped).append(item)
        seen[key] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
