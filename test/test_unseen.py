"""Uses that are found in the graph: nothing was watched where they were.

Derivatives of a network that its loss contains, parameters outside of extended modules,
and compiled functions.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, Callable, Dict, Tuple

import pytest
import torch
from cases import Tensors, make_extension, randomize
from oracle import assert_agrees
from per_sample import (
    F64,
    FIRST_ORDER,
    LENGTHS,
    Lambda,
    N,
    Row,
    against_real,
    assert_fields,
    assert_refused,
    assert_right,
    named,
    param,
    randn,
    real,
    reference,
)
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call
from torch.nn import Module
from torch.nn import functional as F

from backpack import backpack, extend
from backpack.engine.nodes.uses import Use
from backpack.engine.samples import gaps
from backpack.extensions import BatchGrad, DiagGGNExact

D = 4


def mlp(act: Callable[[], Module] = nn.Tanh, out: int = 1) -> nn.Sequential:
    """Make a network that has two derivatives."""
    return nn.Sequential(
        *(nn.Linear(D, 5), act(), nn.Linear(5, 5), act()),
        nn.Linear(5, out, bias=False),  # which is in no derivative
    )


def by_input(f: Callable[[Tensor], Tensor], x: Tensor, keep: bool = False) -> Tensor:
    """Differentiate the sum of a function's values by its input."""
    x = x.detach().clone().requires_grad_()
    f = f(x)
    (g,) = grad(f.sum(), x, create_graph=True)
    return torch.cat([f.flatten(1), g.flatten(1)], 1) if keep else g


def laplacian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Add up second derivatives by the input's entries."""
    x = x.detach().clone().requires_grad_()
    (g,) = grad(f(x).sum(), x, create_graph=True)
    rows = [grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(D)]
    return torch.stack(rows, 1)


def conv(*more: Module, act: Callable[[], Module] = nn.Softplus) -> nn.Sequential:
    """Make a network of convolutions, which ends with one."""
    last = nn.Conv1d(3, 1, 2, bias=False)
    return nn.Sequential(nn.Conv1d(1, 3, 3), act(), *more, last, nn.Flatten())


# Of which a derivative depends on the data before, but is constant behind
TAILS: Dict[str, Callable[[], Module]] = {
    "convolution": conv,
    "convolution-alone": lambda: nn.Sequential(
        nn.Conv1d(1, 1, 2, bias=False), nn.Flatten()
    ),
    "least-of-two-weights": lambda: conv(
        Lambda(
            lambda m, x: F.conv1d(x, torch.minimum(m.w, m.u.exp() + 9)),
            **{"w": param(3, 3, 1), "u": param(3, 3, 1)},
        )
    ),
    "convolutions": lambda: conv(nn.Conv1d(3, 3, 2)),
    "grouped": lambda: conv(nn.Conv1d(3, 6, 1, groups=3), nn.Conv1d(6, 3, 2)),
    "transposed": lambda: conv(nn.ConvTranspose1d(3, 3, 2)),
    "normalized": lambda: conv(nn.InstanceNorm1d(3, affine=True)),
    "average-pooling": lambda: conv(nn.Conv1d(3, 3, 2), nn.AvgPool1d(2)),
    "upsampling": lambda: conv(nn.Upsample(scale_factor=2), nn.Conv1d(3, 3, 2)),
    "statistics": lambda: conv(nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3).eval()),
    "linear-in-pieces": lambda: conv(nn.Conv1d(3, 3, 2), act=nn.LeakyReLU),
    "max-pooling": lambda: conv(nn.MaxPool1d(2, 1), act=nn.Identity),
    "adaptive-max-pooling": lambda: conv(nn.AdaptiveMaxPool1d(3), act=nn.Identity),
    "max-pooling-of-planes": lambda: conv(
        nn.Unflatten(1, (3, 1)), nn.MaxPool2d((1, 2)), nn.Flatten(1, 2)
    ),
}


def of_pairs(pool: Callable[[Tensor], Tensor]) -> Lambda:
    """Make a layer that chooses from pairs of each feature with itself."""
    return Lambda(lambda m, x: pool(x.repeat_interleave(2, 1)[:, None])[:, 0])


