"""The table layers × quantities: frozen, and each of its cells computed.

The documentation shows the same table. After a change that is meant,
``python test/test_support_matrix.py`` writes ``support_matrix.txt`` anew. Whether
values are right is tested elsewhere; here each cell keeps its word: the rule that it
names computes a result for every parameter, or the refusal that it announces is raised.
"""

from functools import partial
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Set,
    Tuple,
    Type,
)

import pytest
import support
import torch
from cases import F64, LogCosh, Through, classes, like, make_extension
from support import OTHER, OTHER_LOSS, OTHER_PLAIN, Rule
from test_derivatives import CASES, ExpScale
from test_module_rules import Gate, Power
from torch import Tensor, nn
from torch.nn import Module, Sequential

from backpack import backpack, extend, extensions
from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseParameterDerivatives,
)
from backpack.core.derivatives.generic_loss import GenericLossDerivatives
from backpack.core.table import LAYERS, LOSSES, find_loss
from backpack.custom_module.branching import Parallel
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.engine.backward.turn import Turn
from backpack.engine.nodes.uses import Use
from backpack.extensions.secondorder import walk

FROZEN = Path(__file__).with_name("support_matrix.txt")
LAYER_CELLS, LOSS_CELLS = support.of_layers(), support.of_losses()


def as_text() -> str:
    """Write both tables: a letter for each rule, and the number of a note."""
    notes: List[str] = []
    lines = ["Rules"]
    lines += [f"  {rule.name[0]} {rule.value}" for rule in Rule]
    lines += ["", "Columns"]
    names = [quantity.__name__ for quantity in support.QUANTITIES]
    lines += [f"  {number:2} {name}" for number, name in enumerate(names, start=1)]
    for title, matrix in (("Layers", LAYER_CELLS), ("Losses", LOSS_CELLS)):
        header = "".join(f"{number:<4}" for number in range(1, len(names) + 1))
        lines += ["", f"{title:<36}{header}".rstrip()]
        for name, row in matrix.items():
            cells = []
            for cell in row.values():
                if cell.note and cell.note not in notes:
                    notes.append(cell.note)
                number = notes.index(cell.note) + 1 if cell.note else ""
                cells.append(f"{cell.rule.name[0]}{number}".ljust(4))
            lines.append(f"  {name:<34}{''.join(cells)}".rstrip())
    lines += ["", "Notes"]
    lines += [f"  {number} {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join(lines) + "\n"


def test_table_is_as_frozen():
    """Nothing appears in the table, or disappears from it, unnoticed."""
    assert as_text() == FROZEN.read_text(), (
        "The table of layers and quantities has changed. If that is meant, run "
        "`python test/test_support_matrix.py`."
    )


def test_table_holds_everything():
    """Each quantity, layer and loss is in the table; each blank has a reason."""
    names = [quantity.__name__ for quantity in support.QUANTITIES]
    # HBP is what KFAC, KFLR and KFRA have in common
    assert sorted(names) == sorted(set(extensions.__all__) - {"HBP"})
    assert set(LAYER_CELLS) - {OTHER, OTHER_PLAIN} == {cls.__name__ for cls in LAYERS}
    assert set(LOSS_CELLS) - {OTHER_LOSS} == {cls.__name__ for cls in LOSSES}
    for row in [*LAYER_CELLS.values(), *LOSS_CELLS.values()]:
        assert list(row) == names
        assert all(cell.note for cell in row.values() if cell.rule is Rule.REFUSED)


# Every cell of the layers


class Logarithm(nn.Module):
    """Multiplies with a logarithm, an operation without a formula."""

    def __init__(self) -> None:
        """Make the factors."""
        super().__init__()
        self.factor = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the first two entries of each row of ``[N, i]``."""
        return torch.special.xlog1py(x[:, :2], self.factor)


class Setting(NamedTuple):
    """A layer in a small model: a chain of modules that all quantities can walk.

    Attributes:
        row: Row of the table.
        layer: Builds the layer.
        inputs: Builds the layer's inputs.
        has_formula: Whether a formula is known for each of its operations.
    """

    row: str
    layer: Callable[[], Module]
    inputs: Callable[[], Tuple[Tensor, ...]]
    has_formula: bool = False

    def build(self) -> Tuple[Module, Module, Tensor]:
        """Put layers with parameters before and behind the layer.

        Returns:
            Model, layer and input.
        """
        layer, inputs = self.layer().to(F64).eval(), self.inputs()
        with torch.no_grad():
            output = layer(*inputs)
        modules = [layer]
        if inputs[0].is_floating_point():
            before = [_producer(inputs[0], x) for x in inputs]
            modules = [*before, layer]
            if len(before) > 1:
                modules = [Parallel(*before, merge_module=layer)]
        if isinstance(output, tuple):
            modules.append(ReduceTuple())
            output = output[0]
        modules += [nn.Flatten(), nn.Linear(output[0].numel(), 3)]
        return Sequential(*modules).to(F64), layer, inputs[0]


def _producer(x: Tensor, y: Tensor) -> Module:
    linear = nn.Linear(x[0].numel(), y[0].numel())
    return Sequential(nn.Flatten(), linear, nn.Unflatten(1, y.shape[1:]))


def randn(*shape: int) -> Callable[[], Tuple[Tensor, ...]]:
    """Make a thunk for a normal input."""
    return lambda: (torch.randn(shape, dtype=F64),)


def indices(*values: Any) -> Callable[[], Tuple[Tensor, ...]]:
    """Make a thunk for an input of integers."""
    return lambda: (torch.tensor(values),)


def recurrent(cls: Type[Module]) -> Setting:
    """Make a row for a recurrent layer, on a single time step."""
    layer = partial(cls, 2, 2, batch_first=True)
    return Setting(cls.__name__, layer, randn(3, 1, 2))


OWN = [
    *[recurrent(cls) for cls in (nn.RNN, nn.LSTM, nn.GRU)],
    Setting("Embedding", partial(nn.Embedding, 4, 2), indices(0, 2, 2)),
    Setting("Hardsigmoid", nn.Hardsigmoid, randn(3, 4)),
    *[
        Setting(f"{name}{d}d", partial(getattr(nn, f"{name}{d}d"), 1), randn(*shape))
        for d, shape in [(1, (2, 2, 3)), (2, (2, 1, 3, 2)), (3, (2, 1, 2, 3, 2))]
        for name in ("CircularPad", "ReflectionPad", "ReplicationPad")
    ],
    *[
        Setting(f"ConstantPad{d}d", lambda cls=cls: cls(1, 2.0), randn(2, *[1] * d, 2))
        for d, cls in [(1, nn.ConstantPad1d), (3, nn.ConstantPad3d)]
    ],
    Setting(OTHER, partial(Power, 3), randn(3, 3), has_formula=True),
    Setting(OTHER, partial(nn.RNNCell, 3, 2), randn(3, 3), has_formula=True),
    Setting(OTHER, Logarithm, randn(3, 3)),
    Setting(OTHER_PLAIN, partial(nn.Softmin, 1), randn(3, 4)),
    Setting(OTHER_PLAIN, partial(nn.LocalResponseNorm, 2), randn(3, 4, 2)),
]


def settings() -> Iterator[Setting]:
    """Take own settings, and the first one that a layer's derivatives are tested in."""
    yield from OWN
    found = {setting.row for setting in OWN}
    for case in CASES:
        cls = type(case.module())
        if cls in LAYERS and cls.__name__ not in found:
            found.add(cls.__name__)
            inputs = case.inputs or randn(*case.shape)
            yield Setting(cls.__name__, case.module, inputs)


SETTINGS = list(settings())


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Dict[Module, Set[Rule]]:
    """Watch which rules compute something on a module."""
    watched: Dict[Module, Set[Rule]] = {}

    def note(module: Module, rule: Rule) -> None:
        watched.setdefault(module, set()).add(rule)

    def generic(use: Use, *args: Any) -> Any:
        note(use.owner.module, Rule.GENERIC)
        return originals[0](use, *args)

    def products(use: Use, *args: Any) -> Any:
        before = watched.pop(use.owner.module, set())
        found = originals[1](use, *args)
        if any(x is not None for x in found) and use.owner.module not in watched:
            note(use.owner.module, Rule.FAST)
        for rule in before:
            note(use.owner.module, rule)
        return found

    def freeze_call(its_turn: Turn) -> Module:
        derivatives = type(its_turn.row.derivatives)
        generic = derivatives in (BaseDerivatives, BaseParameterDerivatives)
        note(its_turn.module, Rule.GENERIC if generic else Rule.MODULE)
        return originals[2](its_turn)

    places = [
        (Use, "_generic", generic),
        (Use, "products", products),
        (walk, "freeze_call", freeze_call),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, replacement in places:
        monkeypatch.setattr(owner, name, replacement)
    return watched


def run(
    model: Module, loss: Module, x: Tensor, y: Tuple[Tensor, ...], ext: Any
) -> None:
    """Run a backward pass for one extension; see that each parameter gets a value."""
    with backpack(ext):
        loss(model(x), *y).backward()
    for param in model.parameters():
        value = getattr(param, ext.savefield)
        if callable(value):
            value = value(torch.ones_like(param))
            assert value.shape == param.shape
        if isinstance(ext, extensions.BatchFactors):
            value = value.individual()
        for tensor in value if isinstance(value, list) else [value]:
            assert tensor.dtype == F64 and tensor.isfinite().all()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.row)
def test_cells_of_layers(setting: Setting, rules: Dict[Module, Set[Rule]]):
    """Each quantity is computed on the layer by the rule of its cell, or refused."""
    model, layer, x = setting.build()
    loss, y = extend(nn.CrossEntropyLoss()), (torch.arange(len(x)) % 3,)
    extend(model)
    for quantity in support.QUANTITIES:
        cell = LAYER_CELLS[setting.row][quantity.__name__]
        rules.clear()
        if cell.rule is Rule.REFUSED:
            with pytest.raises(NotImplementedError, match="known to be linear in its"):
                run(model, loss, x, y, make_extension(quantity.__name__))
        else:
            run(model, loss, x, y, make_extension(quantity.__name__))
            expected = set() if cell.rule is Rule.AUTOGRAD else {cell.rule}
            if setting.has_formula and "like linear maps" in cell.note:
                expected = {Rule.FAST}
            assert rules.get(layer, set()) == expected, quantity.__name__


def test_every_row_of_layers_is_computed():
    """There is a setting for each row."""
    assert {setting.row for setting in SETTINGS} == set(LAYER_CELLS)


# Every cell of the losses

LOSS_SETTINGS = [
    ("CrossEntropyLoss", nn.CrossEntropyLoss, classes),
    ("MSELoss", nn.MSELoss, like),
    ("BCEWithLogitsLoss", nn.BCEWithLogitsLoss, lambda p: (torch.rand_like(p),)),
    (OTHER_LOSS, nn.HuberLoss, like),
    (OTHER_LOSS, LogCosh, like),
]


@pytest.mark.parametrize("row, make, targets", LOSS_SETTINGS)
def test_cells_of_losses(
    row: str, make: Callable[[], Module], targets: Callable[[Tensor], Tuple]
):
    """Each quantity starts at the loss by the rule of its cell."""
    for quantity in support.QUANTITIES:
        cell = LOSS_CELLS[row][quantity.__name__]
        model = extend(Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(F64))
        x = torch.randn(3, 4, dtype=F64)
        loss = make()
        generic = isinstance(find_loss(loss).derivatives, GenericLossDerivatives)
        if cell.rule is not Rule.AUTOGRAD:
            extend(loss)
            assert cell.rule is (Rule.GENERIC if generic else Rule.FAST)
        run(model, loss, x, targets(model(x)), make_extension(quantity.__name__))


def test_every_row_of_losses_is_computed():
    """There is a setting for each row."""
    assert {row for row, *_ in LOSS_SETTINGS} == set(LOSS_CELLS)


# Notes: what happens where their condition is not met

BATCH_NORMS = [
    (f"BatchNorm{d}d", partial(getattr(nn, f"BatchNorm{d}d"), 2), randn(3, 2, *[2] * d))
    for d in (1, 2, 3)
]


@pytest.mark.parametrize("row, layer, inputs", BATCH_NORMS)
def test_note_on_training_mode(row: str, layer: Callable, inputs: Callable):
    """Batch normalization in training mode is refused where samples matter."""
    for quantity in support.QUANTITIES:
        allowed = quantity in (extensions.HMP, extensions.GGNMP)
        note = LAYER_CELLS[row][quantity.__name__].note
        assert ("training mode" in note) != allowed
        model, batch_norm, x = Setting(row, layer, inputs).build()
        loss, y = extend(nn.CrossEntropyLoss()), (torch.arange(len(x)) % 3,)
        extend(model).train()
        if quantity is extensions.BatchGrad:
            with pytest.warns(UserWarning, match="training mode"):
                run(model, loss, x, y, make_extension(quantity.__name__))
        elif allowed:
            run(model, loss, x, y, make_extension(quantity.__name__))
        else:
            with pytest.raises(NotImplementedError, match="training mode"):
                run(model, loss, x, y, make_extension(quantity.__name__))


SHARED_WEIGHTS = [
    Setting("Linear", partial(nn.Linear, 2, 3), randn(3, 2, 2)),
    Setting("Embedding", partial(nn.Embedding, 4, 2), indices([0, 1], [2, 2], [3, 0])),
    *[
        Setting(cls.__name__, partial(cls, 2, 2, batch_first=True), randn(3, 2, 2))
        for cls in (nn.RNN, nn.LSTM, nn.GRU)
    ],
    *[
        Setting(
            f"{name}{d}d",
            partial(getattr(nn, f"{name}{d}d"), 2, 2, 1, groups=2),
            randn(3, 2, *[2] * d),
        )
        for name in ("Conv", "ConvTranspose")
        for d in (1, 2, 3)
    ],
    Setting(OTHER, lambda: Through(nn.Linear(2, 3), matmul), randn(3, 2, 2)),
]


def matmul(layer: Module, x: Tensor) -> Tensor:
    """Multiply with a layer's weight, without a call of the layer."""
    return x @ layer.weight.T + layer.bias


@pytest.mark.parametrize(
    "setting, name",
    [
        pytest.param(setting, name, id=f"{setting.row}-{name}")
        for setting in SHARED_WEIGHTS
        for name in ("KFAC", "KFLR", "KFRA")
        if (setting.row, name) != (OTHER, "KFRA")
    ],
)
def test_note_on_weight_sharing(setting: Setting, name: str):
    """Ambiguous Kronecker factors are refused, unless the user chooses."""
    quantity = getattr(extensions, name)
    assert "weight_sharing=" in LAYER_CELLS[setting.row][name].note
    for choice in (None, "expand", "reduce"):
        model, _, x = setting.build()
        loss, y = extend(nn.CrossEntropyLoss()), (torch.arange(len(x)) % 3,)
        extend(model)
        if choice is None:
            with pytest.raises(NotImplementedError, match="weight_sharing='expand'"):
                run(model, loss, x, y, make_extension(quantity.__name__))
        else:
            run(model, loss, x, y, quantity(weight_sharing=choice))


def residual() -> Module:
    """Build a model with a sum of branches that stem from the same output."""
    block = Parallel(nn.Identity(), nn.Tanh())
    return Sequential(nn.Linear(3, 3), block, nn.Linear(3, 3)).to(F64)


def two_inputs() -> Tuple[Tensor, Tensor]:
    """Draw two inputs."""
    return randn(3, 2)() + randn(3, 2)()


@pytest.mark.parametrize(
    "row, model",
    [
        ("SumModule", residual),
        (OTHER, lambda: Setting(OTHER, BILINEAR, two_inputs).build()[0]),
        (OTHER_PLAIN, lambda: Setting(OTHER, Gate, two_inputs).build()[0]),
    ],
)
def test_note_on_kfra_and_branches(row: str, model: Callable[[], Module]):
    """KFRA refuses to average over the batch where branches interact; KFLR works."""
    assert "average over the batch" in LAYER_CELLS[row]["KFRA"].note
    loss, y = extend(nn.CrossEntropyLoss()), (torch.arange(3),)
    chain = extend(model())
    x = torch.randn(3, 3 if row == "SumModule" else 2, dtype=F64)
    run(chain, loss, x, y, extensions.KFLR())
    with pytest.raises(NotImplementedError, match="how .* interact"):
        run(chain, loss, x, y, extensions.KFRA())


BILINEAR = partial(nn.Bilinear, 2, 2, 3)
ODD_MODULES = [
    ("modules inside", ExpScale, randn(3, 3), "walks from module to module"),
    (
        "which it can't for EmbeddingBag",
        partial(nn.EmbeddingBag, 4, 2),
        indices([0, 1], [3, 3], [1, 0]),
        "_embedding_bag_backward",
    ),
]


@pytest.mark.parametrize("note, layer, inputs, error", ODD_MODULES)
def test_notes_on_other_modules(
    note: str, layer: Callable, inputs: Callable, error: str
):
    """What is odd about a module is refused where a note says so, fine elsewhere."""
    for quantity in support.QUANTITIES[:-1]:
        model, _, x = Setting(OTHER, layer, inputs).build()
        loss, y = extend(nn.CrossEntropyLoss()), (torch.arange(len(x)),)
        extend(model)
        if note in LAYER_CELLS[OTHER][quantity.__name__].note:
            with pytest.raises(NotImplementedError, match=error):
                run(model, loss, x, y, make_extension(quantity.__name__))
        else:
            run(model, loss, x, y, make_extension(quantity.__name__))


def test_every_note_is_tested():
    """A condition that is new to the table needs a test above."""
    tested = ["training mode", "weight_sharing=", "average over the batch"]
    tested += ["like linear maps"]
    tested += [note for note, *_ in ODD_MODULES]
    cells = [cell for row in LAYER_CELLS.values() for cell in row.values()]
    cells += [cell for row in LOSS_CELLS.values() for cell in row.values()]
    for cell in cells:
        known = any(part in cell.note for part in tested)
        assert known or not cell.note or cell.rule is Rule.REFUSED


if __name__ == "__main__":
    FROZEN.write_text(as_text())
