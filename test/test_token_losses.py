"""A loss sees rows, of which each sample has several, some, or none.

Predictions are flattened, masked, shifted, picked and reordered on the way to the loss;
the model may compute its loss itself, and there may be several. First order and the GGN
family belong to samples, with as many positions as samples and with another number; and
with as many rows left as there are samples.
"""

import warnings
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import F64, drawing
from oracle import assert_agrees, parameters
from per_sample import (
    FIRST_ORDER,
    LENGTHS,
    QUANTITIES,
    REFUSALS,
    Lambda,
    N,
    OfAll,
    Row,
    assert_refused,
    assert_right,
    assert_right_or_refused,
    classes,
    compute,
    randn,
    real,
    tokens,
)
from torch import Tensor, nn
from torch.nn import Module

from backpack import backpack, extend, extensions

C = 3  # classes
GGN = ["DiagGGNExact", "BatchDiagGGNExact"]


def language_model() -> Module:
    """Make a model that maps tokens ``[N, T]`` to scores ``[N, T, C]``."""
    return Lambda(
        lambda m, i: m.head(m.body(m.token(i)).tanh().cumsum(1)),
        token=nn.Embedding(5, 4),
        body=nn.Linear(4, 4),
        head=nn.Linear(4, C),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warning that a loss is scaled after its module."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*modified")
        yield


def labels(f: Tensor) -> Tensor:
    """Return a class for each token ``[N, T]``."""
    return classes(f, axis=2)


def some(f: Tensor, ignored: int = -100) -> Tensor:
    """Return a class for each token, of which the first sample has one only."""
    y = labels(f)
    y[0, 1:], y[1:, ::2] = ignored, ignored
    return y


def spread(f: Tensor, kept: int) -> Tensor:
    """Return a mask ``[N, T]`` that leaves some tokens, unevenly."""
    mask = torch.zeros(f.shape[:2], dtype=torch.bool)
    mask.view(-1)[:kept] = True
    return mask


def soft(f: Tensor) -> Tensor:
    """Return probabilities in the shape of a prediction."""
    return real(f).softmax(-1)


def unbatched(f: Tensor) -> Tensor:
    """Flatten tokens with time in front."""
    return f.transpose(0, 1).flatten(0, 1)


class Objective(NamedTuple):
    """What is differentiated.

    Attributes:
        function: Function of scores ``[N, T, C]`` and of the loss.
        loss: Makes the loss.
        around: Makes a context for forward and backward pass.
    """

    function: Callable[[Tensor, Module], Tensor]
    loss: Callable[[], Module] = nn.CrossEntropyLoss
    around: Callable = quiet

    def row(self, t: int) -> Row:
        """Make a row with sequences of a length."""
        return Row(
            language_model, tokens(t), self.loss, self.function, around=self.around
        )


def ce(**options: Any) -> Callable[[], Module]:
    """Make a function that makes a cross-entropy loss."""
    return lambda: nn.CrossEntropyLoss(**options)


WEIGHT = torch.tensor([0.3, 1.0, 2.0], dtype=F64)


def flat(f: Tensor, loss: Module) -> Tensor:
    """Flatten tokens and classes."""
    return loss(f.flatten(0, 1), labels(f).flatten())


def flat_some(f: Tensor, loss: Module) -> Tensor:
    """The same, where some are to be ignored."""
    return loss(f.flatten(0, 1), some(f).flatten())


def flat_real(f: Tensor, loss: Module) -> Tensor:
    """Flatten tokens, and compare with real numbers."""
    return loss(f.flatten(0, 1), real(f).flatten(0, 1))


def flat_soft(f: Tensor, loss: Module) -> Tensor:
    """Flatten tokens, and compare with probabilities."""
    return loss(f.flatten(0, 1), soft(f).flatten(0, 1))


def masked(kept: Callable[[Tensor], Tensor]) -> Callable:
    """Make an objective of the tokens that a mask leaves."""

    def function(f: Tensor, loss: Module) -> Tensor:
        mask = kept(f)
        return loss(f[mask], labels(f)[mask])

    return function


def picked(*rows: int) -> Callable:
    """Make an objective of some rows of all, maybe with repeats."""
    index = torch.tensor(rows)
    return lambda f, loss: loss(f.flatten(0, 1)[index], labels(f).flatten()[index])


def per_step(f: Tensor, loss: Module) -> Tensor:
    """Add the losses of all steps."""
    return sum(loss(f[:, t], labels(f)[:, t]) for t in range(f.shape[1]))


def per_sample_loop(f: Tensor, loss: Module) -> Tensor:
    """Add the losses of all samples, each by itself."""
    return sum(loss(f[n], labels(f)[n]) for n in range(len(f)))


def per_token(f: Tensor, loss: Module) -> Tensor:
    """Add the losses of all tokens, each a vector without batch axis."""
    return sum(map(loss, f.flatten(0, 1), labels(f).flatten()))


def weighted_tokens(f: Tensor, loss: Module) -> Tensor:
    """Average over the tokens that count, after the loss."""
    mask = spread(f, 5).flatten()
    terms = loss(f.flatten(0, 1), labels(f).flatten())
    return (terms * mask).sum() / mask.sum()


