"""In the style of the example `local_sgd` of Accelerate: weights are averaged every few steps."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from common import arguments, finish, loader, loss_of, network


def main() -> None:
    args = arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)
    set_seed(42)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(320, 8))
    history = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
        for batch in data:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            history.append(loss.item())
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
