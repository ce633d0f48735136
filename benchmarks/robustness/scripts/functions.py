"""Custom autograd Functions with memory of their own, and rounds of a model's forward that run without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, fit, rows, script, tokens

WORDS = 256


class Body(nn.Module):
    """A language model whose last layer is a bare weight."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Parameter(0.1 * torch.randn(WORDS, width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x).flatten(0, -2)


class FusedHead(Function):
    """The loss of a language model by chunks; its gradients are computed in the forward, in one scratch buffer."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
        scratch = hidden.new_empty(size, len(weight))
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for begin in range(0, len(hidden), size):
            h, y = hidden[begin : begin + size], targets[begin : begin + size, None]
            logits = torch.mm(h, weight.T, out=scratch[: len(h)])
            highest = logits.logsumexp(1, keepdim=True)
            total += (highest - logits.gather(1, y)).sum()
            logits.sub_(highest).exp_().scatter_add_(1, y, torch.full_like(highest, -1.0))
            torch.mm(logits, weight, out=of_hidden[begin : begin + size])
            of_weight.addmm_(logits.T, h)
        ctx.save_for_backward(of_hidden.div_(len(hidden)), of_weight.div_(len(hidden)))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden.mul_(gradient), of_weight.mul_(gradient), None, None


@script("A fused loss head: logits by chunks into one scratch buffer (`out=`), gradients computed in the forward")
def fused_head(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Body()

    def loss_of(ids: Tensor) -> Tensor:
        return FusedHead.apply(model(ids), model.head, ids.roll(-1, 1).flatten(), 64)

    return fit(watch, log, model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(steps, (16, 16), WORDS), loss_of)


class Likelihood(Function):
    """Log-probabilities of words; backward makes the logits again in a scratch buffer that is larger than they are."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
        scratch = hidden.new_empty(len(hidden), 2 * WORDS)
        logits = torch.mm(hidden, weight.T, out=scratch[:, : len(weight)])
        total = logits.logsumexp(1)
        ctx.save_for_backward(hidden, weight, words, total)
        return logits.gather(1, words[:, None])[:, 0] - total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, words, total = ctx.saved_tensors
        scratch = hidden.new_empty(len(hidden), 2 * WORDS)
        logits = torch.mm(hidden, weight.T, out=scratch[:, : len(weight)])
        logits.sub_(total[:, None]).exp_().neg_().scatter_add_(1, words[:, None], torch.ones_like(total)[:, None])
        logits.mul_(gradient[:, None])
        return logits @ weight, logits.T @ hidden, None


@script("Rewards within groups (GRPO): words are drawn one by one without gradients; log-probabilities by scratch buffers")
def group_rewards(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Body()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for prompt in tokens(steps, (4, 4), WORDS):
            ids = prompt.repeat_interleave(8, 0)
            with torch.no_grad():
                for _ in range(6):
                    chances = (model(ids).view(len(ids), -1, 48)[:, -1] @ model.head.T).softmax(-1)
                    ids = torch.cat([ids, chances.multinomial(1)], 1)
            reward = (ids[:, 4:] % 2).float().mean(1).view(4, 8)
            gain = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
            for _ in range(2):
                chance = Likelihood.apply(model(ids[:, :-1]), model.head, ids[:, 1:].flatten()).view(len(ids), -1)[:, 3:]
                ratio = (chance - chance.detach()).exp()
                loss = -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * gain[:, None]).mean()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item(), reward.mean().item())
    return {"model": model, "adamw": optimizer}


