"""Per-sample products of one parameter, and what can be reduced from them.

Every layer describes the products ``S[v, n]ᵀ J[n]`` (cotangent columns times the
Jacobian of sample ``n`` with respect to one parameter, ``[V, N, *p]``) in the cheapest
form it has. The forms are

- :class:`~backpack.core.per_sample.base.Dense`: the products themselves (normalization
  layers, generic rule), or sums over positions (biases),
- :class:`~backpack.core.per_sample.outer.Outer`: a sum of outer products over shared
  positions (linear, convolution),
- :class:`~backpack.core.per_sample.rows.Rows`: rows that are added at given indices
  (embeddings),
- :class:`~backpack.core.per_sample.pieces.Pieces`: any of these, of pieces along the
  first axis (stacked weights).

Every reduction (norms, squares, dots, ...) is a method, written once per form, and uses
the cheapest known formula for it. What several forms add up is in ``sums.py``; how a
reduction becomes a single operation of a compiled step, in ``recipe.py``.
"""