def attention() -> Lambda:
    """Make a network with attention among positions."""
    return Lambda(
        lambda m, x: m.o((m.q(x) @ m.k(x).mT).softmax(-1) @ m.n(x) * m.p.sigmoid()).sum(
            1
        ),
        **{"q": nn.Linear(D, D), "k": nn.Linear(D, D), "n": nn.LayerNorm(D)},
        **{"o": nn.Linear(D, 1), "p": param(D)},
    )


def recurrent(
    layer: type,
    last: Callable[[Tensor], Tensor],
    learned: bool = False,
    **options: Any,
) -> Lambda:
    """Make a critic of sequences: what a recurrent layer returns, and a score of it."""
    wide = 2 if options.get("bidirectional") else 1

    def forward(m: Module, x: Tensor) -> Tensor:
        state = m.h.expand(1, len(x), 3).contiguous() if learned else None
        return m.o(last(m.f(x if m.f.batch_first else x.transpose(0, 1), state)[0]))

    return Lambda(
        forward,
        **({"h": param(3)} if learned else {}),
        f=layer(D, 3, **{"batch_first": True, **options}),
        o=nn.Linear(3 * wide, 1, bias=False),
    )


RECURRENT: Dict[str, Callable[[], Module]] = {
    **{
        f"{layer.__name__}-{name}": partial(recurrent, layer, last)
        for layer in (nn.RNN, nn.LSTM, nn.GRU)
        for name, last in {
            "last": lambda h: h[:, -1],
            "curved": lambda h: h.square().sum(1),
        }.items()
    },
    "several": partial(recurrent, nn.GRU, lambda h: h.mean(1), num_layers=2),
    "both-ways": partial(recurrent, nn.LSTM, lambda h: h[:, 0], bidirectional=True),
    "rectified": partial(recurrent, nn.RNN, lambda h: h[:, -1], nonlinearity="relu"),
    "without-bias": partial(recurrent, nn.GRU, lambda h: h[:, -1], bias=False),
    "from-a-learned-state": partial(recurrent, nn.GRU, lambda h: h[:, -1], True),
    "time-first": partial(recurrent, nn.GRU, lambda h: h[-1], batch_first=False),
}


def by_rectified(m: Module, x: Tensor) -> Tensor:
    """Differentiate by a layer's output, to which zeros were written."""
    h = m.f(x).mul_(2.0).relu_()
    energy = m.o(F.softplus(m.g(h)) * h).sum()
    return h - torch.autograd.grad(energy, h, create_graph=True)[0]


