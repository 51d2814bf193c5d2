"""What PyTorch does today, and did not in the oldest version that is promised."""

from functools import wraps
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function


def make_backward_overridable() -> None:
    """Let function modes see calls of ``torch.autograd.backward``.

    Before torch 2.11, they saw ``Tensor.backward`` and ``torch.autograd.grad`` only: a
    backward pass that began otherwise was not announced. Does nothing since then.
    """
    if torch.__version__ < "2.11":
        torch.autograd.backward = _overridable(torch.autograd.backward)


def _overridable(plain: Any) -> Any:
    """Wrap ``torch.autograd.backward``, with its own signature.

    Args:
        plain: The function of an older PyTorch.

    Returns:
        A function that does the same, and that modes can override.
    """

    @wraps(plain)
    def backward(
        tensors,
        grad_tensors=None,
        retain_graph=None,
        create_graph=False,
        grad_variables=None,
        inputs=None,
    ):
        options = {
            "grad_tensors": grad_tensors,
            "retain_graph": retain_graph,
            "create_graph": create_graph,
            "grad_variables": grad_variables,
            "inputs": inputs,
        }
        tensor_likes = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        if has_torch_function(tensor_likes):
            return handle_torch_function(backward, tensor_likes, tensors, **options)
        return plain(tensors, **options)

    return backward
