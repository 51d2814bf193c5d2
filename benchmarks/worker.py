"""Measures one package in a process of its own, on orders that arrive over a pipe.

BackPACK's versions share an import name, so each environment has its own process.
``run.py`` starts this script and talks to it in lines of JSON: ``prepare`` builds a
task, checks what can be checked of it and runs it once, ``pair`` times a gradient and
the task one after the other, ``memory`` finds the peak of both.
"""

import json
import os
import resource
import sys
import tempfile
from inspect import signature
from time import perf_counter, process_time
from typing import Any, Callable, Dict, NamedTuple, TextIO, Tuple

import torch
from networks import PROBLEMS
from torch import Tensor
from torch.nn import Conv2d, CrossEntropyLoss, Dropout, Embedding, Linear, Module
from torch.profiler import ProfilerActivity, profile


class Task(NamedTuple):
    """Something to measure.

    Args:
        run: Does it.
        clear: Drops its results, so that each run starts with the same memory.
        results: What it has found, for each parameter by its name and in BackPACK's
            scale. Asked for by :func:`check` alone.
    """

    run: Callable[[], Any]
    clear: Callable[[], None]
    results: Callable[[], Dict[str, Tensor]]


# What takes longer than these seconds is not run once more before each measurement.
LONG = 10.0

# Samples on which results are checked: few, as it is done in double precision. Not as
# many as anything else that a network has several of.
CHECKED_SAMPLES = 3

# What is left to do with individual gradients [N, *p]
REDUCTIONS: Dict[str, Callable[[Tensor], Tensor]] = {
    "BatchGrad": lambda g: g,
    "BatchL2Grad": lambda g: torch.linalg.vector_norm(g.flatten(1), dim=1).square(),
    "SumGradSquared": lambda g: g.square().sum(0),
    "Variance": lambda g: g.var(0, correction=0),
    "BatchDotGrad": lambda g: g.flatten(1) @ g.flatten(1).T,
}


# Functions cannot be sent in lines of JSON: this one takes dot products [N, N]
WEIGHTS: Dict[str, Callable[[Tensor], Tensor]] = {
    "mean of dots": lambda dots: dots.mean(1),
}


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


def build(
    order: Dict[str, Any],
) -> Tuple[Module, CrossEntropyLoss, Tensor, Tensor]:
    """Make what each task starts from.

    Args:
        order: Says which problem, batch size and device, and whether results are to be
            checked: what is drawn at random is left out then.

    Returns:
        Network, loss, inputs, labels.
    """
    problem = PROBLEMS[order["problem"]]
    model = problem.model(order["device"])
    for module in model.modules():
        if order["check"] and isinstance(module, Dropout):
            module.eval()
    return (
        model,
        CrossEntropyLoss(),
        *problem.data(order["batch_size"], order["device"]),
    )


