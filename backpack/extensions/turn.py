"""One call's turn in a backward pass: what extensions compute from.

When the gradient at a call's output is known, extensions run on the call. A
:class:`Turn` hands them the call's inputs, the cotangents at its output, and the
per-sample products of its parameters, each of which is formed once and shared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Module, Parameter
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from backpack.core.derivatives.dropout import MASK
from backpack.core.derivatives.generic import generic_products
from backpack.core.per_sample.base import PerSample
from backpack.extensions.layers import Row, find_row_or_generic, works_in_place
from backpack.graph import Entry, producing_calls, targets_below
from backpack.utils.hooks import without_hooks
from backpack.utils.subsampling import subsample
from backpack.utils.types import as_type

if TYPE_CHECKING:
    from backpack.backward import BackwardPass
    from backpack.capture import Call
    from backpack.extensions.backprop_extension import BackpropExtension
    from backpack.extensions.secondorder.columns import Source

Cotangents = List[Optional[Tensor]]

EXTEND_LOSS = (
    "{ext} (field '{field}') found no quantity pulled back to {module}, because no "
    "extended loss was met before it in this backward pass. Second-order extensions "
    "start at the loss: use a loss module, `lossfunc = extend(lossfunc)`, and compute "
    "the loss from this model's output with it."
)
NEGATIVE_LOSS = (
    "{module}: the loss is multiplied by {factor}, and the Hessian of the result is "
    "not positive semi-definite, which the GGN family requires. Use a positive factor, "
    "or quantities of the Hessian (DiagHessian, HMP)."
)
NOT_A_CHAIN = (
    "{ext} (field '{field}') walks from module to module, and what consumes the output "
    "of {module} is not an extended module with a rule for it, but an operation in "
    "between. Use `extend(model, use_converter=True)`, which turns operations into "
    "modules, or write the model with modules only."
)
OTHER_OUTPUT = (
    "{ext} (field '{field}') goes back through the first output of a module only, but "
    "output {index} of {module} is used, too. Use the first one only."
)
SAVED_TWICE = (
    "{ext} (field '{field}') computes its value from a single call, but a parameter of "
    "{module} takes part in several calls in this backward pass. Give each call a "
    "module of its own."
)


class _Current(threading.local):
    turn: Optional[Turn] = None


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


def loss_scale(module: Module, factor: Tensor) -> Tensor:
    """Return what the columns of a loss that was scaled have to be multiplied by.

    Args:
        module: The loss module.
        factor: Gradient at its output.

    Returns:
        Square root of the gradient.

    Raises:
        ValueError: If the loss was multiplied by a negative number.
    """
    if factor < 0:
        raise ValueError(NEGATIVE_LOSS.format(module=module, factor=float(factor)))
    return factor.sqrt()


def mode_of(call: Call) -> AbstractContextManager:
    """Put a module into the mode in which it was called, inside the context.

    Args:
        call: Its call.

    Returns:
        The context.
    """
    return _SAME if call.module.training == call.training else _other_mode(call)


_SAME = nullcontext()


@contextmanager
def _other_mode(call: Call) -> Iterator[None]:
    module = call.module
    module.training = call.training
    try:
        yield
    finally:
        module.training = not call.training


class Products(Mapping):
    """Products of cotangents and the Jacobians of one call's parameters.

    Each is formed when first asked for: by the layer's fast rule where there is one,
    else by the generic rule, for all of the call's other parameters at once.
    """

    def __init__(self, call: Call, cotangents: Cotangents, names: Sequence[str]):
        """Store what they are formed from.

        Args:
            call: The call.
            cotangents: Columns ``[V, N, *]``, one entry for each output of the call.
            names: Names of the parameters in the call's module.
        """
        self._call, self._cotangents, self._names = call, cotangents, names
        self._row: Optional[Row] = None
        self._formed: Dict[str, PerSample] = {}
        self._in_type: Dict[torch.dtype, Tuple[List[Any], Cotangents]] = {}
        self._shared: Dict[Any, Tuple[Tensor, Tensor]] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the parameters' names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Count the parameters."""
        return len(self._names)

    def __getitem__(self, name: str) -> PerSample:
        """Describe the products for a parameter.

        Args:
            name: Name of the parameter in the call's module.

        Returns:
            The products.
        """
        if name not in self._formed:
            self._form(name)
        product = self._formed[name]
        product.shared = self._shared
        return product

    def _form(self, name: str) -> None:
        """Describe the products for a parameter, and for those that come with it."""
        call, row = self._call, self._rule(name)
        call.check_unchanged()
        if row is not None:
            # under autocast, inputs and outputs have other types than parameters
            arguments, mats = self._converted(call.parameters[name].dtype)
            mats = mats if row.several_outputs else mats[0]
            product = row.derivatives.product(name, call.module, arguments, mats)
            self._formed[name] = product
            return
        others = [other for other in self._names if self._rule(other) is None]
        self._formed.update(
            generic_products(
                others,
                call.module,
                call.args,
                self._cotangents,
                call.kwargs,
                call.random_state,
                call.unchanged_outputs(),
            )
        )

    def _converted(self, dtype: torch.dtype) -> Tuple[List[Any], Cotangents]:
        """Return arguments and cotangents in a type: the same tensors for all names."""
        if dtype not in self._in_type:
            both = self._call.arguments, self._cotangents
            self._in_type[dtype] = tuple([as_type(x, dtype) for x in xs] for xs in both)
        return self._in_type[dtype]

    def _rule(self, name: str) -> Optional[Row]:
        if self._row is None:
            self._row = find_row_or_generic(self._call)
        return self._row if self._row.covers(self._call.module, name) else None


