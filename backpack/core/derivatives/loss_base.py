"""Second derivatives of a loss with respect to its input, see ``input_base.py``."""

from abc import ABC, abstractmethod
from typing import Any, Dict, Iterator, Optional, Tuple, Union

import torch
from torch import Size, Tensor, nn
from torch.autograd import grad

from backpack.core.derivatives import shape_check
from backpack.core.derivatives.input_base import BaseDerivatives
from backpack.core.derivatives.stored import as_leaf, check_slope, repeat, stored_inputs
from backpack.core.per_sample.sums import reciprocal
from backpack.utils.hooks import message
from backpack.utils.subsampling import Subsampling
from backpack.utils.types import Grads, Layer, MatProd, Randomness, full_precision
from backpack.utils.unsqueeze import unit_columns

NO_SCALAR_LOSS = (
    "{derivatives} needs a loss whose output is a scalar, but {module} has an output "
    "of shape {shape}. Use reduction='mean' or reduction='sum'."
)
UNKNOWN_REDUCTION = (
    "{module}: the empirical Fisher (fisher_type='empirical') needs to know whether a "
    "loss averages over samples, and the reduction of this one is {found}. Give the "
    "loss module an attribute `reduction`: 'mean' if it does, 'sum' if it does not."
)


def loss_inputs(module: Layer) -> Tuple[Any, ...]:
    """Collect the inputs of a loss module's call, prediction first.

    Args:
        module: Loss module with ``input0``, ``input1``, … of its last call.

    Returns:
        The inputs in order.

    Raises:
        NotImplementedError: If an input other than the prediction requires grad.
    """
    inputs = stored_inputs(module)
    for position, value in enumerate(inputs[1:], start=1):
        if isinstance(value, Tensor) and value.requires_grad:
            raise NotImplementedError(
                f"{type(module).__name__}: input {position} requires grad, but second-"
                "order quantities treat the first input as the prediction and all "
                "others as constants. Pass the prediction first, and detach the others."
            )
    return inputs


def class_weights(module: Layer) -> Tensor:
    """Return the weight of each target, by which a mean over classes divides.

    Args:
        module: Loss module with class indices as targets.

    Returns:
        Weights of the targets' classes, zero where targets are ignored; of the shape of
        the targets.
    """
    target, weights = module.input1, module.weight
    valid = target != module.ignore_index
    if weights is None:
        return valid.to(full_precision(module.input0).dtype)
    return full_precision(weights)[target.where(valid, 0).long()] * valid


def as_option(generator: Randomness) -> Dict[str, Any]:
    """Pass a generator on only if there is one.

    Methods that override ours may not know the keyword.

    Args:
        generator: Random number generator or ``None``.

    Returns:
        Keyword arguments.
    """
    return {} if generator is None else {"generator": generator}


# Losses that are averaged over all entries, not only over samples
_ELEMENTWISE = (
    *(nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.BCELoss),
    *(nn.GaussianNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss),
)