# Models, inputs, and what is made of both
DERIVATIVES: Dict[str, Row] = {
    "gradient": Row(mlp, randn(D), predict=lambda m, X: by_input(m, *X)),
    "value-and-gradient": Row(
        mlp, randn(D), predict=lambda m, X: by_input(m, *X, keep=True)
    ),
    "laplacian": Row(mlp, randn(D), predict=lambda m, X: laplacian(m, *X)),
    "residual": Row(
        mlp, randn(D), predict=lambda m, X: m(*X) + laplacian(m, *X) - X[0].sin()
    ),
    "rotated": Row(
        mlp,
        randn(D),
        predict=lambda m, X: by_input(m, *X) @ torch.eye(D, dtype=F64).roll(2, 0),
    ),
    "softplus": Row(
        lambda: mlp(nn.Softplus), randn(D), predict=lambda m, X: laplacian(m, *X)
    ),
    # of what is linear in pieces, autograd knows on what these depend
    **{
        f"{act.__name__}-{name}": Row(
            lambda act=act: mlp(act), randn(D), predict=lambda m, X, g=g: g(m, *X)
        )
        for act in (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.ELU)
        for name, g in {
            "gradient": by_input,
            "with-value": lambda m, x: by_input(m, x, keep=True),
            "square": lambda m, x: by_input(lambda y: m(y).square(), x),
        }.items()
    },
    "only-the-derivative-of-operations": Row(  # whose last weight is seen nowhere else
        lambda: Lambda(
            lambda m, x: m.o(((x @ m.w.T).tanh() @ m.w).tanh()),
            **{"w": param(5, D), "o": nn.Linear(D, 1, bias=False)},
        ),
        randn(D),
        predict=lambda m, X: by_input(m, *X),
    ),
    "pieces-by-hand": Row(
        lambda: mlp(lambda: Lambda(lambda m, x: torch.where(x > 0, x, 0.0))),
        randn(D),
        predict=lambda m, X: by_input(m, *X, keep=True),
    ),
    "all-kinds": Row(
        lambda: nn.Sequential(
            *(nn.Linear(D, 5), nn.Softsign(), nn.Linear(5, 5), nn.GELU()),
            *(nn.Linear(5, 4), nn.LogSigmoid(), nn.Linear(4, 1), nn.Mish()),
        ),
        randn(D),
        predict=lambda m, X: laplacian(m, *X),
    ),
    "of-log-probabilities": Row(
        lambda: mlp(nn.SiLU, 3),
        randn(D),
        predict=lambda m, X: by_input(lambda x: m(x).log_softmax(1)[:, 1], *X),
    ),
    **{
        f"attention-{t}": Row(
            attention,
            randn(t, D),
            predict=lambda m, X: by_input(m, *X, keep=True),
        )
        for t in LENGTHS
    },
    **{
        f"{name}{where}": Row(model, randn(3, D), predict=predict)
        for name, model in RECURRENT.items()
        for where, predict in {
            "-only": lambda m, X: by_input(m, *X),
            "-with-value": lambda m, X: by_input(m, *X, keep=True),
        }.items()
    },
    **{
        f"{name}-inside": Row(
            lambda model=model: Lambda(
                lambda m, x: by_input(m.f, x).sum(1) * m.f(x), f=model()
            ),
            randn(3, D),
        )
        for name, model in RECURRENT.items()
    },
    "inside": Row(
        lambda: Lambda(
            lambda m, x: m.g(by_input(m.f, x)) + m.f(x), f=mlp(), g=nn.Linear(D, 2)
        ),
        randn(D),
    ),
    **{
        f"by-what-was-written-to-{t}": Row(
            lambda: Lambda(
                lambda m, x: by_rectified(m, x).square().sum(),
                **{"f": nn.Linear(D, D), "g": nn.Linear(D, D)},
                o=nn.Linear(D, 1, bias=False),
            ),
            randn(t, D),
            objective=lambda f, _: f.square().sum(),
            quantities=FIRST_ORDER,
            predict=lambda m, X: by_rectified(m, *X),
            value=lambda m, _, X: m(*X),
        )
        for t in LENGTHS
    },
    "returned-from-inside": Row(
        lambda: Lambda(lambda m, x: by_input(m.f, x), f=mlp()), randn(D)
    ),
    "second-from-inside": Row(
        lambda: Lambda(lambda m, x: laplacian(m.f, x), f=mlp()), randn(D)
    ),
    **{
        f"tail-{name}-only": Row(
            TAILS[name], randn(1, 7), predict=lambda m, X: by_input(m, *X)
        )
        for name in ("convolution", "least-of-two-weights")
    },
    **{
        name: Row(
            lambda pool=pool: mlp(partial(of_pairs, pool)),
            randn(D),
            predict=lambda m, X: by_input(m, *X),
        )
        for name, pool in {
            "max-pooling": lambda x: F.max_pool1d(x, 2),
            "adaptive-max-pooling": lambda x: F.adaptive_max_pool1d(
                x, x.shape[-1] // 2
            ),
        }.items()
    },
    **{
        f"tail-{name}{where}": row
        for name, model in TAILS.items()
        for where, row in {
            "": Row(
                model, randn(1, 7), predict=lambda m, X: by_input(m, *X, keep=True)
            ),
            "-inside": Row(
                lambda model=model: Lambda(
                    lambda m, x: by_input(m.f, x) * x.sin()
                    + m.f(x).sum(1)[:, None, None],
                    f=model(),
                ),
                randn(1, 7),
            ),
        }.items()
    },
}


def scripted(x: Tensor, weight: Tensor) -> Tensor:
    """Scale features."""
    return (x * weight).tanh()


