"""Every quantity that BackPACK computes, on real images, next to plain autograd.

A small convolutional network sees a thousand MNIST digits. For each quantity, one
backward pass computes it. The table that is printed says

- where it is found (the field of each parameter) and which shape it has there,
- how long the pass takes, relative to a pass for the gradient alone,
- how far it is from the same quantity computed with plain automatic differentiation,
  one sample at a time, in double precision (see the functions ``autograd_*``).

Then the network is trained, and a picture shows what individual gradients are good for:
the images that still pull hardest at it, and those that no longer pull at all.

Run ``make demo``, or ``python examples/demo.py``.
"""

import sys
from argparse import ArgumentParser
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, einsum
from torch.autograd import grad
from torch.autograd.functional import hessian, jacobian
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
    Tanh,
)
from torch.nn.functional import unfold

from backpack import backpack, extend, extensions
from backpack.utils.examples import load_one_batch_mnist

NUM_TIMED = 128  # samples in the passes that are timed
NUM_CHECKED = 3  # samples in the passes that are compared with autograd
NUM_DRAWS = 1000  # Monte-Carlo samples, where an expectation is compared
SHOWN = "3.weight"  # the parameter whose shapes the table shows


def make_model() -> Sequential:
    """Make the network.

    Returns:
        A network for images ``[N, 1, 28, 28]`` with ten outputs.
    """
    return Sequential(
        *(Conv2d(1, 8, 5, stride=2), ReLU(), MaxPool2d(2)),
        *(Conv2d(8, 16, 3), ReLU(), MaxPool2d(2)),
        *(Flatten(), Linear(64, 20), Tanh(), Linear(20, 10)),
    )


def train(model: Module, X: Tensor, y: Tensor, epochs: int = 10) -> float:
    """Train the network with Adam.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.
        epochs: Number of passes over the images.

    Returns:
        Share of the images that it classifies correctly.
    """
    loss_function = CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(X)).split(100):
            optimizer.zero_grad()
            loss_function(model(X[batch]), y[batch]).backward()
            optimizer.step()
    return (model(X).argmax(dim=1) == y).double().mean().item()


# What follows up to `class Row` does without BackPACK, one sample at a time. Each
# function returns one value per parameter, by name.

Values = Dict[str, Any]


class Problem:
    """A network, a mean loss and a few samples, with what autograd says about them."""

    def __init__(self, model: Sequential, X: Tensor, y: Tensor):
        """Compute individual gradients, and the Jacobians of the network's outputs.

        Args:
            model: The network.
            X: Images ``[N, 1, 28, 28]``.
            y: Labels ``[N]``.
        """
        self.model, self.X, self.y = model, X, y
        self.params = dict(model.named_parameters())
        self.N = len(X)

        gradients, jacobians, self.loss_hessians = [], [], []
        for n in range(self.N):
            output = model(self.X[[n]])
            self.loss_hessians.append(
                hessian(lambda f, n=n: self.loss(f, n), output.detach()).squeeze()
            )
            rows = [grad(f, self.params.values(), retain_graph=True) for f in output[0]]
            jacobians.append([torch.stack(row) for row in zip(*rows)])
            gradients.append(grad(self.loss(output, n), self.params.values()))

        # per parameter: individual gradients [N, *p], Jacobians [N, C, *p]
        self.gradients = self.named([torch.stack(g) for g in zip(*gradients)])
        self.jacobians = self.named([torch.stack(j) for j in zip(*jacobians)])
        generator = torch.Generator().manual_seed(0)
        self.vectors = {
            name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
            for name, p in self.params.items()
        }

    def loss(self, output: Tensor, n: int) -> Tensor:
        """Evaluate the share of one sample in the mean loss.

        Args:
            output: What the network says about sample n, ``[1, C]``.
            n: The sample.

        Returns:
            A scalar.
        """
        return CrossEntropyLoss()(output, self.y[[n]]) / self.N

    def named(self, values: Any) -> Values:
        """Label values with the names of the parameters.

        Args:
            values: One per parameter.

        Returns:
            The values by name.
        """
        return dict(zip(self.params, values))

    def each(self, rule: Callable[[str], Any]) -> Values:
        """Evaluate a rule for each parameter.

        Args:
            rule: Takes the parameter's name.

        Returns:
            The results by name.
        """
        return {name: rule(name) for name in self.params}


