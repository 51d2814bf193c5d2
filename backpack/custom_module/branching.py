"""Modules for computation graphs that branch: feed several modules, then merge."""

from typing import Any, Optional, OrderedDict, Tuple, Union

from torch import Tensor
from torch.nn import Module


class SumModule(Module):
    """Sum of all inputs."""

    def forward(self, *input: Tensor) -> Tensor:
        """Sum all inputs.

        Args:
            input: Tensors of the same shape ``[N, *]``.

        Returns:
            Their sum, of shape ``[N, *]``.
        """
        return sum(input[1:], start=input[0])


class _Branch(Module):
    """Feed the same input to every child."""

    def __init__(self, *args: Union[OrderedDict[str, Module], Module]):
        """Use the given modules as branches.

        Args:
            args: The branches, or one ordered dictionary of named branches.
        """
        super().__init__()
        named: Any = dict(enumerate(args))
        if len(args) == 1 and isinstance(args[0], dict):
            named = args[0]
        for name, module in named.items():
            self.add_module(str(name), module)

    def forward(self, input: Tensor) -> Tuple[Any, ...]:
        """Evaluate all branches.

        Args:
            input: What every branch gets, of shape ``[N, *]``.

        Returns:
            The outputs of the branches, in order.
        """
        return tuple(module(input) for module in self.children())


class Parallel(Module):
    """Feed the same input to several modules and merge what they return.

    With the default merge module, ``Parallel(Identity(), block)`` is a residual block.
    """

    def __init__(
        self,
        *args: Union[OrderedDict[str, Module], Module],
        merge_module: Optional[Module] = None,
    ):
        """Use the given modules as branches.

        Args:
            args: The branches, or one ordered dictionary of named branches.
            merge_module: Gets the outputs of all branches as positional arguments.
                Default: A :class:`SumModule`.
        """
        super().__init__()
        self.branch = _Branch(*args)
        self.merge = SumModule() if merge_module is None else merge_module

    def forward(self, input: Tensor) -> Tensor:
        """Evaluate all branches and merge their outputs.

        Args:
            input: What every branch gets, of shape ``[N, *]``.

        Returns:
            What the merge module makes of the outputs, of shape ``[N, *]``.
        """
        return self.merge(*self.branch(input))
