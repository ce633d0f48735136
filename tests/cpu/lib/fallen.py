"""Two ranks of each front, with gloo between them; one fails: `python -m tests.cpu.lib.fallen FOLDER [FRONT.FAULT ...]`.

Each case has processes of its own, which are forked after all imports. Rank r writes what it ended with, and what of us is left
then, into FOLDER/FRONT.FAULT.r.json. A rank that is killed writes nothing. Temporary files are made in FOLDER/FRONT.FAULT.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import distributed
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemOptDDPStrategy, MemOptModelParallelStrategy, optimize
from lightning_memopt.ranks import board, ranks
from lightning_memopt.session import times
from lightning_memopt.session.ranks import shared_plan
from lightning_memopt.session.solve import solving
from tests.cpu.lib import fits, sharded
from tests.cpu.lib.deciding_ranks import PATIENT_SECONDS
from tests.cpu.lib.forked import forked
from tests.cpu.lib.launched import SCRIPTS, free_port
from tests.cpu.lib.loops import batches, installed
from tests.cpu.lib.times import OfOps

STEPS, OBSERVED = 4, 2
KILLS = ("observing", "solving", "running")
"""What rank 1 does when it is killed."""
FAULTS = ("none", *KILLS, "raises", "infeasible")
TOO_SMALL = 200_000
TOGETHER = 4
"""Cases that run at the same time: the ranks that are left mostly wait."""
At = Callable[[int], None]


def options(fault: str) -> dict[str, Any]:
    budget: Any = "min"
    if fault == "infeasible":
        budget = TOO_SMALL if os.environ["RANK"] == "1" else "1GiB"
    return {"budget": budget, "profile_steps": OBSERVED, "solver_seconds": 0.2, "verbose": False}


def in_a_loop(fault: str, at: At) -> None:
    """FSDP2, and a plain loop."""
    model, optimizer = sharded.made(sharded.Case())
    with optimize(model, optimizer, **options(fault)):
        for i in range(STEPS):
            at(i)
            words = sharded.data(i, 0)
            functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


class _At(pl.Callback):
    def __init__(self, at: At) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at(trainer.global_step)


def fit(strategy: Any, task: pl.LightningModule, data: TensorDataset, at: At) -> None:
    usual = dict(devices=2, max_epochs=-1, max_steps=STEPS, callbacks=[_At(at)], gradient_clip_val=0.5)
    fits.trainer_of(strategy, **usual).fit(task, DataLoader(data, 16))


def in_ddp(fault: str, at: At) -> None:
    """Lightning's DDP, with tensors on a disk."""
    strategy = MemOptDDPStrategy(**options(fault), offload="disk", process_group_backend="gloo")
    fit(strategy, fits.Task(), TensorDataset(*batches(1, 32 * STEPS)[0]), at)


def in_fsdp2(fault: str, at: At) -> None:
    """Lightning's FSDP2, which clips gradients by a norm over all ranks."""
    words = torch.randint(0, sharded.WORDS, (32 * STEPS, sharded.LENGTH), generator=torch.Generator().manual_seed(1))
    strategy = MemOptModelParallelStrategy(**options(fault), process_group_backend="gloo")
    fit(strategy, sharded.Task(), TensorDataset(words), at)


def in_accelerate(fault: str, at: At) -> None:
    """A script of Accelerate, as the launchers run it."""
    from lightning_memopt.integrations.launch import main

    sys.interrupted_at = at  # type: ignore[attr-defined]
    flags = [f"--{name}={value}" for name, value in options(fault).items()]
    main([*flags, str(SCRIPTS / "interrupted.py")])


FRONTS: dict[str, Callable[[str, At], None]] = {
    "fsdp2": in_a_loop,
    "lightning_ddp": in_ddp,
    "lightning_fsdp2": in_fsdp2,
    "accelerate": in_accelerate,
}


CASES = tuple(f"{front}.{fault}" for fault in FAULTS for front in FRONTS)


def member(case: str, rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    board.BEAT_SECONDS, ranks.SILENT_SECONDS, ranks.LAST_WORDS_SECONDS = 0.2, PATIENT_SECONDS, PATIENT_SECONDS
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    tempfile.tempdir = str(folder / case)
    front, fault = case.split(".")
    if front != "accelerate":  # which makes its group itself
        distributed.init_process_group("gloo")
    forwards: list[int] = []

    def fails() -> None:
        (folder / f"{case}.failed").write_text(repr(time.time()))
        if fault == "raises":
            raise ValueError("the shard is empty")
        os.kill(os.getpid(), signal.SIGKILL)

    def at(step: int) -> None:
        forwards.append(step)
        if rank == 1 and step == {"observing": 1, "running": STEPS - 1, "raises": STEPS - 1}.get(fault):
            fails()

    if rank == 1 and fault == "solving":
        solving.plan_for = lambda *_: fails()  # type: ignore[assignment, return-value]
        shared_plan._sizes = lambda *_: fails()  # type: ignore[assignment, return-value]
    before, error = installed(), ""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FRONTS[front](fault, at)
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    ended = time.time()
    (folder / f"{case}.{rank}.ended").write_text("")
    until = ended + 30  # rank 0 has the store, and rank 1 may still leave
    while rank == 0 and fault not in KILLS and not (folder / f"{case}.1.ended").exists() and time.time() < until:
        time.sleep(0.05)
    left = [thread.name for thread in threading.enumerate() if "memopt" in thread.name]
    left += ["torch is not as before"] if installed() != before else []
    if rank == 0 and distributed.is_initialized():
        store = distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
        left += [key for key in store.list_keys() if "memopt" in key]
    (folder / f"{case}.{rank}.json").write_text(
        json.dumps({"error": error, "ended": ended, "forwards": len(forwards), "left": left, "pid": os.getpid()})
    )
    if distributed.is_initialized():
        distributed.destroy_process_group()


def main(folder: Path, cases: list[str]) -> int:
    """Returns how many processes hung, and were killed."""
    hung = 0
    while cases:
        now, cases = cases[:TOGETHER], cases[TOGETHER:]
        for case in now:
            (folder / case).mkdir()
        ports = {case: free_port() for case in now}
        members = [(case, rank, folder, ports[case]) for case in now for rank in range(2)]
        hung += forked(member, members, seconds=120).count(None)
    return hung


if __name__ == "__main__":
    times.current = OfOps()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(CASES)))
