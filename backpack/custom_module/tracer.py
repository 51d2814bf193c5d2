"""Tracing a model into a graph without changing it, and without losing anything."""

import dis
import math
import operator
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple
from unittest.mock import patch
from warnings import warn

import einops
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer
from torch.fx import wrap as fx_wrap
from torch.fx.proxy import TraceError
from torch.jit import ScriptModule
from torch.nn import Module

from backpack.custom_module.branching import Parallel, _Branch

# Functions that make a tensor of given sizes: torch.fx sees those of tensors only
FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "zeros")
# Recorded in any case: Otherwise, the numbers drawn while tracing would be kept
RANDOM_FACTORIES = ("rand", "randint", "randn", "randperm", "normal", "bernoulli")
# Functions that take nothing but a bool for the training flag
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")

CANNOT_TRACE = (
    "Cannot convert {name}: its forward cannot be traced ({reason}). Move what depends "
    + "on the data (control flow, loops over a tensor) into a submodule: submodules "
    + "that cannot be traced are kept as they are."
)
FIXED_MODE = (
    "The forward of {name} depends on self.training. The converted model keeps to "
    + "{mode} mode: convert again after changing the mode."
)
LOST_STATE = (
    "The forward of {name} sets the attributes {attributes}. The converted model does "
    + "not do that. Return what they hold, if it is needed."
)


class Untraceable(Exception):
    """A submodule has to be kept as it is."""

    def __init__(self, path: str, reason: Any):
        """Store submodule and reason.

        Args:
            path: Qualified name of the submodule. Empty for the root.
            reason: Why it cannot be traced.
        """
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class TrainingFlag(int):
    """Value of ``module.training`` while tracing, which can be told from a constant."""

    owner: Module
    is_root: bool

    def __bool__(self) -> bool:
        """Refuse to decide, except for the root, which cannot be kept as it is.

        Returns:
            The flag.

        Raises:
            TraceError: If the module can be kept as it is.
        """
        if not self.is_root:
            raise TraceError("it depends on self.training")
        name, mode = type(self.owner).__name__, "training" if self == 1 else "eval"
        warn(FIXED_MODE.format(name=name, mode=mode), stacklevel=2)
        return self == 1


class InplaceProxy(Proxy):
    """Proxy that records in-place operators, which change all aliases of a tensor."""

    def __setitem__(self, index: Any, value: Any) -> None:
        """Record ``x[index] = value``.

        Args:
            index: The index.
            value: What is assigned.
        """
        self.tracer.create_proxy(
            "call_function", operator.setitem, (self, index, value), {}
        )


