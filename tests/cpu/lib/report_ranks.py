"""Two ranks with gloo between them that ask for a report at one path: `python -m tests.cpu.lib.report_ranks FOLDER`. Rank r
writes the measured peak of its runs into FOLDER/r.json; the reports are in FOLDER/CASE.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt import optimize
from tests.cpu.lib.forked import failed, forked
from tests.cpu.lib.pages import Blocks

WORLD, STEPS = 2, 6
OPTIONS: dict[str, Any] = dict(budget="min", profile_steps=2, solver_seconds=0.5, verbose=False)


class Broke(Exception):
    """Rank 1 raises it."""


def together(rank: int) -> nn.Module:
    """One model on both ranks."""
    return DistributedDataParallel(Blocks())


def apart(rank: int) -> nn.Module:
    """A model of each rank's own, without a wrapper."""
    return Blocks()


def groups(rank: int) -> nn.Module:
    """A process group for each rank, with a model in it."""
    both = [distributed.new_group([r]) for r in range(WORLD)]
    return DistributedDataParallel(Blocks(), process_group=both[rank])


CASES: dict[str, Callable[[int], nn.Module]] = {"together": together, "apart": apart, "groups": groups, "fails": together}


def train(case: str, rank: int, page: Path) -> int | None:
    """The peak that the allocator measured."""
    model = CASES[case](rank)
    optimizer = torch.optim.Adam(model.parameters())
    with contextlib.suppress(Broke, RuntimeError), optimize(model, optimizer, report=page, **OPTIONS) as run:
        for i in range(STEPS):
            if case == "fails" and rank == 1 and i == STEPS - 1:
                raise Broke("in the last step")
            model(torch.randn(64 + 16 * rank, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.status().measured_peak_nbytes


def rank(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), WORLD)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
    peaks = {}
    for case in CASES:
        (folder / case).mkdir(exist_ok=True)
        peaks[case] = train(case, number, folder / case / "run.html")
    (folder / f"{number}.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    sys.exit(failed(forked(rank, [(number, Path(sys.argv[1])) for number in range(WORLD)], seconds=200)))
