"""What is known of PyTorch's functions by their names, before they run."""

from __future__ import annotations

from inspect import signature
from types import FunctionType
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.utils._pytree import tree_leaves

from backpack.core.table import LOSS_FUNCTIONS
from backpack.utils.types import tensors_in
from backpack.utils.writes import writes_by_name

# Methods and properties that return no tensor, or change nothing of one
_QUIET = frozenset(
    "size dim is_floating_point stride numel __len__ is_contiguous get_device "
    "ndimension is_complex item __bool__ tolist __int__ __float__ element_size "
    "storage_offset data_ptr __repr__ __format__ __hash__ register_hook __contains__ "
    "__index__ is_same_size untyped_storage retain_grad numpy __str__ is_set_to "
    "is_shared is_pinned has_names dim_order __reduce_ex__ __deepcopy__ is_inference "
    "is_conj is_neg is_signed type_ __dir__ _has_compatible_shallow_copy_type _is_view "
    "register_post_accumulate_grad_hook get_default_dtype".split()
)
# Those that make numbers of Python
_READS = frozenset("item tolist numpy __bool__ __int__ __float__ __index__".split())
# Whose functions, and whose namespaces of operators, depend on their arguments alone
_OWNERS = frozenset("torch torchvision backpack".split())
_NAMESPACES = _OWNERS | frozenset(
    "aten prims quantized quantized_decomposed mkldnn onednn sparse inductor c10d "
    "_c10d_functional _c10d_functional_autograd symm_mem".split()
)
# What ATen calls operations that have another name elsewhere
_SAME = {
    "_to_copy": "to",
    "_unsafe_view": "view",
    "_unsafe_index": "index",
    "_unsafe_index_put": "index_put",
    "_index_put_impl": "index_put",
    "_index_put_impl_": "index_put_",
    "grid_sampler_2d": "grid_sampler",
    "grid_sampler_3d": "grid_sampler",
}
# Properties that are tensors
_TENSOR_PROPERTIES = frozenset("T mT H mH data real imag".split())

