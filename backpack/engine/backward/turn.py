"""One call's turn in a backward pass: what rules for modules compute from."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.fx import GraphModule
from torch.nn import Module, Parameter
from torch.nn.modules.dropout import _DropoutNd

from backpack.core.derivatives.dropout import MASK
from backpack.core.derivatives.stored import SLOPE
from backpack.core.linearization import PerInput
from backpack.core.table import GENERIC, Row, find_row_or_generic, works_in_place
from backpack.engine.nodes.graph import (
    behind_view,
    calls_at,
    comes_from_complex,
    leaves_behind,
    producing_calls,
    reached_first,
    shape_at,
    skip_passing,
    targets_below,
)
from backpack.engine.nodes.record import Call
from backpack.engine.nodes.uses import Entry
from backpack.engine.nodes.vjp import joined, pull
from backpack.utils.hooks import EXTENDED, OPENED, message, path_of, without_hooks
from backpack.utils.state import may_look, state
from backpack.utils.subsampling import subsample
from backpack.utils.types import tensors_in

EXTEND_LOSS = (
    "{ext} (field '{field}') found no quantity pulled back to {module}, because no "
    "extended loss was met before it in this backward pass. Second-order extensions "
    "start at the loss: use a module that returns a single number (reduction='mean' or "
    "'sum'), `lossfunc = extend(lossfunc)`, and compute the loss from this model's "
    "output with it. If it is a derivative that a forward pass takes by parameters, "
    "take it inside of `with backpack.disable():`."
)
NEGATIVE_LOSS = (
    "{module}: the loss is multiplied by {factor}, and the Hessian of the result is "
    "not positive semi-definite, which the GGN family requires. Use a positive factor, "
    "or quantities of the Hessian (DiagHessian, HMP)."
)
NOT_A_CHAIN = (
    "{ext} (field '{field}') walks from module to module, and what consumes the output "
    "of {module} is not an extended module with a rule for it, but an operation in "
    "between, or in a forward hook. {advice}"
)
INSIDE = (
    "{ext} (field '{field}') walks from module to module, and {module} does more than "
    "call the modules inside: there is an operation in its forward, or in a hook, or "
    "it takes a parameter of its own. {advice}"
)
NOTHING_PASSED = (
    "{ext} (field '{field}') has no quantity at the output of {module}, because "
    "{consumer}, which takes it as input, passes none on: {reason}. Register a module "
    "extension with `set_module_extension({cls}, ...)`, whose `backpropagate` returns "
    "the quantity at the input."
)
CONVERT = (
    "Use `extend(model, use_converter=True)`, which turns operations into modules, or "
    "write the model with modules only."
)
BEFORE_LOSS = (
    "It is between the model and the loss, where no converter looks: let a loss module "
    "of your own do it (`class Loss(nn.Module)`, extended as well), or the model's "
    "`forward`, and use `extend(model, use_converter=True)`."
)
IS_CONVERTED = (
    "The model is converted, but this is in a module that was kept as it is, as layers "
    "of PyTorch are, and what cannot be traced or has a rule. Such modules are taken "
    "as a whole if they return a single tensor: let it do so, or use an extension of "
    "the GGN family by columns."
)
COMPLEX = (
    "{ext} (field '{field}') walks from module to module, whose rules are for real "
    "numbers, and what {consumer} takes comes from {module} by way of complex ones. "
    "Let one module of your own do all that is done with these, from real tensors to "
    "real ones (if it has parameters or modules inside, leave `use_converter` out, "
    "which would open it), or use an extension of the GGN family by columns."
)
OTHER_OUTPUT = (
    "{ext} (field '{field}') goes back through the first output of a module only, but "
    "output {index} of {module} is used, too. Use the first one only."
)
OPENED_BEFORE = (
    "{ext} (field '{field}') has a rule for {cls}, but the converter has opened "
    "modules of the class {opened}: others stand for the operations inside, and the "
    "rule would not run. Register a rule for {opened} itself before `extend(model, "
    "use_converter=True)`, which keeps modules of your own with a rule whole."
)
SAVED_TWICE = (
    "{ext} (field '{field}') computes its value from a single call, but a parameter of "
    "{module} takes part in several calls in this backward pass, or in an operation "
    "elsewhere. Give each call a module of its own, and each parameter a single use."
)


class NoQuantity(NotImplementedError, AssertionError):
    """Nothing was passed on to a module that needs it; the latter is that of 1.7."""


class _Current(threading.local):
    turn: Turn | None = None


_CURRENT = _Current()


def current_turn() -> Turn:
    """Return the turn in which an extension is being run.

    Returns:
        The turn.

    Raises:
        RuntimeError: If none is, because the extension was called by hand.
    """
    if _CURRENT.turn is None:
        raise RuntimeError(
            "Extensions run during a backward pass inside `with backpack(...)`; "
            "this one was called outside of it."
        )
    return _CURRENT.turn


def is_turn_of(module: Module) -> bool:
    """Tell whether a module has its turn.

    Args:
        module: The module.

    Returns:
        Whether it does; if not, an extension that runs on it was called by hand.
    """
    return _CURRENT.turn is not None and _CURRENT.turn.module is module


def loss_scale(module: Module, factor: Tensor) -> Tensor:
    """Return what the columns of a loss that was scaled have to be multiplied by.

    Args:
        module: The loss module.
        factor: Gradient at its output.

    Returns:
        Square root of the gradient.

    Raises:
        ValueError: If the loss was multiplied by a negative number, which must not be
            looked at everywhere, see ``may_look``; the root is NaN then.
    """
    if may_look(factor) and factor < 0:
        raise ValueError(message(NEGATIVE_LOSS, module=module, factor=float(factor)))
    return factor.sqrt()


@contextmanager
def as_called(call: Call) -> Iterator[None]:
    """Give a module back the mode, the options and parameters with which it was called.

    Args:
        call: Its call.

    Yields:
        Nothing.
    """
    module = call.module
    state = vars(module)
    both = ((state, call.settings), (state["_buffers"], call.buffers))
    others: list[tuple[dict[str, Any], str, Any]] = [
        (own, name, value)
        for own, before in both
        for name, value in before.items()
        if own.get(name, value) is not value
    ]
    for path, param in call.parameters.items():
        prefix, _, name = path.rpartition(".")
        own = module.get_submodule(prefix)._parameters
        if own.get(name, param) is not param:
            others.append((own, name, param))
    present = [own[name] for own, name, _ in others]
    for own, name, value in others:
        own[name] = value
    try:
        yield
    finally:
        for (own, name, _), value in zip(others, present):
            own[name] = value


class Turn:
    """A call whose output's gradient is known.

    Attributes:
        call: The call.
        module: The module that was called.
        backward_pass: The backward pass that reached it.
        g_out: Gradients at the call's outputs (``None`` for those not reached).
        parameters: Names and parameters that the call is responsible for, of those that
            take part in this backward pass and require a gradient.
    """

    def __init__(
        self,
        call: Call,
        backward_pass: Any,
        g_out: tuple[Tensor | None, ...],
        entries: list[Entry],
    ):
        """Start the turn.

        Args:
            call: The call.
            backward_pass: The backward pass that reached it.
            g_out: Gradients at the call's outputs.
            entries: Calls at the same node of the graph.
        """
        self.call, self.module = call, call.module
        self.backward_pass = backward_pass
        self.g_out = g_out
        self._entries = entries
        reaches = backward_pass.accumulated.reaches  # of what runs now
        self.parameters: list[tuple[str, Any]] = [
            (name, param)
            for name, param in call.parameters.items()
            if param.requires_grad and (not call.is_composite or reaches(param))
        ]
        self._producers: dict[int, Call] | None = None

    def __enter__(self) -> Turn:
        """Make this the current turn."""
        self._outer, _CURRENT.turn = _CURRENT.turn, self
        own = self.module.__dict__
        if isinstance(self.module, _DropoutNd) and self.backward_pass.walked:
            if self.call.settings["training"] and self.call.input_edges[0]:
                own[MASK] = self._slope()
        elif self.call.is_loss:
            own[SLOPE] = self._slope
        self._state = as_called(self.call)
        self._state.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Return to the turn that was current before."""
        _CURRENT.turn = self._outer
        self._state.__exit__(*exc_info)
        for name in (MASK, SLOPE):
            self.module.__dict__.pop(name, None)

    def pulled(
        self, column: Tensor, edges: Sequence[GradientEdge]
    ) -> list[Tensor | None]:
        """Multiply with the call's transposed Jacobian, by the graph: as it was.

        Args:
            column: In the shape of the output.
            edges: Where the products are wanted, at least one place.

        Returns:
            The products, ``None`` for zero.
        """
        entry = next(entry for entry in self._entries if entry.owner is self.call)
        edge = GradientEdge(torch._C._current_autograd_node(), entry.output_nr)
        column = column.reshape(shape_at(edge))
        with state().pull(), without_hooks(self.call.tensors()):
            found = pull(edge, edges, column)
        return [x if x is None else x.detach() for x in found]

    def _slope(self) -> Tensor | None:
        """Add up derivatives by the first input; ``None`` if that has no graph."""
        x = self.call.input_edges[0]
        if x is None:
            return None
        return self.pulled(torch.ones_like(self.call.outputs[0]), [x])[0]

    @cached_property
    def row(self) -> Row:
        """The rule for the call."""
        return find_row_or_generic(self.call)

    @property
    def only_arranges(self) -> bool:
        """Whether the call only called others, or is a part of one."""
        return self.call.is_part or self.call.is_transparent and not self.parameters

    @property
    def lacks_io(self) -> bool:
        """Whether inputs and output could not be stored on a module that needs them."""
        return self.call.hides and not self.only_arranges

    def derivatives_for(self, name: str) -> Any:
        """Choose the derivatives with respect to a parameter.

        Args:
            name: Its name in the module.

        Returns:
            The layer's, or the generic ones, if these do not cover it.
        """
        row = self.row if self.row.covers(self.module, name) else GENERIC
        return row.derivatives

    def producers(self, extension: Any) -> dict[int, Call]:
        """Find the calls that the arguments come from, directly.

        Args:
            extension: The extension that walks from module to module.

        Returns:
            For each argument by position, the last call that returned it, other than
            containers, if there is one. Arguments that the output does not depend on,
            as one that is taken for its shape, are left out.

        Raises:
            NotImplementedError: If parameters take part in an argument in another way.
        """
        if self._producers is not None:
            return self._producers
        found: dict[int, Call] = {}
        in_place = works_in_place(self.module)
        for position, edge in enumerate(self.call.input_edges):
            edges = self.call.edges_before.get(position, [edge])
            if position in self.call.edges_before and not (in_place and edges):
                entries = self._entries
                entries = entries[: [e.owner for e in entries].index(self.call)]
                node = self.backward_pass.inspection.calls.get(self.call)
                entries = entries or (behind_view(node) if node else [])
            elif edges == [edge] and edge not in self._taken:
                continue
            else:
                entries = producing_calls(edges[0])
            entries = [e for e in entries if not e.owner.is_use]
            entries = [e for e in entries if not e.owner.is_transparent]
            if entries:
                _, index, found[position] = entries[-1]
                if index > 0:
                    text = {"index": index, **_text(extension, found[position].module)}
                    raise NotImplementedError(message(OTHER_OUTPUT, **text))
            else:
                for before in edges:
                    self._check_no_parameters(extension, skip_passing(before).node)
        nested = [x for x in self.call.arguments if not isinstance(x, Tensor)]
        for x in tensors_in(nested):
            if x.requires_grad and x.grad_fn is not None:
                self._check_no_parameters(extension, x.grad_fn)
        self._producers = found
        return found

    @cached_property
    def _taken(self) -> set[GradientEdge]:
        """Places of the arguments that the output was computed from."""
        edges = {edge for edge in self.call.input_edges if edge is not None}
        node = self.backward_pass.inspection.calls.get(self.call)
        if node is None or self.call.is_apart:
            return edges
        return reached_first(node, edges)

    def _check_no_parameters(self, extension: Any, node: Node) -> None:
        """Refuse to drop a quantity that parameters are waiting for."""
        is_complex = comes_from_complex(node)
        if is_complex:
            behind = map(id, leaves_behind(node))
            self.backward_pass.report.behind_complex.update(behind)
        for entry, place in targets_below([node]):
            call = entry.owner
            if call.is_use:
                continue
            if any(param.requires_grad for param in call.parameters.values()):
                if is_complex:
                    text = _text(extension, call.module)
                    raise NoQuantity(message(COMPLEX, consumer=self.module, **text))
                # it ends where the operation does, which is therefore inside
                inside = place is node and call.is_transparent
                before_loss = self.call.is_loss and not calls_at(node)
                advice = BEFORE_LOSS if before_loss else None
                refuse_operation(extension, call.module, inside, advice)

    def incoming(self, extension: Any) -> Any:
        """Return what an extension has pulled back to this call's output.

        Args:
            extension: The extension.

        Returns:
            The quantity, columns ``[V, N, *out]`` for the GGN family, of the samples
            that the extension considers; ``None`` for losses and for first-order
            extensions.

        Raises:
            AssertionError: If no extended loss was met.
            NotImplementedError: If the graph is not a chain of modules.
        """
        needed = extension.expects_backpropagation_quantities()
        if not needed or self.call.is_loss:
            return None
        if extension.walks_modules:
            saved = extension.saved_quantities
            quantity = saved.retrieve_quantity(id(self.call), delete_old=True)
            if quantity is None:
                self._explain_missing(extension)
            return quantity
        if extension.source not in self.call.columns:
            self._explain_missing(extension)
        columns: Any = joined(self.call.columns[extension.source])[0]
        return subsample(columns, dim=1, subsampling=extension.get_subsampling())

    def _explain_missing(self, extension: Any) -> None:
        text = _text(extension, self.module)
        consumer = self.backward_pass.kept.get((extension, self.call))
        if consumer is not None:
            reason = "its module extension returned none"
            if extension.get_module_extension(consumer) is None:
                reason = "it has no module extension"
            text.update(consumer=consumer, cls=type(consumer).__name__, reason=reason)
            raise NoQuantity(message(NOTHING_PASSED, **text))
        if extension.walks_modules and self.backward_pass.losses:
            refuse_operation(extension, self.module)
        raise AssertionError(message(EXTEND_LOSS, **text))

    def pass_on(self, extension: Any, quantities: Any) -> None:
        """Hand what an extension has pulled back to the inputs to the calls before.

        Args:
            extension: The extension.
            quantities: Quantity at each of the inputs, one for all unless ``PerInput``;
                ``None`` for none, which is named where one is missing.

        Raises:
            NotImplementedError: If an output is used several times, and the extension
                does not say how that combines.
        """
        if quantities is None:
            edges = [edge for edge in self.call.input_edges if edge is not None]
            edges += chain(*self.call.edges_before.values())
            for entry in chain(*map(producing_calls, edges)):
                self.backward_pass.kept[extension, entry.owner] = self.module
            return
        for position, before in self.producers(extension).items():
            quantity = quantities
            if isinstance(quantities, PerInput):
                quantity = quantities[position] if position < len(quantities) else None
            if quantity is None:
                self.backward_pass.kept[extension, before] = self.module
            else:
                accumulate = extension.accumulate_backpropagated_quantities
                try:
                    extension.saved_quantities.save_quantity(
                        id(before), quantity, accumulate
                    )
                except NotImplementedError as error:
                    text = f"At the output of {before.module}: {error}"
                    raise NotImplementedError(text) from error
                self.backward_pass.walked.add((extension, id(before)))

    def save_alone(self, extension: Any, param: Parameter, value: Any) -> None:
        """Save a value that cannot be combined with that of another call.

        It is an error if another call has saved a value before, or if the parameter is
        used outside of the module as well.

        Args:
            extension: The extension whose field it is.
            param: The parameter.
            value: The value.
        """
        saved = self.backward_pass.saved_alone
        group = self.backward_pass.group_of.get(param)
        owners = [] if group is None else [use.owner for use in group.uses]
        inside = {*self.module.modules()} - {self.module}  # not other calls of its own
        here = [x is self.call or x is not None and x.module in inside for x in owners]
        # none is here where the call computes no data, but what a use takes
        if len(set(here)) > 1 or (extension, param) in saved:
            refuse_several_calls(extension, self.module)
        saved.add((extension, param))
        self.backward_pass.save(extension, param, value)


