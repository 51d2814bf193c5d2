"""Products with the Hessian, for batch normalization."""

from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.extensions.curvmatprod.hmp.hmpbase import HMPBase


class HMPBatchNorm1d(HMPBase):
    """Products with the Hessian on batch normalization."""

    def __init__(self):
        """Set derivatives and parameters."""
        super().__init__(BatchNormNdDerivatives(), params=["weight", "bias"])
