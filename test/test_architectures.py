"""Whole models as people write them: every quantity of every parameter is right."""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
    Type,
)

import oracle
import pytest
import torch
from cases import Problem, make_extension
from models import (
    ARCHITECTURES,
    HandwrittenVisionTransformer,
    LinearMixtureOfExperts,
    LSTMClassifier,
    MixtureOfExperts,
    UnrolledLSTMClassifier,
)
from torch import Tensor, nn
from torch.nn import Module
from torch.utils._pytree import tree_map

from backpack import backpack, extend
from backpack.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDotGrad,
    BatchFactors,
    BatchGrad,
    BatchJacobian,
    BatchL2Grad,
    BatchProjectGrad,
    ClippedGrad,
    DiagGGNExact,
    DiagGGNMC,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
    WeightedGrad,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.columns import Source

Values = Dict[str, Any]
Results = Dict[str, Tuple[Values, Optional[Tensor]]]

_OUTER = (nn.Linear, *oracle._CONVS, *oracle._CONV_TRANSPOSES)


def twin_of_layers(model: Module) -> Optional[Module]:
    """Make the same model, in which layers do what has Kronecker factors.

    Args:
        model: The model.

    Returns:
        Its twin, which knows the parameters' names in the model; ``None`` if the model
        is written so itself.
    """
    if isinstance(model, LSTMClassifier):
        return UnrolledLSTMClassifier(model)
    if type(model) is MixtureOfExperts:
        return LinearMixtureOfExperts(model)
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        return HandwrittenVisionTransformer(model)
    return None


