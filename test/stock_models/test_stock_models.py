"""Is each quantity right on models that people use, or refused with the true reason?

The table is in ``architectures.py``. The judge is plain autograd in double precision:
one forward pass with the whole batch, then one backward pass for each sample's share of
the loss, or for each entry of the prediction. ``conftest.py`` writes down what came
out, for the documentation.
"""

from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import cross_entropy

from backpack import backpack, extend
from backpack.extensions import (
    KFAC,
    KFLR,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from backpack.extensions.backprop_extension import BackpropExtension

pytest.importorskip("transformers", reason="`make test-models` installs stock models")

from rows import IGNORED, Row  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402
from variants import ROWS  # noqa: E402

RTOL = 1e-8
# What counts as zero, relative to the largest gradient: a gradient that is zero in
# exact arithmetic, like that of a key's bias, is nothing but rounding errors.
ZERO = 1e-5

SIZES = [(3, 5), (4, 4)]  # samples, tokens
MC_SAMPLES = 2

Sizes = Tuple[int, int]
Values = Dict[str, Tensor]


@pytest.fixture(autouse=True)
def single_is_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models that compute parts in single precision compute all in double."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.fixture(autouse=True)
def repeated_warnings() -> Iterator[None]:
    """Let other packages warn as they like, but each time, so as to be compared."""
    torch.set_warn_always(True)
    with catch_warnings():
        simplefilter("ignore")
        yield
    torch.set_warn_always(False)


def assert_close(actual: Any, expected: Tensor, what: str, zero: float = 0.0) -> None:
    """Assert that two tensors agree, relative to the largest entry.

    Args:
        actual: What came out.
        expected: What should have come out.
        what: What is compared.
        zero: Entries of this size are zero.
    """
    assert isinstance(actual, Tensor), f"{what}: no tensor, but {actual!r}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}"
    assert actual.shape == expected.shape, f"{what}: {list(actual.shape)}"
    scale = max(float(expected.abs().max()), zero)
    error = float((actual - expected).abs().max())
    assert error <= RTOL * scale, f"{what}: off by {error:.1e} of {scale:.1e}"


def largest(values: Values) -> float:
    """Find the largest entry of several tensors."""
    return max(float(value.abs().max()) for value in values.values())


# Running a row


class Pass(NamedTuple):
    """What a forward and a backward pass leave behind.

    Attributes:
        model: The model.
        value: The loss.
        gradients: Gradients of the parameters, by name.
        calls: How often each module was called, by name.
        buffers: The model's buffers, by name.
        random_state: That of the random number generator.
        warnings: Texts of what was warned of.
    """

    model: Module
    value: Tensor
    gradients: Values
    calls: Counter
    buffers: Values
    random_state: Tensor
    warnings: List[str]


def draw(row: Row, sizes: Sizes) -> Dict[str, Any]:
    """Draw the batch; the same one every time.

    Args:
        row: The row.
        sizes: Number and length of the samples.

    Returns:
        Keyword arguments of the model.
    """
    torch.manual_seed(2)
    return row.inputs(*sizes)


def draw_targets(batch: Dict[str, Any], predictions: Tensor) -> Tensor:
    """Draw a class for each prediction; what is predicted for padding is ignored.

    Where the model gets targets, these are the ones.

    Args:
        batch: Keyword arguments of the model.
        predictions: Predictions ``[N, *, C]``.

    Returns:
        Classes ``[N, *]``.
    """
    if "labels" in batch:
        labels = batch["labels"]
        return labels[:, -predictions.shape[1] :] if labels.dim() > 1 else labels
    if "end_positions" in batch:
        return torch.stack([batch["start_positions"], batch["end_positions"]], 1)
    generator = torch.Generator().manual_seed(3)
    shape = predictions.shape[:-1]
    classes = predictions.shape[-1]
    targets = torch.randint(classes, shape, generator=generator, device="cpu")
    targets = targets.to(predictions.device)
    mask = batch.get("attention_mask")
    if mask is None or len(shape) == 1 or "decoder_input_ids" in batch:
        return targets
    return targets.where(mask[:, -shape[1] :].bool(), IGNORED)


UNUSED: Dict[Tuple[str, Sizes], List[str]] = {}  # parameters, by row and sizes


def prepared(row: Row, sizes: Sizes) -> Module:
    """Build a model and freeze what the loss does not depend on.

    Args:
        row: The row.
        sizes: Number and length of the samples.

    Returns:
        The model, without gradients.
    """
    key = (row.id, sizes)
    if key not in UNUSED:  # on a model of its own: some keep what they have computed
        model = row.model()
        shares(row, model, sizes).sum().backward()
        UNUSED[key] = [n for n, p in model.named_parameters() if p.grad is None]
    model = row.model()
    for name in UNUSED[key]:
        model.get_parameter(name).requires_grad_(False)
    return model


def shares(row: Row, model: Module, sizes: Sizes) -> Tensor:
    """Compute each sample's share of the loss, with plain PyTorch.

    Args:
        row: The row.
        model: The model.
        sizes: Number and length of the samples.

    Returns:
        Summands ``[N]`` of the loss.
    """
    num_samples = sizes[0]
    if row.own_loss:
        values = [
            row.output(model, select(draw(row, sizes), n)).loss / num_samples
            for n in range(num_samples)
        ]
        return torch.stack(values)
    batch = draw(row, sizes)
    predictions = row.predict(row.output(model, batch))
    targets = draw_targets(batch, predictions)
    losses = cross_entropy(
        predictions.flatten(0, -2),
        targets.flatten(),
        reduction="none",
        ignore_index=IGNORED,
    )
    return losses.reshape(num_samples, -1).sum(1) / (targets != IGNORED).sum()


def select(batch: Dict[str, Any], n: int) -> Dict[str, Any]:
    """Select a sample; a cache, which is empty, is left alone.

    Args:
        batch: Keyword arguments of the model.
        n: Which sample.

    Returns:
        Keyword arguments with tensors ``[1, *]``.
    """
    return {
        name: value[n : n + 1] if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def train_step(row: Row, sizes: Sizes, *extensions: BackpropExtension) -> Pass:
    """Run a forward and a backward pass as users do.

    Args:
        row: The row.
        sizes: Number and length of the samples.
        extensions: What to compute; model and loss are only extended for something.

    Returns:
        What the passes leave behind.
    """
    model, lossfunc = prepared(row, sizes), nn.CrossEntropyLoss()
    calls: Counter = Counter()
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, module in model.named_modules()
    ]
    if extensions:
        model, lossfunc = extend(model), extend(lossfunc)

    batch = draw(row, sizes)
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        output = row.output(model, batch)
        if row.own_loss:
            value = output.loss
        else:
            predictions = row.predict(output)
            targets = draw_targets(batch, predictions)
            value = lossfunc(predictions.flatten(0, -2), targets.flatten())
        with backpack(*extensions) if extensions else nullcontext():
            value.backward()
    for handle in handles:  # all models of a class may share an activation
        handle.remove()
    return Pass(
        model,
        value.detach(),
        {name: param.grad for name, param in trained(model)},
        calls,
        dict(model.named_buffers()),
        torch.get_rng_state(),
        [str(warning.message) for warning in caught],
    )


def trained(model: Module) -> List[Tuple[str, nn.Parameter]]:
    """List the parameters that are trained, by name."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


# References


def backward_rows(model: Module, entries: Tensor) -> Values:
    """Differentiate each entry of a tensor by a backward pass of its own.

    Args:
        model: The model.
        entries: Tensor with F entries.

    Returns:
        Gradients ``[F, *p]`` of the parameters.
    """
    rows = defaultdict(list)
    for entry in entries.flatten():
        model.zero_grad()
        entry.backward(retain_graph=True)
        for name, param in trained(model):
            zero = torch.zeros_like(param)
            rows[name].append(zero if param.grad is None else param.grad)
    model.zero_grad()
    return {name: torch.stack(gradients) for name, gradients in rows.items()}


def loss_hessian(predictions: Tensor, targets: Tensor) -> Tensor:
    """Compute the dense Hessian of the loss with respect to F predictions.

    Args:
        predictions: Predictions ``[N, *, C]``.
        targets: Classes ``[N, *]``.

    Returns:
        Matrix ``[F, F]``.
    """
    constant = predictions.detach()

    def loss(flat: Tensor) -> Tensor:
        return cross_entropy(flat.reshape(-1, constant.shape[-1]), targets.flatten())

    return torch.autograd.functional.hessian(loss, constant.flatten())


class Layer(NamedTuple):
    """A call of a linear layer that is the only use of its weight.

    Attributes:
        features: What the weight is multiplied with, ``[R, d]`` for R positions.
        jacobian: Derivative ``[F, R, p]`` of the predictions with respect to the
            output.
        transposed: Whether the weight is stored as ``[d, p]``.
    """

    features: Tensor
    jacobian: Tensor
    transposed: bool


def shifted_calls(
    row: Row, model: Module, batch: Dict[str, Any]
) -> Tuple[Dict[str, List[Tuple[Tensor, Tensor]]], Tensor]:
    """Run the model, where zeros are added to the output of each linear layer.

    Args:
        row: The row.
        model: The model.
        batch: Keyword arguments of the model.

    Returns:
        Inputs and zeros of the calls of each layer, by its name; the predictions.
    """
    calls = defaultdict(list)

    def shift(name: str, module: Module, inputs: Tuple, output: Tensor) -> Tensor:
        zeros = torch.zeros_like(output, requires_grad=True)
        calls[name].append((inputs[0].detach(), zeros))
        return output + zeros

    handles = [
        module.register_forward_hook(partial(shift, name))
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
    ]
    predictions = row.predict(row.output(model, batch))
    for handle in handles:
        handle.remove()
    return dict(calls), predictions


def linear_layers(row: Row, sizes: Sizes) -> Tuple[Dict[str, Layer], Tensor]:
    """Find layers whose Kronecker factors have one definition.

    They are called once, on the same number of positions for each sample, and their
    weight is used nowhere else. A layer that is called on a constant, like a table of
    positions, is none of them; nor is an expert, which gets the positions it is sent.

    Args:
        row: The row.
        sizes: Number and length of the samples.

    Returns:
        The layers by name, and the Hessian of the loss.
    """
    model, batch = prepared(row, sizes), draw(row, sizes)
    calls, predictions = shifted_calls(row, model, batch)
    hessian = loss_hessian(predictions, draw_targets(batch, predictions))
    others, _ = shifted_calls(row, model, row.inputs(*sizes))
    owners = Counter(
        param for _, param in model.named_parameters(remove_duplicate=False)
    )
    single = {}
    for name, layer_calls in calls.items():
        weight = model.get_submodule(name).weight
        if len(layer_calls) > 1 or owners[weight] > 1 or "expert" in name:
            continue
        ((features, zeros),) = layer_calls
        if weight.requires_grad and not features.equal(others[name][0][0]):
            single[name] = features, zeros, weight
    places = [x for _, zeros, weight in single.values() for x in (zeros, weight)]
    rows = [
        torch.autograd.grad(entry, places, retain_graph=True)
        for entry in predictions.flatten()
        if places
    ]
    layers = {}
    for index, (name, (features, _, _)) in enumerate(single.items()):
        jacobian = torch.stack([row[2 * index] for row in rows]).flatten(1, -2)
        total = torch.stack([row[2 * index + 1] for row in rows])
        features = features.flatten(0, -2)
        transposed = isinstance(model.get_submodule(name), Conv1D)
        product = torch.einsum("frp,rd->fpd", jacobian, features)
        product = product.mT if transposed else product
        if torch.allclose(product, total, rtol=1e-6, atol=1e-12):  # no other use
            layers[name] = Layer(features, jacobian, transposed)
    return layers, hessian


# The tests


def either(part: str, extensions: Callable[[], List[BackpropExtension]]) -> Callable:
    """Make a test of the rows: it passes, or the backward pass is refused as said.

    Args:
        part: What is tested, one of ``PARTS``.
        extensions: Makes what is computed.

    Returns:
        Decorator of a test with the arguments row, sizes, and the extended pass.
    """

    def decorate(test: Callable[[Row, Sizes, Pass], None]) -> Callable:
        @pytest.mark.parametrize("sizes", SIZES, ids="N={0[0]},T={0[1]}".format)
        @pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
        def run(row: Row, sizes: Sizes, request: pytest.FixtureRequest) -> None:
            request.node.stock_model = {"row": row.id, "part": part}
            if part not in row.refused:
                test(row, sizes, train_step(row, sizes, *extensions()))
                return
            with pytest.raises(Exception) as refusal:  # noqa: B017
                train_step(row, sizes, *extensions())
            said = str(refusal.value)
            assert row.refused[part] in said, f"refused for another reason: {said}"
            request.node.stock_model["refusal"] = said

        run.__doc__ = test.__doc__
        return run

    return decorate


def test_rows_are_distinct():
    """Each row has a name of its own."""
    names = Counter(row.id for row in ROWS)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("sizes", SIZES, ids="N={0[0]},T={0[1]}".format)
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "first order" not in row.refused],
    ids=lambda row: row.id,
)
def test_samples_are_independent(row: Row, sizes: Sizes):
    """The reference is right: samples do not meet, and the loss is the shares' sum."""
    model = prepared(row, sizes)
    total = shares(row, model, sizes).sum()
    assert_close(train_step(row, sizes).value, total.detach(), "loss")
    if row.train or row.run or row.own_loss:
        return
    predictions = row.predict(row.output(model, draw(row, sizes)))
    for n, prediction in enumerate(predictions):
        alone = row.predict(row.output(model, select(draw(row, sizes), n)))
        assert_close(alone[0], prediction, f"sample {n} alone")


def first_order() -> List[BackpropExtension]:
    """Make all first-order extensions."""
    return [BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), BatchDotGrad()]


