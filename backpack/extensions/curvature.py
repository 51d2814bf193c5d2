"""Curvature matrices, by what becomes of the residuals of a network's operations.

The Hessian of a composition consists of the loss Hessian between Jacobians, and of one
residual Σ_k δ_k ∂²z_k/∂x² for each operation (Dangel, Harmeling, Hennig, 2020, "Modular
block-diagonal curvature approximations for feedforward architectures").
"""

from typing import Any, Callable, Dict, List, Optional

from torch import Tensor, zeros_like


class ResidualModifications:
    """What may become of a diagonal residual, or of a residual's eigenvalues."""

    @staticmethod
    def nothing(res: Tensor) -> Tensor:
        """Leave it as it is.

        Args:
            res: Residual ``[*]``.

        Returns:
            The same.
        """
        return res

    @staticmethod
    def remove_negative_values(res: Tensor) -> Tensor:
        """Clip it at zero.

        Args:
            res: Residual ``[*]``.

        Returns:
            Its positive part ``[*]``.
        """
        return res.clamp(min=0)

    @staticmethod
    def to_abs(res: Tensor) -> Tensor:
        """Take its absolute value.

        Args:
            res: Residual ``[*]``.

        Returns:
            Its absolute value ``[*]``.
        """
        return res.abs()

    @staticmethod
    def to_zero(res: Tensor) -> Tensor:
        """Drop it.

        Args:
            res: Residual ``[*]``.

        Returns:
            Zeros ``[*]``.
        """
        return zeros_like(res)


class Curvature:
    """Names of curvature matrices, and what defines them."""

    HESSIAN = "hessian"
    GGN = "ggn"
    PCH_CLIP = "pch-clip"
    PCH_ABS = "pch-abs"
    CHOICES: List[str] = [HESSIAN, GGN, PCH_CLIP, PCH_ABS]

    REQUIRE_PSD_LOSS_HESSIAN = {
        HESSIAN: False,
        GGN: True,
        PCH_ABS: True,
        PCH_CLIP: True,
    }
    REQUIRE_RESIDUAL = {HESSIAN: True, GGN: False, PCH_ABS: True, PCH_CLIP: True}
    RESIDUAL_MODS: Dict[str, Callable[[Tensor], Tensor]] = {
        HESSIAN: ResidualModifications.nothing,
        GGN: ResidualModifications.to_zero,
        PCH_ABS: ResidualModifications.to_abs,
        PCH_CLIP: ResidualModifications.remove_negative_values,
    }

    @classmethod
    def require_residual(cls, curv_type: str) -> bool:
        """Tell whether residuals enter.

        Args:
            curv_type: Name of the curvature matrix.

        Returns:
            Whether they do.
        """
        return cls.REQUIRE_RESIDUAL[curv_type]

    @classmethod
    def is_pch(cls, curv_type: str) -> bool:
        """Tell whether it is a positive-curvature Hessian.

        Args:
            curv_type: Name of the curvature matrix.

        Returns:
            Whether it is.
        """
        return curv_type in (cls.PCH_ABS, cls.PCH_CLIP)

    @classmethod
    def modify_residual(cls, residual: Optional[Tensor], curv_type: str) -> Any:
        """Modify a residual as the curvature matrix wants it.

        Args:
            residual: Diagonal residual or eigenvalues; ``None`` if there is none.
            curv_type: Name of the curvature matrix.

        Returns:
            What enters the matrix, of the same shape.
        """
        return None if residual is None else cls.RESIDUAL_MODS[curv_type](residual)

    @classmethod
    def check_loss_hessian(cls, loss_hessian_is_psd: bool, curv_type: str) -> None:
        """Check that the loss Hessian is as the curvature matrix requires it.

        Args:
            loss_hessian_is_psd: Whether it is positive semi-definite.
            curv_type: Name of the curvature matrix.

        Raises:
            ValueError: If it has to be positive semi-definite and is not.
        """
        if cls.REQUIRE_PSD_LOSS_HESSIAN[curv_type] and not loss_hessian_is_psd:
            raise ValueError(
                f"The curvature matrix '{curv_type}' needs a loss whose Hessian is "
                "positive semi-definite, and this one's is not. Use a loss that is "
                f"convex in the prediction, or '{cls.HESSIAN}'."
            )
