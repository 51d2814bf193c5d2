"""Hessian-vector products."""

from typing import Optional, Tuple

from torch import Tensor, ones_like

from backpack.hessianfree import lop


def hessian_vector_product(
    f: Optional[Tensor],
    params: lop.Tensors,
    v: lop.Tensors,
    grad_params: Optional[lop.Tensors] = None,
    detach: bool = True,
) -> Tuple[Tensor, ...]:
    """Multiply a vector with the Hessian of a scalar (Pearlmutter, 1994).

    The computation graph is kept, so several products can be formed.

    Args:
        f: Scalar, computed from the parameters and twice differentiable. ``None`` will
            do if ``grad_params`` has a graph.
        params: Parameters ``[*p]``, one tensor or several.
        v: Vector, one entry in the shape of each parameter.
        grad_params: Gradient of ``f`` with respect to the parameters, computed with
            ``create_graph=True``, if it is known already. Saves its computation. If
            it has no graph, it is computed again.
        detach: Whether the product is detached. If not, it can be differentiated.

    Returns:
        Product (∂²f/∂params²) v, one ``[*p]`` for each parameter. Parameters that play
        no part give zeros.

    Raises:
        ValueError: If ``f`` is no scalar, or if the entries of ``v`` or
            ``grad_params`` do not match the parameters in number and shape.
        RuntimeError: If a function on the way can be differentiated once only.
    """
    params, v = lop.as_tuple(params), lop.as_tuple(v)
    gradient = params if grad_params is None else lop.as_tuple(grad_params)
    # A gradient without graph is that of a linear f, or was detached by mistake.
    has_graph = grad_params is not None and any(g.requires_grad for g in gradient)
    if f is None and not has_graph:
        raise ValueError(
            "Expected a scalar f, got None. It may be left out if grad_params is "
            "given, computed with `create_graph=True`."
        )
    if f is not None and f.numel() != 1:
        raise ValueError(
            f"Expected a scalar f, got shape {list(f.shape)}. Reduce it, for example "
            "with `f.sum()`."
        )
    lop.check_match(v, params)
    lop.check_match(gradient, params)
    if f is not None:
        lop.check_twice([f], params)
        if not has_graph:
            lop.check_has_graph([f])
            ones = ones_like(f)
            gradient = lop.pull_back([f], params, [ones], True, create_graph=True)
    return lop.pull_back(gradient, params, v, True, create_graph=not detach)
