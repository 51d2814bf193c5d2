"""A whole step as one compiled graph: forward and backward pass, and all quantities.

A step is run once as it is, so that all layouts are known, and once more to record its
operations. What it reads and writes besides its arguments, parameters and running
statistics, become inputs of the graph, which :func:`torch.compile` compiles.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import RLock
from typing import Any, Callable, Iterator, NamedTuple
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.compiled.guards import (
    attributes,
    of_arguments,
    of_function,
    of_modules,
    of_options,
)
from backpack.compiled.trial import NOT_TRACED, Reading, Recordable, as_before
from backpack.core.fast.whole import KeepWhole
from backpack.engine.nodes.graph import describe, leaves_behind
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import warn_user
from backpack.utils.hooks import represent
from backpack.utils.parallel import is_parallel
from backpack.utils.state import state
from backpack.utils.types import undisturbed

NO_TENSORS = (
    "compile_step(...): {ext} saves objects in '{field}' that are no tensors, which no "
    "graph can return. Run it in a plain backward pass, inside `with backpack(...)`."
)
HOOKS = (
    "compile_step(...): {names} has a hook, which would run once, when the step is "
    "traced, and never again. Remove it, or run a plain backward pass."
)
BY_NUMBERS = (
    "where samples are after `{name}` "
    "depends on numbers that may be others the next time"
)
PROCESSES = (
    "compile_step(...): this is one of several processes, which exchange gradients "
    "while the pass goes on; a graph has no such moments. Run a plain backward pass."
)
NOT_COMPILED = (
    "compile_step(...): the step was recorded, but `torch.compile` refuses it: "
    "{error}. Leave out what it refuses (sparse gradients, for instance), or run a "
    "plain backward pass."
)
NO_TENSOR = (
    "A compiled step takes tensors, but argument {index} is of type {kind}. What is no "
    "tensor is part of the closure: compile a step for each."
)
NO_LOSS = (
    "compile_step(...): the closure must return the loss, a tensor with a single "
    "number, and returned {kind}."
)
NO_LEAF = (
    "A compiled step takes tensors that are no part of a graph, but argument {index} "
    "was computed from tensors that require a gradient. Detach it, or compute it "
    "inside."
)
SETS = (
    "compile_step(...): the forward pass of {module} sets {names}. A compiled step "
    "does so when it is traced, and never again: what reads them gets what they were "
    "then. If something depends on that, write into a buffer, in place."
)

CHANGES = (
    "compile_step(...): the step is recorded and compiled for the {most}th time and "
    "more, as {names} of the model, or of what the closure reads, was another before. "
    "Keep what is counted or collected elsewhere, and what operations depend on in a "
    "tensor that is an argument."
)

MOST = 8  # graphs that are kept for arguments of a kind

# Recording changes PyTorch for all threads
_RECORDING = RLock()


class _Graph(NamedTuple):
    """A step that was recorded.

    Attributes:
        run: Maps arguments and ``lifted`` to the numbers of all results.
        lifted: Tensors that the step reads and writes besides its arguments.
        leaves: What gets a gradient: positions of arguments, and other tensors.
        calls: Functions that it calls as a whole, which it keeps alive.
        spec: Structure of the results: what extensions keep, the loss, gradients and
            fields of each leaf.
        modules: Modules that were called, and those inside.
        state: What the graph is right for, besides its arguments.
    """

    run: Callable[..., list[Tensor]]
    lifted: list[Tensor]
    leaves: list[Any]
    calls: list[Any]
    spec: Any
    modules: list[Module]
    state: tuple


class CompiledStep:
    """Runs steps that were compiled, see :func:`backpack.compile_step`."""

    def __init__(
        self,
        closure: Callable[..., Tensor],
        context: Callable[[], Any],
        extensions: tuple[BackpropExtension, ...],
        compiler: Callable[[Callable, bool], Callable],
        copies: bool,
    ):
        """Remember what to compile.

        Args:
            closure: Computes the loss.
            context: Makes the context for the backward pass.
            extensions: The extensions in it.
            compiler: Compiles a graph; is told whether all its tensors are on the CPU.
            copies: Whether results must be copied before the next step runs.
        """
        self._closure, self._context = closure, context
        self._extensions, self._compiler, self._copies = extensions, compiler, copies
        self._graphs: dict[tuple, list[_Graph]] = {}

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run a step.

        Args:
            tensors: Arguments of the closure.

        Returns:
            The loss, without a graph.

        Raises:
            TypeError: If an argument is no tensor, or the loss no number.
            ValueError: If one is part of a graph.
            NotImplementedError: If the step cannot be compiled.
        """  # noqa: DAR401
        for index, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                text = NO_TENSOR.format(index=index, kind=type(x).__name__)
                raise TypeError(text)
            if x.grad_fn is not None:
                raise ValueError(NO_LEAF.format(index=index))
        with _RECORDING:
            graphs = self._graphs.setdefault(of_arguments(tensors), [])
            states = [self._state(g.modules) for g in graphs]
            graph = next((g for g, x in zip(graphs, states) if x == g.state), None)
            if graph is None:
                if len(graphs) >= MOST:
                    _warn_of_changes(graphs[-1].state, states[-1])
                graph = self._record(tuple(map(_alias, tensors)))
                graphs.append(graph)
                del graphs[:-MOST]
        leaves = [tensors[x] if isinstance(x, int) else x for x in graph.leaves]
        _check_hooks(leaves)
        with torch.no_grad():
            args = *tensors, *graph.lifted
            try:
                with undisturbed():  # the graph has its casts
                    numbers = list(graph.run(*args))
            except torch._dynamo.exc.TorchDynamoException as error:
                text = NOT_COMPILED.format(error=error)
                raise NotImplementedError(text) from error
            if self._copies:
                numbers = [x if x is None else x.clone() for x in numbers]
            kept, loss, *results = tree_unflatten(numbers, graph.spec)
            for ext, values in zip(self._extensions, kept):
                vars(ext).update(values)
            for leaf, (gradient, fields) in zip(leaves, results):
                if gradient is not None and leaf.grad is not None:
                    leaf.grad += gradient
                elif gradient is not None:
                    leaf.grad = gradient
                for name, value in fields.items():
                    setattr(leaf, name, value)
        return loss

    def _state(self, modules: list[Module]) -> tuple:
        """Describe what a graph is right for, besides its arguments."""
        read = of_function(self._closure)
        for ext in self._extensions:
            read += of_options(ext)
        return read, of_modules(modules)

    def _record(self, tensors: tuple[Tensor, ...]) -> _Graph:
        """Run a step as it is, then record it; everything else stays as before."""
        if is_parallel():
            raise NotImplementedError(PROCESSES)
        modules: dict[Module, None] = {}
        specs: list[Any] = []
        leaves: list[Tensor] = []

        def step(*tensors: Tensor) -> list[Tensor]:
            loss = self._closure(*tensors)
            is_tensor = isinstance(loss, Tensor)
            if not is_tensor or loss.numel() != 1:
                kind = f"shape {list(loss.shape)}" if is_tensor else f"{loss!r:.50}"
                raise TypeError(NO_LOSS.format(kind=kind))
            leaves[:] = () if loss.grad_fn is None else leaves_behind(loss.grad_fn)
            _check_hooks(leaves)
            results: list[Any] = [loss.detach()]
            with _set_aside(leaves, [ext.savefield for ext in self._extensions]):
                with self._context():
                    loss.backward()
                results += [(leaf.grad, self._fields(leaf)) for leaf in leaves]
            numbers, spec = tree_flatten([list(map(_kept, self._extensions)), *results])
            specs[:] = (spec,)
            return numbers

        whole = KeepWhole()

        def recorded(*tensors: Tensor) -> list[Tensor]:
            with whole, _checked():
                return step(*tensors)

        with as_before(modules), Reading():
            step(*tensors)
        before = {module: attributes(module) for module in modules}
        with as_before(modules), catch_warnings():
            simplefilter("ignore")  # they have been seen
            try:
                with Recordable():
                    graph = make_fx(recorded)(*tensors)
            except Exception as error:
                raise NotImplementedError(NOT_TRACED.format(error=error)) from error
        for module, was in before.items():
            names = [f"'{k}'" for k, x in attributes(module).items() if was.get(k) != x]
            if names:
                text = SETS.format(module=represent(module), names=", ".join(names))
                warn_user(text)
        state = self._state(list(modules))
        lifted = _lift(graph)
        for x in lifted:
            torch._dynamo.mark_static_address(x)
        places = {id(x): i for i, x in enumerate(tensors)}
        found = [places.get(id(leaf), leaf) for leaf in leaves]
        on_cpu = all(x.device.type == "cpu" for x in (*tensors, *lifted))
        run = self._compiler(graph, on_cpu)
        called, spec = list(modules), specs[0]
        return _Graph(run, lifted, found, whole.calls, spec, called, state)

    def _fields(self, leaf: Tensor) -> dict[str, Any]:
        """Collect what the extensions have saved on a leaf."""
        found = {}
        for ext in self._extensions:
            if hasattr(leaf, ext.savefield):
                value = found[ext.savefield] = getattr(leaf, ext.savefield)
                if not all(isinstance(x, Tensor) for x in tree_flatten(value)[0]):
                    name = type(ext).__name__
                    text = NO_TENSORS.format(ext=name, field=ext.savefield)
                    raise NotImplementedError(text)
        return found


