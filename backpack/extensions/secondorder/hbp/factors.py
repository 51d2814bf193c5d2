"""How Kronecker factors are formed, for each way a parameter enters its layer."""

from __future__ import annotations

from math import nan, prod
from typing import Any, Callable
from weakref import WeakKeyDictionary

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from backpack.core.derivatives.parameter_base import BaseParameterDerivatives
from backpack.core.fast.matmul import gram
from backpack.core.per_sample.base import PerSample, Summed
from backpack.core.per_sample.maps import factor_shapes
from backpack.core.per_sample.outer import Outer
from backpack.core.per_sample.rows import Rows
from backpack.core.per_sample.sums import features_first, reciprocal
from backpack.utils.errors import warn_user
from backpack.utils.hooks import message
from backpack.utils.types import Layer, WeightSharing
from backpack.utils.unsqueeze import flatten

_WARNED: WeakKeyDictionary = WeakKeyDictionary()  # extensions, of parameters
WEIGHT_SHARING = (None, "expand", "reduce")
AMBIGUOUS = (
    "{ext}: {reason} in {what}, and there is more than one way "
    "to define its Kronecker factors. Choose one with {ext}(weight_sharing='expand') "
    "or {ext}(weight_sharing='reduce') (Eschenhagen et al., 2023)."
)


TRANSPOSED = (
    "{ext} (field '{field}'): the Kronecker factors of {what} "
    "stand for `weight.{how}`, output channels first. Transpose it before "
    "you multiply with them."
)


TOO_LARGE = (
    "{ext} (field '{field}'): {what} would get a dense block with {size} rows, "
    "{memory:.1f} GiB, more than dense_limit={limit} allows. Use DiagGGNExact or "
    "DiagGGNMC for it, whose results are as large as the parameter, freeze it, or "
    "raise {ext}(dense_limit=...)."
)


def refuse_large(ext: Any, what: Callable[[], str], product: PerSample) -> None:
    """Refuse parameters with a factor above a limit, before it is allocated.

    Args:
        ext: The extension, with its ``dense_limit``.
        what: Names the parameter, and where it is used.
        product: Products of columns and its Jacobian.

    Raises:
        NotImplementedError: If a factor would have too many rows.
    """
    matrices = [shape for shape in factor_shapes(product) if len(shape) > 1]
    largest = max(matrices, key=prod)
    if largest[-1] > ext.dense_limit:
        memory = prod(largest) * product.dtype.itemsize / 2**30
        found = {"size": largest[-1], "memory": memory, "limit": ext.dense_limit}
        text = message(TOO_LARGE, ext=ext, field=ext.savefield, what=what(), **found)
        raise NotImplementedError(text)


def refuse_ambiguous(
    ext: Any, what: Callable[[], str], product: PerSample, param: Tensor
) -> None:
    """Refuse parameters whose factors are ambiguous; warn of transposed ones.

    Args:
        ext: The extension, with its ``weight_sharing``.
        what: Names the parameter, and where it is used.
        product: Products of columns and its Jacobian.
        param: The parameter.

    Raises:
        NotImplementedError: If a choice is needed and was not made.
    """
    if isinstance(product, Outer) and product.order and product.is_reordered:
        warned = _WARNED.setdefault(ext, WeakIdKeyDictionary())
        if param not in warned:
            warned[param] = True
            how, field = product.order.describe(product.shape), ext.savefield
            warn_user(message(TRANSPOSED, ext=ext, field=field, what=what(), how=how))
    if ext.weight_sharing is not None:
        return
    for matrix in product.stack or ():
        refuse_ambiguous(ext, what, matrix, param)
    reason = f"{product.positions} positions share the weight"
    if product.groups > 1:
        reason = f"channels are divided into {product.groups} groups"
    elif product.positions == 1 or product.sums_positions:
        return
    raise NotImplementedError(message(AMBIGUOUS, ext=ext, reason=reason, what=what()))


def arrange(product: PerSample) -> Tensor:
    """Arrange the columns at a layer's output as the parameter sees them.

    Args:
        product: Products of columns and the parameter's Jacobian.

    Returns:
        Columns ``[V, N, G, T, p]``. Where they have no positions, the products.
    """
    if isinstance(product, Outer):
        return product.b
    if isinstance(product, Summed):
        return rearrange(product.b, "v n t (g p) -> v n g t p", g=product.groups)
    if type(product) is Rows:
        return product.b.unsqueeze(2)
    return flatten(product.individual(), 2)[:, :, None, None]


def output_factor(
    product: PerSample, weight_sharing: str | None, of_rows: Callable = gram
) -> Tensor:
    """Compute from the columns at a layer's output what its parameters share.

    Args:
        product: Products of columns and the parameter's Jacobian.
        weight_sharing: How weight sharing is treated.
        of_rows: Function of features ``[G, p, K]`` as rows. Default: their Gram
            matrices, the factors of the output, of shape ``[G, p, p]``.

    Returns:
        What the function returns.
    """
    if product.stack:
        of_each = (output_factor(x, weight_sharing, of_rows) for x in product.stack)
        return torch.cat(list(of_each))
    b = arrange(product)
    sums = weight_sharing != "expand" and b.shape[3] > 1

    def compute() -> Tensor:
        summed = b.sum(3, keepdim=True) if sums else b
        return of_rows(features_first(summed, 2))

    return product.share((of_rows, sums), b, compute)  # for weight and bias


