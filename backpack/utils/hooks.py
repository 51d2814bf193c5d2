"""Which modules were extended, and a function to use where a hook is expected."""

import weakref
from typing import Any

# Modules on which `extend` was called
EXTENDED = weakref.WeakSet()


def no_op(*args: Any, **kwargs: Any) -> None:
    """Accept anything and do nothing; the default extension hook.

    Args:
        args: Ignored.
        kwargs: Ignored.
    """
