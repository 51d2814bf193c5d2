"""Products with the generalized Gauss-Newton (GGN) matrix."""

from typing import List, Tuple

from torch import Tensor
from torch.autograd import grad
from torch.nn import Module, Parameter

from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op
from backpack.hessianfree.rop import R_op


def ggn_vector_product(
    loss: Tensor, output: Tensor, model: Module, v: List[Tensor]
) -> Tuple[Tensor, ...]:
    """Multiply a vector with the GGN of a loss, for a model's trainable parameters.

    Args:
        loss: Scalar, computed from the output and twice differentiable.
        output: Output of the model.
        model: Model. The GGN is that of its parameters ``[*p]`` that require a
            gradient, in the order of ``model.parameters()``.
        v: Vector, one entry in the shape of each of these parameters.

    Returns:
        Product G v, one ``[*p]`` for each of these parameters, see
        :func:`ggn_vector_product_from_plist`.

    Raises:
        ValueError: If the loss was not computed from this output, or if the entries of
            ``v`` do not match the parameters in number and shape.
    """
    trainable = [param for param in model.parameters() if param.requires_grad]
    return ggn_vector_product_from_plist(loss, output, trainable, v)


def ggn_vector_product_from_plist(
    loss: Tensor, output: Tensor, plist: List[Parameter], v: List[Tensor]
) -> Tuple[Tensor, ...]:
    """Multiply a vector with the GGN of a loss, for a list of parameters.

    G = Jᵀ H J with the output's Jacobian J with respect to the parameters, and the
    loss' Hessian H with respect to the output (Schraudolph, 2002). The computation
    graph is kept, so several products can be formed.

    Args:
        loss: Scalar, computed from the output and twice differentiable.
        output: Output of the model.
        plist: Parameters ``[*p]``.
        v: Vector, one entry in the shape of each parameter.

    Returns:
        Product G v, detached, one ``[*p]`` for each parameter. Parameters that play no
        part give zeros.

    Raises:
        ValueError: If the loss was not computed from this output, or if the entries of
            ``v`` do not match the parameters in number and shape.
    """
    plist = list(plist)  # which may be a generator
    J_v = R_op(output, plist, v)
    (grad_output,) = grad(loss, output, create_graph=True, allow_unused=True)
    if grad_output is None:
        raise ValueError(
            "Expected a loss that is computed from the given output, but it does not "
            "depend on this tensor. Pass the very tensor that went into the loss."
        )
    H_J_v = hessian_vector_product(loss, output, J_v, grad_params=grad_output)
    return L_op(output, plist, H_J_v)
