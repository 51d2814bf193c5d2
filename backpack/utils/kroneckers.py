"""Kronecker products of small matrices, their inverses, and products with them.

A list of factors ``[F1, F2, ...]`` stands for the matrix F1 ⊗ F2 ⊗ ... . The factors of
a layer's curvature approximate its block for row-major flattened parameters. Products
act on matrices whose *rows* are the parameter's elements, ``[D, V]``.

All functions take factors as they are saved: a vector ``[p]`` is a diagonal matrix (of
an embedding), and with groups, all factors have an axis for them in front,
``[G, p, p]``: the matrix is block-diagonal, with the product of each group's factors.

A list ``[Q1, Q2, ..., E]`` stands for (Q1 ⊗ Q2 ⊗ ...) diag(E) (Q1 ⊗ Q2 ⊗ ...)ᵀ with
orthogonal Q: what :class:`~backpack.extensions.EKFAC` saves, and what
:func:`eigen_kfacs` makes of factors. Powers, determinants and exact damping are those
of E.
"""

from contextlib import suppress
from functools import reduce
from itertools import islice
from math import nan, prod
from string import ascii_lowercase
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, Union

from torch import (
    Size,
    Tensor,
    block_diag,
    diag,
    einsum,
    kron,
    ones,
    ones_like,
    promote_types,
)
from torch.linalg import LinAlgError, eigh

from backpack.utils.state import may_look
from backpack.utils.types import full_precision

MAX_INVERSE_EIGENVALUE = 1e8
"""Largest magnitude of an eigenvalue of an inverse factor."""

Shift = Union[None, float, Sequence[float], Tensor]
"""Damping, if any, with one value for all factors or one for each factor."""


def is_tensor_of_order(order: int, tensor: Tensor) -> bool:
    """Return whether a tensor has a certain number of axes.

    Args:
        order: Number of axes.
        tensor: Tensor of any shape.

    Returns:
        Whether the tensor has ``order`` axes.
    """
    return tensor.ndim == order


def is_vector(tensor: Tensor) -> bool:
    """Return whether a tensor has one axis.

    Args:
        tensor: Tensor of any shape.

    Returns:
        Whether the tensor is a vector.
    """
    return is_tensor_of_order(1, tensor)


def is_matrix(tensor: Tensor) -> bool:
    """Return whether a tensor has two axes.

    Args:
        tensor: Tensor of any shape.

    Returns:
        Whether the tensor is a matrix.
    """
    return is_tensor_of_order(2, tensor)


