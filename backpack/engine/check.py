"""``check=True``: do individual gradients add up to the gradient?"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from backpack.engine.graph import describe

CHECK_FAILED = (
    "check=True: the individual gradients do not add up to the gradient of {names}. "
    "The parameter is used where extensions can't see it. Use it only inside of "
    "extended modules, in operations of PyTorch."
)


class Check:
    """Compares the sum of individual gradients with the gradient.

    What is zero in exact arithmetic is not zero in the computer's: differences are
    compared with the size of the terms that were added up.
    """

    def __init__(self, backward_pass: Any):
        """Start with nothing.

        Args:
            backward_pass: The backward pass that is running.
        """
        self._sums: Dict[Tensor, Tensor] = {}
        self._sizes: Dict[Tensor, float] = {}
        self._gradients: Dict[Tensor, Tensor] = {}
        self._handles: List[RemovableHandle] = []

    def add(self, turn: Any) -> None:
        """Add up the individual gradients of parameters.

        Args:
            turn: The parameters' turn.
        """
        for param, product in turn.gradients().items():
            individual = product.individual()[0].detach()
            self._sums[param] = individual.sum(0)
            self._sizes[param] = turn.size_of_terms()
            receive = partial(self._gradients.__setitem__, param)
            self._handles.append(param.register_hook(receive))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def compare(self) -> None:
        """Compare.

        Raises:
            RuntimeError: If sums and gradients differ.
        """
        wrong = [
            param
            for param, gradient in self._gradients.items()
            if not _close(self._sums[param], gradient, self._sizes[param])
        ]
        if wrong:
            raise RuntimeError(CHECK_FAILED.format(names=describe(wrong)))


def _close(result: Tensor, expected: Tensor, size: float) -> bool:
    """Compare up to rounding errors; NaN and infinity equal themselves."""
    expected = expected.to_dense() if expected.is_sparse else expected
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    scale = max(scale, size)
    return torch.allclose(
        result.to(expected.dtype), expected, tolerance, tolerance * scale, True
    )
