"""Individual gradients, projected from both sides."""

from __future__ import annotations

from copy import copy
from numbers import Integral
from typing import Any, Mapping, MutableMapping, Sequence, Union

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from backpack.core.per_sample.base import PerSample
from backpack.core.per_sample.maps import projected
from backpack.extensions.firstorder.base import GradientReduction
from backpack.extensions.shards import Piece
from backpack.utils.errors import check_generator
from backpack.utils.hooks import message
from backpack.utils.subsampling import Selection, plain
from backpack.utils.types import Randomness, accumulator_dtype

Matrices = Union[Tensor, Sequence[Tensor]]

OTHER_PROJECTION = (
    "BatchProjectGrad: expected a positive number of rows, or a mapping from "
    "parameters to matrices, got {got!r}. Pass for instance BatchProjectGrad(16)."
)
MISSING = (
    "BatchProjectGrad: there are no matrices for a parameter of shape {shape}. Pass "
    "some for each trainable parameter, or a number to draw them."
)
OTHER_SHAPES = (
    "BatchProjectGrad: a parameter of shape {shape} is projected by {number} of real "
    "numbers, with {columns} columns, got {got}."
)
OTHER_MATRICES = (
    "BatchProjectGrad: processes have drawn different projections. Pass matrices, or a "
    "generator with the same seed in each process, where the same parameters are "
    "reached first."
)


def sides(shape: torch.Size) -> list[int]:
    """Tell how many columns the projections of a parameter have.

    Args:
        shape: The parameter's shape ``[*p]``.

    Returns:
        Length of the first axis, and of all others together; for a vector its length.
    """
    return [shape[0], shape[1:].numel()] if len(shape) > 1 else [shape.numel()]


class BatchProjectGrad(GradientReduction):
    """Individual gradients, projected from both sides (LoGra).

    Saved in ``grad_projected``, of shape ``[N, k_out, k_in]``: P_out Gₙ P_inᵀ, where Gₙ
    is the individual gradient (see :class:`~backpack.extensions.BatchGrad`) as a
    matrix: the parameter's first axis are its rows, all others its columns. Biases, and
    all parameters with less than two axes, are projected from one side: ``[N, k]``. For
    linear layers, convolutions without groups and embeddings, no gradient is formed;
    for other parameters, some samples' at a time (Choe et al., 2024, "What is your data
    worth to GPT?").
    """

    adds_up_from = None

    def __init__(
        self,
        projection: int | Mapping[Any, Matrices] = 16,
        subsampling: Selection = None,
        generator: Randomness = None,
    ):
        """Choose the projections.

        Args:
            projection: Number k of rows of random projections, with normal entries of
                variance 1/k. They are drawn when a parameter is first met, and kept, so
                that all batches share them. Or a mapping from each parameter to
                ``(P_out, P_in)``, for one with a single axis to ``P``. Default: ``16``.
            subsampling: Samples to consider, by index; the scale stays that of the full
                batch. Default: ``None`` for all.
            generator: Random number generator. Default: PyTorch's global one.

        Raises:
            ValueError: If the projection or the generator is anything else.
        """
        given: Any = plain(projection)
        is_number = isinstance(given, Integral) and not isinstance(given, bool)
        if not (isinstance(given, Mapping) or is_number and given > 0):
            raise ValueError(OTHER_PROJECTION.format(got=projection))
        check_generator(type(self).__name__, generator)
        super().__init__("grad_projected", subsampling=subsampling)
        self._projection, self._generator = given, generator
        self._drawn: MutableMapping[Tensor, list[Tensor]] = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: with each matrix the parameter it was drawn for."""
        return {**vars(self), "_drawn": list(self._drawn.items())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read what was pickled; parameters are known by who they are, as before."""
        vars(self).update(state, _drawn=WeakTensorKeyDictionary(state["_drawn"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchProjectGrad:
        """Copy it for the same parameters, which share their projections with it."""
        return copy(self)

    def matrices(self, param: Tensor) -> list[Tensor]:
        """Return the projections of a parameter; draw them if they are random and new.

        Args:
            param: The parameter, of shape ``[*p]``.

        Returns:
            ``[P_out, P_in]``; for a parameter with a single axis, or none, ``[P]``.

        Raises:
            ValueError: If there are none, or their shapes do not fit.
        """
        columns = sides(param.shape)
        if not isinstance(self._projection, Mapping):
            if param not in self._drawn:
                self._drawn[param] = [self._draw(size, param) for size in columns]
            return self._drawn[param]
        found = self._projection.get(param)
        if found is None:
            raise ValueError(message(MISSING, shape=param.shape))
        found = [found] if isinstance(found, Tensor) else list(found)
        real = all(isinstance(m, Tensor) and not m.is_complex() for m in found)
        got: list[Any] = [list(m.shape) for m in found] if real else found
        if not real or [shape[1:] for shape in got] != [[size] for size in columns]:
            number = "a matrix" if len(columns) == 1 else "two matrices"
            text = {"number": number, "columns": columns, "got": got}
            raise ValueError(message(OTHER_SHAPES, shape=param.shape, **text))
        return found

    def _draw(self, size: int, param: Tensor) -> Tensor:
        """Draw a matrix ``[k, size]``."""
        k, generator = int(self._projection), self._generator
        device = param.device if generator is None else generator.device
        dtype = accumulator_dtype(param.dtype)
        options: Any = {"generator": generator, "device": device, "dtype": dtype}
        return torch.randn(k, size, **options).to(param.device) / k**0.5

    def reduce_for(self, param: Tensor, gradients: PerSample) -> Tensor:  # noqa: D102
        dtype = accumulator_dtype(param.dtype)
        matrices = [m.to(param.device, dtype) for m in self.matrices(param)]
        return projected(self.select(gradients), matrices).individual()[0]

    def parts_for(self, param: Tensor, gradients: PerSample) -> Any:
        """Return what tells apart projections that were drawn.

        Args:
            param: The parameter.
            gradients: Its individual gradients.

        Returns:
            A number for each matrix; ``None`` if matrices were given.
        """
        if isinstance(self._projection, Mapping):
            return None
        return torch.stack([m.double().sum() for m in self.matrices(param)])

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        if not isinstance(self._projection, Mapping):
            # who has passed by a parameter has drawn other matrices for the next ones
            own = piece.required_parts(self)
            differs = not own.equal(piece.of_one(own)) and piece.rows is None
            is_other = own.new_tensor(float(differs or self._generator is None))
            if piece.sum(is_other, 1.0) > 0:  # in any process
                raise ValueError(OTHER_MATRICES)
        return piece.local(value, piece.weight)
