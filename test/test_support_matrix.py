"""The table layers × quantities: frozen, and each of its cells computed.

The documentation shows the same table. After a change that is meant,
``python test/test_support_matrix.py`` writes ``support_matrix.txt`` anew. Whether
values are right is tested elsewhere; here each cell keeps its word: the rule that it
names computes a result for every parameter, or the refusal that it announces is raised.
"""

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple, Type

import pytest
import torch
from cases import F64, LogCosh, classes, layer_case, like
from test_derivatives import CASES
from torch import Tensor, nn
from torch.nn import Module, Sequential
from torch.nn.utils import parametrizations

from backpack import backpack, extend, extensions
from backpack.core.derivatives.basederivatives import (
    BaseDerivatives,
    BaseParameterDerivatives,
)
from backpack.core.derivatives.generic_loss import GenericLossDerivatives
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import support, turn
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.layers import LAYERS, LOSSES, Row, find_loss
from backpack.extensions.secondorder import module_rules
from backpack.extensions.support import OTHER, OTHER_LOSS, OTHER_PLAIN, Cell, Rule

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
    assert sorted(names) == sorted(extensions.__all__)
    assert set(LAYER_CELLS) - {OTHER, OTHER_PLAIN} == {cls.__name__ for cls in LAYERS}
    assert set(LOSS_CELLS) - {OTHER_LOSS} == {cls.__name__ for cls in LOSSES}
    for row in [*LAYER_CELLS.values(), *LOSS_CELLS.values()]:
        assert list(row) == names
        assert all(cell.note for cell in row.values() if cell.rule is Rule.REFUSED)


# Every cell of the layers


class Setting(NamedTuple):
    """A layer in a small model: a chain of modules that all quantities can walk.

    Attributes:
        row: Row of the table.
        layer: Builds the layer.
        inputs: Builds the layer's inputs.
    """

    row: str
    layer: Callable[[], Module]
    inputs: Callable[[], Tuple[Tensor, ...]]

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
    Setting(OTHER, ExpScale, randn(3, 3)),
    Setting(OTHER, lambda: parametrizations.weight_norm(nn.Linear(3, 2)), randn(3, 3)),
    Setting(OTHER, partial(nn.RNNCell, 3, 2), randn(3, 3)),
    Setting(OTHER, partial(nn.EmbeddingBag, 4, 2), indices([0, 1], [3, 3], [1, 0])),
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

    def generic(names: Sequence[str], module: Module, *args: Any) -> Any:
        watched.setdefault(module, set()).add(Rule.GENERIC)
        return generic_products(names, module, *args)

    def fast(name: str, module: Module, *args: Any) -> Any:
        raise NotImplementedError
