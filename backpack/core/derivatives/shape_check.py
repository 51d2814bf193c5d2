"""Decorators for public derivative methods: shape checks and products with vectors.

The methods act on matrices of shape ``[V, N, *]`` (or ``[V, *p]`` for a parameter of
shape ``[*p]``). The decorators check the shapes of what comes in and goes out, and they
let a method accept a single vector, that is a matrix without the axis ``V``, in which
case the result does not have this axis, either.
"""

from functools import partial, wraps
from inspect import signature
from typing import Any, Callable

from torch import Tensor, empty
from torch.nn import Module

from backpack.utils.hooks import message
from backpack.utils.subsampling import Subsampling, num_selected
from backpack.utils.types import Layer

TIME_FIRST = (
    "{module} cannot select samples (subsampling={subsampling}), because they are not "
    "on axis 0 of its input and output. Use batch_first=True."
)


def _add_V_dim(mat: Tensor) -> Tensor:
    """Make a vector a matrix with one column.

    Args:
        mat: Vector of shape ``[*]``.

    Returns:
        Matrix of shape ``[1, *]``.
    """
    return mat.unsqueeze(0)


def _remove_V_dim(mat: Tensor) -> Tensor:
    """Make a matrix with one column a vector.

    Args:
        mat: Matrix of shape ``[1, *]``.

    Returns:
        Vector of shape ``[*]``.

    Raises:
        RuntimeError: If the matrix has not exactly one column.
    """
    if mat.shape[0] != 1:
        raise RuntimeError(
            "Only a matrix with a single column can be made a vector. Expected shape "
            f"[1, *], got {list(mat.shape)}."
        )
    return mat.squeeze(0)


def check_shape(mat: Tensor, like: Tensor, diff: int = 1) -> None:
    """Check that a matrix has the shape of a tensor after its leading axes.

    Args:
        mat: Matrix to be checked.
        like: Tensor whose shape is expected.
        diff: Number of leading axes of ``mat`` that ``like`` does not have. Default: 1.

    Raises:
        RuntimeError: If the shapes do not fit.
    """
    if mat.dim() < diff or mat.shape[diff:] != like.shape:
        expected = ", ".join(["*"] * diff + [str(size) for size in like.shape])
        raise RuntimeError(
            f"Expected a matrix of shape [{expected}], where * is any size, but got "
            f"{list(mat.shape)}."
        )


def check_same_V_dim(mat1: Tensor, mat2: Tensor) -> None:
    """Check that two matrices have the same number of columns.

    Args:
        mat1: Matrix of shape ``[V, *]``.
        mat2: Matrix of shape ``[V, *]``.

    Raises:
        RuntimeError: If their numbers of columns differ.
    """
    if mat1.shape[0] != mat2.shape[0]:
        raise RuntimeError(
            "Expected matrices with the same number of columns (axis 0), but got "
            f"shapes {list(mat1.shape)} and {list(mat2.shape)}."
        )


def check_batch_first(module: Layer, subsampling: Subsampling) -> None:
    """Refuse to select samples that are not on the first axis.

    Args:
        module: The module.
        subsampling: Selected samples.

    Raises:
        NotImplementedError: If samples are selected and not on the first axis.
    """
    if subsampling is not None and not getattr(module, "batch_first", True):
        text = message(TIME_FIRST, module=module, subsampling=subsampling)
        raise NotImplementedError(text)


def _check_like(
    mat: Tensor, module: Layer, name: str, diff: int = 1, *args: Any, **kwargs: Any
) -> None:
    """Check that a matrix has the shape of a module's tensor after its leading axes.

    Args:
        mat: Matrix to be checked.
        module: Module that holds the tensor.
        name: Name of the tensor, e.g. ``"input0"``, ``"output"``, ``"weight"``.
        diff: Number of leading axes of ``mat`` that the tensor does not have.
        args: Ignored.
        kwargs: Options of the product. ``subsampling`` selects from a stored input or
            output.
    """
    like, subsampling = getattr(module, name), kwargs.get("subsampling")
    of_samples = name == "output" or name.startswith("input")
    if of_samples and subsampling is not None:
        check_batch_first(module, subsampling)
        size = num_selected(len(like), subsampling)
        like = empty(size, *like.shape[1:], device="meta")
    check_shape(mat, like, diff=diff)


