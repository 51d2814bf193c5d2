"""Teach BackPACK a layer of your own.

The network below has a layer that PyTorch does not know: ``Stretch`` multiplies each
feature with a learned factor. To compute a quantity on it, an extension has to be told
how. That is the job of a module extension: a class with a method for each parameter of
the layer, which is called when the backward pass gets there. Its result is saved on the
parameter. You learn how to write one

- for a first-order quantity: the individual gradients,
- for a second-order quantity: the diagonal of the generalized Gauss-Newton matrix
  (GGN). There, a method ``backpropagate`` passes on what the layers before need.

What the methods get to see: ``ext`` is the extension that is running, ``module`` the
layer, with what went in (``module.input0``) and what came out (``module.output``);
``g_out[0]`` is the gradient at its output, and ``bpQuantities`` what a second-order
extension has propagated to its output. The batch axis comes first everywhere.
"""

from typing import Tuple

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Linear, Module, Parameter, Sequential, Tanh
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist


class Stretch(Module):
    """Multiply each feature with a learned factor."""

    def __init__(self, num_features: int):
        """Start with random factors around one.

        Args:
            num_features: Number F of features.
        """
        super().__init__()
        self.weight = Parameter(1 + 0.1 * torch.randn(num_features))

    def forward(self, input: Tensor) -> Tensor:
        """Multiply.

        Args:
            input: Features ``[N, F]``.

        Returns:
            Stretched features ``[N, F]``.
        """
        return self.weight * input


class StretchBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of :class:`Stretch`."""

    def __init__(self):
        """Name the parameters that have a method."""
        super().__init__(params=["weight"])

    def weight(
        self,
        ext: BackpropExtension,
        module: Stretch,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        bpQuantities: None,  # noqa: N803
    ) -> Tensor:
        """Compute what is saved in ``weight.grad_batch``.

        For one sample, output i is weight i times input i. By the chain rule, the
        gradient is the gradient at the output, times the input.

        Args:
            ext: The running extension.
            module: The layer.
            g_inp: Gradient at the input, ``[N, F]``, if there is one.
            g_out: Gradient at the output, ``[N, F]``.
            bpQuantities: Nothing, in first order.

        Returns:
            Individual gradients ``[N, F]``.
        """
        return g_out[0] * module.input0


class StretchDiagGGN(ModuleExtension):
    """GGN diagonal of :class:`Stretch`.

    The GGN extensions propagate columns: a matrix S for each sample whose product with
    its own transpose is the GGN with respect to the layer's output.
    """

    def __init__(self):
        """Name the parameters that have a method."""
        super().__init__(params=["weight"])

    def weight(
        self,
        ext: BackpropExtension,
        module: Stretch,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        bpQuantities: Tensor,  # noqa: N803
    ) -> Tensor:
        """Compute what is saved in ``weight.diag_ggn_exact``.

        Args:
            ext: The running extension.
            module: The layer.
            g_inp: Gradient at the input, ``[N, F]``, if there is one.
            g_out: Gradient at the output, ``[N, F]``.
            bpQuantities: V columns at the output, ``[V, N, F]``.

        Returns:
            Diagonal ``[F]``: squares of the columns at the weight, summed.
        """
        return (bpQuantities * module.input0).square().sum(dim=(0, 1))

    def backpropagate(
        self,
        ext: BackpropExtension,
        module: Stretch,
        g_inp: Tuple[Tensor],
        g_out: Tuple[Tensor],
        bpQuantities: Tensor,  # noqa: N803
    ) -> Tensor:
        """Propagate the columns from the output to the input.

        Args:
            ext: The running extension.
            module: The layer.
            g_inp: Gradient at the input, ``[N, F]``, if there is one.
            g_out: Gradient at the output, ``[N, F]``.
            bpQuantities: Columns at the output, ``[V, N, F]``.

        Returns:
            Columns at the input, ``[V, N, F]``: the Jacobian is diagonal, and the
            weight is its diagonal.
        """
        return bpQuantities * module.weight


def main() -> None:
    """Run both quantities on a network with the new layer."""
    torch.manual_seed(0)
    X, y = load_one_batch_mnist(batch_size=6, flat=True)
    X = X.double()
    model = Sequential(
        *(Stretch(784), Linear(784, 12), Tanh(), Stretch(12), Linear(12, 10)),
    ).double()
    lossfunc = CrossEntropyLoss()

    batch_grad = BatchGrad()
    batch_grad.set_module_extension(Stretch, StretchBatchGrad())
    diag_ggn = DiagGGNExact()
    diag_ggn.set_module_extension(Stretch, StretchDiagGGN())

    model, lossfunc = extend(model), extend(lossfunc)
    with backpack(batch_grad, diag_ggn):
        lossfunc(model(X), y).backward()

    for name, param in model.named_parameters():
        fields = f"{list(param.grad_batch.shape)}, {list(param.diag_ggn_exact.shape)}"
        print(f"{name:<9} grad_batch and diag_ggn_exact: {fields}")

    # individual gradients by plain automatic differentiation
    params = list(model.parameters())
    for n, (x, label) in enumerate(zip(X.split(1), y.split(1))):
        loss = CrossEntropyLoss()(model(x), label) / len(X)
        for param, grad in zip(params, torch.autograd.grad(loss, params)):
            assert_close(param.grad_batch[n], grad, rtol=1e-8, atol=1e-12)

    # some entries of the diagonal by plain automatic differentiation: both stretches,
    # and the first linear layer, which needs what was propagated through the second
    diagonal = torch.cat([param.diag_ggn_exact.flatten() for param in params])
    idx = list(range(300, len(diagonal), 97))
    expected = autograd_diag_ggn_exact(X, y, model, CrossEntropyLoss(), idx=idx)
    assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
    print("Both agree with plain automatic differentiation.")


if __name__ == "__main__":
    main()