# Parameters that operations take outside of extended modules, or where nothing is seen
class OwnProduct(torch.autograd.Function):
    """A product with a matrix, and with a number that it looks at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        """Multiply ``[N, D]`` with ``[D, O]``."""
        ctx.save_for_backward(x, w)
        ctx.factor = float(t) if t > 0 else 1.0
        return ctx.factor * x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Any, ...]:
        """Multiply with the other operand."""
        x, w = ctx.saved_tensors
        gradient = ctx.factor * gradient
        return gradient @ w.T, None, x.T @ gradient


FIRST_ROW = torch.tensor([0])


def zero_(h: Tensor, rows: Any) -> Tensor:
    """Overwrite rows of each sample."""
    h[:, rows] = 0.0
    return h


def on_both_rows(m: Module, h: Tensor) -> Tensor:
    """Call a function on the first row, and on what comes out added to the second."""
    return OwnProduct.apply(
        h[:, 1] + OwnProduct.apply(h[:, 0] + 0.3, torch.tensor(1.0), m.w),
        *(torch.tensor(1.0), m.w),
    )


def all_rows(c: Tensor, f: Tensor) -> Tensor:
    """Use each row with a sample, and all rows with all samples."""
    return c * f + (f[:, None] * c).sum(1)


OUTSIDE: Dict[str, Row] = {
    "factor": Row(mlp, randn(D), predict=lambda m, X: m(*X) * m[0].bias),
    "expression": Row(
        mlp, randn(D), predict=lambda m, X: m(*X) * m[0].weight.pow(2).sum(1)
    ),
    "product": Row(mlp, randn(D), predict=lambda m, X: m[1:](m[0](*X)) @ m[4].weight),
    "rows-of-a-constant-that-all-samples-meet": Row(
        lambda: mlp(out=5),
        randn(D),
        predict=lambda m, X: all_rows(
            torch.ones(N, 1, dtype=F64) @ m[0].bias[None], m(*X)
        ),
        alone=False,
    ),
    "linear": Row(
        mlp,
        randn(3, D),
        predict=lambda m, X: F.linear(m(*X).tanh(), m[2].weight[:, :1], m[2].bias),
    ),
    "several": Row(
        mlp,
        randn(D),
        predict=lambda m, X: (m(*X) * m[0].bias).tanh() @ m[2].weight + m[2].bias,
    ),
    **{
        f"of-each-sample-{name}": Row(
            mlp,
            randn(D),
            objective=lambda f, _, reduce=reduce: reduce(f),
            predict=lambda m, X: m(*X).square() - m[0].bias[:3].exp() * torch.ones(3),
            quantities=FIRST_ORDER,
        )
        for name, reduce in {
            "sum": lambda f: f.sum(),
            "sums": lambda f: (-f - 1).sum() / N,
            "rows": lambda f: f.sum(1).sum(),
        }.items()
    },
    "scripted": Row(
        lambda: Lambda(
            lambda m, x: torch.jit.script(scripted)(m.f(x), m.w),
            **{"f": nn.Linear(D, 5), "w": param(5)},
        ),
        randn(D),
    ),
    "scripted-module": Row(
        lambda: Lambda(
            lambda m, x: m.g(m.f(x)) * m.w,
            **{"f": nn.Linear(D, 5), "w": param(5), "g": torch.jit.script(nn.Tanh())},
        ),
        randn(D),
    ),
    **{
        f"function-on-rows-that-were-{name}": Row(
            lambda rows=rows: Lambda(
                lambda m, x, rows=rows: on_both_rows(m, rows(m.f(x))),
                **{"f": nn.Linear(D, D), "w": param(D, D)},
            ),
            randn(2, D),
        )
        for name, rows in {
            "overwritten": lambda h: h.clone().index_fill_(1, FIRST_ROW, 0.3),
            "written-as-a-view": lambda h: zero_(h.clone(), 0),
            "left-out": lambda h: F.pad(h[:, :1], (0, 0, 1, 0)),
            "masked": lambda h: zero_(h.clone(), torch.tensor([True, False])),
            "scaled": lambda h: zero_(h.clone(), 0) * h.new_ones(2, 1),
        }.items()
    },
    "function-that-reads-a-constant": Row(
        lambda: Lambda(
            lambda m, x: m.g(OwnProduct.apply(x, torch.tensor(2.0), m.w)),
            **{"w": param(D, 5), "g": nn.Linear(5, 3)},
        ),
        randn(D),
    ),
}


def penalized(scale: float) -> Callable[[Tensor, Module], Tensor]:
    """Add to a loss of values how far the gradient's length is from one."""

    def objective(f: Tensor, loss: Module) -> Tensor:
        penalty = (f[:, 1:].norm(dim=1) - 1).pow(2)
        return loss(f[:, :1], real(f[:, :1])) + scale * penalty.sum()

    return objective


