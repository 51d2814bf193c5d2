"""The converter: same outputs, gradients and names, and a module for every operation.

``MODELS`` is the table: a model, the shapes of its inputs, and modules that the
converted model must contain, by type.

PYTEST_DONT_REWRITE: the models' own assertions have to compile to what they are outside
of tests, as the converter recognizes them.
"""

import math
import pickle
import warnings
from collections import Counter, OrderedDict
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import einops
import pytest
import torch
from oracle import assert_agrees, batch_ggn, individual_gradients, jacobian, parameters
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, extend
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
from backpack.extensions import (
    GGNMP,
    HMP,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
)

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


def elements_by_name(self, x):
    y = self.fc(x)
    top, ordered = torch.max(y, dim=1, keepdim=True), y.sort(1)
    singular = torch.linalg.svd(y.view(-1, 2, 2)).S
    return ordered.values + top.values * ordered[1] + singular.repeat(1, 2)


def asks_for_types(self, x, scale=2.0):
    y = self.fc(x)
    right = [
        *(isinstance(x, Tensor), torch.is_tensor(y), isinstance(y + 1, Tensor)),
        *(isinstance(y.mT, (Tensor, int)), not isinstance(F.relu(y), (tuple, list))),
        *(isinstance(x.shape[0], int), isinstance(x.size(1), int)),
        *(isinstance(x.shape, tuple), isinstance(x.size(), torch.Size)),
        *(isinstance(x.ndim, int), isinstance(x.numel(), int)),
        *(isinstance(scale, float), isinstance(self.weight, nn.Parameter)),
        *(isinstance(y.chunk(2), tuple), isinstance(self.lstm(x), tuple)),
        *(isinstance(x[:, 0], Tensor), not isinstance(x.shape[0], Tensor)),
    ]
    return y * scale if all(right) else y


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
    "asks-for-types": Case(
        lambda: Lambda(
            asks_for_types,
            fc=nn.Linear(4, 4),
            lstm=nn.LSTM(4, 2),
            weight=nn.Parameter(torch.ones(2)),
        ),
        VECTOR,
        {nn.Linear: 1},
    ),
    "elements-by-name": Case(
        lambda: Lambda(elements_by_name, fc=nn.Linear(4, 4)),
        VECTOR,
        {ReduceTuple: 2, FunctionModule: 6},
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


def of_parts(self, x):
    x = self.first(x)
    x = torch.cat(x.chunk(2, 1)[::-1], 1).tanh() + torch.cat(x.split(1, 1), 1)
    return self.last(torch.stack(x.unbind(1)[1:] + x.unbind(1)[:1], 1))


def test_parts_of_a_tensor():
    """What puts parts of a tensor together has one input, that tensor."""
    model = Lambda(of_parts, first=nn.Linear(4, 4), last=nn.Linear(4, 3)).to(
        torch.float64
    )
    x, y = torch.rand(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])

    def loss(weight):
        out = torch.func.functional_call(model, {"first.weight": weight}, (x,))
        return F.cross_entropy(out, y)

    weight = model.first.weight
    dense = torch.autograd.functional.hessian(loss, weight.detach()).reshape(16, 16)
    converted = extend(model, use_converter=True)
    assert torch.equal(converted(x), model(x))
    with backpack(DiagHessian(), HMP()):
        extend(nn.CrossEntropyLoss())(converted(x), y).backward()
    assert_agrees(weight.diag_h.flatten(), dense.diagonal(), "diagonal")
    columns = torch.eye(16, dtype=torch.float64).reshape(16, 4, 4)
    assert_agrees(weight.hmp(columns).flatten(1), dense, "products")


def all_steps(self, x):
    x = self.relu(self.relu(x)).mul_(2)
    with torch.no_grad():
        y = self.layer(x)
    return x + y


def test_debug(capsys):
    """Each step of the conversion prints what it does, if it is asked to."""
    model = Lambda(all_steps, relu=nn.ReLU(), layer=nn.Linear(4, 4))
    convert_module_to_backpack(model, debug=True)
    printed = capsys.readouterr().out
    for step in ("Converting Lambda", "not in place", "detached", "SumModule", "copy"):
        assert step in printed, step
    assert printed.splitlines()[-1].startswith("  Converted: ")


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


def in_place_under_no_grad(self, x):
    y = self.fc(x)
    with torch.no_grad():
        y.mul_(2.0)
    return y


def assigned_under_no_grad(self, x):
    y = self.fc(x)
    with torch.no_grad():
        y.view(-1)[0] = 0.0
    return y


def input_under_no_grad(self, x):
    with torch.no_grad():
        x -= 1.0
    return self.fc(x)


def autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.fc(x)


def autocast_off(self, x):
    with torch.amp.autocast("cpu", enabled=False):
        return self.fc(x)


def gradients_by_mode(self, x):
    with torch.set_grad_enabled(self.training):
        return self.fc(x)


def written_by_name(self, x):
    y = torch.empty_like(x)
    torch.mul(x, 2, out=y)
    return self.fc(y)


def frozen_for_a_while(self, x):
    y = self.fc(x)
    self.fc.weight.requires_grad_(False)
    z = self.fc(y)
    self.fc.weight.requires_grad = True
    return z


def set_data(self, x):
    y = self.fc(x)
    y.data = 2 * y
    return y


def frozen_by_attribute(self, x):
    self.fc.weight.requires_grad = False
    return self.fc(x)


def asks_for_the_type_of_a_maximum(self, x):
    y = self.fc(x).max(1)
    return y if isinstance(y, Tensor) else y[0]


def by_another_name(self, x):
    y = self.fc(x)
    z = y.mT
    z *= 2
    return y


def with_layer(function):
    """Make the maker of a model."""
    return lambda: Lambda(function, fc=nn.Linear(4, 4))


