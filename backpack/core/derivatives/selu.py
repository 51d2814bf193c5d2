"""Derivatives of the scaled exponential linear unit."""

from backpack.core.derivatives.activations import SELUDerivatives

__all__ = ["SELUDerivatives"]
