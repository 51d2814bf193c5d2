"""A module linearized at its last call: products with Jacobian and residual.

Columns at the inputs are lists, one entry ``[V, N, *in]`` for each input that a
quantity is passed on to; ``None`` stands for zero. A rule is taken from the table where
there is one. A call with several inputs, or a module that is not in the table, is
differentiated by autograd in all of these inputs at once.
"""

from __future__ import annotations

from functools import reduce, wraps
from typing import Any, Callable, Iterable, Sequence, TypeVar

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import Module, Parameter

from backpack.core.derivatives import generic, stored
from backpack.core.derivatives.linear_map import SumModuleDerivatives
from backpack.hessianfree.lop import check_twice, pull_back, pull_columns
from backpack.hessianfree.rop import R_op
from backpack.utils.hooks import message
from backpack.utils.state import may_look, out_of_sight
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import HALF, Layer, as_type, dense, full_precision, version_of
from backpack.utils.unsqueeze import flatten, unit_columns

C = TypeVar("C", bound=Callable)
Columns = list[Any]
_FROZEN = "_backpack_frozen"  # marks the copies that ``freeze`` makes

# what PyTorch says of functions that have no second derivative
_ONCE = "is not implemented", "Double backward is unsupported", "differentiate twice"

NOT_TWICE = (
    "{module}: products with a curvature matrix of {name}, or its diagonal, take a "
    "second derivative that PyTorch does not have: {error} Use a layer that has one "
    "(Embedding and a sum for EmbeddingBag), or freeze the parameter."
)
CHANGED = (
    "{ext}: products with the matrix of '{name}' were asked for after a parameter, an "
    "input or the output of {module} was modified in place, as an optimizer does. They "
    "would not be those of the backward pass. Multiply before: compute all products, "
    "then change parameters; or run the backward pass anew."
)


def freeze(module: Layer) -> Layer:
    """Copy a module such that the copy keeps the present inputs and output.

    Args:
        module: Module with stored inputs and output.

    Returns:
        Copy whose inputs and output are not connected to a graph. It shares parameters,
        but no buffers. Under autocast, it gets its inputs in its parameters' type.
    """
    if _FROZEN in vars(module):
        return module
    return freeze_at(module, stored.stored_inputs(module), module.output)


def freeze_at(
    module: Module,
    inputs: Sequence[Any],
    output: Tensor,
    precision: torch.dtype | None = None,
) -> Module:
    """Copy a module such that the copy keeps the inputs and the output of a call.

    Args:
        module: The module.
        inputs: The call's inputs.
        output: Its output.
        precision: Type that operations inside were run in, if the output's does not
            tell. Default: ``None``.

    Returns:
        The copy, see :func:`freeze`.
    """
    values: dict[str, Any] = {f"input{i}": _frozen(x) for i, x in enumerate(inputs)}
    values["output"], kind = output.detach(), precision or output.dtype
    tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
    halves = {name: x for name, x in tensors.items() if x.dtype in HALF}
    if halves:
        own = [p for p in (*module.parameters(), *inputs) if isinstance(p, Parameter)]
        floats = [x for x in own or inputs if isinstance(x, Tensor)]
        types = [x.dtype for x in floats if x.is_floating_point()]
        if precision is not None and not own:  # what else it has was not cast, either
            types.append(torch.float32)
        widest = reduce(torch.promote_types, types) if types else output.dtype
        values.update((name, as_type(x, widest)) for name, x in halves.items())
    values.update({_FROZEN: True, stored.OUTPUT_TYPE: kind, stored.AUTOCAST: None})
    return stored.scratch_copy(module, **values)


def _frozen(x: Any) -> Any:
    if isinstance(x, Parameter):  # an operation's argument, which holds no samples
        return Parameter(x.detach(), requires_grad=False)
    return dense(x.detach()) if isinstance(x, Tensor) else x


class PerInput(list):
    """What is passed on to a module's inputs, if it is not the same for each of them.

    One entry for each argument, ``None`` for those that get nothing.
    """