def refuse_opened(calls: Iterable[Call], extensions: Sequence[Any]) -> None:
    """Refuse rules for classes of modules that the converter has opened.

    Args:
        calls: The calls that a backward pass meets, with those of converted models.
        extensions: The active extensions.

    Raises:
        NotImplementedError: If a rule was registered too late, or for a base.
    """
    for module in [call.module_ref() for call in calls]:
        opened = {} if module is None else vars(module).get(OPENED, {})
        for extension in extensions if opened else ():
            for cls in extension.own_rules():
                if path_of(cls) in opened:
                    text = _text(extension, module)
                    names = {"cls": cls.__name__, "opened": opened[path_of(cls)]}
                    raise NotImplementedError(message(OPENED_BEFORE, **text, **names))


def refuse_operation(
    extension: Any, module: Module, inside: bool = False, advice: str | None = None
) -> None:
    """Refuse a module behind which comes no module, but an operation.

    Args:
        extension: The extension that walks from module to module.
        module: The module.
        inside: Whether the operation is in it, next to other modules. Default: no.
        advice: What to do. Default: what helps in the model.

    Raises:
        NotImplementedError: Always.
    """
    converted = [
        m for root in EXTENDED if isinstance(root, GraphModule) for m in root.modules()
    ]
    advice = advice or (IS_CONVERTED if module in converted else CONVERT)
    text = {**_text(extension, module), "advice": advice}
    raise NoQuantity(message(INSIDE if inside else NOT_A_CHAIN, **text))


