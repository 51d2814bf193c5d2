"""Binary cross-entropy with logits: the negative log-likelihood of a Bernoulli."""

from typing import Union

import torch
from torch import Tensor
from torch.distributions import Bernoulli
from torch.nn.functional import logsigmoid

from backpack.core.derivatives.nll_base import ElementwiseNLLLossDerivatives
from backpack.utils.types import Layer, Randomness, full_precision


class BCELossWithLogitsDerivatives(ElementwiseNLLLossDerivatives):
    """Derivatives of ``BCEWithLogitsLoss`` on logits of any shape ``[N, *]``.

    A term with weight w, positive weight q and (soft) label y is
    − w (q y log σ(f) + (1 − y) log(1 − σ(f))); its second derivative is
    w (q y + 1 − y) σ(f) σ(−f). ``"mean"`` divides by the number of all elements.
    """

    def _make_distribution(self, subsampled_input: Tensor) -> Bernoulli:
        return Bernoulli(logits=subsampled_input)

    def _root_plain_hessian(self, prediction: Tensor) -> Tensor:
        return (0.5 * (logsigmoid(prediction) + logsigmoid(-prediction))).exp()

    def _hessian_weights(self, module: Layer) -> Union[float, Tensor]:
        weights = super()._hessian_weights(module)
        if module.pos_weight is not None:
            labels = full_precision(module.input1)
            weights = weights * (1 + (full_precision(module.pos_weight) - 1) * labels)
        if module.weight is not None:
            weights = weights * full_precision(module.weight)
        if isinstance(weights, Tensor):
            weights = weights.expand_as(module.input0)
        return weights

    def _sample_targets(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        probabilities = subsampled_input.detach().sigmoid()
        probabilities = probabilities.expand(mc_samples, *probabilities.shape)
        return torch.bernoulli(probabilities, generator=generator)

    def _compute_sampled_grads_manual(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        targets = self._sample_targets(subsampled_input, mc_samples, generator)
        # σ(f) − y, without the cancellation for y = 1
        sign = 1 - 2 * targets
        return sign * (sign * subsampled_input).sigmoid()
