"""transformers' Trainer on tiny models: what a training leaves, compared bit by bit."""

from __future__ import annotations

import gc
import random
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.robustness.front_models import Samples, built, collated
from lightning_memopt import MemOptTrainerCallback
from tests.cpu.lib.harness import same_bits

STEPS = 8


def callback(budget: str | int = "min", **options: Any) -> MemOptTrainerCallback:
    """A callback that says nothing and observes two steps."""
    return MemOptTrainerCallback(**({"budget": budget, "verbose": False, "profile_steps": 2} | options))


@dataclass
class Ends:
    """What a training left. `logged`: the entries of the log but for times."""

    model: nn.Module
    optimizer: list[Any]
    logged: list[dict[str, Any]]
    generators: list[Any]


def arguments(folder: str | None = None, **options: Any) -> Any:
    """`TrainingArguments` for a few steps on the CPU."""
    from transformers import TrainingArguments

    quiet = dict(report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1, seed=2)
    sizes = dict(per_device_train_batch_size=4, max_steps=STEPS, learning_rate=1e-2)
    return TrainingArguments(folder or tempfile.gettempdir(), **(quiet | sizes | options))


def trainer(
    callbacks: list[Any] | None = None, model: nn.Module | str = "gpt2", folder: str | None = None, **options: Any
) -> Any:
    """A Trainer that has not trained. `model`: a model, or a name of `MODELS`. `options`: of `TrainingArguments`, or `data`."""
    from transformers import Trainer

    name = model if isinstance(model, str) else "gpt2"
    data = options.pop("data", None) or Samples(name, 64)
    cls, collate = options.pop("cls", Trainer), options.pop("collate", collated)
    module = built(model) if isinstance(model, str) else model
    rest = {key: options.pop(key) for key in ("optimizers", "eval_dataset", "compute_loss_func") if key in options}
    args = arguments(folder, **options)
    return cls(module, args, train_dataset=data, data_collator=collate, callbacks=callbacks, **rest)


def ends(trained: Any) -> Ends:
    """What the training of this Trainer left."""
    times = ("runtime", "per_second")
    logged = [{key: v for key, v in e.items() if not key.endswith(times)} for e in trained.state.log_history]
    optimizer = getattr(trained.optimizer, "optimizer", trained.optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return Ends(trained.model, states, logged, [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()])


def train(callbacks: list[Any] | None = None, model: nn.Module | str = "gpt2", **options: Any) -> Ends:
    """Train, and say what it left."""
    gc.collect()  # Trainers are cycles, and hold models
    used = trainer(callbacks, model, **options)
    used.train()
    return ends(used)


def assert_same(plain: Ends, ours: Ends) -> None:
    """The same bits everywhere."""
    one, other = (dict(e.model.named_parameters()) | dict(e.model.named_buffers()) for e in (plain, ours))
    assert one.keys() == other.keys()
    for name, t in one.items():
        assert same_bits(t, other[name]), name
    for a, b in zip(plain.optimizer, ours.optimizer, strict=True):
        assert same_bits(a, b) if isinstance(a, Tensor) else a == b, "state of the optimizer"
    assert plain.logged == ours.logged and plain.logged
    assert torch.equal(plain.generators[0], ours.generators[0]) and plain.generators[1:] == ours.generators[1:]


def agrees(model: str = "gpt2", options: dict[str, Any] | None = None, **arguments: Any) -> MemOptTrainerCallback:
    """A training without and with the callback (`options`: its own) gives the same bits; a plan that drops something is kept.

    Its measured peak is within the budget, and as predicted.
    """
    mine = callback(**(options or {}))
    assert_same(train(model=model, **arguments), train([mine], model, **arguments))
    kept(mine)
    return mine


def kept(mine: MemOptTrainerCallback) -> None:
    """A plan that rebuilds something is in force, and kept."""
    status = mine.status()
    assert status.phase == "planned" and status.plan is not None, status.reason
    assert status.plan.predicted.rebuilt_ops > 0, "nothing is rebuilt: the test tests nothing"
    assert status.measured_peak_nbytes is not None and status.predicted_peak_nbytes is not None
    assert status.measured_peak_nbytes <= 1.01 * status.predicted_peak_nbytes
    assert status.measured_peak_nbytes >= 0.99 * status.predicted_peak_nbytes
    assert status.budget_nbytes is None or status.measured_peak_nbytes <= status.budget_nbytes