class BaseLossDerivatives(BaseDerivatives, ABC):
    """Second derivatives of a loss 𝓛 = c Σₙ ℓ(xₙ, yₙ) with respect to its input x.

    Every method needs a loss module whose output is a scalar. The factor c, one over
    what the loss divides by, is always that of the full mini-batch.
    """

    def compared_axis(self, prediction: Tensor) -> Optional[int]:
        """Return the axis whose entries enter each term of the loss together.

        Args:
            prediction: The prediction.

        Returns:
            The axis, counted from the end; ``None`` if samples may lie along any.
        """
        return None

    def sqrt_hessian(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        """Compute a factor S of the loss Hessian: Σ_v S_vn S_vnᵀ = ∂²𝓛/∂xₙ².

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.
            subsampling: Selected samples. Default ``None`` uses all.

        Returns:
            Factor of shape ``[V, N, *in]``.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        result = self._sqrt_hessian(module, g_inp, g_out, subsampling=subsampling)
        shape_check._check_like(result, module, "input0", subsampling=subsampling)
        return result

    @abstractmethod
    def _sqrt_hessian(self, *args: Any, **options: Any) -> Tensor:
        """Compute a factor of the loss Hessian, see :meth:`sqrt_hessian`."""

    def sqrt_hessian_compact(self, module: Layer) -> Tensor:
        """Compute a factor like :meth:`sqrt_hessian` with as few columns as is known.

        It serves quantities that are sums over columns.

        Args:
            module: Loss module with stored inputs and output.

        Returns:
            Factor of shape ``[V, N, *in]``.
        """
        return self.sqrt_hessian(module, (), ())

    def sqrt_hessian_chunks(
        self, module: Layer, size: int, compact: bool
    ) -> Iterator[Tensor]:
        """Compute a factor like :meth:`sqrt_hessian`, some columns at a time.

        Args:
            module: Loss module with stored inputs and output.
            size: Number of columns at a time.
            compact: Whether it shall have as few columns as is known.

        Yields:
            Columns of shape ``[V, N, *in]`` with V = ``size``, or fewer.

        Raises:
            ValueError: If the loss is no scalar.
        """  # noqa: DAR401
        if compact:
            columns = self.sqrt_hessian_compact(module)
        else:
            columns = self.sqrt_hessian(module, (), ())
        yield from columns.split(size)

    def sqrt_hessian_sampled(
        self,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Subsampling = None,
        generator: Randomness = None,
    ) -> Tensor:
        """Draw a factor S of the loss Hessian: E[Σ_v S_vn S_vnᵀ] = ∂²𝓛/∂xₙ².

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.
            mc_samples: Number of Monte-Carlo samples, M. Default: ``1``.
            subsampling: Selected samples. Default ``None`` uses all.
            generator: Random number generator. Default: PyTorch's global one.

        Returns:
            Factor of shape ``[M, N, *in]``.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        args = module, g_inp, g_out, mc_samples, subsampling
        result = self._sqrt_hessian_sampled(*args, **as_option(generator))
        shape_check._check_like(result, module, "input0", subsampling=subsampling)
        return result

    @abstractmethod
    def _sqrt_hessian_sampled(self, *args: Any, **options: Any) -> Tensor:
        """Draw a factor of the loss Hessian, see :meth:`sqrt_hessian_sampled`."""

    @shape_check.make_hessian_mat_prod_accept_vectors
    @shape_check.make_hessian_mat_prod_check_shapes
    def make_hessian_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads
    ) -> MatProd:
        """Make a function that multiplies with the loss Hessian ∂²𝓛/∂x².

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.

        Returns:
            Function that maps ``[V, N, *in]`` to the same shape; it accepts a vector
            ``[N, *in]``, too.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        return self._make_hessian_mat_prod(module, g_inp, g_out)

    @abstractmethod
    def _make_hessian_mat_prod(self, *args: Any) -> MatProd:
        """Make a product with the Hessian, see :meth:`make_hessian_mat_prod`."""

    def sum_hessian(self, module: Layer, g_inp: Grads, g_out: Grads) -> Tensor:
        """Sum the loss Hessians of all samples.

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.

        Returns:
            Σₙ ∂²𝓛/∂xₙ² of shape ``[C, C]``.

        Raises:
            ValueError: If the loss is no scalar.
        """
        self._check_scalar(module)
        return self._sum_hessian(module, g_inp, g_out)

    def _sum_hessian(self, module: Layer, g_inp: Grads, g_out: Grads) -> Tensor:
        # products with one unit vector per feature, the same for each sample
        x = module.input0
        batch, _ = self._split_shape(x)
        basis = unit_columns(x, len(batch))
        columns = self._make_hessian_mat_prod(module, g_inp, g_out)(basis)
        return columns.reshape(len(basis), batch.numel(), len(basis)).sum(1)

    def _split_shape(self, x: Tensor) -> Tuple[Size, Size]:
        """Split the prediction's shape into batch axis and feature axes.

        Args:
            x: Prediction.

        Returns:
            Shape of the batch axis and of the features.
        """
        return x.shape[:1], x.shape[1:]

    def scaled_gradient(self, module: Layer) -> Tensor:
        """Compute the column of the empirical Fisher: c Σₙ ∇ℓₙ ∇ℓₙᵀ = Σₙ sₙ sₙᵀ.

        Args:
            module: Loss module with stored inputs and output.

        Returns:
            Gradients with respect to the prediction, divided by the root of the factor
            c of the loss's reduction, of shape ``[1, N, *in]``.

        Raises:
            ValueError: If the loss is no scalar, or its reduction is not known.
        """  # noqa: DAR401
        self._check_scalar(module)
        reduction = getattr(module, "reduction", None)
        if reduction not in ("mean", "batchmean", "sum", "none"):
            text = message(UNKNOWN_REDUCTION, module=module, found=repr(reduction))
            raise ValueError(text)
        prediction, *others = loss_inputs(module)
        prediction, create_graph = as_leaf(prediction)
        with torch.enable_grad():
            loss = repeat(module, (prediction, *others))
            (gradient,) = grad(loss, prediction, create_graph=create_graph)
        check_slope(module, gradient)
        return (gradient / self.factor_of_terms(module) ** 0.5).unsqueeze(0)

    def factor_of_terms(self, module: Layer) -> Union[float, Tensor]:
        """Return c: by what all terms of the loss are multiplied.

        Args:
            module: Loss module, with the inputs of the full batch.

        Returns:
            The factor.
        """
        return self._reduction_factor(module)

    def _reduction_factor(self, module: Layer) -> Union[float, Tensor]:
        """Return c, one over what the loss divides the sum over its terms by.

        Args:
            module: Loss module, with the inputs of the full batch.

        Returns:
            The factor.
        """
        reduction = module.reduction
        if reduction not in ("mean", "batchmean"):
            return 1.0
        x = module.input0
        if reduction == "mean" and isinstance(module, nn.NLLLoss):
            return 1.0 / class_weights(module).sum()
        elementwise = reduction == "mean" and isinstance(module, _ELEMENTWISE)
        return reciprocal((x.shape if elementwise else x.shape[:1]).numel())

    def check_psd(self, module: Layer) -> None:
        """Refuse a loss that the GGN is not defined for, by an exception.

        Args:
            module: Loss module with stored inputs and output, whose Hessian must be
                positive semi-definite for each sample.
        """
        if not self.hessian_is_psd():
            self.sqrt_hessian(module, (), ())

    def _check_scalar(self, module: Layer) -> None:
        """Refuse losses whose output is no scalar, which any single number is.

        Args:
            module: Loss module with stored output.

        Raises:
            ValueError: If the loss is no scalar.
        """
        if module.output.numel() != 1:
            who = {"derivatives": self, "module": module}
            shape = module.output.shape
            raise ValueError(message(NO_SCALAR_LOSS, **who, shape=shape))