class Reference:
    """What is right for a model and a batch; shared by the quantities.

    Attributes:
        problem: Model, loss, inputs of the model, inputs of the loss after it.
    """

    def __init__(
        self,
        model: Module,
        loss: Module,
        X: Tuple,
        y: Tuple,
    ):
        """Store the problem.

        Args:
            model: The model, not extended.
            loss: The loss, not extended.
            X: Inputs of the model.
            y: Inputs of the loss after the prediction.
        """
        self.problem = (model, loss, X, y)
        self._cache: Dict[Any, Any] = {}

    def _once(self, key: Any, function: Callable[[], Any]) -> Any:
        if key not in self._cache:
            with oracle.remembering(self._cache):
                self._cache[key] = function()
        return self._cache[key]

    def gradients(self, quantity: str, **options: Any) -> Values:
        """Compute a first-order quantity.

        Args:
            quantity: Its name in the oracle.
            **options: Its options.

        Returns:
            Its value by parameter.
        """
        return self._once(
            f"{quantity} {options}",
            lambda: oracle.oracle(quantity, *self.problem, **options),
        )

    def by_sample(self, columns: Tensor) -> Tensor:
        """Arrange columns at a loss input that has several rows for each sample.

        Args:
            columns: Columns ``[V, N, *]`` or ``[V, N T, C]``.

        Returns:
            Columns ``[V, N, *]``, where T rows are ``[V, N, C, T]``.
        """
        n = len(self.problem[2][0])
        if columns.shape[1] == n:
            return columns
        return columns.unflatten(1, (n, -1)).transpose(2, 3)

    def products(self, columns: Tensor) -> Values:
        """Pull columns at the loss input back to the parameters.

        Args:
            columns: Columns ``[V, N, *]``.

        Returns:
            Products ``[V, N, *p]`` by parameter.
        """
        key = "products", columns
        return self._once(key, lambda: oracle.sqrt_ggn(*self.problem, columns))

    def columns(self) -> Tensor:
        """Factorize the loss Hessian of each sample.

        Returns:
            Columns ``[V, N, F]`` with Σ_v S_v S_vᵀ = H.
        """

        def compute() -> Tensor:
            values, vectors = torch.linalg.eigh(oracle.loss_hessians(*self.problem))
            noise = 1e-14 * values.abs().max()
            values = values.where(values > noise, 0.0)
            roots = vectors * values.sqrt().unsqueeze(1)
            return roots.movedim(2, 0)

        return self._once("columns", compute)

    def factors(self, columns: Tensor, sharing: Optional[str]) -> Values:
        """Compute Kronecker factors by their definition.

        Other than the oracle's, these admit layers that are called several times: each
        call adds positions. Where layers of different kinds share a parameter, it has
        no factors, but its dense block.

        Args:
            columns: Columns ``[V, N, *]``.
            sharing: ``weight_sharing``.

        Returns:
            Lists of factors by parameter.
        """
        model = self.problem[0]
        twin = twin_of_layers(model)
        if twin is not None:
            factors = Reference(twin, *self.problem[1:]).factors(columns, sharing)
            return {twin.original_name(name): value for name, value in factors.items()}
        calls = self._once("calls", self._calls)
        owners = defaultdict(list)
        for module in model.modules():
            for own_name, param in module.named_parameters(recurse=False):
                owners[param].append((module, own_name))
        products = self.products(columns)
        result = {}
        for name, param in oracle.parameters(model).items():
            kinds = {type(m) for m, _ in owners[param]}
            members = [call for m, _ in owners[param] for call in calls.get(m, [])]
            affine = len(kinds) == 1 and kinds <= {*_OUTER, nn.Embedding}
            if affine and members:
                is_bias = owners[param][0][1] == "bias"
                result[name] = kronecker(columns, members, sharing, *kinds, is_bias)
            else:
                flat = products[name].flatten(2)
                result[name] = [torch.einsum("vnp,vnq->pq", flat, flat)]
        return result

    def _calls(self) -> Dict[Module, List[Tuple]]:
        """Collect, for each call of a layer and each sample, Jacobian and inputs.

        Returns:
            By layer: pairs of the model's Jacobian with respect to the call's output
            ``[N, F, G, T, p]`` and what the weight is multiplied with ``[N, G, T, d]``.
        """
        model, _, X, _ = self.problem
        by_sample: List[List[Tuple]] = []
        for n in range(len(X[0])):
            calls: List[Tuple] = []

            def shift_output(layer, args, kwargs, out, calls=calls):
                args = tree_map(Tensor.detach, args)  # no path to earlier calls
                if isinstance(layer, nn.Embedding) and args[0].dim() == 1:
                    args = (args[0].unsqueeze(0),)  # positions that samples share
                    out = out.unsqueeze(0)
                shift = torch.zeros_like(out, requires_grad=True)
                calls.append((layer, args, kwargs, shift))
                return out + shift

            kinds = (*_OUTER, nn.Embedding)
            layers = [
                m
                for m in model.modules()
                if type(m) in kinds and m.weight.requires_grad
            ]
            hooks = [
                m.register_forward_hook(shift_output, with_kwargs=True) for m in layers
            ]
            prediction = model(*oracle.sample(X, n))
            for hook in hooks:
                hook.remove()
            jacobians = oracle.jacobian(prediction, [shift for *_, shift in calls])
            by_sample.append(
                [
                    (
                        layer,
                        oracle.groups_first(layer, jac),
                        oracle.weight_inputs(layer, layer(*args, **kwargs)),
                    )
                    for (layer, args, kwargs, _), jac in zip(calls, jacobians)
                ]
            )
        result = defaultdict(list)
        for samples in zip(*by_sample):
            jacobians = torch.stack([jac for _, jac, _ in samples])
            inputs = torch.stack([a for *_, a in samples])
            result[samples[0][0]].append((jacobians, inputs))
        return result


