"""The unfolded input of a convolution, some samples at a time."""

from math import prod
from typing import Dict

from torch import Tensor

from backpack.utils.conv import ConvNd, flatten_windows, input_windows


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
        self._module, self._x, self._dims = module, x, len(module.kernel_size)
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
        view, dims = self._windows(samples, False), self._dims
        groups, positions = self._module.groups, view.shape[2 + dims :].numel()
        features = view.shape[1 : 2 + dims].numel() // groups
        shape = groups, features, len(view) * positions
        return view.movedim(0, 1 + dims).reshape(shape)

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

        Channels come last, and are copied as one.

        Args:
            samples: Which samples (n of them).

        Returns:
            Unfolded inputs of shape ``[n, G, T, d]``.
        """
        # a single kernel position leaves nothing to reorder, and often to copy
        several = prod(self._module.kernel_size) > 1
        view, dims = self._windows(samples, several), self._dims
        kernel, positions = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        view = view.unflatten(1, (self._module.groups, -1))
        view = view.permute(0, 1, *positions, *kernel, 2)
        return view.flatten(2, 1 + dims).flatten(3)

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
