"""What all recurrent layers share: one recursion through time serves all parameters.

A recurrent module consists of *chains*: one per layer and direction. In every chain,
the affine maps of all gates are outer-product layers whose positions are the time steps
t, so that per-sample gradients are ``Σ_t b_t ⊗ a_t``. The vectors a are known once the
hidden states are, and the vectors b are the gradients with respect to the gates, which
backpropagation through time yields. A cell says only how these follow from each other.

Axes: t steps, v columns, n samples, d input features, h hidden features (of a
projecting LSTM: features of a projected state, or of a cell), g gates.
"""

from abc import abstractmethod
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union
from weakref import ref

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from backpack.core.derivatives.generic import input_batch_axis
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.derivatives.shape_check import check_batch_first
from backpack.core.derivatives.stored import stored_inputs
from backpack.core.per_sample.base import PerSample, Summed
from backpack.core.per_sample.outer import Outer
from backpack.utils.hooks import message
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Layer, version_of

Mats = Sequence[Optional[Tensor]]

PACKED = (
    "{module} was called with a PackedSequence, whose samples have no axis of their "
    "own. Pass a padded tensor instead and mask what the padding leads to, or call the "
    "module once for each length."
)
NOT_SUPPORTED = (
    "{derivatives}: the gradients of {module} need its forward pass repeated for an "
    "input with a batch axis and without `dropout` between layers in training mode, "
    "but dropout={dropout}, training={training}, and the input has {dim} axes instead "
    "of 3. Call `.eval()`, or put `torch.nn.Dropout` modules between single-layer ones."
)
# Products of a call's parameters, by the first cotangent they were computed from. They
# must not own that tensor, or neither would ever be freed; a graph could own it.
_PRODUCTS = WeakTensorKeyDictionary()


class Chain(NamedTuple):
    """One layer in one direction; step 0 is the first one in this direction.

    Attributes:
        x: Inputs ``[T, N, d]``.
        before: Hidden states before each step, ``[T, N, h]``.
        after: Hidden states after each step, ``[T, N, h]``.
        initial: Initial states, ``[N, h]`` each: hidden state and, for an LSTM, cell.
        weight_ih: Weight from the input to the gates, ``[g*h, d]``.
        weight_hh: Weight from the hidden state to the gates, ``[g*h, h]``.
        bias_ih: Bias of the former, ``[g*h]`` or ``None``.
        bias_hh: Bias of the latter, ``[g*h]`` or ``None``.
        weight_hr: Weight of the projection, ``[h, h]`` or ``None``.
    """

    x: Tensor
    before: Tensor
    after: Tensor
    initial: Tuple[Tensor, ...]
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Optional[Tensor]
    bias_hh: Optional[Tensor]
    weight_hr: Optional[Tensor]


# Of an affine map: cotangents at its output, [T, V, N, p], and its input, [T, N, d]
Factors = Tuple[Tensor, Tensor]


