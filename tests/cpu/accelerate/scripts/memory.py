"""In the style of the example `memory` of Accelerate: `find_executable_batch_size` around the whole training."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from common import arguments, finish, loader, loss_of, network


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)

    @find_executable_batch_size(starting_batch_size=32)
    def inner_training_loop(batch_size: int) -> None:
        accelerator.free_memory()
        set_seed(42)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, data = accelerator.prepare(model, optimizer, loader(320, batch_size))
        history: list[float] = [batch_size]
        for batch in data:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
            if batch_size > 24 and len(history) == 6:
                raise RuntimeError("CUDA out of memory.")
        finish(args, accelerator, model, optimizer, history)

    inner_training_loop()


if __name__ == "__main__":
    main()