@contextmanager
def _checked() -> Iterator[None]:
    """Refuse what puts samples where numbers say that the next step may change."""
    deciding = state().deciding = []
    try:
        yield
    finally:
        state().deciding = None
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    for name, x in deciding:
        slot = get_proxy_slot(x, tracer, None)
        if slot is not None and _changes(slot.proxy.node, tracer.root):
            raise NotImplementedError(BY_NUMBERS.format(name=name))


def _changes(node: Node, root: Module) -> bool:
    """Tell whether a tensor may have other numbers in the next step."""
    queue, seen = [node], set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            return True
        value = getattr(root, str(node.target), None)  # of nodes that get an attribute
        if isinstance(value, Parameter):
            return True
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        queue += node.all_input_nodes
    return False


def _kept(ext: BackpropExtension) -> dict[str, Any]:
    """Collect what an extension keeps, like the norms that decided on weights."""
    return {
        name: value
        for name, value in vars(ext).items()
        if any(isinstance(x, Tensor) for x in tree_flatten(value)[0])
    }


def _warn_of_changes(before: Any, now: Any) -> None:
    """Say what lets a step be recorded again and again."""
    pairs = [pair for some in zip(before[1], now[1]) for pair in zip(*some)]
    pairs += zip(before[0], now[0])
    named = [x for x, y in pairs if x != y and isinstance(x, tuple)]
    names = dict.fromkeys(str(x[0]) for x in named)
    if names:
        warn_user(CHANGES.format(most=MOST, names=", ".join(map(repr, names))))


