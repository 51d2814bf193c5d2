"""What all recurrent layers share: one recursion through time serves all parameters.

In each layer and direction of a recurrent module, the affine maps of all gates are
outer-product layers whose positions are the time steps t, so that per-sample gradients
are ``Σ_t b_t ⊗ a_t``. The vectors a are inputs and hidden states. The vectors b are the
gradients with respect to the gates, which autograd yields once the steps are written
out. A cell says only what happens in a step.

Axes: t steps, v columns, n samples, d input features, h hidden features (of a
projecting LSTM: features of a projected state, or of a cell), g gates, p = g*h.
"""

from abc import abstractmethod
from collections import defaultdict
from functools import partial
from itertools import zip_longest
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from backpack.core.derivatives.generic import input_batch_axis
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.derivatives.shape_check import check_batch_first
from backpack.core.derivatives.stored import shallow_copy, stored_inputs
from backpack.core.layout import Layout
from backpack.core.per_sample.apart import Apart
from backpack.core.per_sample.base import PerSample, Summed
from backpack.core.per_sample.outer import Outer
from backpack.utils.hooks import message
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Layer, tensors_in, version_of

Mats = Sequence[Optional[Tensor]]

NOT_SUPPORTED = (
    "{derivatives}: the gradients of {module} need its forward pass repeated for an "
    "input with a batch axis and without `dropout` between layers in training mode, "
    "but dropout={dropout}, training={training}, and the input has {dim} axes instead "
    "of 3. Call `.eval()`, or put `torch.nn.Dropout` modules between single-layer ones."
)
# Products of a call's parameters, by the first cotangent they were computed from. They
# must not own that tensor, or neither would ever be freed; a graph could own it.
_PRODUCTS = WeakTensorKeyDictionary()


# The affine maps of a call, by kind and place ("hh_l0"): input and output at each step
Maps = Dict[str, List[Tuple[Tensor, Tensor]]]
# Names of initial states, among those of parameters
STATES = ("initial_hidden", "initial_cell")
# Which sequences go on in each step, forward in time and backward
Live = Tuple[Optional[Tensor], Optional[Tensor]]