REFUSED = {
    "type-of-a-maximum": (
        with_layer(asks_for_the_type_of_a_maximum),
        "Lambda.*it asks for the type of `%max.*only a forward pass knows",
    ),
    "in-place-by-another-name": (with_layer(by_another_name), "in place.*used later"),
    "changed-without-gradient": (
        with_layer(in_place_under_no_grad),
        "Lambda.*fc is changed in place where gradients are switched off.*submodule",
    ),
    "assigned-without-gradient": (
        with_layer(assigned_under_no_grad),
        "Lambda.*changed in place where gradients are switched off.*submodule",
    ),
    "input-changed-without-gradient": (
        with_layer(input_under_no_grad),
        "Lambda.*x is changed in place where gradients are switched off.*submodule",
    ),
    "autocast": (with_layer(autocast), "Lambda.*autocast.*into a submodule"),
    "autocast-off": (with_layer(autocast_off), "Lambda.*autocast.*into a submodule"),
    "gradients-by-mode": (
        with_layer(gradients_by_mode),
        "Lambda.*set_grad_enabled.*into a submodule",
    ),
    "out": (with_layer(written_by_name), "Lambda.*`out`.*into a submodule"),
    "frozen": (with_layer(frozen_for_a_while), "Lambda.*`requires_grad_`"),
    "set-data": (with_layer(set_data), "Lambda.*`data`"),
    "frozen-attribute": (with_layer(frozen_by_attribute), "Lambda.*`requires_grad`"),
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


WARNED = {
    "mode": (DropPath, "training mode"),
    "mode-as-a-number": (
        with_layer(lambda self, x: self.fc(x) * (1 + float(self.training))),
        "training mode",
    ),
    "mode-in-a-product": (
        with_layer(lambda self, x: self.fc(x) + 2 * self.training),
        "training mode",
    ),
    "state": (Stateful, "last"),
}


@pytest.mark.parametrize("make, match", WARNED.values(), ids=WARNED)
def test_warned(make, match):
    """What gets lost, as the model itself cannot be kept whole, is told."""
    model = make()
    with pytest.warns(UserWarning, match=match):
        converted = convert_module_to_backpack(model, debug=False)
    x = torch.randn(N, 4)
    assert torch.equal(converted(x), model(x))


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity, and returns what is left, too."""

    @staticmethod
    def forward(ctx, x):
        """Round."""
        return x.round(), x - x.round()

    @staticmethod
    def backward(ctx, g, h):
        """Pass the gradient on."""
        return g + 3 * h


def places(self, x):
    """Number cells of a grid, and count what is above zero."""
    cells = (x[:, :2] * 5).long().abs() % 3
    above = (x > 0).sum(1) * 2
    return self.t(cells[:, 0] * 3 + -cells[:, 1] + 2) + above.clamp(min=1)[:, None]


# Forward passes of which the result is the same to the last digit
EXACT = {
    "function": lambda self, x: self.fc(x + Rounded.apply(self.g(x))[0]),
    "function-alone": lambda self, x: self.fc(Rounded.apply(self.g(x))[1]),
    "function-of-weights": lambda self, x: F.linear(
        x, self.fc.weight + Rounded.apply(self.fc.weight)[0], self.fc.bias
    ),
    "places": places,
    "hash": lambda self, x: self.t((x[:, 0] * 500).long() * 636413622384679300 % 12),
    "types": lambda self, x: self.fc(x) + self.t(2 * (x[:, 0] > 0)),
    "quotient": lambda self, x: self.fc((x * 100).round() / 49).div(7),
    "cells": lambda self, x: self.fc(x) + ((x * 100).round() * 41 / 41).floor(),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    """Functions with a backward of their own, integers and quotients stay the same."""
    torch.manual_seed(0)
    linear = {
        name: nn.Linear(4, size) for name, size in (("fc", 4), ("g", 4), ("h", 3))
    }
    layers = {**linear, "t": nn.Embedding(12, 4)}
    model = Lambda(lambda self, x: self.h(EXACT[name](self, x)), **layers)
    x = torch.randn(N, 4)
    converted = convert_module_to_backpack(model, debug=False)
    check_same_outputs(model, converted, x)
    check_same_outputs(model, deepcopy(converted), x)
    check_quantities(model.double(), x.double())


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, x, y: 2 * y),
    "forward-pre": lambda m: m.register_forward_pre_hook(lambda m, x: (3 * x[0],)),
    "backward": lambda m: m.register_full_backward_hook(lambda m, x, y: (2 * x[0],)),
    "backward-pre": lambda m: m.register_full_backward_pre_hook(
        lambda m, y: (3 * y[0],)
    ),
}


@pytest.mark.parametrize("inside", [False, True], ids=["model", "inside"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_users(name, inside):
    """They run in the converted model, too: of the model, and of what is in it."""
    model = Lambda(
        lambda self, x: self.a(self.b(x) + 1),
        a=Lambda(lambda self, x: self.c(x).tanh(), c=nn.Linear(4, 3)),
        b=nn.Linear(4, 4),
    )
    HOOKS[name](model.a if inside else model)
    converted = convert_module_to_backpack(model, debug=False)
    x, results = torch.randn(N, 4, requires_grad=True), []
    for m in (model, converted, deepcopy(converted)):
        leaves = x, *(m.get_parameter(n) for n, _ in model.named_parameters())
        results.append(torch.autograd.grad(m(x).square().sum(), leaves))
    for result in results[1:]:
        assert all(map(torch.equal, results[0], result))


LEAVES = {
    "layer": (nn.Linear(1, 1), True),
    "subclass": (PlainSubclass(1, 1), True),
    "own-forward": (WeightStandardizedLinear(1, 1), False),
    "sequential": (nn.Sequential(), False),
    "parallel": (Parallel(nn.Identity()), False),
    "branch": (Parallel(nn.Identity()).branch, False),
    "sum": (SumModule(), True),
    "reduce-tuple": (ReduceTuple(), True),
    "function": (FunctionModule(None, 1), True),
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
        lambda x: x.reshape(len(x), -1),
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
        lambda x: x.view(x.size(1), -1),
        lambda x: x.reshape(x.stride()[0], -1),
        lambda x: x.sum(1).reshape(len(x), len(x[0]), len(x.shape) - 2),
        lambda x: x.chunk(2)[0] * len(x.chunk(2)),
        lambda x: x.transpose(0, 1).reshape(x.shape[0], -1),
        lambda x: torch.mul(x, 0.3, out=None),
        lambda x: x.sin().zero_() + x,
        lambda x: torch.zero_(x.sin()) + x,
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
        lambda x: torch.max_pool1d(x, 3, 3, 0, 1, True),
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


def test_transform_inplace_outside_of_a_graph(capsys):
    """Modules are switched, with or without their children."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(inplace=True))
    graph_utils._transform_inplace_to_normal(model, False, initialize_recursion=False)
    assert all(module.inplace for module in model)
    graph_utils._transform_inplace_to_normal(model, True)
    assert not any(module.inplace for module in model)
    assert capsys.readouterr().out.count("not in place") == 2


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


# Quantities of the converted model


def hessians(model, loss, x, y):
    """Differentiate each sample's part of the loss twice.

    Args:
        model: The model, which is not extended.
        loss: The loss module, a mean over samples.
        x: Input of shape ``[N, *]``.
        y: The loss's target.

    Returns:
        Hessians ``[N, P, P]`` by parameter name.
    """
    params, rows = parameters(model), []
    for n in range(len(x)):
        value = loss(model(x[n : n + 1]), y[n : n + 1]) / len(x)
        gradients = torch.autograd.grad(
            value, list(params.values()), materialize_grads=True, create_graph=True
        )
        # connected to the parameter, even where the gradient is constant
        flat = [g.flatten() + 0.0 * p.sum() for g, p in zip(gradients, params.values())]
        pairs = zip(flat, params.values())
        rows.append([jacobian(g, [p])[0].reshape(len(g), -1) for g, p in pairs])
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}


def products(matrix):
    """Make the function that multiplies ``[K, *p]`` with a matrix ``[P, P]``."""
    return lambda mat: (mat.reshape(len(mat), -1) @ matrix).reshape(mat.shape)


QUANTITIES = {
    BatchGrad: lambda gradients, hessian, ggn: gradients,
    DiagGGNExact: lambda gradients, hessian, ggn: ggn.sum(0).diagonal(),
    BatchDiagGGNExact: lambda gradients, hessian, ggn: ggn.diagonal(dim1=1, dim2=2),
    DiagHessian: lambda gradients, hessian, ggn: hessian.sum(0).diagonal(),
    BatchDiagHessian: lambda gradients, hessian, ggn: hessian.diagonal(dim1=1, dim2=2),
    HMP: lambda gradients, hessian, ggn: products(hessian.sum(0)),
    GGNMP: lambda gradients, hessian, ggn: products(ggn.sum(0)),
}