def _alias(x: Tensor) -> Tensor:
    """Tell an argument apart from all tensors that it may be the next time."""
    if isinstance(x, Parameter):  # which may be one of the model's
        return x
    return x.detach().requires_grad_(x.requires_grad)


def _check_hooks(leaves: list[Tensor]) -> None:
    """Refuse hooks of users, which are no operations."""
    kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
    hooked = [x for x in leaves if any(getattr(x, kind, None) for kind in kinds)]
    if hooked:
        raise NotImplementedError(HOOKS.format(names=describe(hooked)))


@contextmanager
def _set_aside(leaves: list[Tensor], fields: list[str]) -> Iterator[None]:
    """Let leaves have no gradient and no fields for a while.

    Args:
        leaves: The leaves.
        fields: Names of the fields.

    Yields:
        Nothing.
    """
    names = ["grad", *fields]
    before = [{n: getattr(x, n) for n in names if hasattr(x, n)} for x in leaves]

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None
            for field in fields:
                vars(leaf).pop(field, None)

    clear()
    try:
        yield
    finally:
        clear()
        for leaf, values in zip(leaves, before):
            for name, value in values.items():
                setattr(leaf, name, value)


def _lift(graph: GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that a graph has as attributes.

    Args:
        graph: The graph, which is changed.

    Returns:
        The tensors, in the order of the inputs.
    """
    lifted: list[Tensor] = []
    inputs: dict[int, Any] = {}
    nodes = graph.graph.nodes
    for node in reversed(nodes):
        if "_record_function_" in str(node.target):  # names for profilers, no numbers
            graph.graph.erase_node(node)
    first = next(x for x in nodes if x.op not in ("placeholder", "get_attr"))
    for node in list(nodes):
        x = getattr(graph, node.target) if node.op == "get_attr" else None
        if not isinstance(x, Tensor):
            continue
        if id(x) not in inputs:
            with graph.graph.inserting_before(first):
                inputs[id(x)] = graph.graph.placeholder(f"lifted_{len(lifted)}")
            lifted.append(x)
        node.replace_all_uses_with(inputs[id(x)])
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return lifted