def averaged_output_factor(
    derivatives: BaseParameterDerivatives,
    name: str,
    module: Layer,
    product: PerSample,
    mat: Tensor,
    weight_sharing: WeightSharing,
) -> Tensor:
    """Form the factor of a layer's output from a matrix for all samples.

    Args:
        derivatives: The layer's derivatives.
        name: Name of the parameter.
        module: The layer.
        product: Products of any column and the parameter's Jacobian.
        mat: Matrix of shape ``[out, out]``.
        weight_sharing: How weight sharing is treated.

    Returns:
        Factors of shape ``[G, p, p]``.
    """
    n, shape = product.batch_size, module.output.shape[1:]
    layout = arrange(product).shape[2:]
    affine = isinstance(product, (Outer, Summed)) and derivatives.affine_in_params
    if affine and layout[:2].numel() == 1:  # one group, one position
        # `torch.kron` does not take columns first
        return mat.unsqueeze(0).clone(memory_format=torch.contiguous_format)
    if n * len(mat) == 0:  # the mean of nothing, or of outputs without features
        groups, _, size = layout
        return mat.new_full((groups, size, size), 0.0 if n else nan)
    if type(product) is not Rows:
        if affine:  # what is arranged is the same for all samples
            n, module = 1, derivatives._restrict(module, [0])
        rows = mat.unsqueeze(1).expand(-1, n, -1)
        for _ in range(2):  # B ↦ (B Jₙ)ᵀ, twice
            columns = rows.reshape(-1, n, *shape)
            pulled = derivatives.stored_product(name, module, (), (), columns)
            rows = arrange(pulled).flatten(2).transpose(0, 2)
        mat = rows.mean(1)
    blocks = mat.reshape(*layout, *layout)
    pattern = "gtpgtq->gpq" if weight_sharing == "expand" else "gtpgsq->gpq"
    return torch.einsum(pattern, blocks)


def with_input_factor(
    product: PerSample,
    output: Tensor,
    weight_sharing: WeightSharing,
    average: bool = False,
) -> list[Tensor]:
    """Put the factor of a layer's input next to that of its output.

    Args:
        product: Products of any columns and the parameter's Jacobian.
        output: Factors of the output, ``[G, p, p]``.
        weight_sharing: How weight sharing is treated.
        average: Whether inputs are averaged over samples before products are formed.

    Returns:
        The parameter's factors, see :class:`~backpack.extensions.secondorder.hbp.HBP`.
    """
    output = squeeze_group(output)
    if type(product) is Rows:
        diagonal = product.input_diagonal(average=weight_sharing == "reduce")
        return [diagonal / _count(product, weight_sharing), output]
    if not (isinstance(product, Outer) or product.stack):
        return [output]
    matrices: list[Any] = product.stack or [product]
    of_each = [_input_factor(x, weight_sharing, average) for x in matrices]
    factor = squeeze_group(torch.cat(of_each))
    return [factor, output] if product.is_transposed else [output, factor]


def _count(product: PerSample, weight_sharing: WeightSharing) -> int:
    """Count what the factor of the input is a mean over."""
    expands = weight_sharing == "expand"
    return product.batch_size * (product.positions if expands else 1)


def _input_factor(
    product: Outer, weight_sharing: WeightSharing, average: bool
) -> Tensor:
    """Form the factors ``[G, d, d]`` of a layer's input."""
    if not (average or weight_sharing == "reduce"):
        return product.input_gram(reciprocal(_count(product, weight_sharing)))
    a = product.a.mean(0, keepdim=True) if average else product.a
    a = a.mean(2, keepdim=True) if weight_sharing == "reduce" else a
    return einsum(a, a, "n g t i, n g t j -> g i j") / len(a)


def input_position(factors: list[Tensor], transposed: bool) -> int | None:
    """Tell which of a parameter's factors is that of its layer's input.

    Args:
        factors: The factors, see :class:`~backpack.extensions.secondorder.hbp.HBP`.
        transposed: Whether the parameter is the transpose of a layer's matrix.

    Returns:
        Its position; ``None`` if there is none.
    """
    if len(factors) == 1:
        return None
    is_diagonal = factors[0].dim() == 1  # as an embedding's
    return 0 if transposed or is_diagonal else 1


def squeeze_group(factor: Tensor) -> Tensor:
    """Drop the group axis if there is a single group.

    Args:
        factor: Factors of shape ``[G, p, p]``.

    Returns:
        Factors of shape ``[G, p, p]``, or ``[p, p]`` for G = 1.
    """
    return factor.squeeze(0) if len(factor) == 1 else factor