def convert(model):
    """Extend a model and convert it."""
    return extend(model, use_converter=True)


def run(converted, x, y, extension):
    """Run a backward pass on the converted model.

    Args:
        converted: The model, see :func:`convert`.
        x: Its input.
        y: The target of the loss.
        extension: What to compute.

    Returns:
        What was saved, by parameter name, and what was warned of.
    """
    lossfunc = extend(nn.MSELoss())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with backpack(extension):
            lossfunc(converted(x), y).backward()
    values = {}
    for name, param in converted.named_parameters():
        if hasattr(param, extension.savefield):
            values[name] = getattr(param, extension.savefield)
            delattr(param, extension.savefield)
    return values, "".join(str(warning.message) for warning in caught)


def check_quantities(model, x, refused=None):
    """Assert that quantities of the converted model are those of the model.

    Args:
        model: The model, whose output has shape ``[N, 3]``.
        x: Its input.
        refused: Message by extension, for those that are refused. Default: ``None``.
    """
    refused = refused or {}
    y, loss = torch.randn(len(x), 3, dtype=x.dtype), nn.MSELoss()
    loss(model(x), y).backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    gradients = individual_gradients(model, loss, (x,), (y,))
    hessian = hessians(model, loss, x, y)
    ggn = batch_ggn(model, loss, (x,), (y,))
    converted = convert(model)
    for cls, expected in QUANTITIES.items():
        extension = cls()
        if cls in refused:
            with pytest.raises(NotImplementedError, match=refused[cls]):
                run(converted, x, y, extension)
            continue
        values, warned = run(converted, x, y, extension)
        assert values.keys() == trained, cls
        frozen = {n for n, p in model.named_parameters() if p.requires_grad} - trained
        assert all(name in warned for name in frozen) and bool(frozen) == bool(warned)
        for name in trained:
            param = model.get_parameter(name)
            value = expected(gradients[name], hessian[name], ggn[name])
            got = values[name]
            if callable(value):
                vectors = torch.randn(2, *param.shape, dtype=x.dtype)
                value, got = value(vectors), got(vectors)
            what = f"{cls.__name__} {name}"
            scale = value.abs().max() + 1e-3  # results that are zero
            assert_agrees(got + scale, value.reshape(got.shape) + scale, what)


class TwoWays(nn.Module):
    """A function of what two layers return."""

    def __init__(self, function, shape_a, shape_b):
        super().__init__()
        self.function, self.shapes = function, (shape_a, shape_b)
        self.a = nn.Linear(2, math.prod(shape_a))
        self.b = nn.Linear(2, math.prod(shape_b))

    def forward(self, x):
        a = self.a(x).unflatten(1, self.shapes[0])
        b = self.b(x).unflatten(1, self.shapes[1])
        return self.function(a, b).flatten(1)


def add_in_place(a, b):
    b += a
    return b


def sum_of_three(a, b):
    return a + b + a * 2.0


ONE, ROW, COLUMN, MATRIX = (1,), (1, 3), (3, 1), (3, 3)
SUMS = {
    "column + matrix": (lambda a, b: a + b, ONE, (3,)),
    "matrix + column": (lambda a, b: a + b, (3,), ONE),
    "torch.add": (lambda a, b: torch.add(input=a, other=b), ONE, (3,)),
    "torch.add-reversed": (lambda a, b: torch.add(a, other=b), (3,), ONE),
    "method": (lambda a, b: b.add(a), ONE, (3,)),
    "method-keyword": (lambda a, b: a.add(other=b), ONE, (3,)),
    "alpha": (lambda a, b: torch.add(a, b, alpha=0.5), ONE, (3,)),
    "in place": (add_in_place, ONE, (3,)),
    "three": (sum_of_three, ONE, (3,)),
    "outer": (lambda a, b: (a + b)[:, 0], (1, 3), (2, 1)),
    "rows": (lambda a, b: (a + b)[:, 1], (1, 3), (2, 3)),
    "unsqueezed": (lambda a, b: (a.unsqueeze(2) + b).sum(1), (2,), (2, 3)),
    "minus": (lambda a, b: a - b, ONE, (3,)),
    "minus-reversed": (lambda a, b: b - a, ONE, (3,)),
    "torch.sub": (lambda a, b: torch.sub(input=a, other=b, alpha=2), (3,), ONE),
    "rsub": (lambda a, b: torch.rsub(a, other=b), (3,), ONE),
}
PRODUCTS = {
    "column * matrix": (lambda a, b: a * b, ONE, (3,)),
    "matrix * column": (lambda a, b: a * b, (3,), ONE),
    "torch.mul": (lambda a, b: torch.mul(input=a, other=b), ONE, (3,)),
    "torch.multiply": (lambda a, b: torch.multiply(b, a), ONE, (3,)),
    "method": (lambda a, b: a.mul(other=b), ONE, (3,)),
    "in place": (lambda a, b: b.mul_(a), ONE, (3,)),
    "outer": (lambda a, b: (a * b)[:, 0], (1, 3), (2, 1)),
    "rows": (lambda a, b: (a * b)[:, 1], (1, 3), (2, 3)),
    "divided": (lambda a, b: a / (b.sigmoid() + 1.0), (3,), ONE),
    "divided-reversed": (lambda a, b: a / (b.sigmoid() + 1.0), ONE, (3,)),
    "torch.div": (lambda a, b: torch.div(input=a, other=b.exp()), (3,), ONE),
    "matmul": (lambda a, b: (a @ b)[:, 0], (2, 3), (3, 3)),
    "einsum": (lambda a, b: torch.einsum("ni,nij->nj", a, b), (2,), (2, 3)),
    "addcmul": (lambda a, b: torch.addcmul(b, a, b, value=0.5), ONE, (3,)),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), ONE, (3,)),
    "twice": (lambda a, b: a * b + a, ONE, (3,)),
}
BROADCASTS = [
    pytest.param(*row, id=f"{kind}-{name}")
    for kind, rows in {"sum": SUMS, "product": PRODUCTS}.items()
    for name, row in rows.items()
]


@pytest.mark.parametrize("function, shape_a, shape_b", BROADCASTS)
def test_broadcast(function, shape_a, shape_b):
    """Operands may have other shapes than the result."""
    torch.manual_seed(0)
    model = TwoWays(function, shape_a, shape_b).double()
    x = torch.randn(N, 2, dtype=torch.float64)
    check_same(model, convert_module_to_backpack(model, debug=False), x)
    check_quantities(model, x)
    with pytest.raises(NotImplementedError, match="KFRA.*KFLR"):
        run(convert(model), x, torch.randn(N, 3, dtype=x.dtype), KFRA())


def test_kfra_of_a_shape():
    """What an operation takes for its shape alone is no input of it."""
    torch.manual_seed(0)
    written = (lambda a, b: b + a.expand_as(b), lambda a, b: b + a.expand(-1, 3))
    model, other = (TwoWays(function, ONE, (3,)).double() for function in written)
    other.load_state_dict(model.state_dict())
    x = torch.randn(N, 2, dtype=torch.float64)
    check_quantities(model, x)
    y = torch.randn(N, 3, dtype=x.dtype)
    (values, _), (expected, _) = (run(convert(m), x, y, KFRA()) for m in (model, other))
    for name, factors in expected.items():
        for factor, got in zip(factors, values[name]):
            assert_agrees(got, factor, name)


