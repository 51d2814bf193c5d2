"""A step that is tried before it is compiled: what it must not do, and undoing it."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
from typing import Any, Callable, Iterator, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from backpack.converter.reading import LIKE
from backpack.utils.state import out_of_sight
from backpack.utils.types import drawn_elsewhere, tensors_in
from backpack.utils.writes import Writes, memory_of

NOT_TRACED = (
    "compile_step(...): the step runs as it is, but its operations cannot be recorded: "
    "{error}. It must do the same for all numbers in its tensors (no `if` about them, "
    "no `.item()`, no indexing with a mask), and draw from PyTorch's own generator. "
    "Leave out what does, or run a plain backward pass."
)
REPLACED = (
    "compile_step(...): the forward pass of {module} puts another tensor into its "
    "buffer '{name}', which a graph cannot do. Write into the buffer, in place."
)
READS = "`{name}` makes numbers of Python, or a shape, of numbers in a tensor"
BACKWARD = "the closure runs a backward pass of its own (return the loss)"
OTHER_NUMBERS = "{who} draws random numbers, which would be the same in each step"
SET_BACK = (
    "the state of a generator of random numbers is set (`fork_rng`, `manual_seed`, a "
    "checkpoint around what draws numbers), which is no operation"
)

# What makes numbers of Python of a tensor's, or a shape
_READING = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __array__ "
    "__dlpack__ __contains__ equal allclose is_nonzero nonzero argwhere unique "
    "unique_consecutive unique_dim _unique _unique2 bincount masked_select".split()
)
# Methods by which numbers leave PyTorch
_LEAVING = ("numpy", "tolist", "__array__", "__dlpack__")
# Names of operations that draw random numbers begin with one of these
_DRAWING = (
    *("rand", "normal", "bernoulli", "multinomial", "poisson", "binomial", "dropout"),
    *("uniform", "exponential", "geometric", "cauchy", "log_normal", "random"),
)


class Reading(TorchFunctionMode):
    """Refuses what depends on the numbers in a tensor that may be others next time.

    What is computed from constants of the step alone never is.
    """

    def __init__(self) -> None:
        """Begin without constants."""
        super().__init__()
        self._constants = WeakIdKeyDictionary()

    def __enter__(self) -> Reading:
        """Begin; what runs inside of an operation, as hooks do, sees no mode."""
        thread = get_ident()
        self._own = {name: vars(Tensor).get(name) for name in _LEAVING}

        def watched(method: Callable) -> Callable:
            @wraps(method)
            def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if get_ident() == thread and x not in self._constants:
                    if not _is_ours():
                        _refuse(READS.format(name=method.__name__))
                return method(x, *args, **kwargs)

            return call

        for name in _LEAVING:
            setattr(Tensor, name, watched(getattr(Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End."""
        for name, method in self._own.items():
            delattr(Tensor, name)
            if method is not None:
                setattr(Tensor, name, method)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, unless it reads."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        operands = tensors_in((args, kwargs))
        changes = [x for x in operands if x not in self._constants]
        if changes and _reads(name, args, kwargs) and not _is_ours():
            _refuse(READS.format(name=name))
        if name == "backward" and not _is_ours():
            _refuse(BACKWARD)
        out = func(*args, **kwargs)
        if name in LIKE or name.startswith("new_") or not changes:
            if not name.lstrip("_").startswith(_DRAWING):
                for x in tensors_in(out):
                    self._constants[x] = None
        return out


class Recordable(TorchFunctionMode):
    """Does without looking at numbers what PyTorch does only after it has checked them.

    They have been checked when the step was run as it is.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int) -> Tensor:
    zeros = tensor.new_zeros((*tensor.shape, num_classes))
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _refuse(error: str) -> NoReturn:
    raise NotImplementedError(NOT_TRACED.format(error=error))


def _reads(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation makes something else than numbers in tensors."""
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return "output_size" not in kwargs and len(tensors_in((args[1:], kwargs))) > 0
    if name == "one_hot":
        return kwargs.get("num_classes", args[1] if len(args) > 1 else -1) < 0
    if name == "__getitem__":
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
    return name in _READING


