"""A backward pass inside a context: calls have their turn, columns are pulled back."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)
from warnings import warn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from backpack.context import State
from backpack.core.per_sample.base import PerSample
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.turn import Turn
from backpack.graph import Entry, Inspection, takes_part
from backpack.left_out import find_left_out, hand_over
from backpack.pullback import PullBack
from backpack.utils.hooks import no_op

if TYPE_CHECKING:
    from backpack.capture import Call

MODIFIED_LOSS = (
    "The loss was modified after {module}: the gradient at its output is {factor}, not "
    "1. Second-order quantities contain this factor, and nothing else of what was done "
    "to the loss. If they should not, run the backward pass from the loss module's "
    "output itself."
)
NOT_EXTENDED_BATCH_NORM = (
    "A {module} in training mode, which is not extended, couples the samples of the "
    "batch, so that quantities of individual samples are not defined. Call `.eval()` "
    "on it, or replace it with a layer that treats samples separately."
)
SEPARATE_USE = (
    "Parameters are also used in terms of the loss that no extended module computes, "
    "like a regularizer: {names}. Their individual gradients do not sum to the "
    "gradient, and quantities do not contain those terms. Add what they contribute by "
    "hand, or differentiate them in a backward pass of their own, outside of the "
    "context."
)
OUTSIDE_USE = (
    "Parameters are used outside of the calls of their modules, where extensions can't "
    "see it: {names}. Their quantities would be wrong. Use a parameter only through "
    "its module's forward, extend every module that shares it, and differentiate no "
    "term that contains a derivative of the network."
)
NOT_SAMPLES = (
    "{ext}: axis 0 has size {size} at the output of {module}, but the model around it "
    "was called with {expected} samples on axis 0, so quantities of individual samples "
    "can't be computed for '{name}'. Keep the samples on axis 0 in every layer (most "
    "layers accept additional axes), instead of flattening, routing or concatenating "
    "them."
)
LATE_CALL = (
    "{module} shares a parameter with a call whose turn was over before this one was "
    "known: its forward pass was repeated during the backward pass. Use "
    "`checkpoint(..., use_reentrant=False)`."
)
CHECK_FAILED = (
    "check=True: the individual gradients do not add up to the gradient of {names}. "
    "Either axis 0 does not hold the samples in one of their modules' calls, or the "
    "parameter is used outside of these calls. Keep the samples on axis 0 in every "
    "layer, and use a parameter only through its module's forward."
)


class BackwardPass:
    """What a backward pass has to remember from turn to turn.

    Attributes:
        shared_products: Sum of the individual gradients of the calls that had their
            turn, for parameters that other calls may contribute to.
        loss_factors: Gradients at the outputs of the losses that were met.
        walked: Extensions that have passed quantities from module to module.
        dropouts: Where the output of each call of a dropout layer sits in the graph, if
            an extension walks from module to module.
        saved_alone: Which extension has saved a value on which parameter that cannot be
            combined with that of another call.
        left_out: Parameters that autograd shall leave out, and whether their gradient
            is at hand as a sum of individual gradients.
        gradients: Their gradients, to be handed over.
        leaves: The other leaf tensors, if there are such parameters.
    """

    def __init__(
        self,
        current: State,
        roots: Sequence[Node] = (),
        inputs: Any = None,
        accumulates: bool = False,
    ):
        """Begin.

        Args:
            current: What is active.
            roots: Where the backward pass begins in the graph, if it is known.
            inputs: With respect to what it differentiates. Default: ``None``, for all
                leaf tensors.
            accumulates: Whether it does nothing but accumulate gradients. Default:
                ``False``.

        Raises:
            RuntimeError: If a parameter is used where extensions can't see it.
        """  # noqa: DAR401
        self.state = current
        self._separating = [x for x in current.active_exts if x.separates_samples]
        self._batch_sizes: Dict[object, Set[int]] = {}  # by model
        self._guard = Guard() if current.check else None
        self._keeps_io = keeps_io(current)
        self._calls_of: Dict[int, List[Call]] = {}
        self._complete: Set[int] = set()
        self.shared_products: Dict[Parameter, PerSample] = {}
        self.loss_factors: List[float] = []
        self.walked: Set[BackpropExtension] = set()
        self.dropouts: Dict[Call, GradientEdge] = {}
        self.saved_alone: Set[Tuple[BackpropExtension, Parameter]] = set()
        self.left_out: Dict[Parameter, bool] = {}
        self.gradients: Dict[Parameter, Tensor] = {}
        self.leaves: List[Tensor] = []
        self.pull_back = PullBack(current)
        if current.report is not None:
            current.report.begin(current.active_exts)
        if current.active_exts and roots:
            inspection = Inspection(roots)
            self._inspect(inspection, inputs)
            if accumulates and inputs is None:
                self.left_out = find_left_out(current, inspection)
                leaves = inspection.reached if self.left_out else ()
                self.leaves = [
                    x for x in leaves if x not in self.left_out and x.requires_grad
                ]

    def _inspect(self, inspection: Inspection, inputs: Any) -> None:
        """Refuse what no module sees, or warn about it."""
        for call in inspection.calls:
            for param in () if call.released else call.parameters.values():
                self._calls_of.setdefault(id(param), []).append(call)
        report = self.state.report
        if report is not None:
            reached = inspection.reached if inputs is None else tree_leaves(inputs)
            report.reached.update(map(id, reached))
        if not self._separating:
            return
        module = inspection.coupling()
        if module is not None:
            message = NOT_EXTENDED_BATCH_NORM.format(module=module)
            if any(ext.refuses_coupled_samples for ext in self._separating):
                raise NotImplementedError(message)
            warn(message, stacklevel=5)
        separate, entangled = inspection.uses_outside()
        if entangled:
            names = inspection.describe(entangled)
            raise NotImplementedError(OUTSIDE_USE.format(names=names))
        if separate:
            names = inspection.describe(separate)
            warn(SEPARATE_USE.format(names=names), stacklevel=5)

    def __enter__(self) -> BackwardPass:
        """Make this the thread's backward pass."""
        self._outer, self.state.backward_pass = self.state.backward_pass, self
        return self

    def __exit__(self, exc_type: Optional[type], *exc_info) -> None:
        """End; check the results, if this was asked for."""
        self.finish()
        self.state.backward_pass = self._outer
        if exc_type is not None and self.state.report is not None:
            self.state.report.failed = True
        if exc_type is None and self._guard is not None:
            self._guard.compare()

    def finish(self) -> None:
        """Forget what is left."""
        for ext in self.walked:
            ext.saved_quantities.clear()
        if self._guard is not None:
            self._guard.remove()

    def take_turn(
        self, call: Call, g_out: Tuple[Optional[Tensor], ...], entries: List[Entry]
    ) -> None:
        """Run the extensions on a call.

        Args:
            call: The call.
            g_out: Gradients at its outputs.
            entries: Calls at the same node of the graph.

        Raises:
            RuntimeError: If inputs and output were dropped before.
        """
        current, module = self.state, call.module
        call.check_live()
        if current.report is not None:
            current.report.met.add(id(module))
        self._check_samples(call)
        if self._has_nothing_to_do(call):
            call.release()
            return
        call.store(raw=True)
        try:
            # what repeats the forward pass creates tensors where that did
            device = call.default_device or nullcontext()
            with device, Turn(call, self, g_out, entries) as turn:
                if call.is_loss:
                    self._meet_loss(turn)
                if self._guard is not None:
                    self._guard.add(turn)
                g_inp = (None,) * len(call.arguments)
                for ext in current.active_exts:
                    if current.debug:
                        print(f"[DEBUG] Running extension {ext} on {module}")
                    ext(module, g_inp, turn.g_out)
                for name, param in call.parameters.items():
                    if param in self.left_out:
                        self.gradients[param] = turn.gradients(name).total()
                if current.debug:
                    print(f"[DEBUG] Running extension hook on {module}")
                if current.extension_hook is not no_op:
                    hand_over(self.gradients)  # it may look at them
                    current.extension_hook(module)
        finally:
            call.columns = {}
            if self._keeps_io:
                call.store(raw=False)
            else:
                call.release()

    def _has_nothing_to_do(self, call: Call) -> bool:
        """Tell whether a call's turn would change nothing: a quick answer."""
        current = self.state
        if call.parameters or current.debug or self._keeps_io:
            return False
        if current.extension_hook is not no_op:
            return False
        return not any(ext.runs_without_parameters(call) for ext in current.active_exts)

    def _check_samples(self, call: Call) -> None:
        """Check that axis 0 of a call holds the samples of the model around it.

        Args:
            call: The call.

        Raises:
            NotImplementedError: If it has another size than the model's batch.
        """
        if call.is_outermost:
            if call.is_transparent:
                tensors = [*call.inputs, *call.outputs]
                sizes = {x.shape[0] for x in tensors if x.dim() > 0}
                self._batch_sizes[call.model] = sizes
            return
        sizes = self._batch_sizes.get(call.model)
        if not (self._separating and sizes and call.parameters):
            return
        if any(isinstance(x, PackedSequence) for x in call.arguments):
            return  # its layer's rule refuses it, and says what to do
        if call.batch_size not in sizes:
            raise NotImplementedError(
                NOT_SAMPLES.format(
                    ext=type(self._separating[0]).__name__,
                    size=call.batch_size,
                    module=call.module,
                    expected=" or ".join(map(str, sorted(sizes))),
                    name=next(iter(call.parameters)),
                )
            )
        sizes &= {call.batch_size}  # the model's layers have to agree

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

    def is_shared(self, param: Parameter, call: Call) -> bool:
        """Tell whether other calls may contribute to a parameter in this pass.

        Args:
            param: The parameter.
            call: A call that is responsible for it.

        Returns:
            Whether it is possible. If not, what this call contributes is complete.

        Raises:
            NotImplementedError: If another call was thought to be the only one.
        """
        alone = self._calls_of.get(id(param)) == [call]
        if alone and param not in self.shared_products:
            self._complete.add(id(param))
            return False
        if id(param) in self._complete:
            raise NotImplementedError(LATE_CALL.format(module=call.module))
        return True

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


