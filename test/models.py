"""Models written the way people write them, quirks included, in tiny sizes.

Nothing in here was written with the library in mind: in-place activations, one
activation module for several places, bare parameters, functional operations, tied
weights. :data:`ARCHITECTURES` holds a row per model, with inputs, loss, and target.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
import torch.nn.functional as F
from cases import Problem, randomize
from torch import Tensor, nn
from torch.nn import Module, Parameter


class BasicBlock(Module):
    """Residual block: one in-place ReLU in two places, and an in-place sum."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1):
        """Create the layers, and a downsampling branch where shapes change."""
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False),
                nn.BatchNorm2d(planes),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, inplanes, H, W]`` to ``[N, planes, H/stride, W/stride]``."""
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(Module):
    """Residual network with a stem, two stages, and a linear head."""

    def __init__(self, num_classes: int = 3):
        """Create the stages."""
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(3, 3))
        self.layer2 = nn.Sequential(BasicBlock(3, 4, stride=2), BasicBlock(4, 4))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DenseLayer(Module):
    """Pre-activated bottleneck that takes a list of features."""

    def __init__(self, inplanes: int, growth: int):
        """Create the layers."""
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inplanes)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inplanes, 2 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: List[Tensor]) -> Tensor:
        """Map all earlier features to new ones."""
        bottleneck = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(bottleneck)))


class DenseNet(Module):
    """Dense block, transition, and functional operations before the classifier."""

    def __init__(self, num_classes: int = 3):
        """Create the layers."""
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3, padding=1)
        self.block = nn.ModuleList([DenseLayer(2, 2), DenseLayer(4, 2)])
        self.transition = nn.Sequential(
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 3, 1, bias=False),
            nn.AvgPool2d(2, 2),
        )
        self.norm = nn.BatchNorm2d(3)
        self.classifier = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        features = [self.stem(x)]
        for layer in self.block:
            features.append(layer(features))
        out = self.norm(self.transition(torch.cat(features, 1)))
        out = F.relu(out, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        return self.classifier(torch.flatten(out, 1))


class InvertedResidual(Module):
    """Depthwise separable convolutions with an expansion, as in MobileNetV2."""

    def __init__(self, inplanes: int, planes: int, stride: int):
        """Create the layers."""
        super().__init__()
        hidden = 2 * inplanes
        self.use_residual = stride == 1 and inplanes == planes
        self.conv = nn.Sequential(
            nn.Conv2d(inplanes, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, planes, 1, bias=False),
            nn.BatchNorm2d(planes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block, with a residual connection if shapes allow it."""
        return x + self.conv(x) if self.use_residual else self.conv(x)


class MobileNet(Module):
    """Inverted residuals, a mean over pixels, and a classifier with dropout."""

    def __init__(self, num_classes: int = 3):
        """Create the layers."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 2, 3, 2, 1, bias=False),
            nn.BatchNorm2d(2),
            nn.ReLU6(inplace=True),
            InvertedResidual(2, 2, 1),
            InvertedResidual(2, 3, 2),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        return self.classifier(self.features(x).mean([2, 3]))


class VGG(Module):
    """Convolutions, adaptive pooling, ``torch.flatten``, dropout in the classifier."""

    def __init__(self, num_classes: int = 3):
        """Create the layers."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.ReLU(True),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(16, 5),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(5, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(x)


class ChannelsFirstLayerNorm(Module):
    """Handwritten layer normalization over channels, with bare parameters."""

    def __init__(self, channels: int, eps: float = 1e-6):
        """Create scale and shift."""
        super().__init__()
        self.weight = Parameter(torch.ones(channels))
        self.bias = Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[N, C, H, W]`` over C."""
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(Module):
    """Depthwise convolution, channels-last MLP, layer scale, residual connection."""

    def __init__(self, dim: int):
        """Create the layers and the layer scale."""
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 2 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(2 * dim, dim)
        self.gamma = Parameter(0.5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``[N, dim, H, W]``."""
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = (self.gamma * x).permute(0, 3, 1, 2)
        return shortcut + x


class ConvNeXt(Module):
    """Patchify stem, one block, and a head on the mean over pixels."""

    def __init__(self, num_classes: int = 3):
        """Create the layers."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(2, 3, kernel_size=2, stride=2), ChannelsFirstLayerNorm(3)
        )
        self.block = ConvNeXtBlock(3)
        self.norm = nn.LayerNorm(3, eps=1e-6)
        self.head = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        x = self.block(self.stem(x))
        return self.head(self.norm(x.mean([-2, -1])))


class SelfAttention(Module):
    """Handwritten attention: one projection for queries, keys, and values."""

    def __init__(self, dim: int, num_heads: int, causal: bool = False):
        """Create the projections."""
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``[N, T, dim]``."""
        n, t, d = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(x.transpose(1, 2).reshape(n, t, d))


