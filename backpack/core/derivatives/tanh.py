"""Derivatives of the hyperbolic tangent."""

from backpack.core.derivatives.activations import TanhDerivatives

__all__ = ["TanhDerivatives"]
