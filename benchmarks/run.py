"""Measures time and memory of every quantity, and writes tables and charts.

Called by ``make benchmark``. One process per package (``worker.py``) holds a task; the
rounds go around the packages, and each times a plain gradient and its own task, one
right after the other. A machine that slows down for a while slows down both, and all
packages alike. Reported is the median over the rounds of the ratio of the two.

The page ``README.md`` has a section for each network. With ``--record``, those of the
networks that were measured are replaced; all else there is written by hand, and stays.
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
from textwrap import shorten
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from networks import PROBLEMS, Problem

HERE = Path(__file__).resolve().parent

# Where the C library ends up by itself as soon as a program has freed 32 MiB at once.
# Before, it gives memory back after some of the passes and has it mapped again, which
# makes a few megabytes differ by a quarter of a gradient, by chance.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
}

# Quantities in the order of the report, with their options. The first is none: a model
# that is extended, where no quantity is asked for. What follows a hyphen tells apart
# rows with different options.
QUANTITIES: Dict[str, Dict[str, Any]] = {
    "extended": {},
    "BatchGrad": {},
    "BatchL2Grad": {},
    "SumGradSquared": {},
    "Variance": {},
    "BatchDotGrad": {},
    "BatchFactors": {},
    "BatchProjectGrad": {},
    "ClippedGrad": {"max_norm": 0.01, "replace_grad": True},
    "WeightedGrad-dots": {
        "weights": "mean of dots",
        "of": "dots",
        "replace_grad": True,
    },
    "DiagGGNMC": {"mc_samples": 1},
    "DiagGGNExact": {},
    "BatchDiagGGNMC": {"mc_samples": 1},
    "BatchDiagGGNExact": {},
    "SqrtGGNMC": {"mc_samples": 1},
    "SqrtGGNExact": {},
    "KFAC": {"mc_samples": 1},
    "KFAC-expand": {"mc_samples": 1, "weight_sharing": "expand"},
    "KFAC-reduce": {"mc_samples": 1, "weight_sharing": "reduce"},
    "KFAC-expand-only": {
        "mc_samples": 1,
        "weight_sharing": "expand",
        "gradient": False,
    },
    "KFLR": {},
    "KFRA": {},
    "EKFAC": {},
    "EKFAC-only": {"gradient": False},
    "EKFAC-exact": {"fisher_type": "exact"},
    "EKFAC-exact-only": {"fisher_type": "exact", "gradient": False},
    "DiagHessian": {},
    "BatchDiagHessian": {},
    "HMP": {},
    "GGNMP": {},
    "PCHMP": {},
}

# Quantities that are left out, and for which networks. The reasons are in the page,
# under "How it is measured".
SEQUENCES = ("transformer", "transformer256")
TRANSFORMERS = ("gpt2", "llama", "vit", *SEQUENCES)
EXCLUDED: Tuple[Tuple[Tuple[str, ...], Tuple[str, ...]], ...] = (
    (("KFRA",), ("3c3d", "allcnnc")),
    (("KFAC-reduce",), ("mlp",)),
    (("KFAC",), TRANSFORMERS),
    (("EKFAC-exact", "EKFAC-exact-only"), ("gpt2", "llama", "vit", "resnet18")),
    (
        ("DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR"),
        (*TRANSFORMERS, "resnet18"),
    ),
    (
        ("KFRA", "DiagHessian", "BatchDiagHessian", "HMP", "GGNMP", "PCHMP"),
        (*TRANSFORMERS, "resnet18"),
    ),
)

# Bars in the charts, by what the report calls a package
COLORS = {
    "BackPACK 1.8": "#1f6fb2",
    "compiled": "#123a5e",
    "BackPACK 1.7.1": "#b9bec5",
    "Opacus": "#e0a030",
    "curvlinops": "#a06fb5",
    "torch.func": "#6aa56a",
}


class Contender(NamedTuple):
    """A package that takes part.

    Args:
        title: What the report calls it.
        package: What the worker calls it.
        python: The interpreter of its environment.
    """

    title: str
    package: str
    python: str


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
        if contender.python == sys.executable:
            # what is measured is the code next to this file, whatever is installed
            self.environment["PYTHONPATH"] = str(HERE.parent)
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

    # whether there is anything is a matter of a few percent
    times = 4 if quantity == "extended" else 1

    def due(i: int) -> bool:
        """Whether another pair of this package is wanted."""
        if "seconds" not in answers[i] or len(pairs[i]) >= times * args.rounds:
            return False
        spent = sum(sum(pair) for pair in pairs[i])
        return len(pairs[i]) < args.min_rounds or spent < times * args.seconds

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
        return Result(failure=reason(answer))
    gradient_memory, memory = answer["memory"]
    return Result(
        time=median(task / gradient for gradient, task in pairs),
        memory=memory / gradient_memory,
        gradient_time=median(gradient for gradient, _ in pairs),
        gradient_memory=gradient_memory,
        rounds=len(pairs),
    )


def reason(answer: Dict[str, Any]) -> str:
    """Say briefly why there is no number.

    Args:
        answer: A worker's answer about a failure.

    Returns:
        ``"missing"`` if the package does not offer the quantity; else the beginning of
        the message, without the quantity's name, so that those of several agree.
    """
    if "missing" in answer:
        return "missing"
    text = answer["error"]
    for quantity in QUANTITIES:
        text = text.removeprefix(f"{quantity}: ")
    return shorten(text, 160, placeholder=" ...")


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
        label = "extended, no extension" if quantity == "extended" else f"`{quantity}`"
        cells = [label]
        for contender, result in zip(contenders, row):
            if result.failure == "missing":
                cells += ["", ""]
            elif result.failure:
                note = f"{contender.title} ({result.failure})"
                notes.setdefault(note, []).append(label)
                cells += ["–", "–"]
            else:
                cells += [f"{result.time:.2f}", f"{result.memory:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    for note, quantities in notes.items():
        lines += ["", f"No number from {note}: {', '.join(quantities)}."]
    return lines


def processor() -> str:
    """Name the processor, on which the order of packages may depend.

    Returns:
        Its name, as far as the system tells.
    """
    description = Path("/proc/cpuinfo")
    lines = description.read_text().splitlines() if description.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return next(iter(names), platform.processor() or platform.machine())


def section(
    name: str,
    rows: Dict[str, List[Result]],
    contenders: List[Contender],
    args: Namespace,
) -> str:
    """Write the section of one network.

    Args:
        name: Key of the network.
        rows: Its results.
        contenders: The packages.
        args: The command line.

    Returns:
        Markdown, from the heading to the chart.
    """
    machine = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{args.threads} thread(s) of {processor()}"
    )
    lines = [
        f"## {title_of(PROBLEMS[name], args)}",
        "",
        f"A gradient takes {gradient_cost(rows)}.",
        "",
        *table(rows, contenders),
        "",
        f"Measured on {machine}, with PyTorch {torch.__version__}, in up to "
        f"{args.rounds} rounds.",
        "",
        f"![Time relative to the gradient](results-{name}.png)",
        "",
    ]
    return "\n".join(lines)


def insert(page: str, new: str) -> str:
    """Put a network's section into the page.

    Args:
        page: The page, in Markdown.
        new: The section. It takes the place of the one with the same heading, up to the
            chart: what is written below stays. If there is none, it goes before the
            first that is about no network.

    Returns:
        The page with the section.
    """
    head, *sections = page.split("\n## ")
    new = new.removeprefix("## ")
    headings = [text.split("\n")[0] for text in sections]
    heading = new.split("\n")[0]
    if heading in headings:
        place = headings.index(heading)
        chart = new.splitlines(keepends=True)[-1]
        sections[place] = new + sections[place].partition(chart)[2]
    else:
        titles = tuple(problem.title for problem in PROBLEMS.values())
        networks = sum(heading.startswith(titles) for heading in headings)
        sections.insert(networks, new)
    return "\n## ".join((head, *sections))


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
    title: str, rows: Dict[str, List[Optional[float]]], packages: List[str]
) -> Figure:
    """Draw the times of one network as bars.

    Args:
        title: The network.
        rows: Time of each quantity, relative to a gradient, for each package; ``None``
            where there is no number.
        packages: What the report calls them.

    Returns:
        The picture.
    """
    fig, ax = plt.subplots(figsize=(6, 1 + 0.42 * len(rows)), layout="constrained")
    height = 0.8 / len(packages)
    for j, package in enumerate(packages):
        found = [
            (i + (j + 0.5) * height - 0.4, row[j])
            for i, row in enumerate(rows.values())
            if row[j] is not None
        ]
        if found:
            positions, times = zip(*found)
            ax.barh(
                positions,
                [time - 1 for time in times],
                height,
                left=1,
                color=COLORS[package],
                label=package,
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
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("time relative to a plain gradient")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.spines[["top", "right"]].set_visible(False)
    ax.invert_yaxis()
    ax.legend(fontsize=7)
    return fig


def parse_arguments() -> Namespace:
    """Read the command line.

    Returns:
        The arguments.
    """
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--networks", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    add("--quantities", nargs="+", choices=list(QUANTITIES), default=list(QUANTITIES))
    add("--compiled", action="store_true", help="add steps by compile_step(...)")
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
    add("--record", action="store_true", help="put tables and charts into README.md")
    return parser.parse_args()


def measure_network(
    name: str, connections: List[Connection], args: Namespace
) -> Dict[str, List[Result]]:
    """Measure all quantities on one network, and print the times.

    Args:
        name: Key of the network.
        connections: A worker per package.
        args: The command line.

    Returns:
        The results of each quantity, one per package.
    """
    print(f"\n{title_of(PROBLEMS[name], args)}", flush=True)
    rows = {}
    for quantity in args.quantities:
        if any(quantity in left_out and name in nets for left_out, nets in EXCLUDED):
            continue
        rows[quantity] = measure(name, quantity, connections, args)
        cells = [
            f"{connection.contender.title} {result.failure or f'{result.time:.2f}'}"
            for connection, result in zip(connections, rows[quantity])
            if result.failure != "missing"
        ]
        print(f"  {quantity:<18} {', '.join(cells)}", flush=True)
    return rows


def main() -> None:
    """Measure, print the tables, and record them if that is asked for."""
    args = parse_arguments()
    contenders = [Contender("BackPACK 1.8", "backpack", sys.executable)]
    if args.compiled:
        contenders.append(Contender("compiled", "compiled", sys.executable))
    if args.peers:
        contenders += [
            Contender("BackPACK 1.7.1", "backpack", args.peers),
            Contender("Opacus", "opacus", args.peers),
            Contender("curvlinops", "curvlinops", args.peers),
        ]
    contenders.append(Contender("torch.func", "torch.func", sys.executable))
    connections = [Connection(contender, args) for contender in contenders]

    missing = set()
    try:
        for name in args.networks:
            rows = measure_network(name, connections, args)
            missing |= {q for q, row in rows.items() if row[0].failure == "missing"}
            text = section(name, rows, contenders, args)
            print(f"\n{text}", flush=True)
            if args.record:
                page = HERE / "README.md"
                page.write_text(insert(page.read_text(), text))
                times = {
                    quantity: [None if r.failure else r.time for r in row]
                    for quantity, row in rows.items()
                }
                packages = [contender.title for contender in contenders]
                figure = draw(title_of(PROBLEMS[name], args), times, packages)
                figure.savefig(HERE / f"results-{name}.png", dpi=120)
    finally:
        for connection in connections:
            connection.stop()
    if missing:
        sys.exit(f"Missing from this BackPACK: {', '.join(sorted(missing))}.")


if __name__ == "__main__":
    main()