class RecurrentDerivatives(BaseParameterDerivatives):
    """Derivatives of recurrent modules with any number of layers and directions.

    Products with Jacobians with respect to the input, and forward products, are the
    generic ones and concern the first output only.

    Attributes:
        num_states: Number of states that a cell carries on: 1, or 2 with a cell state.
    """

    num_states = 1

    @abstractmethod
    def advance(
        self, module: Layer, ih: Tensor, hh: Tensor, *states: Tensor
    ) -> Tuple[Tensor, ...]:
        """Go on by one step.

        Args:
            module: The module.
            ih: What the input contributes to the gates, ``[N, g*h]``.
            hh: What the hidden state contributes to them, ``[N, g*h]``.
            states: States before the step, ``[N, h]`` each: hidden state, and cell.

        Returns:
            States after the step; a hidden state is not yet projected.
        """

    def supports(self, module: Layer, inputs: Sequence[Any]) -> bool:
        """Tell whether :meth:`product` covers a call.

        Args:
            module: The module.
            inputs: Positional arguments of the call.

        Returns:
            ``False`` for dropout between layers in training mode, which cannot be
            repeated, and for an input without batch axis.
        """
        random = module.training and module.dropout > 0 and module.num_layers > 1
        x = inputs[0]
        return not random and (isinstance(x, PackedSequence) or x.dim() == 3)

    def product(
        self,
        name: str,
        module: Layer,
        inputs: Sequence[Any],
        cotangents: Union[Tensor, Mats],
    ) -> PerSample:
        """Describe the products of cotangents and a parameter's Jacobian.

        Or an initial state's, of which each sequence has entries of its own. The
        products of all parameters are computed at once, see :meth:`products`.
        Unless gradients are enabled, they are at hand when the same tensors are passed
        again with another name, as long as the first cotangent that is not ``None``
        lives.

        Args:
            name: Name of the parameter, for instance ``"weight_ih_l0_reverse"``, or one
                of ``STATES``.
            module: The module.
            inputs: Its input ``[N, T, d]`` (with ``batch_first``), ``[T, N, d]``, or
                packed, and maybe its initial state(s) ``[layers * directions, N, h]``.
            cotangents: Columns at its outputs, ``None`` where zero: ``[V, N, T, h]`` or
                ``[V, T, N, h]`` at the first one (``[V, rows, h]`` if it is packed),
                ``[V, layers * directions, N, h]`` at the final state(s). A tensor
                stands for the first output only.

        Returns:
            The products.

        Raises:
            NotImplementedError: If the call is not supported, see :meth:`supports`.
        """
        if not self.supports(module, inputs):
            options = {"dropout": module.dropout, "training": module.training}
            dim = tree_leaves(inputs)[0].dim()
            who = {"derivatives": self, "module": module, "dim": dim}
            raise NotImplementedError(message(NOT_SUPPORTED, **who, **options))
        mats = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
        return self._shared_products(module, inputs, mats)[name]

    def _shared_products(
        self, module: Layer, inputs: Sequence[Any], mats: Mats
    ) -> Dict[str, PerSample]:
        """Look up the products of all parameters, or compute them.

        Args:
            module: The module.
            inputs: Its inputs.
            mats: Columns at its outputs.

        Returns:
            The products by the parameters' names.
        """
        if torch.is_grad_enabled():
            return self.products(module, inputs, mats)
        first, *others = [mat for mat in mats if mat is not None]
        tensors = [*tensors_in(inputs), *others, *module.parameters()]
        stamp = (
            ref(module),
            [mat is None for mat in mats],
            [id(x) for x in tensors],
            [version_of(x) for x in [first, *tensors]],
        )
        found, products, _ = _PRODUCTS.get(first, (None, {}, None))
        if found != stamp:
            products = self.products(module, inputs, mats)
            # the tensors are kept, so that no others are given their ids
            _PRODUCTS[first] = (stamp, products, tensors)
        return products

    def products(
        self, module: Layer, inputs: Sequence[Any], cotangents: Mats
    ) -> Dict[str, PerSample]:
        """Describe the products of all parameters, from one recursion through time.

        Args:
            module: The module, in a call that it supports, see :meth:`supports`.
            inputs: Its inputs, as for :meth:`product`.
            cotangents: Columns at its outputs, as for :meth:`product`.

        Returns:
            The products by the parameters' names.
        """
        maps: Maps = defaultdict(list)
        x, rows = inputs[0], None
        live: Live = (None, None)
        if isinstance(x, PackedSequence):
            sizes, rows = x.batch_sizes, rows_of(x)
            go_on = x.data.new_zeros(len(sizes), int(sizes[0]), 1, dtype=torch.bool)
            go_on[rows] = True
            live = go_on, go_on.flip(0)
        states = [x for x in tree_leaves(inputs[1:]) if x is not None]
        learned = {name: x for name, x in zip(STATES, states) if x.requires_grad}
        with torch.enable_grad():
            outputs = self._unroll(module, x, states, maps, rows, live)
        v = next(len(mat) for mat in cotangents if mat is not None)
        columns = [
            y.new_zeros(v, *y.shape) if mat is None else mat.to(y.dtype)
            for y, mat in zip_longest(outputs, cotangents)
        ]
        gates = [gate for steps in maps.values() for _, gate in steps]
        gates += learned.values()
        options = {"create_graph": torch.is_grad_enabled(), "is_grads_batched": v != 1}
        if v == 1:  # without the price of a batch
            columns = [mat[0] for mat in columns]
        pulled = iter(grad(outputs, gates, columns, **options))
        products: Dict[str, PerSample] = {}
        for place, steps in maps.items():
            a = torch.stack([x for x, _ in steps], dim=1)
            on = live[place.endswith("reverse")]
            if on is not None:  # those of sequences that have ended are no inputs
                a = a * on.transpose(0, 1)
            b = torch.stack([next(pulled) for _ in steps], dim=-2)
            b = b.view(v, *b.shape[-3:])
            products.update(_describe(module, place, a, b))
        for name, state in learned.items():
            own = next(pulled).view(v, *state.shape)
            products[name] = Apart(own, Layout(1, 1), state.shape[1])
        return products

    def _unroll(
        self,
        module: Layer,
        x: Any,
        states: List[Tensor],
        maps: Maps,
        rows: Optional[Tuple[Tensor, Tensor]],
        live: Live,
    ) -> List[Tensor]:
        """Repeat the forward pass, step by step.

        Args:
            module: The module.
            x: Its input.
            states: Its initial states, none for zeros.
            maps: Where to note affine maps.
            rows: Step and sequence of each row of a packed input, else ``None``.
            live: Which sequences go on in each step, ``[T, N, 1]``, in each direction;
                ``None`` for all.

        Returns:
            The module's outputs.
        """
        dtype, directions = module.weight_ih_l0.dtype, 1 + module.bidirectional
        if live[0] is not None:
            padded = x.data.new_zeros(*live[0].shape[:2], x.data.shape[1])
            x = padded.index_put(rows, x.data)
        elif module.batch_first:
            x = x.transpose(0, 1)
        x = x.to(dtype)
        states = [state.to(dtype) for state in states]
        if not states:
            sizes = module.proj_size or module.hidden_size, module.hidden_size
            number = module.num_layers * directions
            zeros = [x.new_zeros(number, x.shape[1], size) for size in sizes]
            states = zeros[: self.num_states]
        last: List[Sequence[Tensor]] = []
        for layer in range(module.num_layers):
            sequences = []
            for direction in range(directions):
                place = f"_l{layer}" + "_reverse" * direction
                initial = [state[len(last)] for state in states]
                steps, on = x.flip(0) if direction else x, live[direction]
                hidden, final = self._run(module, place, steps, on, initial, maps)
                sequences.append(hidden.flip(0) if direction else hidden)
                last.append(final)
            x = torch.cat(sequences, dim=-1)
        if rows is not None:
            x = x[rows]
        elif module.batch_first:
            x = x.transpose(0, 1)
        return [x, *map(torch.stack, zip(*last))]

    def _run(
        self,
        module: Layer,
        place: str,
        x: Tensor,
        live: Optional[Tensor],
        states: List[Tensor],
        maps: Maps,
    ) -> Tuple[Tensor, List[Tensor]]:
        """Go through time in one layer and direction.

        Args:
            module: The module.
            place: How names of its parameters end, for instance ``"_l0_reverse"``.
            x: Inputs ``[T, N, d]``, in the order of the steps.
            live: Which sequences go on in each step; others keep their states.
            states: Initial states, ``[N, h]`` each.
            maps: Where to note affine maps.

        Returns:
            Hidden states ``[T, N, h]``, and the final states.
        """

        def affine(kind: str, x: Tensor) -> Tensor:
            weight = getattr(module, f"weight_{kind}{place}")
            y = linear(x, weight, getattr(module, f"bias_{kind}{place}", None))
            y = y if y.requires_grad else y.requires_grad_()
            maps[kind + place].append((x, y))
            return y

        hidden = []
        for t, x_t in enumerate(x):
            gates = affine("ih", x_t), affine("hh", states[0])
            new = list(self.advance(module, *gates, *states))
            if module.proj_size:
                new[0] = affine("hr", new[0])
            if live is not None:
                new = [y.where(live[t], old) for y, old in zip(new, states)]
            states = new
            hidden.append(states[0])
        return torch.stack(hidden), states

    def _restrict(self, module: Layer, subsampling: Subsampling = None) -> Layer:
        """Select samples; the batch is not the first axis of states.

        Args:
            module: Module with stored inputs and output.
            subsampling: Selected samples. ``None`` selects all.

        Returns:
            The same module for ``None``, else a shallow copy with the selected samples.

        Raises:
            NotImplementedError: If the module does not have ``batch_first``.
        """
        check_batch_first(module, subsampling)
        if subsampling is None:
            return module
        selected = {"output": subsample(module.output, subsampling=subsampling)}
        for i, stored in enumerate(stored_inputs(module)):
            axis = input_batch_axis(module, i)
            select = partial(subsample, dim=axis, subsampling=subsampling)
            selected[f"input{i}"] = tree_map_only(Tensor, select, stored)
        return shallow_copy(module, **selected)


