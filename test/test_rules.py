"""Rules say of an operation what running it again says: where samples are."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest
import torch
import torch.nn.functional as F
from cases import F64
from per_sample import Lambda
from torch import Tensor
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pad_packed_sequence,
    pad_sequence,
)
from torch.utils._pytree import tree_leaves

from backpack import extend
from backpack.core.layout import Layout, Mixed, Placement, sample_numbers, simplify
from backpack.engine.nodes.functions import kind_of
from backpack.engine.nodes.uses import Use
from backpack.engine.samples import trials
from backpack.engine.samples.rules import quick_rule, rule
from backpack.engine.samples.trials import Performed, Trial

Called = Tuple[Callable, Tuple[Any, ...], Dict[str, Any]]
A, B, C = 6, 4, 5  # sizes of axes


def _randn(*shape: int, gradient: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=F64).requires_grad_(gradient)


def called(func: Callable, *args: Any, **kwargs: Any) -> Called:
    """Collect a call's arguments."""
    return func, args, kwargs


def each(size: int, count: Optional[int] = None) -> Tensor:
    """Draw places, each at most once."""
    return torch.randperm(size)[:count]


VF = torch._VF  # packed sequences
PACKED = torch.tensor([3, 2, 1], device="cpu")  # how many sequences have a step


def recurrent(layer: Callable, func: Callable, x: Tensor, state: Tensor) -> Called:
    """Call a recurrent layer for rows of packed sequences, which have states."""
    given = (state, state) if layer is torch.nn.LSTM else state
    weights = list(layer(C, C, dtype=F64).parameters())
    return called(func, x[:, 0], PACKED, given, weights, True, 1, 0.0, True, False)


def in_cell(cell: Callable, func: Callable, x: Tensor, *states: Tensor) -> Called:
    """Call a recurrent layer's cell for rows that have states."""
    given = states if len(states) > 1 else states[0]
    return called(func, x[:, 0], given, *cell(C, C, dtype=F64).parameters())


def sparse(values: Tensor, *size: Tuple[int, ...]) -> Called:
    """Make a sparse matrix with a value in each row, and in each column."""
    places = torch.stack([each(A), each(A)])
    return called(torch.sparse_coo_tensor, places, values, *size, check_invariants=True)


