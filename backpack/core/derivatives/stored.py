"""A module's last call, as it is stored on the module, and copies to repeat it with."""

from collections import OrderedDict, deque
from contextlib import nullcontext
from copy import copy
from math import nan
from operator import attrgetter
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, enable_grad, float64
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call
from torch.nn import Module, Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from backpack.converter.function import FunctionModule
from backpack.hessianfree.lop import leads_to, nodes_behind
from backpack.utils.disable import disable
from backpack.utils.hooks import message, no_op
from backpack.utils.state import ask, is_traced, may_look, state
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Layer, drawn_elsewhere, generator_of, is_inexact

NO_FLOAT_INPUT = (
    "{module} has an input of type {dtype} and no derivative with respect to it. Only "
    "products with its parameters' Jacobians (param_mjp) exist."
)
NOT_REPEATED = (
    "{module} is differentiated by repeating its forward pass, but the repetition gave "
    "another output or derivative, drew random numbers or depends on a number that has "
    "changed, which a factor of zero may hide: it draws some, keeps a state, depends "
    "on the number of samples, or something was modified after the call (its "
    "attributes, its parameters, or its output by a layer with inplace=True). Write it "
    "without these, or register a module extension for it."
)
HOOKED = (
    "{module} takes its parameter '{name}' by way of a bound method, a closure or the "
    "like, and not by its name, and the parameter has hooks, which would see what this "
    "quantity differentiates. Take it by its name, or remove the hooks."
)
NAMED = "_backpack_named"
"""Attribute of modules, for the names of the last inputs that were given by name."""
SLOPE = "_backpack_slope"
"""Attribute of losses in their turn, which returns the gradient at the prediction."""
STORED = "_backpack_stored"
"""Attribute of modules that says what else is stored for a turn."""
AUTOCAST = "_backpack_autocast"
"""Attribute of modules called under autocast, with the type it ran operations in."""
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_INTERNAL = frozenset(vars(Module()))
OVERWRITTEN = "_backpack_overwritten"
"""Marks copies of modules whose output was modified in place after the call."""
OUTPUT_TYPE = "_backpack_output_type"
"""Attribute of copies of modules, with their output's type before conversion."""


def stored_inputs(module: Layer) -> Tuple[Any, ...]:
    """Collect the inputs of a module's last forward pass.

    Args:
        module: Module with attributes ``input0``, ``input1``, ...

    Returns:
        The inputs.
    """
    inputs: List[Any] = []
    own = {**vars(module), **module._parameters}  # `__getattr__` might answer any name
    while f"input{len(inputs)}" in own:
        inputs.append(own[f"input{len(inputs)}"])
    return tuple(inputs)


def by_name(module: Layer, inputs: Sequence[Any]) -> Tuple[Tuple, Dict[str, Any]]:
    """Tell apart which inputs of a call are passed by position, and which by name.

    Args:
        module: The module, with the inputs of its call.
        inputs: These inputs, or others in their place.

    Returns:
        Positional and keyword arguments.
    """
    names = vars(module).get(NAMED, ())
    size = len(inputs) - len(names)
    return tuple(inputs[:size]), dict(zip(names, inputs[size:]))


def find_parameter(module: Layer, name: str) -> Tensor:
    """Look up a parameter by its name in a call.

    The converter turns operations into modules, whose arguments may be parameters.

    Args:
        module: The module, with the arguments of its call.
        name: The parameter's (dotted) name; ``"input<i>"`` if it is the i-th positional
            argument.

    Returns:
        The parameter.
    """
    return attrgetter(name)(module)  # which may be a tensor of another class


def shallow_copy(module: Layer, **attributes: Any) -> Module:
    """Copy a module without copying anything it holds.

    Args:
        module: The module.
        attributes: What the copy holds instead, by name.

    Returns:
        Module of the same class that shares all other attributes.
    """
    copy = object.__new__(type(module))
    copy.__dict__.update({**module.__dict__, **attributes})
    return copy


def scratch_copy(module: Layer, **attributes: Any) -> Module:
    """Copy a module such that evaluating the copy leaves the module alone.

    Args:
        module: The module.
        attributes: What the copy holds instead, by name.

    Returns:
        Module that shares the present parameters, but neither buffers (running
        statistics) and containers (logs), nor what a hook stores on it or its children.
    """
    buffers, children = module._buffers.items(), module._modules.items()
    displaced = getattr(vars(module).get(STORED), "displaced", {})
    return shallow_copy(
        module,
        **{**copies_of_state(module), **displaced, **attributes},
        _parameters=dict(module._parameters),
        _buffers={name: b if b is None else b.clone() for name, b in buffers},
        _modules={name: m if m is None else scratch_copy(m) for name, m in children},
    )


