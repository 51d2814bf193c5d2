"""BackPACK: what else flows through a backward pass, besides the batch's gradient.

Extend a model and a loss, run the backward pass inside ``with backpack(...)``, and read
the results off the parameters.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Callable, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn import Module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from backpack import extensions
from backpack.compiled import CompiledStep
from backpack.context import CTX
from backpack.converter.convert import convert_module_to_backpack
from backpack.core.derivatives.generic import tensor_outputs
from backpack.engine.backward.backward_pass import BackwardPass
from backpack.engine.backward.report import Report
from backpack.engine.forward.frames import forget_interrupted
from backpack.engine.forward.hooks import register, register_hooks, scriptable
from backpack.engine.nodes.functions import is_of_inputs
from backpack.engine.nodes.graph import root_edges
from backpack.engine.nodes.record import Call, clear_stored
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.summary import summary
from backpack.utils.compiling import skipped, untraced
from backpack.utils.disable import disable
from backpack.utils.errors import check_choice, warn_user
from backpack.utils.hooks import no_op, represent_call
from backpack.utils.older_torch import (
    make_backward_overridable,
    make_packed_sequences_trees,
)
from backpack.utils.state import ENTERED, LEFT_ELSEWHERE, State, share, state
from backpack.utils.types import Grads, tensors_in, undisturbed

__all__ = [
    "BackpropExtension",
    "backpack",
    "compile_step",
    "convert_module_to_backpack",
    "disable",
    "extend",
    "extensions",
    "memory_cleanup",
    "summary",
]

__version__ = "1.8.0"
M = TypeVar("M", bound=Module)
_register_hooks = register_hooks  # the name that 1.7 has

make_backward_overridable()
make_packed_sequences_trees()


class _Announce(TorchFunctionMode):
    """Announces backward passes: everything they remember is forgotten at their end."""

    # and what their arguments are called
    _BACKWARD = {
        func: inspect.signature(func)
        for func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    }
    _COTANGENTS = ("gradient", "grad_tensors", "grad_variables", "grad_outputs")

    def __init__(self, before: dict[str, Any]):
        """Remember what was active before, and in which context the task was.

        Args:
            before: What was active.
        """
        super().__init__()
        self.before, self.task = before, ENTERED.get()
        self.report = Report()

    @skipped
    def __torch_function__(
        self,
        func: Callable,
        types: tuple,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._BACKWARD:
            return func(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            run = _Announce.__torch_function__
            return untraced(run, self, func, types, args, kwargs)
        share(tensors_in([*args, *kwargs.values()]))
        current = state()
        if torch._C._current_graph_task_id() == -1:
            current.forget_unannounced()  # has failed
        if current.backward_pass is not None:  # announced by the context inside this
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)  # a transform's own
        current.check_context()
        bound = self._BACKWARD[func].bind(*args, **kwargs).arguments
        first = next(iter(bound))
        roots, inputs = root_edges(bound[first]), bound.get("inputs")
        accumulates = func is not torch.autograd.grad
        graph = bool(bound.get("create_graph"))
        if graph and is_of_inputs(func.__name__, args, kwargs):
            self.report.derived = True
            with current.pull(quiet=False):  # a loss will contain this derivative
                return func(*args, **kwargs)
        one = all(bound.get(name) is None for name in self._COTANGENTS)
        options = accumulates, graph, one, bool(bound.get("retain_graph"))
        with undisturbed():
            announced = BackwardPass(current, roots, inputs, *options)
        with announced as running:
            if running.accumulated.inputs is None:
                return func(*args, **kwargs)
            bound["inputs"] = running.accumulated.inputs
            return func(bound.pop(first), **bound)


class backpack(AbstractContextManager):  # noqa: N801
    """Context in which backward passes compute additional quantities.

    Only the backward pass has to lie inside. Contexts nest: the inner one replaces the
    active extensions, and leaving it restores them, also after an exception.

    Example:
        >>> from torch import manual_seed, rand, tensor
        >>> from torch.nn import CrossEntropyLoss, Linear
        >>> from backpack.extensions import BatchGrad
        >>> _ = manual_seed(0)
        >>> model, lossfunc = extend(Linear(3, 2)), extend(CrossEntropyLoss())
        >>> loss = lossfunc(model(rand(5, 3)), tensor([0, 1, 0, 1, 1]))
        >>> with backpack(BatchGrad()):
        ...     loss.backward()
        >>> model.weight.grad_batch.shape
        torch.Size([5, 2, 3])
    """

    def __init__(
        self,
        *exts: BackpropExtension,
        extension_hook: Callable[[Module], None] | None = None,
        debug: bool = False,
        retain_graph: bool = False,
        check: bool = False,
        gradient: bool = True,
    ):
        """Choose what to compute.

        Args:
            exts: Extensions, in the order in which they shall run on each module.
            extension_hook: Function that is run on each module after the extensions.
                It may read and delete what they have saved. Default: ``None``.
            debug: Whether to print a line for each extension and module, and for every
                ten columns of an exact quantity, which may take long. Default:
                ``False``.
            retain_graph: Whether modules keep ``input0``, ``output`` after a backward
                pass. What another pass through the same graph needs is also kept by
                ``backward(retain_graph=True)`` alone. Default: ``False``.
            check: Whether to check before each backward pass that no sample's gradient
                reaches another, and after it that the individual gradients add up to
                the gradient; a ``RuntimeError`` names the operations or the parameters
                for which this is not so. It catches what hooks and functions with a
                backward of their own do behind the scenes. Default: ``False``, which
                costs nothing.
            gradient: Whether ``backward()`` accumulates gradients. If not, weights'
                gradients are not even computed, ``.grad`` of all tensors stays what it
                was, and hooks for gradients of parameters do not run. A single column
                that all quantities are computed from may go through the model instead
                of the gradient: who registers a hook for a tensor inside of the model,
                or retains its gradient, shall do so in the forward pass. Default:
                ``True``.

        Raises:
            ValueError: If an argument is no instance of an extension, the extension
                hook is no function, an option has no such value, or options contradict
                each other.
        """
        for ext in exts:
            if not isinstance(ext, BackpropExtension):
                hint = ""
                if isinstance(ext, type):
                    hint = f" Did you mean {ext.__name__}()?"
                elif isinstance(ext, (list, tuple)):
                    hint = " Put a star in front: backpack(*extensions)."
                raise ValueError(
                    "backpack(...) expects instances of extensions, for example "
                    f"backpack(BatchGrad()), got {ext!r}.{hint}"
                )
        if not (extension_hook is None or callable(extension_hook)):
            raise ValueError(
                "backpack(extension_hook=...) expects a function that is called with "
                f"a module, for example extension_hook=print, got {extension_hook!r}."
            )
        for option, value in {"check": check, "gradient": gradient}.items():
            check_choice("backpack(...)", option, value, (False, True))
        self.exts = tuple(dict.fromkeys(exts))  # one that is there twice runs once
        saving: dict[str, list[Any]] = {}  # by field, in order
        for ext in self.exts:
            if not ext.replaces_gradient:
                saving.setdefault(ext.savefield, []).append(ext)
        for field, some in saving.items():
            # long for options that are tensors; equal options give equal values
            names = dict.fromkeys(map(repr, some)) if len(some) > 1 else {}
            if len(names) > 1:
                warn_user(
                    f"backpack({', '.join(names)}): these save values in the same "
                    f"field, {field!r}, where those of the last one replace the "
                    "others'. Give them fields of their own, `ext.savefield = 'name'`."
                )
        replacing = [type(x).__name__ for x in self.exts if x.replaces_gradient]
        if len(replacing) > 1 or (replacing and (check or not gradient)):
            raise ValueError(
                f"{' and '.join(replacing)}: replace_grad=True decides what becomes of "
                "`.grad`. Use it for one extension, with gradient=True, and without "
                "check=True, which compares with the gradient."
            )
        if check and not gradient:
            raise ValueError(
                "backpack(check=True, gradient=False): the check compares individual "
                "gradients with the gradient. Use one of both."
            )
        self.debug = debug
        self.extension_hook = no_op if extension_hook is None else extension_hook
        self.retain_graph = retain_graph
        self.check = check
        self._entered: list[_Announce] = []
        self.gradient = gradient

    def __repr__(self) -> str:
        """Return what is computed inside, and whether this is inside.

        Returns:
            The context with the arguments that differ from the defaults.
        """
        defaults = inspect.signature(type(self)).parameters
        values = {k: getattr(self, k) for k in list(defaults)[1:]}
        values["extension_hook"] = (
            None if self.extension_hook is no_op else self.extension_hook
        )
        given = {k: v for k, v in values.items() if v != defaults[k].default}
        text = represent_call(type(self).__name__, self.exts, given)
        return f"{text}  # active" if self._entered else text

    @skipped
    def __enter__(self) -> None:
        """Activate the extensions."""
        if torch.compiler.is_dynamo_compiling():
            return untraced(backpack.__enter__, self)
        forget_interrupted()
        current = state()
        announce = _Announce(dict(vars(current)))
        try:
            self._entered.append(announce)
            current.contexts.append(announce)
            ENTERED.set(announce)
            current.active_exts = self.exts
            current.extension_hook = self.extension_hook
            current.debug, current.retain_graph = self.debug, self.retain_graph
            current.check, current.report = self.check, announce.report
            current.gradient = self.gradient
            current.enter()
            announce.__enter__()
        except BaseException:  # Ctrl-C: nobody will leave
            if announce in _get_current_function_mode_stack():
                announce.__exit__(None, None, None)
            self._restore(announce)
            raise

    @skipped
    def __exit__(self, exc_type: type | None, *exc_info: Any) -> None:
        """Restore what was active before; report parameters without a result."""
        if torch.compiler.is_dynamo_compiling():
            return untraced(backpack.__exit__, self, exc_type, *exc_info)
        contexts = state().contexts
        own = [announce for announce in self._entered if announce in contexts]
        if not own:
            raise RuntimeError(LEFT_ELSEWHERE)
        announce = own[-1]
        try:
            forget_interrupted()
        finally:
            try:
                announce.__exit__(exc_type, *exc_info)
            finally:
                self._restore(announce)
        if exc_type is None:
            announce.report.warn(self.exts, State.outside() is not None)
        State.outside = staticmethod(no_op)

    def _restore(self, announce: _Announce) -> None:
        """Let what was active before be active again."""
        current = state()
        if announce in self._entered:
            self._entered.remove(announce)
        if announce not in current.contexts:
            return
        position = current.contexts.index(announce)
        del current.contexts[position]
        if position == len(current.contexts):
            vars(current).update(announce.before)
        else:  # a task of asyncio, or a generator, leaves before a later one
            current.contexts[position].before = announce.before
        if ENTERED.get() is announce:
            ENTERED.set(announce.task)
        for other in current.contexts:  # a generator that entered later goes on
            if other.task is announce:
                other.task = announce.task


def compile_step(
    closure: Callable[..., Tensor],
    *exts: BackpropExtension,
    gradient: bool = True,
    backend: str | Callable = "inductor",
    mode: str | None = None,
) -> CompiledStep:
    """Compile a whole step: forward pass, backward pass, and all quantities.

    The result is called with tensors, and leaves what a plain step leaves: gradients
    are added to ``.grad``, quantities are saved on the parameters, running statistics
    are updated, random numbers are new ones. Parameters may change between two calls;
    shapes, types, modes (``train()``, ``eval()``), ``requires_grad``, attributes and
    hooks of modules, numbers that the closure reads, and options of extensions as well,
    for which the step is compiled again. Until then, everything else is as it was when
    it was compiled, like numbers that functions read which the closure calls.

    Before it is compiled, the step is run twice by Python. That leaves no trace in
    tensors and generators of random numbers; but what is printed, counted or appended
    to a list happens then, and not afterwards.

    Args:
        closure: Computes the loss from tensors, with modules that are extended.
        exts: Extensions. Those that save functions cannot be compiled.
        gradient: As for :class:`backpack`, whose other options are about what Python
            does while the pass goes on.
        backend: Backend of :func:`torch.compile`. Default: ``"inductor"``.
        mode: Mode of :func:`torch.compile`; ``"reduce-overhead"`` replays CUDA graphs.
            Default: ``None``.

    Returns:
        The step, a function of the closure's tensors that returns the loss, detached.

    Example:
        >>> from torch import manual_seed, rand, tensor
        >>> from torch.nn import CrossEntropyLoss, Linear
        >>> from backpack.extensions import BatchL2Grad
        >>> _ = manual_seed(0)
        >>> model, lossfunc = extend(Linear(3, 2)), extend(CrossEntropyLoss())
        >>> step = compile_step(
        ...     lambda X, y: lossfunc(model(X), y), BatchL2Grad(), backend="aot_eager"
        ... )
        >>> loss = step(rand(5, 3), tensor([0, 1, 0, 1, 1]))
        >>> model.weight.batch_l2.shape
        torch.Size([5])
    """
    context = partial(backpack, *exts, gradient=gradient)
    context()  # which checks the arguments

    def compiler(graph: Callable, on_cpu: bool) -> Callable:
        options: dict[str, Any] = {"mode": mode}
        if on_cpu and mode is None and backend == "inductor":
            # channels come last otherwise, which is slower for individual gradients
            options = {"options": {"layout_optimization": False}}
        options.update(backend=backend, fullgraph=True, dynamic=False)
        return torch.compile(graph, **options)

    copies = mode in ("reduce-overhead", "max-autotune")
    return CompiledStep(closure, context, exts, compiler, copies)


@overload
def extend(module: M, debug: bool = ..., use_converter: Literal[False] = ...) -> M: ...


@overload
def extend(
    module: Module, debug: bool = ..., *, use_converter: Literal[True]
) -> GraphModule: ...


@overload
def extend(
    module: Module, debug: bool, use_converter: Literal[True]
) -> GraphModule: ...


@overload
def extend(module: Module, debug: bool = ..., use_converter: bool = ...) -> Module: ...


def extend(module: Module, debug: bool = False, use_converter: bool = False) -> Module:
    """Make a model or a loss ready for additional quantities.

    Extends all modules inside, too, and what is put into it later, when it is called.
    Extending a second time adds nothing.

    Args:
        module: Model, loss, or any other module.
        debug: Whether to print what is extended. Default: ``False``.
        use_converter: Whether to convert the module to a graph of modules first, for
            extensions that walk from module to module. Default: ``False``.

    Returns:
        The same module; the converted one with ``use_converter=True``.

    Raises:
        TypeError: If it is no instance of a module.
        NotImplementedError: If it is, or has inside, a module of ``torch.jit`` with
            trainable parameters; or if the converter cannot trace it.
    """
    if not isinstance(module, Module):
        hint = "Instead of a function, use a module, like CrossEntropyLoss()."
        if isinstance(module, type):
            hint = f"Did you mean extend({module.__name__}(...))?"
        raise TypeError(
            f"extend(...) expects an instance of torch.nn.Module, got {module!r}. "
            + hint
        )
    if isinstance(debug, Module):
        raise TypeError("extend(...) takes one module. Call it for each of them.")
    scripted = [x for x in module.named_modules() if isinstance(x[1], ScriptModule)]
    for name, child in scripted:
        if any(p.requires_grad for p in child.parameters()):
            where = f"'{name}' of {type(module).__name__}" if name else "the module"
            raise NotImplementedError(
                f"extend(...): {where} is a {type(child).__name__}, compiled by "
                "torch.jit, in which no Python hooks run. Extend the module it was "
                "made from."
            )
    if use_converter:
        return extend(convert_module_to_backpack(module, debug), debug=debug)
    register(module, debug)
    Module.__prepare_scriptable__ = scriptable  # type: ignore[attr-defined]
    CTX.forget_dead_handles()
    return module


def hook_store_io(
    module: Module, input: tuple[Tensor], output: Tensor | tuple[Tensor]
) -> None:
    """Record a call by hand: a forward hook without keyword arguments.

    It sets ``input0``, ``input1``, ..., ``output``, if gradients are enabled.

    Args:
        module: The module that was called.
        input: Its positional arguments.
        output: Its output.
    """
    if torch.is_grad_enabled() and disable.should_store_io():
        call = Call(module)
        call.finish(module, input, {}, tensor_outputs(output), [], {})
        call.store(raw=False)


def hook_run_extensions(module: Module, g_inp: Grads, g_out: Grads) -> None:
    """Run the active extensions, of first order, on a module by hand; then the hook.

    Args:
        module: The module, with its ``input0``, ``output``, which are dropped.
        g_inp: Gradients at its inputs.
        g_out: Gradients at its outputs.
    """
    for ext in CTX.get_active_exts():
        ext(module, g_inp, g_out)
    CTX.get_extension_hook()(module)
    if not state().keeps_io:
        clear_stored(module)


def memory_cleanup(module: Module) -> None:
    """Delete what forward passes have stored on a module and all modules inside.

    Args:
        module: The module.
    """
    for child in module.modules():
        clear_stored(child)