# Operations that write to places that an operand says, or add there
WRITING = frozenset(
    "__setitem__ index_put index_put_ index_copy index_copy_ index_add index_add_ "
    "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ "
    "masked_scatter masked_scatter_".split()
)
# Operations that put entries beside constants
SEQUENCES = frozenset(["pad_sequence", "_pad_packed_sequence"])
LAYING = WRITING | SEQUENCES | {"pad", "copy_"}
# Operations that multiply groups of rows with a matrix each
GROUPED = frozenset(["grouped_mm", "_grouped_mm"])
# Operations that move entries to where the values of an operand say
MOVING = WRITING.union(
    GROUPED,
    "index_fill index_fill_ repeat_interleave nonzero unique unique_consecutive "
    "bincount where".split(),
)
# Operations that map entries of the same place in several operands
COMBINING = frozenset(
    "add sub mul div rsub add_ sub_ mul_ div_ __iadd__ __imul__ __isub__ __itruediv__ "
    "__radd__ __rsub__ __rmul__ __rtruediv__ __rdiv__ __add__ __sub__ __mul__ "
    "__truediv__ true_divide multiply subtract divide pow __pow__ __rpow__ pow_ "
    "addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ maximum minimum fmax fmin where "
    "clamp clamp_ clamp_min clamp_max atan2 hypot logaddexp logaddexp2 xlogy "
    "remainder fmod".split()
)
# ... and in one or several: where all operands' samples agree, so do the result's.
POINTWISE = COMBINING | frozenset(
    "__neg__ neg gelu relu silu tanh sigmoid exp log sqrt "
    "rsqrt dropout to float double half bfloat16 contiguous clone detach type_as "
    "masked_fill masked_fill_ abs sin cos softplus hardswish hardsigmoid "
    "hardtanh relu_ leaky_relu elu mish relu6 square erf reciprocal "
    "exp_ log1p expm1 floor_divide __mod__ __floordiv__ long int short "
    "char byte bool sign heaviside floor ceil round trunc eq ne lt le gt ge __eq__ "
    "__ne__ __lt__ __le__ __gt__ __ge__ isnan logical_and logical_or logical_not "
    "__and__ __or__ __invert__ bitwise_and requires_grad_ selu celu logsigmoid "
    "softsign tanhshrink hardshrink softshrink threshold silu_ tanh_ sigmoid_ "
    "dropout_ alpha_dropout apply_ map_ _standard_gamma poisson bernoulli bernoulli_ "
    "binomial normal sgn sinh cosh tan atan asin "
    "acos erfc exp2 log2 log10 logit acosh asinh atanh sinc erfinv lgamma digamma "
    # tried again on what they have written, these would take hours
    "polygamma polygamma_ special_polygamma special_zeta "
    "nan_to_num nan_to_num_ fused_moving_avg_obs_fake_quant "
    "fake_quantize_per_tensor_affine _fake_quantize_learnable_per_tensor_affine".split()
)
# Operations along some axes only, and which argument says along which
ALONG = {
    **dict.fromkeys(
        "sum mean amax amin max min prod std var any all argmax argmin nansum nanmean "
        "median logsumexp count_nonzero softmax log_softmax cumsum cumprod sort "
        "argsort glu".split(),
        (1, "dim"),
    ),
    **dict.fromkeys("norm normalize topk linalg_vector_norm".split(), (2, "dim")),
    **dict.fromkeys("layer_norm rms_norm".split(), (1, "normalized_shape")),
    **dict.fromkeys(["linear", "_sample_dirichlet"], (1, "weight")),  # the last one
    "fake_quantize_per_channel_affine": (3, "axis"),
    "_fake_quantize_learnable_per_channel_affine": (3, "axis"),
}
# Operations that treat each entry of axis 0 alone, and how many axes there are then;
# zero for any number
BATCHED = {
    **{
        f"{name}{n}d": n + 2
        for name in "conv conv_transpose max_pool avg_pool adaptive_avg_pool "
        "adaptive_max_pool lp_pool dropout".split()
        for n in (1, 2, 3)
    },
    **dict.fromkeys(
        "group_norm instance_norm batch_norm local_response_norm interpolate".split(), 0
    ),
    "pixel_shuffle": 4,
}
# Operations on matrices, in the last two axes, that treat each by itself. Some round as
# their memory lies, or print at NaN.
OF_MATRICES = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "linalg_")
    for name in "lstsq svd svdvals eigh eigvalsh eig eigvals inv inverse inv_ex solve "
    "solve_triangular qr det slogdet logdet cholesky cholesky_ex cholesky_solve "
    "cholesky_inverse pinv pinverse lu lu_factor matrix_rank matrix_exp "
    "matrix_power".split()
)
# Operations that take a shape or a type of others than their first operand, no more
LIKE_ANOTHER = frozenset("type_as to expand_as view_as reshape_as".split())
# Operations of which each operand is a part of the result, or has one of its own
JOINING = frozenset(
    "cat concat concatenate stack hstack vstack dstack broadcast_tensors".split()
)
# ... each a part, along an axis
JOINED = frozenset("cat concat concatenate stack".split())
# Operations that write to what brackets pick
IN_BRACKETS = frozenset("index_put index_put_ __setitem__".split())
# Operations that put entries elsewhere, by shapes: run on sample numbers
REARRANGING = JOINING | frozenset(
    "view reshape transpose permute unsqueeze squeeze flatten unflatten expand ravel "
    "expand_as view_as reshape_as chunk split split_with_sizes unbind select narrow "
    "flip roll movedim moveaxis swapaxes swapdims t T mT repeat tile "
    "repeat_interleave diagonal _pack_padded_sequence".split()
)
# Operations that pick entries by the values of an operand: run on sample numbers
SELECTING = frozenset(
    "__getitem__ index index_select gather take_along_dim masked_select".split()
)
# ... also inside of ``vmap``, where rules for their arguments don't hold
PICKING = SELECTING.union(f"vmap({name})" for name in SELECTING)
# Operations whose result's placement depends on values: never remembered
BY_VALUE = PICKING | MOVING
# Operations that leave entries of their first operand where a mask is not set
BY_MASKS = frozenset(
    "masked_scatter masked_scatter_ index_put index_put_ __setitem__".split()
)
# Operations that end a GPU's context where numbers are out of range, instead of raising
ASSERTING = frozenset(
    "binary_cross_entropy bernoulli bernoulli_ multinomial poisson".split()
)
# Operations that fault at NaN: torchvision's read where numbers say, and LAPACK's
# balancing does at matrices of which some entries are NaN
FAULTING = frozenset(
    "linalg_eigvals roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d".split()
)
# Operations that read and write memory where integers say, and look at none of these
UNCHECKED = frozenset(
    "_convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo ctc_loss "
    "segment_reduce sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor "
    "sparse_bsr_tensor sparse_bsc_tensor".split()
)
ATTENTION = "scaled_dot_product_attention"
# Operations that multiply matrices, of which a constant one may be block-diagonal
PRODUCTS = frozenset(
    "matmul mm bmm mv __matmul__ __rmatmul__ einsum tensordot inner linear addmm addmv "
    "addbmm baddbmm smm _sparse_mm _sparse_addmm chain_matmul linalg_matmul "
    "linalg_multi_dot linalg_vecdot bilinear conv1d conv2d conv3d".split()
)
# ... and those of more than two, of which each is a factor
CHAINS = frozenset(["einsum", "linalg_multi_dot", "chain_matmul"])
# Operations in which a mask has no say but for entries at its own places
MASKED = POINTWISE.union(PRODUCTS, [ATTENTION]) - MOVING
# What is made in another one's shape, by functions `<name>_like` and `new_<name>`
FILLS = frozenset("empty empty_strided zeros ones full rand randn randint".split())
# Operations of which each matrix of a batch meets its counterpart in the other batches
MATCHING = frozenset(["matmul", "__matmul__", "bmm", ATTENTION])
# Operations by which cuDNN warns of copies of parameters that lie apart
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())
# ... and a single step of these
CELLS = frozenset("gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell".split())
# Operations whose result's placement depends on strides, which no key contains
BY_STRIDES = frozenset(
    "as_strided as_strided_ as_strided_copy as_strided_scatter set_".split()
)


