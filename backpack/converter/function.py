"""Module for any other function of tensors: the converter's last resort."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Dict, Sequence, Tuple, Union

from torch.fx.node import map_aggregate
from torch.nn import Module


class Placeholder:
    """Stands for a module input, or for the training flag, in an expression."""

    def __init__(self, name: Union[int, str]):
        """Store what it stands for.

        Args:
            name: Position of the input, or ``'training'``.
        """
        self.name = name

    def __repr__(self) -> str:
        """Describe the placeholder.

        Returns:
            What it stands for.
        """
        return f"input{self.name}" if isinstance(self.name, int) else self.name


@dataclass(eq=False, repr=False)
class Call:
    """Call of a function or method, whose arguments may contain further calls.

    Attributes:
        target: A function, or the name of a method of the first argument.
        args: Positional arguments. They may contain, at any depth of tuples, lists,
            dictionaries and slices, a :class:`Placeholder` or :class:`Call`.
        kwargs: Keyword arguments, likewise.
    """

    target: Any
    args: Sequence[Any]
    kwargs: Dict[str, Any]

    def evaluate(self, values: Dict[Any, Any]) -> Any:
        """Compute the value.

        Args:
            values: Values of the placeholders by name, and of calls inside that were
                evaluated already. The value is added.

        Returns:
            What the function returns.
        """

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                return values[leaf.name]
            return leaf.evaluate(values) if isinstance(leaf, Call) else leaf

        if self not in values:  # it may occur several times
            args = map_aggregate(self.args, fill)
            kwargs = map_aggregate(self.kwargs, fill)
            if isinstance(self.target, str):
                values[self] = getattr(args[0], self.target)(*args[1:], **kwargs)
            else:
                values[self] = self.target(*args, **kwargs)
        return values[self]

    def __getstate__(self) -> Dict[str, Any]:
        """Replace a function by module and name, under which pickle may not find it.

        PyTorch makes functions like ``max_pool2d`` inside of another function. Their
        qualified names lead nowhere.

        Returns:
            The attributes.
        """
        state = self.__dict__.copy()
        if "<locals>" in getattr(self.target, "__qualname__", ""):
            state["target"] = (self.target.__module__, self.target.__name__)
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`.

        Args:
            state: The attributes.
        """
        self.__dict__.update(state)
        if isinstance(self.target, tuple):
            module, name = self.target
            self.target = getattr(import_module(module), name)

    def __repr__(self) -> str:
        """Describe the call like source code.

        Returns:
            Function and arguments.
        """
        name = getattr(self.target, "__name__", self.target)
        kwargs = [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"{name}({', '.join([*map(repr, self.args), *kwargs])})"


class FunctionModule(Module):
    """Evaluate an expression of functions and methods on the inputs.

    There are no derivatives for it but the generic ones that autograd provides. Inputs
    that depend on the model's input come first. Parameters and buffers of the model,
    which have no batch axis, follow.
    """

    def __init__(self, expression: Call, num_data: int):
        """Store the expression.

        Args:
            expression: What to evaluate. An integer names a module input,
                ``'training'`` the module's training flag.
            num_data: How many inputs depend on the model's input.
        """
        super().__init__()
        self.expression = expression
        self.num_data = num_data

    def forward(self, *input: Any) -> Union[Any, Tuple[Any, ...]]:
        """Evaluate the expression.

        Args:
            input: Values of the expression's inputs.

        Returns:
            What the expression's function returns.
        """
        values: Dict[Any, Any] = {"training": self.training, **dict(enumerate(input))}
        return self.expression.evaluate(values)

    def extra_repr(self) -> str:
        """Describe the expression for the module's ``repr``.

        Returns:
            The expression.
        """
        return repr(self.expression)