def all_tensors_of_order(order: int, tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors have a certain number of axes.

    Args:
        order: Number of axes.
        tensors: Tensors of any shape.

    Returns:
        Whether each of the tensors has ``order`` axes.
    """
    return all(is_tensor_of_order(order, tensor) for tensor in tensors)


def _check_factors(factors: Sequence[Tensor]) -> Size:
    """Check that there are factors, and that they are matrices.

    Args:
        factors: Kronecker factors.

    Returns:
        ``[G]`` with groups, ``[]`` without.

    Raises:
        ValueError: If there is no factor, or if one is no matrix of each group.
    """
    groups = {factor.shape[:-2] for factor in factors}
    if len(groups) != 1 or any(factor.ndim not in (1, 2, 3) for factor in factors):
        raise ValueError(
            "Expected one or more matrices as Kronecker factors, vectors for diagonal "
            "ones, or all of them with an axis for groups, [G, p, q]; got tensors of "
            f"shape {[list(factor.shape) for factor in factors]}."
        )
    return groups.pop()


def get_letters(max_letters: int = 26) -> Iterator[str]:
    """Yield letters for the axes in an einsum equation.

    Args:
        max_letters: Number of letters to yield, at most 26.

    Yields:
        Letters from ``"a"`` on.
    """
    yield from islice(ascii_lowercase, max_letters)


def kfac_mat_prod_einsum_equation(num_factors: int) -> str:
    """Return the einsum equation for products with a Kronecker matrix.

    The matrix comes first: einsum contracts from left to right if it has no path
    optimizer, and must not begin with the outer product of the factors.

    Args:
        num_factors: Number of Kronecker factors.

    Returns:
        Equation whose operands are the columns ``[cols_1, cols_2, ..., V]`` and
        the factors ``[rows_i, cols_i]``; the result is ``[rows_1, rows_2, ..., V]``.
    """
    letters = get_letters()
    v = next(letters)
    pairs = [(next(letters), next(letters)) for _ in range(num_factors)]
    rows, cols = ("".join(axes) for axes in zip(*pairs))
    factors = ",".join(row + col for row, col in pairs)
    return f"{cols}{v},{factors}->{rows}{v}"


def two_kfacs_to_mat(A: Tensor, B: Tensor) -> Tensor:
    """Return the Kronecker product of two matrices.

    Args:
        A: Matrix ``[a1, a2]``.
        B: Matrix ``[b1, b2]``.

    Returns:
        The matrix A ⊗ B, ``[a1 * b1, a2 * b2]``.

    Raises:
        ValueError: If one is no matrix.
    """
    return kfacs_to_mat([A, B])


def kfacs_to_mat(factors: Sequence[Tensor]) -> Tensor:
    """Return the Kronecker product of several matrices.

    Args:
        factors: Kronecker factors ``[rows_i, cols_i]``; a vector is a diagonal matrix.
            With groups, ``[G, rows_i, cols_i]``.

    Returns:
        Their product, in list order, ``[prod(rows_i), prod(cols_i)]``. With groups, the
        block-diagonal matrix of their products, ``[G * prod(rows_i), ...]``.

    Raises:
        ValueError: If there is no factor, or if one is no matrix.
    """
    if _check_factors(factors):
        return block_diag(*map(kfacs_to_mat, zip(*factors)))
    # contiguous, as eigenvectors are stored by column
    full = [diag(f) if is_vector(f) else f.contiguous() for f in factors]
    return reduce(kron, full)


def kfac_mat_prod(factors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies with a Kronecker product of matrices.

    The product is formed factor by factor, never with the large matrix.

    Args:
        factors: Kronecker factors, see :func:`kfacs_to_mat`.

    Returns:
        Function that maps a matrix ``[D, V]`` to a matrix ``[R, V]``, and a single
        vector ``[D]`` to a vector ``[R]``. D is prod(cols_i) and R is prod(rows_i),
        times G with groups. It raises a ``ValueError`` for any other shape.

    Raises:
        ValueError: If there is no factor, or if one is no matrix.
    """
    shape = (*_check_factors(factors), *(factor.shape[-1] for factor in factors))
    size = prod(shape)

    def product(mat: Tensor) -> Tensor:
        """Multiply with columns, or with a single vector.

        Args:
            mat: Matrix ``[D, V]``, or vector ``[D]``.

        Returns:
            Matrix ``[R, V]``, or vector ``[R]``.

        Raises:
            ValueError: If it has another shape.
        """
        if mat.ndim not in (1, 2) or mat.shape[0] != size:
            raise ValueError(
                f"Expected a matrix [{size}, V] or a vector [{size}], as the Kronecker "
                f"factors have columns, got shape {list(mat.shape)}. Flatten a "
                "parameter-shaped tensor, with one column per vector."
            )
        dtype = reduce(promote_types, [factor.dtype for factor in factors], mat.dtype)
        columns = mat.to(dtype).reshape(size, mat.shape[1:].numel()).T
        result = rotate(factors, columns.reshape(len(columns), *shape)).flatten(1)
        return result.T.contiguous() if is_matrix(mat) else result[0]

    return product


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """Multiply a Kronecker product of matrices with columns.

    Args:
        factors: Kronecker factors, see :func:`kfacs_to_mat`.
        mat: Matrix ``[D, V]`` or vector ``[D]``, see :func:`kfac_mat_prod`.

    Returns:
        The product.

    Raises:
        ValueError: If the factors are no matrices, or do not fit.
    """
    return kfac_mat_prod(factors)(mat)


def inv_kfacs(factors: Sequence[Tensor], shift: Shift = None) -> List[Tensor]:
    """Invert symmetric Kronecker factors; the list stands for the inverse product.

    Args:
        factors: Symmetric Kronecker factors, see :func:`kfacs_to_mat`.
        shift: Value that is added to the eigenvalues before they are inverted: one for
            all factors, or a sequence with one for each. ``None`` adds nothing.

    Returns:
        Inverse factors of the same shapes. The magnitude of their eigenvalues is at
        most 1e8.

    Raises:
        ValueError: If ``shift`` is a sequence of another length than ``factors``, or if
            these are no matrices.
    """
    _check_factors(factors)
    shift = shift.tolist() if isinstance(shift, Tensor) else shift
    shifts = shift if isinstance(shift, Sequence) else [shift or 0.0] * len(factors)
    if len(shifts) != len(factors):
        raise ValueError(
            f"Expected one shift, or one for each of the {len(factors)} factors, "
            f"got {len(shifts)}."
        )
    return [_inverse(factor, value) for factor, value in zip(factors, shifts)]


def _inverse(factor: Tensor, shift: float) -> Tensor:
    """Invert a symmetric factor whose eigenvalues are shifted.

    Args:
        factor: Matrices ``[*, D, D]``, or a vector ``[D]``.
        shift: Value that is added to the eigenvalues.

    Returns:
        The inverse, with eigenvalues of bounded magnitude.
    """
    values, basis = _eigh(factor)
    inverse = (values + shift).reciprocal()
    return _with_eigenvalues(
        basis, inverse.clamp(-MAX_INVERSE_EIGENVALUE, MAX_INVERSE_EIGENVALUE)
    )


def _with_eigenvalues(basis: Tensor, values: Tensor) -> Tensor:
    """Form the matrices that have some eigenvectors and eigenvalues, see _eigh."""
    if is_vector(basis):
        return values
    return (basis * values.unsqueeze(-2)) @ basis.mT


def diagonalize(mat: Tensor) -> Tuple[Tensor, Tensor]:
    """Diagonalize symmetric matrices; where nobody may look, also such of NaN.

    Args:
        mat: Matrices ``[*, D, D]``.

    Returns:
        Eigenvalues ``[*, D]`` and eigenvectors ``[*, D, D]``.
    """
    if may_look(mat):
        return eigh(mat)
    lost = ~mat.isfinite().flatten(-2).all(-1)[..., None, None]
    values, basis = eigh(mat.masked_fill(lost, 0.0))
    return values.masked_fill(lost[..., 0], nan), basis.masked_fill(lost, nan)


def _eigh(mat: Tensor) -> Tuple[Tensor, Tensor]:
    """Diagonalize a symmetric factor, in single precision or better.

    Args:
        mat: Matrices ``[*, D, D]``, or a vector ``[D]``.

    Returns:
        Eigenvalues ``[*, D]`` and eigenvectors ``[*, D, D]``; of a vector, these are
        ones ``[D]``.

    Raises:
        ValueError: If the matrices are not square.
        LinAlgError: If they cannot be computed: a ``RuntimeError``.
    """  # noqa: DAR401
    if not is_vector(mat) and (mat.dim() < 2 or mat.shape[-1] != mat.shape[-2]):
        raise ValueError(
            f"Expected symmetric Kronecker factors, got one of shape {list(mat.shape)}."
        )
    found, precise = None, full_precision(mat)
    with suppress(LinAlgError):
        found = (
            (precise, ones_like(precise)) if is_vector(mat) else diagonalize(precise)
        )
    if (found is None or may_look(mat)) and not mat.isfinite().all():
        reason = "it has entries that are NaN or infinite"
    elif found is None:
        reason = "the algorithm failed to converge"
    else:
        return found
    raise LinAlgError(
        f"A Kronecker factor of shape {list(mat.shape)} has no eigenvectors: {reason}. "
        "Look whether the loss is finite, and the batch not empty."
    )


def inv_kfac_mat_prod(
    factors: Sequence[Tensor], shift: Shift = None
) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies with the inverse of a Kronecker product.

    Args:
        factors: Symmetric Kronecker factors, see :func:`kfacs_to_mat`.
        shift: Value that is added to the eigenvalues, see :func:`inv_kfacs`.

    Returns:
        Function that maps ``[D, V]`` or a vector ``[D]`` to the same shape, see
        :func:`kfac_mat_prod`.

    Raises:
        ValueError: If the factors are no matrices, or the shifts do not fit.
    """
    return kfac_mat_prod(inv_kfacs(factors, shift=shift))


def apply_inv_kfac_mat_prod(
    factors: Sequence[Tensor], mat: Tensor, shift: Shift = None
) -> Tensor:
    """Multiply the inverse of a Kronecker product with columns.

    Args:
        factors: Symmetric Kronecker factors, see :func:`kfacs_to_mat`.
        mat: Matrix ``[D, V]`` or vector ``[D]``, see :func:`kfac_mat_prod`.
        shift: Value that is added to the eigenvalues, see :func:`inv_kfacs`.

    Returns:
        The product, in the shape of ``mat``.

    Raises:
        ValueError: If the factors are no matrices, or the shifts or ``mat`` do not fit.
    """
    return inv_kfac_mat_prod(factors, shift=shift)(mat)


def pi_shifts(factors: Sequence[Tensor], damping: float) -> List[float]:
    """Divide a damping among factors by the size of their eigenvalues.

    The factors F1 + s1 I and F2 + s2 I with s1 = π √λ, s2 = √λ / π stand in for
    F1 ⊗ F2 + λ I, where π² is the ratio of the factors' mean eigenvalues (Martens &
    Grosse, 2015, section 6.3). For any number k of factors: λ^(1/k), times the mean
    eigenvalue over the geometric mean of all.

    Args:
        factors: Symmetric positive semi-definite factors, see :func:`eigen_kfacs`.
        damping: λ, not negative.

    Returns:
        A shift for each factor, as :func:`inv_kfacs` takes them.

    Raises:
        ValueError: If the damping is negative, or if there is no factor.
    """
    if not factors or damping < 0:
        raise ValueError(
            "Expected one or more Kronecker factors and a damping that is not "
            f"negative, got {len(factors)} factors and {damping}."
        )
    diagonals = [f if is_vector(f) else f.diagonal(0, -2, -1) for f in factors]
    means = [float(diagonal.mean()) for diagonal in diagonals]
    root, number = damping ** (1 / len(factors)), len(factors)
    middle = prod(means) ** (1 / number)
    return [root * (mean / middle if middle else 1.0) for mean in means]


def damped_inv_kfacs(factors: Sequence[Tensor], damping: float) -> List[Tensor]:
    """Invert factors to which a damping is added, see :func:`pi_shifts`.

    Args:
        factors: Factors as they are saved, see :func:`eigen_kfacs`.
        damping: λ, positive where a factor is singular.

    Returns:
        Inverses of the same shapes; the list stands for an approximation of the inverse
        of the damped product. For the inverse itself, which has no Kronecker factors,
        see :func:`ekfac_mat_prod`.

    Raises:
        ValueError: If a damped factor is singular, or the damping negative.
    """  # noqa: DAR401
    inverses = []
    for factor, shift in zip(factors, pi_shifts(factors, damping)):
        (basis,), values = _damped(eigen_kfacs([factor]), shift, True)
        inverses.append(_with_eigenvalues(basis, values.reciprocal()))
    return inverses


def eigen_kfacs(factors: Sequence[Tensor]) -> List[Tensor]:
    """Diagonalize symmetric positive semi-definite Kronecker factors.

    Args:
        factors: Factors ``[p, p]``, with groups ``[G, p, p]``; a vector ``[p]`` is a
            diagonal matrix.

    Returns:
        Eigenvectors of each factor, and the eigenvalues of their product, of shape
        ``[p1, p2, ...]``, with groups ``[G, p1, p2, ...]``. The eigenvectors of a
        diagonal factor are a vector of ones, the diagonal of I. Eigenvalues that
        rounding has left below zero are zero.

    Raises:
        ValueError: If there is no factor.
    """
    if not factors:
        raise ValueError("Expected one or more Kronecker factors, got none.")
    bases: List[Tensor] = []
    product: Any = None
    for i, factor in enumerate(factors):
        values, basis = _eigh(factor)
        values = values.clamp(min=0)
        bases.append(basis)
        if product is None:
            product = values
        else:
            rest = values.shape[:-1] + (1,) * i
            product = product.unsqueeze(-1) * values.reshape(*rest, -1)
    return [*bases, product]


def ekfac_mat_prod(
    ekfac: Sequence[Tensor], power: float = 1.0, damping: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies with a power of a damped matrix.

    It is Q (E + λ)^power Qᵀ: 1 for a product, -1 for one with the inverse, 0.5 and -0.5
    for the square root and its inverse.

    Args:
        ekfac: Eigenvectors and eigenvalues, ``[Q1, Q2, ..., E]``.
        power: The power. Default: ``1.0``.
        damping: λ, which is added to each eigenvalue of the product: exact damping.
            Default: ``0.0``.

    Returns:
        Function that maps a matrix ``[D, V]``, where D is the number of eigenvalues, to
        ``[D, V]``, and a vector ``[D]`` to a vector. It raises a ``ValueError`` for any
        other shape.

    Raises:
        ValueError: If the power is not defined for an eigenvalue that is zero, or
            negative.
    """
    bases, values = _damped(ekfac, damping, not (power >= 0 and power == int(power)))
    scale = values.pow(power)

    def product(mat: Tensor) -> Tensor:
        """Multiply with columns, or with a single vector.

        Args:
            mat: Matrix ``[D, V]``, or vector ``[D]``.

        Returns:
            The product, of the same shape.

        Raises:
            ValueError: If it has another shape.
        """
        size = values.numel()
        if mat.ndim not in (1, 2) or len(mat) != size:
            raise ValueError(
                f"Expected a matrix [{size}, V] or a vector [{size}], as there are "
                f"eigenvalues, got shape {list(mat.shape)}. Flatten a parameter-shaped "
                "tensor, with one column per vector."
            )
        rows = mat.to(promote_types(mat.dtype, values.dtype))
        rows = rows.reshape(size, -1).T.reshape(-1, *values.shape)
        rows = rotate(bases, rotate(transposed(bases), rows) * scale)
        return rows.flatten(1).T.reshape(mat.shape)

    return product


