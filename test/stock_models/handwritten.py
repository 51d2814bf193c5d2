"""Models as people write them by hand, with nothing but PyTorch."""

import math
from typing import Any, Callable, List, Tuple

import torch
import torch.nn.functional as F
from rows import CLASSES, VOCABULARY, Batch, Row, itself, pixels
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.utils import parametrizations

D = 4  # features


def vectors(*shape: int) -> Callable[[int, int], Batch]:
    """Draw vectors ``[N, *shape]``; the length plays no role."""
    return lambda n, length: {"x": torch.randn(n, *shape, dtype=torch.float64)}


def sequence(num_samples: int, length: int) -> Batch:
    """Draw tokens ``[N, T]``."""
    return {"x": torch.randint(VOCABULARY, (num_samples, length))}


def points(num_samples: int, length: int) -> Batch:
    """Draw a sequence of vectors ``[N, T, D]``."""
    return {"x": torch.randn(num_samples, length, D, dtype=torch.float64)}


def graph(num_samples: int, length: int) -> Batch:
    """Draw nodes ``[N, T, D]``, and weights of their edges ``[N, T, T]``."""
    edges = torch.rand(num_samples, length, length, dtype=torch.float64)
    return {**points(num_samples, length), "edges": edges}


def clicks(num_samples: int, length: int) -> Batch:
    """Draw features of a user, and the items that each has looked at, one by one."""
    counts = 1 + torch.arange(num_samples)
    return {
        **vectors(D)(num_samples, length),
        "user": torch.randint(VOCABULARY, (num_samples,)),
        "items": torch.randint(VOCABULARY, (int(counts.sum()),)),
        "offsets": counts.cumsum(0) - counts,
    }


def noised(num_samples: int, length: int) -> Batch:
    """Draw images, and how much noise is in each."""
    steps = torch.randint(100, (num_samples,)).double()
    return {**pixels(4, "x")(num_samples, length), "step": steps}


def as_a_whole(model: Module, batch: Batch) -> Tensor:
    """Call a model whose samples can't be picked along axis 0 of all inputs."""
    return model(**batch)