OBJECTIVES: Dict[str, Objective] = {
    "flatten": Objective(flat),
    "flatten-sum": Objective(flat, ce(reduction="sum")),
    "flatten-weight": Objective(flat, ce(weight=WEIGHT)),
    "flatten-smoothing": Objective(flat, ce(label_smoothing=0.2)),
    "flatten-weight-smoothing": Objective(flat, ce(weight=WEIGHT, label_smoothing=0.1)),
    "flatten-soft": Objective(flat_soft),
    "view": Objective(lambda f, ls: ls(f.view(-1, C), labels(f).view(-1))),
    "reshape": Objective(lambda f, ls: ls(f.reshape(-1, C), labels(f).reshape(-1))),
    "keywords": Objective(
        lambda f, ls: ls(target=labels(f).flatten(), input=f.flatten(0, 1))
    ),
    "time-first": Objective(lambda f, ls: ls(unbatched(f), labels(f).T.flatten())),
    "time-first-mean-of-some": Objective(
        lambda f, ls: ls(unbatched(f), some(f).T.flatten())
    ),
    "transposed": Objective(lambda f, ls: ls(f.transpose(1, 2), labels(f))),
    "permuted": Objective(lambda f, ls: ls(f.permute(0, 2, 1), labels(f))),
    "transposed-time-first": Objective(
        lambda f, ls: ls(f.permute(1, 2, 0), labels(f).T)
    ),
    "in-another-order": Objective(
        lambda f, ls: ls(f.flatten(0, 1).flip(0), labels(f).flatten().flip(0))
    ),
    "ignored": Objective(flat_some),
    "ignored-sum": Objective(flat_some, ce(reduction="sum")),
    "ignored-weight": Objective(flat_some, ce(weight=WEIGHT)),
    "ignored-index": Objective(
        lambda f, ls: ls(f.flatten(0, 1), some(f, 2).flatten()), ce(ignore_index=2)
    ),
    "ignored-transposed": Objective(lambda f, ls: ls(f.mT, some(f))),
    "one-sample-ignored": Objective(
        lambda f, ls: ls(
            f.flatten(0, 1),
            labels(f).index_fill(0, torch.tensor([1]), -100).flatten(),
        )
    ),
    "shifted": Objective(
        lambda f, ls: ls(f[:, :-1].flatten(0, 1), labels(f)[:, 1:].flatten())
    ),
    "shifted-contiguous": Objective(
        lambda f, ls: ls(
            f[..., :-1, :].contiguous().view(-1, C),
            labels(f)[..., 1:].contiguous().view(-1),
        )
    ),
    "shifted-padded": Objective(
        lambda f, ls: ls(
            f.flatten(0, 1), F.pad(labels(f), (0, 1), value=-100)[:, 1:].flatten()
        )
    ),
    "masked": Objective(masked(lambda f: labels(f) > 0)),
    "masked-as-many-as-samples": Objective(masked(lambda f: spread(f, N))),
    "masked-fewer-than-samples": Objective(masked(lambda f: spread(f, 2))),
    "masked-one-of-each": Objective(
        masked(
            lambda f: F.one_hot(torch.arange(len(f)) % f.shape[1], f.shape[1]).bool()
        )
    ),
    "masked-select": Objective(
        lambda f, ls: ls(
            f.masked_select(spread(f, 5)[..., None]).view(-1, C),
            labels(f)[spread(f, 5)],
        )
    ),
    "masked-flat": Objective(
        lambda f, ls: ls(
            f.flatten(0, 1)[spread(f, 7).flatten()],
            labels(f).flatten()[spread(f, 7).flatten()],
        )
    ),
    "nonzero": Objective(
        lambda f, ls: ls(
            f[spread(f, 6).nonzero(as_tuple=True)],
            labels(f)[spread(f, 6).nonzero(as_tuple=True)],
        )
    ),
    "picked-as-many-as-samples": Objective(picked(0, 1, 5, 7)),
    "picked-with-repeats": Objective(picked(0, 0, 5, 7)),
    "picked-in-another-order": Objective(picked(9, 4, 6, 1, 2, 2)),
    "index-select": Objective(
        lambda f, ls: ls(
            f.flatten(0, 1).index_select(0, torch.tensor([0, 3, 4, 10])),
            labels(f).flatten()[[0, 3, 4, 10]],
        )
    ),
    "last": Objective(lambda f, ls: ls(f[:, -1], labels(f)[:, -1])),
    "one-of-each": Objective(
        lambda f, ls: ls(
            f[torch.arange(len(f)), torch.arange(len(f)) % 2], labels(f)[:, 0]
        )
    ),
    "gathered": Objective(
        lambda f, ls: ls(
            f.gather(1, torch.ones(len(f), 1, C, dtype=torch.long))[:, 0],
            labels(f)[:, 1],
        )
    ),
    "first-samples-only": Objective(
        lambda f, ls: ls(f[: N // 2].flatten(0, 1), labels(f)[: N // 2].flatten())
    ),
    "samples-by-index": Objective(
        lambda f, ls: ls(f[[2, 0, 0, 1]].mT, labels(f)[[2, 0, 0, 1]])
    ),
    "samples-picked": Objective(
        lambda f, ls: ls(f.mean(1)[[2, 0, 0, 1]], labels(f)[[2, 0, 0, 1], 0])
    ),
    "samples-masked": Objective(
        lambda f, ls: ls(
            f[:, 0][labels(f)[:, 0] > 0], labels(f)[labels(f)[:, 0] > 0, 0]
        )
    ),
    "samples-in-another-order": Objective(
        lambda f, ls: ls(f[:, 0].flip(0), labels(f)[:, 0])
    ),
    "samples-twice": Objective(
        lambda f, ls: ls(torch.cat([f[:, 0], f[:, -1]]), labels(f)[:, 0].repeat(2))
    ),
    "per-step": Objective(per_step),
    "per-sample": Objective(per_sample_loop),
    "per-token": Objective(per_token),
    "per-token-smoothing": Objective(per_token, ce(weight=WEIGHT, label_smoothing=0.1)),
    "pooled": Objective(lambda f, ls: ls(f.mean(1), labels(f)[:, 0])),
    "scaled": Objective(lambda f, ls: 0.5 * flat(f, ls)),
    "divided-by-the-count": Objective(
        lambda f, ls: flat_some(f, ls) / (some(f) >= 0).sum(), ce(reduction="sum")
    ),
    "temperature": Objective(lambda f, ls: flat(f / 0.7, ls)),
    "mse": Objective(flat_real, nn.MSELoss),
    "mse-everything": Objective(
        lambda f, ls: ls(f.flatten(), real(f).flatten()), nn.MSELoss
    ),
    "mse-masked": Objective(
        lambda f, ls: ls(f[spread(f, 5)], real(f)[spread(f, 5)]), nn.MSELoss
    ),
    "mse-as-many-as-samples": Objective(
        lambda f, ls: ls(f[spread(f, N)], real(f)[spread(f, N)]), nn.MSELoss
    ),
    "mse-time-first": Objective(
        lambda f, ls: ls(f.transpose(0, 1), real(f).transpose(0, 1)), nn.MSELoss
    ),
    "mse-classes-first": Objective(
        lambda f, ls: ls(f.movedim(-1, 0), real(f).movedim(-1, 0)), nn.MSELoss
    ),
    "mse-of-one-entry": Objective(
        lambda f, ls: ls(f[..., 0].flatten(), real(f)[..., 0].flatten()), nn.MSELoss
    ),
    "mse-squeezed": Objective(
        lambda f, ls: ls(f[:, :1, :1].squeeze(), real(f)[:, 0, 0]), nn.MSELoss
    ),
    "bce": Objective(
        lambda f, ls: ls(f.flatten(0, 1), soft(f).flatten(0, 1)), nn.BCEWithLogitsLoss
    ),
    "bce-masked": Objective(
        lambda f, ls: ls(f[..., 0][spread(f, 5)], soft(f)[..., 0][spread(f, 5)]),
        lambda: nn.BCEWithLogitsLoss(reduction="sum"),
    ),
    "bce-time-first": Objective(
        lambda f, ls: ls(unbatched(f), unbatched(soft(f))), nn.BCEWithLogitsLoss
    ),
    "nll": Objective(lambda f, ls: ls(f.flatten(0, 1), some(f).flatten()), nn.NLLLoss),
    "huber": Objective(flat_real, lambda: nn.HuberLoss(delta=2.0)),
    "kl": Objective(
        lambda f, ls: ls(f.flatten(0, 1), soft(f).flatten(0, 1)),
        lambda: nn.KLDivLoss(reduction="batchmean"),
    ),
    "poisson": Objective(
        lambda f, ls: ls(f.flatten(0, 1), real(f).abs().flatten(0, 1)),
        nn.PoissonNLLLoss,
    ),
}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows(name: str, t: int) -> None:
    """First order and the GGN's diagonals are right, whichever rows a loss sees."""
    assert_right(OBJECTIVES[name].row(t))


# Right in first order; there is no scalar loss whose Hessian could be taken
UNREDUCED = {
    "weighted-tokens": Objective(weighted_tokens, ce(reduction="none")),
    "mean-of-samples": Objective(
        lambda f, ls: ls(f.mT, labels(f)).sum(1).mean(), ce(reduction="none")
    ),
    "sum-of-everything": Objective(
        lambda f, ls: ls(f, real(f)).sum(), lambda: nn.MSELoss(reduction="none")
    ),
    **{
        name: Objective(
            lambda f, ls, of=of: of(ls(f.mT, labels(f)).mean(1)),
            ce(reduction="none"),
        )
        for name, of in {
            "sum-in-python": sum,
            "sum-of-parts": lambda x: torch.stack([y.mean() for y in x.split(3)]).sum(),
            "einsum": lambda x: torch.einsum("n,n->", x, real(x)),
            "one-sample": lambda x: x[1:2].mean(),
            "picked": lambda x: x.gather(0, torch.tensor([2])).squeeze(),
            "largest": lambda x: x.topk(1)[0].mean(),
            "largest-two": lambda x: x.topk(2)[0].mean(),
            "to-one-place": lambda x: x.new_zeros(1).index_add(
                0, torch.zeros(len(x), dtype=torch.long), x
            )[0],
        }.items()
    },
}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", UNREDUCED)
def test_reduced_after_the_loss(name: str, t: int) -> None:
    """Where the loss isn't reduced, first order is right, the GGN right or refused."""
    row = UNREDUCED[name].row(t)
    assert_right(row._replace(quantities=FIRST_ORDER))
    assert_right_or_refused(row._replace(quantities=GGN, says=r"Loss.*(mean|sum)"))


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", ["flatten", "time-first", "ignored", "mse", "bce"])
def test_sampled_columns(name: str, t: int) -> None:
    """What is drawn for rows averages to the exact diagonal."""
    row, count = OBJECTIVES[name].row(t), 1000
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    generator = drawing(0)
    drawn = extensions.DiagGGNMC(mc_samples=count, generator=generator)
    with row.around():
        value = row.run(model, loss, X)
        with backpack(drawn, extensions.DiagGGNExact()):
            value.backward()
    for key, p in parameters(model).items():
        error = (p.diag_ggn_mc - p.diag_ggn_exact).abs().max()
        assert error < 0.2 * p.diag_ggn_exact.max(), key


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", ["flatten", "time-first", "view", "per-step"])
def test_factors(name: str, t: int, sharing: str) -> None:
    """Kronecker factors do not depend on how a loss is given its rows."""
    factors = []
    for objective in (OBJECTIVES["transposed"], OBJECTIVES[name]):
        row = objective.row(t)
        model, loss, X = row.build()
        model, loss = extend(model), extend(loss)
        with row.around():
            value = row.run(model, loss, X) / (
                t if objective.function is per_step else 1
            )
            with backpack(extensions.KFLR(weight_sharing=sharing)):
                value.backward()
        factors.append({key: p.kflr for key, p in parameters(model).items()})
    assert_agree(*factors)


def assert_agree(expected: Dict, actual: Dict) -> None:
    """Assert that factors agree."""
    for key, value in expected.items():
        assert_agrees(actual[key], value, key)


# The model computes its loss


def body() -> Module:
    """Make the part of a model that predicts."""
    return nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, C))


