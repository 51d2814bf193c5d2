"""One record per module call: what went in, and where its output sits in the graph.

The graph owns the record: it lives exactly as long, and a backward pass through the
graph finds it. Therefore a record must never own the node it is attached to, nor
anything further along in the graph.
"""

from __future__ import annotations

import inspect
import weakref
from functools import lru_cache
from threading import RLock
from types import MappingProxyType
from typing import Any, Collection, ContextManager, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from backpack.core.derivatives.stored import (
    AUTOCAST,
    NAMED,
    OVERWRITTEN,
    STORED,
    shallow_copy,
)
from backpack.engine.nodes.constants import edge_of
from backpack.engine.nodes.graph import GIVEN, calls_at, is_leaf, parents
from backpack.engine.nodes.uses import MODIFIED, Use
from backpack.utils.hooks import name_module
from backpack.utils.types import place_of, version_of, versions_of

RELEASED = (
    "The inputs and outputs of {module} were dropped after an earlier backward pass. "
    "Use `backward(retain_graph=True)` for all but the last backward pass through the "
    "same graph (also where the earlier one ran outside of any context)."
)
_NOTHING: Any = MappingProxyType({})
_OWN = ("torch.nn.", "backpack.custom_module.")


class Stored:
    """What is stored on a module for a turn.

    Attributes:
        values: Attributes and their values.
        displaced: A user's, by the same names, which come back afterwards.
    """

    __slots__ = ("displaced", "values")

    def __init__(self) -> None:
        """Begin with nothing."""
        self.values: dict[str, Any] = {}
        self.displaced: dict[str, Any] = {}


