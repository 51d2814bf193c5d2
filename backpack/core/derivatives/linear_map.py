"""Derivatives of modules without parameters that are linear in their input."""

from torch import Tensor, enable_grad
from torch.autograd import grad

from backpack.core.derivatives.input_base import BaseDerivatives
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
        return self.reshape_like_input(products, module)
