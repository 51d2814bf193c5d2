"""Tests of ``backpack.utils.kroneckers`` against dense matrices."""

import copy
import re
from functools import reduce
from math import prod
from typing import List, Optional, Tuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, diag, eye, float64, nn, rand, randint, testing, zeros

from backpack import backpack, extend
from backpack.custom_module.permute import Permute
from backpack.extensions import KFAC, KFLR, KFRA
from backpack.utils import kroneckers

FACTOR_SHAPES = {
    "1": [(3, 3)],
    "2": [(3, 3), (2, 2)],
    "3": [(3, 3), (1, 1), (4, 4)],
    "2-not-square": [(3, 2), (1, 4)],
    "3-not-square": [(2, 3), (2, 2), (3, 1)],
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_factors(shapes: List[Tuple[int, int]]) -> List[Tensor]:
    """Draw random matrices that are not symmetric.

    Args:
        shapes: Their shapes.

    Returns:
        The matrices.
    """
    return [rand(*shape, dtype=float64) for shape in shapes]


def make_spd_factors(sizes: List[int]) -> List[Tensor]:
    """Draw random symmetric positive definite matrices.

    Args:
        sizes: Their numbers of rows.

    Returns:
        The matrices.
    """
    roots = make_factors([(size, size) for size in sizes])
    return [root @ root.T + eye(len(root), dtype=float64) for root in roots]


def dense(factors: List[Tensor]) -> Tensor:
    """Form the Kronecker product, entry by entry.

    Args:
        factors: Kronecker factors.

    Returns:
        The matrix.
    """

    def two(A: Tensor, B: Tensor) -> Tensor:
        rows, cols = A.shape[0] * B.shape[0], A.shape[1] * B.shape[1]
        result = zeros(rows, cols, dtype=A.dtype)
        for r in range(rows):
            for c in range(cols):
                a = A[r // B.shape[0], c // B.shape[1]]
                result[r, c] = a * B[r % B.shape[0], c % B.shape[1]]
        return result

    return reduce(two, factors)


def assert_close(result: Tensor, truth: Tensor) -> None:
    """Compare in double precision.

    Args:
        result: Tensor to check.
        truth: Expected tensor.
    """
    testing.assert_close(result, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shapes", FACTOR_SHAPES.values(), ids=FACTOR_SHAPES.keys())
def test_kfacs_to_mat(shapes: List[Tuple[int, int]]) -> None:
    """The Kronecker matrix is right."""
    factors = make_factors(shapes)
    assert_close(kroneckers.kfacs_to_mat(factors), dense(factors))
    if len(factors) == 2:
        assert_close(kroneckers.two_kfacs_to_mat(*factors), dense(factors))


@pytest.mark.parametrize("shapes", FACTOR_SHAPES.values(), ids=FACTOR_SHAPES.keys())
def test_kfac_mat_prod(shapes: List[Tuple[int, int]]) -> None:
    """Products are right for a matrix, a single column, and a vector."""
    factors = make_factors(shapes)
    _, cols = zip(*shapes)
    mat = rand(prod(cols), 5, dtype=float64)
    truth = dense(factors) @ mat
    product = kroneckers.kfac_mat_prod(factors)

    assert_close(product(mat), truth)
    assert_close(product(mat[:, 0]), truth[:, 0])
    assert_close(product(mat[:, :1]), truth[:, :1])
    assert_close(kroneckers.apply_kfac_mat_prod(factors, mat), truth)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 2), (2, 3), (6, 5, 1)], ids=str)
def test_kfac_mat_prod_refuses_other_shapes(shape: Tuple[int, ...]) -> None:
    """Tensors that do not fit the factors are refused."""
    product = kroneckers.kfac_mat_prod(make_factors([(3, 3), (2, 2)]))
    expected = "a matrix [6, V] or a vector [6]"
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        product(rand(*shape, dtype=float64))
    assert f"got shape {list(shape)}." in str(error.value)


NO_FACTORS = [
    [],
    [zeros(())],
    [zeros(2, 2), zeros(1, 1, 1)],
    [zeros(3), zeros(1, 1, 1)],
    [zeros(2, 1, 1), zeros(3, 1, 1)],
    [zeros(1, 1, 1, 1)],
]


@pytest.mark.parametrize("factors", NO_FACTORS, ids=str)
def test_refuses_what_are_no_factors(factors: List[Tensor]) -> None:
    """Factors are one or more matrices, diagonal ones, or matrices of each group."""
    functions = kroneckers.kfacs_to_mat, kroneckers.kfac_mat_prod, kroneckers.inv_kfacs
    for function in functions:
        with pytest.raises(ValueError, match="Expected one or more matrices"):
            function(factors)


