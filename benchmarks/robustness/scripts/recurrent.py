"""Sequences read one step at a time."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.robustness.scripts.registry import Log, Watch, rows, script, tokens

WORDS, LENGTH, SIZE = 40, 16, 12
State = tuple[Tensor, Tensor]


class Waves(nn.Module):
    """Two cells that predict the next value of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.LSTMCell(1, 20), nn.LSTMCell(20, 20), nn.Linear(20, 1)

    def forward(self, series: Tensor) -> Tensor:
        n = len(series)
        h1 = c1 = h2 = c2 = torch.zeros(n, 20, dtype=series.dtype)
        found = []
        for value in series.split(1, dim=1):
            h1, c1 = self.one(value, (h1, c1))
            h2, c2 = self.two(h1, (h2, c2))
            found.append(self.out(h2))
        return torch.cat(found, dim=1)


@script("Time series in double precision, LBFGS with a closure", steps=12)
def waves(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    at = torch.arange(9)[None] + torch.randint(-80, 80, (24, 1))
    series = torch.sin(at / 5.0).double()
    model = Waves().double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3)
    with watch(model, optimizer):
        for _ in range(steps):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = criterion(model(series[:, :-1]), series[:, 1:])
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            log(loss.item())
    return {"model": model, "lbfgs": optimizer}


class Reader(nn.Module):
    """A word language model whose state the loop carries from batch to batch."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.width = width
        self.drop, self.embed = nn.Dropout(0.2), nn.Embedding(WORDS, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)
        self.decode = nn.Linear(width, WORDS)
        self.decode.weight = self.embed.weight

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        h, state = self.rnn(self.drop(self.embed(words)), state)
        return F.log_softmax(self.decode(self.drop(h)).view(-1, WORDS), dim=1), state

    def begin(self) -> State:
        return torch.zeros(2, SIZE, self.width), torch.zeros(2, SIZE, self.width)


def _cut(state: State) -> State:
    """Without the history of earlier batches."""
    return state[0].detach(), state[1].detach()


@script("Word language model: LSTM, its state carried, SGD")
def words_lstm(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = model.begin()
    with watch(model, optimizer):
        for batch in tokens(steps, (LENGTH + 1, SIZE)):
            optimizer.zero_grad()
            state = _cut(state)
            output, state = model(batch[:-1], state)
            loss = F.nll_loss(output, batch[1:].reshape(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            log(loss.item())
    return {"model": model, "state": state, "sgd": optimizer}


@script("Word language model: LSTM, the update written by hand (`p.data.add_`)", steps=24)
def words_by_hand(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Reader()
    state = model.begin()
    rate, best = 0.5, math.inf
    with watch(model, []):
        for batch in tokens(steps, (LENGTH + 1, SIZE)):
            model.zero_grad()
            state = _cut(state)
            output, state = model(batch[:-1], state)
            loss = F.nll_loss(output, batch[1:].reshape(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-rate)
            best = min(best, loss.item())
            log(loss.item(), best)
    return {"model": model, "state": state}


class Translator(nn.Module):
    """Reads one sentence and writes another: a GRU each, with attention."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.read, self.write = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(2 * width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        told, state = self.read(self.drop(self.embed(source)))
        said, _ = self.write(self.drop(self.embed(target)), state)
        match = (said @ told.transpose(1, 2)).masked_fill((source == 0)[:, None], -1e9).softmax(-1)
        return self.out(torch.cat((said, match @ told), -1))


@script("Translation: padded to another length in every batch", steps=20)
def translation(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    lengths = torch.randint(4, 11, (steps, 2), generator=torch.Generator().manual_seed(3)).tolist()
    with watch(model, optimizer):
        for n, m in lengths:
            source, target = torch.randint(1, WORDS, (16, n)), torch.randint(1, WORDS, (16, m + 1))
            source[:8, n - 2 :] = 0
            logits = model(source, target[:, :-1])
            optimizer.zero_grad()
            loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "adam": optimizer}


@script("A model that is an `nn.GRU`, copied into a slow teacher in the middle of training")
def gru_teacher(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = nn.GRU(16, 32, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    teacher = None
    with watch(model, optimizer):
        for i, x in enumerate(rows(steps, 32 * 12, 16)):
            x = x.view(32, 12, 16)
            if i == 5:
                teacher = copy.deepcopy(model)
            output, _ = model(x)
            loss = (output[..., :16] - x.roll(-1, 1)).square().mean()
            if teacher is not None:
                with torch.no_grad():
                    for slow, p in zip(teacher.parameters(), model.parameters(), strict=True):
                        slow.lerp_(p, 0.1)
                    taught, _ = teacher(x)
                loss = loss + (output - taught).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
    return {"model": model, "teacher": teacher, "sgd": optimizer}
