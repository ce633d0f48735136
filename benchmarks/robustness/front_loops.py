"""Twenty training steps on every front, as its users write them: one function for each front.

A front is a function `(case, watch, log) -> results`. It trains `case.steps` optimizer steps, around which it puts what `watch`
gives for this front: the package within a budget, or nothing. It calls `log(...)` with what the front logs after every step,
and returns what training leaves: model, optimizer, average.

With `case.resumes`, a first run trains half of the steps and saves a checkpoint, and a second one, with everything made anew,
loads it and goes on. One of the two is the plain run: `"from plain"` watches the second, `"to plain"` the first.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.robustness.front_models import Samples, built, collated
from benchmarks.robustness.scripts import Log, Watch

BATCH, LEARNING_RATE, CLIP = 4, 1e-2, 0.5
VARIANTS = ("plain", "accumulation", "clipping", "schedule", "average", "from plain", "to plain")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Case:
    """One training run.

    model: a name of `MODELS`.
    precision: "fp32", or "bf16" (autocast).
    variant: one of `VARIANTS`.
    steps: optimizer steps.
    """

    model: str
    precision: str = "fp32"
    variant: str = "plain"
    steps: int = 20

    @property
    def accumulate(self) -> int:
        return 2 if self.variant == "accumulation" else 1

    @property
    def clip(self) -> float | None:
        return CLIP if self.variant == "clipping" else None

    @property
    def resumes(self) -> bool:
        return self.variant.endswith("plain") and self.variant != "plain"

    def samples(self) -> Samples:
        return Samples(self.model, self.steps * self.accumulate * BATCH)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """A warm-up of five steps and a decay with "schedule", else a constant rate."""
        moves = self.variant == "schedule"
        rate = lambda step: min((step + 1) / 5, 1 - step / (2 * self.steps)) if moves else 1.0  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def average(self, model: nn.Module) -> AveragedModel | None:
        if self.variant != "average":
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


Part = Callable[[Watch | None, int, Path | None, Path | None], dict[str, Any]]
"""A run `(watch, last step, checkpoint to load, checkpoint to save)`; without `watch` it is the plain run."""


def _parts(case: Case, watch: Watch, part: Part) -> dict[str, Any]:
    """All steps in one run, or in two with a checkpoint between them."""
    if not case.resumes:
        return part(watch, case.steps, None, None)
    half = case.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        part(watch if case.variant == "to plain" else None, half, None, path)
        return part(watch if case.variant == "from plain" else None, case.steps, path, None)


# -- plain PyTorch ------------------------------------------------------------------------------------------


def plain(case: Case, watch: Watch, log: Log) -> dict[str, Any]:
    """A loop of one's own, `optimize` around it."""

    def part(watched: Watch | None, last: int, load: Path | None, save: Path | None) -> dict[str, Any]:
        model = built(case.model)
        optimizer = case.optimizer(model)
        schedule, average = case.schedule(optimizer), case.average(model)
        data = case.samples()
        order = RandomSampler(data, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(data, BATCH, sampler=order, collate_fn=collated)
        first, parts = 0, {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.manual_seed(2)
        if load is not None:
            saved = torch.load(load, weights_only=False)
            for name, owner in parts.items():
                owner.load_state_dict(saved[name])
            first = saved["step"]
        with watched(model, optimizer) if watched is not None else contextlib.nullcontext():
            model.train()
            for i, batch in enumerate(loader):
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

    return _parts(case, watch, part)


# -- transformers' Trainer ----------------------------------------------------------------------------------


def transformers(case: Case, watch: Watch, log: Log) -> dict[str, Any]:
    """transformers' Trainer with `MemOptTrainerCallback`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Print(TrainerCallback):
        average: AveragedModel | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if self.average is not None:
                self.average.update_parameters(model)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                log(*[float(value) for value in logs.values()])

    class Stop(TrainerCallback):
        """The first of two runs has the schedule of both, and ends in the middle."""

        def __init__(self, last: int) -> None:
            self.last = last

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.last:
                control.should_save = self.last < args.max_steps
                control.should_training_stop = True

    def part(watched: Watch | None, last: int, load: Path | None, save: Path | None) -> dict[str, Any]:
        model, printing = built(case.model), Print()
        printing.average = case.average(model)
        folder = save or load or Path(tempfile.gettempdir(), "unused")
        args = TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=case.steps, learning_rate=LEARNING_RATE,
            gradient_accumulation_steps=case.accumulate, max_grad_norm=case.clip or 0.0, bf16=case.precision == "bf16",
            lr_scheduler_type="cosine" if case.variant == "schedule" else "constant",
            warmup_steps=5 if case.variant == "schedule" else 0, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, seed=2,
        )  # fmt: skip
        callbacks = [printing, Stop(last), *(watched.callbacks() if watched is not None else [])]
        trainer = Trainer(model, args, train_dataset=case.samples(), data_collator=collated, callbacks=callbacks)
        found = next(load.glob("checkpoint-*")) if load is not None else None
        trainer.train(resume_from_checkpoint=None if found is None else str(found))
        ends = {"model": model, "optimizer": _unwrapped(trainer.optimizer)}
        return ends | ({} if printing.average is None else {"average": printing.average})

    return _parts(case, watch, part)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the one that Accelerate prepared."""
    return getattr(optimizer, "optimizer", optimizer)


# -- Lightning ----------------------------------------------------------------------------------------------


def lightning(case: Case, watch: Watch, log: Log) -> dict[str, Any]:
    """Lightning's Trainer with `MemOptStrategy`."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = built(case.model)
            self.average = case.average(self.model)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = case.optimizer(self.model)
            return [optimizer], [{"scheduler": case.schedule(optimizer), "interval": "step"}]

    class Print(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % case.accumulate == 0:
                if module.average is not None:
                    module.average.update_parameters(module.model)
                log(*[metric.item() for metric in trainer.callback_metrics.values()])

    def part(watched: Watch | None, last: int, load: Path | None, save: Path | None) -> dict[str, Any]:
        module = Module()
        torch.manual_seed(2)
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = Trainer(
            accelerator="cpu", strategy=watched.strategy() if watched is not None else "auto", max_steps=last,
            accumulate_grad_batches=case.accumulate, gradient_clip_val=case.clip, callbacks=[Print()],
            precision="bf16-mixed" if case.precision == "bf16" else "32-true", use_distributed_sampler=False, **quiet,
        )  # fmt: skip
        loader = DataLoader(case.samples(), BATCH, collate_fn=collated)
        trainer.fit(module, loader, ckpt_path=None if load is None else str(load), weights_only=False)
        if save is not None:
            trainer.save_checkpoint(save)
        ends = {"model": module.model, "optimizer": trainer.optimizers[0]}
        return ends | ({} if module.average is None else {"average": module.average})

    return _parts(case, watch, part)


Front = Callable[[Case, Watch, Log], dict[str, Any]]
FRONTS: dict[str, Front] = {"plain": plain, "transformers": transformers, "lightning": lightning}
