"""`optimize` around Accelerate's loop and transformers' Trainer, which own the loop: the bits that they give without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memopt import optimize
from lightning_memopt.session.judge.states import Running
from tests.cpu.lib.inside import state_of
from tests.cpu.lib.loops import QUIET, assert_same, batches, leaves_nothing, loss_of, small, state

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    """Prepared model and optimizer, accumulation that does not divide, clipping, a schedule: the same state, within a plan."""
    x, y = batches(1, size=200)[0]

    def prepared() -> tuple[Any, nn.Module, Any, Any, Any]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process otherwise
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=3)
        model = small(depth=5)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return accelerator, *accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), 32), schedule)

    def run_all(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, schedule: Any) -> list[Tensor]:
        torch.manual_seed(2)
        losses = []
        for _ in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
        return [*losses, torch.rand(3)]

    parts = prepared()
    plain = run_all(*parts)
    expected = state(parts[1])
    parts = prepared()
    with leaves_nothing(parts[1]), optimize(parts[1], parts[2], budget="min", **QUIET) as run:
        found = run_all(*parts)
        planned = state_of(run)
    assert_same(expected, state(parts[1]))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert isinstance(planned, Running) and planned.program.random and not planned.drift.deviated
    assert any(op.phase == "update" for op in planned.program.graph.ops), "the prepared optimizer's updates are seen"


class Words(Dataset):
    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3, "bf16": True}], ids=["fp32", "accumulating"])
def test_transformers_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """transformers' Trainer with its clipping, schedule and a last smaller batch: the same state and log."""
    ends = []
    for attach in (False, True):
        torch.manual_seed(0)
        sizes = dict(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, logging_steps=2, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, seed=1, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=Words(), optimizers=(optimizer, None))
        if attach:
            with optimize(model, optimizer, budget="min", **QUIET) as run:
                trainer.train()
                found = state_of(run)
        else:
            trainer.train()
        logged = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        ends.append((state(model), logged, torch.rand(3)))
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] and len(ends[0][1]) >= 4 and torch.equal(ends[0][2], ends[1][2])
    assert isinstance(found, Running) and found.plan.predicted.rebuilt_ops > 0 and not found.drift.deviated
