"""Products with the Hessian."""

from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.base import CurvatureProduct
from backpack.extensions.curvmatprod.hmp.hmpbase import HMPBase

__all__ = ["HMP", "HMPBase"]


class HMP(CurvatureProduct):
    """Products with each parameter's block of the Hessian.

    Saved in ``hmp``, a function that maps ``[K, *p]`` to products of the same shape
    (and ``[*p]`` to a single one). Inputs and outputs stay on the modules.
    """

    rule = HMPBase

    def __init__(self, savefield: str = "hmp"):
        """Choose the field.

        Args:
            savefield: Attribute of a parameter under which its function is saved.
                Default: ``"hmp"``.
        """
        super().__init__(savefield, Curvature.HESSIAN)
