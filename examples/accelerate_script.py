"""A training script for Accelerate that knows nothing of memory budgets: it predicts the next byte of Python's own sources.

    accelerate-memopt launch --cpu --memopt_budget 40MiB examples/accelerate_script.py
    accelerate-memopt launch --config_file configs/accelerate_single.yaml examples/accelerate_script.py
    accelerate launch -m lightning_memopt.launch --budget 40MiB examples/accelerate_script.py

The launcher prints the table at the end. `accelerate launch examples/accelerate_script.py` prints the same loss. A script that
is started otherwise calls `lightning_memopt.accelerate.prepare(accelerator, model, optimizer, loader, budget="40MiB")` in place
of `accelerator.prepare(model, optimizer, loader)`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

LENGTH, WIDTH, STEPS = 128, 64, 10


class Block(nn.Module):
    """A layer of a transformer, `[batch, LENGTH, WIDTH]` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        x = self.before(h)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=h.device)
        h = h + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return h + self.body(self.between(h))


def sources() -> list[Tensor]:
    """Pieces of `argparse`, each `[LENGTH + 1]` bytes."""
    source = Path(argparse.__file__).read_bytes()
    return list(torch.frombuffer(bytearray(source), dtype=torch.uint8).long().split(LENGTH + 1)[:-1])


def main() -> None:
    accelerator = Accelerator()
    set_seed(1)
    model = nn.Sequential(nn.Embedding(256, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    loader: DataLoader[Tensor] = DataLoader(sources(), 16, shuffle=True, drop_last=True)  # type: ignore[arg-type]  # a data set
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, batch in zip(range(STEPS), loader, strict=False):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item()!r}")


if __name__ == "__main__":
    main()
