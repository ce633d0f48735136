"""transformers' Trainer within a budget: a small GPT-2 learns the source of the standard library, character by character.

The Trainer asks for gradient checkpointing; the callback replaces it by a plan, and the table at the end compares both.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_memopt import MemOptTrainerCallback

CHARACTERS, CONTEXT, BATCH, STEPS = 128, 64, 16, 30


class Source(Dataset[dict[str, Any]]):
    """Windows of `CONTEXT` ASCII characters, cut from modules of the standard library."""

    def __init__(self, *modules: str) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join((folder / f"{module}.py").read_bytes() for module in modules)
        self.ids = torch.tensor([byte for byte in text if byte < CHARACTERS])

    def __len__(self) -> int:
        return len(self.ids) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Any]:
        window = self.ids[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


def gpt2() -> nn.Module:
    """Four layers with random weights, the same at every call."""
    torch.manual_seed(0)
    size: dict[str, Any] = dict(n_layer=4, n_embd=64, n_head=4, vocab_size=CHARACTERS, n_positions=CONTEXT)
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def train(model: nn.Module, callback: MemOptTrainerCallback | None = None, **options: Any) -> float:
    """Train with or without the callback; returns the mean loss. `options`: of `TrainingArguments`."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=2e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(model, args, train_dataset=Source("argparse", "textwrap"))
        if callback is not None:
            trainer.add_callback(callback)  # or Trainer(callbacks=[callback])
        return float(trainer.train().training_loss)


def main() -> None:
    checkpointed: dict[str, Any] = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    plain = train(gpt2(), **checkpointed)
    planned = train(gpt2(), MemOptTrainerCallback(budget="17.25MiB"), **checkpointed)
    print("loss identical to the plain Trainer's:", plain == planned)


if __name__ == "__main__":
    main()
