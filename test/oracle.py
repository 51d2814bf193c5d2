"""What each quantity is, computed the slow and obvious way with plain autograd.

One function per quantity, which never uses the library. A problem is a model, a loss
module, the model's inputs ``X`` and the loss's inputs ``y`` after the prediction, both
tuples of tensors whose axis 0 is the batch. Samples go through the model one by one.
Results are dictionaries by parameter name; use float64.

The GGN family is computed from dense Jacobians and the dense loss Hessian. With
``columns`` ``[V, N, *]`` at the loss input, Σ_v S_v S_vᵀ takes the Hessian's place:
what a Monte-Carlo quantity has to be, given what was drawn.
"""

from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import Module
from torch.utils._pytree import tree_leaves

Tensors = Tuple[Tensor, ...]
Value = Union[Tensor, List[Tensor]]

RTOL = 1e-8

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_TRANSPOSES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_AFFINE = (nn.Embedding, *_CONVS, *_CONV_TRANSPOSES)


def oracle(
    quantity: str, model: Module, loss: Module, X: Tensors, y: Tensors, **options: Any
) -> Dict[str, Value]:
    """Compute a quantity.

    Args:
        quantity: Name of one of the functions in ``QUANTITIES``.
        model: The model, not extended.
        loss: The loss module, not extended.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        options: Further arguments of the function.

    Returns:
        The quantity of each parameter that requires a gradient.
    """
    return QUANTITIES[quantity](model, loss, X, y, **options)