def refuse_several_calls(extension: Any, module: Module) -> None:
    """Refuse a parameter that takes part in several calls.

    Args:
        extension: The extension that works on a single one.
        module: A module that has the parameter.

    Raises:
        NotImplementedError: Always.
    """
    text = _text(extension, module)
    raise NotImplementedError(message(SAVED_TWICE, **text))


def _text(extension: Any, module: Module) -> dict[str, Any]:
    name, field = type(extension).__name__, extension.savefield
    return {"ext": name, "field": field, "module": module}


class InputGradients(tuple):
    """Gradients at a call's inputs, ``None`` where there is none.

    They are computed when somebody looks at them, in the call's turn.
    """

    def __new__(
        cls,
        call: Call,
        node: Node | None,
        entries: Sequence[Entry],
        g_out: Sequence[Any],
    ) -> InputGradients:
        """Store what they are computed from.

        Args:
            call: The call.
            node: Node that produced its outputs; ``None`` if nobody will look.
            entries: What ends there.
            g_out: Gradients at its outputs.

        Returns:
            As many as the call has arguments.
        """
        own = super().__new__(cls, [None] * len(call.arguments))
        own._source = call, node, entries, g_out
        return own

    @cached_property
    def _values(self) -> list[Tensor | None]:
        call, node, entries, g_out = self._source
        given = {
            GradientEdge(node, e.output_nr): g_out[e.index]
            for e in entries
            if e.owner is call and g_out[e.index] is not None
        }
        wanted = [edge for edge in call.input_edges if edge is not None]
        found: Iterator[Tensor | None] = iter(())
        if wanted and given:
            g_out = [g.reshape(shape_at(edge)) for edge, g in given.items()]
            with state().pull(), without_hooks(call.tensors()):
                found = iter(pull(list(given), wanted, g_out))
        return [edge and next(found, None) for edge in call.input_edges]

    def __iter__(self) -> Iterator[Tensor | None]:
        """Compute them."""
        return iter(self._values)

    def __getitem__(self, place: Any) -> Any:
        """Compute them."""
        return self._values[place]
