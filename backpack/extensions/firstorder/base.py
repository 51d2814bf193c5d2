"""Base classes of first-order extensions."""

from __future__ import annotations

from typing import Any, Callable, Mapping

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from backpack.core.linearization import freeze
from backpack.core.per_sample.base import PerSample
from backpack.core.table import LAYERS, REGISTERED
from backpack.engine.backward.coverage import check_batch_norm
from backpack.engine.backward.turn import Turn, current_turn
from backpack.extensions.backprop_extension import (
    FAIL_WARN,
    FROM_OTHERS,
    BackpropExtension,
)
from backpack.extensions.module_extension import ModuleExtension, ParameterRule
from backpack.extensions.shards import shard_of
from backpack.utils.parallel import is_shared
from backpack.utils.subsampling import Selection
from backpack.utils.types import FailMode, Grads


class FirstOrderModuleExtension(ModuleExtension):
    """Base class for what a first-order extension computes on one kind of module."""


class FirstOrderBackpropExtension(BackpropExtension):
    """Base class of extensions that need no more than the gradient at a layer's output.

    They default to a warning on modules with parameters that are not registered.
    """

    def __init__(
        self,
        savefield: str,
        module_exts: Mapping[Any, ModuleExtension],
        fail_mode: FailMode = FAIL_WARN,
        subsampling: Selection = None,
    ):
        """Store what to do on which module.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
            module_exts: Module extension for each supported class of modules.
            fail_mode: What happens on a module that is not supported: ``"ERROR"``,
                ``"WARNING"`` or ``"SILENT"``. Default: ``"WARNING"``.
            subsampling: Samples to consider, by index. Default: ``None`` for all.
        """
        super().__init__(
            savefield, module_exts, fail_mode=fail_mode, subsampling=subsampling
        )


class BuiltIn(FirstOrderModuleExtension):
    """Stands for what is computed for all parameters, whatever their modules are."""

    def __call__(
        self, extension: Any, module: Module, g_inp: Grads, g_out: Grads
    ) -> None:
        """Refuse what couples samples; else, parameters have a turn of their own.

        Args:
            extension: The extension that is running.
            module: The module.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
        """
        turn = current_turn()
        if isinstance(module, _BatchNorm):
            check_batch_norm(turn, extension.refuses_coupled_samples)
        if extension not in turn.backward_pass.state.active_exts:
            extension.compute_by_hand(turn)


_BUILT_IN = BuiltIn()
_REGISTERED = {layer: _BUILT_IN for layer in REGISTERED if LAYERS[layer].params != ()}


class GradientReduction(FirstOrderBackpropExtension):
    """Base class of our first-order quantities: a reduction of individual gradients.

    It is right for every module with parameters, so that nothing is skipped.
    """

    separates_samples = True
    default_rule: ModuleExtension | None = _BUILT_IN
    # From this number of positions on, a layer's gradients are added up, while they are
    # formed, faster than autograd computes their sum.
    adds_up_from: int | None = 16

    def __init__(self, savefield: str, subsampling: Selection = None):
        """Store where values are saved.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
            subsampling: Samples to consider, by index. Default: ``None`` for all.
        """
        super().__init__(savefield, _REGISTERED, subsampling=subsampling)
        if self.get_subsampling() is not None:
            self.adds_up_from = None

    @staticmethod
    def reduce(gradients: PerSample) -> Tensor:
        """Reduce the individual gradients of a parameter.

        What depends on which parameter it is defines :meth:`reduce_for` instead.

        Args:
            gradients: The gradients, ``[1, N, *p]`` in some form.

        Returns:
            The quantity.

        Raises:
            NotImplementedError: If it depends on the parameter.
        """
        raise NotImplementedError("This quantity depends on which parameter it is.")

    def reduce_for(self, param: Tensor, gradients: PerSample) -> Tensor:
        """Reduce the individual gradients of a parameter that is known.

        Args:
            param: The parameter.
            gradients: The gradients of all samples, ``[1, N, *p]`` in some form.

        Returns:
            The quantity.
        """
        return self.reduce(self.select(gradients))

    def parts(self, gradients: PerSample) -> Any:
        """Return what has to be known of a shard besides its value.

        Args:
            gradients: The individual gradients of a parameter.

        Returns:
            What ``over_shards`` needs, by default ``None``.
        """
        return None

    def parts_for(self, param: Tensor, gradients: PerSample) -> Any:
        """Return what has to be known of a shard, of a parameter that is known.

        Args:
            param: The parameter.
            gradients: Its individual gradients.

        Returns:
            What ``over_shards`` needs.
        """
        return self.parts(gradients)

    def compute(self, turn: Any) -> None:
        """Reduce the individual gradients of parameters.

        Args:
            turn: The parameters' turn.
        """
        shard = shard_of(self)
        for param, product in turn.gradients().items():
            gradients = product.plain
            turn.save(self, param, self.reduce_for(param, gradients))
            if shard is not None:
                shard.samples = gradients.batch_size
                shard.parts[param] = self.parts_for(param, gradients)

    def compute_by_hand(self, turn: Turn) -> None:
        """Reduce the individual gradients of a module's own parameters.

        Args:
            turn: The module's turn, in which no other has anything to do.
        """
        module: Any = turn.module
        g_out: Any = turn.g_out
        if type(self).compute is not GradientReduction.compute:
            self.refuse_by_hand(module, FROM_OTHERS)
        frozen = freeze(module)
        frozen.__dict__["_backward_hooks"] = {}  # one of them may have called us
        for name, param in turn.parameters:
            rule = turn.derivatives_for(name)
            args = name, frozen, (), g_out, g_out[0].unsqueeze(0)
            product = rule.stored_product(*args).plain
            turn.save_alone(self, param, self.reduce_for(param, product))

    def runs_on(self, call: Any) -> bool:  # noqa: D102
        if type(self).__call__ is not FirstOrderBackpropExtension.__call__:
            return True  # a subclass does something of its own
        module = call.module
        return (
            isinstance(module, _BatchNorm)
            or self.is_customized(module)
            or (call.is_loss and is_shared())  # it tells what a mean divides by
        )


class ReducedLayer(FirstOrderModuleExtension, ParameterRule):
    """Building block for users: a quantity on a layer with derivatives of its own.

    Attributes:
        reduce: Makes the quantity of individual gradients ``[1, N, *p]``.
    """

    reduce: Callable[[PerSample], Tensor]

    def __init__(self, derivatives: Any, params: list[str]):
        """Create a method for each parameter.

        Args:
            derivatives: The layer's derivatives.
            params: Names of the parameters.
        """
        self._derivatives = derivatives
        super().__init__(params=params)

    def parameter(
        self, name: str, ext: Any, module: Module, g_out: Grads, backproped: None
    ) -> Tensor:
        """Reduce the individual gradients of a parameter.

        Args:
            name: Name of the parameter.
            ext: The extension that is running.
            module: The module, with its inputs and output.
            g_out: Gradients at the outputs.
            backproped: Nothing.

        Returns:
            The quantity.
        """
        args = name, module, (), g_out, g_out[0].unsqueeze(0)
        return self.reduce(ext.select(self._derivatives.stored_product(*args)))
