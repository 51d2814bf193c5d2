"""Products with the positive-curvature Hessian."""

from typing import Literal

from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.base import CurvatureProduct
from backpack.extensions.curvmatprod.pchmp.pchmpbase import PCHMPBase
from backpack.utils.errors import check_choice

__all__ = ["PCHMP", "PCHMPBase"]


class PCHMP(CurvatureProduct):
    """Products with each parameter's block of the positive-curvature Hessian.

    Saved in ``pchmp``, a function that maps ``[K, *p]`` to products of the same shape
    (and ``[*p]`` to a single one). Each operation's residual is made positive
    semi-definite before it enters (Chen et al., 2018, "BDA-PCH: block-diagonal
    approximation of positive-curvature Hessian for training neural networks"): by its
    eigenvalues, which are its entries if it is diagonal. Inputs and outputs stay on the
    modules.
    """

    refuses_coupled_samples = True  # residuals are modified for each sample
    rule = PCHMPBase
    CURVATURES = {"clip": Curvature.PCH_CLIP, "abs": Curvature.PCH_ABS}

    def __init__(
        self, savefield: str = "pchmp", modify: Literal["clip", "abs"] = "clip"
    ):
        """Choose the field, and what becomes of negative curvature.

        Args:
            savefield: Attribute of a parameter under which its function is saved.
                Default: ``"pchmp"``.
            modify: ``"clip"`` replaces negative values by zero, ``"abs"`` by their
                absolute values. Default: ``"clip"``.

        Raises:
            ValueError: If the modification does not exist.
        """
        check_choice("PCHMP", "modify", modify, self.CURVATURES)
        super().__init__(savefield, self.CURVATURES[modify])
        self._modify = modify

    def get_modification_mode(self) -> str:
        """Return what becomes of negative curvature.

        Returns:
            ``"clip"`` or ``"abs"``.
        """
        return self._modify