def ekfac_logdet(ekfac: Sequence[Tensor], damping: float = 0.0) -> Tensor:
    """Compute the logarithm of the determinant of a damped matrix.

    Args:
        ekfac: Eigenvectors and eigenvalues, ``[Q1, Q2, ..., E]``.
        damping: λ, which is added to each eigenvalue. Default: ``0.0``.

    Returns:
        Σ log(E + λ), a number.

    Raises:
        ValueError: If an eigenvalue is zero, or negative.
    """  # noqa: DAR401
    return _damped(ekfac, damping, True)[1].log().sum()


def _damped(
    ekfac: Sequence[Tensor], damping: float, positive: bool
) -> Tuple[Sequence[Tensor], Tensor]:
    """Add damping to the eigenvalues; refuse what has no inverse, if asked to."""
    *bases, values = ekfac or [ones(())]
    groups = bases[0].shape[:-2] if bases else ()
    if not bases or values.shape != (*groups, *(basis.shape[-1] for basis in bases)):
        raise ValueError(
            "Expected eigenvectors and eigenvalues [Q1, Q2, ..., E], as EKFAC saves "
            "them, and eigen_kfacs makes them of factors; got shapes "
            f"{[list(x.shape) for x in ekfac]}."
        )
    values = values + damping
    if positive and values.numel() and values.min() <= 0:
        raise ValueError(
            f"The smallest eigenvalue is {float(values.min()):.1e} with a damping of "
            f"{damping}, and the matrix has no inverse, logarithm or root. "
            "Use a larger damping."
        )
    return bases, values


