"""Derivatives of the module that pads its input."""

from typing import Sequence

from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from backpack.core.derivatives.linear_map import LinearMapDerivatives
from backpack.utils.hooks import name_module
from backpack.utils.types import Layer


class PadDerivatives(LinearMapDerivatives):
    """Derivatives of ``Pad`` in every mode, as long as it adds no samples."""

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:
        """Pad with zeros instead of the constant, see the overridden method.

        Args:
            module: Module with stored input and output.
            x: Tensor of shape ``[M, *in]``.

        Returns:
            Padded tensor of shape ``[M, *out]``.
        """
        self.no_pad_batch_axis(module)
        return pad_tensor(x, module.pad, mode=module.mode)

    @staticmethod
    def no_pad_batch_axis(module: Layer) -> None:
        """Refuse to add samples.

        Args:
            module: Module with stored input.

        Raises:
            ValueError: If the module pads axis 0.
        """
        if len(module.pad) >= 2 * module.input0.dim():
            raise ValueError(
                f"{name_module(module)} pads axis 0, which holds the samples. Expected "
                f"at most {2 * (module.input0.dim() - 1)} sizes for an input of shape "
                f"{list(module.input0.shape)}, got pad={tuple(module.pad)}."
            )

    @staticmethod
    def unpad(tensor: Tensor, pad: Sequence[int], mode: str, value: float) -> Tensor:
        """Remove what was added by constant padding.

        Args:
            tensor: Padded tensor of shape ``[*, *out]``.
            pad: Sizes as in :func:`torch.nn.functional.pad`, last axis first.
            mode: Mode of the padding.
            value: Value that takes the place of what a negative size had removed.

        Returns:
            Tensor of shape ``[*, *in]``.

        Raises:
            NotImplementedError: If the padding was not constant.
        """
        if mode != "constant":
            raise NotImplementedError(
                f"Pad: only constant padding can be removed, got mode={mode!r}. Use "
                "mode='constant'."
            )
        return pad_tensor(tensor, [-size for size in pad], mode=mode, value=value)
