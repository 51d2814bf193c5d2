"""The one door to shortcuts that only a measurement justifies.

- ``tuning.py``: sizes from which, or up to which, one way is faster than another,
- ``matmul.py``: the choice between the libraries that multiply matrices,
- ``memory.py``: memory for large results,
- ``whole.py``: functions that a compiler leaves whole.

Everything else in ``core`` would be right, and only slower, without them.
"""