# Calls for data ``x`` and ``y [A, B, C]``
CALLS: Dict[str, Callable[[Tensor, Tensor], Called]] = {
    **{
        f"{name}-{dim}-{keep}": lambda x, y, name=name, dim=dim, keep=keep: called(
            getattr(torch, name), x, dim, keepdim=keep
        )
        for name in ("sum", "mean", "amax", "logsumexp", "var")
        for dim in (-1, 1, (0, 2))
        for keep in (False, True)
    },
    **{
        name: lambda x, y, name=name: called(getattr(torch.linalg, name), x)
        for name in ("svdvals", "qr", "pinv", "matrix_rank")
    },
    "lstsq": lambda x, y: called(torch.linalg.lstsq, x, y, driver="gels"),
    "lstsq-of-a-constant": lambda x, y: called(
        torch.linalg.lstsq, _randn(A, B, C), x, driver="gels"
    ),
    "sum-of-all": lambda x, y: called(torch.sum, x),
    "any": lambda x, y: called(torch.any, x, dim=1),
    "max": lambda x, y: called(torch.max, x, 1),
    "max-of-two": lambda x, y: called(torch.max, x, y),
    "norm": lambda x, y: called(torch.norm, x, 2, -1),
    "normalize": lambda x, y: called(F.normalize, x, dim=1),
    "topk": lambda x, y: called(torch.topk, x, 2, 1),
    "sort": lambda x, y: called(torch.sort, x, dim=1),
    "softmax": lambda x, y: called(torch.softmax, x, 1),
    "cumsum": lambda x, y: called(Tensor.cumsum, x, -2),
    "glu": lambda x, y: called(F.glu, x, 1),
    "layer-norm": lambda x, y: called(F.layer_norm, x, (B, C), _randn(B, C)),
    "linear": lambda x, y: called(F.linear, x, _randn(2, C, gradient=True), _randn(2)),
    "matmul": lambda x, y: called(torch.matmul, x, _randn(C, 3, gradient=True)),
    "matmul-batches": lambda x, y: called(torch.matmul, x, _randn(A, C, 3)),
    "matmul-right": lambda x, y: called(torch.matmul, _randn(3, B), x),
    "matmul-of-two": lambda x, y: called(torch.matmul, x, y.detach().mT),
    "bmm": lambda x, y: called(torch.bmm, x, y.detach().mT),
    "einsum-of-two": lambda x, y: called(torch.einsum, "abc,dbc->adc", x, y),
    "attention": lambda x, y: called(F.scaled_dot_product_attention, x, y, y),
    "convolution": lambda x, y: called(F.conv1d, x, _randn(2, B, 3, gradient=True)),
    "convolution-of-one": lambda x, y: called(F.conv2d, x, _randn(A, A, 2, 2)),
    "pooling": lambda x, y: called(F.avg_pool1d, x, 2),
    "group-norm": lambda x, y: called(F.group_norm, x, 2),
    "instance-norm": lambda x, y: called(F.instance_norm, x),
    "batch-norm": lambda x, y: called(F.batch_norm, x, _randn(B), torch.ones(B).to(x)),
    "batch-norm-of-the-batch": lambda x, y: called(
        F.batch_norm, x, None, None, training=True
    ),
    "interpolate": lambda x, y: called(F.interpolate, x, scale_factor=2.0),
    "pad": lambda x, y: called(F.pad, x, (1, 2)),
    "pad-with-others": lambda x, y: called(F.pad, x, (1, 1), "circular"),
    "pad-two-axes": lambda x, y: called(F.pad, x, (1, 0, 0, 1)),
    "dropout": lambda x, y: called(F.dropout1d, x, 0.5, True),
    "rounded": lambda x, y: called(
        torch.fake_quantize_per_tensor_affine, x, 1e-3, 0, -(2**12), 2**12
    ),
    "rounded-learning": lambda x, y: called(
        torch._fake_quantize_learnable_per_tensor_affine,
        *(x, _randn(1).abs() / 1e3, torch.zeros(1).to(x), -(2**12), 2**12),
    ),
    "rounded-by-channel": lambda x, y: called(
        torch.fake_quantize_per_channel_affine,
        *(x, torch.full((B,), 1e-3), torch.zeros(B).int(), 1, -(2**12), 2**12),
    ),
    "addmm": lambda x, y: called(torch.addmm, _randn(3), x[0], _randn(C, 3)),
    "einsum": lambda x, y: called(torch.einsum, "abc,cd->adb", x, _randn(C, 3)),
    "einsum-of-two-axes": lambda x, y: called(
        torch.einsum, "abc,cbd->da", x, _randn(C, B, 3)
    ),
    "tensordot": lambda x, y: called(torch.tensordot, x, _randn(C, 3), 1),
    "zeros": lambda x, y: called(Tensor.new_zeros, x, (A, 2)),
    "zeros-like": lambda x, y: called(torch.zeros_like, x),
    "filled-with-data": lambda x, y: called(
        Tensor.new_full, x, (A, 2), y.detach()[0, 0, 0]
    ),
    "view": lambda x, y: called(Tensor.view, x.contiguous(), B, A, C),
    "view-as-another-type": lambda x, y: called(Tensor.view, x.detach(), torch.float32),
    "reshape": lambda x, y: called(torch.reshape, x, (-1,)),
    "transpose": lambda x, y: called(torch.transpose, x, 0, 1),
    "flatten": lambda x, y: called(torch.flatten, x, 1),
    "expand": lambda x, y: called(Tensor.expand, x[None], 3, A, B, C),
    "chunk": lambda x, y: called(torch.chunk, x, 2),
    "split": lambda x, y: called(torch.split, x, [1, 2, 3]),
    "unbind": lambda x, y: called(torch.unbind, x, 1),
    "flip": lambda x, y: called(torch.flip, x, (0,)),
    "roll": lambda x, y: called(torch.roll, x, 2),
    "repeat": lambda x, y: called(Tensor.repeat, x, 2, 1, 1),
    "repeat-interleave": lambda x, y: called(
        torch.repeat_interleave, x, torch.randint(3, (A,)), 0
    ),
    "cat": lambda x, y: called(torch.cat, (x, y)),
    "cat-constant": lambda x, y: called(
        torch.cat, (x, _randn(2, B, C, gradient=True)), 0
    ),
    "stack": lambda x, y: called(torch.stack, [x, y, _randn(A, B, C)], 1),
    "index-add": lambda x, y: called(torch.index_add, x, 0, each(A, 3), y[:3]),
    "index-add-to-constants": lambda x, y: called(
        torch.index_add, _randn(2 * A, B, C), 0, each(2 * A, A), x
    ),
    "index-add-twice": lambda x, y: called(
        torch.index_add, _randn(3, B, C), 0, torch.randint(3, (A,)), x
    ),
    "index-add-constants": lambda x, y: called(
        torch.index_add, x, 0, each(A, 3), _randn(3, B, C)
    ),
    "index-copy": lambda x, y: called(Tensor.index_copy, x, 1, each(B, 2), y[:, :2]),
    "scatter": lambda x, y: called(
        torch.scatter, x, 1, torch.rand(A, B, C).argsort(1), y
    ),
    "scatter-number": lambda x, y: called(
        torch.scatter, x, 1, torch.randint(B, (A, 2, C)), 1.0
    ),
    "scatter-in-other-order": lambda x, y: called(
        torch.scatter, x, src=y, index=torch.randint(B, (A, 2, 3)), dim=-2
    ),
    "scatter-add": lambda x, y: called(
        torch.scatter_add, x, 2, torch.randint(C, (A, B, 3)), y
    ),
    "scatter-reduce": lambda x, y: called(
        torch.scatter_reduce, x, 0, torch.randint(A, (3, B, C)), y, "mean"
    ),
    "scatter-reduce-others-only": lambda x, y: called(
        *(torch.scatter_reduce, x, 0, each(A).view(A, 1, 1), _randn(A, 1, 1), "sum"),
        include_self=False,
    ),
    "index-put": lambda x, y: called(
        torch.index_put, x, (each(A, 3), torch.randint(B, (3,))), y[:3, 0]
    ),
    "index-put-adding": lambda x, y: called(
        torch.index_put, x, [torch.randint(A, (5,))], y[:5], True
    ),
    "index-put-mask": lambda x, y: called(
        torch.index_put, x, (torch.rand(A) < 0.5,), y[:1]
    ),
    "masked-scatter": lambda x, y: called(
        torch.masked_scatter, x, torch.rand(A, B, 1) < 0.5, y
    ),
    "pack": lambda x, y: called(
        VF._pack_padded_sequence,
        x,
        torch.tensor([4, 3, 3, 2, 1, 1], device="cpu"),
        True,
    ),
    "unpack": lambda x, y: called(VF._pad_packed_sequence, x, PACKED, True, 0.0, 4),
    "lstm": lambda x, y: recurrent(torch.nn.LSTM, VF.lstm, x, _randn(1, 3, C)),
    "gru": lambda x, y: recurrent(torch.nn.GRU, VF.gru, x, _randn(1, 3, C)),
    "rnn": lambda x, y: recurrent(torch.nn.RNN, VF.rnn_tanh, x, y[None, :3, 0]),
    "gru-cell": lambda x, y: in_cell(torch.nn.GRUCell, VF.gru_cell, x, y[:, 1]),
    "rnn-cell": lambda x, y: in_cell(
        torch.nn.RNNCell, VF.rnn_tanh_cell, x, _randn(A, C)
    ),
    "lstm-cell": lambda x, y: in_cell(
        torch.nn.LSTMCell, VF.lstm_cell, x, y[:, 0], _randn(A, C)
    ),
    "sparse": lambda x, y: sparse(x[:, 0, 0], (A, A)),
    "sparse-of-rows": lambda x, y: sparse(x[:, 0], (A, A, C)),
}


