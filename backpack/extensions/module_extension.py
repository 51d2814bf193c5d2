"""What an extension does on one kind of module."""

from functools import partial
from typing import Any, List, Optional, Sequence

from torch.nn import Parameter

from backpack.core.linearization import PerInput
from backpack.engine.backward.turn import Turn, current_turn
from backpack.utils.errors import warn_user
from backpack.utils.hooks import name_module
from backpack.utils.types import Grads, Layer


class ModuleExtension:
    """Base class for what an extension computes on one kind of module.

    A subclass has one method for each parameter, with the parameter's name and the
    signature of :meth:`backpropagate`, whose result is saved on the parameter. It may
    override :meth:`backpropagate` to pass a quantity on to the module's inputs.

    Example:
        >>> from torch.nn import Linear
        >>> class SumOfGradients(ModuleExtension):
        ...     def __init__(self) -> None:
        ...         super().__init__(params=["bias"])
        ...
        ...     def bias(self, ext, module, g_inp, g_out, bpQuantities):
        ...         return g_out[0].sum(0)
    """

    def __init__(self, params: Optional[List[str]] = None):
        """Store which parameters have a method.

        Args:
            params: Names of the parameters. Default: ``None``, for no parameter.

        Raises:
            NotImplementedError: If a parameter has no method of its name.
        """
        self.__params: Sequence[str] = [] if params is None else list(params)
        for name in self.__params:
            if not hasattr(self, name):
                raise NotImplementedError(
                    f"{type(self).__name__} lists the parameter '{name}', but has no "
                    f"method '{name}'. Define `def {name}(self, ext, module, g_inp, "
                    "g_out, bpQuantities)`, which returns the value to save."
                )

    def backpropagate(
        self,
        extension: Any,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        bpQuantities: Any,
    ) -> Any:
        """Pull a quantity back from the module's output to its inputs.

        Args:
            extension: The extension that is running.
            module: The module, with its ``input0``, ``output``.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
            bpQuantities: Quantity at the output; where it is columns, of shape
                ``[V, N, *out]``. ``None`` in first order, and for a loss.

        Returns:
            Quantity at each of the inputs, of any type; ``None`` if nothing is passed
            on. If it differs between a module's inputs, a ``PerInput`` (of
            ``backpack.core.linearization``) with one entry for each. A list will do
            if ``bpQuantities`` is there, and no list or tuple.
        """
        warn_user(
            f"{type(extension).__name__}: {type(self).__name__} does not override "
            "`backpropagate`, so nothing is passed on through "
            f"{name_module(module)}. Override it if layers before need the quantity."
        )

    def check_hyperparameters_module_extension(
        self, ext: Any, module: Layer, g_inp: Grads, g_out: Grads
    ) -> None:
        """Refuse options of the module that are not supported, by an exception.

        Args:
            ext: The extension that is running.
            module: The module.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
        """

    def __call__(
        self, extension: Any, module: Layer, g_inp: Grads, g_out: Grads
    ) -> None:
        """Run on a module: save each parameter's value, pass the quantity on.

        Args:
            extension: The extension that is running.
            module: The module.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
        """
        self.check_hyperparameters_module_extension(extension, module, g_inp, g_out)
        turn = current_turn()
        quantity = turn.incoming(extension)
        for name in self.__params:
            param = getattr(module, name, None)
            if isinstance(param, Parameter) and param.requires_grad:
                value = getattr(self, name)(extension, module, g_inp, g_out, quantity)
                turn.save_alone(extension, param, value)
        needed = extension.expects_backpropagation_quantities()
        if needed and extension.walks_modules and turn.call.input_requires_grad:
            passed_on = self.backpropagate(extension, module, g_inp, g_out, quantity)
            turn.pass_on(extension, _by_input(turn, quantity, passed_on))


def _by_input(turn: Turn, quantity: Any, passed_on: Any) -> Any:
    """Tell quantities for each of several inputs from a quantity that is a list."""
    sizes = len(turn.call.inputs), len(turn.call.arguments)
    is_one = quantity is None or isinstance(quantity, (list, tuple))
    if is_one or sizes[0] == 1 or not isinstance(passed_on, (list, tuple)):
        return passed_on
    return PerInput(passed_on) if len(passed_on) in sizes else passed_on


class ParameterRule(ModuleExtension):
    """The same computation for every parameter: its method is :meth:`parameter`."""

    def __init__(self, params: Optional[List[str]] = None):
        """Create a method for each parameter, unless the class has one.

        Args:
            params: Names of the parameters. Default: ``None``, for no parameter.
        """
        for name in params or []:
            if not hasattr(self, name):
                setattr(self, name, partial(self.method, name))
        super().__init__(params)

    def method(
        self,
        name: str,
        ext: Any,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        backproped: Any,
    ) -> Any:
        """Compute a parameter's value, as a module extension does.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
            backproped: What was pulled back to the module's output.

        Returns:
            The value.
        """
        return self.parameter(name, ext, module, g_out, backproped)

    def parameter(
        self, name: str, ext: Any, module: Layer, g_out: Grads, backproped: Any
    ) -> Any:
        """Compute a parameter's value.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: What was pulled back to the module's output.

        Returns:
            The value.

        Raises:
            NotImplementedError: If the class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define `parameter`, or a method '{name}'."
        )
