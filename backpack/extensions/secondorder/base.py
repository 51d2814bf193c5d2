"""Base class of second-order extensions."""

from backpack.extensions.backprop_extension import BackpropExtension


class SecondOrderBackpropExtension(BackpropExtension):
    """Base class of extensions that pull a quantity back from the loss.

    They default to an error on modules that are not registered. An extension that is
    assembled from module extensions walks from module to module; the GGN family lets
    autograd pull its columns back.
    """

    def expects_backpropagation_quantities(self) -> bool:
        """Tell that a quantity is pulled back from the loss.

        Returns:
            ``True``.
        """
        return True
