"""Any scalar loss module: its Hessian at the prediction, by autograd."""

from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from math import nan, sqrt
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import Module, MultiLabelMarginLoss, MultiMarginLoss
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from backpack.core.derivatives.loss_base import BaseLossDerivatives, loss_inputs
from backpack.core.derivatives.stored import (
    as_leaf,
    check_slope,
    has_own_functions,
    repeat,
    scratch_copy,
)
from backpack.core.layout import bits, has_bit
from backpack.hessianfree.lop import pull_back, pull_columns
from backpack.utils.errors import warn_user
from backpack.utils.hooks import message
from backpack.utils.kroneckers import diagonalize
from backpack.utils.state import ask, may_look
from backpack.utils.subsampling import Subsampling, subsample
from backpack.utils.types import (
    Grads,
    Layer,
    MatProd,
    Randomness,
    full_precision,
    kind,
)
from backpack.utils.unsqueeze import flatten, unit_columns
from backpack.utils.writes import writes_by_name

# Errors in the Hessian, relative to its largest entry, that go unnoticed. Rounding
# errors reach this size only if all samples are saturated.
TOLERANCE = 1e-8
# Rows of the largest Hessian of all samples together that is diagonalized
MAX_ROWS = 2**12

NO_CURVATURE = (
    "{module}: the Hessian of this loss is zero, and so is the Gauss-Newton matrix. A "
    "loss that is linear in pieces has no curvature; that of NLLLoss and KLDivLoss "
    "lies in the log-softmax before them: use CrossEntropyLoss, of classes or "
    "probabilities."
)
COUPLES = (
    "{module}: the Hessian of the loss couples samples (axis 0 of the prediction), but "
    "this quantity needs a loss that is a sum over samples. Let each term depend on "
    "one sample only, or use HMP, or GGNMP (of up to {limit} outputs in all)."
)
COMPLEX = (
    "{module}: the prediction consists of complex numbers, and second-order quantities "
    "are not defined for such. Let the model return `torch.view_as_real(prediction)`, "
    "and the loss take that."
)
NOT_FINITE = (
    "{module}: the Hessian of the loss at the prediction is not finite (it contains "
    "NaN or infinity), so that there are no second-order quantities. Use a loss that "
    "is twice differentiable there, or check the prediction."
)
NOT_TWICE = (
    "{module}: autograd cannot differentiate this loss twice, which second-order "
    "quantities need. Write the loss with operations that are twice differentiable."
)

DERIVES = (
    "{module}: the loss differentiates its prediction by something that led to it "
    "({error}). Its Hessian at the prediction does not contain that: compute the "
    "derivative in the model, and return it as a part of the prediction."
)

NOT_ITS_SLOPE = (
    "{module}: the second derivative that autograd gives is not the derivative of the "
    "loss's gradient. A function of your own uses in `backward` what `forward` has "
    "computed from the prediction, which counts as a constant. Save the function's "
    "inputs instead, and compute it in `backward`."
)


class _InDouble(TorchFunctionMode):
    """Lets a loss go on in float64 that casts to a coarser type, or has constants."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an operation with finer types for coarser ones."""
        func, name = _CASTS.get(func, func), getattr(func, "__name__", "")
        finer = partial(tree_map_only, torch.dtype, lambda x: _FINER.get(x, x))
        args, kwargs = finer(args), finer(kwargs or {})
        if func is grad:  # which looks for its inputs in the graph
            return func(*args, **kwargs)
        same = partial(tree_map_only, Tensor, _to_double)
        writes = writes_by_name(name) or name in ("__set__", "requires_grad_")
        if writes or "out" in kwargs:
            return func(*args[:1], *same(args[1:]), **kwargs)
        return same(func(*same(args), **same(kwargs)))


_FINER: Dict[Any, torch.dtype] = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
_CASTS: Dict[Any, Callable] = {
    **dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), Tensor.double),
    Tensor.type_as: lambda x, other: x.to(_FINER.get(other.dtype, other.dtype)),
}


