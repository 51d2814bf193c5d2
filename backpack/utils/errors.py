"""Checks of modules that end in an error or in a warning."""

from typing import Union
from warnings import warn

from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d

BATCH_NORM_TRAIN_MESSAGE = (
    "{exts}{module} {reason}: it normalizes with statistics of the whole "
    "mini-batch, so the loss is no sum of per-sample losses and quantities of "
    "individual samples are not defined. Call `.eval()` on the module, or replace it "
    "with a layer that treats samples separately, e.g. `GroupNorm`."
)


def batch_norm_raise_error_if_train(
    module: Union[BatchNorm1d, BatchNorm2d, BatchNorm3d], raise_error: bool = True
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
        reason = "is in training mode"
    elif module.running_mean is None:
        reason = "keeps no running statistics"
    else:
        return
    message = BATCH_NORM_TRAIN_MESSAGE.format(
        exts=_active_extensions(), module=module, reason=reason
    )
    if raise_error:
        raise NotImplementedError(message)
    warn(message, stacklevel=2)


def _active_extensions() -> str:
    """Name the active extensions, for the beginning of a message."""
    from backpack.context import CTX  # which imports what imports this file

    names = ", ".join(type(ext).__name__ for ext in CTX.get_active_exts())
    return f"{names}: " if names else ""
