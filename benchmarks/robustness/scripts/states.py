"""Optimizer state as loops read, write, save and replace it."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.robustness.scripts.registry import Log, Watch, rows, script, update


def _network(width: int = 64, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


@script("A checkpoint every fourth step, from which training goes on (model, optimizer, schedule)")
def resumes(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 256, 64)):
            loss = _loss(model, x)
            update(optimizer, loss)
            schedule.step()
            log(loss.item())
            if i % 4 == 3:
                saved = io.BytesIO()
                torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], saved)
                saved.seek(0)
                for part, state in zip((model, optimizer, schedule), torch.load(saved, weights_only=True), strict=True):
                    part.load_state_dict(state)
    return {"model": model, "optimizer": optimizer}


@script("The best checkpoint is kept in memory (`deepcopy` of state dicts), and comes back when the loss grows")
def best_comes_back(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2, amsgrad=True)
    best, kept = float("inf"), (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
    with watch(model, optimizer):
        for x in rows(steps, 256, 64):
            loss = _loss(model, x)
            update(optimizer, loss)
            if loss.item() < best:
                best, kept = loss.item(), (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
            else:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


class Lion(torch.optim.Optimizer):
    """Signs of an average of gradients."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.add_(torch.sign(state["exp_avg"].lerp(p.grad, 0.1)), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 0.01)


@script("An optimizer of one's own (Lion)")
def lion(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = Lion(model.parameters())
    with watch(model, optimizer):
        for x in rows(steps, 256, 64):
            loss = _loss(model, x)
            update(optimizer, loss)
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


@script("Lookahead: slow weights in the optimizer's own state, and the fast ones go back to them every fifth step")
def lookahead(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 256, 64)):
            loss = _loss(model, x)
            update(optimizer, loss)
            with torch.no_grad():
                for p in model.parameters():
                    state = optimizer.state[p]
                    slow = state.setdefault("slow", p.detach().clone())
                    if i % 5 == 4:
                        slow.lerp_(p, 0.5)
                        p.copy_(slow)
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


@script("Norms of both moments are logged in every third step, and momentum is halved in every sixth")
def moments_logged(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 256, 64)):
            loss = _loss(model, x)
            update(optimizer, loss)
            norms = []
            if i % 3 == 2:
                norms = [state[name].norm().item() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            if i % 6 == 5:
                for p in model.parameters():
                    optimizer.state[p]["exp_avg"].mul_(0.5)
            log(loss.item(), norms)
    return {"model": model, "optimizer": optimizer}


@script("Warm restarts: state is forgotten by `optimizer.state = defaultdict(dict)`, and for one layer by `del`")
def state_forgotten(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 256, 64)):
            loss = _loss(model, x)
            update(optimizer, loss)
            if i % 7 == 5:
                optimizer.state = defaultdict(dict)
            elif i % 7 == 2:
                del optimizer.state[next(model.parameters())]
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


@script("Layers unfreeze one by one: `add_param_group` in the middle of training", steps=18)
def unfreezes(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    layers = [model[4], model[2], model[0]]
    for layer in layers[1:]:
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 256, 64)):
            if i in (6, 12):
                layer = layers[i // 6].requires_grad_(True)
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})
            loss = _loss(model, x)
            update(optimizer, loss)
            log(loss.item())
    return {"model": model, "optimizer": optimizer}


@script("Hooks of the optimizer read its state before and after each step, and a checkpoint's hook changes what is saved")
def state_in_hooks(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    seen: list[float] = []

    def read(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.extend(state["exp_avg"].abs().max().item() for state in optimizer.state.values())

    def without_steps(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "state": {i: {k: v for k, v in state.items() if k != "step"} for i, state in saved["state"].items()}}

    optimizer.register_step_pre_hook(read)
    optimizer.register_step_post_hook(read)
    optimizer.register_state_dict_post_hook(without_steps)
    saved: dict[str, Any] = {}
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 256, 64)):
            loss = _loss(model, x)
            update(optimizer, loss)
            log(loss.item(), list(seen))
            seen.clear()
            if i % 5 == 4:
                saved = copy.deepcopy(optimizer.state_dict())
    return {"model": model, "saved": saved}


@script("The optimizer is replaced in the middle: Adam first, then SGD whose momentum begins with Adam's")
def other_optimizer(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with watch(model, [adam, sgd]):
        for i, x in enumerate(rows(steps, 256, 64)):
            if i == steps // 2:
                for p in model.parameters():
                    sgd.state[p]["momentum_buffer"] = adam.state[p]["exp_avg"]
            loss = _loss(model, x)
            update(adam if i < steps // 2 else sgd, loss)
            log(loss.item())
    return {"model": model, "adam": adam, "sgd": sgd}


@script("A population: each member takes over the best one's weights and optimizer state", steps=12)
def population(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    models = nn.ModuleList(_network(depth=2) for _ in range(2))
    optimizers = [
        torch.optim.RMSprop(model.parameters(), lr=lr, momentum=0.5) for model, lr in zip(models, (1e-3, 3e-3), strict=True)
    ]
    with watch(models, optimizers):
        for i, x in enumerate(rows(steps, 256, 64)):
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = _loss(model, x)
                update(optimizer, loss)
                losses.append(loss.item())
            log(losses)
            if i % 4 == 3:
                best = losses.index(min(losses))
                models[1 - best].load_state_dict(models[best].state_dict())
                optimizers[1 - best].load_state_dict(optimizers[best].state_dict())
    return {"models": models, "one": optimizers[0], "other": optimizers[1]}
