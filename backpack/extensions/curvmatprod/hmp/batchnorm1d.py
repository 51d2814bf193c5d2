"""Products with the Hessian, for batch normalization."""

from backpack.extensions.curvmatprod.base import BatchNormProductRule
from backpack.extensions.curvmatprod.hmp.hmpbase import HMPBase


class HMPBatchNorm1d(BatchNormProductRule, HMPBase):
    """Products with the Hessian on batch normalization."""