@pytest.mark.parametrize("shift", [None, 0.5, [0.1, 2.0], (0.1, 2.0)], ids=str)
def test_inverse(shift) -> None:
    """Inverses are those of the shifted factors, and so are products with them."""
    factors = make_spd_factors([3, 2])
    shifts = [shift or 0.0] * 2 if not isinstance(shift, (list, tuple)) else shift
    shifted = [F + s * eye(len(F), dtype=float64) for F, s in zip(factors, shifts)]
    inverses = [F.inverse() for F in shifted]
    for result, truth in zip(kroneckers.inv_kfacs(factors, shift=shift), inverses):
        assert_close(result, truth)

    mat = rand(6, 5, dtype=float64)
    truth = dense(inverses) @ mat
    product = kroneckers.inv_kfac_mat_prod(factors, shift=shift)
    assert_close(product(mat), truth)
    assert_close(product(mat[:, 0]), truth[:, 0])
    result = kroneckers.apply_inv_kfac_mat_prod(factors, mat, shift=shift)
    assert_close(result, truth)


def test_inverse_is_clamped() -> None:
    """Inverse eigenvalues of singular factors are large, but bounded."""
    eigenvalues = torch.tensor([2.0, 0.0, 1e-12, -1e-12, -0.5], dtype=float64)
    (result,) = kroneckers.inv_kfacs([diag(eigenvalues)])
    truth = torch.tensor([0.5, 1e8, 1e8, -1e8, -2.0], dtype=float64)
    assert_close(result, diag(truth))


def test_inverse_refuses_wrong_number_of_shifts() -> None:
    """A sequence of shifts needs one entry for each factor."""
    with pytest.raises(ValueError, match="each of the 2 factors, got 3"):
        kroneckers.inv_kfacs(make_spd_factors([3, 2]), shift=[1.0, 2.0, 3.0])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_inverse_undoes_product(sizes: List[int], num_columns: int) -> None:
    """The product with the inverse takes the product back."""
    factors = make_spd_factors(sizes)
    mat = rand(prod(sizes), num_columns, dtype=float64)
    product = kroneckers.apply_kfac_mat_prod(factors, mat)
    assert_close(kroneckers.apply_inv_kfac_mat_prod(factors, product), mat)


@pytest.mark.parametrize("order", range(4))
def test_order_of_tensors(order: int) -> None:
    """Tensors are recognized by their number of axes."""
    tensor = zeros((2,) * order)
    assert kroneckers.is_tensor_of_order(order, tensor)
    assert not kroneckers.is_tensor_of_order(order + 1, tensor)
    assert kroneckers.is_vector(tensor) == (order == 1)
    assert kroneckers.is_matrix(tensor) == (order == 2)
    assert kroneckers.all_tensors_of_order(order, [tensor, tensor])
    assert not kroneckers.all_tensors_of_order(order, [tensor, zeros((1,) * 4)])


def test_letters_and_equation() -> None:
    """Axes get letters from the alphabet, and the equation multiplies with factors."""
    assert "".join(kroneckers.get_letters()) == "abcdefghijklmnopqrstuvwxyz"
    assert list(kroneckers.get_letters(max_letters=2)) == ["a", "b"]

    factors = make_factors([(2, 3), (4, 2)])
    mat = rand(3, 2, 5, dtype=float64)
    equation = kroneckers.kfac_mat_prod_einsum_equation(2)
    result = torch.einsum(equation, mat, *factors)
    products = [factors[0] @ m @ factors[1].T for m in mat.unbind(-1)]
    truth = torch.stack(products, dim=-1)
    assert_close(result, truth)


# Factors as they are saved: of a weight, a bias, an embedding, a convolution's groups
SAVED = {
    "two": [(3,), (2,)],
    "one": [(4,)],
    "three": [(2,), (3,), (2,)],
    "diagonal": [None, (2,)],
    "groups": [(2, 3), (2, 2)],
    "groups-bias": [(2, 3)],
}


def saved(shapes: List) -> List[Tensor]:
    """Draw symmetric positive definite factors in the form in which they are saved."""
    factors = []
    for shape in shapes:
        if shape is None:
            factors.append(rand(3, dtype=float64) + 0.1)
        else:
            drawn = [make_spd_factors([shape[-1]])[0] for _ in range(prod(shape[:-1]))]
            factors.append(torch.stack(drawn) if len(shape) > 1 else drawn[0])
    return factors


def full(factors: List[Tensor]) -> List[Tensor]:
    """Form the matrices that vectors stand for."""
    return [diag(factor) if factor.dim() == 1 else factor for factor in factors]


def block(factors: List[Tensor]) -> Tensor:
    """Form the matrix that saved factors stand for."""
    factors = full(factors)
    if factors[0].dim() == 3:
        return torch.block_diag(*map(dense, zip(*factors)))
    return dense(factors)


