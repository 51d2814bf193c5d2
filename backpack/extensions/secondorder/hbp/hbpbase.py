"""Hessian backpropagation on a module with known derivatives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backpack.core.derivatives.stored import find_parameter
from backpack.core.linearization import Linearization
from backpack.extensions.curvature import Curvature
from backpack.extensions.secondorder.hbp import factors, hbp_options
from backpack.extensions.secondorder.module_rules import ModuleRule
from backpack.utils.hooks import message, name_module
from backpack.utils.types import Grads, Layer, as_type
from backpack.utils.unsqueeze import flatten

SEVERAL_INPUTS = (
    "{ext}: {module} has several inputs that parameters take part in, and a curvature "
    "matrix that is averaged over the batch does not tell how they interact. Use KFLR "
    "or KFAC."
)
NO_RESIDUAL = (
    "{ext}: curv_type={curv!r} needs the second derivatives of {module}, which columns "
    "(backprop_strategy='sqrt') do not contain. Use backprop_strategy='average', or "
    "curv_type='ggn'."
)
NOT_DIAGONAL = (
    "{ext}: curv_type={curv!r} needs the second derivatives of {module}, and a matrix "
    "that is averaged over the batch takes those of activations alone. Use "
    "curv_type='ggn', or HMP."
)


class HBPBaseModule(ModuleRule):
    """Pull columns, or a matrix that is averaged over the batch, back to the input."""

    def parameter(
        self, name: str, ext: Any, module: Layer, g_out: Grads, backproped: Tensor
    ) -> list[Tensor]:
        """Form a parameter's Kronecker factors.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Columns ``[V, N, *out]``, or a matrix ``[out, out]``.

        Returns:
            The factors.
        """
        backproped = as_type(backproped, module.output.dtype)
        sharing, derivatives = ext.weight_sharing, self.derivatives
        is_sqrt = hbp_options.BackpropStrategy.is_sqrt(ext.get_backprop_strategy())
        columns = backproped
        if not is_sqrt:  # only their shape counts
            columns = backproped.new_zeros(()).expand(1, *module.output.shape)
        product = derivatives.stored_product(name, module, (), g_out, columns)

        def what() -> str:
            return f"{name_module(module)} (parameter '{name}')"

        factors.refuse_ambiguous(ext, what, product, find_parameter(module, name))
        if is_sqrt:
            output = factors.output_factor(product, sharing)
        else:
            args = derivatives, name, module, product, backproped, sharing
            output = factors.averaged_output_factor(*args)
        approximation = hbp_options.ExpectationApproximation
        average = approximation.should_average_param_jac(ext.get_ea_strategy())
        return factors.with_input_factor(product, output, sharing, average)

    def pull_back(
        self, ext: Any, linear: Linearization, backproped: Tensor
    ) -> list[Tensor]:
        """Pull columns, or a matrix that is averaged over the batch, back.

        Args:
            ext: The extension that is running.
            linear: The module, linearized in its inputs.
            backproped: Columns ``[V, N, *out]``, or a matrix ``[out, out]``.

        Returns:
            The same at each of the inputs.

        Raises:
            NotImplementedError: If the inputs interact in a matrix, or columns do not
                contain what the curvature needs.
        """
        curv_type = ext.get_curv_type()
        text = {"ext": ext, "module": linear.module, "curv": curv_type}
        residual = Curvature.require_residual(curv_type) and not linear.residual_is_zero
        if hbp_options.BackpropStrategy.is_sqrt(ext.get_backprop_strategy()):
            if residual:
                raise NotImplementedError(message(NO_RESIDUAL, **text))
            return linear.jac_t(backproped)
        if linear.is_joint:
            raise NotImplementedError(message(SEVERAL_INPUTS, **text))
        if residual and not linear.residual_is_diagonal:
            raise NotImplementedError(message(NOT_DIAGONAL, **text))
        backproped = as_type(backproped, linear.module.output.dtype)
        args = ext, linear.module, (), linear.g_out, backproped
        return [self.backpropagate_batch_average(*args)] * len(linear.positions)

    def backpropagate_sqrt(
        self, ext: Any, module: Layer, g_inp: Grads, g_out: Grads, H: Tensor
    ) -> Tensor:
        """Pull columns back.

        Args:
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
            H: Columns ``[V, N, *out]``.

        Returns:
            Columns ``[V, N, *in]``.
        """
        return self.derivatives.jac_t_mat_prod(module, g_inp, g_out, H)

    def backpropagate_batch_average(
        self, ext: Any, module: Layer, g_inp: Grads, g_out: Grads, H: Tensor
    ) -> Tensor:
        """Pull a matrix back that is averaged over the batch.

        Args:
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
            H: Matrix of shape ``[out, out]``.

        Returns:
            Matrix of shape ``[in, in]``.
        """
        mat = self.derivatives.ea_jac_t_mat_jac_prod(module, g_inp, g_out, H)
        if not Curvature.require_residual(ext.get_curv_type()):
            return mat
        residual = self.second_order_module_effects(module, g_inp, g_out)
        residual = Curvature.modify_residual(residual, ext.get_curv_type())
        return mat if residual is None else self.add_diag_to_mat(residual, mat)

    def second_order_module_effects(
        self, module: Layer, g_inp: Grads, g_out: Grads
    ) -> Tensor | None:
        """Sum the diagonal residuals Σ_k δ_k ∂²z_k/∂x² of all samples.

        Args:
            module: The module, with its inputs and output.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.

        Returns:
            Diagonal of shape ``[in]``, ``None`` if it is zero.
        """
        if self.derivatives.hessian_is_zero(module):
            return None
        diagonal = self.derivatives.hessian_diagonal(module, g_inp, g_out)
        return flatten(diagonal, 1).sum(0)

    @staticmethod
    def add_diag_to_mat(diag: Tensor, mat: Tensor) -> Tensor:
        """Add a diagonal to a matrix.

        Args:
            diag: Diagonal of shape ``[in]``.
            mat: Matrix of shape ``[in, in]``.

        Returns:
            The sum.
        """
        return mat + diag.diag()
