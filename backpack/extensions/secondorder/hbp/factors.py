"""How Kronecker factors are formed, for each way a parameter enters its layer."""

from __future__ import annotations

from math import nan
from typing import Any, List, Optional
from warnings import warn

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.conv import _ConvTransposeNd

from backpack.core.derivatives.basederivatives import (
    BaseParameterDerivatives,
    stored_inputs,
)
from backpack.core.reductions import Outer, PerSample, Rows, Summed, gram, reciprocal
from backpack.utils.unsqueeze import flatten

WEIGHT_SHARING = (None, "expand", "reduce")
AMBIGUOUS = (
    "{ext}: {reason} in {module} (parameter '{name}'), and there is more than one way "
    "to define its Kronecker factors. Choose one with {ext}(weight_sharing='expand') "
    "or {ext}(weight_sharing='reduce') (Eschenhagen et al., 2023)."
)


TRANSPOSED = (
    "{ext} (field '{field}'): the Kronecker factors of the weight of {module} "
    "stand for `weight.transpose(0, 1)`, output channels first. Transpose it before "
    "you multiply with them."
)


def refuse_ambiguous(ext: Any, module: Module, name: str, product: PerSample) -> None:
    """Refuse parameters whose factors are ambiguous; warn of transposed ones.

    Args:
        ext: The extension, with its ``weight_sharing``.
        module: The layer.
        name: Name of the parameter.
        product: Products of columns and its Jacobian.

    Raises:
        NotImplementedError: If a choice is needed and was not made.
    """
    if isinstance(module, _ConvTransposeNd) and name == "weight":
        warned = ext.__dict__.setdefault("_warned_of", set())
        if type(module) not in warned:
            warned.add(type(module))
            text = TRANSPOSED.format(
                ext=type(ext).__name__, field=ext.savefield, module=module
            )
            warn(text, stacklevel=2)
    if ext.weight_sharing is not None:
        return
    reason = None
    if isinstance(product, (Outer, Summed)):
        if product.groups > 1:
            reason = f"channels are divided into {product.groups} groups"
        elif product.positions > 1 and not product.sums_positions:
            reason = f"{product.positions} positions share the weight"
    elif isinstance(product, Rows) and product.positions > 1:
        reason = f"{product.positions} positions share the weight"
    if reason is not None:
        raise NotImplementedError(
            AMBIGUOUS.format(
                ext=type(ext).__name__, reason=reason, module=module, name=name
            )
        )


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
    if isinstance(product, Rows):
        return product.b.unsqueeze(2)
    return flatten(product.individual(), 2)[:, :, None, None]


def output_factor(product: PerSample, weight_sharing: Optional[str]) -> Tensor:
    """Form the factor of a layer's output from columns.

    Args:
        product: Products of columns and the parameter's Jacobian.
        weight_sharing: How weight sharing is treated.

    Returns:
        Factors of shape ``[G, p, p]``.
    """
    b = arrange(product)
    sums = weight_sharing != "expand" and b.shape[3] > 1

    def compute() -> Tensor:
        summed = b.sum(3, keepdim=True) if sums else b
        return gram(summed.permute(2, 4, 0, 1, 3).flatten(2))

    return product.share(("output factor", sums), b, compute)  # for weight and bias


def averaged_output_factor(
    derivatives: BaseParameterDerivatives,
    name: str,
    module: Module,
    product: PerSample,
    mat: Tensor,
    weight_sharing: Optional[str],
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
    affine = isinstance(product, (Outer, Summed)) and derivatives.affine_in_params
    if affine and product.groups == product.positions == 1:
        return mat.unsqueeze(0).clone()
    if n == 0:  # the mean of nothing
        groups, _, size = arrange(product).shape[2:]
        return mat.new_full((groups, size, size), nan)
    if isinstance(product, Rows):
        layout = (1, product.positions, product.b.shape[-1])
    elif isinstance(product, (Outer, Summed)):
        inputs = stored_inputs(module)
        if affine:  # what is arranged is the same for all samples
            n, inputs = 1, tuple(x[:1] if isinstance(x, Tensor) else x for x in inputs)
        columns = mat.reshape(-1, 1, *shape).expand(-1, n, *shape)
        arranged = arrange(derivatives.product(name, module, inputs, columns))
        layout = arranged.shape[2:]
        columns = arranged.flatten(2).transpose(0, 2).reshape(-1, n, *shape)
        arranged = arrange(derivatives.product(name, module, inputs, columns))
        mat = arranged.flatten(2).mean(1)
    else:  # the Jacobian depends on the sample: (1/N) Σₙ Jₙᵀ B Jₙ
        columns = mat.reshape(-1, 1, *shape).expand(-1, n, *shape)
        rows = derivatives.stored_product(name, module, (), (), columns).individual()
        columns = flatten(rows, 2).transpose(0, 2).reshape(-1, n, *shape)
        rows = derivatives.stored_product(name, module, (), (), columns).individual()
        return flatten(rows, 2).mean(1).unsqueeze(0)
    blocks = mat.reshape(*layout, *layout)
    pattern = "gtpgtq->gpq" if weight_sharing == "expand" else "gtpgsq->gpq"
    return torch.einsum(pattern, blocks)


def with_input_factor(
    product: PerSample,
    output: Tensor,
    weight_sharing: Optional[str],
    average: bool = False,
) -> List[Tensor]:
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
    scale = product.batch_size
    if weight_sharing == "expand" and isinstance(product, (Outer, Rows)):
        scale = scale * product.positions
    if isinstance(product, Rows):
        diagonal = product.input_diagonal(average=weight_sharing == "reduce")
        return [diagonal / scale, output]
    if not isinstance(product, Outer):
        return [output]
    if average or weight_sharing == "reduce":
        a = product.a.mean(0, keepdim=True) if average else product.a
        a = a.mean(2, keepdim=True) if weight_sharing == "reduce" else a
        factor = einsum(a, a, "n g t i, n g t j -> g i j") / len(a)
    else:
        factor = product.input_gram(reciprocal(scale))
    return [output, squeeze_group(factor)]


def input_position(factors: List[Tensor]) -> Optional[int]:
    """Tell which of a parameter's factors is that of its layer's input.

    Args:
        factors: The factors, see :class:`~backpack.extensions.secondorder.hbp.HBP`.

    Returns:
        Its position; ``None`` if there is none.
    """
    if len(factors) == 1:
        return None
    return 0 if factors[0].dim() == 1 else 1  # that of an embedding is diagonal


def squeeze_group(factor: Tensor) -> Tensor:
    """Drop the group axis if there is a single group.

    Args:
        factor: Factors of shape ``[G, p, p]``.

    Returns:
        Factors of shape ``[G, p, p]``, or ``[p, p]`` for G = 1.
    """
    return factor.squeeze(0) if len(factor) == 1 else factor
