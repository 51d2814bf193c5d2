"""What operations keep for the backward pass, where somebody has hooks on that.

A checkpoint drops it, and runs its part of the model again for each backward pass, and
so for each product of ours that needs something of it. What our products will need is
therefore asked for in the name of the pass that is running, which gets it from us.
"""

from __future__ import annotations

from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from backpack.utils.hooks import names_of, no_op
from backpack.utils.state import state
from backpack.utils.types import is_inexact, node_of, place_of

SAVED = "backpack.saved"  # where a node of a constant's graph keeps what was saved

REPEATED = (
    "{exts}: a part of the model runs inside a checkpoint, which is repeated for "
    "{what} as well as for gradients, and failed ({error}). Use `checkpoint(..., "
    "use_reentrant=False)` without `context_fn` and `debug`, whose contexts may be "
    "there for a single time{otherwise}."
)
OF_COLUMNS = {"what": "columns", "otherwise": ", or quantities of first order"}
OF_FUNCTIONS = {
    "what": "what has no rule, like functions with a backward of their own, or a check",
    "otherwise": ", or call functions outside of it",
}

# Older versions of torch don't say which; there, checkpoints run more often.
_innermost_hooks: Callable | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


class Saved:
    """A tensor that an operation has saved, in somebody's hands."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]):
        """Store what is known of it.

        Args:
            packed: What the hook has made of the tensor.
            unpack: The hook that returns the tensor.
        """
        self._packed, self._unpack = packed, unpack

    def ask(self) -> Tensor:
        """Ask for the tensor; for a checkpoint, at most once in a backward pass.

        Returns:
            The tensor.
        """
        return self._unpack(self._packed)

    def unpack(self) -> Tensor:
        """Give the tensor to autograd.

        Returns:
            The tensor.
        """
        current = state()
        fetched = _fetched()
        if self not in fetched:
            return self.ask()
        return fetched[self] if current.pulling else fetched.pop(self)


# Somewhere in the hands of hooks that an older version of torch does not tell
HIDDEN = Saved(None, no_op)


def _fetched() -> dict[Saved, Tensor]:
    """Return what the backward pass that is running has asked for."""
    running = state().backward_pass
    return {} if running is None else running.kept.setdefault(SAVED, {})


class InsteadOfSaved(TorchDispatchMode):
    """Lets operations of PyTorch see others in place of all numbers that were saved.

    With ones, what depends on what is the same, whatever the numbers are, as NaN.
    """

    def __init__(self, replace: Callable[[Tensor], Tensor] = torch.ones_like) -> None:
        """Begin with no tensor made meanwhile.

        Args:
            replace: Makes other numbers. Default: ones.
        """
        super().__init__()
        self._replace = replace
        self._made: dict[int, Tensor] = {}  # and kept, so that nobody has its identity

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on ones where it would take what was there before."""
        args, kwargs = tree_map_only(Tensor, self._see, (args, kwargs or {}))
        return tree_map_only(Tensor, self._note, func(*args, **kwargs))

    def _see(self, x: Tensor) -> Tensor:
        is_own = id(x) in self._made or not is_inexact(x)
        return x if is_own else self._replace(x)

    def _note(self, x: Tensor) -> Tensor:
        return self._made.setdefault(id(x), x)


def are_kept() -> bool:
    """Tell whether somebody has hooks on what operations save.

    Returns:
        Whether somebody has, which is when such hooks can't be forbidden.
    """
    try:
        with disable_saved_tensors_hooks("there are some"):
            return False
    except RuntimeError:
        return True


def run(
    func: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    constants: Sequence[Tensor] = (),
) -> tuple[Any, Sequence[Saved]]:
    """Run an operation.

    Args:
        func: The operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
        constants: What aliases stand for: hooks that spare parameters are given these.
            Default: none.

    Returns:
        Its result, and what it has saved, if somebody has hooks on that.
    """
    hooks = None if _innermost_hooks is None else _innermost_hooks(False)
    if hooks is None:
        hidden = _innermost_hooks is None and are_kept()
        return func(*args, **kwargs), [HIDDEN] if hidden else ()
    saved: list[Saved] = []
    pack, unpack = hooks
    own = {_numbers(x): x for x in constants if isinstance(x, Parameter)}

    def keep(x: Tensor) -> Saved:
        saved.append(Saved(pack(own.get(_numbers(x), x)), unpack))
        return saved[-1]

    with saved_tensors_hooks(keep, Saved.unpack):
        return func(*args, **kwargs), saved


def _numbers(x: Tensor) -> Any:
    """Tell which numbers a tensor has; those of a sparse one are not compared."""
    is_strided = x.layout is torch.strided and not x.is_nested
    return (place_of(x), x.shape, x.stride()) if is_strided else id(x)


def note(outputs: Iterable[Tensor], saved: Sequence[Saved]) -> None:
    """Remember what was saved in computing a constant, at its nodes of the graph.

    Args:
        outputs: What came out.
        saved: What was saved.
    """
    for x in outputs:
        if (node := node_of(x)) is not None:
            node.metadata.setdefault(SAVED, []).extend(saved)


def fetch(saved: Iterable[Saved]) -> None:
    """Ask for tensors before a product needs them, which is no pass of its own then.

    Args:
        saved: The tensors.
    """
    fetched = _fetched()
    for x in saved:
        if x not in fetched:
            fetched[x] = x.ask()


def explain_failure(
    error: BaseException | None, extensions: Sequence[Any], is_ours: bool = False
) -> None:
    """Say why a checkpoint was repeated, if it cannot be.

    What else fails while it is repeated passes as it is: what the model raises, what
    interrupts, and what PyTorch says of a repetition that differs.

    Args:
        error: What has ended a backward pass, if something has.
        extensions: The active extensions.
        is_ours: Whether no pass of the program's runs yet. Default: ``False``.

    Raises:
        NotImplementedError: If it was that, and this was not the program's doing.
    """
    if type(error) not in (RuntimeError, AttributeError):
        return
    names = [f.f_globals.get("__name__", "") for f, _ in walk_tb(error.__traceback__)]
    while names[-1] == "contextlib":  # a context that is there for a single time
        names.pop()
    exts = [x for x in extensions if x.pulls_columns]
    if names[-1] == "torch.utils.checkpoint" and (
        exts or is_ours or _is_of_ours(names)
    ):
        what = OF_COLUMNS if exts else OF_FUNCTIONS
        text = REPEATED.format(exts=names_of(exts or extensions), error=error, **what)
        raise NotImplementedError(text) from error


@contextmanager
def explained(extensions: Sequence[Any]) -> Iterator[None]:
    """Say why a checkpoint was repeated before a backward pass, if it cannot be.

    Args:
        extensions: The active extensions.

    Yields:
        Nothing.
    """
    try:
        yield
    except Exception as error:
        explain_failure(error, extensions, is_ours=True)
        raise


def _is_of_ours(names: Sequence[str]) -> bool:
    """Tell whether a backward pass is no pass of the program's.

    Args:
        names: Modules of what has called each other in it.

    Returns:
        Whether it is known to have been started here.
    """
    last = max(
        (i for i, x in enumerate(names) if x == "torch.autograd.graph"), default=0
    )
    before = [name for name in names[:last] if not name.startswith("torch.autograd")]
    return bool(before) and before[-1].startswith("backpack.")