# What each one is in terms of the individual gradients [N, *p], and of which degree
FIRST_ORDER: Dict[str, Tuple[int, Callable[[Tensor], Tensor]]] = {
    "grad_batch": (1, lambda g: g),
    "batch_l2": (2, lambda g: (g**2).reshape(len(g), -1).sum(1)),
    "sum_grad_squared": (2, lambda g: (g**2).sum(0)),
    "variance": (2, lambda g: ((g - g.mean(0)) ** 2).mean(0)),
    "batch_dot": (2, lambda g: g.reshape(len(g), -1) @ g.reshape(len(g), -1).T),
}


@either("first order", first_order)
def test_first_order(row: Row, sizes: Sizes, extended: Pass):
    """Individual gradients and what follows from them."""
    model = prepared(row, sizes)
    gradients = backward_rows(model, shares(row, model, sizes))
    size = ZERO * largest(gradients)
    for name, param in trained(extended.model):
        for field, (degree, reduction) in FIRST_ORDER.items():
            assert_close(
                getattr(param, field, None),
                reduction(gradients[name]),
                f"{name}.{field}",
                size**degree,
            )


@either("side effects", first_order)
def test_side_effects(row: Row, sizes: Sizes, extended: Pass):
    """Nothing but the results tells the passes from those of plain PyTorch."""
    plain = train_step(row, sizes)

    size = ZERO * largest(plain.gradients)
    for name, gradient in plain.gradients.items():
        assert_close(extended.gradients[name], gradient, f"{name}.grad", size)
    assert_close(extended.value, plain.value, "loss")
    for name, buffer in plain.buffers.items():
        assert buffer.equal(extended.buffers[name]), f"buffer {name} has changed"
    again = sorted(extended.calls - plain.calls)
    assert again == [], f"called more often than once: {again}"
    assert extended.calls == plain.calls
    assert extended.random_state.equal(plain.random_state), "random numbers were drawn"
    assert extended.warnings == plain.warnings


