"""Derivatives of maximum pooling over one to three axes."""

from typing import Tuple

from torch import Tensor
from torch.nn import functional

from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Grads, Layer


class MaxPoolNDDerivatives(BaseDerivatives):
    """Derivatives of :class:`torch.nn.MaxPool1d`, ``MaxPool2d``, ``MaxPool3d``.

    Each output is one of the inputs: columns are gathered from, or added at, the
    positions of the maxima.
    """

    def __init__(self, N: int):
        """Store the number of pooled axes.

        Args:
            N: Number of pooled axes.
        """
        self.N = N

    def hessian_is_zero(self, module: Layer) -> bool:  # noqa: D102
        return True

    def get_pooling_idx(self, module: Layer, subsampling: Subsampling = None) -> Tensor:
        """Find the positions of the maxima.

        Args:
            module: Module with stored input.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            Positions in the flattened pooled axes, of the output's shape.
        """
        x = subsample(module.input0.detach(), subsampling=subsampling)
        return self._pool(module, x)[1]

    def _pool(self, module: Layer, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Pool.

        Args:
            module: Maximum pooling module.
            x: Input of shape ``[N, *in]``.

        Returns:
            Maxima and their positions, both of shape ``[N, *out]``.
        """
        pool = getattr(functional, f"max_pool{self.N}d")
        options = module.stride, module.padding, module.dilation, module.ceil_mode
        return pool(x, module.kernel_size, *options, return_indices=True)

    def _columns_idx(self, module: Layer, mat: Tensor) -> Tensor:
        """Repeat the positions for all columns.

        Args:
            module: Module with stored input.
            mat: Matrix with V columns.

        Returns:
            Positions of shape ``[V, N, *, T]``, where T are all positions of the
            output.
        """
        idx = self.get_pooling_idx(module).flatten(start_dim=-self.N)
        return idx.expand(mat.shape[0], *idx.shape)

    def _jac_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        columns = mat.flatten(start_dim=-self.N)
        products = columns.gather(-1, self._columns_idx(module, mat))
        return self.reshape_like_output(products, module)

    def _jac_t_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads, mat: Tensor
    ) -> Tensor:
        columns = mat.flatten(start_dim=-self.N)
        positions = module.input0.shape[-self.N :].numel()
        products = mat.new_zeros(*columns.shape[:-1], positions)
        products = products.scatter_add(-1, self._columns_idx(module, mat), columns)
        return self.reshape_like_input(products, module)


class AdaptiveMaxPoolNDDerivatives(MaxPoolNDDerivatives):
    """Derivatives of maximum pooling to a given output size."""

    def _pool(self, module: Layer, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: D102
        pool = getattr(functional, f"adaptive_max_pool{self.N}d")
        return pool(x, module.output_size, return_indices=True)