def _is_ours() -> bool:
    """Tell whether an operation was called by this package, and not by a model."""
    frame = sys._getframe(2)
    while frame is not None:
        top, _, _ = frame.f_globals.get("__name__", "").partition(".")
        if top != "torch":
            return top == "backpack"
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Keeper(Writes):
    """Copies what was there before a step when that writes to it, to restore it.

    Refuses random numbers that do not follow those before.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self._kept: dict[int | None, tuple[Tensor, Tensor]] = {}  # and what was there
        # states of generators that were set to another one, by type of the device
        self._set_aside: dict[str, Tensor] = {}

    def see(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:  # noqa: D102
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return
        if kwargs.get("generator") is not None:
            _refuse(OTHER_NUMBERS.format(who="a generator of its own"))
        devices = [x.device.type for x in tensors_in((args, kwargs))] or ["cpu"]
        self.check(torch.device(kwargs.get("device") or devices[0]).type)

    @out_of_sight
    def overwrite(self, x: Tensor, operation: str) -> None:  # noqa: D102
        if memory_of(x) not in self._kept:
            memory = torch.empty(0, dtype=torch.uint8, device=x.device)
            memory.set_(x.untyped_storage())
            self._kept[memory_of(x)] = memory, memory.clone()

    def check(self, *kinds: str) -> None:
        """Refuse generators that are in another state than after the last draw.

        Args:
            kinds: Types of their devices.

        Raises:
            NotImplementedError: If one is.
        """
        if any(kind in self._set_aside for kind in kinds):
            _refuse(SET_BACK)

    @contextmanager
    def noting_states(self) -> Iterator[None]:
        """Note when this thread sets generators; a checkpoint also puts them back.

        Yields:
            Nothing.
        """
        thread = get_ident()

        def noting(function: Callable) -> Callable:
            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if get_ident() != thread:
                    return function(*args, **kwargs)
                before = _states()
                out = function(*args, **kwargs)
                for kind, now in _states().items():
                    if not torch.equal(now, before[kind]):
                        own = self._set_aside.setdefault(kind, before[kind])
                        if torch.equal(now, own):
                            del self._set_aside[kind]
                return out

            return call

        with ExitStack() as stack:
            for module in (torch, torch.random, torch.cuda, torch.cuda.random):
                for name in ("set_rng_state", "manual_seed", "seed"):
                    function = getattr(module, name)
                    stack.callback(setattr, module, name, function)
                    setattr(module, name, noting(function))
            yield
            self.check(*self._set_aside)

    def restore(self) -> None:
        """Write back what was there."""
        for memory, numbers in self._kept.values():
            memory.copy_(numbers)


def _states() -> dict[str, Tensor]:
    """Return the states of generators of random numbers, by type of the device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cat(torch.cuda.get_rng_state_all())
    return states


@contextmanager
def as_before(modules: dict[Module, None]) -> Iterator[None]:
    """Restore random numbers, and all tensors that were there.

    Args:
        modules: Modules that are called, and those inside, as far as they are known;
            others are added.

    Yields:
        Nothing.

    Raises:
        NotImplementedError: If a buffer has become another tensor, or somebody else has
            drawn random numbers.
    """
    before: list[tuple[Module, str, Tensor, Tensor]] = []
    keeper = Keeper()

    def note(module: Module) -> None:
        modules[module] = None
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
        with torch.random.fork_rng(devices), _others_draw_nothing():
            with keeper.noting_states(), keeper:
                yield
    finally:
        handle.remove()
        torch.clear_autocast_cache()
        with torch.no_grad():
            for *_, x, value in before:
                x.copy_(value)
            keeper.restore()
    for module, name, x, _ in before:
        if module._buffers.get(name) is not x:
            raise NotImplementedError(REPLACED.format(module=module, name=name))


@contextmanager
def _others_draw_nothing() -> Iterator[None]:
    """Refuse random numbers of Python and NumPy; restore what they are drawn from."""
    with drawn_elsewhere() as drawn:
        yield
    for who in drawn:
        _refuse(OTHER_NUMBERS.format(who=who))