class WithLoss(Module):
    """A model that gets targets and returns its loss, in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]):
        """Create the layers.

        Args:
            form: Function of scores and loss that gives what is returned.
        """
        super().__init__()
        self.body, self.loss, self.form = body(), nn.CrossEntropyLoss(), form

    def forward(self, i: Tensor, y: Optional[Tensor] = None) -> Any:
        """Predict, and compare with targets if there are any."""
        f = self.body(i)
        return self.form(f, None if y is None else flat_loss(self.loss, f, y))


def flat_loss(loss: Module, f: Tensor, y: Tensor) -> Tensor:
    """Compare tokens with targets."""
    return loss(f.flatten(0, 1), y.flatten())


class Output(dict):
    """What a model returns, whose entries are attributes, too."""

    __getattr__ = dict.__getitem__


FORMS: Dict[str, Tuple[Callable, Callable]] = {
    "loss": (lambda f, value: value, lambda out: out),
    "scores-and-loss": (lambda f, value: (f, value), lambda out: out[1]),
    "loss-and-scores": (lambda f, value: (value, f), lambda out: out[0]),
    "dictionary": (
        lambda f, value: {"loss": value, "logits": f},
        lambda out: out["loss"],
    ),
    "output": (lambda f, value: Output(loss=value, logits=f), lambda out: out.loss),
    "loss-of-one-number": (lambda f, value: value.reshape(1), lambda out: out),
    "loss-and-numbers": (
        lambda f, value: (value, {"accuracy": float(f.argmax(-1).sum())}),
        lambda out: out[0],
    ),
}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_loss_inside(form: str, t: int) -> None:
    """A model that computes its loss itself, whatever it returns."""
    make, take = FORMS[form]

    def value(model: Module, loss: Module, X: Tuple[Tensor, ...]) -> Tensor:
        f = torch.empty(*X[0].shape, C)
        return take(model(*X, labels(f)))

    row = Row(
        lambda: WithLoss(make),
        tokens(t),
        nn.CrossEntropyLoss,
        flat,
        predict=lambda m, X: m.body(*X),
        value=value,
    )
    assert_right(row)


FUNCTIONS: Dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda f: F.cross_entropy(f.flatten(0, 1), labels(f).flatten()),
    "cross-entropy-options": lambda f: F.cross_entropy(
        f.mT, some(f), WEIGHT, label_smoothing=0.2, reduction="sum"
    ),
    "keywords": lambda f: F.cross_entropy(target=labels(f), input=f.mT, ignore_index=1),
    "module": lambda f: nn.CrossEntropyLoss(WEIGHT)(f.mT, labels(f)),
    "scaled": lambda f: -F.cross_entropy(f.mT, soft(f).mT).div(-7),
    "mse": lambda f: F.mse_loss(f, real(f)),
    "mse-sum": lambda f: F.mse_loss(f, real(f), reduction="sum"),
    "huber": lambda f: F.huber_loss(f, real(f), delta=0.3),
    "smooth-l1": lambda f: F.smooth_l1_loss(f, real(f), beta=0.3),
    "bce-with-logits": lambda f: F.binary_cross_entropy_with_logits(
        f, soft(f), pos_weight=WEIGHT
    ),
    "poisson-nll": lambda f: F.poisson_nll_loss(f, soft(f), log_input=True),
    "gaussian-nll": lambda f: F.gaussian_nll_loss(f, real(f), soft(f), full=True),
    "two": lambda f: F.mse_loss(f, real(f)) + 0.5 * F.cross_entropy(f.mT, labels(f)),
    "each-sample": lambda f: sum(F.mse_loss(x, real(x)) for x in f) / len(f),
    "two-parts": lambda f: F.mse_loss(f[:, :1], real(f[:, :1]))
    + F.huber_loss(f[:, 1:], real(f[:, 1:])),
}


def computing(function: Callable[[Tensor], Tensor], t: int) -> Row:
    """Make a row with a model that computes a function of its prediction."""
    return Row(
        lambda: Lambda(
            lambda m, i, inside=False: function(m.body(i)) if inside else m.body(i),
            body=body(),
        ),
        tokens(t),
        objective=lambda f, _: function(f),
        value=lambda m, _, X: m(*X, inside=True),
    )


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_inside(name: str, t: int) -> None:
    """A model that computes its loss by functions is as good as one with modules."""
    assert_right(computing(FUNCTIONS[name], t))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="PyTorch 2.13")
@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "ignore_index": 1}])
def test_function_with_a_layer_inside(options: Dict, t: int) -> None:
    """A function of PyTorch that has a layer and the loss inside."""

    def forward(m: Module, i: Tensor, inside: bool = False) -> Tensor:
        h = m.body(i)
        if not inside:
            return F.linear(h, m.head)
        y = labels(h).flatten()
        return F.linear_cross_entropy(h.flatten(0, 1), m.head, y, **options)

    row = Row(
        lambda: Lambda(forward, body=body(), head=nn.Parameter(torch.randn(C, C))),
        tokens(t),
        objective=lambda f, _: F.cross_entropy(
            f.flatten(0, 1), labels(f).flatten(), **options
        ),
        value=lambda m, _, X: m(*X, inside=True),
    )
    assert_right(row)


NO_LOSSES: Dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda f: F.mse_loss(f, real(f)).exp(),
    "root": lambda f: F.mse_loss(f, real(f)).sqrt(),
    "square": lambda f: F.mse_loss(f, real(f)) ** 2,
    "product": lambda f: F.mse_loss(f, real(f)) * F.cross_entropy(f.mT, labels(f)),
    "weighted": lambda f: F.mse_loss(f, real(f), weight=soft(f)),
    "no-reduction": lambda f: F.mse_loss(f, real(f), reduction="none").sum(),
    "by-hand": lambda f: (f - real(f)).square().mean(),
}


@pytest.mark.parametrize("name", NO_LOSSES)
def test_functions_that_are_no_losses(name: str) -> None:
    """Second order needs a loss whose Hessian is known; a function of one is none."""
    row = computing(NO_LOSSES[name], 3)
    assert_refused(row, "DiagGGNExact", "extended loss", (AssertionError,))


@pytest.mark.parametrize("make", [nn.MSELoss, nn.SmoothL1Loss, nn.BCEWithLogitsLoss])
def test_loss_modules_inside(make: Callable[[], Module]) -> None:
    """A loss module whose values the prediction is computed from is a function."""

    def forward(m: Module, i: Tensor) -> Tensor:
        values = [[m.distance(z, p.expand_as(z)) for p in m.targets] for z in m.body(i)]
        return m.head(torch.stack([torch.stack(row) for row in values]))

    row = Row(
        lambda: Lambda(
            forward,
            body=body(),
            distance=make(),
            targets=soft(torch.zeros(2, 1, C)).to(F64),
            head=nn.Linear(2, 3),
        ),
        tokens(3),
    )
    assert_right(row)


@pytest.mark.parametrize("function", ["binary_cross_entropy", "nll_loss", "kl_div"])
def test_functions_of_probabilities(function: str) -> None:
    """Losses of what no longer is a score are right in first order."""
    of_scores = {
        "binary_cross_entropy": lambda f: F.binary_cross_entropy(f.sigmoid(), soft(f)),
        "nll_loss": lambda f: F.nll_loss(f.log_softmax(-1).mT, labels(f)),
        "kl_div": lambda f: F.kl_div(f.log_softmax(-1), soft(f), reduction="batchmean"),
    }[function]
    assert_right(computing(of_scores, 3)._replace(quantities=FIRST_ORDER))


class Dictionary(nn.CrossEntropyLoss):
    """A loss that returns a dictionary beside its value."""

    def forward(self, f: Tensor, y: Tensor) -> Tuple[Tensor, Dict]:
        """Compute loss and accuracy."""
        return super().forward(f, y), {"accuracy": (f.argmax(1) == y).sum()}


class OfShapeOne(nn.MSELoss):
    """A loss with an axis of one entry."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute it."""
        return super().forward(f, y).reshape(1)


