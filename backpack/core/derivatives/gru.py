"""Derivatives of gated recurrent units."""

from typing import Dict, List, Optional

import torch
from torch import Tensor
from torch.nn.functional import linear

from backpack.core.derivatives import recurrent
from backpack.core.derivatives.recurrent import Chain, Factors, RecurrentDerivatives
from backpack.utils.types import Layer


class GRUDerivatives(RecurrentDerivatives):
    """Derivatives of :class:`torch.nn.GRU`.

    A step is h' = (1 - z) n + z h with the reset gate r = σ(i_r + h_r), the update gate
    z = σ(i_z + h_z) and the candidate n = tanh(i_n + r h_n), where W_ih x + b_ih holds
    the three i, and W_hh h + b_hh those with h. As r multiplies h_n only, the
    cotangents at i_n and h_n differ.
    """

    def _pull_back(
        self, module: Layer, chain: Chain, d_after: List[Tensor], last: Optional[Tensor]
    ) -> Dict[str, Factors]:
        i_r, i_z, i_n = linear(chain.x, chain.weight_ih, chain.bias_ih).chunk(3, -1)
        gates = linear(chain.before, chain.weight_hh, chain.bias_hh)
        h_r, h_z, h_n = gates.chunk(3, -1)
        r, z = (i_r + h_r).sigmoid(), (i_z + h_z).sigmoid()
        n = (i_n + r * h_n).tanh()

        to_n = (1 - z) * (1 - n.pow(2))
        to_r = to_n * h_n * r * (1 - r)
        to_z = (chain.before - n) * z * (1 - z)
        slopes_ih = torch.stack([to_r, to_z, to_n], dim=2)
        slopes_hh = torch.stack([to_r, to_z, to_n * r], dim=2)

        totals = recurrent.pull_through_time(d_after, slopes_hh, chain.weight_hh, z)
        return {
            "ih": (recurrent.spread(totals, slopes_ih.unsqueeze(1)), chain.x),
            "hh": (recurrent.spread(totals, slopes_hh.unsqueeze(1)), chain.before),
        }
