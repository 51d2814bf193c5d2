"""What an extension has pulled back to the outputs of calls that are still to come."""

from typing import Any, Callable, Dict, Optional


class SavedQuantities:
    """Quantities that wait for their call's turn in the backward pass."""

    def __init__(self) -> None:
        """Start with none."""
        self._saved_quantities: Dict[int, Any] = {}

    def save_quantity(
        self, key: int, quantity: Any, accumulation_function: Callable[[Any, Any], Any]
    ) -> None:
        """Save a quantity, or add it to the one that waits already.

        Args:
            key: Identifies the call.
            quantity: Quantity to save.
            accumulation_function: Combines the existing and the new quantity.
        """
        if key in self._saved_quantities:
            existing = self._saved_quantities[key]
            quantity = accumulation_function(existing, quantity)
        self._saved_quantities[key] = quantity

    def retrieve_quantity(self, key: int, delete_old: bool) -> Optional[Any]:
        """Look up a quantity.

        Args:
            key: Identifies the call.
            delete_old: Whether to forget the quantity.

        Returns:
            The quantity, or ``None`` if there is none.
        """
        if delete_old:
            return self._saved_quantities.pop(key, None)
        return self._saved_quantities.get(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._saved_quantities.clear()
