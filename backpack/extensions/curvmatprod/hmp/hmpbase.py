"""Products with the Hessian, for modules with known derivatives."""

from backpack.extensions.curvmatprod.base import CurvatureProductRule


class HMPBase(CurvatureProductRule):
    """Products with the Hessian on a module."""
