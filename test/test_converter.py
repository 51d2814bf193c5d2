"""The converter: same outputs, gradients and names, and a module for every operation.

``MODELS`` is the table: a model, the shapes of its inputs, and modules that the
converted model must contain, by type.

PYTEST_DONT_REWRITE: the models' own assertions have to compile to what they are outside
of tests, as the converter recognizes them.
"""

import math
import pickle
from collections import Counter, OrderedDict
from copy import deepcopy
from typing import NamedTuple

import einops
import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

from backpack.converter.function import FunctionModule
from backpack.custom_module import graph_utils
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.graph_utils import (
    BackpackTracer,
    convert_module_to_backpack,
)
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

N = 3


class Lambda(nn.Module):
    """A model whose forward is a function of the model and the inputs."""

    def __init__(self, function, **children):
        super().__init__()
        for name, value in children.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class BasicBlock(nn.Module):
    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.downsample = None
        if stride != 1 or c_in != c_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 6, stride=2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.stem(x), inplace=True)
        x = F.max_pool2d(x, 2)
        x = self.avgpool(self.layer1(x))
        x = torch.flatten(x, 1)
        return self.fc(x)


class PreActivation(nn.Module):
    """The in-place activation changes what the shortcut adds."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.fc1(x)
        return x + self.fc2(self.relu(x))


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(True), nn.Conv2d(c, 2, 3, 1, 1))
            for c in (2, 4, 6)
        )
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        out = F.relu(self.norm(torch.cat(features, dim=1)), inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1)).view(out.size(0), -1)
        return self.fc(out)


class InvertedResidual(nn.Module):
    def __init__(self, c, expand, use_residual=True):
        super().__init__()
        self.use_residual = use_residual
        self.conv = nn.Sequential(
            *(nn.Conv2d(c, c * expand, 1, bias=False), nn.BatchNorm2d(c * expand)),
            nn.ReLU6(inplace=True),
            nn.Conv2d(c * expand, c * expand, 3, 1, 1, groups=c * expand, bias=False),
            *(nn.BatchNorm2d(c * expand), nn.Hardswish(inplace=True)),
            *(nn.Conv2d(c * expand, c, 1, bias=False), nn.BatchNorm2d(c)),
        )

    def forward(self, x):
        return x + self.conv(x) if self.use_residual else self.conv(x)


class SqueezeExcite(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Conv2d(c, 2, 1)
        self.fc2 = nn.Conv2d(2, c, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(scale))))


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            InvertedResidual(4, 2),
            SqueezeExcite(4),
            InvertedResidual(4, 2, use_residual=False),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            *(nn.Linear(16, 8), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(8, 3))
        )

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, start_dim=1))


class EncoderBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, dim)
        )

    def forward(self, x):
        y = self.norm1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(2, 4, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 4))
        self.blocks = nn.Sequential(EncoderBlock(4), EncoderBlock(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        B = x.shape[0]
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(B, -1, -1), x), dim=1)
        x = x + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(True))
        self.enc2 = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(True))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.dec = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        skip = self.enc1(x)
        x = self.up(self.enc2(self.pool(skip)))
        x = F.pad(x, [0, skip.shape[-1] - x.shape[-1], 0, 0])
        x = F.relu(self.dec(torch.cat([skip, x], dim=1)))
        y = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="nearest")
        return self.out(torch.cat([F.pad(x, (1, 1))[..., 1:-1], y[:, :2]], dim=1))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True, **options)
        self.fc = nn.Linear(10 if options.get("bidirectional") else 5, 3)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


class LastState(Recurrent):
    def forward(self, x):
        out, (h, c) = self.rnn(x)
        return self.fc(h[-1] + c[0] + out[:, 0, :])


class InitialState(Recurrent):
    def forward(self, x):
        h = torch.zeros(2, x.size(0), 5, dtype=x.dtype)
        out, _ = self.rnn(x, (h, h + 1.0))
        return self.fc(out[:, -1, :])


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(4, 5, num_layers=3, nonlinearity="relu", bias=False)
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


class FunctionalMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
        self.bias = nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        x = torch.relu(self.fc[0](x)) * 2
        x = F.leaky_relu(self.fc[1](x), 0.2).add(x)
        x = self.fc[2](x).sigmoid().mul(0.5)
        x = torch.add(torch.tanh(self.fc[3](x)), x)
        x = F.gelu(self.fc[4](x), approximate="tanh") / 2.0
        x = F.elu(self.fc[5](x), alpha=0.5, inplace=True) - x
        x = -F.softplus(self.fc[6](x), beta=2)
        x = F.silu(self.fc[7](x)).relu_()
        x = torch.mul(F.hardtanh(self.fc[8](x), -0.5, 0.5), 1.5)
        x = 0.1 + x.tanh() + self.bias[0]
        return F.log_softmax(x, dim=1)


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 12)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x):
        a, b = self.fc1(x).chunk(2, dim=-1)
        c, d, e = torch.split(a * torch.sigmoid(b), [1, 2, 3], dim=1)
        top, _ = torch.cat([e, d, c], dim=1).sort(dim=1)
        values, indices = top.topk(2, dim=1)
        return self.fc2(top) + values.sum(1, keepdim=True) + indices[:, :1]


class Attention(nn.Module):
    """Masked, written by hand; the heads are moved to the front."""

    def __init__(self, dim=4, heads=2, length=6):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
        self.register_buffer("mask", mask)
        self.register_buffer("transient", torch.ones(1), persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        assert C % self.heads == 0, "head size"
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = F.dropout(F.softmax(att, dim=-1), 0.0, self.training)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y) * self.transient


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(6, 4)
        self.attention = Attention()
        self.ln = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        t = x.shape[1]
        assert t <= 6, f"too long: {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=x.device)
        x = x + self.wpe(pos)
        x = x + self.attention(self.ln(x))
        return self.head(x[:, [-1], :]).squeeze(1)


class DropPath(nn.Module):
    """The forward branches on the mode."""

    def forward(self, x):
        if not self.training:
            return x
        return x * 0.5


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x) * 2


class RunningMean(nn.Module):
    """The forward changes a buffer in place."""

    def __init__(self, trace_time):
        super().__init__()
        self.trace_time = trace_time
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.trace_time:
            self.mean.mul_(0.5)
        self.mean.add_(x.detach().mean(0))
        return x - self.mean


class Stateful(nn.Module):
    """The forward stores something."""

    def forward(self, x):
        self.last = torch.tanh(x)
        return self.last


class KeywordArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bilinear = nn.Bilinear(4, 4, 3)

    def forward(self, x, mask=None, *, scale=2.0, flip=False):
        y = F.softmax(input=self.fc(input=x), dim=1)
        if mask is not None:
            y = y * mask
        if flip:
            y = -y
        return self.bilinear(input2=torch.add(input=x, other=y), input1=y * scale)


class WeightStandardizedLinear(nn.Linear):
    def forward(self, x):
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight, self.bias)


class PlainSubclass(nn.Linear):
    pass


class MadeInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return nn.Softmax(dim=1)(nn.ReLU(inplace=True)(self.fc(x)))


def relu_twice():
    relu, drop = nn.ReLU(), nn.Dropout(0.0)
    return nn.Sequential(
        *(nn.Linear(4, 4), relu, drop, nn.Linear(4, 4), relu, drop, nn.Linear(4, 3))
    )


def shared_layer():
    fc = nn.Linear(4, 4)
    return nn.Sequential(OrderedDict(a=fc, relu=nn.ReLU(), b=fc))


def batch_size_of_input(self, x):
    batch_size, *_ = x.shape[0], None
    return self.fc(F.relu(self.conv(x)).view(batch_size, -1))


def inplace_methods(self, x):
    y = self.fc(x)
    y.add_(1.0).mul_(2.0)
    y *= x
    y[:, 0] = 0.5
    y.clamp_(min=-1.0).masked_fill_(y > 0.9, 0.3)
    z = y.view(-1)
    z.fill_(0.1) if False else z.sub_(0.2)
    return z.view(x.shape[0], 4).exp_()


def inplace_numbers(self, x):
    n = x.shape[0]
    m = n
    m += 1
    return self.fc(x) * m / n


def keyword_calls(self, x):
    y = self.relu(input=self.fc(input=x))
    return torch.reshape(input=y, shape=(x.shape[0], 2, 2)) + y.view(3, -1)[:, :2, None]


def einops_calls(self, x):
    y = einops.rearrange(self.conv(x), "n c (h p) w -> n c p (h w)", p=2)
    return einops.reduce(y, "n c p t -> n c", "mean")


def shared_bias(self, x):
    bias = self.table[self.index].permute(1, 0)
    return self.fc(x + bias[:, 0]) * (bias[0, 0] + 1.0)


class Case(NamedTuple):
    """A model, the shape of its input, and modules it is converted to."""

    model: object
    shape: tuple
    contains: dict
    renamed: bool = False
    train: bool = True
    pickles: bool = True
    checks: bool = False  # arguments are refused, or names need to be kept


IMAGE, VECTOR, SEQUENCE = (N, 2, 8, 8), (N, 4), (N, 6, 4)
MODELS = {
    "resnet": Case(ResNet, IMAGE, {SumModule: 2, nn.ReLU: 5, nn.Flatten: 1}),
    "preactivation": Case(PreActivation, VECTOR, {SumModule: 1, FunctionModule: 0}),
    "densenet": Case(DenseNet, IMAGE, {nn.Flatten: 1, FunctionModule: 4}),
    "mobilenet": Case(MobileNet, IMAGE, {nn.Hardsigmoid: 1, SumModule: 1}),
    "vgg": Case(VGG, IMAGE, {nn.Flatten: 1, FunctionModule: 0}),
    "vit": Case(
        ViT,
        IMAGE,
        {
            nn.MultiheadAttention: 2,
            ReduceTuple: 2,
            SumModule: 4,
            Permute: 1,
            Slicing: 1,
            FunctionModule: 2,
        },
    ),
    "unet": Case(UNet, IMAGE, {nn.Upsample: 1, nn.AvgPool2d: 1, Pad: 1}),
    "lstm": Case(
        lambda: Recurrent(nn.LSTM, num_layers=2), SEQUENCE, {nn.LSTM: 2}, True
    ),
    "rnn-dropout": Case(
        lambda: Recurrent(nn.RNN, num_layers=3, dropout=0.4),
        SEQUENCE,
        {nn.RNN: 3, nn.Dropout: 2, ReduceTuple: 3, Slicing: 1, FunctionModule: 0},
        True,
        train=False,
    ),
    "rnn-sequence-first": Case(SequenceFirst, (6, N, 4), {nn.RNN: 3}, True),
    "lstm-single": Case(lambda: Recurrent(nn.LSTM), SEQUENCE, {nn.LSTM: 1}),
    "lstm-bidirectional": Case(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        SEQUENCE,
        {nn.LSTM: 1},
    ),
    "lstm-last-state": Case(
        lambda: LastState(nn.LSTM, num_layers=2), SEQUENCE, {nn.LSTM: 1, ReduceTuple: 4}
    ),
    "lstm-initial-state": Case(
        lambda: InitialState(nn.LSTM, num_layers=2), SEQUENCE, {nn.LSTM: 1}
    ),
    "gru": Case(lambda: Recurrent(nn.GRU, num_layers=2), SEQUENCE, {nn.GRU: 1}),
    "functional": Case(
        FunctionalMLP,
        VECTOR,
        {
            nn.ReLU: 2,
            nn.LeakyReLU: 1,
            nn.Sigmoid: 1,
            nn.Tanh: 2,
            nn.GELU: 1,
            nn.ELU: 1,
            nn.Softplus: 1,
            nn.SiLU: 1,
            nn.Hardtanh: 1,
            nn.LogSoftmax: 1,
            SumModule: 2,
            ScaleModule: 5,
            FunctionModule: 3,
        },
    ),
    "split": Case(Split, VECTOR, {SumModule: 2, ReduceTuple: 2}),
    "attention": Case(Attention, SEQUENCE, {nn.Softmax: 1, nn.Dropout: 1}),
    "gpt": Case(GPT, SEQUENCE, {nn.Embedding: 1, SumModule: 2}),
    "reused": Case(relu_twice, VECTOR, {nn.ReLU: 2, nn.Dropout: 2}),
    "shared": Case(shared_layer, VECTOR, {nn.Linear: 1}, checks=True),
    "parallel": Case(
        lambda: nn.Sequential(
            Parallel(nn.Linear(4, 4), nn.Identity()), nn.Linear(4, 3)
        ),
        VECTOR,
        {SumModule: 1, nn.Linear: 2},
    ),
    "keywords": Case(
        KeywordArguments, VECTOR, {nn.Bilinear: 1, SumModule: 1}, checks=True
    ),
    "mode": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), DropPath()), VECTOR, {DropPath: 1}
    ),
    "data-dependent": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), DataDependent(), nn.ReLU(True)),
        VECTOR,
        {DataDependent: 1, nn.ReLU: 1},
    ),
    "running-mean": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), RunningMean(False)),
        VECTOR,
        {RunningMean: 1},
    ),
    "running-mean-eager": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), RunningMean(True)),
        VECTOR,
        {RunningMean: 1},
    ),
    "stateful": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), Stateful()), VECTOR, {Stateful: 1}
    ),
    "weight-standardized": Case(
        lambda: nn.Sequential(WeightStandardizedLinear(4, 3)),
        VECTOR,
        {FunctionModule: 1},
    ),
    "subclass": Case(
        lambda: nn.Sequential(PlainSubclass(4, 3)), VECTOR, {PlainSubclass: 1}
    ),
    "parametrized": Case(
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()
        ),
        VECTOR,
        {nn.Tanh: 1, FunctionModule: 0},
        pickles=False,  # PyTorch refuses
    ),
    "made-in-forward": Case(MadeInForward, VECTOR, {nn.ReLU: 1, nn.Softmax: 1}),
    "unused-parameters": Case(
        lambda: Lambda(
            lambda self, x: self.fc(x),
            fc=nn.Linear(4, 3),
            head=nn.Linear(3, 2),
            extra=nn.Parameter(torch.ones(2)),
            buffer=torch.ones(3),
        ),
        VECTOR,
        {nn.Linear: 1},
        checks=True,
    ),
    "view-of-input-batch": Case(
        lambda: Lambda(
            batch_size_of_input, conv=nn.Conv2d(2, 2, 3), fc=nn.Linear(72, 3)
        ),
        IMAGE,
        {nn.Flatten: 1, FunctionModule: 0},
    ),
    "inplace": Case(
        lambda: Lambda(inplace_methods, fc=nn.Linear(4, 4)), VECTOR, {nn.Linear: 1}
    ),
    "inplace-numbers": Case(
        lambda: Lambda(inplace_numbers, fc=nn.Linear(4, 4)), VECTOR, {nn.Linear: 1}
    ),
    "inplace-keywords": Case(
        lambda: Lambda(keyword_calls, fc=nn.Linear(4, 4), relu=nn.ReLU(inplace=True)),
        VECTOR,
        {nn.ReLU: 1, FunctionModule: 3, SumModule: 1},
    ),
    "einops": Case(
        lambda: Lambda(einops_calls, conv=nn.Conv2d(2, 2, 3, padding=1)),
        IMAGE,
        {FunctionModule: 2},
    ),
    "shared-bias": Case(
        lambda: Lambda(
            shared_bias,
            table=nn.Parameter(torch.randn(5, 4)),
            index=torch.tensor([0, 3]),
            fc=nn.Linear(4, 3),
        ),
        VECTOR,
        {nn.Linear: 1},
    ),
    "transformer-layer": Case(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            nn.Linear(4, 3),
        ),
        SEQUENCE,
        {nn.TransformerEncoderLayer: 1},
    ),
    "one-stacked-layer": Case(
        lambda: nn.Sequential(nn.LSTM(4, 5, 2), ReduceTuple()),
        SEQUENCE,
        {nn.LSTM: 2},
        renamed=True,
    ),
    "one-layer": Case(lambda: nn.Linear(4, 3), VECTOR, {nn.Linear: 1}, renamed=True),
}


def build(case):
    """Make model and input.

    Args:
        case: Row of the table.

    Returns:
        Model and input in double precision.
    """
    torch.manual_seed(0)
    model = case.model().double()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model, torch.randn(case.shape, dtype=torch.float64)


def check_same(model, converted, x, renamed=False):
    """Assert that two models have the same outputs, gradients and parameter names.

    Args:
        model: Original model. It is copied, as the forward may change buffers.
        converted: Converted model.
        x: Input.
        renamed: Whether parameters have other names. Default: ``False``.
    """
    outputs, gradients = [], []
    for m in (deepcopy(model), deepcopy(converted)):
        inputs = x.clone().requires_grad_()
        # A view, as models may change their input in place
        output = m(inputs * 1.0)
        cotangent = torch.linspace(-1.0, 1.0, output.numel()).double()
        output.backward(cotangent.view_as(output))
        outputs.append(output)
        gradient = {n: p.grad for n, p in m.named_parameters()}
        gradients.append({"input": inputs.grad, **gradient})
    assert torch.allclose(*outputs, rtol=1e-12, atol=1e-12)
    expected, got = gradients
    if renamed:
        expected = {i: g for i, g in enumerate(expected.values())}
        got = {i: g for i, g in enumerate(got.values())}
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        if gradient is None or got[name] is None:
            assert gradient is None and got[name] is None, name
        else:
            assert torch.allclose(gradient, got[name], rtol=1e-10, atol=1e-12), name


@pytest.fixture(params=MODELS.values(), ids=MODELS, name="case")
def _case(request):
    return request.param


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_same_model(case, train):
    """Outputs, gradients, names; also in the other mode, and of copies."""
    model, x = build(case)
    model.train(train)
    state = deepcopy(model.state_dict())
    attributes = {m: set(m.__dict__) for m in model.modules()}
    converted = convert_module_to_backpack(model, debug=False)

    assert isinstance(converted, GraphModule) and converted.training == train
    assert attributes == {m: set(m.__dict__) for m in model.modules()}
    assert all(m.training is train for m in model.modules())
    assert {m.training for m in converted.modules()} == {train}
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    if not case.renamed:
        assert converted.state_dict().keys() == state.keys()
    assert {*converted.parameters()} == {*model.parameters()}

    for mode in (train, not train):
        if case.train or not mode:
            model.train(mode)
            converted.train(mode)
            check_same(model, converted, x, case.renamed)
            if case.pickles and mode == train:
                copied = pickle.loads(pickle.dumps(converted))
                check_same(model, copied, x, case.renamed)


def test_only_modules(case):
    """A module stands for every operation, none works in place."""
    converted = convert_module_to_backpack(build(case)[0], debug=False)
    modules = [n.target for n in converted.graph.nodes if n.op == "call_module"]
    assert {n.op for n in converted.graph.nodes} <= {
        *("placeholder", "get_attr", "call_module", "output"),
        *(("call_function",) if case.checks else ()),
    }
    assert not any(getattr(m, "inplace", False) for m in converted.modules())
    found = Counter(type(converted.get_submodule(target)) for target in {*modules})
    for kind, number in case.contains.items():
        assert found[kind] == number, (kind, converted)
    for target, number in Counter(modules).items():
        layer = converted.get_submodule(target)
        assert number == 1 or any(True for _ in layer.parameters())


def test_layers_are_shared_and_unchanged():
    """Layers are those of the model, whose in-place activations stay in place."""
    model, _ = build(MODELS["resnet"])
    converted = convert_module_to_backpack(model, debug=False)
    assert converted.get_submodule("layer1.1.conv2") is model.layer1[1].conv2
    assert model.layer1[0].relu.inplace
    assert [*converted.state_dict()] and isinstance(model.layer1, nn.Sequential)


@pytest.mark.parametrize("train", [True, False])
def test_layer_alone(train):
    """A layer with several inputs, or a tuple as output, can be converted."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, N, 4)
    attention = nn.MultiheadAttention(4, 2).train(train)
    converted = convert_module_to_backpack(attention, debug=False)
    assert torch.equal(converted(q, k, v)[0], attention(q, k, v)[0])
    rnn = nn.Sequential(nn.RNN(4, 5, num_layers=2)).train(train)
    converted = convert_module_to_backpack(rnn, debug=False)
    # Both elements of the tuple are returned, and that takes the whole layer
    assert all(torch.equal(a, b) for a, b in zip(converted(q), rnn(q)))
    assert converted.training == train


