"""`find_max_batch_size` for plain PyTorch loops: find the batch size that a budget allows, and restore everything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from lightning_memopt.batching import BatchSizeResult, FromFunction, FromLoader, Mode, Search
from lightning_memopt.config import MemOptConfig, PlanOptions, disabled
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.integrations.checkpointing import LayerCheckpointing
from lightning_memopt.integrations.plain import Optimizers, Run, attach, unwrapped
from lightning_memopt.ranks import several_processes, wrapper_of
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
    """Find the batch size of a training loop, by a few real steps whose effects are all restored.

    The size that is returned ran in a real step, so it is never larger than the number of samples in the data.

    If several ranks train a model in DistributedDataParallel, all of them must call this together, each with its own data. All
    return the same result: a batch size per rank that fits on every rank.

    Args:
        step: the body of the loop, `step(batch)`: forward, backward, `optimizer.step()`, `zero_grad()`. Its result is not used.
        batches: a DataLoader, or `make_batch(size)`, which returns a batch of that many samples. If samples differ in length,
            it should return the longest ones.
        model: the trained model; `step` calls it.
        optimizer: the optimizer, or optimizers, that `step` uses.
        budget: bytes of the device that a step may use, as for `optimize`.
        planned: whether the loop will run inside `optimize` within this budget; False: it will run without a plan.
        mode: `"largest"`: the largest size that fits; `"throughput"`: the most samples a second; `"energy"`: the fewest joules
            a sample.
        start: the size in use now. Profiled sizes are not larger (but at least 2 and 4). Default: the loader's, or 8.
        max_size: the largest size that may be chosen.
        effective: if you accumulate gradients, the samples of one rank between two updates. Only sizes that divide it are
            chosen. `step` is then the body for one of the batches, with the update but without `zero_grad`, so that gradients
            exist as in training.
        watts: power that the device draws in training, for `"energy"`. By default it is measured, on NVIDIA GPUs.
        keep: other objects that `step` changes and that must be restored: a scheduler, a GradScaler, lists.
        options: options of `MemOptConfig`, for `planned=True`.

    Raises:
        InfeasibleError: no size fits.
        UnsupportedError: the loader's batch size cannot be set; or this is one of several processes, and its model is not in
            DistributedDataParallel.
        RankFailedError: another rank failed, or did not call this.
        ConfigError: the mode is `"energy"`, the device's energy cannot be read, and no `watts` are given. No step has run then.
    """
    if several_processes() and wrapper_of(model) is None:
        raise UnsupportedError(
            f"This is rank {distributed.get_rank()} of {distributed.get_world_size()}, and the model is not in "
            "DistributedDataParallel, so each rank would find another size. Give the wrapped model on every rank, or "
            "search in one process before init_process_group."
        )
    optimizers = unwrapped(optimizer)
    config = MemOptConfig(budget=budget, **options)
    device = device_of(model)
    nbytes = bytes_on(device, config)
    source = FromFunction(batches, start or 8) if callable(batches) else FromLoader(batches)
    if start is not None:
        source.size = start
    dataset = (batches, batches.dataset) if isinstance(source, FromLoader) else ()

    def run(batch: Any, session: Session | None, whole: bool) -> None:
        with contextlib.ExitStack() as stack:
            if session is not None:
                attach(stack, Run(session), model, optimizers)
            step(batch)

    search = Search(
        step=run,
        source=source,
        model=model,
        optimizers=optimizers,
        device=device,
        keep=(*keep, *dataset),
        config=config if planned else None,
        budget_nbytes=nbytes,
        mode=mode,
        effective=effective,
        max_size=max_size,
        watts=watts,
    )
    checkpointing = LayerCheckpointing(model, lambda _: None) if planned and not disabled() else None
    try:
        return search.find()
    finally:
        if checkpointing is not None:
            checkpointing.restore()
