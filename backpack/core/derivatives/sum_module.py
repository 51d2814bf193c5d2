"""Derivatives of the module that sums its inputs."""

from backpack.core.derivatives.flatten import FlattenDerivatives


class SumModuleDerivatives(FlattenDerivatives):
    """Derivatives of ``SumModule`` with respect to any of its inputs: the identity."""
