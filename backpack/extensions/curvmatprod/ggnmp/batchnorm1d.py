"""Products with the generalized Gauss-Newton matrix, for batch normalization."""

from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.extensions.curvmatprod.ggnmp.ggnmpbase import GGNMPBase


class GGNMPBatchNorm1d(GGNMPBase):
    """Products with the generalized Gauss-Newton matrix on batch normalization."""

    def __init__(self):
        """Set derivatives and parameters."""
        super().__init__(BatchNormNdDerivatives(), params=["weight", "bias"])
