"""Derivatives of dropout, with the mask that was drawn in the forward pass."""

from torch import Tensor, ones_like
from torch.autograd import grad
from torch.nn import AlphaDropout, FeatureAlphaDropout, Module

from backpack.core.derivatives.elementwise import PiecewiseLinearDerivatives
from backpack.utils.hooks import message
from backpack.utils.state import may_look
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Grads, Layer

MASK = "_backpack_mask"
"""Attribute of a module that holds the scaled mask of its last call, ``[N, *in]``."""

UNKNOWN_MASK = (
    "The mask that {module} drew is not known any more: {reason}. Multiply with its "
    "Jacobian before the graph of the forward pass is freed (retain_graph=True keeps "
    "it), or call backpack.core.derivatives.dropout.store_mask(module) right after the "
    "forward pass."
)


def drawn_mask(module: Layer) -> Tensor:
    """Return the factor dz/dx of each element in the module's last call.

    In training mode, an input of value zero is zero in the output whether it was
    dropped or not. Its factor is known by the computation graph only, so the sources
    are, in this order: what :func:`store_mask` stored; the graph that connects
    ``module.output`` and ``module.input0``; their values, if no input is zero.

    Args:
        module: Dropout module of any kind, with stored input and output.

    Returns:
        Scaled mask of shape ``[N, *in]``; ones in evaluation mode.

    Raises:
        RuntimeError: If the mask cannot be recovered. Where values must not be looked
            at, those that are not determined are NaN.
    """
    if MASK in module.__dict__:
        return module.__dict__[MASK]
    x, z = module.input0, module.output
    if not module.training:
        return ones_like(x)
    if module.inplace:
        reason = "it has overwritten its input"
        raise RuntimeError(message(UNKNOWN_MASK, module=module, reason=reason))
    if x.requires_grad and z.requires_grad:
        try:
            (mask,) = grad(z, x, ones_like(z), retain_graph=True, allow_unused=True)
        except RuntimeError:  # the graph was freed
            mask = None
        if mask is not None:
            return mask
    alpha = isinstance(module, (AlphaDropout, FeatureAlphaDropout))
    if alpha or may_look(x, waits=True) and (x == 0).any():
        reason = "its graph was freed, and input and output do not determine it"
        raise RuntimeError(message(UNKNOWN_MASK, module=module, reason=reason))
    return (z / x).detach()


def store_mask(module: Layer) -> None:
    """Keep the mask of a dropout module's last call for later, if it drew one.

    Args:
        module: Dropout module of any kind, with stored input and output.
    """
    module.__dict__.pop(MASK, None)
    if module.training:
        module.__dict__[MASK] = drawn_mask(module)


class DropoutDerivatives(PiecewiseLinearDerivatives):
    """Derivatives of all dropout modules: by element, by channel, alpha dropout."""

    def df(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        """Return the scaled mask, see :func:`drawn_mask`.

        Args:
            module: Module with stored input and output.
            g_inp: Gradients of the loss with respect to the module's inputs.
            g_out: Gradients of the loss with respect to the module's outputs.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            First derivative of shape ``[N, *in]``.
        """
        return subsample(drawn_mask(module), subsampling=subsampling)

    def _restrict(self, module: Layer, subsampling: Subsampling = None) -> Module:
        restricted = super()._restrict(module, subsampling)
        if subsampling is not None:  # no graph connects the selected samples
            restricted.__dict__[MASK] = self.df(module, (), (), subsampling)
        return restricted
