"""Steps with an optimisation, or several backwards, inside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, images, rows, script


def _network(inputs: int = 4, width: int = 48, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))


@script("MAML: two steps on each of four tasks, through which the outer loss is differentiated")
def inner_steps(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x in rows(steps, 128, 4):
            total = torch.zeros(())
            for i, (shown, asked) in enumerate(x.view(4, 2, 16, 4)):
                weights = dict(model.named_parameters())
                for _ in range(2):
                    loss = F.mse_loss(functional_call(model, weights, shown), (shown[:, :1] + i).sin())
                    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                    weights = {name: w - 0.05 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
                total = total + F.mse_loss(functional_call(model, weights, asked), (asked[:, :1] + i).sin())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            log(total.item())
    return {"model": model, "adam": optimizer}


class Tasks(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.heads = nn.ModuleList(nn.Linear(width, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


@script("Several tasks (PCGrad): a backward for each over one retained graph, gradients that disagree are projected")
def conflicting_tasks(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Tasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x in rows(steps, 128, 16):
            losses = [F.cross_entropy(answer, x[:, 3 * i : 3 * i + 3].argmax(1)) for i, answer in enumerate(model(x))]
            gradients = []
            for loss in losses:
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
            flat = torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in gradients])
            for one in range(3):
                for other in range(3):
                    inner = flat[one] @ flat[other]
                    if one != other and inner < 0:
                        flat[one] -= inner / flat[other].square().sum() * flat[other]
            total, begin = flat.sum(0), 0
            for p in model.parameters():
                p.grad = total[begin : begin + p.numel()].view_as(p).clone()
                begin += p.numel()
            optimizer.step()
            log(*(loss.item() for loss in losses))
    return {"model": model, "adam": optimizer}


@script("Sharpness-aware minimisation: a climb, a second forward and backward at the top, and the step from the bottom")
def sharpness(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network(48, 96, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for x in rows(steps, 192, 48):
            y = x[:, :4].argmax(1)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                climbs = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.add_(climb)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.sub_(climb)
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "sgd": optimizer}


class Blocks(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(16, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@script("An optimizer for each parameter, which steps in a hook of backward")
def steps_in_hooks(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Blocks()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    with watch(model, list(optimizers.values())):
        for x in rows(steps, 128, 16):
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            loss.backward()
            log(loss.item())
    return {"model": model, "adamw": list(optimizers.values())}


@script("Every block learns by itself: a local loss and a backward with a step for each, hidden states cut between them")
def greedy_blocks(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Blocks()
    heads = nn.ModuleList(nn.Linear(64, 4) for _ in model.layers)
    whole = nn.ModuleDict({"model": model, "heads": heads})
    optimizer = torch.optim.Adam(whole.parameters(), lr=1e-3)
    with watch(whole, optimizer):
        for x in rows(steps, 128, 16):
            y, losses = x[:, :4].argmax(1), []
            h = model.into(x)
            for layer, head in zip(model.layers, heads, strict=True):
                h = h + layer(h)
                loss = F.cross_entropy(head(h), y)
                loss.backward()
                losses.append(loss.item())
                h = h.detach()
            optimizer.step()
            optimizer.zero_grad()
            log(*losses)
    return {"whole": whole, "adam": optimizer}


@script("A physics-informed network: LBFGS with a line search and its full history, second derivatives in the loss", steps=12)
def physics(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _network(2, 24)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=20, line_search_fn="strong_wolfe")
    inside = torch.rand(128, 2, generator=torch.Generator().manual_seed(3))
    edge = torch.linspace(-1, 1, 32)[:, None]
    start = torch.cat([edge, torch.zeros_like(edge)], 1)
    with watch(model, optimizer):
        for _ in range(steps):

            def closure() -> Tensor:
                optimizer.zero_grad()
                at = inside.clone().requires_grad_()
                u = model(at)
                (first,) = torch.autograd.grad(u.sum(), at, create_graph=True)
                (second,) = torch.autograd.grad(first[:, 0].sum(), at, create_graph=True)
                residual = first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]
                loss = residual.square().mean() + F.mse_loss(model(start), -(torch.pi * edge).sin())
                loss.backward()
                return loss

            log(optimizer.step(closure).item())
    return {"model": model, "lbfgs": optimizer}


class Learner(nn.Module):
    """Its forward is a whole step of training: the update is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _network(8, 48, 4)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)

    def forward(self, x: Tensor, y: Tensor) -> list[float]:
        found = []
        for part, answers in zip(x.chunk(2), y.chunk(2), strict=True):
            fast = list(self.network.parameters())
            for _ in range(2):
                loss = F.cross_entropy(self.run(part, fast), answers)
                fast = [p - 0.1 * slope for p, slope in zip(fast, torch.autograd.grad(loss, fast), strict=True)]
            found.append(F.cross_entropy(self.run(part, fast), answers))
        self.optimizer.zero_grad()
        torch.stack(found).mean().backward()
        self.optimizer.step()
        return [loss.item() for loss in found]

    @staticmethod
    def run(x: Tensor, weights: list[Tensor]) -> Tensor:
        for i in range(0, len(weights), 2):
            x = F.linear(x if i == 0 else x.tanh(), weights[i], weights[i + 1])
        return x


