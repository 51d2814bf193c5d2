"""The Hessian's diagonal on a module with known derivatives."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor

from backpack.core.derivatives.stored import find_parameter
from backpack.core.fast.whole import call_whole, is_recorded
from backpack.core.linearization import Linearization, ParameterLinearization
from backpack.core.per_sample.base import PerSample
from backpack.core.per_sample.outer import Outer
from backpack.extensions.secondorder.diag_hessian.signed_columns import (
    SignedColumns,
    factor,
    join,
)
from backpack.extensions.secondorder.module_rules import ModuleRule
from backpack.utils.state import may_look
from backpack.utils.types import Grads, Layer
from backpack.utils.unsqueeze import flatten


class DiagHBaseModule(ModuleRule):
    """Pull signed columns of the Hessian back, and add those of the module's residual.

    The Hessian at the output is Σ_v s_v c_v c_vᵀ for each sample. At the input, it is
    that of the columns Jᵀ c_v plus the residual Σ_k δ_k ∂²z_k/∂x². A diagonal residual
    r adds a column √|r_i| e_i with the sign of r_i for each unit i, any other its
    eigenvectors.
    """

    PLUS = 1.0
    MINUS = -1.0

    def parameter(
        self, name: str, ext: Any, module: Layer, g_out: Grads, backproped: Any
    ) -> Tensor:
        """Compute the diagonal for a parameter.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Signed columns at the output.

        Returns:
            Diagonal of shape ``[*p]``, or ``[N, *p]`` for each sample.
        """
        shape, sum_batch = find_parameter(module, name).shape, ext.SUM_BATCH
        columns = SignedColumns.wrap(backproped)

        def make(_: Any, some: Tensor) -> PerSample:
            return self.derivatives.stored_product(name, module, (), g_out, some)

        args = columns.columns, columns.columns, columns.sign
        product = make(*args[:2]) if is_recorded() else None
        if isinstance(product, Outer):
            recipe = product.recipe()
            both = recipe.inputs, recipe.cotangents
            reduce = partial(_signed_squares, recipe.make, sum_batch, shape)
            diagonal = call_whole(reduce, *both, columns.sign)
        else:
            diagonal = _signed_squares(make, sum_batch, shape, *args)
        linear = ParameterLinearization(self.derivatives, module, g_out, name)
        if linear.has_residual:
            diagonal = diagonal + linear.residual_diagonal(sum_batch)
        return diagonal.detach()

    def pull_back(
        self, ext: Any, linear: Linearization, backproped: SignedColumns
    ) -> list[SignedColumns]:
        """Pull signed columns back, and add those of the residual.

        Args:
            ext: The extension that is running.
            linear: The module, linearized in its inputs.
            backproped: Signed columns at the output.

        Returns:
            Signed columns at each of the inputs.
        """
        backproped = SignedColumns.wrap(backproped).compress()
        pulled = linear.jac_t(backproped.columns)
        ways = len(pulled)
        result = [backproped.replace(columns, ways) for columns in pulled]
        if not linear.residual_is_zero:
            columns, sign = residual_columns(linear)
            key, parts = object(), linear.split(columns)
            new = [SignedColumns.create(part, sign, ways, key) for part in parts]
            result = list(map(join, zip(result, new)))
        return [columns.compress() for columns in result]


def _signed_squares(
    make: Callable[[Tensor, Tensor], PerSample],
    sum_batch: bool,
    shape: torch.Size,
    inputs: Tensor,
    cotangents: Tensor,
    sign: Tensor,
) -> Tensor:
    """Sum the squares of products, with the signs ``[V, N]`` of their columns."""
    total = None
    for one, columns in SignedColumns(cotangents, sign, []).by_sign():
        part = make(inputs, columns).squares(sum_batch).mul_(one)
        total = part if total is None else total.add_(part)
    if total is None:
        total = inputs.new_zeros(shape if sum_batch else (sign.shape[1], *shape))
    return total


def residual_columns(linear: Linearization) -> tuple[Tensor, Tensor]:
    """Factor the residual of each sample into signed columns.

    Args:
        linear: A module, linearized in its inputs; its residual is not always zero.

    Returns:
        Columns ``[V, N, H]`` for all inputs' H features, and signs ``[V, N]``. There
        are none for what is seen to be zero for every sample.
    """
    if linear.residual_is_diagonal:
        diagonal = flatten(linear.residual_diagonal(), 1)
        columns = torch.diag_embed(diagonal.abs().sqrt()).movedim(1, 0)
        sign = diagonal.sign().T
    else:
        columns, sign = factor(linear.residual_matrices())
    if not may_look(sign):
        return columns, sign
    some = sign.ne(0).any(1)
    return columns[some], sign[some]
