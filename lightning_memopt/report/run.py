"""Write the report of a run when the run ends: the page, and the record next to it.

A front makes a `RunReport` before anything runs, which raises an error for a path that cannot be written. At the end the front
has it written, even if an exception ended the run. An error in writing the report is only a warning: it neither ends a training
nor hides the exception that did.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_memopt import files
from lightning_memopt.config import MemOptConfig
from lightning_memopt.device.backends import backend_of
from lightning_memopt.errors import ConfigError
from lightning_memopt.ranks import rank_and_ranks, rank_in_all
from lightning_memopt.report.frontier import rows
from lightning_memopt.session import RunStatus, Session
from lightning_memopt.telemetry import Meter

if TYPE_CHECKING:
    from lightning_memopt.report.record import RunRecord

_open: weakref.WeakSet[RunReport] = weakref.WeakSet()
"""Paths of reports that will be written, so that two runs that are open together write two pages."""


def check_target(path: str | os.PathLike[str]) -> Path:
    """The absolute path. Raises ConfigError, before training rather than after it, if no file could be written there."""
    target = Path(path).expanduser().absolute()
    for file in (target, target.with_suffix(".json")):
        try:
            files.check_target(file)
        except OSError as error:
            why = files.reason(error)
            raise ConfigError(f"report: {file} cannot be written: {why}; give the path of another page") from None
    return target


class RunReport:
    """The report that one run will write. Raises ConfigError for a path that cannot be written.

    As a context manager, it writes the report when the block ends, with or without an exception.

    Of the ranks that train a model together, only the first one writes. If that is not rank 0, the file is `run-rank2.html`.

    path: path of the page; None if no page is wanted, on all ranks except the first, and after it was written.
    """

    def __init__(self, config: MemOptConfig, model: nn.Module) -> None:
        self.path: Path | None = None
        self._run: tuple[Session, Callable[[], RunStatus], Callable[[], Meter | None]] | None = None
        if config.report is None:
            return
        wanted = check_target(config.report)
        self._rank, ranks = rank_and_ranks(model)
        self._ranks = len(ranks)
        if self._rank != ranks[0]:
            return
        if self._rank:
            wanted = wanted.with_name(f"{wanted.stem}-rank{self._rank}.html")
        taken = {report.path for report in _open}
        free = (wanted if n == 1 else wanted.with_name(f"{wanted.stem}-{n}.html") for n in itertools.count(1))
        self.path = next(path for path in free if path not in taken)
        _open.add(self)

    def begins(self, session: Session, status: Callable[[], RunStatus], meter: Callable[[], Meter | None]) -> None:
        """The run begins; without a run, nothing is written. `status`, `meter`: return the run's status and meter at its
        end.
        """
        if session.enabled:
            self._run = session, status, meter

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.write(error)

    def write(self, error: BaseException | None = None) -> None:
        """Write page and record, once. `error`: what ended the run, if the session was not told."""
        run, path = self._run, self.path
        self._run = self.path = None
        if run is None or path is None or sys.is_finalizing():
            return
        if rank_in_all() > self._rank:  # the run began before there were ranks
            return
        session, status, meter = run
        if error is not None:
            session.history.ended_by(error)
        else:
            session.history.ends(handled=False)
        try:
            from lightning_memopt.report.page import write_page  # only runs that write a page need it

            record = record_of(session, status(), meter(), self._rank, self._ranks)
            write_page(path, record)
            record.write(path.with_suffix(".json"))
        except Exception as failed:
            warnings.warn(
                f"MemOpt: the report {path} could not be written: {''.join(traceback.format_exception_only(failed)).strip()}. "
                "The run itself is not affected.",
                stacklevel=2,
            )
        else:
            session.say(f"MemOpt: report written to {path}")


def record_of(session: Session, status: RunStatus, meter: Meter | None = None, rank: int = 0, ranks: int = 1) -> RunRecord:
    """The record of a run as it is now. `rank`, `ranks`: this process, and the number that train the model together."""
    from lightning_memopt.report.record import Arena, RunRecord

    device = session.device
    return RunRecord(
        phase=status.phase,
        rank=rank,
        ranks=ranks,
        model=type(session.model).__name__,
        device=backend_of(device).name,
        torch=str(torch.__version__),
        reason=status.reason or "",
        remedy=status.remedy or "",
        error=session.history.error,
        compiled=status.compiled or "",
        budget_nbytes=status.budget_nbytes,
        measured_peak_nbytes=status.measured_peak_nbytes,
        replans=status.replans,
        deviates=status.deviates,
        checkpointed=status.checkpointed,
        plan=status.plan,
        graph=status.graph if status.plan is not None else session.observed_graph,
        frontier=tuple(rows(status.frontier)),
        steps=session.history.entries,
        rates=status.rates,
        transfers=session.transfers(),
        pool=None if status.pool is None else Arena.of(status.pool),
        throughput=None if meter is None else meter.rates(),
        before=None if meter is None else meter.before,
    )
