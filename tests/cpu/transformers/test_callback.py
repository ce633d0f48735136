"""`MemOptTrainerCallback`: the Trainer's bits, a budget that is kept, and nothing left however `train()` ends."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

from benchmarks.robustness.front_models import Samples, built
from lightning_memopt import MemOptConfig, MemOptTrainerCallback, optimize
from lightning_memopt.errors import ConfigError, InfeasibleError, UnsupportedError, UpdatesInBackwardError
from lightning_memopt.integrations.accelerate import prepare
from tests.cpu.lib.loops import QUIET, budget_at, leaves_nothing
from tests.cpu.lib.said import Said
from tests.cpu.lib.trainers import agrees, arguments, assert_same, callback, ends, kept, train, trainer


def test_a_budget_is_kept(said: Said, tmp_path: Path) -> None:
    """Half of what a step has on top: kept, with the plain Trainer's bits; the table is said once, at the end."""
    budget = budget_at(agrees().run, 0.5)
    mine = agrees(options={"budget": budget, "verbose": True})
    printed = said.taken()
    assert printed.count("measured peak") == 1 and printed.rstrip().endswith("┘")
    status = mine.status()
    assert status.unmodified_peak_nbytes > budget >= status.measured_peak_nbytes
    assert "predicted peak" in mine.report()
    mine.save_plan(str(tmp_path / "plan.json"))
    del mine, status  # they hold the model
    agrees(options={"budget": 2 * budget, "plan": str(tmp_path / "plan.json")})


def test_before_train() -> None:
    mine = callback()
    assert mine.run is None and mine.status().phase == "waiting" and "no training step" in mine.report()
    with pytest.raises(ConfigError, match=r"Run trainer\.train"):
        mine.save_plan("plan.json")
    with pytest.raises(ConfigError, match="together with"):
        MemOptTrainerCallback(config=MemOptConfig(), budget="min")


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    mine = callback()
    assert_same(train(), train([mine]))
    assert mine.status().phase == "off"


def test_evaluation_between_steps() -> None:
    """Evaluation, before the first step and in the middle of observing, is neither observed nor planned."""
    options = dict(eval_strategy="steps", eval_steps=1, eval_on_start=True)
    mine = agrees(eval_dataset=Samples("gpt2", 8), **options)
    assert not mine.status().deviates


def test_trained_twice() -> None:
    """A second `train()` of the same Trainer goes on with the weights, and gets a run of its own."""

    def twice(callbacks: list[Any]) -> Any:
        used = trainer(callbacks)
        used.train()
        used.train()
        return ends(used)

    mine = callback()
    assert_same(twice([]), twice([mine]))
    kept(mine)


class Stop(Exception):
    pass


class Stopping(TrainerCallback):
    """Raises in step `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            raise Stop


@pytest.mark.parametrize("at", [0, 1, 4])
def test_left_when_training_raises(at: int) -> None:
    """An exception while observing or under a plan leaves nothing; the same model and callback train again."""
    mine, model = callback(), built("gpt2")
    train(model=model, max_steps=1)  # Accelerate leaves a mark on the model
    used = trainer([mine, Stopping(at)], model)
    with leaves_nothing(model):
        with pytest.raises(Stop):
            used.train()
        with optimize(model, torch.optim.SGD(model.parameters(), 0.1), budget="min", **QUIET):
            pass
    used.callback_handler.remove_callback(Stopping)
    used.train()
    kept(mine)


def test_infeasible() -> None:
    """A hopeless budget ends training before any update; it is not taken for running out of memory.

    Nor where an Accelerator of the same process has a budget, whose loops `find_executable_batch_size` may begin again.
    """
    model = built("gpt2")
    accelerator, other = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    prepare(accelerator, other, torch.optim.SGD(other.parameters()), budget="min", verbose=False)
    before = copy.deepcopy(model.state_dict())
    used = trainer([callback(200_000)], model, auto_find_batch_size=True)
    with pytest.raises(InfeasibleError) as error:
        used.train()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert error.value.smallest_nbytes is not None
    assert used.args.per_device_train_batch_size == used._train_batch_size == 4
    accelerator.free_memory()


class TooLarge(Trainer):
    """Runs out of memory in the third step, as long as batches have more than three samples."""

    calls = 0

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.calls += 1
        loss = super().training_step(model, inputs, *args)
        if len(inputs["input_ids"]) > 3 and self.calls % 4 == 3:
            raise RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return loss


def test_auto_find_batch_size() -> None:
    """Trainer begins again with a smaller batch after running out of memory: so does the run."""
    mine = agrees(auto_find_batch_size=True, cls=TooLarge)
    batch = mine.status().graph.tensors
    assert not any(t.kind == "input" and t.size[:1] == (4,) for t in batch)


def test_who_asks_transformers_for_errors_alone_gets_no_lines(said: Said) -> None:
    before = transformers.utils.logging.get_verbosity()
    try:
        train([callback(verbose=True, optimizer_in_backward="auto")], log_level="error")
    finally:
        transformers.utils.logging.set_verbosity(before)
    assert said.taken() == ""


def test_updates_in_backward(said: Said) -> None:
    """Trainer reads all gradients before it updates: refused by name, or left out with one line."""
    with pytest.raises(UpdatesInBackwardError, match="max_grad_norm"):
        train([callback(optimizer_in_backward="always")])
    agrees(options={"optimizer_in_backward": "auto", "verbose": True})
    assert said.taken().count("parameters are updated after backward, as usual: Trainer reads all gradients") == 1


@pytest.mark.parametrize(
    ("name", "value", "text"), [("n_gpu", 2, "CUDA_VISIBLE_DEVICES"), ("deepspeed", "ds.json", "DeepSpeed")]
)
def test_refused(name: str, value: Any, text: str) -> None:
    class Args:
        n_gpu, deepspeed, deepspeed_plugin = 1, None, None

    setattr(Args, name, value)
    with pytest.raises(UnsupportedError, match=text):
        callback().on_train_begin(Args(), None, None)


def test_copied_and_pickled() -> None:
    """A copy of a callback has its options, and no run."""
    mine = callback()
    train([mine])
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert other.config == mine.config and other.run is None


class Lengths(Dataset[dict[str, Any]]):
    """Texts of five lengths."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        ids = torch.arange(8 + 4 * (index % 5)) * (index + 1) % 60 + 1
        return {"input_ids": ids, "labels": ids, "length": len(ids)}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest sample."""
    ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    return {"input_ids": ids, "labels": torch.where(ids > 0, ids, -100), "attention_mask": (ids > 0).long()}


def test_lengths_that_vary() -> None:
    """Batches of similar lengths (group_by_length), padded: the same bits."""
    name = "train_sampling_strategy" if hasattr(arguments(), "train_sampling_strategy") else None
    grouped = {name: "group_by_length"} if name else {"group_by_length": True}
    options = dict(data=Lengths(), collate=padded, max_steps=20, remove_unused_columns=False, **grouped)
    mine = callback()
    assert_same(train(**options), train([mine], **options))
    assert mine.status().phase == "planned"
