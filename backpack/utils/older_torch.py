"""What PyTorch does today, and did not in the oldest version that is promised."""

from functools import partial, wraps
from typing import Any, Callable

import torch
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import register_pytree_node, tree_leaves


def make_backward_overridable() -> None:
    """Let function modes see calls of ``torch.autograd.backward``.

    Before torch 2.11, they saw ``Tensor.backward`` and ``torch.autograd.grad`` only: a
    backward pass that began otherwise was not announced. Does nothing since then.
    """
    if torch.__version__ < "2.11":
        torch.autograd.backward = _overridable(torch.autograd.backward)


def make_packed_sequences_trees() -> None:
    """Let trees of tensors contain those of packed sequences.

    There, a recurrent layer's results were not seen if it had packed ones.
    """
    one = torch.ones(1, dtype=torch.long, device="cpu")
    packed = PackedSequence(one, one)
    if len(tree_leaves(packed)) == 1:
        register_pytree_node(
            PackedSequence,
            lambda x: (list(x), None),
            lambda values, _: PackedSequence(*values),
        )


def note_copies(graph: GraphModule, register: Callable[[Module], None]) -> None:
    """Call a function with each copy of a graph, which forgets most hooks.

    Before torch 2.6, nobody is told of a copy but what begins it.

    Args:
        graph: The graph.
        register: The function.
    """
    hooks = getattr(graph, "_deepcopy_hooks", None)
    if hooks is None:
        vars(graph)["_deepcopy_init"] = partial(_begin_copy, register)
    elif register not in hooks:
        hooks.append(register)


def _begin_copy(register: Callable[[Module], None]) -> Callable:
    """Return what begins the copy of a graph, and calls a function with it."""

    def begin(copied: Any, *args: Any) -> None:
        type(copied)._deepcopy_init(copied)(copied, *args)
        register(copied)

    return begin


def _overridable(plain: Any) -> Any:
    """Wrap ``torch.autograd.backward``, with its own signature.

    Args:
        plain: The function of an older PyTorch.

    Returns:
        A function that does the same, and that modes can override.
    """

    @wraps(plain)
    def backward(tensors: Any, *args: Any, **options: Any) -> Any:
        tensor_likes = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
        if has_torch_function(tensor_likes):
            args = (tensors, *args)
            return handle_torch_function(backward, tensor_likes, *args, **options)
        return plain(tensors, *args, **options)

    return backward
