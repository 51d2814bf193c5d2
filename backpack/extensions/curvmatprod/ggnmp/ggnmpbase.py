"""Products with the generalized Gauss-Newton matrix, on modules with derivatives."""

from backpack.extensions.curvmatprod.base import CurvatureProductRule


class GGNMPBase(CurvatureProductRule):
    """Products with the generalized Gauss-Newton matrix on a module."""