class Call:
    """A module's call.

    Attributes:
        module_ref: Weak reference to the module, which may store what owns this call.
        arguments: All arguments, in the order of ``forward``'s signature.
        named: Names of the last ones, which can't be given by position.
        input_edges: Where each argument sits in the graph.
        edges_before: What an operation in place, which made an argument the output,
            was computed from, by the argument's position; empty if another call
            returned the argument as it is. Such arguments have no other place.
        outputs: Floating-point tensors of the output, detached.
        versions: How often the arguments were modified in place before.
        output_version: How often the first output was.
        settings: Whether the module was in training mode, and its options, by name.
        buffers: Buffers that are options, by name: weights of a loss; and running
            statistics.
        output_shapes: Their shapes, which are remembered.
        precision: Type that autocast ran operations in; ``None`` without autocast.
        parameters: The tensors in the place of the module's own parameters, by (dotted)
            name, and of those of modules inside that were not called themselves; for
            an operation that the converter made a module, its arguments.
        places: Where their numbers were.
        uses: Uses of parameters that happened in this module, and in none inside.
        placement: Where the samples are in the first argument, for a loss.
        placements: Where they are in each output, if it was called by the user.
        n: Number of samples, for the same.
        is_loss: Whether the call computes a loss.
        is_function: Whether that was a function, which the model has called.
        loss_module: The module if it is a loss, which may be owned by nobody else.
        released: Whether inputs and outputs have been dropped.
        columns: Columns ``[V, N, *]`` at each output, chunk by chunk, by their source.
        is_composite: Whether the module has modules inside.
        is_transparent: Whether modules inside were called, which describe it.
        is_part: Whether it happened in a call that is taken as a whole.
        is_apart: Whether its outputs come from different nodes of the graph.
        is_altered: Whether a hook may have changed the output before it was recorded.
        graphless: Modules called before, whose outputs are not part of a graph.
        is_outermost: Whether it happened inside of no other.
        inside: Calls that happened inside, for such a call.
        stored: What is stored on the module.
        hides: Whether the module has something of its own by one of these names.
    """

    is_use = is_loss = is_composite = is_transparent = released = False
    is_function = is_altered = is_outermost = is_apart = is_part = hides = False
    loss_module: Module | None = None
    placement: Any = None
    placements: Any = None
    n = 0
    precision: torch.dtype | None = None
    # shared while empty: what the garbage collector has to track costs time
    uses: Sequence[Use] = ()
    graphless: Iterable[Module] = ()
    inside: Sequence[CallRef] = ()
    stored: Stored | None = None
    arguments: Sequence[Any] = ()
    named: tuple[str, ...] = ()
    places: Sequence[int] = ()
    input_edges: Sequence[GradientEdge | None] = ()
    outputs: Sequence[Tensor] = ()
    output_shapes: Sequence[torch.Size] = ()
    columns: dict[Any, list[list[Tensor | None]]] = _NOTHING
    buffers: dict[str, Tensor | None] = _NOTHING
    edges_before: dict[int, list[GradientEdge]] = _NOTHING

    def __init__(self, module: Module):
        """Begin the record of a call.

        Args:
            module: The module.
        """
        self.module_ref = weakref.ref(module)

    def finish(
        self,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
        output_edges: list[GradientEdge | None],
        parameters: dict[str, Tensor],
    ) -> None:
        """Record what went in and came out.

        Args:
            module: The module.
            args: Positional arguments.
            kwargs: Keyword arguments.
            outputs: Floating-point tensors of the output.
            output_edges: Where they sit in the graph, which is not kept.
            parameters: Parameters the call is responsible for.
        """
        state, names = module.__dict__, _options(type(module))
        self.settings = {name: state[name] for name in names if name in state}
        buffers = state["_buffers"]
        if buffers:
            self.buffers = {name: buffers[name] for name in names if name in buffers}
        self.parameters = parameters
        if parameters:
            self.places = list(map(place_of, parameters.values()))
        self.arguments, self.named = args, ()
        if kwargs:
            self.arguments, self.named = _bind(module, args, kwargs)
        edges = self.input_edges = [
            edge_of(x) if isinstance(x, Tensor) and x.requires_grad else None
            for x in self.arguments
        ]
        for edge in edges:
            if edge is not None and is_leaf(edge.node):
                edge.node.metadata.setdefault(GIVEN, {})[id(module)] = self.module_ref
        same = [i for i, e in enumerate(edges) if e is not None and e in output_edges]
        if same:
            # Its own output, which this call must not own: the module returned an
            # input as it is, or modified it in place.
            self.edges_before = {i: _edges_before(edges[i]) for i in same}
            self.input_edges = [None if i in same else e for i, e in enumerate(edges)]
            self.arguments = list(map(_detach, self.arguments))
        self.versions = versions_of(self.arguments)
        self.outputs = [x.detach() for x in outputs]
        self.output_version = version_of(outputs[0]) if outputs else 0
        self._returned = list(map(weakref.ref, outputs))  # they own this call
        self.output_shapes = [out.shape for out in outputs]
        if outputs and torch._C._is_any_autocast_enabled():
            device = outputs[0].device.type
            available = torch.amp.is_autocast_available(device)
            if available and torch.is_autocast_enabled(device):
                self.precision = torch.get_autocast_dtype(device)

    @property
    def input_requires_grad(self) -> bool:
        """Whether an argument is part of the graph."""
        return bool(self.edges_before) or any(self.input_edges)

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return [x for x in self.arguments if isinstance(x, Tensor)]

    @property
    def reduction(self) -> str | None:
        """How a loss reduces, as its module said, if it did."""
        own = getattr(self.loss_module, "reduction", None)
        return self.settings.get("reduction", own)

    def tensors(self) -> list[Tensor]:
        """List the tensors that a user may hold of this call, as far as they exist.

        Returns:
            Inputs and outputs, which are part of the graph.
        """
        returned = [ref() for ref in self._returned]
        for x in returned:
            if x is not None:
                x._fix_weakref()
        return [x for x in (*self.arguments, *returned) if isinstance(x, Tensor)]

    def describe(self, param: Tensor) -> str:
        """Name a parameter of the module, for a message.

        Args:
            param: The parameter.

        Returns:
            Module and name.
        """
        names = [name for name, p in self.parameters.items() if p is param]
        return f"{self.module} (parameter '{', '.join(names)}')"

    @property
    def num_outputs(self) -> int:
        """Number of floating-point tensors in the output."""
        return len(self.output_shapes)

    def check_live(self) -> None:
        """Check that inputs and outputs have not been dropped.

        Raises:
            RuntimeError: If they were.
        """
        if self.released:
            module = self.module_ref()
            name = "a module" if module is None else name_module(module)
            raise RuntimeError(RELEASED.format(module=name))

    @property
    def module(self) -> Module:
        """The module that was called."""
        module = self.module_ref()
        if module is None:
            raise RuntimeError(
                "An extended module was deleted between its forward and the backward "
                "pass. Keep the model until the backward pass has run."
            )
        return module

    @property
    def is_output_unchanged(self) -> bool:
        """Whether the first output was not modified in place since."""
        return version_of(self.outputs[0]) == self.output_version

    @property
    def has_other_numbers(self) -> bool:
        """Whether a parameter got others by ``.data``, which no version counts."""
        return list(map(place_of, self.parameters.values())) != list(self.places)

    def check_unchanged(self) -> None:
        """Check that no input was modified since the call.

        Raises:
            RuntimeError: If an input was modified in place.
        """
        if versions_of(self.arguments) != self.versions:
            raise RuntimeError(MODIFIED.format(operation=name_module(self.module)))

    def store(self, raw: bool) -> None:
        """Store inputs and output as attributes ``input0``, ... , ``output``.

        Args:
            raw: Whether the inputs keep their connection to the graph.
        """
        module = self.module
        inputs = self.arguments if raw else map(_detach, self.arguments)
        values = (self.outputs[0] if self.outputs else None, *inputs)
        attributes, stored = module.__dict__, Stored()
        params, buffers = attributes["_parameters"], attributes["_buffers"]
        modules, new = attributes["_modules"], stored.values
        with lock_of(module):
            if STORED in attributes:
                clear_stored(module)
            for name, value in zip(_names(type(module), len(values)), values):
                if name is None or name in params or name in buffers or name in modules:
                    self.hides = True
                elif name not in attributes:
                    new[name] = value
                elif raw:
                    stored.displaced[name] = attributes[name]
                    new[name] = value
            overwritten = self.is_loss and not self.is_output_unchanged
            of_call: dict[str, Any] = {
                NAMED: self.named,
                OVERWRITTEN: overwritten,
                AUTOCAST: self.precision,
            }
            new.update((name, value) for name, value in of_call.items() if value)
            attributes.update(new)
            attributes[STORED] = self.stored = stored

    def release_all(self, keeps: bool) -> None:
        """Drop what this call and those inside of it keep.

        Args:
            keeps: Whether another pass needs it: then drop what modules store.
        """
        calls = (self, *[ref.alive() for ref in self.inside])
        self.inside = self.inside if keeps else ()  # each of its outputs asks for this
        for call in calls:
            if call is not None:
                for use in call.uses:
                    use.release(keeps)
                call.release(keeps)

    def release(self, keeps: bool = False) -> None:
        """Drop inputs and outputs, here and on the modules.

        Args:
            keeps: Whether another pass needs those here. Default: ``False``.
        """
        module = self.module_ref()
        if module is not None:
            clear_stored(module)
        for graphless in self.graphless:
            clear_stored(graphless)
        self.columns = _NOTHING
        if keeps:
            return
        self.arguments = self.input_edges = ()
        self.outputs = self.graphless = self.uses = ()
        self.loss_module = None
        self.released = True


