"""Module for padding, the counterpart of ``torch.nn.functional.pad``."""

from typing import Sequence

from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad as torch_pad


class Pad(Module):
    """Pad the trailing axes of a tensor."""

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0):
        """Store what to pad. The arguments are those of ``torch.nn.functional.pad``.

        Args:
            pad: Pairs of the amounts before and after, the last axis first.
            mode: Padding mode. Default: ``'constant'``.
            value: Fill value of the constant mode. Default: ``0.0``.
        """
        super().__init__()
        self.pad = tuple(pad)
        self.mode = mode
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        """Pad the input.

        Args:
            input: Tensor of shape ``[N, *]``.

        Returns:
            Padded tensor of shape ``[N, *padded]``.
        """
        return torch_pad(input, self.pad, mode=self.mode, value=self.value)

    def extra_repr(self) -> str:
        """Describe the options for the module's ``repr``.

        Returns:
            Padding, mode and value.
        """
        return f"pad={self.pad}, mode={self.mode!r}, value={self.value}"
