"""The networks that are measured, with random data of the right shape.

3C3D and All-CNN-C are the CIFAR networks of the DeepOBS benchmark suite (Schneider et
al., ICLR 2019), with CIFAR-10 and CIFAR-100 as their problems. The transformers are
small ones of the kinds that are in use, in nothing but PyTorch: their parameters sit in
layers of the library's table, in layers that users write, and in the model itself.
"""

from math import sqrt
from typing import Callable, Dict, NamedTuple, Tuple

import torch
from torch import Tensor, manual_seed, rand, randint
from torch.nn import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2d,
    Module,
    Parameter,
    ReLU,
    Sequential,
    ZeroPad2d,
)
from torch.nn.functional import gelu, relu, silu, softmax


def mlp() -> Sequential:
    """Make the fully connected network 784-512-256-10.

    Returns:
        A network for inputs of shape ``[N, 784]``.
    """
    return Sequential(
        Linear(784, 512), ReLU(), Linear(512, 256), ReLU(), Linear(256, 10)
    )


def net_3c3d() -> Sequential:
    """Make 3C3D: three convolutions, three dense layers.

    Its pooling keeps ``ceil(size / 2)`` positions. What that pads is a zero row and a
    zero column, which a maximum of non-negative numbers does not see.

    Returns:
        A network for inputs of shape ``[N, 3, 32, 32]``.
    """

    def pool() -> Tuple[Module, Module]:
        return ZeroPad2d((0, 1, 0, 1)), MaxPool2d(3, stride=2)

    return Sequential(
        *(Conv2d(3, 64, 5), ReLU(), *pool()),
        *(Conv2d(64, 96, 3), ReLU(), *pool()),
        *(Conv2d(96, 128, 3, padding=1), ReLU(), *pool()),
        *(Flatten(), Linear(1152, 512), ReLU(), Linear(512, 256), ReLU()),
        Linear(256, 10),
    )


def all_cnn_c() -> Sequential:
    """Make All-CNN-C (Springenberg et al., 2015): nine convolutions, no dense layer.

    Returns:
        A network for inputs of shape ``[N, 3, 32, 32]``.
    """
    return Sequential(
        Dropout(0.2),
        *(Conv2d(3, 96, 3, padding=1), ReLU()),
        *(Conv2d(96, 96, 3, padding=1), ReLU()),
        *(Conv2d(96, 96, 3, padding=1, stride=2), ReLU()),
        Dropout(0.5),
        *(Conv2d(96, 192, 3, padding=1), ReLU()),
        *(Conv2d(192, 192, 3, padding=1), ReLU()),
        *(Conv2d(192, 192, 3, padding=1, stride=2), ReLU()),
        Dropout(0.5),
        *(Conv2d(192, 192, 3), ReLU()),
        *(Conv2d(192, 192, 1), ReLU()),
        *(Conv2d(192, 100, 1), ReLU()),
        *(AvgPool2d(6), Flatten()),
    )


# Size of the transformers
FEATURES, HEADS, LAYERS, TOKENS, VOCABULARY = 128, 4, 4, 64, 1000


