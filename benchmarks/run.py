"""Measures time and memory of every quantity, and writes a table and a chart.

Called by ``make benchmark``. One process per package (``worker.py``) holds a task; the
rounds go around the packages, and each times a plain gradient and its own task, one
right after the other. A machine that slows down for a while slows down both, and all
packages alike. Reported is the median over the rounds of the ratio of the two.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from select import select
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from networks import PROBLEMS, Problem
from worker import LONG

HERE = Path(__file__).resolve().parent

# Where the C library ends up by itself as soon as a program has freed 32 MiB at once.
# Before, it gives memory back after some of the passes and has it mapped again, which
# makes a few megabytes differ by a quarter of a gradient, by chance.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
}

# Quantities in the order of the report, with their options.
QUANTITIES: Dict[str, Dict[str, Any]] = {
    "BatchGrad": {},
    "BatchL2Grad": {},
    "SumGradSquared": {},
    "Variance": {},
    "BatchDotGrad": {},
    "DiagGGNMC": {"mc_samples": 1},
    "DiagGGNExact": {},
    "BatchDiagGGNMC": {"mc_samples": 1},
    "BatchDiagGGNExact": {},
    "SqrtGGNMC": {"mc_samples": 1},
    "SqrtGGNExact": {},
    "KFAC": {"mc_samples": 1},
    "KFLR": {},
    "KFRA": {},
    "DiagHessian": {},
    "BatchDiagHessian": {},
    "HMP": {},
    "GGNMP": {},
    "PCHMP": {},
}

# Not measured on these networks, and why.
EXCLUDED: Dict[str, Tuple[Tuple[str, ...], str]] = {
    "KFRA": (
        ("3c3d", "allcnnc"),
        "KFRA averages a dense matrix over all features of a layer. The first layer of "
        "3C3D has 50,176, that of All-CNN-C 98,304.",
    ),
}


class Contender(NamedTuple):
    """A package that takes part.

    Args:
        title: What the report calls it.
        package: What the worker calls it.
        python: The interpreter of its environment.
        color: Its bars in the chart.
    """

    title: str
    package: str
    python: str
    color: str


class Result(NamedTuple):
    """What was found for one quantity, package and network.

    Args:
        time: Time relative to the gradient.
        memory: Peak memory relative to the gradient.
        gradient_time: Seconds of the gradient.
        gradient_memory: Peak bytes of the gradient.
        rounds: Number of pairs that were timed.
        failure: Why there are no numbers; ``None`` if there are.
    """

    time: float = 0.0
    memory: float = 0.0
    gradient_time: float = 0.0
    gradient_memory: float = 0.0
    rounds: int = 0
    failure: Optional[str] = None


class Connection:
    """A worker process, started when it is needed and again after it was lost."""

    def __init__(self, contender: Contender, args: Namespace):
        """Remember whom to start.

        Args:
            contender: Whose worker this is.
            args: The command line.
        """
        self.contender = contender
        self.patience = args.patience
        self.environment = {**os.environ, **({} if args.malloc_defaults else MALLOC)}
        self.process: Optional[subprocess.Popen] = None
        self.log = tempfile.TemporaryFile(mode="w+")

    def ask(self, **order: Any) -> Dict[str, Any]:
        """Send an order and wait for the answer.

        Args:
            **order: The order.

        Returns:
            The answer; its key ``"error"`` says that and why there is none.
        """
        if self.process is None:
            self.process = subprocess.Popen(
                [self.contender.python, "-W", "ignore", str(HERE / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                env=self.environment,
            )
        try:
            print(json.dumps(order), file=self.process.stdin, flush=True)
            if not select([self.process.stdout], [], [], self.patience)[0]:
                self.stop()
                return {"error": f"took more than {self.patience:.0f} s"}
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.stop()
            return {"error": f"its process ended: {self._last_words()}"}
        return json.loads(line)

    def _last_words(self) -> str:
        """Read the last line that the process has written.

        Returns:
            The line.
        """
        self.log.seek(0)
        lines = self.log.read().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "silently")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def measure(
    problem_name: str, quantity: str, connections: List[Connection], args: Namespace
) -> List[Result]:
    """Measure one quantity on one network with all packages.

    Args:
        problem_name: Key of the network.
        quantity: Name of the quantity.
        connections: A worker per package.
        args: The command line.

    Returns:
        A result per package.
    """
    if quantity in EXCLUDED and problem_name in EXCLUDED[quantity][0]:
        return [Result(failure="left out") for _ in connections]

    answers = [
        connection.ask(
            do="prepare",
            package=connection.contender.package,
            problem=problem_name,
            batch_size=args.batch_size or PROBLEMS[problem_name].batch_size,
            quantity=quantity,
            options=QUANTITIES[quantity],
            device=args.device,
            threads=args.threads,
        )
        for connection in connections
    ]
    pairs: List[List[Tuple[float, float]]] = [[] for _ in connections]

    def due(i: int) -> bool:
        """Whether another pair of this package is wanted."""
        if "seconds" not in answers[i] or len(pairs[i]) >= args.rounds:
            return False
        spent = sum(sum(pair) for pair in pairs[i])
        return len(pairs[i]) < args.min_rounds or spent < args.seconds

    while any(due(i) for i in range(len(connections))):
        for i, connection in enumerate(connections):
            if due(i):
                answer = connection.ask(do="pair")
                if "pair" in answer:
                    pairs[i].append(answer["pair"])
                else:
                    answers[i] = answer

    return [
        conclude(connection, answer, timed)
        for connection, answer, timed in zip(connections, answers, pairs)
    ]


def conclude(
    connection: Connection, answer: Dict[str, Any], pairs: List[Tuple[float, float]]
) -> Result:
    """Measure the memory, and sum up.

    Args:
        connection: The worker.
        answer: Its last answer, before the timing or about its failure.
        pairs: What was timed.

    Returns:
        The result.
    """
    if "seconds" in answer:
        answer = connection.ask(do="memory")
    if "memory" not in answer:
        return Result(failure="missing" if "missing" in answer else answer["error"])
    gradient_memory, memory = answer["memory"]
    return Result(
        time=median(task / gradient for gradient, task in pairs),
        memory=memory / gradient_memory,
        gradient_time=median(gradient for gradient, _ in pairs),
        gradient_memory=gradient_memory,
        rounds=len(pairs),
    )


Results = Dict[str, Dict[str, List[Result]]]


def gradient_cost(rows: Dict[str, List[Result]]) -> str:
    """Describe what a plain gradient costs.

    Args:
        rows: The results of one network.

    Returns:
        Time and memory, in words.
    """
    found = [result for row in rows.values() for result in row if not result.failure]
    if not found:
        return "not measured"
    seconds = median(result.gradient_time for result in found)
    memory = median(result.gradient_memory for result in found)
    return f"{1e3 * seconds:.1f} ms, {memory / 2**20:.1f} MiB"


def table(rows: Dict[str, List[Result]], contenders: List[Contender]) -> List[str]:
    """Write the table of one network.

    Args:
        rows: Results of each quantity, one per package.
        contenders: The packages.

    Returns:
        Lines of Markdown; failures are explained below the table.
    """
    titles = [contender.title for contender in contenders]
    lines = ["| quantity | " + " | ".join(f"{t}: time | memory" for t in titles) + " |"]
    lines.append("|---|" + "---:|---:|" * len(titles))
    notes: Dict[str, List[str]] = {}
    for quantity, row in rows.items():
        cells = [f"`{quantity}`"]
        for contender, result in zip(contenders, row):
            if result.failure in ("missing", "left out"):
                cells += ["", ""]
            elif result.failure:
                reason = f"{contender.title} ({result.failure})"
                notes.setdefault(reason, []).append(f"`{quantity}`")
                cells += ["–", "–"]
            else:
                cells += [f"{result.time:.2f}", f"{result.memory:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    for reason, quantities in notes.items():
        lines += ["", f"No number from {reason}: {', '.join(quantities)}."]
    return lines


REPORT = """\
# Benchmark

