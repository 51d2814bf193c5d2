"""Individual gradients on a layer with derivatives of its own."""

from backpack.extensions.firstorder.base import ReducedLayer
from backpack.extensions.firstorder.batch_grad import BatchGrad


class BatchGradBase(ReducedLayer):
    """Compute individual gradients with a layer's derivatives."""

    reduce = staticmethod(BatchGrad.reduce)
