"""In the style of the example `early_stopping` of Accelerate: a process sets the trigger, and all of them leave the loop."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, finish, loader, loss_of, network


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(42)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(400, 8))
    history = []
    for i, batch in enumerate(data):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
        if i == 11 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
