"""Products with a curvature matrix, composed of one step per module call.

An operator stands for the matrix at one place in the graph, the output of a call. To
multiply it with a vector, the vector is pushed forward along all ways to the losses,
multiplied with their Hessians, and pulled back, where each step adds its residual. Ways
that branch and meet again need no further care, then.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from backpack.core.linearization import Columns, Linearization, Snapshot
from backpack.extensions.curvature import Curvature
from backpack.utils.disable import disable
from backpack.utils.types import MatProd, undisturbed
from backpack.utils.unsqueeze import flatten

_BORN = count()

OPAQUE = (
    "{ext}: an output is used several times, and what is backpropagated to it is a "
    "plain function, so that products of the branches are lost. Return what "
    "`super().backpropagate(...)` returns."
)


class Step:
    """A call: products with its Jacobian, and with its residual.

    Attributes:
        linear: The call, linearized in its inputs.
        output: Operator at its output.
        snapshot: What it is computed from.
    """

    def __init__(self, linear: Linearization, output: Operator, curv_type: str):
        """Store the call.

        Args:
            linear: The call, linearized in its inputs.
            output: Operator at its output.
            curv_type: Which curvature matrix is multiplied with.
        """
        self.linear, self.output = linear, output
        self.snapshot = Snapshot(linear.module)
        required = Curvature.require_residual(curv_type)
        self._residual: Callable[[Columns], Columns] | None = None
        if required and not linear.residual_is_zero:
            self._residual = make_residual(linear, curv_type)

    def pull(self, columns: Tensor, tangents: Columns) -> Columns:
        """Pull columns back, and add the residual's products with what was pushed.

        Args:
            columns: Columns ``[V, N, *out]``.
            tangents: Columns ``[V, N, *in]`` that were pushed through each input.

        Returns:
            Columns ``[V, N, *in]`` at each input.
        """
        pulled = self.linear.jac_t(columns)
        if self._residual is None:
            return pulled
        return [a + b for a, b in zip(pulled, self._residual(tangents))]


def make_residual(
    linear: Linearization, curv_type: str
) -> Callable[[Columns], Columns]:
    """Make the product with a residual, modified as a curvature matrix wants it.

    A residual that is not diagonal is modified by its eigenvalues.

    Args:
        linear: A call, linearized in its inputs.
        curv_type: Name of the curvature matrix.

    Returns:
        The product.
    """
    if not Curvature.is_pch(curv_type):
        return linear.residual
    if linear.residual_is_diagonal:
        diagonal = Curvature.modify_residual(linear.residual_diagonal(), curv_type)
        return lambda tangents: [diagonal * tangents[0]]
    eigenvalues, eigenvectors = torch.linalg.eigh(linear.residual_matrices())
    modified = Curvature.modify_residual(eigenvalues, curv_type)
    matrices = (eigenvectors * modified.unsqueeze(1)) @ eigenvectors.mT

    def product(tangents: Columns) -> Columns:
        flat = torch.cat([flatten(t, 2) for t in linear.filled(tangents)], dim=2)
        flat = flat.to(matrices.dtype)  # under autocast, inputs have any
        return linear.split(torch.einsum("nij,vnj->vni", matrices, flat))

    return product


class Operator:
    """The curvature matrix at a call's output, as a function of columns.

    Attributes:
        uses: Steps that consume the output, and as which of their inputs.
        functions: Products with matrices that are known, the losses' Hessians, and
            what they are computed from; ``None`` for a function of a user.
    """

    def __init__(
        self,
        uses: Sequence[tuple[Step, int]] = (),
        functions: Sequence[tuple[MatProd, Snapshot | None]] = (),
    ):
        """Store what the matrix consists of.

        Args:
            uses: Steps that consume the output, and as which of their inputs.
            functions: Products with matrices that are known, and what they are
                computed from.
        """
        self.uses, self.functions = list(uses), list(functions)
        self._born = next(_BORN)  # those closer to the loss are older

    @classmethod
    def wrap(cls, function: Any) -> Operator:
        """Make an operator of any function.

        Args:
            function: Operator, or function that maps ``[V, N, *]`` to the same shape.

        Returns:
            The operator.
        """
        if isinstance(function, Operator):
            return function
        return cls(functions=[(function, None)])

    def merge(self, other: Operator, name: str) -> Operator:
        """Combine what two consumers of an output pull back to it.

        Args:
            other: The other's operator.
            name: Name of the extension.

        Returns:
            Their combination.

        Raises:
            NotImplementedError: If one of them is a plain function.
        """
        uses, functions = self.uses + other.uses, self.functions + other.functions
        if any(snapshot is None for _, snapshot in functions):
            raise NotImplementedError(OPAQUE.format(ext=name))
        return Operator(uses, functions)

    def check(self, ext: str, name: str) -> None:
        """Check that nothing was modified that the matrix is computed from.

        Args:
            ext: Name of the extension.
            name: Name of the parameter whose quantity needs the matrix.
        """
        for operator in self._towards_losses():
            snapshots = [snapshot for _, snapshot in operator.functions]
            snapshots += [step.snapshot for step, _ in operator.uses]
            for snapshot in filter(None, snapshots):
                snapshot.check(ext, name)

    def __call__(self, mat: Tensor) -> Tensor:
        """Multiply with the matrix.

        Args:
            mat: Columns ``[V, N, *]``.

        Returns:
            Columns of the same shape.
        """
        with torch.inference_mode(False), torch.no_grad():
            with disable(), undisturbed():
                return self._multiply(mat.clone() if mat.is_inference() else mat)

    def _multiply(self, mat: Tensor) -> Tensor:
        order = self._towards_losses()
        tangents: dict[Operator, Tensor] = {self: mat}
        fed: dict[Step, Columns] = {}
        into: dict[Operator, list[Step]] = {operator: [] for operator in order}
        for operator in order:
            for step in into[operator]:
                pushed = step.linear.jac(fed[step])
                known = tangents.get(operator)
                tangents[operator] = pushed if known is None else known + pushed
            for step, slot in operator.uses:
                if step not in fed:
                    fed[step] = [None] * len(step.linear.positions)
                    into[step.output].append(step)
                fed[step][slot] = tangents[operator]

        pulled: dict[Step, Columns] = {}
        for operator in reversed(order):
            parts = [function(tangents[operator]) for function, _ in operator.functions]
            parts += [pulled[step][slot] for step, slot in operator.uses]
            product = sum(parts[1:], start=parts[0])
            for step in into[operator]:
                pulled[step] = step.pull(product, fed[step])
        return product

    def _towards_losses(self) -> list[Operator]:
        found, queue = {self}, [self]
        while queue:
            for step, _ in queue.pop().uses:
                if step.output not in found:
                    found.add(step.output)
                    queue.append(step.output)
        return sorted(found, key=lambda operator: operator._born, reverse=True)
