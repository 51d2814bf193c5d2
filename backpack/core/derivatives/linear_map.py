"""Derivatives of modules that are linear in their input."""

from typing import Any, List, Sequence, Tuple

from torch import Tensor, enable_grad
from torch.autograd import grad
from torch.nn.functional import pad as pad_tensor

from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.utils.hooks import name_module
from backpack.utils.types import Grads, Layer


class LinearMapDerivatives(BaseDerivatives):
    """Derivatives of a map that is affine in its input, and the same for each sample.

    Such as: averages, padding, selection, permutation, interpolation. The module is its
    own Jacobian, then, so that no rule is needed: all columns are samples of one
    large mini-batch.
    """

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:
        """Multiply each sample with the Jacobian.

        Args:
            module: Module with stored input and output.
            x: Tensor of shape ``[M, *in]`` for any number M of samples.

        Returns:
            Products of shape ``[M, *out]``, by default those of the module's own
            forward pass, which has to be overridden if it adds a constant.
        """
        return module.forward(x)

    def hessian_is_zero(self, module: Layer) -> bool:  # noqa: D102
        return True

    def jacobian_is_shared(self, module: Layer) -> bool:  # noqa: D102
        return True

    def _jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        products = self.linear_part(module, mat.flatten(0, 1))
        return products.reshape(len(mat), *module.output.shape)

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        columns = mat.flatten(0, 1)
        shape = (columns.shape[0], *module.input0.shape[1:])
        # the Jacobian does not depend on the values: no memory is needed for them
        x = module.input0.new_zeros(1).expand(shape).requires_grad_()
        with enable_grad():
            y = self.linear_part(module, x)
        (products,) = grad(y, x, columns.to(y.dtype))
        return products.unflatten(0, mat.shape[:2])


class FlattenDerivatives(LinearMapDerivatives):
    """Derivatives of :class:`torch.nn.Flatten`, ``Unflatten`` and ``Identity``.

    The Jacobian of each sample, as a matrix, is the identity.
    """

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        return self.reshape_like_input(mat, module)


class SumModuleDerivatives(FlattenDerivatives):
    """Derivatives of ``SumModule`` with respect to any of its inputs: the identity."""


class PermuteDerivatives(LinearMapDerivatives):
    """Derivatives of ``Permute``, which leaves the samples on axis 0."""


class ScaleModuleDerivatives(LinearMapDerivatives):
    """Derivatives of ``ScaleModule``, which does the same to a cotangent."""

    def _jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        return module.forward(mat)

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        return module.forward(mat)


class ZeroPad2dDerivatives(LinearMapDerivatives):
    """Derivatives of ``torch.nn.ZeroPad1d`` to ``3d``, ``ConstantPad1d`` to ``3d``."""

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        return pad_tensor(x, module.padding)  # with zeros instead of the constant


class PadDerivatives(LinearMapDerivatives):
    """Derivatives of ``Pad`` in every mode, as long as it adds no samples."""

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        self.no_pad_batch_axis(module)
        # with zeros instead of the constant
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


class SlicingDerivatives(LinearMapDerivatives):
    """Derivatives of ``Slicing``, as long as it keeps all samples."""

    def linear_part(self, module: Layer, x: Tensor) -> Tensor:  # noqa: D102
        self.no_slice_batch_axis(module)
        return module.forward(x)

    @staticmethod
    def no_slice_batch_axis(module: Layer) -> None:
        """Refuse to select samples.

        Args:
            module: Module with stored input.

        Raises:
            ValueError: If the module selects from axis 0.
        """
        first = module.slice_info
        first = first[0] if isinstance(first, tuple) else first
        whole = slice(None), slice(None, None, 1), slice(0, None)
        if not (first is Ellipsis or first in whole):
            raise ValueError(
                f"{name_module(module)} selects from axis 0, which holds the samples. "
                f"Expected a full slice (slice(None)) for this axis, got {first}."
            )


class AvgPoolNDDerivatives(LinearMapDerivatives):
    """Derivatives of :class:`torch.nn.AvgPool1d`, ``AvgPool2d``, ``AvgPool3d``."""

    def __init__(self, N: int):
        """Store the number of pooled axes.

        Args:
            N: Number of pooled axes.
        """
        self.N = N

    def check_parameters(self, module: Layer) -> None:
        """Accept every option.

        Args:
            module: Average pooling module.
        """

    def get_avg_pool_parameters(self, module: Layer) -> Tuple[Any, Any, Any]:
        """Return the geometry of the pooling windows.

        Args:
            module: Average pooling module.

        Returns:
            Stride, kernel size, padding.
        """
        return module.stride, module.kernel_size, module.padding


class AdaptiveAvgPoolNDDerivatives(AvgPoolNDDerivatives):
    """Derivatives of adaptive average pooling, for output sizes of all kinds.

    If the output size divides the input size, all pooling windows are alike.
    """

    def check_parameters(self, module: Layer) -> None:
        """Check that all pooling windows are alike.

        Args:
            module: Module with stored input and output.

        Raises:
            NotImplementedError: If the output size does not divide the input size.
        """
        sizes_in, sizes_out = self._sizes(module)
        if any(i % o for i, o in zip(sizes_in, sizes_out)):
            raise NotImplementedError(
                f"{name_module(module)} is no average pooling with a fixed window. "
                "Expected an input whose size is a multiple of the output size "
                f"{sizes_out}, got {sizes_in}. Choose another output size, or "
                f"torch.nn.AvgPool{self.N}d."
            )

    def get_avg_pool_parameters(
        self, module: Layer
    ) -> Tuple[List[int], List[int], List[int]]:
        """Return the geometry of the average pooling that does the same.

        Args:
            module: Module with stored input and output.

        Returns:
            Stride, kernel size, padding.
        """
        self.check_parameters(module)
        size = [i // o for i, o in zip(*self._sizes(module))]
        return size, list(size), [0] * self.N

    def _sizes(self, module: Layer) -> List[List[int]]:
        return [list(x.shape[-self.N :]) for x in (module.input0, module.output)]