def copies_of_state(module: Module) -> Dict[str, Any]:
    """Copy what a forward pass may change in a module, besides numbers and buffers.

    Args:
        module: The module.

    Returns:
        Copies of attributes that are containers, or tensors without a gradient.
    """
    own = [(name, x) for name, x in vars(module).items() if name not in _INTERNAL]
    kept = {name: x.clone() for name, x in own if _is_state(name, x)}
    return {**kept, **{name: copy(x) for name, x in own if type(x) in _CONTAINERS}}


def _is_state(name: str, x: Any) -> bool:
    of_call = name == "output" or name.startswith("input")
    return isinstance(x, Tensor) and not (x.requires_grad or of_call)


def subsampled(module: Layer, subsampling: Subsampling = None) -> Module:
    """Restrict a module's stored inputs and output to some samples.

    Args:
        module: Module with stored inputs and output. It is not changed.
        subsampling: Selected samples. ``None`` selects all.

    Returns:
        The same module for ``None``. Else a shallow copy, which shares everything with
        the module except for its inputs and output.
    """
    if subsampling is None:
        return module
    num_data = getattr(module, "num_data", len(stored_inputs(module)))
    names = [f"input{idx}" for idx in range(num_data)] + ["output"]
    stored = {name: getattr(module, name) for name in names}
    selected = {
        name: subsample(value, subsampling=subsampling)
        for name, value in stored.items()
        if isinstance(value, Tensor)
        # other arguments of an operation hold no samples
        and not isinstance(value, Parameter)
        and value.shape[:1] == module.output.shape[:1]
        and value.dim() > 0
    }
    return shallow_copy(module, **selected)


def as_leaf(x: Tensor) -> Tuple[Tensor, bool]:
    """Prepare a tensor for being differentiated in.

    Args:
        x: The tensor.

    Returns:
        The tensor itself, if what is computed from it shall have a graph that leads to
        it, else a leaf with the same values; and whether there shall be a graph.
    """
    create_graph = torch.is_grad_enabled() and x.requires_grad
    return (x if create_graph else x.detach().requires_grad_()), create_graph


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of a module's output, which may be any structure.

    Args:
        output: What the module returned.

    Returns:
        Its first tensor of real or complex numbers.
    """
    return next(filter(is_inexact, tree_leaves(output)))


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


def checked(module: Layer, output: Any) -> Tensor:
    """Check that repeating a module's forward pass gave its stored output.

    Args:
        module: Module with stored output.
        output: What the repetition returned.

    Returns:
        The first tensor of the repetition's output.

    Raises:
        RuntimeError: If it is not the stored one.
    """
    output = first_tensor(output)
    if OVERWRITTEN in vars(module):
        return output
    precision = vars(module).get(OUTPUT_TYPE, module.output.dtype)
    found, before = output.detach(), module.output.to(precision)
    key = "repeats", type(module), repr(module), before.shape
    if not ask(found, key, lambda: is_repetition(found, before)):
        raise RuntimeError(message(NOT_REPEATED, module=module))
    return output


def check_slope(module: Layer, found: Tensor, own: Optional[Tensor] = None) -> None:
    """Check that a repetition has the derivative that the forward pass has.

    Its output may be the same by chance, as where all classes are equally likely.

    Args:
        module: The module that was repeated.
        found: Derivative of the repetition, contracted with a vector.
        own: That of the forward pass. Default: for a loss, its gradient at the
            prediction, if a backward pass knows it.

    Raises:
        RuntimeError: If it has not, up to rounding errors and single kinks.
    """
    if not may_look(found):
        return
    own = vars(module).get(SLOPE, no_op)() if own is None else own
    if own is None:
        return
    eps = max(torch.finfo(x.dtype).eps for x in (found, own))
    x, y = (z.detach().to(found.dtype) for z in (found, own))
    least = 10 * eps * x.numel() ** 0.5
    apart, size = (x - y).norm(), torch.maximum(x.norm(), y.norm())
    if bool(apart > 0.05 * size + least):  # nor where one is no number
        raise RuntimeError(message(NOT_REPEATED, module=module))


_MOST_REPETITIONS = 4  # while random numbers seem to be drawn


class _Repeating(TorchFunctionMode):
    """Notes whether operations draw from a generator that they are given.

    Those of which PyTorch's second derivative is wrong are spelled in another way.
    """

    drew = False

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        self.drew = self.drew or any(
            isinstance(x, Generator) for x in (*args, *kwargs.values())
        )
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        if func in _NORMALIZATIONS:
            args, kwargs = _with_weight(_NORMALIZATIONS[func], args, kwargs)
        return func(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


# The position of the weight, which the bias follows. Without a weight, PyTorch's second
# derivative leaves the bias out.
_NORMALIZATIONS: Dict[Any, int] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm, torch.native_layer_norm), 2),
    **dict.fromkeys((F.batch_norm, F.instance_norm), 3),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), 1),
    torch.native_batch_norm: 1,
}


def _with_weight(
    position: int, args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Give a normalization with a bias alone a weight of ones."""
    weight, bias = (*args[position : position + 2], None, None)[:2]
    weight, bias = kwargs.get("weight", weight), kwargs.get("bias", bias)
    if weight is not None or bias is None:
        return args, kwargs
    weight = torch.ones_like(bias)
    if len(args) > position:
        return (*args[:position], weight, *args[position + 1 :]), kwargs
    return args, {**kwargs, "weight": weight}


