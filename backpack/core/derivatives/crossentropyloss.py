"""Softmax cross-entropy: the negative log-likelihood of a categorical distribution."""

from typing import Any, Callable, Iterator, Optional, Tuple, Union

import torch
from torch import Size, Tensor
from torch.distributions import Categorical

from backpack.core.derivatives.loss_base import class_weights
from backpack.core.derivatives.nll_base import ClosedFormNLLLossDerivatives
from backpack.utils.subsampling import Subsampling
from backpack.utils.types import Grads, Layer, MatProd, Randomness, full_precision, kind

ALL = slice(None)


class CrossEntropyLossDerivatives(ClosedFormNLLLossDerivatives):
    """Derivatives of ``CrossEntropyLoss``.

    Predictions are ``[N, C]``, ``[N, C, d1, …]`` (each position is a term of its own),
    or ``[C]`` (one sample without batch axis). A term with target probabilities q,
    after label smoothing, and class weights w is − Σ_c w_c q_c log p_c with p the
    softmax of the prediction. Its Hessian is s (diag(p) − p pᵀ) with s = Σ_c w_c q_c.
    """

    def compared_axis(self, prediction: Tensor) -> int:  # noqa: D102
        return _class_axis(prediction) - prediction.dim()

    def _prediction_and_weights(
        self, module: Layer, subsampling: Subsampling = None
    ) -> Tuple[Tensor, Any]:
        if subsampling is not None and module.input0.dim() == 1:
            raise ValueError(
                "CrossEntropyLoss on a prediction of shape [C] has no batch axis, and "
                f"subsampling={subsampling} cannot select from it. Use shape [1, C]."
            )
        return super()._prediction_and_weights(module, subsampling)

    def _split_shape(self, x: Tensor) -> Tuple[Size, Size]:
        return x.shape[: _class_axis(x)], x.shape[_class_axis(x) :]

    def _make_distribution(self, subsampled_input: Tensor) -> Categorical:
        return Categorical(logits=_classes_last(subsampled_input))

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return input.numel() // input.shape[_class_axis(input)]

    def _hessian_weights(self, module: Layer) -> Tensor:
        """Return c s for each term.

        Args:
            module: Loss module, with the inputs of the full batch.

        Returns:
            Shape of the prediction with a class axis of size one.
        """
        target, smoothing = module.input1, module.label_smoothing
        axis = _class_axis(module.input0)
        weights, own = self._target_weights(module), module.weight
        factor = self._reduction_factor(module, weights)
        if smoothing:
            mean = 1.0 if own is None else full_precision(own).mean()
            weights = (1 - smoothing) * weights + smoothing * mean
        weights = weights * factor
        if not target.is_floating_point():  # zero, even if the factor is 1/0
            weights = weights.where(target != module.ignore_index, 0.0)
        return weights.unsqueeze(axis)

    def _reduction_factor(
        self, module: Layer, weights: Optional[Tensor] = None
    ) -> Union[float, Tensor]:
        if module.reduction != "mean" or module.input1.is_floating_point():
            return super()._reduction_factor(module)
        weights = self._target_weights(module) if weights is None else weights
        return 1.0 / weights.sum()

    def _target_weights(self, module: Layer) -> Tensor:
        """Return Σ_c w_c q_c for each term, before label smoothing.

        Args:
            module: Loss module, with the inputs of the full batch.

        Returns:
            Shape of the prediction without its class axis.
        """
        target, weights = module.input1, module.weight
        if target.is_floating_point():
            target = _classes_last(full_precision(target))
            if weights is None:
                return target.sum(-1)
            return target @ full_precision(weights)
        return class_weights(module)

    def sum_hessian(self, module: Layer, g_inp: Grads, g_out: Grads) -> Tensor:
        """Sum the loss Hessians of all samples.

        Args:
            module: Loss module with stored inputs and output.
            g_inp: Gradients with respect to the module's inputs.
            g_out: Gradients with respect to the module's output.

        Returns:
            Σₙ ∂²𝓛/∂xₙ² of shape ``[C, C]``, or ``[C, d1, …, C, d1, …]`` for predictions
            with more axes.
        """
        _, shape = self._split_shape(module.input0)
        return super().sum_hessian(module, g_inp, g_out).reshape(*shape, *shape)

    def _sqrt_hessian(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        return self._columns(module, subsampling, _factor)

    def sqrt_hessian_compact(self, module: Layer) -> Tensor:  # noqa: D102
        self._check_scalar(module)
        return self._columns(module, None, _triangular_factor)

    def sqrt_hessian_chunks(
        self, module: Layer, size: int, compact: bool
    ) -> Iterator[Tensor]:
        """Compute a factor for some classes at a time; all would be quadratic in them.

        Args:
            module: Loss module with stored inputs and output.
            size: Number of columns at a time.
            compact: Whether it shall have as few columns as is known.

        Yields:
            Columns of shape ``[V, N, C, *]`` with V = ``size``, or fewer.

        Raises:
            ValueError: If the loss is no scalar.
        """  # noqa: DAR401
        self._check_scalar(module)
        x = module.input0
        num_classes = x.shape[_class_axis(x)]
        positions = x.shape[_class_axis(x) + 1 :].numel()
        num_columns = max(1, num_classes - 1) if compact else num_classes
        factor = _triangular_factor if compact else _factor
        step = max(1, size // max(1, positions))
        for start in range(0, num_columns, step):
            classes = slice(start, min(start + step, num_columns))
            yield from self._columns(module, None, factor, classes).split(size)

    def _columns(
        self,
        module: Layer,
        subsampling: Subsampling,
        factor: Callable[[Tensor, slice], Tensor],
        classes: slice = ALL,
    ) -> Tensor:
        """Arrange the factors of all terms into columns, one per class and position.

        Args:
            module: Loss module, with the inputs of the full batch.
            subsampling: Indices of selected samples. Default: all.
            factor: Maps log-probabilities ``[*, C]`` to columns ``[*, V, C]`` of a
                factor of diag(p) − p pᵀ.
            classes: Which columns of the factor to compute. Default: all.

        Returns:
            Columns ``[V · d1 · …, N, C, d1, …]``.
        """
        prediction, root_weights = self._prepare(module, subsampling)
        assert isinstance(root_weights, Tensor)  # one for each term
        terms = factor(_classes_last(prediction).log_softmax(-1), classes)
        terms = terms * _classes_last(root_weights)[..., None]
        num_samples = 1 if prediction.dim() == 1 else len(prediction)
        positions = prediction.shape[2:].numel()
        terms = terms.reshape(num_samples, positions, *terms.shape[-2:])  # [n, t, v, c]
        columns = torch.diag_embed(terms.permute(2, 0, 3, 1), dim1=1, dim2=-1)
        columns = columns.flatten(0, 1).to(module.input0.dtype)
        return columns.reshape(len(columns), *prediction.shape)

    def _make_hessian_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads
    ) -> MatProd:
        prediction, weights = self._prediction_and_weights(module)
        axis = _class_axis(prediction)
        probabilities = prediction.softmax(axis)

        def hessian_mat_prod(mat: Tensor) -> Tensor:
            mean = (probabilities * mat).sum(axis + 1, keepdim=True)
            return (weights * probabilities * (mat - mean)).to(mat.dtype)

        return hessian_mat_prod

    def _sample_targets(
        self,
        subsampled_input: Tensor,
        mc_samples: int,
        generator: Randomness = None,
        probabilities: Optional[Tensor] = None,
    ) -> Tensor:
        if probabilities is None:
            probabilities = _classes_last(subsampled_input).softmax(-1)
        return _draw(probabilities.detach(), mc_samples, generator)

    def _compute_sampled_grads_manual(
        self, subsampled_input: Tensor, mc_samples: int, generator: Randomness = None
    ) -> Tensor:
        probabilities = _classes_last(subsampled_input).softmax(-1)
        args = subsampled_input, mc_samples, generator, probabilities
        targets = self._sample_targets(*args)
        minus_one = probabilities.new_full((), -1.0).expand(*targets.shape, 1)
        grads = probabilities.expand(mc_samples, *probabilities.shape)
        grads = grads.scatter_add(-1, targets.unsqueeze(-1), minus_one)
        return grads.movedim(-1, 1 + _class_axis(subsampled_input))


def _class_axis(prediction: Tensor) -> int:
    return min(1, prediction.dim() - 1)


def _classes_last(prediction: Tensor) -> Tensor:
    return prediction.movedim(_class_axis(prediction), -1)


def _draw(probabilities: Tensor, mc_samples: int, generator: Randomness) -> Tensor:
    """Draw classes by inverting their distribution function: a class per number.

    ``torch.multinomial`` draws a number per class. As ours are in (0, 1], a class of
    probability zero is never drawn.

    Args:
        probabilities: Probabilities of shape ``[*, C]``.
        mc_samples: Number M of classes to draw for each.
        generator: Random number generator. ``None`` for PyTorch's global one.

    Returns:
        Classes of shape ``[M, *]``.
    """
    cdf = probabilities.cumsum(-1)
    shape = (*cdf.shape[:-1], mc_samples)
    uniform = torch.rand(shape, generator=generator, **kind(cdf))
    drawn = torch.searchsorted(cdf, (1 - uniform) * cdf[..., -1:])
    # it points past the end where probabilities are NaN
    return drawn.clamp_(max=cdf.shape[-1] - 1).movedim(-1, 0)


def _factor(log_p: Tensor, classes: slice) -> Tensor:
    """Compute the columns √p_v (e_v − p), whose outer products sum to diag(p) − p pᵀ.

    Args:
        log_p: Log-probabilities, shape ``[*, C]``.
        classes: Which columns to compute.

    Returns:
        Columns, shape ``[*, V, C]`` with V = C for all of them.
    """
    root = (0.5 * log_p[..., classes]).exp()
    unit = torch.eye(log_p.shape[-1], dtype=log_p.dtype, device=log_p.device)[classes]
    return root[..., :, None] * (unit - log_p.exp()[..., None, :])


def _triangular_factor(log_p: Tensor, classes: slice) -> Tensor:
    """Compute the Cholesky factor of diag(p) − p pᵀ, without its last, zero column.

    With the tails q_k = Σ_{j > k} p_j, column k is √d_k (e_k − Σ_{j > k} p_j / q_k e_j)
    for d_k = p_k q_k / q_{k−1}. No difference of probabilities is taken, and all
    fractions are in log-space, so that saturated softmax outputs lose no digits.

    Args:
        log_p: Log-probabilities, shape ``[*, C]``.
        classes: Which columns to compute.

    Returns:
        Columns, shape ``[*, V, C]`` with V = C - 1 for all of them; one column (of
        zeros) for C = 1.
    """
    num_classes = log_p.shape[-1]
    if num_classes == 1:
        return _factor(log_p, classes)
    # classes that are ruled out have −∞; differences need finite numbers
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min / 16)
    tail = log_p.flip(-1).logcumsumexp(-1).flip(-1)
    root_d = 0.5 * (log_p[..., :-1] + tail[..., 1:] - tail[..., :-1])[..., classes]
    tail = tail[..., 1:][..., classes]
    below = log_p[..., None, :] + (root_d - tail)[..., :, None]
    row = torch.arange(num_classes - 1, device=log_p.device)[classes, None]
    column = torch.arange(num_classes, device=log_p.device)
    on_diagonal = (row == column) * root_d.exp()[..., :, None]
    return on_diagonal - below.masked_fill(column <= row, -torch.inf).exp()
