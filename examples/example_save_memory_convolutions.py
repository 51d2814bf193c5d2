"""How much memory convolutions need.

Textbooks turn a convolution into a matrix product: "unfolding" copies, for each
position of the kernel, the part of the image underneath it. Second-order quantities of
the kernel multiply what is pulled back, V columns for each sample, with that unfolded
image. A straightforward implementation copies it once more for each column, which takes
a lot of memory.

For that reason, programs may switch between two algorithms:

    from backpack.core.derivatives.convnd import weight_jac_t_save_memory

    with weight_jac_t_save_memory(save_memory=True):
        loss.backward()

The switch still exists, so that these programs run. In this version it has nothing left
to do: no product with a convolution's kernel copies the unfolded input for each column.
You learn how to convince yourself, by a look at every tensor that PyTorch makes during
the backward pass: the largest one is compared with the size that the copies would have.
"""

from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import Tensor
from torch.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, ReLU, Sequential
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.extensions import BatchDiagGGNExact, DiagGGNExact, SqrtGGNExact
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist

EXTENSIONS = (DiagGGNExact, BatchDiagGGNExact, SqrtGGNExact)


class LargestTensor(TorchDispatchMode):
    """Watches all operations inside a context.

    Attributes:
        numel: Number of entries of the largest tensor that occupies memory of its own.
    """

    def __init__(self):
        """Start with nothing."""
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self,
        func: Callable,
        types: Tuple,
        args: Tuple = (),
        kwargs: Dict[str, Any] = None,
    ) -> Any:
        """Run an operation, and look at what comes out.

        Args:
            func: The operation.
            types: Types of its arguments.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The result of the operation.
        """
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                # an expanded tensor has more entries than it occupies
                size = x.untyped_storage().nbytes() // x.element_size()
                self.numel = max(self.numel, min(size, x.numel()))
        return result


def compute(
    model: Sequential, X: Tensor, y: Tensor, save_memory: bool
) -> Tuple[Dict[str, List[Tensor]], Dict[str, int]]:
    """Compute quantities, each in a pass of its own.

    Args:
        model: The extended network.
        X: Images ``[N, 1, 28, 28]``.
        y: Labels ``[N]``.
        save_memory: Which algorithm is asked for.

    Returns:
        Values of all parameters, and the size of the largest tensor, by field.
    """
    lossfunc = extend(CrossEntropyLoss())
    values, sizes = {}, {}
    for make_extension in EXTENSIONS:
        extension = make_extension()
        loss = lossfunc(model(X), y)
        with backpack(extension), weight_jac_t_save_memory(save_memory=save_memory):
            with LargestTensor() as largest:
                loss.backward()
        field = extension.savefield
        values[field] = [getattr(p, field) for p in model.parameters()]
        sizes[field] = largest.numel
    return values, sizes


def main() -> None:
    """Ask for both algorithms, compare what comes out, and measure."""
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=16)
    X = X.double()
    model = Sequential(
        *(Conv2d(1, 4, 5, stride=2), ReLU(), Conv2d(4, 6, 5, stride=2), ReLU()),
        *(Flatten(), Linear(96, 10)),
    ).double()
    model = extend(model)

    values, sizes = compute(model, X, y, save_memory=True)
    others, _ = compute(model, X, y, save_memory=False)
    for field, tensors in values.items():
        for value, other in zip(tensors, others[field]):
            assert_close(value, other, rtol=1e-8, atol=1e-12)

    few = slice(0, 4)
    with backpack(DiagGGNExact()):
        extend(CrossEntropyLoss())(model(X[few]), y[few]).backward()
    diagonal = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
    idx = list(range(0, 4 * 25 + 4 + 6 * 100, 31))  # the two convolutions
    expected = autograd_diag_ggn_exact(X[few], y[few], model, CrossEntropyLoss(), idx)
    assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
    print("Both ways agree with each other, and with plain automatic differentiation.")

    num_columns, kernel, positions = 10, 1 * 5 * 5, 12 * 12
    unfolded = len(X) * kernel * positions
    print(f"Unfolded input of the first convolution: {unfolded} numbers")
    print(f"... copied for each of {num_columns} columns: {num_columns * unfolded}")
    for field, size in sizes.items():
        print(f"Largest tensor while computing {field}: {size}")
        assert size < num_columns * unfolded / 2


if __name__ == "__main__":
    main()
