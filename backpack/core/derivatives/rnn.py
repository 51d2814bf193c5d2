"""Derivatives of Elman networks."""

from typing import Dict, List, Optional

from torch import Tensor

from backpack.core.derivatives import recurrent
from backpack.core.derivatives.recurrent import Chain, Factors, RecurrentDerivatives
from backpack.utils.types import Layer


class RNNDerivatives(RecurrentDerivatives):
    """Derivatives of :class:`torch.nn.RNN`, with tanh or ReLU.

    A step is h' = σ(W_ih x + b_ih + W_hh h + b_hh).
    """

    def _pull_back(
        self, module: Layer, chain: Chain, d_after: List[Tensor], last: Optional[Tensor]
    ) -> Dict[str, Factors]:
        if module.nonlinearity == "tanh":
            slope = 1 - chain.after.pow(2)
        else:
            slope = (chain.after > 0).to(chain.after.dtype)
        slope = slope.unsqueeze(2)
        totals = recurrent.pull_through_time(d_after, slope, chain.weight_hh)
        d_gates = recurrent.spread(totals, slope.unsqueeze(1))
        return {"ih": (d_gates, chain.x), "hh": (d_gates, chain.before)}
