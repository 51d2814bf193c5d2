"""Products with the generalized Gauss-Newton matrix, for batch normalization."""

from backpack.extensions.curvmatprod.base import BatchNormProductRule
from backpack.extensions.curvmatprod.ggnmp.ggnmpbase import GGNMPBase


class GGNMPBatchNorm1d(BatchNormProductRule, GGNMPBase):
    """Products with the generalized Gauss-Newton matrix on batch normalization."""
