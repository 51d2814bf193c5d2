"""What one of several processes remembers of its backward pass, to combine the results.

Each process computes quantities of its own samples, its shard of the batch;
:func:`backpack.distributed.reduce` makes quantities of the whole batch of them.
"""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any, List, MutableMapping, Optional, Tuple, Union
from weakref import ref

from torch import Tensor, distributed
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from backpack.extensions.layers import find_loss

if TYPE_CHECKING:
    from backpack.extensions.backprop_extension import BackpropExtension
    from backpack.extensions.turn import Turn


class Shard:
    """What a backward pass has seen of the batch.

    A copy of an extension, or a stored one, has none.

    Attributes:
        samples: Number of samples; ``None`` if it is not known.
        divisors: What each loss divides the sum of its terms by: ``None`` if it does
            not, ``nan`` if that is not known.
        parts: What is needed besides a parameter's field, by parameter.
    """

    def __init__(self, turn: Turn):
        """Start with nothing.

        Args:
            turn: The first turn in the backward pass.
        """
        self._backward_pass = ref(turn.backward_pass)
        self.samples: Optional[int] = None
        self.divisors: List[Optional[Union[float, Tensor]]] = []
        self.parts: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()

    def is_of(self, turn: Turn) -> bool:
        """Tell whether a turn belongs to the same backward pass.

        Args:
            turn: The turn.

        Returns:
            Whether it does.
        """
        return self._backward_pass() is turn.backward_pass

    def __reduce__(self) -> Tuple:
        """Leave nothing in a copy: what is remembered is about this process."""
        return type(None), ()


def is_shared() -> bool:
    """Tell whether several processes may share the work.

    Returns:
        Whether a process group was initialized that has more than one of them.
    """
    available = distributed.is_available() and distributed.is_initialized()
    return available and distributed.get_world_size() > 1


def remember(extension: BackpropExtension, turn: Turn) -> Optional[Shard]:
    """Remember what a turn tells about the shard; where nothing is shared, nothing.

    Args:
        extension: The extension that is running, which keeps it.
        turn: The turn.

    Returns:
        What is remembered, ``None`` for nothing.
    """
    if not is_shared():
        return None
    shard = extension.shard
    if shard is None or not shard.is_of(turn):
        shard = extension.shard = Shard(turn)
    if turn.call.is_loss:
        shard.divisors.append(_divisor(turn.module))
        shard.samples = shard.samples or len(turn.module.input0)
    return shard


def _divisor(loss: Module) -> Optional[Union[float, Tensor]]:
    """Tell what a loss divides by, see :class:`Shard`."""
    reduction = getattr(loss, "reduction", None)
    if reduction is None:
        return nan
    if reduction not in ("mean", "batchmean"):
        return None
    return 1.0 / find_loss(loss).derivatives._reduction_factor(loss)