def transposed(matrices: Sequence[Tensor]) -> List[Tensor]:
    """Transpose matrices, of which a vector is a diagonal one.

    Args:
        matrices: Matrices ``[*, q, p]``, and vectors.

    Returns:
        Matrices ``[*, p, q]``, and the vectors.
    """
    return [mat if is_vector(mat) else mat.mT for mat in matrices]


def rotate(matrices: Sequence[Optional[Tensor]], rows: Tensor) -> Tensor:
    """Multiply each of the last axes with a matrix.

    Args:
        matrices: A matrix ``[q, p]`` for each axis, with groups ``[G, q, p]``; a vector
            ``[p]`` is a diagonal matrix, ``None`` the identity.
        rows: Tensor of shape ``[K, p1, p2, ...]``, with groups ``[K, G, p1, ...]``.

    Returns:
        Tensor of shape ``[K, q1, q2, ...]``, with groups ``[K, G, q1, ...]``.
    """
    for axis, matrix in enumerate(matrices, start=-len(matrices)):
        if matrix is None:
            continue
        last, matrix = rows.movedim(axis, -1), matrix.to(rows.dtype)
        if is_vector(matrix):
            last = last * matrix
        elif is_matrix(matrix):
            last = last @ matrix.mT
        else:
            last = einsum("kg...p,gqp->kg...q", last, matrix)
        rows = last.movedim(-1, axis)
    return rows
