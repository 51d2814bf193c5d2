"""Base classes of all derivatives, of inputs, parameters and losses."""

from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.derivatives.loss_base import BaseLossDerivatives
from backpack.core.derivatives.parameter_base import BaseParameterDerivatives

__all__ = ["BaseDerivatives", "BaseLossDerivatives", "BaseParameterDerivatives"]
