"""First-order quantities: from the gradient at each layer's output."""

from backpack.extensions.firstorder.batch_dot_grad import BatchDotGrad
from backpack.extensions.firstorder.batch_grad import BatchGrad
from backpack.extensions.firstorder.batch_l2_grad import BatchL2Grad
from backpack.extensions.firstorder.clipped_grad import ClippedGrad
from backpack.extensions.firstorder.sum_grad_squared import SumGradSquared
from backpack.extensions.firstorder.variance import Variance
from backpack.extensions.firstorder.weighted_grad import WeightedGrad

__all__ = [
    "BatchDotGrad",
    "BatchGrad",
    "BatchL2Grad",
    "ClippedGrad",
    "SumGradSquared",
    "Variance",
    "WeightedGrad",
]
