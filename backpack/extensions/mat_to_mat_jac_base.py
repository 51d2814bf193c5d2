"""Module extensions that pull columns back with a module's derivatives."""

from copy import copy
from typing import Any, List, Optional, Tuple, Type

from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.linearization import Linearization, freeze
from backpack.core.table import LAYERS, LOSSES
from backpack.engine.backward.turn import current_turn
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.paths import without_arguments
from backpack.utils.types import Grads, Layer


class MatToJacMat(ModuleExtension):
    """Pull columns back from a module's output to its inputs.

    A building block for extensions: a subclass adds one method per parameter.

    Example:
        >>> from backpack.core.derivatives.linear import LinearDerivatives
        >>> class SquaredColumns(MatToJacMat):
        ...     def __init__(self) -> None:
        ...         super().__init__(LinearDerivatives(), params=["bias"])
        ...
        ...     def bias(self, ext, module, g_inp, g_out, backproped):
        ...         return backproped.square().sum((0, 1))
    """

    def __init__(
        self, derivatives: BaseDerivatives, params: Optional[List[str]] = None
    ):
        """Store the derivatives.

        Args:
            derivatives: The module's derivatives.
            params: Names of parameters that have a method. Default: ``None``.
        """
        self.derivatives: Any = derivatives
        super().__init__(params)

    def backpropagate(
        self, ext: Any, module: Layer, grad_inp: Grads, grad_out: Grads, backproped: Any
    ) -> Any:
        """Multiply columns with the transposed Jacobian.

        Args:
            ext: The extension that is running.
            module: The module, with its inputs and output.
            grad_inp: Gradients at the inputs, as far as they exist.
            grad_out: Gradients at the outputs.
            backproped: Columns ``[V, N, *out]``, or a list of such.

        Returns:
            Columns ``[V, N, *in]``, or a list of such; one for each input if the module
            has several. ``None`` for an input of integers.
        """
        if not module.input0.is_floating_point():
            return None
        subsampling = ext.get_subsampling()
        positions = list(current_turn().producers(ext)) or [0]
        linear = Linearization(self.derivatives, freeze(module), grad_out, positions)
        if subsampling is not None:
            linear = linear.select(subsampling)
        if isinstance(backproped, list):
            pulled = [self.pull_back(ext, linear, one) for one in backproped]
            values = [[p[i] for p in pulled] for i in range(len(linear.positions))]
        else:
            values = self.pull_back(ext, linear, backproped)
        return values[0] if linear.positions == [0] else linear.at_positions(values)

    def pull_back(self, ext: Any, linear: Linearization, backproped: Any) -> List[Any]:
        """Pull a quantity back from the module's output to its inputs.

        Args:
            ext: The extension that is running.
            linear: The module, linearized in these inputs.
            backproped: Quantity at the output; here: columns ``[V, N, *out]``.

        Returns:
            Quantity at each of the inputs.
        """
        return linear.jac_t(backproped)


def for_layer(base: Type[MatToJacMat], layer: type, name: str, path: str) -> Any:
    """Make the class of a layer's, or loss's, rule, which takes no arguments.

    Args:
        base: Class of the rule, which takes derivatives and names of parameters.
        layer: The layer or loss, which is in the table.
        name: Name of the new class.
        path: Name of the module that holds it.

    Returns:
        The class, with the derivatives and the parameters in the table.
    """
    return without_arguments(base, name, path, *rule_of(layer))


def rule_of(layer: type) -> Tuple[Any, Any]:
    """Look up what the rule of a layer, or a loss, is made of.

    Args:
        layer: The layer or loss, which is in the table.

    Returns:
        The derivatives, and the names of the parameters.
    """
    row = {**LAYERS, **LOSSES}[layer]
    return copy(row.derivatives), row.params
