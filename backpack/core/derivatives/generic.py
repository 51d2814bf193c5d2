"""The generic rule: any parameter of any module, by its own forward pass.

A vector-Jacobian product of the module's forward pass, vmapped over samples and
columns. It is slow and always right, so it serves the layers nobody wrote a rule for,
and the fast rules are tested against it.
"""

from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.nn import GRU, LSTM, RNN, MultiheadAttention, Parameter
from torch.utils._pytree import tree_flatten, tree_unflatten

from backpack.converter.function import FunctionModule
from backpack.core.per_sample.base import Dense
from backpack.utils.disable import disable
from backpack.utils.state import ask
from backpack.utils.types import Layer

Cotangents = Union[Tensor, Sequence[Optional[Tensor]]]

_SEQUENCE_MODULES = (RNN, LSTM, GRU, MultiheadAttention)


def output_batch_axis(module: Layer, index: int) -> int:
    """Return which axis of a module's output holds the samples.

    Args:
        module: The module.
        index: Which of its output tensors.

    Returns:
        The axis, 1 for outputs of recurrent and attention layers that put the sequence
        first, and for final hidden states, else 0.
    """
    if not isinstance(module, _SEQUENCE_MODULES):
        return 0
    if index == 0:
        return int(not module.batch_first)
    return int(not isinstance(module, MultiheadAttention))


