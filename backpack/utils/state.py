"""What is active in a thread: extensions, switches, the backward pass that is running.

Each thread has its own state. Autograd runs backward hooks of accelerators in threads
of its own; what is stashed in PyTorch's thread-local state follows it there, other than
Python's own thread-locals.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from types import FrameType
from typing import (
    Any,
    Callable,
    ClassVar,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
    TypeVar,
)

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from backpack.utils.compiling import COMPILED_AUTOGRAD, ONCE, is_compiled_autograd
from backpack.utils.hooks import names_of, no_op
from backpack.utils.parallel import without_sinks
from backpack.utils.types import unwatched

C = TypeVar("C", bound=Callable)

_KEY, _LOCAL = "backpack.utils.state", threading.local()
_MOST_ANSWERS = 10_000  # that are remembered
_KEYS = torch._C._TorchDispatchModeKey
_TRACERS = (_KEYS.PROXY, _KEYS.FAKE, _KEYS.FUNCTIONAL)  # other modes count, or print

# The innermost context, for this task of `asyncio`, which threads may inherit
ENTERED: ContextVar[Any] = ContextVar("backpack", default=None)

MIXED_UP = (
    "This backward pass runs in another `with backpack(...)` than the one around it in "
    "the code: tasks of asyncio take turns inside of their contexts, or the pass runs "
    "in another thread than the context was entered in. Enter the context where "
    "`backward()` is called, right before it, and leave it without `await`."
)

LEFT_ELSEWHERE = (
    "This `with backpack(...)` was entered in another thread, where it stays active. "
    "Leave it there."
)

UNANNOUNCED = (
    "Extensions were set by `CTX.set_active_exts`, and this backward pass began at "
    "several losses or outputs. Only the first was seen. Run it in "
    "`with backpack(...)`."
)

BATCHED = (
    "{exts}: this backward pass computes several gradients at once (by "
    "`is_grads_batched=True`, `vmap`, or `jacobian(..., vectorize=True)`), and "
    "quantities are those of a single one. Run it outside of the context."
)

FORWARD = (
    "{exts}: this backward pass runs in `torch.autograd.forward_ad.dual_level()`, "
    "where its gradients have tangents, and quantities have none. Run it after leaving "
    "the level, where the model's output has lost its tangent."
)


class State:
    """What is active in a thread.

    Attributes:
        active_exts: Extensions to run in a backward pass.
        debug: Whether to print what is run.
        extension_hook: Function to run on each module after the extensions.
        retain_graph: Whether to keep inputs and outputs for another backward pass.
        gradient: Whether gradients are accumulated.
        check: Whether to check individual gradients.
        in_context: Whether a context is active, with extensions or without.
        report: What has happened inside the context.
        backward_pass: The backward pass that is running.
        caller: The frame that has announced it, which other threads can't see.
        unannounced: A pass that nobody has announced: outside of a context.
        contexts: What announces backward passes, of each context that is active.
        inside: Number of the backward pass in which the context was entered, by one of
            its hooks; -1 outside of any.
        pulling: Whether columns are being pulled back, so that hooks must not run.
        quiet: Whether hooks of users must not run, either.
        held: What stands in the place of what modules have, while they are repeated.
        calls: What a step that is recorded calls as a whole; ``None`` without such.
        deciding: Operations of such a step, and tensors whose numbers have decided
            where samples are; ``None`` without such.
        outside: Weak reference to a module through which a backward pass went while no
            context was active, in any thread; ``None`` if there was no such pass.
        begin: Begins a backward pass that nobody has announced.
        has_threads: Whether autograd may run in threads of its own.
    """

    has_threads: ClassVar[bool] = False
    outside: ClassVar[Callable[[], Module | None]] = staticmethod(no_op)
    begin: ClassVar[Callable[[State], None]]

    def __init__(self) -> None:
        """Start with nothing active."""
        self.active_exts: tuple[Any, ...] = ()
        self.debug = False
        self.extension_hook: Callable[[Module], None] = no_op
        self.retain_graph = False
        self.gradient = True
        self.check = False
        self.in_context = False
        self.report: Any = None
        self.backward_pass: Any = None
        self.caller: FrameType | None = None
        self.unannounced: Any = None
        self.contexts: list[Any] = []
        self.inside = -1
        self.pulling = self.quiet = False
        self.held: list[Any] = []
        self.calls: list[Any] | None = None
        self.deciding: list[tuple[str, Tensor]] | None = None

    def enter(self) -> None:
        """Begin a context, also in a hook of another backward pass, which goes on."""
        self.in_context = True
        self.inside = torch._C._current_graph_task_id()
        if self.inside != -1 or self.backward_pass is not None:  # or it is ending
            self.backward_pass = self.unannounced = self.caller = None
            self.pulling = self.quiet = False

    @property
    def keeps_io(self) -> bool:
        """Whether inputs and outputs are kept after a backward pass."""
        return self.retain_graph or any(ext.keeps_io for ext in self.active_exts)

    @contextmanager
    def pull(self, quiet: bool = True) -> Iterator[None]:
        """Keep hooks of the graph from running while columns are pulled back.

        Args:
            quiet: Whether this holds for hooks of users, too. Default: ``True``.

        Yields:
            Nothing.

        Raises:
            NotImplementedError: If something can be pulled through once only.
        """  # noqa: DAR401
        before = self.pulling, self.quiet
        self.pulling, self.quiet = True, quiet
        try:
            with unwatched(), without_sinks():
                yield
        except RuntimeError as error:
            text = next((t for part, t in ONCE.items() if part in str(error)), None)
            if text is None:
                raise
            exts = names_of(self.active_exts)
            raise NotImplementedError(text.format(exts=exts)) from error
        finally:
            self.pulling, self.quiet = before
            while self.held and not self.pulling:
                self.held.pop().release()

    def default_device(self) -> AbstractContextManager[Any]:
        """Restore the default device, which PyTorch's own mode hides in `backward`.

        Returns:
            Context for what creates tensors as a forward pass does.
        """
        here, running = _get_current_function_mode_stack(), self.backward_pass
        for mode in reversed(() if running is None else running.modes):
            if isinstance(mode, DeviceContext) and mode not in here:
                return mode.device
        return nullcontext()

    def check_context(self) -> None:
        """Refuse a backward pass that belongs to another context than the active one.

        Raises:
            RuntimeError: If threads or tasks of ``asyncio`` have mixed them up.
            NotImplementedError: If the pass is being compiled.
        """
        entered = ENTERED.get()
        if entered is not (self.contexts[-1] if self.contexts else None):
            raise RuntimeError(MIXED_UP)
        if self.active_exts and is_compiled_autograd():
            names = names_of(self.active_exts)
            raise NotImplementedError(COMPILED_AUTOGRAD.format(exts=names))

    def forget_unannounced(self) -> None:
        """Forget a backward pass that nobody has announced: it is over, or failed."""
        running, self.unannounced = self.unannounced, None
        if running is not None:
            running.finish()
            if self.backward_pass is running:
                self.backward_pass = None

    def visit(
        self, owner: Any, g_out: tuple[Tensor | None, ...], entries: Sequence[Any]
    ) -> None:
        """Let a call or a use have its turn, now that its gradients are known.

        Args:
            owner: The call or the use.
            g_out: Gradients at its outputs.
            entries: What ends in the same node of the graph.

        Raises:
            NotImplementedError: If there are several gradients at once, or tangents.
        """
        if not self.active_exts and self.extension_hook is no_op:
            if not (self.in_context or owner.is_use):
                State.outside = owner.module_ref
                self.check_context()
            keeps = self.in_context and self.retain_graph
            if not (keeps or torch.is_grad_enabled()):  # or the result has a graph
                owner.release_all(keeps_graph())
            return
        reached = [g for g in g_out if g is not None]
        if any(map(is_batched, reached)):
            raise NotImplementedError(BATCHED.format(exts=names_of(self.active_exts)))
        if forward_ad._current_level >= 0:
            raise NotImplementedError(FORWARD.format(exts=names_of(self.active_exts)))
        if self.backward_pass is None:
            State.begin(self)
        if reached or owner.is_use:
            try:
                self.backward_pass.take_turn(owner, g_out, entries)
            except BaseException:
                self.forget_unannounced()  # no callback runs
                raise


_RUN = torch.autograd.graph._engine_run_backward.__code__


def keeps_graph() -> bool:
    """Tell whether the backward pass that is running keeps the graph for another one.

    Autograd does not say; the frame that waits for it knows. From a thread of
    autograd's own it can't be told from those of passes in other threads.

    Returns:
        Whether it does, or one of these.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _RUN:
        frame = frame.f_back
    if frame is not None:
        return any(frame.f_locals["args"][1:2])
    # no variable for the frames: one of them is this one, and would keep itself
    return any(
        x.f_code is _RUN and any(x.f_locals["args"][1:2])
        for x in sys._current_frames().values()
    )