def autograd_batch_grad(problem: Problem) -> Values:
    """Individual gradients ``[N, *p]``."""
    return problem.gradients


def autograd_batch_l2(problem: Problem) -> Values:
    """Squared norms of the individual gradients, ``[N]``."""
    return {k: g.flatten(1).square().sum(1) for k, g in problem.gradients.items()}


def autograd_sum_grad_squared(problem: Problem) -> Values:
    """Second moment of the individual gradients, ``[*p]``."""
    return {k: g.square().sum(0) for k, g in problem.gradients.items()}


def autograd_variance(problem: Problem) -> Values:
    """Variance of the individual gradients, ``[*p]``."""
    return {k: g.var(0, unbiased=False) for k, g in problem.gradients.items()}


def autograd_batch_dot(problem: Problem) -> Values:
    """Inner products of the individual gradients, ``[N, N]``."""
    return {k: g.flatten(1) @ g.flatten(1).T for k, g in problem.gradients.items()}


def autograd_batch_diag_ggn(problem: Problem) -> Values:
    """Diagonal of each sample's GGN, ``[N, *p]``."""
    H = torch.stack(problem.loss_hessians)
    return {
        name: einsum("nc...,ncd,nd...->n...", J, H, J)
        for name, J in problem.jacobians.items()
    }


def autograd_diag_ggn(problem: Problem) -> Values:
    """Diagonal of the GGN, ``[*p]``."""
    return {name: d.sum(0) for name, d in autograd_batch_diag_ggn(problem).items()}


def autograd_ggn(problem: Problem) -> Values:
    """Block of the GGN for each parameter, flattened to ``[P, P]``."""
    return {
        name: sum(
            J_n.flatten(1).T @ H_n @ J_n.flatten(1)
            for J_n, H_n in zip(J, problem.loss_hessians)
        )
        for name, J in problem.jacobians.items()
    }


def autograd_batch_diag_hessian(problem: Problem) -> Values:
    """Diagonal of each sample's Hessian, ``[N, *p]``."""
    diagonals = {name: [] for name in problem.params}
    for n in range(problem.N):
        loss = problem.loss(problem.model(problem.X[[n]]), n)
        gradients = grad(loss, problem.params.values(), create_graph=True)
        for (name, param), gradient in zip(problem.params.items(), gradients):
            entries = [
                grad(g, param, retain_graph=True)[0].flatten()[i]
                for i, g in enumerate(gradient.flatten())
            ]
            diagonals[name].append(torch.stack(entries).reshape(param.shape))
    return {name: torch.stack(diagonal) for name, diagonal in diagonals.items()}


def autograd_diag_hessian(problem: Problem) -> Values:
    """Diagonal of the Hessian, ``[*p]``."""
    return {name: d.sum(0) for name, d in autograd_batch_diag_hessian(problem).items()}


def autograd_hessian_product(problem: Problem) -> Values:
    """Product of each parameter's Hessian block with a vector, ``[*p]``."""
    losses = [problem.loss(problem.model(x), n) for n, x in each_sample(problem.X)]
    gradients = grad(sum(losses), problem.params.values(), create_graph=True)
    return {
        name: grad((g * problem.vectors[name]).sum(), param, retain_graph=True)[0]
        for (name, param), g in zip(problem.params.items(), gradients)
    }


def autograd_ggn_product(problem: Problem) -> Values:
    """Product of each parameter's GGN block with a vector, ``[*p]``."""
    vectors = problem.vectors
    return {
        name: (G @ vectors[name].flatten()).reshape(vectors[name].shape)
        for name, G in autograd_ggn(problem).items()
    }


def autograd_pch_product(problem: Problem) -> Values:
    """Product with the Hessian whose negative residuals were removed, ``[*p]``.

    In this network only Tanh has a residual: its second derivative times the gradient
    at its output. The GGN plus the pulled-back residuals is the Hessian. The positive
    curvature Hessian leaves the negative ones out.
    """
    position = [type(module) for module in problem.model].index(Tanh)
    before, after = problem.model[:position], problem.model[position + 1 :]
    products = autograd_ggn_product(problem)

    for n, x in each_sample(problem.X):
        z = before(x)
        activation = torch.tanh(z).detach().requires_grad_()
        delta = grad(problem.loss(after(activation), n), activation)[0]
        residual = (delta * -2 * activation * (1 - activation**2)).detach()
        for z_i, residual_i in zip(z[0], residual[0].clamp(min=0)):
            rows = grad(
                z_i, problem.params.values(), retain_graph=True, allow_unused=True
            )
            for name, row in problem.named(rows).items():
                if row is not None:
                    scale = residual_i * (row * problem.vectors[name]).sum()
                    products[name] = products[name] + scale * row
    return products


