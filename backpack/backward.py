"""A backward pass inside a context: calls have their turn, columns are pulled back."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple
from warnings import warn

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.capture import Call, Entry
from backpack.context import State, state
from backpack.core.reductions import PerSample
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.turn import Turn
from backpack.graph import takes_part
from backpack.pullback import PullBack
from backpack.utils.hooks import no_op

RELEASED = (
    "The inputs and outputs of {module} were dropped after an earlier backward pass. "
    "Use `with backpack(..., retain_graph=True)` for all but the last backward pass "
    "through the same graph (also where the earlier one ran outside of any context)."
)
MODIFIED_LOSS = (
    "The loss was modified after {module}: the gradient at its output is {factor}, not "
    "1. Second-order quantities contain this factor."
)


class BackwardPass:
    """What a backward pass has to remember from turn to turn.

    Attributes:
        shared_products: Sum of the individual gradients of the calls that had their
            turn, for parameters that other calls may contribute to.
        saved: Which extension has saved a value on which parameter, by identity.
        loss_factors: Gradients at the outputs of the losses that were met.
        walked: Extensions that have passed quantities from module to module.
    """

    def __init__(self, current: State):
        """Begin.

        Args:
            current: What is active.
        """
        self.state = current
        self.shared_products: Dict[Parameter, PerSample] = {}
        self.saved: Set[Tuple[int, int]] = set()
        self.loss_factors: List[float] = []
        self.walked: Set[BackpropExtension] = set()
        self.pull_back = PullBack(current)

    def finish(self) -> None:
        """End: forget what is left."""
        for ext in self.walked:
            ext.saved_quantities.clear()

    def take_turn(
        self, call: Call, g_out: Sequence[Optional[Tensor]], entries: List[Entry]
    ) -> None:
        """Run the extensions on a call.

        Args:
            call: The call.
            g_out: Gradients at its outputs.
            entries: Calls at the same node of the graph.

        Raises:
            RuntimeError: If inputs and output were dropped before.
        """
        current = self.state
        if call.released:
            raise RuntimeError(RELEASED.format(module=call.module))
        call.store(raw=True)
        module = call.module
        try:
            with Turn(call, self, g_out, entries) as turn:
                if call.is_loss:
                    self._meet_loss(turn)
                g_inp = tuple(None for _ in call.arguments)
                for ext in current.active_exts:
                    if current.debug:
                        print(f"[DEBUG] Running extension {ext} on {module}")
                    ext(module, g_inp, turn.g_out)
                if current.debug:
                    print(f"[DEBUG] Running extension hook on {module}")
                current.extension_hook(module)
        finally:
            call.columns = {}
            if keeps_io(current):
                call.store(raw=False)
            else:
                call.release()

    def parameters(self, call: Call) -> List[Tuple[str, Parameter]]:
        """List the parameters a call is responsible for, as far as they take part.

        Args:
            call: The call.

        Returns:
            Names in the module and parameters.
        """
        return [
            (name, param)
            for name, param in call.parameters.items()
            if param.requires_grad and (not call.is_composite or takes_part(param))
        ]

    def _meet_loss(self, turn: Turn) -> None:
        """Pull columns back from a loss to everything it was computed from."""
        second_order = [
            ext
            for ext in self.state.active_exts
            if ext.expects_backpropagation_quantities()
        ]
        if not second_order:
            return
        module, output, (g_out, *_) = turn.module, turn.call.outputs[0], turn.g_out
        if output.numel() != 1 or getattr(module, "reduction", "") == "none":
            raise ValueError(
                f"{type(second_order[0]).__name__} starts at a loss with a scalar "
                f"output, and {module} has an output of shape {list(output.shape)}. "
                "Use reduction='mean' or reduction='sum'."
            )
        factor = float(g_out)
        self.loss_factors.append(factor)
        if factor != 1.0:
            warn(MODIFIED_LOSS.format(module=module, factor=factor), stacklevel=2)

        by_source: Dict[Source, List[ColumnExtension]] = {}
        columns = [
            ext
            for ext in second_order
            if isinstance(ext, ColumnExtension) and not ext.walks_modules
        ]
        share_all = any(ext.source == Source("exact") for ext in columns)
        for ext in columns:
            source = ext.source
            if share_all and source.compact:
                source = Source("exact")
            by_source.setdefault(source, []).append(ext)
        for source, extensions in by_source.items():
            self.pull_back.start(turn, source, extensions)


def keeps_io(current: State) -> bool:
    """Tell whether inputs and outputs are kept after a backward pass.

    Args:
        current: What is active.

    Returns:
        Whether they are.
    """
    return current.retain_graph or any(ext.keeps_io for ext in current.active_exts)


@contextmanager
def backward_pass(current: State) -> Iterator[BackwardPass]:
    """Remember things from turn to turn inside the context, and forget them after.

    Args:
        current: What is active.

    Yields:
        The backward pass.
    """
    outer, current.backward_pass = current.backward_pass, BackwardPass(current)
    try:
        yield current.backward_pass
    finally:
        current.backward_pass.finish()
        current.backward_pass = outer


def visit(
    call: Call, g_out: Sequence[Optional[Tensor]], entries: List[Entry]
) -> None:
    """Let a call have its turn, now that the gradients at its outputs are known.

    Args:
        call: The call.
        g_out: Gradients at its outputs.
        entries: Calls at the same node of the graph.
    """
    current = state()
    if current.pulling:
        return
    if not current.active_exts and current.extension_hook is no_op:
        call.release()
        return
    if current.backward_pass is None:
        _begin_unannounced(current)
    if any(g is not None for g in g_out):
        current.backward_pass.take_turn(call, g_out, entries)


def _begin_unannounced(current: State) -> None:
    """Begin a backward pass that did not go through PyTorch's Python interface."""
    running = current.backward_pass = BackwardPass(current)

    def end() -> None:
        running.finish()
        if current.backward_pass is running:
            current.backward_pass = None

    torch.autograd.Variable._execution_engine.queue_callback(end)
