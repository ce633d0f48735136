"""A language model from scratch, in the style of Accelerate's `nlp_example.py`; batches are padded to their longest."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

VOCABULARY, PAD = 96, 0


def sentence(index: int) -> torch.Tensor:
    """32 to 48 words, each sentence always the same."""
    words = torch.Generator().manual_seed(index)
    return torch.randint(1, VOCABULARY, (32 + 16 * (index % 2),), generator=words)


def collate(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    train = DataLoader([sentence(i) for i in range(80)], batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    held_out = DataLoader([sentence(i) for i in range(80, 96)], 16, collate_fn=collate)
    return train, held_out


def training_function(config: dict[str, Any], args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = loaders(config["batch_size"])
    sizes = dict(n_layer=3, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=PAD, eos_token_id=PAD)
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train_dataloader) * config["num_epochs"])
    model, optimizer, train_dataloader, eval_dataloader, schedule = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, schedule
    )
    losses, scores = [], []
    for _ in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["input_ids"]))
            scores.append((predictions == references).float().mean().item())
    accelerator.print("losses", losses[-1])
    if args.output is not None:
        end = [losses, scores, accelerator.unwrap_model(model).state_dict(), optimizer.state_dict(), torch.get_rng_state()]
        torch.save(end, f"{args.output}.{accelerator.process_index}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--output", default=None)
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 8}, args)


if __name__ == "__main__":
    main()
