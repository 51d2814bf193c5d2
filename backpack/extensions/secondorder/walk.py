"""Walking from call to call, back from the loss: what is needed, what is refused."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence

from backpack.converter.reading import consists_of_modules
from backpack.core.derivatives import stored
from backpack.core.derivatives.dropout import DropoutDerivatives
from backpack.core.derivatives.generic import input_batch_axis
from backpack.core.layout import halves, has_bit
from backpack.core.linearization import Columns, Linearization, freeze_at
from backpack.core.table import GENERIC, works_in_place
from backpack.engine.backward.turn import Turn, refuse_operation
from backpack.engine.nodes.constants import edge_of
from backpack.engine.nodes.graph import leaves_behind
from backpack.engine.nodes.vjp import pull
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.disable import disable
from backpack.utils.errors import raise_error_if_coupled
from backpack.utils.hooks import message, without_hooks
from backpack.utils.state import ask, may_look, out_of_sight
from backpack.utils.types import Layer, dense, drawn_like

IN_PLACE = (
    "{ext}: {module} has overwritten its input (inplace=True), which its derivatives "
    "need. Use inplace=False, or `extend(model, use_converter=True)`."
)
SAMPLES_NOT_FIRST = (
    "{ext}: {module} takes samples on axis {axis} of its input, but axis 0 has to hold "
    "them. Use batch_first=True."
)
PACKED = (
    "{ext}: {module} was called with a PackedSequence, whose samples have no axis of "
    "their own. Pass a padded tensor instead and mask what the padding leads to, or "
    "use HMP or GGNMP, which need not tell samples apart."
)
SAMPLES_REARRANGED = (
    "{ext}: {module} maps an input with {before} entries on axis 0 to an output with "
    "{after}, but axis 0 has to hold the same samples before and after each module. "
    "Rearrange other axes only, or use an extension of the GGN family by columns."
)
SAMPLES_MEET = (
    "{ext}: in {module}, samples meet: they depend on each other, or on an input that "
    "does not have the samples on axis 0. Use HMP or GGNMP, which need not tell "
    "samples apart."
)
OTHER_NUMBERS = (
    "{ext}: parameters of {module} got other numbers by `.data` after they were used, "
    "as `vector_to_parameters` and `module.to` assign them, but its derivatives are "
    "those of what was used. Change parameters after the backward pass, or before the "
    "forward pass."
)


def freeze_call(turn: Turn) -> Module:
    """Copy a module such that the copy holds a call's inputs and output.

    Args:
        turn: The call's turn.

    Returns:
        Copy of the module, see ``freeze``.
    """
    call = turn.call
    frozen = freeze_at(call.module, call.arguments, call.outputs[0], call.precision)
    if not call.is_output_unchanged and not repeats(turn):
        frozen.__dict__[stored.OVERWRITTEN] = True
    return frozen


def repeats(turn: Turn) -> bool:
    """Tell whether a forward pass of which little is known has to be repeated.

    Args:
        turn: The call's turn.

    Returns:
        Whether its module has no rule, or one that does not cover the call.
    """
    row, names = turn.row, turn.call.parameters
    return row is GENERIC or not all(row.covers(turn.module, name) for name in names)


def skips(turn: Turn, extension: BackpropExtension) -> bool:
    """Tell whether there is nothing to do in a turn; refuse what cannot be done.

    Args:
        turn: The turn.
        extension: The extension that walks from module to module.

    Returns:
        Whether the call only arranges others, or nothing waits for a quantity.

    Raises:
        NotImplementedError: If modules do not describe the graph.
    """
    call, module, parameters = turn.call, turn.module, turn.parameters
    who = {"ext": extension, "module": module}
    if call.is_transparent:
        # in a converted model, they are arguments of the modules inside
        if parameters and not consists_of_modules(module):
            refuse_operation(extension, module, inside=True)
        return True
    if call.is_part:  # of one that is differentiated as a whole
        return True
    if extension.refuses_coupled_samples:
        raise_error_if_coupled(module, call.arguments)
    overwrites = getattr(module, "inplace", False) and bool(call.edges_before)
    is_dropout = isinstance(turn.row.derivatives, DropoutDerivatives)
    is_identity = is_dropout and not module.training
    if overwrites and not (works_in_place(module) or is_identity):
        raise NotImplementedError(message(IN_PLACE, **who))
    call.check_unchanged()
    waits = extension.saved_quantities.retrieve_quantity(id(call), delete_old=False)
    inside_loss = module in turn.backward_pass.in_losses  # nothing starts above it
    return waits is None and (inside_loss or not parameters)


def check_batch_first(turn: Turn, extension: BackpropExtension) -> None:
    """Refuse calls whose samples are not on axis 0.

    Args:
        turn: The call's turn.
        extension: The extension that works sample by sample.

    Raises:
        NotImplementedError: If the samples are on another axis.
    """
    if any(isinstance(x, PackedSequence) for x in turn.call.arguments):
        raise NotImplementedError(message(PACKED, ext=extension, module=turn.module))
    axis = input_batch_axis(turn.module, 0)
    if axis > 0:
        text = message(SAMPLES_NOT_FIRST, ext=extension, module=turn.module, axis=axis)
        raise NotImplementedError(text)


def linearize(
    turn: Turn, extension: BackpropExtension, positions: Iterable[int], frozen: Layer
) -> Linearization:
    """Linearize a call in the inputs that a quantity is passed on to.

    Args:
        turn: The call's turn.
        extension: The extension that is running.
        positions: Which inputs.
        frozen: Copy of the module with the call's inputs, see :func:`freeze_call`.

    Returns:
        The linearization.

    Raises:
        RuntimeError: If the forward pass must be repeated, and cannot be.
    """
    g_out: Any = turn.g_out
    linear = Linearization(turn.row.derivatives, frozen, g_out, positions)
    is_repeated = linear.is_joint or repeats(turn)
    if is_repeated or turn.call.has_other_numbers:
        check_repeats(turn, extension, frozen)
    if is_repeated and extension.separates_samples:
        check_samples_kept(linear, extension)
        check_samples_apart(
            linear, extension, lambda g: linear.jac_t(g[0]), [linear.g_out[0]]
        )
    return linear


def check_repeats(turn: Turn, extension: BackpropExtension, frozen: Layer) -> None:
    """Refuse calls that give another output now, as with other numbers in parameters.

    Args:
        turn: The call's turn.
        extension: The extension that is running.
        frozen: Copy of the module with the call's inputs and output.

    Raises:
        RuntimeError: If the module does not give its output again.
    """
    try:
        if repeats(turn):
            _check_slopes(turn, frozen)
        else:
            with torch.no_grad(), disable():
                stored.repeat(frozen, stored.stored_inputs(frozen))
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # memory was short
            raise
        text = f"{type(extension).__name__}: {error}"
        if turn.call.has_other_numbers:
            text = message(OTHER_NUMBERS, ext=extension, module=frozen)
        raise RuntimeError(text) from error


@out_of_sight
def _check_slopes(turn: Turn, frozen: Layer) -> None:
    """Refuse calls that have other derivatives now, in what nothing else leads to."""
    call = turn.call
    inputs = [(i, edge) for i, edge in enumerate(call.input_edges) if edge is not None]
    behind = {id(x) for _, edge in inputs for x in leaves_behind(edge.node)}
    params = [p for _, p in turn.parameters if p.is_leaf and id(p) not in behind]
    if (
        len(inputs) > 1
        or inputs
        and not call.arguments[inputs[0][0]].is_floating_point()
    ):
        inputs = []  # one may have been made of another; of complex ones, nothing is
    xs, y = stored.evaluate(frozen, [i for i, _ in inputs])
    edges = [*[edge for _, edge in inputs], *map(edge_of, params)]
    has_graph = y.requires_grad and y.is_floating_point()
    if not (edges and has_graph and may_look(y)):
        return
    (column,) = drawn_like([y])
    with without_hooks(params):
        found = pull(y, [*xs, *params], column)
    column = column.to(call.outputs[0].dtype)
    for x, own, like in zip(found, turn.pulled(column, edges), [*xs, *params]):
        if x is not None or own is not None:
            zero = torch.zeros_like(like)
            pair = (zero if z is None else dense(z) for z in (x, own))
            stored.check_slope(frozen, *pair)


def check_samples_kept(linear: Linearization, extension: BackpropExtension) -> None:
    """Refuse calls after which axis 0 holds something else than before.

    Args:
        linear: The linearized call.
        extension: The extension that is running, which works sample by sample.

    Raises:
        NotImplementedError: If the number of samples changes.
    """
    before = [len(x) if x.dim() else 1 for x in linear.inputs()]
    after = len(linear.g_out[0]) if linear.g_out[0].dim() else 1
    if any(size != after for size in before):
        sizes = {"before": " and ".join(map(str, before)), "after": after}
        who = {"ext": extension, "module": linear.module}
        raise NotImplementedError(message(SAMPLES_REARRANGED, **who, **sizes))


def check_samples_apart(
    linear: Linearization,
    extension: BackpropExtension,
    product: Callable[[list[Tensor]], Columns],
    operands: list[Tensor],
) -> None:
    """Refuse a product with a call's derivatives in which samples meet.

    What belongs to some samples must not arrive at the others. To tell all of them
    apart, they are numbered, and those go together that share a binary digit.

    Args:
        linear: The linearized call.
        extension: The extension that is running, which works sample by sample.
        product: Maps columns ``[V, N, *]`` of each operand to such of each input.
        operands: Tensors ``[N, *]``.

    Raises:
        NotImplementedError: If samples meet.
    """
    sizes = {len(x) if x.dim() else 1 for x in (*operands, *linear.inputs())}
    meet = len(sizes) > 1
    if not meet and max(sizes) > 1:
        (n,), device = sizes, operands[0].device

        def find() -> bool:
            numbers = torch.arange(n, device=device)
            some = torch.stack([has_bit(numbers, *half) for half in halves(n)])
            columns = []
            for x, drawn in zip(operands, drawn_like(operands)):
                mask = some.reshape(*some.shape, *[1] * (x.dim() - 1))
                columns.append(drawn.where(mask, 0))
            return any(result[~some].any() for result in product(columns))

        module = linear.module
        key = "meet", type(extension), type(module), repr(module), *sizes
        meet = ask(operands[0], key, find)
    if meet:
        text = message(SAMPLES_MEET, ext=extension, module=linear.module)
        raise NotImplementedError(text)