@either("DiagGGNExact", lambda: [DiagGGNExact()])
def test_diag_ggn(row: Row, sizes: Sizes, extended: Pass):
    """The diagonal of Jᵀ H J, with the dense Jacobian and the dense Hessian."""
    model, batch = prepared(row, sizes), draw(row, sizes)
    predictions = row.predict(row.output(model, batch))
    hessian = loss_hessian(predictions, draw_targets(batch, predictions))
    expected = {
        name: (torch.tensordot(hessian, jacobian, 1) * jacobian).sum(0)
        for name, jacobian in backward_rows(model, predictions).items()
    }
    size = ZERO * largest(expected)  # what cancels are terms, not their roots
    for name, param in trained(extended.model):
        assert_close(getattr(param, "diag_ggn_exact", None), expected[name], name, size)


def kronecker() -> List[BackpropExtension]:
    """Make Kronecker factors, and the columns that belong to the sampled ones."""
    return [
        KFLR(weight_sharing="expand"),
        KFAC(mc_samples=MC_SAMPLES, weight_sharing="reduce"),
        SqrtGGNMC(mc_samples=MC_SAMPLES),
    ]


@either("Kronecker", kronecker)
def test_kronecker_factors(row: Row, sizes: Sizes, extended: Pass):
    """Kronecker factors of each parameter; those of linear layers by definition."""
    for name, param in trained(extended.model):
        for field in ("kflr", "kfac"):
            assert represented(getattr(param, field)) == param.numel(), (name, field)

    layers, hessian = linear_layers(row, sizes)
    for name, layer in layers.items():
        module = extended.model.get_submodule(name)
        half = torch.einsum("ef,frp->erp", hessian, layer.jacobian)
        B = torch.einsum("frp,frq->pq", layer.jacobian, half)
        A = layer.features.T @ layer.features / len(layer.features)
        weight = [A, B] if layer.transposed else [B, A]
        for index, factor in enumerate(weight):
            what = f"{name}.weight.kflr[{index}]"
            assert_close(module.weight.kflr[index], factor, what, 1e-14)
        if module.bias is None or not module.bias.requires_grad:
            continue
        assert_close(module.bias.kflr[0], B, f"{name}.bias.kflr[0]", 1e-14)
        # positions were summed already in the columns that were pulled back
        columns = module.bias.sqrt_ggn_mc.flatten(0, 1)
        assert_close(
            module.bias.kfac[0], columns.T @ columns, f"{name}.bias.kfac[0]", 1e-14
        )


def represented(factors: List[Tensor]) -> int:
    """Compute the size of what Kronecker factors stand for, with groups as blocks."""
    groups = max(len(factor) if factor.dim() == 3 else 1 for factor in factors)
    return groups * torch.Size([factor.shape[-1] for factor in factors]).numel()