# Terms of a loss next to that of its module, of which second order knows nothing
TERMS: Dict[str, Row] = {
    f"penalty-{scale}": Row(
        mlp,
        randn(D),
        objective=penalized(scale),
        predict=lambda m, X: by_input(m, *X, keep=True),
        quantities=FIRST_ORDER,
    )
    for scale in (1 / N, 2.0)
}
TERMS.update(
    {  # of a model that has nothing else in the loss
        f"penalty-alone-{name}": Row(
            model,
            randn(3, D),
            objective=lambda f, _: f.square().sum() / N,
            predict=lambda m, X: by_input(m, *X),
            quantities=FIRST_ORDER,
        )
        for name, model in RECURRENT.items()
    }
)


def beside_a_loss(m: Module, loss: Module, X: Tensors) -> Tensor:
    """Add the square of a derivative, in a term of its own, to a loss of values."""
    x = X[0].detach().clone().requires_grad_()
    f = m(x)
    (g,) = grad(f.sum(), x, create_graph=True)
    return against_real(f, loss) + g.square().sum() / N


TERMS.update(
    {
        f"penalty-beside-{name}": Row(
            model,
            randn(3, D),
            objective=lambda f, loss: against_real(f[:, :1], loss)
            + f[:, 1:].square().sum() / N,
            predict=lambda m, X: by_input(m, *X, keep=True),
            quantities=FIRST_ORDER,
            value=beside_a_loss,
        )
        for name, model in RECURRENT.items()
    }
)


def along_cosine(m: Module, x: Tensor) -> Tensor:
    """Differentiate a recurrent layer's last output along a direction."""
    return torch.func.jvp(lambda y: m.f(y)[0][:, -1], (x,), (x.cos(),))[1]