class RNNDerivatives(RecurrentDerivatives):
    """Derivatives of :class:`torch.nn.RNN`, with tanh or ReLU."""

    def advance(
        self, module: Layer, ih: Tensor, hh: Tensor, *states: Tensor
    ) -> Tuple[Tensor, ...]:  # noqa: D102
        return (getattr(ih + hh, module.nonlinearity)(),)


class GRUDerivatives(RecurrentDerivatives):
    """Derivatives of :class:`torch.nn.GRU`, whose gates are r, z, n."""

    def advance(
        self, module: Layer, ih: Tensor, hh: Tensor, *states: Tensor
    ) -> Tuple[Tensor, ...]:  # noqa: D102
        (i_r, i_z, i_n), (h_r, h_z, h_n) = ih.chunk(3, -1), hh.chunk(3, -1)
        r, z = (i_r + h_r).sigmoid(), (i_z + h_z).sigmoid()
        n = (i_n + r * h_n).tanh()
        return ((1 - z) * n + z * states[0],)


class LSTMDerivatives(RecurrentDerivatives):
    """Derivatives of :class:`torch.nn.LSTM`, whose gates are i, f, g, o."""

    num_states = 2

    def advance(
        self, module: Layer, ih: Tensor, hh: Tensor, *states: Tensor
    ) -> Tuple[Tensor, ...]:  # noqa: D102
        i, f, g, o = (ih + hh).chunk(4, -1)
        cell = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell


def rows_of(packed: PackedSequence) -> Tuple[Tensor, Tensor]:
    """Tell where the rows of a packed sequence come from: in each step, the longest.

    Args:
        packed: The packed sequence.

    Returns:
        Step and sequence of each row.
    """
    device, sizes = packed.data.device, packed.batch_sizes
    steps = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)
    numbers = torch.cat([torch.arange(size, device=device) for size in sizes.tolist()])
    if packed.sorted_indices is not None:
        numbers = packed.sorted_indices[numbers]
    return steps, numbers


def _describe(module: Layer, place: str, a: Tensor, b: Tensor) -> Dict[str, PerSample]:
    """Describe the products of an affine map's parameters.

    Args:
        module: The module.
        place: How their names end, for instance ``"hh_l0"``.
        a: Its inputs ``[N, T, d]``.
        b: Cotangents at its outputs, ``[V, N, T, p]``.

    Returns:
        The products by the parameters' names.
    """
    weight, bias = f"weight_{place}", f"bias_{place}"
    shape = getattr(module, weight).shape
    products: Dict[str, PerSample] = {
        weight: Outer(lambda: a.unsqueeze(1), b.unsqueeze(2), shape)
    }
    if hasattr(module, bias):
        products[bias] = Summed(b, getattr(module, bias).shape)
    return products
