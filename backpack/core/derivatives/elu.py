"""Derivatives of the exponential linear unit."""

from backpack.core.derivatives.activations import ELUDerivatives

__all__ = ["ELUDerivatives"]
