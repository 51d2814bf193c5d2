"""A table of what a backward pass has left on a model's parameters."""

from html import escape
from typing import Any, List, Tuple

from torch import Tensor
from torch.nn import Module

from backpack.extensions.firstorder.batch_factors import FactoredGradients

_HEADER = ("parameter", "field", "shape", "bytes")


def summary(model: Module) -> "Summary":
    """List what is saved on a model's parameters.

    Args:
        model: Any module.

    Returns:
        A table, to be printed; a notebook shows it as HTML.

    Example:
        >>> from torch import rand
        >>> from torch.nn import Linear
        >>> from backpack import backpack, extend
        >>> from backpack.extensions import BatchGrad
        >>> model = extend(Linear(3, 2))
        >>> with backpack(BatchGrad()):
        ...     model(rand(5, 3)).sum().backward()
        >>> print(summary(model))
        parameter  field       shape      bytes
        weight     grad_batch  [5, 2, 3]    120
        bias       grad_batch  [5, 2]        40
    """
    return Summary(model)


class Summary:
    """A row for each parameter and each field that is saved on it.

    Attributes:
        rows: Name of the parameter, field, shapes of its tensors, and bytes in memory.
            A function, which may hold any tensors, has neither.
    """

    def __init__(self, model: Module):
        """Collect the rows.

        Args:
            model: Any module.
        """
        self.rows: List[Tuple[str, str, str, int]] = []
        for name, param in model.named_parameters():
            for field, value in vars(param).items():
                tensors = [x for x in _leaves(value) if isinstance(x, Tensor)]
                if field.startswith("_") or not (tensors or callable(value)):
                    continue
                shapes = ", ".join(str(list(x.shape)) for x in tensors) or "function"
                size = sum(x.numel() * x.element_size() for x in tensors)
                self.rows.append((name, field, shapes, size))

    def __repr__(self) -> str:
        """Return the table.

        Returns:
            The table, in lines.
        """
        table = [_HEADER, *self.rows]
        widths = [max(len(str(row[i])) for row in table) for i in range(len(_HEADER))]
        return "\n".join(
            "  ".join(
                str(cell).rjust(width) if cell is row[-1] else str(cell).ljust(width)
                for cell, width in zip(row, widths)
            )
            for row in table
        )

    def _repr_html_(self) -> str:
        """Return the table for notebooks.

        Returns:
            The table in HTML.
        """
        rows = zip("h" + "d" * len(self.rows), [_HEADER, *self.rows])
        cells = [
            "".join(f"<t{tag}>{escape(str(c))}</t{tag}>" for c in row)
            for tag, row in rows
        ]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _leaves(value: Any) -> List[Any]:
    if isinstance(value, FactoredGradients):
        return value.tensors()
    if isinstance(value, (list, tuple)):
        return [leaf for entry in value for leaf in _leaves(entry)]
    return [value]