class Scaled(Module):
    """A loss with a parameter, by which predictions are multiplied."""

    def __init__(self):
        """Create the parameter."""
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the cross-entropy of scaled scores."""
        return F.cross_entropy(f * self.scale, y)


class ByHand(Module):
    """A loss without a loss of PyTorch inside."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average in an axis of one entry."""
        return (f - y).square().mean().reshape(1)


class ByHandWithAParameter(Module):
    """The same, with a parameter by which predictions are multiplied."""

    def __init__(self):
        """Create the parameter."""
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Average."""
        return (f * self.scale - y).square().mean()


class ByHandWithMore(ByHand):
    """The same with something beside it."""

    def forward(self, f: Tensor, y: Tensor) -> Tuple[Tensor, Dict]:
        """Return a dictionary, too."""
        return super().forward(f, y), {"largest": (f - y).abs().max()}


class Prototypes(Module):
    """A loss with a layer: predictions are compared with learned prototypes."""

    def __init__(self):
        """Create prototypes and loss."""
        super().__init__()
        self.prototypes, self.loss = nn.Linear(C, C, bias=False), nn.CrossEntropyLoss()

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Compare."""
        return self.loss(self.prototypes(f), y)


def flat_first(f: Tensor, loss: Module) -> Tensor:
    """Take a loss out of what a module returns beside it."""
    return flat(f, loss)[0]


LOSS_MODULES = {
    "loss-and-dictionary": Objective(flat_first, Dictionary),
    "of-shape-one": Objective(lambda f, ls: flat_real(f, ls).sum(), OfShapeOne),
    "by-hand-of-shape-one": Objective(lambda f, ls: flat_real(f, ls).sum(), ByHand),
    "by-hand-and-dictionary": Objective(
        lambda f, ls: flat_real(f, ls)[0].sum(), ByHandWithMore
    ),
    "by-hand-with-a-parameter": Objective(flat_real, ByHandWithAParameter),
    "with-a-parameter": Objective(flat, Scaled),
    "with-a-layer": Objective(flat, Prototypes),
}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.filterwarnings("ignore:(?s).*its module is a loss:UserWarning")
@pytest.mark.parametrize("name", LOSS_MODULES)
def test_unusual_losses(name: str, t: int) -> None:
    """Loss modules that return more than a number, or have parameters.

    What those parameters get, if anything, adds up to their gradient.
    """
    row = LOSS_MODULES[name].row(t)
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    value = row.run(model, loss, X)
    with backpack(extensions.BatchGrad()):
        value.backward()
    for p in loss.parameters():
        assert_agrees(p.grad_batch.sum(0), p.grad)
    value = row.run(model, loss, X)
    with backpack(extensions.BatchJacobian()):
        value.backward()
    assert all(hasattr(p, "jacobian") for p in model.parameters())
    assert not any(hasattr(p, "jacobian") for p in loss.parameters())
    # weights depend on the gradients of all parameters, the loss's included
    of_each = [
        q for q, (_, share, _) in QUANTITIES.items() if not isinstance(share, OfAll)
    ]
    assert_right(row._replace(quantities=of_each))


# Several losses


def two(first: Callable[[], Module], second: Callable[[], Module]) -> Callable:
    """Make a function that makes two losses."""
    return lambda: nn.ModuleList([first(), second()])


