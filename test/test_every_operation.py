"""Every operation that PyTorch tests itself: right for each sample, or refused.

A row is an operation of PyTorch's own list, with operands that PyTorch draws for it.
One of these is data, with samples along one of its axes, or one of a loop's; another
one is a parameter, or the data are scaled by one before. Which entries of the results
are whose is asked by other numbers in the place of each sample.

A run takes a few of them, always the same. With ``BACKPACK_TEST_LONG=<count>``, it
takes as many sets of operands of every operation.
"""

import os
import random
import re
import warnings
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

import pytest
import torch
from cases import F64
from per_sample import REFUSALS
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from backpack import backpack, extend
from backpack.extensions import BatchGrad

pytest.importorskip("torch", minversion="2.12")  # others have other lists
pytest.importorskip("expecttest")  # which PyTorch's own tests need
invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")

LONG = int(os.environ.get("BACKPACK_TEST_LONG", "0"))
OPERANDS = min(LONG, 20) or 1  # sets of operands for each operation
FEW = 1 if LONG else 6  # one operation in so many is tested
PLACES = 12 if LONG else 4  # choices of data and parameter, for each set of operands
ENTRIES = 300  # of operands and results, at most
N = 3  # samples of a loop

LEFT_OUT = (
    # numbers lose most of their digits
    *("matrix_exp", "float", "bfloat16", "half"),
    "nn.functional.multi_head_attention_forward",
    # results differ from call to call; autograd is wrong where gradients are views
    *("linalg.lstsq", "as_strided_scatter"),
    # a result, or a sample's, depends on parameters alone
    *("native_group_norm", "triangular_solve", "nn.functional.hinge_embedding_loss"),
)
OPERATIONS = {
    f"{op.name}.{op.variant_test_name}".strip("."): op
    for op in invocations.op_db
    if op.supports_autograd and op.name not in LEFT_OUT
}


class Case(NamedTuple):
    """An operation, and what its operands are.

    Attributes:
        function: The operation.
        leaves: Its arguments, as leaves of a tree.
        spec: The tree.
        data: Which leaf is data.
        param: Which leaf is a parameter; ``None`` if the data are scaled by one.
        axis: Axis of the samples; ``None`` if there is a loop over them.
    """

    function: Callable
    leaves: List[Any]
    spec: Any
    data: int
    param: Optional[int]
    axis: Optional[int]

    def inputs(self) -> Tensor:
        """Return the model's input, with samples on axis 0."""
        x = self.leaves[self.data]
        if self.axis is None:
            return torch.stack([x, x * 0.93, x * 0.97])
        return x.movedim(self.axis, 0).contiguous()


class Model(nn.Module):
    """Calls an operation, once or for each sample."""

    def __init__(self, case: Case):
        """Make the parameter."""
        super().__init__()
        self.case = case
        if case.param is None:
            self.p = nn.Parameter(torch.ones_like(case.inputs()[0]))
        else:
            self.p = nn.Parameter(case.leaves[case.param].clone())

    def call(self, x: Tensor) -> List[Tensor]:
        """Call the operation; return results that need a gradient."""
        leaves = [y.clone() if isinstance(y, Tensor) else y for y in self.case.leaves]
        leaves[self.case.data] = x
        if self.case.param is not None:
            leaves[self.case.param] = self.p
        first, args, kwargs = tree_unflatten(leaves, self.case.spec)
        results = tree_leaves(self.case.function(first, *args, **kwargs))
        return [y for y in results if isinstance(y, Tensor) and y.requires_grad]

    def forward(self, x: Tensor) -> List[Tensor]:
        """Compute the results."""
        torch.manual_seed(0)
        if self.case.param is None:
            x = x * self.p
        if self.case.axis is not None:
            return self.call(x.movedim(0, self.case.axis))
        return [torch.stack(rows) for rows in zip(*map(self.call, x))]


def flat(results: List[Tensor]) -> Tensor:
    """Return all entries, with factors by which they differ."""
    entries = torch.cat([y.reshape(-1) for y in results])
    return entries * (1 + torch.arange(len(entries)).cos() / 2).to(entries.dtype)


def changed(x: Tensor, n: int, number: int) -> Tensor:
    """Put other numbers in the place of a sample."""
    torch.manual_seed(number)
    others = x.flatten()[torch.randperm(x.numel())][: x[n].numel()].view(x[n].shape)
    ways = x[n] * 0.93 + 1e-3 * others, others, -2 * x[n], 5 * x[n] + 1
    return x.index_copy(0, torch.tensor([n]), ways[number][None])


