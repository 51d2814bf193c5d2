"""Models written by hand: of points, rays, images and trees, placed by their values."""

from typing import Any, List

import torch
from handwritten import D, points, vectors
from rows import CLASSES, Row, itself, pixels
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F


class Points(Module):
    """What models of points ``[N, T, D]`` have in common.

    Attributes:
        near: How many features the second layer gets.
    """

    near = 2 * D

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(self.near, 6)
        self.head = nn.Linear(6, CLASSES)

    def cells(self, x: Tensor) -> Tensor:
        """Find the cells of a grid that points are in, with numbers of their own."""
        places = (2 * x[:, :, :2].sigmoid()).long()
        samples = torch.arange(len(x))[:, None]
        return 4 * samples + 2 * places[:, :, 0] + places[:, :, 1]


class VoxelNet(Points):
    """Points get the mean over their cell, of which there are as many as needed."""

    def forward(self, x: Tensor) -> Tensor:
        """Map points to logits."""
        h = self.first(x).relu().flatten(0, 1)
        cells, cell, sizes = torch.unique(
            self.cells(x).flatten(), return_inverse=True, return_counts=True
        )
        means = h.new_zeros(len(cells), D).index_add(0, cell, h) / sizes[:, None]
        both = torch.cat([h, means[cell]], 1)
        return self.head(self.second(both).unflatten(0, x.shape[:2]).amax(1))


class PointPillars(Points):
    """Points are added up in the pixels of an image."""

    near = 4 * D

    def forward(self, x: Tensor) -> Tensor:
        """Map points to logits."""
        image = x.new_zeros(4 * len(x), D)
        cells = self.cells(x).flatten()
        image.index_put_((cells,), self.first(x).flatten(0, 1), accumulate=True)
        return self.head(self.second(image.view(len(x), -1)).relu())


class DGCNN(Points):
    """Convolutions on edges to the nearest neighbours, in the space of features."""

    def forward(self, x: Tensor) -> Tensor:
        """Map points to logits."""
        h = self.first(x)
        near = torch.cdist(h, h).topk(2, largest=False).indices
        near = near + len(h[0]) * torch.arange(len(h))[:, None, None]
        others = h.flatten(0, 1)[near.flatten()].view(*near.shape, D)
        h = h[:, :, None].expand_as(others)
        edges = self.second(torch.cat([others - h, h], -1))
        return self.head(F.leaky_relu(edges).amax(2).amax(1))


class PointNet2(Points):
    """Centres that are far from each other, and what is near to them."""

    def forward(self, x: Tensor) -> Tensor:
        """Map points to logits."""
        rows, h = torch.arange(len(x)), self.first(x)
        chosen = [torch.zeros_like(rows)]
        for _ in range(2):
            centres = torch.stack([x[rows, index] for index in chosen], 1)
            chosen.append(torch.cdist(x, centres).amin(2).argmax(1))
        centres = x[rows[:, None], torch.stack(chosen, 1)]
        near = torch.cdist(centres, x).argsort(-1)[:, :, :2]
        rows = rows[:, None, None]
        moved = torch.cat([h[rows, near], x[rows, near] - centres[:, :, None]], -1)
        moved = self.second(moved).relu().amax(2)
        weights = 1 / (torch.cdist(x, centres) + 0.1)
        back = torch.bmm(weights / weights.sum(-1, keepdim=True), moved)
        return self.head(back.mean(1))


class SerializedPoints(Points):
    """Attention along a curve, on which the points of all samples are sorted."""

    near = D

    def forward(self, x: Tensor) -> Tensor:
        """Map points to logits."""
        h = self.first(x).flatten(0, 1)
        place = x[:, :, 0].sigmoid() + torch.arange(len(x), dtype=x.dtype)[:, None]
        order = place.flatten().argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        part = h[order].view(x.shape)
        mixed = F.scaled_dot_product_attention(part, part, part).flatten(0, 1)
        h = (h + mixed[back]).view(x.shape)
        return self.head(self.second(h).amax(1))