SEVERAL = {
    "two-of-one-prediction": Objective(
        lambda f, ls: flat(f, ls[0]) + flat_real(f, ls[1]),
        two(nn.CrossEntropyLoss, nn.MSELoss),
    ),
    "two-stacked": Objective(
        lambda f, ls: torch.stack([flat(f, ls[0]), flat_real(f, ls[1])]).sum(),
        two(nn.CrossEntropyLoss, nn.MSELoss),
    ),
    "two-ways-to-flatten": Objective(
        lambda f, ls: flat(f, ls[0]) + ls[1](unbatched(f), unbatched(real(f))),
        two(nn.CrossEntropyLoss, nn.MSELoss),
    ),
    "two-parts": Objective(
        lambda f, ls: ls[0](f[:, 0], labels(f)[:, 0])
        + ls[1](f[:, 1:].flatten(0, 1), real(f)[:, 1:].flatten(0, 1)),
        two(nn.CrossEntropyLoss, nn.MSELoss),
    ),
    "masked-and-all": Objective(
        lambda f, ls: masked(lambda f: spread(f, N))(f, ls[0]) + flat(f, ls[1]),
        two(nn.CrossEntropyLoss, nn.CrossEntropyLoss),
    ),
    "weighted": Objective(
        lambda f, ls: 0.3 * flat(f, ls[0]) + 2.0 * flat_real(f, ls[1]),
        two(nn.CrossEntropyLoss, nn.MSELoss),
    ),
    "sum-and-mean": Objective(
        lambda f, ls: flat(f, ls[0]) + flat_some(f, ls[1]),
        two(ce(reduction="sum"), nn.CrossEntropyLoss),
    ),
    "difference": Objective(
        lambda f, ls: flat_real(f, ls[0]) + 0.5 * flat_real(-2.0 * f, ls[1]),
        two(nn.MSELoss, nn.MSELoss),
    ),
    "one-loss-called-twice": Objective(
        lambda f, ls: flat_real(f, ls) + flat_real(-2.0 * f, ls), nn.MSELoss
    ),
    "one-loss-called-twice-on-parts": Objective(
        lambda f, ls: ls(f[:, 0], labels(f)[:, 0]) + ls(f[:, 1], labels(f)[:, 1])
    ),
}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_losses(name: str, t: int) -> None:
    """Losses that are added, each with a factor and rows of its own."""
    assert_right(SEVERAL[name].row(t))


def errors(f: Tensor) -> Tensor:
    """Return squared errors, a sum for each sample."""
    return (f - real(f)).square().flatten(1).sum(1)


def surprises(f: Tensor, **options: Any) -> Tensor:
    """Return cross-entropies, a sum for each sample."""
    return F.cross_entropy(f.mT, labels(f), reduction="none", **options).sum(1)


def both(f: Tensor) -> Tuple[Tensor, Tensor]:
    """Return two losses."""
    return F.mse_loss(f, real(f)), F.cross_entropy(f.mT, labels(f))


def shares(f: Tensor) -> Tuple[Tensor, Tensor]:
    """Return what samples contribute to both."""
    return errors(f) / f.numel(), surprises(f) / f[..., 0].numel()


def weights_in(f: Tensor) -> Tensor:
    """Return the sum of the weights of all classes but the second."""
    return WEIGHT[labels(f)].sum() - WEIGHT[1] * (labels(f) == 1).sum()


IGNORING = {"weight": WEIGHT, "ignore_index": 1}
# Losses that a model weighs with parameters `s` [2], and the summands of samples
LEARNED: Dict[str, Tuple[Callable, Callable]] = {
    "uncertainty": (
        lambda s, f: (-s[0]).exp() * F.mse_loss(f, real(f)) + s[0],
        lambda s, f: (-s[0]).exp() * shares(f)[0],
    ),
    "standard-deviation": (
        lambda s, f: both(f)[0] / (2 * s[1] ** 2) + s[1].log(),
        lambda s, f: shares(f)[0] / (2 * s[1] ** 2),
    ),
    "mixture": (
        lambda s, f: s[1] * both(f)[0] + (1 - s[1]) * both(f)[1],
        lambda s, f: s[1] * shares(f)[0] + (1 - s[1]) * shares(f)[1],
    ),
    "sum-of-list": (
        lambda s, f: sum((-c).exp() * x + c for c, x in zip(s, both(f))),
        lambda s, f: sum((-c).exp() * x for c, x in zip(s, shares(f))),
    ),
    "stacked-terms": (
        lambda s, f: torch.stack(
            [(-c).exp() * x + c for c, x in zip(s, both(f))]
        ).mean(),
        lambda s, f: sum((-c).exp() * x / 2 for c, x in zip(s, shares(f))),
    ),
    "vector": (
        lambda s, f: ((-s).exp() * torch.stack(both(f)) + s).sum(),
        lambda s, f: sum((-c).exp() * x for c, x in zip(s, shares(f))),
    ),
    "as-it-is": (  # the very same tensor
        lambda s, f: s[0] * both(f)[0].to(f).double().contiguous().real
        + s[1] * both(f)[1].type_as(f).squeeze(),
        lambda s, f: s[0] * shares(f)[0] + s[1] * shares(f)[1],
    ),
    "vector-as-it-is": (
        lambda s, f: (s * torch.stack(both(f)).flatten().ravel().expand(3, 2)).sum(),
        lambda s, f: 3 * sum(c * x for c, x in zip(s, shares(f))),
    ),
    "vector-entries": (
        lambda s, f: (lambda x: s[0] * x[1] + x[0] / s[1])(torch.stack(both(f))),
        lambda s, f: s[0] * shares(f)[1] + shares(f)[0] / s[1],
    ),
    "one-after-the-other": (
        lambda s, f: (lambda a, b: a / s[:1] + s[:1] + s[1:] * b + s[1:])(*both(f))[0],
        lambda s, f: shares(f)[0] / s[0] + s[1] * shares(f)[1],
    ),
    "vectors-one-after-the-other": (
        lambda s, f: -(s * torch.stack(both(f)) + s - s.sin() + 2).mean(),
        lambda s, f: -sum(c * x / 2 for c, x in zip(s, shares(f))),
    ),
    "in-place": (
        lambda s, f: (s[:1] * both(f)[0]).add_(s[1:]).sub_(both(f)[1] * s[1:]).sum(),
        lambda s, f: s[0] * shares(f)[0] - s[1] * shares(f)[1],
    ),
    "joined": (
        lambda s, f: torch.cat([s[:1] * both(f)[0] + s[1], s[1:] * both(f)[1]]).sum(),
        lambda s, f: sum(c * x for c, x in zip(s, shares(f))),
    ),
    "joined-before": (
        lambda s, f: s[1] * torch.hstack([s[0] * x.view(1) for x in both(f)]).sum(),
        lambda s, f: s[0] * s[1] * sum(shares(f)),
    ),
    "dot-product": (
        lambda s, f: torch.stack(both(f)) @ s.exp() + s.sum(),
        lambda s, f: sum(c.exp() * x for c, x in zip(s, shares(f))),
    ),
    "dot-product-in-front": (
        lambda s, f: s[0] * torch.dot(s, torch.cat([x[None] for x in both(f)])),
        lambda s, f: s[0] * sum(c * x for c, x in zip(s, shares(f))),
    ),
    "dot-product-with-numbers": (
        lambda s, f: (s * torch.stack(both(f))) @ torch.tensor([0.5, 2]).to(f),
        lambda s, f: sum(a * c * x for a, c, x in zip((0.5, 2), s, shares(f))),
    ),
    "mean-of-each-class": (
        lambda s, f: (s[:1] * (f - real(f)).square().mean((0, 1)) + s[1]).sum(),
        lambda s, f: s[0] * errors(f) / f[..., 0].numel(),
    ),
    "twice": (
        lambda s, f: -(s[0] * (both(f)[0] / 3 - 2 * both(f)[1]) * s[1]),
        lambda s, f: -s[0] * s[1] * (shares(f)[0] / 3 - 2 * shares(f)[1]),
    ),
    "module": (
        lambda s, f: nn.MSELoss(reduction="sum")(f, real(f)) * s[0],
        lambda s, f: s[0] * errors(f),
    ),
    "by-hand": (
        lambda s, f: s[0] * (f - real(f)).square().sum() + s[1] * f.sin().mean(),
        lambda s, f: s[0] * errors(f) + s[1] * f.sin().flatten(1).sum(1) / f.numel(),
    ),
    "classes-with-weights": (
        lambda s, f: s[0] * F.cross_entropy(f.mT, labels(f), **IGNORING),
        lambda s, f: s[0] * surprises(f, **IGNORING) / weights_in(f),
    ),
    "smoothed": (
        lambda s, f: F.cross_entropy(
            f.flatten(0, 1), labels(f).flatten(), **IGNORING, label_smoothing=0.2
        ).div(s[1]),
        lambda s, f: surprises(f, **IGNORING, label_smoothing=0.2)
        / weights_in(f)
        / s[1],
    ),
    "likelihood": (
        lambda s, f: s[0] * F.nll_loss(unbatched(f), labels(f).T.flatten(), **IGNORING),
        lambda s, f: s[0]
        * F.nll_loss(f.mT, labels(f), **IGNORING, reduction="none").sum(1)
        / weights_in(f),
    ),
    "probabilities": (
        lambda s, f: s[0] * F.cross_entropy(f.mT, soft(f).mT, WEIGHT),
        lambda s, f: s[0]
        * F.cross_entropy(f.mT, soft(f).mT, WEIGHT, reduction="none").sum(1)
        / f[..., 0].numel(),
    ),
    "divergence": (
        lambda s, f: s[0] * F.kl_div(f.log_softmax(-1), soft(f), reduction="batchmean"),
        lambda s, f: s[0]
        * F.kl_div(f.log_softmax(-1), soft(f), reduction="none").sum((1, 2))
        / len(f),
    ),
    "picked": (  # uneven, and as many rows as samples
        lambda s, f: s[0] * F.mse_loss(f[spread(f, N)], real(f)[spread(f, N)]),
        lambda s, f: s[0]
        * ((f - real(f)).square().sum(2) * spread(f, N)).sum(1)
        / (N * f.shape[2]),
    ),
    "penalty": (
        lambda s, f: both(f)[0] * s.square().sum(),
        lambda s, f: shares(f)[0] * s.square().sum(),
    ),
}