class Turn:
    """A call whose output's gradient is known.

    Attributes:
        call: The call.
        module: The module that was called.
        backward_pass: The backward pass that reached it.
        g_out: Gradients at the call's outputs (``None`` for those not reached).
    """

    def __init__(
        self,
        call: Call,
        backward_pass: BackwardPass,
        g_out: Tuple[Optional[Tensor], ...],
        entries: List[Entry],
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
        self._parameters = backward_pass.parameters(call)
        self._own: Optional[Products] = None
        self._gradients: Dict[str, PerSample] = {}
        self._by_source: Dict[Tuple[Source, Optional[Tuple]], Products] = {}
        self._producers: Optional[Dict[int, Call]] = None

    def __enter__(self) -> Turn:
        """Make this the current turn."""
        self._outer, _CURRENT.turn = _CURRENT.turn, self
        if self.call in self.backward_pass.dropouts:
            self.module.__dict__[MASK] = self._drawn_mask()
        self._mode = mode_of(self.call)
        self._mode.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        """Return to the turn that was current before."""
        _CURRENT.turn = self._outer
        self._mode.__exit__(*exc_info)
        self.module.__dict__.pop(MASK, None)

    def _drawn_mask(self) -> Tensor:
        """Ask the graph for the mask of a dropout layer, which values do not tell."""
        from backpack.context import state

        edge, x = self.backward_pass.dropouts[self.call], self.call.input_edges[0]
        current = state()
        current.pulling = True
        try:
            ones = torch.ones_like(self.call.outputs[0])
            with without_hooks(self.call.tensors()):
                return torch.autograd.grad(edge, x, ones, retain_graph=True)[0].detach()
        finally:
            current.pulling = False

    def _note_dropouts(self) -> None:
        """Remember where the outputs of dropout layers sit that lead to this loss."""
        edge = self.call.input_edges[0]
        for entry, node in [] if edge is None else targets_below([edge.node]):
            drops = isinstance(entry.call.module, _DropoutNd)
            if drops and entry.call.training and entry.call.input_edges[0]:
                edge = GradientEdge(node, entry.output_nr)
                self.backward_pass.dropouts[entry.call] = edge

    @cached_property
    def row(self) -> Row:
        """The rule for the call."""
        return find_row_or_generic(self.call)

    def parameters(self) -> List[Tuple[str, Parameter]]:
        """List the parameters that this call is responsible for.

        Returns:
            Names in the module and parameters, those that take part in this backward
            pass and require a gradient only.
        """
        return self._parameters

    def products(self, cotangents: Cotangents) -> Products:
        """Describe products of cotangents and the parameters' Jacobians.

        Args:
            cotangents: Columns ``[V, N, *]``, one entry for each output of the call.

        Returns:
            The products, by the parameters' names.
        """
        names = [name for name, _ in self._parameters]
        return Products(self.call, cotangents, names)

    def gradients(self, name: str) -> PerSample:
        """Describe the individual gradients of a parameter, with V = 1.

        Where the parameter takes part in several calls, those that have had their turn
        are included: the last one's result is complete.

        Args:
            name: Name of the parameter in the module.

        Returns:
            The individual gradients.
        """
        if name not in self._gradients:
            product = self.own_gradients(name)
            param = self.call.parameters[name]
            if self.backward_pass.is_shared(param, self.call):
                product = self._merge_shared(name, param, product)
            product.keeps_total = self.backward_pass.left_out.get(param, False)
            self._gradients[name] = product
        return self._gradients[name]

    def _merge_shared(
        self, name: str, param: Parameter, product: PerSample
    ) -> PerSample:
        """Add up what the calls that had their turn contribute to a parameter."""
        shared = self.backward_pass.shared_products
        if param in shared:
            try:
                product = shared[param].merge(product)
            except ValueError as error:
                text = f"Parameter '{name}' of {self.module}: {error}"
                raise ValueError(text) from error
        shared[param] = product
        return product

    def own_gradients(self, name: str) -> PerSample:
        """Describe what this call alone contributes to the individual gradients.

        Args:
            name: Name of the parameter in the module.

        Returns:
            The contributions, with V = 1.
        """
        if self._own is None:
            columns = [None if g is None else g.unsqueeze(0) for g in self.g_out]
            self._own = self.products(columns)
        return self._own[name]

    def loss_scale(self) -> Tensor:
        """Return what the columns of a loss that was scaled have to be multiplied by.

        Returns:
            Square root of the gradient at the loss, see :func:`loss_scale`.
        """
        return loss_scale(self.module, self.g_out[0])

    def producers(self, extension: BackpropExtension) -> Dict[int, Call]:
        """Find the calls that the arguments come from, directly.

        Args:
            extension: The extension that walks from module to module.

        Returns:
            For each argument by position, the last call that returned it, other than
            containers, if there is one.

        Raises:
            NotImplementedError: If parameters take part in an argument in another way.
        """
        if self._producers is not None:
            return self._producers
        found: Dict[int, Call] = {}
        in_place = works_in_place(self.module)
        for position, edge in enumerate(self.call.input_edges):
            edges = [edge]
            if self.call.passes_on[position]:
                edges = self.call.edges_before[position]
            if self.call.passes_on[position] and not (in_place and edges):
                entries = self._entries
                entries = entries[: [e.call for e in entries].index(self.call)]
            elif edges == [None]:
                continue
            else:
                entries = producing_calls(edges[0])
            entries = [entry for entry in entries if not entry.call.is_transparent]
            if entries:
                self._check_first(extension, entries[-1])
                found[position] = entries[-1].call
            else:
                for before in edges:
                    self._check_no_parameters(extension, before.node)
        values = (*self.call.args, *self.call.kwargs.values())
        nested = [x for x in values if not isinstance(x, Tensor)]
        for x in tree_leaves(nested) if nested else ():
            if isinstance(x, Tensor) and x.requires_grad and x.grad_fn is not None:
                self._check_no_parameters(extension, x.grad_fn)
        self._producers = found
        return found

    def _check_first(self, extension: BackpropExtension, entry: Entry) -> None:
        if entry.index > 0:
            text = self._text(extension, entry.call.module)
            raise NotImplementedError(OTHER_OUTPUT.format(index=entry.index, **text))

    def _check_no_parameters(self, extension: BackpropExtension, node: Node) -> None:
        """Refuse to drop a quantity that parameters are waiting for."""
        for target in targets_below([node]):
            call = target.entry.call
            if any(param.requires_grad for param in call.parameters.values()):
                text = self._text(extension, call.module)
                raise NotImplementedError(NOT_A_CHAIN.format(**text))

    def column_products(
        self, source: Source, name: str, numbers: Optional[Tuple[int, ...]] = None
    ) -> PerSample:
        """Describe the products of the losses' columns and a parameter's Jacobian.

        Args:
            source: Where the columns come from.
            name: Name of the parameter in the module.
            numbers: Which of the columns to use. Default: ``None`` for all.

        Returns:
            The products.
        """
        columns = self.call.columns[source]
        count = next((x.shape[0] for x in columns if x is not None), 0)
        if numbers is not None and len(numbers) == count:
            numbers = None
        key = source, numbers
        if key not in self._by_source:
            if numbers is not None:
                some = list(numbers)
                columns = [None if x is None else x[some] for x in columns]
            self._by_source[key] = self.products(columns)
        return self._by_source[key][name]

    def walks(self, extension: BackpropExtension) -> bool:
        """Tell whether a quantity goes from module to module for an extension.

        Args:
            extension: The extension.

        Returns:
            Whether it does, instead of being pulled back by autograd.
        """
        return getattr(extension, "walks_modules", True)

    def incoming(self, extension: BackpropExtension) -> Any:
        """Return what an extension has pulled back to this call's output.

        Args:
            extension: The extension.

        Returns:
            The quantity: columns ``[V, N, *out]`` for the GGN family, of the samples
            that the extension considers; ``None`` for losses and for first-order
            extensions.

        Raises:
            AssertionError: If no extended loss was met.
            NotImplementedError: If the graph is not a chain of modules.
        """
        needed = extension.expects_backpropagation_quantities()
        if not needed or self.call.is_loss:
            return None
        if self.walks(extension):
            saved = extension.saved_quantities
            quantity = saved.retrieve_quantity(id(self.call), delete_old=True)
            if quantity is None:
                self._explain_missing(extension)
            return quantity
        if extension.source not in self.call.columns:
            self._explain_missing(extension)
        columns = self.call.columns[extension.source][0]
        return subsample(columns, dim=1, subsampling=extension.get_subsampling())

    def _text(self, extension: BackpropExtension, module: Module) -> Dict[str, Any]:
        return {
            "ext": type(extension).__name__,
            "field": extension.savefield,
            "module": module,
        }

    def _explain_missing(self, extension: BackpropExtension) -> None:
        text = self._text(extension, self.module)
        if self.walks(extension) and self.backward_pass.loss_factors:
            raise NotImplementedError(NOT_A_CHAIN.format(**text))
        raise AssertionError(EXTEND_LOSS.format(**text))

    def pass_on(self, extension: BackpropExtension, quantities: Any) -> None:
        """Hand what an extension has pulled back to the inputs to the calls before.

        Args:
            extension: The extension.
            quantities: Quantity at the input; a list or tuple for several inputs.
        """
        if quantities is None:
            return
        if self.call.is_loss:
            self._note_dropouts()
        several = isinstance(quantities, (list, tuple))
        quantities = list(quantities) if several else [quantities]
        for position, before in self.producers(extension).items():
            quantity = quantities[position] if position < len(quantities) else None
            if quantity is not None:
                accumulate = extension.accumulate_backpropagated_quantities
                try:
                    extension.saved_quantities.save_quantity(
                        id(before), quantity, accumulate
                    )
                except NotImplementedError as error:
                    text = f"At the output of {before.module}: {error}"
                    raise NotImplementedError(text) from error
                self.backward_pass.walked.add(extension)

    def save(self, extension: BackpropExtension, param: Parameter, value: Any) -> None:
        """Save a value on a parameter.

        Args:
            extension: The extension whose field it is.
            param: The parameter.
            value: The value.
        """
        if isinstance(value, list):
            value = [as_type(x, param.dtype) for x in value]
        setattr(param, extension.savefield, as_type(value, param.dtype))
        report = self.backward_pass.state.report
        if report is not None:
            report.saved.add((id(extension), id(param)))

    def save_alone(
        self, extension: BackpropExtension, param: Parameter, value: Any
    ) -> None:
        """Save a value that cannot be combined with that of another call.

        It is an error if another call has saved a value before.

        Args:
            extension: The extension whose field it is.
            param: The parameter.
            value: The value.
        """
        saved = self.backward_pass.saved_alone
        if (extension, param) in saved:
            self.refuse_several_calls(extension, self.module)
        saved.add((extension, param))
        self.save(extension, param, value)

    def refuse_several_calls(self, extension: BackpropExtension, module: Module):
        """Refuse a parameter that takes part in several calls.

        Args:
            extension: The extension that works on a single one.
            module: A module that has the parameter.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(SAVED_TWICE.format(**self._text(extension, module)))
