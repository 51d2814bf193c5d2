"""The cells of recurrent layers: how the gradients at their gates follow."""

from typing import Any, Dict, List, Optional

import torch
from torch import Tensor
from torch.nn.functional import linear

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


class LSTMDerivatives(RecurrentDerivatives):
    """Derivatives of :class:`torch.nn.LSTM`.

    A step is c' = f c + i g and h' = W_hr m with m = o tanh(c'), or h' = m without a
    projection. The gates i, f, o = σ(·) and g = tanh(·) are those of
    W_ih x + b_ih + W_hh h + b_hh, in the order i, f, g, o.
    """

    num_states = 2

    def _pull_back(
        self, module: Layer, chain: Chain, d_after: List[Tensor], last: Optional[Tensor]
    ) -> Dict[str, Factors]:
        gates = linear(chain.x, chain.weight_ih, chain.bias_ih)
        gates = gates + linear(chain.before, chain.weight_hh, chain.bias_hh)
        i, f, g, o = gates.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

        keep = f.unbind()
        states = [chain.initial[1]]
        for keep_t, new in zip(keep, (i * g).unbind()):
            states.append(torch.addcmul(new, keep_t, states[-1]))
        cells = torch.stack(states)
        tanh_c = cells[1:].tanh()

        # derivatives of m w.r.t. c' and o, and of c' w.r.t. i, f, g (before activation)
        to_cell = (o * (1 - tanh_c.pow(2))).unbind()
        to_i, to_g = g * i * (1 - i), i * (1 - g.pow(2))
        to_f, to_o = cells[:-1] * f * (1 - f), tanh_c * o * (1 - o)
        slopes = torch.stack([to_i, to_f, to_g, to_o], dim=2).unbind()

        totals: List[Tensor] = []
        d_gates: List[Tensor] = []
        d_cell: Any = 0.0 if last is None else last
        for t in reversed(range(len(d_after))):
            total = d_after[t]
            if d_gates:
                total = total + d_gates[-1] @ chain.weight_hh
            d_m = total if chain.weight_hr is None else total @ chain.weight_hr
            d_cell = d_cell + d_m * to_cell[t]
            columns = torch.stack([d_cell, d_cell, d_cell, d_m], dim=2)
            d_gates.append((columns * slopes[t]).flatten(2))
            d_cell = d_cell * keep[t]
            totals.append(total)
        b = torch.stack(d_gates[::-1])

        factors = {"ih": (b, chain.x), "hh": (b, chain.before)}
        if chain.weight_hr is not None:
            factors["hr"] = (torch.stack(totals[::-1]), o * tanh_c)
        return factors
