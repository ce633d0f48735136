"""Steps in which another model, or an average of the model, runs before the model does, and tests between the steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

from benchmarks.robustness.scripts.registry import Log, Watch, images, script, tokens


def _backbone(width: int = 16, out: int = 32) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()
    )
    layers.extend([nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, out)])
    return layers


@torch.no_grad()
def _follow(average: nn.Module, model: nn.Module, share: float) -> None:
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        mean.mul_(1 - share).add_(p.detach(), alpha=share)


@script(
    "Self-distillation (DINO): the teacher sees large crops before the student sees large and small ones; its centre follows"
)
def self_distillation(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    student = _backbone()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    centre = torch.zeros(1, 32)
    with watch(student, optimizer):
        for x, _ in images(steps, 24, side=24):
            large = [x, x.flip(-1)]
            small = [x[..., i : i + 12, i : i + 12] for i in (0, 6, 12)]
            wanted = teacher(torch.cat(large))
            answers = [student(torch.cat(large)), student(torch.cat(small))]
            soft = ((wanted - centre) / 0.05).softmax(-1).chunk(2)
            guessed = (torch.cat(answers) / 0.1).log_softmax(-1).chunk(5)
            loss = torch.zeros(())
            for i, p in enumerate(soft):
                for j, q in enumerate(guessed):
                    if i != j:
                        loss = loss - (p * q).sum(-1).mean() / 8
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            centre = 0.9 * centre + 0.1 * wanted.mean(0, keepdim=True)
            _follow(teacher, student, 0.02)
            log(loss.item())
    return {"student": student, "teacher": teacher, "centre": centre, "adamw": optimizer}


@script("Momentum contrast (MoCo): keys by an averaged encoder before the queries, negatives from a queue")
def momentum_queue(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _backbone()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    queue, at = F.normalize(torch.randn(32, 256), dim=0), 0
    with watch(model, optimizer):
        for x, _ in images(steps, 32):
            with torch.no_grad():
                _follow(average, model, 0.01)
                order = torch.randperm(len(x))
                keys = F.normalize(average((x + 0.1 * torch.randn_like(x))[order]))[order.argsort()]
            queries = F.normalize(model(x.flip(-1)))
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.clone()], 1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue[:, at : at + len(x)] = keys.T
            at = (at + len(x)) % queue.shape[1]
            log(loss.item())
    return {"model": model, "average": average, "queue": queue, "sgd": optimizer}


@script(
    "A test in the middle: all held-out pictures at once after every fourth step, also by an average of the weights", steps=16
)
def tested_in_between(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = _backbone(out=10)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    held, answers = next(images(1, 256))

    def tested(net: nn.Module) -> float:
        net.eval()
        with torch.no_grad():
            return (net(held).argmax(1) == answers).float().mean().item()

    with watch(model, optimizer):
        for i, (x, y) in enumerate(images(steps, 24)):
            model.train()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right: list[float] = []
            if i % 4 == 3:
                average.update_parameters(model)
                update_bn([x], average)
                right = [tested(model), tested(average)]
            log(loss.item(), *right)
    return {"model": model, "average": average, "sgd": optimizer}


class Speaker(nn.Module):
    def __init__(self, words: int = 64, width: int = 48) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.words(ids), src_mask=mask, is_causal=True))


def _chances(model: nn.Module, ids: Tensor) -> Tensor:
    """The log-probability of each answer: of chosen ones, then of rejected ones."""
    chances = model(ids[:, :-1]).log_softmax(-1)
    return chances.gather(2, ids[:, 1:, None])[:, 6:, 0].sum(1)


@script("Preferences (DPO): a reference model's log-probabilities before the policy's, chosen and rejected in one batch")
def preferences(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Speaker()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for prompt, answer in zip(tokens(steps, (8, 6), 64), tokens(steps, (16, 10), 64), strict=True):
            ids = torch.cat([prompt.repeat(2, 1), answer], 1)
            with torch.no_grad():
                before = _chances(reference, ids)
            chosen, rejected = (_chances(model, ids) - before).chunk(2)
            loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log(loss.item(), (chosen > rejected).float().mean().item())
    return {"model": model, "adamw": optimizer}