def kronecker(
    columns: Tensor,
    calls: List[Tuple],
    sharing: Optional[str],
    kind: Type[Module],
    is_bias: bool,
) -> List[Tensor]:
    """Compute the Kronecker factors of a parameter from all calls of its layer.

    Args:
        columns: Columns ``[V, N, *]``.
        calls: Jacobian and inputs of each call.
        sharing: ``weight_sharing``.
        kind: Class of the layer.
        is_bias: Whether the parameter is the layer's bias.

    Returns:
        The factors.
    """
    rows = columns.flatten(2) if columns.dim() > 2 else columns.unsqueeze(-1)
    jacobians = torch.cat([jac for jac, _ in calls], dim=3)
    b = torch.einsum("vnf,nfgtp->vngtp", rows, jacobians)
    a = torch.cat([a for _, a in calls], dim=2)
    if kind is nn.Embedding:
        b = b * a.sum(-1, keepdim=True)  # the weight plays no part in padding
    num_samples, _, positions, _ = a.shape
    if sharing != "expand":
        b = b.sum(3, keepdim=True)
    if sharing == "reduce":
        a = a.mean(2, keepdim=True)
    scale = num_samples * (positions if sharing == "expand" else 1)
    B = oracle.without_single_group(torch.einsum("vngtp,vngtq->gpq", b, b))
    A = oracle.without_single_group(torch.einsum("ngti,ngtj->gij", a, a) / scale)
    if kind is nn.Embedding:
        return [A.diag(), B]
    return [B] if is_bias else [B, A]


Expected = Callable[[Reference, Optional[Tensor]], Values]


class Quantity(NamedTuple):
    """A quantity of the library, and what is right for it.

    Attributes:
        extension: Makes the extension.
        expected: Computes what is right from the reference and the drawn columns.
        convert: Applied to what the library computes, and to what is right, before the
            comparison.
    """

    extension: Callable[[], BackpropExtension]
    expected: Expected
    convert: Callable[[Any, Any], Tuple[Any, Any]] = lambda value, right: (value, right)


def _of_gradients(name: str, **options: Any) -> Expected:
    return lambda ref, _: ref.gradients(name, **options)


def _of_columns(function: Callable[[Tensor], Tensor]) -> Expected:
    """Say what a quantity is in terms of products ``[V, N, *p]``."""

    def expected(ref: Reference, drawn: Optional[Tensor]) -> Values:
        columns = ref.columns() if drawn is None else ref.by_sample(drawn)
        return {n: function(p) for n, p in ref.products(columns).items()}

    return expected


def _factors(sharing: str) -> Expected:
    return lambda ref, drawn: ref.factors(
        ref.columns() if drawn is None else ref.by_sample(drawn), sharing
    )


def blocks(products: Tensor) -> Tensor:
    """Return each sample's GGN ``[N, P, P]``, which any square root must reproduce."""
    flat = products.flatten(2)
    return torch.einsum("vnp,vnq->npq", flat, flat)


def in_basis(value: List[Tensor], products: Tensor) -> Tuple[Any, Any]:
    """Square products ``[V, N, *p]`` in the basis of eigenvectors."""
    matrices = [basis.diag() if basis.dim() == 1 else basis for basis in value[:-1]]
    groups = matrices[-1].shape[:-2]
    sizes = [matrix.shape[-1] for matrix in matrices]
    if not groups and len(sizes) == 2 and products.shape[2] != sizes[0]:
        # a transposed convolution, or experts with inputs before outputs
        swapped = (2, 3) if products.shape[3] == sizes[0] else (3, 4)
        products = products.transpose(*swapped)
    rows = products.reshape(-1, *groups, *sizes)
    if len(matrices) == 1:
        rows = (rows.unsqueeze(-2) @ matrices[0]).squeeze(-2)
    else:
        rows = matrices[0].mT @ rows @ matrices[1]
    return value[-1], rows.pow(2).sum(0)


MAX_NORM = 0.2
CLIPPED = _of_gradients("weighted_sum", weights=partial(oracle.clip, max_norm=MAX_NORM))