def positive_curvature(model, x, y):
    """Clip what a function of two layers adds to the curvature at its inputs.

    Args:
        model: A :class:`TwoWays`.
        x: Its input.
        y: Target of a squared loss.

    Returns:
        The positive-curvature Hessian ``[P, P]`` of each parameter.
    """
    sizes = [math.prod(shape) for shape in model.shapes]
    result = {}
    for n in range(len(x)):
        z = torch.cat([model.a(x[n : n + 1]), model.b(x[n : n + 1])], 1)
        leaf = z.detach()

        def output(leaf):
            parts = leaf.split(sizes, 1)
            shaped = [p.unflatten(1, s) for p, s in zip(parts, model.shapes)]
            return model.function(*[part * 1.0 for part in shaped]).flatten(1)

        out = output(leaf).detach()
        delta = 2 * (out - y[n : n + 1]) / y.numel()

        def linear_loss(leaf, delta=delta):
            return (output(leaf) * delta).sum()

        size = leaf.numel()
        residual = torch.autograd.functional.hessian(linear_loss, leaf)
        eigenvalues, Q = torch.linalg.eigh(residual.reshape(size, size))
        J = torch.autograd.functional.jacobian(output, leaf).reshape(3, size)
        matrix = J.T @ J * 2 / y.numel() + Q @ eigenvalues.clamp(min=0).diag() @ Q.T
        for name, param in model.named_parameters():
            J_p = jacobian(z, [param])[0].flatten(1)
            result[name] = result.get(name, 0) + J_p.T @ matrix @ J_p
    return result


# Operations that are one module: each modifies its own second derivative
SINGLE = [
    *("torch.mul", "matrix * column", "method", "in place", "outer", "matmul"),
    *("einsum", "addcmul", "lerp"),
]


@pytest.mark.parametrize("name", SINGLE)
def test_broadcast_with_positive_curvature(name):
    """The second derivative of a product is modified for both factors at once."""
    torch.manual_seed(0)
    model = TwoWays(*PRODUCTS[name]).double()
    x, y = torch.randn(N, 2).double(), torch.randn(N, 3).double()
    values, _ = run(convert(model), x, y, PCHMP(modify="clip"))
    for key, matrix in positive_curvature(model, x, y).items():
        vectors = torch.randn(2, *model.get_parameter(key).shape, dtype=x.dtype)
        assert_agrees(values[key](vectors), products(matrix)(vectors), key)