def assert_agrees(
    actual: Value,
    expected: Value,
    what: str = "",
    rtol: float = RTOL,
) -> None:
    """Assert that two values agree, and report where they do not.

    Args:
        actual: What came out: a tensor, or a list of tensors.
        expected: What should have come out.
        what: What is compared.
        rtol: Tolerance, relative to each entry; 1% of it relative to the largest.
    """
    if isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple)), f"{what}: no list, but {type(actual)}"
        assert len(actual) == len(expected), f"{what}: {len(actual)} entries"
        for i, (a, e) in enumerate(zip(actual, expected)):
            assert_agrees(a, e, f"{what}[{i}]", rtol)
        return
    assert isinstance(actual, Tensor), f"{what}: no tensor, but {actual!r}"
    same = (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert same, (
        f"{what}: got {list(actual.shape)} {actual.dtype}, expected "
        f"{list(expected.shape)} {expected.dtype}"
    )
    if not expected.numel():
        return
    size = expected.detach().abs()
    atol = 1e-2 * rtol * float(size.max())
    error = (actual.detach() - expected.detach()).abs()
    if float((error - rtol * size).max()) <= atol:  # `isclose` takes ten times longer
        return
    wrong = ~torch.isclose(actual, expected, rtol=rtol, atol=max(atol, 1e-300))
    if wrong.any():
        places = wrong.nonzero()[:5].tolist()
        lines = [
            f"  at {tuple(i)}: {actual[tuple(i)].item()} != {expected[tuple(i)].item()}"
            for i in places
        ]
        raise AssertionError(
            "\n".join(
                [
                    f"{what}: {int(wrong.sum())} of {wrong.numel()} entries differ",
                    *lines,
                ]
            )
        )


def parameters(model: Module) -> Dict[str, Tensor]:
    """List what a model is differentiated with respect to.

    Args:
        model: The model.

    Returns:
        Parameters that require a gradient, by name.
    """
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def sample(X: Tensors, n: int) -> Tensors:
    """Select a sample as a mini-batch of size one.

    Args:
        X: Tensors of shape ``[N, *]``.
        n: Which sample.

    Returns:
        Tensors of shape ``[1, *]``.
    """
    return tuple(x[n : n + 1] for x in X)


_KNOWN: List[Dict[Any, Any]] = []


@contextmanager
def remembering(known: Dict[Any, Any]) -> Iterator[None]:
    """Compute gradients and Jacobians of the same problem once.

    Args:
        known: What has been computed. What it is of has to live as long.

    Yields:
        Nothing.
    """
    _KNOWN.append(known)
    try:
        yield
    finally:
        _KNOWN.pop()


def remembered(function: Callable) -> Callable:
    """Let a function look for its result first, unless it is to be differentiated."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not _KNOWN or options or True in [x for x in args if isinstance(x, bool)]:
            return function(*args, **options)
        key = function, *map(id, tree_leaves(args))
        if key not in _KNOWN[-1]:
            _KNOWN[-1][key] = function(*args)
        return _KNOWN[-1][key]

    return call


# First order


@remembered
def individual_gradients(
    model: Module, loss: Module, X: Tensors, y: Tensors, create_graph: bool = False
) -> Dict[str, Tensor]:
    """Differentiate the loss, where only one sample's prediction is no constant.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Individual gradients ``[N, *p]``.
    """
    params = parameters(model)
    batch_size = len(X[0])
    constants = [model(*sample(X, n)).detach() for n in range(batch_size)]
    rows = []
    for n in range(batch_size):
        predictions = list(constants)
        predictions[n] = model(*sample(X, n))
        value = loss(torch.cat(predictions), *y)
        rows.append(
            grad(
                value,
                list(params.values()),
                materialize_grads=True,
                create_graph=create_graph,
            )
        )
    return {name: torch.stack(col) for name, col in zip(params, zip(*rows))}


def of_gradients(function: Callable[[Tensor], Tensor]) -> Callable[..., Dict]:
    """Make a quantity out of what it is in terms of the individual gradients.

    Args:
        function: Maps the individual gradients ``[N, *p]`` to the quantity.

    Returns:
        Function of model, loss, X and y.
    """

    def quantity(
        model: Module,
        loss: Module,
        X: Tensors,
        y: Tensors,
        subsampling: Optional[Sequence[int]] = None,
        create_graph: bool = False,
    ) -> Dict[str, Tensor]:
        gradients = individual_gradients(model, loss, X, y, create_graph)
        if subsampling is not None:
            gradients = {n: g[list(subsampling)] for n, g in gradients.items()}
        return {name: function(g) for name, g in gradients.items()}

    return quantity


batch_grad = of_gradients(lambda g: g)
batch_l2 = of_gradients(lambda g: (g**2).reshape(len(g), -1).sum(1))
sum_grad_squared = of_gradients(lambda g: (g**2).sum(0))
variance = of_gradients(lambda g: ((g - g.mean(0)) ** 2).mean(0))
batch_dot = of_gradients(lambda g: g.reshape(len(g), -1) @ g.reshape(len(g), -1).T)


class ByShape(dict):
    """Values for each parameter that depend on nothing but its shape."""

    def __init__(self, function: Callable[[Sequence[int]], Any]):
        """Store the function of a shape."""
        super().__init__()
        self.function = function

    def get(self, param: Tensor, default: Any = None) -> Any:
        """Compute the value for a parameter."""
        return self.function(param.shape)


def others(shape: Sequence[int]) -> Tensor:
    """Make gradients of another batch ``[5, *p]``, always the same.

    Args:
        shape: Shape of a parameter.

    Returns:
        The gradients.
    """
    rows = torch.arange(5 * torch.Size(shape).numel(), dtype=torch.float64).sin()
    return rows.reshape(5, *shape)


def projections(shape: Sequence[int]) -> List[Tensor]:
    """Make matrices for both sides of a parameter, always the same.

    Args:
        shape: Shape of a parameter.

    Returns:
        Matrices with as many columns as the parameter has rows, and columns. One for a
        parameter without columns.
    """
    axes = [torch.Size(shape).numel()]
    if len(shape) > 1:
        axes = [shape[0], axes[0] // shape[0]]
    return [
        torch.arange(k * axis, dtype=torch.float64).cos().reshape(k, axis)
        for k, axis in zip((2, 3), axes)
    ]


def project(g: Tensor) -> Tensor:
    """Project individual gradients from both sides.

    Args:
        g: Individual gradients ``[N, *p]``.

    Returns:
        Projected gradients, ``[N, 2, 3]`` or ``[N, 2]``.
    """
    left, *right = projections(g.shape[1:])
    if not right:
        return torch.stack([left @ row.flatten() for row in g])
    return torch.stack([left @ row.flatten(1) @ right[0].T for row in g])


batch_project = of_gradients(project)
batch_dot_other = of_gradients(
    lambda g: (
        g.reshape(len(g), -1) @ others(g.shape[1:]).flatten(1).T
        if g.dim() > 1
        else g.reshape(-1, 1) @ others(()).reshape(1, -1)
    )
)


def by_norms(g: Tensor) -> Tensor:
    """Return weights of gradients ``[N, P]`` that make all of them nearly unit."""
    return 1 / (0.1 + (g**2).sum(1).sqrt())


def by_dots(g: Tensor) -> Tensor:
    """Return weights of gradients ``[N, P]`` that tell how they agree."""
    return (g @ g.T).sum(1)


def clip(g: Tensor, max_norm: float) -> Tensor:
    """Return weights of gradients ``[N, P]`` that clip them to a norm."""
    return (max_norm / (g**2).sum(1).sqrt()).clamp(max=1)


def weighted_sum(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    weights: Callable[[Tensor], Tensor] = by_norms,
    scale: str = "summand",
    subsampling: Optional[Sequence[int]] = None,
    create_graph: bool = False,
) -> Dict[str, Tensor]:
    """Sum individual gradients with weights that depend on all parameters.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        weights: Maps individual gradients of all parameters ``[N, P]`` to ``[N]``.
        scale: ``"sample"`` if gradients are those of the samples' own losses.
        subsampling: Samples to select.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Sums ``[*p]``.
    """
    averages = scale == "sample" and "mean" in loss.reduction
    gradients = individual_gradients(model, loss, X, y, create_graph)
    picked = range(len(X[0])) if subsampling is None else subsampling
    factor = len(X[0]) if averages else 1
    gradients = {n: factor * g[list(picked)] for n, g in gradients.items()}
    rows = torch.cat([g.reshape(len(g), -1) for g in gradients.values()], 1)
    w = weights(rows)
    return {n: torch.tensordot(w, g, 1) for n, g in gradients.items()}


# GGN family


def loss_hessians(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    columns: Optional[Tensor] = None,
    create_graph: bool = False,
) -> Tensor:
    """Compute the dense Hessian of the loss with respect to the predictions.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        columns: If given, Σ_v S_v S_vᵀ is returned instead.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Each sample's block, ``[N, F, F]`` for F features of the prediction.
    """
    batch_size = len(X[0])
    if columns is not None:
        rows = columns.flatten(2) if columns.dim() > 2 else columns.unsqueeze(-1)
        return torch.stack([rows[:, n].T @ rows[:, n] for n in range(batch_size)])
    f = torch.cat([model(*sample(X, n)) for n in range(batch_size)])
    dense = hessian(lambda x: loss(x, *y), f, create_graph)
    features = f[0].numel()
    dense = dense.reshape(batch_size, features, batch_size, features)
    for n in range(batch_size):
        assert not any(dense[n, :, m].any() for m in range(batch_size) if m != n)
    return torch.stack([dense[n, :, n] for n in range(batch_size)])


def jacobian(
    output: Tensor, inputs: Sequence[Tensor], create_graph: bool = False
) -> List[Tensor]:
    """Differentiate each entry of an output.

    Args:
        output: Tensor with F entries.
        inputs: What to differentiate with respect to, ``[*p]``.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Jacobians ``[F, *p]``.
    """
    eye = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
    rows = [
        grad(
            output,
            inputs,
            direction.view(output.shape),
            retain_graph=True,
            materialize_grads=True,
            create_graph=create_graph,
        )
        for direction in eye
    ]
    return [torch.stack(column) for column in zip(*rows)]


def hessian(
    function: Callable[[Tensor], Tensor], x: Tensor, create_graph: bool = False
) -> Tensor:
    """Differentiate a function twice.

    Args:
        function: Returns a number.
        x: Where, a tensor with F entries.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Its Hessian ``[F, F]``.
    """
    x = x if create_graph else x.detach().requires_grad_()
    (gradient,) = grad(function(x), x, create_graph=True)
    if not gradient.requires_grad:  # it is linear
        return x.new_zeros(x.numel(), x.numel())
    return jacobian(gradient, [x], create_graph)[0].flatten(1)


@remembered
def model_jacobians(
    model: Module, X: Tensors, create_graph: bool = False
) -> Dict[str, Tensor]:
    """Compute the model's Jacobian for each sample.

    Args:
        model: The model.
        X: Inputs of the model.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Jacobians ``[N, F, *p]``.
    """
    params = parameters(model)
    rows = [
        jacobian(model(*sample(X, n)), list(params.values()), create_graph)
        for n in range(len(X[0]))
    ]
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}


def batch_jacobian(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    subsampling: Optional[Sequence[int]] = None,
    create_graph: bool = False,
) -> Dict[str, Tensor]:
    """Compute the model's Jacobian for each sample, whatever the loss is.

    Args:
        model: The model.
        loss: Not used.
        X: Inputs of the model.
        y: Not used.
        subsampling: Samples to select.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Jacobians ``[F, N, *p]``.
    """
    picked = list(range(len(X[0])) if subsampling is None else subsampling)
    jacobians = model_jacobians(model, X, create_graph)
    return {name: jac[picked].transpose(0, 1) for name, jac in jacobians.items()}


def sqrt_ggn(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    columns: Tensor,
    subsampling: Optional[Sequence[int]] = None,
) -> Dict[str, Tensor]:
    """Multiply columns with the model's Jacobian.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        columns: Columns ``[V, N, *]`` at the loss input.
        subsampling: Samples to select.

    Returns:
        Products ``[V, N, *p]``.
    """
    num_columns, batch_size = columns.shape[:2]
    rows = columns.reshape(num_columns, batch_size, -1)
    picked = range(batch_size) if subsampling is None else subsampling
    return {
        name: torch.stack(
            [
                torch.stack([torch.tensordot(rows[v, n], jac[n], 1) for n in picked])
                for v in range(num_columns)
            ]
        )
        for name, jac in model_jacobians(model, X).items()
    }


def batch_ggn(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    columns: Optional[Tensor] = None,
    create_graph: bool = False,
) -> Dict[str, Tensor]:
    """Compute each sample's dense GGN block Jₙᵀ Hₙ Jₙ.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        columns: If given, Σ_v S_v S_vᵀ takes the place of the loss Hessian.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Blocks ``[N, P, P]`` for parameters with P elements.
    """
    hessians = loss_hessians(model, loss, X, y, columns, create_graph)
    return {
        name: torch.stack(
            [j.T @ h @ j for j, h in zip(jac.unsqueeze(-1).flatten(2), hessians)]
        )
        for name, jac in model_jacobians(model, X, create_graph).items()
    }


def diag_ggn_batch(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    columns: Optional[Tensor] = None,
    create_graph: bool = False,
) -> Dict[str, Tensor]:
    """Take the diagonal of each sample's GGN.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        columns: See :func:`batch_ggn`.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Diagonals ``[N, *p]``.
    """
    shapes = {name: param.shape for name, param in parameters(model).items()}
    return {
        name: torch.stack([ggn.diag().reshape(shapes[name]) for ggn in blocks])
        for name, blocks in batch_ggn(model, loss, X, y, columns, create_graph).items()
    }


def diag_ggn(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    columns: Optional[Tensor] = None,
    create_graph: bool = False,
) -> Dict[str, Tensor]:
    """Take the diagonal of the GGN.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        columns: See :func:`batch_ggn`.
        create_graph: Whether the result can be differentiated. Default: ``False``.

    Returns:
        Diagonals ``[*p]``.
    """
    diagonals = diag_ggn_batch(model, loss, X, y, columns, create_graph)
    return {name: diagonal.sum(0) for name, diagonal in diagonals.items()}


# Kronecker factors


def kronecker_factors(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    columns: Optional[Tensor] = None,
    weight_sharing: Optional[str] = None,
) -> Dict[str, List[Tensor]]:
    """Compute Kronecker factors by their definition; each weight is used once.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        columns: See :func:`batch_ggn`.
        weight_sharing: ``"expand"``, ``"reduce"`` or ``None``.

    Returns:
        Lists of factors.
    """
    hessians = loss_hessians(model, loss, X, y, columns)
    factors = {}
    for name in parameters(model):
        prefix, _, own_name = name.rpartition(".")
        layer = model.get_submodule(prefix)
        outputs, inputs = layer_factors(model, layer, own_name, X, hessians)
        if not outputs:  # any other parameter: its dense block
            dense = batch_ggn(model, loss, X, y, columns)[name]
            factors[name] = [dense.sum(0)]
            continue
        expand = weight_sharing == "expand"
        B = sum(
            torch.einsum("gtptq->gpq" if expand else "gtpsq->gpq", ggn)
            for ggn in outputs
        )
        if not inputs:
            factors[name] = [without_single_group(B)]
            continue
        if weight_sharing == "reduce":
            inputs = [a.mean(1, keepdim=True) for a in inputs]
        A = sum(torch.einsum("gti,gtj->gij", a, a) for a in inputs) / len(inputs)
        if expand:
            A = A / inputs[0].shape[1]
        if isinstance(layer, nn.Embedding):
            factors[name] = [A[0].diag(), B[0]]
        else:
            factors[name] = [without_single_group(B), without_single_group(A)]
    return factors


def ekfac(
    model: Module,
    loss: Module,
    X: Tensors,
    y: Tensors,
    columns: Tensor,
    bases: Dict[str, List[Tensor]],
    weight_sharing: Optional[str] = None,
) -> Dict[str, List[Tensor]]:
    """Check eigenvectors of Kronecker factors, and square the gradients in their basis.

    Args:
        model: The model.
        loss: The loss module.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        columns: See :func:`batch_ggn`.
        bases: Eigenvectors of each parameter's factors, which are not unique.
        weight_sharing: See :func:`kronecker_factors`.

    Returns:
        The same eigenvectors, and the sum over columns and samples of the squares.
    """
    problem = model, loss, X, y
    factors = kronecker_factors(*problem, columns, weight_sharing)
    result = {}
    for name, products in sqrt_ggn(*problem, columns).items():
        assert len(bases[name]) == len(factors[name]), name
        matrices = []
        for basis, factor in zip(bases[name], factors[name]):
            if factor.dim() == 1:
                assert_agrees(basis, torch.ones_like(factor), name)
                basis, factor = basis.diag(), factor.diag()
            eye = torch.eye(factor.shape[-1], dtype=factor.dtype)
            assert (basis.mT @ basis - eye).abs().max() < 1e-10, f"{name}: orthogonal"
            rotated = basis.mT @ factor @ basis
            rest = (rotated - rotated * eye).abs().max()
            assert rest <= 1e-10 * factor.abs().max(), f"{name}: not diagonal"
            matrices.append(basis if basis.dim() == 3 else basis.unsqueeze(0))
        groups = len(matrices[0])
        rows = products.reshape(-1, *products.shape[2:])
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, _CONV_TRANSPOSES) and len(matrices) == 2:
            rows = rows.unflatten(1, (groups, -1)).transpose(2, 3)
        rows = rows.reshape(len(rows), groups, matrices[0].shape[-1], -1)
        rows = torch.einsum("kgod,gop->kgpd", rows, matrices[0])
        if len(matrices) == 2:
            rows = torch.einsum("kgod,gdi->kgoi", rows, matrices[1])
        else:
            rows = rows.squeeze(-1)
        squares = without_single_group(rows.pow(2).sum(0))
        result[name] = [*bases[name], squares]
    return result


def without_single_group(factor: Tensor) -> Tensor:
    """Drop the group axis if there is a single group.

    Args:
        factor: Factors ``[G, p, p]``.

    Returns:
        The factors, ``[p, p]`` for G = 1.
    """
    return factor[0] if len(factor) == 1 else factor


def shift_output(
    calls: List, layer: Module, args: Tensors, kwargs: Dict[str, Any], output: Tensor
) -> Tensor:
    """Forward hook: add zeros to the output, to differentiate with respect to.

    Args:
        calls: Is appended the inputs and the zeros.
        layer: The layer.
        args: Positional arguments of its call.
        kwargs: Keyword arguments of its call.
        output: Its output.

    Returns:
        The new output.
    """
    shift = torch.zeros_like(output, requires_grad=True)
    calls.append((args, kwargs, shift))
    return output + shift


def layer_factors(
    model: Module, layer: Module, name: str, X: Tensors, hessians: Tensor
) -> Tuple[List[Tensor], List[Tensor]]:
    """Compute, per sample, what the Kronecker factors of a layer are made of.

    Args:
        model: The model.
        layer: A module inside.
        name: Name of the parameter in the module.
        X: Inputs of the model.
        hessians: Hessian of the loss, ``[N, F, F]``.

    Returns:
        For each sample the GGN with respect to the layer's output ``[G, T, p, T, p]``,
        and the layer's inputs ``[G, T, d]`` that the weight is multiplied with at each
        position (none for a bias). Empty lists if the layer is of another kind, does
        not own the parameter, or is not called.
    """
    outputs, inputs = [], []
    if isinstance(layer, (nn.Linear, nn.MultiheadAttention)):
        return linear_factors(model, getattr(layer, name), X, hessians)
    kinds = [cls for cls in _AFFINE if isinstance(layer, cls)]
    own = vars(layer)["_parameters"].get(name)
    known = own is not None and name in ("weight", "bias")
    if not known or not any(type(layer).forward is cls.forward for cls in kinds):
        return outputs, inputs
    for n, hessian in enumerate(hessians):
        calls: List = []
        hook = partial(shift_output, calls)
        handle = layer.register_forward_hook(hook, with_kwargs=True)
        prediction = model(*sample(X, n))
        handle.remove()
        if not calls:
            return outputs, inputs
        ((args, kwargs, shift),) = calls
        (jac,) = jacobian(prediction, [shift])
        jac = groups_first(layer, jac)  # [f, g, t, p]
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            jac = jac * (args[0] != layer.padding_idx).reshape(-1, 1)  # no weight there
        outputs.append(torch.einsum("egtp,ef,fgsq->gtpsq", jac, hessian, jac))
        if name == "weight":
            inputs.append(weight_inputs(layer, layer(*args, **kwargs)))
    return outputs, inputs


def linear_factors(
    model: Module, param: Tensor, X: Tensors, hessians: Tensor
) -> Tuple[List[Tensor], List[Tensor]]:
    """Compute the same for a parameter of a linear map, in whichever module.

    Args:
        model: The model.
        param: Weight or bias.
        X: Inputs of the model.
        hessians: Hessian of the loss, ``[N, F, F]``.

    Returns:
        See :func:`layer_factors`; empty lists if ``functional.linear`` is never called
        with the parameter itself.
    """
    outputs, inputs = [], []
    original = nn.functional.linear
    for n, hessian in enumerate(hessians):
        calls: List = []

        def linear(x, weight, bias=None, calls=calls):
            output = original(x, weight, bias)
            if weight is not param and bias is not param:
                return output
            shift = torch.zeros_like(output, requires_grad=True)
            calls.append((x, weight, shift))
            return output + shift

        with patch.object(nn.functional, "linear", linear):
            prediction = model(*sample(X, n))
        if not calls:
            return outputs, inputs
        ((x, weight, shift),) = calls
        (jac,) = jacobian(prediction, [shift])
        jac = jac.reshape(len(jac), -1, jac.shape[-1])  # [f, t, p]
        outputs.append(torch.einsum("etp,ef,fsq->tpsq", jac, hessian, jac)[None])
        if weight is param:
            inputs.append(x.reshape(1, -1, x.shape[-1]))
    return outputs, inputs


def groups_first(layer: Module, output: Tensor) -> Tensor:
    """Divide the axes of a layer's output into groups, positions and features.

    Args:
        layer: The layer.
        output: Tensor of shape ``[N, *out]``; ``[F, 1, *out]`` also.

    Returns:
        Tensor of shape ``[N, G, T, p]``.
    """
    if isinstance(layer, (*_CONVS, *_CONV_TRANSPOSES)):
        spatial = len(layer.kernel_size)
        flat = output.flatten(-spatial).reshape(
            len(output), layer.groups, -1, output.shape[-spatial:].numel()
        )
        return flat.transpose(2, 3)
    return output.reshape(len(output), 1, -1, output.shape[-1])


def weight_inputs(layer: Module, output: Tensor) -> Tensor:
    """Find out what a layer's weight is multiplied with.

    A feature at position t is Σ_d weight[d] a[t, d], so that a is how the first feature
    of a group changes with the weights that belong to it.

    Args:
        layer: The layer.
        output: Its output for one sample.

    Returns:
        Tensor of shape ``[G, T, d]``.
    """
    weight = layer.weight
    result = []
    for g, group in enumerate(groups_first(layer, output)[0]):
        rows = jacobian(group[:, 0], [weight])[0]  # [t, *p]
        if isinstance(layer, nn.Embedding):
            result.append(rows[:, :, 0])
        elif isinstance(layer, _CONV_TRANSPOSES):
            size = weight.shape[0] // layer.groups
            result.append(rows[:, g * size : (g + 1) * size, 0].flatten(1))
        else:
            size = weight.shape[0] // getattr(layer, "groups", 1)
            result.append(rows[:, g * size].flatten(1))
    return torch.stack(result)


QUANTITIES: Dict[str, Callable[..., Dict[str, Value]]] = {
    "batch_grad": batch_grad,
    "batch_l2": batch_l2,
    "sum_grad_squared": sum_grad_squared,
    "variance": variance,
    "batch_dot": batch_dot,
    "batch_dot_other": batch_dot_other,
    "batch_project": batch_project,
    "weighted_sum": weighted_sum,
    "batch_jacobian": batch_jacobian,
    "sqrt_ggn": sqrt_ggn,
    "batch_ggn": batch_ggn,
    "diag_ggn": diag_ggn,
    "diag_ggn_batch": diag_ggn_batch,
    "kronecker_factors": kronecker_factors,
    "ekfac": ekfac,
}
