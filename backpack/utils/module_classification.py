"""Questions about the kind of a module."""

from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.loss import _Loss

from backpack.custom_module.branching import Parallel, _Branch
from backpack.custom_module.reduce_tuple import ReduceTuple

NLL_LOSSES = (nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss)
NO_OPS = (nn.Sequential, _Branch, Parallel, ReduceTuple, GraphModule)


def is_loss(module: nn.Module) -> bool:
    """Return whether the module is one of PyTorch's loss functions.

    Args:
        module: Any module.

    Returns:
        Whether it is one of the losses in ``torch.nn``, or derived from one.
    """
    return isinstance(module, _Loss)


def is_nll(module: nn.Module) -> bool:
    """Return whether a loss is known as a negative log-likelihood.

    Its minimizer is the maximum-likelihood estimate of a Gaussian, a categorical, or
    a Bernoulli distribution, whose samples serve as would-be targets.

    Args:
        module: Any module.

    Returns:
        Whether it is ``MSELoss``, ``CrossEntropyLoss`` or ``BCEWithLogitsLoss``.
    """
    return isinstance(module, NLL_LOSSES)


def is_no_op(module: nn.Module) -> bool:
    """Return whether a module only arranges other modules or their outputs.

    Args:
        module: Any module.

    Returns:
        Whether the module is no operation of its own. Such modules store no inputs
        and outputs, and no extension visits them. One with a forward pass of its own,
        in a class derived from them or set on itself, is none of them.
    """
    if not isinstance(module, NO_OPS) or "forward" in vars(module):
        return False
    kind = type(module)
    inherited = any(kind.forward is base.forward for base in NO_OPS)
    return inherited or isinstance(module, GraphModule)