def autograd_input_factors(problem: Problem) -> Values:
    """Kronecker factor of each layer's (unfolded) inputs, by the layer's name."""
    factors, x = {}, problem.X
    for name, module in problem.model.named_children():
        if isinstance(module, Conv2d):
            a = unfold(x, module.kernel_size, stride=module.stride)
            factors[name] = einsum("nit,njt->ij", a, a) / problem.N
        elif isinstance(module, Linear):
            factors[name] = einsum("ni,nj->ij", x, x) / problem.N
        x = module(x)
    return factors


def autograd_kflr(problem: Problem) -> Values:
    """Kronecker factors of each parameter, with the exact loss Hessian.

    The second factor of a layer is the GGN block of its bias.
    """
    ggn, A = autograd_ggn(problem), autograd_input_factors(problem)

    def factors(name: str) -> List[Tensor]:
        layer, kind = name.split(".")
        B = ggn[f"{layer}.bias"]
        return [B] if kind == "bias" else [B, A[layer]]

    return problem.each(factors)


def autograd_kfra(problem: Problem) -> Values:
    """Kronecker factors of each parameter, with the batch-averaged recursion."""
    inputs = [problem.X]
    for module in problem.model:
        inputs.append(module(inputs[-1]).detach())
    A = autograd_input_factors(problem)

    factors = {}
    G = sum(problem.loss_hessians)
    for index in reversed(range(len(problem.model))):
        module = problem.model[index]
        if isinstance(module, (Conv2d, Linear)):
            # a convolution's bias acts at all positions: sum over both position axes
            channels = module.bias.numel()
            B = G.reshape(channels, -1, channels, G.shape[0] // channels).sum((1, 3))
            factors[f"{index}.weight"] = [B, A[str(index)]]
            factors[f"{index}.bias"] = [B]
        if index > 0:
            J_all = [
                jacobian(module, x).reshape(G.shape[0], -1)
                for _, x in each_sample(inputs[index])
            ]
            G = sum(J.T @ G @ J for J in J_all) / problem.N
    return factors


def each_sample(X: Tensor) -> List[Tuple[int, Tensor]]:
    """Split a batch.

    Args:
        X: Samples ``[N, *]``.

    Returns:
        Number and sample ``[1, *]``.
    """
    return list(enumerate(X.split(1)))


class Row(NamedTuple):
    """One line of the table.

    Args:
        name: Name of the extension.
        reference: Computes the quantity with autograd.
        draws: Whether the quantity is sampled: its expectation is compared then.
        view: What of the field is compared, if not the field itself. Takes the field
            and the vector for products.
    """

    name: str
    reference: Callable[[Problem], Values]
    draws: bool = False
    view: Callable[[Any, Tensor], Any] = lambda field, vector: field

    def extension(self, num_draws: int = 1) -> Any:
        """Make the extension.

        Args:
            num_draws: Number of Monte-Carlo samples, if it takes any.

        Returns:
            The extension.
        """
        options = {"mc_samples": num_draws} if self.draws else {}
        return getattr(extensions, self.name)(**options)


def factor_to_ggn(field: Tensor, vector: Tensor) -> Tensor:
    """Multiply a factor ``[V, N, *p]`` of the GGN with its transpose, to ``[P, P]``."""
    columns = field.flatten(0, 1).flatten(1)
    return columns.T @ columns


def apply_to_vector(field: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
    """Apply a matrix product ``[K, *p] -> [K, *p]`` to one vector ``[*p]``."""
    return field(vector.unsqueeze(0)).squeeze(0)


ROWS = [
    Row("BatchGrad", autograd_batch_grad),
    Row("BatchL2Grad", autograd_batch_l2),
    Row("SumGradSquared", autograd_sum_grad_squared),
    Row("Variance", autograd_variance),
    Row("BatchDotGrad", autograd_batch_dot),
    Row("DiagGGNExact", autograd_diag_ggn),
    Row("DiagGGNMC", autograd_diag_ggn, draws=True),
    Row("BatchDiagGGNExact", autograd_batch_diag_ggn),
    Row("BatchDiagGGNMC", autograd_batch_diag_ggn, draws=True),
    Row("SqrtGGNExact", autograd_ggn, view=factor_to_ggn),
    Row("SqrtGGNMC", autograd_ggn, draws=True, view=factor_to_ggn),
    Row("KFAC", autograd_kflr, draws=True),
    Row("KFLR", autograd_kflr),
    Row("KFRA", autograd_kfra),
    Row("DiagHessian", autograd_diag_hessian),
    Row("BatchDiagHessian", autograd_batch_diag_hessian),
    Row("HMP", autograd_hessian_product, view=apply_to_vector),
    Row("GGNMP", autograd_ggn_product, view=apply_to_vector),
    Row("PCHMP", autograd_pch_product, view=apply_to_vector),
]


def largest_deviation(row: Row, problem: Problem) -> float:
    """Compute a quantity with BackPACK and with autograd, and compare.

    Args:
        row: The quantity.
        problem: Network and samples.

    Returns:
        Largest difference, relative to the largest entry, over all parameters.
    """
    reference = row.reference(problem)

    model = extend(deepcopy(problem.model))
    loss_function = extend(CrossEntropyLoss())
    extension = row.extension(NUM_DRAWS)
    with backpack(extension):
        loss_function(model(problem.X), problem.y).backward()

    deviations = []
    for name, param in model.named_parameters():
        field = getattr(param, extension.savefield)
        found, expected = row.view(field, problem.vectors[name]), reference[name]
        if not isinstance(found, list):
            found, expected = [found], [expected]
        deviations += [
            ((f - e).abs().max() / e.abs().max()).item()
            for f, e in zip(found, expected)
        ]
    return max(deviations)


def relative_time(
    row: Row, model: Module, X: Tensor, y: Tensor, rounds: int = 9
) -> Tuple[float, Union[Tensor, List[Tensor], Callable]]:
    """Time the pass with a quantity, and the pass without, in turns.

    Args:
        row: The quantity.
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.
        rounds: Number of pairs.

    Returns:
        Median of the ratios, and the quantity of one parameter.
    """
    plain, plain_loss = deepcopy(model), CrossEntropyLoss()
    extended, loss_function = extend(deepcopy(model)), extend(CrossEntropyLoss())
    extension = row.extension()

    def gradient() -> None:
        plain_loss(plain(X), y).backward()

    def quantity() -> None:
        with backpack(extension):
            loss_function(extended(X), y).backward()
        if row.view is apply_to_vector:
            for param in extended.parameters():
                apply_to_vector(getattr(param, extension.savefield), param.detach())

    ratios = []
    for _ in range(rounds):
        times = []
        for step in (gradient, quantity):
            start = perf_counter()
            step()
            times.append(perf_counter() - start)
        ratios.append(times[1] / times[0])
    shown = dict(extended.named_parameters())[SHOWN]
    return median(ratios), getattr(shown, extension.savefield)


def describe(field: Any, param: Tensor) -> str:
    """Describe the shape of a result.

    Args:
        field: The result.
        param: The parameter it belongs to.

    Returns:
        One or more shapes.
    """
    if callable(field):
        shape = ", ".join(str(size) for size in param.shape)
        return f"[K, {shape}] -> same"
    if isinstance(field, list):
        return ", ".join(str(list(factor.shape)) for factor in field)
    return str(list(field.shape))


def print_table(model: Sequential, X: Tensor, y: Tensor) -> None:
    """Print what each quantity is, what it takes, and how right it is.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.
    """
    problem = Problem(
        deepcopy(model).double(), X[:NUM_CHECKED].double(), y[:NUM_CHECKED]
    )
    shown = dict(model.named_parameters())[SHOWN]
    print(
        f"shape      for the weight {list(shown.shape)} of the second convolution\n"
        f"time       relative to the plain gradient, {NUM_TIMED} samples\n"
        f"deviation  largest difference from plain autograd relative to the largest\n"
        f"           entry, {NUM_CHECKED} samples, double precision; a star: sampled,\n"
        f"           the mean of {NUM_DRAWS} draws against the exact value\n"
    )
    line = "{:<18} {:<21} {:<24} {:>6} {:>10}"
    header = line.format("quantity", "field", "shape", "time", "deviation")
    print(header + "\n" + "-" * len(header))
    for row in ROWS:
        if sys.stdout.isatty():
            print(f"{row.name} ...", end="\r", flush=True)
        time, field = relative_time(row, model, X[:NUM_TIMED], y[:NUM_TIMED])
        deviation = largest_deviation(row, problem)
        print(
            line.format(
                row.name,
                row.extension().savefield,
                describe(field, shown),
                f"{time:.1f}x",
                f"{deviation:.0e}" + ("*" if row.draws else " "),
            ),
            flush=True,
        )


def gradient_norms(model: Module, X: Tensor, y: Tensor) -> Tensor:
    """Compute the norm of each sample's gradient, in one backward pass.

    Args:
        model: The network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.

    Returns:
        Norms ``[N]``.
    """
    model, loss_function = extend(model), extend(CrossEntropyLoss(reduction="sum"))
    with backpack(extensions.BatchL2Grad()):
        loss_function(model(X), y).backward()
    return sum(param.batch_l2 for param in model.parameters()).sqrt()


def draw(X: Tensor, y: Tensor, predictions: Tensor, norms: Tensor, path: Path) -> None:
    """Draw the images with the largest and smallest gradients, and all norms.

    Args:
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.
        predictions: What the network says, ``[N]``.
        norms: Norms of the individual gradients, ``[N]``.
        path: Where the picture goes.
    """
    import matplotlib.pyplot as plt

    rows, columns = 2, 5
    red, blue, gray = "#c23b22", "#1f6fb2", "#9aa3ad"
    order = norms.argsort(descending=True)
    groups = [
        ("The largest gradients", order[: rows * columns], red),
        ("The smallest gradients", order.flip(0)[: rows * columns], blue),
    ]

    fig = plt.figure(figsize=(10, 6), layout="constrained")
    fig.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    left, right = fig.subfigures(1, 2, width_ratios=[1, 1.05], wspace=0.03)
    for part, (title, indices, color) in zip(
        left.subfigures(2, 1, hspace=0.04), groups
    ):
        part.suptitle(title, color=color, fontweight="bold", fontsize=12)
        for ax, i in zip(part.subplots(rows, columns).flat, indices.tolist()):
            ax.imshow(X[i, 0], cmap="gray_r")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_color(gray)
            right_or_wrong = "black" if predictions[i] == y[i] else red
            caption = f"{y[i]}, read as {predictions[i]}\nnorm {norms[i]:.2g}"
            ax.set_xlabel(caption, fontsize=8, color=right_or_wrong, labelpad=2)

    ax = right.subplots()
    rest = order[rows * columns : -rows * columns]
    parts = [norms[groups[1][1]], norms[rest], norms[groups[0][1]]]
    bins = torch.logspace(norms.min().log10(), norms.max().log10(), 41)
    ax.hist(
        [part.tolist() for part in parts],
        bins=bins.tolist(),
        color=[blue, gray, red],
        label=["shown below, left", "all others", "shown above, left"],
        stacked=True,
    )
    ax.legend(frameon=False, reverse=True)
    ax.set_xscale("log")
    ax.set_xlabel("norm of a sample's gradient")
    ax.set_ylabel("number of images")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(
        f"{len(X)} gradient norms from one backward pass",
        fontsize=12,
        fontweight="bold",
    )
    fig.savefig(path, dpi=130)


def main(arguments: Optional[List[str]] = None) -> None:
    """Train the network, print the table, draw the picture.

    Args:
        arguments: Command line; the program's own by default.
    """
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path(__file__).with_name("individual_gradients.png"),
        help="where the picture goes",
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # little work per operation: threads would rather wait
    torch.manual_seed(0)

    X, y = load_one_batch_mnist(batch_size=1000, shuffle=False)
    model = make_model()
    print_table(model, X, y)

    torch.manual_seed(0)
    print(f"\nTraining the network on {len(X)} images ...", flush=True)
    accuracy = train(model, X, y)
    print(f"It classifies {100 * accuracy:.1f} % of them correctly.")

    norms = gradient_norms(deepcopy(model), X, y)
    draw(X, y, model(X).argmax(dim=1), norms, args.picture)
    largest = norms.topk(len(norms) // 10).values.square().sum() / norms.square().sum()
    print(
        f"A tenth of them holds {100 * largest:.0f} % of the squared gradient norms. "
        f"Which ones:\n{args.picture}"
    )


if __name__ == "__main__":
    main()
