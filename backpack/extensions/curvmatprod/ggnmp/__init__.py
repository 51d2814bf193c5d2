"""Products with the generalized Gauss-Newton matrix."""

from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.base import CurvatureProduct
from backpack.extensions.curvmatprod.ggnmp.ggnmpbase import GGNMPBase

__all__ = ["GGNMP", "GGNMPBase"]


class GGNMP(CurvatureProduct):
    """Products with each parameter's block of the generalized Gauss-Newton matrix.

    Saved in ``ggnmp``, a function that maps ``[K, *p]`` to products of the same shape
    (and ``[*p]`` to a single one). Inputs and outputs stay on the modules.
    """

    rule = GGNMPBase

    def __init__(self, savefield: str = "ggnmp"):
        """Choose the field.

        Args:
            savefield: Attribute of a parameter under which its function is saved.
                Default: ``"ggnmp"``.
        """
        super().__init__(savefield, Curvature.GGN)