def is_traced() -> bool:
    """Tell whether somebody records the operations, to run them again.

    Returns:
        Whether a dispatch mode that traces is active. Operations are functions of
        tensors then: memory that is written piece by piece would be copied as often.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def out_of_sight(function: C) -> C:
    """Keep what a function does from dispatch modes that count, print or record.

    Args:
        function: The function, which only looks at tensors.

    Returns:
        The function.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        modes = torch._C._len_torch_dispatch_stack()
        if not modes or torch._C._get_dispatch_mode(_KEYS.FAKE) is not None:
            return function(*args, **kwargs)  # fake tensors have no numbers elsewhere
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def may_look(x: Tensor, waits: bool = False) -> bool:
    """Tell whether a choice may depend on a tensor's numbers.

    An accelerator would have to finish all that it was asked for, and who traces a pass
    sees no numbers. Where they must not be looked at, the way that is always right is
    taken, and what would be an error for what the numbers are becomes NaN.

    Args:
        x: The tensor.
        waits: Whether to wait for an accelerator, where a number would be wrong without
            a word otherwise. Default: ``False``.

    Returns:
        Whether it may, which is so on the CPU, where ``check=True`` asks for it, and
        where it is waited for; but without ``check=True``, not while a pass is traced.
    """
    visible = x.device.type == "cpu" or waits and not x.is_meta
    return (visible and not is_traced()) or state().check