What one quantity costs on top of a plain gradient. Each number is a ratio: 1 means as
fast as, or as little memory as, a forward and a backward pass without any quantity.

{tables}

![Time relative to the gradient]({chart})

## How it is measured

- `make benchmark` writes this page; `make benchmark PEERS=1` adds other packages, in
  an environment of their own. {setting}
- **Networks** (`networks.py`): random inputs, mean cross-entropy, single precision.
- **Time**: in each round, each package times a gradient and then its quantity, both
  with forward and backward pass; the rounds go around the packages. The number is the
  median over rounds of the ratio: up to {rounds} rounds, fewer where a quantity takes
  long, never fewer than {min_rounds}. What takes less than {long:g} seconds runs once
  before a round, so that what other processes did in between does not count.
- **Memory thresholds** of the C library, for all packages: {malloc}.
- **Memory**: the peak of what exists beyond parameters and data during the pass, from
  each allocation and release (PyTorch's profiler on a CPU, its own counter on a GPU).
- `HMP`, `GGNMP` and `PCHMP` include a product with one vector per parameter. Quantities
  that sample draw once.
- `torch.func` is `vmap(grad)` over samples, and a reduction of its result; the gradient
  of the batch is not computed. Opacus computes individual gradients with hooks, and
  their norms with ghost clipping.
{excluded}
"""


def processor() -> str:
    """Name the processor, on which the order of packages may depend.

    Returns:
        Its name, as far as the system tells.
    """
    description = Path("/proc/cpuinfo")
    lines = description.read_text().splitlines() if description.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return next(iter(names), platform.processor() or platform.machine())


def report(
    results: Results, contenders: List[Contender], chart: str, args: Namespace
) -> str:
    """Write the page of results.

    Args:
        results: All results.
        contenders: The packages.
        chart: Path of the chart, relative to the page.
        args: The command line.

    Returns:
        Markdown.
    """
    tables = []
    for name, rows in results.items():
        problem = PROBLEMS[name]
        tables += [
            f"## {title_of(problem, args)}",
            "",
            f"A gradient takes {gradient_cost(rows)}.",
            "",
            *table(rows, contenders),
            "",
        ]
    machine = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{args.threads} thread(s) of {processor()}"
    )
    excluded = [f"- Left out: {reason}" for _, reason in EXCLUDED.values()]
    return REPORT.format(
        tables="\n".join(tables).rstrip(),
        chart=chart,
        setting=f"Here: {machine}, PyTorch {torch.__version__}.",
        rounds=args.rounds,
        min_rounds=args.min_rounds,
        long=LONG,
        malloc=(
            "its defaults, which it changes as a program runs"
            if args.malloc_defaults
            else "fixed at what they grow to by themselves, 32 and 64 MiB"
        ),
        excluded="\n".join(excluded),
    )


def title_of(problem: Problem, args: Namespace) -> str:
    """Name a network with its batch size.

    Args:
        problem: The network.
        args: The command line.

    Returns:
        The title.
    """
    return f"{problem.title}, N = {args.batch_size or problem.batch_size}"


def draw(
    results: Results, contenders: List[Contender], path: Path, args: Namespace
) -> None:
    """Draw the times as bars, one panel per network.

    Args:
        results: All results.
        contenders: The packages.
        path: Where the picture goes.
        args: The command line.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    quantities = [q for q in QUANTITIES if any(q in rows for rows in results.values())]
    fig, axes = plt.subplots(
        ncols=len(results),
        figsize=(4.6 * len(results), 0.9 + 0.42 * len(quantities)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    height = 0.8 / len(contenders)
    for ax, (name, rows) in zip(axes[0], results.items()):
        for j, contender in enumerate(contenders):
            found = [
                (quantities.index(quantity) + (j + 0.5) * height - 0.4, row[j].time)
                for quantity, row in rows.items()
                if not row[j].failure
            ]
            if found:
                positions, times = zip(*found)
                ax.barh(
                    positions,
                    [time - 1 for time in times],
                    height,
                    left=1,
                    color=contender.color,
                    label=contender.title,
                )
                for position, time in found:
                    ax.annotate(
                        f"{time:.1f}" if time < 99.5 else f"{time:.0f}",
                        (max(time, 1), position),
                        xytext=(2, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=6,
                    )
        ax.set_xscale("log")
        ax.margins(x=0.12, y=0.01)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(axis="x", alpha=0.3)
        ax.set_axisbelow(True)
        ax.set_title(f"{title_of(PROBLEMS[name], args)}", fontsize=10)
        ax.set_xlabel("time relative to a plain gradient")
        ax.set_yticks(range(len(quantities)), quantities)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].invert_yaxis()
    if len(contenders) > 1:
        axes[0, -1].legend(fontsize=8, loc="lower right")
    fig.savefig(path, dpi=150)


def parse_arguments() -> Namespace:
    """Read the command line.

    Returns:
        The arguments.
    """
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--networks", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    add("--quantities", nargs="+", choices=list(QUANTITIES), default=list(QUANTITIES))
    add("--peers", help="interpreter of the environment with other packages")
    add("--batch-size", type=int, help="instead of each network's own")
    add("--rounds", type=int, default=25, help="pairs per quantity, at most")
    add("--min-rounds", type=int, default=3, help="pairs per quantity, at least")
    add("--seconds", type=float, default=10, help="per quantity and package")
    add("--patience", type=float, default=300, help="seconds to wait for one run")
    add("--threads", type=int, default=1)
    add(
        "--malloc-defaults",
        action="store_true",
        help="let the C library give memory back to the system as it does by default",
    )
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--output", type=Path, default=HERE, help="folder for the page and the chart")
    return parser.parse_args()


def main() -> None:
    """Measure everything, print the tables, write the page and the chart."""
    args = parse_arguments()
    contenders = [Contender("BackPACK 1.8", "backpack", sys.executable, "#1f6fb2")]
    if args.peers:
        contenders += [
            Contender("BackPACK 1.7.1", "backpack", args.peers, "#b9bec5"),
            Contender("Opacus", "opacus", args.peers, "#e0a030"),
        ]
    contenders.append(Contender("torch.func", "torch.func", sys.executable, "#6aa56a"))
    connections = [Connection(contender, args) for contender in contenders]

    results: Results = {}
    missing = set()
    try:
        for name in args.networks:
            print(f"\n{title_of(PROBLEMS[name], args)}", flush=True)
            results[name] = {}
            for quantity in args.quantities:
                row = measure(name, quantity, connections, args)
                results[name][quantity] = row
                cells = [
                    f"{contender.title} {result.failure or f'{result.time:.2f}'}"
                    for contender, result in zip(contenders, row)
                    if result.failure != "missing"
                ]
                print(f"  {quantity:<18} {', '.join(cells)}", flush=True)
                if row[0].failure == "missing":
                    missing.add(quantity)
    finally:
        for connection in connections:
            connection.stop()

    args.output.mkdir(parents=True, exist_ok=True)
    chart = "results.png"
    draw(results, contenders, args.output / chart, args)
    page = report(results, contenders, chart, args)
    (args.output / "README.md").write_text(page)
    print(f"\n{page}\nWritten to {args.output}.")
    if missing:
        sys.exit(f"Missing from this BackPACK: {', '.join(sorted(missing))}.")


if __name__ == "__main__":
    main()
