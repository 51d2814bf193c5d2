"""Products with the blocks of curvature matrices."""

from backpack.extensions.curvmatprod.ggnmp import GGNMP
from backpack.extensions.curvmatprod.hmp import HMP
from backpack.extensions.curvmatprod.pchmp import PCHMP

__all__ = ["GGNMP", "HMP", "PCHMP"]