def weighing(function: Callable) -> Module:
    """Make a model that computes its loss, with factors of its own."""
    torch.manual_seed(0)
    parts = {"token": nn.Embedding(5, 4), "head": nn.Linear(4, C)}
    model = Lambda(lambda m, i: function(m.s, m.predict(i)), **parts)
    model.s = nn.Parameter(torch.tensor([0.7, 1.3]))
    model.predict = lambda i: model.head(model.token(i).cumsum(1))
    return model.to(F64)


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", LEARNED)
def test_learned_factor(name: str, t: int) -> None:
    """A factor of a mean has the gradient of what each sample contributes to that."""
    function, summands = LEARNED[name]
    model, X = weighing(function), tokens(t)()
    params, terms = parameters(model), summands(model.s, model.predict(*X))
    rows = [
        torch.autograd.grad(x, list(params.values()), retain_graph=True) for x in terms
    ]
    total = torch.autograd.grad(model(*X), list(params.values()))
    quantities = "BatchGrad BatchL2Grad SumGradSquared Variance BatchDotGrad".split()
    exts = [getattr(extensions, quantity)() for quantity in quantities]
    with warnings.catch_warnings(), backpack(*exts):
        warnings.filterwarnings("ignore", "(?s).*belong to no sample")
        extend(model)(*X).backward()
    for (param_name, param), parts, gradient in zip(params.items(), zip(*rows), total):
        assert_agrees(param.grad, gradient, f"gradient of {param_name}")
        for quantity in quantities:
            field, share, _ = QUANTITIES[quantity]
            expected = share(torch.stack(parts))
            assert_agrees(getattr(param, field), expected, f"{field} of {param_name}")


def overwritten(s: Tensor, f: Tensor) -> Tensor:
    """Let something else stand where a sum was formed of."""
    x = 1 * f
    total = x.sum()
    x.detach().zero_()
    return s[0] * total


NO_SUMS: Dict[str, Callable] = {
    "root": lambda s, f: both(f)[0].sqrt() * s[0],
    "product": lambda s, f: both(f)[0] * both(f)[0] * s[0],
    "quotient": lambda s, f: s[0] / both(f)[0],
    "rounded": lambda s, f: both(f)[0].div(0.1, rounding_mode="floor") * s[0],
    "power": lambda s, f: both(f)[0] ** s[0],
    "clamped": lambda s, f: both(f)[0].clamp(max=1.0) * s[0],
    "shifted": lambda s, f: s[0] * (both(f)[0] + 0.5),
    "shifted-by-parameter": lambda s, f: s[0] * (both(f)[0] + s[1]),
    "dot-product-of-shifted": lambda s, f: torch.stack([both(f)[0] + s[0], both(f)[1]])
    @ s,
    "shifted-twice": lambda s, f: ((s * torch.stack(both(f)) + s) * 2 + 1) @ s,
    "stacked-with-a-constant": lambda s, f: (
        s * torch.stack([both(f)[0], torch.ones(())])
    ).sum(),
    "in-place": lambda s, f: s[0] * both(f)[0].mul_(2.0).add_(1.0),
    "of-nobody": lambda s, f: s[0] * torch.cat([f, torch.ones_like(f[:1])]).mean(),
    "overwritten": overwritten,
    "square-of-means": lambda s, f: (s[0] * f.mean((0, 1))).square().sum(),
}


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", NO_SUMS)
def test_factor_of_no_sum(name: str, t: int) -> None:
    """A factor of what is no sum of samples' terms is refused, by name."""
    model = extend(weighing(NO_SUMS[name]))
    value = model(*tokens(t)())
    with pytest.raises(NotImplementedError, match="have met in|where extensions can't"):
        with backpack(extensions.BatchGrad()):
            value.backward()


# The same in an extended loss, of a prediction and factors `s`; and their summands
IN_LOSSES: Dict[str, Tuple[Callable, Callable]] = {
    "uncertainty": LEARNED["uncertainty"],
    "penalty-of-temperature": (
        lambda s, f: F.mse_loss(f * s[0], real(f)) + 0.1 * s.square().sum(),
        lambda s, f: (f * s[0] - real(f)).square().flatten(1).sum(1) / f.numel(),
    ),
}