def check_like_with_sum_batch(
    mat: Tensor,
    module: Layer,
    name: str,
    sum_batch: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Check that a matrix has a parameter's shape, with or without a batch axis.

    Args:
        mat: Matrix to be checked, ``[V, *p]`` or ``[V, N, *p]``.
        module: Module that holds the parameter.
        name: Name of the parameter.
        sum_batch: Whether the batch axis was summed out. Default: ``True``.
        args: Ignored.
        kwargs: Ignored.
    """
    _check_like(mat, module, name, diff=1 if sum_batch else 2)


def _same_dim_as(
    mat: Tensor, module: Layer, name: str, *args: Any, **kwargs: Any
) -> bool:
    """Tell whether a matrix has as many axes as a module's tensor: it lacks ``V``.

    Args:
        mat: Matrix or vector.
        module: Module that holds the tensor.
        name: Name of the tensor.
        args: Ignored.
        kwargs: Ignored.

    Returns:
        Whether the numbers of axes are equal.
    """
    return mat.dim() == getattr(module, name).dim()


def _mat_prod_accept_vectors(
    mat_prod: Callable[..., Tensor],
    vec_criterion: Callable[[Tensor, Module, Any, Any], bool],
) -> Callable[..., Tensor]:
    """Let a method that multiplies with a matrix accept vectors.

    Args:
        mat_prod: Method with arguments ``self, module, g_inp, g_out, mat, *options``.
        vec_criterion: Function of ``mat`` and ``module`` that tells whether ``mat`` is
            a vector.

    Returns:
        Method that maps a vector to a vector and a matrix to a matrix.
    """

    @wraps(mat_prod)
    def wrapped(self, module, g_inp, g_out, mat, *args, **kwargs):
        is_vec = vec_criterion(mat, module)  # type: ignore[call-arg]
        mat = _add_V_dim(mat) if is_vec else mat
        result = mat_prod(self, module, g_inp, g_out, mat, *args, **kwargs)
        return _remove_V_dim(result) if is_vec else result

    return wrapped


def mat_prod_check_shapes(
    mat_prod: Callable, in_check: Callable, out_check: Callable
) -> Callable[..., Tensor]:
    """Check the shapes of a product's matrix and result.

    Args:
        mat_prod: Method with arguments ``self, module, g_inp, g_out, mat, *options``.
        in_check: Called with ``mat``, ``module`` and the options by name.
        out_check: Called with the result, ``module`` and the options by name.

    Returns:
        Method that checks the shapes of its matrix and result.
    """

    @wraps(mat_prod)
    def wrapped(self, module, g_inp, g_out, mat, *args, **kwargs):
        if args:  # the signature takes as long as a small product
            options = list(signature(mat_prod).parameters)[5:]
            kwargs = {**dict(zip(options, args)), **kwargs}
        in_check(mat, module, **kwargs)
        result = mat_prod(self, module, g_inp, g_out, mat, **kwargs)
        check_same_V_dim(result, mat)
        out_check(result, module, **kwargs)
        return result

    return wrapped


def param_mjp_accept_vectors(mat_prod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a parameter's vector-Jacobian product accept a single cotangent.

    Args:
        mat_prod: Method with arguments ``self, param_str, module, g_inp, g_out, mat``
            and options.

    Returns:
        Method that maps ``[N, *out]`` to a result without the axis ``V``.
    """

    @wraps(mat_prod)
    def wrapped(self, param_str, module, g_inp, g_out, mat, *args, **kwargs):
        is_vec = _same_dim_as(mat, module, "output")
        mat = _add_V_dim(mat) if is_vec else mat
        result = mat_prod(self, param_str, module, g_inp, g_out, mat, *args, **kwargs)
        return _remove_V_dim(result) if is_vec else result

    return wrapped


def make_hessian_mat_prod_accept_vectors(
    make_hessian_mat_prod: Callable,
) -> Callable[..., Callable[..., Tensor]]:
    """Let the function that a loss makes for its Hessian accept vectors.

    Args:
        make_hessian_mat_prod: Method with arguments ``self, module, g_inp, g_out``.

    Returns:
        Method whose function maps a vector to a vector and a matrix to a matrix.
    """

    @wraps(make_hessian_mat_prod)
    def wrapped(self, module, g_inp, g_out):
        hessian_mat_prod = make_hessian_mat_prod(self, module, g_inp, g_out)
        vec_dim = module.input0.dim()

        def wrapped_mat_prod(mat: Tensor) -> Tensor:
            is_vec = mat.dim() == vec_dim
            result = hessian_mat_prod(_add_V_dim(mat) if is_vec else mat)
            return _remove_V_dim(result) if is_vec else result

        return wrapped_mat_prod

    return wrapped


def make_hessian_mat_prod_check_shapes(
    make_hessian_mat_prod: Callable[..., Callable[..., Tensor]],
) -> Callable[..., Callable[..., Tensor]]:
    """Check the shapes that enter and leave a loss' product with its Hessian.

    Args:
        make_hessian_mat_prod: Method with arguments ``self, module, g_inp, g_out``.

    Returns:
        Method whose function checks the shapes of its matrix and result.
    """

    @wraps(make_hessian_mat_prod)
    def wrapped(self, module, g_inp, g_out):
        hessian_mat_prod = make_hessian_mat_prod(self, module, g_inp, g_out)
        like = empty(module.input0.shape, device="meta")

        def wrapped_mat_prod(mat: Tensor) -> Tensor:
            check_shape(mat, like)
            result = hessian_mat_prod(mat)
            check_same_V_dim(result, mat)
            check_shape(result, like)
            return result

        return wrapped_mat_prod

    return wrapped


def product(in_name: str, out_name: str) -> Callable[[Callable], Callable[..., Tensor]]:
    """Make the decorator of a product, which checks shapes and accepts vectors.

    Args:
        in_name: Name of the module's tensor that looks like the factor.
        out_name: Name of the module's tensor that looks like the result.

    Returns:
        Decorator of methods with arguments ``self, module, g_inp, g_out, mat, …``.
    """
    in_check, out_check = (partial(_check_like, name=x) for x in (in_name, out_name))

    def decorate(mat_prod: Callable) -> Callable[..., Tensor]:
        checked = mat_prod_check_shapes(mat_prod, in_check, out_check)
        return _mat_prod_accept_vectors(checked, partial(_same_dim_as, name=in_name))

    return decorate
