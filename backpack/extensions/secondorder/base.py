"""Base class of second-order extensions."""

from backpack.engine.turn import current_turn
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.types import Grads, Layer


class SecondOrderBackpropExtension(BackpropExtension):
    """Base class of extensions that pull a quantity back from the loss.

    They default to an error on modules that are not registered. An extension that is
    assembled from module extensions walks from module to module; the GGN family lets
    autograd pull its columns back.

    Attributes:
        walks_modules: Whether quantities go from module to module.
    """

    walks_modules = True

    def expects_backpropagation_quantities(self) -> bool:
        """Tell that a quantity is pulled back from the loss.

        Returns:
            ``True``.
        """
        return True

    def __call__(self, module: Layer, g_inp: Grads, g_out: Grads) -> None:
        """Run on a module, unless it only calls others, which come later.

        Args:
            module: The module.
            g_inp: Gradients at its inputs, as far as they exist.
            g_out: Gradients at its outputs.
        """
        turn = current_turn()
        arranges = turn.call.is_transparent and not turn.parameters()
        if self.get_module_extension(module) is None and arranges:
            return
        super().__call__(module, g_inp, g_out)
