"""The square root of the GGN on activations."""

from backpack.core.derivatives.elu import ELUDerivatives
from backpack.core.derivatives.leakyrelu import LeakyReLUDerivatives
from backpack.core.derivatives.logsigmoid import LogSigmoidDerivatives
from backpack.core.derivatives.relu import ReLUDerivatives
from backpack.core.derivatives.selu import SELUDerivatives
from backpack.core.derivatives.sigmoid import SigmoidDerivatives
from backpack.core.derivatives.tanh import TanhDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNELU(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.ELU`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(ELUDerivatives())


class SqrtGGNLeakyReLU(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.LeakyReLU`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(LeakyReLUDerivatives())


class SqrtGGNLogSigmoid(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.LogSigmoid`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(LogSigmoidDerivatives())


class SqrtGGNReLU(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.ReLU`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(ReLUDerivatives())


class SqrtGGNSELU(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.SELU`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(SELUDerivatives())


class SqrtGGNSigmoid(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Sigmoid`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(SigmoidDerivatives())


class SqrtGGNTanh(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.Tanh`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(TanhDerivatives())
