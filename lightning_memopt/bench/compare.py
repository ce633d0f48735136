"""Run a comparison of every model, method and budget. Prints a line of progress for each row, and writes files at the end."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_memopt import clocks
from lightning_memopt.bench import catalogue, tables
from lightning_memopt.bench.catalogue import Spec
from lightning_memopt.bench.results import Results, Rows
from lightning_memopt.bench.rows import Reference, Row, measured, said
from lightning_memopt.bench.subject import Subject, Training
from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import MemOptError
from lightning_memopt.logs import Say
from lightning_memopt.native import engine
from lightning_memopt.runtime import install_native


@dataclass(frozen=True)
class Asked:
    """What is compared.

    Args:
        models: names of models.
        methods: names of `catalogue.TITLES`.
        budgets: shares of what the unmodified step takes above the bytes that are in memory between steps: "40%".
        rounds: pairs of steps that are timed for a row.
        device: "cpu" or "cuda".
        threads: number of torch's threads on the CPU; 0: torch's default.
        solver_seconds: time limit of a solver.
    """

    models: tuple[str, ...]
    methods: tuple[str, ...] = catalogue.DEFAULT
    budgets: tuple[str, ...] = ("60%", "40%", "25%")
    rounds: int = 25
    device: str = "cpu"
    threads: int = 1
    solver_seconds: float = 30.0

    def as_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class Stopwatch:
    """Decides whether another row may begin. `limit_seconds`: time limit of the whole run; None: no limit."""

    def __init__(self, limit_seconds: float | None) -> None:
        self._ends = None if limit_seconds is None else clocks.monotonic() + limit_seconds
        self.left_out = 0

    def time_is_up(self) -> bool:
        up = self._ends is not None and clocks.monotonic() > self._ends
        self.left_out += up
        return up


class _Model:
    """The rows of one model, added as they are measured."""

    def __init__(self, name: str, build: Callable[[], Training], asked: Asked, results: Results, say: Say) -> None:
        self.name, self.build, self.asked, self.results, self.say = name, build, asked, results, say
        self.rows: Rows = results.rows(name)
        self.made: tuple[Subject, Reference] | None = None

    def built(self) -> tuple[Subject, Reference]:
        """The training, built when the first row needs it, and again after a row failed in it."""
        if self.made is None:
            subject = Subject(self.build, torch.device(self.asked.device))
            self.made = subject, Reference(subject)
        return self.made

    def run(self, stopwatch: Stopwatch) -> None:
        """Measure every row that was not measured yet, until the time is up."""
        if self.rows.get("unmodified", {}).get("state") != "measured":
            self.rows["unmodified"] = self._unmodified()
            self.results.write()
            self.say(tables.progress(self.name, 0, 0, "unmodified", self.rows["unmodified"]))
        if self.rows["unmodified"]["state"] != "measured":
            return
        options = self.asked.solver_seconds, self.rows["unmodified"]["peak_nbytes"]
        self._each(list(catalogue.others(self.asked.methods, self.asked.budgets)), stopwatch)
        self._each(list(catalogue.at_peaks(self.asked.methods, self.rows, *options)), stopwatch)  # most interesting, so first
        self._each(list(catalogue.within(self.asked.methods, self.asked.budgets, *options)), stopwatch)

    def _unmodified(self) -> Row:
        """The row of the unmodified step, with the reason if the training cannot be built, or its step fails."""
        try:
            subject, reference = self.built()
            return reference.row(subject)
        except MemOptError:
            raise
        except Exception as error:
            return {"method": "unmodified", "budget": "", "state": "failed", "reason": said(error)}

    def _each(self, specs: list[Spec], stopwatch: Stopwatch) -> None:
        for number, spec in enumerate(specs, 1):
            if spec.label in self.rows or stopwatch.time_is_up():
                continue
            subject, reference = self.built()
            with self.results.running(self.name, spec.label, spec.method, spec.budget):
                row = self.rows[spec.label] = measured(spec, subject, reference, self.asked.rounds)
            self.say(tables.progress(self.name, number, len(specs), spec.label, row))
            if row["state"] == "failed":  # it may have left hooks or memory on the model
                del subject, reference
                self.made = None


def run(
    asked: Asked,
    builders: dict[str, Callable[[], Training]],
    folder: Path,
    again: bool = False,
    limit_seconds: float | None = None,
    say: Say = print,
) -> Results:
    """Measure what is not in the folder's results yet, and write bench.json, bench.md, bench.svg and bench.png there.

    Args:
        builders: name of a model -> a function that builds its training.
        limit_seconds: no row begins later; a second run continues.
        say: prints a line of progress.

    Raises ConfigError if the file there has other arguments. An error in a row is noted in the row.
    """
    install_native(say)  # before the machine says whether it has the native engine
    results = Results(folder / "bench.json", asked.as_json(), machine(asked.device), again)
    stopwatch = Stopwatch(limit_seconds)
    with _settings(asked):
        for name in asked.models:
            _Model(name, builders[name], asked, results, say).run(stopwatch)
            write_out(results, say)
    if stopwatch.left_out:
        say(f"MemOpt: time is up: {stopwatch.left_out} rows or more are left; run the same command again to measure them")
    return results


def write_out(results: Results, say: Say) -> None:
    """Write tables and pictures of what was measured, next to the file of results."""
    results.path.with_suffix(".md").write_text(tables.page(results.data), encoding="utf-8")
    try:
        from lightning_memopt.bench import picture
    except ModuleNotFoundError as error:
        say(f"MemOpt: no pictures: {error}. pip install 'lightning-memopt[bench]'")
        return
    picture.draw(results.data, [results.path.with_suffix(suffix) for suffix in (".svg", ".png")])


def machine(device: str) -> dict[str, Any]:
    """The machine on which a comparison runs."""
    backend = backend_of(torch.device(device))
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "device": platform.machine() if backend.kind.is_host else backend.name,
        "native_engine": engine.loaded() is not None,
    }


@contextlib.contextmanager
def _settings(asked: Asked) -> Iterator[None]:
    """Within, use deterministic algorithms where there are any, and the given number of threads."""
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before, warn_only=warned)
