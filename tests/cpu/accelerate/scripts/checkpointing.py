"""In the style of the example `checkpointing` of Accelerate: a second run goes on where the state was saved."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish, loader, loss_of, network

SAVED = 7


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    history: list[float] = []
    for resumes in (False, True):
        set_seed(42)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(160, 8), schedule)
        if resumes:
            accelerator.load_state(f"{args.output}.state")
        for i, batch in enumerate(accelerator.skip_first_batches(data, SAVED) if resumes else data, start=1):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(loss.item())
            if i == SAVED and not resumes:
                accelerator.save_state(f"{args.output}.state", safe_serialization=False)
        if not resumes:
            model, optimizer, data, schedule = accelerator.free_memory(model, optimizer, data, schedule)
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
