"""Jacobian-vector products (the R-operator)."""

from typing import Tuple

from torch import Tensor, arange, zeros_like

from backpack.hessianfree.lop import (
    Tensors,
    as_tuple,
    check_has_graph,
    check_twice,
    pull_back,
)


def R_op(
    ys: Tensors,
    xs: Tensors,
    vs: Tensors,
    retain_graph: bool = True,
    detach: bool = True,
) -> Tuple[Tensor, ...]:
    """Multiply vectors from the right with the Jacobian of outputs at inputs.

    Needs no forward mode: w ↦ Jᵀ w is linear, so pulling v back through it gives J v
    (Townsend, "A new trick for calculating Jacobian vector products", 2017).

    Args:
        ys: Outputs ``[*y]``, one tensor or several, computed from the inputs.
        xs: Inputs, one tensor or several.
        vs: Vectors, one in the shape of each input.
        retain_graph: Whether to keep the computation graph of the outputs.
        detach: Whether the products are detached. If not, they can be differentiated.

    Returns:
        Products (∂y/∂x) v, summed over inputs, one ``[*y]`` for each output. Outputs
        that do not depend on the inputs give zeros.

    Raises:
        ValueError: If no output has a computation graph, or if the vectors do not match
            the inputs in number and shape.
        RuntimeError: If a function on the way can be differentiated once only.
    """
    ys, xs, vs = as_tuple(ys), as_tuple(xs), as_tuple(vs)
    check_has_graph(ys)
    check_twice(ys, xs)
    ws = tuple(_some(y).requires_grad_() for y in ys)
    gs = pull_back(ys, xs, ws, retain_graph, create_graph=True)
    return pull_back(gs, ws, vs, retain_graph=not detach, create_graph=not detach)


def jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> Tuple[Tensor, ...]:
    """Multiply with the Jacobian of ``f`` with respect to ``x``.

    Args:
        f: Outputs ``[*f]``, one tensor or several, computed from the inputs.
        x: Inputs, one tensor or several.
        v: Vectors, one in the shape of each input.
        retain_graph: Whether to keep the computation graph of the outputs.
        detach: Whether the products are detached. If not, they can be differentiated.

    Returns:
        Products (∂f/∂x) v, one ``[*f]`` for each output, see :func:`R_op`.

    Raises:
        ValueError: If no output has a computation graph, or if the vectors do not match
            the inputs in number and shape.
    """
    return R_op(f, x, v, retain_graph=retain_graph, detach=detach)


def _some(y: Tensor) -> Tensor:
    """Make a vector at which to differentiate what is linear in it.

    Not zero, where the implementation of some, like ``logcumsumexp``, has no slope.
    """
    numbers = arange(y.numel(), device=y.device).cos() + 1.5
    return zeros_like(y, requires_grad=False) + numbers.to(y.dtype).view(y.shape)
