"""Vector-Jacobian products (the L-operator), and the base of the other products."""

from typing import Any, Iterable, Iterator, List, Sequence, Tuple, Union

from torch import Tensor, stack, zeros_like
from torch.autograd import grad
from torch.autograd.function import once_differentiable

Tensors = Union[Tensor, Iterable[Tensor]]
"""One tensor, or several."""

_ONCE = once_differentiable(id).__code__


def as_tuple(tensors: Tensors) -> Tuple[Tensor, ...]:
    """Collect tensors in a tuple.

    Args:
        tensors: One tensor, or several.

    Returns:
        Tuple of the tensors.
    """
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def check_has_graph(tensors: Sequence[Tensor]) -> None:
    """Check that there is something to differentiate.

    Args:
        tensors: Tensors to be differentiated.

    Raises:
        ValueError: If none of the tensors has a computation graph.
    """
    if not any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "Expected a tensor with a computation graph to differentiate, but none "
            "requires a gradient. Was it computed under `torch.no_grad()`, or detached?"
        )


def check_match(vectors: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Check that a vector consists of one entry of equal shape for each tensor.

    Args:
        vectors: Entries of the vector.
        tensors: Tensors that prescribe the shapes.

    Raises:
        ValueError: If the numbers or the shapes differ.
    """
    got = [tuple(vector.shape) for vector in vectors]
    expected = [tuple(tensor.shape) for tensor in tensors]
    if got != expected:
        raise ValueError(
            f"Expected a vector with {len(expected)} entries of shapes {expected}, "
            f"got {len(got)} of shapes {got}."
        )


def check_twice(ys: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Check that no function on the way has a first derivative only.

    Autograd would take the second one for zero: what such a function computes in its
    backward pass leads to an error, but not to the inputs.

    Args:
        ys: Outputs.
        xs: Inputs.

    Raises:
        RuntimeError: If a function is marked with ``once_differentiable``.
    """
    for node in nodes_behind(y.grad_fn for y in ys):
        if _is_once(node) and leads_to((p for p, _ in node.next_functions), xs):
            raise RuntimeError(
                "trying to differentiate twice a function that was marked with "
                f"@once_differentiable: {node.name()}."
            )


def _is_once(node: Any) -> bool:
    """Tell whether a node is that of a function without a second derivative."""
    own = getattr(node, "_forward_cls", None)
    ways = [getattr(own, name, None) for name in ("backward", "vjp")]
    return any(getattr(way, "__code__", None) is _ONCE for way in ways)


def leads_to(nodes: Iterable[Any], xs: Sequence[Tensor]) -> bool:
    """Tell whether nodes of a graph lead to one of some tensors.

    Args:
        nodes: The nodes, ``None`` where there is none.
        xs: The tensors, leaves of the graph or not.

    Returns:
        Whether they do.
    """
    leaves, ends = set(map(id, xs)), {x.grad_fn for x in xs}
    return any(
        node in ends or id(getattr(node, "variable", None)) in leaves
        for node in nodes_behind(nodes)
    )


def nodes_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """List the nodes of a graph.

    Args:
        nodes: Where to begin, ``None`` where there is no node.

    Yields:
        These and all that they lead to, each once.
    """
    queue, seen = list(nodes), {None}
    while queue:
        node = queue.pop()
        if node not in seen:
            yield node
            seen.add(node)
            queue.extend(parent for parent, _ in node.next_functions)


def pull_back(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    ws: Sequence[Tensor],
    retain_graph: bool,
    create_graph: bool,
) -> Tuple[Tensor, ...]:
    """Multiply vectors with the transposed Jacobian; what plays no part gives zeros.

    Args:
        ys: Outputs, which may also be constants.
        xs: Inputs ``[*x]``, which may also be constants.
        ws: Vectors in the shapes of the outputs.
        retain_graph: Whether to keep the graph of the outputs.
        create_graph: Whether the products can be differentiated.

    Returns:
        Products, one ``[*x]`` for each input.

    Raises:
        ValueError: If the vectors do not match the outputs in number and shape.
    """
    check_match(ws, ys)
    pairs = [(y, w) for y, w in zip(ys, ws) if y.requires_grad]
    active = [i for i, x in enumerate(xs) if x.requires_grad]
    result = [zeros_like(x, requires_grad=False) for x in xs]
    if pairs and active:
        outputs, cotangents = zip(*pairs)
        options = {"retain_graph": retain_graph, "create_graph": create_graph}
        inputs = [xs[i] for i in active]
        products = grad(outputs, inputs, cotangents, allow_unused=True, **options)
        for i, product in zip(active, products):
            if product is not None:
                result[i] = product
    return tuple(result)


def pull_columns(
    ys: Tensors, xs: Tensors, columns: Iterable[Tensors], create_graph: bool = False
) -> List[Tensor]:
    """Multiply columns with the transposed Jacobian; what plays no part gives zeros.

    Args:
        ys: Outputs ``[*y]``, one tensor or several. Their graph is kept.
        xs: Inputs ``[*x]``, one tensor or several.
        columns: Columns ``[V, *y]``; for several outputs, one entry for each, V times.
        create_graph: Whether the products can be differentiated. Default: ``False``.

    Returns:
        Products, one ``[V, *x]`` for each input.
    """
    ys, xs = as_tuple(ys), as_tuple(xs)
    rows = []
    for column in columns:
        ws = [w.to(y.dtype) for w, y in zip(as_tuple(column), ys)]
        rows.append(pull_back(ys, xs, ws, True, create_graph))
    if not rows:
        return [x.new_zeros(0, *x.shape) for x in xs]
    return [stack(products) for products in zip(*rows)]


def L_op(
    ys: Tensors,
    xs: Tensors,
    ws: Tensors,
    retain_graph: bool = True,
    detach: bool = True,
) -> Tuple[Tensor, ...]:
    """Multiply vectors from the left with the Jacobian of outputs at inputs.

    Args:
        ys: Outputs, one tensor or several, computed from the inputs.
        xs: Inputs ``[*x]``, one tensor or several.
        ws: Vectors, one in the shape of each output.
        retain_graph: Whether to keep the computation graph of the outputs.
        detach: Whether the products are detached. If not, they can be differentiated.

    Returns:
        Products (∂y/∂x)ᵀ w, summed over outputs, one ``[*x]`` for each input. Inputs
        that play no part give zeros.

    Raises:
        ValueError: If no output has a computation graph, or if the vectors do not match
            the outputs in number and shape.
    """
    ys, xs, ws = as_tuple(ys), as_tuple(xs), as_tuple(ws)
    check_has_graph(ys)
    return pull_back(ys, xs, ws, retain_graph, create_graph=not detach)


def transposed_jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> Tuple[Tensor, ...]:
    """Multiply with the transposed Jacobian of ``f`` with respect to ``x``.

    Args:
        f: Outputs, one tensor or several, computed from the inputs.
        x: Inputs ``[*x]``, one tensor or several.
        v: Vectors, one in the shape of each output.
        retain_graph: Whether to keep the computation graph of the outputs.
        detach: Whether the products are detached. If not, they can be differentiated.

    Returns:
        Products (∂f/∂x)ᵀ v, one ``[*x]`` for each input, see :func:`L_op`.

    Raises:
        ValueError: If no output has a computation graph, or if the vectors do not match
            the outputs in number and shape.
    """
    return L_op(f, x, v, retain_graph=retain_graph, detach=detach)
