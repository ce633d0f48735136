"""Batch finders on a device of limited size: ours, Lightning's, Accelerate's; and what a plan makes of the same bytes.

`python -m benchmarks batch_size` writes `benchmarks/results/batch_size.json`. The device is enforced op by op: torch's own
out-of-memory error is raised when live bytes would pass the limit (`tests/cpu/lib/limits.py`). It does not see what ops take on
their way (workspaces of convolutions), the allocator's events do, and so do we: `true_largest` is by both, `.._of_device` by
the device alone, which is all that the others run into. Each finder is held against its own loop: a Trainer frees gradients
after the forward, a plain loop before it, so it can do more.
Samples a second are *predicted*, from ops timed on this machine. Echo's four models at a fraction of their size; recurrent
layers are loops over cells.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.lib.paths import RESULTS
from benchmarks.models.recurrent import deepspeech2, nmt, resnet, transformer
from lightning_memopt import MemOptBatchScaler, find_max_batch_size
from lightning_memopt.batching import BatchSizeResult
from lightning_memopt.session.measure.peak_meter import StepMeter
from lightning_memopt.session.observe.resident import resident_nbytes, resident_tensors
from tests.cpu.lib.limits import Device

CPU = torch.device("cpu")
FILE = RESULTS / "batch_size.json"
SAMPLES = 180
LIMIT_OF = 60
"""The device holds what a batch of this many samples takes in a plain loop, by the allocator."""
START = 2
"""The size that finders begin with, where they begin with a small one."""

MODELS: dict[str, Callable[[int], Any]] = {
    "LSTM-NMT": lambda n: nmt(time=6, batch=n, width=32),
    "DeepSpeech2": lambda n: deepspeech2(frames=24, batch=n, width=16, layers=2),
    "Transformer": lambda n: transformer(layers=2, batch=n, time=12, width=48),
    "ResNet": lambda n: resnet((1, 2, 2, 1), batch=n, width=16),
}


class Rows(Dataset):  # type: ignore[type-arg]
    """Samples of a batch."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {k: v[i] for k, v in self.batch.items()}


class Module(pl.LightningModule):
    """A model and its loader, with the attribute that Lightning's finder sets. `steps` counts training steps."""

    def __init__(self, build: Callable[[int], Any], data: Rows) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: nn.Module = build(2)[0]
        self.data, self.batch_size, self.steps = data, START, 0

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.steps += 1
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, self.batch_size, shuffle=True, drop_last=True)