@pytest.mark.parametrize("name", IN_LOSSES)
def test_learned_factor_in_loss(name: str) -> None:
    """A loss module may have factors, and terms that belong to no sample."""
    function, summands = IN_LOSSES[name]
    model, X = language_model().to(F64), tokens(3)()
    loss = Lambda(lambda m, f: function(m.s, f), s=nn.Parameter(torch.rand(2))).to(F64)
    params = [*model.parameters(), *loss.parameters()]
    terms = summands(loss.s, model(*X))
    rows = [torch.autograd.grad(x, params, retain_graph=True) for x in terms]
    model, loss = extend(model), extend(loss)
    with pytest.warns(UserWarning, match="belong to no sample"):
        with backpack(extensions.BatchGrad()):
            loss(model(*X)).backward()
    for param, parts in zip(params, zip(*rows)):
        assert_agrees(param.grad_batch, torch.stack(parts), "individual gradients")


def test_curvature_of_learned_factor() -> None:
    """The GGN is that of a prediction, which a factor behind the loss has none of."""
    model = extend(weighing(LEARNED["mixture"][0]))
    value = model(*tokens(3)())
    with pytest.raises(NotImplementedError, match="'s' of"):
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            value.backward()


ONE_NUMBER: Dict[str, Tuple[Callable[..., Module], Tensor]] = {
    "mse": (nn.MSELoss, torch.tensor([[0.5]], dtype=F64)),
    "cross-entropy": (nn.CrossEntropyLoss, torch.tensor([1])),
    "binary": (nn.BCEWithLogitsLoss, torch.ones(1, 1, dtype=F64)),
}


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_one_number_is_a_scalar(name: str) -> None:
    """A loss of one sample that is not reduced has the curvature of its sum."""
    make, y = ONE_NUMBER[name]
    outputs = C if y.dim() == 1 else 1
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).to(F64)
    model, X, found = extend(model), torch.rand(1, 4, dtype=F64), []
    for reduction in ("none", "sum"):
        exts = extensions.DiagGGNExact(), extensions.KFLR(), extensions.DiagHessian()
        with backpack(*exts):
            extend(make(reduction=reduction))(model(X), y).backward()
        fields = [ext.savefield for ext in exts]
        found.append([[getattr(p, f) for p in model.parameters()] for f in fields])
    assert_agrees(*found)


OTHER_TERMS = {
    "function": lambda f: F.mse_loss(f, real(f)),
    "by-hand": lambda f: (f - real(f)).pow(2).mean(),
    "flattened": lambda f: F.cross_entropy(f.flatten(0, 1), labels(f).flatten()),
    "scaled": lambda f: 0.1 * F.mse_loss(f, real(f)),
    "penalty-of-scores": lambda f: 1e-3 * f.logsumexp(-1).pow(2).mean(),
    "entropy": lambda f: (f.softmax(-1) * f.log_softmax(-1)).sum(-1).mean(),
    "module": lambda f: nn.HuberLoss()(f, real(f)),
}


@pytest.mark.parametrize("name", OTHER_TERMS)
def test_term_without_an_extended_loss(name: str) -> None:
    """First order sees every term; the GGN's missing curvature is refused or said."""
    term = OTHER_TERMS[name]
    row = Objective(lambda f, ls: flat(f, ls) + term(f)).row(3)
    assert_right(row._replace(quantities=FIRST_ORDER))
    for quantity in (*GGN, "KFLR"):
        assert_said(row, quantity)


def assert_said(row: Row, quantity: str) -> None:
    """Assert that a quantity is refused or warned about, with the way out."""
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    value, said = row.run(model, loss, X), []
    options = {"weight_sharing": "expand"} if quantity == "KFLR" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with backpack(getattr(extensions, quantity)(**options)):
                value.backward()
        except (*REFUSALS, AssertionError) as error:
            said.append(str(error))
    said += [str(warning.message) for warning in caught]
    assert any("extend" in s and "loss" in s.lower() for s in said), said


def test_term_of_a_part_that_is_not_extended() -> None:
    """A term that no extended parameter is behind takes nothing away."""
    head = nn.Linear(4, C).to(F64)
    x = torch.randn(N, 4, dtype=F64)
    row = Objective(lambda f, ls: flat(f, ls) + head(x).pow(2).mean()).row(3)
    assert_right(row)


# Prediction and target swapped


SWAPPED = {
    "mse": nn.MSELoss,
    "huber": lambda: nn.HuberLoss(delta=2.0),
    "smooth-l1": nn.SmoothL1Loss,
    "bce": nn.BCEWithLogitsLoss,
    "kl": lambda: nn.KLDivLoss(reduction="batchmean"),
}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-a-right-call"])
@pytest.mark.parametrize("quantity", ["DiagGGNExact", "BatchDiagGGNExact"])
@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments(name: str, quantity: str, beside: bool) -> None:
    """A loss that gets the target first is told so."""

    def objective(f: Tensor, loss: Module) -> Tensor:
        value = loss(real(f).softmax(1), f.sigmoid())
        return value + loss(f.log_softmax(1), real(f).softmax(1)) if beside else value

    row = Row(lambda: nn.Linear(4, C), randn(4), SWAPPED[name], objective)
    says = r"Loss.*(prediction|first|input ?0|argument|swap|target)"
    assert_refused(row, quantity, says)
    assert_right_or_refused(row._replace(quantities=FIRST_ORDER, says=says))


# One convention for the empirical Fisher: c Σₙ ∇ℓₙ ∇ℓₙᵀ for a loss c Σₙ ℓₙ


def own_loss(f: Tensor, y: Tensor) -> Tensor:
    """Average a convex loss over samples."""
    return torch.log(torch.cosh(f - y)).sum() / len(f)