def split_heads(x: Tensor) -> Tensor:
    """Give each head its share of the features.

    Args:
        x: Features ``[N, T, D]``.

    Returns:
        Those of each of H heads, of shape ``[N, H, T, D / H]``.
    """
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Average values over positions, weighted by how well keys fit queries.

    Args:
        q: Queries ``[N, H, T, D / H]``.
        k: Keys, of the same shape.
        v: Values, of the same shape.
        causal: Whether a position sees only itself and those before.

    Returns:
        The averages of all heads side by side, of shape ``[N, T, D]``.
    """
    scores = q @ k.transpose(-2, -1) / sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return (softmax(scores, -1) @ v).transpose(1, 2).flatten(-2)


class Conv1D(Module):
    """GPT-2's linear layer: a transposed weight, and positions that are flattened."""

    def __init__(self, in_features: int, out_features: int):
        """Make the parameters.

        Args:
            in_features: Number of input features I.
            out_features: Number of output features O.
        """
        super().__init__()
        self.weight = Parameter(0.02 * torch.randn(in_features, out_features))
        self.bias = Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map the features.

        Args:
            x: Features ``[N, T, I]``.

        Returns:
            Features ``[N, T, O]``.
        """
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class GPT2Block(Module):
    """Attention and two dense layers, each normalised before and added."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(FEATURES), LayerNorm(FEATURES)
        self.attention_in = Conv1D(FEATURES, 3 * FEATURES)
        self.attention_out = Conv1D(FEATURES, FEATURES)
        self.dense_in = Conv1D(FEATURES, 4 * FEATURES)
        self.dense_out = Conv1D(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Update the features.

        Args:
            x: Features ``[N, T, D]``.

        Returns:
            Features of the same shape.
        """
        q, k, v = map(split_heads, self.attention_in(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.attention_out(attend(q, k, v, causal=True))
        hidden = gelu(self.dense_in(self.norm2(x)), approximate="tanh")
        return x + self.dense_out(hidden)


class GPT2(Module):
    """A small GPT-2: ``Conv1D`` layers, a position table, the token table as head."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.tokens = Embedding(VOCABULARY, FEATURES)
        self.positions = Embedding(TOKENS, FEATURES)
        self.blocks = Sequential(*(GPT2Block() for _ in range(LAYERS)))
        self.norm = LayerNorm(FEATURES)
        self.head = Linear(FEATURES, VOCABULARY, bias=False)
        for table in (self.tokens, self.positions):
            torch.nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next tokens.

        Args:
            tokens: Numbers of tokens, of shape ``[N, T]``.

        Returns:
            Logits ``[N, T, C]``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class RMSNorm(Module):
    """Division by the root of the mean square, written by hand as Llama has it."""

    def __init__(self):
        """Make the scale."""
        super().__init__()
        self.weight = Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and scale.

        Args:
            x: Features ``[N, T, D]``.

        Returns:
            Features of the same shape.
        """
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position.

    Args:
        x: Queries or keys of each head, of shape ``[N, H, T, D / H]``.

    Returns:
        A tensor of the same shape.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=x.dtype, device=x.device) / half
    positions = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    angles = torch.outer(positions, 10000**-exponents).repeat(1, 2)
    x1, x2 = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-x2, x1), -1) * angles.sin()


class LlamaBlock(Module):
    """Attention with rotary positions and a gated dense layer, without biases."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        hidden = 344  # 8/3 of the features, as a multiple of 8

        def dense(in_features: int, out_features: int) -> Linear:
            return Linear(in_features, out_features, bias=False)

        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.q, self.k, self.v = (dense(FEATURES, FEATURES) for _ in range(3))
        self.out = dense(FEATURES, FEATURES)
        self.gate, self.up = dense(FEATURES, hidden), dense(FEATURES, hidden)
        self.down = dense(hidden, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Update the features.

        Args:
            x: Features ``[N, T, D]``.

        Returns:
            Features of the same shape.
        """
        z = self.norm1(x)
        q, k, v = (split_heads(layer(z)) for layer in (self.q, self.k, self.v))
        x = x + self.out(attend(rotate(q), rotate(k), v, causal=True))
        z = self.norm2(x)
        return x + self.down(silu(self.gate(z)) * self.up(z))


def llama() -> Sequential:
    """Make a small Llama: RMS norms, rotary positions, SwiGLU, no biases.

    Returns:
        A network for numbers of tokens, of shape ``[N, T]``.
    """
    return Sequential(
        Embedding(VOCABULARY, FEATURES),
        *(LlamaBlock() for _ in range(LAYERS)),
        RMSNorm(),
        Linear(FEATURES, VOCABULARY, bias=False),
    )


class ViTBlock(Module):
    """Attention and two dense layers, each normalised before and added."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(FEATURES), LayerNorm(FEATURES)
        self.attention_in = Linear(FEATURES, 3 * FEATURES)
        self.attention_out = Linear(FEATURES, FEATURES)
        self.dense = Sequential(
            Linear(FEATURES, 4 * FEATURES), GELU(), Linear(4 * FEATURES, FEATURES)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Update the features.

        Args:
            x: Features ``[N, T, D]``.

        Returns:
            Features of the same shape.
        """
        q, k, v = map(split_heads, self.attention_in(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.attention_out(attend(q, k, v, causal=False))
        return x + self.dense(self.norm2(x))


class ViT(Module):
    """A small vision transformer: patches of 4x4, a class token, a position table."""

    def __init__(self):
        """Make the layers, and the parameters that belong to none."""
        super().__init__()
        self.patches = Conv2d(3, FEATURES, 4, stride=4)
        self.class_token = Parameter(0.02 * torch.randn(1, 1, FEATURES))
        self.positions = Parameter(0.02 * torch.randn(1, TOKENS + 1, FEATURES))
        self.blocks = Sequential(*(ViTBlock() for _ in range(LAYERS)))
        self.norm = LayerNorm(FEATURES)
        self.head = Linear(FEATURES, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images.

        Args:
            x: Images ``[N, 3, 32, 32]``.

        Returns:
            Logits ``[N, 100]``.
        """
        x = self.patches(x).flatten(2).transpose(1, 2)
        token = self.class_token.expand(x.shape[0], -1, -1)
        x = torch.cat((token, x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class MeanOverPositions(Module):
    """The mean over positions, as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Average.

        Args:
            x: Features ``[N, T, D]``.

        Returns:
            Their mean over positions, of shape ``[N, D]``.
        """
        return x.mean(1)


def transformer() -> Sequential:
    """Make a transformer of dense layers, which classifies sequences.

    Returns:
        A network for inputs of shape ``[N, T, 32]``.
    """
    return Sequential(
        Linear(32, FEATURES),
        *(ViTBlock() for _ in range(LAYERS)),
        *(LayerNorm(FEATURES), MeanOverPositions(), Linear(FEATURES, 10)),
    )


class ResidualBlock(Module):
    """Two convolutions with normalisation, added to the input."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        """Make the layers.

        Args:
            in_channels: Number of input channels.
            out_channels: Number of output channels.
            stride: Of the first convolution, and of the shortcut.
        """
        super().__init__()
        self.conv1 = Conv2d(
            in_channels, out_channels, 3, stride=stride, padding=1, bias=False
        )
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = BatchNorm2d(out_channels), BatchNorm2d(out_channels)
        self.shortcut = Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = Sequential(
                Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Update the channels.

        Args:
            x: Channels ``[N, C_in, H, W]``.

        Returns:
            Channels ``[N, C_out, H / stride, W / stride]``.
        """
        z = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(z)) + self.shortcut(x))


def resnet18() -> Sequential:
    """Make ResNet-18 (He et al., 2016) for 200 classes.

    Returns:
        A network for images of shape ``[N, 3, 64, 64]``, in evaluation mode: in
        training mode, batch normalisation leaves no gradient of a single sample.
    """
    channels = (64, 64, 128, 256, 512)
    blocks = []
    for before, after in zip(channels, channels[1:]):
        stride = 1 if before == after else 2
        blocks += [
            ResidualBlock(before, after, stride),
            ResidualBlock(after, after, 1),
        ]
    return Sequential(
        *(Conv2d(3, 64, 7, stride=2, padding=3, bias=False), BatchNorm2d(64), ReLU()),
        *(MaxPool2d(3, stride=2, padding=1), *blocks),
        *(AvgPool2d(2), Flatten(), Linear(512, 200)),
    ).eval()


class Problem(NamedTuple):
    """A network with the shape of its data.

    Args:
        title: What reports call it.
        make: Makes the network.
        num_params: Number of its parameters.
        input_shape: Shape of one sample.
        num_classes: Number of classes.
        batch_size: Number of samples that are measured by default.
        tokens: Whether the inputs are classes, too, and each has a label.
    """

    title: str
    make: Callable[[], Module]
    num_params: int
    input_shape: Tuple[int, ...]
    num_classes: int
    batch_size: int
    tokens: bool = False

    def data(self, batch_size: int, device: str) -> Tuple[Tensor, Tensor]:
        """Draw a batch.

        Args:
            batch_size: Number of samples N.
            device: Where the tensors go.

        Returns:
            Inputs ``[N, *input_shape]`` and labels: of shape ``[N]``, or like the
            inputs if these are tokens.
        """
        manual_seed(0)
        shape = (batch_size, *self.input_shape)
        if self.tokens:
            inputs, labels = randint(self.num_classes, (2, *shape))
        else:
            inputs, labels = rand(shape), randint(self.num_classes, (batch_size,))
        return inputs.to(device), labels.to(device)

    def model(self, device: str) -> Module:
        """Make the network, with the same initial parameters each time.

        Args:
            device: Where the parameters go.

        Returns:
            The network, in the mode in which it is measured.

        Raises:
            RuntimeError: If the number of parameters is not the published one.
        """
        manual_seed(1)
        model = self.make().to(device)
        num_params = sum(p.numel() for p in model.parameters())
        if num_params != self.num_params:
            raise RuntimeError(
                f"{self.title} has {num_params} parameters, expected {self.num_params}."
            )
        return model


PROBLEMS: Dict[str, Problem] = {
    "mlp": Problem("MLP 784-512-256-10", mlp, 535_818, (784,), 10, 128),
    "3c3d": Problem("3C3D", net_3c3d, 895_210, (3, 32, 32), 10, 32),
    "allcnnc": Problem("All-CNN-C", all_cnn_c, 1_387_108, (3, 32, 32), 100, 8),
    "gpt2": Problem(
        "GPT-2, 4 layers, T = 64", GPT2, 929_536, (TOKENS,), VOCABULARY, 8, tokens=True
    ),
    "llama": Problem(
        "Llama, 4 layers, T = 64",
        llama,
        1_047_680,
        (TOKENS,),
        VOCABULARY,
        8,
        tokens=True,
    ),
    "vit": Problem("ViT, 4 layers, T = 65", ViT, 820_964, (3, 32, 32), 100, 8),
    "transformer": Problem(
        "Transformer, 4 layers, T = 64", transformer, 798_858, (64, 32), 10, 16
    ),
    "transformer256": Problem(
        "Transformer, 4 layers, T = 256", transformer, 798_858, (256, 32), 10, 8
    ),
    "resnet18": Problem("ResNet-18", resnet18, 11_279_112, (3, 64, 64), 200, 8),
}