class TokenMerging(Points):
    """The tokens that are most alike become one."""

    near = D

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to logits."""
        h = self.first(x)
        one, two = h[:, ::2], h[:, 1::2]
        size = [F.normalize(part.detach(), dim=-1) for part in (one, two)]
        scores, partners = (size[0] @ size[1].mT).max(-1)
        order = scores.argsort(-1, descending=True)[:, :, None]
        partner = partners[:, :, None].gather(1, order[:, :1])
        kept = one.gather(1, order[:, 1:].expand(-1, -1, D))
        merged = one.gather(1, order[:, :1].expand(-1, -1, D))
        two = two.scatter_reduce(1, partner.expand(-1, -1, D), merged, "mean")
        return self.head(self.second(torch.cat([kept, two], 1)).relu().mean(1))


class Tree(Points):
    """Nodes of all samples' trees are computed from their children, by level."""

    near = 2 * D

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.second = nn.Linear(2 * D, D)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map four leaves to the logits of their root."""
        first = 7 * torch.arange(len(x))[:, None]
        leaves = (first + torch.arange(4)).flatten()
        values = self.first(x)[:, :4].flatten(0, 1).tanh()
        nodes = x.new_zeros(7 * len(x), D).index_copy(0, leaves, values)
        for level in ([[4, 0, 1], [5, 2, 3]], [[6, 4, 5]]):
            node, left, right = (first[..., None] + torch.tensor(level)).unbind(-1)
            both = torch.cat([nodes[left.flatten()], nodes[right.flatten()]], 1)
            nodes = nodes.index_copy(0, node.flatten(), self.second(both).tanh())
        return self.head(nodes[first[:, 0] + 6])


class CRF(Module):
    """The probability of labels, by all paths through a table of transitions."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.scores = nn.Linear(D, CLASSES)
        self.moves = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Map sequences of different lengths to the logits of their last label."""
        scores = self.scores(x)
        lengths = 2 + (x[:, 0, 0] > 0).long()
        paths = scores[:, 0]
        for t in range(1, x.shape[1]):
            after = torch.logsumexp(paths[:, :, None] + self.moves, 1) + scores[:, t]
            paths = torch.where((t < lengths)[:, None], after, paths)
        return paths


class NeRF(Module):
    """Light along a ray, and again where most of it comes from."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.hidden, self.density = nn.Linear(2 * D, 6), nn.Linear(6, 1)
        self.colour = nn.Linear(6, CLASSES)

    def along(self, x: Tensor, at: Tensor) -> Tensor:
        """Compute features at places along rays."""
        place = x[:, None] * at[:, :, None]
        return self.hidden(torch.cat([place.sin(), place.cos()], -1)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        """Map rays ``[N, D]`` to colours."""
        at = torch.linspace(0.2, 1.0, 4, dtype=x.dtype).expand(len(x), 4)
        h = self.along(x, at)
        seen = (-F.softplus(self.density(h))[:, :, 0]).exp()
        before = F.pad(seen.cumprod(1)[:, :-1], (1, 0), value=1.0)
        weights = before * (1 - seen)
        sums = weights.detach().cumsum(1)
        finer = torch.searchsorted(sums.contiguous(), sums[:, -1:] / 2)
        h = torch.cat([h, self.along(x, at.gather(1, finer) - 0.1)], 1)
        weights = torch.cat([weights, before.gather(1, finer)], 1)
        return (weights[:, :, None] * self.colour(h)).sum(1)


class HashGrid(Module):
    """Rows of a table, at the corners of cells, whose number is computed."""

    def __init__(self):
        """Create the tables."""
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(5, 3) for _ in range(2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map places ``[N, T, D]``, of which two axes count, to logits."""
        found = []
        for table, size in zip(self.tables, (2, 4)):
            place = size * x[:, :, :2].sigmoid()
            start = place.floor()
            part, value = place - start, 0
            for corner in torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]):
                i, j = (start.long() + corner).unbind(-1)
                weight = (1 - corner - part).abs().prod(-1, keepdim=True)
                value = value + weight * table[(i ^ (j * 2654435761)) % 5]
            found.append(value)
        return self.head(torch.cat(found, -1).mean(1))


class StyleGAN(Module):
    """A convolution whose weight is scaled for each sample: a group for each."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.style, self.weight = nn.Linear(3, 3), nn.Parameter(torch.randn(D, 3, 3, 3))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 4, 4]`` to logits."""
        scale = self.style(x.mean((2, 3)))
        weight = self.weight * scale[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), True) + 1e-8).rsqrt()
        mixed = F.conv_transpose2d(
            x.reshape(1, -1, 4, 4),
            weight.transpose(1, 2).flatten(0, 1),
            stride=2,
            groups=len(x),
        )
        return self.head(mixed.view(len(x), D, -1).relu().mean(2))