def is_by_value(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether numbers may say where an operation puts entries.

    Args:
        name: Name of the operation.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Whether it depends on more than shapes.
    """
    first = {"embedding_bag": 2, "repeat_interleave": 1}.get(name)
    if first is not None:
        return bool(tensors_in((args[first:], kwargs)))
    if name in ("__getitem__", "__setitem__"):
        return bool(tensors_in(args[1]))
    return name in BY_VALUE or name in BY_STRIDES


class Kind(NamedTuple):
    """What is known of an operation by its name.

    Attributes:
        name: Its name.
        is_quiet: Whether it returns no tensor, or changes nothing of one.
        reads: Whether it makes numbers of Python.
        writes: Whether it writes to its first operand.
        opened: The same function, to look inside; ``None`` to take it as a whole.
        is_loss: Whether it is a loss that is in the table.
        has_terms: Whether it is any loss, of terms that it adds up.
        is_foreign: Whether it may depend on more than its arguments: on something that
            its author keeps elsewhere.
    """

    name: str
    is_quiet: bool
    reads: bool
    writes: bool
    opened: Callable | None
    is_loss: bool
    has_terms: bool
    is_foreign: bool


class Terms(NamedTuple):
    """A loss as the sum of its terms, divided by something.

    Attributes:
        func: The loss.
        kwargs: What it computes its terms of.
        divisor: What their sum is divided by; ``None`` for their number.
    """

    func: Callable
    kwargs: dict[str, Any]
    divisor: Any

    def added(self) -> Tensor:
        """Compute the loss.

        Returns:
            The loss.
        """
        each = self.func(**self.kwargs)
        return each.mean() if self.divisor is None else each.sum() / self.divisor


def find_terms(
    func: Callable, args: Sequence[Any], kwargs: dict[str, Any]
) -> Terms | None:
    """Take a loss apart that was called as a function.

    Args:
        func: The function.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Its terms; ``None`` if they are not added up, or not known.
    """
    given = signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    found, (x, y, *_) = given.arguments, given.args
    if any(found.get(name) is not None for name in ("size_average", "reduce")):
        return None
    reduction, found["reduction"] = found["reduction"], "none"
    divisor: Any = {"sum": 1, "batchmean": len(x) if x.dim() else 1}.get(reduction)
    of_classes = func in (functional.nll_loss, functional.cross_entropy)
    if of_classes and reduction == "mean" and not y.is_floating_point():
        # these have weights
        options = found["weight"], None, found["ignore_index"], None, "sum"
        divisor = functional.nll_loss(torch.full_like(x, -1), y, *options)
    by_length = func is functional.ctc_loss and reduction == "mean"
    known = reduction in ("sum", "mean", "batchmean") and not by_length
    return Terms(func, dict(found), divisor) if known else None


class Request(NamedTuple):
    """An operation that is to be run.

    Attributes:
        func: The operation.
        kind: What is known of it.
        args: Positional arguments.
        kwargs: Keyword arguments.
        run: Runs it; the operation itself, but inside of transforms.
    """

    func: Callable
    kind: Kind
    args: tuple
    kwargs: dict[str, Any]
    run: Callable

    def opened(self, has_constants: bool = False) -> Callable | None:
        """Return what to call in place of the operation, to look inside.

        Args:
            has_constants: Whether parameters enter it directly, so that of a loss,
                where samples meet, the terms matter. Default: ``False``.

        Returns:
            What computes the same; ``None`` to take it as a whole, as tables that are
            not renormalized.
        """
        inside = self.kind.opened
        if inside is None and has_constants and self.kind.has_terms:
            terms = find_terms(self.func, self.args, self.kwargs)
            return None if terms is None else lambda *_, **__: terms.added()
        if inside is None or self.func not in _TABLES:
            return inside
        args = self.args
        most = args[3] if len(args) > 3 else self.kwargs.get("max_norm")
        return None if most is None else inside


def _without_overrides(func: FunctionType) -> Callable:
    """Copy a function of PyTorch that is written in Python, to look inside.

    The original asks for overrides first, and would be handed to the mode as a whole.
    """
    names = dict(func.__globals__)
    for ending in ("", "_unary", "_variadic"):
        names[f"has_torch_function{ending}"] = lambda *_: False
    copy = FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_TABLES = (functional.embedding, functional.embedding_bag)
# Functions in Python that parameters enter in several places, or which write to them
_OPENED = {
    func: _without_overrides(func)
    for func in (
        functional.multi_head_attention_forward,
        *_TABLES,
        functional.gaussian_nll_loss,
        getattr(functional, "linear_cross_entropy", None),  # from PyTorch 2.13 on
    )
    if func is not None
}

KINDS: dict[Any, Kind] = {}  # of operations that have been seen


def kind_of(func: Any) -> Kind:
    """Classify an operation; asked once for each.

    Args:
        func: The operation.

    Returns:
        What is known of it, which is remembered in ``KINDS``.
    """
    name = getattr(func, "__name__", str(func))
    is_property = name == "__get__"
    if is_property:
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    name = name.partition(".")[0]  # that of an overload is called `add_.Tensor`
    name = _SAME.get(name, name)
    owner = _foreign_owner(func)
    if owner is not None:  # whatever its name means elsewhere
        name = f"{owner}::{name}"
    quiet = name in _QUIET or (is_property and name not in _TENSOR_PROPERTIES)
    quiet = quiet or name in ("__set__", "__delete__", "backward")
    quiet = quiet or func is torch.autograd.grad  # asks for these very tensors
    writes = writes_by_name(name)
    reads, is_loss = name in _READS, func in LOSS_FUNCTIONS
    opened, foreign, has_terms = _OPENED.get(func), owner is not None, is_loss
    if isinstance(func, FunctionType) and func.__module__ == functional.__name__:
        reduces = "reduction" in signature(func).parameters
        has_terms = is_loss or reduces and opened is None  # of which others know how
    kind = Kind(name, quiet, reads, writes, opened, is_loss, has_terms, foreign)
    return KINDS.setdefault(func, kind)


def _foreign_owner(func: Any) -> str | None:
    """Return a namespace, or package, that is not PyTorch's; else ``None``."""
    root, *parts = (getattr(func, "__module__", None) or "torch").split(".")
    if root == "torch" and parts[:1] in (["_ops"], ["ops"]) and parts[1:]:
        return None if parts[1] in _NAMESPACES else parts[1]
    return None if root in _OWNERS else root


def is_of_inputs(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tell whether a derivative is taken with respect to no parameter.

    Args:
        name: Name of the function, ``"backward"`` or ``"grad"``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Whether it is.
    """
    given = args[1] if name == "grad" and len(args) > 1 else None
    inputs = tree_leaves(kwargs.get("inputs", given))
    return inputs != [None] and not any(isinstance(x, Parameter) for x in inputs)


def is_fill(name: str) -> bool:
    """Tell whether an operation fills a tensor of another one's shape.

    Args:
        name: Name of the operation.

    Returns:
        Whether it does, so that no number of the other one enters.
    """
    return name.partition("_like")[0].removeprefix("new_") in FILLS


def named(names: Sequence[str], args: Sequence[Any], kwargs: dict) -> list[Any]:
    """Return arguments by their order, or name.

    Args:
        names: Their names, in order.
        args: Those given by order.
        kwargs: Those given by name.

    Returns:
        The arguments, ``None`` where one is not given.
    """
    return [*args[: len(names)], *map(kwargs.get, names[len(args) :])]


def in_brackets(name: str, ids: Any) -> tuple:
    """Write down what an operation takes as an index as it stands between brackets.

    Args:
        name: Name of the operation.
        ids: The index.

    Returns:
        The index, a part for each axis.
    """
    if name.startswith("index"):  # without brackets, nothing adds an axis
        return tuple([slice(None) if y is None else y for y in ids])
    return ids if isinstance(ids, tuple) else (ids,)
