"""`find_max_batch_size` for plain loops: the batch size that a budget allows, and everything as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from lightning_memopt.batching import BatchSizeResult, FromFunction, FromLoader, Mode, Search
from lightning_memopt.config import MemOptConfig, PlanOptions
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.integrations.plain import Optimizers, Run, _attach, _wrapped
from lightning_memopt.runtime.early_updates import several_processes
from lightning_memopt.session import Session
from lightning_memopt.session.budget import bytes_on, device_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def find_max_batch_size(
    step: Callable[[Any], Any],
    batches: Any,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    budget: str | float | int = "auto",
    planned: bool = True,
    mode: Mode = "largest",
    start: int | None = None,
    max_size: int | None = None,
    effective: int | None = None,
    watts: float | None = None,
    keep: Iterable[Any] = (),
    **options: Unpack[PlanOptions],
) -> BatchSizeResult:
    """The batch size for a training loop, found with few real steps that leave nothing behind.

    Args:
        step: the body of the loop, `step(batch)`: forward, backward, `optimizer.step()`, `zero_grad()`. What it returns is
            not used.
        batches: a DataLoader, or `make_batch(size)` giving a batch of that many samples. Where samples differ in length,
            let it give the longest.
        model: what is trained; it is called in `step`.
        optimizer: the optimizers that `step` updates with.
        budget: bytes of the device that a step may use, as for `optimize`.
        planned: whether the loop will run inside `optimize` within this budget; False: as it is, without a plan.
        mode: `"largest"` that fits, `"throughput"`: the most samples a second, `"energy"`: the fewest joules a sample.
        start: the size that is used now; what is profiled is no larger (2 and 4 at least). That of the loader, or 8.
        max_size: no size is larger.
        effective: samples between two updates, where you accumulate: only sizes that divide it are chosen. Then `step` is what
            runs for one of the batches, with the update but without `zero_grad`, so that gradients are there as they will be.
        watts: what the device draws while it trains, for `"energy"`; by default it is measured, on NVIDIA GPUs.
        keep: what else `step` changes: a scheduler, a GradScaler, lists.
        options: of `MemOptConfig`, for `planned=True`.

    Raises InfeasibleError where no size fits, UnsupportedError for loaders whose batch size cannot be set and in one of several
    processes, ConfigError for `"energy"` where the device's cannot be read and no watts are given; then nothing has run. The
    size is that of a step that ran: it is never larger than what the data gave.
    """
    if several_processes():
        raise UnsupportedError(
            f"find_max_batch_size searches in one process, and this is rank {distributed.get_rank()} of "
            f"{distributed.get_world_size()}: each would come to a size of its own. Search before init_process_group, in one "
            "process, and give that size to all ranks."
        )
    optimizers = [_wrapped(o) for o in ([optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer)]
    config = MemOptConfig(budget=budget, **options)
    device = device_of(model)
    nbytes = bytes_on(device, config)
    source = FromFunction(batches, start or 8) if callable(batches) else FromLoader(batches)
    if start is not None:
        source.size = start

    def run(batch: Any, session: Session | None, whole: bool) -> None:
        with contextlib.ExitStack() as stack:
            if session is not None:
                _attach(stack, Run(session), model, optimizers)
            step(batch)

    return Search(
        step=run,
        source=source,
        model=model,
        optimizers=optimizers,
        device=device,
        keep=(*keep, *((batches, batches.dataset) if isinstance(source, FromLoader) else ())),
        config=config if planned else None,
        budget_nbytes=nbytes,
        mode=mode,
        effective=effective,
        max_size=max_size,
        watts=watts,
    ).find()
