"""Loops that train through methods and single modules of a model, and hardly ever call the model itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.robustness.scripts.registry import Log, Watch, rows, script, tokens, update


def _layers(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)))


class Translator(nn.Module):
    def __init__(self, words: int = 40, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.encoder, self.decoder, self.head = _layers(width, 3), _layers(width, 3), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(self.words(ids))))

    def body(self, ids: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.words(ids)))


@script("An encoder and a decoder that are called one after the other, with attention between them in the loop")
def encoder_then_decoder(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for ids in tokens(steps, (12, 16)):
            memory = model.encoder(model.words(ids))
            query = model.words(ids.roll(1, 1))
            found = (query @ memory.transpose(1, 2) / 7).softmax(-1) @ memory
            logits = model.head(model.decoder(query + found))
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adamw": optimizer}


@script("The body of a language model, and a head in chunks: `F.linear` with the weight of `lm_head`")
def chunked_head(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for ids in tokens(steps, (12, 16)):
            hidden, targets = model.body(ids).flatten(0, 1), ids.roll(-1, 1).flatten()
            loss = hidden.new_zeros(())
            for h, y in zip(hidden.chunk(4), targets.chunk(4), strict=True):
                loss = loss + F.cross_entropy(F.linear(h, model.head.weight).float(), y, reduction="sum")
            loss = loss / len(targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adamw": optimizer}


@script("The same, with a backward for each chunk and one for the body")
def backward_by_chunk(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for ids in tokens(steps, (12, 16)):
            hidden, targets = model.body(ids).flatten(0, 1), ids.roll(-1, 1).flatten()
            leaf, total = hidden.detach().requires_grad_(), 0.0
            for h, y in zip(leaf.chunk(4), targets.chunk(4), strict=True):
                loss = F.cross_entropy(F.linear(h, model.head.weight), y, reduction="sum") / len(targets)
                loss.backward()
                total += loss.item()
            hidden.backward(leaf.grad)
            optimizer.step()
            optimizer.zero_grad()
            log(total)
    return {"model": model, "adamw": optimizer}


def _field(width: int = 48) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def _rendered(values: Tensor) -> tuple[Tensor, Tensor]:
    density, colour = values[..., :1].relu(), values[..., 1:].sigmoid()
    alpha = 1 - (-density * 0.1).exp()
    weights = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return (weights * colour).sum(1), weights[..., 0]


@script("A radiance field: a coarse and a fine network in a ModuleList, the fine one where the coarse one saw something")
def two_fields(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    networks = nn.ModuleList([_field(), _field()])
    optimizer = torch.optim.Adam(networks.parameters(), lr=5e-3)
    coarse, fine = networks
    with watch(networks, optimizer):
        for x in rows(steps, 32, 6):
            start, direction = x[:, None, :3], F.normalize(x[:, None, 3:], dim=-1)
            depths = torch.linspace(0, 1, 12)[None, :, None].expand(len(x), -1, -1)
            first, weights = _rendered(coarse(start + direction * depths))
            with torch.no_grad():
                more = torch.multinomial(weights + 1e-5, 12, replacement=True)[..., None] / 12 + torch.rand(len(x), 12, 1) / 12
                more = torch.cat([depths, more], 1).sort(1).values
            second, _ = _rendered(fine(start + direction * more))
            wanted = x[:, :3].sigmoid()
            loss = F.mse_loss(first, wanted) + F.mse_loss(second, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"networks": networks, "adam": optimizer}


class Towers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query, self.document = (nn.Sequential(_layers(width, 2), nn.Linear(width, 16)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))


@script("Contrastive learning with cached gradients: all chunks without gradients, then each chunk with them", steps=12)
def cached_gradients(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Towers()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x in rows(steps, 64, 32):
            chunks, states = x.chunk(4), list[Tensor]()
            with torch.no_grad():
                for chunk in chunks:
                    states.append(torch.get_rng_state())
                    states.append(torch.cat([model.query(chunk), model.document(chunk.roll(1, 1))], 1))
            seen = torch.cat(states[1::2]).requires_grad_()
            query, document = F.normalize(seen[:, :16], dim=-1), F.normalize(seen[:, 16:], dim=-1)
            loss = F.cross_entropy(model.scale * query @ document.T, torch.arange(len(x)))
            loss.backward()
            assert seen.grad is not None
            after = torch.get_rng_state()
            for chunk, state, gradient in zip(chunks, states[::2], seen.grad.chunk(4), strict=True):
                torch.set_rng_state(state)
                surrogate = torch.cat([model.query(chunk), model.document(chunk.roll(1, 1))], 1)
                (surrogate * gradient).sum().backward()
            torch.set_rng_state(after)
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adam": optimizer}


@script("Training by methods with an evaluation by methods between the steps, and a teacher's method within them")
def evaluating_methods(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for i, ids in enumerate(tokens(steps, (12, 16))):
            hidden = model.encoder(model.words(ids))
            with torch.no_grad():
                wanted = F.normalize(model.encoder(model.words(ids.roll(1, 0))), dim=-1)
            loss = F.cross_entropy(model.head(model.decoder(hidden)).flatten(0, 1), ids.flatten())
            loss = loss - 0.1 * (F.normalize(hidden, dim=-1) * wanted).sum(-1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            score = 0.0
            if i % 3 == 0:
                model.eval()
                with torch.no_grad():
                    score = (model.head(model.body(ids)).argmax(-1) == ids).float().mean().item()
                model.train()
            log(loss.item(), score)
    return {"model": model, "adamw": optimizer}


class Fragile(Translator):
    def decode(self, hidden: Tensor, ids: Tensor) -> Tensor:
        x = self.decoder[0](hidden)
        if int(ids[0, 0]) % 5 == 0:
            raise ValueError("a sample that cannot be decoded")
        return self.head(self.decoder[2](self.decoder[1](x)))


@script("Batches that raise in the middle of a method are left out", steps=16)
def method_raises(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Fragile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for ids in tokens(steps, (12, 16)):
            optimizer.zero_grad()
            try:
                loss = F.cross_entropy(model.decode(model.encoder(model.words(ids)), ids).flatten(0, 1), ids.flatten())
            except ValueError:
                log(None)
                continue
            loss.backward()
            optimizer.step()
            log(loss.item())
            del loss
    return {"model": model, "adamw": optimizer}


@script("The model is called, and its encoder before it for another loss")
def encoder_before_model(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for ids in tokens(steps, (12, 16)):
            seen = model.encoder(model.words(ids.roll(1, 1)))
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) + 0.1 * seen.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adamw": optimizer}


class Potential(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.atoms = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.energy = nn.Linear(width, 1)


@script("Energies by methods and forces as their gradients, both in the loss")
def forces_by_methods(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Potential()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x in rows(steps, 96, 3):
            places = x.requires_grad_()
            energy = model.energy(model.atoms(places)).flatten()
            (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
            loss = F.mse_loss(energy, x.detach().square().sum(1)) + F.mse_loss(forces, 2 * x.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adam": optimizer}


class Adversaries(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 16))
        self.critic = nn.Sequential(nn.Linear(16, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))


@script("Adversaries in one module: each has its optimizer and its turn, with a penalty on the critic's gradients", steps=16)
def adversaries_in_one(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Adversaries()
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(model.critic.parameters(), lr=1e-3)
    with watch(model, [of_generator, of_critic]):
        for real in rows(steps, 64, 16):
            made = model.generator(torch.randn(64, 8)).detach()
            mixed = (real + made).div(2).requires_grad_()
            (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
            loss = model.critic(made).mean() - model.critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            update(of_critic, loss)
            other = -model.critic(model.generator(torch.randn(64, 8))).mean()
            update(of_generator, other)
            log(loss.item(), other.item())
    return {"model": model, "generator": of_generator, "critic": of_critic}


@script("Reptile: copies of the model are trained, and it moves towards each", steps=16)
def copies_that_train(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with watch(model, optimizer):
        for x in rows(steps, 64, 8):
            fast = copy.deepcopy(model)
            inner = torch.optim.SGD(fast.parameters(), lr=0.02)
            for _ in range(3):
                loss = F.mse_loss(fast(x), x[:, :1].sin())
                inner.zero_grad()
                loss.backward()
                inner.step()
            for p, q in zip(model.parameters(), fast.parameters(), strict=True):
                p.grad = 0.1 * (p.detach() - q.detach())
            optimizer.step()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


@script("A checkpoint around the call of the whole model", steps=16)
def checkpoint_of_model(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for ids in tokens(steps, (12, 16)):
            logits = checkpoint(model, ids, use_reentrant=False)
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adamw": optimizer}
