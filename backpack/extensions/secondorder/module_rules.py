"""Quantities by module rules: they walk from module to module, back from the loss."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from backpack.core.derivatives.loss_base import BaseLossDerivatives
from backpack.core.table import built_in, find_loss
from backpack.engine.backward.turn import current_turn
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.module_extension import ModuleExtension, ParameterRule
from backpack.extensions.secondorder import walk
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.utils.disable import disable
from backpack.utils.hooks import message
from backpack.utils.types import Grads, Layer

NO_GRAPH = (
    "{ext} (field '{field}') can't be differentiated, although the backward pass of "
    "{module} ran with `create_graph=True`: quantities of first order and diagonals of "
    "the GGN can be. Use one of these, or `detach()` the field."
)


class _NoGraph(torch.autograd.Function):
    """Returns what it gets, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Parameter, text: str) -> Tensor:
        """Return it, as something that depends on a parameter."""
        ctx.text = text
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Refuse."""
        raise NotImplementedError(ctx.text)


def _without_graph(param: Parameter, text: str, value: Any) -> Any:
    """Let a derivative of a value be an error, where it would be zero in silence."""
    if isinstance(value, Tensor):
        return _NoGraph.apply(value, param, text)
    return type(value)(lambda mat: _NoGraph.apply(value(mat), param, text))


class ModuleRule(MatToJacMat, ParameterRule):
    """What a quantity does on a module whose derivatives are known."""

    def backpropagate(
        self, ext: Any, module: Layer, g_inp: Grads, g_out: Grads, backproped: Any
    ) -> Any:  # noqa: D102
        return super().backpropagate(ext, module, g_inp, g_out, backproped)


class ApplyRules(ModuleExtension):
    """Apply an extension's rule with the derivatives in the table; for every module."""

    def __call__(
        self, extension: Any, module: Layer, g_inp: Grads, g_out: Grads
    ) -> None:
        """Save each parameter's value, pass the quantity on.

        Args:
            extension: The extension that is running.
            module: The module.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
        """
        turn, creates_graph = current_turn(), torch.is_grad_enabled()
        with disable(), torch.no_grad():
            if turn.call.is_loss:
                derivatives = find_loss(module).derivatives
                turn.pass_on(extension, extension.start(derivatives, module, g_out))
            elif not walk.skips(turn, extension):
                self._apply(extension, module, g_out, creates_graph)

    def _apply(
        self, extension: Any, module: Layer, g_out: Grads, creates_graph: bool
    ) -> None:
        turn = current_turn()
        if extension.separates_samples:
            walk.check_batch_first(turn, extension)
        quantity = turn.incoming(extension)
        derivatives, frozen = turn.row.derivatives, walk.freeze_call(turn)
        producers = turn.producers(extension)
        if producers:
            linear = walk.linearize(turn, extension, producers, frozen)
        elif turn.call.has_other_numbers or walk.repeats(turn):
            if not getattr(derivatives, "affine_in_params", False):
                walk.check_repeats(turn, extension, frozen)
        for name, param in turn.parameters:
            rule = extension.rule(turn.derivatives_for(name))
            value = rule.parameter(name, extension, frozen, g_out, quantity)
            if creates_graph:
                who = {"ext": extension, "field": extension.savefield}
                text = message(NO_GRAPH, module=module, **who)
                with torch.enable_grad():
                    value = tree_map(partial(_without_graph, param, text), value)
            turn.save_alone(extension, param, value)
        if producers:
            rule = extension.rule(derivatives)
            values = rule.pull_back(extension, linear, quantity)
            if extension.separates_samples:
                walk.check_samples_kept(linear, extension)
            turn.pass_on(extension, linear.at_positions(values))


class WalkingExtension(SecondOrderBackpropExtension):
    """Base class of quantities by module rules.

    Attributes:
        rule: What to do on a module, given its derivatives.
    """

    separates_samples = True
    default_rule: ModuleExtension | None = ApplyRules()
    rule: type[ModuleRule]

    def __init__(self, savefield: str):
        """Register the rule for all layers and losses.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
        """
        super().__init__(savefield, built_in(self.default_rule))

    @abstractmethod
    def start(
        self, derivatives: BaseLossDerivatives, module: Layer, g_out: Grads
    ) -> Any:
        """Compute the quantity at the loss input.

        Args:
            derivatives: The loss's derivatives.
            module: The loss module, with its inputs and output.
            g_out: Gradient at its output.

        Returns:
            The quantity.
        """
