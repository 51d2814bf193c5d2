"""Module for scaling by a constant, the counterpart of ``2.0 * tensor``."""

import operator
from typing import Any, Callable, Optional, Tuple

from torch import Tensor
from torch.nn import Module


class ScaleModule(Module):
    """Multiply a tensor with a constant."""

    def __init__(
        self,
        weight: float = 1.0,
        *,
        written_as: Optional[Tuple[Callable, Any]] = None,
    ):
        """Store the factor.

        Args:
            weight: The factor, no parameter. Default: ``1.0``.
            written_as: Function and number with which a program computes that, like
                ``(operator.truediv, 3)``: the result is the program's to the last
                digit, and integers stay what they are. Default: a product.

        Raises:
            ValueError: If the factor is not a float.
        """
        super().__init__()
        if not isinstance(weight, float):
            raise ValueError(
                f"ScaleModule expects a float as weight, got {weight!r} of type "
                + f"{type(weight).__name__}. Pass float(weight)."
            )
        self.weight = weight
        self.written_as = written_as or (operator.mul, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Scale the input.

        Args:
            input: Tensor of shape ``[N, *]``.

        Returns:
            Scaled tensor of shape ``[N, *]``.
        """
        function, number = self.written_as
        return function(input, number)

    def extra_repr(self) -> str:
        """Describe the options for the module's ``repr``.

        Returns:
            The factor.
        """
        return f"weight={self.weight}"
