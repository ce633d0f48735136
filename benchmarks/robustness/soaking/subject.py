"""The model of a soak: dropout, batch norm, tied weights, a write in place, ops that no plan runs again, places to fail."""

from __future__ import annotations

import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.robustness.leak import twice
from benchmarks.robustness.soaking.draws import AT_HEAD, LAYERS, Fault

WORDS, WIDTH = 40, 32
CLASSES = 1024
"""Number of words where there is a large loss head."""


class Broken(Exception):
    """What a step raises here."""


class Trap:
    """Raises the fault of a step where it comes by, once.

    fault: that of this step; None where nothing goes wrong.
    micro: the number of the batch that runs.
    sprung: the fault has been raised.
    reads: how logits are read in this step; "" where they are not.
    read: what was read of them.
    """

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.micro = 0
        self.sprung = False
        self.reads = ""
        self.read: list[Tensor] = []

    def set(self, fault: Fault | None, reads: str = "") -> None:
        self.fault, self.micro, self.sprung = fault, 0, False
        self.reads = reads
        self.read = []

    def at(self, place: str, layer: int | None = None) -> None:
        """The step is at this place, in this layer. Raises where its fault is here."""
        fault = self.fault
        if fault is None or self.sprung or fault.place != place or layer not in (None, fault.layer):
            return
        if place in ("forward", "backward", "gradient", *AT_HEAD.values()) and self.micro != fault.micro:
            return
        self.sprung = True
        if fault.interrupts:
            signal.raise_signal(signal.SIGINT)
        raise Broken(place)


class Own(torch.autograd.Function):
    """A function of the user's: no plan runs it again. It may raise in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap, layer: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.trap, ctx.layer = trap, layer
        return x * torch.sigmoid(1.5 * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.trap.at("backward", ctx.layer)
        gate = torch.sigmoid(1.5 * x)
        return grad * (gate + 1.5 * x * gate * (1 - gate)), None, None


class Layer(nn.Module):
    """One layer. It fails in forward, in backward, and where a gradient comes by."""

    def __init__(self, trap: Trap, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.middle, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.trap, self.number = trap, number

    def forward(self, x: Tensor) -> Tensor:
        h = Own.apply(self.up(self.norm(x)), self.trap, self.number)
        h = twice(F.relu(twice(h) - 0.1)).sin()
        h = twice(self.middle(h))
        self.trap.at("forward", self.number)
        h = F.dropout(F.gelu(self.down(h)), 0.1, self.training)
        if h.requires_grad and self.trap.fault is not None:
            h.register_hook(self._passes)
        return (x + h).mul_(0.9)

    def _passes(self, grad: Tensor) -> None:
        self.trap.at("gradient", self.number)


class Subject(nn.Module):
    """The loss of a batch of words, each of which is to be told from the others in its row. `head`: there are many words, and
    the loss may run in tiles.
    """

    def __init__(self, head: bool = False) -> None:
        super().__init__()
        words = CLASSES if head else WORDS
        self.trap = Trap()
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer(self.trap, number) for number in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=not head)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) * 0.5
        for layer in self.layers:
            x = layer(x + x.tanh().mean(1, keepdim=True))
        x = self.norm(x.flatten(0, 1))
        logits = self.head(x).float()
        if self.trap.reads and self.training:
            self._reads(logits.detach())
        self.trap.at("loss")
        if logits.requires_grad and self.trap.fault is not None:
            logits.register_hook(lambda grad: self.trap.at("scores"))
        return F.cross_entropy(logits, words.roll(1, 1).flatten())

    def _reads(self, logits: Tensor) -> None:
        if self.trap.reads == "metric":
            logits = logits.argmax(-1)
        elif self.trap.reads == "array":
            logits = torch.from_numpy(logits.numpy()[0, :5].copy())
        self.trap.read.append(logits)
