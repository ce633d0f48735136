"""In the style of the example `multi_process_metrics` of Accelerate: metrics of batches that do not divide are gathered."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish, loader, network
from torch import nn


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(42)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data, held_out = accelerator.prepare(model, optimizer, loader(100, 8), loader(27, 8, shuffle=False))
    history = []
    for _ in range(2):
        model.train()
        for x, y in data:
            logits = model(x).mean(1)
            loss = nn.functional.cross_entropy(logits, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            history += accelerator.gather(loss.detach()).flatten().tolist()
        model.eval()
        for x, y in held_out:
            with torch.inference_mode():
                logits = model(x).mean(1)
            predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), y))
            history += [len(predictions), (predictions == references).sum().item()]
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
