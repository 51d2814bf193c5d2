"""The generic rule: any parameter of any module, by its own forward pass.

A vector-Jacobian product of the module's forward pass, vmapped over samples and
columns. It is slow and always right, so it serves the layers nobody wrote a rule for,
and the fast rules are tested against it.
"""

from contextlib import contextmanager, nullcontext
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
from backpack.utils.types import Layer

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


def output_batch_axis(module: Layer, index: int) -> int:
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


def input_batch_axis(module: Layer, index: int) -> int:
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
    if argument_position(module, name) is None:
        return module.get_parameter(name)
    return getattr(module, name)


def generic_product(
    name: str,
    module: Layer,
    inputs: Sequence[Any],
    cotangents: Cotangents,
    kwargs: Optional[Dict[str, Any]] = None,
    random_state: Optional[RandomState] = None,
) -> Dense:
    """Compute products of cotangents and one parameter's Jacobian for any module.

    Args:
        name: The parameter's (dotted) name in the module.
        module: The module.
        inputs: Positional arguments of its call.
        cotangents: Columns at its output, see :func:`generic_products`.
        kwargs: Keyword arguments of its call. Default: ``None``.
        random_state: State of the random number generators before the call. Default:
            ``None``.

    Returns:
        The products, ``[V, N, *p]``.
    """
    args = [name], module, inputs, cotangents, kwargs, random_state
    return generic_products(*args)[name]


def generic_products(
    names: Sequence[str],
    module: Layer,
    inputs: Sequence[Any],
    cotangents: Cotangents,
    kwargs: Optional[Dict[str, Any]] = None,
    random_state: Optional[RandomState] = None,
    outputs: Optional[Sequence[Optional[Tensor]]] = None,
) -> Dict[str, Dense]:
    """Compute products of cotangents and parameters' Jacobians for any module.

    Args:
        names: The parameters' (dotted) names in the module, see
            :func:`argument_position`.
        module: The module.
        inputs: Positional arguments of its call.
        cotangents: Columns ``[V, N, *]`` at its output; a sequence (in which ``None``
            stands for zero) if it has several.
        kwargs: Keyword arguments of its call. Default: ``None``.
        random_state: What the call found in the random number generators, if it drew
            from them. Default: ``None``.
        outputs: The call's outputs, to check that repeating the call gives the same.
            ``None`` for those that were modified since. Default: ``None``.

    Returns:
        The products, ``[V, N, *p]``, by name.

    Raises:
        RuntimeError: If the forward pass cannot be repeated.
    """
    repeated = _Repeated(names, module, inputs, kwargs or {}, cotangents, outputs)
    repeated.recompute_outputs(random_state)
    try:
        products = repeated.vmapped()
    except Exception:
        # not every operation can be vmapped: random and data-dependent ones can't; and
        # a forward pass may refuse a batch of one with any error of its own
        products = None
    if products is None:
        products = repeated.masked(random_state)
    if products is None:
        raise RuntimeError(
            f"{type(module).__name__}: repeating the forward pass gave another output, "
            "so quantities of its own parameters can't be computed. The module draws "
            "random numbers or keeps a state. Call eval(), or put the parameters "
            f"({', '.join(names)}) and the random part into modules of their own."
        )
    return products