class Snapshot:
    """The tensors of a frozen module, to tell whether they were modified since."""

    def __init__(self, module: Module, parameters: bool = True):
        """Look at the tensors.

        Args:
            module: Frozen module.
            parameters: Whether its parameters matter. Default: ``True``.
        """
        self._module, params = module, list(module.parameters()) if parameters else []
        values = (*params, *stored.stored_inputs(module), module.output)
        tensors = [x.detach() for x in values if isinstance(x, Tensor)]  # no graph
        self._seen = [(x, version_of(x)) for x in tensors]
        self._sums = [(x, _sums_of_bits(x)) for x in params if may_look(x, waits=True)]

    def check(self, ext: str, name: str) -> None:
        """Check that no tensor was modified in place, nor a parameter by ``.data``.

        Args:
            ext: Name of the extension that needs them.
            name: Name of the parameter whose quantity needs them.

        Raises:
            RuntimeError: If one was.
        """
        changed = any(version_of(x) != version for x, version in self._seen)
        if changed or not all(_agrees(*known) for known in self._sums):
            text = message(CHANGED, ext=ext, name=name, module=self._module)
            raise RuntimeError(text)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@out_of_sight
def _sums_of_bits(x: Tensor) -> Tensor:
    """Sum numbers as integers, over either axis: what others change by ``.data``.

    No version counts it, and a copy would take as much memory as the parameter.
    """
    x = torch.atleast_2d(dense(x.detach()))
    bits = x.view(_BITS.get(x.element_size(), torch.int64)).flatten(1)
    return torch.cat([bits.sum(axis, dtype=bits.dtype) for axis in (0, 1)])


def _agrees(x: Tensor, sums: Tensor) -> bool:
    return torch.equal(_sums_of_bits(x).to(sums.device), sums)


def _naming(product: C) -> C:
    """Let a product name the module of which autograd knows one derivative only."""

    @wraps(product)
    def call(linear: Any, *args: Any) -> Any:
        try:
            return product(linear, *args)
        except RuntimeError as error:
            if not any(text in str(error) for text in _ONCE):
                raise
            name = getattr(linear, "name", None)
            who = {"module": linear.module, "name": repr(name) if name else "its input"}
            text = message(NOT_TWICE, error=error, **who)
            raise NotImplementedError(text) from error

    return call  # type: ignore[return-value]


