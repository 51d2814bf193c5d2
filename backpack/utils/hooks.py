"""Functions to use where a hook is expected."""

from typing import Any


def no_op(*args: Any, **kwargs: Any) -> None:
    """Accept anything and do nothing; the default extension hook.

    Args:
        args: Ignored.
        kwargs: Ignored.
    """
