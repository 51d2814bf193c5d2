"""Tracing a model into a graph without changing it, and without losing anything."""

import builtins
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import Any, Callable, Dict, Iterable, Iterator, Optional, Set, Tuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import Graph, GraphModule, Proxy, Tracer
from torch.fx.proxy import TraceError
from torch.nn import Module

from backpack.converter.reading import leaves
from backpack.converter.tracer import (
    MADE,
    SETS,
    BackpackTracer,
    TrainingFlag,
    Untraceable,
    is_instance,
    keep,
    length,
)
from backpack.utils.errors import warn_user
from backpack.utils.hooks import OPENED, path_of

# Functions that make a tensor of given sizes: torch.fx sees those of tensors only
FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "zeros")
# Recorded in any case: Otherwise, the numbers drawn while tracing would be kept
RANDOM_FACTORIES = ("rand", "randint", "randn", "randperm", "normal", "bernoulli")
# Functions that take nothing but a bool for the training flag
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_REQUIRES_GRAD: Any = Tensor.requires_grad
_APPLY = vars(Function)["apply"]

CANNOT_TRACE = (
    "Cannot convert {name}: its forward cannot be traced ({reason}). Move that part, "
    + "and what depends on the data (control flow, loops over a tensor), into a "
    + "submodule: submodules that cannot be traced are kept as they are."
)
LOST_STATE = (
    "The forward of {name} sets the attributes {attributes}. The converted model does "
    + "not do that. Return what they hold, if it is needed."
)


def _recording(tracer: Tracer, function: Callable, always: bool) -> Callable:
    @wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        if always or leaves((args, kwargs), Proxy):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record


@contextmanager
def _recording_functions(tracer: Tracer) -> Iterator[None]:
    """Record functions that would not accept a proxy or :class:`TrainingFlag`.

    Those that take effect while tracing only are refused.

    Args:
        tracer: The tracer.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        for name in FACTORIES + RANDOM_FACTORIES + DROPOUTS:
            function = getattr(torch, name)
            record = _recording(tracer, function, name in RANDOM_FACTORIES)
            stack.enter_context(patch.object(torch, name, record))
        stack.enter_context(patch.object(builtins, "isinstance", is_instance))
        stack.enter_context(patch.object(builtins, "len", length))
        apply = classmethod(partial(_record_apply, tracer))
        stack.enter_context(patch.object(Function, "apply", apply))
        refuse = _refusing("it switches autocast on or off")
        stack.enter_context(patch.object(torch, "set_autocast_enabled", refuse))
        for owner in (Tensor, Module):
            refuse = _refusing(SETS.format(name="requires_grad_"))
            stack.enter_context(patch.object(owner, "requires_grad_", refuse))
        refuse = _refusing(SETS.format(name="requires_grad"))
        switch = property(_REQUIRES_GRAD.__get__, refuse)
        stack.enter_context(patch.object(Tensor, "requires_grad", switch))
        yield


def _record_apply(tracer: Tracer, function: type, *args: Any, **kwargs: Any) -> Any:
    """Record a function that has a backward of its own, which would be lost inside."""
    record = _recording(tracer, MethodType(apply, function), always=False)
    return record(*args, **kwargs)


def apply(function: type, *args: Any, **kwargs: Any) -> Any:
    """Call a function that has a backward of its own, also while tracing.

    Graphs want to know a module of what they call, PyTorch's own method may have none.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: The same by name.

    Returns:
        What it returns.
    """
    return _APPLY.__get__(None, function)(*args, **kwargs)


def _refusing(reason: str) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TraceError(reason)

    return refuse


class _State:
    """The attributes of a module, and what is in the containers among them."""

    def __init__(self, module: Module):
        """Look at them.

        Args:
            module: The module.
        """
        self._module = module
        self._attributes = self._look()
        self._inside: Dict[int, Tuple[str, Any, Any]] = {}
        for name, value in self._attributes.items():
            self._look_into(name, value)

    def _look(self) -> Dict[str, Any]:
        return {k: v for k, v in vars(self._module).items() if k != "training"}

    def _look_into(self, name: str, value: Any) -> None:
        """Remember what is in a container, and in those inside of it."""
        if type(value) in _CONTAINERS and id(value) not in self._inside:
            self._inside[id(value)] = name, value, copy(value)
            for item in value.values() if isinstance(value, dict) else value:
                self._look_into(name, item)

    def restore(self) -> Set[str]:
        """Undo what tracing a forward did to them.

        Returns:
            Names of the attributes that were set, or written into.
        """
        missing, before, state = object(), self._attributes, vars(self._module)
        now = self._look()
        changed = {k for k, v in now.items() if before.get(k, missing) is not v}
        for name in changed:
            del state[name]
        state.update(before)
        for name, value, old in self._inside.values():
            if not _is_same(value, old):
                is_own = name in ("_buffers", "_parameters", "_modules")
                changed |= _changes(value, old) if is_own else {name}
                value.clear()
                (value.extend if hasattr(value, "extend") else value.update)(old)
        return {name for name in changed if not name.startswith(MADE)}


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two containers of a kind have the same objects."""
    if isinstance(one, dict):
        return [*one] == [*other] and _is_same([*one.values()], [*other.values()])
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _changes(one: Dict[str, Any], other: Dict[str, Any]) -> Set[str]:
    """Find the names under which two dictionaries have other objects."""
    return {k for k in {*one, *other} if one.get(k) is not other.get(k)}


