"""A process that answers names with rows of JSON, one after the other, and counts what torch's allocator gives out."""

from __future__ import annotations

import gc
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.paths import ROOT
from benchmarks.robustness import loops_count

Row = dict[str, Any]
Done = Callable[[str, Row], None]


class Worker(threading.Thread):
    """Feeds `python -m module --worker` with names, and starts another process where one hangs or dies.

    `done` is told of every row. timeout: seconds for one name.
    """

    def __init__(self, module: str, names: queue.SimpleQueue[str], done: Done, timeout: float) -> None:
        super().__init__(daemon=True)
        self.module, self.names, self.done, self.timeout = module, names, done, timeout
        self._process: subprocess.Popen[str] | None = None

    def _ask(self, name: str) -> Row:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, "--worker"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=loops_count.environment(),
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(self.timeout, process.kill)
        late.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if line:
            row: Row = json.loads(line)
            return row
        self._process = None
        code = process.wait()
        hung = late.finished.is_set() and code == -9
        return {"status": "timeout" if hung else "crashed", "note": f"the process ended with {code}"}

    def run(self) -> None:
        while True:
            try:
                name = self.names.get_nowait()
            except queue.Empty:
                break
            self.done(name, self._ask(name))
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def work(examine: Callable[[str], Row]) -> None:
    """Read names, answer each with a line of JSON. What `examine` raises becomes a row."""
    torch.set_num_threads(1)
    gc.freeze()
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # models that print do not disturb
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        try:
            row = examine(line.strip())
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            row = {"status": "crashed", "note": note[:600], "traceback": traceback.format_exc()[-3000:]}
        print(json.dumps(row), file=out, flush=True)
        gc.collect()


def ask(module: str, names: Iterable[str], jobs: int, done: Done, timeout: float) -> None:
    """Ask `jobs` processes at a time."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        left.put(name)
    workers = [Worker(module, left, done, timeout) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