_ANSWERS: dict[Hashable, Any] = {}


def ask(x: Tensor, key: Hashable, question: Callable[[], Any]) -> Any:
    """Ask for what only numbers tell, and what kind and shapes of operands decide.

    Args:
        x: A tensor whose numbers are looked at.
        key: Kind and shapes.
        question: Looks at the numbers.

    Returns:
        The answer, for which an accelerator is waited for. Where a pass is traced, see
        :func:`may_look`, it is the one that was given the last time, if there was one.
    """
    if may_look(x, waits=True) or key not in _ANSWERS:
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.clear()
        answer = out_of_sight(question)()
        _ANSWERS[key] = answer  # another thread may replace or forget it
        return answer
    return _ANSWERS[key]


def is_batched(x: Tensor) -> bool:
    """Tell whether a tensor stands for several, in either of PyTorch's ``vmap``.

    Args:
        x: The tensor.

    Returns:
        Whether it does.
    """
    if torch._C._has_storage(x):  # a quick answer
        return False
    return "Batched" in repr(torch._C._dispatch_keys(x))


def state() -> State:
    """Return this thread's state, which autograd's threads share with their caller.

    Returns:
        The state.
    """
    if torch._C._is_key_in_tls(_KEY):
        return torch._C._get_obj_in_tls(_KEY)
    own = vars(_LOCAL).get("state")
    if own is None:
        own = _LOCAL.state = State()
    if State.has_threads:
        _stash(own)
    return own


def share(tensors: Iterable[Any]) -> None:
    """Let autograd's threads have their callers' states, if a tensor needs a thread.

    There is one for each device but the CPU. What PyTorch hands over to it stays with
    the caller's thread, and a thread that ends with something of Python's while the
    interpreter does, too, aborts the process.

    Args:
        tensors: Tensors that are about to be used, and other objects.
    """
    if not State.has_threads:
        with torch._C.DisableTorchFunction():
            known = (isinstance(x, Tensor) and not x.is_cpu for x in tensors)
            State.has_threads = any(known)


def _stash(new: State) -> None:
    """Put a state into PyTorch's thread-local state, which then owns it.

    Args:
        new: The state.
    """
    references = sys.getrefcount(new)
    torch._C._stash_obj_in_tls(_KEY, new)
    if sys.getrefcount(new) == references:
        # before torch 2.12, PyTorch gives up a reference that it has never taken
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(new))


def in_function() -> bool:
    """Tell whether a function with a backward of its own is running.

    Returns:
        Whether it is. No graph is made there.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return not torch._C._is_fwd_grad_enabled()  # which `no_grad` leaves as it is
