"""In the style of the example `ddp_comm_hook` of Accelerate: gradients travel in float16 between several processes."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed
from common import arguments, finish, loader, loss_of, network


def main() -> None:
    args = arguments()
    ddp = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(mixed_precision=args.mixed_precision, kwargs_handlers=[ddp])
    set_seed(42)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(160, 8))
    history = []
    for _ in range(2):
        for batch in data:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            history.append(loss.item())
    finish(args, accelerator, model, optimizer, history)


if __name__ == "__main__":
    main()