class TorchAttention(Module):
    """Self-attention by PyTorch's own module."""

    def __init__(self, dim: int, num_heads: int):
        """Create the attention."""
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``[N, T, dim]``."""
        return self.attn(x, x, x, need_weights=False)[0]


class TransformerBlock(Module):
    """Pre-norm block: attention and an MLP, both with residual connections."""

    def __init__(self, dim: int, attention: Module):
        """Create the layers."""
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, dim + 1), nn.GELU(), nn.Linear(dim + 1, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``[N, T, dim]``."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(Module):
    """Patch embedding, class token and positions as bare parameters, one block."""

    def __init__(self, attention: Callable[[int, int], Module], num_classes: int = 3):
        """Create the layers."""
        super().__init__()
        dim = 4
        self.patch_embed = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.cls_token = Parameter(0.1 * torch.randn(1, 1, dim))
        self.pos_embed = Parameter(0.1 * torch.randn(1, 5, dim))
        self.blocks = nn.Sequential(TransformerBlock(dim, attention(dim, 2)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 1, 4, 4]`` to logits."""
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat((cls, x), dim=1)
        x = self.blocks(x + self.pos_embed)
        return self.head(self.norm(x)[:, 0])


class HandwrittenVisionTransformer(VisionTransformer):
    """The same as one with PyTorch's attention, with layers for its projections."""

    def __init__(self, model: VisionTransformer):
        """Take over the parameters.

        Args:
            model: The vision transformer.
        """
        super().__init__(SelfAttention)
        state = model.state_dict()
        names = {name: self.original_name(name) for name in self.state_dict()}
        self.double().load_state_dict({n: state[old] for n, old in names.items()})

    def original_name(self, name: str) -> str:
        """Translate the name of a parameter.

        Args:
            name: The name in this model.

        Returns:
            The name in the vision transformer with PyTorch's attention.
        """
        name = name.replace("attn.qkv.", "attn.attn.in_proj_")
        return name.replace("attn.proj.", "attn.attn.out_proj.")


class GPT(Module):
    """Causal decoder; the head's weight is the token embedding's.

    The positions are embedded once, and shared over the batch.
    """

    VOCABULARY = 4

    def __init__(self, flat: bool):
        """Create the layers, and tie the weights.

        Args:
            flat: Whether logits come as ``[N T, C]``, otherwise as ``[N, C, T]``.
        """
        super().__init__()
        dim = 4
        self.flat = flat
        self.tok = nn.Embedding(self.VOCABULARY, dim)
        self.pos = nn.Embedding(5, dim)
        self.drop = nn.Dropout(0.1)
        self.block = TransformerBlock(dim, SelfAttention(dim, 2, causal=True))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.VOCABULARY, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, idx: Tensor) -> Tensor:
        """Map tokens ``[N, T]`` to logits."""
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.tok(idx) + self.pos(pos))
        logits = self.head(self.ln_f(self.block(x)))
        return logits.reshape(-1, self.VOCABULARY) if self.flat else logits.mT


