"""Pictures: classified, encoded, enlarged, restyled, compared and denoised."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.robustness.scripts.registry import Log, Watch, images, rows, script


class Digits(nn.Module):
    """Two convolutions, two dropouts, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32 * 36, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.drop1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(x)))), dim=1)


@script("MNIST: convolutions, Adadelta and a schedule")
def mnist(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Digits()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    with watch(model, optimizer):
        model.train()
        for x, y in images(steps, 32):
            optimizer.zero_grad()
            output = model(x)
            loss = F.nll_loss(output, y)
            loss.backward()
            optimizer.step()
            schedule.step()
            log(loss.item())
    return {"model": model, "adadelta": optimizer}


class Rows(nn.Module):
    """Reads a picture row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 48, batch_first=True)
        self.norm = nn.BatchNorm1d(48)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(48, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x.squeeze(1))
        h = self.norm(self.drop1(output[:, -1]))
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(h)))), dim=1)


@script("MNIST: an LSTM over the rows, evaluated now and then")
def mnist_rows(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Rows()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    (held, answers), *data = images(steps + 1, 48)
    with watch(model, optimizer):
        for i, (x, y) in enumerate(data):
            model.train()
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            right = 0
            if i % 5 == 4:
                model.eval()
                with torch.no_grad():
                    right = int((model(held).argmax(1) == answers).sum())
            log(loss.item(), right)
    return {"model": model, "adadelta": optimizer}


class Encoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mean, self.spread = nn.Linear(256, 96), nn.Linear(96, 8), nn.Linear(96, 8)
        self.back, self.out = nn.Linear(8, 96), nn.Linear(96, 256)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.into(x.view(-1, 256)))
        mean, log_variance = self.mean(h), self.spread(h)
        std = torch.exp(0.5 * log_variance)
        z = mean + torch.randn_like(std) * std
        return torch.sigmoid(self.out(F.relu(self.back(z)))), mean, log_variance


@script("Variational autoencoder")
def vae(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x, _ in images(steps, 64):
            optimizer.zero_grad()
            again, mean, log_variance = model(x)
            likelihood = F.binary_cross_entropy(again, x.view(-1, 256), reduction="sum")
            divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            loss = likelihood + divergence
            loss.backward()
            optimizer.step()
            log(loss.item() / len(x))
    return {"model": model, "adam": optimizer}


@script("Super-resolution by pixel shuffle")
def super_resolution(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Conv2d(1, 24, 5, padding=2), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
    model.extend([nn.Conv2d(24, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 3, padding=1), nn.PixelShuffle(2)])
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    with watch(model, optimizer):
        total = 0.0
        for target, _ in images(steps, 16, side=24):
            optimizer.zero_grad()
            loss = criterion(model(F.avg_pool2d(target, 2)), target)
            total += loss.item()
            loss.backward()
            optimizer.step()
            log(total)
    return {"model": model, "adam": optimizer}


class Pair(nn.Module):
    """Whether two pictures are of the same kind: one trunk for both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))
        self.head = nn.Sequential(nn.Linear(2 * 32 * 16, 48), nn.ReLU(inplace=True), nn.Linear(48, 1))

    def once(self, x: Tensor) -> Tensor:
        return self.trunk(x).flatten(1)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.sigmoid(self.head(torch.cat((self.once(one), self.once(other)), 1)))


