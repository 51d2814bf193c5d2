"""Derivatives of the rectified linear unit."""

from backpack.core.derivatives.activations import ReLUDerivatives

__all__ = ["ReLUDerivatives"]