class Linearization:
    """A module at its inputs: products with its Jacobian and its residual.

    Attributes:
        derivatives: Its derivatives.
        module: The module, with its inputs and output.
        g_out: Gradients at its outputs.
        positions: Inputs that it is linearized in.
        is_joint: Whether autograd differentiates it in all of them at once.
    """

    def __init__(
        self,
        derivatives: Any,
        module: Layer,
        g_out: tuple[Tensor, ...],
        positions: Iterable[int] = (0,),
    ):
        """Store what to linearize.

        Args:
            derivatives: Its derivatives.
            module: The module, with its inputs and output.
            g_out: Gradients at its outputs.
            positions: Inputs to linearize in.
        """
        self.derivatives, self.module = derivatives, module
        self.g_out = (as_type(g_out[0].detach(), module.output.dtype),)
        self.positions = list(positions)
        self._sums = isinstance(derivatives, SumModuleDerivatives)
        shapes = {x.shape for x in self.inputs()} if self._sums else set()
        # a sum that broadcasts is left to autograd
        self._copies = shapes == {module.output.shape}
        self.is_joint = not self._copies and (self._sums or self.positions != [0])

    def select(self, subsampling: Subsampling) -> Linearization:
        """Restrict to some samples.

        Args:
            subsampling: Their indices.

        Returns:
            Linearization for these samples.
        """
        module = self.derivatives._restrict(self.module, subsampling)
        g_out = (subsample(self.g_out[0], subsampling=subsampling),)
        return Linearization(self.derivatives, module, g_out, self.positions)

    def inputs(self) -> list[Tensor]:
        """Collect the inputs that it is linearized in.

        Returns:
            Tensors ``[N, *in]``.
        """
        return [getattr(self.module, f"input{i}") for i in self.positions]

    def at_positions(self, values: Sequence[Any]) -> PerInput:
        """Arrange one value for each input in the order of all arguments.

        Args:
            values: Values for the inputs that it is linearized in.

        Returns:
            Values for all arguments, ``None`` for the others.
        """
        by_position = dict(zip(self.positions, values))
        return PerInput(by_position.get(i) for i in range(max(self.positions) + 1))

    @_naming
    def jac(self, columns: Columns) -> Tensor:
        """Multiply with the Jacobian.

        Args:
            columns: Columns ``[V, N, *in]`` at each input.

        Returns:
            Columns ``[V, N, *out]``.
        """
        columns, dtype = self._typed(columns), self.module.output.dtype
        if self._copies:
            total: Any = sum(column for column in columns if column is not None)
            return total.to(dtype)
        if not self.is_joint:
            args = self.module, (), self.g_out, columns[0]
            return self.derivatives.jac_mat_prod(*args).to(dtype)
        columns = self.filled(columns)
        xs, y = stored.evaluate(self.module, self.positions)
        return torch.stack([R_op(y, xs, vs)[0] for vs in zip(*columns)])

    def jac_t(self, columns: Tensor) -> Columns:
        """Multiply with the transposed Jacobian.

        Args:
            columns: Columns ``[V, N, *out]``.

        Returns:
            Columns ``[V, N, *in]`` at each input.
        """
        columns = as_type(columns, self.module.output.dtype)
        if self._copies:
            return self._typed([columns] * len(self.positions))
        if not self.is_joint:
            args = self.module, (), self.g_out, columns
            return self._typed([self.derivatives.jac_t_mat_prod(*args)])
        xs, y = stored.evaluate(self.module, self.positions)
        return pull_columns(y, xs, columns)

    @_naming
    def residual(self, columns: Columns) -> Columns:
        """Multiply with the residual Σ_k δ_k ∂²z_k/∂x².

        Args:
            columns: Columns ``[V, N, *in]`` at each input.

        Returns:
            Columns ``[V, N, *in]`` at each input.
        """
        columns = self._typed(columns)
        if not self.is_joint:
            args = self.module, (), self.g_out, columns[0]
            return self._typed([self.derivatives.residual_mat_prod(*args)])
        columns = self.filled(columns)
        xs, y = stored.evaluate(self.module, self.positions)
        gradients = _gradients(y, xs, self.g_out[0])
        return pull_columns(gradients, xs, zip(*columns))

    @property
    def residual_is_zero(self) -> bool:
        """Whether the residual is known to vanish."""
        if self.is_joint:
            return self._sums
        return self.derivatives.hessian_is_zero(self.module)

    @property
    def residual_is_diagonal(self) -> bool:
        """Whether the residual is known to be diagonal."""
        if self.is_joint:
            return self._sums
        return self.derivatives.hessian_is_diagonal(self.module)

    @_naming
    def residual_diagonal(self) -> Tensor:
        """Compute the residual's diagonal, if it is diagonal.

        Returns:
            Diagonal of shape ``[N, *in]``.
        """
        return self.derivatives.hessian_diagonal(self.module, (), self.g_out)

    def residual_matrices(self) -> Tensor:
        """Compute the residual of each sample, all inputs' features in a row.

        Returns:
            Symmetric matrices of shape ``[N, H, H]``.
        """
        inputs, like = self.inputs(), self.g_out[0]
        size = sum(x.shape[1:].numel() for x in inputs)
        basis = torch.eye(size, dtype=like.dtype, device=like.device)
        columns = self.split(basis.unsqueeze(1).expand(-1, len(inputs[0]), -1))
        products = torch.cat([flatten(c, 2) for c in self.residual(columns)], dim=2)
        matrices = products.movedim(0, 1)
        matrices = (matrices + matrices.mT) / 2
        return full_precision(matrices)

    def split(self, columns: Tensor) -> list[Tensor]:
        """Split columns whose rows are all inputs' features.

        Args:
            columns: Columns ``[V, N, H]``.

        Returns:
            Columns ``[V, N, *in]`` at each input.
        """
        inputs = self.inputs()
        parts = columns.split([x.shape[1:].numel() for x in inputs], dim=2)
        return [part.reshape(len(part), *x.shape) for part, x in zip(parts, inputs)]

    def filled(self, columns: Columns) -> list[Tensor]:
        """Replace what is not given by zeros.

        Args:
            columns: Columns ``[V, N, *in]`` at each input, or ``None``.

        Returns:
            Columns at each input.
        """
        count = next(len(column) for column in columns if column is not None)
        pairs = zip(columns, self.inputs())
        return [x.new_zeros(count, *x.shape) if c is None else c for c, x in pairs]

    def _typed(self, columns: Columns) -> Columns:
        """Give columns the types of the inputs."""
        return [as_type(column, x.dtype) for column, x in zip(columns, self.inputs())]


