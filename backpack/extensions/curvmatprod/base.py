"""What the products with curvature matrices have in common."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.loss_base import BaseLossDerivatives
from backpack.core.linearization import (
    Linearization,
    ParameterLinearization,
    Snapshot,
    freeze,
)
from backpack.engine.backward.turn import loss_scale
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.operator import Operator, Step
from backpack.extensions.secondorder.module_rules import ModuleRule, WalkingExtension
from backpack.extensions.secondorder.walk import check_samples_apart
from backpack.extensions.shards import Piece
from backpack.utils.disable import disable
from backpack.utils.hooks import message, name_module
from backpack.utils.types import Grads, Layer, MatProd, undisturbed

PICKLED = (
    "This product with a curvature matrix was left out when the model was pickled: it "
    "needs inputs and outputs of all modules on the way to the loss. Run the backward "
    "pass anew, with the model that you have read."
)
PARAMETER_RESIDUAL = (
    "{ext}: {module} is not known to be linear in its parameter '{name}', and the "
    "positive-curvature Hessian is defined for layers that are. Use HMP or GGNMP; if "
    "derivatives of your own are in use and it is, set `affine_in_params = True` there."
)


class Product:
    """Product with a matrix; in a model that is read from a file, there is none."""

    def __init__(self, function: MatProd):
        """Store how to multiply.

        Args:
            function: The product.
        """
        self._function = function

    def __call__(self, mat: Tensor) -> Tensor:
        """Multiply.

        Args:
            mat: Columns ``[K, *p]``, or a vector ``[*p]``.

        Returns:
            Products of the same shape.
        """
        return self._function(mat)

    def __reduce__(self) -> tuple:
        """Leave out inputs and outputs of all modules on the way to the loss."""
        return Product, (_refuse_copy,)


def _refuse_copy(mat: Tensor) -> Tensor:
    raise RuntimeError(PICKLED)


class CurvatureProductRule(ModuleRule):
    """Products with a curvature matrix on a module with known derivatives."""

    def parameter(
        self, name: str, ext: Any, module: Layer, g_out: Grads, backproped: MatProd
    ) -> MatProd:
        """Make the product with a parameter's block.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Product with the matrix at the output, ``[V, N, *out]``.

        Returns:
            Function that maps ``[K, *p]`` to the same shape; a vector ``[*p]``, too.

        Raises:
            NotImplementedError: If the matrix is not defined for the parameter.
        """
        frozen, backproped = freeze(module), Operator.wrap(backproped)
        linear = ParameterLinearization(self.derivatives, frozen, g_out, name)
        # of an affine layer, parameters may be updated one after the other
        snapshot, ext_name = Snapshot(frozen, not linear.is_affine), type(ext).__name__
        residual = linear.has_residual and Curvature.require_residual(ext.curv_type)
        if residual and Curvature.is_pch(ext.curv_type):
            residual = linear.bends()
            if residual:
                text = message(PARAMETER_RESIDUAL, ext=ext, module=module, name=name)
                raise NotImplementedError(text)

        def expected(what: Any, got: Any) -> str:
            where = f"for the parameter '{name}' of {name_module(module)}"
            return f"Expected {what} {where}, got {got}."

        @Product
        @torch.no_grad()
        def product(mat: Tensor) -> Tensor:
            """Multiply with the parameter's block.

            Args:
                mat: Columns ``[K, *p]``, or a vector ``[*p]``.

            Returns:
                Products of the same shape.
            """
            shape = linear.parameter.shape
            if not isinstance(mat, Tensor):
                way = "Convert it with `torch.as_tensor`."
                raise TypeError(f"{expected('a tensor', type(mat).__name__)} {way}")
            columns = mat.unsqueeze(0) if mat.shape == shape else mat
            if columns.shape[1:] != shape:
                sizes = ", ".join(map(str, shape))
                raise ValueError(expected(f"[K, {sizes}]", list(mat.shape)))
            if mat.dtype != linear.parameter.dtype:
                said = expected(linear.parameter.dtype, mat.dtype)
                raise ValueError(f"{said} Convert it with `.to()`.")
            snapshot.check(ext_name, name)
            backproped.check(ext_name, name)
            if not mat.numel():  # no columns
                return torch.empty_like(mat)
            with disable(), undisturbed():
                result = linear.jac_t(backproped(linear.jac(columns)))
                if residual:
                    result = result + linear.residual(columns)
            return result.reshape(mat.shape)

        return product

    def pull_back(
        self, ext: Any, linear: Linearization, backproped: MatProd
    ) -> list[Operator]:
        """Compose the product with this module's step.

        Args:
            ext: The extension that is running.
            linear: The module, linearized in its inputs.
            backproped: Product with the matrix at the output.

        Returns:
            Product with the matrix at each of the inputs.
        """
        by_sample = linear.residual_is_zero or linear.residual_is_diagonal
        if Curvature.is_pch(ext.curv_type) and not by_sample:
            check_samples_apart(linear, ext, linear.residual, linear.inputs())
        step = Step(linear, Operator.wrap(backproped), ext.curv_type)
        return [Operator([(step, slot)]) for slot in range(len(linear.positions))]


class BatchNormProductRule(CurvatureProductRule):
    """Products with a curvature matrix on batch normalization, in either mode."""

    def __init__(self) -> None:
        """Set derivatives and parameters."""
        super().__init__(BatchNormNdDerivatives(), params=["weight", "bias"])

    weight = partialmethod(CurvatureProductRule.method, "weight")
    bias = partialmethod(CurvatureProductRule.method, "bias")


class CurvatureProduct(WalkingExtension):
    """Base class of products with a curvature matrix.

    The functions hold the inputs and outputs of all modules on the way to the loss, and
    refuse to multiply after one of them, or a parameter, was modified. Samples need not
    be told apart, so that batch normalization in training mode is no obstacle.

    Attributes:
        curv_type: Which curvature matrix, see :class:`.curvature.Curvature`.
    """

    keeps_io = True
    separates_samples = refuses_coupled_samples = False
    needs_all_uses = True
    rule = CurvatureProductRule

    def __init__(self, savefield: str, curv_type: str):
        """Choose the matrix.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
            curv_type: Name of the curvature matrix.
        """
        super().__init__(savefield)
        self.curv_type = curv_type

    def start(
        self, derivatives: BaseLossDerivatives, module: Layer, g_out: Grads
    ) -> Operator:
        """Compute the product with the loss Hessian.

        Args:
            derivatives: The loss's derivatives.
            module: The loss module, with its inputs and output.
            g_out: Gradient at its output.

        Returns:
            The product.
        """
        scale = g_out[0].detach()
        if Curvature.REQUIRE_PSD_LOSS_HESSIAN[self.curv_type]:
            loss_scale(module, g_out[0])  # refuses a negative factor
            derivatives.check_psd(module)
        product = derivatives.make_hessian_mat_prod(module, (), ())
        known = (lambda mat: scale * product(mat)), Snapshot(module)
        return Operator(functions=[known])

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Combine the products that two consumers of an output pull back to it.

        Args:
            existing: What is there already.
            other: What comes in addition.

        Returns:
            The combination.
        """
        existing, other = Operator.wrap(existing), Operator.wrap(other)
        return existing.merge(other, type(self).__name__)

    def over_shards(self, value: MatProd, piece: Piece) -> MatProd:
        """Make the product with the whole batch's matrix.

        Args:
            value: Product with that of this process' samples.
            piece: This process' share of the batch.

        Returns:
            Function that maps ``[K, *p]`` to the same shape, to be called by all
            processes at once with the same columns.
        """

        @Product
        def product(mat: Tensor) -> Tensor:
            return piece.sum(value(mat), piece.weight)

        return product