# Operations that are linear in a parameter, which no module has
LINEAR = {
    "sum": (lambda h, w: h + w, (3,)),
    "product": (lambda h, w: h * w, (3,)),
    "matmul": (lambda h, w: h @ w, (3, 3)),
    "linear": (F.linear, (3, 3)),
    "einsum": (lambda h, w: torch.einsum("ni,ij->nj", h, w), (3, 3)),
    "conv1d": (lambda h, w: F.conv1d(h[:, None], w, padding=1)[:, 0], (1, 1, 3)),
    "layer_norm": (lambda h, w: F.layer_norm(h, (3,), w), (3,)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_positive_curvature_of_linear_operations(name):
    """Parameters of operations add nothing to the curvature, as those of layers."""
    function, shape = LINEAR[name]
    torch.manual_seed(0)
    model = Between(function, shape).double()
    x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    expected = 0
    for n in range(len(x)):
        z = function(model.before(x[n : n + 1]), model.w)
        J, leaf = jacobian(z, [model.w])[0].flatten(1), z.detach()
        after = partial(torch.autograd.functional.jacobian, model.after)
        delta = (
            2 * (model.after(leaf) - y[n : n + 1]) / y.numel() @ model.after[1].weight
        )
        bend = torch.func.grad(
            lambda t: torch.func.grad(lambda s: s.tanh().sum())(t).sum()
        )
        matrix = (delta * bend(leaf)).clamp(min=0)[0].diag()
        A = after(leaf).reshape(3, 3)
        expected = expected + J.T @ (matrix + A.T @ A * 2 / y.numel()) @ J
    values, _ = run(convert(model), x, y, PCHMP(modify="clip"))
    vectors = torch.randn(2, *shape, dtype=x.dtype)
    assert_agrees(values["w"](vectors), products(expected)(vectors))


@pytest.mark.parametrize(
    "function", [lambda h, w: h * w.exp(), lambda h, w: h**2 * w**2]
)
def test_positive_curvature_of_nonlinear_operations(function):
    """It is not defined for parameters that bend an operation."""
    model = Between(function, (3,)).double()
    x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    with pytest.raises(NotImplementedError, match="not known to be linear"):
        run(convert(model), x, y, PCHMP())


class Between(nn.Module):
    """An operation with a parameter between two layers."""

    def __init__(self, function, shape):
        super().__init__()
        self.before, self.w = nn.Linear(4, 3), nn.Parameter(torch.randn(shape))
        self.after, self.function = nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), function

    def forward(self, x):
        return self.after(self.function(self.before(x), self.w))


def used_twice(w, b):
    w = w.exp()
    return b * w + w


def rows_of(w, b):
    return w.expand(b.shape[0], -1)


def order(b):
    return b.detach().argsort(1)


# Function of a parameter and a layer's output, the parameter's shape, and whether the
# function uses the parameter once
WITH_PARAMETER = {
    "vector *": (lambda w, b: w * b, (3,), True),
    "* vector": (lambda w, b: b * w, (3,), True),
    "+ vector": (lambda w, b: b + w, (3,), True),
    "vector +": (lambda w, b: torch.add(w, other=b), (3,), True),
    "row": (lambda w, b: torch.mul(input=w, other=b), (1, 3), True),
    "single": (lambda w, b: b.mul(other=w), (1,), True),
    "1 x 1": (lambda w, b: b - w, (1, 1), True),
    "number": (lambda w, b: w * b, (), True),
    "number +": (lambda w, b: w + b, (), True),
    "in place": (lambda w, b: b.mul_(w), (3,), True),
    "divided": (lambda w, b: b / (1.0 + w**2), (3,), True),
    "expression": (lambda w, b: b * w.softmax(0) + 1.0, (3,), True),
    "joint expression": (lambda w, b: b * (w / w.norm()), (3,), True),
    "expand_as": (lambda w, b: b + w.expand_as(b), (3,), True),
    "expand_as-expression": (lambda w, b: b + w.expand_as(b).tanh(), (3,), True),
    "expand_as-keyword": (lambda w, b: b * w.expand_as(other=b) * 2, (3,), True),
    "reshape_as": (lambda w, b: b * w.exp().reshape_as(b[0]).sin(), (1, 3), True),
    "view_as": (lambda w, b: b * w.view_as(b[0]), (1, 3), True),
    "type_as": (lambda w, b: b * w.type_as(b), (3,), True),
    "to": (lambda w, b: b * w.to(b), (3,), True),
    "broadcast_tensors": (
        lambda w, b: b + torch.broadcast_tensors(b, w)[1],
        (3,),
        True,
    ),
    "len": (lambda w, b: b + w.expand(len(b), -1).sin(), (3,), True),
    "detached": (lambda w, b: b * w.detach() + w, (3,), True),
    "tensor": (lambda w, b: b @ torch.arange(9.0).view(3, 3).to(b) + w, (3,), True),
    "len-of-row": (lambda w, b: w[: len(b[0])].exp() * b, (3,), True),
    "broadcast_tensors-of-constants": (
        lambda w, b: b * torch.broadcast_tensors(w, torch.ones(2, 3))[0][1],
        (3,),
        True,
    ),
    "take_along_dim": (
        lambda w, b: b + torch.take_along_dim(rows_of(w, b), order(b), 1),
        (3,),
        True,
    ),
    "gather": (lambda w, b: b + rows_of(w, b).gather(1, order(b)).exp(), (3,), True),
    "masked_fill": (
        lambda w, b: b + rows_of(w, b).masked_fill(b > 0, 0.0).sin(),
        (3,),
        True,
    ),
    "where": (
        lambda w, b: b + torch.where(b > 0, rows_of(w, b), torch.ones(())),
        (3,),
        True,
    ),
    "scatter": (
        lambda w, b: b + torch.zeros_like(b).scatter(1, order(b), rows_of(w, b)),
        (3,),
        True,
    ),
    "twice": (used_twice, (3,), False),
    "twice-number": (used_twice, (), False),
}
ALONE = "several calls"


@pytest.mark.parametrize("size", [N, N + 2])
@pytest.mark.parametrize("name", WITH_PARAMETER)
def test_broadcast_with_parameter(name, size):
    """Parameters have no samples, also if their first axis is as long as the batch."""
    function, shape, once = WITH_PARAMETER[name]
    torch.manual_seed(0)
    model = Lambda(
        lambda self, x: function(self.w, self.b(x)),
        w=nn.Parameter(torch.rand(shape) + 0.5),
        b=nn.Linear(2, 3),
    ).double()
    x = torch.randn(size, 2, dtype=torch.float64)
    check_same(model, convert_module_to_backpack(model, debug=False), x)
    walking = (DiagHessian, BatchDiagHessian, HMP, GGNMP)
    check_quantities(model, x, {} if once else dict.fromkeys(walking, ALONE))
    if once:
        assert_kfra_of_bias(model, lambda b: function(model.w.detach(), b * 1.0), x)


def assert_kfra_of_bias(model, after, x):
    """Compare KFRA of the layer `b` with the average over Jacobians behind it."""
    y = torch.randn(len(x), 3, dtype=x.dtype)
    factor = run(convert(model), x, y, KFRA())[0]["b.bias"][0]
    # the average of what each sample makes of the sum of the loss's Hessians
    jacobians = [
        torch.autograd.functional.jacobian(after, model.b(row))
        for row in x.unsqueeze(1)
    ]
    jacobians = torch.stack(jacobians).reshape(len(x), 3, 3)
    hessian = torch.eye(3, dtype=x.dtype) * 2 / 3
    expected = jacobians.mT @ hessian @ jacobians
    assert_agrees(factor, expected.mean(0), "KFRA")


def class_token(self, x):
    return self.w.expand(x.shape[0], -1, -1)


# Parameters that data meets by way of layers, tables and lists: functions, and whether
# what is computed from parameters alone has no axis for samples
FROM_PARAMETERS = {
    "table": (lambda m, x: m.a(x) + m.t(torch.arange(x.shape[1])), True),
    "table-constant": (lambda m, x: m.a(x) + m.t(torch.arange(3)), True),
    "table-buffer": (lambda m, x: m.a(x) + m.t(m.ids[: x.size(1)]), True),
    "table-row": (lambda m, x: m.a(x) + m.t(torch.arange(3).unsqueeze(0)), True),
    "table *": (lambda m, x: m.a(x) * m.t(torch.arange(x.shape[1])), True),
    "table-layer": (lambda m, x: m.a(x) * m.b(m.t(m.ids[:3])).tanh() + m.w, True),
    "layer": (lambda m, x: (m.a(x) + m.b(m.buffer)) * m.w, True),
    "weight": (lambda m, x: m.a(x) @ m.c(m.buffer).view(4, 4), True),
    "class-token": (lambda m, x: torch.cat([class_token(m, x), x], 1), False),
    "class-token-last": (lambda m, x: torch.cat([x, class_token(m, x)], 1), False),
    "class-token-layer": (
        lambda m, x: torch.cat([class_token(m, x), m.a(x)], 1),
        False,
    ),
    "stacked": (lambda m, x: torch.stack([x, m.w.expand_as(x)], 1).sum(1), False),
}


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("name", FROM_PARAMETERS)
def test_computed_from_parameters(name, size):
    """What parameters alone determine has no samples, whatever its length."""
    function, refused = FROM_PARAMETERS[name]
    torch.manual_seed(0)
    model = Lambda(
        lambda self, x: self.h(torch.tanh(function(self, x)).mean(1)),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        c=nn.Linear(4, 16),
        h=nn.Linear(4, 3),
        t=nn.Embedding(5, 4),
        w=nn.Parameter(torch.rand(1, 1, 4)),
        ids=torch.arange(5),
        buffer=torch.randn(1, 4),
    ).double()
    separate = (DiagHessian, BatchDiagHessian) if refused else ()
    x = torch.randn(size, 3, 4).double()
    check_quantities(model, x, dict.fromkeys(separate, "axis 0|samples meet"))


def test_copy_of_a_converted_model():
    """A copy is watched as a whole, and keeps what else was registered."""
    model = Lambda(FROM_PARAMETERS["table"][0], a=nn.Linear(4, 3), t=nn.Embedding(5, 3))
    converted, loss = extend(model.double(), use_converter=True), extend(nn.MSELoss())
    calls, x = [], torch.randn(4, 2, 4).double()
    converted.register_forward_hook(lambda *_: calls.append(1))
    results = []
    for m in (converted, deepcopy(converted), deepcopy(deepcopy(converted))):
        with backpack(BatchGrad()):
            loss(m(x), torch.zeros(4, 2, 3).double()).backward()
        results.append([p.grad_batch for p in m.parameters()])
    assert len(calls) == 3
    for expected, *copies in zip(*results):
        assert all(torch.equal(expected, got) for got in copies)


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 3), (1, 1)])
def test_broadcast_with_buffer(shape):
    """Buffers have no samples, either."""
    torch.manual_seed(0)
    model = Lambda(
        lambda self, x: (self.b(x) * self.w).tanh() + self.w,
        w=torch.rand(shape) + 0.5,
        b=nn.Linear(2, 3),
    ).double()
    x = torch.randn(N + 2, 2, dtype=torch.float64)
    check_quantities(model, x, {})
    assert_kfra_of_bias(model, lambda b: (b * model.w).tanh() + model.w, x)


MEETING = {
    "other axes": lambda self, x: (self.b(x) + self.a(x).unflatten(1, (N, 3)))[:, 0],
    "other axes *": lambda self, x: (self.b(x) * self.a(x).unflatten(1, (N, 3))).sum(1),
    "mean": lambda self, x: self.b(x) - self.a(x)[:, :3].mean(0),
    "mean kept": lambda self, x: self.b(x) - self.a(x)[:, :3].mean(0, keepdim=True),
    "rolled": lambda self, x: torch.roll(self.b(x), 1, 0),
    "swapped pair": lambda self, x: self.b(x)[[0, 2, 1]],
    "pairs": lambda self, x: self.b(x) @ self.a(x)[:, :3].T,
    "table": lambda self, x: (self.b(x)[:, None] + self.t(torch.arange(N)))[:, 1],
    "table *": lambda self, x: (self.b(x)[:, None] * self.t(torch.arange(N))).sum(1),
    "layer": lambda self, x: (self.b(x)[:, None] * self.c(self.constant)).sum(1),
}