def owners(model: Model, x: Tensor, results: List[Tensor]) -> Optional[Tensor]:
    """Find the sample of each entry of results; ``None`` if one has none, or two.

    Where an axis holds the samples in all results, entries there have one although its
    numbers do not matter.
    """
    entries, case = flat(results), model.case
    if case.axis is None:
        return torch.cat(
            [torch.arange(N).repeat_interleave(y[0].numel()) for y in results]
        )
    theirs = torch.zeros(len(entries), len(x), dtype=torch.bool)
    for n in range(len(x)):
        for number in range(4):
            other = changed(x, n, number)
            try:
                found = model(other)
            except Exception:  # the operation does not take these
                continue
            if [y.shape for y in found] != [y.shape for y in results]:
                return None
            new = flat(found)
            theirs[:, n] |= (new != entries) & ~(new.isnan() & entries.isnan())
    if not bool(theirs.any(0).all()):  # of a sample that does not matter, who can tell
        return None
    start = 0
    for y in results:
        mine = theirs[start : start + y.numel()]
        for axis in [d for d in range(y.dim()) if y.shape[d] == len(x)]:
            own = torch.arange(len(x)).view(
                [-1 if d == axis else 1 for d in range(y.dim())]
            )
            own = nn.functional.one_hot(own.expand(y.shape).flatten(), len(x)).bool()
            if not (mine & ~own).any():
                theirs[start : start + y.numel()] = own
                break
        start += y.numel()
    if bool((theirs.sum(1) != 1).any()):
        return None
    return theirs.long().argmax(1)


def cases(op: Any) -> Iterator[Case]:
    """List choices of data and parameter among operands of an operation."""
    samples = list(op.sample_inputs("cpu", F64, requires_grad=False))
    samples = [x for x in samples if (x.kwargs.get("eps") or 0.0) >= 0]
    draw = random.Random(0)
    draw.shuffle(samples)
    used = 0
    for sample in samples:
        leaves, spec = tree_flatten((sample.input, list(sample.args), sample.kwargs))
        places = [
            i
            for i, y in enumerate(leaves)
            if isinstance(y, Tensor) and y.dtype == F64 and y.layout is torch.strided
            if 0 < y.numel() < ENTRIES
        ]
        choices: List[Tuple[int, Optional[int], Optional[int]]] = [
            (i, j, axis)
            for i in places
            for j in [None, *places]
            for axis in [None, *range(leaves[i].dim())]
            if i != j and (axis is None or 1 < leaves[i].shape[axis] < 7)
        ]
        draw.shuffle(choices)
        for choice in choices[:PLACES]:
            yield Case(op.op, leaves, spec, *choice)
        used += bool(choices)
        if used == OPERANDS:
            return


def jacobian_of(entries: Tensor, p: Tensor) -> Tensor:
    """Differentiate each entry alone."""
    rows = [
        torch.autograd.grad(y, p, retain_graph=True, materialize_grads=True)[0]
        for y in entries
    ]
    return torch.stack(rows)


def assert_right_or_refused(case: Case) -> None:
    """Assert that a case is right or refused, if the operation takes it."""
    model = Model(case)
    x = case.inputs()
    try:
        results = model(x)
        entries = flat(results)
        same = torch.equal(flat(model(x)), entries)
        jacobian = jacobian_of(entries, model.p) if len(entries) < ENTRIES else None
    except Exception:  # the operation does not take this, or has no derivative
        return
    if not same or jacobian is None or not (jacobian.sum() + entries.sum()).isfinite():
        return
    own = owners(model, x, results)
    each = 2 * entries.detach().view(-1, *[1] * model.p.dim()) * jacobian
    model = extend(Model(case))
    found = model(x)
    assert all(map(torch.equal, found, results)), "the forward pass has changed"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with backpack(BatchGrad()):
                flat(found).square().sum().backward()
    except REFUSALS as error:
        assert own is None or "no input enters" in str(error), error
        return
    says = "belong to no sample|No result was computed"
    if model.p.grad is None or any(re.search(says, str(w.message)) for w in caught):
        assert own is None or not each.any()
        return
    total, size = each.sum(0), each.abs().sum() + entries.square().sum()
    rounding = 1e-12 * (1 + float(size))
    assert (model.p.grad - total).abs().max() <= rounding, "gradient"
    gradients = model.p.grad_batch
    assert (gradients.sum(0) - total).abs().max() <= rounding, "terms are missing"
    if own is not None:
        expected = torch.zeros_like(gradients).index_add(0, own, each)
        assert (gradients - expected).abs().max() <= rounding, "of samples"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(OPERATIONS)[::FEW])
def test_every_operation(name: str) -> None:
    """An operation's use of a parameter is right for each sample, or refused."""
    for case in cases(OPERATIONS[name]):
        assert_right_or_refused(case)
