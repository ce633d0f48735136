"""Sequences to sequences, in the style of transformers' `run_translation_no_trainer.py`: it generates after each epoch."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration, get_scheduler

VOCABULARY, PAD, BATCH_SIZE, EPOCHS = 96, 0, 4, 2


def sentence(index: int) -> torch.Tensor:
    """16 or 24 words, each sentence always the same."""
    words = torch.Generator().manual_seed(index)
    return torch.randint(2, VOCABULARY, (16 + 8 * (index % 2),), generator=words)


def collate(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
    labels = ids.flip(1)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels.masked_fill(labels == PAD, -100)}


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(42)
    train_dataloader = DataLoader([sentence(i) for i in range(48)], BATCH_SIZE, shuffle=True, collate_fn=collate)
    eval_dataloader = DataLoader([sentence(i) for i in range(48, 59)], BATCH_SIZE, collate_fn=collate)
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=PAD)
    model = T5ForConditionalGeneration(T5Config(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=len(train_dataloader) * EPOCHS)
    model, optimizer, train_dataloader, eval_dataloader, schedule = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, schedule
    )
    history, texts = [], []
    for _ in range(EPOCHS):
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            history.append(outputs.loss.item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                words = accelerator.unwrap_model(model).generate(
                    batch["input_ids"], attention_mask=batch["attention_mask"], max_length=12, num_beams=2
                )
            words = accelerator.pad_across_processes(words, dim=1, pad_index=PAD)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            texts.extend(accelerator.gather_for_metrics((words, labels))[0].tolist())
    finish(args, accelerator, model, optimizer, history, texts)


if __name__ == "__main__":
    main()
