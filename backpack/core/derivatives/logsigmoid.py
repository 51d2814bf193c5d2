"""Derivatives of the logistic sigmoid's logarithm."""

from backpack.core.derivatives.activations import LogSigmoidDerivatives

__all__ = ["LogSigmoidDerivatives"]
