"""The unfolded input of a convolution, some samples at a time."""

from math import prod
from typing import Dict

from torch import Tensor

from backpack.utils.conv import (
    ConvNd,
    flatten_windows,
    input_windows,
    unfold_features,
    unfold_rows,
)


class Unfolding:
    """Unfolds the input of a convolution, some samples at a time.

    What is the same for all samples is done once, when first asked for: the input is
    padded, and laid out in memory.
    """

    def __init__(self, module: ConvNd, x: Tensor):
        """Store what to unfold.

        Args:
            module: The layer.
            x: Its input, of shape ``[N, C_in, *]``.
        """
        self._module, self._x = module, x
        self._views: Dict[bool, Tensor] = {}

    def _windows(self, samples: slice, channels_last: bool) -> Tensor:
        if channels_last not in self._views:
            view = input_windows(self._x, self._module, channels_last)
            self._views[channels_last] = view
        return self._views[channels_last][samples]

    def features(self, samples: slice) -> Tensor:
        """Unfold with features first.

        Args:
            samples: Which samples (n of them).

        Returns:
            Unfolded inputs of shape ``[G, d, n * T]``.
        """
        return unfold_features(self._windows(samples, False), self._module.groups)

    def matrices(self, samples: slice) -> Tensor:
        """Unfold with features first, each sample by itself.

        Args:
            samples: Which samples (n of them).

        Returns:
            Unfolded inputs of shape ``[n, G, d, T]``.
        """
        windows = self._windows(samples, False)
        unfolded = flatten_windows(windows, self._module.kernel_size)
        return unfolded.unflatten(1, (self._module.groups, -1))

    def rows(self, samples: slice) -> Tensor:
        """Unfold with features in another order, in which it takes less time.

        Args:
            samples: Which samples (n of them).

        Returns:
            Unfolded inputs of shape ``[n, G, T, d]``.
        """
        # a single kernel position leaves nothing to reorder, and often to copy
        several = prod(self._module.kernel_size) > 1
        return unfold_rows(self._windows(samples, several), self._module.groups)

    def fold_rows(self, mat: Tensor) -> Tensor:
        """View products with :meth:`rows` as products with the weight's Jacobian.

        Args:
            mat: Products of shape ``[*, G, p, d]``.

        Returns:
            Products of shape ``[*, *p]``, in the same memory.
        """
        shape = self._module.weight.shape
        mat = mat.unflatten(-1, (shape[2:].numel(), shape[1])).mT
        return mat.reshape(*mat.shape[:-4], *shape)
