"""A small language model, loops that train it, and a comparison of a run in tiles with the plain run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_memopt import optimize

CLASSES, WIDTH, TOKENS = 2048, 32, 64
BATCH = 4
STEPS = 7
Loop = Callable[[nn.Module, torch.optim.Optimizer, "Log", Callable[[], Any]], None]


class LanguageModel(nn.Module):
    """Embedding, two residual blocks with dropout, layer norm, and a head. Returns (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return self.norm(x)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = self.head(self.hidden(ids))
        loss = None if labels is None else F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        return logits, loss


class Picking(LanguageModel):
    """Scores the first `rows` tokens alone."""

    rows = 256

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.head(self.hidden(ids).flatten(0, 1)[: self.rows]), None


def picking(rows: Callable[[int], int]) -> Loop:
    """Trains a `Picking` for nine steps, each on so many tokens."""

    def train(model: Any, optimizer: Any, log: Log, run: Any) -> None:
        for step, (ids, labels) in enumerate(batches(9)):
            model.rows = rows(step)
            loss = F.cross_entropy(model(ids)[0], labels.flatten()[: model.rows])
            loss.backward()
            log.note(loss)
            optimizer.step()
            optimizer.zero_grad()

    return train


@dataclass
class Log:
    """What a loop saw: anything that must be equal to the bit with and without tiles."""

    values: list[Any] = field(default_factory=list)

    def note(self, value: Any) -> None:
        self.values.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each step; some labels are ignored."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(steps):
        ids = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        made.append((ids, labels))
    return made


def by_step(
    loss_of: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    steps: int = STEPS,
    within: Callable[[int], Any] = lambda step: contextlib.nullcontext(),
    notes_gradient: bool = False,
) -> Loop:
    """A loop that trains with a loss of (step, logits, ids, labels). `within`: gives the context of the forward of a step.
    `notes_gradient`: the gradients of the head are compared, too.
    """

    def train(model: Any, optimizer: Any, log: Log, run: Any) -> None:
        for step, (ids, labels) in enumerate(batches(steps)):
            with within(step):
                loss = loss_of(step, model(ids)[0], ids, labels)
            loss.backward()
            log.note(loss)
            if notes_gradient:
                log.note(model.head.weight.grad)
            optimizer.step()
            optimizer.zero_grad()

    return train


@dataclass
class Ran:
    """What came of a run: the parameters, the log, the lines that were said, and the status at the end."""

    parameters: list[torch.Tensor]
    log: Log
    lines: list[str]
    status: Any

    @property
    def tiled(self) -> bool:
        """Whether a plan in tiles was put in force."""
        return any(" runs in tiles of " in line for line in self.lines)

    @property
    def why_whole(self) -> list[str]:
        """The lines that say why no head runs in tiles."""
        return [line for line in self.lines if line.startswith("MemOpt: no loss head runs in tiles: ")]


def _trained(loop: Loop, model: nn.Module, **options: Any) -> Ran:
    torch.manual_seed(3)
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    log, lines = Log(), list[str]()
    if not options:
        loop(model, optimizer, log, lambda: None)
        return Ran([p.detach() for p in model.parameters()], log, lines, None)
    with optimize(model, optimizer, verbose=False, **options) as run:
        run.session.say = lines.append
        run.session._tiling._say = lines.append
        loop(model, optimizer, log, lambda: run)
        status = run.status()
    return Ran([p.detach() for p in model.parameters()], log, lines, status)


def compare(loop: Loop, model: nn.Module | None = None, **options: Any) -> Ran:
    """Train by a loop with and without tiles, assert equal bits, and return the run in tiles."""
    torch.manual_seed(1)
    model = LanguageModel() if model is None else model
    plain = _trained(loop, model)
    ran = _trained(loop, model, **{"budget": "min", "tile": "exact"} | options)
    assert len(plain.log.values) == len(ran.log.values)
    for a, b in zip(plain.log.values, ran.log.values, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    for a, b in zip(plain.parameters, ran.parameters, strict=True):
        assert torch.equal(a, b)
    return ran
