"""The engine: sees a model's operations, follows its samples, runs backward passes.

Its rooms, in the order of their imports:

- ``nodes``: what operations and calls leave at nodes of the autograd graph.
- ``samples``: where samples are in a tensor, and where an operation moves them to.
- ``forward``: watches a forward pass.
- ``backward``: runs a backward pass, from the graph's inspection to parameters' values.
"""