@pytest.mark.parametrize("name", MEETING)
@pytest.mark.parametrize("ext", [DiagHessian, BatchDiagHessian, KFRA])
def test_samples_meet(name, ext):
    """Where samples meet in an operation, quantities for each of them do not exist."""
    torch.manual_seed(0)
    model = Lambda(
        MEETING[name],
        a=nn.Linear(4, 3 * N),
        b=nn.Linear(4, 3),
        c=nn.Linear(2, 3),
        t=nn.Embedding(N, 3),
        constant=torch.randn(N, 2),
    ).double()
    x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    with pytest.raises(
        NotImplementedError, match="samples (meet|have met)|axis 0|KFLR"
    ):
        run(convert(model), x, y, ext())


# Parts of a forward that switch gradients, or types


class Frozen(nn.Module):
    """Switches gradients off for its whole forward."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x):
        return self.fc(x).tanh()


class InplaceBlock(nn.Module):
    """A residual block with operations in place."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4).eval()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.norm(self.fc1(x)))
        out = self.fc2(out)
        out += x
        return self.relu(out)


class WithMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.fixed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    @torch.no_grad()
    def features(self, x):
        return F.relu(self.fixed(x), inplace=True)

    @torch.inference_mode()
    def scale(self):
        return self.head.weight.norm()

    def forward(self, x):
        return self.head(self.features(x)) * self.scale().clone()


class Spectrum(nn.Module):
    """Computes with complex numbers."""

    def __init__(self, function=lambda h: torch.fft.fft(h).real):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


class HalfTrained(nn.Module):
    """Switches gradients by its mode; that cannot be traced."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        with torch.set_grad_enabled(not self.training):
            return self.fc(x)


class Autocast(nn.Module):
    """Computes in another type than the rest."""

    def __init__(self, enabled=True):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.mix = nn.Parameter(torch.rand(4, 4))
        self.enabled = enabled

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            y = torch.mm(x.to(self.mix.dtype), self.mix)
        return y.to(x.dtype) * self.scale


class AutocastMethod(Autocast):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return torch.mm(x.to(self.mix.dtype), self.mix).to(x.dtype) * self.scale


def no_grad(function):
    """Make a forward out of a part that runs with gradients off."""

    def forward(self, x):
        with torch.no_grad():
            y = function(self, x)
        return self.head(y + self.fc(x))

    return forward


def set_and_reset(self, x):
    torch.set_grad_enabled(False)
    y = self.fixed(x).exp()
    torch.set_grad_enabled(True)
    return self.head(y * self.fc(x))


def set_with(self, x):
    with torch.set_grad_enabled(False):
        y = self.fixed(x)
    return self.head(self.fc(x) / (y**2 + 1.0))


def on_inside_off(self, x):
    with torch.no_grad():
        y = self.fixed(x)
        with torch.enable_grad():
            z = self.fc(y)
            with torch.no_grad():
                scale = z.norm(dim=1, keepdim=True)
        z = z.sigmoid()
    with torch.set_grad_enabled(True):
        return self.head(z + self.fc2(y) / scale)


def in_place_inside(self, x):
    with torch.no_grad():
        y = self.fixed(x)
        y.mul_(2.0)
        y += self.w
        y[:, 0] = 1.0
        F.relu_(y)
        z = y.view(-1, 2)
        z.sub_(0.5)
    return self.head(z.view(-1, 4) * self.fc(x))


def in_place_outside(self, x):
    with torch.no_grad():
        y = self.fixed(x)
    y *= self.w
    return self.head(y)


def tuples_inside(self, x):
    with torch.no_grad():
        a, b = self.fixed(x).chunk(2, dim=1)
        top = self.fixed(x).max(dim=1, keepdim=True).values
        parts = self.fixed(x).split([1, 3], dim=1)
    return self.head(torch.cat([a, b], 1) * top + self.fc(x) * parts[0])


def frozen_statistics(self, x):
    with torch.no_grad():
        scale = self.w.norm() * x.shape[1] / x.size(1)
        shift = self.table[0] * 2.0
    return self.head(self.fc(x) * (self.w / scale) + shift)


def parameter_and_its_copy(self, x):
    with torch.no_grad():
        fixed = self.w * 1.0
        same = self.w
    return self.head(self.fc(x) * fixed + same)


def detached(self, x):
    y = self.fc(x)
    return self.head(y * y.detach() + y.sigmoid().data + torch.detach(self.w) * y)


def detached_in_place(self, x):
    y = self.fixed(x)
    y.detach_()
    return self.head(y + self.fc(x))


class Region(NamedTuple):
    """A forward that switches gradients, and what it uses."""

    forward: object
    refused: dict = {}
    modules: dict = {}


REGIONS = {
    "no_grad": Region(no_grad(lambda self, x: self.fixed(x))),
    "functions": Region(no_grad(lambda self, x: F.relu(self.fixed(x)).exp() + self.w)),
    "frozen-parameter": Region(no_grad(lambda self, x: x * self.w)),
    "functional-layer": Region(
        no_grad(lambda self, x: F.linear(x, self.fixed.weight, bias=self.fixed.bias))
    ),
    "frozen-backbone": Region(
        no_grad(lambda self, x: self.fixed(x)), modules={"fixed": InplaceBlock}
    ),
    "untraceable-backbone": Region(
        no_grad(lambda self, x: self.fixed(x)),
        modules={"fixed": lambda: nn.Sequential(nn.Linear(4, 4), Stateful())},
    ),
    "recurrent": Region(
        no_grad(lambda self, x: self.fixed(x.unsqueeze(1))[0][:, 0]),
        modules={"fixed": lambda: nn.LSTM(4, 4, 2, batch_first=True)},
    ),
    "decorated-forward": Region(
        lambda self, x: self.head(self.fixed(x) + self.fc(x)),
        modules={"fixed": Frozen},
    ),
    "nested-decorators": Region(
        no_grad(lambda self, x: self.fixed(x)),
        modules={"fixed": lambda: nn.Sequential(Frozen(), nn.Linear(4, 4))},
    ),
    "set_grad_enabled": Region(set_with),
    "set and reset": Region(set_and_reset),
    "inference_mode": Region(
        lambda self, x: self.head(self.fc(x) + inference(self, x).clone())
    ),
    "on inside off": Region(on_inside_off),
    "in place inside": Region(in_place_inside),
    "in place outside": Region(in_place_outside),
    "tuples": Region(tuples_inside),
    "statistics": Region(frozen_statistics),
    "parameter": Region(parameter_and_its_copy),
    "detach": Region(detached),
    "detach_": Region(detached_in_place),
}


@torch.inference_mode()
def inference(self, x):
    """Evaluate a layer in inference mode."""
    return self.fixed(x)


def build_region(region):
    """Make the model of a row."""
    torch.manual_seed(0)
    modules = {
        **dict.fromkeys(("fc", "fc2", "fixed"), lambda: nn.Linear(4, 4)),
        "head": lambda: nn.Linear(4, 3),
        "w": lambda: nn.Parameter(torch.rand(4) + 0.5),
        "table": lambda: nn.Parameter(torch.rand(2, 4)),
        **region.modules,
    }
    modules = {name: make() for name, make in modules.items()}
    return Lambda(region.forward, **modules).double()


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_gradients_switched_off(name, train):
    """What was frozen is never trained: same outputs, same gradients, same ``None``."""
    model = build_region(REGIONS[name]).train(train)
    x = torch.randn(N, 4, dtype=torch.float64)
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            converted = convert_module_to_backpack(model, debug=False)
            assert torch.is_grad_enabled() == grad_enabled
        check_same(model, converted, x)
        check_same(model, convert_module_to_backpack(converted, debug=False), x)
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", REGIONS)
def test_quantities_where_gradients_are_switched_off(name):
    """Quantities are those of the model, and frozen parameters have none."""
    region = REGIONS[name]
    model, x = build_region(region).eval(), torch.randn(N, 4, dtype=torch.float64)
    check_quantities(model, x, region.refused)


def test_switched_off_by_method():
    """A method may be decorated, too."""
    torch.manual_seed(0)
    model, x = WithMethod().double(), torch.randn(N, 4).double()
    check_same(model, convert_module_to_backpack(model, debug=False), x)
    check_quantities(model, x)


KEPT_WHOLE = {
    "set_grad_enabled(self.training)": HalfTrained,
    "autocast": Autocast,
    "autocast off": lambda: Autocast(enabled=False),
    "decorator": AutocastMethod,
}


@pytest.mark.parametrize("make", KEPT_WHOLE.values(), ids=KEPT_WHOLE)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_kept_whole(make, train):
    """A submodule that switches what can't be traced stays as it is."""
    torch.manual_seed(0)
    part = make()
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Tanh(), nn.Linear(4, 3))
    model.train(train)
    converted = convert_module_to_backpack(model, debug=False)
    assert part in converted.modules()
    x = torch.randn(N, 4)
    check_same_outputs(model, converted, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_same_outputs(model, converted, x)


def test_kept_whole_alone():
    """What is around a submodule that can't be traced does not stay whole."""
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(4, 4), DataDependent()))
    converted = convert_module_to_backpack(model, debug=False)
    names = {n.target for n in converted.graph.nodes if n.op == "call_module"}
    assert names == {"0", "1.0", "1.1"}
    check_same_outputs(model, converted, torch.randn(N, 4))


