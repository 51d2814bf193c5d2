"""A whole step as one compiled graph: forward and backward pass, and all quantities.

A step is run once as it is, so that all layouts are known, and once more to record its
operations. What it reads and writes besides its arguments, parameters and running
statistics, become inputs of the graph, which :func:`torch.compile` compiles.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any, Callable, Iterable, Iterator, NamedTuple
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.core.derivatives.stored import STORED
from backpack.core.fast.whole import KeepWhole
from backpack.engine.nodes.graph import describe, leaves_behind
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import warn_user
from backpack.utils.hooks import represent
from backpack.utils.parallel import is_parallel
from backpack.utils.state import state
from backpack.utils.types import tensors_in, undisturbed

NO_TENSORS = (
    "compile_step(...): {ext} saves objects in '{field}' that are no tensors, which no "
    "graph can return. Run it in a plain backward pass, inside `with backpack(...)`."
)
HOOKS = (
    "compile_step(...): {names} has a hook, which would run once, when the step is "
    "traced, and never again. Remove it, or run a plain backward pass."
)
NOT_TRACED = (
    "compile_step(...): the step runs as it is, but its operations cannot be recorded: "
    "{error}. It must do the same for all numbers in its tensors (no `if` about them, "
    "no `.item()`, no indexing with a mask), and draw from PyTorch's own generator. "
    "Leave out what does, or run a plain backward pass."
)
BY_NUMBERS = (
    "where samples are after `{name}` "
    "depends on numbers that may be others the next time"
)
PROCESSES = (
    "compile_step(...): this is one of several processes, which exchange gradients "
    "while the pass goes on; a graph has no such moments. Run a plain backward pass."
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
REPLACED = (
    "compile_step(...): the forward pass of {module} puts another tensor into its "
    "buffer '{name}', which a graph cannot do. Write into the buffer, in place."
)

SETS = (
    "compile_step(...): the forward pass of {module} sets {names}. A compiled step "
    "does so when it is traced, and never again: what reads them gets what they were "
    "then. If something depends on that, write into a buffer, in place."
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
        state: What the graph is right for, see :func:`_state`.
        kept: Tensors of the modules, which ``state`` tells by their identity.
    """

    run: Callable[..., list[Tensor]]
    lifted: list[Tensor]
    leaves: list[Any]
    calls: list[Any]
    spec: Any
    modules: list[Module]
    state: tuple
    kept: list[Tensor]


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
            graphs = self._graphs.setdefault(_kinds(tensors), [])
            graph = next((g for g in graphs if _state(g.modules) == g.state), None)
            if graph is None:
                graph = self._record(tuple(map(_alias, tensors)))
                graphs.append(graph)
                del graphs[:-MOST]
        leaves = [tensors[x] if isinstance(x, int) else x for x in graph.leaves]
        _check_hooks(leaves)
        with torch.no_grad():
            args = *tensors, *graph.lifted
            with undisturbed():  # the graph has its casts
                numbers = list(graph.run(*args))
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

        with _as_before(modules, tensors):
            step(*tensors)
        before = {module: _plain(module) for module in modules}
        with _as_before(modules, tensors), catch_warnings():
            simplefilter("ignore")  # they have been seen
            try:
                graph = make_fx(recorded)(*tensors)
            except Exception as error:
                raise NotImplementedError(NOT_TRACED.format(error=error)) from error
        for module, was in before.items():
            names = [f"'{k}'" for k, x in _plain(module).items() if was.get(k) != x]
            if names:
                text = SETS.format(module=represent(module), names=", ".join(names))
                warn_user(text)
        state = _state(modules)
        lifted = _lift(graph)
        for x in lifted:
            torch._dynamo.mark_static_address(x)
        places = {id(x): i for i, x in enumerate(tensors)}
        found = [places.get(id(leaf), leaf) for leaf in leaves]
        on_cpu = all(x.device.type == "cpu" for x in (*tensors, *lifted))
        run = self._compiler(graph, on_cpu)
        kept = [x for module in modules for _, x in _tensors(module)]
        called, spec = list(modules), specs[0]
        return _Graph(run, lifted, found, whole.calls, spec, called, state, kept)

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


def _kinds(tensors: tuple[Tensor, ...]) -> tuple:
    """Describe arguments, and PyTorch's switches, as far as operations depend on it."""
    devices = sorted({"cpu", "cuda", *(x.device.type for x in tensors)})
    switches = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        *(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
            for device in devices
            if torch.amp.is_autocast_available(device)
        ),
    )
    return switches + tuple(
        (*_form(x), x.requires_grad, isinstance(x, Parameter) and id(x))
        for x in tensors
    )