def _record_inplace(target: Callable) -> Callable:
    def method(self: Proxy, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor".split():
    _target = getattr(operator, f"i{_name}")
    setattr(InplaceProxy, f"__i{_name}__", _record_inplace(_target))


@fx_wrap
def require_default(value: Any, default: Any, name: str) -> None:
    """Refuse an argument that was fixed when the model was converted.

    Args:
        value: Value of the argument.
        default: What it was fixed to.
        name: Name of the argument.

    Raises:
        ValueError: If the values differ.
    """
    if isinstance(value, Tensor) or value != default:
        raise ValueError(
            f"The model was converted with {name}={default!r}, because its forward may "
            + "decide on it what to do. Wrap the model in a module that passes the "
            + f"wanted {name}, and convert that."
        )


@fx_wrap
def keep(*tensors: Any) -> None:
    """Do nothing, but let a graph refer to parameters by their names.

    A graph module forgets what its graph does not refer to when it is copied.

    Args:
        tensors: A model input, so that the call is recorded, and the parameters.
    """


def is_user_module(module: Module) -> bool:
    """Whether the module's forward is written in Python outside of PyTorch and here.

    Args:
        module: The module.

    Returns:
        ``False`` if the module stands for an operation, ``True`` if it is to be traced.
    """
    if isinstance(module, ScriptModule):
        return False
    if isinstance(module, (Parallel, _Branch)):
        return True
    # Where forward was written: A subclass of Linear that inherits it is a Linear.
    origin = getattr(type(module).forward, "__module__", None) or ""
    return origin == "torch.nn.modules.container" or not origin.startswith(
        ("torch.nn", "torch.ao.nn", "backpack.custom_module")
    )


class BackpackTracer(Tracer):
    """Tracer that stops at operations: PyTorch's layers, ours, and the untraceable."""

    # Otherwise, self.mask[:, :length] fails, as fx has no say in what a tensor does
    proxy_buffer_attributes = True

    def __init__(self, keep_whole: Tuple[str, ...] = ()):
        """Set up the tracer.

        Args:
            keep_whole: Qualified names of further modules to stop at. Default: None.
        """
        super().__init__(autowrap_modules=(math, einops))
        self.keep_whole = keep_whole

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Decide whether a module is recorded as one operation, or traced through.

        Args:
            m: The module.
            module_qualified_name: Its name in the traced model.

        Returns:
            Whether the module is an operation. Containers, among them ``Parallel``, are
            none.
        """
        return module_qualified_name in self.keep_whole or not is_user_module(m)

    def proxy(self, node: Node) -> Proxy:
        """Create the proxy of a node.

        Args:
            node: The node.

        Returns:
            The proxy.
        """
        return InplaceProxy(node, self)

    def call_module(
        self,
        m: Module,
        forward: Callable[..., Any],
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
    ) -> Any:
        """Trace the call of a submodule.

        Args:
            m: The submodule.
            forward: Its forward.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            Proxy of the output, or whatever a traced forward returns.

        Raises:
            Untraceable: If the submodule's forward cannot be traced.
        """
        if m not in self.submodule_paths:  # made in the forward
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Untraceable:
            raise
        # Proxies fail in as many ways as there are uses of a number or tensor.
        except Exception as error:
            raise Untraceable(self.path_of_module(m), error) from error

    def create_args_for_root(
        self, root_fn: Callable, is_module: bool, concrete_args: Any = None
    ) -> Tuple[Callable, List[Any]]:
        """Fix optional arguments to their default, unless it is a number.

        Nothing tells the tracer that a forward asks ``if mask is not None``.

        Args:
            root_fn: The forward.
            is_module: Whether it belongs to a module.
            concrete_args: Values that the caller fixes. Default: ``None``.

        Returns:
            The function to trace and its arguments.
        """
        fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        fixed = [self._fix_to_default(arg) for arg in args]
        return fn, fixed

    def _fix_to_default(self, arg: Any) -> Any:
        if not isinstance(arg, Proxy) or not arg.node.args:
            return arg
        default = arg.node.args[0]
        if default is None or isinstance(default, (bool, str)):
            args = (arg.node, default, arg.node.name)
            node = self.create_node("call_function", require_default, args, {})
            node.meta["is_wrapped"] = True
            return default
        return arg

    def to_bool(self, obj: Proxy) -> bool:
        """Let assertions pass.

        Args:
            obj: The proxy whose truth is asked for.

        Returns:
            ``True`` in an assertion.
        """
        frame = sys._getframe(2)  # the one that evaluates bool(proxy)
        following = (
            instruction
            for instruction in dis.get_instructions(frame.f_code)
            if instruction.offset > frame.f_lasti
            and not instruction.opname.startswith(("POP_JUMP", "CACHE", "NOT_TAKEN"))
        )
        instruction = next(following, None)
        if instruction is not None and (
            instruction.opname == "LOAD_ASSERTION_ERROR"
            or instruction.argval is AssertionError
        ):
            return True
        return super().to_bool(obj)


def get_free_name(module: Module, initial_name: str) -> str:
    """Find an unused attribute name by appending a number.

    Args:
        module: Where to look.
        initial_name: What the name starts with.

    Returns:
        The name.
    """
    index = 0
    while hasattr(module, f"{initial_name}{index}"):
        index += 1
    return f"{initial_name}{index}"


def _recording(tracer: Tracer, function: Callable, always: bool) -> Callable:
    @wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        found: List[Proxy] = []
        torch.fx.node.map_aggregate(
            (args, kwargs), lambda a: found.append(a) if isinstance(a, Proxy) else None
        )
        if found or always:
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record


@contextmanager
def _recording_functions(tracer: Tracer) -> Iterator[None]:
    """Record functions that would not accept a proxy or :class:`TrainingFlag`.

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
        yield


def _attributes(module: Module) -> Dict[str, Any]:
    return {k: v for k, v in module.__dict__.items() if k != "training"}


def _restore(module: Module, attributes: Dict[str, Any]) -> Set[str]:
    """Undo what tracing a forward did to the attributes of a module.

    Args:
        module: The module.
        attributes: Its attributes before.

    Returns:
        Names of the attributes that were set.
    """
    missing = object()
    changed = {
        name
        for name, value in _attributes(module).items()
        if attributes.get(name, missing) is not value
    }
    for name in changed:
        del module.__dict__[name]
    module.__dict__.update(attributes)
    # This is how the tracer stores tensors that the forward makes
    return {name for name in changed if not name.startswith("_tensor_constant")}


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
    modes = {module: module.training for module in traced.values()}
    attributes = {path: _attributes(module) for path, module in traced.items()}
    changes: Dict[str, Set[str]] = {}
    try:
        for module, mode in modes.items():
            flag = TrainingFlag(mode)
            flag.owner, flag.is_root = module, module is root
            module.__dict__["training"] = flag
        with _recording_functions(tracer):
            graph = Graph()
            graph.output(graph.graph_copy(tracer.trace(root), {}))
        _keep_names(graph, root)
        graph_module = GraphModule(root, graph, type(root).__name__)
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable("", error) from error
    finally:
        for module, mode in modes.items():
            module.__dict__["training"] = mode
        changes = {path: _restore(m, attributes[path]) for path, m in traced.items()}

    for path, names in changes.items():
        if names and path != "":
            raise Untraceable(path, f"it sets its attributes {sorted(names)}")
    if changes[""]:
        names = sorted(changes[""])
        warn(LOST_STATE.format(name=type(root).__name__, attributes=names))

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
            if error.path == "":
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