QUANTITIES: Dict[str, Quantity] = {
    "BatchGrad": Quantity(BatchGrad, _of_gradients("batch_grad")),
    "BatchL2Grad": Quantity(BatchL2Grad, _of_gradients("batch_l2")),
    "SumGradSquared": Quantity(SumGradSquared, _of_gradients("sum_grad_squared")),
    "Variance": Quantity(Variance, _of_gradients("variance")),
    "BatchDotGrad": Quantity(BatchDotGrad, _of_gradients("batch_dot")),
    "BatchDotGrad-other": Quantity(
        lambda: BatchDotGrad(other=oracle.ByShape(oracle.others)),
        _of_gradients("batch_dot_other"),
    ),
    "BatchFactors": Quantity(
        BatchFactors,
        _of_gradients("batch_grad"),
        lambda value, right: (value.individual(), right),
    ),
    "BatchProjectGrad": Quantity(
        lambda: BatchProjectGrad(oracle.ByShape(oracle.projections)),
        _of_gradients("batch_project"),
    ),
    "WeightedGrad": Quantity(
        partial(make_extension, "WeightedGrad"), _of_gradients("weighted_sum")
    ),
    "WeightedGrad-dots": Quantity(
        lambda: WeightedGrad(lambda dots: dots.sum(1), of="dots"),
        _of_gradients("weighted_sum", weights=oracle.by_dots),
    ),
    "ClippedGrad": Quantity(lambda: ClippedGrad(MAX_NORM), CLIPPED),
    "ClippedGrad-replaces": Quantity(
        lambda: ClippedGrad(MAX_NORM, replace_grad=True), CLIPPED
    ),
    "BatchJacobian": Quantity(  # in any order of features
        BatchJacobian,
        lambda ref, _: {
            name: blocks(jac) for name, jac in ref.gradients("batch_jacobian").items()
        },
        lambda value, right: (blocks(value), right),
    ),
    "DiagGGNExact": Quantity(DiagGGNExact, _of_columns(lambda p: p.pow(2).sum((0, 1)))),
    "BatchDiagGGNExact": Quantity(
        BatchDiagGGNExact, _of_columns(lambda p: p.pow(2).sum(0))
    ),
    "SqrtGGNExact": Quantity(
        SqrtGGNExact, _of_columns(blocks), lambda value, right: (blocks(value), right)
    ),
    "DiagGGNMC": Quantity(
        lambda: DiagGGNMC(mc_samples=2), _of_columns(lambda p: p.pow(2).sum((0, 1)))
    ),
    "BatchDiagGGNMC": Quantity(
        lambda: BatchDiagGGNMC(mc_samples=2), _of_columns(lambda p: p.pow(2).sum(0))
    ),
    "SqrtGGNMC": Quantity(lambda: SqrtGGNMC(mc_samples=2), _of_columns(lambda p: p)),
    "KFAC-expand": Quantity(
        lambda: KFAC(mc_samples=2, weight_sharing="expand"), _factors("expand")
    ),
    "KFLR-expand": Quantity(lambda: KFLR(weight_sharing="expand"), _factors("expand")),
    "EKFAC-expand": Quantity(
        lambda: EKFAC(fisher_type="exact"), _of_columns(lambda p: p), in_basis
    ),
    "EKFAC-reduce": Quantity(
        lambda: EKFAC(mc_samples=2, weight_sharing="reduce"),
        _of_columns(lambda p: p),
        in_basis,
    ),
    "KFAC-reduce": Quantity(
        lambda: KFAC(mc_samples=2, weight_sharing="reduce"), _factors("reduce")
    ),
    "KFLR-reduce": Quantity(lambda: KFLR(weight_sharing="reduce"), _factors("reduce")),
}


@contextmanager
def recorded_columns() -> Iterator[Dict[Source, Tensor]]:
    """Record the columns that are drawn or computed at the loss.

    Yields:
        The columns by their source, filled in the backward pass.
    """
    recorded: Dict[Source, Tensor] = {}
    original = Source.columns

    def columns(self: Source, *args: Any, **kwargs: Any) -> Tensor:
        recorded[self] = original(self, *args, **kwargs)
        return recorded[self]

    Source.columns = columns
    try:
        yield recorded
    finally:
        Source.columns = original


def drawn_by(ext: Any, recorded: Dict[Source, Tensor]) -> Optional[Tensor]:
    """Find the columns an extension has worked with, if it draws them.

    Args:
        ext: The extension.
        recorded: All columns.

    Returns:
        The columns ``[V, N, *]``, or ``None``.
    """
    if ext.get_loss_hessian_strategy() == "exact":
        return None
    if ext.source in recorded:
        return recorded[ext.source]
    (columns,) = [
        columns
        for source, columns in recorded.items()
        if source == replace(ext.source, compact=source.compact)
    ]
    return columns