class LSTMClassifier(Module):
    """Token embedding, LSTM, and a classifier on the last hidden state."""

    def __init__(self, num_classes: int = 3):
        """Create the layers."""
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=0)
        self.lstm = nn.LSTM(3, 3, batch_first=True)
        self.fc = nn.Linear(3, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[N, T]`` to logits."""
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.fc(hidden[-1])


class UnrolledLSTMClassifier(Module):
    """The same as an LSTM classifier, with the recurrence written by hand."""

    def __init__(self, model: LSTMClassifier):
        """Take over the parameters.

        Args:
            model: The LSTM classifier.
        """
        super().__init__()
        self.embedding, self.fc, lstm = model.embedding, model.fc, model.lstm
        gates = 4 * lstm.hidden_size
        self.ih = nn.Linear(lstm.input_size, gates)
        self.hh = nn.Linear(lstm.hidden_size, gates)
        for layer, kind in ((self.ih, "ih"), (self.hh, "hh")):
            layer.weight = getattr(lstm, f"weight_{kind}_l0")
            layer.bias = getattr(lstm, f"bias_{kind}_l0")

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[N, T]`` to logits."""
        x = self.embedding(tokens)
        hidden = cell = x.new_zeros(len(x), self.hh.in_features)
        for step in x.unbind(1):
            i, f, g, o = (self.ih(step) + self.hh(hidden)).chunk(4, dim=1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return self.fc(hidden)

    def original_name(self, name: str) -> str:
        """Translate the name of a parameter.

        Args:
            name: The name in this model.

        Returns:
            The name in the LSTM classifier.
        """
        layer, _, kind = name.rpartition(".")
        return f"lstm.{kind}_{layer}_l0" if layer in ("ih", "hh") else name


class DoubleConv(Module):
    """Two convolutions with group normalization in between."""

    def __init__(self, inplanes: int, planes: int):
        """Create the layers."""
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inplanes, planes, 3, padding=1),
            nn.GroupNorm(1, planes),
            nn.ReLU(inplace=True),
            nn.Conv2d(planes, planes, 3, padding=1, bias=False),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, inplanes, H, W]`` to ``[N, planes, H, W]``."""
        return self.net(x)


class UNet(Module):
    """Contracting and expanding path with a skip connection; logits per pixel."""

    def __init__(self, num_classes: int = 2):
        """Create the layers."""
        super().__init__()
        self.down = DoubleConv(1, 2)
        self.pool = nn.MaxPool2d(2)
        self.bottom = DoubleConv(2, 3)
        self.up = nn.ConvTranspose2d(3, 2, kernel_size=2, stride=2)
        self.fuse = DoubleConv(4, 2)
        self.out = nn.Conv2d(2, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 1, H, W]`` to ``[N, C, H, W]``."""
        skip = self.down(x)
        x = self.up(self.bottom(self.pool(skip)))
        return self.out(self.fuse(torch.cat([skip, x], dim=1)))


class MixerBlock(Module):
    """An MLP across positions, between transpositions, and one across channels."""

    def __init__(self, positions: int, channels: int):
        """Create the layers."""
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.tokens = nn.Sequential(
            nn.Linear(positions, 3), nn.GELU(), nn.Linear(3, positions)
        )
        self.norm2 = nn.LayerNorm(channels)
        self.channels = nn.Sequential(
            nn.Linear(channels, 3), nn.GELU(), nn.Linear(3, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``[N, positions, channels]``."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(Module):
    """Patch embedding, one mixer block, linear head on all positions."""

    def __init__(self, num_classes: int = 3):
        """Create the layers."""
        super().__init__()
        self.embed = nn.Conv2d(1, 4, kernel_size=2, stride=2)
        self.block = MixerBlock(4, 4)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 1, 4, 4]`` to logits."""
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.block(x).flatten(1))


class Siamese(Module):
    """One trunk, called twice, and a classifier on the distance of the embeddings."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8, 4),
            nn.Tanh(),
        )
        self.head = nn.Linear(4, 1)

    def forward(self, pair: Tensor) -> Tensor:
        """Map pairs of images ``[N, 2, 1, 4, 4]`` to logits ``[N, 1]``."""
        left, right = self.trunk(pair[:, 0]), self.trunk(pair[:, 1])
        return self.head(torch.abs(left - right))