class RecurrentDerivatives(BaseParameterDerivatives):
    """Derivatives of recurrent modules with any number of layers and directions.

    Products with Jacobians with respect to the input, and forward products, are the
    generic ones and concern the first output only.

    Attributes:
        num_states: Number of states that a cell carries on: 1, or 2 with a cell state.
    """

    num_states = 1

    @abstractmethod
    def _pull_back(
        self, module: Layer, chain: Chain, d_after: List[Tensor], last: Optional[Tensor]
    ) -> Dict[str, Factors]:
        """Propagate cotangents back through one chain.

        Args:
            module: The module.
            chain: The chain.
            d_after: Cotangents at the hidden state after each step, ``[V, N, h]``.
            last: At the last cell state, ``[V, N, h]``. ``None`` if zero.

        Returns:
            Factors of each affine map, ``"ih"`` (input to gates), ``"hh"`` (hidden
            state to gates), and maybe ``"hr"`` (projection).
        """

    def supports(self, module: Layer, inputs: Sequence[Any]) -> bool:
        """Tell whether :meth:`product` covers a call.

        Args:
            module: The module.
            inputs: Positional arguments of the call.

        Returns:
            ``False`` for dropout between layers in training mode, which cannot be
            repeated, and for an input without batch axis.

        Raises:
            NotImplementedError: If the input is a packed sequence, for which no rule
                can be right.
        """
        if isinstance(inputs[0], PackedSequence):
            raise NotImplementedError(message(PACKED, module=module))
        random = module.training and module.dropout > 0 and module.num_layers > 1
        return not random and inputs[0].dim() == 3

    def product(
        self,
        name: str,
        module: Layer,
        inputs: Sequence[Any],
        cotangents: Union[Tensor, Mats],
    ) -> PerSample:
        """Describe the products of cotangents and a parameter's Jacobian.

        The products of all parameters are computed at once, see :meth:`products`.
        Unless gradients are enabled, they are at hand when the same tensors are passed
        again with another name, as long as the first cotangent that is not ``None``
        lives.

        Args:
            name: Name of the parameter, for instance ``"weight_ih_l0_reverse"``.
            module: The module.
            inputs: Its input ``[N, T, d]`` (with ``batch_first``) or ``[T, N, d]``, and
                maybe its initial state(s) ``[layers * directions, N, h]``.
            cotangents: Columns at its outputs, ``None`` where zero: ``[V, N, T, h]`` or
                ``[V, T, N, h]`` at the first one, ``[V, layers * directions, N, h]`` at
                the final state(s). A tensor stands for the first output only.

        Returns:
            The products.

        Raises:
            NotImplementedError: If the call is not supported, see :meth:`supports`.
        """
        if not self.supports(module, inputs):
            options = {"dropout": module.dropout, "training": module.training}
            who = {"derivatives": self, "module": module, "dim": inputs[0].dim()}
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
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        tensors += [*others, *module.parameters()]
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
        layers = self._chains(module, inputs)
        steps, directions = len(layers[0][0].x), len(layers[0])
        d_output, *d_states = self._cotangents(module, cotangents, steps)
        products = {}
        for layer, chains in reversed(list(enumerate(layers))):
            d_input: Any = 0.0
            for k, d_chain in enumerate(d_output.chunk(directions, dim=-1)):
                at = layer * directions + k
                d_last, d_cell = (
                    mat if mat is None else mat[:, at] for mat in d_states
                )
                d_after = list(_flip_if(k, d_chain).unbind())
                if d_last is not None:
                    d_after[-1] = d_after[-1] + d_last
                factors = self._pull_back(module, chains[k], d_after, d_cell)
                products.update(_describe(module, _suffix(layer, k), factors))
                if layer > 0:
                    d_x = factors["ih"][0] @ chains[k].weight_ih
                    d_input = d_input + _flip_if(k, d_x)
            d_output = d_input
        return products

    def _cotangents(
        self, module: Layer, mats: Mats, steps: int
    ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Bring the columns at a module's outputs into one form.

        Args:
            module: The module.
            mats: Columns at its outputs.
            steps: Number of steps, T.

        Returns:
            Columns at the output, ``[T, V, N, directions * h]``, and at the last hidden
            and cell states, ``[V, layers * directions, N, h]`` or ``None``.
        """
        dtype = module.weight_ih_l0.dtype
        mats = [None if mat is None else mat.to(dtype) for mat in mats]
        output, hidden, cell = mats + [None] * (3 - len(mats))
        if output is None:
            state = cell if hidden is None else hidden
            features = (1 + module.bidirectional) * _state_sizes(module)[0]
            output = state.new_zeros(steps, len(state), state.shape[2], features)
        else:
            axes = "v n t h" if module.batch_first else "v t n h"
            output = rearrange(output, f"{axes} -> t v n h")
        return output, hidden, cell

    def _chains(self, module: Layer, inputs: Sequence[Any]) -> List[List[Chain]]:
        """Repeat the forward pass, layer by layer.

        Args:
            module: The module.
            inputs: Its inputs.

        Returns:
            The chains of each layer, forward and, if bidirectional, backward.
        """
        x, *given = tree_leaves(inputs)
        dtype, directions = module.weight_ih_l0.dtype, 1 + module.bidirectional
        x = (x.transpose(0, 1) if module.batch_first else x).to(dtype)
        states = [state.to(dtype) for state in given if state is not None] or [
            x.new_zeros(module.num_layers * directions, x.shape[1], size)
            for size in _state_sizes(module)[: self.num_states]
        ]
        layers = []
        for layer in range(module.num_layers):
            initial = [s.split(directions)[layer] for s in states]
            output = self._run(module, layer, x, initial)
            chains = []
            for k, after in enumerate(output.chunk(directions, dim=-1)):
                states_k, suffix = [s[k] for s in initial], _suffix(layer, k)
                chains.append(_chain(module, suffix, x, after, states_k))
            layers.append(chains)
            x = output
        return layers

    def _run(
        self, module: Layer, layer: int, x: Tensor, initial: List[Tensor]
    ) -> Tensor:
        """Compute the hidden states of a layer.

        Args:
            module: The module.
            layer: Which of its layers.
            x: The layer's input, ``[T, N, d]``.
            initial: Initial states, ``[directions, N, h]`` each.

        Returns:
            Hidden states ``[T, N, directions * h]``.
        """
        directions = 1 + module.bidirectional
        weights = module.all_weights[layer * directions :][:directions]
        # cuDNN wants the weights of all layers, and cannot be differentiated twice;
        # torch 2.9 warns of its own settings where they are touched
        no_cudnn = torch.backends.cudnn.flags(enabled=False)
        run = getattr(torch, module.mode.lower())  # like torch.gru, torch.rnn_tanh
        states = initial if self.num_states > 1 else initial[0]
        parameters = [weight for chain in weights for weight in chain]
        directed = {"bidirectional": module.bidirectional, "batch_first": False}
        plain = {"num_layers": 1, "dropout": 0.0, "train": False}
        with no_cudnn if x.is_cuda else nullcontext():
            return run(x, states, parameters, module.bias, **plain, **directed)[0]

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
        restricted = copy(module)
        for i, stored in enumerate(stored_inputs(module)):
            axis = input_batch_axis(module, i)
            select = partial(subsample, dim=axis, subsampling=subsampling)
            setattr(restricted, f"input{i}", tree_map_only(Tensor, select, stored))
        restricted.output = subsample(module.output, subsampling=subsampling)
        return restricted


def pull_through_time(
    cotangents: List[Tensor],
    slopes: Tensor,
    weight_hh: Tensor,
    direct: Optional[Tensor] = None,
) -> Tensor:
    """Run the reverse recursion of a cell whose only state is the hidden one.

    Args:
        cotangents: At the hidden state after each step, ``[V, N, h]``.
        slopes: Derivatives of the hidden state after a step with respect to the gates'
            affine maps of the state before it, ``[T, N, g, h]``.
        weight_hh: Weight of these maps, ``[g*h, h]``.
        direct: Derivatives with respect to the hidden state before the step that do not
            pass the gates, ``[T, N, h]``. Default: ``None`` (zero).

    Returns:
        Cotangents with what the later steps contribute, ``[T, V, N, h]``.
    """
    steps = slopes.unbind()
    kept = None if direct is None else direct.unbind()
    totals = [cotangents[-1]]
    for t in reversed(range(1, len(cotangents))):
        total = cotangents[t - 1] + spread(totals[-1], steps[t]) @ weight_hh
        if kept is not None:
            total = torch.addcmul(total, kept[t], totals[-1])
        totals.append(total)
    return torch.stack(totals[::-1])


def spread(cotangents: Tensor, slopes: Tensor) -> Tensor:
    """Multiply cotangents at a hidden state with its derivatives w.r.t. the gates.

    Args:
        cotangents: Of shape ``[*, h]``.
        slopes: Of shape ``[*, g, h]``.

    Returns:
        Cotangents at the gates, ``[*, g*h]``.
    """
    return (cotangents.unsqueeze(-2) * slopes).flatten(-2)


def _state_sizes(module: Layer) -> Tuple[int, int]:
    """Return the numbers of features of hidden and cell states.

    Args:
        module: The module.

    Returns:
        The numbers; they differ for an LSTM with a projection.
    """
    return module.proj_size or module.hidden_size, module.hidden_size


def _suffix(layer: int, direction: int) -> str:
    """Return how names of a chain's parameters end.

    Args:
        layer: Number of the layer.
        direction: 0 for forward, 1 for backward.

    Returns:
        The suffix, for instance ``"_l0_reverse"``.
    """
    return f"_l{layer}" + "_reverse" * direction


def _flip_if(reverse: int, sequence: Tensor) -> Tensor:
    """Bring a sequence into the order of a direction's steps, or back.

    Args:
        reverse: 0 for forward, 1 for backward.
        sequence: Sequence of shape ``[T, *]``.

    Returns:
        Sequence of the same shape.
    """
    return sequence.flip(0) if reverse else sequence


def _chain(
    module: Layer, suffix: str, x: Tensor, after: Tensor, initial: List[Tensor]
) -> Chain:
    """Collect what belongs to a chain.

    Args:
        module: The module.
        suffix: Ending of the parameters' names.
        x: Inputs of the layer, ``[T, N, d]``.
        after: Its hidden states, ``[T, N, h]``.
        initial: Its initial states, ``[N, h]`` each.

    Returns:
        The chain, with sequences in the order of its steps.
    """
    reverse = suffix.endswith("_reverse")
    x, after = _flip_if(reverse, x), _flip_if(reverse, after)
    before = torch.cat([initial[0].unsqueeze(0), after[:-1]])
    kinds = Chain._fields[4:]
    weights: List[Any] = [getattr(module, kind + suffix, None) for kind in kinds]
    return Chain(x, before, after, tuple(initial), *weights)


def _describe(
    module: Layer, suffix: str, factors: Dict[str, Factors]
) -> Dict[str, PerSample]:
    """Describe the products of a chain's parameters.

    Args:
        module: The module.
        suffix: Ending of the parameters' names.
        factors: Factors of each affine map.

    Returns:
        The products by the parameters' names.
    """
    products: Dict[str, PerSample] = {}
    for kind, (b, a) in factors.items():
        weight, bias = f"weight_{kind}{suffix}", f"bias_{kind}{suffix}"
        inputs = rearrange(a, "t n d -> n 1 t d")
        products[weight] = Outer(
            lambda inputs=inputs: inputs,  # type: ignore[misc]
            rearrange(b, "t v n p -> v n 1 t p"),
            getattr(module, weight).shape,
        )
        if hasattr(module, bias):
            cotangents = rearrange(b, "t v n p -> v n t p")
            products[bias] = Summed(cotangents, getattr(module, bias).shape)
    return products
