"""In the style of the example of this name of Accelerate: the batches of an update are loaded, then weighted by words."""

from __future__ import annotations

import contextlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import CLASSES, arguments, finish, loader, network
from torch import nn

ACCUMULATE = 3


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=ACCUMULATE)
    set_seed(42)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(160, 8))
    history = []
    for _ in range(2):
        batches = iter(data)
        updates, remainder = divmod(len(data), ACCUMULATE)
        for update in range(updates + (remainder > 0)):
            samples = [next(batches) for _ in range(ACCUMULATE if update < updates else remainder)]
            words = accelerator.gather(sum((y > 0).sum() for _, y in samples)).sum().item()
            losses = []
            for i, (x, y) in enumerate(samples):
                last = i == len(samples) - 1 or accelerator.num_processes == 1
                with contextlib.nullcontext() if last else model.no_sync():
                    logits, labels = model(x)[:, 0], torch.where(y > 0, y, -100)
                    loss = nn.functional.cross_entropy(logits.view(-1, CLASSES), labels, reduction="sum") / words
                    loss = loss * ACCUMULATE * accelerator.num_processes
                    accelerator.backward(loss)
                    losses.append(loss.detach())
            history.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            history.append(accelerator.gather(sum(losses)).sum().item())
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
