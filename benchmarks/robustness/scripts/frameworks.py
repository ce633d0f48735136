"""Loops of Accelerate, and those that transformers' Trainer owns."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.robustness.scripts.registry import Log, Watch, script

WORDS = 40
_TRAINER = ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
_BERT = ("accelerate", "transformers.models.bert.modeling_bert")


class Sentences(Dataset):
    """Sentences of `lengths` words, each always the same."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(3, WORDS, (self.lengths[index],), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def _trained(watch: Watch, log: Log, steps: int, **options: Any) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Print(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            log(*[entry["loss"] for entry in state.log_history[-1:]])

    sizes = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, seed=3, **options,
        )  # fmt: skip
        trainer = Trainer(
            model, settings, train_dataset=Sentences([16] * 512), optimizers=(optimizer, None), callbacks=[Print()]
        )
        with watch(model, optimizer):
            trainer.train()
    return {"model": model, "adamw": optimizer, "log": [entry.get("loss") for entry in trainer.state.log_history]}


@script("transformers' Trainer: GPT-2, accumulation over two batches", needs=_TRAINER)
def trainer_accumulation(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    return _trained(watch, log, steps, gradient_accumulation_steps=2)


@script("transformers' Trainer: GPT-2, gradient checkpointing and bf16", needs=_TRAINER)
def trainer_checkpointing(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    return _trained(
        watch, log, steps, bf16=True, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip


def _padded(sentences: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([s["input_ids"] for s in sentences], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids[:, 0] % 2}


@script("Accelerate: BERT classifies sentences; every batch is padded to its longest", needs=_BERT, steps=20)
def accelerate_bert(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import BertConfig, BertForSequenceClassification

    accelerator = Accelerator(cpu=True)
    set_seed(42)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=WORDS)
    model = BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=32, pad_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = torch.randint(6, 25, (8 * steps,), generator=torch.Generator().manual_seed(8)).tolist()
    loader = DataLoader(Sentences(lengths), batch_size=8, shuffle=True, collate_fn=_padded)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    with watch(model, optimizer):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            log(loss.item())
    return {"model": model, "adamw": optimizer.optimizer}


@script("Accelerate: accumulation with clipping on a plain network", needs=("accelerate",))
def accelerate_accumulation(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    source = torch.Generator().manual_seed(4)
    data = [(torch.randn(48, generator=source), i % 10) for i in range(2 * steps * 32)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    with watch(model, optimizer):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                log(loss.item())
    return {"model": model, "sgd": optimizer.optimizer}
