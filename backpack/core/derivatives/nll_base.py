"""Losses that are the negative log-likelihood of a distribution over targets.

A loss module computes 𝓛 = c Σₙ ℓₙ, where c is one over whatever ``reduction="mean"``
divides by, and one for ``"sum"``. The Hessian blocks Hₙ = ∂²𝓛 / ∂fₙ² contain c and
every option of the loss (weights, masks, smoothing). Those options only rescale the
Hessian of the plain negative log-likelihood, which is what is written here once: a
subclass describes the likelihood and ``NLLLossDerivatives._hessian_weights``.

With ``subsampling``, rows are selected and c stays that of the full batch.
"""

from abc import abstractmethod
from math import sqrt
from typing import Any, Tuple, Union

import torch
from torch import Tensor
from torch.autograd import grad
from torch.distributions import Distribution

from backpack.core.derivatives import loss_base
from backpack.core.derivatives.stored import as_leaf
from backpack.core.per_sample.sums import reciprocal
from backpack.utils.state import may_look
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import Grads, Layer, MatProd, Randomness, full_precision


class NLLLossDerivatives(loss_base.BaseLossDerivatives):
    """Derivatives of a negative log-likelihood with a factorising distribution.

    A subclass that provides ``_verify_support``, ``_make_distribution``,
    ``_get_mean_normalization`` and ``hessian_is_psd`` has the sampled quantities; the
    exact ones need ``_sqrt_hessian`` and ``_make_hessian_mat_prod``.

    Attributes:
        use_autograd: Whether sampled gradients come from autograd on the log-density
            of ``_make_distribution`` (``True``), or from the closed form in
            ``_compute_sampled_grads_manual`` (``False``).
    """

    def __init__(self, use_autograd: bool = True):
        """Choose how sampled gradients are computed.

        Args:
            use_autograd: Differentiate the log-density with autograd instead of using
                the closed form. Default: ``True``.
        """
        self.use_autograd = use_autograd

    def _sqrt_hessian(self, *args: Any, **options: Any) -> Tensor:
        raise NotImplementedError(self._sampled_only("_sqrt_hessian"))

    def _make_hessian_mat_prod(self, *args: Any) -> MatProd:
        raise NotImplementedError(self._sampled_only("_make_hessian_mat_prod"))

    def _sampled_only(self, method: str) -> str:
        return (
            f"{type(self).__name__} supports sampled quantities only. Use the Monte-"
            f"Carlo version of this extension, or define {method}."
        )

    # What a subclass describes

    def _verify_support(self, module: Layer) -> None:
        """Raise an error if an option of the loss module is not supported.

        Args:
            module: Loss module.
        """

    def _make_distribution(self, subsampled_input: Tensor) -> Distribution:
        """Create the model's own distribution over targets.

        Args:
            subsampled_input: Prediction, shape ``[N, *]``.

        Returns:
            Distribution whose negative log-density, summed over all terms, is the
            loss without options and with ``reduction="sum"``.

        Raises:
            NotImplementedError: If the subclass does not define the distribution.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define _make_distribution to sample targets."
        )

    def _get_mean_normalization(self, input: Tensor) -> int:
        """Return what ``reduction="mean"`` divides the sum of all terms by.

        Args:
            input: Prediction of the full batch, shape ``[N, *]``.

        Returns:
            Divisor.

        Raises:
            NotImplementedError: If the subclass does not define the divisor.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define _get_mean_normalization for losses "
            "with reduction='mean'."
        )

    def _hessian_weights(self, module: Layer) -> Union[float, Tensor]:
        """Return what the options multiply the plain Hessian by, including c.

        Args:
            module: Loss module, with the inputs of the full batch.

        Returns:
            Weights, a number or a tensor that has the batch axis, and whose other axes
            broadcast to those of the prediction ``[N, *]``.
        """
        return self._reduction_factor(module)

    def _reduction_factor(self, module: Layer) -> Union[float, Tensor]:
        if module.reduction != "mean":
            return 1.0
        return reciprocal(self._get_mean_normalization(module.input0))

    # Sampling

    def _sqrt_hessian_sampled(
        self,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Subsampling = None,
        generator: Randomness = None,
    ) -> Tensor:
        prediction, root_weights = self._prepare(module, subsampling)
        options = loss_base.as_option(generator)
        grads = self.compute_sampled_grads(prediction, mc_samples, **options)
        return (grads * (root_weights / sqrt(mc_samples))).to(module.input0.dtype)

    def compute_sampled_grads(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        """Compute gradients of the plain loss for targets drawn from the model.

        Args:
            subsampled_input: Prediction, shape ``[N, *]``.
            mc_samples: Number M of targets to draw per term.
            generator: Random number generator. Default: PyTorch's global one.

        Returns:
            Would-be gradients with respect to the prediction, without the loss's
            options, reduction, and without 1/√M. Shape ``[M, N, *]``.
        """
        x, options = subsampled_input, loss_base.as_option(generator)
        if self.use_autograd:
            return self._compute_sampled_grads_autograd(x, mc_samples, generator)
        return self._compute_sampled_grads_manual(x, mc_samples, **options)

    def _compute_sampled_grads_autograd(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness
    ) -> Tensor:
        x, create_graph = as_leaf(subsampled_input)
        with torch.enable_grad():
            distribution = self._make_distribution(x)
            targets = self._sample_targets(x, mc_samples, generator)
            losses = (-distribution.log_prob(target).sum() for target in targets)
            options: Any = {"retain_graph": True, "create_graph": create_graph}
            grads = [grad(loss, x, **options)[0] for loss in losses]
        return torch.stack(grads)

    def _compute_sampled_grads_manual(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        """Compute what :meth:`compute_sampled_grads` returns in closed form.

        Args:
            subsampled_input: Prediction, shape ``[N, *]``.
            mc_samples: Number M of targets to draw per term.
            generator: Random number generator. Default: PyTorch's global one.

        Returns:
            Would-be gradients, shape ``[M, N, *]``.

        Raises:
            NotImplementedError: If the subclass has no closed form.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no closed form for sampled gradients. Set "
            "use_autograd=True, or define _compute_sampled_grads_manual."
        )

    def _sample_targets(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        """Draw targets from the model's own distribution.

        Args:
            subsampled_input: Prediction, shape ``[N, *]``.
            mc_samples: Number M of targets to draw per term.
            generator: Random number generator. Default: PyTorch's global one.

        Returns:
            Targets, stacked along a leading axis of size M.

        Raises:
            NotImplementedError: If a generator is given, because PyTorch's
                distributions only draw from the global one.
        """
        if generator is not None:
            raise NotImplementedError(
                f"{type(self).__name__} draws from torch.distributions, which accept "
                "no generator. Seed the global one, or define _sample_targets."
            )
        return self._make_distribution(subsampled_input).sample((mc_samples,))

    # Shared by the rules

    def check_psd(self, module: Layer) -> None:  # noqa: D102
        super().check_psd(module)
        self._prepare(module)

    def _prepare(
        self, module: Layer, subsampling: Subsampling = None
    ) -> Tuple[Tensor, Union[float, Tensor]]:
        """Check the loss; return the selected predictions and square root of weights.

        Args:
            module: Loss module, with the inputs of the full batch.
            subsampling: Indices of selected samples. Default: all.

        Returns:
            Prediction, at least in float32, and root of ``_hessian_weights``.

        Raises:
            ValueError: If a weight is negative: the Hessian is not positive
                semi-definite, and has no square root. Where weights must not be looked
                at, it is NaN.
        """
        prediction, weights = self._prediction_and_weights(module, subsampling)
        if not isinstance(weights, Tensor):
            return prediction, sqrt(weights)
        if may_look(weights) and (weights < 0).any():
            raise ValueError(
                f"{type(module).__name__}: the Hessian of the loss is not positive "
                "semi-definite, because the targets or weights are such that the total "
                "weight of a term is negative. It has no square root, and quantities "
                "based on the GGN do not exist. Use non-negative weights and targets."
            )
        return prediction, weights.sqrt()

    def _prediction_and_weights(
        self, module: Layer, subsampling: Subsampling = None
    ) -> Tuple[Tensor, Union[float, Tensor]]:
        self._verify_support(module)
        loss_base.loss_inputs(module)
        weights = self._hessian_weights(module)
        if isinstance(weights, Tensor):
            weights = subsample(weights, subsampling=subsampling)
        prediction = subsample(module.input0, subsampling=subsampling)
        return full_precision(prediction), weights


class ClosedFormNLLLossDerivatives(NLLLossDerivatives):
    """Convex losses that know their sampled gradients without autograd."""

    def __init__(self, use_autograd: bool = False):
        """Choose how sampled gradients are computed.

        Args:
            use_autograd: Differentiate the log-density with autograd instead of using
                the closed form. Default: ``False``.
        """
        super().__init__(use_autograd=use_autograd)

    def hessian_is_psd(self) -> bool:
        """Return whether the loss Hessian is positive semi-definite.

        Returns:
            ``True``
        """
        return True


class ElementwiseNLLLossDerivatives(ClosedFormNLLLossDerivatives):
    """Losses that are sums of terms of one feature each: the Hessian is diagonal."""

    @abstractmethod
    def _root_plain_hessian(self, prediction: Tensor) -> Tensor:
        """Return the square root of each term's plain second derivative.

        Args:
            prediction: Prediction, shape ``[N, *]``.

        Returns:
            Root of the second derivative without the loss's options, ``[N, *]``.
        """

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return input.numel()

    def _sqrt_hessian(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        prediction, root_weights = self._prepare(module, subsampling)
        root = self._root_plain_hessian(prediction) * root_weights
        columns = torch.diag_embed(torch.atleast_1d(root).unsqueeze(-1).flatten(1))
        columns = columns.movedim(1, 0)
        return columns.reshape(len(columns), *root.shape).to(module.input0.dtype)

    def _make_hessian_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads
    ) -> MatProd:
        prediction, weights = self._prediction_and_weights(module)
        diagonal = self._root_plain_hessian(prediction) ** 2 * weights
        return lambda mat: (diagonal * mat).to(mat.dtype)
