"""The converter: a model in, the same model out with a module for every operation.

1. Trace the model (``tracer.py``, ``trace.py``). Submodules that cannot be traced
   stay whole.
2. Replace in-place operations by those that return a new tensor (``inplace.py``).
3. Detach what is computed with gradients switched off (``no_grad.py``).
4. Put in the known modules (``rules.py``, ``known.py``), and single-layer recurrent
   ones (``recurrent.py``).
5. Turn the rest into :class:`~backpack.converter.function.FunctionModule`: sizes,
   parameters, and what is made of them become part of the operation that uses them,
   so that a module's input is a tensor that depends on the model's input
   (``rest.py``).

``convert.py`` calls one after the other. They share ``reading.py`` and ``editing.py``.
"""