# other ways to compute attention have one derivative only
@sdpa_kernel(SDPBackend.MATH)
def repeat(
    module: Layer,
    inputs: Sequence[Any],
    scratch: Optional[Module] = None,
    own: Optional[Dict[str, Tensor]] = None,
    is_checked: bool = True,
) -> Tensor:
    """Repeat a module's forward pass.

    Its output alone does not say whether it is the same: where random numbers are
    multiplied by zero, or by a number that grows with each call, derivatives with
    respect to that zero are others.

    Args:
        module: Module with stored output.
        inputs: Inputs of the call.
        scratch: Copy of the module to evaluate. Default: a new one.
        own: Parameters for the copy, by name. Default: the module's.
        is_checked: Whether it must be the same. Default: ``True``.

    Returns:
        The first tensor of the repetition's output.

    Raises:
        RuntimeError: If it is not the stored one, random numbers were drawn, or the
            module was changed.
    """
    args, kwargs = by_name(module, inputs)
    scratch = scratch_copy(module) if scratch is None else scratch
    precision = vars(module).get(AUTOCAST) if is_checked else None

    def run() -> Any:
        """Run the forward pass, of a type of operations as it was."""
        kinds: Any = nullcontext()
        if precision is not None:
            kinds = torch.autocast(module.output.device.type, precision)
        with kinds:
            if not own:
                return scratch.forward(*args, **kwargs)
            for path, _, name in (key.rpartition(".") for key in own):
                if is_parametrized(scratch.get_submodule(path), name):  # since the call
                    raise RuntimeError(message(NOT_REPEATED, module=module))
            # hooks may compute attributes, but the inputs are what they have made
            forward = scratch.forward
            vars(scratch)["forward"] = lambda *_, **__: forward(*args, **kwargs)
            try:
                return functional_call(scratch, own, args, kwargs)
            finally:
                vars(scratch)["forward"] = forward

    if is_traced() or not is_checked:
        unnoticed: Any = nullcontext() if is_traced() else drawn_elsewhere()
        with state().default_device(), _Repeating(), unnoticed:
            output = run()
        return checked(module, output) if is_checked else first_tensor(output)
    generator = generator_of(module.output.device)
    before, random = _numbers(scratch), generator.get_state()
    own_before = _numbers(module)
    for _ in range(_MOST_REPETITIONS):
        last = generator.get_state()
        with state().default_device(), _Repeating() as repeating:
            with drawn_elsewhere() as elsewhere:
                output = run()
        drew = bool(elsewhere) or not torch.equal(last, generator.get_state())
        if not drew:  # or another thread draws now and then
            break
    else:
        generator.set_state(random)
    drew |= _restored(module, own_before)
    if repeating.drew or drew or _is_stateful(scratch, before, args, kwargs):
        raise RuntimeError(message(NOT_REPEATED, module=module))
    return checked(module, output)


def _numbers(module: Module) -> Dict[Tuple[Module, str], Any]:
    """Collect the numbers that a module keeps, other than layers of PyTorch.

    Args:
        module: The module.

    Returns:
        Numbers, and copies of buffers, by their owner and name.
    """
    found: Dict[Tuple[Module, str], Any] = {}
    for part in module.modules():
        if not type(part).__module__.startswith("torch.nn."):
            for name, x in vars(part).items():
                if isinstance(x, (int, float)):
                    found[part, name] = x
            for name, x in part._buffers.items():
                if x is not None:
                    found[part, name] = x.detach().clone()
    return found


