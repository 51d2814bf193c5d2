"""Conversion between a flat vector and a list of parameter-shaped tensors."""

from typing import Iterable, List

from torch import Tensor


def vector_to_parameter_list(vec: Tensor, parameters: Iterable[Tensor]) -> List[Tensor]:
    """Cut a vector into tensors that are shaped like the parameters.

    Args:
        vec: Vector ``[D]``, where D is the number of elements of all parameters.
        parameters: Parameters, or other tensors, that prescribe the shapes ``[*p]``.

    Returns:
        Views of ``vec``, one for each parameter, with that parameter's shape.

    Raises:
        TypeError: If ``vec`` is no tensor.
        ValueError: If ``vec`` is no vector with as many elements as the parameters.
    """
    if not isinstance(vec, Tensor):
        raise TypeError(f"Expected a torch.Tensor for vec, got {type(vec).__name__}.")
    shapes = [parameter.shape for parameter in parameters]
    sizes = [shape.numel() for shape in shapes]
    if vec.shape != (sum(sizes),):
        raise ValueError(
            f"Expected a vector [{sum(sizes)}] (the number of parameter elements), "
            f"got a tensor of shape {list(vec.shape)}."
        )
    return [part.view(shape) for part, shape in zip(vec.split(sizes), shapes)]
