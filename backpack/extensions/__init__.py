"""The quantities that can be computed in a backward pass."""

from backpack.extensions.curvmatprod import GGNMP, HMP, PCHMP
from backpack.extensions.firstorder import (
    BatchDotGrad,
    BatchFactors,
    BatchGrad,
    BatchL2Grad,
    BatchProjectGrad,
    SumGradSquared,
    Variance,
)
from backpack.extensions.secondorder import (
    EKFAC,
    HBP,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
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
    "BatchFactors",
    "BatchGrad",
    "BatchL2Grad",
    "BatchProjectGrad",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "EKFAC",
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
]
