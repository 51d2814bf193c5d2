"""The quantities that can be computed in a backward pass."""

from backpack.extensions.firstorder import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    SumGradSquared,
    Variance,
)
from backpack.extensions.secondorder import (
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    DiagGGNExact,
    DiagGGNMC,
    SqrtGGNExact,
    SqrtGGNMC,
)

__all__ = [
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDotGrad",
    "BatchGrad",
    "BatchL2Grad",
    "DiagGGNExact",
    "DiagGGNMC",
    "KFAC",
    "KFLR",
    "SqrtGGNExact",
    "SqrtGGNMC",
    "SumGradSquared",
    "Variance",
]