def test_state_dict_loads():
    """A converted model loads the state of the original one, and gives it back."""
    case = MODELS["vit"]
    model, x = build(case)
    converted = deepcopy(convert_module_to_backpack(model, debug=False))
    for value in model.state_dict().values():
        value.mul_(1.1)
    converted.load_state_dict(model.state_dict())
    check_same(model, converted, x)


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt", "keywords", "split"])
def test_convert_twice(name):
    """A converted model can be converted."""
    model, x = build(MODELS[name])
    converted = convert_module_to_backpack(model, debug=False)
    check_same(model, convert_module_to_backpack(converted, debug=False), x)


@pytest.mark.parametrize("number", [None, 3.0])
def test_keyword_arguments(number):
    """Numbers can be passed, other arguments only with the value they were fixed to."""
    model, x = build(MODELS["keywords"])
    converted = convert_module_to_backpack(model, debug=False)
    for m in (converted, deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        kwargs = {} if number is None else {"scale": number}
        assert torch.equal(m(x, mask=None, **kwargs), model(x, **kwargs))
        with pytest.raises(ValueError, match="mask=None"):
            m(x, torch.ones(1))
        with pytest.raises(ValueError, match="flip=False"):
            m(x, flip=True)


def test_stacked_names():
    """Parameters of a split layer are the original ones, under documented names."""
    model, _ = build(MODELS["rnn-dropout"])
    converted = convert_module_to_backpack(model, debug=False)
    for layer in range(3):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            new = converted.get_parameter(f"rnn.lstm_{layer}.{kind}_l0")
            assert new is getattr(model.rnn, f"{kind}_l{layer}")
    assert [d.p for d in converted.modules() if type(d) is nn.Dropout] == [0.4, 0.4]


def dropped(model, x):
    """Fraction of zeros."""
    return (model(x) == 0).double().mean().item()


DROPOUTS = {
    "module": lambda self, x: self.drop(x),
    "functional": lambda self, x: F.dropout(x, 0.5, self.training),
    "keyword": lambda self, x: F.dropout(x, p=0.5, training=self.training),
    "torch": lambda self, x: torch.dropout(x, 0.5, self.training),
    "channels": lambda self, x: F.dropout2d(x[:, :, None, None], 0.5, self.training),
    "generic": lambda self, x: torch.feature_dropout(x, 0.5, self.training),
    "of-parameter": lambda self, x: x * F.dropout(self.one, 0.5, self.training),
    "always": lambda self, x: F.dropout(x, 0.5),
    "always-made-in-forward": lambda self, x: nn.Dropout(0.5)(x),
    "never": lambda self, x: F.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_dropout_follows_mode(name, train):
    """Dropout depends on the mode if it did before, whenever it was converted."""
    torch.manual_seed(0)
    model = Lambda(DROPOUTS[name], drop=nn.Dropout(0.5), one=torch.ones(4, 50))
    x = torch.ones(4, 50)
    converted = convert_module_to_backpack(model.train(train), debug=False)
    active = {True: name != "never", False: name.startswith("always")}
    for mode in (train, not train):
        assert (dropped(model.train(mode), x) > 0.2) == active[mode]
        assert (dropped(converted.train(mode), x) > 0.2) == active[mode]


def test_random_numbers_are_drawn_in_every_call():
    """What a forward draws is no constant."""
    model = Lambda(lambda self, x: x + torch.randn(4) * torch.rand_like(x))
    converted = convert_module_to_backpack(model, debug=False)
    x = torch.zeros(N, 4)
    assert not torch.equal(converted(x), converted(x))
    for m in (model, converted):
        torch.manual_seed(1)
        m.result = m(x)
    assert torch.equal(model.result, converted.result)


def add_to_view(self, x):
    y = self.fc(x)
    y[:, 0].add_(1.0)
    return y


def loop_over_tensor(self, x):
    return sum(row for row in self.fc(x))


REFUSED = {
    "control-flow": (DataDependent, "DataDependent.*control flow"),
    "loop": (lambda: Lambda(loop_over_tensor, fc=nn.Linear(4, 4)), "Lambda.*iterated"),
    "view": (lambda: Lambda(add_to_view, fc=nn.Linear(4, 4)), "view"),
    "buffer": (lambda: RunningMean(False), "changes its mean in place"),
    "buffer-first": (lambda: RunningMean(True), "changes its mean in place"),
    "layer-made-in-forward": (
        lambda: Lambda(lambda self, x: nn.Linear(4, 4)(x)),
        "Lambda.*not a member",
    ),
}


@pytest.mark.parametrize("make, match", REFUSED.values(), ids=REFUSED)
def test_refused(make, match):
    """What cannot be converted is an error that names the model and the reason."""
    model = make()
    state = deepcopy(model.state_dict())
    with pytest.raises(NotImplementedError, match=match):
        convert_module_to_backpack(model, debug=False)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training is True


WARNED = {"mode": (DropPath, "training mode"), "state": (Stateful, "last")}


@pytest.mark.parametrize("make, match", WARNED.values(), ids=WARNED)
def test_warned(make, match):
    """What gets lost, as the model itself cannot be kept whole, is told."""
    model = make()
    with pytest.warns(UserWarning, match=match):
        converted = convert_module_to_backpack(model, debug=False)
    x = torch.randn(N, 4)
    assert torch.equal(converted(x), model(x))


LEAVES = {
    "layer": (nn.Linear(1, 1), True),
    "subclass": (PlainSubclass(1, 1), True),
    "own-forward": (WeightStandardizedLinear(1, 1), False),
    "sequential": (nn.Sequential(), False),
    "parallel": (Parallel(nn.Identity()), False),
    "branch": (Parallel(nn.Identity()).branch, False),
    "sum": (SumModule(), True),
    "reduce-tuple": (ReduceTuple(), True),
    "function": (FunctionModule(None), True),
    "model": (PreActivation(), False),
}


@pytest.mark.parametrize("module, leaf", LEAVES.values(), ids=LEAVES)
def test_leaf_modules(module, leaf):
    """Layers and custom operations are recorded, all else is traced through."""
    assert BackpackTracer().is_leaf_module(module, "name") is leaf


TRANSFORMS = {
    "flatten": (lambda self, x: x.flatten(1), nn.Flatten),
    "get_item": (lambda self, x: x[:, 1:], Slicing),
    "permute": (lambda self, x: torch.permute(x, (0, 2, 1)), Permute),
    "transpose": (lambda self, x: x.swapaxes(2, 1), Permute),
    "add": (lambda self, x: torch.add(x, x), SumModule),
    "mul": (lambda self, x: 3 * x, ScaleModule),
    "lstm_rnn": (lambda self, x: self.rnn(x)[0], nn.RNN),
}
TRANSFORM_NAMES = {"add": "add_to_sum_module", "mul": "mul_to_scale_module"}
TRANSFORM_NAMES["lstm_rnn"] = "lstm_rnn"


@pytest.mark.parametrize("name", TRANSFORMS)
def test_single_transformations(name, capsys):
    """Every transformation works on its own, and prints what it does."""
    function, kind = TRANSFORMS[name]
    model = Lambda(function, rnn=nn.RNN(4, 4, num_layers=2))
    transform_name = TRANSFORM_NAMES.get(name, f"{name}_to_module")
    transform = getattr(graph_utils, f"_transform_{transform_name}")
    transformed = transform(model, True)
    assert kind.__name__ in capsys.readouterr().out
    assert any(type(module) is kind for module in transformed.children()) or (
        name == "lstm_rnn" and type(transformed.rnn.lstm_1) is kind
    )
    x = torch.randn(N, 5, 4)
    assert torch.equal(transformed(x), model(x))


SPELLINGS = {
    nn.Flatten: [
        lambda x: torch.flatten(x, 1),
        lambda x: torch.flatten(x, start_dim=1),
        lambda x: x.flatten(start_dim=-2),
        lambda x: x.view(x.shape[0], -1),
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.size()[0], -1),
        lambda x: x.reshape((x.shape[0], -1)),
        lambda x: torch.reshape(x, (x.shape[0], -1)),
    ],
    Permute: [
        lambda x: x.permute(0, 2, 1),
        lambda x: x.permute((0, 2, 1)),
        lambda x: x.permute(dims=(0, -1, -2)),
        lambda x: torch.permute(x, [0, 2, 1]),
        lambda x: x.transpose(1, 2),
        lambda x: torch.transpose(x, dim0=2, dim1=1),
        lambda x: torch.swapaxes(x, 1, 2),
        lambda x: x.swapdims(1, 2),
    ],
    Slicing: [
        lambda x: x[:, 0],
        lambda x: x[:, -1, 1:3],
        lambda x: x[:, ::2],
    ],
    SumModule: [
        lambda x: x + x.sin(),
        lambda x: x.sin().add(x),
        lambda x: torch.add(x, other=x.sin()),
        lambda x: x.sin().add_(x),
    ],
    ScaleModule: [
        lambda x: 2 * x,
        lambda x: x * 0.3,
        lambda x: x.mul(0.3),
        lambda x: torch.mul(x, 0.3),
        lambda x: x.sin().mul_(0.3),
        lambda x: x / 3,
        lambda x: x.div(4.0),
        lambda x: -x,
    ],
    nn.ReLU: [
        lambda x: F.relu(x),
        lambda x: torch.relu(x),
        lambda x: x.relu(),
        lambda x: F.relu(x.sin(), inplace=True),
        lambda x: F.relu(x.sin(), True),
        lambda x: F.relu_(x.sin()),
        lambda x: torch.relu_(x.sin()),
        lambda x: x.sin().relu_(),
    ],
    nn.Softmax: [
        lambda x: x.softmax(-1),
        lambda x: torch.softmax(x, dim=1),
        lambda x: F.softmax(x, 2),
    ],
    nn.MaxPool1d: [
        lambda x: F.max_pool1d(x, 2),
        lambda x: torch.max_pool1d(x, 2, stride=1),
    ],
    nn.AvgPool1d: [lambda x: F.avg_pool1d(x, 2, padding=1)],
    nn.AdaptiveAvgPool1d: [lambda x: F.adaptive_avg_pool1d(x, 2)],
    Pad: [lambda x: F.pad(x, (1, 2)), lambda x: F.pad(x, [0, 1], value=2.0)],
    FunctionModule: [
        lambda x: x.flatten(),
        lambda x: x.view(-1, 2),
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(-1, -2),
        lambda x: x.permute(1, 0, 2),
        lambda x: x.mT,
        lambda x: x[1:],
        lambda x: x[0],
        lambda x: x[..., None],
        lambda x: x[:, torch.tensor([0, 1])],
        lambda x: x[x > 0],
        lambda x: x + 1.0,
        lambda x: torch.add(x, x, alpha=2),
        lambda x: x * x,
        lambda x: 1.0 / x,
        lambda x: torch.div(x, 2.0, rounding_mode="floor"),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.softmax(-1, torch.float32),
        lambda x: x.squeeze(1).unsqueeze(0),
        lambda x: x.mean((1, 2)),
        lambda x: torch.einsum("nij,nkj->nik", x, x),
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda x: x.new_zeros(x.shape[0], 2) + x.sum(),
        lambda x: x.max(dim=1)[0],
        lambda x: x.max(dim=1).values,
        lambda x: F.max_pool1d(x, 2, return_indices=True)[0],
        lambda x: torch.stack(x.unbind(1)[:2], dim=1),
        lambda x: x**2,
        lambda x: x - x.mean(),
        lambda x: x @ x.new_ones(x.size(-1), 2),
        lambda x: torch.logsumexp(x, dim=[1, 2]),
    ],
}


@pytest.mark.parametrize(
    "kind, function",
    [(kind, function) for kind, rows in SPELLINGS.items() for function in rows],
    ids=[
        f"{k.__name__}-{i}" for k, rows in SPELLINGS.items() for i in range(len(rows))
    ],
)
def test_spellings(kind, function):
    """All ways to write an operation lead to the same module."""
    torch.manual_seed(0)
    model = Lambda(lambda self, x: function(self.first(x)), first=nn.Tanh())
    converted = convert_module_to_backpack(model, debug=False)
    assert kind in {type(module) for module in converted.children()}, converted
    check_same(model, converted, torch.randn(N, 4, 4, dtype=torch.float64))


def test_transform_inplace_outside_of_a_graph():
    """Modules are switched, with or without their children."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(inplace=True))
    graph_utils._transform_inplace_to_normal(model, False, initialize_recursion=False)
    assert all(module.inplace for module in model)
    graph_utils._transform_inplace_to_normal(model, False)
    assert not any(module.inplace for module in model)


def test_check_backpack_compatible():
    """What is no module is noticed."""
    graph_module = torch.fx.symbolic_trace(Lambda(lambda self, x: x.sin()))
    with pytest.raises(NotImplementedError, match="sin"):
        graph_utils._check_backpack_compatible(graph_module, False)


def test_recurrent_helpers():
    """Options of a recurrent layer, and its single layers in one module."""
    lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True).eval()
    assert graph_utils._rnn_hyperparams(lstm) == (4, 5, 0.5, True)
    split = graph_utils._make_rnn_backpack(lstm)
    x = torch.randn(N, 6, 4)
    assert torch.allclose(split(x)[0], lstm(x)[0])
    assert {*split.parameters()} == {*lstm.parameters()}