@script("Siamese network")
def siamese(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Pair()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    with watch(model, optimizer):
        for x, y in images(steps, 24):
            optimizer.zero_grad()
            likeness = model(x, x.roll(1, 0)).squeeze()
            loss = criterion(likeness, (y == y.roll(1)).float())
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adadelta": optimizer}


@script("Contrastive learning: two forwards before one backward")
def contrastive(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.Flatten())
    model.extend([nn.Linear(512, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    with watch(model, optimizer):
        for x, _ in images(steps, 32):
            left = F.normalize(model(x + 0.1 * torch.randn_like(x)))
            right = F.normalize(model(x.flip(-1)))
            likeness = left @ right.T / 0.2
            truth = torch.arange(len(x))
            loss = (F.cross_entropy(likeness, truth) + F.cross_entropy(likeness.T, truth)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


class Features(nn.Module):
    """Stands for a pretrained classifier: frozen, gives the results of two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.high = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        for p in self.parameters():
            p.requires_grad = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.low(x)
        return low, self.high(low)


def _normalized(batch: Tensor) -> Tensor:
    """Pictures of 0 to 255 as the classifier wants them. Changes them in place."""
    batch.div_(255.0)
    return (batch - 0.45) / 0.22


def _gram(x: Tensor) -> Tensor:
    n, c, h, w = x.size()
    flat = x.view(n, c, h * w)
    return flat.bmm(flat.transpose(1, 2)) / (c * h * w)


class Styler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 12, 3, 2), nn.InstanceNorm2d(12, affine=True), nn.ReLU())
        self.middle = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(12, 12, 3), nn.InstanceNorm2d(12, affine=True))
        self.up = nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        h = F.relu(h + self.middle(h))
        return self.up(F.interpolate(h, scale_factor=2, mode="nearest"))


@script("Fast style transfer: a frozen network judges; batches are divided in place after the forward")
def style(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model, judge = Styler(), Features()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    criterion = nn.MSELoss()
    wanted = [_gram(f) for f in judge(_normalized(255 * next(images(1, 1, 3, 20))[0]))]
    with watch(model, optimizer):
        for x, _ in images(steps, 8, 3, 20):
            optimizer.zero_grad()
            x = x * 255
            y = _normalized(model(x))
            x = _normalized(x)
            made, given = judge(y), judge(x)
            content = 10 * criterion(made[1], given[1])
            look = sum(100 * criterion(_gram(f), g.expand(len(f), -1, -1)) for f, g in zip(made, wanted, strict=True))
            loss = content + look
            loss.backward()
            optimizer.step()
            log(content.item(), look.item())
    return {"model": model, "adam": optimizer}


class Denoiser(nn.Module):
    """A small U-Net that is told the time."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 4, 2, 1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1))
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.last = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 1, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(4) / 2)
        told = self.time(torch.cat((angles.sin(), angles.cos()), -1))
        high = self.first(x) + told[:, :, None, None]
        low = self.down(F.silu(high))
        low = low + self.middle(low)
        return self.last(torch.cat((self.up(low), high), 1))


@script("Diffusion: a U-Net learns the noise; an average of its weights is kept")
def diffusion(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-4, betas=(0.9, 0.99))
    kept = torch.linspace(0.999, 0.01, 50)
    with watch(model, optimizer):
        for x, _ in images(steps, 16):
            t = torch.randint(0, 50, (len(x),))
            noise = torch.randn_like(x)
            share = kept[t][:, None, None, None]
            loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t.float()), noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.05)
            log(loss.item())
    return {"model": model, "average": average, "adam": optimizer}


class Layer(nn.Linear):
    """Learns on its own: what is good is to be large, what is bad small."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))


@script("Forward-forward: layers train one after the other, by `layer.forward(x)`")
def forward_forward(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = nn.Sequential(Layer(64, 96), Layer(96, 96))
    with watch(model, [layer.optimizer for layer in model]):
        for good in rows(steps, 128, 64):
            bad = good[torch.randperm(len(good))] * 0.5
            losses = []
            for layer in model:
                large, small = layer.forward(good).pow(2).mean(1), layer.forward(bad).pow(2).mean(1)
                loss = torch.log1p(torch.exp(torch.cat([2 - large, small - 2]))).mean()
                layer.optimizer.zero_grad()
                loss.backward()
                layer.optimizer.step()
                good, bad = layer.forward(good).detach(), layer.forward(bad).detach()
                losses.append(loss.item())
            log(*losses)
    return {"model": model, "adam": [layer.optimizer for layer in model]}


class Patches(nn.Module):
    """A vision transformer for pictures of any size: patches of all of them, padded, with masks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(16, width), nn.Parameter(0.02 * torch.randn(2, 8, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, pictures: list[Tensor]) -> Tensor:
        told = []
        for picture in pictures:
            patches = picture.unfold(1, 4, 4).unfold(2, 4, 4)[0]
            h, w = patches.shape[:2]
            told.append(self.embed(patches.reshape(h * w, 16)) + (self.place[0, :h, None] + self.place[1, :w]).flatten(0, 1))
        padded = pad_sequence(told, batch_first=True)
        padding = torch.arange(padded.shape[1]) >= torch.tensor([len(t) for t in told])[:, None]
        h = self.norm(self.block(padded, src_key_padding_mask=padding)).masked_fill(padding[..., None], 0.0)
        return self.head(h.sum(1) / (~padding).sum(1, keepdim=True))


@script("Vision transformer on lists of pictures of different sizes (NaViT)", steps=18)
def picture_lists(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Patches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = torch.randint(2, 7, (steps, 8, 2), generator=torch.Generator().manual_seed(5))
    with watch(model, optimizer):
        for batch in sizes.tolist():
            pictures = [torch.rand(1, 4 * h, 4 * w) for h, w in batch]
            loss = F.cross_entropy(model(pictures), torch.arange(8))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adamw": optimizer}