def _edges_before(edge: GradientEdge) -> list[GradientEdge]:
    """List what a node was computed from, unless calls are attached to it already."""
    return [] if calls_at(edge.node) else parents(edge.node)


def _detach(value: Any) -> Any:
    """Detach the tensors in a value; quick where it is no container."""
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and all(isinstance(x, Tensor) for x in value):
        return tuple(map(Tensor.detach, value))
    return tree_map_only(Tensor, Tensor.detach, value)


def _bind(
    module: Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[list[Any], tuple[str, ...]]:
    """Bring arguments into the order of the forward function's signature.

    Last come those that can't be given by position, as something in front of them was
    left out, and their names are returned.
    """
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return [*args, *kwargs.values()], tuple(kwargs)
    return [*bound.args, *bound.kwargs.values()], tuple(bound.kwargs)


@lru_cache(maxsize=256)
def _names(cls: type, number: int) -> tuple[str | None, ...]:
    """Return the attributes for an output and inputs; ``None`` if the class has it."""
    names = ("output", *(f"input{i}" for i in range(number - 1)))
    return tuple(None if hasattr(cls, name) else name for name in names)


@lru_cache(maxsize=256)
def _options(cls: type) -> tuple[str, ...]:
    """Name what may be changed from call to call: how layers of PyTorch are made."""
    made = [c for c in cls.__mro__[:-2] if c.__module__.startswith(_OWN)]
    names = [name for c in made for name in inspect.signature(c).parameters]
    statistics = ("running_mean", "running_var") if issubclass(cls, _NormBase) else ()
    return ("training", *dict.fromkeys(names), *statistics)


def clear_copy(module: Module) -> Any:
    """Copy a module as it is, such that later changes of its options do not matter.

    Args:
        module: The module.

    Returns:
        The copy, which holds nothing that was stored for a turn.
    """
    copied = shallow_copy(module, _parameters=dict(module._parameters))
    if STORED in copied.__dict__:
        _clear(copied.__dict__)
    return copied


_LOCKS: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()


def lock_of(module: Module) -> ContextManager:
    """Return what keeps other threads from storing anything on a module.

    Threads may share a loss, or call a model while another one's backward pass uses it.

    Args:
        module: The module.

    Returns:
        Its lock, which a thread may take several times.
    """
    return _LOCKS.get(module) or _LOCKS.setdefault(module, RLock())


def clear_stored(module: Module) -> None:
    """Delete the tensors that a forward pass stored on a module.

    Args:
        module: The module.
    """
    attributes = module.__dict__
    if STORED in attributes:
        with lock_of(module):
            stored = attributes.get(STORED)
            _clear(attributes)
            if stored is not None:  # who remembers it does not keep the tensors
                stored.values = {}


def _clear(attributes: dict[str, Any]) -> None:
    stored = attributes.pop(STORED, None)
    if stored is None:
        return
    for name, value in stored.values.items():
        if attributes.get(name, STORED) is value:  # else, it is a user's
            del attributes[name]
            if name in stored.displaced:
                attributes[name] = stored.displaced[name]


class CallRef(weakref.ref):
    """Refers to a call, and remembers what it has stored on its module."""

    __slots__ = ("_module_ref", "_stored")

    def __init__(self, call: Call):
        """Remember a call.

        Args:
            call: The call, which its node of the graph owns.
        """
        self._module_ref, self._stored = call.module_ref, call.stored

    def alive(self) -> Call | None:
        """Look the call up; if its graph is gone, drop what it has stored.

        Returns:
            The call, if it is there.
        """
        call, module = self(), self._module_ref()
        if call is None and module is not None:
            if module.__dict__.get(STORED) is self._stored:
                clear_stored(module)
        return call


def clear_others(calls: Collection[Call]) -> None:
    """Clear modules that were called inside of others, and have no turn of their own.

    Such as those that never see what depends on inputs.

    Args:
        calls: The calls that have a turn.
    """
    for call in [ref.alive() for outer in calls for ref in outer.inside]:
        module = None if call is None or call in calls else call.module_ref()
        if module is not None:
            clear_stored(module)
