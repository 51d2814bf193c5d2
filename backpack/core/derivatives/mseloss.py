"""Mean squared error: the negative log-likelihood of a normal with variance ½."""

from math import sqrt

import torch
from torch import Tensor
from torch.distributions import Normal

from backpack.core.derivatives.nll_base import ElementwiseNLLLossDerivatives
from backpack.core.per_sample.sums import reciprocal
from backpack.utils.types import Layer, Randomness, kind


class MSELossDerivatives(ElementwiseNLLLossDerivatives):
    """Derivatives of ``MSELoss`` on predictions of any shape ``[N, *]``.

    The terms are (f − y)², one per element, so that the Hessian is 2c times the
    identity. ``"mean"`` divides by the number of all elements.
    """

    def _make_distribution(self, subsampled_input: Tensor) -> Normal:
        return Normal(subsampled_input, sqrt(0.5))

    def _root_plain_hessian(self, prediction: Tensor) -> Tensor:
        return torch.full_like(prediction, sqrt(2.0))

    def _hessian_weights(self, module: Layer) -> float:
        # a target with more axes than the prediction repeats each of its elements
        shape = torch.broadcast_shapes(module.input0.shape, module.input1.shape)
        if module.reduction == "mean":
            return reciprocal(module.input0.numel())
        return shape.numel() / max(1, module.input0.numel())

    def _sample_targets(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        noise = _standard_normal(subsampled_input, mc_samples, generator)
        return subsampled_input.detach() + sqrt(0.5) * noise

    def _compute_sampled_grads_manual(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        # 2 (f − y) for y = f + √½ ε, without the cancellation
        return -sqrt(2.0) * _standard_normal(subsampled_input, mc_samples, generator)


def _standard_normal(like: Tensor, mc_samples: int, generator: Randomness) -> Tensor:
    shape = (mc_samples, *like.shape)
    return torch.randn(shape, generator=generator, **kind(like))
