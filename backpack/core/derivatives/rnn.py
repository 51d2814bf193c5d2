"""Derivatives of Elman networks."""

from typing import Callable, Dict, List, Optional

import torch
from torch import Tensor

from backpack.core.derivatives.recurrent import (
    Chain,
    Factors,
    RecurrentDerivatives,
    pull_through_time,
    spread,
)
from backpack.utils.types import Layer


class RNNDerivatives(RecurrentDerivatives):
    """Derivatives of :class:`torch.nn.RNN`, with tanh or ReLU.

    A step is h' = σ(W_ih x + b_ih + W_hh h + b_hh).
    """

    def _forward(self, module: Layer) -> Callable:
        return {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[module.nonlinearity]

    def _pull_back(
        self,
        module: Layer,
        chain: Chain,
        cotangents: List[Tensor],
        last: Optional[Tensor],
    ) -> Dict[str, Factors]:
        if module.nonlinearity == "tanh":
            slope = 1 - chain.after.pow(2)
        else:
            slope = (chain.after > 0).to(chain.after.dtype)
        slope = slope.unsqueeze(2)
        d_after = pull_through_time(cotangents, slope, chain.weight_hh)
        d_gates = spread(d_after, slope.unsqueeze(1))
        return {"ih": (d_gates, chain.x), "hh": (d_gates, chain.before)}
