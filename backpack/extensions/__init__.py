"""The quantities that can be computed in a backward pass."""

from backpack.extensions import firstorder, secondorder
from backpack.extensions.curvmatprod import GGNMP, HMP, PCHMP
from backpack.extensions.firstorder import *  # noqa: F401, F403
from backpack.extensions.secondorder import *  # noqa: F401, F403

__all__ = ["GGNMP", "HMP", "PCHMP"]
__all__ += firstorder.__all__
__all__ += secondorder.__all__