class Converted(GraphModule):
    """A converted model, whose copies keep its hooks, as those of other modules do.

    It knows which classes of modules were opened: rules for them are not used.
    """

    def __deepcopy__(self, memo: Dict[int, Any]) -> GraphModule:
        """Copy the model, and its hooks with it.

        Args:
            memo: What has been copied already.

        Returns:
            The copy.
        """
        copied = super().__deepcopy__(memo)
        vars(copied).update(deepcopy(_hooks_of(self), memo))
        vars(copied)[OPENED] = vars(self).get(OPENED, {})
        return copied


def _hooks_of(module: Module) -> Dict[str, Any]:
    """Collect a module's hooks, and what it says of them."""
    return {name: value for name, value in vars(module).items() if "_hook" in name}


def _names_by_base(classes: Iterable[type]) -> Dict[str, str]:
    """Name classes of modules, by the name of each base that they have."""
    return {
        path_of(base): cls.__name__
        for cls in classes
        for base in cls.__mro__
        if not issubclass(Module, base)
    }


def _trace_once(root: Module, keep_whole: Tuple[str, ...]) -> GraphModule:
    """Trace a model, stopping at the given submodules.

    Args:
        root: The model. It is the same after as before.
        keep_whole: Qualified names of the submodules to stop at.

    Returns:
        Graph module that shares the model's layers.

    Raises:
        Untraceable: If a module's forward cannot be traced.
    """
    tracer = BackpackTracer(keep_whole)
    traced = {
        path: module
        for path, module in root.named_modules()
        if path == "" or not tracer.is_leaf_module(module, path)
    }
    for path, module in traced.items():
        if path and (module._backward_hooks or module._backward_pre_hooks):
            raise Untraceable(path, "it has a backward hook")
    modes = {module: module.training for module in traced.values()}
    states = {path: _State(module) for path, module in traced.items()}
    try:
        for module, mode in modes.items():
            flag = TrainingFlag(mode)
            flag.owner, flag.is_root = module, module is root
            module.__dict__["training"] = flag
        with _recording_functions(tracer), torch.enable_grad():
            graph = Graph()
            graph.output(graph.graph_copy(tracer.trace(root), {}))
        _keep_names(graph, root)
        graph_module = Converted(root, graph, type(root).__name__)
        opened = _names_by_base({type(root), *tracer.opened})
        for module in traced.values():  # some may have been converted before
            opened.update(vars(module).get(OPENED, {}))
        vars(graph_module)[OPENED] = opened
        for name, hooks in _hooks_of(root).items():
            if "_forward_" in name or "_backward_" in name:
                vars(graph_module)[name] = copy(hooks)
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable("", error) from error
    finally:
        for module, mode in modes.items():
            module.__dict__["training"] = mode
        changes = {path: state.restore() for path, state in states.items()}

    for path, names in changes.items():
        if names and path != "":
            raise Untraceable(path, f"it sets its attributes {sorted(names)}")
    for name in changes[""]:
        if isinstance(vars(graph_module).get(name), Proxy):  # as root had it meanwhile
            delattr(graph_module, name)
            graph_module.register_buffer(name, root._buffers[name])
    if changes[""]:
        own = sorted(changes[""])
        warn_user(LOST_STATE.format(name=type(root).__name__, attributes=own))

    saved = root.state_dict(keep_vars=True)
    originals = dict(root.named_modules(remove_duplicate=False))
    for path, module in graph_module.named_modules():
        if module is originals[path]:
            continue
        # Containers are new, and fx registers all tensors as saved buffers
        module.training = originals[path].training
        prefix = f"{path}." if path else ""
        unsaved = {name for name in module._buffers if f"{prefix}{name}" not in saved}
        module._non_persistent_buffers_set.update(unsaved)
    return graph_module


