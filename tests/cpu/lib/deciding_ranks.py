"""Groups of real processes with gloo between them, for tests of decisions and failures.

`python -m tests.cpu.lib.deciding_ranks FOLDER [CASE ...]`: each case has processes of its own, forked after all imports.
Rank r of a case writes its outcome into FOLDER/CASE.r.json. A process that is killed writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers would import it in each process
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightning_memopt import optimize
from lightning_memopt.ranks import board, ranks
from lightning_memopt.session import times
from lightning_memopt.session.ranks import shared_plan
from lightning_memopt.session.solve import solving
from lightning_memopt.trace import count_all
from tests.cpu.lib.forked import forked
from tests.cpu.lib.launched import free_port
from tests.cpu.lib.process import digest
from tests.cpu.lib.times import OfOps

STEPS = 8
PATIENT_SECONDS = 3.0
TOGETHER = 4
"""Cases that run at the same time: the ranks that are left mostly wait."""
Hook = Callable[[int, str], None]


def model_of() -> nn.Module:
    """No buffers: in `Join`, DDP would have to send them."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def train(
    budget: Any,
    hook: Hook = lambda i, at: None,
    rows: int = 64,
    steps: int = STEPS,
    accumulate: int = 1,
    joined: bool = False,
    **options: Any,
) -> Any:
    """A loop of this rank; None for the budget: without us. Returns what it ended with."""
    rank = distributed.get_rank()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(5 + rank)
    losses = []
    with contextlib.ExitStack() as stack:
        run = None
        if budget is not None:
            run = stack.enter_context(optimize(model, optimizer, budget=budget, verbose=False, **options))
        if joined:
            stack.enter_context(Join([model]))
        for i in range(steps):
            hook(i, "forward")
            for part in range(accumulate):
                x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(100 * i + 10 * part + rank))
                with model.no_sync() if part + 1 < accumulate else contextlib.nullcontext():
                    loss = model(x).square().mean()
                    loss.backward()
            hook(i, "update")
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    status = None if run is None else run.status()
    plan = None if status is None else status.plan
    return {
        "state": digest(model.state_dict(), optimizer.state_dict(), losses),
        "weights": [p.double().sum().item() for p in model.parameters()],
        "rebuilt": None if plan is None else plan.predicted.rebuilt_ops,
        "lives": None if plan is None else repr(plan.lives),
        "predicted": None if plan is None else plan.predicted.needed_nbytes,
        "measured": None if status is None else status.measured_peak_nbytes,
        "budget": None if plan is None else plan.budget_nbytes,
    }


def exact(**options: Any) -> dict[str, Any]:
    """The plain run, and the same one within the smallest plan."""
    return {"plain": train(None, **options), "planned": train("min", **options)}


def counted_before() -> dict[str, Any]:
    """The counter knows DDP's buckets before the run, as it does in the second run of a process."""
    count_all(print)
    planned = train("min", profile_steps=2)
    return {"plain": train(None), "planned": planned}


def killed(step: int, victim: int = 1) -> Any:
    """A rank is killed before a forward."""

    def hook(i: int, at: str) -> None:
        if distributed.get_rank() == victim and (i, at) == (step, "forward"):
            os.kill(os.getpid(), signal.SIGKILL)

    return train("min", hook)


def killed_while_solving(victim: int) -> Any:
    def kill(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if distributed.get_rank() == victim:
        solving.plan_for = kill  # type: ignore[assignment]
        shared_plan._sizes = kill  # type: ignore[assignment]
    return train("min")


def raises() -> Any:
    def hook(i: int, at: str) -> None:
        if distributed.get_rank() == 1 and (i, at) == (STEPS - 2, "forward"):
            raise ValueError("the shard is empty")

    return train("min", hook)


def infeasible(nbytes: int) -> Any:
    """One rank's budget is too small; the other one has plenty. The error is caught, and both go on plainly."""
    updated: list[int] = []
    caught = ""
    try:
        train(nbytes if distributed.get_rank() == 1 else "1GiB", lambda i, at: updated.append(i) if at == "forward" else None)
    except Exception as error:
        caught = f"{type(error).__name__}: {error}"
    return {"caught": caught, "forwards": len(updated), "again": train("min")["weights"]}


def uneven() -> dict[str, Any]:
    steps = STEPS + 2 * distributed.get_rank()
    return exact(joined=True, steps=steps)


def without_a_run() -> Any:
    """Rank 1 has no run: rank 0 says so, and goes on by itself."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = train("min" if distributed.get_rank() == 0 else None)
    return outcome | {"plain": train(None)["state"], "said": [str(w.message) for w in said if "MemOpt" in str(w.message)]}


CASES: dict[str, tuple[int, Callable[[], Any]]] = {
    "same_shapes": (2, exact),
    "four": (4, exact),
    "other_shapes": (2, lambda: exact(rows=64 if distributed.get_rank() == 0 else 48)),
    "counted_before": (2, counted_before),
    "accumulated": (2, lambda: exact(accumulate=2)),
    "uneven": (2, uneven),
    "without_a_run": (2, without_a_run),
    "infeasible": (2, lambda: infeasible(300_000)),
    "hopeless": (2, lambda: infeasible(10_000)),
    "raises": (2, raises),
    "killed_observing": (2, lambda: killed(1)),
    "killed_running": (2, lambda: killed(STEPS - 2)),
    "killed_with_the_store": (2, lambda: killed(STEPS - 2, victim=0)),
    "killed_solving": (2, lambda: killed_while_solving(0)),
    "killed_following": (2, lambda: killed_while_solving(1)),
}
"""Number of ranks, and what each of them does."""


def member(name: str, rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    board.BEAT_SECONDS, ranks.SILENT_SECONDS, ranks.LAST_WORDS_SECONDS = 0.2, PATIENT_SECONDS, PATIENT_SECONDS
    size, case = CASES[name]
    if name == "killed_with_the_store":
        store: Any = distributed.TCPStore("127.0.0.1", port, size, rank == 0)
    else:
        store = distributed.FileStore(str(folder / f"{name}.store"), size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    began = time.monotonic()
    outcome: Any = None
    error = ""
    try:
        outcome = case()
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    seconds = time.monotonic() - began
    left = [] if error else _left(store, size)
    (folder / f"{name}.{rank}.json").write_text(
        json.dumps({"outcome": outcome, "error": error, "seconds": seconds, "left": left})
    )
    os._exit(0)  # a group in which a rank has failed cannot be ended in order


def _left(store: Any, size: int) -> list[str]:
    """Our keys in the store when all ranks are through, and our threads."""
    distributed.barrier()
    time.sleep(0.2)  # the last rank to leave clears the store
    keys = [key for key in store.list_keys() if "memopt" in key] if hasattr(store, "list_keys") else []
    return keys + [thread.name for thread in threading.enumerate() if "memopt" in thread.name]


def main(folder: Path, names: list[str]) -> int:
    hung = 0
    for at in range(0, len(names), TOGETHER):
        ports = {name: free_port() for name in names[at : at + TOGETHER]}
        members = [(name, rank, folder, port) for name, port in ports.items() for rank in range(CASES[name][0])]
        hung += forked(member, members, seconds=90).count(None)
    return hung


if __name__ == "__main__":
    times.current = OfOps()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(CASES)))
