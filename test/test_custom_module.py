"""Modules that stand for an operation: values, derivatives, copies, and refusals."""

import pickle
from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from backpack.converter.function import Call, FunctionModule, Placeholder
from backpack.core.layers import Flatten
from backpack.custom_module.branching import Parallel, SumModule, _Branch
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

MULTIPLY = Call("mul", (Placeholder(0), Call(torch.exp, (Placeholder(1),), {})), {})
POOL = Call(F.max_pool2d, (Placeholder(0), 2), {"stride": None})
DROP = Call(F.dropout, (Placeholder(0),), {"training": Placeholder("training")})

# id: module, input shapes, the plain function
CASES = {
    "pad": (
        lambda: Pad([1, 2, 0, 1], value=3.0),
        [(2, 3, 4)],
        lambda x: F.pad(x, [1, 2, 0, 1], value=3.0),
    ),
    "pad-reflect": (
        lambda: Pad((1, 2), mode="reflect"),
        [(2, 3, 4)],
        lambda x: F.pad(x, (1, 2), mode="reflect"),
    ),
    "slicing": (
        lambda: Slicing((slice(None), 1, slice(0, None, 2))),
        [(2, 3, 4)],
        lambda x: x[:, 1, ::2],
    ),
    "scale": (lambda: ScaleModule(-2.5), [(2, 3)], lambda x: -2.5 * x),
    "scale-default": (ScaleModule, [(2, 3)], lambda x: x),
    "permute": (lambda: Permute(0, 2, 1), [(2, 3, 4)], lambda x: x.permute(0, 2, 1)),
    "permute-sequence": (
        lambda: Permute([0, -1, 1]),
        [(2, 3, 4)],
        lambda x: x.permute(0, 2, 1),
    ),
    "transpose": (
        lambda: Permute(1, 3, init_transpose=True),
        [(2, 3, 4, 5)],
        lambda x: x.transpose(1, 3),
    ),
    "transpose-negative": (
        lambda: Permute(-1, -2, init_transpose=True),
        [(2, 3, 4)],
        lambda x: x.transpose(-1, -2),
    ),
    "sum": (SumModule, [(2, 3), (2, 3), (2, 3)], lambda x, y, z: x + y + z),
    "sum-one": (SumModule, [(2, 3)], lambda x: x),
    "parallel": (
        lambda: Parallel(nn.Tanh(), nn.Identity()),
        [(2, 3)],
        lambda x: x.tanh() + x,
    ),
    "function": (
        lambda: FunctionModule(MULTIPLY, 2),
        [(2, 3), (2, 3)],
        lambda x, y: x * y.exp(),
    ),
    "function-local": (
        lambda: FunctionModule(POOL, 1),
        [(2, 3, 4, 4)],
        lambda x: F.max_pool2d(x, 2),
    ),
    "function-eval": (lambda: FunctionModule(DROP, 1).eval(), [(2, 3)], lambda x: x),
    "flatten": (Flatten, [(2, 3, 4)], lambda x: x.reshape(2, 12)),
}


@pytest.mark.parametrize(
    "copy",
    [lambda m: m, deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["original", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value_and_gradient(case, copy):
    """A module does what the plain function does."""
    make, shapes, function = case
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    module = copy(make())
    got, expected = module(*inputs), function(*inputs)
    assert torch.equal(got, expected)
    cotangent = torch.randn_like(expected)
    for g, e in zip(
        torch.autograd.grad(got, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
    ):
        assert torch.equal(g, e)
    assert type(module).__name__ in repr(module)


def test_reduce_tuple():
    """Elements come out as they are, also tuples."""
    value = (torch.ones(1), (torch.zeros(1), 3))
    assert ReduceTuple()(value) is value[0]
    assert pickle.loads(pickle.dumps(ReduceTuple(index=1)))(value) is value[1]


def test_function_module_follows_mode():
    """A training flag in the expression is that of the module."""
    x, module = torch.ones(200), FunctionModule(DROP, 1)
    assert (module.train()(x) == 0).any() and torch.equal(module.eval()(x), x)


def test_branches_share_input():
    """Every branch gets the same object, and the merge module gets all outputs."""

    class Remember(nn.Module):
        def forward(self, x):
            self.seen = x
            return x

    class Count(nn.Module):
        def forward(self, *outputs):
            return len(outputs)

    branches = OrderedDict((name, Remember()) for name in "abc")
    x = torch.ones(1)
    parallel = Parallel(branches, merge_module=Count())
    assert parallel(x) == 3
    assert all(branch.seen is x for branch in branches.values())
    assert [name for name, _ in _Branch(branches).named_children()] == ["a", "b", "c"]
    assert [n for n, _ in _Branch(Remember(), Remember()).named_children()] == [
        "0",
        "1",
    ]


REFUSED = {
    "scale-int": lambda: ScaleModule(2),
    "scale-tensor": lambda: ScaleModule(torch.ones(1)),
    "permute-batch": lambda: Permute(1, 0),
    "permute-batch-negative": lambda: Permute(-1, 0, 1),
    "permute-incomplete": lambda: Permute(0, 2),
    "permute-empty": lambda: Permute(),
    "transpose-batch": lambda: Permute(0, 1, init_transpose=True),
    "transpose-three": lambda: Permute(1, 2, 3, init_transpose=True),
    "transpose-batch-late": lambda: Permute(-1, -2, init_transpose=True)(
        torch.ones(2, 3)
    ),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_refused(make):
    """Wrong arguments are errors that say what came."""
    with pytest.raises(ValueError, match="expects|got"):
        make()


def test_permute_knows_order_after_forward():
    """A transposition's whole permutation is there when the derivative needs it."""
    permute = Permute(1, -1, init_transpose=True)
    permute(torch.ones(2, 3, 4, 5))
    assert permute.dims == (0, 3, 2, 1)
