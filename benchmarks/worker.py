"""Measures one package in a process of its own, on orders that arrive over a pipe.

BackPACK's versions share an import name, so each environment has its own process.
``run.py`` starts this script and talks to it in lines of JSON: ``prepare`` builds a
task and runs it once, ``pair`` times a gradient and the task one after the other,
``memory`` finds the peak of both.
"""

import json
import os
import resource
import sys
import tempfile
from time import perf_counter
from typing import Any, Callable, Dict, NamedTuple, TextIO

import torch
from networks import PROBLEMS
from torch.nn import CrossEntropyLoss, Module
from torch.profiler import ProfilerActivity, profile


class Task(NamedTuple):
    """Something to measure.

    Args:
        run: Does it.
        clear: Drops its results, so that each run starts with the same memory.
    """

    run: Callable[[], Any]
    clear: Callable[[], None]


# What takes longer than these seconds is not run once more before each measurement.
LONG = 10.0


class Unavailable(Exception):
    """The package does not offer this quantity."""


def clear_fields(model: Module, *names: str) -> None:
    """Drop the gradients and other results that parameters hold.

    Args:
        model: The network.
        names: The attributes besides ``grad``.
    """
    for param in model.parameters():
        param.grad = None
        for name in names:
            if hasattr(param, name):
                delattr(param, name)


def gradient(order: Dict[str, Any]) -> Task:
    """Make the task that the others are compared with: forward pass, backward pass.

    Args:
        order: Says which problem, batch size and device.

    Returns:
        The task.
    """
    problem = PROBLEMS[order["problem"]]
    model, loss = problem.model(order["device"]), CrossEntropyLoss()
    X, y = problem.data(order["batch_size"], order["device"])
    return Task(lambda: loss(model(X), y).backward(), lambda: clear_fields(model))


def with_backpack(order: Dict[str, Any]) -> Task:
    """Make the task that computes a quantity with the installed BackPACK.

    Quantities that are functions are also applied, to one vector per parameter.

    Args:
        order: Says which problem, batch size, device, quantity and options.

    Returns:
        The task.

    Raises:
        Unavailable: If this version has no such extension.
    """
    from backpack import backpack, extend, extensions

    extension_cls = getattr(extensions, order["quantity"], None)
    if extension_cls is None:
        raise Unavailable
    extension = extension_cls(**order["options"])

    problem = PROBLEMS[order["problem"]]
    model = extend(problem.model(order["device"]))
    loss = extend(CrossEntropyLoss())
    X, y = problem.data(order["batch_size"], order["device"])
    vectors = [torch.ones_like(p).unsqueeze(0) for p in model.parameters()]

    def run() -> None:
        value = loss(model(X), y)
        with backpack(extension):
            value.backward()
        for param, vector in zip(model.parameters(), vectors):
            result = getattr(param, extension.savefield)
            if callable(result):
                result(vector)

    return Task(run, lambda: clear_fields(model, extension.savefield))


def with_opacus(order: Dict[str, Any]) -> Task:
    """Make the task that computes individual gradients, or their norms, with Opacus.

    Args:
        order: Says which problem, batch size, device and quantity.

    Returns:
        The task.

    Raises:
        Unavailable: If the quantity is another one.
    """
    from opacus.grad_sample import (
        GradSampleModule,
        GradSampleModuleFastGradientClipping,
    )

    problem = PROBLEMS[order["problem"]]
    model, loss = problem.model(order["device"]), CrossEntropyLoss()
    X, y = problem.data(order["batch_size"], order["device"])

    if order["quantity"] == "BatchGrad":
        wrapped = GradSampleModule(model, loss_reduction="mean")

        def run() -> None:
            loss(wrapped(X), y).backward()

        def clear() -> None:
            for param in model.parameters():
                param.grad = param.grad_sample = None

    elif order["quantity"] == "BatchL2Grad":
        wrapped = GradSampleModuleFastGradientClipping(
            model, loss_reduction="mean", max_grad_norm=1.0, use_ghost_clipping=True
        )

        def run() -> None:
            loss(wrapped(X), y).backward()
            wrapped.get_norm_sample()

        clear = wrapped.zero_grad
    else:
        raise Unavailable
    return Task(run, clear)


# What is left to do with individual gradients [N, *p]
REDUCTIONS: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "BatchGrad": lambda g: g,
    "BatchL2Grad": lambda g: torch.linalg.vector_norm(g.flatten(1), dim=1).square(),
    "SumGradSquared": lambda g: g.square().sum(0),
    "Variance": lambda g: g.var(0, correction=0),
    "BatchDotGrad": lambda g: g.flatten(1) @ g.flatten(1).T,
}


