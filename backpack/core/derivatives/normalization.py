"""Derivatives of scale-and-shift layers: what they share, and all but BatchNorm.

Their output is ``weight * x̂ + bias`` with a normalized input ``x̂`` that does not
depend on the parameters, so that individual gradients are elementwise products, summed
over the axes that share an entry.
"""

from abc import abstractmethod
from typing import Any, Optional, Sequence, Tuple

from torch import Tensor
from torch.nn.functional import group_norm, instance_norm, layer_norm, rms_norm

from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.per_sample.base import Dense, PerSample
from backpack.utils.types import Layer


def statistics(module: Layer) -> Tuple[Optional[Tensor], Optional[Tensor], bool]:
    """Tell what a layer normalizes with.

    Args:
        module: Batch or instance normalization.

    Returns:
        Running mean and variance ``[C]``, ``None`` if they are not used; and whether
        it takes those of its input instead.
    """
    if module.training or module.running_mean is None:
        return None, None, True
    return module.running_mean, module.running_var, False


class ScaleShiftDerivatives(BaseParameterDerivatives):
    """Derivatives of ``weight * x̂ + bias`` with respect to the parameters."""

    affine_in_params = True

    @abstractmethod
    def normalize(self, module: Layer, x: Tensor) -> Tensor:
        """Compute the normalized input.

        Args:
            module: The layer.
            x: Its input, of shape ``[N, *]``.

        Returns:
            Normalized input ``x̂`` of shape ``[N, *]``.
        """

    def shared_axes(self, module: Layer, x: Tensor) -> Tuple[int, ...]:
        """Return the axes that share an entry of the parameters.

        Args:
            module: The layer.
            x: Its input, of shape ``[N, C, *]``.

        Returns:
            Axes of ``x``, other than the first; by default all that follow channels.
        """
        return tuple(range(2, x.dim()))

    def product(
        self, name: str, module: Layer, inputs: Sequence[Tensor], cotangents: Tensor
    ) -> PerSample:
        """Describe the products of cotangents and a parameter's Jacobian.

        Args:
            name: ``"weight"`` or ``"bias"``.
            module: The layer.
            inputs: Its input, of shape ``[N, *]``.
            cotangents: Columns at its output, of shape ``[V, N, *]``.

        Returns:
            The products.
        """
        if name == "weight":
            cotangents = cotangents * self.normalize(module, inputs[0])
        return self._over_shared_axes(name, module, cotangents)

    def _over_shared_axes(
        self, name: str, module: Layer, cotangents: Tensor
    ) -> PerSample:
        """Sum ``[V, N, *]``, with the weight's times ``x̂``, over the shared axes."""
        x = cotangents.flatten(0, 1)  # of the shape of an input
        axes = [axis + 1 for axis in self.shared_axes(module, x)]
        products = cotangents.sum(axes) if axes else cotangents
        return Dense(products, getattr(module, name).shape)


class LayerNormDerivatives(ScaleShiftDerivatives):
    """Derivatives of :class:`torch.nn.LayerNorm`."""

    def supports(self, module: Layer, inputs: Tuple[Any, ...]) -> bool:
        """Tell whether there is an axis of samples next to those that are normalized.

        Args:
            module: The layer.
            inputs: Its input, of shape ``[N, *]``.

        Returns:
            Whether it is so.
        """
        return inputs[0].dim() > len(module.normalized_shape)

    def normalize(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        return layer_norm(x, module.normalized_shape, eps=module.eps)

    def shared_axes(self, module: Layer, x: Tensor) -> Tuple[int, ...]:  # noqa: D102
        return tuple(range(1, x.dim() - len(module.normalized_shape)))


class RMSNormDerivatives(LayerNormDerivatives):
    """Derivatives of :class:`torch.nn.RMSNorm`."""

    def normalize(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        return rms_norm(x, module.normalized_shape, eps=module.eps)


class GroupNormDerivatives(ScaleShiftDerivatives):
    """Derivatives of :class:`torch.nn.GroupNorm`."""

    def normalize(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        return group_norm(x, module.num_groups, eps=module.eps)


class InstanceNormNdDerivatives(ScaleShiftDerivatives):
    """Derivatives of :class:`torch.nn.InstanceNorm1d`, ``2d`` and ``3d``."""

    def normalize(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        mean, var, from_input = statistics(module)
        return instance_norm(x, mean, var, use_input_stats=from_input, eps=module.eps)
