"""``check=True``: is each sample by itself, and do individual gradients add up?"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from backpack.core.layout import Layout, has_bit, sample_numbers
from backpack.engine.backward.inspection import Inspection
from backpack.engine.backward.reached import columns, starts
from backpack.engine.nodes.graph import describe
from backpack.engine.nodes.vjp import pull
from backpack.utils.errors import batch_norm_raise_error_if_train
from backpack.utils.hooks import without_hooks
from backpack.utils.state import State

CHECK_FAILED = (
    "check=True: the individual gradients do not add up to the gradient of {names}. "
    "The parameter is used where extensions can't see it. Use it only inside of "
    "extended modules, in operations of PyTorch."
)
HOOK_CHANGED = (
    "check=True: the individual gradients do not add up to the gradient of {names}, "
    "which has hooks (`register_hook`): they change `.grad` alone. Remove them, or "
    "change gradients at outputs of modules, as individual ones see these."
)
SEPARATE_TERM = (
    "check=True: the individual gradients do not add up to the gradient of {names}, as "
    "a term of the loss belongs to no sample, like a regularizer. Differentiate this "
    "term in a backward pass of its own, outside of the context, or leave `check` out "
    "and add what it contributes by hand."
)
NOT_ISOLATED = (
    "check=True: the gradient of one sample reaches other samples at the output of "
    "{operation}, though no operation of the forward pass has brought them together. A "
    "hook does, or a function with a backward of its own. Let these treat each sample "
    "by itself; else, quantities of individual samples are not defined."
)


class Check:
    """Compares the sum of individual gradients with the gradient.

    What is zero in exact arithmetic is not zero in the computer's: differences are
    compared with the size of the terms that were added up.

    Attributes:
        separate: Parameters that are also used in terms that belong to no sample.
    """

    def __init__(self, backward_pass: Any):
        """Start with nothing.

        Args:
            backward_pass: The backward pass that is running.
        """
        self.separate: list[Tensor] = []
        self._sums: dict[Tensor, Tensor] = {}
        self._sizes: dict[Tensor, tuple[float, float]] = {}
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._handles: list[RemovableHandle] = []

    def add(self, turn: Any) -> None:
        """Add up the individual gradients of parameters.

        Args:
            turn: The parameters' turn.
        """
        for param, product in turn.gradients().items():
            if not param.requires_grad:  # frozen after the forward pass
                continue
            individual = product.individual()[0].detach()
            self._sums[param] = individual.sum(0)
            self._sizes[param] = turn.size_of_terms()
            receive = partial(self._gradients.__setitem__, param)
            self._handles.append(param.register_hook(receive))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()  # they may be part of a graph
    def compare(self) -> None:
        """Compare.

        Raises:
            RuntimeError: If sums and gradients differ.
        """
        wrong = [
            param
            for param, gradient in self._gradients.items()
            if not _close(self._sums[param], gradient, *self._sizes[param])
        ]
        terms = set(map(id, self.separate))
        reasons = {
            HOOK_CHANGED: [param for param in wrong if param._backward_hooks],
            SEPARATE_TERM: [param for param in wrong if id(param) in terms],
            CHECK_FAILED: wrong,
        }
        for text, params in reasons.items():
            if params:
                raise RuntimeError(text.format(names=describe(params)))


def check_isolation(inspection: Inspection, current: State) -> None:
    """Refuse a graph in which the gradient of one sample reaches another.

    Cotangents that are zero for all samples but some are pulled back through it. At
    every use, the entries of the others must be zero. Which samples these are: those
    whose number has a bit, then the others, for each bit.

    Args:
        inspection: The graph.
        current: What is active.

    Raises:
        RuntimeError: If samples are not isolated, which is a ``NotImplementedError``
            where a batch normalization couples them.
    """
    places = [
        (use, index, GradientEdge(node, number))
        for use, nodes in inspection.uses.items()
        for index, (node, number) in nodes.items()
    ]
    columns_only = all(ext.pulls_columns for ext in current.active_exts)
    owners = (*inspection.calls, *inspection.uses)
    tensors = [x for owner in owners for x in owner.tensors()] if columns_only else ()
    quiet = without_hooks(tensors) if columns_only else nullcontext()
    with current.pull(columns_only), quiet:
        for origin in starts(inspection) if places else ():
            for bit, wanted, column in columns(origin):
                edges = [place for _, _, place in places]
                pulled = pull([origin.edge], edges, [column])
                for (use, index, _), g in zip(places, pulled):
                    if g is None or not _reaches_others(use, index, g, bit, wanted):
                        continue
                    for call in inspection.calls:  # the one whose quantities are given
                        if isinstance(call.module, _BatchNorm):
                            batch_norm_raise_error_if_train(call.module)
                    text = NOT_ISOLATED.format(operation=use.describe())
                    raise RuntimeError(text)


def _reaches_others(use: Any, index: int, g: Tensor, bit: int, wanted: int) -> bool:
    placement = use.placements[index]
    if not isinstance(placement, (Layout, Tensor)):
        return False
    shape = use.output_shapes[index]
    numbers = sample_numbers(placement, shape, use.n, g.device)
    others = has_bit(numbers, bit, 1 - wanted)
    # zero times infinity is no number, and no influence
    return bool((others & (g.reshape(shape).nan_to_num() != 0)).any())


def _close(result: Tensor, expected: Tensor | None, size: float, eps: float) -> bool:
    """Compare up to rounding errors; NaN and infinity equal themselves."""
    if expected is None:  # a function has given none
        expected = torch.zeros_like(result)
    expected = expected.to_dense() if expected.is_sparse else expected
    tolerance = max(eps, torch.finfo(expected.dtype).eps) ** 0.5
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    scale = max(scale, size)
    return torch.allclose(
        result.to(expected.dtype), expected, tolerance, tolerance * scale, True
    )