def with_torch_func(order: Dict[str, Any]) -> Task:
    """Make the task that reduces individual gradients, from ``vmap(grad)``.

    Args:
        order: Says which problem, batch size, device and quantity.

    Returns:
        The task.

    Raises:
        Unavailable: If the quantity is another one.
    """
    reduce = REDUCTIONS.get(order["quantity"])
    if reduce is None:
        raise Unavailable

    problem = PROBLEMS[order["problem"]]
    model, loss = problem.model(order["device"]), CrossEntropyLoss()
    X, y = problem.data(order["batch_size"], order["device"])
    params = {name: p.detach() for name, p in model.named_parameters()}
    results = []

    def sample_loss(params, x, label):
        output = torch.func.functional_call(model, params, (x.unsqueeze(0),))
        return loss(output, label.unsqueeze(0))

    individual_gradients = torch.func.vmap(
        torch.func.grad(sample_loss), in_dims=(None, 0, 0), randomness="different"
    )

    def run() -> None:
        gradients = individual_gradients(params, X, y)
        results.append({name: reduce(g) for name, g in gradients.items()})

    return Task(run, results.clear)


PACKAGES: Dict[str, Callable[[Dict[str, Any]], Task]] = {
    "backpack": with_backpack,
    "opacus": with_opacus,
    "torch.func": with_torch_func,
}


class Worker:
    """Holds the task that is being measured, and its gradient."""

    def prepare(self, order: Dict[str, Any]) -> Dict[str, Any]:
        """Build the task, and run the gradient and it once.

        Args:
            order: What to build.

        Returns:
            The seconds of one pair.
        """
        torch.set_num_threads(order["threads"])
        self.device = order["device"]
        self.gradient = gradient(order)
        self.task = PACKAGES[order["package"]](order)
        self.is_long = True  # as far as is known
        seconds = sum(self.pair(order)["pair"])
        self.is_long = seconds >= LONG
        return {"seconds": seconds}

    def pair(self, order: Dict[str, Any]) -> Dict[str, Any]:
        """Time a gradient, then the task.

        The task runs once before, so that what other processes have done in between
        does not count: the system may take back memory, and hand it over slowly.

        Args:
            order: Unused.

        Returns:
            The seconds of both.
        """
        if not self.is_long:
            self._time(self.task)
        return {"pair": [self._time(self.gradient), self._time(self.task)]}

    def _time(self, task: Task) -> float:
        """Time one run.

        Args:
            task: What to time.

        Returns:
            Seconds.
        """
        task.clear()
        self._synchronize()
        start = perf_counter()
        task.run()
        self._synchronize()
        seconds = perf_counter() - start
        task.clear()
        return seconds

    def _synchronize(self) -> None:
        """Wait for what was sent to the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory(self, order: Dict[str, Any]) -> Dict[str, Any]:
        """Find the peak memory of a gradient and of the task.

        Args:
            order: Unused.

        Returns:
            The bytes of both.
        """
        peak = cuda_peak if self.device == "cuda" else cpu_peak
        return {"memory": [peak(self.gradient), peak(self.task)]}


def cpu_peak(task: Task) -> int:
    """Run once and find the peak of what PyTorch's allocator has handed out.

    The profiler records each allocation and each release; their running sum counts
    what exists beyond parameters and data. It is exact and does not vary, unlike the
    memory of the process, which depends on what the C library gives back.

    Args:
        task: What to run.

    Returns:
        Bytes.
    """
    task.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        task.run()
    task.clear()

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    events = [event for event in events if event["name"] == "[memory]"]

    current = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        current += event["args"]["Bytes"]
        peak = max(peak, current)
    return peak


def cuda_peak(task: Task) -> int:
    """Run once and find the peak of the memory that tensors occupy on the GPU.

    Args:
        task: What to run.

    Returns:
        Bytes.
    """
    task.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    task.run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    task.clear()
    return peak


def limit_memory(share: float = 0.85) -> None:
    """Let an allocation fail, before the machine runs out of memory.

    Args:
        share: The share of the machine's memory that this process may take.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = int(share * total)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def answer(worker: Worker, order: Dict[str, Any]) -> Dict[str, Any]:
    """Follow an order.

    Args:
        worker: Who does it.
        order: What to do.

    Returns:
        The result, or the reason why there is none.
    """
    try:
        return getattr(worker, order["do"])(order)
    except Unavailable:
        return {"missing": True}
    except (MemoryError, RuntimeError) as error:
        text = str(error).strip()
        out_of_memory = isinstance(error, MemoryError) or any(
            hint in text for hint in ("out of memory", "can't allocate memory")
        )
        first_line = (text.splitlines() or ["no message"])[0]
        return {"error": "out of memory" if out_of_memory else first_line}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def serve(orders: TextIO, answers: TextIO) -> None:
    """Answer each order with one line.

    Args:
        orders: Where they come from.
        answers: Where the answers go.
    """
    worker = Worker()
    for line in orders:
        print(json.dumps(answer(worker, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    # answers keep the pipe for themselves: what libraries print goes to stderr
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    limit_memory()
    serve(sys.stdin, pipe)
