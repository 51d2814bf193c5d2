"""The generic rule: any parameter of any module, by its own forward pass.

A vector-Jacobian product of the module's forward pass, vmapped over samples and columns.
It is slow and always right, so it serves the layers nobody wrote a rule for, and the
fast rules are tested against it.
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Union

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.nn import GRU, LSTM, RNN, Module, MultiheadAttention
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.core.reductions import Dense
from backpack.utils.disable import disable

Cotangents = Union[Tensor, Sequence[Optional[Tensor]]]

_SEQUENCE_MODULES = (RNN, LSTM, GRU, MultiheadAttention)


class RandomState:
    """State of the random number generators at the beginning of a module's call.

    A forward pass that draws random numbers can then be repeated exactly.
    """

    def __init__(self, device: torch.device):
        """Remember the state.

        Args:
            device: Device of the module's inputs.
        """
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Repeat the random numbers inside the context, and none of it outside."""
        devices = [] if self.cuda is None else [self.device]
        with torch.random.fork_rng(devices):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield


def output_batch_axis(module: Module, index: int) -> int:
    """Return which axis of a module's output holds the samples.

    Args:
        module: The module.
        index: Which of its output tensors.

    Returns:
        The axis: 1 for outputs of recurrent and attention layers that put the sequence
        first, and for final hidden states, else 0.
    """
    if not isinstance(module, _SEQUENCE_MODULES):
        return 0
    if index == 0:
        return int(not module.batch_first)
    return int(not isinstance(module, MultiheadAttention))


def input_batch_axis(module: Module, index: int) -> int:
    """Return which axis of a module's input holds the samples.

    Args:
        module: The module.
        index: Which of its inputs.

    Returns:
        The axis: 1 for inputs of recurrent and attention layers that put the sequence
        first, and for initial hidden states, else 0.
    """
    if isinstance(module, MultiheadAttention):
        return int(index < 3 and not module.batch_first)
    if isinstance(module, _SEQUENCE_MODULES):
        return int(index > 0 or not module.batch_first)
    return 0


def tensor_outputs(output: Any) -> List[Tensor]:
    """Collect the floating-point tensors in a module's output, in a fixed order.

    Args:
        output: What the module returned.

    Returns:
        The tensors, nested ones included.
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    leaves, _ = tree_flatten(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def generic_product(
    name: str,
    module: Module,
    inputs: Sequence[Any],
    cotangents: Cotangents,
    kwargs: Optional[Dict[str, Any]] = None,
    random_state: Optional[RandomState] = None,
) -> Dense:
    """Compute products of cotangents and a parameter's Jacobian for any module.

    Args:
        name: The parameter's (dotted) name in the module.
        module: The module.
        inputs: Positional arguments of its call.
        cotangents: Columns ``[V, N, *]`` at its output; a sequence (in which ``None``
            stands for zero) if it has several.
        kwargs: Keyword arguments of its call. Default: ``None``.
        random_state: What the call found in the random number generators, if it drew
            from them. Default: ``None``.

    Returns:
        The products, ``[V, N, *p]``.

    Raises:
        RuntimeError: If the forward pass is random and no state was given.
    """
    mats = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
    mats = {index: mat for index, mat in enumerate(mats) if mat is not None}
    kwargs = kwargs or {}
    try:
        return _vmapped(name, module, inputs, mats, kwargs)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # not every operation can be vmapped: random and data-dependent ones can't
        if random_state is None and "random" in str(error):
            raise RuntimeError(
                f"{type(module).__name__}: the generic rule must repeat the forward "
                "pass, which draws random numbers, and their state was not recorded. "
                "Put dropout into a module of its own, or use eval()."
            ) from error
        return _masked(name, module, inputs, mats, kwargs, random_state)


def _vmapped(
    name: str,
    module: Module,
    inputs: Sequence[Any],
    mats: Dict[int, Tensor],
    kwargs: Dict[str, Any],
) -> Dense:
    """Apply the rule to one sample and column, and vmap it over both."""
    param = module.get_parameter(name)
    out_axes = {index: output_batch_axis(module, index) for index in mats}
    batch_size = next(mat.shape[1 + out_axes[i]] for i, mat in mats.items())

    leaves, spec = tree_flatten((tuple(inputs), kwargs))
    in_axes = {
        i: input_batch_axis(module, i)
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor)
    }
    in_axes = {
        i: axis
        for i, axis in in_axes.items()
        if leaves[i].dim() > axis and leaves[i].shape[axis] == batch_size
    }

    def one_sample(sample: List[Tensor], columns: List[Tensor]) -> Tensor:
        arguments = list(leaves)
        for x, (i, axis) in zip(sample, in_axes.items()):
            arguments[i] = x.unsqueeze(axis)
        args, keywords = tree_unflatten(arguments, spec)

        def forward(value: Tensor) -> List[Tensor]:
            out = functional_call(module, {name: value}, args, keywords)
            out = tensor_outputs(out)
            return [out[i] for i in mats]

        _, pull_back = vjp(forward, param)

        def one_column(column: List[Tensor]) -> Tensor:
            axes = out_axes.values()
            return pull_back([c.unsqueeze(axis) for c, axis in zip(column, axes)])[0]

        return vmap(one_column)(columns)

    products = vmap(
        one_sample,
        in_dims=(list(in_axes.values()), [1 + axis for axis in out_axes.values()]),
        out_dims=1,
    )([leaves[i] for i in in_axes], list(mats.values()))
    return Dense(products, param.shape)


def _masked(
    name: str,
    module: Module,
    inputs: Sequence[Any],
    mats: Dict[int, Tensor],
    kwargs: Dict[str, Any],
    random_state: Optional[RandomState],
) -> Dense:
    """Repeat the whole batch's call, and differentiate once per sample and column."""
    create_graph = torch.is_grad_enabled()
    param = module.get_parameter(name)
    value = param if create_graph else param.detach().requires_grad_()

    def forward() -> List[Tensor]:
        with torch.enable_grad(), disable():
            out = functional_call(module, {name: value}, tuple(inputs), kwargs)
        return [tensor_outputs(out)[i] for i in mats]

    outputs = _replayed(forward, random_state)
    axes = [output_batch_axis(module, index) for index in mats]
    num_columns = next(iter(mats.values())).shape[0]
    batch_size = outputs[0].shape[axes[0]]

    products = []
    for v in range(num_columns):
        for n in range(batch_size):
            masked = []
            for mat, axis in zip(mats.values(), axes):
                index = torch.tensor([n], device=mat.device)
                only_n = torch.zeros_like(mat[v])
                masked.append(
                    only_n.index_copy(axis, index, mat[v].index_select(axis, index))
                )
            (product,) = torch.autograd.grad(
                outputs,
                value,
                masked,
                retain_graph=True,
                create_graph=create_graph,
                materialize_grads=True,
            )
            products.append(product)
    stacked = torch.stack(products)
    return Dense(stacked.reshape(num_columns, batch_size, *param.shape), param.shape)


def _replayed(
    function: Callable[[], List[Tensor]], random_state: Optional[RandomState]
) -> List[Tensor]:
    if random_state is None:
        return function()
    with random_state.replay():
        return function()
