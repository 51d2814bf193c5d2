"""Warnings, and checks of modules that end in one or in an error."""

import sys
from contextlib import contextmanager
from types import FrameType
from typing import Any, Iterable, Iterator, Mapping, Sequence, Type
from warnings import catch_warnings, filterwarnings, warn_explicit

from torch import Generator, Tensor, nn
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from backpack.utils.hooks import message, names_of
from backpack.utils.state import state

BATCH_NORM_TRAIN = (
    "{exts}{module} {reason}: it normalizes with statistics of the whole "
    "mini-batch, so the loss is no sum of per-sample losses and quantities of "
    "individual samples are not defined. {way}, or replace it with a layer that treats "
    "samples separately, e.g. `GroupNorm`."
)
ALONG_SAMPLES = (
    "{exts}{module} acts along axis 0 of its input of shape {shape}, where the samples "
    "are, so the loss is no sum of per-sample losses and quantities of individual "
    "samples are not defined. Let it act along other axes (`{option}`)."
)

_ALONG_DIM = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)
_ALONG_LAST = (nn.LayerNorm, nn.RMSNorm)


def warn_user(text: str) -> None:
    """Warn at the line of the program that led here.

    Args:
        text: The message.
    """
    frame, caller = _outside(sys._getframe(1)), state().caller
    if _is_inner(frame) and caller is not None:  # in a thread of autograd's
        frame = _outside(caller)
    names, line = frame.f_globals, frame.f_lineno
    registry = names.setdefault("__warningregistry__", {})
    file, module = frame.f_code.co_filename, names.get("__name__")
    warn_explicit(text, UserWarning, file, line, module, registry)


@contextmanager
def without_performance_warnings() -> Iterator[None]:
    """Let ``vmap`` run what it has no rule for one after the other, without a word.

    Yields:
        Nothing.
    """
    with catch_warnings():
        filterwarnings("ignore", "There is a performance drop")
        yield


def _outside(frame: FrameType) -> FrameType:
    """Return the innermost frame of the program's."""
    while frame.f_back is not None and _is_inner(frame):
        frame = frame.f_back
    return frame


def _is_inner(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("backpack", "torch", "contextlib", "functools")


def check_choice(
    name: str,
    option: str,
    value: Any,
    choices: Iterable[Any],
    error: Type[Exception] = ValueError,
) -> None:
    """Refuse a value that an option does not have.

    Args:
        name: Whose option it is.
        option: Name of the option.
        value: Its value.
        choices: The values that it may have.
        error: Class of the error. Default: ``ValueError``.

    Raises:
        Exception: Of that class, if the value is none of them.
    """  # noqa: DAR401
    choices = tuple(choices)
    if value not in choices:
        raise error(f"{name}: {option} must be one of {choices}, got {value!r}.")


def check_generator(name: str, generator: Any) -> None:
    """Refuse what is no source of random numbers.

    Args:
        name: Whose option it is.
        generator: Its value.

    Raises:
        ValueError: If it is neither a generator nor ``None``.
    """
    if not isinstance(generator, (Generator, type(None))):
        raise ValueError(
            f"{name}: generator must be a torch.Generator or None, got {generator!r}. "
            "Pass `torch.Generator(device).manual_seed(0)`, with the model's device."
        )


def check_mapping(name: str, option: str, value: Any, saved: str, field: str) -> None:
    """Refuse what has no value for each parameter.

    Args:
        name: Whose option it is.
        option: Name of the option.
        value: Its value.
        saved: What may be passed.
        field: Where that is saved on parameters.

    Raises:
        ValueError: If it is neither a mapping nor ``None``.
    """
    if not isinstance(value, (Mapping, type(None))):
        raise ValueError(
            f"{name}: {option} must be a mapping from parameters, got "
            f"{type(value).__name__}. Pass for instance {saved}, "
            f"{option}={{p: p.{field} for p in model.parameters()}}."
        )


def batch_norm_raise_error_if_train(
    module: _BatchNorm, raise_error: bool = True
) -> None:
    """Refuse, or warn about, a batch normalization that couples samples.

    It does in training mode, and always if it keeps no running statistics.

    Args:
        module: The batch normalization.
        raise_error: Whether to raise an error. A warning is issued otherwise.

    Raises:
        NotImplementedError: If the module couples samples and ``raise_error``.
    """
    if module.training:
        reason, way = "is in training mode", "Call `.eval()` on the module"
    elif module.running_mean is None:
        reason = "keeps no running statistics"
        way = "Let it keep some (`track_running_stats=True`)"
    else:
        return
    exts = _active_extensions()
    text = message(BATCH_NORM_TRAIN, exts=exts, module=module, reason=reason, way=way)
    if raise_error:
        raise NotImplementedError(text)
    warn_user(text)


def _active_extensions() -> str:
    """Name the active extensions, for the beginning of a message."""
    names = names_of(state().active_exts)
    return f"{names}: " if names else ""


def acts_along_samples(module: Module, x: Tensor) -> bool:
    """Tell whether a layer normalizes, or selects, along the axis of the samples.

    Args:
        module: The layer.
        x: Its input, with samples on axis 0.

    Returns:
        Whether a known layer does.
    """
    if isinstance(module, _ALONG_LAST):
        return len(module.normalized_shape) >= x.dim()
    if not isinstance(module, _ALONG_DIM):
        return False
    if module.dim is None:  # PyTorch chooses
        return x.dim() in (0, 1, 3)
    return module.dim in (0, -x.dim())


def raise_error_if_coupled(module: Module, inputs: Sequence[Any]) -> None:
    """Refuse a layer that couples samples.

    Args:
        module: The layer.
        inputs: Inputs of its call.

    Raises:
        NotImplementedError: If the layer couples samples.
    """
    if isinstance(module, _BatchNorm):
        batch_norm_raise_error_if_train(module)
    elif acts_along_samples(module, inputs[0]):
        option = "normalized_shape" if isinstance(module, _ALONG_LAST) else "dim"
        found = {"module": module, "shape": inputs[0].shape, "option": option}
        exts = _active_extensions()
        raise NotImplementedError(message(ALONG_SAMPLES, exts=exts, **found))
