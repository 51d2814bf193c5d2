"""Second-order quantities of a residual network: let the library rewrite it, or do it.

Some second-order quantities are propagated from module to module, so every operation
has to be a module: also the sum at the end of a skip connection. You learn two ways to
get there,

- ``extend(model, use_converter=True)``: write the network as usual, with functions
  such as ``relu`` and ``+``. The converter traces it and returns a network that
  computes the same and has the same parameters, but consists of modules only.
- The modules in ``backpack.custom_module``: build the network from them yourself. A
  residual block is ``Parallel``, whose branches get the same input and whose outputs
  are added up, where one branch is ``Identity``.

Both networks get the same parameters, and the quantities come out the same.
"""

from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import (
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Identity,
    Linear,
    Module,
    ReLU,
    Sequential,
)
from torch.nn.functional import relu
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.custom_module.branching import Parallel
from backpack.extensions import (
    KFAC,
    BatchDiagGGNExact,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    SqrtGGNExact,
)
from backpack.utils.examples import autograd_diag_ggn_exact, load_one_batch_mnist


class ResNet(Module):
    """A residual network as one writes it, with functions in between."""

    def __init__(self, num_channels: int = 4, num_classes: int = 10):
        """Create the layers.

        Args:
            num_channels: Number K of channels. Default: 4.
            num_classes: Number C of outputs. Default: 10.
        """
        super().__init__()
        self.stem = Conv2d(1, num_channels, 4, stride=4)
        self.conv1 = Conv2d(num_channels, num_channels, 3, padding=1)
        self.conv2 = Conv2d(num_channels, num_channels, 3, padding=1)
        self.shortcut = Conv2d(num_channels, num_channels, 1, stride=2)
        self.conv3 = Conv2d(num_channels, num_channels, 3, stride=2, padding=1)
        self.head = Linear(16 * num_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate the network.

        Args:
            x: Images ``[N, 1, 28, 28]``.

        Returns:
            Outputs ``[N, C]``.
        """
        x = relu(self.stem(x))
        x = relu(x + self.conv2(relu(self.conv1(x))))  # skip connection
        x = self.shortcut(x) + self.conv3(x)  # two branches that both have weights
        return self.head(relu(x).flatten(1))


def as_modules(net: ResNet) -> Sequential:
    """Write the same network with modules only.

    Args:
        net: The network, whose layers are used.

    Returns:
        The network as a sequence of modules.
    """
    residual = Sequential(net.conv1, ReLU(), net.conv2)
    return Sequential(
        *(net.stem, ReLU()),
        *(Parallel(Identity(), residual), ReLU()),
        *(Parallel(net.shortcut, net.conv3), ReLU()),
        *(Flatten(), net.head),
    )


def main() -> None:
    """Run the same extensions on both networks, and compare."""
    torch.manual_seed(0)
    net = ResNet().double()
    X, y = load_one_batch_mnist(batch_size=5)
    X, lossfunc = X.double(), extend(CrossEntropyLoss())

    converted = extend(deepcopy(net), use_converter=True)
    copied = deepcopy(net)
    by_hand = extend(as_modules(copied))

    parameters = {
        "converted": dict(converted.named_parameters()),
        "by hand": dict(copied.named_parameters()),
    }
    for way, model in [("converted", converted), ("by hand", by_hand)]:
        assert_close(model(X), net(X), rtol=1e-12, atol=1e-12)
        torch.manual_seed(0)  # the same random numbers for the Monte-Carlo samples
        exact = (BatchGrad(), DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact())
        with backpack(*exact, DiagGGNMC(mc_samples=100), KFAC(mc_samples=100)):
            lossfunc(model(X), y).backward()
        modules = [type(m).__name__ for m in model.modules() if not list(m.children())]
        print(f"{way:<9} {' '.join(modules)}")

    for name, p in net.named_parameters():  # the converter has kept the names
        ours, others = (vars(by_name[name]) for by_name in parameters.values())
        assert set(ours) == set(others) and len(ours) == 6
        for field, value in ours.items():
            assert_close(value, others[field], rtol=1e-8, atol=1e-12)
        trace, sampled = ours["diag_ggn_exact"].sum(), ours["diag_ggn_mc"].sum()
        print(
            f"{name:<16} {str(list(p.shape)):<13} trace of the GGN: {trace:.4f}, "
            f"with 100 Monte-Carlo samples: {sampled:.4f}"
        )

    # every eleventh entry of the diagonal, by plain automatic differentiation
    diagonal = parameters_to_vector(
        [p.diag_ggn_exact for p in parameters["by hand"].values()]
    )
    idx = list(range(0, len(diagonal), 11))
    expected = autograd_diag_ggn_exact(X, y, net, CrossEntropyLoss(), idx=idx)
    assert_close(diagonal[idx], expected, rtol=1e-8, atol=1e-12)
    print("Both ways agree with each other, and with plain automatic differentiation.")


if __name__ == "__main__":
    main()