class Untraceable(Lambda):
    """A function of layers that is not traced."""

    def forward(self, x):
        return super().forward(x) if x.isfinite().all() else x


class Pair(nn.Module):
    def forward(self, x):
        return x.exp(), x.tanh()


class Total(nn.Module):
    def forward(self, tensors):
        return sum(tensors)


def sequences(x):
    """View features as two steps of a sequence."""
    return x.view(-1, 2, 2)


def untraceable(function, **children):
    """Make a module with a layer that is not traced."""
    return partial(Untraceable, function, fc=nn.Linear(4, 4), **children)


WITH_LAYERS = {  # submodules that are kept, in which modules don't do it all
    "behind": untraceable(lambda m, x: m.fc(x).tanh() + x),
    "in front": untraceable(lambda m, x: m.fc(x * 2)),
    "parameter": untraceable(lambda m, x: m.fc(x * m.w), w=nn.Parameter(torch.rand(4))),
    "twice": untraceable(lambda m, x: m.fc(m.fc(x).sigmoid())),
    "parameter as input": untraceable(
        lambda m, x: m.two(m.fc(x), m.w.expand(len(x), 4)),
        two=nn.Bilinear(4, 4, 4),
        w=nn.Parameter(torch.rand(4)),
    ),
    "list": untraceable(
        lambda m, x: m.total([m.fc(x), m.other(x)]),
        total=Total(),
        other=nn.Linear(4, 4),
    ),
    "pair": untraceable(lambda m, x: (y := m.pair(m.fc(x)))[0] + y[1], pair=Pair()),
    "pair of modules": untraceable(
        lambda m, x: m.add(*m.pair(m.fc(x))), pair=Pair(), add=SumModule()
    ),
    "identity": untraceable(lambda m, x: m.same(m.fc(x) * 2), same=nn.Identity()),
    "sequences": untraceable(
        lambda m, x: m.step(sequences(m.fc(x))).sin().flatten(1), step=nn.Linear(2, 2)
    ),
    "of PyTorch": lambda: Lambda(
        lambda m, x: m.layer(sequences(x)).flatten(1),
        layer=nn.TransformerEncoderLayer(2, 1, 3, 0.0, batch_first=True),
    ),
}


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_kept_whole_with_layers(name):
    """Layers inside of what is kept have quantities, of the whole."""
    torch.manual_seed(0)
    part, x = deepcopy(WITH_LAYERS[name]()), torch.randn(N, 4).double()
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Tanh(), nn.Linear(4, 3)).double()
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivatives
        check_quantities(model, x)


CHAINS = {  # submodules that are kept, in which modules do it all
    "one": untraceable(lambda m, x: m.fc(x)),
    "several": untraceable(lambda m, x: m.act(m.fc(x)), act=nn.ReLU(inplace=True)),
    "sequences": untraceable(lambda m, x: m.fc(m.fl(x)), fl=nn.Flatten()),
    "views": untraceable(
        lambda m, x: m.up(m.step(m.cut(m.fc(x)))),
        cut=nn.Unflatten(1, (2, 2)),
        step=nn.Linear(2, 2),
        up=nn.Flatten(),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_kept_whole_and_walked_through(name):
    """Quantities go through modules, which know more of themselves, where they can."""
    torch.manual_seed(0)
    part = deepcopy(CHAINS[name]())
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    # linear in each parameter is a layer, and no block
    values, _ = run(convert(model), x, y, PCHMP())
    assert values.keys() == dict(model.named_parameters()).keys()
    check_quantities(model, x)


def test_kept_whole_and_random():
    """What cannot be repeated is refused by its true reason."""
    part = untraceable(lambda m, x: m.drop(m.fc(x).tanh()), drop=nn.Dropout(0.5))()
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 3)).double()
    x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    with pytest.raises(RuntimeError, match="repeating its forward pass"):
        run(convert(model), x, y, DiagHessian())


@pytest.mark.parametrize("size", [1, 3])
def test_function_that_needs_all_samples(size):
    """KFRA, which takes one at a time, says why it can't."""

    class Framed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(3 + size, 3)
            self.rows = nn.Parameter(torch.rand(N, size), requires_grad=False)

        def forward(self, x):
            return self.b(torch.cat([self.a(x), self.rows], 1))

    model = Framed().double()
    x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    says = r"cat\(.*repeating its forward pass.* the number of samples"
    with pytest.raises(RuntimeError, match=says):
        run(convert(model), x, y, KFRA())


def check_same_outputs(model, converted, x):
    """Assert that two models that share parameters agree, bit by bit."""
    results = []
    for m in (model, converted):
        m.zero_grad()
        output = m(x)
        output.float().square().sum().backward()
        results.append([output, *(p.grad for p in model.parameters())])
    for expected, got in zip(*results):
        assert expected is got is None or torch.equal(expected, got)