class _Repeated:
    """A module's call, to be repeated with other values of some parameters."""

    def __init__(
        self,
        names: Sequence[str],
        module: Layer,
        args: Sequence[Any],
        kwargs: Dict[str, Any],
        cotangents: Cotangents,
        outputs: Optional[Sequence[Optional[Tensor]]],
    ):
        self.names = list(names)
        self.module = module
        self.args, self.kwargs = tuple(args), kwargs
        self.leaves, self.spec = tree_flatten((self.args, kwargs))
        positions = [argument_position(module, name) for name in names]
        self.params = [
            module.get_parameter(name) if i is None else self.args[i]
            for name, i in zip(names, positions)
        ]
        mats = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
        self.mats = {i: mat for i, mat in enumerate(mats) if mat is not None}
        self.axes = [output_batch_axis(module, i) for i in self.mats]
        self.outputs = None if outputs is None else [outputs[i] for i in self.mats]
        first = next(iter(self.mats.values()))
        self.num_columns, self.batch_size = len(first), first.shape[1 + self.axes[0]]

    def forward(self, leaves: Sequence[Any], values: Sequence[Tensor]) -> List[Tensor]:
        """Repeat the call.

        Args:
            leaves: Flattened arguments.
            values: Values of the parameters.

        Returns:
            Those outputs that have cotangents.
        """
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        args, replaced = list(args), {}
        for name, value in zip(self.names, values):
            position = argument_position(self.module, name)
            if position is None:
                replaced[name] = value
            else:
                args[position] = value
        buffers = {name: x.clone() for name, x in self.module.named_buffers()}
        with disable(), _attributes_restored(self.module):
            out = functional_call(
                self.module, {**buffers, **replaced}, tuple(args), kwargs
            )
        out = tensor_outputs(out)
        return [out[i] for i in self.mats]

    def recompute_outputs(self, random_state: Optional[RandomState]) -> None:
        """Find out what the outputs were that have been modified in place.

        Args:
            random_state: State of the random number generators before the call.
        """
        if self.outputs is None or all(x is not None for x in self.outputs):
            return
        with torch.no_grad(), random_state.replay() if random_state else nullcontext():
            again = self.forward(self.leaves, self.params)
        pairs = zip(self.outputs, again)
        self.outputs = [x if known is None else known for known, x in pairs]

    def vmapped(self) -> Optional[Dict[str, Dense]]:
        """Differentiate for one sample, and vmap over samples.

        Returns:
            The products, ``None`` if the outputs are not those of the call.
        """
        in_axes = self._input_axes()

        def one_sample(
            sample: List[Tensor], columns: List[Tensor]
        ) -> Tuple[List[Tensor], List[Tensor]]:
            leaves = list(self.leaves)
            for x, (i, axis) in zip(sample, in_axes.items()):
                leaves[i] = x.unsqueeze(axis)
            out, pull_back = vjp(lambda *p: self.forward(leaves, p), *self.params)[:2]
            # a loop over columns: nested vmaps are not right for all operations
            products = [
                pull_back([c[v].unsqueeze(a) for c, a in zip(columns, self.axes)])
                for v in range(self.num_columns)
            ]
            out = [x.squeeze(axis) for x, axis in zip(out, self.axes)]
            return [torch.stack(list(column)) for column in zip(*products)], out

        mapped = vmap(
            one_sample,
            in_dims=(list(in_axes.values()), [1 + axis for axis in self.axes]),
            out_dims=(1, 0),
        )
        with catch_warnings():
            # operations that vmap has no rule for are slow, which this rule is anyway
            filterwarnings("ignore", "There is a performance drop")
            stacked, outputs = mapped(
                [self.leaves[i] for i in in_axes], list(self.mats.values())
            )
        outputs = [out.movedim(0, axis) for out, axis in zip(outputs, self.axes)]
        return self._checked(stacked, outputs)

    def masked(self, random_state: Optional[RandomState]) -> Optional[Dict[str, Dense]]:
        """Repeat the whole batch's call; differentiate for each sample and column.

        Args:
            random_state: State of the random number generators before the call.

        Returns:
            The products, ``None`` if the outputs are not those of the call.
        """
        create_graph = torch.is_grad_enabled()
        values = self.params
        if not create_graph:
            values = [param.detach().requires_grad_() for param in values]
        with torch.enable_grad():
            if random_state is None:
                outputs = self.forward(self.leaves, values)
            else:
                with random_state.replay():
                    outputs = self.forward(self.leaves, values)

        rows = []
        for v in range(self.num_columns):
            for n in range(self.batch_size):
                masked = [
                    _only_sample(mat[v], axis, n)
                    for mat, axis in zip(self.mats.values(), self.axes)
                ]
                gradients = torch.autograd.grad(
                    outputs,
                    values,
                    masked,
                    retain_graph=True,
                    create_graph=create_graph,
                    materialize_grads=True,
                )
                rows.append([x.to_dense() if x.is_sparse else x for x in gradients])
        sizes = (self.num_columns, self.batch_size)
        stacked = [torch.stack(column).unflatten(0, sizes) for column in zip(*rows)]
        return self._checked(stacked, outputs)

    def _input_axes(self) -> Dict[int, int]:
        """Find out which arguments hold samples, and along which axis."""
        num_args = len(tree_flatten(self.args)[0])
        shared = {
            num_args + i
            for i, (name, _) in enumerate(self.kwargs.items())
            if name == "attn_mask"
        }
        axes = {}
        for i, x in enumerate(self.leaves):
            if not isinstance(x, Tensor) or isinstance(x, Parameter) or i in shared:
                continue
            axis = input_batch_axis(self.module, i)
            if x.dim() > axis and x.shape[axis] == self.batch_size:
                axes[i] = axis
        return axes

    def _checked(
        self, stacked: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Optional[Dict[str, Dense]]:
        for out, expected in zip(outputs, self.outputs or []):
            if not is_repetition(out, expected):
                return None
        return {
            name: Dense(products, param.shape)
            for name, products, param in zip(self.names, stacked, self.params)
        }


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


def _only_sample(mat: Tensor, axis: int, n: int) -> Tensor:
    """Set a column to zero except for one sample."""
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
