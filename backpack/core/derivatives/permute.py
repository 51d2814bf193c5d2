"""Derivatives of the module that permutes axes."""

from backpack.core.derivatives.linear_map import LinearMapDerivatives


class PermuteDerivatives(LinearMapDerivatives):
    """Derivatives of ``Permute``, which leaves the samples on axis 0."""
