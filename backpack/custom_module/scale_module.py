"""Module for scaling by a constant, the counterpart of ``2.0 * tensor``."""

from torch import Tensor
from torch.nn import Module


class ScaleModule(Module):
    """Multiply a tensor with a constant."""

    def __init__(self, weight: float = 1.0):
        """Store the factor.

        Args:
            weight: The factor, no parameter. Default: ``1.0``.

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

    def forward(self, input: Tensor) -> Tensor:
        """Scale the input.

        Args:
            input: Tensor of shape ``[N, *]``.

        Returns:
            Scaled tensor of shape ``[N, *]``.
        """
        return input * self.weight

    def extra_repr(self) -> str:
        """Describe the options for the module's ``repr``.

        Returns:
            The factor.
        """
        return f"weight={self.weight}"
