"""Kronecker factors of the GGN's blocks: KFAC, KFLR and KFRA."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

from einops import einsum, rearrange
from torch import Tensor

from backpack.core.reductions import Outer, PerSample, Rows, Summed
from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.secondorder.hbp.hbp_options import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)

if TYPE_CHECKING:
    from backpack.capture import Call

WEIGHT_SHARING = (None, "expand", "reduce")
AMBIGUOUS = (
    "{ext}: {reason} in {module} (parameter '{name}'), and there is more than one way to "
    "define its Kronecker factors. Choose one with {ext}(weight_sharing='expand') or "
    "{ext}(weight_sharing='reduce') (Eschenhagen et al., 2023)."
)


class KroneckerFactors(ColumnExtension):
    """Kronecker factors from columns; base class of KFAC and KFLR.

    Depending on how a parameter enters its layer, with columns S and inputs a:

    - weight of a linear layer or a convolution: ``[B, A]`` with B = Σ S Sᵀ over columns
      and samples, and A = (1/N) Σ a aᵀ over samples,
    - their bias: ``[B]``,
    - weight of an embedding: ``[A, B]``, where A is diagonal and stored as a vector:
      how often each index occurs per sample,
    - any other parameter (normalisation layers, parameters of other modules):
      ``[B]``, its dense GGN block ``[P, P]`` over all of its P elements.

    Where T positions share a weight, ``weight_sharing`` says what becomes of them:

    - ``"expand"``: they are treated like samples: B sums over them, A averages.
    - ``"reduce"``: S is summed over them and a is averaged before any product.
    - ``None``: S is summed over the positions of a convolution before the product, and
      A sums over them: BackPACK's convention. Everything else is refused.

    With groups, the factors are stacked along a leading axis, ``[G, p, p]`` and
    ``[G, d, d]``.
    """

    def __init__(
        self,
        savefield: str,
        source: Source,
        weight_sharing: Optional[str] = None,
    ):
        """Choose how weight sharing is treated.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
            source: Where the columns come from.
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.

        Raises:
            ValueError: If the option does not exist.
        """
        if weight_sharing not in WEIGHT_SHARING:
            raise ValueError(
                f"{type(self).__name__}: weight_sharing must be one of "
                f"{WEIGHT_SHARING}, got {weight_sharing!r}."
            )
        super().__init__(savefield, source)
        self.weight_sharing = weight_sharing

    def check(self, call: Call, name: str, product: PerSample) -> None:
        """Refuse parameters whose factors are ambiguous.

        Args:
            call: A call that is responsible for the parameter.
            name: Name of the parameter in the call's module.
            product: Products of columns and its Jacobian.

        Raises:
            NotImplementedError: If a choice is needed and was not made.
        """
        if self.weight_sharing is not None:
            return
        reason = None
        if isinstance(product, (Outer, Summed)):
            if product.groups > 1:
                reason = f"channels are divided into {product.groups} groups"
            elif product.positions > 1 and not product.sums_positions:
                reason = f"{product.positions} positions share the weight"
        elif isinstance(product, Rows) and product.ids.shape[1] > 1:
            reason = f"{product.ids.shape[1]} positions share the weight"
        if reason is not None:
            raise NotImplementedError(
                AMBIGUOUS.format(
                    ext=type(self).__name__, reason=reason, module=call.module, name=name
                )
            )

    def statistic(self, product: PerSample) -> Tensor:  # noqa: D102
        if isinstance(product, Outer):
            b = product.b
        elif isinstance(product, Summed):
            b = rearrange(product.b, "v n t (g p) -> v n g t p", g=product.groups)
        elif isinstance(product, Rows):
            b = product.b.unsqueeze(2)
        else:
            b = product.individual().flatten(2)[:, :, None, None]
        if self.weight_sharing != "expand":
            b = b.sum(3, keepdim=True)
        return einsum(b, b, "v n g t p, v n g t q -> g p q")

    def finish(self, product: PerSample, statistic: Tensor) -> List[Tensor]:  # noqa: D102
        output = squeeze_group(statistic)
        if isinstance(product, Rows):
            counts = product.ids.flatten().bincount(minlength=product.shape[0])
            return [(counts / product.batch_size).to(output.dtype), output]
        if isinstance(product, Outer):
            return [output, squeeze_group(self._input_factor(product))]
        return [output]

    def _input_factor(self, product: Outer) -> Tensor:
        a, scale = product.a, product.batch_size
        if self.weight_sharing == "reduce":
            a = a.mean(2, keepdim=True)
        elif self.weight_sharing == "expand":
            scale = scale * product.positions
        return einsum(a, a, "n g t i, n g t j -> g i j") / scale

    def add(self, existing: List[Tensor], other: List[Tensor]) -> List[Tensor]:
        """Refuse to combine the contributions of two losses by different calls.

        Args:
            existing: One loss's factors.
            other: The other's.

        Raises:
            NotImplementedError: The sum of Kronecker products is none.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a parameter is used by several calls of which two "
            "losses see different ones. Their Kronecker products do not add up to one. "
            "Compute the factors of each loss in a backward pass of its own."
        )


class KFAC(KroneckerFactors):
    """Kronecker factors of the GGN, with a Monte-Carlo estimate of the loss Hessian.

    Saved in ``kfac``, a list (see :class:`KroneckerFactors`). B carries the scale of the
    loss; targets are drawn from the model's own distribution (Martens & Grosse, 2015,
    "Optimizing neural networks with Kronecker-factored approximate curvature").
    """

    def __init__(self, mc_samples: int = 1, weight_sharing: Optional[str] = None):
        """Choose the number of samples and how weight sharing is treated.

        Args:
            mc_samples: Number of Monte-Carlo samples. Default: ``1``.
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.
        """
        source = Source(LossHessianStrategy.SAMPLING, mc_samples)
        super().__init__("kfac", source, weight_sharing)


class KFLR(KroneckerFactors):
    """Kronecker factors of the GGN, with the exact loss Hessian.

    Saved in ``kflr``, a list (see :class:`KroneckerFactors`; Botev et al., 2017,
    "Practical Gauss-Newton optimisation for deep learning").
    """

    def __init__(self, weight_sharing: Optional[str] = None):
        """Choose how weight sharing is treated.

        Args:
            weight_sharing: ``"expand"``, ``"reduce"`` or ``None``. Default: ``None``.
        """
        source = Source(LossHessianStrategy.EXACT, compact=True)
        super().__init__("kflr", source, weight_sharing)


def squeeze_group(factor: Tensor) -> Tensor:
    """Drop the group axis if there is a single group.

    Args:
        factor: Factors of shape ``[G, p, p]``.

    Returns:
        Factors of shape ``[G, p, p]``, or ``[p, p]`` for G = 1.
    """
    return factor.squeeze(0) if len(factor) == 1 else factor
