"""In the style of the example `profiler` of Accelerate: torch's profiler is on in the first epoch, with memory and shapes."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed
from common import arguments, finish, loader, loss_of, network


def main() -> None:
    args = arguments()
    profiling = ProfileKwargs(activities=["cpu"], record_shapes=True, profile_memory=True, with_flops=True)
    accelerator = Accelerator(mixed_precision=args.mixed_precision, kwargs_handlers=[profiling])
    set_seed(42)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(64, 8))
    history = []

    def epoch() -> None:
        for batch in data:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())

    with accelerator.profile() as profiled:
        epoch()
    events = {event.key: event for event in profiled.key_averages()}
    epoch()
    with accelerator.profile():
        epoch()
    finish(args, accelerator, model, optimizer, history, "aten::addmm" in events)


if __name__ == "__main__":
    main()