class AtStart(pl.Callback):
    """What there is when training really starts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.steps, self.size = module.steps, trainer.train_dataloader.batch_sampler.batch_size  # type: ignore[union-attr]
        self.weights = [p.detach().numpy().copy() for p in module.parameters()]  # not on the device
        self.generator = torch.get_rng_state()
        self.errors = ERRORS[0].errors if ERRORS else 0


class Metered(pl.Callback):
    """The peak of the second step, by the allocator."""

    peak_nbytes: int | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.meter = _meter(module, trainer.optimizers[0], batch)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.peak_nbytes = self.meter.close()


def _meter(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> StepMeter:
    resident = resident_nbytes(resident_tensors(model, [optimizer], batch), CPU)
    return StepMeter(CPU, resident, [p.grad for p in model.parameters() if p.grad is not None])


ERRORS: list[Device] = []


def _trainer(callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=tempfile.gettempdir(), accelerator="cpu", max_steps=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, **options,
    )  # fmt: skip


def _fit(
    build: Any, data: Rows, limit: int, finder: pl.Callback | None, size: int = START, accumulate: int = 1
) -> dict[str, Any]:
    """Find, then train two steps at what was found, all on the device."""
    module, start = Module(build, data), AtStart()
    module.batch_size = size
    trainer = _trainer([*([finder] if finder is not None else []), start], accumulate_grad_batches=accumulate)
    torch.manual_seed(1)
    failed = ""
    with Device(limit, [module]) as device:
        ERRORS[:] = [device]
        try:
            trainer.fit(module)
        except Exception as error:
            failed = f"{type(error).__name__}: {str(error)[:80]}"
    found: dict[str, Any] = {"out_of_memory_raised": device.errors}
    if not hasattr(start, "size"):
        return found | {"size": None, "failed": failed}
    return found | {
        "size": start.size, "training_steps_run": start.steps, "out_of_memory_raised": start.errors,
        "out_of_memory_in_training_after": device.errors - start.errors, "failed": failed,
        "weights": start.weights, "generator": start.generator,
    }  # fmt: skip


def _against(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """With tensors replaced by whether they are those of a run without a finder."""
    if "weights" in found:
        weights = zip(found.pop("weights"), plain["weights"], strict=True)
        found["weights_untouched"] = all(bool((a == b).all()) for a, b in weights)
        found["generator_untouched"] = torch.equal(found.pop("generator"), plain["generator"])
    return found


def _accelerate(build: Any, data: Rows, limit: int) -> dict[str, Any]:
    """As in its documentation: the decorated function makes the loader; here it takes two steps with it."""
    torch.manual_seed(0)
    model = build(2)[0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    steps, generator = [0], torch.get_rng_state()

    @find_executable_batch_size(starting_batch_size=SAMPLES)
    def train(batch_size: int) -> int:
        loader = iter(DataLoader(data, batch_size, shuffle=True, drop_last=True))
        for _ in range(2):
            steps[0] += 1
            model(**next(loader, None) or next(iter(DataLoader(data, batch_size)))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    with Device(limit, [model]) as device:
        size = train()
    return {
        "size": size, "training_steps_run": steps[0], "out_of_memory_raised": device.errors,
        "weights_untouched": all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True)),
        "generator_untouched": torch.equal(generator, torch.get_rng_state()),
    }  # fmt: skip


class Plain:
    """A model in a plain loop."""

    def __init__(self, build: Any, data: Rows) -> None:
        torch.manual_seed(0)
        self.model, self.data = build(2)[0], data
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def make(self, size: int) -> dict[str, Tensor]:
        return {k: v[:size].clone() for k, v in self.data.batch.items()}

    def step(self, batch: dict[str, Tensor]) -> None:
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self, size: int) -> int:
        with Device(1 << 40, [self.model]) as device:
            for _ in range(2):
                self.step(self.make(size))
        return device.peak_nbytes

    def allocated(self, size: int) -> int:
        """The peak of the second of two steps, by the allocator."""
        self.step(self.make(size))
        batch = self.make(size)
        meter = _meter(self.model, self.optimizer, batch)
        self.step(batch)
        found = meter.close()
        assert found is not None
        return found

    def find(self, limit: int, start: int, **options: Any) -> BatchSizeResult:
        return find_max_batch_size(
            self.step, self.make, self.model, self.optimizer, budget=limit, start=start, max_size=SAMPLES, **options
        )

    def fits(self, size: int, limit: int) -> bool:
        """In the steady state: the second of two steps, too."""
        try:
            with Device(limit, [self.model]):
                for _ in range(2):
                    self.step(self.make(size))
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad()
            return False
        return True


def _ours(found: BatchSizeResult) -> dict[str, Any]:
    return {
        "training_steps_run": found.profile_steps + found.trial_steps,
        "profile_steps": found.profile_steps,
        "trial_steps": found.trial_steps,
    }


def _largest(fits: Callable[[int], bool], near: int) -> int:
    """The size that fits while the next one does not, by running both: what fits is an interval."""
    while not fits(near):
        near -= 1
    while fits(near + 1):
        near += 1
    return near


def _in_trainer(build: Any, data: Rows, limit: int) -> dict[str, Any]:
    """Finders of a Trainer, batches of one update each; then ours with the samples of an update kept."""
    reference = _fit(build, data, 1 << 40, None)

    def trains(size: int, accumulate: int = 1) -> bool:
        found = _fit(build, data, limit, None, size, accumulate)
        return not found["failed"] and not found["out_of_memory_raised"] + found["out_of_memory_in_training_after"]

    def allocates(size: int) -> bool:
        metered = Metered()
        _fit(build, data, 1 << 40, metered, size)
        assert metered.peak_nbytes is not None
        return metered.peak_nbytes <= limit and trains(size)

    mine = MemOptBatchScaler(budget=limit, keep_effective=False, verbose=False)
    row: dict[str, Any] = {"ours": _against(_fit(build, data, limit, mine), reference)}
    assert mine.result is not None, row
    row["ours"] |= _ours(mine.result)
    row |= {"true_largest": _largest(allocates, mine.result.size), "true_largest_of_device": _largest(trains, mine.result.size)}
    for mode in ("power", "binsearch"):
        row[f"lightning_{mode}"] = _against(_fit(build, data, limit, BatchSizeFinder(mode=mode)), reference)
    kept = MemOptBatchScaler(budget=limit, verbose=False)
    found = _fit(build, data, limit, kept, START, SAMPLES // START)
    assert kept.result is not None
    true = next(n for n in range(SAMPLES, 0, -1) if SAMPLES % n == 0 and trains(n, SAMPLES // n))
    row["ours_accumulated"] = {
        "samples_an_update": SAMPLES, "size": found["size"], "true_largest_divisor_of_device": true,
        "out_of_memory_raised": found["out_of_memory_raised"], "failed": found["failed"],
        "out_of_memory_in_training_after": found["out_of_memory_in_training_after"],
    } | _ours(kept.result)  # fmt: skip
    return row


def _in_plain_loop(build: Any, data: Rows, limit: int) -> dict[str, Any]:
    """Finders of a plain loop; then sizes with plans in the same bytes, from what fits without."""
    plain, unmodified = Plain(build, data), Plain(build, data)
    with Device(limit, [unmodified.model]) as device:
        bare = unmodified.find(limit, START, planned=False)
    row: dict[str, Any] = {"ours": {"size": bare.size, "out_of_memory_raised": device.errors} | _ours(bare)}
    row["true_largest"] = _largest(lambda size: plain.allocated(size) <= limit and plain.fits(size, limit), bare.size)
    row["true_largest_of_device"] = _largest(lambda size: plain.fits(size, limit), bare.size)
    row["accelerate"] = _accelerate(build, data, limit)
    for mode in ("largest", "throughput"):
        found = Plain(build, data).find(limit, bare.size, mode=mode, solver_seconds=2.0)
        row[f"planned_{mode}"] = {
            "size": found.size, "batch_multiple": found.size / bare.size,
            "samples_per_second_predicted": found.samples_per_second,
            "unmodified_samples_per_second_predicted": found.before_samples_per_second,
            "confirmed_peak_bytes": found.confirmed_peak_nbytes, "predicted_peak_bytes": found.predicted_peak_nbytes,
            "why": found.why,
        } | _ours(found)  # fmt: skip
    return row


def _row(name: str) -> dict[str, Any]:
    build = MODELS[name]
    torch.manual_seed(2)
    data = Rows(build(SAMPLES)[1])
    plain = Plain(build, data)
    plain.fits(START, 1 << 40)
    limit = max(plain.peak(LIMIT_OF), plain.allocated(LIMIT_OF))
    return {"limit_bytes": limit, "trainer": _in_trainer(build, data, limit), "plain": _in_plain_loop(build, data, limit)}


def main() -> None:
    """Rows of the models named, all by default; rows of others that are in the file stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    names: list[str] = parser.parse_args().models
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = json.loads(FILE.read_text())["models"] if FILE.exists() else {}
    for name in names or list(MODELS):
        rows[name] = _row(name)
        print(name, json.dumps(rows[name], indent=1), flush=True)
        versions = {"torch": torch.__version__, "lightning": pl.__version__}
        FILE.write_text(json.dumps({"versions": versions, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