class NanoGPT(Module):
    """A decoder with fused projections, a mask in a buffer, and tied tables."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, D), nn.Embedding(8, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D))
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[N, T]`` to logits."""
        n, t = x.size()
        x = F.dropout(self.tokens(x) + self.positions(torch.arange(t)), 0.1)
        heads = [
            y.view(n, t, 2, D // 2).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(D, dim=2)
        ]
        scores = heads[0] @ heads[1].transpose(-2, -1) / math.sqrt(D // 2)
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, -math.inf)
        y = F.dropout(scores.softmax(-1), 0.1) @ heads[2]
        x = x + self.out(y.transpose(1, 2).contiguous().view(n, t, D))
        return self.head(x + self.mlp(self.norm2(x)))


class VectorQuantized(Module):
    """A code book that is not trained; what it costs is returned, too."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.encode, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)
        self.codes = nn.Parameter(torch.randn(5, D), requires_grad=False)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Take the nearest code for each vector."""
        z = self.encode(x)
        code = self.codes[torch.cdist(z, self.codes).argmin(-1)].type_as(x[0])
        loss = (z - code).square().mean() + (code - z.detach()).square().mean()
        return self.head((z + (code - z).detach()).tanh()), loss


class TransformerXL(Module):
    """Attention with relative positions that are shifted by a change of shape."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.qkv, self.r = nn.Linear(D, 3 * D, bias=False), nn.Linear(2, D, bias=False)
        self.u, self.v = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[N, T]`` to logits; inside, time comes first."""
        h = self.tokens(x).transpose(0, 1)
        t, n, _ = h.shape
        q, k, v = (y.view(t, n, 2, 2) for y in self.qkv(h).chunk(3, -1))
        positions = torch.arange(t - 1, -1, -1.0, dtype=h.dtype)[:, None]
        waves = torch.cat([positions.sin(), positions.cos()], 1)
        r = self.r(waves).view(t, 2, 2)
        content = torch.einsum("ind,jnd->ijn", q.flatten(2) + self.u, k.flatten(2))
        place = torch.einsum("inhd,jhd->ijn", q + self.v, r)
        place = torch.cat([place.new_zeros(t, 1, n), place], 1)
        place = place.view(t + 1, t, n)[1:].view(t, t, n)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores = (content + place).masked_fill(future[:, :, None], -1e9).softmax(1)
        mixed = torch.einsum("ijn,jnhd->inhd", scores, v).reshape(t, n, D)
        return self.head(h + mixed).transpose(0, 1)


class WaveNet(Module):
    """Dilated, gated, causal convolutions with skip connections."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, D)
        self.gates = nn.ModuleList(
            nn.Conv1d(D, 2 * D, 2, dilation=2**i) for i in range(2)
        )
        self.skips = nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(2))
        self.head = nn.Conv1d(D, VOCABULARY, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[N, T]`` to logits."""
        x, skip = self.tokens(x).transpose(1, 2), 0
        for gate, layer in zip(self.gates, self.skips):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            x = x + a.tanh() * b.sigmoid()
            skip = skip + layer(x)
        return self.head(F.relu(skip)).transpose(1, 2)


class TCN(Module):
    """Convolutions with normalized weights that are cut off at the end."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        first = nn.Conv1d(D, 6, 2, padding=1)
        self.first = parametrizations.weight_norm(first)
        self.second = nn.Conv1d(6, D, 2, padding=2, dilation=2)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence ``[N, T, D]`` to logits."""
        h = F.relu(self.first(x.mT)[:, :, :-1].contiguous(), inplace=True)
        h = F.relu(self.second(h)[:, :, :-2].contiguous() + x.mT)
        return self.head(h[:, :, -1])


class DiffusionUNet(Module):
    """A U-Net whose normalized features are scaled and shifted by the time."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.time = nn.Sequential(nn.Linear(D, 8), nn.SiLU(), nn.Linear(8, 2 * D))
        self.enter, self.down = nn.Conv2d(3, D, 3, padding=1), nn.Conv2d(D, D, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(2, D), nn.Conv2d(D, D, 3, padding=1)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.exit = nn.Conv2d(2 * D, 3, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Map images ``[N, 3, 4, 4]`` to two pixels of three channels each."""
        angles = step[:, None] * torch.tensor([1.0, 0.01], dtype=x.dtype)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        scale, shift = time[:, :, None, None].chunk(2, dim=1)
        x = self.enter(x)
        h = F.silu(self.norm(self.down(x)) * (1 + scale) + shift)
        flat = h.flatten(2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            self.query(flat), self.key(flat), self.value(flat)
        )
        h = h + mixed.transpose(1, 2).reshape_as(h)
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.exit(torch.cat([x, h], 1)).flatten(2).mT[:, :2]


class GCN(Module):
    """Convolutions on graphs: each sample has its own matrix of edges."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(D, 5)), nn.Parameter(torch.randn(5))
        self.second, self.head = nn.Linear(5, D, bias=False), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Map nodes ``[N, T, D]`` to logits."""
        edges = edges + torch.eye(edges.shape[-1], dtype=x.dtype)
        degrees = edges.sum(-1).rsqrt()
        edges = degrees[:, :, None] * edges * degrees[:, None]
        x = F.relu(torch.bmm(edges, x @ self.w) + self.b)
        return self.head(torch.matmul(edges, self.second(x)).max(1).values)


class PointNet(Module):
    """Points that are moved by a matrix which the model computes from them."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.first, self.matrix = nn.Conv1d(D, 6, 1), nn.Linear(6, D * D)
        self.second, self.head = nn.Conv1d(D, 6, 1), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map points ``[N, T, D]`` to logits."""
        h = torch.max(F.relu(self.first(x.mT)), 2, keepdim=True)[0].view(-1, 6)
        start = torch.eye(D, dtype=x.dtype).flatten().view(1, -1).repeat(len(x), 1)
        x = torch.bmm(x, (self.matrix(h) + start).view(-1, D, D))
        return self.head(torch.max(F.relu(self.second(x.mT)), 2)[0])


class NeuralODE(Module):
    """A layer that is called again and again, by a method of Runge and Kutta."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.f = nn.Sequential(nn.Linear(D + 1, 6), nn.Tanh(), nn.Linear(6, D))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, D]`` to logits."""

        def f(t: float, y: Tensor) -> Tensor:
            return self.f(torch.cat([y, torch.full_like(y[:, :1], t)], 1))

        h = 0.5
        for t in (0.0, 0.5):
            k1 = f(t, x)
            k2 = f(t + h / 2, x + h / 2 * k1)
            k3 = f(t + h / 2, x + h / 2 * k2)
            k4 = f(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(x)


class Hypernetwork(Module):
    """A layer whose weight another one computes, and one with a weight per sample."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.z = nn.Parameter(torch.randn(3))
        self.shared, self.own = nn.Linear(3, 5 * D), nn.Linear(D, CLASSES * 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, D]`` to logits."""
        h = torch.tanh(F.linear(x, self.shared(self.z).view(5, D)))
        return torch.einsum("noi,ni->no", self.own(x).view(-1, CLASSES, 5), h)


class DLRM(Module):
    """A recommender: tables, bags of rows, and all products of two embeddings."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.dense, self.user = nn.Linear(D, 3), nn.Embedding(VOCABULARY, 3)
        self.items = nn.EmbeddingBag(VOCABULARY, 3, mode="sum")
        self.head = nn.Linear(6, CLASSES)

    def forward(
        self, x: Tensor, user: Tensor, items: Tensor, offsets: Tensor
    ) -> Tensor:
        """Map features, users, and items to logits."""
        parts = [self.dense(x).relu(), self.user(user), self.items(items, offsets)]
        both = torch.stack(parts, 1)
        i, j = torch.tril_indices(3, 3, -1)
        products = torch.bmm(both, both.transpose(1, 2))[:, i, j]
        return self.head(torch.cat([both[:, 0], products], 1))


class Capsules(Module):
    """Routing by agreement, the last step of which is differentiated."""

    def __init__(self):
        """Create the weights."""
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, D, CLASSES, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Map capsules ``[N, D, 3]`` to the lengths of others."""

        def squash(v: Tensor) -> Tensor:
            size = v.norm(dim=-1, keepdim=True)
            return size / (1 + size**2) * v

        votes = (self.w @ x[:, :, None, :, None]).squeeze(-1)
        fixed, logits = votes.detach(), x.new_zeros(len(x), D, CLASSES, 1)
        for _ in range(2):
            mean = squash((logits.softmax(2) * fixed).sum(1))
            logits = logits + (fixed * mean[:, None]).sum(-1, keepdim=True)
        return squash((logits.softmax(2) * votes).sum(1)).norm(dim=-1)


class PointerNetwork(Module):
    """A cell that starts from a learned input, and then takes what it points to."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.encoder = nn.LSTM(D, D, batch_first=True)
        self.cell, self.start = nn.LSTMCell(D, D), nn.Parameter(torch.randn(D))
        self.keys, self.query = nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.v = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence ``[N, T, D]`` to two pointers into it, ``[N, 2, T]``."""
        encoded, (h, c) = self.encoder(x)
        h, c, inputs, pointers = h[0], c[0], self.start.repeat(len(x), 1), []
        for _ in range(2):
            h, c = self.cell(inputs, (h, c))
            scores = torch.tanh(self.keys(encoded) + self.query(h).unsqueeze(1))
            pointers.append((scores * self.v).sum(-1))
            chosen = pointers[-1].argmax(1)[:, None, None].expand(-1, 1, D)
            inputs = x.gather(1, chosen).squeeze(1)
        return torch.stack(pointers, 1)


class NTM(Module):
    """A memory that begins as a parameter, and is read from and written to."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.memory = nn.Parameter(torch.randn(5, D))
        self.controller, self.head = nn.Linear(2 * D, D), nn.Linear(2 * D, CLASSES)
        self.key, self.erase, self.add = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence ``[N, T, D]`` to logits."""
        memory = self.memory.unsqueeze(0).expand(len(x), -1, -1)
        read = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            h = self.controller(torch.cat([step, read], 1)).tanh()
            near = F.cosine_similarity(memory, self.key(h).unsqueeze(1), dim=-1)
            w = near.softmax(1).unsqueeze(-1)
            read = (w * memory).sum(1)
            memory = memory * (1 - w * self.erase(h).sigmoid().unsqueeze(1))
            memory = memory + w * self.add(h).unsqueeze(1)
        return self.head(torch.cat([h, read], 1))


class FourierOperator(Module):
    """Complex weights, as pairs of real ones, for the low frequencies."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.w = nn.Parameter(torch.randn(CLASSES, CLASSES, 3, 2))
        self.beside = nn.Conv1d(CLASSES, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map functions ``[N, 3, 8]`` to others, channels last."""
        low = torch.fft.rfft(x)[:, :, :3]
        low = torch.einsum("bix,iox->box", low, torch.view_as_complex(self.w))
        wave = torch.fft.irfft(F.pad(low, (0, 2)), n=8)
        return F.gelu(wave + self.beside(x)).mT


class S4D(Module):
    """A long convolution whose kernel is computed from a diagonal state space."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.decay, self.c = (
            nn.Parameter(torch.randn(D, 3)),
            nn.Parameter(torch.randn(D, 3, 2)),
        )
        self.skip, self.head = nn.Parameter(torch.randn(D)), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence ``[N, T, D]`` to logits."""
        x, length = x.mT, x.shape[1]
        rates = -self.decay.exp() + 1j * torch.arange(3.0, dtype=x.dtype)
        powers = (0.1 * rates[..., None] * torch.arange(length)).exp()
        kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c), powers)
        spectrum = torch.fft.rfft(x, n=2 * length)
        spectrum = spectrum * torch.fft.rfft(kernel.real, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return self.head(F.gelu(y + x * self.skip[:, None]).mean(-1))


class KAN(Module):
    """A function of each input for each output, by radial basis functions."""

    def __init__(self):
        """Create the weights."""
        super().__init__()
        self.splines = nn.Parameter(torch.randn(CLASSES, D, 5))
        self.base = nn.Parameter(torch.randn(D, CLASSES))
        self.register_buffer("grid", torch.linspace(-2, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, D]`` to logits."""
        near = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        return torch.einsum("nig,oig->no", near, self.splines) + F.silu(x) @ self.base


class SpatialTransformer(Module):
    """An image that is turned by an angle which the model computes from it."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.place, self.conv = nn.Linear(48, 6), nn.Conv2d(3, 2, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 4, 4]`` to logits."""
        start = torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(
            self.place(x.flatten(1)).view(-1, 2, 3) + start, x.size(), False
        )
        x = F.grid_sample(x, grid, align_corners=False)
        return self.head(self.conv(x).relu().flatten(1))


class Quantized(Module):
    """Weights and activations that are rounded, with gradients as if they were not."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.first, self.head = nn.Linear(D, 6), nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.rand(6, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, D]`` to logits."""

        def rounded(w: Tensor, steps: float) -> Tensor:
            return w + (torch.round(w * steps) / steps - w).detach()

        weight = rounded(self.first.weight / self.scale, 8.0) * self.scale
        h = rounded(F.relu(F.linear(x, weight, self.first.bias)), 4.0)
        return F.linear(h, rounded(self.head.weight, 8.0), self.head.bias)


class Sign(torch.autograd.Function):
    """The sign, with a gradient of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute the sign."""
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Let gradients through where the input is small."""
        return gradient * (ctx.saved_tensors[0].abs() <= 1)


class Product(torch.autograd.Function):
    """A linear layer with a gradient of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, Tensor]:
        """Multiply with the other one."""
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.t() @ x


class Binary(Module):
    """Signs of data and of weights, by a function with a backward of its own."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.first, self.head = nn.Linear(D, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, D]`` to logits."""
        h = F.linear(x, Sign.apply(self.first.weight), self.first.bias)
        return self.head(Sign.apply(h))


class OwnLayer(Binary):
    """Data and a weight go into a function with a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, D]`` to logits."""
        return self.head(Product.apply(x, self.first.weight).tanh() + self.first.bias)


class SlotAttention(Module):
    """Slots that begin as a mean and deviations, and compete for what is there."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.mean, self.deviation = (nn.Parameter(torch.randn(1, 1, D)) for _ in "12")
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.cell, self.norm = nn.GRUCell(D, D), nn.LayerNorm(D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence ``[N, T, D]`` to logits of three slots."""
        noise = torch.randn(len(x), 3, D, dtype=x.dtype)
        mean = self.mean.expand(len(x), 3, -1)
        slots = mean + self.deviation.exp().expand(len(x), 3, -1) * noise
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            near = torch.einsum("nid,njd->nij", self.q(self.norm(slots)), k).softmax(1)
            near = near / near.sum(-1, keepdim=True)
            found = torch.einsum("nij,njd->nid", near, v).reshape(-1, D)
            slots = self.cell(found, slots.reshape(-1, D)).view(len(x), -1, D)
        return self.head(slots)


class MAML(Module):
    """A weight that each sample adapts, by a step that is differentiated through."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.w, self.rate = nn.Parameter(torch.randn(D)), nn.Parameter(torch.zeros(D))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence ``[N, T, D]`` to logits, adapted to its sums."""
        own = self.w.expand(len(x), -1)
        inner = (torch.einsum("ntd,nd->nt", x, own) - x.sum(-1)).square().mean(1).sum()
        (step,) = torch.autograd.grad(inner, own, create_graph=True)
        return self.head(torch.tanh(x * (own - self.rate.exp() * step)[:, None]))


HANDWRITTEN: List[Row] = [
    Row("By hand", name, build, inputs, itself, **options)
    for name, build, inputs, options in (
        ("nanoGPT", NanoGPT, sequence, {"train": True}),
        ("Transformer-XL", TransformerXL, sequence, {}),
        ("WaveNet", WaveNet, sequence, {}),
        ("TCN", TCN, points, {}),
        ("VQ", VectorQuantized, points, {"run": lambda m, batch: m(**batch)[0]}),
        ("Diffusion U-Net", DiffusionUNet, noised, {}),
        ("GCN", GCN, graph, {}),
        ("PointNet", PointNet, points, {}),
        ("Neural ODE", NeuralODE, vectors(D), {}),
        ("Hypernetwork", Hypernetwork, vectors(D), {}),
        ("DLRM", DLRM, clicks, {"run": as_a_whole}),
        ("Capsules", Capsules, vectors(D, 3), {}),
        ("Pointer network", PointerNetwork, points, {}),
        ("Neural Turing machine", NTM, points, {}),
        ("Fourier neural operator", FourierOperator, vectors(CLASSES, 8), {}),
        ("S4D", S4D, points, {}),
        ("KAN", KAN, vectors(D), {}),
        ("Spatial transformer", SpatialTransformer, pixels(4, "x"), {}),
        ("Quantized", Quantized, vectors(D), {}),
        ("Binary", Binary, vectors(D), {}),
        ("Slot attention", SlotAttention, points, {"train": True}),
        ("MAML", MAML, points, {}),
        ("Layer with its own backward", OwnLayer, vectors(D), {}),
    )
]