class Recursive(nn.Module):
    """One small network that improves an answer many times; the last round alone has gradients."""

    def __init__(self, width: int = 48, rounds: int = 6) -> None:
        super().__init__()
        self.rounds = rounds
        self.into, self.out = nn.Linear(16, width), nn.Linear(width, 16)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width), nn.LayerNorm(width))

    def improved(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            z = self.layers(x + y + z)
        return self.layers(y + z), z

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.into(x)
        with torch.no_grad():
            for _ in range(self.rounds - 1):
                y, z = self.improved(x, y, z)
        y, z = self.improved(x, y, z)
        return y.detach(), z.detach(), self.out(y)


@script(
    "A tiny recursive model: rounds without gradients and a last one with them, an update after each of three answers", steps=18
)
def recursive(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Recursive()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for x in rows(steps // 3, 128, 16):
            y = z = torch.zeros(len(x), 48)
            for _ in range(3):
                y, z, answer = model(x, y, z)
                loss = F.mse_loss(answer, x.cumsum(1).tanh())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                log(loss.item())
    return {"model": model, "adamw": optimizer}


class Equilibrium(nn.Module):
    """A layer whose output is its own fixed point: found without gradients, in backward by another fixed point."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, width), nn.Linear(width, 4)
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def once(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(0.5 * z + 0.3 * self.two(torch.relu(self.one(z) + x)))

    @staticmethod
    def solved(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        for _ in range(12):
            after = f(z)
            if (after - z).norm() < 1e-2 * after.norm():
                return after
            z = after
        return z

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        with torch.no_grad():
            z = self.solved(lambda z: self.once(z, x), torch.zeros_like(x))
        z = self.once(z, x)
        if self.training:
            start = z.detach().requires_grad_()
            after = self.once(start, x)

            def solve(gradient: Tensor) -> Tensor:
                return self.solved(lambda g: torch.autograd.grad(after, start, g, retain_graph=True)[0] + gradient, gradient)

            z.register_hook(solve)
        return self.out(z)


@script("A deep equilibrium layer: a fixed point without gradients, and another one in a hook of backward")
def equilibrium(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Equilibrium()

    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), x[:, :4].argmax(1))

    return fit(watch, log, model, torch.optim.Adam(model.parameters(), lr=1e-3), rows(steps, 128, 16), loss_of)


class Decay(Function):
    """A linear recurrence over time. All its states are written into one buffer, which the context keeps."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n, length, width = key.shape
        states = key.new_zeros(length + 1, n, width)
        for t in range(length):
            torch.mul(states[t], decay, out=states[t + 1])
            states[t + 1].addcmul_(key[:, t], value[:, t])
        ctx.states = states
        ctx.save_for_backward(decay, key, value)
        return states[1:].transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, key, value = ctx.saved_tensors
        carried, of_decay = torch.zeros_like(key[:, 0]), torch.zeros_like(decay)
        of_key, of_value = torch.empty_like(key), torch.empty_like(value)
        for t in reversed(range(key.shape[1])):
            carried.add_(gradient[:, t])
            torch.mul(carried, value[:, t], out=of_key[:, t])
            torch.mul(carried, key[:, t], out=of_value[:, t])
            of_decay += (carried * ctx.states[t]).sum(0)
            carried.mul_(decay)
        return of_decay, of_key, of_value


class Mixer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, width), nn.Linear(width, 40)
        self.key, self.value, self.gate = (nn.Linear(width, width) for _ in range(3))
        self.decay, self.norm = nn.Parameter(torch.linspace(0, 3, width)), nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids))
        state = Decay.apply(self.decay.sigmoid(), self.key(x).exp().clamp(max=4), self.value(x))
        return self.head(x + self.gate(x).sigmoid() * state)


@script("Linear attention by a custom Function (RWKV): its states are one buffer that the context keeps")
def linear_attention(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Mixer()

    def loss_of(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return fit(watch, log, model, torch.optim.AdamW(model.parameters(), lr=1e-3), tokens(steps, (8, 25)), loss_of)


class Coupled(Function):
    """An invertible block: the storage of its input is emptied in forward, and filled again in backward from its output."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            a, b = x.chunk(2, 1)
            y = torch.cat([b, a + f(b)], 1)
        x.untyped_storage().resize_(0)
        ctx.f, ctx.kept = f, (x, y, weights)
        return y.detach_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        f, (x, y, weights) = ctx.f, ctx.kept
        with torch.no_grad():
            b, changed = y.chunk(2, 1)
            before = torch.cat([changed - f(b), b], 1)
            y.untyped_storage().resize_(0)
            x.untyped_storage().resize_(before.nbytes)
            x.copy_(before)
            ctx.kept = None
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            a, b = again.chunk(2, 1)
            output = torch.cat([b, a + f(b)], 1)
        return None, *torch.autograd.grad(output, (again, *weights), gradient)


class Reversible(nn.Module):
    def __init__(self, width: int = 48, depth: int = 5) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width // 2, width), nn.Tanh(), nn.Linear(width, width // 2)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = Coupled.apply(block, x, *block.parameters())
        return self.out(x)


@script("Invertible blocks (MemCNN): storages that are emptied in forward and filled again in backward")
def reversible(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Reversible()

    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), x[:, :4].argmax(1))

    return fit(watch, log, model, torch.optim.Adam(model.parameters(), lr=1e-3), rows(steps, 512, 16), loss_of)


class Shared(nn.Module):
    """Dense blocks whose concatenations share one storage: each forward grows it, all read parts of it."""

    def __init__(self, growth: int = 12, depth: int = 5) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, growth), nn.Linear(growth * (depth + 1), 4)
        self.layers = nn.ModuleList(nn.Linear(growth * (i + 1), growth) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.into(x)]
        for layer in self.layers:
            joined = torch.cat(kept, 1)
            made = F.relu(layer(joined))
            if not torch.is_grad_enabled():
                joined.untyped_storage().resize_(0)
            kept.append(made)
        return self.out(torch.cat(kept, 1))


@script("Dense blocks: storages of concatenations are emptied in evaluations, which alternate with training")
def emptied_evaluations(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, optimizer):
        for x in rows(steps, 256, 16):
            with torch.no_grad():
                before = F.cross_entropy(model(x), x[:, :4].argmax(1))
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(before.item(), loss.item())
    return {"model": model, "sgd": optimizer}
