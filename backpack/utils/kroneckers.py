"""Kronecker products of small matrices, their inverses, and products with them.

A list of factors ``[F1, F2, ...]`` stands for the matrix F1 ⊗ F2 ⊗ ... . The factors of
a layer's curvature approximate its block for row-major flattened parameters. Products
act on matrices whose *rows* are the parameter's elements, ``[D, V]``.
"""

from functools import reduce
from itertools import islice
from math import prod
from string import ascii_lowercase
from typing import Callable, Iterator, List, Sequence, Union

from torch import Tensor, einsum, kron
from torch.linalg import eigh

MAX_INVERSE_EIGENVALUE = 1e8
"""Largest magnitude of an eigenvalue of an inverse factor."""

Shift = Union[None, float, Sequence[float]]
"""Damping: none, one value for all factors, or one value for each factor."""


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


def _check_factors(factors: Sequence[Tensor]) -> None:
    """Check that there are factors, and that they are matrices.

    Args:
        factors: Kronecker factors.

    Raises:
        ValueError: If there is no factor, or if one is no matrix.
    """
    if not factors or not all_tensors_of_order(2, factors):
        raise ValueError(
            "Expected one or more matrices as Kronecker factors, got tensors of shape "
            f"{[list(factor.shape) for factor in factors]}."
        )


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
    _check_factors([A, B])
    return kron(A, B)


def kfacs_to_mat(factors: Sequence[Tensor]) -> Tensor:
    """Return the Kronecker product of several matrices.

    Args:
        factors: Kronecker factors ``[rows_i, cols_i]``.

    Returns:
        Their product, in list order, ``[prod(rows_i), prod(cols_i)]``.

    Raises:
        ValueError: If there is no factor, or if one is no matrix.
    """
    _check_factors(factors)
    return reduce(two_kfacs_to_mat, factors)


def kfac_mat_prod(factors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies with a Kronecker product of matrices.

    The product is formed factor by factor, never with the large matrix.

    Args:
        factors: Kronecker factors ``[rows_i, cols_i]``.

    Returns:
        Function that maps a matrix ``[D, V]`` with D = prod(cols_i) to a matrix
        ``[prod(rows_i), V]``, and a single vector ``[D]`` to a vector. It raises a
        ``ValueError`` for any other shape.

    Raises:
        ValueError: If there is no factor, or if one is no matrix.
    """
    _check_factors(factors)
    rows, cols = zip(*(factor.shape for factor in factors))
    equation = kfac_mat_prod_einsum_equation(len(factors))

    def product(mat: Tensor) -> Tensor:
        """Multiply with columns, or with a single vector.

        Args:
            mat: Matrix ``[prod(cols_i), V]``, or vector ``[prod(cols_i)]``.

        Returns:
            Matrix ``[prod(rows_i), V]``, or vector ``[prod(rows_i)]``.

        Raises:
            ValueError: If it has another shape.
        """
        if mat.ndim not in (1, 2) or mat.shape[0] != prod(cols):
            raise ValueError(
                f"Expected a matrix [{prod(cols)}, V] or a vector [{prod(cols)}], as "
                f"the Kronecker factors have columns, got shape {list(mat.shape)}. "
                "Flatten a parameter-shaped tensor, with one column per vector."
            )
        operand = mat.reshape(*cols, mat.shape[1:].numel())
        result = einsum(equation, operand, *factors)
        return result.reshape(prod(rows), *mat.shape[1:])

    return product


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """Multiply a Kronecker product of matrices with columns.

    Args:
        factors: Kronecker factors ``[rows_i, cols_i]``.
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
        factors: Symmetric Kronecker factors ``[rows_i, rows_i]``.
        shift: Value that is added to the eigenvalues before they are inverted: one for
            all factors, or a sequence with one for each. ``None`` adds nothing.

    Returns:
        Inverse factors. The magnitude of their eigenvalues is at most 1e8.

    Raises:
        ValueError: If ``shift`` is a sequence of another length than ``factors``, or if
            these are no matrices.
    """
    _check_factors(factors)
    shifts = shift if isinstance(shift, Sequence) else [shift or 0.0] * len(factors)
    if len(shifts) != len(factors):
        raise ValueError(
            f"Expected one shift, or one for each of the {len(factors)} factors, "
            f"got {len(shifts)}."
        )
    return [_inverse(factor, value) for factor, value in zip(factors, shifts)]


def _inverse(mat: Tensor, shift: float) -> Tensor:
    """Invert a symmetric matrix whose eigenvalues are shifted.

    Args:
        mat: Symmetric matrix ``[D, D]``.
        shift: Value that is added to the eigenvalues.

    Returns:
        The inverse ``[D, D]``, with eigenvalues of bounded magnitude.
    """
    eigenvalues, eigenvectors = eigh(mat)
    inverse = (eigenvalues + shift).reciprocal()
    inverse = inverse.clamp(-MAX_INVERSE_EIGENVALUE, MAX_INVERSE_EIGENVALUE)
    return (eigenvectors * inverse) @ eigenvectors.T


def inv_kfac_mat_prod(
    factors: Sequence[Tensor], shift: Shift = None
) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies with the inverse of a Kronecker product.

    Args:
        factors: Symmetric Kronecker factors ``[rows_i, rows_i]``.
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
        factors: Symmetric Kronecker factors ``[rows_i, rows_i]``.
        mat: Matrix ``[D, V]`` or vector ``[D]``, see :func:`kfac_mat_prod`.
        shift: Value that is added to the eigenvalues, see :func:`inv_kfacs`.

    Returns:
        The product, in the shape of ``mat``.

    Raises:
        ValueError: If the factors are no matrices, or the shifts or ``mat`` do not fit.
    """
    return inv_kfac_mat_prod(factors, shift=shift)(mat)