class DeformableAttention(Module):
    """Learned queries look at places of an image that they compute."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.values, self.queries = nn.Conv2d(3, D, 1), nn.Parameter(torch.randn(3, 3))
        self.places, self.weights = nn.Linear(3, 16), nn.Linear(3, 8)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 4, 4]`` to logits of three queries."""
        values = self.values(x).reshape(2 * len(x), D // 2, 4, 4)
        queries = self.queries + x.mean((2, 3))[:, None]
        places = self.places(queries).tanh().view(-1, 3, 2, 4, 2).transpose(1, 2)
        weights = self.weights(queries).view(-1, 3, 2, 4).softmax(-1).transpose(1, 2)
        seen = F.grid_sample(values, places.flatten(0, 1), align_corners=False)
        seen = (seen.view(len(x), 2, -1, 3, 4) * weights[:, :, None]).sum(-1)
        return self.head(seen.flatten(1, 2).mT)


class CorrelationVolume(Module):
    """Products of all pixels of two images, which are looked up as images."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.features, self.update = nn.Conv2d(3, D, 1), nn.Conv2d(D, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 4, 4]`` and their mirror images to logits."""
        one, two = self.features(x), self.features(x.flip(3))
        volume = torch.einsum("nchw,ncij->nhwij", one, two).reshape(-1, 1, 4, 4)
        volume = F.avg_pool2d(volume, 2)
        grid = torch.linspace(-0.5, 0.5, 2, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1)
        near = F.grid_sample(
            volume, grid.expand(len(volume), -1, -1, -1), align_corners=True
        )
        near = near.view(len(x), 4, 4, -1).permute(0, 3, 1, 2)
        return self.update(near).mean((2, 3))


class DeltaRule(Module):
    """A matrix of each sample's own, which is corrected at each step."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.qkv, self.rate = nn.Linear(D, 3 * D), nn.Linear(D, 1)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map a sequence ``[N, T, D]`` to logits."""
        own = x.new_zeros(len(x), D, D)
        parts = self.qkv(x).chunk(3, -1)
        steps = (y.unbind(1) for y in (*parts[1:], self.rate(x)))
        for k, v, rate in zip(*steps):
            wrong = v - torch.einsum("nij,nj->ni", own, k)
            own = own + torch.einsum("ni,nj->nij", rate.sigmoid() * wrong, k)
        return self.head(torch.einsum("nij,nj->ni", own, parts[0][:, -1]))


class DeepEquilibrium(Module):
    """A fixed point, the gradient of which a hook solves for."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(D, D)
        self.head = nn.Linear(D, CLASSES)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        """Come nearer."""
        return torch.tanh(0.3 * self.inner(z) + self.outer(x))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, D]`` to logits."""
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(50):
                z = self.step(z, x)
        z = self.step(z, x)
        start = z.detach().requires_grad_()
        again = self.step(start, x)

        def solve(gradient: Tensor) -> Tensor:
            result = gradient
            for _ in range(50):
                (pulled,) = torch.autograd.grad(again, start, result, retain_graph=True)
                result = gradient + pulled
            return result

        z.register_hook(solve)
        return self.head(z)


HOOK: Any = {
    "refused": {
        part: "a hook changes the gradient" for part in ("DiagGGNExact", "Kronecker")
    }
}

GEOMETRY: List[Row] = [
    Row("By hand", name, build, inputs, itself, **options)
    for name, build, inputs, options in (
        ("VoxelNet", VoxelNet, points, {}),
        ("PointPillars", PointPillars, points, {}),
        ("DGCNN", DGCNN, points, {}),
        ("PointNet++", PointNet2, points, {}),
        ("Serialized points", SerializedPoints, points, {}),
        ("Token merging", TokenMerging, points, {}),
        ("Tree", Tree, points, {}),
        ("CRF", CRF, points, {}),
        ("NeRF", NeRF, vectors(D), {}),
        ("Hash grid", HashGrid, points, {}),
        ("StyleGAN", StyleGAN, pixels(4, "x"), {}),
        ("Deformable attention", DeformableAttention, pixels(4, "x"), {}),
        ("Correlation volume", CorrelationVolume, pixels(4, "x"), {}),
        ("Delta rule", DeltaRule, points, {}),
        ("Deep equilibrium", DeepEquilibrium, vectors(D), HOOK),
    )
]
