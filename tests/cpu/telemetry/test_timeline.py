"""MemOptMonitor(timeline=...): the memory of a step over time, in each kind of logger."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_memopt import MemOptMonitor
from lightning_memopt.callbacks.timeline import TAG, picture
from lightning_memopt.errors import ConfigError
from lightning_memopt.session import RunStatus
from lightning_memopt.telemetry import sampling
from lightning_memopt.telemetry.sampling import Sample, Sampler
from lightning_memopt.trace.living import count_all
from tests.cpu.lib.fits import fit, memopt, outcome, session_of
from tests.cpu.lib.harness import same_bits

CPU = torch.device("cpu")


def test_the_sampler_sees_what_is_allocated() -> None:
    count_all(print)
    sampler = Sampler(CPU)
    assert sampler.available
    time.sleep(0.02)
    held = torch.ones(1 << 22)
    time.sleep(0.05)
    del held
    time.sleep(0.02)
    samples = sampler.stop()
    assert sampler.stop() == samples  # and nothing reads any more
    assert [s.seconds for s in samples] == sorted(s.seconds for s in samples)
    assert max(s.nbytes for s in samples) - samples[0].nbytes >= 4 << 22
    assert samples[-1].nbytes - samples[0].nbytes < 1 << 20


def with_logger(logger: Any, **options: Any) -> pl.Trainer:
    return fit(memopt(), callbacks=lambda: [MemOptMonitor(verbose=False, **options)], logger=logger)


def test_a_csv_logger_gets_numbers_and_a_picture_beside_it(tmp_path: Path) -> None:
    trainer = with_logger(CSVLogger(str(tmp_path), name="", version=""), timeline=4)
    steps = sorted(int(path.stem.rpartition("_")[2]) for path in tmp_path.glob("memory_timeline_*.csv"))
    assert {4, 8, 12} <= set(steps) and len(steps) == 4, steps  # and the first planned step
    peak = session_of(trainer).status().measured_peak_nbytes
    for step in steps:
        with open(tmp_path / f"memory_timeline_{step}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) > 1 and 0 < max(int(row["bytes"]) for row in rows) <= peak + (1 << 20)
        assert (tmp_path / f"memory_timeline_{step}.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_an_image(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with_logger(TensorBoardLogger(str(tmp_path)), timeline=5)
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    content = events.read_bytes()
    assert TAG.encode() in content and b"\x89PNG" in content


class Images(Logger):
    """A logger with the image call of Lightning's WandbLogger."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[tuple[str, list[np.ndarray], int]] = []

    name, version, experiment = "images", "0", None

    def log_image(self, key: str, images: list[np.ndarray], step: int | None = None) -> None:
        assert step is not None
        self.images.append((key, images, step))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def test_wandbs_call_gets_pixels_and_the_run_is_the_same() -> None:
    logger = Images()
    trainer = with_logger(logger, timeline=True)  # the first planned step alone: there are no 200
    ((key, (image,), step),) = logger.images
    assert key == TAG and step > 0 and image.dtype == np.uint8 and image.shape[2] == 3
    plain = fit("auto")
    assert all(same_bits(a, b) for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True))
    assert outcome(trainer).keys() == outcome(plain).keys()


class Failing(Images):
    def log_image(self, key: str, images: list[np.ndarray], step: int | None = None) -> None:
        raise OSError("no connection")


def test_a_logger_that_fails_ends_nothing() -> None:
    with pytest.warns(UserWarning, match="the memory timeline failed"):
        trainer = with_logger(Failing(), timeline=2)
    assert trainer.global_step == 14


def test_where_nothing_counts_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "counter_of", lambda device: None)
    with pytest.warns(UserWarning, match="the memory timeline failed.*nothing counts the bytes"):
        with_logger(Images(), timeline=2)


def test_without_the_option_nothing_is_sampled(tmp_path: Path) -> None:
    with_logger(CSVLogger(str(tmp_path), name="", version=""))
    assert not list(tmp_path.glob("memory_timeline*"))


def test_a_wrong_number_is_refused() -> None:
    for wrong in (-1, 2.5, "yes"):
        with pytest.raises(ConfigError, match="timeline is"):
            MemOptMonitor(timeline=wrong)  # type: ignore[arg-type]


def test_the_picture_has_the_budget() -> None:
    samples = [Sample(0.0, 1 << 20), Sample(0.01, 3 << 20), Sample(0.02, 1 << 20)]
    plain = picture(samples, 1, RunStatus(phase="planned"))
    marked = picture(samples, 1, RunStatus(phase="planned", budget_nbytes=2 << 20))
    assert plain.shape == marked.shape and (plain != marked).any()
