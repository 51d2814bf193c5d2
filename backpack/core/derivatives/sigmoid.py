"""Derivatives of the logistic sigmoid."""

from backpack.core.derivatives.activations import SigmoidDerivatives

__all__ = ["SigmoidDerivatives"]