COMPLEX = {
    "fft": lambda h: torch.fft.fft(h).real,
    "rfft-irfft": lambda h: torch.fft.irfft(torch.fft.rfft(h) * 2, n=4),
    "view_as_complex": lambda h: torch.view_as_complex(h.view(-1, 2, 2)).abs().exp(),
    "polar": lambda h: torch.view_as_real(torch.polar(h, h)).flatten(1),
    "complex": lambda h: torch.complex(h, h.sin()).square().imag,
    "type": lambda h: h.to(torch.complex128).exp().real,
    "method": lambda h: (h.cdouble() + 1).log().real,
    "number": lambda h: (1j * h).exp().real,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_inside(name):
    """A function that leads through complex numbers stays whole, and has a rule."""
    torch.manual_seed(0)
    part, x = Spectrum(COMPLEX[name]), torch.randn(N, 4).double()
    first = nn.Linear(4, 4).double()
    last = nn.Linear(part(first(x)).shape[1], 3).double()
    model = nn.Sequential(first, nn.Sequential(part, nn.Tanh()), last)
    converted = convert_module_to_backpack(model, debug=False)
    assert part in converted.modules()
    check_same(model, converted, x)
    check_quantities(model, x)


def test_complex_numbers_between_layers():
    """A submodule with layers is opened, also where there are complex numbers in it."""
    layers = {"first": nn.Linear(4, 4), "last": nn.Linear(4, 3)}
    part = Lambda(lambda self, x: self.last(torch.fft.fft(x).real + x), **layers)
    converted = convert_module_to_backpack(nn.Sequential(part), debug=False)
    assert part not in converted.modules()


def test_autocast_inside_with_quantities():
    """What is kept whole has quantities, too, by automatic differentiation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Autocast(enabled=False), nn.Linear(4, 3))
    check_quantities(model.double(), torch.randn(N, 4).double())


def keeps_state(self, x, refused):
    """Write to buffers, dictionaries and lists; may depend on numbers."""
    h = self.lin(x)
    self.mean = self.mean * 0.9 + 0.1 * h.detach().mean(0)
    self.cache["last"] = h
    self.cache["all"].append(h)
    return h * 2 if not refused or h.sum() > 0 else h


def convert_what_sets_buffers(model):
    """Convert a model, if PyTorch lets the tracer set a buffer; older ones do not."""
    try:
        return convert_module_to_backpack(model, debug=False)
    except NotImplementedError as error:
        if "cannot assign" in str(error):
            pytest.skip("This PyTorch says so itself.")
        raise


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_state_is_as_before(refused, inside):
    """Whether it is converted or refused, a model has nothing of the tracer's."""
    model = Lambda(partial(keeps_state, refused=refused), lin=nn.Linear(4, 4))
    model.register_buffer("mean", torch.zeros(4))
    model.cache = {"all": [], "none": None}
    mean, cache = model.mean, model.cache
    whole = nn.Sequential(model, nn.Linear(4, 2)) if inside else model
    if inside:  # it is kept whole
        assert model in convert_module_to_backpack(whole, debug=False).modules()
    elif refused:
        with pytest.raises(NotImplementedError, match="control flow|cannot assign"):
            convert_module_to_backpack(whole, debug=False)
    else:
        with pytest.warns(UserWarning, match=r"\['cache', 'mean'\]"):
            convert_what_sets_buffers(whole)
    assert model.mean is mean and model.cache is cache
    assert cache == {"all": [], "none": None}


def kept_or_refused(forward, inside, says):
    """Refuse a model for a reason; or keep it whole in another one, which is returned.

    Returns:
        The other model and what it is converted to, if there is one.
    """
    torch.manual_seed(0)
    model = Lambda(forward, lin=nn.Linear(4, 4))
    if inside:
        whole = nn.Sequential(model, nn.Linear(4, 2))
        converted = convert_module_to_backpack(whole, debug=False)
        assert model in converted.modules()
        return [(whole, converted)]
    with pytest.raises(NotImplementedError, match=says):
        convert_module_to_backpack(model, debug=False)
    return []


def of_scalars(self, x):
    """Fill rows of a tensor that no input has entered."""
    z = torch.zeros(4, 4)
    z[0] = self.lin(x)[0]
    return z


def of_scalars_added(self, x):
    """Add to such a tensor."""
    z = torch.ones(4, 4)
    z += self.lin(x)
    return z.square()


def of_scalars_in_parts(self, x):
    """Write to views of such a tensor."""
    z = torch.zeros(4, 4)
    for i in range(4):
        z[i].copy_(self.lin(x)[i])
    return z


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("write", [of_scalars, of_scalars_added, of_scalars_in_parts])
def test_tensors_of_no_input(write, inside):
    """What calls would share is refused, with a way out, or kept whole in a module."""
    says = "made of no input.*new_zeros"
    for whole, converted in kept_or_refused(write, inside, says):
        for _ in range(2):
            check_same(whole, converted, torch.rand(4, 4))


@pytest.mark.parametrize("view", ["as_strided", "moveaxis", "hsplit", "adjoint"])
def test_views_written_to(view):
    """A view of any name that is written to is one, whose base is not used later."""
    args = {"as_strided": ((2,), (1,)), "moveaxis": (0, 1), "hsplit": (2,)}

    def forward(self, x):
        h = self.lin(x)
        part = getattr(h, view)(*args.get(view, ()))
        part[0].neg_()
        return h

    with pytest.raises(NotImplementedError, match="in place that is also used later"):
        convert_module_to_backpack(Lambda(forward, lin=nn.Linear(4, 4)), debug=False)


@pytest.mark.parametrize("inside", [False, True])
def test_lists_of_tensors_written_to(inside):
    """Functions that write to lists are refused, or kept whole in a module."""

    def forward(self, x):
        h = self.lin(x)
        torch._foreach_neg_([h])
        return h

    says = "a list of tensors.*_foreach_neg_"
    for whole, converted in kept_or_refused(forward, inside, says):
        check_same(whole, converted, torch.rand(3, 4))


def test_written_to_by_name():
    """What an operation in place gets by name is copied, too."""

    def forward(self, x):
        h = self.lin(x)
        nn.init.constant_(h, 0.5)
        return h * self.lin(x)

    torch.manual_seed(0)
    model, x = Lambda(forward, lin=nn.Linear(4, 4)), torch.rand(3, 4)
    check_same(model, convert_module_to_backpack(model, debug=False), x)


CHANGED = {
    "weight": lambda self: self.lin.weight.clamp_(-1, 1),
    "row": lambda self: self.lin.weight[0].mul_(0.9),
    "data": lambda self: self.lin.weight.data.clamp_(-1, 1),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_layers_whose_parameters_are_changed(name, inside):
    """The module that does it is kept whole; a model that does is refused."""

    def forward(self, x):
        with torch.no_grad():
            CHANGED[name](self)
        return self.lin(x)

    kept_or_refused(forward, inside, "changes its lin.weight in place")


def test_buffer_that_is_set_and_read():
    """What a forward pass sets, and then reads, is what it has set."""

    def forward(self, x):
        h = self.lin(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean

    torch.manual_seed(0)
    model, x = Lambda(forward, lin=nn.Linear(4, 4)), torch.rand(3, 4)
    model.register_buffer("mean", torch.ones(4))
    with pytest.warns(UserWarning, match=r"sets the attributes \['mean'\]"):
        converted = convert_what_sets_buffers(model)
    assert_agrees(converted(x), deepcopy(model)(x))
    assert_agrees(converted(x), model(x))  # again from the beginning
    assert converted.mean.equal(torch.ones(4))
