"""A causal language model, in the style of transformers' `run_clm_no_trainer.py`; it resumes from a state that it saved."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

VOCABULARY, BLOCK, BATCH_SIZE, EPOCHS, ACCUMULATE = 96, 32, 4, 2, 2


def blocks(first: int, last: int) -> list[dict[str, torch.Tensor]]:
    words = [torch.randint(1, VOCABULARY, (BLOCK,), generator=torch.Generator().manual_seed(i)) for i in range(first, last)]
    return [{"input_ids": w, "labels": w.clone()} for w in words]


def main() -> None:
    args = arguments()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, mixed_precision=args.mixed_precision)
    set_seed(42)
    train_dataloader = DataLoader(blocks(0, 72), BATCH_SIZE, shuffle=True, collate_fn=default_data_collator)
    eval_dataloader = DataLoader(blocks(72, 80), BATCH_SIZE, collate_fn=default_data_collator)
    sizes = dict(n_layer=3, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=BLOCK, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    model.resize_token_embeddings(VOCABULARY + 8)
    no_decay = ["bias", "ln_"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    updates = math.ceil(len(train_dataloader) / ACCUMULATE)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=EPOCHS * updates)
    model, optimizer, train_dataloader, eval_dataloader, schedule = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, schedule
    )
    history = []

    def epoch(batches: DataLoader, stop_at: int | None = None) -> None:
        model.train()
        for step, batch in enumerate(batches):
            if step == stop_at:
                break
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                history.append(loss.detach().float())
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    half = len(train_dataloader) // ACCUMULATE // 2 * ACCUMULATE
    with tempfile.TemporaryDirectory() as folder:
        folder = accelerator.gather_for_metrics([folder], use_gather_object=True)[0]
        epoch(train_dataloader, half)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        epoch(accelerator.skip_first_batches(train_dataloader, half))
        epoch(train_dataloader)
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(BATCH_SIZE)))
        history.append(torch.cat(losses).mean())
        accelerator.wait_for_everyone()
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(
            folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )  # fmt: skip
        accelerator.wait_for_everyone()
        saved = Path(folder, "model.safetensors").stat().st_size
        accelerator.wait_for_everyone()
    finish(args, accelerator, model, optimizer, torch.stack(history), saved)


if __name__ == "__main__":
    main()