def tokens_of(f: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
    """Make two tokens of each sample."""
    return torch.stack([f, -f.sin()], 2), torch.stack([y, y.flip(0)], 1)


class OfTokens(nn.CrossEntropyLoss):
    """A loss that prepares what it gets."""

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        """Call the loss that it is derived from."""
        return super().forward(*tokens_of(f, y))


def masked_mean(m: Module, f: Tensor, y: Tensor, power: int = 0) -> Tensor:
    """Average over some of the terms, as they are or with weights of their own."""
    terms = F.cross_entropy(f, y, reduction="none") ** (1 + power)
    mask = torch.tensor([1, 0, 1, 1]).to(f)
    return (terms * mask).sum() / mask.sum()


INSIDE: Dict[str, Tuple[Callable, float]] = {  # losses that call others, and c
    "tokens": (lambda m, f, y: m.ce(*tokens_of(f, y)), 1 / (2 * N)),
    "ignored": (
        lambda m, f, y: F.cross_entropy(f, y, ignore_index=int(y[0])),
        1 / int((classes(torch.empty(N, C)) != classes(torch.empty(N, C))[0]).sum()),
    ),
    "weight": (
        lambda m, f, y: F.cross_entropy(f, y, weight=WEIGHT),
        1 / float(WEIGHT[classes(torch.empty(N, C))].sum()),
    ),
    "mse": (lambda m, f, y: F.mse_loss(f.sin(), real(f)), 1 / (N * C)),
    "nll": (lambda m, f, y: F.nll_loss(f.log_softmax(1), y), 1 / N),
    "half": (lambda m, f, y: 0.5 * m.ce(f, y), 0.5 / N),
    "divided": (lambda m, f, y: F.cross_entropy(f, y, reduction="sum") / 7, 1 / 7),
    "negative": (lambda m, f, y: -(-m.ce(f, y)).view(1).sum(), 1 / N),
    "masked": (masked_mean, 1 / 3),
    "two": (lambda m, f, y: (m.ce(f, y) + m.ce(f.sin(), y)) / 2, 0.5 / N),
    # what these do not tell
    "other-factors": (lambda m, f, y: m.ce(f, y) + F.mse_loss(f, real(f)), 1 / N),
    "other-terms": (lambda m, f, y: F.mse_loss(f, real(f)) + own_loss(f, 0), 1 / N),
    "other-weights": (lambda m, f, y: masked_mean(m, f, y, 1), 1 / N),
    "zero": (lambda m, f, y: 0 * m.ce(f, y), 1 / N),
}

FISHER: Dict[str, Tuple[Objective, float]] = {  # with the factor c of 4 samples
    "cross-entropy": (
        Objective(lambda f, ls: ls(f, classes(f))),
        1 / N,
    ),
    "cross-entropy-sum": (
        Objective(lambda f, ls: ls(f, classes(f)), ce(reduction="sum")),
        1.0,
    ),
    "cross-entropy-ignored": (
        Objective(
            lambda f, ls: ls(f, classes(f).index_fill(0, torch.tensor([1]), -100))
        ),
        1 / (N - 1),
    ),
    "cross-entropy-weight": (
        Objective(lambda f, ls: ls(f, classes(f)), ce(weight=WEIGHT)),
        1 / float(WEIGHT[classes(torch.empty(N, C))].sum()),
    ),
    "cross-entropy-weight-sum": (
        Objective(lambda f, ls: ls(f, classes(f)), ce(weight=WEIGHT, reduction="sum")),
        1.0,
    ),
    "cross-entropy-smoothing": (
        Objective(lambda f, ls: ls(f, classes(f)), ce(label_smoothing=0.2)),
        1 / N,
    ),
    "cross-entropy-soft": (Objective(lambda f, ls: ls(f, soft(f))), 1 / N),
    "mse": (Objective(lambda f, ls: ls(f, real(f)), nn.MSELoss), 1 / (N * C)),
    "mse-sum": (
        Objective(lambda f, ls: ls(f, real(f)), lambda: nn.MSELoss(reduction="sum")),
        1.0,
    ),
    "bce": (
        Objective(lambda f, ls: ls(f, soft(f)), nn.BCEWithLogitsLoss),
        1 / (N * C),
    ),
    "bce-sum": (
        Objective(
            lambda f, ls: ls(f, soft(f)),
            lambda: nn.BCEWithLogitsLoss(reduction="sum"),
        ),
        1.0,
    ),
    "bce-weight": (
        Objective(
            lambda f, ls: ls(f, soft(f)), lambda: nn.BCEWithLogitsLoss(weight=WEIGHT)
        ),
        1 / (N * C),
    ),
    "huber": (Objective(lambda f, ls: ls(f, real(f)), nn.HuberLoss), 1 / (N * C)),
    "kl-batchmean": (
        Objective(
            lambda f, ls: ls(f, soft(f)), lambda: nn.KLDivLoss(reduction="batchmean")
        ),
        1 / N,
    ),
    "poisson": (
        Objective(lambda f, ls: ls(f, real(f).abs()), nn.PoissonNLLLoss),
        1 / (N * C),
    ),
    "nll": (
        Objective(lambda f, ls: ls(f.log_softmax(1), classes(f)), nn.NLLLoss),
        1 / N,
    ),
    "nll-weight": (
        Objective(
            lambda f, ls: ls(f.log_softmax(1), classes(f)),
            lambda: nn.NLLLoss(weight=WEIGHT),
        ),
        1 / float(WEIGHT[classes(torch.empty(N, C))].sum()),
    ),
    "nll-ignored": (
        Objective(
            lambda f, ls: ls(
                f.log_softmax(1), classes(f).index_fill(0, torch.tensor([1]), -100)
            ),
            nn.NLLLoss,
        ),
        1 / (N - 1),
    ),
    "own": (
        Objective(
            lambda f, ls: ls(f, real(f)),
            lambda: Lambda(lambda m, f, y: own_loss(f, y), reduction="mean"),
        ),
        1 / N,
    ),
    "own-sum": (
        Objective(
            lambda f, ls: ls(f, real(f)),
            lambda: Lambda(lambda m, f, y: len(f) * own_loss(f, y), reduction="sum"),
        ),
        1.0,
    ),
    **{
        f"inside-{name}": (
            Objective(
                lambda f, ls: ls(f, classes(f)),
                lambda own=own: Lambda(own, reduction="mean", ce=ce()()),
            ),
            factor,
        )
        for name, (own, factor) in INSIDE.items()
    },
    "inside-subclass": (Objective(lambda f, ls: ls(f, classes(f)), OfTokens), 1 / 8),
    "inside-sum": (
        Objective(
            lambda f, ls: ls(f, classes(f)),
            lambda: Lambda(lambda m, f, y: F.cross_entropy(f, y), reduction="sum"),
        ),
        1.0,
    ),
}


@pytest.mark.parametrize("options", [{}, {"reduction": None}, {"reduction": "tokens"}])
@pytest.mark.parametrize("ext", ["DiagGGNMC", "BatchDiagGGNMC", "KFAC", "EKFAC"])
def test_empirical_fisher_of_an_unknown_factor(ext: str, options: dict) -> None:
    """Whether a loss of one's own is a mean or a sum is not guessed."""
    model = extend(nn.Linear(4, C).to(F64))
    loss = extend(Lambda(lambda m, f, y: own_loss(f, y), **options))
    value = loss(model(torch.ones(N, 4, dtype=F64)), torch.zeros(N, C, dtype=F64))
    quantity = getattr(extensions, ext)(fisher_type="empirical")
    says = "Lambda.*'empirical'.*attribute `reduction`"
    with backpack(quantity), pytest.raises(ValueError, match=says):
        value.backward()


@pytest.mark.parametrize("name", FISHER)
def test_empirical_fisher(name: str) -> None:
    """Its diagonal is (1/c) Σₙ gₙ², with the summands gₙ of the gradient."""
    objective, factor = FISHER[name]
    row = Row(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, C)),
        randn(4),
        objective.loss,
        objective.function,
    )
    model, loss, X = row.build()
    model, loss = extend(model), extend(loss)
    exts = (
        extensions.SumGradSquared(),
        extensions.DiagGGNMC(fisher_type="empirical"),
        extensions.BatchDiagGGNMC(fisher_type="empirical"),
    )
    with backpack(*exts):
        row.run(model, loss, X).backward()
    for key, p in parameters(model).items():
        assert_agrees(p.diag_ggn_mc, p.sum_grad_squared / factor, key)
        assert_agrees(p.diag_ggn_mc_batch.sum(0), p.diag_ggn_mc, key)


def test_compute_reads_all_quantities() -> None:
    """The fields of a flattened loss do not depend on what else is computed."""
    row = OBJECTIVES["flatten"].row(3)
    together = parameters(compute(row, [*FIRST_ORDER, *GGN]))
    alone = parameters(compute(row, ["BatchDiagGGNExact"]))
    for key, p in alone.items():
        assert_agrees(p.diag_ggn_exact_batch, together[key].diag_ggn_exact_batch, key)
