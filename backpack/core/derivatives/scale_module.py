"""Derivatives of the module that multiplies with a number."""

from backpack.core.derivatives.linear_map import LinearMapDerivatives


class ScaleModuleDerivatives(LinearMapDerivatives):
    """Derivatives of ``ScaleModule``."""
