"""A character-level GPT trained on the source text of the Python standard library.

In: the `*.py` files beside `os.py` of the running interpreter, so the text (and the loss, a little) depends on its
version. Out: `build` for plain torch, `task` and `data` for Lightning. The network is GPT-2's pre-norm
block (Radford et al., 2019, section 2.3) without attention dropout, which keeps the fused attention kernel on CPU.
"""

import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from .training import Data, Task, Workload, fit, loss_of

CHARACTERS = "\t\n\f\r" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(CHARACTERS)
VOCABULARY_SIZE = len(CHARACTERS) + 1
UNKNOWN_MARK = "\N{REPLACEMENT CHARACTER}"
TEXT_NCHARS = 2_000_000
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class CharGPTSettings:
    """Sizes of network and training; `context` is in characters, `batch_size` in windows of that length."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    context: int = 128
    batch_size: int = 16
    dropout: float = 0.1
    learning_rate: float = 2e-3
    steps: int = 200
    held_out_batches: int = 16

    @classmethod
    def quick(cls) -> "CharGPTSettings":
        """A few steps of a smaller network: for tests, not for memory figures."""
        return cls(layers=2, width=64, heads=2, context=64, batch_size=8, steps=20, held_out_batches=2)


FULL = CharGPTSettings()


# The text


@cache
def stdlib_text(max_nchars: int = TEXT_NCHARS) -> str:
    """The first `max_nchars` characters of the top-level standard library modules, in the order of their names."""
    parts: list[str] = []
    missing = max_nchars
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if missing <= 0:
            break
        parts.append(path.read_text(encoding="utf-8", errors="replace")[:missing])
        missing -= len(parts[-1])
    if not parts:
        raise FileNotFoundError(f"no *.py in {sysconfig.get_path('stdlib')}: is the standard library in an archive?")
    return "".join(parts)


def encode(text: str) -> Tensor:
    """Ids of the characters, uint8 `[len(text)]`; every character outside `CHARACTERS` becomes `UNKNOWN`."""
    # NUL is not in CHARACTERS, so it can stand for all that one byte cannot hold.
    raw = re.sub(r"[^\x00-\x7f]", "\0", text).encode("ascii")
    table = torch.full((128,), UNKNOWN, dtype=torch.uint8)
    table[torch.tensor([ord(c) for c in CHARACTERS])] = torch.arange(len(CHARACTERS), dtype=torch.uint8)
    return table[torch.tensor(list(raw), dtype=torch.int64)]


def decode(ids: Tensor) -> str:
    """The text of a 1-d tensor of ids; `UNKNOWN` reads as `UNKNOWN_MARK`."""
    return "".join((CHARACTERS + UNKNOWN_MARK)[i] for i in ids.tolist())


def split_text() -> tuple[Tensor, Tensor]:
    """Ids to train on and held-out ids: the text cut once, so no window is on both sides."""
    ids = encode(stdlib_text())
    cut = len(ids) - int(len(ids) * HELD_OUT_SHARE)
    return ids[:cut], ids[cut:]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Side-by-side windows of a text: item i is `(tokens, next tokens)`, both int64 `[context]`."""

    def __init__(self, ids: Tensor, context: int) -> None:
        self.ids, self.context = ids, context

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.ids[index * self.context :][: self.context + 1].long()
        return window[:-1], window[1:]


def loaders(settings: CharGPTSettings, seed: int) -> tuple[DataLoader, DataLoader]:
    """Loaders of `(tokens, next tokens)` batches, int64 `[batch, context]`: training and held-out."""
    train, held_out = (Windows(ids, settings.context) for ids in split_text())
    # Windows spread over the whole held-out text, because neighbours come from one file.
    count = min(len(held_out), settings.held_out_batches * settings.batch_size)
    spread = torch.linspace(0, len(held_out) - 1, count).long().tolist()
    order = torch.Generator().manual_seed(seed)
    return (
        # drop_last: every step has the same shapes, as a memory plan expects.
        DataLoader(train, settings.batch_size, shuffle=True, drop_last=True, generator=order),
        DataLoader(Subset(held_out, spread), settings.batch_size),
    )


# The network


class Block(nn.Module):
    """Causal attention and an MLP, each on a normalised copy of the residual stream `[batch, time, width]`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def attend(self, x: Tensor) -> Tensor:
        """Multi-head causal self-attention, `[batch, time, width]` to the same."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class CharGPT(nn.Module):
    """Tokens, int64 `[batch, time <= context]`, to logits of the next character `[batch, time, VOCABULARY_SIZE]`."""

    def __init__(self, settings: CharGPTSettings) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY_SIZE, settings.width)
        self.position = nn.Embedding(settings.context, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.Sequential(*(Block(settings.width, settings.heads, settings.dropout) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY_SIZE, bias=False)
        self.apply(self._initialise)
        nn.init.normal_(self.position.weight, std=0.02)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        # Small weights: the first loss is then near that of a uniform guess, log(100) = 4.6. Token embeddings keep
        # their unit scale: with 0.02 as in GPT-2 the loss stays above 2.9 for the first hundred steps.
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        position = self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.dropout(self.token(tokens) + position))))


# Training


def build_model(seed: int, settings: CharGPTSettings) -> CharGPT:
    """The network with the weights of `seed`; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CharGPT(settings)


def make_optimizer(model: nn.Module, settings: CharGPTSettings) -> torch.optim.Optimizer:
    """AdamW over all parameters: two state values per parameter."""
    return torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99))


def build(seed: int, settings: CharGPTSettings = FULL) -> Workload:
    """Model, optimizer factory and loaders, all fixed by `seed`. Dropout draws from torch's global generator."""
    return Workload(build_model(seed, settings), lambda model: make_optimizer(model, settings), *loaders(settings, seed))


def task(settings: CharGPTSettings = FULL, seed: int = 0) -> Task:
    """The network with its optimizer, for a Trainer."""
    return Task(build_model(seed, settings), lambda model: make_optimizer(model, settings))


def data(settings: CharGPTSettings = FULL, seed: int = 0) -> Data:
    """The loaders, for a Trainer."""
    return Data(lambda: loaders(settings, seed))


__all__ = ["FULL", "CharGPTSettings", "build", "build_model", "data", "loss_of", "task"]

if __name__ == "__main__":
    fit(task(), data(), budget="64MiB", max_steps=FULL.steps, val_check_interval=FULL.steps)
