"""Second-order quantities: from a quantity that is pulled back from the loss."""

from backpack.extensions.secondorder.batch_jacobian import BatchJacobian
from backpack.extensions.secondorder.diag_ggn import (
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    DiagGGNExact,
    DiagGGNMC,
)
from backpack.extensions.secondorder.diag_hessian import BatchDiagHessian, DiagHessian
from backpack.extensions.secondorder.hbp import HBP, KFAC, KFLR, KFRA
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGNExact, SqrtGGNMC

__all__ = [
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "BatchJacobian",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "HBP",
    "KFAC",
    "KFLR",
    "KFRA",
    "SqrtGGNExact",
    "SqrtGGNMC",
]
