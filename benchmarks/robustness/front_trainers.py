"""Twenty training steps of the Trainers, which own the loop, as their users write them: one function for each front."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from benchmarks.robustness.front_case import BATCH, LEARNING_RATE, Case, in_parts
from benchmarks.robustness.front_models import built, collated
from benchmarks.robustness.scripts import Log, Watch


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
        checkpoint = None if load is None else str(next(load.glob("checkpoint-*")))
        trainer.train(resume_from_checkpoint=checkpoint)
        ends = {"model": model, "optimizer": _unwrapped(trainer.optimizer)}
        return ends | ({} if printing.average is None else {"average": printing.average})

    return in_parts(case, watch, part)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the one that Accelerate prepared."""
    return getattr(optimizer, "optimizer", optimizer)


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

    return in_parts(case, watch, part)
