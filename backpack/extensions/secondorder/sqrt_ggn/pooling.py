"""The square root of the GGN on pooling layers."""

from backpack.core.derivatives.avgpool1d import AvgPool1DDerivatives
from backpack.core.derivatives.avgpool2d import AvgPool2DDerivatives
from backpack.core.derivatives.avgpool3d import AvgPool3DDerivatives
from backpack.core.derivatives.maxpool1d import MaxPool1DDerivatives
from backpack.core.derivatives.maxpool2d import MaxPool2DDerivatives
from backpack.core.derivatives.maxpool3d import MaxPool3DDerivatives
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule


class SqrtGGNAvgPool1d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.AvgPool1d`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(AvgPool1DDerivatives())


class SqrtGGNAvgPool2d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.AvgPool2d`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(AvgPool2DDerivatives())


class SqrtGGNAvgPool3d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.AvgPool3d`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(AvgPool3DDerivatives())


class SqrtGGNMaxPool1d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.MaxPool1d`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(MaxPool1DDerivatives())


class SqrtGGNMaxPool2d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.MaxPool2d`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(MaxPool2DDerivatives())


class SqrtGGNMaxPool3d(SqrtGGNBaseModule):
    """Square root of the GGN on :class:`torch.nn.MaxPool3d`."""

    def __init__(self):
        """Set the derivatives."""
        super().__init__(MaxPool3DDerivatives())
