"""Checks of modules that end in an error or in a warning."""

from typing import Union
from warnings import warn

from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d

BATCH_NORM_TRAIN_MESSAGE = (
    "{module} is in training mode: it normalizes with statistics of the whole "
    "mini-batch, so the loss is no sum of per-sample losses and quantities of "
    "individual samples are not defined. Call `.eval()` on the module, or replace it "
    "with a layer that treats samples separately, e.g. `GroupNorm`."
)


def batch_norm_raise_error_if_train(
    module: Union[BatchNorm1d, BatchNorm2d, BatchNorm3d], raise_error: bool = True
) -> None:
    """Refuse, or warn about, a batch normalization in training mode.

    Args:
        module: The batch normalization.
        raise_error: Whether to raise an error. A warning is issued otherwise.

    Raises:
        NotImplementedError: If the module is in training mode and ``raise_error``.
    """
    if not module.training:
        return
    message = BATCH_NORM_TRAIN_MESSAGE.format(module=module)
    if raise_error:
        raise NotImplementedError(message)
    warn(message, stacklevel=2)