def _form(x: Tensor) -> tuple:
    """Describe a tensor but for its numbers."""
    strides = x.stride() if x.layout is torch.strided else x.layout
    return x.shape, strides, x.dtype, x.device


def _alias(x: Tensor) -> Tensor:
    """Tell an argument apart from all tensors that it may be the next time."""
    if isinstance(x, Parameter):  # which may be one of the model's
        return x
    return x.detach().requires_grad_(x.requires_grad)


def _state(modules: Iterable[Module]) -> tuple:
    """Describe modules, as far as operations depend on it."""
    return tuple(
        (
            *_plain(module).items(),
            *map(id, module._modules.values()),
            *(
                (name, id(x), x.requires_grad, *_form(x))
                for name, x in _tensors(module)
            ),
        )
        for module in modules
    )


def _attributes(module: Module) -> dict[str, Any]:
    """List attributes, without what is stored for extensions."""
    stored = getattr(vars(module).get(STORED), "values", {})
    return {name: x for name, x in vars(module).items() if name not in stored}


def _tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """List parameters, buffers, and users' tensors that are attributes."""
    for known in (_attributes(module), module._parameters, module._buffers):
        yield from ((name, x) for name, x in known.items() if isinstance(x, Tensor))


def _plain(module: Module) -> dict[str, Any]:
    """Describe attributes that are numbers, like the mode, words and users' tensors."""
    own: dict[str, Any] = {}
    for name, x in _attributes(module).items():
        if isinstance(x, Tensor):
            own[name] = id(x)
        elif type(x) in (int, float, bool, str):
            own[name] = x
    return own


def _check_hooks(leaves: list[Tensor]) -> None:
    """Refuse hooks of users, which are no operations."""
    kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
    hooked = [x for x in leaves if any(getattr(x, kind, None) for kind in kinds)]
    if hooked:
        raise NotImplementedError(HOOKS.format(names=describe(hooked)))


class _Keeper(TorchDispatchMode):
    """Copies tensors before an operation writes to their memory, to restore them.

    Attributes:
        watched: The tensors, by their storage.
        kept: Those that were written to, with the numbers that they had.
    """

    supports_higher_order_operators = True

    def __init__(self, watched: Iterable[Tensor]):
        super().__init__()
        self.watched: dict[int, list[Tensor]] = {}
        self.kept: list[tuple[Tensor, Tensor]] = []
        for x in watched:
            self.watch(x)

    def watch(self, x: Tensor) -> None:
        if x.layout is torch.strided:
            self.watched.setdefault(x.untyped_storage()._cdata, []).append(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, schema = kwargs or {}, getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            pairs = [*zip(schema.arguments, args)]
            pairs += [(x, kwargs[x.name]) for x in schema.arguments if x.name in kwargs]
            for argument, value in pairs:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for x in tensors_in(value):
                        self._keep(x)
        return func(*args, **kwargs)

    def _keep(self, x: Tensor) -> None:
        if x.layout is torch.strided:
            for watched in self.watched.pop(x.untyped_storage()._cdata, ()):
                self.kept.append((watched, watched.detach().clone()))


@contextmanager
def _as_before(
    modules: dict[Module, None], tensors: tuple[Tensor, ...]
) -> Iterator[None]:
    """Restore random numbers, arguments, parameters and running statistics.

    Args:
        modules: Modules that are called, and those inside, as far as they are known;
            others are added.
        tensors: The arguments.

    Yields:
        Nothing.

    Raises:
        NotImplementedError: If a buffer has become another tensor.
    """
    before: list[tuple[Module, str, Tensor, Tensor]] = []
    keeper = _Keeper(tensors)

    def note(module: Module) -> None:
        modules[module] = None
        for param in module._parameters.values():
            if param is not None:
                keeper.watch(param)
        # not every operation says that it writes to statistics
        for name, x in module._buffers.items():
            if x is not None:
                before.append((module, name, x, x.clone()))

    def look(module: Module, args: Any) -> None:
        if get_ident() == thread:
            for child in module.modules():
                if child not in modules:
                    note(child)

    thread = get_ident()  # others may train models of their own
    for module in modules:
        note(module)
    handle = register_module_forward_pre_hook(look)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    torch.clear_autocast_cache()  # what is cast outside must not be taken for data
    try:
        with torch.random.fork_rng(devices), keeper:
            yield
    finally:
        handle.remove()
        torch.clear_autocast_cache()
        with torch.no_grad():
            for x, value in (*(known[2:] for known in before), *keeper.kept):
                x.copy_(value)
    for module, name, x, _ in before:
        if module._buffers.get(name) is not x:
            raise NotImplementedError(REPLACED.format(module=module, name=name))


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
