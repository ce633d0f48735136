"""The memory of one training step over time, in the logger of a Trainer: as a picture or, if that is not possible, as numbers.

TensorBoard, and loggers with the same `add_image`: an image. Weights & Biases: an image by `log_image`. A logger with a folder
(`CSVLogger`): `memory_timeline_STEP.csv` in that folder, and a PNG next to it if matplotlib is installed.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_memopt.errors import MissingExtraError, UnsupportedError, needing
from lightning_memopt.session import RunStatus
from lightning_memopt.telemetry.sampling import Sample, Sampler

TAG = "memopt/memory_timeline"
EVERY = 200
"""Default number of steps between two timelines."""
_MIB = 2**20


class Timeline:
    """Samples the first planned step and then every `every`-th step, and writes them to the loggers.

    Args:
        every: number of steps.
        attempt: calls a function, and warns under a name if it raises an error.
    """

    def __init__(self, every: int, attempt: Callable[[str, Callable[[], object]], None]) -> None:
        self.every, self._attempt = every, attempt
        self._sampler: Sampler | None = None
        self._planned = False

    def begins(self, device: torch.device, step: int, planned: bool) -> None:
        """A batch begins. `step`: number of the step that it belongs to; `planned`: whether a plan is in force."""
        wanted = step % self.every == 0 or (planned and not self._planned)
        if self._sampler is None and wanted and step:
            self._planned |= planned
            self._sampler = sampler = Sampler(device)
            if not sampler.available:
                self._attempt("the memory timeline", _refuse)

    def ended(self, loggers: Sequence[Any], step: int, status: RunStatus) -> None:
        """The step is over: write it, if it was sampled."""
        samples = self.stop()
        if not samples:
            return
        for logger in loggers:
            name = f"{type(logger).__name__}: the memory timeline"
            self._attempt(name, partial(write, logger, samples, step, status))

    def stop(self) -> list[Sample]:
        """Stop sampling. Returns the samples of the step that was being sampled; empty if none was."""
        sampler, self._sampler = self._sampler, None
        return sampler.stop() if sampler is not None else []


def _refuse() -> None:
    raise UnsupportedError("nothing counts the bytes of this device. On the CPU, use a strategy of MemOpt, which counts them.")


def write(logger: Any, samples: Sequence[Sample], step: int, status: RunStatus) -> None:
    """Give the timeline of a step to a logger. One that takes neither images nor files gets the peak as a number.

    Raises MissingExtraError if the logger takes images and matplotlib is not installed.
    """
    if hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image(key=TAG, images=[picture(samples, step, status)], step=step)
    elif hasattr(logger.experiment, "add_image"):  # TensorBoard
        logger.experiment.add_image(TAG, picture(samples, step, status), step, dataformats="HWC")
    elif folder := getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None):
        _write_files(Path(folder), samples, step, status)
    else:
        logger.log_metrics({f"{TAG}/peak_bytes": float(max(sample.nbytes for sample in samples))}, step=step)


def _write_files(folder: Path, samples: Sequence[Sample], step: int, status: RunStatus) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"memory_timeline_{step}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("seconds", "bytes"))
        rows.writerows((f"{sample.seconds:.6f}", sample.nbytes) for sample in samples)
    try:
        figure = _drawn(samples, step, status)
    except MissingExtraError:
        return  # the numbers have been written
    figure.savefig(path.with_suffix(".png"), dpi=90)


def picture(samples: Sequence[Sample], step: int, status: RunStatus) -> np.ndarray:
    """The timeline as pixels: shape (height, width, 3), uint8. Raises MissingExtraError without matplotlib."""
    canvas = _drawn(samples, step, status).canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _drawn(samples: Sequence[Sample], step: int, status: RunStatus) -> Any:
    with needing("bench", "Pictures need"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5))
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    ax.step([1e3 * s.seconds for s in samples], [s.nbytes / _MIB for s in samples], where="post", linewidth=1, label="measured")
    lines = {
        "budget": (status.budget_nbytes, "k--"),
        "predicted peak": (status.predicted_peak_nbytes, "C1:"),
        "unmodified peak": (status.unmodified_peak_nbytes, "C3:"),
    }
    for label, (nbytes, style) in lines.items():
        if nbytes is not None:
            ax.plot([0, 1e3 * samples[-1].seconds], [nbytes / _MIB] * 2, style, linewidth=1, label=label)
    ax.set(xlabel="ms", ylabel="MiB in memory", title=f"Step {step}", ylim=(0, None))
    ax.legend(fontsize=8, ncols=4, loc="lower center")
    ax.grid(alpha=0.3)
    figure.tight_layout()
    return figure