@pytest.mark.parametrize("shift", [None, 0.3])
@pytest.mark.parametrize("key", SAVED)
def test_saved_factors(key: str, shift: Optional[float]) -> None:
    """What is saved is multiplied with, inverted and formed as it is."""
    factors = saved(SAVED[key])
    matrix = block(factors)
    assert_close(kroneckers.kfacs_to_mat(factors), matrix)
    mat = rand(len(matrix), 3, dtype=float64)
    product = kroneckers.kfac_mat_prod(factors)
    assert_close(product(mat), matrix @ mat)
    assert_close(product(mat[:, 0]), matrix @ mat[:, 0])
    assert product(mat[:, :0]).shape == (len(matrix), 0)

    shifted = [
        F + (shift or 0.0) * (1.0 if F.dim() == 1 else eye(F.shape[-1], dtype=float64))
        for F in factors
    ]
    inverses = kroneckers.inv_kfacs(factors, shift=shift)
    assert [x.shape for x in inverses] == [x.shape for x in factors]
    assert_close(kroneckers.kfacs_to_mat(inverses), block(shifted).inverse())
    solve = kroneckers.inv_kfac_mat_prod(factors, shift=shift)
    assert_close(solve(mat), block(shifted).inverse() @ mat)
    damped = kroneckers.damped_inv_kfacs(factors, 0.3)
    assert_close(kroneckers.kfac_mat_prod(damped)(mat), block(damped) @ mat)


