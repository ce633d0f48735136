"""Models whose backward reads indexes, slices and products of several tensors: gathers, maxima, einsum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, fit, images, rows, script, tokens


class Selective(nn.Module):
    """A state space whose steps depend on the input; the scan is a loop of einsum."""

    def __init__(self, width: int = 32, states: int = 8) -> None:
        super().__init__()
        self.words, self.head, self.norm = nn.Embedding(40, width), nn.Linear(width, 40), nn.LayerNorm(width)
        self.into, self.conv = nn.Linear(width, 2 * width), nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.step, self.both = nn.Linear(width, width), nn.Linear(width, 2 * states)
        self.rates = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))

    def scan(self, u: Tensor) -> Tensor:
        step = F.softplus(self.step(u))
        b, c = self.both(u).chunk(2, -1)
        kept = torch.exp(torch.einsum("bld,dn->bldn", step, -self.rates.exp()))
        given = torch.einsum("bld,bln,bld->bldn", step, b, u)
        state, found = torch.zeros_like(kept[:, 0]), []
        for t in range(u.shape[1]):
            state = kept[:, t] * state + given[:, t]
            found.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
        return torch.stack(found, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2))
        return self.head(x + self.scan(u) * F.silu(gate))


@script("A selective scan by einsum (Mamba)")
def selective_scan(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Selective()

    def loss_of(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return fit(watch, log, model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(steps, (6, 17)), loss_of)


class Points(nn.Module):
    """Points look at their nearest neighbours, and only the maximum of each channel counts."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width))
        self.two = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 2 * width))
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 8))

    @staticmethod
    def edges(x: Tensor, at: Tensor, k: int = 6) -> Tensor:
        """(batch, points, k, 2 channels): each point, and how its neighbours differ from it."""
        nearest = torch.cdist(at, at).topk(k, largest=False).indices
        n, points, channels = x.shape
        near = x.gather(1, nearest.view(n, -1, 1).expand(-1, -1, channels)).view(n, points, k, channels)
        middle = x[:, :, None].expand_as(near)
        return torch.cat([middle, near - middle], -1)

    def forward(self, at: Tensor) -> Tensor:
        x = self.one(self.edges(at, at)).max(2).values
        x = self.two(self.edges(x, x.detach())).max(2).values
        return self.head(x.max(1).values)


@script("Points and their neighbours (DGCNN): gather, and maxima over neighbours and over all points")
def point_cloud(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Points()

    def loss_of(x: Tensor) -> Tensor:
        at = x.view(8, 32, 3)
        return F.cross_entropy(model(at), at.amax((1, 2)).mul(4).long().remainder(8), label_smoothing=0.2)

    return fit(watch, log, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), rows(steps, 256, 3), loss_of)


class Quantized(nn.Module):
    """An autoencoder with a codebook; its entries follow the vectors that chose them, in place, inside the forward."""

    def __init__(self, width: int = 16, codes: int = 32) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        self.decode = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(width, 1, 4, 2, 1))
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def quantized(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.movedim(1, -1).reshape(-1, z.shape[1])
        choice = torch.cdist(flat, self.codes).argmin(1)
        chosen = self.codes[choice].view(z.movedim(1, -1).shape).movedim(-1, 1)
        if self.training:
            hot = F.one_hot(choice, len(self.codes)).type_as(flat)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(hot.T @ flat.detach(), alpha=0.1)
            self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        return z + (chosen - z).detach(), F.mse_loss(z, chosen)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, commitment = self.quantized(self.encode(x))
        return self.decode(z), commitment


@script("VQ-VAE: a straight-through codebook that follows its vectors inside the forward")
def codebook(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Quantized()

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        again, commitment = model(batch[0])
        return F.mse_loss(again, batch[0]) + 0.25 * commitment

    return fit(watch, log, model, torch.optim.Adam(model.parameters(), lr=1e-3), images(steps, 16), loss_of)


class Sentences(nn.Module):
    """Sentence vectors: word vectors are averaged where there is a word, or their maximum is taken."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != 0
        x = self.block(self.words(ids), src_key_padding_mask=~there)
        mean = (x * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        highest = x.masked_fill(~there[..., None], float("-inf")).max(1).values
        return F.normalize(torch.cat([mean, highest], -1), dim=-1)


@script("Sentence pairs: mean and maximum of word vectors, negatives of the batch, the hardest one by `gather`")
def sentence_pairs(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Sentences()

    def loss_of(ids: Tensor) -> Tensor:
        lengths = 4 + torch.arange(len(ids)) % (ids.shape[1] - 4)
        ids = (ids + 1).clamp(max=39) * (torch.arange(ids.shape[1]) < lengths[:, None])
        one, other = model(ids[:12]), model(ids[12:])
        likeness = 20 * one @ other.T
        truth = torch.arange(len(one))
        wrong = likeness.detach().masked_fill(torch.eye(len(one), dtype=torch.bool), float("-inf")).argmax(1)
        margin = F.relu(1 + likeness.gather(1, wrong[:, None]) - likeness.diagonal()[:, None])
        return F.cross_entropy(likeness, truth) + 0.1 * margin.mean()

    return fit(watch, log, model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(steps, (24, 12)), loss_of)
