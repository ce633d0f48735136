"""Twenty training steps of loops that are the user's own, as users write them: one function for each front."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.robustness.front_case import Case, in_parts
from benchmarks.robustness.front_models import built
from benchmarks.robustness.scripts import Log, Watch


def plain(case: Case, watch: Watch, log: Log) -> dict[str, Any]:
    """A loop of one's own, `optimize` around it."""

    def part(watched: Watch | None, last: int, load: Path | None, save: Path | None) -> dict[str, Any]:
        model = built(case.model)
        optimizer = case.optimizer(model)
        schedule, average = case.schedule(optimizer), case.average(model)
        first, parts = 0, {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.manual_seed(2)
        if load is not None:
            saved = torch.load(load, weights_only=False)
            for name, owner in parts.items():
                owner.load_state_dict(saved[name])
            first = saved["step"]
        with watched(model, optimizer) if watched is not None else contextlib.nullcontext():
            model.train()
            for i, batch in enumerate(case.loader()):
                step, place = divmod(i, case.accumulate)
                if not first <= step < last:
                    continue
                if load is not None and step == first:
                    torch.set_rng_state(saved["generator"])
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                    loss = model(**batch).loss / case.accumulate
                loss.backward()
                if place + 1 < case.accumulate:
                    continue
                if case.clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if average is not None:
                    average.update_parameters(model)
                log(loss.item())
        if save is not None:
            states = {name: owner.state_dict() for name, owner in parts.items()}
            torch.save(states | {"step": last, "generator": torch.get_rng_state()}, save)
        return {"model": model, "optimizer": optimizer} | ({} if average is None else {"average": average})

    return in_parts(case, watch, part)


def accelerate(case: Case, watch: Watch, log: Log) -> dict[str, Any]:
    """Accelerate's loop, prepared by `lightning_memopt.accelerate.prepare`; `save_state` and `load_state` between two runs."""
    from accelerate import Accelerator, skip_first_batches

    def part(watched: Watch | None, last: int, load: Path | None, save: Path | None) -> dict[str, Any]:
        precision = "bf16" if case.precision == "bf16" else "no"
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate, mixed_precision=precision)
        model = built(case.model)
        optimizer = case.optimizer(model)
        objects = (model, optimizer, case.loader(), case.schedule(optimizer))
        prepared = accelerator.prepare(*objects) if watched is None else watched.prepare(accelerator, *objects)
        model, optimizer, loader, schedule = prepared
        average = case.average(accelerator.unwrap_model(model))
        torch.manual_seed(2)
        step = 0
        if load is not None:
            accelerator.load_state(str(load))
            step = case.steps // 2
            loader = skip_first_batches(loader, step * case.accumulate)
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if case.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            if average is not None:
                average.update_parameters(accelerator.unwrap_model(model))
            log(loss.item())
            step += 1
            if step == last:
                break
        if save is not None:
            accelerator.save_state(str(save))
        accelerator.end_training()
        ends = {"model": accelerator.unwrap_model(model), "optimizer": optimizer.optimizer}
        return ends | ({} if average is None else {"average": average})

    return in_parts(case, watch, part)


def fabric(case: Case, watch: Watch, log: Log) -> dict[str, Any]:
    """Fabric's loop with `MemOptFabricStrategy`."""
    from lightning.fabric import Fabric

    def part(watched: Watch | None, last: int, load: Path | None, save: Path | None) -> dict[str, Any]:
        precision = "bf16-mixed" if case.precision == "bf16" else "32-true"
        strategy = "auto" if watched is None else watched.fabric_strategy()
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
        module = built(case.model)
        adamw = case.optimizer(module)
        schedule, average = case.schedule(adamw), case.average(module)
        model, optimizer = fabric.setup(module, adamw)
        loader = fabric.setup_dataloaders(case.loader(), use_distributed_sampler=False)
        torch.manual_seed(2)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "generator": torch.get_rng_state()}
        if load is not None:
            fabric.load(load, state)
        first: int = state["step"]
        model.train()
        for i, batch in enumerate(loader):
            step, place = divmod(i, case.accumulate)
            if not first <= step < last:
                continue
            if load is not None and step == first:
                torch.set_rng_state(state["generator"])
            with fabric.no_backward_sync(model, enabled=place + 1 < case.accumulate):
                loss = model(**batch).loss / case.accumulate
                fabric.backward(loss)
            if place + 1 < case.accumulate:
                continue
            if case.clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(module)
            log(loss.item())
        if save is not None:
            fabric.save(save, state | {"step": last, "generator": torch.get_rng_state()})
        return {"model": module, "optimizer": adamw} | ({} if average is None else {"average": average})

    return in_parts(case, watch, part)