LAYERS = {
    "embedding": nn.Embedding(5, 4),
    "groups": nn.Conv1d(4, 6, 1, groups=2),
    "one-group": nn.Conv1d(6, 2, 1),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("quantity", [KFAC, KFLR, KFRA])
def test_factors_of_layers(quantity: type, sharing: str) -> None:
    """The factors of embeddings and groups go in as extensions save them."""
    layers = copy.deepcopy(list(LAYERS.values()))
    model = extend(
        nn.Sequential(layers[0], Permute(0, 2, 1), *layers[1:], nn.Flatten())
    )
    model, loss = model.double(), extend(nn.CrossEntropyLoss())
    value = loss(model(randint(5, (6, 3))), randint(6, (6,)))
    extension = quantity(weight_sharing=sharing)
    with backpack(extension):
        value.backward()
    for p in model.parameters():
        factors, vector = getattr(p, extension.savefield), p.grad.flatten()
        matrix = block(factors)
        assert matrix.shape == (p.numel(), p.numel())
        assert_close(kroneckers.kfacs_to_mat(factors), matrix)
        assert_close(kroneckers.kfac_mat_prod(factors)(vector), matrix @ vector)
        shifted = [F + 0.1 * eye(F.shape[-1], dtype=float64) for F in full(factors)]
        step = kroneckers.inv_kfac_mat_prod(factors, shift=0.1)(vector)
        assert_close(block(shifted) @ step, vector)


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("key", SAVED)
def test_powers(key: str, damping: float) -> None:
    """Powers and determinant are those of the dense matrix, with damping."""
    factors = saved(SAVED[key])
    matrix = block(factors)
    damped = matrix + damping * eye(len(matrix), dtype=float64)
    ekfac = kroneckers.eigen_kfacs(factors)
    assert_close(kroneckers.ekfac_logdet(ekfac, damping), damped.logdet())
    mat = rand(len(matrix), 3, dtype=float64)

    def product(power: float, mat: Tensor = mat) -> Tensor:
        return kroneckers.ekfac_mat_prod(ekfac, power, damping)(mat)

    assert_close(product(1), damped @ mat)
    assert_close(product(2), damped @ damped @ mat)
    assert_close(product(-1), damped.inverse() @ mat)
    assert_close(product(0.5, product(0.5)), damped @ mat)
    assert_close(product(-0.5, product(-0.5)), damped.inverse() @ mat)
    assert_close(product(-1, mat[:, 0]), damped.inverse() @ mat[:, 0])


def test_powers_of_singular_matrices() -> None:
    """What has no inverse is refused, what rounding has left below zero is zero."""
    ekfac = kroneckers.eigen_kfacs([diag(torch.tensor([1.0, -1e-18], dtype=float64))])
    mat = eye(2, dtype=float64)
    assert_close(kroneckers.ekfac_mat_prod(ekfac, 2.0)(mat), diag(mat[0]))
    for power in (-1.0, 0.5):
        with pytest.raises(ValueError, match="Use a larger damping"):
            kroneckers.ekfac_mat_prod(ekfac, power)
        kroneckers.ekfac_mat_prod(ekfac, power, damping=0.1)
    with pytest.raises(ValueError, match="Use a larger damping"):
        kroneckers.ekfac_logdet(ekfac)
    with pytest.raises(ValueError, match="one or more Kronecker factors"):
        kroneckers.eigen_kfacs([])
    with pytest.raises(ValueError, match=re.escape("matrix [2, V] or a vector [2]")):
        kroneckers.ekfac_mat_prod(ekfac)(eye(3, dtype=float64))


HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_types(dtype: torch.dtype) -> None:
    """Factors of any type are diagonalized and inverted, with vectors of any type."""
    drawn = [*make_spd_factors([3, 2]), rand(2, dtype=float64) + 0.5]
    factors = [factor.to(dtype) for factor in drawn]
    exact = [factor.double() for factor in factors]
    ekfac, vector = kroneckers.eigen_kfacs(factors), rand(12, dtype=float64)
    matrix, near = block(exact), {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    functions = {
        kroneckers.kfac_mat_prod(factors): matrix,
        kroneckers.inv_kfac_mat_prod(factors): matrix.inverse(),
        kroneckers.inv_kfac_mat_prod(factors, torch.zeros(3)): matrix.inverse(),
        kroneckers.kfac_mat_prod(kroneckers.damped_inv_kfacs(factors, 0.1)): block(
            kroneckers.damped_inv_kfacs(exact, 0.1)
        ),
        kroneckers.ekfac_mat_prod(ekfac, -1.0): matrix.inverse(),
    }
    for function, expected in functions.items():
        for right in (vector, vector.float()):
            result = function(right)
            assert result.dtype == right.dtype
            testing.assert_close(result, expected @ vector, **near)


NAN = torch.full((2, 2), torch.nan)
IDENTITY = eye(2)
REFUSED = {
    "not finite": (lambda: kroneckers.inv_kfacs([NAN]), RuntimeError, "NaN"),
    "not finite, diagonalized": (
        lambda: kroneckers.eigen_kfacs([IDENTITY, NAN]),
        RuntimeError,
        "shape [2, 2] has no eigenvectors: it has entries that are NaN",
    ),
    "not square": (
        lambda: kroneckers.eigen_kfacs([zeros(2, 3)]),
        ValueError,
        "one of shape [2, 3]",
    ),
    "a number": (
        lambda: kroneckers.eigen_kfacs([torch.tensor(1.0)]),
        ValueError,
        "one of shape []",
    ),
    "factors for eigenvectors": (
        lambda: kroneckers.ekfac_mat_prod([IDENTITY, IDENTITY]),
        ValueError,
        "eigen_kfacs makes them of factors; got shapes [[2, 2], [2, 2]]",
    ),
    "a factor for eigenvectors": (
        lambda: kroneckers.ekfac_logdet([IDENTITY]),
        ValueError,
        "got shapes [[2, 2]]",
    ),
    "nothing": (lambda: kroneckers.ekfac_logdet([]), ValueError, "got shapes []"),
    "negative damping": (
        lambda: kroneckers.damped_inv_kfacs([IDENTITY, IDENTITY], -0.1),
        ValueError,
        "not negative, got 2 factors and -0.1",
    ),
    "no factors": (lambda: kroneckers.pi_shifts([], 0.1), ValueError, "got 0 factors"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refused(key: str) -> None:
    """What has no result is an error that says so."""
    do, kind, says = REFUSED[key]
    with pytest.raises(kind, match=re.escape(says)):
        do()


@pytest.mark.parametrize("key", SAVED)
def test_pi_shifts(key: str) -> None:
    """The shifts multiply to the damping, in proportion to the mean eigenvalues."""
    factors, damping = saved(SAVED[key]), 0.3
    shifts = kroneckers.pi_shifts(factors, damping)
    assert abs(prod(shifts) - damping) < 1e-12
    means = [kroneckers.eigen_kfacs([f])[-1].mean() for f in factors]
    ratios = [shift / float(mean) for shift, mean in zip(shifts, means)]
    assert max(ratios) - min(ratios) < 1e-12 * max(ratios)
    inverses = [
        (F + shift * eye(F.shape[-1], dtype=float64)).inverse()
        for F, shift in zip([F.diag() if F.dim() == 1 else F for F in factors], shifts)
    ]
    result = kroneckers.damped_inv_kfacs(factors, damping)
    assert [x.shape for x in result] == [x.shape for x in factors]
    assert_close(block(result), block(inverses))
    if key == "two":
        B, A = factors
        pi = float(((B.trace() / 3) / (A.trace() / 2)) ** 0.5)
        assert abs(shifts[0] - pi * damping**0.5) < 1e-12
        assert abs(shifts[1] - damping**0.5 / pi) < 1e-12
        zero = torch.zeros_like(B)
        assert kroneckers.pi_shifts([zero, A], 0.25) == [0.5, 0.5]