def _keep_names(graph: Graph, root: Module) -> None:
    """Let the graph refer to parameters and buffers that would lose their names.

    These are the ones that the forward does not use, and those with several names: they
    go by the first one, so that their order counts.

    Args:
        graph: The graph.
        root: The model.
    """
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    called = {f"{n.target}." for n in graph.nodes if n.op == "call_module"}
    saved = root.state_dict(keep_vars=True)
    saved = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    uses = Counter(map(id, saved.values()))
    lost = [
        name
        for name, value in saved.items()
        if uses[id(value)] > 1
        or (name not in used and not any(name.startswith(path) for path in called))
    ]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if lost and inputs:
        with graph.inserting_after(inputs[-1]):
            anchor = graph.call_function(keep, (inputs[0],))
            anchor.meta["is_wrapped"] = True
        with graph.inserting_before(anchor):
            anchor.args = (inputs[0], *[graph.get_attr(name) for name in lost])


def trace(root: Module, check: Optional[Callable] = None) -> GraphModule:
    """Trace a model, keeping submodules whole whose forward cannot be traced.

    Args:
        root: The model. It is the same after as before.
        check: Gets the graph module, may change it, and may raise :class:`Untraceable`
            to have a submodule kept whole. Default: ``None``.

    Returns:
        Graph module that shares the model's layers.

    Raises:
        NotImplementedError: If the model's own forward cannot be traced.
    """
    keep_whole: Tuple[str, ...] = ()
    while True:
        try:
            graph_module = _trace_once(root, keep_whole)
            if check is not None:
                check(graph_module)
            return graph_module
        except Untraceable as error:
            if error.path in ("", *keep_whole):  # nothing else can be done
                raise NotImplementedError(
                    CANNOT_TRACE.format(name=type(root).__name__, reason=error.reason)
                ) from error
            keep_whole += (error.path,)


def graph_of_layer(layer: Module) -> GraphModule:
    """Make the graph of a model that is nothing but one layer.

    Args:
        layer: The layer.

    Returns:
        Graph module that calls its submodule ``0`` with all inputs that it requires.
    """
    graph = Graph()
    inputs = [
        graph.placeholder(parameter.name)
        for parameter in signature(layer.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    graph.output(graph.call_module("0", tuple(inputs)))
    graph_module = GraphModule({"0": layer}, graph)
    graph_module.training = layer.training
    return graph_module