NOT_SAID = "can't see it: .* those that differentiate a recurrent layer"
REFUSED: Dict[str, Row] = {
    **{  # of which autograd does not say that it depends on the inputs
        layer.__name__: Row(
            lambda layer=layer: Lambda(along_cosine, f=layer(D, 3, batch_first=True)),
            randn(3, D),
            says=NOT_SAID,
        )
        for layer in (nn.LSTM, nn.GRU)
    },
    "maxima-of-samples": Row(
        lambda: Lambda(
            lambda m, x: by_input(
                lambda z: F.max_pool1d(m.f(z).mT[None], 2, 1), x.repeat(1, 1)
            ),
            f=nn.Linear(D, 3, bias=False),
        ),
        randn(D),
        says="samples have met in `max_pool",
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExact"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, quantity: str) -> None:
    """It is refused where it is not known where samples are."""
    assert_refused(REFUSED[name], quantity)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", named(DERIVATIVES, OUTSIDE, TERMS))
def test_right(name: str) -> None:
    """It is right for each sample."""
    assert_right({**DERIVATIVES, **OUTSIDE, **TERMS}[name])


class Halves(Module):
    """Does something else to each half of the features."""

    def forward(self, x: Tensor) -> Tensor:
        """Take them apart, and put them together."""
        first, second = x.chunk(2, -1)
        return torch.cat([F.elu(first), -F.elu(-second)], -1)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="This PyTorch does not tell whether somebody has hooks on what is saved.",
)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("of", [by_input, laplacian])
@pytest.mark.parametrize("act", [nn.Tanh, nn.ReLU, nn.Softplus, Halves])
def test_rules(
    act: Callable, of: Callable, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A derivative of linear layers consists of products, which have a rule."""
    if of is laplacian and act is nn.ReLU:
        pytest.skip("Its second derivative is zero.")
    monkeypatch.delattr(Use, "_generic")
    if inside:
        row = Row(lambda: Lambda(lambda m, x: of(m.f, x), f=mlp(act)), randn(D))
    else:
        row = Row(lambda: mlp(act), randn(D), predict=lambda m, X: of(m, *X))
    assert_right(row)


def in_pieces(x: Tensor, k: Tensor) -> Tensor:
    """Compute something, in a way that data decide on."""
    root = k.abs().sqrt()
    scaled = x * root
    if torch.all(k.gt(0)):
        return root.reciprocal() * scaled.tanh()
    return root.reciprocal() * scaled.tan()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_pieces_of_a_scripted_function() -> None:
    """Once `torch.jit` has made several of it, they are right or it is named."""
    scripted, half = torch.jit.script(in_pieces), lambda: nn.Parameter(
        torch.ones(()) / 2
    )
    row = Row(
        lambda: Lambda(lambda m, x: scripted(m.f(x), m.k), f=nn.Linear(D, 3), k=half()),
        randn(D),
        says="torch.jit",
    )
    model, loss, X = row.build()
    for _ in range(3):
        row.run(model, loss, X).backward()
    assert_refused(row, "BatchGrad")


def residual(depth: int, linear: bool = False) -> Module:
    """Make a deep network, whose derivative has about as many nodes on each way."""

    def forward(m: Module, x: Tensor) -> Tensor:
        for f in m.f:
            x = x + (f(x) if linear else f(x).tanh()) / depth
        return x.sum(1).exp()

    return Lambda(forward, f=nn.ModuleList(nn.Linear(D, D) for _ in range(depth)))


@pytest.mark.parametrize("linear", [False, True])
def test_deep_networks(linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of their derivatives' graphs grows with depth, not its square."""
    known_at, asked = gaps._known_at, []

    def counting(*args: Any) -> Any:
        asked.append(1)
        return known_at(*args)

    monkeypatch.setattr(gaps, "_known_at", counting)
    counts = []
    for depth in (24, 48):
        row = Row(
            partial(residual, depth, linear),
            randn(D),
            predict=lambda m, X: by_input(m, *X),
            quantities=["BatchGrad"],
        )
        assert_right(row)
        counts.append(len(asked))
        asked.clear()
    assert counts[1] < 2.5 * counts[0]


def adapted(m: Module, x: Tensor) -> Tensor:
    """Take a step along the gradient by a parameter, for each sample by itself."""
    scores = []
    for own in x:
        (g,) = grad((own @ m.w).tanh().square().sum(), m.w, create_graph=True)
        scores.append((own @ (m.w - 0.1 * g)).tanh())
    return m.o(torch.stack(scores))


ADAPTED = Row(lambda: Lambda(adapted, w=param(D, D), o=nn.Linear(D, 3)), randn(D))


def test_steps_inside_of_the_context() -> None:
    """A derivative by parameters in a forward pass: right, or refused with a way out.

    The check of the result does not warn of tensors that are part of a graph.
    """
    (model, loss, X), samples = ADAPTED.build(), reference(ADAPTED)
    model, loss = extend(model), extend(loss)
    with backpack(BatchGrad(), check=True):
        ADAPTED.run(model, loss, X).backward()
    assert_fields(model, ["BatchGrad"], samples)
    with pytest.raises(AssertionError, match="DiagGGNExact.*with backpack.disable()"):
        with backpack(DiagGGNExact()):
            ADAPTED.run(model, loss, X)


@pytest.mark.parametrize("name", ["value-and-gradient", "penalty-2.0"])
def test_forward_pass_inside_of_the_context(name: str) -> None:
    """A derivative that the loss contains is no backward pass of the context."""
    row = {**DERIVATIVES, **TERMS}[name]
    quantities = ["BatchGrad"] + ["DiagGGNExact"] * (name not in TERMS)
    (model, loss, X), samples = row.build(), reference(row)
    model, loss = extend(model), extend(loss)
    with backpack(*[make_extension(name) for name in quantities]):
        row.run(model, loss, X).backward()
    assert_fields(model, quantities, samples)


def test_derivative_by_parameters() -> None:
    """What the parameters' gradient of a sum leads to is not split into samples."""
    row = Row(
        mlp,
        randn(D),
        value=lambda m, loss, X: sum(
            g.pow(2).sum() for g in grad(m(*X).sum(), m.parameters(), create_graph=True)
        ),
    )
    assert_refused(row, "BatchGrad", "samples have met in `mm`")


# Models ``[n, 1, 6] -> [n, 3]`` whose derivatives are others than products
CURVED: Dict[str, Callable[[], Module]] = {
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "convolutions": lambda: nn.Sequential(
        *(nn.Conv1d(1, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.SiLU()),
        *(nn.Conv1d(4, 2, 2, groups=2), nn.Softplus(), nn.Flatten(), nn.Linear(6, 3)),
    ),
    "max-pooling": lambda: nn.Sequential(
        *(nn.Conv1d(1, 2, 3, padding=1), nn.MaxPool1d(2), nn.Flatten()),
        *(nn.Tanh(), nn.Linear(6, 3)),
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(14, 3)
    ),
    "layer-norm": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)),
    ),
    "batch-norm": lambda: nn.Sequential(
        *(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Tanh(), nn.Flatten()),
        nn.Linear(8, 3),
    ),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", CURVED)
def test_products_with_the_hessian(name: str, graph: bool) -> None:
    """The derivative of a gradient along a direction is a sum over samples, too."""
    torch.manual_seed(0)
    model = randomize(CURVED[name]().to(F64)).eval()
    x, loss = torch.randn(N, 1, 6, dtype=F64, requires_grad=graph), nn.MSELoss()
    directions = [torch.randn_like(p) for p in model.parameters()]

    def along(model: Module, x: Tensor) -> Tensor:
        params = list(model.parameters())
        value = loss(model(x), torch.zeros(len(x), 3, dtype=F64)) * len(x)
        slopes = grad(value, params, create_graph=True)
        return sum((g * v).sum() for g, v in zip(slopes, directions))

    plain = deepcopy(model)
    rows = [
        grad(along(plain, row[None]), list(plain.parameters()), allow_unused=True)
        for row in x
    ]
    extend(model)
    with backpack(BatchGrad()):
        along(model, x).backward()
    for p, of_param in zip(model.parameters(), zip(*rows)):
        parts = [torch.zeros_like(p) if g is None else g for g in of_param]
        assert_agrees(p.grad_batch, torch.stack(parts))


class Times(torch.autograd.Function):
    """A product with a matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tuple[Tensor, Tensor]:
        """Differentiate."""
        x, w = ctx.saved_tensors
        return g @ w.mT, x.mT @ g


# How a matrix is used; in a derivative alone, a layer's weight is not in the value
TAKEN: Dict[str, Callable[[Module, Tensor], Tensor]] = {
    "function": lambda m, x: Times.apply(m.f(x), m.g.weight),
    "function-of-an-expression": lambda m, x: Times.apply(m.f(x), m.g.weight * 2),
    "derivative": lambda m, x: by_input(lambda z: m.g((m.f(x) * z).sin()), x),
}


@pytest.mark.parametrize("given", ["own", "given", "plain"])
@pytest.mark.parametrize("name", TAKEN)
def test_leaves_in_the_place_of_parameters(name: str, given: str) -> None:
    """What a functional call is given, or a module holds, counts as a parameter."""
    layers = {"f": nn.Linear(D, D), "g": nn.Linear(D, D, bias=False)}
    model, x = Lambda(TAKEN[name], **layers).to(F64), torch.randn(N, D, dtype=F64)
    leaves = dict(model.named_parameters())
    if given == "given":
        leaves = {n: p.detach().requires_grad_() for n, p in leaves.items()}
    elif given == "plain":
        for n, p in leaves.items():
            layer, _, key = n.partition(".")
            leaves[n] = p.detach().requires_grad_()
            delattr(layers[layer], key)
            setattr(layers[layer], key, leaves[n])

    def call(x: Tensor) -> Tensor:
        return functional_call(model, leaves, (x,)) if given == "given" else model(x)

    rows = [call(z[None]).square().sum() for z in x]
    params = [p for n, p in leaves.items() if n != "f.bias" or name != "derivative"]
    expected = [torch.autograd.grad(row, params) for row in rows]
    extend(model)
    with backpack(BatchGrad()):
        call(x).square().sum().backward()
    for p, parts in zip(params, zip(*expected)):
        assert_agrees(p.grad_batch, torch.stack(parts))