@script("A `forward` that trains: inner steps, backward and update are inside the call of the model", steps=24)
def trains_inside(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Learner()
    with watch(model, model.optimizer):
        for x in rows(steps, 64, 8):
            log(*model(x, x[:, :4].argmax(1)))
    return {"model": model, "adam": model.optimizer}


class Adapting(nn.Module):
    """Test-time training: in every forward a copy of a layer's weights learns to denoise what it sees."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.key, self.value, self.query = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.first, self.rate = nn.Parameter(0.1 * torch.randn(width, width)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        weight = self.first.expand(len(x), -1, -1)
        made = []
        for part in x.split(4, 1):
            key, value = self.key(part), self.value(part)
            with torch.enable_grad():
                wrong = (key @ weight - value).square().mean((1, 2)).sum()
                (slope,) = torch.autograd.grad(wrong, weight, create_graph=True)
            weight = weight - self.rate.exp() * slope
            made.append(self.query(part) @ weight)
        return self.head(x + torch.cat(made, 1)).mean(1)


@script("Test-time training: weights that learn within each forward, by gradients of a loss of their own")
def adapting_weights(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Adapting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x in rows(steps, 256, 8):
            x = x.view(16, 16, 8)
            loss = F.cross_entropy(model(x), x.mean(1)[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adamw": optimizer}


def _painter(width: int = 8) -> nn.Sequential:
    layers = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU())
    return layers.extend(
        [nn.Conv2d(width, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)]
    )


def _critic(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 4, 2, 1))


@script("CycleGAN: two generators with one optimizer, two critics with another that also see pictures from before", steps=16)
def cycle(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    networks = nn.ModuleDict({"there": _painter(), "back": _painter(), "of_x": _critic(), "of_y": _critic()})
    painters, critics = [networks["there"], networks["back"]], [networks["of_x"], networks["of_y"]]
    for_painters = torch.optim.Adam([p for net in painters for p in net.parameters()], lr=2e-4, betas=(0.5, 0.999))
    for_critics = torch.optim.Adam([p for net in critics for p in net.parameters()], lr=2e-4, betas=(0.5, 0.999))
    pool: list[Tensor] = []
    with watch(networks, [for_painters, for_critics]):
        for x, _ in images(steps, 6):
            y = 1 - x.flip(-1)
            for net in critics:
                net.requires_grad_(False)
            made_y, made_x = networks["there"](x), networks["back"](y)
            again_x, again_y = networks["back"](made_y), networks["there"](made_x)
            fooled = sum(
                (net(made) - 1).square().mean() for net, made in ((networks["of_y"], made_y), (networks["of_x"], made_x))
            )
            loss = fooled + 10 * (F.l1_loss(again_x, x) + F.l1_loss(again_y, y))
            for_painters.zero_grad()
            loss.backward()
            for_painters.step()
            for net in critics:
                net.requires_grad_(True)
            for_critics.zero_grad()
            pool = [*pool, made_y.detach()][-2:]
            shown = pool[int(torch.randint(len(pool), ()))]
            found = []
            for net, real, made in ((networks["of_y"], y, shown), (networks["of_x"], x, made_x.detach())):
                seen = ((net(real) - 1).square().mean() + net(made).square().mean()) / 2
                seen.backward()
                found.append(seen.item())
            for_critics.step()
            log(loss.item(), *found)
    return {"networks": networks, "painters": for_painters, "critics": for_critics}
