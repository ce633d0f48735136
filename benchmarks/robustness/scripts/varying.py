"""Steps that are unlike each other: work every n-th step, logs now and then, a cache of autocast."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, images, rows, script, tokens, update


class Judge(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, 2, 1), nn.SiLU())
        self.head = nn.Linear(64 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1)).flatten()


@script("A lazy penalty (StyleGAN2): the judge's gradients are punished in every fourth step alone", steps=24)
def lazy_penalty(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Judge()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.0, 0.99))
    with watch(model, optimizer):
        for i, (x, _) in enumerate(images(steps, 24)):
            loss = F.softplus(model(torch.rand_like(x))).mean() + F.softplus(-model(x)).mean()
            optimizer.zero_grad()
            loss.backward()
            penalty = 0.0
            if i % 4 == 0:
                real = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(model(real).sum(), real, create_graph=True)
                steep = slope.square().sum((1, 2, 3)).mean()
                (5 * 4 * steep).backward()
                penalty = steep.item()
            optimizer.step()
            log(loss.item(), penalty)
    return {"model": model, "adam": optimizer}


class Words(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 40, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = F.layer_norm(x + layer(x), x.shape[-1:])
        return self.head(x)

    def attended(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return (x @ x.transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1)


@script("Autocast around the whole forward: every third step a second view of the batch, which finds the weights cast already")
def autocast_cache(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for i, ids in enumerate(tokens(steps, (16, 16))):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())
                if i % 3 == 2:
                    other = F.dropout(model.head(model.words(ids)), 0.1)
                    loss = loss + 0.1 * F.mse_loss(other.float(), logits.detach().float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adamw": optimizer}


def _told(told: list[Any], layer: nn.Module, inputs: Any, output: Tensor) -> None:
    told.append(output.detach().norm(dim=-1).mean().item())


@script(
    "Logs every fourth step: histograms of weights and gradients, maps of attention, the norm of each layer's output", steps=16
)
def logs_now_and_then(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for i, ids in enumerate(tokens(steps, (16, 16))):
            told: list[Any] = []
            handles: list[Any] = []
            if i % 4 == 3:
                handles = [layer.register_forward_hook(partial(_told, told)) for layer in model.layers]
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
            for handle in handles:
                handle.remove()
            optimizer.zero_grad()
            loss.backward()
            if i % 4 == 3:
                for p in model.parameters():
                    told += [torch.histc(p.detach(), 8).tolist(), torch.histc(p.grad, 8).tolist()]
                everything = torch.cat([p.grad.flatten() for p in model.parameters()])
                told.append(everything.abs().quantile(0.9).item())
                with torch.no_grad():
                    told.append(model.attended(ids).mean(0).diagonal().tolist())
            optimizer.step()
            log(loss.item(), *told)
    return {"model": model, "adamw": optimizer}


class Twins(nn.Module):
    """An actor and two critics (TD3)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2), nn.Tanh())
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
            for _ in range(2)
        )

    def values(self, x: Tensor, action: Tensor) -> list[Tensor]:
        return [critic(torch.cat([x, action], 1)).flatten() for critic in self.critics]


@script("Twin critics (TD3): the actor and the targets are updated in every second step alone", steps=24)
def delayed_actor(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    agent = Twins()
    target = copy.deepcopy(agent).requires_grad_(False)
    of_actor = torch.optim.Adam(agent.actor.parameters(), lr=1e-3)
    of_critics = torch.optim.Adam(agent.critics.parameters(), lr=1e-3)
    with watch(agent, [of_actor, of_critics]):
        for i, x in enumerate(rows(steps, 128, 8)):
            with torch.no_grad():
                after = x.roll(1, 0)
                action = (target.actor(after) + 0.1 * torch.randn(len(x), 2)).clamp(-1, 1)
                wanted = x.sum(1) + 0.9 * torch.min(*target.values(after, action))
            loss = sum(F.mse_loss(value, wanted) for value in agent.values(x, x[:, :2].tanh()))
            update(of_critics, loss)
            told = [loss.item()]
            if i % 2 == 1:
                gain = -agent.values(x, agent.actor(x))[0].mean()
                update(of_actor, gain)
                with torch.no_grad():
                    for p, q in zip(agent.parameters(), target.parameters(), strict=True):
                        q.lerp_(p, 0.05)
                told.append(gain.item())
            log(*told)
    return {"agent": agent, "target": target, "actor": of_actor, "critics": of_critics}