def _rows(n: int) -> Tensor:
    return torch.randint(n, (A, 1, 1))


# Sample numbers of data ``[A, B, C]``, of ``n`` samples
NUMBERS: Dict[str, Callable[[int], Tensor]] = {
    "rows": _rows,
    "rows-some-of-constants": lambda n: _rows(n).where(torch.rand(A, 1, 1) < 0.7, -1),
    "sequences": lambda n: (torch.tensor([0, 1, 2, 0, 1, 0]) % n).view(A, 1, 1),
    "along-another-axis": lambda n: torch.randint(n, (1, B, 1)),
    "along-the-last-axis": lambda n: torch.randint(n, (C,)),
    "along-two-axes": lambda n: torch.randint(n, (A, B, 1)),
    "anywhere": lambda n: torch.randint(-1, n, (A, B, C)),
    "layout": lambda n: (torch.arange(A) % n).view(A, 1, 1),
    "layout-of-neighbours": lambda n: (torch.arange(A) // (A // n)).view(A, 1, 1),
}
# Of which rules have no need, as there are none that are kept apart
NEVER = (
    "filled-with-data",
    "pad-with-others",
    "batch-norm-of-the-batch",
    "matmul-right",
    "matmul-batches",
    "max-of-two",
    "einsum-of-two",
    "convolution-of-one",
    "view-as-another-type",
    "sum-of-all",
    "scatter-reduce-others-only",
    "sparse-of-rows",
)


class Given:
    """Finds the samples of whatever consists of entries of some data."""

    def __init__(self, pairs: List[Tuple[Tensor, Tensor]], n: int):
        """Store data, and the sample numbers of its entries."""
        values = torch.cat([x.detach().flatten() for x, _ in pairs])
        numbers = torch.cat([i.expand(x.shape).flatten() for x, i in pairs])
        self.values, order = values.sort()
        self.numbers, self.n = numbers[order], n

    def of(self, x: Tensor) -> Placement:
        """Tell where the samples are."""
        if x.dtype != F64 or not x.numel():
            return None
        x = x.detach()
        place = torch.searchsorted(self.values, x.contiguous())
        place = place.clamp(max=len(self.values) - 1)
        found = self.values[place] == x
        return simplify(self.numbers[place].where(found, -1), self.n)


def compare(call: Called, given: Given) -> bool:
    """Tell whether there are rules for a call, which agree with running it again."""
    func, args, kwargs = call
    out = func(*args, **kwargs)
    outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    data = [x for x in operands if given.of(x) is not None]
    if not data:
        return False
    name = kind_of(func).name
    done = Performed(func, name, args, kwargs, outs, data)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        found = quick_rule(done, given.of)
        found = found or rule(done, Trial(done, given.of, given.n), given.of, given.n)
        expected, _ = Trial(done, given.of, given.n).find()
    for x, by_rule, by_trial in zip(outs, found or (), expected):
        if not x.is_floating_point():
            continue  # integers may be the same by chance
        assert isinstance(by_rule, Mixed) == isinstance(by_trial, Mixed), name
        if not isinstance(by_trial, Mixed):
            assert (by_rule is None) == (by_trial is None), (name, by_rule, by_trial)
        if isinstance(by_trial, (Layout, Tensor)):
            both = (by_rule, by_trial)
            one, other = (sample_numbers(p, x.shape, given.n, x.device) for p in both)
            if isinstance(by_rule, Layout):  # which says nothing of constants beside
                one = one.where(other >= 0, -1)
            assert torch.equal(one, other), (name, by_rule, by_trial)
    return found is not None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_rules_and_trials(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a rule, the operation's own results say the same."""
    monkeypatch.setattr(trials, "DRAWS", 1)  # for integers, which are not looked at
    answered = 0
    for where in NUMBERS if n > 1 else ("rows", "rows-some-of-constants"):
        for seed in range(1 + (n > 1)):
            torch.manual_seed(seed)
            x, y = _randn(A, B, C, gradient=True), _randn(A, B, C, gradient=True)
            of_x = NUMBERS[where](n)
            of_y = of_x if seed else NUMBERS["rows"](n)
            given = Given([(x, of_x), (y, of_y)], n)
            if (of_x < 0).all():
                continue
            answered += compare(CALLS[name](x, y), given)
    assert answered or name in NEVER or n == 1


def test_counts_are_not_rearranged() -> None:
    """What tells how often is no entry that is repeated."""
    counts = torch.tensor([1, 2, 0])
    out = torch.repeat_interleave(counts)
    args = torch.repeat_interleave, "repeat_interleave", (counts,), {}, [out], [counts]
    done, of = Performed(*args), lambda x: Layout(0, 1) if x is counts else None
    assert rule(done, Trial(done, of, 3), of, 3) is None


@pytest.mark.parametrize("name", ["any", "all"])
@pytest.mark.parametrize("axes", [(), (0,), (1,)])
@pytest.mark.parametrize("where", ["layout", "rows"])
def test_flags(name: str, axes: Tuple[int, ...], where: str) -> None:
    """Whether something is true for any sample is known without drawing numbers."""
    flags, numbers = torch.rand(A, B) < 0.5, NUMBERS[where](3)[..., 0]
    func, args, placement = getattr(torch, name), (flags, *axes), simplify(numbers, 3)
    done = Performed(func, name, args, {}, [func(*args)], [flags])
    of = lambda x: placement if x is flags else None  # noqa: E731
    found = quick_rule(done, of) or rule(done, Trial(done, of, 3), of, 3)
    assert isinstance(found[0], Mixed) == (axes != (1,))


def test_sizes_are_numbers_of_samples() -> None:
    """A shape that a sample says does not move entries, nor are these the sample's."""
    size, x = torch.tensor(2), _randn(A, B)
    for of_x, expected in ((Layout(0, 1), Layout(0, 1)), (None, None)):
        of = {id(size): Layout(0, 1), id(x): of_x}.get
        args = x, A, size, B // size
        data = [size] if of_x is None else [x, size]
        out = torch.reshape(x, args[1:])
        done = Performed(torch.reshape, "reshape", (x, args[1:]), {}, [out], data)
        find = lambda z: of(id(z))  # noqa: E731, B023
        found = rule(done, Trial(done, find, A), find, A)
        assert found == [expected]


def _put(h: Tensor, size: int, where: Any) -> Tensor:
    out = h.new_zeros(len(h), size, h.shape[-1])
    out[:, where] = h
    return out


def _copied(h: Tensor) -> Tensor:
    out = torch.zeros(len(h), 7, h.shape[-1], dtype=h.dtype)
    out[:, 1:6].copy_(h)
    return out


def _steps(h: Tensor) -> Tensor:
    out = h.new_zeros(len(h), 8, h.shape[-1])
    for t, x in enumerate(h.unbind(1)):
        out[:, t + 1] = x
    return out


def _routed(h: Tensor) -> Tensor:
    out = h.new_zeros(len(h), 7, h.shape[-1])
    order = h[..., 0].argsort(1)
    return out.scatter(1, order[..., None].expand_as(h), h)


def _groups(h: Tensor) -> Tensor:
    out = h.new_zeros(len(h), 7, h.shape[-1])
    for i, x in enumerate(h):  # all that each gets in this batch may be one sample's
        out[i, :5] = x
    return out


PUT = {  # where data is put, and whether what is beside belongs to the rows' samples
    "pad": (lambda h: F.pad(h, (0, 0, 1, 2)), True),
    "rows-of-a-buffer": (lambda h: _put(h, 7, slice(1, 6)), True),
    "every-other-row": (lambda h: _put(h, 10, slice(None, None, 2)), True),
    "some-rows": (lambda h: _put(h, 9, torch.tensor([0, 8, 3, 4, 1])), True),
    "copy": (_copied, True),
    "steps": (_steps, True),
    "index-add": (
        lambda h: h.new_zeros(len(h), 7, 4).index_add(1, torch.arange(5), h),
        True,
    ),
    "masked": (
        lambda h: h.new_zeros(len(h), 7, 4).masked_scatter(
            (torch.arange(7) < 5)[:, None].expand(len(h), 7, 4), h
        ),
        True,
    ),
    "sequences": (
        lambda h: pad_sequence([x[: 3 + i] for i, x in enumerate(h)], True),
        True,
    ),
    "packed": (
        lambda h: pad_packed_sequence(
            pack_padded_sequence(h, torch.tensor([5, 4, 2]), True), True
        )[0],
        True,
    ),
    "where-data-says": (_routed, False),
    "groups": (_groups, False),
    "rows-beside-all": (lambda h: F.pad(h.flatten(0, 1), (0, 0, 1, 1)), False),
}


@pytest.mark.parametrize("name", PUT)
def test_constants_beside_samples(name: str) -> None:
    """What the program puts beside samples is of those in whose rows it is."""
    put, is_known = PUT[name]
    found: List[Placement] = []
    model = Lambda(
        lambda m, x: m.b(put(m.a(x))), a=torch.nn.Linear(4, 4), b=torch.nn.Linear(4, 4)
    ).to(F64)
    use = Use.attach

    def attach(self: Use, outputs: Any) -> None:
        found.append(self.placements[0])
        use(self, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Use, "attach", attach)
        extend(model)(_randn(3, 5, 4))
    assert isinstance(found[0], Layout)
    assert isinstance(found[-1], Layout) == is_known
