"""In the style of the example `automatic_gradient_accumulation` of Accelerate: where memory ends, more and smaller batches."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from common import arguments, finish, loader, loss_of, network

BATCH_SIZE = 32


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)

    @find_executable_batch_size(starting_batch_size=BATCH_SIZE)
    def inner_training_loop(batch_size: int) -> None:
        nonlocal accelerator
        accelerator.gradient_accumulation_steps = BATCH_SIZE // batch_size
        accelerator.free_memory()
        set_seed(42)
        model = network().to(accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, data = accelerator.prepare(model, optimizer, loader(320, batch_size))
        history: list[float] = [batch_size]
        for batch in data:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                if batch_size > 8 and len(history) == 4:
                    raise RuntimeError("CUDA out of memory.")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            history.append(loss.item())
        finish(args, accelerator, model, optimizer, history)

    inner_training_loop()


if __name__ == "__main__":
    main()
