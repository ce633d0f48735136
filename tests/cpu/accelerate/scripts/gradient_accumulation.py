"""In the style of the example `gradient_accumulation` of Accelerate, with clipping; the batches do not divide."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish, loader, loss_of, network


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=3)
    set_seed(42)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(164, 8))
    history = []
    for _ in range(2):
        for batch in data:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    history.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            history.append(loss.item())
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