def input_batch_axis(module: Layer, index: int) -> int:
    """Return which axis of a module's input holds the samples.

    Args:
        module: The module.
        index: Which of its inputs.

    Returns:
        The axis, 1 for inputs of recurrent and attention layers that put the sequence
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


def argument_position(module: Layer, name: str) -> Optional[int]:
    """Tell which argument of an operation a parameter is.

    The converter turns operations into modules, whose arguments may be parameters.

    Args:
        module: The module.
        name: The parameter's name, ``"input<i>"`` for the i-th positional argument.

    Returns:
        The position, ``None`` if the parameter is the module's own.
    """
    return int(name[5:]) if isinstance(module, FunctionModule) else None


def find_parameter(module: Layer, name: str) -> Tensor:
    """Look up a parameter by its name in a call.

    Args:
        module: The module, with the arguments of its call.
        name: The parameter's name, see :func:`argument_position`.

    Returns:
        The parameter.
    """
    return attrgetter(name)(module)  # which may be a tensor of another class


def generic_product(
    name: str,
    module: Layer,
    inputs: Sequence[Any],
    cotangents: Cotangents,
    kwargs: Optional[Dict[str, Any]] = None,
    outputs: Optional[Sequence[Tensor]] = None,
) -> Dense:
    """Compute products of cotangents and a parameter's Jacobian for any module.

    Args:
        name: The parameter's (dotted) name in the module, see
            :func:`argument_position`.
        module: The module.
        inputs: Positional arguments of its call.
        cotangents: Columns ``[V, N, *]`` at its output; a sequence (in which ``None``
            stands for zero) if it has several.
        kwargs: Keyword arguments of its call. Default: ``None``.
        outputs: The call's outputs, to check that repeating the call gives the same.
            Default: ``None``.

    Returns:
        The products, ``[V, N, *p]``.

    Raises:
        RuntimeError: If the forward pass cannot be repeated.
    """
    repeated = _Repeated(name, module, inputs, kwargs or {}, cotangents)
    try:
        products, again = repeated.vmapped()
        is_right = repeated.gave(outputs, again)
    except Exception:
        # not every operation can be vmapped: random and data-dependent ones can't; and
        # a forward pass may refuse a batch of one with any error of its own
        is_right = False
    if not is_right:
        products, again = repeated.masked()
        if not repeated.gave(outputs, again):
            raise RuntimeError(
                f"{type(module).__name__}: repeating the forward pass gave another "
                "output, so quantities of its own parameters can't be computed. The "
                "module draws random numbers or keeps a state. Call eval(), or put the "
                f"parameter ({name}) and the random part into modules of their own."
            )
    return Dense(products, repeated.param.shape)


class _Repeated:
    """A module's call, to be repeated with other values of a parameter."""

    def __init__(
        self,
        name: str,
        module: Layer,
        args: Sequence[Any],
        kwargs: Dict[str, Any],
        cotangents: Cotangents,
    ):
        self.name, self.module = name, module
        self.args, self.kwargs = tuple(args), kwargs
        self.leaves, self.spec = tree_flatten((self.args, kwargs))
        self.position = argument_position(module, name)
        own = self.position is None
        self.param = find_parameter(module, name) if own else args[self.position]
        mats = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
        self.mats = {i: mat for i, mat in enumerate(mats) if mat is not None}
        self.axes = [output_batch_axis(module, i) for i in self.mats]
        first = next(iter(self.mats.values()))
        self.num_columns, self.batch_size = len(first), first.shape[1 + self.axes[0]]

    def forward(self, leaves: Sequence[Any], value: Tensor) -> List[Tensor]:
        """Repeat the call.

        Args:
            leaves: Flattened arguments.
            value: Value of the parameter.

        Returns:
            Those outputs that have cotangents.
        """
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        values = {name: x.clone() for name, x in self.module.named_buffers()}
        args = list(args)
        if self.position is None:
            values[self.name] = value
        else:
            args[self.position] = value
        with disable(), _attributes_restored(self.module):
            out = functional_call(self.module, values, tuple(args), kwargs)
        out = tensor_outputs(out)
        return [out[i] for i in self.mats]

    def gave(self, expected: Optional[Sequence[Tensor]], again: List[Tensor]) -> bool:
        """Tell whether the outputs are those of the call, as far as they are known."""
        known = [expected[i] for i in self.mats] if expected else []
        for out, before in zip(again, known):
            key = "repeats", type(self.module), repr(self.module), before.shape
            if not ask(out, key, partial(is_repetition, out, before)):
                return False
        return True

    def vmapped(self) -> Tuple[Tensor, List[Tensor]]:
        """Differentiate for one sample, and vmap over samples.

        Returns:
            The products ``[V, N, *p]``, and the outputs.
        """
        in_axes = self._input_axes()

        def one_sample(
            sample: List[Tensor], columns: List[Tensor]
        ) -> Tuple[Tensor, List[Tensor]]:
            leaves = list(self.leaves)
            for x, (i, axis) in zip(sample, in_axes.items()):
                leaves[i] = x.unsqueeze(axis)
            out, pull_back = vjp(lambda p: self.forward(leaves, p), self.param)[:2]
            # a loop over columns: nested vmaps are not right for all operations
            products = [
                pull_back([c[v].unsqueeze(a) for c, a in zip(columns, self.axes)])[0]
                for v in range(self.num_columns)
            ]
            out = [x.squeeze(axis) for x, axis in zip(out, self.axes)]
            return torch.stack(products), out

        mapped = vmap(
            one_sample,
            in_dims=(list(in_axes.values()), [1 + axis for axis in self.axes]),
            out_dims=(1, 0),
        )
        with catch_warnings():
            # operations that vmap has no rule for are slow, which this rule is anyway
            filterwarnings("ignore", "There is a performance drop")
            products, outputs = mapped(
                [self.leaves[i] for i in in_axes], list(self.mats.values())
            )
        return products, [x.movedim(0, axis) for x, axis in zip(outputs, self.axes)]

    def masked(self) -> Tuple[Tensor, List[Tensor]]:
        """Repeat the whole batch's call; differentiate for each sample and column.

        Returns:
            The products ``[V, N, *p]``, and the outputs.
        """
        create_graph = torch.is_grad_enabled()
        value = self.param if create_graph else self.param.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self.forward(self.leaves, value)
        options = {"retain_graph": True, "materialize_grads": True}
        rows = []
        for v in range(self.num_columns):
            for n in range(self.batch_size):
                masked = [
                    only_sample(mat[v], axis, n)
                    for mat, axis in zip(self.mats.values(), self.axes)
                ]
                (row,) = torch.autograd.grad(
                    outputs, value, masked, create_graph=create_graph, **options
                )
                rows.append(row.to_dense() if row.is_sparse else row)
        sizes = (self.num_columns, self.batch_size)
        return torch.stack(rows).unflatten(0, sizes), outputs

    def _input_axes(self) -> Dict[int, int]:
        """Find out which arguments hold samples, and along which axis."""
        first = len(tree_flatten(self.args)[0])
        shared = [i for i, name in enumerate(self.kwargs, first) if name == "attn_mask"]
        axes = {}
        for i, x in enumerate(self.leaves):
            if not isinstance(x, Tensor) or isinstance(x, Parameter) or i in shared:
                continue
            axis = input_batch_axis(self.module, i)
            if x.dim() > axis and x.shape[axis] == self.batch_size:
                axes[i] = axis
        return axes


@contextmanager
def _attributes_restored(module: Layer) -> Iterator[None]:
    """Undo what a forward pass does to the attributes of a module and those inside."""
    before = [(child, dict(vars(child))) for child in module.modules()]
    try:
        yield
    finally:
        for child, attributes in before:
            vars(child).clear()
            vars(child).update(attributes)


def only_sample(mat: Tensor, axis: int, n: int) -> Tensor:
    """Set a column to zero except for one sample.

    Args:
        mat: The column, with N samples.
        axis: The axis they are on.
        n: Number of the sample.

    Returns:
        A copy with zeros.
    """
    index = torch.tensor([n], device=mat.device)
    return torch.zeros_like(mat).index_copy(axis, index, mat.index_select(axis, index))


def is_repetition(output: Tensor, expected: Tensor) -> bool:
    """Tell whether repeating a forward pass gave the same output.

    Args:
        output: Output ``[N, *]`` of the repetition.
        expected: Output of the call.

    Returns:
        Whether they agree up to rounding errors, in the coarser one of their types.
    """
    tolerance = max(torch.finfo(x.dtype).eps for x in (output, expected)) ** 0.5
    return output.shape == expected.shape and torch.allclose(
        output, expected.to(output.dtype), tolerance, tolerance, equal_nan=True
    )
