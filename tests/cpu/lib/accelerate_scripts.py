"""The scripts of tests/cpu/accelerate/scripts, plainly and within a plan, in this process.

`accelerate launch --num_processes 2 -m tests.cpu.lib.accelerate_scripts FOLDER` does so in two processes. Each script
leaves what it ended with in FOLDER/NAME.plain.RANK and FOLDER/NAME.planned.RANK, each rank its facts in FOLDER/RANK.json.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import distributed

from lightning_memopt import MemOptConfig
from lightning_memopt.integrations import accelerate as front
from lightning_memopt.integrations.launch import run
from lightning_memopt.integrations.plain import Run
from lightning_memopt.session import times
from tests.cpu.lib.launched import SCRIPTS
from tests.cpu.lib.said import listening
from tests.cpu.lib.times import OfMachine

_LOOPS = ("gradient_accumulation", "checkpointing", "early_stopping", "multi_process_metrics", "cross_validation")
_WORDS = "gradient_accumulation_for_autoregressive_models"
_MODELS = ("nlp_example", "run_clm_no_trainer", "run_translation_no_trainer") if find_spec("transformers") else ()
TOGETHER = ("cv_example", *_MODELS[:1], *_LOOPS, "local_sgd", _WORDS, "ddp_comm_hook", "profiler", "tracking")
"""Scripts that run in two processes, too."""
EARLY = ("early_stopping", "multi_process_metrics")
"""Scripts that update parameters in backward, in several processes."""
NAMES = (*TOGETHER, *_MODELS[1:], "memory", "automatic_gradient_accumulation")


@contextlib.contextmanager
def _as_found() -> Iterator[None]:
    """What a script changes in its process is put back."""
    argv, path, main = sys.argv, sys.path[0], sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[0], sys.modules["__main__"] = argv, path, main


def result(name: str, output: Path, *arguments: str, **options: Any) -> tuple[list[Run], str]:
    """The runs of a script, within a plan where there are options of `MemOptConfig`, and what they said."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    runs: list[Run] = []
    close = Run.close

    def closed(self: Run) -> None:
        close(self)
        runs.append(self)

    front._process.always = MemOptConfig(**options) if options else None
    Run.close = closed  # type: ignore[method-assign]
    try:
        with _as_found(), contextlib.redirect_stdout(io.StringIO()), listening() as said:
            run(str(SCRIPTS / f"{name}.py"), ["--output", str(output), *arguments], False)
            front.end()
    finally:
        Run.close = close  # type: ignore[method-assign]
        front._process.always = None
    return runs, said.taken()


def both(name: str, folder: Path, *arguments: str, **options: Any) -> tuple[list[Run], str]:
    """The script plainly, and then within a plan; its runs, and what they said."""
    result(name, folder / f"{name}.plain", *arguments)
    return result(name, folder / f"{name}.planned", *arguments, **{"budget": "min", "profile_steps": 1} | options)


def _peaks(run: Run) -> list[int] | None:
    """The measured peak, the predicted one, and the budget; None where there was no plan."""
    status = run.status()
    if status.plan is None or status.measured_peak_nbytes is None:
        return None
    return [status.measured_peak_nbytes, status.plan.predicted.needed_nbytes, status.plan.budget_nbytes]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    times.current = OfMachine()
    front._install()
    facts = {}
    for name in TOGETHER:
        gc.collect()
        gc.freeze()  # each session collects garbage: not of all that was imported
        # a group that a script ends cannot be made again with the same store: only the last script ends it
        with patch.object(distributed, "destroy_process_group"):
            result(name, folder / f"{name}.plain")
        with patch.object(distributed, "destroy_process_group") if name != TOGETHER[-1] else contextlib.nullcontext():
            mode = "auto" if name in EARLY else "never"
            options: Any = {"budget": "min", "profile_steps": 1, "optimizer_in_backward": mode}
            runs, said = result(name, folder / f"{name}.planned", **options)
        plans = [r.plan.predicted.rebuilt_ops if r.plan is not None else -1 for r in runs]
        facts[name] = {"plans": plans, "tables": said.count("measured peak"), "peaks": [_peaks(r) for r in runs]}
        facts[name]["early"] = [len(r.session._early.early) for r in runs if r.session._early is not None]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