def evaluate(loss: Module, outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss, of each token if there are several.

    Args:
        loss: The mean cross-entropy.
        outputs: Logits ``[N, C]`` or ``[N, T, C]``.
        labels: Labels ``[N]`` or ``[N, T]``.

    Returns:
        The loss of logits ``[N, C]`` or ``[N * T, C]``, a scalar.
    """
    return loss(outputs.flatten(0, -2), labels.flatten())


def gradient(order: Dict[str, Any]) -> Task:
    """Make the task that the others are compared with: forward pass, backward pass.

    Args:
        order: Says which problem, batch size and device.

    Returns:
        The task.
    """
    model, loss, X, y = build(order)
    return Task(
        lambda: evaluate(loss, model(X), y).backward(),
        lambda: clear_fields(model),
        lambda: {name: p.grad for name, p in model.named_parameters()},
    )


def with_backpack(order: Dict[str, Any]) -> Task:
    """Make the task that computes a quantity with the installed BackPACK.

    Quantities that are functions are also applied, to one vector per parameter.

    Args:
        order: Says which problem, batch size, device, quantity and options.

    Returns:
        The task.

    Raises:
        Unavailable: If this version has no such extension, or not these options.
    """
    from backpack import backpack, extend, extensions

    compiled = order["package"] == "compiled"
    model, loss, X, y = build(order)
    model, loss = extend(model), extend(loss)

    if order["quantity"] == "extended":
        return Task(
            lambda: evaluate(loss, model(X), y).backward(),
            lambda: clear_fields(model),
            lambda: {name: p.grad for name, p in model.named_parameters()},
        )

    # an option may follow the name, to tell rows of the table apart
    extension_cls = getattr(extensions, order["quantity"].split("-")[0], None)
    if extension_cls is None:
        raise Unavailable
    options, context = dict(order["options"]), {}
    if "gradient" in options:  # of the context, not of the extension
        context["gradient"] = options.pop("gradient")
    if "weights" in options:
        options["weights"] = WEIGHTS[options["weights"]]
    wanted = {**context, **options}
    known = {*signature(extension_cls).parameters, *signature(backpack).parameters}
    if not wanted.keys() <= known:
        raise Unavailable
    extension = extension_cls(**options)
    replaces = getattr(extension, "replaces_gradient", False)
    field = "grad" if replaces else extension.savefield
    vectors = [torch.ones_like(p).unsqueeze(0) for p in model.parameters()]

    def forward(X: Tensor, y: Tensor) -> Tensor:
        return evaluate(loss, model(X), y)

    if compiled:
        from backpack import compile_step

        step = compile_step(forward, extension, **context)  # when it is called

    def run() -> None:
        if compiled:
            step(X, y)
        else:
            value = forward(X, y)
            with backpack(extension, **context):
                value.backward()
        for (name, param), vector in zip(model.named_parameters(), vectors):
            result = getattr(param, field, None)
            if result is None:
                raise RuntimeError(f"no result for {name}")
            if callable(result):
                result(vector)

    return Task(
        run,
        lambda: clear_fields(model, field),
        lambda: {name: getattr(p, field) for name, p in model.named_parameters()},
    )


def with_opacus(order: Dict[str, Any]) -> Task:
    """Make the task that reduces individual gradients from Opacus.

    Norms and clipped sums are computed without them where Opacus can, by ghost
    clipping: where no parameter has several names. Opacus wants a batch axis at each
    layer, so that positions are looked up for each sample.

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
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    quantity = order["quantity"]
    reduce = REDUCTIONS.get(quantity)
    if reduce is None and quantity != "ClippedGrad":
        raise Unavailable

    model, loss, X, y = build(order)
    params = dict(model.named_parameters())
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for module in model.modules():
        if isinstance(module, Embedding):
            module.register_forward_pre_hook(
                lambda _, inputs: inputs[0].expand(len(X), -1)
            )
    found: Dict[str, Tensor] = {}

    if quantity == "ClippedGrad":
        if len(names) != len(params):
            raise RuntimeError("ghost clipping takes no parameter with several names")
        # of the samples' own losses, which are N times the summands
        max_norm = order["options"]["max_norm"] * len(X)
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=max_norm, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=max_norm,
            expected_batch_size=len(X),
        )
        clipped = DPLossFastGradientClipping(wrapped, optimizer, loss)
        return Task(
            lambda: clipped(wrapped(X), y).backward(),
            lambda: clear_fields(model),
            lambda: {name: p.grad / len(X) for name, p in params.items()},
        )

    if quantity == "BatchL2Grad" and len(names) == len(params):
        wrapped = GradSampleModuleFastGradientClipping(
            model, loss_reduction="mean", max_grad_norm=1.0, use_ghost_clipping=True
        )

        def run() -> None:
            evaluate(loss, wrapped(X), y).backward()
            wrapped.get_norm_sample()

        return Task(
            run,
            wrapped.zero_grad,
            lambda: {k: (p._norm_sample / len(X)).square() for k, p in params.items()},
        )

    wrapped = GradSampleModule(model, loss_reduction="mean")

    def run() -> None:
        evaluate(loss, wrapped(X), y).backward()
        found.update({name: reduce(p.grad_sample) for name, p in params.items()})

    def clear() -> None:
        found.clear()
        for param in params.values():
            param.grad = param.grad_sample = None

    # Opacus has the gradients of the samples' own losses, without the mean's 1/N
    power = 1 if quantity == "BatchGrad" else 2
    return Task(
        run, clear, lambda: {name: g / len(X) ** power for name, g in found.items()}
    )


def with_torch_func(order: Dict[str, Any]) -> Task:
    """Make the task that reduces individual gradients, from ``vmap(grad)``.

    Beside a merely extended model, it is a second gradient without anything: how far
    that is from 1 tells how much there is to a few percent.

    Args:
        order: Says which problem, batch size, device and quantity.

    Returns:
        The task.

    Raises:
        Unavailable: If the quantity is another one.
    """
    if order["quantity"] == "extended":
        return gradient(order)
    reduce = REDUCTIONS.get(order["quantity"])
    if reduce is None:
        raise Unavailable

    model, loss, X, y = build(order)
    params = {name: p.detach() for name, p in model.named_parameters()}
    results: Dict[str, Tensor] = {}

    def sample_loss(params, x, label):
        output = torch.func.functional_call(model, params, (x.unsqueeze(0),))
        return evaluate(loss, output, label.unsqueeze(0)) / len(X)

    individual_gradients = torch.func.vmap(
        torch.func.grad(sample_loss), in_dims=(None, 0, 0), randomness="different"
    )

    def run() -> None:
        gradients = individual_gradients(params, X, y)
        results.update({name: reduce(g) for name, g in gradients.items()})

    return Task(run, results.clear, lambda: results)


