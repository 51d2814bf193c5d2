"""The quantities that can be computed in a backward pass."""

from backpack.extensions.curvmatprod import GGNMP, HMP, PCHMP
from backpack.extensions.firstorder import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedGrad,
    SumGradSquared,
    Variance,
    WeightedGrad,
)
from backpack.extensions.secondorder import (
    HBP,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchJacobian,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
)

__all__ = [
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "BatchDotGrad",
    "BatchGrad",
    "BatchJacobian",
    "BatchL2Grad",
    "ClippedGrad",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "GGNMP",
    "HBP",
    "HMP",
    "KFAC",
    "KFLR",
    "KFRA",
    "PCHMP",
    "SqrtGGNExact",
    "SqrtGGNMC",
    "SumGradSquared",
    "Variance",
    "WeightedGrad",
]