FactorOf = Callable[[Callable, tuple, Dict[str, Any]], Any]


class _Inside(TorchFunctionMode):
    """Puts leaves in the place of what losses inside of another one return.

    Attributes:
        found: The leaves, and the factor c of each of these losses.
    """

    def __init__(self, factor_of: FactorOf):
        """Start without any.

        Args:
            factor_of: Tells the factor c of a function that is called; ``None`` if it
                is no loss that is known.
        """
        super().__init__()
        self._factor_of = factor_of
        self.found: List[Tuple[Tensor, Any]] = []

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        out, factor = func(*args, **(kwargs or {})), None
        if isinstance(out, Tensor) and out.requires_grad:
            factor = self._factor_of(func, args, kwargs or {})
        if factor is None:
            return out
        self.found.append((out.detach().requires_grad_(), factor))
        return self.found[-1][0]


class GenericLossDerivatives(BaseLossDerivatives):
    """Derivatives of a loss module that has no rule of its own.

    The loss must be a sum of terms that belong to one sample each, and every sample's
    Hessian must be positive semi-definite; both are checked. A loss whose gradient is
    constant almost everywhere, like ``NLLLoss`` or ``L1Loss``, has a zero Hessian.
    All is computed in float64, as a saturated loss has a Hessian far smaller than the
    rounding errors in its gradient. The factor is differentiable, except where a
    Hessian that is not diagonal has repeated eigenvalues: its derivative is NaN there.
    """

    def __init__(self, factor_of: Optional[FactorOf] = None):
        """Store how losses are known that a loss calls.

        Args:
            factor_of: See :class:`_Inside`. Default: none is known.
        """
        self._factor_of = factor_of

    def factor_of_terms(self, module: Layer) -> Union[float, Tensor]:
        """Return c: by what all terms of losses that are called inside are multiplied.

        Args:
            module: Loss module, with the inputs of the full batch.

        Returns:
            The factor; that of a mean over samples where this does not tell, as the
            loss has other terms, or some have another factor.
        """
        factor = self._reduction_factor(module)
        if self._factor_of is None or module.reduction not in ("mean", "batchmean"):
            return factor
        prediction, *others = loss_inputs(module)
        prediction = prediction.detach().requires_grad_()
        scratch, inside = _without_hooks(module), _Inside(self._factor_of)
        with torch.enable_grad(), inside:
            loss = repeat(module, (prediction, *others), scratch, is_checked=False)
        leaves = [leaf for leaf, _ in inside.found]
        *slopes, rest = grad(loss, (*leaves, prediction), allow_unused=True)
        known = [(c, x) for (_, c), x in zip(inside.found, slopes) if x is not None]
        if rest is not None or not known:
            return factor
        found = [(c * full_precision(x)).abs().flatten() for c, x in known]
        of_terms = torch.cat(found)
        key = "terms", type(module), repr(module), len(of_terms)
        if not ask(of_terms, key, lambda: _is_one_number(of_terms)):
            return factor
        return of_terms.amax()

    def _make_hessian_mat_prod(
        self, module: Layer, g_inp: Grads, g_out: Grads
    ) -> MatProd:
        if _is_linear_in_pieces(module):
            return torch.zeros_like
        inputs = loss_inputs(module)
        if inputs[0].is_complex():
            raise NotImplementedError(message(COMPLEX, module=module))
        given = inputs[0].detach().requires_grad_(), *inputs[1:]
        with torch.enable_grad(), _naming(module):  # in float64, values may be others
            repeat(module, given, _without_hooks(module))
        prediction, *others = map(_to_double, inputs)
        prediction, create_graph = as_leaf(prediction)

        def differentiate(x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
            """Return loss and gradient, and the cotangent at the loss."""
            scratch = _without_hooks(module, _to_double)
            with torch.enable_grad(), _InDouble():
                loss = repeat(module, (x, *others), scratch, is_checked=False)
                cotangent = torch.ones_like(loss).requires_grad_()
                (gradient,) = pull_back([loss], [x], [cotangent], True, True)
            return loss, gradient, cotangent

        loss, gradient, cotangent = differentiate(prediction)
        check_slope(module, gradient)
        with torch.enable_grad(), _naming(module):
            _check_differentiable(module, gradient, cotangent)

        def hessian_mat_prod(mat: Tensor) -> Tensor:
            with _naming(module):
                columns = pull_columns(gradient, prediction, mat, create_graph)[0]
            return columns.to(mat.dtype)

        if may_look(loss) and has_own_functions(loss):

            def gradient_at(x: Tensor) -> Tensor:
                return differentiate(x.requires_grad_())[1].detach()

            _check_slope(module, prediction, gradient_at, hessian_mat_prod)
        return hessian_mat_prod

    def _hessian(
        self, module: Layer, warns: bool = True, may_couple: bool = False
    ) -> Tensor:
        """Compute the Hessian blocks of all samples.

        Args:
            module: Loss module, with the inputs of the full batch.
            warns: Whether it matters if all is zero. Default: ``True``.
            may_couple: Whether samples that are coupled are one. Default: ``False``.

        Returns:
            Blocks, shape ``[N, D, D]`` with D the number of features per sample.

        Raises:
            NotImplementedError: If the loss couples samples, or the prediction is
                complex.
            ValueError: If the Hessian is not finite.
        """
        hessian_mat_prod = self._make_hessian_mat_prod(module, (), ())
        prediction = module.input0.detach().double()
        num_samples = prediction.shape[:1].numel()

        columns = unit_columns(prediction, 1)
        size, hessian = len(columns), hessian_mat_prod(columns)
        hessian = hessian.reshape(size, num_samples, size).movedim(0, 1)
        if not hessian.numel():
            return hessian
        looks = may_look(hessian)
        if looks and not hessian.isfinite().all():
            raise ValueError(message(NOT_FINITE, module=module))

        inputs = map(_describe, loss_inputs(module))
        key = "couples", type(module), repr(module), *inputs
        if ask(hessian, key, lambda: _couples(prediction, hessian_mat_prod)):
            if not may_couple or prediction.numel() > MAX_ROWS:
                text = message(COUPLES, module=module, limit=MAX_ROWS)
                raise NotImplementedError(text)
            return hessian_mat_prod(unit_columns(prediction, 0)).flatten(1)[None]
        if looks and warns and not hessian.any():
            warn_user(message(NO_CURVATURE, module=module))
        return hessian

    def check_psd(self, module: Layer) -> None:  # noqa: D102
        hessian = self._hessian(module, may_couple=True)
        if hessian.numel():
            self._factor(module, hessian)

    def _sum_hessian(self, module: Layer, g_inp: Grads, g_out: Grads) -> Tensor:
        return self._hessian(module).sum(0).to(module.input0.dtype)

    def _sqrt_hessian(
        self, module: Layer, g_inp: Grads, g_out: Grads, subsampling: Subsampling = None
    ) -> Tensor:
        hessian = subsample(self._hessian(module), subsampling=subsampling)
        shape = hessian.shape[1], *subsample(module.input0, 0, subsampling).shape
        if not hessian.numel():
            return module.input0.new_zeros(shape)
        factor = self._factor(module, hessian)  # [n, feature, v]
        return factor.movedim(2, 0).to(module.input0.dtype).reshape(shape)

    def _factor(self, module: Layer, hessian: Tensor) -> Tensor:
        """Factor positive semi-definite blocks ``[N, D, D]``.

        Args:
            module: Loss module.
            hessian: Blocks ``[N, D, D]`` of its Hessian.

        Returns:
            Factors of the same shape, whose columns are on the last axis.

        Raises:
            ValueError: If a block is not positive semi-definite.
        """
        diagonal = hessian.diagonal(dim1=1, dim2=2)
        looks = may_look(hessian)
        if looks and torch.equal(hessian, torch.diag_embed(diagonal)):
            eigenvalues = diagonal
            eigenvectors = torch.eye(diagonal.shape[1]).to(diagonal)
        else:
            eigenvalues, eigenvectors = diagonalize(hessian)
            eps: Any = 100 * hessian.shape[1] * torch.finfo(hessian.dtype).eps
            noise = eps * eigenvalues.abs().amax(1, keepdim=True)
            eigenvalues = eigenvalues.where(eigenvalues.abs() > noise, 0.0)

        tolerance = TOLERANCE * eigenvalues.abs().max()
        if looks and (eigenvalues < -tolerance).any():
            raise ValueError(
                f"{type(module).__name__}: the Hessian of the loss at the prediction "
                f"is not positive semi-definite (eigenvalues between "
                f"{eigenvalues.min().item():.3e} and {eigenvalues.max().item():.3e}). "
                "It has no square root, and quantities based on the GGN do not exist. "
                "Use a loss that is convex in its first input."
            )
        positive = eigenvalues > 0
        # the inner `where` keeps the derivative of the root finite at zero
        root = eigenvalues.where(positive, 1.0).sqrt().where(positive, 0.0)
        if not looks:
            root = root.where(eigenvalues >= -tolerance, nan)
        return eigenvectors * root[:, None, :]

    def sqrt_hessian_compact(self, module: Layer) -> Tensor:  # noqa: D102
        columns = super().sqrt_hessian_compact(module)
        if not (len(columns) and may_look(columns)):
            return columns
        used = flatten(columns, 1).any(1)
        used[0] |= ~used.any()  # at least one column, of zeros
        return columns[used]

    def _sqrt_hessian_sampled(
        self,
        module: Layer,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Subsampling = None,
        generator: Randomness = None,
    ) -> Tensor:
        """Combine the exact columns with random signs: E[(S r)(S r)ᵀ] = S Sᵀ.

        Args:
            module: Loss module, with the inputs of the full batch.
            g_inp: Gradients with respect to the inputs.
            g_out: Gradients with respect to the output.
            mc_samples: Number M of random columns.
            subsampling: Indices of selected samples. Default: all.
            generator: Random number generator. Default: PyTorch's global one.

        Returns:
            Columns, divided by √M, shape ``[M, N, *]``.
        """
        columns = self._sqrt_hessian(module, g_inp, g_out, subsampling)
        shape = (mc_samples, *columns.shape[:2], *[1] * (columns.dim() - 2))
        signs = torch.randint(2, shape, generator=generator, **kind(columns))
        sampled = torch.einsum("mv...,v...->m...", 2 * signs - 1, columns)
        return sampled / sqrt(mc_samples)


def _describe(x: Any) -> Any:
    """Return type and shape of a tensor, and other values as they are."""
    return (x.dtype, x.device, x.shape) if isinstance(x, Tensor) else repr(x)


def _couples(prediction: Tensor, mat_prod: MatProd) -> bool:
    """Tell whether a Hessian has entries outside of the blocks of the samples.

    What belongs to samples whose number has a bit must not arrive at the others. These
    get zeros otherwise, however numbers are rounded on the way.

    Args:
        prediction: Prediction of shape ``[N, *]``.
        mat_prod: Multiplies columns ``[V, N, *]`` with the Hessian.

    Returns:
        Whether samples are coupled.
    """
    n = prediction.shape[:1].numel()
    if n == 1:
        return False
    # drawing the vectors must not change the user's random numbers
    generator = torch.Generator(prediction.device).manual_seed(0)
    numbers = torch.arange(n, device=prediction.device)
    some = torch.stack([has_bit(numbers, bit) for bit in bits(n)])
    some = some.view(-1, n, *[1] * (prediction.dim() - 1))
    shape = (len(some), *prediction.shape)
    vectors = torch.randn(shape, generator=generator, **kind(prediction))
    product = mat_prod(vectors.where(some, 0.0)).abs()
    return bool((product.where(~some, 0.0) > TOLERANCE * product.max()).any())


@contextmanager
def _naming(module: Layer) -> Iterator[None]:
    """Name the loss where autograd knows no second derivative, or not even a first."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "not implemented" in said or "differentiate twice" in said:
            text = message(NOT_TWICE, module=module)
            raise NotImplementedError(f"{text} ({error})") from error
        if "not have been used" in said or "does not require grad" in said:
            text = message(DERIVES, module=module, error=error)
            raise NotImplementedError(text) from error
        raise


def _check_differentiable(module: Layer, gradient: Tensor, cotangent: Tensor) -> None:
    """Refuse a loss whose backward pass is unknown to autograd.

    The gradient is linear in the cotangent at the loss. If autograd sees no connection,
    it would take the gradient for a constant, and the Hessian for zero.

    Args:
        module: Loss module.
        gradient: Gradient of the loss, computed from ``cotangent``.
        cotangent: Cotangent at the loss.

    Raises:
        NotImplementedError: If the loss cannot be differentiated twice.
    """
    connected = gradient.requires_grad and torch.autograd.grad(
        gradient.sum(), cotangent, retain_graph=True, allow_unused=True
    ) != (None,)
    if not connected:
        raise NotImplementedError(message(NOT_TWICE, module=module))


def _check_slope(
    module: Layer, prediction: Tensor, gradient: MatProd, mat_prod: MatProd
) -> None:
    """Refuse a loss whose second derivative is not that of its gradient.

    Autograd takes what a function has computed in its forward pass for a constant.

    Args:
        module: Loss module.
        prediction: Prediction ``[N, *]``.
        gradient: Maps a prediction to the loss's gradient.
        mat_prod: Multiplies columns ``[V, N, *]`` with the Hessian.

    Raises:
        NotImplementedError: If differences of gradients say that it is another one. Two
            steps have to agree: one alone may reach a point where the slope jumps, or
            be lost in rounding.
    """
    generator = torch.Generator(prediction.device).manual_seed(0)
    v = torch.randn(prediction.shape, generator=generator, **kind(prediction))
    x, found = prediction.detach(), mat_prod(v[None])[0].detach()
    far, near = (
        (gradient(x + step * v) - gradient(x - step * v)) / (2 * step)
        for step in (1e-2, 1e-3)
    )
    size = torch.maximum(far.abs(), near.abs())
    agree = (far - near).abs() <= 0.05 * size
    least = 1e-6 * size.max() if size.numel() else 0.0
    if bool((agree & ((near - found).abs() > 0.3 * size + least)).any()):
        raise NotImplementedError(message(NOT_ITS_SLOPE, module=module))


def _is_one_number(factors: Tensor) -> bool:
    """Tell whether all terms have the same factor, but those that are left out."""
    used = factors[factors != 0]
    return used.numel() > 0 and torch.allclose(used, used[:1])


def _is_linear_in_pieces(module: Layer) -> bool:
    """Tell whether a loss has no curvature, where autograd can't tell."""
    if type(module) is MultiMarginLoss:
        return module.p == 1
    return type(module) is MultiLabelMarginLoss


def _to_double(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _without_hooks(module: Layer, convert: Callable = lambda x: x) -> Module:
    """Copy a loss module, without its hooks and those of its children.

    Args:
        module: Loss module.
        convert: What to do with all that it holds. Default: nothing.

    Returns:
        The copy, whose forward pass leaves no trace in the original.
    """
    scratch = scratch_copy(module)
    for part in scratch.modules():
        own = vars(part)
        own.update(
            {name: convert(value) for name, value in own.items()},
            _parameters={n: convert(p) for n, p in own["_parameters"].items()},
            _buffers={n: convert(b) for n, b in own["_buffers"].items()},
            _forward_hooks=OrderedDict(),
            _forward_pre_hooks=OrderedDict(),
        )
    return scratch