class MixtureOfExperts(Module):
    """Experts on all samples, weighted by a softmax gate.

    The first mixture has modules for experts and combines them with ``bmm``, the second
    stacks the experts' weights in one parameter and combines them with ``einsum``.
    """

    def __init__(self, num_experts: int = 3, num_classes: int = 3):
        """Create gates and experts."""
        super().__init__()
        self.gate1 = nn.Linear(4, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 4))
            for _ in range(num_experts)
        )
        self.gate2 = nn.Linear(4, num_experts, bias=False)
        self.w = Parameter(0.5 * torch.randn(num_experts, 4, num_classes))
        self.b = Parameter(0.5 * torch.randn(num_experts, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 4]`` to logits."""
        gate = self.gate1(x).softmax(-1)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        x = torch.bmm(gate.unsqueeze(1), experts).squeeze(1)
        gate = F.softmax(self.gate2(x), dim=-1)
        return torch.einsum("ne,nec->nc", gate, self.project(x) + self.b)

    def project(self, x: Tensor) -> Tensor:
        """Map ``[N, 4]`` to what the second experts add their biases to."""
        return torch.einsum("nd,edc->nec", x, self.w)


class LinearMixtureOfExperts(MixtureOfExperts):
    """The same, with one linear layer for the second experts."""

    def __init__(self, model: MixtureOfExperts):
        """Take over the parameters.

        Args:
            model: The mixture of experts.
        """
        super().__init__()
        state = model.state_dict()
        weight = state.pop("w").transpose(1, 2).flatten(0, 1)
        del self.w
        self.layer = nn.Linear(4, len(weight), bias=False)
        self.double().load_state_dict({**state, "layer.weight": weight})

    def project(self, x: Tensor) -> Tensor:
        """Map ``[N, 4]`` to what the second experts add their biases to."""
        return self.layer(x).unflatten(1, self.b.shape)

    def original_name(self, name: str) -> str:
        """Translate the name of a parameter.

        Args:
            name: The name in this model.

        Returns:
            The name in the mixture of experts.
        """
        return "w" if name == "layer.weight" else name


class Architecture(NamedTuple):
    """How to make a problem.

    Attributes:
        model: Makes the model.
        x: Makes the input.
        loss: Makes the loss.
        y: Makes the target.
        unflattened: The same, where axis 0 of the loss input is the batch, if it is not
            here: several rows of the loss input belong to one sample.
    """

    model: Callable[[], Module]
    x: Callable[[], Tensor]
    y: Callable[[], Tensor]
    loss: Callable[[], Module] = nn.CrossEntropyLoss
    unflattened: Optional[Architecture] = None

    def problem(self, seed: Optional[int] = 0) -> Problem:
        """Make model and data.

        Args:
            seed: Seed of the random numbers. Default: 0.

        Returns:
            The problem, in evaluation mode and double precision.
        """
        torch.manual_seed(seed)
        model = randomize(self.model().double()).eval()
        x, y = (
            t.double() if t.is_floating_point() else t for t in (self.x(), self.y())
        )
        return Problem(model, self.loss(), (x,), (y,))


def images(n: int, channels: int, size: int) -> Callable[[], Tensor]:
    """Return a function that draws images ``[n, channels, size, size]``."""
    return lambda: torch.randn(n, channels, size, size)


def classes(*shape: int, num_classes: int = 3) -> Callable[[], Tensor]:
    """Return a function that draws class indices."""
    return lambda: torch.randint(num_classes, shape)


def gpt(flat: bool, *logit_rows: int, **options: Any) -> Architecture:
    """Return the row of a decoder that is trained on 3 sequences of 4 tokens."""
    return Architecture(
        lambda: GPT(flat),
        classes(3, 4, num_classes=GPT.VOCABULARY),
        classes(*logit_rows, num_classes=GPT.VOCABULARY),
        lambda: nn.CrossEntropyLoss(reduction="sum"),
        **options,
    )


ARCHITECTURES: Dict[str, Architecture] = {
    "resnet": Architecture(ResNet, images(3, 2, 16), classes(3)),
    "densenet": Architecture(DenseNet, images(3, 1, 4), classes(3)),
    "mobilenet": Architecture(MobileNet, images(3, 2, 8), classes(3)),
    "vgg": Architecture(VGG, images(3, 2, 8), classes(3)),
    "convnext": Architecture(ConvNeXt, images(3, 2, 6), classes(3)),
    "vit-multihead-attention": Architecture(
        lambda: VisionTransformer(TorchAttention), images(3, 1, 4), classes(3)
    ),
    "vit-handwritten-attention": Architecture(
        lambda: VisionTransformer(SelfAttention), images(3, 1, 4), classes(3)
    ),
    "gpt-transposed-logits": gpt(False, 3, 4),
    "gpt-flat-logits": gpt(True, 12, unflattened=gpt(False, 3, 4)),
    "lstm": Architecture(
        LSTMClassifier,
        lambda: torch.tensor([[1, 2, 3], [4, 1, 0], [2, 2, 0]]),
        classes(3),
    ),
    "unet": Architecture(UNet, images(2, 1, 4), classes(2, 4, 4, num_classes=2)),
    "mixer": Architecture(Mixer, images(3, 1, 4), classes(3)),
    "siamese": Architecture(
        Siamese,
        lambda: torch.randn(3, 2, 1, 4, 4),
        lambda: torch.randint(2, (3, 1)).float(),
        nn.BCEWithLogitsLoss,
    ),
    "mixture-of-experts": Architecture(
        MixtureOfExperts,
        lambda: torch.randn(4, 4),
        lambda: torch.randn(4, 3),
        nn.MSELoss,
    ),
}