class Guard:
    """Compares the sum of individual gradients with the gradient."""

    def __init__(self):
        """Start with nothing."""
        self._sums: Dict[Parameter, Tensor] = {}
        self._names: Dict[Parameter, str] = {}
        self._gradients: Dict[Parameter, Tensor] = {}
        self._handles: List[RemovableHandle] = []

    def add(self, turn: Turn) -> None:
        """Add what a call contributes to the individual gradients.

        Args:
            turn: The call's turn.
        """
        for name, param in turn.parameters():
            part = turn.own_gradients(name).summed()[0].detach()
            if param not in self._sums:
                self._sums[param] = part
                self._names[param] = f"'{name}' of {turn.module}"
                receive = partial(self._gradients.__setitem__, param)
                self._handles.append(param.register_hook(receive))
            else:
                self._sums[param] = self._sums[param] + part

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def compare(self) -> None:
        """Compare.

        Raises:
            RuntimeError: If sums and gradients differ.
        """
        wrong = [
            self._names[param]
            for param, gradient in self._gradients.items()
            if not _close(self._sums[param], gradient)
        ]
        if wrong:
            raise RuntimeError(CHECK_FAILED.format(names=", ".join(wrong)))


def _close(result: Tensor, expected: Tensor) -> bool:
    """Compare up to rounding errors; NaN and infinity equal themselves."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(
        result.to(expected.dtype), expected, tolerance, tolerance * scale, True
    )


def visit(
    current: State,
    call: Call,
    g_out: Tuple[Optional[Tensor], ...],
    entries: List[Entry],
) -> None:
    """Let a call have its turn, now that the gradients at its outputs are known.

    Args:
        current: What is active.
        call: The call.
        g_out: Gradients at its outputs.
        entries: Calls at the same node of the graph.
    """
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