def _restored(module: Module, before: Dict[Tuple[Module, str], Any]) -> bool:
    """Give numbers of a module back that were changed by way of its bound methods.

    Args:
        module: The module, after a forward pass of a copy.
        before: What the numbers were before.

    Returns:
        Whether there were any.
    """
    after = _numbers(module)
    changed = [key for key, x in before.items() if not _is_same(x, after.get(key))]
    for part, name in changed:
        values = part._buffers if name in part._buffers else vars(part)
        values[name] = before[part, name]
    return bool(changed)


def _is_stateful(
    scratch: Module, before: Dict[Tuple[Module, str], Any], args: Any, kwargs: Any
) -> bool:
    """Tell whether a forward pass may depend on what it has changed.

    Args:
        scratch: Copy of a module, after a forward pass.
        before: What the numbers were before.
        args: Positional arguments of the forward pass.
        kwargs: Keyword arguments.

    Returns:
        Whether the output depends on a number, or a buffer, that has changed: NaN in
        its place shows it through factors of zero.
    """
    after = _numbers(scratch)
    changed = [key for key, x in after.items() if not _is_same(before.get(key), x)]
    if not changed:
        return False
    for part, name in changed:
        if name in part._buffers:
            x = torch.full_like(after[part, name], nan, dtype=float64)
            part._buffers[name] = x
        else:
            vars(part)[name] = nan
    try:
        with torch.no_grad():
            return bool(first_tensor(scratch.forward(*args, **kwargs)).isnan().any())
    except Exception:  # NaN is no index
        return True


def _is_same(x: Any, y: Any) -> bool:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and x == y
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return is_repetition(y, x) if x.is_floating_point() else torch.equal(x, y)


def evaluate(
    module: Layer, positions: Sequence[int] = (0,)
) -> Tuple[List[Tensor], Tensor]:
    """Compute a module's output anew at its stored inputs, with a graph of its own.

    Args:
        module: Module with stored inputs.
        positions: Which of them the graph shall lead to. Default: the first.

    Returns:
        These inputs ``[N, *in]``, and the output ``[N, *out]``.

    Raises:
        ValueError: If an input is not of floating point type.
    """
    inputs = list(stored_inputs(module))
    for i in positions:
        if not inputs[i].is_floating_point():
            text = message(NO_FLOAT_INPUT, module=module, dtype=inputs[i].dtype)
            raise ValueError(text)
    xs = [inputs[i].detach().requires_grad_() for i in positions]
    with enable_grad(), disable():
        for i, x in zip(positions, xs):
            inputs[i] = x.clone()  # a module may work in-place, forbidden on leaves
        return xs, repeat(module, inputs)


def evaluate_parameter(
    module: Layer, name: str, inputs: Optional[Sequence[Any]] = None
) -> Tuple[Tensor, Tensor]:
    """Compute a module's output anew, with a graph that leads to a parameter.

    Args:
        module: Module with stored input and output.
        name: Name of the parameter, see :func:`find_parameter`.
        inputs: Inputs of the call. Default: ``None``, for those that are stored.

    Returns:
        A copy of the parameter that requires grad, and the output.
    """
    given = find_parameter(module, name)
    param = given.detach().requires_grad_()
    if type(given) is Parameter:  # which a module may ask for
        param = Parameter(param)
    inputs, own = list(stored_inputs(module) if inputs is None else inputs), {}
    if isinstance(module, FunctionModule):
        inputs[int(name[len("input") :])] = param
    else:
        own[name] = param
    with enable_grad(), disable():
        y = repeat(module, inputs, own=own)
        if not (own and leads_to([y.grad_fn], [given])):
            return param, y
        # a bound method, say, or a closure has taken it, and not the copy's
        if given._backward_hooks:
            raise RuntimeError(message(HOOKED, module=module, name=name))
        return given, repeat(module, inputs)


def has_own_functions(y: Tensor) -> bool:
    """Tell whether a function with a backward of its own has a part in a tensor.

    Args:
        y: The tensor.

    Returns:
        Whether there is one in its graph.
    """
    return any(
        isinstance(node, BackwardCFunction) for node in nodes_behind([y.grad_fn])
    )