class ClassesFirst(Module):
    """A network whose logits are ``[N, C, T]``, which curvlinops wants of tokens."""

    def __init__(self, model: Module):
        """Wrap a network.

        Args:
            model: One with logits ``[N, C]`` or ``[N, T, C]``.
        """
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits.

        Args:
            x: Inputs of the network.

        Returns:
            Logits ``[N, C]`` or ``[N, C, T]``.
        """
        return self.model(x).movedim(-1, 1)


def with_curvlinops(order: Dict[str, Any]) -> Task:
    """Make the task that computes Kronecker factors, or EKFAC, with curvlinops.

    Args:
        order: Says which problem, batch size, device, quantity and options.

    Returns:
        The task.

    Raises:
        Unavailable: If the quantity is another one.
        RuntimeError: If it knows too few of the network's layers for a comparison.
    """
    from curvlinops import EKFACLinearOperator, KFACLinearOperator

    options, corrected = order["options"], order["quantity"].startswith("EKFAC")
    approximation = options.get("weight_sharing", "expand" if corrected else None)
    if not (corrected or order["quantity"].startswith("KFAC")) or not approximation:
        raise Unavailable
    make = EKFACLinearOperator if corrected else KFACLinearOperator
    exact = options.get("fisher_type") == "exact"

    model, loss, X, y = build(order)
    layers = [layer for layer in model.modules() if isinstance(layer, (Linear, Conv2d))]
    params = [param for layer in layers for param in layer.parameters()]
    share = sum(p.numel() for p in params) / sum(p.numel() for p in model.parameters())
    if share < 0.5:
        raise RuntimeError(
            f"knows Linear and Conv2d, which have {share:.0%} of the parameters"
        )
    operators = []

    def run() -> None:
        operator = make(
            ClassesFirst(model),
            loss,
            params,
            [(X, y)],
            check_deterministic=False,
            fisher_type="type-2" if exact else "mc",
            mc_samples=options.get("mc_samples", 1),
            kfac_approx=approximation,
            num_per_example_loss_terms=y.numel() // len(X),
            num_data=len(X),
        )
        if corrected:
            operator.trace  # asks for eigenvalues, hence for everything
        else:
            operator.compute_kronecker_factors()
        operators.append(operator)

    def clear() -> None:
        operators.clear()
        clear_fields(model)

    return Task(run, clear, dict)


PACKAGES: Dict[str, Callable[[Dict[str, Any]], Task]] = {
    "backpack": with_backpack,
    "compiled": with_backpack,
    "opacus": with_opacus,
    "torch.func": with_torch_func,
    "curvlinops": with_curvlinops,
}


def expected(order: Dict[str, Any]) -> Dict[str, Tensor]:
    """Compute a quantity from gradients of one sample at a time, with autograd.

    Args:
        order: What to compute, on which problem.

    Returns:
        For each parameter, by its name, the quantity. Nothing if there is more to it
        than individual gradients.
    """
    quantity = order["quantity"]
    reduce = {**REDUCTIONS, "extended": lambda g: g.sum(0)}.get(quantity)
    weighted = quantity == "ClippedGrad" or quantity.startswith("WeightedGrad")
    if reduce is None and not weighted:
        return {}
    model, loss, X, y = build(order)
    outputs, params = model(X), dict(model.named_parameters())
    gradients = [
        torch.autograd.grad(
            evaluate(loss, outputs[[n]], y[[n]]) / len(X),
            tuple(params.values()),
            retain_graph=True,
        )
        for n in range(len(X))
    ]
    individual = list(map(torch.stack, zip(*gradients)))
    if weighted:
        rows = torch.cat([g.flatten(1) for g in individual], 1)
        if quantity == "ClippedGrad":
            # Opacus divides by a bit more than the norms of the samples' own gradients
            more = 1e-6 / len(X) if order["package"] == "opacus" else 0.0
            norms = rows.norm(dim=1) + more
            weights = (order["options"]["max_norm"] / norms).clamp(max=1)
        else:
            weights = WEIGHTS[order["options"]["weights"]](rows @ rows.T)
        individual = [weights.view(-1, *[1] * (g.dim() - 1)) * g for g in individual]
        reduce = lambda g: g.sum(0)  # noqa: E731
    return {name: reduce(g) for name, g in zip(params, individual)}


def check(order: Dict[str, Any]) -> None:
    """Compare what a package computes with autograd, in double precision.

    Args:
        order: What to compute, on which problem.

    Raises:
        RuntimeError: If a parameter's result is wrong.
    """
    order = {**order, "check": True, "batch_size": CHECKED_SAMPLES}
    torch.set_default_dtype(torch.float64)
    try:
        wanted = expected(order)
        if not wanted:
            return
        task = PACKAGES[order["package"]](order)
        task.run()
        found = task.results()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, want in wanted.items():
        tolerance = 1e-8 * want.abs().max().item()
        if name not in found:
            raise RuntimeError(f"no result for {name}")
        if found[name].shape != want.shape or not torch.allclose(
            found[name], want, rtol=1e-8, atol=tolerance
        ):
            raise RuntimeError(f"wrong result for {name}")


class Worker:
    """Holds the task that is being measured, and its gradient."""

    def prepare(self, order: Dict[str, Any]) -> Dict[str, Any]:
        """Build the task, check it, and run the gradient and it once.

        Args:
            order: What to build.

        Returns:
            The seconds of one pair.
        """
        torch.set_num_threads(order["threads"])
        self.device = order["device"]
        # with one thread, what other processes take of the machine need not count
        alone = self.device == "cpu" and order["threads"] == 1
        self.clock = process_time if alone else perf_counter
        check(order)
        order = {**order, "check": False}
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
        start = self.clock()
        task.run()
        self._synchronize()
        seconds = self.clock() - start
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
