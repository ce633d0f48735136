"""Fine-tuning as transformers' own `run_*_no_trainer` scripts go about it: Accelerate, decay groups, a warm-up, evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.robustness.scripts.registry import Log, Watch, script

WORDS, LENGTH, SIZE, ACCUMULATE = 64, 24, 4, 2
_NEEDS = ("transformers", "accelerate")


def _decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Weights that decay, and biases and norms that do not."""
    spared = ("bias", "ln_", "LayerNorm")
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if not any(word in name for word in spared)], "weight_decay": 0.1},
        {"params": [p for name, p in named if any(word in name for word in spared)], "weight_decay": 0.0},
    ]


def _texts(count: int, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(1, WORDS, (LENGTH,), generator=source) for _ in range(count)]


@script("run_clm_no_trainer: GPT-2, bf16, accumulation, a warm-up, perplexity after every epoch", needs=_NEEDS)
def clm_no_trainer(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, mixed_precision="bf16")
    set_seed(3)
    ids = dict(bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=LENGTH, **ids))
    optimizer = torch.optim.AdamW(_decayed(model), lr=1e-3)
    epochs = 2
    train = DataLoader(_texts(steps // epochs * ACCUMULATE * SIZE, 1), SIZE, shuffle=True)
    evaluation = DataLoader(_texts(2 * SIZE, 2), SIZE)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=steps)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)
    perplexities = []
    with watch(model, optimizer):
        for _ in range(epochs):
            model.train()
            for batch in train:
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    log(loss.item())
            model.eval()
            losses = []
            for batch in evaluation:
                with torch.no_grad():
                    loss = model(input_ids=batch, labels=batch).loss
                losses.append(accelerator.gather_for_metrics(loss.repeat(SIZE)))
            perplexities.append(math.exp(torch.cat(losses).mean().item()))
    return {"model": model, "adamw": optimizer.optimizer, "perplexities": perplexities}


def _padded(sentences: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([sentence["input_ids"] for sentence in sentences], batch_first=True)
    labels = torch.tensor([sentence["labels"] for sentence in sentences])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


@script("run_glue_no_trainer: BERT classifies padded sentences, clipping, accuracy after every epoch", needs=_NEEDS, steps=20)
def glue_no_trainer(watch: Watch, log: Log, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import BertConfig, BertForSequenceClassification, get_scheduler

    accelerator = Accelerator(cpu=True)
    set_seed(4)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=WORDS)
    model = BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=LENGTH, pad_token_id=0))
    optimizer = torch.optim.AdamW(_decayed(model), lr=1e-3)
    epochs, size = 2, 2 * SIZE
    texts = _texts(steps // epochs * size, 5)
    data = [{"input_ids": ids[: 12 + 4 * (i % 4)], "labels": int(ids[0]) % 2} for i, ids in enumerate(texts)]
    train = DataLoader(data, size, shuffle=True, collate_fn=_padded)
    evaluation = DataLoader(data[:size], size, collate_fn=_padded)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=steps)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)
    right = []
    with watch(model, optimizer):
        for _ in range(epochs):
            model.train()
            for batch in train:
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                log(loss.item())
            model.eval()
            for batch in evaluation:
                with torch.no_grad():
                    classes = model(**batch).logits.argmax(-1)
                classes, labels = accelerator.gather_for_metrics((classes, batch["labels"]))
                right.append(int((classes == labels).sum()))
    return {"model": model, "adamw": optimizer.optimizer, "right": right}