class ParameterLinearization:
    """A module at one of its parameters: products with Jacobian and residual.

    Attributes:
        has_residual: Whether the module may be non-linear in the parameter.
        is_affine: Whether products depend on no parameter of the module.
    """

    def __init__(
        self, derivatives: Any, module: Layer, g_out: tuple[Tensor, ...], name: str
    ):
        """Store what to linearize.

        Args:
            derivatives: The module's derivatives.
            module: The module, with its inputs and output.
            g_out: Gradients at its outputs.
            name: Name of the parameter.
        """
        self.module, self.name = module, name
        self.g_out = (as_type(g_out[0].detach(), module.output.dtype),)
        self.derivatives = derivatives
        affine = getattr(derivatives, "affine_in_params", False)
        self.has_residual = not affine or name not in module._parameters
        # modules inside hold what parametrized parameters are computed from
        self.is_affine = not self.has_residual and not module._modules

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        return stored.find_parameter(self.module, self.name)

    @_naming
    def jac(self, columns: Tensor) -> Tensor:
        """Multiply with the Jacobian.

        Args:
            columns: Columns ``[V, *p]``.

        Returns:
            Columns ``[V, N, *out]``.
        """
        if self.is_affine:
            args = self.name, self.module, (), self.g_out, columns
            return self.derivatives.param_jac_mat_prod(*args)
        param, y = stored.evaluate_parameter(self.module, self.name)
        return torch.stack([R_op(y, param, v)[0] for v in columns])

    def jac_t(self, columns: Tensor) -> Tensor:
        """Multiply with the transposed Jacobian, and sum over samples.

        Args:
            columns: Columns ``[V, N, *out]``.

        Returns:
            Columns ``[V, *p]``.
        """
        columns = as_type(columns, self.module.output.dtype)
        if self.is_affine:
            args = self.name, self.module, (), self.g_out, columns
            return self.derivatives.param_mjp(*args)
        param, y = stored.evaluate_parameter(self.module, self.name)
        return pull_columns(y, param, columns)[0]

    @_naming
    def bends(self) -> bool:
        """Tell whether the module is non-linear in the parameter.

        Returns:
            Whether the gradient may depend on the parameter. Autograd has a derivative
            for it, which may be zero, or does not know what a function does.
        """
        param, y = stored.evaluate_parameter(self.module, self.name)
        if stored.has_own_functions(y):
            return True
        (gradient,) = _gradients(y, [param], self.g_out[0])
        if not gradient.requires_grad:
            return False
        ones = torch.ones_like(gradient)
        return grad(gradient, param, ones, allow_unused=True)[0] is not None

    @_naming
    def residual(self, columns: Tensor) -> Tensor:
        """Multiply with the residual Σ_k δ_k ∂²z_k/∂p².

        Args:
            columns: Columns ``[V, *p]``.

        Returns:
            Columns ``[V, *p]``.
        """
        param, y = stored.evaluate_parameter(self.module, self.name)
        gradients = _gradients(y, [param], self.g_out[0])
        return pull_columns(gradients, param, columns)[0]

    @_naming
    def residual_diagonal(self, sum_batch: bool) -> Tensor:
        """Compute the diagonal of the residual, entry by entry.

        Args:
            sum_batch: Whether to sum over samples.

        Returns:
            Diagonal of shape ``[*p]``, or ``[N, *p]`` without summation over samples.
        """
        param, y = stored.evaluate_parameter(self.module, self.name)
        delta = self.g_out[0]
        deltas = [delta]
        if not sum_batch:
            deltas = [generic.only_sample(delta, 0, n) for n in range(len(delta))]
        diagonals = []
        for part in deltas:
            gradients = _gradients(y, [param], part)
            products = pull_columns(gradients, param, unit_columns(param, 0))[0]
            diagonal = flatten(products, 1).diagonal().reshape(param.shape)
            diagonals.append(diagonal)
        return diagonals[0] if sum_batch else torch.stack(diagonals)


def _gradients(y: Tensor, xs: list[Tensor], delta: Tensor) -> tuple[Tensor, ...]:
    check_twice([y], xs)
    return pull_back([y], xs, [delta.to(y.dtype)], True, create_graph=True)
