"""Recurrent cells, called as functions: the linear maps inside of them.

A cell is a single operation. But its matrices enter by two linear maps, of its input
and of its state, whose results are nodes of the graph. The gradients there are those of
the rows, so that these maps are uses with a rule, and no derivative of the cell is
taken for each sample.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from backpack.core.layout import Layout, Placement, agree
from backpack.core.operations import Called, find_operation
from backpack.engine.nodes.constants import Constant
from backpack.engine.nodes.functions import Request
from backpack.engine.nodes.graph import shape_at, walk
from backpack.engine.nodes.saved import Saved
from backpack.engine.nodes.uses import Use

_CELLS = {torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.gru_cell, torch.lstm_cell}
_NAMES = "input hx w_ih w_hh b_ih b_hh"


def note_maps(
    request: Request,
    constants: list[Constant],
    outs: list[tuple[Tensor, Placement]],
    owner: Any,
    n: int,
    since: int,
    saved: Sequence[Saved],
) -> list[Constant]:
    """Record the linear maps inside of a recurrent cell as uses.

    Args:
        request: An operation that has run.
        constants: Those of its arguments that need a gradient, and hold no samples.
        outs: What it returned, and where the samples are there.
        owner: Record of the innermost module in which it happened.
        n: Number N of samples.
        since: Number of nodes that the graph had before.
        saved: What it keeps for its derivative, where hooks get that.

    Returns:
        The constants that enter elsewhere; all, if the operation is no such cell.
    """
    if request.func not in _CELLS:
        return constants
    bound = Called(request.args, request.kwargs, ()).bind(_NAMES)
    x, state = bound.pop("input"), bound.pop("hx")
    data = {"ih": x, "hh": state if isinstance(state, Tensor) else state[0]}
    placement = outs[0][1]
    parts = [x for x in bound.values() if x is not None]
    shared = len(set(map(id, parts))) < len(parts)
    apart = not all(agree(p, placement) for _, p in outs)
    if shared or apart or not _is_of_rows(placement):
        return constants
    left = constants
    by_node = {constant.stand_in.node: constant for constant in constants}
    for node in walk([x.grad_fn for x, _ in outs], since=since):
        if type(node).__name__ not in ("AddmmBackward0", "MmBackward0"):
            continue
        *shift, _, matrix = [parent for parent, _ in node.next_functions]
        is_transpose = type(matrix).__name__ == "TBackward0"
        weight = by_node.get(matrix.next_functions[0][0]) if is_transpose else None
        bias = by_node.get(shift[0]) if shift else None
        taken = {1: weight, 2: bias}  # as arguments of `linear`
        taken = {key: x for key, x in taken.items() if x is not None}
        if not taken:
            continue
        end = _name_of(next(iter(taken.values())))[2:]  # as in `w_ih`, and `b_ih`
        left = [constant for constant in left if constant not in taken.values()]
        for key, constant in taken.items():
            constant.key = key
        operands = data[end], bound[f"w_{end}"], bound.get(f"b_{end}")
        operation = find_operation(functional.linear, operands, {}, list(taken))
        first = min(x._sequence_nr() for x in (node, matrix) if x is not None)
        use = Use(request.kind.name, [*taken.values()], n, [], owner, operation, first)
        use.until, use.saved = node._sequence_nr() + 1, saved
        edge = GradientEdge(node, 0)
        use.attach_at(edge, shape_at(edge), placement)
    return left


def _is_of_rows(placement: Placement) -> bool:
    """Tell whether each row, which a cell maps by itself, is a sample's."""
    if isinstance(placement, Tensor):
        return placement.dim() == 2 and placement.shape[1] == 1
    return isinstance(placement, Layout) and placement.axis == 0


def _name_of(constant: Constant) -> str:
    key = constant.key
    return key if isinstance(key, str) else _NAMES.split()[key]
