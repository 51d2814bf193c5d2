"""Derivatives of the leaky rectified linear unit."""

from backpack.core.derivatives.activations import LeakyReLUDerivatives

__all__ = ["LeakyReLUDerivatives"]
