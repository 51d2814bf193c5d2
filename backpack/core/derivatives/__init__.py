"""The maths of layers and losses: products with their first and second derivatives.

One file holds one layer *family*. All products act on matrices of shape ``[V, N, *]``:
``V`` columns for each of the ``N`` samples, and then the axes of the layer's input,
output or parameter. :mod:`~backpack.core.derivatives.basederivatives` defines the
interface and rules from automatic differentiation that are right for every layer; a
family's file replaces them by faster ones.
"""