def make(name: str) -> BackpropExtension:
    """Create a quantity's extension, with a field of its own.

    Args:
        name: Name of the quantity.

    Returns:
        The extension.
    """
    extension = QUANTITIES[name].extension()
    extension.savefield = name
    return extension


def field_of(extension: BackpropExtension) -> str:
    """Tell where an extension's values are after a pass.

    Args:
        extension: The extension.

    Returns:
        The attribute of a parameter.
    """
    return "grad" if extension.replaces_gradient else extension.savefield


def compute(
    model: Module,
    loss: Module,
    X: Tuple,
    y: Tuple,
    names: List[str],
    use_converter: bool = False,
    gradient: bool = True,
) -> Results:
    """Compute quantities of all parameters with the library, in one backward pass.

    Args:
        model: The model; it will be extended.
        loss: The loss module; it will be extended.
        X: Inputs of the model.
        y: Inputs of the loss after the prediction.
        names: Which quantities.
        use_converter: Whether the model is converted. Default: ``False``.
        gradient: Whether the pass accumulates gradients. Default: ``True``.

    Returns:
        For each quantity its values by parameter, and the columns that were drawn.
    """
    exts = {name: make(name) for name in names}
    if any(ext.replaces_gradient for ext in exts.values()):
        model.zero_grad()
    model, loss = extend(model, use_converter=use_converter), extend(loss)
    value = loss(model(*X), *y)
    with recorded_columns() as recorded, backpack(*exts.values(), gradient=gradient):
        value.backward()
    results = {}
    for name, ext in exts.items():
        values = {
            n: getattr(p, field_of(ext)) for n, p in oracle.parameters(model).items()
        }
        second_order = ext.expects_backpropagation_quantities()
        results[name] = (values, drawn_by(ext, recorded) if second_order else None)
    return results


# the second one accumulates no gradients
BY_THEMSELVES = ["WeightedGrad-dots", "ClippedGrad", "BatchDotGrad-other"]
BY_THEMSELVES += [name for name in QUANTITIES if name.endswith("-reduce")]
PASSES = ([q for q in QUANTITIES if q not in BY_THEMSELVES], BY_THEMSELVES)


def build(architecture: str, flat: bool = True) -> Problem:
    """Build an architecture.

    Args:
        architecture: Its name.
        flat: Whether the loss input may have several rows for each sample.

    Returns:
        Model, loss, and data.
    """
    row = ARCHITECTURES[architecture]
    row = row if flat or row.unflattened is None else row.unflattened
    return row.problem()


@lru_cache(maxsize=1)
def reference(architecture: str) -> Reference:
    """Make the reference of an architecture, once for all quantities."""
    return Reference(*build(architecture, flat=False))


@lru_cache(maxsize=2)
def results(architecture: str, index: int) -> Results:
    """Run the library on an architecture, once for all quantities of a pass."""
    problem = build(architecture)
    return compute(*problem, PASSES[index], gradient=not index)


def assert_right(actual: Values, expected: Values, quantity: str) -> None:
    """Assert that a quantity is right for every parameter.

    Args:
        actual: What the library computes.
        expected: What is right.
        quantity: Name of the quantity.
    """
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        value, right = QUANTITIES[quantity].convert(value, expected[name])
        oracle.assert_agrees(value, right, f"{quantity} of {name}")


@pytest.mark.filterwarnings("ignore:E?KF.* of MixtureOfExperts:UserWarning")
@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture(architecture: str, quantity: str) -> None:
    """Every parameter's quantity agrees with plain autograd."""
    index = int(quantity in PASSES[1])
    values, drawn = results(architecture, index)[quantity]
    expected = QUANTITIES[quantity].expected(reference(architecture), drawn)
    assert_right(values, expected, quantity)
