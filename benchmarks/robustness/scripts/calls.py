"""Loops that call a model many times a step, and models of many tiny ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.robustness.scripts.registry import Log, Watch, fit, rows, script, tokens

Slope = Callable[[float, Tensor], Tensor]


class Field(nn.Module):
    """How fast a point moves."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, t: float, y: Tensor) -> Tensor:
        return self.layers(y**3) * (1 + 0.1 * t)


def _integrated(f: Slope, y: Tensor, end: float, tolerance: float = 2e-3) -> Tensor:
    """Heun's method with steps as long as its error allows: how often `f` is called depends on the weights."""
    t, step = 0.0, 0.05
    while t < end:
        step = min(step, end - t)
        first = f(t, y)
        second = f(t + step, y + step * first)
        error = float((step / 2 * (second - first)).detach().abs().max())
        if error <= tolerance or step < 1e-3:
            t, y = t + step, y + step / 2 * (first + second)
        step *= min(3.0, max(0.3, 0.9 * (tolerance / (error + 1e-12)) ** 0.5))
    return y


def _spiral(y: Tensor) -> Tensor:
    turn = torch.tensor([[0.9, 0.3], [-0.3, 0.9]])
    return y @ turn


@script("A neural ODE: the solver calls the model as often as its error asks for")
def neural_ode(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Field()

    def loss_of(y: Tensor) -> Tensor:
        return (_integrated(model, y.tanh(), 1.0) - _spiral(y.tanh())).abs().mean()

    return fit(watch, log, model, torch.optim.RMSprop(model.parameters(), lr=1e-3), rows(steps, 64, 2), loss_of)


class Adjoint(Function):
    """The solver runs without gradients; backward solves the adjoint equation, and calls the model with them."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, steps: int, y: Tensor, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            for i in range(steps):
                y = y + f(i / steps, y) / steps
        ctx.f, ctx.steps = f, steps
        ctx.save_for_backward(y, *weights)
        return y

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> tuple[Tensor | None, ...]:
        y, *weights = ctx.saved_tensors
        totals = [torch.zeros_like(w) for w in weights]
        for i in reversed(range(ctx.steps)):
            with torch.enable_grad():
                at = y.detach().requires_grad_()
                slope = ctx.f(i / ctx.steps, at)
                of_y, *of_weights = torch.autograd.grad(slope, (at, *weights), adjoint)
            y = y - slope.detach() / ctx.steps
            adjoint = adjoint + of_y / ctx.steps
            for total, gradient in zip(totals, of_weights, strict=True):
                total.add_(gradient, alpha=1 / ctx.steps)
        return None, None, adjoint, *totals


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 2)
        self.field = Field()
        self.out = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Adjoint.apply(self.field, 12, self.into(x), *self.field.parameters()))


@script("A neural ODE by its adjoint: a custom Function whose backward calls a module of the model with gradients")
def adjoint_ode(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Flow()

    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), x[:, :4].argmax(1))

    return fit(watch, log, model, torch.optim.Adam(model.parameters(), lr=1e-3), rows(steps, 256, 8), loss_of)


class Speller(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.encoder, self.decoder = nn.GRUCell(width, width), nn.GRUCell(2 * width, width)
        self.score, self.head = nn.Linear(2 * width, 1), nn.Linear(width, 40)

    def encode(self, word: Tensor, state: Tensor) -> Tensor:
        return self.encoder(self.words(word), state)

    def decode(self, word: Tensor, state: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.score(torch.cat([seen, state[:, None].expand_as(seen)], -1)).tanh().softmax(1)
        state = self.decoder(torch.cat([self.words(word), (weights * seen).sum(1)], -1), state)
        return self.head(state), state


@script("Words one by one: the loop calls an encoder's cell and a decoder's for each, half of the time with its own guess")
def word_by_word(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Speller()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for i, ids in enumerate(tokens(steps, (16, 8))):
            state, seen = torch.zeros(len(ids), 32), []
            for word in ids.T:
                state = model.encode(word, state)
                seen.append(state)
            memory = torch.stack(seen, 1)
            word = torch.zeros_like(ids[:, 0])
            loss = torch.zeros(())
            for wanted in ids.flip(1).T:
                logits, state = model.decode(word, state, memory)
                loss = loss + F.cross_entropy(logits, wanted)
                word = wanted if i % 2 else logits.detach().argmax(1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            log(loss.item() / ids.shape[1])
    return {"model": model, "sgd": optimizer}


class Trees(nn.Module):
    """A sentence is a tree, and each inner node combines two states (Tree-LSTM)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 2 * width)
        self.join = nn.Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, 3)

    def state(self, tree: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            h, c = self.words(torch.tensor(tree)).chunk(2)
            return h.tanh(), c
        (h1, c1), (h2, c2) = (self.state(branch) for branch in tree)
        i, f1, f2, o, u = self.join(torch.cat([h1, h2])).chunk(5)
        c = i.sigmoid() * u.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
        return o.sigmoid() * c.tanh(), c

    def forward(self, trees: list[Any]) -> Tensor:
        return self.head(torch.stack([self.state(tree)[0] for tree in trees]))


def _tree(words: list[int]) -> Any:
    if len(words) == 1:
        return words[0]
    at = 1 + words[0] % (len(words) - 1)
    return _tree(words[:at]), _tree(words[at:])


@script("Sentences as trees: as many tiny ops as there are nodes, another tree in every batch")
def sentence_trees(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Trees()

    def loss_of(ids: Tensor) -> Tensor:
        return F.cross_entropy(model([_tree(words) for words in ids.tolist()]), ids.sum(1) % 3)

    return fit(watch, log, model, torch.optim.Adagrad(model.parameters(), lr=0.05), tokens(steps, (6, 7)), loss_of)


class Tagger(nn.Module):
    """A tag for each word, by a chain of scores between tags (BiLSTM-CRF): the forward algorithm, word by word."""

    def __init__(self, width: int = 32, tags: int = 6) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(40, width), nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.scores, self.moves = nn.Linear(width, tags), nn.Parameter(0.1 * torch.randn(tags, tags))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        scores = self.scores(self.read(self.words(ids))[0])
        total = scores[:, 0]
        for score in scores.unbind(1)[1:]:
            total = (total[:, :, None] + self.moves + score[:, None]).logsumexp(1)
        truth = scores.gather(2, tags[..., None]).sum((1, 2)) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        return (total.logsumexp(1) - truth).mean()


@script("A tagger with a chain of scores between tags (BiLSTM-CRF)")
def tagger(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Tagger()

    def loss_of(ids: Tensor) -> Tensor:
        return model(ids, ids % 6)

    return fit(
        watch, log, model, torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-4), tokens(steps, (8, 20)), loss_of
    )


class Listener(nn.Module):
    """Sounds to letters: a strided convolution, a GRU, and CTC."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(8, width, 3, 2, 1), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1), nn.ReLU())
        self.rnn, self.head = nn.GRU(width, width, bidirectional=True, batch_first=True), nn.Linear(2 * width, 12)

    def forward(self, sound: Tensor) -> Tensor:
        return self.head(self.rnn(self.conv(sound.transpose(1, 2)).transpose(1, 2))[0]).log_softmax(-1)


@script("Speech by CTC: sorted by length, so that every batch is longer than all before", steps=16)
def longer_and_longer(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    model = Listener()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(5)
    with watch(model, optimizer):
        for i in range(steps):
            lengths = 24 + 8 * i + torch.randint(0, 4, (6,), generator=source)
            sound = pad_sequence([torch.randn(int(n), 8, generator=source) for n in lengths], batch_first=True)
            letters = torch.randint(1, 12, (6, 5 + i // 2), generator=source)
            chances = model(sound)
            inputs = (lengths + 1) // 2
            loss = F.ctc_loss(chances.transpose(0, 1), letters, inputs, torch.full((6,), letters.shape[1]), zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            log(loss.item())
    return {"model": model, "adamw": optimizer}
